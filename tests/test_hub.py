"""Addresses of the Hub, read by its own library from a server here that answers as the Hub does."""

import io
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest
from huggingface_hub import constants

from attnscope.corpus import Corpus
from attnscope.errors import AttnscopeError
from attnscope.hub import require_hub
from tests.conftest import Run

ADDRESS = "hf://datasets/org/name/data"
LINES = [f"The cat sat on mat number {number}." for number in range(600)]
MIB = 2**20
TREE, RESOLVE = "/api/datasets/org/name/tree/main", "/datasets/org/name/resolve/main/"


class Hub(ThreadingHTTPServer):
    """One dataset, org/name, of a few files; it keeps account of what it sends.

    Attributes:
        files: By their paths.
        n_sent: Bytes of files that were sent.
        breaks_off: Whether the connection ends in the middle of an answer, by the place in the file that is asked for.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.files: dict[str, bytes] = {}
        self.n_sent = 0
        self.breaks_off: Callable[[int], bool] = lambda _: False


class _Answers(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        if path == "/api/datasets/org/name":
            self._answer(json.dumps({"id": "org/name", "sha": "0" * 40, "siblings": []}).encode())
        elif path.startswith(TREE):
            self._list(path.removeprefix(TREE).strip("/"))
        elif path.startswith(RESOLVE):
            self._send_part(self.server.files[path.removeprefix(RESOLVE)])
        else:
            self._answer(b"", 403 if "gated" in path else 401, "GatedRepo" if "gated" in path else "RepoNotFound")

    def _list(self, folder: str) -> None:
        files = [
            {"type": "file", "oid": "0" * 40, "size": len(content), "path": path}
            for path, content in self.server.files.items()
            if path.startswith(folder)
        ]
        folders = [] if folder else [{"type": "directory", "oid": "0" * 40, "size": 0, "path": "data"}]
        self._answer(json.dumps([*folders, *files]).encode())

    def _send_part(self, content: bytes) -> None:
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last) + 1]
        self.server.n_sent += len(part)
        self._answer(part, 206, breaks_off=self.server.breaks_off(int(first)))

    def _answer(self, body: bytes, status: int = 200, error: str = "", breaks_off: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if breaks_off else body)
        self.close_connection = self.close_connection or breaks_off


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        here = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", here)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", here + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr("time.sleep", lambda _: None)  # between attempts
        monkeypatch.setattr("attnscope.hub._asked", {})
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        yield server
        server.shutdown()


def write_parquet(columns: dict[str, Any], **how: Any) -> bytes:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    held = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), held, **how)
    return held.getvalue()


def test_of_parquet_one_column_is_fetched(hub: Hub) -> None:
    noise = [os.urandom(10_000) for _ in LINES]
    hub.files["data/a.parquet"] = write_parquet({"body": LINES, "noise": noise}, row_group_size=100)
    corpus = Corpus([f"{ADDRESS}/a.parquet"], field="body")
    assert [text.text for text in corpus] == LINES and not corpus.problems
    assert corpus.n_bytes == len(hub.files["data/a.parquet"]) > 5 * MIB
    assert hub.n_sent < MIB


def test_text_is_fetched_as_it_is_read(hub: Hub) -> None:
    hub.files |= {
        "data/a.txt": b"a line of some length, for there are to be few\n" * (20 * MIB // 47),
        "data/b.txt": b"b",
    }
    texts = iter(Corpus([f"{ADDRESS}/*.txt"]))
    assert next(texts).source == f"{ADDRESS}/a.txt"
    assert hub.n_sent < 6 * MIB


def test_a_connection_that_breaks_off_keeps_what_came(hub: Hub) -> None:
    hub.files["data/a.txt"] = (b"a line" * 341 + b"\n") * (8 * MIB // 2047)
    hub.breaks_off = lambda place: place > 0
    corpus = Corpus([f"{ADDRESS}/a.txt"])
    n_read = sum(1 for _ in corpus)
    (problem,) = corpus.problems
    assert 5 * MIB < 2047 * n_read < 6 * MIB and problem.line == n_read + 1
    assert "\n" not in problem.reason


@pytest.mark.parametrize(
    ("address", "told", "hint"),
    [
        (f"{ADDRESS}/none.txt", "none.txt: there is no such file", "check the address"),
        ("hf://datasets/org/none/a.txt", "there is no such repository, or it is private", "check the address"),
        ("hf://datasets/org/gated/a.txt", "who wants it must ask for it on its page, and log in", "check the address"),
        ("hf://datasets/org", "Repository id must be 'namespace/name'", "check the address"),
        (f"{ADDRESS}/none*.txt", "there is no such file", "check the address"),
        (f"{ADDRESS}/a.parquet", 'no column "text": its columns are body', "say with --field"),
        (f"{ADDRESS}/broken.parquet", "damaged Parquet", "check the address"),
        (f"{ADDRESS}/far.txt", "peer closed connection", "check the address"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_one_line_and_a_hint(
    address: str, told: str, hint: str, hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    hub.files |= {"data/a.parquet": write_parquet({"body": LINES}), "data/broken.parquet": b"PAR1" * 50}
    hub.files["data/far.txt"] = b"a line\n" * 50
    hub.breaks_off = lambda _: "far" in address
    with pytest.raises(AttnscopeError, match=re.escape(told)) as refused:
        list(Corpus([address]))
    assert "\n" not in refused.value.message and str(refused.value.hint).startswith(hint)
    assert not caplog.records


# A Hub that cannot be reached ------------------------------------------------------------------------------------


@pytest.fixture(params=["refuses", "hangs"])
def dead_hub(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[float], str]]:
    """A port behind which nobody answers: what the Hub's client slept between attempts, and what is to be said."""
    slept: list[float] = []
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if request.param == "hangs":
            server.listen()  # the system connects whoever comes, and nobody ever accepts
            monkeypatch.setattr("attnscope.hub.PATIENCE_S", 0.2)
            monkeypatch.setattr("attnscope.models.catalog.PATIENCE_S", 0.2)
        else:
            monkeypatch.setattr("attnscope.hub.PATIENCE_S", 60)  # it is not the clock that ends it
            monkeypatch.setattr("attnscope.models.catalog.PATIENCE_S", 60)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr("attnscope.hub._asked", {})
        sleep = time.sleep
        monkeypatch.setattr("time.sleep", lambda seconds: slept.append(seconds) if seconds >= 0.5 else sleep(seconds))
        yield slept, "Connection refused" if request.param == "refuses" else "timed out|no answer within 0.2 s"


@pytest.mark.parametrize(
    "command",
    [
        ["heads", "--file", f"{ADDRESS}/a.txt", "-m", "own"],
        ["heads", "--file", f"{ADDRESS}/*.txt", "-m", "own"],
        ["heatmap", "a text", "-m", "org/name"],
        ["cost", "org/name"],
    ],
    ids=["file", "pattern", "model", "config"],
)
def test_a_hub_that_cannot_be_reached_is_one_line_and_not_tried_again(
    command: list[str], dead_hub: tuple[list[float], str], run: Run
) -> None:
    slept, said = dead_hub
    status, out, err = run(*command)
    assert (status, out) in ((1, ""), (2, ""))
    why, hint = err.splitlines()
    assert why.startswith("error: ") and re.search(said, why) and hint.startswith("hint: ")
    assert not slept


def test_a_hub_is_asked_once_and_one_that_comes_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, answers = SimpleNamespace(now=100.0), [ConnectionError("away"), None]

    def answer(_: float, __: Callable[[], Any]) -> None:
        if error := answers.pop(0):
            raise error

    monkeypatch.setattr("attnscope.hub._asked", {})
    monkeypatch.setattr("attnscope.hub.run_within", answer)
    monkeypatch.setattr("attnscope.hub.time", SimpleNamespace(monotonic=lambda: clock.now))
    for _ in range(2):
        with pytest.raises(ConnectionError, match="away"):
            require_hub()
    assert len(answers) == 1
    clock.now += 60
    for _ in range(3):
        require_hub()
    assert not answers
