"""Run code with torch's default settings, whatever the caller has set: no autocast or inference mode, device CPU.

The module does not import torch, which takes a second. If nobody has imported torch, nobody has changed its settings.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def default_torch_settings() -> Iterator[None]:
    """Switch off the caller's autocast, inference mode and default device within a `with` block.

    Autocast would lower the precision of products. Inference mode computes no gradients, which some studies need. A
    default device of the caller would hold new tensors that the model cannot use; "meta" holds no numbers at all.
    """
    torch = sys.modules.get("torch")
    with ExitStack() as stack:
        if torch is not None:
            # Autocast has a switch for each type of device.
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
"""Decorate public functions with it, so that they compute in the precision that their results state."""
