"""Draw texts and queries, and join their rows of attention to the rows that descriptions are fitted to.

A hash of a text's content draws it, so the order of texts does not matter. `features` defines the features of keys,
and `studies.heads.measuring` keeps the rows of sampled queries as it measures.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core.sampled_rows import Rows, starts_of
from attnscope.corpus import Chunk, CorpusText, chunks, copy_key
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

MOST_TEXTS = 1024
MOST_CHARACTERS = 4_000_000
"""How many texts are drawn before they are tokenised, and how many characters they have, at most."""

FEWEST_TEXTS = 2
"""With fewer texts (or chunks of long ones), descriptions cannot be scored on other texts than they were fitted to."""

APART = 6
"""With at least so many texts, all chunks of a text are either for fitting or for scoring."""

_N_FEATURES = 132
"""About how many features there are."""

_FEWEST_ROWS = 200
"""How many rows are read whatever memory they take."""


@dataclass(eq=False)
class Unit:
    """Hold a sampled text, or a chunk of a long one.

    Attributes:
        lot: The hash by which it was drawn.
        text: The text.
        chunk: The text as tokens, or a part of it.
        queries: The places of its sampled queries, ascending, (row,).
        fits: Whether descriptions are fitted on it; else they are scored on it.
        target: In an encoder-decoder, the tokens that the decoder reads as it writes the text again.
        rows: Kind of attention -> the rows of its queries, once the model has run; empty if it was left out.
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
        return self.chunk.text_index, self.chunk.number

    def tokens(self, kind: str) -> Tokens:
        """Return the tokens that are queries and keys in a kind of attention, as descriptions show them.

        In cross-attention, a row of the decoder is shown by the token of the text that it writes, and so are the keys.
        """
        return self.target if kind == "decoder" and self.target is not None else self.chunk.tokens


# Draw


class Drawing:
    """Draw the texts with the smallest hashes of their content while something else reads the corpus."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._heap: list[tuple[int, int, CorpusText]] = []
        self._n_characters = 0

    def watch(self, texts: Iterable[CorpusText]) -> Iterator[CorpusText]:
        """Yield texts as they come, and keep those that are drawn so far."""
        for text in texts:
            # The text with the largest hash is the first of the heap, and the first to go.
            lot = -int.from_bytes(lot_of(text, self._seed), "big")
            heapq.heappush(self._heap, (lot, text.index, text))
            self._n_characters += text.n_characters
            while len(self._heap) > FEWEST_TEXTS and self._is_full():
                self._n_characters -= heapq.heappop(self._heap)[2].n_characters
            yield text

    def _is_full(self) -> bool:
        return len(self._heap) > MOST_TEXTS or self._n_characters > MOST_CHARACTERS

    def sample(self, model: Model, options: DescribeOptions, **cut: int | None) -> list[Unit]:
        """Draw chunks of the texts that were drawn, and queries of them; those for fitting come first.

        `cut` holds `chunk` and `stride`, as `corpus.chunks` takes them.
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
        # Every second text is for fitting, in an order of its own; of few texts every second chunk.
        lots = [lot_of(unit.text, self._seed) for unit in units]
        if len(set(lots)) < APART:
            lots = [unit.lot for unit in units]
        order = sorted(set(lots), key=lambda lot: lot[::-1])
        for unit, lot in zip(units, lots, strict=True):
            unit.fits = order.index(lot) % 2 == 0
        return sorted(units, key=lambda unit: not unit.fits)


def _cut_sample(units: Sequence[Unit], most_rows: int, most_entries: int) -> tuple[int, int]:
    """Return how many units are kept, and how many queries of each at most, so that rows and entries are no more."""
    n_queries_of = np.array([len(unit.queries) for unit in units], np.int64)
    n_keys_of = np.array([len(unit.chunk) for unit in units], np.int64)

    def fits(n_units: int, n_queries: int) -> bool:
        n_rows_of = np.minimum(n_queries_of[:n_units], n_queries)
        n_rows = int(n_rows_of.sum())
        is_small = n_rows_of @ n_keys_of[:n_units] <= most_entries
        return n_rows <= most_rows and bool(is_small or n_rows <= _FEWEST_ROWS)

    # First leave out texts, until each may have QUERIES_A_TEXT queries.
    n_units = len(units)
    while n_units > FEWEST_TEXTS and not fits(n_units, QUERIES_A_TEXT):
        n_units -= max(1, n_units // 50)
    # Then give each as many queries as still fit, and at least one.
    n_queries = int(n_queries_of[:n_units].max(initial=1))
    while n_queries > 1 and not fits(n_units, n_queries):
        n_queries -= 1
    return n_units, n_queries


def lot_of(text: CorpusText, seed: int, part: int = -1) -> bytes:
    """Return a hash of a text's content. Copies have the same hash, so that any of them may be drawn."""
    return hashlib.blake2b(copy_key(text) + f"{seed} {part}".encode(), digest_size=8).digest()


# Join


@dataclass(frozen=True, eq=False)
class Types:
    """Hold the types of token in the sample.

    Attributes:
        ids: Their numbers in the vocabulary, ascending, (type,).
        labels: How each is written.
        embeddings: Their static embeddings, (type, d); zeros if they are not known.
    """

    ids: Numbers
    labels: tuple[str, ...]
    embeddings: NDArray[np.float32]

    @classmethod
    def of(cls, model: Model, labels: Mapping[int, str]) -> Types:
        """Return types by their numbers and labels."""
        import torch

        ids = np.array(sorted(labels), np.int64)
        embeddings = np.zeros((len(ids), 1), np.float32)
        rows = model.static_embeddings(torch.from_numpy(ids)[None].to(model.info.device))
        if rows is not None:
            embeddings = rows[0].float().cpu().numpy()
        return cls(ids, tuple(map(labels.__getitem__, ids.tolist())), embeddings)

    def places(self, ids: Numbers) -> NDArray[np.int32]:
        """Return the type of each token, as its row here; all tokens must have one."""
        return np.searchsorted(self.ids, ids).astype(np.int32)


@dataclass(eq=False)
class Group:
    """Hold heads that may attend to the same keys, and their sampled rows, as active rows and as rows of sinks.

    Attributes:
        kind: The kind of attention.
        heads: The layer and number of each head.
        features: The features of keys.
        types: The types of token.
        active: Rows without the keys on which heads rest, if at least two other keys are left.
        sinks: All rows. The first entry stands for all keys that are not resting, if there are any; the others are the
            resting keys.
        sink_features: The numbers of the features that `sinks` has, in its order.
        sink_rows: The row of `sinks` that each active row is part of, (active row,).
        ordinary: Whether its query is no special token, (active row,). Descriptions are fitted to these rows.
        offsets: The place of each key less that of its query, in tokens, (active entry,).
        queries: The place of each query in its text, (active row,).
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
        """Copy the active rows of some texts, by their numbers in the sample, whose queries are ordinary."""
        is_of_texts = np.isin(self.active.texts, np.asarray(texts))
        return self.active.select(np.flatnonzero(is_of_texts & self.ordinary))


def join_rows(
    model: Model,
    units: Sequence[Unit],
    counts: Numbers,
    heads: Sequence[tuple[int, int]] | None = None,
    also: Mapping[int, str] | None = None,
) -> list[Group]:
    """Join the rows of sampled texts into groups of heads that may attend to the same keys.

    Args:
        model: The model.
        units: The texts, with their rows.
        counts: How often each token occurs in the corpus, by its number.
        heads: The (layer, head) that are described; None = all.
        also: Types of token that other texts have: their numbers and labels.
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
        blocks = []
        for unit in units:
            facts = text_facts(model, unit.tokens(kind), counts, frequent)
            blocks.append(blocks_of(features, facts, unit.queries))
        # Layers whose queries may attend to the same keys in all texts are one group: layer -> its heads.
        by_mask: dict[bytes, dict[int, list[int]]] = {}
        for layer, weights in sorted(units[0].rows[kind].weights.items()):
            chosen = list(range(weights.shape[1]))
            if heads is not None:
                chosen = [head for head in chosen if (layer, head) in heads]
            if chosen:
                masks = [np.packbits(unit.rows[kind].allowed[layer]).tobytes() for unit in units]
                by_mask.setdefault(b"".join(masks), {})[layer] = chosen
        groups += [_group(kind, layers, units, blocks, features, types) for layers in by_mask.values()]
    return groups


def text_facts(model: Model, tokens: Tokens, counts: Numbers, frequent: Numbers) -> TextFacts:
    """Return the facts of a text that features need; `frequent` is the result of `frequent_words`."""
    import torch

    of_batch = unit_embeddings(model, torch.from_numpy(tokens.ids)[None])
    embeddings = None if of_batch is None else of_batch[0].cpu().numpy()
    is_frequent = np.isin(tokens.ids, frequent)
    return TextFacts(tokens, log_frequency(counts, tokens.ids), is_frequent, embeddings)


def frequent_words(units: Sequence[Unit], counts: Numbers) -> Numbers:
    """Return the numbers of the most frequent words, which together are half of all words."""
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
    """Return the group of some heads, layer -> their numbers; `blocks` are the levels of features by text."""
    sink_features = [number for number, feature in enumerate(features) if feature.about == "sink"]
    resting = [feature.name for feature in features].index(RESTING)
    active: list[Arrays] = []
    sinks: list[Arrays] = []
    places: list[Arrays] = []
    n_sink_rows = 0
    for number, (unit, levels) in enumerate(zip(units, blocks, strict=True)):
        # Keys that queries may attend to, (row, key), and the weights of the group's heads, (head, row, key).
        rows = unit.rows[kind]
        allowed = rows.allowed[next(iter(layers))]
        by_layer = [rows.weights[layer][:, heads] for layer, heads in layers.items()]
        weights = np.concatenate(by_layer, 1).transpose(1, 0, 2)
        rests = levels[resting] > 0
        is_free = allowed & ~rests
        n_free = is_free.sum(1)

        # Off the sinks: rows with at least two such keys.
        used = np.flatnonzero(n_free > 1)
        is_entry = is_free & (n_free > 1)[:, None]
        in_row, keys = is_entry.nonzero()
        tokens = unit.tokens(kind)
        token_types = types.places(tokens.ids)
        entries = _cut_out(number, is_entry, levels, weights)
        entries |= {"key_types": token_types[keys], "query_types": token_types[unit.queries[used]]}
        active.append(entries)

        # On them: rows with a choice.
        has_choice = allowed.sum(1) > 1
        sinks.append(
            _cut_out_sinks(number, allowed & has_choice[:, None], rests, levels[sink_features], weights)
        )

        # Where the active rows stand: in `sinks`, in the text, and how far their keys are.
        places.append(
            {
                "sink_rows": n_sink_rows + np.cumsum(has_choice)[used] - 1,
                "ordinary": ~tokens.special[unit.queries[used]],
                "offsets": (keys - unit.queries[in_row]).astype(np.int32),
                "queries": unit.queries[used],
            }
        )
        n_sink_rows += int(has_choice.sum())

    n_levels = np.array([feature.levels for feature in features])
    all_heads: list[tuple[int, int]] = []
    for layer, heads in layers.items():
        all_heads += product([layer], heads)
    return Group(
        kind=kind,
        heads=tuple(all_heads),
        features=features,
        types=types,
        active=_join_rows(active, n_levels),
        sinks=_join_rows(sinks, n_levels[sink_features]),
        sink_features=sink_features,
        **_join(places),
    )


def _cut_out(number: int, is_entry: Flags, levels: Levels, weights: NDArray[np.floating]) -> Arrays:
    """Cut the entries of a text out of its rows, (…, row, key) to (…, entry); rows without any are left out.

    Args:
        number: The number of the text in the sample.
        is_entry: Which keys of which rows are entries, (row, key).
        levels: The levels of features, (feature, row, key).
        weights: The attention of heads, (head, row, key).

    Returns:
        Arrays by the names that `Rows` has for them; and "lengths", how many entries each row has.
    """
    lengths = is_entry.sum(1)
    lengths = lengths[lengths > 0]
    return {
        "features": levels[:, is_entry],
        "attention": weights[:, is_entry],
        "lengths": lengths,
        "texts": np.full(len(lengths), number),
    }


def _cut_out_sinks(
    number: int, allowed: Flags, rests: Flags, levels: Levels, weights: NDArray[np.floating]
) -> Arrays:
    """Cut the entries of sinks out: the first of a row stands for all its free keys, and the resting keys follow.

    Arguments are as in `_cut_out`; `allowed` and `rests` are (row, key), and rows without an allowed key are left out.
    """
    is_free = allowed & ~rests
    n_free = is_free.sum(1)
    is_entry = np.column_stack([n_free > 0, allowed & rests])
    on_free = np.where(is_free, weights, 0).sum(2, dtype=np.float32)[..., None]
    levels = np.pad(levels, ((0, 0), (0, 0), (1, 0)))
    entries = _cut_out(number, is_entry, levels, np.concatenate([on_free, weights], 2))
    entries["counts"] = np.column_stack([n_free, np.ones(allowed.shape)])[is_entry]
    return entries


def _join(parts: Sequence[Arrays]) -> Arrays:
    """Join arrays of several texts along their last axis, by name."""
    return {name: np.concatenate([part[name] for part in parts], -1) for name in parts[0]}


def _join_rows(parts: Sequence[Arrays], levels: Numbers) -> Rows:
    """Return the rows of several texts; `levels` is how many levels each feature has."""
    joined: Any = _join(parts)
    return Rows(levels=levels, starts=starts_of(joined.pop("lengths")), **joined)
