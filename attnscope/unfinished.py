"""Settle studies that were interrupted or failed in part: where to write them, and how the command ends."""

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from attnscope.errors import AttnscopeError, amount, one_line
from attnscope.host import delay_interrupts
from attnscope.results.kinds import FIGURE_FORMATS
from attnscope.results.result import failure_line, is_interrupted
from attnscope.results.storage import replace_together

INTERRUPTED = "interrupted"
"""Where in the named folder an interrupted study goes that would replace a record."""


def settle(record: Any, out: Path | None, stem: str) -> tuple[Any, Path | None]:
    """Decide where a study is written: into its folder, unless it was interrupted and there is a record.

    Args:
        record: The record of the study.
        out: The folder that was named; None = nothing is to be written.
        stem: The name of the record's files, without ending.

    Returns:
        The record, with a note if it goes elsewhere, and the folder; None = nothing is to be written.

    Raises:
        KeyboardInterrupt: It was interrupted before anything was done.
    """
    corpus: Mapping[str, Any] = getattr(record, "corpus", {})  # records of one text have none
    if not is_interrupted(corpus):
        return record, out
    if not corpus.get("n_texts"):
        raise KeyboardInterrupt
    if out is None:
        return record, out
    # Part of a study replaces no record: it goes into a folder beside it.
    has_record = any((out / f"{stem}.{ending}").exists() for ending in ("npz", "json", "csv"))
    if not has_record:
        return record, out
    note = f"Interrupted, and {out} holds a record, which stays: see its folder {INTERRUPTED}."
    notes = [*record.run.get("notes", ()), note]
    return replace(record, run={**record.run, "notes": notes}), out / INTERRUPTED


def keep_data(staged: Path, out: Path) -> None:
    """Keep the data where not all figures were drawn: in `out`, or in a folder of it if it has other files.

    `staged` is the temporary folder in `out` that holds what was written until then.
    """
    names = [path.name for path in staged.iterdir() if path.suffix[1:] not in FIGURE_FORMATS]
    if not names:
        return
    has_other_files = any(path != staged for path in out.iterdir())
    target = out / INTERRUPTED if has_other_files else out
    with contextlib.suppress(AttnscopeError), delay_interrupts():
        with replace_together(target) as folder:
            for name in names:
                (staged / name).replace(folder / name)
        if target != out:
            message = f"not all figures were drawn, so none is kept: the data are in {target}"
            print(f"note: {one_line(message)}", file=sys.stderr)


def fail_if_not_whole(corpus: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """End with an error where something could not be read or failed, as Ctrl-C does where the study was interrupted.

    The result has been printed and written by then: nothing is lost.

    Raises:
        AttnscopeError: Something could not be read or studied, or a later step failed.
        KeyboardInterrupt: The study was interrupted.
    """
    # List all problems.
    failures: list[dict[str, str]] = list(run.get("failures", ()))
    problems: list[dict[str, Any]] = list(corpus.get("problems", ()))
    skipped: list[dict[str, Any]] = list(run.get("skipped", ()))  # checkpoints of a training
    plural = str(corpus.get("of") or "").partition(" ")[0]  # "pictures" or "recordings"; empty = texts
    for problem in (*skipped, *problems):
        where = f"{problem['source']}"
        if problem["line"] is not None:
            where += f", line {problem['line']}"
        print("skipped: " + one_line(f"{where}: {problem['reason']}"), file=sys.stderr)
    # An interruption.
    if is_interrupted(corpus):
        n_checkpoints = corpus.get("n_checkpoints")
        done = f"{corpus['n_texts']:,} {plural or 'texts'}"
        if isinstance(n_checkpoints, int):
            done = amount(n_checkpoints, "checkpoint")
        print(
            f"note: incomplete: this is what {done} {'says' if n_checkpoints == 1 else 'say'}",
            file=sys.stderr,
        )
        if not failures:
            raise KeyboardInterrupt
    # Errors, the gravest first.
    if failures:
        gravest = failures[0]
        hints = [gravest["hint"], "what was measured before is in the result"]
        raise AttnscopeError(failure_line(gravest), "; ".join(filter(None, hints)))
    if skipped:
        raise AttnscopeError(
            f"{amount(len(skipped), 'checkpoint')} could not be measured",
            "all the rest was, and is in the result",
        )
    if problems:
        singular = plural.removesuffix("s")
        if not plural:
            singular, plural = "part of the texts", "parts of the texts"
        is_lost = any("not studied" in problem["reason"] for problem in problems)
        failed = "read or studied" if is_lost else "read"
        skipped_parts = amount(len(problems), singular, plural)
        raise AttnscopeError(
            f"{skipped_parts} could not be {failed}", "all the rest was studied, and is in the result"
        )
