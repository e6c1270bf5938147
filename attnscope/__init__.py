"""attnscope: what each attention head of a transformer does on your text.

    import attnscope

    model = attnscope.load("minilm")
    record = attnscope.heatmap(model, "The animal didn't cross the street because it was too tired.")
    record.draw("figures", ["png", "pdf"])
    record.of(3, 1)  # layer 3, head 1: (query, key)

    survey = attnscope.heads(model, attnscope.Corpus("sample_texts/alice.txt", split="paragraph"))
    survey.roles_of(survey.row(0, 2)).to_pandas()  # the roles of layer 0, head 2, with the evidence

    comparison = attnscope.compare(model, attnscope.Corpus("sample_texts/alice.txt", split="paragraph"))
    comparison.distance()  # between every two heads, (head, head)
    attnscope.trace(query="cat").of("weights", 0)  # the worked example, number by number
    attnscope.cost("gpt3", 2048).value("kv_cache_bytes")  # bytes
    relations = attnscope.relations(model, "sample_texts/dependencies.conllu")
    relations["case→parent"].best  # the head that best expresses it: (layer, head)

`import attnscope` loads no torch; the first use of a model does.
"""

from functools import cache
from typing import Any

from attnscope.version import VERSION

__version__ = VERSION


@cache
def _find_public_names() -> dict[str, tuple[str, str]]:
    """Return the defining module of each public name, and the name in that module: {public name: (module, name)}.

    The stub `__init__.pyi` beside this file imports all public names. The stub is parsed and not run, so no module of
    the package loads.
    """
    import ast
    from pathlib import Path

    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8"))
    definitions: dict[str, tuple[str, str]] = {}
    for statement in stub.body:
        if isinstance(statement, ast.ImportFrom):
            for imported in statement.names:
                definitions[imported.asname or imported.name] = (str(statement.module), imported.name)
    return definitions


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_find_public_names())
    if name not in _find_public_names():
        raise AttributeError(f"module 'attnscope' has no attribute {name!r}")
    import importlib

    module, name_in_module = _find_public_names()[name]
    value = getattr(importlib.import_module(module), name_in_module)
    # From now on Python finds the name without calling this function.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_find_public_names())
