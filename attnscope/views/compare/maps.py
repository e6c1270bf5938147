"""Maps of heads side by side, their differences on one signed scale, and rows of two texts bar by bar."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import amount
from attnscope.records import Tokens
from attnscope.records.comparison import MinimalPair, PickedHeads
from attnscope.records.frame.pair_tables import head_name
from attnscope.views.compare.summary import both_texts, distance, distance_name, hidden_notes, key_name, title_of
from attnscope.views.drawing import layout
from attnscope.views.drawing.canvas import FAINT, INK, Page, colormap
from attnscope.views.drawing.layout import SCREEN, Paper
from attnscope.views.drawing.lettering import Lettering, lettering_for
from attnscope.views.maps.figures import LABEL_ROOM_EM, widest_label, write_token_labels
from attnscope.views.tables.wording import printable

_WEIGHTS, _SIGNED = "Blues", "RdBu_r"
_FIRST, _SECOND = "#2f6fb0", "#d9822b"
_ROWS = "rows: queries (attend) · columns: keys (are attended to)"
_WEIGHT_BAR = "attention weight: the share of a query's attention that a key gets"
_SHOWN_MAPS, _SHOWN_ROWS = 3, 6
_MOST_KEYS = 24


@dataclass(frozen=True, eq=False)
class Panel:
    """A map with its title: weights, (query, key), and the tokens at its sides."""

    title: str
    values: NDArray[np.float32]
    queries: Tokens
    keys: Tokens


def picked_pages(found: PickedHeads, paper: Paper = SCREEN) -> Iterator[tuple[str, Page]]:
    """The heads, their mean and the single head on the scale of weights; and their differences on a signed one."""
    notes = [_ROWS, *hidden_notes(found)]
    subtitle = f"“{' '.join(found.tokens.text.split())}”"
    noted = [*notes, printable(found.single_note, 400)]
    shown = [Panel(name, values, found.tokens, found.tokens) for name, values in found.maps()]
    yield "picked", panels_page(title_of(found), subtitle, shown, noted, None, paper)
    apart = [Panel(name, values, found.tokens, found.tokens) for name, values in found.differences()]
    title = f"{title_of(found)}: differences"
    limit = largest([panel.values for panel in apart])
    yield "differences", panels_page(title, subtitle, apart, noted, limit, paper, "difference of attention weights")


def pair_pages(found: MinimalPair, paper: Paper = SCREEN) -> Iterator[tuple[str, Page]]:
    """The heads that change most on both texts, with their differences; and their rows at the query, bar by bar."""
    first, second = found.tokens
    subtitle = both_texts(found)
    both = join_tokens(found)
    panels = []
    for head in found.ranked()[:_SHOWN_MAPS]:
        name = head_name(found.heads[head])
        ours = found.weights[head][np.ix_(found.aligned[:, 0], found.aligned[:, 0])]
        theirs = found.other_weights[head][np.ix_(found.aligned[:, 1], found.aligned[:, 1])]
        panels.append(Panel(f"{name}: second − first", theirs - ours, both, both))
    notes = [
        _ROWS,
        "tokens that both texts have a place for",
        *hidden_notes(found),
    ]
    if panels and len(found.aligned):
        title = f"{title_of(found)}: the heads that change most"
        limit = largest([panel.values for panel in panels])
        what = "attention weight in the second text − in the first"
        yield "differences", panels_page(title, subtitle, panels, notes, limit, paper, what)
        best = found.ranked()[0]
        shown = [
            Panel(f"{head_name(found.heads[best])}: first text", found.weights[best], first, first),
            Panel(f"{head_name(found.heads[best])}: second text", found.other_weights[best], second, second),
        ]
        title = f"{title_of(found)}: {head_name(found.heads[best])}"
        yield "maps", panels_page(title, subtitle, shown, notes[:1] + notes[2:], None, paper)
    for pair in found.queries:
        yield f"query-{int(found.aligned[pair, 0]):03d}", rows_page(found, pair, paper)


def join_tokens(found: MinimalPair) -> Tokens:
    """The aligned tokens; replaced ones with both labels."""
    first, second = found.tokens
    joined = first.take(found.aligned[:, 0])
    labels = tuple(key_name(first.labels[a], second.labels[b]) for a, b in found.aligned.tolist())
    return replace(joined, labels=labels)


def largest(values: Sequence[NDArray[np.float32]]) -> float:
    """The largest size of any value; 1 where all are 0."""
    return max((float(np.nan_to_num(np.abs(v)).max(initial=0.0)) for v in values), default=0.0) or 1.0


def panels_page(
    title: str,
    subtitle: str,
    panels: Sequence[Panel],
    notes: Sequence[str],
    limit: float | None,
    paper: Paper,
    meaning: str = _WEIGHT_BAR,
) -> Page:
    """Maps side by side, each with its token labels, all in the same colours.

    Args:
        title: Title of the page.
        subtitle: What stands below it.
        panels: The maps.
        notes: What stands at the foot.
        limit: The value of the last colour of a signed scale, its middle 0; None = weights, from 0 to 1.
        paper: What they are laid out on.
        meaning: What the colours mean.
    """
    labels = [label for panel in panels for tokens in (panel.queries, panel.keys) for label in tokens.labels]
    lettering = lettering_for([title, subtitle, *notes, *labels], paper)
    tokens = max(len(p.queries) for p in panels), max(len(p.keys) for p in panels)
    rows, columns = (
        widest_label(lettering, [label for sides in tokens_of for label in sides.labels])
        for tokens_of in ([panel.queries for panel in panels], [panel.keys for panel in panels])
    )
    notes = [*notes, *([lettering.note] if lettering.note else [])]
    pool, _, grid = layout.pooled_grid(
        len(panels), tokens, (rows, columns), notes, lettering.width_px, meaning=meaning, paper=paper
    )
    page = Page(grid.width_px, grid.height_px, lettering)
    page.head(title, subtitle)
    cmap = colormap(_WEIGHTS if limit is None else _SIGNED)
    low, high = (0.0, 1.0) if limit is None else (-limit, limit)
    for panel, (x, y) in zip(panels, grid.corners, strict=True):
        values = _pool_signed(panel.values, pool)
        box = (x, y, values.shape[1] * grid.cell_px, values.shape[0] * grid.cell_px)
        shown = page.image(box, cmap, animated=False)
        page.set_cells(shown, values, (low, high))
        page.frames([box])
        title = panel.title
        if paper.fixed and lettering.width_px(title, layout.PANEL_TITLE_PX * 1.12) > box[2]:
            # The title of the page, or what the colours mean, says the rest.
            title = lettering.fit(title.partition(":")[0], layout.PANEL_TITLE_PX * 1.12, box[2])
        page.write(x, y - 12, title, layout.PANEL_TITLE_PX, ha="left", weight="bold")
        write_token_labels(page, grid, (box[2], box[3]), (panel.queries, panel.keys), pool, (x, y))
    x, y, width, height = grid.bar
    if paper.fixed and limit is not None:  # numbers with a sign reach further
        x, width = x + 8, width - 16
    page.colour_bar((x, y, width, height), cmap)
    steps = layout.nice_ticks(high)
    ticks = steps if limit is None else (*(-tick for tick in reversed(steps[1:])), *steps)
    for tick in ticks:
        at = x + width * (tick - low) / (high - low)
        page.write(at, y + height + 12, f"{tick:g}".replace("-", "−"), layout.CAPTION_PX, ha="center")
    if grid.says_meaning:
        page.write(x + width + 22, y + height / 2, meaning, layout.CAPTION_PX, ha="left")
    page.foot(grid.footer_y, grid.footer)
    return page


def _pool_signed(values: NDArray[np.float32], pool: int) -> NDArray[np.float32]:
    """Of each block of pool x pool values that of the largest size, with its sign."""
    if pool == 1:
        return values
    for axis in (0, 1):
        starts = np.arange(0, values.shape[axis], pool)
        high, low = (over.reduceat(values, starts, axis=axis) for over in (np.maximum, np.minimum))
        values = np.where(high >= -low, high, low)
    return values


def rows_page(found: MinimalPair, pair: int, paper: Paper = SCREEN) -> Page:
    """What one query attends to in both texts, in the heads that change most there: two bars a key."""
    first, second = found.tokens
    query, other = (int(place) for place in found.aligned[pair])
    values = np.nan_to_num(found.divergences[found.measure][:, pair], nan=-1.0)
    heads = [int(head) for head in np.argsort(-values, kind="stable")[:_SHOWN_ROWS] if values[head] >= 0]
    alone = found.unmatched()
    names = [key_name(first.labels[a], second.labels[b]) for a, b in found.aligned.tolist()]
    names += [first.labels[a] for a in alone[0]] + [second.labels[b] for b in alone[1]]
    ours, theirs = found.weights[heads, query], found.other_weights[heads, other]
    nothing = [np.zeros((len(heads), len(places))) for places in alone]
    before = np.concatenate([ours[:, found.aligned[:, 0]], ours[:, list(alone[0])], nothing[1]], 1)
    after = np.concatenate([theirs[:, found.aligned[:, 1]], nothing[0], theirs[:, list(alone[1])]], 1)
    # In the order of the first text; what stands in the second alone comes after the token before it there.
    order = np.argsort(_positions(found), kind="stable")
    keys = [int(key) for key in order]
    most_keys = min(_MOST_KEYS, layout.most_bars(3, paper) // 2) if paper.is_narrow else _MOST_KEYS
    if len(keys) > most_keys:
        most = set(np.argsort(-np.maximum(before, after).max(0), kind="stable")[:most_keys].tolist())
        keys = [key for key in keys if key in most]
    subtitle = both_texts(found)
    title = f"{title_of(found)}: what “{printable(first.labels[query], 40)}” attends to"
    lettering = lettering_for([title, subtitle, *names], paper)
    return _bars(found, title, subtitle, heads, [names[key] for key in keys], before[:, keys], after[:, keys],
                 values, lettering, len(keys) < len(names))  # fmt: skip


def _positions(found: MinimalPair) -> NDArray[np.float64]:
    """Where a key stands among all: aligned ones, those of the first text alone, those of the second alone."""
    alone = found.unmatched()
    after = [
        float(found.aligned[found.aligned[:, 1] < place, 0].max(initial=-1)) + 0.5 + place * 1e-6 for place in alone[1]
    ]
    return np.array([*found.aligned[:, 0].astype(float), *map(float, alone[0]), *after])


def _bars(
    found: MinimalPair,
    title: str,
    subtitle: str,
    heads: Sequence[int],
    names: Sequence[str],
    before: NDArray[np.float64],
    after: NDArray[np.float64],
    values: NDArray[np.float64],
    lettering: Lettering,
    cut: bool,
) -> Page:
    paper = lettering.paper
    n_keys, columns = len(names), min(2 if paper.is_narrow else 3, len(heads))
    rows = math.ceil(len(heads) / columns)
    pitch = max(24, min(34, 760 // n_keys))
    size = paper.letters(min(layout.MAX_LABEL_PX, pitch * 0.46))
    left = math.ceil(widest_label(lettering, names)(size)) + 14
    left = min(left, paper.room_px // 3) if paper.fixed else left
    panel = (paper.room_px - left - columns * 40) // columns
    top = layout.MARGIN_PX + 110
    high = n_keys * pitch
    notes = [
        "bars: the share of the query's attention that a key gets; a full panel is 1",
        f"heads: those whose row changes most here, by {distance_name(found.measure)}",
        *([f"the {amount(n_keys, 'key')} with the largest weights"] if cut else []),
        *hidden_notes(found),
    ]
    width = paper.width_px
    page = Page.above(notes, width, top + rows * (high + 60) + 8, lettering)
    page.head(title, subtitle)
    texts = ("first text", "second text")
    for number, (name, color) in enumerate(zip(texts, (_FIRST, _SECOND), strict=True)):
        x = layout.MARGIN_PX + left + number * 130
        page.fill([(x, top - 52, 18, 12)], [color])
        page.write(x + 26, top - 46, name, layout.CAPTION_PX, ha="left")
    thick = pitch * 0.36
    boxes: list[tuple[float, float, float, float]] = []
    colors: list[str] = []
    for place, head in enumerate(heads):
        x = layout.MARGIN_PX + left + place % columns * (panel + 40)
        y = top + place // columns * (high + 60) + 14
        name = f"{head_name(found.heads[head])} · {distance(math.sqrt(values[head]))}"
        page.write(x, y - 16, name, layout.PANEL_TITLE_PX, ha="left", weight="bold")
        page.lines([[(x, y - 2), (x, y + high)]])
        page.lines([[(x + panel, y - 2), (x + panel, y + high)]], linestyles="dotted")
        for key in range(n_keys):
            middle = y + (key + 0.5) * pitch
            if place % columns == 0:
                label = lettering.fit(names[key], size, min(LABEL_ROOM_EM * size, left - 10))
                page.write(x - 7, middle, label, size, ha="right", va="center_baseline", color=INK)
            for weights, shift, color in ((before, -thick, _FIRST), (after, 0.0, _SECOND)):
                weight = float(weights[place, key])
                boxes.append((x, middle + shift, panel * weight, thick - 1))
                colors.append(color)
                if weight >= 0.005 and thick * 1.05 >= paper.least_px:
                    inside = weight > 0.85
                    page.write(
                        x + panel * weight + (-5 if inside else 5), middle + shift + thick / 2, f"{weight:.2f}",
                        min(12.0, thick * 1.05), ha="right" if inside else "left", va="center_baseline",
                        color="#ffffff" if inside else FAINT,
                    )  # fmt: skip
    page.fill(boxes, colors)
    return page
