"""What is known of a head: a rule that says which keys each query attends to, written without looking at any tool."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Flags = NDArray[np.bool_]
Place = tuple[int, int]
"""(layer, head), both from 0."""


@dataclass(frozen=True)
class Text:
    """One text as its tokens, special ones included.

    Attributes:
        tokens: The first is the one that stands before every text: a sink, where a head has one.
        n_last: How many special tokens end it.
        spelled: The text, where it is more than its ordinary tokens with blanks between them.
    """

    tokens: tuple[str, ...]
    n_last: int = 0
    spelled: str | None = None

    @property
    def written(self) -> str:
        """Return what a tokenizer reads."""
        return " ".join(self.tokens[1 : self.n - self.n_last]) if self.spelled is None else self.spelled

    @property
    def n(self) -> int:
        """Return how many tokens there are."""
        return len(self.tokens)


@dataclass(frozen=True)
class Rule:
    """Which keys a head attends to.

    Attributes:
        name: Its kind, such as "offset" or "induction".
        words: It in words, such as "the token 2 before".
        keys: (query, key) of a text: whether the rule names this key. A row without any says nothing of its query,
            which then rests on the first token.
    """

    name: str
    words: str
    keys: Callable[[Text], Flags] = field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", lru_cache(128)(self.keys))


@dataclass(frozen=True)
class Truth:
    """What one head does.

    Attributes:
        rules: What it attends to; two for a head with two rules, none for one that does nothing but rest.
        rests: Whether it rests on the first token when its rules name no key, or beside them.
        part: Where the head comes from: "planted", "grown" or "real".
        source: The program, paper or seed that the truth is written in.
    """

    rules: tuple[Rule, ...]
    rests: bool
    part: str
    source: str

    def keys(self, text: Text, causal: bool) -> Flags:
        """(query, key) that any rule names and the query may see."""
        named = np.zeros((text.n, text.n), np.bool_)
        for rule in self.rules:
            named |= rule.keys(text)
        return named & np.tri(text.n, dtype=np.bool_) if causal else named


@dataclass(frozen=True, eq=False)
class KnownModel:
    """A model some of whose heads are known, and texts for it.

    Attributes:
        name: What to call it.
        model: As `attnscope.load` returns it.
        causal: Whether a query sees no later keys.
        texts: What tools may look at.
        held_out: What they are scored on.
        heads: What each known head does.
        circuit: Heads that the model's task needs; empty = nothing is known of that.
        asks_all: Whether the task asks for every next word, so that a loss over all of them measures it.
    """

    name: str
    model: Any
    causal: bool
    texts: Sequence[Text]
    held_out: Sequence[Text]
    heads: Mapping[Place, Truth]
    circuit: tuple[Place, ...] = ()
    asks_all: bool = False


class WrongTruth(AssertionError):
    """A head does not do what its source says: the benchmark itself is wrong."""


def verify(
    known: KnownModel, attention: Sequence[NDArray[np.float64]], least: float = 0.5
) -> dict[Place, float]:
    """Compare what is known with the attention that the model computes.

    Args:
        known: The model.
        attention: Of each held-out text, (layer, head, query, key).
        least: The mass that must lie on the rules' keys, the mean over queries for which there are any.

    Returns:
        That mass of each head with a rule.

    Raises:
        WrongTruth: A head's mass is elsewhere, or it does not rest where it should.
    """
    masses: dict[Place, float] = {}
    for place, truth in known.heads.items():
        on_rule, beside = [], []
        for text, weights in zip(known.held_out, attention, strict=True):
            named, rows = truth.keys(text, known.causal), weights[place]
            speaks = named.any(1)
            resting = named.copy()
            resting[:, 0] |= truth.rests
            on_rule += (rows * named).sum(1)[speaks].tolist()
            beside += (rows * ~resting).sum(1)[speaks if truth.rules else slice(None)].tolist()
        if truth.rules:
            masses[place] = float(np.mean(on_rule)) if on_rule else 0.0
        if truth.rules and masses[place] < least or not truth.rules and np.mean(beside) > 1 - least:
            said = " and ".join(rule.words for rule in truth.rules) or "rests"
            mass = masses.get(place, 1 - float(np.mean(beside)))
            raise WrongTruth(
                f"{known.name} L{place[0]}H{place[1]} should attend to {said}: {mass:.2f} of its mass does"
            )
    return masses


def attention_of(known: KnownModel, texts: Sequence[Text]) -> list[NDArray[np.float64]]:
    """Return the model's own weights of each text, (layer, head, query, key)."""
    import attnscope

    maps = []
    for text in texts:
        record = attnscope.heatmap(known.model, text.written)
        (block,) = [one for one in record.maps if one.kind in ("encoder", "decoder")]
        weights = np.asarray(block.weights, np.float64)
        if weights.shape[-1] != text.n:
            raise WrongTruth(
                f"{known.name} reads {weights.shape[-1]} tokens of a text of {text.n}: {text.written!r}"
            )
        maps.append(weights)
    return maps


# Rules ------------------------------------------------------------------------------------------------------------


def offset(by: int) -> Rule:
    """Return the token at a fixed distance; below 0 = before."""

    def keys(text: Text) -> Flags:
        return np.eye(text.n, k=by, dtype=np.bool_)

    words = {0: "the token itself", -1: "the previous token", 1: "the next token"}
    side = "before" if by < 0 else "after"
    return Rule("offset", words.get(by, f"the token {abs(by)} {side}"), keys)


def between(name: str, words: str, holds: Callable[[str, str], bool]) -> Rule:
    """Keys by what query and key are, word by word; special tokens take no part."""

    def keys(text: Text) -> Flags:
        named = np.array([[holds(query, key) for key in text.tokens] for query in text.tokens], np.bool_)
        return named & _ordinary(text)[:, None] & _ordinary(text)

    return Rule(name, words, keys)


def same_token() -> Rule:
    """Return the same token elsewhere."""
    rule = between("same", "the same token elsewhere", lambda query, key: query == key)
    return Rule(rule.name, rule.words, lambda text: rule.keys(text) & ~np.eye(text.n, dtype=np.bool_))


def induction() -> Rule:
    """Return what followed the same token before."""

    def keys(text: Text) -> Flags:
        same = np.array([[a == b for b in (None, *text.tokens[:-1])] for a in text.tokens], np.bool_)
        return same & np.tri(text.n, k=-1, dtype=np.bool_) & _ordinary(text)[:, None] & _ordinary(text)

    return Rule("induction", "what followed the same token before", keys)


def last(
    name: str, words: str, holds: Callable[[Text, int], bool], among: Callable[[str], bool], own: bool
) -> Rule:
    """Return the last key of which something holds, for some queries.

    Args:
        name: The rule's kind.
        words: It in words.
        holds: Whether a key, by its place, may be attended to.
        among: Which queries have the rule.
        own: Whether the query itself may be that key.
    """

    def keys(text: Text) -> Flags:
        named, seen = np.zeros((text.n, text.n), np.bool_), -1
        for place, token in enumerate(text.tokens):
            is_key = 0 < place < text.n - text.n_last and holds(text, place)
            if own and is_key:
                seen = place
            if seen >= 0 and _ordinary(text)[place] and among(token):
                named[place, seen] = True
            if is_key:
                seen = place
        return named

    return Rule(name, words, keys)


def _ordinary(text: Text) -> Flags:
    places = np.arange(text.n)
    return (places > 0) & (places < text.n - text.n_last)
