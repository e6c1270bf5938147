"""Tasks done by workers, wherever those are: handed out one by one, and done again where a worker is lost.

A study says what a task is and what comes of it: it gives a `Work` that begins in each worker, and an iterable of
tasks. An `Executor` says where workers live: as processes of this machine (`process`), or as actors of Ray (`ray`).
Texts go to the workers with their tasks, so corpora are read in one place alone.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, Protocol, TypeVar, get_args

from attnscope.errors import AttnscopeError, UsageError
from attnscope.models import Model
from attnscope.models.catalog import BUILT_IN, KNOWN
from attnscope.models.files import hashes, remember_hashes
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.inputs.provenance import versions
from attnscope.studies.running.worker import Failure, WorkerLostError

TRIES = 3
"""So many workers may be lost over a task before it is given up."""

Where = Literal["local", "ray"]

MOST_COUNT = 4096
"""More workers or threads than that are a slip of the pen."""

T = TypeVar("T")


class Work(Protocol):
    """What a worker is started with. It is pickled, so its class is one of a module's own."""

    def begin(self) -> Callable[[Any], Any]:
        """Loads in the worker what all tasks need, and returns what does one."""


class Remote(Protocol):
    """A worker: it is asked with its work first, and then with one task after the other."""

    def ask(self, message: object) -> object:
        """Waits for the answer of `Doer.answer`.

        Raises:
            WorkerLostError: There will be none.
        """

    def end(self) -> None:
        """Lets it go: it has no more to do, or is lost."""

    def stop(self) -> None:
        """Ends it now, whatever it is at; whoever waits for an answer of it learns that it is lost."""


class Executor(Protocol):
    """Where workers live.

    Attributes:
        n: How many there are to be.
    """

    n: int

    def worker(self) -> Remote:
        """Starts one; does not wait until it is ready."""

    def __enter__(self) -> Executor: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True)
class Workers:
    """Who shares a study's work.

    Attributes:
        spec: The model, as `attnscope.load` takes it by name: each worker loads it.
        n: How many workers there are; None = as many as there is room for on Ray's machines.
        threads: How many threads each computes with. Results are those of one process with as many threads.
        executor: "local", processes of this machine; "ray", actors of a Ray cluster.
        address: Of the cluster; None = as Ray finds it, else one that is started on this machine.
        loading: How the model is loaded.
    """

    spec: str
    n: int | None = None
    threads: int = 1
    executor: Where = "local"
    address: str | None = None
    loading: LoadOptions = LoadOptions()

    def __post_init__(self) -> None:
        if self.executor not in get_args(Where):
            raise UsageError(f"there is no executor {self.executor!r}", f"choose one of {', '.join(get_args(Where))}")
        if self.address is not None and self.executor != "ray":
            raise UsageError("--ray-address is an address of Ray", "add --executor ray")
        if self.executor == "local" and self.n is None:
            raise UsageError("how many processes are to work is not said", "give --workers")
        for what, number in (("workers", self.n), ("threads", self.threads)):
            if number is not None and number > MOST_COUNT:
                raise UsageError(f"{number:,} {what} are more than any machine has", f"choose at most {MOST_COUNT:,}")
            if number is not None and number < 1:
                raise UsageError(f"{number} {what} do nothing", f"choose at least 1, or leave out --{what}")

    def open(self, device: str = "cpu", files: tuple[int, ...] = ()) -> Executor:
        """Where they live; to be used as a context manager. Local processes hold `files` open too.

        Raises:
            AttnscopeError: Ray is not installed, or cannot be reached.
        """
        if self.executor == "ray":
            from attnscope.studies.running.ray import RayExecutor

            return RayExecutor(self.n, self.threads, self.address, on_gpu=device.startswith("cuda"))
        from attnscope.studies.running.process import LocalExecutor

        return LocalExecutor(self.n or 1, self.threads, files)

    def model(self, model: Model) -> WorkersModel:
        """What lets workers load this very model."""
        device = model.info.device if self.loading.device_map is None else self.loading.device
        loading = replace(self.loading, device=device)
        known_hashes = hashes() if self.executor == "local" else {}
        spec = self.spec
        if spec not in (*KNOWN, *BUILT_IN) and Path(spec).exists():
            spec = str(Path(spec).absolute())  # Ray's workers stand elsewhere
        return WorkersModel(spec, loading, self.threads, model.info.sha256, dict(versions()), known_hashes)


@dataclass(frozen=True)
class WorkersModel:
    """The model of a study, as a worker loads it: the same weights, by the same versions.

    Attributes:
        spec: Its name; a folder is the same folder on every machine.
        sha256: What its weights must hash to.
        versions: Of all that numbers may depend on.
        hashes: Of its files; see `models.files.hashes`.
    """

    spec: str
    loading: LoadOptions
    threads: int
    sha256: str
    versions: dict[str, str]
    hashes: dict[Any, str]

    def load(self) -> Model:
        """Loads it.

        Raises:
            AttnscopeError: It is not there, or another one.
        """
        import torch

        torch.set_num_threads(self.threads)
        here = dict(versions())
        other = [f"{name} {here.get(name)}, not {of}" for name, of in self.versions.items() if here.get(name) != of]
        if other:
            raise AttnscopeError(f"a worker has {other[0]}", "install the same versions on all machines")
        remember_hashes(self.hashes)
        model = self.loading.load(self.spec)
        if model.info.sha256 != self.sha256:
            raise AttnscopeError(
                f"{self.spec} has other weights on a worker ({model.info.sha256[:12]}, not {self.sha256[:12]})",
                "give a model that is the same on all machines",
            )
        return model


@dataclass(frozen=True)
class Done(Generic[T]):
    """A task, and what came of it."""

    task: T
    result: Any


@dataclass(frozen=True)
class Lost(Generic[T]):
    """A task over which TRIES workers were lost, and how the last one was."""

    task: T
    reason: str


def start_workers(executor: Executor, work: Work, tasks: Iterable[T]) -> Generator[Done[T] | Lost[T]]:
    """Has workers do tasks, and gives what comes of each as soon as it is there, in any order.

    No more workers are started than there are tasks. A task whose worker is lost is done again, by whichever worker is
    free next, up to TRIES times; in the place of a lost worker another one is started, unless TRIES in a row were lost
    before they had loaded the model. Close the iterator, and all workers end. Tasks are read as they are needed, never
    by two threads at once.

    Raises:
        AttnscopeError: The work or a task raised it, or no worker could begin.
        RuntimeError: A worker met a bug.
    """
    return _Run(executor, work, tasks).outcomes()


@dataclass
class _Attempt(Generic[T]):
    task: T
    n_lost: int = 0


class _Todo(Generic[T]):
    """Tasks that several threads may take; those that were lost come first."""

    def __init__(self, tasks: Iterator[T]) -> None:
        self._tasks, self._again, self._lock = tasks, list[_Attempt[T]](), threading.Lock()
        self._over = self._closed = False

    def take(self) -> _Attempt[T] | None:
        with self._lock:
            if self._closed:
                return None
            if self._again:
                return self._again.pop()
            for task in self._tasks:
                return None if self._closed else _Attempt(task)
            self._over = True
            return None

    def close(self) -> None:
        """Lets nobody take any more. Waits for nobody who is at it: the next text of a stream may be long in coming."""
        self._closed = True

    def put_back(self, attempt: _Attempt[T]) -> None:
        with self._lock:
            self._again.append(attempt)

    @property
    def over(self) -> bool:
        """Whether there is no more, as far as is known."""
        with self._lock:
            return self._over and not self._again


class _Hand(threading.Thread, Generic[T]):
    """Hands tasks to one worker.

    Into `results` it puts (attempt, answer) for each task; what else was raised; and at its very end itself. Then
    `lost` is why the worker is lost, if it is, and `at` the task that it was at; `waits` says that it waits for one.
    """

    def __init__(self, remote: Remote, work: Work, todo: _Todo[T], results: queue.SimpleQueue[Any]) -> None:
        super().__init__(daemon=True)
        self.remote, self._work, self._todo, self._results = remote, work, todo, results
        self.at: _Attempt[T] | None = None
        self.lost = ""
        self.ready = self.waits = False

    def run(self) -> None:
        try:
            _require_well(self.remote.ask(self._work))
            self.ready = True
            while (attempt := self._take()) is not None:
                self.at = attempt
                answer = _require_well(self.remote.ask(attempt.task))
                self.at = None
                self._results.put((attempt, answer))
        except WorkerLostError as error:
            self.lost = str(error)
        except BaseException as error:  # of the worker, or of whoever makes the tasks: for the main thread to raise
            self._results.put(error)
        finally:
            self.remote.end()
            self._results.put(self)

    def _take(self) -> _Attempt[T] | None:
        self.waits = True
        attempt = self._todo.take()
        self.waits = False
        return attempt

    def join_unless_waiting(self) -> None:
        """Waits for its end, but not while it waits for a task: it takes none any more, and ends with the process."""
        while self.is_alive() and not self.waits:
            self.join(0.05)


def _require_well(answer: object) -> object:
    """An answer that is none of what went wrong."""
    if isinstance(answer, Failure):
        raise WorkerLostError(answer.reason) if answer.memory else RuntimeError(f"in a worker: {answer.reason}")
    if isinstance(answer, AttnscopeError):
        raise answer
    return answer


class _Run(Generic[T]):
    """The doing of tasks by workers."""

    def __init__(self, executor: Executor, work: Work, tasks: Iterable[T]) -> None:
        self._executor, self._work, self._tasks = executor, work, iter(tasks)
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._hands: list[_Hand[T]] = []
        self._begun = False
        self._n_in_vain = 0

    def outcomes(self) -> Generator[Done[T] | Lost[T]]:
        first = list(islice(self._tasks, self._executor.n))
        self._todo = _Todo(chain(first, self._tasks))
        try:
            for _ in first:
                self._start()
            while self._hands:
                met = self._results.get()
                if isinstance(met, BaseException):
                    raise met
                if isinstance(met, _Hand):
                    yield from self._without(met)
                else:
                    yield Done(met[0].task, met[1])
        finally:
            self._todo.close()
            stops = [threading.Thread(target=hand.remote.stop) for hand in self._hands]
            for each in stops:  # all at once, as each may take its time
                each.start()
            for each in stops:
                each.join()
            for hand in self._hands:
                hand.join_unless_waiting()

    def _start(self) -> None:
        hand = _Hand(self._executor.worker(), self._work, self._todo, self._results)
        self._hands.append(hand)
        hand.start()

    def _without(self, hand: _Hand[T]) -> Iterator[Lost[T]]:
        """Goes on without a worker that has ended: in its place another one, if it was lost and there is more to do."""
        hand.join()
        self._hands.remove(hand)
        self._begun |= hand.ready
        if not hand.lost:
            return
        if hand.at is not None:
            hand.at.n_lost += 1
            if hand.at.n_lost < TRIES:
                self._todo.put_back(hand.at)
            else:
                yield Lost(hand.at.task, f"{hand.lost}; tried {TRIES} times")
        self._n_in_vain = 0 if hand.ready else self._n_in_vain + 1
        if self._todo.over:
            return
        if hand.ready or self._n_in_vain < TRIES:
            self._start()
        elif not self._hands:
            if not self._begun:
                raise AttnscopeError(
                    f"no worker could load the model: {hand.lost}; tried {self._n_in_vain} in a row",
                    "with fewer --workers more memory is left for each",
                )
            while (left := self._todo.take()) is not None:
                yield Lost(left.task, f"no worker is left: {hand.lost}")
