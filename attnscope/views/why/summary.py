"""What a score's parts are called and how their numbers are said, in the terminal and on figures."""

from __future__ import annotations

from attnscope.errors import amount
from attnscope.records.why.score import Why
from attnscope.views.tables.numbers import number, signed, small_number, weight
from attnscope.views.tables.wording import model_of, printable


def token(record: Why, side: str) -> str:
    """The token of a side, "query" or "key", and its place."""
    tokens, at = (record.queries, record.query) if side == "query" else (record.keys, record.key)
    return f"{printable(tokens.labels[at])} (@{at})"


def title_of(record: Why) -> str:
    """What the record is of."""
    return f"{model_of(record.run)} · why {record.name} attends from {token(record, 'query')} to {token(record, 'key')}"


def score_line(record: Why) -> str:
    """The weight, the score, and what it is compared with."""
    if (hidden := record.masked_before + record.masked_after) == 0:
        masked = ""
    else:
        sides = {"later": record.masked_after, "earlier": record.masked_before}
        masked = f"; a mask hides {' and '.join(f'{n} {side}' for side, n in sides.items() if n)}"
        masked += " key" if hidden == 1 else " keys"
    mean = f"the mean {number(record.mean)} of the {amount(record.n_keys, 'key')} that it may attend to{masked}"
    excess = signed(record.excess)
    return f"weight {weight(record.weight)}; score {number(record.score)}, {excess} nats from {mean}"


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
