"""A probe that reads and keeps the rows of a few queries: O(N) a row. Ours."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from attnscope.core.attention.seam import AttentionCall, Kind, attention_weights, select_part
from attnscope.core.attention.tiles import attend_lean


@dataclass(frozen=True, eq=False)
class RowsWanted:
    """Which rows of one text are read.

    Attributes:
        queries: (row,): positions of the queries.
        n_keys: How many keys are real; they are the first.
    """

    queries: NDArray[np.int64]
    n_keys: int


@dataclass(eq=False)
class Found:
    """What was found of one text.

    Attributes:
        allowed: (row, key), bool, of each layer: which keys may be attended to.
        weights: (row, head, key) of each layer, float16.
    """

    allowed: dict[int, NDArray[np.bool_]] = field(default_factory=dict)
    weights: dict[int, NDArray[np.float16]] = field(default_factory=dict)


class RowSamples:
    """Reads rows of some queries of each text of a batch; the model computes what it would have without it.

    Rows are normalised: of a head with a learned sink the weights on keys alone are described.

    Args:
        wanted: Of each kind of attention the rows that are read of each text of the batch; kinds that are not there
            are not read.

    Attributes:
        found: Kind -> text of the batch -> what was found.
    """

    def __init__(self, wanted: Mapping[Kind, Sequence[RowsWanted]]) -> None:
        self._wanted = wanted
        self.found: dict[Kind, list[Found]] = {kind: [Found() for _ in each] for kind, each in wanted.items()}

    def __call__(self, call: AttentionCall) -> Tensor:
        """Computes an attention without gradient, and reads the rows asked for; shape and dtype: see `Probe`.

        Raises:
            RuntimeError: The layer of this kind has been here already.
        """
        with torch.no_grad():
            for text, wanted in enumerate(self._wanted.get(call.kind, ())):
                part, allowed = rows_of(call, text, torch.from_numpy(wanted.queries), wanted.n_keys)
                self._read(call.kind, call.layer, text, attention_weights(part)[0], allowed)
            return attend_lean(call)

    def keep(self, kind: Kind, layer: int, weights: Tensor) -> None:
        """Reads dense weights that an engine has computed by itself, as `rows_of_weights` does.

        Args:
            kind: Kind of the attention.
            layer: Its layer.
            weights: (batch, n_heads, query, key).
        """
        for text, wanted in enumerate(self._wanted.get(kind, ())):
            queries = torch.from_numpy(wanted.queries)
            self._read(kind, layer, text, *rows_of_weights(weights, kind, text, queries, wanted.n_keys))

    def _read(
        self,
        kind: Kind,
        layer: int,
        text: int,
        weights: Float[Tensor, "n_heads query key"],
        allowed: Bool[Tensor, "query key"],
    ) -> None:
        found = self.found[kind][text]
        if layer in found.weights:
            raise RuntimeError(f"{kind} layer {layer} reached the probe twice; a new batch needs a new probe")
        weights = weights.movedim(1, 0).to("cpu", torch.float32)  # (query, head, key)
        weights = weights / weights.sum(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
        found.weights[layer] = weights.to(torch.float16).numpy()
        found.allowed[layer] = allowed.cpu().numpy()


def rows_of(
    call: AttentionCall, text: int, queries: Tensor, n_keys: int
) -> tuple[AttentionCall, Bool[Tensor, "query key"]]:
    """The attention of some queries of one text on its first keys, and which of these any head may attend to.

    Args:
        call: The attention of a padded batch.
        text: Which text.
        queries: (query,): positions of the queries.
        n_keys: How many keys are real.

    Returns:
        The attention, of one text; and (query, key), bool: what any of its heads may attend to.
    """
    device = call.query.device
    queries = queries.to(device)
    part = select_part(call, slice(text, text + 1), queries, slice(n_keys))
    positions = torch.arange(n_keys, device=device)
    near = torch.ones(len(queries), n_keys, dtype=torch.bool, device=device)
    if call.is_causal:
        near &= positions <= queries[:, None]
    if call.window is not None:
        near &= (positions - queries[:, None]).abs() < call.window
    mask = near[None, None] if part.mask is None else near & part.mask
    part = replace(part, mask=mask, is_causal=False, window=None, dropout_p=0.0)
    return part, mask.any(1)[0].expand(len(queries), n_keys)


def rows_of_weights(
    weights: Float[Tensor, "text n_heads query key"], kind: str, text: int, queries: Tensor, n_keys: int
) -> tuple[Float[Tensor, "n_heads row {n_keys}"], Bool[Tensor, "row {n_keys}"]]:
    """Dense weights of the same, (n_heads, row, key), float32; and what these may attend to, (row, key), bool.

    What may be attended to is not known there: it is taken to be every key, for a decoder every earlier one.
    """
    allowed = torch.ones(len(queries), n_keys, dtype=torch.bool)
    if kind == "decoder":
        allowed = torch.arange(n_keys) <= queries[:, None]
    return weights[text, :, queries.to(weights.device), :n_keys].float(), allowed
