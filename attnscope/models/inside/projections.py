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

Role = Literal["query", "key", "value"]
ROLES: tuple[Role, ...] = ("query", "key", "value")
"""The outputs of the projections of a head's input; fields of an `AttentionCall`."""


class OutputWatch:
    """A probe that finds output projections: of each attention the first linear map that is fed what it gave out.

    Attributes:
        calls: What reached the seam.
        outputs: What the attentions gave out, (batch, head, query, d_value).
        modules: The output projections.
        results: What those gave.
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
        """Look from now on for the map that is fed an attention's output, (batch, head, query, d_value)."""
        self._expected = place, output.transpose(1, 2)

    def look(self, module: nn.Module, inputs: tuple[Any, ...], result: Any) -> None:
        """Compare a linear map's input with the expected output; the hook after each linear map."""
        if self._expected is None or not inputs or not isinstance(inputs[0], Tensor):
            return
        # The map that reads the heads' outputs side by side, (batch, query, head, d_value), and nothing else.
        place, output = self._expected
        if inputs[0].numel() == output.numel() and torch.equal(inputs[0].reshape(output.shape), output):
            self.modules[place] = module
            self.results[place] = result
            self._expected = None


def modules_of(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """Return all modules of models, each once."""
    return list(dict.fromkeys(module for root in roots for module in root.modules()))


def is_leaf(module: nn.Module) -> bool:
    """Return whether a module holds no others."""
    return next(module.children(), None) is None


def hidden_input(inputs: tuple[Any, ...], named: dict[str, Any]) -> Tensor | None:
    """Return the hidden states that a block is given, by position or by name; None if it is given none."""
    hidden = inputs[0] if inputs else named.get("hidden_states")
    return hidden if isinstance(hidden, Tensor) else None


def linear_maps(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """Return all linear maps in models."""
    modules = modules_of(roots)
    return [module for module in modules if isinstance(module, nn.Linear) or is_transposed(module)]


def is_transposed(module: nn.Module) -> bool:
    """Return whether it is transformers' linear map with a transposed weight (GPT-2), told by its name."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nx")


def adapted_maps(roots: Iterable[nn.Module]) -> set[nn.Module]:
    """Return the linear maps of models that an adapter adds to: their weights are not all of what they do."""
    layers = (getattr(module, "base_layer", None) for module in modules_of(roots))
    return {module for module in layers if isinstance(module, nn.Module)}


def weight_of(module: nn.Module) -> Tensor | None:
    """Return a linear map's weight, (out, in), also where accelerate keeps it elsewhere between forward passes.

    None if the weight alone is not the map: it is quantised, or missing.
    """
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.is_meta:
        # accelerate leaves an empty tensor on the meta device, and keeps the weight in its hook.
        hook = getattr(module, "_hf_hook", None)
        elsewhere = [getattr(each, "weights_map", None) for each in (hook, *getattr(hook, "hooks", ()))]
        weight = next(
            (tensors["weight"] for tensors in elsewhere if tensors and "weight" in tensors), None
        )
    # Quantised weights are integers, 8-bit floats that a scale belongs to, or tensors made of others (torchao).
    if weight is None or hasattr(type(weight), "__tensor_flatten__"):
        return None
    if not weight.is_floating_point() or weight.element_size() < 2 or weight.ndim != 2:
        return None
    rows: Tensor = weight.T if is_transposed(module) else weight
    return rows


@contextlib.contextmanager
def hooks(
    modules: Iterable[nn.Module], look: Callable[..., Any], *, before: bool = False
) -> Iterator[None]:
    """Within it, a function is called after each of the modules that this thread runs, or before it.

    It gets the module, its inputs and its result; before the module, its inputs by place and by name. What it returns
    stands for the result or the inputs, as torch's hooks have it.

    Meanwhile this thread has its turn with the model. Modules that other threads run on their own are ignored.
    """
    mine = threading.get_ident()
    watched = list(modules)

    def look_at_mine(*values: Any) -> Any:
        return look(*values) if threading.get_ident() == mine else None

    with take_turn(watched), contextlib.ExitStack() as stack:
        for module in watched:
            if before:
                handle = module.register_forward_pre_hook(look_at_mine, with_kwargs=True)
            else:
                handle = module.register_forward_hook(look_at_mine)
            stack.callback(handle.remove)
        yield


@contextlib.contextmanager
def watch_norms(blocks: Mapping[Place, nn.Module]) -> Iterator[Callable[[Kind, int], Tensor | None]]:
    """Within it, keep the norms of the hidden states that blocks are given.

    Yields:
        A function that returns |h| of each token as a layer of a kind reads it, (batch, token), float32 or float64;
        None if that was not seen.
    """
    latest: dict[nn.Module | None, Tensor] = {}

    def note(block: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        latest.pop(block, None)
        hidden = hidden_input(inputs, named)
        if hidden is not None and hidden.ndim == 3:
            # (batch, token, d_model) -> (batch, token); squares overflow in half precision.
            precise = torch.promote_types(hidden.dtype, torch.float32)
            latest[block] = torch.linalg.vector_norm(hidden.detach(), dim=-1, dtype=precise)

    try:
        with hooks(dict.fromkeys(blocks.values()), note, before=True):
            yield lambda kind, layer: latest.get(blocks.get((kind, layer)))
    finally:
        latest.clear()


@dataclass(frozen=True, eq=False)
class Surroundings:
    """One attention of one layer on one text, with its output projection; None where that is not seen.

    Attributes:
        call: What reached the seam; queries and keys as they meet, turned already where positions are rotary.
        output: What the kernel made of it, (1, n_heads, query, d_value).
        w_o: The output projection's weight, (d_model, n_heads * d_value).
        b_o: Its bias, (d_model,), if it has one.
        attended: What the model's output projection gave, (query, d_model).
        notes: What could not be seen, one sentence each.
    """

    call: AttentionCall
    output: Tensor
    w_o: Tensor | None = None
    b_o: Tensor | None = None
    attended: Tensor | None = None
    notes: tuple[str, ...] = ()


def surroundings(model: Model, batch: Batch, place: Place) -> Surroundings:
    """Run a model once on one text, and return one of its attentions with its output projection.

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
    # The output projection, where it is a plain linear map.
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
    # (1, query, d_model), or of OPT (query, d_model)
    attended = watch.results[place].reshape(-1, len(weight))
    return Surroundings(call, output, weight, bias, attended)
