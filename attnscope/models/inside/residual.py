"""How long the hidden states are that each layer reads, watched from outside while a model runs."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import Kind
from attnscope.models.inside.projections import hooks


class HiddenNorms:
    """Norms of what each layer reads of the residual stream.

    Args:
        blocks: (kind, layer) -> the module that is given the hidden states first.
    """

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
