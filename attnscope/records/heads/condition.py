"""The grammar of conditions on heads, which `--where` and the filter box of an atlas share. Parsed, never run as code.

docs/atlas.md has the grammar; tests/conditions.json has cases that both parsers pass. The other parser is query.js.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TEXTS = ("name", "kind", "role", "description", "token")
"""Where words are searched."""

_TOKEN = re.compile(
    r"""\s*(?:(?P<arrow>->|→)
    |(?P<number>(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?%?)(?=[\s<>=!&|():→+*/]|->|$)
    |"(?P<quoted>[^"]*)"
    |(?P<sign>>=|<=|!=|==|&&|\|\||[-<>=!&|():+*/])
    |(?P<word>(?:(?!->)[^\s<>=!&|():"→+*/])+))""",
    re.VERBOSE | re.IGNORECASE,
)
_SAME = {"==": "=", "&&": "&", "||": "|", "and": "&", "or": "|", "not": "!"}
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le, "=": operator.eq, "!=": operator.ne,
}  # fmt: skip
_OPERATIONS: tuple[dict[str, Callable[[float, float], float]], ...] = (
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": lambda a, b: a / b if b else math.nan},
)
_NAME = re.compile(r"[^\W\d][\w-]*")


class GrammarError(Exception):
    """A text is not a condition; the message says why."""


@dataclass(frozen=True)
class Facts:
    """What conditions can ask about heads.

    Attributes:
        numbers: Per head, by name.
        flags: The names among them that say yes or no, such as roles.
        texts: Lower-case text per head, by each of TEXTS.
        pairs: Per head, the pairs of query and key that stand out, in lower case.
    """

    numbers: Mapping[str, NDArray[np.float64]]
    flags: frozenset[str] = frozenset()
    texts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    pairs: Sequence[Sequence[tuple[str, ...]]] = ()


Value = Callable[[Facts, int], float]
"""A number of a head; of a test 1 or 0."""


class _Token(NamedTuple):
    what: str
    shown: str
    value: str


class _Node(NamedTuple):
    """Part of a condition; `token` is set as long as it is one word or number, which may be searched or compared."""

    value: Value | None
    token: _Token | None = None


def _tokens(text: str) -> list[_Token]:
    tokens, at = [], 0
    while text[at:].strip():
        match = _TOKEN.match(text, at)
        if not match:
            raise GrammarError("a quote is not closed")
        at = match.end()
        what, shown = str(match.lastgroup), str(match[str(match.lastgroup)])
        if what == "arrow":
            tokens.append(_Token("sign", shown, "->"))
        elif what == "quoted":
            tokens.append(_Token(what, f'"{shown}"', shown))
        elif what == "sign" or shown.lower() in ("and", "or", "not"):
            tokens.append(_Token("sign", shown, _SAME.get(shown.lower(), shown)))
        else:
            tokens.append(_Token(what, shown, shown))
    return tokens


def truth(value: float) -> bool:
    """Whether a number counts as yes: known, and not 0."""
    return bool(value) and not math.isnan(value)


class Condition:
    """A parsed condition.

    Attributes:
        names: The names in it that must be numbers.
        words: The bare words in it, which are roles or are searched.

    Args:
        text: The condition.

    Raises:
        GrammarError: It does not fit the grammar.
    """

    def __init__(self, text: str) -> None:
        self._tokens, self._at = _tokens(text), 0
        self.names: set[str] = set()
        self.words: set[str] = set()
        self.holds = self._test(self._either())
        if token := self._next():
            raise GrammarError(f"{token.shown} is one too many")

    def _next(self) -> _Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _take(self, *signs: str) -> str:
        """The sign that comes next, if it is one of these; goes past it."""
        token = self._next()
        if token is None or token.what != "sign" or token.value not in signs:
            return ""
        self._at += 1
        return token.value

    def _take_word(self, message: str) -> _Token:
        token = self._next()
        if token is None or token.what == "sign":
            raise GrammarError(message)
        self._at += 1
        return token

    def _either(self) -> _Node:
        parts = [self._all()]
        while self._take("|"):
            parts.append(self._all())
        if len(parts) == 1:
            return parts[0]
        tests = [self._test(part) for part in parts]
        return _Node(lambda facts, at: float(any(truth(test(facts, at)) for test in tests)))

    def _all(self) -> _Node:
        parts = [self._not()]
        while self._take("&") or self._begins():
            parts.append(self._not())
        if len(parts) == 1:
            return parts[0]
        tests = [self._test(part) for part in parts]
        return _Node(lambda facts, at: float(all(truth(test(facts, at)) for test in tests)))

    def _begins(self) -> bool:
        """Whether another test begins, without a sign before it."""
        token = self._next()
        return token is not None and (token.what != "sign" or token.value in ("(", "!"))

    def _not(self) -> _Node:
        if self._take("!"):
            test = self._test(self._not())
            return _Node(lambda facts, at: float(not truth(test(facts, at))))
        return self._compared()

    def _compared(self) -> _Node:
        """Such as layer > 3, or 0.2 < induction < 0.4."""
        first = self._arithmetic()
        if not (sign := self._take(*_COMPARISONS)):
            return first
        left, tests = self._number(first), []
        while sign:
            token = self._next()
            if token is None or (token.what == "sign" and token.value not in ("(", "-")):
                raise GrammarError(f"a number is missing after {sign}")
            right = self._number(self._arithmetic())
            tests.append(_compare(left, right, _COMPARISONS[sign]))
            left, sign = right, self._take(*_COMPARISONS)
        return _Node(lambda facts, at: float(all(test(facts, at) for test in tests)))

    def _arithmetic(self, level: int = 0) -> _Node:
        if level == len(_OPERATIONS):
            return self._negated()
        left = self._arithmetic(level + 1)
        while sign := self._take(*_OPERATIONS[level]):
            a, b = self._number(left), self._number(self._arithmetic(level + 1))
            left = _Node(_apply(a, b, _OPERATIONS[level][sign]))
        return left

    def _negated(self) -> _Node:
        if self._take("-"):
            number = self._number(self._negated())
            return _Node(lambda facts, at: -number(facts, at))
        return self._primary()

    def _primary(self) -> _Node:
        if self._take("("):
            inner = self._either()
            if not self._take(")"):
                raise GrammarError("a bracket is not closed: ) is missing")
            return inner
        token = self._next()
        if token is None:
            before = f"something is missing after {self._tokens[-1].shown}" if self._tokens else "there is nothing"
            raise GrammarError(before)
        if token.what == "sign":
            raise GrammarError(f"something is missing before {token.shown}")
        self._at += 1
        if self._take("->"):
            return self._pair(token)
        kind = token.value.lower()
        if token.what == "word" and kind in TEXTS and (sign := self._take(":", "=", "!=")):
            wanted = self._take_word(f"a word is missing after {token.shown}{sign}").value
            search, is_sought = _search(wanted, (kind,)), sign != "!="
            return _Node(lambda facts, at: float(truth(search(facts, at)) is is_sought))
        if self._take(":"):
            raise GrammarError(f"before : stands one of {', '.join(TEXTS)}, not {token.shown}")
        return _Node(None, token)

    def _pair(self, query: _Token) -> _Node:
        """Such as it -> animal: a query and a key that stand out, both as whole tokens."""
        pair = (query.value.lower(), self._take_word("a token is missing after ->").value.lower())
        return _Node(lambda facts, at: float(bool(facts.pairs) and pair in facts.pairs[at]))

    def _test(self, node: _Node) -> Value:
        """A part as a test: a bare word is a role's flag, or is searched."""
        if node.value is not None:
            return node.value
        assert node.token is not None
        word, is_bare = node.token.value, node.token.what == "word"
        search = _search(word, TEXTS)
        if is_bare:
            self.words.add(word)
        return lambda facts, at: (
            float(facts.numbers[word][at]) if is_bare and word in facts.flags else search(facts, at)
        )

    def _number(self, node: _Node) -> Value:
        """A part as a number."""
        if node.value is not None:
            return node.value
        assert node.token is not None
        what, shown, word = node.token
        if what == "number":
            number = float(word.removesuffix("%")) / (100 if word.endswith("%") else 1)
            return lambda facts, at: number
        if what == "quoted" or not _NAME.fullmatch(word):
            raise GrammarError(f"{shown} is neither a number nor the name of one")
        self.names.add(word)
        return lambda facts, at: float(facts.numbers[word if word in facts.numbers else word.lower()][at])


def _compare(left: Value, right: Value, holds: Callable[[float, float], bool]) -> Callable[[Facts, int], bool]:
    def test(facts: Facts, at: int) -> bool:
        a, b = left(facts, at), right(facts, at)
        return not (math.isnan(a) or math.isnan(b)) and holds(a, b)

    return test


def _apply(left: Value, right: Value, operation: Callable[[float, float], float]) -> Value:
    return lambda facts, at: operation(left(facts, at), right(facts, at))


def _search(word: str, kinds: Sequence[str]) -> Value:
    wanted = word.lower()
    return lambda facts, at: float(any(wanted in facts.texts[kind][at] for kind in kinds if kind in facts.texts))
