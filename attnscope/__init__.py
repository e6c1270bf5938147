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
    from attnscope.records.pooled import PooledHeatmap
    from attnscope.records.pooled import load as load_pooled
    from attnscope.studies.heads import HeadsOptions, heads
    from attnscope.studies.heatmap import heatmap
    from attnscope.studies.pooled import pooled_heatmap

_PUBLIC = {
    "AttentionMap": "attnscope.records:AttentionMap",
    "AttnscopeError": "attnscope.errors:AttnscopeError",
    "Corpus": "attnscope.corpus:Corpus",
    "Findings": "attnscope.records.findings:Findings",
    "HeadsOptions": "attnscope.studies.heads:HeadsOptions",
    "Heatmap": "attnscope.records:Heatmap",
    "MultiHeadAttention": "attnscope.core.multihead:MultiHeadAttention",
    "PooledHeatmap": "attnscope.records.pooled:PooledHeatmap",
    "Tokens": "attnscope.records:Tokens",
    "heads": "attnscope.studies.heads:heads",
    "heatmap": "attnscope.studies.heatmap:heatmap",
    "load": "attnscope.models:load",
    "load_findings": "attnscope.records.findings:load",
    "load_pooled": "attnscope.records.pooled:load",
    "load_record": "attnscope.records:load",
    "pooled_heatmap": "attnscope.studies.pooled:pooled_heatmap",
}

__all__ = [
    "AttentionMap",
    "AttnscopeError",
    "Corpus",
    "Findings",
    "HeadsOptions",
    "Heatmap",
    "MultiHeadAttention",
    "PooledHeatmap",
    "Tokens",
    "__version__",
    "heads",
    "heatmap",
    "load",
    "load_findings",
    "load_pooled",
    "load_record",
    "pooled_heatmap",
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
