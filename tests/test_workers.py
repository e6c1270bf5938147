"""Workers: what they find is what one process finds, whoever is lost; and nothing is left running."""

import itertools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnscope
import attnscope.studies.heads.study as study
from attnscope import (
    AblateOptions,
    CompareOptions,
    Corpus,
    HeadsOptions,
    Workers,
    ablate,
    compare,
    compare_models,
    heads,
    relations,
)
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.model import Model
from attnscope.studies.ablation import sweep as ablation_sweep
from attnscope.studies.inputs.choice import Choice
from attnscope.studies.inputs.texts import Progress
from attnscope.studies.running import process as worker_process
from attnscope.studies.running.options import SharedWork
from attnscope.studies.running.passes import Task
from attnscope.studies.running.process import LocalExecutor, ProcessWorker
from attnscope.studies.running.ray import RayExecutor
from attnscope.studies.running.worker import WorkerLostError
from attnscope.studies.running.workers import TRIES, Done, Lost, start_workers
from tests.conftest import Run
from tests.heads_helpers import after
from tests.pretend_workers import Here, copied
from tests.processes import started
from tests.ray_run import BLOCK, NOT_STARTED, cut_small

ROOT = Path(__file__).parent.parent
N = 150
"""Texts of the corpus: three blocks."""
LINKS = ROOT / "sample_texts" / "dependencies.conllu"
TWO = Workers("own", 2)


# Handing out ----------------------------------------------------------------------------------------------------


class Doubling:
    """Work whose tasks are numbers."""

    def begin(self) -> Callable[[int], int]:
        return lambda number: 2 * number


@given(st.integers(1, 4), st.integers(0, 9), st.dictionaries(st.integers(0, 9), st.integers(0, 4)))
def test_each_task_is_done_once_whoever_is_lost(n: int, n_tasks: int, deaths: dict[int, int]) -> None:
    """Over task k the first deaths[k] workers are lost; from the third on it is given up."""
    left, lock = dict(deaths), threading.Lock()

    def dies(message: object) -> bool:
        with lock:
            if not isinstance(message, int) or not left.get(message):
                return False
            left[message] -= 1
            return True

    found = list(start_workers(Here(n, dies), Doubling(), range(n_tasks)))
    given_up = {task for task, times in deaths.items() if task < n_tasks and times >= TRIES}
    assert sorted(one.task for one in found) == list(range(n_tasks))
    assert {one.task for one in found if isinstance(one, Lost)} == given_up
    assert all(one.result == 2 * one.task for one in found if isinstance(one, Done))
    assert {one.reason for one in found if isinstance(one, Lost)} <= {"struck; tried 3 times"}


def test_no_more_workers_than_tasks() -> None:
    where = Here(7)
    assert len(list(start_workers(where, Doubling(), range(3)))) == 3 == where.started


def test_where_none_can_begin_it_says_so() -> None:
    where = Here(2, lambda message: isinstance(message, Doubling))
    with pytest.raises(AttnscopeError, match="no worker could load the model: struck; tried [34] in a row"):
        list(start_workers(where, Doubling(), range(3)))
    assert where.started in (3, 4)  # another may have been started as the third was lost


@pytest.mark.parametrize("n", [1, 2])
def test_a_worker_lost_while_it_loads_is_replaced(n: int) -> None:
    begun = itertools.count()
    where = Here(n, lambda message: isinstance(message, Doubling) and next(begun) < TRIES - 1)
    found = list(start_workers(where, Doubling(), range(4)))
    assert sorted(one.result for one in found if isinstance(one, Done)) == [0, 2, 4, 6]


def test_where_none_is_left_the_rest_is_given_up() -> None:
    begun = itertools.count()
    where = Here(1, lambda message: message == 1 or (isinstance(message, Doubling) and next(begun) > 0))
    found = list(start_workers(where, Doubling(), range(4)))
    assert [type(one) for one in found] == [Done, Lost, Lost, Lost]
    assert isinstance(found[-1], Lost) and found[-1].reason == "no worker is left: struck"
    assert where.started == 1 + TRIES


def test_what_tasks_and_their_makers_raise_comes_out() -> None:
    def broken() -> Iterator[int]:
        yield from range(5)
        raise AttnscopeError("no more texts")

    with pytest.raises(AttnscopeError, match="no more texts"):
        list(start_workers(Here(2), Doubling(), broken()))
    with pytest.raises(RuntimeError, match="in a worker: TypeError"):
        list(start_workers(Here(2), Doubling(), [None]))  # type: ignore[list-item]


def test_what_is_asked_for_must_mean_something() -> None:
    assert SharedWork().share("own", TWO.loading) is None
    assert SharedWork(workers=3).share("own", TWO.loading) == Workers("own", 3)
    assert SharedWork(executor="ray", ray_address="a:1").share("own", TWO.loading).address == "a:1"  # type: ignore[union-attr]
    for wrong in (
        {"threads": 2},
        {"ray_address": "a:1"},
        {"workers": 0},
        {"executor": "slurm"},
        {"workers": 1, "threads": 0},
    ):
        with pytest.raises(UsageError):
            SharedWork(**wrong).share("own", TWO.loading)  # type: ignore[arg-type]


# Processes ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Iterator[None]:
    """Blocks of a corpus, as the process that hands them out cuts them."""
    with pytest.MonkeyPatch.context() as patch:
        cut_small(patch)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of three blocks of texts, one of two blocks of linked ones."""
    made = tmp_path_factory.mktemp("corpus")
    (made / "many.txt").write_text("\n".join(f"{'abcdefg'[i % 7]} b {i}" for i in range(N)), "utf-8")
    # The first word of each sentence has an ending that is the round's own: copies would count once.
    rounds = (re.sub(r"(?m)^1\t(\S+)", rf"1\t\g<1>{chr(97 + i)}", LINKS.read_text("utf-8")) for i in range(6))
    (made / "links.conllu").write_text("\n".join(rounds), "utf-8")
    return made


@pytest.fixture(scope="module")
def own() -> Iterator[Model]:
    """The glass box on one thread, as workers have it."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield attnscope.load("own")
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def corpus(folder: Path) -> Corpus:
    return Corpus([folder / "many.txt", folder / "absent.txt"])


@pytest.fixture(scope="module")
def alone(own: Model, corpus: Corpus, folder: Path) -> bytes:
    """The record of one process."""
    return heads(own, corpus).save(folder / "alone.npz").read_bytes()


@pytest.fixture(scope="module")
def links_alone(own: Model, folder: Path) -> bytes:
    return relations(own, str(folder / "links.conllu")).save(folder / "links.npz").read_bytes()


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers in this process: real ones are those of `heads` below, and Ray's of `relations` too."""
    monkeypatch.setattr(Workers, "open", lambda *_: Here(2))


def killing(doomed: Callable[[object], bool]) -> type[ProcessWorker]:
    class Watched(ProcessWorker):
        def ask(self, message: object) -> object:
            if doomed(message):
                self.child.kill()
            return super().ask(message)

    return Watched


def test_one_of_two_is_killed_and_not_a_bit_differs(
    own: Model, corpus: Corpus, alone: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[object] = []

    def once(message: object) -> bool:
        if isinstance(message, Task) and message.block.index == 2 and not killed:
            killed.append(message)
            return True
        return False

    monkeypatch.setattr(worker_process, "ProcessWorker", killing(once))
    seen = []
    counted = []

    def report(done: Progress) -> None:
        (counted if done.step else seen).append((done.n_texts, done.share))

    found = heads(own, corpus, None, report, Workers("own", 2))
    assert [n for n, _ in counted] == [*range(32, N, 32)]
    assert len(killed) == 1
    assert [problem["source"] for problem in found.corpus["problems"]] == [str(corpus.sources[1])]
    assert found.save(tmp_path / "found.npz").read_bytes() == alone
    assert seen[-1] == (N, 1.0) and [n for n, _ in seen] == sorted(n for n, _ in seen)


def test_a_block_that_costs_three_workers_is_listed_and_the_rest_kept(
    own: Model, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = Here(1, lambda message: isinstance(message, Task) and message.block.index == 1)
    monkeypatch.setattr(Workers, "open", lambda *_: where)
    told = heads(own, corpus, workers=Workers("own", 1)).corpus
    assert told["complete"] and told["n_texts"] == N - BLOCK and where.started == 1 + TRIES
    assert [problem["line"] for problem in told["problems"]] == [None, BLOCK + 1]
    assert told["problems"][1]["reason"] == f"{BLOCK} texts from here on were not studied: struck; tried 3 times"


def test_on_the_command_line_that_is_a_result_and_one_line(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = Here(1, lambda message: isinstance(message, Task) and message.block.index == 1)
    monkeypatch.setattr(Workers, "open", lambda *_: where)
    status, out, err = run("heads", "-m", "own", "--file", folder / "many.txt", "--workers", 1, "-q")
    assert status == 1 and f"{N - BLOCK} texts" in out
    assert err.splitlines() == [
        f"skipped: {folder}/many.txt, line {BLOCK + 1}: {BLOCK} texts from here on were not studied: struck; "
        "tried 3 times",
        "error: 1 part of the texts could not be read or studied",
        "hint: all the rest was studied, and is in the result",
    ]


def test_all_options_reach_the_workers(own: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over every second block two workers are lost; blocks are small, and workers objects of this process."""
    monkeypatch.setattr(study, "BLOCK", 4)
    texts = Corpus(ROOT / "sample_texts" / "sentences.txt")
    chosen = HeadsOptions(chunk=12, stride=5, control=True, seed=3)
    alone = heads(own, texts, chosen)
    left = dict.fromkeys(range(0, 9, 2), TRIES - 1)

    def dies(message: Any) -> bool:
        if not isinstance(message, Task) or not left.get(message.block.index):
            return False
        left[message.block.index] -= 1
        return True

    monkeypatch.setattr(Workers, "open", lambda *_: Here(2, dies))
    shared = heads(own, texts, chosen, workers=TWO)
    assert shared.as_json() == alone.as_json() and shared.control
    assert shared.sums.keys() == alone.sums.keys()
    assert all((array == shared.sums[name]).all() for name, array in alone.sums.items())


@pytest.mark.usefixtures("here")
def test_links_are_those_of_one_process(own: Model, folder: Path, links_alone: bytes, tmp_path: Path) -> None:
    found = relations(own, str(folder / "links.conllu"), workers=TWO)
    assert found.save(tmp_path / "links.npz").read_bytes() == links_alone


@pytest.mark.usefixtures("here")
def test_comparisons_are_those_of_one_process(own: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnscope.studies.compare.study.BLOCK", 8)
    texts, options = Corpus(ROOT / "sample_texts" / "sentences.txt"), CompareOptions(("hellinger", "jensen_shannon"))
    shared, alone = compare(own, texts, options, workers=TWO), compare(own, texts, options)
    assert shared.as_json() == alone.as_json() and alone.corpus["n_texts"] > 16
    both = compare_models(own, own, texts, options, workers=(TWO, TWO))
    assert both.as_json() == compare_models(own, own, texts, options).as_json()


@pytest.mark.usefixtures("here")
def test_what_changes_without_heads_is_that_of_one_process(own: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation_sweep, "BLOCK", 3)
    texts = [f"{'abcdefg'[i % 7]} b {i}" for i in range(7)]
    options = AblateOptions(importance=True, choice=Choice(layers=(0,)))
    seen: list[float | None] = []
    shared = ablate(own, texts, options, lambda done: seen.append(done.share), TWO)
    assert shared.as_json() == ablate(own, texts, options).as_json()
    assert shared.corpus["n_texts"] > 6 and seen == sorted(seen, key=lambda share: share or 0)


def test_blocks_lost_in_any_pass_are_listed_once(own: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation_sweep, "BLOCK", 5)
    texts = [f"{'abcdefg'[i % 7]} b {i}" for i in range(15)]
    monkeypatch.setattr(
        Workers, "open", lambda *_: Here(1, lambda message: isinstance(message, Task) and message.number == 1)
    )
    found = ablate(own, texts, AblateOptions(importance=True, choice=Choice(layers=(0,))), workers=Workers("own", 1))
    assert found.corpus["n_texts"] == 10 and found.corpus["complete"]
    assert [problem["line"] for problem in found.corpus["problems"]] == [6]
    assert all(head.effects["importance"].count == 10 for head in found.heads if "importance" in head.effects)


def test_workers_are_refused_where_there_is_one_text(run: Run) -> None:
    status, _, err = run("compare", "the cat", "--pick", "L0H0,L0H1", "-m", "own", "--workers", 2)
    assert status == 2 and "workers share many texts: here is one" in err


def test_ctrl_c_keeps_whole_blocks_and_ends_all_processes(
    own: Model, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers: list[ProcessWorker] = []

    class Kept(ProcessWorker):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            workers.append(self)

    monkeypatch.setattr(worker_process, "ProcessWorker", Kept)
    found = heads(own, corpus, None, after(0, ""), Workers("own", 1))  # once tokens are counted
    assert not found.corpus["complete"] and found.corpus["n_texts"] == BLOCK
    assert len(workers) == 1 and all(worker.child.poll() is not None for worker in workers)


class Threads:
    """Work that tells how many threads it may use."""

    def begin(self) -> Callable[[object], object]:
        import torch

        return lambda _: torch.get_num_threads()


class Unreadable:
    """A task that no worker can take out of its message."""

    def __reduce__(self) -> Any:
        return exec, ("raise ImportError('no such module')",)


def test_a_message_that_a_worker_cannot_read_loses_the_worker_and_is_not_waited_for() -> None:
    with LocalExecutor(1, 1) as executor:
        worker = executor.worker()
        with pytest.raises(WorkerLostError, match="its process"):
            worker.ask(Unreadable())
        worker.end()
        killed = executor.worker()
        killed.child.kill()
        with pytest.raises(WorkerLostError, match="its process was killed by signal 9: perhaps for want of memory"):
            killed.ask(Doubling())
        killed.end()


def test_a_worker_has_the_threads_that_it_is_given() -> None:
    with LocalExecutor(1, 1) as where, closing(start_workers(where, Threads(), [0])) as found:
        assert [one.result for one in found if isinstance(one, Done)] == [1]


# Ray ------------------------------------------------------------------------------------------------------------


def test_what_is_wrong_with_ray_is_one_line(own: Model, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(AttnscopeError, match=r"needs Ray \(pip install 'attnscope\[ray\]'\)"):
        heads(own, corpus, workers=Workers("own", executor="ray"))


class PretendedRay:
    """What is called of Ray, over actors that are objects of this process."""

    class exceptions:  # noqa: N801
        RayError = type("RayError", (Exception,), {})
        RayTaskError = type("RayTaskError", (RayError,), {})

    def __init__(self, dies: Callable[[object], bool]) -> None:
        self.dies, self.killed, self.options, self.calls = dies, list[object](), dict[str, int](), list[str]()

    def remote(self, **options: int) -> Any:
        self.options = options
        return lambda made: SimpleNamespace(remote=lambda *given: self.actor(made(*given)))

    def actor(self, made: Any) -> Any:
        return SimpleNamespace(answer=SimpleNamespace(remote=lambda message: (made, message)))

    def get(self, asked: Any) -> object:
        actor, message = asked
        if self.dies(message):
            raise self.exceptions.RayError("The actor died.\nIt was killed.")
        return copied(actor.answer(copied(message)))

    def kill(self, actor: object) -> None:
        self.killed.append(actor)

    def is_initialized(self) -> bool:
        return self.calls[-1:] == ["init"]

    def init(self, **_: object) -> None:
        self.calls.append("init")

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 5.0, "GPU": 1.0}


def test_an_actor_that_is_lost_is_replaced_and_room_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MPLBACKEND"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    strikes = iter([True])
    ray = PretendedRay(lambda message: message == 2 and next(strikes, False))
    monkeypatch.setitem(sys.modules, "ray", ray)
    with RayExecutor(None, 2, None) as where:
        found = [*start_workers(where, Doubling(), range(5))]
    assert sorted(one.result for one in found if isinstance(one, Done)) == [0, 2, 4, 6, 8]
    assert where.n == 2 and len(ray.killed) == 3 and ray.calls == ["init", "shutdown"]
    assert ray.options == {"num_cpus": 2, "num_gpus": 0, "max_restarts": 0, "max_task_retries": 0}
    ray.dies = lambda message: message == 2
    with RayExecutor(1, 1, None) as where:
        (lost,) = (one for one in start_workers(where, Doubling(), [2]) if isinstance(one, Lost))
    assert lost.reason == "its process died: The actor died.; tried 3 times"
    with pytest.raises(AttnscopeError, match="room for 2 workers, not for 3 of 2 threads"):
        RayExecutor(3, 2, None)
    with pytest.raises(AttnscopeError, match="room for 1 workers, not for 2 of 1 thread and a GPU each"):
        RayExecutor(2, 1, None, on_gpu=True)


RAY_LIMIT_S = 900
"""Seconds that a cluster may take to start and to do its work, on a machine that has much else to do."""


@pytest.fixture(scope="module")
def by_ray(folder: Path, alone: bytes, links_alone: bytes) -> dict[str, Any]:
    """What a cluster of two workers made of the same texts, one of them killed; see ray_run. Its own process."""
    pytest.importorskip("ray", reason="the extra [ray] is not installed", exc_type=ImportError)
    quiet = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}
    command = [sys.executable, "-m", "tests.ray_run", str(folder)]
    for _ in range(5):
        with started(
            command, cwd=ROOT, env=os.environ | quiet, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as run:  # Ray's own processes end with it
            out, err = run.communicate(timeout=RAY_LIMIT_S)
        if run.returncode != NOT_STARTED:
            break
    else:
        pytest.skip(f"Ray itself did not start, five times over: {err.splitlines()[0]}")  # it would not wait longer
    assert run.returncode == 0, err
    told: dict[str, Any] = json.loads(out.splitlines()[-1])
    return told


@pytest.mark.slow
@pytest.mark.timeout(2 * RAY_LIMIT_S)
def test_one_of_two_actors_is_killed_and_not_a_bit_differs(
    by_ray: dict[str, Any], folder: Path, alone: bytes, links_alone: bytes
) -> None:
    assert by_ray["killed"] == 1
    assert (folder / "ray.npz").read_bytes() == alone
    assert (folder / "ray-links.npz").read_bytes() == links_alone
    assert by_ray["drawn"] == [1, 0]


@pytest.mark.slow
@pytest.mark.timeout(2 * RAY_LIMIT_S)
def test_what_ray_cannot_do_is_said(by_ray: dict[str, Any]) -> None:
    assert by_ray["too_many"].startswith("Ray has room for 2 workers, not for 3 of 1 thread (")
