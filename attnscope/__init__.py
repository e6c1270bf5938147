"""attnscope: what each attention head of a transformer does on your text.

    import attnscope

    model = attnscope.load("minilm")
    record = attnscope.heatmap(model, "The animal didn't cross the street because it was too tired.")
    record.draw("figures", ["png", "pdf"])
    record.of(3, 1)  # layer 3, head 1: (query, key)

    survey = attnscope.heads(model, attnscope.Corpus("sample_texts/alice.txt", split="paragraph"))
    survey.roles_of(survey.row(0, 2)).to_pandas()  # layer 0, head 2: what it is for, with the evidence

    comparison = attnscope.compare(model, attnscope.Corpus("sample_texts/alice.txt", split="paragraph"))
    comparison.distance()  # (head, head)
    attnscope.trace(query="cat").of("weights", 0)  # the worked example, number by number
    attnscope.cost("gpt3", 2048).value("kv_cache_bytes")  # bytes
    relations = attnscope.relations(model, "sample_texts/dependencies.conllu")
    relations["case→parent"].best  # the head that best expresses it: (layer, head)

Importing it loads no torch; the first use of a model does.
"""

from functools import cache
from typing import Any

from attnscope.version import VERSION

__version__ = VERSION


@cache
def _public() -> dict[str, tuple[str, str]]:
    """Map each public name to the module that defines it, and to its name there.

    The stub beside this file, `__init__.pyi`, imports them all: it is read, and nothing is imported.
    """
    import ast
    from pathlib import Path

    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8"))
    public: dict[str, tuple[str, str]] = {}
    for statement in stub.body:
        if isinstance(statement, ast.ImportFrom):
            for imported in statement.names:
                public[imported.asname or imported.name] = (str(statement.module), imported.name)
    return public


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_public())
    if name not in _public():
        raise AttributeError(f"module 'attnscope' has no attribute {name!r}")
    import importlib

    module, name_there = _public()[name]
    value = getattr(importlib.import_module(module), name_there)
    # From now on Python finds the name without calling this function.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_public())
