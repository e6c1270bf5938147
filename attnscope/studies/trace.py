"""Compute the attention of heads number by number, and compare it with the kernel that computes it for the model.

The steps are lines of NumPy in float64 (`core.stepwise`), which start from the model's own queries, keys and values.
If their result differs from the kernel's by more than rounding, an error is raised. `questions.trace` holds the result,
and draws it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attnscope.arrays import Floats
from attnscope.core import stepwise
from attnscope.core.plain_torch import with_default_torch
from attnscope.core.stepwise import AttentionInputs
from attnscope.errors import AttnscopeError, UsageError, require_close
from attnscope.models.model import Model
from attnscope.questions.trace import HEAD_STEP_AXES, INPUT_AXES, Trace, TraceOptions
from attnscope.results.table import Table
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.inputs.reading import Prompt, find_position
from attnscope.studies.one_layer import read_layer, to_numpy

if TYPE_CHECKING:
    from attnscope.models.inside.projections import ProjectedAttention


_MAX_SCORES = 50_000_000
"""How many scores, heads x queries x keys, a trace may have."""


def trace_text_or_example(
    spec: str, text: str | None, layer: int | None, options: TraceOptions, load_options: LoadOptions
) -> Trace:
    """Load a model and trace heads of a layer on a text, or trace the worked example if there is no text."""
    if text is None:
        # The worked example has layer 0, so 0 is accepted as None is.
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
    model = load_options.load(spec)
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
    """Compute some heads of one layer on a text, step by step, from the model's own queries, keys and values.

    Args:
        model: A loaded model, see `attnscope.load`; None = the worked example, "The cat sat on mat" with d_model 4 and
            2 heads, without projections.
        text: The text or prompt to run it on.
        layer: The number of the layer.
        heads: The numbers of the heads; None = all.
        query: The query to trace: a token, a word, or a position such as "@3" or 3; None = all queries, as matrices.
        kind: "encoder", "decoder" or "cross"; None = the model's first.

    Returns:
        The result, with the value of each step in float64.

    Raises:
        AttnscopeError: There is no such layer, head or token; the model does not show its queries and keys; or the
            steps differ from the model's own output by more than rounding.
    """
    if isinstance(heads, int):
        heads = (heads,)
    # Run the model on the text, or take the worked example.
    layer_run = read_layer(model, text, layer, kind, heads)
    queries = layer_run.queries
    keys = layer_run.keys
    head_numbers = layer_run.heads
    # The positions of the traced queries.
    query_position = None
    traced_positions = list(range(len(queries)))
    if query is not None:
        query_position = find_position(query, queries, "--query")
        traced_positions = [query_position]
    # The scores of a long text are too many to read, and may not fit into memory.
    n_scores = len(traced_positions) * len(keys) * len(head_numbers)
    if n_scores > _MAX_SCORES:
        raise AttnscopeError(
            f"the scores of {len(head_numbers)} heads on {len(queries)} queries and {len(keys)} keys are {n_scores:,} "
            "numbers",
            "trace one query (--query) or fewer heads (-H)",
        )

    # What the kernel computes of the attention. `projected_attention` is None for the worked example.
    attention = layer_run.projected_attention or _run_example(layer_run.inputs)
    kernel = _read_kernel(attention)
    # Compute the steps. They write the outputs of the traced heads into H, (head, query, d_value), and then join all
    # heads. So H starts with the outputs of the other heads.
    untraced_outputs = kernel.outputs.copy()
    untraced_outputs[list(head_numbers)] = 0
    inputs = replace(layer_run.inputs, H=untraced_outputs)
    steps = stepwise.all_steps(inputs, head_numbers, query_position)
    arrays = _stack_by_step(steps, stepwise.run_steps(steps, inputs), is_one_query=query is not None)
    if np.isnan(arrays["weights"]).any():
        raise AttnscopeError(
            "a query of this text may attend to nothing", "trace another one with --query"
        )
    differences = _compare_with_kernel(arrays, kernel, inputs, head_numbers, traced_positions)

    # Store steps, inputs and labels.
    step_rows = []
    for step in steps:
        # In the table, the head of a step that joins all heads is -1.
        head = -1 if step.head is None else step.head
        step_rows.append({**vars(step), "axes": " ".join(step.axes), "head": head})
    columns_by_table = Trace.TABLES
    tables = {
        "steps": Table.of(columns_by_table["steps"], step_rows),
        "heads": Table.of_arrays(columns_by_table["heads"], head=head_numbers),
        "queries": Table.of_arrays(columns_by_table["queries"], token=queries.labels),
        "keys": Table.of_arrays(columns_by_table["keys"], token=keys.labels),
        "traced": Table.of_arrays(columns_by_table["traced"], query=traced_positions),
    }
    # `variables` maps the variables that the steps read to their values.
    for name, value in inputs.variables().items():
        if name in INPUT_AXES:
            arrays[f"input_{name}"] = np.asarray(value)
    options = {
        "text": layer_run.text,
        "kind": layer_run.layer_key[0],
        "layer": layer,
        "n_heads": inputs.n_heads,
        "n_kv_heads": inputs.n_kv_heads,
        "one_query": query is not None,
        "check": differences,
    }
    # The notes say which projections of the model were not found.
    run = {**layer_run.run, "notes": [*layer_run.run["notes"], *attention.notes]}
    # The second argument is the `corpus`, which is empty: there is one text.
    return Trace(run, {}, options, tables, arrays)


def _stack_by_step(
    steps: Sequence[stepwise.Step], values: Sequence[Floats], *, is_one_query: bool
) -> dict[str, Any]:
    """Return the values of each step by its name: (head, …) for steps of single heads, such as "weights".

    For one query, a step computes its value without a query axis, such as weights (key,). The axis is added: (1, key).
    """
    values_by_step: dict[str, list[Floats]] = {}
    for step, value in zip(steps, values, strict=True):
        # Keys and values have no query axis. Their axes begin with "keys".
        is_of_keys = step.head is not None and HEAD_STEP_AXES[step.name][0] == "keys"
        if is_one_query and not is_of_keys:
            value = value[None]
        values_by_step.setdefault(step.name, []).append(value)
    arrays = {}
    for name, head_values in values_by_step.items():
        arrays[name] = np.stack(head_values) if name in HEAD_STEP_AXES else head_values[0]
    return arrays


# The kernel that the steps are compared with


def _run_example(inputs: AttentionInputs) -> ProjectedAttention:
    """Return the worked example as a model's attention and its projections, computed by the kernel in float32."""
    import torch

    from attnscope.core.attention.seam import AttentionCall, attend
    from attnscope.models.inside.projections import ProjectedAttention

    # Heads are columns of Q, K and V. Split all three at once: (3, token, d_model) → (3, 1, head, token, d_head).
    joined = torch.tensor(np.stack([inputs.Q, inputs.K, inputs.V]), dtype=torch.float32)
    query, key, value = joined.view(3, len(inputs.Q), inputs.n_heads, -1).transpose(1, 2)[:, None]
    call = AttentionCall(0, "encoder", query, key, value, inputs.scale)
    output = attend(call)
    note = (
        "no projections: heads take columns of Q, K and V as they stand, and joined they are the output"
    )
    return ProjectedAttention(call, output, attended=output[0].transpose(0, 1).flatten(1), notes=(note,))


class _KernelResult(NamedTuple):
    """Hold what a kernel computed for a layer, as float64.

    Attributes:
        name: The name of the kernel, its precision and device.
        outputs: The outputs of heads, (head, query, d_value).
        weights: The weights, (head, query, key).
        projected: The output after W_O, (query, d_model); None = the model does not show it. For the worked example,
            which has no W_O, it is the outputs of heads side by side.
        eps: The relative rounding error of the kernel's precision.
    """

    name: str
    outputs: Floats
    weights: Floats
    projected: Floats | None
    eps: float


def _read_kernel(attention: ProjectedAttention) -> _KernelResult:
    """Return what the kernel computed: the outputs as they are, and the weights from the queries and keys."""
    import torch

    from attnscope.core.attention.seam import attention_weights

    # `call` holds the layer's queries, keys and values. Torch's kernel takes no soft cap and no sinks.
    call = attention.call
    is_fused = call.softcap is None and call.sinks is None
    name = "torch's scaled_dot_product_attention" if is_fused else "attnscope's dense attention"
    dtype = str(call.query.dtype).removeprefix("torch.")
    return _KernelResult(
        name=f"{name}, {dtype} on {call.query.device}",
        outputs=to_numpy(attention.output[0]),
        weights=to_numpy(attention_weights(call)[0]),
        # `to_numpy(None)` is None.
        projected=to_numpy(attention.attended),
        eps=float(torch.finfo(call.query.dtype).eps),
    )


def _compare_with_kernel(
    arrays: Mapping[str, Floats],
    kernel: _KernelResult,
    inputs: AttentionInputs,
    heads: tuple[int, ...],
    traced_positions: list[int],
) -> dict[str, Any]:
    """Compare the steps with what the kernel computed.

    Args:
        arrays: The values of each step by its name.
        kernel: What the kernel computed.
        inputs: The inputs of the steps.
        heads: The traced heads.
        traced_positions: The positions of the traced queries.

    Returns:
        The option `check` of the result: the kernel, the largest differences, and how much rounding explains.

    Raises:
        AttnscopeError: A difference is larger than rounding explains.
    """
    # The kernel's numbers for the traced heads and queries, (head, query, …).
    rows = np.ix_(heads, traced_positions)
    outputs = _largest_difference(arrays["head_output"], kernel.outputs[rows])
    weights = _largest_difference(arrays["weights"], kernel.weights[rows])
    # A relative error of eps in a score s changes s by eps·|s|. So exp(s), and with it the weight, changes by a factor
    # of about 1 + eps·|s|. A dot product of d_head terms adds up about √d_head such errors. 8 is a margin.
    largest_score = max(1.0, float(np.abs(arrays["scores"]).max()))
    rounding_of_weights = 8 * kernel.eps * largest_score * math.sqrt(inputs.d_head)
    # An output is the mean of the values with these weights.
    largest_value = max(1e-30, float(np.abs(inputs.V).max()))
    rounding = rounding_of_weights * largest_value
    differences = [("outputs", outputs, rounding), ("weights", weights, rounding_of_weights)]
    # Compare the last step too. It is "output", after W_O, or "joined" for the worked example, which has no W_O.
    projected = None
    if kernel.projected is not None:
        last_step = "output" if "output" in arrays else "joined"
        difference = _largest_difference(arrays[last_step], kernel.projected[traced_positions])
        allowed = _bound_projected_rounding(arrays["joined"], inputs, kernel.eps, rounding)
        differences.append((last_step, difference, allowed))
        if last_step == "output":
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


def _bound_projected_rounding(
    joined: Floats, inputs: AttentionInputs, eps: float, rounding: float
) -> float:
    """Return how much rounding may change the output after W_O: rounding of the heads' outputs, and of the sums in W_O.

    Args:
        joined: The outputs of all heads side by side, (query, n_heads * d_value).
        inputs: The inputs of the steps, with W_O and its bias.
        eps: The relative rounding of the kernel.
        rounding: How much rounding may change the heads' outputs.
    """
    if inputs.W_O is None:
        return rounding
    bias = 0.0 if inputs.b_O is None else np.abs(inputs.b_O)
    # The sum of the absolute terms of each output, (query, d_model).
    size = np.abs(joined) @ np.abs(inputs.W_O).T + bias
    # The kernel sums in float32 or better, and then rounds to its own precision.
    eps_of_sums = 8 * min(eps, float(np.finfo(np.float32).eps)) * math.sqrt(inputs.W_O.shape[1])
    from_outputs = rounding * np.abs(inputs.W_O).sum(1).max()
    return float(from_outputs + (eps + eps_of_sums) * size.max())


def _largest_difference(step_values: Floats, kernel_values: Floats) -> float:
    return float(np.abs(step_values - kernel_values).max(initial=0.0))
