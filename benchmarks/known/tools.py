"""What a tool says of a head, and attnscope as such a tool."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

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
        roles: Roles that it can give, by attnscope's names for them.
    """

    roles: frozenset[str]

    def answer(self, known: KnownModel, attention: Sequence[Floats]) -> Mapping[Place, Answer]:
        """Say what each known head does.

        Args:
            known: The model and its texts. `heads` is the truth: a tool may use its keys alone.
            attention: Of each of `known.texts`, (layer, head, query, key).
        """
        ...

    def vocabulary(self, known: KnownModel) -> Sequence[Pattern]:
        """Return every pattern that it has a name for: a rule that is none of them cannot be asked of it."""
        ...


def allowed(text: Text, causal: bool) -> Flags:
    """Return which keys each query may see."""
    return np.tri(text.n, dtype=np.bool_) if causal else np.ones((text.n, text.n), np.bool_)


RESTING = ("special:", "first", "resting")
"""Features of attnscope that name tokens on which heads rest."""


class Attnscope:
    """attnscope's lines and roles."""

    roles = frozenset(
        (
            "previous_token",
            "next_token",
            "self_token",
            "same_token",
            "induction",
            "first_token",
            "delimiter",
            "local",
            "rare",
            "diffuse",
            "similar_token",
        )
    )

    def answer(self, known: KnownModel, attention: Sequence[Floats]) -> Mapping[Place, Answer]:
        """One run of `attnscope.heads` with descriptions, and its terms as functions of texts."""
        import attnscope
        from attnscope.studies.describe.study import MIN_MENTIONED

        options = attnscope.HeadsOptions(describe=attnscope.DescribeOptions())
        findings = attnscope.heads(known.model, [text.written for text in known.texts], options)
        expected = _Expected.of(known)
        heads = findings.table("heads")
        answers = {}
        for layer, head in known.heads:
            row = findings.row(layer, head)
            line, share = str(heads["description"][row]), heads["active_share"][row]
            answers[layer, head] = Answer(
                line,
                expected.named((layer, head)) if share >= MIN_MENTIONED else (),
                bool(share < 0.9),
                line == "spreads evenly" or "undescribed" in line,
                expected.prediction((layer, head)),
                frozenset(findings.roles_of(row)["role"].tolist()),
            )
        return answers

    def vocabulary(self, known: KnownModel) -> Sequence[Pattern]:
        """The catalogue of features, and each single token: a head may have terms of its own that name tokens."""
        expected = _Expected.of(known)
        names = expected.features(known.texts[0])
        types = dict.fromkeys(
            token for text in known.held_out for token in text.tokens[1 : text.n - text.n_last]
        )
        return [
            *(expected.pattern(name) for name in names if not name.startswith(RESTING)),
            *(partial(_is_token, token) for token in types),
        ]


def _is_token(token: str, text: Text) -> Flags:
    return np.broadcast_to(np.array([one == token for one in text.tokens]), (text.n, text.n))


class _Expected:
    """What attnscope's descriptions expect on texts of one model."""

    _last: "tuple[KnownModel, _Expected] | None" = None

    def __init__(self, known: KnownModel) -> None:
        from attnscope.corpus import CorpusText
        from benchmarks.known.expected import describe_to_expect

        texts, held_out = (
            [CorpusText(n, "texts", n + 1, text=text.written) for n, text in enumerate(of)]
            for of in (known.texts, known.held_out)
        )
        self._known = known
        self._kind = known.model.info.kinds[0]
        self._expectations = describe_to_expect(known.model, texts, held_out)
        self._tokens: dict[Text, Any] = {}
        self._features: dict[Text, Mapping[str, Floats]] = {}

    @classmethod
    def of(cls, known: KnownModel) -> "_Expected":
        if cls._last is None or cls._last[0] is not known:
            cls._last = known, cls(known)
        return cls._last[1]

    def tokens(self, text: Text) -> Any:
        if text not in self._tokens:
            self._tokens[text] = self._known.model.tokenizer.encode(text.written)
        return self._tokens[text]

    def features(self, text: Text) -> Mapping[str, Floats]:
        if text not in self._features:
            self._features[text] = self._expectations.features(self.tokens(text))
        return self._features[text]

    def pattern(self, name: str) -> Pattern:
        return lambda text: self.features(text)[name]

    def named(self, place: Place) -> tuple[Pattern, ...]:
        """Return what a line names, the first first; terms that begin with "not" name together all that is left."""
        weights = [weight for weight, _ in self._terms(self._known.texts[0], place)]
        if not weights:
            return (lambda text: np.ones((text.n, text.n)),)
        n_less = next((n for n, weight in enumerate(weights) if weight > 0), len(weights))
        made: list[Pattern] = []
        if n_less:
            made.append(
                lambda text: np.prod([1 - values for _, values in self._terms(text, place)[:n_less]], 0)
            )
        return (*made, *(self._term(place, n) for n, weight in enumerate(weights) if weight > 0))

    def _term(self, place: Place, number: int) -> Pattern:
        return lambda text: self._terms(text, place)[number][1]

    def _terms(self, text: Text, place: Place) -> list[tuple[float, Floats]]:
        layer, head = place
        return self._expectations.terms(self.tokens(text), (self._kind, layer), head)

    def prediction(self, place: Place) -> Callable[[Text], Floats]:
        """Return the weights that a head's line expects."""
        layer, head = place

        def predict(text: Text) -> Floats:
            seen = allowed(text, self._known.causal)
            scores = self._expectations.scores(
                self.tokens(text), (self._kind, layer), head, seen
            ).astype(np.float64)
            rows = np.where(
                seen, np.exp(scores - np.where(seen, scores, -np.inf).max(1, keepdims=True)), 0.0
            )
            return rows / rows.sum(1, keepdims=True)

        return predict
