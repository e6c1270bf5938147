"""A probe that reads and keeps the rows of a few queries: O(N) a row. Ours."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from attnscope.core.attention import tiles
from attnscope.core.attention.seam import AttentionCall, Kind, Probe, attention_weights, select_part
from attnscope.core.attention.tiles import attend_lean

KeptPart = tuple[NDArray[np.float16], NDArray[np.bool_]]
"""Weights of some rows, (row, head, key), and which keys these may attend to, (row, key)."""


@dataclass(frozen=True, eq=False)
class RowsWanted:
    """Which rows of one text are read.

    Attributes:
        queries: (row,): positions of the queries.
        n_keys: How many keys are real; they are the first ones.
    """

    queries: NDArray[np.int64]
    n_keys: int


@dataclass(eq=False)
class SampledRows:
    """The rows of one text, by layer.

    Attributes:
        allowed: (row, key), bool: which keys may be attended to.
        weights: (row, head, key), float16.
    """

    allowed: dict[int, NDArray[np.bool_]] = field(default_factory=dict)
    weights: dict[int, NDArray[np.float16]] = field(default_factory=dict)


class RowSamples:
    """Reads rows of some queries of each text of a batch; the model's output stays the same.

    Rows are normalised: if a head has a learned sink, its weights on keys alone are described.

    Args:
        wanted: For each kind of attention, the rows that are read of each text of the batch; None = none of this text.
            Other kinds are not read.

    Attributes:
        rows: Kind -> the rows of each text of the batch.
    """

    def __init__(self, wanted: Mapping[str, Sequence[RowsWanted | None]]) -> None:
        self._wanted = wanted
        self.rows: dict[str, list[SampledRows]] = {}
        for kind, texts in wanted.items():
            self.rows[kind] = [SampledRows() for _ in texts]

    def __call__(self, call: AttentionCall) -> Tensor:
        """Compute an attention without gradient, and read its rows; shape and dtype: see `Probe`."""
        with torch.no_grad():
            self.read(call)
            return attend_lean(call)

    def beside(self, probe: Probe) -> Probe:
        """Return a probe that does what another does, and reads the rows too; shape and dtype: see `Probe`."""

        def read_and_probe(call: AttentionCall) -> Tensor:
            with torch.no_grad():
                self.read(call)
            return probe(call)

        return read_and_probe

    def read(self, call: AttentionCall) -> None:
        """Read the rows of an attention, beside a probe that computes it.

        Raises:
            RuntimeError: The layer of this kind has been here already.
        """
        for text, wanted in self._texts(call.kind):
            # A few rows at a time: those of all heads of a long text would be as large as a map.
            at_once = max(tiles.TILE_ELEMENTS // max(call.n_heads * wanted.n_keys, 1), tiles.LEAST_QUERIES)
            parts = []
            for queries in torch.split(torch.from_numpy(wanted.queries), at_once):
                part, allowed = rows_of(call, text, queries, wanted.n_keys)
                parts.append(_kept(attention_weights(part)[0], allowed))
            self._keep(call.kind, call.layer, text, parts)

    def keep_all(self, maps: Mapping[Kind, Mapping[int, Tensor]]) -> None:
        """Read dense weights, (batch, n_heads, query, key), that an engine has computed: see `rows_of_weights`."""
        for kind, by_layer in maps.items():
            for layer, weights in by_layer.items():
                for text, wanted in self._texts(kind):
                    queries = torch.from_numpy(wanted.queries)
                    rows = rows_of_weights(weights, kind, text, queries, wanted.n_keys)
                    self._keep(kind, layer, text, [_kept(*rows)])

    def _texts(self, kind: str) -> list[tuple[int, RowsWanted]]:
        return [(text, wanted) for text, wanted in enumerate(self._wanted.get(kind, ())) if wanted is not None]

    def _keep(self, kind: Kind, layer: int, text: int, parts: Sequence[KeptPart]) -> None:
        """Join the parts of a text's rows."""
        rows = self.rows[kind][text]
        if layer in rows.weights:
            raise RuntimeError(f"{kind} layer {layer} reached the probe twice; a new batch needs a new probe")
        weights, allowed = zip(*parts, strict=True)
        rows.weights[layer] = np.concatenate(weights)
        rows.allowed[layer] = np.concatenate(allowed)


def _kept(weights: Float[Tensor, "n_heads query key"], allowed: Bool[Tensor, "query key"]) -> KeptPart:
    """Return rows as they are kept: see `SampledRows`."""
    weights = weights.movedim(1, 0).to("cpu", torch.float32)  # (query, head, key)
    weights = weights / weights.sum(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
    return weights.to(torch.float16).numpy(), allowed.cpu().numpy()


def rows_of(
    call: AttentionCall, text: int, queries: Int[Tensor, " query"], n_keys: int
) -> tuple[AttentionCall, Bool[Tensor, "query key"]]:
    """Return the attention of some queries of one text on its first `n_keys` keys, the real ones of a padded batch.

    Returns:
        The attention, of one text; and which keys any of its heads may attend to, bool.
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
    weights: Float[Tensor, "text n_heads query key"], kind: str, text: int, queries: Int[Tensor, " row"], n_keys: int
) -> tuple[Float[Tensor, "n_heads row {n_keys}"], Bool[Tensor, "row {n_keys}"]]:
    """Return the same rows of dense weights, float32; and which keys they may attend to, bool.

    Weights do not tell what may be attended to: it is taken to be every key, in a decoder every earlier one.
    """
    allowed = torch.ones(len(queries), n_keys, dtype=torch.bool)
    if kind == "decoder":
        allowed = torch.arange(n_keys) <= queries[:, None]
    return weights[text, :, queries.to(weights.device), :n_keys].float(), allowed
