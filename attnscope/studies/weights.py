"""Find what heads copy, match, read and write from their weights alone. Other studies run the model on texts.

The stream is the residual stream, the sum of the embeddings and of what each layer adds. A head has three linear maps
from the stream to the stream, (d_model, d_model): "OV" = W_O W_V leads from what the head reads to what it writes; "QK"
= W_Q' W_K compares a query (rows) with a key (columns); "KQ" is its transpose. A map acts on its column side, so the
input of "QK" is a key, and the input of "KQ" a query.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnscope.core.attention.precision import in_float64
from attnscope.core.attention.seam import AttentionCall, attend, attention_weights, select_rows
from attnscope.core.plain_torch import with_default_torch
from attnscope.core.weights import (
    composition_shares,
    concentration,
    random_rows,
    receiver_factors,
    score_with_random_heads,
    sender_factors,
    singular_directions,
)
from attnscope.models.info import run_facts
from attnscope.models.inside.projections import hooks
from attnscope.models.inside.stream import ResidualStream, read_stream_weights
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

N_POSITION_TEXTS = 64
"""How many texts are run to find the effect of positions alone. Each repeats one token of the vocabulary."""

N_POSITIONS = 16
"""How many tokens each of these texts has."""

N_DIRECTIONS = 2
"""How many singular directions of a map are kept, the strongest first."""

N_NAMED_TOKENS = 5
"""How many tokens are named at each end of a direction."""

STAND_IN_IDS = range(8, 16)
"""Ids that stand in for ordinary tokens if the vocabulary is not known. Special tokens usually have ids below 8."""

Maps = Mapping[str, tuple[Tensor, Tensor]]
"""The two factors of each map of a layer, by its name: (head, d_model, d_head) and (head, d_head, d_model).

Their product is the map. It is never computed, since d_head is much smaller than d_model.
"""


@with_default_torch
def weights(
    model: Model,
    options: WeightsOptions | None = None,
    *,
    report: Callable[[int, int], None] | None = None,
) -> HeadWeights:
    """Find what each head copies, matches, reads and writes, and which heads read what others write, from the weights.

    Norms are folded into the weights around them, except for the division by the length of the vector. Products of
    maps are computed by matrices of d_head x d_head.

    Args:
        model: A loaded model, see `attnscope.load`: an encoder or a decoder of text.
        options: Seed and further choices; None = the defaults.
        report: Called after each layer with the number of layers done, and the number of all.

    Raises:
        AttnscopeError: It is not known where the model keeps the weights of its heads.
    """
    stream = read_stream_weights(model)
    with torch.no_grad():
        return _WeightsReader(model, stream, options or WeightsOptions()).study(report)


@dataclass(frozen=True, eq=False)
class _Vocabulary:
    """Hold the tokens that heads read and write.

    Attributes:
        ids: Their ids, (token,).
        embeddings: Their embeddings as they enter the stream, (token, d_model). Each has a root mean square of 1. If
            the model's norms centre, each has a mean of 0.
        writing_directions: For each token the direction of the stream that raises its logit, (token, d_model), less
            the mean over tokens.
        writing_source: The weights that these directions are from: "unembedding" or "static embeddings".
        score_cores: For the scores "copying" and "matching", the sum over tokens of the products of what a head reads
            of a token and what raises it, (d_model, d_model); see `core.weights.score_with_random_heads`.
    """

    ids: Tensor
    embeddings: Tensor
    writing_directions: Tensor
    writing_source: str
    score_cores: dict[str, Tensor]


class _WeightsReader:
    """Turn the weights of a model into a result, layer by layer: `study` reads them all."""

    def __init__(self, model: Model, stream: ResidualStream, options: WeightsOptions) -> None:
        self._model = model
        self._stream = stream
        self._seed = options.seed
        self._is_centred = stream.centres
        self._notes = list(stream.notes)
        self._vocabulary = self._read_vocabulary()
        # (score, d_head) -> the cores seen through random heads, (draw, d_head, d_head).
        self._random_heads: dict[tuple[str, int], Tensor] = {}
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
        # Layer -> the rows of its heads in the table of all heads, which has one row per head.
        self._rows_by_layer: dict[int, slice] = {}
        n_heads = 0
        for attention in stream.attentions:
            self._rows_by_layer[attention.layer] = slice(n_heads, n_heads + attention.n_heads)
            n_heads += attention.n_heads
        # Columns start as NaN, which stays for what is not known of a head. They are the scores, each with the mean,
        # smallest and largest score of random heads (SCORE_SUFFIXES), and what `_measure_positions` returns.
        names = [*product(("copying", "matching"), SCORE_SUFFIXES), ("same_nats", "")]
        names += product(POSITION_SHARES, ("", "_baseline"))
        self._columns = {name + suffix: np.full(n_heads, np.nan) for name, suffix in names}
        self._directions: list[dict[str, Any]] = []
        # The share of what each head (receiver) reads that each earlier head (sender) writes: by its queries, keys and
        # values, (3, sender, receiver).
        self._shares = np.full((len(INPUT_LETTERS), n_heads, n_heads), np.nan, np.float32)
        # The `concentration` of what a head writes, (head,), and reads, (3, head): how few directions it lies in. The
        # shares expected by chance are computed from it.
        self._sender_spread = np.full(n_heads, np.nan)
        self._receiver_spread = np.full((len(INPUT_LETTERS), n_heads), np.nan)
        # For each layer so far: the rows of its heads, and their `sender_factors`, (head, d_model, d_head).
        self._sender_factors: list[tuple[slice, Tensor]] = []

    def study(self, report: Callable[[int, int], None] | None) -> HeadWeights:
        """Read all layers in order, and return the result."""
        attentions = self._stream.attentions
        layers: list[int] = []
        heads: list[int] = []
        for n_done, attention in enumerate(attentions, 1):
            layers += [attention.layer] * attention.n_heads
            heads += range(attention.n_heads)
            maps = attention.stream_maps(centres=self._is_centred)
            rows = self._rows_by_layer[attention.layer]
            if self._vocabulary is not None:
                self._add_scores(self._vocabulary, maps, rows)
                self._add_directions(self._vocabulary, maps, rows.start)
            self._add_composition(maps, rows)
            if report is not None:
                report(n_done, len(attentions))
        position_source = self._read_positions()
        # The columns have one entry per head, in the order of the layers.
        table = Table.of_arrays(
            HeadWeights.TABLES["heads"],
            kind=[self._stream.kind] * len(heads),
            layer=layers,
            head=heads,
            **self._columns,
        )
        options = {
            "kind": self._stream.kind,
            "ends": "" if self._vocabulary is None else self._vocabulary.writing_source,
            "places": position_source,
            "n_places": N_POSITIONS,
            # A norm that centres removes one dimension, the mean.
            "dimension": self._model.info.d_model - int(self._is_centred),
            "n_draws": N_RANDOM_HEADS,
        }
        directions = sorted(self._directions, key=lambda row: int(row["head"]))
        tables = {"heads": table, "directions": Table.of(HeadWeights.TABLES["directions"], directions)}
        run = run_facts(self._model.info, self._notes)
        run["seed"] = self._seed
        # No text was studied, so the corpus is empty.
        return HeadWeights(
            run,
            corpus={},
            options=options,
            tables=tables,
            grids={
                "composition": self._shares,
                "sender_spread": self._sender_spread,
                "receiver_spread": self._receiver_spread,
            },
        )

    # Tokens

    def _embed(self, ids: Tensor) -> Tensor:
        """Return the static embeddings of some tokens, (token, width)."""
        rows = self._model.static_embeddings(ids[None])
        assert rows is not None, "a model whose stream is known has them"
        return rows[0]

    def _read_vocabulary(self) -> _Vocabulary | None:
        """Return the tokens that heads read and write; None with a note where they are not known."""
        # Choose the tokens that have rows in both the embeddings and the unembedding.
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
        # Embed the tokens as the first layer reads them, normed, in float32 or more. (token, d_model)
        embeddings = torch.cat([self._embed(some_ids) for some_ids in torch.split(ids, 8192)])
        embeddings = embeddings.to(torch.promote_types(embeddings.dtype, torch.float32))
        if stream.embedding_norm is not None:
            embeddings = stream.embedding_norm.apply(embeddings)
        # A head raises a token's logit by writing along the token's row of the unembedding. A model without an
        # unembedding has rows of the embeddings in its place. (token, d_model)
        writing_directions = embeddings
        writing_source = "static embeddings"
        if stream.unembedding is not None:
            writing_source = "unembedding"
            writing_directions = stream.unembedding[ids.to(stream.unembedding.device)]
            if stream.final_norm is not None:
                writing_directions = stream.final_norm.fold(writing_directions)
        writing_directions = writing_directions - writing_directions.mean(0)
        # Sum the outer products over tokens, (d_model, d_model). For "matching" the mean key is subtracted, since
        # softmax ignores what a query's scores for all tokens have in common.
        score_cores = {
            "copying": in_float64(embeddings.T @ writing_directions.to(embeddings)),
            "matching": in_float64(embeddings.T @ (embeddings - embeddings.mean(0))),
        }
        # If all norms subtract the mean over d_model, no head can read it, and what is written to it has no effect.
        # So remove it from the embeddings, and from both sides of the cores.
        if self._is_centred:
            embeddings = embeddings - embeddings.mean(1, keepdim=True)
            for score, core in score_cores.items():
                rows = core - core.mean(0)
                score_cores[score] = rows - rows.mean(1, keepdim=True)
        root_mean_square = embeddings.pow(2).mean(1, keepdim=True).sqrt().clamp(min=1e-30)
        return _Vocabulary(
            ids, embeddings / root_mean_square, writing_directions, writing_source, score_cores
        )

    # Heads

    def _add_scores(self, vocabulary: _Vocabulary, maps: Maps, rows: slice) -> None:
        """Add the scores of the heads of a layer, and the mean, smallest and largest scores of random heads.

        Args:
            vocabulary: The tokens.
            maps: The maps of the layer.
            rows: The rows of its heads in the table.
        """
        for name, map_name in (("copying", "OV"), ("matching", "QK")):
            if map_name not in maps:
                continue
            left_factor, right_factor = maps[map_name]
            core = vocabulary.score_cores[name]
            # Draw random heads once for all layers with the same d_head: (draw, d_head, d_head).
            width = right_factor.shape[1]
            if (name, width) not in self._random_heads:
                left = random_rows(N_RANDOM_HEADS, width, len(core), self._seed).to(core)
                right = random_rows(N_RANDOM_HEADS, width, len(core), self._seed + 1).to(core)
                self._random_heads[name, width] = left @ core @ right.mT
            scores, random_scores = score_with_random_heads(
                right_factor, core, left_factor, self._random_heads[name, width]
            )
            statistics = (scores, random_scores.mean(1), random_scores.amin(1), random_scores.amax(1))
            for suffix, values in zip(SCORE_SUFFIXES, statistics, strict=True):
                self._columns[name + suffix][rows] = values.cpu().double().numpy()

    def _add_directions(self, vocabulary: _Vocabulary, maps: Maps, first_row: int) -> None:
        """Add the strongest singular directions of the heads of a layer, with the tokens at both ends of each.

        A head writes along a left direction what it reads along the right one. Both have two ends, such as tokens of
        joy and tokens of anger, since their common sign is arbitrary.

        Args:
            vocabulary: The tokens.
            maps: The maps of the layer.
            first_row: The row of its first head.
        """
        ids = vocabulary.ids
        for name, map_name, target_vectors in (
            ("writes", "OV", vocabulary.writing_directions),
            ("seeks", "KQ", vocabulary.embeddings),
        ):
            if map_name not in maps:
                continue
            left, right = maps[map_name]
            n = min(N_DIRECTIONS, right.shape[1])
            for head in range(len(left)):
                # (n, d_model), (n, d_model) and (n,)
                write_directions, read_directions, shares_of_norm = singular_directions(
                    left[head], right[head], n
                )
                source_tokens = self._tokens_at_ends(ids, vocabulary.embeddings, read_directions)
                target_tokens = self._tokens_at_ends(ids, target_vectors, write_directions)
                for direction, share in enumerate(shares_of_norm.tolist()):
                    # A direction has one row per end in the table. Only the row of the first end has its share.
                    for end, shown_share in enumerate((share, np.nan)):
                        row = {
                            "head": first_row + head,
                            "of": name,
                            "share": shown_share,
                            "source": source_tokens[end][direction],
                            "target": target_tokens[end][direction],
                        }
                        self._directions.append(row)

    def _tokens_at_ends(self, ids: Tensor, vectors: Tensor, directions: Tensor) -> list[list[str]]:
        """Return the tokens whose vectors point most along each direction, and those that point most against it.

        Args:
            ids: The ids of the tokens, (token,).
            vectors: Their vectors, (token, d_model).
            directions: The directions, (n, d_model).

        Returns:
            Two lists, of the tokens along and of those against. Each has n texts, one for each direction, such as
            "·his ·her ·their", of N_NAMED_TOKENS tokens.
        """
        products = vectors @ directions.to(vectors).T  # (token, n)
        n_tokens = min(N_NAMED_TOKENS, len(vectors))
        ends = []
        for largest in (True, False):
            rows = products.topk(n_tokens, 0, largest=largest).indices.T
            token_ids = ids[rows.cpu()].tolist()  # (n, n_tokens)
            ends.append([" ".join(map(self._format_token, each)) for each in token_ids])
        return ends

    def _format_token(self, token_id: int) -> str:
        """Return the text of a token, with "·" for a space in front: some tokens differ only in this space."""
        token = str(self._model.tokenizer.spell(token_id))
        return "·" + token[1:] if token.startswith(" ") else token

    def _add_composition(self, maps: Maps, rows: slice) -> None:
        """Add the shares that the heads of a layer read from earlier heads, and keep their factors for later layers."""
        # Their queries, keys and values, in the order of INPUT_LETTERS. A map's input is on its column side.
        for composition, map_name in enumerate(("KQ", "QK", "OV")):
            if map_name in maps:
                # The factors R of the heads: what they read, up to a rotation of d_head. (head, d_head, d_model)
                received = receiver_factors(*maps[map_name])
                self._receiver_spread[composition, rows] = concentration(received).cpu().numpy()
                for senders, factors in self._sender_factors:
                    # (sender, receiver), 0 to 1
                    shares = composition_shares(received.to(factors), factors)
                    self._shares[composition, senders, rows] = shares.cpu().numpy()
        if "OV" in maps:
            write_factors, read_factors = maps["OV"]
            own_factors = sender_factors(write_factors, read_factors)
            self._sender_spread[rows] = concentration(own_factors).cpu().numpy()
            dtype = torch.promote_types(write_factors.dtype, torch.float32)
            self._sender_factors.append((rows, own_factors.to(dtype)))

    # Positions

    def _read_positions(self) -> str:
        """Run the model on texts that repeat one token, and add the attention that positions alone cause in each head.

        Every layer reads the embeddings in place of the output of the layer before it.

        Returns:
            How the model encodes positions: "in the stream", as part of the embeddings, or "in the scores", as rotary
            positions and biases are; "" = not known.
        """
        blocks = {layer: block for (_, layer), block in self._model.blocks().items()}
        if set(blocks) != set(self._rows_by_layer):
            return ""
        # A hook before each block replaces its input by the input of the first block, which is the embeddings.
        embeddings: list[Tensor] = []

        def feed_embeddings(
            block: nn.Module, arguments: tuple[Any, ...], keyword_arguments: dict[str, Any]
        ) -> Any:
            embeddings.append(arguments[0] if arguments else keyword_arguments["hidden_states"])
            if arguments:
                return (embeddings[0], *arguments[1:]), keyword_arguments
            return (), {**keyword_arguments, "hidden_states": embeddings[0]}

        # In this run the function replaces attention. It is called with the queries, keys and values of each layer, and
        # returns the layer's usual output.
        def measure_call(call: AttentionCall) -> Tensor:
            for name, values in _measure_positions(call).items():
                self._columns[name][self._rows_by_layer[call.layer]] = values.cpu().double().numpy()
            return attend(call)

        # Take tokens at equal distances in the vocabulary. A text repeats one of them: (text, position).
        token_ids = self._model.tokenizer.ordinary_ids()
        if self._vocabulary is not None:
            token_ids = self._vocabulary.ids.tolist()
        token_ids = token_ids or list(STAND_IN_IDS)
        ids = torch.tensor(
            [token_ids[text * len(token_ids) // N_POSITION_TEXTS] for text in range(N_POSITION_TEXTS)]
        )
        n_positions = min(N_POSITIONS, self._model.info.max_tokens or N_POSITIONS)
        with hooks(blocks.values(), feed_embeddings, before=True):
            self._model.run(Batch(ids[:, None].expand(-1, n_positions).contiguous()), measure_call)
        # A text repeats one token. If its embeddings are the same at all positions, they carry no position.
        first_embeddings = embeddings[0]
        is_alike = (
            first_embeddings - first_embeddings[:, :1]
        ).abs().amax() <= 1e-5 * first_embeddings.abs().amax()
        return "in the scores" if bool(is_alike) else "in the stream"


def _measure_positions(call: AttentionCall) -> dict[str, Tensor]:
    """Return the columns of the table that describe a layer's attention by position, (head,) each, by name.

    `call` is the attention on texts that repeat one token: (text, head, position, d_head). Columns that end in
    "_baseline" are of uniform attention.
    """
    query = call.query.float()
    key = call.key.float()
    repeated_key = key.repeat_interleave(call.n_heads // call.n_kv_heads, 1)
    n_texts = len(query)
    # The mean score of a query for the key of its own position, which is of the same token, (head, position).
    own_score = (query * repeated_key).sum(-1).mean(0)
    # The mean score for the keys of other texts at this position, so of other tokens. The mean over all n² pairs of
    # texts is the product of the means. Take out the n pairs of a text with itself, and n² - n = n (n - 1) are left.
    mean_score = (query.mean(0) * repeated_key.mean(0)).sum(-1)
    other_score = (n_texts * mean_score - own_score) / max(1, n_texts - 1)
    columns = {"same_nats": call.scale * (own_score - other_score).mean(-1)}
    # Average queries and keys over texts, so that tokens cancel and positions stay: (1, head, position, d_head).
    one_text = select_rows(call, slice(1))
    mean_query = query.mean(0, keepdim=True)
    mean_call = replace(
        one_text, query=mean_query, key=key.mean(0, keepdim=True), value=one_text.value.float()
    )
    # A query of 0 attends to all keys equally.
    uniform = replace(mean_call, query=mean_query * 0, bias=None, sinks=None)
    # Average over queries the weights on four keys: the previous, the same, the next and the first token, in the order
    # of POSITION_SHARES. Leave out the first two queries and the last, for which some of these keys coincide or lack.
    queries = torch.arange(2, max(2, query.shape[2] - 1))
    keys = (queries - 1, queries, queries + 1, queries * 0)
    for suffix, mean_attention in (("", mean_call), ("_baseline", uniform)):
        pattern = attention_weights(mean_attention)[0].cpu().double()  # (head, query, key)
        for name, key_positions in zip(POSITION_SHARES, keys, strict=True):
            columns[name + suffix] = pattern[:, queries, key_positions].mean(1)
    return columns
