"""Define the exceptions that a user sees as one line, a message and a hint. Make messages short and safe to print.

`attnscope.cli` catches and prints these exceptions.
"""

import contextlib
import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any


class AttnscopeError(Exception):
    """An error that the user can fix: bad input, a missing file, a model whose attention cannot be shown correctly.

    The command line prints it as one line and a hint, never as a traceback, and exits with 1.

    Args:
        message: What is wrong, in one line.
        hint: How to fix it, in one line; may be empty.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(AttnscopeError):
    """A request that is wrong for every text and model, such as an unknown format. The command line exits with 2."""


def require_choice(noun: str, name: str, known: Sequence[str]) -> None:
    """Raise a UsageError if `name` is not among the known names. `noun` says what they name, such as "engine"."""
    if name not in known:
        raise UsageError(f"there is no {noun} {name!r}", suggest(name, known))


def suggest(name: str, known: Sequence[str]) -> str:
    """Return a hint for an unknown name: the most similar known name, or all known names if none is similar."""
    close = difflib.get_close_matches(name, known, 1)
    return f"did you mean {close[0]}?" if close else f"choose from {', '.join(known)}"


class RoundingError(AttnscopeError):
    """Two computations of the same quantity differ by more than rounding."""


def require_close(finding: str, difference: float, rounding: float, hint: str = "") -> None:
    """Raise a RoundingError if recomputed numbers differ from the model's own by more than rounding explains.

    Args:
        finding: The message without its numbers, such as "weights differ from the model's own".
        difference: The largest difference.
        rounding: The largest difference that rounding explains.
        hint: How to fix it.

    Raises:
        RoundingError: The difference is larger than `rounding`, or NaN.
    """
    if not difference <= rounding:  # also true if the difference is NaN
        raise RoundingError(
            f"{finding} by {difference:.3g}; rounding explains at most {rounding:.3g}", hint
        )


# Parts of the messages of libraries when memory runs out.
_OUT_OF_MEMORY_MESSAGES = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that memory ran out, on the device or on the host.

    Torch's exception, torch.OutOfMemoryError, is recognised by its name, so that torch need not be imported.
    """
    names = [kind.__name__ for kind in type(error).__mro__]
    if "MemoryError" in names or "OutOfMemoryError" in names:
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in _OUT_OF_MEMORY_MESSAGES
    )


@contextlib.contextmanager
def as_failure(failure: str, hint: str = "") -> Iterator[None]:
    """Turn a library's exception within the context into an AttnscopeError, "failure: first line of its message".

    An AttnscopeError passes unchanged. So do KeyboardInterrupt and other exceptions that are no `Exception`, except the
    panic of a Rust library. The panic's class is not exported, so it is recognised by its name.
    """
    try:
        yield
    except AttnscopeError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise AttnscopeError(f"{failure}: {first_line(error)}", hint) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, at most 200 characters; the exception's name if it is empty."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].strip()[:200]


def safe(text: str) -> str:
    """Replace unprintable characters, which could control a terminal, by their code points, such as "<U+001B>"."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else f"<U+{ord(c):04X}>" for c in text)


MAX_QUOTE_CHARACTERS = 80
"""A quotation in a message is shortened to this length."""

MAX_MESSAGE_CHARACTERS = 2000
"""A message is shortened to this length."""

_LONG_QUOTE_PATTERN = re.compile(rf"""(?<!\w)(['"])(?=.{{{MAX_QUOTE_CHARACTERS + 1}}})(.+?)\1(?!\w)""")
"""A quotation. Group 1 is the opening quotation mark, group 2 the text up to an equal closing mark.

A mark opens only if no word character precedes it, and closes only if none follows, so apostrophes within words do not
count. The lookahead requires more than MAX_QUOTE_CHARACTERS characters after the opening mark. It skips most short
quotations at once.
"""

_LONG_WORD_PATTERN = re.compile(r"\S{260,}")
"""A word longer than any file name, which has at most 255 bytes."""


def one_line(message: str) -> str:
    """Return a message as one line that is safe to print, as it may contain names and texts from unknown sources.

    Long quotations, and words longer than any file name, keep only their beginning and end, MAX_QUOTE_CHARACTERS in
    all.
    """
    line = " ".join(message.split())
    line = _LONG_QUOTE_PATTERN.sub(
        lambda quote: quote[1] + _shorten(quote[2], MAX_QUOTE_CHARACTERS) + quote[1], line
    )
    line = _LONG_WORD_PATTERN.sub(lambda word: _shorten(word[0], MAX_QUOTE_CHARACTERS), line)
    return safe(_shorten(line, MAX_MESSAGE_CHARACTERS))


def _shorten(text: str, max_characters: int) -> str:
    """Replace the middle of a text by … if it has more than `max_characters` characters."""
    if len(text) <= max_characters:
        return text
    # The … takes one character.
    n_first = max_characters // 2
    n_last = max_characters - n_first - 1
    return f"{text[:n_first]}…{text[-n_last:]}"


def parse_json(content: str | bytes, **hooks: Any) -> Any:
    """Parse a JSON document. `hooks` are passed on to `json.loads`.

    Raises:
        ValueError: The document is malformed or nested too deeply.
    """
    import json

    try:
        return json.loads(content, **hooks)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def amount(n: int, singular: str, plural: str = "") -> str:
    """Return a count with its noun, such as "1 layer", "26 texts" or "1,024 tokens".

    Args:
        n: The count.
        singular: The singular of the noun.
        plural: The plural of the noun; "" = the singular with an s.
    """
    plural = plural or f"{singular}s"
    return f"{n:,} {singular if n == 1 else plural}"
