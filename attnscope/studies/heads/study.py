"""Study the heads of a model on any amount of text: measures, roles with their evidence, and descriptions.

This module orders the steps. `measuring` runs the model, `roles` tests, and `studies.describe` describes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from attnscope.core.plain_torch import with_plain_torch
from attnscope.corpus import (
    BLOCK,
    BLOCK_CHARACTERS,
    Copies,
    Corpus,
    CorpusText,
    chunks,
    count_tokens,
    distinct,
    repeat_probe,
)
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.model import Model, example_tokens
from attnscope.options import refuse_beside
from attnscope.questions.heads import Heads, parse_measures
from attnscope.results.result import settle_corpus
from attnscope.studies.describe.rows import Drawing
from attnscope.studies.describe.study import add_descriptions, require_heads
from attnscope.studies.failures import add_step
from attnscope.studies.heads.causal import with_effects
from attnscope.studies.heads.measure_intervals import LEAST_ACTIVE
from attnscope.studies.heads.measuring import HeadMeasurer, HeadSums
from attnscope.studies.heads.needles import retrieval_heads
from attnscope.studies.heads.options import RETRIEVAL, HeadsOptions, HeadsOrder
from attnscope.studies.heads.roles import (
    FEWEST_TEXTS,
    LEAST_TEXTS,
    LEVEL,
    MARGIN,
    RULES,
    complete_thresholds,
    effective_texts,
    judge,
)
from attnscope.studies.inputs.options import LoadOptions, TextsWanted
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.texts import (
    Progress,
    Report,
    Texts,
    describe_texts,
    scale_report,
    share_read,
    special_ids,
    texts_of,
)
from attnscope.studies.run import Run, run
from attnscope.studies.senses.study import picture_heads, sound_heads
from attnscope.studies.workers import Workers

Given = Corpus | str | Sequence[str] | Sequence[CorpusText]
PROBE_TEXTS, PROBE_LENGTH, PROBE_SEED = 50, 50, 0

_REPORT_EVERY = 32
"""Texts between two reports of the counting, which takes microseconds per text."""


@with_plain_torch
def heads(
    model: Model,
    corpus: Given,
    options: HeadsOptions | None = None,
    report: Report | None = None,
    workers: Workers | None = None,
) -> Heads:
    """Measure every head of a model on a corpus, and give it roles.

        model = attnscope.load("minilm")
        found = attnscope.heads(model, attnscope.Corpus(["corpus/*.txt"], split="paragraph"))
        found["heads"]["role"]  # (head,): previous_token, …
        found.roles_of(found.row(0, 2)).to_pandas()  # the evidence: value, interval, q
        found["heads"].grid("entropy_nats", "encoder")  # (layer, head)
        found.save("heads.npz")

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
        corpus: The texts: a Corpus, or a list of texts.
        options: The choices of the study; None = the defaults.
        report: The function to call after each batch; with workers, after each block.
        workers: Who studies the blocks; None = this process. They load the model by its name.

    Raises:
        AttnscopeError: There is no text, the model cannot be measured, or no worker can begin.
    """
    options = options or HeadsOptions()
    texts = texts_of(corpus, model)
    findings = study_heads(model, texts, options, scale_report(report, 0, options.n_steps), workers)[0]
    return add_effects(findings, model, texts, report) if options.causal else findings


def study(
    spec: str,
    texts: TextsWanted,
    order: HeadsOrder,
    loading: LoadOptions,
    report: Report | None,
    workers: Workers | None = None,
) -> Heads:
    """Load a model, and study its heads on texts, repeated tokens, needles, photos or recordings.

    Names that the findings will not have are refused before the model loads.

    Raises:
        AttnscopeError: Anything that the user can mend.
    """
    options = order.heads
    # Photos and recordings.
    if order.image or order.audio:
        from attnscope.core.catalogue import PICTURE_MEASURES, SOUND_MEASURES

        names = PICTURE_MEASURES if order.image else SOUND_MEASURES
        parse_measures(order.measures, tuple(names))
        model = loading.load(spec)
        if order.image:
            return picture_heads(model, list(order.image), report)
        return sound_heads(model, list(order.audio), texts.text, report)
    # Needles in long texts, whose options are their own.
    if order.probe == "needle":
        refuse_beside(
            "--probe needle",
            replace(options, thresholds={}, describe=HeadsOptions().describe),
            workers=workers,
            pick=options.describe and options.describe.heads,
        )
        usual = {RETRIEVAL: order.needles.threshold}
        needles = replace(order.needles, threshold=complete_thresholds(options.thresholds, usual)[RETRIEVAL])
        parse_measures(order.measures, needles.measure_names)
        haystacks = texts.corpus() if texts.is_given else None
        return retrieval_heads(loading.load(spec), haystacks, needles, report)
    # Texts, or random tokens that repeat.
    if order.probe is not None and texts.is_given:
        raise UsageError("give one of TEXT, --file and --probe", 'such as --file "corpus/*.txt"')
    corpus = None if order.probe else texts.corpus()
    require_names(options, order.measures)
    model = loading.load(spec)
    return heads(model, probe_texts(model) if corpus is None else corpus, options, report, workers)


def require_names(options: HeadsOptions, measures: str | None) -> None:
    """Refuse roles and measures that do not exist, before the model runs for minutes."""
    from attnscope.core.catalogue import measure_names

    complete_thresholds(options.thresholds)
    parse_measures(measures, measure_names())


def probe_texts(model: Model, seed: int = PROBE_SEED) -> list[CorpusText]:
    """Return texts of repeated random tokens of the model's vocabulary, between its special tokens.

    Raises:
        AttnscopeError: The vocabulary is not known.
    """
    ordinary = model.tokenizer.ordinary_ids()
    if not ordinary:
        raise AttnscopeError(f"the vocabulary of {model.info.name} is not known", "give texts instead of --probe")
    # Special tokens stay around the random ones, as in any text.
    example = example_tokens(model.tokenizer)
    first, last = np.flatnonzero(~example.special)[[0, -1]]
    before, after = example.ids[:first].tolist(), example.ids[last + 1 :].tolist()
    return list(repeat_probe(ordinary, PROBE_TEXTS, PROBE_LENGTH, seed, before=before, after=after))


def add_effects(record: Heads, model: Model, texts: Texts, report: Report | None) -> Heads:
    """Add what changes without each head that has a role; nothing to a record where something failed before."""
    step = partial(with_effects, model=model, texts=texts, report=scale_report(report, 1, 2))
    return add_step(record, "--causal", step)


def study_heads(
    model: Model,
    texts: Texts,
    options: HeadsOptions,
    report: Report | None = None,
    workers: Workers | None = None,
    measurer: Callable[..., HeadMeasurer] = HeadMeasurer,
    nothing: HeadSums | None = None,
) -> tuple[Heads, HeadSums]:
    """Study heads as `heads` does, by a measurer that may keep more of each block; return its sums as well.

    `measurer` takes the arguments of `HeadMeasurer`, and is pickled if there are workers. `nothing` is what it makes of
    no text; None = sums of nothing.
    """
    thresholds = _require_measurable(model, options)
    special = special_ids(model)
    how = options.describe
    cut: dict[str, Any] = {"chunk": options.chunk, "stride": options.stride}
    # Read the corpus once, to count tokens and draw the texts that are described.
    drawing = Drawing(how.seed if how else 0)
    copies = Copies()
    drawn = drawing.watch(distinct(texts, copies)) if how else distinct(texts, copies)
    counts = count_tokens(drawn, model.tokenizer.encode, special, partial(_tell, report, texts))
    # Of the reading that is known to have come to the end.
    about = describe_texts(texts)
    read = {"n_copies": copies.n, "sha256": about["sha256"]}
    problems = about["problems"]
    # Descriptions need some rows of some texts: they are kept as these are measured.
    sample = drawing.sample(model, how, **cut) if how else []
    make = partial(
        _make_measurer,
        measurer,
        counts=counts,
        special=special,
        sampled={(unit.chunk.text, unit.chunk.number): unit.queries for unit in sample},
        **cut,
    )
    # Run the model, then its untrained twin if a control is asked for.
    makers = [make, partial(make, sampled={}, seed=options.seed)][: 1 + options.control]
    shared = (workers,) if workers else None
    runs: list[Run[HeadSums]] = []
    for number, make_measurer in enumerate(makers):
        step = scale_report(report, number, len(makers))
        none = nothing or HeadSums()
        runs.append(run(make_measurer, (model,), texts, none, block=BLOCK, workers=shared, report=step))
        if not runs[-1].complete:
            break
    # Gather the sums of both runs, and list the blocks that are missing.
    done = runs[0].done
    control = runs[1].done if len(runs) > 1 else HeadSums()
    complete = runs[-1].complete
    missing = [problem for each in runs for problem in each.problems(model.info)]
    done.left_out.require_some_left(done.n_texts, model.info)
    if complete and not done.n_tokens and not missing:
        raise AttnscopeError("no text is left: none has any token", "give texts with words in them")
    studied = runs[0].corpus(texts, model.info) | read | {"problems": [*problems, *missing]}
    # Say how it ran.
    about = run_of(model.info, [*_notes(model), *runs[0].notes])
    about |= {"seed": options.seed if options.control else None, "threads": _n_threads(workers)}
    if failures := [failed for each in runs for failed in each.failures]:
        about["failures"] = failures
    # Give roles. The control is judged by the same thresholds.
    tallies = list(done.tallies.values())
    studied["effective_texts"] = max(map(effective_texts, tallies), default=0.0)
    tables = judge(tallies, thresholds, done.n_texts)
    tables["control"] = judge(list(control.tallies.values()), thresholds, done.n_texts)["heads"]
    chosen = _describe(options, thresholds)
    findings = Heads(about, settle_corpus(studied, interrupted=not complete), chosen, tables)
    if how is None:
        return findings, done
    # Describe the heads by the rows that were kept of the sample.
    for unit in sample:
        unit.rows = done.rows.get((unit.chunk.text, unit.chunk.number), {})
    describe = partial(add_descriptions, model=model, sample=sample, counts=counts, options=how)
    return add_step(findings, "describing the heads", describe), done


def _tell(report: Report | None, texts: Texts, n_texts: int, n_tokens: int) -> None:
    """Report how far the counting of tokens is."""
    if report is not None and n_texts % _REPORT_EVERY == 0:
        report(Progress(n_texts, n_tokens, share_read(texts), "counting tokens"))


def _make_measurer(
    measurer: Callable[..., HeadMeasurer], model: Model, *, seed: int | None = None, **how: Any
) -> HeadMeasurer:
    """Return a measurer of a model, or with a seed of its untrained twin."""
    return measurer(model if seed is None else model.untrained(seed), **how)


def _require_measurable(model: Model, options: HeadsOptions) -> dict[str, float]:
    """Return the thresholds of roles; an AttnscopeError before anything is read where nothing could come of it."""
    thresholds = complete_thresholds(options.thresholds)
    if options.describe is not None:
        require_heads(model, options.describe.heads)
    # Chunks that do not fit the model are refused here.
    chunks(example_tokens(model.tokenizer), limit=model.info.max_tokens, chunk=options.chunk, stride=options.stride)
    return thresholds


def _notes(model: Model) -> list[str]:
    notes = []
    if len(model.info.kinds) > 1:
        notes.append("The decoder was given the text that the encoder read, as if it were to write it again.")
    if model.info.path == "eager":
        notes.append("Measured on the model's own dense weights: memory grows with the square of a text's length.")
    return notes


def _describe(options: HeadsOptions, thresholds: Mapping[str, float]) -> dict[str, Any]:
    """Return the choices of the study and the roles and measures that it knows, as the record lists them."""
    from attnscope.core.catalogue import measure_names

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
        "measures": list(measure_names()),
    }


def _n_threads(workers: Workers | None) -> int:
    import torch

    return workers.threads if workers else torch.get_num_threads()
