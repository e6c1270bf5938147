"""Declare the result about two parts of a text: how much attention each head gives from one to the other.

A part is one or more tokens that a user names, such as the phrase "the cat". The part of `--from` attends (its tokens
are queries); the part of `--to` is attended to (its tokens are keys). A `Heatmap` has the attention weights of all
heads on one text; this module sums them, with NumPy only.
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
    "share",
    "what the queries of a part give to the keys of another: sum over keys, mean over queries",
    label="share of attention",
    short="share",
)


class Shares(Result):
    """Hold the share of attention that each head gives from one part of a text to another.

    `options` has the texts of both parts ("from", "to"), the whole text, and notes on earlier changes of the heatmap.
    """

    SCHEMA: ClassVar[str] = "attnscope.shares/1"
    TABLES: ClassVar[Any] = {"heads": (*HEADS, _SHARE_COLUMN)}

    def report(self) -> Report:
        """Return the report: a ranking of heads by share, then a layer-by-head map of all heads."""
        heads = self.table("heads")
        text = f"“{printable(self.options['text'])}”"
        direction = f"from “{printable(self.options['from'])}” to “{printable(self.options['to'])}”"
        order = largest_first(heads["share"])
        strongest = f"{self.head_names[order[0]]} gives most: {weight(heads['share'][order[0]])}"
        ranking = rank_heads(self, ["share"], order, n_printed=8)
        head_map = HeadMap(
            heading="every head", figure="shares", title=direction, heads=heads, column="share"
        )
        return report_on(
            self,
            [f"{direction}: {strongest}"],
            [ranking, head_map],
            ["share: attention weights summed over keys (--to), averaged over queries (--from)"],
            source=text,
            subtitle=text,
            notes=[*self.options["changes"], *run_notes(self.run)],
        )


def find_shares(heatmap: Heatmap, source: str, target: str) -> Shares:
    """Return the share of attention that each shown head gives from some tokens to others.

    A kind of attention (encoder, decoder or cross) is left out if its queries lack the source or its keys the target.

    Args:
        heatmap: The attention of all heads on one text.
        source: Names the tokens that attend, such as "the cat" or "@3"; see `Tokens.find_part`.
        target: Names the tokens that are attended to, in the same way.

    Raises:
        AttnscopeError: No kind of attention has both parts.
    """
    # (kind, layer, head, share), one row per head.
    rows: list[tuple[str, int, int, float]] = []
    for attention in heatmap.maps:
        # Token indices of both parts; empty if the tokens do not include the part.
        queries = attention.queries.find_part(source)
        keys = attention.keys.find_part(target)
        if not (queries and keys):
            continue
        for layer, head in heatmap.chosen(attention):
            # (query of the source, key of the target); then summed over keys, and averaged over queries.
            weights = attention.of(layer, head)[np.ix_(queries, keys)]
            shares = weights.sum(1, dtype=np.float64)
            rows.append((attention.kind, layer, head, float(shares.mean())))
    if not rows:
        raise _make_missing_part_error(heatmap, source, target)
    table = Table.of_rows(Shares.TABLES["heads"], rows)
    options = {
        "from": source,
        "to": target,
        "text": heatmap.text,
        "changes": change_notes(heatmap, heatmap.maps[0].kind),
    }
    corpus = {"n_texts": 1, "n_tokens": len(heatmap.maps[0].keys)}
    return Shares(heatmap.run, corpus, options, {"heads": table})


def _make_missing_part_error(heatmap: Heatmap, source: str, target: str) -> AttnscopeError:
    """Return the error for parts that no kind of attention has together.

    It is about the target only if the target alone is missing everywhere; otherwise it is about the source.
    """
    queries = [attention.queries for attention in heatmap.maps]
    keys = [attention.keys for attention in heatmap.maps]
    has_source = any(tokens.find_part(source) for tokens in queries)
    if has_source and not any(tokens.find_part(target) for tokens in keys):
        return keys[0].not_found(target, *keys)
    return queries[0].not_found(source, *queries)
