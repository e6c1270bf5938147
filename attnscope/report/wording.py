"""Name models, texts, measures and heads for every view, and say what is wrong with a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnscope.errors import amount
from attnscope.results.result import is_interrupted

if TYPE_CHECKING:
    from attnscope.questions.heatmap import Heatmap


PICTURES = "pictures"
RECORDINGS = "recordings"
NEEDLES = "needles"
"""What `corpus["of"]` says of texts that are pictures, whose tokens are patches or words about them; recordings; or
needles in haystacks."""

GIVEN = "texts"
"""What the source of texts is called that were given as they are, from no file."""

_TEXTS = (("text",), ("token",))
_COUNTED = {
    PICTURES: (("picture",), ("patch", "patches")),
    RECORDINGS: (("recording",), ("token",)),
    NEEDLES: (("needle",), ("token",)),
    "pairs": (("pair",), ("token",)),
}


def printable(text: object, most: int = 200) -> str:
    """Return a text from a record on one line, without control characters, of at most `most` characters."""
    line = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(str(text).split()))
    return line if len(line) <= most else line[: most - 1] + "…"


def label(name: str) -> str:
    """Return a role's name as people read it."""
    return printable(name.replace("_", " "))


def model_of(run: Mapping[str, Any]) -> str:
    """Return the model's name."""
    return printable(run.get("model", "model"))


def run_notes(run: Mapping[str, Any]) -> list[str]:
    """Return what a run says of itself, each note on one line."""
    return [" ".join(str(note).split()) for note in run.get("notes", ())]


def of_senses(record: Any) -> bool:
    """Return whether it was made on pictures or recordings: heads then have measures, and no roles."""
    return record.corpus.get("of") in (PICTURES, RECORDINGS)


def corpus_line(record: Any, *, predictions: bool = False) -> str:
    """Return a line such as "812 texts, 41,234 tokens: alice.txt", with the number of predictions on request."""
    corpus = record.corpus
    # Nouns for what was counted: texts, pictures or recordings.
    nouns = dict(zip(("n_texts", "n_tokens"), _COUNTED.get(str(corpus.get("of")), _TEXTS), strict=True))
    if corpus.get("split") == "paragraph" and not corpus.get("of"):
        nouns["n_texts"] = ("paragraph",)
    if predictions and corpus.get("n_predictions"):
        nouns["n_predictions"] = ("prediction",)
    counts = [amount(corpus[name], *words) for name, words in nouns.items() if isinstance(corpus.get(name), int)]
    # Up to three sources; texts of the command line have no name.
    listed = corpus.get("sources")
    sources = [source for source in listed if source != GIVEN] if isinstance(listed, list | tuple) else []
    names = [printable(source, 60) for source in sources[:3]]
    names += [f"and {len(sources) - 3} more"] if len(sources) > 3 else []
    return ": ".join(part for part in (", ".join(counts), ", ".join(names)) if part)


def corpus_notes(findings: Any) -> list[str]:
    """Return what is amiss with the texts: one sentence each."""
    corpus = findings.corpus
    # What ended early, then what was left out, then what went wrong.
    of = corpus.get("of") if corpus.get("of") in _COUNTED else None
    notes = []
    if is_interrupted(corpus):
        notes.append(f"it was stopped early: these are the {of or 'texts'} up to there")
    if n := corpus.get("n_copies"):
        notes.append(
            f"{amount(n, 'text is', 'texts are')} left out: copies of a text count once, "
            "and texts of one template twice"
        )
    problems = corpus.get("problems")
    if isinstance(problems, list | tuple) and problems:
        notes.append(_problems_line(problems, of or "parts of the texts"))
    return [note for note in notes if note]


def _problems_line(problems: Sequence[Any], what: str) -> str:
    """Return what could not be read or studied: a source, a line of it, or all from there on."""
    first = problems[0] if isinstance(problems[0], Mapping) else {}
    where = printable(first.get("source", "")) + ("" if first.get("line") is None else f", line {first['line']}")
    reason = f"{where}: {printable(first.get('reason', ''))}"
    return f"left out: {reason}" if len(problems) == 1 else f"left out: {len(problems)} {what}; first {reason}"


def hidden_tokens(kind: str) -> str:
    """Return what `--hide-special` leaves out of a kind of attention; see `Tokens.sinks`."""
    return "special tokens and the first token" if kind == "decoder" else "special tokens"


def change_notes(record: Heatmap, kind: str) -> list[str]:
    """Return a note for each change of a record, as the maps of one kind of attention show it."""
    notes = {
        "hide_special": f"{hidden_tokens(kind)} are hidden; each row is divided by what is left of it "
        "(a row with less than 1% left is empty)",
        "without_sinks": f"{hidden_tokens(kind)} get nothing: each row is divided by what other keys get "
        "(a row with less than 1% left is empty)",
        "words": "word pieces are merged: weights summed over keys, averaged over queries",
    }
    return [notes.get(change, f"the maps are the {change}") for change in record.changes]
