"""Which heads ground words: photos with a phrase and the box of what it names, from JSON lines; and the evidence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError
from attnscope.records import Tokens
from attnscope.records.heads.findings import Head, Role
from attnscope.records.maps.pictures import Picture

if TYPE_CHECKING:
    from attnscope.core.exact.running import RunningSums

LEVEL = 0.05
"""The false discovery rate over heads (Benjamini & Hochberg 1995)."""

MARGIN = 0.1
"""How much more than its area a box must get for a head to ground words."""

FEWEST_PICTURES = 10
"""With fewer pictures the role is tentative."""

ROLE = {
    "what": "looks into the box of what a phrase names, by more than the area of the box",
    "measure": "grounds",
    "threshold": MARGIN,
}


@dataclass(frozen=True)
class Reference:
    """A photo, a phrase, and the box of what it names: left, top, right and lower edge, in pixels of the photo."""

    image: Path
    phrase: str
    box: tuple[float, float, float, float]


def read_references(path: Path) -> list[Reference]:
    """Reads JSON lines with `image` (a path, relative to the file), `phrase` and `box`.

    Raises:
        AttnscopeError: There is no such file, or a line is of another form; says which.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise AttnscopeError(f"cannot read {path}: {type(error).__name__}", "give JSON lines in UTF-8") from None
    references = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            left, top, right, bottom = (float(edge) for edge in entry["box"])
            image, phrase = path.parent / str(entry["image"]), str(entry["phrase"])
        except (ValueError, KeyError, TypeError):
            raise AttnscopeError(
                f"line {number} of {path} is no reference",
                'such as {"image": "a.jpg", "phrase": "the cat", "box": [10, 20, 110, 90]}',
            ) from None
        if not (left < right and top < bottom and phrase.strip()):
            raise AttnscopeError(
                f"line {number} of {path} has an empty box or phrase", "boxes are left, top, right, bottom"
            )
        references.append(Reference(image, phrase, (left, top, right, bottom)))
    return references


def cover(picture: Picture, box: Sequence[float]) -> NDArray[np.float64] | None:
    """How much of each patch lies in a box of the photo, (row, column), 0 to 1; None where that is not known."""
    if picture.area is None:
        return None
    left, top, right, bottom = picture.area
    rows, columns = picture.grid
    down = _overlap(np.linspace(top, bottom, rows + 1), box[1], box[3])
    across = _overlap(np.linspace(left, right, columns + 1), box[0], box[2])
    return np.outer(down, across)


def _overlap(edges: NDArray[np.float64], low: float, high: float) -> NDArray[np.float64]:
    inside = np.minimum(edges[1:], high) - np.maximum(edges[:-1], low)
    share: NDArray[np.float64] = np.clip(inside / np.diff(edges), 0, 1)
    return share


def tokens_of_phrase(tokens: Tokens, first: int, phrase: str) -> NDArray[np.bool_]:
    """Which tokens from `first` on are the last mention of a phrase in the question, (token - first,)."""
    offsets = tokens.offsets[first : tokens.n_given]
    asks = np.zeros(len(tokens) - first, np.bool_)
    start = tokens.text.casefold().rfind(phrase.casefold(), 0, int(offsets[:, 1].max(initial=0)))
    if start >= 0:
        inside = (offsets[:, 0] < start + len(phrase)) & (offsets[:, 1] > start) & (offsets[:, 0] >= 0)
        asks[: len(inside)] = inside
    return asks


def with_grounding(heads: Sequence[Head], layers: Sequence[int], sums: RunningSums, at: int) -> tuple[Head, ...]:
    """The heads, those that ground words with that role.

    A one-sided t test over pictures against the margin, and Benjamini-Hochberg over all heads. `sums` are what was
    added up, (layer, head, measure), and `at` is the measure `grounds`.
    """
    from dataclasses import replace

    from attnscope.core.exact.multiple_tests import benjamini_hochberg

    p = sums.p_above(MARGIN)[..., at]
    q = benjamini_hochberg(p)
    pictures = sums.effective_texts()[..., at]
    grounded = []
    for head in heads:
        place = layers.index(head.layer), head.head
        grounds = head.measures.get("grounds")
        if grounds is not None and q[place] <= LEVEL:
            role = Role(
                "grounding", "grounds", grounds.value, grounds.low, grounds.high, grounds.uniform, MARGIN,
                float(p[place]), float(q[place]), bool(pictures[place] < FEWEST_PICTURES),
                effective_texts=float(pictures[place]),
            )  # fmt: skip
            head = replace(head, roles=(role,))
        grounded.append(head)
    return tuple(grounded)
