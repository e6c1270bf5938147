"""Conversations on their way in: the messages of a line of JSON, written as a chat template has them.

    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}]}

A message's content is a text or a list of text parts. `tools` and `documents` go to the template as they are.
Knows no model: what writes the messages is handed in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from attnscope.corpus.formats import is_unicode, shorten
from attnscope.errors import AttnscopeError

Render = Callable[..., str]
"""Writes messages as a chat template has them; an AttnscopeError where that fails."""

PLAIN = "plain"
"""The template of models without one."""


@dataclass(frozen=True)
class Chat:
    """A conversation as it is written; with `is_marked`, special tokens stand in the text and none are to be added."""

    text: str
    is_marked: bool


def write_plainly(messages: Sequence[dict[str, Any]], **_: Any) -> str:
    """Write messages as `role: content`, with a blank line between two."""
    return "\n\n".join(f"{message['role']}: {message.get('content') or ''}" for message in messages)


def read_chat(entry: dict[str, Any], name: str, render: Render | None) -> Chat | None:
    """Write the conversation that an object of JSON holds; None if it holds none.

    `name` is the field that holds a text. `render` writes messages; None = there is no template.

    Raises:
        ValueError: It is malformed, or the template fails on it.
        AttnscopeError: It is a conversation, and there is no template.
    """
    if "messages" not in entry or "input_ids" in entry or (name in entry and name != "messages"):
        return None
    if render is None:
        raise AttnscopeError(
            "these are conversations, and the model has no chat template",
            "write them as ROLE: TEXT with --chat-template plain",
        )
    messages = entry["messages"]
    if not (isinstance(messages, list) and messages):
        raise ValueError('"messages" is no list of messages')
    plain = [_message(message, number) for number, message in enumerate(messages, 1)]
    more = {field: entry[field] for field in ("tools", "documents") if entry.get(field)}
    try:
        text = render(plain, **more)
    except AttnscopeError as error:
        raise ValueError(error.message) from None
    if not is_unicode(text):
        raise ValueError("its text is not valid Unicode: it holds half of a surrogate pair")
    return Chat(text, is_marked=render is not write_plainly)


def _message(message: Any, number: int) -> dict[str, Any]:
    """Return a message as templates take it, with one text as its content."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f'message {number} is no object with a "role": {shorten(repr(message))}')
    content = message.get("content")
    match content:
        case None | str():
            return message
        case list():
            return {**message, "content": "".join(_part(part, number) for part in content)}
        case _:
            raise ValueError(f"the content of message {number} is no text: {shorten(repr(content))}")


def _part(part: Any, number: int) -> str:
    """Return the text of one part of a content that is a list."""
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str):
        raise ValueError(f"a part of message {number} is no text: {shorten(repr(part))}")
    return text
