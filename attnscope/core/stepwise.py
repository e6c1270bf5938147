"""One head's attention as a person computes it: one line of NumPy per step.

The lines you read are the lines that run, and each step's value is the result of its own line. They share
no code with core.attention (the kernels) nor with tests/oracle.py (loops), which check them. NumPy only.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Inputs:
    """The inputs of the steps, float64.

    Attributes:
        Q: Projected queries, heads side by side, (query, n_heads * d_head); turned already if positions are rotary.
        K: Projected keys, (key, n_kv_heads * d_head); likewise.
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
        width: int = self.Q.shape[1]
        return width // self.n_heads

    @property
    def d_value(self) -> int:
        """Return the width of a value."""
        width: int = self.V.shape[1]
        return width // self.n_kv_heads

    def names(self) -> dict[str, Any]:
        """Return the names that the lines use, with their values; arrays that lines write to are copies."""
        n_queries = self.Q.shape[0]
        empty = np.zeros((self.n_heads, n_queries, self.d_value))
        # `H` is written to line by line, so it is a copy: the inputs stay unchanged.
        names: dict[str, Any] = {
            "Q": self.Q,
            "K": self.K,
            "V": self.V,
            "scale": self.scale,
            "may": self.may,
            "bias": self.bias,
            "softcap": self.softcap,
            "sinks": self.sinks,
            "W_O": self.W_O,
            "b_O": self.b_O,
            "H": empty if self.H is None else self.H.copy(),
        }
        return {name: value for name, value in names.items() if value is not None}


@dataclass(frozen=True)
class Line:
    """One step: its title and formula, and the line of NumPy that computes it.

    Attributes:
        name: Such as "dot_products".
        title: For people.
        formula: The mathematics, with numbers put in where that helps.
        code: The line; it uses np, the names of Inputs and those of earlier lines.
        variable: The expression that then holds the step's value, such as "dots" or "H[1]".
        axes: The axes of the value: "query", "key", "column" (of a head), "joined" (columns of all heads),
            "output" (columns after W_O), "sink".
        head: Which head it belongs to; None = all of them.
    """

    name: str
    title: str
    formula: str
    code: str
    variable: str
    axes: tuple[str, ...]
    head: int | None = None


def all_lines(inputs: Inputs, heads: Iterable[int], query: int | None) -> list[Line]:
    """Return the steps of heads, head after head, then the steps that join them; for one query, or for all (None)."""
    lines: list[Line] = []
    for head in heads:
        lines += head_lines(inputs, head, query)
    return lines + concatenation_lines(inputs, query)


def head_lines(inputs: Inputs, head: int, query: int | None) -> list[Line]:
    """Return the steps of one head, from its query to its output, for one query or, with None, for all.

    Returns:
        Lines in the order in which they run. For one query, vectors over keys; for all, (query, key) matrices.
    """
    lines: list[Line] = []

    def add(name: str, title: str, formula: str, code: str, axes: tuple[str, ...]) -> None:
        lines.append(Line(name, title, formula, code, code.split(" = ")[0], axes, head))

    # Names that the lines below use: rows and columns of the head's part.
    row = ":" if query is None else str(query)
    more = "" if query is None else f", {query}"
    queries = ("query",) if query is None else ()
    d = inputs.d_head
    d_value = inputs.d_value
    read = head // (inputs.n_heads // inputs.n_kv_heads)  # its key/value head
    # Take the head's columns of Q and K.
    add(
        "query",
        "Queries" if query is None else "The query",
        f"head {head} takes columns {_span(head, d)} of Q",
        f"q = Q[{row}, {_columns(head, d)}]",
        (*queries, "column"),
    )
    shared = "" if inputs.n_heads == inputs.n_kv_heads else f": key/value head {read} serves it"
    add(
        "keys",
        "Every key",
        f"columns {_span(read, d)} of K{shared}",
        f"k = K[:, {_columns(read, d)}]",
        ("key", "column"),
    )
    add(
        "values",
        "Every value",
        f"columns {_span(read, d_value)} of V{shared}",
        f"v = V[:, {_columns(read, d_value)}]",
        ("key", "column"),
    )
    # Scores: dot products, scaled, then all that the model adds to them.
    scores = (*queries, "key")
    add("dot_products", "Dot products", f"q · k, over {d} columns", "dots = q @ k.T", scores)
    add("scores", "Scaling", _scaling(inputs.scale, d), "scores = dots * scale", scores)
    if inputs.softcap is not None:
        cap = f"{inputs.softcap:g}"
        add(
            "capped_scores",
            "Soft cap",
            f"{cap} · tanh(scores / {cap})",
            "scores = softcap * np.tanh(scores / softcap)",
            scores,
        )
    if inputs.bias is not None:
        own = head if inputs.bias.shape[0] > 1 else 0
        add(
            "biased_scores",
            "Position bias",
            "scores + the bias that the model has for this distance",
            f"scores = scores + bias[{own}{more}]",
            scores,
        )
    if inputs.may is not None:
        own = head if inputs.may.shape[0] > 1 else 0
        add(
            "masked_scores",
            "Mask",
            "-inf where the query may not attend",
            f"scores = np.where(may[{own}{more}], scores, -np.inf)",
            scores,
        )
    # Softmax, with a share for the sink if there is one.
    add(
        "exponentials",
        "Softmax: exponentials",
        "exp(score - the row's largest): the same result, and nothing overflows",
        "exps = np.exp(scores - scores.max(-1, keepdims=True))",
        scores,
    )
    # A sink takes part of the sum, so that rows sum to less than 1.
    if inputs.sinks is None:
        code = "weights = exps / exps.sum(-1, keepdims=True)"
        add("weights", "Softmax: the weights", "exp / Σ exp; each row sums to 1", code, scores)
    else:
        add(
            "sink",
            "Softmax: the sink's exponential",
            "exp(sink - the row's largest): takes weight, gives no value",
            f"sink = np.exp(sinks[{head}] - scores.max(-1, keepdims=True))",
            (*queries, "sink"),
        )
        add(
            "weights",
            "Softmax: the weights",
            "exp / (Σ exp + sink); each row sums to less than 1",
            "weights = exps / (exps.sum(-1, keepdims=True) + sink)",
            scores,
        )
    # Output: weights times values.
    if query is not None:
        add(
            "weighted_values",
            "Weighted values",
            "each value times its weight",
            "weighted = weights[:, None] * v",
            ("key", "column"),
        )
        add(
            "head_output",
            f"What head {head} puts out",
            "Σ over keys of weight · value",
            f"H[{head}, {query}] = weighted.sum(0)",
            ("column",),
        )
    else:
        add(
            "head_output",
            f"What head {head} puts out",
            "Σ over keys of weight · value",
            f"H[{head}] = weights @ v",
            ("query", "column"),
        )
    return lines


def concatenation_lines(inputs: Inputs, query: int | None) -> list[Line]:
    """Return the steps after the heads: concatenation, and the output projection where it is known."""
    # (query, joined) for all queries, (joined,) for one.
    queries = ("query",) if query is None else ()
    width = inputs.n_heads * inputs.d_value
    formula = f"the {inputs.n_heads} heads side by side: {inputs.n_heads} · {inputs.d_value} = {width} columns"
    code = "joined = np.concatenate(H, axis=-1)" if query is None else f"joined = np.concatenate(H[:, {query}])"
    # Heads side by side, then W_O.
    lines = [Line("joined", "Concatenation", formula, code, "joined", (*queries, "joined"))]
    if inputs.W_O is not None:
        shape = f"{inputs.W_O.shape[0]} × {inputs.W_O.shape[1]}"
        formula = f"W_O ({shape}) times joined"
        code = "output = joined @ W_O.T"
        if inputs.b_O is not None:
            formula += ", + b_O"
            code += " + b_O"
        lines.append(Line("output", "Output projection", formula, code, "output", (*queries, "output")))
    return lines


def compute(lines: list[Line], inputs: Inputs) -> list[Array]:
    """Run lines one after the other from inputs, which stay unchanged: the value of each step after its line."""
    # Each line sees the names of the inputs and of all lines before it.
    names = {"np": np} | inputs.names()
    values = []
    for line in lines:
        exec(line.code, names)
        values.append(np.array(eval(line.variable, names), np.float64))
    return values


def _columns(head: int, width: int) -> str:
    return f"{head * width}:{(head + 1) * width}"


def _span(head: int, width: int) -> str:
    first, last = head * width, (head + 1) * width - 1
    return str(first) if first == last else f"{first} to {last}"


def _scaling(scale: float, d_head: int) -> str:
    if math.isclose(scale, 1 / math.sqrt(d_head), rel_tol=1e-6):
        return f"dots / √d_head = dots / √{d_head} = dots × {scale:.4f}"
    if scale == 1.0:
        return "dots × 1: this model does not scale"
    return f"dots × {scale:.6g}, the model's own scale (1/√d_head = 1/√{d_head} = {1 / math.sqrt(d_head):.6g})"
