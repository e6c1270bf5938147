"""Write one head's attention as a person computes it: one line of NumPy per step.

The lines that a reader sees are executed, and what a step shows is the result of its own line. They share no code with
core.attention (the kernels) nor with tests/oracle.py (loops), which check them. NumPy only.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """The inputs of the steps, float64.

    Attributes:
        Q: Projected queries, heads side by side, (query, n_heads * d_head). Rotary positions were applied already.
        K: Projected keys, (key, n_kv_heads * d_head). Rotary positions were applied already.
        V: Projected values, (key, n_kv_heads * d_value).
        n_heads: Query heads.
        n_kv_heads: Key/value heads; query head h reads h // (n_heads // n_kv_heads).
        scale: Factor on the dot products.
        may: Boolean, (1 or n_heads, query, key), True = may attend; None = all may.
        bias: Added to the scores, (1 or n_heads, query, key); None = none.
        softcap: Bound of the scores; None = none.
        sinks: Each head's extra score, (n_heads,); None = none.
        H: The outputs of heads that are not traced, (n_heads, query, d_value); None = zeros.
        W_O: Output projection as torch.nn.Linear stores it, (d_model, n_heads * d_value); None = not known.
        b_O: Its bias, (d_model,); None = none.
    """

    Q: Array
    K: Array
    V: Array
    n_heads: int
    n_kv_heads: int
    scale: float
    may: NDArray[np.bool_] | None = None
    bias: Array | None = None
    softcap: float | None = None
    sinks: Array | None = None
    H: Array | None = None
    W_O: Array | None = None
    b_O: Array | None = None

    @property
    def d_head(self) -> int:
        """Return the width of a query or key."""
        return int(self.Q.shape[1]) // self.n_heads

    @property
    def d_value(self) -> int:
        """Return the width of a value."""
        return int(self.V.shape[1]) // self.n_kv_heads

    def names(self) -> dict[str, Any]:
        """Return the variables that the lines read, by name. H is a copy, because lines write to it."""
        names = {name: value for name, value in vars(self).items() if value is not None}
        names["H"] = np.zeros((self.n_heads, len(self.Q), self.d_value))
        if self.H is not None:
            names["H"] = self.H.copy()
        return names


@dataclass(frozen=True)
class Step:
    """One step: its title and formula, and the line of NumPy that computes it.

    Attributes:
        name: Such as "dot_products".
        title: The name as people say it, such as "Dot products".
        formula: The mathematics, with this head's numbers where they help.
        code: The line; it reads np, the attributes of AttentionInputs and the variables of earlier lines.
        variable: The expression that then holds the step's value, such as "dots" or "H[1]".
        axes: The axes of the value: "query", "key", "column" (of a head), "joined" (columns of all heads),
            "output" (columns after W_O), "sink".
        head: The head that the step is of; None = all of them.
    """

    name: str
    title: str
    formula: str
    code: str
    variable: str
    axes: tuple[str, ...]
    head: int | None = None


def all_lines(
    inputs: AttentionInputs,
    heads: Iterable[int],
    query: int | None,
) -> list[Step]:
    """Return the steps of all these heads, one head after the other, then the steps that join them.

    They are for one query, by its position, or for all queries (None).
    """
    lines: list[Step] = []
    for head in heads:
        lines += head_lines(inputs, head, query)
    return lines + concatenation_lines(inputs, query)


def head_lines(
    inputs: AttentionInputs,
    head: int,
    query: int | None,
) -> list[Step]:
    """Return the steps of one head, from its query to its output, for one query or, with None, for all.

    Returns:
        Lines in the order in which they run. For one query, vectors over keys; for all, (query, key) matrices.
    """
    steps = [
        *_projection_steps(inputs, head, query),
        *_score_steps(inputs, head, query),
        *_softmax_steps(inputs, head),
        *_output_steps(head, query),
    ]
    lines = []
    for name, title, formula, code, axes in steps:
        if query is not None:
            axes = tuple(axis for axis in axes if axis != "query")
        variable, _ = code.split(" = ", 1)
        lines.append(Step(name, title, formula, code, variable, axes, head))
    return lines


_Step = tuple[str, str, str, str, tuple[str, ...]]
"""Name, title, formula, code and axes of a `Step`, with the axis of queries even if it is for one query."""


def _projection_steps(
    inputs: AttentionInputs,
    head: int,
    query: int | None,
) -> Iterator[_Step]:
    """Yield the head's columns of Q, and those of K and V of the key/value head that it reads."""
    row = ":" if query is None else str(query)
    title = "Queries" if query is None else "The query"
    kv_head = head // (inputs.n_heads // inputs.n_kv_heads)
    shared = "" if inputs.n_heads == inputs.n_kv_heads else f": key/value head {kv_head} serves it"
    d_head = inputs.d_head
    d_value = inputs.d_value
    # From Q, K and V, (token, columns of all heads), to q, k and v of this head, (token, d_head or d_value).
    formula = f"head {head} takes columns {_span(head, d_head)} of Q"
    code = f"q = Q[{row}, {_columns(head, d_head)}]"
    yield "query", title, formula, code, ("query", "column")
    formula = f"columns {_span(kv_head, d_head)} of K{shared}"
    code = f"k = K[:, {_columns(kv_head, d_head)}]"
    yield "keys", "Every key", formula, code, ("key", "column")
    formula = f"columns {_span(kv_head, d_value)} of V{shared}"
    code = f"v = V[:, {_columns(kv_head, d_value)}]"
    yield "values", "Every value", formula, code, ("key", "column")


def _score_steps(
    inputs: AttentionInputs,
    head: int,
    query: int | None,
) -> Iterator[_Step]:
    """Yield the dot products, the scaled scores, then what the model does to these: soft cap, position bias, mask."""
    axes = ("query", "key")
    # Follows the index of the head in the index of a bias or mask.
    query_index = "" if query is None else f", {query}"
    formula = f"q · k, over {inputs.d_head} columns"
    yield "dot_products", "Dot products", formula, "dots = q @ k.T", axes
    yield "scores", "Scaling", _scaling(inputs.scale, inputs.d_head), "scores = dots * scale", axes
    if inputs.softcap is not None:
        formula = f"{inputs.softcap:g} · tanh(scores / {inputs.softcap:g})"
        code = "scores = softcap * np.tanh(scores / softcap)"
        yield "capped_scores", "Soft cap", formula, code, axes
    if inputs.bias is not None:
        bias_head = head if inputs.bias.shape[0] > 1 else 0
        formula = "scores + the bias that the model has for this distance"
        code = f"scores = scores + bias[{bias_head}{query_index}]"
        yield "biased_scores", "Position bias", formula, code, axes
    if inputs.may is not None:
        mask_head = head if inputs.may.shape[0] > 1 else 0
        code = f"scores = np.where(may[{mask_head}{query_index}], scores, -np.inf)"
        yield "masked_scores", "Mask", "-inf where the query may not attend", code, axes


def _softmax_steps(inputs: AttentionInputs, head: int) -> Iterator[_Step]:
    """Yield the softmax. With a sink, a score without a key, rows sum to less than 1."""
    axes = ("query", "key")
    formula = "exp(score - the row's largest): the same result, and nothing overflows"
    code = "exps = np.exp(scores - scores.max(-1, keepdims=True))"
    yield "exponentials", "Softmax: exponentials", formula, code, axes
    if inputs.sinks is None:
        code = "weights = exps / exps.sum(-1, keepdims=True)"
        yield "weights", "Softmax: the weights", "exp / Σ exp; each row sums to 1", code, axes
        return
    formula = "exp(sink - the row's largest): takes weight, gives no value"
    code = f"sink = np.exp(sinks[{head}] - scores.max(-1, keepdims=True))"
    yield "sink", "Softmax: the sink's exponential", formula, code, ("query", "sink")
    formula = "exp / (Σ exp + sink); each row sums to less than 1"
    code = "weights = exps / (exps.sum(-1, keepdims=True) + sink)"
    yield "weights", "Softmax: the weights", formula, code, axes


def _output_steps(head: int, query: int | None) -> Iterator[_Step]:
    """Yield the weights times the values; for one query, first each value times its weight."""
    code = f"H[{head}] = weights @ v"
    if query is not None:
        code = "weighted = weights[:, None] * v"
        formula = "each value times its weight"
        yield "weighted_values", "Weighted values", formula, code, ("key", "column")
        code = f"H[{head}, {query}] = weighted.sum(0)"
    title = f"What head {head} puts out"
    yield "head_output", title, "Σ over keys of weight · value", code, ("query", "column")


def concatenation_lines(inputs: AttentionInputs, query: int | None) -> list[Step]:
    """Return the steps after the heads: concatenation, and the output projection where it is known."""
    n_heads = inputs.n_heads
    d_value = inputs.d_value
    formula = f"the {n_heads} heads side by side: {n_heads} · {d_value} = {n_heads * d_value} columns"
    code = "joined = np.concatenate(H, axis=-1)"
    queries: tuple[str, ...] = ("query",)
    if query is not None:
        code = f"joined = np.concatenate(H[:, {query}])"
        queries = ()
    lines = [Step("joined", "Concatenation", formula, code, "joined", (*queries, "joined"))]
    if inputs.W_O is not None:
        d_model, width = inputs.W_O.shape
        formula = f"W_O ({d_model} × {width}) times joined"
        code = "output = joined @ W_O.T"
        if inputs.b_O is not None:
            formula += ", + b_O"
            code += " + b_O"
        lines.append(Step("output", "Output projection", formula, code, "output", (*queries, "output")))
    return lines


def compute(lines: list[Step], inputs: AttentionInputs) -> list[Array]:
    """Run lines one after the other from inputs, which stay unchanged; return the value of each step."""
    # Each line can read the inputs and what all lines before it have assigned.
    names = {"np": np} | inputs.names()
    values = []
    for line in lines:
        exec(line.code, names)
        values.append(np.array(eval(line.variable, names), np.float64))
    return values


def _columns(head: int, width: int) -> str:
    return f"{head * width}:{(head + 1) * width}"


def _span(head: int, width: int) -> str:
    first = head * width
    last = first + width - 1
    return str(first) if first == last else f"{first} to {last}"


def _scaling(scale: float, d_head: int) -> str:
    if math.isclose(scale, 1 / math.sqrt(d_head), rel_tol=1e-6):
        return f"dots / √d_head = dots / √{d_head} = dots × {scale:.4f}"
    if scale == 1.0:
        return "dots × 1: this model does not scale"
    return f"dots × {scale:.6g}, the model's own scale (1/√d_head = 1/√{d_head} = {1 / math.sqrt(d_head):.6g})"
