"""Sample texts and queries, and join their rows of attention into the arrays that descriptions are fitted to.

A text is sampled by the hash of its content, so the order of texts does not matter. `features` defines the features of
keys, and `studies.heads.measuring` keeps the rows of sampled queries as it measures.
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
    Flags,
    Integers,
    Levels,
    blocks_of,
    catalogue,
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

QUERIES_A_TEXT = 8
"""If the sample is too large, texts are left out until each can have this many queries; only then it has fewer."""

MAX_ENTRIES = 120_000
"""The most pairs of a sampled query and a key of its text: the time of a description grows with them."""

MAX_BYTES = 160 * 2**20
"""The most memory for features of sampled rows and the attention of heads on them."""

MAX_TEXTS = 1024
"""How many texts are drawn, at most, before they are tokenised."""

MAX_CHARACTERS = 4_000_000
"""How many characters these texts have together, at most."""

MIN_TEXTS = 2
"""With fewer texts (or chunks of long ones), descriptions cannot be scored on other texts than they were fitted to."""

TEXTS_TO_SPLIT = 6
"""With at least this many texts, half of the texts are for fitting; with fewer, half of all chunks are."""

_N_FEATURES = 132
"""About how many features there are."""

_MIN_ROWS = 200
"""How many rows are read whatever memory they take."""


@dataclass(eq=False)
class SampledText:
    """Hold a sampled text, or a chunk of a long one.

    Attributes:
        digest: The hash by which it was drawn.
        text: The text.
        chunk: The text as tokens, or a part of it.
        queries: The positions of its sampled queries, ascending, (row,).
        fits: Whether descriptions are fitted to it; else they are scored on it.
        target: In an encoder-decoder, the tokens that the decoder reads as it writes the text again.
        rows: Kind of attention -> the rows of its queries, once the model has run; empty if it was left out.
    """

    digest: bytes
    text: CorpusText
    chunk: Chunk
    queries: Integers
    fits: bool = False
    target: Tokens | None = None
    rows: dict[str, TextRows] = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, int]:
        """Return the index of the text in the corpus, and the number of the chunk in the text."""
        return self.chunk.text_index, self.chunk.number

    def tokens(self, kind: str) -> Tokens:
        """Return the tokens of the queries and of the keys in a kind of attention, as descriptions show them.

        In cross-attention, a query is shown as the source token that the decoder writes at its position, and keys are
        source tokens anyway: both are those of the chunk.
        """
        return self.target if kind == "decoder" and self.target is not None else self.chunk.tokens


# Draw


class TextSampler:
    """Draw the texts whose contents have the smallest hashes, while something else reads the corpus."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._heap: list[tuple[int, int, CorpusText]] = []
        self._n_characters = 0

    def watch(self, texts: Iterable[CorpusText]) -> Iterator[CorpusText]:
        """Yield texts as they come, and keep those with the smallest hashes so far."""
        for text in texts:
            # Hashes are negated: the heap pops the text with the largest hash first.
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
        """Draw chunks of the texts that were watched, and queries of these chunks; units for fitting come first.

        `cut` holds `chunk` and `stride`, as `corpus.chunks` takes them.
        """
        # Cut the texts into chunks, and sort these by hashes of their own.
        special = special_ids(model)
        start = encode_decoder_start(model)
        units: list[SampledText] = []
        for *_, text in self._heap:
            tokens = tokens_of(text, model.tokenizer.encode, special)
            for chunk in chunks(tokens, text.index, limit=model.info.max_tokens, **cut):
                queries = np.flatnonzero(~chunk.is_repeated)
                if len(chunk) > 1 and len(queries):
                    digest = hash_text(text, self._seed, chunk.number)
                    target = None if start is None else shift_right(start, chunk.tokens)
                    units.append(SampledText(digest, text, chunk, queries, target=target))
        units.sort(key=lambda unit: (unit.digest, unit.text.index))
        # Keep as many units and queries as time and memory allow; the hash also draws the queries.
        n_heads = int(np.dot(model.info.n_heads, model.info.n_layers))
        bytes_per_entry = _N_FEATURES * len(model.info.kinds) + 2 * max(1, n_heads)
        max_entries = min(MAX_ENTRIES, MAX_BYTES // bytes_per_entry)
        n_units, n_queries = _size_sample(units, options.queries, max_entries)
        units = units[:n_units]
        for unit in units:
            rng = np.random.default_rng(int.from_bytes(unit.digest, "little"))
            unit.queries = np.sort(rng.permutation(unit.queries)[:n_queries]).astype(np.int64)
        # Sort texts by their hashes read backwards, so that this order has nothing to do with that of drawing, and fit
        # to every second one. With few texts, sort chunks.
        digests = [hash_text(unit.text, self._seed) for unit in units]
        if len(set(digests)) < TEXTS_TO_SPLIT:
            digests = [unit.digest for unit in units]
        order = sorted(set(digests), key=lambda digest: digest[::-1])
        for unit, digest in zip(units, digests, strict=True):
            unit.fits = order.index(digest) % 2 == 0
        return sorted(units, key=lambda unit: not unit.fits)


def _size_sample(units: Sequence[SampledText], max_rows: int, max_entries: int) -> tuple[int, int]:
    """Return how many units are kept, and how many queries of each at most, within limits of rows and entries."""
    # The queries and the keys of each unit, (unit,).
    unit_queries = np.array([len(unit.queries) for unit in units], np.int64)
    unit_keys = np.array([len(unit.chunk) for unit in units], np.int64)

    def is_within_limits(n_units: int, n_queries: int) -> bool:
        unit_rows = np.minimum(unit_queries[:n_units], n_queries)
        n_rows = int(unit_rows.sum())
        n_entries = int(unit_rows @ unit_keys[:n_units])
        return n_rows <= max_rows and (n_entries <= max_entries or n_rows <= _MIN_ROWS)

    # First leave out units, until each may have QUERIES_A_TEXT queries.
    n_units = len(units)
    while n_units > MIN_TEXTS and not is_within_limits(n_units, QUERIES_A_TEXT):
        n_units -= max(1, n_units // 50)
    # Then give each as many queries as the limits allow, and at least one.
    n_queries = int(unit_queries[:n_units].max(initial=1))
    while n_queries > 1 and not is_within_limits(n_units, n_queries):
        n_queries -= 1
    return n_units, n_queries


def hash_text(text: CorpusText, seed: int, chunk: int = -1) -> bytes:
    """Return a hash of a text's content, and of a chunk's number (-1 = the whole text). Copies have the same hash."""
    return hashlib.blake2b(copy_key(text) + f"{seed} {chunk}".encode(), digest_size=8).digest()


# Join


class TokenTypes:
    """Hold the types of token in the sample.

    Attributes:
        ids: Their token ids, ascending, (type,).
        labels: Their labels.
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

    def indices(self, ids: Integers) -> NDArray[np.int32]:
        """Return the index of the type of each token; all tokens must have one of these types."""
        return np.searchsorted(self.ids, ids).astype(np.int32)


@dataclass(eq=False)
class HeadGroup:
    """Hold heads that may attend to the same keys, with their sampled rows in two forms.

    A head *rests* on sinks: special tokens and the first token are the resting keys. The *active* rows are attention on
    the other keys, the *free* ones. The rows of *sinks* say how much of a row lies on each resting key, and how much on
    all free keys together.

    Attributes:
        kind: The kind of attention.
        heads: The (layer, number) of each head.
        features: The features of keys.
        types: The types of token.
        active: Rows over their free keys; rows with fewer than two free keys are left out.
        sinks: Rows over one entry that stands for all free keys, if there are any, and their resting keys; rows whose
            query may attend to one key alone are left out.
        sink_features: The numbers of the features that `sinks` has, in its order.
        sink_rows: The row of `sinks` that each active row is part of, (active row,).
        ordinary: Whether the query is no special token, (active row,). Descriptions are fitted to these rows.
        offsets: The position of each key less that of its query, in tokens, (active entry,).
        queries: The position of each query in its text, (active row,).
    """

    kind: str
    heads: tuple[tuple[int, int], ...]
    features: Sequence[Feature]
    types: TokenTypes
    active: RowSample
    sinks: RowSample
    sink_features: Sequence[int]
    sink_rows: Integers
    ordinary: Flags
    offsets: NDArray[np.int32]
    queries: Integers

    def ordinary_rows(self, texts: Sequence[int]) -> RowSample:
        """Copy the active rows with ordinary queries of some texts, given by their numbers in the sample."""
        is_chosen = np.isin(self.active.texts, np.asarray(texts)) & self.ordinary
        return self.active.select(np.flatnonzero(is_chosen))


def join_rows(
    model: Model,
    units: Sequence[SampledText],
    counts: Integers,
    heads: Sequence[tuple[int, int]] | None = None,
    also: Mapping[int, str] | None = None,
) -> list[HeadGroup]:
    """Join the rows of sampled texts into groups of heads that may attend to the same keys.

    Args:
        model: The model.
        units: The texts, with their rows.
        counts: How often each token occurs in the corpus, by its id.
        heads: The (layer, head) that are described; None = all.
        also: Further types of token, from other texts: id -> label.
    """
    # The special tokens, and the types of all tokens of the texts.
    special: dict[str, None] = {}
    labels = dict(also or {})
    for unit in units:
        for tokens in (unit.chunk.tokens, unit.target):
            if tokens is not None:
                special |= dict.fromkeys(tokens.labels[i] for i in np.flatnonzero(tokens.special))
                labels |= zip(tokens.ids.tolist(), tokens.labels, strict=True)
    features = catalogue(list(special))
    types = TokenTypes(model, labels)
    frequent = frequent_words(units, counts)

    groups = []
    for kind in model.info.kinds:
        # The levels of all features in each text, (feature, query, key).
        levels_of_texts = []
        for unit in units:
            facts = text_facts(model, unit.tokens(kind), counts, frequent)
            levels_of_texts.append(blocks_of(features, facts, unit.queries))
        # Layers with the same masks in all texts are one group: masks -> layer -> its heads.
        by_mask: dict[bytes, dict[int, list[int]]] = {}
        for layer, weights in sorted(units[0].rows[kind].weights.items()):
            n_heads = weights.shape[1]
            chosen = [head for head in range(n_heads) if heads is None or (layer, head) in heads]
            if chosen:
                masks = [np.packbits(unit.rows[kind].allowed[layer]).tobytes() for unit in units]
                by_mask.setdefault(b"".join(masks), {})[layer] = chosen
        for layers in by_mask.values():
            groups.append(_join_group(kind, layers, units, levels_of_texts, features, types))
    return groups


def text_facts(model: Model, tokens: Tokens, counts: Integers, frequent: Integers) -> FeatureFacts:
    """Return the facts of a text that features need; `frequent` are the ids that `frequent_words` returns."""
    import torch

    batch = look_up_unit_embeddings(model, torch.from_numpy(tokens.ids)[None])
    embeddings = None if batch is None else batch[0].cpu().numpy()
    is_frequent = np.isin(tokens.ids, frequent)
    return FeatureFacts(tokens, log_frequency(counts, tokens.ids), is_frequent, embeddings)


def frequent_words(units: Sequence[SampledText], counts: Integers) -> Integers:
    """Return the ids of the most frequent words of a sample, which are half of all occurrences of its words."""
    # The words of the sample: tokens with a letter.
    words: set[int] = set()
    for unit in units:
        tokens = unit.chunk.tokens
        has_letter = np.array([any(map(str.isalpha, label)) for label in tokens.labels])
        words.update(tokens.ids[has_letter & ~tokens.special].tolist())
    ids = np.array(sorted(words), np.int64)
    # A word is frequent if all more frequent ones together are less than half.
    share = np.exp(log_frequency(counts, ids))
    order = np.argsort(-share, kind="stable")
    share_before = np.cumsum(share[order]) - share[order]
    is_frequent: Flags = share_before < share.sum() / 2
    return ids[order[is_frequent]]


def _join_group(
    kind: str,
    layers: Mapping[int, list[int]],
    units: Sequence[SampledText],
    levels_of_texts: Sequence[Levels],
    features: Sequence[Feature],
    types: TokenTypes,
) -> HeadGroup:
    """Return the group of some heads, layer -> their numbers, which all have the same masks.

    `levels_of_texts` are the levels of all features in each text, (feature, query, key).
    """
    sink_features = [number for number, feature in enumerate(features) if feature.about == "sink"]
    resting = [feature.name for feature in features].index(RESTING)
    active: list[Arrays] = []
    sinks: list[Arrays] = []
    active_facts: list[Arrays] = []
    n_sink_rows = 0
    for number, (unit, levels) in enumerate(zip(units, levels_of_texts, strict=True)):
        # The keys that queries may attend to, (row, key), and the weights of the group's heads, (head, row, key).
        rows = unit.rows[kind]
        allowed = rows.allowed[next(iter(layers))]
        by_layer = [rows.weights[layer][:, heads] for layer, heads in layers.items()]
        weights = np.concatenate(by_layer, 1).transpose(1, 0, 2)
        rests = levels[resting] > 0
        is_free = allowed & ~rests

        # Active rows: those with at least two free keys.
        is_active = is_free.sum(1) > 1
        is_entry = is_free & is_active[:, None]
        entry_rows, keys = is_entry.nonzero()
        queries = unit.queries[is_active]
        tokens = unit.tokens(kind)
        token_types = types.indices(tokens.ids)
        entries = _cut_out(number, is_entry, levels, weights)
        active.append(entries | {"key_types": token_types[keys], "query_types": token_types[queries]})

        # Rows of sinks: those with at least two keys.
        has_choice = allowed.sum(1) > 1
        sinks.append(
            _cut_out_sinks(number, allowed & has_choice[:, None], rests, levels[sink_features], weights)
        )

        # Fields of `HeadGroup` on the active rows. A row with a choice is the next row of sinks.
        active_facts.append(
            {
                "sink_rows": n_sink_rows + np.cumsum(has_choice)[is_active] - 1,
                "ordinary": ~tokens.special[queries],
                "offsets": (keys - unit.queries[entry_rows]).astype(np.int32),
                "queries": queries,
            }
        )
        n_sink_rows += int(has_choice.sum())

    n_levels = np.array([feature.levels for feature in features])
    all_heads: list[tuple[int, int]] = []
    for layer, heads in layers.items():
        all_heads += product([layer], heads)
    return HeadGroup(
        kind=kind,
        heads=tuple(all_heads),
        features=features,
        types=types,
        active=_join_rows(active, n_levels),
        sinks=_join_rows(sinks, n_levels[sink_features]),
        sink_features=sink_features,
        **_join(active_facts),
    )


def _cut_out(number: int, is_entry: Flags, levels: Levels, weights: NDArray[np.floating]) -> Arrays:
    """Cut the entries of a text out of its rows, (…, row, key) to (…, entry); rows without entries are left out.

    An entry is a key that the query of a row may attend to.

    Args:
        number: The number of the text in the sample.
        is_entry: Which keys of which rows are entries, (row, key).
        levels: The levels of features, (feature, row, key).
        weights: The attention of heads, (head, row, key).

    Returns:
        Arrays by the names of the fields of `RowSample`; and "lengths", how many entries each row has.
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
    """Cut the entries of sinks out of the rows of a text: all free keys of a row as one entry, then its resting keys.

    Arguments are as in `_cut_out`; `allowed` and `rests` are (row, key). Rows without allowed keys are left out.
    """
    # Put a column before the keys that stands for all free keys, with the sum of their weights, and levels of 0.
    is_free = allowed & ~rests
    n_free = is_free.sum(1)
    is_entry = np.column_stack([n_free > 0, allowed & rests])
    free_weights = np.where(is_free, weights, 0).sum(2, dtype=np.float32)[..., None]
    weights = np.concatenate([free_weights, weights], 2)
    levels = np.pad(levels, ((0, 0), (0, 0), (1, 0)))
    entries = _cut_out(number, is_entry, levels, weights)
    # How many keys each entry stands for.
    entries["counts"] = np.column_stack([n_free, np.ones(allowed.shape)])[is_entry]
    return entries


def _join(parts: Sequence[Arrays]) -> Arrays:
    """Concatenate arrays of several texts along their last axis, by name."""
    return {name: np.concatenate([part[name] for part in parts], -1) for name in parts[0]}


def _join_rows(parts: Sequence[Arrays], levels: Integers) -> RowSample:
    """Join the rows of several texts; `levels` is how many levels each feature has, (feature,)."""
    joined: Any = _join(parts)
    return RowSample(levels=levels, starts=starts_from_lengths(joined.pop("lengths")), **joined)
