"""From files of text to findings about heads, and from findings to files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attnscope.corpus import Corpus, CorpusText, repeat_probe
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.model import Model, example_tokens
from attnscope.records import findings as records
from attnscope.records.findings import Findings
from attnscope.records.parquet import arrow
from attnscope.records.relations import with_relations
from attnscope.studies.causal import with_effects
from attnscope.studies.heads import HeadsOptions, heads
from attnscope.studies.inputs import LoadOptions, TextsWanted, formats_again, named_formats, require_writable
from attnscope.studies.interrupted import settle
from attnscope.studies.late import try_step, whole
from attnscope.studies.merging import merged
from attnscope.studies.picture_heads import picture_heads
from attnscope.studies.relation_files import relations_of, require_relations
from attnscope.studies.roles import thresholds_from
from attnscope.studies.sound_heads import sound_heads
from attnscope.studies.texts import Report, scaled
from attnscope.studies.workers import Workers
from attnscope.views.figures import FIGURE_FORMATS

FORMATS = (*FIGURE_FORMATS, "npz", "csv", "json", "parquet")
USUAL_FORMATS = ("npz", "csv", "png")
PROBE_TEXTS, PROBE_LENGTH, PROBE_SEED = 50, 50, 0
RECORD = "heads"


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
    control: str | None
    shard: str
    out: Path | None
    formats: str | None
    relations: Path | None = None
    causal: bool = False


def study(
    spec: str, order: StudyOrder, loading: LoadOptions, report: Report | None, workers: Workers | None = None
) -> tuple[Findings, list[Path]]:
    """Loads a model, studies its heads on what was asked for, and writes the files.

    Raises:
        AttnscopeError: Anything that the user can mend.
    """
    formats = _formats_for(order.out, order.formats)
    options = HeadsOptions(
        thresholds=thresholds_from(order.thresholds),
        chunk=_at_least_one("--chunk", order.chunk),
        stride=_at_least_one("--stride", order.stride),
        shard=_shard(order.shard),
        frequencies=order.frequencies,
        control=_is_untrained(order.control),
    )
    if order.causal and options.shard != (1, 1):
        raise UsageError("heads are taken out in a whole study, not in a shard", "leave out --causal or --shard")
    corpus = _corpus(order)
    if order.relations is not None:
        if options.shard != (1, 1):
            raise UsageError("the roles of relations do not outlive a merge", "give --relations without --shard")
        require_relations(order.relations)
    if order.out is not None:
        require_writable(order.out)
    _require_measures(order.measures)
    model = loading.load(spec)
    texts = corpus if corpus is not None else _probe(model)
    found = heads(model, texts, options, scaled(report, 0, 2 if order.causal else 1), workers)
    # What comes now may fail: what has been measured is written all the same.
    if order.causal and whole(found):
        found = try_step(found, "--causal", lambda known: with_effects(known, model, texts, scaled(report, 1, 2)))
    if (annotated := order.relations) is not None:
        found = try_step(
            found, "--relations", lambda known: with_relations(known, relations_of(model, annotated, report))
        )
    found, out = settle(found, order.out, RECORD)
    return found, [] if out is None else write(found, out, formats)


@dataclass(frozen=True)
class Senses:
    """Photos, or recordings with the transcript of the only one: files and patterns."""

    images: Sequence[str] = ()
    audio: Sequence[str] = ()
    text: str | None = None


def study_senses(
    spec: str, given: Senses, measures: str | None, files: tuple[Path | None, str | None], loading: LoadOptions,
    report: Report | None,
) -> tuple[Findings, list[Path]]:  # fmt: skip
    """Loads a model that sees or hears, studies its heads on files, and writes what comes of it; as `study`.

    Args:
        spec: Which model.
        given: Photos or recordings.
        measures: The measures that are to be printed.
        files: The folder and the formats.
        loading: How the model is loaded.
        report: Called after each photo or recording.

    Raises:
        AttnscopeError: Anything that the user can mend.
    """
    from attnscope.core.picture_measures import PICTURE_MEASURES
    from attnscope.core.sound_measures import SOUND_MEASURES

    out, formats = files[0], _formats_for(*files)
    _require_named(measures, tuple(PICTURE_MEASURES if given.images else SOUND_MEASURES))
    if out is not None:
        require_writable(out)
    model = loading.load(spec)
    if given.images:
        found = picture_heads(model, list(given.images), report)
    else:
        found = sound_heads(model, list(given.audio), given.text, report)
    found, out = settle(found, out, RECORD)
    return found, [] if out is None else write(found, out, formats)


def merge_files(parts: Sequence[Path], out: Path, formats: str | None) -> tuple[Findings, list[Path]]:
    """Merges the records of shards, and writes the whole.

    Raises:
        AttnscopeError: A part is no record, or they do not belong together.
    """
    wanted = formats_from(formats)
    require_writable(out)
    paths = [part / f"{RECORD}.npz" if part.is_dir() else part for part in parts]
    found = merged([records.load(path) for path in paths], [str(path) for path in paths])
    return found, write(found, out, wanted)


def drawn_again(found: Findings, out: Path | None, formats: str | None) -> list[Path]:
    """Writes the files of findings that were saved before; `text` is what is printed anyway.

    Raises:
        AttnscopeError: There is no such format, or no folder for it.
    """
    wanted = formats_again(out, formats, FORMATS)
    return [] if out is None else write(found, out, wanted)


def write(found: Findings, out: Path, formats: Sequence[str]) -> list[Path]:
    """Writes findings into a folder; each file whole or not at all. What took the time is safe before it is drawn."""
    paths = [found.save(out / f"{RECORD}.{name}") for name in formats if name not in FIGURE_FORMATS]
    figures = [name for name in formats if name in FIGURE_FORMATS]
    if figures and found.heads:  # a shard may hold no text
        from attnscope.views.heads_figures import draw

        paths += draw(found, out, figures)
    return paths


def formats_from(given: str | None) -> tuple[str, ...]:
    """The formats in a list such as `npz,csv,png`; None = the usual ones.

    Raises:
        UsageError: There is no such format.
        AttnscopeError: pyarrow, which it needs, is not installed.
    """
    formats = USUAL_FORMATS if given is None else named_formats(given, FORMATS)
    if "parquet" in formats:
        arrow()  # before the model runs for minutes
    return formats


def _corpus(order: StudyOrder) -> Corpus | list[str] | None:
    """The texts that were asked for; None for the probe."""
    if order.probe is None:
        return order.texts.corpus()
    if order.texts.given:
        raise UsageError("give one of TEXT, --file and --probe", 'such as --file "corpus/*.txt"')
    if order.probe != "repeat":
        raise UsageError(f"there is no probe {order.probe!r}", "there is: repeat")
    return None


def _formats_for(out: Path | None, formats: str | None) -> tuple[str, ...]:
    """The formats, where there is a folder for files; refused where there is none."""
    if out is None and formats is not None:
        raise UsageError("there is no folder to write files to", "give one with --out, or leave out --format")
    return formats_from(formats)


def _require_measures(given: str | None) -> None:
    """Refuses measures that do not exist, before the model runs for minutes."""
    from attnscope.core.measures import FROM_OFFSETS, measure_names

    _require_named(given, (*measure_names(), FROM_OFFSETS))


def _require_named(given: str | None, known: Sequence[str]) -> None:
    for name in () if given is None else [name.strip() for name in given.split(",")]:
        if name not in known:
            raise UsageError(f"there is no measure {name!r}", f"choose from {', '.join(known)}")


def _at_least_one(option: str, number: int | None) -> int | None:
    if number is not None and number < 1:
        raise UsageError(f"{option} is {number}", "it counts tokens, and is at least 1")
    return number


def _probe(model: Model) -> list[CorpusText]:
    """Repeated random tokens of the model's own vocabulary, between its special tokens."""
    ordinary = model.tokenizer.ordinary_ids()
    if not ordinary:
        raise AttnscopeError(f"the vocabulary of {model.info.name} is not known", "give texts instead of --probe")
    example = example_tokens(model.tokenizer)
    first = int(np.flatnonzero(~example.special)[0])
    last = int(np.flatnonzero(~example.special)[-1])
    ends = example.ids[:first].tolist(), example.ids[last + 1 :].tolist()
    return list(repeat_probe(ordinary, PROBE_TEXTS, PROBE_LENGTH, PROBE_SEED, before=ends[0], after=ends[1]))


def _shard(given: str) -> tuple[int, int]:
    number, _, of = given.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise UsageError(f"there is no shard {given!r}", "shards are 1/8 to 8/8")
    return int(number), int(of)


def _is_untrained(control: str | None) -> bool:
    if control not in (None, "untrained"):
        raise UsageError(f"there is no control {control!r}", "there is: untrained")
    return control is not None
