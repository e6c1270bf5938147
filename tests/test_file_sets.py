"""Files that belong together: all new or all earlier, whenever a run is stopped; whatever else is there stays."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import attnscope
from attnscope import output
from attnscope.errors import AttnscopeError
from attnscope.records import file_of
from attnscope.records.frame.file_sets import find_unmoved, finish_replacing, replace_together, require_writable
from tests.conftest import Run
from tests.findings_helpers import fake_findings
from tests.record_helpers import simple


def write_set(target: Path, content: str, names: tuple[str, ...], earlier: tuple[str, ...] = ()) -> None:
    with replace_together(target, earlier) as staged:
        for name in names:
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            (staged / name).write_text(content)


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


EARLIER = {"a.npz": "old", "b.png": "old", "heads/1.js": "old", "heads/2.js": "old", "notes.txt": "mine"}
NEW = {"a.npz": "new", "b.png": "new", "heads/1.js": "new", "notes.txt": "mine"}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    write_set(tmp_path / "out", "old", ("a.npz", "b.png", "heads/1.js", "heads/2.js"))
    (tmp_path / "out/notes.txt").write_text("mine")
    return tmp_path / "out"


def test_a_set_replaces_its_own_files_alone(target: Path) -> None:
    write_set(target, "new", ("a.npz", "b.png", "heads/1.js"), ("heads/1.js", "heads/2.js"))
    assert contents(target) == NEW


@pytest.mark.parametrize("raised", [KeyboardInterrupt, AttnscopeError, ValueError])
def test_a_set_that_is_not_finished_changes_nothing(raised: type[BaseException], target: Path) -> None:
    for folder in (target, target / "new/folder"):
        with pytest.raises(raised), replace_together(folder, ("heads/2.js",)) as staged:
            (staged / "a.npz").write_text("new")
            raise raised("x")
    assert contents(target) == EARLIER and not (target / "new").exists()


_KILLED = """
import os, sys
from pathlib import Path
from attnscope.records.frame import file_sets
def counting(method):
    def step(*given, **named):
        global left
        if left == 0:
            os.kill(os.getpid(), 9)
        left -= 1
        return method(*given, **named)
    return step
for name in ("mkdir", "write_text", "rename", "replace", "unlink"):
    setattr(Path, name, counting(getattr(Path, name)))
file_sets.shutil.rmtree = counting(file_sets.shutil.rmtree)
for number, target in enumerate(sys.argv[1:]):
    left = number
    if child := os.fork():
        print(os.WTERMSIG(os.waitpid(child, 0)[1]))
        continue
    with file_sets.replace_together(Path(target), ("heads/1.js", "heads/2.js")) as staged:
        for name in ("a.npz", "b.png", "heads/1.js"):
            (staged / name).parent.mkdir(exist_ok=True)
            (staged / name).write_text("new")
    os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="has no fork")
def test_a_run_that_is_killed_at_any_step_leaves_the_earlier_set_or_the_new_one(target: Path) -> None:
    targets = [Path(shutil.copytree(target, target.parent / f"out{steps}")) for steps in range(30)]
    how = {"capture_output": True, "text": True, "timeout": 100, "check": True}
    signals = subprocess.run([sys.executable, "-c", _KILLED, *targets], **how).stdout.split()  # type: ignore[call-overload]
    assert signals == sorted(signals, reverse=True) and set(signals) == {"9", "0"}
    n_between = 0
    for place in targets:
        held = [contents(path) for path in find_unmoved(place)]
        seen = {name: text for name, text in contents(place).items() if "unfinished-" not in name}
        if held:  # the rest of the new set is read where it is
            moved = {name: text for name, text in seen.items() if "replacing-" not in name}
            shown = {**moved, **held[0]}
            assert {name: shown[name] for name in NEW} == NEW
            n_between += moved not in (EARLIER, NEW)
        else:
            assert seen in (EARLIER, NEW)
        finish_replacing(place)
        after = {name: text for name, text in contents(place).items() if "unfinished-" not in name}
        assert after == (NEW if held else seen)
    assert n_between > 2


def test_a_killed_run_s_record_is_read_before_it_has_moved(tmp_path: Path) -> None:
    fake_findings(2, 3).save(tmp_path / "heads.npz")
    fake_findings(3, 4).save(tmp_path / "replacing-01234567/heads.npz")
    assert file_of(tmp_path).parent.name == "replacing-01234567"
    assert len(attnscope.load_record(tmp_path).heads) == 12
    require_writable(tmp_path)  # as every command that writes does first
    assert len(attnscope.load_record(tmp_path / "heads.npz").heads) == 12
    assert [path.name for path in tmp_path.iterdir()] == ["heads.npz"]


def test_what_leads_out_of_the_folder_is_neither_written_nor_removed(target: Path, tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/1.js").write_text("mine")
    (target / "linked").symlink_to(tmp_path / "foreign")
    with pytest.raises(AttnscopeError, match="it leads out of"):
        write_set(target, "new", ("linked/1.js",))
    with pytest.raises(AttnscopeError, match=r"cannot write .*out/heads: it is a folder, not a file"):
        write_set(target, "new", ("a.npz", "heads"))
    write_set(target, "new", ("a.npz",), ("../foreign/1.js", "linked/1.js", str(tmp_path / "foreign/1.js")))
    assert (tmp_path / "foreign/1.js").read_text() == "mine"
    assert {name: text for name, text in contents(target).items() if "linked" not in name} == {
        **EARLIER,
        "a.npz": "new",
    }


def test_an_interrupted_drawing_leaves_the_earlier_set_and_keeps_the_new_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> list[Path]:
        raise KeyboardInterrupt

    formats = ("npz", "csv", "png")
    with pytest.raises(KeyboardInterrupt):
        output.write(fake_findings(2, 3), tmp_path / "out", formats, drawing=interrupted)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"heads.npz", "heads.csv"}
    output.write(fake_findings(2, 3), tmp_path / "out", formats)
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    capsys.readouterr()
    with pytest.raises(KeyboardInterrupt):
        output.write(fake_findings(3, 4), tmp_path / "out", formats, drawing=interrupted)
    assert {path: path.read_bytes() for path in before} == before
    assert len(attnscope.load_record(tmp_path / "out/interrupted").heads) == 12
    assert "not all figures were drawn, so none is kept: the data are in" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*(p.name for p in before), "interrupted"}


@pytest.mark.parametrize("command", [
    ("atlas", "a cat"), ("timeline", "own", "own", "--file", "texts.txt"), ("heatmap", "a cat"),
    ("prune", "--pick", "L0H0"), ("show", "weights.npz"), ("batch", "texts.txt"),
])  # fmt: skip
def test_no_folder_is_named_as_stdout_is(command: tuple[str, ...], run: Run, tmp_path: Path) -> None:
    simple(5).save(tmp_path / "weights.npz")
    (tmp_path / "texts.txt").write_text("a cat\n")
    model = [] if command[0] in ("show", "timeline") else ["-m", "own"]
    status, out, err = run(*command, *model, "-o", "-")
    assert (status, out) == (2, "") and "- is stdout, which takes no files" in err, err
    assert not (tmp_path / "-").exists()
