"""Make one HTML file of records, in which a reader views, compares and saves every head, without server or network.

`heads` and `texts` prepare the data, and `document` assembles the file. The page's script (`pages/src`) reads a JSON
manifest first. The manifest names the *blocks*: packed data, in an HTML element each, which the script unpacks on
demand.
"""

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
        findings: The result of `attnscope.heads`, from which the page takes the roles of heads; None = the record's
            own.

    Raises:
        AttnscopeError: The record is empty, or has more weights than a browser can hold.
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
        findings: The result of `attnscope.heads`, from which the page takes the roles of heads; None = from `heads`.
        start: The first view, by parameters of the page's URL: `{"v": "matrix", "h": "3.1"}` is the matrix of L3H1.
        heads: A record about heads, such as an atlas, as `prepare_heads` returns it.

    Raises:
        AttnscopeError: There is no text, no head to show, or there are more weights than a browser can hold.
    """
    if not texts and heads is None:
        raise AttnscopeError("a page needs a text")
    records = [text.record for text in texts]
    has_photos = any(record.picture is not None or record.pictures for record in records)
    # Weights are rounded to multiples of a step; small pages can afford a finer one.
    step = FINE_STEP
    if records and require_room(records) > MAX_FINE_WEIGHTS:
        step = STEP
    # The page's script reads the manifest first. `pages.texts` defines the three numbers on the coding of weights.
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
    # The blocks of `heads` come first: block 0 describes all heads, and each further block is the card of a head.
    # `parts` are keys of `document.OPTIONAL_MODULES`: scripts that only some pages need.
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
    # After `--mean`, a map is a mean over heads. It has a name instead of a layer and a head.
    if records and records[0].mean_name:
        names = {}
        for attention in records[0].maps:
            for layer, head in attention.pairs:
                names[f"{layer}.{head}"] = attention.name_of(layer, head)
        manifest["means"] = names
    # `describe_text` also appends the weights and photos of a text to the blocks.
    manifest["texts"] = [describe_text(text, blocks, step) for text in texts]
    # If there are texts alone, open the page on a view that suits the first text. Entries of `start` override it.
    if heads is None and has_photos:
        # Each of hundreds of patches has a small weight, too pale on a colour scale up to 1: scale to each head's
        # largest weight. Without "v" the script chooses the view of photos.
        manifest["start"] = {"scale": "head", **manifest["start"]}
        manifest["start"].pop("v", None)
    elif heads is None and (opened := choose_opening_head(records[0])):
        layer, head = opened
        manifest["start"] = {"h": f"{layer}.{head}", **manifest["start"]}
    return Page(assemble(manifest, blocks, parts))


def choose_opening_head(record: Heatmap) -> tuple[int, int] | None:
    """Return the (layer, head) that a page opens on: the head that attends most to distant tokens that vary by query.

    The score of a head is the mean over queries of a query's largest weight, after each key's mean over queries is
    subtracted. Only keys more than two tokens away count, without special tokens and the first token. Return None if
    no key counts.
    """
    attention = record.maps[0]
    # Whether a key counts for a query, (query, key).
    queries = np.arange(len(attention.queries))
    keys = np.arange(len(attention.keys))
    is_counted = (np.abs(queries[:, None] - keys) > 2) & ~attention.keys.special & (keys > 0)
    heads = record.chosen(attention)
    if not heads or not is_counted.any():
        return None

    # Subtract a key's mean over queries, as a key that all queries attend to says little about a query.
    def score(head: tuple[int, int]) -> float:
        weights = attention.of(*head)
        return float(np.where(is_counted, weights - weights.mean(0), 0.0).max(1).mean())

    return max(heads, key=score)
