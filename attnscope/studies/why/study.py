"""Why does a head attend there? A model, a text, a head and two tokens in, a Why record out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.choice import Choice
from attnscope.core.plain_torch import with_plain_torch
from attnscope.errors import AttnscopeError, require_rounding
from attnscope.models.model import Batch, Model
from attnscope.records import Tokens
from attnscope.records.why.score import Part, Why
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.reading import Prompt, Reading, batch_of, read

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.attention.probes import Place
    from attnscope.core.attention.seam import AttentionCall
    from attnscope.models.inside.score_parts import TracedScores

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
    """Takes one attention score apart: which parts of the model its query reads, and which its key.

        s_qk = scale · q · k + bias,  q = Σ_c q_c,  k = Σ_d k_d
        s_qk - mean s_q = Σ_cd scale · q_c · (k_d - mean k_d) + bias - mean bias

    The parts c and d are earlier heads, feed-forward networks, embeddings and biases, each through the norms with their
    lengths frozen, the projections, and the rotary turn of its token. The mean is over the keys that the query may
    attend to, since softmax sees only that.

    Args:
        model: A loaded model, see `attnscope.load`.
        text: What to run it on.
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
    from attnscope.models.inside.score_parts import ScoreRuns

    Choice((layer,), (head,)).within(model.info)
    kind = model.info.choose_kind(kind)
    prompt = Prompt(text) if isinstance(text, str) else text
    reading = read(model, prompt)
    queries, keys = reading.queries_and_keys(kind)
    query_at = _position_of(query, queries, "--query")
    runs, batch = ScoreRuns(model), batch_of(reading, model.info.device)
    place: Place = (kind, layer)  # type: ignore[assignment]
    row = _row_of(_run_head(model, batch, place, head), query_at)
    if key is None:
        others = row.may & ~keys.sinks(kind)
        key_at = int(np.where(others if others.any() else row.may, row.weights, -1.0).argmax())
    else:
        key_at = _position_of(key, keys, "--key")
    if not row.may[key_at]:
        raise AttnscopeError(
            f"a mask hides token @{key_at} {keys.labels[key_at]} from token @{query_at} {queries.labels[query_at]} in "
            f"layer {layer}",
            "choose a key that the query may attend to" + (": an earlier one" if key_at > query_at else ""),
        )
    less_mean = row.less_mean(np.eye(len(keys))[key_at])
    pairs = _parts_and_pairs(runs.trace(batch, [place]), place, head, query_at, less_mean)
    return _record(model, reading, place, head, (query_at, key_at), row, pairs)


def _record(
    model: Model,
    reading: Reading,
    place: Place,
    head: int,
    cell: tuple[int, int],
    row: _Row,
    parts_and_pairs: tuple[tuple[Part, ...], NDArray[np.float64]],
) -> Why:
    """The record of a cell; an AttnscopeError if the parts do not sum to the score."""
    (query, key), (parts, pairs), (kind, layer) = cell, parts_and_pairs, place
    queries, keys = reading.queries_and_keys(kind)
    hidden = np.flatnonzero(~row.may)
    bias = None if row.bias is None else float(row.bias @ row.less_mean(np.eye(len(keys))[key]))
    record = Why(
        run=run_of(model.info, reading.notes), text=reading.text, kind=kind, layer=layer, head=head, queries=queries,
        keys=keys, query=query, key=key, weight=float(row.weights[key]), score=float(row.scores[key]),
        mean=float(row.scores[row.may].mean()), masked_before=int((hidden < query).sum()),
        masked_after=int((hidden >= query).sum()), softcap=row.softcap, parts=parts, pairs=pairs, bias=bias,
        rounding=ROUNDING * row.eps * float(row.size + np.linalg.norm(pairs) + abs(bias or 0.0)),
    )  # fmt: skip
    require_rounding(
        f"something else adds to the stream of {model.info.name}: the score of {record.name} differs from the sum of "
        "what its heads, its feed-forward networks, its embeddings and biases add",
        record.off, record.rounding, "what the head does can still be seen: attnscope ablate",
    )  # fmt: skip
    return record


@dataclass(frozen=True, eq=False)
class _Row:
    """One query's scores of one head, as the model itself computes them; each (key,), float64.

    Attributes:
        scores: Before softmax and cap, with the bias.
        may: Which keys it may attend to.
        bias: What is added to the products; None = nothing is.
        softcap: As of the call.
        size: The length of the query times that of the longest key, scaled.
        eps: The last digit of the precision that they are computed in.
    """

    scores: NDArray[np.float64]
    weights: NDArray[np.float64]
    may: NDArray[np.bool_]
    bias: NDArray[np.float64] | None
    softcap: float | None
    size: float
    eps: float

    def less_mean(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Weights of keys, (key,), less those of the mean of all that the query may attend to."""
        less: NDArray[np.float64] = weights - weights.sum() * self.may / self.may.sum()
        return less


def _run_head(model: Model, batch: Batch, place: Place, head: int) -> AttentionCall:
    """Runs the model as it is, and keeps one head's attention; refuses a bias that is added after a cap."""
    import torch

    from attnscope.core.attention.seam import attend, select_heads

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
    """One query's scores."""
    import torch

    from attnscope.core.attention.seam import allowed, attention_weights

    def row_of(values: Tensor) -> NDArray[Any]:
        shape = (1, 1, call.query.shape[2], call.key.shape[2])
        values = values.detach()[(None,) * (4 - values.ndim)].expand(shape)[0, 0, query]
        numbers: NDArray[Any] = (values.double() if values.is_floating_point() else values).cpu().numpy()
        return numbers

    with torch.no_grad():
        weights, mask = row_of(attention_weights(call)), allowed(call)
    q, k = call.query[0, 0, query].double().cpu().numpy(), call.key[0, 0].double().cpu().numpy()
    may = np.ones(len(k), np.bool_) if mask is None else row_of(mask)
    bias = None if call.bias is None else row_of(call.bias)
    size = call.scale * float(np.linalg.norm(q) * np.linalg.norm(k[may], axis=1).max())
    scores = call.scale * (k @ q) + (0.0 if bias is None else bias)
    return _Row(scores, weights, may, bias, call.softcap, size, torch.finfo(call.query.dtype).eps)


def _parts_and_pairs(
    traced: TracedScores, place: Place, head: int, query: int, keys: NDArray[np.float64]
) -> tuple[tuple[Part, ...], NDArray[np.float64]]:
    """Return the parts, in the model's order, and what each pair of them adds to a score, (part, part), float64.

    Args:
        traced: The batch that was run.
        place: Where the head is.
        head: The head.
        query: The query's position.
        keys: The weights of the keys whose sum is read, (key,).
    """
    import torch

    call = traced.calls[place]
    kv_head = head // (call.n_heads // call.n_kv_heads)

    def along(tensor: Tensor, number: int, weights: NDArray[np.float64]) -> dict[Part, NDArray[np.float64]]:
        width = tensor.shape[3]
        each = torch.eye(width, dtype=tensor.dtype, device=tensor.device)
        slopes = tensor.new_zeros(width, *tensor.shape)
        slopes[:, 0, number] = torch.from_numpy(weights).to(each)[None, :, None] * each[:, None]
        return {part: values[:, 0].cpu().numpy() for part, values in traced.along(tensor, slopes).items()}

    read = along(call.query, head, np.eye(call.query.shape[2])[query])
    offered = along(call.key, kv_head, keys)
    parts = tuple(sorted({*read, *offered}, key=_in_order))
    nothing = np.zeros(call.query.shape[3])
    at_query = np.stack([read.get(part, nothing) for part in parts])  # (part, d_head)
    at_keys = np.stack([offered.get(part, nothing) for part in parts])
    return parts, call.scale * at_query @ at_keys.T


def _in_order(part: Part) -> tuple[int, int, int, int, str]:
    """A sort key for parts: embeddings, then layer by layer its heads and its network, then biases."""
    kinds = ("embedding", "head", "MLP", "bias")
    last = part.kind == "bias"
    return int(last), part.layer, kinds.index(part.kind), part.head, part.name


def _position_of(name: str | int, tokens: Tokens, option: str) -> int:
    """The position of the one token that is named; refuses none and several."""
    places = tokens.find_one(str(name)) if isinstance(name, str) else ()
    if not places and str(name).isdecimal():
        places = (int(name),) if int(name) < len(tokens) else ()
    if not places:
        raise tokens.refuse(str(name))
    if len(places) > 1:
        several = " ".join(f"@{at} {tokens.labels[at]}" for at in places)
        raise AttnscopeError(f"{name!r} names several tokens: {several}", f"name one of them: {option} @{places[-1]}")
    return places[0]
