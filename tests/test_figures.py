"""Figures: which there are, what values and words are on them, and that the same record gives the same bytes."""

import itertools
import json
import os
import re
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex

from attnscope.drawing import layout, lettering
from attnscope.drawing.canvas import MARK_COLOR
from attnscope.drawing.style import SCALES, Style
from attnscope.errors import AttnscopeError
from attnscope.questions.heatmap_figures import make_figures
from attnscope.questions.heatmap_plates import draw_figures
from tests.processes import python
from tests.record_helpers import RUN, map_of, page_of, record_of, simple, stems, tokens_of


def words(canvas):
    return [text.get_text() for text in canvas.axes.texts if text.get_text()]


def encoder_decoder():
    source = tokens_of(["a", "b", "c", "</s>"], (3,))
    target = tokens_of(["x", "y"])
    return record_of(
        map_of(source),
        map_of(target, kind="decoder", seed=1),
        map_of(target, source, kind="cross", seed=2),
    )


def row_labels(canvas):
    """The labels on the left of maps that are not empty."""
    return [text for text in canvas.axes.texts if text.get_ha() == "right" and text.get_text()]


def written_weights(weights):
    """Weights as cells show them: to two decimals, those that would be 0.00 not at all."""
    return [f"{weight:.2f}" if weight >= 0.005 else "" for weight in weights.ravel()]


# Which figures


def test_figures_are_named_by_what_is_in_them():
    record = simple()
    assert stems(record) == ["overview", "L00", "L01"]
    assert stems(simple(layers=1), "t1") == ["L00", "query-001"]
    assert stems(record.only([(1, 2), (0, 1)])) == ["picked"]
    assert stems(record.only([(1, 2)])) == ["L01H02"]
    repeated = record_of(map_of(tokens_of(["it", "is", "it"])))
    assert stems(repeated, "it") == ["overview", "L00", "L01", "query-000", "query-002"]
    assert stems(repeated, " it , is ")[3:] == ["query-000", "query-001", "query-002"]
    with pytest.raises(AttnscopeError, match="no token is 'was'") as caught:
        stems(repeated, "it,was")
    assert caught.value.hint == "the tokens are: @0 it  @1 is  @2 it"


def test_the_rows_of_a_query_are_framed_in_labelled_maps():
    record = record_of(map_of(tokens_of(["it", "is", "it"])))
    canvas = page_of(record, "L00", "it")
    plain = page_of(record, "L00")

    def frames(canvas):
        orange = [
            lines for lines in canvas.axes.collections if to_hex(lines.get_edgecolor()[0]) == MARK_COLOR
        ]
        return [tuple(path.get_extents().min) for lines in orange for path in lines.get_paths()]

    (x, y), cell = canvas.corners[0], canvas.grid.cell_size[0]
    assert frames(plain) == []
    assert frames(canvas)[:2] == [(x, y), (x, y + 2 * cell)]
    assert len(frames(canvas)) == 2 * len(canvas.corners)


def test_each_kind_of_attention_has_figures_of_its_own():
    each = ["overview", "L00", "L01"]
    record = encoder_decoder()
    kinds = ("encoder", "decoder", "cross")
    assert stems(record) == [f"{kind}-{stem}" for kind in kinds for stem in each]
    assert [stem for stem in stems(record, "x") if "query" in stem] == [
        "decoder-query-000",
        "cross-query-000",
    ]
    assert "toy · cross-attention · layer 1" in words(page_of(record, "cross-L01"))


# What is on them


@pytest.mark.parametrize("stem", ["overview", "L00", "L01"])
def test_maps_hold_the_weights_of_their_heads(stem):
    record = simple(7)
    canvas = page_of(record, stem)
    layers = [0, 1] if stem == "overview" else [int(stem[1:])]
    pairs = list(itertools.product(layers, range(3)))
    for picture, (layer, head) in zip(canvas.maps, pairs, strict=True):
        np.testing.assert_array_equal(picture.get_array(), record.weights[layer, head])
    # Rows are queries from above, columns keys from the left: the places of maps follow the reading order.
    places = [(picture.get_extent()[3], picture.get_extent()[0]) for picture in canvas.maps]
    assert places == sorted(places)
    assert all(picture.origin == "upper" for picture in canvas.maps)


def test_a_cell_is_drawn_where_its_query_and_key_stand():
    record = simple(4, layers=1, heads=1)
    record.maps[0].weights[:] = 0
    record.maps[0].weights[0, 0, 1, 3] = 1
    canvas = page_of(record, "L00H00", cmap="Greys")
    (x, y), cell = canvas.corners[0], canvas.grid.cell_size[0]
    pixels = canvas.render_pixels()
    black = []
    for q, k in itertools.product(range(4), repeat=2):
        inner = pixels[int(y + (q + 0.2) * cell), int(x + (k + 0.2) * cell)]
        if not inner.any():
            black.append((q, k))
    assert black == [(1, 3)]
    rows = {text.get_text(): text.get_position()[1] for text in row_labels(canvas)}
    assert rows["t1"] == y + 1.5 * cell
    columns = {
        text.get_text(): text.get_position()[0]
        for text in canvas.axes.texts
        if text.get_rotation() == 90
    }
    assert columns["[SEP]"] == x + 3.5 * cell


def test_limits_follow_the_scale():
    record = simple(6)
    tops = [float(record.weights[0, head].max()) for head in range(3)]
    limits = {
        scale: [p.get_clim() for p in page_of(record, "L00", scale=scale).maps] for scale in SCALES
    }
    assert limits["fixed"] == [(0, 1)] * 3
    assert limits["head"] == [(0, top) for top in tops]
    assert limits["figure"] == [(0, max(tops))] * 3


@pytest.mark.parametrize("scale", SCALES)
def test_pixels_show_what_matplotlib_would_draw_of_all_labels_and_maps(scale, monkeypatch):
    """Labels are copied from the first map to the others, and maps pasted: no pixel is another for it."""
    record = simple(9, heads=5)
    fast = page_of(record, "L01", scale=scale).render_pixels()
    drawn = page_of(record, "L01", scale=scale)
    drawn.write_all_labels()
    monkeypatch.setattr(drawn, "_copies", [])
    monkeypatch.setattr(drawn, "_image_boxes", {})
    np.testing.assert_array_equal(fast, drawn.render_pixels())


def test_labels_are_thinned_where_they_could_not_be_read_and_that_is_said():
    canvas = page_of(simple(200, layers=1), "L00")
    step = canvas.tokens_per_label
    assert step > 1
    rows = [text.get_text() for text in row_labels(canvas)]
    assert rows.count("t" + str(step)) == 1
    assert rows.count("t1") == 0
    assert f"one label for {step} tokens" in " ".join(words(canvas))


def seams_of(canvas):
    (x, y), cell = canvas.corners[0], canvas.grid.cell_size[0] / canvas.pool
    found = set()
    for lines in canvas.axes.collections:
        if np.allclose(lines.get_color()[0][:3], np.array([0xD1, 0x49, 0x5B]) / 255):
            for (x0, y0), (x1, y1) in (segment[:2] for segment in lines.get_segments()):
                found.add(
                    (
                        (round((x0 - x) / cell, 3), round((y0 - y) / cell, 3)),
                        (round((x1 - x) / cell, 3), round((y1 - y) / cell, 3)),
                    )
                )
    return found


def test_a_seam_divides_the_texts_of_a_pair():
    tokens = replace(tokens_of(["a", "b", "c"]), segments=np.array([0, 0, 1], np.int32), pair="c")
    canvas = page_of(record_of(map_of(tokens, layers=1, heads=1), text="a b"), "L00H00")
    assert seams_of(canvas) == {((0, 2), (3, 2)), ((2, 0), (2, 3))}
    assert "“a b”  +  “c”" in words(canvas)
    assert not seams_of(page_of(simple(3, layers=1, heads=1), "L00H00"))


def test_an_overview_shows_the_largest_weight_of_a_block():
    record = simple(600, layers=2, heads=6)
    canvas = page_of(record, "overview")
    assert canvas.pool == 2
    expected = record.weights[0, 4].reshape(300, 2, 300, 2).max((1, 3))
    np.testing.assert_array_equal(canvas.maps[4].get_array(), expected)
    assert "a cell shows the largest weight of 2 × 2 tokens" in " ".join(words(canvas))


def test_figures_too_large_to_draw_are_pooled(monkeypatch):
    monkeypatch.setattr(layout, "MAX_PAGE_PIXELS", 3_000_000)
    record = simple(300, layers=1, heads=4)
    canvas = page_of(record, "L00")
    assert canvas.pool > 1
    assert canvas.width_px * canvas.height_px <= 3_000_000
    foot = " ".join(words(canvas))
    assert f"a cell shows the largest weight of {canvas.pool} × {canvas.pool} tokens" in foot
    place = canvas.pool * canvas.tokens_per_label
    label = next(text for text in row_labels(canvas) if text.get_text() == f"t{place}")
    assert (
        label.get_position()[1]
        == canvas.corners[0][1] + (canvas.tokens_per_label + 0.5) * canvas.grid.cell_size[0]
    )


def test_numbers_stand_in_the_cells_of_a_single_head_while_they_fit():
    record = simple(6, layers=1, heads=1)
    record.maps[0].weights[0, 0, 0] = [0.0049, 0.0051, 0, 1, 0.5, 0.25]
    canvas = page_of(record, "L00H00")
    numbers = [text.get_text() for text in canvas._number_texts or ()]
    assert numbers[:6] == ["", "0.01", "", "1.00", "0.50", "0.25"]
    assert numbers == written_weights(record.weights[0, 0])
    colours = [text.get_color() for text in canvas._number_texts or ()][:6]
    assert colours[3] == "white"
    assert colours[5] != "white"
    assert "cells without a number: less than 0.005" in " ".join(words(canvas))
    assert page_of(simple(80, layers=1, heads=1), "L00H00")._number_texts == []
    assert page_of(simple(6, layers=1, heads=2), "L00")._number_texts == []


def test_a_query_is_shown_in_all_heads_with_their_weights():
    record = simple(5)
    canvas = page_of(record, "query-002", "t2")
    np.testing.assert_array_equal(canvas.maps[0].get_array(), record.weights[:, :, 2].reshape(6, 5))
    rows = [text.get_text() for text in row_labels(canvas)]
    assert [row for row in rows if row.startswith("L")] == [
        f"L{layer}H{head}" for layer in (0, 1) for head in range(3)
    ]
    numbers = [text.get_text() for text in canvas._number_texts]
    assert numbers == written_weights(record.weights[:, :, 2])


# The same bytes


def variations():
    """Records that are easily taken for one another."""
    base = simple(4, heads=2)
    tokens = base.maps[0].queries

    def with_tokens(**changes):
        changed = replace(tokens, **changes)
        return replace(base, maps=(replace(base.maps[0], queries=changed, keys=changed),))

    return [
        base,
        simple(4, heads=2, seed=1),
        simple(4, heads=2, text="another text"),
        simple(4, heads=2, run=RUN | {"model": "other"}),
        with_tokens(special=np.zeros(4, bool)),
        with_tokens(segments=np.array([0, 0, 1, 1], np.int32)),
        with_tokens(n_given=2),
        base.only([(layer, head) for layer in range(2) for head in range(2)]),
        replace(base, changes=("words",)),
        replace(base, maps=(replace(base.maps[0], n_kv_heads=1),)),
    ]


def test_records_never_leak_into_each_other():
    records = variations()

    def pixels(some):
        plates = itertools.chain(*(make_figures(record, Style(), "@1") for record in some))
        return [page.render_pixels().tobytes() for _, page in draw_figures(plates, Style())]

    fresh = [pixels([record]) for record in records]
    for one, other in itertools.combinations(fresh, 2):
        assert one != other
    order = [*range(len(records)), 0, 4, 0]
    assert pixels([records[i] for i in order]) == [image for i in order for image in fresh[i]]


_IN_A_PROCESS = """
import hashlib, json, sys
from pathlib import Path
from tests.record_helpers import simple
paths = simple(4, layers=1, heads=1).draw(sys.argv[1], ["png", "svg", "pdf"], query="t1")
print(json.dumps({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}))
"""


def test_two_processes_draw_the_same_bytes_whatever_matplotlib_is_told(tmp_path):
    (tmp_path / "styled").mkdir()
    (tmp_path / "styled" / "matplotlibrc").write_text(
        "text.usetex: True\nfont.size: 30\nfont.family: serif\nsavefig.bbox: tight\nsavefig.facecolor: red\n"
        "figure.autolayout: True\nimage.interpolation: bicubic\npath.simplify: False\nsvg.fonttype: none\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    environment["PYTHONPATH"] = str(Path(__file__).parent.parent)
    environment["PYTHONHASHSEED"] = "random"
    outputs = [
        python(
            "-W", "error", "-c", _IN_A_PROCESS, tmp_path / name, cwd=tmp_path / folder, env=environment
        ).stdout
        for name, folder in (("plain", "."), ("styled", "styled"))
    ]
    first, second = (json.loads(output) for output in outputs)
    assert len(first) == 6
    assert first == second


# Whatever a token is


HOSTILE = {
    "mathematics": ["$x$", "$", "$$", "\\frac{1}{2}", "a_b", "x^2", "$\\undefined{$"],
    "markup": ["<b>", "&amp;", "&", "<", "]]>", "--", '"', "'", "%s", "{0}"],
    "right to left": ["שלום", "مرحبا", "عالم", "a-שלום"],
    "CJK": ["你", "好", "世界", "カタカナ", "안녕"],
    "emoji": ["😀", "👩\u200d👩\u200d👧", "🇩🇪", "☺\ufe0f"],
    "marks": ["e\u0301", "◌\u0301", "a\u0336b\u0336", "नमस्ते", "ก็"],
    "long": ["x" * 200, "字" * 200, "W" * 40, "i"],
    "odd": [
        "\u200b",
        "\ufeff",
        "\u2028",
        "\u00ad",
        "\U0001f9ff",
        "\ue000",
        "<0xE4>",
        "<U+0007>",
        "·",
        "⏎",
    ],
}


def draw_strictly(folder, names, *formats):
    labels = [label for name in names for label in HOSTILE[name]]
    model = " ".join(HOSTILE[name][0] for name in names)
    record = record_of(map_of(tokens_of(labels), layers=1, heads=1), run=RUN | {"model": model})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paths = record.draw(folder, formats, query="@0")
    assert len(paths) == 2 * len(formats)
    assert all(path.stat().st_size > 1000 for path in paths)


@pytest.mark.parametrize("names", [[*HOSTILE][:4], [*HOSTILE][4:]], ids=["some", "others"])
def test_any_token_draws_without_a_warning(tmp_path, names):
    draw_strictly(tmp_path, names, "png", "svg", "pdf")


def test_mathematics_is_shown_literally():
    canvas = page_of(record_of(map_of(tokens_of(["$x^2$", "\\alpha"]))), "L00")
    assert words(canvas).count("$x^2$") == 2  # a row and a column of the first map
    assert not any(text.get_parse_math() for text in canvas.axes.texts)


def test_characters_without_a_font_are_code_points_and_the_footer_says_so(monkeypatch):
    monkeypatch.setattr(lettering, "_list_other_fonts", lambda: [])
    record = record_of(map_of(tokens_of(["你好", "ab"])), run=RUN | {"model": "模型"})
    for canvas in (page_of(record, "L00"), page_of(record, "query-001", "ab")):
        said = words(canvas)
        assert "U+4F60U+597D" in said
        assert any(word.startswith("U+6A21U+578B · ") for word in said)
        assert "“U+4F60U+597D ab”" in said
        assert "no installed font has 4 of the characters" in " ".join(said)
        assert not any("你" in word for word in said)


def test_a_long_text_and_a_long_token_are_cut_with_an_ellipsis():
    canvas = page_of(record_of(map_of(tokens_of(["x" * 200, "y"])), text="word " * 500), "L00")
    said = words(canvas)
    assert any(word.startswith("“word word") and word.endswith("…") for word in said)
    assert any(re.fullmatch(r"x+…", word) for word in said)
    for text in canvas.axes.texts:
        if text.get_rotation() == 0:
            box = text.get_window_extent(canvas.agg.get_renderer())
            assert box.x0 >= 0 and box.x1 <= canvas.width_px, text.get_text()
