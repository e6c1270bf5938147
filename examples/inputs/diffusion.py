"""A tiny diffusion transformer in plain torch: which patches of a noisy picture each patch attends to.

Draw it with `python examples/inputs/diffusion.py`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attnscope


class Block(nn.Module):
    """Self-attention and an MLP, both shifted and scaled by the time step (adaLN, Peebles & Xie 2023)."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.modulate = nn.Linear(width, 4 * width)

    def forward(self, patches: Tensor, time: Tensor) -> Tensor:
        """Patches (batch, patch, width) and times (batch, width) -> patches."""
        shift, scale, gate, gate_mlp = self.modulate(time)[:, None].chunk(4, -1)
        normed = F.layer_norm(patches, patches.shape[-1:]) * (1 + scale) + shift
        query, key, value = (
            x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for x in self.qkv(normed).chunk(3, -1)
        )
        joined = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        patches = patches + gate * self.out(joined)
        return patches + gate_mlp * self.mlp(F.layer_norm(patches, patches.shape[-1:]))


class TinyDiT(nn.Module):
    """Predicts the noise in pictures of 16 x 16 from patches of 4 x 4."""

    def __init__(self, width: int = 32, n_heads: int = 4, n_layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, 4)
        self.positions = nn.Parameter(torch.randn(16, width))
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, n_heads) for _ in range(n_layers))
        self.head = nn.Linear(width, 16)

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        """Pictures (batch, 1, 16, 16) and times (batch,) -> noise of each patch, (batch, patch, 16)."""
        patches = self.patches(noisy).flatten(2).mT + self.positions
        for block in self.blocks:
            patches = block(patches, self.time(time[:, None]))
        return self.head(patches)


def example():
    """A random TinyDiT, 12 noisy pictures at different times, and the grid of patches."""
    torch.manual_seed(0)
    return TinyDiT(), (torch.randn(12, 1, 16, 16), torch.linspace(0, 1, 12)), (4, 4)


if __name__ == "__main__":
    network, pictures, grid = example()
    model = attnscope.load(network, inputs=pictures, labels=grid)
    print(*attnscope.heatmap(model, "0").draw("diffusion", ["png"]), sep="\n")
