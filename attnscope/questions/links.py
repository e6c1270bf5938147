"""Find the strongest links of maps: which query attends most to which key, outside sinks. NumPy only."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnscope.questions.heatmap import AttentionMap, Heatmap
from attnscope.questions.maps import HeadMaps
from attnscope.questions.pooled import DistantPair, PooledHeatmap
from attnscope.report.numbers import largest_first
from attnscope.results.tokens import Tokens

MIN_LINK = 0.005
"""The smallest weight that counts as a link."""

FAINT = 0.2
"""If no link is stronger than this, maps with a colour scale from 0 to 1 are pale."""


class HeadLink(NamedTuple):
    """Hold the strongest link of a head: the name of the head, the labels of the two tokens, and the weight."""

    head: str
    query: str
    key: str
    weight: float


def find_links(
    record: Heatmap | PooledHeatmap, query: str | None = None, most: int = 5
) -> list[HeadLink]:
    """Return the strongest links of different heads, largest weight first.

    Args:
        record: Exact maps, or pooled ones, of which only links between far tokens are known.
        query: In exact maps: names the tokens that links begin at; None, or no such token = all tokens.
        most: How many links to return at most.
    """
    strongest: list[HeadLink] = []
    # A map of the record's own class.
    attention: Any
    for attention in record.maps:
        kind = f"{attention.kind} " if record.has_several_kinds else ""
        rows = () if query is None else attention.queries.find(query)
        for pair in record.chosen(attention):
            if isinstance(record, Heatmap):
                links = strongest_links(record, attention, pair, most=1, rows=rows)
            else:
                links = attention.links(*pair)[:1]
            for link in links:
                query_label = attention.queries.labels[link.query]
                key_label = attention.keys.labels[link.key]
                head = kind + attention.name_of(*pair)
                strongest.append(HeadLink(head, query_label, key_label, link.weight))
    return sorted(strongest, key=lambda link: -link.weight)[:most]


def strongest_links(
    record: Heatmap,
    attention: AttentionMap,
    pair: tuple[int, int],
    most: int = 3,
    rows: Sequence[int] = (),
) -> list[DistantPair]:
    """Return the largest weights of a head between tokens of the text, largest first.

    Left out are links of a token to itself, and links from or to sinks, where most heads have their largest weights.
    With `rows`, links from these queries alone are returned, even if they are sinks. Without, if the model wrote tokens
    itself, links from these alone are returned: they are what a user wants to know about.
    """
    if not rows and attention.queries.n_given >= 0:
        rows = range(attention.queries.n_given, len(attention.queries))
    # (query, key), a copy, where weights that do not count become 0.
    weights = attention.of(*pair).astype(np.float64)
    is_left_out, is_key_sink = record.sinks(attention)
    if rows:
        is_left_out = ~np.isin(np.arange(len(weights)), rows)
    weights[is_left_out] = 0
    weights[:, is_key_sink] = 0
    weights[same_tokens(attention)] = 0
    # The largest weights, by their indices in the flat map.
    order = largest_first(weights, most)
    n_keys = weights.shape[1]
    links = [DistantPair(cell // n_keys, cell % n_keys, float(weights.flat[cell])) for cell in order]
    return [link for link in links if link.weight >= MIN_LINK]


def same_tokens(attention: HeadMaps) -> NDArray[np.bool_]:
    """Return where query and key are the same token, (query, key)."""
    n_queries, n_keys = len(attention.queries), len(attention.keys)
    if attention.kind == "cross":
        # No query is a key.
        return np.zeros((n_queries, n_keys), bool)
    if attention.part is None and n_queries != n_keys:
        # Sinks were hidden, and some of them kept as queries: tokens are the same if their characters are.
        queries = _characters(attention.queries)[:, None]
        keys = _characters(attention.keys)[None]
        return np.asarray((queries == keys).all(-1) & (queries >= 0).all(-1))
    # The diagonal of the whole map.
    first_query, first_key = attention.origin
    rows, columns = np.indices((n_queries, n_keys))
    return np.asarray(rows + first_query == columns + first_key)


def _characters(tokens: Tokens) -> NDArray[np.int32]:
    """Return the segment of each token, its first character and the one after its last, (token, 3); -1 = not known."""
    return np.column_stack([tokens.segments, tokens.offsets]).astype(np.int32)


def sink_share(record: Heatmap, attention: AttentionMap, pair: tuple[int, int]) -> float:
    """Return the share of a head's attention that sinks get: the mean over queries whose row is not 0, else 0."""
    _, is_key_sink = record.sinks(attention)
    weights = attention.of(*pair).astype(np.float64)
    is_filled = weights.sum(1) > 0
    if not is_filled.any():
        return 0.0
    # (query, sink), then (query,).
    on_sinks = weights[is_filled][:, is_key_sink].sum(1)
    return float(on_sinks.mean())
