"""Run `attnscope batch`: `studies.batch` draws all texts of files, and this module prints what was drawn."""

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
    text_options: BatchTexts,
    batch_options: BatchOptions,
    model_options: ModelOptions,
    drawing_options: MapDrawingOptions,
    printing_options: PrintingOptions,
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
    style = replace(batch_options.style, **drawing_options.non_default_options())
    batch_options = replace(batch_options, loading=model_options.loading, style=style)
    with progress(printing_options.quiet) as report_progress:
        result = draw(
            model_options.model, text_options.corpus(), text_options.out, batch_options, report_progress
        )
    # Say how many texts were there from earlier runs.
    n_before = len(result.drawn) - result.n_fresh
    if n_before:
        print_notes(
            [f"{n_before:,} of {amount(result.n_texts, 'text')} were drawn before"],
            printing_options.quiet,
        )
    # Say which characters of the labels no font has. Labels are a text (the title) and its tokens.
    labels: list[str] = []
    file_names: list[str] = []
    for text in result.drawn:
        labels += (text.text, *text.tokens)
        file_names += text.files
    print_notes(note_glyphs(labels, file_names, drawing_options.font), printing_options.quiet)
    answer = "" if printing_options.quiet else _format_answer(result, batch_options, text_options.out)
    print_document(
        result.as_json,
        [text_options.out / INDEX, text_options.out / MANIFEST],
        printing_options.json,
        answer,
    )
    _fail_unless_complete(result)


def _format_answer(result: BatchRun, batch_options: BatchOptions, folder: Path) -> str:
    """Return the line that says how many texts were drawn, which heads of them, and where; "" = no text was drawn."""
    if not result.drawn:
        return ""
    choice = batch_options.choice
    heads_phrase = "the chosen heads" if choice.pick or choice.heads else "all heads"
    if choice.layers:
        plural = "" if len(choice.layers) == 1 else "s"
        heads_phrase += f" of layer{plural} {', '.join(map(str, choice.layers))}"
    formats = ", ".join(batch_options.formats)
    # A count with its noun, such as "3 texts"
    texts_phrase = amount(len(result.drawn), "text")
    return f"{texts_phrase} in {folder}/: maps of {heads_phrase} as {formats}, a folder for each text"


def _fail_unless_complete(result: BatchRun) -> None:
    """Print which texts failed, and raise an error if a text failed or the run was interrupted.

    Raises:
        KeyboardInterrupt: Ctrl-C ended the run early. `cli.main` turns this into the exit status of an interruption.
        AttnscopeError: Some texts failed.
    """
    for failure in result.failed:
        print("failed: " + one_line(str(failure)), file=sys.stderr)
    n_drawn = len(result.drawn)
    if not result.complete:
        print(f"note: {amount(n_drawn, 'text')} drawn; the same command goes on", file=sys.stderr)
        raise KeyboardInterrupt
    if result.failed:
        raise AttnscopeError(
            f"{amount(len(result.failed), 'text')} could not be read or drawn",
            "all others are drawn" if n_drawn else "",
        )
