"""What tests of Ray look at: one cluster of this process, two workers, one of them killed. Prints JSON.

usage: python -m tests.ray_run FOLDER   (with many.txt and links.conllu in it)
"""

import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import attnscope
from attnscope import BatchOptions, Corpus, Workers, batch, heads, relations
from attnscope.errors import AttnscopeError
from attnscope.studies.running import ray as worker_ray
from attnscope.studies.running.ray import RayWorker


def watched(ray: Any, doomed: Callable[[object, int], bool]) -> type[RayWorker]:
    """Workers of which some are killed when they have been given a message."""

    class Killed:
        def __init__(self, pid: int) -> None:
            self.exceptions, self.kill, self._pid = ray.exceptions, ray.kill, pid

        def get(self, answer: object) -> object:
            os.kill(self._pid, signal.SIGKILL)
            return ray.get(answer)

    class Watched(RayWorker):
        n_asked = 0

        def ask(self, message: object) -> object:
            self.n_asked += 1
            if doomed(message, self.n_asked):
                pid = ray.get(self._actor.__ray_call__.remote(lambda _: __import__("os").getpid()))
                self._ray = Killed(pid)
                killed.append(pid)
            return super().ask(message)

    return Watched


killed: list[int] = []


NOT_STARTED = 75
"""The exit status where Ray itself did not start: it gives its own processes 15 and 30 s by the clock, for good."""


def start_ray() -> Any:
    """A cluster of this process."""
    import ray

    try:
        ray.init(
            num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.CRITICAL,
            object_store_memory=80 * 2**20, configure_logging=False,
        )  # fmt: skip
    except Exception as error:  # Ray raises what its many parts raise
        print(error, file=sys.stderr)
        sys.exit(NOT_STARTED)
    return ray


BLOCK = 64
"""Texts of a block here, of links two times as many."""


def cut_small(patch: pytest.MonkeyPatch) -> None:
    """Cuts corpora into small blocks, in the process that hands them out."""
    patch.setattr("attnscope.studies.heads.study.BLOCK", BLOCK)
    patch.setattr("attnscope.studies.relations.study.BLOCK", 2 * BLOCK)


def main() -> None:
    cut_small(pytest.MonkeyPatch())
    folder, ray = Path(sys.argv[1]), start_ray()
    told: dict[str, Any] = {}
    try:
        pool = Workers("own", 2, executor="ray")
        corpus = Corpus([folder / "many.txt", folder / "absent.txt"])
        model = attnscope.load("own")

        # The first worker to be asked for its second task, in the middle of the corpus, is killed at it.
        worker_ray.RayWorker = watched(ray, lambda _, n: n == 3 and not killed)  # type: ignore[misc]
        heads(model, corpus, workers=pool).save(folder / "ray.npz")
        told["killed"] = len(killed)

        worker_ray.RayWorker = RayWorker  # type: ignore[misc]
        relations(model, str(folder / "links.conllu"), workers=Workers("own", 1, executor="ray")).save(
            folder / "ray-links.npz"
        )
        drawn = batch("own", ["a b"], folder / "figures", BatchOptions(layers=(0,), workers=1, executor="ray"))
        told["drawn"] = [len(drawn.drawn), len(drawn.failed)]
        try:
            heads(model, corpus, workers=Workers("own", 3, executor="ray"))
        except AttnscopeError as error:
            told["too_many"] = str(error)
    finally:
        ray.shutdown()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
