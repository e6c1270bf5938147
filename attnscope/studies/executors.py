"""Run a function over blocks: in processes of this machine, or on a Ray cluster (needs the extra [ray]).

An executor hands out blocks and gives back what came of each. It knows no model and no measure: the function brings
them along. Whoever asks adds up, in the order of the blocks (`studies.run`).

Blocks are read as workers need them. A block whose worker dies is run again, at most twice, and then given up.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar

from attnscope.errors import AttnscopeError, first_line
from attnscope.host import block_interrupts, safe_path, tame_matplotlib

RUNS = 3
"""How many workers may die over a block before it is given up."""

AHEAD = 4
"""How many blocks per worker are read beyond the first one that is not done. So memory stays bounded."""

_PATIENCE_S = 5
"""Seconds that an address of Ray may take to answer."""

B = TypeVar("B")


class Function(Protocol):
    """Measure each block. A worker gets a pickled copy and keeps it for all of its blocks."""

    def load(self) -> None:
        """Load what all blocks need, such as a model, unless that is done."""

    def __call__(self, block: Any, /) -> Any:
        """Return what comes of a block."""


@dataclass(frozen=True)
class Outcome(Generic[B]):
    """Hold the outcome of a block.

    Attributes:
        number: Its place among the blocks, from 0.
        result: What the function returned; None if the block was given up.
        lost: Why it was given up; empty if it was not.
    """

    number: int
    block: B
    result: Any
    lost: str = ""


class Executor(Protocol):
    """Run blocks somewhere: in processes or on a cluster."""

    def map_blocks(self, function: Function, blocks: Iterable[B]) -> Generator[Outcome[B], None, None]:
        """Run a function over blocks, and yield what came of each as soon as it is there, in any order.

        Ctrl-C yields the blocks that are done, and then raises KeyboardInterrupt. All workers end when the iterator is
        closed.

        Raises:
            AttnscopeError: The function raised it, or no worker could begin.
        """


class _Todo(Generic[B]):
    """Keep the blocks that were read and are not done, and count the workers that died over each.

    Attributes:
        pending: These blocks, by number.
        suspects: Those of them over which a worker may have died. They run one at a time.
    """

    def __init__(self, blocks: Iterable[B], n_workers: int) -> None:
        self.pending: dict[int, B] = {}
        self.suspects: set[int] = set()
        self._queue: deque[int] = deque()
        self._n_deaths: Counter[int] = Counter()
        self._unread = enumerate(blocks)
        self._n_read = 0
        self._n_ahead = AHEAD * n_workers

    def has_more(self) -> bool:
        """Return whether any block is not done. This may read one."""
        if not self.pending:
            number = self.take()
            if number is not None:
                self._queue.append(number)
        return bool(self.pending)

    def take(self) -> int | None:
        """Return the number of a block to start; None if there is none, or if one long before it is not done."""
        # Blocks that failed before come first.
        if self._queue:
            return self._queue.popleft()
        # Stay within AHEAD blocks per worker of the oldest pending one.
        oldest = min(self.pending, default=self._n_read)
        if self._n_read - oldest >= self._n_ahead:
            return None
        for number, block in self._unread:
            self._n_read = number + 1
            self.pending[number] = block
            return number
        return None

    def finish(self, number: int, result: Any, lost: str = "") -> Outcome[B]:
        """Return the outcome of a block, which is then no longer pending."""
        self.suspects.discard(number)
        return Outcome(number, self.pending.pop(number), result, lost)

    def retry(self, running: Iterable[int], reason: str) -> Iterator[Outcome[B]]:
        """Queue all pending blocks again, as a worker died over one of those that were running.

        Yields:
            The blocks that are given up.
        """
        for number in running:
            self._n_deaths[number] += 1
            if self._n_deaths[number] == RUNS:
                yield self.finish(number, None, f"{reason}; tried {RUNS} times")
        self.suspects = set(self.pending)
        self._queue = deque(sorted(self.pending))


# Processes of this machine

_LOADING = -1
"""Stands for the number of a block: the first task of a pool loads the model, which may kill a worker, too."""

_OUT_OF_MEMORY = 12
"""The exit status of a worker that ran out of memory."""


class Processes:
    """Run blocks in processes of this machine, `n_workers` of them with `n_threads` each.

    When a process dies, its pool breaks, and every block under way looks guilty. A new pool then runs these suspects
    one at a time, so that it is known which block kills its worker.
    """

    def __init__(self, n_workers: int, n_threads: int) -> None:
        self._n_workers, self._n_threads = n_workers, n_threads

    def map_blocks(self, function: Function, blocks: Iterable[B]) -> Generator[Outcome[B], None, None]:
        """Run a function over blocks, and yield their outcomes as they come, as `Executor` says."""
        pickled = pickle.dumps(function)
        todo = _Todo(blocks, self._n_workers)
        n_failed_starts = 0
        while todo.has_more():
            running: dict[Future[Any], int] = {}
            with self._pool(pickled) as pool:
                try:
                    yield from self._run(pool, running, todo)
                except BrokenProcessPool:
                    reason = _how_it_died(pool)
                    numbers = list(running.values())
                    # A worker that dies before the first one has loaded the model says nothing about a block.
                    n_failed_starts = n_failed_starts + 1 if _LOADING in numbers else 0
                    if n_failed_starts == RUNS:
                        raise AttnscopeError(
                            f"no worker could load the model: {reason}; tried {RUNS} times",
                            "choose fewer --workers, so that more memory is left for each",
                        ) from None
                    yield from todo.retry([number for number in numbers if number != _LOADING], reason)

    def _run(self, pool: ProcessPoolExecutor, running: dict[Future[Any], int], todo: _Todo[B]) -> Iterator[Outcome[B]]:
        """Run in one pool what there is to do. `running` has the numbers of the blocks under way.

        Raises:
            BrokenProcessPool: A worker died.
        """
        # Load the model first, so that a failure to load is told from a bad block.
        running[_submit(pool, _load)] = _LOADING
        try:
            while True:
                # One block more than there are workers, so that none of them waits for this process.
                most = 1 if todo.suspects else self._n_workers + 1
                while len(running) < most and (number := todo.take()) is not None:
                    running[_submit(pool, _run_block, todo.pending[number])] = number
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield from _collect(future, running, todo)
        except KeyboardInterrupt:
            # Keep the results that are ready.
            for future in [future for future in running if future.done() and not future.exception()]:
                yield from _collect(future, running, todo)
            raise

    @contextmanager
    def _pool(self, pickled: bytes) -> Iterator[ProcessPoolExecutor]:
        """Open a pool. Its processes start as blocks are submitted, and end with it."""
        context = multiprocessing.get_context("spawn")
        with _safe_start():  # a process of its own keeps its locks
            pool = ProcessPoolExecutor(self._n_workers, context, _begin_process, (self._n_threads, pickled))
        try:
            yield pool
        except BaseException:
            # Nobody waits for what is under way. What `shutdown` lacks until Python 3.14:
            for process in list((pool._processes or {}).values()):
                process.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Submit a task, which may start a process."""
    with _safe_start():
        try:
            return pool.submit(function, *arguments)
        except OSError as error:
            raise AttnscopeError(
                f"cannot start a process: {error.strerror or error}", "choose fewer --workers"
            ) from None


@contextmanager
def _safe_start() -> Iterator[None]:
    """Start processes that Ctrl-C does not reach, and that import no numpy.py from where the user stands.

    Nor do they import the script that runs here, which multiprocessing does otherwise: it may do its work again.
    """
    main_module = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        with block_interrupts(), safe_path():
            yield
    finally:
        sys.modules["__main__"] = main_module


def _collect(future: Future[Any], running: dict[Future[Any], int], todo: _Todo[B]) -> Iterator[Outcome[B]]:
    """Take the result of a future that is done.

    Raises:
        BrokenProcessPool: A worker died; then the future counts as running.
    """
    result = future.result()
    number = running.pop(future)
    if number != _LOADING:
        yield todo.finish(number, result)


def _how_it_died(pool: ProcessPoolExecutor) -> str:
    """Return why a process of a broken pool died; the others were terminated by the pool."""
    processes = list((pool._processes or {}).values())
    pool.shutdown()
    codes = {process.exitcode or 0 for process in processes} - {0, -signal.SIGTERM}
    if _OUT_OF_MEMORY in codes:
        return "its process ran out of memory"
    if -9 in codes:
        return "its process was killed by signal 9: perhaps for want of memory"
    for code in codes:
        return f"its process was killed by signal {-code}" if code < 0 else f"its process ended with status {code}"
    return "its process died"


# What runs in a process

_function: Function | None = None
"""The function of this worker."""


def _begin_process(n_threads: int, pickled: bytes) -> None:
    """Begin a worker, before any large library is loaded."""
    global _function
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # what libraries print is none of the command's output
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _set_environment(n_threads)
    _function = pickle.loads(pickled)


def _end_with_parent() -> None:
    """End this process when the one that started it ends, however that happens."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _set_environment(n_threads: int) -> None:
    """Say how many threads libraries may use that are not loaded yet, and tame matplotlib."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(n_threads)
    tame_matplotlib()


def _load() -> None:
    """Load what blocks need."""
    assert _function is not None
    with _memory_or_death():
        _function.load()


def _run_block(block: Any) -> Any:
    """Run the function of this worker on a block."""
    assert _function is not None
    with _memory_or_death():
        _function.load()
        return _function(block)


@contextmanager
def _memory_or_death() -> Iterator[None]:
    """End this process when memory runs out, so that the block runs again in a new one."""
    try:
        yield
    except MemoryError:
        os._exit(_OUT_OF_MEMORY)


# A Ray cluster


class RayCluster:
    """Run blocks as tasks of a Ray cluster. Ray runs those whose worker or machine dies again.

    If this process is connected to a cluster already, that one is used, and stays connected.

    Args:
        n_workers: How many blocks run at a time; None = as many as the cluster has room for.
        n_threads: How many threads each computes with, and processors it claims.
        address: The address of the cluster; None = as Ray finds it, else one that is started on this machine.
        on_gpu: Whether each claims a GPU.
    """

    def __init__(self, n_workers: int | None, n_threads: int, address: str | None, *, on_gpu: bool = False) -> None:
        self._n_workers, self._n_threads, self._address = n_workers, n_threads, address
        self._n_gpus = int(on_gpu)

    def map_blocks(self, function: Function, blocks: Iterable[B]) -> Generator[Outcome[B], None, None]:
        """Run a function over blocks; see `Executor`.

        Raises:
            AttnscopeError: Ray is not installed, cannot be reached, or has too few processors or GPUs.
        """
        with connect(self._address) as ray:
            n_workers = count_room(ray, self._n_workers, self._n_threads, self._n_gpus)
            todo = _Todo(blocks, n_workers)
            task = ray.remote(
                num_cpus=self._n_threads, num_gpus=self._n_gpus, max_retries=RUNS - 1, retry_exceptions=[MemoryError]
            )(_run_on_ray)
            # In a list, it arrives as a reference: a worker gets it once, and not with every block.
            shared = [ray.put(pickle.dumps(function))]
            running: dict[Any, int] = {}
            try:
                while True:
                    # Start as many tasks as there is room for, then wait for the first result.
                    while len(running) < n_workers and (number := todo.take()) is not None:
                        running[task.remote(self._n_threads, shared, todo.pending[number])] = number
                    if not running:
                        return
                    for reference in ray.wait(list(running))[0]:
                        yield _get(ray, reference, running, todo)
            except KeyboardInterrupt:
                for reference in ray.wait(list(running), num_returns=max(1, len(running)), timeout=0)[0]:
                    yield _get(ray, reference, running, todo)
                raise
            finally:
                for reference in running:
                    ray.cancel(reference, force=True)


def _get(ray: Any, reference: Any, running: dict[Any, int], todo: _Todo[B]) -> Outcome[B]:
    """Take the result of a task that is done.

    Raises:
        Exception: What the function raised.
    """
    number = running.pop(reference)
    try:
        return todo.finish(number, ray.get(reference))
    except ray.exceptions.RayTaskError as error:
        if not isinstance(error.cause, MemoryError):
            raise error.cause from None
        reason = "its process ran out of memory"
    except ray.exceptions.OutOfMemoryError:
        reason = "its process was ended by Ray for want of memory"
    except ray.exceptions.RayError as error:
        reason = f"its process died: {first_line(error)}"
    return todo.finish(number, None, f"{reason}; tried {RUNS} times")


_on_ray: dict[str, Function] = {}
"""The function of this worker of Ray, by the name of its object."""


def _run_on_ray(n_threads: int, shared: list[Any], block: Any) -> Any:
    """Run a function on a block, in a worker of Ray. It runs the blocks of one study after the other."""
    name = shared[0].hex()
    if name not in _on_ray:
        _set_environment(n_threads)
        _on_ray.clear()
        _on_ray[name] = pickle.loads(importlib.import_module("ray").get(shared[0]))
    function = _on_ray[name]
    function.load()
    return function(block)


@contextmanager
def connect(address: str | None) -> Iterator[Any]:
    """Connect to a cluster, or start one, unless this process is connected to one; give the module ray.

    Raises:
        AttnscopeError: Ray is not installed, or cannot be reached.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody that was not asked for
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise AttnscopeError("--executor ray needs Ray", "pip install 'attnscope[ray]'") from None
    # Use the connection of this process if it has one.
    if ray.is_initialized():
        yield ray
        return
    # Connect, and leave Ray's log level as it was.
    _require_reachable(address)
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of how it is set up
    try:
        with safe_path():
            ray.init(
                address=address,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.ERROR,
            )
    except Exception as error:  # Ray raises what its many parts raise
        where = f"Ray at {address}" if address else "Ray"
        raise AttnscopeError(
            f"{where} cannot be used: {first_line(error)}", "see that `ray status` finds it, with the same versions"
        ) from None
    finally:
        logger.setLevel(level)
    try:
        yield ray
    finally:
        ray.shutdown()


def _require_reachable(address: str | None) -> None:
    """Refuse an address where nobody answers: Ray would try for minutes, and then end this process."""
    if address is None or address in ("auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise AttnscopeError(f"{address!r} is no address of Ray", "such as 10.0.0.1:6379, as `ray start` prints it")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE_S).close()
    except OSError as error:
        raise AttnscopeError(
            f"Ray cannot be reached at {address}: {error.strerror or error}", "see that `ray status` finds it"
        ) from None


def count_room(ray: Any, n_workers: int | None, n_threads: int, n_gpus: int) -> int:
    """Return how many workers there will be: those asked for, or as many as the cluster has room for.

    Raises:
        AttnscopeError: It has room for fewer, or for none.
    """
    resources: dict[str, float] = ray.cluster_resources()
    room = int(resources.get("CPU", 0)) // n_threads
    if n_gpus:
        room = min(room, int(resources.get("GPU", 0)))
    wanted = n_workers or 1
    if room < wanted:
        needed = f"{wanted} of {n_threads} thread{'s' * (n_threads > 1)}"
        raise AttnscopeError(
            f"Ray has room for {room} workers, not for {needed}{' and a GPU each' * n_gpus}",
            "choose fewer --workers or --threads, or add machines",
        )
    return n_workers or room
