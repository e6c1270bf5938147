"""Read pairs of texts with right and wrong answers, from JSONL files or from Python. Tokenising is left to studies."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attnscope.corpus.formats import Problem, is_id, json_object, name_problems
from attnscope.corpus.texts import Corpus
from attnscope.errors import AttnscopeError

Answers = tuple[str | int, ...]
"""Words, token ids, or numbers of classes."""


@dataclass(frozen=True)
class Pair:
    """Hold two texts that differ in the words that decide between a right and a wrong answer.

    Attributes:
        source: The file that holds the pair; "pairs" for a mapping.
        line: The line of the file, or the number among the mappings, from 1.
        clean: The text after which the right answers are right.
        corrupt: The text after which they are wrong.
        right: The answers that are right after the clean text; () = none.
        wrong: The answers that are wrong after the clean text; () = none.
    """

    source: str
    line: int
    clean: str
    corrupt: str
    right: Answers
    wrong: Answers


class Pairs:
    """Read pairs with right and wrong answers: `{"clean": …, "corrupt": …, "right": …, "wrong": …}`, one per line.

    An answer is a string, a token id, or a list of these. Pairs need no answers for a study that is given one class for
    all. Malformed pairs, and pairs with the texts of an earlier one, are left out and listed in `problems`.

    Args:
        pairs: Names of JSONL files, also gzipped, or patterns of names, "-" for stdin; or mappings with these fields.

    Attributes:
        sources: The files that were read; `("pairs",)` for mappings.
        problems: What could not be read or was left out, in order.
        sha256: The SHA-256 of the pairs, in hex.

    Raises:
        AttnscopeError: There is no pair.
    """

    def __init__(self, pairs: str | Path | Sequence[str | Path | Mapping[str, Any]]) -> None:
        if isinstance(pairs, str | Path):
            pairs = [pairs]
        self.problems: list[Problem] = []
        # The source, the line and the fields of each pair; a str in place of fields says what is wrong with the line.
        entries: Iterator[tuple[str, int, Any]]
        if any(isinstance(pair, Mapping) for pair in pairs):
            self.sources: tuple[str, ...] = ("pairs",)
            entries = (("pairs", number, pair) for number, pair in enumerate(pairs, 1))
        else:
            corpus = Corpus(list(map(str, pairs)), format="txt", max_characters=None)
            self.sources = corpus.sources
            entries = ((text.source, text.line, json_object(text.text or "")) for text in corpus)
        # Of pairs with the same two texts the first counts.
        self._pairs: list[Pair] = []
        line_of_texts: dict[tuple[str, str], int] = {}
        for source, line, entry in entries:
            try:
                pair = _pair_from(source, line, entry)
                texts = pair.clean, pair.corrupt
                if texts in line_of_texts:
                    raise ValueError(
                        f"it has the texts of pair {line_of_texts[texts]}, which counts once"
                    )
            except ValueError as error:
                self.problems.append(Problem(source, line, str(error)))
                continue
            line_of_texts[texts] = line
            self._pairs.append(pair)
        if not self._pairs:
            raise AttnscopeError(
                f"there is no pair{name_problems(self.problems)}",
                'a pair is {"clean", "corrupt", "right", "wrong"}',
            )
        # Hash the pairs as JSON, with the names of their files and their lines.
        content = json.dumps(list(map(asdict, self._pairs)))
        self.sha256 = hashlib.sha256(content.encode()).hexdigest()

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)


def _pair_from(source: str, line: int, entry: Any) -> Pair:
    """Return the pair of some fields.

    Raises:
        ValueError: The fields make no pair, or `entry` is a str that says what is wrong.
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
    right = _answers(entry, "right")
    wrong = _answers(entry, "wrong")
    return Pair(source, line, entry["clean"], entry["corrupt"], right, wrong)


def _answers(entry: Mapping[str, Any], name: str) -> Answers:
    """Return the answers in a field, one or a list; () if there is no such field."""
    if name not in entry:
        return ()
    value = entry[name]
    answers = tuple(value) if isinstance(value, list | tuple) else (value,)
    # An answer is a token id, or a str that is not empty.
    malformed = [
        answer
        for answer in answers
        if not is_id(answer) and (answer == "" or not isinstance(answer, str))
    ]
    if malformed or not answers:
        raise ValueError(
            f'"{name}" is {json.dumps(value, default=str)[:60]}: give words or numbers of tokens'
        )
    return answers
