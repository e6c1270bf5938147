"""A transformers model under evaluation: others call it, and a probe is at its seam all the same."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core.attention.seam import Probe
from attnscope.errors import AttnscopeError
from attnscope.models.hf.network import Network
from attnscope.models.hf.seam import is_in_progress, perform
from attnscope.records import Tokens

ProbeOf = Callable[[Sequence[Tokens], NDArray[np.bool_]], Probe]
"""Makes a probe of the texts of a batch, and where in it their tokens are, (text, token), bool."""


@contextlib.contextmanager
def probe_forwards(network: Network, probe_of: ProbeOf) -> Iterator[Any]:
    """Within it, each forward pass of a model has a probe at its seam, made of the tokens that it reads.

    Args:
        network: The model, whose attention passes the seam.
        probe_of: Makes the probe.

    Yields:
        The torch module, with its head. Parts of it that are called by themselves are probed too.

    Raises:
        AttnscopeError: In a forward pass: it reads no token numbers, or attnscope itself runs the model.
    """
    # The outermost of these that is called makes the probe: some heads call only a part of the base.
    modules = list(dict.fromkeys([network.model, network.base]))
    is_running = False

    def probe(forward: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(forward).parameters)

        @functools.wraps(forward)  # whoever calls it may ask for its signature
        def run(*args: Any, **named: Any) -> Any:
            nonlocal is_running
            if is_running:
                return forward(*args, **named)
            if is_in_progress():
                raise AttnscopeError(
                    f"attnscope runs {network.info.name} while its attention is replaced", "leave the context first"
                )
            given = dict(zip(names, args, strict=False)) | named
            at_seam = probe_of(*_texts(network, given))
            is_running = True
            try:
                return perform(network.base, given, network.found.plan, at_seam, through=forward)
            finally:
                is_running = False

        return run

    before = [vars(module).get("forward") for module in modules]
    for module in modules:
        module.forward = probe(module.forward)
    try:
        yield network.model
    finally:
        for module, forward in zip(modules, before, strict=True):
            if forward is None:  # the class's own is behind it
                del module.forward
            else:
                module.forward = forward


def _texts(network: Network, given: Mapping[str, Any]) -> tuple[list[Tokens], NDArray[np.bool_]]:
    """The texts of a batch, and where in it their tokens are."""
    ids = given.get("input_ids")
    if ids is None:
        raise AttnscopeError(f"{network.info.name} is given no token numbers here", "pass input_ids")
    numbers, mask = ids.cpu().numpy(), given.get("attention_mask")
    if mask is not None and mask.ndim != 2:
        raise AttnscopeError(f"the attention mask has {mask.ndim} dimensions", "pass one of (batch, token)")
    real = np.ones(numbers.shape, np.bool_) if mask is None else mask.cpu().numpy() > 0
    if real.shape != numbers.shape:
        raise AttnscopeError(
            f"the model reads {numbers.shape[1]} tokens and is told of {real.shape[1]}: it continues cached ones",
            "pass use_cache=False",
        )
    hidden = network.tokenizer.mask_id
    made = [network.tokenizer.encode_ids(row[kept].tolist()) for row, kept in zip(numbers, real, strict=True)]
    # A hidden token stands for an ordinary one.
    return [replace(one, special=one.special & (one.ids != hidden)) for one in made], real
