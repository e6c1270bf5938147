"""Name models, texts and measures for the terminal, figures and pages, and report problems of the texts of a record.

The corpus of a record is a dict of plain values that describes its texts. All values from files may hold control
characters: `printable` makes them safe to show.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnscope.errors import amount
from attnscope.report.blocks import Block, Report
from attnscope.results.result import is_interrupted

if TYPE_CHECKING:
    from attnscope.questions.heatmap import Heatmap
    from attnscope.results.table import Column


PICTURES = "pictures"
RECORDINGS = "recordings"
NEEDLES = "needles"
"""The type of the inputs, `corpus["of"]`: pictures (the tokens are patches), recordings, or needles in haystacks. A
corpus of plain texts has no "of"."""

_NO_FILE_SOURCE = "texts"
"""The entry of `corpus["sources"]` for texts that came from no file."""

_NOUNS_BY_TYPE = {PICTURES: "picture", RECORDINGS: "recording", NEEDLES: "needle", "pairs": "pair"}
"""The singular noun for an input, by `corpus["of"]`."""

_MAX_NAMED_FILES = 3
"""The most files that a line names."""


def printable(text: object, most: int = 200) -> str:
    """Return a text from a record on one line, without control characters, of at most `most` characters."""
    words = " ".join(str(text).split())
    line = "".join(character if character.isprintable() else "\ufffd" for character in words)
    return line if len(line) <= most else line[: most - 1] + "…"


def label(name: str) -> str:
    """Return the name of a role or a measure for people: previous token, not previous_token."""
    return printable(name.replace("_", " "))


def list_some(names: Sequence[str], most: int) -> str:
    """Return the first `most` names with commas, and the number of the others: "L0H1, L2H3 and 5 more"."""
    listed = ", ".join(names[:most])
    return f"{listed} and {len(names) - most} more" if len(names) > most else listed


def model_of(run: Mapping[str, Any]) -> str:
    """Return the name of the model of a run."""
    return printable(run.get("model", "model"))


def report_on(
    result: Any, answer: Iterable[str], blocks: Iterable[Block], guide: Iterable[str] = (), **fields: Any
) -> Report:
    """Return the report of a result. Its model, source and problems are those of the result.

    `fields` are further fields of `Report`. They may also replace the model, the source or the problems.
    """
    default_fields = {
        "model": model_of(result.run),
        "source": corpus_line(result),
        "problems": corpus_notes(result),
    }
    return Report(answer=[*answer], blocks=[*blocks], guide=[*guide], **default_fields | fields)


def run_notes(run: Mapping[str, Any]) -> list[str]:
    """Return the notes of a run, each on one line, such as a note that layers of the model were left out."""
    return [" ".join(str(note).split()) for note in run.get("notes", ())]


def is_of_pictures_or_sound(record: Any) -> bool:
    """Return whether a record was made on pictures or recordings; its heads then have measures, and no roles."""
    return record.corpus.get("of") in (PICTURES, RECORDINGS)


def corpus_line(record: Any) -> str:
    """Return a line such as "812 texts, 41,234 tokens: alice.txt", with the number of predictions if it is recorded."""
    corpus = record.corpus
    kind = corpus.get("of")
    plain_noun = "paragraph" if corpus.get("split") == "paragraph" else "text"
    counts = []
    if corpus.get("n_texts") is not None:
        counts.append(amount(corpus["n_texts"], _NOUNS_BY_TYPE.get(str(kind), plain_noun)))
    if corpus.get("n_tokens") is not None:
        # `amount` takes a singular, and a plural only if it is irregular.
        token_nouns = ("patch", "patches") if kind == PICTURES else ("token",)
        counts.append(amount(corpus["n_tokens"], *token_nouns))
    if corpus.get("n_predictions"):
        counts.append(amount(corpus["n_predictions"], "prediction"))
    files = [source for source in corpus.get("sources", ()) if source != _NO_FILE_SOURCE]
    names = [printable(file, 60) for file in files[:_MAX_NAMED_FILES]]
    if len(files) > _MAX_NAMED_FILES:
        names.append(f"and {len(files) - _MAX_NAMED_FILES} more")
    # Some records have no counts, and some no files.
    return ": ".join(filter(None, [", ".join(counts), ", ".join(names)]))


def corpus_notes(result: Any) -> list[str]:
    """Return a sentence on each problem of the texts: an interrupted run, copies, unknown words, unreadable texts."""
    corpus = result.corpus
    # The plural nouns for the texts and for the texts that could not be read.
    texts_noun = "texts"
    unread_noun = "parts of the texts"
    if corpus.get("of") in _NOUNS_BY_TYPE:
        texts_noun = corpus["of"]
        unread_noun = texts_noun
    notes = []
    if is_interrupted(corpus):
        notes.append(f"it was stopped early: these are the {texts_noun} up to there")
    if n_copies := corpus.get("n_copies"):
        notes.append(
            f"{amount(n_copies, 'text is', 'texts are')} left out: copies of a text count once, "
            "and texts of one template twice"
        )
    if unknown_words := corpus.get("unknown_words"):
        notes.append(printable(unknown_words))
    if problems := corpus.get("problems"):
        notes.append(_problems_line(problems, unread_noun))
    return notes


def _problems_line(problems: Sequence[Any], noun: str) -> str:
    """Return a line on texts that could not be read or studied: their number, and the reason of the first one."""
    first_problem = problems[0]
    location = printable(first_problem.get("source", ""))
    if first_problem.get("line") is not None:
        location += f", line {first_problem['line']}"
    reason = f"{location}: {printable(first_problem.get('reason', ''))}"
    if len(problems) > 1:
        return f"left out: {len(problems)} {noun}; first {reason}"
    return f"left out: {reason}"


def hidden_tokens(kind: str) -> str:
    """Return the name of the tokens that `--hide-special` hides in encoder, decoder or cross attention.

    In a decoder it also hides the first token, as that is a sink: many heads attend to it without using it.
    """
    return "special tokens and the first token" if kind == "decoder" else "special tokens"


def change_notes(record: Heatmap, kind: str) -> list[str]:
    """Return a note on each change that the user made to the maps of a record, such as hidden tokens.

    Args:
        record: The record. Its `changes` are the names of the changes, in the order in which they were made.
        kind: The kind of attention of the maps: encoder, decoder or cross.
    """
    notes = {
        "hide_special": f"{hidden_tokens(kind)} are hidden; each row is divided by what is left of it "
        "(a row with less than 1% left is empty)",
        "without_sinks": f"{hidden_tokens(kind)} get nothing: each row is divided by what other keys get "
        "(a row with less than 1% left is empty)",
        "words": "word pieces are merged: weights summed over keys, averaged over queries",
    }
    return [notes.get(change, f"the maps are the {change}") for change in record.changes]


def title_of(column: Column) -> str:
    """Return the title of a column, with its unit in brackets unless it is a share or the title names the unit."""
    unit = printable(column.unit, 40)
    title = printable(column.title, 60)
    if unit in ("", "share") or unit in column.title:
        return title
    return f"{title} ({unit})"
