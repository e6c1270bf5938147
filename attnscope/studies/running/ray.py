"""Connect to a Ray cluster, and count the workers that it has room for. Needs the extra [ray]."""

from __future__ import annotations

import importlib
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attnscope.errors import AttnscopeError, first_line
from attnscope.host import safe_path

_PATIENCE_S = 5
"""Seconds that an address of Ray may take to answer."""


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
    if ray.is_initialized():
        yield ray
        return
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
