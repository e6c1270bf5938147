"""How much of its attention does each head give from one part of a text to another? NumPy only."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from attnscope.questions.heatmap import AttentionMap, Heatmap
from attnscope.report.blocks import HeadMap, Report, rank_heads
from attnscope.report.numbers import largest_first, weight
from attnscope.report.wording import change_notes, printable, report_on, run_notes
from attnscope.results.result import Result
from attnscope.results.table import HEADS, Table, share

_SHARE = share(
    "share", "what the queries of a part give to the keys of another: sum over keys, mean over queries"
)


@dataclass(frozen=True, eq=False, repr=False)
class Shares(Result):
    """The attention that each head gives from one part of a text to another.

    Attributes:
        tables: `heads`, a row for each head.
    """

    SCHEMA: ClassVar[str] = "attnscope.shares/1"
    TABLES: ClassVar[Any] = {"heads": (*HEADS, _SHARE)}

    def report(self) -> Report:
        """Return the answer, the blocks and the notes."""
        heads, options = (
            self.table("heads"),
            {name: printable(value) for name, value in self.options.items()},
        )
        order = largest_first(heads["share"])
        most = f"{self.head_names[order[0]]} gives most: {weight(heads['share'][order[0]])}"
        title = f"from “{options['from']}” to “{options['to']}”"
        ranking = rank_heads(self, ["share"], order, most=8)
        every = HeadMap(heading="every head", figure="shares", title=title, heads=heads, column="share")
        return report_on(
            self,
            [f"{title}: {most}"],
            [ranking, every],
            ["share: attention weights summed over keys (--to), averaged over queries (--from)"],
            source=f"“{options['text']}”",
            subtitle=f"“{options['text']}”",
            notes=[*self.options["changes"], *run_notes(self.run)],
        )


def find_shares(record: Heatmap, source: str, target: str) -> Shares:
    """Return what each head gives from the queries that `source` names to the keys that `target` names.

    Kinds of attention that lack one of these parts are left out.

    Raises:
        AttnscopeError: No kind has both.
    """
    rows: list[tuple[str, int, int, float]] = []  # as the columns of its table
    # One row per head, of every kind of attention that has both parts.
    for attention in record.maps:
        queries, keys = attention.queries.find_part(source), attention.keys.find_part(target)
        if queries and keys:
            rows += [
                (attention.kind, *pair, _share(attention, pair, queries, keys))
                for pair in record.chosen(attention)
            ]
    # Refuse, and name the first part that no kind has.
    if not rows:
        sides = [(source, [m.queries for m in record.maps]), (target, [m.keys for m in record.maps])]
        lacking = [side for side in sides if not any(tokens.find_part(side[0]) for tokens in side[1])]
        named, (first, *others) = (lacking or sides)[0]
        raise first.refuse(named, *others)
    table = Table.of_rows(Shares.TABLES["heads"], rows)
    options = {
        "from": source,
        "to": target,
        "text": record.text,
        "changes": change_notes(record, record.maps[0].kind),
    }
    corpus = {"n_texts": 1, "n_tokens": len(record.maps[0].keys)}
    return Shares(record.run, corpus, options, {"heads": table})


def _share(
    attention: AttentionMap, pair: tuple[int, int], queries: Sequence[int], keys: Sequence[int]
) -> float:
    """Return a head's weights from some queries to some keys: summed over keys, averaged over queries."""
    block = attention.of(*pair)[np.ix_(queries, keys)]
    return float(block.sum(1, dtype=np.float64).mean())
