"""A record of each kind as a command makes it, for tests of whatever is done with records."""

import contextlib
import io
import shutil
from pathlib import Path

import pytest

from attnscope.cli import main
from tests.conftest import SAMPLES

RECORDS = Path(__file__).parent / "records"
TEXTS = "the cat and the dog\na dog\nthe cat sat\n"

MADE: dict[str, list[str]] = {
    "heads.npz": ["heads", "--file", "texts.txt", "-f", "npz,json"],
    "compare.npz": ["compare", "--file", "texts.txt", "-f", "npz,json"],
    "relations.npz": ["relations", "texts.conllu", "-f", "npz,json"],
    "ablation.npz": ["ablate", "--file", "texts.txt", "--loss", "none", "-L", "0", "-f", "npz,json"],
    "trace.npz": ["learn", "trace", "the cat", "-L", "0", "-H", "0"],
    "split.npz": ["learn", "split", "-f", "npz,json"],
    "cost.npz": ["learn", "cost", "bert-base", "-f", "npz,json"],
    "atlas.npz": ["atlas", "--file", "texts.txt", "-f", "npz,json", "--examples", "2"],
    "rollout.npz": ["heatmap", "--rollout", "the cat", "-f", "npz,json"],
    "heatmap.npz": ["heatmap", "the cat", "-f", "npz,json"],
    "shares.npz": ["heatmap", "the cat", "--from", "cat", "--to", "the", "-f", "npz,json"],
    "weights.npz": ["weights", "-f", "npz,json"],
    "why.npz": ["why", "the cat", "--pick", "L1H1", "--query", "cat", "-f", "npz,json"],
    "pooled.npz": ["heatmap", "the cat and the dog", "--pool", "8", "-f", "npz"],
    "picked.npz": ["compare", "the cat", "--pick", "L0H0,L0H1", "-f", "npz"],
    "pair.npz": ["compare", "the cat", "--with", "the dog", "-f", "npz"],
}
KEPT = (
    "training.npz",
    "needles.npz",
    "looking.npz",
    "listening.npz",
    "pairs.npz",
    "patching.npz",
)
"""Records of models that take longer to make, as they lie in `records`."""
EVERY = (*MADE, *KEPT)


def write_records(home: Path) -> Path:
    """Makes a record of each kind, and keeps what the command printed that made it: heads.npz and heads.npz.txt."""
    (home / "texts.txt").write_text(TEXTS, "utf-8")
    trees = (SAMPLES / "dependencies.conllu").read_text("utf-8").split("\n\n")
    (home / "texts.conllu").write_text("\n\n".join(trees[:12]) + "\n\n", "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setenv("COLUMNS", "120")
        for name, command in MADE.items():
            more = [] if name in ("cost.npz", "split.npz") else ["-m", "own"]
            patch.setattr("sys.argv", ["attnscope", *command, *more, "-o", f"{name}.out"])
            printed = io.TextIOWrapper(io.BytesIO(), "utf-8")
            with pytest.raises(SystemExit) as ended, contextlib.redirect_stdout(printed):
                main()
            assert not ended.value.code, name
            printed.flush()
            (home / f"{name}.txt").write_bytes(printed.buffer.getvalue())  # type: ignore[attr-defined]
            stem = "compare" if name in ("picked.npz", "pair.npz") else Path(name).stem
            (home / f"{name}.out" / f"{stem}{Path(name).suffix}").rename(home / name)
    for name in KEPT:
        shutil.copy(RECORDS / name, home)
    return home
