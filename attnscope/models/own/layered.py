"""Define the base class of models that attnscope computes itself, from layers of its own.

These are the glass boxes, whose weights are made by hand, and the native engine, which runs BERT-family checkpoints.
"""

import copy
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from attnscope.models.info import ModelInfo, require_known_ids, require_length
from attnscope.models.locks import lock_model, share_lock
from attnscope.models.model import Batch, Model, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn

    from attnscope.core.attention.probes import LayerKey


class LayeredModel(Model):
    """A model that is a stack of layers between embeddings and last hidden states. Subclasses add `run`.

    Args:
        info: The facts of the model.
        tokenizer: Its tokenizer.
        network: The root module, with its layers in `network.layers`. It may be on the meta device.
        state: The weights of the network, by their names in its state_dict.
        vocab_size: The number of tokens that the network has an embedding for.
    """

    # A later run can start at any layer, from the hidden states of an earlier run
    resumes = True
    # The standard deviation of untrained weights, by default BERT's initialisation
    weight_std = 0.02

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: Tokenizer,
        network: "nn.Module",
        state: "Mapping[str, Tensor]",
        vocab_size: int,
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self._network = network
        self._blocks = list(network.get_submodule("layers").children())
        self._vocab_size = vocab_size
        # With `assign`, the network takes over the tensors themselves, with their device and precision.
        network.load_state_dict(state, assign=True)
        network.eval().requires_grad_(False)
        # The lock that threads take before they run the network or hook into it; all of its modules share it.
        share_lock([network])

    def _prepare(self, batch: Batch) -> Batch:
        """Return a batch on the model's device; refuse a batch that is too long, or has ids without an embedding."""
        require_length(self.info, batch.ids.shape[1])
        require_known_ids(self.info, batch.ids, self._vocab_size)
        return batch.to(self.info.device)

    @contextmanager
    def _forward_pass(self) -> "Iterator[None]":
        """Hold the model's lock, and switch autocast off, until the context ends."""
        import torch

        no_autocast = torch.autocast(torch.device(self.info.device).type, enabled=False)
        with lock_model([self._network]), no_autocast:
            yield

    def modules(self) -> "list[nn.Module]":
        """Return the root module, in a list."""
        return [self._network]

    def blocks(self) -> "dict[LayerKey, nn.Module]":
        """Return the layers, by (kind, layer). All have the same kind of attention, "encoder" or "decoder"."""
        kind: Any = self.info.kinds[0]
        return {(kind, index): layer for index, layer in enumerate(self._blocks)}

    def untrained(self, seed: int) -> Self:
        """Return a copy with random weights: matrices N(0, weight_std²), gains of norms 1, biases 0."""
        import torch

        twin = copy.deepcopy(self)
        # The modules of the copy are new, and have no lock yet.
        share_lock([twin._network])
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in twin._network.named_parameters():
                if weight.ndim > 1:
                    weight.copy_(torch.randn(weight.shape, generator=generator) * self.weight_std)
                else:
                    # A vector called "….weight" is the gain of a norm. Other vectors are biases.
                    weight.fill_(1.0 if name.endswith("weight") else 0.0)
        # `heads` says what the heads of a glass box attend to. Heads with random weights do not attend so.
        twin.info = replace(
            self.info,
            name=f"{self.info.name} untrained",
            sha256="",
            notes=(f"random weights, seed {seed}",),
            heads=(),
        )
        return twin
