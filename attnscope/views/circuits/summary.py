"""What circuits are called and how their numbers are said, in the terminal and on figures."""

from __future__ import annotations

import math
from collections.abc import Sequence

from attnscope.records.circuits import CircuitHead, Circuits, Link, Score
from attnscope.views.tables.numbers import fixed
from attnscope.views.tables.wording import model_of

READS = {"Q": "queries", "K": "keys", "V": "values"}


def title_of(found: Circuits) -> str:
    """What the record is of."""
    return f"{model_of(found.run)} · circuits: what the weights of its heads say"


def score(one: Score) -> str:
    """A score, with a star where it is beyond all random heads."""
    return fixed(one.value, 2) + ("*" if one.is_outside else "")


def spell(token: str) -> str:
    """A token with a mark where a space begins it, as several differ in nothing else."""
    return "·" + token[1:] if token.startswith(" ") else token


def tokens(found: Sequence[str], most: int = 5) -> str:
    """Tokens in a line."""
    return " ".join(spell(one) for one in found[:most])


def link_line(found: Circuits, link: Link) -> str:
    """Such as L4H11 → L5H1."""
    return f"{found.heads[link.sender].name} → {found.heads[link.receiver].name}"


def most_copying(found: Circuits, most: int, *, least: bool = False) -> list[CircuitHead]:
    """The heads with the highest copying scores, or the lowest, first; of those where it is defined."""
    known = [head for head in found.heads if math.isfinite(head.copying.value)]
    return sorted(known, key=lambda head: head.copying.value * (1 if least else -1))[:most]


def most_previous(found: Circuits, most: int) -> list[CircuitHead]:
    """The heads that would look at the previous token by position alone, most first; of those above uniform."""
    layers = sorted({head.layer for head in found.heads})
    uniform = dict(zip(layers, found.uniform.get("previous", ()), strict=False))
    known = [h for h in found.heads if math.isfinite(h.previous) and h.previous > uniform.get(h.layer, math.inf)]
    return sorted(known, key=lambda head: -head.previous)[:most]


def likeness_of(found: Circuits) -> str:
    """How far tokens stand for what is written; empty where they are logits."""
    if found.ends == "static embeddings":
        return "no language-modelling head: static embeddings stand for W_U; tokens and copying are only a likeness"
    if found.kind == "encoder":
        return "an encoder fills in masked words: tokens and copying are only a likeness of what a head does there"
    return ""


def notes_of(found: Circuits, *, marks: bool = True) -> list[str]:
    """What must be known to read the numbers; `marks`: where scores have stars."""
    notes = [
        "copying: sum of the eigenvalues of W_U W_O W_V W_E by the sum of their absolute values, 1 = what is attended "
        "to is written, −1 = it is taken away"
        + f"; * = beyond all of {found.n_draws} random heads with the same singular values"
        * marks
    ]
    notes += [likeness_of(found)] * bool(likeness_of(found))
    notes.append(
        "composition: |X Y| / (|X| |Y|) of what one head writes and another reads; chance: its mean for matrices of "
        "the same singular values whose directions are random"
    )
    return notes
