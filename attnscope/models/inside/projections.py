"""Find linear maps, output projections and hidden states of a model by hooks as it runs, not by names of modules."""

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
"""The inputs of a module by position, as torch's hooks get them."""

NamedInputs = dict[str, Any]
"""The inputs of a module by name."""

Role = Literal["query", "key", "value"]
ROLES: tuple[Role, ...] = ("query", "key", "value")
"""What the projections W_Q, W_K and W_V give; fields of an `AttentionCall`."""


class OutputWatch:
    """A probe that finds the output projection of each attention: the first linear map that reads its output.

    The method `look` must be the hook after each linear map of the model. The keys of the dictionaries are layer keys,
    (kind, layer).

    Attributes:
        calls: The calls that reached the seam.
        outputs: The outputs of the attentions, (batch, head, query, d_value).
        modules: The output projections that were found.
        results: The outputs of the output projections.
    """

    def __init__(self) -> None:
        self.calls: dict[LayerKey, AttentionCall] = {}
        self.outputs: dict[LayerKey, Tensor] = {}
        self.modules: dict[LayerKey, nn.Module] = {}
        self.results: dict[LayerKey, Tensor] = {}
        # The layer key and output of the attention whose output projection has yet to run
        self._expected: tuple[LayerKey, Tensor] | None = None

    def __call__(self, call: AttentionCall) -> Tensor:
        """Compute an attention without gradient, and wait for its output projection."""
        with torch.no_grad():
            output = attend(call)
        layer_key = (call.kind, call.layer)
        self.calls[layer_key] = call
        self.outputs[layer_key] = output
        self.expect(layer_key, output)
        return output

    def expect(self, layer_key: LayerKey, output: Tensor) -> None:
        """Wait for the linear map that reads an attention's output, (batch, head, query, d_value)."""
        self._expected = layer_key, output.transpose(1, 2)

    def look(self, module: nn.Module, inputs: Inputs, result: Any) -> None:
        """Take a linear map for the output projection if it read the expected output; the hook after the map."""
        rows = first_tensor(inputs)
        if self._expected is None or rows is None:
            return
        # An output projection reads the outputs of the heads side by side, (batch, query, head * d_value).
        layer_key, output = self._expected
        if have_equal_numbers(rows, output):
            self.modules[layer_key] = module
            self.results[layer_key] = result
            self._expected = None


def modules_of(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """Return all modules of models, each once."""
    return list(dict.fromkeys(module for root in roots for module in root.modules()))


def is_leaf(module: nn.Module) -> bool:
    """Return whether a module holds no others."""
    return not list(module.children())


def have_equal_numbers(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors hold the same numbers in the same order, whatever their shape."""
    return first.numel() == second.numel() and torch.equal(first.reshape(-1), second.reshape(-1))


def first_tensor(inputs: Inputs, named: NamedInputs | None = None) -> Tensor | None:
    """Return the first input of a module, or its hidden states by name; None if it is no tensor."""
    tensor = inputs[0] if inputs else (named or {}).get("hidden_states")
    return tensor if isinstance(tensor, Tensor) else None


def linear_maps(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """Return all linear maps in models."""
    modules = modules_of(roots)
    return [module for module in modules if isinstance(module, nn.Linear) or is_transposed(module)]


def is_transposed(module: nn.Module | None) -> bool:
    """Return whether a module is GPT-2's linear map, whose weight is (in, out) and not (out, in)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nx")


def adapted_maps(roots: Iterable[nn.Module]) -> set[nn.Module]:
    """Return the linear maps to whose outputs an adapter adds something, so that weights do not tell what they do."""
    layers = (getattr(module, "base_layer", None) for module in modules_of(roots))
    return {module for module in layers if isinstance(module, nn.Module)}


def weight_of(module: nn.Module | None) -> Tensor | None:
    """Return a linear map's weight, (out, in); None if it is quantised or missing, or there is no map."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.is_meta:
        # accelerate moved the weight away: it is in the module's hook, or in one of the hooks that this one holds.
        weight = None
        hook = getattr(module, "_hf_hook", None)
        for holder in (hook, *getattr(hook, "hooks", ())):
            tensors = getattr(holder, "weights_map", None) or {}
            if "weight" in tensors:
                weight = tensors["weight"]
                break
    # Quantised weights are integers, 8-bit floats with a scale beside them, or tensors made of others (torchao).
    if weight is None or hasattr(type(weight), "__tensor_flatten__"):
        return None
    if not weight.is_floating_point() or weight.element_size() < 2 or weight.ndim != 2:
        return None
    rows: Tensor = weight.T if is_transposed(module) else weight
    return rows


@contextlib.contextmanager
def hooks(
    modules: Iterable[nn.Module], hook: Callable[..., Any], *, before: bool = False
) -> Iterator[None]:
    """Put a forward hook at modules until the context ends; it is called only where this thread runs them.

    Meanwhile this thread has its turn with the model.

    Args:
        modules: The modules; one that comes twice gets one hook.
        hook: Called after each module with (module, inputs, output), or before it with (module, inputs, named inputs).
            Anything but None that it returns replaces the output, or the inputs.
        before: Whether the hook is called before the module.
    """
    thread = threading.get_ident()
    modules = list(dict.fromkeys(modules))

    def call_in_thread(*values: Any) -> Any:
        return hook(*values) if threading.get_ident() == thread else None

    with lock_model(modules), contextlib.ExitStack() as stack:
        for module in modules:
            if before:
                handle = module.register_forward_pre_hook(call_in_thread, with_kwargs=True)
            else:
                handle = module.register_forward_hook(call_in_thread)
            stack.callback(handle.remove)
        yield


@contextlib.contextmanager
def watch_norms(blocks: Mapping[LayerKey, nn.Module]) -> Iterator[Callable[[Kind, int], Tensor | None]]:
    """Measure the L2 norm of each hidden state that a block reads, in runs within the context.

    Args:
        blocks: The blocks, by layer key, (kind, layer).

    Yields:
        A function of kind and layer that returns the norms of what the block of that layer read last, (batch, token),
        float32 or float64; None if it read no hidden states.
    """
    latest: dict[nn.Module | None, Tensor] = {}

    def measure(block: nn.Module, inputs: Inputs, named: NamedInputs) -> None:
        latest.pop(block, None)
        hidden = first_tensor(inputs, named)
        if hidden is not None and hidden.ndim == 3:
            # (batch, token, d_model) -> (batch, token); squares overflow in half precision.
            precision = torch.promote_types(hidden.dtype, torch.float32)
            latest[block] = torch.linalg.vector_norm(hidden.detach(), dim=-1, dtype=precision)

    with hooks(blocks.values(), measure, before=True):
        yield lambda kind, layer: latest.get(blocks.get((kind, layer)))
    latest.clear()


@dataclass(frozen=True, eq=False)
class ProjectedAttention:
    """One attention on one text, with its output projection. What could not be found of it is None."""

    # The call that reached the seam; rotary positions have been applied to queries and keys
    call: AttentionCall
    # The output of the attention, (1, n_heads, query, d_value)
    output: Tensor
    # The output projection's weight, (d_model, n_heads * d_value)
    w_o: Tensor | None = None
    # The output projection's bias, (d_model,); None where it has none
    b_o: Tensor | None = None
    # The output of the output projection, (query, d_model)
    attended: Tensor | None = None
    # What could not be found, one sentence each
    notes: tuple[str, ...] = ()


def surroundings(model: Model, batch: Batch, layer_key: LayerKey) -> ProjectedAttention:
    """Run a model once on one text, and return the attention at a layer key, (kind, layer), and its output projection.

    Raises:
        AttnscopeError: The model's attention does not pass the seam, or it has no such layer.
    """
    require_seam(model.info, "its queries and keys")
    watch = OutputWatch()
    roots = model.modules()
    with torch.no_grad(), hooks(linear_maps(roots), watch.look):
        model.run(batch, watch)
    if layer_key not in watch.calls:
        kind, layer = layer_key
        raise AttnscopeError(f"{model.info.name} has no {kind} attention in layer {layer}")
    call = watch.calls[layer_key]
    output = watch.outputs[layer_key]
    # Find the weight of the output projection.
    module = watch.modules.get(layer_key)
    if module is None:
        note = "no linear map is fed just what the heads put out, so that W_O cannot be shown"
        return ProjectedAttention(call, output, notes=(note,))
    weight = weight_of(module)
    if weight is None or module in adapted_maps(roots):
        note = "W_O cannot be shown: it is quantised, or an adapter adds to it"
        return ProjectedAttention(call, output, notes=(note,))
    bias = getattr(module, "bias", None)
    # (1, query, d_model), or (query, d_model) in OPT, -> (query, d_model)
    attended = watch.results[layer_key].reshape(-1, len(weight))
    return ProjectedAttention(call, output, weight, bias, attended)
