"""Records of ablations, how they are drawn, and `attnscope ablate`, `prune` and `show` as a user runs them."""

import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attnscope.views.ablation.terminal import show
from rich.console import Console

from attnscope.records.ablation import Ablation, Effect, HeadEffects, SetEffects
from attnscope.report.numbers import small_number
from tests.record_helpers import require_lossless


def made(*, n_layers: int = 2, n_heads: int = 3, intervals: bool = True, loss: bool = True) -> Ablation:
    """A record of made-up numbers, some of them negative, one undefined."""
    chance = np.random.default_rng(0)

    def effect(scale: float = 0.1) -> Effect:
        value = float(chance.normal()) * scale
        return Effect(value, *((value - 0.01, value + 0.01) if intervals else (math.nan, math.nan)), 7.0)

    names = ["zero_l2", *(["zero_loss", "zero_kl"] if loss else []), "importance" if loss else "sensitivity"]
    heads = tuple(
        HeadEffects("decoder", layer, head, {name: effect() for name in names})
        for layer in range(n_layers)
        for head in range(n_heads)
    )
    together = SetEffects(("L0H0", "L1H2"), {"zero_l2": effect()})
    undefined = dataclasses.replace(heads[1], effects=heads[1].effects | {"zero_l2": Effect(*[math.nan] * 3, 0.0)})
    return Ablation(
        {"model": "made", "kinds": ["decoder"], "notes": []},
        {"sources": ["a$b.txt"], "n_texts": 7, "n_tokens": 70, "n_predictions": 63 * loss, "complete": True},
        {"modes": ["zero"], "predicted": "each next token" if loss else None,
         "quantities": {"zero_loss": {"what": "how much the loss rises", "unit": "nats"}}},
        {"loss": Effect(3.0, 2.0, 4.0, 63.0)} if loss else {},
        (heads[0], undefined, *heads[2:]),
        together,
    )  # fmt: skip


# Records ----------------------------------------------------------------------------------------------------------


def test_effects_that_are_not_known_are_null_and_come_back(tmp_path: Path) -> None:
    found = made()
    require_lossless(found, tmp_path)
    assert math.isnan(found.heads[1].effects["zero_l2"].value)
    assert found.as_json()["heads"][1]["effects"]["zero_l2"]["value"] is None
    rows = found.to_csv().splitlines()
    assert rows[0].startswith("kind,layer,head,zero_l2,zero_l2_low,zero_l2_high,zero_l2_count,zero_loss")
    assert len(rows) == 7
    assert float(rows[1].split(",")[3]) == found.heads[0].effects["zero_l2"].value


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.1234, "0.123"), (-0.01234, "−0.012"), (0.00123, "0.0012"), (0.000123, "1e−4"), (0.0, "0"), (1.234, "1.23"),
     (123.4, "123"), (math.nan, "–"), (math.inf, "–")],
)  # fmt: skip
def test_numbers_keep_two_digits_that_tell(value: float, text: str) -> None:
    assert small_number(value) == text


# Drawings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 80, 140])
@pytest.mark.parametrize("changes", [{}, {"intervals": False}, {"loss": False}, {"n_layers": 40, "n_heads": 32}])
def test_the_terminal_shows_every_record_at_every_width(width: int, changes: dict[str, Any]) -> None:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(show(made(**changes), console))
    text = console.export_text()
    console.file.close()
    assert "L0" in text
    assert "7 texts" in text
    if width == 140 and not changes:
        assert "without L0H0, L1H2" in text


def test_there_is_a_figure_for_each_quantity(tmp_path: Path) -> None:
    assert [path.name for path in made().draw(tmp_path, ["png"])] == [
        "effect-zero_loss.png", "effect-zero_l2.png", "effect-zero_kl.png", "effect-importance.png",
    ]  # fmt: skip


# The command line -------------------------------------------------------------------------------------------------


def test_ablate_prints_writes_and_is_shown_again(run: Any, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("the cat sat\na dog ran off\n")
    status, out, err = run("ablate", "--file", "t.txt", "-m", "own", "-o", "out", "-f", "npz,csv,json,png")
    assert status == 0, err
    assert "zero ablation: change of the last layer's hidden states, relative L2\n" in out
    assert "late layers are closer to the last hidden states" in " ".join(out.split())
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"ablation.npz", "ablation.csv", "ablation.json", "effect-zero_l2.png", "effect-mean_l2.png"}


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("a cat", "-m", "own", "--loss", "causal"), 1, "does not predict next tokens: it has no language-model head"),
        (("a cat", "-m", "own", "--loss", "mse"), 2, "--loss has no 'mse'"),
        (("a cat", "-m", "own", "--ablation", "one"), 2, "no ablation 'one'"),
        (("a cat", "-m", "own", "--ablation", "none"), 2, "nothing is to be done"),
        (("a cat", "-m", "own", "--masked", "some"), 2, "--masked is 'some'"),
        (("a cat", "-m", "own", "--pick", "L9H9"), 1, "no layer 9"),
        (("a cat", "-m", "own", "-f", "png"), 2, "no folder"),
        ((), 2, "give one of TEXT and --file"),
    ],
)
def test_bad_input_is_one_line_and_a_hint(run: Any, arguments: tuple[str, ...], status: int, says: str) -> None:
    found, out, err = run("ablate", *arguments)
    assert (found, out) == (status, "")
    first, second = err.splitlines()
    assert first.startswith("error: ")
    assert says in first
    assert second.startswith("hint: ")


def test_heads_with_roles_are_taken_out_too(run: Any, tmp_path: Path) -> None:
    sentences = (Path(__file__).parent.parent / "sample_texts" / "sentences.txt").read_text().splitlines()
    (tmp_path / "t.txt").write_text("\n".join(sentences[:12]))
    status, out, err = run("heads", "--file", "t.txt", "-m", "own", "--causal", "--no-describe", "--json")
    assert status == 0, err
    found = json.loads(out)
    assert found["options"]["causal"]["quantity"] == "l2"
    for head in found["heads"]:
        assert bool(head["roles"]) == ("effects" in head)
    status, out, _ = run("heads", "--file", "t.txt", "-m", "own", "--causal", "--no-describe")
    assert "effect" in out


def test_prune_needs_heads_and_a_folder(run: Any) -> None:
    assert run("ablate", "--pick", "L0H0", "--save", "out")[0] == 2
    status, _, err = run("ablate", "a cat", "--save", "out")
    assert status == 2
    assert "no head is named" in err


@pytest.mark.parametrize("width", [60, 80, 200])
def test_losses_by_place_have_whole_titles(width: int) -> None:
    places = {"first": 0.01, "repeated": 1.41, "first_half": 0.02, "second_half": 1.36}
    by_place = {f"zero_loss_{place}": Effect(value, value - 0.1, value + 0.1, 7.0) for place, value in places.items()}
    found = dataclasses.replace(made(n_heads=12), together=None)
    heads = tuple(dataclasses.replace(one, kind="encoder", effects=one.effects | by_place) for one in found.heads)
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(show(dataclasses.replace(found, heads=heads), console))
    text = console.export_text()
    assert "…" not in text
    words = " ".join(text.split())
    assert "the 8 of 24 heads without which most changes" in words
    assert all(word in words for word in ("occurrences", "repeated", "second"))
