"""Scores of heads on needles: what was added up, and the role of those that pass the test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnscope.core.exact.multiple_tests import benjamini_hochberg
from attnscope.core.exact.running import RunningSums
from attnscope.corpus import Needle
from attnscope.records.ablation import Effect
from attnscope.records.heads.findings import Estimate, Head, Role
from attnscope.records.heads.needles import CopiedAt
from attnscope.studies.heads.options import RETRIEVAL, NeedleOptions, write_percent
from attnscope.studies.heads.roles import FEWEST_TEXTS, LEAST_MARGIN, LEAST_TEXTS, LEVEL, MARGIN

if TYPE_CHECKING:
    from attnscope.core.attention.probes import Place


@dataclass(frozen=True, eq=False)
class Seen:
    """What was seen on some needles.

    Attributes:
        written: Which tokens of the answers the model writes, (needle, token).
        finite: Whether all its scores are numbers, (needle,).
        keys: By place the key that each head gives most, (needle, head, token).
    """

    written: NDArray[np.bool_]
    finite: NDArray[np.bool_]
    keys: Mapping[Place, NDArray[np.int64]]


class NeedleScores:
    """What was added up over needles, (layer, head, measure)."""

    def __init__(self, options: NeedleOptions) -> None:
        self.names = options.measure_names
        self.n = self.n_tokens = 0
        self._places: list[Place] = []
        self._sums = self._uniform = RunningSums()
        self._written: dict[tuple[int, float], RunningSums] = {}
        self._n_heads: dict[int, int] = {}

    def add(self, needle: Needle, seen: Seen, row: int) -> None:
        """Adds a needle."""
        if not self._places:
            self._places = sorted(seen.keys)
            widest = max(seen.keys[place].shape[1] for place in self._places)
            self._n_heads = {place[1]: seen.keys[place].shape[1] for place in self._places}
            shape = len(self._places), widest, len(self.names)
            self._sums, self._uniform = RunningSums(shape), RunningSums(shape)
        written, n = seen.written[row], len(needle.places)
        s, c, u = (np.zeros(self._sums.shape) for _ in range(3))
        mine = self._columns(needle)
        # A key at random is one of those up to the query.
        chance = float((written / (len(needle) - n + np.arange(n))).sum())
        for number, place in enumerate(self._places):
            keys = seen.keys[place][row]
            there = slice(0, len(keys))
            copied = ((keys == needle.places) & written).sum(1)
            s[number][there, mine] = copied[:, None]
            s[number][there, 1] = ((keys == needle.decoys) & written).sum(1)
            c[number][there, mine] = c[number][there, 1] = n
            u[number][there, mine] = u[number][there, 1] = chance
        self._sums.add(s[None], c[None])
        self._uniform.add(u[None], c[None])
        at = self._written.setdefault((len(needle), needle.depth), RunningSums())
        at.add(np.array([float(written.sum())]), np.array([float(n)]))
        self.n, self.n_tokens = self.n + 1, self.n_tokens + len(needle)

    def _columns(self, needle: Needle) -> list[int]:
        mine = ["retrieval", f"retrieval_at_{write_percent(needle.depth)}", f"retrieval_in_{len(needle)}"]
        return [self.names.index(name) for name in mine if name in self.names]

    def copied(self) -> tuple[Effect, tuple[CopiedAt, ...]]:
        """What the model itself writes, on the whole and by length and depth."""
        every = RunningSums()
        for sums in self._written.values():
            every = every.merge(sums)
        order = sorted(self._written)
        return share_of_tokens(every), tuple(CopiedAt(*at, share_of_tokens(self._written[at])) for at in order)

    def heads(self, threshold: float) -> tuple[Head, ...]:
        """Every head with its scores, and with the role where it has passed the test."""
        values, counts, even = self._sums.ratio(), self._sums.total("c"), self._uniform.ratio()
        low, high = self._sums.share_interval(hits=True, dependence=1)
        baseline = np.fmax(values[..., 1], even[..., 0])
        limit = np.fmax(threshold, baseline + np.maximum(MARGIN * (1 - baseline), LEAST_MARGIN))
        texts = self._sums.effective_texts()[..., 0]
        p = self._sums.share_p_above(limit[..., None], hits=True, dependence=1)[..., 0]
        p = np.where(texts < LEAST_TEXTS, np.nan, p)
        q = benjamini_hochberg(p.ravel()).reshape(p.shape)
        made = []
        for at in np.ndindex(*p.shape):
            kind, layer = self._places[at[0]]
            if at[1] >= self._n_heads[layer]:
                continue
            columns = zip(*(array[at].tolist() for array in (values, low, high, even, counts)), strict=True)
            measures = {name: Estimate(*one) for name, one in zip(self.names, columns, strict=True)}
            roles: tuple[Role, ...] = ()
            if q[at] <= LEVEL:
                one, n_texts = measures["retrieval"], min(float(texts[at]), float(self.n))
                roles = (
                    Role(
                        RETRIEVAL, "retrieval", one.value, one.low, one.high, float(baseline[at]), threshold,
                        float(p[at]), float(q[at]), n_texts < FEWEST_TEXTS, effective_texts=float(texts[at]),
                    ),
                )  # fmt: skip
            made.append(Head(kind, layer, at[1], roles, float("nan"), measures))
        return tuple(made)


def share_of_tokens(sums: RunningSums) -> Effect:
    """A share of tokens; needles are the units, as one may be copied as a whole or not at all."""
    low, high = sums.share_interval(hits=True, dependence=1)
    return Effect(float(sums.ratio()), float(low), float(high), float(sums.total("c")))


def change_of_share(sums: RunningSums) -> Effect:
    """A difference of two shares of the same needles, from sums of (1 + difference) / 2, which is a share itself."""
    value, low, high = (2 * float(one) - 1 for one in (sums.ratio(), *sums.share_interval(dependence=1)))
    return Effect(value, low, high, float(sums.total("c")))
