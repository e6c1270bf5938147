"""The command line as its users meet it: what it prints where, what it leaves behind, and how it fails."""

import dataclasses
import errno
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import typer

from attnscope import cli, models
from attnscope.models import catalog
from attnscope.models.catalog import Source
from attnscope.models.devices import dtype_of
from attnscope.models.model import Model
from attnscope.records import load
from attnscope.studies import heatmap_order
from attnscope.views import style
from tests.processes import LIMIT_S, modules_after, started
from tests.record_helpers import simple

TIRED = "The animal didn't cross the street because it was too tired."
WIDE = "The animal didn't cross the street because it was too wide."


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own to stand in, and a plain terminal."""
    monkeypatch.chdir(tmp_path)
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "ATTNSCOPE_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MPLBACKEND", "Agg")  # so that it is put back, as main() sets it
    yield tmp_path


_held: dict[object, Model] = {}


@pytest.fixture(autouse=True)
def loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading the same model a hundred times tests nothing more."""
    real = models.load

    def held(source: Source, **how: object) -> Model:
        name = (source, *how.items())
        if name not in _held:
            _held[name] = real(source, **how)  # type: ignore[arg-type]
        return _held[name]

    monkeypatch.setattr(models, "load", held)


@pytest.fixture
def attnscope(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in this process."""

    def run(*arguments: str | Path) -> Result:
        monkeypatch.setattr(sys, "argv", ["attnscope", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        return Result(int(ended.value.code or 0), out, err)

    return run


def process(*arguments: str | Path, **how: object) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own, with further environment variables in `env` (None = unset)."""
    environment = dict(os.environ)
    for name, value in (how.pop("env", None) or {}).items():  # type: ignore[attr-defined]
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    command = [sys.executable, "-m", "attnscope", *map(str, arguments)]
    how = {"capture_output": True, "text": True} | how
    return subprocess.run(command, env=environment, timeout=100, **how)  # type: ignore[call-overload, no-any-return]


def require_one_line(result: Result | subprocess.CompletedProcess[str], said: str, status: int = 1) -> None:
    """It failed as every failure does: one line why, at most one hint, nothing on stdout."""
    code = result.status if isinstance(result, Result) else result.returncode
    out, err = (result.out, result.err) if isinstance(result, Result) else (result.stdout, result.stderr)
    lines = err.splitlines()
    assert code == status, err
    assert out == ""
    assert lines[0].startswith("error: ") and re.search(said, lines[0]), err
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("hint: ")), err


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# Starting


HEAVY = ("torch", "transformers", "matplotlib", "numpy")


@pytest.mark.parametrize("arguments", [["--help"], ["heatmap", "--help"], ["--version"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    _, loaded = modules_after(arguments, HEAVY)
    assert loaded == []


def test_showing_a_saved_record_loads_no_model_library(tmp_path: Path) -> None:
    path = simple(5).save(tmp_path / "weights.npz")
    result, loaded = modules_after(["show", path, "--query", "t1"], HEAVY[:3])
    assert loaded == []
    assert "what “t1” (token 1) attends to" in result.stdout


def test_help_and_version_are_on_stdout(attnscope: Run) -> None:
    import attnscope as package

    assert attnscope("--version") == Result(0, f"attnscope {package.__version__}\n", "")
    for arguments in (["--help"], ["-h"], ["heatmap", "-h"], ["show", "--help"], ["models", "-h"], ["info", "-h"]):
        result = attnscope(*arguments)
        assert (result.status, result.err) == (0, "") and "Usage" in result.out
    result = attnscope()
    assert result.status == 2 and "Usage" in result.out and result.err == ""


def test_options_that_are_named_twice_are_the_same_everywhere() -> None:
    assert {str(dtype_of(name)) for name in models.DTYPES} == {f"torch.{name}" for name in models.DTYPES}
    assert style.SCALES == ("fixed", "head", "figure")  # which the help of --scale names


# What it writes


def test_the_first_command_of_a_new_user(attnscope: Run, tmp_path: Path) -> None:
    result = attnscope("heatmap", TIRED)
    assert (result.status, result.err) == (0, "")
    paths = [Path(line) for line in result.out.splitlines()]
    assert [path.name for path in paths] == [
        "overview.png", *(f"L{layer:02d}.png" for layer in range(6)), "weights.npz",
    ]  # fmt: skip
    (folder,) = {path.parent for path in paths}
    assert re.fullmatch(r"attnscope-out/minilm-the-animal-didnt-cross-the-street-[0-9a-f]{8}", str(folder))
    assert files(tmp_path / folder) == sorted(path.name for path in paths)
    assert attnscope("heatmap", TIRED, "-L", "0", "-f", "npz").out != result.out.splitlines()[0]


def test_the_same_text_model_and_options_have_the_same_folder(attnscope: Run) -> None:
    def folder(*options: str, text: str = "The cat") -> Path:
        return Path(attnscope("heatmap", text, "-f", "npz", *options).out.strip()).parent

    first = folder()
    assert folder() == first
    others = [folder("--words"), folder("--scale", "head"), folder(text="The cat.")]
    assert len({first, *others}) == 4


def test_weights_are_true_on_the_way_to_a_file(attnscope: Run) -> None:
    for text, expected in ((TIRED, 0.68), (WIDE, 0.28)):
        path = attnscope("heatmap", text, "-f", "npz", "--pick", "L3H1").out.strip()
        with np.load(path, allow_pickle=False) as held:
            labels = held["tokens"].tolist()
            place = (0, 0, labels.index("it"), labels.index("animal"))
            assert held["weights"][place] == pytest.approx(expected, abs=0.005)
            described = json.loads(str(held["record"]))
        assert (described["text"], described["model"], described["engine"]) == (text, "minilm", "numpy")


def test_every_format_at_once(attnscope: Run, tmp_path: Path) -> None:
    result = attnscope(
        "heatmap", TIRED, "--pick", "L3H1", "-f", "png,svg,pdf,npz,json,text", "-o", "out", "--query", "it"
    )
    assert (result.status, result.err) == (0, "")
    expected = [f"{stem}.{kind}" for stem in ("L03H01", "query-010") for kind in ("png", "svg", "pdf")]
    expected += ["weights.npz", "record.json"]
    assert result.out.splitlines()[-8:] == [str(Path("out") / name) for name in expected]
    assert files(tmp_path / "out") == sorted(expected)
    assert "it → animal 0.68" in result.out
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    for name in expected[:6]:
        assert (tmp_path / "out" / name).read_bytes().startswith(starts[name[-3:]])
    a, b = load("out/weights.npz"), load("out/record.json")
    np.testing.assert_array_equal(a.weights, b.weights)
    assert a.describe() == b.describe()


def test_json_is_one_document_and_nothing_else(attnscope: Run) -> None:
    result = attnscope("heatmap", "The café 你好 😀", "-L", "0", "-f", "png", "-o", "out", "--json", "--query", "the")
    document = json.loads(result.out)
    assert result.err == "" or result.err.startswith("note: no installed font has ")
    assert document["schema"] == "attnscope.heatmap/1"
    assert document["files"] == ["out/L00.png", "out/query-001.png"]
    assert document["record"]["text"] == "The café 你好 😀"
    assert document["run"]["sha256"].startswith("53aa51172d14")
    assert np.shape(document["weights"])[:2] == (1, 12)


@pytest.mark.parametrize("command", [["models"], ["info"], ["info", "minilm", "--engine", "native"]])
def test_other_commands_have_json_too(attnscope: Run, command: list[str]) -> None:
    result = attnscope(*command, "--json")
    assert json.loads(result.out)["schema"] == f"attnscope.{command[0]}/1"
    assert (result.status, result.err) == (0, "")
    assert "minilm" in attnscope(*command).out


def test_a_text_is_read_from_stdin_or_a_file(attnscope: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_bytes("\ufeffThe cat\r\n".encode())
    literal = attnscope("heatmap", "The cat", "-f", "npz").out
    assert attnscope("heatmap", "--file", "text.txt", "-f", "npz").out == literal
    with (tmp_path / "text.txt").open(encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert attnscope("heatmap", "-", "-f", "npz").out == literal


def test_words_and_hidden_special_tokens(attnscope: Run) -> None:
    result = attnscope(
        "heatmap",
        "Embeddings, it's",
        "--words",
        "--hide-special",
        "--query",
        "it's",
        "-L",
        "0",
        "-o",
        "out",
        "-f",
        "png,npz",
    )
    assert (result.status, result.err) == (0, "")
    record = load("out/weights.npz")
    assert record.tokens == ("Embeddings", ",", "it's")
    assert record.changes == ("hide_special", "words")
    assert result.out.splitlines()[-3:] == [f"out/{name}" for name in ("L00.png", "query-002.png", "weights.npz")]


def test_a_text_that_is_cut_is_said_on_stderr_unless_quiet(attnscope: Run) -> None:
    text = "word " * 600
    result = attnscope("heatmap", text, "--pick", "L0H0", "-f", "npz", "--pooled", "0")
    said = "the text has 602 tokens, the model takes 512: the first 510 of 600 tokens of the text are shown"
    assert result.err.startswith(f"note: {said}") and len(result.err.splitlines()) == 1
    assert said in load(result.out.strip()).run["notes"][-1]
    assert attnscope("heatmap", text, "--pick", "L0H0", "-f", "npz", "-q").err == ""
    assert said in attnscope("show", result.out.strip()).err
    assert attnscope("show", result.out.strip(), "-q").err == ""


def test_show_draws_again_what_was_saved(attnscope: Run, tmp_path: Path) -> None:
    attnscope("heatmap", "The cat sat", "-o", "first", "-f", "png,npz", "-L", "0-1", "-H", "0,5")
    result = attnscope("show", "first/weights.npz", "-o", "second")
    assert result.out.splitlines() == [f"second/{name}.png" for name in ("overview", "L00", "L01")]
    for name in ("overview.png", "L00.png", "L01.png"):
        assert Path("first", name).read_bytes() == Path("second", name).read_bytes()
    assert "layer 1" not in attnscope("show", "first/weights.npz").out  # four heads are drawn large
    assert "L1H5  rows: queries" in attnscope("show", "first/weights.npz").out
    assert json.loads(attnscope("show", "first/weights.npz", "--json").out)["heads"] == [0, 5]
    assert (
        attnscope("show", "first/weights.npz", "--pick", "L1H5", "-o", "third", "-f", "json").out
        == "third/record.json\n"
    )
    require_one_line(attnscope("show", "first/weights.npz", "--pick", "L1H4"), "L1H4 is not in this record")
    require_one_line(attnscope("show", "first/weights.npz", "--query", "dog"), "no token is 'dog'")
    require_one_line(attnscope("show", "first/weights.npz", "-f", "pdf"), "no folder", status=2)


# Wrong usage: 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["heatmap"], "no text is given"),
        (["heatmap", "x", "--file", "y"], "both a text and a file"),
        (["heatmap", "x", "y"], "unexpected extra argument"),
        (["heatmap", "x", "--format", "gif"], "no format 'gif'"),
        (["heatmap", "x", "--format", ","], "no format is given"),
        (["heatmap", "x", "-m", "absent", "--cmap", "beige"], "no colormap 'beige'"),
        (["heatmap", "x", "--scale", "log"], "no scale 'log'"),
        (["heatmap", "x", "-L", "one"], "'one' is not a number"),
        (["heatmap", "x", "-L", "3-1"], "'3-1' is not a range"),
        (["heatmap", "x", "-L", "0-99999999999"], "is not a range"),
        (["heatmap", "x", "-H", ","], "no layer or head"),
        (["heatmap", "x", "-H", "-1"], "'-1' is not a number"),
        (["heatmap", "x", "--pick", "3"], "'3' is not a head"),
        (["heatmap", "x", "--pick", ""], "no head is given"),
        (["heatmap", "x", "--pick", "L0H0", "-L", "0"], "either singly or by layers"),
        (["heatmap", "x", "--engine", "gpu"], "no engine 'gpu'"),
        (["heatmap", "x", "--dtype", "int4"], "no precision 'int4'"),
        (["heatmap", "x", "--generate", "many"], "--generate"),
        (["heatmap", "x", "--nonsense"], "No such option"),
        (["heatmap", "x", "--out"], "requires an argument"),
        (["info", "--engine", "gpu"], "no engine 'gpu'"),
        (["show"], "Missing argument"),
        (["draw"], "No such command"),
    ],
)
def test_wrong_usage_is_one_line_and_2(attnscope: Run, tmp_path: Path, arguments: list[str], said: str) -> None:
    require_one_line(attnscope(*arguments), said, status=2)
    assert files(tmp_path) == []


# Failure: 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["heatmap", ""], "the text is empty"),
        (["heatmap", " \n\t"], "the text is blank"),
        (["heatmap", "a", "--pair", ""], "the second text is empty"),
        (["heatmap", "a", "--pair", "b\udcff"], "the second text is not valid Unicode"),
        (["heatmap", "a\udcff"], "the text is not valid Unicode"),
        (["heatmap", "x", "-L", "6"], "no layer 6: minilm has 6 layers"),
        (["heatmap", "x", "-H", "0-12"], "no head 12: minilm has 12 heads"),
        (["heatmap", "x", "--pick", "L9H0"], "no layer 9"),
        (["heatmap", "x", "--query", "y"], "no token is 'y'"),
        (["heatmap", "x", "--query", ""], "no token is ''"),
        (["heatmap", "x", "--query", "@3"], "no token is '@3'"),
        (["heatmap", "x", "--device", "toaster"], "device 'toaster'"),
        (["heatmap", "--file", "absent.txt"], "cannot read absent.txt"),
        (["heatmap", "--file", "."], "cannot read ."),
        (["heatmap", "x", "-m", "minilmm"], "no model minilmm"),
        (["heatmap", "x", "-m", "./absent"], "no folder"),
        (["heatmap", "x", "-m", ""], "name is empty"),
        (["heatmap", "x", "-m", "a\x1b[31m"], r"a<U\+001B>\[31m"),
        (["show", "absent.npz"], "no file absent.npz"),
        (["show", "."], "the folder . holds no attnscope record"),
    ],
)
def test_failure_is_one_line_and_1_and_leaves_nothing(
    attnscope: Run, tmp_path: Path, arguments: list[str], said: str
) -> None:
    require_one_line(attnscope(*arguments), said)
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\n \n", "is blank"),
        (b"caf\xe9", "not UTF-8: byte 0xE9 at offset 3, line 1"),
        ("x".encode("utf-16"), "is UTF-16"),
        (b"a\0b", "NUL"),
    ],
)
def test_files_that_are_no_text(attnscope: Run, tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    require_one_line(attnscope("heatmap", "--file", "text.txt"), said)
    assert files(tmp_path) == ["text.txt"]


@pytest.mark.parametrize("out", ["a-file", "a-file/inner", "/dev/full", "/proc/attnscope/x"])
@pytest.mark.parametrize("command", ["heatmap", "show"])
def test_places_that_cannot_be_written(attnscope: Run, tmp_path: Path, command: str, out: str) -> None:
    (tmp_path / "a-file").write_text("kept")
    subject = "x"
    if command == "show":
        subject = str(simple(4, layers=1).save(tmp_path / "saved.npz"))
    before = files(tmp_path)
    require_one_line(attnscope(command, subject, "-o", out), "cannot write")
    assert files(tmp_path) == before
    assert (tmp_path / "a-file").read_text() == "kept"


def test_a_disk_that_fills_up_leaves_no_part_of_a_file(
    attnscope: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> Path:
        from attnscope.errors import AttnscopeError

        raise AttnscopeError(f"cannot write {path}: {os.strerror(errno.ENOSPC)}", "make room there")

    monkeypatch.setattr("attnscope.records.record.write_whole", full)
    require_one_line(attnscope("heatmap", "x", "-f", "npz", "-o", "out"), "No space left on device")
    assert files(tmp_path) == []


def test_a_folder_that_holds_files_of_another_run_is_said(attnscope: Run, tmp_path: Path) -> None:
    first = attnscope("heatmap", "x", "-f", "npz,json", "-o", "out")
    again = attnscope("heatmap", "x", "-f", "npz,json", "-o", "out")
    assert first.err == again.err == ""
    (tmp_path / "out" / "other.npz").write_text("")
    (tmp_path / "out" / "notes.txt").write_text("")
    assert attnscope("heatmap", "x", "-f", "npz", "-o", "out").err == (
        "note: out also holds a file that this run did not write, such as other.npz\n"
    )


def test_figures_of_another_run_that_no_record_tells_of_are_said(attnscope: Run, tmp_path: Path) -> None:
    attnscope("heatmap", "x", "--pick", "L0H0", "-o", "out", "-q")
    assert attnscope("heatmap", "x", "--pick", "L0H0", "-o", "out").err == ""
    again = attnscope("heatmap", "x", "--pick", "L0H0", "-o", "out", "--cmap", "Greys")
    assert again.err == "note: out held a file that showed something else before, such as L00H00.png\n"


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (("heatmap", "y", "--pick", "L0H0", "-f", "npz"), 'text "x", now "y"'),
        (("heatmap", "x", "--pick", "L1H1", "-f", "npz"), "heads L0H0, now L1H1"),
        (("heatmap", "x", "--pick", "L0H0", "--hide-special"), 'changes [], now ["hide_special"]'),
    ],
)
def test_maps_of_another_run_are_not_replaced_without_being_told_to(
    attnscope: Run, tmp_path: Path, other: tuple[str, ...], differs: str
) -> None:
    attnscope("heatmap", "x", "--pick", "L0H0", "-o", "out", "-f", "npz,png")
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    refused = attnscope(*other, "-o", "out")
    require_one_line(refused, re.escape(differs))
    assert "--replace" in refused.err
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert attnscope(*other, "-o", "out", "--replace").status == 0
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} != before


def test_the_same_maps_are_drawn_twice_into_one_folder(attnscope: Run, tmp_path: Path) -> None:
    attnscope("heatmap", "x", "--pick", "L0H0", "-o", "out", "-f", "npz,png")
    for more in (("--cmap", "Greys"), ("--query", "x"), ("-f", "svg"), ("--pick", "L0H0,L1H1")):
        assert attnscope("heatmap", "x", "--pick", "L0H0", "-o", "out", *more).status == 0, more


@pytest.mark.parametrize("format_", ["text", "png"])
def test_all_places_of_a_repeated_token_are_shown_and_said(attnscope: Run, format_: str) -> None:
    given = ("heatmap", "cat dog cat", "--pick", "L0H0", "-o", "out", "-f", f"{format_},npz", "--query")
    told = attnscope(*given, "cat,dog")
    assert told.err == "note: 'cat' stands at @1, @3: all are shown; --query @1 shows one\n"
    shown = attnscope("show", "out/weights.npz", "--query", "cat,dog")
    assert shown.err == told.err and shown.out.count("attends to") == 3
    require_one_line(attnscope("show", "out/weights.npz", "--query", "bird"), "no token is 'bird'")


# Models that cannot be shown


def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    record = dataclasses.replace(catalog.KNOWN["minilm"], pinned_sha256="0" * 64)
    monkeypatch.setitem(catalog.KNOWN, "minilm", record)


def corrupt(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(b"\xff" * 50 + path.read_bytes()[50:])


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"x": 1}))


def nan_weights(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    next(iter(weights.values()))[..., 0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def no_tokenizer(folder: Path) -> None:
    (folder / "vocab.txt").unlink()
    (folder / "tokenizer_config.json").unlink()


def no_config(folder: Path) -> None:
    (folder / "config.json").write_text("{", "utf-8")


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "corrupt": (corrupt, "model.safetensors"),
    "truncated": (truncate, "model.safetensors"),
    "pickle only": (only_pickle, "only as a pickle"),
    "NaN": (nan_weights, "NaN"),
    "no tokenizer": (no_tokenizer, "tokenizer|vocab"),
    "no config": (no_config, "config.json"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_models_that_are_damaged(attnscope: Run, tmp_path: Path, tiny_bert: Path, name: str) -> None:
    damage, said = BROKEN[name]
    damage(tiny_bert)
    before = files(tmp_path)
    require_one_line(attnscope("heatmap", "the cat", "-m", tiny_bert, "-f", "png,npz"), said)
    assert files(tmp_path) == before


def test_weights_that_are_not_the_pinned_ones(attnscope: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned(monkeypatch)
    require_one_line(attnscope("heatmap", "x"), "sha256 53aa51172d14…, but must have 000000000000…")
    assert files(tmp_path) == []


def test_a_folder_is_a_model(attnscope: Run, tiny_bert: Path, tmp_path: Path) -> None:
    result = attnscope("heatmap", "the cat", "-m", tiny_bert, "-f", "npz")
    assert result.status == 0
    assert re.match(r"attnscope-out/tiny-bert-the-cat-[0-9a-f]{8}/weights.npz", result.out)
    odd = Path(shutil.copytree(tiny_bert, tmp_path / "模型\x1b[31m"))
    result = attnscope("heatmap", "the cat", "-m", odd, "-o", "out", "-q")  # there may be no font for its name
    assert (result.status, result.err) == (0, "")


# Bugs, interrupts, streams


def test_a_bug_names_itself_in_one_line(attnscope: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setattr(heatmap_order, "study", broken)
    result = attnscope("heatmap", "x")
    require_one_line(result, "internal error: ZeroDivisionError: division by zero")
    assert "ATTNSCOPE_TRACEBACK=1" in result.err
    monkeypatch.setenv("ATTNSCOPE_TRACEBACK", "1")
    monkeypatch.setattr(sys, "argv", ["attnscope", "heatmap", "x"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


@pytest.mark.parametrize(
    ("raised", "said", "status"),
    [
        (MemoryError(), "not enough memory", 1),
        (KeyboardInterrupt(), "interrupted", 130),
        (OSError(errno.ENOSPC, "No space left on device", "here"), "No space left on device here", 1),
    ],
)
def test_what_is_nobodys_fault_is_one_line_too(
    attnscope: Run, monkeypatch: pytest.MonkeyPatch, raised: BaseException, said: str, status: int
) -> None:
    def broken(*_: object) -> None:
        raise raised

    monkeypatch.setattr(heatmap_order, "study", broken)
    require_one_line(attnscope("heatmap", "x"), said, status)


def test_ctrl_c_leaves_whole_files_and_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "attnscope", "heatmap", "word " * 40, "-f", "png,svg", "-o", "out"]

    def begun() -> bool:
        try:
            return any(tmp_path.glob("out/*.png"))
        except FileNotFoundError:  # the folder is made for a moment, to find out whether it can be
            return False

    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        while not begun():
            assert run.poll() is None, run.communicate(timeout=LIMIT_S)
        os.killpg(run.pid, signal.SIGINT)
        out, err = run.communicate(timeout=60)
    assert (run.returncode, out, err) == (130, "", "error: interrupted\n")
    left = [path.name for path in (tmp_path / "out").iterdir()]
    assert left and all(name.endswith((".png", ".svg")) and not name.startswith(".") for name in left)
    with pytest.raises(ProcessLookupError):  # nothing of the group is left running
        os.killpg(run.pid, 0)


def test_a_reader_that_has_enough_is_no_error(tmp_path: Path) -> None:
    path = simple(200, layers=3).save(tmp_path / "weights.npz")
    command = [sys.executable, "-m", "attnscope", "show", str(path), "--json"]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None and run.stderr is not None
        run.stdout.read(10)
        run.stdout.close()
        assert run.stderr.read() == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["--json"], ["--query", "t1"], ["-o", "out"]])
def test_a_stdout_that_is_full_is_said(tmp_path: Path, arguments: list[str]) -> None:
    path = simple(3, layers=1).save(tmp_path / "weights.npz")
    with Path("/dev/full").open("w") as full:
        result = process("show", path, *arguments, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert (result.returncode, result.stderr) == (1, "error: No space left on device\n")


@pytest.mark.parametrize("arguments", [["--json"], ["-o", "out"], []])
def test_a_stdout_that_is_closed_is_no_error(tmp_path: Path, arguments: list[str]) -> None:
    path = simple(3, layers=1).save(tmp_path / "weights.npz")
    script = f"exec {sys.executable} -m attnscope show {path} {' '.join(arguments)} >&-"
    result = subprocess.run(["bash", "-c", script], stderr=subprocess.PIPE, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


def test_terminals_without_unicode_and_folders_that_are_no_text(tmp_path: Path) -> None:
    path = simple(5, layers=1).save(tmp_path / "weights.npz")
    result = process("show", path, env={"PYTHONIOENCODING": "ascii", "LANG": "C"})
    assert (result.returncode, result.stderr) == (0, "") and result.stdout.isascii()
    odd = os.fsdecode(b"out-\xff")
    result = process("show", path, "-o", odd, "-f", "npz", text=False)
    assert (result.returncode, result.stdout) == (0, b"out-\xff/weights.npz\n")
    result = process("show", path, "-o", odd, "-f", "npz", "--json", text=False, env={"PYTHONIOENCODING": "ascii"})
    assert json.loads(result.stdout)["files"] == [f"{odd}/weights.npz"]


def test_odd_environments_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\n")
    odd = {"HOME": None, "MPLBACKEND": "nonsense", "COLUMNS": "20", "NO_COLOR": "1", "PYTHONWARNINGS": "error"}
    result = process("heatmap", "The cat", "-L", "0", "-f", "png,text", env=odd)
    assert (result.returncode, result.stderr) == (0, "")
    assert "\x1b" not in result.stdout
    assert result.stdout.splitlines()[-1].endswith("L00.png")
    path = simple(3, layers=1, heads=1).save(tmp_path / "weights.npz")
    result = process("show", path, "-o", "out", env=odd)
    assert (result.returncode, result.stdout, result.stderr) == (0, "out/L00H00.png\n", "")


WEIRD = [
    "😀🎉",
    "...!?",
    "word " * 10_000,
    "x" * 3000,
    "a\tb\n\nc",
    "\x1b[31mred\x1b[0m [bold]x[/] [/]",
    "שלום עולם",
    "e\u0301\u0323",
    "\ufeffa\u00adb\u202ec",
]


@pytest.mark.parametrize("text", WEIRD, ids=range(len(WEIRD)))
def test_weird_texts(attnscope: Run, text: str) -> None:
    result = attnscope("heatmap", text, "--pick", "L0H2", "-f", "npz,text", "-q", "-o", "out", "--pooled", "0")
    assert (result.status, result.err) == (0, "")
    assert result.out.splitlines()[-1] == "out/weights.npz"
    assert "\x1b" not in result.out
    assert load("out/weights.npz").text == text


@pytest.mark.parametrize("name", ["truncated", "zero", "huge header", "other shape", "absurd sizes"])
def test_info_compares_weights_with_the_configuration(attnscope: Run, tiny_bert: Path, name: str) -> None:
    path, config = tiny_bert / "model.safetensors", tiny_bert / "config.json"
    whole, described = path.read_bytes(), json.loads(config.read_text("utf-8"))
    damaged = {
        "truncated": whole[:-100],
        "zero": bytes(len(whole)),
        "huge header": b"\xff" * 7 + b"\x7f" + whole[8:],
    }
    path.write_bytes(damaged.get(name, whole))
    changed = {"other shape": {"intermediate_size": 7}, "absurd sizes": {"vocab_size": 10**19}}
    config.write_text(json.dumps(described | changed.get(name, {})), "utf-8")
    said = "damaged or cut short" if name in damaged else "but config.json makes it"
    require_one_line(attnscope("info", tiny_bert, "--engine", "native"), said)


@pytest.mark.parametrize(("asked", "built"), [(["info", "--help"], ["info"]), (["inof"], None), ([], None)])
def test_a_command_that_is_named_is_built_alone(
    monkeypatch: pytest.MonkeyPatch, asked: list[str], built: list[str] | None
) -> None:
    found = []
    monkeypatch.setattr(sys, "argv", ["attnscope", *asked])
    monkeypatch.setattr(cli, "claim_process", lambda: None)
    monkeypatch.setattr(typer.Typer, "__call__", lambda app, **how: found.append(app.registered_commands))
    with pytest.raises(SystemExit):
        cli.main()
    names = [command.callback.__name__ for command in found[0]]
    assert names == built if built else len(names) == len(cli._COMMANDS)
