"""Split an attention score into a sum over the parts of the model that add to it: heads, networks, embeddings, biases.

`models.inside.linear_runs` finds what each part adds to a query or key. Drawing is left to `questions.why`.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from attnscope.core.attention.seam import attention_weights, select_heads
from attnscope.core.plain_torch import with_default_torch
from attnscope.errors import AttnscopeError, require_close
from attnscope.models.info import require_seam
from attnscope.models.inside.linear_runs import ModelPart, ScoreRun
from attnscope.models.model import Model
from attnscope.questions.why import Why
from attnscope.results.table import Floats, Table
from attnscope.results.tokens import Tokens
from attnscope.studies.inputs.reading import Prompt, find_position
from attnscope.studies.one_layer import OneLayer, array_of, read_layer

ROUNDING = 16
"""How far the sum may be from the score, in units of eps times the size of its terms; on 30 families at most 4."""


@with_default_torch
def why(
    model: Model,
    text: str | Prompt,
    layer: int,
    head: int,
    query: str | int,
    key: str | int | None = None,
    *,
    kind: str | None = None,
) -> Why:
    """Take one attention score apart: which parts of the model its query reads, and which its key.

        s_qk = scale · q · k + bias,  q = Σ_c q_c,  k = Σ_d k_d
        s_qk - mean s_q = Σ_cd scale · q_c · (k_d - mean k_d) + bias - mean bias

    The parts c and d are earlier heads, feed-forward networks, embeddings and biases. Each goes through the norms,
    whose lengths are frozen, then through the projection and the rotary turn of its token. The mean is over the keys
    that the query may attend to: softmax depends only on the difference from it.

    Args:
        model: A loaded model, see `attnscope.load`.
        text: The text or prompt to run it on.
        layer: The head's layer.
        head: Its number.
        query: The token that attends: a token, a word, or its position.
        key: The token that is attended to; None = the one with the most attention, apart from special tokens and, in a
            decoder, the first one.
        kind: "encoder", "decoder" or "cross"; None = the model's first.

    Raises:
        AttnscopeError: There is no such head or token, a mask hides the key, the model does not show its queries and
            keys, or something adds to its stream that is not known.

    Source:
        Elhage et al. 2021, "QK circuits".
    """
    # The model's own scores of the query.
    require_seam(model.info, "what its queries and keys are made of")
    layer_run = read_layer(model, text, layer, kind, [head])
    queries = layer_run.queries
    keys = layer_run.keys
    query_position = find_position(query, queries, "--query")
    row = _row_of(model, layer_run, query_position)
    key_position = _strongest_key(row, keys, layer_run.layer_key[0])
    if key is not None:
        key_position = find_position(key, keys, "--key")
    if not row.may[key_position]:
        hint = "choose a key that the query may attend to"
        if key_position > query_position:
            hint += ": an earlier one"
        raise AttnscopeError(
            f"a mask hides token @{key_position} {keys.labels[key_position]} from token @{query_position} "
            f"{queries.labels[query_position]} in layer {layer}",
            hint,
        )

    # The score minus its mean is a weighted sum over keys, Σ_k w_k s_qk: w is 1 at the key, less 1 / n at each of the
    # n keys that the query may attend to. Compute it from pairs of parts as well.
    key_weights = -(row.may / row.may.sum())
    key_weights[key_position] += 1.0
    parts, pairs = _parts_and_pairs(model, layer_run, query_position, key_weights)
    bias = None if row.bias is None else float(row.bias @ key_weights)
    # Rounding grows with the size of the terms, not with their sum.
    size = row.size + float(np.linalg.norm(pairs)) + abs(bias or 0.0)
    score = {
        "kind": layer_run.layer_key[0],
        "layer": layer,
        "head": head,
        "query": query_position,
        "key": key_position,
        "query_token": queries.labels[query_position],
        "key_token": keys.labels[key_position],
        "weight": row.weights[key_position],
        "score": row.scores[key_position],
        "mean": row.scores[row.may].mean(),
        "n_keys": row.may.sum(),
        "masked_before": (~row.may[:query_position]).sum(),
        "masked_after": (~row.may[query_position:]).sum(),
        "softcap": layer_run.inputs.softcap,
        "bias": bias,
        "rounding": ROUNDING * row.eps * size,
    }
    tables = {"parts": parts, "score": Table.of(Why.TABLES["score"], [score])}
    result = Why(layer_run.run, {"text": layer_run.text}, {}, tables, {"pairs": pairs})
    require_close(
        f"something else adds to the stream of {model.info.name}: the score of {result.name} differs from the sum of "
        "what its heads, its feed-forward networks, its embeddings and biases add",
        result.discrepancy,
        result.score["rounding"],
        "what the head does can still be seen: attnscope ablate",
    )
    return result


class _Row(NamedTuple):
    """Hold the scores of one query of one head, as the model itself computes them; arrays are (key,), float64.

    Attributes:
        scores: The scores before the soft cap and softmax, with the bias.
        weights: The weights after softmax.
        may: Which keys the query may attend to.
        bias: What the model adds to the products of query and keys; None = nothing.
        size: The largest possible product of query and key: scale times the length of the query times that of the
            longest key.
        eps: The relative rounding of the model's precision.
    """

    scores: Floats
    weights: Floats
    may: NDArray[np.bool_]
    bias: Floats | None
    size: float
    eps: float


def _row_of(model: Model, layer_run: OneLayer, query: int) -> _Row:
    """Return the scores of the query at a position; refuse a model that adds a bias after a soft cap."""
    inputs = layer_run.inputs
    (head,) = layer_run.heads
    if inputs.softcap is not None and inputs.bias is not None:
        raise AttnscopeError(
            f"{model.info.name} adds a bias after it caps scores: such a score is no sum of both",
            "choose a model with one of them",
        )
    assert layer_run.around is not None  # a model was run
    call = select_heads(layer_run.around.call, [head])
    weights = array_of(attention_weights(call)[0, 0, query])
    # Recompute the scores in float64 from the model's query, (d_head,), and keys, (key, d_head).
    query_vector = array_of(call.query[0, 0, query])
    key_vectors = array_of(call.key[0, 0])
    scores = inputs.scale * (key_vectors @ query_vector)
    # Masks and biases are (1 or n_heads, query, key). `head % 1` is 0: the one that all heads share.
    may = np.ones(len(scores), np.bool_)
    if inputs.may is not None:
        may = inputs.may[head % len(inputs.may), query]
    bias = None
    if inputs.bias is not None:
        bias = inputs.bias[head % len(inputs.bias), query]
        scores = scores + bias
    longest_key = np.linalg.norm(key_vectors[may], axis=1).max()
    size = inputs.scale * float(np.linalg.norm(query_vector) * longest_key)
    return _Row(scores, weights, may, bias, size, torch.finfo(call.query.dtype).eps)


def _strongest_key(row: _Row, keys: Tokens, kind: str) -> int:
    """Return the position of the key with the most attention: of those outside sinks, or of all if there is none."""
    candidates = row.may & ~keys.sinks(kind)
    if not candidates.any():
        candidates = row.may
    # Weights are at least 0, so -1 keeps all other keys out.
    return int(np.where(candidates, row.weights, -1.0).argmax())


def _parts_and_pairs(
    model: Model, layer_run: OneLayer, query: int, key_weights: Floats
) -> tuple[Table, Floats]:
    """Return the table of parts, and what each pair of them adds to a weighted sum of scores, Σ_k w_k s_qk.

    Args:
        model: The model.
        layer_run: The attention, with one chosen head.
        query: The position of the query.
        key_weights: The weights w, (key,).

    Returns:
        The parts in the model's order, each with the sum of its pairs; and the pairs, (part of the query, part of the
        keys).
    """
    assert layer_run.batch is not None  # a model was run
    inputs = layer_run.inputs
    (head,) = layer_run.heads
    score_run = ScoreRun(model, layer_run.batch, layer_run.layer_key)
    # Query heads that share a key head read the same keys.
    kv_head = head // (inputs.n_heads // inputs.n_kv_heads)
    query_weights = np.zeros(len(layer_run.queries))
    query_weights[query] = 1.0
    # What each part adds to the query, and to the weighted sum of keys, Σ_k w_k k: part → (d_head,).
    in_query = score_run.vectors(score_run.call.query, head, query_weights)
    in_keys = score_run.vectors(score_run.call.key, kv_head, key_weights)
    # Stack them, (part, d_head). A part that adds to only one of the two has zeros in the other.
    parts = sorted({*in_query, *in_keys}, key=_order_of)
    zeros = np.zeros(inputs.d_head)
    query_rows = np.stack([in_query.get(part, zeros) for part in parts])
    key_rows = np.stack([in_keys.get(part, zeros) for part in parts])
    pairs = inputs.scale * query_rows @ key_rows.T
    table = Table.of_arrays(
        Why.TABLES["parts"],
        part=[part.name for part in parts],
        kind=[part.kind for part in parts],
        layer=[part.layer for part in parts],
        head=[part.head for part in parts],
        query_nats=pairs.sum(1),
        key_nats=pairs.sum(0),
    )
    return table, pairs


def _order_of(part: ModelPart) -> tuple[bool, int, int, int, str]:
    """Return a sort key for parts: embeddings, then layer by layer its heads and its network, then biases."""
    kinds = ("embedding", "head", "MLP", "bias")
    return part.kind == "bias", part.layer, kinds.index(part.kind), part.head, part.name
