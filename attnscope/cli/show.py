"""`attnscope show`."""

from pathlib import Path
from typing import Annotated

import typer

from attnscope.cli import options


def show(
    record: Annotated[Path, typer.Argument(help="A record that attnscope saved: weights.npz or record.json.")],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Draw its figures into this folder.")] = None,
    formats: Annotated[str, typer.Option("-f", "--format", help="Several of png, svg, pdf, npz, json, text.")] = "png",
    query: options.Query = None,
    pick: options.Pick = None,
    scale: options.Scale = "fixed",
    cmap: options.Cmap = "Blues",
    json: options.Json = False,
) -> None:
    """Draw a saved record again, without its model: in the terminal, or with -o as files."""
    from attnscope.cli.heatmap import print_result
    from attnscope.records import load
    from attnscope.studies.heatmap_files import formats_from, redraw
    from attnscope.views.figures import Style

    loaded = load(record)
    paths: list[Path] = []
    named = formats_from(formats)
    picked = options.heads_from(pick)
    if picked is not None:
        loaded = loaded.only(picked)
    if out is not None:
        paths = redraw(loaded, out, named, Style(scale, cmap), query)  # type: ignore[arg-type]  # as in heatmap
    print_result(loaded, paths, out is None or "text" in named, query, json)
