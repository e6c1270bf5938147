"""Threads take turns with a model: one reentrant lock per model, looked up by its torch modules.

A forward pass changes a model and restores it: its attention function, its hooks and the forwards of its blocks. Two
threads at once would restore each other's changes. So a thread takes a turn before it runs a model or hooks into it. A
turn lasts for one pass, not for a whole study, and is never kept over a `yield` to a study.

Locks are always taken in one order: the switches of transformers (`hf.parts.silence`), then models, then the names that
`inside.around` watches. Knows torch and nothing else.
"""

import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

_locks: "weakref.WeakKeyDictionary[nn.Module, tuple[threading.RLock, ...]]" = weakref.WeakKeyDictionary()
_registering = threading.Lock()


def share_lock(roots: "Iterable[nn.Module]") -> None:
    """Give all modules of a model one lock: the one that some of them already have, or a new one.

    Models that have modules in common share it, such as two that were loaded from one torch module. So do models that
    were built from one configuration object: a pass sets the attention function there. Where parts had locks of their
    own, the whole and its parts take all of these.
    """
    modules = {module for root in roots for module in root.modules()}
    configs = {
        id(vars(module)["config"]) for module in modules if vars(module).get("config") is not None
    }
    with _registering:
        # Every lock that any related module has already; a pass takes all of them.
        kin = modules | {module for module in _locks if id(vars(module).get("config")) in configs}
        locks = {lock for module in kin for lock in _locks.get(module, ())} or {threading.RLock()}
        shared = _in_order(locks)
        for module in modules:
            _locks[module] = shared


@contextlib.contextmanager
def take_turn(modules: "Iterable[nn.Module]") -> Iterator[None]:
    """Within it, no other thread runs these modules' models through attnscope, nor hooks into them.

    The same thread may take its turn again inside. The turn ends with the context, also after an error.
    """
    modules = list(modules)
    if any(module not in _locks for module in modules):
        share_lock(modules)
    with _hold(_in_order({lock for module in modules for lock in _locks[module]})):
        yield


def _in_order(locks: "Iterable[threading.RLock]") -> "tuple[threading.RLock, ...]":
    """Return locks in one order for all threads, so that no two wait for each other."""
    return tuple(sorted(locks, key=id))


@contextlib.contextmanager
def _hold(locks: "Sequence[threading.RLock]") -> Iterator[None]:
    # Nested, not pushed onto an ExitStack: there an interruption could fall between taking a lock and noting it.
    if not locks:
        yield
        return
    with locks[0], _hold(locks[1:]):
        yield
