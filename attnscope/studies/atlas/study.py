"""Collect the texts that show what each head of a model does: `attnscope atlas` and `attnscope.atlas`.

`scores` has the first pass over the corpus, which scores texts. `rows` has the second, which reads the attention of the
chosen texts. This module runs both and assembles the result; `pages` makes web pages of it.
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
from attnscope.studies.atlas.options import CONTENT_SCORE, AtlasOptions
from attnscope.studies.atlas.rows import Example, SecondPass, choose_texts, run_second_pass
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

    The first pass measures heads. It keeps the best texts of each head, and a random sample of texts, drawn by a hash.
    The second pass reads the attention of these texts. The result does not depend on the workers. Memory does not grow
    with the corpus, but with the number of heads times `examples`.

    An interruption (KeyboardInterrupt) in the first pass ends that pass, and the second pass reads the texts kept so
    far. An interruption in the second pass ends the study. In both cases the result says that it is incomplete.

    Args:
        model: A loaded model, see `attnscope.load`.
        corpus: The texts to run it on: a Corpus, or a list of texts.
        options: How the atlas is made.
        report: The progress callback, called after each batch; with workers, after each block of texts.
        workers: Worker processes for the first pass, which load the model by its name; None = this process runs it.

    Raises:
        AttnscopeError: The same errors as from `heads`.
    """
    options = options or AtlasOptions()
    # First pass: measure heads, and score and keep texts.
    heads_result, sums = study_heads(
        model,
        texts_of(corpus, model),
        options.heads,
        report,
        workers,
        measurer=partial(AtlasMeasurer, options=options),
        empty=ScoredSums(),
    )
    assert isinstance(sums, ScoredSums)
    if sums.scores is None:
        # No text was scored, for example because the first pass was interrupted.
        return _assemble(heads_result, options, Scores(), SecondPass())
    # Second pass: read the attention of the kept texts. `second_pass` grows text by text, so it is usable even after an
    # interruption.
    second_pass = SecondPass()
    table = heads_result.table("heads")
    heads = [(kind, *head) for kind, head in zip(table["kind"].tolist(), table.layer_heads, strict=True)]
    try:
        rereads = choose_texts(
            model,
            sums.scores,
            heads_result.corpus["n_tokens"],
            chunk=options.heads.chunk,
            stride=options.heads.stride,
        )
        run_second_pass(second_pass, model, heads, rereads, report)
    except KeyboardInterrupt:
        second_pass.complete = False
    except Exception as error:
        # Half-filled tables cannot be trusted after an error: keep the first pass, and record the failure.
        second_pass = SecondPass()
        failures = [
            *heads_result.run.get("failures", ()),
            describe_failure("reading the examples", error),
        ]
        heads_result = replace(heads_result, run={**heads_result.run, "failures": failures})
    return _assemble(heads_result, options, sums.scores, second_pass)


def _assemble(
    heads_result: Heads, options: AtlasOptions, scores: Scores, second_pass: SecondPass
) -> Atlas:
    """Return the atlas, from the result of `heads`, the scores of the first pass, and the second pass."""
    # Profiles, distances and token tables, kind by kind of attention; NaN if no text was sampled.
    table = heads_result.table("heads")
    n_heads = len(table)
    # (profile or its uniform baseline, head, offset)
    profiles = np.full((2, n_heads, N_OFFSETS), np.nan, np.float32)
    distances = np.full((n_heads, n_heads), np.nan, np.float32)
    map_points = np.full((n_heads, 2), np.nan)  # (head, x or y)
    token_rows: list[dict[str, Any]] = []
    if second_pass.n_sampled:
        for kind, kind_tables in second_pass.tables.items():
            heads = np.flatnonzero(table["kind"] == kind)
            profiles[:, heads] = kind_tables.compute_profiles()
            head_distances = kind_tables.compute_distances()
            distances[np.ix_(heads, heads)] = head_distances
            # Distances of heads of different kinds stay NaN, and each kind has a map of its own.
            map_points[heads], _ = classical_mds(head_distances.astype(np.float64))
            token_rows += kind_tables.make_token_rows(heads.tolist())
    token_rows.sort(key=lambda row: row["head"])

    # Add columns to the table of heads: their median and 90th-percentile scores, and their points on the map.
    deciles = np.full((n_heads, 11), np.nan)
    if scores.texts:
        deciles, _ = scores.deciles()
    rank = options.rank
    map_meaning = "heads that attend alike stand near each other"
    for column, values in (
        (number("score_median", label=f"{rank} (median text)"), deciles[:, 5]),
        (number("score_p90", label=f"{rank} (90th percentile)"), deciles[:, 9]),
        (number("map_x", map_meaning), map_points[:, 0]),
        (number("map_y", map_meaning), map_points[:, 1]),
    ):
        table = table.with_column(column, values)

    # Add the other tables and arrays, and the options with the meaning of scores and lifts.
    tables, arrays = make_example_tables(second_pass.examples)
    tables |= {
        "heads": table,
        "roles": heads_result.table("roles"),
        "tokens": Table.of(Atlas.TABLES["tokens"], token_rows),
    }
    arrays |= {
        "profile": profiles[0],
        "even_profile": profiles[1],
        "distance": distances,
        "deciles": deciles,
    }
    described_options = {
        **heads_result.options,
        "examples": options.examples,
        "sample": options.sample,
        "seed": options.seed,
        "rank": rank,
        "score": CONTENT_MEANING if rank == CONTENT_SCORE else table.columns[rank].meaning,
        "lift": EVEN_SHARE_WORDS,
    }
    corpus = settle_corpus(heads_result.corpus, interrupted=not second_pass.complete)
    corpus["n_sampled"] = second_pass.n_sampled
    return Atlas(heads_result.run, corpus, described_options, tables, arrays)


def make_example_tables(examples: Sequence[Example]) -> tuple[dict[str, Table], dict[str, NDArray[Any]]]:
    """Return the tables and arrays of examples, sorted by head; the best texts come first, then those of deciles."""
    examples = sorted(examples, key=_order_of_example)
    # Most columns are fields of `Example` and `WantedExample`; `Table.of` ignores other fields. The excerpts are stored
    # as one string, and each row holds where its excerpt begins.
    rows = []
    n_characters = 0
    for example in examples:
        row = {**vars(example), **vars(example.wanted)}
        row["first_character"] = n_characters
        row["n_characters"] = len(example.excerpt)
        n_characters += len(example.excerpt)
        rows.append(row)

    def join(name: str, *width: int) -> NDArray[Any]:
        """Concatenate the arrays (n, *width) of a field of all examples; (0, *width) if there are none."""
        values = [getattr(example, name) for example in examples]
        return np.concatenate([np.zeros((0, *width), np.int64), *values])

    # The shown tokens of all examples, (token,). A label is stored as an index into the vocabulary, which is the list
    # of distinct labels.
    labels = list(chain.from_iterable(example.labels for example in examples))
    vocabulary = {label: index for index, label in enumerate(dict.fromkeys(labels))}
    offsets = join("offsets", 2)
    # Each shown token, as a query, has the keys with its largest weights. Their number is stored too, (token,).
    n_kept_keys = join("n_kept")
    n_shown = [len(example.positions) for example in examples]
    shown = Table.of_arrays(
        Atlas.TABLES["shown"],
        example=np.repeat(np.arange(len(examples)), n_shown),
        place=join("positions"),
        label=[vocabulary[label] for label in labels],
        special=join("special"),
        start=offsets[:, 0],
        stop=offsets[:, 1],
        first_kept=np.cumsum(n_kept_keys) - n_kept_keys,
        n_kept=n_kept_keys,
    )
    tables = {
        "examples": Table.of(Atlas.TABLES["examples"], rows),
        "shown": shown,
        "vocabulary": Table.of_arrays(Atlas.TABLES["vocabulary"], label=list(vocabulary)),
    }
    # The kept keys of all examples, with the codes of their weights, and the excerpts. A key is the index of one of at
    # most MAX_SHOWN_TOKENS tokens, and a code is a weight times 255, so both fit in a byte. An excerpt is stored as an
    # array of Unicode code points.
    excerpts = "".join(example.excerpt for example in examples).encode("utf-32-le", "surrogatepass")
    arrays = {
        "kept_key": join("keys").astype(np.uint8),
        "kept_code": join("codes").astype(np.uint8),
        "characters": np.frombuffer(excerpts, "<u4").copy(),
    }
    return tables, arrays


def _order_of_example(example: Example) -> tuple[int, bool, int]:
    """Return the sort key of an example: by head, then "top" before "decile" (False before True), then by rank."""
    wanted = example.wanted
    return wanted.head, wanted.why != "top", wanted.rank
