"""What a tool says of a head, in a form that all tools share; and attnscope as one of them.

To enter another tool, write a class with `name`, `source` and `answer`, and add it to `rivals.TOOLS`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.known.truth import Flags, KnownModel, Place, Text

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
        """One run of `attnscope.heads` with descriptions."""
        import attnscope

        options = attnscope.HeadsOptions(describe=attnscope.DescribeOptions())
        findings = attnscope.heads(known.model, [text.written for text in known.texts], options)
        features = _Features.of(known)
        roles = {(head.layer, head.head): frozenset(role.name for role in head.roles) for head in findings.heads}
        answers = {}
        for layer, head in known.heads:
            found = findings.description(layer, head)
            mine = [term for term in found.terms if term.weight > 0 and not term.part_of]
            resting = [term for term in mine if term.feature.startswith(RESTING)]
            weights = {term.feature: term.weight for term in found.terms}
            answers[layer, head] = Answer(
                found.line,
                tuple(features.pattern(term.feature) for term in mine if term not in resting),
                bool(resting),
                found.spreads_evenly or "undescribed" in found.words,
                features.prediction(weights),
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

    def prediction(self, weights: Mapping[str, float]) -> Callable[[Text], Floats]:
        """p(k | q) ∝ exp(sum of weight times feature) over the keys that a query may see (docs/descriptions.md)."""
        numbers, given = [self.numbers[name] for name in weights], np.array(list(weights.values()))

        def predict(text: Text) -> Floats:
            scores = np.tensordot(given, self._of(text)[numbers].astype(np.float64), 1) if numbers else 0.0
            scores = np.where(allowed(text, self.known.causal), scores, -np.inf)
            rows = np.exp(scores - scores.max(1, keepdims=True))
            return rows / rows.sum(1, keepdims=True)

        return predict
