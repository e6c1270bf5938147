"""Records of attention weights in the terminal, whatever was read: text, a long text pooled, a picture, a recording."""

from __future__ import annotations

from rich.console import Console

from attnscope.records import Heatmap
from attnscope.records.maps.pooled import PooledHeatmap
from attnscope.records.maps.sounds import Sound
from attnscope.views.maps.picture_terminal import picture_drawing, words_drawing
from attnscope.views.maps.pooled_terminal import pooled_drawing
from attnscope.views.maps.terminal import drawing, query_tables
from attnscope.views.tables.table import Column, Table


def show(record: Heatmap | PooledHeatmap, console: Console, *, drawn: bool = True, query: str | None = None) -> None:
    """Prints a record's maps, and what one query attends to.

    Args:
        record: What to print.
        console: Where to.
        drawn: Whether maps are printed. Without them and without a query nothing is; a query alone has its table, but
            of a picture and of pooled maps it has the maps too.
        query: Whose attention is printed.

    Raises:
        AttnscopeError: No token of a picture is what `query` names.
    """
    if not drawn and query is None:
        return
    if not isinstance(record, Heatmap):
        console.print(pooled_drawing(record, console))
    elif record.picture is not None:
        console.print(picture_drawing(record, console, query))
    elif record.pictures:
        console.print(words_drawing(record, console, query))
    elif drawn:
        console.print(drawing(record, console, query))
        if record.sound is not None and record.sound.words:
            console.print(word_table(record.sound))
    elif query is not None:
        console.print(query_tables(record, query))


def word_table(sound: Sound) -> Table:
    """When each word of a recording is spoken, a row a word."""
    columns = [
        Column("start (s)", lambda word: f"{word.start:.2f}", right=True),
        Column("end (s)", lambda word: f"{word.end:.2f}", right=True),
        Column("word", lambda word: word.text, wraps=True, least=8),
    ]
    return Table(columns, sound.words)
