"""Ctrl-C from the first line of the program to its last: one line, exit status 130, no traceback."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attnscope import cli, host
from attnscope.host import delay_interrupts, delay_interrupts_in_imports, end_process_on_interrupt
from tests.processes import LIMIT_S, python

ROOT = Path(__file__).parent.parent


@pytest.fixture
def handler():
    before = signal.getsignal(signal.SIGINT)
    hook = sys.unraisablehook
    yield
    signal.signal(signal.SIGINT, before)
    sys.unraisablehook = hook


@pytest.fixture
def interrupting_module(tmp_path, monkeypatch):
    """A module in the middle of whose import Ctrl-C comes."""
    (tmp_path / "struck.py").write_text(
        "import signal\nsignal.raise_signal(signal.SIGINT)\nwhole = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "struck", raising=False)
    return "struck"


def wait_to_be_interrupted():
    """Waits as a program waits for a lock or for the network; Ctrl-C ends that, it does not come after it."""
    time.sleep(20)
    pytest.fail("Ctrl-C was not felt")


@pytest.mark.usefixtures("handler")
def test_an_import_is_finished_before_ctrl_c_is_felt(interrupting_module):
    delay_interrupts_in_imports()
    with pytest.raises(KeyboardInterrupt):
        module = __import__(interrupting_module)
        assert module.whole
        wait_to_be_interrupted()
    assert sys.modules[interrupting_module].whole


@pytest.mark.usefixtures("handler")
def test_ctrl_c_that_still_waits_at_the_end_is_not_lost(interrupting_module, monkeypatch):
    monkeypatch.setattr(host, "_schedule_interrupt", lambda: None)
    monkeypatch.setattr(cli, "_run", lambda: int(not __import__(interrupting_module).whole))
    monkeypatch.setattr(cli, "_escape_unprintable", lambda: None)
    monkeypatch.setattr(host, "_pending_since", None)
    delay_interrupts_in_imports()
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130


@pytest.mark.usefixtures("handler")
def test_elsewhere_ctrl_c_is_felt_at_once():
    delay_interrupts_in_imports()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    reached = []
    with pytest.raises(KeyboardInterrupt), delay_interrupts():
        signal.raise_signal(signal.SIGINT)
        reached.append(1)
    assert reached


class Dying:
    """Ctrl-C comes while Python removes it: what a destructor raises, Python swallows."""

    def __del__(self):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("handler")
def test_ctrl_c_that_python_swallows_is_felt_after_all(capsys):
    delay_interrupts_in_imports()
    with pytest.raises(KeyboardInterrupt):
        Dying()
        wait_to_be_interrupted()
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize("of_others", [signal.SIG_IGN, lambda *_: None], ids=["ignored", "handled"])
def test_who_ignores_or_handles_ctrl_c_keeps_it_so(of_others):
    signal.signal(signal.SIGINT, of_others)
    delay_interrupts_in_imports()
    end_process_on_interrupt()
    with delay_interrupts():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == of_others


_STRUCK = """
import signal, sys
class Striking:
    def find_spec(self, name, *_):
        if name == {name!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Striking())
sys.argv = ["attnscope", *{arguments!r}]
from attnscope.__main__ import main
main()
"""


@pytest.mark.parametrize("name", ["typer", "attnscope.cli.heatmap", "rich", "torch", "numpy"])
def test_ctrl_c_at_an_import_is_one_line_and_130(name, tmp_path):
    code = _STRUCK.format(
        name=name, arguments=["heatmap", "a b", "-m", "own", "-o", "out", "-f", "png,npz"]
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, cwd=tmp_path
    )
    assert found.returncode == 130, found.stderr
    assert found.stderr.splitlines()[-1] == "error: interrupted"
    assert "Traceback" not in found.stderr
    assert "Error" not in found.stderr
    assert not list(tmp_path.rglob("*.part"))


# The working folder -----------------------------------------------------------------------------------------------


def command(folder, *arguments):
    """Runs attnscope in a folder, in a process of its own that looks for modules as the installed script does."""
    return python(
        "-P", "-m", "attnscope", *arguments, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )


def test_no_code_of_the_working_folder_runs(tmp_path):
    """Not in this process, nor in workers, in what draws, or in what keeps the locks of a pool."""
    for name in (
        "numpy",
        "torch",
        "matplotlib",
        "multiprocessing",
        "signal",
        "json",
        "attnscope",
        "sitecustomize",
    ):
        (tmp_path / f"{name}.py").write_text("open('ran', 'a').write(__name__)\nraise SystemExit(3)\n")
    (tmp_path / "texts.txt").write_text("the cat\na dog\n")
    for asked in (("heads", "--file", "texts.txt", "--workers", 2), ("heatmap", "a cat")):
        done = command(tmp_path, *asked, "-m", "own", "-f", "png", "-o", "out", "-q")
        assert (done.returncode, done.stderr) == (0, "")
    assert not (tmp_path / "ran").exists()


def test_settings_of_matplotlib_in_the_working_folder_change_no_figure(tmp_path):
    drawn = []
    for name in ("plain", "settings"):
        (tmp_path / name).mkdir()
        if name == "settings":
            (tmp_path / name / "matplotlibrc").write_text("figure.dpi: 7\naxes.facecolor: red\n")
        done = command(
            tmp_path / name, "heatmap", "a cat", "-m", "own", "-L", 0, "-f", "png", "-o", "out", "-q"
        )
        assert (done.returncode, done.stderr) == (0, "")
        drawn.append((tmp_path / name / "out/L00.png").read_bytes())
    assert drawn[0] == drawn[1]
