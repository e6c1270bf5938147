"""`attnscope batch`."""

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnscope.choice import Choice, Tokens
from attnscope.cli import groups, options
from attnscope.errors import AttnscopeError, amount, one_line
from attnscope.options import read_names
from attnscope.studies.inputs.options import LoadOptions, ReadingOptions, TextsWanted
from attnscope.studies.running.options import SharedWork

if TYPE_CHECKING:
    from attnscope.records.batches import Batch


@groups.command(
    omit=("text", "files", "pair", "target", "out"),
    query="Also show what these tokens attend to, in the texts that have them.",
    formats=groups.Changed("Several of png, svg, pdf, npz, json.", default="png"),
    scale=groups.Changed(default="fixed"),
    workers="Workers that draw, each with its own copy of the model.  [default: one per core, as memory allows]",
)
def batch(
    *,
    files: Annotated[
        list[str],
        "Files or patterns: txt, jsonl, csv, also gzipped; `-` draws lines of stdin as they come.",
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder to write to, or to go on in."), "Output"],
    texts: TextsWanted,
    reading: ReadingOptions,
    model: groups.Model = "minilm",
    which: Choice,
    tokens: Tokens,
    where: groups.Where,
    drawing: groups.Drawing,
    running: SharedWork,
    force: Annotated[bool, "Draw again what is done already."] = False,
    replace: Annotated[bool, "Replace the results of another model or text in the folder.", "Output"] = False,
    loading: LoadOptions,
    printing: groups.Printing,
) -> None:
    """Draw every text of a file as `heatmap` draws one, with an index.html of all.

    If a run stops, the same command continues it, and draws nothing twice.

    - `attnscope batch sample_texts/sentences.txt -o figures`
    - `attnscope batch 'corpus/*.jsonl.gz' -o figures -L 3-5 --format svg --workers 2`
    """
    from attnscope.records.frame.kinds import KINDS
    from attnscope.studies.batch.study import batch as draw
    from attnscope.studies.batch.worker import BatchOptions

    formats = read_names(where.formats or "", KINDS["attnscope.heatmap"].formats, "format")
    how = BatchOptions(
        which.layers, which.heads, which.pick, formats, drawing.style(),
        tokens.query, tokens.words, tokens.hide_special, reading.chat, reading.generate, running.workers,
        1 if running.threads is None else running.threads, force, loading,
        running.executor, running.ray_address, replace,  # type: ignore[arg-type]  # Workers refuse others
    )  # fmt: skip
    with options.progress(printing.quiet) as report:
        result = draw(model, dataclasses.replace(texts, files=tuple(files)).corpus(), out, how, report)
    print_batch(result, out, printing.json, printing.quiet, drawing.font)
    fail_if_not_whole(result)


def print_batch(result: "Batch", out: Path, json: bool, quiet: bool, font: str | None = None) -> None:
    """The result on stdout: one JSON document, else the paths of the index and the manifest, which name the others."""
    from attnscope.output import note_fonts, print_document, say

    before = len(result.drawn) - result.n_fresh
    say([f"{before:,} of {amount(result.n_texts, 'text')} were drawn before"] if before else [], quiet)
    drawn = [name for one in result.drawn for name in one.files]
    say(note_fonts((text for one in result.drawn for text in (one.text, *one.tokens)), drawn, font), quiet)
    print_document(result.as_json, [out / "index.html", out / "manifest.jsonl"], json)


def fail_if_not_whole(result: "Batch") -> None:
    """Ends with exit status 1 where texts failed, 130 where it was interrupted; all the rest is drawn by then."""
    for failure in result.failed:
        print("failed: " + one_line(str(failure)), file=sys.stderr)
    if not result.complete:
        done = len(result.drawn)
        print(
            f"note: {done:,} of {amount(result.n_texts, 'text')} are drawn; the same command goes on", file=sys.stderr
        )
        raise KeyboardInterrupt
    if result.failed:
        raise AttnscopeError(
            f"{amount(len(result.failed), 'text')} could not be read or drawn",
            "all others are drawn" if result.drawn else "",
        )
