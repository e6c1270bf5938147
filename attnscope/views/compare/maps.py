"""Maps of heads side by side, their differences on one signed scale, and rows of two texts bar by bar."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing import layout
from attnscope.drawing.canvas import FAINT, INK, Box
from attnscope.drawing.layout import SCREEN, Paper
from attnscope.drawing.lettering import lettering_for
from attnscope.drawing.maps import LABEL_ROOM_EM, MapsFigure, MapsPage
from attnscope.drawing.page import Page
from attnscope.errors import amount
from attnscope.records import Tokens
from attnscope.records.compare.pairs import MinimalPair
from attnscope.records.compare.record import PickedHeads
from attnscope.records.frame.pair_tables import head_name
from attnscope.report.numbers import digits
from attnscope.report.wording import printable
from attnscope.views.compare.summary import (
    both_texts,
    distance,
    distance_name,
    hidden_notes,
    key_name,
    title_of,
)
from attnscope.views.maps.figures import axis_of

_WEIGHTS, _SIGNED = "Blues", "RdBu_r"
_FIRST, _SECOND = "#2f6fb0", "#d9822b"
_ROWS = "rows: queries (attend) · columns: keys (are attended to)"
_SHOWN_MAPS, _SHOWN_ROWS = 3, 6
_MOST_KEYS, _MOST_KEYS_NARROW = 24, 10


@dataclass(frozen=True, eq=False)
class Panel:
    """A map with its title: weights, (query, key), the tokens at its sides, and those that are always named."""

    title: str
    values: NDArray[np.float32]
    queries: Tokens
    keys: Tokens
    marked: Sequence[int] = ()


def picked_pages(picked: PickedHeads, paper: Paper = SCREEN) -> Iterator[tuple[str, Page]]:
    """The heads, their mean and the single head on the scale of weights; and their differences on a signed one."""
    notes = [_ROWS, *hidden_notes(picked), printable(picked.single_note, 400)]
    header = title_of(picked), f"“{' '.join(picked.tokens.text.split())}”"
    panels = [Panel(name, values, picked.tokens, picked.tokens) for name, values in picked.maps()]
    yield "picked", panels_page(header, panels, notes, paper)
    panels = [Panel(name, values, picked.tokens, picked.tokens) for name, values in picked.differences()]
    header = f"{header[0]}: differences", header[1]
    yield "differences", panels_page(header, panels, notes, paper, "difference of attention weights")


def pair_pages(pair: MinimalPair, paper: Paper = SCREEN) -> Iterator[tuple[str, Page]]:
    """The heads that change most on both texts, with their differences; and their rows at the query, bar by bar."""
    first, second = pair.tokens
    title, subtitle = title_of(pair), both_texts(pair)
    both, ranked = join_tokens(pair), pair.ranked()
    if ranked and len(pair.aligned):
        marked = _marked_pairs(pair)
        panels = []
        for head in ranked[:_SHOWN_MAPS]:
            ours = pair.weights[head][np.ix_(pair.aligned[:, 0], pair.aligned[:, 0])]
            theirs = pair.other_weights[head][np.ix_(pair.aligned[:, 1], pair.aligned[:, 1])]
            panels.append(Panel(f"{head_name(pair.heads[head])}: second − first", theirs - ours, both, both, marked))
        header = f"{title}: the heads that change most", subtitle
        notes = [_ROWS, "tokens that both texts have a place for", *hidden_notes(pair)]
        meaning = "attention weight in the second text − in the first"
        yield "differences", panels_page(header, panels, notes, paper, meaning)
        name = head_name(pair.heads[ranked[0]])
        panels = [
            Panel(f"{name}: first text", pair.weights[ranked[0]], first, first, pair.aligned[marked, 0].tolist()),
            Panel(
                f"{name}: second text", pair.other_weights[ranked[0]], second, second, pair.aligned[marked, 1].tolist()
            ),
        ]
        yield "maps", panels_page((f"{title}: {name}", subtitle), panels, [_ROWS, *hidden_notes(pair)], paper)
    for at in pair.queries:
        yield f"query-{int(pair.aligned[at, 0]):03d}", rows_page(pair, at, paper)


def _marked_pairs(pair: MinimalPair) -> list[int]:
    """The aligned pairs that a figure must name: the queries, and tokens that replace each other."""
    first, second = pair.tokens
    labels = [(first.labels[a], second.labels[b]) for a, b in pair.aligned.tolist()]
    return sorted({*map(int, pair.queries), *(at for at, (a, b) in enumerate(labels) if a != b)})


def join_tokens(pair: MinimalPair) -> Tokens:
    """The aligned tokens; replaced ones with both labels."""
    first, second = pair.tokens
    joined = first.take(pair.aligned[:, 0])
    labels = tuple(key_name(first.labels[a], second.labels[b]) for a, b in pair.aligned.tolist())
    return replace(joined, labels=labels)


def panels_page(
    header: tuple[str, str], panels: Sequence[Panel], notes: Sequence[str], paper: Paper, difference: str = ""
) -> Page:
    """Draw maps side by side, each with its token labels, all in the same colours; `header` is title and subtitle.

    Values are weights, on a scale from 0 to 1; or `difference` names them, and they have a sign and a scale up to the
    largest.
    """
    low, high = 0.0, 1.0
    if difference:
        high = max(float(np.nan_to_num(np.abs(panel.values)).max(initial=0.0)) for panel in panels) or 1.0
        low = -high
    axes = [(axis_of(panel.queries, panel.marked), axis_of(panel.keys, panel.marked)) for panel in panels]
    figure = MapsFigure(
        subtitle=header[1],
        notes=tuple(notes),
        axes=tuple(dict.fromkeys(axes)) if len({*axes}) == 1 else tuple(axes),
        titles=tuple(panel.title for panel in panels),
        meaning=difference or "attention weight: the share of a query's attention that a key gets",
        cmap=_SIGNED if difference else _WEIGHTS,
        lettered=header,
    )
    page = MapsPage(figure, paper)
    values = [_pool_signed(panel.values, page.pool) for panel in panels]
    ticks = {tick: digits(tick) for tick in layout.ticks_between(low, high)}
    page.show(header[0], values, [(low, high)] * len(panels), (low, high), ticks)
    return page


def _pool_signed(values: NDArray[np.float32], pool: int) -> NDArray[np.float32]:
    """The value of the largest size in each block of pool x pool, with its sign."""
    if pool == 1:
        return values
    for axis in (0, 1):
        starts = np.arange(0, values.shape[axis], pool)
        high, low = (over.reduceat(values, starts, axis=axis) for over in (np.maximum, np.minimum))
        values = np.where(high >= -low, high, low)
    return values


def rows_page(pair: MinimalPair, at: int, paper: Paper = SCREEN) -> Page:
    """The keys that one query attends to in both texts, in the heads that change most there: two bars per key."""
    first, second = pair.tokens
    query, other = map(int, pair.aligned[at])
    values = np.nan_to_num(pair.divergences[pair.measure][:, at], nan=-1.0)
    heads = [int(head) for head in np.argsort(-values, kind="stable")[:_SHOWN_ROWS] if values[head] >= 0]
    alone = pair.unmatched()
    names = [key_name(first.labels[a], second.labels[b]) for a, b in pair.aligned.tolist()]
    names += [first.labels[a] for a in alone[0]] + [second.labels[b] for b in alone[1]]
    ours, theirs = pair.weights[heads, query], pair.other_weights[heads, other]
    nothing = [np.zeros((len(heads), len(tokens))) for tokens in alone]
    before = np.concatenate([ours[:, pair.aligned[:, 0]], ours[:, list(alone[0])], nothing[1]], 1)
    after = np.concatenate([theirs[:, pair.aligned[:, 1]], nothing[0], theirs[:, list(alone[1])]], 1)
    # In the order of the first text; what stands in the second alone comes after the token before it there.
    keys = np.argsort(_positions(pair), kind="stable").tolist()
    most_keys = _MOST_KEYS_NARROW if paper.is_narrow else _MOST_KEYS
    if len(keys) > most_keys:
        most = set(np.argsort(-np.maximum(before, after).max(0), kind="stable")[:most_keys].tolist())
        keys = [key for key in keys if key in most]
    header = f"{title_of(pair)}: what “{printable(first.labels[query], 40)}” attends to", both_texts(pair)
    titles = [f"{head_name(pair.heads[head])} · {distance(math.sqrt(values[head]))}" for head in heads]
    page = Page(paper.width_px, lettering_for([*header, *names], paper))
    page.head(*header)
    bottom = _draw_bars(page, titles, [names[key] for key in keys], (before[:, keys], after[:, keys]))
    notes = [
        "bars: the share of the query's attention that a key gets; a full panel is 1",
        f"heads: those whose row changes most here, by {distance_name(pair.measure)}",
        *([f"the {amount(len(keys), 'key')} with the largest weights"] if len(keys) < len(names) else []),
        *hidden_notes(pair),
    ]
    page.finish(bottom, notes)
    return page


def _positions(pair: MinimalPair) -> NDArray[np.float64]:
    """The order of keys: aligned ones, those of the first text alone, those of the second alone."""
    alone = pair.unmatched()
    after = [
        float(pair.aligned[pair.aligned[:, 1] < token, 0].max(initial=-1)) + 0.5 + token * 1e-6 for token in alone[1]
    ]
    return np.array([*pair.aligned[:, 0].astype(float), *map(float, alone[0]), *after])


def _draw_bars(
    page: Page, titles: Sequence[str], keys: Sequence[str], weights: tuple[NDArray[np.float64], NDArray[np.float64]]
) -> float:
    """Draws two bars per key for each head, of weights (head, key) in two texts; returns where the notes begin."""
    paper, lettering, columns = page.paper, page.lettering, min(2 if page.paper.is_narrow else 3, len(titles))
    pitch = max(24, min(34, 760 // len(keys)))
    size, thick = paper.letters(min(layout.MAX_LABEL_PX, pitch * 0.46)), pitch * 0.36
    left = math.ceil(min(max(lettering.width_px(key, size) for key in keys), LABEL_ROOM_EM * size)) + 14
    left = min(left, paper.room_px // 3) if paper.fixed else left
    panel, high = (paper.room_px - left - columns * 40) // columns, len(keys) * pitch
    start, top = layout.MARGIN_PX + left, layout.MARGIN_PX + 110
    for at, name, color in ((start, "first text", _FIRST), (start + 130, "second text", _SECOND)):
        page.fill([(at, top - 52, 18, 12)], [color])
        page.write(at + 26, top - 46, name, layout.CAPTION_PX, ha="left")
    corners = layout.tile(len(titles), columns, (start, top + 14), (panel + 40, high + 60))
    boxes: list[Box] = []
    page.bar_axes(corners, panel, high)
    for number, (title, (x, y)) in enumerate(zip(titles, corners, strict=True)):
        page.entitle(x, y - 16, title)
        for key, name in enumerate(keys):
            middle = y + (key + 0.5) * pitch
            if number % columns == 0:
                name = lettering.fit(name, size, min(LABEL_ROOM_EM * size, left - 10))
                page.write(x - 7, middle, name, size, ha="right", va="center_baseline", color=INK)
            for text, shift in enumerate((-thick, 0.0)):
                weight = float(weights[text][number, key])
                boxes.append((x, middle + shift, panel * weight, thick - 1))
                if weight >= 0.005 and thick * 1.05 >= paper.least_px:
                    inside = weight > 0.85
                    page.write(
                        x + panel * weight + (-5 if inside else 5), middle + shift + thick / 2, f"{weight:.2f}",
                        min(12.0, thick * 1.05), ha="right" if inside else "left", va="center_baseline",
                        color="#ffffff" if inside else FAINT,
                    )  # fmt: skip
    page.fill(boxes, [_FIRST, _SECOND] * (len(boxes) // 2))
    return top + math.ceil(len(titles) / columns) * (high + 60) + 8
