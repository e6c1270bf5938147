"""What a score's parts are called and how their numbers are said, in the terminal and on figures."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import amount
from attnscope.records.why.score import Why
from attnscope.report.numbers import number, signed, small_number, weight
from attnscope.report.wording import model_of, printable


def token(record: Why, side: str) -> str:
    """The token of a side, "query" or "key", and its place."""
    tokens, at = (record.queries, record.query) if side == "query" else (record.keys, record.key)
    return f"{printable(tokens.labels[at])} (@{at})"


def title_of(record: Why) -> str:
    """What the record is of."""
    return f"{model_of(record.run)} · why {record.name} attends from {token(record, 'query')} to {token(record, 'key')}"


def score_line(record: Why) -> str:
    """The weight, the score, and what it is compared with."""
    masked, sides = "", {"later": record.masked_after, "earlier": record.masked_before}
    if n_masked := sum(sides.values()):
        masked = f"; a mask hides {' and '.join(f'{n} {side}' for side, n in sides.items() if n)}"
        masked += " key" if n_masked == 1 else " keys"
    mean = f"the mean {number(record.mean)} of the {amount(record.n_keys, 'key')} that it may attend to{masked}"
    side = "above" if record.excess >= 0 else "below"
    excess = f"{number(abs(record.excess))} nats {side} {mean}"
    return f"weight {weight(record.weight)}; score {number(record.score)}, {excess}"


def notes_of(record: Why) -> list[str]:
    """What must be known to read the numbers."""
    notes = [
        "query reads: what each part at the query adds to the score; key offers: what each part at the key adds; pair: "
        "what a part at the query times a part at the key adds",
        f"the parts of each side sum to {signed(record.excess - (record.bias or 0.0))} nats, as all pairs do; each is "
        "less its mean over keys; norms are frozen",
        f"check: all pairs{'' if record.bias is None else ' and the bias'} differ from the model's score by "
        f"{small_number(record.off)}; rounding explains {small_number(record.rounding)}",
    ]
    if record.softcap is not None:
        notes.append(f"the score is capped at {record.softcap:g} afterwards; the parts are of the score before that")
    return notes


def lists_of(record: Why, most: int) -> dict[str, list[tuple[str, float]]]:
    """What adds most, in nats, with what the others add together: the query's parts, the key's, and pairs of them."""
    names = [part.name for part in record.parts]

    def list_largest(largest: list[tuple[str, float]], values: NDArray[np.float64]) -> list[tuple[str, float]]:
        """The largest, the sum of all others, and the bias."""
        rest = values.size - len(largest)
        others = float(values.sum()) - sum(value for _, value in largest)
        rows = [*largest, (f"{rest:,} others", others)] if rest else [*largest]
        return rows if record.bias is None else [*rows, ("bias by position", record.bias)]

    def strongest(values: NDArray[np.float64]) -> list[tuple[str, float]]:
        order = np.argsort(-np.abs(values), kind="stable")[:most]
        return list_largest([(names[at], float(values[at])) for at in order], values)

    pairs = [(f"{names[c]} → {names[d]}", float(record.pairs[c, d])) for c, d in record.strongest(most)]
    return {
        "query reads": strongest(record.by_query),
        "key offers": strongest(record.by_key),
        "pair: query → key": list_largest(pairs, record.pairs),
    }
