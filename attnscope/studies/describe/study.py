"""Describe each head in one line that is fitted to its attention, and say how much of its attention the line explains.

*Sinks* are special tokens and the first token; all other keys are *free*. A description has two parts, each of them a
distribution p ∝ exp(sum of weighted features). These features are the *terms*:

- how much the head *rests*, and on which sinks, fitted to *sink rows*: attention on each sink and on all free keys;
- what it *attends* to off the sinks, fitted to *active rows*: attention on the free keys (`rows.HeadGroup`).

Features are shared by all heads, or fitted to one head as its *own features* (the `columns` of a `RowSample`). Losses
are KL divergences in nats, from attention A to p. `explained` is 1 - KL(A ‖ p) / KL(A ‖ uniform).

`rows` samples texts and queries, `core.descriptions` fits terms, and `words` puts terms into words. This module fits
both parts to half of the texts, scores them on the other half, and fills the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.arrays import Flags, Floats, Integers
from attnscope.core import descriptions, directions
from attnscope.core.descriptions import Description, compute_row_losses, score_description, score_texts
from attnscope.core.sampled_rows import RowSample
from attnscope.models.model import Model
from attnscope.questions.head_lines import MIN_NATS_TO_EXPLAIN
from attnscope.questions.heads import DESCRIPTION_COLUMNS, Heads
from attnscope.report.numbers import format_percent
from attnscope.results.table import Estimate, Table
from attnscope.studies.describe.english import CLOSED_CLASSES, OPEN_CLASSES, class_of
from attnscope.studies.describe.features import RESTING, Feature
from attnscope.studies.describe.rows import MIN_TEXTS, HeadGroup, SampledText, join_rows
from attnscope.studies.describe.words import HeadWords, KeyKinds, find_naming_threshold
from attnscope.studies.heads.options import DescribeOptions

MAX_OWN_TERMS = 3
"""The largest number of terms of a description that are own features of the head."""

MAX_SINK_TERMS = 4
"""The largest number of terms that say where a head rests."""

MIN_EXPLAINED = 0.3
"""If the explained share is below this, the line says that the head is mostly undescribed."""

NO_TERM_WORDS = "no term outside sinks"
"""The words for a description without terms off the sinks, if it was fitted to the other half of the texts."""

MIN_MENTIONED = 0.02
"""The share of attention below which a part of a description is not mentioned."""

MAX_FAILURES = 3
"""The largest number of failures listed per head. A failure is a query on which the description predicts badly."""

N_WORST_ROWS = 60
"""Failures are chosen among this number of rows with the largest losses, at most one per text."""

N_EXPECTED_KEYS = 4
"""The number of keys listed with a failure: those on which the description expects the most attention."""

N_TOKENS_BEFORE = 6
"""The number of tokens before a failure that are shown."""

_NAN = float("nan")
_EMPTY_TEXTS = {column.name: "" for column in DESCRIPTION_COLUMNS if column.kind == "text"}
"""The text columns of a head without a description. Its missing numbers become NaN in the table."""

HeadLine = dict[str, Any]
"""The description of a head, by name:

- the columns `DESCRIPTION_COLUMNS` of its row in the table `heads`;
- "place": its (kind of attention, layer, head index);
- "terms" and "failures": its rows in these tables, HeadLines too. A failure has its rows of the table `expected` under
  "expected".
"""


def add_descriptions(
    result: Heads,
    model: Model,
    sample: Sequence[SampledText],
    counts: Integers,
    options: DescribeOptions,
) -> Heads:
    """Return a study of heads with descriptions: new columns of the table `heads`, and tables of terms and failures.

    Args:
        result: The study.
        model: Its model.
        sample: The sampled texts, with their attention rows. Texts without rows are left out.
        counts: Counts of tokens in the corpus, (token id,).
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
        "n_scored": sum(not unit.is_for_fitting for unit in sample) if fits else 0,
    }
    return add_lines(replace(result, options={**result.options, "described": described}), lines)


def add_lines(result: Heads, lines: Sequence[HeadLine]) -> Heads:
    """Return a study of heads with the lines of some heads. Without any line the study is unchanged."""
    if not lines:
        return result
    # Add columns to the table of heads. Heads without a line have empty texts.
    heads = result.table("heads")
    line_by_place = {line["place"]: line for line in lines}
    rows: list[HeadLine] = []
    for kind, (layer, head) in zip(heads["kind"].tolist(), heads.layer_heads, strict=True):
        rows.append(line_by_place.get((kind, layer, head), _EMPTY_TEXTS))
    added = Table.of(DESCRIPTION_COLUMNS, rows)
    described = Table({**heads.columns, **added.columns}, {**heads.values, **added.values})

    # Make the tables of terms, failures and expected keys. They refer to heads and failures by row index.
    terms: list[HeadLine] = []
    failures: list[HeadLine] = []
    expected: list[HeadLine] = []
    for head_row, line in enumerate(rows):
        terms += [{**term, "head": head_row} for term in line.get("terms", ())]
        for failure in line.get("failures", ()):
            expected += [{**key, "failure": len(failures)} for key in failure["expected"]]
            failures.append({**failure, "head": head_row})
    tables = {**result.tables, "heads": described}
    for name, table_rows in (("terms", terms), ("failures", failures), ("expected", expected)):
        tables[name] = Table.of(Heads.TABLES[name], table_rows)
    return replace(result, tables=tables)


def fit_sample(
    model: Model, sample: Sequence[SampledText], counts: Integers, options: DescribeOptions
) -> list[FittedGroup]:
    """Fit descriptions of all groups of heads to a sample; return [] if it has too few texts."""
    if len(sample) < MIN_TEXTS:
        return []
    groups = join_rows(model, sample, counts, options.heads)
    return [fit_group(group, sample, options) for group in groups]


# Fit


@dataclass(frozen=True, eq=False)
class FittedGroup:
    """Hold the descriptions of a group's heads, with the rows for fitting and for scoring.

    Ordinary queries are queries that are no special tokens. Lists of descriptions have one per head.

    Attributes:
        group: The group. Its active rows have the own features of each head.
        fitted_rows: The active rows of ordinary queries in the texts for fitting.
        scored_rows: The active rows of ordinary queries in the texts for scoring.
        scored_sink_rows: The sink rows in the texts for scoring.
        active_descriptions: Descriptions of attention off the sinks.
        other_half_descriptions: Descriptions of one term that are fitted to `scored_rows` instead, to compare.
        sink_descriptions: Descriptions of how much each head rests, and where.
        is_fitted: Whether the text of an active row is for fitting, (active row,).
    """

    group: HeadGroup
    fitted_rows: RowSample
    scored_rows: RowSample
    scored_sink_rows: RowSample
    active_descriptions: list[Description]
    other_half_descriptions: list[Description]
    sink_descriptions: list[Description]
    is_fitted: Flags


def fit_group(group: HeadGroup, sample: Sequence[SampledText], options: DescribeOptions) -> FittedGroup:
    """Fit both parts of the descriptions of a group's heads to the texts for fitting."""
    is_fitted_text = np.array([unit.is_for_fitting for unit in sample])
    fitted_texts = np.flatnonzero(is_fitted_text).tolist()
    scored_texts = np.flatnonzero(~is_fitted_text).tolist()
    fitted_rows = group.ordinary_rows(fitted_texts)
    scored_rows = group.ordinary_rows(scored_texts)

    # Fit the own features of each head: scores of the types of token that it attends to.
    candidates = _find_distinct_features(group)
    own_features = directions.fit_features(
        fitted_rows, group.offsets, _describe_types(group, fitted_rows)
    )
    for rows in (group.active_rows, fitted_rows, scored_rows):
        rows.set_columns(own_features)

    # Fit the terms off the sinks, and the terms on the sinks. There RESTING may be no term: all sinks have it, so it
    # would not say which sink.
    ranks = [feature.rank for feature in group.features]
    sink_features = [group.features[number] for number in group.sink_features]
    sink_ranks = [feature.rank for feature in sink_features]
    single_sinks = [index for index, feature in enumerate(sink_features) if feature.name != RESTING]
    fitted_sink_rows = group.sink_rows.select_texts(fitted_texts)
    return FittedGroup(
        group=group,
        fitted_rows=fitted_rows,
        scored_rows=scored_rows,
        scored_sink_rows=group.sink_rows.select_texts(scored_texts),
        active_descriptions=descriptions.find_terms(
            fitted_rows, ranks, options.max_terms, candidates, MAX_OWN_TERMS
        ),
        other_half_descriptions=descriptions.find_terms(
            scored_rows, ranks, 1, candidates, MAX_OWN_TERMS
        ),
        sink_descriptions=descriptions.find_terms(
            fitted_sink_rows, sink_ranks, MAX_SINK_TERMS, single_sinks
        ),
        is_fitted=is_fitted_text[group.active_rows.texts],
    )


def _describe_types(group: HeadGroup, fitted_rows: RowSample) -> NDArray[np.float32]:
    """Return numbers that describe each type of token, (type, column), from which own features are made.

    They are principal components of its embedding, its spelling, English class and frequency.
    """
    labels = group.types.labels
    occurrences = np.bincount(fitted_rows.key_types, minlength=len(labels))

    def has_character(test: Callable[[str], bool]) -> Flags:
        """Return whether a character of each label passes a test, (type,)."""
        return np.array([any(map(test, label)) for label in labels])

    # Labels without the tokenizers' marks for spaces have English classes, (type,).
    classes = np.array([class_of(label.strip("·Ġ▁ ").lower()) for label in labels])
    columns = [
        ~has_character(str.isalnum),
        has_character(str.isdigit),
        np.char.startswith(labels, "##"),
        classes[:, None] == np.array([*CLOSED_CLASSES, *OPEN_CLASSES]),
        np.log1p(occurrences) / 10,
    ]
    further = np.column_stack(columns).astype(np.float32)
    return directions.describe_types(group.types.embeddings, occurrences, further)


def _find_distinct_features(group: HeadGroup) -> list[int]:
    """Return the indices of the features that differ from every simpler feature in some row of the sample."""
    # The levels of a feature, as bytes -> its index. Of features with the same levels, the simplest comes first and is
    # kept.
    ranks = [feature.rank for feature in group.features]
    simplest: dict[bytes, int] = {}
    for index in sorted(range(len(ranks)), key=ranks.__getitem__):
        simplest.setdefault(group.active_rows.features[index].tobytes(), index)
    return list(simplest.values())


def compute_total_losses(fit: FittedGroup, head: int) -> Floats:
    """Compute the loss of both parts of a head's description together, and the loss of uniform attention.

        KL of a row = KL over sinks and all free keys together + mass of the free keys · KL among the free keys

    Returns:
        KL(A ‖ p) and KL(A ‖ uniform) in nats, (2, scored sink row).
    """
    rows = fit.group.active_rows
    # The second summand for all sink rows, (description or uniform, sink row); 0 for a row that is no active row.
    losses, _ = compute_active_losses(fit, head)
    on_free_keys = np.zeros((2, len(fit.group.sink_rows.texts)))
    on_free_keys[:, fit.group.sink_row_of_active] = rows.mass[:, head] * [
        losses,
        rows.uniform_nats[:, head],
    ]
    # Add the first summand. `index` says where the scored rows are among all sink rows.
    sink_rows = fit.scored_sink_rows
    on_sinks = [
        compute_row_losses(sink_rows, head, fit.sink_descriptions[head]),
        sink_rows.uniform_nats[:, head],
    ]
    return on_free_keys[:, sink_rows.index] + on_sinks


def compute_active_losses(fit: FittedGroup, head: int) -> tuple[Floats, bool]:
    """Compute the loss of a head's description on active rows, and decide whether it holds for special queries too.

    Descriptions are fitted to ordinary queries. If uniform attention predicts special queries better in the texts for
    fitting, it replaces the description for special queries.

    Returns:
        KL(A ‖ p) in nats, (active row,); and whether p is the description for special queries too.
    """
    rows = fit.group.active_rows
    is_ordinary = fit.group.is_ordinary
    uniform_losses = rows.uniform_nats[:, head]
    losses = compute_row_losses(rows, head, fit.active_descriptions[head])
    excess = rows.mass[:, head] * (losses - uniform_losses)
    if excess[~is_ordinary & fit.is_fitted].sum() > 0:
        return np.where(is_ordinary, losses, uniform_losses), False
    return losses, True


# Write lines


def describe_fitted(fit: FittedGroup, sample: Sequence[SampledText]) -> list[HeadLine]:
    """Write the lines of a group's heads."""
    kinds = KeyKinds(fit.group, fit.fitted_rows)
    return [_describe_head(fit, sample, kinds, head) for head in range(len(fit.group.heads))]


def _describe_head(
    fit: FittedGroup, sample: Sequence[SampledText], kinds: KeyKinds, head: int
) -> HeadLine:
    """Write the line of a head; `head` is its index in the group."""
    # The score of both parts together.
    total_score = score_texts(fit.scored_sink_rows.texts, *compute_total_losses(fit, head))
    line: HeadLine = {
        **_EMPTY_TEXTS,
        "place": (fit.group.kind, *fit.group.heads[head]),
        "whole_nats": total_score.nats,
    }
    # In almost uniform attention there is nothing to describe, and no explained share.
    if total_score.nats < MIN_NATS_TO_EXPLAIN:
        return {**line, "description": "spreads evenly", "nats": total_score.nats}

    # The terms off the sinks, and their score. The losses are (scored row,).
    words = HeadWords(fit.group, fit.fitted_rows, kinds, head)
    description = fit.active_descriptions[head]
    rows = fit.scored_rows
    active_score, losses = score_description(rows, head, description)
    mass = rows.mass[:, head]
    active_share = float(rows.text_weights @ mass)
    attends_terms = _make_term_rows("attends", description, rows, fit.group.features, words)
    # The terms on the sinks.
    sink_features = [fit.group.features[index] for index in fit.group.sink_features]
    rests_terms = _make_term_rows(
        "rests", fit.sink_descriptions[head], fit.scored_sink_rows, sink_features, words
    )
    # Mention the first term of the other half of the texts if it is another one.
    other_description = fit.other_half_descriptions[head]
    if description.terms[:1] != other_description.terms[:1]:
        other_term = _name_first_term(other_description, words.describe_term)
        line["other_half"] = f"other half: {other_term or NO_TERM_WORDS}"

    # Put both parts into words. If the head hardly attends off the sinks, leave that part out, and report the score of
    # both parts together.
    resting = _describe_resting(active_share, rests_terms)
    if active_share >= MIN_MENTIONED:
        main_score = active_score
        # The score counts each row by its mass. Divide by the mean mass, as if every row had mass 1.
        line["nats"] = active_score.nats / active_share
        line["summary"] = words.summarise(description, attends_terms)
        attending = _describe_attending(line["nats"], active_score.explained, line["summary"])
        line["description"] = "; ".join([attending, *resting])
    else:
        main_score = total_score
        line["nats"] = total_score.nats
        line["description"] = "; ".join(resting)
    return {
        **line,
        "kl_explained": Estimate(main_score.explained, main_score.low, main_score.high),
        "active_share": active_share,
        "whole_explained": Estimate(total_score.explained, total_score.low, total_score.high),
        "first_term": _name_first_term(description, words.name_term),
        "terms": [*attends_terms, *rests_terms],
        "failures": _find_failures(fit, sample, head, losses * mass),
    }


def _name_first_term(description: Description, name_term: Callable[[int], str]) -> str:
    """Name the first term, after "not" if its weight is negative; return "" if there is no term."""
    if not description.terms:
        return ""
    negation = "not " if description.first_weight < 0 else ""
    return negation + name_term(description.terms[0])


def _describe_attending(nats: float, explained: float, summary: str) -> str:
    """Return the part of a line about attention off the sinks; `summary` is from `HeadWords.summarise`."""
    if nats < MIN_NATS_TO_EXPLAIN:
        return "all other tokens evenly"
    if not summary:
        return "undescribed"
    return summary if explained >= MIN_EXPLAINED else f"{summary}; mostly undescribed"


def _describe_resting(active_share: float, rests_terms: Sequence[HeadLine]) -> list[str]:
    """Return the part of a line about sinks as a list of one text, such as "rests 69% on [CLS]".

    If the head hardly rests, return []. `rests_terms` are the rows of the terms on the sinks.
    """
    if active_share > 1 - MIN_MENTIONED:
        return []
    # Words of a sink -> its share, for sinks with enough attention. Leave out a sink with a negative weight that also
    # gets less than under uniform attention.
    shares = {}
    for term in rests_terms:
        share = term["share"]
        is_preferred = term["weight"] >= 0 or share.value >= share.baseline
        if share.value >= MIN_MENTIONED and is_preferred:
            shares[term["words"]] = share.value
    text = f"rests {format_percent(1 - active_share)}"
    # Name the two sinks with the largest shares.
    if shares:
        text += " on " + " and ".join(sorted(shares, key=lambda words: -shares[words])[:2])
    return [text]


def _make_term_rows(
    part: str, description: Description, rows: RowSample, features: Sequence[Feature], words: HeadWords
) -> list[HeadLine]:
    """Return the terms of a description as rows of the table `terms`.

    Args:
        part: The part of the line to which the terms belong: "attends" or "rests".
        description: The description.
        rows: The rows in which shares of attention are measured.
        features: The shared features of these rows, by index.
        words: The names of the head's terms.
    """
    term_rows = []
    names = [feature.name for feature in features]
    # The head's attention and uniform attention, (entry,); each sums to 1 over all rows.
    attention = rows.weight_rows(rows.normalise_rows(words.head), words.head)
    uniform = rows.weight_rows(rows.counts, words.head)
    for term, weight, gain in zip(
        description.terms, description.weights, description.gains, strict=True
    ):
        # Mark the keys that the term names with 1, (entry,). Own features and graded features name keys of high value;
        # of a graded feature, `shown_by` names the binary feature that has these keys.
        own_feature = rows.column_of(term, words.head)
        if own_feature is None:
            feature = features[term]
            binary_feature = names.index(feature.shown_by or feature.name)
            is_key = rows.by_entry(binary_feature, words.head)
            row = {"feature": feature.name, "words": feature.words, "own": False}
        else:
            values = rows.by_entry(term, words.head)
            is_key = (values >= find_naming_threshold(values)).astype(np.float64)
            row = {"feature": words.name_term(term), "words": words.describe_term(term), "own": True}
        # The share of attention on these keys, and their share under uniform attention. An own feature with query
        # levels is about pairs of tokens: it has no share.
        share = Estimate(float(is_key @ attention), baseline=float(is_key @ uniform))
        if own_feature is not None and own_feature.query_levels is not None:
            share = Estimate(_NAN, baseline=_NAN)
        term_rows.append({**row, "part": part, "weight": float(weight), "share": share, "gain": gain})
    return term_rows


def _find_failures(
    fit: FittedGroup, sample: Sequence[SampledText], head: int, losses: Floats
) -> list[HeadLine]:
    """Return the queries on which a description fails most, at most one per text, as rows of the table `failures`.

    Each failure has the keys on which the description expects the most attention, as rows of the table `expected`.
    `losses` are losses of the scored rows times their mass, (scored row,).
    """
    rows = fit.scored_rows
    description = fit.active_descriptions[head]
    scores = rows.scores(description.terms, description.weights, head)
    # Of the worst rows, keep the worst one of each text.
    worst = np.argsort(-losses, kind="stable")[:N_WORST_ROWS]
    _, first_of_texts = np.unique(rows.texts[worst], return_index=True)
    failures = []
    for row in worst[np.sort(first_of_texts)[:MAX_FAILURES]]:
        unit = sample[rows.texts[row]]
        # The group's arrays have all rows and entries of the sample: `index` and `entries` find the scored ones there.
        query = int(fit.group.queries[rows.index[row]])
        labels = unit.tokens(fit.group.kind).labels
        # The positions of the row's keys, and the attention p that the description expects there, (entry of the row,).
        entries = slice(rows.starts[row], rows.starts[row + 1])
        keys = query + fit.group.offsets[rows.entries[entries]]
        p = np.exp(scores[entries] - scores[entries].max())
        p /= p.sum()
        # List keys by falling p; keys with equal p by distance.
        expected = []
        for i in np.lexsort((np.abs(keys - query), -p))[:N_EXPECTED_KEYS]:
            expected.append({"place": keys[i], "token": labels[keys[i]], "weight": p[i]})
        failures.append(
            {
                "text": unit.text.index,
                "before": " ".join(labels[max(0, query - N_TOKENS_BEFORE) : query]),
                "token": labels[query],
                "place": query,
                "nats": float(losses[row]),
                "expected": expected,
            }
        )
    return failures
