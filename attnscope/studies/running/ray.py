"""Workers that are actors of Ray, where the extra [ray] is installed: a model in each, on any machine of a cluster."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import socket
from typing import Any

from attnscope.errors import AttnscopeError, first_line
from attnscope.studies.running.worker import Doer, WorkerLostError

_PATIENCE_S = 5


class RayExecutor:
    """Actors of a Ray cluster. If this process speaks with a cluster already, that one is used, and stays.

    Args:
        n: How many actors; None = as many as the cluster has room for.
        threads: How many threads each computes with, and processors it claims.
        address: The address of the cluster; None = as Ray finds it, else one that is started on this machine.
        on_gpu: Whether each claims a GPU.

    Raises:
        AttnscopeError: Ray is not installed, cannot be reached, or has too few processors or GPUs.
    """

    def __init__(self, n: int | None, threads: int, address: str | None, *, on_gpu: bool = False) -> None:
        self._ray: Any = ray()
        self._threads, self._n_gpus = threads, int(on_gpu)
        self._joined = not self._ray.is_initialized()
        if self._joined:
            self._join(address)
        try:
            self.n = self._room(n)
        except AttnscopeError:
            self.__exit__()
            raise

    def __enter__(self) -> RayExecutor:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._joined:
            self._ray.shutdown()

    def worker(self) -> RayWorker:
        """Starts an actor."""
        # It is not restarted by Ray, which would not give it its work again.
        how = {"num_cpus": self._threads, "num_gpus": self._n_gpus, "max_restarts": 0, "max_task_retries": 0}
        return RayWorker(self._ray, self._ray.remote(**how)(Actor).remote(self._threads))

    def _join(self, address: str | None) -> None:
        """Speaks with a cluster, or starts one."""
        _require_reachable(address)
        try:
            self._ray.init(
                address=address, include_dashboard=False, log_to_driver=False, configure_logging=False,
                logging_level=logging.ERROR,
            )  # fmt: skip
        except Exception as error:  # Ray raises what its many parts raise
            where = f"Ray at {address}" if address else "Ray"
            raise AttnscopeError(
                f"{where} cannot be used: {first_line(error)}", "see that `ray status` finds it, with the same versions"
            ) from None

    def _room(self, n: int | None) -> int:
        """How many workers there will be."""
        has: dict[str, float] = self._ray.cluster_resources()
        room = int(has.get("CPU", 0)) // self._threads
        if self._n_gpus:
            room = min(room, int(has.get("GPU", 0)))
        if room < (n or 1):
            needed = f"{n or 1} of {self._threads} thread{'s' * (self._threads > 1)}"
            raise AttnscopeError(
                f"Ray has room for {room} workers, not for {needed}{' and a GPU each' * self._n_gpus}",
                "choose fewer --workers or --threads, or add machines",
            )
        return n or room


class RayWorker:
    """An actor, seen from outside; see `Remote`."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor

    def ask(self, message: object) -> object:
        """Sends a message, and waits for its answer."""
        try:
            return self._ray.get(self._actor.answer.remote(message))
        except self._ray.exceptions.RayTaskError as error:
            raise WorkerLostError(first_line(error.cause if hasattr(error, "cause") else error)) from None
        except (self._ray.exceptions.RayError, ValueError) as error:
            raise WorkerLostError(_how_it_died(error)) from None

    def end(self) -> None:
        """Ends the actor."""
        self.stop()

    def stop(self) -> None:
        """Ends the actor, whatever it is at."""
        with contextlib.suppress(Exception):  # it may be dead, or Ray out of reach
            self._ray.kill(self._actor)


class Actor:
    """What runs in Ray's process."""

    def __init__(self, threads: int) -> None:
        # Before torch is loaded; Ray itself sets the first to the processors that an actor claims.
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ[name] = str(threads)
        os.environ["MPLBACKEND"] = "agg"
        self._doer = Doer()

    def answer(self, message: object) -> object:
        """See `Doer.answer`."""
        return self._doer.answer(message)


def ray() -> Any:
    """The module ray.

    Raises:
        AttnscopeError: It is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody that was not asked for
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise AttnscopeError("--executor ray needs Ray", "pip install 'attnscope[ray]'") from None


def _require_reachable(address: str | None) -> None:
    """Refuses an address where nobody answers: Ray would try for minutes, and then end the process."""
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


def _how_it_died(error: Exception) -> str:
    """Why an actor is gone, in one line: Ray tells it in many."""
    reason = str(error)
    if "OOM" in type(error).__name__ or "OutOfMemory" in type(error).__name__:
        return "its process was ended by Ray for want of memory"
    return "its process died" + (": perhaps for want of memory" if "OOM" in reason else f": {first_line(error)}")
