"""Collect every head of a model with the texts that show its behaviour, in an `Atlas`. Pages are left to `pages`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core.plain_torch import with_plain_torch
from attnscope.corpus import Corpus, CorpusText
from attnscope.models.model import Model
from attnscope.questions.atlas import N_OFFSETS, OUTSIDE_SINKS, Atlas
from attnscope.questions.heads import Heads
from attnscope.results.result import settle_corpus
from attnscope.results.table import Table, number
from attnscope.studies.atlas.options import CONTENT, AtlasOptions, AtlasOrder
from attnscope.studies.atlas.rows import Example, Rows, Wanted, read_rows, units_of
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
        AttnscopeError: As of `heads`.
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
    return _finish(model, read, findings, options, done.scores, step)


def study(
    spec: str,
    texts: TextsWanted,
    order: AtlasOrder,
    loading: LoadOptions,
    report: Report | None,
    workers: Workers | None = None,
) -> Atlas:
    """Load a model, and make an atlas of its heads."""
    corpus = texts.corpus()
    model = loading.load(spec)
    return atlas(model, corpus, order.atlas, report, workers)


def _finish(
    model: Model,
    texts: Texts,
    findings: Heads,
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
    # Second pass: read the attention of the kept texts.
    heads = _heads_of(findings)
    scores = _in_order(scores, heads)
    rows = Rows({})
    try:
        if scores.texts:
            failures, facts = _failures(texts, findings), findings.options
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


def _heads_of(findings: Heads) -> list[Place]:
    heads = findings.table("heads")
    return list(zip(*(heads[name].tolist() for name in ("kind", "layer", "head")), strict=True))


def _in_order(scores: Scores | None, heads: Sequence[Place]) -> Scores:
    """Return the scores of these heads, in their order."""
    scores = scores or _NO_SCORES
    column_of = {head: column for column, head in enumerate(scores.heads)}
    columns = [column_of[head] for head in heads] if scores.heads else []
    return replace(scores, heads=tuple(heads), values=scores.values[:, columns]) if columns else scores


def _failures(texts: Texts, findings: Heads) -> dict[CorpusText, list[tuple[Wanted, str, str]]]:
    """Return the tokens whose attention descriptions explain worst, by their texts."""
    # List the failures of each text, by its number.
    failures = findings.table("failures")
    ranks: Counter[int] = Counter()
    by_text: dict[int, list[tuple[Wanted, str, str]]] = {}
    _, *rows = failures.rows()
    for number_of_failure, (head, text, before, token, place, _) in enumerate(rows):
        example = Wanted(head, "failure", ranks[head], float("nan"), place, number_of_failure)
        ranks[head] += 1
        by_text.setdefault(text, []).append((example, token, before))
    # One more reading of the corpus.
    return {text: by_text[text.index] for text in texts if text.index in by_text} if by_text else {}


def _assemble(findings: Heads, options: AtlasOptions, scores: Scores, heads: Sequence[Place], rows: Rows) -> Atlas:
    """Return the result of both passes."""
    from attnscope.core.distance import classical_mds

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
    tables, grids = example_tables(rows.examples, findings.table("failures"), findings.table("expected"))
    tables |= {name: findings.table(name) for name in ("heads", "roles")}
    tables["heads"] = _with_scores(tables["heads"], options.rank, deciles, positions)
    tables["tokens"] = Table.of(Atlas.TABLES["tokens"], sorted(token_rows, key=lambda row: row["head"]))
    chosen = {"examples": options.examples, "sample": options.sample, "seed": options.seed}
    meanings = {"rank": options.rank, "score": rank, "lift": OUTSIDE_SINKS}
    return Atlas(
        run=findings.run,
        corpus=settle_corpus({**findings.corpus, "n_sampled": rows.n_sampled}, interrupted=not rows.complete),
        options={**findings.options, **chosen, **meanings},
        tables=tables,
        grids={
            "profile": profiles,
            "even_profile": even,
            "deciles": deciles.astype(np.float64),
            "distance": distances,
            **grids,
        },
    )


def _with_scores(table: Table, rank: str, deciles: NDArray[Any], positions: NDArray[Any]) -> Table:
    """Return the table of heads with scores, and with places on the map of distances."""
    for name, place, what in (("score_median", 5, "median text"), ("score_p90", 9, "90th percentile")):
        table = table.with_column(number(name, label=f"{rank} ({what})"), deciles[:, place])
    meaning = "heads that attend alike stand near each other"
    for axis, name in enumerate(("map_x", "map_y")):
        table = table.with_column(number(name, meaning), positions[:, axis])
    return table


# Tables of examples


def example_tables(
    examples: Sequence[Example], failures: Table, expected: Table
) -> tuple[dict[str, Table], dict[str, NDArray[Any]]]:
    """Return the tables and arrays of examples, by head, what they are to show, and rank.

    `failures` and `expected` are those of the study of heads.
    """
    # Number the rows of all examples, shown tokens and kept keys as they come.
    whys = ("top", "decile", "failure")
    order = sorted(examples, key=lambda one: (one.wanted.head, whys.index(one.wanted.why), one.wanted.rank))
    nats = failures["nats"]
    _, *expected_rows = expected.rows()
    rows: dict[str, list[dict[str, Any]]] = {"examples": [], "shown": [], "expected": []}
    vocabulary: dict[str, int] = {}
    n_kept = n_characters = 0
    for number_of_example, one in enumerate(order):
        wanted = one.wanted
        rows["examples"].append(
            {
                "head": wanted.head,
                "why": wanted.why,
                "rank": wanted.rank,
                "score": wanted.score,
                "text": one.text,
                "source": one.source,
                "n_tokens": one.n_tokens,
                "focus": one.focus,
                "failure_nats": nats[wanted.failure] if wanted.failure >= 0 else None,
                "first_character": n_characters,
                "n_characters": len(one.excerpt),
            }
        )
        for place, label in enumerate(one.labels):
            start, stop = one.offsets[place] if one.offsets else (0, 0)
            rows["shown"].append(
                {
                    "example": number_of_example,
                    "place": one.places[place],
                    "special": one.special[place],
                    "label": vocabulary.setdefault(label, len(vocabulary)),
                    "start": start,
                    "stop": stop,
                    "first_kept": n_kept + one.starts[place],
                    "n_kept": one.starts[place + 1] - one.starts[place],
                }
            )
        for failure_row, place, token, weight in expected_rows:
            if failure_row == wanted.failure:
                key = {"place": place, "token": token, "weight": weight}
                rows["expected"].append({"example": number_of_example, **key})
        n_kept += len(one.keys)
        n_characters += len(one.excerpt)
    # Join all excerpts and kept keys into one array each.
    tables = {name: Table.of(Atlas.TABLES[name], of_table) for name, of_table in rows.items()}
    tables["vocabulary"] = Table.of_arrays(Atlas.TABLES["vocabulary"], label=list(vocabulary))
    excerpts = "".join(one.excerpt for one in order).encode("utf-32-le", "surrogatepass")
    nothing = np.zeros(0, np.uint8)
    grids = {
        "kept_key": np.concatenate([nothing, *(one.keys for one in order)]),
        "kept_code": np.concatenate([nothing, *(one.codes for one in order)]),
        "characters": np.frombuffer(excerpts, "<u4").copy(),
    }
    return tables, grids
