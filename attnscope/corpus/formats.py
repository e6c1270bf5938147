"""Turn the lines of a source into texts: plain text, jsonl, CSV, and the conversations of jsonl.

    {"text": "Who?", "text_pair": "The cat."}
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]}

The content of a message is a text or a list of texts. The fields `tools` and `documents` go to the chat template as
they are. This module knows no model: callers pass the function that writes messages.
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
from attnscope.text import MAX_BYTES, make_too_long_message

Split = Literal["auto", "line", "paragraph", "file"]
"""How a plain text file is split into texts; blank lines separate paragraphs. "auto" guesses, see `guess_split`."""

GUESSED_LINES = 400
"""The most lines, the first ones of a file, that a split is guessed from."""

MAX_PARAGRAPH_LINES = 20
"""The most lines of a paragraph on average. With more, each line is a text and blank lines have no meaning."""

Format = Literal["auto", "txt", "jsonl", "csv", "tsv"]
"""How files are read; "auto" goes by the suffix, see `format_of`."""

_FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
}

MAX_BAD_LINES = 10
"""The number of malformed lines at which the rest of a source is left out."""

PAIR_FIELD = "text_pair"
"""The field or column that holds second texts where no other is named, as in the datasets of many tasks."""

LARGEST_ID = 2**24
"""The largest token id that is accepted. It is beyond any vocabulary, and counts of all ids up to it fit in memory."""

_LONGEST_FIELD = 2**28
"""The most characters of a CSV field. A quote that is never closed makes the rest of the file one field."""

RenderChat = Callable[..., str]
"""Writes messages, and `tools` and `documents`, as one text: a chat template, or `write_plainly`.

It raises an AttnscopeError if they cannot be written.
"""

_TEMPLATE_FIELDS = ("tools", "documents")
"""The fields beside "messages" that chat templates take."""

TextFields = dict[str, Any]
"""The fields of a `CorpusText` that a source sets: text, pair, is_chat."""


@dataclass(frozen=True)
class Problem:
    """Hold what could not be read: a line of a source, all of it from a line on, or the whole source.

    Attributes:
        source: The file's name; "stdin".
        line: The line, from 1; None = the whole source.
        reason: Why it could not be read.
    """

    source: str
    line: int | None
    reason: str

    def __str__(self) -> str:
        place = "" if self.line is None else f", line {self.line}"
        return f"{self.source}{place}: {self.reason}"


def name_problems(problems: Sequence[Problem]) -> str:
    """Return the end of a message, such as ": a.txt, line 3: not UTF-8, and 2 more problems"; "" for no problem."""
    if not problems:
        return ""
    ending = f": {problems[0]}"
    if len(problems) > 1:
        ending += f", and {amount(len(problems) - 1, 'more problem')}"
    return ending


def suffix_of(name: str) -> str:
    """Return the suffix of a file's name in lower case, such as .txt, that of a.txt.gz too; "" for none."""
    return Path(name.lower().removesuffix(".gz")).suffix


def format_of(name: str) -> Format:
    """Return the format that the suffix of a file's name stands for; "txt" for unknown suffixes."""
    return _FORMATS.get(suffix_of(name), "txt")


class BadLineLimit:
    """Add the malformed lines of one source to a list of problems, and end its reading when there are too many."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self._source = source
        self._problems = problems
        self._n_bad = 0

    def add(self, line: int, reason: str) -> None:
        """Add a line to the problems.

        Raises:
            UnreadableError: It is number MAX_BAD_LINES.
        """
        self._n_bad += 1
        if self._n_bad == MAX_BAD_LINES:
            raise UnreadableError(f"{reason}; given up after {MAX_BAD_LINES} malformed lines", line)
        self._problems.append(Problem(self._source, line, reason))


def guess_split(lines: Iterator[str]) -> tuple[Split, Iterator[str]]:
    """Guess how a file is split: by paragraphs if blank lines separate some among its first lines, else by lines.

    Returns:
        "paragraph" or "line", and an iterator over all lines, those that were read for the guess included.
    """
    # An error ends the lines that the guess uses. It is kept, and raised again after them.
    first_lines: list[str] = []
    failure: UnreadableError | None = None
    try:
        for line in islice(lines, GUESSED_LINES):
            first_lines.append(line)
    except UnreadableError as error:
        failure = error

    # Count lines that are not blank, and paragraphs: each begins with such a line after a blank one.
    n_lines = 0
    n_paragraphs = 0
    follows_blank = True
    for line in first_lines:
        is_blank = not line.strip()
        if not is_blank:
            n_lines += 1
            n_paragraphs += follows_blank
        follows_blank = is_blank
    has_paragraphs = n_paragraphs > 1 and n_lines <= MAX_PARAGRAPH_LINES * n_paragraphs

    def all_lines() -> Iterator[str]:
        yield from first_lines
        if failure is not None:
            raise failure
        yield from lines

    return ("paragraph" if has_paragraphs else "line"), all_lines()


def split_lines(lines: Iterator[str], split: Split) -> Iterator[tuple[int, str]]:
    """Join lines to texts; yield each text with the number of the line that it begins on, from 1.

    Raises:
        UnreadableError: A paragraph or a file has more than MAX_BYTES.
    """
    if split == "line":
        yield from enumerate(lines, 1)
        return
    # The lines of the current text, the number of its first line, and its characters so far.
    text: list[str] = []
    begin = 1
    n_characters = 0
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
                n_characters = 0
            text.append(line)
            n_characters += len(line) + 1
            if n_characters > MAX_BYTES:
                raise UnreadableError(make_too_long_message(f"the {split}")[0])
    except UnreadableError as error:
        # The text that was being read is left out as a whole: the error names its first line.
        if text:
            if error.line:
                error.reason += f" in line {error.line}"
            error.line = begin
        raise
    if text:
        yield begin, "\n".join(text).rstrip("\n")


# Objects of jsonl, rows of CSV


def json_entries(lines: Iterator[str]) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield the number of each line that is not blank, and its JSON object, or what is wrong with it as a str."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, json_object(line)


def csv_entries(lines: Iterator[str], delimiter: str) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield each row of CSV with the number of the line that it begins on: a dict by column, or what is wrong as a str.

    Raises:
        UnreadableError: A quote is in the wrong place, or two columns have one name.
    """
    # The limit holds for the whole process. Python's own, 131,072 characters, is too small for texts.
    csv.field_size_limit(_LONGEST_FIELD)
    # Lines get their ends back, for those inside of quotes belong to the text. Strict: a misplaced quote is an error.
    rows = csv.reader((f"{line}\n" for line in lines), delimiter=delimiter, strict=True)
    begin = 1
    try:
        # The first row that is not empty names the columns.
        header = next((row for row in rows if row), [])
        for name in header:
            if name and header.count(name) > 1:
                raise UnreadableError(f'two columns are called "{name}"', begin)
        begin = rows.line_num + 1
        for row in rows:
            # More cells than columns: a text without quotes holds the delimiter.
            if "".join(row[len(header) :]).strip():
                columns = amount(len(header), "column")
                yield begin, f"{len(row)} cells in {columns}: a {delimiter!r} without quotes"
            elif row:
                yield begin, dict(zip(header, row, strict=False))
            begin = rows.line_num + 1
    except csv.Error as error:
        raise UnreadableError(f"malformed CSV: {error}", begin) from None
    except UnreadableError as error:
        # The current row is left out as a whole: the error names its first line.
        if error.line:
            error.line = begin
        raise


def read_entry(
    entry: dict[str, Any], field: str, pair_field: str | None, render: RenderChat
) -> tuple[TextFields, list[str]]:
    """Read the text, the pair of texts, or the conversation in an object of JSON or a row of CSV.

    Args:
        entry: The object, or the row by columns.
        field: The field of the text, or of the first text of a pair.
        pair_field: The field of the second text; None = PAIR_FIELD, where there is one.
        render: Writes the messages of a conversation.

    Returns:
        The content, and the names of other fields that hold a sentence.

    Raises:
        ValueError: There is neither a text nor a conversation; says why in one line.
    """
    if field not in entry and "messages" in entry:
        read_fields = ["messages"]
        if render is not write_plainly:
            read_fields += _TEMPLATE_FIELDS
        content = _write_chat(entry, render)
    else:
        read_fields = [field, pair_field or PAIR_FIELD]
        content = {"text": _text_of(_field_of(entry, field), f'"{field}"')}
        # A blank second text means that there is none.
        second = entry.get(PAIR_FIELD) if pair_field is None else _field_of(entry, pair_field)
        if second is not None and _text_of(second, "the second text").strip():
            content["pair"] = second
    # A sentence in another field may be what the user meant to read.
    unread = []
    for name, value in entry.items():
        if name not in read_fields and _holds_sentence(value):
            unread.append(name)
    return content, unread


def _holds_sentence(value: Any) -> bool:
    """Return whether a value of JSON is a text with two spaces or more, or has one at any depth."""
    if isinstance(value, dict):
        return any(map(_holds_sentence, value.values()))
    if isinstance(value, list):
        return any(map(_holds_sentence, value))
    return isinstance(value, str) and value.strip().count(" ") > 1


def _text_of(value: Any, name: str) -> str:
    """Return a value of JSON as a text; refuse any other value, and text that is not valid Unicode."""
    if not isinstance(value, str):
        raise ValueError(f"{name} is no text: {shorten(repr(value))}")
    if not is_unicode(value):
        raise ValueError("the text is not valid Unicode: it holds half of a surrogate pair")
    return value


def _field_of(entry: dict[str, Any], name: str) -> Any:
    """Return the value of a field; refuse an entry without it."""
    if name not in entry:
        fields = ", ".join(map(str, entry)) or "none"
        fields = shorten(f"its fields are {fields}")
        raise ValueError(f'no field "{name}": {fields}')
    return entry[name]


def write_plainly(messages: Sequence[dict[str, Any]], **_: Any) -> str:
    """Write messages as `role: content`, with a blank line between two.

    Raises:
        AttnscopeError: A message calls tools, which only a chat template can write.
    """
    if any(message.get("tool_calls") for message in messages):
        raise AttnscopeError("a message calls tools: only a model's chat template can write that")
    return "\n\n".join(f"{message['role']}: {message.get('content') or ''}" for message in messages)


def _write_chat(entry: dict[str, Any], render: RenderChat) -> TextFields:
    """Return the conversation of an object of JSON as one text."""
    messages = entry["messages"]
    if not (isinstance(messages, list) and messages):
        raise ValueError('"messages" is no list of messages')
    messages = [_plain_message(message) for message in messages]
    extras = {field: entry[field] for field in _TEMPLATE_FIELDS if entry.get(field)}
    try:
        text = _text_of(render(messages, **extras), "what the chat template writes")
    except AttnscopeError as error:
        raise ValueError(error.message) from None
    # A chat template writes special tokens too, so that the tokenizer must add none.
    return {"text": text, "is_chat": render is not write_plainly}


def _plain_message(message: Any) -> dict[str, Any]:
    """Return a message whose content is one text: the texts of its parts are joined."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f'a message is no object with a "role": {shorten(repr(message))}')
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    # A part is a text, or an object such as {"type": "text", "text": "Who?"}.
    parts = content if isinstance(content, list) else [content]
    texts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in parts]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"the content of a message is no text: {shorten(repr(content))}")
    return {**message, "content": "".join(texts)}


def json_object(line: str) -> dict[str, Any] | str:
    """Return the JSON object of a line, or what is wrong with it as a str."""
    try:
        entry = parse_json(line, object_pairs_hook=_fields_once)
    except json.JSONDecodeError as error:
        return f"malformed JSON: {error.msg} at character {error.pos + 1}"
    # This is raised by a field that comes twice, and by thousands of digits or of nested brackets.
    except ValueError as error:
        return f"malformed JSON: {error}"
    return entry if isinstance(entry, dict) else f"not a JSON object: {shorten(line)}"


def _fields_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of a JSON object; refuse a field that comes twice."""
    entry: dict[str, Any] = {}
    for name, value in pairs:
        if name in entry:
            raise ValueError(f'the field "{shorten(name)}" comes twice')
        entry[name] = value
    return entry


def is_id(value: object) -> bool:
    """Return whether a value of JSON can be a token id."""
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
