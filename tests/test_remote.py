"""Corpora that are elsewhere, and such as come line by line: addresses of fsspec, stdin, and how far a command is."""

import contextlib
import gzip
import importlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from attnscope.cli import main, options
from attnscope.corpus import Corpus, Problem
from attnscope.corpus.remote import files_at, is_address, open_address
from attnscope.errors import AttnscopeError, UsageError
from attnscope.studies.inputs.texts import Progress
from tests.conftest import Run
from tests.processes import LIMIT_S, started

LINES = [f"The cat sat on mat number {number}." for number in range(6)]


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    """Files in memory:// ."""
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


class FakeHub(MemoryFileSystem):
    """What stands for hf:// : it keeps account of what is read, and may be out of reach."""

    protocol = "hf"
    store: dict[str, Any] = {}  # noqa: RUF012  # as its class has it
    pseudo_dirs = [""]  # noqa: RUF012
    n_read = 0
    failure: Exception | None = None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("hf://").strip("/")

    def _open(self, path: str, *given: Any, **more: Any) -> Any:
        if FakeHub.failure is not None:
            raise FakeHub.failure
        opened = super()._open(path, *given, **more)
        content = opened.getvalue()

        class Counted(io.BytesIO):
            def read(self, n: int | None = -1, /) -> bytes:
                data = super().read(n)
                FakeHub.n_read += len(data)
                return data

        return Counted(content)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """A file system in the place of the Hub's."""
    monkeypatch.setitem(importlib.import_module("fsspec.registry")._registry, "hf", FakeHub)
    monkeypatch.setattr("attnscope.corpus.remote.require_hub", lambda: None)
    FakeHub.store.clear()
    FakeHub.n_read, FakeHub.failure = 0, None
    return FakeHub(skip_instance_cache=True)


def texts(*files: str, **how: Any) -> list[str | None]:
    return [text.text for text in Corpus([*files], **how)]


# Addresses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("hf://datasets/org/name/a.parquet", True), ("s3://bucket/key", True), ("simplecache::s3://bucket/key", True),
        ("C:\\texts\\a.txt", False), ("texts/a.txt", False), ("-", False), ("a: b://c", False), ("//share/a", False),
    ],
)  # fmt: skip
def test_what_is_an_address(name: str, is_one: bool) -> None:
    assert is_address(name) is is_one


def test_texts_of_an_address_are_those_of_a_file(memory: MemoryFileSystem, tmp_path: Path) -> None:
    content = "\n".join(LINES).encode()
    (tmp_path / "a.txt").write_bytes(content)
    memory.pipe({"/corpus/a.txt": content, "/corpus/b.txt.gz": gzip.compress(content)})
    here, there = Corpus([tmp_path / "a.txt"]), Corpus(["memory://corpus/a.txt"])
    assert [text.text for text in there] == [text.text for text in here] == LINES
    assert there.sha256 == here.sha256
    assert (there.bytes_read, there.n_bytes) == (len(content), len(content))
    assert next(iter(there)).source == "memory://corpus/a.txt"
    assert texts("memory://corpus/b.txt.gz") == LINES
    assert texts("memory://corpus/*.gz", "memory://corpus/a.txt", "memory:///corpus/b.txt.gz") == LINES * 2


def test_jsonl_and_parquet_elsewhere(memory: MemoryFileSystem) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    held = io.BytesIO()
    parquet.write_table(pyarrow.table({"body": LINES}), held)
    memory.pipe({"/a.parquet": held.getvalue(), "/a.jsonl": b'{"body": "one"}\n{"body": "two"}\n'})
    assert texts("memory://a.parquet", field="body") == LINES
    assert texts("memory://a.jsonl", field="body") == ["one", "two"]


def test_of_a_hub_dataset_only_what_is_asked_for_is_fetched(hub: FakeHub) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    held = io.BytesIO()
    noise = [os.urandom(200_000).hex() for _ in LINES]
    parquet.write_table(pyarrow.table({"text": LINES, "noise": noise}), held)
    hub.pipe({"datasets/org/name/train.parquet": held.getvalue(), "datasets/org/name/long.txt": b"a line\n" * 200_000})
    assert texts("hf://datasets/org/name/train.parquet") == LINES
    assert 0 < FakeHub.n_read < len(held.getvalue()) / 10, "the other column was fetched too"
    FakeHub.n_read = 0
    assert next(iter(Corpus(["hf://datasets/org/name/long.txt"]))).text == "a line"
    assert FakeHub.n_read <= 65536, "more was fetched than the first piece"


def test_what_is_not_there_is_a_problem_and_the_rest_is_read(memory: MemoryFileSystem) -> None:
    memory.pipe({"/a.txt": b"one\ntwo"})
    corpus = Corpus(["memory://none.txt", "memory://a.txt"])
    assert [text.text for text in corpus] == ["one", "two"]
    assert corpus.problems == [Problem("memory://none.txt", None, "there is no such file")]


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (ConnectionError("Cannot reach huggingface.co: offline"), "Cannot reach huggingface.co: offline"),
        (RuntimeError("a library's own\nTraceback"), "a library's own"),
        (ImportError("Install s3fs to access S3"), "hf:// needs a package that is not installed; Install s3fs"),
        (FileNotFoundError("x"), "there is no such file"),
    ],
)  # fmt: skip
def test_without_a_network_it_is_one_line(run: Run, hub: FakeHub, failure: Exception, told: str) -> None:
    FakeHub.failure = failure
    status, out, err = run("heads", "--file", "hf://datasets/org/na\x1b[31mme/a.txt")
    assert (status, out) == (1, "")
    error, hint = err.splitlines()
    assert told in error and "a.txt: " in error and "\x1b" not in err
    assert hint == "hint: check the address; without a network give a file that is here"


def test_a_network_that_fails_half_way_keeps_what_came(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.pipe({"datasets/o/n/a.txt": b"a line\n" * 20_000})
    opened = hub.open("datasets/o/n/a.txt")

    class Broken(io.BytesIO):
        def read(self, n: int | None = -1, /) -> bytes:
            if self.tell():
                raise TimeoutError("the Hub says no more")
            return super().read(n)

    monkeypatch.setattr(FakeHub, "_open", lambda *_, **__: Broken(opened.getvalue()))
    corpus = Corpus(["hf://datasets/o/n/a.txt"])
    assert 9000 < sum(1 for _ in corpus) < 9500
    assert [problem.reason for problem in corpus.problems] == ["the Hub says no more"]


def test_a_pattern_that_cannot_be_looked_up_is_wrong_usage(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("offline")

    monkeypatch.setattr(FakeHub, "glob", fail)
    with pytest.raises(UsageError, match=r"cannot look up hf://datasets/o/n/\*\.txt: offline"):
        Corpus(["hf://datasets/o/n/*.txt"])


def test_too_many_files_elsewhere_are_refused(memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.pipe({f"/many/{number}.txt": b"x" for number in range(5)})
    monkeypatch.setattr("attnscope.corpus.remote.MOST_FILES", 4)
    with pytest.raises(UsageError, match="stands for 5 files"):
        files_at("memory://many/*")


def test_a_password_is_not_taken_into_records() -> None:
    with pytest.raises(UsageError, match="password") as refused:
        Corpus(["s3://name:secret@bucket/a.txt"])
    assert "secret@" not in str(refused.value)


def test_an_address_is_no_text(run: Run) -> None:
    status, out, err = run("heads", "hf://datasets/org/name/a.txt")
    assert (status, out) == (2, "") and "is the address of a file" in err and "--file hf://" in err


def test_files_elsewhere_are_only_read(memory: MemoryFileSystem) -> None:
    memory.pipe({"/a.txt": b"abc"})
    with open_address("memory://a.txt") as file:
        assert (file.readable(), file.seekable(), file.writable()) == (True, True, False)
        assert (file.seek(1), file.read(1), file.tell()) == (1, b"b", 2)


def test_heads_of_an_address(run: Run, memory: MemoryFileSystem, tiny_bert: Path) -> None:
    memory.pipe({"/a.txt": "\n".join(LINES).encode()})
    status, out, err = run("heads", "--file", "memory://a.txt", "-m", tiny_bert, "-o", "out", "-f", "json")
    assert status == 0, err
    assert "memory://a.txt" in Path("out/heads.json").read_text("utf-8")


# stdin, line by line ---------------------------------------------------------------------------------------------


def start(folder: Path, *arguments: object) -> "contextlib.AbstractContextManager[subprocess.Popen[bytes]]":
    return started(
        [sys.executable, "-m", "attnscope", *map(str, arguments)], cwd=folder, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip


def wait_for(true: Any) -> None:
    until = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.05)


def test_batch_draws_what_came_before_the_rest_has_come(tiny_bert: Path, tmp_path: Path) -> None:
    with start(tmp_path, "batch", "-", "-m", tiny_bert, "-o", "out", "--workers", 1) as process:
        assert process.stdin is not None
        process.stdin.write(f"{LINES[0]}\n{LINES[1]}\n".encode())
        process.stdin.flush()
        wait_for(lambda: len(list(tmp_path.glob("out/0*/*.png"))) >= 1)
        assert process.poll() is None and not (tmp_path / "out" / "index.html").exists()
        process.stdin.write(f"{LINES[2]}\n".encode())
        out, err = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, err
    assert len((tmp_path / "out" / "manifest.jsonl").read_text("utf-8").splitlines()) == 3


def test_batch_that_waits_for_a_text_can_be_interrupted(tiny_bert: Path, tmp_path: Path) -> None:
    with start(tmp_path, "batch", "-", "-m", tiny_bert, "-o", "out", "--workers", 1) as process:
        assert process.stdin is not None
        process.stdin.write(f"{LINES[0]}\n".encode())
        process.stdin.flush()
        wait_for(lambda: any('"n_tokens"' in log.read_text("utf-8") for log in tmp_path.glob("out/log.jsonl")))
        process.send_signal(signal.SIGINT)
        wait_for(lambda: process.poll() is not None)
        process.stdin.close()
        assert process.stderr is not None
        err = process.stderr.read().decode()
        assert process.returncode == 130, err
        assert "Traceback" not in err and "Fatal" not in err
        assert len((tmp_path / "out" / "manifest.jsonl").read_text("utf-8").splitlines()) == 1


@pytest.mark.usefixtures("worker_here")
def test_a_batch_of_stdin_is_that_of_a_file(
    run: Run, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("\n".join(LINES[:2]), "utf-8")
    assert run("batch", "a.txt", "-m", tiny_bert, "-o", "a", "--workers", 1)[0] == 0
    for _ in range(2):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(LINES[:2]).encode()), "utf-8"))
        status, _, err = run("batch", "-", "-m", tiny_bert, "-o", "b", "--workers", 1)
        assert status == 0, err
    assert "2 of 2 texts were drawn before" in err
    drawn = [sorted(path.relative_to(name) for path in Path(name).rglob("*.png")) for name in ("a", "b")]
    assert drawn[0] == drawn[1] != []
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(LINES[:2]).encode()), "utf-8"))
    status, _, err = run("batch", "-", "-m", tiny_bert, "-o", "b", "--workers", 1, "--pick", "L0H0")
    assert status == 1 and "--pick not given, now L0H0" in err


def test_stdin_gives_a_line_before_the_next_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_bar_begins_anew_with_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    from rich.progress import Progress as Bar

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(Bar, "update", lambda self, task, **told: seen.append(told))
    monkeypatch.setattr(Bar, "reset", lambda self, task, **told: seen.append({"restart": True}))
    with options.progress(quiet=False) as report:
        assert report is not None
        report(Progress(32, 900, 0.5, "counting tokens"))
        report(Progress(1, 30, 0.1))
        report(Progress(2, 60, None))
    assert [told.get("restart", False) for told in seen] == [True, False, True, False, False]
    assert seen[1]["description"].startswith("counting tokens: 32 texts, 900 tokens, ")
    assert (seen[1]["completed"], seen[3]["total"], seen[4]["total"]) == (0.5, 1.0, None)


@pytest.mark.usefixtures("worker_here")
@pytest.mark.parametrize(
    "command",
    [
        "heads --file a.txt -o o", "batch a.txt -o o --workers 1", "page --file a.txt --split line -o o.html",
        "compare --file a.txt -o o", "ablate --file a.txt -o o --pick L0H0", "relations a.conllu -o o",
        "prune --file a.txt --pick L0H0 -o o",
    ],
)  # fmt: skip
def test_every_command_of_many_texts_has_a_bar(
    command: str, tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[Progress] = []

    class Bar:
        def __enter__(self) -> Any:
            return told.append

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("\n".join(LINES), "utf-8")
    sample = Path(__file__).parents[1] / "sample_texts" / "dependencies.conllu"
    (tmp_path / "a.conllu").write_bytes(sample.read_bytes())
    monkeypatch.setattr(options, "progress", lambda *_: Bar())
    monkeypatch.setattr("attnscope.studies.ablation.pruning.EXAMPLE", "The cat.")  # as long as the model takes
    monkeypatch.setattr(sys, "argv", ["attnscope", *command.split(), "-m", str(tiny_bert)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None), capsys.readouterr().err
    assert told and told[-1].n_texts > 0 and told[-1].n_tokens > 0 and told[-1].share == pytest.approx(1, abs=0.35)


def test_nobody_is_told_of_an_empty_source(memory: MemoryFileSystem) -> None:
    memory.pipe({"/a.txt": b" \n"})
    with pytest.raises(AttnscopeError, match="no text is left"):
        list(Corpus(["memory://a.txt"]))
