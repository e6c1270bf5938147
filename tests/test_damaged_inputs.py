"""Damage of inputs, at random by seed: each loads and runs, or is refused in one line."""

import random

import pytest
import torch

import attnscope
from attnscope.errors import AttnscopeError
from tests.test_inputs import Attention


def damage_inputs(chance):
    """Inputs of a module of (batch, 6, 8), and labels, of which one is wrong or odd."""
    x = torch.randn(4, 6, 8)
    tensors = [
        x[0],
        x[:, :, :3],
        x[:0],
        x[:, :0],
        x[0, 0, 0],
        x.double(),
        x.half(),
        x.long(),
        x.bool(),
        x * torch.inf,
        x.to(torch.complex64),
        x.to("meta"),
        x.clone().requires_grad_(),
        x.transpose(0, 1),
        x.expand(4, 6, 8)[:1],
        x.numpy(),
        x[..., None],
        x.masked_fill(x > 2, torch.nan),
        torch.full_like(x, 1e38),
        x.to_sparse(),
        None,
        3,
        "x",
        b"x",
    ]
    shapes = [
        lambda t: t,
        lambda t: (t,),
        lambda t: {"x": t},
        lambda t: {"y": t},
        lambda t: [[t]],
        lambda t: {"x": [t]},
        lambda t: (t, t),
        lambda t: {1: t},
        lambda t: iter([t]),
    ]
    labels = [
        None,
        None,
        None,
        list("abcdef"),
        (2, 3),
        range(6),
        [],
        "abcdef",
        (0, 6),
        (-2, -3),
        [list("abcdef")] * 4,
        ["a\nb", "", "\0", "\ud800", "e" * 9999, "f"],
        {"a": 1},
        [1, 2, 3, 4, 5, 6],
        6,
        [["a"]],
        range(6, 0, -1),
    ]
    return chance.choice(shapes)(chance.choice(tensors)), chance.choice(labels)


def settings():
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_default_device(),
        torch.get_num_threads(),
    )


SEEDS = [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 50))]
EACH = 10
"""Inputs of one seed: 500 in all."""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.usefixtures("one_thread")
def test_damaged_inputs_run_or_are_one_line(seed):
    chance = random.Random(seed)
    before = settings()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _ in range(EACH):
            inputs, labels = damage_inputs(chance)
            try:
                model = attnscope.load(Attention(), inputs=inputs, labels=labels)
                attnscope.heads(model, model.texts)
            except AttnscopeError as error:
                assert "\n" not in f"{error.message}{error.hint}", inputs
            except BaseException as error:
                raise AssertionError(f"{type(error).__name__} of {inputs!r}") from error
            assert settings() == before, inputs
