"""torch as records name it, whatever its caller has set: no autocast, no inference mode, tensors on the processor.

Knows of torch only what is imported already: where it is not, its caller has set nothing.
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
    """Within it, the caller's autocast, inference mode and default device do not reach what is computed.

    Autocast would lower the precision of products; inference mode keeps no gradients, which some studies need; on
    another default device numbers would be made that no model is given (and on "meta" none at all).
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


def with_plain_torch(study: Callable[P, R]) -> Callable[P, R]:
    """A function of the public interface that computes as records say; see `leave_settings_aside`."""

    @functools.wraps(study)
    def run(*given: P.args, **named: P.kwargs) -> R:
        with leave_settings_aside():
            return study(*given, **named)

    return run
