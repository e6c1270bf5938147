"""Drawing in a second process: the same files, whatever becomes of it, and nothing left running."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from attnscope.drawing.style import Style
from attnscope.errors import AttnscopeError
from attnscope.questions.heatmap import Heatmap
from attnscope.views.maps import process
from attnscope.views.maps.process import DrawingProcess
from tests.record_helpers import simple

RECORD = simple(4, layers=1, heads=2)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What is drawn in this process."""
    folder = tmp_path_factory.mktemp("here")
    RECORD.draw(folder, ["png", "svg"], query="t1")
    return files(folder)


def ahead_of(record: Heatmap) -> Heatmap:
    return replace(record, maps=(replace(record.maps[0], weights=np.zeros((1, 2, 0, 0), np.float32)),))


def drawn_by(drawing: DrawingProcess, folder: Path, formats: Sequence[str] = ("png", "svg")) -> dict[str, bytes]:
    paths = drawing.draw(RECORD, folder, formats, style=Style(), query="t1")
    assert [path.name for path in paths] == [f"{s}.{f}" for s in ("L00", "query-001") for f in formats]
    return files(folder)


def child_of(drawing: DrawingProcess) -> subprocess.Popen[bytes]:
    assert drawing._child is not None
    return drawing._child


def test_it_draws_the_same_files(tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    def here(*_: object) -> None:
        raise AssertionError("drawn in this process")

    with DrawingProcess() as drawing:
        drawing.expect(ahead_of(RECORD), Style(), "t1", ["png", "svg", "npz"])
        with monkeypatch.context() as patched:
            patched.setattr(process, "Painter", here)
            assert drawn_by(drawing, tmp_path / "a") == expected
            assert drawn_by(drawing, tmp_path / "b") == expected
    assert child_of(drawing).returncode == 0


def test_what_was_expected_wrongly_does_no_harm(tmp_path: Path, expected: dict[str, bytes]) -> None:
    with DrawingProcess() as drawing:
        unknown = Style("head")
        object.__setattr__(unknown, "cmap", "no such colormap")
        drawing.expect(ahead_of(RECORD), unknown, None, ["png"])
        drawing.expect(simple(9, layers=1, heads=2, seed=4), Style(), None, ["png"])
        assert drawn_by(drawing, tmp_path) == expected


def test_errors_of_the_user_travel(tmp_path: Path) -> None:
    with DrawingProcess() as drawing:
        with pytest.raises(AttnscopeError, match="no token is 'x'") as caught:
            drawing.draw(RECORD, tmp_path, ["png"], style=Style(), query="x")
        assert caught.value.hint
        (tmp_path / "file").write_text("kept")
        with pytest.raises(AttnscopeError, match="cannot write"):
            drawing.draw(RECORD, tmp_path / "file", ["png"], style=Style(), query=None)
        assert len(drawing.draw(RECORD, tmp_path, ["png"], style=Style(), query=None)) == 1  # it goes on after them


def test_without_a_second_process_it_draws_here(
    tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with DrawingProcess() as drawing:
        assert drawing._child is None
        drawing.expect(ahead_of(RECORD), Style(), None, ["png"])
        assert drawn_by(drawing, tmp_path / "out") == expected


@pytest.mark.parametrize("broken", ["dies at once", "dies when asked", "answers nonsense", "answers half", "is killed"])
def test_when_it_breaks_the_files_are_drawn_here(
    tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    codes = {
        "dies at once": "raise SystemExit(3)",
        "dies when asked": "import sys; sys.stdin.buffer.read(1); sys.exit(1)",
        "answers nonsense": "import sys; sys.stdin.buffer.read(1); print('Hello', flush=True); sys.stdin.buffer.read()",
        "answers half": "import sys; sys.stdin.buffer.read(1); sys.stdout.buffer.write(b'\\x80\\x05\\x95')",
        "is killed": "import os, signal, sys; sys.stdin.buffer.read(1); os.kill(os.getpid(), signal.SIGKILL)",
    }
    real = subprocess.Popen

    def broken_python(command: Sequence[str], **how: object) -> subprocess.Popen[bytes]:
        return real([command[0], "-c", codes[broken]], **how)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(process.subprocess, "Popen", broken_python)
    with DrawingProcess() as drawing:
        assert drawn_by(drawing, tmp_path) == expected
    assert child_of(drawing).poll() is not None


def test_nothing_is_left_running(tmp_path: Path) -> None:
    with DrawingProcess() as drawing:
        drawing.expect(ahead_of(RECORD), Style(), None, ["png"])
    assert child_of(drawing).returncode == 0  # it ended by itself
    with pytest.raises(KeyboardInterrupt), DrawingProcess() as drawing:
        raise KeyboardInterrupt
    assert child_of(drawing).returncode in (0, -signal.SIGTERM)


def test_one_that_is_told_to_stop_ends_the_files_that_it_writes(tmp_path: Path) -> None:
    """Told at any time, it leaves whole files only, and none that is temporary."""
    big = simple(30, layers=4, heads=12)
    for done in (0, 1):
        folder = tmp_path / str(done)
        with pytest.raises(RuntimeError), DrawingProcess() as drawing:
            assert drawing._send(process._Order(big, Style(), process.sheets_of(big), ["png"], folder))
            while len(list(folder.glob("*.png"))) < done:
                assert child_of(drawing).poll() is None
            raise RuntimeError
        for path in folder.iterdir() if folder.exists() else ():
            assert path.suffix == ".png" and path.read_bytes().endswith(b"IEND\xaeB`\x82"), path
        assert not list(folder.glob(".*"))


def test_modules_that_lie_about_are_not_imported(
    tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("numpy", "matplotlib", "pickle", "attnscope"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} of the current folder')")
    monkeypatch.chdir(tmp_path)

    def here(*_: object) -> None:
        raise AssertionError("drawn in this process")

    monkeypatch.setattr(process, "Painter", here)
    with DrawingProcess() as drawing:
        assert drawn_by(drawing, tmp_path / "out") == expected
    assert capfd.readouterr() == ("", "")


def test_a_backend_that_does_not_exist_does_not_matter(
    tmp_path: Path, expected: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPLBACKEND", "nonsense")
    with DrawingProcess() as drawing:
        assert drawn_by(drawing, tmp_path) == expected
