"""Compute the attention of heads number by number, and compare it with the model's own kernel.

The steps are lines of NumPy in float64 (`core.stepwise`), which start from the model's own queries, keys and values.
A trace is refused if its result differs from the kernel's by more than rounding. Drawing is left to `questions.trace`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnscope.core import stepwise
from attnscope.core.plain_torch import with_default_torch
from attnscope.core.stepwise import AttentionInputs
from attnscope.errors import AttnscopeError, UsageError, require_close
from attnscope.models.model import Model
from attnscope.questions.trace import HEAD_STEP_AXES, INPUT_AXES, Trace, TraceOptions
from attnscope.results.table import Table
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.inputs.reading import Prompt, find_position
from attnscope.studies.one_layer import array_of, read_layer

if TYPE_CHECKING:
    from attnscope.models.inside.projections import ProjectedAttention

Array = NDArray[np.float64]

_MAX_SCORES = 50_000_000
"""How many scores, heads x queries x keys, a trace may have."""


def study(
    spec: str, text: str | None, layer: int | None, options: TraceOptions, loading: LoadOptions
) -> Trace:
    """Load a model and trace heads of a layer on a text, or trace the worked example if there is no text."""
    if text is None:
        if layer or options.target is not None or options.kind is not None:
            raise UsageError(
                "without a text the worked example is traced, which has one layer", "give a TEXT"
            )
        return trace(heads=options.heads, query=options.query)
    if layer is None or options.heads is None:
        raise UsageError(
            "the trace of a text shows single heads", "give a layer and heads, such as -L 3 -H 1"
        )
    prompt = Prompt(text, target=options.target)
    model = loading.load(spec)
    return trace(model, prompt, layer, options.heads, query=options.query, kind=options.kind)


@with_default_torch
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
        model: A loaded model, see `attnscope.load`; None = the worked example, "The cat sat on mat" with d_model 4 and
            2 heads, without projections.
        text: What to run it on.
        layer: Which layer.
        heads: Which heads; None = all.
        query: The query to follow: a token, a word, or a place such as "@3" or 3; None = all, as matrices.
        kind: "encoder", "decoder" or "cross"; None = the model's first.

    Returns:
        The record of the steps. They are computed in float64 from the model's own queries, keys and values.

    Raises:
        AttnscopeError: There is no such layer, head or token; the model does not show its queries and keys; or the
            steps are further from the model's own output than rounding.
    """
    if isinstance(heads, int):
        heads = (heads,)
    layer_run = read_layer(model, text, layer, kind, heads)
    queries = layer_run.queries
    keys = layer_run.keys
    chosen = layer_run.heads
    # The positions of the traced queries.
    query_position = None
    traced = list(range(len(queries)))
    if query is not None:
        query_position = find_position(query, queries, "--query")
        traced = [query_position]
    # The scores of a long text are too much to read, and may be too much for the memory.
    n_scores = len(traced) * len(keys) * len(chosen)
    if n_scores > _MAX_SCORES:
        raise AttnscopeError(
            f"the scores of {len(chosen)} heads on {len(queries)} queries and {len(keys)} keys are {n_scores:,} "
            "numbers",
            "trace one query (--query) or fewer heads (-H)",
        )

    # Compute the steps. The steps after the heads also need the outputs of the heads that are not traced: H.
    around = layer_run.around or _run_example(layer_run.inputs)
    kernel = _kernel_of(around)
    untraced_outputs = kernel.outputs.copy()
    untraced_outputs[list(chosen)] = 0
    inputs = replace(layer_run.inputs, H=untraced_outputs)
    lines = stepwise.all_lines(inputs, chosen, query_position)
    grids = _grids_of(lines, stepwise.compute(lines, inputs), one_query=query is not None)
    if np.isnan(grids["weights"]).any():
        raise AttnscopeError(
            "a query of this text may attend to nothing", "trace another one with --query"
        )
    check = _check(grids, kernel, inputs, chosen, traced)

    # Store steps, inputs and labels.
    steps = []
    for line in lines:
        head = -1 if line.head is None else line.head
        steps.append({**vars(line), "axes": " ".join(line.axes), "head": head})
    columns = Trace.TABLES
    tables = {
        "steps": Table.of(columns["steps"], steps),
        "heads": Table.of_arrays(columns["heads"], head=chosen),
        "queries": Table.of_arrays(columns["queries"], token=queries.labels),
        "keys": Table.of_arrays(columns["keys"], token=keys.labels),
        "traced": Table.of_arrays(columns["traced"], query=traced),
    }
    for name, value in inputs.names().items():
        if name in INPUT_AXES:
            grids[f"input_{name}"] = np.asarray(value)
    options = {
        "text": layer_run.text,
        "kind": layer_run.layer_key[0],
        "layer": layer,
        "n_heads": inputs.n_heads,
        "n_kv_heads": inputs.n_kv_heads,
        "one_query": query is not None,
        "check": check,
    }
    # The model's projections may be missing: notes say so.
    run = {**layer_run.run, "notes": [*layer_run.run["notes"], *around.notes]}
    return Trace(run, {}, options, tables, grids)


def _grids_of(
    lines: Sequence[stepwise.Step], values: Sequence[Array], *, one_query: bool
) -> dict[str, Any]:
    """Return the values of each step by its name: (head, …) for steps of single heads, such as "weights".

    The lines for one query compute values without its axis, for example weights (key,). They get it back: (1, key).
    """
    by_step: dict[str, list[Array]] = {}
    for line, value in zip(lines, values, strict=True):
        # The keys and values of a head have no axis of queries.
        is_of_keys = line.head is not None and HEAD_STEP_AXES[line.name][0] == "keys"
        if one_query and not is_of_keys:
            value = value[None]
        by_step.setdefault(line.name, []).append(value)
    grids: dict[str, Any] = {}
    for name, parts in by_step.items():
        grids[name] = np.stack(parts) if name in HEAD_STEP_AXES else parts[0]
    return grids


# The kernel that the steps are compared with ------------------------------------------------------------------------


def _run_example(inputs: AttentionInputs) -> ProjectedAttention:
    """Return the worked example in the form of a model's attention, computed by the kernel in float32."""
    import torch

    from attnscope.core.attention.seam import AttentionCall, attend
    from attnscope.models.inside.projections import ProjectedAttention

    # (3, token, d_model) → (3, 1, head, token, d_head), for Q, K and V at once.
    joined = torch.tensor(np.stack([inputs.Q, inputs.K, inputs.V]), dtype=torch.float32)
    query, key, value = joined.view(3, len(inputs.Q), inputs.n_heads, -1).transpose(1, 2)[:, None]
    call = AttentionCall(0, "encoder", query, key, value, inputs.scale)
    output = attend(call)
    note = (
        "no projections: heads take columns of Q, K and V as they stand, and joined they are the output"
    )
    return ProjectedAttention(call, output, attended=output[0].transpose(0, 1).flatten(1), notes=(note,))


class _Kernel(NamedTuple):
    """Hold what a kernel computes of an attention, in float64.

    Attributes:
        name: The name of the kernel, its precision and device.
        outputs: The outputs of heads, (head, query, d_value).
        weights: The weights, (head, query, key).
        projected: The output after W_O, (query, d_model); None = the model does not show it.
        eps: The relative rounding of the precision.
    """

    name: str
    outputs: Array
    weights: Array
    projected: Array | None
    eps: float


def _kernel_of(around: ProjectedAttention) -> _Kernel:
    """Return what the kernel of an attention computes."""
    import torch

    from attnscope.core.attention.seam import attention_weights

    call = around.call
    is_fused = call.softcap is None and call.sinks is None
    name = "torch's scaled_dot_product_attention" if is_fused else "attnscope's dense attention"
    dtype = str(call.query.dtype).removeprefix("torch.")
    return _Kernel(
        name=f"{name}, {dtype} on {call.query.device}",
        outputs=array_of(around.output[0]),
        weights=array_of(attention_weights(call)[0]),
        projected=array_of(around.attended),
        eps=float(torch.finfo(call.query.dtype).eps),
    )


def _check(
    grids: Mapping[str, Array],
    kernel: _Kernel,
    inputs: AttentionInputs,
    heads: tuple[int, ...],
    traced: list[int],
) -> dict[str, Any]:
    """Compare the steps with what the kernel computed.

    Args:
        grids: The values of each step by its name.
        kernel: What the kernel computed.
        inputs: The inputs of the steps.
        heads: The traced heads.
        traced: The positions of the traced queries.

    Returns:
        The `check` of a trace: the kernel, the largest differences, and how much rounding explains.

    Raises:
        AttnscopeError: A difference is beyond rounding.
    """
    # The kernel's numbers for the traced heads and queries, (head, query, …).
    rows = np.ix_(heads, traced)
    outputs = _largest_difference(grids["head_output"], kernel.outputs[rows])
    weights = _largest_difference(grids["weights"], kernel.weights[rows])
    # A relative error of eps in a score s is an error of eps·|s|, and changes exp(s), so the weight, by that factor.
    # A dot product of d_head terms adds up about √d_head such errors. 8 is a margin.
    largest_score = max(1.0, float(np.abs(grids["scores"]).max()))
    rounding_of_weights = 8 * kernel.eps * largest_score * math.sqrt(inputs.d_head)
    # An output is a mean of values, by these weights.
    largest_value = max(1e-30, float(np.abs(inputs.V).max()))
    rounding = rounding_of_weights * largest_value
    differences = [("outputs", outputs, rounding), ("weights", weights, rounding_of_weights)]
    # Compare the output after W_O, where the model shows it. The worked example has no W_O, and ends with "joined".
    projected = None
    if kernel.projected is not None:
        last = "output" if "output" in grids else "joined"
        difference = _largest_difference(grids[last], kernel.projected[traced])
        allowed = _rounding_projected(grids["joined"], inputs, kernel.eps, rounding)
        differences.append((last, difference, allowed))
        if last == "output":
            projected = difference
    for name, difference, allowed in differences:
        require_close(
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


def _rounding_projected(joined: Array, inputs: AttentionInputs, eps: float, rounding: float) -> float:
    """Return how much rounding may change the output after W_O: that of the heads' outputs, and that of its own sums.

    Args:
        joined: The outputs of all heads side by side, (query, n_heads * d_value).
        inputs: The inputs of the steps, with W_O and its bias.
        eps: The relative rounding of the kernel.
        rounding: How much rounding may change the heads' outputs.
    """
    if inputs.W_O is None:
        return rounding
    bias = 0.0 if inputs.b_O is None else np.abs(inputs.b_O)
    # The size of the terms of each sum, (query, d_model).
    size = np.abs(joined) @ np.abs(inputs.W_O).T + bias
    # Sums are made in float32 or better, and then rounded to the kernel's precision.
    eps_of_sums = 8 * min(eps, float(np.finfo(np.float32).eps)) * math.sqrt(inputs.W_O.shape[1])
    from_outputs = rounding * np.abs(inputs.W_O).sum(1).max()
    return float(from_outputs + (eps + eps_of_sums) * size.max())


def _largest_difference(ours: Array, theirs: Array) -> float:
    return float(np.abs(ours - theirs).max(initial=0.0))
