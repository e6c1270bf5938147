"""From files of text to findings about heads, and from findings to files."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from attnscope.core.questions.written import WRITTEN
from attnscope.corpus import Corpus, CorpusText, repeat_probe
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.model import Model, example_tokens
from attnscope.records.heads.findings import Findings
from attnscope.records.heads.query import HeadQuery, names_for
from attnscope.records.relations.record import with_relations
from attnscope.studies.ablation.causal import with_effects
from attnscope.studies.describe.own_features import own_features
from attnscope.studies.describe.study import DescribeOptions
from attnscope.studies.heads.needles import ROLE, NeedleOptions, retrieval_heads
from attnscope.studies.heads.roles import RULES, thresholds_from
from attnscope.studies.heads.study import HeadsOptions, Weigh, heads
from attnscope.studies.inputs.options import LoadOptions, TextsWanted
from attnscope.studies.inputs.texts import Report, scale_report
from attnscope.studies.relations.order import relations_of, require_relations
from attnscope.studies.running.late import try_step, whole
from attnscope.studies.running.workers import Workers
from attnscope.studies.senses.study import picture_heads, sound_heads

PROBE_TEXTS, PROBE_LENGTH, PROBE_SEED = 50, 50, 0


@dataclass(frozen=True)
class StudyOrder:
    """What the command line asks for; see `attnscope heads --help`."""

    texts: TextsWanted
    probe: str | None
    thresholds: tuple[str, ...]
    measures: str | None
    chunk: int | None
    stride: int | None
    frequencies: Path | None
    weigh: Weigh
    control: str | None
    shard: str
    relations: Path | None = None
    causal: bool = False
    writes: bool = False
    describe: DescribeOptions | None = None
    where: str | None = None
    needles: NeedleOptions | None = None


def study(
    spec: str, order: StudyOrder, loading: LoadOptions, report: Report | None, workers: Workers | None = None
) -> Findings:
    """Loads a model, and studies its heads on what was asked for.

    Raises:
        AttnscopeError: Anything that the user can mend.
    """
    if order.needles is not None:
        return _study_needles(spec, order, loading, report, workers)
    options = heads_options(order)
    if order.causal and options.shard != (1, 1):
        raise UsageError("heads are taken out in a whole study, not in a shard", "leave out --causal or --shard")
    corpus = _corpus(order)
    if order.relations is not None:
        if options.shard != (1, 1):
            raise UsageError("the roles of relations do not outlive a merge", "give --relations without --shard")
        require_relations(order.relations)
    require_names(order)
    if order.writes:
        loading = loading.with_head(spec)
        workers = workers and replace(workers, loading=loading)
    model = loading.load(spec)
    texts = corpus if corpus is not None else probe_texts(model)
    n_passes = 1 + order.causal
    found = heads(model, texts, options, scale_report(report, 0, n_passes), workers)
    # What comes now may fail: what has been measured is written all the same.
    if order.causal and whole(found):
        found = try_step(
            found, "--causal", lambda known: with_effects(known, model, texts, scale_report(report, 1, n_passes))
        )
    if (annotated := order.relations) is not None:
        found = try_step(
            found, "--relations", lambda known: with_relations(known, relations_of(model, annotated, report))
        )
    return found


def heads_options(order: StudyOrder) -> HeadsOptions:
    """How heads are to be studied; what is none of features is said before a model runs.

    Raises:
        UsageError: A threshold, chunk, stride, shard, control or feature is none.
    """
    own_features(order.describe.features if order.describe else ())
    return HeadsOptions(
        thresholds=thresholds_from(order.thresholds),
        chunk=_at_least_one("--chunk", order.chunk),
        stride=_at_least_one("--stride", order.stride),
        shard=_shard(order.shard),
        frequencies=order.frequencies,
        control=_is_untrained(order.control),
        describe=order.describe,
        writes=order.writes,
        weigh=order.weigh,
    )


@dataclass(frozen=True)
class Senses:
    """Photos, and a question about each; or recordings with the transcript of the only one: files and patterns."""

    images: Sequence[str] = ()
    audio: Sequence[str] = ()
    text: str | None = None
    where: str | None = None

    @property
    def counted(self) -> tuple[str, ...]:
        """What is counted as it is studied, in the plural."""
        return ("pictures", "words" if self.text else "patches") if self.images else ("recordings",)


def study_senses(
    spec: str, given: Senses, measures: str | None, loading: LoadOptions, report: Report | None
) -> Findings:
    """Loads a model that sees or hears, and studies its heads on files; as `study`.

    Raises:
        AttnscopeError: Anything that the user can mend.
    """
    from attnscope.core.senses.look_measures import LOOK_MEASURES
    from attnscope.core.senses.picture_measures import PICTURE_MEASURES
    from attnscope.core.senses.sound_measures import SOUND_MEASURES

    pictures = PICTURE_MEASURES if given.text is None else LOOK_MEASURES
    known = tuple(pictures if given.images else SOUND_MEASURES)
    _require_named(measures, known)
    if given.where is not None:
        HeadQuery(given.where).require_known(names_for((), known, False))
    model = loading.load(spec)
    if given.images:
        return picture_heads(model, list(given.images), report, text=given.text)
    return sound_heads(model, list(given.audio), given.text, report)


def _study_needles(
    spec: str, order: StudyOrder, loading: LoadOptions, report: Report | None, workers: Workers | None
) -> Findings:
    """Loads a model, and looks for the heads by which it finds needles in texts, or in random tokens; as `study`."""
    assert order.needles is not None
    beside = {
        "--chunk": order.chunk, "--stride": order.stride, "--frequencies": order.frequencies,
        "--control": order.control, "--relations": order.relations, "--writes": order.writes, "--workers": workers,
        "--shard": order.shard != "1/1", "--feature": order.describe is not None and order.describe.features,
        "--describe": order.describe is not None and order.describe.heads, "--weigh": order.weigh != "texts",
    }  # fmt: skip
    for option, given in beside.items():
        if given:
            raise UsageError(f"{option} cannot be given beside --probe needle", "leave out one of them")
    known = order.needles.measure_names
    _require_named(order.measures, known)
    if order.where is not None:
        HeadQuery(order.where).require_known(names_for((ROLE,), known, False))
    corpus = order.texts.corpus() if order.texts.given else None
    return retrieval_heads(loading.load(spec), corpus, order.needles, report)


def _corpus(order: StudyOrder) -> Corpus | list[str] | None:
    """The texts that were asked for; None for the probe."""
    if order.probe is None:
        return order.texts.corpus()
    if order.texts.given:
        raise UsageError("give one of TEXT, --file and --probe", 'such as --file "corpus/*.txt"')
    if order.probe != "repeat":
        raise UsageError(f"there is no probe {order.probe!r}", "there are: repeat, needle")
    return None


def require_names(order: StudyOrder) -> None:
    """Refuses measures that do not exist, and conditions with names that findings will not have.

    Before the model runs for minutes; the roles of relations are not known before.
    """
    from attnscope.core.measures import FROM_OFFSETS, measure_names

    measures = (*measure_names(), *(WRITTEN if order.writes else ()), FROM_OFFSETS)
    _require_named(order.measures, measures)
    if order.where is not None and order.relations is None:
        roles = tuple(name for name, rule in RULES.items() if order.writes or not rule.does)
        HeadQuery(order.where).require_known(names_for(roles, measures, order.describe is not None))


def _require_named(given: str | None, known: Sequence[str]) -> None:
    for name in () if given in (None, "all") else [name.strip() for name in str(given).split(",")]:
        if name not in known:
            raise UsageError(f"there is no measure {name!r}", f"choose from {', '.join(known)}")


def _at_least_one(option: str, number: int | None) -> int | None:
    if number is not None and number < 1:
        raise UsageError(f"{option} is {number}", "it counts tokens, and is at least 1")
    return number


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


def _shard(given: str) -> tuple[int, int]:
    number, _, of = given.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise UsageError(f"there is no shard {given!r}", "shards are 1/8 to 8/8")
    return int(number), int(of)


def _is_untrained(control: str | None) -> bool:
    if control not in (None, "untrained"):
        raise UsageError(f"there is no control {control!r}", "there is: untrained")
    return control is not None
