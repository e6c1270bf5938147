"""Run `attnscope batch`: `studies.batch` draws all texts of files, and this module says what was drawn."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from attnscope.cli.progress import progress
from attnscope.cli.shared import MapDrawingOptions, ModelOptions, PrintingOptions
from attnscope.errors import AttnscopeError, amount, one_line
from attnscope.options import option, options
from attnscope.studies.batch.options import BatchOptions
from attnscope.studies.inputs.options import TextFileOptions

if TYPE_CHECKING:
    from attnscope.questions.batch import BatchRun


@options
class BatchTexts(TextFileOptions):
    """Hold the options for the texts to draw, and for the folder of their figures."""

    files: tuple[str, ...] = option(
        "Files or patterns: txt, jsonl, csv, also gzipped; `-` draws lines of stdin as they come.",
        default=(),
        argument=True,
        is_required=True,
    )
    out: Path = option(
        "The folder to write to, or to go on in.",
        "-o",
        "--out",
        default=Path(),
        is_required=True,
        panel="Output",
    )


def batch(
    *,
    texts: BatchTexts,
    order: BatchOptions,
    model: ModelOptions,
    drawing: MapDrawingOptions,
    printing: PrintingOptions,
) -> None:
    """Draw every text of a file as `heatmap` draws one, with an index.html of all.

    If a run stops, the same command continues it, and draws nothing twice.

    - `attnscope batch sample_texts/sentences.txt -o figures`
    - `attnscope batch 'corpus/*.jsonl.gz' -o figures -L 3-5 --format svg --workers 2`
    """
    from attnscope.output import note_glyphs, print_document, print_notes
    from attnscope.studies.batch.study import INDEX, MANIFEST
    from attnscope.studies.batch.study import batch as draw

    # Draw the texts that no earlier run has drawn.
    style = replace(order.style, **drawing.changes())
    order = replace(order, loading=model.loading, style=style)
    with progress(printing.quiet) as report:
        result = draw(model.model, texts.corpus(), texts.out, order, report)
    # Say how many texts were there from earlier runs.
    n_before = len(result.drawn) - result.n_fresh
    if n_before:
        print_notes(
            [f"{n_before:,} of {amount(result.n_texts, 'text')} were drawn before"], printing.quiet
        )
    # Say which characters of the labels no font has.
    labels: list[str] = []
    file_names: list[str] = []
    for text in result.drawn:
        labels += (text.text, *text.tokens)
        file_names += text.files
    print_notes(note_glyphs(labels, file_names, drawing.font), printing.quiet)
    answer = "" if printing.quiet else _answer(result, order, texts.out)
    print_document(result.as_json, [texts.out / INDEX, texts.out / MANIFEST], printing.json, answer)
    _fail_unless_complete(result)


def _answer(result: BatchRun, order: BatchOptions, folder: Path) -> str:
    """Return the line that says how many texts were drawn, which heads of them, and where; "" = no text was drawn."""
    if not result.drawn:
        return ""
    choice = order.choice
    heads = "the chosen heads" if choice.pick or choice.heads else "all heads"
    if choice.layers:
        plural = "" if len(choice.layers) == 1 else "s"
        heads += f" of layer{plural} {', '.join(map(str, choice.layers))}"
    formats = ", ".join(order.formats)
    texts = amount(len(result.drawn), "text")
    return f"{texts} in {folder}/: maps of {heads} as {formats}, a folder for each text"


def _fail_unless_complete(result: BatchRun) -> None:
    """Print which texts failed; raise an error if some did, or if the run was interrupted.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the run early: the command ends with the exit status of an interruption.
        AttnscopeError: Some texts failed.
    """
    for failure in result.failed:
        print("failed: " + one_line(str(failure)), file=sys.stderr)
    n_drawn = len(result.drawn)
    if not result.complete:
        print(f"note: {amount(n_drawn, 'text')} drawn; the same command goes on", file=sys.stderr)
        raise KeyboardInterrupt
    if result.failed:
        failed = amount(len(result.failed), "text")
        raise AttnscopeError(
            f"{failed} could not be read or drawn", "all others are drawn" if n_drawn else ""
        )
