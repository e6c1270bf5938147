"""What does each head do? One line per head, found in the data, and how much of its attention the line explains.

A hash of what texts say draws some of them, whatever their order. A second, small pass over these reads
whole rows of some of their queries. So a description is the same for every cut of the corpus.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.annotated import AnnotatedCorpus, AnnotatedText
from attnscope.annotated.texts import merge_equal
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
    Term,
)
from attnscope.studies.describe.features import Feature
from attnscope.studies.describe.fitting import Fitted, fit_group, halves_of, whole_losses
from attnscope.studies.describe.naming import Names, least_named
from attnscope.studies.describe.rows import Unit, measure
from attnscope.studies.describe.sample import FEWEST_TEXTS, draw
from attnscope.studies.describe.summary import summarise
from attnscope.studies.heads.options import DescribeOptions
from attnscope.studies.inputs.texts import Texts, special_ids, texts_of
from attnscope.studies.measuring.head_blocks import Frequencies

if TYPE_CHECKING:
    from attnscope.core.questions.descriptions import Description
    from attnscope.core.questions.sampled_rows import Part

FAILURES = 3
"""How many tokens are kept of those that a description fails on."""

EXPECTED = 4
"""How many of the keys that the description expects are named for such a token."""

_NAN = float("nan")


@with_plain_torch
def describe(
    model: Model,
    texts: Corpus | str | Sequence[str] | Sequence[CorpusText] | AnnotatedCorpus | Sequence[AnnotatedText],
    options: DescribeOptions | None = None,
) -> Descriptions:
    """Describes every head of a model in one line, by features of queries and keys.

        descriptions = attnscope.describe(model, attnscope.Corpus(["corpus/*.txt"], split="paragraph"))
        print(descriptions)  # one line per head
        descriptions.of(3, 1).terms, descriptions.of(3, 1).explained

    Args:
        model: A loaded model, see `attnscope.load`.
        texts: What to run it on. Near-duplicates are dropped. Links of annotated texts become features.
        options: How.

    Raises:
        AttnscopeError: There is no text.
    """
    options = options or DescribeOptions()
    annotations: dict[str, AnnotatedText] = {}
    corpus = texts_of(_without_annotation(texts, annotations), model)
    counts = count_tokens(distinct(corpus, Copies()), model.tokenizer.encode, special_ids(model))
    return describe_texts(model, corpus, Frequencies.of_counts(counts), options, annotations)


def _without_annotation(texts: Any, annotations: dict[str, AnnotatedText]) -> Any:
    """The texts alone; `annotations` gets the annotated ones by what they say."""
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
    """As `describe`, of texts whose tokens are counted already, and of annotated ones."""

    def annotation_of(text: CorpusText) -> AnnotatedText | None:
        return (annotations or {}).get(text.text or "")

    sample, fits = fit_texts(model, texts, frequencies, options, annotation_of)
    heads = [head for fit in fits for head in describe_fitted(fit, sample)]
    heads.sort(key=lambda head: (model.info.kinds.index(head.kind), head.layer, head.head))
    n_queries = sum(len(unit.queries) for unit in sample)
    n_scored = sum(not unit.fits for unit in sample) if fits else 0
    described = Descriptions(tuple(heads), len(sample), n_queries, n_scored)
    facts = {
        feature.name: FeatureFacts(feature.words, feature.family, feature.source)
        for fit in fits
        for feature in fit.group.features
        if feature.name in described.used
    }
    return replace(described, features=facts)


def fit_texts(
    model: Model,
    texts: Texts,
    frequencies: Frequencies,
    options: DescribeOptions,
    annotation_of: Callable[[CorpusText], AnnotatedText | None] = lambda _: None,
    also: Mapping[int, str] | None = None,
) -> tuple[list[Unit], list[Fitted]]:
    """The sample of some texts, and what is fitted to it; nothing where there are too few texts.

    `also` are types of token in other texts, as `rows.measure` takes them.
    """
    require_heads(model, options.heads)
    sample = draw(model, texts, options)
    for unit in sample:
        unit.annotation = annotation_of(unit.text)
    if len(sample) < FEWEST_TEXTS:
        return sample, []
    groups = measure(model, sample, frequencies, options.heads, also)
    return sample, [fit_group(group, sample, options) for group in groups]


def require_heads(model: Model, heads: Sequence[tuple[int, int]] | None) -> None:
    """Refuses heads that do not exist.

    Raises:
        UsageError: No kind of attention has one.
    """
    shapes = list(zip(model.info.n_layers, model.info.n_heads, strict=True))
    for layer, head in heads or ():
        if not any(layer < n_layers and head < n_heads for n_layers, n_heads in shapes):
            sizes = " and ".join(f"{n_layers} layers of {n_heads} heads" for n_layers, n_heads in dict.fromkeys(shapes))
            raise UsageError(f"there is no head L{layer}H{head} to describe", f"{model.info.name} has {sizes}")


# What is said of it ---------------------------------------------------------------------------------------------


def describe_fitted(fit: Fitted, sample: Sequence[Unit]) -> list[HeadDescription]:
    """The descriptions of a group's heads."""
    fitted, scored = halves_of(sample)
    names = Names(fit.group, fit.group.part(fitted))
    parts = fit.group.part(scored), fit.group.sinks.of_texts(scored)
    return [_Head(fit, sample, names, parts, number).describe() for number in range(len(fit.group.heads))]


class _Head:
    """One head of a group; `rows` and `sinks` are those of the scored texts."""

    def __init__(
        self, fit: Fitted, sample: Sequence[Unit], names: Names, parts: tuple[Part, Part], number: int
    ) -> None:
        self.fit, self.group, self.sample, self.names, self.number = fit, fit.group, sample, names, number
        self.rows, self.sinks = parts
        self.active = fit.active[number]

    def describe(self) -> HeadDescription:
        from attnscope.core.questions.descriptions import score, score_of_texts

        rows, number = self.rows, self.number
        kind, (layer, head) = self.group.kind, self.group.heads[number]
        whole = score_of_texts(self.sinks.texts, *whole_losses(self.fit, self.sinks, number))
        if whole.nats < EVEN:  # there is nothing to describe, and a share of nothing is none
            return HeadDescription(kind, layer, head, (), whole.nats, _NAN, _NAN, _NAN)
        how, of_rows = score(rows, number, self.active)
        share = float(rows.text_weights @ rows.mass[:, number]) if len(rows.index) else 0.0
        terms = self._terms()
        pairs, summary = summarise(self.names, number, self.active, terms)
        nats = how.nats / share if share > 0 else _NAN
        active = Active(terms, share, nats, how.explained, how.low, how.high, pairs, summary)
        other, first = self.fit.other_half[number], self.active.first or self.active
        differs = first.terms[:1] != other.terms[:1]
        return HeadDescription(
            kind, layer, head, self._sink_terms(), whole.nats, whole.explained, whole.low, whole.high,
            failures=self._failures(of_rows * rows.mass[:, number]),
            content=self._first(first)[0],
            other_half=self._first(other)[1] or NO_TERM if differs else "",
            active=active,
        )  # fmt: skip

    def _first(self, description: Description) -> tuple[str, str]:
        """The first term by its feature's name and by what it is called, with "not" before those that are avoided."""
        if not description.terms:
            return "", ""
        sign = "not " if description.weights[0] < 0 else ""
        term = description.terms[0]
        return sign + self._name(term), sign + self.names.of_term(term, self.number)

    def _name(self, term: int) -> str:
        """The feature's name; of a head's own "keys", either end of each pair, or a feature from some queries."""
        features = self.group.features
        if term < len(features):
            return features[term].name
        place = term - len(features)
        column = self.group.active.columns[self.number][place]
        if column.gate >= 0:
            gate = features[self.group.gates[column.gate]].name
            return f"{self._name(column.gated)} from {gate}"
        return "keys" if place == 0 else f"pair{(place + 1) // 2}{'+' if place % 2 else '-'}"

    def _terms(self) -> tuple[Term, ...]:
        """The terms of attention on keys that are not resting, with their shares in the scored rows."""
        description, part, features, terms = self.active, self.rows, self.group.features, []
        for place, term in enumerate(description.terms):
            if term < len(features):
                terms.append(_known_term(features, description, place, part, self.number))
                continue
            column = self.group.active.columns[self.number][term - len(features)]
            shares = (_NAN, _NAN)
            if column.queries is None and column.gate < 0:
                shares = _shares_on_high(part, self.number, term)
            terms.append(
                Term(
                    self._name(term), self.names.of_term(term, self.number), float(description.weights[place]), *shares,
                    description.gains[place], own=part.is_fitted(term, self.number),
                )
            )  # fmt: skip
        return tuple(terms)

    def _sink_terms(self) -> tuple[Term, ...]:
        """The terms of where and when a head rests."""
        description, terms = self.fit.sinks[self.number], []
        features = [self.group.features[f] for f in self.group.sink_features]
        chosen = [features[f].name for f in description.terms if f < len(features)]
        whole = next((name for name in chosen if " " not in name), "")
        for place, term in enumerate(description.terms):
            if term < len(features):
                terms.append(_known_term(features, description, place, self.sinks, self.number))
                continue
            column = self.group.sinks.columns[self.number][term - len(features)]
            name, words = "matches", "where little else fits"
            if column.queries is not None:
                values = column.values[1::2][column.queries]
                name, words = "gate", f"from {self.names.of_queries(values, self.number)[0]}"
            weight, gain = float(description.weights[place]), description.gains[place]
            terms.append(Term(name, words, weight, _NAN, _NAN, gain, part_of=whole, own=True))
        return tuple(terms)

    def _failures(self, left: NDArray[np.float64]) -> tuple[Failure, ...]:
        """The worst row of each of the texts that have the worst."""
        rows, failures = self.rows, dict[int, Failure]()
        scores = rows.scores(self.active.terms, self.active.weights, self.number)
        for row in np.argsort(-left, kind="stable")[: 20 * FAILURES]:
            text = int(rows.texts[row])
            if text in failures:
                continue
            unit, place = self.sample[text], int(self.group.queries[rows.index[row]])
            labels = unit.tokens(self.group.kind).labels
            entries = slice(int(rows.first[row]), int(rows.first[row] + rows.lengths[row]))
            keys = place + self.group.offsets[rows.entries][entries]
            predicted = _expected(scores[entries], keys, place, labels)
            before = " ".join(labels[max(0, place - 6) : place])
            failures[text] = Failure(unit.text.index, before, labels[place], place, float(left[row]), predicted)
            if len(failures) == FAILURES:
                break
        return tuple(failures.values())


def _shares_on_high(part: Part, head: int, column: int) -> tuple[float, float]:
    """How much attention the tokens of a term of a head's own get, and how much if it were uniform."""
    of_entries = part.values_of(column, head)[part.column(column, head)]
    high = of_entries >= least_named(of_entries)
    rows = part.weights[head]
    share = float((part.attention(head) * rows[part.row_of])[high].sum())
    return share, float((rows / part.lengths)[part.row_of][high].sum())


def _known_term(features: Sequence[Feature], description: Description, place: int, part: Part, head: int) -> Term:
    """A term of the catalogue, with its share of attention; terms of a description are numbers of `features`."""
    term = description.terms[place]
    feature = features[term]
    numbers = {each.name: number for number, each in enumerate(features)}
    name, share_of = feature.shown_by
    shown_at = numbers.get(name) if name else term if feature.levels == 2 else None
    chosen = {features[f].name for f in description.terms if f < len(features)}
    apart = feature.base and feature.base not in chosen
    return Term(
        feature=feature.name,
        words=f"{features[numbers[feature.base]].words} {feature.words}" if apart else feature.words,
        weight=float(description.weights[place]),
        share=_NAN if shown_at is None else part.share(shown_at, head),
        even=_NAN if shown_at is None else part.even(shown_at, head),
        gain=description.gains[place],
        share_of=share_of,
        part_of="" if apart else feature.base,
    )


def _expected(
    scores: NDArray[np.float64], keys: NDArray[np.int32], place: int, labels: Sequence[str]
) -> tuple[Expected, ...]:
    """The keys that a description gives most in a row; of those that get the same, the nearest to the query's place."""
    p = np.exp(scores - scores.max())
    best = np.lexsort((np.abs(keys - place), -p))[:EXPECTED]
    return tuple(Expected(int(keys[at]), labels[keys[at]], float(p[at] / p.sum())) for at in best)
