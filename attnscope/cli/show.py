"""Run `attnscope show`."""

import os
from pathlib import Path

from attnscope.choice import Choice, TokenOptions
from attnscope.cli.shared import FileOptions, MapDrawingOptions
from attnscope.errors import AttnscopeError, first_line
from attnscope.options import option, options
from attnscope.studies.heads.options import ListingOptions, make_measures_option


@options
class SavedRecord:
    """Hold the saved record, and what is shown of it."""

    record: Path = option(
        "A record that attnscope saved, such as heatmap.npz or heads.npz, or its folder.", argument=True
    )
    measures: str | None = make_measures_option()


def show(
    *,
    saved: SavedRecord,
    choice: Choice,
    tokens: TokenOptions,
    listing: ListingOptions,
    drawing: MapDrawingOptions,
    files: FileOptions,
) -> None:
    """Draw a saved record again, without its model: in the terminal, or with -o as files.

    - `attnscope show heads.npz --pick L3H1`
    - `attnscope show heatmap.npz -L 3 --words --hide-special`
    - `attnscope show heatmap.npz --query it -o figures -f pdf`
    """
    import numpy as np

    from attnscope import output
    from attnscope.results.result import load_record

    loaded = load_record(saved.record)
    how = {**drawing.changes(), **vars(choice), "measures": saved.measures, "sort": listing.sort}
    if files.every and "every" in loaded.record_kind().options:
        how["every"] = True
    how |= {"columns": files.columns, "json": files.json, "quiet": files.quiet}
    # Not every record takes these options. None leaves an option out: make it of the flags that are not set.
    for name, value in vars(tokens).items():
        how[name] = value or None
    try:
        # A damaged record may hold huge values. If they overflow, a warning of NumPy would not help the user.
        with np.errstate(all="ignore"):
            output.show(loaded, files.out, files.formats, **how)
    except (
        TypeError,
        ValueError,
        LookupError,
        ArithmeticError,
        AttributeError,
        RecursionError,
    ) as error:
        # `load_record` has checked types and shapes: values that cannot be drawn are what is left.
        if os.environ.get("ATTNSCOPE_TRACEBACK"):
            raise
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise AttnscopeError(
            f"{saved.record} is damaged: what it says cannot be shown ({reason})"
        ) from None
