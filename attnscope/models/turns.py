"""Whose turn it is with a model: one reentrant lock for each, found by its torch modules.

A forward pass changes a model and puts it back: which attention function it names, its hooks, the forwards of its
blocks. Two threads that did so at once would put back what the other one had changed. So whoever runs a model or hooks
into it takes its turn first. A turn lasts for one pass, not for a whole study, and is never kept over a `yield` to a
study.

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
    """Gives all modules of a model one lock: the one that some of them have already, else a new one.

    Models that have modules in common share it, such as two that were loaded from one torch module. Where parts had
    locks of their own, the whole and its parts take all of these.
    """
    modules = {module for root in roots for module in root.modules()}
    with _registering:
        locks = {lock for module in modules for lock in _locks.get(module, ())} or {threading.RLock()}
        shared = _in_order(locks)
        for module in modules:
            _locks[module] = shared


@contextlib.contextmanager
def take_turn(modules: "Iterable[nn.Module]") -> Iterator[None]:
    """Within it, no other thread runs these modules' models through attnscope, nor hooks into them.

    One thread may take it again. It ends with the context, whatever is raised there.
    """
    modules = list(modules)
    if any(module not in _locks for module in modules):
        share_lock(modules)
    with _hold(_in_order({lock for module in modules for lock in _locks[module]})):
        yield


def _in_order(locks: "Iterable[threading.RLock]") -> "tuple[threading.RLock, ...]":
    """One order for all threads, so that no two wait for each other."""
    return tuple(sorted(locks, key=id))


@contextlib.contextmanager
def _hold(locks: "Sequence[threading.RLock]") -> Iterator[None]:
    # Nested, not pushed onto an ExitStack: there an interruption could fall between taking a lock and noting it.
    if not locks:
        yield
        return
    with locks[0], _hold(locks[1:]):
        yield
