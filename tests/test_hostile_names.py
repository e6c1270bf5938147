"""Names of folders, files, tokens, labels and models that are marked up, or hold what a terminal obeys.

No command obeys any of it: no markup is read, and no control character leaves.
"""

import json
import unicodedata
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

import attnscope
from attnscope.output import print_document
from attnscope.report.plain_text import open_console
from tests.conftest import VOCABULARY, write_tokenizer

NAME = "[red]x[bold] [link=evil] :boom: \x1b[31m\x07\u202e\u2028[_]"
"""No slash, which no file name holds."""
RECORDS = Path(__file__).parent / "records"
MARKUP = ("[red]", "[link=evil]", ":boom:")


@pytest.fixture
def model(tiny_bert):
    """A model in a folder of that name, whose configuration and vocabulary hold it too."""
    folder = tiny_bert.rename(tiny_bert.parent / NAME)
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8"))
    config |= {
        "_name_or_path": NAME,
        "architectures": [NAME],
        "id2label": {"0": NAME},
        "label2id": {NAME: 0},
    }
    path.write_text(json.dumps(config), "utf-8")
    odd = {"cat": "[red]", "the": "\x1b[31m\u202e"}
    write_tokenizer(folder, [odd.get(piece, piece) for piece in VOCABULARY])
    return folder


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / f"texts {NAME}.txt"
    path.write_text(f"a cat {NAME}\nthe dog {NAME} a b\n", "utf-8")
    return path


@pytest.fixture
def annotated(tmp_path):
    path = tmp_path / f"links {NAME}.jsonl"
    label = f"=cmd|{NAME}"
    line = {"text": "a b c d", "links": [{"from": [4, 5], "to": [0, 1], "label": label}]}
    path.write_text((json.dumps(line) + "\n") * 30, "utf-8")
    return path


def require_plain(*printed):
    for text in printed:
        obeyed = [c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")]
        assert not obeyed, f"{obeyed} in {text!r}"


TEXT = f"a {NAME} b"

COMMANDS = {
    "heatmap": ["heatmap", TEXT, "-m", "MODEL", "-f", "text,npz", "-o", "out"],
    "a query": ["heatmap", TEXT, "-m", "MODEL", "-f", "text", "--query", f"{NAME} z"],
    "page": ["page", TEXT, "-m", "MODEL", "-o", "out.html"],
    "heads": ["heads", "--file", "TEXTS", "-m", "MODEL", "-o", "out", "-f", "npz,csv"],
    "batch": ["batch", "TEXTS", "-m", "MODEL", "-o", "out", "-L", "0", "--workers", "1"],
    "rollout": ["heatmap", "--rollout", TEXT, "-m", "MODEL"],
    "compare": ["compare", "--file", "TEXTS", "-m", "MODEL"],
    "a pair": ["compare", TEXT, "--with", f"{TEXT} c", "-m", "MODEL"],
    "relations": ["relations", "ANNOTATED", "-m", "MODEL", "-o", "out", "-f", "csv"],
    "ablate": ["ablate", "--file", "TEXTS", "-m", "MODEL", "--loss", "none"],
    "prune": ["ablate", "-m", "MODEL", "--pick", "L0H0", "--save", f"pruned {NAME}", "--file", "SHORT"],
    "trace": ["learn", "trace", TEXT, "-m", "MODEL", "-L", "0", "-H", "1"],
    "split": ["learn", "split", TEXT, "-m", "MODEL", "-L", "0", "--counts", "1,3"],
    "cost": ["learn", "cost", "MODEL"],
    "models": ["models"],
    "info": ["models", "MODEL"],
    "show": ["show", NAME],
    "no model": ["models", f"./{NAME}"],
    "no option": ["models", f"--{NAME}"],
    "no command": [NAME],
    "no file": ["heads", "--file", NAME],
    "no head": ["heatmap", "a", "-m", "own", "--pick", NAME],
    "no role": ["heads", "a", "-m", "own", "--threshold", NAME],
    "no measure": ["heads", "a", "-m", "own", "--measures", NAME],
}


@pytest.mark.usefixtures("worker_here")
@pytest.mark.parametrize("json_wanted", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_obeys_a_name(name, json_wanted, run, model, texts, annotated):
    short = texts.parent / f"short {NAME}.txt"
    short.write_text("a b\n", "utf-8")
    known = {"MODEL": model, "TEXTS": texts, "ANNOTATED": annotated, "SHORT": short}
    arguments = [known.get(argument, argument) for argument in COMMANDS[name]]
    if json_wanted:
        if name.startswith("no ") or name == "show":
            pytest.skip("fails before anything could be printed as JSON")
        arguments.append("--json")
        arguments = ["npz" if argument == "text,npz" else argument for argument in arguments]
    status, out, err = run(*arguments)
    fails = name.startswith(("no ", "a query")) and name != "no model" or name == "show"
    assert (status in (1, 2)) if fails else status == 0, err
    require_plain(*((out, err) if json_wanted or status else (_without_paths(out), err)))
    assert "internal error" not in err
    if json_wanted and status == 0:
        json.loads(out)
    if status == 0 and name == "info" and not json_wanted:
        assert all(mark in out for mark in MARKUP)


def _without_paths(out):
    """What is printed but for the files that were written: those are printed as they are, for programs."""
    return "\n".join(line for line in out.splitlines() if not line.startswith(("out", "pruned")))


def test_a_console_shows_markup_as_it_is(capsys):
    from rich.panel import Panel
    from rich.table import Table

    table = Table(NAME, title=NAME, caption=NAME)
    table.add_row(NAME)
    console = open_console(width=200)
    console.print(table, Panel(NAME, title=NAME), NAME, "[/red]")
    out = capsys.readouterr().out
    require_plain(out)
    assert "[/red]" in out
    assert out.count("[link=evil]") >= 5


def test_json_on_a_terminal_holds_nothing_to_obey(capfdbinary):
    text = NAME + "\udc80\U000e0041\U0001f9ff\x9b\u200d"
    print_document(lambda: {"a": text}, [], json=True)
    out = capfdbinary.readouterr().out.decode()
    require_plain(out)
    assert json.loads(out)["a"] == text
    assert "\U0001f9ff" in out


CONTROLS = "</svg>\x1b[31m\x00\u202e"


def test_needles_with_hostile_names_are_drawn_as_svg_that_can_be_read(tmp_path):
    found = attnscope.load_record(RECORDS / "needles.npz")
    changed = replace(found, run={**found.run, "model": CONTROLS})
    paths = changed.draw(tmp_path / "out", ["svg", "png"])
    assert len(paths) > 1
    for path in paths:
        if path.suffix == ".svg":
            ElementTree.parse(path)
