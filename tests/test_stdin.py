"""Corpora that come line by line from stdin, and how far a command is."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attnscope.cli import main
from attnscope.corpus import Corpus
from tests.processes import LIMIT_S, started

LINES = [f"The cat sat on mat number {number}." for number in range(6)]


# stdin, line by line ---------------------------------------------------------------------------------------------


def start(folder, *arguments):
    return started(
        [sys.executable, "-m", "attnscope", *map(str, arguments)],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )


def wait_for(true):
    until = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.05)


def test_batch_draws_what_came_before_the_rest_has_come(tiny_bert, tmp_path):
    with start(tmp_path, "batch", "-", "-m", tiny_bert, "-o", "out", "--workers", 1) as process:
        assert process.stdin is not None
        process.stdin.write(f"{LINES[0]}\n{LINES[1]}\n".encode())
        process.stdin.flush()
        wait_for(lambda: len(list(tmp_path.glob("out/0*/*.png"))) >= 1)
        assert process.poll() is None
        assert not (tmp_path / "out" / "index.html").exists()
        process.stdin.write(f"{LINES[2]}\n".encode())
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, err
    assert len((tmp_path / "out" / "manifest.jsonl").read_text("utf-8").splitlines()) == 3


def test_batch_that_waits_for_a_text_can_be_interrupted(tiny_bert, tmp_path):
    with start(tmp_path, "batch", "-", "-m", tiny_bert, "-o", "out", "--workers", 1) as process:
        assert process.stdin is not None
        process.stdin.write(f"{LINES[0]}\n".encode())
        process.stdin.flush()
        wait_for(lambda: any(tmp_path.glob("out/*/entry.json")))
        process.send_signal(signal.SIGINT)
        wait_for(lambda: process.poll() is not None)
        process.stdin.close()
        assert process.stderr is not None
        err = process.stderr.read().decode()
        assert process.returncode == 130, err
        assert "Traceback" not in err
        assert "Fatal" not in err
        assert len((tmp_path / "out" / "manifest.jsonl").read_text("utf-8").splitlines()) == 1


def test_stdin_gives_a_line_before_the_next_has_come(monkeypatch):
    reading, writing = os.pipe()
    with os.fdopen(reading, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        os.write(writing, b"one\n")
        found = iter(Corpus(["-"]))
        assert next(found).text == "one"
        os.write(writing, b"two\n")
        assert next(found).text == "two"
        os.close(writing)
        assert list(found) == []


# How far it is ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("worker_here")
@pytest.mark.parametrize(
    "command",
    [
        "heads --file a.txt -o o",
        "batch a.txt -o o --workers 1",
        "page --file a.txt --split line -o o.html",
        "compare --file a.txt -o o",
        "ablate --file a.txt -o o --pick L0H0",
        "relations a.conllu -o o",
        "ablate --file a.txt --pick L0H0 --save o",
    ],
)
def test_every_command_of_many_texts_has_a_bar(command, tiny_bert, tmp_path, monkeypatch, capsys):
    told = []

    class Bar:
        def __enter__(self):
            return told.append

        def __exit__(self, *_): ...

    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("\n".join(LINES), "utf-8")
    sample = Path(__file__).parents[1] / "sample_texts" / "dependencies.conllu"
    (tmp_path / "a.conllu").write_bytes(sample.read_bytes())
    monkeypatch.setattr(f"attnscope.cli.{command.split()[0]}.progress", lambda *_: Bar())
    # As long as the model takes.
    monkeypatch.setattr("attnscope.studies.ablate.save.EXAMPLE_TARGET", "The cat.")
    monkeypatch.setattr(sys, "argv", ["attnscope", *command.split(), "-m", str(tiny_bert)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None), capsys.readouterr().err
    assert told
    assert told[-1].n_texts > 0
    assert told[-1].n_tokens > 0
    assert told[-1].share == pytest.approx(1, abs=0.35)
