"""Find the strongest links of maps: which query attends most to which key, outside sinks. NumPy only."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnscope.questions.heatmap import AttentionMap, Heatmap
from attnscope.questions.maps import HeadMaps
from attnscope.questions.pooled import Link, PooledHeatmap
from attnscope.report.numbers import largest_first
from attnscope.results.tokens import Tokens

LEAST_LINK = 0.005
"""Smaller weights are no links."""

FAINT = 0.2
"""If no link is stronger, maps on a scale up to 1 are pale."""


class HeadLink(NamedTuple):
    """The strongest link of a head, with its tokens by their labels."""

    head: str
    query: str
    key: str
    weight: float


def find_links(
    record: Heatmap | PooledHeatmap, query: str | None = None, most: int = 5
) -> list[HeadLink]:
    """Return the strongest links of different heads, largest weight first.

    Args:
        record: Exact maps, or pooled ones, which have links between far tokens alone.
        query: Only links from these tokens; what names none counts as all.
        most: How many heads, at most.
    """
    strongest: list[HeadLink] = []
    attention: Any  # a map of the record's own kind
    for attention in record.maps:
        kind = f"{attention.kind} " if len(record.maps) > 1 else ""
        for pair in record.chosen(attention):
            if isinstance(record, Heatmap):
                rows = attention.queries.find(query) if query is not None else ()
                links = strongest_links(record, attention, pair, 1, rows)
            else:
                links = attention.links(*pair)[:1]
            for row, column, weight in links:
                labels = attention.queries.labels[row], attention.keys.labels[column]
                strongest.append(HeadLink(kind + attention.name_of(*pair), *labels, weight))
    return sorted(strongest, key=lambda link: -link.weight)[:most]


def strongest_links(
    record: Heatmap,
    attention: AttentionMap,
    pair: tuple[int, int],
    most: int = 3,
    rows: Sequence[int] = (),
) -> list[Link]:
    """Return the largest weights of a head between tokens of the text, largest first.

    Links from or to sinks are left out, as most heads have their largest weights there; so are links of a token to
    itself. If rows are given, only links from these queries count, whatever they are; else only those from what the
    model wrote, if it wrote something: these rows are what was asked for.
    """
    if not rows and attention.queries.n_given >= 0:
        rows = range(attention.queries.n_given, len(attention.queries))
    # Weights, (query, key), in float64 as they are sorted and compared.
    weights = attention.of(*pair).astype(np.float64)
    queries, keys = record.sinks(attention)
    if rows:
        queries = ~np.isin(np.arange(len(queries)), rows)
    # Sinks and the token itself drop out.
    weights[queries] = 0
    weights[:, keys] = 0
    weights[same_tokens(attention)] = 0
    # The largest cells of the whole map.
    order = largest_first(weights, most)
    n_keys = weights.shape[1]
    links = [Link(cell // n_keys, cell % n_keys, float(weights.flat[cell])) for cell in order]
    return [link for link in links if link.weight >= LEAST_LINK]


def same_tokens(attention: HeadMaps) -> NDArray[np.bool_]:
    """Return where query and key are the same token, (query, key)."""
    # No query of cross-attention is a key.
    n_queries, n_keys = len(attention.queries), len(attention.keys)
    if attention.kind == "cross":
        return np.zeros((n_queries, n_keys), bool)
    # Places in the text tell hidden rows and columns apart.
    if attention.part is None and n_queries != n_keys:  # some rows were kept that have no column
        queries, keys = _places(attention.queries)[:, None], _places(attention.keys)[None]
        same: NDArray[np.bool_] = (queries == keys).all(-1) & (queries >= 0).all(-1)
        return same
    # Else the diagonal, moved by where a part begins.
    first_query, first_key = attention.origin
    rows, columns = np.indices((n_queries, n_keys))
    return np.asarray(rows + first_query == columns + first_key)


def _places(tokens: Tokens) -> NDArray[np.int32]:
    """Return where tokens stand: the segment, the first character and the one after the last, (token, 3)."""
    return np.column_stack([tokens.segments, tokens.offsets]).astype(np.int32)


def sink_share(record: Heatmap, attention: AttentionMap, pair: tuple[int, int]) -> float:
    """Return the share of a head's attention that sinks get, averaged over the queries that attend to anything."""
    weights = attention.of(*pair).astype(np.float64)
    rows = weights.sum(1) > 0
    return float(weights[rows][:, record.sinks(attention)[1]].sum(1).mean()) if rows.any() else 0.0
