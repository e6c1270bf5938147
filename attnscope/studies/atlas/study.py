"""Collect every head of a model with the texts that show its behaviour: `attnscope atlas` and `attnscope.atlas`.

`scores` defines the first pass over the corpus, `rows` the second. `pages` makes web pages of the result.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core.distance import classical_mds
from attnscope.core.plain_torch import with_default_torch
from attnscope.models.model import Model
from attnscope.questions.atlas import EVEN_SHARE_WORDS, N_OFFSETS, Atlas
from attnscope.questions.heads import Heads
from attnscope.results.result import settle_corpus
from attnscope.results.table import Table, number
from attnscope.studies.atlas.options import CONTENT, AtlasOptions
from attnscope.studies.atlas.rows import Example, SecondPass, read_rows, units_of
from attnscope.studies.atlas.scores import CONTENT_MEANING, AtlasMeasurer, ScoredSums, Scores
from attnscope.studies.failures import describe_failure
from attnscope.studies.heads.study import study_heads
from attnscope.studies.inputs.texts import AnyTexts, ReportProgress, texts_of
from attnscope.studies.workers import Workers


@with_default_torch
def atlas(
    model: Model,
    corpus: AnyTexts,
    options: AtlasOptions | None = None,
    report: ReportProgress | None = None,
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
    # First pass: measure heads, and keep the texts that show them.
    findings, done = study_heads(
        model,
        texts_of(corpus, model),
        options.heads,
        report,
        workers,
        measurer=partial(AtlasMeasurer, options=options),
        empty=ScoredSums(),
    )
    assert isinstance(done, ScoredSums)
    if done.scores is None:
        return _assemble(findings, options, Scores(), SecondPass())
    # Second pass: read the attention of the kept texts. `second_pass` holds what was read, even after an interruption.
    second_pass = SecondPass()
    table = findings.table("heads")
    heads = [(kind, *head) for kind, head in zip(table["kind"].tolist(), table.layer_heads, strict=True)]
    try:
        units = units_of(
            model,
            done.scores,
            findings.corpus["n_tokens"],
            chunk=options.heads.chunk,
            stride=options.heads.stride,
        )
        read_rows(second_pass, model, heads, units, report)
    except KeyboardInterrupt:
        second_pass.complete = False
    except Exception as error:
        second_pass = SecondPass()
        failed = [*findings.run.get("failures", ()), describe_failure("reading the examples", error)]
        findings = replace(findings, run={**findings.run, "failures": failed})
    return _assemble(findings, options, done.scores, second_pass)


def _assemble(findings: Heads, options: AtlasOptions, scores: Scores, second_pass: SecondPass) -> Atlas:
    """Return the result: what `heads` measured, the scores of the first pass, and the second."""
    # Profiles, distances and tables of tokens, kind by kind; NaN where no text was sampled.
    table = findings.table("heads")
    n_heads = len(table)
    profiles = np.full((2, n_heads, N_OFFSETS), np.nan, np.float32)
    distances = np.full((n_heads, n_heads), np.nan, np.float32)
    places = np.full((n_heads, 2), np.nan)
    token_rows: list[dict[str, Any]] = []
    if second_pass.n_sampled:
        for kind, sums in second_pass.tables.items():
            heads = np.flatnonzero(table["kind"] == kind)
            profiles[:, heads] = sums.profiles()
            head_distances = sums.distances()
            distances[np.ix_(heads, heads)] = head_distances
            places[heads], _ = classical_mds(head_distances.astype(np.float64))
            token_rows += sums.rows(heads.tolist())
    token_rows.sort(key=lambda row: row["head"])

    # Columns of heads: their scores, and their places on the map of distances.
    deciles = np.full((n_heads, 11), np.nan)
    if scores.texts:
        deciles, _ = scores.deciles()
    rank = options.rank
    map_meaning = "heads that attend alike stand near each other"
    for column, values in (
        (number("score_median", label=f"{rank} (median text)"), deciles[:, 5]),
        (number("score_p90", label=f"{rank} (90th percentile)"), deciles[:, 9]),
        (number("map_x", map_meaning), places[:, 0]),
        (number("map_y", map_meaning), places[:, 1]),
    ):
        table = table.with_column(column, values)

    # The other tables and arrays, and the options with the meaning of scores and lifts.
    tables, grids = example_tables(second_pass.examples)
    tables |= {
        "heads": table,
        "roles": findings.table("roles"),
        "tokens": Table.of(Atlas.TABLES["tokens"], token_rows),
    }
    grids |= {
        "profile": profiles[0],
        "even_profile": profiles[1],
        "distance": distances,
        "deciles": deciles,
    }
    described_options = {
        **findings.options,
        "examples": options.examples,
        "sample": options.sample,
        "seed": options.seed,
        "rank": rank,
        "score": CONTENT_MEANING if rank == CONTENT else table.columns[rank].meaning,
        "lift": EVEN_SHARE_WORDS,
    }
    corpus = settle_corpus(findings.corpus, interrupted=not second_pass.complete)
    corpus["n_sampled"] = second_pass.n_sampled
    return Atlas(findings.run, corpus, described_options, tables, grids)


def example_tables(examples: Sequence[Example]) -> tuple[dict[str, Table], dict[str, NDArray[Any]]]:
    """Return the tables and arrays of examples: head by head, the best texts before those of deciles, by rank."""
    examples = sorted(examples, key=_sort_key)
    # The columns are fields of `Example` and `WantedExample`. Excerpts are one string: a row says where its own begins.
    rows = []
    n_characters = 0
    for example in examples:
        row = {**vars(example), **vars(example.wanted)}
        row["first_character"] = n_characters
        row["n_characters"] = len(example.excerpt)
        n_characters += len(example.excerpt)
        rows.append(row)

    def join(name: str, *width: int) -> NDArray[Any]:
        """Concatenate an array, (n, *width), of all examples; without examples it is (0, *width)."""
        arrays = [getattr(example, name) for example in examples]
        return np.concatenate([np.zeros((0, *width), np.int64), *arrays])

    # The shown tokens of all examples, (token,). Their labels are numbered in the order in which they occur.
    labels = list(chain.from_iterable(example.labels for example in examples))
    vocabulary = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    offsets = join("offsets", 2)
    n_kept = join("n_kept")
    n_shown = [len(example.places) for example in examples]
    shown = Table.of_arrays(
        Atlas.TABLES["shown"],
        example=np.repeat(np.arange(len(examples)), n_shown),
        place=join("places"),
        label=[vocabulary[label] for label in labels],
        special=join("special"),
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
    # The kept keys and the excerpts of all examples; characters are UTF-32 code points.
    excerpts = "".join(example.excerpt for example in examples).encode("utf-32-le", "surrogatepass")
    grids = {
        "kept_key": join("keys").astype(np.uint8),
        "kept_code": join("codes").astype(np.uint8),
        "characters": np.frombuffer(excerpts, "<u4").copy(),
    }
    return tables, grids


def _sort_key(example: Example) -> tuple[int, bool, int]:
    """Return by what examples are sorted; a head's `why` is "top" for its best texts, "decile" for the others."""
    wanted = example.wanted
    return wanted.head, wanted.why != "top", wanted.rank
