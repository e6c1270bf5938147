"""`attnscope show`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from attnscope.choice import Choice, Tokens
from attnscope.cli import groups, options
from attnscope.errors import AttnscopeError, first_line
from attnscope.studies.heads.options import Listing


@groups.command(
    out="Draw its figures into this folder.",
    formats="Several of png, svg, pdf, npz, json, csv, text.  "
    "[default: text; with -o png, or npz and json for a trace]",
    scale="The weight of the darkest colour: 1 (fixed), each head's largest (head), the figure's (figure).  "
    "[default: fixed; figure for rollout, head for pictures and sound]",
    cmap=groups.Changed(default=None),
)
def show(
    *,
    record: Annotated[
        Path, typer.Argument(help="A record that attnscope saved, such as heatmap.npz or heads.npz, or its folder.")
    ],
    where: groups.Where,
    tokens: Tokens,
    which: Choice,
    drawing: groups.Drawing,
    listing: Listing,
    measures: Annotated[
        str | None,
        typer.Option(
            help="Of heads: also print these measures, such as entropy_nats,positional; all: every one. Figures then "
            "have a large map of each, and nothing else.",
            autocompletion=options.complete_measures,
        ),
    ] = None,
    printing: groups.Printing,
) -> None:
    """Draw a saved record again, without its model: in the terminal, or with -o as files.

    - `attnscope show heads.npz --pick L3H1`
    - `attnscope show heatmap.npz -L 3 --words --hide-special`
    - `attnscope show heatmap.npz --query it -o figures -f pdf`
    """
    import numpy as np

    from attnscope import output
    from attnscope.records import load_record

    loaded = load_record(record)
    how = {**drawing.options(), **vars(which), **listing.plan_options(), "measures": measures}
    how |= {"query": tokens.query, "words": tokens.words or None, "hide_special": tokens.hide_special or None}
    try:
        # Values that no model computed may overflow as they are drawn: NumPy's warnings tell a user nothing.
        with np.errstate(all="ignore"):
            output.show(loaded, **vars(where), **vars(printing), **how)
    except (AttnscopeError, OSError, MemoryError):
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
        # It was whole by its class, but what it says cannot be drawn.
        if os.environ.get("ATTNSCOPE_TRACEBACK"):
            raise
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise AttnscopeError(f"{record} is damaged: what it says cannot be shown ({reason})") from None
