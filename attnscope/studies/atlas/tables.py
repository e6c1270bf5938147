"""Add up attention on sampled texts by offset, by token and by pair of tokens, and compare heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscope.core.distance import as_distance, divergence_sums
from attnscope.core.lifts import ItemSums, Lifts, even_weights, members, offset_masses
from attnscope.questions.atlas import FURTHEST, N_OFFSETS
from attnscope.results.table import Estimate
from attnscope.results.tokens import Tokens

Numbers = NDArray[np.int64]
Tiles = Iterable[tuple[slice, Tensor, Tensor]]
"""Tiles of queries, each with the weights, (head, query, key), and the keys that may be attended to, (query, key)."""

SIDES = ("asks", "gets", "pairs")
"""The items that have a table: tokens as queries, tokens as keys, and pairs of both."""

LEAST_TEXTS = 3
"""In how many sampled texts an item must be to have a row; in all of them where there are fewer."""

BY_LIFT, BY_MASS = 10, 5
"""Rows of a table: those with the largest lower ends of their lifts, and those with the largest masses beside."""

DISTANCE_QUERIES = 16
"""Queries of a text on which heads are compared, at even distances."""

_MOST_TYPES = 1024
"""Items of "asks", and of "gets"."""

_MOST_BYTES = 56 * 2**20
_BYTES_A_SUM = 48
"""Memory for the sums of pairs, and what a pair takes of it for each head: six numbers of `ItemSums`."""


@dataclass(frozen=True, eq=False)
class ReadText:
    """Hold the tokens that the heads of one kind read in a text.

    Attributes:
        tokens: Its tokens: what asks, and what gets.
        asks: (token,): which queries count; those that were in the chunk before do not.
    """

    tokens: Tokens
    asks: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def outside_sinks(self) -> NDArray[np.bool_]:
        """Return a mask of the keys that are neither special tokens nor the first one, (token,)."""
        outside: NDArray[np.bool_] = ~self.tokens.special & (np.arange(len(self)) > 0)
        return outside

    def types_of(self, where: NDArray[np.bool_]) -> Numbers:
        """Return the ids of its tokens where a mask is true, else -1, (token,)."""
        return np.where(where, self.tokens.ids, -1)


class KindTables:
    """Hold the tables of the heads of one kind of attention, text by text.

    `n_heads` are the heads of each layer. Items of "asks" and "gets" are numbers of tokens; those of "pairs" are codes:
    the place of the query's item x items of "gets" + the place of the key's item.
    """

    def __init__(self, n_heads: Mapping[int, int], texts: Sequence[ReadText]) -> None:
        self.n_heads = n_heads
        total = sum(n_heads.values())
        self._least_texts = max(1, min(LEAST_TEXTS, len(texts)))
        # An id's label is that of the first text that has it.
        self._labels: dict[int, str] = {}
        for text in texts:
            self._labels = dict(zip(text.tokens.ids.tolist(), text.tokens.labels, strict=True)) | self._labels
        # List the items that enough texts have, the most frequent up to a limit.
        self._asks = self._list_items([text.types_of(text.asks) for text in texts], _MOST_TYPES)
        self._gets = self._list_items([text.types_of(text.outside_sinks) for text in texts], _MOST_TYPES)
        most_pairs = max(64, _MOST_BYTES // (_BYTES_A_SUM * max(1, total)))
        self._pairs = self._list_items([self._pair_codes(*self._items_of(text)) for text in texts], most_pairs)
        self._sums = [ItemSums(len(items), total) for items in (self._asks, self._gets, self._pairs)]
        # Each head is compared with its own attention, spread evenly: (head, offset), of all queries.
        self._profiles = np.zeros((total, N_OFFSETS))
        self._even_profiles = np.zeros((total, N_OFFSETS))
        self._n_queries = np.zeros((total, 1))
        self._divergences = np.zeros((total, total))
        self._compared = np.zeros((total, total))

    def _list_items(self, items_of_texts: Sequence[Numbers], most: int) -> Numbers:
        """Return the items that enough texts have, ascending: those of most texts up to a limit."""
        every = [np.unique(items[items >= 0]) for items in items_of_texts]
        items, n_texts = np.unique(np.concatenate([np.zeros(0, np.int64), *every]), return_counts=True)
        # By falling number of texts: the items that enough texts have come first.
        n_frequent = (n_texts >= self._least_texts).sum()
        chosen = np.lexsort((items, -n_texts))[:n_frequent][:most]
        listed: Numbers = np.sort(items[chosen])
        return listed

    def _items_of(self, text: ReadText) -> tuple[Numbers, Numbers]:
        """Return the places of the items of "asks" and of "gets" that a text has."""
        asks = np.flatnonzero(np.isin(self._asks, text.types_of(text.asks)))
        gets = np.flatnonzero(np.isin(self._gets, text.types_of(text.outside_sinks)))
        return asks, gets

    def _pair_codes(self, asks: Numbers, gets: Numbers) -> Numbers:
        """Return the codes of the pairs of some items, ascending."""
        codes: Numbers = np.add.outer(asks * len(self._gets), gets).ravel()
        return codes

    def add(self, text: ReadText, tiles_of: Callable[[int], Tiles]) -> None:
        """Add a text; `tiles_of` gives the tiles of a layer."""
        # The items of the text, and which of them each query and key is, (query, item) and (key, item).
        asks, gets = self._items_of(text)
        query_items = _members(self._asks[asks], text.types_of(text.asks))
        key_items = _members(self._gets[gets], text.types_of(text.outside_sinks))
        pairs = _places(self._pairs, self._pair_codes(asks, gets))
        is_listed = pairs >= 0
        items = (asks, gets, pairs[is_listed])

        first = 0
        for layer, n_heads in self.n_heads.items():
            heads = slice(first, first + n_heads)
            first += n_heads
            asked, got, paired = self._sum_layer(heads, text, query_items, key_items, tiles_of(layer))
            layer_rows = (asked, got, paired.flatten(1)[:, is_listed])
            for sums, side_items, rows in zip(self._sums, items, layer_rows, strict=True):
                # The rows as `_sum_layer` lists them, (row, item).
                numbers = rows.double().numpy()
                masses = numbers[:n_heads]
                even = numbers[n_heads:-2]
                counts, shares = numbers[-2:]
                # The largest lift: every query that could see an item gives it all.
                most = np.divide(counts, shares, out=np.zeros_like(counts), where=shares > 0)
                sums.add(heads, side_items, masses, even, counts, most)

    def _sum_layer(
        self, heads: slice, text: ReadText, query_items: Tensor, key_items: Tensor, tiles: Tiles
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add attention by offset, and return sums of a layer by item of "asks", of "gets", and by both.

        Their rows: the weight of each head; the even share of each head; how many queries could see the item; the even
        share in the largest lift. (2 head + 2, item) or (2 head + 2, query item, key item).
        """
        outside = torch.from_numpy(text.outside_sinks)
        asks, gets, pairs = torch.zeros(3, 1)  # they grow to their shapes as they are added to
        # Uniform attention outside the sinks is least for a query that sees all sinks and one other token.
        least_even = 1 / (1 + (~outside).sum())
        for queries, weights, allowed in tiles:
            # Rows of all heads, then of uniform attention; queries that do not count are 0. (head + 1, query, key)
            counted = torch.from_numpy(text.asks[queries]) & allowed.any(-1)
            rows = torch.cat([weights, even_weights(allowed)[None]]) * counted[:, None]
            # Attention by offset.
            masses = offset_masses(rows, FURTHEST, queries.start).numpy()
            self._profiles[heads] += masses[:-1]
            self._even_profiles[heads] += masses[-1]
            self._n_queries[heads] += int(counted.sum())
            # Attention outside the sinks, by the query's token.
            outside_masses = rows @ outside.float()
            of_heads = outside_masses[:-1]
            even = outside_masses[-1:]
            sees = (even > 0).float()
            on_outside = torch.cat([of_heads, even.expand_as(of_heads), sees, least_even * sees])
            asks = asks + on_outside @ query_items[queries]
            # What each key would get of a query's attention outside the sinks, were that spread evenly over these keys.
            even_outside = even_weights(allowed & outside) * counted[:, None]
            shares = even_outside @ key_items
            sees = (shares > 0).float()
            on_keys = torch.cat([rows[:-1] @ key_items, of_heads[..., None] * shares, sees[None], shares[None]])
            gets = gets + on_keys.sum(1)
            # By pair: the queries of each token times what they give each key's token.
            pairs = pairs + query_items[queries].T @ on_keys
        return asks, gets, pairs

    def compare(self, rows: Tensor) -> None:
        """Add the divergences of all pairs of heads on some rows, (head of all layers, query, key)."""
        divergences = divergence_sums("hellinger", rows)
        self._divergences += divergences.sums.numpy()
        self._compared += divergences.counts.numpy()

    def distances(self) -> NDArray[np.float32]:
        """Return the distance of every two heads, (head, head); NaN where they were never compared."""
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = self._divergences / self._compared
        distances: NDArray[np.float32] = as_distance(mean).astype(np.float32)
        return distances

    def profiles(self) -> NDArray[np.float32]:
        """Return mean attention by offset, of heads and of uniform attention over their keys, (2, head, offset)."""
        profiles = np.stack([self._profiles, self._even_profiles]) / np.maximum(self._n_queries, 1)
        return profiles.astype(np.float32)

    def rows(self) -> list[list[dict[str, Any]]]:
        """Return the token table of every head: rows of the table `tokens`, but for the head."""
        asks = [self._labels[number] for number in self._asks.tolist()]
        gets = [self._labels[number] for number in self._gets.tolist()]
        queries, keys = np.divmod(self._pairs, max(1, len(gets)))
        # The labels of each item, as a query and as a key.
        tokens = {
            "asks": [(label, "") for label in asks],
            "gets": [("", label) for label in gets],
            "pairs": [(asks[query], gets[key]) for query, key in zip(queries, keys, strict=True)],
        }
        by_head: list[list[dict[str, Any]]] = [[] for _ in self._profiles]
        for side, sums in zip(SIDES, self._sums, strict=True):
            lifts = sums.lifts()
            for head, rows in enumerate(by_head):
                for item in choose_items(lifts, head, above_even=side != "asks", least_texts=self._least_texts):
                    mass, lift, low, high, n_queries, n_texts = (part[item, head] for part in lifts)
                    query, key = tokens[side][item]
                    row = {
                        "side": side,
                        "query": query,
                        "key": key,
                        "mass": mass,
                        "lift": Estimate(lift, low, high),
                        "n_queries": int(n_queries),
                        "n_texts": int(n_texts),
                    }
                    rows.append(row)
        return by_head


def choose_items(lifts: Lifts, head: int, *, above_even: bool, least_texts: int) -> list[int]:
    """Return the items that are listed for a head: those whose lift is surely largest, and those with the largest mass.

    By the lower end of the lift, common items don't crowd out rare ones, nor do items that were seen too seldom to tell
    crowd out common ones.

    Args:
        lifts: Of all items.
        head: The head.
        above_even: Whether only items whose lift is known to be above 1 are listed.
        least_texts: In how many texts a query must be able to see an item.
    """
    mass, lift, low, _, counts, n_texts = (part[:, head] for part in lifts)
    low = np.nan_to_num(low)
    is_clear = np.isfinite(lift) & (n_texts >= least_texts)
    if above_even:
        is_clear &= low > 1
    items = np.flatnonzero(is_clear)
    # What differs by rounding alone is alike: how a text is cut must not choose.
    low = _round(low)
    mass = _round(mass)
    by_lift = items[np.lexsort((-counts[items], -low[items]))][:BY_LIFT]
    by_mass = items[np.lexsort((-low[items], -mass[items]))][:BY_MASS]
    listed = list(dict.fromkeys([*by_lift.tolist(), *by_mass.tolist()]))
    return sorted(listed, key=lambda item: -low[item])


def _round(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round to five significant digits, and to 1e-9."""
    with np.errstate(divide="ignore", invalid="ignore"):
        unit = 10.0 ** np.maximum(np.floor(np.log10(np.abs(values))) - 4, -9)
    rounded: NDArray[np.float64] = np.where(np.isfinite(unit), np.rint(values / unit) * unit, values)
    return rounded


def _places(items: Numbers, values: Numbers) -> Numbers:
    """Return which of some sorted items each value is; -1 = none."""
    places = np.searchsorted(items, values)
    # A value beyond the last item is compared with -2, which no value is.
    is_item = np.append(items, -2)[places] == values
    return np.where(is_item, places, -1)


def _members(items: Numbers, values: Numbers) -> Tensor:
    """Return which of some sorted items each value is, (value, item), 1 or 0."""
    return members(torch.from_numpy(_places(items, values)), len(items))
