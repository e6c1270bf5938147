"""Batches: the same files whoever draws them, nothing drawn twice, and nothing lost whatever happens."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnscope import BatchOptions, Corpus, batch
from attnscope.choice import Choice, TokenOptions
from attnscope.drawing.style import Style
from attnscope.errors import AttnscopeError
from attnscope.output import write_files
from attnscope.pages.gallery import build_gallery
from attnscope.questions.batch import BatchRun, DrawnText, FailedText
from attnscope.studies.batch import study
from attnscope.studies.batch.study import folder_name
from attnscope.studies.inputs.options import LoadOptions, WorkerOptions
from attnscope.studies.inputs.reading import Prompt
from attnscope.studies.maps import study as heatmap_study
from attnscope.studies.maps.options import MapOptions
from attnscope.studies.workers import Workers
from tests.conftest import VOCABULARY, write_tokenizer
from tests.pretend_workers import Here
from tests.processes import LIMIT_S, started

TEXTS = [
    "the cat sat on the mat",
    "<script>alert(1)</script> & ../..",
    "CON",
    "1, 2, 1, 2, 1",
    "a b c a b",
]
FIRST = Choice(layers=(0,))
HOW = BatchOptions(
    choice=FIRST,
    tokens=TokenOptions(query="cat"),
    formats=("png", "svg", "pdf", "npz", "json"),
    running=WorkerOptions(workers=2),
)
PLAIN = BatchOptions(choice=FIRST, running=WorkerOptions(workers=1))


def files(folder):
    """All files below a folder."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in sorted(found.items())}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "texts.txt"
    path.write_text("\n".join(TEXTS) + "\n", "utf-8")
    return path


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("batch") / "out"
    result = batch("own", Corpus([corpus]), out, HOW)
    assert result.complete
    assert result.n_fresh == result.n_texts == len(TEXTS)
    assert not result.failed
    return out


@pytest.fixture
def copied(undisturbed, tmp_path):
    return Path(shutil.copytree(undisturbed, tmp_path / "out"))


@pytest.fixture
def nobody(monkeypatch):
    monkeypatch.setattr("attnscope.studies.workers.ProcessPoolExecutor", None)


def test_every_text_has_the_files_that_heatmap_writes(undisturbed, tmp_path):
    lines = [
        json.loads(line) for line in (undisturbed / "manifest.jsonl").read_text("utf-8").splitlines()
    ]
    assert [line["text"] for line in lines] == TEXTS
    assert [line["line"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[0]["model"] == "own"
    assert lines[0]["run"]["sha256"]
    assert "cat" in lines[0]["tokens"]
    assert lines[1]["notes"][-1] == "no token is 'cat' here"
    for line in lines:
        for name, size in line["files"].items():
            assert (undisturbed / name).stat().st_size == size
    record = heatmap_study.study(
        "own", Prompt(TEXTS[0]), MapOptions(choice=Choice(layers=(0,)), query="cat"), LoadOptions()
    )
    paths = write_files(record, tmp_path / "alone", HOW.formats, {"query": "cat"})
    assert {path.name for path in paths} == {Path(name).name for name in lines[0]["files"]}
    for path in paths:
        assert path.read_bytes() == (undisturbed / folder_name(0, TEXTS[0]) / path.name).read_bytes(), (
            path.name
        )


@pytest.mark.parametrize("name", ["index.html", "manifest.jsonl"])
def test_a_file_of_the_users_own_stays(name, corpus, tmp_path):
    (tmp_path / name).write_text("<html>mine")
    with pytest.raises(AttnscopeError, match="attnscope did not write it"):
        batch("own", Corpus([corpus]), tmp_path, HOW)
    assert files(tmp_path) == {name: b"<html>mine"}


def test_the_number_of_workers_changes_no_byte(corpus, undisturbed, tmp_path, worker_here):
    seen = []
    one = replace(HOW, running=WorkerOptions(workers=1))
    batch(
        "own",
        Corpus([corpus]),
        tmp_path / "one",
        one,
        lambda done: seen.append((done.n_texts, done.share)),
    )
    assert files(tmp_path / "one") == files(undisturbed)
    assert [n for n, _ in seen] == [1, 2, 3, 4, 5]
    assert seen[-1][1] == 1


def test_what_is_done_is_not_drawn_again(corpus, undisturbed, copied, nobody):
    before = {path: path.stat().st_mtime_ns for path in copied.rglob("*.png")}
    assert (
        batch(
            "own", Corpus([corpus]), copied, replace(HOW, running=WorkerOptions(workers=7, threads=2))
        ).n_fresh
        == 0
    )
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert files(copied) == files(undisturbed)


def test_what_is_missing_cut_off_or_stale_is_drawn_again(corpus, undisturbed, copied, worker_here):
    first, second, third = (copied / folder_name(i, TEXTS[i]) for i in range(3))
    # Missing in the first, cut off in the second, of other options in the third.
    (first / "query-001.png").unlink(missing_ok=True)
    (first / "L00.png").unlink()
    (second / "L00.svg").write_bytes((second / "L00.svg").read_bytes()[:-1])
    entry = (third / "entry.json").read_text().replace('"fingerprint": "', '"fingerprint": "0')
    (third / "entry.json").write_text(entry)
    # What a killed run leaves, and files of the user's own.
    (third / "unfinished-01234567").mkdir()
    (third / "unfinished-01234567/L00.png").write_bytes((third / "L00.png").read_bytes())
    (third / "unfinished-01234567/.0123456789abcdef.part").write_text("half a fi")
    (third / "mine.txt").write_text("kept")
    (third / "L07.png").write_text("kept")
    kept = (copied / folder_name(3, TEXTS[3]) / "L00.png").stat().st_mtime_ns
    assert batch("own", Corpus([corpus]), copied, HOW).n_fresh == 3
    for mine in ("mine.txt", "L07.png"):
        assert (third / mine).read_text() == "kept"
        (third / mine).unlink()
    assert files(copied) == files(undisturbed)
    assert (copied / folder_name(3, TEXTS[3]) / "L00.png").stat().st_mtime_ns == kept


def test_other_options_or_another_model_are_drawn_anew(tmp_path, tiny_bert):
    source = study.models.resolve(str(tiny_bert))
    base = study._hash_all_but_the_text(source, HOW)
    assert (
        study._hash_all_but_the_text(source, replace(HOW, running=WorkerOptions(workers=1, threads=3)))
        == base
    )
    for change in (
        {"choice": Choice(layers=(1,))},
        {"formats": ("png",)},
        {"tokens": TokenOptions(words=True)},
        {"style": Style("head")},
        {"generate": 1},
        {"chat": True},
        {"loading": LoadOptions(dtype="float64")},
    ):
        assert study._hash_all_but_the_text(source, replace(HOW, **change)) != base, change
    write_tokenizer(tiny_bert, [*VOCABULARY, "more"])
    assert study._hash_all_but_the_text(source, HOW) != base


def test_figures_of_other_options_give_way(corpus, tmp_path, worker_here):
    batch("own", Corpus([corpus]), tmp_path, replace(PLAIN, choice=Choice(pick=((0, 1),))))
    assert batch("own", Corpus([corpus]), tmp_path, PLAIN).n_fresh == len(TEXTS)
    assert not list(tmp_path.rglob("L00H01.png"))
    assert len(list(tmp_path.rglob("L00.png"))) == len(TEXTS)
    assert batch("own", Corpus([corpus]), tmp_path, PLAIN).n_fresh == 0


def test_a_text_that_fails_is_listed_and_the_others_are_drawn(run, tmp_path, tiny_bert, worker_here):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "a b"}\n{"text": "a\\u0000b"}\n{"text": 3}\n{"text": "b"}\n')
    status, out, err = run(
        "batch", path, "-o", "out", "-L", "0", "-m", tiny_bert, "--workers", "1", "--json"
    )
    assert status == 1
    told = json.loads(out)
    assert told["schema"] == "attnscope.batch/1"
    assert told["complete"]
    assert [text["line"] for text in told["texts"]] == [1, 4]
    assert [failure["line"] for failure in told["failed"]] == [2, 3]
    assert re.search(r"^failed: .*texts\.jsonl, line 2: ", err, re.MULTILINE)
    assert err.splitlines()[-2] == "error: 2 texts could not be read or drawn"
    assert not (tmp_path / "out" / folder_name(1, "a\0b")).exists()
    assert "line 3" in (tmp_path / "out" / "index.html").read_text()


def test_what_no_text_can_be_drawn_with_is_said_at_once(tmp_path, worker_here):
    with pytest.raises(AttnscopeError, match="there is no layer 99"):
        batch("own", ["a"], tmp_path / "new", replace(PLAIN, choice=Choice(layers=(99,))))
    assert not (tmp_path / "new").exists()
    with pytest.raises(AttnscopeError, match="there is no text"):
        batch("own", [], tmp_path / "new", PLAIN)
    with pytest.raises(AttnscopeError, match="--workers is 0"):
        batch("own", ["a"], tmp_path / "new", replace(PLAIN, running=WorkerOptions(workers=0)))


def command(*arguments):
    return [sys.executable, "-m", "attnscope", "batch", *map(str, arguments)]


def of_workers(corpus, out, n=1):
    """A run of its own; its processes hold its stderr, so that this ends when the last of them ends."""
    call = command(corpus, "-o", out, "-m", "own", "-L", "0", "--workers", n)
    return started(call, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def after_first_text(run, out):
    while not list(out.glob("*/entry.json")):
        try:
            run.wait(0.01)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(f"it ended: {run.communicate(timeout=LIMIT_S)[1].decode()}")


@pytest.fixture(scope="module")
def expected(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("expected")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workers, "executor_on", lambda *_: Here())
        batch("own", Corpus([corpus]), out, PLAIN)
    return files(out)


def require_finished_by_one_more_run(corpus, out, expected):
    whole = {name: content for name, content in files(out).items() if "unfinished-" not in name}
    for name, content in whole.items():
        assert name in ("index.html", "manifest.jsonl") or content == expected[name], name
    assert batch("own", Corpus([corpus]), out, PLAIN).complete
    assert files(out) == expected


def test_ctrl_c_before_the_first_text_leaves_an_earlier_list(corpus, copied, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Workers, "executor_on", lambda *_: Here(lost=interrupted))
    earlier = files(copied)
    assert not batch("own", Corpus([corpus]), copied, replace(HOW, style=Style(dpi=50))).complete
    assert files(copied) == earlier


def test_ctrl_c_leaves_whole_files_and_the_same_command_goes_on(corpus, tmp_path, expected, worker_here):
    with of_workers(corpus, tmp_path) as run:
        after_first_text(run, tmp_path)
        os.kill(run.pid, signal.SIGINT)
        said = run.communicate(timeout=LIMIT_S)[1].decode()
    if run.returncode != 0:  # else it was done already
        assert run.returncode == 130, said
        assert "Traceback" not in said
        told = re.search(r"note: (\d) texts? drawn; the same command goes on", said)
        assert told, said
        if told[1] != "0":  # the first text may be in its place and not yet counted
            assert "the same command draws the rest" in (tmp_path / "index.html").read_text()
    assert not any(name.endswith(".part") for name in files(tmp_path))
    require_finished_by_one_more_run(corpus, tmp_path, expected)


def test_workers_end_with_a_run_that_is_killed(corpus, tmp_path, expected, worker_here):
    with of_workers(corpus, tmp_path) as run:
        after_first_text(run, tmp_path)
        run.kill()
        run.communicate(timeout=LIMIT_S)  # until none of its processes holds its stderr any more
    assert not any(name.endswith(".part") for name in files(tmp_path))
    require_finished_by_one_more_run(corpus, tmp_path, expected)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_killed_at_any_moment(seed, corpus, tmp_path, expected):
    """At even seeds the first process is killed, at odd ones all of them at once."""
    with of_workers(corpus, tmp_path / "out", 2) as run:
        try:
            run.wait(random.Random(seed).uniform(0, 8))
        except subprocess.TimeoutExpired:
            if seed % 2:
                os.killpg(run.pid, signal.SIGKILL)
            else:
                run.kill()
            run.communicate(timeout=LIMIT_S)  # until no process holds its stderr any more
        require_finished_by_one_more_run(corpus, tmp_path / "out", expected)


# Names and the page ---------------------------------------------------------------------------------------------


@given(st.integers(0, 10**7), st.text(max_size=300))
def test_a_text_never_names_a_path(index, text):
    assert re.fullmatch(rf"{index:05d}-[a-z0-9-]{{1,40}}", folder_name(index, text))


def test_a_text_that_fails_leaves_what_was_there(corpus, copied, worker_here, monkeypatch):
    before = files(copied)
    (copied / folder_name(0, TEXTS[0]) / "mine.png").write_text("mine")

    def fail(*_):
        raise AttnscopeError("it is full")

    monkeypatch.setattr(study._Drawer, "_draw", fail)
    other = replace(HOW, generate=0, tokens=TokenOptions(query="mat"))
    assert len(batch("own", Corpus([corpus]), copied, other).failed) == 5
    after = files(copied)
    assert after.pop(f"{folder_name(0, TEXTS[0])}/mine.png") == b"mine"
    for name, content in before.items():
        if "/" in name:
            assert after[name] == content


class Seen(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, html):
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert not any(name.startswith("on") for name, _ in attrs)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]

    def handle_data(self, data):
        self.text += data


HOSTILE = "</p><script>alert('1')</script><img src=x onerror=alert(2)> \"&amp; \u202eesrever\x1b[31m\x00"


def test_hostile_text_shows_as_itself():
    files = {"L00.png": 3, "heatmap.npz": 4}
    drawn = DrawnText(0, HOSTILE, 1, "00000-p", HOSTILE, (HOSTILE,), files, HOSTILE, {}, (HOSTILE,), "0")
    html = build_gallery(BatchRun(HOSTILE, 2, (drawn,), (FailedText(HOSTILE, 2, HOSTILE, 1, HOSTILE),)))
    assert "http-equiv=Content-Security-Policy content=\"default-src 'none'; style-src 'sha256-" in html
    seen = Seen(html)
    assert "script" not in seen.tags
    assert seen.tags.count("img") == 1
    assert set(seen.links) == {"manifest.jsonl", "00000-p/L00.png", "00000-p/heatmap.npz"}
    shown = HOSTILE.replace("\u202e", "<U+202E>").replace("\x1b", "<U+001B>").replace("\0", "<U+0000>")
    # title, heading, source, text, note; of the failed: source, reason, text.
    assert seen.text.count(shown) == 8
