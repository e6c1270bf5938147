"""What attnscope changes in the process that it runs in; more in its own processes than in one that calls it.

Ctrl-C waits for work that must not be cut in two. An import is such work: cut short, it would leave modules half made,
and C extensions would turn the interruption into other errors. In a long import it ends the process: studies begin
after imports, so nothing is lost.
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

_AGAIN_S = 0.05
"""Seconds after which an interruption that fell into an import is tried again."""

_PATIENCE_S = 1
"""Seconds after which an interruption ends an import."""


_waits_since: float | None = None
"""When the interruption came that now waits for an import to end; None = none is waiting."""


def raise_outside_imports(_: int, frame: FrameType | None) -> None:
    """Handle SIGINT as Python does, but after a running import; end the process in a long one.

    Raises:
        KeyboardInterrupt: Nothing is being imported by the main thread.
    """
    global _waits_since
    if not _is_importing(frame):
        _waits_since = None
        raise KeyboardInterrupt
    now = time.monotonic()
    if _waits_since is not None and now - _waits_since >= _PATIENCE_S:
        os.write(2, b"error: interrupted\n")
        os._exit(130)  # as shells count: 128 + SIGINT
    _waits_since = _waits_since or now
    _interrupt_again()


def is_interrupted() -> bool:
    """Return whether a Ctrl-C has not reached the command: it waits for an import."""
    return _waits_since is not None


def _interrupt_again() -> None:
    again = threading.Timer(_AGAIN_S, _interrupt_main_thread)
    again.daemon = True
    again.start()


def _interrupt_main_thread() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # all is said, see `die_at_once`
        return
    # A signal ends what the thread waits for; interrupt_main would come after it.
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(cast(int, threading.main_thread().ident), signal.SIGINT)
    else:
        _thread.interrupt_main()


def _raise_what_was_swallowed(unraisable: "sys.UnraisableHookArgs") -> None:
    """Repeat an interruption that Python could not raise, because it fell into a destructor or a callback."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _interrupt_again()
    else:
        sys.__unraisablehook__(unraisable)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib._bootstrap"):
        frame = frame.f_back
    return frame is not None


_OURS: tuple[Any, ...] = (signal.default_int_handler, raise_outside_imports)


def wait_for_imports() -> None:
    """Have Ctrl-C wait for imports from now on, and never be swallowed, unless someone else ignores or handles it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, raise_outside_imports)
        sys.unraisablehook = _raise_what_was_swallowed


def die_at_once() -> None:
    """Have Ctrl-C end this process without a word from now on: all is said, and Python is taking itself apart."""
    if signal.getsignal(signal.SIGINT) in _OURS:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def delay_interrupts() -> Iterator[None]:
    """Put Ctrl-C off until all within is done: sums that were added in part would be worth nothing."""
    # Only the main thread gets signals, and only Python's or our own handler is replaced.
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT)
    if not in_main or handler not in _OURS:
        yield
        return
    came = False

    def later(*_: object) -> None:
        nonlocal came
        came = True

    # Note the signal, and raise it when the work is whole.
    signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came:
        raise KeyboardInterrupt


@contextmanager
def block_interrupts() -> Iterator[None]:
    """Block Ctrl-C in this thread for a moment; it arrives right after.

    A process that starts meanwhile inherits this. One that Ctrl-C reaches before its first line ends with a traceback.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# What libraries take from where the user stands --------------------------------------------------------------------


@contextmanager
def safe_path(**more: str) -> Iterator[None]:
    """Start Python processes meanwhile that import no module from the working folder, such as a numpy.py there.

    `more` are further variables of their environment.
    """
    variables = {"PYTHONSAFEPATH": "1", **more}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def tame_matplotlib() -> None:
    """Have matplotlib, where it is imported later, draw on no screen: a window system must not stop it."""
    os.environ["MPLBACKEND"] = "agg"


# Memory ------------------------------------------------------------------------------------------------------------


def physical_bytes() -> int | None:
    """Return the machine's memory; None where it is not known."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system: the allocation itself will tell
        return None


def require_memory(needed: int, said: str, hint: str) -> None:
    """Refuse arrays of `needed` bytes that would take more than half of the memory, before a model runs for minutes.

    Args:
        needed: How many bytes they take.
        said: What they are, such as "the maps of 9 tokens".
        hint: What to do instead.

    Raises:
        AttnscopeError: There is no room for them.
    """
    available = physical_bytes()
    if available is not None and needed * 2 > available:
        gib = 2**30
        raise AttnscopeError(
            f"{said} need {needed / gib:.0f} GiB, this machine has {available / gib:.0f} GiB", hint
        )


# Files -------------------------------------------------------------------------------------------------------------


def refuse_pipe(path: Path, what: str) -> None:
    """Refuse a pipe or an endless device where a file must be read from any place; `what` names what is read."""
    if path.is_fifo():
        raise AttnscopeError(
            f"{path} is a pipe, and {what} is read from a file", "write it into a file first"
        )
    if path.is_char_device():
        raise AttnscopeError(
            f"{path} is a device, and {what} is read from a file", "give the name of a file"
        )
