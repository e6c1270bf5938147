"""What the papers say of induction heads holds of the decoders that examples/induction.py trains, seed by seed.

One layer cannot know what followed a word, two can, by a previous-token head and an induction head; without either the
loss is back up (Elhage et al. 2021; Olsson et al. 2022; Bietti et al. 2023; Edelman et al. 2024).
"""

import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch

import attnscope
from attnscope.core.attention.seam import attend
from attnscope.models.model import Batch, Model
from attnscope.questions.heads import Heads
from examples import induction
from tests.heads_helpers import heads_in

SEEDS = (0, 1, 2)
ROOT = Path(__file__).resolve().parents[1]

REACHED = 0.1
"""Nats above the least loss possible that two layers stay below."""
APART = 0.3
"""Nats above it that one layer stays above: counting words alone is about 0.37 above."""


def test_the_least_loss_is_that_of_the_bayesian_prediction():
    """On four words by hand; counting words alone does worse."""
    ids = torch.tensor([[2, 5, 2, 5]])
    share = induction.CONCENTRATION
    first = 1 / induction.WORDS
    again = (1 + share) / (1 + induction.WORDS * share)
    assert induction.bigram_loss(ids) == pytest.approx(
        -(2 * np.log(first) + np.log(again)) / 3, rel=1e-5
    )
    assert induction.unigram_loss(ids) == pytest.approx(
        -np.mean(np.log([1 / 9, 2 / 10, 2 / 11])), rel=1e-5
    )
    held_out = induction.held_out()
    assert induction.bigram_loss(held_out) < induction.unigram_loss(held_out) - APART


@dataclass(frozen=True)
class Trained:
    """What came of one seed."""

    two: Model
    losses: tuple[float, float]
    found: Heads

    def best(self, layer, role):
        """The head of a layer in which the measure of a role is largest, and the measure."""
        values = {h.head: h.measures[role].value for h in heads_in(self.found) if h.layer == layer}
        head = max(values, key=lambda number: values[number])
        return head, values[head]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    home = tmp_path_factory.mktemp("induction")
    last = (induction.STEPS,)
    runs = [induction.Run(n, seed, home / f"{n}-{seed}", last) for seed in SEEDS for n in (1, 2)]
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        folders = list(pool.map(induction.Run.train, runs))
    ids = induction.held_out()
    made = []
    for one, two in zip(folders[::2], folders[1::2], strict=True):
        models = [attnscope.load(folder / f"checkpoint-{induction.STEPS}") for folder in (one, two)]
        with torch.inference_mode():
            losses = tuple(
                induction.model_loss(model.outputs(Batch(ids), attend).logits, ids).item()
                for model in models
            )
        made.append(Trained(models[1], losses, attnscope.heads(models[1], induction.texts_of(ids[:80]))))
    return made


@pytest.mark.slow
def test_one_layer_stays_above_the_bigram_loss_and_two_reach_it(trained):
    least = induction.bigram_loss(induction.held_out())
    print([tuple(round(loss - least, 3) for loss in one.losses) for one in trained])
    for one in trained:
        assert one.losses[0] > least + APART
        assert one.losses[1] < least + REACHED


@pytest.mark.slow
def test_a_previous_token_head_and_an_induction_head_appear(trained):
    for one in trained:
        roles = {(head.layer, role.name) for head in heads_in(one.found) for role in head.roles}
        assert {(0, "previous_token"), (1, "induction")} <= roles
        print(one.best(0, "previous_token"), one.best(1, "induction"))


@pytest.mark.slow
def test_without_either_head_the_loss_is_back_up(trained):
    """Both heads of layer 1 often look for induction, so that one alone is part of what is lost."""
    texts = induction.texts_of(induction.held_out()[:80])
    for one in trained:
        previous = one.best(0, "previous_token")[0]
        looking = one.best(1, "induction")[0]
        found = attnscope.ablate(one.two, texts, attnscope.AblateOptions(modes=("zero",)))
        low = dict(zip(found.head_names, found["heads"]["zero_loss_low"].tolist(), strict=True))
        print(
            dict(zip(found.head_names, found["heads"]["zero_loss"].tolist(), strict=True)),
            previous,
            looking,
        )
        assert low[f"L0H{previous}"] > 0.2
        assert low[f"L1H{looking}"] > 0.1


@pytest.mark.slow
def test_their_composition_through_keys_is_above_that_of_all_other_pairs(trained):
    """Shares of norm above those of random directions (Elhage et al. 2021). Both heads of layer 1 may look for it."""
    for one in trained:
        previous = one.best(0, "previous_token")[0]
        looking = one.best(1, "induction")[0]
        found = attnscope.weights(one.two)
        names = found.head_names
        excess = found.excess[1]  # of K, (sender, receiver)
        above = {
            f"{names[i]} → {names[j]}": float(excess[i, j]) for i, j in np.argwhere(np.isfinite(excess))
        }
        print(above, previous, looking)
        others = [share for name, share in above.items() if not name.startswith(f"L0H{previous}")]
        assert len(others) == 2
        assert above[f"L0H{previous} → L1H{looking}"] > max(0.02, *others)


@pytest.mark.slow
def test_at_its_key_the_induction_head_reads_what_the_previous_token_head_wrote(trained):
    """Over ten sequences it adds most of all parts at the key that the head attends to most, embeddings included."""
    for one in trained:
        previous = one.best(0, "previous_token")[0]
        looking = one.best(1, "induction")[0]
        records = [
            attnscope.why(one.two, text, 1, looking, induction.LENGTH - 1)
            for text in induction.texts_of(induction.held_out()[:10])
        ]
        names = records[0]["parts"]["part"].tolist()
        added = dict(
            zip(
                names,
                np.mean([record["parts"]["key_nats"] for record in records], 0).tolist(),
                strict=True,
            )
        )
        print(added, f"L0H{previous}")
        assert max(added, key=lambda name: added[name]) == f"L0H{previous}"


@pytest.mark.slow
def test_the_example_runs_as_it_stands_and_draws_both_trainings(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "examples.induction", "-o", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    for name in ("1-layer", "2-layers"):
        found = attnscope.load_record(tmp_path / name / "training.npz")
        assert found.steps == induction.SAVED
        assert (tmp_path / name / "training.png").stat().st_size > 10_000
    assert "induction: {'L1H" in done.stdout
