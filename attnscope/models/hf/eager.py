"""Run a Hugging Face model by its own eager attention, and read the weights that it gives out.

The self-check compares the weights at the seam, the one function through which attention is computed, with these. A
model whose attention does not go through the seam is shown by its eager weights alone.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnscope.core.attention.probes import WeightsRecorder
from attnscope.core.attention.seam import Kind, Probe
from attnscope.errors import AttnscopeError
from attnscope.models.hf.examples import real_tokens
from attnscope.models.hf.parts import as_list, hidden_states
from attnscope.models.hf.seam import TracedAttention, use_attention
from attnscope.models.hf.survey import KINDS, AttentionSurvey, UnclearError, list_attention_layers

Maps = dict[Kind, list[Tensor]]
"""Attention weights by kind: a tensor (batch, head, query, key) for each layer, in the order of computation."""

Outcome = dict[str, Tensor]
"""Results of one forward pass, by name. All have a row for each text and token: (batch, token, ...).

"hidden" is the last hidden state, and "encoded" that of the encoder of an encoder-decoder, (batch, token, d_model). A
name such as "decoder layer 3" is for the weights of that layer, (batch, query, head, key).
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
        kinds: The kinds of its attention; for a model that is no encoder-decoder the first one alone is used.
        weights: Whether to return weights.
    """
    with use_attention(model, "eager"):
        if getattr(model.config, "attention_type", "") == "block_sparse":
            # On the first short text BigBird replaces its attention layers, and transformers would record the old ones.
            model(**inputs)
        if not weights:
            return model(**inputs), {}
        output = model(**inputs, output_attentions=True)
    # The field of the output that holds the weights of each kind.
    if model.config.is_encoder_decoder:
        names = {kind: f"{kind}_attentions" for kind in KINDS}
    else:
        names = {next(iter(kinds)): "attentions"}
    maps: Maps = {}
    for kind, name in names.items():
        maps[kind] = [layer for layer in getattr(output, name, None) or () if layer is not None]
    # Longformer's encoder returns a band around the diagonal.
    if hasattr(model.config, "attention_window"):
        maps["encoder"] = [_whole_rows(band, model.config.attention_window) for band in maps["encoder"]]
    return output, maps


def _whole_rows(band: Tensor, window: int | list[int]) -> Tensor:
    """Turn a band around the diagonal (Longformer), (batch, head, query, window + 1), into weights on all keys.

    `window` is that of all layers, or a list with that of each. A band with more columns has some for keys that every
    query sees: it is returned as it is, and refused later for its shape.
    """
    n_queries, width = band.shape[2:]
    if width - 1 not in as_list(window):
        return band
    # Column j of query i is key i + j - width // 2. Scatter it to column i + j, then cut off width // 2 columns on the
    # left and those after the last key: they stand for no token, and are 0.
    keys = torch.arange(n_queries, device=band.device)[:, None] + torch.arange(width, device=band.device)
    rows = band.new_zeros(*band.shape[:3], n_queries + width - 1)
    return rows.scatter(3, keys.expand_as(band), band)[..., width // 2 :][..., :n_queries]


def tolerance(model: PreTrainedModel, n_calls: int) -> float:
    """Return how much weights may differ between two ways to compute them, and hidden states relative to the largest.

    `n_calls` is how often the model computes attention: rounding adds up over layers like a random walk. In units of
    eps * sqrt(1 + n_calls), real models in 16 bits differ by less than 1 (their softmax is in 32 bits), in 32 bits by
    up to 5. A random model with sharp heads can differ by more: then its own rounding is measured.
    """
    # The eager softmax of many models is in 32 bits even where all else is in 64.
    eps = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps)
    is_in_16_bits = eps > 1e-5
    n_units = 4 if is_in_16_bits else 128
    return n_units * eps * math.sqrt(1 + n_calls)


def states_of(output: Any) -> Outcome:
    """Return the hidden states in the output of a forward pass, by their names in an outcome."""
    states = {
        "hidden": hidden_states(output),
        "encoded": getattr(output, "encoder_last_hidden_state", None),
    }
    return {name: x for name, x in states.items() if x is not None}


def eager_outcome(
    model: PreTrainedModel, survey: AttentionSurvey, inputs: Mapping[str, Any], *, with_maps: bool
) -> Outcome:
    """Return the outcome of a model's own eager attention: hidden states, and with `with_maps` weights if it has them.

    Raises:
        Unclear: The weights are of other layers than those of the survey.
    """
    output, maps = run_eager(model, inputs, survey.layers, weights=with_maps)
    outcome = states_of(output)
    for kind, weights_of_layers in maps.items():
        layers = survey.layers[kind]
        n_layers = survey.n_layers[kind]
        # A model that returns no weights is compared by its hidden states, if all of its layers are in the survey.
        if not weights_of_layers and n_layers == len(layers):
            continue
        # MiniMax returns a tensor for each layer, also for those of linear attention.
        if len(weights_of_layers) == n_layers and layers == list_attention_layers(
            model.config, n_layers
        ):
            weights_of_layers = [weights_of_layers[layer] for layer in layers]
        if len(weights_of_layers) != len(layers):
            raise UnclearError(
                f"only {len(layers)} of {len(weights_of_layers)} {kind} layers pass transformers' attention interface"
            )
        for layer, weights in zip(layers, weights_of_layers, strict=True):
            outcome[f"{kind} layer {layer}"] = weights.transpose(1, 2)
    return outcome


# Models that are shown by their eager weights ---------------------------------------------------------------------


def checked_weights(
    model: PreTrainedModel, inputs: Mapping[str, Any]
) -> tuple[Any, list[TracedAttention]]:
    """Return the output and the weights of a model's own eager attention, once the weights have been checked.

    Raises:
        Unclear: A kind has no weights, or some are no softmax weights of these inputs.
    """
    output, maps = run_eager(model, inputs)
    n_texts = len(next(iter(inputs.values())))
    for kind, weights_of_layers in maps.items():
        if not weights_of_layers:
            raise UnclearError(f"it gives out no {kind} attention of its own")
        # Which queries and keys are tokens and no padding, (batch, token); None = unknown. Cross-attention has the
        # encoder's keys.
        queries = real_tokens(inputs, kind)
        keys = real_tokens(inputs, "encoder" if kind == "cross" else kind)
        for layer, weights in enumerate(weights_of_layers):
            shape = tuple(weights.shape) if isinstance(weights, Tensor) else ()
            is_map = len(shape) == 4 and shape[0] == n_texts
            if is_map and queries is not None and keys is not None:
                is_map = shape[2:] == (queries.shape[1], keys.shape[1])
            if not is_map:
                raise UnclearError(
                    f"its own {kind} layer {layer} has the shape {shape}, not (batch, head, query, key)"
                )
            # The weights of real queries on real keys must sum to 1. (batch, query, head, key)
            rows = weights.float().transpose(1, 2)
            if keys is not None:
                rows = rows * keys[:, None, None, :]
            if queries is not None:
                rows = rows[queries]
            if not _are_softmax(rows, tolerance(model, n_calls=1)).all():
                raise UnclearError(
                    f"its own {kind} layer {layer} holds numbers that are no softmax weights"
                )
    return output, [TracedAttention(weights) for weights in itertools.chain(*maps.values())]


def run_for_weights(
    model: PreTrainedModel, inputs: Mapping[str, Any], survey: AttentionSurvey, name: str, probe: Probe
) -> Any:
    """Run a model by its own eager attention, let the probe keep the weights, and return the output.

    Raises:
        AttnscopeError: The probe is no `WeightsRecorder`, or the weights on these inputs are no softmax weights.
    """
    if not isinstance(probe, WeightsRecorder):
        raise AttnscopeError(
            f"{name} does not pass its attention through the seam: only its weights can be seen",
            "with attnscope heatmap",
        )
    output, maps = run_eager(model, inputs, survey.layers)
    # The survey numbers the layers: those without attention have numbers too.
    for kind, layers in survey.layers.items():
        for layer, weights in zip(layers, maps[kind], strict=True):
            # A query that sees no key has weights of 0.
            is_softmax = _are_softmax(weights, tolerance(model, survey.n_calls)) | (weights == 0).all(-1)
            if not is_softmax.all():
                raise AttnscopeError(
                    f"on this text of {weights.shape[-1]} tokens the model's own {kind} layer {layer} gives out "
                    "numbers that are no softmax weights",
                    "shorter texts may be shown",
                )
            probe.keep(kind, layer, weights)
    return output


def _are_softmax(rows: Tensor, allowed: float) -> Tensor:
    """Return which rows, (..., key), are at least 0 and sum to 1, up to the allowed difference."""
    totals = rows.float().sum(-1)
    return (rows >= 0).all(-1) & ((totals - 1).abs() <= allowed)
