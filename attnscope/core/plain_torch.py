"""torch with its default settings, whatever the caller has set: no autocast, no inference mode, tensors on the CPU.

It does not import torch: if nobody has imported it, nobody has changed its settings.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def leave_settings_aside() -> Iterator[None]:
    """Within it, the caller's autocast, inference mode and default device have no effect.

    Autocast would lower the precision of products. Inference mode keeps no gradients, which some studies need. Another
    default device would hold new tensors that the model does not use (and "meta" holds no numbers at all).
    """
    torch = sys.modules.get("torch")
    with ExitStack() as stack:
        if torch is not None:
            accelerator = torch.accelerator.current_accelerator()
            for kind in ("cpu", *(() if accelerator is None else (accelerator.type,))):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(False))
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
        yield


@contextmanager
def keep_settings() -> Iterator[None]:
    """After it, the precision, device, gradients, threads and random state (CPU) of torch are as before."""
    import torch

    device, dtype = torch.get_default_device(), torch.get_default_dtype()
    has_gradients, n_threads = torch.is_grad_enabled(), torch.get_num_threads()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(has_gradients)
        torch.set_num_threads(n_threads)


def with_plain_torch(study: Callable[P, R]) -> Callable[P, R]:
    """A function of the public interface that computes as records say; see `leave_settings_aside`."""

    @functools.wraps(study)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with leave_settings_aside():
            return study(*args, **kwargs)

    return run
