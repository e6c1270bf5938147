"""Run a Hugging Face model with its own eager attention, and read the attention weights that it returns.

The *seam* is the function that attnscope puts in place of transformers' attention function. The self-check compares the
attention weights at the seam with the weights that the model returns. If a model's attention does not pass the seam,
only the returned weights are shown.
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
from attnscope.models.hf.examples import real_token_mask
from attnscope.models.hf.parts import as_list, hidden_states
from attnscope.models.hf.seam import TracedAttention, use_attention
from attnscope.models.hf.survey import KINDS, AttentionSurvey, UnclearError, list_attention_layers

WeightsByKind = dict[Kind, list[Tensor]]
"""Kind of attention -> the weights of each layer, (batch, head, query, key), in the order of computation."""

Outcome = dict[str, Tensor]
"""Results of one forward pass, by name. The first axes of each are the text and the token: (batch, token, ...).

"hidden" is the last hidden state, and "encoded" the last hidden state of an encoder-decoder's encoder, both (batch,
token, d_model). A name such as "decoder layer 3" is for the attention weights of that layer, (batch, query, head, key).
"""

STATE_NAMES = ("hidden", "encoded")
"""The names of hidden states in an outcome. All other names are for attention weights."""


def run_unchanged(model: PreTrainedModel, inputs: Mapping[str, Any]) -> Any:
    """Return the output of a model with its own attention implementation, not the seam."""
    with use_attention(model, None):
        return model(**inputs)


def run_eager(
    model: PreTrainedModel,
    inputs: Mapping[str, Any],
    kinds: Iterable[Kind] = KINDS,
    *,
    weights: bool = True,
) -> tuple[Any, WeightsByKind]:
    """Run a model with its own eager attention; return its output, and the attention weights in that output.

    Args:
        model: The model.
        inputs: The arguments of its forward.
        kinds: The kinds of its attention. Only the first one is used, and only if it is no encoder-decoder.
        weights: Whether to return weights.
    """
    with use_attention(model, "eager"):
        if getattr(model.config, "attention_type", "") == "block_sparse":
            # On the first short text BigBird replaces its attention layers, and transformers would record the replaced
            # ones. So let it do that before the run that records.
            model(**inputs)
        if not weights:
            return model(**inputs), {}
        output = model(**inputs, output_attentions=True)
    # The field of the output that holds the weights of each kind
    if model.config.is_encoder_decoder:
        field_by_kind = {kind: f"{kind}_attentions" for kind in KINDS}
    else:
        field_by_kind = {next(iter(kinds)): "attentions"}
    weights_by_kind: WeightsByKind = {}
    for kind, field in field_by_kind.items():
        # A layer without attention may be None.
        weights_by_kind[kind] = [x for x in getattr(output, field, None) or () if x is not None]
    # Longformer's encoder returns a band around the diagonal.
    if hasattr(model.config, "attention_window"):
        bands = weights_by_kind["encoder"]
        weights_by_kind["encoder"] = [
            _expand_band(band, model.config.attention_window) for band in bands
        ]
    return output, weights_by_kind


def _expand_band(band: Tensor, window: int | list[int]) -> Tensor:
    """Turn a band around the diagonal (Longformer), (batch, head, query, window + 1), into weights on all keys.

    `window` is the window of all layers, or a list with one window per layer. With Longformer's global attention the
    band has more columns, for keys that every query sees: it is returned unchanged, and refused later for its shape.
    """
    n_queries, width = band.shape[2:]
    if width - 1 not in as_list(window):
        return band
    # Column j of query i is key i + j - width // 2. Scatter it to column i + j of a wider row. Then cut off the columns
    # that stand for no token: width // 2 on the left, and all after the last key.
    columns = torch.arange(n_queries, device=band.device)[:, None] + torch.arange(
        width, device=band.device
    )
    # (batch, head, query, n_queries + width - 1)
    rows = band.new_zeros(*band.shape[:3], n_queries + width - 1)
    return rows.scatter(3, columns.expand_as(band), band)[..., width // 2 :][..., :n_queries]


def tolerance(model: PreTrainedModel, n_calls: int) -> float:
    """Return the largest difference that rounding explains between two ways to compute the same outcome.

    It applies to attention weights, and to hidden states relative to the largest one. `n_calls` is how often the model
    computes attention: rounding errors add up over layers like a random walk. In units of eps * sqrt(1 + n_calls), real
    models in 16 bits differ by less than 1 (their softmax is in 32 bits), in 32 bits by up to 5. A model with random
    weights and sharp heads can differ by more: then `hf.check` measures its rounding error.
    """
    # The eager softmax of many models computes in 32 bits even if the model computes in 64.
    eps = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps)
    # In 16 bits eps is above 1e-5. Both limits are well above the 1 and 5 that were observed.
    n_units = 4 if eps > 1e-5 else 128
    return n_units * eps * math.sqrt(1 + n_calls)


def outcome_of_states(output: Any) -> Outcome:
    """Return an outcome that holds only the hidden states in a model's output."""
    states = {
        "hidden": hidden_states(output),
        "encoded": getattr(output, "encoder_last_hidden_state", None),
    }
    return {name: x for name, x in states.items() if x is not None}


def eager_outcome(
    model: PreTrainedModel, survey: AttentionSurvey, inputs: Mapping[str, Any], *, with_maps: bool
) -> Outcome:
    """Return the outcome of a model's own eager attention: hidden states, and with `with_maps` the weights it returns.

    Args:
        model: The model.
        inputs: The arguments of its forward.
        survey: Which layers have attention, as far as calls at the seam tell.
        with_maps: Whether to ask for attention weights, which take more memory.

    Raises:
        UnclearError: The returned weights belong to other layers than the survey names.
    """
    output, weights_by_kind = run_eager(model, inputs, survey.layers, weights=with_maps)
    outcome = outcome_of_states(output)
    for kind, weights_of_layers in weights_by_kind.items():
        layers = survey.layers[kind]
        n_layers = survey.n_layers[kind]
        # If a model returns no weights, its hidden states suffice, provided that all of its layers are in the survey.
        if not weights_of_layers and n_layers == len(layers):
            continue
        # MiniMax returns a tensor for each layer, even for layers of linear attention: leave those out.
        if len(weights_of_layers) == n_layers and layers == list_attention_layers(
            model.config, n_layers
        ):
            weights_of_layers = [weights_of_layers[layer] for layer in layers]
        if len(weights_of_layers) != len(layers):
            raise UnclearError(
                f"only {len(layers)} of {len(weights_of_layers)} {kind} layers pass transformers' attention interface"
            )
        for layer, weights in zip(layers, weights_of_layers, strict=True):
            # (batch, head, query, key) -> (batch, query, head, key)
            outcome[f"{kind} layer {layer}"] = weights.transpose(1, 2)
    return outcome


# Models of which only the returned weights are shown --------------------------------------------------------------


def read_checked_weights(
    model: PreTrainedModel, inputs: Mapping[str, Any]
) -> tuple[Any, list[TracedAttention]]:
    """Return the output and the weights of a model's own eager attention; refuse weights that no softmax could give.

    Raises:
        UnclearError: A kind of attention has no weights, or the weights have another shape or do not sum to 1.
    """
    output, weights_by_kind = run_eager(model, inputs)
    n_texts = len(next(iter(inputs.values())))
    for kind, weights_of_layers in weights_by_kind.items():
        if not weights_of_layers:
            raise UnclearError(f"it gives out no {kind} attention of its own")
        # Which queries and keys are real tokens and no padding, (batch, token); None = unknown. The keys of
        # cross-attention are the encoder's tokens.
        query_mask = real_token_mask(inputs, kind)
        key_mask = real_token_mask(inputs, "encoder" if kind == "cross" else kind)
        for layer, weights in enumerate(weights_of_layers):
            shape = tuple(weights.shape) if isinstance(weights, Tensor) else ()
            has_map_shape = len(shape) == 4 and shape[0] == n_texts
            if has_map_shape and query_mask is not None and key_mask is not None:
                has_map_shape = shape[2:] == (query_mask.shape[1], key_mask.shape[1])
            if not has_map_shape:
                raise UnclearError(
                    f"its own {kind} layer {layer} has the shape {shape}, not (batch, head, query, key)"
                )
            # The weights of a real query on real keys must sum to 1.
            # (batch, head, query, key) -> (batch, query, head, key)
            rows = weights.float().transpose(1, 2)
            if key_mask is not None:
                rows = rows * key_mask[:, None, None, :]
            # -> (real query, head, key)
            if query_mask is not None:
                rows = rows[query_mask]
            if not _are_softmax(rows, tolerance(model, n_calls=1)).all():
                raise UnclearError(
                    f"its own {kind} layer {layer} holds numbers that are no softmax weights"
                )
    return output, [TracedAttention(weights) for weights in itertools.chain(*weights_by_kind.values())]


def run_for_weights(
    model: PreTrainedModel, inputs: Mapping[str, Any], survey: AttentionSurvey, name: str, probe: Probe
) -> Any:
    """Run a model with its own eager attention, store the weights in the probe, and return the output.

    `name` is what messages call the model.

    Raises:
        AttnscopeError: The probe is no `WeightsRecorder`, or the weights on these inputs do not sum to 1.
    """
    if not isinstance(probe, WeightsRecorder):
        raise AttnscopeError(
            f"{name} does not pass its attention through the seam: only its weights can be seen",
            "with attnscope heatmap",
        )
    output, weights_by_kind = run_eager(model, inputs, survey.layers)
    # Take layer numbers from the survey: layers without attention are counted too, and return no weights.
    for kind, layers in survey.layers.items():
        for layer, weights in zip(layers, weights_by_kind[kind], strict=True):
            # If the mask hides all keys from a query, its weights are 0. (batch, head, query)
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
    """Return which rows, (..., key) -> (...), have no negative weight and sum to 1, up to the allowed difference."""
    totals = rows.float().sum(-1)
    return (rows >= 0).all(-1) & ((totals - 1).abs() <= allowed)
