"""What does each head do? A line a head that was found, not asked for, and how much of its attention it explains.

Of a corpus some texts are drawn by a hash of what they say, whatever their order and the shard: a second, small pass
over these reads whole rows of some of their queries. So a description is the same for every cut of the corpus.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.annotated import AnnotatedCorpus, AnnotatedText
from attnscope.annotated.texts import merged
from attnscope.core.plain_torch import with_plain_torch
from attnscope.corpus import Copies, Corpus, CorpusText, chunks, count_tokens, distinct, essence
from attnscope.corpus.batching import tokens_of
from attnscope.errors import UsageError
from attnscope.models.model import Model
from attnscope.records.heads.descriptions import (
    EVEN,
    NO_TERM,
    Descriptions,
    Expected,
    Failure,
    FeatureFacts,
    HeadDescription,
    Term,
)
from attnscope.studies.describe.features import RESTING, Feature
from attnscope.studies.describe.own_features import own_features
from attnscope.studies.describe.rows import Group, Unit, measure
from attnscope.studies.inputs.texts import Texts, special_ids, texts_of
from attnscope.studies.measuring.head_blocks import Frequencies

if TYPE_CHECKING:
    from attnscope.core.questions.sampled_rows import Part

QUERIES, QUERIES_A_TEXT = 2000, 8
"""Queries that are sampled; and how many of a text at least, while that leaves texts out."""

MOST_BYTES = 160 * 2**20
"""What the features of sampled rows, and what heads have of them, may take."""

MOST_TEXTS, MOST_CHARACTERS = 1024, 4_000_000
"""Texts that are drawn before they are tokenised, and their characters."""

FEWEST_TEXTS = 2
"""Below so many texts (chunks of long ones) nothing can be scored on others."""

NEARLY = 0.05
"""By how much less of the nats another first term may explain, alone, that is named beside the first."""

FAILURES = 3
"""Tokens that are kept of those that a description fails on."""

EXPECTED = 4
"""Keys of such a token that are named of those that the description expects."""


@dataclass(frozen=True)
class DescribeOptions:
    """How heads are described.

    Attributes:
        features: Features of one's own, `name=pattern` each: see `own_features.own_feature`.
        most_terms: Terms of a description at most.
        queries: How many queries are sampled.
        heads: (layer, head) of the heads that are described, of every kind; None = all.
        chunk: As of `HeadsOptions`; likewise stride.
        stride: See there.
        seed: Of the lots by which texts and queries are drawn.
    """

    features: tuple[str, ...] = ()
    most_terms: int = 4
    queries: int = QUERIES
    heads: tuple[tuple[int, int], ...] | None = None
    chunk: int | None = None
    stride: int | None = None
    seed: int = 0


@with_plain_torch
def describe(
    model: Model,
    texts: Corpus | str | Sequence[str] | Sequence[CorpusText] | AnnotatedCorpus | Sequence[AnnotatedText],
    features: Sequence[str] = (),
    options: DescribeOptions | None = None,
) -> Descriptions:
    """Says of every head of a model what it does, in the terms of a catalogue of features.

        found = attnscope.describe(model, attnscope.Corpus(["corpus/*.txt"], split="paragraph"))
        print(found)  # a line a head
        found.of(3, 1).terms, found.of(3, 1).explained

    Args:
        model: A loaded model, see `attnscope.load`.
        texts: What to run it on; copies of earlier texts are left out. The links of annotated texts are features too.
        features: Further features, `name=pattern` each.
        options: How.

    Raises:
        AttnscopeError: There is no text, or a feature is none.
    """
    options = options or DescribeOptions()
    options = replace(options, features=(*options.features, *features))
    annotations: dict[str, AnnotatedText] = {}
    corpus = texts_of(_without_annotation(texts, annotations))
    counts = count_tokens(distinct(corpus, Copies()), model.tokenizer.encode, special_ids(model))
    return describe_texts(model, corpus, Frequencies.of_counts(counts), options, annotations)


def _without_annotation(texts: Any, annotations: dict[str, AnnotatedText]) -> Any:
    """The texts alone; annotations are put by, by what they are of."""
    is_annotated = isinstance(texts, AnnotatedCorpus) or (
        isinstance(texts, list | tuple) and bool(texts) and isinstance(texts[0], AnnotatedText)
    )
    if not is_annotated:
        return texts
    for text in merged(texts):
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
    require_heads(model, options.heads)
    own = own_features(options.features)
    sample = draw(model, texts, options)
    for unit in sample:
        unit.annotation = (annotations or {}).get(unit.text.text or "")
    n_queries = sum(len(unit.queries) for unit in sample)
    if len(sample) < FEWEST_TEXTS:
        return Descriptions((), len(sample), n_queries, 0)
    groups = measure(model, sample, frequencies, own, options.heads)
    found: list[HeadDescription] = []
    by_name: dict[str, FeatureFacts] = {}
    for group in groups:
        found += _describe_group(group, sample, options)
        by_name |= {one.name: FeatureFacts(one.words, one.family, one.source) for one in group.features}
    found.sort(key=lambda one: (model.info.kinds.index(one.kind), one.layer, one.head))
    n_scored = len(sample) - sum(unit.fits for unit in sample)
    used = {term.feature for one in found for term in one.terms}
    facts = {name: by_name[name] for name in by_name if name in used}
    unmatched = tuple(one.name for one in own if not any(group.matches(one) for group in groups))
    return Descriptions(tuple(found), len(sample), n_queries, n_scored, facts, unmatched)


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


# The sample -----------------------------------------------------------------------------------------------------


def draw(model: Model, texts: Texts, options: DescribeOptions) -> list[Unit]:
    """Draws texts and queries by a hash of what they say; those that are fitted come first."""
    special = special_ids(model)
    n_heads = max(1, sum(model.info.n_heads[i] * model.info.n_layers[i] for i in range(len(model.info.kinds))))
    units: list[tuple[bytes, bytes, Unit]] = []
    for text in _drawn(distinct(texts, Copies()), options.seed):
        tokens = tokens_of(text, model.tokenizer.encode, special)
        limit = model.info.max_tokens
        for part in chunks(tokens, text.index, limit=limit, chunk=options.chunk, stride=options.stride):
            queries = np.flatnonzero(~part.repeated)
            if len(part) > 1 and len(queries):
                of_text = lot_of(text, options.seed)
                units.append((lot_of(text, options.seed, part.number), of_text, Unit(text, part, queries)))
    units.sort(key=lambda one: one[0])
    sizes = np.array([(len(unit.queries), len(unit.chunk)) for *_, unit in units]).reshape(-1, 2)

    def fits(n_units: int, each: int) -> bool:
        rows = np.minimum(sizes[:n_units, 0], each)
        n_rows, n_entries = int(rows.sum()), int((rows * sizes[:n_units, 1]).sum())
        # Half of the texts are fitted, of which a record is kept for each text; of the others for each row.
        n_records = (n_rows + n_units) / 2
        size = n_records * n_heads * _N_FEATURES * 2 + n_entries * _N_FEATURES * len(model.info.kinds)
        return n_rows <= options.queries and (size <= MOST_BYTES or n_rows <= _FEWEST_ROWS)

    n_units = len(units)
    each = QUERIES_A_TEXT
    while n_units > FEWEST_TEXTS and not fits(n_units, each):
        n_units -= max(1, n_units // 50)
    longest = int(sizes[:n_units, 0].max(initial=0))
    low, high = 1, max(1, longest)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(n_units, middle) else (low, middle - 1)
    kept = units[:n_units]
    for lot, _, unit in kept:
        rng = np.random.default_rng(int.from_bytes(lot, "little"))
        unit.queries = np.sort(rng.permutation(unit.queries)[:low]).astype(np.int64)
    # Chunks of one text are in one half, where there are texts enough.
    of_texts = sorted({of_text for _, of_text, _ in kept})
    apart = len(of_texts) >= 6
    names = [of_text if apart else lot for lot, of_text, _ in kept]
    order = {name: number for number, name in enumerate(sorted(set(names), key=lambda name: name[::-1]))}
    for name, (*_, unit) in zip(names, kept, strict=True):
        unit.fits = order[name] % 2 == 0
    return sorted((unit for *_, unit in kept), key=lambda unit: not unit.fits)


_N_FEATURES, _FEWEST_ROWS = 120, 200
"""About how many features there are; and how many rows are read whatever they take."""


def _drawn(texts: Iterable[CorpusText], seed: int) -> list[CorpusText]:
    """The texts with the smallest hashes, as many as are held."""
    held: list[tuple[int, int, CorpusText]] = []
    characters = 0
    for text in texts:
        lot = -int.from_bytes(lot_of(text, seed), "big")
        heapq.heappush(held, (lot, text.index, text))
        characters += text.n_characters
        while len(held) > FEWEST_TEXTS and (len(held) > MOST_TEXTS or characters > MOST_CHARACTERS):
            characters -= heapq.heappop(held)[2].n_characters
    return [text for *_, text in sorted(held, key=lambda one: -one[0])]


def lot_of(text: CorpusText, seed: int, part: int = -1) -> bytes:
    """A number that depends on what a text says alone, and is the same for its copies: any of them may be the one."""
    return hashlib.blake2b(essence(text) + f"{seed} {part}".encode(), digest_size=8).digest()


# What is said of it ---------------------------------------------------------------------------------------------


def _describe_group(group: Group, sample: Sequence[Unit], options: DescribeOptions) -> list[HeadDescription]:
    from attnscope.core.questions.descriptions import describe as find_terms

    numbers = range(len(sample))
    fitted, scored = (group.rows.of_texts([i for i in numbers if sample[i].fits == fits]) for fits in (True, False))
    ranks = [feature.rank for feature in group.features]
    distinct_ones = _distinct(group)
    found = find_terms(fitted, ranks, most=options.most_terms, candidates=distinct_ones, needs=_bases(group.features))
    outside = _outside_sinks(group)
    others = find_terms(
        scored, ranks, most=options.most_terms, candidates=distinct_ones, needs=_bases(group.features), until=outside
    )
    return [
        _head(group, sample, scored, number, one, other, outside)
        for number, (one, other) in enumerate(zip(found, others, strict=True))
    ]


def _outside_sinks(group: Group) -> NDArray[np.bool_]:
    """(feature,): whether a feature tells keys apart that are neither special tokens nor the first."""
    features = group.rows.features
    outside = features[_resting(group)] == 0
    return np.array([len(levels := of_all[outside]) > 0 and levels.min() < levels.max() for of_all in features])


def _resting(group: Group) -> int:
    return next(number for number, feature in enumerate(group.features) if feature.name == RESTING)


def _distinct(group: Group) -> list[int]:
    """Features that differ from every simpler one somewhere in the sample."""
    held, seen, kept = group.rows.features, set(), []
    order = sorted(range(len(group.features)), key=lambda number: (group.features[number].rank, number))
    for number in order:
        digest = hashlib.blake2b(held[number].tobytes()).digest()
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


def _head(
    group: Group,
    sample: Sequence[Unit],
    scored: Part,
    number: int,
    found: Any,
    other: Any,
    outside: NDArray[np.bool_],
) -> HeadDescription:
    from attnscope.core.questions.descriptions import masses, score, score_of_texts

    layer, head = group.heads[number]
    how, left = score(scored, number, found)
    if how.nats < EVEN:  # there is nothing to describe, and a share of nothing is none
        nan = float("nan")
        return HeadDescription(group.kind, layer, head, (), how.nats, nan, nan, nan, nan)
    resting = _resting(group)
    nats = group.rows.uniform_nats[scored.index, number]
    on = group.rows.expected[group.rows.records_of(scored.index), number, resting].astype(np.float64)
    beside = score_of_texts(scored.texts, left - _binary_nats(on, masses(scored, found, resting)), nats)
    terms = tuple(_term(group, scored, number, found, place) for place in range(len(found.terms)))
    agrees = found.terms[:1] == other.terms[:1] if found.terms or other.terms else None
    content, others_content = (
        next((_signed(group, one, place) for place, term in enumerate(one.terms) if outside[term]), ("", ""))
        for one in (found, other)
    )
    other_half = others_content[1] or NO_TERM if content != others_content else ""
    return HeadDescription(
        group.kind, layer, head, terms, how.nats, how.explained, how.low, how.high, beside.explained, agrees,
        _failures(group, sample, scored, found, left), _or(group, scored, number, found), content[0], other_half,
    )  # fmt: skip


def _signed(group: Group, found: Any, place: int) -> tuple[str, str]:
    """A term by its feature's name and by what it is called, with "not" before those that are avoided."""
    feature = group.features[found.terms[place]]
    sign = "not " if found.weights[place] < 0 else ""
    return sign + feature.name, sign + feature.words


def _or(group: Group, scored: Part, number: int, found: Any) -> str:
    """What another feature is called that might as well be the first term; "" = none, or one that is a term anyway."""
    from attnscope.core.questions.descriptions import explains_more, score

    if found.runner_up is None:
        return ""
    gap = score(scored, number, found.first)[0].explained - score(scored, number, found.runner_up)[0].explained
    if not gap <= NEARLY:
        return ""
    features, (other,) = group.features, found.runner_up.terms
    mine = {features[f].shown_by[0] or features[f].name for f in found.terms}
    named = {features[other].name, features[other].base, features[other].shown_by[0]} - {""}
    if named & {*mine, *(features[f].name for f in found.terms)}:
        return ""
    if explains_more(scored, number, found.first, found.runner_up):
        return ""
    avoided = found.runner_up.weights[0] < 0
    return f"not {features[other].words}" if avoided else features[other].words


def _term(group: Group, scored: Part, number: int, found: Any, place: int) -> Term:
    """One term of a head's description."""
    features = group.features
    feature = features[found.terms[place]]
    shown, share_of = feature.shown_by
    names = [one.name for one in features]
    at = names.index(shown) if shown else found.terms[place] if feature.levels == 2 else None
    whole = feature.base if feature.base in [features[f].name for f in found.terms] else ""
    apart = feature.base and not whole
    return Term(
        feature=feature.name,
        words=f"{features[names.index(feature.base)].words} {feature.words}" if apart else feature.words,
        weight=float(found.weights[place]),
        share=float("nan") if at is None else float(scored.expected[number, at]),
        even=float("nan") if at is None else float(scored.even[at]),
        gain=found.gains[place],
        share_of=share_of,
        part_of=whole,
    )


def _binary_nats(a: NDArray[np.float64], p: NDArray[np.float64]) -> NDArray[np.float64]:
    """KL of two shares to two others: what knowing how much is on one side is worth."""
    tiny = 1e-9
    a, p = np.clip(a, tiny, 1 - tiny), np.clip(p, tiny, 1 - tiny)
    return a * np.log(a / p) + (1 - a) * np.log((1 - a) / (1 - p))


def _expected(group: Group, found: Any, row: int, place: int, labels: Sequence[str]) -> tuple[Expected, ...]:
    """The keys that a description gives most in a row of the group; of those that get the same, the nearest."""
    terms, entries = list(found.terms), slice(*group.rows.starts[row : row + 2])
    values = group.rows.features[terms, entries] / (group.rows.levels[terms] - 1)[:, None]
    scores = found.weights @ values
    p, keys = np.exp(scores - scores.max()), group.keys[entries]
    best = np.lexsort((np.abs(keys - place), -p))[:EXPECTED]
    return tuple(Expected(int(keys[at]), labels[keys[at]], float(p[at] / p.sum())) for at in best)


def _failures(
    group: Group, sample: Sequence[Unit], scored: Part, found: Any, left: NDArray[np.float64]
) -> tuple[Failure, ...]:
    """The worst row of each of the texts that have the worst."""
    first = {int(text): row for row, text in reversed(list(enumerate(scored.texts)))}
    made: dict[int, Failure] = {}
    for row in np.argsort(-left, kind="stable")[: 20 * FAILURES]:
        number = int(scored.texts[row])
        if number in made:
            continue
        unit = sample[number]
        # Rows with a single key were left out: those that are here are the last of the text's.
        n_rows = int((scored.texts == number).sum())
        place = int(unit.queries[len(unit.queries) - n_rows + (int(row) - first[number])])
        labels = unit.query_tokens(group.kind).labels
        made[number] = Failure(
            unit.text.index, " ".join(labels[max(0, place - 6) : place]), labels[place], place, float(left[row]),
            _expected(group, found, int(scored.index[row]), place, labels),
        )  # fmt: skip
        if len(made) == FAILURES:
            break
    return tuple(made.values())
