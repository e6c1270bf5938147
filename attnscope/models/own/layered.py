"""Models that are a stack of the project's own layers and no more."""

import copy
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Self, cast

from attnscope.models.info import ModelInfo, require_length, require_numbers
from attnscope.models.model import Batch, Model, Tokenizer
from attnscope.models.turns import share_lock, take_turn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from attnscope.core.attention.probes import Place
    from attnscope.core.attention.seam import Kind


class LayeredModel(Model):
    """A model that is a stack of our own layers and no more; subclasses add their forward pass.

    Args:
        info: The facts of the model.
        tokenizer: Its tokenizer.
        roots: The modules that hold all others.
        layers: The layers, in order.
        vocab_size: How many tokens it has an embedding for.
    """

    resumes = True
    # The standard deviation of untrained weights: BERT's
    sigma = 0.02

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: Tokenizer,
        roots: "Sequence[nn.Module]",
        layers: "Sequence[nn.Module]",
        vocab_size: int,
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self._roots = roots
        self._layers = layers
        self._vocab_size = vocab_size
        share_lock(roots)

    def _require(self, batch: Batch) -> Batch:
        """Return a batch on the model's device; refuse one that is too long, or has numbers without an embedding."""
        require_length(self.info, batch.ids.shape[1])
        require_numbers(self.info, batch.ids, self._vocab_size)
        return batch.to(self.info.device)

    @contextmanager
    def _forward_pass(self) -> "Iterator[None]":
        """Take this thread's turn with the model until the context ends, and keep autocast out of it."""
        from attnscope.core.attention.precision import without_autocast

        with take_turn(self._roots), without_autocast(self.info.device):
            yield

    def modules(self) -> "list[nn.Module]":
        """Return the torch modules that hold all others."""
        return list(self._roots)

    def blocks(self) -> "dict[Place, nn.Module]":
        """Return the layers, by (kind, layer)."""
        kind = cast("Kind", self.info.kinds[0])
        return {(kind, number): layer for number, layer in enumerate(self._layers)}

    def untrained(self, seed: int) -> Self:
        """Return the same architecture with random weights: normal numbers in matrices, gains of 1, biases of 0."""
        import torch

        twin = copy.deepcopy(self)
        share_lock(twin._roots)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for root in twin._roots:
                for name, weight in root.named_parameters():
                    if weight.ndim > 1:
                        weight.copy_(torch.randn(weight.shape, generator=generator) * self.sigma)
                    else:
                        weight.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
        notes = (f"random weights, seed {seed}",)
        twin.info = replace(
            self.info, name=f"{self.info.name} untrained", sha256="", notes=notes, heads=()
        )
        return twin
