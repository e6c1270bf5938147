"""`attnscope show`."""

from pathlib import Path
from typing import Annotated

import typer

from attnscope.cli import options


def show(
    record: Annotated[Path, typer.Argument(help="A record that attnscope saved: weights.npz or record.json.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Draw its figures into this folder.")] = None,
    formats: Annotated[
        str | None,
        typer.Option(
            "-f", "--format", help="Several of png, svg, pdf, npz, json, text.  [default: png with -o, else text]"
        ),
    ] = None,
    query: options.Query = None,
    pick: options.Pick = None,
    scale: options.Scale = "fixed",
    cmap: options.Cmap = "Blues",
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Draw a saved record again, without its model: in the terminal, or with -o as files."""
    from attnscope.cli.heatmap import print_result
    from attnscope.errors import UsageError
    from attnscope.records import load
    from attnscope.studies.heatmap_files import formats_from, redraw
    from attnscope.views.figures import Style, sheets_of

    named = formats_from(formats or ("text" if out is None else "png"))
    if out is None and set(named) != {"text"}:
        raise UsageError("there is no folder to write files to", "give one with --out, or leave out --format")
    picked = options.heads_from(pick)
    style = Style(scale, cmap)  # type: ignore[arg-type]  # as in heatmap
    loaded = load(record)
    if picked is not None:
        loaded = loaded.only(picked)
    sheets_of(loaded, query)  # an unknown query is said before anything is written
    paths = [] if out is None else redraw(loaded, out, named, style, query)
    options.say(loaded.run.get("notes", ()), quiet)
    print_result(loaded, paths, "text" in named, query, json)
