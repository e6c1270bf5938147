"""Heads that do two things: one description for the queries of a class, and another for all other queries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnscope.studies.describe.rows import Group

if TYPE_CHECKING:
    from attnscope.core.questions.descriptions import Description
    from attnscope.core.questions.sampled_rows import Column, Part

Floats = NDArray[np.float64]
Search = Callable[["Part", Sequence[int]], "list[Description]"]
"""Describes some heads on some rows."""

LEAST_MORE = 0.05
"""Share of the nats that two descriptions must explain beyond one, on the fitted texts and on the scored ones."""

_ENTRIES_AT_ONCE = 2**21


@dataclass(frozen=True, eq=False)
class Mixture:
    """Two descriptions and the rule for which queries take which.

    Attributes:
        gate: The class of queries, one of `Group.gates`.
        sides: What the head does from these queries, and from all others.
    """

    gate: int
    sides: tuple[Description, Description]


def sides_of(group: Group, part: Part, gate: int) -> tuple[Part, Part]:
    """The rows of a part whose queries are in a gate, and the others."""
    from attnscope.core.questions.sampled_rows import Part

    assert group.active.gates is not None
    inside = group.active.gates[gate, part.index]
    return Part(group.active, part.index[inside]), Part(group.active, part.index[~inside])


def find_mixtures(
    group: Group,
    halves: tuple[Part, Part],
    active: Sequence[Description],
    search: Search,
    screened: Sequence[int],
    most: int,
    most_own: int,
) -> dict[int, Mixture]:
    """The heads that two descriptions explain better than one, by number.

    The class of queries is the one for which a feature says most beside the one description. A mixture is kept if it
    explains `LEAST_MORE` more of the nats of the scored texts, and the paired 95% interval over texts lies above 0.

    Args:
        group: The heads; their rows have the columns that are fitted to each.
        halves: The rows of the fitted texts, and of the scored ones.
        active: The head's one description, for all queries.
        search: Finds the terms of some heads.
        screened: The features by which classes of queries are chosen.
        most: The most terms of both descriptions together.
        most_own: The most of these that are fitted to the head alone.
    """
    from attnscope.core.questions.descriptions import Gain, compare_losses, row_losses

    fitted, scored = halves
    tried = _gates_to_try(fitted, active, screened)

    def compare(part: Part, head: int, sides: tuple[Part, Part], described: Sequence[Description]) -> Gain:
        """How much more of a part's nats two descriptions explain than one does."""
        left = np.zeros(len(group.active.texts))
        for side, of_side in zip(sides, described, strict=True):
            left[side.index] = row_losses(side, head, of_side)
        return compare_losses(part, head, row_losses(part, head, active[head]), left[part.index])

    mixtures: dict[int, Mixture] = {}
    for gate, heads in sorted(tried.items()):
        of_fitted, of_scored = (sides_of(group, part, gate) for part in halves)
        if not all(len(side.index) for side in (*of_fitted, *of_scored)):
            continue
        for head, *both in zip(heads, *(search(side, heads) for side in of_fitted), strict=True):
            described = _shorten(of_fitted, head, fitted, (both[0], both[1]), most, most_own)
            gains = compare(fitted, head, of_fitted, described), compare(scored, head, of_scored, described)
            if min(gain.share for gain in gains) >= LEAST_MORE and gains[1].low > 0:
                mixtures[head] = Mixture(gate, described)
    return mixtures


def _gates_to_try(part: Part, active: Sequence[Description], screened: Sequence[int]) -> dict[int, list[int]]:
    """The heads that may do something else from the queries of a gate, by the gate."""
    from attnscope.core.questions.gates import LEAST_MIXED, screen_gates

    tried: dict[int, list[int]] = {}
    at_once = max(1, _ENTRIES_AT_ONCE // max(1, part.size))
    for start in range(0, len(active) if part.size else 0, at_once):
        heads = range(start, min(len(active), start + at_once))
        p = np.empty((len(heads), part.size))
        for row, head in enumerate(heads):
            unscaled = part.unscaled(active[head].terms, active[head].weights, head)
            sums = np.add.reduceat(unscaled, part.first, dtype=np.float64)
            p[row] = unscaled * (part.weights[head] / np.maximum(sums, 1e-30))[part.row_of]
        for head, picked in zip(heads, screen_gates(part, heads, p, screened, LEAST_MIXED), strict=True):
            for gate, _ in picked[:1]:
                tried.setdefault(gate, []).append(head)
    return tried


def _shorten(
    sides: tuple[Part, Part],
    head: int,
    whole: Part,
    described: tuple[Description, Description],
    most: int,
    most_own: int,
) -> tuple[Description, Description]:
    """The first terms of two descriptions, as many as one may have, those that explain most."""
    from attnscope.core.questions.descriptions import refit

    weights = np.zeros(len(whole.rows.texts))
    weights[whole.index] = whole.weights[head]
    of_sides = [float(weights[side.index].sum()) for side in sides]
    n_terms, n_own = [0, 0], 0
    while sum(n_terms) < most:
        gains = [
            of_side * of.gains[n]
            if n < len(of.terms) and n_own + side.is_fitted(of.terms[n], head) <= most_own
            else 0.0
            for side, of, n, of_side in zip(sides, described, n_terms, of_sides, strict=True)
        ]
        if max(gains) <= 0:
            break
        at = int(np.argmax(gains))
        n_own += sides[at].is_fitted(described[at].terms[n_terms[at]], head)
        n_terms[at] += 1
    first, second = (
        replace(
            of, terms=of.terms[:n], gains=tuple(of_side * gain for gain in of.gains[:n]),
            weights=of.weights if n == len(of.terms) else refit(side, head, of.terms[:n])[0],
        )
        for side, of, n, of_side in zip(sides, described, n_terms, of_sides, strict=True)
    )  # fmt: skip
    return first, second


def with_mixtures(
    group: Group, active: Sequence[Description], mixtures: dict[int, Mixture]
) -> tuple[Group, list[Description]]:
    """Writes mixtures as descriptions for all queries: of terms that hold from some queries alone.

    The group comes back with these terms' columns.
    """
    if not mixtures:
        return group, list(active)
    whole = group.part(range(0))
    columns, described = list(group.active.columns), list(active)
    for head, mixture in mixtures.items():
        gated_terms: list[tuple[float, float, Column]] = []
        for is_other, side in enumerate(mixture.sides):
            for term, weight, gain in zip(side.terms, side.weights, side.gains, strict=True):
                gated = replace(whole.gated_column(mixture.gate, term, head, rank=0), is_other=bool(is_other))
                gated_terms.append((gain, float(weight), gated))
        gated_terms.sort(key=lambda term_and_gain: -term_and_gain[0])
        first = whole.n_shared + len(columns[head])
        columns[head] = (*columns[head], *(column for *_, column in gated_terms))
        described[head] = replace(
            active[head], terms=tuple(range(first, first + len(gated_terms))), runner_up=None,
            weights=np.array([weight for _, weight, _ in gated_terms]), gains=tuple(gain for gain, *_ in gated_terms),
        )  # fmt: skip
    return replace(group, active=replace(group.active, columns=tuple(columns))), described
