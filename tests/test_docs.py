"""Every command and every Python block of the README and the docs runs, in the order in which it stands there.

Where one cannot be run without network or models that are not installed, a comment in the text says so, right above
the block: <!-- not run by the tests: why -->.
"""

import gzip
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import attnscope
from attnscope import cli, models
from attnscope.models.catalog import Source
from attnscope.models.model import Model

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
_BLOCK = re.compile(r"(?:<!-- not run by the tests: (?P<why>[^>]+) -->\s*\n)?```(?P<kind>bash|python)\n(?P<body>.*?)```", re.DOTALL)  # fmt: skip  # noqa: E501


@dataclass(frozen=True)
class Block:
    kind: str
    body: str
    why_not: str | None

    @property
    def commands(self) -> list[str]:
        """The lines of a bash block, those that end in a backslash joined."""
        joined = self.body.replace("\\\n", " ")
        return [line for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    return [Block(m["kind"], m["body"], m["why"]) for m in _BLOCK.finditer(text)]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that looks like a checkout to who follows the pages: with the sample texts, and a corpus."""
    (tmp_path / "sample_texts").symlink_to(ROOT / "sample_texts")
    (tmp_path / "corpus").mkdir()
    with gzip.open(tmp_path / "corpus" / "one.txt.gz", "wt", encoding="utf-8") as file:
        file.write((ROOT / "sample_texts" / "sentences.txt").read_text("utf-8"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("COLUMNS", "100")
    held: dict[object, Model] = {}
    load = models.load

    def once(source: Source | str = "minilm", *given: object, **how: object) -> Model:
        name = (source, *how.items())
        if name not in held:
            held[name] = load(source, *given, **how)  # type: ignore[arg-type]
        return held[name]

    monkeypatch.setattr(models, "load", once)
    monkeypatch.setattr(attnscope, "load", once, raising=False)
    yield tmp_path


def run(command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Runs a command: attnscope in this process, with what stands before its pipe as stdin; others as they are."""
    before, _, last = command.rpartition(" | ")
    words = shlex.split(last, comments=True)
    if words[0] == "python":
        words[0] = sys.executable
    if words[0] != "attnscope":
        done = subprocess.run(words, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return
    piped = subprocess.run(before, shell=True, capture_output=True, timeout=100, check=True).stdout if before else b""
    with io.TextIOWrapper(io.BytesIO(piped), encoding="utf-8") as stdin, monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", stdin)
        patch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    out, err = capfd.readouterr()
    assert not ended.value.code, f"{command}: {err}"
    assert out.strip(), f"{command} says nothing"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_runs(
    page: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    del elsewhere
    for block in blocks(page):
        if block.why_not is not None:
            continue
        if block.kind == "python":
            exec(compile(block.body, str(page), "exec"), {})
            continue
        for command in block.commands:
            run(command, monkeypatch, capfd)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_block_is_of_an_unknown_kind(page: Path) -> None:
    """A block that names no language would slip through unseen."""
    fences = re.findall(r"^```(.*)$", page.read_text("utf-8"), flags=re.MULTILINE)
    assert set(fences[::2]) <= {"bash", "python", "text", "json"}, fences
    assert not any(fences[1::2])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text("utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


def test_a_block_that_is_not_run_says_why() -> None:
    skipped = [block for page in PAGES for block in blocks(page) if block.why_not is not None]
    assert all(len(block.why_not or "") > 8 for block in skipped)
    assert os.environ["HF_HUB_OFFLINE"] == "1", "what needs the network must be told apart"
