"""RASP (Weiss et al. 2021) as far as programs here need it: written once, run in plain Python, and compiled by Tracr.

Running a program gives the selection of each Select, which is what a compiled head must attend to: the truth comes from
the source. Nothing here needs Tracr; `compiled` translates.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.known.truth import Flags

Value = Any
Holds = Callable[[Value, Value], bool]
"""Whether a query selects a key, by the values of both: (key, query)."""


@dataclass(frozen=True, eq=False)
class Op:
    """A value for each token: tokens, indices, or what is computed of others.

    Attributes:
        kind: "tokens", "indices", "map", "zip", "aggregate" or "width".
        inner: What it is made of.
        function: What is done to their values.
        selector: Of "aggregate" and "width".
        numerical: Whether Tracr is to keep it as a number, not one-hot.
        name: What to call it.
    """

    kind: str
    name: str
    inner: "tuple[Op, ...]" = ()
    function: Callable[..., Value] | None = field(default=None, repr=False)
    selector: "Select | None" = None
    numerical: bool = False


@dataclass(frozen=True, eq=False)
class Select:
    """Which keys each query selects: one head.

    Attributes:
        keys: What is compared of a key.
        queries: What of the query.
        holds: Which pairs are selected; none with None in it is.
        words: What is selected, in words.
    """

    keys: Op
    queries: Op
    holds: Holds
    words: str


tokens = Op("tokens", "token")
indices = Op("indices", "place")


def apply(function: Callable[[Value], Value], op: Op, name: str, numerical: bool = False) -> Op:
    """A function of each value."""
    return Op("map", name, (op,), function, numerical=numerical)


def join(function: Callable[[Value, Value], Value], a: Op, b: Op, name: str) -> Op:
    """A function of two values of each token."""
    return Op("zip", name, (a, b), function)


def width(selector: Select, name: str = "") -> Op:
    """How many keys are selected."""
    return Op("width", name or f"number of {selector.words}", selector=selector)


def aggregate(selector: Select, op: Op, name: str = "") -> Op:
    """The value of the key that is selected; of several, the mean, where they are numbers."""
    return Op("aggregate", name or f"{op.name} at {selector.words}", (op,), None, selector, op.numerical)


def run(op: Op, words: Sequence[Value]) -> list[Value]:
    """The values of a program on one sequence."""
    n = len(words)
    inner = [run(one, words) for one in op.inner]
    if op.kind == "tokens":
        return list(words)
    if op.kind == "indices":
        return list(range(n))
    if op.kind in ("map", "zip"):
        assert op.function is not None
        function = op.function
        return [_ignoring_none(function, *(values[i] for values in inner)) for i in range(n)]
    assert op.selector is not None
    chosen = selection(op.selector, words)
    if op.kind == "width":
        return [int(count) for count in chosen.sum(1)]
    found: list[Value] = []
    for row in chosen:
        values = [inner[0][key] for key in np.flatnonzero(row)]
        if not values:
            found.append(0 if op.numerical else None)
        else:
            found.append(sum(values) / len(values) if op.numerical else values[0])
    return found


def _ignoring_none(function: Callable[..., Value], *values: Value) -> Value:
    return None if None in values else function(*values)


def selection(selector: Select, words: Sequence[Value]) -> Flags:
    """(query, key) that a Select selects in one sequence."""
    keys, queries = run(selector.keys, words), run(selector.queries, words)
    return np.array(
        [[None not in (key, query) and bool(selector.holds(key, query)) for key in keys] for query in queries], np.bool_
    )


def heads_of(op: Op) -> list[Op]:
    """The aggregates and widths that a program is made of, each once: its heads."""
    seen: list[Op] = []

    def visit(one: Op) -> None:
        if one in seen:
            return
        for inner in (*one.inner, *((one.selector.keys, one.selector.queries) if one.selector else ())):
            visit(inner)
        seen.append(one)

    visit(op)
    return [one for one in seen if one.selector is not None]
