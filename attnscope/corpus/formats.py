"""From the lines of a source to its texts: plain text, jsonl, CSV."""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from attnscope.corpus.lines import UnreadableError
from attnscope.errors import amount, parse_json
from attnscope.results.json_bounds import require_bounded
from attnscope.text import MOST_BYTES, too_long

Other = TypeVar("Other")

Split = Literal["auto", "line", "paragraph", "file"]
"""How a plain text file is split into texts; blank lines separate paragraphs. "auto" guesses, see `guess_split`."""

GUESSED_FROM = 400
"""The most lines, and 100 times as many characters, that a split is guessed from."""

MOST_LINES = 20
"""Lines that paragraphs have on average, where blank lines separate paragraphs: a stray one among texts does not."""

Format = Literal["auto", "txt", "jsonl", "csv", "tsv"]
"""How files are read; "auto" goes by the name: .jsonl, .ndjson, .json; .csv; .tsv; else it is plain text."""

BAD_LINES = 10
"""So many lines of one source may be malformed before the rest of it is given up."""

PAIR_FIELD = "text_pair"
"""The field or column that holds second texts where no other is named, as in the datasets of many tasks."""

# Far beyond any vocabulary: a stray number must not ask for memory without end.
LARGEST_ID = 2**24
# A quote that is never closed makes the rest of a CSV file one field.
_LONGEST_FIELD = 2**28


@dataclass(frozen=True)
class Problem:
    """What could not be read.

    Attributes:
        source: The file's name; "stdin".
        line: The line from which on, or the only one that, was skipped; None = the whole source.
        reason: Why.
    """

    source: str
    line: int | None
    reason: str

    def __str__(self) -> str:
        return f"{self.source}{'' if self.line is None else f', line {self.line}'}: {self.reason}"


def name_problems(problems: Sequence[Problem]) -> str:
    """The first of some problems, and how many more there are; "" for none."""
    more = f", and {amount(len(problems) - 1, 'more problem')}" if len(problems) > 1 else ""
    return "".join(map(str, problems[:1])) + more


def suffix_of(name: str) -> str:
    """The ending of a file's name that says what is in it, such as .txt; "" for none."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes if suffix.lower() != ".gz"]
    return suffixes[-1] if suffixes else ""


def format_of(name: str) -> Format:
    """How a file of that name is read."""
    known: dict[str, Format] = {
        ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv", ".tsv": "tsv",
    }  # fmt: skip
    return known.get(suffix_of(name), "txt")


class TextPair(NamedTuple):
    """Two texts that a model reads together, as BERT reads a question and a passage."""

    first: str
    second: str


class BadLines:
    """Lists the malformed lines of one source, and gives it up when there are too many."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self._source, self._problems, self._n = source, problems, 0

    def add(self, line: int, reason: str) -> None:
        """Lists a line.

        Raises:
            UnreadableError: It is one too many.
        """
        self._n += 1
        if self._n == BAD_LINES:
            raise UnreadableError(f"{reason}; given up after {BAD_LINES} malformed lines", line)
        self._problems.append(Problem(self._source, line, reason))


def guess_split(lines: Iterator[str]) -> tuple[Split, Iterator[str]]:
    """Guess from the first lines how a file is split: by paragraphs if blank lines separate some, else by lines.

    Returns:
        "paragraph" or "line", and all of the lines again.
    """
    first: list[str] = []
    failed: UnreadableError | None = None
    size = 0
    try:
        for line in lines:
            first.append(line)
            size += len(line)
            if len(first) >= GUESSED_FROM or size >= 100 * GUESSED_FROM:
                break
    except UnreadableError as error:  # what stands before it is text
        failed = error

    # A paragraph begins with a line after a blank one.
    is_blank = [not line or line.isspace() for line in first]
    n_lines = is_blank.count(False)
    n_paragraphs = sum(before and not blank for before, blank in pairwise([True, *is_blank]))
    separates = n_paragraphs > 1 and n_lines <= MOST_LINES * n_paragraphs

    def again() -> Iterator[str]:
        yield from first
        if failed is not None:
            raise failed
        yield from lines

    return ("paragraph" if separates else "line"), again()


def split_lines(lines: Iterator[str], split: Split) -> Iterator[tuple[int, str]]:
    """The texts of plain lines, with the lines that they begin on.

    Raises:
        UnreadableError: A paragraph or a file has more than MOST_BYTES.
    """
    if split == "line":
        yield from enumerate(lines, 1)
        return
    text: list[str] = []
    size = n_lines = 0
    for n_lines, line in enumerate(lines, 1):
        if split == "file" or (line and not line.isspace()):
            text.append(line)
            size += len(line) + 1
            if size > MOST_BYTES:
                raise UnreadableError(too_long(f"the {split}")[0], n_lines)
        elif text:
            yield n_lines - len(text), "\n".join(text)
            text, size = [], 0
    if split == "file":
        yield 1, "\n".join(text).rstrip("\n")
    elif text:
        yield n_lines + 1 - len(text), "\n".join(text)


def read_jsonl(
    lines: Iterator[str],
    field: str,
    pair_field: str | None,
    bad: BadLines,
    read_other: Callable[[dict[str, Any]], Other | None] = lambda _: None,
) -> Iterator[tuple[int, str | tuple[int, ...] | TextPair | Other]]:
    """Yield a field of each line of JSON: texts, pairs or token numbers, with the lines that they stand on.

    Args:
        lines: The lines.
        field: The field of the text, or of the first of two.
        pair_field: The field of the second text; None = PAIR_FIELD, where there is one.
        bad: Lists malformed lines.
        read_other: Reads objects of another form; its ValueError says what is wrong with one.

    Raises:
        UnreadableError: Too many lines are malformed.
    """
    for number, line in enumerate(lines, 1):
        if not line or line.isspace():
            continue
        entry = json_object(line)
        if isinstance(entry, str):
            bad.add(number, entry)
            continue
        try:
            other = read_other(entry)
        except ValueError as error:
            bad.add(number, str(error))
            continue
        if other is not None:
            yield number, other
            continue
        used = field if field in entry or "input_ids" not in entry else "input_ids"
        if used not in entry:
            there = f"its fields are {', '.join(map(str, entry))}" if entry else "it is empty"
            bad.add(number, f'no field "{used}": {shorten(there)}')
            continue
        try:
            content = text_or_ids(used, entry[used])
            yield number, _with_second(content, entry, pair_field) if isinstance(content, str) else content
        except ValueError as error:
            bad.add(number, str(error))


def _with_second(text: str, entry: dict[str, Any], pair_field: str | None) -> str | TextPair:
    """Return a text with the second one that stands beside it; alone where that is blank.

    Raises:
        ValueError: There is none where one was asked for by name, or it is no text.
    """
    if pair_field is not None and pair_field not in entry:
        raise ValueError(f'no field "{pair_field}": {shorten("its fields are " + ", ".join(map(str, entry)))}')
    name = pair_field or PAIR_FIELD
    second = entry.get(name)
    if second is None:
        return text
    if not isinstance(second, str) or not is_unicode(second):
        raise ValueError(f'"{name}" is no text: {shorten(repr(second))}')
    return TextPair(text, second) if second.strip() else text


def text_or_ids(field: str, value: Any) -> str | tuple[int, ...]:
    """The text or the token numbers of a field.

    Raises:
        ValueError: It holds neither.
    """
    match value:
        case str(text) if is_unicode(text):
            return text
        case str():
            raise ValueError(f'"{field}" is not valid Unicode: it holds half of a surrogate pair')
        case list(ids) if all(map(is_id, ids)):
            return tuple(ids)
        case _:
            raise ValueError(f'"{field}" is neither a text nor a list of token numbers: {shorten(repr(value))}')


def read_csv(
    lines: Iterator[str], field: str, pair_field: str | None, delimiter: str, bad: BadLines
) -> Iterator[tuple[int, str | TextPair]]:
    """Yield a column of CSV, or pairs of two columns, with the lines that its texts begin on.

    Arguments as of `read_jsonl`.

    Raises:
        UnreadableError: There is no such column, a quote is in the wrong place, or too many lines are malformed.
    """
    csv.field_size_limit(_LONGEST_FIELD)  # one for the whole process; Python's 131,072 is too small for texts
    # Python's reader would lose the line ends inside of quotes; strict: a quote in the wrong place is no text.
    rows = csv.reader((f"{line}\n" for line in lines), delimiter=delimiter, strict=True)
    begin = 1
    try:
        header = next(rows, None)
        if header is None:
            return
        names = [field]
        if pair_field is not None or PAIR_FIELD in header:
            names.append(pair_field or PAIR_FIELD)
        for name in names:
            if name not in header:
                raise UnreadableError(f'no column "{name}": its columns are {shorten(", ".join(header))}', 1)
        columns = [header.index(name) for name in names]
        begin = rows.line_num + 1
        for row in rows:
            missing = [name for name, column in zip(names, columns, strict=True) if len(row) <= column]
            if not missing:
                first, *second = (row[column] for column in columns)
                yield begin, TextPair(first, second[0]) if second and second[0].strip() else first
            elif row:
                bad.add(begin, f'no value for column "{missing[0]}": {len(row)} of {len(header)} columns')
            begin = rows.line_num + 1
    except csv.Error as error:
        raise UnreadableError(f"malformed CSV: {error}", begin) from None


_LONG_LINE = 2**20
"""A shorter line of JSON fills no memory, whatever it holds."""


def json_object(line: str) -> dict[str, Any] | str:
    """The JSON object of a line, or what is wrong with it."""
    try:
        if len(line) > _LONG_LINE:
            require_bounded(line.encode("utf-8", "surrogatepass"))
        entry = parse_json(line)
    except json.JSONDecodeError as error:
        return f"malformed JSON: {error.msg} at character {error.pos + 1}"
    except ValueError as error:  # a number of thousands of digits, or brackets nested as deep
        return f"malformed JSON: {error}"
    return entry if isinstance(entry, dict) else f"not a JSON object: {shorten(line)}"


def is_id(value: object) -> bool:
    """Whether a value of JSON can be a token's number."""
    return is_whole(value, LARGEST_ID)


def is_whole(value: object, most: int) -> bool:
    """Whether a value of JSON is a whole number from 0 to `most`."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def is_unicode(text: str) -> bool:
    """Whether a text has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shorten(text: str) -> str:
    """The text, or its first 59 characters and an ellipsis."""
    return text if len(text) <= 60 else f"{text[:59]}…"
