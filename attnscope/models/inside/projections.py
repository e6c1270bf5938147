"""Find linear maps, output projections and hidden states of a model by forward hooks as it runs, not by module names.

The *seam* is the one function that computes every attention of a model. A *probe* is a hook there: it gets an
`AttentionCall` (the queries, keys, values and masks of one layer), and returns the outputs of the heads. A *layer key*
names one attention, (kind, layer), such as ("decoder", 3).

The output projection W_O is the linear map of the concatenated outputs of all heads of a layer.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnscope.core.attention.probes import LayerKey
from attnscope.core.attention.seam import AttentionCall, Kind, attend
from attnscope.errors import AttnscopeError
from attnscope.models.info import require_seam
from attnscope.models.locks import lock_model
from attnscope.models.model import Batch, Model

Inputs = tuple[Any, ...]
"""The positional arguments of a module, as torch's hooks get them."""

NamedInputs = dict[str, Any]
"""The keyword arguments of a module."""

Role = Literal["query", "key", "value"]
ROLES: tuple[Role, ...] = ("query", "key", "value")
"""The fields of an `AttentionCall` that the projections W_Q, W_K and W_V compute."""


class OutputProjectionFinder:
    """A probe that finds the output projection of each attention: the first linear map that reads its output.

    The method `check_linear_map` must be a forward hook of each linear map of the model. The attributes are
    dictionaries by layer key.

    Attributes:
        calls: The calls that reached the seam.
        head_outputs: The outputs of the attentions, (batch, head, query, d_value).
        output_projections: The output projections that were found.
        projected_outputs: The outputs of the output projections.
    """

    def __init__(self) -> None:
        self.calls: dict[LayerKey, AttentionCall] = {}
        self.head_outputs: dict[LayerKey, Tensor] = {}
        self.output_projections: dict[LayerKey, nn.Module] = {}
        self.projected_outputs: dict[LayerKey, Tensor] = {}
        # The layer key and output of the last attention, until its output projection runs; None = none is awaited
        self._expected: tuple[LayerKey, Tensor] | None = None

    def __call__(self, call: AttentionCall) -> Tensor:
        """Compute an attention without gradient, and expect its output projection next."""
        with torch.no_grad():
            output = attend(call)
        layer_key = (call.kind, call.layer)
        self.calls[layer_key] = call
        self.head_outputs[layer_key] = output
        self.expect(layer_key, output)
        return output

    def expect(self, layer_key: LayerKey, output: Tensor) -> None:
        """Expect a linear map that reads this output of an attention, (batch, head, query, d_value)."""
        # An output projection reads the heads' outputs side by side, (batch, query, head * d_value). Up to its shape,
        # that is (batch, query, head, d_value).
        self._expected = layer_key, output.transpose(1, 2)

    def check_linear_map(self, module: nn.Module, inputs: Inputs, result: Any) -> None:
        """Record a linear map as an output projection if it read the expected output. This is a forward hook."""
        first_input = first_input_tensor(inputs)
        if self._expected is None or first_input is None:
            return
        layer_key, head_output = self._expected
        # The comparison is exact: the projection reads the very numbers that the attention returned.
        if have_equal_numbers(first_input, head_output):
            self.output_projections[layer_key] = module
            self.projected_outputs[layer_key] = result
            self._expected = None


def list_modules(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """Return all modules inside root modules, each once. Roots may share modules."""
    return list(dict.fromkeys(module for root in roots for module in root.modules()))


def has_no_children(module: nn.Module) -> bool:
    """Return whether a module contains no other module."""
    return not list(module.children())


def have_equal_numbers(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors hold the same numbers in the same order, whatever their shape."""
    return first.numel() == second.numel() and torch.equal(first.reshape(-1), second.reshape(-1))


def first_input_tensor(inputs: Inputs, named: NamedInputs | None = None) -> Tensor | None:
    """Return the first argument of a module, or the keyword argument `hidden_states`; None if it is no tensor."""
    tensor = inputs[0] if inputs else (named or {}).get("hidden_states")
    return tensor if isinstance(tensor, Tensor) else None


def list_linear_maps(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """Return all linear maps inside root modules."""
    modules = list_modules(roots)
    return [module for module in modules if isinstance(module, nn.Linear) or is_transposed(module)]


def is_transposed(module: nn.Module | None) -> bool:
    """Return whether a module is GPT-2's linear map, whose weight is (in, out) and not (out, in)."""
    # Other libraries may also have a class Conv1D. Only the class of transformers has the attribute `nx`.
    return type(module).__name__ == "Conv1D" and hasattr(module, "nx")


def find_adapted_maps(roots: Iterable[nn.Module]) -> set[nn.Module]:
    """Return the linear maps that an adapter (such as LoRA) wraps. Their weights are not all that they compute."""
    # peft keeps the wrapped map as `base_layer`.
    layers = (getattr(module, "base_layer", None) for module in list_modules(roots))
    return {module for module in layers if isinstance(module, nn.Module)}


def weight_of(module: nn.Module | None) -> Tensor | None:
    """Return a linear map's weight, (out, in); None if the weight is quantised or missing, or `module` is None."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.is_meta:
        # accelerate offloaded the weight: it is in the module's hook, or in one of several hooks inside that one.
        weight = None
        hook = getattr(module, "_hf_hook", None)
        for holder in (hook, *getattr(hook, "hooks", ())):
            tensors = getattr(holder, "weights_map", None) or {}
            if "weight" in tensors:
                weight = tensors["weight"]
                break
    # Quantised weights are integers, 8-bit floats with separate scales, or tensor subclasses (torchao).
    if weight is None or hasattr(type(weight), "__tensor_flatten__"):
        return None
    if not weight.is_floating_point() or weight.element_size() < 2 or weight.ndim != 2:
        return None
    matrix: Tensor = weight.T if is_transposed(module) else weight
    return matrix


@contextlib.contextmanager
def hooks(
    modules: Iterable[nn.Module], hook: Callable[..., Any], *, before: bool = False
) -> Iterator[None]:
    """Register a forward hook on modules until the context ends; it is called only where this thread runs them.

    Meanwhile this thread holds the model's lock.

    Args:
        modules: The modules; a module that comes twice gets one hook.
        hook: Called after each module with (module, inputs, output), or before it with (module, inputs, named inputs).
            If it returns anything but None, that replaces the output, or the inputs.
        before: Whether the hook is called before the module (a forward pre-hook).
    """
    thread_id = threading.get_ident()
    modules = list(dict.fromkeys(modules))

    def call_in_thread(*values: Any) -> Any:
        return hook(*values) if threading.get_ident() == thread_id else None

    with lock_model(modules), contextlib.ExitStack() as stack:
        for module in modules:
            if before:
                handle = module.register_forward_pre_hook(call_in_thread, with_kwargs=True)
            else:
                handle = module.register_forward_hook(call_in_thread)
            stack.callback(handle.remove)
        yield


@contextlib.contextmanager
def record_input_lengths(
    blocks: Mapping[LayerKey, nn.Module],
) -> Iterator[Callable[[Kind, int], Tensor | None]]:
    """Record the length (L2 norm) of each hidden state that a block reads, in runs within the context.

    Args:
        blocks: The blocks, by layer key, (kind, layer).

    Yields:
        A function of kind and layer. It returns the lengths of the hidden states that the block read in the latest run,
        (batch, token), float32 or float64; None if the block read no hidden states.
    """
    latest_lengths: dict[nn.Module | None, Tensor] = {}

    def measure(block: nn.Module, inputs: Inputs, named: NamedInputs) -> None:
        latest_lengths.pop(block, None)
        hidden = first_input_tensor(inputs, named)
        if hidden is not None and hidden.ndim == 3:
            # (batch, token, d_model) -> (batch, token), in float32 or better, as squares overflow in half precision.
            precision = torch.promote_types(hidden.dtype, torch.float32)
            latest_lengths[block] = torch.linalg.vector_norm(hidden.detach(), dim=-1, dtype=precision)

    with hooks(blocks.values(), measure, before=True):
        yield lambda kind, layer: latest_lengths.get(blocks.get((kind, layer)))
    # The function may outlive the context: free what it refers to.
    latest_lengths.clear()


@dataclass(frozen=True, eq=False)
class ProjectedAttention:
    """One attention on one text, with its output projection. Fields of a projection that was not found are None."""

    # The call that reached the seam. Rotary position embeddings have been applied to its queries and keys
    call: AttentionCall
    # The output of the attention, (1, n_heads, query, d_value)
    output: Tensor
    # The output projection's weight, (d_model, n_heads * d_value)
    w_o: Tensor | None = None
    # The output projection's bias, (d_model,); None also for a projection without bias
    b_o: Tensor | None = None
    # The output of the output projection, (query, d_model)
    attended: Tensor | None = None
    # Why a field is None, one sentence each
    notes: tuple[str, ...] = ()


def run_with_output_projection(model: Model, batch: Batch, layer_key: LayerKey) -> ProjectedAttention:
    """Run a model once on one text, and return the attention at a layer key, (kind, layer), and its output projection.

    Raises:
        AttnscopeError: The model's attention does not pass the seam, or it has no such layer.
    """
    # Refuse models that show attention weights only; the message ends with "does not show its queries and keys".
    require_seam(model.info, "its queries and keys")
    finder = OutputProjectionFinder()
    roots = model.modules()
    with torch.no_grad(), hooks(list_linear_maps(roots), finder.check_linear_map):
        model.run(batch, finder)
    if layer_key not in finder.calls:
        kind, layer = layer_key
        raise AttnscopeError(f"{model.info.name} has no {kind} attention in layer {layer}")
    call = finder.calls[layer_key]
    output = finder.head_outputs[layer_key]
    # Read the weight of the output projection.
    module = finder.output_projections.get(layer_key)
    if module is None:
        note = "no linear map is fed just what the heads put out, so that W_O cannot be shown"
        return ProjectedAttention(call, output, notes=(note,))
    weight = weight_of(module)
    if weight is None or module in find_adapted_maps(roots):
        note = "W_O cannot be shown: it is quantised, or an adapter adds to it"
        return ProjectedAttention(call, output, notes=(note,))
    bias = getattr(module, "bias", None)
    # (1, query, d_model), or (query, d_model) in OPT, -> (query, d_model)
    attended = finder.projected_outputs[layer_key].reshape(-1, len(weight))
    return ProjectedAttention(call, output, weight, bias, attended)
