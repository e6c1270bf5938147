"""Describe each head in one line that is fitted to its attention, and say how much of its attention the line explains.

A description has two parts. One is about attention on sinks: how much the head *rests* there, and on which. The other
is about attention off the sinks, on the *active* rows (`rows.Group`). Both are sums of weighted features, the *terms*.

`rows` samples texts and queries, `core.descriptions` fits terms, and `words` puts them into words. This module fits
both parts to half of the texts, scores them on the other half, and fills the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core import descriptions, directions
from attnscope.core.descriptions import Description, compute_row_losses, score_description, score_texts
from attnscope.core.sampled_rows import Floats, RowSample
from attnscope.models.model import Model
from attnscope.questions.head_lines import EVEN_NATS
from attnscope.questions.heads import DESCRIPTION, Heads
from attnscope.report.numbers import percent
from attnscope.results.table import Estimate, Table
from attnscope.studies.describe.english import CLOSED_CLASSES, OPEN_CLASSES, class_of
from attnscope.studies.describe.features import RESTING, Feature, Flags, Integers
from attnscope.studies.describe.rows import MIN_TEXTS, HeadGroup, SampledText, join_rows
from attnscope.studies.describe.words import HeadWords, KeyKinds, named_threshold
from attnscope.studies.heads.options import DescribeOptions

MAX_OWN_TERMS = 3
"""How many terms of a description may be features that are fitted to the head alone."""

MAX_SINK_TERMS = 4
"""How many terms say where a head rests, at most."""

MIN_EXPLAINED = 0.3
"""The explained share below which a head is said to be mostly undescribed."""

NO_TERM = "no term outside sinks"
"""What a line says of the other half of the texts if the description fitted there has no term outside sinks."""

MIN_MENTIONED = 0.02
"""The share of attention below which a part of a description is not mentioned."""

MAX_FAILURES = 3
"""How many of the tokens on which a description fails are listed."""

WORST_ROWS = 60
"""Among how many of the worst rows they are chosen, one of a text."""

EXPECTED_KEYS = 4
"""How many keys are listed with such a token: those to which the description expects most attention."""

TOKENS_BEFORE = 6
"""How many tokens before such a token are shown."""

_NAN = float("nan")
_NO_TEXTS = {column.name: "" for column in DESCRIPTION if column.kind == "text"}

HeadLine = dict[str, Any]
"""What is known of a head: its row of the columns `DESCRIPTION`; its `place`, (kind, layer, head); and under `terms`
and `failures` its rows of these tables. A failure has its rows of the table `expected` under that name."""


def add_descriptions(
    result: Heads,
    model: Model,
    sample: Sequence[SampledText],
    counts: Integers,
    options: DescribeOptions,
) -> Heads:
    """Return a study of heads with their descriptions: new columns of its heads, and tables of terms and failures.

    Args:
        result: The study.
        model: Its model.
        sample: The texts that were drawn, with the rows that the model computed; texts without rows are left out.
        counts: How often each token occurs in the corpus, by its id.
        options: How heads are described.
    """
    sample = [unit for unit in sample if unit.rows]
    fits = fit_sample(model, sample, counts, options)
    lines: list[HeadLine] = []
    for fit in fits:
        lines += describe_fitted(fit, sample)
    # The size of the sample is recorded even if no head could be described.
    described = {
        "n_texts": len(sample),
        "n_queries": sum(len(unit.queries) for unit in sample),
        "n_scored": sum(not unit.fits for unit in sample) if fits else 0,
    }
    return add_lines(replace(result, options={**result.options, "described": described}), lines)


def add_lines(result: Heads, lines: Sequence[HeadLine]) -> Heads:
    """Return a study of heads with the lines of some of them; without any line it is as it was."""
    if not lines:
        return result
    # The columns of heads; those that were not described have empty texts.
    heads = result.table("heads")
    by_place = {line["place"]: line for line in lines}
    rows: list[HeadLine] = []
    for kind, head in zip(heads["kind"].tolist(), heads.layer_heads, strict=True):
        rows.append(by_place.get((kind, *head), _NO_TEXTS))
    added = Table.of(DESCRIPTION, rows)
    described = Table({**heads.columns, **added.columns}, {**heads.values, **added.values})

    # The tables of terms, of failures, and of what was expected there. They refer to heads and failures by row numbers.
    terms: list[HeadLine] = []
    failures: list[HeadLine] = []
    expected: list[HeadLine] = []
    for number, row in enumerate(rows):
        terms += [{**term, "head": number} for term in row.get("terms", ())]
        for failure in row.get("failures", ()):
            expected += [{**key, "failure": len(failures)} for key in failure["expected"]]
            failures.append({**failure, "head": number})
    tables = {**result.tables, "heads": described}
    for name, table_rows in (("terms", terms), ("failures", failures), ("expected", expected)):
        tables[name] = Table.of(Heads.TABLES[name], table_rows)
    return replace(result, tables=tables)


def fit_sample(
    model: Model, sample: Sequence[SampledText], counts: Integers, options: DescribeOptions
) -> list[FittedGroup]:
    """Fit descriptions of all groups of heads to a sample; return none if it has too few texts."""
    if len(sample) < MIN_TEXTS:
        return []
    groups = join_rows(model, sample, counts, options.heads)
    return [fit_group(group, sample, options) for group in groups]


# Fit


@dataclass(frozen=True, eq=False)
class FittedGroup:
    """Hold the descriptions of a group's heads, with the rows that they were fitted to and are scored on.

    Attributes:
        group: The group; its active rows have the columns, features that were fitted to each head alone.
        fitted: The active rows of ordinary queries in the texts for fitting.
        scored: The active rows of ordinary queries in the texts for scoring.
        scored_sinks: The rows of the group's `sinks` in the texts for scoring.
        active: The description of each head's attention off the sinks.
        other_half: The first term of the description that is fitted to `scored` instead.
        sinks: The description of how much each head rests, and where.
        is_fitted: Whether the text of an active row is for fitting, (active row,).
    """

    group: HeadGroup
    fitted: RowSample
    scored: RowSample
    scored_sinks: RowSample
    active: list[Description]
    other_half: list[Description]
    sinks: list[Description]
    is_fitted: Flags


def fit_group(group: HeadGroup, sample: Sequence[SampledText], options: DescribeOptions) -> FittedGroup:
    """Fit both parts of the descriptions of a group's heads to the texts for fitting."""
    is_fitted = np.array([unit.fits for unit in sample])
    fitted_texts = np.flatnonzero(is_fitted).tolist()
    scored_texts = np.flatnonzero(~is_fitted).tolist()
    fitted = group.ordinary_rows(fitted_texts)
    scored = group.ordinary_rows(scored_texts)

    # Fit columns to each head: further features, of the types of token that it attends to.
    candidates = _distinct_features(group)
    columns = directions.fit_features(fitted, group.offsets, _columns_of_types(group, fitted))
    for rows in (group.active, fitted, scored):
        rows.set_columns(columns)

    # Fit the terms off the sinks, and those on them. There RESTING may be no term: it would name no sink.
    ranks = [feature.rank for feature in group.features]
    sink_features = [group.features[number] for number in group.sink_features]
    sink_ranks = [feature.rank for feature in sink_features]
    single_sinks = [i for i, feature in enumerate(sink_features) if feature.name != RESTING]
    fitted_sinks = group.sinks.select_texts(fitted_texts)
    return FittedGroup(
        group=group,
        fitted=fitted,
        scored=scored,
        scored_sinks=group.sinks.select_texts(scored_texts),
        active=descriptions.find_terms(fitted, ranks, options.max_terms, candidates, MAX_OWN_TERMS),
        other_half=descriptions.find_terms(scored, ranks, 1, candidates, MAX_OWN_TERMS),
        sinks=descriptions.find_terms(fitted_sinks, sink_ranks, MAX_SINK_TERMS, single_sinks),
        is_fitted=is_fitted[group.active.texts],
    )


def _columns_of_types(group: HeadGroup, fitted: RowSample) -> NDArray[np.float32]:
    """Return the columns that describe each type of token, (type, column); see `core.directions.describe_types`."""
    labels = group.types.labels
    occurrences = np.bincount(fitted.key_types, minlength=len(labels))

    def has(test: Callable[[str], bool]) -> Flags:
        """Return whether a character of each label passes a test, (type,)."""
        return np.array([any(map(test, label)) for label in labels])

    # Spelling, English classes and frequency, (type, column).
    classes = np.array([class_of(label.strip("·Ġ▁ ").lower()) for label in labels])
    columns = [
        ~has(str.isalnum),
        has(str.isdigit),
        np.char.startswith(labels, "##"),
        classes[:, None] == np.array([*CLOSED_CLASSES, *OPEN_CLASSES]),
        np.log1p(occurrences) / 10,
    ]
    further = np.column_stack(columns).astype(np.float32)
    return directions.describe_types(group.types.embeddings, occurrences, further)


def _distinct_features(group: HeadGroup) -> list[int]:
    """Return the numbers of the features that differ from every simpler feature in some row of the sample."""
    # Of features with the same levels, the simplest comes first and is kept.
    ranks = [feature.rank for feature in group.features]
    simplest: dict[bytes, int] = {}
    for number in sorted(range(len(ranks)), key=ranks.__getitem__):
        simplest.setdefault(group.active.features[number].tobytes(), number)
    return list(simplest.values())


def whole_losses(fit: FittedGroup, head: int) -> Floats:
    """Return the loss of a head's whole description, and that of uniform attention, for each scored row.

        KL of a row = KL over sinks and all free keys together + mass of the free keys · KL among the free keys

    Returns:
        KL(A ‖ p) and KL(A ‖ uniform) in nats, (2, row of the scored sinks).
    """
    rows = fit.group.active
    # The second summand, for all rows of sinks: (description or uniform, row).
    losses, _ = active_losses(fit, head)
    on_free_keys = np.zeros((2, len(fit.group.sinks.texts)))
    on_free_keys[:, fit.group.sink_rows] = rows.mass[:, head] * [losses, rows.uniform_nats[:, head]]
    # Add the first, for the scored rows.
    sinks = fit.scored_sinks
    on_sinks = [compute_row_losses(sinks, head, fit.sinks[head]), sinks.uniform_nats[:, head]]
    return on_free_keys[:, sinks.index] + on_sinks


def active_losses(fit: FittedGroup, head: int) -> tuple[Floats, bool]:
    """Return the loss of a head's description on active rows, and whether it also holds for special queries.

    If uniform attention is nearer to that of special queries on the fitted texts, it is expected of them instead.

    Returns:
        KL(A ‖ p) in nats, (active row,); and whether p is the description for special queries too.
    """
    rows = fit.group.active
    ordinary = fit.group.ordinary
    nats = rows.uniform_nats[:, head]
    losses = compute_row_losses(rows, head, fit.active[head])
    excess = rows.mass[:, head] * (losses - nats)
    if excess[~ordinary & fit.is_fitted].sum() > 0:
        return np.where(ordinary, losses, nats), False
    return losses, True


# Say what was fitted


def describe_fitted(fit: FittedGroup, sample: Sequence[SampledText]) -> list[HeadLine]:
    """Return the lines of a group's heads."""
    kinds = KeyKinds(fit.group, fit.fitted)
    return [_describe_head(fit, sample, kinds, head) for head in range(len(fit.group.heads))]


def _describe_head(
    fit: FittedGroup, sample: Sequence[SampledText], kinds: KeyKinds, head: int
) -> HeadLine:
    """Return the line of a head, given by its number in the group."""
    # The score of both parts together.
    whole = score_texts(fit.scored_sinks.texts, *whole_losses(fit, head))
    line: HeadLine = {
        **_NO_TEXTS,
        "place": (fit.group.kind, *fit.group.heads[head]),
        "whole_nats": whole.nats,
    }
    # Nothing can be described in uniform attention, and no share of it explained.
    if whole.nats < EVEN_NATS:
        return {**line, "description": "spreads evenly", "nats": whole.nats}

    # The terms off the sinks, and their score.
    words = HeadWords(fit.group, fit.fitted, kinds, head)
    description = fit.active[head]
    rows = fit.scored
    active, losses = score_description(rows, head, description)
    mass = rows.mass[:, head]
    active_share = float(rows.text_weights @ mass)
    terms = _terms_rows("attends", description, rows, fit.group.features, words)
    # The terms on the sinks.
    sink_features = [fit.group.features[number] for number in fit.group.sink_features]
    rests = _terms_rows("rests", fit.sinks[head], fit.scored_sinks, sink_features, words)
    # Say so if the other half of the texts has another first term.
    other = fit.other_half[head]
    if description.terms[:1] != other.terms[:1]:
        line["other_half"] = f"other half: {_first_term(other, words.describe_term) or NO_TERM}"

    # Put both parts into words. If the head hardly attends off the sinks, that part is left out, and the numbers are
    # those of the whole.
    resting = _describe_resting(active_share, rests)
    if active_share >= MIN_MENTIONED:
        main = active
        # Mean nats of the active rows as scaled to 1.
        line["nats"] = active.nats / active_share
        line["summary"] = words.summarise(description, terms)
        attending = _describe_attending(line["nats"], active.explained, line["summary"])
        line["description"] = "; ".join([attending, *resting])
    else:
        main = whole
        line["nats"] = whole.nats
        line["description"] = "; ".join(resting)
    return {
        **line,
        "kl_explained": Estimate(main.explained, main.low, main.high),
        "active_share": active_share,
        "whole_explained": Estimate(whole.explained, whole.low, whole.high),
        "first_term": _first_term(description, words.name),
        "terms": [*terms, *rests],
        "failures": _failures(fit, sample, head, losses * mass),
    }


def _first_term(description: Description, name: Callable[[int], str]) -> str:
    """Name the first term, with "not" before it if its weight is negative; "" = there is no term."""
    if not description.terms:
        return ""
    sign = "not " if description.first_weight < 0 else ""
    return sign + name(description.terms[0])


def _describe_attending(nats: float, explained: float, summary: str) -> str:
    """Return the part of a line about attention off the sinks."""
    if nats < EVEN_NATS:
        return "all other tokens evenly"
    if not summary:
        return "undescribed"
    return summary if explained >= MIN_EXPLAINED else f"{summary}; mostly undescribed"


def _describe_resting(active_share: float, rests: Sequence[HeadLine]) -> list[str]:
    """Return the part of a line about sinks, such as "rests 69% on [CLS]"; none if the head hardly rests."""
    if active_share > 1 - MIN_MENTIONED:
        return []
    # Name the two sinks with the largest shares, but none that gets less than under uniform attention by its term.
    shares = {}
    for term in rests:
        share = term["share"]
        is_preferred = term["weight"] >= 0 or share.value >= share.baseline
        if share.value >= MIN_MENTIONED and is_preferred:
            shares[term["words"]] = share.value
    text = f"rests {percent(1 - active_share)}"
    if shares:
        text += " on " + " and ".join(sorted(shares, key=lambda words: -shares[words])[:2])
    return [text]


def _terms_rows(
    part: str, description: Description, rows: RowSample, features: Sequence[Feature], words: HeadWords
) -> list[HeadLine]:
    """Return the terms of a description as rows of the table `terms`.

    Args:
        part: Which part of the line they belong to: "attends" or "rests".
        description: The description.
        rows: The rows in which shares of attention are measured.
        features: The features of these rows, by number.
        words: The names of the head's terms.
    """
    terms = []
    names = [feature.name for feature in features]
    # The head's attention and uniform attention, (entry,); each sums to 1 over all rows.
    attention = rows.weight_rows(rows.normalise_rows(words.head), words.head)
    uniform = rows.weight_rows(rows.counts, words.head)
    for number, weight, gain in zip(
        description.terms, description.weights, description.gains, strict=True
    ):
        # Mark the keys of the term, (entry,): a column's keys of high value; for a graded feature those of `shown_by`.
        column = rows.column_of(number, words.head)
        if column is None:
            feature = features[number]
            shown = names.index(feature.shown_by or feature.name)
            is_key = rows.by_entry(shown, words.head)
            term = {"feature": feature.name, "words": feature.words, "own": False}
        else:
            values = rows.by_entry(number, words.head)
            is_key = (values >= named_threshold(values)).astype(np.float64)
            term = {"feature": words.name(number), "words": words.describe_term(number), "own": True}
        # The share of attention that they get, and the share under uniform attention; unknown for pairs.
        share = Estimate(float(is_key @ attention), baseline=float(is_key @ uniform))
        if column is not None and column.query_levels is not None:
            share = Estimate(_NAN, baseline=_NAN)
        terms.append({**term, "part": part, "weight": float(weight), "share": share, "gain": gain})
    return terms


def _failures(
    fit: FittedGroup, sample: Sequence[SampledText], head: int, losses: Floats
) -> list[HeadLine]:
    """Return the rows on which a description fails most, one of a text, as rows of the table `failures`.

    Each has the keys to which the description expects most attention, as rows of the table `expected`. `losses` are
    those of the scored rows, (row,), times their mass.
    """
    rows = fit.scored
    description = fit.active[head]
    scores = rows.scores(description.terms, description.weights, head)
    # Of the worst rows, keep the first of each text.
    worst = np.argsort(-losses, kind="stable")[:WORST_ROWS]
    _, first_of_texts = np.unique(rows.texts[worst], return_index=True)
    failures = []
    for row in worst[np.sort(first_of_texts)[:MAX_FAILURES]]:
        unit = sample[rows.texts[row]]
        query = int(fit.group.queries[rows.index[row]])
        labels = unit.tokens(fit.group.kind).labels
        # The positions of the row's keys, and the attention p that is expected on them, (entry of the row,).
        entries = slice(rows.starts[row], rows.starts[row + 1])
        keys = query + fit.group.offsets[rows.entries[entries]]
        p = np.exp(scores[entries] - scores[entries].max())
        p /= p.sum()
        # List the largest p first, of equal ones the nearest key.
        expected = []
        for i in np.lexsort((np.abs(keys - query), -p))[:EXPECTED_KEYS]:
            expected.append({"place": keys[i], "token": labels[keys[i]], "weight": p[i]})
        failures.append(
            {
                "text": unit.text.index,
                "before": " ".join(labels[max(0, query - TOKENS_BEFORE) : query]),
                "token": labels[query],
                "place": query,
                "nats": float(losses[row]),
                "expected": expected,
            }
        )
    return failures
