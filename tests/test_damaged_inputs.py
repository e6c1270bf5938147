"""Damage of recipes and of inputs, at random by seed: each loads and runs, or is refused in one line."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import attnscope
from attnscope.errors import AttnscopeError
from tests.test_inputs import Attention

RECIPE = """import torch
import torch.nn.functional as F
from torch import nn


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, scale=0.5):
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(query, key, value, scale=scale)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.attention(x, x, x)[0]


def attnscope_model():
    torch.manual_seed(0)
    return Mixer(), {"x": torch.randn(3, 6, 8), "scale": 0.3}, list("abcdef")
"""
NUMBERS = ("-1", "0", "1", "2", "7", "0.5", "None", "'x'", "float('nan')", "-2.5", "()", "[3]")
ENDS = (
    "raise SystemExit(2)",
    "raise GeneratorExit",
    "raise ValueError('a\nb')",
    "return",
    "assert False",
    "1 / 0",
    "del x",
)


def damage_recipe(source: str, chance: random.Random) -> str:
    """A recipe with characters, numbers, names or lines changed."""
    lines = source.splitlines()
    match chance.randrange(6):
        case 0:
            start = chance.randrange(len(source))
            return source[:start] + source[start + chance.randint(1, 12) :]
        case 1:
            start = chance.randrange(len(source))
            return source[:start] + chance.choice("()[]{}:,.=\"'#\0\u00e9\n 1x") + source[start + 1 :]
        case 2:
            spots = [*re.finditer(r"(?<!\w)\d+(\.\d+)?(?!\w)", source)]
            spot = chance.choice(spots)
            return source[: spot.start()] + chance.choice(NUMBERS) + source[spot.end() :]
        case 3:
            names = sorted({*re.findall(r"\b[a-z_]{2,}\b", source)})
            return re.sub(rf"\b{chance.choice(names)}\b", chance.choice(names), source, count=chance.choice((0, 1)))
        case 4:
            del lines[chance.randrange(len(lines))]
        case _:
            place = chance.randrange(len(lines))
            indent = re.match(" *", lines[place])
            lines.insert(place, f"{indent[0] if indent else ''}{chance.choice(ENDS)}")
    return "\n".join(lines)


def damage_inputs(chance: random.Random) -> tuple[Any, Any]:
    """Inputs of a module of (batch, 6, 8), and labels, of which one is wrong or odd."""
    x = torch.randn(4, 6, 8)
    tensors = [
        x[0], x[:, :, :3], x[:0], x[:, :0], x[0, 0, 0], x.double(), x.half(), x.long(), x.bool(), x * torch.inf,
        x.to(torch.complex64), x.to("meta"), x.clone().requires_grad_(), x.transpose(0, 1), x.expand(4, 6, 8)[:1],
        x.numpy(), x[..., None], x.masked_fill(x > 2, torch.nan), torch.full_like(x, 1e38), x.to_sparse(),
        None, 3, "x", b"x",
    ]  # fmt: skip
    shapes = [
        lambda t: t, lambda t: [t, x], lambda t: (t,), lambda t: {"x": t}, lambda t: {"y": t}, lambda t: [[t]],
        lambda t: {"x": [t]}, lambda t: (t, t), lambda t: {1: t}, lambda t: [x, t, x[:2]], lambda t: iter([t]),
    ]  # fmt: skip
    labels = [
        None, None, None, list("abcdef"), (2, 3), range(6), [], "abcdef", (0, 6), (-2, -3), [list("abcdef")] * 4,
        ["a\nb", "", "\0", "\ud800", "e" * 9999, "f"], {"a": 1}, [1, 2, 3, 4, 5, 6], 6, [["a"]], range(6, 0, -1),
    ]  # fmt: skip
    return chance.choice(shapes)(chance.choice(tensors)), chance.choice(labels)


def settings() -> tuple[Any, ...]:
    return torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_default_device(), torch.get_num_threads()


SEEDS = [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 50))]
EACH = 5
"""Recipes, and as many inputs, of one seed: 500 in all."""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.usefixtures("one_thread")
def test_damaged_recipes_and_inputs_run_or_are_one_line(seed: int, tmp_path: Path) -> None:
    chance, path = random.Random(seed), tmp_path / "recipe.py"
    before = settings()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for number in range(2 * EACH):
            is_recipe = bool(number % 2)
            said, labels = (damage_recipe(RECIPE, chance), None) if is_recipe else damage_inputs(chance)
            try:
                if is_recipe:
                    path.write_text(said, "utf-8")
                    source: Any = attnscope.load(path, trust_remote_code=True)
                else:
                    source = attnscope.load(Attention(), inputs=said, labels=labels)
                attnscope.heads(source, source.texts)
            except AttnscopeError as error:
                assert "\n" not in f"{error.message}{error.hint}", said
            except BaseException as error:
                raise AssertionError(f"{type(error).__name__} of {said!r}") from error
            assert settings() == before, said
    path.write_text(RECIPE, "utf-8")
    whole: Any = attnscope.load(path, trust_remote_code=True)
    assert len(whole.texts) == 3
