"""The eager path: the weights that a model gives out itself, where its attention does not pass the seam."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnscope.core.attention.probes import Weights
from attnscope.core.attention.seam import Kind, Probe
from attnscope.errors import AttnscopeError
from attnscope.models.hf.check.compare import check_rows, queries_and_keys, run_eager, tolerance
from attnscope.models.model import Batch


def run_for_weights(
    base: PreTrainedModel, inputs: Mapping[str, Any], layers: Mapping[Kind, Sequence[int]], name: str, probe: Probe
) -> Any:
    """Runs a model by its own eager attention; the probe, which must be a `Weights`, keeps the weights."""
    if not isinstance(probe, Weights):
        raise AttnscopeError(
            f"{name} does not pass its attention through the seam: only its weights can be seen",
            f"{type(probe).__name__} needs another model",
        )
    output, maps = run_eager(base, inputs)
    if not base.config.is_encoder_decoder:
        maps = {next(iter(layers)): maps["encoder"]}
    for kind, numbers in layers.items():
        if len(maps[kind]) != len(numbers):
            raise AttnscopeError(f"{name} gave out {len(maps[kind])} {kind} layers, not the {len(numbers)} it has")
        for layer, weights in zip(numbers, maps[kind], strict=True):
            check_rows(weights, kind, layer, tolerance(base, len(numbers)))
            probe.keep(kind, layer, weights)
    return output


def run_one_by_one(run: Callable[[Batch, Probe], Tensor], batch: Batch, probe: Probe) -> Tensor:
    """Runs each text of a batch without its padding, which may be at either end, and puts the outcomes together.

    Hidden states, (batch, token, d_model), are 0 at padding, as are the weights that the probe, a `Weights`, keeps.
    """
    hidden, maps = [], dict[tuple[Kind, int], list[Tensor]]()
    real = torch.ones_like(batch.ids, dtype=torch.bool) if batch.mask is None else batch.mask
    written = real if batch.target_ids is None else torch.ones_like(batch.target_ids, dtype=torch.bool)
    written = written if batch.target_mask is None else batch.target_mask
    sides = queries_and_keys(real, written)
    for i in range(len(batch.ids)):
        kept = Weights()
        output = run(_take_text(batch, i), kept)
        padded = output.new_zeros(1, written.shape[1], output.shape[2])
        padded[:, written[i]] = output
        hidden.append(padded)
        for kind, by_layer in kept.maps.items():
            queries, keys = (mask[i].to(output.device).nonzero()[:, 0] for mask in sides[kind])
            for layer, weights in by_layer.items():
                whole = weights.new_zeros(1, weights.shape[1], *(mask.shape[1] for mask in sides[kind]))
                whole[:, :, queries[:, None], keys] = weights
                maps.setdefault((kind, layer), []).append(whole)
    if isinstance(probe, Weights):
        for (kind, layer), of_texts in maps.items():
            probe.keep(kind, layer, torch.cat(of_texts))
    return torch.cat(hidden)


def _take_text(batch: Batch, i: int) -> Batch:
    """One text of a batch without padding."""

    def cut(values: Tensor | None, mask: Tensor | None) -> Tensor | None:
        return values if values is None else values[i : i + 1] if mask is None else values[i : i + 1, mask[i]]

    ids = cut(batch.ids, batch.mask)
    assert ids is not None
    return Batch(ids, None, cut(batch.segments, batch.mask), cut(batch.target_ids, batch.target_mask))
