"""The source's own characters of some tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from attnscope.records import Tokens
from attnscope.records.atlas.record import LEFT_OUT


def excerpt_of(tokens: Tokens, places: NDArray[np.int64]) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The source's own characters of some tokens, and where in them each token stands.

    Args:
        tokens: A text.
        places: Which of its tokens, rising.

    Returns:
        As `ExampleFacts.excerpt` and its `offsets`; nothing where the tokenizer cannot tell.
    """
    written = ""
    offsets: list[tuple[int, int]] = []
    end = -1  # in the source, of what is written; -1: tokens were left out since
    for number, place in enumerate(places.tolist()):
        start, stop = tokens.offsets[place].tolist()
        if number and place != places[number - 1] + 1:
            written, end = written + LEFT_OUT, -1
        if start < 0 or stop <= start:
            offsets.append((len(written), len(written)))
            continue
        if end < 0:
            end = start
        written += tokens.text[end : max(start, end)]
        # Tokens that are bytes of one character share it.
        first = len(written) - max(0, end - start)
        written += tokens.text[max(start, end) : stop]
        end = max(end, stop)
        offsets.append((first, len(written)))
    return (written, tuple(offsets)) if any(stop > start for start, stop in offsets) else ("", ())
