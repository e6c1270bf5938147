"""A worker in this process, for tests of what is shared and not of who shares it."""

import pickle
from collections.abc import Callable, Generator, Iterable
from typing import Any

from attnscope.studies.workers import BlockOutcome, WorkerFunction


def copied(message: object) -> Any:
    return pickle.loads(pickle.dumps(message))


class Here:
    """Runs blocks in this process, on copies as a worker gets them. `lost` says which blocks are given up."""

    def __init__(self, lost: Callable[[Any], bool] = lambda _: False) -> None:
        self._lost = lost

    def map_blocks(
        self, function: WorkerFunction, blocks: Iterable[Any]
    ) -> Generator[BlockOutcome, None, None]:
        worker = copied(function)
        worker.load()
        for number, block in enumerate(blocks):
            if self._lost(block):
                yield BlockOutcome(number, block, None, "struck")
                continue
            yield BlockOutcome(number, block, copied(worker(copied(block))))
