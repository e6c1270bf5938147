"""An effect over texts, as records of heads, training and relations hold it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Effect:
    """A quantity over texts.

    Attributes:
        value: Its value; NaN where no text has it.
        low: Lower end of its 95% interval over texts; NaN with fewer than 2.
        high: Upper end.
        count: Over how many texts or predictions, as its facts say.
    """

    value: float
    low: float
    high: float
    count: float
