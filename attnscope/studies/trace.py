"""Compute the attention of heads number by number, and compare it with the model's own kernel.

The steps are lines of NumPy in float64 (`core.stepwise`). They start from the model's own queries, keys and values.
A result that differs from the kernel's beyond rounding is refused. Drawing is left to `drawing`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.choice import Choice
from attnscope.core import example, stepwise
from attnscope.core.plain_torch import with_plain_torch
from attnscope.core.stepwise import Inputs, Line
from attnscope.errors import AttnscopeError, UsageError, require_rounding
from attnscope.models.model import Model
from attnscope.questions.trace import HEAD_STEPS, JOINT_STEPS, Trace, TraceOptions
from attnscope.results.table import Table
from attnscope.studies.failures import require_finite
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.inputs.provenance import run_of, run_of_example
from attnscope.studies.inputs.reading import Prompt, Reading, batch_of, position_of, read
from attnscope.text import build_tokens, word_spans

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.attention.seam import AttentionCall
    from attnscope.models.inside.projections import Surroundings
    from attnscope.results.tokens import Tokens

Array = NDArray[np.float64]

_MOST_NUMBERS = 50_000_000
"""How many numbers a matrix of all queries and keys may have, by heads, before it is refused."""


def study(spec: str, text: str | None, layer: int | None, options: TraceOptions, loading: LoadOptions) -> Trace:
    """Trace heads of a layer on a text, or the worked example if there is no text."""
    if text is None:
        if layer or options.target is not None or options.kind is not None:
            raise UsageError("without a text the worked example is traced, which has one layer", "give a TEXT")
        return trace_example(options.query, options.heads)
    if layer is None or options.heads is None:
        raise UsageError("the trace of a text shows single heads", "give a layer and heads, such as -L 3 -H 1")
    prompt = Prompt(text, target=options.target)
    return trace(loading.load(spec), prompt, layer, options.heads, query=options.query, kind=options.kind)


@with_plain_torch
def trace_example(query: str | int | None = None, heads: Sequence[int] | None = None) -> Trace:
    """Trace the worked example: "The cat sat on mat", d_model 4, 2 heads, no projections.

    Args:
        query: The query to follow, such as "cat", or its place; None = all of them, as matrices.
        heads: Which heads; None = both.

    Raises:
        AttnscopeError: There is no such token or head.
    """
    import torch

    from attnscope.core.attention.seam import AttentionCall, attend

    chosen = tuple(range(example.N_HEADS)) if heads is None else tuple(sorted(set(heads)))
    beyond = [head for head in chosen if not 0 <= head < example.N_HEADS]
    if beyond:
        raise AttnscopeError(f"there is no head {beyond[0]}: the worked example has 2", "they are numbered 0 and 1")
    position = None if query is None else position_of(query, _example_tokens(), "--query")
    # No weights are read: Q, K and V are constants of the example.
    scale = 1 / math.sqrt(example.Q.shape[1] / example.N_HEADS)
    inputs = Inputs(example.Q, example.K, example.V, example.N_HEADS, example.N_HEADS, scale)
    # Each as (1, head, token, column), for the kernel.
    tensors = [torch.tensor(x, dtype=torch.float32) for x in (example.Q, example.K, example.V)]
    query_, key, value = (x.view(len(x), example.N_HEADS, -1).transpose(0, 1)[None] for x in tensors)
    call = AttentionCall(0, "encoder", query_, key, value, scale)
    output = attend(call)
    run = run_of_example(
        ["no projections: heads take columns of Q, K and V as they stand, and joined they are the output"]
    )
    selection = _Selection(" ".join(example.TOKENS), "encoder", 0, chosen, example.TOKENS, example.TOKENS, position)
    return selection.build(inputs, _kernel_of(call, output, output[0].transpose(0, 1).flatten(1)), run)


def _example_tokens() -> Tokens:
    """Return the tokens of the worked example: each is a word."""
    text = " ".join(example.TOKENS)
    n = len(example.TOKENS)
    return build_tokens(
        text,
        ids=range(n),
        pieces=example.TOKENS,
        offsets=word_spans(text),
        special=[False] * n,
        style="plain",
    )


@with_plain_torch
def trace(
    model: Model | None = None,
    text: str | Prompt | None = None,
    layer: int = 0,
    heads: int | Sequence[int] | None = None,
    *,
    query: str | int | None = None,
    kind: str | None = None,
) -> Trace:
    """Compute some heads of one layer on a text, step by step, from what reaches the model's attention.

    Args:
        model: A loaded model, see `attnscope.load`; None = the worked example, see `trace_example`.
        text: What to run it on.
        layer: Which layer.
        heads: Which heads; None = all.
        query: The query to follow: a token, a word, or a place such as "@3" or 3; None = all, as matrices.
        kind: "encoder", "decoder" or "cross"; None = the model's first.

    Returns:
        The record. Queries, keys and values are the model's own; the steps are computed from them in float64.

    Raises:
        AttnscopeError: There is no such layer, head or token; the model does not show its queries and keys; or the
            steps are further from the model's own output than rounding.
    """
    from attnscope.models.inside.projections import surroundings

    # Find the heads and the query.
    head_numbers = (heads,) if isinstance(heads, int) else heads
    if model is None:
        return trace_example(query, head_numbers)
    if text is None:
        raise UsageError("no text is given", "a model is traced on a text")
    prompt = Prompt(text) if isinstance(text, str) else text
    traced = Choice((layer,), None if head_numbers is None else tuple(head_numbers)).within(model.info).heads
    kind = model.info.choose_kind(kind)
    reading = read(model, prompt)
    queries, keys = reading.queries_and_keys(kind)
    position = None if query is None else position_of(query, queries, "--query")

    # A matrix of a long text is too much to read, and may be too much to hold.
    n_queries = len(queries) if position is None else 1
    n_numbers = n_queries * len(keys) * len(traced)
    if n_numbers > _MOST_NUMBERS:
        raise AttnscopeError(
            f"the scores of {len(traced)} heads on {len(queries)} queries and {len(keys)} keys are "
            f"{n_numbers:,} numbers",
            "trace one query (--query) or fewer heads (-H)",
        )
    # Run the model up to the layer's attention, and keep its inputs.
    around = surroundings(model, batch_of(reading, model.info.device), kind, layer)
    inputs = _inputs_of(around)
    _require_numbers(model, inputs, kind, layer)
    run = run_of(model.info, (*reading.notes, *around.notes))
    selection = _Selection(prompt.text, kind, layer, traced, queries.labels, keys.labels, position)
    return selection.build(inputs, _kernel_of(around.call, around.output, around.attended), run)


def layer_inputs(
    model: Model, reading: Reading, kind: str, layer: int
) -> tuple[Inputs, tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Return what reaches a layer's attention, queries and keys as they are when they meet; labels of both; notes."""
    from attnscope.models.inside.projections import surroundings

    Choice((layer,)).within(model.info)
    queries, keys = reading.queries_and_keys(kind)
    around = surroundings(model, batch_of(reading, model.info.device), kind, layer)
    inputs = _inputs_of(around)
    _require_numbers(model, inputs, kind, layer)
    return inputs, queries.labels, keys.labels, around.notes


# Steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Selection:
    """Hold the heads and the query of a text that are traced; as the fields of `Trace`."""

    text: str
    kind: str
    layer: int
    heads: tuple[int, ...]
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    query: int | None

    def build(self, inputs: Inputs, kernel: _Kernel, run: dict[str, Any]) -> Trace:
        """Compute the steps, and compare them with the kernel."""
        # The concatenation also has the heads that are not traced.
        others = kernel.outputs.copy()
        others[list(self.heads)] = 0
        # Compute the steps of the heads.
        inputs = replace(inputs, H=others)
        lines = stepwise.all_lines(inputs, self.heads, self.query)
        values = stepwise.compute(lines, inputs)
        grids = self._values(lines, values)
        if np.isnan(grids["weights"]).any():
            raise AttnscopeError("a query of this text may attend to nothing", "trace another one with --query")
        # Store steps, inputs and labels.
        for name, value in inputs.names().items():
            grids[f"input_{name}"] = np.asarray(value)

        known = Trace.TABLES
        steps = [
            {**vars(line), "axes": " ".join(line.axes), "head": -1 if line.head is None else line.head}
            for line in lines
        ]
        traced = range(len(self.queries)) if self.query is None else [self.query]
        tables = {
            "steps": Table.of(known["steps"], steps),
            "heads": Table.of_arrays(known["heads"], head=list(self.heads)),
            "queries": Table.of_arrays(known["queries"], token=list(self.queries)),
            "keys": Table.of_arrays(known["keys"], token=list(self.keys)),
            "traced": Table.of_arrays(known["traced"], query=list(traced)),
        }
        options = {
            "text": self.text,
            "kind": self.kind,
            "layer": self.layer,
            "n_heads": inputs.n_heads,
            "n_kv_heads": inputs.n_kv_heads,
            "one_query": self.query is not None,
            "check": _check(lines, values, kernel, inputs, self.query),
        }
        return Trace(run, {}, options, tables, grids)

    def _values(self, lines: list[Line], values: list[Array]) -> dict[str, Any]:
        """Return the values of each step, those of heads stacked, (head, …); one query keeps its axis."""
        grids: dict[str, Any] = {}
        for line, value in zip(lines, values, strict=True):
            axes = HEAD_STEPS.get(line.name) or JOINT_STEPS[line.name]
            whole = value[None] if self.query is not None and axes[0] == "traced" else value
            if line.head is None:
                grids[line.name] = whole
            else:
                grids.setdefault(line.name, []).append(whole)
        return {name: np.stack(value) if isinstance(value, list) else value for name, value in grids.items()}


# What the steps start from ----------------------------------------------------------------------------------------


def _inputs_of(around: Surroundings) -> Inputs:
    from attnscope.core.attention.seam import allowed

    call = around.call
    may = allowed(call)
    return Inputs(
        Q=_join(call.query[0]),
        K=_join(call.key[0]),
        V=_join(call.value[0]),
        n_heads=call.n_heads,
        n_kv_heads=call.n_kv_heads,
        scale=call.scale,
        may=None if may is None or bool(may.all()) else _whole(may, call).astype(np.bool_),
        bias=None if call.bias is None else _whole(call.bias, call),
        softcap=call.softcap,
        sinks=None if call.sinks is None else _float64(call.sinks),
        W_O=None if around.w_o is None else _float64(around.w_o),
        b_O=None if around.b_o is None else _float64(around.b_o),
    )


def _join(heads: Any) -> Array:
    """Return (head, token, width) as (token, head * width)."""
    return _float64(heads.transpose(0, 1).flatten(1))


def _whole(tensor: Any, call: Any) -> Array:
    """Return a mask or bias as (1 or n_heads, query, key)."""
    four = tensor[(None,) * (4 - tensor.ndim)][0]
    return np.array(_float64(four.expand(-1, call.query.shape[2], call.key.shape[2])))


def _float64(tensor: Any) -> Array:
    """Return a tensor as an array of its shape."""
    array: Array = tensor.detach().cpu().double().numpy()
    return array


def _require_numbers(model: Model, inputs: Inputs, kind: str, layer: int) -> None:
    """Raise an AttnscopeError where queries, keys or values are NaN or infinite."""
    for numbers in (inputs.Q, inputs.K, inputs.V):
        require_finite({kind: {layer: numbers[None]}}, model.info)


# What the steps are compared with ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Kernel:
    """Hold a kernel's attention: outputs (head, query, d_value), weights (head, query, key), after W_O."""

    name: str
    outputs: Array
    weights: Array
    projected: Array | None
    eps: float


def _kernel_of(call: AttentionCall, output: Tensor, projected: Tensor | None) -> _Kernel:
    """Return the outputs and weights of an attention as its kernel computes them, float64."""
    import torch

    from attnscope.core.attention.seam import attention_weights

    is_fused = call.softcap is None and call.sinks is None
    name = "torch's scaled_dot_product_attention" if is_fused else "attnscope's dense attention"
    dtype = str(call.query.dtype).removeprefix("torch.")
    return _Kernel(
        name=f"{name}, {dtype} on {call.query.device}",
        outputs=_float64(output[0]),
        weights=_float64(attention_weights(call)[0]),
        projected=None if projected is None else _float64(projected),
        eps=float(torch.finfo(call.query.dtype).eps),
    )


def _check(
    lines: Sequence[Line], values: Sequence[Array], kernel: _Kernel, inputs: Inputs, query: int | None
) -> dict[str, Any]:
    """Compare steps with what a kernel computed, and return the differences as a trace keeps them.

    Raises:
        AttnscopeError: A difference is beyond rounding.
    """
    # The largest differences over all heads, and the largest score.
    rows = slice(None) if query is None else query
    named: dict[str, list[tuple[int | None, Array]]] = {}
    for line, value in zip(lines, values, strict=True):
        named.setdefault(line.name, []).append((line.head, value))
    outputs = max(_apart(value, kernel.outputs[head, rows]) for head, value in named["head_output"])
    weights = max(_apart(value, kernel.weights[head, rows]) for head, value in named["weights"])
    largest_score = max([1.0, *(float(np.abs(value).max(initial=0.0)) for _, value in named["scores"])])
    joined = named["joined"][0][1] if "joined" in named else values[-1]

    # A score rounded to eps·|s| moves a weight by as much, relatively; a sum over d_head columns rounds √d_head times.
    largest_value = max(1e-30, float(np.abs(inputs.V).max(initial=0.0)))
    rounding_of_weights = 8 * kernel.eps * largest_score * math.sqrt(inputs.d_head)
    rounding = rounding_of_weights * largest_value
    differences = [("outputs", outputs, rounding), ("weights", weights, rounding_of_weights)]
    # Compare the output after W_O, where the model shows it.
    projected = None
    if kernel.projected is not None:
        difference = _apart(values[-1], kernel.projected[rows])
        differences.append((lines[-1].name, difference, _rounding_projected(joined, inputs, kernel.eps, rounding)))
        if lines[-1].name == "output":
            projected = difference
    # Refuse differences beyond rounding.
    for name, difference, allowed in differences:
        require_rounding(
            f"the steps do not reproduce what the model computed: {name} differ from {kernel.name}",
            difference,
            allowed,
            "try --dtype float64; the maps, which were checked at load, can be seen with: attnscope heatmap",
        )
    return {
        "kernel": kernel.name,
        "weights": weights,
        "outputs": outputs,
        "projected": projected,
        "rounding": rounding,
    }


def _rounding_projected(joined: Array, inputs: Inputs, eps: float, rounding: float) -> float:
    """Return how much rounding may change what W_O gives: through the rounded outputs, and in its own sums."""
    if inputs.W_O is None:
        return rounding
    bias = 0.0 if inputs.b_O is None else np.abs(inputs.b_O)
    size = np.abs(joined) @ np.abs(inputs.W_O).T + bias
    # Sums are made in 32 bits at the least, and then rounded to the kernel's precision.
    sums = 8 * min(eps, float(np.finfo(np.float32).eps)) * math.sqrt(inputs.W_O.shape[1])
    return float(rounding * np.abs(inputs.W_O).sum(1).max() + (eps + sums) * size.max(initial=0.0))


def _apart(ours: Array, theirs: Array) -> float:
    return float(np.abs(ours - theirs).max(initial=0.0))
