"""`attnscope heads` and `show` as a user runs them: what is printed and written, and how they fail."""

import gzip
import json
from pathlib import Path

import pytest

from tests.conftest import SAMPLES, names_in

SENTENCES = str(SAMPLES / "sentences.txt")


@pytest.fixture
def study(run):
    """Runs `attnscope heads` on the glass box."""
    return lambda *arguments: run("heads", "-m", "own", *arguments)


def document(out):
    return json.loads(out)


def roles_in(found, layer, head):
    (one,) = [h for h in found["heads"] if (h["layer"], h["head"]) == (layer, head)]
    return {name for name in one["role"].split("+") if name}


# Results ---------------------------------------------------------------------------------------------------------


def test_a_grid_a_table_and_the_files(study, tmp_path):
    status, out, err = study(
        "--file", SENTENCES, "-o", "out", "-f", "npz,csv,json", "--measures", "entropy_nats"
    )
    assert status == 0, err
    assert "previous token" in out
    assert "entropy" in out
    assert out.splitlines()[-3:] == ["out/heads.npz", "out/heads.csv", "out/heads.json"]
    assert names_in(tmp_path / "out") == ["heads.csv", "heads.json", "heads.npz"]
    rows = (tmp_path / "out/heads.csv").read_text("utf-8").splitlines()
    assert len(rows) == 1 + 14


def test_one_json_document_with_the_names_of_measures(study):
    from attnscope.core.catalogue import measure_names

    status, out, err = study("--file", SENTENCES, "--json")
    assert status == 0, err
    found = document(out)
    assert found["schema"] == "attnscope.heads/2"
    assert {"model", "sha256", "versions", "dtype", "device", "seed", "threads"} <= set(found["run"])
    assert found["corpus"]["n_texts"] == 26
    first = found["heads"][0]
    parts = {f"previous_token{part}" for part in ("", "_low", "_high", "_baseline", "_count")}
    assert {*measure_names(), *parts} <= set(first)
    assert {"role", "value", "value_low", "value_high", "value_baseline", "q", "tentative"} <= set(
        found["roles"][0]
    )
    assert roles_in(found, 0, 0) == {"previous_token", "local"}


def test_a_text_gives_measures_and_no_role_and_that_is_said(study):
    status, out, _ = study("the cat sat on the mat", "--json")
    found = document(out)
    assert status == 0
    assert not any(head["role"] for head in found["heads"])
    assert found["heads"][0]["previous_token"] > 0.5
    status, out, _ = study("the cat sat on the mat")
    assert "too few texts to say what heads do: 3 at least" in " ".join(out.split())


def test_the_probe_finds_the_induction_head(study):
    status, out, err = study("--probe", "repeat", "--json", "--no-describe")
    assert status == 0, err
    found = document(out)
    assert roles_in(found, 1, 1) == {"induction"}
    assert sum("induction" in head["role"].split("+") for head in found["heads"]) == 1
    assert found["corpus"]["n_texts"] == 50
    # Texts come as numbers; their special tokens are known all the same.
    assert next(h for h in found["heads"] if (h["layer"], h["head"]) == (0, 3))["resting_share"] > 0.99


def test_stdin_and_compressed_files_give_the_same(study, tmp_path, monkeypatch):
    import io

    (tmp_path / "s.txt.gz").write_bytes(gzip.compress(Path(SENTENCES).read_bytes()))

    class Stdin:
        buffer = io.BytesIO(Path(SENTENCES).read_bytes())

    monkeypatch.setattr("sys.stdin", Stdin())
    found = [
        document(study(*given, "--json", "--no-describe")[1])
        for given in (("--file", SENTENCES), ("--file", "*.gz"), ("-",))
    ]
    assert found[0]["heads"] == found[1]["heads"] == found[2]["heads"]


# Records ----------------------------------------------------------------------------------------------


def test_show_tells_all_of_one_head(run, study, tmp_path):
    assert study("--file", SENTENCES, "-o", "one", "-f", "npz")[0] == 0
    status, out, err = run("show", "one", "--pick", "L0H1")
    assert status == 0, err
    assert "95% interval" in out
    assert "rank of" in out
    assert "entropy nats" in out
    assert "L0H0" not in out
    assert "show out --pick" in study("--pick", "L0H1", "--no-describe")[2]
    assert "L0H0" in run("show", "one")[1]
    assert run("show", "one", "--pick", "L0H1", "-o", "picked", "-f", "csv")[0] == 0
    assert len((tmp_path / "picked/heads.csv").read_text().splitlines()) == 2


# Failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("--threshold", "nobody=0.2"),
        ("--threshold", "local=2"),
        ("--format", "npz"),
        ("--control", "trained"),
        ("--chunk", "0"),
        ("--measures", "nothing"),
        ("--probe", "repeat"),
        ("a text too",),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_said_before_anything_runs(study, tmp_path, arguments):
    status, out, err = study("--file", SENTENCES, *arguments)
    assert (status, out) == (2, ""), err
    assert err.startswith("error: ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["", "\n \n\t\n"])
def test_without_text_nothing_is_written(study, tmp_path, content):
    (tmp_path / "blank.txt").write_text(content, "utf-8")
    status, out, err = study("--file", "blank.txt", "-o", "out")
    assert (status, out) == (1, "")
    assert "no text" in err
    assert not (tmp_path / "out").exists()


def test_an_unreadable_file_in_the_middle_loses_nothing(study, tmp_path):
    lines = Path(SENTENCES).read_bytes().splitlines(keepends=True)
    (tmp_path / "a.txt").write_bytes(b"".join(lines[:12]))
    (tmp_path / "b.txt").write_bytes(lines[12] + b"\xff\xfe broken\n" + lines[13])
    (tmp_path / "c.txt").write_bytes(b"".join(lines[14:20]))
    given = ("--file", "a.txt", "--file", "b.txt", "--file", "gone.txt", "--file", "c.txt")
    status, out, err = study(*given, "-o", "out", "-f", "npz,json")
    assert status == 1
    assert "previous token" in out
    assert "out/heads.npz" in out
    assert "skipped: b.txt, line 2: " in err
    assert "skipped: gone.txt: " in err
    assert "error: 2 parts of the texts could not be read" in err
    found = json.loads((tmp_path / "out/heads.json").read_text("utf-8"))
    assert found["corpus"]["n_texts"] == 19
    assert [problem["source"] for problem in found["corpus"]["problems"]] == ["b.txt", "gone.txt"]
    assert found["corpus"]["complete"]


# Interruptions ---------------------------------------------------------------------------------------------------
