"""Records of ablations, how they are drawn, and `attnscope ablate`, `prune` and `show` as a user runs them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from attnscope.questions.ablate import Ablation, quantity_column
from attnscope.report.terminal import show
from attnscope.results.table import HEADS, Table
from tests.conftest import names_in
from tests.record_helpers import require_lossless


def made(*, n_layers=2, n_heads=3, intervals=True, loss=True):
    """A result of made-up numbers, some of them negative, one undefined."""
    chance = np.random.default_rng(0)
    n = n_layers * n_heads
    names = ["zero_l2", *(["zero_loss", "zero_kl", "importance"] if loss else [])]
    values = {}
    for name in names:
        numbers = chance.normal(size=n) * 0.1
        if name == "zero_l2":
            numbers[1] = math.nan
        ends = (numbers - 0.01, numbers + 0.01) if intervals else (np.full(n, math.nan),) * 2
        values |= {
            name: numbers,
            f"{name}_low": ends[0],
            f"{name}_high": ends[1],
            f"{name}_count": np.full(n, 7.0),
        }
    places = {
        "kind": ["decoder"] * n,
        "layer": np.repeat(np.arange(n_layers), n_heads),
        "head": np.tile(np.arange(n_heads), n_layers),
    }
    tables = {
        "heads": Table.of_arrays([*HEADS, *map(quantity_column, names)], **places, **values),
        "together": Table.of_arrays(Ablation.TABLES["together"], quantity=["zero_l2"], value=[0.2]),
    }
    if loss:
        tables["whole"] = Table.of_arrays(
            Ablation.TABLES["whole"], quantity=["loss"], value=[3], value_low=[2], value_high=[4]
        )
    return Ablation(
        {"model": "made", "kinds": ["decoder"], "notes": []},
        {
            "sources": ["a$b.txt"],
            "n_texts": 7,
            "n_tokens": 70,
            "n_predictions": 63 * loss,
            "complete": True,
        },
        {"modes": ["zero"], "predicted": "each next token" if loss else None},
        tables,
    )


# Records ----------------------------------------------------------------------------------------------------------


def test_effects_that_are_not_known_are_null_and_come_back(tmp_path):
    found = made()
    require_lossless(found, tmp_path)
    assert found.as_json()["heads"][1]["zero_l2"] is None
    rows = found.to_csv().splitlines()
    assert rows[0].startswith("kind,layer,head,zero_l2,zero_l2_low,zero_l2_high,zero_l2_count,zero_loss")
    assert len(rows) == 7
    assert float(rows[1].split(",")[3]) == found["heads"]["zero_l2"][0]


# Drawings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 80, 140])
@pytest.mark.parametrize(
    "changes", [{}, {"intervals": False}, {"loss": False}, {"n_layers": 40, "n_heads": 32}]
)
def test_the_terminal_shows_every_record_at_every_width(width, changes):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(show(made(**changes), console))
    text = console.export_text()
    console.file.close()
    assert "L0" in text
    assert "7 texts" in text
    if width == 140 and not changes:
        assert "without L0H0, L0H1" in text


# The command line -------------------------------------------------------------------------------------------------


def test_ablate_prints_writes_and_is_shown_again(run, tmp_path):
    (tmp_path / "t.txt").write_text("the cat sat\na dog ran off\n")
    status, out, err = run(
        "ablate", "--file", "t.txt", "-m", "own", "-o", "out", "-f", "npz,csv,json,png"
    )
    assert status == 0, err
    first, *lines = out.splitlines()
    assert "matters most: without it the last hidden states change by" in first
    assert "zero: Δ hidden" in "\n".join(lines[1:4])
    assert "late layers are closer to the last hidden states" in " ".join(out.split())
    names = set(names_in(tmp_path / "out"))
    assert names == {
        "ablation.npz",
        "ablation.csv",
        "ablation.json",
        "effect-zero_l2.png",
        "effect-mean_l2.png",
    }


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("a cat", "-m", "own", "--importance"), 1, "importance is the slope of a loss"),
        (("a cat", "-m", "own", "--ablation", "none"), 2, "nothing is to be done"),
        (
            ("a cat", "-m", "own", "--answer", "POSITIVE", "--loss", "none"),
            2,
            "--loss none measures no likelihood",
        ),
    ],
)
def test_bad_input_is_one_line_and_a_hint(run, arguments, status, says):
    found, out, err = run("ablate", *arguments)
    assert found == status
    assert out == ""
    first, second = err.splitlines()
    assert first.startswith("error: ")
    assert says in first
    assert second.startswith("hint: ")


def test_heads_with_roles_are_taken_out_too(run, tmp_path):
    sentences = (
        (Path(__file__).parent.parent / "sample_texts" / "sentences.txt").read_text().splitlines()
    )
    (tmp_path / "t.txt").write_text("\n".join(sentences[:12]))
    status, out, err = run(
        "heads", "--file", "t.txt", "-m", "own", "--causal", "--no-describe", "--json"
    )
    assert status == 0, err
    found = json.loads(out)
    assert found["options"]["causal"]["quantity"] == "l2"
    for head in found["heads"]:
        assert bool(head["role"]) == (head["zero_l2"] is not None) == (head["mean_l2"] is not None)
    status, out, _ = run("heads", "--file", "t.txt", "-m", "own", "--causal", "--no-describe")
    assert status == 0
    assert "zero: Δ hidden" in out
    assert "do nothing" in " ".join(out.split())
