"""Files that belong together: all new or all earlier, whenever a run is stopped; whatever else is there stays."""

import os
from pathlib import Path

import pytest

import attnscope
from attnscope import output
from attnscope.errors import AttnscopeError
from attnscope.results.result import Result
from attnscope.results.storage import remove_unfinished, replace_together
from tests.conftest import names_in
from tests.findings_helpers import fake_findings
from tests.record_helpers import simple


def write_set(target, content, names):
    index = target / "index.txt"
    earlier = index.read_text().split() if index.is_file() else []
    with replace_together(target, old_names=earlier, index_name="index.txt") as staged:
        for name in names:
            (staged / name).write_text(content)
        (staged / "index.txt").write_text(" ".join(names))


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()
    }


OLD = ("a.npz", "b.csv", "c.csv")
NEW = ("a.npz", "b.csv", "d.csv")
EARLIER = dict.fromkeys(OLD, "old") | {"index.txt": " ".join(OLD), "notes.txt": "mine"}
LATER = dict.fromkeys(NEW, "new") | {"index.txt": " ".join(NEW), "notes.txt": "mine"}


@pytest.fixture
def target(tmp_path):
    write_set(tmp_path / "out", "old", OLD)
    (tmp_path / "out/notes.txt").write_text("mine")
    return tmp_path / "out"


def test_a_set_replaces_its_own_files_alone(target):
    write_set(target, "new", NEW)
    assert contents(target) == LATER


@pytest.mark.parametrize("raised", [KeyboardInterrupt, AttnscopeError, ValueError])
def test_a_set_that_is_not_finished_changes_nothing(raised, target):
    for folder in (target, target / "new/folder"):
        with pytest.raises(raised), replace_together(folder) as staged:
            (staged / "a.npz").write_text("new")
            raise raised("x")
    assert contents(target) == EARLIER
    assert not (target / "new").exists()


def test_what_a_killed_run_left_is_removed_and_nothing_else(target):
    left = target / "unfinished-01234567"
    left.mkdir()
    (left / "a.npz").write_text("half")
    (target / "unfinished-business").mkdir()
    (target / "unfinished-business/notes.txt").write_text("mine")
    remove_unfinished(target)
    assert contents(target) == EARLIER | {"unfinished-business/notes.txt": "mine"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no pipes with names")
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(target):
    (target / "a.npz").unlink()
    os.mkfifo(target / "a.npz")
    with pytest.raises(AttnscopeError, match=r"cannot write .*a\.npz: it is a pipe"):
        write_set(target, "new", NEW)


def test_what_is_no_file_is_not_replaced(target):
    (target / "d.csv").mkdir()
    with pytest.raises(AttnscopeError, match=r"cannot write .*out/d\.csv: it is a folder, not a file"):
        write_set(target, "new", NEW)
    assert contents(target) == EARLIER


@pytest.mark.parametrize(
    "command", [("heatmap", "a cat"), ("ablate", "a cat", "--pick", "L0H0"), ("batch", "texts.txt")]
)
def test_an_empty_name_is_not_the_working_folder(command, run):
    Path("texts.txt").write_text("a cat\n")
    before = {*Path.cwd().iterdir()}
    for empty in (("-o", ""), ("--out=",)):
        status, out, err = run(*command, "-m", "own", *empty)
        assert (status, out) == (2, "")
        assert "--out is empty" in err
    assert {*Path.cwd().iterdir()} == before


def test_an_interrupted_drawing_leaves_the_earlier_set_and_keeps_the_new_data(
    tmp_path, capsys, monkeypatch
):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    formats = ("npz", "csv", "png")
    # Without an earlier set the new data stay.
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Result, "draw", interrupted)
        output.write_files(fake_findings(2, 3), tmp_path / "out", formats)
    assert set(names_in(tmp_path / "out")) == {"heads.npz", "heads.csv"}
    output.write_files(fake_findings(2, 3), tmp_path / "out", formats)
    # An earlier set stays whole, and the new data lie beside it.
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    capsys.readouterr()
    monkeypatch.setattr(Result, "draw", interrupted)
    with pytest.raises(KeyboardInterrupt):
        output.write_files(fake_findings(3, 4), tmp_path / "out", formats)
    assert {path: path.read_bytes() for path in before} == before
    assert len(attnscope.load_record(tmp_path / "out/interrupted")["heads"]) == 12
    assert "not all figures were drawn, so none is kept: the data are in" in capsys.readouterr().err
    assert set(names_in(tmp_path / "out")) == {*(p.name for p in before), "interrupted"}


@pytest.mark.parametrize(
    "command",
    [
        ("atlas", "a cat"),
        ("training", "own", "own", "--file", "texts.txt"),
        ("heatmap", "a cat"),
        ("ablate", "a cat", "--pick", "L0H0"),
        ("show", "heatmap.npz"),
        ("batch", "texts.txt"),
    ],
)
def test_no_folder_is_named_as_stdout_is(command, run, tmp_path):
    simple(5).save(tmp_path / "heatmap.npz")
    (tmp_path / "texts.txt").write_text("a cat\n")
    model = [] if command[0] in ("show", "training") else ["-m", "own"]
    status, out, err = run(*command, *model, "-o", "-")
    assert (status, out) == (2, "") and "- is stdout, which takes no files" in err, err
    assert not (tmp_path / "-").exists()
