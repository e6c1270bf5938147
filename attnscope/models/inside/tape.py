"""Cache the outputs of a model's blocks (its transformer layers) in one run, and resume later runs from any block.

A later run changes some attentions, for example by removing a head. If the first change lies in block 7, blocks 0 to 6
would compute the same as before. So these blocks return their cached outputs instead. For that, the `forward` of each
block is replaced while a run lasts; the forward of the network around the blocks runs as ever.

The *seam* is the one function that computes every attention of a model. A *probe* is a hook there: it gets an
`AttentionCall`, and returns the outputs of its heads.
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
"""The forward of a module, or a function that is called instead of it."""

MAX_PASS_LOGITS = 2**25
"""The most logits (tokens times vocabulary) in a forward pass with several copies of a batch: 128 MiB as float32."""


class ResumableRun:
    """A batch that was run once without changes (the clean run), and can be run again from any block on.

    The outputs of all blocks stay in memory, so the batch must be small. A model without known blocks is computed from
    its start each time.

    Args:
        forward: Runs a batch. It gets the batch, the probe, the number of the block that holds each attention (by layer
            key; empty in the clean run), and the number of the first block to compute.
        batch: The batch.
        blocks: The blocks of the network, in order, each once.

    Attributes:
        clean_outputs: The outputs of the clean run.
        calls: The calls that reached the seam in the clean run, by layer key, (kind, layer).
        are_finite: Kind -> layer -> whether the queries and keys of each text are finite, (batch,).
        first_token: The first token that later runs compute. Changes must not reach the tokens before it, so it is 0
            unless the model is a decoder. Code that sets it must check that a later run without changes returns
            `clean_outputs`.
    """

    def __init__(
        self,
        forward: "Callable[[Batch, Probe, Mapping[LayerKey, int], int], Outputs]",
        batch: "Batch",
        blocks: Sequence[nn.Module],
    ) -> None:
        self._forward = forward
        self._batch = batch
        self._cache = BlockOutputs(blocks, *batch.ids.shape)
        self._block_by_layer_key: dict[LayerKey, int] = {}
        self.are_finite: dict[Kind, dict[int, Tensor]] = {}
        self.first_token = 0
        self.calls: dict[LayerKey, AttentionCall] = {}

        def observe(call: AttentionCall) -> Tensor:
            layer_key = (call.kind, call.layer)
            # An attention outside of all blocks gets no entry.
            if self._cache.current_block is not None:
                self._block_by_layer_key[layer_key] = self._cache.current_block
            self.are_finite.setdefault(call.kind, {})[call.layer] = find_finite_texts(call)
            # Copy the tensors: a network may later write into its queries, keys and values.
            copies: Any = {name: getattr(call, name).clone() for name in ("query", "key", "value")}
            self.calls[layer_key] = replace(call, **copies)
            return attend(call)

        with self._cache.record():
            self.clean_outputs = forward(batch, observe, {}, 0)

    def first_block_of(self, layer_keys: Iterable[LayerKey]) -> int:
        """Return the number of the first block that must be computed again if these attentions change."""
        # An attention outside of all blocks may feed any block. So then block 0 is the first.
        return min((self._block_by_layer_key.get(layer_key, 0) for layer_key in layer_keys), default=0)

    def plan_passes(
        self, changes: Iterable[Iterable[LayerKey]], max_pass_tokens: int
    ) -> Iterator[tuple[int, list[int]]]:
        """Divide changes of the batch into forward passes. A pass runs one copy of the batch for each of its changes.

        Args:
            changes: For each change, the layer keys of the attentions that it changes.
            max_pass_tokens: The most tokens of a pass, those of all copies and padding included.

        Yields:
            The number of the first block that a pass must compute, and the indices of its changes.
        """
        # Changes with the same first block share passes.
        changes_by_block: dict[int, list[int]] = {}
        for change_index, layer_keys in enumerate(changes):
            changes_by_block.setdefault(self.first_block_of(layer_keys), []).append(change_index)
        # Both the tokens and the logits limit how many changes fit into a pass. A copy has at most as many logits as
        # the clean run: it may leave out early tokens.
        n_per_pass = max_pass_tokens // self._batch.ids[:, self.first_token :].numel()
        if self.clean_outputs.logits is not None:
            n_per_pass = min(n_per_pass, MAX_PASS_LOGITS // self.clean_outputs.logits.numel())
        n_per_pass = max(1, n_per_pass)
        for first_block, change_indices in changes_by_block.items():
            for offset in range(0, len(change_indices), n_per_pass):
                yield first_block, change_indices[offset : offset + n_per_pass]

    def run_from(self, probe: Probe, first_block: int = 0, n_copies: int = 1) -> "Outputs":
        """Run copies of the batch from a block on, and return their outputs, with the copies one after the other.

        Args:
            probe: Computes the attention of the blocks that run.
            first_block: The number of the first block to run; earlier blocks return their outputs of the clean run.
            n_copies: The number of copies.
        """
        if self.first_token:
            probe = self._prepend_clean_tokens(probe, n_copies)
        with self._cache.play(first_block, n_copies, self.first_token):
            return self._forward(
                self._batch.repeat(n_copies), probe, self._block_by_layer_key, first_block
            )

    def _prepend_clean_tokens(self, probe: Probe, n_copies: int) -> Probe:
        """Return a probe for a model that computes only the tokens from `first_token` on.

        It puts the queries, keys and values that earlier tokens had in the clean run before the new ones, gives the
        whole to `probe`, and returns the outputs of the new tokens.
        """

        def repeat(tensor: Tensor | None) -> Tensor | None:
            """Repeat a mask or a bias, (text or 1, head or 1, query, key), for the copies of the batch."""
            if tensor is None or len(tensor) == 1:
                return tensor
            return tensor.repeat(n_copies, 1, 1, 1)

        def attend_to_all_tokens(call: AttentionCall) -> Tensor:
            clean_call = self.calls[call.kind, call.layer]
            # An attention outside of all blocks gets all tokens already.
            if call.query.shape[2] == clean_call.query.shape[2]:
                return probe(call)
            fields: dict[str, Any] = {"mask": repeat(clean_call.mask), "bias": repeat(clean_call.bias)}
            for name in ("query", "key", "value"):
                earlier = getattr(clean_call, name)[
                    :, :, : self.first_token
                ]  # (text, head, token, width)
                fields[name] = torch.cat([earlier.repeat(n_copies, 1, 1, 1), getattr(call, name)], 2)
            return probe(replace(clean_call, **fields))[:, :, self.first_token :]

        return attend_to_all_tokens


class BlockOutputs:
    """A cache of what blocks returned in one forward pass, in the order of their calls.

    While a thread records or plays back, it holds the model's lock (see `lock_model`), and the blocks' own forwards are
    replaced. Calls of the blocks from other threads run unchanged.

    Args:
        blocks: Modules that are not inside of each other; one may be called several times in a pass.
        n_texts: The number of texts of the recorded pass.
        n_tokens: The number of their tokens, padding included.

    Attributes:
        current_block: The number of the block that runs in the pass that is recorded, by the order of calls; None
            between blocks.
    """

    def __init__(self, blocks: Sequence[nn.Module], n_texts: int, n_tokens: int) -> None:
        self._blocks = blocks
        self._n_texts = n_texts
        self._n_tokens = n_tokens
        self._outputs: list[Any] = []
        self.current_block: int | None = None

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        """Keep what the blocks return in the forward pass that runs within the context."""

        def run_and_keep(block: nn.Module, forward: Forward, *args: Any, **named: Any) -> Any:
            self.current_block = len(self._outputs)
            output = forward(*args, **named)
            self.current_block = None
            # Keep copies: some networks later write into the outputs of their blocks.
            self._outputs.append(tree_map_only(Tensor, Tensor.clone, output))
            return output

        with replace_forwards(self._blocks, run_and_keep):
            yield

    @contextlib.contextmanager
    def play(self, first_block: int, n_copies: int, first_token: int) -> Iterator[None]:
        """Let blocks before number `first_block` return their recorded outputs, in a forward pass within the context.

        Args:
            first_block: The number of the first block that is computed, by the order of calls.
            n_copies: How many copies of the recorded batch the pass runs.
            first_token: The first token that is computed; earlier tokens of all outputs stay as recorded.
        """
        n_called = 0

        def repeat(tensor: Tensor) -> Tensor:
            """Repeat a recorded tensor for the copies of the batch; copy a tensor without a batch axis unchanged."""
            # An axis is recognised by its size. Where that errs, a resumed run differs from a full one: `can_resume` in
            # models.hf.model compares the two, and a model that fails is run without blocks.
            if tensor.ndim and len(tensor) == self._n_texts:
                return torch.cat([tensor] * n_copies)
            return tensor.clone()

        def select_later_tokens(tensor: Tensor) -> Tensor:
            """Return a tensor from `first_token` on: hidden states, (batch, token, …), or (batch, head, query, key)."""
            # A tensor of four axes is a mask.
            axes = (2, 3) if tensor.ndim == 4 else (1,)
            for axis in axes:
                if tensor.ndim > axis and tensor.shape[axis] == self._n_tokens:
                    tensor = tensor.narrow(axis, first_token, self._n_tokens - first_token)
            return tensor

        def insert_later_tokens(later: Any, recorded: Any) -> Any:
            """Write the tokens that were computed into a copy of the recorded output, and return it."""
            if isinstance(later, Tensor):
                recorded[:, first_token:] = later  # (text, token, …)
            return recorded

        def replay(block: nn.Module, forward: Forward, *args: Any, **named: Any) -> Any:
            nonlocal n_called
            # Blocks are called in the order in which their outputs were recorded.
            n_called += 1
            if n_called > first_block and not first_token:
                return forward(*args, **named)
            recorded = tree_map_only(Tensor, repeat, self._outputs[n_called - 1])
            if n_called <= first_block:
                return recorded
            # The block computes only the later tokens. Earlier tokens stay as recorded.
            args, named = tree_map_only(Tensor, select_later_tokens, (args, named))
            return tree_map(insert_later_tokens, forward(*args, **named), recorded)

        with replace_forwards(self._blocks, replay):
            yield


@contextlib.contextmanager
def replace_forwards(modules: Sequence[nn.Module], function: Forward) -> Iterator[None]:
    """Call a function instead of the forwards of modules, where this thread runs them within the context.

    Meanwhile this thread holds the model's lock.

    Args:
        modules: The modules, each once.
        function: Called with (module, its own forward, inputs …); returns the output.
    """
    thread_id = threading.get_ident()

    def replace_forward(module: nn.Module) -> None:
        forward = module.forward

        def call(*args: Any, **named: Any) -> Any:
            if threading.get_ident() != thread_id:
                return forward(*args, **named)
            return function(module, forward, *args, **named)

        module.forward = call

    with lock_model(modules):
        # A forward is usually a method of the class; but accelerate, for example, sets one on the module itself. To
        # restore the first, delete ours from the module. Only the second must be set again.
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


def find_blocks(network: nn.Module, attention_modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the blocks of a network that hold one of the attention modules, in order.

    Blocks are the members of the outermost ModuleLists; a ModuleList inside of a block does not count. Attention
    modules outside of all blocks are left out.
    """
    searched = set(attention_modules)
    blocks: list[nn.Module] = []

    def search(module: nn.Module, block: nn.Module | None) -> None:
        """Search a module for attention modules. `block` is the block that the module is in; None = outside of all."""
        if module in searched and block is not None:
            blocks.append(block)
        for child in module.children():
            is_block = block is None and isinstance(module, nn.ModuleList)
            search(child, child if is_block else block)

    search(network, None)
    return list(dict.fromkeys(blocks))
