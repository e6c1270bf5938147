"""`attnscope heatmap` on long texts as its users meet it."""

import json
from pathlib import Path

import numpy as np
import pytest

from attnscope import load_record

LONG = "one two three, four five six. " * 60  # 482 tokens of minilm's 512


def test_a_long_text_is_pooled_of_itself_and_drawn_again(run, tmp_path):
    status, out, _ = run("heatmap", LONG, "-L", "1", "-H", "0-2", "-f", "png,npz,json", "-o", "a")
    assert status == 0
    assert out.split()[-3:] == ["a/L01.png", "a/pooled.npz", "a/pooled.json"]
    record = load_record("a/pooled.npz")
    n = len(record.maps[0].queries)
    assert n > 400
    assert record.maps[0].cells.shape == (1, 3, -(-n // 2), -(-n // 2))
    copy = json.loads(Path("a/pooled.json").read_text())
    np.testing.assert_allclose(np.array(copy["cells"]), record.maps[0].cells[0], atol=1e-6)
    status, out, _ = run("show", "a", "--pick", "L1H2", "-o", "b")
    assert status == 0
    assert out.split() == ["b/L01H02.png"]
    status, out, _ = run("show", "a")
    assert status == 0
    assert "strongest links" in out
    status, out, _ = run("show", "a/pooled.npz", "--json")
    document = json.loads(out)
    assert document["schema"] == "attnscope.pooled/2"
    assert len(document["links"]) == 30
    status, out, err = run("show", "a", "--query", "one")
    assert status == 2
    assert "has no --query" in err


def test_short_texts_are_pooled_where_that_is_asked_for(run):
    status, out, _ = run("heatmap", "one two three", "--pool", "8", "--json", "-f", "npz", "-L", "0")
    document = json.loads(out)
    assert status == 0
    assert document["files"][0].endswith("pooled.npz")
    cells = np.array(document["cells"])
    assert cells.shape == (12, 5, 5)


def test_long_texts_stay_whole_where_that_is_asked_for(run):
    for asked in (["--pool", "0"], ["--hide-special"], ["--rows", "400:404", "--cols", ":8"]):
        status, _, _ = run("heatmap", LONG, "--pick", "L0H1", "-f", "npz", "-o", "whole", *asked)
        assert status == 0, asked
    record = load_record("whole/heatmap.npz")
    assert record.weights.shape[2:] == (4, 8)
    assert record.maps[0].origin == (400, 0)


def test_a_part_is_drawn(run):
    status, out, err = run(
        "heatmap", LONG, "--pick", "L0H1", "--rows", "400:410", "--cols", "0:12", "-o", "a"
    )
    assert status == 0
    assert out.split()[-2:] == ["a/L00H01.png", "a/heatmap.npz"]
    assert "queries 400 to 409 and keys 0 to 11" in err


@pytest.mark.parametrize(
    "wrong",
    [
        ["--rows", "4:900"],
        ["--rows", "5:5"],
        ["--rows", "9:3"],
        ["--cols", "some"],
        ["--cols", ":"],
        ["--rows", "-4:2"],
        ["--pool", "3"],
        ["--pool", "-1"],
        ["--pool", "9999"],
        ["--pool", "median"],
        ["--pool", "64", "--words"],
        ["--pool", "64", "--rows", "0:3"],
        ["--pool", "64", "--query", "one"],
    ],
)
def test_wrong_usage_is_one_line_and_a_hint(wrong, run, tmp_path):
    status, out, err = run("heatmap", "one two three", *wrong)
    assert status == 2
    assert out == ""
    lines = err.splitlines()
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("hint: ")
    assert len(lines) == 2
    assert not list(tmp_path.iterdir())


def test_texts_over_the_limit_say_the_limit(run):
    status, _, err = run("heatmap", LONG * 3, "-L", "0", "-H", "0", "-f", "npz", "-o", "a")
    assert status == 0
    assert "the model takes 512" in err
    assert len(err.splitlines()) == 1
