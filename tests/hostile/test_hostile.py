"""No command line that is made by lot ends in a traceback, in silence, or in files where none should be."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import attnscope
from tests.hostile.check import RECORDS, WAIT_S, clean, problems, run_case
from tests.hostile.generator import BASES, COMMANDS, Generator
from tests.processes import LIMIT_S, started

FEW, MANY = 40, 4000


@pytest.fixture(scope="module")
def generator(tmp_path_factory):
    return Generator(tmp_path_factory.mktemp("home"), RECORDS)


@pytest.fixture
def home(generator):
    folder = generator.inputs.parent
    yield folder
    clean(folder, generator)


def test_every_command_is_attacked():
    assert set(BASES) == set(COMMANDS)


@pytest.mark.usefixtures("worker_here")
@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name in BASES for number in range(len(BASES[name]))]
)
def test_what_is_changed_by_lot_works_unchanged(name, number, generator, home):
    status, _, err = run_case(generator.base(name, number), home)
    assert status == 0, err


def attack(seeds, generator, home):
    found = []
    for seed in seeds:
        case = generator.case(seed)
        found += [f"seed {seed}, {[*case.arguments]}: {one}" for one in problems(case, home)]
        clean(home, generator)
    return found


@pytest.mark.usefixtures("worker_here")
@pytest.mark.timeout(2 * WAIT_S)
def test_whatever_is_given_one_line_says_why(generator, home):
    assert not attack(range(FEW), generator, home)


@pytest.mark.slow
def test_much_that_is_given(generator, home):
    assert not attack(range(FEW, MANY), generator, home)


WRITING = [(name, number) for name in BASES for number, line in enumerate(BASES[name]) if "OUT" in line]


_BEGUN = (  # as `python -m attnscope`, but says when Python has started: what comes before that is Python's to answer
    "import runpy; print(end='.', flush=True); runpy.run_module('attnscope', run_name='__main__', alter_sys=True)"
)


def computed_s(session):
    """Seconds that the processes of a session have computed, as far as they live: of what they do, whoever waits."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            told = stat.read_text().rpartition(")")[2].split()
            total += (int(told[3]) == session) * (int(told[11]) + int(told[12]))
    return total / os.sysconf("SC_CLK_TCK")


STOPS = 100


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads what processes compute from Linux")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_stopped_at_any_moment_files_are_of_one_run_and_no_process_is_left(
    sent, generator, home, tmp_path
):
    """A hundred times over all commands that write, over a result of another text, with foreign files in all folders.

    The times are drawn over what the commands compute; every other one is drawn from when files are being written.
    """
    lot = random.Random(7)
    tally = Counter()
    for turn in range(STOPS):
        name, number = WRITING[turn % len(WRITING)]
        case = generator.base(name, number)
        whole = results(case, home, generator, tmp_path / f"{name}-{number}-whole")
        earlier = {}
        if name != "prune":  # which takes no folder with files in it
            before_it = tmp_path / f"{name}-{number}-earlier"
            earlier = results(generator.base(name, number, other=True), home, generator, before_it)
            copy(before_it, case.out)
            put_foreign(case.out)
        before = {path: complete(path) for path in earlier}
        call = [sys.executable, "-c", _BEGUN, *case.arguments]
        with started(call, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
            run.stdout.read(1)
            moment = lot.uniform(0.05, 5) if turn % 2 else lot.uniform(0, 0.1)
            while computed_s(run.pid) < moment if turn % 2 else not [*home.glob("**/unfinished-*")]:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.wait(0.02 if turn % 2 else 0.001)
                    break
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(0 if turn % 2 else moment)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, sent) if sent == signal.SIGINT else os.kill(run.pid, sent)
            # Until none of its processes holds its stderr any more.
            _, said = run.communicate(timeout=LIMIT_S)
        told = f"turn {turn}, after {moment:.2f} s, {case.arguments}: {run.returncode}: {said}"
        assert run.returncode in (0, 130, -sent), told
        assert "Traceback" not in said, told
        require_whole(home, parts=sent == signal.SIGKILL)
        tally[require_one_run(home, earlier, whole, told)] += 1
        assert {path: path.is_file() and complete(path) for path in before} == before, told
        assert all(path.read_text() == "mine" for path in home.rglob("foreign.txt")), told
        assert len([*home.rglob("foreign.txt")]) == len(FOREIGN), told
        FOREIGN.clear()
        clean(home, generator)
    print(sent.name, dict(tally))


FOREIGN = []


def put_foreign(out):
    """Puts a file that attnscope did not write into each folder of a result."""
    folders = (
        [out, *(path for path in out.rglob("*") if path.is_dir())] if out.is_dir() else [out.parent]
    )
    FOREIGN[:] = [folder / "foreign.txt" for folder in folders]
    for path in FOREIGN:
        path.write_text("mine")


def copy(source, target):
    """Copies a file, or a folder with all that is in it."""
    shutil.copytree(source, target) if source.is_dir() else shutil.copy2(source, target)


def results(case, home, generator, kept):
    """What a command writes that nothing stops, by its files. It runs once, into `kept`."""
    if not kept.exists():
        status, _, said = run_case(case, home)
        assert status == 0, said
        copy(case.out, kept)
        clean(home, generator)
    return {case.out / path.relative_to(kept): path.read_bytes() for path in files_below(kept)}


def files_below(out):
    return [path for path in [out, *out.rglob("*")] if path.is_file()]


def require_one_run(home, earlier, whole, told):
    """All files that both runs write are of the earlier one, or of the one that was stopped; says of which."""
    now = {path: path.read_bytes() for path in earlier if path.is_file()}
    assert now.keys() == earlier.keys(), told
    for rest in home.glob("**/replacing-*"):  # whole, and read in place of what it is to replace
        now |= {rest.parent / path.relative_to(rest): path.read_bytes() for path in files_below(rest)}
    both = [path for path in earlier if path in whole and earlier[path] != whole[path]]
    stayed = [path for path in both if now[path] == earlier[path]]
    assert stayed in ([], both), f"{told}: {stayed} of {both} stayed"
    return "nothing to tell apart" if not both else "earlier" if stayed else "new"


def complete(path):
    """Whether a file is no record that says that it is not."""
    if path.suffix != ".npz" or "weights" in path.name:
        return True
    return bool(getattr(attnscope.load_record(path), "corpus", {}).get("complete", True))


def require_whole(home, parts):
    """Every file of a result is whole; whether parts of results may be left is said."""
    for path in home.rglob("out*/**/*"):
        if not path.is_file() or path.name == "foreign.txt":
            continue
        if path.name.endswith(".part") or any(
            part.startswith(("unfinished-", "replacing-")) for part in path.parts
        ):
            assert parts, path
        elif path.suffix == ".npz":
            attnscope.load_record(path)
        elif path.suffix == ".json":
            json.loads(path.read_text("utf-8"))
        elif path.suffix == ".jsonl":  # of a batch that was stopped before its first text: no line
            assert all(json.loads(line) for line in path.read_text("utf-8").splitlines())
        else:
            assert path.stat().st_size, path
