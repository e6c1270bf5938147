"""Record the outputs of a network's blocks in a forward pass, and run the same pass again from one block on.

If only a late layer changes, the blocks before it are not computed again: they return their earlier outputs. The rest
of the network runs unchanged, so all that must be known is which modules its blocks are.

Knows torch and whose turn it is: no models, no probes.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from attnscope.models.turns import take_turn


class Tape:
    """The recorded outputs of blocks in one forward pass, in the order of their calls.

    While a thread records or plays, it has its turn with the model (see models.turns), and the blocks' own forwards are
    replaced. Calls of the blocks from other threads run unchanged.

    Blocks are modules that are not inside of each other. One may be called several times in a pass.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = tuple(dict.fromkeys(blocks))
        self._outputs: list[Any] = []
        self._is_inside = False
        self._batch = 0
        self._n_tokens = 0

    @property
    def current(self) -> int | None:
        """While recording: the number of the block that runs; None between blocks."""
        return len(self._outputs) if self._is_inside else None

    @contextlib.contextmanager
    def record(self, batch: int, n_tokens: int = 0) -> Iterator[None]:
        """Within it, keep what the blocks return in a pass over `batch` texts of `n_tokens`."""
        self._outputs.clear()
        self._batch = batch
        self._n_tokens = n_tokens

        def keep(block: nn.Module, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
            self._is_inside = True
            output = forward(*args, **named)
            self._is_inside = False
            # A copy, for some networks add to what they were given in place.
            self._outputs.append(tree_map_only(Tensor, Tensor.clone, output))
            return output

        with run_instead(self._blocks, keep):
            yield

    @contextlib.contextmanager
    def play(self, first: int, times: int = 1, start: int = 0) -> Iterator[None]:
        """Within it, blocks before number `first` return their recorded outputs, repeated `times` along the batch.

        The other blocks get the tokens from number `start` on alone, and return those before as they were recorded.
        """
        number = 0

        def repeat(tensor: Tensor) -> Tensor:
            if tensor.ndim and tensor.shape[0] == self._batch and times > 1:
                return tensor.repeat(times, *(1 for _ in tensor.shape[1:]))
            return tensor.clone()

        def answer(block: nn.Module, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
            nonlocal number
            # Blocks are counted in the order of their calls, as `record` kept them.
            number += 1
            if number > first and not start:
                return forward(*args, **named)
            recorded = tree_map_only(Tensor, repeat, self._outputs[number - 1])
            if number <= first:
                return recorded
            # The block computes the later tokens alone; those before them stay as recorded.
            args, named = tree_map_only(Tensor, cut, (args, named))
            return tree_map(put, forward(*args, **named), recorded)

        def cut(tensor: Tensor) -> Tensor:
            """Return the later tokens: of masks, (batch, head, query, key), along both axes."""
            axes = (2, 3) if tensor.ndim == 4 else (1,)
            for axis in axes:
                if tensor.ndim > axis and tensor.shape[axis] == self._n_tokens:
                    tensor = tensor.narrow(axis, start, self._n_tokens - start)
            return tensor

        def put(later: Any, recorded: Any) -> Any:
            """Write what was computed of the later tokens over a copy of what was recorded."""
            if isinstance(later, Tensor):
                recorded[:, start:] = later  # (text, token, …)
            return recorded

        with run_instead(self._blocks, answer):
            yield


@contextlib.contextmanager
def run_instead(modules: Sequence[nn.Module], function: Callable[..., Any]) -> Iterator[None]:
    """Within it, function(module, forward, …) is called wherever this thread calls a module; it has its turn."""
    mine = threading.get_ident()

    def wrap(module: nn.Module) -> Callable[..., Any]:
        # Keep the module's own forward: `function` decides whether it runs.
        forward = module.forward

        def call(*args: Any, **named: Any) -> Any:
            if threading.get_ident() != mine:
                return forward(*args, **named)
            return function(module, forward, *args, **named)

        return call

    with take_turn(modules):
        # Only forwards set on the module itself are put back; the others come from its class.
        before = [vars(module).get("forward") for module in modules]
        try:
            for module in modules:
                module.forward = wrap(module)
            yield
        finally:
            for module, forward in zip(modules, before, strict=True):
                vars(module).pop("forward", None)
                if forward is not None:
                    module.forward = forward


def blocks_of(network: nn.Module, parts: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the blocks that hold parts: of each, the outermost module around it that is one of a list of modules.

    A part that is in no list has no block.
    """
    parts_left = set(parts)
    blocks: list[nn.Module] = []

    def search(module: nn.Module, block: nn.Module | None) -> None:
        # The outermost list of modules holds the blocks; lists inside of a block do not count.
        if module in parts_left and block is not None:
            blocks.append(block)
        for child in module.children():
            search(child, block or (child if isinstance(module, nn.ModuleList) else None))

    search(network, None)
    return list(dict.fromkeys(blocks))
