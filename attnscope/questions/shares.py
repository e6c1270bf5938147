"""Declare the result about two parts of a text: how much attention each head gives from one to the other.

A part is one or more tokens that a user names (`--from`, `--to`), such as a phrase. The result is also computed here,
from a heatmap in memory or in a file, with NumPy only.
"""

from typing import Any, ClassVar

import numpy as np

from attnscope.errors import AttnscopeError
from attnscope.questions.heatmap import Heatmap
from attnscope.report.blocks import HeadMap, Report, rank_heads
from attnscope.report.numbers import largest_first, weight
from attnscope.report.wording import change_notes, printable, report_on, run_notes
from attnscope.results.result import Result
from attnscope.results.table import HEADS, Table, share

_SHARE_COLUMN = share(
    "share", "what the queries of a part give to the keys of another: sum over keys, mean over queries"
)


class Shares(Result):
    """The attention that each head gives from one part of a text to another."""

    SCHEMA: ClassVar[str] = "attnscope.shares/1"
    TABLES: ClassVar[Any] = {"heads": (*HEADS, _SHARE_COLUMN)}

    def report(self) -> Report:
        """Return the report: the heads that give most first, then a map of all heads."""
        heads = self.table("heads")
        text = f"“{printable(self.options['text'])}”"
        title = f"from “{printable(self.options['from'])}” to “{printable(self.options['to'])}”"
        order = largest_first(heads["share"])
        strongest = f"{self.head_names[order[0]]} gives most: {weight(heads['share'][order[0]])}"
        ranking = rank_heads(self, ["share"], order, n_printed=8)
        head_map = HeadMap(
            heading="every head", figure="shares", title=title, heads=heads, column="share"
        )
        return report_on(
            self,
            [f"{title}: {strongest}"],
            [ranking, head_map],
            ["share: attention weights summed over keys (--to), averaged over queries (--from)"],
            source=text,
            subtitle=text,
            notes=[*self.options["changes"], *run_notes(self.run)],
        )


def find_shares(record: Heatmap, source: str, target: str) -> Shares:
    """Return the attention that each head gives from some tokens to others.

    A kind of attention is left out if its queries do not have the source or its keys do not have the target.

    Args:
        record: The attention of all heads.
        source: Names the tokens that attend, such as "the cat" or "@3"; see `Tokens.find_part`.
        target: Names the tokens that are attended to, likewise.

    Raises:
        AttnscopeError: No kind of attention has both.
    """
    # (kind, layer, head, share) of each head.
    rows: list[tuple[str, int, int, float]] = []
    for attention in record.maps:
        # The indices of both parts.
        queries = attention.queries.find_part(source)
        keys = attention.keys.find_part(target)
        if not (queries and keys):
            continue
        for layer, head in record.chosen(attention):
            # (query of the source, key of the target): summed over keys, averaged over queries.
            weights = attention.of(layer, head)[np.ix_(queries, keys)]
            shares = weights.sum(1, dtype=np.float64)
            rows.append((attention.kind, layer, head, float(shares.mean())))
    if not rows:
        raise _missing_part_error(record, source, target)
    table = Table.of_rows(Shares.TABLES["heads"], rows)
    options = {
        "from": source,
        "to": target,
        "text": record.text,
        "changes": change_notes(record, record.maps[0].kind),
    }
    corpus = {"n_texts": 1, "n_tokens": len(record.maps[0].keys)}
    return Shares(record.run, corpus, options, {"heads": table})


def _missing_part_error(record: Heatmap, source: str, target: str) -> AttnscopeError:
    """Return the error on the target if it alone is missing from all kinds of attention, else the one on the source."""
    queries = [attention.queries for attention in record.maps]
    keys = [attention.keys for attention in record.maps]
    has_source = any(tokens.find_part(source) for tokens in queries)
    if has_source and not any(tokens.find_part(target) for tokens in keys):
        return keys[0].not_found(target, *keys)
    return queries[0].not_found(source, *queries)
