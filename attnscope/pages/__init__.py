"""Records as one HTML file: every head to look at, compare and save, without a server or a network."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attnscope.errors import AttnscopeError
from attnscope.pages.document import PAGE_SCHEMA, Page, assemble
from attnscope.pages.heads import Heads, heads_of
from attnscope.pages.texts import (
    FINE_STEP,
    FINE_UP_TO,
    LEFT_UNIT,
    STEP,
    PageText,
    describe_text,
    most_pieces,
    require_room,
)
from attnscope.questions.heads import Heads as HeadsResult
from attnscope.questions.heatmap import Heatmap
from attnscope.version import VERSION

__all__ = [
    "PAGE_SCHEMA",
    "Page",
    "PageText",
    "head_to_open",
    "page_of",
    "page_of_record",
    "require_room",
]


def page_of_record(record: Any, *, findings: HeadsResult | None = None) -> Page:
    """Return the page of a record of any kind that has one.

    Args:
        record: Attention on a text, heads or an atlas.
        findings: Of attention or an atlas: name the roles of heads.

    Raises:
        AttnscopeError: The record holds nothing, or more weights than a browser would hold.
    """
    if isinstance(record, Heatmap):
        return page_of([PageText(record)], findings=findings)
    return page_of([], heads=heads_of(record, findings))


def page_of(
    texts: Sequence[PageText],
    *,
    findings: HeadsResult | None = None,
    start: Mapping[str, str] | None = None,
    heads: Heads | None = None,
) -> Page:
    """Make a page of one text or several, of a record about heads, or of both.

    Args:
        texts: May be empty if there are heads.
        findings: Names the roles of heads; None = what is known about heads does.
        start: The first view, as the page's address names it: `{"v": "matrix", "h": "3.1"}`.
        heads: What is known about heads, as of an atlas.

    Raises:
        AttnscopeError: There is no text, no head to show, or more weights than a browser would hold.
    """
    if not texts and heads is None:
        raise AttnscopeError("a page needs a text")
    # Roles come from the findings, or from what is known about heads.
    named = heads if findings is None else heads_of(findings)
    # Small pages keep weights in finer steps.
    is_small = not texts or require_room(text.record for text in texts) <= FINE_UP_TO
    step = FINE_STEP if is_small else STEP
    has_photos = any(text.record.picture is not None or text.record.pictures for text in texts)
    blocks = [] if heads is None else heads.blocks
    n_cards = 0 if heads is None else len(heads.cards)
    # What the page's script reads first.
    manifest: dict[str, Any] = {
        "schema": PAGE_SCHEMA,
        "version": VERSION,
        "step": step,
        "mostPieces": most_pieces(step),
        "leftUnit": LEFT_UNIT,
        "heads": None if heads is None else {"landing": 0, "cards": list(range(1, 1 + n_cards))},
        "roles": None if named is None else named.roles,
        "start": dict(start or {}),
    }
    # Means have names in place of numbers of heads.
    if texts and (first := texts[0].record).averaged:
        manifest["means"] = {
            f"{layer}.{head}": m.name_of(layer, head) for m in first.maps for layer, head in m.pairs
        }
    manifest["texts"] = [describe_text(text, blocks, step) for text in texts]
    # A page of texts opens on the view that suits the first one.
    if texts and heads is None:
        manifest["start"] = _first_view(texts[0].record, has_photos=has_photos) | manifest["start"]
        if has_photos:
            manifest["start"].pop("v", None)
    # Scripts that no part of the page needs are left out.
    parts = {"heads": heads is not None, "photo": has_photos}
    return Page(assemble(manifest, blocks, tuple(part for part, is_there in parts.items() if is_there)))


def _first_view(record: Heatmap, *, has_photos: bool) -> dict[str, str]:
    """Return how a page of texts opens, as its address has it."""
    if has_photos:
        # One patch of hundreds seldom gets much: on a scale up to 1 none would be seen.
        return {"scale": "head"}
    head = head_to_open(record)
    return {} if head is None else {"h": f"{head[0]}.{head[1]}"}


def head_to_open(record: Heatmap) -> tuple[int, int] | None:
    """Return the head that a page opens on: the one whose queries choose distant tokens most, each its own.

    A query's score is its largest weight above the key's mean over all queries, among keys that are neither special
    nor first and more than two tokens away. The head with the largest mean score is taken; None = no key is as far.
    """
    attention = record.maps[0]
    # Pairs (query, key) that count.
    queries = np.arange(len(attention.queries))
    keys = np.arange(len(attention.keys))
    counts = (np.abs(queries[:, None] - keys) > 2) & ~attention.keys.special & (keys > 0)
    heads = record.chosen(attention)
    if not heads or not counts.any():
        return None

    # A key that all queries choose says little: its mean is taken off.
    def score(head: tuple[int, int]) -> float:
        weights = attention.of(*head)
        return float(np.where(counts, weights - weights.mean(0), 0.0).max(1).mean())

    return max(heads, key=score)
