"""Open named pipes among the inputs: say which writer is awaited, and give up after a while."""

import os
import select
import sys
from pathlib import Path
from typing import BinaryIO

from attnscope.errors import AttnscopeError, one_line

PATIENCE_S = 60.0
"""How long a pipe may stay empty at first before it is given up."""

SILENCE_S = 3.0
"""How long it is waited without a word."""


def open_input(path: Path) -> BinaryIO:
    """Open a file for reading; of a pipe, wait until there is something to read.

    Raises:
        AttnscopeError: Nothing came through the pipe within PATIENCE_S.
        OSError: The file cannot be opened.
    """
    if not path.is_fifo():
        return path.open("rb")
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        _wait_for_data(handle, path)
        os.set_blocking(handle, True)
        return os.fdopen(handle, "rb", buffering=0)
    except BaseException:
        os.close(handle)
        raise


def refuse_pipe(path: Path, what: str) -> None:
    """Refuse a pipe where a file must be read from any place; `what` names what is read."""
    if path.is_fifo():
        raise AttnscopeError(f"{path} is a pipe, and {what} is read from a file", "write it into a file first")


def _wait_for_data(handle: int, path: Path) -> None:
    waiting = select.poll()
    waiting.register(handle, select.POLLIN)
    if waiting.poll(SILENCE_S * 1000):
        return
    print(f"note: {one_line(f'waiting for something to read from the pipe {path}')}", file=sys.stderr)
    if not waiting.poll((PATIENCE_S - SILENCE_S) * 1000):
        raise AttnscopeError(
            f"nothing came through the pipe {path} within {PATIENCE_S:g} s", "see that something writes into it"
        )
