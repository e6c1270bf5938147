"""`attnscope show`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from attnscope.cli import options
from attnscope.errors import AttnscopeError, first_line

_SHOWN_BY = {
    "attnscope.heatmap": "heatmap",
    "attnscope.heads": "heads",
    "attnscope.pooled": "heatmap",
    "attnscope.rollout": "rollout",
    "attnscope.compare": "compare",
    "attnscope.relations": "relations",
    "attnscope.ablate": "ablate",
    "attnscope.trace": "trace",
    "attnscope.split": "split",
    "attnscope.cost": "cost",
}
"""The module beside this one whose `show_saved` shows a record, by the record's schema without its version."""


def show(
    record: Annotated[
        Path, typer.Argument(help="A record that attnscope saved, such as weights.npz or heads.npz, or its folder.")
    ],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Draw its figures into this folder.")] = None,
    formats: Annotated[
        str | None,
        typer.Option(
            "-f",
            "--format",
            help="Several of png, svg, pdf, npz, json, csv, parquet, text.  [default: png with -o, else text]",
        ),
    ] = None,
    query: options.Query = None,
    pick: options.Pick = None,
    scale: Annotated[
        str | None,
        typer.Option(
            help="What the darkest colour means: weight 1 (fixed), each head's largest (head), the figure's (figure).  "
            "[default: fixed; figure for rollout]"
        ),
    ] = None,
    cmap: options.Cmap = "Blues",
    measures: Annotated[
        str | None, typer.Option(help="Of heads: also print these measures, such as entropy_nats,positional.")
    ] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Draw a saved record again, without its model: in the terminal, or with -o as files."""
    from importlib import import_module

    import numpy as np

    from attnscope.records.storage import file_of, schema_of

    record = file_of(record)
    # A file that names no schema is refused as a heatmap.
    module = _SHOWN_BY.get(schema_of(record).partition("/")[0], "heatmap")
    saved = options.Saved(record, out, formats, query, pick, scale, cmap, measures, json, quiet)
    try:
        # Values that no model computed may overflow as they are drawn: NumPy's warnings tell a user nothing.
        with np.errstate(all="ignore"):
            import_module(f"attnscope.cli.{module}").show_saved(saved)
    except (AttnscopeError, OSError, MemoryError):
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
        # It was whole by its class, but what it says cannot be drawn.
        if os.environ.get("ATTNSCOPE_TRACEBACK"):
            raise
        told = f"{type(error).__name__}: {first_line(error)}"
        raise AttnscopeError(f"{record} is damaged: what it says cannot be shown ({told})") from None
