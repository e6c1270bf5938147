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

MOST_OWN = 3
"""How many terms of a description may be fitted to the head alone."""

MOST_SINK_TERMS = 4
"""How many terms say where a head rests, at most."""

LITTLE = 0.3
"""Explained share below which a head is said to be mostly undescribed."""

NO_TERM = "no term outside sinks"
"""What is said of the other half of the texts if its description has no term outside sinks."""

HARDLY = 0.02
"""Share of attention below which a part of a description is not mentioned."""

FAILURES = 3
FAILURES_LOOKED_AT = 60
"""How many tokens are kept of those that a description fails on, and among how many of the worst they are sought."""

EXPECTED = 4
"""For how many keys the attention that the description expects is shown beside such a token."""

BEFORE = 6
"""How many tokens before it are shown."""

_NAN = float("nan")
_NO_TEXTS = {column.name: "" for column in DESCRIPTION if column.kind == "text"}

Line = dict[str, Any]
"""A head's row of `DESCRIPTION`, with its `place` (kind, layer, head), and its rows of the tables `terms` and
`failures`; each failure holds its rows of the table `expected`."""


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
    n_scored = 0
    lines: list[Line] = []
    for fit in fits:
        lines += describe_fitted(fit, sample)
        n_scored = sum(not unit.fits for unit in sample)
    described = {
        "n_texts": len(sample),
        "n_queries": sum(len(unit.queries) for unit in sample),
        "n_scored": n_scored,
    }
    return add_lines(replace(result, options={**result.options, "described": described}), lines)


def add_lines(result: Heads, lines: Sequence[Line]) -> Heads:
    """Return a study of heads with the lines of some of them; without any line it is as it was."""
    if not lines:
        return result
    # The columns of heads; those that were not described have empty texts.
    heads = result.table("heads")
    by_place = {line["place"]: line for line in lines}
    names = [heads[name].tolist() for name in ("kind", "layer", "head")]
    rows: list[Line] = [by_place.get(place, _NO_TEXTS) for place in zip(*names, strict=True)]
    added = Table.of(DESCRIPTION, rows)
    described = Table({**heads.columns, **added.columns}, {**heads.values, **added.values})

    # Tables of the terms of the lines, and of the tokens on which they fail; they link to heads by row numbers.
    terms: list[Line] = []
    failures: list[Line] = []
    expected: list[Line] = []
    for number, row in enumerate(rows):
        terms += [{**term, "head": number} for term in row.get("terms", ())]
        for failure in row.get("failures", ()):
            expected += [{**key, "failure": len(failures)} for key in failure["expected"]]
            failures.append({**failure, "head": number})
    tables = {**result.tables, "heads": described}
    for name, of_table in (("terms", terms), ("failures", failures), ("expected", expected)):
        tables[name] = Table.of(Heads.TABLES[name], of_table)
    return replace(result, tables=tables)


def fit_sample(
    model: Model, sample: Sequence[Unit], counts: Numbers, options: DescribeOptions
) -> list[Fitted]:
    """Fit descriptions to some texts; none where there are too few."""
    if len(sample) < FEWEST_TEXTS:
        return []
    groups = join_rows(model, sample, counts, options.heads)
    return [fit_group(group, sample, options) for group in groups]


# Fit


@dataclass(frozen=True, eq=False)
class Fitted:
    """Hold the descriptions of a group's heads, with the rows that they were fitted to and are scored on.

    Attributes:
        group: The group; its rows have the columns that were fitted to each head.
        fitted: The active rows of ordinary queries in the texts that are for fitting.
        scored: The active rows of ordinary queries in the other texts.
        scored_sinks: The rows of the group's `sinks` in the other texts.
        active: The description of each head's attention on keys that are not resting.
        other_half: The same, fitted to `scored`: its first term alone.
        sinks: The description of how much each head rests, and where.
        is_fitted: Whether the text of an active row is for fitting, (active row,).
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
    is_fit = np.array([unit.fits for unit in sample])
    fits = np.flatnonzero(is_fit).tolist()
    others = np.flatnonzero(~is_fit).tolist()
    fitted = group.part(fits)
    scored = group.part(others)

    # Columns of each head's own, for the tokens that it looks for.
    candidates = _distinct(group)
    columns = directions.find_columns(fitted, group.offsets, _columns_of_types(group, fitted))
    for rows in (group.active, fitted, scored):
        rows.give_columns(columns)

    # The terms of its attention off the sinks, and on them. `resting` is only for naming what is no sink.
    ranks = [feature.rank for feature in features]
    sink_features = [features[number] for number in group.sink_features]
    sink_ranks = [feature.rank for feature in sink_features]
    named = [place for place, feature in enumerate(sink_features) if feature.name != RESTING]
    return Fitted(
        group=group,
        fitted=fitted,
        scored=scored,
        scored_sinks=group.sinks.of_texts(others),
        active=descriptions.describe(fitted, ranks, options.most_terms, candidates, MOST_OWN),
        other_half=descriptions.describe(scored, ranks, 1, candidates, MOST_OWN),
        sinks=descriptions.describe(group.sinks.of_texts(fits), sink_ranks, MOST_SINK_TERMS, named),
        is_fitted=is_fit[group.active.texts],
    )


def _columns_of_types(group: Group, fitted: Rows) -> NDArray[np.float32]:
    """Return the columns X of types (`core.directions.describe_types`): embeddings, spelling, classes, frequency."""
    labels = group.types.labels
    occurrences = np.bincount(fitted.key_types, minlength=len(labels))

    def has(test: Callable[[str], bool]) -> Flags:
        """Return whether a character of each label passes a test, (type,)."""
        return np.array([any(map(test, label)) for label in labels])

    # Spelling and English classes, (type, column).
    classes = np.array([class_of(label.strip("·Ġ▁ ").lower()) for label in labels])
    columns = [
        ~has(str.isalnum),
        has(str.isdigit),
        np.char.startswith(labels, "##"),
        classes[:, None] == np.array([*CLOSED_CLASSES, *OPEN_CLASSES]),
        np.log1p(occurrences) / 10,
    ]
    return directions.describe_types(
        group.types.embeddings, occurrences, np.column_stack(columns).astype(np.float32)
    )


def _distinct(group: Group) -> list[int]:
    """Return the numbers of the features that differ from every simpler feature somewhere in the sample."""
    # Of features with the same levels, the simplest comes first and is kept.
    ranks = [feature.rank for feature in group.features]
    simplest: dict[bytes, int] = {}
    for number in sorted(range(len(ranks)), key=ranks.__getitem__):
        simplest.setdefault(group.active.features[number].tobytes(), number)
    return list(simplest.values())


def whole_losses(fit: Fitted, head: int) -> tuple[Floats, Floats]:
    """Return the loss of a head's whole description, and that of uniform attention, for each scored row.

    Returns:
        KL(A ‖ p) and KL(A ‖ uniform) in nats, (row of the scored sinks,) each. Each adds the loss of where the head
        rests, and that of its other attention times its share.
    """
    rows = fit.group.active
    # Attention off the sinks, put into the rows of the sinks that it is part of, (2, row).
    left, _ = active_left(fit, head)
    of_active = np.zeros((2, len(fit.group.sinks.texts)))
    of_active[:, fit.group.sink_rows] = rows.mass[:, head] * [left, rows.uniform_nats[:, head]]
    # Add the losses of where it rests, on the scored rows.
    sinks = fit.scored_sinks
    of_sinks = [row_losses(sinks, head, fit.sinks[head]), sinks.uniform_nats[:, head]]
    losses, nats = of_active[:, sinks.index] + of_sinks
    return losses, nats


def active_left(fit: Fitted, head: int) -> tuple[Floats, bool]:
    """Return the loss of a head's description off the sinks, and whether special queries follow the description.

    They do unless uniform attention is nearer to theirs on the fitted texts: then that is expected of them.

    Returns:
        KL(A ‖ p) in nats, (active row,); and whether special queries follow.
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
    """Return the line of the head of a group that has a number."""
    # How well both parts hold together.
    whole = score_of_texts(fit.scored_sinks.texts, *whole_losses(fit, number))
    line: Line = {
        **_NO_TEXTS,
        "place": (fit.group.kind, *fit.group.heads[number]),
        "whole_nats": whole.nats,
    }
    # Of even attention there is nothing to describe, and no share to explain.
    if whole.nats < EVEN:
        return {**line, "description": "spreads evenly", "nats": whole.nats}

    # Terms off the sinks, and how well they hold on the scored rows.
    words = HeadWords(fit.group, fit.fitted, kinds, number)
    description = fit.active[number]
    rows = fit.scored
    active, left = score(rows, number, description)
    mass = rows.mass[:, number]
    share = float(rows.text_weights @ mass)
    nats = _NAN
    if share > 0:
        nats = active.nats / share
    terms = _terms("attends", description, rows, fit.group.features, words)
    # Where it rests.
    sink_features = [fit.group.features[feature] for feature in fit.group.sink_features]
    rests = _terms("rests", fit.sinks[number], fit.scored_sinks, sink_features, words)
    # What the other half of the texts says first.
    other = fit.other_half[number]
    if description.terms[:1] != other.terms[:1]:
        line["other_half"] = f"other half: {_first_term(other, words.of_term) or NO_TERM}"

    # Both parts in words; where it hardly attends off the sinks, the numbers are those of the whole.
    parts = _resting(share, rests)
    main = whole
    line["nats"] = whole.nats
    if share >= HARDLY:
        main = active
        line["nats"] = nats
        line["summary"] = words.summarise(description, terms)
        parts = [_attending(nats, active.explained, line["summary"]), *parts]
    return {
        **line,
        "description": "; ".join(parts),
        "kl_explained": Estimate(main.explained, main.low, main.high),
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
    text = f"rests {percent(1 - share)}"
    if shares:
        text += " on " + " and ".join(sorted(shares, key=lambda words: -shares[words])[:2])
    return [text]


def _terms(
    part: str, description: Description, rows: Rows, features: Sequence[Feature], words: HeadWords
) -> list[Line]:
    """Return the terms of a description as rows of the table `terms`.

    Args:
        part: The part of the line that they are of: "attends" or "rests".
        description: The description.
        rows: The rows in which shares of attention are measured.
        features: The features of these rows, by number.
        words: The names of the head's terms.
    """
    terms = []
    names = [feature.name for feature in features]
    on = rows.weighted(rows.scaled(words.head), words.head)
    even = rows.weighted(rows.counts, words.head)
    for number, weight, gain in zip(
        description.terms, description.weights, description.gains, strict=True
    ):
        column = rows.column_of(number, words.head)
        if column is None:
            # A graded feature has no tokens: those of the set that it is about are shown.
            feature = features[number]
            shown = names.index(feature.shown_by or feature.name)
            values = rows.by_entry(shown, words.head)
            term = {"feature": feature.name, "words": feature.words, "own": False}
        else:
            values = rows.by_entry(number, words.head)
            values = np.where(values >= least_named(values), 1.0, 0.0)
            term = {"feature": words.name(number), "words": words.of_term(number), "own": True}
        # How much the tokens of the term get, and how much under uniform attention; pairs have no such tokens.
        share = Estimate(float(values @ on), baseline=float(values @ even))
        if column is not None and column.query_levels is not None:
            share = Estimate(_NAN, baseline=_NAN)
        terms.append({**term, "part": part, "weight": float(weight), "share": share, "gain": gain})
    return terms


def _failures(fit: Fitted, sample: Sequence[Unit], head: int, left: Floats) -> list[Line]:
    """Return the rows on which a description fails most, one of a text, as rows of the table `failures`.

    Each has the keys to which the description expects most attention, as rows of the table `expected`. `left` is the
    loss of each scored row, (row,), times its mass.
    """
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
        # The keys that it may attend to, and the p that is expected; the largest first, of equal ones the nearest.
        entries = slice(rows.starts[row], rows.starts[row + 1])
        keys = place + fit.group.offsets[rows.entries[entries]]
        p = np.exp(scores[entries] - scores[entries].max())
        p /= p.sum()
        expected = []
        for best in np.lexsort((np.abs(keys - place), -p))[:EXPECTED]:
            key = keys[best]
            expected.append({"place": key, "token": labels[key], "weight": p[best]})
        failures.append(
            {
                "text": unit.text.index,
                "before": " ".join(labels[max(0, place - BEFORE) : place]),
                "token": labels[place],
                "place": place,
                "nats": float(left[row]),
                "expected": expected,
            }
        )
    return failures
