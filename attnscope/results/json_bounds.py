"""JSON within bounds: how deep it is and how many values it holds is counted before any object is made of it.

A kilobyte that unpacks to `[],[],[]…` would otherwise fill the memory: an empty list takes 64 bytes, its text 3.
"""

import re

import numpy as np

MOST_DEPTH = 64
"""How deep lists and objects may stand in each other."""

MOST_CONTAINERS = 2**21
"""How many lists and objects there may be."""

MOST_VALUES = 2**25
"""How many values there may be, as in the weights of a large model written as JSON."""

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_OTHER = bytes(set(range(256)) - set(b"[]{},"))


def require_bounded(document: bytes, most_values: int = MOST_VALUES) -> None:
    """Refuse JSON that is too large to be parsed.

    Raises:
        ValueError: It is nested deeper than MOST_DEPTH, or holds more lists, objects or values than there may be.
    """
    structure = _STRING.sub(b"", document).translate(None, delete=_OTHER)
    n_containers = structure.count(b"[") + structure.count(b"{")
    if n_containers > MOST_CONTAINERS:
        raise ValueError(f"its JSON holds {n_containers:,} lists and objects, more than {MOST_CONTAINERS:,}")
    n_values = n_containers + structure.count(b",")
    if n_values > most_values:
        raise ValueError(f"its JSON holds {n_values:,} values, more than {most_values:,}")
    brackets = np.frombuffer(structure.replace(b",", b""), np.uint8)
    opens = (brackets == ord("[")) | (brackets == ord("{"))
    depth = int(np.where(opens, 1, -1).cumsum().max(initial=0))
    if depth > MOST_DEPTH:
        raise ValueError(f"its JSON is nested {depth:,} deep, more than {MOST_DEPTH}")
