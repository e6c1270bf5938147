"""Run a function over blocks in processes of this machine, or on a Ray cluster (extra [ray]).

A worker is a process that loads the model once, and then runs one block of texts after the other. `Workers` holds how
many workers share a study, and how each loads the model. An executor starts the workers and hands them blocks. If a
worker dies over a block, another worker runs the block again. After MAX_RUNS deaths the block is given up. An executor
knows no model and no measure: `studies.run` merges the results of blocks.
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
from contextlib import AbstractContextManager, ExitStack, contextmanager
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

# What starts a worker, runs blocks in it, explains its death and kills it: here, or on a Ray cluster.
_Worker: TypeAlias = "_Process | _Actor"
MAX_COUNT = 4096
"""The most workers or threads; a larger number is taken for a typing mistake."""

MAX_RUNS = 3
"""How often a block is run before it is given up, since its worker dies; and how many starts in a row may fail."""

LOAD_REQUEST = None
"""Sent to a worker in place of its first block: it loads what all blocks need. No block is None."""

_CONNECT_TIMEOUT_S = 5
"""How long to wait until a Ray cluster answers."""


@dataclass(frozen=True)
class Workers:
    """Hold how many workers share a study, where they run, and how each loads the model.

    Attributes:
        spec: The name of the model, as `attnscope.load` takes it.
        n: How many workers there are; None = one, or on Ray as many as the cluster has room for.
        threads: How many threads each worker uses. Results equal those of one process with this many threads.
        executor: "local" = processes of this machine; "ray" = processes of a Ray cluster.
        address: With Ray, the address of the cluster; None = one that Ray finds, else one started on this machine.
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
        uses_gpu = device.startswith("cuda")
        return RayCluster(self.n, self.threads, self.address, uses_gpu)

    def loader(self, model: Model) -> Callable[[], Model]:
        """Return a function that loads this model in a worker. It refuses another version of it, and can be pickled."""
        # Workers of Ray run in other folders, so a path must be absolute.
        spec = self.spec
        if spec not in (*CATALOG, *BUILT_IN) and Path(spec).exists():
            spec = str(Path(spec).absolute())
        settings = replace(self, spec=spec, loading=replace(self.loading, device=model.info.device))
        # Workers on this machine need not hash the model's files again. Another machine has files of its own.
        known_hashes = dict(SHA256_BY_FILE) if self.executor == "local" else {}
        return partial(_load_same, settings, model.info.sha256, versions(), known_hashes)


def _load_same(
    settings: Workers, sha256: str, wanted_versions: dict[str, str], known_hashes: dict[Any, str]
) -> Model:
    """Load a model in a worker. Its weights and library versions must be those of the process that started the worker.

    Args:
        settings: The name of the model, how it is loaded, and the number of threads. If the name is a folder, it must
            have the same path on every machine.
        sha256: The hash that its weights must have.
        wanted_versions: The version that each library must have.
        known_hashes: Hashes of the model's files that are known already; see `models.files.SHA256_BY_FILE`.

    Raises:
        AttnscopeError: This machine has no such model, or the model or a library differs.
    """
    import torch

    # Results depend on threads, versions and weights, so they are all the same in each worker.
    torch.set_num_threads(settings.threads)
    for name, version in versions().items():
        if version != wanted_versions.get(name):
            raise AttnscopeError(
                f"a worker has {name} {version}, not {wanted_versions.get(name)}",
                "install the same versions on all machines",
            )
    SHA256_BY_FILE.update(known_hashes)
    model = settings.loading.load(settings.spec)
    if model.info.sha256 != sha256:
        raise AttnscopeError(
            f"{settings.spec} has other weights on a worker ({model.info.sha256[:12]}, not {sha256[:12]})",
            "give a model that is the same on all machines",
        )
    return model


# Executors


class WorkerFunction(Protocol):
    """Describe the function that workers run. Each worker gets a pickled copy, and keeps it for all of its blocks."""

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
        death_reason: Why the worker of the last run died, such as "its process died; tried 3 times"; empty = there was
            no run, or the last run gave the result. If a block is yielded with a reason, it was given up.
        n_deaths: How many workers have died over it.
    """

    number: int
    block: Any
    result: Any = None
    death_reason: str = ""
    n_deaths: int = 0


class Executor(ABC):
    """Run blocks in processes somewhere, one per worker."""

    @abstractmethod
    def _open(
        self, function: WorkerFunction
    ) -> AbstractContextManager[tuple[int, Callable[[], _Worker]]]:
        """Enter a context in which workers can start; yield the most that may run, and a function that starts one."""

    def map_blocks(
        self, function: WorkerFunction, blocks: Iterable[Any]
    ) -> Generator[BlockOutcome, None, None]:
        """Run a function over blocks, and yield each with its result as soon as it is done, in any order.

        Blocks are read as workers need them. After Ctrl-C, the finished blocks are yielded, and then KeyboardInterrupt
        is raised. All workers end when the iterator is closed.

        Raises:
            AttnscopeError: The function raised it, or no worker could start.
        """
        # A task is a BlockOutcome without a result. The result is filled in once the block is done.
        unread_tasks = (BlockOutcome(number, block) for number, block in enumerate(blocks))
        # The workers that wait for a block.
        idle_workers: list[_Worker] = []
        # The workers that are loading, and those that run a block, by the future of the call.
        loading_workers: dict[Future[Any], _Worker] = {}
        busy_workers: dict[Future[Any], tuple[_Worker, BlockOutcome]] = {}
        n_failed_starts = 0
        # `workers_to_end` ends every worker that is added to it, however this block is left.
        with self._open(function) as (n_workers, start_worker), ExitStack() as workers_to_end:
            try:
                # Tasks that wait for a worker: at first one for each.
                waiting_tasks = list(islice(unread_tasks, n_workers))
                while waiting_tasks or busy_workers:
                    # Give tasks to idle workers. Start a worker for each task that is left, less those that load now.
                    while waiting_tasks and idle_workers:
                        task = waiting_tasks.pop(0)
                        worker = idle_workers.pop()
                        busy_workers[worker.run(task.block)] = worker, task
                    while len(loading_workers) < len(waiting_tasks):
                        worker = start_worker()
                        workers_to_end.callback(worker.end)
                        loading_workers[worker.run(LOAD_REQUEST)] = worker
                    ended = wait([*loading_workers, *busy_workers], return_when=FIRST_COMPLETED).done
                    # Take the blocks that are done, or whose worker has died.
                    for future in ended & busy_workers.keys():
                        worker, task = busy_workers.pop(future)
                        task.result, task.death_reason = _result_or_death_reason(worker, future)
                        if task.death_reason:
                            task.n_deaths += 1
                        else:
                            idle_workers.append(worker)
                        # After a death, run the block again before all others. The next run replaces the reason.
                        if task.death_reason and task.n_deaths < MAX_RUNS:
                            waiting_tasks.insert(0, task)
                        else:
                            yield task
                    # Take the workers that have loaded, or died while they loaded.
                    for future in ended & loading_workers.keys():
                        worker = loading_workers.pop(future)
                        _, death_reason = _result_or_death_reason(worker, future)
                        if death_reason:
                            n_failed_starts += 1
                        else:
                            n_failed_starts = 0
                            idle_workers.append(worker)
                        if n_failed_starts == MAX_RUNS:
                            hint = "choose fewer --workers, so that more memory is left for each"
                            raise AttnscopeError(f"no worker could load the model: {death_reason}", hint)
                    # Read blocks until there is again one for each worker, running or waiting.
                    n_unfilled = max(0, n_workers - len(busy_workers) - len(waiting_tasks))
                    waiting_tasks += islice(unread_tasks, n_unfilled)
            except KeyboardInterrupt:
                # Yield the blocks that were finished after the last call of `wait`.
                finished = [
                    future for future in busy_workers if future.done() and not future.exception()
                ]
                for future in finished:
                    _, task = busy_workers[future]
                    task.result = future.result()
                    task.death_reason = ""
                    yield task
                raise


def _result_or_death_reason(worker: _Worker, future: Future[Any]) -> tuple[Any, str]:
    """Return what the function returned and "", or None and why the worker died. After any error the worker is ended.

    Raises:
        Exception: The function raised it; the worker had not died. A MemoryError counts as a death instead.
    """
    try:
        return future.result(), ""
    except Exception as error:
        worker.end()
        # Ray wraps an error of the function in a RayTaskError, and keeps the error as its `cause`.
        if isinstance(getattr(error, "cause", error), MemoryError):
            reason = "its process ran out of memory"
        else:
            reason = worker.reason_of_death(error)
        # Callers show the reason only after the last run, so it may name the number of all runs from the first on.
        return None, f"{reason}; tried {MAX_RUNS} times"


def _thread_variables(n_threads: int) -> dict[str, str]:
    """Return environment variables that limit the threads of numerical libraries. Libraries read them at import."""
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(n_threads))


class _BlockRunner:
    """Hold the function in a worker process, and run it on blocks."""

    def __init__(self, pickled: bytes) -> None:
        use_headless_matplotlib()
        self._function: WorkerFunction = pickle.loads(pickled)

    def run(self, block: Any) -> Any:
        """Return the result of a block; for LOAD_REQUEST, load what all blocks need."""
        return self._function.load() if block is LOAD_REQUEST else self._function(block)


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
    """Hold one worker process of this machine. A pool of one process shows which block broke it."""

    def __init__(self, n_threads: int, pickled: bytes) -> None:
        self._n_threads = n_threads
        context = multiprocessing.get_context("spawn")
        # A pool's locks start a process of their own, Python's resource tracker. It must start safely too.
        with _safe_start(n_threads):
            self._pool = ProcessPoolExecutor(1, context, _begin_process, (pickled,))
        self._processes: list[Any] = []

    def run(self, block: Any) -> Future[Any]:
        """Return the future of a block or of LOAD_REQUEST; the process starts at the first call."""
        with _safe_start(self._n_threads):
            try:
                future = self._pool.submit(_run_block, block)
            except BrokenProcessPool as error:
                # The process died while it was idle. The future reports that, as for a death over a block.
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
    """Protect processes that start in this context from Ctrl-C, and from importing the user's files.

    They import no module from the working folder. They do not import the user's script either, which might run its work
    a second time: multiprocessing imports `__main__` by default.
    """
    # An empty module stands in for the script.
    main_module = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        with block_interrupts(), safe_import_path(**_thread_variables(n_threads)):
            yield
    finally:
        sys.modules["__main__"] = main_module


_block_runner: _BlockRunner
"""Runs the blocks in this process, if it is a worker. `_begin_process` sets it."""


def _begin_process(pickled: bytes) -> None:
    """Set up this process as a worker; `pickled` is the pickled function."""
    global _block_runner
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Redirect stdout (1) to stderr (2), since libraries may print. Stdout is for the command's result.
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _block_runner = _BlockRunner(pickled)


def _end_with_parent() -> None:
    """End this process when the one that started it ends, however that happens."""
    # `join` waits until the parent ends. `_exit` then skips all clean-up, which may hang.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_block(block: Any) -> Any:
    """Return the result of a block in this worker; see `_BlockRunner.run`."""
    return _block_runner.run(block)


# A Ray cluster


@dataclass(frozen=True)
class RayCluster(Executor):
    """Run blocks in actors of a Ray cluster. An actor is a process that holds an object, here a `_BlockRunner`.

    If this process is connected to a cluster already, this cluster is used, and stays connected.

    Attributes:
        n_workers: How many workers there are; None = as many as the cluster has room for.
        n_threads: How many threads each worker uses. It claims the same number of processors.
        address: The address of the cluster; None = a cluster that Ray finds, else one started on this machine.
        uses_gpu: Whether each worker claims a GPU.
    """

    n_workers: int | None
    n_threads: int
    address: str | None
    uses_gpu: bool = False

    @contextmanager
    def _open(self, function: WorkerFunction) -> Iterator[tuple[int, Callable[[], _Worker]]]:
        with connect(self.address) as ray:
            n_workers = self._count_workers(ray.cluster_resources())
            actor = ray.remote(
                num_cpus=self.n_threads,
                num_gpus=int(self.uses_gpu),
                runtime_env={"env_vars": _thread_variables(self.n_threads)},
            )(_BlockRunner)
            # `put` stores the function in the cluster, so that it is sent to each machine only once.
            function_ref = ray.put(pickle.dumps(function))
            yield n_workers, lambda: _Actor(ray, actor.remote(function_ref))

    def _count_workers(self, resources: Mapping[str, float]) -> int:
        """Return how many workers there will be, from the cluster's number of processors ("CPU") and GPUs.

        Raises:
            AttnscopeError: The cluster has room for fewer than are wanted, or for none.
        """
        # Count the places for workers. Each needs one processor per thread, and perhaps a GPU.
        n_places = int(resources.get("CPU", 0)) // self.n_threads
        if self.uses_gpu:
            n_places = min(n_places, int(resources.get("GPU", 0)))
        n_workers = self.n_workers or max(1, n_places)
        if n_places < n_workers:
            gpus = " and a GPU each" if self.uses_gpu else ""
            raise AttnscopeError(
                f"Ray has room for {n_places} workers, not for {n_workers} of {amount(self.n_threads, 'thread')}{gpus}",
                "choose fewer --workers or --threads, or add machines",
            )
        return n_workers


class _Actor:
    """Hold the handle of an actor on the cluster: run blocks in it, and kill it."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self._actor = actor

    def run(self, block: Any) -> Future[Any]:
        """Return the future of a block or of LOAD_REQUEST."""
        running: Future[Any] = self._actor.run.remote(block).future()
        return running

    def reason_of_death(self, error: Exception) -> str:
        """Return Ray's message on why the process or its machine died. An error of the function is raised again."""
        ray_exceptions = self._ray.exceptions
        if isinstance(error, ray_exceptions.RayTaskError) or not isinstance(
            error, ray_exceptions.RayError
        ):
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
    # Ray sends usage statistics unless this variable is 0.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise AttnscopeError("--executor ray needs Ray", "pip install 'attnscope[ray]'") from None
    # Use the connection of this process if it has one.
    if ray.is_initialized():
        yield ray
        return
    _require_reachable(address)
    # Keep Ray from printing anything, even warnings about the cluster's setup.
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
    # Ray raises errors of many unrelated classes.
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
    """Refuse an address where no server answers: Ray would try for minutes, and then end this process."""
    # For None and these words Ray finds or starts a cluster itself.
    if address is None or address in ("auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S):
            pass
    except (OSError, ValueError, OverflowError) as error:
        raise AttnscopeError(
            f"Ray cannot be reached at {address}: {first_line(error)}",
            "give an address such as 10.0.0.1:6379, as `ray start` prints it",
        ) from None
