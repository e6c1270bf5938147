"""Take an attention score apart into the parts of the model that add to it. Drawing is left to `drawing`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscope.choice import Choice
from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import AttentionCall, allowed, attend, attention_weights, select_heads
from attnscope.core.plain_torch import with_plain_torch
from attnscope.errors import AttnscopeError, require_rounding
from attnscope.models.inside.linear_runs import Part, ScoreRuns, TracedScores
from attnscope.models.model import Batch, Model
from attnscope.questions.why import Why
from attnscope.results.table import Table
from attnscope.results.tokens import Tokens
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.reading import Prompt, Reading, batch_of, position_of, read

Floats = NDArray[np.float64]

ROUNDING = 16
"""Of the last digit of the terms: how far their sum may be off. Measured on 30 families: at most 4."""


@with_plain_torch
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

    The parts c and d are earlier heads, feed-forward networks, embeddings and biases. Each goes through the norms with
    their lengths frozen, the projections, and the rotary turn of its token. The mean is over the keys that the query
    may attend to, since softmax sees only that.

    Args:
        model: A loaded model, see `attnscope.load`.
        text: The text or prompt to run it on.
        layer: The head's layer.
        head: Its number.
        query: The token that attends: a token, a word, or its number.
        key: The token that is attended to; None = the one with the most attention, apart from special tokens and, in a
            decoder, the first one.
        kind: "encoder", "decoder" or "cross"; None = the model's first.

    Raises:
        AttnscopeError: There is no such head or token, a mask hides the key, the model does not show its queries and
            keys, or something adds to its stream that is not known.

    Source:
        Elhage et al. 2021, "QK circuits".
    """
    # What was asked.
    Choice((layer,), (head,)).within(model.info)
    place: Place = (model.info.choose_kind(kind), layer)  # type: ignore[assignment]  # a kind of attention
    reading = read(model, Prompt(text) if isinstance(text, str) else text)
    queries, keys = reading.queries_and_keys(place[0])
    query_position = position_of(query, queries, "--query")

    # The model's own scores of the query.
    runs = ScoreRuns(model)
    batch = batch_of(reading, model.info.device)
    row = _row_of(_run_head(model, batch, place, head), query_position)
    key_position = _strongest_key(row, keys, place[0]) if key is None else position_of(key, keys, "--key")
    if not row.may[key_position]:
        raise AttnscopeError(
            f"a mask hides token @{key_position} {keys.labels[key_position]} from token @{query_position} "
            f"{queries.labels[query_position]} in layer {layer}",
            "choose a key that the query may attend to" + (": an earlier one" if key_position > query_position else ""),
        )

    # The same score as a sum over pairs of parts.
    less_mean = row.less_mean(key_position)
    parts, pairs = _parts_and_pairs(runs.trace(batch, [place]), place, head, query_position, less_mean)
    result = _result(model, reading, place, head, (query_position, key_position), row, parts, pairs)
    require_rounding(
        f"something else adds to the stream of {model.info.name}: the score of {result.name} differs from the sum of "
        "what its heads, its feed-forward networks, its embeddings and biases add",
        result.off,
        result.score["rounding"],
        "what the head does can still be seen: attnscope ablate",
    )
    return result


def _strongest_key(row: _Row, keys: Tokens, kind: str) -> int:
    """Return the position of the key with the most attention that is no sink, if there is one."""
    others = row.may & ~keys.sinks(kind)
    candidates = others if others.any() else row.may
    return int(np.where(candidates, row.weights, -1.0).argmax())


def _result(
    model: Model,
    reading: Reading,
    place: Place,
    head: int,
    cell: tuple[int, int],
    row: _Row,
    parts: tuple[Part, ...],
    pairs: Floats,
) -> Why:
    """Return the result for a cell, (query, key), of a head."""
    query, key = cell
    kind, layer = place
    queries, keys = reading.queries_and_keys(kind)
    hidden = np.flatnonzero(~row.may)
    bias = None if row.bias is None else float(row.bias @ row.less_mean(key))
    # Rounding grows with the size of the terms, not with their sum.
    size = row.size + float(np.linalg.norm(pairs)) + abs(bias or 0.0)
    # The cell's numbers, then one row per part.
    score = {
        "kind": kind,
        "layer": layer,
        "head": head,
        "query": query,
        "key": key,
        "query_token": queries.labels[query],
        "key_token": keys.labels[key],
        "weight": row.weights[key],
        "score": row.scores[key],
        "mean": row.scores[row.may].mean(),
        "n_keys": row.may.sum(),
        "masked_before": (hidden < query).sum(),
        "masked_after": (hidden >= query).sum(),
        "softcap": row.softcap,
        "bias": bias,
        "rounding": ROUNDING * row.eps * size,
    }
    columns = {
        "part": [part.name for part in parts],
        "kind": [part.kind for part in parts],
        "layer": [part.layer for part in parts],
        "head": [part.head for part in parts],
        "query_nats": pairs.sum(1),
        "key_nats": pairs.sum(0),
    }
    tables = {
        "parts": Table.of_arrays(Why.TABLES["parts"], **columns),
        "score": Table.of(Why.TABLES["score"], [score]),
    }
    return Why(run_of(model.info, reading.notes), {"text": reading.text}, {}, tables, {"pairs": pairs})


@dataclass(frozen=True, eq=False)
class _Row:
    """Hold one query's scores of one head, as the model itself computes them; each (key,), float64.

    Attributes:
        scores: Before softmax and cap, with the bias.
        may: Which keys it may attend to.
        bias: What is added to the products; None = nothing is.
        softcap: As of the call.
        size: The length of the query times that of the longest key, scaled.
        eps: The last digit of the precision that they are computed in.
    """

    scores: Floats
    weights: Floats
    may: NDArray[np.bool_]
    bias: Floats | None
    softcap: float | None
    size: float
    eps: float

    def less_mean(self, key: int) -> Floats:
        """Return weights of keys, (key,), whose sum is one key less the mean of all that the query may attend to."""
        weights = np.zeros(len(self.may))
        weights[key] = 1.0
        weights -= self.may / self.may.sum()
        return weights


def _run_head(model: Model, batch: Batch, place: Place, head: int) -> AttentionCall:
    """Run the model as it is, and keep one head's attention; refuse a bias that is added after a cap."""
    seen: list[AttentionCall] = []

    def keep(call: AttentionCall) -> Tensor:
        if (call.kind, call.layer) == place:
            seen.append(select_heads(call, [head]))
        return attend(call)

    with torch.no_grad():
        model.run(batch, keep)
        call = seen[-1]
        if call.softcap is not None and call.bias is not None:
            raise AttnscopeError(
                f"{model.info.name} adds a bias after it caps scores: such a score is no sum of both",
                "choose a model with one of them",
            )
    return call


def _row_of(call: AttentionCall, query: int) -> _Row:
    """Return one query's scores."""
    with torch.no_grad():
        weights = _of_query(attention_weights(call), call, query)
        mask = allowed(call)
    # Recompute the scores in float64 from the model's queries and keys.
    queries = call.query[0, 0, query].double().cpu().numpy()  # (d_head,)
    keys = call.key[0, 0].double().cpu().numpy()  # (key, d_head)
    may = np.ones(len(keys), np.bool_) if mask is None else _of_query(mask, call, query)
    bias = None if call.bias is None else _of_query(call.bias, call, query)
    scores = call.scale * (keys @ queries)
    if bias is not None:
        scores = scores + bias
    size = call.scale * float(np.linalg.norm(queries) * np.linalg.norm(keys[may], axis=1).max())
    return _Row(scores, weights, may, bias, call.softcap, size, torch.finfo(call.query.dtype).eps)


def _of_query(values: Tensor, call: AttentionCall, query: int) -> NDArray[Any]:
    """Return the row of a query, (key,), of a tensor that broadcasts to (1, 1, query, key)."""
    shape = (1, 1, call.query.shape[2], call.key.shape[2])
    row = values.detach()[(None,) * (4 - values.ndim)].expand(shape)[0, 0, query]
    if row.is_floating_point():
        row = row.double()
    numbers: NDArray[Any] = row.cpu().numpy()
    return numbers


def _parts_and_pairs(
    traced: TracedScores, place: Place, head: int, query: int, key_weights: Floats
) -> tuple[tuple[Part, ...], Floats]:
    """Return the parts in the model's order, and what each pair of them adds to a score, (part, part).

    Args:
        traced: The batch that was run.
        place: Where the head is.
        head: The head.
        query: The query's position.
        key_weights: The weights of the keys whose sum is read, (key,).
    """
    # Query heads that share a key head read the same keys.
    call = traced.calls[place]
    kv_head = head // (call.n_heads // call.n_kv_heads)
    query_weights = np.zeros(call.query.shape[2])
    query_weights[query] = 1.0
    # Trace the query, and the weighted sum of keys, back to the parts. (d_head,) each
    read = _vectors_of(traced, call.query, head, query_weights)
    offered = _vectors_of(traced, call.key, kv_head, key_weights)
    # A part may reach one side alone; it adds 0 on the other.
    parts = tuple(sorted({*read, *offered}, key=_in_order))
    nothing = np.zeros(call.query.shape[3])
    at_query = np.stack([read.get(part, nothing) for part in parts])  # (part, d_head)
    at_keys = np.stack([offered.get(part, nothing) for part in parts])
    return parts, call.scale * at_query @ at_keys.T


def _vectors_of(traced: TracedScores, tensor: Tensor, head: int, weights: Floats) -> dict[Part, Floats]:
    """Return what each part adds to a weighted sum of the queries or keys of a head, (d_head,).

    Args:
        traced: The batch that was run.
        tensor: The queries or keys, (batch, head, token, d_head).
        head: Which of their heads.
        weights: The weight of each token, (token,).
    """
    # One slope per column of the head: their gradients give the whole vector. (d_head, batch, head, token, d_head)
    width = tensor.shape[3]
    each = torch.eye(width, dtype=tensor.dtype, device=tensor.device)
    slopes = tensor.new_zeros(width, *tensor.shape)
    slopes[:, 0, head] = torch.from_numpy(weights).to(each)[None, :, None] * each[:, None]
    return {part: values[:, 0].cpu().numpy() for part, values in traced.along(tensor, slopes).items()}


def _in_order(part: Part) -> tuple[int, int, int, int, str]:
    """Return a sort key for parts: embeddings, then layer by layer its heads and its network, then biases."""
    kinds = ("embedding", "head", "MLP", "bias")
    last = part.kind == "bias"
    return int(last), part.layer, kinds.index(part.kind), part.head, part.name
