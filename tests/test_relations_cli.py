"""`attnscope relations` and `show` as a user runs them, and what the views say."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from attnscope.questions.relations import MAX_DRAWN_RELATIONS, Relations, describe_verdicts, name_heads
from attnscope.report.blocks import Grid
from attnscope.report.terminal import show
from attnscope.results.table import Table
from tests.conftest import SAMPLES

TREES = str(SAMPLES / "dependencies.conllu")


@pytest.fixture
def study(run):
    """Runs `attnscope relations` on the glass box."""
    return lambda *arguments: run("relations", "-m", "own", *arguments)


def test_a_table_and_the_files(study, tmp_path):
    status, out, err = study(TREES, "-o", "out", "-f", "npz,csv,json,png", "--only", "det,case")
    assert status == 0, err
    assert "det→parent" in out
    assert "nsubj" not in out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        f"relations.{ending}" for ending in ("npz", "csv", "json", "png")
    }
    document = json.loads((tmp_path / "out/relations.json").read_text("utf-8"))
    assert document["schema"] == Relations.SCHEMA


def test_what_is_broken_is_said_and_the_rest_is_studied(study, tmp_path):
    good = Path(TREES).read_text("utf-8")
    (tmp_path / "a.conllu").write_text(good + "\n1\tbad\n\n" + good, "utf-8")
    (tmp_path / "b.py").write_text("def f(:\n", "utf-8")
    (tmp_path / "c.jsonl").write_text(
        '{"text": "a b", "links": [{"from": [0, 1], "to": [2, 9]}]}\n', "utf-8"
    )
    status, out, err = study("a.conllu", "b.py", "c.jsonl", "gone.py", "-o", "out", "-f", "npz")
    assert status == 1
    assert "det→parent" in out
    number = good.count("\n") + 2
    for expected in (
        f"a.conllu, line {number}: 2 columns",
        "b.py, line 1: not Python",
        "c.jsonl, line 1",
        "gone.py",
    ):
        assert expected in err
    assert "4 parts of the texts could not be read" in err
    assert (tmp_path / "out/relations.npz").is_file()
    status, out, err = study("b.py")
    assert status == 1
    assert out == ""
    assert "line 1: not Python" in err


# Views -----------------------------------------------------------------------------------------------------------


def made_up(n, shape=(2, 3), *, hostile=""):
    """n relations: the first expressed by the best head, the second by another one, the third by none, and so on."""
    n_heads = shape[0] * shape[1]
    best = 1
    other = shape[1] + 2
    accuracy = np.random.default_rng(0).random((n, n_heads)) * 0.5
    accuracy[:, best] = 0.9
    found = np.zeros((n, n_heads), np.bool_)
    found[::4, best] = True
    found[1::4, other % n_heads] = True
    relations = [
        {
            "relation": f"x{number}{hostile}→parent",
            "n": 100 - number,
            "n_texts": 50,
            "n_scored": 50,
            "n_texts_scored": 25,
            "rule": "offset +1",
            "baseline": 0.4,
            "best": best,
            "n_sources": 50,
            "no_verdict": "fewer than 20 examples" if number % 4 == 3 else "",
            "halves": "texts",
        }
        for number in range(n)
    ]
    heads = [{"kind": "encoder", "layer": layer, "head": head} for layer, head in np.ndindex(shape)]
    rows = {"relations": relations, "heads": heads}
    nan = np.full((n, n_heads), np.nan)
    grids = {
        "choice": accuracy,
        "accuracy": accuracy,
        "accuracy_low": accuracy - 0.05,
        "accuracy_high": accuracy + 0.05,
        "mass": accuracy / 2,
        "p": nan,
        "q": nan,
        "found": found,
    }
    corpus = {"sources": ["f"], "n_texts": 5, "n_tokens": 50, "complete": True}
    options = {"margin": 0.1, "fewest_links": 20, "fewest_texts": 10}
    tables = {name: Table.of(Relations.TABLES[name], cells) for name, cells in rows.items()}
    return Relations({"model": "m"}, corpus, options, tables, grids)


def printed(result, width=120, *, every=False):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(show(result, console, every=every))
    return console.export_text()


def test_the_verdicts():
    result = made_up(4)
    assert result.verdicts == ["yes", "others", "no", "none"]
    assert name_heads(result, result.table("relations")["best"])[0] == "L0H1"
    assert describe_verdicts(result) == ["yes", "yes", "no", "too few"]
    few = result.select("relations", [3])
    assert "1 relation, and too few examples for any verdict" in printed(few, 200)


@pytest.mark.parametrize("shape", [(1, 3), (24, 16)])
def test_the_map_is_drawn_whole(shape, tmp_path):
    result = made_up(60, shape, hostile="$\\alpha$ 中\u202e")
    (grid,) = [block for block in result.report().blocks if isinstance(block, Grid)]
    assert len(grid.rows) == MAX_DRAWN_RELATIONS
    assert "not shown: 40 more relations" in grid.notes
    assert grid.framed_cells is not None
    assert grid.framed_cells[0, 1]
    assert grid.values[0, 1] == pytest.approx(0.5)
    assert grid.values.min() == 0
    path, _ = result.draw(tmp_path, ["png", "svg"])
    with Image.open(path) as image:
        assert image.width >= 900
