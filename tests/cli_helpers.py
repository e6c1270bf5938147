"""What tests of the command line share: a folder to stand in, models that are loaded once, how a failure looks."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnscope import models
from attnscope.models.catalog import Source
from attnscope.models.model import Model
from tests.conftest import Result
from tests.processes import python

TIRED = "The animal didn't cross the street because it was too tired."
WIDE = "The animal didn't cross the street because it was too wide."


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own to stand in, and a plain terminal."""
    monkeypatch.chdir(tmp_path)
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "ATTNSCOPE_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MPLBACKEND", "Agg")  # so that it is put back, as main() sets it
    yield tmp_path


_held: dict[object, Model] = {}


@pytest.fixture(autouse=True)
def loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading the same model a hundred times tests nothing more."""
    real = models.load

    def held(source: Source, **how: object) -> Model:
        name = (source, *how.items())
        if name not in _held:
            _held[name] = real(source, **how)  # type: ignore[arg-type]
        return _held[name]

    monkeypatch.setattr(models, "load", held)


def process(*arguments: str | Path, **how: object) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own, with further environment variables in `env` (None = unset)."""
    environment = dict(os.environ)
    for name, value in (how.pop("env", None) or {}).items():  # type: ignore[attr-defined]
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    return python("-m", "attnscope", *arguments, env=environment, **how)


def require_one_line(
    result: Result | subprocess.CompletedProcess[str], said: str, status: int = 1
) -> None:
    """It failed as every failure does: one line why, at most one hint, nothing on stdout."""
    code = result.status if isinstance(result, Result) else result.returncode
    out, err = (result.out, result.err) if isinstance(result, Result) else (result.stdout, result.stderr)
    lines = err.splitlines()
    assert code == status, err
    assert out == ""
    assert lines[0].startswith("error: ") and re.search(said, lines[0]), err
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("hint: ")), err


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
