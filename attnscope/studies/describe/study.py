"""What does each head do? A line a head that was found, not asked for, and how much of its attention it explains.

Of a corpus some texts are drawn by a hash of what they say, whatever their order and the shard: a second, small pass
over these reads whole rows of some of their queries. So a description is the same for every cut of the corpus.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.annotated import AnnotatedCorpus, AnnotatedText
from attnscope.annotated.texts import annotate_zones, merge_equal
from attnscope.core.plain_torch import with_plain_torch
from attnscope.corpus import Copies, Corpus, CorpusText, count_tokens, distinct
from attnscope.errors import UsageError
from attnscope.models.model import Model
from attnscope.records.heads.descriptions import (
    EVEN,
    NO_TERM,
    Active,
    Descriptions,
    Expected,
    Failure,
    FeatureFacts,
    HeadDescription,
    Pair,
    Term,
)
from attnscope.studies.describe.english import CLOSED_CLASSES, OPEN_CLASSES, class_of
from attnscope.studies.describe.features import RESTING, Feature
from attnscope.studies.describe.mixtures import Mixture, find_mixtures, sides_of, with_mixtures
from attnscope.studies.describe.naming import TOO_WIDE, Names, least_named
from attnscope.studies.describe.own_features import own_features
from attnscope.studies.describe.rows import Group, Unit, measure
from attnscope.studies.describe.sample import FEWEST_TEXTS, DescribeOptions, draw
from attnscope.studies.describe.sources import find_sources
from attnscope.studies.describe.summary import scores_beside_pairs, summarise
from attnscope.studies.inputs.texts import Texts, special_ids, texts_of
from attnscope.studies.measuring.head_blocks import Frequencies

if TYPE_CHECKING:
    from attnscope.core.questions.descriptions import Description
    from attnscope.core.questions.sampled_rows import Part

NEARLY = 0.05
"""By how much less of the nats another first term may explain, alone, that is named beside the first."""

MOST_OWN, MOST_SINK_TERMS = 3, 4
"""Terms at most that are fitted to the head alone; and terms of where it rests."""

FAILURES = 3
"""Tokens that are kept of those that a description fails on."""

EXPECTED = 4
"""Keys of such a token that are named of those that the description expects."""


@with_plain_torch
def describe(
    model: Model,
    texts: Corpus | str | Sequence[str] | Sequence[CorpusText] | AnnotatedCorpus | Sequence[AnnotatedText],
    features: Sequence[str] = (),
    options: DescribeOptions | None = None,
) -> Descriptions:
    """Describes every head of a model in one line, by features of queries and keys.

        descriptions = attnscope.describe(model, attnscope.Corpus(["corpus/*.txt"], split="paragraph"))
        print(descriptions)  # one line per head
        descriptions.of(3, 1).terms, descriptions.of(3, 1).explained

    Args:
        model: A loaded model, see `attnscope.load`.
        texts: What to run it on. Near-duplicates are dropped. Links of annotated texts become features.
        features: Your own features, each as `name=pattern`.
        options: How.

    Raises:
        AttnscopeError: There is no text, or a feature cannot be read.
    """
    options = options or DescribeOptions()
    options = replace(options, features=(*options.features, *features))
    annotations: dict[str, AnnotatedText] = {}
    corpus = texts_of(_without_annotation(texts, annotations), model)
    counts = count_tokens(distinct(corpus, Copies()), model.tokenizer.encode, special_ids(model))
    return describe_texts(model, corpus, Frequencies.of_counts(counts), options, annotations)


def _without_annotation(texts: Any, annotations: dict[str, AnnotatedText]) -> Any:
    """The texts alone; annotations are put by, by what they are of."""
    is_annotated = isinstance(texts, AnnotatedCorpus) or (
        isinstance(texts, list | tuple) and bool(texts) and isinstance(texts[0], AnnotatedText)
    )
    if not is_annotated:
        return texts
    for text in merge_equal(texts):
        annotations.setdefault(text.text, text)
    return list(annotations)


def describe_texts(
    model: Model,
    texts: Texts,
    frequencies: Frequencies,
    options: DescribeOptions,
    annotations: Mapping[str, AnnotatedText] | None = None,
) -> Descriptions:
    """As `describe`, of texts that are listed, with what is known of how frequent tokens are, and of annotated ones."""
    own = own_features(options.features)

    def annotation_of(text: CorpusText) -> AnnotatedText | None:
        return (annotations or {}).get(text.text or "") or annotate_zones(text)

    sample, fits = fit_texts(model, texts, frequencies, options, annotation_of)
    n_queries = sum(len(unit.queries) for unit in sample)
    found = [one for fit in fits for one in describe_fitted(fit, sample)]
    groups = [fit.group for fit in fits]
    by_name = {one.name: FeatureFacts(one.words, one.family, one.source) for group in groups for one in group.features}
    sources = find_sources(model, sample, groups)
    found = [sources.beside(one) for one in found]
    found.sort(key=lambda one: (model.info.kinds.index(one.kind), one.layer, one.head))
    n_scored = len(sample) - sum(unit.fits for unit in sample) if fits else 0
    unmatched = tuple(one.name for one in own if fits and not any(group.matches(one) for group in groups))
    described = Descriptions(
        tuple(found), len(sample), n_queries, n_scored, by_name, unmatched, sources.unseen, sources.reason
    )
    named = described.used | {feature.name for feature in own}
    return replace(described, features={name: by_name[name] for name in by_name if name in named})


def fit_texts(
    model: Model,
    texts: Texts,
    frequencies: Frequencies,
    options: DescribeOptions,
    annotation_of: Callable[[CorpusText], AnnotatedText | None] = lambda _: None,
    also: Mapping[int, str] | None = None,
) -> tuple[list[Unit], list[Fitted]]:
    """The sample of some texts, and what is fitted to it; nothing where there are too few texts.

    Args:
        model: The model.
        texts: The texts.
        frequencies: How frequent tokens are.
        options: How.
        annotation_of: What is annotated of a text.
        also: See `rows.measure`.
    """
    require_heads(model, options.heads)
    sample = draw(model, texts, options)
    for unit in sample:
        unit.annotation = annotation_of(unit.text)
    if len(sample) < FEWEST_TEXTS:
        return sample, []
    groups = measure(model, sample, frequencies, own_features(options.features), options.heads, also)
    return sample, [fit_group(group, sample, options) for group in groups]


def require_heads(model: Model, heads: Sequence[tuple[int, int]] | None) -> None:
    """Refuses heads that there are not.

    Raises:
        UsageError: No kind of attention has one.
    """
    shapes = list(zip(model.info.n_layers, model.info.n_heads, strict=True))
    for layer, head in heads or ():
        if not any(layer < n_layers and head < n_heads for n_layers, n_heads in shapes):
            sizes = " and ".join(f"{n_layers} layers of {n_heads} heads" for n_layers, n_heads in dict.fromkeys(shapes))
            raise UsageError(f"there is no head L{layer}H{head} to describe", f"{model.info.name} has {sizes}")


# What is said of it ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Fitted:
    """The descriptions of a group's heads, with the columns that were fitted to each.

    Attributes:
        group: The group; its rows have the columns.
        active: One description of a head's attention on keys that are not resting.
        other_half: The first term of the scored half, likewise.
        sinks: One of how much it rests, where and when.
        is_fitted: (active row,): whether its text is for fitting.
        matches: (head, row of sinks): how much there is to attend to, in nats; see `_matches`.
        mixtures: By the head's number, the two descriptions of those that do two things; `active` has both.
    """

    group: Group
    active: tuple[Description, ...]
    other_half: tuple[Description, ...]
    sinks: tuple[Description, ...]
    is_fitted: NDArray[np.bool_]
    matches: NDArray[np.float64]
    mixtures: Mapping[int, Mixture]


def fit_group(group: Group, sample: Sequence[Unit], options: DescribeOptions) -> Fitted:
    """Fits both parts of the descriptions of a group's heads on the texts that are for fitting."""
    from attnscope.core.questions.descriptions import describe as find_terms
    from attnscope.core.questions.directions import columns_of, find_directions, gate_columns, match_column

    fitted, scored = ([n for n, unit in enumerate(sample) if unit.fits == fits] for fits in (True, False))
    x = _columns_of_types(group, fitted)
    candidates = _distinct(group)
    screened = [n for n in candidates if group.features[n].family != "from" and group.features[n].name not in TOO_WIDE]
    directions = find_directions(group.part(fitted), group.offsets, x, screened)
    columns = tuple(columns_of(of_head, group.part(fitted)) for of_head in directions)
    group = replace(group, active=replace(group.active, columns=columns))
    ranks, needs = [feature.rank for feature in group.features], _bases(group.features)

    def search(part: Part, heads: Sequence[int] | None = None, most: int = options.most_terms) -> list[Description]:
        return find_terms(part, ranks, heads, most=most, candidates=candidates, needs=needs, most_own=MOST_OWN)

    halves = group.part(fitted), group.part(scored)
    active, other_half = search(halves[0]), search(halves[1], most=1)
    mixtures = find_mixtures(group, halves, active, search, screened, options.most_terms, MOST_OWN)
    group, active = with_mixtures(group, active, mixtures)
    resting = group.sink_features.index(_resting(group))
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
    return Fitted(group, tuple(active), tuple(other_half), tuple(sinks), is_fitted, matches, mixtures)


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
    made = np.zeros((len(active), len(group.sinks.texts)))
    for head, of_head in enumerate(active):
        mean = part.table(of_head.terms, head).log_sums(of_head.weights) - np.log(part.lengths)
        made[head] = np.median(mean) if len(mean) else 0.0
        made[head, group.sink_rows] = mean
    return made


def describe_fitted(fit: Fitted, sample: Sequence[Unit]) -> list[HeadDescription]:
    """The descriptions of a group's heads."""
    group = fit.group
    fitted, scored = ([n for n, unit in enumerate(sample) if unit.fits == fits] for fits in (True, False))
    names = Names(group, group.part(fitted))
    parts = group.part(scored), group.sinks.of_texts(scored)
    return [_head(fit, sample, parts, names, number) for number in range(len(group.heads))]


def _resting(group: Group) -> int:
    return next(number for number, feature in enumerate(group.features) if feature.name == RESTING)


def _distinct(group: Group) -> list[int]:
    """Features that differ from every simpler one somewhere in the sample."""
    levels, seen, kept = group.active.features, set(), []
    order = sorted(range(len(group.features)), key=lambda number: (group.features[number].rank, number))
    for number in order:
        digest = hashlib.blake2b(levels[number].tobytes()).digest()
        if digest not in seen:
            seen.add(digest)
            kept.append(number)
    return kept


def _bases(features: Sequence[Feature]) -> list[int]:
    """For each feature the number of the one that it is a part of; -1 = it stands alone.

    Special tokens may do as queries what no other does: what is from them alone may stand without its whole.
    """
    from attnscope.core.questions.descriptions import LATER

    numbers = {feature.name: number for number, feature in enumerate(features)} | {"": -1}
    return [LATER if feature.name.endswith(" from special") else numbers[feature.base] for feature in features]


def _head(fit: Fitted, sample: Sequence[Unit], parts: tuple[Part, Part], names: Names, number: int) -> HeadDescription:
    from attnscope.core.questions.descriptions import score, score_of_texts

    group, (scored, sinks) = fit.group, parts
    active, resting = fit.active[number], fit.sinks[number]
    layer, head = group.heads[number]
    whole = score_of_texts(sinks.texts, *whole_losses(fit, sinks, number))
    if whole.nats < EVEN:  # there is nothing to describe, and a share of nothing is none
        nan = float("nan")
        return HeadDescription(group.kind, layer, head, (), whole.nats, nan, nan, nan)
    how, of_rows = score(scored, number, active)
    share = float(scored.text_weights @ scored.mass[:, number]) if len(scored.index) else 0.0
    terms = tuple(_term(group, scored, number, active, place, names) for place in range(len(active.terms)))
    described = Active(
        terms, share, how.nats / share if share > 0 else float("nan"), how.explained, how.low, how.high,
        *_summarise(fit, names, scored, number, terms),
    )  # fmt: skip
    other, first = fit.other_half[number], active.first or active
    agrees = first.terms[:1] == other.terms[:1] if first.terms or other.terms else None
    (_, content), (_, others_content) = (_first(group, one, number, names) for one in (first, other))
    other_half = (others_content or NO_TERM) if not agrees and agrees is not None else ""
    return HeadDescription(
        group.kind, layer, head,
        tuple(_sink_term(group, sinks, number, resting, place, names) for place in range(len(resting.terms))),
        whole.nats, whole.explained, whole.low, whole.high, float("nan"), agrees,
        _failures(group, sample, scored, number, active, of_rows * scored.mass[:, number]),
        _or(group, scored, number, active), _first(group, first, number, names)[0], other_half, described,
    )  # fmt: skip


def _summarise(
    fit: Fitted, names: Names, scored: Part, number: int, terms: tuple[Term, ...]
) -> tuple[tuple[Pair, ...], str]:
    """The pairs and the words of a head: of one that does two things, those of both."""
    if number not in fit.mixtures:
        return summarise(names, number, fit.active[number], terms, fit.group.features)
    mixture, said = fit.mixtures[number], []
    sides = zip(*(sides_of(fit.group, part, mixture.gate) for part in (names.part, scored)), mixture.sides, strict=True)
    for is_other, (side, of_scored, found) in enumerate(sides):
        of_side = Names(fit.group, side)
        of_terms = [_term(fit.group, of_scored, number, found, place, of_side) for place in range(len(found.terms))]
        words = summarise(of_side, number, found, of_terms, fit.group.features, most_pairs=0)[1]
        said.append(f"from {names.of_gate(mixture.gate, bool(is_other))}: {words or 'any token'}")
    return names.pairs(number, scores_beside_pairs(names, number, fit.active[number])), "; ".join(said)


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


def _first(group: Group, found: Description, head: int, names: Names) -> tuple[str, str]:
    """The first term by its feature's name and by what it is called, with "not" before those that are avoided."""
    if not found.terms:
        return "", ""
    sign = "not " if found.weights[0] < 0 else ""
    number = found.terms[0]
    if number >= len(group.features):
        return f"{sign}{_own_name(group, head, number)}", sign + names.of_term(number, head)
    return sign + group.features[number].name, sign + group.features[number].words


def _own_name(group: Group, head: int, term: int) -> str:
    """The name of a term of a head's own: its keys, then either end of each pair, then features from some queries."""
    if term < len(group.features):
        return group.features[term].name
    place = term - len(group.features)
    column = group.active.columns[head][place]
    if column.gate >= 0:
        gate = group.features[group.gates[column.gate]].name
        return f"{_own_name(group, head, column.gated)} from {'not ' if column.is_other else ''}{gate}"
    return "keys" if place == 0 else f"pair{(place + 1) // 2}{'+' if place % 2 else '-'}"


def _or(group: Group, scored: Part, number: int, found: Description) -> str:
    """What another feature is called that might as well be the first term; "" = none, or one that is a term anyway."""
    from attnscope.core.questions.descriptions import explains_more, score

    if found.runner_up is None or found.first is None:
        return ""
    features, (other,) = group.features, found.runner_up.terms
    if other >= len(features):  # a known feature explains as much, and needs no second name
        return ""
    gap = score(scored, number, found.first)[0].explained - score(scored, number, found.runner_up)[0].explained
    if not gap <= NEARLY:
        return ""
    terms = [features[f] for f in found.terms if f < len(features)]
    mine = {feature.shown_by[0] or feature.name for feature in terms}
    named = {features[other].name, features[other].base, features[other].shown_by[0]} - {""}
    if named & {*mine, *(feature.name for feature in terms)}:
        return ""
    if explains_more(scored, number, found.first, found.runner_up):
        return ""
    avoided = found.runner_up.weights[0] < 0
    return f"not {features[other].words}" if avoided else features[other].words


def _term(group: Group, scored: Part, number: int, found: Description, place: int, names: Names) -> Term:
    """One term of a head's attention on keys that are not resting."""
    features, at = group.features, found.terms[place]
    nan = float("nan")
    if at >= len(features):
        column, is_fitted = group.active.columns[number][at - len(features)], scored.is_fitted(at, number)
        share, even = (nan, nan) if column.queries is not None or column.gate >= 0 else _on_high(scored, number, at)
        name, words = _own_name(group, number, at), names.of_term(at, number)
        return Term(name, words, float(found.weights[place]), share, even, found.gains[place], own=is_fitted)
    own = {f: features[f].name for f in found.terms if f < len(features)}
    return _known_term(features, at, found, place, scored, number, set(own.values()), list(range(len(features))))


def _on_high(part: Part, head: int, column: int) -> tuple[float, float]:
    """How much attention the tokens of a term of a head's own get, and how much if it were uniform."""
    of_entries = part.values_of(column, head)[part.column(column, head)]
    high = of_entries >= least_named(of_entries)
    rows = part.weights[head]
    share = float((part.attention(head) * rows[part.row_of])[high].sum())
    return share, float((rows / part.lengths)[part.row_of][high].sum())


def _sink_term(group: Group, sinks: Part, number: int, found: Description, place: int, names: Names) -> Term:
    """One term of where and when a head rests."""
    at, n_shared = found.terms[place], len(group.sink_features)
    nan = float("nan")
    features = [group.features[f] for f in group.sink_features]
    own = [features[f].name for f in found.terms if f < n_shared]
    if at >= n_shared:
        column = group.sinks.columns[number][at - n_shared]
        whole = next((name for name in own if " " not in name), "")
        if column.queries is None:
            name, words = "matches", "where little else fits"
        else:
            name, words = "gate", f"from {names.of_queries(column.values[1::2][column.queries], number)[0]}"
        weight = float(found.weights[place])
        return Term(name, words, weight, nan, nan, found.gains[place], part_of=whole, own=True)
    return _known_term(features, at, found, place, sinks, number, set(own), list(range(n_shared)))


def _known_term(
    features: Sequence[Feature],
    at: int,
    found: Description,
    place: int,
    scored: Part,
    head: int,
    mine: set[str],
    numbers: Sequence[int],
) -> Term:
    """A term of the catalogue, with its share of attention."""
    feature = features[at]
    shown, share_of = feature.shown_by
    by_name = {features[n].name: n for n in numbers}
    shown_at = by_name.get(shown) if shown else at if feature.levels == 2 else None
    whole = feature.base if feature.base in mine else ""
    apart = feature.base and not whole
    return Term(
        feature=feature.name,
        words=f"{features[by_name[feature.base]].words} {feature.words}" if apart else feature.words,
        weight=float(found.weights[place]),
        share=float("nan") if shown_at is None else scored.share(shown_at, head),
        even=float("nan") if shown_at is None else scored.even(shown_at, head),
        gain=found.gains[place],
        share_of=share_of,
        part_of=whole,
    )


def _expected(
    scores: NDArray[np.float64], keys: NDArray[np.int32], place: int, labels: Sequence[str]
) -> tuple[Expected, ...]:
    """The keys that a description gives most in a row; of those that get the same, the nearest to the query's place."""
    p = np.exp(scores - scores.max())
    best = np.lexsort((np.abs(keys - place), -p))[:EXPECTED]
    return tuple(Expected(int(keys[at]), labels[keys[at]], float(p[at] / p.sum())) for at in best)


def _failures(
    group: Group, sample: Sequence[Unit], scored: Part, head: int, found: Description, left: NDArray[np.float64]
) -> tuple[Failure, ...]:
    """The worst row of each of the texts that have the worst."""
    made: dict[int, Failure] = {}
    scores = scored.scores(found.terms, found.weights, head)
    for row in np.argsort(-left, kind="stable")[: 20 * FAILURES]:
        number = int(scored.texts[row])
        if number in made:
            continue
        unit, place = sample[number], int(group.queries[scored.index[row]])
        labels = unit.query_tokens(group.kind).labels
        entries = slice(int(scored.first[row]), int(scored.first[row] + scored.lengths[row]))
        keys = place + group.offsets[scored.entries][entries]
        predicted = _expected(scores[entries], keys, place, unit.key_tokens(group.kind).labels)
        before = " ".join(labels[max(0, place - 6) : place])
        made[number] = Failure(unit.text.index, before, labels[place], place, float(left[row]), predicted)
        if len(made) == FAILURES:
            break
    return tuple(made.values())
