"""Descriptions as a figure: a card a head, and beside each layer how much of its heads' attention is explained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, INK, LINE, Box, wrap_lines
from attnscope.drawing.head_maps import HEAD_NAMES_PX, LEFT_PX, grids_of, name_kinds, place_kinds
from attnscope.drawing.inks import blend, ink_on
from attnscope.drawing.lettering import Lettering
from attnscope.drawing.page import Page
from attnscope.errors import amount
from attnscope.questions.head_roles import description_notes
from attnscope.records.heads.descriptions import LITTLE, HeadDescription, Term
from attnscope.records.heads.findings import Findings
from attnscope.report.numbers import percent
from attnscope.report.wording import corpus_line, model_of, printable

_CARD_PX, _PAPER_CARD_PX, _WIDEST_CARD_PX = 128, 110, 220
"""Width of a card, on paper at least, and how wide it is where there are few heads."""

_STRIP_PX, _STRIP_GAP_PX, _DOT_PX = 260, 40, 7
_NARROW_STRIP_PX = 140  # with the gap, on paper
_TEXT_PX, _SHARE_PX, _REST_PX, _LINE_PX, _PAD_PX = 11.5, 13, 11, 15, 6
_LAYER_GAP_PX = 10  # between layers of several rows
_TALLEST_INCHES = 9.0  # of cards on a page of paper
_PALE, _DARK, _NOTHING = "#f7fbff", "#4292c6", "#f3f3f3"
_FOOTER_GAP_PX = 56


@dataclass(frozen=True)
class Card:
    """A card.

    Attributes:
        box: Where it is.
        fill: Its colour: the darker, the more is explained.
        name: The head's, if it does not stand above its column.
        share: What is explained, such as "66%"; empty for heads that spread evenly.
        rest: Of what, such as "of 2.3 nats"; empty without room for it.
        lines: What the head does.
    """

    box: Box
    fill: str
    name: str
    share: str
    rest: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Cards:
    """The places of everything on the page.

    Attributes:
        size: Width and height of the page.
        cell: Width and height of a card, with the gap to the next.
        pitch: From one layer to the next.
        cards: The cards.
        tops: Upper edge of the cards of each kind of attention.
        strips: The box of each layer's strip, and the explained shares of its heads.
        footer_y: Middle of the first line of notes.
        footer: The notes, broken into lines.
    """

    size: tuple[int, int]
    cell: tuple[int, int]
    pitch: int
    cards: tuple[Card, ...]
    tops: tuple[int, ...]
    strips: tuple[tuple[Box, tuple[float, ...]], ...]
    footer_y: int
    footer: tuple[str, ...]


def texts_of(findings: Findings) -> list[str]:
    """The texts that the figure may show, to find fonts for."""
    if findings.descriptions is None:
        return []
    return [printable(term.words, 200) for described in findings.descriptions.heads for term in described.main.terms]


def cards_layout(findings: Findings, lettering: Lettering) -> Cards:
    """Places the cards, a row a layer or several where the page is narrow, and beside each the shares of its heads."""
    assert findings.descriptions is not None
    paper = lettering.paper
    grids = grids_of(findings)
    n_heads = max(len(grid.heads) for grid in grids.values())
    beside = 0 if paper.fixed and paper.is_narrow else _NARROW_STRIP_PX if paper.fixed else _STRIP_GAP_PX + _STRIP_PX
    room = paper.room_px - LEFT_PX - beside
    columns = min(n_heads, max(1, room // _PAPER_CARD_PX)) if paper.fixed else n_heads
    per_layer = math.ceil(n_heads / columns)
    columns = math.ceil(n_heads / per_layer)
    wide = min(_WIDEST_CARD_PX, room // columns)
    cell = (wide if paper.fixed else max(_CARD_PX, wide), _card_height(findings, per_layer, paper))
    pitch = per_layer * cell[1] + (_LAYER_GAP_PX if per_layer > 1 else 0)
    tops, bottom = place_kinds(findings, pitch)
    right = layout.MARGIN_PX + LEFT_PX + columns * cell[0]
    width = paper.width_for(layout.NARROWEST_PX, right + beside + layout.MARGIN_PX)
    gap = min(_STRIP_GAP_PX, beside / 4)
    cards, strips = [], []
    for (kind, grid), top in zip(grids.items(), tops, strict=True):
        shares: dict[int, list[float]] = {}
        for head in (head for head in findings.heads if head.kind == kind):
            row, column = divmod(grid.heads.index(head.head), columns)
            down = top + grid.layers.index(head.layer) * pitch + row * cell[1]
            box = (layout.MARGIN_PX + LEFT_PX + column * cell[0], down, cell[0] - 4, cell[1] - 4)
            described = findings.descriptions.by_head.get(head.address)
            cards.append(_card(described, box, f"H{head.head}" if per_layer > 1 else "", lettering))
            if described is not None and math.isfinite(described.main.explained):
                shares.setdefault(head.layer, []).append(described.main.explained)
        for layer, of_layer in shares.items() if beside else ():
            strip = (right + gap, top + grid.layers.index(layer) * pitch, beside - gap, per_layer * cell[1] - 4)
            strips.append((strip, tuple(of_layer)))
    notes = _notes(findings, any(card.rest for card in cards), bool(strips))
    footer = wrap_lines(" · ".join(notes), width - 2 * layout.MARGIN_PX, lettering)
    footer_y = bottom + (_FOOTER_GAP_PX if strips else 24)
    height = footer_y + (len(footer) - 1) * layout.LINE_PX + layout.MARGIN_PX
    return Cards((width, height), cell, pitch, tuple(cards), tuple(tops), tuple(strips), footer_y, footer)


def _card_height(findings: Findings, per_layer: int, paper: layout.Paper) -> int:
    """Three lines of words a card; on paper as many fewer as it takes to fit a page."""
    n_rows = per_layer * sum(len(grid.layers) for grid in grids_of(findings).values())
    lines = 3
    while paper.fixed and lines > 1 and n_rows * _height_of(lines) > _TALLEST_INCHES * paper.inch_px:
        lines -= 1
    return _height_of(lines)


def _height_of(lines: int) -> int:
    return 28 + _LINE_PX * lines + 4


def cards_page(findings: Findings, lettering: Lettering) -> Page:
    """The page, drawn."""
    cards = cards_layout(findings, lettering)
    page = Page(cards.size[0], lettering)
    heads = amount(len(findings.heads), "head does", "heads do")
    page.head(f"{model_of(findings.run)} · what its {heads}, in a few words", corpus_line(findings))
    no_names = not any(card.name for card in cards.cards)
    name_kinds(page, findings, cards.tops, (cards.cell[0], cards.pitch), heads=no_names)
    page.fill([card.box for card in cards.cards], [card.fill for card in cards.cards])
    for card in cards.cards:
        _draw_card(page, card)
    _draw_strips(page, cards.strips)
    page.foot(cards.footer_y, cards.footer)
    page.end_at(cards.size[1])
    return page


def short_terms(described: HeadDescription) -> list[str]:
    """The terms without their shares: "[CLS]", "near tokens", "not to the right"."""
    if described.spreads_evenly:
        return ["spreads evenly"]
    return [_shorten(term) for term in described.main.terms if not term.part_of] or ["undescribed"]


def _wrap_terms(terms: Sequence[str], most: int, size: float, room: float, lettering: Lettering) -> list[str]:
    """As many whole terms as `most` lines have room for, and how many more there are."""
    for n in range(len(terms), 0, -1):
        more = [f"+{len(terms) - n} more"] if n < len(terms) else []
        lines = list(wrap_lines(", ".join([*terms[:n], *more]), room * layout.CAPTION_PX / size, lettering))
        if len(lines) <= most and all(lettering.width_px(line, size) <= room for line in lines):
            return lines
    lines = [*lines[: most - 1], " ".join(lines[most - 1 :])]  # one term is more than there is room for
    return [lettering.fit(line, size, room) for line in lines]


_SHORTER = (
    ("tokens at most 4 away", "at most 4 away"), ("tokens to the", "to the"), ("near tokens", "near"),
    ("nearby tokens", "nearby"), ("the previous token", "previous token"), ("the next token", "next token"),
    ("the token itself", "itself"), ("the same", "same"), ("the first token", "first token"),
    ("capitalised words within a sentence", "capitals inside sentences"), ("capitalised words", "capitals"),
)  # fmt: skip


def _shorten(term: Term) -> str:
    words = printable(term.words, 120)
    for long, short in _SHORTER:
        words = words.replace(long, short)
    return f"not {words}" if term.is_avoided else words


def _card(described: HeadDescription | None, box: Box, name: str, lettering: Lettering) -> Card:
    if described is None:
        return Card(box, _NOTHING, name, "", "", ())
    room, size = box[2] - 2 * _PAD_PX, lettering.paper.letters(_TEXT_PX)
    most = int(box[3] + 4 - _height_of(0)) // _LINE_PX
    lines = tuple(_wrap_terms(short_terms(described), most, size, room, lettering))
    part = described.main
    if described.spreads_evenly or not math.isfinite(part.explained):
        return Card(box, _NOTHING, name, "", "", lines)
    share = percent(part.explained) + " !" * bool(described.warning)
    free = box[2] - _PAD_PX - 4 - _share_at(name, lettering) - _bold_px(share, lettering)
    rests = (f"of {part.nats:.1f} nats", f"{part.nats:.1f} nats")
    rest_px = lettering.paper.letters(_REST_PX)
    rest = next((rest for rest in rests if lettering.width_px(rest, rest_px) <= free), "")
    return Card(box, blend(_clip(part.explained), _PALE, _DARK), name, share, rest, lines)


def _clip(share: float) -> float:
    return min(1.0, max(0.0, share))


def _bold_px(text: str, lettering: Lettering) -> float:
    return 1.15 * lettering.width_px(text, _SHARE_PX)


def _share_at(name: str, lettering: Lettering) -> float:
    """Where in a card its share begins: after the head's name, where it has one."""
    size = lettering.paper.letters(_REST_PX)
    return _PAD_PX + (lettering.width_px(name, size) + 6 if name else 0)


def _draw_card(page: Page, card: Card) -> None:
    x, y, _, _ = card.box
    ink = ink_on(card.fill) if card.share else FAINT
    down = y + 12
    if card.name:
        page.write(x + _PAD_PX, down + 0.5, card.name, _REST_PX, ha="left", color=ink)
    if card.share:
        at = _share_at(card.name, page.lettering)
        page.write(x + at, down, card.share, _SHARE_PX, ha="left", weight="bold", color=ink)
        at += _bold_px(card.share, page.lettering) + 4
        if card.rest:
            page.write(x + at, down + 0.5, card.rest, _REST_PX, ha="left", color=ink)
    for number, line in enumerate(card.lines):
        page.write(x + _PAD_PX, down + 18 + number * _LINE_PX, line, _TEXT_PX, ha="left", color=ink)


def _draw_strips(page: Page, strips: Sequence[tuple[Box, tuple[float, ...]]]) -> None:
    """The explained share of each head as a dot, a strip per layer, and its median as a line."""
    if not strips:
        return
    dots: list[Box] = []
    medians = []
    for (x, y, width, height), shares in strips:
        page.fill([(x, y, width, height)], [_NOTHING])
        page.fill([(x, y, width * LITTLE, height)], ["#e9e9e9"])
        for number, share in enumerate(shares):
            down = y + height * (number + 0.5) / len(shares)
            dots.append((x + width * _clip(share) - _DOT_PX / 2, down - _DOT_PX / 2, _DOT_PX, _DOT_PX))
        middle = x + width * _clip(median(shares))
        medians.append([(middle, y), (middle, y + height)])
    page.fill(dots, [_DARK] * len(dots))
    page.lines(medians, color=INK, width_px=1.6)
    (x, top, width, _), _ = strips[0]
    lowest = max(y + height for (_, y, _, height), _ in strips)
    page.lines([[(x + width / 2, top), (x + width / 2, lowest)]], color=LINE, width_px=0.8)
    sides = {0.0: "left", 0.5: "center", 1.0: "right"}
    for share, side in sides.items() if width > _NARROW_STRIP_PX else ((0.0, "left"), (1.0, "right")):
        page.write(x + width * share, lowest + 12, percent(share), layout.CAPTION_PX, ha=side, color=FAINT)
    page.write(x + width / 2, top - HEAD_NAMES_PX / 2 - 2, "predicted", layout.CAPTION_PX, ha="center", color=FAINT)


def _notes(findings: Findings, has_nats: bool, has_strips: bool) -> list[str]:
    strips = "at the right: one dot per head, a line at the median; below 30% (grey) a head is mostly undescribed"
    return [
        "each card: how much of the difference from uniform attention the description predicts on held-out texts"
        + ", how many nats that difference is" * has_nats
        + ", and what the head attends to, the most important first; special tokens and the first do not count",
        *[strips] * has_strips,
        *description_notes(findings),
        "a description says where a head looks, not why",
    ]
