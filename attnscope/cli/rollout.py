"""`attnscope rollout`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnscope.cli import groups, options

if TYPE_CHECKING:
    from attnscope.records.rollouts import Rollout


@groups.command(
    omit=("words", "hide_special"),
    formats="Several of png, svg, pdf, npz, json.  [default: npz,png]",
    scale="What the darkest colour means: 1 (fixed), each map's largest (head), the figure's (figure).  "
    "[default: figure; head for pictures]",
)
def rollout(
    *,
    one: groups.OneText,
    image: groups.Image = None,
    model: groups.Model = "minilm",
    tokens: groups.Tokens,
    residual: Annotated[
        float, typer.Option(min=0, max=1, help="The share of the identity in each layer, for the residual connection.")
    ] = 0.5,
    flow: Annotated[
        bool | None,
        typer.Option("--flow/--no-flow", help="Find the flow.  [default: if it takes a minute at most]"),
    ] = None,
    where: groups.Where,
    drawing: groups.Drawing,
    loading: groups.Loading,
    printing: groups.Printing,
) -> None:
    """How much of each input token is left in a place after several layers: attention rollout and attention flow.

    By attention alone, heads averaged, as Abnar & Zuidema 2020 define both.

    - `attnscope rollout "The animal didn't cross the street because it was too tired." --query it`
    - `attnscope rollout "…" -o out --format npz,pdf`
    - `attnscope rollout --image photo.jpg -m ./dinov2-small -o out`
    """
    from attnscope.errors import UsageError
    from attnscope.studies.rollout_files import RolloutFiles, formats_from, write_picture_rollout, write_rollout

    if where.out is None and where.formats is not None:
        raise UsageError("there is no folder to write files to", "give one with --out, or leave out --format")
    style = drawing.style("figure" if image is None else "head")
    files, load = RolloutFiles(where.out, formats_from(where.formats), style, tokens.query), loading.options()
    if image is not None:
        options.refuse_beside("--image", one, flow=flow)
        found, paths = write_picture_rollout(model, image, files, load, residual=residual)
    else:
        given = one.read()
        with options.progress_of_steps(printing.quiet, "flow") as report:
            found, paths = write_rollout(model, given, files, load, residual=residual, flow=flow, report=report)
    options.say(found.run["notes"], printing.quiet)
    print_rollout(found, paths, tokens.query, printing.json)


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
