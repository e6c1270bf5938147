"""What attnscope does to the process that it runs in: to one of its own more than to one that calls it.

Ctrl-C: what must not be cut in two is finished first, and an import is such a thing: it would leave modules half made,
and C extensions turn an interruption into other errors.
"""

import _thread
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast

_is_ours = False


def claim_process() -> None:
    """Says that this process is the command line's or one of its workers': studies may tell its heap what to keep.

    Called from Python, attnscope leaves the allocator as it is; who wants memory tuned there calls this once.
    """
    global _is_ours
    _is_ours = True


def is_claimed() -> bool:
    """Whether this process is attnscope's own."""
    return _is_ours


_AGAIN_S = 0.05
"""Seconds after which an interruption that fell into an import is tried again."""


def raise_outside_imports(_: int, frame: FrameType | None) -> None:
    """Handles SIGINT as Python does, but after the import that is under way.

    Raises:
        KeyboardInterrupt: Nothing is being imported by the main thread.
    """
    if not _is_importing(frame):
        raise KeyboardInterrupt
    _interrupt_again()


def _interrupt_again() -> None:
    again = threading.Timer(_AGAIN_S, _interrupt_main_thread)
    again.daemon = True
    again.start()


def _interrupt_main_thread() -> None:
    if hasattr(signal, "pthread_kill"):  # a signal ends what the thread waits for; interrupt_main would come after it
        signal.pthread_kill(cast(int, threading.main_thread().ident), signal.SIGINT)
    else:
        _thread.interrupt_main()


def _raise_what_was_swallowed(unraisable: "sys.UnraisableHookArgs") -> None:
    """Handles what Python cannot raise: tries an interruption again that fell into a destructor or a callback."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        _interrupt_again()
    else:
        sys.__unraisablehook__(unraisable)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib._bootstrap"):
            return True
        frame = frame.f_back
    return False


_OURS: tuple[Any, ...] = (signal.default_int_handler, raise_outside_imports)


def wait_for_imports() -> None:
    """Has Ctrl-C wait for imports from now on, and never be swallowed, unless someone else ignores or handles it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, raise_outside_imports)
        sys.unraisablehook = _raise_what_was_swallowed


def die_at_once() -> None:
    """Has Ctrl-C end this process without a word from now on: all is said, and Python is taking itself apart."""
    if signal.getsignal(signal.SIGINT) in _OURS:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def delay_interrupts() -> Iterator[None]:
    """Puts Ctrl-C off until all within is done: sums that were added in part would be worth nothing."""
    in_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT)
    if not in_main or handler not in _OURS:
        yield
        return
    came = False

    def later(*_: object) -> None:
        nonlocal came
        came = True

    signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came:
        raise KeyboardInterrupt
