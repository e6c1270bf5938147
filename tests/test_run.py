"""The executor: each block once, whoever dies; the same interface in this process, in processes and on Ray."""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from attnscope.errors import AttnscopeError
from attnscope.studies.workers import MAX_RUNS, Processes, RayCluster
from tests.block_functions import Environment, Raises, Square
from tests.processes import LIMIT_S

ROOT = Path(__file__).parent.parent


def squares(executor, function, n):
    """The squares of the first n numbers, or why they are lost."""
    outcomes = list(executor.map_blocks(function, iter(range(n))))
    assert sorted(outcome.number for outcome in outcomes) == list(range(n))
    assert all(outcome.number == outcome.block for outcome in outcomes)
    return {outcome.number: outcome.death_reason or outcome.result[0] for outcome in outcomes}


@pytest.mark.parametrize("executor", [Processes(1, 1), Processes(2, 1)], ids=["one", "two"])
def test_each_block_is_run_once(executor, tmp_path):
    assert squares(executor, Square(tmp_path), 7) == {number: number**2 for number in range(7)}


@pytest.mark.parametrize("n_workers", [1, 2])
def test_a_block_whose_worker_is_killed_is_run_again(n_workers, tmp_path):
    function = Square(tmp_path, {2: MAX_RUNS - 1})
    assert squares(Processes(n_workers, 1), function, 6) == {number: number**2 for number in range(6)}
    assert len(list(tmp_path.iterdir())) == MAX_RUNS - 1


def test_a_block_that_always_kills_its_worker_is_given_up_and_no_other(tmp_path):
    results = squares(Processes(2, 1), Square(tmp_path, {1: 99, 4: 99}), 6)
    reason = f"its process was killed by signal 9: perhaps for want of memory; tried {MAX_RUNS} times"
    assert results == {0: 0, 1: reason, 2: 4, 3: 9, 4: reason, 5: 25}
    assert len(list(tmp_path.glob("death-1-*"))) == len(list(tmp_path.glob("death-4-*"))) == MAX_RUNS


def test_a_worker_that_dies_while_it_loads_is_replaced(tmp_path):
    assert squares(Processes(1, 1), Square(tmp_path, {-1: MAX_RUNS - 1}), 3) == {0: 0, 1: 1, 2: 4}


def test_where_no_worker_can_load_it_says_so(tmp_path):
    with pytest.raises(
        AttnscopeError, match=f"no worker could load the model: .* signal 9.*; tried {MAX_RUNS} times"
    ):
        squares(Processes(2, 1), Square(tmp_path, {-1: 99}), 3)


def test_want_of_memory_counts_as_a_death():
    (outcome,) = Processes(1, 1).map_blocks(Raises(), [MemoryError()])
    assert outcome.death_reason == f"its process ran out of memory; tried {MAX_RUNS} times"


def test_what_a_function_raises_comes_out_as_it_is():
    executor = Processes(1, 1)
    with pytest.raises(AttnscopeError) as raised:
        list(executor.map_blocks(Raises(), [AttnscopeError("no such thing", "take another")]))
    assert raised.value.message == "no such thing"
    assert raised.value.hint == "take another"
    with pytest.raises(ZeroDivisionError):
        list(executor.map_blocks(Raises(), [ZeroDivisionError()]))


def test_blocks_are_read_as_they_are_needed(tmp_path):
    n_read = 0

    def endless():
        nonlocal n_read
        while True:
            yield n_read
            n_read += 1

    with closing(Processes(2, 1).map_blocks(Square(tmp_path), endless())) as outcomes:  # type: ignore[type-var]
        for n_done in range(1, 20):
            next(outcomes)
            assert n_read <= n_done + 3


def test_a_worker_keeps_what_it_loaded_and_has_the_threads_that_it_is_given(tmp_path):
    pids = {outcome.result[1] for outcome in Processes(1, 1).map_blocks(Square(tmp_path), range(4))}
    assert len(pids) == 1
    assert os.getpid() not in pids
    names = ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "MPLBACKEND"]
    found = [outcome.result for outcome in Processes(1, 3).map_blocks(Environment(), names)]
    assert found == ["3", "3", "agg"]


# Ctrl-C ---------------------------------------------------------------------------------------------------------

INTERRUPTED = """
import sys
from pathlib import Path
from attnscope.studies.workers import Processes
from tests.block_functions import Slow

function = Slow(Path(sys.argv[1]))
done = []
try:
    for outcome in Processes(2, 1).map_blocks(function, range(4)):
        done.append(outcome.number)
except KeyboardInterrupt:
    print(*sorted(done))
"""


def start_interrupted(folder):
    """Start a script that maps four blocks, in a process group of its own; return once all of them have begun."""
    script = folder / "script.py"
    script.write_text(INTERRUPTED, "utf-8")
    marks = folder / "marks"
    marks.mkdir()
    run = subprocess.Popen(
        [sys.executable, script, marks],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while len(list(marks.iterdir())) < 4:
        assert run.poll() is None, run.communicate()
        time.sleep(0.01)
    return run


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
def test_ctrl_c_keeps_what_is_done_and_ends_all_workers_without_a_word(tmp_path):
    run = start_interrupted(tmp_path)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to all processes
    out, err = run.communicate(timeout=LIMIT_S)  # workers hold stderr: none of them is left
    assert out == "0 2\n"
    assert err == ""
    assert run.returncode == 0


# Ray ------------------------------------------------------------------------------------------------------------


def test_what_is_wrong_with_ray_is_one_line(monkeypatch, tmp_path):
    for address in ("somewhere", "127.0.0.1:1"):
        with pytest.raises(AttnscopeError, match=f"cannot be reached at {address}"):
            squares(RayCluster(1, 1, address), Square(tmp_path), 1)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(AttnscopeError, match=r"needs Ray \(pip install 'attnscope\[ray\]'\)"):
        squares(RayCluster(1, 1, None), Square(tmp_path), 1)
