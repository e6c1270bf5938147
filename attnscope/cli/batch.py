"""`attnscope batch`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from attnscope.choice import Between, Choice, Tokens
from attnscope.cli.progress import progress
from attnscope.cli.shared import Chosen, MapDrawing, Printing
from attnscope.errors import AttnscopeError, amount, one_line
from attnscope.options import option, options, read_names
from attnscope.studies.inputs.options import SharedWork, TextFiles

if TYPE_CHECKING:
    from attnscope.questions.batch import Batch


@options
class BatchWanted(TextFiles):
    """Which texts are drawn, how they are read, and where figures go."""

    files: tuple[str, ...] = option(
        "Files or patterns: txt, jsonl, csv, also gzipped; `-` draws lines of stdin as they come.",
        default=(), argument=True, needed=True,
    )  # fmt: skip
    out: Path = option(
        "The folder to write to, or to go on in.", "-o", "--out", default=Path(), needed=True, panel="Output"
    )
    chat: bool = option("Put each text into the model's chat template.", default=False, rare=True)
    generate: int = option("Let a decoder write this many tokens, and show them too.", default=0, least=0, most=10000)
    formats: str = option(
        "What to write: several of png, svg, pdf, npz, json.", "-f", "--format", default="png", panel="Output"
    )
    replace: bool = option(
        "Draw again what is done, and replace the results of another model or text in the folder.",
        default=False, panel="Output",
    )  # fmt: skip


def batch(
    *,
    wanted: BatchWanted,
    which: Choice,
    tokens: Tokens,
    between: Between,
    model: Chosen,
    running: SharedWork,
    drawing: MapDrawing,
    printing: Printing,
) -> None:
    """Draw every text of a file as `heatmap` draws one, with an index.html of all.

    If a run stops, the same command continues it, and draws nothing twice.

    - `attnscope batch sample_texts/sentences.txt -o figures`
    - `attnscope batch 'corpus/*.jsonl.gz' -o figures -L 3-5 --format svg --workers 2`
    """
    from attnscope.drawing.style import Style
    from attnscope.results.kinds import KINDS
    from attnscope.studies.batch.study import batch as draw
    from attnscope.studies.batch.worker import BatchOptions

    formats = read_names(wanted.formats, KINDS["heatmap"].formats, "format")
    how = BatchOptions(
        layers=which.layers,
        heads=which.heads,
        pick=which.pick,
        formats=formats,
        style=Style(**{"scale": "fixed", **drawing.changes()}),
        query=tokens.query,
        words=tokens.words,
        hide_special=tokens.hide_special,
        without_sinks=tokens.without_sinks,
        mean=tokens.mean,
        between=between,
        chat=wanted.chat,
        generate=wanted.generate,
        workers=running.workers,
        threads=1 if running.threads is None else running.threads,
        loading=model.loading,
        executor=running.executor,  # type: ignore[arg-type]  # Workers refuse others
        ray_address=running.ray_address,
        replace=wanted.replace,
    )
    with progress(printing.quiet) as report:
        result = draw(model.model, wanted.corpus(), wanted.out, how, report)
    print_batch(result, wanted.out, printing.json, printing.quiet, drawing.font)
    fail_if_not_whole(result)


def print_batch(result: Batch, out: Path, json: bool, quiet: bool, font: str | None = None) -> None:
    """The result on stdout: one JSON document, else the paths of the index and the manifest, which name the others."""
    from attnscope.output import note_fonts, print_document, say

    before = len(result.drawn) - result.n_fresh
    say([f"{before:,} of {amount(result.n_texts, 'text')} were drawn before"] if before else [], quiet)
    drawn = [name for one in result.drawn for name in one.files]
    say(note_fonts((text for one in result.drawn for text in (one.text, *one.tokens)), drawn, font), quiet)
    print_document(result.as_json, [out / "index.html", out / "manifest.jsonl"], json)


def fail_if_not_whole(result: Batch) -> None:
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
