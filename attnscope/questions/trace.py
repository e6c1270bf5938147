"""Declare a trace, attention computed step by step: every number, its formula, and its line of NumPy."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType
from rich.text import Text

from attnscope.errors import AttnscopeError, amount, safe
from attnscope.options import option, options, read_ranges
from attnscope.report.blocks import Block, CustomBlock, Grid, Report
from attnscope.report.matrix import draw_matrix
from attnscope.report.wording import model_of, printable, report_on
from attnscope.results.result import Result
from attnscope.results.table import Array, Column, ColumnKind, count, text

WORKED_EXAMPLE = "worked example"
"""The name of the model in the trace of the built-in example."""

_MAX_NUMBERS_IN_JSON = 4096
"""The most numbers of an input that JSON holds; of a larger one it has the shape."""

_SCORE_AXES = ("traced", "keys")
"""The axes of scores and weights."""

HEAD_STEP_AXES: Mapping[str, tuple[str, ...]] = {
    "query": ("traced", "columns"),
    "keys": ("keys", "columns"),
    "values": ("keys", "value_columns"),
    "dot_products": _SCORE_AXES,
    "scores": _SCORE_AXES,
    "capped_scores": _SCORE_AXES,
    "biased_scores": _SCORE_AXES,
    "masked_scores": _SCORE_AXES,
    "exponentials": _SCORE_AXES,
    "sink": ("traced", "1"),
    "weights": _SCORE_AXES,
    "weighted_values": ("keys", "value_columns"),
    "head_output": ("traced", "value_columns"),
}
"""The steps of a head in order, and the axes of their values; "traced" are the queries that are followed."""

JOINT_STEP_AXES: Mapping[str, tuple[str, ...]] = {
    "joined": ("traced", "joined"),
    "output": ("traced", "outputs"),
}
"""The steps after all heads, and the axes of their values. In the table `steps`, the axes are named anew, as a step has
them by itself: "query" and "key", which have labels, "sink" and columns."""

INPUT_AXES: Mapping[str, tuple[str, ...]] = {
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
"""The inputs that the lines of NumPy start from, by their variables, and the axes of their values. `may` says which
query may attend to which key; `H` are the outputs of all heads."""

_AXIS_NOUNS = {"query": ("query", "queries"), "key": ("key",), "sink": ("sink",)}
"""Nouns for the entries of an axis, as `amount` takes them; entries of other axes are columns."""


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
        read=read_ranges,
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


def _declare_arrays() -> Iterator[Array]:
    """Yield the declarations of the arrays: steps of heads, steps after them, and inputs."""
    for name, axes in HEAD_STEP_AXES.items():
        yield Array(name, "the value after this step", axes=("heads", *axes))
    for name, axes in JOINT_STEP_AXES.items():
        yield Array(name, "the value after this step", axes=axes)
    for name, axes in INPUT_AXES.items():
        kind: ColumnKind = "flag" if name == "may" else "number"
        yield Array(f"input_{name}", f"what the lines call {name}", axes=axes, kind=kind)


class Trace(Result):
    """One attention, step by step.

    Running all lines of the table `steps` in order, on copies of the inputs, gives every value again. `options` has the
    text, the kind and number of the layer, how many heads it has, and `check`: the differences from the model's kernel.
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
    ARRAYS: ClassVar[Sequence[Array]] = tuple(_declare_arrays())

    @property
    def query(self) -> int | None:
        """Return the place of the one query that is traced; None = all queries are."""
        return int(self.table("traced")["query"][0]) if self.options["one_query"] else None

    @property
    def tokens(self) -> dict[str, list[str]]:
        """Return the labels along the axes "query" and "key"."""
        queries = [printable(token, 40) for token in self.table("queries")["token"]]
        keys = [printable(token, 40) for token in self.table("keys")["token"]]
        return {"query": queries, "key": keys}

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Return the steps in order: the row of each as a dictionary, its axes as a list, and its "value"."""
        steps = self.table("steps").as_dicts()
        for step in steps:
            step["axes"] = step["axes"].split()
            step["value"] = self._value(step)
        return steps

    def _value(self, step: Mapping[str, Any]) -> NDArray[np.float64]:
        """Return the value of a step, of its head alone; if one query is traced, without the axis of queries."""
        # The arrays of a result lie in `grids`.
        value: NDArray[np.float64] = self.grids[step["name"]]
        if step["head"] >= 0:
            value = value[self.table("heads")["head"].tolist().index(step["head"])]
        return value[0] if value.ndim > len(step["axes"]) else value

    def of(self, name: str, head: int | None = None) -> NDArray[np.float64]:
        """Return the value of a step by its name, for one head; None = the first head that has it."""
        for step in self.steps:
            if step["name"] == name and (head is None or step["head"] == head):
                value: NDArray[np.float64] = step["value"]
                return value
        # Each name once: steps of heads are there for every head.
        known = ", ".join(dict.fromkeys(self.table("steps")["name"].tolist()))
        raise AttnscopeError(f"there is no step {name!r}", f"the steps are: {known}")

    def as_json(self) -> dict[str, Any]:
        """Return its JSON object, with the shape alone of inputs that have more than 4096 numbers."""
        document = super().as_json()
        for name, values in self.grids.items():
            if name.startswith("input_") and values.size > _MAX_NUMBERS_IN_JSON:
                document[name] = {"shape": list(values.shape)}
        return document

    def require_whole(self) -> None:
        """Refuse a damaged result, also one whose steps have no value with their axes."""
        super().require_whole()
        # Without these the steps have no axes.
        if not isinstance(self.options.get("one_query"), bool) or not len(self.table("traced")):
            raise ValueError("it does not say which queries are traced")
        # A step whose head is negative is of all heads.
        heads = self.table("heads")["head"].tolist()
        for step in self.table("steps").as_dicts():
            is_joint = step["head"] < 0
            if step["name"] not in self.grids or not (is_joint or step["head"] in heads):
                raise ValueError(f"it has no value of the step {step['name'][:40]!r}")
        # Only these two axes have labels.
        sizes = {"query": len(self.table("queries")), "key": len(self.table("keys"))}
        for step in self.steps:
            shape = step["value"].shape
            if len(shape) != len(step["axes"]):
                raise ValueError("a step's value does not have its axes")
            for axis, size in zip(step["axes"], shape, strict=True):
                if sizes.get(axis, size) != size:
                    raise ValueError("a step's value does not fit its tokens")

    def to_py(self) -> str:
        """Return a Python script that computes everything again from the `.npz` beside it."""
        # It loads each input_Q as a variable Q, and so on.
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
        # Each step: a comment, its line of NumPy, and a line that prints its result.
        body = []
        for step in self.steps:
            variable = step["variable"]
            body.append(f"\n# {step['title']}: {step['formula']}\n{step['code']}")
            body.append(f"print({variable!r}, {variable}, sep='\\n')")
        return "\n".join((*head, *body)) + "\n"

    def report(self, **shown: Any) -> Report:
        """Return the largest weights first, then every step. There is nothing that `shown` could choose."""
        answer = [f"attention step by step; {format_heading(self)}", _write_answer(self)]
        return report_on(self, answer, _yield_blocks(self), [_describe_check(self)])


# The answer and the blocks


def format_heading(trace: Trace) -> str:
    """Return the model, the layer, its heads and the traced query in a line."""
    about = trace.options
    subject = WORKED_EXAMPLE
    if trace.run.get("model") != WORKED_EXAMPLE:
        subject = f"{model_of(trace.run)}, {printable(about['kind'])} layer {about['layer']}"
    # Grouped heads share keys and values.
    heads = amount(about["n_heads"], "head")
    if about["n_kv_heads"] != about["n_heads"]:
        heads += f" on {about['n_kv_heads']} key/value heads"
    query = "all queries"
    if trace.query is not None:
        query = f"query {trace.tokens['query'][trace.query]!r} (token {trace.query})"
    return f"{subject}: {heads}; {query}"


def _write_answer(trace: Trace) -> str:
    """Say where each head puts most of its attention, for the first three heads."""
    queries, keys = trace.tokens["query"], trace.tokens["key"]
    heads = trace.table("heads")["head"].tolist()
    phrases = []
    # Weights of a head, (traced query, key): the query with the largest weight, and all keys that get as much.
    for head, weights in zip(heads[:3], trace["weights"], strict=False):
        row = int(np.nanargmax(weights)) // len(keys)
        largest = weights[row].max()
        favourites = np.flatnonzero(weights[row] >= largest * (1 - 1e-9)).tolist()
        names = " and ".join(keys[key] for key in favourites)
        each = " each" if len(favourites) > 1 else ""
        query = queries[trace.table("traced")["query"][row]]
        phrases.append(f"head {head}: {query} → {names} {largest:.4f}{each}")
    if len(heads) > 3:
        phrases.append(f"and {amount(len(heads) - 3, 'more head')}")
    return f"largest weights, query → key: {'; '.join(phrases)}"


def _yield_blocks(trace: Trace) -> Iterator[Block]:
    """Yield the weights of the one query that is traced, if there is one, then every step."""
    heads = trace.table("heads")["head"].tolist()
    if trace.query is not None:
        yield Grid(
            heading="weights, from the query to each key: a row sums to 1",
            values=trace["weights"][:, 0],
            rows=[f"head {head}" for head in heads],
            columns=trace.tokens["key"],
            n_printed=len(heads),
        )
    yield CustomBlock(view=_StepsView(trace))


def _describe_check(trace: Trace) -> str:
    """Say how far the steps are from the results of the model's own kernel."""
    check = trace.options["check"]
    phrases = {
        "weights": "weights differ by at most",
        "outputs": "outputs differ by at most",
        "projected": "after W_O by",
    }
    # What was not compared is left out.
    parts = []
    for name, phrase in phrases.items():
        if isinstance(check.get(name), float):
            parts.append(f"{phrase} {check[name]:.1e}")
    return f"against {printable(check.get('kernel', ''), 200)}: {', '.join(parts)}"


@dataclass(frozen=True, eq=False)
class _StepsView:
    """A view of all steps in the terminal: the shape, formula, line of NumPy and numbers of each."""

    trace: Trace

    def show(self, console: Any, *, every: bool) -> Sequence[RenderableType]:
        """Return the lines of all steps, with a heading where another head begins; all are shown in any case."""
        parts: list[RenderableType] = []
        tokens = self.trace.tokens
        head = None
        for number, step in enumerate(self.trace.steps, start=1):
            if step["head"] != head:
                head = step["head"]
                parts.append(draw_section(self.trace, head))
            parts += draw_title(step, number)
            parts.append(draw_numbers(step, tokens, console))
        return parts


def draw_section(trace: Trace, head: int) -> Text:
    """Return the heading above the steps of a head, or, for -1, above the steps of all heads together."""
    title = "All heads together"
    if head >= 0:
        title = f"Head {head} (of heads 0 to {trace.options['n_heads'] - 1})"
    return Text(f"\n{title}", style="bold underline")


def draw_title(step: Mapping[str, Any], number: int) -> list[Text]:
    """Return the lines above the numbers of a step: its title and shape, its formula, and its line of NumPy."""
    sizes = []
    for axis, size in zip(step["axes"], step["value"].shape, strict=True):
        sizes.append(amount(size, *_AXIS_NOUNS.get(axis, ("column",))))
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
    """Return the numbers of a step with four decimals; `tokens` are the labels along axes."""
    value, axes = step["value"], step["axes"]
    names = tokens.get(axes[0]) if value.ndim == 2 else None
    is_bold = step["name"] == "weights"
    return draw_matrix(np.atleast_2d(value), names, tokens.get(axes[-1]), console, bold=is_bold)
