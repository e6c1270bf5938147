"""From what a command line asks of heads to findings: of texts, repeated tokens, needles, photos or recordings."""

import re
from dataclasses import replace

import numpy as np

from attnscope.core.measures.written import WRITTEN
from attnscope.corpus import CorpusText, repeat_probe
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.model import Model, example_tokens
from attnscope.options import refuse_beside
from attnscope.records.heads.findings import Findings
from attnscope.records.heads.query import require_named
from attnscope.studies.describe.own_features import own_features
from attnscope.studies.heads.needles import retrieval_heads
from attnscope.studies.heads.options import RETRIEVAL, HeadsOptions, HeadsOrder
from attnscope.studies.heads.rules import RULES, complete_thresholds
from attnscope.studies.heads.study import heads
from attnscope.studies.inputs.options import LoadOptions, TextsWanted, all_texts
from attnscope.studies.inputs.texts import Report
from attnscope.studies.measuring.tally import ZONE
from attnscope.studies.running.workers import Workers
from attnscope.studies.senses.study import picture_heads, sound_heads

PROBE_TEXTS, PROBE_LENGTH, PROBE_SEED = 50, 50, 0


def study(
    spec: str,
    texts: TextsWanted,
    order: HeadsOrder,
    loading: LoadOptions,
    report: Report | None,
    workers: Workers | None = None,
) -> Findings:
    """Loads a model, and studies its heads on what was asked for.

    Raises:
        AttnscopeError: Anything that the user can mend.
    """
    if order.image or order.audio:
        return _study_senses(spec, texts.text, order, loading, report)
    if order.probe == "needle":
        return _study_needles(spec, texts, order, loading, report, workers)
    if order.probe is not None and texts.given:
        raise UsageError("give one of TEXT, --file and --probe", 'such as --file "corpus/*.txt"')
    corpus = None if order.probe else texts.corpus(spec)
    require_names(order.heads, order.measures, order.listing.only)
    if order.heads.writes:
        loading = loading.with_head(spec)
        workers = workers and replace(workers, loading=loading)
    model = loading.load(spec)
    return heads(
        model, probe_texts(model) if corpus is None else all_texts(model, corpus), order.heads, report, workers
    )


def _study_senses(
    spec: str, text: str | None, order: HeadsOrder, loading: LoadOptions, report: Report | None
) -> Findings:
    """Loads a model that sees or hears, and studies its heads on files; as `study`."""
    from attnscope.core.senses.look_measures import LOOK_MEASURES
    from attnscope.core.senses.picture_measures import PICTURE_MEASURES
    from attnscope.core.senses.sound_measures import SOUND_MEASURES

    pictures = PICTURE_MEASURES if text is None else LOOK_MEASURES
    require_named(order.measures, order.listing.only, tuple(pictures if order.image else SOUND_MEASURES))
    model = loading.load(spec)
    if order.image:
        return picture_heads(model, list(order.image), report, text=text)
    return sound_heads(model, list(order.audio), text, report)


def _study_needles(
    spec: str,
    texts: TextsWanted,
    order: HeadsOrder,
    loading: LoadOptions,
    report: Report | None,
    workers: Workers | None,
) -> Findings:
    """Loads a model, and looks for the heads by which it finds needles in texts, or in random tokens; as `study`."""
    asked, describe = order.heads, order.heads.describe
    refuse_beside(
        "--probe needle", replace(asked, thresholds={}, causal=False, describe=None), workers=workers,
        feature=describe and describe.features, describe=describe and describe.heads,
    )  # fmt: skip
    threshold = complete_thresholds(asked.thresholds, {RETRIEVAL: order.needles.threshold})[RETRIEVAL]
    options = replace(order.needles, threshold=threshold, ablate=asked.causal)
    require_named(order.measures, order.listing.only, options.measure_names, (RETRIEVAL,))
    corpus = texts.corpus() if texts.given else None
    return retrieval_heads(loading.load(spec), corpus, options, report)


def require_names(options: HeadsOptions, measures: str | None, where: str | None) -> None:
    """Refuses roles, features and measures that there are not, and conditions with names that findings will not have.

    Before the model runs for minutes; the roles of relations are not known before.
    """
    from attnscope.core.measures.catalogue import FROM_OFFSETS, measure_names

    complete_thresholds(options.thresholds)
    own_features(options.describe.features if options.describe else ())
    zones = re.findall(rf"{ZONE}\w+", f"{measures} {where}")  # what texts have is known when they are read
    known = (*measure_names(), *(WRITTEN if options.writes else ()), FROM_OFFSETS, *zones)
    roles = tuple(name for name, rule in RULES.items() if options.writes or not rule.does)
    require_named(measures, where if options.relations is None else None, known, roles, options.describe is not None)


def probe_texts(model: Model, seed: int = PROBE_SEED) -> list[CorpusText]:
    """Repeated random tokens of the model's own vocabulary, between its special tokens."""
    ordinary = model.tokenizer.ordinary_ids()
    if not ordinary:
        raise AttnscopeError(f"the vocabulary of {model.info.name} is not known", "give texts instead of --probe")
    example = example_tokens(model.tokenizer)
    first = int(np.flatnonzero(~example.special)[0])
    last = int(np.flatnonzero(~example.special)[-1])
    ends = example.ids[:first].tolist(), example.ids[last + 1 :].tolist()
    return list(repeat_probe(ordinary, PROBE_TEXTS, PROBE_LENGTH, seed, before=ends[0], after=ends[1]))
