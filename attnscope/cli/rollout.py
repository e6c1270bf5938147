"""`attnscope rollout`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnscope.cli import options

if TYPE_CHECKING:
    from attnscope.records.rollouts import Rollout


def rollout(
    text: Annotated[str | None, typer.Argument(help="The text; `-` reads it from stdin.", show_default=False)] = None,
    file: Annotated[Path | None, typer.Option(help="Read the text from a file (UTF-8).")] = None,
    image: options.Image = None,
    model: options.Model = "minilm",
    query: options.Query = None,
    residual: Annotated[
        float, typer.Option(min=0, max=1, help="The share of the identity in each layer, for the residual connection.")
    ] = 0.5,
    flow: Annotated[
        bool | None,
        typer.Option("--flow/--no-flow", help="Find the flow.  [default: if it takes a minute at most]"),
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="A folder for the record and figures.")] = None,
    formats: Annotated[
        str | None, typer.Option("-f", "--format", help="Several of png, svg, pdf, npz, json.  [default: npz,png]")
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            help="What the darkest colour means: 1 (fixed), each map's largest (head), the figure's (figure).  "
            "[default: figure; head for pictures]",
            show_default=False,
        ),
    ] = None,
    cmap: options.Cmap = "Blues",
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
    """How much of each input token is left in a place after several layers: attention rollout and attention flow.

    By attention alone, heads averaged, as Abnar & Zuidema 2020 define both.

    - `attnscope rollout "The animal didn't cross the street because it was too tired." --query it`

    - `attnscope rollout "…" -o out --format npz,pdf`

    - `attnscope rollout --image photo.jpg -m ./dinov2-small -o out`
    """
    from attnscope.errors import UsageError
    from attnscope.studies.inputs import LoadOptions
    from attnscope.studies.rollout_files import RolloutFiles, formats_from, write_picture_rollout, write_rollout
    from attnscope.text import read_text
    from attnscope.views.figures import Style

    if out is None and formats is not None:
        raise UsageError("there is no folder to write files to", "give one with --out, or leave out --format")
    usual = "figure" if image is None else "head"
    style = Style(scale or usual, cmap)  # type: ignore[arg-type]  # as in heatmap
    files = RolloutFiles(out, formats_from(formats), style, query)
    loading = LoadOptions(engine, device, dtype, not no_check, allow_pickle, trust_remote_code, device_map, adapter)
    if image is not None:
        options.refuse_beside("--image", TEXT=text, file=file, flow=flow)
        found, paths = write_picture_rollout(model, image, files, loading, residual=residual)
        options.say(found.run["notes"], quiet)
        print_rollout(found, paths, query, json)
        return
    given = read_text(text, file)
    with options.counting(quiet, "flow") as report:
        found, paths = write_rollout(model, given, files, loading, residual=residual, flow=flow, report=report)
    options.say(found.run["notes"], quiet)
    print_rollout(found, paths, query, json)


def print_rollout(found: "Rollout", paths: list[Path], query: str | None, json: bool) -> None:
    """The result on stdout: one JSON document; else the tables, and the paths."""
    if json:
        options.print_document(found.as_json(), paths, allow_nan=False)
        return
    from attnscope.views.plain_text import open_console
    from attnscope.views.rollout_terminal import tables

    open_console().print(tables(found, query))
    options.print_paths(paths)


def show_saved(saved: options.Saved) -> None:
    """Shows a record of rollout and flow again."""
    from attnscope.records.rollouts import load
    from attnscope.studies.rollout_files import RolloutFiles, drawn_again
    from attnscope.views.figures import Style

    loaded = load(saved.record)
    usual = "figure" if loaded.picture is None else "head"
    style = Style(saved.scale or usual, saved.cmap)  # type: ignore[arg-type]  # as in heatmap
    paths = drawn_again(loaded, saved.formats, RolloutFiles(saved.out, style=style, query=saved.query))
    options.say(loaded.run.get("notes", ()), saved.quiet)
    print_rollout(loaded, paths, saved.query, saved.json)
