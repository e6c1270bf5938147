"""Options: groups expanded into signatures, one meaning in all commands, and commands that parse, call and print."""

import ast
import inspect
import re
import shlex
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_args, get_origin

import pytest
import typer
from typer.testing import CliRunner

from attnscope import cli
from attnscope import options as asked
from attnscope.cli.groups import Changed, command
from attnscope.errors import UsageError
from attnscope.options import heads_from, numbers_from, refuse_beside
from attnscope.studies.inputs.options import LoadOptions, OneText, TextsWanted, refuse_file_names
from attnscope.studies.running.options import SharedWork
from tests.conftest import Run

# Groups ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fruit:
    """A group of options."""

    kind: Annotated[str, typer.Option("-k", "--kind", help="Which.")] = "apple"
    peeled: Annotated[bool, "Without its skin."] = False
    n: Annotated[int, "How many."] = 1


def answer(function: Any, *given: str) -> str:
    """What a function prints as the only command of a command line."""
    app = typer.Typer()
    app.command()(function)
    result = CliRunner().invoke(app, [*given], env={"TERM": "dumb", "COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    return result.output


def test_a_group_stands_where_its_parameter_stands_and_comes_as_one() -> None:
    @command()
    def eat(
        *,
        places: Annotated[list[str], "Where."],
        before: Annotated[int, "First."] = 0,
        fruit: Fruit,
        after_all: Annotated[bool, "Last."] = False,
    ) -> None:
        """Eat."""
        print(places, before, fruit, after_all)

    assert [*inspect.signature(eat).parameters] == ["places", "before", "kind", "peeled", "n", "after_all"]
    assert answer(eat, "here") == f"['here'] 0 {Fruit()} False\n"
    given = ["-k", "pear", "--peeled", "--n", "3", "--after-all", "a", "b"]
    assert answer(eat, *given) == f"['a', 'b'] 0 {Fruit('pear', True, 3)} True\n"
    told = answer(eat, "--help")
    helps = ("Where.", "First.", "Which.", "Without its skin.", "How many.", "Last.")
    assert "--no-" not in told and all(told.count(one) == 1 for one in helps)


def test_a_command_changes_and_leaves_out_options_of_its_groups_alone() -> None:
    @command(omit=("kind",), peeled="Quite bare.", n=Changed("How many of them.", default=2))
    def eat(*, fruit: Fruit) -> None:
        print(fruit)

    @command()
    def other(*, fruit: Fruit) -> None:
        print(fruit)

    assert answer(eat) == f"{Fruit(n=2)}\n" and answer(other) == f"{Fruit()}\n"
    told = answer(eat, "--help")
    assert "Quite bare." in told and "How many of them." in told and "--kind" not in told
    assert "Quite bare." not in answer(other, "--help")


@asked.options
class Peel:
    """A group in another."""

    PANEL: ClassVar[str] = "Heads"

    thin: int = asked.option("How thin.", default=1, least=1)


@asked.options
class Basket:
    """A group with another in it."""

    kinds: tuple[str, ...] = asked.option("Which.", "--kind", default=())
    peel: Peel = asked.group(Peel)
    layers: tuple[int, ...] = asked.option("Layers.", default=(0,), read=asked.numbers_from)


def test_a_group_in_a_group_stands_in_its_place_and_is_built_with_it() -> None:
    @command()
    def eat(*, basket: Basket) -> None:
        print(basket)

    assert [*inspect.signature(eat).parameters] == ["kinds", "thin", "layers"]
    assert answer(eat) == f"{Basket()}\n"
    given = ["--kind", "a", "--kind", "b", "--thin", "2", "--layers", "0,3-4"]
    assert answer(eat, *given) == f"{Basket(('a', 'b'), Peel(2), (0, 3, 4))}\n"


@pytest.mark.parametrize("wrong", [{"omit": ("colour",)}, {"colour": "Of its skin."}])
def test_what_is_in_no_group_can_be_neither_left_out_nor_changed(wrong: dict[str, Any]) -> None:
    def eat(*, fruit: Fruit) -> None: ...

    with pytest.raises(TypeError, match="eat has no group with colour"):
        command(**wrong)(eat)


def test_a_flag_switches_off_what_is_on_and_a_text_needs_no_flag() -> None:
    @command()
    def read(*, texts: TextsWanted, loading: LoadOptions, work: SharedWork) -> None:
        print((texts, loading) == wanted, work.share("minilm", loading))

    wanted = TextsWanted(), LoadOptions()
    assert answer(read) == "True None\n"
    wanted = TextsWanted("a", ("b", "c"), "file", "body"), LoadOptions(check=False, adapter=Path("lora"))
    given = ["a", "--file", "b", "--file", "c", "--split", "file", "--field", "body", "--adapter", "lora", "--no-check"]
    assert answer(read, *given) == "True None\n"


@pytest.mark.parametrize(
    ("groups", "others", "named"),
    [
        ([OneText("a")], {}, "TEXT"),
        ([TextsWanted(split="file"), SharedWork()], {}, "--split"),
        ([TextsWanted(files=("a",))], {}, "--file"),
        ([TextsWanted(), SharedWork(ray_address="10.0.0.1:6379")], {}, "--ray-address"),
        ([TextsWanted(), SharedWork()], {"chunk": 5, "probe": None}, "--chunk"),
    ],
)
def test_what_cannot_be_given_beside_an_option_is_named(groups: list[Any], others: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=f"^{named} cannot be given beside --image"):
        refuse_beside("--image", *groups, **others)
    refuse_beside("--image", *[type(group)() for group in groups], **dict.fromkeys(others))


# Values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command_line",
    ["heatmap", "page", "heads", "compare", "ablate", "rollout", "trace", "split", "prune --pick L0H0 -o p"],
)
@pytest.mark.parametrize("name", ["notes.txt", "two words.txt"])
def test_the_name_of_a_file_is_no_text(run: Run, tmp_path: Path, command_line: str, name: str) -> None:
    (tmp_path / name).write_text("The cat sat.", "utf-8")
    status, out, err = run(*command_line.split(), name)
    told, hint = err.splitlines()
    assert (status, out) == (2, "") and told == f"error: the text '{name}' is the name of a file"
    assert hint.startswith(f"hint: did you mean --file {shlex.quote(name)}? ") and "| attnscope … -" in hint
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("option", ["compare hi --with", "heatmap hi --pair", "heatmap hi --target"])
def test_the_name_of_a_file_is_no_second_text(run: Run, option: str) -> None:
    status, out, err = run(*option.split(), "missing.txt")
    assert (status, out) == (2, "")
    assert err.splitlines()[1] == "hint: give the text itself" and "is the name of a file" in err


def test_the_name_of_a_file_that_is_not_there_is_no_text(run: Run, tmp_path: Path) -> None:
    for name in ("notes.txt", "A.JSONL"):
        status, out, err = run("heatmap", name)
        assert (status, out) == (2, "")
        assert err.startswith(
            f"error: the text '{name}' is the name of a file that is not there\nhint: did you mean --file"
        )
    assert not list(tmp_path.iterdir())
    refuse_file_names("e.g", "see notes.txt", "txt", None)


@pytest.mark.parametrize(
    ("command_line", "start", "says"),
    [
        ("heatmap", b"%PDF-1.7", "hint: extract its text first"),
        ("compare", b"PK\x03\x04", "hint: save it as plain text first"),
        ("relations", b"\x89PNG\r\n\x1a\n", "hint: give pictures with --image"),
        ("batch -o out", b"%PDF-1.7", "error: no text is left: nothing to read in 1 source; notes.x: a PDF"),
    ],
)
def test_a_file_that_is_no_text_is_recognised(
    run: Run, tmp_path: Path, command_line: str, start: bytes, says: str
) -> None:
    (tmp_path / "notes.x").write_bytes(start + b"\n\x00\xff" * 20)
    status, out, err = run(*command_line.split(), "notes.x")
    assert status and not out and any(line.startswith(says) for line in err.splitlines()), err


def test_a_misspelt_probe_engine_or_measure_is_suggested(run: Run) -> None:
    misspelt = (
        ("heads --probe repet", "repeat"), ("heatmap The. --engine natve", "native"),
        ("heads The. --measures entropie", "entropy_nats"), ("patch pairs.jsonl --by valu", "value"),
    )  # fmt: skip
    for command_line, meant in misspelt:
        assert f"hint: did you mean {meant}?" in run(*command_line.split())[2]


@pytest.mark.parametrize(
    ("command_line", "error", "hint"),
    [
        ("patch pairs.jsonl --by xx", "--by has no 'xx'", "choose from z, query"),
        ("heatmap The. --sort explained", "No such option: --sort", "--sort belongs to heads"),
        ("heatmap The. --engine numpy --dtype bfloat16", "the numpy engine computes on", "leave out --dtype, or take"),
        ("heads --file no.txt", "there is no file no.txt", "check its name"),
        ("relations no.txt", "the ending of no.txt does not say", "if it is annotated, name the format: --kind conllu"),
    ],
)
def test_a_message_names_what_would_be_right(run: Run, command_line: str, error: str, hint: str) -> None:
    told, more = run(*command_line.split())[2].splitlines()
    assert told.startswith(f"error: {error}") and more.startswith(f"hint: {hint}"), (told, more)


def test_what_names_no_file_is_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "-").write_text("not read", "utf-8")
    for text in ("see notes.txt", "a text", "folder", "", "\0", "\udcff", "long " * 2000, "-"):
        assert OneText(text).text == TextsWanted(text).text == text


def test_python_refuses_the_name_of_a_file_too(tmp_path: Path) -> None:
    from attnscope.studies.inputs.texts import texts_of

    path = tmp_path / "notes.txt"
    path.write_text("The cat sat.", "utf-8")
    with pytest.raises(UsageError, match=r"is the name of a file .*attnscope\.Corpus\("):
        texts_of(str(path))
    assert [text.text for text in texts_of([str(path)])] == [str(path)]


@pytest.mark.parametrize("command_line", ["info", "cost"])
def test_the_model_of_info_and_cost_is_named_as_in_other_commands_too(run: Run, command_line: str) -> None:
    named = "own" if command_line == "info" else "gpt2"
    argument, option, long = (run(command_line, *given) for given in ((named,), ("-m", named), ("--model", named)))
    assert argument == option == long and argument[0] == 0
    assert run(command_line, named, "-m", named)[0] == 2


@pytest.mark.parametrize("given", ["L0H0,", ",L0H0", "L0H0,,L1H1", " , L0H0"])
def test_a_comma_too_many_is_refused_among_heads_and_numbers(given: str) -> None:
    for read, value in ((heads_from, given), (numbers_from, re.sub("L[01]H", "", given))):
        with pytest.raises(UsageError, match=f"^{value!r} has a comma with nothing on one side of it"):
            read(value)


@pytest.mark.parametrize("given", ["", " ", ",", " , "])
def test_no_heads_are_no_heads(given: str) -> None:
    for read in (heads_from, numbers_from):
        with pytest.raises(UsageError, match=r"^no (layer or )?head is given"):
            read(given)


@pytest.mark.parametrize("command_line", ["heatmap a", "rollout a", "page a", "batch f -o out"])
def test_an_empty_scale_is_none(run: Run, command_line: str) -> None:
    status, out, err = run(*command_line.split(), "--scale", "")
    assert (status, out) == (2, "") and err.startswith("error: there is no scale ''\nhint: choose one of fixed")


@pytest.mark.parametrize("command_line", ["heatmap", "rollout", "trace", "split -L 0", "heads", "ablate", "prune"])
def test_a_second_text_is_answered_with_where_several_go(run: Run, tmp_path: Path, command_line: str) -> None:
    status, out, err = run(*command_line.split(), "the cat", "the dog", "a bird")
    one = command_line.split()[0] in ("heatmap", "rollout", "trace", "split")
    several = "for several: attnscope page, or batch" if one else "several come from a file: --file"
    assert (status, out) == (2, "") and not [*tmp_path.iterdir()]
    assert err == (
        f"error: Got unexpected extra argument(s) (the dog a bird)\nhint: quote a text of several words; {several}\n"
    )


# All commands ---------------------------------------------------------------------------------------------------

_READS = "it is read for something else"
_WRITES = "it writes something else"
_SHOWS = "it shows something else"
_USUAL = "another default, which its help names"

DIFFER = {
    ("trace", "TEXT"): "there is a worked example without one",
    ("split", "TEXT"): "there is a worked example without one",
    ("prune", "TEXT"): _READS,
    **dict.fromkeys([(name, "--file") for name in ("heatmap", "rollout", "trace", "split", "why")], "one text"),
    ("heads", "--image"): "many pictures",
    ("rollout", "--image"): "one picture, without words",
    ("page", "--image"): "a page is looked into, nothing is drawn",
    ("heads", "--audio"): "many recordings",
    ("ablate", "--target"): "an answer to each of many texts",
    ("prune", "--target"): "an answer to each of many texts",
    ("trace", "--heads"): "of one layer",
    **{(name, "--pick"): _SHOWS for name in ("page", "compare", "ablate", "patch", "prune", "weights", "why")},
    ("batch", "--query"): "not every text has it",
    ("compare", "--query"): "it ranks heads",
    ("page", "--words"): "the reader of a page can change it",
    ("page", "--hide-special"): "the reader of a page can change it",
    ("compare", "--hide-special"): "in the tables only, as the distances need every key",
    ("batch", "--out"): "required: the same command goes on in it",
    **{(name, "--out"): _WRITES for name in ("heatmap", "page", "atlas", "prune", "show", "trace", "split", "cost")},
    **{(name, "--format"): _WRITES for name in ("heatmap", "batch", "atlas", "rollout", "show", "split", "cost")},
    **{(name, "--scale"): _USUAL for name in ("batch", "rollout", "show")},
    ("training", "--probe"): "needles take too long for each checkpoint",
    ("trace", "--engine"): "plain Python loops are one more",
    ("cost", "--dtype"): "of scores that nobody computes",
    ("relations", "FILES"): "annotated files",
    ("relations", "--examples"): "of relations, of which most have none",
    ("page", "--split"): "a page shows a whole text",
    ("batch", "--workers"): "as many as fit draw, without being asked for",
    ("compare", "--heads-record"): _SHOWS,
    ("show", "--measures"): "it shows other records too",
    ("atlas", "--measures"): "it lists in its page, not in the terminal",
    ("atlas", "--sort"): "it lists in its page, not in the terminal",
    ("training", "--measures"): "what is followed over the steps, not printed beside",
    ("show", "--cmap"): "not given, as most records have no colours to choose",
    ("relations", "--kind"): "of annotations",
    ("trace", "--kind"): "one attention alone is traced",
    ("why", "--kind"): "one attention alone is taken apart",
    ("why", "--query"): "the one token whose score is taken apart",
    ("split", "--seed"): "of something else",
    ("weights", "--seed"): "of something else",
    ("info", "MODEL"): "its own argument: every other command reads a text",
    **dict.fromkeys([("info", "--model"), ("cost", "--model")], "their argument says it too"),
}
"""Options that are not told, typed or set by default as most commands do, each with its reason."""


def told(name: str, parameter: Any) -> tuple[str, tuple[object, ...]]:
    """How an option is called, and all that a user is told of it: names, type, limits, default, help and its panel."""
    callbacks: dict[str, Any] = {
        getattr(info.callback, "__name__", ""): info.callback for info in cli.app.registered_commands
    }
    annotation = inspect.signature(callbacks[name]).parameters[parameter.name].annotation
    kind = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    is_argument = parameter.param_type_name == "argument"
    called = parameter.name.upper() if is_argument else max(parameter.opts, key=len)
    panel = getattr(parameter, "rich_help_panel", None)
    limits = parameter.min, parameter.max, parameter.nargs, parameter.required
    return called, (
        *parameter.opts,
        *parameter.secondary_opts,
        str(kind),
        *limits,
        parameter.default,
        parameter.help,
        panel,
    )


def test_an_option_is_the_same_in_every_command_that_has_it() -> None:
    found: dict[str, dict[str, tuple[object, ...]]] = defaultdict(dict)
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]  # it is a group
    for name, one in commands.items():
        for parameter in one.params:
            called, what = told(name, parameter)
            assert what[-2] or parameter.hidden, f"{name} {called} has no help"
            found[called][name] = what
    assert len(commands) > 15 and len(found) > 80  # else this test sees none of them
    differ = {
        (name, called)
        for called, by_command in found.items()
        for name, what in by_command.items()
        if what != Counter(by_command.values()).most_common(1)[0][0]
    }
    assert differ == set(DIFFER)


def test_options_stand_in_panels_and_only_those_of_one_command_in_none() -> None:
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]  # it is a group
    panels: dict[str, set[str | None]] = defaultdict(set)
    for one in commands.values():
        for parameter in one.params:
            if parameter.param_type_name == "option":
                panels[max(parameter.opts, key=len)].add(parameter.rich_help_panel)
    assert {panel for held in panels.values() for panel in held} == {
        None, "Model", "Text", "Heads", "Drawing", "Output", "Running",
    }  # fmt: skip
    for name, panel in (("--model", "Model"), ("--file", "Text"), ("--pick", "Heads"), ("--cmap", "Drawing")):
        assert panels[name] == {panel}, name
    assert panels["--out"] == panels["--quiet"] == panels["--replace"] == {"Output"}
    assert panels["--workers"] == {"Running"} and panels["--force"] == {None}
    assert max(sum(p.rich_help_panel is None for p in one.params) for one in commands.values()) < 20


def test_every_command_is_quiet_when_asked() -> None:
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]  # it is a group
    assert [name for name, one in commands.items() if not any("--quiet" in p.opts for p in one.params)] == []


def test_prune_takes_pickles_where_they_are_allowed() -> None:
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]  # it is a group
    assert any("--allow-pickle" in p.opts for p in commands["prune"].params)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("heatmap -m mini", "minilm"), ("info ow", "own"), ("heads --threshold indu", "induction="), ("mod", "models"),
        ("heads --measures entr", "entropy_nats"), ("show --measures entropy_nats,prev", "entropy_nats,previous_token"),
    ],
)  # fmt: skip
def test_the_shell_completes_commands_models_measures_and_roles(line: str, offered: str) -> None:
    words = ["attnscope", *line.split()]
    told = {"_ATTNSCOPE_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    done = CliRunner().invoke(cli.app, [], prog_name="attnscope", env=told)
    assert offered in done.output.split(), done.output


def test_help_names_no_type_of_a_flag() -> None:
    for words in ([], *([name] for name in typer.main.get_command(cli.app).commands)):  # type: ignore[attr-defined]
        told = CliRunner().invoke(cli.app, [*words, "--help"], env={"TERM": "dumb", "COLUMNS": "200"}).output
        assert "--help" in told and "<bool>" not in told, words
        assert not words or words[0] == "models" or "<str>" in told or "<path>" in told, words


def test_commands_are_short_and_start_without_studies() -> None:
    for info in cli.app.registered_commands:
        written = inspect.unwrap(info.callback)  # type: ignore[arg-type]  # every command has one
        body = ast.parse(inspect.getsource(written)).body[0].body  # type: ignore[attr-defined]  # it is a function
        assert isinstance(body[0], ast.Expr)  # its help
        assert (body[-1].end_lineno or 0) - body[1].lineno < 25, f"the body of {written.__name__} is too long"
    modules = [ast.parse(path.read_text("utf-8")) for path in Path(cli.__file__).parent.rglob("*.py")]
    imported = {node.module for tree in modules for node in tree.body if isinstance(node, ast.ImportFrom)}
    ours = {str(name) for name in imported if str(name).startswith("attnscope")}
    assert all(
        name.startswith(("attnscope.cli", "attnscope.errors", "attnscope.host", "attnscope.version"))
        or name == "attnscope"
        or name.endswith((".options", "attnscope.choice"))
        for name in ours
    ), ours
