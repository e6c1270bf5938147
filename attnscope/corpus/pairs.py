"""Read pairs of texts with right and wrong answers, from JSONL files or from Python. Tokenising is left to studies."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attnscope.corpus.formats import Problem, describe_problems, is_token_id, parse_json_object
from attnscope.corpus.texts import Corpus
from attnscope.errors import AttnscopeError

Answers = tuple[str | int, ...]
"""Words, token ids, or indices of classes."""


@dataclass(frozen=True)
class Pair:
    """Hold two texts that differ in a few words, which decide between a right and a wrong answer.

    Attributes:
        source: The file of the pair; "pairs" for pairs that are given as mappings.
        line: The line of the file, or the position among the mappings, from 1.
        clean: The text after which the right answers are right.
        corrupt: The text after which they are wrong.
        right: The answers that are right after the clean text; () = not given.
        wrong: The answers that are wrong after the clean text; () = not given.
    """

    source: str
    line: int
    clean: str
    corrupt: str
    right: Answers
    wrong: Answers


class Pairs:
    """Read pairs with right and wrong answers: `{"clean": …, "corrupt": …, "right": …, "wrong": …}`, one per line.

    The value of "right" or "wrong" is a string, a token id, or a list of strings and ids. A study of a classifier needs
    no answers if one class is set for all pairs. Malformed pairs, and pairs with the same texts as an earlier pair, are
    left out and listed in `problems`.

    Args:
        pairs: Names of JSONL files, also gzipped, or patterns of names, "-" for stdin; or mappings with these fields.

    Attributes:
        sources: The files that were read; `("pairs",)` for mappings.
        problems: The lines that could not be read, and the pairs that were left out, in order.
        sha256: The SHA-256 of the pairs, in hex.

    Raises:
        AttnscopeError: No pair is left.
    """

    def __init__(self, pairs: str | Path | Sequence[str | Path | Mapping[str, Any]]) -> None:
        if isinstance(pairs, str | Path):
            pairs = [pairs]
        self.problems: list[Problem] = []
        # The source, the line and the fields of each pair. A str instead of fields is the reason why a line is
        # malformed.
        entries: Iterator[tuple[str, int, Any]]
        if any(isinstance(pair, Mapping) for pair in pairs):
            self.sources: tuple[str, ...] = ("pairs",)
            entries = (("pairs", number, pair) for number, pair in enumerate(pairs, 1))
        else:
            # Read each line as a text, however long it is.
            corpus = Corpus(list(map(str, pairs)), format="txt", max_characters=None)
            self.sources = corpus.sources
            entries = ((text.source, text.line, parse_json_object(text.text or "")) for text in corpus)
        # Keep only the first of several pairs with the same two texts.
        self._pairs: list[Pair] = []
        line_of_texts: dict[tuple[str, str], int] = {}
        for source, line, entry in entries:
            try:
                pair = _parse_pair(source, line, entry)
                text_pair = pair.clean, pair.corrupt
                if text_pair in line_of_texts:
                    raise ValueError(
                        f"it has the texts of pair {line_of_texts[text_pair]}, which counts once"
                    )
            except ValueError as error:
                self.problems.append(Problem(source, line, str(error)))
                continue
            line_of_texts[text_pair] = line
            self._pairs.append(pair)
        if not self._pairs:
            raise AttnscopeError(
                f"there is no pair{describe_problems(self.problems)}",
                'a pair is {"clean", "corrupt", "right", "wrong"}',
            )
        # The hash covers the pairs as JSON, with their files and lines.
        pairs_json = json.dumps(list(map(asdict, self._pairs)))
        self.sha256 = hashlib.sha256(pairs_json.encode()).hexdigest()

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)


def _parse_pair(source: str, line: int, entry: Any) -> Pair:
    """Build a pair from the fields of an entry.

    Raises:
        ValueError: The fields are no pair, or `entry` is a str with the reason why a line is malformed.
    """
    if not isinstance(entry, Mapping):
        raise ValueError(entry if isinstance(entry, str) else "it is no mapping")
    for name in ("clean", "corrupt"):
        if name not in entry:
            raise ValueError(f"it has no field {name!r}")
        if not isinstance(entry[name], str) or not entry[name].strip():
            raise ValueError(f'"{name}" is no text')
    if entry["clean"] == entry["corrupt"]:
        raise ValueError("clean and corrupt are the same text")
    right = _parse_answers(entry, "right")
    wrong = _parse_answers(entry, "wrong")
    return Pair(source, line, entry["clean"], entry["corrupt"], right, wrong)


def _parse_answers(entry: Mapping[str, Any], name: str) -> Answers:
    """Return the answers in a field, which has one answer or a list; () if the field is missing."""
    if name not in entry:
        return ()
    value = entry[name]
    answers = tuple(value) if isinstance(value, list | tuple) else (value,)
    # An answer is a token id, or a nonempty str.
    malformed = [
        answer
        for answer in answers
        if not is_token_id(answer) and (answer == "" or not isinstance(answer, str))
    ]
    if malformed or not answers:
        raise ValueError(
            f'"{name}" is {json.dumps(value, default=str)[:60]}: give words or numbers of tokens'
        )
    return answers
