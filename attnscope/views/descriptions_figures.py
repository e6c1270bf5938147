"""Descriptions as a figure: a card a head, and beside each layer how much of its heads' attention is explained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from attnscope.records.descriptions import LITTLE, HeadDescription, Term
from attnscope.records.findings import Findings
from attnscope.views import heads_summary, layout
from attnscope.views.canvas import FAINT, INK, LINE, Box, Page, wrap_lines
from attnscope.views.heads_summary import model_of, printable
from attnscope.views.inks import blend, ink_on
from attnscope.views.lettering import Lettering
from attnscope.views.measure_figures import HEAD_NAMES_PX, LEFT_PX, findings_shape, name_kinds, place_kinds

_CARD_PX, _CARD_HEIGHT_PX, _WIDEST_CARD_PX = 128, 62, 220
"""Width and height of a card, and how wide it is where there are few heads."""

_STRIP_PX, _STRIP_GAP_PX, _DOT_PX = 260, 40, 7
_TEXT_PX = 11.5
_PALE, _DARK, _NOTHING = "#f7fbff", "#4292c6", "#f3f3f3"
_FOOTER_GAP_PX = 56


@dataclass(frozen=True)
class Card:
    """A card.

    Attributes:
        box: Where it is.
        fill: Its colour: the darker, the more is explained.
        share: What is explained, such as "66% of 2.3"; empty where heads spread evenly.
        lines: What the head does, in as many lines as there is room for.
    """

    box: Box
    fill: str
    share: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Cards:
    """Where everything stands on the page.

    Attributes:
        size: Width and height of the page.
        cell: Width and height of a card, with the gap to the next.
        cards: The cards.
        tops: Upper edge of the cards of each kind of attention.
        strips: For each layer where its strip is, and the explained shares of its heads.
        footer_y: Middle of the first line of notes.
        footer: The notes, broken into lines.
    """

    size: tuple[int, int]
    cell: tuple[int, int]
    cards: tuple[Card, ...]
    tops: tuple[int, ...]
    strips: tuple[tuple[Box, tuple[float, ...]], ...]
    footer_y: int
    footer: tuple[str, ...]


def texts_of(findings: Findings) -> list[str]:
    """The texts that the figure may show, to find fonts for."""
    if findings.descriptions is None:
        return []
    return [printable(term.words, 200) for one in findings.descriptions.heads for term in one.terms]


def cards_layout(findings: Findings, lettering: Lettering) -> Cards:
    """Places the cards, a row a layer, and beside each row the shares of its heads."""
    assert findings.descriptions is not None
    n_heads = max(findings_shape(findings, kind)[1] for kind in findings.kinds)
    beside = _STRIP_GAP_PX + _STRIP_PX
    room = layout.MIN_WIDTH_PX - 2 * layout.MARGIN_PX - LEFT_PX - beside
    cell = (max(_CARD_PX, min(_WIDEST_CARD_PX, room // n_heads)), _CARD_HEIGHT_PX)
    tops, bottom = place_kinds(findings, cell[1])
    right = layout.MARGIN_PX + LEFT_PX + n_heads * cell[0]
    width = max(layout.NARROWEST_PX, right + beside + layout.MARGIN_PX)
    cards, strips = [], []
    known = {(one.kind, one.layer, one.head): one for one in findings.descriptions.heads}
    for kind, top in zip(findings.kinds, tops, strict=True):
        shares: dict[int, list[float]] = {}
        for head in (head for head in findings.heads if head.kind == kind):
            place = (layout.MARGIN_PX + LEFT_PX + head.head * cell[0], top + head.layer * cell[1])
            box = (*place, cell[0] - 4, cell[1] - 4)
            one = known.get((kind, head.layer, head.head))
            cards.append(_card(one, box, lettering))
            if one is not None and math.isfinite(one.explained):
                shares.setdefault(head.layer, []).append(one.explained)
        for layer, of_layer in shares.items():
            strip = (right + _STRIP_GAP_PX, top + layer * cell[1], _STRIP_PX, cell[1] - 4)
            strips.append((strip, tuple(of_layer)))
    footer = wrap_lines(" · ".join(_notes(findings)), width - 2 * layout.MARGIN_PX, lettering)
    footer_y = bottom + _FOOTER_GAP_PX
    height = footer_y + (len(footer) - 1) * layout.LINE_PX + layout.MARGIN_PX
    return Cards((width, height), cell, tuple(cards), tuple(tops), tuple(strips), footer_y, footer)


def cards_page(findings: Findings, lettering: Lettering) -> Page:
    """The page, drawn."""
    placed = cards_layout(findings, lettering)
    page = Page(*placed.size, lettering)
    subtitle = heads_summary.corpus_line(findings)
    page.head(f"{model_of(findings.run)} · what its {len(findings.heads)} heads do, in a few words", subtitle)
    name_kinds(page, findings, placed.tops, placed.cell)
    page.fill([card.box for card in placed.cards], [card.fill for card in placed.cards])
    for card in placed.cards:
        _draw_card(page, card)
    _draw_strips(page, placed)
    page.foot(placed.footer_y, placed.footer)
    return page


def short_words(one: HeadDescription) -> str:
    """The terms without their shares: "[CLS], near tokens, not to the right"."""
    if one.spreads_evenly:
        return "spreads evenly"
    terms = [term for term in one.terms if not term.part_of]
    return ", ".join(map(_short, terms)) or "undescribed"


_SHORTER = (
    ("tokens at most 4 away", "at most 4 away"), ("tokens to the", "to the"), ("near tokens", "near"),
    ("nearby tokens", "nearby"), ("the previous token", "previous token"), ("the next token", "next token"),
    ("the token itself", "itself"), ("the same", "same"), ("the first token", "first token"),
    ("capitalised words", "capitals"), ("within a sentence", "within"),
)  # fmt: skip


def _short(term: Term) -> str:
    words = printable(term.words, 120)
    for long, short in _SHORTER:
        words = words.replace(long, short)
    return f"not {words}" if term.is_avoided else words


def _card(one: HeadDescription | None, box: Box, lettering: Lettering) -> Card:
    if one is None:
        return Card(box, _NOTHING, "", ())
    room = box[2] - 12
    lines = list(wrap_lines(short_words(one), room * layout.CAPTION_PX / _TEXT_PX, lettering))
    if len(lines) > 2:
        lines = [lines[0], lettering.fit(" ".join(lines[1:]), _TEXT_PX, room)]
    if one.spreads_evenly or not math.isfinite(one.explained):
        return Card(box, _NOTHING, "", tuple(lines))
    share = min(1.0, max(0.0, one.explained))
    return Card(box, blend(share, _PALE, _DARK), f"{100 * one.explained:.0f}% of {one.nats:.1f}", tuple(lines))


def _draw_card(page: Page, card: Card) -> None:
    x, y, _, _ = card.box
    ink = ink_on(card.fill) if card.share else FAINT
    down = y + 12
    if card.share:
        share, _, rest = card.share.partition(" ")
        page.write(x + 6, down, share, 13, ha="left", weight="bold", color=ink)
        wide = page.lettering.width_px(share, 13) * 1.15
        page.write(x + 6 + wide + 4, down + 0.5, rest, 11, ha="left", color=ink)
    for place, line in enumerate(card.lines):
        page.write(x + 6, down + 18 + place * 15, line, _TEXT_PX, ha="left", color=ink)


def _draw_strips(page: Page, placed: Cards) -> None:
    """The explained share of each head as a dot, a strip a layer, and its median as a line."""
    if not placed.strips:
        return
    dots: list[Box] = []
    medians = []
    for (x, y, width, height), shares in placed.strips:
        page.fill([(x, y, width, height)], [_NOTHING])
        page.fill([(x, y, width * LITTLE, height)], ["#e9e9e9"])
        for number, share in enumerate(shares):
            at = x + width * min(1.0, max(0.0, share))
            down = y + height * (number + 0.5) / len(shares)
            dots.append((at - _DOT_PX / 2, down - _DOT_PX / 2, _DOT_PX, _DOT_PX))
        middle = x + width * min(1.0, max(0.0, _median(shares)))
        medians.append([(middle, y), (middle, y + height)])
    page.fill(dots, [_DARK] * len(dots))
    page.lines(medians, color=INK, width_px=1.6)
    (x, top, width, _), _ = placed.strips[0]
    lowest = max(y + height for (_, y, _, height), _ in placed.strips)
    page.lines([[(x + width / 2, top), (x + width / 2, lowest)]], color=LINE, width_px=0.8)
    for share in (0.0, 0.5, 1.0):
        page.write(x + width * share, lowest + 12, f"{100 * share:.0f}%", layout.CAPTION_PX, ha="center", color=FAINT)
    page.write(x + width / 2, top - HEAD_NAMES_PX / 2 - 2, "explained", layout.CAPTION_PX, ha="center", color=FAINT)


def _median(shares: Sequence[float]) -> float:
    ordered = sorted(shares)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _notes(findings: Findings) -> list[str]:
    described = findings.descriptions
    assert described is not None
    return [
        "each card: the share of the head's attention that its description explains on texts that it was not made of, "
        "and how many nats it is from an even spread; then where it looks, the most important first",
        "at the right: a dot a head, a line at the median; below 30% (grey) a head is mostly undescribed",
        f"found on {described.n_texts - described.n_scored} texts, tried on {described.n_scored} others "
        f"({described.n_queries:,} queries)",
        "a description is of attention, not of purpose",
    ]
