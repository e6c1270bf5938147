"""Sample texts and queries, and join their attention rows into the arrays that descriptions are fitted to.

A *row* is the attention of one sampled query. A *unit* is a sampled text, or a chunk of a long text. Texts are sampled
by a hash of their content, so their order does not matter. Special tokens and the first token are *sinks*, or *resting
keys*: heads rest on them. All other keys are *free*.

`features` defines the features of keys. `studies.heads.measuring` keeps the rows of sampled queries while it measures.
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

from attnscope.arrays import Flags, Integers, Levels
from attnscope.core.sampled_rows import RowSample, starts_from_lengths
from attnscope.corpus import Chunk, CorpusText, chunks, copy_key
from attnscope.corpus.batching import tokens_of
from attnscope.models.model import Model
from attnscope.results.tokens import Tokens
from attnscope.studies.describe.features import (
    RESTING,
    Arrays,
    Feature,
    FeatureFacts,
    compute_levels,
    list_features,
)
from attnscope.studies.heads.measuring import (
    encode_decoder_start,
    log_frequency,
    look_up_unit_embeddings,
    shift_right,
)
from attnscope.studies.heads.options import DescribeOptions
from attnscope.studies.inputs.texts import special_ids

if TYPE_CHECKING:
    from attnscope.core.attention.row_samples import TextRows

MIN_QUERIES_PER_TEXT = 8
"""If the sample is too large, units are left out as long as each cannot have this many queries. Only then do the rest
get fewer queries."""

MAX_ENTRIES = 120_000
"""The largest number of pairs of a sampled query and a key of its text. The time to fit a description grows with it."""

MAX_BYTES = 160 * 2**20
"""The maximal memory for features of sampled rows and the attention of heads on them."""

MAX_TEXTS = 1024
"""The largest number of texts that are drawn before they are tokenised."""

MAX_CHARACTERS = 4_000_000
"""The largest number of characters of these texts together."""

MIN_TEXTS = 2
"""The smallest number of units: some are for fitting descriptions, and others for scoring them."""

MIN_TEXTS_TO_SPLIT = 6
"""With at least this many texts, half of the texts are for fitting; with fewer, half of all chunks are."""

_N_FEATURES_ESTIMATE = 132
"""About the number of features."""

_MIN_ROWS = 200
"""Up to this number, rows are sampled even if they exceed the limits of memory and time."""


@dataclass(eq=False)
class SampledText:
    """Hold a unit of the sample: a text, or a chunk of a long text.

    Attributes:
        digest: The hash by which it was drawn.
        text: The text.
        chunk: The tokens of the text, or a part of them.
        queries: The positions of its sampled queries, ascending, (row,).
        is_for_fitting: Whether descriptions are fitted to it; if not, they are scored on it.
        target: In an encoder-decoder, the tokens that the decoder reads while it reproduces the text; else None.
        rows: Kind of attention -> the rows of its queries. Empty until the model has run, and for a text that the
            study then leaves out.
    """

    digest: bytes
    text: CorpusText
    chunk: Chunk
    queries: Integers
    is_for_fitting: bool = False
    target: Tokens | None = None
    rows: dict[str, TextRows] = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, int]:
        """Return the index of the text in the corpus, and the index of the chunk in the text."""
        return self.chunk.text_index, self.chunk.number

    def tokens(self, kind: str) -> Tokens:
        """Return the tokens that descriptions show for the queries and keys of a kind of attention.

        They are the decoder's tokens for the decoder's own attention, and else the tokens of the chunk. In
        cross-attention keys are tokens of the chunk. A query is shown as the token that the decoder predicts at its
        position, which is a token of the chunk too.
        """
        return self.target if kind == "decoder" and self.target is not None else self.chunk.tokens


# Draw


class TextSampler:
    """Draw the texts whose contents have the smallest hashes, while another study reads the corpus.

    `watch` wraps the iterator over the corpus. After the last text, `sample` draws from the texts that passed.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        # (negated hash, index of the text, text), see `watch`.
        self._heap: list[tuple[int, int, CorpusText]] = []
        self._n_characters = 0

    def watch(self, texts: Iterable[CorpusText]) -> Iterator[CorpusText]:
        """Yield all texts unchanged, and keep the texts with the smallest hashes so far."""
        for text in texts:
            # Hashes are negated, so that the heap pops the text with the largest hash first.
            key = -int.from_bytes(hash_text(text, self._seed), "big")
            heapq.heappush(self._heap, (key, text.index, text))
            self._n_characters += text.n_characters
            while len(self._heap) > MIN_TEXTS and (
                len(self._heap) > MAX_TEXTS or self._n_characters > MAX_CHARACTERS
            ):
                *_, dropped = heapq.heappop(self._heap)
                self._n_characters -= dropped.n_characters
            yield text

    def sample(self, model: Model, options: DescribeOptions, **cut: int | None) -> list[SampledText]:
        """Draw units from the texts that passed `watch`, and queries of these units; units for fitting come first.

        `cut` may hold `chunk` and `stride`, the length and step of chunks that `corpus.chunks` takes.
        """
        # Cut the texts into chunks. Each chunk has a hash of its own; sort by it.
        special = special_ids(model)
        start = encode_decoder_start(model)
        units: list[SampledText] = []
        for *_, text in self._heap:
            tokens = tokens_of(text, model.tokenizer.encode, special)
            for chunk in chunks(tokens, text.index, limit=model.info.max_tokens, **cut):
                # Chunks overlap: tokens that the previous chunk has too are no queries here.
                queries = np.flatnonzero(~chunk.is_repeated)
                if len(chunk) > 1 and len(queries):
                    digest = hash_text(text, self._seed, chunk.number)
                    target = None if start is None else shift_right(start, chunk.tokens)
                    units.append(SampledText(digest, text, chunk, queries, target=target))
        units.sort(key=lambda unit: (unit.digest, unit.text.index))
        # Keep the number of units and queries that time and memory allow. An entry takes a byte per feature and kind of
        # attention, and two bytes per head. The hash of a unit is also the seed that draws its queries.
        n_heads = int(np.dot(model.info.n_heads, model.info.n_layers))
        bytes_per_entry = _N_FEATURES_ESTIMATE * len(model.info.kinds) + 2 * max(1, n_heads)
        max_entries = min(MAX_ENTRIES, MAX_BYTES // bytes_per_entry)
        n_units, n_queries = _size_sample(units, options.queries, max_entries)
        units = units[:n_units]
        for unit in units:
            rng = np.random.default_rng(int.from_bytes(unit.digest, "little"))
            unit.queries = np.sort(rng.permutation(unit.queries)[:n_queries]).astype(np.int64)
        # Sort the texts by their reversed hashes, and fit to every second text. Reversal makes this order independent
        # of the order in which texts were drawn. With few texts, sort the chunks instead.
        digests = [hash_text(unit.text, self._seed) for unit in units]
        if len(set(digests)) < MIN_TEXTS_TO_SPLIT:
            digests = [unit.digest for unit in units]
        order = sorted(set(digests), key=lambda digest: digest[::-1])
        for unit, digest in zip(units, digests, strict=True):
            unit.is_for_fitting = order.index(digest) % 2 == 0
        return sorted(units, key=lambda unit: not unit.is_for_fitting)


def _size_sample(units: Sequence[SampledText], max_rows: int, max_entries: int) -> tuple[int, int]:
    """Return the number of units to keep and the largest number of queries of each, within the limits."""
    # The queries and the keys of each unit, (unit,).
    unit_queries = np.array([len(unit.queries) for unit in units], np.int64)
    unit_keys = np.array([len(unit.chunk) for unit in units], np.int64)

    def is_within_limits(n_units: int, n_queries: int) -> bool:
        unit_rows = np.minimum(unit_queries[:n_units], n_queries)
        n_rows = int(unit_rows.sum())
        n_entries = int(unit_rows @ unit_keys[:n_units])
        return n_rows <= max_rows and (n_entries <= max_entries or n_rows <= _MIN_ROWS)

    # Leave out units, about 2% at a time, until each may have MIN_QUERIES_PER_TEXT queries.
    n_units = len(units)
    while n_units > MIN_TEXTS and not is_within_limits(n_units, MIN_QUERIES_PER_TEXT):
        n_units -= max(1, n_units // 50)
    # Then give each the largest number of queries that the limits allow, and at least one.
    n_queries = int(unit_queries[:n_units].max(initial=1))
    while n_queries > 1 and not is_within_limits(n_units, n_queries):
        n_queries -= 1
    return n_units, n_queries


def hash_text(text: CorpusText, seed: int, chunk: int = -1) -> bytes:
    """Return a hash of a text's content and a chunk's index (-1 = the whole text). Copies have the same hash."""
    return hashlib.blake2b(copy_key(text) + f"{seed} {chunk}".encode(), digest_size=8).digest()


# Join


class TokenTypes:
    """Hold the types of token in the sample. A type is an entry of the vocabulary.

    Attributes:
        ids: Their token ids, ascending, (type,).
        labels: Their labels, (type,).
        embeddings: Their static embeddings, (type, d); zeros, (type, 1), if the model does not give them.
    """

    def __init__(self, model: Model, labels: Mapping[int, str]) -> None:
        import torch

        self.ids = np.array(sorted(labels), np.int64)
        self.labels = [labels[token_id] for token_id in self.ids.tolist()]
        self.embeddings = np.zeros((len(labels), 1), np.float32)
        batch = model.static_embeddings(torch.from_numpy(self.ids)[None].to(model.info.device))
        if batch is not None:
            self.embeddings = batch[0].float().cpu().numpy()

    def find_indices(self, ids: Integers) -> NDArray[np.int32]:
        """Return the index of the type of each token id. All ids must be among `self.ids`."""
        return np.searchsorted(self.ids, ids).astype(np.int32)


@dataclass(eq=False)
class HeadGroup:
    """Hold heads that may attend to the same keys, with their sampled rows in two forms.

    *Active rows* hold the attention of queries on their free keys. *Sink rows* hold the attention of queries on each
    resting key, and on all free keys together. An *entry* is one key of a row, or a group of keys that counts as one.

    Attributes:
        kind: The kind of attention.
        heads: The (layer, head index) of each head.
        features: The features of keys.
        types: The types of token.
        active_rows: One row per query with at least two free keys. Its entries are the free keys.
        sink_rows: One row per query that may attend to at least two keys. Its entries are one for all free keys
            together, if there are any, and one per resting key.
        sink_features: The indices in `features` of the features of `sink_rows`, in the order of `sink_rows`.
        sink_row_of_active: The index of the sink row of the same query, (active row,).
        is_ordinary: Whether the query is no special token, (active row,). Descriptions are fitted to these rows.
        offsets: The position of each key minus the position of its query, in tokens, (active entry,).
        queries: The position of each query in its text, (active row,).
    """

    kind: str
    heads: tuple[tuple[int, int], ...]
    features: Sequence[Feature]
    types: TokenTypes
    active_rows: RowSample
    sink_rows: RowSample
    sink_features: Sequence[int]
    sink_row_of_active: Integers
    is_ordinary: Flags
    offsets: NDArray[np.int32]
    queries: Integers

    def ordinary_rows(self, texts: Sequence[int]) -> RowSample:
        """Copy the active rows of ordinary queries in some units; `texts` are indices of units in the sample."""
        is_chosen = np.isin(self.active_rows.texts, np.asarray(texts)) & self.is_ordinary
        return self.active_rows.select(np.flatnonzero(is_chosen))


def join_rows(
    model: Model,
    units: Sequence[SampledText],
    counts: Integers,
    heads: Sequence[tuple[int, int]] | None = None,
    extra_labels: Mapping[int, str] | None = None,
) -> list[HeadGroup]:
    """Join the rows of sampled texts into groups of heads that may attend to the same keys.

    Args:
        model: The model.
        units: The sample, with rows of all kinds of attention.
        counts: Counts of tokens in the corpus, (token id,).
        heads: The (layer, head) that are described; None = all.
        extra_labels: Further types of token, from other texts: token id -> label.
    """
    # The labels of special tokens, each once and in order (a dict with values None); and token id -> label.
    special: dict[str, None] = {}
    labels = dict(extra_labels or {})
    for unit in units:
        for tokens in (unit.chunk.tokens, unit.target):
            if tokens is not None:
                special |= dict.fromkeys(tokens.labels[i] for i in np.flatnonzero(tokens.special))
                labels |= zip(tokens.ids.tolist(), tokens.labels, strict=True)
    features = list_features(list(special))
    types = TokenTypes(model, labels)
    frequent_ids = find_frequent_words(units, counts)

    groups = []
    for kind in model.info.kinds:
        # The levels of all features in each unit, (feature, query, key).
        levels_of_texts = []
        for unit in units:
            facts = compute_text_facts(model, unit.tokens(kind), counts, frequent_ids)
            levels_of_texts.append(compute_levels(features, facts, unit.queries))
        # Layers with the same masks in all units make one group. A mask, as bytes -> layer -> its heads.
        layers_by_mask: dict[bytes, dict[int, list[int]]] = {}
        for layer, weights in sorted(units[0].rows[kind].weights.items()):
            # (row, head, key)
            n_heads = weights.shape[1]
            chosen = [head for head in range(n_heads) if heads is None or (layer, head) in heads]
            if chosen:
                masks = [np.packbits(unit.rows[kind].allowed[layer]).tobytes() for unit in units]
                layers_by_mask.setdefault(b"".join(masks), {})[layer] = chosen
        for heads_by_layer in layers_by_mask.values():
            groups.append(_join_group(kind, heads_by_layer, units, levels_of_texts, features, types))
    return groups


def compute_text_facts(
    model: Model, tokens: Tokens, counts: Integers, frequent_ids: Integers
) -> FeatureFacts:
    """Compute the facts of a text that features need; `frequent_ids` are from `find_frequent_words`."""
    import torch

    # The model takes a batch: here of one text.
    batch = look_up_unit_embeddings(model, torch.from_numpy(tokens.ids)[None])
    embeddings = None if batch is None else batch[0].cpu().numpy()
    is_frequent = np.isin(tokens.ids, frequent_ids)
    return FeatureFacts(tokens, log_frequency(counts, tokens.ids), is_frequent, embeddings)


def find_frequent_words(units: Sequence[SampledText], counts: Integers) -> Integers:
    """Return the ids of the most frequent words of a sample, which make up half of all words in the corpus."""
    # The ids of the sample's words, which are tokens with a letter.
    words: set[int] = set()
    for unit in units:
        tokens = unit.chunk.tokens
        has_letter = np.array([any(map(str.isalpha, label)) for label in tokens.labels])
        words.update(tokens.ids[has_letter & ~tokens.special].tolist())
    ids = np.array(sorted(words), np.int64)
    # A word is frequent if all words before it, in order of frequency, make up less than half.
    share = np.exp(log_frequency(counts, ids))
    order = np.argsort(-share, kind="stable")
    share_before = np.cumsum(share[order]) - share[order]
    is_frequent: Flags = share_before < share.sum() / 2
    return ids[order[is_frequent]]


def _join_group(
    kind: str,
    heads_by_layer: Mapping[int, list[int]],
    units: Sequence[SampledText],
    levels_of_texts: Sequence[Levels],
    features: Sequence[Feature],
    types: TokenTypes,
) -> HeadGroup:
    """Join the rows of heads that have the same masks.

    `levels_of_texts` are the levels of all features in each unit, (feature, query, key).
    """
    sink_features = [index for index, feature in enumerate(features) if feature.about == "sink"]
    resting = [feature.name for feature in features].index(RESTING)
    # One mapping per unit: field of `RowSample` -> array, and for the facts field of `HeadGroup` -> array.
    active_parts: list[Arrays] = []
    sink_parts: list[Arrays] = []
    fact_parts: list[Arrays] = []
    n_sink_rows = 0
    for text_index, (unit, levels) in enumerate(zip(units, levels_of_texts, strict=True)):
        # The keys that queries may attend to, (row, key), the same in all layers of the group; and the weights of the
        # group's heads, (head, row, key).
        rows = unit.rows[kind]
        allowed = rows.allowed[next(iter(heads_by_layer))]
        by_layer = [rows.weights[layer][:, heads] for layer, heads in heads_by_layer.items()]
        weights = np.concatenate(by_layer, 1).transpose(1, 0, 2)
        is_resting = levels[resting] > 0
        is_free = allowed & ~is_resting

        # Active rows have at least two free keys.
        is_active = is_free.sum(1) > 1
        is_entry = is_free & is_active[:, None]
        entry_rows, keys = is_entry.nonzero()
        queries = unit.queries[is_active]
        tokens = unit.tokens(kind)
        token_types = types.find_indices(tokens.ids)
        entries = _extract_entries(text_index, is_entry, levels, weights)
        active_parts.append(
            entries | {"key_types": token_types[keys], "query_types": token_types[queries]}
        )

        # Sink rows have at least two allowed keys.
        has_choice = allowed.sum(1) > 1
        sink_parts.append(
            _extract_sink_entries(
                text_index, allowed & has_choice[:, None], is_resting, levels[sink_features], weights
            )
        )

        # Sink rows are counted in order: the n-th row with a choice is sink row n_sink_rows + n - 1. Every active row
        # has a choice.
        fact_parts.append(
            {
                "sink_row_of_active": n_sink_rows + np.cumsum(has_choice)[is_active] - 1,
                "is_ordinary": ~tokens.special[queries],
                "offsets": (keys - unit.queries[entry_rows]).astype(np.int32),
                "queries": queries,
            }
        )
        n_sink_rows += int(has_choice.sum())

    n_levels = np.array([feature.levels for feature in features])
    all_heads: list[tuple[int, int]] = []
    for layer, heads in heads_by_layer.items():
        all_heads += product([layer], heads)
    return HeadGroup(
        kind=kind,
        heads=tuple(all_heads),
        features=features,
        types=types,
        active_rows=_join_rows(active_parts, n_levels),
        sink_rows=_join_rows(sink_parts, n_levels[sink_features]),
        sink_features=sink_features,
        **_concatenate(fact_parts),
    )


def _extract_entries(
    text_index: int, is_entry: Flags, levels: Levels, weights: NDArray[np.floating]
) -> Arrays:
    """Extract the entries of a unit from its rows, (…, row, key) to (…, entry); leave out rows without entries.

    Args:
        text_index: The index of the unit in the sample.
        is_entry: Which keys of which rows are entries, (row, key).
        levels: The levels of features, (feature, row, key).
        weights: The attention of heads, (head, row, key).

    Returns:
        Field of `RowSample` -> array; and "lengths" -> the number of entries of each row, (row,).
    """
    lengths = is_entry.sum(1)
    lengths = lengths[lengths > 0]
    return {
        "features": levels[:, is_entry],
        "attention": weights[:, is_entry],
        "lengths": lengths,
        "texts": np.full(len(lengths), text_index),
    }


def _extract_sink_entries(
    text_index: int,
    allowed: Flags,
    is_resting: Flags,
    levels: Levels,
    weights: NDArray[np.floating],
) -> Arrays:
    """Extract the entries of sink rows from the rows of a unit: all free keys of a row as one, then its resting keys.

    Rows without allowed keys are left out. `allowed` and `is_resting` are (row, key). Other arguments are as in
    `_extract_entries`.
    """
    # Put a column before the keys. It stands for all free keys: its weight is the sum of theirs, and its levels are 0.
    is_free = allowed & ~is_resting
    n_free = is_free.sum(1)
    is_entry = np.column_stack([n_free > 0, allowed & is_resting])
    free_weights = np.where(is_free, weights, 0).sum(2, dtype=np.float32)[..., None]
    weights = np.concatenate([free_weights, weights], 2)
    levels = np.pad(levels, ((0, 0), (0, 0), (1, 0)))
    entries = _extract_entries(text_index, is_entry, levels, weights)
    # The number of keys that each entry stands for, (entry,).
    entries["counts"] = np.column_stack([n_free, np.ones(allowed.shape)])[is_entry]
    return entries


def _concatenate(parts: Sequence[Arrays]) -> Arrays:
    """Concatenate the arrays of each name, one from each unit, along their last axis."""
    return {name: np.concatenate([part[name] for part in parts], -1) for name in parts[0]}


def _join_rows(parts: Sequence[Arrays], n_levels: Integers) -> RowSample:
    """Join the rows of several units; `n_levels` is the number of levels of each feature, (feature,)."""
    joined: Any = _concatenate(parts)
    return RowSample(levels=n_levels, starts=starts_from_lengths(joined.pop("lengths")), **joined)
