"""A plugin for attnscope: which heads attend to numbers, and a command that counts them.

Install it beside attnscope with `pip install ./examples/plugin`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from attnscope.options import option, options

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from attnscope.core.catalogue import Measure
    from attnscope.results.tokens import Tokens


def digits(tokens: Tokens) -> NDArray[np.bool_]:
    """Return which tokens hold a digit, (token,)."""
    return np.array([any(character.isdigit() for character in label) for label in tokens.labels])


TOKEN_SETS = {"digits": digits}


def measures() -> list[Measure]:
    """Return the share of attention that goes to tokens with a digit."""
    from attnscope.core.catalogue import KeyMeasure, Measure

    return [
        Measure(
            "digits",
            "attends to numbers",
            "sum of A_qk over k with a digit",
            "this example",
            KeyMeasure("digits"),
        )
    ]


@options
class Counting:
    """What is counted."""

    text: str = option("A text.", default="", argument=True)


def count_digits(*, order: Counting) -> None:
    """Count the digits of a text."""
    print(sum(character.isdigit() for character in order.text))


COMMANDS = {"count-digits": count_digits}
