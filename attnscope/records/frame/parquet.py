"""Parquet, where the extra [parquet] is installed: its library, and tables as files."""

import importlib
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

from attnscope.errors import AttnscopeError, first_line


def arrow() -> tuple[Any, Any]:
    """The modules pyarrow and pyarrow.parquet; refuses where they are not installed."""
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise AttnscopeError("Parquet needs pyarrow", "pip install 'attnscope[parquet]'") from None


def parquet(columns: Mapping[str, Sequence[Any]], described: Mapping[str, str]) -> bytes:
    """A table as a Parquet file.

    Args:
        columns: Its columns by name, of numbers, texts, truth values, or lists of texts; NaN becomes null.
        described: What the file says of itself: texts by key.

    Raises:
        AttnscopeError: Parquet cannot hold a value, such as a number beyond 64 bits or a text that is no Unicode.
    """
    pyarrow, library = arrow()
    file = io.BytesIO()
    try:
        arrays = {name: pyarrow.array(map(_nothing, each), _type(pyarrow, each)) for name, each in columns.items()}
        library.write_table(pyarrow.table(arrays).replace_schema_metadata(dict(described)), file)
    except (ValueError, TypeError, OverflowError) as error:
        raise AttnscopeError(f"Parquet cannot hold this: {first_line(error)}", "save it as .npz or .csv") from None
    return file.getvalue()


def _type(pyarrow: Any, values: Sequence[Any]) -> Any:
    """The type of a column, where its values may all be undefined."""
    return pyarrow.float64() if any(isinstance(value, float) for value in values) else None


def _nothing(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value
