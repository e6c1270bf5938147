"""Declare the result about a long text: maps pooled to a grid, the mass of keys, the entropy of queries, far links."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnscope.questions.maps import LINK_COLUMNS, MAP_TABLES, HeadMaps, MapsResult
from attnscope.results.table import Array, count
from attnscope.results.tokens import Tokens


class DistantPair(NamedTuple):
    """A large weight between two tokens that are far apart, with the indices of both tokens in the text."""

    query: int
    key: int
    weight: float


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PooledMap(HeadMaps):
    """The attention of one kind of one model on one long text, pooled; see `HeadMaps` for its other fields.

    Attributes:
        cells: The pooled map, (layer, head, row, column), float32, 0 to 1; see `PooledHeatmap`. NaN, as in the other
            arrays, where a layer has no such head.
        received: Mass that each key receives from all queries, (layer, head, key), float32; 1 on average where there
            are as many queries as keys.
        entropy_nats: Entropy of each query's weights, (layer, head, query), float32.
        link_places: Indices of the query and the key of the largest far weights, (layer, head, link, 2), int32, the
            largest weight first; -1 where a head has fewer links.
        link_weights: The largest far weights, (layer, head, link), float32.
        query_cell: How many queries a row of cells stands for; the last row may stand for fewer.
        key_cell: How many keys a column of cells stands for; the last column may stand for fewer.
        far_tokens: A weight is far if query and key are more than this many tokens apart; -1 = every weight is.
    """

    ARRAYS: ClassVar[tuple[str, ...]] = (
        "cells",
        "received",
        "entropy_nats",
        "link_places",
        "link_weights",
    )

    cells: NDArray[np.float32]
    received: NDArray[np.float32]
    entropy_nats: NDArray[np.float32]
    link_places: NDArray[np.int32]
    link_weights: NDArray[np.float32]
    query_cell: int
    key_cell: int
    far_tokens: int

    @property
    def far_phrase(self) -> str:
        """Return the words after "strongest links", such as " over more than 64 tokens"; "" if all are meant."""
        return "" if self.far_tokens < 0 else f" over more than {self.far_tokens} tokens"

    def links(self, layer: int, head: int) -> list[DistantPair]:
        """Return the strongest far links of one head, largest weight first."""
        index = self.place(layer, head)
        links = []
        for (query, key), weight in zip(
            self.link_places[index].tolist(), self.link_weights[index].tolist(), strict=True
        ):
            # -1 fills up the array of a head with fewer links.
            if query >= 0:
                links.append(DistantPair(query, key, weight))
        return links

    def require_whole(self) -> None:
        """Refuse cells that do not fit the tokens, keys that receive too much, and links of unknown tokens."""
        # Both are (query, key).
        n_tokens = np.array([len(self.queries), len(self.keys)])
        n_cells = np.ceil(n_tokens / [self.query_cell, self.key_cell])
        if self.cells.shape[2:] != tuple(n_cells) or not self.cells.size:
            raise ValueError(f"the shape of its cells, {self.cells.shape}, does not fit its tokens")
        # Each query gives 1 in all; 10% more allows for rounding, also that of 16 bits.
        if np.nansum(self.received, -1).max() > 1.1 * len(self.queries):
            raise ValueError("its keys receive more than there is")
        if np.any((self.link_places < -1) | (self.link_places >= n_tokens)):
            raise ValueError("its links are between tokens that it does not have")


@dataclass(frozen=True, eq=False, repr=False)
class PooledHeatmap(MapsResult[PooledMap]):
    """The attention of the chosen heads on one long text, pooled to a grid of cells; see `MapsResult`.

    A cell shows the share of attention that the queries of its row give to the keys of its column, summed over the keys
    and averaged over the queries, so that rows sum to 1.
    """

    SCHEMA: ClassVar[str] = "attnscope.pooled/2"
    TABLES: ClassVar[Any] = {
        **MAP_TABLES,
        "maps": (
            *MAP_TABLES["maps"],
            count("query_cell", "queries that share a row of cells", range=(1, None)),
            count("key_cell", "keys that share a column of cells", range=(1, None)),
            count(
                "far_tokens",
                "a link is far over more than this many tokens; -1 = all are",
                range=(-1, None),
            ),
        ),
    }
    ARRAYS: ClassVar[Any] = (
        Array("cells", "pooled attention", "share", (0, 1), axes=("heads", "rows", "columns")),
        Array(
            "received",
            "mass that a key receives from all queries",
            range=(0, None),
            axes=("heads", "keys"),
        ),
        Array(
            "entropy_nats", "entropy of a query's weights", "nats", (0, None), axes=("heads", "queries")
        ),
        Array(
            "link_places",
            "query and key of a far link; -1 = none",
            kind="count",
            axes=("heads", "links", "2"),
        ),
        Array("link_weights", "the weight of a far link", axes=("heads", "links")),
    )
    MAPS: ClassVar[Any] = PooledMap
    # Files are compressed, as half of a causal map is zeros.
    COMPRESSED: ClassVar[bool] = True

    def links(self, layer: int, head: int, kind: str | None = None) -> list[DistantPair]:
        """Return the strongest far links of one head, largest weight first."""
        return self.map(kind).links(layer, head)

    def describe_links(self) -> list[dict[str, Any]]:
        """Return each far link with its head, token indices, tokens and the text around them, as plain JSON values."""
        descriptions = []
        for attention in self.maps:
            for layer, head in self.chosen(attention):
                for link in attention.links(layer, head):
                    fields = {"kind": attention.kind, "layer": layer, "head": head}
                    descriptions.append(fields | _describe_link(attention, link))
        return descriptions

    def rows(self) -> Iterator[Sequence[Any]]:
        """Yield the names of columns, then a row for each far link."""
        yield LINK_COLUMNS
        for description in self.describe_links():
            yield [description[name] for name in LINK_COLUMNS]

    def to_json(self, **more: Any) -> str:
        """Return one JSON document, with the far links and the text around them; `more` are further fields of it."""
        return super().to_json(links=self.describe_links(), **more)

    def require_whole(self) -> None:
        """Refuse a damaged result, also one whose maps are damaged."""
        super().require_whole()
        for attention in self.maps:
            attention.require_whole()


def _describe_link(attention: PooledMap, link: DistantPair) -> dict[str, Any]:
    """Return a far link with its tokens and the text around them."""
    queries, keys = attention.queries, attention.keys
    return {
        **link._asdict(),
        "query_token": queries.labels[link.query],
        "key_token": keys.labels[link.key],
        "query_text": quote_token(queries, link.query),
        "key_text": quote_token(keys, link.key),
    }


def quote_token(tokens: Tokens, place: int, characters: int = 30) -> str:
    """Return a token in brackets with the text around it, such as "the ⟦cat⟧ sat"; of a special token its label alone.

    Args:
        tokens: The tokens of a text, or of a pair of texts.
        place: The index of the token.
        characters: Most characters of the text before the token, and after it.
    """
    # Where the token stands in its text; -1 = a special token, which stands nowhere.
    start, stop = map(int, tokens.offsets[place])
    if start < 0:
        return f"⟦{tokens.labels[place]}⟧"
    text = tokens.text
    if tokens.pair is not None and int(tokens.segments[place]) != 0:
        text = tokens.pair
    # White space that belongs to the token stands outside its brackets.
    token = text[start:stop].lstrip()
    start = stop - len(token)
    before = text[max(0, start - characters) : start]
    after = text[stop : stop + characters]
    # Lines of the text are joined to one.
    return " ".join(f"{before}⟦{token or tokens.labels[place]}⟧{after}".split())
