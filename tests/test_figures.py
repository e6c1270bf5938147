"""Figures: which there are, what values and words are on them, and that the same record gives the same bytes."""

import io
import itertools
import json
import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from PIL import Image

from attnscope.drawing import layout, lettering
from attnscope.drawing.canvas import MARK
from attnscope.drawing.files import png
from attnscope.drawing.maps import MapsPage
from attnscope.drawing.style import SCALES, Scale, Style
from attnscope.errors import AttnscopeError
from attnscope.questions.heatmap import Heatmap
from attnscope.views.maps.figures import BarsPage, Painter, sheets_of
from attnscope.views.maps.pages import glance
from attnscope.views.maps.sheets import Sheet
from tests.processes import python
from tests.record_helpers import RUN, map_of, record_of, simple, tokens_of


def stems(record: Heatmap, query: str | None = None) -> list[str]:
    return [sheet.stem for sheet in sheets_of(record, query)]


def shown(record: Heatmap, stem: str, query: str | None = None, **style: str) -> MapsPage:
    sheet = next(sheet for sheet in sheets_of(record, query) if sheet.stem == stem)
    canvas = Painter(Style(**style)).page(record, sheet)
    assert isinstance(canvas, MapsPage)
    return canvas


def bars(record: Heatmap, query: str) -> BarsPage:
    sheet = sheets_of(record, query)[-1]
    assert sheet.form == "bars"
    canvas = Painter(Style()).page(record, sheet)
    assert isinstance(canvas, BarsPage)
    return canvas


def words(canvas: MapsPage | BarsPage) -> list[str]:
    return [text.get_text() for text in canvas.axes.texts if text.get_text()]


def encoder_decoder() -> Heatmap:
    source, target = tokens_of(["a", "b", "c", "</s>"], (3,)), tokens_of(["x", "y"])
    return record_of(
        map_of(source), map_of(target, kind="decoder", seed=1), map_of(target, source, kind="cross", seed=2)
    )


# Which figures


def test_an_overview_comes_first_then_a_figure_a_layer() -> None:
    assert stems(simple()) == ["overview", "L00", "L01"]
    sheets = sheets_of(simple())
    assert [sheet.form for sheet in sheets] == ["overview", "grid", "grid"]
    assert sheets[0].heads == ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2))
    assert sheets[2].heads == ((1, 0), (1, 1), (1, 2))


def test_of_one_layer_there_is_no_overview_beside_its_figure() -> None:
    assert stems(simple(layers=1)) == ["L00"] and stems(simple(layers=1), "t1") == ["L00", "query-001"]


def test_picked_heads_make_one_figure_in_the_order_of_picking() -> None:
    record = simple().only([(1, 2), (0, 1)])
    assert stems(record) == ["picked"]
    assert sheets_of(record)[0].heads == ((1, 2), (0, 1))
    assert stems(simple().only([(1, 2)])) == ["L01H02"]
    assert stems(simple(layers=1, heads=1)) == ["L00H00"]


def test_a_query_adds_bars_for_each_token_that_it_names() -> None:
    record = record_of(map_of(tokens_of(["it", "is", "it"])))
    assert stems(record, "it") == ["overview", "L00", "L01", "query-000", "query-002"]
    assert stems(record, "@1")[-1] == "query-001"
    with pytest.raises(AttnscopeError, match="no token is 'was'") as caught:
        sheets_of(record, "was")
    assert caught.value.hint == "the tokens are: @0 it  @1 is  @2 it"
    assert stems(record, "is,@0")[3:] == ["query-000", "query-001"] and stems(record, " it , is ")[3:] == [
        "query-000", "query-001", "query-002",
    ]  # fmt: skip
    for wrong, missing in (("it,was", "was"), ("it,", "it,"), (",", ",")):
        with pytest.raises(AttnscopeError, match=f"no token is '{missing}'"):
            sheets_of(record, wrong)
    with pytest.raises(AttnscopeError, match="no token is ''"):
        sheets_of(record, "")


def test_the_rows_of_a_query_are_framed_in_labelled_maps() -> None:
    record = record_of(map_of(tokens_of(["it", "is", "it"])))
    assert [sheet.marked for sheet in sheets_of(record, "it")] == [(), (0, 2), (0, 2), (), ()]
    canvas, plain = shown(record, "L00", "it"), shown(record, "L00")

    def frames(canvas: MapsPage) -> list[tuple[float, float]]:
        orange = [lines for lines in canvas.axes.collections if to_hex(lines.get_edgecolor()[0]) == MARK]
        return [tuple(path.get_extents().min) for lines in orange for path in lines.get_paths()]

    (x, y), cell = canvas.corners[0], canvas.places.cell[0]
    assert frames(plain) == []
    assert frames(canvas)[:2] == [(x, y), (x, y + 2 * cell)] and len(frames(canvas)) == 2 * len(canvas.corners)


def test_the_title_of_a_narrow_figure_is_not_cut_where_it_fits() -> None:
    record = record_of(map_of(tokens_of(["she", "is"])))
    sheet = sheets_of(record.only([(0, 1)]), "she")[-1]
    canvas = Painter(Style(width="column")).page(record, sheet)
    assert any(text.endswith("what “she” (token 0) attends to") for text in words(canvas))


def test_each_kind_of_attention_has_figures_of_its_own() -> None:
    each = ["overview", "L00", "L01"]
    record = encoder_decoder()
    kinds = ("encoder", "decoder", "cross")
    assert stems(record) == [f"{kind}-{stem}" for kind in kinds for stem in each]
    assert [stem for stem in stems(record, "x") if "query" in stem] == ["decoder-query-000", "cross-query-000"]
    assert "toy · cross-attention · layer 1" in words(shown(record, "cross-L01"))


def test_heads_that_one_kind_lacks_make_no_figure_of_it() -> None:
    few, many = map_of(tokens_of(["a", "b"]), layers=1), map_of(tokens_of(["x"]), kind="decoder", layers=3)
    assert stems(record_of(few, many).only([(2, 1)])) == ["decoder-L02H01"]


def test_heads_that_are_not_there_are_left_out() -> None:
    record = simple()
    record.maps[0].weights[1, 2] = np.nan
    assert sheets_of(record)[2].heads == ((1, 0), (1, 1))
    canvas = shown(record, "overview")
    assert len(canvas.maps) == 5
    assert not any(np.isnan(np.asarray(picture.get_array())).any() for picture in canvas.maps)


# What is on them


@pytest.mark.parametrize("stem", ["overview", "L00", "L01"])
def test_maps_hold_the_weights_of_their_heads(stem: str) -> None:
    record = simple(7)
    canvas = shown(record, stem)
    layers = [0, 1] if stem == "overview" else [int(stem[1:])]
    pairs = list(itertools.product(layers, range(3)))
    for picture, (layer, head) in zip(canvas.maps, pairs, strict=True):
        np.testing.assert_array_equal(picture.get_array(), record.weights[layer, head])
    # Rows are queries from above, columns keys from the left: the places of maps follow the reading order.
    places = [(picture.get_extent()[3], picture.get_extent()[0]) for picture in canvas.maps]
    assert places == sorted(places)
    assert all(picture.origin == "upper" for picture in canvas.maps)


def test_a_cell_is_drawn_where_its_query_and_key_stand() -> None:
    record = simple(4, layers=1, heads=1)
    record.maps[0].weights[:] = 0
    record.maps[0].weights[0, 0, 1, 3] = 1
    canvas = shown(record, "L00H00", cmap="Greys")
    (x, y), cell = canvas.corners[0], canvas.places.cell[0]
    pixels = canvas.pixels()
    inner = [
        [pixels[int(y + (q + 0.2) * cell), int(x + (k + 0.2) * cell)].tolist() for k in range(4)] for q in range(4)
    ]
    black = [(q, k) for q in range(4) for k in range(4) if inner[q][k] == [0, 0, 0]]
    assert black == [(1, 3)]
    rows = {text.get_text(): text.get_position()[1] for text in canvas.axes.texts if text.get_ha() == "right"}
    assert rows["t1"] == y + 1.5 * cell
    columns = {text.get_text(): text.get_position()[0] for text in canvas.axes.texts if text.get_rotation() == 90}
    assert columns["[SEP]"] == x + 3.5 * cell


def test_limits_follow_the_scale() -> None:
    record = simple(6)
    tops = [float(record.weights[0, head].max()) for head in range(3)]
    limits = {scale: [p.get_clim() for p in shown(record, "L00", scale=scale).maps] for scale in SCALES}
    assert limits["fixed"] == [(0, 1)] * 3
    assert limits["head"] == [(0, top) for top in tops]
    assert limits["figure"] == [(0, max(tops))] * 3


def test_the_colour_bar_says_what_it_measures() -> None:
    record = simple(6)
    said = {scale: words(shown(record, "L00", scale=scale)) for scale in SCALES}
    assert "attention weight: the share of a query's attention that a key gets" in said["fixed"]
    assert [word for word in said["fixed"] if re.fullmatch(r"[01](\.\d+)?", word)] == [
        "0",
        "0.2",
        "0.4",
        "0.6",
        "0.8",
        "1",
    ]
    assert "attention weight ÷ the largest weight of the same head" in said["head"]
    assert [w for w in said["head"] if w.startswith("max")] == [
        f"max {record.weights[0, h].max():.2f}" for h in range(3)
    ]
    assert any(word.endswith("(scale: largest of this figure)") for word in said["figure"])


def test_ticks_of_a_figure_scale_stand_at_their_values() -> None:
    record = simple(6)
    record.maps[0].weights[:] *= 0.5 / record.weights.max()
    canvas = shown(record, "overview", scale="figure")
    x, _, width, _ = canvas.bar
    ticks = {text.get_text(): text.get_position()[0] for text in canvas._ticks if text.get_text()}
    assert ticks == {f"{v:g}": pytest.approx(x + width * v / 0.5) for v in (0, 0.1, 0.2, 0.3, 0.4, 0.5)}


def test_titles_name_model_layer_and_text() -> None:
    record = simple(5)
    assert words(shown(record, "L01")).count("toy · layer 1") == 1
    assert "toy · 2 layers, 3 heads" in words(shown(record, "overview"))
    assert "toy · layer 1, head 2" in words(shown(record.only([(1, 2)]), "L01H02"))
    assert "toy · 2 heads" in words(shown(record.only([(1, 2), (0, 0)]), "picked"))
    assert "toy · what “t1” (token 1) attends to" in words(bars(record, "t1"))
    for canvas in (shown(record, "L00"), bars(record, "t1")):
        assert "“[CLS] t1 t2 t3 [SEP]”" in words(canvas)
    assert {"H0", "H1", "H2"} <= set(words(shown(record, "L00")))
    assert {"L0", "L1", "H0", "H1", "H2"} <= set(words(shown(record, "overview")))
    assert {"L1H2", "L0H0"} <= set(words(shown(record.only([(1, 2), (0, 0)]), "picked")))


def test_every_token_is_named_on_every_map() -> None:
    record = simple(9)
    sheet = next(sheet for sheet in sheets_of(record) if sheet.stem == "L00")
    canvas = Painter(Style()).page(record, sheet)
    canvas.label_all()
    said = words(canvas)
    for label in ("[CLS]", "t1", "t7", "[SEP]"):
        assert said.count(label) == 2 * 3


@pytest.mark.parametrize("scale", SCALES)
def test_pixels_show_what_matplotlib_would_draw_of_all_labels_and_maps(
    scale: Scale, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Labels are copied from the first map to the others, and maps pasted: no pixel is another for it."""
    record = simple(9, heads=5)
    sheet = next(sheet for sheet in sheets_of(record) if sheet.stem == "L01")
    fast = Painter(Style(scale)).page(record, sheet).pixels()
    drawn = Painter(Style(scale)).page(record, sheet)
    drawn.label_all()
    monkeypatch.setattr(drawn, "_copies", [])
    monkeypatch.setattr(drawn, "_boxes", {})
    np.testing.assert_array_equal(fast, drawn.pixels())


def test_a_png_holds_the_pixels() -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    with Image.open(io.BytesIO(png(pixels))) as image:
        np.testing.assert_array_equal(np.asarray(image), pixels)
        assert image.info["dpi"] == pytest.approx((100, 100), abs=0.01)


def test_labels_are_thinned_where_they_could_not_be_read_and_that_is_said() -> None:
    canvas = shown(simple(200, layers=1), "L00")
    step = canvas.tokens_per_label
    assert step > 1
    rows = [t.get_text() for t in canvas.axes.texts if t.get_ha() == "right" and t.get_text() != ""]
    assert rows.count("t" + str(step)) == 1 and rows.count("t1") == 0  # those of the first map; others are copies
    assert f"one label for {step} tokens" in " ".join(words(canvas))


def test_notes_say_what_was_done() -> None:
    record = replace(simple(5), changes=("hide_special", "words"))
    foot = " ".join(words(shown(record, "L00")))
    assert "rows: queries (attend) · columns: keys (are attended to)" in foot
    assert "special tokens are hidden; each row is divided by what is left of it" in foot
    assert "word pieces are merged: weights summed over keys, averaged over queries" in foot


def test_shared_key_value_heads_are_named() -> None:
    canvas = shown(record_of(map_of(tokens_of(["a", "b"]), heads=4, n_kv_heads=2)), "L00")
    assert [w for w in words(canvas) if w.startswith("H")] == ["H0 · kv 0", "H1 · kv 0", "H2 · kv 1", "H3 · kv 1"]
    assert "4 query heads share 2 key/value heads" in " ".join(words(canvas))


def seams_of(canvas: MapsPage) -> set[tuple[tuple[float, ...], ...]]:
    (x, y), cell = canvas.corners[0], canvas.places.cell[0] / canvas.pool
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


def test_a_seam_divides_the_texts_of_a_pair() -> None:
    tokens = replace(tokens_of(["a", "b", "c"]), segments=np.array([0, 0, 1], np.int32), pair="c")
    canvas = shown(record_of(map_of(tokens, layers=1, heads=1), text="a b"), "L00H00")
    assert seams_of(canvas) == {((0, 2), (3, 2)), ((2, 0), (2, 3))}
    assert "“a b”  +  “c”" in words(canvas)
    assert not seams_of(shown(simple(3, layers=1, heads=1), "L00H00"))


def test_a_seam_divides_what_was_given_from_what_was_written() -> None:
    tokens = replace(tokens_of(["a", "b", "c", "d"]), n_given=3)
    canvas = shown(record_of(map_of(tokens, layers=1, heads=1, kind="decoder"), text="a b c"), "L00H00")
    assert seams_of(canvas) == {((0, 3), (4, 3)), ((3, 0), (3, 4))}
    said = " ".join(words(canvas))
    assert "green tokens were written by the model itself" in said and "red lines: from here on the model wrote" in said
    colours = {text.get_text(): text.get_color() for text in canvas.axes.texts}
    assert colours["d"] != colours["c"]
    assert "“a b c”  …  “d”" in words(canvas)


def test_special_tokens_have_a_colour_of_their_own() -> None:
    colours = {text.get_text(): text.get_color() for text in shown(simple(4), "L00").axes.texts}
    assert colours["[CLS]"] == colours["[SEP]"] != colours["t1"]


def test_an_overview_shows_the_largest_weight_of_a_block() -> None:
    record = simple(600, layers=2, heads=6)
    canvas = shown(record, "overview")
    assert canvas.pool == 2
    expected = record.weights[0, 4].reshape(300, 2, 300, 2).max((1, 3))
    np.testing.assert_array_equal(canvas.maps[4].get_array(), expected)
    assert "a cell shows the largest weight of 2 × 2 tokens" in " ".join(words(canvas))


def test_blocks_at_the_edge_may_be_smaller() -> None:
    record = simple(601, layers=2, heads=6)
    last = np.asarray(shown(record, "overview").maps[0].get_array())
    assert last.shape == (301, 301)
    assert last[300, 300] == record.weights[0, 0, 600, 600]
    assert last[0, 300] == record.weights[0, 0, :2, 600].max()


def test_figures_too_large_to_draw_are_pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MOST_PX", 3_000_000)
    record = simple(300, layers=1, heads=4)
    canvas = shown(record, "L00")
    assert canvas.pool > 1
    assert canvas.width_px * canvas.height_px <= 3_000_000
    foot = " ".join(words(canvas))
    assert f"a cell shows the largest weight of {canvas.pool} × {canvas.pool} tokens" in foot
    place = canvas.pool * canvas.tokens_per_label
    label = next(t for t in canvas.axes.texts if t.get_text() == f"t{place}" and t.get_ha() == "right")
    assert label.get_position()[1] == canvas.corners[0][1] + (canvas.tokens_per_label + 0.5) * canvas.places.cell[0]


def test_numbers_stand_in_the_cells_of_a_single_head_while_they_fit() -> None:
    record = simple(6, layers=1, heads=1)
    record.maps[0].weights[0, 0, 0] = [0.0049, 0.0051, 0, 1, 0.5, 0.25]
    canvas = shown(record, "L00H00")
    numbers = [text.get_text() for text in canvas._numbers or ()]
    assert numbers[:6] == ["", "0.01", "", "1.00", "0.50", "0.25"]
    assert numbers == [f"{w:.2f}" if w >= 0.005 else "" for w in record.weights[0, 0].ravel()]
    colours = [text.get_color() for text in canvas._numbers or ()][:6]
    assert colours[3] == "white" and colours[5] != "white"  # legible on dark and on light
    assert "cells without a number: less than 0.005" in " ".join(words(canvas))
    assert shown(simple(80, layers=1, heads=1), "L00H00")._numbers == []
    assert shown(simple(6, layers=1, heads=2), "L00")._numbers == []


def bar_widths(canvas: BarsPage) -> np.ndarray:
    polygons = [artist for artist in canvas.axes.collections if isinstance(artist, PolyCollection)]
    corners = [path.vertices for bars in polygons for path in bars.get_paths()]
    return np.array([c[:, 0].max() - c[:, 0].min() for c in corners]) / canvas.places.panel[0]


def keys_named(canvas: BarsPage) -> list[str]:
    """The keys at the left of the first row of panels, from above."""
    x, y = canvas.places.corners[0]
    low = y + canvas.places.panel[1]
    names = [t for t in canvas.axes.texts if t.get_ha() == "right" and t.get_position()[0] == x - 6]
    return [t.get_text() for t in names if y < t.get_position()[1] < low]


def test_bars_are_as_long_as_the_weights_of_the_query() -> None:
    record = simple(5)
    canvas = bars(record, "t2")
    expected = [record.weights[layer, head, 2] for layer in range(2) for head in range(3)]
    np.testing.assert_allclose(bar_widths(canvas), np.concatenate(expected), atol=1e-6)
    assert keys_named(canvas) == ["[CLS]", "t1", "t2", "t3", "[SEP]"]
    assert "a full panel is 1" in " ".join(words(canvas))


def test_bars_show_the_strongest_keys_in_the_order_of_the_text() -> None:
    record = simple(60)
    canvas = bars(record, "t7")
    rows = record.weights[:, :, 7].reshape(6, 60)
    strongest = sorted(sorted(range(60), key=lambda key: -rows[:, key].max())[:24])
    assert keys_named(canvas) == [record.tokens[i] for i in strongest]
    np.testing.assert_allclose(bar_widths(canvas), rows[:, strongest].ravel(), atol=1e-6)
    assert "the 24 of 60 keys with the largest weight in any of these heads" in " ".join(words(canvas))


def test_numbers_at_bars_are_the_weights() -> None:
    record = simple(5, layers=1, heads=1)
    record.maps[0].weights[0, 0, 2] = [0.25, 0.004, 0.6, 0.136, 0.01]
    assert [word for word in words(bars(record, "t2")) if re.fullmatch(r"0\.\d\d", word)] == [
        "0.25",
        "0.60",
        "0.14",
        "0.01",
    ]


# Sizes


def size_of(content: bytes) -> tuple[int, int]:
    return Image.open(io.BytesIO(content)).size


def test_a_layer_of_sixteen_tokens_is_large_to_look_at_and_small_to_keep(tmp_path: Path) -> None:
    for path in simple(16, layers=2, heads=12).draw(tmp_path)[1:]:
        width, height = size_of(path.read_bytes())
        assert width >= 1600 and height >= 1200
        assert path.stat().st_size <= 250_000


@pytest.mark.parametrize(("n", "layers", "heads"), [(1, 1, 1), (1, 2, 3), (2, 1, 16), (40, 1, 1)])
def test_any_number_of_tokens_and_heads_draws(tmp_path: Path, n: int, layers: int, heads: int) -> None:
    for path in simple(n, layers=layers, heads=heads).draw(tmp_path, query="@0"):
        assert min(size_of(path.read_bytes())) > 200


# The same bytes


def drawn(
    folder: Path, record: Heatmap, formats: Sequence[str] = ("png",), painter: Painter | None = None
) -> dict[str, bytes]:
    painter = painter or Painter(Style())
    paths = painter.draw(record, sheets_of(record, "@1"), folder, formats)
    return {path.name: path.read_bytes() for path in paths}


def variations() -> list[Heatmap]:
    """Records that are easily taken for one another."""
    base = simple(4, heads=2)
    tokens = base.maps[0].queries

    def with_tokens(**changes: object) -> Heatmap:
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


def test_records_never_leak_into_each_other() -> None:
    records = variations()

    def pixels(record: Heatmap, painter: Painter) -> list[bytes]:
        sheets = [sheets_of(record)[0], sheets_of(record, "@1")[-1]]
        return [painter.page(record, sheet).pixels().tobytes() for sheet in sheets]

    fresh = [pixels(record, Painter(Style())) for record in records]
    for one, other in itertools.combinations(fresh, 2):
        assert one != other
    painter = Painter(Style())
    for turn, i in enumerate([*range(len(records)), 0, 4, 0]):
        assert pixels(records[i], painter) == fresh[i], (turn, i)


def test_layers_share_one_canvas_and_preparing_changes_nothing(tmp_path: Path) -> None:
    record, painter = simple(5, layers=3), Painter(Style())
    sheets = sheets_of(record, "@1")
    ahead = replace(record, maps=(replace(record.maps[0], weights=np.zeros((3, 3, 0, 0), np.float32)),))
    painter.prepare(ahead, sheets_of(simple(5, layers=3), "@1"), ["png"])
    assert len({id(painter.page(record, sheet)) for sheet in sheets if sheet.form == "grid"}) == 1
    assert drawn(tmp_path / "a", record, painter=painter) == drawn(tmp_path / "b", record)


def test_png_and_vector_formats_do_not_disturb_each_other(tmp_path: Path) -> None:
    record = simple(3, layers=1, heads=1)
    together = drawn(tmp_path / "all", record, ("svg", "png", "pdf"))
    for kind in ("png", "svg", "pdf"):
        alone = drawn(tmp_path / kind, record, (kind,))
        assert alone == {name: content for name, content in together.items() if name.endswith(kind)}


_IN_A_PROCESS = """
import hashlib, json, sys
from pathlib import Path
from tests.record_helpers import simple
paths = simple(4, layers=1, heads=1).draw(sys.argv[1], ["png", "svg", "pdf"], query="t1")
print(json.dumps({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}))
"""


def test_two_processes_draw_the_same_bytes_whatever_matplotlib_is_told(tmp_path: Path) -> None:
    (tmp_path / "styled").mkdir()
    (tmp_path / "styled" / "matplotlibrc").write_text(
        "text.usetex: True\nfont.size: 30\nfont.family: serif\nsavefig.bbox: tight\nsavefig.facecolor: red\n"
        "figure.autolayout: True\nimage.interpolation: bicubic\npath.simplify: False\nsvg.fonttype: none\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    environment["PYTHONPATH"] = str(Path(__file__).parent.parent)
    environment["PYTHONHASHSEED"] = "random"
    outputs = [
        python("-W", "error", "-c", _IN_A_PROCESS, tmp_path / name, cwd=tmp_path / folder, env=environment).stdout
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
    "odd": ["\u200b", "\ufeff", "\u2028", "\u00ad", "\U0001f9ff", "\ue000", "<0xE4>", "<U+0007>", "·", "⏎"],
}


def draw_strictly(folder: Path, names: Sequence[str], *formats: str) -> None:
    labels = [label for name in names for label in HOSTILE[name]]
    model = " ".join(HOSTILE[name][0] for name in names)
    record = record_of(map_of(tokens_of(labels), layers=1, heads=1), run=RUN | {"model": model})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paths = record.draw(folder, formats, query="@0")
    assert len(paths) == 2 * len(formats)
    assert all(path.stat().st_size > 1000 for path in paths)


@pytest.mark.parametrize("names", [[*HOSTILE][:4], [*HOSTILE][4:]], ids=["some", "others"])
def test_any_token_draws_without_a_warning(tmp_path: Path, names: Sequence[str]) -> None:
    draw_strictly(tmp_path, names, "png", "svg", "pdf")


def test_any_token_draws_without_further_fonts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lettering, "_other_fonts", lambda: [])
    draw_strictly(tmp_path, ["CJK", "emoji", "odd"], "pdf")


def test_mathematics_is_shown_literally() -> None:
    canvas = shown(record_of(map_of(tokens_of(["$x^2$", "\\alpha"]))), "L00")
    assert words(canvas).count("$x^2$") == 2  # a row and a column of the first map
    assert not any(text.get_parse_math() for text in canvas.axes.texts)


def test_characters_without_a_font_are_code_points_and_the_footer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lettering, "_other_fonts", lambda: [])
    record = record_of(map_of(tokens_of(["你好", "ab"])), run=RUN | {"model": "模型"})
    for canvas in (shown(record, "L00"), bars(record, "ab")):
        said = words(canvas)
        assert "U+4F60U+597D" in said
        assert any(word.startswith("U+6A21U+578B · ") for word in said)
        assert "“U+4F60U+597D ab”" in said
        assert "no installed font has 4 of the characters" in " ".join(said)
        assert not any("你" in word for word in said)


def test_a_long_text_and_a_long_token_are_cut_with_an_ellipsis() -> None:
    canvas = shown(record_of(map_of(tokens_of(["x" * 200, "y"])), text="word " * 500), "L00")
    said = words(canvas)
    assert any(word.startswith("“word word") and word.endswith("…") for word in said)
    assert any(re.fullmatch(r"x+…", word) for word in said)
    for text in canvas.axes.texts:
        if text.get_rotation() == 0:
            box = text.get_window_extent(canvas.agg.get_renderer())
            assert box.x0 >= 0 and box.x1 <= canvas.width_px, text.get_text()


def test_a_glance_is_the_first_figure(tmp_path: Path) -> None:
    record = simple(5)
    assert glance(record) == record.draw(tmp_path)[0].read_bytes()
    assert isinstance(sheets_of(record)[0], Sheet)
