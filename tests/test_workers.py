"""Studies that workers share: what they find is what one process finds, whoever dies."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import attnscope
from attnscope import (
    AblateOptions,
    Corpus,
    HeadsOptions,
    ablate,
    heads,
    relations,
)
from attnscope.choice import Choice
from attnscope.studies.heads.study import study_heads
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.inputs.texts import texts_of
from attnscope.studies.workers import MAX_RUNS, Workers
from tests.block_functions import DeadlyMeasurer
from tests.conftest import write_tiny
from tests.heads_helpers import heads_in
from tests.pretend_workers import Here
from tests.processes import LIMIT_S, started

ROOT = Path(__file__).parent.parent
N = 150
BLOCK = 64
"""Texts of the corpus, and of a block: there are three."""
LINKS = ROOT / "sample_texts" / "dependencies.conllu"
TWO = Workers("own", 2)


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    """Blocks of a corpus, as the process that hands them out cuts them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnscope.studies.heads.study.BLOCK", BLOCK)
        patch.setattr("attnscope.studies.relations.study.BLOCK", 2 * BLOCK)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A corpus of three blocks of texts, one of two blocks of linked ones."""
    made = tmp_path_factory.mktemp("corpus")
    (made / "many.txt").write_text("\n".join(f"{'abcdefg'[i % 7]} b {i}" for i in range(N)), "utf-8")
    # The first word of each sentence has an ending that is the round's own: copies would count once.
    rounds = (
        re.sub(r"(?m)^1\t(\S+)", rf"1\t\g<1>{chr(97 + i)}", LINKS.read_text("utf-8")) for i in range(6)
    )
    (made / "links.conllu").write_text("\n".join(rounds), "utf-8")
    return made


@pytest.fixture(scope="module")
def own():
    """The glass box on one thread, as workers have it."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield attnscope.load("own")
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def corpus(folder):
    return Corpus([folder / "many.txt", folder / "absent.txt"])


@pytest.fixture
def here(monkeypatch):
    """A worker in this process: real ones are those of `heads`."""
    monkeypatch.setattr(Workers, "executor_on", lambda *_: Here())


def require_same(found, alone):
    """Both name the same roles; numbers agree to 1e-12."""
    assert len(heads_in(found)) == len(heads_in(alone)) > 0
    for ours, theirs in zip(heads_in(found), heads_in(alone), strict=True):
        assert [role.name for role in ours.roles] == [role.name for role in theirs.roles]
        for name, number in ours.measures.items():
            other = theirs.measures[name]
            for part in ("value", "low", "high", "baseline", "count"):
                np.testing.assert_allclose(
                    getattr(number, part),
                    getattr(other, part),
                    rtol=1e-12,
                    atol=1e-12,
                    err_msg=f"{name} {part}",
                )


# Processes ------------------------------------------------------------------------------------------------------


def test_two_processes_find_what_one_finds_and_tell_how_far_they_are(own, corpus):
    seen = []
    found = heads(own, corpus, None, seen.append, TWO)
    require_same(found, heads(own, corpus))
    assert [problem["source"] for problem in found.corpus["problems"]] == [str(corpus.sources[1])]
    counted = [done.n_texts for done in seen if not done.step]
    assert counted == sorted(counted)
    assert seen[-1].n_texts == N
    assert seen[-1].share == 1.0


def test_a_worker_that_is_killed_in_a_block_costs_nothing(own, corpus, tmp_path):
    deadly = partial(DeadlyMeasurer, marks=tmp_path, text=BLOCK, n_deaths=1)
    found, _ = study_heads(own, texts_of(corpus), HeadsOptions(), None, TWO, deadly)
    assert len(list(tmp_path.iterdir())) == 1
    require_same(found, heads(own, corpus))


def test_a_block_that_always_kills_is_listed_and_the_rest_kept(own, corpus, tmp_path):
    deadly = partial(DeadlyMeasurer, marks=tmp_path, text=BLOCK, n_deaths=99)
    found, _ = study_heads(own, texts_of(corpus), HeadsOptions(), None, TWO, deadly)
    assert len(list(tmp_path.iterdir())) == MAX_RUNS
    assert found.corpus["complete"]
    assert found.corpus["n_texts"] == N - BLOCK
    assert [problem["line"] for problem in found.corpus["problems"]] == [None, BLOCK + 1]
    assert found.corpus["problems"][1]["reason"] == (
        f"{BLOCK} texts from here on were not studied: its process was killed by signal 9: "
        f"perhaps for want of memory; tried {MAX_RUNS} times"
    )


def test_other_weights_on_a_worker_are_refused(own, corpus):
    with pytest.raises(attnscope.AttnscopeError, match="own-causal has other weights on a worker"):
        heads(own, corpus, workers=Workers("own-causal", 1))


INTERRUPTED = """
import os, signal, sys
import torch
import attnscope
import attnscope.studies.heads.study as study
from attnscope.studies.workers import Workers
torch.set_num_threads(1)
study.BLOCK = 64
seen = []

def report(done):
    if not done.step and not seen:
        seen.append(done)
        os.killpg(0, signal.SIGINT)  # as a terminal sends it: to all processes

workers = Workers("own", int(sys.argv[2])) if sys.argv[2] != "0" else None
found = attnscope.heads(attnscope.load("own"), attnscope.Corpus(sys.argv[1]), None, report, workers)
print(found.corpus["complete"], found.corpus["n_texts"], len(found["heads"]) > 0)
"""


@pytest.mark.parametrize("n_workers", [0, 2])
def test_ctrl_c_keeps_what_is_done(n_workers, folder):
    """In this process too, in the first block."""
    command = [sys.executable, "-c", INTERRUPTED, str(folder / "many.txt"), str(n_workers)]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        out, err = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 0, err
    assert err == ""
    complete, n_texts, has_heads = out.split()
    assert complete == "False"
    assert has_heads == "True"
    assert 0 < int(n_texts) <= BLOCK


# What is shared -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
def test_links_are_those_of_one_process(own, folder, tmp_path):
    alone = relations(own, str(folder / "links.conllu")).save(tmp_path / "alone.npz")
    shared = relations(own, str(folder / "links.conllu"), workers=TWO).save(tmp_path / "shared.npz")
    assert shared.read_bytes() == alone.read_bytes()


@pytest.mark.usefixtures("here")
def test_what_changes_without_heads_is_that_of_one_process(tmp_path, monkeypatch):
    monkeypatch.setattr("attnscope.studies.ablate.measurers.BLOCK", 3)
    folder = str(write_tiny(tmp_path, kind="AutoModelForMaskedLM"))
    model = attnscope.load(folder, engine="hf")
    texts = ["the cat", "a cat sat", "the mat", "it ran on", "the cat ran", "on a mat", "so it sat"]
    options = AblateOptions(importance=True, choice=Choice(layers=(0,)))
    seen = []
    workers = Workers(folder, 2, loading=LoadOptions(engine="hf"))
    shared = ablate(model, texts, options, lambda done: seen.append(done.share), workers)
    assert shared.as_json() == ablate(model, texts, options).as_json()
    assert shared.corpus["n_texts"] > 6
    assert seen == sorted(seen, key=lambda share: share or 0)


# Ray ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cluster_that_loses_a_machine_finds_what_one_process_finds(own, corpus, folder):
    """See `ray_run`, in a process of its own."""
    pytest.importorskip("ray", reason="the extra [ray] is not installed", exc_type=ImportError)
    quiet = {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
    }
    command = [
        sys.executable,
        "-m",
        "tests.ray_run",
        "own",
        str(folder / "many.txt"),
        str(folder),
        str(BLOCK),
    ]
    with started(
        command,
        cwd=ROOT,
        env=os.environ | quiet,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        out, err = run.communicate(timeout=800)
    assert run.returncode == 0, err
    told = json.loads(out.splitlines()[-1])
    assert told["n_nodes_left"] == 1
    assert told["drawn"] == [1, 0]
    require_same(attnscope.load_record(folder / "ray.npz"), heads(own, Corpus(folder / "many.txt")))
