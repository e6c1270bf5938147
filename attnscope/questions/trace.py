"""Declare a trace, which is attention computed step by step: every number, its formula, and its line of NumPy.

A step is one line of NumPy, such as `dots = q @ k.T`. Steps of a head come first, head by head;
joint steps after them concatenate the heads and apply W_O. The table `steps` lists them; the value after each step is
in the array of the step's name. `studies.trace` computes the result.
"""

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
"""The model's name in the trace of the built-in example, which needs no model."""

_MAX_NUMBERS_IN_JSON = 4096
"""JSON has the numbers of inputs up to this size, and only the shape of larger inputs."""

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
"""The axes of each head step's value, in the order of steps. "traced" is the axis of traced queries: all or one."""

JOINT_STEP_AXES: Mapping[str, tuple[str, ...]] = {
    "joined": ("traced", "joined"),
    "output": ("traced", "outputs"),
}
"""The axes of each joint step's value. These names are for arrays, which hold all heads. The table `steps` has other
names, for the value of a single step: "query" and "key", whose entries are tokens, "sink", and names for columns."""

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
"""The axes of each input of the lines of NumPy, by the variable's name. `may` is the boolean mask, True where the query
may attend to the key. `H` holds the outputs of all heads. The array of an input has the prefix "input_": input_Q."""

_AXIS_NOUNS = {"query": ("query", "queries"), "key": ("key",), "sink": ("sink",)}
"""The noun for an axis's entries, with its plural if irregular, for `amount`. Entries of other axes are columns."""


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
    """Yield the declarations of the arrays: the values after head steps and joint steps, and the inputs."""
    for name, axes in HEAD_STEP_AXES.items():
        yield Array(name, "the value after this step", axes=("heads", *axes))
    for name, axes in JOINT_STEP_AXES.items():
        yield Array(name, "the value after this step", axes=axes)
    for name, axes in INPUT_AXES.items():
        kind: ColumnKind = "flag" if name == "may" else "number"
        yield Array(f"input_{name}", f"what the lines call {name}", axes=axes, kind=kind)


class Trace(Result):
    """Hold the attention of one layer, step by step.

    Running all lines of the table `steps` in order, on the inputs, reproduces every value. `options` has:
        text, kind, layer: What was traced; the kind is encoder, decoder or cross.
        n_heads, n_kv_heads: The numbers of query heads and of key/value heads in the layer.
        one_query: Whether a single query is traced; its values then have no query axis in `steps`.
        check: The largest differences between the steps and the model's own attention kernel.
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
        """Return the token index of the traced query; None = all queries are traced."""
        return int(self.table("traced")["query"][0]) if self.options["one_query"] else None

    @property
    def tokens(self) -> dict[str, list[str]]:
        """Return the token labels along the axes "query" and "key", cut and escaped for printing."""
        queries = [printable(token, 40) for token in self.table("queries")["token"]]
        keys = [printable(token, 40) for token in self.table("keys")["token"]]
        return {"query": queries, "key": keys}

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Return each row of the table `steps` as a dictionary, with "axes" as a list, and with the step's "value"."""
        steps = self.table("steps").as_dicts()
        for step in steps:
            step["axes"] = step["axes"].split()
            step["value"] = self._value(step)
        return steps

    def _value(self, step: Mapping[str, Any]) -> NDArray[np.float64]:
        """Return the value after a step. Drop the axis of heads, and with one query also that of queries."""
        # `grids` holds the arrays of a result: (head, traced, ...), or (traced, ...) of joint steps.
        value: NDArray[np.float64] = self.grids[step["name"]]
        if step["head"] >= 0:
            value = value[self.table("heads")["head"].tolist().index(step["head"])]
        # One axis too many is the axis of the single traced query.
        return value[0] if value.ndim > len(step["axes"]) else value

    def of(self, name: str, head: int | None = None) -> NDArray[np.float64]:
        """Return the value after a step, such as "weights", for one head; None = the first head that is traced."""
        for step in self.steps:
            if step["name"] == name and (head is None or step["head"] == head):
                value: NDArray[np.float64] = step["value"]
                return value
        # Head steps repeat for each head; list each name once.
        step_names = ", ".join(dict.fromkeys(self.table("steps")["name"].tolist()))
        raise AttnscopeError(f"there is no step {name!r}", f"the steps are: {step_names}")

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object. Large inputs are replaced by their shape; see `_MAX_NUMBERS_IN_JSON`."""
        document = super().as_json()
        for name, values in self.grids.items():
            if name.startswith("input_") and values.size > _MAX_NUMBERS_IN_JSON:
                document[name] = {"shape": list(values.shape)}
        return document

    def require_whole(self) -> None:
        """Refuse a damaged result, and one in which a step's value is missing or does not fit its axes."""
        super().require_whole()
        # `steps` below needs both.
        if not isinstance(self.options.get("one_query"), bool) or not len(self.table("traced")):
            raise ValueError("it does not say which queries are traced")
        # Joint steps have the head -1.
        heads = self.table("heads")["head"].tolist()
        for step in self.table("steps").as_dicts():
            is_joint = step["head"] < 0
            if step["name"] not in self.grids or not (is_joint or step["head"] in heads):
                raise ValueError(f"it has no value of the step {step['name'][:40]!r}")
        # Only these two axes have a known size, as they have a label per entry.
        size_by_axis = {"query": len(self.table("queries")), "key": len(self.table("keys"))}
        for step in self.steps:
            shape = step["value"].shape
            if len(shape) != len(step["axes"]):
                raise ValueError("a step's value does not have its axes")
            for axis, size in zip(step["axes"], shape, strict=True):
                if size_by_axis.get(axis, size) != size:
                    raise ValueError("a step's value does not fit its tokens")

    def to_py(self) -> str:
        """Return a Python script that computes everything again from `trace.npz` in the same folder."""
        # The script loads the array input_Q as the variable Q, and so on: `name[6:]` drops the prefix "input_".
        preamble = (
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
        return "\n".join((*preamble, *body)) + "\n"

    def report(self, **shown: Any) -> Report:
        """Return the report: the largest weights, then every step. `shown`, for other kinds of results, is ignored."""
        answer = [f"attention step by step; {format_heading(self)}", _write_answer(self)]
        return report_on(self, answer, _yield_blocks(self), [_describe_check(self)])


# The answer and the blocks


def format_heading(trace: Trace) -> str:
    """Format the model, the layer, its heads and the traced query as one line."""
    options = trace.options
    subject = WORKED_EXAMPLE
    if trace.run.get("model") != WORKED_EXAMPLE:
        subject = f"{model_of(trace.run)}, {printable(options['kind'])} layer {options['layer']}"
    # In grouped-query attention, several heads share a key/value head.
    heads_text = amount(options["n_heads"], "head")
    if options["n_kv_heads"] != options["n_heads"]:
        heads_text += f" on {options['n_kv_heads']} key/value heads"
    query = "all queries"
    if trace.query is not None:
        query = f"query {trace.tokens['query'][trace.query]!r} (token {trace.query})"
    return f"{subject}: {heads_text}; {query}"


def _write_answer(trace: Trace) -> str:
    """Write the largest weight of each of the first three heads."""
    queries, keys = trace.tokens["query"], trace.tokens["key"]
    heads = trace.table("heads")["head"].tolist()
    phrases = []
    # `weights` are of one head, (traced query, key). Take the query with the largest weight, and all keys that tie.
    for head, weights in zip(heads[:3], trace["weights"], strict=False):
        # `nanargmax` counts in the flattened array, so the quotient is the row.
        row = int(np.nanargmax(weights)) // len(keys)
        largest = weights[row].max()
        largest_keys = np.flatnonzero(weights[row] >= largest * (1 - 1e-9)).tolist()
        names = " and ".join(keys[key] for key in largest_keys)
        each_word = " each" if len(largest_keys) > 1 else ""
        query = queries[trace.table("traced")["query"][row]]
        phrases.append(f"head {head}: {query} → {names} {largest:.4f}{each_word}")
    if len(heads) > 3:
        phrases.append(f"and {amount(len(heads) - 3, 'more head')}")
    return f"largest weights, query → key: {'; '.join(phrases)}"


def _yield_blocks(trace: Trace) -> Iterator[Block]:
    """Yield the weights of the traced query, if only one is traced, then every step."""
    heads = trace.table("heads")["head"].tolist()
    if trace.query is not None:
        # (head, traced, key) becomes (head, key).
        yield Grid(
            heading="weights, from the query to each key: a row sums to 1",
            values=trace["weights"][:, 0],
            rows=[f"head {head}" for head in heads],
            columns=trace.tokens["key"],
            n_printed=len(heads),
        )
    yield CustomBlock(view=_StepsView(trace))


def _describe_check(trace: Trace) -> str:
    """Write how far the steps differ from the model's own attention kernel."""
    check = trace.options["check"]
    phrases = {
        "weights": "weights differ by at most",
        "outputs": "outputs differ by at most",
        "projected": "after W_O by",
    }
    # `check` has no number for a comparison that was not made.
    comparisons = []
    for name, phrase in phrases.items():
        if isinstance(check.get(name), float):
            comparisons.append(f"{phrase} {check[name]:.1e}")
    return f"against {printable(check.get('kernel', ''), 200)}: {', '.join(comparisons)}"


@dataclass(frozen=True, eq=False)
class _StepsView:
    """Show all steps in the terminal: the shape, formula, line of NumPy and numbers of each."""

    trace: Trace

    def show(self, console: Any, *, every: bool) -> Sequence[RenderableType]:
        """Return the lines of all steps, with a heading where the next head begins.

        `every` (`--all`), which other views read, is ignored: a trace always shows all steps.
        """
        lines: list[RenderableType] = []
        tokens = self.trace.tokens
        head = None
        for step_number, step in enumerate(self.trace.steps, start=1):
            if step["head"] != head:
                head = step["head"]
                lines.append(draw_section(self.trace, head))
            lines += draw_title(step, step_number)
            lines.append(draw_numbers(step, tokens, console))
        return lines


def draw_section(trace: Trace, head: int) -> Text:
    """Return the heading above the steps of a head; -1 = above the joint steps."""
    title = "All heads together"
    if head >= 0:
        title = f"Head {head} (of heads 0 to {trace.options['n_heads'] - 1})"
    return Text(f"\n{title}", style="bold underline")


def draw_title(step: Mapping[str, Any], step_number: int) -> list[Text]:
    """Return the lines above the numbers of a step: its title and shape, its formula, and its line of NumPy."""
    size_texts = []
    for axis, size in zip(step["axes"], step["value"].shape, strict=True):
        size_texts.append(amount(size, *_AXIS_NOUNS.get(axis, ("column",))))
    return [
        Text.assemble(
            (f"\n{step_number:>2}  {safe(step['title'])}", "bold"),
            (f"  ({', '.join(size_texts)})", "dim"),
        ),
        Text(f"    {safe(step['formula'])}"),
        Text(f"    {safe(step['code'])}", style="cyan"),
    ]


def draw_numbers(
    step: Mapping[str, Any], tokens: Mapping[str, Sequence[str]], console: Any
) -> RenderableType:
    """Return the numbers of a step as a matrix, with four decimals; `tokens` are the token labels by axis."""
    value, axes = step["value"], step["axes"]
    row_labels = tokens.get(axes[0]) if value.ndim == 2 else None
    is_bold = step["name"] == "weights"
    return draw_matrix(np.atleast_2d(value), row_labels, tokens.get(axes[-1]), console, bold=is_bold)
