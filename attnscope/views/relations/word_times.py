"""How well lists of heads time words, in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from attnscope.errors import amount
from attnscope.records.relations.word_times import BEST, EVEN, RANDOM, UPPER, TimedList, WordTimes
from attnscope.views.tables.numbers import fixed, interval
from attnscope.views.tables.plain_text import dim_lines
from attnscope.views.tables.table import Column, Table


def table(word_times: WordTimes, lists: Sequence[TimedList]) -> RenderableType:
    """A row for each list of heads, and how the errors are made."""

    def title(each: TimedList) -> str:
        if each.by == BEST:
            return "best head" if each.n_heads == 1 else f"best {amount(each.n_heads, 'head')}"
        if each.by == EVEN:
            return EVEN
        return amount(each.n_heads, "random head") if each.by == RANDOM else f"{each.by} ({each.n_heads})"

    columns = [
        Column("word times by", title),
        Column("median error", lambda each: f"{_seconds(each.median.value)} s", right=True, style="cyan"),
        Column("95% interval", lambda each: interval(each.median.low, each.median.high, _seconds), right=True, drop=2),
        Column("mean error", lambda each: f"{_seconds(each.mean)} s", right=True, style="cyan"),
        Column("to upper half", lambda each: _change(each), right=True, drop=1),
    ]
    said = (
        f"error: seconds between the time that the heads tell for the start of a word and the known one; the mean of "
        f"{amount(word_times.n_words, 'word')}, then over {amount(word_times.n_recordings, 'recording')}",
        "best: the best heads of one half of the recordings, timed on the other, both ways round; an exported list may "
        "have others",
        "upper half: all heads of the decoder's upper half, Whisper's default; to it: 95% interval of the median "
        "difference; even spacing: no head, all words of a recording equally long",
    )
    return Group(Text(), Table(columns, list(lists), gap=1), *dim_lines(said))


def _seconds(value: float) -> str:
    return fixed(value, 3)


def _change(each: TimedList) -> str:
    if each.by == UPPER:
        return ""
    return interval(each.change.low, each.change.high, lambda value: fixed(value, 3, signed=True))
