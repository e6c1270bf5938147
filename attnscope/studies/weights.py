"""Read what heads copy, match, read and write from their weights alone. Runs on texts are left to other studies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from attnscope.core.attention.seam import AttentionCall, attend, attention_weights
from attnscope.core.plain_torch import with_plain_torch
from attnscope.core.weights import (
    eigenvalue_scores,
    random_rows,
    receiver,
    sender,
    shares,
    singular_directions,
    spread,
)
from attnscope.models.inside.projections import hooks
from attnscope.models.inside.stream import Attention, Stream, stream_of
from attnscope.models.model import Batch, Model
from attnscope.questions.weights import (
    COMPOSITIONS,
    N_DRAWS,
    SCORE_PARTS,
    SHARES,
    Composition,
    HeadWeights,
    WeightsOptions,
)
from attnscope.results.table import Floats, Table
from attnscope.studies.inputs.provenance import run_of

N_TEXTS, N_PLACES = 64, 16
"""Tokens that what places do is a mean over, and how many places."""

N_DIRECTIONS, N_TOKENS = 2, 5
"""Singular directions of a head, and tokens at each end of one."""


@with_plain_torch
def weights(
    model: Model, options: WeightsOptions | None = None, *, report: Callable[[int, int], None] | None = None
) -> HeadWeights:
    """Say what each head copies, matches, reads and writes, and which heads feed which, from the weights alone.

    Norms are folded into the weights around them, except for the length that they divide by. All products go through
    matrices of d_head x d_head.

    Args:
        model: A loaded model, see `attnscope.load`: an encoder or a decoder of text.
        options: Seed and further choices; None = the defaults.
        report: Called after each layer with the number done, and the number of all.

    Raises:
        AttnscopeError: Where the model keeps its weights is not known; says which and why.
    """
    stream = stream_of(model)
    with torch.no_grad():
        return _Weights(model, stream, options or WeightsOptions()).study(report)


@dataclass(frozen=True, eq=False)
class _Ends:
    """Hold the tokens at both ends of a head.

    Attributes:
        ids: Their numbers.
        read: Their embeddings as they enter the stream, (token, d_model).
        looked_up: The same at length 1, centred where norms centre.
        written: What stands for writing each, (token, d_model), less its mean over tokens.
        name: What that is.
    """

    ids: Tensor
    read: Tensor
    looked_up: Tensor
    written: Tensor
    name: str


class _Weights:
    """Turn the weights of a model into a result, layer by layer."""

    def __init__(self, model: Model, stream: Stream, options: WeightsOptions) -> None:
        self._model = model
        self._stream = stream
        self._seed = options.seed
        self._centres = _centres(stream)
        self._notes = list(stream.notes)
        self._ends = self._find_ends()
        self._cores: dict[str, Tensor] = {}
        self._draws: dict[tuple[str, int], Tensor] = {}
        self._columns: dict[str, list[Floats]] = {}
        self._directions: list[dict[str, Any]] = []
        if stream.is_post_norm:
            self._notes.append(
                "this model normalises the stream (post-norm): scores leave out norms between two heads, as if a "
                "head read exactly what another wrote"
            )
        if stream.unembedding is not None and not stream.is_direct:
            self._notes.append(
                "between the last layer and the unembedding lies a layer that is left out: tokens are those whose rows "
                "of the unembedding are likest to what is written"
            )

    def study(self, report: Callable[[int, int], None] | None) -> HeadWeights:
        """Read all layers, and return the result."""
        # Number the heads layer by layer. (head,)
        attentions = self._stream.attentions
        layers = np.concatenate([np.full(each.n_heads, each.layer) for each in attentions])
        heads = np.concatenate([np.arange(each.n_heads) for each in attentions])
        n_done = 0
        for number, attention in enumerate(attentions):
            self._add_layer(attention, n_done)
            n_done += attention.n_heads
            if report is not None:
                report(number + 1, len(attentions))
        columns = {name: np.concatenate(parts) for name, parts in self._columns.items()}
        # Run positions alone, and compose all pairs of heads.
        places, by_position = _read_positions(self._model, self._stream, self._some_ids())
        composed = _compose(self._stream, self._model.info.d_model)
        table = Table.of_arrays(
            HeadWeights.TABLES["heads"],
            kind=[self._stream.kind] * n_done,
            layer=layers,
            head=heads,
            **columns,
            **by_position,
        )
        options = {
            "kind": self._stream.kind,
            "ends": self._ends.name if self._ends is not None else "",
            "places": places,
            "n_places": N_PLACES,
            "dimension": composed.dimension,
            "n_draws": N_DRAWS,
        }
        arrays: dict[str, NDArray[Any]] = {
            "composition": composed.share,
            "sender_spread": composed.sender_spread,
            "receiver_spread": composed.receiver_spread,
        }
        directions = sorted(self._directions, key=lambda row: int(row["head"]))
        tables = {"heads": table, "directions": Table.of(HeadWeights.TABLES["directions"], directions)}
        run = run_of(self._model.info, self._notes) | {"seed": self._seed}
        return HeadWeights(run, {}, options, tables, arrays)

    # Tokens

    def _embed(self, ids: Tensor) -> Tensor:
        """Return static embeddings of some tokens, (token, d)."""
        rows = self._model.static_embeddings(ids[None])
        assert rows is not None, "a model whose stream is known has them"
        return rows[0]

    def _find_ends(self) -> _Ends | None:
        # Choose the tokens that have rows in both embeddings and unembedding.
        stream, d_model = self._stream, self._model.info.d_model
        numbers = self._model.tokenizer.ordinary_ids()
        if stream.unembedding is not None:
            n_rows = len(stream.unembedding)
            numbers = [number for number in numbers or range(n_rows) if number < n_rows]
        if not numbers:
            self._notes.append("the model's vocabulary is not known, so that nothing is said of tokens")
            return None
        ids = torch.tensor(numbers)
        width = self._embed(ids[:1]).shape[-1]
        if width != d_model:
            self._notes.append(
                f"embeddings have width {width}, the stream {d_model}: nothing is said of tokens (copying, "
                "matching, what is read and written)"
            )
            return None
        # The tokens as the first layer reads them: in float32 or more, normed. (token, d_model)
        read = torch.cat([self._embed(part) for part in torch.split(ids, 8192)])
        read = read.to(torch.promote_types(read.dtype, torch.float32))
        if stream.embedding_norm is not None:
            read = stream.embedding_norm.apply(read)
        # The rows that writing a token aligns with: the unembedding, else the embeddings. (token, d_model)
        written, name = read, "static embeddings"
        if stream.unembedding is not None:
            name = "unembedding"
            written = stream.unembedding[ids.to(stream.unembedding.device)]
            if stream.final_norm is not None:
                written = stream.final_norm.fold(written)
        # Tokens are looked up by direction alone: centre them, and scale to a root mean square of 1.
        looked_up = read - read.mean(1, keepdim=True) if self._centres else read
        length = looked_up.pow(2).mean(1, keepdim=True).sqrt().clamp(min=1e-30)
        return _Ends(ids, read, looked_up / length, written - written.mean(0), name)

    def _some_ids(self) -> Tensor:
        """Return tokens from all over the vocabulary."""
        numbers = self._model.tokenizer.ordinary_ids() if self._ends is None else self._ends.ids.tolist()
        numbers = numbers or list(range(8, 16))
        return torch.tensor([numbers[i * len(numbers) // N_TEXTS] for i in range(N_TEXTS)])

    def _tokens(self, embeddings: Tensor, directions: Tensor) -> list[tuple[str, str]]:
        """Return the tokens at both ends of each direction, (n, d_model), by the rows of tokens."""
        assert self._ends is not None
        scores = embeddings @ directions.to(embeddings).T  # (token, n)
        n_tokens = min(N_TOKENS, len(embeddings))
        ends = []
        for largest in (True, False):
            rows = scores.topk(n_tokens, 0, largest=largest).indices.T
            ends.append([" ".join(map(self._spell, ids)) for ids in self._ends.ids[rows.cpu()].tolist()])
        return list(zip(*ends, strict=True))

    def _spell(self, number: int) -> str:
        """Return a token with a mark where a space begins it, as several differ in nothing else."""
        token = str(self._model.tokenizer.spell(number))
        return "·" + token[1:] if token.startswith(" ") else token

    # Heads

    def _add_layer(self, attention: Attention, first: int) -> None:
        """Add what is known of the heads of a layer, of which the first is the head number `first`."""
        # Per-head matrices: reads (head, d_head, d_model), writes (head, d_model, d_head).
        query, key, value = (attention.reads(role) for role in ("query", "key", "value"))
        output = _writes_of(attention, centres=self._centres)
        transposed = None if query is None else query.mT
        for name, reads, writes in (("copying", value, output), ("matching", key, transposed)):
            scores = self._scores(name, reads, writes, attention.n_heads)
            for part, numbers in zip(SCORE_PARTS, scores.T, strict=True):
                self._columns.setdefault(name + part, []).append(numbers)
        if self._ends is None:
            return
        self._add_directions("writes", output, value, self._ends.written, first)
        self._add_directions("seeks", None if key is None else key.mT, query, self._ends.looked_up, first)

    def _scores(self, name: str, reads: Tensor | None, writes: Tensor | None, n_heads: int) -> Floats:
        """Return the score of each head, and the mean, least and largest of random ones, (head, 4)."""
        if reads is None or writes is None or self._ends is None:
            return np.full((n_heads, len(SCORE_PARTS)), np.nan)
        # Random heads of one width and core are drawn once, and serve all layers.
        core = self._core(name)
        width = reads.shape[1]
        if (name, width) not in self._draws:
            left, right = (random_rows(N_DRAWS, width, len(core), self._seed + end).to(core) for end in (0, 1))
            self._draws[name, width] = left @ core @ right.mT
        own, chance = eigenvalue_scores(reads, core, writes, self._draws[name, width])
        scores = torch.stack([own, chance.mean(1), chance.amin(1), chance.amax(1)], 1)
        return np.asarray(scores.cpu().double().numpy())

    def _core(self, name: str) -> Tensor:
        """Return E U over the vocabulary, (d_model, d_model), of what is read and what is written."""
        assert self._ends is not None
        if name not in self._cores:
            read = self._ends.read
            # Softmax does not see what a query's scores have in common over the vocabulary, nor is it a match.
            other = self._ends.written.to(read) if name == "copying" else read - read.mean(0, keepdim=True)
            core = (read.T @ other).double()
            # What no head can read must not score: centre both sides.
            if self._centres:
                core = core - core.mean(0, keepdim=True)
                core = core - core.mean(1, keepdim=True)
            self._cores[name] = core
        return self._cores[name]

    def _add_directions(
        self, what: str, left: Tensor | None, right: Tensor | None, targets: Tensor, first: int
    ) -> None:
        """Add the first singular directions of left @ right of each head, with the tokens at both ends of each."""
        if left is None or right is None:
            return
        assert self._ends is not None
        # Take the first singular directions of each head. (head, n, d_model)
        n = min(N_DIRECTIONS, right.shape[1])
        singular = [singular_directions(a, b, n) for a, b in zip(left, right, strict=True)]
        written, read, share = zip(*singular, strict=True)
        sources = self._tokens(self._ends.looked_up, torch.cat(read))
        goals = self._tokens(targets, torch.cat(written))
        for number, portion in enumerate(torch.cat(share).tolist()):
            # The share stands beside the first end of a direction; its other end is the opposite.
            for end, known in enumerate((portion, np.nan)):
                ends = {"source": sources[number][end], "target": goals[number][end]}
                self._directions.append({"head": first + number // n, "of": what, "share": known, **ends})


# Composition


def _centres(stream: Stream) -> bool:
    """Return whether every norm takes the mean away, so that no head can read it."""
    norms = [attention.norm for attention in stream.attentions]
    if stream.unembedding is not None:
        norms.append(stream.final_norm)
    return all(norm is not None and norm.centres for norm in norms)


def _writes_of(attention: Attention, *, centres: bool) -> Tensor | None:
    """Return W_O of each head, without what no head can read if all norms centre."""
    writes = attention.writes
    return writes - writes.mean(1, keepdim=True) if writes is not None and centres else writes


def _compose(stream: Stream, d_model: int) -> Composition:
    """Return shares of all pairs, and the spreads of what is sent and received."""
    # Every pair (sender, receiver), heads counted layer by layer; earlier layers send. (composition, sender, receiver)
    centres = _centres(stream)
    starts = np.cumsum([0, *(attention.n_heads for attention in stream.attentions)]).tolist()
    n_heads = starts[-1]
    composed = np.full((len(COMPOSITIONS), n_heads, n_heads), np.nan, np.float32)
    sent_spread = np.full(n_heads, np.nan)
    received_spread = np.full((len(COMPOSITIONS), n_heads), np.nan)
    sent: list[tuple[slice, Tensor]] = []
    for attention, (start, stop) in zip(stream.attentions, pairwise(starts), strict=True):
        mine = slice(start, stop)
        query, key, value = (attention.reads(role) for role in ("query", "key", "value"))
        output = _writes_of(attention, centres=centres)
        sides = ((key, query), (query, key), (None if output is None else output.mT, value))
        # Compare with all heads of earlier layers.
        for row, (left, reads) in enumerate(sides):
            if left is None or reads is None:
                continue
            received = receiver(left.mT, reads)
            received_spread[row, mine] = spread(received).cpu().numpy()
            for senders, written in sent:
                composed[row, senders, mine] = shares(received.to(written), written).cpu().numpy()
        # This layer sends to the later ones.
        if output is not None and value is not None:
            own = sender(output, value)
            sent_spread[mine] = spread(own).cpu().numpy()
            sent.append((mine, own.to(torch.promote_types(output.dtype, torch.float32))))
    return Composition(composed, sent_spread, received_spread, d_model - centres)


# Positions


def _read_positions(model: Model, stream: Stream, ids: Tensor) -> tuple[str, Mapping[str, Floats]]:
    """Say what positions alone do to each head: the model is run so that every layer reads the embeddings.

    Returns:
        Where positions are: "in the stream" of embeddings, or "in the scores"; "" = not known. And columns by head.
    """
    n_heads = [attention.n_heads for attention in stream.attentions]
    names = ("same_nats", *SHARES, *(f"{name}_baseline" for name in SHARES))
    blocks = {layer: block for (_, layer), block in model.blocks().items()}
    if set(blocks) != {attention.layer for attention in stream.attentions}:
        return "", {name: np.full(sum(n_heads), np.nan) for name in names}
    # Every block reads the embeddings in place of the block before it.
    embeddings: list[Tensor] = []
    by_layer: dict[int, dict[str, Floats]] = {}

    def enter(block: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        embeddings.append(arguments[0] if arguments else named["hidden_states"])
        if arguments:
            return (embeddings[0], *arguments[1:]), named
        return (), {**named, "hidden_states": embeddings[0]}

    def observe(call: AttentionCall) -> Tensor:
        by_layer[call.layer] = _by_position(call)
        return attend(call)

    # One text per token, the same token at every place. (text, place)
    n_places = min(N_PLACES, model.info.max_tokens or N_PLACES)
    with hooks(blocks.values(), enter, before=True):
        model.run(Batch(ids[:, None].expand(-1, n_places).contiguous()), observe)
    # Tokens that are alike at every place carry no position.
    first = embeddings[0]
    is_alike = (first - first[:, :1]).abs().amax() <= 1e-5 * first.abs().amax()
    kind = "in the scores" if bool(is_alike) else "in the stream"
    layers = [by_layer[attention.layer] for attention in stream.attentions]
    return kind, {name: np.concatenate([of_layer[name] for of_layer in layers]) for name in names}


def _by_position(call: AttentionCall) -> dict[str, Floats]:
    """Return what the mean token attends to by position, each (head,), and the same of uniform attention."""
    query, key = call.query.float(), call.key.float()
    repeated = key.repeat_interleave(call.n_heads // call.n_kv_heads, 1)
    n_texts = len(query)
    # A token's score for itself, (token, head, place), above that for other tokens.
    own = (query * repeated).sum(-1).mean(0)
    mean = (query.mean(0) * repeated.mean(0)).sum(-1)
    others = (n_texts * mean - own) / max(1, n_texts - 1)
    # Average queries and keys over tokens, and attend with the means. (1, head, place, d_head)
    mean_call = replace(
        call,
        query=query.mean(0, keepdim=True),
        key=key.mean(0, keepdim=True),
        value=call.value[:1].float(),
        mask=None if call.mask is None else call.mask[:1],
        bias=None if call.bias is None else call.bias[:1],
    )
    uniform = replace(mean_call, query=mean_call.query * 0, bias=None, sinks=None)
    columns = {"same_nats": (call.scale * (own - others).mean(-1)).cpu().double().numpy()}
    for end, each in (("", mean_call), ("_baseline", uniform)):
        for name, numbers in _shares_of(attention_weights(each)[0]).items():
            columns[name + end] = numbers
    return columns


def _shares_of(pattern: Tensor) -> dict[str, Floats]:
    """Return the mean weight on the tokens of SHARES, (head,), of queries that have all four apart.

    Args:
        pattern: (head, query, key).
    """
    queries = torch.arange(2, max(2, pattern.shape[-1] - 1))
    keys = {"previous": queries - 1, "same": queries, "next": queries + 1, "first": queries * 0}
    pattern = pattern.cpu().double()
    return {name: pattern[:, queries, keys[name]].mean(1).numpy() for name in SHARES}
