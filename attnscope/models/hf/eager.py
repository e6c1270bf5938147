"""Run a Hugging Face model by its own eager attention, for the weights that it gives out.

The self-check compares them with those at the seam. A model whose attention does not pass the seam is shown by them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from attnscope.core.attention.probes import Weights
from attnscope.core.attention.seam import Kind, Probe
from attnscope.errors import AttnscopeError
from attnscope.models.hf.seam import use_attention

Maps = dict[Kind, list[Tensor]]
"""Attention weights, (batch, head, query, key), of each kind in the order of computation."""


def run_eager(model: PreTrainedModel, inputs: Mapping[str, Any]) -> tuple[Any, Maps]:
    """Run a model by its own eager attention; return its output and the weights that it gives out.

    Those of a model that is no encoder-decoder all count as an encoder's.
    """
    with use_attention(model, "eager"):
        parts = set(model.modules())
        output = model(**inputs, output_attentions=True)
        if not all(_maps_in(model, output).values()) and set(model.modules()) != parts:
            # transformers watched parts that the model then put others in place of, as BigBird does on short texts.
            for module in model.modules():
                vars(module).pop("_output_capturing_hooks_installed", None)
            output = model(**inputs, output_attentions=True)
    # (batch, head, query, key), cut to the text where the model filled up its last block.
    maps = _maps_in(model, output)
    if "input_ids" in inputs:
        source = inputs["input_ids"].shape[1]
        target = inputs["decoder_input_ids"].shape[1] if model.config.is_encoder_decoder else source
        sizes = {"encoder": (source, source), "decoder": (target, target), "cross": (target, source)}
        maps = {kind: [drop_filling(weights, *sizes[kind]) for weights in of_kind] for kind, of_kind in maps.items()}
    return output, maps


def _maps_in(model: PreTrainedModel, output: Any) -> Maps:
    """Return the weights that an output carries."""
    names: dict[Kind, str] = {"encoder": "attentions"}
    if model.config.is_encoder_decoder:
        names = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}
    return {kind: [w for w in getattr(output, name, None) or () if w is not None] for kind, name in names.items()}


def drop_filling(weights: Any, n_queries: int, n_keys: int) -> Any:
    """Return weights without what a model itself adds to a text to fill its last block, if nothing attends to that."""
    is_map = isinstance(weights, Tensor) and weights.ndim == 4
    if not is_map or weights.shape[2] < n_queries or weights.shape[3] <= n_keys:
        return weights
    rows = weights[:, :, :n_queries]
    return weights if bool(rows[..., n_keys:].any()) else rows[..., :n_keys]


def are_softmax(rows: Tensor, allowed: float) -> Tensor:
    """Return which rows, (..., key), hold weights from 0 that sum to 1."""
    return (rows >= 0).all(-1) & ((rows.float().sum(-1) - 1).abs() <= allowed)


def run_for_weights(
    base: PreTrainedModel,
    inputs: Mapping[str, Any],
    layers: Mapping[Kind, Sequence[int]],
    name: str,
    probe: Probe,
    allowed: float,
) -> Any:
    """Run a model by its own eager attention; the probe, which must be a `Weights`, keeps the weights.

    They were softmax weights on the self-check's texts, and must be on this input, within `allowed`.
    """
    if not isinstance(probe, Weights):
        raise AttnscopeError(
            f"{name} does not pass its attention through the seam: only its weights can be seen",
            f"{type(probe).__name__} needs another model",
        )
    # Number the maps by the survey's layers, which may skip those without attention.
    output, maps = run_eager(base, inputs)
    if not base.config.is_encoder_decoder:
        maps = {next(iter(layers)): maps["encoder"]}
    for kind, numbers in layers.items():
        if len(maps[kind]) != len(numbers):
            raise AttnscopeError(f"{name} gave out {len(maps[kind])} {kind} layers, not the {len(numbers)} it has")
        for layer, weights in zip(numbers, maps[kind], strict=True):
            # A query that sees no key has no weights.
            if not bool((are_softmax(weights, allowed) | (weights == 0).all(-1)).all()):
                raise AttnscopeError(
                    f"on this text of {weights.shape[-1]} tokens the model's own {kind} layer {layer} gives out "
                    "numbers that are no softmax weights",
                    "shorter texts may be shown",
                )
            probe.keep(kind, layer, weights)
    return output
