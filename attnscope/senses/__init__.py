"""Read photos and recordings: from files of many kinds to pixels and samples. Knows no model."""

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attnscope.errors import AttnscopeError, first_line
from attnscope.host import refuse_pipe


@contextlib.contextmanager
def reading(source: Any, what: str, hint: str) -> Iterator[Path]:
    """Yield the path of a file; within the block, whatever a decoder raises becomes an AttnscopeError of one line.

    `what` names what the file should hold, such as "picture", and `hint` says what to give instead. Warnings are
    silenced.
    """
    if not isinstance(source, str | os.PathLike):
        raise AttnscopeError(f"{type(source).__name__} is no {what}", hint)
    path = Path(source)
    refuse_pipe(path, f"a {what}")
    if path.is_dir():
        raise AttnscopeError(f"{path} is a folder, not a {what}", hint)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield path
    except AttnscopeError:
        raise
    except FileNotFoundError:
        raise AttnscopeError(f"there is no file {path}", hint) from None
    except PermissionError as error:
        raise AttnscopeError(f"cannot read {path}: {error.strerror}") from None
    # Decoders raise what they like on damaged files.
    except Exception as error:
        if path.stat().st_size == 0:
            raise AttnscopeError(f"{path} is empty", hint) from None
        raise AttnscopeError(
            f"{path} cannot be read as a {what}: {first_line(error)[:80]}", hint
        ) from None
