"""Add up attention on sampled texts by offset, by token and by pair of tokens, and compare heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.questions.atlas import FURTHEST, N_OFFSETS
from attnscope.results.tokens import Tokens

Floats = NDArray[np.float64]

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.lifts import Lifts

LEAST_TEXTS = 3
"""Sampled texts that must have a token, or a pair of tokens, before anything is said of it; of fewer texts, all."""

BY_LIFT, BY_MASS = 10, 5
"""Rows of a table: those with the largest lower ends of their lifts, and those with the largest masses beside."""

DISTANCE_QUERIES = 16
"""Queries of a text on which heads are compared, at even distances."""

_MOST_TYPES = 1024
_MOST_BYTES = 56 * 2**20
_BYTES_A_SUM = 48


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
    def ids(self) -> NDArray[np.int64]:
        """Return the number of each token, (token,)."""
        return self.tokens.ids

    @property
    def outside_sinks(self) -> NDArray[np.bool_]:
        """Return a mask of the keys that are neither special tokens nor the first one, (token,)."""
        outside: NDArray[np.bool_] = ~self.tokens.special & (np.arange(len(self)) > 0)
        return outside


@dataclass(frozen=True, eq=False)
class _Items:
    """Hold the items of a text: the tokens of its queries and keys, and pairs of them.

    Attributes:
        query_of: (token,): which of `asks` each query is; -1 = none.
        key_of: (token,): which of `gets` each key is.
        asks: Its items among those of "asks"; `gets` and `pairs` likewise.
        pair_rows: For each pair its row in the product of `asks` and `gets`; `pair_columns` likewise.
    """

    query_of: Tensor
    key_of: Tensor
    asks: NDArray[np.int64]
    gets: NDArray[np.int64]
    pairs: NDArray[np.int64]
    pair_rows: NDArray[np.int64]
    pair_columns: NDArray[np.int64]


class KindTables:
    """Hold the tables of the heads of one kind of attention, text by text; `n_heads` has the heads of each layer."""

    def __init__(self, n_heads: Sequence[int], texts: Sequence[ReadText]) -> None:
        from attnscope.core.lifts import ItemSums

        self.n_heads = list(n_heads)
        total = sum(self.n_heads)
        self._least = least = max(1, min(LEAST_TEXTS, len(texts)))
        self._labels: dict[int, str] = {}
        for text in texts:
            for number, label in zip(text.ids.tolist(), text.tokens.labels, strict=True):
                self._labels.setdefault(number, label)
        # List the items that enough texts have, the most frequent up to a limit.
        self._asks = np.sort(_frequent([text.ids[text.asks] for text in texts], least)[:_MOST_TYPES])
        self._gets = np.sort(_frequent([text.ids[text.outside_sinks] for text in texts], least)[:_MOST_TYPES])
        room = max(64, _MOST_BYTES // (_BYTES_A_SUM * max(1, total)))
        self._pairs = np.sort(_frequent([self._pair_codes(*self._items_of(text)) for text in texts], least)[:room])
        # Each head is compared with its own attention, spread evenly.
        sizes: dict[str, int] = {"asks": len(self._asks), "gets": len(self._gets), "pairs": len(self._pairs)}
        self._sums = {side: ItemSums(size, total) for side, size in sizes.items()}
        self._profiles = np.zeros((total, N_OFFSETS))
        self._even_profiles = np.zeros((len(self.n_heads), N_OFFSETS))
        self._n_queries = np.zeros(len(self.n_heads))
        self._divergences, self._compared = np.zeros((2, total, total))

    def _items_of(self, text: ReadText) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the items of "asks" and of "gets" that a text has."""
        asks = np.flatnonzero(np.isin(self._asks, text.ids[text.asks]))
        gets = np.flatnonzero(np.isin(self._gets, text.ids[text.outside_sinks]))
        return asks, gets

    def _pair_codes(self, asks: NDArray[np.int64], gets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the pairs of some items, as numbers: query x keys + key; ascending."""
        codes: NDArray[np.int64] = (asks[:, None] * len(self._gets) + gets).ravel()
        return codes

    def _items(self, text: ReadText) -> _Items:
        import torch

        asks, gets = self._items_of(text)
        pairs = _numbers(self._pairs, self._pair_codes(asks, gets))
        there = np.flatnonzero(pairs >= 0)
        n = max(1, len(gets))
        query_of, key_of = _numbers(self._asks[asks], text.ids), _numbers(self._gets[gets], text.ids)
        return _Items(
            torch.from_numpy(np.where(text.asks, query_of, -1)),
            torch.from_numpy(np.where(text.outside_sinks, key_of, -1)),
            asks,
            gets,
            pairs[there],
            there // n,
            there % n,
        )

    def add(self, text: ReadText, read: Callable[[int], Iterable[tuple[slice, Tensor, Tensor]]]) -> None:
        """Add a text.

        Args:
            text: What is read in it.
            read: Layer -> tiles of queries, each with the weights, (head, query, key), and the keys that may be
                attended to, (query, key).
        """
        items = self._items(text)
        for layer in range(len(self.n_heads)):
            self._add_layer(layer, text, items, read(layer))

    def _add_layer(
        self, layer: int, text: ReadText, items: _Items, tiles: Iterable[tuple[slice, Tensor, Tensor]]
    ) -> None:
        import torch

        from attnscope.core.lifts import even_weights, members, offset_masses

        n_heads = self.n_heads[layer]
        rows_of_layer = slice(sum(self.n_heads[:layer]), sum(self.n_heads[: layer + 1]))
        outside = torch.from_numpy(text.outside_sinks)
        keys = members(items.key_of, len(items.gets))
        # Of each head; its even share; how many queries could see an item; and its even share of all attention.
        asks = torch.zeros(2 * n_heads + 2, len(items.asks))
        gets = torch.zeros(2 * n_heads + 2, len(items.gets))
        pairs = torch.zeros(2 * n_heads + 2, len(items.asks), len(items.gets))
        # Uniform attention gives least outside sinks if there is one such token.
        least = 1 / (1 + (~outside).sum())
        for queries, weights, allowed in tiles:
            # Rows of all heads, then of uniform attention; queries that do not count are 0. (head + 1, query, key)
            counted = torch.from_numpy(text.asks[queries]) & allowed.any(-1)
            rows = torch.cat([weights, even_weights(allowed)[None]]) * counted[:, None]
            # Attention by offset.
            masses = offset_masses(rows, FURTHEST, queries.start).numpy()
            self._profiles[rows_of_layer] += masses[:-1]
            self._even_profiles[layer] += masses[-1]
            self._n_queries[layer] += int(counted.sum())
            # Attention outside the sinks, by the query's token.
            away = rows @ outside.float()
            heads, even = away[:-1], away[-1:]
            of_queries = members(items.query_of[queries], len(items.asks))
            sees = (even > 0).float()
            asks += torch.cat([heads, even.expand_as(heads), sees, least * sees]) @ of_queries
            # What each key would get of a query's attention outside the sinks, were that spread evenly over these keys.
            shares = even_weights(allowed & outside) * counted[:, None] @ keys
            key_masses = torch.cat(
                [rows[:-1] @ keys, heads[..., None] * shares, (shares > 0).float()[None], shares[None]]
            )
            gets += key_masses.sum(1)
            # By pair: the queries of each token times what they give each key's token.
            pairs += of_queries.T @ key_masses
        # Add the text's sums to those of each head; `most` is the largest lift that a count allows.
        pair_sums = pairs[:, items.pair_rows, items.pair_columns]
        sides: tuple[tuple[str, NDArray[np.int64], Tensor], ...] = (
            ("asks", items.asks, asks),
            ("gets", items.gets, gets),
            ("pairs", items.pairs, pair_sums),
        )
        for side, items_of_side, sums in sides:
            *parts, count, share = sums.double().numpy()
            most = np.divide(count, share, out=np.zeros_like(count), where=share > 0)
            for head in range(n_heads):
                even = parts[n_heads + head]
                self._sums[side].add(rows_of_layer.start + head, items_of_side, parts[head], even, count, most)

    def compare(self, rows: Tensor) -> None:
        """Add the divergences of all pairs of heads on some rows, (head of all layers, query, key)."""
        from attnscope.core.distance import divergence_sums

        sums = divergence_sums("hellinger", rows)
        self._divergences += sums.sums.numpy()
        self._compared += sums.counts.numpy()

    def distances(self) -> NDArray[np.float32]:
        """Return the distance of every two heads, (head, head); NaN where they were never compared."""
        from attnscope.core.distance import as_distance

        with np.errstate(invalid="ignore", divide="ignore"):
            mean = self._divergences / self._compared
        distances: NDArray[np.float32] = as_distance(mean).astype(np.float32)
        return distances

    def profiles(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return mean attention by offset, of heads and of uniform attention over their keys, each (head, offset)."""
        n_queries = np.maximum(self._n_queries, 1)[:, None]
        even = (self._even_profiles / n_queries).astype(np.float32)
        return (
            (self._profiles / np.repeat(n_queries, self.n_heads, 0)).astype(np.float32),
            np.repeat(even, self.n_heads, 0),
        )

    def rows(self) -> list[list[dict[str, Any]]]:
        """Return the token table of every head: rows of the table `tokens`, but for the head."""
        n = max(1, len(self._gets))
        label = self._labels
        asks = [(label[number], "") for number in self._asks.tolist()]
        gets = [("", label[number]) for number in self._gets.tolist()]
        pairs = [(label[self._asks[code // n]], label[self._gets[code % n]]) for code in self._pairs.tolist()]
        tokens = {"asks": asks, "gets": gets, "pairs": pairs}
        lifts = {side: sums.lifts() for side, sums in self._sums.items()}
        by_head: list[list[dict[str, Any]]] = [[] for _ in range(sum(self.n_heads))]
        for head, rows in enumerate(by_head):
            for side, of_side in lifts.items():
                for item in choose_items(of_side, head, above_even=side != "asks", least=self._least):
                    query, key = tokens[side][item]
                    estimate = _Estimate(*(part[item, head] for part in (of_side.lift, of_side.low, of_side.high)))
                    rows.append(
                        {
                            "side": side,
                            "query": query,
                            "key": key,
                            "mass": of_side.mass[item, head],
                            "lift": estimate,
                            "n_queries": int(of_side.counts[item, head]),
                            "n_texts": int(of_side.n_texts[item, head]),
                        }
                    )
        return by_head


@dataclass(frozen=True)
class _Estimate:
    """Hold a number with the ends of its interval."""

    value: float
    low: float
    high: float


def _round(values: Floats) -> Floats:
    """To five significant digits, and to 1e-9."""
    with np.errstate(divide="ignore", invalid="ignore"):
        unit = 10.0 ** np.maximum(np.floor(np.log10(np.abs(values))) - 4, -9)
    rounded: Floats = np.where(np.isfinite(unit), np.rint(values / unit) * unit, values)
    return rounded


def choose_items(lifts: Lifts, head: int, *, above_even: bool, least: int) -> list[int]:
    """Return the items that are listed for a head: those whose lift is surely largest, and those with the largest mass.

    By the lower end of the lift, common items don't crowd out rare ones, nor do items that were seen too seldom to tell
    crowd out common ones.

    Args:
        lifts: Of all items.
        head: The head.
        above_even: Whether only items whose lift is known to be above 1 are listed.
        least: The fewest texts in which a query could see an item.
    """
    low = np.where(np.isnan(lifts.low[:, head]), 0.0, lifts.low[:, head])
    clear = np.isfinite(lifts.lift[:, head]) & (lifts.n_texts[:, head] >= least)
    if above_even:
        clear &= low > 1
    clear_items = np.flatnonzero(clear)
    # What differs by rounding alone is alike: how a text is cut must not choose.
    low, mass = _round(low), _round(lifts.mass[:, head])
    by_lift = clear_items[np.lexsort((-lifts.counts[clear_items, head], -low[clear_items]))][:BY_LIFT]
    by_mass = clear_items[np.lexsort((-low[clear_items], -mass[clear_items]))][:BY_MASS]
    listed = np.array(list(dict.fromkeys([*by_lift.tolist(), *by_mass.tolist()])), np.int64)
    return listed[np.argsort(-low[listed], kind="stable")].tolist()  # type: ignore[no-any-return]


def _frequent(numbers: Sequence[NDArray[np.int64]], least: int) -> NDArray[np.int64]:
    """Return the numbers that at least so many texts have, those of most texts first."""
    every = np.concatenate([np.unique(of_text) for of_text in numbers] or [np.zeros(0, np.int64)])
    values, counts = np.unique(every, return_counts=True)
    order = np.lexsort((values, -counts))
    frequent: NDArray[np.int64] = values[order[counts[order] >= least]]
    return frequent


def _numbers(items: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return which of some sorted items each value is; -1 = none."""
    if not len(items):
        return np.full(len(values), -1)
    positions = np.minimum(np.searchsorted(items, values), len(items) - 1)
    return np.where(items[positions] == values, positions, -1)
