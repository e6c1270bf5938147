"""`attnscope heatmap`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from attnscope.cli import groups, options
from attnscope.errors import UsageError

if TYPE_CHECKING:
    from attnscope.records import Heatmap
    from attnscope.records.pooled import PooledHeatmap


@groups.command(
    out="The folder to write to.  [default: attnscope-out/MODEL-TEXT-HASH]",
    formats=groups.Changed(
        "Several of png, svg, pdf (figures), npz, json (data), text (in the terminal).", default="png"
    ),
    scale="What the darkest colour means: weight 1 (fixed), each head's largest (head), the figure's (figure).  "
    "[default: fixed; head for pictures and sound]",
)
def heatmap(
    *,
    one: groups.OneText,
    image: groups.Image = None,
    audio: Annotated[
        Path | None,
        "A WAV file: what Whisper attends to as it writes TEXT, its transcript (default: what the model "
        "itself writes); or wav2vec 2.0 and other encoders over time.",
    ] = None,
    reading: groups.Reading,
    model: groups.Model = "minilm",
    which: groups.Heads,
    tokens: groups.Tokens,
    pooled: Annotated[
        int | None,
        "Pool long texts to at most so many rows and columns of cells, 8 to 1024; 0: never.  "
        "[default: 256 for more than 400 tokens]",
    ] = None,
    pool: Annotated[str, "What a pooled cell shows: mean (mass per query) or max (largest weight)."] = "mean",
    rows: Annotated[str | None, "Only these queries, exactly, such as 1000:1064."] = None,
    cols: Annotated[str | None, "Only these keys, exactly, such as 0:64."] = None,
    where: groups.Where,
    drawing: groups.Drawing,
    loading: groups.Loading,
    printing: groups.Printing,
) -> None:
    """Draw what every head attends to on a text.

    Writes an overview of all layers and heads and a figure a layer, and prints their paths.

    - `attnscope heatmap "The animal didn't cross the street because it was too tired."`
    - `attnscope heatmap "…" --pick L3H1 --query it --format png,pdf,npz`
    - `attnscope heatmap --file text.txt -L 0-2 --words --hide-special`
    - `attnscope heatmap --file book.txt --pick L3H1 --rows 1000:1064 --cols 0:64`
    - `attnscope heatmap --image photo.jpg -m ./dinov2-small --query 3,5`
    - `attnscope heatmap --audio speech.wav -m ./whisper-tiny "What is said in it."`
    """
    from attnscope.studies.choice import Cut
    from attnscope.studies.heatmap_files import Wanted, write_heatmap
    from attnscope.studies.inputs import others_in
    from attnscope.studies.picture_files import write_picture
    from attnscope.studies.sound_files import write_sound

    named = _formats(where.formats or "", where.out, printing.json)
    wanted = Wanted(
        choice=which.choice(), formats=tuple(name for name in named if name != "text"), out=where.out,
        style=drawing.style("fixed" if image is None and audio is None else "head"), **vars(tokens),
        cut=Cut(options.span_from("--rows", rows), options.span_from("--cols", cols)), pooled=pooled, pool=pool,
    )  # fmt: skip
    load = loading.options()
    record: Heatmap | PooledHeatmap
    if image is not None:
        options.refuse_beside("--image", one, reading, audio=audio)
        record, paths = write_picture(model, image, wanted, load)
    elif audio is not None:
        options.refuse_beside("--audio", reading)
        record, paths = write_sound(model, audio, one.read() if one.given else None, wanted, load)
    else:
        record, paths = write_heatmap(model, reading.prompt(one.read()), wanted, load)
    options.say([*record.run["notes"], *others_in(where.out, paths)], printing.quiet)
    print_result(record, paths, "text" in named, tokens.query, printing.json)


def _formats(given: str, out: Path | None, json: bool) -> tuple[str, ...]:
    """The formats that are asked for.

    Raises:
        UsageError: They do not go with a folder, or with --json.
    """
    from attnscope.studies.heatmap_files import formats_from

    named = formats_from(given)
    if named == ("text",) and out is not None:
        raise UsageError("there is no file to write: text is drawn in the terminal", "add formats, or leave out --out")
    if "text" in named and json:
        raise UsageError("the terminal's drawing and --json both go to stdout", "leave out one of them")
    return named


def print_result(
    record: "Heatmap | PooledHeatmap", paths: list[Path], drawn: bool, query: str | None, json: bool
) -> None:
    """The result on stdout: one JSON document; else the drawing or table that was asked for, then the paths."""
    if json:
        options.print_json(record.to_json(files=[str(path) for path in paths]))
        return
    if drawn or query is not None:
        from attnscope.records import Heatmap
        from attnscope.views.heatmap_terminal import drawing, query_tables
        from attnscope.views.picture_terminal import picture_drawing
        from attnscope.views.plain_text import open_console
        from attnscope.views.pooled_terminal import pooled_drawing

        console = open_console()
        if not isinstance(record, Heatmap):
            console.print(pooled_drawing(record, console))
        elif record.picture is not None:
            console.print(picture_drawing(record, console, query))
        elif drawn:
            console.print(drawing(record, console, query))
        elif query is not None:
            console.print(query_tables(record, query))
    options.print_paths(paths)


def show_saved(saved: options.Saved) -> None:
    """Shows a record of attention weights, or of pooled ones, again."""
    from attnscope.records import load, pooled
    from attnscope.records.storage import schema_of
    from attnscope.studies.heatmap_files import formats_from, redraw, redraw_pooled, require_query
    from attnscope.views.figures import Style

    def style_of(usual: str) -> Style:
        return Style(saved.scale or usual, saved.cmap)  # type: ignore[arg-type]  # Style refuses any other

    style_of("fixed")  # what is no scale is said before a record is read
    named = formats_from(saved.formats or ("text" if saved.out is None else "png"))
    if saved.out is None and set(named) != {"text"}:
        raise UsageError("there is no folder to write files to", "give one with --out, or leave out --format")
    picked = options.heads_from(saved.pick)
    paths: list[Path] = []
    shown: Heatmap | PooledHeatmap
    if schema_of(saved.record) == pooled.POOLED_SCHEMA:
        if saved.query is not None:
            raise UsageError("pooled maps have no --query", "leave it out, or draw the exact part with heatmap --rows")
        grid = pooled.load(saved.record)
        grid = grid if picked is None else grid.only(picked)
        if saved.out is not None:
            paths = redraw_pooled(grid, saved.out, named, style_of("fixed"))
        shown = grid
    else:
        whole = load(saved.record)
        whole = whole if picked is None else whole.only(picked)
        style = style_of("fixed" if whole.picture is None and whole.sound is None else "head")
        require_query(whole, saved.query)  # an unknown one is said before anything is written
        if saved.out is not None:
            paths = redraw(whole, saved.out, named, style, saved.query)
        shown = whole
    options.say(shown.run.get("notes", ()), saved.quiet)
    print_result(shown, paths, "text" in named, saved.query, saved.json)
