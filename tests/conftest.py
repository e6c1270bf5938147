"""What all tests share: no network, a cache of their own, few threads, and models to try things on."""

import atexit
import csv
import gc
import io
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import settings

# Before anything imports the libraries that read them once, at import.
_home = os.environ.get("ATTNSCOPE_TESTS_HOME", "")  # of the tests that started this process, as a worker
if not _home:
    _home = tempfile.mkdtemp(prefix="attnscope-tests-")
    atexit.register(shutil.rmtree, _home, ignore_errors=True)
os.environ.update(
    ATTNSCOPE_TESTS_HOME=_home,
    HF_HOME=_home,
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS=os.environ.get(
        "ATTNSCOPE_TEST_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2"
    ),
    MPLBACKEND="Agg",
    MPLCONFIGDIR=_home,
    XDG_CACHE_HOME=str(Path(_home, "cache")),
)
for _name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_OFFLINE"):
    os.environ.pop(_name, None)


def pytest_configure() -> None:
    """Has Ctrl-C be heard by this process and by those that tests start.

    What starts pytest without job control (`pytest &` in a script, some CI) has it ignore Ctrl-C, and so would every
    process that a test starts. A handler of Python's does not outlive exec: children begin with the system's default.
    Not at import: workers import tests for what is in them, and not on their main thread.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


settings.register_profile("tests", deadline=None, derandomize=True, database=None)
settings.load_profile("tests")


class Result(NamedTuple):
    """What a command line ended with."""

    status: int
    out: str
    err: str


Run = Callable[..., Result]
"""Runs a command line; see the fixture `run`."""

SAMPLES = Path(__file__).parent.parent / "sample_texts"
SENTENCES = [
    line for line in (SAMPLES / "sentences.txt").read_text("utf-8").splitlines() if line.strip()
]

SPECIAL = ["[PAD]", "<pad>", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = [
    *SPECIAL,
    *"abcdefghijklmnopqrstuvwxyz.,'",
    *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"),
    "the",
    "cat",
]


MOST_PROCESSES = 4
"""Beside each other, at most: each takes up to 2.5 GB."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A process a core, of one thread each, for the whole suite; tests that are named run in this process."""
    named = config.args_source is pytest.Config.ArgsSource.ARGS
    processors = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return 0 if named else min(processors, MOST_PROCESSES)


def pytest_collection_finish() -> None:
    """Keeps Python from looking for garbage, over and over, in the libraries and the tests that it has just loaded."""
    gc.collect()
    gc.freeze()


SLOW_LIMIT_S = 3600
"""Seconds after which a test marked slow is given up; others have pyproject.toml's `timeout`."""


WITH_OTHERS = {"host", "interrupted", "memory", "process", "processes", "run", "stdin", "workers"}
"""Modules whose tests wait for other processes, as those with a browser do. A machine that stalls can fail such a test
where nothing is wrong: it may try once more, and the summary says so. What is wrong fails twice."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    hunting = "ATTNSCOPE_TEST_SLOWDOWN" in os.environ  # for such tests: see page_helpers.py
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT_S))
        waits = (
            "browser" in getattr(item, "fixturenames", ())
            or item.path.stem.removeprefix("test_") in WITH_OTHERS
        )
        if waits and not hunting:
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for verdicts of the check at load that no other test has written to; it is not there yet."""
    cache = Path(_home, f"cache-{secrets.token_hex(8)}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return cache / "attnscope" / "checks"


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """The pinned all-MiniLM-L6-v2, as the package that the extra `minilm` installs carries it."""
    from attnscope.models.catalog import resolve

    folder = resolve("minilm").folder
    assert folder is not None
    return folder


def write_tokenizer(folder: Path, pieces: Sequence[str] = VOCABULARY) -> None:
    """BERT's tokenizer over the letters, as tokenizer.json and tokenizer_config.json."""
    from tokenizers.implementations import BertWordPieceTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    BertWordPieceTokenizer({piece: i for i, piece in enumerate(pieces)}).save(
        str(folder / "tokenizer.json")
    )
    settings = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": True,
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")


def write_tiny(
    folder: Path,
    model_type: str = "bert",
    *,
    seed: int = 0,
    kind: str = "AutoModel",
    **overrides: object,
) -> Path:
    """Writes a random Hugging Face model of 2 layers with 3 heads of 5, with write_tokenizer's tokenizer.

    Widths are odd and differ, and no parameter is left at 0 or 1, so that any mix-up of two shows.
    """
    import torch
    import transformers

    sizes = {
        "hidden_size": 15,
        "num_attention_heads": 3,
        "num_hidden_layers": 2,
        "intermediate_size": 11,
        "max_position_embeddings": 29,
        "vocab_size": len(VOCABULARY),
    }
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(model_type, **(sizes | overrides))
    model = getattr(transformers, kind).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.7)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tiny_t5(folder: Path) -> Path:
    """Writes a random T5 of 2 layers with 3 heads of 5, as `write_tiny` does."""
    sizes = {"d_model": 15, "d_kv": 5, "num_heads": 3, "num_layers": 2, "d_ff": 11}
    return write_tiny(folder, "t5", **sizes, pad_token_id=0, decoder_start_token_id=0)


@pytest.fixture(scope="session")
def minilm() -> Any:
    """The pinned all-MiniLM-L6-v2, loaded; nobody changes it."""
    import attnscope

    return attnscope.load("minilm")


@pytest.fixture(scope="session")
def own() -> Any:
    """The glass box; nobody changes it."""
    import attnscope

    return attnscope.load("own")


@pytest.fixture(scope="session")
def own_causal() -> Any:
    """The glass box that looks back only; nobody changes it."""
    import attnscope

    return attnscope.load("own-causal")


@pytest.fixture(scope="session")
def whisper_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Whisper."""
    from tests.senses_helpers import write_whisper

    return write_whisper(tmp_path_factory.mktemp("speech") / "whisper")


@pytest.fixture(scope="session")
def whisper(whisper_folder: Path) -> Any:
    """The same, loaded."""
    import attnscope

    return attnscope.load(whisper_folder)


@pytest.fixture(scope="session")
def _tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "bert")


@pytest.fixture
def tiny_bert(_tiny_bert: Path, tmp_path: Path) -> Path:
    """A tiny random BERT in a folder of the test's own, to be damaged at will."""
    return Path(shutil.copytree(_tiny_bert, tmp_path / "tiny-bert"))


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a record of each kind; see `write_records`. Nobody changes it."""
    from tests.made_records import write_records

    return write_records(tmp_path_factory.mktemp("records"))


@pytest.fixture
def edit_config(tiny_bert: Path) -> Callable[..., Path]:
    """Changes settings in the config.json of tiny_bert, and returns its folder."""

    return lambda **changes: edited(tiny_bert, **changes)


def names_in(folder: Path) -> list[str]:
    """The names of what lies in a folder, sorted."""
    return sorted(path.name for path in folder.iterdir())


def csv_rows(text: str) -> list[dict[str, str]]:
    """The rows of a CSV by the names of its columns."""
    return list(csv.DictReader(io.StringIO(text)))


def edited(folder: Path, **changes: object) -> Path:
    """The folder, with other settings in its config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs a command line in this process, in a folder of its own: exit status, stdout, stderr."""
    from attnscope.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def attnscope(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["attnscope", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return Result(int(ended.value.code or 0), out, err)

    return attnscope


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Puts bytes where stdin is, which Python would read as ASCII."""

    def feed(raw: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), "ascii"))

    return feed


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes with one thread, so that examples by the hundred do not wait for a second one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def opened(_opened: Any) -> Iterator[Any]:
    """The page that a module opened once, watched during one test."""
    yield from _opened.watched()


@pytest.fixture
def worker_here(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only worker is an object of this process, whatever is asked for: what is tested is not the processes."""
    from attnscope.studies.workers import Workers
    from tests.pretend_workers import Here

    monkeypatch.setattr(Workers, "executor_on", lambda *_: Here())


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One headless Chromium for all tests of pages."""
    from tests.page_helpers import open_browser

    with open_browser() as opened:
        yield opened


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens pages for one test; see `page_helpers.page_opener`."""
    from tests.page_helpers import page_opener

    with page_opener(browser, tmp_path) as opener:
        yield opener
