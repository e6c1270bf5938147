"""Name models, texts, measures and heads for every view, and say what is wrong with a record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnscope.errors import amount
from attnscope.report.blocks import Block, Report
from attnscope.results.result import is_interrupted

if TYPE_CHECKING:
    from attnscope.questions.heatmap import Heatmap


PICTURES = "pictures"
RECORDINGS = "recordings"
NEEDLES = "needles"
"""The values of `corpus["of"]` where texts are pictures (tokens are patches, or words about them), recordings, or
needles in haystacks. Plain texts have none."""

_GIVEN = "texts"
"""The source of texts that came from no file."""

_TEXT_NOUNS = {PICTURES: "picture", RECORDINGS: "recording", NEEDLES: "needle", "pairs": "pair"}
"""Nouns for a text by `corpus["of"]`."""

_MOST_SOURCES = 3
"""Files that are named."""


def printable(text: object, most: int = 200) -> str:
    """Return a text from a record on one line, without control characters, of at most `most` characters."""
    words = " ".join(str(text).split())
    line = "".join(character if character.isprintable() else "\ufffd" for character in words)
    return line if len(line) <= most else line[: most - 1] + "…"


def label(name: str) -> str:
    """Return the name of a role or a measure for people: previous token, not previous_token."""
    return printable(name.replace("_", " "))


def list_some(names: Sequence[str], most: int) -> str:
    """Return at most so many names with commas, and the number of the others: "L0H1, L2H3 and 5 more"."""
    listed = ", ".join(names[:most])
    return f"{listed} and {len(names) - most} more" if len(names) > most else listed


def model_of(run: Mapping[str, Any]) -> str:
    """Return the name of the model of a run."""
    return printable(run.get("model", "model"))


def report_on(
    result: Any, answer: Iterable[str], blocks: Iterable[Block], guide: Iterable[str] = (), **more: Any
) -> Report:
    """Return the report of a result. Its model, source and problems are those of the result.

    `more` are further fields of `Report`, or other values for these three.
    """
    fields = {
        "model": model_of(result.run),
        "source": corpus_line(result),
        "problems": corpus_notes(result),
    }
    return Report(answer=[*answer], blocks=[*blocks], guide=[*guide], **fields | more)


def run_notes(run: Mapping[str, Any]) -> list[str]:
    """Return the notes of a run, such as that a model was cut, each on one line."""
    return [" ".join(str(note).split()) for note in run.get("notes", ())]


def is_of_senses(record: Any) -> bool:
    """Return whether a record was made on pictures or recordings: its heads have measures, and no roles."""
    return record.corpus.get("of") in (PICTURES, RECORDINGS)


def corpus_line(record: Any, *, predictions: bool = False) -> str:
    """Return a line such as "812 texts, 41,234 tokens: alice.txt", with the number of predictions on request."""
    corpus = record.corpus
    kind = corpus.get("of")
    noun = "text"
    if corpus.get("split") == "paragraph" and not kind:
        noun = "paragraph"
    counts = []
    if corpus.get("n_texts") is not None:
        counts.append(amount(corpus["n_texts"], _TEXT_NOUNS.get(str(kind), noun)))
    if corpus.get("n_tokens") is not None:
        # Nouns with an irregular plural have both forms.
        token = ("patch", "patches") if kind == PICTURES else ("token",)
        counts.append(amount(corpus["n_tokens"], *token))
    n_predictions = corpus.get("n_predictions")
    if predictions and n_predictions and isinstance(n_predictions, int):
        counts.append(amount(n_predictions, "prediction"))
    files = [source for source in corpus.get("sources", ()) if source != _GIVEN]
    names = [printable(file, 60) for file in files[:_MOST_SOURCES]]
    if len(files) > _MOST_SOURCES:
        names.append(f"and {len(files) - _MOST_SOURCES} more")
    return ": ".join(filter(None, [", ".join(counts), ", ".join(names)]))


def corpus_notes(result: Any) -> list[str]:
    """Return a sentence on each problem of the texts: a run that was stopped, copies, unknown words, failures."""
    corpus = result.corpus
    plural = corpus.get("of") if corpus.get("of") in _TEXT_NOUNS else None
    notes = []
    if is_interrupted(corpus):
        notes.append(f"it was stopped early: these are the {plural or 'texts'} up to there")
    if n_copies := corpus.get("n_copies"):
        notes.append(
            f"{amount(n_copies, 'text is', 'texts are')} left out: copies of a text count once, "
            "and texts of one template twice"
        )
    if unknown := corpus.get("unknown_words"):
        notes.append(printable(unknown))
    if problems := corpus.get("problems"):
        notes.append(_problems_line(problems, plural or "parts of the texts"))
    return notes


def _problems_line(problems: Sequence[Any], plural: str) -> str:
    """Return how many texts could not be read or studied, and why the first could not."""
    first = problems[0]
    where = printable(first.get("source", ""))
    if first.get("line") is not None:
        where += f", line {first['line']}"
    reason = f"{where}: {printable(first.get('reason', ''))}"
    if len(problems) > 1:
        return f"left out: {len(problems)} {plural}; first {reason}"
    return f"left out: {reason}"


def hidden_tokens(kind: str) -> str:
    """Return the words for the tokens that `--hide-special` leaves out of encoder, decoder or cross attention."""
    return "special tokens and the first token" if kind == "decoder" else "special tokens"


def change_notes(record: Heatmap, kind: str) -> list[str]:
    """Return a note for each way in which the maps of a record differ from the model's weights.

    Args:
        record: The record, whose `changes` names them.
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
