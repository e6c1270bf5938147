"""How an induction head comes to be: a small decoder learns bigrams in context, and its heads are followed.

    python -m examples.induction            # a minute or two on two cores; writes induction/

Each sequence is a Markov chain of its own: what follows each of 8 words is drawn anew from a Dirichlet distribution
(concentration 0.3). Nothing can be known of a sequence but by counting in it, so that the best prediction counts what
followed the current word before: the *bigram loss* below is that of this Bayesian prediction. A decoder of one layer
can count words, not what followed them. One of two layers can: a head of layer 0 writes to each word which one stood
before it, and a head of layer 1 looks for the words that stood after the current one: induction (Elhage et al. 2021,
Olsson et al. 2022). It learns that suddenly, after a time in which it counts words (Bietti et al. 2023, Edelman et al.
2024, whose task this is).
"""

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import attnscope
from examples.decoder import decoder

WORDS, LENGTH, CONCENTRATION = 8, 96, 0.3
BATCH, STEPS, RATE = 32, 600, 0.003
SAVED = (0, 25, 50, 75, 100, 125, 150, 175, 200, 225, 250, 275, 300, 350, 400, 500, 600)
TEXTS = 200
"""Sequences on which checkpoints are compared, which no model is trained on."""


def chains(n: int, seed: int) -> Iterator[Tensor]:
    """Batches of n sequences without end: (n, LENGTH) numbers of words, each row from a chain of its own."""
    chance = np.random.default_rng(seed)
    rows = np.arange(n)
    while True:
        following = chance.dirichlet(np.full(WORDS, CONCENTRATION), (n, WORDS)).cumsum(2)
        draws, ids = chance.random((n, LENGTH)), np.empty((n, LENGTH), np.int64)
        ids[:, 0] = chance.integers(WORDS, size=n)
        for place in range(1, LENGTH):
            beyond = draws[:, place, None] > following[rows, ids[:, place - 1]]
            ids[:, place] = beyond.sum(1).clip(max=WORDS - 1)
        yield torch.from_numpy(ids)


def bigram_loss(ids: Tensor) -> float:
    """The least loss that any prediction can have, in nats: (n of a, b before + c) / (n of a before + WORDS * c)."""
    counts = torch.full((len(ids), WORDS, WORDS), CONCENTRATION)
    rows, losses = torch.arange(len(ids)), []
    for now, following in zip(ids.T, ids.T[1:], strict=False):
        losses.append(counts[rows, now].sum(1).log() - counts[rows, now, following].log())
        counts[rows, now, following] += 1
    return torch.stack(losses).mean().item()


def unigram_loss(ids: Tensor) -> float:
    """Return the loss of counting words alone: (n of b before + 1) / (n of words before + WORDS)."""
    counts = torch.ones(len(ids), WORDS)
    rows, losses = torch.arange(len(ids)), []
    for now, following in zip(ids.T, ids.T[1:], strict=False):
        counts[rows, now] += 1
        losses.append(counts.sum(1).log() - counts[rows, following].log())
    return torch.stack(losses).mean().item()


def model_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean loss of the prediction of each next word."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@dataclass(frozen=True)
class Run:
    """One training."""

    n_layers: int
    seed: int
    folder: Path
    saved: Sequence[int] = SAVED

    def train(self) -> Path:
        """Train a decoder, and save it at some steps as folder/checkpoint-STEP."""
        torch.set_num_threads(1)  # matrices this small are not computed faster by two
        network = decoder(WORDS, n_layers=self.n_layers, n_heads=2, d_model=64, seed=self.seed)
        optimizer = torch.optim.AdamW(network.parameters(), RATE, betas=(0.9, 0.98), weight_decay=0.01)
        slower = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda n: min(1, (n + 1) / 20) * (1 - n / STEPS) ** 0.5
        )
        for step, ids in zip(range(STEPS + 1), chains(BATCH, 1000 + self.seed), strict=False):
            if step in self.saved:
                network.save(self.folder / f"checkpoint-{step}")
            loss = model_loss(network(ids), ids)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            slower.step()
        return self.folder


def held_out() -> Tensor:
    """Return the sequences on which checkpoints are compared."""
    return next(chains(TEXTS, 999))


def texts_of(ids: Tensor) -> list[str]:
    """Sequences as texts: the words are the numbers."""
    return [" ".join(map(str, row)) for row in ids.tolist()]


def main() -> None:
    """Train one layer and two, and draw what became of their heads."""
    parser = argparse.ArgumentParser(
        description="Trains decoders on in-context bigrams, and draws their heads."
    )
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("induction"), help="folder for checkpoints and figures"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    runs = [Run(n, given.seed, given.out / f"{n}-layer{'s' * (n > 1)}") for n in (2, 1)]
    with ProcessPoolExecutor(len(runs), get_context("spawn")) as pool:
        list(pool.map(Run.train, runs))
    ids = held_out()
    print(
        f"counting words: {unigram_loss(ids):.3f} nats; bigrams, the least possible: {bigram_loss(ids):.3f} nats"
    )
    for run in runs:
        options = attnscope.TrainingOptions(("previous_token", "induction"))
        found = attnscope.training(f"{run.folder}/checkpoint-*", texts_of(ids), options)
        found.save(run.folder / "training.npz")
        print(f"{run.folder.name}: {found.table('checkpoints')['loss'][-1]:.3f} nats at the last step")
        for role in found.table("roles")["name"].tolist():
            print(f"  {role}: {found.since(role)}")
        print(*found.draw(run.folder, ["png"]))


if __name__ == "__main__":
    main()
