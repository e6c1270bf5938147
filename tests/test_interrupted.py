"""An interrupted run replaces no record that got further, and leaves nothing where nothing was done."""

import contextlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import pytest

from attnscope.output import choose_folder
from attnscope.results.storage import write_whole
from attnscope.studies.ablate import measurers as ablation
from attnscope.studies.ablate.measurers import AblationMeasurer
from attnscope.studies.compare import study as compare_study
from attnscope.studies.compare.study import PairMeasurer
from attnscope.studies.heads import study as heads_study
from attnscope.studies.heads.measuring import HeadMeasurer
from attnscope.studies.relations import study as relations
from attnscope.studies.relations.links import LinkMeasurer
from tests.conftest import SAMPLES
from tests.heads_helpers import after

COMMANDS = {
    "heads": ["heads", "--file", "texts.txt"],
    "relations": ["relations", "texts.conllu"],
    "ablation": ["ablate", "--file", "texts.txt", "--ablation", "zero", "--loss", "none", "-L", "0"],
    "compare": ["compare", "--file", "texts.txt"],
}


@pytest.fixture
def interrupt(monkeypatch, tmp_path):
    """Interrupts every command at its n-th report, and makes blocks small."""

    def at(n):
        @contextlib.contextmanager
        def progress(*_, **__):
            yield after(n)

        for command in ("atlas", "heads", "compare", "relations", "ablate", "patch", "training"):
            monkeypatch.setattr(f"attnscope.cli.{command}.progress", progress)

    lines = [f"{word} cat {word} the dog" for word in "abcdefghijklmnop"]
    (tmp_path / "texts.txt").write_text("\n".join(lines), "utf-8")
    trees = (SAMPLES / "dependencies.conllu").read_text("utf-8").split("\n\n")
    (tmp_path / "texts.conllu").write_text("\n\n".join(trees[:16]) + "\n\n", "utf-8")
    for module in (heads_study, relations, ablation, compare_study):
        monkeypatch.setattr(module, "BLOCK", 4)
    return at


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("stem", COMMANDS)
def test_a_complete_record_outlives_an_interrupted_run(stem, run, tmp_path, interrupt):
    command = [*COMMANDS[stem], "-m", "own", "-o", "out", "-f", "npz,json,csv"]
    assert run(*command)[0] == 0
    before = contents(tmp_path / "out")
    interrupt(3)
    status, _, err = run(*command)
    assert status == 130
    after = contents(tmp_path / "out")
    assert {name: after[name] for name in before} == before
    assert "which stays" in err
    aside = json.loads((tmp_path / "out/interrupted" / f"{stem}.json").read_text())
    n_texts = aside["corpus"]["n_texts"]
    assert n_texts > 0
    assert not aside["corpus"]["complete"]
    assert set(after) - set(before) == {
        f"interrupted/{stem}.{ending}" for ending in ("npz", "json", "csv")
    }


@pytest.mark.parametrize("stem", COMMANDS)
def test_where_nothing_was_done_nothing_is_written_or_said(stem, run, tmp_path, interrupt, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    interrupt(0)
    for measurer in (HeadMeasurer, PairMeasurer, AblationMeasurer, LinkMeasurer):
        monkeypatch.setattr(measurer, "measure", interrupted)
    assert run(*COMMANDS[stem], "-m", "own", "-o", "out", "--json") == (130, "", "error: interrupted\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stem", COMMANDS)
def test_of_an_interrupted_first_block_the_texts_that_are_done_count(
    stem, run, tmp_path, interrupt, monkeypatch
):
    for measurer in (HeadMeasurer, PairMeasurer, AblationMeasurer, LinkMeasurer):
        monkeypatch.setattr(measurer, "batches", one_by_one(measurer.batches))
    interrupt(2)
    status, out, err = run(*COMMANDS[stem], "-m", "own", "--json")
    assert status == 130
    record = json.loads(out)
    assert (record["corpus"]["n_texts"], record["corpus"]["complete"]) == (3, False)
    assert (
        "Interrupted in the first block of texts, which begins with the longest: these are 3 of its 4."
        in err
    )


def one_by_one(batches):
    """Batches of one row each."""

    def cut(*arguments):
        return [batch[at : at + 1] for batch in batches(*arguments) for at in range(len(batch))]

    return cut


@dataclass(frozen=True)
class Studied:
    """As much of a record as counts here."""

    run: dict[str, Any]
    corpus: dict[str, Any]


def test_an_interrupted_run_replaces_no_record(tmp_path):
    out = tmp_path / "out"

    def after(n_texts):
        found, folder = choose_folder(Studied({}, {"n_texts": n_texts, "complete": False}), out, "heads")
        if folder is not None:
            write_whole(folder / "heads.json", json.dumps(asdict(found)).encode())
        return folder

    assert [after(n) for n in (1, 3)] == [out, out / "interrupted"]
    whole = Studied({}, {"n_texts": 1, "complete": True})
    assert choose_folder(whole, out, "heads") == (whole, out)


def test_files_that_do_not_tell_how_far_they_got_stay(tmp_path):
    (tmp_path / "heads.csv").write_text("mine", "utf-8")
    found, folder = choose_folder(Studied({}, {"n_texts": 9, "complete": False}), tmp_path, "heads")
    assert folder == tmp_path / "interrupted"
    assert "which stays" in found.run["notes"][-1]
