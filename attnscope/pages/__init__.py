"""Make one HTML file of records: every head to look at, compare and save, without a server or a network."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attnscope.errors import AttnscopeError
from attnscope.pages.document import PAGE_SCHEMA, Page, assemble
from attnscope.pages.heads import PageHeads, prepare_heads
from attnscope.pages.texts import (
    FINE_STEP,
    MAX_FINE_WEIGHTS,
    ROW_SUM_STEP,
    STEP,
    PageText,
    describe_text,
    max_pieces,
    require_room,
)
from attnscope.questions.heads import Heads as HeadsResult
from attnscope.questions.heatmap import Heatmap
from attnscope.version import VERSION

__all__ = [
    "PAGE_SCHEMA",
    "Page",
    "PageText",
    "choose_opening_head",
    "page_of",
    "page_of_record",
    "require_room",
]


def page_of_record(record: Any, *, findings: HeadsResult | None = None) -> Page:
    """Make a page of one record.

    Args:
        record: A `Heatmap`, `Heads` or an `Atlas`.
        findings: The result of `attnscope.heads`, which names the roles of the heads of a heatmap or an atlas.

    Raises:
        AttnscopeError: The record holds nothing, or more weights than a browser would hold.
    """
    if isinstance(record, Heatmap):
        return page_of([PageText(record)], findings=findings)
    return page_of([], heads=prepare_heads(record, findings))


def page_of(
    texts: Sequence[PageText],
    *,
    findings: HeadsResult | None = None,
    start: Mapping[str, str] | None = None,
    heads: PageHeads | None = None,
) -> Page:
    """Make a page of texts, of a record about heads, or of both.

    Args:
        texts: The texts with their attention; may be empty if there are `heads`.
        findings: Names the roles of heads; None = `heads` does.
        start: The first view, as the page's address names it: `{"v": "matrix", "h": "3.1"}`.
        heads: A record about heads, such as an atlas, made ready by `prepare_heads`.

    Raises:
        AttnscopeError: There is no text, no head to show, or more weights than a browser would hold.
    """
    if not texts and heads is None:
        raise AttnscopeError("a page needs a text")
    records = [text.record for text in texts]
    has_photos = any(record.picture is not None or record.pictures for record in records)
    # Small pages keep weights in finer steps.
    step = FINE_STEP
    if records and require_room(records) > MAX_FINE_WEIGHTS:
        step = STEP
    # The manifest is what the page's script reads first. See `texts` for steps and units of weights.
    manifest: dict[str, Any] = {
        "schema": PAGE_SCHEMA,
        "version": VERSION,
        "step": step,
        "mostPieces": max_pieces(step),
        "leftUnit": ROW_SUM_STEP,
        "heads": None,
        "roles": None,
        "start": {**(start or {})},
    }
    # Blocks are packed data. Those of `heads` come first: 0 describes all heads, the others are cards of heads.
    # `parts` are scripts that not all pages have.
    blocks: list[str] = []
    parts = []
    if heads is not None:
        blocks += heads.blocks
        manifest["heads"] = {"landing": 0, "cards": list(range(1, len(blocks)))}
        parts.append("heads")
    if has_photos:
        parts.append("photo")
    role_source = heads if findings is None else prepare_heads(findings)
    if role_source is not None:
        manifest["roles"] = role_source.roles
    # Means over heads have names instead of a layer and a head.
    if records and records[0].mean_name:
        names = {}
        for attention in records[0].maps:
            for layer, head in attention.pairs:
                names[f"{layer}.{head}"] = attention.name_of(layer, head)
        manifest["means"] = names
    # The weights and photos of texts are appended to the blocks.
    manifest["texts"] = [describe_text(text, blocks, step) for text in texts]
    # A page of texts alone opens on the view that suits the first one.
    if heads is None and has_photos:
        # Of hundreds of patches each gets a small weight, too pale on a scale up to 1. Photos have a view of their own.
        manifest["start"] = {"scale": "head", **manifest["start"]}
        manifest["start"].pop("v", None)
    elif heads is None and (opened := choose_opening_head(records[0])):
        layer, head = opened
        manifest["start"] = {"h": f"{layer}.{head}", **manifest["start"]}
    return Page(assemble(manifest, blocks, parts))


def choose_opening_head(record: Heatmap) -> tuple[int, int] | None:
    """Return the head that a page opens on: the one whose queries attend most to distant tokens, and to different ones.

    A query's score is its largest weight above the key's mean over all queries, among keys that are neither special
    nor first and more than two tokens away. The head with the largest mean score is returned; None = no key is so far.
    """
    attention = record.maps[0]
    # Which keys count for which query, (query, key).
    queries = np.arange(len(attention.queries))
    keys = np.arange(len(attention.keys))
    counts = (np.abs(queries[:, None] - keys) > 2) & ~attention.keys.special & (keys > 0)
    heads = record.chosen(attention)
    if not heads or not counts.any():
        return None

    # A key that all queries attend to says little: subtract its mean over queries.
    def score(head: tuple[int, int]) -> float:
        weights = attention.of(*head)
        return float(np.where(counts, weights - weights.mean(0), 0.0).max(1).mean())

    return max(heads, key=score)
