"""The first ten lines at 80 columns that each command prints: they answer the question.

Each file of `tests/first_lines` is one command and what it prints. `python -m tests.test_first_lines` writes them anew.
"""

import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.cli_helpers import elsewhere, loaded_once

__all__ = ["elsewhere", "loaded_once"]
FOLDER = Path(__file__).parent / "first_lines"
ROOT = FOLDER.parents[1]
N_LINES = 10


def command_of(path):
    return path.read_text("utf-8").splitlines()[0].removeprefix("$ ")


def link_files(folder):
    (folder / "sample_texts").symlink_to(ROOT / "sample_texts")
    (folder / "records").symlink_to(ROOT / "tests" / "records")


def first_lines(printed, folder):
    """Return the first lines, with names of folders as a reader of the docs has them."""
    told = printed.replace(f"file://{folder}/", "file:///folder/").replace(f"{folder}/", "")
    return [line.rstrip() for line in told.splitlines()][:N_LINES]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_the_first_lines_answer(path, run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    here = Path.cwd()
    link_files(here)
    monkeypatch.chdir(here)
    done = run(*shlex.split(command_of(path))[1:])
    assert done.status == 0, done.err
    assert first_lines(done.out, here) == path.read_text("utf-8").splitlines()[1:]


def test_every_command_has_its_first_lines():
    from attnscope import cli

    elsewhere_tested = {"patch"}  # it needs a model with answers; show-patch.txt is what it prints
    shown = {" ".join(command_of(path).split()[1:3]) for path in FOLDER.glob("*.txt")}
    missing = [
        name
        for name in cli.commands()
        if name not in elsewhere_tested
        and not any(f"{words} ".startswith(f"{name} ") for words in shown)
    ]
    assert not missing


def main():
    """Run each command in a new folder, and write its first lines anew."""
    for path in sorted(FOLDER.glob("*.txt")):
        command = command_of(path)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            link_files(folder)
            done = subprocess.run(
                [sys.executable, "-m", "attnscope", *shlex.split(command)[1:]],
                cwd=folder,
                capture_output=True,
                text=True,
                env={
                    "PATH": "",
                    "HF_HUB_OFFLINE": "1",
                    "COLUMNS": "80",
                    "PYTHONPATH": str(ROOT),
                    "HOME": name,
                },
            )
        lines = first_lines(done.stdout, folder) if done.returncode == 0 else [done.stderr]
        path.write_text("\n".join([f"$ {command}", *lines]) + "\n", "utf-8")


if __name__ == "__main__":
    main()
