"""Turn the lines of a source into texts: plain text, jsonl, CSV, and the conversations of jsonl.

    {"text": "Who?", "text_pair": "The cat."}
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]}

A message's content is a text or a list of text parts. `tools` and `documents` go to the chat template as they are.
It knows no model: callers pass the function that writes messages.
"""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from attnscope.corpus.lines import UnreadableError
from attnscope.errors import AttnscopeError, amount, parse_json
from attnscope.text import MOST_BYTES, too_long

Split = Literal["auto", "line", "paragraph", "file"]
"""How a plain text file is split into texts; blank lines separate paragraphs. "auto" guesses, see `guess_split`."""

GUESSED_FROM = 400
"""The most lines that a split is guessed from."""

MOST_LINES = 20
"""Lines that paragraphs have on average, where blank lines separate paragraphs: a stray one among texts does not."""

Format = Literal["auto", "txt", "jsonl", "csv", "tsv"]
"""How files are read; "auto" goes by the name: .jsonl, .ndjson, .json; .csv; .tsv; else it is plain text."""

BAD_LINES = 10
"""So many lines of one source may be malformed before the rest of it is given up."""

PAIR_FIELD = "text_pair"
"""The field or column that holds second texts where no other is named, as in the datasets of many tasks."""

LARGEST_ID = 2**24
"""Far beyond any vocabulary: a stray number must not ask for memory without end."""

_LONGEST_FIELD = 2**28
"""A quote that is never closed makes the rest of a CSV file one field."""

Render = Callable[..., str]
"""Writes messages as a chat template has them, or plainly; an AttnscopeError where that fails."""

_FOR_TEMPLATES = ("tools", "documents")
"""The fields beside messages that go to a chat template."""

Content = dict[str, Any]
"""The fields of a `CorpusText` that a source sets: text, pair, is_chat."""


@dataclass(frozen=True)
class Problem:
    """Hold a part of a source that could not be read.

    Attributes:
        source: The file's name; "stdin".
        line: The line from which on, or the only one that, was skipped; None = the whole source.
        reason: Why.
    """

    source: str
    line: int | None
    reason: str

    def __str__(self) -> str:
        place = "" if self.line is None else f", line {self.line}"
        return f"{self.source}{place}: {self.reason}"


def name_problems(problems: Sequence[Problem]) -> str:
    """Return the end of a message: the first of some problems, and how many more there are; "" for none."""
    if not problems:
        return ""
    others = len(problems) - 1
    more = f", and {amount(others, 'more problem')}" if others else ""
    return f": {problems[0]}{more}"


def suffix_of(name: str) -> str:
    """Return the ending of a file's name that says what is in it, such as .txt; "" for none."""
    return Path(name.lower().removesuffix(".gz")).suffix


_FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
}


def format_of(name: str) -> Format:
    """Return the format that a file's name stands for; plain text for unknown suffixes."""
    return _FORMATS.get(suffix_of(name), "txt")


class BadLines:
    """List the malformed lines of one source in `problems`, and give it up when there are too many."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self._source = source
        self._problems = problems
        self._n = 0

    def add(self, line: int, reason: str) -> None:
        """List a line.

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
    # Read the lines that the guess uses. One that cannot be read ends them: what stands before it is text.
    first: list[str] = []
    failed: UnreadableError | None = None
    try:
        for line in islice(lines, GUESSED_FROM):
            first.append(line)
    except UnreadableError as error:
        failed = error

    # A paragraph begins with a line after a blank one, or with the first.
    n_lines = 0
    n_paragraphs = 0
    follows_blank = True
    for line in first:
        is_blank = not line.strip()
        n_lines += not is_blank
        n_paragraphs += follows_blank and not is_blank
        follows_blank = is_blank
    has_paragraphs = n_paragraphs > 1 and n_lines <= MOST_LINES * n_paragraphs

    def all_lines() -> Iterator[str]:
        yield from first
        if failed is not None:
            raise failed
        yield from lines

    return ("paragraph" if has_paragraphs else "line"), all_lines()


def split_lines(lines: Iterator[str], split: Split) -> Iterator[tuple[int, str]]:
    """Yield the texts of plain lines, with the lines that they begin on.

    Raises:
        UnreadableError: A paragraph or a file has more than MOST_BYTES.
    """
    if split == "line":
        yield from enumerate(lines, 1)
        return
    # The lines of the text that is being read, the number of its first, and how many characters it has.
    text: list[str] = []
    begin = 1
    size = 0
    try:
        for number, line in enumerate(lines, 1):
            # A blank line ends a paragraph.
            if split == "paragraph" and not line.strip():
                if text:
                    yield begin, "\n".join(text)
                    text = []
                continue
            if not text:
                begin = number
                size = 0
            text.append(line)
            size += len(line) + 1
            if size > MOST_BYTES:
                message, _ = too_long(f"the {split}")
                raise UnreadableError(message)
    except UnreadableError as error:
        # A text that is cut off is left out from its first line on.
        if text:
            error.reason += f" in line {error.line}" if error.line else ""
            error.line = begin
        raise
    if text:
        yield begin, "\n".join(text).rstrip("\n")


# Objects of jsonl, rows of CSV


def json_entries(lines: Iterator[str]) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield the JSON object of each line, or what is wrong with it, with its number."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, json_object(line)


def csv_entries(lines: Iterator[str], delimiter: str) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield the rows of CSV by the names of their columns, with the lines that they begin on.

    Raises:
        UnreadableError: A quote is in the wrong place, or two columns have one name.
    """
    # One for the whole process; Python's 131,072 is too small for texts.
    csv.field_size_limit(_LONGEST_FIELD)
    # Python's reader would lose the line ends inside of quotes; strict: a quote in the wrong place is no text.
    rows = csv.reader((f"{line}\n" for line in lines), delimiter=delimiter, strict=True)
    begin = 1
    try:
        # The first row that is not empty names the columns.
        header = next(filter(None, rows), [])
        for name in header:
            if name and header.count(name) > 1:
                raise UnreadableError(f'two columns are called "{name}"', begin)
        begin = rows.line_num + 1
        for row in rows:
            # Cells beyond the columns would be lost: a delimiter without quotes cut them off.
            if "".join(row[len(header) :]).strip():
                columns = amount(len(header), "column")
                yield begin, f"{len(row)} cells in {columns}: a {delimiter!r} without quotes"
            elif row:
                yield begin, dict(zip(header, row, strict=False))
            begin = rows.line_num + 1
    except csv.Error as error:
        raise UnreadableError(f"malformed CSV: {error}", begin) from None
    except UnreadableError as error:
        # The row that is cut off is named by the line that it begins on.
        if error.line:
            error.line = begin
        raise


def read_entry(
    entry: dict[str, Any], field: str, pair_field: str | None, render: Render
) -> tuple[Content, list[str]]:
    """Read an object of JSON or a row of CSV: a text, a pair, or a conversation.

    Args:
        entry: The object.
        field: The field of the text, or of the first of two.
        pair_field: The field of the second text; None = PAIR_FIELD, where there is one.
        render: Writes the messages of a conversation.

    Returns:
        The content, and the names of fields that hold a sentence which is not read.

    Raises:
        ValueError: It holds neither a text nor a conversation; the reason in one line.
    """
    # A conversation, or one text or two.
    if field not in entry and "messages" in entry:
        read = ["messages"]
        if render is not write_plainly:
            read += _FOR_TEMPLATES
        content = _write_chat(entry, render)
    else:
        read = [field, pair_field or PAIR_FIELD]
        content = {"text": _text_of(_field_of(entry, field), f'"{field}"')}
        # A blank second text means that there is none.
        second = entry.get(PAIR_FIELD) if pair_field is None else _field_of(entry, pair_field)
        if second is not None and _text_of(second, "the second text").strip():
            content["pair"] = second
    unread = []
    for name, value in entry.items():
        if name not in read and _holds_sentence(value):
            unread.append(name)
    return content, unread


def _holds_sentence(value: Any) -> bool:
    """Return whether a value of JSON holds a text of three words or more, at whatever depth."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return any(map(_holds_sentence, value))
    return isinstance(value, str) and value.strip().count(" ") > 1


def _text_of(value: Any, name: str) -> str:
    """Return a value that must be a text without half of a surrogate pair."""
    if not isinstance(value, str):
        raise ValueError(f"{name} is no text: {shorten(repr(value))}")
    if not is_unicode(value):
        raise ValueError("the text is not valid Unicode: it holds half of a surrogate pair")
    return value


def _field_of(entry: dict[str, Any], name: str) -> Any:
    """Return the value of a field."""
    if name not in entry:
        fields = ", ".join(map(str, entry)) or "none"
        raise ValueError(f'no field "{name}": {shorten(f"its fields are {fields}")}')
    return entry[name]


def write_plainly(messages: Sequence[dict[str, Any]], **_: Any) -> str:
    """Write messages as `role: content`, with a blank line between two.

    Raises:
        AttnscopeError: A message calls tools, which only a chat template can write.
    """
    if any(message.get("tool_calls") for message in messages):
        raise AttnscopeError("a message calls tools: only a model's chat template can write that")
    return "\n\n".join(f"{message['role']}: {message.get('content') or ''}" for message in messages)


def _write_chat(entry: dict[str, Any], render: Render) -> Content:
    """Write the conversation that an object of JSON holds."""
    messages = entry["messages"]
    if not (isinstance(messages, list) and messages):
        raise ValueError('"messages" is no list of messages')
    plain = [_plain_message(message) for message in messages]
    # Templates also take tools and documents, as they are.
    others = {field: entry[field] for field in _FOR_TEMPLATES if entry.get(field)}
    try:
        text = _text_of(render(plain, **others), "what the chat template writes")
    except AttnscopeError as error:
        raise ValueError(error.message) from None
    # A template writes special tokens, and none are to be added.
    return {"text": text, "is_chat": render is not write_plainly}


def _plain_message(message: Any) -> dict[str, Any]:
    """Return a message as templates take it, with one text as its content."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f'a message is no object with a "role": {shorten(repr(message))}')
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    # A list of texts, or of parts that each hold a text.
    joined = ""
    parts = content if isinstance(content, list) and content else [content]
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise ValueError(f"the content of a message is no text: {shorten(repr(content))}")
        joined += text
    return {**message, "content": joined}


def json_object(line: str) -> dict[str, Any] | str:
    """Return the JSON object of a line, or what is wrong with it."""
    try:
        entry = parse_json(line, object_pairs_hook=_fields_once)
    except json.JSONDecodeError as error:
        return f"malformed JSON: {error.msg} at character {error.pos + 1}"
    # A field that comes twice, a number of thousands of digits, or brackets nested as deep.
    except ValueError as error:
        return f"malformed JSON: {error}"
    return entry if isinstance(entry, dict) else f"not a JSON object: {shorten(line)}"


def _fields_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of a JSON object; refuses one of which a field comes twice."""
    entry: dict[str, Any] = {}
    for name, value in pairs:
        if name in entry:
            raise ValueError(f'the field "{shorten(name)}" comes twice')
        entry[name] = value
    return entry


def is_id(value: object) -> bool:
    """Return whether a value of JSON can be a token's number."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_ID


def is_unicode(text: str) -> bool:
    """Return whether a text has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shorten(text: str) -> str:
    """Return the text in one line, or its first 59 characters and an ellipsis."""
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:59]}…"
