"""Draw texts and queries, and join their rows of attention to the rows that descriptions are fitted to.

A hash of a text's content draws it, so the order of texts does not matter. `features` defines the features of keys,
and `studies.heads.measuring` keeps the rows of sampled queries as it measures.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.corpus import Chunk, CorpusText, chunks, essence
from attnscope.corpus.batching import tokens_of
from attnscope.models.model import Model
from attnscope.results.tokens import Tokens
from attnscope.studies.describe.facts import TextFacts
from attnscope.studies.describe.features import RESTING, SINK, Feature, blocks_of, catalogue
from attnscope.studies.heads.measuring import Frequencies, decoder_start, target_of, unit_embeddings
from attnscope.studies.heads.options import DescribeOptions
from attnscope.studies.inputs.texts import special_ids

if TYPE_CHECKING:
    from attnscope.core.attention.row_samples import SampledRows
    from attnscope.core.sampled_rows import Rows

QUERIES_A_TEXT = 8
"""How many queries of a text are sampled at least, while that leaves texts out."""

MOST_ENTRIES = 120_000
"""The most pairs of a sampled query and a key of its text: the time of a description grows with them."""

MOST_BYTES = 160 * 2**20
"""The most memory for features of sampled rows and the attention of heads on them."""

MOST_TEXTS, MOST_CHARACTERS = 1024, 4_000_000
"""Texts that are drawn before they are tokenised, and their characters."""

FEWEST_TEXTS = 2
"""Below so many texts (chunks of long ones) nothing can be scored on others."""

APART = 6
"""From so many texts on, the chunks of one text are in one half."""

_N_FEATURES, _FEWEST_ROWS = 132, 200
"""About how many features there are; and how many rows are read whatever they take."""


@dataclass(eq=False)
class Unit:
    """A sampled text, or a chunk of a long one.

    Attributes:
        lot: The hash by which it was drawn.
        text_lot: The same of its text; chunks of one text share it.
        queries: (row,): places of its sampled queries, ascending.
        fits: Whether descriptions are fitted on it; else they are scored on it.
        target: In an encoder-decoder, the tokens that the decoder reads as it writes the text again.
        rows: Kind of attention -> the rows of its queries, once the model has run; empty where it could not.
    """

    lot: bytes
    text_lot: bytes
    text: CorpusText
    chunk: Chunk
    queries: NDArray[np.int64]
    fits: bool = False
    target: Tokens | None = None
    rows: dict[str, SampledRows] = field(default_factory=dict)

    def tokens(self, kind: str) -> Tokens:
        """Return the queries and keys in a kind of attention, as descriptions show them.

        Across, a row is the decoder's as it writes a token: it is shown by that token, and so are the keys.
        """
        return self.target if kind == "decoder" and self.target is not None else self.chunk.tokens


# Draw


class Drawing:
    """A draw of the texts with the smallest hashes of their content, made while something else reads the corpus."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._heap: list[tuple[int, int, CorpusText]] = []
        self._n_characters = 0

    def watch(self, texts: Iterable[CorpusText]) -> Iterator[CorpusText]:
        """Yield texts as they come, and hold some of them."""
        for text in texts:
            lot = -int.from_bytes(lot_of(text, self._seed), "big")
            heapq.heappush(self._heap, (lot, text.index, text))
            self._n_characters += text.n_characters
            while len(self._heap) > FEWEST_TEXTS and self._is_full():
                self._n_characters -= heapq.heappop(self._heap)[2].n_characters
            yield text

    def _is_full(self) -> bool:
        return len(self._heap) > MOST_TEXTS or self._n_characters > MOST_CHARACTERS

    def sample(self, model: Model, options: DescribeOptions, **cut: int | None) -> list[Unit]:
        """Draw chunks of the texts that are held, and queries of them; those that are fitted come first.

        `cut` says how long texts are cut, as in `corpus.chunks`.
        """
        # Cut the texts into chunks, and draw each by a hash of its own.
        special = special_ids(model)
        start = decoder_start(model)
        units: list[Unit] = []
        for *_, text in self._heap:
            tokens = tokens_of(text, model.tokenizer.encode, special)
            for chunk in chunks(tokens, text.index, limit=model.info.max_tokens, **cut):
                queries = np.flatnonzero(~chunk.repeated)
                if len(chunk) > 1 and len(queries):
                    lot = lot_of(text, self._seed, chunk.number)
                    target = None if start is None else target_of(start, chunk.tokens)
                    units.append(Unit(lot, lot_of(text, self._seed), text, chunk, queries, target=target))
        units.sort(key=lambda unit: (unit.lot, unit.text.index))
        # Keep as many texts and queries as time and memory allow.
        n_heads = sum(np.multiply(model.info.n_heads, model.info.n_layers).tolist())
        bytes_per_entry = _N_FEATURES * len(model.info.kinds) + 2 * max(1, n_heads)
        n_units, n_queries = _cut_sample(units, options.queries, bytes_per_entry)
        units = units[:n_units]
        for unit in units:
            rng = np.random.default_rng(int.from_bytes(unit.lot, "little"))
            unit.queries = np.sort(rng.permutation(unit.queries)[:n_queries]).astype(np.int64)
        # Every second text by another order fits; if there are few, every second chunk.
        are_apart = len({unit.text_lot for unit in units}) >= APART
        lots = [unit.text_lot if are_apart else unit.lot for unit in units]
        order = {lot: number for number, lot in enumerate(sorted(set(lots), key=lambda lot: lot[::-1]))}
        for unit, lot in zip(units, lots, strict=True):
            unit.fits = order[lot] % 2 == 0
        return sorted(units, key=lambda unit: not unit.fits)


def _cut_sample(units: Sequence[Unit], most_rows: int, bytes_per_entry: int) -> tuple[int, int]:
    """Return how many units are kept and how many queries of each: all that time and memory allow."""
    sizes = np.array([(len(unit.queries), len(unit.chunk)) for unit in units]).reshape(-1, 2)

    def fits(n_units: int, n_queries: int) -> bool:
        rows = np.minimum(sizes[:n_units, 0], n_queries)
        n_rows = int(rows.sum())
        n_entries = int((rows * sizes[:n_units, 1]).sum())
        is_small = n_entries * bytes_per_entry <= MOST_BYTES and n_entries <= MOST_ENTRIES
        return n_rows <= most_rows and (is_small or n_rows <= _FEWEST_ROWS)

    # First leave out texts, until each may have QUERIES_A_TEXT queries.
    n_units = len(units)
    while n_units > FEWEST_TEXTS and not fits(n_units, QUERIES_A_TEXT):
        n_units -= max(1, n_units // 50)
    # Then give each as many queries as still fit.
    most = int(sizes[:n_units, 0].max(initial=1))
    return n_units, next((n for n in range(most, 1, -1) if fits(n_units, n)), 1)


def lot_of(text: CorpusText, seed: int, part: int = -1) -> bytes:
    """Return a hash of a text's content. Copies have the same hash, so that any of them may be drawn."""
    return hashlib.blake2b(essence(text) + f"{seed} {part}".encode(), digest_size=8).digest()


# Join


@dataclass(frozen=True, eq=False)
class Types:
    """The types of token that the sample holds.

    Attributes:
        ids: (type,): their numbers in the vocabulary, ascending.
        embeddings: (type, d): their static embeddings; zeros if they are not known.
    """

    ids: NDArray[np.int64]
    labels: tuple[str, ...]
    embeddings: NDArray[np.float32]

    @classmethod
    def of(cls, model: Model, labels: Mapping[int, str]) -> Types:
        """Return types by their numbers and labels."""
        import torch

        ids = np.array(sorted(labels), np.int64)
        rows = model.static_embeddings(torch.from_numpy(ids)[None].to(model.info.device))
        embeddings = np.zeros((len(ids), 1), np.float32) if rows is None else rows[0].float().cpu().numpy()
        return cls(ids, tuple(labels[int(number)] for number in ids), embeddings)

    def places(self, ids: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the type of each token; all must be known."""
        return np.searchsorted(self.ids, ids).astype(np.int32)


@dataclass(eq=False)
class Group:
    """Heads that may attend to the same keys, and the sampled rows in two parts: where they rest, and the rest.

    Attributes:
        heads: (layer, head) of each.
        active: The rows without the keys on which heads rest, if they have two other keys.
        sinks: All rows. The first entry stands for all keys that are not resting, if there are any; the others are the
            resting keys.
        sink_features: The numbers of the features that `sinks` has, in its order.
        resting: The number of the feature of keys on which heads rest.
        sink_rows: (active row,): the row of `sinks` that it is part of.
        ordinary: (active row,): whether its query is no special token. Descriptions are fitted to these rows.
        offsets: (active entry,): how far each key is behind its query, in tokens.
        queries: (active row,): the place of each query.
    """

    kind: str
    heads: tuple[tuple[int, int], ...]
    features: tuple[Feature, ...]
    types: Types
    active: Rows
    sinks: Rows
    sink_features: tuple[int, ...]
    resting: int
    sink_rows: NDArray[np.int64]
    ordinary: NDArray[np.bool_]
    offsets: NDArray[np.int32]
    queries: NDArray[np.int64]

    def part(self, texts: Sequence[int]) -> Rows:
        """Copy the active rows of some texts whose queries are ordinary."""
        return self.active.select(np.flatnonzero(np.isin(self.active.texts, np.asarray(texts)) & self.ordinary))


def join_rows(
    model: Model,
    units: Sequence[Unit],
    frequencies: Frequencies,
    heads: Sequence[tuple[int, int]] | None = None,
    also: Mapping[int, str] | None = None,
) -> list[Group]:
    """Join the rows of sampled texts, those of heads that may attend to the same keys in one group.

    `also` are types of token that other texts have: their numbers and labels.
    """
    # Features and types of tokens, of all texts together.
    tokens = [tokens for unit in units for tokens in (unit.chunk.tokens, unit.target) if tokens is not None]
    special: dict[str, None] = {}
    labels = dict(also or {})
    for text in tokens:
        special |= dict.fromkeys(text.labels[place] for place in np.flatnonzero(text.special))
        labels |= dict(zip(text.ids.tolist(), text.labels, strict=True))
    features = catalogue(list(special))
    types = Types.of(model, labels)
    frequent = frequent_words(units, frequencies)

    # One group for each kind of attention and each set of layers with the same mask.
    groups = []
    for kind in model.info.kinds:
        facts = [text_facts(model, unit.tokens(kind), frequencies, frequent) for unit in units]
        blocks = [blocks_of(features, text, unit.queries) for text, unit in zip(facts, units, strict=True)]
        for layers in _alike(kind, units, heads):
            groups.append(_group(kind, layers, units, blocks, tuple(features), types))
    return groups


def text_facts(model: Model, tokens: Tokens, frequencies: Frequencies, frequent: frozenset[int]) -> TextFacts:
    """Return the facts of a text that features need."""
    import torch

    embeddings = unit_embeddings(model, torch.from_numpy(tokens.ids)[None])
    return TextFacts(
        tokens,
        frequencies.of(tokens.ids),
        np.isin(tokens.ids, list(frequent)),
        None if embeddings is None else embeddings[0].cpu().numpy(),
    )


def frequent_words(units: Sequence[Unit], frequencies: Frequencies) -> frozenset[int]:
    """Return the most frequent words, which together are half of all words."""
    # Words that the sample holds, by number.
    words: set[int] = set()
    for unit in units:
        tokens = unit.chunk.tokens
        has_letter = np.array([any(map(str.isalpha, label)) for label in tokens.labels])
        words.update(tokens.ids[has_letter & ~tokens.special].tolist())
    ids = np.array(sorted(words), np.int64)
    # The most frequent of them, up to half of all occurrences.
    share = np.exp(frequencies.of(ids))
    order = np.argsort(-share, kind="stable")
    before = np.cumsum(share[order]) - share[order]
    return frozenset(ids[order[before < share.sum() / 2]].tolist())


def _alike(
    kind: str, units: Sequence[Unit], chosen: Sequence[tuple[int, int]] | None
) -> Iterable[dict[int, list[int]]]:
    """Return sets of layers whose queries may attend to the same keys: layer -> its heads, or those that are chosen."""
    groups: dict[bytes, dict[int, list[int]]] = {}
    for layer, weights in sorted(units[0].rows[kind].weights.items()):
        heads = [head for head in range(weights.shape[1]) if chosen is None or (layer, head) in chosen]
        if heads:
            masks = b"".join(np.packbits(unit.rows[kind].allowed[layer]).tobytes() for unit in units)
            groups.setdefault(masks, {})[layer] = heads
    return groups.values()


def _group(
    kind: str,
    layers: Mapping[int, list[int]],
    units: Sequence[Unit],
    blocks: Sequence[NDArray[np.uint8]],
    features: tuple[Feature, ...],
    types: Types,
) -> Group:
    # Features of sinks, and of queries.
    sink_features = [n for n, feature in enumerate(features) if SINK.match(feature.name)]
    resting = next(n for n, feature in enumerate(features) if feature.name == RESTING)
    active: list[dict[str, NDArray[Any]]] = []
    sinks: list[dict[str, NDArray[Any]]] = []
    more: list[dict[str, NDArray[Any]]] = []
    n_sink_rows = 0
    for number, (unit, levels) in enumerate(zip(units, blocks, strict=True)):
        # Keys that queries may attend to, and the weights of the group's heads.
        allowed = unit.rows[kind].allowed[next(iter(layers))]
        by_layer = [unit.rows[kind].weights[layer][:, heads] for layer, heads in layers.items()]
        weights = np.concatenate(by_layer, 1).transpose(1, 0, 2)  # (head, row, key)
        rests = levels[resting] > 0
        tokens = unit.tokens(kind)
        token_types = types.places(tokens.ids)
        # Its rows off the sinks, and on them.
        used, of_unit = _active_rows(weights, allowed & ~rests, unit.queries, levels, token_types)
        active.append({**of_unit, "texts": np.full(len(used), number)})
        sinks_used, of_unit = _sink_rows(weights, allowed, rests, levels[sink_features])
        sinks.append({**of_unit, "texts": np.full(len(sinks_used), number)})
        # Where the active rows stand: in `sinks`, in the text, and how far their keys are.
        queries = unit.queries[used]
        of_row, keys = (allowed & ~rests)[used].nonzero()
        more.append(
            {
                "sink_rows": n_sink_rows + np.searchsorted(sinks_used, used),
                "ordinary": ~tokens.special[queries],
                "offsets": (keys - queries[of_row]).astype(np.int32),
                "queries": queries,
            }
        )
        n_sink_rows += len(sinks_used)

    n_levels = np.array([feature.levels for feature in features])
    return Group(
        kind=kind,
        heads=tuple((layer, head) for layer, heads in layers.items() for head in heads),
        features=features,
        types=types,
        active=_join_rows(active, n_levels),
        sinks=_join_rows(sinks, n_levels[sink_features]),
        sink_features=tuple(sink_features),
        resting=resting,
        **_join(more),
    )


def _active_rows(
    weights: NDArray[np.float16],
    free: NDArray[np.bool_],
    queries: NDArray[np.int64],
    levels: NDArray[np.uint8],
    token_types: NDArray[np.int32],
) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
    """Return the numbers of the rows with at least two keys off the sinks, and the arrays of these keys, by name."""
    n_free = free.sum(1)
    used = np.flatnonzero(n_free > 1)
    is_entry = free[used]
    return used, {
        # Entries are cut out row by row: (…, row, key) to (…, entry).
        "features": levels[:, used][:, is_entry],
        "lengths": n_free[used],
        "attention": weights[:, used][:, is_entry],
        "key_types": token_types[is_entry.nonzero()[1]],
        "query_types": token_types[queries[used]],
    }


def _sink_rows(
    weights: NDArray[np.float16], allowed: NDArray[np.bool_], rests: NDArray[np.bool_], levels: NDArray[np.uint8]
) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
    """Return the numbers of the rows with at least two keys, and the arrays of their entries, by name.

    The first entry of a row stands for all its free keys; the resting keys follow.
    """
    free = allowed & ~rests
    used = np.flatnonzero(allowed.sum(1) > 1)  # a query with one key has no choice
    n_free = free[used].sum(1)[:, None]
    is_entry = np.concatenate([n_free > 0, (allowed & rests)[used]], 1)
    on_free = np.where(free, weights, 0).sum(2, dtype=np.float32)[:, used, None]
    return used, {
        "features": np.pad(levels[:, used], ((0, 0), (0, 0), (1, 0)))[:, is_entry],
        "lengths": is_entry.sum(1),
        "attention": np.concatenate([on_free, weights[:, used]], 2)[:, is_entry],
        "counts": np.pad(n_free, ((0, 0), (0, allowed.shape[1])), constant_values=1)[is_entry].astype(np.float64),
    }


def _join(parts: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, NDArray[Any]]:
    """Join arrays of several texts along their last axis, by name."""
    return {name: np.concatenate([part[name] for part in parts], -1) for name in parts[0]}


def _join_rows(parts: Sequence[Mapping[str, NDArray[Any]]], levels: NDArray[np.int64]) -> Rows:
    from attnscope.core.sampled_rows import Rows, starts_of

    joined: Any = _join(parts)
    return Rows(levels=levels, starts=starts_of(joined.pop("lengths")), **joined)
