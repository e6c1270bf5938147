"""PatchTST on sine waves: which earlier patch of a series each patch attends to.

Study its heads with `python examples/inputs/patchtst.py`.
"""

import torch
from transformers import PatchTSTConfig, PatchTSTModel

import attnscope


def example():
    """A small random PatchTST, 16 series of 96 steps in two channels, and the first step of each patch."""
    torch.manual_seed(0)
    config = PatchTSTConfig(
        num_input_channels=2,
        context_length=96,
        patch_length=8,
        patch_stride=8,
        d_model=32,
        num_attention_heads=4,
        num_hidden_layers=2,
        ffn_dim=32,
    )
    steps = torch.arange(96)[None, :, None]
    periods = 8 + 40 * torch.rand(16, 1, 2)
    series = torch.sin(2 * torch.pi * steps / periods) + 0.1 * torch.randn(16, 96, 2)
    return PatchTSTModel(config), {"past_values": series}, range(0, 96, 8)


if __name__ == "__main__":
    network, series, first_steps = example()
    model = attnscope.load(network, inputs=series, labels=first_steps)
    print(attnscope.heads(model, model.texts).save("heads.npz"))
