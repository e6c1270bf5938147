"""Read pairs of texts with right and wrong answers, from JSONL files or from Python. Tokenising is left to studies."""

from __future__ import annotations

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
        source: The file that it comes from; "pairs" of those that were given as they are.
        line: Its line there, from 1.
        clean: The text after which the right answer is right.
        corrupt: The text after which it is not.
        right: The answers that are right after the clean text: words, numbers of tokens, or classes; () = none.
        wrong: Those that are wrong there.
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
        sources: The files that were read; `("pairs",)` without.
        problems: What could not be read, in order.
        sha256: Hash of the pairs, hex.

    Raises:
        AttnscopeError: There is no pair.
    """

    def __init__(self, pairs: str | Path | Sequence[str | Path | Mapping[str, Any]]) -> None:
        # Mappings are pairs themselves; names are files of pairs.
        listed = [pairs] if isinstance(pairs, str | Path) else list(pairs)
        self.problems: list[Problem] = []
        entries: Iterator[tuple[str, int, Any]]
        if any(isinstance(each, Mapping) for each in listed):
            self.sources: tuple[str, ...] = ("pairs",)
            entries = (("pairs", number, each) for number, each in enumerate(listed, 1))
        else:
            corpus = Corpus([str(each) for each in listed], format="txt", most_characters=None)
            self.sources = corpus.sources
            entries = ((text.source, text.line, json_object(text.text or "")) for text in corpus)
        # Keep the first pair of the same two texts, list the others.
        known: dict[tuple[Any, ...], int] = {}
        self._pairs: list[Pair] = []
        for source, line, entry in entries:
            pair = _pair_from(source, line, entry)
            if isinstance(pair, Pair) and (first := known.setdefault((pair.clean, pair.corrupt), line)) != line:
                pair = f"it has the texts of pair {first}, which counts once"
            if isinstance(pair, Pair):
                self._pairs.append(pair)
            else:
                self.problems.append(Problem(source, line, pair))
        if not self._pairs:
            why = f": {name_problems(self.problems)}" if self.problems else ""
            raise AttnscopeError(f"there is no pair{why}", 'a pair is {"clean", "corrupt", "right", "wrong"}')
        self.sha256 = hashlib.sha256(json.dumps([asdict(pair) for pair in self._pairs]).encode()).hexdigest()

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)


def _pair_from(source: str, line: int, entry: Any) -> Pair | str:
    """Return a pair, or what is wrong with it."""
    if not isinstance(entry, Mapping):
        return entry if isinstance(entry, str) else "it is no mapping"
    if missing := [name for name in FIELDS[:2] if name not in entry]:
        return f"it has no field {missing[0]!r}"
    answers: dict[str, Answers] = {"right": (), "wrong": ()}
    for name in answers:
        if name not in entry:
            continue
        listed = entry[name] if isinstance(entry[name], list | tuple) else [entry[name]]
        if not listed or not all((isinstance(each, str) and each) or is_id(each) for each in listed):
            return f'"{name}" is {json.dumps(entry[name], default=str)[:60]}: give words or numbers of tokens'
        answers[name] = tuple(listed)
    for name in FIELDS[:2]:
        if not isinstance(entry[name], str) or not entry[name].strip():
            return f'"{name}" is no text'
    if entry["clean"] == entry["corrupt"]:
        return "clean and corrupt are the same text"
    return Pair(source, line, entry["clean"], entry["corrupt"], answers["right"], answers["wrong"])
