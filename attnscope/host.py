"""Handle Ctrl-C, the environment of processes, memory and special files: what depends on the machine.

Ctrl-C waits for work that must not be cut in two. An import is such work: cut short, it would leave modules half made,
and C extensions would turn the interruption into other errors. If the import takes longer than a second, Ctrl-C ends
the process: studies begin after imports, so nothing is lost. A process that calls attnscope from Python keeps its own
handler of Ctrl-C.
"""

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast

from attnscope.errors import AttnscopeError

_RETRY_S = 0.05
"""Seconds until Ctrl-C is tried again if it came during an import."""

_LONGEST_WAIT_S = 1
"""Seconds that Ctrl-C waits for an import; then it ends the process."""

_waits_since: float | None = None
"""When Ctrl-C came, if it waits for an import now; None = it does not."""


def raise_outside_imports(_: int, frame: FrameType | None) -> None:
    """Handle SIGINT: raise KeyboardInterrupt, but only after a running import; end the process in a long one.

    Raises:
        KeyboardInterrupt: The main thread imports nothing.
    """
    global _waits_since
    if not _is_importing(frame):
        _waits_since = None
        raise KeyboardInterrupt
    now = time.monotonic()
    if _waits_since is not None and now - _waits_since >= _LONGEST_WAIT_S:
        os.write(2, b"error: interrupted\n")
        os._exit(130)  # as shells count: 128 + SIGINT
    _waits_since = _waits_since or now
    _interrupt_again()


def is_interrupted() -> bool:
    """Return whether Ctrl-C came during an import and is still to be raised."""
    return _waits_since is not None


def _interrupt_again() -> None:
    """Interrupt the main thread once more, after `_RETRY_S`."""
    timer = threading.Timer(_RETRY_S, _interrupt_main_thread)
    timer.daemon = True
    timer.start()


def _interrupt_main_thread() -> None:
    """Send SIGINT to the main thread, unless the process is ending already, see `die_at_once`."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        return
    # A signal also wakes a thread that waits; interrupt_main would come after the wait.
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(cast(int, threading.main_thread().ident), signal.SIGINT)
    else:
        _thread.interrupt_main()


def _repeat_interruption(unraisable: "sys.UnraisableHookArgs") -> None:
    """Repeat an interruption that Python could not raise, because it fell into a destructor or a callback."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _interrupt_again()
    else:
        sys.__unraisablehook__(unraisable)


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a frame is part of an import."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib._bootstrap"):
        frame = frame.f_back
    return frame is not None


_RAISING: tuple[Any, ...] = (signal.default_int_handler, raise_outside_imports)
"""The handlers of SIGINT that raise KeyboardInterrupt: Python's, and our own."""


def wait_for_imports() -> None:
    """Have Ctrl-C wait for imports from now on; raise it again where Python cannot, as in a destructor.

    A program that ignores SIGINT, or has its own handler, keeps it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, raise_outside_imports)
        sys.unraisablehook = _repeat_interruption


def die_at_once() -> None:
    """Have Ctrl-C end this process without a word from now on: the command is done, and Python is shutting down."""
    if signal.getsignal(signal.SIGINT) in _RAISING:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def delay_interrupts() -> Iterator[None]:
    """Put Ctrl-C off until the context ends, for work such as sums, which would be wrong if they were cut in two."""
    # Only the main thread gets signals, and a handler of the calling program is not replaced.
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT)
    if not in_main or handler not in _RAISING:
        yield
        return
    is_pending = False

    def note(*_: object) -> None:
        nonlocal is_pending
        is_pending = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if is_pending:
        raise KeyboardInterrupt


@contextmanager
def block_interrupts() -> Iterator[None]:
    """Keep Ctrl-C from this thread until the context ends; it arrives right after.

    A process that is started within the context inherits the block. Without it, Ctrl-C before the first line of that
    process would end it with a traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# Environment -------------------------------------------------------------------------------------------------------


@contextmanager
def safe_import_path(**variables: str) -> Iterator[None]:
    """Keep Python processes that are started within the context from importing modules of the working folder.

    Such a module may be the user's own numpy.py. `variables` are further variables of their environment.
    """
    variables["PYTHONSAFEPATH"] = "1"
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def tame_matplotlib() -> None:
    """Have matplotlib, if it is imported later, draw without a window system."""
    os.environ["MPLBACKEND"] = "agg"


# Memory ------------------------------------------------------------------------------------------------------------


def physical_bytes() -> int | None:
    """Return the machine's memory; None where it is not known."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system: the allocation itself will tell
        return None


def require_memory(needed: int, arrays: str, hint: str) -> None:
    """Refuse arrays that would take more than half of the memory, before a model runs for minutes.

    Args:
        needed: How many bytes they take.
        arrays: What they are, such as "the maps of 9 tokens".
        hint: What to do instead.

    Raises:
        AttnscopeError: There is no room for them.
    """
    available = physical_bytes()
    if available is not None and needed * 2 > available:
        gib = 2**30
        raise AttnscopeError(
            f"{arrays} need {needed / gib:.0f} GiB, this machine has {available / gib:.0f} GiB", hint
        )


# Files -------------------------------------------------------------------------------------------------------------


def refuse_pipe(path: Path, what: str) -> None:
    """Refuse a pipe or an endless device, where a file is needed; `what` says what is read."""
    if path.is_fifo():
        raise AttnscopeError(
            f"{path} is a pipe, and {what} is read from a file", "write it into a file first"
        )
    if path.is_char_device():
        raise AttnscopeError(
            f"{path} is a device, and {what} is read from a file", "give the name of a file"
        )
