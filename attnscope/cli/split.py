"""`attnscope split`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnscope.cli import options

if TYPE_CHECKING:
    from attnscope.records.split import Split


def split(
    text: Annotated[
        str | None,
        typer.Argument(help="A text; `-` reads stdin.  [default: the worked example]", show_default=False),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="Read the text from a file (UTF-8).")] = None,
    counts: Annotated[str, typer.Option(help="Numbers of heads to cut into.")] = "1,2,4",
    same_columns: Annotated[
        bool, typer.Option("--same-columns", help="Give head 1 the columns of head 0: the two then compute the same.")
    ] = False,
    project: Annotated[
        str,
        typer.Option(
            help="Mix the heads by a W_O: orthogonal or permute (random, see --seed), or a file with a matrix.",
            show_default=False,
        ),
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Of a random W_O.")] = 0,
    drop: Annotated[
        str | None, typer.Option(help="Let these heads put out zeros, one by one, and measure the change, such as 0,1.")
    ] = None,
    model: options.Model = "minilm",
    layer: Annotated[int | None, typer.Option("-L", "--layer", min=0, help="The layer, counted from 0.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="A folder for the record and a figure.")] = None,
    formats: Annotated[
        str | None, typer.Option("-f", "--format", help="Files: several of json, png, svg, pdf.  [default: json,png]")
    ] = None,
    adapter: options.Adapter = None,
    engine: options.Engine = "auto",
    device: options.Device = "cpu",
    dtype: options.Dtype = "float32",
    device_map: options.DeviceMap = None,
    no_check: options.NoCheck = False,
    allow_pickle: options.AllowPickle = False,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """See the same queries, keys and values with more and fewer heads.

    Without a text: the worked example of `attnscope trace`.

    - `attnscope split --counts 1,2,4 --drop 0,1`

    - `attnscope split "The cat sat on the mat." -L 3 --counts 1,12,384 -o out`
    """
    from attnscope.studies.inputs import LoadOptions
    from attnscope.studies.split import SplitOptions
    from attnscope.studies.split_files import SplitOrder, split_and_written

    how = SplitOptions(
        options.numbers_from(counts) or (), same_columns, project, seed, options.numbers_from(drop) or ()
    )  # fmt: skip
    loading = LoadOptions(engine, device, dtype, not no_check, allow_pickle, trust_remote_code, device_map, adapter)
    record, paths = split_and_written(model, SplitOrder(text, file, layer, how, out, formats), loading)
    options.say(record.run["notes"], quiet)
    print_split(record, paths, json)


def print_split(record: "Split", paths: list[Path], json: bool) -> None:
    """The result on stdout: one JSON document; else the numbers, then the paths."""
    if json:
        options.print_document(record.as_json(), paths)
        return
    from attnscope.views.plain_text import open_console
    from attnscope.views.split_terminal import summary

    console = open_console(highlight=False)
    console.print(summary(record, console))
    options.print_paths(paths)


def show_saved(saved: options.Saved) -> None:
    """Shows a split again; with a folder, writes its files there."""
    from attnscope.records.split import load
    from attnscope.studies.inputs import named_formats
    from attnscope.studies.split_files import drawn
    from attnscope.views.figures import FIGURE_FORMATS

    formats = named_formats(saved.formats or "json,png", ("json", *FIGURE_FORMATS))
    loaded = load(saved.record)
    options.say(loaded.run["notes"], saved.quiet)
    print_split(loaded, [] if saved.out is None else drawn(loaded, saved.out, formats), saved.json)
