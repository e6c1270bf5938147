"""The tokens of a text as a table of a result, and back."""

from __future__ import annotations

import numpy as np

from attnscope.records.maps.tokens import Tokens
from attnscope.results.table import Table, count, flag, text

TOKENS = (
    text("token", "the token as the tokenizer writes it; a leading space as ·"),
    count("id", "its number in the vocabulary; -1 = a word that was merged from several tokens", range=(-1, None)),
    count("start", "its first character in the text; -1 = it stands for no text", range=(-1, None)),
    count("stop", "the character after its last one", range=(-1, None)),
    flag("special", "whether the tokenizer added it, such as [CLS]"),
    count("word", "the word that it is part of, from 0; -1 = none; -2 = the tokenizer cannot tell", range=(-2, None)),
    count("segment", "0 = of the first text, 1 = of the second one of a pair", range=(0, 1)),
    flag("generated", "whether the model wrote it itself"),
)
"""The columns of a table of tokens."""

UNKNOWN_WORD = -2


def tokens_table(tokens: Tokens) -> Table:
    """Return the tokens of a text as a table. The text itself is not in it."""
    n_tokens = len(tokens)
    n_given = n_tokens if tokens.n_given < 0 else tokens.n_given
    words = np.full(n_tokens, UNKNOWN_WORD) if tokens.words is None else tokens.words
    return Table.of_arrays(
        TOKENS,
        token=tokens.labels,
        id=tokens.ids,
        start=tokens.offsets[:, 0],
        stop=tokens.offsets[:, 1],
        special=tokens.special,
        word=words,
        segment=tokens.segments,
        generated=np.arange(n_tokens) >= n_given,
    )


def tokens_of(table: Table, text: str, pair: str | None = None) -> Tokens:
    """Return the tokens that a table holds.

    Args:
        table: The table.
        text: The text that was tokenised, or the first of two.
        pair: The second one.

    Raises:
        ValueError: A token has no label, or generated tokens stand before others.
    """
    generated = table["generated"]
    n_given = int((~generated).sum())
    if generated[:n_given].any():
        raise ValueError("tokens that the model wrote stand before others")
    words = table["word"].astype(np.int32)
    is_unknown = bool((words == UNKNOWN_WORD).any())
    tokens = Tokens(
        text=text,
        ids=table["id"].astype(np.int64),
        labels=tuple(table["token"].tolist()),
        offsets=np.stack([table["start"], table["stop"]], -1).astype(np.int32),
        special=table["special"],
        words=None if is_unknown else words,
        segments=table["segment"].astype(np.int32),
        pair=pair,
        n_given=n_given,
    )
    tokens.require_whole()
    return tokens
