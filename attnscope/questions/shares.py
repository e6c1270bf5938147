"""Declare the result about two parts of a text: how much attention each head gives from one to the other.

It is computed here, too, from a saved heatmap, with NumPy only.
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

_SHARE = share(
    "share", "what the queries of a part give to the keys of another: sum over keys, mean over queries"
)


class Shares(Result):
    """The attention that each head gives from one part of a text to another."""

    SCHEMA: ClassVar[str] = "attnscope.shares/1"
    TABLES: ClassVar[Any] = {"heads": (*HEADS, _SHARE)}

    def report(self) -> Report:
        """Return the heads that give most first, then a map of all heads."""
        heads = self.table("heads")
        source, target = printable(self.options["from"]), printable(self.options["to"])
        text = f"“{printable(self.options['text'])}”"
        order = largest_first(heads["share"])
        most = f"{self.head_names[order[0]]} gives most: {weight(heads['share'][order[0]])}"
        title = f"from “{source}” to “{target}”"
        ranking = rank_heads(self, ["share"], order, n_printed=8)
        every = HeadMap(heading="every head", figure="shares", title=title, heads=heads, column="share")
        return report_on(
            self,
            [f"{title}: {most}"],
            [ranking, every],
            ["share: attention weights summed over keys (--to), averaged over queries (--from)"],
            source=text,
            subtitle=text,
            notes=[*self.options["changes"], *run_notes(self.run)],
        )


def find_shares(record: Heatmap, source: str, target: str) -> Shares:
    """Return the attention that each head gives from some tokens to others.

    Kinds of attention that lack one of these parts are left out.

    Args:
        record: The attention of all heads.
        source: The tokens that attend, as `Tokens.find_part` takes them.
        target: The tokens that are attended to, likewise.

    Raises:
        AttnscopeError: No kind has both.
    """
    # As the columns of the table: kind, layer, head, share.
    rows: list[tuple[str, int, int, float]] = []
    for attention in record.maps:
        queries = attention.queries.find_part(source)
        keys = attention.keys.find_part(target)
        if not (queries and keys):
            continue
        for layer, head in record.chosen(attention):
            # Summed over keys, averaged over queries.
            block = attention.of(layer, head)[np.ix_(queries, keys)]
            row_sums = block.sum(1, dtype=np.float64)
            rows.append((attention.kind, layer, head, float(row_sums.mean())))
    if not rows:
        raise _missing_part(record, source, target)
    table = Table.of_rows(Shares.TABLES["heads"], rows)
    options = {
        "from": source,
        "to": target,
        "text": record.text,
        "changes": change_notes(record, record.maps[0].kind),
    }
    corpus = {"n_texts": 1, "n_tokens": len(record.maps[0].keys)}
    return Shares(record.run, corpus, options, {"heads": table})


def _missing_part(record: Heatmap, source: str, target: str) -> AttnscopeError:
    """Return the error that no kind of attention has the source, or else the target."""
    first, *others = [attention.queries for attention in record.maps]
    if any(tokens.find_part(source) for tokens in (first, *others)):
        keys, *other_keys = [attention.keys for attention in record.maps]
        if not any(tokens.find_part(target) for tokens in (keys, *other_keys)):
            return keys.refuse(target, *other_keys)
    return first.refuse(source, *others)
