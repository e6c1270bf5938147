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

from attnscope.core.sampled_rows import Rows, starts_of
from attnscope.corpus import Chunk, CorpusText, chunks, essence
from attnscope.corpus.batching import tokens_of
from attnscope.models.model import Model
from attnscope.results.tokens import Tokens
from attnscope.studies.describe.features import (
    RESTING,
    Feature,
    Flags,
    Levels,
    Numbers,
    TextFacts,
    blocks_of,
    catalogue,
)
from attnscope.studies.heads.measuring import decoder_start, log_frequency, target_of, unit_embeddings
from attnscope.studies.heads.options import DescribeOptions
from attnscope.studies.inputs.texts import special_ids

if TYPE_CHECKING:
    from attnscope.core.attention.row_samples import SampledRows

Arrays = dict[str, NDArray[Any]]
"""Arrays of the rows or entries of a text, by name."""

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
        queries: (row,): places of its sampled queries, ascending.
        fits: Whether descriptions are fitted on it; else they are scored on it.
        target: In an encoder-decoder, the tokens that the decoder reads as it writes the text again.
        rows: Kind of attention -> the rows of its queries, once the model has run; empty where it could not.
    """

    lot: bytes
    text: CorpusText
    chunk: Chunk
    queries: Numbers
    fits: bool = False
    target: Tokens | None = None
    rows: dict[str, SampledRows] = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, int]:
        """Return the index of its text, and the number of its chunk."""
        return self.chunk.text, self.chunk.number

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
                    units.append(Unit(lot, text, chunk, queries, target=target))
        units.sort(key=lambda unit: (unit.lot, unit.text.index))
        # Keep as many texts and queries as time and memory allow.
        n_heads = sum(np.multiply(model.info.n_heads, model.info.n_layers).tolist())
        bytes_per_entry = _N_FEATURES * len(model.info.kinds) + 2 * max(1, n_heads)
        n_units, n_queries = _cut_sample(
            units, options.queries, min(MOST_ENTRIES, MOST_BYTES // bytes_per_entry)
        )
        units = units[:n_units]
        for unit in units:
            rng = np.random.default_rng(int.from_bytes(unit.lot, "little"))
            unit.queries = np.sort(rng.permutation(unit.queries)[:n_queries]).astype(np.int64)
        # Every second text by another order fits; if there are few, every second chunk.
        lots = [lot_of(unit.text, self._seed) for unit in units]
        if len(set(lots)) < APART:
            lots = [unit.lot for unit in units]
        order = sorted(set(lots), key=lambda lot: lot[::-1])
        for unit, lot in zip(units, lots, strict=True):
            unit.fits = order.index(lot) % 2 == 0
        return sorted(units, key=lambda unit: not unit.fits)


def _cut_sample(units: Sequence[Unit], most_rows: int, most_entries: int) -> tuple[int, int]:
    """Return how many units are kept and how many queries of each: all that time and memory allow."""
    n_queries_of = np.array([len(unit.queries) for unit in units], np.int64)
    n_keys_of = np.array([len(unit.chunk) for unit in units], np.int64)

    def fits(n_units: int, n_queries: int) -> bool:
        rows = np.minimum(n_queries_of[:n_units], n_queries)
        n_entries = rows @ n_keys_of[:n_units]
        return bool(
            rows.sum() <= (most_rows if n_entries <= most_entries else min(most_rows, _FEWEST_ROWS))
        )

    # First leave out texts, until each may have QUERIES_A_TEXT queries.
    n_units = len(units)
    while n_units > FEWEST_TEXTS and not fits(n_units, QUERIES_A_TEXT):
        n_units -= max(1, n_units // 50)
    # Then give each as many queries as still fit.
    most = int(n_queries_of[:n_units].max(initial=1))
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

    ids: Numbers
    labels: tuple[str, ...]
    embeddings: NDArray[np.float32]

    @classmethod
    def of(cls, model: Model, labels: Mapping[int, str]) -> Types:
        """Return types by their numbers and labels."""
        import torch

        ids = np.array(sorted(labels), np.int64)
        rows = model.static_embeddings(torch.from_numpy(ids)[None].to(model.info.device))
        embeddings = (
            np.zeros((len(ids), 1), np.float32) if rows is None else rows[0].float().cpu().numpy()
        )
        return cls(ids, tuple(labels[int(number)] for number in ids), embeddings)

    def places(self, ids: Numbers) -> NDArray[np.int32]:
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
        sink_rows: (active row,): the row of `sinks` that it is part of.
        ordinary: (active row,): whether its query is no special token. Descriptions are fitted to these rows.
        offsets: (active entry,): how far each key is behind its query, in tokens.
        queries: (active row,): the place of each query.
    """

    kind: str
    heads: tuple[tuple[int, int], ...]
    features: Sequence[Feature]
    types: Types
    active: Rows
    sinks: Rows
    sink_features: Sequence[int]
    sink_rows: Numbers
    ordinary: Flags
    offsets: NDArray[np.int32]
    queries: Numbers

    def part(self, texts: Sequence[int]) -> Rows:
        """Copy the active rows of some texts whose queries are ordinary."""
        is_of_texts = np.isin(self.active.texts, np.asarray(texts))
        return self.active.select(np.flatnonzero(is_of_texts & self.ordinary))


def join_rows(
    model: Model,
    units: Sequence[Unit],
    counts: Numbers,
    heads: Sequence[tuple[int, int]] | None = None,
    also: Mapping[int, str] | None = None,
) -> list[Group]:
    """Join the rows of sampled texts, those of heads that may attend to the same keys in one group.

    `also` are types of token that other texts have: their numbers and labels.
    """
    # Features and types of tokens, of all texts together.
    special: dict[str, None] = {}
    labels = dict(also or {})
    for unit in units:
        for text in filter(None, (unit.chunk.tokens, unit.target)):
            special |= dict.fromkeys(text.labels[place] for place in np.flatnonzero(text.special))
            labels |= dict(zip(text.ids.tolist(), text.labels, strict=True))
    features = catalogue(list(special))
    types = Types.of(model, labels)
    frequent = frequent_words(units, counts)

    groups = []
    for kind in model.info.kinds:
        facts = [text_facts(model, unit.tokens(kind), counts, frequent) for unit in units]
        blocks = [
            blocks_of(features, text, unit.queries) for text, unit in zip(facts, units, strict=True)
        ]
        # Layers whose queries may attend to the same keys in all texts are one group: layer -> its heads.
        by_mask: dict[bytes, dict[int, list[int]]] = {}
        for layer, weights in sorted(units[0].rows[kind].weights.items()):
            chosen = [
                head for head in range(weights.shape[1]) if heads is None or (layer, head) in heads
            ]
            if chosen:
                mask = b"".join(np.packbits(unit.rows[kind].allowed[layer]).tobytes() for unit in units)
                by_mask.setdefault(mask, {})[layer] = chosen
        groups += [_group(kind, layers, units, blocks, features, types) for layers in by_mask.values()]
    return groups


def text_facts(model: Model, tokens: Tokens, counts: Numbers, frequent: Numbers) -> TextFacts:
    """Return the facts of a text that features need; `frequent` is the result of `frequent_words`."""
    import torch

    embeddings = unit_embeddings(model, torch.from_numpy(tokens.ids)[None])
    return TextFacts(
        tokens,
        log_frequency(counts, tokens.ids),
        np.isin(tokens.ids, frequent),
        None if embeddings is None else embeddings[0].cpu().numpy(),
    )


def frequent_words(units: Sequence[Unit], counts: Numbers) -> Numbers:
    """Return the most frequent words by number, which together are half of all words."""
    # Words that the sample holds.
    words: set[int] = set()
    for unit in units:
        tokens = unit.chunk.tokens
        has_letter = np.array([any(map(str.isalpha, label)) for label in tokens.labels])
        words.update(tokens.ids[has_letter & ~tokens.special].tolist())
    ids = np.array(sorted(words), np.int64)
    # The most frequent of them, up to half of all occurrences.
    share = np.exp(log_frequency(counts, ids))
    order = np.argsort(-share, kind="stable")
    before = np.cumsum(share[order]) - share[order]
    is_frequent: Flags = before < share.sum() / 2
    return ids[order[is_frequent]]


def _group(
    kind: str,
    layers: Mapping[int, list[int]],
    units: Sequence[Unit],
    blocks: Sequence[Levels],
    features: Sequence[Feature],
    types: Types,
) -> Group:
    sink_features = [number for number, feature in enumerate(features) if feature.about == "sink"]
    resting = [feature.name for feature in features].index(RESTING)
    active: list[Arrays] = []
    sinks: list[Arrays] = []
    more: list[Arrays] = []
    n_sink_rows = 0
    for number, (unit, levels) in enumerate(zip(units, blocks, strict=True)):
        # Keys that queries may attend to, (row, key), and the weights of the group's heads, (head, row, key).
        rows = unit.rows[kind]
        allowed = rows.allowed[next(iter(layers))]
        by_layer = [rows.weights[layer][:, heads] for layer, heads in layers.items()]
        weights = np.concatenate(by_layer, 1).transpose(1, 0, 2)
        tokens = unit.tokens(kind)
        token_types = types.places(tokens.ids)
        rests = levels[resting] > 0
        is_free = allowed & ~rests
        n_free = is_free.sum(1)

        # Off the sinks: rows with at least two such keys.
        used = np.flatnonzero(n_free > 1)
        is_entry = is_free & (n_free > 1)[:, None]
        queries, keys = is_entry.nonzero()
        entries = _cut_out(number, is_entry, levels, weights)
        active.append(
            {**entries, "key_types": token_types[keys], "query_types": token_types[unit.queries[used]]}
        )

        # On them: rows with a choice. The first entry of a row stands for all its free keys; the resting keys follow.
        has_choice = allowed.sum(1) > 1
        is_entry = np.column_stack([n_free > 0, allowed & rests]) & has_choice[:, None]
        on_free = np.where(is_free, weights, 0).sum(2, dtype=np.float32)[..., None]
        levels_of_sinks = np.pad(levels[sink_features], ((0, 0), (0, 0), (1, 0)))
        entries = _cut_out(number, is_entry, levels_of_sinks, np.concatenate([on_free, weights], 2))
        counts = np.column_stack([n_free, np.ones(allowed.shape)])[is_entry]
        sinks.append({**entries, "counts": counts})

        # Where the active rows stand: in `sinks`, in the text, and how far their keys are.
        more.append(
            {
                "sink_rows": n_sink_rows + np.cumsum(has_choice)[used] - 1,
                "ordinary": ~tokens.special[unit.queries[used]],
                "offsets": (keys - unit.queries[queries]).astype(np.int32),
                "queries": unit.queries[used],
            }
        )
        n_sink_rows += int(has_choice.sum())

    n_levels = np.array([feature.levels for feature in features])
    return Group(
        kind=kind,
        heads=tuple((layer, head) for layer, heads in layers.items() for head in heads),
        features=features,
        types=types,
        active=_join_rows(active, n_levels),
        sinks=_join_rows(sinks, n_levels[sink_features]),
        sink_features=sink_features,
        **_join(more),
    )


def _cut_out(number: int, is_entry: Flags, levels: Levels, weights: NDArray[np.floating]) -> Arrays:
    """Cut the entries of a text out, row by row: (…, row, key) to (…, entry); rows without any are left out."""
    lengths = is_entry.sum(1)
    lengths = lengths[lengths > 0]
    return {
        "features": levels[:, is_entry],
        "attention": weights[:, is_entry],
        "lengths": lengths,
        "texts": np.full(len(lengths), number),
    }


def _join(parts: Sequence[Arrays]) -> Arrays:
    """Join arrays of several texts along their last axis, by name."""
    return {name: np.concatenate([part[name] for part in parts], -1) for name in parts[0]}


def _join_rows(parts: Sequence[Arrays], levels: Numbers) -> Rows:
    joined: Any = _join(parts)
    return Rows(levels=levels, starts=starts_of(joined.pop("lengths")), **joined)
