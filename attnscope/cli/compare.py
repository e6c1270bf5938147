"""`attnscope compare`."""

import shlex
import sys

from attnscope.cli.progress import progress
from attnscope.cli.shared import Chosen, Drawing, Files
from attnscope.errors import UsageError
from attnscope.options import option, options
from attnscope.studies.compare.options import CompareOrder
from attnscope.studies.inputs.options import SharedWork, TextsWanted


@options
class OneTextWanted(TextsWanted):
    """One text or a corpus; words after the text lead to an error that explains what to do."""

    more: tuple[str, ...] = option("", default=(), argument=True, rare=True)


def compare(
    *, texts: OneTextWanted, order: CompareOrder, model: Chosen, running: SharedWork, drawing: Drawing, files: Files
) -> None:
    """Compare heads with each other, on two texts, or between two models.

    - `attnscope compare --file sample_texts/alice.txt --split paragraph -o out`
    - `attnscope compare "The cat sat on the mat because it was tired." --pick L3H1,L5H11 -o out`
    - `attnscope compare "It was too tired." --with "It was too wide." --query it`
    - `attnscope compare --file texts.txt -m checkpoint-1 --with-model checkpoint-2`
    """
    more = texts.more
    if more:
        raise UsageError(
            "one TEXT is compared, with a second one by --with" if len(more) == 1 else "several texts come from a file",
            _minimal_pair(texts.text or "", more[0]) if len(more) == 1 else "attnscope compare --file texts.txt",
        )
    from attnscope.studies.compare.study import study

    output = files.plan("compare", **drawing.changes())
    shared = running.share(model.model, model.loading)
    with progress(files.quiet) as report:
        record = study(model.model, texts, order, model.loading, report, shared)
    output.deliver(record)


def _minimal_pair(text: str, other: str) -> str:
    """Return the command that was meant by one with two texts: the same, with --with before the second one."""
    words = sys.argv[1:]
    places = [at for at, word in enumerate(words) if word == other]
    if words[:1] != ["compare"] or not places or text not in words:
        words, places = ["compare", text, other], [2]
    at = places[-1]
    return shlex.join(["attnscope", *words[:at], "--with", *words[at:]])
