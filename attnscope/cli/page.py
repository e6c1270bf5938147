"""`attnscope page`."""

import dataclasses
from pathlib import Path

from attnscope.choice import Choice, Tokens
from attnscope.cli.progress import progress
from attnscope.cli.shared import Chosen, Printing
from attnscope.options import option, options, refuse_beside
from attnscope.studies.inputs.options import ReadingOptions, TextFiles, refuse_file_names


@options
class PageTokens(Tokens):
    """How tokens are shown as the page opens."""

    query: str | None = option("", default=None, python_only=True)


@options
class PageWanted(TextFiles):
    """What a page shows, and where it is written."""

    texts: tuple[str, ...] = option("Texts; `-` reads one from stdin.", default=(), argument=True, metavar="TEXT")
    split: str = option("How a text file is split into texts: line, paragraph or file.", default="file")
    image: tuple[Path, ...] = option(
        "A photo; may be given several times. With TEXT, for models that read both: where in it each word looks.",
        default=(),
    )
    record: tuple[Path, ...] = option(
        "A saved record, or its folder; may be given several times. heatmap.npz: show it; heads.npz: name the heads' "
        "roles; atlas.npz: show it too.",
        default=(), panel="Text",
    )  # fmt: skip
    scale: str | None = option(
        "The weight of the darkest colour: 1 (fixed), each head's largest (head), the figure's (figure).  "
        "[default: fixed; head for pictures and sound]",
        default=None, panel="Drawing", rare=True,
    )  # fmt: skip
    out: Path | None = option(
        "The file to write, such as page.html; - is stdout.", "-o", "--out", default=None, panel="Output"
    )


def page(
    *, wanted: PageWanted, reading: ReadingOptions, which: Choice, tokens: PageTokens, model: Chosen, printing: Printing
) -> None:
    """Write one HTML file in which you explore all heads, without server or network.

    - `attnscope page "The animal didn't cross the street because it was too tired." -o page.html`
    - `attnscope page "It was too tired." "It was too wide." --record out/heads.npz`
    - `attnscope page --record heatmap.npz`
    - `attnscope page --image photo.jpg "What is on the table?" -m ./smolvlm --generate 20`
    """
    from attnscope.output import print_document, say
    from attnscope.studies.maps.page import PageOrder, write_page

    refuse_file_names(*wanted.texts)
    if str(wanted.out) == "-":
        refuse_beside("-o -", json=printing.json)
    if wanted.image:
        has_text = bool(wanted.texts or wanted.files or reading.generate)
        refuse_beside("--image", dataclasses.replace(reading, generate=0) if has_text else reading)
    order = PageOrder(
        texts=wanted.texts,
        several=wanted,
        reading=reading,
        images=wanted.image,
        records=wanted.record,
        choice=which,
        tokens=tokens,
        scale=wanted.scale,
        out=wanted.out,
    )
    with progress(printing.quiet) as report:
        written = write_page(model.model, order, model.loading, report)
    say(written.notes, printing.quiet)
    if printing.json or not written.is_stream:
        print_document(written.as_json, [written.path], printing.json)
