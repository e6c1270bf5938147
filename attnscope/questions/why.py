"""Declare the result about one attention score, which says what each part of the model adds to it: columns and report.

A part is a head or MLP of an earlier layer, an embedding, or a bias: its output is a term of the residual stream. As
the score is a dot product, it is a sum of one term per pair of a part at the query and a part at the key. `studies.why`
computes the result. Loads no torch.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from attnscope.arrays import Floats
from attnscope.errors import amount
from attnscope.options import kind_option, option, options, read_heads
from attnscope.report.blocks import Grid, Ranking, Report
from attnscope.report.numbers import (
    format_fixed,
    format_signed,
    format_small,
    largest_first,
    number,
    weight,
)
from attnscope.report.wording import printable, report_on
from attnscope.results.result import Result
from attnscope.results.table import Array, Table, count, text
from attnscope.results.table import number as number_column

_MAX_DRAWN_PARTS = 12
"""The most parts, of the query and of the key, that the figure shows one by one. It sums the other parts."""


@options
class WhyOptions:
    """The options that name the score: its head, query and key."""

    PANEL: ClassVar[str] = "Heads"

    pick: tuple[tuple[int, int], ...] | None = option(
        "The head, such as L18H6.", default=None, read=read_heads
    )
    query: str | None = option("The token that attends: a token, a word, or its number.", default=None)
    key: str | None = option(
        "The token that is attended to.  [default: the one with the most attention, apart from special tokens and a "
        "decoder's first]",
        default=None,
    )
    kind: str | None = kind_option()


class Why(Result):
    """Hold an attention score before softmax, as a sum over pairs of parts of the model.

    Softmax depends only on how a score differs from the other scores of its query. So each term is centred: its mean
    over the keys that the query may attend to is subtracted. All terms and the position bias then sum to `score` -
    `mean`, two columns of the table `score`.

    The array `pairs` has the terms. In the table `parts`, `query_nats` is the sum of a part's terms at the query, over
    all parts at the key; `key_nats` is the sum at the key, over all parts at the query.
    """

    SCHEMA: ClassVar[str] = "attnscope.why/2"
    TABLES: ClassVar[Any] = {
        "parts": (
            text("part", "its name, such as L3H1, L3 MLP or tokens"),
            text("kind", "head, MLP, embedding or bias"),
            count("layer", "its layer; -1 = it belongs to none"),
            count("head", "its number among the heads of its layer; -1 = it is none"),
            number_column(
                "query_nats", "what it adds to the score at the query", "nats", label="query reads"
            ),
            number_column(
                "key_nats", "what it adds to the score at the key", "nats", label="key offers"
            ),
        ),
        "score": (
            text("kind", "kind of attention: encoder, decoder or cross"),
            count("layer", "the layer of the head", range=(0, None)),
            count("head", "its number", range=(0, None)),
            count("query", "which query, from 0", range=(0, None)),
            count("key", "which key, from 0", range=(0, None)),
            text("query_token", "the token of the query"),
            text("key_token", "the token of the key"),
            number_column("weight", "the attention weight between them", "share", range=(0, 1)),
            number_column("score", "scale * q · k + bias, before a cap", "nats"),
            number_column("mean", "the mean score of the keys that the query may attend to", "nats"),
            count("n_keys", "how many keys the query may attend to", range=(1, None)),
            count("masked_before", "keys before the query that a mask hides from it", range=(0, None)),
            count("masked_after", "keys from the query on that a mask hides", range=(0, None)),
            number_column("softcap", "the cap that the score goes through afterwards; NaN = none"),
            number_column(
                "bias", "what a bias by position adds (T5, ALiBi); NaN = there is none", "nats"
            ),
            number_column(
                "rounding", "how far the sum may be off by the rounding of the model's precision", "nats"
            ),
        ),
    }
    ARRAYS: ClassVar[Any] = (
        Array(
            "pairs",
            "what a part at the query (rows) times a part at the key (columns) adds",
            "nats",
            axes=("parts", "parts"),
        ),
    )

    @property
    def score(self) -> dict[str, Any]:
        """Return the only row of the table `score`, by column."""
        return self.table("score").as_dicts()[0]

    @property
    def name(self) -> str:
        """Return the name of the head, such as L3H1."""
        return f"L{self.score['layer']}H{self.score['head']}"

    @property
    def bias(self) -> float:
        """Return what the position bias (T5, ALiBi) adds, nats; 0 without a bias, where the column has NaN."""
        bias: float = self.score["bias"]
        return 0.0 if math.isnan(bias) else bias

    @property
    def excess(self) -> float:
        """Return the score minus the mean score of its query, nats. All terms and the bias sum to this."""
        score = self.score
        return float(score["score"] - score["mean"])

    @property
    def discrepancy(self) -> float:
        """Return the difference between the sum of all terms and `excess`, nats. Only rounding should cause it."""
        return float(abs(self["pairs"].sum() + self.bias - self.excess))

    def require_whole(self) -> None:
        """Refuse a damaged result, and one whose terms do not sum to the score."""
        super().require_whole()
        if len(self.table("score")) != 1:
            raise ValueError("it does not have one score")
        # `not <=` also refuses NaN.
        if not self.discrepancy <= self.score["rounding"]:
            raise ValueError(
                f"its parts sum to {self.discrepancy:.3g} more or less than its score; rounding explains "
                f"{self.score['rounding']:.3g}"
            )

    def report(self) -> Report:
        """Return the report: the score, the parts that add most to it, and the pairs of parts that add most."""
        answer = _write_answer(self)
        blocks = [_rank_parts(self), _rank_pairs(self), _draw_matrix(self)]
        return report_on(
            self,
            [*answer, _describe_strongest_parts(self)],
            blocks,
            _explain_numbers(self),
            subtitle=answer[-1],
        )


def _format_token(why: Why, side: str) -> str:
    """Format a token with its index, such as "cat (token 3)"; `side` is "query" or "key"."""
    score = why.score
    return f"{printable(score[f'{side}_token'])} (token {score[side]})"


def _write_answer(why: Why) -> list[str]:
    """Write the question, and a sentence that compares the score with the mean score of its query."""
    score = why.score
    n_masked_after, n_masked_before = score["masked_after"], score["masked_before"]
    masked_phrases = []
    if n_masked_after:
        masked_phrases.append(f"{n_masked_after} later")
    if n_masked_before:
        masked_phrases.append(f"{n_masked_before} earlier")
    mean = f"the mean of the {amount(score['n_keys'], 'key')} that the query may attend to"
    # The mean does not include masked keys, so say how many there are.
    if masked_phrases:
        noun = "key" if n_masked_after + n_masked_before == 1 else "keys"
        mean += f"; a mask hides {' and '.join(masked_phrases)} {noun}"
    side = "above" if why.excess >= 0 else "below"
    difference = f"{format_fixed(abs(why.excess), 3)} nats {side} {mean}"
    return [
        f"why {why.name} attends from {_format_token(why, 'query')} to {_format_token(why, 'key')}",
        f"weight {weight(score['weight'])}: its score, before softmax, is {difference}",
    ]


def _describe_strongest_parts(why: Why) -> str:
    """Write the part that adds most at the query, and the part that adds most at the key."""
    parts = why.table("parts")
    phrases = []
    for side in ("query", "key"):
        values = parts[f"{side}_nats"]
        strongest = int(np.abs(values).argmax())
        name = printable(parts["part"][strongest])
        phrases.append(
            f"by the {side}'s parts, the largest is {name} ({format_signed(values[strongest])} nats)"
        )
    return f"split {'; split '.join(phrases)}"


def _rank_parts(why: Why) -> Ranking:
    """Rank the parts by how much they change the score, at the query or at the key: the larger size counts."""
    parts = why.table("parts")
    magnitudes = np.maximum(np.abs(parts["query_nats"]), np.abs(parts["key_nats"]))
    return Ranking(
        header="part (nats)",
        noun="part",
        names=parts["part"].tolist(),
        table=parts,
        columns=["query_nats", "key_nats"],
        order=largest_first(magnitudes),
        n_printed=8,
    )


def _rank_pairs(why: Why) -> Ranking:
    """Rank the 100 pairs of parts that change the score most, up or down."""
    part_names = why.table("parts")["part"]
    # (part at the query, part at the key)
    terms = why["pairs"]
    query_parts, key_parts = np.unravel_index(largest_first(np.abs(terms), 100), terms.shape)
    pair_names = [
        f"{query} → {key}"
        for query, key in zip(part_names[query_parts], part_names[key_parts], strict=True)
    ]
    column = number_column(
        "nats", "what a part at the query times a part at the key adds", "nats", label="adds"
    )
    table = Table.of_arrays((column,), nats=terms[query_parts, key_parts])
    return Ranking(
        header="pair: query → key",
        names=pair_names,
        table=table,
        columns=["nats"],
        order=range(len(pair_names)),
        noun="pair",
    )


def _draw_matrix(why: Why) -> Grid:
    """Draw the pairs as a matrix: the strongest parts one by one, then all others as one part, then the sum.

    Rows are parts at the query, columns are parts at the key.
    """
    parts = why.table("parts")
    query_rows, query_names = _select_strongest(parts, "query")
    key_rows, key_names = _select_strongest(parts, "key")
    values = _fold_rows(why["pairs"], query_rows)
    # Transpose, so that the columns are folded like rows.
    values = _fold_rows(values.T, key_rows).T
    return Grid(
        figure=f"why-{why.name}",
        title=_write_answer(why)[0],
        printed="never",
        values=values,
        rows=query_names,
        columns=key_names,
        notes=["rows: what the query reads; columns: what the key offers; nats"],
    )


def _select_strongest(parts: Table, side: str) -> tuple[list[int], list[str]]:
    """Return the rows of the strongest parts in the table `parts`, and the labels of the rows that `_fold_rows` makes.

    `side` is "query" or "key". The rows keep the order of the table. The labels end in those of the rows that
    `_fold_rows` adds: "others", if parts are left over, and "sum".
    """
    rows = sorted(largest_first(np.abs(parts[f"{side}_nats"]), _MAX_DRAWN_PARTS))
    names = parts["part"][rows].tolist()
    others_name = ["others"] if len(parts) > _MAX_DRAWN_PARTS else []
    return rows, [*names, *others_name, "sum"]


def _fold_rows(values: Floats, kept_rows: Sequence[int]) -> Floats:
    """Return the kept rows, then the sum of the other rows (if there are any), then the sum of all rows."""
    other_rows = np.delete(values, kept_rows, 0)
    folded = values[kept_rows]
    if len(other_rows):
        folded = np.vstack([folded, other_rows.sum(0)])
    return np.vstack([folded, folded.sum(0)])


def _explain_numbers(why: Why) -> list[str]:
    """Explain how to read the numbers, and how exact their sum is."""
    with_bias = ""
    if not math.isnan(why.score["bias"]):
        with_bias = f" and the bias by position ({format_signed(why.bias)})"
    guide = [
        f"the parts of each side{with_bias} sum to the {number(abs(why.excess))} nats, as all pairs do; each part is "
        "less its mean over keys; norms are frozen; tokens: the embeddings",
        f"check: the sum differs from the model's score by {format_small(why.discrepancy)}; rounding explains "
        f"{format_small(why.score['rounding'])}",
    ]
    if not math.isnan(why.score["softcap"]):
        guide.append(
            f"the score is capped at {why.score['softcap']:g} afterwards; its parts are before that"
        )
    return guide
