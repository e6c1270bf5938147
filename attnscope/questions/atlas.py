"""An atlas: every head of a model with the texts that show what it does. Its columns, and what is said of them.

Loads no torch. The page of an atlas (`attnscope.pages.heads`) and its study read the same columns.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import amount
from attnscope.questions.head_lines import is_described, sort_heads
from attnscope.questions.heads import ROLES
from attnscope.report.blocks import Note, Report, Words, rank_heads
from attnscope.report.numbers import largest_first
from attnscope.report.plain_text import cut
from attnscope.report.wording import printable, report_on
from attnscope.results.result import Result
from attnscope.results.table import HEADS, Array, Column, count, flag, number, share, text

FURTHEST = 64
"""Profiles tell offsets of up to so many tokens apart."""

N_OFFSETS = 2 * FURTHEST + 3

MOST_KEYS = 16
"""An example keeps at most so many keys of a row."""

KEPT_MASS = 0.95
"""An example keeps this share of a row, unless that takes more than `MOST_KEYS`."""

CODE = 1 / 255
"""The weight that a code of 1 stands for. So weights are off by at most 1/510."""

LEFT_OUT = " … "
"""Stands in an excerpt for tokens that are not shown."""

OUTSIDE_SINKS = (
    "what the key would get if each query's attention outside sinks were spread evenly outside sinks (the mean over "
    "texts)"
)
"""What the attention on a key or pair is divided by in its lift."""

_SHARES = (
    "in brackets: the share of its attention outside sinks that is there; uniform: of a head that "
    "attends to all alike"
)

_STAND_OUT, _MOST_CELLS = 5, 70
"""Heads that the terminal names first, and letters of the line of each."""


class Atlas(Result):
    """A description of every head of a model on a corpus, with the texts that show it.

    The table `heads` has what a study of heads measures, and `roles` the evidence for roles. `examples` are texts of a
    head, `shown` the tokens of them that are shown, with the weights that were kept of each. In an encoder-decoder, the
    row of a cross-attention's token is the decoder's as it writes that token again; keys are the encoder's.
    """

    SCHEMA: ClassVar[str] = "attnscope.atlas/2"
    TABLES: ClassVar[Mapping[str, Sequence[Column]]] = {
        "heads": (
            *HEADS,
            number("score_median", "score of the median text"),
            number("score_p90", "score that a tenth of the texts exceed"),
            number("map_x", "heads that attend alike stand near each other"),
            number("map_y", "heads that attend alike stand near each other"),
        ),
        "roles": ROLES,
        "tokens": (
            count("head", "the head", refers_to="heads"),
            text(
                "side", "asks: a query that gives attention away; gets: a key; pairs: a query and a key"
            ),
            text("query", "the query's label; empty of gets"),
            text("key", "the key's label; empty of asks"),
            share(
                "mass",
                "mean attention weight over texts: what a query gives away, or what it gives to such keys",
            ),
            number(
                "lift", f"attention divided by an even share of it: {OUTSIDE_SINKS}", range=(0, None)
            ),
            count("n_queries", "with how many queries it was seen"),
            count("n_texts", "in how many texts"),
        ),
        "examples": (
            count("head", "the head", refers_to="heads"),
            text("why", "top: one with the highest scores; decile: drawn from a decile of all"),
            count("rank", "from 0: the place, the best first; of decile the decile"),
            number("score", "the text's score"),
            count("text", "the text's number in the corpus"),
            text("source", "where it comes from, such as alice.txt:12"),
            count("n_tokens", "how many tokens the text has, or the chunk of a long one"),
            count("focus", "which shown token to look at first; -1 = none", range=(-1, None)),
            count("first_character", "where its excerpt begins in `characters`"),
            count("n_characters", "how long the excerpt is"),
        ),
        "shown": (
            count("example", "the example", refers_to="examples"),
            count("place", "the token's place in its text"),
            count("label", "its label", refers_to="vocabulary"),
            flag("special", "whether it is a special token"),
            count("start", "its first character in the excerpt"),
            count("stop", "its last character + 1; as start, if it stands for no character"),
            count("first_kept", "where the keys that were kept of its row begin"),
            count("n_kept", "how many were kept, the largest weight first"),
        ),
        "vocabulary": (text("label", "the label of a token"),),
    }
    ARRAYS: ClassVar[Sequence[Array]] = (
        Array(
            "profile",
            "attention by offset: further back, -64 to 64, further ahead",
            "share",
            (0, 1),
            axes=("heads", str(N_OFFSETS)),
        ),
        Array(
            "even_profile",
            "the same of uniform attention over the allowed keys",
            "share",
            (0, 1),
            axes=("heads", str(N_OFFSETS)),
        ),
        Array("deciles", "ends of the deciles of the score", axes=("heads", "11")),
        Array(
            "distance",
            "root of the mean squared Hellinger distance of rows",
            "",
            (0, 1),
            axes=("heads", "heads"),
        ),
        Array(
            "kept_key",
            "a kept key, as the number of a shown token of its example",
            kind="count",
            axes=("kept",),
        ),
        Array("kept_code", "its weight x 255", "", (0, 255), kind="count", axes=("kept",)),
        Array("characters", "all excerpts, as code points", kind="count", axes=("characters",)),
    )

    # Examples

    def tokens_of(self, example: int) -> slice:
        """Return the rows of `shown` of an example."""
        examples = self.table("shown")["example"]
        return slice(*np.searchsorted(examples, [example, example + 1]).tolist())

    def weights(self, example: int) -> NDArray[np.float32]:
        """Return the kept weights of an example, (query, key) of shown tokens; 0 where nothing was kept."""
        shown = self.table("shown").select(self.tokens_of(example))
        n = len(shown)
        weights = np.zeros((n, n), np.float32)
        for query, (first, n_kept) in enumerate(zip(shown["first_kept"], shown["n_kept"], strict=True)):
            kept = slice(first, first + n_kept)
            weights[query, self.grids["kept_key"][kept]] = self.grids["kept_code"][kept] * np.float32(
                CODE
            )
        return weights

    def labels(self, example: int) -> list[str]:
        """Return the labels of the shown tokens of an example."""
        shown = self.table("shown")["label"][self.tokens_of(example)]
        labels: list[str] = self.table("vocabulary")["label"][shown].tolist()
        return labels

    def excerpt(self, example: int) -> str:
        """Return the source's own characters of the shown tokens; empty where the tokenizer does not tell them."""
        examples = self.table("examples")
        first = int(examples["first_character"][example])
        characters = self.grids["characters"][first : first + int(examples["n_characters"][example])]
        return characters.astype("<u4").tobytes().decode("utf-32-le", "replace")

    def require_whole(self) -> None:
        """Refuse what `Result` does, and examples whose weights or characters are not there."""
        super().require_whole()
        shown = self.table("shown")
        if (np.diff(shown["example"]) < 0).any():
            raise ValueError("its examples are out of order")
        _require_within(shown["first_kept"], shown["n_kept"], len(self.grids["kept_key"]), "attention")
        examples = self.table("examples")
        n_characters = len(self.grids["characters"])
        _require_within(examples["first_character"], examples["n_characters"], n_characters, "text")
        sizes = np.bincount(shown["example"], minlength=len(examples))
        if (examples["focus"] >= np.maximum(sizes, 1)).any():
            raise ValueError("an example looks at a token that is not shown")
        # Of each kept key, the number of tokens of its example.
        n_kept = shown["n_kept"]
        within_row = np.arange(n_kept.sum()) - np.repeat(np.cumsum(n_kept) - n_kept, n_kept)
        keys = self.grids["kept_key"][np.repeat(shown["first_kept"], n_kept) + within_row]
        if (keys >= np.repeat(sizes[shown["example"]], n_kept)).any():
            raise ValueError("an example attends to a token that is not shown")

    # What is said

    def report(self, *, sort: str | None = None, **_: Any) -> Report:
        """Return the heads that stand out, then what each head does.

        Args:
            sort: "layer", "explained" or "entropy"; None = the heads with most to say first.
        """
        order = self.order(sort)
        heads = self.table("heads")
        does = _does(self)
        columns: list[str | Words] = [Words("what it does", does, wraps=True)]
        # The share that descriptions explain, where it was measured.
        if "kl_explained" in heads:
            columns.append("kl_explained")
        names = self.head_names
        ranking = rank_heads(
            self, columns, order, printed="with --all", heading="all heads", most=len(order)
        )
        n_examples = amount(len(self.table("examples")), "example text")
        first_ones = ", the best explained first" if sort is None else ""
        answer = f"what each of {amount(len(heads), 'head')} attends to{first_ones}; with {n_examples}"
        most = 1000 if len(order) == 1 else _MOST_CELLS
        first = Note(
            lines=[
                f"{names[head]:<7}{cut(does[head], most, at_word=True)}" for head in order[:_STAND_OUT]
            ]
        )
        return report_on(self, [answer, _SHARES], [first, ranking] if order else [], notes=_notes(self))

    def order(self, sort: str | None) -> Sequence[int]:
        """Return the rows of heads in an order: those with most to say first, or as `report` takes it."""
        heads = self.table("heads")
        if sort is not None or not is_described(self):
            return sort_heads(self, sort)
        explained = np.nan_to_num(heads["kl_explained"], nan=-1.0)
        return largest_first(explained * np.nan_to_num(heads["nats"]))


def _require_within(firsts: NDArray[Any], sizes: NDArray[Any], n: int, what: str) -> None:
    if len(firsts) and (min(firsts.min(), sizes.min()) < 0 or (firsts + sizes).max() > n):
        raise ValueError(f"the {what} of its examples is cut off")


def _does(atlas: Atlas) -> list[str]:
    """Return what each head does in a line: its description, else its roles."""
    heads = atlas.table("heads")
    roles = heads["role"].tolist()
    descriptions = heads["description"].tolist() if "description" in heads else [""] * len(roles)
    lines = []
    for words, role in zip(descriptions, roles, strict=True):
        named = role.replace("_", " ").replace("+", ", ")
        lines.append(printable(words or named, 1000) or "unclassified")
    return lines


def _notes(atlas: Atlas) -> list[str]:
    """Return how to read cards and the ranking."""
    return [
        "KL explained: the share of what sets a head apart from uniform attention that its line predicts on held-out "
        "texts",
        f"examples are ranked by {printable(atlas.options.get('score', ''))}",
    ]
