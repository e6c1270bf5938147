"""Turn the lines of a source (a file or stdin) into texts: plain text, jsonl, CSV, and conversations in jsonl.

    {"text": "Who?", "text_pair": "The cat."}
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]}

The content of a message is a text or a list of texts. The fields `tools` and `documents` are passed on to the chat
template. This module knows no model: callers pass the function that renders messages.
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
"""How a plain text file is split into texts. Blank lines separate paragraphs; "auto" is decided by `guess_split`."""

MAX_GUESS_LINES = 400
"""The most lines at the start of a file from which a split is guessed."""

MAX_PARAGRAPH_LINES = 20
"""The most lines that paragraphs have on average. In a file with longer ones each line is a text, and blank lines mean
nothing."""

Format = Literal["auto", "txt", "jsonl", "csv", "tsv"]
"""How files are read; "auto" is decided by the suffix, see `format_of`."""

_FORMATS: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
}

MAX_BAD_LINES = 10
"""The number of malformed lines at which the reading of a source ends."""

PAIR_FIELD = "text_pair"
"""The default field or column of the second text of a pair, as in many datasets."""

MAX_TOKEN_ID = 2**24
"""The largest token id that is accepted. It is above any vocabulary, and an array of counts by id fits in memory."""

_MAX_FIELD_CHARACTERS = 2**28
"""The most characters of a CSV field. A quote that is never closed makes the rest of the file one field."""

RenderChat = Callable[..., str]
"""Renders messages, and optionally `tools` and `documents`, as one text: a model's chat template, or `render_plainly`.

It raises an AttnscopeError if it cannot render them.
"""

_TEMPLATE_FIELDS = ("tools", "documents")
"""The fields besides "messages" that are passed to a chat template."""

ParsedEntry = dict[str, Any] | str
"""The fields of a JSON object or of a row of CSV; a str is the reason why the line is malformed, for `Problem`."""

TextFields = dict[str, Any]
"""The fields of a `CorpusText` that are read from a source: text, pair, is_chat."""


@dataclass(frozen=True)
class Problem:
    """Hold a line that could not be read, a line at which reading ended, or a source that could not be read at all.

    Attributes:
        source: The name of the file; "stdin" for standard input.
        line: The line, from 1; None = the whole source.
        reason: Why it could not be read.
    """

    source: str
    line: int | None
    reason: str

    def __str__(self) -> str:
        position = "" if self.line is None else f", line {self.line}"
        return f"{self.source}{position}: {self.reason}"


def describe_problems(problems: Sequence[Problem]) -> str:
    """Return the ending of a message, such as ": a.txt, line 3: not UTF-8, and 2 more problems"; "" if none."""
    if not problems:
        return ""
    ending = f": {problems[0]}"
    if len(problems) > 1:
        ending += f", and {amount(len(problems) - 1, 'more problem')}"
    return ending


def suffix_of(name: str) -> str:
    """Return the suffix of a file's name in lower case, such as ".txt" of a.TXT and a.txt.gz; "" if it has none."""
    return Path(name.lower().removesuffix(".gz")).suffix


def format_of(name: str) -> Format:
    """Return the format by the suffix of a file's name; "txt" for unknown suffixes."""
    return _FORMATS.get(suffix_of(name), "txt")


class BadLineLimit:
    """Add the malformed lines of one source to a list of problems, and end the reading at MAX_BAD_LINES."""

    def __init__(self, source: str, problems: list[Problem]) -> None:
        self._source = source
        self._problems = problems
        self._n_bad = 0

    def add(self, line: int, reason: str) -> None:
        """Add a line to the problems.

        Raises:
            UnreadableError: It is the MAX_BAD_LINES-th malformed line. The caller lists this error as the last problem.
        """
        self._n_bad += 1
        if self._n_bad == MAX_BAD_LINES:
            raise UnreadableError(f"{reason}; given up after {MAX_BAD_LINES} malformed lines", line)
        self._problems.append(Problem(self._source, line, reason))


def guess_split(lines: Iterator[str]) -> tuple[Split, Iterator[str]]:
    """Guess how a file is split: by paragraphs if blank lines separate its first lines into paragraphs, else by lines.

    Returns:
        "paragraph" or "line", and an iterator over all lines, including the lines that were read for the guess.
    """
    # An error ends the lines for the guess. It is raised later, when `all_lines` reaches the same point.
    first_lines: list[str] = []
    read_error: UnreadableError | None = None
    try:
        for line in islice(lines, MAX_GUESS_LINES):
            first_lines.append(line)
    except UnreadableError as error:
        read_error = error

    # Count nonblank lines, and paragraphs. A paragraph begins with a nonblank line after a blank one, or at the start.
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
        if read_error is not None:
            raise read_error
        yield from lines

    return ("paragraph" if has_paragraphs else "line"), all_lines()


def split_lines(lines: Iterator[str], split: Split) -> Iterator[tuple[int, str]]:
    """Join lines into texts; yield the number of the first line of each text, from 1, and the text.

    Raises:
        UnreadableError: A paragraph or a file has more than MAX_BYTES.
    """
    if split == "line":
        yield from enumerate(lines, 1)
        return
    # The lines of the current text so far, the number of its first line, and its length.
    text_lines: list[str] = []
    first_line = 1
    n_characters = 0
    try:
        for number, line in enumerate(lines, 1):
            # A blank line ends a paragraph.
            if split == "paragraph" and not line.strip():
                if text_lines:
                    yield first_line, "\n".join(text_lines)
                    text_lines = []
                continue
            if not text_lines:
                first_line = number
                n_characters = 0
            text_lines.append(line)
            n_characters += len(line) + 1
            if n_characters > MAX_BYTES:
                raise UnreadableError(make_too_long_message(f"the {split}")[0])
    except UnreadableError as error:
        # The current text is dropped as a whole, so the error names its first line.
        if text_lines:
            if error.line:
                error.reason += f" in line {error.line}"
            error.line = first_line
        raise
    if text_lines:
        yield first_line, "\n".join(text_lines).rstrip("\n")


# Objects of jsonl, rows of CSV


def parse_json_lines(lines: Iterator[str]) -> Iterator[tuple[int, ParsedEntry]]:
    """Yield the number of each nonblank line, from 1, and its JSON object."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, parse_json_object(line)


def parse_csv_rows(lines: Iterator[str], delimiter: str) -> Iterator[tuple[int, ParsedEntry]]:
    """Yield the number of the first line of each row of CSV, and the row as a dict by column.

    Raises:
        UnreadableError: A quote is in the wrong place, or two columns have one name.
    """
    # The limit applies to the whole process. Python's default, 131,072 characters, is too small for texts.
    csv.field_size_limit(_MAX_FIELD_CHARACTERS)
    # Lines get their newlines back, because newlines inside quotes belong to the text. In strict mode a misplaced quote
    # is an error.
    rows = csv.reader((f"{line}\n" for line in lines), delimiter=delimiter, strict=True)
    first_line = 1
    try:
        # The first nonempty row has the names of columns.
        header = next((row for row in rows if row), [])
        for name in header:
            if name and header.count(name) > 1:
                raise UnreadableError(f'two columns are called "{name}"', first_line)
        first_line = rows.line_num + 1
        for row in rows:
            # More cells than columns: a text without quotes contains the delimiter.
            if "".join(row[len(header) :]).strip():
                columns = amount(len(header), "column")
                yield first_line, f"{len(row)} cells in {columns}: a {delimiter!r} without quotes"
            elif row:
                yield first_line, dict(zip(header, row, strict=False))
            first_line = rows.line_num + 1
    except csv.Error as error:
        raise UnreadableError(f"malformed CSV: {error}", first_line) from None
    except UnreadableError as error:
        # The current row is dropped as a whole, so the error names its first line.
        if error.line:
            error.line = first_line
        raise


def read_entry(
    entry: dict[str, Any], field: str, pair_field: str | None, render: RenderChat
) -> tuple[TextFields, list[str]]:
    """Read the text, the pair of texts, or the conversation of a JSON object or a row of CSV.

    Args:
        entry: The object, or the row by column.
        field: The field of the text, or of the first text of a pair.
        pair_field: The field of the second text; None = PAIR_FIELD, if the entry has it.
        render: Renders the messages of a conversation.

    Returns:
        The fields of a `CorpusText`, and the names of unread fields that contain a sentence.

    Raises:
        ValueError: The entry has neither a text nor a conversation. The message is one line.
    """
    if field not in entry and "messages" in entry:
        read_fields = ["messages"]
        if render is not render_plainly:
            read_fields += _TEMPLATE_FIELDS
        content = _render_conversation(entry, render)
    else:
        read_fields = [field, pair_field or PAIR_FIELD]
        content = {"text": _text_of(_field_of(entry, field), f'"{field}"')}
        # A blank second text means that there is none.
        second_text = entry.get(PAIR_FIELD) if pair_field is None else _field_of(entry, pair_field)
        if second_text is not None and _text_of(second_text, "the second text").strip():
            content["pair"] = second_text
    # The user may have meant an unread field that contains a sentence, so callers list these fields.
    unread_fields = []
    for name, value in entry.items():
        if name not in read_fields and _holds_sentence(value):
            unread_fields.append(name)
    return content, unread_fields


def _holds_sentence(value: Any) -> bool:
    """Return whether a JSON value is a text with at least two spaces, or contains one at any depth."""
    if isinstance(value, dict):
        return any(map(_holds_sentence, value.values()))
    if isinstance(value, list):
        return any(map(_holds_sentence, value))
    return isinstance(value, str) and value.strip().count(" ") > 1


def _text_of(value: Any, name: str) -> str:
    """Return a JSON value that is a text; refuse other values, and text that is not valid Unicode."""
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


def render_plainly(messages: Sequence[dict[str, Any]], **_: Any) -> str:
    """Render messages as `role: content`, separated by blank lines.

    Raises:
        AttnscopeError: A message calls tools, which only a chat template can render.
    """
    if any(message.get("tool_calls") for message in messages):
        raise AttnscopeError("a message calls tools: only a model's chat template can write that")
    return "\n\n".join(f"{message['role']}: {message.get('content') or ''}" for message in messages)


def _render_conversation(entry: dict[str, Any], render: RenderChat) -> TextFields:
    """Return the conversation of a JSON object as one text."""
    messages = entry["messages"]
    if not (isinstance(messages, list) and messages):
        raise ValueError('"messages" is no list of messages')
    messages = [_plain_message(message) for message in messages]
    extras = {field: entry[field] for field in _TEMPLATE_FIELDS if entry.get(field)}
    try:
        text = _text_of(render(messages, **extras), "what the chat template writes")
    except AttnscopeError as error:
        raise ValueError(error.message) from None
    # A chat template also writes special tokens, so the tokenizer must add none: is_chat tells it.
    return {"text": text, "is_chat": render is not render_plainly}


def _plain_message(message: Any) -> dict[str, Any]:
    """Return a message whose content is one text; a list of parts is joined."""
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


def parse_json_object(line: str) -> ParsedEntry:
    """Parse a line as a JSON object; return the reason as a str if it is malformed."""
    try:
        entry = parse_json(line, object_pairs_hook=_require_unique_fields)
    except json.JSONDecodeError as error:
        return f"malformed JSON: {error.msg} at character {error.pos + 1}"
    # Raised for a duplicate field (by the hook), and for thousands of digits or of nested brackets.
    except ValueError as error:
        return f"malformed JSON: {error}"
    return entry if isinstance(entry, dict) else f"not a JSON object: {shorten(line)}"


def _require_unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of a JSON object as a dict; refuse duplicate fields, of which json would keep the last."""
    entry: dict[str, Any] = {}
    for name, value in pairs:
        if name in entry:
            raise ValueError(f'the field "{shorten(name)}" comes twice')
        entry[name] = value
    return entry


def is_token_id(value: object) -> bool:
    """Return whether a JSON value can be a token id. A bool is an int in Python, but no id."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKEN_ID


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8: it has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shorten(text: str) -> str:
    """Return the text in one line of at most 60 characters; a longer text ends with an ellipsis."""
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:59]}…"
