"""The texts of Parquet files, a few rows at a time."""

from collections.abc import Callable, Iterator
from typing import BinaryIO

from attnscope.corpus.formats import BadLines, shorten, text_or_ids
from attnscope.corpus.lines import UnreadableError
from attnscope.errors import first_line
from attnscope.records.frame.parquet import arrow

_ROWS = 64


def read_parquet(
    file: BinaryIO, field: str, bad: BadLines, count: Callable[[int], None]
) -> Iterator[tuple[int, str | tuple[int, ...]]]:
    """A column's texts or lists of token numbers, with the numbers of their rows, from 1.

    A file without the column may have `input_ids`. `count` is told how many bytes were read: the share of the rows, for
    the file is not read from start to end.

    Raises:
        AttnscopeError: pyarrow is not installed.
        UnreadableError: It is no Parquet file or damaged, has no such column, or too many rows are malformed.
    """
    pyarrow, library = arrow()
    row = n_counted = 0
    n_bytes = file.seek(0, 2)
    file.seek(0)
    try:
        table = library.ParquetFile(file)
        names, n_rows = table.schema_arrow.names, table.metadata.num_rows
        used = field if field in names or "input_ids" not in names else "input_ids"
        if used not in names:
            raise UnreadableError(f'no column "{field}": its columns are {shorten(", ".join(names))}', None)
        for part in table.iter_batches(batch_size=_ROWS, columns=[used], use_threads=False):
            for value in part.column(0).to_pylist():
                row += 1
                try:
                    content = text_or_ids(used, value)
                except ValueError as error:
                    bad.add(row, str(error))
                    continue
                yield row, content
            count((reached := n_bytes * row // n_rows) - n_counted)
            n_counted = reached
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UnreadableError(f"damaged Parquet: {first_line(error)}", row + 1 if row else None) from None
