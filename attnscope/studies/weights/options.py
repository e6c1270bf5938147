"""The options of `attnscope weights` and `attnscope.weights`. Loads nothing heavy."""

from __future__ import annotations

from pathlib import Path

from attnscope.options import heads_from, option, options, seed_option


@options
class WeightsOptions:
    """What is asked of the weights."""

    pick: tuple[tuple[int, int], ...] | None = option(
        "Print everything about these heads, such as L3H1,L5H11.", default=None, read=heads_from, panel="Heads"
    )
    frequencies: Path | None = option(
        "A file of word counts (word, tab, count): also say what heads write for the most common tokens.", default=None
    )
    directions: int = option("How many singular directions to show per head.", default=2, least=0, python_only=True)
    seed: int = seed_option("the random heads that scores are compared with")
    tokens: int = option("Tokens at each end of a direction.", default=5, least=1, python_only=True)
    draws: int = option(
        "Random heads that scores are compared with; one more than 39 lies outside all of them in 5% of cases.",
        default=39,
        least=19,
        python_only=True,
    )
    answers: int = option("How many of the commonest tokens.", default=10, least=1, python_only=True)
