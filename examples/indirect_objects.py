"""How heads find the indirect object: the smallest decoders that learn it, and what patching says of them.

    python -m examples.indirect_objects     # a minute on one core; writes indirect-objects/

*Mary John ; John to* goes on with *Mary*: of two names the one that does not come again, in either order. The decoders
have neither feed-forward networks nor norms: the logits are a sum over heads. Adhikari 2025 (arXiv 2510.25013) found
how such models do it, and patching on pairs shows the same:

- One layer of two heads: an additive and a contrastive head. One writes the first two names to the last token. The
  other also reads the name that comes again, and takes it back. The heads do not read each other, so that their effects
  add up exactly.
- Two layers of one head: layer 0 reads the name that comes again, and layer 1 attends away from it. The path between
  them goes through queries, as that of S-inhibition heads to name movers in GPT-2 (Wang et al. 2023). Some seeds find
  another way, through values.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import attnscope
from examples.decoder import DecoderModel, decoder, wrap

NAMES = (
    "Mary",
    "John",
    "Tom",
    "James",
    "Anna",
    "Paul",
    "Peter",
    "David",
    "Sarah",
    "Emma",
    "Kate",
    "Mark",
    "Jack",
    "Lucy",
    "Alice",
    "Bob",
    "Michael",
    "Robert",
    "Daniel",
    "Laura",
)
VOCABULARY = (*NAMES, ";", "to")
SHAPES = ((1, 2), (2, 1))
"""Layers, and heads of each."""
BATCH, STEPS, RATE = 128, 1000, 0.01
SLOWER = 0.03
"""How fast queries and keys learn beside the rest. Else both heads settle on the first two names before either has
found the third word, and the model never learns which of the two comes again."""


def sentences() -> Tensor:
    """Return all of them: (sentence, 6) numbers of words, the last one the answer."""
    n = len(NAMES)
    return torch.tensor(
        [
            (first, second, n, again, n + 1, first + second - again)
            for first in range(n)
            for second in range(n)
            if first != second
            for again in (first, second)
        ]
    )


@dataclass(frozen=True)
class Run:
    """One training."""

    n_layers: int
    n_heads: int
    seed: int

    def train(self) -> tuple[DecoderModel, float]:
        """Train a decoder on three quarters of the sentences.

        Returns:
            The decoder as a model for attnscope, and the share of the other sentences that it answers right.
        """
        network = decoder(
            VOCABULARY,
            n_layers=self.n_layers,
            n_heads=self.n_heads,
            d_model=16,
            positions="learned",
            norm=False,
            max_tokens=5,
            seed=self.seed,
        )
        chance = torch.Generator().manual_seed(self.seed)
        every = sentences()
        held_out = torch.rand(len(every), generator=chance) < 0.25
        seen, unseen = every[~held_out], every[held_out]
        groups: dict[bool, list[Tensor]] = {True: [], False: []}
        for name, parameter in network.named_parameters():
            groups["q_proj" in name or "k_proj" in name].append(parameter)
        optimizer = torch.optim.AdamW(
            [{"params": groups[True], "lr": SLOWER * RATE}, {"params": groups[False]}],
            RATE,
            betas=(0.9, 0.98),
            weight_decay=0.01,
        )
        slower = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda n: min(1, (n + 1) / 50) * (1 - n / STEPS) ** 0.5
        )
        for _ in range(STEPS):
            ids = seen[torch.randint(len(seen), (BATCH,), generator=chance)]
            loss = torch.nn.functional.cross_entropy(network(ids[:, :-1])[:, -1], ids[:, -1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            slower.step()
        with torch.inference_mode():
            right = network(unseen[:, :-1])[:, -1].argmax(1) == unseen[:, -1]
        return wrap(network), right.double().mean().item()


def pairs(question: str, n: int = 100, seed: int = 0) -> Iterator[dict[str, str]]:
    """Pairs for patching.

    Args:
        question: "again": in the corrupt text the other person comes again; which head knows who it is? "names":
            another person is in the place of the indirect object; which head brings the name?
        n: How many.
        seed: Of the names.
    """
    chance = np.random.default_rng(seed)
    for _ in range(n):
        giver, taker, other = chance.choice(NAMES, 3, replace=False).tolist()
        first, second = (giver, taker) if chance.random() < 0.5 else (taker, giver)
        clean = f"{first} {second} ; {giver} to"
        if question == "again":
            yield {
                "clean": clean,
                "corrupt": f"{first} {second} ; {taker} to",
                "right": taker,
                "wrong": giver,
            }
        else:
            yield {
                "clean": clean,
                "corrupt": clean.replace(taker, other),
                "right": taker,
                "wrong": other,
            }


def main() -> None:
    """Train both shapes, and print which heads and paths carry the answer."""
    parser = argparse.ArgumentParser(
        description="Trains decoders to find the indirect object, and patches them."
    )
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("indirect-objects"), help="folder for what is written"
    )
    parser.add_argument("--seed", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for shape in SHAPES:
        folder = given.out / f"{shape[0]}-layer-{shape[1]}-head"
        model, right = Run(*shape, given.seed).train()
        print(f"{folder.name}: {right:.0%} of the held-out sentences are right")
        for question in ("again", "names"):
            found = attnscope.patch(model, list(pairs(question)), attnscope.PatchOptions(paths=2))
            found.save(folder / f"{question}.npz")
            shares = zip(found.head_names, found["heads"]["share"], strict=True)
            print(f"  {question}: " + ", ".join(f"{name} {share:.2f}" for name, share in shares))
            paths = found.table("paths")
            for row in range(len(paths)):
                through = f" through its {paths['by'][row]}" if paths["by"][row] else ""
                print(
                    f"    {paths['sender'][row]} to {paths['receiver'][row]}{through}: {paths['share'][row]:.2f}"
                )


if __name__ == "__main__":
    main()
