"""Define the exceptions that a user sees as one line, a message and a hint, and make text safe to print.

`attnscope.cli` prints them.
"""

import contextlib
import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any


class AttnscopeError(Exception):
    """An error that the user can mend: bad input, a missing file, a model that cannot be shown truly.

    The command line prints it as one line and a hint, never as a traceback, and exits with 1.

    Args:
        message: What is wrong, in one line.
        hint: What to do about it, in one line; may be empty.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(AttnscopeError):
    """A request that is wrong for every text and model, such as an unknown format; the command line exits with 2."""


def require_choice(noun: str, name: str, known: Sequence[str]) -> None:
    """Refuse an unknown name by a UsageError; the noun says what is named, such as "engine"."""
    if name not in known:
        raise UsageError(f"there is no {noun} {name!r}", suggest(name, known))


def suggest(name: str, known: Sequence[str]) -> str:
    """Return a hint for an unknown name: the known one that is most like it, or all of them."""
    close = difflib.get_close_matches(name, known, 1)
    return f"did you mean {close[0]}?" if close else f"choose from {', '.join(known)}"


class RoundingError(AttnscopeError):
    """Two ways to compute the same differ by more than rounding."""


def require_close(finding: str, difference: float, rounding: float, hint: str = "") -> None:
    """Refuse numbers that differ from what the model computed by more than rounding explains.

    Args:
        finding: The message without its numbers, such as "weights differ from the model's own".
        difference: The largest difference.
        rounding: The largest difference that rounding explains.
        hint: What to do about it.

    Raises:
        RoundingError: The difference is larger, or NaN.
    """
    if not difference <= rounding:  # this is also true of NaN
        raise RoundingError(
            f"{finding} by {difference:.3g}; rounding explains at most {rounding:.3g}", hint
        )


# Words in the messages of libraries when memory runs out.
_OUT_OF_MEMORY = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that memory ran out, the device's or the host's.

    Torch's own exception is known by its name, so that torch need not be imported.
    """
    names = [kind.__name__ for kind in type(error).__mro__]
    if "MemoryError" in names or "OutOfMemoryError" in names:
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


@contextlib.contextmanager
def as_failure(failure: str, hint: str = "") -> Iterator[None]:
    """Turn an exception of a library within the context into an AttnscopeError: "failure: reason". Our own errors pass.

    A panic of a library in Rust is no `Exception`, and its class is not exported, so it is known by its name.
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
    """Return a library's message in one line of at most 200 characters; the exception's name if it has none."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].strip()[:200]


def safe(text: str) -> str:
    """Return a text to print, in which characters that a terminal may obey are written as "<U+001B>"."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else f"<U+{ord(c):04X}>" for c in text)


LONGEST_QUOTE = 80
"""The most characters of a quotation in a message."""

LONGEST_MESSAGE = 2000
"""The most characters of a message."""

_LONG_QUOTE = re.compile(rf"""(?<!\w)(['"])(?=.{{{LONGEST_QUOTE + 1}}})(.+?)\1(?!\w)""")
"""A long quotation: group 1 is the mark before a word, group 2 the words up to the same mark after a word.

The lookahead asks for more than LONGEST_QUOTE characters after the first mark: it skips most short quotations at once.
"""

_LONG_WORD = re.compile(r"\S{260,}")
"""A word longer than any file name, which has at most 255 bytes."""


def one_line(message: str) -> str:
    """Return a message in one line, and safe to print: names and texts in it may come from anywhere.

    Long quotations, and words longer than any file name, are shortened to LONGEST_QUOTE characters: the beginning and
    the end.
    """
    line = " ".join(message.split())
    line = _LONG_QUOTE.sub(lambda quote: quote[1] + _shorten(quote[2], LONGEST_QUOTE) + quote[1], line)
    line = _LONG_WORD.sub(lambda word: _shorten(word[0], LONGEST_QUOTE), line)
    return safe(_shorten(line, LONGEST_MESSAGE))


def _shorten(text: str, most: int) -> str:
    """Return the beginning and the end of a text, with … between, if it has more than `most` characters."""
    if len(text) <= most:
        return text
    n_first = most // 2
    n_last = most - n_first - 1
    return f"{text[:n_first]}…{text[-n_last:]}"


def parse_json(content: str | bytes, **hooks: Any) -> Any:
    """Return what a JSON document holds; `hooks` are arguments of `json.loads`.

    Raises:
        ValueError: The document is malformed or nested too deeply.
    """
    import json

    try:
        return json.loads(content, **hooks)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def amount(n: int, one: str, several: str = "") -> str:
    """Return a count with its noun, such as "1 layer", "26 texts" or "1,024 tokens".

    Args:
        n: The count.
        one: The singular of the noun.
        several: Its plural; "" = the singular with an s.
    """
    plural = several or f"{one}s"
    return f"{n:,} {one if n == 1 else plural}"
