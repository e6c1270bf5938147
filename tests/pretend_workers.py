"""Workers that are objects of this process, for tests of what is shared and not of who shares it."""

import pickle
from collections.abc import Callable
from typing import Any

from attnscope.studies.running.worker import Doer, WorkerLostError


class Here:
    """Workers that are objects of this process; `dies` says at which message a worker is lost.

    They get messages and answer as processes do, by copies that pickle makes.
    """

    def __init__(self, n: int, dies: Callable[[object], bool] = lambda _: False) -> None:
        self.n, self._dies, self.started = n, dies, 0

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def worker(self) -> "HereWorker":
        self.started += 1
        return HereWorker(self._dies)


def copied(message: object) -> Any:
    return pickle.loads(pickle.dumps(message))


class HereWorker:
    def __init__(self, dies: Callable[[object], bool]) -> None:
        self._doer, self._dies = Doer(), dies

    def ask(self, message: object) -> object:
        if self._dies(message):
            raise WorkerLostError("struck")
        return copied(self._doer.answer(copied(message)))

    def end(self) -> None:
        pass

    stop = end
