"""Sum attention over sampled texts by offset, by token and by pair of tokens, and measure distances between heads.

The sums fill the atlas's table `tokens`. The module `rows` runs the model, and passes the attention here in tiles. A
tile is a block of consecutive queries. Sinks are special tokens and the first token.

An *item* is a type of query, a type of key, or a pair of both; types are token ids. A head's *lift* on an item is the
attention that it gives, divided by its *even share*: the attention that it would give if it spread what it puts outside
sinks evenly over the keys there.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscope.arrays import Flags, Floats, Integers, divide
from attnscope.core.distance import sum_divergences
from attnscope.core.lifts import ItemSums, Lifts, sum_by_offset, uniform_weights
from attnscope.questions.atlas import MAX_PROFILE_OFFSET, N_OFFSETS
from attnscope.results.table import Estimate
from attnscope.results.tokens import Tokens

Tiles = Iterable[tuple[slice, Tensor, Tensor]]
"""Tiles of queries, each with the weights, (head, query, key), and the keys that may be attended to, (query, key)."""

MIN_TEXTS = 3
"""An item is listed if it occurs in at least this many sampled texts; with fewer sampled texts, in all of them."""

N_BY_LIFT = 10
"""The number of items that are listed per head and side for their lift: those with the largest lower interval ends."""

N_BY_MASS = 5
"""The number of items that are listed per head and side for their mass, which is the attention that they get."""

_MAX_TYPES = 1024
"""The largest number of types of query that are items, and of types of key."""

_MAX_PAIR_BYTES = 56 * 2**20
"""Memory for the sums of pairs, in bytes."""

_BYTES_PER_SUM = 48
"""Memory for the sums of one pair and one head: six numbers in `ItemSums`."""

_MIN_PAIRS = 64
"""Up to this number, frequent pairs are items even if their sums exceed `_MAX_PAIR_BYTES`."""

_ANY_TYPE = -1
"""In an item, stands for the type of a query or key that may be any token. Token ids are at least 0."""

_CODE_BASE = 2**31
"""The base of the codes of items, see `_code_items`. It is larger than any token id + 1."""


@dataclass(frozen=True, eq=False)
class ReadText:
    """Hold the tokens of a text, each of which is a query and a key in one kind of attention.

    Attributes:
        tokens: The tokens.
        is_counted: Whether each token counts as a query, (token,). Chunks of a long text overlap: a token that was in
            the previous chunk does not count again.
    """

    tokens: Tokens
    is_counted: Flags

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_outside_sinks(self) -> Flags:
        """Return which keys are no sinks, (token,)."""
        return ~self.tokens.special & (np.arange(len(self)) > 0)

    @property
    def query_types(self) -> Integers:
        """Return the type of each query, its token id, (token,); -1 for queries that do not count."""
        return np.where(self.is_counted, self.tokens.ids, -1)

    @property
    def key_types(self) -> Integers:
        """Return the type of each key, its token id, (token,); -1 for sinks."""
        return np.where(self.is_outside_sinks, self.tokens.ids, -1)


def _code_items(query_types: Integers, key_types: Integers) -> Integers:
    """Return a code for each pair of a type of query and a type of key, (query type * key type,).

    A type may be `_ANY_TYPE`. Adding 1 makes it 0, so codes are at least 0.
    """
    codes = (query_types[:, None] + 1) * _CODE_BASE + key_types + 1
    return codes.ravel()


class KindTables:
    """Sum attention over texts by item, for all heads of one kind of attention.

    Only frequent items count. There are three sides of items:

    - "asks": the type of query is fixed, and the key may be any token;
    - "gets": the type of key is fixed, and the query may be any token;
    - "pairs": both types are fixed.

    Args:
        n_heads: Layer -> its number of heads.
        texts: All texts that will be added: items are chosen before the first of them is added.
    """

    def __init__(self, n_heads: Mapping[int, int], texts: Sequence[ReadText]) -> None:
        self.n_heads = n_heads
        n_all_heads = sum(n_heads.values())
        # Token id -> its label in the first text that has it: the loop lets earlier texts replace later ones.
        self._label_by_type = {_ANY_TYPE: ""}
        for text in reversed(texts):
            self._label_by_type |= zip(text.tokens.ids.tolist(), text.tokens.labels, strict=True)
        # Choose the types of query, the types of key, and the pairs of these that are frequent.
        self._min_texts = max(1, min(MIN_TEXTS, len(texts)))
        self._query_types = self._choose_frequent([text.query_types for text in texts], _MAX_TYPES)
        self._key_types = self._choose_frequent([text.key_types for text in texts], _MAX_TYPES)
        max_pairs = max(_MIN_PAIRS, _MAX_PAIR_BYTES // (_BYTES_PER_SUM * max(1, n_all_heads)))
        pairs_of_texts = [_code_items(*self._find_types(text)) for text in texts]
        pairs = self._choose_frequent(pairs_of_texts, max_pairs)
        any_token = np.array([_ANY_TYPE])
        asks = _code_items(self._query_types, any_token)
        gets = _code_items(any_token, self._key_types)
        # The codes of all items, ascending, (item,).
        self._items = np.sort(np.concatenate([asks, gets, pairs]))
        self._sums = ItemSums(len(self._items), n_all_heads)
        # The summed attention by offset, (heads or uniform attention, head, offset), and the number of queries that it
        # is summed over, (head, 1).
        self._profiles = np.zeros((2, n_all_heads, N_OFFSETS))
        self._n_queries = np.zeros((n_all_heads, 1))
        # The summed divergences of all pairs of heads, and the number of queries summed over, (head, head) each.
        self._divergences = np.zeros((n_all_heads, n_all_heads))
        self._n_compared_queries = np.zeros((n_all_heads, n_all_heads))

    def _choose_frequent(self, codes_of_texts: Sequence[Integers], max_codes: int) -> Integers:
        """Return the codes (or types) that occur in at least `_min_texts` texts, ascending.

        If there are more than `max_codes`, return those that occur in the largest number of texts. Codes below 0 are
        left out.
        """
        distinct = [np.unique(codes[codes >= 0]) for codes in codes_of_texts]
        # The empty array lets `concatenate` accept a list without texts.
        codes, n_texts = np.unique(
            np.concatenate([np.zeros(0, np.int64), *distinct]), return_counts=True
        )
        # Sort by falling number of texts: the frequent codes come first.
        order = np.lexsort((codes, -n_texts))
        n_frequent = (n_texts >= self._min_texts).sum()
        return np.sort(codes[order[: min(n_frequent, max_codes)]])

    def _find_types(self, text: ReadText) -> tuple[Integers, Integers]:
        """Return the frequent types among the queries of a text, and the frequent types among its keys."""
        is_query = np.isin(self._query_types, text.query_types)
        is_key = np.isin(self._key_types, text.key_types)
        return self._query_types[is_query], self._key_types[is_key]

    def add_text(self, text: ReadText, tiles_of_layers: Sequence[Tiles]) -> None:
        """Add the attention on a text; `tiles_of_layers` has the tiles of each layer."""
        # The codes of all combinations of the text's types, and which of them are items.
        query_types, key_types = self._find_types(text)
        codes = _code_items(np.append(query_types, _ANY_TYPE), np.append(key_types, _ANY_TYPE))
        is_item = np.isin(codes, self._items)
        items = np.searchsorted(self._items, codes[is_item])
        # Which query has which type, (query, query type + 1), and which key has which type, (key, key type). The last
        # query type is _ANY_TYPE, which every query has. `_sum_layer` itself adds _ANY_TYPE as the last key type.
        any_query = np.ones((len(text), 1), np.bool_)
        query_has_type = np.append(text.query_types[:, None] == query_types, any_query, 1)
        key_has_type = text.key_types[:, None] == key_types
        # Add layer by layer; heads are numbered over all layers.
        first_head = 0
        for n_heads, tiles in zip(self.n_heads.values(), tiles_of_layers, strict=True):
            heads = slice(first_head, first_head + n_heads)
            first_head += n_heads
            sums = self._sum_layer(heads, text, query_has_type, key_has_type, tiles)
            # (row, query type + 1, key type + 1) -> (row, item)
            by_item = sums.double().flatten(1).numpy()[:, is_item]
            # The rows are those that `_sum_layer` lists.
            masses, even_shares, (counts, min_shares) = np.split(by_item, [n_heads, 2 * n_heads])
            # The lift is mass / even share. Its maximum is count / smallest even share: then every query that may
            # attend to the item gives it all its attention.
            largest_lifts = divide(counts, min_shares, 0.0)
            self._sums.add(heads, items, masses, even_shares, counts, largest_lifts)

    def _sum_layer(
        self,
        heads: slice,
        text: ReadText,
        query_has_type: Flags,
        key_has_type: Flags,
        tiles: Tiles,
    ) -> Tensor:
        """Add a layer's attention by offset to the profiles, and sum its attention by types of queries and of keys.

        Args:
            heads: The numbers of the layer's heads.
            text: The text.
            query_has_type: Which query has which type, (query, query type + 1); the last type is any token.
            key_has_type: Which key has which type, (key, key type).
            tiles: The attention of the layer.

        Returns:
            Sums over queries, (2 head + 2, query type + 1, key type + 1). The last type of key is any key outside
            sinks. With n heads, the rows are:

            - 0 to n - 1: the attention that each head gives to the type of key;
            - n to 2n - 1: the even share of each head;
            - 2n: the number of queries that may attend to a key of the type;
            - 2n + 1: the smallest even share that any head can have, which bounds lifts.
        """
        query_one_hot = torch.from_numpy(query_has_type).float()
        key_one_hot = torch.from_numpy(key_has_type).float()
        is_outside = torch.from_numpy(text.is_outside_sinks)
        # Broadcasting gives it its shape when the first tile is added.
        sums = torch.zeros(1)
        # Uniform attention puts the smallest mass outside sinks if a query may attend to all sinks and one other token.
        min_mass = 1 / (1 + (~is_outside).sum())
        for queries, weights, allowed in tiles:
            # The rows of all heads, then uniform attention, (head + 1, query, key); 0 for queries that do not count.
            is_counted = torch.from_numpy(text.is_counted[queries]) & allowed.any(-1)
            rows = torch.cat([weights, uniform_weights(allowed)[None]]) * is_counted[:, None]
            # Attention by offset, (head + 1, offset).
            masses = sum_by_offset(rows, MAX_PROFILE_OFFSET, queries.start).numpy()
            self._profiles[0, heads] += masses[:-1]
            self._profiles[1, heads] += masses[-1]
            self._n_queries[heads] += int(is_counted.sum())
            # The rows of the result for any key outside sinks, (2 head + 2, query). Here the even share of each head is
            # the mass of uniform attention.
            outside_masses = rows @ is_outside.float()
            head_masses = outside_masses[:-1]
            uniform_mass = outside_masses[-1:]
            has_key = (uniform_mass > 0).float()
            on_all_keys = torch.cat(
                [head_masses, uniform_mass.expand_as(head_masses), has_key, min_mass * has_key]
            )
            # The fraction of each type among the allowed keys outside sinks, (query, key type).
            fractions = (uniform_weights(allowed & is_outside) * is_counted[:, None]) @ key_one_hot
            # The rows of the result for each type of key, (2 head + 2, query, key type). A head's even share is its
            # mass outside sinks times the fraction; the smallest one is the fraction itself, for a mass of 1.
            even_shares = head_masses[..., None] * fractions
            has_type = (fractions > 0).float()
            on_types = torch.cat([rows[:-1] @ key_one_hot, even_shares, has_type[None], fractions[None]])
            # Sum over the queries of each type.
            on_keys = torch.cat([on_types, on_all_keys[..., None]], -1)
            sums = sums + query_one_hot[queries].T @ on_keys
        return sums

    def add_divergences(self, rows: Tensor) -> None:
        """Add the divergences of all pairs of heads on some rows, (head of all layers, query, key)."""
        divergences = sum_divergences("hellinger", rows)
        self._divergences += divergences.sums.numpy()
        self._n_compared_queries += divergences.counts.numpy()

    def compute_distances(self) -> NDArray[np.float32]:
        """Return the Hellinger distance of every two heads, (head, head); NaN for heads that were never compared."""
        with np.errstate(invalid="ignore", divide="ignore"):
            distances = np.sqrt(self._divergences / self._n_compared_queries)
        return distances.astype(np.float32)

    def compute_profiles(self) -> NDArray[np.float32]:
        """Return mean attention by offset, (2, head, offset): first of heads, then of uniform attention on their keys.

        All further offsets on either side are in the first and the last column.
        """
        profiles = self._profiles / np.maximum(self._n_queries, 1)
        return profiles.astype(np.float32)

    def make_token_rows(self, heads: Sequence[int]) -> list[dict[str, Any]]:
        """Return rows of the table `tokens`; `heads` are the rows of these heads in the table of heads."""
        # Decode the items into their types of query and of key, see `_code_items`.
        query_types = self._items // _CODE_BASE - 1
        key_types = self._items % _CODE_BASE - 1
        # (field of `Lifts`, item, head)
        lifts = np.stack(self._sums.compute_lifts())
        # List the items of each side and each head.
        rows = []
        for side, is_side in (
            ("asks", key_types == _ANY_TYPE),
            ("gets", query_types == _ANY_TYPE),
            ("pairs", (query_types != _ANY_TYPE) & (key_types != _ANY_TYPE)),
        ):
            items = np.flatnonzero(is_side)
            for head_index, head in enumerate(heads):
                # (field of `Lifts`, item of the side)
                head_lifts = lifts[:, items, head_index]
                # On the side "asks", a lift below 1 tells something too: these queries put their attention on sinks.
                for item in choose_items(
                    Lifts(*head_lifts),
                    above_even=side != "asks",
                    min_texts=self._min_texts,
                ):
                    mass, lift, low, high, n_queries, n_texts = head_lifts[:, item]
                    row = {
                        "head": head,
                        "side": side,
                        "query": self._label_by_type[query_types[items[item]]],
                        "key": self._label_by_type[key_types[items[item]]],
                        "mass": mass,
                        "lift": Estimate(lift, low, high),
                        "n_queries": n_queries,
                        "n_texts": n_texts,
                    }
                    rows.append(row)
        return rows


def choose_items(lifts: Lifts, *, above_even: bool, min_texts: int) -> list[int]:
    """Choose the items that are listed for a head.

    They are the `N_BY_LIFT` items with the largest lower ends of their lifts' intervals, and the `N_BY_MASS` items with
    the largest mass. The lower end is fair to common and to rare items: a rare item has a wide interval.

    Args:
        lifts: The lifts of a head on all items, (item,) each.
        above_even: Whether an item is listed only if the lower end of its lift is above 1.
        min_texts: An item is listed only if some query of at least this many texts may attend to it.

    Returns:
        The indices of the items, by falling lower end.
    """
    # NaN, of a lift without an interval, becomes 0.
    low = np.nan_to_num(lifts.low)
    is_candidate = np.isfinite(lifts.lift) & (lifts.n_texts >= min_texts)
    if above_even:
        is_candidate &= low > 1
    items = np.flatnonzero(is_candidate)
    low = _round_digits(low)
    by_lift = items[np.lexsort((-lifts.counts[items], -low[items]))][:N_BY_LIFT]
    by_mass = items[np.lexsort((-low[items], -_round_digits(lifts.mass)[items]))][:N_BY_MASS]
    listed = list(dict.fromkeys([*by_lift.tolist(), *by_mass.tolist()]))
    return sorted(listed, key=lambda item: -low[item])


def _round_digits(values: Floats) -> Floats:
    """Round to five significant digits, and values below 1e-5 to multiples of 1e-9.

    How texts are batched changes the last digits of floats. After rounding, equal items stay equal.
    """
    step = 10.0 ** (np.floor(np.log10(np.maximum(values, 1e-5))) - 4)
    return np.rint(values / step) * step
