"""Add up attention on sampled texts by offset, by token and by pair of tokens, and compare heads.

`rows` runs the model and hands over the attention, tile by tile.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscope.core.distance import sum_divergences
from attnscope.core.lifts import ItemSums, Lifts, sum_by_offset, uniform_weights
from attnscope.core.sampled_rows import Floats, Integers
from attnscope.questions.atlas import MAX_PROFILE_OFFSET, N_OFFSETS
from attnscope.results.table import Estimate
from attnscope.results.tokens import Tokens

Flags = NDArray[np.bool_]
Tiles = Iterable[tuple[slice, Tensor, Tensor]]
"""Tiles of queries, each with the weights, (head, query, key), and the keys that may be attended to, (query, key)."""

MIN_TEXTS = 3
"""In how many sampled texts an item must occur to be listed; with fewer sampled texts, in all of them."""

BY_LIFT = 10
"""How many items a head's table lists for their lift: those with the largest lower ends."""

BY_MASS = 5
"""How many items it lists for their mass, the largest ones."""

_MAX_TYPES = 1024
"""How many types of query are items, at most, and how many types of key."""

_MAX_BYTES = 56 * 2**20
"""Memory for the sums of pairs."""

_BYTES_A_SUM = 48
"""Memory for the sums of one pair and one head: six numbers in `ItemSums`."""

_MIN_PAIRS = 64
"""How many pairs are items whatever memory they take, if as many are frequent."""

_ANY = -1
"""In an item, the type of a query or key that may be any token."""

_CODES = 2**31
"""More than any token id + 1."""


@dataclass(frozen=True, eq=False)
class ReadText:
    """Hold the tokens of a text that are queries and keys in one kind of attention.

    Attributes:
        tokens: The tokens.
        is_counted: (token,): whether it counts as a query; tokens that the chunk before had do not count again.
    """

    tokens: Tokens
    is_counted: Flags

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def outside_sinks(self) -> Flags:
        """Return which keys are no sinks, neither special tokens nor the first one, (token,)."""
        return ~self.tokens.special & (np.arange(len(self)) > 0)

    @property
    def queries(self) -> Integers:
        """Return the type of each query, its token id, (token,); -1 = it does not count."""
        return np.where(self.is_counted, self.tokens.ids, -1)

    @property
    def keys(self) -> Integers:
        """Return the type of each key, its token id, (token,); -1 = it is a sink."""
        return np.where(self.outside_sinks, self.tokens.ids, -1)


def _code_items(queries: Integers, keys: Integers) -> Integers:
    """Return a code for each pair of a type of query and a type of key, which may be `_ANY`, (query * key,)."""
    codes = (queries[:, None] + 1) * _CODES + keys + 1
    return codes.ravel()


class KindTables:
    """Hold the sums over texts of the heads of one kind of attention.

    Sums are by item. An item is a type of query and a type of key. On the side "asks", the type of query is fixed and
    the key may be any token. On the side "gets", it is the other way round. Pairs fix both. Only frequent items count.

    Args:
        n_heads: Layer -> how many heads it has.
        texts: All texts that will be added.
    """

    def __init__(self, n_heads: Mapping[int, int], texts: Sequence[ReadText]) -> None:
        self.n_heads = n_heads
        total = sum(n_heads.values())
        # The label of each id, from the first text that has it: earlier texts replace later ones.
        self._labels = {_ANY: ""}
        for text in reversed(texts):
            self._labels |= zip(text.tokens.ids.tolist(), text.tokens.labels, strict=True)
        # Choose the types of query, the types of key, and the pairs of these that are frequent.
        self._least_texts = max(1, min(MIN_TEXTS, len(texts)))
        self._query_types = self._choose_frequent([text.queries for text in texts], _MAX_TYPES)
        self._key_types = self._choose_frequent([text.keys for text in texts], _MAX_TYPES)
        max_pairs = max(_MIN_PAIRS, _MAX_BYTES // (_BYTES_A_SUM * max(1, total)))
        pairs_of_texts = [_code_items(*self._types_of(text)) for text in texts]
        pairs = self._choose_frequent(pairs_of_texts, max_pairs)
        any_token = np.array([_ANY])
        asks = _code_items(self._query_types, any_token)
        gets = _code_items(any_token, self._key_types)
        # The codes of all items, ascending, (item,).
        self._items = np.sort(np.concatenate([asks, gets, pairs]))
        self._sums = ItemSums(len(self._items), total)
        # Attention by offset, (2, head, offset): that of each head, and uniform attention. And its queries, (head, 1).
        self._profiles = np.zeros((2, total, N_OFFSETS))
        self._n_queries = np.zeros((total, 1))
        # The divergences of all pairs of heads, and the queries that they are summed over, (head, head) each.
        self._divergences = np.zeros((total, total))
        self._compared = np.zeros((total, total))

    def _choose_frequent(self, codes_of_texts: Sequence[Integers], most: int) -> Integers:
        """Return the codes that enough texts have, ascending; of more than `most`, those that most texts have."""
        by_text = [np.unique(codes[codes >= 0]) for codes in codes_of_texts]
        codes, n_texts = np.unique(np.concatenate([np.zeros(0, np.int64), *by_text]), return_counts=True)
        # Sort by falling number of texts: the frequent codes come first.
        order = np.lexsort((codes, -n_texts))
        n_frequent = (n_texts >= self._least_texts).sum()
        return np.sort(codes[order[: min(n_frequent, most)]])

    def _types_of(self, text: ReadText) -> tuple[Integers, Integers]:
        """Return the frequent types among the queries of a text, and those among its keys."""
        is_query = np.isin(self._query_types, text.queries)
        is_key = np.isin(self._key_types, text.keys)
        return self._query_types[is_query], self._key_types[is_key]

    def add(self, text: ReadText, tiles_of_layers: Sequence[Tiles]) -> None:
        """Add a text, given by the tiles of each layer."""
        # All combinations of its types, and which of them are items.
        query_types, key_types = self._types_of(text)
        codes = _code_items(np.append(query_types, _ANY), np.append(key_types, _ANY))
        is_item = np.isin(codes, self._items)
        items = np.searchsorted(self._items, codes[is_item])
        # Which query has which type, (query, query type + 1), and which key, (key, key type). The last query type is
        # _ANY; `_sum_layer` adds that of keys.
        any_query = np.ones((len(text), 1), np.bool_)
        query_has_type = np.append(text.queries[:, None] == query_types, any_query, 1)
        key_has_type = text.keys[:, None] == key_types
        # Add layer by layer; heads are numbered over all layers.
        first = 0
        for n_heads, tiles in zip(self.n_heads.values(), tiles_of_layers, strict=True):
            heads = slice(first, first + n_heads)
            first += n_heads
            sums = self._sum_layer(heads, text, query_has_type, key_has_type, tiles)
            # (row, query type + 1, key type + 1) -> (row, item)
            by_item = sums.double().flatten(1).numpy()[:, is_item]
            masses, even, (counts, min_shares) = np.split(by_item, [n_heads, 2 * n_heads])
            # The lift, mass / even share, is largest if every query that sees an item gives it all its attention: then
            # it is count / least even share.
            largest_lifts = np.zeros_like(counts)
            np.divide(counts, min_shares, out=largest_lifts, where=min_shares > 0)
            self._sums.add(heads, items, masses, even, counts, largest_lifts)

    def _sum_layer(
        self,
        heads: slice,
        text: ReadText,
        query_has_type: Flags,
        key_has_type: Flags,
        tiles: Tiles,
    ) -> Tensor:
        """Add attention by offset to the profiles, and return the sums of a layer by the types of queries and keys.

        Args:
            heads: The numbers of the layer's heads.
            text: The text.
            query_has_type: Which query has which type, (query, query type + 1); the last stands for any token.
            key_has_type: Which key has which type, (key, key type).
            tiles: The attention of the layer.

        Returns:
            Sums over queries, (2 head + 2, query type + 1, key type + 1). The last type of key stands for all keys
            outside sinks. With n heads, the rows are:

            - 0 to n - 1: the weight that each head gives;
            - n to 2n - 1: each head's even share, to which lifts are relative;
            - 2n: how many queries see such keys;
            - 2n + 1: the least even share that any head can have there.
        """
        query_one_hot = torch.from_numpy(query_has_type).float()
        key_one_hot = torch.from_numpy(key_has_type).float()
        outside = torch.from_numpy(text.outside_sinks)
        # Adding to it gives it its shape.
        sums = torch.zeros(1)
        # Uniform attention puts the smallest mass outside sinks where a query sees all sinks and one other token.
        min_even = 1 / (1 + (~outside).sum())
        for queries, weights, allowed in tiles:
            # The rows of all heads, then uniform attention, (head + 1, query, key); 0 for queries that do not count.
            is_counted = torch.from_numpy(text.is_counted[queries]) & allowed.any(-1)
            rows = torch.cat([weights, uniform_weights(allowed)[None]]) * is_counted[:, None]
            # Attention by offset.
            masses = sum_by_offset(rows, MAX_PROFILE_OFFSET, queries.start).numpy()
            self._profiles[0, heads] += masses[:-1]
            self._profiles[1, heads] += masses[-1]
            self._n_queries[heads] += int(is_counted.sum())
            # All keys outside sinks, (2 head + 2, query): the even share of each head is that of uniform attention.
            outside_masses = rows @ outside.float()
            head_masses = outside_masses[:-1]
            even = outside_masses[-1:]
            sees = (even > 0).float()
            on_all_keys = torch.cat([head_masses, even.expand_as(head_masses), sees, min_even * sees])
            # Each type of key, (2 head + 2, query, key type): a head's even share is its mass outside sinks, spread
            # evenly over the keys there. The share of a type in these keys, (query, key type):
            shares = (uniform_weights(allowed & outside) * is_counted[:, None]) @ key_one_hot
            even_shares = head_masses[..., None] * shares
            sees_type = (shares > 0).float()
            on_types = torch.cat([rows[:-1] @ key_one_hot, even_shares, sees_type[None], shares[None]])
            # Add up the queries of each type.
            on_keys = torch.cat([on_types, on_all_keys[..., None]], -1)
            sums = sums + query_one_hot[queries].T @ on_keys
        return sums

    def compare(self, rows: Tensor) -> None:
        """Add the divergences of all pairs of heads on some rows, (head of all layers, query, key)."""
        divergences = sum_divergences("hellinger", rows)
        self._divergences += divergences.sums.numpy()
        self._compared += divergences.counts.numpy()

    def distances(self) -> NDArray[np.float32]:
        """Return the distance of every two heads, (head, head); NaN where they were never compared."""
        with np.errstate(invalid="ignore", divide="ignore"):
            distances = np.sqrt(self._divergences / self._compared)
        return distances.astype(np.float32)

    def profiles(self) -> NDArray[np.float32]:
        """Return mean attention by offset, of heads and of uniform attention over their keys, (2, head, offset)."""
        profiles = self._profiles / np.maximum(self._n_queries, 1)
        return profiles.astype(np.float32)

    def rows(self, heads: Sequence[int]) -> list[dict[str, Any]]:
        """Return rows of the table `tokens`; `heads` are the rows of these heads in the table of heads."""
        # Decode the items, see `_code_items`.
        queries = self._items // _CODES - 1
        keys = self._items % _CODES - 1
        # (field of `Lifts`, item, head)
        lifts = np.stack(self._sums.compute_lifts())
        # List the items of each side and each head.
        rows = []
        for side, is_side in (
            ("asks", keys == _ANY),
            ("gets", queries == _ANY),
            ("pairs", (queries != _ANY) & (keys != _ANY)),
        ):
            items = np.flatnonzero(is_side)
            for number, head in enumerate(heads):
                of_head = lifts[:, items, number]
                for item in choose_items(
                    Lifts(*of_head),
                    above_even=side != "asks",
                    min_texts=self._least_texts,
                ):
                    mass, lift, low, high, n_queries, n_texts = of_head[:, item]
                    row = {
                        "head": head,
                        "side": side,
                        "query": self._labels[queries[items[item]]],
                        "key": self._labels[keys[items[item]]],
                        "mass": mass,
                        "lift": Estimate(lift, low, high),
                        "n_queries": n_queries,
                        "n_texts": n_texts,
                    }
                    rows.append(row)
        return rows


def choose_items(lifts: Lifts, *, above_even: bool, min_texts: int) -> list[int]:
    """Choose the items that are listed for a head: `BY_LIFT` by the lower end of their lift, and `BY_MASS` by mass.

    The lower end is fair to common and rare items: it is small for an item that was seen too seldom to tell.

    Args:
        lifts: The lifts of a head on all items, (item,) each.
        above_even: Whether an item needs a lower end above 1 to be listed.
        min_texts: In how many texts some query must see an item.

    Returns:
        The numbers of the items, by falling lower end.
    """
    low = np.nan_to_num(lifts.low)
    is_clear = np.isfinite(lifts.lift) & (lifts.n_texts >= min_texts)
    if above_even:
        is_clear &= low > 1
    items = np.flatnonzero(is_clear)
    low = _round(low)
    by_lift = items[np.lexsort((-lifts.counts[items], -low[items]))][:BY_LIFT]
    by_mass = items[np.lexsort((-low[items], -_round(lifts.mass)[items]))][:BY_MASS]
    listed = list(dict.fromkeys([*by_lift.tolist(), *by_mass.tolist()]))
    return sorted(listed, key=lambda item: -low[item])


def _round(values: Floats) -> Floats:
    """Round to five significant digits, in steps of 1e-9 at least.

    So equal items stay equal, however texts are batched.
    """
    unit = 10.0 ** (np.floor(np.log10(np.maximum(values, 1e-5))) - 4)
    return np.rint(values / unit) * unit
