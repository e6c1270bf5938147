"""Collect every head of a model with the texts that show its behaviour, in an `Atlas`. Pages are left to `pages`."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from attnscope.core.distance import classical_mds
from attnscope.core.plain_torch import with_plain_torch
from attnscope.models.model import Model
from attnscope.questions.atlas import N_OFFSETS, OUTSIDE_SINKS, Atlas
from attnscope.questions.heads import Heads
from attnscope.results.result import settle_corpus
from attnscope.results.table import HEADS, Table, number
from attnscope.studies.atlas.options import CONTENT, AtlasOptions
from attnscope.studies.atlas.rows import Example, Rows, read_rows, units_of
from attnscope.studies.atlas.scores import CONTENT_WHAT, AtlasMeasurer, ScoredSums, Scores
from attnscope.studies.failures import failure
from attnscope.studies.heads.study import study_heads
from attnscope.studies.inputs.texts import AnyTexts, Report, scale_report, texts_of
from attnscope.studies.workers import Workers


@with_plain_torch
def atlas(
    model: Model,
    corpus: AnyTexts,
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
    make = partial(AtlasMeasurer, options=options)
    findings, done = study_heads(
        model,
        read,
        options.heads,
        report,
        workers,
        make,
        ScoredSums(),
    )
    assert isinstance(done, ScoredSums)
    # Second pass: read the attention of the kept texts.
    rows = Rows()
    scores = Scores()
    if done.scores is not None:
        table = findings.table("heads")
        heads = list(zip(*(table[column.name].tolist() for column in HEADS), strict=True))
        scores = done.scores
        cut = {name: findings.options[name] for name in ("chunk", "stride")}
        step = scale_report(report, 0, 1 + options.heads.causal)
        try:
            read_rows(
                rows,
                model,
                heads,
                units_of(
                    model,
                    scores,
                    findings.corpus["n_tokens"],
                    **cut,
                ),
                step,
            )
        except KeyboardInterrupt:
            rows.complete = False
        except Exception as error:
            rows = Rows()
            failed = [*findings.run.get("failures", ()), failure("reading the examples", error)]
            findings = replace(findings, run={**findings.run, "failures": failed})
    return _assemble(
        findings,
        options,
        scores,
        rows,
    )


def _assemble(findings: Heads, options: AtlasOptions, scores: Scores, rows: Rows) -> Atlas:
    """Return the result of both passes."""
    # What the second pass says of heads, kind by kind.
    table = findings.table("heads")
    n = len(table)
    profiles = np.full((2, n, N_OFFSETS), np.nan, np.float32)
    distances = np.full((n, n), np.nan, np.float32)
    places = np.full((n, 2), np.nan)
    token_rows: list[dict[str, Any]] = []
    for kind, tables_of_kind in rows.tables.items() if rows.n_sampled else ():
        of_kind = np.flatnonzero(table["kind"] == kind)
        profiles[:, of_kind] = tables_of_kind.profiles()
        between = tables_of_kind.distances()
        distances[np.ix_(of_kind, of_kind)] = between
        places[of_kind] = classical_mds(between.astype(np.float64))[0]
        token_rows += tables_of_kind.rows(of_kind.tolist())
    deciles = scores.deciles()[0] if scores.texts else np.full((n, 11), np.nan)

    # The heads with their scores, and their places on the map of distances.
    rank = options.rank
    meaning = CONTENT_WHAT if rank == CONTENT else table.columns[rank].meaning
    near = "heads that attend alike stand near each other"
    for column, values in (
        (number("score_median", label=f"{rank} (median text)"), deciles[:, 5]),
        (number("score_p90", label=f"{rank} (90th percentile)"), deciles[:, 9]),
        (number("map_x", near), places[:, 0]),
        (number("map_y", near), places[:, 1]),
    ):
        table = table.with_column(column, values)

    # The other tables, and what the numbers mean.
    tables, grids = example_tables(rows.examples)
    tokens = Table.of(Atlas.TABLES["tokens"], sorted(token_rows, key=lambda row: row["head"]))
    tables |= {"heads": table, "roles": findings.table("roles"), "tokens": tokens}
    grids |= {
        "profile": profiles[0],
        "even_profile": profiles[1],
        "distance": distances,
        "deciles": deciles,
    }
    chosen = {name: getattr(options, name) for name in ("examples", "sample", "seed", "rank")}
    chosen |= {"score": meaning, "lift": OUTSIDE_SINKS}
    corpus = settle_corpus(
        {**findings.corpus, "n_sampled": rows.n_sampled}, interrupted=not rows.complete
    )
    return Atlas(
        findings.run,
        corpus,
        {**findings.options, **chosen},
        tables,
        grids,
    )


def example_tables(examples: Sequence[Example]) -> tuple[dict[str, Table], dict[str, NDArray[Any]]]:
    """Return the tables and arrays of examples, by head, what they are to show, and rank."""
    order = sorted(
        examples, key=lambda read: (read.wanted.head, read.wanted.why != "top", read.wanted.rank)
    )
    rows = []
    n_characters = 0
    # A row says where its excerpt begins among all characters.
    for example in order:
        excerpt = {"first_character": n_characters, "n_characters": len(example.excerpt)}
        n_characters += len(example.excerpt)
        rows.append({**vars(example), **vars(example.wanted), **excerpt})

    def join(parts: Iterable[ArrayLike], *width: int) -> NDArray[Any]:
        """Return the arrays of all examples as one; of no example it is empty."""
        return np.concatenate([np.zeros((0, *width), np.int64), *parts])

    # The shown tokens of all examples, (token,). Labels are numbered as they come.
    labels = list(chain.from_iterable(example.labels for example in order))
    vocabulary = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    offsets = join((example.offsets for example in order), 2)
    n_kept = join(np.diff(example.starts) for example in order)
    shown = Table.of_arrays(
        Atlas.TABLES["shown"],
        example=np.repeat(np.arange(len(order)), [len(example.places) for example in order]),
        place=join(example.places for example in order),
        label=[vocabulary[label] for label in labels],
        special=join(example.special for example in order),
        start=offsets[:, 0],
        stop=offsets[:, 1],
        first_kept=np.cumsum(n_kept) - n_kept,
        n_kept=n_kept,
    )
    tables = {
        "examples": Table.of(Atlas.TABLES["examples"], rows),
        "shown": shown,
        "vocabulary": Table.of_arrays(Atlas.TABLES["vocabulary"], label=list(vocabulary)),
    }
    # Characters and kept keys of all examples, one after the other.
    excerpts = "".join(example.excerpt for example in order).encode("utf-32-le", "surrogatepass")
    grids = {
        "kept_key": join(example.keys for example in order).astype(np.uint8),
        "kept_code": join(example.codes for example in order).astype(np.uint8),
        "characters": np.frombuffer(excerpts, "<u4").copy(),
    }
    return tables, grids
