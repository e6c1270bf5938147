"""Find linear maps, output projections and hidden states of a model as it runs, by hooks and not by names."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import AttentionCall, Kind, attend
from attnscope.errors import AttnscopeError
from attnscope.models.info import require_seam
from attnscope.models.model import Batch, Model
from attnscope.models.turns import take_turn

Inputs = tuple[Any, ...]
"""The inputs of a module by position, as torch's hooks get them."""

NamedInputs = dict[str, Any]
"""The inputs of a module by name."""

Role = Literal["query", "key", "value"]
ROLES: tuple[Role, ...] = ("query", "key", "value")
"""The outputs of the projections W_Q, W_K and W_V; fields of an `AttentionCall`."""


class OutputWatch:
    """A probe that finds output projections: for each attention, the first linear map whose input is its output.

    `look` must be the hook after each linear map of the model.

    Attributes:
        calls: The calls that reached the seam, by place, as in the other dictionaries.
        outputs: The outputs of the attentions, (batch, head, query, d_value).
        modules: The output projections that were found.
        results: The outputs of the output projections.
    """

    def __init__(self) -> None:
        self.calls: dict[Place, AttentionCall] = {}
        self.outputs: dict[Place, Tensor] = {}
        self.modules: dict[Place, nn.Module] = {}
        self.results: dict[Place, Tensor] = {}
        self._expected: tuple[Place, Tensor] | None = None

    def __call__(self, call: AttentionCall) -> Tensor:
        """Compute an attention, without gradient, and look for its output projection from now on."""
        with torch.no_grad():
            output = attend(call)
        place = (call.kind, call.layer)
        self.calls[place] = call
        self.outputs[place] = output
        self.expect(place, output)
        return output

    def expect(self, place: Place, output: Tensor) -> None:
        """Look from now on for the map that reads an attention's output, (batch, head, query, d_value)."""
        self._expected = place, output.transpose(1, 2)

    def look(self, module: nn.Module, inputs: Inputs, result: Any) -> None:
        """Note a linear map as the output projection if its input is the expected output; the hook after each map."""
        rows = first_tensor(inputs)
        if self._expected is None or rows is None:
            return
        # An output projection reads the outputs of the heads side by side, (batch, query, head * d_value).
        place, output = self._expected
        if have_equal_numbers(rows, output):
            self.modules[place] = module
            self.results[place] = result
            self._expected = None


def modules_of(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """Return all modules of models, each once."""
    return list(dict.fromkeys(module for root in roots for module in root.modules()))


def is_leaf(module: nn.Module) -> bool:
    """Return whether a module holds no others."""
    return next(module.children(), None) is None


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


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module is the linear map of transformers with a transposed weight (GPT-2), by its name."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nx")


def adapted_maps(roots: Iterable[nn.Module]) -> set[nn.Module]:
    """Return the linear maps of models that an adapter adds to: their weights are not all of what they do."""
    layers = (getattr(module, "base_layer", None) for module in modules_of(roots))
    return {module for module in layers if isinstance(module, nn.Module)}


def weight_of(module: nn.Module) -> Tensor | None:
    """Return a linear map's weight, (out, in), also where accelerate keeps it elsewhere between forward passes.

    None if the weight is quantised or missing.
    """
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.is_meta:
        # accelerate leaves an empty tensor on the meta device, and keeps the weight in a hook, or in one of its hooks.
        weight = None
        hook = getattr(module, "_hf_hook", None)
        for each in (hook, *getattr(hook, "hooks", ())):
            tensors = getattr(each, "weights_map", None)
            if weight is None and tensors and "weight" in tensors:
                weight = tensors["weight"]
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
            What it returns replaces the output or the inputs, unless it is None.
        before: Whether the hook is called before the module.
    """
    thread = threading.get_ident()
    modules = list(dict.fromkeys(modules))

    def call_in_thread(*values: Any) -> Any:
        return hook(*values) if threading.get_ident() == thread else None

    with take_turn(modules), contextlib.ExitStack() as stack:
        for module in modules:
            if before:
                handle = module.register_forward_pre_hook(call_in_thread, with_kwargs=True)
            else:
                handle = module.register_forward_hook(call_in_thread)
            stack.callback(handle.remove)
        yield


@contextlib.contextmanager
def watch_norms(blocks: Mapping[Place, nn.Module]) -> Iterator[Callable[[Kind, int], Tensor | None]]:
    """Keep the lengths of the hidden states that blocks read in each run, until the context ends.

    Args:
        blocks: The blocks, by place.

    Yields:
        A function of kind and layer that returns the length of each token's hidden state as that layer read it last,
        (batch, token), float32 or float64; None if the layer read none.
    """
    latest: dict[nn.Module | None, Tensor] = {}

    def note(block: nn.Module, inputs: Inputs, named: NamedInputs) -> None:
        latest.pop(block, None)
        hidden = first_tensor(inputs, named)
        if hidden is not None and hidden.ndim == 3:
            # (batch, token, d_model) -> (batch, token); squares overflow in half precision.
            precision = torch.promote_types(hidden.dtype, torch.float32)
            latest[block] = torch.linalg.vector_norm(hidden.detach(), dim=-1, dtype=precision)

    try:
        with hooks(blocks.values(), note, before=True):
            yield lambda kind, layer: latest.get(blocks.get((kind, layer)))
    finally:
        latest.clear()


@dataclass(frozen=True, eq=False)
class Surroundings:
    """One attention on one text, with its output projection; None where that could not be found."""

    # The call that reached the seam; rotary positions are in queries and keys already
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


def surroundings(model: Model, batch: Batch, place: Place) -> Surroundings:
    """Run a model once on one text, and return the attention at a place, with its output projection.

    Raises:
        AttnscopeError: The model's attention does not pass the seam, or it has no such layer.
    """
    require_seam(model.info, "its queries and keys")
    watch = OutputWatch()
    roots = model.modules()
    with torch.no_grad(), hooks(linear_maps(roots), watch.look):
        model.run(batch, watch)
    if place not in watch.calls:
        kind, layer = place
        raise AttnscopeError(f"{model.info.name} has no {kind} attention in layer {layer}")
    call = watch.calls[place]
    output = watch.outputs[place]
    # Find the weight of the output projection, if it is a plain linear map.
    module = watch.modules.get(place)
    note = "no linear map is fed just what the heads put out, so that W_O cannot be shown"
    weight = None
    if module is not None:
        note = "W_O cannot be shown: it is quantised, or an adapter adds to it"
        if module not in adapted_maps(roots):
            weight = weight_of(module)
    if weight is None:
        return Surroundings(call, output, notes=(note,))
    bias = getattr(module, "bias", None)
    # (1, query, d_model), in OPT (query, d_model), -> (query, d_model)
    attended = watch.results[place].reshape(-1, len(weight))
    return Surroundings(call, output, weight, bias, attended)
