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
    from attnscope.records.ablation import Ablation
    from attnscope.records.ablation import load as load_ablation
    from attnscope.records.findings import Findings
    from attnscope.records.findings import load as load_findings
    from attnscope.studies.ablation import AblateOptions, ablate
    from attnscope.studies.heads import HeadsOptions, heads
    from attnscope.studies.heatmap import heatmap
    from attnscope.studies.pruning import PruneOrder, prune

_PUBLIC = {
    "AblateOptions": "attnscope.studies.ablation:AblateOptions",
    "Ablation": "attnscope.records.ablation:Ablation",
    "AttentionMap": "attnscope.records:AttentionMap",
    "AttnscopeError": "attnscope.errors:AttnscopeError",
    "Corpus": "attnscope.corpus:Corpus",
    "Findings": "attnscope.records.findings:Findings",
    "HeadsOptions": "attnscope.studies.heads:HeadsOptions",
    "Heatmap": "attnscope.records:Heatmap",
    "MultiHeadAttention": "attnscope.core.multihead:MultiHeadAttention",
    "Tokens": "attnscope.records:Tokens",
    "PruneOrder": "attnscope.studies.pruning:PruneOrder",
    "ablate": "attnscope.studies.ablation:ablate",
    "heads": "attnscope.studies.heads:heads",
    "heatmap": "attnscope.studies.heatmap:heatmap",
    "load": "attnscope.models:load",
    "load_ablation": "attnscope.records.ablation:load",
    "load_findings": "attnscope.records.findings:load",
    "load_record": "attnscope.records:load",
    "prune": "attnscope.studies.pruning:prune",
}

__all__ = [
    "AblateOptions",
    "Ablation",
    "AttentionMap",
    "AttnscopeError",
    "Corpus",
    "Findings",
    "HeadsOptions",
    "Heatmap",
    "MultiHeadAttention",
    "PruneOrder",
    "Tokens",
    "__version__",
    "ablate",
    "heads",
    "heatmap",
    "load",
    "load_ablation",
    "load_findings",
    "load_record",
    "prune",
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
