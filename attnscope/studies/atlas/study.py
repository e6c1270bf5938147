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
    profiles = np.full((2, n, N_OFFSETS), np.nan, np.float32)
    distances = np.full((n, n), np.nan, np.float32)
    places = np.full((n, 2), np.nan)
    token_rows: list[dict[str, Any]] = []
    for kind, kind_tables in rows.tables.items() if rows.n_sampled else ():
        of_kind = [number for number, head in enumerate(heads) if head[0] == kind]
        profiles[:, of_kind] = kind_tables.profiles()
        between = kind_tables.distances()
        distances[np.ix_(of_kind, of_kind)] = between
        places[of_kind] = classical_mds(between.astype(np.float64))[0]
        for row, of_head in zip(of_kind, kind_tables.rows(), strict=True):
            token_rows += [{"head": row, **tokens} for tokens in of_head]
    deciles = np.full((n, 11), np.nan)
    if n and scores.heads:
        deciles = scores.deciles()[0].astype(np.float64)

    # The heads with their scores, and their places on the map of distances.
    table = findings.table("heads")
    rank = options.rank
    for name, decile, what in (("score_median", 5, "median text"), ("score_p90", 9, "90th percentile")):
        table = table.with_column(number(name, label=f"{rank} ({what})"), deciles[:, decile])
    for axis, name in enumerate(("map_x", "map_y")):
        table = table.with_column(number(name, "heads that attend alike stand near each other"), places[:, axis])

    # The other tables, and what the numbers mean.
    tables, grids = example_tables(rows.examples)
    tokens = Table.of(Atlas.TABLES["tokens"], sorted(token_rows, key=lambda row: row["head"]))
    tables |= {"heads": table, "roles": findings.table("roles"), "tokens": tokens}
    grids |= {"profile": profiles[0], "even_profile": profiles[1], "distance": distances, "deciles": deciles}
    meaning = CONTENT_WHAT if rank == CONTENT else table.columns[rank].meaning
    chosen = {
        "examples": options.examples,
        "sample": options.sample,
        "seed": options.seed,
        "rank": rank,
        "score": meaning,
        "lift": OUTSIDE_SINKS,
    }
    corpus = settle_corpus({**findings.corpus, "n_sampled": rows.n_sampled}, interrupted=not rows.complete)
    return Atlas(findings.run, corpus, {**findings.options, **chosen}, tables, grids)


def example_tables(examples: Sequence[Example]) -> tuple[dict[str, Table], dict[str, NDArray[Any]]]:
    """Return the tables and arrays of examples, by head, what they are to show, and rank."""
    whys = ("top", "decile")
    order = sorted(examples, key=lambda read: (read.wanted.head, whys.index(read.wanted.why), read.wanted.rank))
    # Number the rows of shown tokens, kept keys and characters as they come.
    vocabulary: dict[str, int] = {}
    rows: list[dict[str, Any]] = []
    shown = [np.zeros((0, len(Atlas.TABLES["shown"])), np.int64)]
    keys_and_codes = [np.zeros((2, 0), np.uint8)]
    excerpts = ""
    n_kept = 0
    for row, example in enumerate(order):
        text_row = {"first_character": len(excerpts), "n_characters": len(example.excerpt)}
        rows.append({**vars(example), **vars(example.wanted), **text_row})
        n_shown = len(example.labels)
        labels = [vocabulary.setdefault(label, len(vocabulary)) for label in example.labels]
        starts, stops = np.reshape(example.offsets or np.zeros((n_shown, 2), np.int64), (-1, 2)).T
        first_kept = n_kept + example.starts
        columns = (
            np.full(n_shown, row),
            example.places,
            np.array(labels, np.int64),
            example.special,
            starts,
            stops,
            first_kept[:-1],
            np.diff(first_kept),
        )
        shown.append(np.stack(columns, 1))
        keys_and_codes.append(np.stack([example.keys, example.codes]))
        excerpts += example.excerpt
        n_kept += len(example.keys)

    names = [column.name for column in Atlas.TABLES["shown"]]
    of_tokens = dict(zip(names, np.concatenate(shown).T, strict=True))
    tables = {
        "examples": Table.of(Atlas.TABLES["examples"], rows),
        "shown": Table.of_arrays(Atlas.TABLES["shown"], **of_tokens),
        "vocabulary": Table.of_arrays(Atlas.TABLES["vocabulary"], label=list(vocabulary)),
    }
    keys, codes = np.concatenate(keys_and_codes, 1)
    characters = np.frombuffer(excerpts.encode("utf-32-le", "surrogatepass"), "<u4").copy()
    return tables, {"kept_key": keys, "kept_code": codes, "characters": characters}
