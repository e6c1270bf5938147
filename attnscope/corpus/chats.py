"""Conversations, and texts with named spans: texts of which each character lies in a zone.

    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]}
    {"text": "Page: Ada wrote it. Who?", "spans": [{"start": 6, "end": 19, "zone": "document"}]}

A message lies in the zone of its role: "assistant" and "model" in "answer", "developer" in "system", "function" and
"ipython" in "tool". It may have a "zone" of its own, and "spans" as a text has them. Its content may be a list of text
parts, each with a zone. What the chat template writes by itself, tool calls among it, is the zone "template"; what no
span of a text covers is "text". The texts of "documents", for templates that read them, are "document".

Knows no model: what writes the messages is handed in.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.corpus.formats import is_unicode, is_whole, shorten
from attnscope.errors import AttnscopeError
from attnscope.records import Tokens

Zone = tuple[int, int, str]
"""First and last + 1 character of a text, and the name of the zone."""

Render = Callable[..., str]
"""Writes messages as a chat template has them; an AttnscopeError where that fails."""

PLAIN = "plain"
"""The template of models without one."""

TEMPLATE = "template"
_TEXT, _DOCUMENT = "text", "document"
_ZONES = {
    "developer": "system", "assistant": "answer", "model": "answer", "function": "tool", "ipython": "tool",
}  # fmt: skip
_NAME = re.compile(r"[a-z][a-z0-9_]{0,31}")
_TAKEN = re.compile(r"(.*_)?to(_.*)?|.+_(low|high|uniform|count)")
"""Names by which two columns would have one name: zone_A_to_B, and zone_A_to_B_low of its interval."""

_FIRST_MARK, _MOST_PARTS = 0xF0000, 32_000
"""The first of the private characters that mark where parts of messages begin and end: two for each part."""


@dataclass(frozen=True)
class Zoned:
    """A text whose characters lie in zones, in order and without gaps.

    If `is_chat`, the special tokens stand in the text, so that none are to be added.
    """

    text: str
    zones: tuple[Zone, ...]
    is_chat: bool = False

    def __post_init__(self) -> None:
        if not is_unicode(self.text):
            raise ValueError("its text is not valid Unicode: it holds half of a surrogate pair")


def write_plainly(messages: Sequence[dict[str, Any]], **_: Any) -> str:
    """Messages as `role: content`, with a blank line between two."""
    return "\n\n".join(f"{message['role']}: {message.get('content') or ''}" for message in messages)


def read_zoned(entry: dict[str, Any], name: str, render: Render | None) -> Zoned | None:
    """The conversation or the text with zones that an object of JSON is; None if it is neither.

    `name` is the field that holds a text. `render` writes messages; None = there is no template.

    Raises:
        ValueError: It is malformed, or the template fails on it.
        AttnscopeError: It is a conversation, and there is no template.
    """
    text, spans = entry.get(name), entry.get("spans")
    if isinstance(text, str) and isinstance(spans, list) and any(isinstance(s, dict) and "zone" in s for s in spans):
        parts = [*_parts(text, spans, _TEXT)]
        ends = np.cumsum([len(part) for _, part in parts]).tolist()
        return Zoned(text, tuple((end - len(part), end, zone) for (zone, part), end in zip(parts, ends, strict=True)))
    if "messages" not in entry or "input_ids" in entry or (name in entry and name != "messages"):
        return None
    if render is None:
        raise AttnscopeError(
            "these are conversations, and the model has no chat template",
            "write them as ROLE: TEXT with --chat-template plain",
        )
    return _conversation(entry, render)


def _conversation(entry: dict[str, Any], render: Render) -> Zoned:
    messages, marks = entry["messages"], _Marks()
    if not (isinstance(messages, list) and messages):
        raise ValueError('"messages" is no list of messages')
    plain, marked = zip(*(_message(one, number, marks) for number, one in enumerate(messages, 1)), strict=True)
    more = {name: entry[name] for name in ("tools", "documents") if entry.get(name)}
    documents = more.get("documents", [])
    if not (isinstance(documents, list) and all(isinstance(document, dict) for document in documents)):
        raise ValueError('"documents" is no list of objects')
    marked_documents = [
        {**document, "text": marks.put(_DOCUMENT, document["text"])}
        if isinstance(document.get("text"), str)
        else document
        for document in documents
    ]
    try:
        text = render([*plain], **more)
        written = render([*marked], **more | ({"documents": marked_documents} if documents else {}))
    except AttnscopeError as error:
        raise ValueError(error.message) from None
    located = marks.locate(written)
    if located is None or located[0] != text:
        raise ValueError("the chat template rewrites a message, so that its zone cannot be told")
    zones, at = [], 0
    for start, stop, zone in sorted(located[1]):
        zones += [(at, start, TEMPLATE), (start, stop, zone)]
        at = stop
    zones.append((at, len(text), TEMPLATE))
    return Zoned(text, tuple(zone for zone in zones if zone[0] < zone[1]), render is not write_plainly)


def _message(message: Any, number: int, marks: "_Marks") -> tuple[dict[str, Any], dict[str, Any]]:
    """A message as templates take it, and the same with marks around its parts."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f'message {number} is no object with a "role": {shorten(repr(message))}')
    role, content = message["role"].strip().lower(), message.get("content")
    zone = _name(message.get("zone", _ZONES.get(role, re.sub(r"\W+", "_", role).strip("_"))), f"message {number}")
    match content:
        case None:
            return message, message
        case str():
            parts = [*_parts(content, message.get("spans") or [], zone)]
        case list():
            parts = [part for one in content for part in _part(one, zone, f"message {number}")]
        case _:
            raise ValueError(f"the content of message {number} is no text: {shorten(repr(content))}")
    marked = "".join(marks.put(*part) for part in parts)
    return {**message, "content": "".join(text for _, text in parts)}, {**message, "content": marked}


def _part(part: Any, zone: str, name: str) -> Iterator[tuple[str, str]]:
    """The zone and the text of one part of a content that is a list."""
    entry = {"text": part} if isinstance(part, str) else part
    if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
        raise ValueError(f"a part of {name} is no text: {shorten(repr(part))}")
    return _parts(entry["text"], entry.get("spans") or [], _name(entry.get("zone", zone), name))


def _parts(text: str, spans: Any, zone: str) -> Iterator[tuple[str, str]]:
    """A text cut where its spans begin and end: the zone and the text of each part."""
    if not (isinstance(spans, list) and all(isinstance(span, dict) for span in spans)):
        raise ValueError(f'"spans" is no list of objects: {shorten(repr(spans))}')
    cuts = [(span.get("start"), span.get("end"), _name(span.get("zone"), "a span")) for span in spans]
    for start, stop, _ in cuts:
        if not (is_whole(start, len(text)) and is_whole(stop, len(text)) and start < stop):
            raise ValueError(f"a span from {start!r} to {stop!r} is not within the {len(text)} characters of its text")
    at = 0
    for start, stop, name in [*sorted(cuts), (len(text), len(text), zone)]:
        if start < at:
            raise ValueError(f"the span from {start} to {stop} overlaps the one before it")
        yield from ((of, part) for of, part in ((zone, text[at:start]), (name, text[start:stop])) if part)
        at = stop


def _name(zone: Any, of: str) -> str:
    """The name of a zone; columns are named by it."""
    if not isinstance(zone, str) or not _NAME.fullmatch(zone.lower()):
        raise ValueError(f"the zone of {of} is no name of letters, digits and _: {shorten(repr(zone))}")
    if _TAKEN.fullmatch(zone.lower()):
        raise ValueError(
            f"the zone of {of}, {zone}, could be mistaken for another column: leave out the word to, and _low, _high, "
            "_uniform or _count at the end"
        )
    return zone.lower()


@dataclass
class _Marks:
    """Private characters around the parts of messages, by which they are found in what a template writes.

    White space at the ends of a part stays outside: templates strip it.
    """

    zones: list[str] = field(default_factory=list)

    def put(self, zone: str, text: str) -> str:
        """The text with marks."""
        core = text.strip()
        if not core:
            return text
        if max(core) >= chr(_FIRST_MARK):
            raise ValueError(f"a message holds private characters, U+{_FIRST_MARK:X} or beyond")
        if len(self.zones) == _MOST_PARTS:
            raise ValueError(f"there are more than {_MOST_PARTS:,} messages or parts of messages")
        first = _FIRST_MARK + 2 * len(self.zones)
        self.zones.append(zone)
        return text.replace(core, f"{chr(first)}{core}{chr(first + 1)}", 1)

    def locate(self, written: str) -> tuple[str, list[Zone]] | None:
        """The text without its marks, and the zones; None if a part is not whole in it."""
        letters: list[str] = []
        zones: list[Zone] = []
        opened: tuple[int, int] | None = None
        for char in written:
            part, is_end = divmod(ord(char) - _FIRST_MARK, 2)
            if not 0 <= part < len(self.zones):
                letters.append(char)
            elif is_end:
                if opened is None or opened[0] != part:
                    return None
                zones.append((opened[1], len(letters), self.zones[part]))
                opened = None
            elif opened is not None:
                return None
            else:
                opened = part, len(letters)
        return None if opened else ("".join(letters), zones)


def zones_of_tokens(tokens: Tokens, zones: Sequence[Zone], names: Sequence[str]) -> NDArray[np.int64]:
    """The number of each token's zone among names, (token,): that of its first character that is no space.

    Special tokens are of the template. -1 where a zone has no such name, or the text has no zones.
    """
    numbers = {name: number for number, name in enumerate(names)}
    starts = [start for start, _, _ in zones]
    of_tokens = np.full(len(tokens), numbers.get(TEMPLATE, -1) if zones else -1, np.int64)
    for token, (start, stop) in enumerate(tokens.offsets.tolist()):
        if not zones or tokens.special[token] or start < 0:
            continue
        written = tokens.text[start:stop]
        at = start + (len(written) - len(written.lstrip()) if written.strip() else 0)
        of_tokens[token] = numbers.get(zones[bisect_right(starts, at) - 1][2], -1)
    return of_tokens
