"""Descriptions fitted to the heads of a group: of how much they rest, and of what they attend to when they do not."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnscope.studies.describe.english import CLOSED_CLASSES, OPEN_CLASSES, class_of
from attnscope.studies.describe.features import Feature
from attnscope.studies.describe.naming import TOO_WIDE
from attnscope.studies.describe.rows import Group, Unit
from attnscope.studies.heads.options import DescribeOptions

if TYPE_CHECKING:
    from attnscope.core.questions.descriptions import Description
    from attnscope.core.questions.sampled_rows import Part

MOST_OWN, MOST_SINK_TERMS = 3, 4
"""The most terms that are fitted to the head alone, and the most terms of where it rests."""


@dataclass(frozen=True, eq=False)
class Fitted:
    """The descriptions of a group's heads, with the columns that were fitted to each.

    Attributes:
        group: The group; its rows have the columns.
        active: The description of each head's attention on keys that are not resting.
        other_half: The first term of the same on the scored half.
        sinks: The description of how much each head rests, where and when.
        is_fitted: (active row,): whether its text is for fitting.
        matches: (head, row of sinks): how much there is to attend to, in nats; see `_matches`.
    """

    group: Group
    active: tuple[Description, ...]
    other_half: tuple[Description, ...]
    sinks: tuple[Description, ...]
    is_fitted: NDArray[np.bool_]
    matches: NDArray[np.float64]


def fit_group(group: Group, sample: Sequence[Unit], options: DescribeOptions) -> Fitted:
    """Fits both parts of the descriptions of a group's heads on the texts that are for fitting."""
    from attnscope.core.questions.descriptions import describe as find_terms
    from attnscope.core.questions.directions import columns_of, find_directions, gate_columns, match_column

    fitted, scored = halves_of(sample)
    x = _columns_of_types(group, fitted)
    candidates = _distinct(group)
    screened = [n for n in candidates if group.features[n].family != "from" and group.features[n].name not in TOO_WIDE]
    directions = find_directions(group.part(fitted), group.offsets, x, screened)
    columns = tuple(columns_of(of_head, group.part(fitted)) for of_head in directions)
    group = replace(group, active=replace(group.active, columns=columns))
    ranks, needs = [feature.rank for feature in group.features], _bases(group.features)

    def search(texts: Sequence[int], most: int) -> list[Description]:
        return find_terms(group.part(texts), ranks, most=most, candidates=candidates, needs=needs, most_own=MOST_OWN)

    active, other_half = search(fitted, options.most_terms), search(scored, 1)
    resting = group.sink_features.index(group.resting)
    whole = group.sinks.of_texts(fitted)
    matches = _matches(group, active)
    of_sinks = tuple(
        (gate, match_column(matches[head], whole.index, resting))
        for head, gate in enumerate(gate_columns(whole, x, resting))
    )
    group = replace(group, sinks=replace(group.sinks, columns=of_sinks))
    sink_ranks = [ranks[number] for number in group.sink_features]
    numbers = {number: at for at, number in enumerate(group.sink_features)}
    sink_needs = [numbers.get(needs[number], needs[number]) for number in group.sink_features]
    sinks = find_terms(group.sinks.of_texts(fitted), sink_ranks, most=MOST_SINK_TERMS, needs=sink_needs, most_own=2)
    is_fitted = np.isin(group.active.texts, fitted)
    return Fitted(group, tuple(active), tuple(other_half), tuple(sinks), is_fitted, matches)


def halves_of(sample: Sequence[Unit]) -> tuple[list[int], list[int]]:
    """The numbers of the texts that are for fitting, and of those that are for scoring."""
    fitted = [number for number, unit in enumerate(sample) if unit.fits]
    return fitted, [number for number, unit in enumerate(sample) if not unit.fits]


def _columns_of_types(group: Group, fitted: Sequence[int]) -> NDArray[np.float32]:
    """What is known of types: see `core.questions.directions.describe_types`."""
    from attnscope.core.questions.directions import describe_types

    part = group.part(fitted)
    assert part.rows.key_types is not None
    occurrences = np.bincount(part.rows.key_types[part.entries], minlength=len(group.types.ids))
    names = (*CLOSED_CLASSES, *OPEN_CLASSES)
    english = [class_of(label.strip("·Ġ▁ ").lower()) for label in group.types.labels]
    classes = [
        [not any(c.isalnum() for c in label), any(c.isdigit() for c in label), label.startswith("##")]
        + [own == name for name in names]
        for label, own in zip(group.types.labels, english, strict=True)
    ]
    more = np.concatenate([np.array(classes, np.float32), np.log1p(occurrences)[:, None] / 10], 1)
    return describe_types(group.types.embeddings, occurrences, more.astype(np.float32))


def _matches(group: Group, active: Sequence[Description]) -> NDArray[np.float64]:
    """(head, row of sinks): how much there is to attend to, the log of the mean exp(score) of free keys."""
    part = group.all_rows
    matches = np.zeros((len(active), len(group.sinks.texts)))
    for head, of_head in enumerate(active):
        mean = part.table(of_head.terms, head).log_sums(of_head.weights) - np.log(part.lengths)
        matches[head] = np.median(mean) if len(mean) else 0.0
        matches[head, group.sink_rows] = mean
    return matches


def _distinct(group: Group) -> list[int]:
    """Features that differ from every simpler one somewhere in the sample."""
    levels, digests, simplest = group.active.features, set(), []
    for number in sorted(range(len(group.features)), key=lambda number: (group.features[number].rank, number)):
        digest = hashlib.blake2b(levels[number].tobytes()).digest()
        if digest not in digests:
            digests.add(digest)
            simplest.append(number)
    return simplest


def _bases(features: Sequence[Feature]) -> list[int]:
    """For each feature the number of the one that it is a part of; -1 = it stands alone.

    What is from special tokens alone may stand without its whole, as these may do as queries what no other token does.
    """
    from attnscope.core.questions.descriptions import LATER

    numbers = {feature.name: number for number, feature in enumerate(features)} | {"": -1}
    return [LATER if feature.name.endswith(" from special") else numbers[feature.base] for feature in features]


def whole_losses(fit: Fitted, sinks: Part, number: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What the description of all of a head's attention leaves, and what sets it apart from uniform attention.

    Returns:
        (row of `sinks`,) each, in nats: of where the head rests, and of the rest by its share.
    """
    from attnscope.core.questions.descriptions import row_losses

    rows = fit.group.active
    active = np.zeros((2, len(fit.group.sinks.texts)))
    active[:, fit.group.sink_rows] = rows.mass[:, number] * (active_left(fit, number)[0], rows.uniform_nats[:, number])
    left, nats = row_losses(sinks, number, fit.sinks[number]), fit.group.sinks.uniform_nats[sinks.index, number]
    return left + active[0, sinks.index], nats + active[1, sinks.index]


def active_left(fit: Fitted, number: int) -> tuple[NDArray[np.float64], bool]:
    """What the description of a head's attention off the sinks leaves, and whether special tokens as queries follow it.

    They do unless uniform attention is nearer to theirs on the fitted texts: then it is expected of them.

    Returns:
        (active row,): nats; and whether they follow.
    """
    from attnscope.core.questions.descriptions import row_losses

    rows, ordinary = fit.group.active, fit.group.ordinary
    nats = rows.uniform_nats[:, number]
    left = row_losses(fit.group.all_rows, number, fit.active[number])
    more = rows.mass[:, number] * (left - nats)
    follow = not more[~ordinary & fit.is_fitted].sum() > 0
    return (left if follow else np.where(ordinary, left, nats)), follow
