"""Read what heads copy, match, read and write from their weights alone. Runs on texts are left to other studies.

A head has three maps of the stream to itself: "OV" = W_O W_V (what it writes of what it reads), "QK" = W_Q' W_K (query
by key), and "KQ", its transpose (key by query). So a query is read by "KQ", and a key by "QK".
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from attnscope.core.attention.precision import in_float64
from attnscope.core.attention.seam import AttentionCall, attend, attention_weights, select_rows
from attnscope.core.plain_torch import with_default_torch
from attnscope.core.weights import (
    composition_shares,
    concentration,
    random_rows,
    receiver_factors,
    scores_and_chance,
    sender_factors,
    singular_directions,
)
from attnscope.models.info import run_facts
from attnscope.models.inside.projections import hooks
from attnscope.models.inside.stream import ResidualStream, stream_of
from attnscope.models.model import Batch, Model
from attnscope.questions.weights import (
    INPUT_LETTERS,
    N_RANDOM_HEADS,
    POSITION_SHARES,
    SCORE_SUFFIXES,
    HeadWeights,
    WeightsOptions,
)
from attnscope.results.table import Table

N_TEXTS = 64
"""How many texts tell what positions alone do. Each repeats one token."""

N_PLACES = 16
"""How many tokens each of these texts has."""

N_DIRECTIONS = 2
"""How many singular directions of a map are kept."""

N_TOKENS = 5
"""How many tokens are named at each end of a direction."""

ANY_IDS = range(8, 16)
"""Ids that stand in for ordinary tokens where the vocabulary is not known: they are past the usual special ones."""

Maps = Mapping[str, tuple[Tensor, Tensor]]
"""The two factors of each map of a layer, by its name: (head, d_model, d_head) and (head, d_head, d_model)."""


@with_default_torch
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
class _Vocabulary:
    """Hold the tokens that heads read and write.

    Attributes:
        ids: Their ids, (token,).
        read: Their embeddings as they enter the stream, (token, d_model), scaled to a root mean square of 1, and
            centred where norms centre.
        written: The directions in which writing raises each token, (token, d_model), less their mean over tokens.
        source_of_written: Where these directions are from: "unembedding" or "static embeddings".
        cores: The product of what is read and what is written, summed over the vocabulary, (d_model, d_model), for the
            scores "copying" and "matching"; see `core.weights.scores_and_chance`.
    """

    ids: Tensor
    read: Tensor
    written: Tensor
    source_of_written: str
    cores: dict[str, Tensor]


class _Weights:
    """Turn the weights of a model into a result, layer by layer."""

    def __init__(self, model: Model, stream: ResidualStream, options: WeightsOptions) -> None:
        self._model = model
        self._stream = stream
        self._seed = options.seed
        self._norms_centre = stream.centres
        self._notes = list(stream.notes)
        self._vocabulary = self._read_vocabulary()
        # (score, d_head) -> random heads, (draw, d_head, d_head).
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
        # Layer -> the rows of its heads in the table. What is not known of a head stays NaN.
        self._rows: dict[int, slice] = {}
        n_heads = 0
        for attention in stream.attentions:
            self._rows[attention.layer] = slice(n_heads, n_heads + attention.n_heads)
            n_heads += attention.n_heads
        # SCORE_SUFFIXES are the score itself, and the mean, the least and the largest of random heads.
        names = [*product(("copying", "matching"), SCORE_SUFFIXES), ("same_nats", "")]
        names += product(POSITION_SHARES, ("", "_baseline"))
        self._columns = {name + part: np.full(n_heads, np.nan) for name, part in names}
        self._directions: list[dict[str, Any]] = []
        # What each head reads of each head of an earlier layer. (composition, sender, receiver)
        self._shares = np.full((len(INPUT_LETTERS), n_heads, n_heads), np.nan, np.float32)
        # How few directions hold what a head writes and reads: shares by chance follow from it.
        self._sender_spread = np.full(n_heads, np.nan)
        self._receiver_spread = np.full((len(INPUT_LETTERS), n_heads), np.nan)
        # For each layer so far: its rows, and the `sender_factors` of its heads, (head, d_model, d_head).
        self._sent: list[tuple[slice, Tensor]] = []

    def study(self, report: Callable[[int, int], None] | None) -> HeadWeights:
        """Read all layers, and return the result."""
        attentions = self._stream.attentions
        layers: list[int] = []
        heads: list[int] = []
        for n_done, attention in enumerate(attentions, 1):
            layers += [attention.layer] * attention.n_heads
            heads += range(attention.n_heads)
            maps = attention.maps(centres=self._norms_centre)
            rows = self._rows[attention.layer]
            if self._vocabulary is not None:
                self._add_scores(self._vocabulary, maps, rows)
                self._add_directions(self._vocabulary, maps, rows.start)
            self._add_composition(maps, rows)
            if report is not None:
                report(n_done, len(attentions))
        position_source = self._read_positions()
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
            "ends": "" if self._vocabulary is None else self._vocabulary.source_of_written,
            "places": position_source,
            "n_places": N_PLACES,
            # Centring takes away one dimension.
            "dimension": self._model.info.d_model - int(self._norms_centre),
            "n_draws": N_RANDOM_HEADS,
        }
        arrays: dict[str, NDArray[Any]] = {
            "composition": self._shares,
            "sender_spread": self._sender_spread,
            "receiver_spread": self._receiver_spread,
        }
        directions = sorted(self._directions, key=lambda row: int(row["head"]))
        tables = {"heads": table, "directions": Table.of(HeadWeights.TABLES["directions"], directions)}
        run = run_facts(self._model.info, self._notes)
        run["seed"] = self._seed
        # Weights are of no corpus.
        return HeadWeights(run, corpus={}, options=options, tables=tables, grids=arrays)

    # Tokens

    def _embed(self, ids: Tensor) -> Tensor:
        """Return the static embeddings of some tokens, (token, width)."""
        rows = self._model.static_embeddings(ids[None])
        assert rows is not None, "a model whose stream is known has them"
        return rows[0]

    def _read_vocabulary(self) -> _Vocabulary | None:
        """Return the tokens that heads read and write; None with a note where they are not known."""
        # Choose the tokens that have rows in both embeddings and unembedding.
        stream = self._stream
        d_model = self._model.info.d_model
        token_ids = self._model.tokenizer.ordinary_ids()
        if stream.unembedding is not None:
            n_rows = len(stream.unembedding)
            token_ids = [number for number in token_ids or range(n_rows) if number < n_rows]
        if not token_ids:
            self._notes.append("the model's vocabulary is not known, so that nothing is said of tokens")
            return None
        ids = torch.tensor(token_ids)
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
        # Writing along a token's row raises it: that of the unembedding, else of the embeddings. (token, d_model)
        written = read
        source_of_written = "static embeddings"
        if stream.unembedding is not None:
            source_of_written = "unembedding"
            written = stream.unembedding[ids.to(stream.unembedding.device)]
            if stream.final_norm is not None:
                written = stream.final_norm.fold(written)
        written = written - written.mean(0)
        # Softmax ignores what a query's scores for all tokens have in common: the mean key is subtracted.
        cores = {
            "copying": in_float64(read.T @ written.to(read)),
            "matching": in_float64(read.T @ (read - read.mean(0))),
        }
        # Where all norms centre, no head reads the mean over d_model, and no norm lets pass what is written to it: take
        # it out of what is read, and out of both sides of the cores.
        if self._norms_centre:
            read = read - read.mean(1, keepdim=True)
            for score, core in cores.items():
                rows = core - core.mean(0)
                cores[score] = rows - rows.mean(1, keepdim=True)
        root_mean_square = read.pow(2).mean(1, keepdim=True).sqrt().clamp(min=1e-30)
        return _Vocabulary(ids, read / root_mean_square, written, source_of_written, cores)

    # Heads

    def _add_scores(self, vocabulary: _Vocabulary, maps: Maps, rows: slice) -> None:
        """Add the scores of the heads of a layer, and the mean, least and largest of random heads."""
        for name, which in (("copying", "OV"), ("matching", "QK")):
            if which not in maps:
                continue
            left_factor, right_factor = maps[which]
            core = vocabulary.cores[name]
            # Random heads of one d_head are drawn once for all layers, (draw, d_head, d_head).
            width = right_factor.shape[1]
            if (name, width) not in self._draws:
                left = random_rows(N_RANDOM_HEADS, width, len(core), self._seed).to(core)
                right = random_rows(N_RANDOM_HEADS, width, len(core), self._seed + 1).to(core)
                self._draws[name, width] = left @ core @ right.mT
            own, chance = scores_and_chance(right_factor, core, left_factor, self._draws[name, width])
            parts = (own, chance.mean(1), chance.amin(1), chance.amax(1))
            for ending, values in zip(SCORE_SUFFIXES, parts, strict=True):
                self._columns[name + ending][rows] = values.cpu().double().numpy()

    def _add_directions(self, vocabulary: _Vocabulary, maps: Maps, first: int) -> None:
        """Add the first singular directions of the heads of a layer, with the tokens at both ends of each.

        Args:
            vocabulary: The tokens.
            maps: The maps of the layer.
            first: The row of its first head.
        """
        ids = vocabulary.ids
        for name, which, targets in (
            ("writes", "OV", vocabulary.written),
            ("seeks", "KQ", vocabulary.read),
        ):
            if which not in maps:
                continue
            left, right = maps[which]
            n = min(N_DIRECTIONS, right.shape[1])
            for head in range(len(left)):
                # (n, d_model) twice, and (n,)
                written, read, shares_of_norm = singular_directions(left[head], right[head], n)
                sources = self._tokens_at_ends(ids, vocabulary.read, read)
                goals = self._tokens_at_ends(ids, targets, written)
                for direction, share in enumerate(shares_of_norm.tolist()):
                    # A direction has a row for each of its ends; its share stands in the first row alone.
                    for end, shown_share in enumerate((share, np.nan)):
                        row = {
                            "head": first + head,
                            "of": name,
                            "share": shown_share,
                            "source": sources[end][direction],
                            "target": goals[end][direction],
                        }
                        self._directions.append(row)

    def _tokens_at_ends(self, ids: Tensor, vectors: Tensor, directions: Tensor) -> list[list[str]]:
        """Return the tokens whose vectors point most along each direction, and those that point most against it.

        Args:
            ids: The ids of the tokens, (token,).
            vectors: Their vectors, (token, d_model).
            directions: The directions, (n, d_model).

        Returns:
            Two lists of n texts, along and against; a text names N_TOKENS tokens.
        """
        products = vectors @ directions.to(vectors).T  # (token, n)
        n_tokens = min(N_TOKENS, len(vectors))
        ends = []
        for largest in (True, False):
            rows = products.topk(n_tokens, 0, largest=largest).indices.T
            token_ids = ids[rows.cpu()].tolist()  # (n, n_tokens)
            ends.append([" ".join(map(self._spell, each)) for each in token_ids])
        return ends

    def _spell(self, token_id: int) -> str:
        """Return the text of a token, "·" for a space at its beginning: some tokens differ in nothing else."""
        token = str(self._model.tokenizer.spell(token_id))
        return "·" + token[1:] if token.startswith(" ") else token

    def _add_composition(self, maps: Maps, rows: slice) -> None:
        """Add what the heads of a layer read of those of earlier layers, and keep what they write for later ones."""
        # In the order of INPUT_LETTERS: by queries, keys and values.
        for composition, which in enumerate(("KQ", "QK", "OV")):
            if which in maps:
                # What the heads read, up to a rotation of their d_head dimensions, (head, d_head, d_model).
                received = receiver_factors(*maps[which])
                self._receiver_spread[composition, rows] = concentration(received).cpu().numpy()
                for senders, written in self._sent:
                    # (sender, receiver), 0 to 1
                    shares = composition_shares(received.to(written), written)
                    self._shares[composition, senders, rows] = shares.cpu().numpy()
        if "OV" in maps:
            writes, reads = maps["OV"]
            own = sender_factors(writes, reads)
            self._sender_spread[rows] = concentration(own).cpu().numpy()
            wide = torch.promote_types(writes.dtype, torch.float32)
            self._sent.append((rows, own.to(wide)))

    # Positions

    def _read_positions(self) -> str:
        """Measure and add what positions alone do to each head, by a run in which every layer reads the embeddings.

        Returns:
            Where the model has its positions: "in the stream" of embeddings, or "in the scores"; "" = not known.
        """
        blocks = {layer: block for (_, layer), block in self._model.blocks().items()}
        if set(blocks) != set(self._rows):
            return ""
        # Every block reads the hidden states that the first one gets, which are the embeddings.
        embeddings: list[Tensor] = []

        def enter(block: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
            embeddings.append(arguments[0] if arguments else named["hidden_states"])
            if arguments:
                return (embeddings[0], *arguments[1:]), named
            return (), {**named, "hidden_states": embeddings[0]}

        def observe(call: AttentionCall) -> Tensor:
            for name, values in _by_position(call).items():
                self._columns[name][self._rows[call.layer]] = values.cpu().double().numpy()
            return attend(call)

        # Texts that repeat one token, from all over the vocabulary. (text, place)
        token_ids = self._model.tokenizer.ordinary_ids()
        if self._vocabulary is not None:
            token_ids = self._vocabulary.ids.tolist()
        token_ids = token_ids or list(ANY_IDS)
        ids = torch.tensor([token_ids[text * len(token_ids) // N_TEXTS] for text in range(N_TEXTS)])
        n_places = min(N_PLACES, self._model.info.max_tokens or N_PLACES)
        with hooks(blocks.values(), enter, before=True):
            self._model.run(Batch(ids[:, None].expand(-1, n_places).contiguous()), observe)
        # Embeddings that are alike at every place carry no position.
        first = embeddings[0]
        is_alike = (first - first[:, :1]).abs().amax() <= 1e-5 * first.abs().amax()
        return "in the scores" if bool(is_alike) else "in the stream"


def _by_position(call: AttentionCall) -> dict[str, Tensor]:
    """Return what heads do by position, and what uniform attention does, each (head,), by column of the table.

    `call` is of texts that repeat one token: (text, head, place, d_head).
    """
    query = call.query.float()
    key = call.key.float()
    repeated = key.repeat_interleave(call.n_heads // call.n_kv_heads, 1)
    n_texts = len(query)
    # The mean score of a token for itself at its own place, (head, place).
    same = (query * repeated).sum(-1).mean(0)
    # That for the tokens of other texts at this place. The mean over all n² pairs of texts is the product of the means;
    # n of these pairs are of one text.
    mean = (query.mean(0) * repeated.mean(0)).sum(-1)
    others = (n_texts * mean - same) / max(1, n_texts - 1)
    columns = {"same_nats": call.scale * (same - others).mean(-1)}
    # Average queries and keys over texts, and attend with the means. (1, head, place, d_head)
    one_text = select_rows(call, slice(1))
    mean_query = query.mean(0, keepdim=True)
    mean_call = replace(
        one_text, query=mean_query, key=key.mean(0, keepdim=True), value=one_text.value.float()
    )
    uniform = replace(mean_call, query=mean_query * 0, bias=None, sinks=None)
    # Average the weights on four keys over the queries for which these differ: the previous, the same, the next and the
    # first token, in the order of POSITION_SHARES.
    queries = torch.arange(2, max(2, query.shape[2] - 1))
    keys = (queries - 1, queries, queries + 1, queries * 0)
    for ending, mean_attention in (("", mean_call), ("_baseline", uniform)):
        pattern = attention_weights(mean_attention)[0].cpu().double()  # (head, query, key)
        for name, key_positions in zip(POSITION_SHARES, keys, strict=True):
            columns[name + ending] = pattern[:, queries, key_positions].mean(1)
    return columns
