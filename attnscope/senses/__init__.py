"""Read image and audio files into pixels and samples: `photos`, `recordings`. `tokens` labels what models make of them.

The package knows no model. This module holds the checks and error messages that both readers share.
"""

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attnscope.errors import AttnscopeError, first_line
from attnscope.host import require_regular_file


@contextlib.contextmanager
def translate_decoder_errors(source: Any, noun: str, hint: str) -> Iterator[Path]:
    """Check and yield the path of a file. An exception inside the `with` block becomes an AttnscopeError of one line.

    Warnings inside the block are silenced.

    Args:
        source: The path, as a user gave it; anything else is refused.
        noun: What the file should be, for messages: "picture" or "recording".
        hint: The hint of every error, such as the file formats that can be read.
    """
    if not isinstance(source, str | os.PathLike):
        raise AttnscopeError(f"{type(source).__name__} is no {noun}", hint)
    path = Path(source)
    # Decoders seek in the file, and opening a pipe without a writer would block.
    require_regular_file(path, f"a {noun}")
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
    # Pillow and scipy raise many types of exceptions on damaged files, and document no common base class.
    except Exception as error:
        if path.stat().st_size == 0:
            raise AttnscopeError(f"{path} is empty", hint) from None
        raise AttnscopeError(
            f"{path} cannot be read as a {noun}: {first_line(error)[:80]}", hint
        ) from None
