"""What is each head for? A model and any amount of text in, measures and roles with their evidence out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from attnscope.core.plain_torch import with_plain_torch
from attnscope.corpus import (
    BLOCK,
    BLOCK_CHARACTERS,
    Copies,
    Corpus,
    CorpusText,
    TokenCounts,
    chunks,
    count_tokens,
    distinct,
    repeat_probe,
)
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.model import Model, example_tokens
from attnscope.options import refuse_beside
from attnscope.records.atlas.record import Atlas
from attnscope.records.heads.findings import Findings
from attnscope.records.heads.order import require_measures
from attnscope.results.completion import settle_corpus
from attnscope.studies.ablation.causal import with_effects
from attnscope.studies.describe.study import describe_texts, require_heads
from attnscope.studies.heads.measure_intervals import LEAST_ACTIVE
from attnscope.studies.heads.needles import retrieval_heads
from attnscope.studies.heads.options import RETRIEVAL, HeadsOptions, HeadsOrder
from attnscope.studies.heads.roles import FEWEST_TEXTS, LEAST_TEXTS, LEVEL, MARGIN, effective_texts, judge
from attnscope.studies.heads.rules import RULES, complete_thresholds
from attnscope.studies.inputs.options import LoadOptions, TextsWanted
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.texts import (
    Progress,
    Report,
    problems_of,
    scale_report,
    sha256_of,
    share_read,
    sources_of,
    texts_of,
)
from attnscope.studies.measuring.head_blocks import Frequencies, HeadMeasurer, HeadTotals
from attnscope.studies.running.late import add_steps
from attnscope.studies.running.memory import halving_note
from attnscope.studies.running.passes import Pass, Reading
from attnscope.studies.running.workers import Workers
from attnscope.studies.senses.study import picture_heads, sound_heads

Given = Corpus | str | Sequence[str] | Sequence[CorpusText]
R = TypeVar("R", Findings, Atlas)

PROBE_TEXTS, PROBE_LENGTH, PROBE_SEED = 50, 50, 0

_REPORT_EVERY = 32
"""Texts between two reports of the counting, which takes microseconds per text."""

_NOTHING = HeadTotals()


@with_plain_torch
def heads(
    model: Model,
    corpus: Given,
    options: HeadsOptions | None = None,
    report: Report | None = None,
    workers: Workers | None = None,
) -> Findings:
    """Measures every head of a model on a corpus, and gives it roles.

        model = attnscope.load("minilm")
        findings = attnscope.heads(model, attnscope.Corpus(["corpus/*.txt"], split="paragraph"))
        findings.heads[2].name, findings.heads[2].roles  # L0H2: previous_token, with its value, interval and q
        findings.grid("encoder", "entropy_nats")  # (layer, head)
        findings.save("heads.npz")

    Memory does not grow with the corpus. It does not grow with the square of a text's length either, unless the model
    only has dense weights. Near-duplicates of an earlier text are dropped (`corpus["n_copies"]` counts them).

    An interruption (KeyboardInterrupt) ends the study. The record then covers the texts up to the last whole block, and
    says that it is incomplete. If a later step fails, `run["failures"]` says what.

    The decoder of an encoder-decoder writes the text that its encoder reads: it gets its start token first, then each
    token of the text. Its own heads and those of cross-attention are listed by kind. Measures that compare places in
    one text are undefined for cross-attention.

    Blocks are added in the order of the texts, so the same call gives the same numbers. torch rounds the sums of
    one text differently with another number of threads.

    With `workers`, the result is that of one process with as many threads. After an interruption, all finished blocks
    count. If three workers are lost over a block, `corpus["problems"]` lists it, and the other blocks are in the
    result.

    Args:
        model: A loaded model, see `attnscope.load`.
        corpus: What to run it on: a Corpus, or a list of texts.
        options: How.
        report: Called after each batch; with workers after each block.
        workers: Who studies the blocks; None = this process. They load the model by its name.

    Raises:
        AttnscopeError: There is no text, the model cannot be measured, or no worker can begin.
    """
    options = options or HeadsOptions()
    reading = open_reading(model, corpus, options, workers)
    findings = study_heads(reading, options, scale_report(report, 0, options.n_steps))[0]
    return add_effects(findings, reading, report) if options.causal else findings


def study(
    spec: str,
    texts: TextsWanted,
    order: HeadsOrder,
    loading: LoadOptions,
    report: Report | None,
    workers: Workers | None = None,
) -> Findings:
    """Loads a model, and studies its heads on texts, repeated tokens, needles, photos or recordings.

    Names that the findings will not have are refused before the model loads.

    Raises:
        AttnscopeError: Anything that the user can mend.
    """
    options = order.heads
    if order.image or order.audio:
        from attnscope.core.senses.picture_measures import PICTURE_MEASURES
        from attnscope.core.senses.sound_measures import SOUND_MEASURES

        names = PICTURE_MEASURES if order.image else SOUND_MEASURES
        require_measures(order.measures, tuple(names))
        model = loading.load(spec)
        if order.image:
            return picture_heads(model, list(order.image), report)
        return sound_heads(model, list(order.audio), texts.text, report)
    if order.probe == "needle":
        refuse_beside(
            "--probe needle",
            replace(options, thresholds={}, causal=False, describe=None),
            workers=workers,
            describe=options.describe and options.describe.heads,
        )
        threshold = complete_thresholds(options.thresholds, {RETRIEVAL: order.needles.threshold})[RETRIEVAL]
        needles = replace(order.needles, threshold=threshold, ablate=options.causal)
        require_measures(order.measures, needles.measure_names)
        haystacks = texts.corpus() if texts.is_given else None
        return retrieval_heads(loading.load(spec), haystacks, needles, report)
    if order.probe is not None and texts.is_given:
        raise UsageError("give one of TEXT, --file and --probe", 'such as --file "corpus/*.txt"')
    corpus: Corpus | list[str] = []
    if order.probe is None:
        corpus = texts.corpus()
    require_names(options, order.measures)
    model = loading.load(spec)
    if order.probe is not None:
        return heads(model, probe_texts(model), options, report, workers)
    return heads(model, corpus, options, report, workers)


def require_names(options: HeadsOptions, measures: str | None) -> None:
    """Refuse roles and measures that do not exist, before the model runs for minutes."""
    from attnscope.core.measures.catalogue import FROM_OFFSETS, measure_names

    complete_thresholds(options.thresholds)
    require_measures(measures, (*measure_names(), FROM_OFFSETS))


def probe_texts(model: Model, seed: int = PROBE_SEED) -> list[CorpusText]:
    """Repeated random tokens of the model's own vocabulary, between its special tokens."""
    ordinary = model.tokenizer.ordinary_ids()
    if not ordinary:
        raise AttnscopeError(f"the vocabulary of {model.info.name} is not known", "give texts instead of --probe")
    example = example_tokens(model.tokenizer)
    first, last = np.flatnonzero(~example.special)[[0, -1]]
    before, after = example.ids[:first].tolist(), example.ids[last + 1 :].tolist()
    return list(repeat_probe(ordinary, PROBE_TEXTS, PROBE_LENGTH, seed, before=before, after=after))


def open_reading(model: Model, corpus: Given, options: HeadsOptions, workers: Workers | None) -> Reading:
    """The model and its texts, as all passes of a study of heads read them."""
    return Reading(
        model=model, texts=texts_of(corpus, model), chunk=options.chunk, stride=options.stride,
        block=BLOCK, workers=workers,
    )  # fmt: skip


def add_effects(record: R, reading: Reading, report: Report | None) -> R:
    """Add what changes without each head that has a role; nothing to a record where something failed before."""
    step = partial(with_effects, reading=reading, report=scale_report(report, 1, 2))
    return add_steps(record, [("--causal", step)])


def study_heads(
    reading: Reading,
    options: HeadsOptions,
    report: Report | None = None,
    measurer: Callable[..., HeadMeasurer] = HeadMeasurer,
    nothing: HeadTotals = _NOTHING,
) -> tuple[Findings, HeadTotals]:
    """As `heads`, by a measurer that may keep more of each block; also what all blocks of the model came to.

    `measurer` takes the arguments of `HeadMeasurer`, and is pickled if there are workers. `nothing` is what it makes of
    no text.
    """
    model, texts = reading.model, reading.texts
    thresholds = _require_measurable(reading, options)
    counts, n_copies = _count_corpus(reading, report)
    frequencies = Frequencies.of_counts(counts)
    chosen = _describe(options, thresholds)
    # Of the reading that is known to have come to the end.
    sha256 = sha256_of(texts)
    problems = problems_of(texts)
    make = partial(
        _make_measurer, measurer, frequencies=frequencies, special=reading.special, chunk=options.chunk,
        stride=options.stride,
    )  # fmt: skip
    runs = [(reading, make)]
    if options.control and reading.workers is None:
        runs.append((replace(reading, model=model.untrained(options.seed)), make))
    elif options.control:
        runs.append((reading, partial(make, seed=options.seed)))
    reports = [scale_report(report, number, len(runs)) for number in range(len(runs))]
    passes: list[Pass[HeadTotals]] = []
    for (of, make_measurer), step in zip(runs, reports, strict=True):
        passes.append(of.run(make_measurer, nothing, step, "the study of a later text", keeps="first"))
        if not passes[-1].complete:
            break
    done, complete = passes[0].done, passes[-1].complete
    control = passes[1].done if len(passes) > 1 else HeadTotals()
    missing = [problem for each in passes for problem in (*each.lost, *each.done.left_out.problems(model.info))]
    done.left_out.require_some_left(done.n_texts, model.info)
    if complete and not done.n_tokens and not missing:
        raise AttnscopeError("no text is left: none has any token", "give texts with words in them")
    studied = {
        "sources": sources_of(texts),
        "n_texts": done.n_texts,
        "n_tokens": done.n_tokens,
        "n_chunked": done.n_chunked,
        "n_copies": n_copies,
        "sha256": sha256,
        "problems": [*problems, *missing],
    }
    notes = _notes(model, done)
    run = run_of(model.info, [*notes, *passes[0].notes])
    threads = reading.workers.threads if reading.workers else _n_threads()
    run |= {"seed": options.seed if options.control else None, "threads": threads}
    if failures := [failed for each in passes for failed in each.failures]:
        run["failures"] = failures
    tallies = list(done.tallies.values())
    effective = max(map(effective_texts, tallies), default=0.0)
    findings = Findings(
        run=run,
        corpus={**settle_corpus(studied, interrupted=not complete), "effective_texts": effective},
        options=chosen,
        heads=judge(tallies, thresholds, done.n_texts),
        control=judge(list(control.tallies.values()), thresholds, done.n_texts),
    )
    steps: list[tuple[str, Callable[[Findings], Findings]]] = []
    if options.describe is not None:
        how = replace(options.describe, chunk=options.chunk, stride=options.stride)
        steps.append((
            "describing the heads",
            lambda record: replace(record, descriptions=describe_texts(model, texts, frequencies, how)),
        ))  # fmt: skip
    return add_steps(findings, steps), done


def _make_measurer(
    measurer: Callable[..., HeadMeasurer], model: Model, *, seed: int | None = None, **how: Any
) -> HeadMeasurer:
    """A measurer of a model, or with a seed of its untrained twin."""
    return measurer(model if seed is None else model.untrained(seed), **how)


def _require_measurable(reading: Reading, options: HeadsOptions) -> dict[str, float]:
    """The thresholds of roles; an AttnscopeError before anything is read where nothing could come of it."""
    thresholds = complete_thresholds(options.thresholds)
    model = reading.model
    if options.describe is not None:
        require_heads(model, options.describe.heads)
    # Chunks that do not fit the model are refused here.
    chunks(example_tokens(model.tokenizer), limit=model.info.max_tokens, chunk=reading.chunk, stride=reading.stride)
    return thresholds


def _notes(model: Model, done: HeadTotals) -> list[str]:
    notes = []
    if len(model.info.kinds) > 1:
        notes.append("The decoder was given the text that the encoder read, as if it were to write it again.")
    if model.info.path == "eager":
        notes.append(
            "Measured on the model's own dense weights: memory grows with the square of a text's length, and what "
            "needs the values (value_weighted, norm_weighted) is undefined."
        )
    if done.longest_of is not None:
        notes.append(
            f"Interrupted in the first block of texts, which begins with the longest: these are {done.n_texts:,} of "
            f"its {done.longest_of:,}."
        )
    if done.halved_to is not None:
        notes.append(halving_note(done.halved_to))
    is_seen = model.info.path != "eager"
    projections = model.output_projections() if is_seen else {}
    places = [(kind, layer) for kind, tally in done.tallies.items() for layer in tally.layers if is_seen]
    missing = [f"{kind} layer {layer}" for kind, layer in places if (kind, layer) not in projections]
    if missing:
        which = missing[0] if len(missing) == 1 else f"{len(missing)} layers, the first of them {missing[0]}"
        notes.append(
            f"norm_weighted is undefined in {which}: the output projection is not known (what the heads put out is "
            "changed before it, or its weights are quantised, adapted, or not in memory)."
        )
    return notes


def _describe(options: HeadsOptions, thresholds: Mapping[str, float]) -> dict[str, Any]:
    """What was chosen, and what names mean."""
    from attnscope.core.measures.catalogue import MEASURES

    return {
        "level": LEVEL,
        "fewest_texts": FEWEST_TEXTS,
        "least_texts": LEAST_TEXTS,
        "least_active": LEAST_ACTIVE,
        "margin": MARGIN,
        "chunk": options.chunk,
        "stride": options.stride,
        "block": BLOCK,
        "block_characters": BLOCK_CHARACTERS,
        "control": f"untrained, seed {options.seed}" if options.control else None,
        "roles": {name: rule.describe(thresholds[name]) for name, rule in RULES.items()},
        "measures": {name: measure.describe() for name, measure in MEASURES.items()},
    }


def _count_corpus(reading: Reading, report: Report | None) -> tuple[TokenCounts, int]:
    """Return how often each token comes in the whole corpus without copies, and how many texts are copies."""
    texts = reading.texts
    copies = Copies()

    def tell(n_texts: int, n_tokens: int) -> None:
        if report is not None and n_texts % _REPORT_EVERY == 0:
            report(Progress(n_texts, n_tokens, share_read(texts), "counting tokens"))

    counts = count_tokens(distinct(texts, copies), reading.model.tokenizer.encode, reading.special, tell)
    return counts, copies.n


def _n_threads() -> int:
    import torch

    return torch.get_num_threads()
