"""What the steps of a trace are compared with: the module's own attention, or NumPy's lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core.teaching import example, stepwise
from attnscope.core.teaching.stepwise import Inputs, Line
from attnscope.errors import require_rounding
from attnscope.questions.trace import whole_check

if TYPE_CHECKING:
    from attnscope.models.inside.around import Surroundings

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Kernel:
    """What the steps are compared with."""

    name: str
    outputs: Array
    weights: Array | None
    projected: Array | None
    eps: float


def check_steps(
    lines: Sequence[Line], values: Sequence[Array], kernel: Kernel, inputs: Inputs, query: int | None
) -> dict[str, Any]:
    """Compare steps with what a kernel computed, and return the differences as a trace keeps them.

    Args:
        lines: The steps.
        values: Their values.
        kernel: What they are compared with.
        inputs: What they start from.
        query: The one query that is traced; None = all.

    Raises:
        AttnscopeError: A difference is beyond rounding.
    """
    rows = slice(None) if query is None else query
    outputs = weights = 0.0
    largest_score = 1.0
    for line, value in zip(lines, values, strict=True):
        if line.name == "head_output":
            outputs = max(outputs, _apart(value, kernel.outputs[line.head, rows]))
        elif line.name == "weights" and kernel.weights is not None:
            weights = max(weights, _apart(value, kernel.weights[line.head, rows]))
        elif line.name == "scores":
            largest_score = max(largest_score, float(np.abs(value).max(initial=0.0)))

    # A score rounded to eps·|s| moves a weight by as much, relatively; a sum over d_head columns rounds √d_head times.
    largest_value = max(1e-30, float(np.abs(inputs.V).max(initial=0.0)))
    of_weights = 8 * kernel.eps * largest_score * math.sqrt(inputs.d_head)
    rounding = of_weights * largest_value
    differences = [("outputs", outputs, rounding)]
    if kernel.weights is not None:
        differences.append(("weights", weights, of_weights))
    projected = math.nan
    if kernel.projected is not None:
        projected = _apart(values[-1], kernel.projected[rows])
        joined = next(value for line, value in zip(lines, values, strict=True) if line.name == "joined")
        allowed = _rounding_projected(joined, inputs, kernel.eps, rounding)
        differences.append((lines[-1].name, projected, allowed))
    for name, difference, allowed in differences:
        require_rounding(
            f"the steps do not reproduce what the model computed: {name} differ from {kernel.name}",
            difference,
            allowed,
            "try --dtype float64; the maps, which were checked at load, can be seen with: attnscope heatmap",
        )
    return whole_check(
        kernel.name,
        weights=math.nan if kernel.weights is None else weights,
        outputs=outputs,
        projected=projected if lines[-1].name == "output" else math.nan,
        rounding=rounding,
    )


def _rounding_projected(joined: Array, inputs: Inputs, eps: float, rounding: float) -> float:
    """How much rounding may change what W_O gives: through the rounded outputs, and in its own sums."""
    if inputs.W_O is None:
        return rounding
    size = np.abs(joined) @ np.abs(inputs.W_O).T + (0.0 if inputs.b_O is None else np.abs(inputs.b_O))
    # Sums are made in 32 bits at the least, and then rounded to the kernel's precision.
    sums = 8 * min(eps, float(np.finfo(np.float32).eps)) * math.sqrt(inputs.W_O.shape[1])
    return float(rounding * np.abs(inputs.W_O).sum(1).max() + (eps + sums) * size.max(initial=0.0))


def _apart(ours: Array, theirs: Array) -> float:
    return float(np.abs(ours - theirs).max(initial=0.0))


def run_example() -> Kernel:
    """What attnscope's own module computes on the worked example."""
    import torch

    from attnscope.core.attention.multihead import MultiHeadAttention
    from attnscope.core.attention.seam import AttentionCall, attend, attention_weights

    seen: list[AttentionCall] = []

    def keep(call: AttentionCall) -> torch.Tensor:
        seen.append(call)
        return attend(call)

    module = MultiHeadAttention(4, example.N_HEADS, identity=True)
    tensors = (torch.tensor(x, dtype=torch.float32) for x in (example.Q, example.K, example.V))
    with torch.no_grad():
        output, _ = module(*tensors, probe=keep)
        weights = attention_weights(seen[0])[0]
    joined = output.double().numpy()
    by_head = joined.reshape(joined.shape[0], example.N_HEADS, -1).transpose(1, 0, 2)  # (head, query, d)
    return Kernel(
        "torch's scaled_dot_product_attention, float32 on cpu", by_head, weights.double().numpy(), joined,
        float(torch.finfo(torch.float32).eps),
    )  # fmt: skip


def run_lines(inputs: Inputs) -> Kernel:
    """What the lines of NumPy compute, with which loops are compared."""
    lines = stepwise.all_lines(inputs, range(inputs.n_heads), None)
    values = dict(zip(((line.name, line.head) for line in lines), stepwise.compute(lines, inputs), strict=True))
    outputs, weights = (
        np.stack([values[name, head] for head in range(inputs.n_heads)]) for name in ("head_output", "weights")
    )
    last = values["joined" if inputs.W_O is None else "output", None]
    return Kernel("the lines of NumPy, float64", outputs, weights, last, float(np.finfo(np.float64).eps))


def read_kernel(around: Surroundings) -> Kernel:
    """What a model's attention computes."""
    import torch

    from attnscope.core.attention.seam import attention_weights

    call = around.call
    fused = call.softcap is None and call.sinks is None
    name = "torch's scaled_dot_product_attention" if fused else "attnscope's dense attention"
    dtype = str(call.query.dtype).removeprefix("torch.")
    return Kernel(
        f"{name}, {dtype} on {call.query.device}", to_float64(around.output[0]), to_float64(attention_weights(call)[0]),
        None if around.attended is None else to_float64(around.attended), float(torch.finfo(call.query.dtype).eps),
    )  # fmt: skip


def to_float64(tensor: Any) -> Array:
    """A tensor as an array of its shape."""
    array: Array = tensor.detach().cpu().double().numpy()
    return array
