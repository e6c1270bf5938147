"""What heads do between words and pictures: how much of a word's attention goes to the picture, and how it lies there.

Queries are words after the picture; keys are all tokens, of which some stand for patches, or, in cross-attention, the
patches themselves. Every measure is a sum and a count for each picture and head, as in `core.measures`; a value is
sum / count over all pictures. Only the weights of one layer and of these queries are held at a time.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from attnscope.core.attention.seam import AttentionCall
from attnscope.core.attention.tiles import Tile
from attnscope.core.measures.catalogue import Measure
from attnscope.core.measures.totals import HeadSums
from attnscope.core.senses.sums import SenseSums

Floats = NDArray[np.float64]

LOOK_MEASURES: dict[str, Measure] = {
    measure.name: measure
    for measure in (
        Measure("looks", "gives its attention to the picture",
                "sum of a_q / words, a_q = sum of A_qk over all patches k", "share", 0, 1, "ours"),
        Measure("localised", "looks at one place of the picture",
                "sum of a_q max(0, 1 - s_q) / words, s_q = root mean square distance of patches from their mean place "
                "under A_qk, divided by that of uniform attention", "share", 0, 1,
                "ours, after Kang et al. 2025, arXiv 2503.06287"),
        Measure("picture_entropy_nats", "spreads over many patches",
                "sum of -sum p_k ln p_k / words, p_k = A_qk / its sum over the patches of the finest picture", "nats",
                0, math.inf, "Shannon 1948"),
        Measure("spatial_entropy_nats", "looks at several spots that do not touch",
                "sum of -sum P_c ln P_c / words, P_c = share of spot c in the mass of all spots; spots are connected "
                "patches (8 neighbours) that get the mean or more", "nats", 0, math.inf,
                "Kang et al. 2025, arXiv 2503.06287"),
        Measure("border", "rests on the border of the picture",
                "sum of sum p_k over patches at an edge / words", "share", 0, 1, "ours"),
        Measure("largest_patch", "puts much on one patch",
                "sum of the largest A_qk of a patch / words", "weight", 0, 1, "ours"),
        Measure("in_box", "looks into the box of what is named",
                "sum of sum p_k b_k / words, b_k = how much of patch k lies in the box", "share", 0, 1,
                "after Kang et al. 2025, arXiv 2503.06287"),
        Measure("grounds", "looks into the box more than its area says",
                "sum of (sum p_k b_k - mean b_k) / words", "share", -1, 1, "ours"),
    )
}  # fmt: skip
"""All measures between words and pictures by name; the finest picture is the one of most patches."""


@dataclass(frozen=True, eq=False)
class LookFacts:
    """What measures must know of a prompt.

    Attributes:
        n_tokens: Tokens of the prompt and of what was written; or keys of cross-attention to the picture.
        first: The first token after all patches.
        asks: Which queries from there on are the words in question, (query - first,), bool.
        cells: Positions of the tokens of the finest picture, (row, column).
        patches: Positions of the tokens of all pictures, (patch,).
        box: How much of each patch of the finest picture lies in the box that the words name, (row, column), 0 to 1;
            None = there is none.
        seen: Which keys the queries of cross-attention see at all, (key,), bool; None = they see all tokens up to
            themselves.
    """

    n_tokens: int
    first: int
    asks: NDArray[np.bool_]
    cells: NDArray[np.integer]
    patches: NDArray[np.integer]
    box: Floats | None = None
    seen: NDArray[np.bool_] | None = None

    @property
    def n_queries(self) -> int:
        """How many tokens attend."""
        return self.first + len(self.asks)


class LookSums(SenseSums[LookFacts, Floats]):
    """Adds up the measures of LOOK_MEASURES; uniform attention is over all tokens up to the query, or all keys seen."""

    input_name = "prompt"

    def _begin(self, call: AttentionCall) -> None:
        n, n_queries = self._facts.n_tokens, self._facts.n_queries
        if call.query.shape[0] != 1 or call.query.shape[2] != n_queries or call.key.shape[2] != n:
            raise ValueError(f"layer {call.layer} has {tuple(call.query.shape)} queries, the facts are of {n} tokens")

    def _measure_uniform(self, call: AttentionCall) -> HeadSums:
        facts = self._facts
        seen = np.arange(facts.n_tokens)[None] <= np.arange(facts.first, facts.n_queries)[:, None]
        if facts.seen is not None:
            seen = np.broadcast_to(facts.seen, seen.shape)
        return look_sums((seen / seen.sum(1, keepdims=True))[None], facts)

    def _read_tile(self, tile: Tile) -> Floats:
        """Weights of the queries after the patches on all keys, (head, query, key)."""
        weights = tile.weights[0, :, max(self._facts.first - tile.block.queries.start, 0) :]
        after = np.zeros((*weights.shape[:2], self._facts.n_tokens))
        after[..., tile.block.keys] = weights.cpu().double().numpy()
        return after

    def _conclude(self, parts: list[Floats]) -> HeadSums:
        return look_sums(np.concatenate(parts, 1), self._facts)


def look_sums(weights: Floats, facts: LookFacts) -> HeadSums:
    """The measures of one prompt, as LOOK_MEASURES.

    Weights are those of the tokens after the patches, (head, token - first, token). A word that gives nothing to the
    finest picture has no place: only `looks` and `largest_patch` count it.
    """
    sums, counts = np.zeros((2, len(LOOK_MEASURES), len(weights)))
    rows, columns = facts.cells.shape
    y, x = (at.ravel() for at in np.mgrid[:rows, :columns].astype(np.float64))
    even = math.sqrt(y.var() + x.var())
    edge = (y == 0) | (y == rows - 1) | (x == 0) | (x == columns - 1)
    cells = facts.cells.ravel()
    box = np.zeros(rows * columns) if facts.box is None else facts.box.ravel()
    for head, of_head in enumerate(weights[:, facts.asks]):
        share, on = of_head[:, facts.patches].sum(1), of_head[:, cells]
        total = on.sum(1)
        there = np.isfinite(total) & (total > 0)
        p = on[there] / total[there, None]
        mean_y, mean_x = p @ y, p @ x
        spread = np.sqrt(np.maximum(p @ y**2 - mean_y**2 + p @ x**2 - mean_x**2, 0)) / (even or 1.0)
        near = np.where(spread < 1 - 1e-9, 1 - spread, 0)
        entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(1)
        spots = [_spatial_entropy(shares.reshape(rows, columns)) for shares in p]
        values_of = (
            (share, share), (share[there] * near, near), (entropy, entropy), (spots, spots),
            (p[:, edge].sum(1), entropy), (of_head[:, facts.patches].max(1), share),
            (p @ box, () if facts.box is None else near), (p @ box - box.mean(), () if facts.box is None else near),
        )  # fmt: skip
        for number, (values, counted) in enumerate(values_of):
            sums[number, head], counts[number, head] = np.sum(values), len(counted)
    return HeadSums(sums, counts)


def _spatial_entropy(p: Floats) -> float:
    """Entropy over the spots of a picture: connected patches that get the mean or more."""
    spots, n = ndimage.label(p >= p.mean() * (1 - 1e-9), np.ones((3, 3), np.int64))
    mass = ndimage.sum_labels(p, spots, np.arange(1, n + 1))
    shares = mass / mass.sum()
    return float(-(shares * np.log(shares)).sum())
