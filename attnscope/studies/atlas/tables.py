"""Add up attention on sampled texts by offset, by token and by pair of tokens, and compare heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]

SIDES = ("asks", "gets", "pairs")
"""The items that have a table: tokens as queries, tokens as keys, and pairs of both."""

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
    def ids(self) -> Numbers:
        """Return the number of each token, (token,)."""
        return self.tokens.ids

    @property
    def outside_sinks(self) -> NDArray[np.bool_]:
        """Return a mask of the keys that are neither special tokens nor the first one, (token,)."""
        outside: NDArray[np.bool_] = ~self.tokens.special & (np.arange(len(self)) > 0)
        return outside


class KindTables:
    """Hold the tables of the heads of one kind of attention, text by text; `n_heads` has the heads of each layer."""

    def __init__(self, n_heads: Sequence[int], texts: Sequence[ReadText]) -> None:
        self.n_heads = list(n_heads)
        total = sum(self.n_heads)
        self._least = least = max(1, min(LEAST_TEXTS, len(texts)))
        self._labels: dict[int, str] = {}
        for text in texts:
            self._labels = dict(zip(text.ids.tolist(), text.tokens.labels, strict=True)) | self._labels
        # List the items that enough texts have, the most frequent up to a limit.
        self._asks = np.sort(_frequent([text.ids[text.asks] for text in texts], least)[:_MOST_TYPES])
        self._gets = np.sort(_frequent([text.ids[text.outside_sinks] for text in texts], least)[:_MOST_TYPES])
        room = max(64, _MOST_BYTES // (_BYTES_A_SUM * max(1, total)))
        self._pairs = np.sort(_frequent([self._pair_codes(*self._items_of(text)) for text in texts], least)[:room])
        self._sums = [ItemSums(len(items), total) for items in (self._asks, self._gets, self._pairs)]
        # Each head is compared with its own attention, spread evenly.
        self._profiles = np.zeros((total, N_OFFSETS))
        self._even_profiles = np.zeros((len(self.n_heads), N_OFFSETS))
        self._n_queries = np.zeros(len(self.n_heads))
        self._divergences, self._compared = np.zeros((2, total, total))

    def _items_of(self, text: ReadText) -> tuple[Numbers, Numbers]:
        """Return the items of "asks" and of "gets" that a text has."""
        asks = np.flatnonzero(np.isin(self._asks, text.ids[text.asks]))
        gets = np.flatnonzero(np.isin(self._gets, text.ids[text.outside_sinks]))
        return asks, gets

    def _pair_codes(self, asks: Numbers, gets: Numbers) -> Numbers:
        """Return the pairs of some items, as numbers: query x keys + key; ascending."""
        codes: Numbers = (asks[:, None] * len(self._gets) + gets).ravel()
        return codes

    def add(self, text: ReadText, read: Callable[[int], Iterable[tuple[slice, Tensor, Tensor]]]) -> None:
        """Add a text.

        Args:
            text: What is read in it.
            read: Layer -> tiles of queries, each with the weights, (head, query, key), and the keys that may be
                attended to, (query, key).
        """
        # The items of the text, and which of them each query and key is.
        asks, gets = self._items_of(text)
        query_of = np.where(text.asks, _numbers(self._asks[asks], text.ids), -1)
        key_of = np.where(text.outside_sinks, _numbers(self._gets[gets], text.ids), -1)
        of_queries = members(torch.from_numpy(query_of), len(asks))  # (query, item)
        of_keys = members(torch.from_numpy(key_of), len(gets))  # (key, item)
        pairs = _numbers(self._pairs, self._pair_codes(asks, gets))
        is_listed = np.flatnonzero(pairs >= 0)
        pair_rows, pair_columns = np.divmod(is_listed, max(1, len(gets)))

        first = 0
        for layer, n_heads in enumerate(self.n_heads):
            heads = slice(first, first + n_heads)
            first += n_heads
            asked, got, paired = self._sum_layer(layer, heads, text, of_queries, of_keys, read(layer))
            items = (asks, gets, pairs[is_listed])
            for sums, of_side, totals in zip(
                self._sums, items, (asked, got, paired[:, pair_rows, pair_columns]), strict=True
            ):
                # Of each head, its even share, and how many queries could see an item; `most` is the largest lift.
                *_, count, share = totals.double().numpy()
                masses, even = totals[:-2].double().numpy().reshape(2, n_heads, -1)
                most = np.divide(count, share, out=np.zeros_like(count), where=share > 0)
                sums.add(heads, of_side, masses, even, count, most)

    def _sum_layer(
        self,
        layer: int,
        heads: slice,
        text: ReadText,
        of_queries: Tensor,
        of_keys: Tensor,
        tiles: Iterable[tuple[slice, Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add attention by offset, and return sums of a layer by item of "asks", of "gets", and by both.

        Each has a row per head, one for the even share of each, the queries that could see an item, and its even share
        of all attention: (2 head + 2, item) or (2 head + 2, query item, key item).
        """
        n_rows = 2 * (heads.stop - heads.start) + 2
        outside = torch.from_numpy(text.outside_sinks)
        asks = torch.zeros(n_rows, of_queries.shape[1])
        gets = torch.zeros(n_rows, of_keys.shape[1])
        pairs = torch.zeros(n_rows, of_queries.shape[1], of_keys.shape[1])
        # Uniform attention gives least outside sinks if there is one such token.
        least = 1 / (1 + (~outside).sum())
        for queries, weights, allowed in tiles:
            # Rows of all heads, then of uniform attention; queries that do not count are 0. (head + 1, query, key)
            counted = torch.from_numpy(text.asks[queries]) & allowed.any(-1)
            rows = torch.cat([weights, even_weights(allowed)[None]]) * counted[:, None]
            # Attention by offset.
            masses = offset_masses(rows, FURTHEST, queries.start).numpy()
            self._profiles[heads] += masses[:-1]
            self._even_profiles[layer] += masses[-1]
            self._n_queries[layer] += int(counted.sum())
            # Attention outside the sinks, by the query's token.
            away = rows @ outside.float()
            of_heads, even = away[:-1], away[-1:]
            sees = (even > 0).float()
            asks += torch.cat([of_heads, even.expand_as(of_heads), sees, least * sees]) @ of_queries[queries]
            # What each key would get of a query's attention outside the sinks, were that spread evenly over these keys.
            shares = even_weights(allowed & outside) * counted[:, None] @ of_keys
            key_masses = torch.cat(
                [rows[:-1] @ of_keys, of_heads[..., None] * shares, (shares > 0).float()[None], shares[None]]
            )
            gets += key_masses.sum(1)
            # By pair: the queries of each token times what they give each key's token.
            pairs += of_queries[queries].T @ key_masses
        return asks, gets, pairs

    def compare(self, rows: Tensor) -> None:
        """Add the divergences of all pairs of heads on some rows, (head of all layers, query, key)."""
        sums = divergence_sums("hellinger", rows)
        self._divergences += sums.sums.numpy()
        self._compared += sums.counts.numpy()

    def distances(self) -> NDArray[np.float32]:
        """Return the distance of every two heads, (head, head); NaN where they were never compared."""
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
        asks = [self._labels[number] for number in self._asks.tolist()]
        gets = [self._labels[number] for number in self._gets.tolist()]
        pairs = np.divmod(self._pairs, max(1, len(gets)))
        tokens = {
            "asks": [(label, "") for label in asks],
            "gets": [("", label) for label in gets],
            "pairs": [(asks[query], gets[key]) for query, key in np.transpose(pairs).tolist()],
        }
        by_head: list[list[dict[str, Any]]] = [[] for _ in range(sum(self.n_heads))]
        for side, sums in zip(SIDES, self._sums, strict=True):
            lifts = sums.lifts()
            for head, rows in enumerate(by_head):
                for item in choose_items(lifts, head, above_even=side != "asks", least=self._least):
                    query, key = tokens[side][item]
                    rows.append(
                        {
                            "side": side,
                            "query": query,
                            "key": key,
                            "mass": lifts.mass[item, head],
                            "lift": Estimate(lifts.lift[item, head], lifts.low[item, head], lifts.high[item, head]),
                            "n_queries": int(lifts.counts[item, head]),
                            "n_texts": int(lifts.n_texts[item, head]),
                        }
                    )
        return by_head


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


def _frequent(numbers: Sequence[Numbers], least: int) -> Numbers:
    """Return the numbers that at least so many texts have, those of most texts first."""
    every = np.concatenate([np.unique(of_text) for of_text in numbers] or [np.zeros(0, np.int64)])
    values, counts = np.unique(every, return_counts=True)
    order = np.lexsort((values, -counts))
    frequent: Numbers = values[order[counts[order] >= least]]
    return frequent


def _numbers(items: Numbers, values: Numbers) -> Numbers:
    """Return which of some sorted items each value is; -1 = none."""
    if not len(items):
        return np.full(len(values), -1)
    positions = np.minimum(np.searchsorted(items, values), len(items) - 1)
    return np.where(items[positions] == values, positions, -1)
