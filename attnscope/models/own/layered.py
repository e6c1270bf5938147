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

    from torch import Tensor, nn

    from attnscope.core.attention.probes import Place
    from attnscope.core.attention.seam import Kind


class LayeredModel(Model):
    """A model that is a stack of our own layers and no more; subclasses add their forward pass.

    Args:
        roots: The modules that hold all others.
        layers: The layers, in order.
        n_numbers: How many tokens it has an embedding for.
    """

    resumes = True
    sigma = 0.02  # standard deviation of untrained weights, as BERT draws them

    def __init__(
        self,
        info: ModelInfo,
        tokenizer: Tokenizer,
        roots: "Sequence[nn.Module]",
        layers: "Sequence[nn.Module]",
        n_numbers: int,
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self._roots = roots
        self._layers = layers
        self._n_numbers = n_numbers
        # One lock for all modules: two models of the same layers take turns.
        share_lock(roots)

    def _require(self, batch: Batch) -> Batch:
        """Return a batch on the model's device; refused where it is too long, or has numbers without an embedding."""
        require_length(self.info, batch.ids.shape[1])
        require_numbers(self.info, batch.ids, self._n_numbers)
        return batch.to(self.info.device)

    @contextmanager
    def _forward_pass(self) -> "Iterator[None]":
        """Within it, it is this thread's turn with the model, which computes in its own precision."""
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

    def _look_up(self, embedding: "nn.Module", ids: "Tensor") -> "Tensor":
        """Return the rows of a token embedding: (batch, token) numbers -> (batch, token, d), without gradient."""
        import torch

        require_numbers(self.info, ids, self._n_numbers)
        with torch.no_grad():
            rows: Tensor = embedding(ids.to(self.info.device))
        return rows

    def untrained(self, seed: int) -> Self:
        """Return the same architecture with random weights: normal numbers in matrices, norms that change nothing."""
        import torch

        # The same modules anew, with a lock of their own.
        twin = copy.deepcopy(self)
        share_lock(twin._roots)
        chance = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for root in twin._roots:
                for name, weight in root.named_parameters():
                    # Matrices are drawn; norms scale by 1, and all biases are 0.
                    if weight.ndim > 1:
                        weight.copy_(torch.randn(weight.shape, generator=chance) * self.sigma)
                    else:
                        weight.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
        notes = (f"random weights, seed {seed}",)
        twin.info = replace(
            self.info, name=f"{self.info.name} untrained", sha256="", notes=notes, heads=()
        )
        return twin
