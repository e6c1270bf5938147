"""Why does a head attend there? Which parts of the model its query reads, and which its key. Loads no torch."""

import math
from typing import Any, ClassVar

import numpy as np

from attnscope.errors import amount
from attnscope.options import heads_from, kind_option, option, options
from attnscope.report.blocks import Grid, Ranking, Report
from attnscope.report.numbers import fixed, largest_first, number, signed, small_number, weight
from attnscope.report.wording import printable, report_on
from attnscope.results.result import Result
from attnscope.results.table import Array, Floats, Table, count, text
from attnscope.results.table import number as numbers

MOST_PARTS = 12
"""How many parts of each side the figure shows one by one."""


@options
class WhyOptions:
    """The score to take apart: its head, query and key."""

    PANEL: ClassVar[str] = "Heads"

    pick: tuple[tuple[int, int], ...] | None = option(
        "The head, such as L18H6.", default=None, read=heads_from
    )
    query: str | None = option("The token that attends: a token, a word, or its number.", default=None)
    key: str | None = option(
        "The token that is attended to.  [default: the one with the most attention, apart from special tokens and a "
        "decoder's first]",
        default=None,
    )
    kind: str | None = kind_option()


class Why(Result):
    """An attention score before softmax, as a sum over pairs of parts of the model.

    Softmax sees only how a score differs from the others of its query. So from every number but `score` and `mean` its
    mean over the keys that the query may attend to is subtracted.
    """

    SCHEMA: ClassVar[str] = "attnscope.why/2"
    TABLES: ClassVar[Any] = {
        "parts": (
            text("part", "its name, such as L3H1, L3 MLP or tokens"),
            text("kind", "head, MLP, embedding or bias"),
            count("layer", "its layer; -1 = it belongs to none"),
            count("head", "its number among the heads of its layer; -1 = it is none"),
            numbers("query_nats", "what it adds to the score at the query", "nats", label="query reads"),
            numbers("key_nats", "what it adds to the score at the key", "nats", label="key offers"),
        ),
        "score": (
            text("kind", "kind of attention: encoder, decoder or cross"),
            count("layer", "the layer of the head", range=(0, None)),
            count("head", "its number", range=(0, None)),
            count("query", "which query, from 0", range=(0, None)),
            count("key", "which key, from 0", range=(0, None)),
            text("query_token", "the token of the query"),
            text("key_token", "the token of the key"),
            numbers("weight", "the attention weight between them", "share", range=(0, 1)),
            numbers("score", "scale * q · k + bias, before a cap", "nats"),
            numbers("mean", "the mean score of the keys that the query may attend to", "nats"),
            count("n_keys", "how many keys the query may attend to", range=(1, None)),
            count("masked_before", "keys before the query that a mask hides from it", range=(0, None)),
            count("masked_after", "keys from the query on that a mask hides", range=(0, None)),
            numbers("softcap", "the cap that the score goes through afterwards; NaN = none"),
            numbers("bias", "what a bias by position adds (T5, ALiBi); NaN = there is none", "nats"),
            numbers(
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
        """Return what is known of the score, by column of its table."""
        return {name: values[0].item() for name, values in self.table("score").values.items()}

    @property
    def name(self) -> str:
        """Return what the head is called."""
        return f"L{self.score['layer']}H{self.score['head']}"

    @property
    def bias(self) -> float:
        """Return what a bias by position adds, nats; 0 where there is none."""
        bias: float = self.score["bias"]
        return 0.0 if math.isnan(bias) else bias

    @property
    def excess(self) -> float:
        """Return the score above the mean of its query, nats: what the pairs and the bias sum to."""
        score = self.score
        return float(score["score"] - score["mean"])

    @property
    def off(self) -> float:
        """By how many nats the sum of all terms differs from the score."""
        return float(abs(self["pairs"].sum() + self.bias - self.excess))

    def require_whole(self) -> None:
        """Refuse what `Result` does, and parts whose sum is not the score."""
        super().require_whole()
        if len(self.table("score")) != 1:
            raise ValueError("it does not have one score")
        if not self.off <= self.score["rounding"]:
            raise ValueError(
                f"its parts sum to {self.off:.3g} more or less than its score; rounding explains "
                f"{self.score['rounding']:.3g}"
            )

    def report(self) -> Report:
        """Return the score, its strongest parts, and pairs of them."""
        answer = _answer(self)
        blocks = [_parts(self), _pairs(self), _matrix(self)]
        return report_on(
            self, [*answer, _strongest_parts(self)], blocks, _guide(self), subtitle=answer[-1]
        )


def _token(why: Why, side: str) -> str:
    """Return the token of a side, "query" or "key", with its place."""
    score = why.score
    return f"{printable(score[f'{side}_token'])} (token {score[side]})"


def _answer(why: Why) -> list[str]:
    """Return what was asked, and the score with what it is compared with."""
    score = why.score
    hidden = {"later": score["masked_after"], "earlier": score["masked_before"]}
    masked = " and ".join(f"{n} {side}" for side, n in hidden.items() if n)
    mask = f"; a mask hides {masked} {'key' if sum(hidden.values()) == 1 else 'keys'}" if masked else ""
    # The score beside the mean over the keys that it may attend to.
    side = "above" if why.excess >= 0 else "below"
    keys = amount(score["n_keys"], "key")
    compared_with = f"the mean of the {keys} that the query may attend to{mask}"
    difference = f"{fixed(abs(why.excess), 3)} nats {side} {compared_with}"
    return [
        f"why {why.name} attends from {_token(why, 'query')} to {_token(why, 'key')}",
        f"weight {weight(score['weight'])}: its score of {fixed(score['score'], 3)} is {difference}",
    ]


def _strongest_parts(why: Why) -> str:
    """Return a sentence on the part that adds most at each side."""
    parts = why.table("parts")
    told = []
    for side in ("query", "key"):
        values = parts[f"{side}_nats"]
        most = int(np.abs(values).argmax())
        name = printable(parts["part"][most])
        told.append(f"by the parts of the {side}, most is {name} ({signed(values[most])} nats)")
    return f"the same difference split in two ways: {'; '.join(told)}"


def _parts(why: Why) -> Ranking:
    """Return the parts, those first that add most at either side."""
    parts = why.table("parts")
    # The larger side of each part counts.
    largest = np.maximum(np.abs(parts["query_nats"]), np.abs(parts["key_nats"]))
    return Ranking(
        what="part (nats)",
        noun="part",
        names=parts["part"].tolist(),
        table=parts,
        columns=["query_nats", "key_nats"],
        order=largest_first(largest),
        most=8,
    )


def _pairs(why: Why) -> Ranking:
    """Return the pairs of parts that add most."""
    names = why.table("parts")["part"].tolist()
    # Pairs are (part of the query, part of the key); the largest sums, of either sign.
    values = why["pairs"]
    rows, columns = np.unravel_index(largest_first(np.abs(values), 100), values.shape)
    pair_names = [f"{names[row]} → {names[column]}" for row, column in zip(rows, columns, strict=True)]
    column = numbers(
        "nats", "what a part at the query times a part at the key adds", "nats", label="adds"
    )
    table = Table.of_arrays((column,), nats=values[rows, columns])
    return Ranking(
        what="pair: query → key",
        names=pair_names,
        table=table,
        columns=["nats"],
        order=range(len(pair_names)),
        most=5,
        noun="pair",
    )


def _matrix(why: Why) -> Grid:
    """Return the strongest parts of the query against those of the key, with others together and sums at the margins.

    The parts stand in the order of the model.
    """
    parts = why.table("parts")
    names = parts["part"].tolist()
    # The largest parts of each side, back in the order of the model.
    rows, columns = (
        sorted(largest_first(np.abs(parts[f"{side}_nats"]), MOST_PARTS)) for side in ("query", "key")
    )
    # All others fold into one row and one column; sums at the margins stay exact.
    values = _fold(_fold(why["pairs"], rows).T, columns).T
    values = np.vstack([values, values.sum(0)])
    values = np.hstack([values, values.sum(1, keepdims=True)])
    others = ["others"] if len(names) > MOST_PARTS else []
    return Grid(
        figure=f"why-{why.name}",
        title=_answer(why)[0],
        printed="never",
        values=values,
        rows=[*(names[row] for row in rows), *others, "sum"],
        columns=[*(names[column] for column in columns), *others, "sum"],
        notes=["rows: what the query reads; columns: what the key offers; nats"],
    )


def _fold(values: Floats, shown: Any) -> Floats:
    """Return the rows that are shown, and below them the sum of the others, if there are any."""
    others = np.setdiff1d(np.arange(len(values)), shown)
    return np.vstack([values[shown], values[others].sum(0)]) if len(others) else values[shown]


def _guide(why: Why) -> list[str]:
    """Return what must be known to read the numbers."""
    with_bias = (
        "" if math.isnan(why.score["bias"]) else f" and the bias by position ({signed(why.bias)})"
    )
    guide = [
        f"the parts of each side{with_bias} sum to the {number(abs(why.excess))} nats, as all pairs do; each part is "
        "less its mean over keys; norms are frozen; tokens: the embeddings",
        f"check: the sum differs from the model's score by {small_number(why.off)}; rounding explains "
        f"{small_number(why.score['rounding'])}",
    ]
    if not math.isnan(why.score["softcap"]):
        guide.append(
            f"the score is capped at {why.score['softcap']:g} afterwards; its parts are before that"
        )
    return guide
