"""What a tool says of a head, in a form that all tools share; and attnscope as one of them.

To enter another tool, write a class with `name`, `source` and `answer`, and add it to `rivals.TOOLS`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.known.truth import Flags, KnownModel, Place, Text

if TYPE_CHECKING:
    from attnscope.core.questions.sampled_rows import Column
    from attnscope.studies.describe.rows import Group
    from attnscope.studies.describe.study import Fitted

Floats = NDArray[np.float64]
Pattern = Callable[[Text], NDArray[np.generic]]
"""(query, key) of a text, 0 to 1: how much a key is what a tool names."""


@dataclass(frozen=True)
class Answer:
    """What a tool says of one head.

    Attributes:
        line: It in the tool's own words; empty = nothing.
        terms: What the head attends to beside a sink, the first first. Empty = nothing is named.
        rests: Whether it says that the head rests on the first token.
        undescribed: Whether it says that it cannot describe the head.
        predict: The attention that it expects, (query, key), rows that sum to 1 over the keys a query may see; None =
            it expects nothing: even attention.
        roles: Roles that it gives the head, by attnscope's names for them.
    """

    line: str
    terms: tuple[Pattern, ...] = ()
    rests: bool = False
    undescribed: bool = False
    predict: Callable[[Text], Floats] | None = field(default=None, repr=False)
    roles: frozenset[str] = frozenset()


class Tool(Protocol):
    """A tool on the benchmark.

    Attributes:
        name: What to call it.
        source: The paper or code that defines it.
        roles: Roles that it can give, by attnscope's names for them.
    """

    name: str
    source: str
    roles: frozenset[str]

    def answer(self, known: KnownModel, attention: Sequence[Floats]) -> Mapping[Place, Answer]:
        """Says what each known head does.

        Args:
            known: The model and its texts. `heads` is the truth: a tool may use its keys alone.
            attention: Of each of `known.texts`, (layer, head, query, key).
        """
        ...

    def vocabulary(self, known: KnownModel) -> Sequence[Pattern]:
        """Every pattern that it has a name for: a rule that is none of them cannot be asked of it."""
        ...


def allowed(text: Text, causal: bool) -> Flags:
    """Which keys each query may see."""
    return np.tri(text.n, dtype=np.bool_) if causal else np.ones((text.n, text.n), np.bool_)


RESTING = ("special:", "first", "resting")
"""Features of attnscope that name tokens on which heads rest."""


class Attnscope:
    """attnscope's lines and roles."""

    name = "attnscope"
    source = "docs/descriptions.md, docs/heads.md"
    roles = frozenset(
        ("previous_token", "next_token", "self_token", "same_token", "induction", "first_token", "delimiter", "local",
         "rare", "diffuse", "similar_token")
    )  # fmt: skip

    def answer(self, known: KnownModel, attention: Sequence[Floats]) -> Mapping[Place, Answer]:
        """One run of `attnscope.heads` with descriptions, and its terms as functions of texts."""
        import attnscope

        options = attnscope.HeadsOptions(describe=attnscope.DescribeOptions())
        findings = attnscope.heads(known.model, [text.written for text in known.texts], options)
        features = _Features.of(known)
        roles = {(head.layer, head.head): frozenset(role.name for role in head.roles) for head in findings.heads}
        fitted = _fitted(known)
        answers = {}
        for layer, head in known.heads:
            found = findings.description(layer, head)
            fit, number = fitted[layer, head]
            active, sinks = features.terms(fit, number)
            answers[layer, head] = Answer(
                found.line,
                tuple(pattern for weight, pattern in active if weight > 0),
                found.active is not None and found.active.share < 0.9,
                found.spreads_evenly or "undescribed" in found.words,
                features.prediction(active, sinks),
                roles[layer, head],
            )
        return answers

    def vocabulary(self, known: KnownModel) -> Sequence[Pattern]:
        """The catalogue of features."""
        features = _Features.of(known)
        return [features.pattern(name) for name in features.numbers if not name.startswith(RESTING)]


class _Features:
    """The values of attnscope's features on texts of one model."""

    _last: "tuple[KnownModel, _Features] | None" = None

    def __init__(self, known: KnownModel) -> None:
        from attnscope.corpus import Copies, CorpusText, count_tokens, distinct
        from attnscope.studies.describe.features import catalogue
        from attnscope.studies.inputs.texts import special_ids
        from attnscope.studies.measuring.head_blocks import Frequencies

        self.known, model = known, known.model
        corpus = [CorpusText(n, "texts", n + 1, text=text.written) for n, text in enumerate(known.texts)]
        counts = count_tokens(distinct(corpus, Copies()), model.tokenizer.encode, special_ids(model))
        self._frequencies = Frequencies.of_counts(counts)
        self._tokens = [model.tokenizer.encode(text.written) for text in known.texts]
        labels = dict.fromkeys(t.labels[i] for t in self._tokens for i in np.flatnonzero(t.special))
        self._features = catalogue(list(labels))
        self.numbers = {feature.name: number for number, feature in enumerate(self._features)}
        self._held: dict[Text, NDArray[np.float32]] = {}

    @classmethod
    def of(cls, known: KnownModel) -> "_Features":
        if cls._last is None or cls._last[0] is not known:
            cls._last = known, cls(known)
        return cls._last[1]

    def _of(self, text: Text) -> NDArray[np.float32]:
        """(feature, query, key), 0 to 1."""
        if text not in self._held:
            from attnscope.corpus import Chunk, CorpusText
            from attnscope.studies.describe.features import blocks_of
            from attnscope.studies.describe.rows import Unit, _facts, _frequent

            units = [Unit(CorpusText(0, "texts", 1), Chunk(0, 0, 1, tokens), np.arange(0)) for tokens in self._tokens]
            frequent = _frequent(units, self._frequencies)
            tokens = self.known.model.tokenizer.encode(text.written)
            facts = _facts(self.known.model, tokens, None, self._frequencies, frequent)
            levels = np.array([feature.levels for feature in self._features])[:, None, None]
            self._held[text] = blocks_of(self._features, facts, np.arange(text.n)).astype(np.float32) / (levels - 1)
        return self._held[text]

    def pattern(self, name: str) -> Pattern:
        number = self.numbers[name]
        return lambda text: self._of(text)[number]

    def terms(self, fit: "Fitted", head: int) -> tuple["Terms", "Terms"]:
        """The terms of a head as weights and functions of texts: what it attends to, and where it rests."""
        group, active, sinks = fit.group, fit.active[head], fit.sinks[head]
        own = group.active.columns[head]

        def attended(number: int) -> Pattern:
            if number < len(group.features):
                return lambda text: self._of(text)[self.numbers[group.features[number].name]] * ~self._rests(text)
            return lambda text: self._column(group, own[number - len(group.features)], text) * ~self._rests(text)

        def rested(number: int) -> Pattern:
            if number < len(group.sink_features):
                name = group.features[group.sink_features[number]].name
                return lambda text: self._of(text)[self.numbers[name]]
            column = group.sinks.columns[head][number - len(group.sink_features)]
            if column.queries is not None:
                return lambda text: self._column(group, column, text)
            known, order = fit.matches[head], np.argsort(fit.matches[head])
            assert column.rows is not None
            values = column.values[1::2][column.rows]
            terms = made[0]

            def by_match(text: Text) -> Floats:
                free = allowed(text, self.known.causal) & ~self._rests(text)
                n_free = np.maximum(free.sum(1), 1)
                matches = np.log(np.maximum((np.exp(_scores(terms, text)) * free).sum(1) / n_free, 1e-30))
                return np.interp(matches, known[order], values[order])[:, None] * self._rests(text)

            return by_match

        made: list[Terms] = []
        made.append([(float(w), attended(f)) for f, w in zip(active.terms, active.weights, strict=True)])
        made.append([(float(w), rested(f)) for f, w in zip(sinks.terms, sinks.weights, strict=True)])
        return made[0], made[1]

    def _rests(self, text: Text) -> Flags:
        """(query, key): keys on which heads rest."""
        return self._of(text)[self.numbers["resting"]] > 0

    def _column(self, group: "Group", column: "Column", text: Text) -> Floats:
        """The values of a feature that a head alone has; tokens that are not in the sample have a middling level."""
        ids = self.known.model.tokenizer.encode(text.written).ids
        types = np.minimum(group.types.places(ids), len(group.types.ids) - 1)
        is_known = group.types.ids[types] == ids

        def levels(of_types: NDArray[np.uint8]) -> NDArray[np.int64]:
            return np.where(is_known, of_types[types], int(np.median(of_types))).astype(np.int64)

        keys = self._rests(text).astype(np.int64) if column.keys is None else levels(column.keys)[None]
        queries = 0 if column.queries is None else levels(column.queries)[:, None]
        return column.values[queries * column.n_key_levels + keys] * np.ones((text.n, 1))

    def prediction(self, active: "Terms", sinks: "Terms") -> Callable[[Text], Floats]:
        """What both parts expect: of keys that are not resting by their scores, of the rest by theirs."""

        def predict(text: Text) -> Floats:
            seen, rests = allowed(text, self.known.causal), self._rests(text)
            scores = _scores(active, text)
            free = np.where(seen & ~rests, np.exp(scores - scores.max(1, keepdims=True)), 0.0)
            n_free = (seen & ~rests).sum(1, keepdims=True)
            free *= n_free / np.maximum(free.sum(1, keepdims=True), 1e-30)
            rows = free + np.where(seen & rests, np.exp(_scores(sinks, text)), 0.0)
            return rows / rows.sum(1, keepdims=True)

        return predict


Terms = list[tuple[float, Pattern]]


def _scores(terms: Terms, text: Text) -> Floats:
    scores = np.zeros((text.n, text.n))
    for weight, pattern in terms:
        scores = scores + weight * np.asarray(pattern(text), np.float64)
    return scores


def _fitted(known: KnownModel) -> "Mapping[Place, tuple[Fitted, int]]":
    """The fit of each head, as `attnscope.heads` makes it."""
    from attnscope.corpus import Copies, CorpusText, count_tokens, distinct
    from attnscope.studies.describe.rows import measure
    from attnscope.studies.describe.study import DescribeOptions, draw, fit_group
    from attnscope.studies.inputs.texts import special_ids
    from attnscope.studies.measuring.head_blocks import Frequencies

    corpus = [CorpusText(n, "texts", n + 1, text=text.written) for n, text in enumerate(known.texts)]
    counts = count_tokens(distinct(corpus, Copies()), known.model.tokenizer.encode, special_ids(known.model))
    options = DescribeOptions()
    sample = draw(known.model, corpus, options)
    fits = [fit_group(group, sample, options) for group in measure(known.model, sample, Frequencies.of_counts(counts))]
    return {place: (fit, number) for fit in fits for number, place in enumerate(fit.group.heads)}
