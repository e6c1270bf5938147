"""Run a batch, and run it again from one block on: the blocks before it return the outputs that they returned before.

If only a late layer changes, earlier layers need not be computed again. The rest of the network runs unchanged, so all
that must be known is which modules its blocks are.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import AttentionCall, Kind, Probe, attend, finite_texts
from attnscope.models.turns import take_turn

if TYPE_CHECKING:
    from attnscope.models.model import Batch, Outputs


Forward = Callable[..., Any]
"""The forward of a module, or a function in its place."""

LOGITS_AT_ONCE = 2**25
"""The most logits (tokens times vocabulary) in one pass that runs several changes of a batch: 128 MiB as float32."""


class Rerun:
    """A batch that was run once, and can be run again from any block on, for what every block returned is kept.

    The batch must be small, for the outputs of all blocks are in memory. Without blocks everything is computed again.

    Args:
        forward: Runs a batch with a probe. It also gets the number of the block that each attention lies in (empty in
            the first run), and the number of the first block to compute.
        batch: The batch.
        blocks: The blocks of the network, in order.

    Attributes:
        whole: The outputs of the first run, in which nothing is changed.
        calls: The calls that reached the seam in the first run, by place.
        are_numbers: For each kind and layer, whether the queries and keys of each text are finite, (batch,).
        start: The first token that later runs compute; changes must not reach the tokens before it. Only decoders can
            do this, whose blocks compute a token from itself and earlier ones. Who sets it must compare an unchanged
            run with `whole`.
    """

    def __init__(
        self,
        forward: "Callable[[Batch, Probe, Mapping[Place, int], int], Outputs]",
        batch: "Batch",
        blocks: Sequence[nn.Module],
    ) -> None:
        self._forward = forward
        self._batch = batch
        self._tape = Tape(blocks)
        self._block_of: dict[Place, int] = {}
        self.are_numbers: dict[Kind, dict[int, Tensor]] = {}
        self.start = 0
        self.calls: dict[Place, AttentionCall] = {}

        def observe(call: AttentionCall) -> Tensor:
            place = (call.kind, call.layer)
            if self._tape.current is not None:
                self._block_of[place] = self._tape.current
            self.are_numbers.setdefault(call.kind, {})[call.layer] = finite_texts(call)
            # A network may write into its queries, keys and values later.
            copies: Any = {name: getattr(call, name).clone() for name in ("query", "key", "value")}
            self.calls[place] = replace(call, **copies)
            return attend(call)

        with self._tape.record(*batch.ids.shape):
            self.whole = forward(batch, observe, {}, 0)

    def block(self, places: Iterable[Place]) -> int:
        """Return the number of the first block that must be computed again if these attentions change."""
        return min((self._block_of.get(place, 0) for place in places), default=0)

    def plan(
        self, changes: Iterable[Iterable[Place]], most_tokens: int
    ) -> Iterator[tuple[int, list[int]]]:
        """Divide changes of the batch into passes, each of which runs several of them side by side.

        Args:
            changes: For each change, the places of the attentions that it changes.
            most_tokens: The most tokens of a pass, padding and repetitions included.

        Yields:
            The first block that a pass must compute, and the numbers of its changes.
        """
        # Changes with the same first block go together.
        changes_by_block: dict[int, list[int]] = {}
        for number, places in enumerate(changes):
            changes_by_block.setdefault(self.block(places), []).append(number)
        # The tokens and the logits of a pass both limit how many changes it runs.
        most = most_tokens // self._batch.ids[:, self.start :].numel()
        if self.whole.logits is not None:
            most = min(most, LOGITS_AT_ONCE // self.whole.logits.numel())
        most = max(1, most)
        for block, numbers in changes_by_block.items():
            for first in range(0, len(numbers), most):
                yield block, numbers[first : first + most]

    def again(self, probe: Probe, first: int = 0, times: int = 1) -> "Outputs":
        """Run the batch again from block `first` on; earlier blocks return what they returned, without the probe.

        The batch is repeated `times` times: all texts, then all of them again, and so on.
        """
        if self.start:
            probe = self._with_earlier_tokens(probe, times)
        with self._tape.play(first, times, self.start):
            return self._forward(self._batch.repeat(times), probe, self._block_of, first)

    def _with_earlier_tokens(self, probe: Probe, times: int) -> Probe:
        """Return a probe for runs of the tokens from `start` on, which hands calls with all tokens to `probe`."""

        def repeat(tensor: Tensor | None) -> Tensor | None:
            """Repeat a mask or a bias, (text or 1, head or 1, query, key), as the texts are repeated."""
            if tensor is None or len(tensor) == 1:
                return tensor
            return tensor.repeat(times, 1, 1, 1)

        def complete(call: AttentionCall) -> Tensor:
            recorded = self.calls[call.kind, call.layer]
            # Attention outside of blocks is always computed for all tokens.
            if call.query.shape[2] == recorded.query.shape[2]:
                return probe(call)
            whole: dict[str, Any] = {"mask": repeat(recorded.mask), "bias": repeat(recorded.bias)}
            for name in ("query", "key", "value"):
                earlier = getattr(recorded, name)[:, :, : self.start]  # (text, head, token, width)
                whole[name] = torch.cat([earlier.repeat(times, 1, 1, 1), getattr(call, name)], 2)
            return probe(replace(recorded, **whole))[:, :, self.start :]

        return complete


class Tape:
    """The recorded outputs of blocks in one forward pass, in the order of their calls.

    While a thread records or plays, it has its turn with the model (see models.turns), and the blocks' own forwards are
    replaced. Calls of the blocks from other threads run unchanged.

    Args:
        blocks: Modules that are not inside of each other; one may be called several times in a pass.

    Attributes:
        current: The number of the call of a block that is being recorded; None between blocks.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self._blocks = tuple(dict.fromkeys(blocks))
        self._outputs: list[Any] = []
        self.current: int | None = None
        self._batch = 0
        self._n_tokens = 0

    @contextlib.contextmanager
    def record(self, batch: int, n_tokens: int = 0) -> Iterator[None]:
        """Keep what the blocks return in a pass over `batch` texts of `n_tokens` within the context."""
        self._outputs.clear()
        self._batch = batch
        self._n_tokens = n_tokens

        def keep(block: nn.Module, forward: Forward, *args: Any, **named: Any) -> Any:
            self.current = len(self._outputs)
            output = forward(*args, **named)
            self.current = None
            # Some networks write into the outputs of their blocks later.
            self._outputs.append(tree_map_only(Tensor, Tensor.clone, output))
            return output

        with run_instead(self._blocks, keep):
            yield

    @contextlib.contextmanager
    def play(self, first: int, times: int = 1, start: int = 0) -> Iterator[None]:
        """Run passes within the context in which blocks before number `first` return their recorded outputs.

        Args:
            first: The number of the first block that is computed, by the order of calls.
            times: How often recorded outputs are repeated along the batch.
            start: The first token that is computed; earlier tokens of all outputs stay as they were recorded.
        """
        number = 0

        def repeat(tensor: Tensor) -> Tensor:
            if tensor.ndim and tensor.shape[0] == self._batch and times > 1:
                return tensor.repeat(times, *(1 for _ in tensor.shape[1:]))
            return tensor.clone()

        def answer(block: nn.Module, forward: Forward, *args: Any, **named: Any) -> Any:
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
            """Return the later tokens of hidden states, (batch, token, …), or of a mask, (batch, head, query, key)."""
            axes = (2, 3) if tensor.ndim == 4 else (1,)
            for axis in axes:
                if tensor.ndim > axis and tensor.shape[axis] == self._n_tokens:
                    tensor = tensor.narrow(axis, start, self._n_tokens - start)
            return tensor

        def put(later: Any, recorded: Any) -> Any:
            """Return a recorded output, which is a copy, with the later tokens as they were computed."""
            if isinstance(later, Tensor):
                recorded[:, start:] = later  # (text, token, …)
            return recorded

        with run_instead(self._blocks, answer):
            yield


@contextlib.contextmanager
def run_instead(modules: Sequence[nn.Module], function: Forward) -> Iterator[None]:
    """Call a function in place of modules, wherever this thread runs them within the context.

    Meanwhile this thread has its turn with the model.

    Args:
        modules: The modules.
        function: Called with (module, its own forward, inputs …); returns the output.
    """
    thread = threading.get_ident()

    def replace_forward(module: nn.Module) -> None:
        forward = module.forward

        def call(*args: Any, **named: Any) -> Any:
            if threading.get_ident() != thread:
                return forward(*args, **named)
            return function(module, forward, *args, **named)

        module.forward = call

    with take_turn(modules):
        # Only forwards that are set on the module itself are put back; the others come from its class.
        own_forwards = [vars(module).get("forward") for module in modules]
        try:
            for module in modules:
                replace_forward(module)
            yield
        finally:
            for module, forward in zip(modules, own_forwards, strict=True):
                vars(module).pop("forward", None)
                if forward is not None:
                    module.forward = forward


def blocks_of(network: nn.Module, parts: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the blocks of a network that hold some parts of it, in order; parts outside of blocks are left out.

    Blocks are the members of the outermost ModuleLists; lists inside of a block do not count.
    """
    wanted = set(parts)
    blocks: list[nn.Module] = []

    def search(module: nn.Module, block: nn.Module | None) -> None:
        if module in wanted and block is not None:
            blocks.append(block)
        for child in module.children():
            is_block = block is None and isinstance(module, nn.ModuleList)
            search(child, child if is_block else block)

    search(network, None)
    return list(dict.fromkeys(blocks))
