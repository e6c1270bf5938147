"""Where things stand on figures: plain numbers."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attnscope.drawing import layout
from attnscope.drawing.layout import (
    SCREEN_PAPER,
    Margins,
    PanelRequest,
    Paper,
    arrange_panels,
    nice_ticks,
)
from attnscope.drawing.map_figure import Axis
from attnscope.report.numbers import format_ticks


def width_of(text, size_px):
    return 0.6 * size_px * len(text)


def overlap(a, b):
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def require_apart(boxes, width, height):
    """No two boxes overlap and all are on the page."""
    for x0, y0, x1, y1 in boxes:
        assert 0 <= x0 < x1 <= width
        assert 0 <= y0 < y1 <= height
    # Boxes come row by row; those far apart in the list are far apart on the page, and all pairs would be slow.
    for a, b in itertools.combinations(sorted(boxes, key=lambda box: (box[1], box[0])), 2):
        assert not overlap(a, b), (a, b)


def labelled(n, shape, label_px=60, **more):
    """Maps with labels at their left and below."""
    room = Margins(left=label_px, above=26, below=label_px)
    least = max(2, min(9, 1000 // max(shape)))
    return PanelRequest(n=n, shape=shape, margins=lambda cell: room, min_cell_px=least, **more)


def boxes_of(places):
    """Every panel with its margins, below the header."""
    width, height = places.panel_size
    margins = places.margins
    above = margins.above * places.zoom
    boxes = [(0.0, 0.0, float(places.width_px), layout.HEADER_PX * places.zoom - 0.5)]
    for x, y in places.corners:
        boxes.append(
            (x - margins.left, y - above, x + width + margins.right, y + height + margins.below)
        )
    return boxes


SIZES = st.integers(1, 600)


@given(st.integers(1, 64), SIZES, SIZES, st.integers(1, 140))
@example(12, 16, 16, 60)
@example(64, 600, 600, 140)
@example(1, 1, 600, 140)
@example(2, 600, 1, 1)
def test_panels_never_overlap_and_are_on_the_page(n, rows, columns, label_px):
    places = arrange_panels(labelled(n, (rows, columns), label_px), SCREEN_PAPER)
    assert len(places.corners) == n
    assert places.width_px >= 560
    require_apart(boxes_of(places), places.width_px, places.bottom_y + 1)
    assert places.panel_size == (columns * places.cell_size[0], rows * places.cell_size[1])


def test_rows_of_a_given_height_take_the_width_that_is_left():
    request = PanelRequest(
        n=4, columns=2, shape=(8, 1), row_px=20, names_px=100, max_panel_px=900, max_cell_px=900
    )
    for paper in (SCREEN_PAPER, Paper.of_width(6.9, 6.5, 300, True, None)):
        places = arrange_panels(request, paper)
        assert places.panel_size[1] == 160
        assert 2 * places.panel_size[0] + request.gap_px + 100 == pytest.approx(paper.room_px, abs=2)


@given(
    st.integers(1, 64),
    SIZES,
    SIZES,
    st.floats(1, 140),
    st.sampled_from([3.3, 6.9, 13.0]),
    st.floats(4, 14),
)
@example(12, 16, 16, 60, 3.3, 6.0)
@example(1, 2, 2, 5, 3.3, 6.5)
def test_panels_on_paper_fit_their_width_and_never_overlap(n, rows, columns, label_px, inches, points):
    paper = Paper.of_width(inches, points, 300, True, None)
    places = arrange_panels(labelled(n, (rows, columns), label_px), paper)
    assert (places.width_px - 2 * paper.crop_px) / paper.inch_px == pytest.approx(inches)
    assert places.margins.left <= label_px
    for x, y in places.corners:
        assert x >= layout.MARGIN_PX
        if places.cell_size[0] > 0.01:
            assert x + places.panel_size[0] <= places.width_px - layout.MARGIN_PX + 0.1
        assert y + places.panel_size[1] <= places.bottom_y
    for (x, y), (further, lower) in itertools.pairwise(places.corners):
        assert further - x >= places.panel_size[0] or lower - y >= places.panel_size[1]


@given(st.floats(1e-6, 1e6))
@example(1.0)
@example(0.3)
def test_ticks_are_round_and_within(top):
    ticks = nice_ticks(top)
    assert 3 <= len(ticks) <= 7  # a colour bar has room for that many
    assert ticks[0] == 0
    assert ticks[-1] <= top * 1.001
    assert top - ticks[-1] < ticks[1] * 1.001  # the last step is not left out
    assert all(len(f"{tick:g}") <= 8 for tick in ticks)


@given(st.text(alphabet="ab \u4e2d", max_size=80), st.floats(1, 300))
def test_wrapped_lines_hold_every_word_once(text, room):
    lines = layout.wrap_text(text, room, width_of)
    assert " ".join(lines).split() == text.split()
    for line in lines:
        assert width_of(line, layout.CAPTION_PX) <= room or len(line.split()) == 1


def test_marked_labels_stay_and_stand_aside_of_each_other():
    axis = Axis(labels=tuple("abcdefghij"), marked_cells=(4, 5))
    assert axis.label_positions(2, 1.5) == {4: 3.75, 5: 5.25, 0: 0, 2: 2, 8: 8}
    # Those that have room stand where they are.
    assert Axis(labels=tuple("abcdef"), marked_cells=(1, 4)).label_positions(2, 2.0) == {1: 1, 4: 4}


def test_ticks_have_the_digits_that_they_need():
    assert [*format_ticks((0.0, 0.25, 0.5)).values()] == ["0", "0.25", "0.5"]
    assert [*format_ticks((0.9985, 0.999, 0.9995, 1.0)).values()] == ["0.9985", "0.999", "0.9995", "1"]
    assert [*format_ticks((0.0, 0.63934)).values()] == ["0", "0.639"]
