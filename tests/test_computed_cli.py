"""`trace`, `split` and `cost` as their users meet them."""

import io
import json
import re

import numpy as np
import pytest
from rich.console import Console

from attnscope.cli.quiz import run_quiz
from attnscope.questions.cost import Cost
from attnscope.studies.cost import cost
from attnscope.studies.trace import trace
from tests.core_helpers import WORKED
from tests.processes import python

TEXT = "The cat sat on the mat."


@pytest.fixture
def attnscope(run, monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "ATTNSCOPE_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("COLUMNS", "100")
    return run


def numbers_in(text):
    return [float(found) for found in re.findall(r"(?<![\w.])-?\d+\.\d{4}(?!\d)", text)]


def every_number(rows):
    return {f"{value:.4f}" for value in np.ravel(np.array(rows, float))}


def has_matrix(out, labels, rows):
    """Whether a table of these rows, behind these labels, stands in the output."""
    lines = [
        rf" *{label}" + "".join(rf" +{value:.4f}" for value in row)
        for label, row in zip(labels, rows, strict=True)
    ]
    return re.search("\n".join(lines), out) is not None


# Every number of the worked example, in the terminal and as JSON


def test_the_trace_prints_every_number(attnscope):
    status, out, _ = attnscope("learn", "trace")
    assert status == 0
    for name in ("weights_head_1", "weights_head_2", "output"):
        assert has_matrix(out, WORKED["tokens"], WORKED[name]), name
    status, out, _ = attnscope("learn", "trace", "--json")
    document = json.loads(out)
    found = [*np.round(document["weights"], 4).tolist(), np.round(document["joined"], 4).tolist()]
    assert found == [WORKED["weights_head_1"], WORKED["weights_head_2"], WORKED["output"]]


def test_the_split_prints_every_number(attnscope):
    status, out, _ = attnscope("learn", "split", "--drop", "0,1", "--all")
    assert status == 0
    single = WORKED["single_head"]
    four = WORKED["four_heads"]
    for matrix in (
        single["weights"],
        single["output"],
        WORKED["weights_head_1"],
        WORKED["weights_head_2"],
        WORKED["mean_of_two_heads"],
        WORKED["output"],
        *four["weights"],
        four["output"],
    ):
        assert has_matrix(out, WORKED["tokens"], matrix)
    assert "H0: 0.9600" in out
    assert "H1: 0.9941" in re.sub(r"\s+", " ", out)
    status, out, _ = attnscope("learn", "split", "--drop", "0,1", "--json")
    document = json.loads(out)
    heads = [single["weights"], WORKED["weights_head_1"], WORKED["weights_head_2"], *four["weights"]]
    np.testing.assert_allclose(document["weights"], heads, atol=5.1e-5, rtol=0)
    outputs = [single["output"], WORKED["output"], four["output"]]
    np.testing.assert_allclose(document["output"], outputs, atol=5.1e-5, rtol=0)
    drops = [drop["l2"] for drop in document["drops"] if drop["n_heads"] == 2]
    np.testing.assert_allclose(drops, WORKED["l2_change_when_a_head_is_dropped"], atol=5.1e-5, rtol=0)


def test_one_query_is_followed(attnscope):
    status, out, err = attnscope("learn", "trace", "--query", "cat")
    assert status == 0
    for line in (
        "q = Q[1, 0:2]",
        "dots = q @ k.T",
        "weighted = weights[:, None] * v",
        "H[1, 1] = weighted.sum(0)",
    ):
        assert f"    {line}\n" in out
    assert "dots / √d_head = dots / √2 = dots × 0.7071" in out
    assert every_number([0.4109, 0.1336, 0.2289, 0.3663]) <= {f"{x:.4f}" for x in numbers_in(out)}
    assert err.startswith("note: no projections")
    assert attnscope("learn", "trace", "--query", "cat", "-q")[2] == ""


def test_a_text_is_traced_and_saved_and_its_lines_run(attnscope, tmp_path):
    arguments = ("learn", "trace", TEXT, "-L", "3", "-H", "1", "--query", "cat")
    status, out, _ = attnscope(*arguments, "-o", "out")
    assert status == 0
    assert out.splitlines()[-3:] == [f"out/trace.{kind}" for kind in ("npz", "json", "py")]
    again = attnscope("show", "out", "-o", "other")[1].splitlines()[-2:]
    assert again == ["other/trace.npz", "other/trace.json"], (
        "lines of a record from elsewhere do not become a script"
    )
    done = python(tmp_path / "out" / "trace.py")
    assert done.returncode == 0, done.stderr


def test_splits_and_costs_are_saved(attnscope, tmp_path):
    status, out, _ = attnscope("learn", "split", "--counts", "2", "-o", "s")
    assert status == 0
    assert out.splitlines()[-3:] == ["s/split.npz", "s/split.csv", "s/split.png"]
    status, out, _ = attnscope("learn", "cost", "gpt2", "-o", "c")
    assert status == 0
    assert out.splitlines()[-2:] == ["c/cost.csv", "c/cost.json"]
    assert Cost.load(tmp_path / "c" / "cost.npz").as_json() == cost("gpt2").as_json()


# Drawn in any terminal


# The quiz

SAT = ["1 1 2 0 1", "0.71, 0.71, 1.41, 0, 0.71", "(0.18 0.18 0.37 0.09 0.18)", "0.27 0.27"]


def take_quiz(answers, token="sat"):
    lines = io.StringIO("".join(f"{answer}\n" for answer in answers))
    printed = io.StringIO()
    run_quiz(trace(heads=[0], query=token), Console(file=printed, width=100), lines.readline)
    return printed.getvalue()


def test_right_answers_are_graded_right():
    out = take_quiz(SAT)
    assert out.count("Right.") == 4
    assert "4 of 4 right" in out
    assert "np.exp" not in out
    assert "Softmax: exponentials" not in out
    assert "Weighted values" not in out


def test_wrong_and_missing_answers_are_told_apart():
    out = take_quiz([SAT[0], "1 1 2 0 1", "", "x y", "1 2 3", SAT[3]])
    assert [out.count(grade) for grade in ("Right.", "Wrong.", "No answer.")] == [2, 1, 1]
    assert "'x y' has a word that is no number (type 2 numbers)" in out
    assert "you typed 3 numbers (this step has 2)" in out
    assert "2 of 4 right" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--query", "sat"], "the answers end after 0 of 8"),
        (["--query", "sat", "--json"], "--json cannot be given beside --quiz"),
    ],
)
def test_a_quiz_without_answers_says_what_is_missing(arguments, said, attnscope, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    status, _, err = attnscope("learn", "trace", "--quiz", *arguments)
    assert status
    assert said in err
