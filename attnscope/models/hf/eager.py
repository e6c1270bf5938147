"""Run a Hugging Face model by its own eager attention, and read the weights that it gives out.

The check compares with them what passes the seam. Models whose attention does not pass it are shown by them.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnscope.core.attention.probes import Weights
from attnscope.core.attention.seam import Kind, Probe
from attnscope.errors import AttnscopeError
from attnscope.models.hf.examples import real_tokens
from attnscope.models.hf.parts import as_list, hidden_states
from attnscope.models.hf.seam import Seen, use_attention
from attnscope.models.hf.survey import KINDS, Survey, Unclear, listed_layers

Maps = dict[Kind, list[Tensor]]
"""Attention weights, (batch, head, query, key), of each kind in the order of computation."""

Outcome = dict[str, Tensor]
"""Results of one forward pass, by name.

"hidden" and, of an encoder-decoder, "encoded" are last hidden states, (batch, token, d_model). The weights of
"decoder layer 3" are (batch, query, head, key), so that both have their rows along the first two axes.
"""

STATES = ("hidden", "encoded")
"""Names of hidden states in an outcome; the others are weights."""


def run_unchanged(model: PreTrainedModel, inputs: Mapping[str, Any]) -> Any:
    """Return the output of a model with the attention implementation that it has."""
    with use_attention(model, None):
        return model(**inputs)


def run_eager(
    model: PreTrainedModel,
    inputs: Mapping[str, Any],
    kinds: Iterable[Kind] = KINDS,
    *,
    weights: bool = True,
) -> tuple[Any, Maps]:
    """Run a model by its own eager attention; return its output, and the weights that it gives out.

    Args:
        model: The model.
        inputs: The arguments of its forward.
        kinds: Of a model that is no encoder-decoder, the kind of its attention first; an encoder's by default.
        weights: Whether weights are asked for; else there are none.
    """
    with use_attention(model, "eager"):
        if getattr(model.config, "attention_type", "") == "block_sparse":
            # BigBird exchanges its layers on a short text, which must be done when transformers begins to watch them.
            model(**inputs)
        if not weights:
            return model(**inputs), {}
        output = model(**inputs, output_attentions=True)
    names = {next(iter(kinds)): "attentions"}
    if model.config.is_encoder_decoder:
        names = {kind: f"{kind}_attentions" for kind in KINDS}
    maps: Maps = {}
    for kind, name in names.items():
        maps[kind] = [layer for layer in getattr(output, name, None) or () if layer is not None]
    if hasattr(model.config, "attention_window"):
        maps["encoder"] = [_whole_rows(band, model.config.attention_window) for band in maps["encoder"]]
    return output, maps


def _whole_rows(band: Tensor, window: int | list[int]) -> Tensor:
    """Scatter a band around the diagonal (Longformer), (batch, head, query, window + 1), into rows over all keys.

    The window is that of all layers, or of each. A band with more columns, for keys that every query sees, is left as
    it is, and refused later as no map.
    """
    n_queries, width = band.shape[2:]
    if width - 1 not in as_list(window):
        return band
    # Column j of query i is key i + j - width // 2; what lies beyond the text is 0, and cut off.
    keys = torch.arange(n_queries, device=band.device)[:, None] + torch.arange(width, device=band.device)
    rows = band.new_zeros(*band.shape[:3], n_queries + width - 1)
    return rows.scatter(3, keys.expand_as(band), band)[..., width // 2 :][..., :n_queries]


def tolerance(model: PreTrainedModel, n_calls: int) -> float:
    """Return by how much two ways to compute the same may differ, in weights and relative to the largest hidden state.

    `n_calls` is how many attentions the model computes.

    Rounding adds up over layers like a random walk. In units of eps * sqrt(1 + n_calls), real models in 16 bits differ
    by less than 1 (their softmax is computed in 32), in 32 bits by up to 5. A random model with sharp heads can exceed
    it: then its own rounding is measured.
    """
    # Many a model's own eager softmax is in 32 bits, also where all else is in 64.
    eps = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps)
    is_in_16_bits = eps > 1e-5
    n_units = 4 if is_in_16_bits else 128
    return n_units * eps * math.sqrt(1 + n_calls)


def states_of(output: Any) -> Outcome:
    """Return the hidden states in the output of a forward."""
    states = {
        "hidden": hidden_states(output),
        "encoded": getattr(output, "encoder_last_hidden_state", None),
    }
    return {name: x for name, x in states.items() if x is not None}


def eager_outcome(
    model: PreTrainedModel, survey: Survey, inputs: Mapping[str, Any], *, with_maps: bool
) -> Outcome:
    """Return the outcome of a model's own eager attention: hidden states, and the maps that it gives out, if any.

    Raises:
        Unclear: There are other layers than those of the survey.
    """
    output, maps = run_eager(model, inputs, survey.layers, weights=with_maps)
    outcome = states_of(output)
    for kind, of_kind in maps.items():
        layers = survey.layers[kind]
        n_layers = survey.n_layers[kind]
        if not of_kind and n_layers == len(layers):
            continue  # none are given out: that hidden states and the number of layers are equal must do
        if len(of_kind) == n_layers and layers == listed_layers(model.config, n_layers):
            of_kind = [
                of_kind[layer] for layer in layers
            ]  # MiniMax gives out those of linear layers too
        if len(of_kind) != len(layers):
            raise Unclear(
                f"only {len(layers)} of {len(of_kind)} {kind} layers pass transformers' attention interface"
            )
        for layer, weights in zip(layers, of_kind, strict=True):
            outcome[f"{kind} layer {layer}"] = weights.transpose(1, 2)
    return outcome


# Models that are shown by what they give out ----------------------------------------------------------------------


def checked_weights(model: PreTrainedModel, inputs: Mapping[str, Any]) -> tuple[Any, list[Seen]]:
    """Return the output and the weights of a model's own eager attention; their shapes show their kinds.

    Raises:
        Unclear: These are not the softmax weights of all of its attention.
    """
    output, maps = run_eager(model, inputs)
    n_texts = len(next(iter(inputs.values())))
    for kind, of_kind in maps.items():
        if not of_kind:
            raise Unclear(f"it gives out no {kind} attention of its own")
        # Which queries and keys are real, (batch, token): the shape must be (batch, head, query, key).
        # The keys of cross-attention are the encoder's.
        queries = real_tokens(inputs, kind)
        keys = real_tokens(inputs, "encoder" if kind == "cross" else kind)
        for layer, weights in enumerate(of_kind):
            shape = tuple(weights.shape) if isinstance(weights, Tensor) else ()
            is_map = len(shape) == 4 and shape[0] == n_texts
            if is_map and queries is not None and keys is not None:
                is_map = shape[2:] == (queries.shape[1], keys.shape[1])
            if not is_map:
                raise Unclear(
                    f"its own {kind} layer {layer} has the shape {shape}, not (batch, head, query, key)"
                )
            # Each real query's weights on real keys must be a softmax: (batch, query, head, key).
            rows = weights.float().transpose(1, 2)
            if keys is not None:
                rows = rows * keys[:, None, None, :]
            if queries is not None:
                rows = rows[queries]
            if not bool(_are_softmax(rows, tolerance(model, 1)).all()):
                raise Unclear(f"its own {kind} layer {layer} holds numbers that are no softmax weights")
    return output, [Seen(weights) for weights in itertools.chain(*maps.values())]


def run_for_weights(
    model: PreTrainedModel, inputs: Mapping[str, Any], survey: Survey, name: str, probe: Probe
) -> Any:
    """Run a model by its own eager attention; the probe, which must be a `Weights`, keeps the weights.

    Raises:
        AttnscopeError: It is another probe, or the weights are softmax weights on the self-check's texts alone.
    """
    if not isinstance(probe, Weights):
        raise AttnscopeError(
            f"{name} does not pass its attention through the seam: only its weights can be seen",
            "with attnscope heatmap",
        )
    output, maps = run_eager(model, inputs, survey.layers)
    # Number the maps by the survey's layers, which may skip those without attention.
    for kind, layers in survey.layers.items():
        for layer, weights in zip(layers, maps[kind], strict=True):
            # A query that sees no key has no weights.
            is_softmax = _are_softmax(weights, tolerance(model, survey.n_calls)) | (weights == 0).all(-1)
            if not bool(is_softmax.all()):
                raise AttnscopeError(
                    f"on this text of {weights.shape[-1]} tokens the model's own {kind} layer {layer} gives out "
                    "numbers that are no softmax weights",
                    "shorter texts may be shown",
                )
            probe.keep(kind, layer, weights)
    return output


def _are_softmax(rows: Tensor, allowed: float) -> Tensor:
    """Return which rows, (..., key), hold weights from 0 that sum to 1."""
    totals = rows.float().sum(-1)
    return (rows >= 0).all(-1) & ((totals - 1).abs() <= allowed)
