"""`attnscope relations` and `show` as a user runs them, and what the views say."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

import attnscope
from attnscope.questions.relations import Relations, best_heads, expressed_by, listed
from attnscope.questions.relations_drawing import MOST_RELATIONS, cells_of
from attnscope.report.figures import pages
from attnscope.report.terminal import show
from attnscope.results.table import Table
from tests.conftest import SAMPLES, Run

TREES = str(SAMPLES / "dependencies.conllu")


@pytest.fixture
def study(run: Run) -> Run:
    """Runs `attnscope relations` on the glass box."""
    return lambda *arguments: run("relations", "-m", "own", *arguments)


def test_a_table_and_the_files(study: Run, tmp_path: Path) -> None:
    status, out, err = study(TREES, "-o", "out", "-f", "npz,csv,json,png", "--only", "det,case", "--examples", "2")
    assert status == 0, err
    assert "det→parent" in out
    assert "nsubj" not in out
    assert "expressed" in out
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"relations.npz", "relations.csv", "relations.json", "relations.png"} < names
    assert [line for line in out.splitlines() if line.startswith("out/")] == [
        "out/relations.npz", "out/relations.csv", "out/relations.json", "out/relations.png",
        *(line for line in out.splitlines() if line.startswith("out/examples-")),
    ]  # fmt: skip
    assert len([name for name in names if name.startswith("examples-")]) == 4
    document = json.loads((tmp_path / "out/relations.json").read_text("utf-8"))
    assert document["schema"] == "attnscope.relations/2"


def test_json_is_one_document(study: Run) -> None:
    status, out, err = study(str(SAMPLES / "library.py"), "--json", "--chunk", "64")
    assert status == 0, err
    found = json.loads(out)
    assert found["run"]["model"] == "own"
    assert {one["relation"] for one in found["relations"]} >= {"closing→opening", "name→assignment"}


@pytest.mark.parametrize(
    "arguments",
    [(), ("a.txt",), ("-",), (TREES, "--annotated-as", "xml"), (TREES, "--split", "word"), (TREES, "--format", "npz"),
     (TREES, "--only", " , "), (TREES, "-o", "o", "-f", "gif"), (TREES, "--examples", "-1")],
)  # fmt: skip
def test_wrong_usage(study: Run, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    status, out, err = study(*arguments)
    assert (status, out) == (2, ""), err
    assert err.startswith("error: ")
    assert not list(tmp_path.iterdir())


def test_what_is_broken_is_said_and_the_rest_is_studied(study: Run, tmp_path: Path) -> None:
    good = Path(TREES).read_text("utf-8")
    (tmp_path / "a.conllu").write_text(good + "\n1\tbad\n\n" + good, "utf-8")
    (tmp_path / "b.py").write_text("def f(:\n", "utf-8")
    (tmp_path / "c.jsonl").write_text('{"text": "a b", "links": [{"from": [0, 1], "to": [2, 9]}]}\n', "utf-8")
    status, out, err = study("a.conllu", "b.py", "c.jsonl", "gone.py", "-o", "out", "-f", "npz")
    assert status == 1
    assert "det→parent" in out
    number = good.count("\n") + 2
    for expected in (f"a.conllu, line {number}: 2 columns", "b.py, line 1: not Python", "c.jsonl, line 1", "gone.py"):
        assert expected in err
    assert "4 parts of the texts could not be read" in err
    assert (tmp_path / "out/relations.npz").is_file()
    status, out, err = study("b.py")
    assert (status, out) == (1, "")
    assert "line 1: not Python" in err


# Views -----------------------------------------------------------------------------------------------------------


def made_up(n: int, shape: tuple[int, int] = (2, 3), *, hostile: str = "", shown: int = 0) -> Relations:
    """n relations: the first expressed by the best head, the second by another one, the third by none, and so on."""
    chance = np.random.default_rng(0)
    n_heads = shape[0] * shape[1]
    best, other = 1, shape[1] + 2
    accuracy = chance.random((n, n_heads)) * 0.5
    accuracy[:, min(best, n_heads - 1)] = 0.9
    found = np.zeros((n, n_heads), np.bool_)
    found[::4, best] = True
    found[1::4, other] = True
    relations = [
        {
            "relation": f"x{number}{hostile}→parent", "n": 100 - number, "n_texts": 50, "n_scored": 50,
            "n_texts_scored": 25, "rule": "offset +1", "baseline": 0.4, "best": best, "ties": "", "n_sources": 50,
            "no_verdict": "fewer than 20 examples" if number % 4 == 3 else "", "halves": "texts",
        }
        for number in range(n)
    ]  # fmt: skip
    heads = [{"kind": "encoder", "layer": layer, "head": head} for layer, head in np.ndindex(shape)]
    examples = [
        {
            "relation": 0, "source": "f", "line": 3, "words": "\n".join((f"a{hostile}", "b", "c" * 50, "d")),
            "spaced": "0 1 1 0", "cut_before": True, "cut_after": True,
        }
    ] * shown  # fmt: skip
    looks = (("1", "0", 0, True, 0.8), ("2", "0", 3, False, 0.3), ("3", "0", -1, False, 0.3))
    links = [
        dict(zip(("example", "looking", "targets", "looked", "right", "weight"), (example, *look), strict=True))
        for example in range(shown)
        for look in looks
    ]
    rows = {"relations": relations, "heads": heads, "examples": examples, "links": links}
    tables = {name: Table.of(Relations.TABLES[name], cells) for name, cells in rows.items()}
    nan = np.full((n, n_heads), np.nan)
    grids = {
        "choice": accuracy, "accuracy": accuracy, "accuracy_low": accuracy - 0.05, "accuracy_high": accuracy + 0.05,
        "mass": accuracy / 2, "p": nan, "q": nan, "found": found,
    }  # fmt: skip
    corpus: dict[str, Any] = {"sources": ["f"], "n_texts": 5, "n_tokens": 50, "complete": True}
    options = {"margin": 0.1, "fewest_links": 20, "fewest_texts": 10}
    return Relations({"model": "m"}, corpus, options, tables, grids)


def printed(result: Relations, width: int = 120, *, every: bool = False) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(show(result, console, every=every))
    return console.export_text()


def test_the_verdicts() -> None:
    result = made_up(4)
    assert result.verdicts == ["yes", "others", "no", "none"]
    assert best_heads(result)[0] == "L0H1"
    assert expressed_by(result) == ["yes", "only L1H2", "no", "too few"]
    few = result.select("relations", [3])
    assert "the one relation does not have enough examples for a verdict" in printed(few, 200)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_table_fits_the_terminal_and_the_answer_stands_first(width: int) -> None:
    out = printed(made_up(8), width)
    assert all(len(line) <= width for line in out.splitlines())
    assert " ".join(out.split()).startswith("4 of 6 relations are expressed by some head; 2 more have too few")
    assert "x0→parent" in out and "and 3 more relations" in " ".join(out.split())
    assert "x7→parent" in printed(made_up(8), width, every=True)


def test_examples_tell_right_from_wrong() -> None:
    out = printed(made_up(1, shown=1))
    assert "✓ b → a 0.80" in out
    assert "✗ " + "c" * 39 + "… → d 0.30   right: a" in out
    assert "(a word further away)" in out


def test_the_map_has_what_is_expressed_and_the_frequent() -> None:
    cells = cells_of(made_up(100))
    assert len(cells.rows) == 50 > MOST_RELATIONS  # all that a head expresses
    assert cells.found[0].tolist() == [False, True, False, False, False, False]
    assert cells.best[0] == 1
    assert cells.above[0, 1] == pytest.approx(0.5)
    large = cells_of(made_up(8, shape=(20, 12)))
    assert large.above.shape == (8, 20)
    assert large.best[0] == 0


@pytest.mark.parametrize("shape", [(1, 3), (6, 12), (24, 16)])
def test_figures_are_drawn_whole(shape: tuple[int, int], tmp_path: Path) -> None:
    found = made_up(1, (2, 3)) if shape == (1, 3) else made_up(60, shape, hostile="$\\alpha$ 中\u202e", shown=3)
    paths = found.draw(tmp_path, ["png", "svg"])
    assert all(path.parent == tmp_path for path in paths)
    for path in paths:
        if path.suffix == ".png":
            with Image.open(path) as image:
                assert image.width >= 1600


def test_no_word_of_an_example_lies_over_another() -> None:
    from attnscope.drawing.canvas import matplotlib_defaults

    with matplotlib_defaults():
        _, (_, page) = pages(made_up(1, shown=1))
        page.agg.draw()
        boxes = {
            t.get_text(): t.get_window_extent()
            for t in page.axes.texts
            if t.get_text() in ("a", "b", "c" * 39 + "…", "d")
        }
    assert len(boxes) == 4
    ordered = sorted(boxes.values(), key=lambda box: box.x0)
    assert all(left.x1 <= right.x0 + 1 for left, right in zip(ordered, ordered[1:], strict=False))


def test_one_example_is_no_row_of_the_table_and_none_of_the_figure(minilm: Any) -> None:
    found = attnscope.relations(minilm, TREES)
    rows = listed(found)
    alone = [row for row in found.ranked if row not in rows]
    names = found["relations"]["relation"]
    assert rows and alone and (found["relations"]["n_scored"][alone] <= 1).all()
    assert cells_of(found).rows == rows
    out = printed(found, 140, every=True)
    assert not any(line.startswith(f"{names[row]} ") for line in out.splitlines() for row in alone)
    assert f"one example at most: {len(alone)} relations (" in " ".join(out.split())
    few = found.select("relations", alone)
    assert listed(few) == few.ranked, "else there were no table"
