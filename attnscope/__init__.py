"""attnscope: what each attention head of a transformer does on your text.

    import attnscope

    model = attnscope.load("minilm")
    record = attnscope.heatmap(model, "The animal didn't cross the street because it was too tired.")
    record.draw("figures", ["png", "pdf"])
    record.of(3, 1)  # layer 3, head 1: (query, key)

    found = attnscope.heads(model, attnscope.Corpus("sample_texts/alice.txt", split="paragraph"))
    found.heads[2].roles  # layer 0, head 2: what it is for, with the evidence

    links = attnscope.relations(model, "sample_texts/dependencies.conllu")
    links["case→head"].best  # the head that best expresses it: (layer, head)

Importing it loads no torch; the first use of a model does.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from attnscope.annotated import AnnotatedCorpus, AnnotatedText, Link
    from attnscope.core.multihead import MultiHeadAttention
    from attnscope.corpus import Corpus
    from attnscope.errors import AttnscopeError
    from attnscope.models import load
    from attnscope.records import AttentionMap, Heatmap, Tokens
    from attnscope.records import load as load_record
    from attnscope.records.findings import Findings
    from attnscope.records.findings import load as load_findings
    from attnscope.records.relations import Relations
    from attnscope.records.relations import load as load_relations
    from attnscope.studies.heads import HeadsOptions, heads
    from attnscope.studies.heatmap import heatmap
    from attnscope.studies.relations import RelationsOptions, relations

_PUBLIC = {
    "AnnotatedCorpus": "attnscope.annotated:AnnotatedCorpus",
    "AnnotatedText": "attnscope.annotated:AnnotatedText",
    "AttentionMap": "attnscope.records:AttentionMap",
    "AttnscopeError": "attnscope.errors:AttnscopeError",
    "Corpus": "attnscope.corpus:Corpus",
    "Findings": "attnscope.records.findings:Findings",
    "HeadsOptions": "attnscope.studies.heads:HeadsOptions",
    "Heatmap": "attnscope.records:Heatmap",
    "Link": "attnscope.annotated:Link",
    "MultiHeadAttention": "attnscope.core.multihead:MultiHeadAttention",
    "Relations": "attnscope.records.relations:Relations",
    "RelationsOptions": "attnscope.studies.relations:RelationsOptions",
    "Tokens": "attnscope.records:Tokens",
    "heads": "attnscope.studies.heads:heads",
    "heatmap": "attnscope.studies.heatmap:heatmap",
    "load": "attnscope.models:load",
    "load_findings": "attnscope.records.findings:load",
    "load_record": "attnscope.records:load",
    "load_relations": "attnscope.records.relations:load",
    "relations": "attnscope.studies.relations:relations",
}

__all__ = [
    "AnnotatedCorpus",
    "AnnotatedText",
    "AttentionMap",
    "AttnscopeError",
    "Corpus",
    "Findings",
    "HeadsOptions",
    "Heatmap",
    "Link",
    "MultiHeadAttention",
    "Relations",
    "RelationsOptions",
    "Tokens",
    "__version__",
    "heads",
    "heatmap",
    "load",
    "load_findings",
    "load_record",
    "load_relations",
    "relations",
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
