"""Read what heads copy, match, read and write from their weights alone. Runs on texts are left to other studies."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from attnscope.core.attention.seam import AttentionCall, attend, attention_weights, select_part
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
from attnscope.models.inside.stream import Stream, stream_of
from attnscope.models.model import Batch, Model
from attnscope.questions.weights import (
    COMPOSITIONS,
    N_DRAWS,
    SCORE_PARTS,
    SHARES,
    HeadWeights,
    WeightsOptions,
)
from attnscope.results.table import Table
from attnscope.studies.inputs.provenance import run_of

N_TEXTS, N_PLACES = 64, 16
"""Tokens that what places do is a mean over, and how many places."""

N_DIRECTIONS, N_TOKENS = 2, 5
"""Singular directions of a head, and tokens at each end of one."""


@with_plain_torch
def weights(
    model: Model,
    options: WeightsOptions | None = None,
    *,
    report: Callable[[int, int], None] | None = None,
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
        looked_up: Their embeddings as they enter the stream, (token, d_model), at length 1, centred where norms centre.
        written: What stands for writing each, (token, d_model), less its mean over tokens.
        name: What that is.
        cores: E U over the vocabulary, (d_model, d_model), of what is read and what is written, for each score.
    """

    ids: Tensor
    looked_up: Tensor
    written: Tensor
    name: str
    cores: dict[str, Tensor]


class _Weights:
    """Turn the weights of a model into a result, layer by layer."""

    def __init__(self, model: Model, stream: Stream, options: WeightsOptions) -> None:
        self._model = model
        self._stream = stream
        self._seed = options.seed
        self._centres = stream.centres
        self._notes = list(stream.notes)
        self._ends = self._find_ends()
        self._draws: dict[tuple[str, int], Tensor] = {}
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
        # Heads are numbered layer by layer. What is not known of one stays NaN.
        self._rows: dict[int, slice] = {}
        n_heads = 0
        for attention in stream.attentions:
            self._rows[attention.layer] = slice(n_heads, n_heads + attention.n_heads)
            n_heads += attention.n_heads
        names = [*product(("copying", "matching"), SCORE_PARTS), ("same_nats", "")]
        names += product(SHARES, ("", "_baseline"))
        self._columns = {name + part: np.full(n_heads, np.nan) for name, part in names}
        self._directions: list[dict[str, Any]] = []
        # Every pair (sender, receiver); earlier layers send. (composition, sender, receiver)
        self._shares = np.full((len(COMPOSITIONS), n_heads, n_heads), np.nan, np.float32)
        self._sender_spread = np.full(n_heads, np.nan)
        self._receiver_spread = np.full((len(COMPOSITIONS), n_heads), np.nan)
        self._sent: list[tuple[slice, Tensor]] = []

    def study(self, report: Callable[[int, int], None] | None) -> HeadWeights:
        """Read all layers, and return the result."""
        attentions = self._stream.attentions
        layers: list[int] = []
        heads: list[int] = []
        for number, attention in enumerate(attentions, 1):
            layers += [attention.layer] * attention.n_heads
            heads += range(attention.n_heads)
            maps = attention.maps(centres=self._centres)
            rows = self._rows[attention.layer]
            if self._ends is not None:
                self._add_scores(self._ends, maps, rows)
                self._add_directions(self._ends, maps, rows.start)
            self._compose(maps, rows)
            if report is not None:
                report(number, len(attentions))
        places = self._read_positions()
        # One row per head.
        table = Table.of_arrays(
            HeadWeights.TABLES["heads"],
            kind=[self._stream.kind] * len(heads),
            layer=layers,
            head=heads,
            **self._columns,
        )
        options = {
            "kind": self._stream.kind,
            "ends": self._ends.name if self._ends is not None else "",
            "places": places,
            "n_places": N_PLACES,
            "dimension": self._model.info.d_model - self._centres,
            "n_draws": N_DRAWS,
        }
        arrays: dict[str, NDArray[Any]] = {
            "composition": self._shares,
            "sender_spread": self._sender_spread,
            "receiver_spread": self._receiver_spread,
        }
        directions = sorted(self._directions, key=lambda row: int(row["head"]))
        tables = {"heads": table, "directions": Table.of(HeadWeights.TABLES["directions"], directions)}
        run = run_of(self._model.info, self._notes)
        run["seed"] = self._seed
        return HeadWeights(run, {}, options, tables, arrays)

    # Tokens

    def _embed(self, ids: Tensor) -> Tensor:
        """Return static embeddings of some tokens, (token, d)."""
        rows = self._model.static_embeddings(ids[None])
        assert rows is not None, "a model whose stream is known has them"
        return rows[0]

    def _find_ends(self) -> _Ends | None:
        # Choose the tokens that have rows in both embeddings and unembedding.
        stream = self._stream
        d_model = self._model.info.d_model
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
        written = read
        name = "static embeddings"
        if stream.unembedding is not None:
            name = "unembedding"
            written = stream.unembedding[ids.to(stream.unembedding.device)]
            if stream.final_norm is not None:
                written = stream.final_norm.fold(written)
        written = written - written.mean(0)
        # Softmax does not see what a query's scores have in common over the vocabulary, nor is it a match.
        matched = read - read.mean(0, keepdim=True)
        cores = {
            "copying": (read.T @ written.to(read)).double(),
            "matching": (read.T @ matched).double(),
        }
        # Tokens are looked up by direction alone: centre them, and scale to a root mean square of 1.
        looked_up = read
        if self._centres:
            looked_up = read - read.mean(1, keepdim=True)
            # What no head can read must not score: centre both sides.
            for score, core in cores.items():
                rows = core - core.mean(0, keepdim=True)
                cores[score] = rows - rows.mean(1, keepdim=True)
        length = looked_up.pow(2).mean(1, keepdim=True).sqrt().clamp(min=1e-30)
        return _Ends(ids, looked_up / length, written, name, cores)

    # Heads

    def _add_scores(self, ends: _Ends, maps: Mapping[str, tuple[Tensor, Tensor]], rows: slice) -> None:
        """Add the scores of the heads of a layer, and the mean, least and largest of random ones."""
        for name, which in (("copying", "OV"), ("matching", "QK")):
            if which not in maps:
                continue
            writes, reads = maps[which]
            core = ends.cores[name]
            # Random heads of one width and core are drawn once, and serve all layers.
            width = reads.shape[1]
            if (name, width) not in self._draws:
                left = random_rows(N_DRAWS, width, len(core), self._seed).to(core)
                right = random_rows(N_DRAWS, width, len(core), self._seed + 1).to(core)
                self._draws[name, width] = left @ core @ right.mT
            own, chance = eigenvalue_scores(reads, core, writes, self._draws[name, width])
            scores = (own, chance.mean(1), chance.amin(1), chance.amax(1))
            for part, numbers in zip(SCORE_PARTS, scores, strict=True):
                self._columns[name + part][rows] = numbers.cpu().double().numpy()

    def _add_directions(
        self, ends: _Ends, maps: Mapping[str, tuple[Tensor, Tensor]], first: int
    ) -> None:
        """Add the first singular directions of the heads of a layer, with the tokens at both ends of each.

        Args:
            ends: The tokens.
            maps: The maps of the layer.
            first: The row of its first head.
        """
        for name, which, targets in (("writes", "OV", ends.written), ("seeks", "KQ", ends.looked_up)):
            if which not in maps:
                continue
            # (head, n, d_model)
            left, right = maps[which]
            n = min(N_DIRECTIONS, right.shape[1])
            singular = [singular_directions(a, b, n) for a, b in zip(left, right, strict=True)]
            written, read, shares_of_norm = (torch.cat(parts) for parts in zip(*singular, strict=True))
            sources = self._tokens(ends.ids, ends.looked_up, read)
            goals = self._tokens(ends.ids, targets, written)
            for number, share in enumerate(shares_of_norm.tolist()):
                # The share stands beside the first end of a direction; its other end is the opposite.
                for end, known in enumerate((share, np.nan)):
                    row = {
                        "head": first + number // n,
                        "of": name,
                        "share": known,
                        "source": sources[end][number],
                        "target": goals[end][number],
                    }
                    self._directions.append(row)

    def _tokens(self, ids: Tensor, embeddings: Tensor, directions: Tensor) -> list[list[str]]:
        """Return the tokens at both ends of directions, (n, d_model), by the rows of tokens: for each end n texts."""
        scores = embeddings @ directions.to(embeddings).T  # (token, n)
        n_tokens = min(N_TOKENS, len(embeddings))
        ends = []
        for largest in (True, False):
            rows = scores.topk(n_tokens, 0, largest=largest).indices.T
            numbers = ids[rows.cpu()].tolist()  # (n, n_tokens)
            ends.append([" ".join(map(self._spell, each)) for each in numbers])
        return ends

    def _spell(self, number: int) -> str:
        """Return a token with a mark where a space begins it, as several differ in nothing else."""
        token = str(self._model.tokenizer.spell(number))
        return "·" + token[1:] if token.startswith(" ") else token

    def _compose(self, maps: Mapping[str, tuple[Tensor, Tensor]], rows: slice) -> None:
        """Add what the heads of a layer read of those of earlier layers, and keep what they send to later ones."""
        for number, which in enumerate(("KQ", "QK", "OV")):
            if which in maps:
                received = receiver(*maps[which])
                self._receiver_spread[number, rows] = spread(received).cpu().numpy()
                for senders, written in self._sent:
                    composed = shares(received.to(written), written)
                    self._shares[number, senders, rows] = composed.cpu().numpy()
        if "OV" in maps:
            writes, reads = maps["OV"]
            own = sender(writes, reads)
            self._sender_spread[rows] = spread(own).cpu().numpy()
            wide = torch.promote_types(writes.dtype, torch.float32)
            self._sent.append((rows, own.to(wide)))

    # Positions

    def _read_positions(self) -> str:
        """Add what positions alone do to each head: the model is run so that every layer reads the embeddings.

        Returns:
            Where positions are: "in the stream" of embeddings, or "in the scores"; "" = not known.
        """
        blocks = {layer: block for (_, layer), block in self._model.blocks().items()}
        if set(blocks) != set(self._rows):
            return ""
        # Every block reads the embeddings in place of the block before it.
        embeddings: list[Tensor] = []

        def enter(block: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
            embeddings.append(arguments[0] if arguments else named["hidden_states"])
            if arguments:
                return (embeddings[0], *arguments[1:]), named
            return (), {**named, "hidden_states": embeddings[0]}

        def observe(call: AttentionCall) -> Tensor:
            for name, numbers in _by_position(call).items():
                self._columns[name][self._rows[call.layer]] = numbers.cpu().double().numpy()
            return attend(call)

        # Tokens from all over the vocabulary, each a text with the same token at every place. (text, place)
        numbers = self._model.tokenizer.ordinary_ids() if self._ends is None else self._ends.ids.tolist()
        numbers = numbers or list(range(8, 16))
        ids = torch.tensor([numbers[i * len(numbers) // N_TEXTS] for i in range(N_TEXTS)])
        n_places = min(N_PLACES, self._model.info.max_tokens or N_PLACES)
        with hooks(blocks.values(), enter, before=True):
            self._model.run(Batch(ids[:, None].expand(-1, n_places).contiguous()), observe)
        # Tokens that are alike at every place carry no position.
        first = embeddings[0]
        is_alike = (first - first[:, :1]).abs().amax() <= 1e-5 * first.abs().amax()
        return "in the scores" if bool(is_alike) else "in the stream"


def _by_position(call: AttentionCall) -> dict[str, Tensor]:
    """Return what the mean token attends to by position, each (head,), and the same of uniform attention."""
    query = call.query.float()
    key = call.key.float()
    repeated = key.repeat_interleave(call.n_heads // call.n_kv_heads, 1)
    n_texts = len(query)
    # A token's score for itself, (token, head, place), above that for other tokens.
    own = (query * repeated).sum(-1).mean(0)
    mean = (query.mean(0) * repeated.mean(0)).sum(-1)
    others = (n_texts * mean - own) / max(1, n_texts - 1)
    columns = {"same_nats": call.scale * (own - others).mean(-1)}
    # Average queries and keys over tokens, and attend with the means. (1, head, place, d_head)
    one_text = select_part(call, slice(1))
    mean_query = query.mean(0, keepdim=True)
    mean_call = replace(
        one_text, query=mean_query, key=key.mean(0, keepdim=True), value=one_text.value.float()
    )
    uniform = replace(mean_call, query=mean_query * 0, bias=None, sinks=None)
    # The mean weight on the tokens of SHARES, of queries that have all four apart.
    queries = torch.arange(2, max(2, query.shape[2] - 1))
    keys = {
        "previous": queries - 1,
        "same": queries,
        "next": queries + 1,
        "first": queries * 0,
    }
    for part, each in (("", mean_call), ("_baseline", uniform)):
        pattern = attention_weights(each)[0].cpu().double()  # (head, query, key)
        for name in SHARES:
            columns[name + part] = pattern[:, queries, keys[name]].mean(1)
    return columns
