"""What is seen as a model runs: which linear map is an attention's output projection, how long hidden states are."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import AttentionCall, Kind, Probe, attend
from attnscope.models.turns import take_turn

Role = Literal["query", "key", "value"]
ROLES: tuple[Role, ...] = ("query", "key", "value")
"""What projections of a head's input give; fields of an `AttentionCall`."""


class OutputWatch:
    """Finds output projections: of each attention the first linear map that is fed what it gave out, as it is."""

    def __init__(self) -> None:
        self.found: dict[Place, nn.Module] = {}
        self.results: dict[Place, Tensor] = {}
        self._last: tuple[Place, Tensor] | None = None

    def expect(self, place: Place, output: Tensor) -> None:
        """Looks from now on for the map that is fed an attention's output, (batch, head, query, d_value)."""
        self._last = place, output.transpose(1, 2)

    def give_up(self) -> None:
        """Looks for none any more."""
        self._last = None

    def look(self, module: nn.Module, given: tuple[Any, ...], result: Any) -> None:
        """The hook after each linear map."""
        if self._last is None or not given or not isinstance(given[0], Tensor):
            return
        place, output = self._last
        if given[0].numel() == output.numel() and torch.equal(given[0].reshape(output.shape), output):
            self.found[place], self.results[place] = module, result
            self._last = None


def linear_maps(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """All linear maps in models."""
    return [m for root in roots for m in root.modules() if isinstance(m, nn.Linear) or is_transposed(m)]


def is_transposed(module: nn.Module) -> bool:
    """Whether it is transformers' linear map with a transposed weight (GPT-2), whose class is not imported for it."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nx")


def adapted_maps(roots: Iterable[nn.Module]) -> set[nn.Module]:
    """The linear maps of models that an adapter adds to: their weights are not all of what they do."""
    held = (getattr(module, "base_layer", None) for root in roots for module in root.modules())
    return {module for module in held if isinstance(module, nn.Module)}


def weight_of(module: nn.Module) -> Tensor | None:
    """A linear map's weight, (out, in), also where accelerate keeps it elsewhere between forward passes.

    Returns:
        None if the weight alone is not the map: it is quantised, or missing.
    """
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.is_meta:
        hook = getattr(module, "_hf_hook", None)
        elsewhere = (getattr(one, "weights_map", None) or {} for one in (hook, *getattr(hook, "hooks", ())))
        weight = next((kept["weight"] for kept in elsewhere if "weight" in kept), None)
    # Quantised weights are integers, 8-bit floats that a scale belongs to, or tensors made of others (torchao).
    if weight is None or hasattr(type(weight), "__tensor_flatten__"):
        return None
    if not weight.is_floating_point() or weight.element_size() < 2:
        return None
    if weight.ndim != 2:
        return None
    turned: Tensor = weight.T if is_transposed(module) else weight
    return turned


def find_output_projections(
    root: nn.Module, run: Callable[[Probe], object], n_heads: Mapping[Kind, int]
) -> dict[Place, Tensor]:
    """W_O of each attention, found by running a model.

    Args:
        root: The model.
        run: Runs it with a probe.
        n_heads: Kind -> the most query heads of a layer.

    Returns:
        Place -> (d_model, n_heads * d_value), as torch.nn.Linear stores it, whatever stores it here. Places are left
        out where what the heads put out is changed before it is projected, where weights are quantised, or not there,
        or not all of the map (an adapter beside them), and where a layer has fewer heads than others of its kind.
    """
    outputs = OutputWatch()

    def observe(call: AttentionCall) -> Tensor:
        output = attend(call)
        if call.n_heads == n_heads.get(call.kind):
            outputs.expect((call.kind, call.layer), output)
        return output

    with torch.no_grad(), hooks(linear_maps([root]), outputs.look):
        run(observe)
    adapted = adapted_maps([root])
    weights = {place: weight_of(module) for place, module in outputs.found.items() if module not in adapted}
    return {place: weight for place, weight in weights.items() if weight is not None}


@contextlib.contextmanager
def hooks(modules: Iterable[nn.Module], look: Callable[..., Any], *, before: bool = False) -> Iterator[None]:
    """Within it, a function is called after each of the modules that this thread runs, or before it.

    Meanwhile this thread has its turn with the model. Modules that other threads run on their own are ignored.
    """
    mine, watched = threading.get_ident(), list(modules)

    def look_at_mine(*given: Any) -> Any:
        return look(*given) if threading.get_ident() == mine else None

    with take_turn(watched), contextlib.ExitStack() as stack:
        for module in watched:
            handle = (
                module.register_forward_pre_hook(look_at_mine, with_kwargs=True)
                if before
                else module.register_forward_hook(look_at_mine)
            )
            stack.callback(handle.remove)
        yield


class HiddenNorms:
    """Norms of what each layer reads of the residual stream."""

    def __init__(self, blocks: Mapping[Place, nn.Module]) -> None:
        self._blocks = dict(blocks)
        self._latest: dict[nn.Module, Tensor] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        """While it lasts, what the blocks are given is noted."""
        try:
            with hooks(dict.fromkeys(self._blocks.values()), self._note, before=True):
                yield
        finally:
            self._latest.clear()

    def of(self, kind: Kind, layer: int) -> Tensor | None:
        """|h| of each token as the layer reads it, (batch, token), float32 or float64; None where it cannot be seen."""
        block = self._blocks.get((kind, layer))
        return None if block is None else self._latest.get(block)

    def _note(self, block: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden = given[0] if given else named.get("hidden_states")
        if isinstance(hidden, Tensor) and hidden.ndim == 3:
            precise = torch.promote_types(hidden.dtype, torch.float32)
            self._latest[block] = torch.linalg.vector_norm(hidden.detach(), dim=-1, dtype=precise)
        else:
            self._latest.pop(block, None)
