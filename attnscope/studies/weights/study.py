"""What do the weights of heads say, without any text? A model in, a HeadWeights result out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core.plain_torch import with_plain_torch
from attnscope.corpus.frequencies import read_frequencies
from attnscope.models.model import Batch, Model
from attnscope.questions.weights import COMPOSITIONS, Composition, HeadWeights, WeightsOptions
from attnscope.results.table import Table
from attnscope.studies.inputs.provenance import run_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from attnscope.core.attention.seam import AttentionCall
    from attnscope.models.inside.stream import Attention, Stream

Report = Callable[[int, int], None]

Score = tuple[float, float, float, float]
"""A score of eigenvalues, and the mean, the least and the largest of random heads with the same singular values."""

Tokens = tuple[str, ...]

Direction = tuple[float, list[tuple[Tokens, Tokens]]]
"""The share of a singular direction, and the tokens at the source and the target of both its ends."""


@dataclass(frozen=True, eq=False)
class _Head:
    """What is known of one head."""

    layer: int
    head: int
    copying: Score
    matching: Score
    shares: Mapping[str, float]
    writes: Sequence[Direction]
    seeks: Sequence[Direction]
    answers: Sequence[tuple[str, Tokens]]


_TEXTS, _PLACES = 64, 16
"""Tokens that what places do is a mean over, and how many places."""

_UNKNOWN: Score = (np.nan, np.nan, np.nan, np.nan)


@with_plain_torch
def weights(model: Model, options: WeightsOptions | None = None, *, report: Report | None = None) -> HeadWeights:
    """Says what each head copies, matches, reads and writes, and which heads feed which, from the weights alone.

    Norms are folded into the weights around them, except for the length that they divide by. All products go through
    matrices of d_head x d_head.

    Args:
        model: A loaded model, see `attnscope.load`: an encoder or a decoder of text.
        options: What is asked.
        report: Is told how many layers are done, and of how many.

    Raises:
        AttnscopeError: Where the model keeps its weights is not known; says which and why.
    """
    import torch

    from attnscope.models.inside.stream import stream_of

    options = options or WeightsOptions()
    stream = stream_of(model)
    with torch.no_grad():
        return _Weights(model, stream, options).study(report)


@dataclass(frozen=True, eq=False)
class _Ends:
    """The tokens at either end of a head.

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
    """The weights of a model, on their way into a record."""

    def __init__(self, model: Model, stream: Stream, options: WeightsOptions) -> None:
        self.model, self.stream, self.options = model, stream, options
        self.centres = _centres(stream)
        self.notes = list(stream.notes)
        self._cores: dict[str, Tensor] = {}
        self._draws: dict[tuple[str, int], Tensor] = {}
        self.ends = self._find_ends()
        self.spell: Callable[[int], str] = cache(lambda number: model.tokenizer.spell(number))
        if stream.is_post_norm:
            self.notes.append(
                "this model normalises the stream (post-norm): scores leave out norms between two heads, as if a "
                "head read exactly what another wrote"
            )
        if stream.unembedding is not None and not stream.is_direct:
            self.notes.append(
                "between the last layer and the unembedding lies a layer that is left out: tokens are those whose rows "
                "of the unembedding are likest to what is written"
            )

    def study(self, report: Report | None) -> HeadWeights:
        """The record."""
        places = _Places(self.model, self.stream, self._some_ids())
        answers = self._answers()
        heads: list[_Head] = []
        for done, attention in enumerate(self.stream.attentions):
            heads += self._heads(attention, places.shares.get(attention.layer), answers)
            if report is not None:
                report(done + 1, len(self.stream.attentions))
        composed = _compose(self.stream, self.model.info.d_model)
        options = {
            "kind": self.stream.kind,
            "ends": self.ends.name if self.ends is not None else "",
            "places": places.kind,
            "n_places": _PLACES,
            "dimension": composed.dimension,
            "n_draws": self.options.draws,
        }
        arrays: dict[str, NDArray[Any]] = {
            "composition": composed.share,
            "sender_spread": composed.sender_spread,
            "receiver_spread": composed.receiver_spread,
        }
        run = run_of(self.model.info, self.notes) | {"seed": self.options.seed}
        return HeadWeights(run, {}, options, self._tables(heads, places.uniform), arrays)

    def _tables(self, heads: Sequence[_Head], uniform: Mapping[str, Sequence[float]]) -> dict[str, Table]:
        """Return what is known of heads, beside what uniform attention gives to the same tokens, as tables."""
        columns = HeadWeights.TABLES
        rows, directions, answers = [], [], []
        for number, head in enumerate(heads):
            row: dict[str, Any] = {"kind": self.stream.kind, "layer": head.layer, "head": head.head, **head.shares}
            for name, score in (("copying", head.copying), ("matching", head.matching)):
                parts = ("", "_random", "_least", "_most")
                row |= {f"{name}{part}": value for part, value in zip(parts, score, strict=True)}
            rows.append(row)
            for of, mine in (("writes", head.writes), ("seeks", head.seeks)):
                for share, ends in mine:
                    for place, (source, target) in enumerate(ends):
                        # The share stands beside the first end of a direction; its other end is the opposite.
                        known = share if not place else np.nan
                        found = {"source": _join(source), "target": _join(target)}
                        directions.append({"head": number, "of": of, "share": known, **found})
            for token, written in head.answers:
                answers.append({"head": number, "token": _spell(token), "written": _join(written)})
        table = Table.of(columns["heads"], rows)
        layers = [attention.layer for attention in self.stream.attentions]
        values = dict(table.values)
        for name, by_layer in uniform.items():
            known_layers = dict(zip(layers, by_layer, strict=False))
            values[f"{name}_baseline"] = np.array([known_layers.get(head.layer, np.nan) for head in heads])
        return {
            "heads": Table(table.columns, values),
            "directions": Table.of(columns["directions"], directions),
            "answers": Table.of(columns["answers"], answers),
        }

    # Tokens ---------------------------------------------------------------------------------------------------

    def _embed(self, ids: Tensor) -> Tensor:
        """Static embeddings of some tokens, (token, d)."""
        rows = self.model.static_embeddings(ids[None])
        assert rows is not None, "a model whose stream is known has them"
        return rows[0]

    def _find_ends(self) -> _Ends | None:
        import torch

        stream, info = self.stream, self.model.info
        numbers = self.model.tokenizer.ordinary_ids()
        if stream.unembedding is not None:
            n_rows = len(stream.unembedding)
            numbers = [number for number in numbers or range(n_rows) if number < n_rows]
        if not numbers:
            self.notes.append("the model's vocabulary is not known, so that nothing is said of tokens")
            return None
        ids = torch.tensor(numbers)
        width = self._embed(ids[:1]).shape[-1]
        if width != info.d_model:
            self.notes.append(
                f"embeddings have width {width}, the stream {info.d_model}: nothing is said of tokens (copying, "
                "matching, what is read and written)"
            )
            return None
        read = torch.cat([self._embed(part) for part in torch.split(ids, 8192)])
        read = read.to(torch.promote_types(read.dtype, torch.float32))
        read = read if stream.embedding_norm is None else stream.embedding_norm.apply(read)
        if stream.unembedding is None:
            written, name = read, "static embeddings"
        else:
            rows = stream.unembedding[ids.to(stream.unembedding.device)]
            written = rows if stream.final_norm is None else stream.final_norm.fold(rows)
            name = "unembedding"
        looked_up = read - read.mean(1, keepdim=True) if self.centres else read
        length = looked_up.pow(2).mean(1, keepdim=True).sqrt().clamp(min=1e-30)
        return _Ends(ids, read, looked_up / length, written - written.mean(0), name)

    def _some_ids(self) -> Tensor:
        """Tokens from all over the vocabulary."""
        import torch

        numbers = self.model.tokenizer.ordinary_ids() if self.ends is None else self.ends.ids.tolist()
        numbers = numbers or list(range(8, 16))
        return torch.tensor([numbers[i * len(numbers) // _TEXTS] for i in range(_TEXTS)])

    def _answers(self) -> list[int]:
        """Rows of the commonest tokens among the ends."""
        if self.options.frequencies is None or self.ends is None:
            return []
        counts = read_frequencies(self.options.frequencies, self.model.tokenizer.encode).counts
        row_of = {number: row for row, number in enumerate(self.ends.ids.tolist())}
        order = np.argsort(-counts, kind="stable").tolist()
        return [row_of[number] for number in order if counts[number] and number in row_of][: self.options.answers]

    def _tokens(self, embeddings: Tensor, directions: Tensor) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """The tokens at both ends of each direction, (n, d_model), by the rows of tokens."""
        assert self.ends is not None
        scores = embeddings @ directions.to(embeddings).T
        n = min(self.options.tokens, len(embeddings))
        best = [scores.topk(n, 0, largest=largest).indices.T.tolist() for largest in (True, False)]
        labels = [[tuple(self.spell(int(self.ends.ids[row])) for row in rows) for rows in end] for end in best]
        return list(zip(*labels, strict=True))

    # Heads ----------------------------------------------------------------------------------------------------

    def _heads(
        self, attention: Attention, places: Mapping[str, Sequence[float]] | None, answers: Sequence[int]
    ) -> list[_Head]:
        n = attention.n_heads
        copying = self._scores(attention, "copying")
        matching = self._scores(attention, "matching")
        values, outputs = attention.reads("value"), _writes_of(attention, centres=self.centres)
        queries, keys = attention.reads("query"), attention.reads("key")
        writes: Sequence[Sequence[Direction]] = [()] * n
        seeks = writes
        by_head: list[Sequence[tuple[str, Tokens]]] = [()] * n
        if self.ends is not None and self.options.directions:
            if values is not None and outputs is not None:
                writes = self._directions(outputs, values, self.ends.looked_up, self.ends.written)
                by_head = [
                    tuple(self._answer(attention, row, outputs[head], values[head], head) for row in answers)
                    for head in range(n)
                ]
            if queries is not None and keys is not None:
                seeks = self._directions(keys.mT, queries, self.ends.looked_up, self.ends.looked_up)
        shares = {name: [np.nan] * n for name in _SHARES} | dict(places or {})
        return [
            _Head(
                layer=attention.layer,
                head=head,
                copying=copying[head],
                matching=matching[head],
                shares={name: float(shares[name][head]) for name in _SHARES},
                writes=writes[head],
                seeks=seeks[head],
                answers=by_head[head],
            )
            for head in range(n)
        ]

    def _answer(self, attention: Attention, row: int, output: Tensor, value: Tensor, head: int) -> tuple[str, Tokens]:
        """What a head writes for a token whose embedding alone it reads, its bias included."""
        assert self.ends is not None
        linear, norm = attention.value, attention.norm
        read = self.ends.looked_up if linear is None or norm is not None else self.ends.read
        z = value @ read[row].to(value)
        if linear is not None:
            bias = linear.bias if norm is None else linear.weight @ norm.bias.to(value) + linear.bias
            z = z + bias.repeat_interleave(attention.n_heads // len(bias), 0)[head]
        (risen, _), *_ = self._tokens(self.ends.written, (output @ z)[None])
        return self.spell(int(self.ends.ids[row])), risen

    def _scores(self, attention: Attention, which: str) -> list[Score]:
        from attnscope.core.weights import eigenvalue_scores, random_rows

        reads = attention.reads("value" if which == "copying" else "key")
        queries = attention.reads("query")
        written = _writes_of(attention, centres=self.centres)
        writes = written if which == "copying" else None if queries is None else queries.mT
        if reads is None or writes is None or self.ends is None:
            return [_UNKNOWN] * attention.n_heads
        k = reads.shape[1]
        own, chance = eigenvalue_scores(reads, self._core(which), writes, self._drawn(which, k, random_rows))
        return [
            (float(value), float(random.mean()), float(random.min()), float(random.max()))
            for value, random in zip(own, chance, strict=True)
        ]

    def _core(self, which: str) -> Tensor:
        """E U over the vocabulary, (d_model, d_model), of what is read and what is written."""
        if which not in self._cores:
            assert self.ends is not None
            read = self.ends.read
            # Softmax does not see what a query's scores have in common over the vocabulary, nor is it a match.
            other = self.ends.written.to(read) if which == "copying" else read - read.mean(0, keepdim=True)
            core = (read.T @ other).double()
            if self.centres:
                core = core - core.mean(0, keepdim=True)
                core = core - core.mean(1, keepdim=True)
            self._cores[which] = core
        return self._cores[which]

    def _drawn(self, which: str, k: int, random_rows: Callable[..., Tensor]) -> Tensor:
        if (which, k) not in self._draws:
            core = self._core(which)
            ends = (random_rows(self.options.draws, k, len(core), self.options.seed + end).to(core) for end in (0, 1))
            left, right = ends
            self._draws[which, k] = left @ core @ right.mT
        return self._draws[which, k]

    def _directions(self, left: Tensor, right: Tensor, sources: Tensor, targets: Tensor) -> list[list[Direction]]:
        """The first singular directions of left @ right of each head, and the tokens at their ends."""
        import torch

        from attnscope.core.weights import singular_directions

        n = min(self.options.directions, right.shape[1])
        singular = [singular_directions(a, b, n) for a, b in zip(left, right, strict=True)]
        read = self._tokens(sources, torch.cat([vectors for _, vectors, _ in singular]))
        written = self._tokens(targets, torch.cat([vectors for vectors, _, _ in singular]))
        shares = torch.cat([share for *_, share in singular]).tolist()
        directions: list[Direction] = [
            (float(share), list(zip(a, b, strict=True))) for share, a, b in zip(shares, read, written, strict=True)
        ]
        return [directions[head * n : (head + 1) * n] for head in range(len(singular))]


# Composition ------------------------------------------------------------------------------------------------------


def composition(model: Model) -> Composition:
    """How much each head reads of what each earlier one writes, by the weights; heads are counted layer by layer."""
    import torch

    from attnscope.models.inside.stream import stream_of

    stream = stream_of(model)
    with torch.no_grad():
        return _compose(stream, model.info.d_model)


def _centres(stream: Stream) -> bool:
    """Whether every norm takes the mean away, so that no head can read it."""
    norms = [attention.norm for attention in stream.attentions] + (
        [stream.final_norm] if stream.unembedding is not None else []
    )
    return all(norm is not None and norm.centres for norm in norms)


def _writes_of(attention: Attention, *, centres: bool) -> Tensor | None:
    """W_O of each head, without what no head can read if all norms centre."""
    writes = attention.writes
    return writes - writes.mean(1, keepdim=True) if writes is not None and centres else writes


def _compose(stream: Stream, d_model: int) -> Composition:
    """Shares of all pairs, and the spreads of what is sent and received."""
    import torch

    from attnscope.core.weights import receiver, sender, shares, spread

    centres = _centres(stream)
    layers = stream.attentions
    starts = np.cumsum([0, *(attention.n_heads for attention in layers)])
    n = int(starts[-1])
    composed = np.full((len(COMPOSITIONS), n, n), np.nan, np.float32)
    sent_spread, received_spread = np.full(n, np.nan), np.full((len(COMPOSITIONS), n), np.nan)
    sent: list[Tensor | None] = []
    for number, attention in enumerate(layers):
        receivers = slice(starts[number], starts[number + 1])  # the heads of this layer
        query, key, value = (attention.reads(role) for role in ("query", "key", "value"))
        output = _writes_of(attention, centres=centres)
        pairs = {"Q": (key, query), "K": (query, key), "V": (None if output is None else output.mT, value)}
        for by, (left, reads) in pairs.items():
            if left is None or reads is None:
                continue
            received, row = receiver(left.mT, reads), COMPOSITIONS.index(by)
            received_spread[row, receivers] = spread(received).cpu().numpy()
            for earlier, written in enumerate(sent):
                if written is not None:
                    senders = slice(starts[earlier], starts[earlier + 1])
                    composed[row, senders, receivers] = shares(received.to(written), written).cpu().numpy()
        if output is None or value is None:
            sent.append(None)
            continue
        own = sender(output, value)
        sent_spread[receivers] = spread(own).cpu().numpy()
        sent.append(own.to(torch.promote_types(output.dtype, torch.float32)))
    return Composition(composed, sent_spread, received_spread, d_model - centres)


# Places -----------------------------------------------------------------------------------------------------------

_SHARES = ("same_nats", "previous", "same", "next", "first")


class _Places:
    """What positions alone do to each head: the model is run so that every layer reads the embeddings.

    Attributes:
        kind: "in the stream" if embeddings hold positions, else "in the scores"; "" = not known.
        shares: Layer -> name -> by head.
        uniform: Name -> by layer, the shares of a head that attends to all alike.
    """

    def __init__(self, model: Model, stream: Stream, ids: Tensor) -> None:
        from attnscope.models.inside.projections import hooks

        self.shares: dict[int, dict[str, list[float]]] = {}
        self.uniform: dict[str, tuple[float, ...]] = {}
        self.kind = ""
        blocks = {layer: block for (_, layer), block in model.blocks().items()}
        if set(blocks) != {attention.layer for attention in stream.attentions}:
            return
        first: list[Tensor] = []

        def enter(block: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
            name = "hidden_states"
            hidden = arguments[0] if arguments else named[name]
            if not first:
                first.append(hidden)
                alike = (hidden - hidden[:, :1]).abs().amax() <= 1e-5 * hidden.abs().amax()
                self.kind = "in the scores" if bool(alike) else "in the stream"
            return ((first[0], *arguments[1:]), named) if arguments else ((), {**named, name: first[0]})

        n = _PLACES if model.info.max_tokens is None else min(_PLACES, model.info.max_tokens)
        with hooks(blocks.values(), enter, before=True):
            model.run(Batch(ids[:, None].expand(-1, n).contiguous()), self._observe)

    def _observe(self, call: AttentionCall) -> Tensor:
        from attnscope.core.attention.seam import attend, attention_weights

        query, key = call.query.float(), call.key.float()
        repeated = key.repeat_interleave(call.n_heads // key.shape[1], 1)
        own = (query * repeated).sum(-1)  # (token, head, place): a token's score for itself
        n = len(query)
        mean = (query.mean(0) * repeated.mean(0)).sum(-1)
        others = (n * mean - own.mean(0)) / max(1, n - 1)
        mean_call = replace(
            call, query=query.mean(0, keepdim=True), key=key.mean(0, keepdim=True), value=call.value[:1].float(),
            mask=None if call.mask is None else call.mask[:1], bias=None if call.bias is None else call.bias[:1],
        )  # fmt: skip
        alike = replace(mean_call, query=mean_call.query * 0, bias=None, sinks=None)
        self.shares[call.layer] = {
            "same_nats": (call.scale * (own.mean(0) - others).mean(-1)).tolist(),
            **_shares_of(attention_weights(mean_call)[0]),
        }
        for name, values in _shares_of(attention_weights(alike)[0]).items():
            self.uniform[name] = (*self.uniform.get(name, ()), values[0])
        return attend(call)


def _spell(token: str) -> str:
    """Return a token with a mark where a space begins it, as several differ in nothing else."""
    return "·" + token[1:] if token.startswith(" ") else token


def _join(tokens: Sequence[str]) -> str:
    """Return tokens in a line."""
    return " ".join(map(_spell, tokens))


def _shares_of(weights: Tensor) -> dict[str, list[float]]:
    """Mean weight on the previous, same, next and first token of queries that have all four apart, by head."""
    import torch

    n = weights.shape[-1]
    at = range(2, n - 1)
    keys: dict[str, Callable[[int], int]] = {
        "previous": lambda q: q - 1, "same": lambda q: q, "next": lambda q: q + 1, "first": lambda q: 0
    }  # fmt: skip
    if not at:
        return {name: [np.nan] * len(weights) for name in keys}
    return {name: torch.stack([weights[:, q, key(q)] for q in at]).mean(0).tolist() for name, key in keys.items()}
