"""What is written where: whole files, in the folder that was named, over nothing but files."""

import errno
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from attnscope import BatchOptions, batch
from attnscope.choice import Choice
from attnscope.corpus import Corpus
from attnscope.errors import AttnscopeError
from attnscope.results.storage import format_csv, replace_together, write_whole
from attnscope.studies.inputs.options import WorkerOptions
from tests.findings_helpers import fake_findings
from tests.record_helpers import simple

PLAIN = BatchOptions(choice=Choice(layers=(0,)), running=WorkerOptions(workers=1))


def make_link(path):
    (path.parent / "foreign").write_text("mine", "utf-8")
    path.symlink_to(path.parent / "foreign")


SPECIAL = {
    "a link": make_link,
    "a device": lambda path: path.symlink_to("/dev/null"),
    "a pipe": lambda path: os.mkfifo(path),
    "a folder": lambda path: path.mkdir(),
}


# Files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", SPECIAL)
def test_what_is_no_file_is_not_replaced(what, tmp_path):
    path = tmp_path / "heads.npz"
    SPECIAL[what](path)
    before = path.lstat()
    with pytest.raises(
        AttnscopeError, match=f"it is {'a link' if what == 'a device' else what}, not a file"
    ):
        fake_findings(2, 3).save(path)
    assert os.path.samestat(path.lstat(), before)
    assert not list(tmp_path.glob(".*.part"))
    if what == "a link":
        assert (tmp_path / "foreign").read_text("utf-8") == "mine"


def test_a_device_is_not_replaced():
    with pytest.raises(AttnscopeError, match="cannot write /dev/null: it is a device"):
        write_whole(Path("/dev/null"), b"lost")
    assert not Path("/dev/null").is_file()


def test_a_full_disk_leaves_no_folder(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(AttnscopeError, match="No space left"):
        write_whole(tmp_path / "a/b/c.json", b"{}")
    with (
        pytest.raises(AttnscopeError, match="No space left"),
        replace_together(tmp_path / "a/b/c") as staged,
    ):
        (staged / "index.html").write_bytes(b"")
    assert list(tmp_path.iterdir()) == []


# Pages into streams ----------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    return str(simple(5).save(tmp_path / "heatmap.npz"))


def test_a_page_goes_to_stdout(run, saved, tmp_path):
    assert run("page", "--record", saved, "-o", "page.html")[0] == 0
    status, out, err = run("page", "--record", saved, "-o", "-")
    assert status == 0
    assert err == ""
    assert out == (tmp_path / "page.html").read_text("utf-8")
    assert not (tmp_path / "-").exists()
    assert run("page", "--record", saved, "-o", "-", "--json")[0] == 2


def test_a_page_goes_into_a_pipe(run, saved, tmp_path):
    pipe = tmp_path / "pipe"
    read = list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text("utf-8")))
    reader.start()
    status, out, err = run("page", "--record", saved, "-o", pipe)
    reader.join()
    assert status == 0
    assert out == ""
    assert err == ""
    assert read[0].startswith("<!doctype html>")
    assert pipe.is_fifo()


# Batches ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "texts.txt").write_text("the cat\n", "utf-8")
    return Corpus([str(tmp_path / "texts.txt")])


@pytest.mark.usefixtures("worker_here")
def test_the_folder_of_a_text_that_is_a_link_is_not_followed(corpus, tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "heatmap.npz").write_text("mine", "utf-8")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/00000-the-cat").symlink_to(foreign)
    result = batch("own", corpus, tmp_path / "out", PLAIN)
    assert [failed.error for failed in result.failed] == [
        f"{tmp_path / 'out/00000-the-cat'} is a link, which leads out of the batch (remove it)"
    ]
    assert [(path.name, path.read_text("utf-8")) for path in foreign.iterdir()] == [
        ("heatmap.npz", "mine")
    ]


@pytest.mark.usefixtures("worker_here")
def test_a_batch_that_cannot_begin_leaves_nothing_of_its_own(corpus, tmp_path):
    impossible = replace(PLAIN, choice=Choice(layers=(99,)))
    with pytest.raises(AttnscopeError, match="there is no layer 99"):
        batch("own", corpus, tmp_path / "new/out", impossible)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts.txt"]
    assert batch("own", corpus, tmp_path / "out", PLAIN).complete
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.html")}
    manifest = (tmp_path / "out/manifest.jsonl").read_bytes()
    with pytest.raises(AttnscopeError, match="there is no layer 99"):
        batch("own", corpus, tmp_path / "out", impossible)
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.html")} == before
    assert (tmp_path / "out/manifest.jsonl").read_bytes() == manifest


# CSV -------------------------------------------------------------------------------------------------------------


def test_no_cell_of_a_csv_is_a_formula():
    row = [
        "=cmd|' /C calc'!A0",
        "+acl",
        "-",
        "@SUM(A1)",
        "\tx",
        "\r=1",
        "a=1",
        "-0.5",
        "+1e3",
        "",
        -0.5,
        3,
        None,
    ]
    line = format_csv([row])
    assert "'=cmd|' /C calc'!A0,'+acl,'-,'@SUM(A1),'\tx," in line
    assert ",a=1,-0.5,+1e3,,-0.5,3," in line
