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
    links["case→parent"].best  # the head that best expresses it: (layer, head)

Importing it loads no torch; the first use of a model does.
"""

from typing import TYPE_CHECKING, Any

from attnscope.version import VERSION as __version__

if TYPE_CHECKING:
    from attnscope.annotated import AnnotatedCorpus, AnnotatedText, Link
    from attnscope.core.attention.multihead import MultiHeadAttention
    from attnscope.corpus import Corpus
    from attnscope.corpus.pairs import Pairs
    from attnscope.errors import AttnscopeError
    from attnscope.models import load
    from attnscope.models.captured.writing import CapturedText
    from attnscope.models.own.decoder import own_decoder
    from attnscope.records import AttentionMap, Heatmap, Tokens, record_from_arrays
    from attnscope.records import load as load_record
    from attnscope.records.ablation import Ablation
    from attnscope.records.atlas.record import Atlas
    from attnscope.records.batches import Batch
    from attnscope.records.circuits import Circuits
    from attnscope.records.comparison import (
        HeadComparison,
        MinimalPair,
        ModelComparison,
        PickedHeads,
        PicturePair,
    )
    from attnscope.records.heads.findings import Findings
    from attnscope.records.maps.pooled import PooledHeatmap
    from attnscope.records.maps.rollouts import Rollout
    from attnscope.records.patch import Patching
    from attnscope.records.relations.record import Relations
    from attnscope.records.timeline import Timeline
    from attnscope.records.why.heads import WhyHeads
    from attnscope.records.why.score import Why
    from attnscope.studies.ablation.lines import fit_lines
    from attnscope.studies.ablation.options import AblateOptions, PruneOrder
    from attnscope.studies.ablation.pruning import prune
    from attnscope.studies.ablation.replacing import replaced
    from attnscope.studies.ablation.study import ablate
    from attnscope.studies.atlas.options import AtlasOptions
    from attnscope.studies.atlas.study import atlas
    from attnscope.studies.batch.study import batch
    from attnscope.studies.batch.worker import BatchOptions
    from attnscope.studies.circuits.options import CircuitsOptions
    from attnscope.studies.circuits.study import circuits
    from attnscope.studies.compare.options import CompareOptions
    from attnscope.studies.compare.pictures import compare_pictures
    from attnscope.studies.compare.study import compare, compare_models
    from attnscope.studies.compare.texts import compare_heads, compare_texts
    from attnscope.studies.describe.sample import DescribeOptions
    from attnscope.studies.describe.study import describe
    from attnscope.studies.heads.needles import retrieval_heads
    from attnscope.studies.heads.options import HeadsOptions, NeedleOptions, StreamingOptions
    from attnscope.studies.heads.streaming import check_streaming
    from attnscope.studies.heads.study import heads
    from attnscope.studies.maps.page import page
    from attnscope.studies.maps.pooled import pooled_heatmap
    from attnscope.studies.maps.rollout import picture_rollout, rollout
    from attnscope.studies.maps.study import heatmap, picture_heatmap, sound_heatmap
    from attnscope.studies.patch.options import PatchOptions
    from attnscope.studies.patch.study import patch
    from attnscope.studies.relations.options import RelationsOptions
    from attnscope.studies.relations.study import relations
    from attnscope.studies.running.workers import Workers
    from attnscope.studies.senses.study import picture_heads, sound_heads
    from attnscope.studies.teaching.cost import cost
    from attnscope.studies.teaching.options import SplitOptions
    from attnscope.studies.teaching.split import split, split_example
    from attnscope.studies.teaching.trace import trace, trace_example
    from attnscope.studies.timeline.options import TimelineOptions
    from attnscope.studies.timeline.study import timeline
    from attnscope.studies.timeline.watch import HeadWatch
    from attnscope.studies.why.heads import why_heads
    from attnscope.studies.why.study import why
    from attnscope.views.export.formats import export
    from attnscope.views.page import Page
    from attnscope.views.pages.notebook import widget

_PUBLIC = {name: (module, name) for module, names in {
    "annotated": ("AnnotatedCorpus", "AnnotatedText", "Link"),
    "core.attention.multihead": ("MultiHeadAttention",),
    "corpus": ("Corpus",),
    "corpus.pairs": ("Pairs",),
    "errors": ("AttnscopeError",),
    "models": ("load",),
    "models.captured.writing": ("CapturedText",),
    "models.own.decoder": ("own_decoder",),
    "records": ("AttentionMap", "Heatmap", "Tokens", "record_from_arrays"),
    "records.ablation": ("Ablation",),
    "records.atlas.record": ("Atlas",),
    "records.batches": ("Batch",),
    "records.circuits": ("Circuits",),
    "records.comparison": ("HeadComparison", "MinimalPair", "ModelComparison", "PickedHeads", "PicturePair"),
    "records.heads.findings": ("Findings",),
    "records.maps.pooled": ("PooledHeatmap",),
    "records.patch": ("Patching",),
    "records.relations.record": ("Relations",),
    "records.maps.rollouts": ("Rollout",),
    "records.timeline": ("Timeline",),
    "records.why.heads": ("WhyHeads",),
    "records.why.score": ("Why",),
    "studies.ablation.lines": ("fit_lines",),
    "studies.ablation.options": ("AblateOptions", "PruneOrder"),
    "studies.ablation.replacing": ("replaced",),
    "studies.ablation.study": ("ablate",),
    "studies.atlas.options": ("AtlasOptions",),
    "studies.atlas.study": ("atlas",),
    "studies.batch.study": ("batch",),
    "studies.batch.worker": ("BatchOptions",),
    "studies.circuits.options": ("CircuitsOptions",),
    "studies.circuits.study": ("circuits",),
    "studies.compare.options": ("CompareOptions",),
    "studies.compare.study": ("compare", "compare_models"),
    "studies.compare.pictures": ("compare_pictures",),
    "studies.compare.texts": ("compare_heads", "compare_texts"),
    "studies.teaching.cost": ("cost",),
    "studies.describe.sample": ("DescribeOptions",),
    "studies.describe.study": ("describe",),
    "studies.timeline.watch": ("HeadWatch",),
    "studies.heads.options": ("HeadsOptions", "NeedleOptions", "StreamingOptions"),
    "studies.heads.streaming": ("check_streaming",),
    "studies.heads.study": ("heads",),
    "studies.maps.study": ("heatmap", "picture_heatmap", "sound_heatmap"),
    "studies.heads.needles": ("retrieval_heads",),
    "studies.maps.page": ("page",),
    "studies.maps.pooled": ("pooled_heatmap",),
    "studies.ablation.pruning": ("prune",),
    "studies.patch.options": ("PatchOptions",),
    "studies.patch.study": ("patch",),
    "studies.relations.options": ("RelationsOptions",),
    "studies.relations.study": ("relations",),
    "studies.maps.rollout": ("picture_rollout", "rollout"),
    "studies.senses.study": ("picture_heads", "sound_heads"),
    "studies.teaching.options": ("SplitOptions",),
    "studies.teaching.split": ("split", "split_example"),
    "studies.timeline.options": ("TimelineOptions",),
    "studies.timeline.study": ("timeline",),
    "studies.why.heads": ("why_heads",),
    "studies.why.study": ("why",),
    "studies.teaching.trace": ("trace", "trace_example"),
    "studies.running.workers": ("Workers",),
    "views.pages.notebook": ("widget",),
    "views.export.formats": ("export",),
    "views.page": ("Page",),
}.items() for name in names} | {"load_record": ("records", "load")}  # fmt: skip
"""Where each name is defined: the module, and what it is called there."""

__all__ = [
    "AblateOptions", "Ablation", "AnnotatedCorpus", "AnnotatedText", "Atlas", "AtlasOptions", "AttentionMap",
    "AttnscopeError", "Batch", "BatchOptions", "CapturedText", "Circuits", "CircuitsOptions", "CompareOptions",
    "Corpus", "DescribeOptions", "Findings", "HeadComparison", "HeadWatch", "HeadsOptions", "Heatmap", "Link",
    "MinimalPair", "ModelComparison", "MultiHeadAttention", "NeedleOptions", "Page", "PickedHeads", "PicturePair",
    "PooledHeatmap", "PruneOrder", "Relations", "RelationsOptions", "Rollout", "SplitOptions", "Timeline",
    "TimelineOptions", "Tokens", "Why", "WhyHeads", "Workers", "__version__", "ablate", "atlas", "batch", "circuits",
    "compare", "compare_heads", "compare_models", "compare_pictures", "compare_texts", "cost", "describe",
    "fit_lines", "heads", "heatmap", "load", "load_record", "own_decoder", "page",
    "picture_heads", "picture_heatmap", "picture_rollout", "pooled_heatmap", "prune", "record_from_arrays",
    "relations", "replaced", "retrieval_heads", "rollout", "sound_heads", "sound_heatmap", "split", "split_example",
    "timeline", "trace", "trace_example", "why", "why_heads", "widget", "Pairs", "PatchOptions", "Patching",
    "patch", "StreamingOptions", "check_streaming", "export",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'attnscope' has no attribute {name!r}")
    import functools
    import importlib

    module, attribute = _PUBLIC[name]
    value = functools.reduce(getattr, attribute.split("."), importlib.import_module(f"attnscope.{module}"))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
