"""Exceptions that a user sees as one line: a message, and a hint at what to do. `__main__` prints them."""

import contextlib
import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any


class AttnscopeError(Exception):
    """Something that the user can mend: bad input, a missing file, a model that cannot be shown truly.

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
    """A request without meaning, whatever the text and the model; the command line exits with 2."""


def require_choice(what: str, name: str, known: Sequence[str]) -> None:
    """Refuse a name that is none of those known: the hint is the likeliest of them, or lists them."""
    if name not in known:
        raise UsageError(f"there is no {what} {name!r}", suggest(name, known))


def suggest(name: str, known: Sequence[str]) -> str:
    """Return a hint for a name that is none of those known: the likeliest of them, or all."""
    close = difflib.get_close_matches(name, known, 1)
    return f"did you mean {close[0]}?" if close else f"choose from {', '.join(known)}"


class RoundingError(AttnscopeError):
    """Two ways to compute the same differ by more than rounding."""


def require_rounding(what: str, difference: float, rounding: float, hint: str = "") -> None:
    """Refuse numbers that differ from what the model computed by more than rounding explains; NaN fails.

    Args:
        what: What differs from what, such as "weights differ from the model's own".
        difference: The largest difference.
        rounding: The largest that rounding explains.
        hint: What to do about it.
    """
    if not difference <= rounding:
        raise RoundingError(
            f"{what} by {difference:.3g}; rounding explains at most {rounding:.3g}", hint
        )


_WANT_OF_MEMORY = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that memory ran out: the device's, which only torch knows, or the host's."""
    if isinstance(error, MemoryError) or any(
        kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__
    ):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WANT_OF_MEMORY)


@contextlib.contextmanager
def as_failure(failure: str, hint: str = "") -> Iterator[None]:
    """Within it, whatever a library raises becomes one line: the failure and the reason. Our own errors stay.

    A panic of a library in Rust is no `Exception`; each library has one of its own, which none exports.
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
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )[:200]


def safe(text: str) -> str:
    """Text with nothing in it that a terminal would obey: it may come from anywhere, and is to be printed."""
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else f"<U+{ord(c):04X}>" for c in text)
    )


MOST_QUOTED, MOST_SAID = 80, 2000
"""The most characters of an argument that a message quotes, and the most that a message has."""

_LONG_QUOTE = re.compile(rf"""(?<!\w)(['"])(?=.{{{MOST_QUOTED + 1}}})(.+?)\1(?!\w)""")
_LONG_WORD = re.compile(r"\S{260,}")  # no name of a file is longer


def one_line(message: str) -> str:
    """Return a message in one line, with nothing in it that a terminal would obey: names and texts come from anywhere.

    Quotations, and words longer than any file name, are shortened to MOST_QUOTED characters: the beginning and the end.
    """
    line = " ".join(message.split())
    line = _LONG_QUOTE.sub(
        lambda quoted: f"{quoted[1]}{_shorten(quoted[2], MOST_QUOTED)}{quoted[1]}", line
    )
    return safe(_shorten(_LONG_WORD.sub(lambda word: _shorten(word[0], MOST_QUOTED), line), MOST_SAID))


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}…{text[1 - most + most // 2 :]}"


def parse_json(content: str | bytes, **hooks: Any) -> Any:
    """Return what a JSON document holds; a ValueError refuses one that is malformed or nested too deeply."""
    import json

    try:
        return json.loads(content, **hooks)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def amount(n: int, one: str, several: str = "") -> str:
    """Return a count with its noun, such as "1 layer", "26 texts" or "1,024 tokens".

    Args:
        n: How many.
        one: What one of them is called.
        several: What more or none of them are called; empty = the same with an s.
    """
    return f"{n:,} {one if n == 1 else several or one + 's'}"
