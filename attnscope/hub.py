"""Call the Hugging Face Hub's client within a limit of time: alone it retries for half a minute and longer."""

import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")

PATIENCE_S = 3.5
"""How long the Hub may take to answer at all before we say that it cannot be reached."""


def run_within(seconds: float, work: Callable[[], _T]) -> _T:
    """Run `work` in a thread that is left behind when the time is up: no client's limit holds for a name look-up.

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

    thread = threading.Thread(target=run, daemon=True)  # it ends with the process
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {seconds:g} s")
    if errors:
        raise errors[0]
    return results[0]
