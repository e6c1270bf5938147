"""torch with its default settings, whatever the caller has set: no autocast, no inference mode, tensors on the CPU.

It does not import torch: if nobody has imported it, nobody has changed its settings.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def default_torch_settings() -> Iterator[None]:
    """Switch the caller's autocast, inference mode and default device off within a `with` block.

    Autocast would lower the precision of products. Inference mode keeps no gradients, which some studies need. Another
    default device would hold new tensors that the model does not use (and "meta" holds no numbers at all).
    """
    torch = sys.modules.get("torch")
    with ExitStack() as stack:
        if torch is not None:
            # Autocast is set by type of device.
            device_types = ["cpu"]
            accelerator = torch.accelerator.current_accelerator()
            if accelerator is not None:
                device_types.append(accelerator.type)
            for device_type in device_types:
                if torch.is_autocast_enabled(device_type):
                    stack.enter_context(torch.autocast(device_type, enabled=False))
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(False))
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
        yield


with_default_torch = default_torch_settings()
"""A decorator for functions of the public interface: they compute in the precision that results name."""
