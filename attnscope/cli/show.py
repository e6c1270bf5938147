"""Run `attnscope show`: print or draw a saved record, of any kind, without its model."""

import os
from pathlib import Path

from attnscope.choice import Choice, TokenOptions
from attnscope.cli.shared import FileOptions, MapDrawingOptions
from attnscope.errors import AttnscopeError, first_line
from attnscope.options import option, options
from attnscope.studies.heads.options import ListingOptions, make_measures_option


@options
class SavedRecord:
    """Hold the path of a saved record, and the measures to show of it."""

    record: Path = option(
        "A record that attnscope saved, such as heatmap.npz or heads.npz, or its folder.", argument=True
    )
    measures: str | None = make_measures_option()


def show(
    *,
    record_options: SavedRecord,
    choice: Choice,
    token_options: TokenOptions,
    listing_options: ListingOptions,
    drawing_options: MapDrawingOptions,
    file_options: FileOptions,
) -> None:
    """Draw a saved record again, without its model: in the terminal, or with -o as files.

    - `attnscope show heads.npz --pick L3H1`
    - `attnscope show heatmap.npz -L 3 --words --hide-special`
    - `attnscope show heatmap.npz --query it -o figures -f pdf`
    """
    import numpy as np

    from attnscope import output
    from attnscope.results.result import load_record

    record = load_record(record_options.record)
    show_options = {
        **drawing_options.non_default_options(),
        **vars(choice),
        "measures": record_options.measures,
        "sort": listing_options.sort,
    }
    # `output.show` refuses an option that the record's kind lacks, unless its value is None. A flag that is not set is
    # False: make it None.
    for name, value in vars(token_options).items():
        show_options[name] = value or None
    try:
        # A damaged record may hold huge values. If they overflow, a warning of NumPy would not help the user.
        with np.errstate(all="ignore"):
            file_arguments = file_options.output_options(record.record_kind())
            output.show(record, **file_arguments, **show_options)
    except (
        TypeError,
        ValueError,
        LookupError,
        ArithmeticError,
        AttributeError,
        RecursionError,
    ) as error:
        # `load_record` has checked types and shapes. So the record's values are at fault: they cannot be drawn.
        if os.environ.get("ATTNSCOPE_TRACEBACK"):
            raise
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise AttnscopeError(
            f"{record_options.record} is damaged: what it says cannot be shown ({reason})"
        ) from None
