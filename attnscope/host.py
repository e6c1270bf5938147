"""Handle what depends on the machine: Ctrl-C, the environment of child processes, memory, and special files.

Ctrl-C is delayed during work that must not be interrupted in the middle, such as an import. An interrupted import would
leave incomplete modules, and C extensions would turn the KeyboardInterrupt into other errors. If an import takes longer
than a second, Ctrl-C ends the process. No results are lost, as studies begin after imports. A program that calls
attnscope from Python keeps its own handler of Ctrl-C.
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
"""Seconds until the signal is sent again, if Ctrl-C came during an import."""

_MAX_WAIT_S = 1
"""Seconds that Ctrl-C waits for an import. Then it ends the process."""

_pending_since: float | None = None
"""The time of the first Ctrl-C that is waiting for an import, by time.monotonic(); None = no Ctrl-C is waiting."""


def raise_outside_imports(_: int, frame: FrameType | None) -> None:
    """Handle SIGINT: raise KeyboardInterrupt, but wait until a running import ends. A long import ends the process.

    Raises:
        KeyboardInterrupt: The main thread is not importing.
    """
    global _pending_since
    if not _is_importing(frame):
        _pending_since = None
        raise KeyboardInterrupt
    now = time.monotonic()
    if _pending_since is not None and now - _pending_since >= _MAX_WAIT_S:
        os.write(2, b"error: interrupted\n")
        os._exit(130)  # as shells count: 128 + SIGINT
    _pending_since = _pending_since or now
    _schedule_interrupt()


def is_interrupted() -> bool:
    """Return whether Ctrl-C came during an import, and KeyboardInterrupt has not been raised yet."""
    return _pending_since is not None


def _schedule_interrupt() -> None:
    """Start a timer that sends SIGINT to the main thread again after `_RETRY_S` seconds."""
    timer = threading.Timer(_RETRY_S, _interrupt_main_thread)
    timer.daemon = True
    timer.start()


def _interrupt_main_thread() -> None:
    """Send SIGINT to the main thread, unless the process is already ending (see `end_process_on_interrupt`)."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        return
    # A signal also wakes a thread that is waiting. interrupt_main would take effect only after the wait.
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(cast(int, threading.main_thread().ident), signal.SIGINT)
    else:
        _thread.interrupt_main()


def _repeat_interruption(unraisable: "sys.UnraisableHookArgs") -> None:
    """Repeat a KeyboardInterrupt that Python could not raise, because a destructor or a callback was running.

    This is a `sys.unraisablehook`. Other exceptions go to Python's own hook.
    """
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _schedule_interrupt()
    else:
        sys.__unraisablehook__(unraisable)


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a frame, or one of its callers, belongs to Python's import system."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib._bootstrap"):
        frame = frame.f_back
    return frame is not None


_RAISING_HANDLERS: tuple[Any, ...] = (signal.default_int_handler, raise_outside_imports)
"""The handlers of SIGINT that raise KeyboardInterrupt: Python's and ours. Any other handler is the caller's."""


def delay_interrupts_in_imports() -> None:
    """From now on, let Ctrl-C wait for imports, and repeat it if Python cannot raise it, as in a destructor.

    A program that ignores SIGINT, or has its own handler, keeps its setting.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, raise_outside_imports)
        sys.unraisablehook = _repeat_interruption


def end_process_on_interrupt() -> None:
    """From now on, let Ctrl-C end this process silently: the command is done, and Python is shutting down."""
    if signal.getsignal(signal.SIGINT) in _RAISING_HANDLERS:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def delay_interrupts() -> Iterator[None]:
    """Delay Ctrl-C until the context ends, for work such as updating sums, which would be wrong if half done."""
    # Only the main thread gets signals. Do not replace a handler of the calling program.
    is_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT)
    if not is_main_thread or handler not in _RAISING_HANDLERS:
        yield
        return
    is_pending = False

    def record_interrupt(*_: object) -> None:
        nonlocal is_pending
        is_pending = True

    signal.signal(signal.SIGINT, record_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if is_pending:
        raise KeyboardInterrupt


@contextmanager
def block_interrupts() -> Iterator[None]:
    """Block SIGINT in this thread until the context ends. A blocked Ctrl-C arrives right after that.

    A child process that is started within the context inherits the block. Without the block, Ctrl-C before the first
    line of the child's code would end the child with a traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


# Environment -------------------------------------------------------------------------------------------------------


@contextmanager
def safe_import_path(**variables: str) -> Iterator[None]:
    """Keep child Python processes that start within the context from importing modules of the working folder.

    Otherwise a user's file such as numpy.py could replace a library. `variables` are further environment variables of
    the child processes.
    """
    variables["PYTHONSAFEPATH"] = "1"
    # The previous value of each variable; None = the variable was not set.
    previous_values = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in previous_values.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def use_headless_matplotlib() -> None:
    """Let matplotlib, if it is imported later, draw without a window system."""
    os.environ["MPLBACKEND"] = "agg"


# Memory ------------------------------------------------------------------------------------------------------------


def physical_bytes() -> int | None:
    """Return the size of the machine's memory; None if it is unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (
        AttributeError,
        ValueError,
        OSError,
    ):  # not a POSIX system: too large an allocation fails by itself
        return None


def require_memory(n_bytes: int, arrays: str, hint: str) -> None:
    """Refuse arrays that would take more than half of the memory, before a model runs for minutes.

    Args:
        n_bytes: The size of the arrays in bytes.
        arrays: The subject of the message, such as "the maps of 9 tokens".
        hint: What to do instead.

    Raises:
        AttnscopeError: The arrays are too large.
    """
    memory = physical_bytes()
    if memory is not None and n_bytes * 2 > memory:
        gib = 2**30
        raise AttnscopeError(
            f"{arrays} need {n_bytes / gib:.0f} GiB, this machine has {memory / gib:.0f} GiB", hint
        )


# Files -------------------------------------------------------------------------------------------------------------


def require_regular_file(path: Path, contents: str) -> None:
    """Refuse a pipe or a device, which may be endless. A missing file passes: opening it raises its own error.

    `contents` says what is read, for the message, such as "a text".
    """
    if path.is_fifo():
        raise AttnscopeError(
            f"{path} is a pipe, and {contents} is read from a file", "write it into a file first"
        )
    if path.is_char_device():
        raise AttnscopeError(
            f"{path} is a device, and {contents} is read from a file", "give the name of a file"
        )
