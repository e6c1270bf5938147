"""Where things stand on figures: plain numbers."""

import itertools
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attnscope.drawing import layout
from attnscope.drawing.layout import (
    Grid,
    Paper,
    bar_grid,
    columns_for,
    labelled_grid,
    nice_ticks,
    overview_grid,
    pooled_grid,
)

Box = tuple[float, float, float, float]


def width_of(text: str, size_px: float) -> float:
    return 0.6 * size_px * len(text)


def widest_of(n_letters: float) -> tuple:
    return (lambda size: n_letters * 0.6 * size,) * 2


def overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def require_apart(boxes: list[Box], width: int, height: int) -> None:
    """No two boxes overlap and all are on the page."""
    for x0, y0, x1, y1 in boxes:
        assert 0 <= x0 < x1 <= width and 0 <= y0 < y1 <= height
    # Boxes come row by row; those far apart in the list are far apart on the page, and all pairs would be slow.
    for a, b in itertools.combinations(sorted(boxes, key=lambda box: (box[1], box[0])), 2):
        assert not overlap(a, b), (a, b)


def boxes_of(grid: Grid, shape: tuple[int, int], letters: float) -> list[Box]:
    """Every map with its labels and title, the colour bar, the header and the footer."""
    label = letters * 0.6 * grid.label_px
    rows, columns = shape
    title = layout.PANEL_TITLE_PX * grid.zoom
    panels = [
        (x - label - 5, y - 12 * grid.zoom - title / 2, x + columns * grid.cell_px, y + rows * grid.cell_px + 5 + label)
        for x, y in grid.corners
    ]
    x, y, width, height = grid.bar
    tick = y + height + 12 * grid.zoom + layout.CAPTION_PX * grid.zoom / 2
    foot = grid.footer_y + (len(grid.footer) - 0.5) * layout.LINE_PX * grid.zoom
    header = (layout.MARGIN_PX + 34 * grid.zoom) + layout.SUBTITLE_PX * grid.zoom / 2
    return [
        (0, 0, grid.width_px, header),
        *panels,
        (x, y, x + width, tick),
        (0, grid.footer_y - layout.CAPTION_PX * grid.zoom / 2, grid.width_px, foot),
    ]


SIZES = st.integers(1, 600)
NOTES = ["rows: queries (attend) · columns: keys (are attended to)", "word pieces are merged " * 8]
AROUND = layout.Surroundings(NOTES, width_of)


@given(st.integers(1, 64), SIZES, SIZES, st.floats(1, 18))
@example(12, 16, 16, 7)
@example(64, 600, 600, 18)
@example(1, 1, 600, 18)
@example(2, 600, 1, 1)
def test_maps_with_labels_never_overlap(n_panels: int, rows: int, columns: int, letters: float) -> None:
    grid = labelled_grid(n_panels, (rows, columns), widest_of(letters), AROUND)
    assert len(grid.corners) == n_panels
    assert grid.width_px >= 560
    require_apart(boxes_of(grid, (rows, columns), letters), grid.width_px, grid.height_px)
    # A label has room above it and below it, and is large enough to be read.
    assert grid.cell_px * grid.label_step >= layout.LEGIBLE_PX
    assert 0.8 * layout.LEGIBLE_PX <= grid.label_px <= grid.cell_px * grid.label_step
    assert grid.cell_px * (grid.label_step - 1) < layout.LEGIBLE_PX  # no label is left out without need
    assert ("one label for" in " ".join(grid.footer)) == (grid.label_step > 1)


@given(st.integers(1, 48), st.integers(1, 32), SIZES, SIZES)
@example(6, 12, 16, 16)
@example(48, 32, 100, 100)
@example(1, 1, 1, 600)
def test_small_maps_never_overlap(n_layers: int, n_heads: int, rows: int, columns: int) -> None:
    pool = layout.pool_factor(max(rows, columns), n_heads)
    shape = (math.ceil(rows / pool), math.ceil(columns / pool))
    grid = overview_grid(n_layers, n_heads, shape, AROUND)
    assert len(grid.corners) == n_layers * n_heads
    assert grid.width_px >= (1000 if shape[0] > shape[1] else 1600)
    # Two screens and what stands between maps, unless even 96 pixels a head are wider.
    assert grid.width_px <= max(3600, n_heads * (96 + 8) + 200)
    across = grid.corners[:n_heads]
    down = grid.corners[::n_heads]
    assert all(b[0] - a[0] >= shape[1] * grid.cell_px + 8 for a, b in itertools.pairwise(across))
    assert all(b[1] - a[1] >= shape[0] * grid.cell_px + 8 for a, b in itertools.pairwise(down))
    corner = (down[0], (across[-1][0], down[-1][1]))
    assert corner[0][0] >= layout.MARGIN_PX + 30  # the layers' names stand there
    assert corner[1][0] + shape[1] * grid.cell_px <= grid.width_px
    assert corner[1][1] + shape[0] * grid.cell_px <= grid.bar[1]
    assert grid.bar[1] + grid.bar[3] < grid.footer_y < grid.height_px


@given(st.integers(1, 64), st.integers(1, 24), st.integers(1, 24), st.floats(1, 18))
def test_bars_never_overlap(n_panels: int, columns: int, n_bars: int, letters: float) -> None:
    bars = bar_grid(n_panels, min(columns, n_panels), n_bars, widest_of(letters)[0], AROUND)
    label = letters * 0.6 * bars.label_px
    boxes = [
        (x - (label + 6 if i % bars.columns == 0 else 0), y - 18, x + bars.panel_px, y + n_bars * bars.bar_px)
        for i, (x, y) in enumerate(bars.corners)
    ]
    foot = bars.footer_y + (len(bars.footer) - 0.5) * layout.LINE_PX
    require_apart([*boxes, (0, bars.footer_y - 7, bars.width_px, foot)], bars.width_px, bars.height_px)
    assert bars.label_px <= bars.bar_px


def test_a_layer_of_twelve_heads_fills_the_page() -> None:
    grid = labelled_grid(12, (16, 16), widest_of(7), AROUND)
    assert (grid.width_px, grid.label_step) == (1600, 1)
    assert grid.height_px >= 1200
    assert len({x for x, _ in grid.corners}) == 4


@pytest.mark.parametrize(("n_layers", "n_heads"), [(6, 12), (2, 7), (30, 9), (12, 12)])
def test_layers_stand_as_close_as_heads(n_layers: int, n_heads: int) -> None:
    corners = overview_grid(n_layers, n_heads, (16, 16), AROUND).corners
    across, down = corners[1][0] - corners[0][0], corners[n_heads][1] - corners[0][1]
    assert down == across


@pytest.mark.parametrize(("n_layers", "n_heads", "shape"), [(6, 8, (63, 15)), (2, 4, (63, 15)), (4, 4, (40, 10))])
def test_maps_of_a_long_target_and_a_short_text_fill_their_page(
    n_layers: int, n_heads: int, shape: tuple[int, int]
) -> None:
    grid = overview_grid(n_layers, n_heads, shape, AROUND)
    room = (grid.width_px - 2 * layout.MARGIN_PX) * (grid.bar[1] - grid.corners[0][1])
    assert len(grid.corners) * shape[0] * shape[1] * grid.cell_px**2 >= 0.25 * room
    assert grid.height_px <= 1.7 * grid.width_px


def test_one_head_has_numbers_while_they_fit() -> None:
    assert labelled_grid(1, (16, 16), widest_of(7), AROUND).number_px
    assert not labelled_grid(1, (100, 100), widest_of(7), AROUND).number_px


@pytest.mark.parametrize(("n_panels", "n", "widths"), [(1, 2, (560, 560)), (2, 2, (560, 800)), (1, 16, (560, 1250))])
def test_few_cells_make_no_wide_page(n_panels: int, n: int, widths: tuple[int, int]) -> None:
    grid = labelled_grid(n_panels, (n, n), widest_of(7), AROUND)
    assert widths[0] <= grid.width_px <= widths[1]
    assert n_panels * n * grid.cell_px >= 0.3 * grid.width_px


@given(st.integers(1, 64), SIZES, SIZES, st.floats(1, 18), st.sampled_from([3.3, 6.9, 13.0]), st.floats(4, 14))
@example(12, 16, 16, 7, 3.3, 6.0)
@example(1, 2, 2, 5, 3.3, 6.5)
def test_maps_on_paper_fill_their_width_and_never_overlap(
    n_panels: int, rows: int, columns: int, letters: float, inches: float, points: float
) -> None:
    paper = Paper.of_width(inches, points, 300, True, None)
    grid = labelled_grid(
        n_panels, (rows, columns), widest_of(letters), layout.Surroundings(NOTES, width_of, paper=paper)
    )
    assert (grid.width_px - 2 * paper.crop_px) / paper.inch_px == pytest.approx(inches)
    assert grid.label_px / paper.inch_px * 72 == pytest.approx(points)
    assert grid.cell_px * grid.label_step >= grid.label_px
    for x, y in grid.corners:
        assert x >= layout.MARGIN_PX and x + columns * grid.cell_px <= grid.width_px - layout.MARGIN_PX + 1e-6
        assert y + rows * grid.cell_px < grid.height_px
    for (x, y), (further, lower) in itertools.pairwise(grid.corners):
        assert further - x >= columns * grid.cell_px or lower - y >= rows * grid.cell_px


@pytest.mark.parametrize(
    ("n_panels", "columns"),
    [(1, {1}), (2, {2}), (3, {3}), (4, {2}), (6, {3}), (8, {4}), (12, {4}), (16, {4}), (20, {5}), (32, {8}), (64, {8})],
)
def test_panels_stand_as_a_person_would_put_them(n_panels: int, columns: set[int]) -> None:
    assert columns_for(n_panels) in columns


@given(st.integers(1, 200))
def test_rows_of_panels_are_nearly_full(n_panels: int) -> None:
    columns = columns_for(n_panels)
    rows = math.ceil(n_panels / columns)
    assert 1 <= columns <= n_panels
    assert rows * columns - n_panels < columns
    if n_panels > 3:
        assert 0.4 < columns / rows < 4


@given(st.integers(1, 64), st.integers(1, 9000))
@example(32, 4096)
@example(1, 20_000)
def test_no_figure_is_too_large_to_draw(n_panels: int, n_tokens: int) -> None:
    pool, shape, grid = pooled_grid(n_panels, (n_tokens, n_tokens), widest_of(7), AROUND)
    assert grid.width_px * grid.height_px <= layout.MOST_PX
    assert max(grid.width_px, grid.height_px) < 2**16  # which matplotlib cannot draw
    assert shape == (math.ceil(n_tokens / pool),) * 2
    assert (layout.pool_note(pool) in " ".join(grid.footer)) == (pool > 1)
    if pool * grid.label_step > 1:
        assert f"one label for {pool * grid.label_step} tokens" in " ".join(grid.footer)


def test_texts_that_fit_are_not_pooled() -> None:
    assert pooled_grid(12, (512, 512), widest_of(7), AROUND)[0] == 1
    assert pooled_grid(12, (1024, 1024), widest_of(7), AROUND)[0] == 1
    assert layout.pool_factor(133, 12) == 1
    assert layout.pool_factor(512, 12) == 2


@given(st.floats(1e-6, 1e6))
@example(1.0)
@example(0.3)
def test_ticks_are_round_and_within(top: float) -> None:
    ticks = nice_ticks(top)
    assert 3 <= len(ticks) <= 7  # a colour bar has room for that many
    assert ticks[0] == 0
    assert ticks[-1] <= top * 1.001
    assert top - ticks[-1] < ticks[1] * 1.001  # the last step is not left out
    assert all(len(f"{tick:g}") <= 8 for tick in ticks)


def test_ticks_of_weights() -> None:
    assert nice_ticks(1) == (0, 0.2, 0.4, 0.6, 0.8, 1.0)
    assert nice_ticks(0.68) == (0, 0.2, 0.4, 0.6)
    assert nice_ticks(0) == (0,)
    assert nice_ticks(math.nan) == (0,)


@given(st.text(alphabet="ab \u4e2d", max_size=80), st.floats(1, 300))
def test_wrapped_lines_hold_every_word_once(text: str, room: float) -> None:
    lines = layout.wrap(text, room, width_of)
    assert " ".join(lines).split() == text.split()
    for line in lines:
        assert width_of(line, layout.CAPTION_PX) <= room or len(line.split()) == 1


def test_no_line_begins_with_the_dot_between_two_notes() -> None:
    lines = layout.wrap("ten words · of a note · here", 9.5, lambda text, _: len(text))
    assert lines == ("ten words ·", "of a note ·", "here")
