"""Figures for papers: exactly as wide as asked, no letter smaller than asked, text is text, and cells are exact."""

import re
import struct
import zlib

import numpy as np
import pytest
from matplotlib.text import Text

from attnscope.drawing.canvas import Canvas, FigureRenderer
from attnscope.drawing.style import Style
from attnscope.errors import UsageError
from attnscope.results.result import load_record as load
from tests.findings_helpers import described_findings
from tests.made_records import MADE
from tests.needle_helpers import planted_findings
from tests.record_helpers import map_of, record_of, simple, tokens_of
from tests.test_views import RECORDS, sound

DRAWN = [name for name in MADE if name not in ("atlas.npz", "trace.npz", "cost.npz")]
WORDS = [
    "[CLS]",
    "the",
    "animal",
    "didn",
    "'",
    "t",
    "cross",
    "the",
    "street",
    "because",
    "it",
    "was",
    "too",
    "tired",
    ".",
    "[SEP]",
]


def sentence(**fields):
    """A record as a model of twelve heads leaves it."""
    return record_of(
        map_of(tokens_of(WORDS, special=[0, 15]), layers=2, heads=12), text=" ".join(WORDS), **fields
    )


MORE = {"sentence": sentence, "described": described_findings, "needles": planted_findings}


@pytest.fixture
def pages(monkeypatch, tmp_path):
    """Draws a record, and hands over its pages; each is checked as it stands when a vector file would be written."""
    shown = []
    checks = []

    def look(self, kind):
        shown.append(self)
        for check in checks:
            check(self)
        return b""  # writing it takes most of the time

    def draw(record, check, **how):
        shown.clear()
        checks[:] = [check]
        record.draw(tmp_path / "drawn", ["pdf"], **how)
        assert shown
        return shown

    monkeypatch.setattr(FigureRenderer, "render_vector", look)
    return draw


def texts_on(drawing):
    if not isinstance(drawing, Canvas):
        drawing.agg.draw()  # its axes place their labels then
    for text in drawing.figure.findobj(Text):
        assert isinstance(text, Text)
        hidden = text.axes is not None and text not in text.axes.texts and not text.axes.axison
        if text.get_visible() and text.get_text().strip() and not hidden:
            yield text


def require_fit_for_print(inches, points):
    """Refuses another width, letters that are too small, and texts beyond the edge or over each other."""

    def check(drawing):
        assert drawing.figure.get_size_inches()[0] == pytest.approx(inches, abs=1e-9)
        renderer = drawing.agg.get_renderer()
        boxes = []
        said = []
        width, height = drawing.figure.get_size_inches() * drawing.figure.dpi
        for text in texts_on(drawing):
            # Labels of tokens may be smaller, if each one then has room.
            least = 4.5 if text.get_text() in WORDS and points == 6.5 else points
            assert text.get_fontsize() >= least - 1e-6, text.get_text()
            box = text.get_window_extent(renderer)
            assert box.x0 >= -1, text.get_text()
            assert box.x1 <= width + 1
            assert box.y0 >= -1
            assert box.y1 <= height + 1
            boxes.append(box.extents)
            said.append(text.get_text())
        x0, y0, x1, y1 = np.array(boxes).T
        across = np.minimum.outer(x1, x1) - np.maximum.outer(x0, x0)
        down = np.minimum.outer(y1, y1) - np.maximum.outer(y0, y0)
        size = (x1 - x0) * (y1 - y0)
        over = np.triu(across.clip(0) * down.clip(0) > 0.15 * np.minimum.outer(size, size), 1)
        assert not over.any(), [(said[one], said[other]) for one, other in np.argwhere(over)[:3]]

    return check


@pytest.mark.parametrize(
    ("name", "width", "inches"),
    [
        *((name, "column", 3.3) for name in (*DRAWN, *RECORDS, *MORE)),
        *((name, "page", 6.9) for name in (*RECORDS, *MORE)),
    ],
)
def test_every_record_is_drawn_as_wide_as_asked_with_letters_no_smaller(
    name, width, inches, made, pages
):
    by_hand = {**MORE, **RECORDS}
    record = by_hand[name]() if name in by_hand else load(made / name)
    pages(record, require_fit_for_print(inches, 6.5), width=width)


@pytest.mark.parametrize("points", [5.0, 13.0])
def test_letters_have_the_size_that_is_asked_for_and_labels_are_left_out_instead(points, pages):
    record = sentence().only([(1, 3)])
    (page,) = pages(record, require_fit_for_print(3.3, points), width=3.3, font_size=points)
    labels = [text for text in texts_on(page) if text.get_text() in WORDS]
    assert {round(text.get_fontsize(), 6) for text in labels} == {points}
    every = 16 * 2 // len(labels)
    assert (every == 1) is (points == 5)
    assert len(labels) == 2 * -(-len(WORDS) // every)
    said = " ".join(text.get_text() for text in texts_on(page))
    assert ("one label for" in said) is (every > 1)


@pytest.mark.parametrize("name", [*DRAWN, *RECORDS])
def test_without_a_caption_a_figure_is_the_same_but_shorter(name, made, pages):
    record = RECORDS[name]() if name in RECORDS else load(made / name)
    sizes = []
    said = []
    for caption in (True, False):
        drawn = pages(record, lambda drawing: None, caption=caption)
        sizes.append([tuple(page.figure.get_size_inches()) for page in drawn])
        said.append([{text.get_text() for text in texts_on(page)} for page in drawn])
    for (wide, tall), (width, height), full, left in zip(*sizes, *said, strict=True):
        assert width == wide
        assert 0.2 < tall - height < 3
        whole = " ".join(full)
        assert all(text in whole for text in left)
        assert len(full - left) >= 1


@pytest.mark.parametrize("layout", ["1x2", "2x1"])
def test_two_heads_share_their_labels_and_the_queried_and_strongest_keys_have_theirs(layout, pages):
    record = sentence().only([(0, 3), (1, 7)])
    record.maps[0].weights[:, :, 10] = np.eye(16)[2]  # "it" looks at "animal"
    look = require_fit_for_print(3.3, 6.5)
    page, _ = pages(record, look, width="column", layout=layout, caption=False, query="it")
    labels = [text.get_text() for text in texts_on(page) if text.get_text() in WORDS]
    assert labels.count("it") >= 1
    assert labels.count("animal") >= 1
    rows = [
        text.get_text()
        for text in texts_on(page)
        if text.get_ha() == "right" and text.get_text() in WORDS
    ]
    columns = [text for text in texts_on(page) if text.get_rotation() == 90]
    assert rows.count("it") == (2 if layout == "2x1" else 1)
    assert {*rows} == {*WORDS}
    assert sum(text.get_text() == "animal" for text in columns) == (1 if layout == "2x1" else 2)
    with pytest.raises(UsageError, match="'2' is no layout"):
        Style(layout="2")


def test_a_recording_with_more_frames_than_the_page_has_pixels_is_drawn(
    pages,
):
    assert len(pages(sound(1500), require_fit_for_print(3.3, 6.5), width="column")) == 3


# Pixels --------------------------------------------------------------------------------------------------------------


def chunks(content):
    found = {}
    at = 8
    while at < len(content):
        (length,) = struct.unpack(">I", content[at : at + 4])
        found[content[at + 4 : at + 8]] = content[at + 8 : at + 8 + length]
        at += 12 + length
    return found


@pytest.mark.parametrize(
    ("how", "pixels", "dots"),
    [
        ({"width": 3.3}, 990, 11811),
        ({"width": "page", "dpi": 600}, 4140, 23622),
        ({"dpi": 200}, 0, 7874),
    ],
)
def test_a_png_has_the_pixels_that_were_asked_for_and_says_how_many_make_an_inch(
    how, pixels, dots, tmp_path
):
    record = simple(5, layers=1, heads=1)
    (path,) = record.draw(tmp_path, **how)
    found = chunks(path.read_bytes())
    width, height = struct.unpack(">II", found[b"IHDR"][:8])
    assert struct.unpack(">IIB", found[b"pHYs"]) == (dots, dots, 1)
    assert pixels in (0, width)
    if not pixels:
        (usual,) = record.draw(tmp_path / "usual")
        assert (width, height) == tuple(
            2 * n for n in struct.unpack(">II", chunks(usual.read_bytes())[b"IHDR"][:8])
        )
    assert len(zlib.decompress(found[b"IDAT"])) == height * (1 + 3 * width)


# Vectors -------------------------------------------------------------------------------------------------------------


def svg_of(record, folder, **how):
    return record.draw(folder, "svg", **how)[0].read_text("utf-8")


def test_an_svg_holds_its_text_as_text_with_its_letters_beside(tmp_path):
    drawn = svg_of(simple(4, layers=1, heads=1), tmp_path)
    written = re.findall(r"<text [^>]*>([^<]*)</text>", drawn)
    assert {"[CLS]", "t1", "t2", "[SEP]"} <= set(written)
    assert any(re.fullmatch(r"0\.\d\d", text) for text in written)
    faces = re.findall(
        r"@font-face \{ font-family: '([^']+)'; font-weight: (\d+);.*?base64,([\w+/=]+)\)", drawn
    )
    assert {(family, weight) for family, weight, _ in faces} == {
        ("DejaVu Sans", "400"),
        ("DejaVu Sans", "700"),
    }
    assert max(len(data) for *_, data in faces) < 40_000, "the letters that are used alone"


@pytest.mark.parametrize(("n", "is_image"), [(2, False), (64, False), (65, True)])
def test_cells_are_rectangles_up_to_a_size_and_one_pixel_each_beyond(n, is_image, tmp_path):
    drawn = svg_of(simple(n, layers=1, heads=1), tmp_path)
    maps = [
        size
        for size in re.findall(r'<image [^>]*width="(\d+)"[^>]*height="(\d+)"', drawn)
        if size[1] != "1"
    ]
    sizes = re.findall(r"base64,\s*(iVBOR[\w+/=\s]+)", drawn)
    assert bool([s for s in sizes if _size_of(s) == (n, n)]) is is_image, maps


def _size_of(encoded):
    import base64

    width, height = struct.unpack(">II", base64.b64decode("".join(encoded.split()))[16:24])
    return width, height


def test_rectangles_cover_each_cell_in_its_colour():
    from attnscope.drawing.vectors import cells_as_rectangles

    rng = np.random.default_rng(3)
    shown = rng.integers(0, 2, (5, 7, 1)).astype(np.uint8) * np.array([255, 80, 10, 0], np.uint8)
    shown[..., 3] = 255
    covered = np.zeros((5, 7, 4))
    for patch in cells_as_rectangles([((10.0, 20.0, 70.0, 100.0), shown)]):
        for corners in patch.get_path().vertices.reshape(-1, 5, 2):
            (left, top), (right, bottom) = corners[0], corners[2]
            columns = slice(round((left - 10) / 10), round((right - 10) / 10))
            covered[round((top - 20) / 20) : round((bottom - 20) / 20), columns] += patch.get_facecolor()
    np.testing.assert_allclose(covered * 255, shown, atol=1e-9)


@pytest.mark.parametrize(
    ("width", "inches"),
    [("column", 3.3), ("85mm", 85 / 25.4), ("8.5cm", 85 / 25.4), ("3.4in", 3.4), ("3.4", 3.4)],
)
def test_a_pdf_has_fonts_and_a_page_of_the_width(tmp_path, width, inches):
    (path,) = sentence().only([(1, 3)]).draw(tmp_path, "pdf", width=width, font_size=6)
    content = path.read_bytes()
    assert b"/FontFile2" in content
    assert b"/Type3" not in content
    box = re.search(rb"/MediaBox \[ ?0 0 ([\d.]+) ([\d.]+) ?\]", content)
    assert box is not None
    assert float(box[1]) == pytest.approx(inches * 72)


# What is asked wrongly ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"width": "sheet"}, "'sheet' is no width"),
        ({"width": "85 miles"}, "'85 miles' is no width"),
        ({"width": "5mm"}, "no width 0.19"),
        ({"width": 0.1}, "no width 0.1"),
        ({"width": "nan"}, "no width nan"),
        ({"dpi": 3}, "no dpi 3"),
        ({"font_size": 200.0}, "no font-size 200"),
        ({"font": "Comic Nonsense"}, "no font 'Comic"),
    ],
)
def test_sizes_and_fonts_that_make_no_sense_are_refused(given, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        Style(**given)


@pytest.mark.parametrize(
    "command_line", ["heatmap a", "heads a", "heatmap a --rollout", "batch f -o out"]
)
def test_every_command_that_draws_refuses_them_before_it_begins(run, tmp_path, command_line):
    status, out, err = run(*command_line.split(), "--width", "sheet")
    assert status == 2
    assert out == ""
    assert err.startswith(
        "error: 'sheet' is no width\nhint: give inches, a length such as 85mm or 8.5cm, or one of column"
    )
    assert not list(tmp_path.iterdir())
