"""Whether the Hugging Face Hub can be reached, found out in seconds: its client alone tries for half a minute."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

_T = TypeVar("_T")

PATIENCE_S = 3.5
"""How long the Hub may take to answer at all before we say that it cannot be reached."""


_FORGET_S = 10
"""Seconds after which a Hub that did not answer is asked again, in a process that goes on."""

_asked: dict[str, tuple[float, Exception | None]] = {}
"""When an address was asked, and what went wrong."""

_NEVER = (-math.inf, ConnectionError("it was not asked"))


def require_hub() -> None:
    """Returns once the Hub has answered, whatever it says; within a process it is asked once.

    Raises:
        Exception: Whatever the Hub's client raises where there is no network or no server.
        TimeoutError: There was no answer within PATIENCE_S.
    """
    from huggingface_hub import constants

    when, failed = _asked.get(constants.ENDPOINT, _NEVER)
    if failed and time.monotonic() - when > _FORGET_S:
        failed = _ask(constants.ENDPOINT)
    if failed:
        raise failed


def _ask(endpoint: str) -> Exception | None:
    from huggingface_hub import get_session

    failed = None
    try:
        run_within(PATIENCE_S, lambda: get_session().head(endpoint, timeout=PATIENCE_S))
    except Exception as error:
        failed = error
    _asked[endpoint] = (time.monotonic(), failed)
    return failed


def run_within(seconds: float, work: Callable[[], _T]) -> _T:
    """Runs `work` in a thread that is left behind when the time is up: no client's limit holds for a name look-up.

    Raises:
        TimeoutError: The time is up.
        Exception: What `work` raises.
    """
    results: list[_T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return results[0]


@contextmanager
def no_log_of_attempts() -> Iterator[None]:
    """Within it, the Hub's client does not log each of its six attempts, with its address."""
    attempts = logging.getLogger("huggingface_hub.utils._http")
    attempts.addFilter(_says_nothing)
    try:
        yield
    finally:
        attempts.removeFilter(_says_nothing)


def _says_nothing(_: logging.LogRecord) -> bool:
    return False
