"""The plan of the house, held by tests: no circle of imports, no file that is everything."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import attnscope

ROOT = Path(attnscope.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
MOST_LINES, MOST_LINES_OF_TESTS = 545, 600
MOST_PARAMETERS = 8
MOST_FILES = 24
MANY_PARAMETERS = {
    "core/attention/multihead.py:__init__",
    "core/attention/multihead.py:forward",  # as torch.nn.MultiheadAttention's
    "models/__init__.py:load",
    "questions/arrays.py:record_from_arrays",
    "models/hf/model.py:__init__",
    "studies/maps/study.py:heatmap",  # public, with a keyword for each thing that users choose
    "models/hf/seam.py:attention_function",  # as transformers calls it
}
"""Functions that have more; kernels and commands may too."""
MANY_FILES = {"pages/src", "questions"}
"""Folders that hold more: the scripts of pages are one program, without folders in it; each question has its file."""


def module_of(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


@cache
def parse(path):
    return ast.parse(path.read_text("utf-8"))


def imports_of(path):
    """The modules of attnscope that a file imports anywhere in it: on use too, but not for types alone."""
    tree = parse(path)
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                yield inner if inner in MODULES else node.module


CIRCLES = {
    ("attnscope.studies.inputs.options", "attnscope.studies.workers"),
}
"""Pairs of modules of which the first imports the second on use alone. The list may only get shorter."""


def test_no_circle_of_imports():
    left = {module: {*imports_of(path)} & {*MODULES} - {module} for module, path in MODULES.items()}
    for first, second in CIRCLES:
        left[first].remove(second)
    while left:
        free = [module for module, needed in left.items() if not needed & {*left}]
        assert free, f"a circle among {sorted(left)}"
        for module in free:
            del left[module]


def test_no_file_tries_to_be_everything():
    own = dict.fromkeys((*FILES, *ROOT.rglob("*.js"), *ROOT.rglob("*.css")), MOST_LINES)
    most = own | dict.fromkeys(Path(__file__).parent.rglob("*.py"), MOST_LINES_OF_TESTS)
    long = {
        str(path): n for path in most if (n := len(path.read_text("utf-8").splitlines())) > most[path]
    }
    assert not long


NO_NAMES = frozenset({"found", "given", "held", "made", "merged", "placed", "kept", "told", "asked"})
MOST_OF_NO_NAMES = 51
"""How many values are still called so. The number may only fall."""


def test_names_say_what_they_hold():
    names = Counter(
        name
        for path in FILES
        for node in ast.walk(parse(path))
        if (
            name := node.arg
            if isinstance(node, ast.arg)
            else getattr(node, "id", "")
            if _is_set(node)
            else ""
        )
        in NO_NAMES
    )
    assert names.total() <= MOST_OF_NO_NAMES, names


def _is_set(node):
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def test_no_function_has_more_parameters_than_a_reader_holds():
    found = []
    for path in FILES:
        where = path.relative_to(ROOT).as_posix()
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                if len([name for name in names if name not in ("self", "cls")]) > MOST_PARAMETERS:
                    found.append(f"{where}:{node.name}")
    assert len(MANY_PARAMETERS) <= 10
    assert {name for name in found if not name.startswith("cli/")} <= MANY_PARAMETERS


def test_a_folder_shows_its_question():
    counts = Counter(
        path.parent.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.is_file()
    )
    crowded = {
        folder for folder, n in counts.items() if n > MOST_FILES and not folder.endswith("__pycache__")
    }
    assert crowded <= MANY_FILES


COUNTED = re.compile(
    r"(?<!of )(?<!first )\{(?:len\([^{}]*\)|[^{}\"']*\bn_\w+)(?::,)?\} (?!query heads share)[\w/-]*s\b"
)


def test_what_a_view_counts_may_be_one():
    """Nouns after a number that may be 1 come from `errors.amount`, which writes "1 head" and "2 heads"."""
    assert COUNTED.search('f"{len(found.heads)} heads"')
    assert COUNTED.search('f"{n_left} heads"')
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for room in ("report", "questions", "drawing", "pages")
        for path in (ROOT / room).rglob("*.py")
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if COUNTED.search(line)
    ]
    assert not found


def test_the_formatter_has_the_last_word():
    roots = [
        Path(__file__).parent,
        ROOT,
        ROOT.parent / "examples",
        ROOT.parent / "benchmarks",
        ROOT.parent / "docs",
    ]
    mark = "# fmt: " + "skip"
    assert not [
        str(path) for root in roots for path in root.rglob("*.py") if mark in path.read_text("utf-8")
    ]
