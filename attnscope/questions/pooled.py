"""Declare the result about a long text: maps pooled to a grid, the mass of keys, the entropy of queries, far links.

A link is one attention weight between two tokens. It is far if they are more than `far_tokens` apart. A cell is the
mean attention from a run of consecutive queries (`query_cell`) to a run of consecutive keys (`key_cell`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnscope.questions.maps import LINK_COLUMNS, MAP_TABLES, HeadMaps, MapsResult
from attnscope.results.table import Array, count
from attnscope.results.tokens import Tokens


class DistantPair(NamedTuple):
    """Hold a far link: the indices of its query and key, and its weight."""

    query: int
    key: int
    weight: float


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PooledMap(HeadMaps):
    """Hold one kind of attention of a model on one long text, pooled; `HeadMaps` documents the inherited fields.

    Attributes:
        cells: The pooled map, (layer, head, row, column), float32, 0 to 1; see `PooledHeatmap`. Float arrays are NaN
            where a layer lacks a head that another layer has.
        received: Mass of each key, which is the sum of its weights over all queries, (layer, head, key), float32; 1 on
            average where there are as many queries as keys.
        entropy_nats: Entropy of each query's weights, (layer, head, query), float32.
        link_places: Indices (query, key) of the strongest far links, (layer, head, link, 2), int32, the largest weight
            first; -1 where a head has fewer links than another.
        link_weights: The weights of these links, (layer, head, link), float32.
        query_cell: The number of queries in a row of cells; the last row may have fewer.
        key_cell: The number of keys in a column of cells; the last column may have fewer.
        far_tokens: A link is far if query and key are more than this many tokens apart; -1 = every link is far.
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
        """Return the words after "strongest links", such as " over more than 64 tokens"; "" if every link is far."""
        return "" if self.far_tokens < 0 else f" over more than {self.far_tokens} tokens"

    def links(self, layer: int, head: int) -> list[DistantPair]:
        """Return the strongest far links of one head, largest weight first."""
        # The indices of the layer and the head on the first two axes of the arrays.
        head_index = self.place(layer, head)
        links = []
        for (query, key), weight in zip(
            self.link_places[head_index].tolist(), self.link_weights[head_index].tolist(), strict=True
        ):
            # -1 pads the array of a head with fewer links.
            if query >= 0:
                links.append(DistantPair(query, key, weight))
        return links

    def require_whole(self) -> None:
        """Refuse cells that do not fit the tokens, keys that receive too much, and links of unknown tokens."""
        # Two numbers each, for queries and for keys.
        n_tokens = np.array([len(self.queries), len(self.keys)])
        n_cells = np.ceil(n_tokens / [self.query_cell, self.key_cell])
        if self.cells.shape[2:] != tuple(n_cells) or not self.cells.size:
            raise ValueError(f"the shape of its cells, {self.cells.shape}, does not fit its tokens")
        # Each query's weights sum to 1, so all keys of a head receive as much as there are queries. 10% more allows for
        # rounding, such as that of 16-bit floats.
        if np.nansum(self.received, -1).max() > 1.1 * len(self.queries):
            raise ValueError("its keys receive more than there is")
        if np.any((self.link_places < -1) | (self.link_places >= n_tokens)):
            raise ValueError("its links are between tokens that it does not have")


@dataclass(frozen=True, eq=False, repr=False)
class PooledHeatmap(MapsResult[PooledMap]):
    """Hold the attention of some heads on one long text, pooled to a grid of cells; see `MapsResult`.

    A cell is the share of attention from the queries of its row to the keys of its column: weights summed over the keys
    and averaged over the queries, so each row of cells sums to 1.
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
    # In a file, the axes layer and head of a `PooledMap` are one axis, "heads": an entry per row of the table `heads`.
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
    # Compression pays: in causal attention, half of the cells are 0.
    COMPRESSED: ClassVar[bool] = True

    def links(self, layer: int, head: int, kind: str | None = None) -> list[DistantPair]:
        """Return the strongest far links of one head, largest weight first."""
        return self.map(kind).links(layer, head)

    def describe_links(self) -> list[dict[str, Any]]:
        """Return each far link of the shown heads as a dictionary of plain JSON values.

        It has the head, and for query and key the token's index, its label and the text around it.
        """
        descriptions = []
        for attention in self.maps:
            for layer, head in self.chosen(attention):
                for link in attention.links(layer, head):
                    fields = {"kind": attention.kind, "layer": layer, "head": head}
                    descriptions.append(fields | _describe_link(attention, link))
        return descriptions

    def rows(self) -> Iterator[Sequence[Any]]:
        """Yield the rows of a CSV file: the names of columns, then each far link."""
        yield LINK_COLUMNS
        for description in self.describe_links():
            yield [description[name] for name in LINK_COLUMNS]

    def to_json(self, **more: Any) -> str:
        """Return one JSON document that includes the far links; `more` are further fields of the document."""
        return super().to_json(links=self.describe_links(), **more)

    def require_whole(self) -> None:
        """Refuse a damaged result, also one whose maps are damaged."""
        super().require_whole()
        for attention in self.maps:
            attention.require_whole()


def _describe_link(attention: PooledMap, link: DistantPair) -> dict[str, Any]:
    """Return a far link as a dictionary, with the labels of its tokens and the text around them."""
    queries, keys = attention.queries, attention.keys
    return {
        **link._asdict(),
        "query_token": queries.labels[link.query],
        "key_token": keys.labels[link.key],
        "query_text": quote_token(queries, link.query),
        "key_text": quote_token(keys, link.key),
    }


def quote_token(tokens: Tokens, token_index: int, characters: int = 30) -> str:
    """Quote a token in brackets with the text around it, such as "the ⟦cat⟧ sat"; a special token without any text.

    Args:
        tokens: The tokens of a text, or of a pair of texts.
        token_index: The index of the token.
        characters: The maximum length of the text before the token, and of the text after it.
    """
    # Character offsets of the token in its text; -1 for special tokens, which are not part of the text.
    start, stop = map(int, tokens.offsets[token_index])
    if start < 0:
        return f"⟦{tokens.labels[token_index]}⟧"
    text = tokens.text
    # In a pair of texts, the segment says which text the token is in: 0 = the first one.
    if tokens.pair is not None and int(tokens.segments[token_index]) != 0:
        text = tokens.pair
    # Tokens may begin with white space, such as " cat". It goes before the bracket.
    token = text[start:stop].lstrip()
    start = stop - len(token)
    before = text[max(0, start - characters) : start]
    after = text[stop : stop + characters]
    # `split` and `join` turn line breaks into blanks. A token of white space alone shows its label.
    return " ".join(f"{before}⟦{token or tokens.labels[token_index]}⟧{after}".split())
