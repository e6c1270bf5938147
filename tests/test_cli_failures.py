"""How the command line fails: in one line that says why, whatever is given, and it leaves nothing behind."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from attnscope import cli
from attnscope.studies.maps import study as heatmap_study
from tests.cli_helpers import elsewhere, files, loaded_once, process, require_one_line
from tests.conftest import names_in
from tests.processes import LIMIT_S, started
from tests.record_helpers import simple

__all__ = ["elsewhere", "loaded_once"]


# Wrong usage: 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["heatmap"], "no text is given"),
        (["heatmap", "x", "--file", "y"], "both a text and a file"),
        (["heatmap", "x", "y"], "unexpected extra argument"),
        (["heatmap", "x", "--format", "gif"], "no format 'gif'"),
        (["heatmap", "x", "-m", "absent", "--cmap", "beige"], "no colormap 'beige'"),
        (["heatmap", "x", "-L", "one"], "'one' is not a number"),
        (["heatmap", "x", "-L", "3-1"], "'3-1' is not a range"),
        (["heatmap", "x", "-L", "9" * 6000], "a layer or head has 6,000 digits"),
        (["heatmap", "x", "--pick", "3"], "'3' is not a head"),
        (["heatmap", "x", "--pick", "L0H0", "-L", "0"], "either singly or by layers"),
        (["heatmap", "x", "--engine", "gpu"], "no engine 'gpu'"),
        (["heatmap", "x", "--dtype", "int4"], "no precision 'int4'"),
        (["heatmap", "x", "--generate", "many"], "--generate"),
        (["heatmap", "x", "--nonsense"], "No such option"),
        (["show"], "Missing argument"),
        (["draw"], "No such command"),
    ],
)
def test_wrong_usage_is_one_line_and_2(run, tmp_path, arguments, said):
    require_one_line(run(*arguments), said, status=2)
    assert files(tmp_path) == []


# Failure: 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["heatmap", ""], "the text is empty"),
        (["heatmap", " \n\t"], "the text is blank"),
        (["heatmap", "a", "--pair", "b\udcff"], "the second text is not valid Unicode"),
        (["heatmap", "a\udcff"], "the text is not valid Unicode"),
        (["heatmap", "x", "-L", "6"], "no layer 6: minilm has 6 layers"),
        (["heatmap", "x", "-H", "0-12"], "no head 12: minilm has 12 heads"),
        (["heatmap", "x", "--query", "y"], "no token is 'y'"),
        (["heatmap", "x", "--device", "toaster"], "device 'toaster'"),
        (["heatmap", "--file", "absent.txt"], "cannot read absent.txt"),
        (["heatmap", "x", "-m", "minilmm"], "no model minilmm"),
        (["heatmap", "x", "-m", ""], "name is empty"),
        (["heatmap", "x", "-m", "a\x1b[31m"], r"a<U\+001B>\[31m"),
        (["show", "absent.npz"], "no file absent.npz"),
        (["show", "."], "the folder . holds no attnscope record"),
    ],
)
def test_failure_is_one_line_and_1_and_leaves_nothing(run, tmp_path, arguments, said):
    require_one_line(run(*arguments), said)
    assert files(tmp_path) == []


@pytest.mark.parametrize("out", ["a-file", "a-file/inner", "/dev/full", "/proc/attnscope/x"])
@pytest.mark.parametrize("command", ["heatmap", "show"])
def test_places_that_cannot_be_written(run, tmp_path, command, out):
    (tmp_path / "a-file").write_text("kept")
    subject = "x"
    if command == "show":
        subject = str(simple(4, layers=1).save(tmp_path / "saved.npz"))
    before = files(tmp_path)
    require_one_line(run(command, subject, "-o", out), "cannot write")
    assert files(tmp_path) == before
    assert (tmp_path / "a-file").read_text() == "kept"


def test_a_disk_that_fills_up_leaves_no_part_of_a_file(run, tmp_path, monkeypatch):
    def full(path, content):
        from attnscope.errors import AttnscopeError

        raise AttnscopeError(f"cannot write {path}: {os.strerror(errno.ENOSPC)}", "make room there")

    monkeypatch.setattr("attnscope.results.result.write_whole", full)
    require_one_line(run("heatmap", "x", "-f", "npz", "-o", "out"), "No space left on device")
    assert files(tmp_path) == []


# Bugs, interrupts, streams


def test_a_bug_names_itself_in_one_line(run, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setattr(heatmap_study, "study", broken)
    result = run("heatmap", "x")
    require_one_line(result, "internal error: ZeroDivisionError: division by zero")
    assert "ATTNSCOPE_TRACEBACK=1" in result.err
    monkeypatch.setenv("ATTNSCOPE_TRACEBACK", "1")
    monkeypatch.setattr(sys, "argv", ["attnscope", "heatmap", "x"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_ctrl_c_leaves_whole_files_and_one_line(tmp_path):
    command = [
        sys.executable,
        "-m",
        "attnscope",
        "heatmap",
        "word " * 300,
        "-m",
        "own",
        "-f",
        "png,svg,pdf",
        "-o",
        "out",
    ]

    def begun():
        try:
            return any(tmp_path.glob("out/*.png"))
        except FileNotFoundError:  # the folder is made for a moment, to find out whether it can be
            return False

    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        while not begun():
            assert run.poll() is None, run.communicate(timeout=LIMIT_S)
        os.killpg(run.pid, signal.SIGINT)
        out, err = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 130
    assert [
        line for line in err.splitlines() if not line.startswith("note: Weights are made by hand;")
    ] == ["error: interrupted"]
    paths = [line for line in out.splitlines() if line.startswith("out/")]
    # Ctrl-C may come as the last is in its place.
    assert all((tmp_path / path).is_file() for path in paths)
    left = names_in(tmp_path / "out")
    assert left
    assert all(name.endswith((".png", ".svg", ".pdf")) and not name.startswith(".") for name in left)
    with pytest.raises(ProcessLookupError):  # nothing of the group is left running
        os.killpg(run.pid, 0)


def test_a_reader_that_has_enough_is_no_error(tmp_path):
    path = simple(200, layers=3).save(tmp_path / "heatmap.npz")
    command = [sys.executable, "-m", "attnscope", "show", str(path), "--json"]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        run.stdout.read(10)
        run.stdout.close()
        assert run.stderr.read() == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["--json"], ["-o", "out"]])
def test_a_stdout_that_is_full_is_said(tmp_path, arguments):
    path = simple(3, layers=1).save(tmp_path / "heatmap.npz")
    with Path("/dev/full").open("w") as full:
        result = process(
            "show", path, *arguments, capture_output=False, stdout=full, stderr=subprocess.PIPE
        )
    assert (result.returncode, result.stderr) == (1, "error: No space left on device\n")


@pytest.mark.parametrize("arguments", [["--json"], []])
def test_a_stdout_that_is_closed_is_no_error(tmp_path, arguments):
    path = simple(3, layers=1).save(tmp_path / "heatmap.npz")
    script = f"exec {sys.executable} -m attnscope show {path} {' '.join(arguments)} >&-"
    result = subprocess.run(["bash", "-c", script], stderr=subprocess.PIPE, text=True, timeout=LIMIT_S)
    assert (result.returncode, result.stderr) == (0, "")


def test_terminals_without_unicode_and_folders_that_are_no_text(tmp_path):
    path = simple(5, layers=1).save(tmp_path / "heatmap.npz")
    result = process("show", path, env={"PYTHONIOENCODING": "ascii", "LANG": "C"})
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.isascii()
    odd = os.fsdecode(b"out-\xff")
    result = process("show", path, "-o", odd, "-f", "npz", text=False)
    assert (result.returncode, result.stdout) == (0, b"out-\xff/heatmap.npz\n")
    result = process(
        "show", path, "-o", odd, "-f", "npz", "--json", text=False, env={"PYTHONIOENCODING": "ascii"}
    )
    assert json.loads(result.stdout)["files"] == [f"{odd}/heatmap.npz"]
