"""The catalogue of head measures, what they must know of a text, and their definition on dense weights.

Every measure is a sum and a count for each text and head, never a mean: padding, batches, shards and merges then stay
exact, and a value is sum / count over whatever was added up. Two rules hold for all:

* Queries that are padding, or that may attend to nothing, count 0. A query for which a measure makes no sense counts 0
  too: for a measure of the mass on certain keys, one that may attend to none of them (no previous token, no token like
  it elsewhere, no punctuation before it).
* `<name>_active` is the same without the keys on which trained heads rest (special tokens and the first): the sum over
  the other keys, divided by all the mass that is on them. Both are sums, so a value is again sum / count.

This module knows no models and no tokenizers. `core.sums` computes the same without dense weights. What computes is
loaded when it is asked for: names, and what they mean, are known without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from attnscope.core.measures.catalogue import (
    FROM_OFFSETS,
    MEASURES,
    OFFSETS,
    REACH,
    SINK_THRESHOLD,
    WINDOW,
    Measure,
    measure_names,
)

if TYPE_CHECKING:
    from attnscope.core.measures.dense import measures_of_weights
    from attnscope.core.measures.facts import TextFacts
    from attnscope.core.measures.norms import output_factor, value_norms
    from attnscope.core.measures.totals import SumsOf

__all__ = [
    "FROM_OFFSETS",
    "MEASURES",
    "OFFSETS",
    "REACH",
    "SINK_THRESHOLD",
    "WINDOW",
    "Measure",
    "SumsOf",
    "TextFacts",
    "measure_names",
    "measures_of_weights",
    "output_factor",
    "value_norms",
]

_WITH_TORCH = {
    "SumsOf": "totals",
    "TextFacts": "facts",
    "measures_of_weights": "dense",
    "output_factor": "norms",
    "value_norms": "norms",
}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
