"""Files that belong together: all new or all earlier, whenever a run is stopped; whatever else is there stays."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import attnscope
from attnscope import output
from attnscope.errors import AttnscopeError
from attnscope.questions.heads import Heads
from attnscope.results.file_sets import OwnFiles, find_unmoved, locate, replace_together
from attnscope.results.kinds import file_of
from attnscope.results.result import Result
from tests.conftest import Run
from tests.findings_helpers import fake_findings
from tests.record_helpers import simple


def listed(folder: Path) -> list[str]:
    """What an index of a set lists."""
    index = folder / "index.txt"
    return [*index.read_text().split(), "index.txt"] if index.is_file() else []


OWN = OwnFiles(frozenset({"a.npz", "b.csv", "c.csv", "d.csv", "index.txt"}), index="index.txt", listed=listed)


def write_set(target: Path, content: str, names: tuple[str, ...], own: OwnFiles = OWN) -> None:
    with replace_together(target, own) as staged:
        for name in names:
            (staged / name).write_text(content)
        if own.index:
            (staged / own.index).write_text(" ".join(names))


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


OLD, NEW = ("a.npz", "b.csv", "c.csv"), ("a.npz", "b.csv", "d.csv")
EARLIER = dict.fromkeys(OLD, "old") | {"index.txt": " ".join(OLD), "notes.txt": "mine"}
LATER = dict.fromkeys(NEW, "new") | {"index.txt": " ".join(NEW), "notes.txt": "mine"}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    write_set(tmp_path / "out", "old", OLD)
    (tmp_path / "out/notes.txt").write_text("mine")
    return tmp_path / "out"


def test_a_set_replaces_its_own_files_alone(target: Path) -> None:
    write_set(target, "new", NEW)
    assert contents(target) == LATER


@pytest.mark.parametrize("raised", [KeyboardInterrupt, AttnscopeError, ValueError])
def test_a_set_that_is_not_finished_changes_nothing(raised: type[BaseException], target: Path) -> None:
    for folder in (target, target / "new/folder"):
        with pytest.raises(raised), replace_together(folder, OWN) as staged:
            (staged / "a.npz").write_text("new")
            raise raised("x")
    assert contents(target) == EARLIER and not (target / "new").exists()


_KILLED = """
import os, sys
from pathlib import Path
from attnscope.results import file_sets
from tests.test_file_sets import NEW, write_set
def counting(method):
    def step(*given, **named):
        global left
        if left == 0:
            os.kill(os.getpid(), 9)
        left -= 1
        return method(*given, **named)
    return step
for name in ("mkdir", "write_text", "rename", "replace", "unlink", "rmdir"):
    setattr(Path, name, counting(getattr(Path, name)))
file_sets.shutil.rmtree = counting(file_sets.shutil.rmtree)
for number, target in enumerate(sys.argv[1:]):
    left = number
    if child := os.fork():
        print(os.WTERMSIG(os.waitpid(child, 0)[1]))
        continue
    write_set(Path(target), "new", NEW)
    os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="has no fork")
def test_a_run_that_is_killed_at_any_step_leaves_the_earlier_set_or_the_new_one(target: Path) -> None:
    targets = [Path(shutil.copytree(target, target.parent / f"out{steps}")) for steps in range(20)]
    how: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
    signals = subprocess.run([sys.executable, "-c", _KILLED, *targets], **how).stdout.split()
    assert signals == sorted(signals, reverse=True) and set(signals) == {"9", "0"}
    n_between = 0
    for place in targets:
        found = {
            path.name: path.read_text()
            for path in map(locate, map(place.joinpath, {*EARLIER, *LATER}))
            if path.is_file()
        }
        if find_unmoved(place):  # the rest of the new set is read where it is
            assert {name: found[name] for name in LATER} == LATER
            n_between += {n: t for n, t in contents(place).items() if "replacing-" not in n} not in (EARLIER, LATER)
        else:
            assert found in (EARLIER, LATER)
        write_set(place, "last", ("a.npz",), OwnFiles(OWN.names, index="index.txt", listed=listed))
        assert contents(place) == {"a.npz": "last", "index.txt": "a.npz", "notes.txt": "mine"} | {
            name: text for name, text in contents(place).items() if name.startswith("unfinished-")
        }
        assert not find_unmoved(place)
    assert n_between > 2


def test_another_run_of_fewer_formats_leaves_the_killed_run_s_set_whole(target: Path) -> None:
    """The rest of the killed run's set moves before the other files are written, so no two runs are mixed."""
    (target / "replacing-01234567").mkdir()
    for name in NEW[1:]:
        (target / "replacing-01234567" / name).write_text("new")
    (target / "a.npz").write_text("new")
    write_set(target, "last", ("a.npz",), OwnFiles(OWN.names))
    assert contents(target) == EARLIER | {"a.npz": "last", "b.csv": "new", "d.csv": "new"}


def test_a_killed_run_s_record_is_read_before_it_has_moved_by_folder_and_by_file(tmp_path: Path, run: Run) -> None:
    fake_findings(2, 3).save(tmp_path / "heads.npz")
    fake_findings(3, 4).save(tmp_path / "replacing-01234567/heads.npz")
    assert file_of(tmp_path).parent.name == file_of(tmp_path / "heads.npz").parent.name == "replacing-01234567"
    for path in (tmp_path, tmp_path / "heads.npz"):
        assert len(attnscope.load_record(path)["heads"]) == len(Heads.load(path)["heads"]) == 12
    shown = {run("show", path, "--json").out for path in (tmp_path, tmp_path / "heads.npz")}
    assert len(shown) == 1 and len(json.loads(shown.pop())["heads"]) == 12
    assert {path.name for path in tmp_path.iterdir()} == {"heads.npz", "replacing-01234567"}, "readers move nothing"


def plant(target: Path) -> dict[str, str]:
    """Puts into a folder what a stranger may have put there; returns the files of its owner."""
    mine = {"notes.txt": "mine", "thesis.pdf": "mine", "photo.png": "mine", "heads/1.js": "mine"}
    planted = target / "replacing-aaaaaaaa"
    for folder, content in ((target, "mine"), (planted, "theirs")):
        for name in mine:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(content)
    (planted / ".obsolete").write_text(json.dumps([*mine, "../outside.txt"]))
    (planted / "heads.csv").symlink_to(target / "notes.txt")
    (target.parent / "outside.txt").write_text("mine")
    os.mkfifo(planted / "heads.npz")
    return mine | {"../outside.txt": "mine"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no pipes with names")
@pytest.mark.parametrize("fails", [False, True])
def test_a_planted_set_is_no_order(tmp_path: Path, run: Run, fails: bool) -> None:
    """A run into a folder that a stranger prepared deletes and overwrites nothing of its owner, and waits for nothing.

    Where the run fails it does not touch the folder.
    """
    target = tmp_path / "out"
    mine = plant(target)
    before = {path: path.lstat().st_mtime_ns for path in target.rglob("*")}
    model = "./no-model" if fails else "own"
    status = run("heads", "the cat and the dog", "-m", model, "-o", target, "-f", "npz,csv,json").status
    assert (status != 0) is fails
    assert {name: (target / name).read_text() for name in mine} == mine
    assert attnscope.load_record(target / "heads.npz")["heads"] if not fails else not (target / "heads.npz").exists()
    if fails:
        assert {path: path.lstat().st_mtime_ns for path in target.rglob("*")} == before


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="has no pipes with names")
def test_a_pipe_in_the_place_of_a_set_s_files_is_not_waited_for(target: Path) -> None:
    shutil.rmtree(target)
    target.mkdir()
    os.mkfifo(target / "replacing-aaaaaaaa")
    (target / "replacing-bbbbbbbb").mkdir()
    for name in (".obsolete", "a.npz"):
        os.mkfifo(target / "replacing-bbbbbbbb" / name)
    write_set(target, "new", NEW)
    assert {name: (target / name).read_text() for name in NEW} == dict.fromkeys(NEW, "new")
    with pytest.raises(AttnscopeError, match=r"cannot write .*a\.npz: it is a pipe"):
        (target / "a.npz").unlink()
        os.mkfifo(target / "a.npz")
        write_set(target, "new", NEW)


def test_a_figure_replaces_figures_of_ours_alone(tmp_path: Path) -> None:
    """The rest of a killed run's figures moves to their names, but to no name of a file that we did not draw."""
    own = OwnFiles(has_figures=True)
    drawn = [path.read_bytes() for path in simple(4).draw(tmp_path / "drawn", ["png", "svg", "pdf"])[:3]]
    later = [path.read_bytes() for path in simple(5).draw(tmp_path / "later", ["png", "svg", "pdf"])[:3]]
    target, unmoved = tmp_path / "out", tmp_path / "out/replacing-01234567"
    unmoved.mkdir(parents=True)
    for ending, old, new in zip(("png", "svg", "pdf"), drawn, later, strict=True):
        (target / f"ours.{ending}").write_bytes(old)
        (target / f"mine.{ending}").write_bytes(b"a year of work")
        for stem in ("ours", "mine", "new"):
            (unmoved / f"{stem}.{ending}").write_bytes(new)
    write_set(target, "new", (), own)
    for ending, new in zip(("png", "svg", "pdf"), later, strict=True):
        assert (target / f"ours.{ending}").read_bytes() == (target / f"new.{ending}").read_bytes() == new
        assert (target / f"mine.{ending}").read_bytes() == b"a year of work"


def test_what_is_no_file_is_not_replaced(target: Path) -> None:
    (target / "d.csv").mkdir()
    with pytest.raises(AttnscopeError, match=r"cannot write .*out/d\.csv: it is a folder, not a file"):
        write_set(target, "new", NEW)
    assert contents(target) == EARLIER


@pytest.mark.parametrize(
    "command", [("heatmap", "a cat"), ("ablate", "a cat", "--pick", "L0H0"), ("batch", "texts.txt")]
)
def test_an_empty_name_is_not_the_working_folder(command: tuple[str, ...], run: Run) -> None:
    Path("texts.txt").write_text("a cat\n")
    before = {*Path.cwd().iterdir()}
    for empty in (("-o", ""), ("--out=",)):
        status, out, err = run(*command, "-m", "own", *empty)
        assert (status, out) == (2, "") and "--out is empty" in err
    assert {*Path.cwd().iterdir()} == before


def test_an_interrupted_drawing_leaves_the_earlier_set_and_keeps_the_new_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> list[Path]:
        raise KeyboardInterrupt

    formats = ("npz", "csv", "png")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Result, "draw", interrupted)
        output.write(fake_findings(2, 3), tmp_path / "out", formats)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"heads.npz", "heads.csv"}
    output.write(fake_findings(2, 3), tmp_path / "out", formats)
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    capsys.readouterr()
    monkeypatch.setattr(Result, "draw", interrupted)
    with pytest.raises(KeyboardInterrupt):
        output.write(fake_findings(3, 4), tmp_path / "out", formats)
    assert {path: path.read_bytes() for path in before} == before
    assert len(attnscope.load_record(tmp_path / "out/interrupted")["heads"]) == 12
    assert "not all figures were drawn, so none is kept: the data are in" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*(p.name for p in before), "interrupted"}


@pytest.mark.parametrize(
    "command",
    [
        ("atlas", "a cat"),
        ("training", "own", "own", "--file", "texts.txt"),
        ("heatmap", "a cat"),
        ("ablate", "a cat", "--pick", "L0H0"),
        ("show", "heatmap.npz"),
        ("batch", "texts.txt"),
    ],
)
def test_no_folder_is_named_as_stdout_is(command: tuple[str, ...], run: Run, tmp_path: Path) -> None:
    simple(5).save(tmp_path / "heatmap.npz")
    (tmp_path / "texts.txt").write_text("a cat\n")
    model = [] if command[0] in ("show", "training") else ["-m", "own"]
    status, out, err = run(*command, *model, "-o", "-")
    assert (status, out) == (2, "") and "- is stdout, which takes no files" in err, err
    assert not (tmp_path / "-").exists()
