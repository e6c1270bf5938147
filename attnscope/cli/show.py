"""`attnscope show`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnscope.cli import options

if TYPE_CHECKING:
    from attnscope.views.figures import Style


def show(
    record: Annotated[
        Path, typer.Argument(help="A record that attnscope saved, such as weights.npz or heads.npz, or its folder.")
    ],
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Draw its figures into this folder.")] = None,
    formats: Annotated[
        str | None,
        typer.Option(
            "-f", "--format", help="Several of png, svg, pdf, npz, json, csv, text.  [default: png with -o, else text]"
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
    schema = schema_of(record)
    if schema == HEADS_SCHEMA:
        _show_heads(record, out, formats, measures, json, quiet)
    elif schema.split("/")[0] in ("attnscope.trace", "attnscope.split", "attnscope.cost"):
        _show_computed(schema.split("/")[0].removeprefix("attnscope."), record, out, formats, json, quiet)
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


def _show_computed(what: str, record: Path, out: Path | None, formats: str | None, json: bool, quiet: bool) -> None:
    """Shows a trace, a split or costs again; with a folder, writes their files there."""
    from attnscope.studies.inputs import named_formats
    from attnscope.views.figures import FIGURE_FORMATS

    if what == "trace":
        from attnscope.cli.trace import print_trace
        from attnscope.records import trace
        from attnscope.studies.trace_files import RECORDS, saved

        traced = trace.load(record)
        options.say(traced.run["notes"], quiet)
        print_trace(traced, [] if out is None else saved(traced, out, RECORDS), json)
        return
    named = named_formats(formats or "json,png", ("json", *FIGURE_FORMATS))
    if what == "split":
        from attnscope.cli.split import print_split
        from attnscope.records import split
        from attnscope.studies import split_files

        cut = split.load(record)
        options.say(cut.run["notes"], quiet)
        print_split(cut, [] if out is None else split_files.drawn(cut, out, named), json)
    else:
        from attnscope.cli.cost import print_cost
        from attnscope.records import cost
        from attnscope.studies import cost_files

        counted = cost.load(record)
        print_cost(counted, [] if out is None else cost_files.drawn(counted, out, named), json)


def _file_of(record: Path) -> Path:
    """The record in a folder, if it is one."""
    known = ("heads.npz", "weights.npz", "record.json", "trace.npz", "split.json", "cost.json")
    return next((record / name for name in known if (record / name).is_file()), record)
