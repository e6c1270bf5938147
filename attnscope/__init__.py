"""attnscope: what each attention head of a transformer does on your text.

    import attnscope

    model = attnscope.load("minilm")
    record = attnscope.heatmap(model, "The animal didn't cross the street because it was too tired.")
    record.draw("figures", ["png", "pdf"])
    record.of(3, 1)  # layer 3, head 1: (query, key)

    found = attnscope.heads(model, attnscope.Corpus("sample_texts/alice.txt", split="paragraph"))
    found.heads[2].roles  # layer 0, head 2: what it is for, with the evidence

Importing it loads no torch; the first use of a model does.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from attnscope.core.multihead import MultiHeadAttention
    from attnscope.corpus import Corpus
    from attnscope.errors import AttnscopeError
    from attnscope.models import load
    from attnscope.records import AttentionMap, Heatmap, Tokens
    from attnscope.records import load as load_record
    from attnscope.records.findings import Findings
    from attnscope.records.findings import load as load_findings
    from attnscope.studies.heads import HeadsOptions, heads
    from attnscope.studies.heatmap import heatmap
    from attnscope.studies.page import page
    from attnscope.views.page import Page

_PUBLIC = {
    "AttentionMap": "attnscope.records:AttentionMap",
    "AttnscopeError": "attnscope.errors:AttnscopeError",
    "Corpus": "attnscope.corpus:Corpus",
    "Findings": "attnscope.records.findings:Findings",
    "HeadsOptions": "attnscope.studies.heads:HeadsOptions",
    "Heatmap": "attnscope.records:Heatmap",
    "MultiHeadAttention": "attnscope.core.multihead:MultiHeadAttention",
    "Page": "attnscope.views.page:Page",
    "Tokens": "attnscope.records:Tokens",
    "heads": "attnscope.studies.heads:heads",
    "heatmap": "attnscope.studies.heatmap:heatmap",
    "load": "attnscope.models:load",
    "load_findings": "attnscope.records.findings:load",
    "load_record": "attnscope.records:load",
    "page": "attnscope.studies.page:page",
}

__all__ = [
    "AttentionMap",
    "AttnscopeError",
    "Corpus",
    "Findings",
    "HeadsOptions",
    "Heatmap",
    "MultiHeadAttention",
    "Page",
    "Tokens",
    "__version__",
    "heads",
    "heatmap",
    "load",
    "load_findings",
    "load_record",
    "page",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'attnscope' has no attribute {name!r}")
    import importlib

    module, attribute = _PUBLIC[name].split(":")
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
