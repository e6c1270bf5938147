"""Read photos and recordings from files into pixels and samples. Knows no model."""

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attnscope.errors import AttnscopeError, first_line
from attnscope.host import refuse_pipe


@contextlib.contextmanager
def reading(source: Any, noun: str, hint: str) -> Iterator[Path]:
    """Yield the path of a file; inside the `with`, whatever a decoder raises becomes an AttnscopeError of one line.

    Warnings are silenced there.

    Args:
        source: The path.
        noun: What the file should hold, such as "picture".
        hint: What to give instead.
    """
    if not isinstance(source, str | os.PathLike):
        raise AttnscopeError(f"{type(source).__name__} is no {noun}", hint)
    path = Path(source)
    refuse_pipe(path, f"a {noun}")
    if path.is_dir():
        raise AttnscopeError(f"{path} is a folder, not a {noun}", hint)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield path
    except AttnscopeError:
        raise
    except FileNotFoundError:
        raise AttnscopeError(f"there is no file {path}", hint) from None
    # Decoders raise all kinds of exceptions on damaged files.
    except Exception as error:
        if path.stat().st_size == 0:
            raise AttnscopeError(f"{path} is empty", hint) from None
        raise AttnscopeError(
            f"{path} cannot be read as a {noun}: {first_line(error)[:80]}", hint
        ) from None
