"""`attnscope page`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from attnscope.choice import Choice, Tokens
from attnscope.cli import groups, options
from attnscope.options import refuse_beside
from attnscope.studies.inputs.options import LoadOptions, ReadingOptions, TextsWanted, refuse_file_names


@groups.command(
    omit=("text", "query", "cmap", "width", "dpi", "font_size", "no_title", "font", "formats"),
    split=groups.Changed(default="file"),
    pick="Single heads, such as L3H1,L5H11.",
    words="Open with word pieces merged.",
    hide_special="Open with special tokens hidden, in decoders also the first one.",
    scale="The weight of the darkest colour: 1 (fixed), each head's largest (head), the figure's (figure).  "
    "[default: fixed; head for pictures and sound]",
    out="The file to write; `-` is stdout.  [default: attnscope-out/MODEL-TEXT-HASH.html]",
)
def page(
    *,
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT]...", help="Texts; `-` reads one from stdin.")
    ] = None,
    several: TextsWanted,
    image: Annotated[
        list[Path] | None,
        "A photo. With TEXT, for a vision-language model: where in it each word looks. Alone, for a vision "
        "transformer: what each patch attends to. May be given several times.",
        "Text",
    ] = None,
    record: Annotated[
        list[Path] | None,
        "Show a saved record (heatmap.npz, or its folder); may be given several times.",
    ] = None,
    heads_record: Annotated[
        Path | None,
        "A record of `attnscope heads` (heads.npz), to name the heads' roles; or an atlas (atlas.npz), to show it too.",
    ] = None,
    reading: ReadingOptions,
    model: groups.Model = "minilm",
    which: Choice,
    tokens: Tokens,
    drawing: groups.Drawing,
    where: groups.Where,
    loading: LoadOptions,
    printing: groups.Printing,
) -> None:
    """Write one HTML file in which you explore all heads, without server or network.

    - `attnscope page "The animal didn't cross the street because it was too tired." -o page.html`
    - `attnscope page "It was too tired." "It was too wide." --heads-record out/heads.npz`
    - `attnscope page --record heatmap.npz`
    - `attnscope page --image photo.jpg "What is on the table?" -m ./smolvlm --generate 20`
    """
    from attnscope.output import print_document, say
    from attnscope.studies.maps.page import PageOrder, write_page

    refuse_file_names(*(texts or ()))
    if str(where.out) == "-":
        refuse_beside("-o -", json=printing.json)
    if image:
        has_text = bool(texts or several.files or reading.generate)
        unused = dataclasses.replace(reading, generate=0) if has_text else reading
        refuse_beside("--image", unused)
    wanted = PageOrder(
        texts=tuple(texts or ()), several=several, reading=reading, images=tuple(image or ()),
        records=tuple(record or ()), heads_record=heads_record, choice=which, tokens=tokens, scale=drawing.scale,
        out=where.out,
    )  # fmt: skip
    with options.progress(printing.quiet) as report:
        written = write_page(model, wanted, loading, report)
    say(written.notes, printing.quiet)
    if printing.json or not written.is_stream:
        print_document(written.as_json, [written.path], printing.json)
