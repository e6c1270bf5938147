"""Machines as they may be: folders that nobody may read or that are gone, damaged caches, terminals of no width."""

import subprocess
import sys
from pathlib import Path

import pytest

from attnscope.models.catalog import list_models
from attnscope.report.plain_text import cut
from attnscope.studies.maps import study as heatmap_study
from tests.processes import LIMIT_S

RECORDS = sorted((Path(__file__).parent / "records").iterdir())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("width", ["20", "1", "0"])
@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_every_record_is_shown_whatever_the_terminal_says_of_its_width(path, width, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", width)
    status, _, err = run("show", path)
    assert status == 0, err
    assert "error" not in err


def test_a_label_of_any_length_is_cut_to_any_room():
    assert [cut("label", cells) for cells in (9, 5, 3, 1, 0, -2)] == [
        "label",
        "label",
        "la…",
        "…",
        "",
        "",
    ]
    assert [cut("字字", cells) for cells in (4, 3, 2)] == ["字字", "字…", "…"]
    assert cut("字" * 500_000, 5) == "字字…"


def test_the_caches_of_another_user_are_as_if_they_were_empty(monkeypatch):
    """As sudo leaves HOME: what lies there may not even be asked for."""
    stat = Path.stat

    def refuse(path, **how):
        if str(path).startswith("/nobody"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **how)

    monkeypatch.setattr(Path, "stat", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/nobody/hub")
    assert {one.state for one in list_models()} <= {"installed", "built in", "not here"}


def test_a_current_folder_that_was_removed_is_said(tmp_path):
    script = f"mkdir gone && cd gone && rmdir ../gone && exec {sys.executable} -m attnscope models"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=LIMIT_S, cwd=tmp_path
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: the current folder cannot be used: No such file")
    assert "hint" in done.stderr


def test_a_file_that_ends_too_early_is_no_ctrl_c(run, monkeypatch):
    def end(*_):
        raise EOFError("ran out of input")

    monkeypatch.setattr(heatmap_study, "study", end)
    status, _, err = run("heatmap", "x")
    assert status == 1
    assert "EOFError: ran out of input" in err
