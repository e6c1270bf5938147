"""Collect every head of a model with the texts that show its behaviour, in an `Atlas`. Pages are left to `pages`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core.distance import classical_mds
from attnscope.core.plain_torch import with_plain_torch
from attnscope.corpus import Corpus, CorpusText
from attnscope.models.model import Model
from attnscope.questions.atlas import N_OFFSETS, OUTSIDE_SINKS, Atlas
from attnscope.questions.heads import Heads
from attnscope.results.result import settle_corpus
from attnscope.results.table import Table, number
from attnscope.studies.atlas.options import CONTENT, AtlasOptions
from attnscope.studies.atlas.rows import Example, Rows, read_rows, units_of
from attnscope.studies.atlas.scores import CONTENT_WHAT, AtlasMeasurer, Place, ScoredSums, Scores
from attnscope.studies.failures import failure
from attnscope.studies.heads.study import add_effects, study_heads
from attnscope.studies.inputs.texts import Report, scale_report, texts_of
from attnscope.studies.workers import Workers


@with_plain_torch
def atlas(
    model: Model,
    corpus: Corpus | str | Sequence[str] | Sequence[CorpusText],
    options: AtlasOptions | None = None,
    report: Report | None = None,
    workers: Workers | None = None,
) -> Atlas:
    """Measure every head as `heads` does, and collect the texts that show what it does.

        model = attnscope.load("minilm")
        atlas = attnscope.atlas(model, attnscope.Corpus(["corpus/*.txt"], split="paragraph"))
        atlas.weights(0)  # (query, key) of the first head's best example
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
        AttnscopeError: As in `heads`.
    """
    options = options or AtlasOptions()
    read = texts_of(corpus, model)
    # First pass: measure heads, and keep the texts that show them.
    make = partial(AtlasMeasurer, rank=options.rank, n_top=options.examples, n_sample=options.sample, seed=options.seed)
    step = scale_report(report, 0, options.heads.n_steps)
    findings, done = study_heads(model, read, options.heads, step, workers, make, ScoredSums())
    assert isinstance(done, ScoredSums)
    if options.heads.causal:
        findings = add_effects(findings, model, read, report)
    # Second pass: read the attention of the kept texts.
    table = findings.table("heads")
    heads = list(zip(*(table[name].tolist() for name in ("kind", "layer", "head")), strict=True))
    scores = done.scores.of_heads(heads) if done.scores else Scores((), (), np.zeros((0, 0), np.float32), 0, 0)
    rows = Rows({})
    try:
        if scores.texts:
            cut = {name: findings.options[name] for name in ("chunk", "stride")}
            rows = read_rows(model, heads, units_of(model, scores, findings.corpus["n_tokens"], **cut), step)
    except KeyboardInterrupt:
        rows.complete = False
    except Exception as error:
        failed = [*findings.run.get("failures", ()), failure("reading the examples", error)]
        findings = replace(findings, run={**findings.run, "failures": failed})
    return _assemble(findings, options, scores, heads, rows)


def _assemble(findings: Heads, options: AtlasOptions, scores: Scores, heads: Sequence[Place], rows: Rows) -> Atlas:
    """Return the result of both passes."""
    # What the second pass says of heads, kind by kind.
    n = len(heads)
    profiles, even = np.full((2, n, N_OFFSETS), np.nan, np.float32)
    distances = np.full((n, n), np.nan, np.float32)
    positions = np.full((n, 2), np.nan)
    token_rows: list[dict[str, Any]] = []
    for kind, kind_tables in rows.tables.items() if rows.n_sampled else ():
        of_kind = [number for number, head in enumerate(heads) if head[0] == kind]
        profiles[of_kind], even[of_kind] = kind_tables.profiles()
        distances[np.ix_(of_kind, of_kind)] = between = kind_tables.distances()
        positions[of_kind] = classical_mds(between.astype(np.float64))[0]
        for row, of_head in zip(of_kind, kind_tables.rows(), strict=True):
            token_rows += [{"head": row, **tokens} for tokens in of_head]
    deciles = np.full((n, 11), np.nan, np.float32)
    if n and scores.values.shape[1] == n:
        deciles = scores.deciles()[0]

    # The tables.
    rank = CONTENT_WHAT if options.rank == CONTENT else findings.table("heads").columns[options.rank].meaning
    tables, grids = example_tables(rows.examples)
    tables |= {name: findings.table(name) for name in ("heads", "roles")}
    tables["heads"] = _with_scores(tables["heads"], options.rank, deciles, positions)
    tables["tokens"] = Table.of(Atlas.TABLES["tokens"], sorted(token_rows, key=lambda row: row["head"]))
    chosen = {"examples": options.examples, "sample": options.sample, "seed": options.seed}
    meanings = {"rank": options.rank, "score": rank, "lift": OUTSIDE_SINKS}
    grids |= {"profile": profiles, "even_profile": even, "distance": distances}
    grids["deciles"] = deciles.astype(np.float64)
    corpus = settle_corpus({**findings.corpus, "n_sampled": rows.n_sampled}, interrupted=not rows.complete)
    return Atlas(findings.run, corpus, {**findings.options, **chosen, **meanings}, tables, grids)


def _with_scores(table: Table, rank: str, deciles: NDArray[Any], positions: NDArray[Any]) -> Table:
    """Return the table of heads with scores, and with places on the map of distances."""
    for name, place, what in (("score_median", 5, "median text"), ("score_p90", 9, "90th percentile")):
        table = table.with_column(number(name, label=f"{rank} ({what})"), deciles[:, place])
    meaning = "heads that attend alike stand near each other"
    for axis, name in enumerate(("map_x", "map_y")):
        table = table.with_column(number(name, meaning), positions[:, axis])
    return table


def example_tables(examples: Sequence[Example]) -> tuple[dict[str, Table], dict[str, NDArray[Any]]]:
    """Return the tables and arrays of examples, by head, what they are to show, and rank."""
    whys = ("top", "decile")
    order = sorted(examples, key=lambda one: (one.wanted.head, whys.index(one.wanted.why), one.wanted.rank))
    # Number the rows of shown tokens, kept keys and characters as they come.
    n_characters = [len(one.excerpt) for one in order]
    n_shown = [len(one.labels) for one in order]
    n_kept = [np.diff(one.starts) for one in order]
    labels = [label for one in order for label in one.labels]
    vocabulary = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    offsets = np.array([span for one in order for span in one.offsets or [(0, 0)] * len(one.labels)]).reshape(-1, 2)
    tables = {
        "examples": Table.of_arrays(
            Atlas.TABLES["examples"],
            head=[one.wanted.head for one in order],
            why=[one.wanted.why for one in order],
            rank=[one.wanted.rank for one in order],
            score=[one.wanted.score for one in order],
            text=[one.text for one in order],
            source=[one.source for one in order],
            n_tokens=[one.n_tokens for one in order],
            focus=[one.focus for one in order],
            first_character=_starts(n_characters),
            n_characters=n_characters,
        ),
        "shown": Table.of_arrays(
            Atlas.TABLES["shown"],
            example=np.repeat(np.arange(len(order)), n_shown),
            place=_join([one.places for one in order], np.int64),
            label=[vocabulary[label] for label in labels],
            special=_join([one.special for one in order], np.bool_),
            start=offsets[:, 0],
            stop=offsets[:, 1],
            first_kept=_starts(_join(n_kept, np.int64)),
            n_kept=_join(n_kept, np.int64),
        ),
        "vocabulary": Table.of_arrays(Atlas.TABLES["vocabulary"], label=list(vocabulary)),
    }
    excerpts = "".join(one.excerpt for one in order).encode("utf-32-le", "surrogatepass")
    grids = {
        "kept_key": _join([one.keys for one in order], np.uint8),
        "kept_code": _join([one.codes for one in order], np.uint8),
        "characters": np.frombuffer(excerpts, "<u4").copy(),
    }
    return tables, grids


def _join(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *parts])


def _starts(sizes: Sequence[int] | NDArray[Any]) -> NDArray[Any]:
    """Return where each of some runs of these sizes begins."""
    starts: NDArray[Any] = np.cumsum(sizes) - np.asarray(sizes)
    return starts
