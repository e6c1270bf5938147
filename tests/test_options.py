"""Options: dataclasses become the options of commands, with one meaning everywhere, and help that fits a screen."""

import inspect
from collections import Counter, defaultdict
from typing import ClassVar

import pytest
import typer
from typer.testing import CliRunner

from attnscope import cli
from attnscope import options as asked
from attnscope.cli.build import make_command
from attnscope.errors import UsageError
from attnscope.options import refuse_beside
from attnscope.studies.heads.options import HeadsCommandOptions, HeadsOptions
from attnscope.studies.inputs.options import CorpusOptions, OneTextOptions, WorkerOptions

COMMANDS = cli.commands()

# Dataclasses of options ------------------------------------------------------------------------------------------


@asked.options
class Peel:
    """A group in another."""

    PANEL: ClassVar[str] = "Heads"

    thin: int = asked.option("How thin; thinner is better.", default=1, least=1)


@asked.options
class Basket:
    """A group with another in it."""

    places: tuple[str, ...] = asked.option("Where.", default=(), argument=True)
    kinds: tuple[str, ...] = asked.option("Which.", "-k", "--kind", default=())
    peel: Peel = asked.group(Peel)
    layers: tuple[int, ...] = asked.option("Layers.", default=(0,), read=asked.read_ranges)
    washed: bool = asked.option("Leave them as they are.", "--unwashed", default=True)
    seed: int = asked.option("Few need it.", default=0, rare=True)
    secret: int = asked.option("For Python.", default=3, python_only=True)


def answer(function, *given):
    """What a function prints as the only command of a command line."""
    app = typer.Typer()
    app.command()(make_command(function))
    result = CliRunner().invoke(app, [*given], env={"TERM": "dumb", "COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    return result.output


def test_fields_are_options_those_of_groups_too_and_come_back_as_the_dataclass():
    def eat(*, basket: Basket):
        print(basket)

    names = ["places", "kinds", "thin", "layers", "washed", "seed"]
    assert [*inspect.signature(make_command(eat)).parameters] == names
    assert answer(eat) == f"{Basket()}\n"
    given = [
        "here",
        "-k",
        "a",
        "--kind",
        "b",
        "--thin",
        "2",
        "--layers",
        "0,3-4",
        "--unwashed",
        "--seed",
        "5",
    ]
    assert answer(eat, *given) == f"{Basket(('here',), ('a', 'b'), Peel(2), (0, 3, 4), False, 5)}\n"


def test_help_shows_the_first_sentence_of_what_is_needed_and_help_all_everything(run):
    short = run("heads", "--help")[1]
    whole = run("heads", "--help-all")[1]
    assert "--help-all" in short
    assert "--device" not in short
    assert "WAV files" in short
    assert "transcript" not in short
    assert "--device" in whole
    assert "--trust-remote-code" in whole
    assert "transcript" in whole


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_screen(name, monkeypatch, run):
    monkeypatch.setenv("COLUMNS", "80")
    lines = run(*name.split(), "--help")[1].splitlines()
    assert 10 < len(lines) <= 45
    assert max(map(len, lines)) <= 80
    shown = [one for one in COMMANDS[name].params if one.param_type_name == "option" and not one.hidden]
    assert len(shown) <= 20


def test_python_and_the_command_line_have_the_same_defaults():
    order = HeadsCommandOptions()
    assert order.describing.apply(order.heads) == HeadsOptions()
    assert HeadsOptions().describe is not None


def test_there_are_at_most_ninety_options():
    names = {
        max(one.opts, key=len)
        for each in COMMANDS.values()
        for one in each.params
        if one.opts[0][0] == "-"
    }
    assert 60 < len(names) <= 90, sorted(names)


@pytest.mark.parametrize(
    ("groups", "others", "named"),
    [
        ([OneTextOptions("a")], {}, "TEXT"),
        ([CorpusOptions(split="file"), WorkerOptions()], {}, "--split"),
        ([CorpusOptions(files=("a",))], {}, "--file"),
        ([CorpusOptions(), WorkerOptions(workers=2)], {}, "--workers"),
        ([CorpusOptions(), WorkerOptions()], {"chunk": 5, "probe": None}, "--chunk"),
    ],
)
def test_what_cannot_be_given_beside_an_option_is_named(groups, others, named):
    with pytest.raises(UsageError, match=f"^{named} cannot be given beside --image"):
        refuse_beside("--image", *groups, **others)
    refuse_beside("--image", *[type(group)() for group in groups], **dict.fromkeys(others))


# Values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command_line", "start", "says"),
    [
        ("heatmap", b"%PDF-1.7", "hint: extract its text first"),
        ("compare", b"PK\x03\x04", "hint: save it as plain text first"),
        ("relations", b"\x89PNG\r\n\x1a\n", "hint: give pictures with --image"),
        (
            "batch -o out",
            b"%PDF-1.7",
            "error: no text is left: nothing to read in 1 source: notes.x: a PDF",
        ),
    ],
)
def test_a_file_that_is_no_text_is_recognised(run, tmp_path, command_line, start, says):
    (tmp_path / "notes.x").write_bytes(start + b"\n\x00\xff" * 20)
    status, out, err = run(*command_line.split(), "notes.x")
    assert status, err
    assert not out
    assert any(line.startswith(says) for line in err.splitlines())


@pytest.mark.parametrize(
    "command_line", ["heatmap", "learn trace", "learn split -L 0", "heads", "ablate"]
)
def test_a_second_text_is_answered_with_where_several_go(run, tmp_path, command_line):
    status, out, err = run(*command_line.split(), "the cat", "the dog", "a bird")
    one = command_line.split()[0] in ("heatmap", "learn")
    several = "for several: attnscope page, or batch" if one else "several come from a file: --file"
    assert status == 2
    assert out == ""
    assert not [*tmp_path.iterdir()]
    assert err == (
        f"error: Got unexpected extra argument(s) (the dog a bird)\nhint: quote a text of several words; {several}\n"
    )


# All commands ---------------------------------------------------------------------------------------------------

_SHOWS = "it shows something else"
_WRITES = "it writes something else"

DIFFER = {
    **dict.fromkeys(
        [("learn trace", "TEXT"), ("learn split", "TEXT")], "there is a worked example without one"
    ),
    **dict.fromkeys(
        [(name, "--file") for name in ("heatmap", "learn trace", "learn split", "why")], "one text"
    ),
    ("heads", "--image"): "many pictures",
    ("page", "--image"): "a page is looked into, nothing is drawn",
    ("heads", "--audio"): "many recordings",
    ("ablate", "--target"): "an answer to each of many texts",
    ("patch", "--answer"): "it is right in the clean texts, not measured alone",
    ("learn trace", "--heads"): "of one layer",
    **{(name, "--layers"): "one layer" for name in ("learn trace", "learn split")},
    **{(name, "--pick"): _SHOWS for name in ("heads", "atlas", "weights", "why")},
    ("compare", "--query"): "it ranks heads",
    ("learn trace", "--query"): "the one query that is followed",
    ("why", "--query"): "the one token whose score is taken apart",
    ("compare", "--hide-special"): "in the tables only, as the distances need every key",
    ("batch", "--out"): "required: the same command goes on in it",
    ("page", "--out"): _WRITES,
    ("batch", "--format"): _WRITES,
    ("page", "--scale"): "no rollout",
    ("training", "--probe"): "needles take too long for each checkpoint",
    ("learn cost", "--dtype"): "of scores that nobody computes",
    ("relations", "FILES"): "annotated files",
    ("page", "--split"): "a page shows a whole text",
    ("relations", "--split"): "of annotated files",
    ("compare", "--measures"): "distances, not measures of a head",
    ("training", "--measures"): "what is followed over the steps, not printed beside",
    ("training", "--loss"): "of checkpoints",
    ("learn trace", "--kind"): "one attention alone is traced",
    ("weights", "--seed"): "of something else",
    ("learn cost", "MODEL"): "presets too",
}
"""Options that are not told, typed or set by default as most commands do, each with its reason."""


def told(parameter):
    """How an option is called, and all that a user is told of it: names, type, limits, default, help and its panel."""
    is_argument = parameter.param_type_name == "argument"
    called = parameter.name.upper() if is_argument else max(parameter.opts, key=len)
    panel = getattr(parameter, "rich_help_panel", None)
    limits = parameter.nargs, parameter.required, None if is_argument else parameter.multiple
    return called, (
        *parameter.opts,
        *parameter.secondary_opts,
        *limits,
        parameter.default,
        "formats" if parameter.name == "formats" else parameter.help,
        panel,
    )


def test_an_option_is_the_same_in_every_command_that_has_it():
    found = defaultdict(dict)
    for name, one in COMMANDS.items():
        for parameter in one.params:
            called, what = told(parameter)
            assert what[-2] or parameter.hidden, f"{name} {called} has no help"
            found[called][name] = what
    assert len(COMMANDS) > 15 and len(found) > 80  # else this test sees none of them
    differ = {
        (name, called)
        for called, by_command in found.items()
        for name, what in by_command.items()
        if what != Counter(by_command.values()).most_common(1)[0][0]
    }
    assert differ == set(DIFFER)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("heatmap -m mini", "minilm"),
        ("models ow", "own"),
        ("mod", "models"),
    ],
)
def test_the_shell_completes_commands_and_models(line, offered):
    words = ["attnscope", *line.split()]
    told = {
        "_ATTNSCOPE_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    done = CliRunner().invoke(cli.build_app(), [], prog_name="attnscope", env=told)
    assert offered in done.output.split(), done.output
