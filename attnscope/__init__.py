"""attnscope: what each attention head of a transformer does on your text.

    import attnscope

    model = attnscope.load("minilm")
    record = attnscope.heatmap(model, "The animal didn't cross the street because it was too tired.")
    record.draw("figures", ["png", "pdf"])
    record.of(3, 1)  # layer 3, head 1: (query, key)

    found = attnscope.heads(model, attnscope.Corpus("sample_texts/alice.txt", split="paragraph"))
    found.heads[2].roles  # layer 0, head 2: what it is for, with the evidence

    alike = attnscope.compare(model, attnscope.Corpus("sample_texts/alice.txt", split="paragraph"))
    alike.tables[0].distances  # (head, head)
    attnscope.trace_example("cat").of("weights", 0)  # the worked example, number by number
    attnscope.cost("gpt3", 2048).value("kv_cache_own_float16")  # bytes
    links = attnscope.relations(model, "sample_texts/dependencies.conllu")
    links["case→head"].best  # the head that best expresses it: (layer, head)

Importing it loads no torch; the first use of a model does.
"""

from typing import TYPE_CHECKING, Any

from attnscope.version import VERSION as __version__

if TYPE_CHECKING:
    from attnscope.annotated import AnnotatedCorpus, AnnotatedText, Link
    from attnscope.core.multihead import MultiHeadAttention
    from attnscope.corpus import Corpus
    from attnscope.errors import AttnscopeError
    from attnscope.models import load
    from attnscope.models.decoder import own_decoder
    from attnscope.records import AttentionMap, Heatmap, Tokens, record_from_arrays
    from attnscope.records import load as load_record
    from attnscope.records.ablation import Ablation
    from attnscope.records.atlas import Atlas
    from attnscope.records.batches import Batch
    from attnscope.records.circuits import Circuits
    from attnscope.records.comparison import (
        Comparison,
        HeadComparison,
        MinimalPair,
        ModelComparison,
        PickedHeads,
        PicturePair,
    )
    from attnscope.records.findings import Findings
    from attnscope.records.pooled import PooledHeatmap
    from attnscope.records.relations import Relations
    from attnscope.records.rollouts import Rollout
    from attnscope.records.timeline import Timeline
    from attnscope.studies.ablation import AblateOptions, ablate
    from attnscope.studies.atlas import AtlasOptions, atlas
    from attnscope.studies.batch import batch
    from attnscope.studies.batch_worker import BatchOptions
    from attnscope.studies.circuits import CircuitsOptions, circuits
    from attnscope.studies.compare import CompareOptions, compare, compare_models
    from attnscope.studies.compare_pictures import compare_pictures
    from attnscope.studies.compare_texts import compare_heads, compare_texts
    from attnscope.studies.cost import cost
    from attnscope.studies.descriptions import DescribeOptions, describe
    from attnscope.studies.head_watch import HeadWatch
    from attnscope.studies.heads import HeadsOptions, heads
    from attnscope.studies.heatmap import heatmap, picture_heatmap, sound_heatmap
    from attnscope.studies.needles import NeedleOptions, retrieval_heads
    from attnscope.studies.page import page
    from attnscope.studies.pooled import pooled_heatmap
    from attnscope.studies.pruning import PruneOrder, prune
    from attnscope.studies.relations import RelationsOptions, relations
    from attnscope.studies.rollout import picture_rollout, rollout
    from attnscope.studies.sense_heads import picture_heads, sound_heads
    from attnscope.studies.split import SplitOptions, split, split_example
    from attnscope.studies.timeline import TimelineOptions, timeline
    from attnscope.studies.trace import trace, trace_example
    from attnscope.studies.workers import Workers
    from attnscope.views.notebook import widget
    from attnscope.views.page import Page

    load_ablation = Ablation.load
    load_circuits = Circuits.load
    load_comparison = Comparison.load
    load_findings = Findings.load
    load_pooled = PooledHeatmap.load
    load_relations = Relations.load
    load_rollout = Rollout.load
    load_timeline = Timeline.load

_PUBLIC = {
    "AblateOptions": "attnscope.studies.ablation:AblateOptions",
    "Ablation": "attnscope.records.ablation:Ablation",
    "AnnotatedCorpus": "attnscope.annotated:AnnotatedCorpus",
    "AnnotatedText": "attnscope.annotated:AnnotatedText",
    "Atlas": "attnscope.records.atlas:Atlas",
    "AtlasOptions": "attnscope.studies.atlas:AtlasOptions",
    "AttentionMap": "attnscope.records:AttentionMap",
    "AttnscopeError": "attnscope.errors:AttnscopeError",
    "Batch": "attnscope.records.batches:Batch",
    "BatchOptions": "attnscope.studies.batch_worker:BatchOptions",
    "Circuits": "attnscope.records.circuits:Circuits",
    "CircuitsOptions": "attnscope.studies.circuits:CircuitsOptions",
    "CompareOptions": "attnscope.studies.compare:CompareOptions",
    "Corpus": "attnscope.corpus:Corpus",
    "DescribeOptions": "attnscope.studies.descriptions:DescribeOptions",
    "Findings": "attnscope.records.findings:Findings",
    "HeadComparison": "attnscope.records.comparison:HeadComparison",
    "HeadWatch": "attnscope.studies.head_watch:HeadWatch",
    "HeadsOptions": "attnscope.studies.heads:HeadsOptions",
    "Heatmap": "attnscope.records:Heatmap",
    "Link": "attnscope.annotated:Link",
    "MinimalPair": "attnscope.records.comparison:MinimalPair",
    "ModelComparison": "attnscope.records.comparison:ModelComparison",
    "MultiHeadAttention": "attnscope.core.multihead:MultiHeadAttention",
    "NeedleOptions": "attnscope.studies.needles:NeedleOptions",
    "Page": "attnscope.views.page:Page",
    "PickedHeads": "attnscope.records.comparison:PickedHeads",
    "PicturePair": "attnscope.records.comparison:PicturePair",
    "PooledHeatmap": "attnscope.records.pooled:PooledHeatmap",
    "PruneOrder": "attnscope.studies.pruning:PruneOrder",
    "Relations": "attnscope.records.relations:Relations",
    "RelationsOptions": "attnscope.studies.relations:RelationsOptions",
    "Rollout": "attnscope.records.rollouts:Rollout",
    "SplitOptions": "attnscope.studies.split:SplitOptions",
    "Timeline": "attnscope.records.timeline:Timeline",
    "TimelineOptions": "attnscope.studies.timeline:TimelineOptions",
    "Tokens": "attnscope.records:Tokens",
    "Workers": "attnscope.studies.workers:Workers",
    "ablate": "attnscope.studies.ablation:ablate",
    "atlas": "attnscope.studies.atlas:atlas",
    "batch": "attnscope.studies.batch:batch",
    "circuits": "attnscope.studies.circuits:circuits",
    "compare": "attnscope.studies.compare:compare",
    "compare_heads": "attnscope.studies.compare_texts:compare_heads",
    "compare_models": "attnscope.studies.compare:compare_models",
    "compare_pictures": "attnscope.studies.compare_pictures:compare_pictures",
    "compare_texts": "attnscope.studies.compare_texts:compare_texts",
    "cost": "attnscope.studies.cost:cost",
    "describe": "attnscope.studies.descriptions:describe",
    "heads": "attnscope.studies.heads:heads",
    "heatmap": "attnscope.studies.heatmap:heatmap",
    "load": "attnscope.models:load",
    "load_ablation": "attnscope.records.ablation:Ablation.load",
    "load_circuits": "attnscope.records.circuits:Circuits.load",
    "load_comparison": "attnscope.records.comparison:Comparison.load",
    "load_findings": "attnscope.records.findings:Findings.load",
    "load_pooled": "attnscope.records.pooled:PooledHeatmap.load",
    "load_record": "attnscope.records:load",
    "load_relations": "attnscope.records.relations:Relations.load",
    "load_rollout": "attnscope.records.rollouts:Rollout.load",
    "load_timeline": "attnscope.records.timeline:Timeline.load",
    "own_decoder": "attnscope.models.decoder:own_decoder",
    "page": "attnscope.studies.page:page",
    "picture_heads": "attnscope.studies.sense_heads:picture_heads",
    "retrieval_heads": "attnscope.studies.needles:retrieval_heads",
    "sound_heads": "attnscope.studies.sense_heads:sound_heads",
    "picture_heatmap": "attnscope.studies.heatmap:picture_heatmap",
    "picture_rollout": "attnscope.studies.rollout:picture_rollout",
    "pooled_heatmap": "attnscope.studies.pooled:pooled_heatmap",
    "prune": "attnscope.studies.pruning:prune",
    "record_from_arrays": "attnscope.records:record_from_arrays",
    "relations": "attnscope.studies.relations:relations",
    "rollout": "attnscope.studies.rollout:rollout",
    "sound_heatmap": "attnscope.studies.heatmap:sound_heatmap",
    "split": "attnscope.studies.split:split",
    "split_example": "attnscope.studies.split:split_example",
    "timeline": "attnscope.studies.timeline:timeline",
    "trace": "attnscope.studies.trace:trace",
    "trace_example": "attnscope.studies.trace:trace_example",
    "widget": "attnscope.views.notebook:widget",
}

__all__ = [
    "AblateOptions",
    "Ablation",
    "AnnotatedCorpus",
    "AnnotatedText",
    "Atlas",
    "AtlasOptions",
    "AttentionMap",
    "AttnscopeError",
    "Batch",
    "BatchOptions",
    "Circuits",
    "CircuitsOptions",
    "CompareOptions",
    "Corpus",
    "DescribeOptions",
    "Findings",
    "HeadComparison",
    "HeadWatch",
    "HeadsOptions",
    "Heatmap",
    "Link",
    "MinimalPair",
    "ModelComparison",
    "MultiHeadAttention",
    "NeedleOptions",
    "Page",
    "PickedHeads",
    "PicturePair",
    "PooledHeatmap",
    "PruneOrder",
    "Relations",
    "RelationsOptions",
    "Rollout",
    "SplitOptions",
    "Timeline",
    "TimelineOptions",
    "Tokens",
    "Workers",
    "__version__",
    "ablate",
    "atlas",
    "batch",
    "circuits",
    "compare",
    "compare_heads",
    "compare_models",
    "compare_pictures",
    "compare_texts",
    "cost",
    "describe",
    "heads",
    "heatmap",
    "load",
    "load_ablation",
    "load_circuits",
    "load_comparison",
    "load_findings",
    "load_pooled",
    "load_record",
    "load_relations",
    "load_rollout",
    "load_timeline",
    "own_decoder",
    "page",
    "picture_heads",
    "retrieval_heads",
    "sound_heads",
    "picture_heatmap",
    "picture_rollout",
    "pooled_heatmap",
    "prune",
    "record_from_arrays",
    "relations",
    "rollout",
    "sound_heatmap",
    "split",
    "split_example",
    "timeline",
    "trace",
    "trace_example",
    "widget",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'attnscope' has no attribute {name!r}")
    import functools
    import importlib

    module, attribute = _PUBLIC[name].split(":")
    value = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
