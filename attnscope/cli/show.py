"""`attnscope show`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnscope.cli import options

if TYPE_CHECKING:
    from attnscope.views.figures import Style


def show(
    record: Annotated[
        Path, typer.Argument(help="A record that attnscope saved: weights.npz, record.json, heads.npz, or its folder.")
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
    scale: options.Scale = "fixed",
    cmap: options.Cmap = "Blues",
    measures: Annotated[
        str | None, typer.Option(help="Of heads: also print these measures, such as entropy_nats,positional.")
    ] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Draw a saved record again, without its model: in the terminal, or with -o as files."""
    from attnscope.records.findings import HEADS_SCHEMA
    from attnscope.records.storage import schema_of
    from attnscope.views.figures import Style

    record = _file_of(record)
    if schema_of(record) == HEADS_SCHEMA:
        _show_heads(record, out, formats, measures, json, quiet)
    else:  # a file that names no schema is refused there
        style = Style(scale, cmap)  # type: ignore[arg-type]  # as in heatmap
        _show_heatmap(record, out, formats, query, pick, style, json, quiet)


def _show_heatmap(
    record: Path,
    out: Path | None,
    formats: str | None,
    query: str | None,
    pick: str | None,
    style: "Style",
    json: bool,
    quiet: bool,
) -> None:
    """Draws a record of attention weights."""
    from attnscope.cli.heatmap import print_result
    from attnscope.errors import UsageError
    from attnscope.records import load
    from attnscope.studies.heatmap_files import formats_from, redraw
    from attnscope.views.figures import sheets_of

    named = formats_from(formats or ("text" if out is None else "png"))
    if out is None and set(named) != {"text"}:
        raise UsageError("there is no folder to write files to", "give one with --out, or leave out --format")
    picked = options.heads_from(pick)
    loaded = load(record)
    if picked is not None:
        loaded = loaded.only(picked)
    sheets_of(loaded, query)  # an unknown query is said before anything is written
    paths = [] if out is None else redraw(loaded, out, named, style, query)
    options.say(loaded.run.get("notes", ()), quiet)
    print_result(loaded, paths, "text" in named, query, json)


def _show_heads(
    record: Path, out: Path | None, formats: str | None, measures: str | None, json: bool, quiet: bool
) -> None:
    """Draws a record of heads."""
    from attnscope.cli.heads import print_findings
    from attnscope.records.findings import load
    from attnscope.studies.heads_files import drawn_again

    loaded = load(record)
    paths = drawn_again(loaded, out, formats)
    options.say(loaded.run.get("notes", ()), quiet)
    print_findings(loaded, paths, measures, json)


def _file_of(record: Path) -> Path:
    """The record in a folder, if it is one."""
    known = ("heads.npz", "weights.npz", "record.json")
    return next((record / name for name in known if (record / name).is_file()), record)
