"""Run a batch once, and run it again from a later block on: the blocks before it return their recorded outputs.

If only a late layer changes, earlier layers need not be computed again. The forward of the network is not changed, so
all that must be known is which modules its blocks are.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from attnscope.core.attention.probes import LayerKey
from attnscope.core.attention.seam import AttentionCall, Kind, Probe, attend, find_finite_texts
from attnscope.models.locks import lock_model

if TYPE_CHECKING:
    from attnscope.models.model import Batch, Outputs


Forward = Callable[..., Any]
"""The forward of a module, or a function that is called in its place."""

LOGITS_AT_ONCE = 2**25
"""The most logits (tokens times vocabulary) in a pass that runs several copies of a batch: 128 MiB as float32."""


class ResumableRun:
    """A batch that was run once, and can be run again from any block on.

    The outputs of all blocks stay in memory, so the batch must be small. Without blocks everything is computed again.

    Args:
        forward: Runs a batch: (batch, probe, layer key -> number of the block that holds the attention, number of the
            first block to compute) -> outputs. The third is empty in the first run.
        batch: The batch.
        blocks: The blocks of the network, in order, each once.

    Attributes:
        whole: The outputs of the first run, in which nothing is changed.
        calls: The calls that reached the seam in the first run, by layer key, (kind, layer).
        are_finite: Kind -> layer -> whether the queries and keys of each text are finite, (batch,).
        start: The first token that later runs compute. Changes must not reach the tokens before it, so it is 0 unless
            the model is a decoder. Whoever sets it must check that a run without changes gives `whole`.
    """

    def __init__(
        self,
        forward: "Callable[[Batch, Probe, Mapping[LayerKey, int], int], Outputs]",
        batch: "Batch",
        blocks: Sequence[nn.Module],
    ) -> None:
        self._forward = forward
        self._batch = batch
        self._tape = BlockOutputs(blocks, *batch.ids.shape)
        self._block_of: dict[LayerKey, int] = {}
        self.are_finite: dict[Kind, dict[int, Tensor]] = {}
        self.start = 0
        self.calls: dict[LayerKey, AttentionCall] = {}

        def observe(call: AttentionCall) -> Tensor:
            layer_key = (call.kind, call.layer)
            if self._tape.current is not None:
                self._block_of[layer_key] = self._tape.current
            self.are_finite.setdefault(call.kind, {})[call.layer] = find_finite_texts(call)
            # A network may write into its queries, keys and values later.
            copies: Any = {name: getattr(call, name).clone() for name in ("query", "key", "value")}
            self.calls[layer_key] = replace(call, **copies)
            return attend(call)

        with self._tape.record():
            self.whole = forward(batch, observe, {}, 0)

    def block(self, layer_keys: Iterable[LayerKey]) -> int:
        """Return the number of the first block that must be computed again if these attentions change."""
        return min((self._block_of.get(layer_key, 0) for layer_key in layer_keys), default=0)

    def plan(
        self, changes: Iterable[Iterable[LayerKey]], max_pass_tokens: int
    ) -> Iterator[tuple[int, list[int]]]:
        """Divide changes of the batch into passes. A pass runs one copy of the batch for each of its changes.

        Args:
            changes: For each change, the layer keys of the attentions that it changes.
            max_pass_tokens: The most tokens of a pass, those of all copies and padding included.

        Yields:
            The number of the first block that a pass must compute, and the indices of its changes.
        """
        # Changes with the same first block go together.
        changes_by_block: dict[int, list[int]] = {}
        for change, layer_keys in enumerate(changes):
            changes_by_block.setdefault(self.block(layer_keys), []).append(change)
        # The tokens and the logits of a pass both limit how many changes it runs.
        n_per_pass = max_pass_tokens // self._batch.ids[:, self.start :].numel()
        if self.whole.logits is not None:
            n_per_pass = min(n_per_pass, LOGITS_AT_ONCE // self.whole.logits.numel())
        n_per_pass = max(1, n_per_pass)
        for block, indices in changes_by_block.items():
            for first in range(0, len(indices), n_per_pass):
                yield block, indices[first : first + n_per_pass]

    def again(self, probe: Probe, first: int = 0, times: int = 1) -> "Outputs":
        """Run copies of the batch again, one after the other along its first axis, and return their outputs.

        Args:
            probe: What computes the attention of the blocks that are run.
            first: The number of the first block to run; those before return what they returned in the first run.
            times: The number of copies.
        """
        if self.start:
            probe = self._with_earlier_tokens(probe, times)
        with self._tape.play(first, times, self.start):
            return self._forward(self._batch.repeat(times), probe, self._block_of, first)

    def _with_earlier_tokens(self, probe: Probe, times: int) -> Probe:
        """Return a probe that gets the tokens from `start` on, and hands `probe` the earlier ones too, as recorded."""

        def repeat(tensor: Tensor | None) -> Tensor | None:
            """Repeat a mask or a bias, (text or 1, head or 1, query, key), for the copies of the batch."""
            if tensor is None or len(tensor) == 1:
                return tensor
            return tensor.repeat(times, 1, 1, 1)

        def complete(call: AttentionCall) -> Tensor:
            recorded = self.calls[call.kind, call.layer]
            # An attention that lies in no block always gets all tokens.
            if call.query.shape[2] == recorded.query.shape[2]:
                return probe(call)
            whole: dict[str, Any] = {"mask": repeat(recorded.mask), "bias": repeat(recorded.bias)}
            for name in ("query", "key", "value"):
                earlier = getattr(recorded, name)[:, :, : self.start]  # (text, head, token, width)
                whole[name] = torch.cat([earlier.repeat(times, 1, 1, 1), getattr(call, name)], 2)
            return probe(replace(recorded, **whole))[:, :, self.start :]

        return complete


class BlockOutputs:
    """The recorded outputs of blocks in one forward pass, in the order of their calls.

    While a thread records or plays, it has its turn with the model (see `lock_model`), and the blocks' own forwards are
    replaced. Calls of the blocks from other threads run unchanged.

    Args:
        blocks: Modules that are not inside of each other; one may be called several times in a pass.
        n_texts: The number of texts of the recorded pass.
        n_tokens: The number of their tokens, padding included.

    Attributes:
        current: The number of the block that runs while the tape records, by the order of calls; None between blocks.
    """

    def __init__(self, blocks: Sequence[nn.Module], n_texts: int, n_tokens: int) -> None:
        self._blocks = blocks
        self._n_texts = n_texts
        self._n_tokens = n_tokens
        self._outputs: list[Any] = []
        self.current: int | None = None

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Keep what the blocks return in a pass within the context."""

        def run_and_keep(block: nn.Module, forward: Forward, *args: Any, **named: Any) -> Any:
            self.current = len(self._outputs)
            output = forward(*args, **named)
            self.current = None
            # Some networks write into the outputs of their blocks later.
            self._outputs.append(tree_map_only(Tensor, Tensor.clone, output))
            return output

        with run_instead(self._blocks, run_and_keep):
            yield

    @contextlib.contextmanager
    def play(self, first: int, times: int, start: int) -> Iterator[None]:
        """Let blocks before number `first` return their recorded outputs in a pass within the context.

        Args:
            first: The number of the first block that is computed, by the order of calls.
            times: How many copies of the recorded batch the pass runs.
            start: The first token that is computed; earlier tokens of all outputs stay as they were recorded.
        """
        n_called = 0

        def repeat(tensor: Tensor) -> Tensor:
            """Return a recorded tensor once for each copy of the batch; one without a batch axis is copied as it is."""
            if tensor.ndim and len(tensor) == self._n_texts:
                return torch.cat([tensor] * times)
            return tensor.clone()

        def later_tokens(tensor: Tensor) -> Tensor:
            """Return the later tokens of hidden states, (batch, token, …), or of a mask, (batch, head, query, key)."""
            axes = (2, 3) if tensor.ndim == 4 else (1,)
            for axis in axes:
                if tensor.ndim > axis and tensor.shape[axis] == self._n_tokens:
                    tensor = tensor.narrow(axis, start, self._n_tokens - start)
            return tensor

        def after_earlier_tokens(later: Any, recorded: Any) -> Any:
            """Return a recorded output, which is a copy, with the later tokens as they were computed."""
            if isinstance(later, Tensor):
                recorded[:, start:] = later  # (text, token, …)
            return recorded

        def replay(block: nn.Module, forward: Forward, *args: Any, **named: Any) -> Any:
            nonlocal n_called
            # Blocks are called in the order in which their outputs were recorded.
            n_called += 1
            if n_called > first and not start:
                return forward(*args, **named)
            recorded = tree_map_only(Tensor, repeat, self._outputs[n_called - 1])
            if n_called <= first:
                return recorded
            # The block computes the later tokens alone; those before them stay as recorded.
            args, named = tree_map_only(Tensor, later_tokens, (args, named))
            return tree_map(after_earlier_tokens, forward(*args, **named), recorded)

        with run_instead(self._blocks, replay):
            yield


@contextlib.contextmanager
def run_instead(modules: Sequence[nn.Module], function: Forward) -> Iterator[None]:
    """Call a function in place of the forwards of modules, where this thread runs them within the context.

    Meanwhile this thread has its turn with the model.

    Args:
        modules: The modules, each once.
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

    with lock_model(modules):
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
    """Return the blocks of a network that hold one of `parts`, in order. Parts that lie in no block are left out.

    Blocks are the members of the outermost ModuleLists; a ModuleList inside of a block does not count.
    """
    wanted = set(parts)
    blocks: list[nn.Module] = []

    def search(module: nn.Module, block: nn.Module | None) -> None:
        """Look for parts in a module that lies in a block, or in none."""
        if module in wanted and block is not None:
            blocks.append(block)
        for child in module.children():
            is_block = block is None and isinstance(module, nn.ModuleList)
            search(child, child if is_block else block)

    search(network, None)
    return list(dict.fromkeys(blocks))
