"""Declare an atlas, which shows for every head of a model the texts on which it is most active: columns and report.

`studies.atlas` fills in the columns. `pages.heads` makes a page with a card for each head. This module loads no torch.

A *sink* is a token that collects attention without meaning, such as a special token. A *lift* is attention divided by
an even share of it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import amount
from attnscope.questions.head_lines import is_described, order_heads
from attnscope.questions.heads import ROLE_EVIDENCE_COLUMNS
from attnscope.report.blocks import Note, Report, WordsColumn, rank_heads
from attnscope.report.numbers import largest_first
from attnscope.report.plain_text import cut
from attnscope.report.wording import printable, report_on
from attnscope.results.result import Result
from attnscope.results.table import HEADS, Array, Column, count, flag, number, share, text

MAX_PROFILE_OFFSET = 64
"""The largest offset, in tokens, that has an entry of its own in a profile (attention by offset)."""

N_OFFSETS = 2 * MAX_PROFILE_OFFSET + 3
"""The number of entries of a profile: keys more than 64 back, each offset from -64 to 64, keys more than 64 ahead."""

MAX_KEYS = 16
"""The most keys of a query's row of attention that an example keeps."""

KEPT_MASS = 0.95
"""The fraction of a row's weight that the kept keys hold, unless that takes more than `MAX_KEYS` keys."""

CODE_WEIGHT = 1 / 255
"""The weight that a code of 1 stands for. A code has 8 bits, so weights are off by at most 1/510."""

OMISSION_MARK = " … "
"""The mark in an excerpt for omitted tokens."""

EVEN_SHARE_WORDS = (
    "what the key would get if each query's attention outside sinks were spread evenly outside sinks (the mean over "
    "texts)"
)
"""The words for the denominator of the lift of a key or of a pair. `studies.atlas` saves them in the record."""

_LINES_GUIDE = (
    "in brackets: share of its attention outside sinks (uniform: if it spread evenly); rests: share of all "
    "attention that sinks get; also: further strong links"
)

_N_LISTED_HEADS = 5
"""The number of heads that the terminal lists without --all."""

_MAX_LINE_CELLS = 70
"""The most characters of the line of each of these heads; a single head has its full line."""


class Atlas(Result):
    """Hold a description of every head of a model on a corpus, with texts as examples.

    - `heads` has the measures of a study of heads, and `roles` the evidence for roles.
    - `tokens` lists the queries, the keys and the pairs of tokens on which a head's attention concentrates.
    - `examples` are texts of a head. `shown` are the tokens of an example that a card shows. Each shown token keeps the
      largest weights of its row: `n_kept` entries of the arrays `kept_key` and `kept_code`, from `first_kept` on.

    In cross-attention of an encoder-decoder, keys are tokens of the encoder. The decoder writes the same text again.
    The query of a token is the query from which the decoder predicts the token.
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
        "roles": ROLE_EVIDENCE_COLUMNS,
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
                "lift", f"attention divided by an even share of it: {EVEN_SHARE_WORDS}", range=(0, None)
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
        """Return the rows of `shown` that are the tokens of an example."""
        # `shown` is sorted by example: find where the example and the next one begin.
        start, stop = np.searchsorted(self.table("shown")["example"], [example, example + 1]).tolist()
        return slice(start, stop)

    def weights(self, example: int) -> NDArray[np.float32]:
        """Return the weights of an example, (query, key) of its shown tokens; a weight that was not kept is 0."""
        shown = self.table("shown").select(self.tokens_of(example))
        n_shown = len(shown)
        weights = np.zeros((n_shown, n_shown), np.float32)
        for query, (first, n_kept) in enumerate(zip(shown["first_kept"], shown["n_kept"], strict=True)):
            kept_slice = slice(first, first + n_kept)
            codes = self.grids["kept_code"][kept_slice]
            weights[query, self.grids["kept_key"][kept_slice]] = codes * np.float32(CODE_WEIGHT)
        return weights

    def labels(self, example: int) -> list[str]:
        """Return the labels of the shown tokens of an example."""
        # `label` has the row of each token's label in `vocabulary`, (token,).
        label_rows = self.table("shown")["label"][self.tokens_of(example)]
        return list(map(str, self.table("vocabulary")["label"][label_rows]))

    def excerpt(self, example: int) -> str:
        """Return the text of the shown tokens as the source has it; empty if the tokenizer gives no offsets."""
        examples = self.table("examples")
        start = int(examples["first_character"][example])
        characters = self.grids["characters"][start : start + int(examples["n_characters"][example])]
        # `characters` holds code points, which are UTF-32 as little-endian integers of four bytes.
        return characters.astype("<u4").tobytes().decode("utf-32-le", "replace")

    def require_whole(self) -> None:
        """Raise a ValueError for what `Result.require_whole` refuses, and for examples that exceed the arrays."""
        super().require_whole()
        # Tokens must be sorted by example. Their kept keys and the characters of excerpts must lie within the arrays.
        shown = self.table("shown")
        if (np.diff(shown["example"]) < 0).any():
            raise ValueError("its examples are out of order")
        _require_within(shown["first_kept"], shown["n_kept"], len(self.grids["kept_key"]), "attention")
        examples = self.table("examples")
        n_characters = len(self.grids["characters"])
        _require_within(examples["first_character"], examples["n_characters"], n_characters, "text")
        # The number of shown tokens of each example, (example,). `focus` is the index of one of them, -1 = no token.
        n_shown = np.bincount(shown["example"], minlength=len(examples))
        if (examples["focus"] >= np.maximum(n_shown, 1)).any():
            raise ValueError("an example looks at a token that is not shown")
        # The indices in `kept_key` of the kept keys of all rows, (kept,): a row with first_kept 7, n_kept 2 and a row
        # with first_kept 0, n_kept 3 give 7, 8, 0, 1, 2.
        n_kept = shown["n_kept"]
        first_indices = np.repeat(shown["first_kept"], n_kept)
        index_in_row = np.arange(len(first_indices)) - np.repeat(np.cumsum(n_kept) - n_kept, n_kept)
        keys = self.grids["kept_key"][first_indices + index_in_row]
        # A key is the index of a token among the shown tokens of its example.
        if (keys >= np.repeat(n_shown[shown["example"]], n_kept)).any():
            raise ValueError("an example attends to a token that is not shown")

    # Report

    def report(self, *, sort: str | None = None, **_: Any) -> Report:
        """Return the report: the first few heads with a line each, then all heads.

        Args:
            sort: The order of heads, see `order`.
        """
        order = self.order(sort)
        heads = self.table("heads")
        descriptions = _describe_heads(self)
        columns: list[str | WordsColumn] = [WordsColumn("what it does", descriptions, wraps=True)]
        # `kl_explained`, the share of attention that a description explains, exists only if heads were described.
        if "kl_explained" in heads:
            columns.append("kl_explained")

        # Without --all it is not printed, but LaTeX and Markdown have as many of its rows as lines follow here.
        ranking = rank_heads(
            self, columns, order, printed="with --all", heading="all heads", n_printed=_N_LISTED_HEADS
        )
        # The answer says "up to": the mean number of excerpts per head, rounded up, as heads may have fewer.
        n_per_head = math.ceil(len(self.table("examples")) / max(len(heads), 1))
        n_examples = amount(n_per_head, "excerpt")
        order_words = ", those with most to say first" if sort is None else ""
        answer = f"what each of {amount(len(heads), 'head')} attends to{order_words}; with up to {n_examples} each"
        # A single head has room for its full line, which `_describe_heads` limits to 1000 characters.
        cells = 1000 if len(order) == 1 else _MAX_LINE_CELLS
        lines = []
        for head in order[:_N_LISTED_HEADS]:
            lines.append(f"{self.head_names[head]:<7}{cut(descriptions[head], cells, at_word=True)}")
        blocks = [Note(lines=lines), ranking] if order else []
        return report_on(self, [answer, _LINES_GUIDE], blocks, notes=_make_notes(self))

    def order(self, sort: str | None) -> Sequence[int]:
        """Return the rows of heads by "layer", "explained" or "entropy"; None = by what their descriptions explain."""
        heads = self.table("heads")
        if sort is not None or not is_described(self):
            return order_heads(self, sort)
        # The share that a description explains, (head,), times the KL divergence from uniform attention in nats: how
        # many nats the description explains. A head without a description comes last.
        explained = np.nan_to_num(heads["kl_explained"], nan=-1.0)
        return largest_first(explained * np.nan_to_num(heads["nats"]))


def _require_within(starts: NDArray[Any], sizes: NDArray[Any], n_entries: int, noun: str) -> None:
    """Raise a ValueError if slices, given by their starts and sizes, reach beyond an array of `n_entries` entries."""
    is_outside = (starts < 0) | (sizes < 0) | (starts + sizes > n_entries)
    if is_outside.any():
        raise ValueError(f"the {noun} of its examples is cut off")


def _describe_heads(atlas: Atlas) -> list[str]:
    """Return one line for each head: its description, else its roles, else "unclassified"."""
    heads = atlas.table("heads")
    lines = []
    for row, roles in enumerate(heads["role"].tolist()):
        role_names = roles.replace("_", " ").replace("+", ", ")
        description = str(heads["description"][row]) if "description" in heads else ""
        lines.append(printable(description or role_names, 1000) or "unclassified")
    return lines


def _make_notes(atlas: Atlas) -> list[str]:
    """Return what KL explained means, and the score by which examples are ranked."""
    return [
        "KL explained: the share of what sets a head apart from uniform attention that its line predicts on held-out "
        "texts",
        f"examples are ranked by {printable(atlas.options.get('score', ''))}",
    ]
