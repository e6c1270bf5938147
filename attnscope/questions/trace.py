"""Declare a trace, attention computed step by step: every number, its formula, and its line of NumPy."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType
from rich.text import Text

from attnscope.errors import AttnscopeError, amount, safe
from attnscope.options import numbers_from, option, options
from attnscope.report.blocks import Block, Grid, Report, Special
from attnscope.report.matrix import matrix
from attnscope.report.wording import model_of, printable, report_on
from attnscope.results.result import Result
from attnscope.results.table import Array, Column, ColumnKind, count, text

MOST_IN_JSON = 4096
"""The most numbers of an input that JSON holds; of a larger one it has the shape."""

_SCORES = ("traced", "keys")

HEAD_STEPS: Mapping[str, tuple[str, ...]] = {
    "query": ("traced", "columns"),
    "keys": ("keys", "columns"),
    "values": ("keys", "value_columns"),
    "dot_products": _SCORES,
    "scores": _SCORES,
    "capped_scores": _SCORES,
    "biased_scores": _SCORES,
    "masked_scores": _SCORES,
    "exponentials": _SCORES,
    "sink": ("traced", "1"),
    "weights": _SCORES,
    "weighted_values": ("keys", "value_columns"),
    "head_output": ("traced", "value_columns"),
}
"""The steps of a head, and what the axes of their values are."""

JOINT_STEPS: Mapping[str, tuple[str, ...]] = {
    "joined": ("traced", "joined"),
    "output": ("traced", "outputs"),
}
"""The steps after the heads."""

INPUTS: Mapping[str, tuple[str, ...]] = {
    "Q": ("queries", "columns of Q"),
    "K": ("keys", "columns of K"),
    "V": ("keys", "columns of V"),
    "scale": (),
    "may": ("masks", "queries", "keys"),
    "bias": ("biases", "queries", "keys"),
    "softcap": (),
    "sinks": ("n_heads",),
    "W_O": ("outputs", "joined"),
    "b_O": ("outputs",),
    "H": ("n_heads", "queries", "value_columns"),
}
"""What the lines start from, by the names that they use, and what the axes are."""

_AXES = {"query": ("query", "queries"), "key": ("key",), "sink": ("sink",)}
"""What an axis has; other axes have columns."""


@options
class TraceOptions:
    """The options for tracing a layer."""

    target: str | None = option(
        "What an encoder-decoder is to write.  [default: its own greedy output]",
        default=None,
        panel="Text",
        rare=True,
    )
    heads: tuple[int, ...] | None = option(
        "Heads of that layer, such as 1,8-10.",
        "-H",
        "--heads",
        default=None,
        read=numbers_from,
        panel="Heads",
    )
    query: str | None = option(
        "Follow this query: a token, a word, or a place such as @3.  [default: all]",
        default=None,
        panel="Heads",
    )
    kind: str | None = option(
        "In an encoder-decoder: encoder, decoder or cross.  [default: the first]",
        default=None,
        panel="Heads",
        rare=True,
    )


def _arrays() -> Iterator[Array]:
    """Yield what the arrays of a trace are: steps of heads, steps after them, and inputs."""
    for name, axes in HEAD_STEPS.items():
        yield Array(name, "the value after this step", axes=("heads", *axes))
    for name, axes in JOINT_STEPS.items():
        yield Array(name, "the value after this step", axes=axes)
    for name, axes in INPUTS.items():
        kind: ColumnKind = "flag" if name == "may" else "number"
        yield Array(f"input_{name}", f"what the lines call {name}", axes=axes, kind=kind)


class Trace(Result):
    """One attention, step by step.

    Running all lines of the table `steps` in order, on copies of the inputs, gives every value again. Its `options`
    have the text, the kind and number of the layer, how many heads it has, and the distance from the kernel (`check`).
    """

    SCHEMA: ClassVar[str] = "attnscope.trace/2"
    TABLES: ClassVar[Mapping[str, Sequence[Column]]] = {
        "steps": (
            text("name", "such as dot_products"),
            text("title", "what it does, for people"),
            text("formula", "the mathematics"),
            text("code", "the line of NumPy that computes it"),
            text("variable", "the expression that holds the value after it"),
            text("axes", "what the axes of the value are, with blanks between"),
            count("head", "the head that it belongs to; -1 = all"),
        ),
        "heads": (count("head", "a head that is traced"),),
        "queries": (text("token", "a token that attends"),),
        "keys": (text("token", "a token that is attended to"),),
        "traced": (count("query", "a query that is traced", refers_to="queries"),),
    }
    ARRAYS: ClassVar[Sequence[Array]] = tuple(_arrays())

    @property
    def query(self) -> int | None:
        """Return the place of the one query that is traced; None = all of them."""
        return int(self.table("traced")["query"][0]) if self.options["one_query"] else None

    @property
    def tokens(self) -> dict[str, list[str]]:
        """Return the labels of what axes may be: "query" and "key"."""
        tables = {"query": "queries", "key": "keys"}
        return {
            axis: [printable(token, 40) for token in self.table(name)["token"]]
            for axis, name in tables.items()
        }

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Return the steps in order: what the table says of each, and its value."""
        steps = self.table("steps").as_dicts()
        for step in steps:
            step["axes"] = step["axes"].split()
            step["value"] = self._value(step)
        return steps

    def _value(self, step: Mapping[str, Any]) -> NDArray[np.float64]:
        """Return the value of a step; of one query without its axis."""
        value: NDArray[np.float64] = self.grids[step["name"]]
        if step["head"] >= 0:
            value = value[self.table("heads")["head"].tolist().index(step["head"])]
        return value[0] if value.ndim > len(step["axes"]) else value

    def of(self, name: str, head: int | None = None) -> NDArray[np.float64]:
        """Return the value of a step by its name; of the first head that has it, or of `head`."""
        for step in self.steps:
            if step["name"] == name and (head is None or step["head"] == head):
                value: NDArray[np.float64] = step["value"]
                return value
        known = ", ".join(dict.fromkeys(self.table("steps")["name"].tolist()))
        raise AttnscopeError(f"there is no step {name!r}", f"the steps are: {known}")

    def as_json(self) -> dict[str, Any]:
        """Return what `Result` does; of inputs with more than 4096 numbers the shape alone."""
        document = super().as_json()
        for name, values in self.grids.items():
            if name.startswith("input_") and values.size > MOST_IN_JSON:
                document[name] = {"shape": list(values.shape)}
        return document

    def require_whole(self) -> None:
        """Refuse what `Result` does, and steps that have no value with their axes."""
        super().require_whole()
        # Axes of queries and keys have the sizes of their tables.
        sizes = {"query": len(self.table("queries")), "key": len(self.table("keys"))}
        if not isinstance(self.options.get("one_query"), bool) or not len(self.table("traced")):
            raise ValueError("it does not say which queries are traced")
        # Each step has a value, and a head or -1 for all heads.
        for name, head in zip(
            self.table("steps")["name"].tolist(), self.table("steps")["head"].tolist(), strict=True
        ):
            if name not in self.grids or (head >= 0 and head not in self.table("heads")["head"]):
                raise ValueError(f"it has no value of the step {name[:40]!r}")
        for step in self.steps:
            shape = step["value"].shape
            if len(shape) != len(step["axes"]):
                raise ValueError("a step's value does not have its axes")
            if any(sizes.get(axis, n) != n for axis, n in zip(step["axes"], shape, strict=True)):
                raise ValueError("a step's value does not fit its tokens")

    def to_py(self) -> str:
        """Return a Python script that computes everything again from the `.npz` beside it."""
        # Inputs become variables of the script.
        head = (
            f"# {self.options['kind']} attention, layer {self.options['layer']}. Reads trace.npz beside this file.",
            "from pathlib import Path",
            "",
            "import numpy as np",
            "",
            'with np.load(Path(__file__).with_name("trace.npz")) as given:',
            '    globals().update({name[6:]: given[name] for name in given.files if name.startswith("input_")})',
            "np.set_printoptions(precision=4, suppress=True)",
        )
        # Each step as a comment, its line of NumPy and its result.
        body = []
        for step in self.steps:
            variable = step["variable"]
            body.append(f"\n# {step['title']}: {step['formula']}\n{step['code']}")
            body.append(f"print({variable!r}, {variable}, sep='\\n')")
        return "\n".join((*head, *body)) + "\n"

    def report(self, **shown: Any) -> Report:
        """Return the largest weights first, then every step."""
        answer = [f"attention step by step; {heading_of(self)}", _answer(self)]
        return report_on(self, answer, _blocks(self), [_check_line(self)])


# What is said


def heading_of(trace: Trace) -> str:
    """Say which heads are traced, and for which query."""
    about = trace.options
    is_example = trace.run.get("model") == "worked example"
    where = (
        "worked example"
        if is_example
        else f"{model_of(trace.run)}, {printable(about['kind'])} layer {about['layer']}"
    )
    grouped = (
        "" if about["n_kv_heads"] == about["n_heads"] else f" on {about['n_kv_heads']} key/value heads"
    )
    query = "all queries"
    if trace.query is not None:
        query = f"query {trace.tokens['query'][trace.query]!r} (token {trace.query})"
    return f"{where}: {amount(about['n_heads'], 'head')}{grouped}; {query}"


def _answer(trace: Trace) -> str:
    """Say where each head puts most of its attention."""
    queries, keys = trace.tokens["query"], trace.tokens["key"]
    said = []
    # Weights, (head, traced query, key); ties count as one.
    for head, weights in zip(trace.table("heads")["head"].tolist(), trace["weights"], strict=True):
        row, _ = np.unravel_index(int(np.nanargmax(weights)), weights.shape)
        largest = weights[row].max()
        favourites = np.flatnonzero(weights[row] >= largest * (1 - 1e-9)).tolist()
        names = " and ".join(keys[key] for key in favourites)
        each = " each" if len(favourites) > 1 else ""
        query = queries[int(trace.table("traced")["query"][row])]
        said.append(f"head {head}: {query} → {names} {largest:.4f}{each}")
    more = f"; and {amount(len(said) - 3, 'more head')}" if len(said) > 3 else ""
    return "largest weights, query → key: " + "; ".join(said[:3]) + more


def _blocks(trace: Trace) -> Iterator[Block]:
    heads = trace.table("heads")["head"].tolist()
    if trace.query is not None:
        yield Grid(
            heading="weights, from the query to each key: a row sums to 1",
            values=trace["weights"][:, 0],
            rows=[f"head {head}" for head in heads],
            columns=trace.tokens["key"],
            most=len(heads),
        )
    yield Special(view=_Steps(trace))


def _check_line(trace: Trace) -> str:
    """Say how far the steps are from what the model's own kernel computed."""
    check = trace.options["check"]
    parts = []
    for name, what in (
        ("weights", "weights differ"),
        ("outputs", "outputs differ"),
        ("projected", "after W_O"),
    ):
        if isinstance(check.get(name), float):
            parts.append(f"{what} by {'' if name == 'projected' else 'at most '}{check[name]:.1e}")
    return f"against {printable(check.get('kernel', ''), 200)}: {', '.join(parts)}"


@dataclass(frozen=True, eq=False)
class _Steps:
    """Every step with its shape, its formula, its line of NumPy and its numbers, in the terminal."""

    trace: Trace

    def show(self, console: Any, *, every: bool) -> Sequence[RenderableType]:
        """Return the lines of all steps, with a heading where another head begins."""
        parts: list[RenderableType] = []
        head = None
        for number, step in enumerate(self.trace.steps, start=1):
            if step["head"] != head:
                head = step["head"]
                parts.append(draw_section(self.trace, head))
            parts += draw_title(step, number)
            parts.append(draw_numbers(step, self.trace.tokens, console))
        return parts


def draw_section(trace: Trace, head: int) -> Text:
    """Return the heading above the steps of a head, or above those of all heads."""
    title = f"Head {head} (of heads 0 to {trace.options['n_heads'] - 1})"
    return Text(f"\n{'All heads together' if head < 0 else title}", style="bold underline")


def draw_title(step: Mapping[str, Any], number: int) -> list[Text]:
    """Return the lines above the numbers of a step: its title and shape, its formula, and its line of NumPy."""
    sizes = []
    for axis, size in zip(step["axes"], step["value"].shape, strict=True):
        sizes.append(amount(size, *_AXES.get(axis, ("column",))))
    return [
        Text.assemble(
            (f"\n{number:>2}  {safe(step['title'])}", "bold"), (f"  ({', '.join(sizes)})", "dim")
        ),
        Text(f"    {safe(step['formula'])}"),
        Text(f"    {safe(step['code'])}", style="cyan"),
    ]


def draw_numbers(
    step: Mapping[str, Any], tokens: Mapping[str, Sequence[str]], console: Any
) -> RenderableType:
    """Return the numbers of a step, with four decimals."""
    value, axes = step["value"], step["axes"]
    names = tokens.get(axes[0]) if value.ndim == 2 else None
    is_bold = step["name"] == "weights"
    return matrix(np.atleast_2d(value), names, tokens.get(axes[-1]), console, bold=is_bold)
