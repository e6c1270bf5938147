"""The eager path: the weights that a model gives out itself, where its attention does not pass the seam."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from attnscope.core.attention.probes import Weights
from attnscope.core.attention.seam import Kind, Probe
from attnscope.errors import AttnscopeError
from attnscope.models.hf.check.compare import check_rows, run_eager, tolerance
from attnscope.models.hf.check.reach import full_up_to
from attnscope.models.model import Batch


def run_for_weights(
    base: PreTrainedModel, given: Mapping[str, Any], layers: Mapping[Kind, Sequence[int]], name: str, probe: Probe
) -> Any:
    """Runs a model by its own eager attention; the probe keeps the weights.

    Raises:
        AttnscopeError: It is another probe, or what the model gives out are not the weights of its layers.
    """
    if not isinstance(probe, Weights):
        raise AttnscopeError(
            f"{name} does not pass its attention through the seam: only its weights can be seen",
            f"{type(probe).__name__} needs another model",
        )
    output, maps = run_eager(base, given)
    if not base.config.is_encoder_decoder:
        maps = {next(iter(layers)): maps["encoder"]}
    for kind, numbers in layers.items():
        if len(maps[kind]) != len(numbers):
            raise AttnscopeError(f"{name} gave out {len(maps[kind])} {kind} layers, not the {len(numbers)} it has")
        for layer, weights in zip(numbers, maps[kind], strict=True):
            check_rows(weights, kind, layer, tolerance(base, len(numbers)))
            probe.keep(kind, layer, weights)
    return output


def mixes_lengths(config: Any, mask: Tensor | None) -> bool:
    """Whether padding would have a short text of a batch attended to as long ones are (BigBird)."""
    limit = full_up_to(config)
    return limit is not None and mask is not None and int(mask.sum(1).min()) <= limit < mask.shape[1]


def run_one_by_one(run: Callable[[Batch, Probe], Tensor], batch: Batch, probe: Probe) -> Tensor:
    """Runs each text of a batch without its padding, and puts together what comes of them.

    Args:
        run: What runs one.
        batch: Texts that are padded at their end.
        probe: A `Weights`.

    Returns:
        Hidden states, (batch, token, d_model); 0 at padding, as the weights are that the probe keeps.
    """
    hidden, maps = [], dict[tuple[Kind, int], list[Tensor]]()
    n_keys = batch.ids.shape[1]
    n_written = 0 if batch.target_ids is None else batch.target_ids.shape[1]
    sizes = {"encoder": (n_keys, n_keys), "decoder": (n_written or n_keys,) * 2, "cross": (n_written, n_keys)}
    for i in range(len(batch.ids)):
        kept = Weights()
        output = run(_take_text(batch, i), kept)
        hidden.append(pad(output, (0, 0, 0, (n_written or n_keys) - output.shape[1])))
        for kind, by_layer in kept.maps.items():
            for layer, weights in by_layer.items():
                queries, keys = sizes[kind]
                whole = pad(weights, (0, keys - weights.shape[3], 0, queries - weights.shape[2]))
                maps.setdefault((kind, layer), []).append(whole)
    if isinstance(probe, Weights):
        for (kind, layer), of_texts in maps.items():
            probe.keep(kind, layer, torch.cat(of_texts))
    return torch.cat(hidden)


def _take_text(batch: Batch, i: int) -> Batch:
    """One text of a batch without padding."""

    def cut(values: Tensor | None, mask: Tensor | None) -> Tensor | None:
        return None if values is None else values[i : i + 1, : None if mask is None else int(mask[i].sum())]

    ids = cut(batch.ids, batch.mask)
    assert ids is not None
    return Batch(ids, None, cut(batch.segments, batch.mask), cut(batch.target_ids, batch.target_mask))
