"""Split an attention score into a sum over the parts of the model: heads, feed-forward networks, embeddings, biases.

`models.inside.linear_runs` finds what each part adds to a query or key. `questions.why` holds the result, and draws it.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from attnscope.arrays import Floats
from attnscope.core.attention.seam import attention_weights, select_heads
from attnscope.core.plain_torch import with_default_torch
from attnscope.errors import AttnscopeError, require_close
from attnscope.models.info import require_seam
from attnscope.models.inside.linear_runs import ModelPart, ScoreRun
from attnscope.models.model import Model
from attnscope.questions.why import Why
from attnscope.results.table import Table
from attnscope.results.tokens import Tokens
from attnscope.studies.inputs.reading import Prompt, find_position
from attnscope.studies.one_layer import OneLayer, read_layer, to_numpy

MAX_ROUNDING = 16
"""How far the sum of the parts may be from the score, in units of eps times the size of its terms.

On models of 30 families the difference is at most 4 of these units.
"""


# Inside, the caller's autocast, inference mode and default device are switched off.
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
    """Split one attention score into the parts of the model that its query and its key read.

        s_qk = scale · q · k + bias,  q = Σ_c q_c,  k = Σ_d k_d
        s_qk - mean s_q = Σ_cd scale · q_c · (k_d - mean k_d) + bias - mean bias

    The parts c and d are earlier heads, feed-forward networks, embeddings and biases. What each adds goes through the
    norms, whose divisors stay as they are in the run. Then it goes through the projection and the rotary position of
    its token. The mean is over the keys that the query may attend to, since softmax depends only on the difference from
    it.

    Args:
        model: A loaded model, see `attnscope.load`.
        text: The text or prompt to run it on.
        layer: The head's layer.
        head: Its number.
        query: The token that attends: a token, a word, or its position.
        key: The token that is attended to; None = the token with the most attention, leaving out special tokens and, in
            a decoder, the first token.
        kind: "encoder", "decoder" or "cross"; None = the model's first.

    Raises:
        AttnscopeError: There is no such head or token, a mask hides the key, the model does not show its queries and
            keys, or the parts that are known do not add up to the score.

    Source:
        Elhage et al. 2021, "QK circuits".
    """
    # Refuse a model that computes attention by code of its own, since its queries and keys cannot be read. Then run the
    # model, and compute its own scores of the query. If no key is given, the scores choose one. `layer_key` is the kind
    # of attention and the layer.
    require_seam(model.info, "what its queries and keys are made of")
    layer_run = read_layer(model, text, layer, kind, [head])
    queries = layer_run.queries
    keys = layer_run.keys
    query_position = find_position(query, queries, "--query")
    query_scores = _score_query(model, layer_run, query_position)
    key_position = _find_strongest_key(query_scores, keys, layer_run.layer_key[0])
    if key is not None:
        key_position = find_position(key, keys, "--key")
    if not query_scores.mask[key_position]:
        hint = "choose a key that the query may attend to"
        if key_position > query_position:
            hint += ": an earlier one"
        raise AttnscopeError(
            f"a mask hides token @{key_position} {keys.labels[key_position]} from token @{query_position} "
            f"{queries.labels[query_position]} in layer {layer}",
            hint,
        )

    # The score minus its mean is a weighted sum over keys, Σ_k w_k s_qk. The weight w is -1 / n at each of the n keys
    # that the query may attend to, plus 1 at the chosen key. Compute this sum from pairs of parts as well.
    key_weights = -(query_scores.mask / query_scores.mask.sum())
    key_weights[key_position] += 1.0
    parts_table, pair_terms = _sum_parts_and_pairs(model, layer_run, query_position, key_weights)
    bias = None if query_scores.bias is None else float(query_scores.bias @ key_weights)
    # Rounding grows with the size of the terms. Their sum may be small.
    term_size = query_scores.term_size + float(np.linalg.norm(pair_terms)) + abs(bias or 0.0)
    score_row = {
        "kind": layer_run.layer_key[0],
        "layer": layer,
        "head": head,
        "query": query_position,
        "key": key_position,
        "query_token": queries.labels[query_position],
        "key_token": keys.labels[key_position],
        "weight": query_scores.weights[key_position],
        "score": query_scores.scores[key_position],
        "mean": query_scores.scores[query_scores.mask].mean(),
        "n_keys": query_scores.mask.sum(),
        "masked_before": (~query_scores.mask[:query_position]).sum(),
        # From the query on, the query's own token included.
        "masked_after": (~query_scores.mask[query_position:]).sum(),
        "softcap": layer_run.inputs.softcap,
        "bias": bias,
        "rounding": MAX_ROUNDING * query_scores.eps * term_size,
    }
    tables = {"parts": parts_table, "score": Table.of(Why.TABLES["score"], [score_row])}
    # The text is the corpus. The options are empty: all choices are in the table `score`. The pairs are the only array.
    result = Why(layer_run.run, {"text": layer_run.text}, {}, tables, {"pairs": pair_terms})
    require_close(
        f"something else adds to the stream of {model.info.name}: the score of {result.name} differs from the sum of "
        "what its heads, its feed-forward networks, its embeddings and biases add",
        result.discrepancy,
        result.score["rounding"],
        "what the head does can still be seen: attnscope ablate",
    )
    return result


class _QueryScores(NamedTuple):
    """Hold the scores of one query of one head, as the model itself computes them; arrays are (key,), float64.

    Attributes:
        scores: The scores before the soft cap and softmax, with the bias.
        weights: The weights after softmax.
        mask: True = the query may attend to the key.
        bias: The position biases, which the model adds to the products of query and keys; None = there are none.
        term_size: A bound on the products of query and key: scale times the length of the query times the length of the
            longest key.
        eps: The relative rounding error of the model's precision.
    """

    scores: Floats
    weights: Floats
    mask: NDArray[np.bool_]
    bias: Floats | None
    term_size: float
    eps: float


def _score_query(model: Model, layer_run: OneLayer, query: int) -> _QueryScores:
    """Return the scores of the query at a position. Refuse a model with both a soft cap and a bias."""
    inputs = layer_run.inputs
    (head,) = layer_run.heads
    if inputs.softcap is not None and inputs.bias is not None:
        raise AttnscopeError(
            f"{model.info.name} adds a bias after it caps scores: such a score is no sum of both",
            "choose a model with one of them",
        )
    assert layer_run.projected_attention is not None  # only for the worked example, which has no model
    call = select_heads(layer_run.projected_attention.call, [head])
    weights = to_numpy(attention_weights(call)[0, 0, query])
    # Recompute the scores in float64 from the model's query, (d_head,), and keys, (key, d_head).
    query_vector = to_numpy(call.query[0, 0, query])
    key_vectors = to_numpy(call.key[0, 0])
    scores = inputs.scale * (key_vectors @ query_vector)
    # Masks and biases are (1 or n_heads, query, key). If all heads share one, its index is 0, and so is `head % 1`.
    mask = np.ones(len(scores), np.bool_)
    if inputs.may is not None:
        mask = inputs.may[head % len(inputs.may), query]
    bias = None
    if inputs.bias is not None:
        bias = inputs.bias[head % len(inputs.bias), query]
        scores = scores + bias
    longest_key = np.linalg.norm(key_vectors[mask], axis=1).max()
    term_size = inputs.scale * float(np.linalg.norm(query_vector) * longest_key)
    return _QueryScores(scores, weights, mask, bias, term_size, torch.finfo(call.query.dtype).eps)


def _find_strongest_key(query_scores: _QueryScores, keys: Tokens, kind: str) -> int:
    """Return the position of the key with the most attention, sinks left out. If all keys are sinks, take any key."""
    candidates = query_scores.mask & ~keys.sinks(kind)
    if not candidates.any():
        candidates = query_scores.mask
    # Weights are at least 0, so no key that is set to -1 is the largest.
    return int(np.where(candidates, query_scores.weights, -1.0).argmax())


def _sum_parts_and_pairs(
    model: Model, layer_run: OneLayer, query: int, key_weights: Floats
) -> tuple[Table, Floats]:
    """Return the table of parts, and what each pair of them adds to a weighted sum of scores, Σ_k w_k s_qk.

    Args:
        model: The model.
        layer_run: The attention, with one chosen head.
        query: The position of the query.
        key_weights: The weights w of the keys, (key,).

    Returns:
        The table of parts in the model's order, with the sums over their pairs; and the terms of the pairs, (part in
        the query, part in the keys).
    """
    assert layer_run.batch is not None  # only for the worked example, which has no model
    inputs = layer_run.inputs
    (head,) = layer_run.heads
    score_run = ScoreRun(model, layer_run.batch, layer_run.layer_key)
    # With grouped queries, several query heads share a key head.
    kv_head = head // (inputs.n_heads // inputs.n_kv_heads)
    # Weights of 1 for the query and 0 for other tokens pick out the query.
    query_weights = np.zeros(len(layer_run.queries))
    query_weights[query] = 1.0
    # What each part adds to the query, and to the weighted sum of keys, Σ_k w_k k: part → (d_head,).
    query_vectors_by_part = score_run.vectors_by_part(score_run.call.query, head, query_weights)
    key_vectors_by_part = score_run.vectors_by_part(score_run.call.key, kv_head, key_weights)
    # Stack them, (part, d_head). A part that adds to only one of the two has zeros in the other.
    parts = sorted({*query_vectors_by_part, *key_vectors_by_part}, key=_sort_key)
    zeros = np.zeros(inputs.d_head)
    query_rows = np.stack([query_vectors_by_part.get(part, zeros) for part in parts])
    key_rows = np.stack([key_vectors_by_part.get(part, zeros) for part in parts])
    pair_terms = inputs.scale * query_rows @ key_rows.T
    table = Table.of_arrays(
        Why.TABLES["parts"],
        part=[part.name for part in parts],
        kind=[part.kind for part in parts],
        layer=[part.layer for part in parts],
        head=[part.head for part in parts],
        query_nats=pair_terms.sum(1),
        key_nats=pair_terms.sum(0),
    )
    return table, pair_terms


def _sort_key(part: ModelPart) -> tuple[bool, int, int, int, str]:
    """Return a sort key for parts: embeddings, then layer by layer its heads and its network, then biases."""
    kinds = ("embedding", "head", "MLP", "bias")
    return part.kind == "bias", part.layer, kinds.index(part.kind), part.head, part.name
