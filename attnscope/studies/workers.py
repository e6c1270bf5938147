"""Run a function over blocks in processes of this machine, or on a Ray cluster (extra [ray]).

`Workers` holds how many processes share a study, and how each loads the same model. An executor starts one process per
worker and hands it one block after the other. If a worker dies over a block, another one runs the block again, and
after RUNS deaths it is given up. An executor knows no model and no measure: `studies.run` merges the results of blocks.
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
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args

from attnscope.errors import AttnscopeError, UsageError, amount, first_line, require_choice
from attnscope.host import block_interrupts, safe_import_path, use_headless_matplotlib
from attnscope.models.catalog import BUILT_IN, CATALOG
from attnscope.models.files import SHA256_BY_FILE
from attnscope.models.info import versions
from attnscope.studies.inputs.options import LoadOptions

if TYPE_CHECKING:
    from attnscope.models import Model

ExecutorName = Literal["local", "ray"]

_Worker: TypeAlias = "_Process | _Actor"

MAX_COUNT = 4096
"""The most workers or threads; a larger number is taken for a typing mistake."""

RUNS = 3
"""How often a block is tried before it is given up, because its worker dies; and how many starts in a row may fail."""

LOAD = None
"""What a worker gets in place of its first block: it loads what all blocks need."""

_PATIENCE_S = 5
"""Seconds that a Ray cluster may take to answer."""


@dataclass(frozen=True)
class Workers:
    """Hold how many workers share a study, where they run, and how each loads the model.

    Attributes:
        spec: The name of the model, as `attnscope.load` takes it.
        n: How many workers there are; None = one, or on Ray as many as the cluster has room for.
        threads: How many threads each computes with. Results are those of one process with so many threads.
        executor: "local" = processes of this machine; "ray" = processes of a Ray cluster.
        address: With Ray, the address of the cluster; None = the one that Ray finds, else one started on this machine.
        loading: How the model is loaded.
    """

    spec: str
    n: int | None = None
    threads: int = 1
    executor: ExecutorName = "local"
    address: str | None = None
    loading: LoadOptions = LoadOptions()

    def __post_init__(self) -> None:
        require_choice("executor", self.executor, get_args(ExecutorName))
        for name, number in (("workers", self.n), ("threads", self.threads)):
            if number is not None and not 1 <= number <= MAX_COUNT:
                raise UsageError(f"--{name} is {number:,}", f"it must be from 1 to {MAX_COUNT:,}")

    def executor_on(self, device: str) -> Executor:
        """Return the executor for a model on a device; on Ray, each worker of a CUDA device claims a GPU."""
        if self.executor == "local":
            return Processes(self.n or 1, self.threads)
        on_gpu = device.startswith("cuda")
        return RayCluster(self.n, self.threads, self.address, on_gpu)

    def loader(self, model: Model) -> Callable[[], Model]:
        """Return a function that loads this model in a worker, and refuses another version of it; it can be pickled."""
        # Workers of Ray run in other folders, so a path must be absolute.
        spec = self.spec
        if spec not in (*CATALOG, *BUILT_IN) and Path(spec).exists():
            spec = str(Path(spec).absolute())
        workers = replace(self, spec=spec, loading=replace(self.loading, device=model.info.device))
        # Workers on this machine need not hash the model's files again.
        known_hashes = dict(SHA256_BY_FILE) if self.executor == "local" else {}
        return partial(_load_same, workers, model.info.sha256, versions(), known_hashes)


def _load_same(
    workers: Workers, sha256: str, wanted_versions: dict[str, str], known_hashes: dict[Any, str]
) -> Model:
    """Load a model in a worker, and require the weights and libraries of the process that started the worker.

    Args:
        workers: The name of the model, and how it is loaded; a folder is the same folder on every machine.
        sha256: The hash that its weights must have.
        wanted_versions: The version that each library must have.
        known_hashes: Hashes of its files that are known already; see `models.files.SHA256_BY_FILE`.

    Raises:
        AttnscopeError: There is no such model on this machine, or it or a library differs.
    """
    import torch

    # Results depend on threads, versions and weights, so they are all the same in each worker.
    torch.set_num_threads(workers.threads)
    for name, version in versions().items():
        if version != wanted_versions.get(name):
            raise AttnscopeError(
                f"a worker has {name} {version}, not {wanted_versions.get(name)}",
                "install the same versions on all machines",
            )
    SHA256_BY_FILE.update(known_hashes)
    model = workers.loading.load(workers.spec)
    if model.info.sha256 != sha256:
        raise AttnscopeError(
            f"{workers.spec} has other weights on a worker ({model.info.sha256[:12]}, not {sha256[:12]})",
            "give a model that is the same on all machines",
        )
    return model


# Executors


class WorkerFunction(Protocol):
    """Describe the function that workers run. Each gets a pickled copy, and keeps it for all of its blocks."""

    def load(self) -> None:
        """Load what all blocks need, such as a model; called once, before the first block."""

    def __call__(self, block: Any, /) -> Any:
        """Return the result of a block."""


@dataclass
class BlockOutcome:
    """Hold a block and, once it was run, its result.

    Attributes:
        number: The number of the block, from 0.
        block: The block.
        result: What the function returned; None if the block was given up.
        lost: Why the block was given up; empty = it was not.
        n_deaths: How many workers have died over it.
    """

    number: int
    block: Any
    result: Any = None
    lost: str = ""
    n_deaths: int = 0


class Executor(ABC):
    """Run blocks in processes somewhere, one per worker."""

    @abstractmethod
    def _open(
        self, function: WorkerFunction
    ) -> AbstractContextManager[tuple[int, Callable[[], _Worker]]]:
        """Yield how many workers may run at a time, and a function that starts one."""

    def map_blocks(
        self, function: WorkerFunction, blocks: Iterable[Any]
    ) -> Generator[BlockOutcome, None, None]:
        """Run a function over blocks, and yield each with its result as soon as it is done, in any order.

        Blocks are read as workers need them. After Ctrl-C, the finished blocks are yielded, and then KeyboardInterrupt
        is raised. All workers end when the iterator is closed.

        Raises:
            AttnscopeError: The function raised it, or no worker could begin.
        """
        # A task is the outcome of a block, which is filled in once it is done.
        unread = (BlockOutcome(number, block) for number, block in enumerate(blocks))
        # Blocks that wait for a worker.
        waiting: list[BlockOutcome] = []
        # All workers, and those that wait for a block.
        started: list[_Worker] = []
        idle: list[_Worker] = []
        # The workers that load the function, and those at work on a block, each by the future of what it does.
        loading: dict[Future[Any], _Worker] = {}
        busy: dict[Future[Any], tuple[_Worker, BlockOutcome]] = {}
        n_failed_starts = 0
        with self._open(function) as (n_workers, start):
            try:
                while True:
                    # Read a block for each worker that may be without one: never more than `n_workers` at once.
                    waiting += islice(unread, max(0, n_workers - len(busy) - len(waiting)))
                    if not waiting and not busy:
                        return
                    # Give blocks to idle workers. For each block that is left, have a worker loading.
                    while waiting and idle:
                        task = waiting.pop(0)
                        worker = idle.pop()
                        busy[worker.run(task.block)] = worker, task
                    for _ in range(len(waiting) - len(loading)):
                        worker = start()
                        started.append(worker)
                        loading[worker.run(LOAD)] = worker
                    ended = wait([*loading, *busy], return_when=FIRST_COMPLETED).done
                    # Blocks that are done, or whose worker has died. `lost` counts only if the block is given up.
                    for future in ended & busy.keys():
                        worker, task = busy.pop(future)
                        task.result, task.lost = _result_or_death(worker, future)
                        if task.lost:
                            task.n_deaths += 1
                        else:
                            idle.append(worker)
                        # Run a lost block again, before all others; in the end give it up.
                        if task.lost and task.n_deaths < RUNS:
                            waiting.insert(0, task)
                        else:
                            yield task
                    # Workers that have loaded, or died of it.
                    for future in ended & loading.keys():
                        worker = loading.pop(future)
                        _, death = _result_or_death(worker, future)
                        if death:
                            n_failed_starts += 1
                        else:
                            n_failed_starts = 0
                            idle.append(worker)
                        if n_failed_starts == RUNS:
                            hint = "choose fewer --workers, so that more memory is left for each"
                            raise AttnscopeError(f"no worker could load the model: {death}", hint)
            except KeyboardInterrupt:
                # Yield the blocks that were finished since the last wait.
                for future, (_, task) in busy.items():
                    if future.done() and not future.exception():
                        task.result = future.result()
                        task.lost = ""
                        yield task
                raise
            finally:
                for worker in started:
                    worker.end()


def _result_or_death(worker: _Worker, future: Future[Any]) -> tuple[Any, str]:
    """Return the result of a future and "", or None and why the worker died. A dead worker is ended.

    Raises:
        Exception: The function raised it.
    """
    try:
        return future.result(), ""
    except Exception as error:
        worker.end()
        # Ray wraps what the function raised in a RayTaskError, whose `cause` it is.
        if isinstance(getattr(error, "cause", error), MemoryError):
            reason = "its process ran out of memory"
        else:
            reason = worker.reason_of_death(error)
        return None, f"{reason}; tried {RUNS} times"


def _thread_variables(n_threads: int) -> dict[str, str]:
    """Return the variables by which libraries learn, as they are loaded, how many threads they may use."""
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(n_threads))


class _Server:
    """Hold the function in the process of a worker, and run it on blocks."""

    def __init__(self, pickled: bytes) -> None:
        use_headless_matplotlib()
        self._function: WorkerFunction = pickle.loads(pickled)

    def run(self, block: Any) -> Any:
        """Return the result of a block; for LOAD, load what all blocks need."""
        return self._function.load() if block is LOAD else self._function(block)


# Processes of this machine


@dataclass(frozen=True)
class Processes(Executor):
    """Run blocks in processes of this machine, `n_workers` of them with `n_threads` each."""

    n_workers: int
    n_threads: int

    @contextmanager
    def _open(self, function: WorkerFunction) -> Iterator[tuple[int, Callable[[], _Worker]]]:
        pickled = pickle.dumps(function)
        yield self.n_workers, lambda: _Process(self.n_threads, pickled)


class _Process:
    """Hold a process of this machine as a pool of one process: if the pool breaks, it is clear which block broke it."""

    def __init__(self, n_threads: int, pickled: bytes) -> None:
        self._n_threads = n_threads
        context = multiprocessing.get_context("spawn")
        # The locks of a pool start a process too: Python's resource tracker.
        with _safe_start(n_threads):
            self._pool = ProcessPoolExecutor(1, context, _begin_process, (pickled,))
        self._processes: list[Any] = []

    def run(self, block: Any) -> Future[Any]:
        """Return the future of a block or of LOAD; the process starts at the first call."""
        with _safe_start(self._n_threads):
            try:
                future = self._pool.submit(_run, block)
            except BrokenProcessPool as error:
                # The process has died while it was idle.
                future = Future()
                future.set_exception(error)
        # Keep the process for its exit status: a broken pool forgets it.
        self._processes = self._processes or list(self._pool._processes.values())
        return future

    def reason_of_death(self, error: Exception) -> str:
        """Return why the process died, by its exit status. An error that the function raised is raised again."""
        if not isinstance(error, BrokenProcessPool):
            raise error
        for process in self._processes:
            process.join()
            # The kernel kills with signal 9, usually because memory runs out.
            if process.exitcode == -9:
                return "its process was killed by signal 9: perhaps for want of memory"
            if process.exitcode:
                return f"its process ended with status {process.exitcode}"
        return "its process died"

    def end(self) -> None:
        """Kill the process, whatever it is doing."""
        for process in self._processes:
            process.kill()
        self._pool.shutdown(cancel_futures=True)


@contextmanager
def _safe_start(n_threads: int) -> Iterator[None]:
    """Let processes start within this context that Ctrl-C does not reach, and that import nothing of the user's.

    They import no module of the working folder. Nor do they import the user's script, which may do its work again:
    multiprocessing would import it by default.
    """
    # Multiprocessing imports `__main__`. An empty module stands in for it.
    main_module = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        with block_interrupts(), safe_import_path(**_thread_variables(n_threads)):
            yield
    finally:
        sys.modules["__main__"] = main_module


_server: _Server
"""Runs the blocks in this process, if it is a worker: `_begin_process` sets it."""


def _begin_process(pickled: bytes) -> None:
    """Set up this process as a worker; `pickled` is the function."""
    global _server
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What libraries print goes to stderr: stdout is for the command's result.
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _server = _Server(pickled)


def _end_with_parent() -> None:
    """End this process when the one that started it ends, however that happens."""
    # `join` waits for the parent's end. `_exit` then skips all cleaning up, which may hang.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run(block: Any) -> Any:
    """Return the result of a block in this worker; see `_Server.run`."""
    return _server.run(block)


# A Ray cluster


@dataclass(frozen=True)
class RayCluster(Executor):
    """Run blocks in actors of a Ray cluster, which are processes that hold an object.

    If this process is connected to a cluster already, that one is used, and stays connected.

    Attributes:
        n_workers: How many workers there are; None = as many as the cluster has room for.
        n_threads: How many threads each computes with; it claims as many processors.
        address: The address of the cluster; None = the one that Ray finds, else a cluster started on this machine.
        on_gpu: Whether each worker claims a GPU.
    """

    n_workers: int | None
    n_threads: int
    address: str | None
    on_gpu: bool = False

    @contextmanager
    def _open(self, function: WorkerFunction) -> Iterator[tuple[int, Callable[[], _Worker]]]:
        with connect(self.address) as ray:
            n_workers = self._count_workers(ray.cluster_resources())
            actor = ray.remote(
                num_cpus=self.n_threads,
                num_gpus=int(self.on_gpu),
                runtime_env={"env_vars": _thread_variables(self.n_threads)},
            )(_Server)
            # As an object of the cluster, the function is sent to each machine only once.
            function_ref = ray.put(pickle.dumps(function))
            yield n_workers, lambda: _Actor(ray, actor.remote(function_ref))

    def _count_workers(self, resources: Mapping[str, float]) -> int:
        """Return how many workers there will be, from the cluster's number of processors ("CPU") and GPUs.

        Raises:
            AttnscopeError: The cluster has room for fewer than are wanted, or for none.
        """
        # Each worker claims as many processors as it has threads, and perhaps a GPU.
        room = int(resources.get("CPU", 0)) // self.n_threads
        if self.on_gpu:
            room = min(room, int(resources.get("GPU", 0)))
        n_workers = self.n_workers or max(1, room)
        if room < n_workers:
            gpus = " and a GPU each" if self.on_gpu else ""
            raise AttnscopeError(
                f"Ray has room for {room} workers, not for {n_workers} of {amount(self.n_threads, 'thread')}{gpus}",
                "choose fewer --workers or --threads, or add machines",
            )
        return n_workers


class _Actor:
    """Hold an actor of the cluster from afar: run blocks in it, and kill it."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self._actor = actor

    def run(self, block: Any) -> Future[Any]:
        """Return the future of a block or of LOAD."""
        running: Future[Any] = self._actor.run.remote(block).future()
        return running

    def reason_of_death(self, error: Exception) -> str:
        """Return why the process or its machine died, as Ray says it. An error of the function is raised again."""
        known = self._ray.exceptions
        if isinstance(error, known.RayTaskError) or not isinstance(error, known.RayError):
            raise getattr(error, "cause", error)
        return f"its process died: {first_line(error)}"

    def end(self) -> None:
        """Kill the process."""
        self._ray.kill(self._actor)


@contextmanager
def connect(address: str | None) -> Iterator[Any]:
    """Connect to a cluster, or start one, unless this process is connected already; yield the module `ray`.

    Raises:
        AttnscopeError: Ray is not installed, or cannot be reached.
    """
    # Ray sends statistics of its use unless it is told not to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise AttnscopeError("--executor ray needs Ray", "pip install 'attnscope[ray]'") from None
    # Use the connection of this process if it has one.
    if ray.is_initialized():
        yield ray
        return
    # Connect to the cluster at an address where somebody answers, or start one.
    _require_reachable(address)
    # Ray shall print nothing, not even warnings of how the cluster is set up.
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        with safe_import_path():
            ray.init(
                address=address,
                logging_level=logging.ERROR,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
            )
    # Ray's parts raise errors of many kinds.
    except Exception as error:
        raise AttnscopeError(
            f"Ray cannot be used: {first_line(error)}",
            "see that `ray status` finds it, with the same versions",
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _require_reachable(address: str | None) -> None:
    """Refuse an address where nobody answers: Ray would try for minutes, and then end this process."""
    # Ray finds or starts a cluster for these itself.
    if address is None or address in ("auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), _PATIENCE_S):
            pass
    except (OSError, ValueError, OverflowError) as error:
        raise AttnscopeError(
            f"Ray cannot be reached at {address}: {first_line(error)}",
            "give an address such as 10.0.0.1:6379, as `ray start` prints it",
        ) from None
