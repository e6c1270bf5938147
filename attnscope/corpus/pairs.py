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
FIELDS = ("clean", "corrupt", "right", "wrong")


@dataclass(frozen=True)
class Pair:
    """Hold two texts that differ in the words that decide between a right and a wrong answer.

    Attributes:
        source: The file that it comes from; "pairs" for a mapping.
        line: Its line there, from 1.
        clean: The text after which the right answer is right.
        corrupt: The text after which it is not.
        right: The answers that are right after the clean text: words, numbers of tokens, or classes; () = none.
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

    An answer is a string, the number of a token, or a list of these. If you ask a study for one class, pairs need none.
    `problems` lists malformed pairs, and pairs that were given before, which would count twice. The others are read.

    Args:
        pairs: Names of JSONL files, also compressed, patterns, "-" for stdin; or mappings with these four fields.

    Attributes:
        sources: The files that were read; `("pairs",)` for mappings.
        problems: What could not be read, in order.
        sha256: Hash of the pairs, hex.

    Raises:
        AttnscopeError: There is no pair.
    """

    def __init__(self, pairs: str | Path | Sequence[str | Path | Mapping[str, Any]]) -> None:
        # Mappings are pairs themselves; names are files of pairs.
        if isinstance(pairs, str | Path):
            pairs = [pairs]
        self.problems: list[Problem] = []
        entries: Iterator[tuple[str, int, Any]]
        if any(isinstance(pair, Mapping) for pair in pairs):
            self.sources: tuple[str, ...] = ("pairs",)
            entries = (("pairs", number, pair) for number, pair in enumerate(pairs, 1))
        else:
            corpus = Corpus(list(map(str, pairs)), format="txt", most_characters=None)
            self.sources = corpus.sources
            entries = ((text.source, text.line, json_object(text.text or "")) for text in corpus)
        # Keep the first pair of the same two texts, list the others.
        self._pairs: list[Pair] = []
        known: dict[tuple[str, str], int] = {}
        for source, line, entry in entries:
            try:
                pair = _pair_from(source, line, entry)
                texts = pair.clean, pair.corrupt
                if texts in known:
                    raise ValueError(f"it has the texts of pair {known[texts]}, which counts once")
            except ValueError as error:
                self.problems.append(Problem(source, line, str(error)))
                continue
            known[texts] = line
            self._pairs.append(pair)
        if not self._pairs:
            why = name_problems(self.problems)
            raise AttnscopeError(
                f"there is no pair{why}", 'a pair is {"clean", "corrupt", "right", "wrong"}'
            )
        content = json.dumps(list(map(asdict, self._pairs)))
        self.sha256 = hashlib.sha256(content.encode()).hexdigest()

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)


def _pair_from(source: str, line: int, entry: Any) -> Pair:
    """Return a pair.

    Raises:
        ValueError: What is wrong with it.
    """
    if not isinstance(entry, Mapping):
        raise ValueError(entry if isinstance(entry, str) else "it is no mapping")
    # Two texts that differ.
    for name in FIELDS[:2]:
        if name not in entry:
            raise ValueError(f"it has no field {name!r}")
        if not isinstance(entry[name], str) or not entry[name].strip():
            raise ValueError(f'"{name}" is no text')
    if entry["clean"] == entry["corrupt"]:
        raise ValueError("clean and corrupt are the same text")
    # The answers, one or several.
    right = _answers(entry, "right")
    wrong = _answers(entry, "wrong")
    return Pair(source, line, entry["clean"], entry["corrupt"], right, wrong)


def _answers(entry: Mapping[str, Any], name: str) -> Answers:
    """Return the answers in a field; () if there is no such field."""
    if name not in entry:
        return ()
    value = entry[name]
    answers = tuple(value) if isinstance(value, list | tuple) else (value,)
    are_answers = bool(answers)
    for answer in answers:
        are_answers &= answer != "" if isinstance(answer, str) else is_id(answer)
    if not are_answers:
        raise ValueError(
            f'"{name}" is {json.dumps(value, default=str)[:60]}: give words or numbers of tokens'
        )
    return answers
