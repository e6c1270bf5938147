"""Every kind of record with every format and option: what it has is written and read, what it has not is refused."""

from inspect import signature
from itertools import product
from pathlib import Path

import matplotlib as mpl
import pytest

from attnscope.results.kinds import FIGURE_FORMATS, KINDS, LOSSLESS, kind_of_schema
from attnscope.results.result import load_record as load
from tests.made_records import EVERY, MADE
from tests.processes import modules_after
from tests.record_helpers import require_lossless

FILES = {
    "heads": "heads.npz",
    "compare": "compare.npz",
    "relations": "relations.npz",
    "ablate": "ablation.npz",
    "trace": "trace.npz",
    "split": "split.npz",
    "cost": "cost.npz",
    "rollout": "rollout.npz",
    "heatmap": "heatmap.npz",
    "pooled": "pooled.npz",
    "atlas": "atlas.npz",
    "weights": "weights.npz",
    "training": "training.npz",
    "why": "why.npz",
    "shares": "shares.npz",
    "patch": "patching.npz",
}
FORMATS = ("npz", "json", "csv", "py", "text", *FIGURE_FORMATS, "nonsense")
OPTIONS = {
    "query": ("the", "nowhere"),
    "pick": ("L0H0", "L9H9"),
    "scale": ("head", "zz"),
    "cmap": ("Greys", "zz"),
    "measures": ("entropy_nats", "nonsense"),
}
"""An option: a value that records here have, and one that none has."""


def kind_of(name):
    return KINDS[name]


def test_every_kind_has_a_record_here_and_what_its_entry_names_is_there(made):
    assert {*FILES} == {*KINDS}
    for name, file in FILES.items():
        kind = kind_of(name)
        record = load(made / file)
        assert isinstance(record, kind.resolve("result"))
        assert record.record_kind() is kind is kind_of_schema(record.SCHEMA)
        for which in ("show", "draw", "notebook_image", "query", "page"):
            assert not getattr(kind, which) or callable(kind.resolve(which))
        parameters = signature(kind.resolve("show")).parameters
        if "result" in parameters:  # of a result, its report takes the options
            parameters = {**parameters, **signature(record.report).parameters}
        assert {*kind.shown_with} <= {*parameters}
        parameters = signature(kind.resolve("draw")).parameters if kind.draw else {}
        if "options" in parameters:
            parameters = {**parameters, **signature(record.report).parameters}
        assert {*kind.drawn_with} <= {*parameters}
        assert {*kind.usual_formats} <= {*kind.formats}
        assert LOSSLESS in kind.data_formats


@pytest.mark.parametrize("name", EVERY)
def test_a_record_comes_back_without_loss_from_every_format_that_it_loads_from(name, made, tmp_path):
    require_lossless(load(made / name), tmp_path)


def asked():
    """A kind and what is asked of it at once: its figures together, as they share their layout, all else alone."""
    for name in FILES:
        figures = [wanted for wanted in FIGURE_FORMATS if wanted in kind_of(name).formats]
        yield from (
            (name, wanted)
            for wanted in [*FORMATS, ",".join(figures)]
            if wanted and wanted not in figures
        )


@pytest.mark.parametrize(("name", "wanted"), [*asked()])
def test_show_writes_every_format_that_a_kind_has_and_refuses_all_others(
    name, wanted, made, run, tmp_path
):
    kind = kind_of(name)
    formats = wanted.split(",")
    # One page of a measure is as all others are.
    how = {"measures": "entropy_nats"} if name == "heads" and {*formats} <= {*FIGURE_FORMATS} else {}
    named = [part for option, value in how.items() for part in (f"--{option}", value)]
    status, out, err = run("show", made / FILES[name], "-f", wanted, "-o", tmp_path / "out", *named)
    if not {*formats} <= {*kind.formats} or wanted == "py":
        assert status == 2
        assert out == ""
        assert err.startswith("error: ")
        assert not (tmp_path / "out").exists()
        told = run("show", made / FILES[name], "-f", wanted)
        assert told[0] == (0 if wanted == "text" else 2)
        return
    assert status == 0, err
    assert err.count("error") == 0
    paths = [Path(line) for line in out.splitlines() if line.startswith(str(tmp_path))]
    assert paths
    assert sorted(paths) == sorted(path for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert {path.suffix for path in paths} == {f".{name}" for name in formats}
    assert all(path.stat().st_size for path in paths)
    assert run("show", made / FILES[name], "-f", wanted)[0] == 2, (
        "without a folder there is nothing to write"
    )
    if formats[0] in FIGURE_FORMATS:  # the same bytes whatever matplotlib is told
        again = formats if name == "cost" else ["svg"]
        with mpl.rc_context(
            {"font.size": 30, "text.color": "red", "axes.facecolor": "green", "svg.hashsalt": None}
        ):
            drawn = load(made / FILES[name]).draw(tmp_path / "again", again, **how)
        same = [path for path in paths if path.suffix[1:] in again]
        assert {path.name: path.read_bytes() for path in drawn} == {
            path.name: path.read_bytes() for path in same
        }


@pytest.mark.parametrize("name", [name for name in MADE if name not in ("heatmap.npz", "pooled.npz")])
def test_show_prints_what_the_command_printed(name, made, run):
    printed = [
        line
        for line in (made / f"{name}.txt").read_text("utf-8").splitlines()
        if f"{name}.out/" not in line
    ]
    status, out, err = run("show", made / name)
    assert status == 0, err
    assert out.splitlines() == printed


@pytest.mark.parametrize(("name", "option"), [*product(FILES, OPTIONS)])
def test_show_knows_the_options_of_a_kind_and_refuses_all_others(name, option, made, run, tmp_path):
    right, wrong = OPTIONS[option]
    known = option in kind_of(name).options
    status, out, err = run("show", made / FILES[name], f"--{option}", right, "-q")
    assert status == (0 if known else 2), err
    assert bool(out) is known
    if known:
        assert run("show", made / FILES[name], f"--{option}", wrong, "-q")[0] in (1, 2)
    else:
        assert f"--{option}" in err
        status, _, _ = run("show", made / FILES[name], f"--{option}", right, "-o", tmp_path / "out")
        assert (status, (tmp_path / "out").exists()) == (2, False)


def test_saved_records_are_shown_and_drawn_without_a_model_library(made, tmp_path):
    shown = [["show", made / file] for file in FILES.values()]
    page = ["page", "--record", made / FILES["heatmap"], "-o", tmp_path / "page.html"]
    _, loaded = modules_after(*shown, ["show", made / FILES["heatmap"], "--query", "the"], page)
    assert not {"torch", "transformers", "matplotlib"} & loaded
    shown[0] += ["--measures", "entropy_nats"]  # one page of a measure is as all others are
    _, loaded = modules_after(*([*line, "-o", tmp_path / line[1].stem] for line in shown))
    assert not {"torch", "transformers"} & loaded
    assert all(any((tmp_path / file.split(".")[0]).iterdir()) for file in FILES.values())
