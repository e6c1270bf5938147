"""Put back the attributes, buffers and settings of a model after a forward pass that changed them.

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

_HOLDERS = frozenset({dict, OrderedDict, list, set})


@contextlib.contextmanager
def restore_state(model: nn.Module, configs: Iterable[Any]) -> Iterator[None]:
    """Put back all that is no parameter: attributes of modules, submodules, buffers, hooks, and settings of configs.

    The global random states of torch (on the CPU and the model's device) and NumPy are put back too: BigBird draws the
    blocks that it attends to, and a caller's own draws must not depend on what is looked at.

    Buffers are put back as the tensors that they were; what is written into one stays. Those of a model that
    accelerate spreads over devices are left to it, which moves them.
    """
    # Copies of the containers, not of their contents: buffers stay the same tensors.
    owners = [vars(module) for module in model.modules()] + [vars(config) for config in configs]
    before = [(holder, holder.copy()) for attributes in owners for holder in (attributes, *_holders_in(attributes))]
    of_numpy = np.random.get_state()  # noqa: NPY002 - the one that models draw from
    try:
        with fork_rng(device_of(model)):
            yield
    finally:
        np.random.set_state(of_numpy)  # noqa: NPY002
        for holder, content in before:
            # No content that is to stay is ever away: another thread may be reading it.
            if isinstance(holder, list):
                holder[:] = content
                continue
            holder.update(content)
            for extra in [key for key in holder if key not in content]:
                (holder.discard if isinstance(holder, set) else holder.pop)(extra)


def _holders_in(attributes: dict[str, Any]) -> list[Any]:
    """Return the dictionaries, lists and sets among a module's attributes."""
    left_alone = {"_parameters", "_buffers"} if "_hf_hook" in attributes else {"_parameters"}
    return [value for name, value in attributes.items() if type(value) in _HOLDERS and name not in left_alone]
