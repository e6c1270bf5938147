"""Every public function and class of core says its shapes, unit or range, errors and source."""

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap

import pytest

import attnscope.core

ARRAY = re.compile(r"\b(Tensor|NDArray|Floats|Integers|Array|ArrayLike|Sum|Float|Bool|Int|Shaped)\b")
"""Annotations of arrays."""

NUMBERS = re.compile(r"\b(Tensor|NDArray|Floats|Array|Float|float|Shaped)\b")
"""Annotations of results that have a unit or a range."""

SHAPE = re.compile(
    r"\([^()\"]*(\([^()]*\)[^()\"]*)*[,*…][^()\"]*\)|\(\w+,?\)|\(…?\)|\bshape\b|\bflat\b|\bsquare\b",
    re.IGNORECASE,
)
"""A shape in words: (batch, n_heads, query, key), (token,), "the shape of p"."""

REFERENCE = re.compile(
    r"\b(as (for|in|of|to|by)|likewise|see|as `|the same|its|of the same|broadcast)", re.IGNORECASE
)
"""Said elsewhere: "As for `tiles`." """


SOURCE = re.compile(r"\b(1[89]|20)\d\d\b|\bours\b|et al\.|ITU|CIE\b|IEC", re.IGNORECASE)


def modules():
    for info in pkgutil.walk_packages(attnscope.core.__path__, "attnscope.core."):
        yield importlib.import_module(info.name)


def public():
    """Functions, classes, and the public methods of these, where they are defined."""
    found = {}
    for module in modules():
        for name, thing in vars(module).items():
            if name.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
                continue
            where = f"{module.__name__.removeprefix('attnscope.core.')}.{name}"
            if inspect.isfunction(thing):
                found[where] = thing, module
            elif inspect.isclass(thing):
                found[where] = thing, module
                for method, of in vars(thing).items():
                    of = of.__func__ if isinstance(of, classmethod | staticmethod) else of
                    if inspect.isfunction(of) and (method == "__call__" or not method.startswith("_")):
                        found[f"{where}.{method}"] = of, module
    return found


PUBLIC = public()
FUNCTIONS = {name: of for name, of in PUBLIC.items() if inspect.isfunction(of[0])}


def sections(thing):
    """The parts of a docstring in Google's style; "" is what comes first."""
    found = {"": ""}
    at = ""
    for line in (inspect.getdoc(thing) or "").splitlines():
        heading = re.fullmatch(r"(Args|Returns|Yields|Raises|Source|Attributes):", line)
        if heading:
            at = heading[1]
            found[at] = ""
        else:
            found[at] += line + "\n"
    return found


def arguments(thing):
    """What is said of each argument."""
    said = sections(thing).get("Args", "")
    entries = re.split(
        r"^ {4}(?=\w+: )", textwrap.indent(textwrap.dedent(said), "    "), flags=re.MULTILINE
    )
    return {name: text for name, _, text in (entry.partition(":") for entry in entries if ":" in entry)}


def annotations(function):
    return {
        name: str(of) if not isinstance(of, type) else of.__name__
        for name, of in function.__annotations__.items()
    }


def raised(thing):
    """The errors that the lines of a function raise; of a class, those of making one."""
    made = (
        (vars(thing).get("__init__"), vars(thing).get("__post_init__"))
        if inspect.isclass(thing)
        else (thing,)
    )
    found = set()
    if getattr(thing, "_is_protocol", False):
        return found
    for function in filter(inspect.isfunction, made):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, TypeError):  # made by a library
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and node.exc is not None:
                named = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
                found.add(ast.unparse(named))
    return found


def test_there_is_something_to_walk():
    assert len(FUNCTIONS) > 100
    assert {
        "attention.seam.attend",
        "intervals.mean_interval",
        "facts.find_outlier_tokens",
    } <= FUNCTIONS.keys()


@pytest.mark.parametrize("name", PUBLIC)
def test_it_says_what_it_is(name):
    assert sections(PUBLIC[name][0])[""].strip(), name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_says_the_shapes_of_arrays(name):
    function, _ = FUNCTIONS[name]
    whole = sections(function)
    said = arguments(function)
    lines = whole[""] + whole.get("Returns", "") + whole.get("Yields", "")
    for of, annotation in annotations(function).items():
        if not ARRAY.search(annotation) or re.search(r"\w+\[\w+, ['\"]", annotation):
            continue
        text = lines if of == "return" else said.get(of, whole[""])
        assert SHAPE.search(text) or REFERENCE.search(text), f"{name}: the shape of {of}"


@pytest.mark.parametrize("name", PUBLIC)
def test_it_says_what_it_raises(name):
    thing, _ = PUBLIC[name]
    said = sections(thing).get("Raises", "")
    unsaid = {error for error in raised(thing) if not re.search(rf"^ *{error}:", said, re.MULTILINE)}
    assert not unsaid, name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_or_its_module_says_the_source(name):
    function, module = FUNCTIONS[name]
    if NUMBERS.search(annotations(function).get("return", "")):
        assert SOURCE.search((inspect.getdoc(function) or "") + (module.__doc__ or "")), name
