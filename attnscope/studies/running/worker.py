"""The worker's side of a study that is shared: it begins its work, then does one task after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attnscope.errors import AttnscopeError


class WorkerLostError(Exception):
    """A worker died, or is out of reach; the message says how."""


@dataclass(frozen=True)
class Failure:
    """What went wrong in a worker that lives on: a bug, or too little memory for one task."""

    reason: str
    memory: bool


class Doer:
    """The worker's side: begins its work, then does tasks."""

    def __init__(self) -> None:
        self._do: Callable[[Any], Any] | None = None

    def answer(self, message: Any) -> object:
        """Nothing for the work, and for a task what came of it; or the AttnscopeError or Failure that came instead."""
        try:
            if self._do is None:
                self._do = message.begin()
                return None
            return self._do(message)
        except AttnscopeError as error:
            return error
        except MemoryError:
            return Failure("not enough memory", True)
        except Exception as error:
            return Failure(f"{type(error).__name__}: {error}", False)
