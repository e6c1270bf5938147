"""`attnscope heatmap`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnscope.cli import options

if TYPE_CHECKING:
    from attnscope.records import Heatmap
    from attnscope.records.pooled import PooledHeatmap


def heatmap(
    text: Annotated[str | None, typer.Argument(help="The text; `-` reads it from stdin.", show_default=False)] = None,
    file: Annotated[Path | None, typer.Option(help="Read the text from a file (UTF-8).")] = None,
    image: options.Image = None,
    audio: Annotated[
        Path | None,
        typer.Option(
            help="A WAV file: what Whisper attends to as it writes TEXT, its transcript (default: what the model "
            "itself writes); or wav2vec 2.0 and other encoders over time.",
            show_default=False,
        ),
    ] = None,
    pair: Annotated[str | None, typer.Option(help="A second text, for models that read pairs.")] = None,
    target: Annotated[
        str | None,
        typer.Option(help="What an encoder-decoder is to write.  [default: its own greedy output]", show_default=False),
    ] = None,
    generate: Annotated[
        int, typer.Option(min=0, max=10000, help="Let a decoder write that many tokens, and show them too.")
    ] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Put the text into the model's chat template.")] = False,
    model: options.Model = "minilm",
    layers: options.Layers = None,
    heads: options.Heads = None,
    pick: options.Pick = None,
    query: options.Query = None,
    words: options.Words = False,
    hide_special: options.HideSpecial = False,
    pooled: Annotated[
        int | None,
        typer.Option(
            help="Pool long texts to at most so many rows and columns of cells, 8 to 1024; 0: never.  "
            "[default: 256 for more than 400 tokens]",
            show_default=False,
        ),
    ] = None,
    pool: Annotated[
        str, typer.Option(help="What a pooled cell shows: mean (mass per query) or max (largest weight).")
    ] = "mean",
    rows: Annotated[
        str | None, typer.Option(help="Only these queries, exactly, such as 1000:1064.", show_default=False)
    ] = None,
    cols: Annotated[
        str | None, typer.Option(help="Only these keys, exactly, such as 0:64.", show_default=False)
    ] = None,
    out: options.Out = None,
    formats: Annotated[
        str,
        typer.Option(
            "-f", "--format", help="Several of png, svg, pdf (figures), npz, json (data), text (in the terminal)."
        ),
    ] = "png",
    scale: Annotated[
        str | None,
        typer.Option(
            help="What the darkest colour means: weight 1 (fixed), each head's largest (head), the figure's (figure).  "
            "[default: fixed; head for pictures and sound]",
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
    """Draw what every head attends to on a text.

    Writes an overview of all layers and heads and a figure a layer, and prints their paths.

    - `attnscope heatmap "The animal didn't cross the street because it was too tired."`

    - `attnscope heatmap "…" --pick L3H1 --query it --format png,pdf,npz`

    - `attnscope heatmap --file text.txt -L 0-2 --words --hide-special`

    - `attnscope heatmap --file book.txt --pick L3H1 --rows 1000:1064 --cols 0:64`

    - `attnscope heatmap --image photo.jpg -m ./dinov2-small --query 3,5`

    - `attnscope heatmap --audio speech.wav -m ./whisper-tiny "What is said in it."`
    """
    from attnscope.errors import UsageError
    from attnscope.studies.heatmap import Choice, Cut, Prompt
    from attnscope.studies.heatmap_files import Wanted, formats_from, write_heatmap
    from attnscope.studies.inputs import LoadOptions, others_in
    from attnscope.studies.picture_files import write_picture
    from attnscope.studies.sound_files import write_sound
    from attnscope.text import read_text
    from attnscope.views.figures import Style

    named = formats_from(formats)
    if named == ("text",) and out is not None:
        raise UsageError("there is no file to write: text is drawn in the terminal", "add formats, or leave out --out")
    if "text" in named and json:
        raise UsageError("the terminal's drawing and --json both go to stdout", "leave out one of them")
    wanted = Wanted(
        choice=Choice(options.numbers_from(layers), options.numbers_from(heads), options.heads_from(pick)),
        formats=tuple(name for name in named if name != "text"),
        out=out,
        style=Style(scale or ("fixed" if image is None and audio is None else "head"), cmap),  # type: ignore[arg-type]  # Style refuses it
        query=query,
        words=words,
        hide_special=hide_special,
        cut=Cut(options.span_from("--rows", rows), options.span_from("--cols", cols)),
        pooled=pooled,
        pool=pool,
    )
    loading = LoadOptions(engine, device, dtype, not no_check, allow_pickle, trust_remote_code, device_map, adapter)
    record: Heatmap | PooledHeatmap
    if image is not None:
        options.refuse_beside("--image", TEXT=text, file=file, pair=pair, target=target, generate=generate, chat=chat)
        options.refuse_beside("--image", audio=audio)
        record, paths = write_picture(model, image, wanted, loading)
    elif audio is not None:
        options.refuse_beside("--audio", pair=pair, target=target, generate=generate, chat=chat)
        transcript = None if text is None and file is None else read_text(text, file)
        record, paths = write_sound(model, audio, transcript, wanted, loading)
    else:
        prompt = Prompt(read_text(text, file), pair, target, chat, generate)
        record, paths = write_heatmap(model, prompt, wanted, loading)
    options.say([*record.run["notes"], *others_in(out, paths)], quiet)
    print_result(record, paths, "text" in named, query, json)


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
    from attnscope.errors import UsageError
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
