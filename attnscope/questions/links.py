"""Find the strongest links in attention maps, outside sinks. NumPy only.

A link is one attention weight, from a query to a key. Sinks are the tokens on which most heads rest: special tokens,
and in a decoder the first token.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnscope.questions.heatmap import AttentionMap, Heatmap
from attnscope.questions.maps import HeadMaps
from attnscope.questions.pooled import DistantPair, PooledHeatmap
from attnscope.report.numbers import largest_first
from attnscope.results.tokens import Tokens

MIN_LINK_WEIGHT = 0.005
"""Smaller weights do not count as links."""

FAINT_WEIGHT = 0.2
"""If no link is stronger than this, a map with a colour scale from 0 to 1 is too pale to read."""


class HeadLink(NamedTuple):
    """Hold the strongest link of a head: the head's name, the labels of query and key, and the weight."""

    head: str
    query: str
    key: str
    weight: float


def find_links(
    record: Heatmap | PooledHeatmap, query: str | None = None, max_links: int = 5
) -> list[HeadLink]:
    """Return the strongest link of each head, for the heads where it is strongest, largest weight first.

    Args:
        record: Exact or pooled maps. Pooled maps know only links between distant tokens.
        query: Names the queries of links, as `Tokens.find` takes it; for exact maps. None, or a name of no token = all.
        max_links: How many links to return at most.
    """
    strongest: list[HeadLink] = []
    # An AttentionMap of a Heatmap, a PooledMap of a PooledHeatmap.
    attention: Any
    for attention in record.maps:
        kind_prefix = f"{attention.kind} " if record.has_several_kinds else ""
        query_rows = () if query is None else attention.queries.find(query)
        for layer_head in record.chosen(attention):
            # At most one link, in a list; the list is empty if all weights are too small.
            if isinstance(record, Heatmap):
                links = find_strongest_links(record, attention, layer_head, max_links=1, rows=query_rows)
            else:
                links = attention.links(*layer_head)[:1]
            for link in links:
                query_label = attention.queries.labels[link.query]
                key_label = attention.keys.labels[link.key]
                head = f"{kind_prefix}{attention.name_of(*layer_head)}"
                strongest.append(HeadLink(head, query_label, key_label, link.weight))
    return sorted(strongest, key=lambda link: -link.weight)[:max_links]


def find_strongest_links(
    record: Heatmap,
    attention: AttentionMap,
    layer_head: tuple[int, int],
    max_links: int = 3,
    rows: Sequence[int] = (),
) -> list[DistantPair]:
    """Return the largest weights of a head between tokens of the text, largest first.

    Links of a token to itself are left out. So are links from or to sinks, where most heads have their largest weights.

    Args:
        record: The record of the map; it tells which tokens are sinks.
        attention: The map.
        layer_head: The head, (layer, head).
        max_links: How many links to return at most.
        rows: Only links from these queries are returned, even if a query is a sink. Empty = from the tokens that the
            model generated, which users ask about; if it generated none, from all queries.
    """
    # `n_given` counts the tokens of the prompt, before the generated ones; -1 = nothing was generated.
    if not rows and attention.queries.n_given >= 0:
        rows = range(attention.queries.n_given, len(attention.queries))
    # A copy, (query, key), in which weights that are no links become 0.
    weights = attention.of(*layer_head).astype(np.float64)
    is_query_left_out, is_key_sink = record.sinks(attention)
    if rows:
        is_query_left_out = ~np.isin(np.arange(len(weights)), rows)
    weights[is_query_left_out] = 0
    weights[:, is_key_sink] = 0
    weights[find_same_tokens(attention)] = 0
    # Indices of the largest weights in the flattened map, (query × key,).
    largest_cells = largest_first(weights, max_links)
    n_keys = weights.shape[1]
    links = [
        DistantPair(cell // n_keys, cell % n_keys, float(weights.flat[cell])) for cell in largest_cells
    ]
    return [link for link in links if link.weight >= MIN_LINK_WEIGHT]


def find_same_tokens(attention: HeadMaps) -> NDArray[np.bool_]:
    """Return which cells of a map link a token to itself, (query, key), bool."""
    n_queries, n_keys = len(attention.queries), len(attention.keys)
    if attention.kind == "cross":
        # No query is a key.
        return np.zeros((n_queries, n_keys), bool)
    if attention.part is None and n_queries != n_keys:
        # Sinks were hidden as keys, but a sink that the user named stayed as a query, so there is no diagonal. Two
        # tokens are the same if they cover the same characters.
        query_spans = _character_spans(attention.queries)[:, None]
        key_spans = _character_spans(attention.keys)[None]
        return np.asarray((query_spans == key_spans).all(-1) & (query_spans >= 0).all(-1))
    # The diagonal of the whole map, of which this map may be a crop.
    first_query, first_key = attention.origin
    query_indices, key_indices = np.indices((n_queries, n_keys))
    return np.asarray(query_indices + first_query == key_indices + first_key)


def _character_spans(tokens: Tokens) -> NDArray[np.int32]:
    """Return (segment, start character, stop character) of each token, (token, 3); -1 = not known."""
    return np.column_stack([tokens.segments, tokens.offsets]).astype(np.int32)


def compute_sink_share(record: Heatmap, attention: AttentionMap, layer_head: tuple[int, int]) -> float:
    """Return the share of a head's attention that goes to sinks: the mean over queries whose weights are not all 0.

    It is 0 if all weights are 0.
    """
    _, is_key_sink = record.sinks(attention)
    weights = attention.of(*layer_head).astype(np.float64)
    is_filled = weights.sum(1) > 0
    if not is_filled.any():
        return 0.0
    # (query, sink) summed to (query,).
    sink_weights = weights[is_filled][:, is_key_sink].sum(1)
    return float(sink_weights.mean())
