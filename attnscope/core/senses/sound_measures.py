"""What heads of speech models do across: when each token listens, and whether that moves on from token to token.

Queries are the tokens of the transcript, without special ones. Keys are the frames of the encoder's whole window: first
sound, then the silence that fills the window up. Every measure is a sum and a count for each recording and head, as in
`core.measures`; a value is sum / count over all recordings. No map is kept: only three sums over frames per query.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from attnscope.core.attention.seam import AttentionCall
from attnscope.core.attention.tiles import Tile
from attnscope.core.catalogue import Measure
from attnscope.core.senses.sums import HeadSums, SenseSums

Floats = NDArray[np.float64]

SOUND_MEASURES: dict[str, Measure] = {
    measure.name: measure
    for measure in (
        Measure("monotonicity", "listens further on from token to token",
                     "Kendall's tau of the tokens' order and their times t_q: mean of sign(t_r - t_q) over pairs q < r "
                     "of a recording; mean over recordings", "rank correlation", -1, 1,
                     "ours; tau: Kendall 1938, Biometrika 30"),
        Measure("steps_forward", "seldom goes back from one token to the next",
                     "number of tokens q with t_(q+1) > t_q, half where they are equal / pairs of neighbours", "share",
                     0, 1, "ours"),
        Measure("sound", "attends to sound, not to the silence behind it",
                     "sum of a_q / tokens, a_q = sum of A_qk over frames k with sound", "share", 0, 1, "ours"),
        Measure("spread_seconds", "listens to a long stretch at once",
                     "sum of the standard deviation of time under A_qk / a_q / tokens", "seconds", 0, math.inf, "ours"),
    )
}  # fmt: skip
"""All sound measures by name. t_q = sum of A_qk (k + 1/2) s / a_q over frames k with sound, of s seconds each."""


@dataclass(frozen=True, eq=False)
class SoundFacts:
    """What measures must know of a recording.

    Attributes:
        asks: Which tokens of the transcript are queries, (token,), bool.
        n_sound: How many frames are sound.
        seconds_per_frame: How long a frame lasts.
    """

    asks: NDArray[np.bool_]
    n_sound: int
    seconds_per_frame: float


class SoundSums(SenseSums[SoundFacts, Floats]):
    """Adds up the measures of SOUND_MEASURES of cross-attention."""

    input_name = "recording"

    def _begin(self, call: AttentionCall) -> None:
        (batch, _, n_queries, _), n_keys = call.query.shape, call.key.shape[2]
        if batch != 1 or n_queries != len(self._facts.asks) or n_keys < self._facts.n_sound:
            raise ValueError(
                f"layer {call.layer} has {batch} recordings of {n_queries} tokens and {n_keys} frames; the facts are "
                f"of one of {len(self._facts.asks)} tokens and {self._facts.n_sound} frames"
            )
        self._columns = sound_columns(n_keys, self._facts)

    def _measure_uniform(self, call: AttentionCall) -> HeadSums:
        return self._conclude([np.broadcast_to(self._columns.mean(0), (1, call.query.shape[2], 3))])

    def _read_tile(self, tile: Tile) -> Floats:
        """Sums over frames of A_qk times `sound_columns`, (head, query, 3)."""
        weights = tile.weights[0]
        sums = weights @ torch.from_numpy(self._columns[tile.block.keys]).to(weights)
        return sums.cpu().double().numpy()

    def _conclude(self, parts: list[Floats]) -> HeadSums:
        return sound_sums(np.concatenate(parts, 1), self._facts)


def sound_columns(n_keys: int, facts: SoundFacts) -> Floats:
    """What is summed over frames, (frame, 3): 1, the time and its square, all 0 where there is no sound.

    Times are in seconds, from the middle of the sound, so that squares do not lose the digits of short spreads.
    """
    there = np.arange(n_keys) < facts.n_sound
    times = (np.arange(n_keys) + 0.5 - facts.n_sound / 2) * facts.seconds_per_frame
    return np.stack([there, times * there, times**2 * there], 1).astype(np.float64)


def sound_sums(sums_over_frames: Floats, facts: SoundFacts) -> HeadSums:
    """The measures of one recording, as SOUND_MEASURES, from the sums over frames of A_qk times `sound_columns`.

    A token that gives nothing to sound has no time: only `sound` counts it. The sums are (head, token, 3).
    """
    sums, counts = np.zeros((2, len(SOUND_MEASURES), len(sums_over_frames)))
    for head, rows in enumerate(np.asarray(sums_over_frames)[:, facts.asks]):
        share = rows[:, 0]
        sums[2, head], counts[2, head] = share.sum(), len(rows)
        heard = rows[np.isfinite(share) & (share > 0)]
        mean = heard[:, 1] / heard[:, 0]
        spread = np.sqrt(np.maximum(heard[:, 2] / heard[:, 0] - mean**2, 0))
        sums[3, head], counts[3, head] = spread.sum(), len(heard)
        signs = np.sign(mean[None, :] - mean[:, None])[np.triu_indices(len(mean), 1)]
        if len(mean) > 1:
            sums[0, head], counts[0, head] = signs.mean(), 1
            steps = np.sign(np.diff(mean))
            sums[1, head], counts[1, head] = (steps + 1).sum() / 2, len(steps)
    return HeadSums(sums, counts)
