"""Call the Hugging Face Hub's client within limits of time: alone it retries for half a minute and longer."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")

PATIENCE_S = 3.5
"""How long the Hub may take to answer at all before we say that it cannot be reached."""

STALL_S = 60.0
"""How long a download may bring nothing before it is given up."""

SILENCE_S = 10.0
"""How long it may bring nothing without a word."""

_LOOK_S = 0.2


def run_within(seconds: float, work: Callable[[], _T]) -> _T:
    """Run `work` in a thread that is left behind when the time is up: no client's limit holds for a name look-up.

    Raises:
        TimeoutError: The time is up.
        Exception: What `work` raises.
    """
    running = _Running(work)
    if not running.is_over(seconds):
        raise TimeoutError(f"no answer within {seconds:g} s")
    return running.result()


def run_while_growing(work: Callable[[], _T], size: Callable[[], int], what: str) -> _T:
    """Run `work` in a thread for as long as it brings something; `size` is how much it has brought, `what` from where.

    Raises:
        TimeoutError: Nothing came for STALL_S.
        Exception: What `work` raises.
    """
    # Look now and then whether it grows.
    running = _Running(work)
    reached, since, is_said = size(), time.monotonic(), False
    while not running.is_over(_LOOK_S):
        now = time.monotonic()
        if (n := size()) != reached:
            reached, since = n, now
        elif now - since > STALL_S:
            raise TimeoutError(f"nothing came from {what} for {STALL_S:g} s")
        elif now - since > SILENCE_S and not is_said:
            print(f"note: waiting for {what}", file=sys.stderr)
            is_said = True
    return running.result()


class _Running(Generic[_T]):
    """Work in a thread of its own, which ends with the process."""

    def __init__(self, work: Callable[[], _T]) -> None:
        self._work = work
        self._results: list[_T] = []
        self._errors: list[Exception] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except Exception as error:
            self._errors.append(error)

    def is_over(self, seconds: float) -> bool:
        """Wait so long at most, and return whether the work has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> _T:
        """Return what the work returned, or raise what it raised."""
        if self._errors:
            raise self._errors[0]
        return self._results[0]
