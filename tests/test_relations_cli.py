"""`attnscope relations` and `show` as a user runs them, and what the views say."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from attnscope.records import load_record as load_record
from attnscope.records.relations.record import Example, ExampleLink, Relation, Relations
from attnscope.views.relations import summary
from attnscope.views.relations.figures import MOST_RELATIONS, map_of, pages
from attnscope.views.relations.summary import row, verdict
from attnscope.views.relations.terminal import examples, table
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
    assert document["schema"] == "attnscope.relations/1"


def test_json_is_one_document(study: Run) -> None:
    status, out, err = study(str(SAMPLES / "library.py"), "--json", "--chunk", "64")
    assert status == 0, err
    found = json.loads(out)
    assert found["run"]["model"] == "own"
    assert {one["name"] for one in found["relations"]} >= {"closing→opening", "name→assignment"}


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
    """n relations: the first expressed by the chosen head, the second by another one, the third by none, and so on."""
    chance = np.random.default_rng(0)
    relations = []
    for number in range(n):
        accuracy = chance.random(shape) * 0.5
        accuracy[0, 1] = 0.9
        found, kind = np.zeros(shape, np.bool_), number % 4
        if kind in (0, 1):
            found[(0, 1) if kind == 0 else (1, 2)] = True
        nan = np.full(shape, np.nan)
        relations.append(
            Relation(
                f"x{number}{hostile}→parent", 100 - number, 50, 50, 25, {}, "offset +1", 0.4,
                "fewer than 20 examples" if kind == 3 else "", accuracy, accuracy, accuracy - 0.05, accuracy + 0.05,
                accuracy / 2, nan, nan, found,
            )
        )  # fmt: skip
    links = (ExampleLink((1,), (0,), 0, True, 0.8), ExampleLink((2,), (0,), 3, False, 0.3),
             ExampleLink((3,), (0,), -1, False, 0.3))  # fmt: skip
    words = (f"a{hostile}", "b", "c" * 50, "d")
    one = [Example(relations[0].name, 0, 1, "f", 3, words, (False, True, True, False), links, True, True)] * shown
    corpus: dict[str, Any] = {"sources": ["f"], "n_texts": 5, "n_tokens": 50, "complete": True}
    options = {"margin": 0.1, "fewest_links": 20, "fewest_texts": 10}
    return Relations({"model": "m"}, corpus, options, "encoder", tuple(relations), tuple(one))


def printed(what: Any, width: int = 120) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(what)
    console.file.close()
    return console.export_text()


def test_the_verdicts() -> None:
    yes, others, no, none = made_up(4).relations
    assert [verdict(one) for one in (yes, others, no, none)] == ["yes", "others", "no", "none"]
    assert row(yes).head == "L0H1"
    assert (row(yes).accuracy, row(yes).interval, row(yes).baseline) == ("0.90", "[0.85, 0.95]", "0.40")
    assert [row(one).verdict for one in (yes, others, no, none)] == ["yes", "only L1H2", "no", "too few"]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_table_fits_the_terminal(width: int) -> None:
    found = made_up(8)
    out = printed(table(found), width)
    assert all(len(line) <= width for line in out.splitlines())
    assert "x0→parent" in out
    assert ("rule" in out.splitlines()[0]) == (width >= 80)
    assert "4 of 6 relations" in " ".join(out.split())
    assert "and 2 more" in " ".join(printed(table(made_up(8), most=6), width).split())


def test_no_verdict_is_cropped_at_the_terminal_s_edge() -> None:
    found = made_up(4)
    second = np.zeros((2, 3), bool)
    second[1, :2] = True
    named = [replace(found.relations[0], name="coref→antecedent"), replace(found.relations[1], found=second)]
    out = printed(table(replace(found, relations=tuple(named))), 80)
    assert row(named[1]).verdict == "only L1H0, L1H1"
    assert "L1H0" in out
    assert "L1H1" in out


def test_that_no_relation_has_enough_examples_is_said_as_such() -> None:
    none = made_up(4).relations[3]
    few = replace(made_up(4), relations=(none, replace(none, name="other")))
    assert "none of 2 relations has enough examples for a verdict" in printed(table(few), 200)


def test_examples_tell_right_from_wrong() -> None:
    out = printed(examples(made_up(1, shown=1)))
    assert "✓ b → a 0.80" in out
    assert "✗ " + "c" * 50 + " → d 0.30   right: a" in out
    assert "(a word further away)" in out


def test_the_map_has_what_is_expressed_and_the_frequent() -> None:
    found = map_of(made_up(100))
    assert len(found.relations) == 50 > MOST_RELATIONS  # all that a head expresses
    assert found.found[0].tolist() == [False, True, False, False, False, False]
    assert found.chosen[0] == 1
    assert found.values[0, 1] == pytest.approx(0.5)
    large = map_of(made_up(8, shape=(20, 12)))
    assert large.values.shape == (8, 20)
    assert large.chosen[0] == 0


@pytest.mark.parametrize("shape", [(1, 1), (6, 12), (24, 16)])
def test_figures_are_drawn_whole(shape: tuple[int, int], tmp_path: Path) -> None:

    nothing = np.full((1, 1), np.nan)
    if shape == (1, 1):
        found = Relations({}, {}, {}, "encoder", tuple(
            Relation("x→parent", 1, 1, 0, 0, {}, "", np.nan, "few", *[nothing] * 7, nothing > 0) for _ in range(2)
        ))  # fmt: skip
    else:
        found = made_up(60, shape, hostile="$\\alpha$ 中\u202e", shown=3)
    paths = found.draw(tmp_path, ["png", "svg"])
    assert all(path.parent == tmp_path for path in paths)
    for path in paths:
        if path.suffix == ".png":
            with Image.open(path) as image:
                assert image.width >= 1600


def test_no_word_of_an_example_lies_over_another() -> None:
    from attnscope.drawing.canvas import matplotlib_defaults

    with matplotlib_defaults():
        found = made_up(1, shown=1)
        _, (_, page) = pages(found)
        page.agg.draw()
        boxes = {
            t.get_text(): t.get_window_extent() for t in page.axes.texts if t.get_text() in ("a", "b", "c" * 40, "d")
        }
    ordered = sorted(boxes.values(), key=lambda box: box.x0)
    assert all(left.x1 <= right.x0 + 1 for left, right in zip(ordered, ordered[1:], strict=False))


def test_one_example_is_no_row_of_the_table_and_none_of_the_figure() -> None:
    found = load_record(Path(__file__).with_name("records") / "relations.npz")
    rows = [one.name for one in summary.list_relations(found)]
    alone = [one.name for one in found.relations if one.name not in rows]
    assert rows and alone and all(one.n_scored <= 1 for one in found.relations if one.name in alone)
    assert [one.name for one in map_of(found).relations] == rows
    console = Console(record=True, width=140, file=io.StringIO())
    console.print(table(found))
    printed = console.export_text()
    assert not any(line.startswith(f"{name} ") for line in printed.splitlines() for name in alone)
    assert f"one example at most: {len(alone)} relations (" in " ".join(printed.split())
    few = replace(found, relations=tuple(one for one in found.relations if one.name in alone))
    assert [one.name for one in summary.list_relations(few)] == [one.name for one in few.ranked], (
        "else there were no table"
    )
