"""Lock models, so that threads take turns with them: one reentrant lock per model, looked up by its torch modules.

A forward pass changes a model and restores it: its attention function, its hooks and the forwards of its blocks. Two
threads at once would restore each other's changes. So a thread locks a model before it runs it or hooks into it. It
keeps the lock for one pass, not for a whole study: a generator must release it before it yields to a study.

A thread that needs the lock of `hf.parts.mute_transformers` too takes that one first, so that no two threads wait for
each other.
This module knows torch and nothing else.
"""

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

_locks: "weakref.WeakKeyDictionary[nn.Module, tuple[threading.RLock, ...]]" = weakref.WeakKeyDictionary()
"""The locks that a thread takes before it runs a module.

It is one lock, unless a model was put together from parts that had different locks: then it is all of theirs.
"""

_registering = threading.Lock()
"""Held while `_locks` is changed."""


def share_lock(roots: "Iterable[nn.Module]") -> None:
    """Give all modules of a model one lock: the one that some of them already have, or a new one.

    Models that have modules in common share it, such as two that were loaded from one torch module. So do models that
    were built from one configuration object, where a pass sets the attention function. If parts had different locks,
    the whole and its parts get all of them.
    """
    modules: set[nn.Module] = set()
    for root in roots:
        modules.update(root.modules())
    configs = {id(vars(module).get("config")) for module in modules}
    configs.discard(id(None))
    with _registering:
        # Collect the locks of these modules, and of modules with the same configuration.
        locks: set[threading.RLock] = set()
        for module, held_locks in _locks.items():
            if module in modules or id(vars(module).get("config")) in configs:
                locks.update(held_locks)
        shared = _in_order(locks or {threading.RLock()})
        for module in modules:
            _locks[module] = shared


@contextlib.contextmanager
def lock_model(modules: "Sequence[nn.Module]") -> Iterator[None]:
    """Keep other threads from running these modules' models, or hooking into them, until the context ends.

    They wait for their turn. The same thread may take its turn again inside.
    """
    if any(module not in _locks for module in modules):
        share_lock(modules)
    locks: set[threading.RLock] = set()
    for module in modules:
        locks.update(_locks[module])
    with _hold(_in_order(locks)):
        yield


def _in_order(locks: "Iterable[threading.RLock]") -> "tuple[threading.RLock, ...]":
    """Return locks in one order for all threads, so that no two wait for each other."""
    return tuple(sorted(locks, key=id))


@contextlib.contextmanager
def _hold(locks: "Sequence[threading.RLock]") -> Iterator[None]:
    """Take locks, and release them when the context ends."""
    # No ExitStack: Ctrl-C between taking a lock and registering it there would leave the lock taken.
    if not locks:
        yield
        return
    with locks[0], _hold(locks[1:]):
        yield
