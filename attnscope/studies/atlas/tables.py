"""Add up attention on sampled texts by offset, by token and by pair of tokens, and compare heads; `rows` reads it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscope.core.distance import divergence_sums
from attnscope.core.lifts import ItemSums, Lifts, even_weights, offset_masses
from attnscope.questions.atlas import FURTHEST, N_OFFSETS
from attnscope.results.table import Estimate
from attnscope.results.tokens import Tokens

Numbers = NDArray[np.int64]
Tiles = Iterable[tuple[slice, Tensor, Tensor]]
"""Tiles of queries, each with the weights, (head, query, key), and the keys that may be attended to, (query, key)."""

LEAST_TEXTS = 3
"""In how many sampled texts an item must be to have a row; in all of them where there are fewer."""

BY_LIFT, BY_MASS = 10, 5
"""Rows of a table: those with the largest lower ends of their lifts, and those with the largest masses beside."""

_MOST_TYPES = 1024
"""How many types of token are items as queries, and how many as keys."""

_ANY = -1
"""In an item, the type of a query or key that may be any token."""

_CODES = 2**31
"""More than the number of any token + 1."""

_MOST_BYTES = 56 * 2**20
"""Memory for the sums of pairs."""

_BYTES_A_SUM = 48
"""What a pair takes of it for each head: six numbers of `ItemSums`."""


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

    @property
    def queries(self) -> Numbers:
        """Return the type of each query, the number of its token; -1 = it does not count, (token,)."""
        return np.where(self.asks, self.tokens.ids, -1)

    @property
    def keys(self) -> Numbers:
        """Return the type of each key outside sinks; -1 = it is a sink, (token,)."""
        return np.where(self.outside_sinks, self.tokens.ids, -1)


def _code_items(queries: Numbers, keys: Numbers) -> Numbers:
    """Return a number for each pair of a query's and a key's type, (query · key,); `_ANY` stands for any token."""
    codes: Numbers = np.add.outer((queries + 1) * _CODES, keys + 1).ravel()
    return codes


class KindTables:
    """Hold what is added up of the heads of one kind of attention, text by text.

    An item is a type of query and a type of key: of a token that asks, the key is any token, and of one that gets, the
    query is. There are items for frequent types and pairs of them.

    Args:
        n_heads: How many heads each layer has.
        texts: All texts that will be added.
    """

    def __init__(self, n_heads: Mapping[int, int], texts: Sequence[ReadText]) -> None:
        self.n_heads = n_heads
        total = sum(n_heads.values())
        # An id's label is that of the first text that has it.
        self._labels = {_ANY: ""}
        for text in reversed(texts):
            self._labels |= zip(text.tokens.ids.tolist(), text.tokens.labels, strict=True)
        # List the types and pairs that enough texts have, the most frequent up to a limit.
        self._least_texts = max(1, min(LEAST_TEXTS, len(texts)))
        self._asks = self._list_frequent([text.queries for text in texts], _MOST_TYPES)
        self._gets = self._list_frequent([text.keys for text in texts], _MOST_TYPES)
        most_pairs = max(64, _MOST_BYTES // (_BYTES_A_SUM * max(1, total)))
        pairs = self._list_frequent([_code_items(*self._types_of(text)) for text in texts], most_pairs)
        any_token = np.array([_ANY])
        asks = _code_items(self._asks, any_token)
        gets = _code_items(any_token, self._gets)
        self._items = np.sort(np.concatenate([asks, gets, pairs]))
        self._sums = ItemSums(len(self._items), total)
        # Attention by offset, of heads and of their keys evenly, (2, head, offset); and of how many queries.
        self._profiles = np.zeros((2, total, N_OFFSETS))
        self._n_queries = np.zeros((total, 1))
        # Of each two heads, (head, head).
        self._divergences = np.zeros((total, total))
        self._compared = np.zeros((total, total))

    def _list_frequent(self, numbers_of_texts: Sequence[Numbers], most: int) -> Numbers:
        """Return the numbers that enough texts have, ascending: those of most texts up to a limit."""
        by_text = [np.unique(numbers[numbers >= 0]) for numbers in numbers_of_texts]
        every = np.concatenate([np.zeros(0, np.int64), *by_text])
        numbers, n_texts = np.unique(every, return_counts=True)
        # By falling number of texts: those that enough texts have come first.
        n_frequent = (n_texts >= self._least_texts).sum()
        chosen = np.lexsort((numbers, -n_texts))[:n_frequent][:most]
        listed: Numbers = np.sort(numbers[chosen])
        return listed

    def _types_of(self, text: ReadText) -> tuple[Numbers, Numbers]:
        """Return the listed types of the queries and of the keys of a text."""
        asks = np.isin(self._asks, text.queries)
        gets = np.isin(self._gets, text.keys)
        return self._asks[asks], self._gets[gets]

    def add(self, text: ReadText, tiles_of_layers: Sequence[Tiles]) -> None:
        """Add a text, by the tiles of each layer."""
        asks, gets = self._types_of(text)
        codes = _code_items(np.append(asks, _ANY), np.append(gets, _ANY))
        is_listed = np.isin(codes, self._items)
        items = np.searchsorted(self._items, codes[is_listed])
        # Of which type each query and key is, (query, type + 1) and (key, type). The last one is of all queries.
        every = np.ones((len(text), 1), np.bool_)
        is_query = np.append(text.queries[:, None] == asks, every, 1)
        is_key = text.keys[:, None] == gets
        # Layer by layer; heads are counted over all layers.
        first = 0
        for n_heads, tiles in zip(self.n_heads.values(), tiles_of_layers, strict=True):
            heads = slice(first, first + n_heads)
            first += n_heads
            sums = self._sum_layer(
                heads,
                text,
                is_query,
                is_key,
                tiles,
            )
            # (row, type of query + 1, type of key + 1) -> (row, item)
            by_item = sums.double().flatten(1).numpy()[:, is_listed]
            masses, even, (counts, shares) = np.split(by_item, [n_heads, 2 * n_heads])
            # The largest lift: every query that could see an item gives it all.
            most = np.divide(
                counts,
                shares,
                out=np.zeros_like(counts),
                where=shares > 0,
            )
            self._sums.add(heads, items, masses, even, counts, most)

    def _sum_layer(
        self,
        heads: slice,
        text: ReadText,
        is_query: NDArray[np.bool_],
        is_key: NDArray[np.bool_],
        tiles: Tiles,
    ) -> Tensor:
        """Add attention by offset, and return sums of a layer by the types of queries and keys.

        The last type of query stands for all queries, the last of key for all keys outside sinks. Rows of sums: the
        weight of each head; the even share of each head; how many queries could see the item; the even share in the
        largest lift. (2 head + 2, type of query + 1, type of key + 1).
        """
        query_types = torch.from_numpy(is_query).float()
        key_types = torch.from_numpy(is_key).float()
        outside = torch.from_numpy(text.outside_sinks)
        sums = torch.zeros(1)  # it grows to its shape as it is added to
        # Uniform attention outside the sinks is least for a query that sees all sinks and one other token.
        least_even = 1 / (1 + (~outside).sum())
        for queries, weights, allowed in tiles:
            # Rows of all heads, then of uniform attention; queries that do not count are 0. (head + 1, query, key)
            counted = torch.from_numpy(text.asks[queries]) & allowed.any(-1)
            rows = torch.cat([weights, even_weights(allowed)[None]]) * counted[:, None]
            # Attention by offset.
            masses = offset_masses(rows, FURTHEST, queries.start).numpy()
            self._profiles[0, heads] += masses[:-1]
            self._profiles[1, heads] += masses[-1]
            self._n_queries[heads] += int(counted.sum())
            # Attention outside the sinks, beside uniform attention, (2 head + 2, query).
            outside_masses = rows @ outside.float()
            of_heads = outside_masses[:-1]
            even = outside_masses[-1:]
            sees = (even > 0).float()
            on_all = torch.cat([of_heads, even.expand_as(of_heads), sees, least_even * sees])
            # What each type would get of the attention outside the sinks, were that spread evenly over these keys.
            shares = even_weights(allowed & outside) * counted[:, None] @ key_types
            even_shares = of_heads[..., None] * shares
            seen = (shares > 0).float()
            on_types = torch.cat([rows[:-1] @ key_types, even_shares, seen[None], shares[None]])
            # By pair: the queries of each type times what they give each type of key.
            sums = sums + query_types[queries].T @ torch.cat([on_types, on_all[..., None]], -1)
        return sums

    def compare(self, rows: Tensor) -> None:
        """Add the divergences of all pairs of heads on some rows, (head of all layers, query, key)."""
        divergences = divergence_sums("hellinger", rows)
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
        """Return rows of the table `tokens`; `heads` are the numbers of the heads there."""
        queries = self._items // _CODES - 1
        keys = self._items % _CODES - 1
        lifts = np.stack(self._sums.lifts())  # (part, item, head)
        # By side, and for each head the items that it stands out by.
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
                    least_texts=self._least_texts,
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


def choose_items(lifts: Lifts, *, above_even: bool, least_texts: int) -> list[int]:
    """Return the items that are listed for a head: those whose lift is surely largest, and those with the largest mass.

    By the lower end of the lift, common items don't crowd out rare ones, nor do items that were seen too seldom to tell
    crowd out common ones.

    Args:
        lifts: Of all items, (item,) each.
        above_even: Whether only items whose lift is known to be above 1 are listed.
        least_texts: In how many texts a query must be able to see an item.
    """
    low = np.nan_to_num(lifts.low)
    is_clear = np.isfinite(lifts.lift) & (lifts.n_texts >= least_texts)
    if above_even:
        is_clear &= low > 1
    items = np.flatnonzero(is_clear)
    low = _round(low)
    by_lift = items[np.lexsort((-lifts.counts[items], -low[items]))][:BY_LIFT]
    by_mass = items[np.lexsort((-low[items], -_round(lifts.mass)[items]))][:BY_MASS]
    listed = list(dict.fromkeys([*by_lift.tolist(), *by_mass.tolist()]))
    return sorted(listed, key=lambda item: -low[item])


def _round(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Round to five digits, and to 1e-9: how a text is cut must not choose among what differs by rounding."""
    unit = 10.0 ** (np.floor(np.log10(np.maximum(values, 1e-5))) - 4)
    rounded: NDArray[np.float64] = np.rint(values / unit) * unit
    return rounded
