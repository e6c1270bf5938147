"""Trainings made by hand, and trainings that leave checkpoints, without training anything for long."""

from pathlib import Path

import numpy as np
import torch

from attnscope.questions.training import Training
from attnscope.results.table import HEADS, Table
from examples.decoder import decoder, words_apart

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog"]
TEXTS = [
    "the cat sat on a mat and the cat sat",
    "a dog and a mat and a dog",
    "the dog sat on the cat and the dog",
]


def small_training(
    model: str = "run", steps: tuple[int, ...] = (0, 10, 20, 40), n_heads: int = 2
) -> Training:
    """Two layers of heads; the last head becomes one of induction from the third step on."""
    heads = tuple(("decoder", layer, head) for layer in range(2) for head in range(n_heads))
    chance = np.random.default_rng(0)
    value = chance.uniform(0.1, 0.2, (2, len(steps), len(heads)))
    value[1, 2:, -1] = 0.8
    value[0, 0, 0] = np.nan
    has_role = np.zeros((2, len(steps), len(heads)), np.int8)
    has_role[1, 2:, -1] = 2
    has_role[0, 1:2, 0] = 1
    measures = [
        {
            "name": "previous_token",
            "meaning": "attends to the token before",
            "unit": "share",
            "least": 0,
            "most": 1,
        },
        {
            "name": "induction",
            "meaning": "attends to what followed",
            "unit": "share",
            "least": 0,
            "most": 1,
        },
    ]
    kinds, layers, numbers = zip(*heads, strict=True)
    columns = Training.TABLES
    tables = {
        "checkpoints": Table.of_arrays(
            columns["checkpoints"],
            name=[f"run/checkpoint-{step}" for step in steps],
            step=steps,
            sha256=[""] * len(steps),
            loss=[2.4 - step / 50 for step in steps],
            loss_low=[2.3] * len(steps),
            loss_high=[2.5] * len(steps),
            elapsed_s=[0.1] * len(steps),
        ),
        "heads": Table.of_arrays(HEADS, kind=kinds, layer=layers, head=numbers),
        "measures": Table.of(columns["measures"], measures),
        "roles": Table.of(columns["roles"], [{"name": "previous_token"}, {"name": "induction"}]),
    }
    arrays = {
        "value": value,
        "value_low": value - 0.05,
        "value_high": value + 0.05,
        "uniform": np.full((2, len(heads)), 0.15),
        "has_role": has_role,
    }
    corpus = {
        "sources": ["texts"],
        "n_texts": 3,
        "n_tokens": 27,
        "n_checkpoints": len(steps),
        "complete": True,
    }
    return Training(
        {"model": model, "sha256": "", "notes": []}, corpus, {"loss": "causal"}, tables, arrays
    )


def train(folder: Path, steps: tuple[int, ...] = (0, 5, 10), **shape: int) -> Path:
    """A decoder that learns three texts, saved at some steps."""
    torch.manual_seed(0)
    network = decoder(WORDS, **{"n_layers": 2, "n_heads": 2, "d_model": 16} | shape)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    rows = [torch.tensor([words_apart(WORDS).encode(text).ids]) for text in TEXTS]
    for step in range(steps[-1] + 1):
        if step in steps:
            network.save(folder / f"checkpoint-{step}")
        for ids in rows:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(ids)[0, :-1], ids[0, 1:]).backward()
            optimizer.step()
    return folder
