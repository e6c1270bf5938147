"""Describe each head in one line, found in the data, and say how much of its attention the line explains.

A hash of their content draws texts, whatever their order, and the model's whole rows of some of their queries are read.
So a description is the same for every cut of the corpus. `rows` draws and reads, `core.descriptions` fits, and `words`
and `lines` write.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from attnscope.core import descriptions, directions
from attnscope.core.descriptions import Description, Score, row_losses, score, score_of_texts
from attnscope.core.plain_torch import with_plain_torch
from attnscope.core.sampled_rows import Rows
from attnscope.corpus import Copies, Corpus, CorpusText, count_tokens, distinct
from attnscope.errors import UsageError
from attnscope.models.model import Model
from attnscope.questions.head_lines import EVEN
from attnscope.studies.describe.english import CLOSED_CLASSES, OPEN_CLASSES, class_of
from attnscope.studies.describe.features import RESTING, Feature
from attnscope.studies.describe.lines import NO_TERM, Descriptions, Expected, Failure, HeadDescription, Term
from attnscope.studies.describe.rows import FEWEST_TEXTS, Drawing, Group, Unit, measure
from attnscope.studies.describe.words import Names, least_named, summarise
from attnscope.studies.heads.measuring import Frequencies
from attnscope.studies.heads.options import DescribeOptions
from attnscope.studies.inputs.texts import special_ids, texts_of

MOST_OWN, MOST_SINK_TERMS = 3, 4
"""The most terms that are fitted to the head alone; and the most terms of where it rests."""

TOO_WIDE = frozenset((RESTING, "word", "last"))
"""Classes of keys that say too little to be screened for some queries alone."""

FAILURES, FAILURES_LOOKED_AT = 3, 60
"""How many tokens are kept of those that a description fails on, and among how many of the worst they are sought."""

EXPECTED = 4
"""How many of the keys that the description expects are named for such a token."""

BEFORE = 6
"""How many tokens before it are shown."""

_NAN = float("nan")


@with_plain_torch
def describe(
    model: Model, texts: Corpus | str | Sequence[str] | Sequence[CorpusText], options: DescribeOptions | None = None
) -> Descriptions:
    """Describe every head of a model in one line, by features of queries and keys. Near-duplicates are dropped.

    Raises:
        AttnscopeError: There is no text.
        UsageError: `options.heads` names a head that does not exist.
    """
    options = options or DescribeOptions()
    corpus = texts_of(texts, model)
    drawing = Drawing(options.seed)
    drawn = drawing.watch(distinct(corpus, Copies()))
    counts = count_tokens(drawn, model.tokenizer.encode, special_ids(model))
    return describe_sample(model, drawing.sample(model, options), Frequencies.of_counts(counts), options)


def describe_sample(
    model: Model, sample: Sequence[Unit], frequencies: Frequencies, options: DescribeOptions
) -> Descriptions:
    """Describe heads as `describe` does, by texts that are drawn already."""
    fits = fit_sample(model, sample, frequencies, options)
    heads = [head for fit in fits for head in describe_fitted(fit, sample)]
    heads.sort(key=lambda head: (model.info.kinds.index(head.kind), head.layer, head.head))
    n_queries = sum(len(unit.queries) for unit in sample)
    n_scored = sum(not unit.fits for unit in sample) if fits else 0
    return Descriptions(tuple(heads), len(sample), n_queries, n_scored)


def fit_sample(
    model: Model, sample: Sequence[Unit], frequencies: Frequencies, options: DescribeOptions
) -> list[Fitted]:
    """Fit descriptions to some texts; none where there are too few."""
    require_heads(model, options.heads)
    if len(sample) < FEWEST_TEXTS:
        return []
    return [fit_group(group, sample, options) for group in measure(model, sample, frequencies, options.heads)]


def require_heads(model: Model, heads: Sequence[tuple[int, int]] | None) -> None:
    """Refuse heads that do not exist.

    Raises:
        UsageError: No kind of attention has one.
    """
    shapes = list(zip(model.info.n_layers, model.info.n_heads, strict=True))
    for layer, head in heads or ():
        if not any(layer < n_layers and head < n_heads for n_layers, n_heads in shapes):
            sizes = " and ".join(f"{n_layers} layers of {n_heads} heads" for n_layers, n_heads in dict.fromkeys(shapes))
            raise UsageError(f"there is no head L{layer}H{head} to describe", f"{model.info.name} has {sizes}")


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
    is_fitted: NDArray[np.bool_]


def fit_group(group: Group, sample: Sequence[Unit], options: DescribeOptions) -> Fitted:
    """Fit both parts of the descriptions of a group's heads on the texts that are for fitting."""
    features = group.features
    fits = [number for number, unit in enumerate(sample) if unit.fits]
    others = [number for number, unit in enumerate(sample) if not unit.fits]
    fitted = group.part(fits)
    scored = group.part(others)

    # Columns of each head's own, for the tokens that it looks for.
    candidates = _distinct(group)
    screened = [number for number in candidates if features[number].name not in TOO_WIDE]
    columns = directions.find_columns(fitted, group.offsets, _columns_of_types(group, fitted), screened)
    for rows in (group.active, fitted, scored):
        rows.give_columns(columns)

    # The terms of its attention off the sinks, and on them.
    ranks = [feature.rank for feature in features]
    active = descriptions.describe(fitted, ranks, options.most_terms, candidates, MOST_OWN)
    other_half = descriptions.describe(scored, ranks, 1, candidates, MOST_OWN)
    sink_ranks = [ranks[number] for number in group.sink_features]
    named = [place for place, number in enumerate(group.sink_features) if features[number].name != RESTING]
    sinks = descriptions.describe(group.sinks.of_texts(fits), sink_ranks, MOST_SINK_TERMS, named)
    is_fitted = np.isin(group.active.texts, fits)
    return Fitted(group, fitted, scored, group.sinks.of_texts(others), active, other_half, sinks, is_fitted)


def _columns_of_types(group: Group, fitted: Rows) -> NDArray[np.float32]:
    """Return the columns X of types (`core.directions.describe_types`): embeddings, spelling, classes, frequency."""
    labels = group.types.labels
    occurrences = np.bincount(fitted.key_types, minlength=len(labels))
    # Spelling and English classes, (type, column).
    classes = np.array(
        [[not any(map(str.isalnum, label)), any(map(str.isdigit, label)), label.startswith("##")] for label in labels]
    )
    english = np.array([class_of(label.strip("·Ġ▁ ").lower()) for label in labels])
    is_english = english[:, None] == np.array([*CLOSED_CLASSES, *OPEN_CLASSES])
    columns = [classes, is_english, np.log1p(occurrences)[:, None] / 10]
    return directions.describe_types(group.types.embeddings, occurrences, np.concatenate(columns, 1).astype(np.float32))


def _distinct(group: Group) -> list[int]:
    """Return the features that differ from every simpler one somewhere in the sample."""
    # The simplest feature comes first, and keeps its place among those with the same levels.
    simplest: dict[bytes, int] = {}
    for number in sorted(range(len(group.features)), key=lambda number: (group.features[number].rank, number)):
        digest = hashlib.blake2b(group.active.features[number].tobytes()).digest()
        simplest.setdefault(digest, number)
    return list(simplest.values())


def whole_losses(fit: Fitted, head: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the loss of a head's whole description, and that of uniform attention, for each scored row.

    Returns:
        (row of the scored sinks,) each, in nats: KL(A ‖ p) and KL(A ‖ uniform). Each adds the loss of where the head
        rests, and that of its other attention times its share.
    """
    rows = fit.group.active
    # Attention off the sinks, put into the rows that it is part of, (loss or nats, row).
    sinks = fit.scored_sinks
    active = np.zeros((2, len(fit.group.sinks.texts)))
    mass = rows.mass[:, head]
    active[0, fit.group.sink_rows] = mass * active_left(fit, head)[0]
    active[1, fit.group.sink_rows] = mass * rows.uniform_nats[:, head]
    # Add the losses of where it rests, on the scored rows.
    left, nats = active[:, sinks.index]
    return left + row_losses(sinks, head, fit.sinks[head]), nats + sinks.uniform_nats[:, head]


def active_left(fit: Fitted, head: int) -> tuple[NDArray[np.float64], bool]:
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


def describe_fitted(fit: Fitted, sample: Sequence[Unit]) -> list[HeadDescription]:
    """Return the descriptions of a group's heads."""
    names = Names(fit.group, fit.fitted)
    return [_describe_head(fit, sample, names, number) for number in range(len(fit.group.heads))]


def _describe_head(fit: Fitted, sample: Sequence[Unit], names: Names, number: int) -> HeadDescription:
    # How well both parts hold together.
    layer, head = fit.group.heads[number]
    whole = score_of_texts(fit.scored_sinks.texts, *whole_losses(fit, number))
    if whole.nats < EVEN:  # there is nothing to describe, and a share of nothing is none
        return HeadDescription(fit.group.kind, layer, head, Score(_NAN, _NAN, _NAN, whole.nats))

    # Terms off the sinks, and how well they hold on the scored rows.
    description = fit.active[number]
    rows = fit.scored
    active, left = score(rows, number, description)
    mass = rows.mass[:, number]
    share = float(rows.text_weights @ mass)
    terms = tuple(_term(names, description, place, rows, number) for place in range(len(description.terms)))
    pairs, summary = summarise(names, number, description, terms)
    other = fit.other_half[number]
    other_words = ""
    if description.terms[:1] != other.terms[:1]:
        other_words = _first(other, names, number)[1] or NO_TERM

    # Where it rests.
    sinks = fit.sinks[number]
    features = [fit.group.features[feature] for feature in fit.group.sink_features]
    rests = [_known_term(features, sinks, place, fit.scored_sinks, number) for place in range(len(sinks.terms))]
    return HeadDescription(
        fit.group.kind,
        layer,
        head,
        whole,
        replace(active, nats=active.nats / share if share > 0 else _NAN),
        share,
        attends=terms,
        rests=tuple(rests),
        pairs=pairs,
        summary=summary,
        failures=_failures(fit, sample, number, left * mass),
        content=_first(description, names, number)[0],
        other_half=other_words,
    )


def _first(description: Description, names: Names, head: int) -> tuple[str, str]:
    """Return the name and the words of the first term, with "not" before those that are avoided."""
    if not description.terms:
        return "", ""
    sign = "not " if description.first_weight < 0 else ""
    term = description.terms[0]
    return sign + _name(names, term, head), sign + names.of_term(term, head)


def _name(names: Names, term: int, head: int) -> str:
    """Return a feature's name; of a head's own "keys", either end of each pair, or a feature from some queries."""
    group = names.group
    column = names.rows.column_of(term, head)
    if column is None:
        return group.features[term].name
    if column.gate >= 0:
        return f"{group.features[column.feature].name} from {group.features[group.gates[column.gate]].name}"
    pair, is_lower = divmod(term - len(group.features) + 1, 2)
    return f"pair{pair}{'-' if is_lower else '+'}" if pair else "keys"


def _term(names: Names, description: Description, place: int, rows: Rows, head: int) -> Term:
    """Return a term of attention off the sinks, with its shares in the scored rows."""
    term = description.terms[place]
    column = rows.column_of(term, head)
    if column is None:
        return _known_term(names.group.features, description, place, rows, head)
    shares = (_NAN, _NAN)
    if column.is_of_keys:  # how much the tokens of the term get, and how much under uniform attention
        values = rows.by_entry(term, head)
        is_high = values >= least_named(values)
        weights = rows.weights[head][rows.row_of[is_high]]
        even = weights / rows.lengths[rows.row_of[is_high]]
        shares = float((rows.scaled(head)[is_high] * weights).sum()), float(even.sum())
    return Term(
        _name(names, term, head),
        names.of_term(term, head),
        float(description.weights[place]),
        *shares,
        description.gains[place],
        own=column.gate < 0,
    )


def _known_term(features: Sequence[Feature], description: Description, place: int, rows: Rows, head: int) -> Term:
    """Return a term of the catalogue, with its share of attention; terms of a description are numbers of `features`."""
    term = description.terms[place]
    feature = features[term]
    # A graded feature has no share of attention: the share of the set that it is about is shown.
    shown = term
    if feature.shown_by:
        shown = [each.name for each in features].index(feature.shown_by)
    return Term(
        feature.name,
        feature.words,
        float(description.weights[place]),
        rows.share(shown, head),
        rows.even(shown, head),
        description.gains[place],
    )


def _failures(fit: Fitted, sample: Sequence[Unit], head: int, left: NDArray[np.float64]) -> tuple[Failure, ...]:
    """Return the worst row of each of the texts that have the worst."""
    rows = fit.scored
    description = fit.active[head]
    scores = rows.scores(description.terms, description.weights, head)
    failures: dict[int, Failure] = {}
    # The worst rows first, and one of each text.
    for row in np.argsort(-left, kind="stable")[:FAILURES_LOOKED_AT]:
        text = int(rows.texts[row])
        if text in failures or len(failures) == FAILURES:
            continue
        unit = sample[text]
        # The token, the keys that it may attend to, and what was expected of it.
        place = int(fit.group.queries[rows.index[row]])
        labels = unit.tokens(fit.group.kind).labels
        entries = slice(rows.starts[row], rows.starts[row + 1])
        keys = place + fit.group.offsets[rows.entries[entries]]
        expected = _expected(scores[entries], keys, place, labels)
        before = " ".join(labels[max(0, place - BEFORE) : place])
        failures[text] = Failure(unit.text.index, before, labels[place], place, float(left[row]), expected)
    return tuple(failures.values())


def _expected(
    scores: NDArray[np.float64], keys: NDArray[np.int32], place: int, labels: Sequence[str]
) -> tuple[Expected, ...]:
    """Return the keys that a description gives most in a row; of those that get the same, the nearest to the query."""
    # p up to a factor, (key,); the largest first, of equal ones the nearest.
    p = np.exp(scores - scores.max())
    best = np.lexsort((np.abs(keys - place), -p))[:EXPECTED]
    return tuple(Expected(int(keys[key]), labels[keys[key]], float(p[key] / p.sum())) for key in best)
