"""Every head of a model with the texts that show what it does: a model and texts in, an `Atlas` out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from attnscope.core.plain_torch import with_plain_torch
from attnscope.corpus import Corpus, CorpusText
from attnscope.models.model import Model
from attnscope.records.atlas.record import FURTHEST, KEPT_MASS, MOST_KEYS, OUTSIDE_SINKS, Atlas, join_examples
from attnscope.records.heads.findings import Findings
from attnscope.results.completion import settle_corpus
from attnscope.studies.atlas.options import CONTENT, AtlasOptions, AtlasOrder
from attnscope.studies.atlas.rows import Rows, Wanted, read_rows, units_of
from attnscope.studies.atlas.scores import CONTENT_WHAT, AtlasMeasurer, Place, ScoredSums, Scores
from attnscope.studies.failures import failure
from attnscope.studies.heads.study import add_effects, study_heads
from attnscope.studies.inputs.options import LoadOptions, TextsWanted
from attnscope.studies.inputs.texts import Report, Texts, scale_report, texts_of
from attnscope.studies.workers import Workers

_NO_SCORES = Scores((), (), np.zeros((0, 0), np.float32), 0, 0)


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
    read = texts_of(corpus, model)
    make = partial(AtlasMeasurer, rank=options.rank, n_top=options.examples, n_sample=options.sample, seed=options.seed)
    step = scale_report(report, 0, options.heads.n_steps)
    findings, done = study_heads(model, read, options.heads, step, workers, make, ScoredSums())
    assert isinstance(done, ScoredSums)
    record = _finish(model, read, findings, options, done.scores, step)
    return add_effects(record, model, read, report) if options.heads.causal else record


def study(
    spec: str,
    texts: TextsWanted,
    order: AtlasOrder,
    loading: LoadOptions,
    report: Report | None,
    workers: Workers | None = None,
) -> Atlas:
    """Loads a model, and makes an atlas of its heads."""
    corpus = texts.corpus()
    model = loading.load(spec)
    return atlas(model, corpus, order.atlas, report, workers)


def _finish(
    model: Model,
    texts: Texts,
    findings: Findings,
    options: AtlasOptions,
    scores: Scores | None,
    report: Report | None,
) -> Atlas:
    """Make the atlas from the findings of the first pass: read the texts that it shows.

    Args:
        model: The model.
        texts: The corpus.
        findings: Of all heads.
        options: What examples are ranked by, and how many there are.
        scores: The texts that show what heads do; None = there are none.
        report: Called after each batch.
    """
    heads = _heads_of(findings)
    scores = _in_order(scores, heads)
    rows = Rows({})
    try:
        if scores.texts:
            failures, facts = _failures(texts, findings, heads), findings.options
            units = units_of(
                model, scores, failures, findings.corpus["n_tokens"], chunk=facts["chunk"], stride=facts["stride"]
            )
            rows = read_rows(model, heads, units, report)
    except KeyboardInterrupt:
        rows.complete = False
    except Exception as error:
        failed = [*findings.run.get("failures", ()), failure("reading the examples", error)]
        findings = replace(findings, run={**findings.run, "failures": failed})
    return _assemble(findings, options, scores, heads, rows)


def _heads_of(findings: Findings) -> list[Place]:
    return [(head.kind, head.layer, head.head) for head in findings.heads]


def _in_order(scores: Scores | None, heads: Sequence[Place]) -> Scores:
    """The scores of these heads, in their order."""
    scores = scores or _NO_SCORES
    column_of = {head: column for column, head in enumerate(scores.heads)}
    columns = [column_of[head] for head in heads] if scores.heads else []
    return replace(scores, heads=tuple(heads), values=scores.values[:, columns]) if columns else scores


def _failures(
    texts: Texts, findings: Findings, heads: Sequence[Place]
) -> dict[CorpusText, list[tuple[Wanted, str, str]]]:
    """The tokens whose attention descriptions explain worst, by their texts."""
    number_of = {head: number for number, head in enumerate(heads)}
    by_text: dict[int, list[tuple[Wanted, str, str]]] = {}
    for line in () if findings.descriptions is None else findings.descriptions.heads:
        head = number_of.get((line.kind, line.layer, line.head))
        if head is None:
            continue
        for rank, failed in enumerate(line.failures):
            example = Wanted(head, "failure", rank, float("nan"), failed.place)
            by_text.setdefault(failed.text, []).append((example, failed.token, failed.before))
    # One more reading of the corpus.
    return {text: by_text[text.index] for text in texts if text.index in by_text} if by_text else {}


def _assemble(findings: Findings, options: AtlasOptions, scores: Scores, heads: Sequence[Place], rows: Rows) -> Atlas:
    """The record of both passes."""
    from attnscope.core.questions.distance import classical_mds

    n, width = len(heads), 2 * FURTHEST + 3
    profiles, even = np.full((2, n, width), np.nan, np.float32)
    distances, positions = np.full((n, n), np.nan, np.float32), np.full((n, 2), np.nan, np.float32)
    tables: list[tuple[Any, ...]] = [()] * n
    for kind, kind_tables in rows.tables.items() if rows.n_sampled else ():
        of_kind = [number for number, head in enumerate(heads) if head[0] == kind]
        profiles[of_kind], even[of_kind] = kind_tables.profiles()
        distances[np.ix_(of_kind, of_kind)] = between = kind_tables.distances()
        positions[of_kind] = classical_mds(between.astype(np.float64)).coordinates
        for number, table in zip(of_kind, kind_tables.rows(), strict=True):
            tables[number] = table
    whys = ("top", "decile", "failure")
    examples = sorted(rows.examples, key=lambda each: (each.facts.head, whys.index(each.facts.why), each.facts.rank))
    rank = CONTENT_WHAT if options.rank == CONTENT else findings.measure_facts(options.rank).what
    return Atlas(
        run=findings.run,
        corpus=settle_corpus({**findings.corpus, "n_sampled": rows.n_sampled}, interrupted=not rows.complete),
        options={
            **findings.options, "rank": rank, "examples": options.examples, "sample": options.sample,
            "seed": options.seed, "lift": OUTSIDE_SINKS, "kept_mass": KEPT_MASS, "most_keys": MOST_KEYS,
        },
        rank=options.rank,
        heads=findings.heads,
        facts=tuple(example.facts for example in examples),
        tables=tuple(tables),
        profiles=profiles,
        even_profiles=even,
        deciles=scores.deciles()[0] if n and scores.values.shape[1] == n else np.full((n, 11), np.nan, np.float32),
        distances=distances,
        positions=positions,
        **join_examples(examples),
        descriptions=findings.descriptions,
    )  # fmt: skip
