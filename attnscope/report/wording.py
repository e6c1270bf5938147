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

GIVEN = "texts"
"""The source of texts that came from no file."""

# How texts and tokens are called, by `corpus["of"]`: as `amount` takes nouns, with a plural if it is not regular.
_TEXT_NOUNS = (("text",), ("token",))
_NOUNS = {
    PICTURES: (("picture",), ("patch", "patches")),
    RECORDINGS: (("recording",), ("token",)),
    NEEDLES: (("needle",), ("token",)),
    "pairs": (("pair",), ("token",)),
}
_MOST_SOURCES = 3


def printable(text: object, most: int = 200) -> str:
    """Return a text from a record on one line, without control characters, of at most `most` characters."""
    words = " ".join(str(text).split())
    line = "".join(character if character.isprintable() else "\ufffd" for character in words)
    return line if len(line) <= most else line[: most - 1] + "…"


def label(name: str) -> str:
    """Return the name of a role or a measure as people read it: previous token, not previous_token."""
    return printable(name.replace("_", " "))


def list_some(names: Sequence[str], most: int) -> str:
    """Return names with commas between; of more than `most` the last ones are counted: "L0H1, L2H3 and 5 more"."""
    listed = ", ".join(names[:most])
    return f"{listed} and {len(names) - most} more" if len(names) > most else listed


def model_of(run: Mapping[str, Any]) -> str:
    """Return the model's name."""
    return printable(run.get("model", "model"))


def report_on(
    result: Any, answer: Iterable[str], blocks: Iterable[Block], guide: Iterable[str] = (), **more: Any
) -> Report:
    """Return the report of a result, with its model, its texts and what is amiss with them unless `more` says others.

    `more` are further fields of the report.
    """
    known = {
        "model": model_of(result.run),
        "source": corpus_line(result),
        "problems": corpus_notes(result),
    }
    return Report(answer=[*answer], blocks=[*blocks], guide=[*guide], **known | more)


def run_notes(run: Mapping[str, Any]) -> list[str]:
    """Return the notes of a run, such as that a model was cut, each on one line."""
    return [" ".join(str(note).split()) for note in run.get("notes", ())]


def is_of_senses(record: Any) -> bool:
    """Return whether a record was made on pictures or recordings: its heads have measures, and no roles."""
    return record.corpus.get("of") in (PICTURES, RECORDINGS)


def corpus_line(record: Any, *, predictions: bool = False) -> str:
    """Return a line such as "812 texts, 41,234 tokens: alice.txt", with the number of predictions on request."""
    corpus = record.corpus
    # What was counted: texts, pictures or recordings, and their tokens.
    text_noun, token_noun = _NOUNS.get(str(corpus.get("of")), _TEXT_NOUNS)
    if corpus.get("split") == "paragraph" and not corpus.get("of"):
        text_noun = ("paragraph",)
    nouns = {"n_texts": text_noun, "n_tokens": token_noun}
    if predictions and corpus.get("n_predictions"):
        nouns["n_predictions"] = ("prediction",)
    counts = [
        amount(corpus[name], *noun) for name, noun in nouns.items() if isinstance(corpus.get(name), int)
    ]
    # Where the texts came from; those of the command line have no name.
    sources = corpus.get("sources")
    if not isinstance(sources, list | tuple):
        sources = ()
    files = [source for source in sources if source != GIVEN]
    names = [printable(file, 60) for file in files[:_MOST_SOURCES]]
    if len(files) > _MOST_SOURCES:
        names.append(f"and {len(files) - _MOST_SOURCES} more")
    return ": ".join(part for part in (", ".join(counts), ", ".join(names)) if part)


def corpus_notes(findings: Any) -> list[str]:
    """Return a sentence on each thing that is amiss with the texts: a run that was stopped, copies, unknown words."""
    corpus = findings.corpus
    plural = corpus.get("of") if corpus.get("of") in _NOUNS else None
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
    problems = corpus.get("problems")
    if isinstance(problems, list | tuple) and problems:
        notes.append(_problems_line(problems, plural or "parts of the texts"))
    return notes


def _problems_line(problems: Sequence[Any], plural: str) -> str:
    """Return how many texts could not be read or studied, and why the first could not."""
    # A record from a file may hold anything in place of a problem.
    first = problems[0] if isinstance(problems[0], Mapping) else {}
    where = printable(first.get("source", ""))
    if first.get("line") is not None:
        where += f", line {first['line']}"
    reason = f"{where}: {printable(first.get('reason', ''))}"
    return (
        f"left out: {reason}"
        if len(problems) == 1
        else f"left out: {len(problems)} {plural}; first {reason}"
    )


def hidden_tokens(kind: str) -> str:
    """Return the words for the tokens that `--hide-special` leaves out of encoder, decoder or cross attention."""
    return "special tokens and the first token" if kind == "decoder" else "special tokens"


def change_notes(record: Heatmap, kind: str) -> list[str]:
    """Return a note for each way in which the maps of a record differ from the model's weights.

    Args:
        record: The record; `changes` names the ways.
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
