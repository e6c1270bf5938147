"""Write one head's attention as a person computes it: one line of NumPy per step.

Each `Step` has a line of code that is shown to a reader and also executed: the value shown is the result of that line.
The lines share no code with core.attention (the kernels) nor with tests/oracle.py (loops), which check them.
The module uses NumPy only.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# This module shares no code with what it checks.
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """Hold the inputs of the steps, float64. The names of fields are those of variables in the lines of code.

    Attributes:
        Q: Projected queries, heads side by side, (query, n_heads * d_head). Rotary positions were applied already.
        K: Projected keys, (key, n_kv_heads * d_head). Rotary positions were applied already.
        V: Projected values, (key, n_kv_heads * d_value).
        n_heads: The number of query heads.
        n_kv_heads: The number of key/value heads; query head h reads head h // (n_heads // n_kv_heads) of these.
        scale: The factor on dot products.
        may: The attention mask, boolean, (1 or n_heads, query, key), True = may attend; None = no mask.
        bias: Position bias that is added to the scores, (1 or n_heads, query, key); None = no bias.
        softcap: The bound of the scores; None = no bound.
        sinks: Each head's extra score, which takes weight and has no value, (n_heads,); None = no sinks.
        H: The outputs of heads that are not traced, (n_heads, query, d_value); None = zeros.
        W_O: The output projection as torch.nn.Linear stores it, (d_model, n_heads * d_value); None = unknown.
        b_O: The bias of the output projection, (d_model,); None = no bias.
    """

    Q: Floats
    K: Floats
    V: Floats
    n_heads: int
    n_kv_heads: int
    scale: float
    may: NDArray[np.bool_] | None = None
    bias: Floats | None = None
    softcap: float | None = None
    sinks: Floats | None = None
    H: Floats | None = None
    W_O: Floats | None = None
    b_O: Floats | None = None

    @property
    def d_head(self) -> int:
        """Return the width of a query or key."""
        return int(self.Q.shape[1]) // self.n_heads

    @property
    def d_value(self) -> int:
        """Return the width of a value."""
        return int(self.V.shape[1]) // self.n_kv_heads

    def variables(self) -> dict[str, Any]:
        """Return the variables that the lines of code read, by name. H is a copy, because lines write to it."""
        variables = {name: value for name, value in vars(self).items() if value is not None}
        variables["H"] = np.zeros((self.n_heads, len(self.Q), self.d_value))
        if self.H is not None:
            variables["H"] = self.H.copy()
        return variables


@dataclass(frozen=True)
class Step:
    """Hold one step: its title and formula, and the line of NumPy that computes it.

    Attributes:
        name: An identifier, such as "dot_products".
        title: A heading, such as "Dot products".
        formula: The mathematics, with this head's numbers where they help.
        code: The line of NumPy. It reads np, the fields of AttentionInputs and the variables of earlier lines.
        variable: The expression that has the step's value after the line ran, such as "dots" or "H[1]".
        axes: The axes of the value: "query", "key", "column" (of a head), "joined" (columns of all heads side by side),
            "output" (columns after W_O), "sink".
        head: The head that the step belongs to; None = a step that joins all heads.
    """

    name: str
    title: str
    formula: str
    code: str
    variable: str
    axes: tuple[str, ...]
    head: int | None = None


def all_steps(
    inputs: AttentionInputs,
    heads: Iterable[int],
    query: int | None,
) -> list[Step]:
    """Return the steps of some heads, one head after the other, then the steps that join all heads.

    `query` is the position of the one query that is traced; None = all queries.
    """
    steps: list[Step] = []
    for head in heads:
        steps += head_steps(inputs, head, query)
    return steps + concatenation_steps(inputs, query)


def head_steps(
    inputs: AttentionInputs,
    head: int,
    query: int | None,
) -> list[Step]:
    """Return the steps of one head, from its query to its output, in the order in which they run.

    For one query, the weights are a vector over keys. For all queries (None), they are a (query, key) matrix.
    """
    fields = [
        *_projection_steps(inputs, head, query),
        *_score_steps(inputs, head, query),
        *_softmax_steps(inputs, head),
        *_output_steps(head, query),
    ]
    steps = []
    for name, title, formula, code, axes in fields:
        if query is not None:
            axes = tuple(axis for axis in axes if axis != "query")
        variable, _ = code.split(" = ", 1)
        steps.append(Step(name, title, formula, code, variable, axes, head))
    return steps


_StepFields = tuple[str, str, str, str, tuple[str, ...]]
"""Name, title, formula, code and axes of a `Step`. The axes include "query" even if the step is for one query."""


def _projection_steps(
    inputs: AttentionInputs,
    head: int,
    query: int | None,
) -> Iterator[_StepFields]:
    """Yield the steps that take the head's columns of Q, and its key/value head's columns of K and V."""
    row = ":" if query is None else str(query)
    title = "Queries" if query is None else "The query"
    kv_head = head // (inputs.n_heads // inputs.n_kv_heads)
    shared = "" if inputs.n_heads == inputs.n_kv_heads else f": key/value head {kv_head} serves it"
    d_head = inputs.d_head
    d_value = inputs.d_value
    # From Q, K and V, (token, columns of all heads), to q, k and v of this head, (token, d_head or d_value).
    formula = f"head {head} takes columns {_column_range(head, d_head)} of Q"
    code = f"q = Q[{row}, {_column_slice(head, d_head)}]"
    yield "query", title, formula, code, ("query", "column")
    formula = f"columns {_column_range(kv_head, d_head)} of K{shared}"
    code = f"k = K[:, {_column_slice(kv_head, d_head)}]"
    yield "keys", "Every key", formula, code, ("key", "column")
    formula = f"columns {_column_range(kv_head, d_value)} of V{shared}"
    code = f"v = V[:, {_column_slice(kv_head, d_value)}]"
    yield "values", "Every value", formula, code, ("key", "column")


def _score_steps(
    inputs: AttentionInputs,
    head: int,
    query: int | None,
) -> Iterator[_StepFields]:
    """Yield dot products and scaled scores, then the model's changes to scores: soft cap, position bias, mask."""
    axes = ("query", "key")
    # In code, a bias or mask is indexed by head and query, such as "may[0, 3]"; for all queries by head, "may[0]".
    query_index = "" if query is None else f", {query}"
    formula = f"q · k, over {inputs.d_head} columns"
    yield "dot_products", "Dot products", formula, "dots = q @ k.T", axes
    formula = _scaling_formula(inputs.scale, inputs.d_head)
    yield "scores", "Scaling", formula, "scores = dots * scale", axes
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


def _softmax_steps(inputs: AttentionInputs, head: int) -> Iterator[_StepFields]:
    """Yield the steps of the softmax. A sink is a score without a key; with a sink, rows sum to less than 1."""
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


def _output_steps(head: int, query: int | None) -> Iterator[_StepFields]:
    """Yield the steps of the weighted sum of values. One query has a step more: each value times its weight."""
    code = f"H[{head}] = weights @ v"
    if query is not None:
        code = "weighted = weights[:, None] * v"
        formula = "each value times its weight"
        yield "weighted_values", "Weighted values", formula, code, ("key", "column")
        code = f"H[{head}, {query}] = weighted.sum(0)"
    title = f"What head {head} puts out"
    yield "head_output", title, "Σ over keys of weight · value", code, ("query", "column")


def concatenation_steps(inputs: AttentionInputs, query: int | None) -> list[Step]:
    """Return the steps after all heads: concatenation, and the output projection if W_O is known."""
    n_heads = inputs.n_heads
    d_value = inputs.d_value
    formula = f"the {n_heads} heads side by side: {n_heads} · {d_value} = {n_heads * d_value} columns"
    code = "joined = np.concatenate(H, axis=-1)"
    queries: tuple[str, ...] = ("query",)
    if query is not None:
        code = f"joined = np.concatenate(H[:, {query}])"
        queries = ()
    steps = [Step("joined", "Concatenation", formula, code, "joined", (*queries, "joined"))]
    if inputs.W_O is not None:
        d_model, width = inputs.W_O.shape
        formula = f"W_O ({d_model} × {width}) times joined"
        code = "output = joined @ W_O.T"
        if inputs.b_O is not None:
            formula += ", + b_O"
            code += " + b_O"
        steps.append(Step("output", "Output projection", formula, code, "output", (*queries, "output")))
    return steps


def run_steps(steps: list[Step], inputs: AttentionInputs) -> list[Floats]:
    """Run the lines of code of all steps in order; return the value of each step. The inputs stay unchanged."""
    # Each line reads the inputs and the variables of earlier lines, and assigns one variable more.
    variables = {"np": np} | inputs.variables()
    values = []
    for step in steps:
        exec(step.code, variables)
        values.append(np.array(eval(step.variable, variables), np.float64))
    return values


def _column_slice(head: int, width: int) -> str:
    """Return the slice of a head's columns as code, such as "8:16"."""
    return f"{head * width}:{(head + 1) * width}"


def _column_range(head: int, width: int) -> str:
    """Return a head's columns in words, such as "8 to 15", or "8" for a single column."""
    first_column = head * width
    last_column = first_column + width - 1
    return str(first_column) if width == 1 else f"{first_column} to {last_column}"


def _scaling_formula(scale: float, d_head: int) -> str:
    """Return the formula of the scaling step, and say if the scale is not 1/√d_head."""
    if math.isclose(scale, 1 / math.sqrt(d_head), rel_tol=1e-6):
        return f"dots / √d_head = dots / √{d_head} = dots × {scale:.4f}"
    if scale == 1.0:
        return "dots × 1: this model does not scale"
    return f"dots × {scale:.6g}, the model's own scale (1/√d_head = 1/√{d_head} = {1 / math.sqrt(d_head):.6g})"
