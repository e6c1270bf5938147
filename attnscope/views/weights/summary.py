"""What weights are called and how their numbers are said, in the terminal and on figures."""

from __future__ import annotations

from collections.abc import Sequence

from attnscope.records.weights import HeadWeights, Score
from attnscope.report.numbers import fixed
from attnscope.report.wording import model_of

READS = {"Q": "queries", "K": "keys", "V": "values"}


def title_of(weights: HeadWeights) -> str:
    """What the record is of."""
    return f"{model_of(weights.run)} · what the weights of its heads say"


def score(one: Score) -> str:
    """A score, with a star where it is beyond all random heads."""
    return fixed(one.value, 2) + ("*" if one.is_outside else "")


def spell(token: str) -> str:
    """A token with a mark where a space begins it, as several differ in nothing else."""
    return "·" + token[1:] if token.startswith(" ") else token


def tokens(weights: Sequence[str], most: int = 5) -> str:
    """Tokens in a line."""
    return " ".join(spell(one) for one in weights[:most])


def likeness_of(weights: HeadWeights) -> str:
    """How far tokens stand for what is written; empty where they are logits."""
    if weights.ends == "static embeddings":
        return "no language-modelling head: static embeddings stand for W_U; tokens and copying are only a proxy"
    if weights.kind == "encoder":
        return "an encoder fills in masked words: tokens and copying are only a proxy for what a head does there"
    return ""


def notes_of(weights: HeadWeights, *, marks: bool = True) -> list[str]:
    """What must be known to read the numbers; `marks`: where scores have stars."""
    notes = [
        "copying: sum of the eigenvalues of W_U W_O W_V W_E by the sum of their absolute values, 1 = what is attended "
        "to is written, −1 = it is taken away"
        + f"; * = beyond all of {weights.n_draws} random heads with the same singular values"
        * marks
    ]
    notes += [likeness_of(weights)] * bool(likeness_of(weights))
    notes.append(
        "composition: |X Y| / (|X| |Y|) of what one head writes and another reads; chance: its mean for matrices of "
        "the same singular values whose directions are random"
    )
    return notes
