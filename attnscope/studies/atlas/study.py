"""Every head of a model with the texts that show what it does: a model and texts in, an `Atlas` out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np

from attnscope.core.plain_torch import with_plain_torch
from attnscope.corpus import Corpus, CorpusText
from attnscope.models.model import Model
from attnscope.records.atlas.evidence import require_evidence, with_records
from attnscope.records.atlas.record import FURTHEST, KEPT_MASS, MOST_KEYS, OUTSIDE_SINKS, Atlas, KeptText, join_examples
from attnscope.records.frame.shards import is_interrupted, settle_corpus
from attnscope.records.heads.findings import Findings
from attnscope.studies.atlas.options import CONTENT, AtlasOptions, AtlasOrder
from attnscope.studies.atlas.rows import Rows, Wanted, failing_texts, read_rows, units_of
from attnscope.studies.atlas.scores import CONTENT_WHAT, AtlasMeasurer, Place, ScoredFound, Scores
from attnscope.studies.heads.study import add_effects, open_reading, require_names, study_heads
from attnscope.studies.inputs.options import LoadOptions, TextsWanted, all_texts
from attnscope.studies.inputs.texts import Report, Texts, scale_report
from attnscope.studies.running.late import failure
from attnscope.studies.running.workers import Workers


@with_plain_torch
def atlas(
    model: Model,
    corpus: Corpus | str | Sequence[str] | Sequence[CorpusText],
    options: AtlasOptions | None = None,
    report: Report | None = None,
    workers: Workers | None = None,
) -> Atlas:
    """Measures every head as `heads` does, and collects the texts that show what it does.

        model = attnscope.load("minilm")
        atlas = attnscope.atlas(model, attnscope.Corpus(["corpus/*.txt"], split="paragraph"))
        atlas.examples()[0].weights()  # (query, key) of the first head's best example
        atlas.save("atlas.npz")

    The first pass measures heads. It keeps the best texts of each head, and a sample drawn by hash. The second pass
    reads the attention of these texts. Neither depends on the workers or their order. Memory does not grow with the
    corpus, but with the number of heads times `examples`.

    An interruption (KeyboardInterrupt) in the first pass ends that pass, and the second reads the texts kept so far.
    One in the second pass ends the study. The record says that it is incomplete.

    Args:
        model: A loaded model, see `attnscope.load`.
        corpus: What to run it on: a Corpus, or a list of texts.
        options: How.
        report: Called after each batch; with workers after each block.
        workers: Who studies the blocks of the first pass; None = this process. They load the model by its name.

    Raises:
        AttnscopeError: As of `heads`.
    """
    options = options or AtlasOptions()
    reading = open_reading(model, corpus, options.heads, workers)
    make = partial(AtlasMeasurer, rank=options.rank, n_top=options.examples, n_sample=options.sample, seed=options.seed)
    step = scale_report(report, 0, options.heads.n_steps)
    findings, done = study_heads(reading, options.heads, step, make, ScoredFound())
    assert isinstance(done, ScoredFound)
    if options.heads.shard == (1, 1):
        made = finish(model, reading.texts, findings, options, done.scores, step)
        return add_effects(made, reading, report, causal=options.heads.causal, in_place=options.heads.in_place)
    places = _places(findings)
    scores = _in_order(done.scores or _nothing(options), places)
    failing = _failures(reading.texts, findings, places) if not is_interrupted(findings.corpus) else {}
    return _part(_assemble(findings, options, _nothing(options), places, Rows({})), findings, scores, failing)


def study(
    spec: str,
    texts: TextsWanted,
    order: AtlasOrder,
    loading: LoadOptions,
    report: Report | None,
    workers: Workers | None = None,
) -> Atlas:
    """Loads a model, and makes an atlas of its heads, with what other records say of them.

    Raises:
        AttnscopeError: Anything that the user can mend.
    """
    corpus = texts.corpus(spec)
    require_names(order.atlas.heads, order.measures, order.listing.only)
    require_evidence(order.beside)
    model = loading.load(spec)
    return with_records(atlas(model, all_texts(model, corpus), order.atlas, report, workers), order.beside)


def _part(atlas: Atlas, findings: Findings, scores: Scores, failing: Iterable[CorpusText]) -> Atlas:
    """An atlas without examples, with what `merge` needs.

    Args:
        atlas: What is known of the part.
        findings: The same with its sums.
        scores: The texts that show what heads do.
        failing: Texts of the whole corpus that descriptions explain worst.
    """
    texts = {text.index: text for text in (*failing, *(one.text for one in scores.texts))}
    kept = [KeptText(**{one.name: getattr(text, one.name) for one in fields(KeptText)}) for text in texts.values()]
    return replace(
        atlas,
        sums=findings.sums,
        kept=tuple(sorted(kept, key=lambda text: text.index)),
        scores={
            "texts": np.array([one.text.index for one in scores.texts], np.int64),
            "chunks": np.array([one.number for one in scores.texts], np.int64),
            "tokens": np.array([one.n_tokens for one in scores.texts], np.int64),
            "lots": np.array([one.lot for one in scores.texts], np.uint64),
            "values": scores.values,
        },
    )


def finish(
    model: Model,
    texts: Texts,
    findings: Findings,
    options: AtlasOptions,
    scores: Scores | None,
    report: Report | None = None,
) -> Atlas:
    """The atlas of what a first pass came to: reads the texts that it is to show.

    Args:
        model: The model.
        texts: The corpus, or of it at least the texts that descriptions explain worst.
        findings: What is known of the heads.
        options: How.
        scores: The texts that show what heads do; None = there are none.
        report: Called after each batch.
    """
    places = _places(findings)
    scores = _in_order(scores or _nothing(options), places)
    rows = Rows({})
    try:
        failures = _failures(texts, findings, places) if scores.texts else {}
        cut: Mapping[str, Any] = {"chunk": options.heads.chunk, "stride": options.heads.stride}
        units = units_of(model, scores, failures, findings.corpus["n_tokens"], **cut)
        rows = read_rows(model, places, units, report) if scores.texts else rows
    except KeyboardInterrupt:
        rows.complete = False
    except Exception as error:
        failed = [*findings.run.get("failures", ()), failure("reading the examples", error)]
        findings = replace(findings, run={**findings.run, "failures": failed})
    return _assemble(findings, options, scores, places, rows)


def _places(findings: Findings) -> list[Place]:
    return [(head.kind, head.layer, head.head) for head in findings.heads]


def _nothing(options: AtlasOptions) -> Scores:
    """Scores of no text."""
    return Scores((), (), np.zeros((0, 0), np.float32), options.examples, options.sample)


def _in_order(scores: Scores, places: Sequence[Place]) -> Scores:
    """The scores of the heads that findings have, in their order."""
    number = {place: at for at, place in enumerate(scores.heads)}
    columns = [number[place] for place in places] if scores.heads else []
    return replace(scores, heads=tuple(places), values=scores.values[:, columns]) if columns else scores


def _failures(
    texts: Texts, findings: Findings, places: Sequence[Place]
) -> dict[CorpusText, list[tuple[Wanted, str, str]]]:
    """The tokens whose attention descriptions explain worst, by their texts."""
    number = {place: at for at, place in enumerate(places)}
    described = [] if findings.descriptions is None else findings.descriptions.heads
    wanted: dict[int, list[tuple[Wanted, str, str]]] = {}
    for one in described:
        head = number.get((one.kind, one.layer, one.head))
        for rank, failed in enumerate(one.failures if head is not None else ()):
            assert head is not None
            example = Wanted(head, "failure", rank, float("nan"), failed.place)
            wanted.setdefault(failed.text, []).append((example, failed.token, failed.before))
    there = failing_texts(texts, set(wanted))
    return {there[index]: of_text for index, of_text in wanted.items() if index in there}


def _assemble(findings: Findings, options: AtlasOptions, scores: Scores, places: Sequence[Place], rows: Rows) -> Atlas:
    """The record of what both passes came to."""
    from attnscope.core.questions.distance import classical_mds

    n, width = len(places), 2 * FURTHEST + 3
    profiles, even = np.full((2, n, width), np.nan, np.float32)
    distances, positions = np.full((n, n), np.nan, np.float32), np.full((n, 2), np.nan, np.float32)
    tables: list[tuple[Any, ...]] = [()] * n
    for kind, of in rows.tables.items():
        mine = [at for at, place in enumerate(places) if place[0] == kind]
        if rows.n_sampled:
            profiles[mine], even[mine] = of.profiles()
            distances[np.ix_(mine, mine)] = between = of.distances()
            positions[mine] = classical_mds(between.astype(np.float64)).coordinates
            for at, table in zip(mine, of.rows(), strict=True):
                tables[at] = table
    whys = ("top", "decile", "failure")
    examples = sorted(rows.examples, key=lambda one: (one.facts.head, whys.index(one.facts.why), one.facts.rank))
    scored = scores.values.shape[1] == n and n
    return Atlas(
        run=findings.run,
        corpus=settle_corpus({**findings.corpus, "n_sampled": rows.n_sampled}, interrupted=not rows.complete),
        options={**findings.options, **_described(options, findings)},
        rank=options.rank,
        heads=findings.heads,
        facts=tuple(one.facts for one in examples),
        tables=tuple(tables),
        profiles=profiles,
        even_profiles=even,
        deciles=scores.deciles()[0] if scored else np.full((n, 11), np.nan, np.float32),
        distances=distances,
        positions=positions,
        **join_examples(examples),
        descriptions=findings.descriptions,
        **rows.planes,
    )


def _described(options: AtlasOptions, findings: Findings) -> dict[str, Any]:
    """What was chosen."""
    what = CONTENT_WHAT if options.rank == CONTENT else findings.measure_facts(options.rank).what
    return {
        "rank": what, "examples": options.examples, "sample": options.sample, "seed": options.seed,
        "lift": OUTSIDE_SINKS, "kept_mass": KEPT_MASS, "most_keys": MOST_KEYS,
    }  # fmt: skip
