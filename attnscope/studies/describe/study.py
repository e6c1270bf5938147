"""Describe each head in one line, found in the data, and say how much of its attention the line explains.

A hash of their content draws texts, whatever their order, and the model's whole rows of some of their queries are kept.
So a description is the same for every cut of the corpus. `rows` draws and joins, `core.descriptions` fits, and `words`
names. This module fits both parts of each description, scores them on the other texts, and fills the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core import descriptions, directions
from attnscope.core.descriptions import Description, row_losses, score, score_of_texts
from attnscope.core.sampled_rows import Floats, Rows
from attnscope.models.model import Model
from attnscope.questions.head_lines import EVEN
from attnscope.questions.heads import DESCRIPTION, Heads
from attnscope.report.numbers import percent
from attnscope.results.table import Estimate, Table
from attnscope.studies.describe.english import CLOSED_CLASSES, OPEN_CLASSES, class_of
from attnscope.studies.describe.features import RESTING, Feature, Flags, Numbers
from attnscope.studies.describe.rows import FEWEST_TEXTS, Group, Unit, join_rows
from attnscope.studies.describe.words import HeadWords, Kinds, least_named
from attnscope.studies.heads.options import DescribeOptions

MOST_OWN, MOST_SINK_TERMS = 3, 4
"""The most terms that are fitted to the head alone; and the most terms of where it rests."""

LITTLE = 0.3
"""Explained share below which a head is said to be mostly undescribed."""

NO_TERM = "no term outside sinks"
"""Stands for the other half's term if it has none outside sinks."""

HARDLY = 0.02
"""Share of attention below which a part of a description is not mentioned."""

FAILURES, FAILURES_LOOKED_AT = 3, 60
"""How many tokens are kept of those that a description fails on, and among how many of the worst they are sought."""

EXPECTED = 4
"""How many of the keys that the description expects are named for such a token."""

BEFORE = 6
"""How many tokens before it are shown."""

_NAN = float("nan")
_NO_TEXTS = {column.name: "" for column in DESCRIPTION if column.kind == "text"}

Line = dict[str, Any]
"""A head's row of `DESCRIPTION`, with its `place` (kind, layer, head), and its rows of the tables `terms` and
`failures`; those of `expected` stand in its failures."""


def add_descriptions(
    result: Heads, model: Model, sample: Sequence[Unit], counts: Numbers, options: DescribeOptions
) -> Heads:
    """Return a study of heads with their descriptions: new columns of its heads, and tables of terms and failures.

    Args:
        result: The study.
        model: Its model.
        sample: The texts that were drawn, with the rows that the model computed; others are left out.
        counts: How often each token occurs in the corpus, by its number.
        options: How heads are described.
    """
    sample = [unit for unit in sample if unit.rows]
    fits = fit_sample(model, sample, counts, options)
    # The size of the sample is recorded even if no head could be described.
    described = {
        "n_texts": len(sample),
        "n_queries": sum(len(unit.queries) for unit in sample),
        "n_scored": sum(not unit.fits for unit in sample) if fits else 0,
    }
    lines: list[Line] = []
    for fit in fits:
        lines += describe_fitted(fit, sample)
    return add_lines(replace(result, options={**result.options, "described": described}), lines)


def add_lines(result: Heads, lines: Sequence[Line]) -> Heads:
    """Return a study of heads with lines; without any it is as it was."""
    if not lines:
        return result
    # The columns of heads; those that were not described have none of it.
    heads = result.table("heads")
    by_place = {line["place"]: line for line in lines}
    places = zip(*(heads[name].tolist() for name in ("kind", "layer", "head")), strict=True)
    rows: list[Line] = [by_place.get(place, _NO_TEXTS) for place in places]
    added = Table.of(DESCRIPTION, rows)
    described = Table({**heads.columns, **added.columns}, {**heads.values, **added.values})

    # Tables of the terms of the lines, and of the tokens on which they fail; they link to heads by row numbers.
    parts: dict[str, list[Line]] = {"terms": [], "failures": [], "expected": []}
    for number, row in enumerate(rows):
        parts["terms"] += [{**term, "head": number} for term in row.get("terms", ())]
        for failed in row.get("failures", ()):
            parts["expected"] += [
                {**key, "failure": len(parts["failures"])} for key in failed["expected"]
            ]
            parts["failures"].append({**failed, "head": number})
    tables = {name: Table.of(Heads.TABLES[name], of_table) for name, of_table in parts.items()}
    return replace(result, tables={**result.tables, "heads": described, **tables})


def fit_sample(
    model: Model, sample: Sequence[Unit], counts: Numbers, options: DescribeOptions
) -> list[Fitted]:
    """Fit descriptions to some texts; none where there are too few."""
    if len(sample) < FEWEST_TEXTS:
        return []
    return [
        fit_group(group, sample, options) for group in join_rows(model, sample, counts, options.heads)
    ]


# Fit


@dataclass(frozen=True, eq=False)
class Fitted:
    """The descriptions of a group's heads, with the columns that were fitted to each.

    Attributes:
        group: The group; its rows have the columns.
        fitted: The active rows of ordinary queries in the texts that are for fitting.
        scored: The same of the others.
        scored_sinks: The rows of the others where heads may rest.
        active: The description of each head's attention on keys that are not resting.
        other_half: The first term of the same on the scored half.
        sinks: The description of how much each head rests, and where.
        is_fitted: (active row,): whether its text is for fitting.
    """

    group: Group
    fitted: Rows
    scored: Rows
    scored_sinks: Rows
    active: list[Description]
    other_half: list[Description]
    sinks: list[Description]
    is_fitted: Flags


def fit_group(group: Group, sample: Sequence[Unit], options: DescribeOptions) -> Fitted:
    """Fit both parts of the descriptions of a group's heads on the texts that are for fitting."""
    features = group.features
    fits = [number for number, unit in enumerate(sample) if unit.fits]
    others = [number for number, unit in enumerate(sample) if not unit.fits]
    fitted = group.part(fits)
    scored = group.part(others)

    # Columns of each head's own, for the tokens that it looks for.
    candidates = _distinct(group)
    columns = directions.find_columns(fitted, group.offsets, _columns_of_types(group, fitted))
    for rows in (group.active, fitted, scored):
        rows.give_columns(columns)

    # The terms of its attention off the sinks, and on them.
    ranks = [feature.rank for feature in features]
    active = descriptions.describe(fitted, ranks, options.most_terms, candidates, MOST_OWN)
    other_half = descriptions.describe(scored, ranks, 1, candidates, MOST_OWN)
    sink_ranks = [ranks[number] for number in group.sink_features]
    named = [
        place for place, number in enumerate(group.sink_features) if features[number].name != RESTING
    ]
    sinks = descriptions.describe(group.sinks.of_texts(fits), sink_ranks, MOST_SINK_TERMS, named)
    is_fitted = np.isin(group.active.texts, fits)
    return Fitted(
        group, fitted, scored, group.sinks.of_texts(others), active, other_half, sinks, is_fitted
    )


def _columns_of_types(group: Group, fitted: Rows) -> NDArray[np.float32]:
    """Return the columns X of types (`core.directions.describe_types`): embeddings, spelling, classes, frequency."""
    labels = group.types.labels
    occurrences = np.bincount(fitted.key_types, minlength=len(labels))
    # Spelling and English classes, (type, column).
    classes = np.array([class_of(label.strip("·Ġ▁ ").lower()) for label in labels])
    columns = [
        [not any(map(str.isalnum, label)) for label in labels],
        [any(map(str.isdigit, label)) for label in labels],
        [label.startswith("##") for label in labels],
        classes[:, None] == np.array([*CLOSED_CLASSES, *OPEN_CLASSES]),
        np.log1p(occurrences) / 10,
    ]
    return directions.describe_types(
        group.types.embeddings, occurrences, np.column_stack(columns).astype(np.float32)
    )


def _distinct(group: Group) -> list[int]:
    """Return the features that differ from every simpler one somewhere in the sample."""
    # The simplest feature comes first, and keeps its place among those with the same levels.
    simplest: dict[bytes, int] = {}
    for number in sorted(range(len(group.features)), key=lambda number: group.features[number].rank):
        simplest.setdefault(group.active.features[number].tobytes(), number)
    return list(simplest.values())


def whole_losses(fit: Fitted, head: int) -> tuple[Floats, Floats]:
    """Return the loss of a head's whole description, and that of uniform attention, for each scored row.

    Returns:
        (row of the scored sinks,) each, in nats: KL(A ‖ p) and KL(A ‖ uniform). Each adds the loss of where the head
        rests, and that of its other attention times its share.
    """
    rows = fit.group.active
    # Attention off the sinks, put into the rows that it is part of, (loss or nats, row).
    sinks = fit.scored_sinks
    active = np.zeros((2, len(fit.group.sinks.texts)))
    losses = np.stack([active_left(fit, head)[0], rows.uniform_nats[:, head]])
    active[:, fit.group.sink_rows] = rows.mass[:, head] * losses
    # Add the losses of where it rests, on the scored rows.
    left, nats = active[:, sinks.index]
    return left + row_losses(sinks, head, fit.sinks[head]), nats + sinks.uniform_nats[:, head]


def active_left(fit: Fitted, head: int) -> tuple[Floats, bool]:
    """Return the loss of a head's description off the sinks, and whether special queries follow the description.

    They do unless uniform attention is nearer to theirs on the fitted texts: then it is expected of them.

    Returns:
        KL(A ‖ p), (active row,), in nats; and whether they follow.
    """
    rows = fit.group.active
    ordinary = fit.group.ordinary
    nats = rows.uniform_nats[:, head]
    left = row_losses(rows, head, fit.active[head])
    # Special queries: does the description or uniform attention suit them better?
    more = rows.mass[:, head] * (left - nats)
    if more[~ordinary & fit.is_fitted].sum() > 0:
        return np.where(ordinary, left, nats), False
    return left, True


# Say what was fitted


def describe_fitted(fit: Fitted, sample: Sequence[Unit]) -> list[Line]:
    """Return the descriptions of a group's heads.

    What a head attends to is its attention on keys that are neither special tokens nor the first. There each row counts
    by how much of its attention lies on such keys, and is scaled to 1. Queries that are special tokens are left out.
    """
    kinds = Kinds(fit.group, fit.fitted)
    return [_describe_head(fit, sample, kinds, number) for number in range(len(fit.group.heads))]


def _describe_head(fit: Fitted, sample: Sequence[Unit], kinds: Kinds, number: int) -> Line:
    # How well both parts hold together.
    whole = score_of_texts(fit.scored_sinks.texts, *whole_losses(fit, number))
    line: Line = {
        **_NO_TEXTS,
        "place": (fit.group.kind, *fit.group.heads[number]),
        "whole_nats": whole.nats,
    }
    if whole.nats < EVEN:  # there is nothing to describe, and a share of nothing is none
        return {**line, "description": "spreads evenly", "nats": whole.nats}

    # Terms off the sinks, and how well they hold on the scored rows.
    words = HeadWords(fit.group, fit.fitted, kinds, number)
    description = fit.active[number]
    rows = fit.scored
    active, left = score(rows, number, description)
    mass = rows.mass[:, number]
    share = float(rows.text_weights @ mass)
    nats = active.nats / share if share > 0 else _NAN
    terms = _terms("attends", description, rows, fit.group.features, words)
    # Where it rests.
    sink_features = [fit.group.features[feature] for feature in fit.group.sink_features]
    rests = _terms("rests", fit.sinks[number], fit.scored_sinks, sink_features, words)
    # What the other half of the texts says first.
    other = fit.other_half[number]
    if description.terms[:1] != other.terms[:1]:
        line["other_half"] = f"other half: {_first_term(other, words.of_term) or NO_TERM}"

    # Both parts in words; where it hardly attends elsewhere, the numbers are those of the whole.
    parts = _resting(share, rests)
    main = whole
    if share >= HARDLY:
        line["summary"] = words.summarise(description, terms)
        parts = [_attending(nats, active.explained, line["summary"]), *parts]
        main = active
    return {
        **line,
        "description": "; ".join(parts),
        "kl_explained": Estimate(main.explained, main.low, main.high),
        "nats": nats if share >= HARDLY else whole.nats,
        "active_share": share,
        "whole_explained": Estimate(whole.explained, whole.low, whole.high),
        "first_term": _first_term(description, words.name),
        "terms": [*terms, *rests],
        "failures": _failures(fit, sample, number, left * mass),
    }


def _first_term(description: Description, name: Callable[[int], str]) -> str:
    """Return the name of the first term, with "not" before it if it is avoided; "" = there is none."""
    if not description.terms:
        return ""
    sign = "not " if description.first_weight < 0 else ""
    return sign + name(description.terms[0])


def _attending(nats: float, explained: float, summary: str) -> str:
    """Return the part of a line on keys off the sinks."""
    if nats < EVEN:
        return "all other tokens evenly"
    if not summary:
        return "undescribed"
    return summary if explained >= LITTLE else f"{summary}; mostly undescribed"


def _resting(share: float, rests: Sequence[Line]) -> list[str]:
    """Return how much a head rests and on what, such as "rests 69% on [CLS]"; nothing if it hardly does."""
    if share > 1 - HARDLY:
        return []
    # Name the two terms with the largest shares; one that only repels attention is no place to rest.
    shares = {}
    for term in rests:
        on_term = term["share"]
        if on_term.value >= HARDLY and (term["weight"] >= 0 or on_term.value >= on_term.baseline):
            shares[term["words"]] = on_term.value
    named = " and ".join(sorted(shares, key=lambda words: -shares[words])[:2])
    return [f"rests {percent(1 - share)}" + (f" on {named}" if named else "")]


def _terms(
    part: str, description: Description, rows: Rows, features: Sequence[Feature], words: HeadWords
) -> list[Line]:
    """Return the terms of a description as rows of a table, with their shares of attention in some rows."""
    terms = []
    names = [feature.name for feature in features]
    on = rows.weighted(rows.scaled(words.head), words.head)
    even = rows.weighted(rows.counts, words.head)
    for number, weight, gain in zip(
        description.terms, description.weights, description.gains, strict=True
    ):
        column = rows.column_of(number, words.head)
        share = Estimate(_NAN, baseline=_NAN)
        if column is None or column.queries is None:
            # How much the tokens of the term get, and how much under uniform attention. A graded feature has no such
            # tokens: those of the set that it is about are shown.
            shown = (
                number if column is not None else names.index(features[number].shown_by or names[number])
            )
            values = rows.by_entry(shown, words.head)
            if column is not None:
                values = np.where(values >= least_named(values), 1.0, 0.0)
            share = Estimate(float(values @ on), baseline=float(values @ even))
        terms.append(
            {
                "part": part,
                "feature": names[number] if column is None else words.name(number),
                "words": features[number].words if column is None else words.of_term(number),
                "weight": float(weight),
                "share": share,
                "own": column is not None,
                "gain": gain,
            }
        )
    return terms


def _failures(fit: Fitted, sample: Sequence[Unit], head: int, left: Floats) -> list[Line]:
    """Return the worst row of each of the texts that have the worst, with the keys that the description expects."""
    rows = fit.scored
    description = fit.active[head]
    scores = rows.scores(description.terms, description.weights, head)
    # The worst rows first, and one of each text.
    worst = np.argsort(-left, kind="stable")[:FAILURES_LOOKED_AT]
    _, first = np.unique(rows.texts[worst], return_index=True)
    failures = []
    for row in worst[np.sort(first)[:FAILURES]]:
        unit = sample[rows.texts[row]]
        place = int(fit.group.queries[rows.index[row]])
        labels = unit.tokens(fit.group.kind).labels
        # The keys that it may attend to, and p; the largest first, of equal ones the nearest.
        entries = slice(rows.starts[row], rows.starts[row + 1])
        keys = place + fit.group.offsets[rows.entries[entries]]
        p = np.exp(scores[entries] - scores[entries].max())
        p /= p.sum()
        best = np.lexsort((np.abs(keys - place), -p))[:EXPECTED]
        failures.append(
            {
                "text": unit.text.index,
                "before": " ".join(labels[max(0, place - BEFORE) : place]),
                "token": labels[place],
                "place": place,
                "nats": float(left[row]),
                "expected": [
                    {"place": keys[key], "token": labels[keys[key]], "weight": p[key]} for key in best
                ],
            }
        )
    return failures
