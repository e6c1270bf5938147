"""`attnscope split`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnscope.cli import groups, options

if TYPE_CHECKING:
    from attnscope.records.split import Split


@groups.command(
    text="A text; `-` reads stdin.  [default: the worked example]",
    out="A folder for the record and a figure.",
    formats="Files: several of json, png, svg, pdf.  [default: json,png]",
)
def split(
    *,
    one: groups.OneText,
    counts: Annotated[str, "Numbers of heads to cut into."] = "1,2,4",
    same_columns: Annotated[bool, "Give head 1 the columns of head 0: the two then compute the same."] = False,
    project: Annotated[
        str,
        "Mix the heads by a W_O: orthogonal or permute (random, see --seed), or a file with a matrix.",
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of a random W_O.")] = 0,
    drop: Annotated[
        str | None, "Set the output of these heads to zero, one by one, and measure the change, such as 0,1."
    ] = None,
    model: groups.Model = "minilm",
    layer: groups.Layer = None,
    where: groups.Where,
    loading: groups.Loading,
    printing: groups.Printing,
) -> None:
    """See the same queries, keys and values with more and fewer heads.

    Without a text: the worked example of `attnscope trace`.

    - `attnscope split --counts 1,2,4 --drop 0,1`
    - `attnscope split "The cat sat on the mat." -L 3 --counts 1,12,384 -o out`
    """
    from attnscope.studies.split import SplitOptions
    from attnscope.studies.split_files import SplitOrder, split_and_written

    numbers = options.numbers_from
    how = SplitOptions(numbers(counts) or (), same_columns, project, seed, numbers(drop) or ())
    record, paths = split_and_written(
        model, SplitOrder(one.text, one.file, layer, how, **vars(where)), loading.options()
    )
    options.say(record.run["notes"], printing.quiet)
    print_split(record, paths, printing.json)


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
