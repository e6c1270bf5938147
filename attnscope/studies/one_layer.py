"""Run a model on a text, and return the queries, keys, values and mask of one attention layer.

Without a model, return those of the worked example, a sentence of five words with numbers chosen by hand. The studies
`trace`, `split` and `why` start from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.choice import Choice
from attnscope.core.example import N_HEADS, TOKENS, K, Q, V
from attnscope.core.stepwise import AttentionInputs
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.info import run_facts, versions
from attnscope.models.model import Batch, Model
from attnscope.results.tokens import Tokens
from attnscope.studies.failures import make_nan_error
from attnscope.studies.inputs.reading import Prompt, read
from attnscope.text import build_tokens, word_spans

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.attention.probes import LayerKey
    from attnscope.core.attention.seam import AttentionCall
    from attnscope.models.inside.projections import ProjectedAttention


@dataclass(frozen=True, eq=False)
class OneLayer:
    """Hold one attention of one layer on one text. A layer with cross-attention has two attentions.

    Attributes:
        text: The text.
        layer_key: The kind of attention and the layer, such as ("encoder", 3).
        heads: The chosen heads.
        queries: The tokens that attend.
        keys: The tokens that are attended to.
        inputs: Queries, keys and values of all heads, mask and W_O, in float64. Queries, keys and values are finite.
        run: The `run` of a result: model, hash of its weights, versions and notes.
        batch: The text as the model reads it; None for the worked example.
        projected_attention: The call of the attention and its output projection; None for the worked example.
    """

    text: str
    layer_key: LayerKey
    heads: tuple[int, ...]
    queries: Tokens
    keys: Tokens
    inputs: AttentionInputs
    run: dict[str, Any]
    batch: Batch | None = None
    projected_attention: ProjectedAttention | None = None


def read_layer(
    model: Model | None,
    text: str | Prompt | None,
    layer: int,
    kind: str | None = None,
    heads: Sequence[int] | None = None,
) -> OneLayer:
    """Run a model on a text, and return one of its attentions.

    Args:
        model: A loaded model, see `attnscope.load`; None = the worked example.
        text: The text or prompt to run it on.
        layer: The number of the layer.
        kind: "encoder", "decoder" or "cross"; None = the first kind of attention that the model has.
        heads: The numbers of the heads; None = all.

    Raises:
        AttnscopeError: There is no such layer or head, the model does not expose its queries and keys, or some of them
            are NaN or infinite.
    """
    if model is None:
        return _make_example(heads)
    from attnscope.models.inside.projections import run_with_output_projection

    if text is None:
        raise UsageError("no text is given", "a model is looked at on a text")
    # Refuse layers, heads and kinds of attention that the model lacks.
    chosen = Choice((layer,), None if heads is None else tuple(heads)).within(model.info)
    layer_key: LayerKey = (model.info.choose_kind(kind), layer)  # type: ignore[assignment]  # a kind of attention
    # Tokenise the text. Run the model, and capture the call of the attention: its queries, keys, values and mask.
    reading = read(model, Prompt(text) if isinstance(text, str) else text)
    queries, keys = reading.queries_and_keys(layer_key[0])
    batch = reading.batch(model.info.device)
    projected_attention = run_with_output_projection(model, batch, layer_key)
    inputs = _to_float64_inputs(projected_attention)
    for activations in (inputs.Q, inputs.K, inputs.V):
        if not np.isfinite(activations).all():
            raise make_nan_error(model.info, layer_key)
    run = run_facts(model.info, reading.notes)
    return OneLayer(
        reading.text,
        layer_key,
        chosen.heads,
        queries,
        keys,
        inputs,
        run,
        batch,
        projected_attention,
    )


def _make_example(heads: Sequence[int] | None) -> OneLayer:
    """Return the worked example: "The cat sat on mat", d_model 4, 2 heads, no projections."""
    chosen_heads = range(N_HEADS) if heads is None else sorted(set(heads))
    for head in chosen_heads:
        if head not in range(N_HEADS):
            raise AttnscopeError(
                f"there is no head {head}: the worked example has 2", "they are numbered 0 and 1"
            )
    # Tokenise the text: each word is a token.
    text = " ".join(TOKENS)
    n_tokens = len(TOKENS)
    tokens = build_tokens(
        text,
        ids=range(n_tokens),
        pieces=TOKENS,
        offsets=word_spans(text),
        special=[False] * n_tokens,
        style="plain",
    )
    # The scale is 1 / √d_head. Q is (token, heads · d_head). Each head has its own keys and values.
    scale = (Q.shape[1] / N_HEADS) ** -0.5
    inputs = AttentionInputs(
        Q,
        K,
        V,
        n_heads=N_HEADS,
        n_kv_heads=N_HEADS,
        scale=scale,
    )
    return OneLayer(
        text, ("encoder", 0), tuple(chosen_heads), tokens, tokens, inputs, example_run_facts()
    )


def _to_float64_inputs(projected_attention: ProjectedAttention) -> AttentionInputs:
    """Return the inputs of a model's attention as float64 arrays."""
    from attnscope.core.attention.seam import allowed

    # In the mask, True = the query may attend to the key. A mask that hides nothing is left out: None.
    call = projected_attention.call
    mask = allowed(call)
    if mask is not None and mask.all():
        mask = None
    return AttentionInputs(
        Q=_join_heads(call.query),
        K=_join_heads(call.key),
        V=_join_heads(call.value),
        n_heads=call.n_heads,
        n_kv_heads=call.n_kv_heads,
        scale=call.scale,
        may=_to_full_mask(mask, call),
        bias=_to_full_mask(call.bias, call),
        softcap=call.softcap,
        sinks=to_numpy(call.sinks),
        W_O=to_numpy(projected_attention.w_o),
        b_O=to_numpy(projected_attention.b_o),
    )


def _join_heads(heads: Tensor) -> Any:
    """Return queries, keys or values, (1, head, token, width), as an array (token, head * width)."""
    return to_numpy(heads[0].transpose(0, 1).flatten(1))


def _to_full_mask(mask_or_bias: Tensor | None, call: AttentionCall) -> Any:
    """Return a mask or a bias, (1, 1 or n_heads, 1 or query, 1 or key), as an array (1 or n_heads, query, key).

    None stays None.
    """
    if mask_or_bias is None:
        return None
    return np.array(to_numpy(mask_or_bias[0].expand(-1, call.query.shape[2], call.key.shape[2])))


def to_numpy(tensor: Tensor | None) -> Any:
    """Return a tensor as an array on the CPU. Floating-point numbers become float64; None stays None."""
    if tensor is None:
        return None
    values = tensor.detach().cpu()
    return values.double().numpy() if values.is_floating_point() else values.numpy()


def example_run_facts() -> dict[str, Any]:
    """Return the `run` of a result on the worked example, which has no model."""
    return {
        "model": "worked example",
        "engine": "native",
        "dtype": "float64",
        "device": "cpu",
        "sha256": "",
        "seed": None,
        "versions": {name: versions()[name] for name in ("attnscope", "python", "numpy")},
        "notes": [],
    }
