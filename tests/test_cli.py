"""The command line as its users meet it: what it prints where, and what it leaves behind."""

import csv
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import attnscope
from attnscope.results.result import load_record as load
from tests.cli_helpers import TIRED, elsewhere, files, loaded_once, require_one_line
from tests.conftest import Result

__all__ = ["elsewhere", "loaded_once"]


# Starting


def test_help_and_version_are_on_stdout(run):
    assert run("--version") == Result(0, f"attnscope {attnscope.__version__}\n", "")
    for arguments in (
        ["--help"],
        ["heatmap", "-h"],
        ["help", "heads"],
    ):
        result = run(*arguments)
        assert (result.status, result.err) == (0, "")
        assert "Usage" in result.out
    assert "Formats: npz, json, py\n" in run("learn", "trace", "-h").out
    result = run()
    assert result.status == 2
    assert "Usage" in result.out
    assert result.err == ""


# What it writes


def test_the_first_command_of_a_new_user(run, tmp_path):
    result = run("heatmap", TIRED)
    assert (result.status, result.err) == (0, "")
    answer = result.out.splitlines()[:8]
    paths = [Path(line) for line in result.out.splitlines()[8:]]
    assert answer[1] == "L0H2  “'” → “didn”  1.00"
    assert answer[-1].startswith("open file://")
    assert [path.name for path in paths] == [
        "overview.png",
        *(f"L{layer:02d}.png" for layer in range(6)),
        "heatmap.npz",
    ]
    (folder,) = {path.parent for path in paths}
    assert re.fullmatch(
        r"attnscope-out/minilm-the-animal-didnt-cross-the-street-[0-9a-f]{8}", str(folder)
    )
    assert files(tmp_path / folder) == sorted(path.name for path in paths)
    assert run("heatmap", TIRED, "-L", "0", "-f", "npz").out != str(paths[0])


def test_the_same_text_model_and_options_have_the_same_folder(run):
    def folder(*options, text="The cat"):
        return Path(run("heatmap", text, "-f", "npz", *options).out.strip()).parent

    first = folder()
    assert folder() == first
    others = [folder("--words"), folder("--scale", "head"), folder(text="The cat.")]
    assert len({first, *others}) == 4


def test_every_format_at_once(run, tmp_path):
    result = run(
        "heatmap",
        TIRED,
        "--pick",
        "L3H1",
        "-f",
        "png,svg,pdf,npz,csv,json,text",
        "-o",
        "out",
        "--query",
        "it",
    )
    assert (result.status, result.err) == (0, "")
    expected = [f"{stem}.{kind}" for stem in ("L03H01", "query-010") for kind in ("png", "svg", "pdf")]
    expected += ["heatmap.npz", "heatmap.csv", "heatmap.json"]
    assert result.out.splitlines()[-9:] == [str(Path("out") / name) for name in expected]
    assert files(tmp_path / "out") == sorted(expected)
    assert "it → animal 0.68" in result.out
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    for name in expected[:6]:
        assert (tmp_path / "out" / name).read_bytes().startswith(starts[name[-3:]])
    saved = load("out/heatmap.npz")
    document = json.loads(Path("out/heatmap.json").read_text("utf-8"))
    np.testing.assert_array_equal(saved["weights"], np.array(document["weights"], np.float32))
    with Path("out/heatmap.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == saved.weights.size
    for row in rows:
        head = saved.of(int(row["layer"]), int(row["head"]))
        query = int(row["query"])
        key = int(row["key"])
        assert np.float32(row["weight"]) == head[query, key]
        assert row["query_token"] == saved.tokens[query]
        assert row["key_token"] == saved.tokens[key]


@pytest.mark.parametrize(
    ("layers", "names"), [("0", ["a.png"]), ("0-1", ["a-L00.png", "a-L01.png", "a-overview.png"])]
)
def test_a_figure_is_named_and_no_other_picture_is_replaced(run, tmp_path, layers, names):
    arguments = ("heatmap", "a cat", "-m", "own", "-L", layers, "-o", "new/a.png")
    for _ in range(2):
        assert run(*arguments)[0] == 0
    assert files(tmp_path / "new") == names
    (tmp_path / "new/a.png").write_bytes(b"a photo")
    assert run(*arguments)[0] == 1
    assert (tmp_path / "new/a.png").read_bytes() == b"a photo"


def test_a_file_of_records_is_for_batch(run, tmp_path):
    (tmp_path / "pairs.jsonl").write_text('{"text": "a", "text_pair": "b"}')
    status, _, err = run("heatmap", "--file", "pairs.jsonl")
    assert status == 2
    assert "attnscope batch pairs.jsonl" in err


def test_json_is_one_document_and_nothing_else(run):
    result = run(
        "heatmap", "The café 你好 😀", "-L", "0", "-f", "png", "-o", "out", "--json", "--query", "the"
    )
    document = json.loads(result.out)
    unknown = "note: 3 words are unknown to the tokenizer, which reads [UNK] instead: 你, 好, 😀\n"
    others = result.err.removeprefix(unknown)
    assert others != result.err
    assert others == "" or others.startswith("note: no installed font has ")
    assert document["schema"] == "attnscope.heatmap/2"
    assert document["files"] == ["out/L00.png", "out/query-001.png"]
    assert document["options"]["text"] == "The café 你好 😀"
    assert document["run"]["sha256"].startswith("53aa51172d14")
    assert np.shape(document["weights"])[0] == 12 == len(document["heads"])


@pytest.mark.parametrize(
    "command", [["models"], ["models", "minilm"], ["models", "minilm", "--engine", "native"]]
)
def test_other_commands_have_json_too(run, command):
    result = run(*command, "--json")
    assert (
        json.loads(result.out)["schema"] == f"attnscope.{'models' if len(command) == 1 else 'model'}/1"
    )
    assert (result.status, result.err) == (0, "")
    assert "minilm" in run(*command).out


def test_a_text_is_read_from_stdin_or_a_file(run, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_bytes("\ufeffThe cat\r\n".encode())
    literal = run("heatmap", "The cat", "-f", "npz").out
    assert run("heatmap", "--file", "text.txt", "-f", "npz").out == literal
    with (tmp_path / "text.txt").open(encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert run("heatmap", "-", "-f", "npz").out == literal


def test_a_text_that_is_cut_is_said_on_stderr_unless_quiet(run):
    text = "word " * 600
    result = run("heatmap", text, "--pick", "L0H0", "-f", "npz", "--pool", "0")
    said = "the text has 602 tokens, the model takes 512: the first 510 of the text are shown"
    assert result.err.startswith(f"note: {said}")
    assert len(result.err.splitlines()) == 1
    assert said in load(result.out.strip()).run["notes"][-1]
    assert run("heatmap", text, "--pick", "L0H0", "-f", "npz", "-q").err == ""
    assert said in run("show", result.out.strip()).err
    assert run("show", result.out.strip(), "-q").err == ""


def test_show_draws_again_what_was_saved(run, tmp_path):
    run("heatmap", "The cat sat", "-o", "first", "-f", "png,npz", "-L", "0-1", "-H", "0,5")
    result = run("show", "first/heatmap.npz", "-o", "second")
    assert result.out.splitlines() == [f"second/{name}.png" for name in ("overview", "L00", "L01")]
    for name in ("overview.png", "L00.png", "L01.png"):
        assert Path("first", name).read_bytes() == Path("second", name).read_bytes()
    assert "layer 1" not in run("show", "first/heatmap.npz").out  # four heads are drawn large
    assert "L1H5  rows: queries" in run("show", "first/heatmap.npz").out
    assert json.loads(run("show", "first/heatmap.npz", "--json").out)["heads"][1]["head"] == 5
    assert (
        run("show", "first/heatmap.npz", "--pick", "L1H5", "-o", "third", "-f", "json").out
        == "third/heatmap.json\n"
    )
    require_one_line(run("show", "first/heatmap.npz", "--pick", "L1H4"), "L1H4 is not in this record")
    require_one_line(run("show", "first/heatmap.npz", "--query", "dog"), "no token is 'dog'")
    require_one_line(run("show", "first/heatmap.npz", "-f", "pdf"), "no folder", status=2)
