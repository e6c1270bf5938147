"""What a model holds besides its parameters, put back after a forward pass that changed it.

Some models change themselves as they run: BigBird's block-sparse layers become full ones at the first short text and
stay so, rotary tables grow with the longest text. What is shown of a text would then depend on the texts before it,
and a model in memory would not be left as it is.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from torch import nn

from attnscope.models.devices import device_of, fork_rng

_Holder = dict[Any, Any] | list[Any] | set[Any]
_HOLDERS = frozenset({dict, OrderedDict, list, set})


@contextlib.contextmanager
def restore_state(model: nn.Module, configs: Iterable[Any]) -> Iterator[None]:
    """Put back all that is no parameter: attributes of modules, submodules, buffers, hooks, and settings of configs.

    The global random states of torch (on the CPU and the model's device) and NumPy are put back too: BigBird draws the
    blocks that it attends to, and a caller's own draws must not depend on what is looked at.

    Buffers are put back as the tensors that they were; what is written into one stays. Those of a model that
    accelerate spreads over devices are left to it, which moves them.
    """
    owners = [vars(module) for module in model.modules()] + [vars(config) for config in configs]
    before = [(attributes, dict(attributes), _inner(attributes)) for attributes in owners]
    of_numpy = np.random.get_state()  # noqa: NPY002 - the one that models draw from
    try:
        with fork_rng(device_of(model)):
            yield
    finally:
        np.random.set_state(of_numpy)  # noqa: NPY002
        for attributes, values, holders in before:
            if not _same(attributes, values):
                _set(attributes, values)
            for holder, content in holders:
                if not _same(holder, content):
                    _put(holder, content)


def _inner(attributes: dict[str, Any]) -> list[tuple[_Holder, _Holder]]:
    """Return the dictionaries, lists and sets among a module's attributes, each with a copy."""
    left_alone = attributes.get("_parameters")
    buffers = attributes.get("_buffers") if "_hf_hook" in attributes else None
    return [
        (value, value.copy())
        for value in attributes.values()
        if type(value) in _HOLDERS and value is not left_alone and value is not buffers
    ]


def _same(holder: _Holder, content: _Holder) -> bool:
    """Return whether a holder has the very objects that it had, or equal ones that can be compared at once."""
    if len(holder) != len(content):
        return False
    try:
        return bool(holder == content)
    except (RuntimeError, ValueError, TypeError):  # tensors and arrays do not say yes or no
        return False


def _put(holder: _Holder, content: _Holder) -> None:
    holder.clear()
    if isinstance(holder, list):
        holder.extend(content)
    else:
        holder.update(content)


def _set(attributes: dict[str, Any], values: dict[str, Any]) -> None:
    """As `_put`, but no attribute that is to stay is ever away: another thread may be reading it."""
    attributes.update(values)
    for name in attributes.keys() - values.keys():
        del attributes[name]
