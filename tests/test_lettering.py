"""Labels: fonts that hold their characters, cuts that fit, and a note on what cannot be drawn."""

import unicodedata
import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib import font_manager

from attnscope.drawing import lettering
from attnscope.drawing.layout import Paper
from attnscope.drawing.lettering import BASE_FAMILY, ELLIPSIS, choose_lettering
from attnscope.errors import AttnscopeError
from tests.record_helpers import map_of, record_of, tokens_of


@pytest.fixture
def only_dejavu(monkeypatch):
    """As on a machine without further fonts."""
    monkeypatch.setattr(lettering, "_list_other_fonts", lambda: [])


def test_plain_text_needs_one_font():
    found = choose_lettering(["the", "##ing", "·été", "Ωμ", "שלום", "$_{x}\\<&^"])
    assert found.families == (BASE_FAMILY,)
    assert not found.missing_characters
    assert found.notes == []
    assert found.replace_undrawable("$_{x}\\<&^") == "$_{x}\\<&^"


def test_characters_of_no_font_become_code_points_and_a_note(only_dejavu):
    found = choose_lettering(["你好", "a🦜"])
    assert found.missing_characters == {"你", "好", "🦜"}
    assert found.replace_undrawable("a🦜你") == "aU+1F99CU+4F60"
    assert found.notes == [
        "no installed font has 3 of the characters (U+4F60, U+597D, U+1F99C): written as their code points"
    ]


DEJAVU = choose_lettering([])


@given(
    st.text(st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=60),
    st.floats(9, 30),
    st.floats(20, 400),
)
@example("i" * 200, 12.0, 100.0)
@example("", 12.0, 50.0)
def test_cut_text_fits_its_room(text, size, room):
    shown = DEJAVU.fit(text, size, room)
    if DEJAVU.width_px(text, size) <= room:
        assert shown == text
    else:
        assert shown.endswith(ELLIPSIS)
        assert DEJAVU.width_px(shown, size) <= room or shown == ELLIPSIS
        assert text.startswith(shown.removesuffix(ELLIPSIS))
        # And it is the longest that does.
        longer = text[: len(shown)].rstrip() + ELLIPSIS
        assert len(longer) <= len(shown) or DEJAVU.width_px(longer, size) > room


@pytest.mark.parametrize("cluster", ["e\u0301", "e\u0323\u0301", "שׁ"])
def test_a_cut_never_takes_an_accent_from_its_letter(cluster):
    text = cluster * 30
    for room in range(30, 120, 3):
        kept = DEJAVU.fit(text, 12, room).removesuffix(ELLIPSIS)
        cut = text[len(kept)]
        assert not unicodedata.category(cut).startswith("M")


# A font of one's own, and fonts that are missing -------------------------------------------------------------------


def write_font(path, characters, family="Little Cat"):
    """Writes a font that has a square for each of these characters."""
    from fontTools.fontBuilder import FontBuilder
    from fontTools.pens.ttGlyphPen import TTGlyphPen

    pen = TTGlyphPen(None)
    for move, point in (
        ("moveTo", (50, 0)),
        ("lineTo", (50, 700)),
        ("lineTo", (750, 700)),
        ("lineTo", (750, 0)),
    ):
        getattr(pen, move)(point)
    pen.closePath()
    names = [".notdef", *(f"u{ord(c):04X}" for c in characters)]
    made = FontBuilder(1000, isTTF=True)
    made.setupGlyphOrder(names)
    made.setupCharacterMap({ord(c): f"u{ord(c):04X}" for c in characters})
    square = pen.glyph()
    made.setupGlyf(dict.fromkeys(names, square))
    made.setupHorizontalMetrics(dict.fromkeys(names, (800, 50)))
    made.setupHorizontalHeader(ascent=800, descent=-200)
    made.setupNameTable(
        {"familyName": family, "styleName": "Regular", "psName": family.replace(" ", "")}
    )
    made.setupOS2(sTypoAscender=800, sTypoDescender=-200, usWinAscent=800, usWinDescent=200)
    made.setupPost()
    made.save(path)
    return path


@pytest.fixture
def cat(tmp_path):
    """A font file with two Chinese characters, which matplotlib forgets afterwards."""
    before = list(font_manager.fontManager.ttflist)
    yield write_font(tmp_path / "cat.ttf", "你好")
    font_manager.fontManager.ttflist[:] = before
    lettering.find_font.cache_clear()


def test_a_font_file_is_taken_first_and_its_characters_are_drawn(cat, only_dejavu, tmp_path):
    found = choose_lettering(["你好 a猫"], Paper(font=str(cat)))
    assert found.families == ("Little Cat", BASE_FAMILY)
    assert found.missing_characters == {"猫"}
    assert found.replace_undrawable("你a猫") == "你aU+732B"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record = record_of(map_of(tokens_of(["你", "好"]), layers=1, heads=1), text="你好")
        svg, pdf = record.draw(tmp_path / "out", ["svg", "pdf"], font=str(cat), width="column")
    drawn = svg.read_text("utf-8")
    assert ">你</text>" in drawn
    assert ">U+" not in drawn
    assert "font-family: 'Little Cat'; font-weight: 400" in drawn
    assert b"LittleCat" in pdf.read_bytes()


def test_a_file_that_is_no_font_is_refused(tmp_path):
    (tmp_path / "a.ttf").write_text("no font")
    for path in (tmp_path / "a.ttf", tmp_path / "nowhere.otf"):
        with pytest.raises(AttnscopeError, match="is no font that can be read"):
            lettering.find_font(str(path))


def test_the_note_is_said_once_and_only_where_figures_are_drawn(only_dejavu, run, tmp_path):
    record = record_of(map_of(tokens_of(["你", "a"]), layers=1, heads=1), text="你 a").save(
        tmp_path / "heatmap.npz"
    )
    status, _, err = run("show", record, "-o", tmp_path / "out", "-f", "png,svg")
    assert status == 0
    assert err.count("note: no installed font has 1 of the characters (U+4F60)") == 1
    for quiet in (
        ["-q", "-o", tmp_path / "out"],
        ["-f", "text"],
        ["-f", "npz", "-o", tmp_path / "data"],
    ):
        assert "no installed font" not in run("show", record, *quiet)[2]


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("-inf"), float("nan"), 1e38])
def test_values_that_no_model_computes_leak_no_warnings(value, tmp_path):
    base = map_of(tokens_of(["a", "b"]), layers=1, heads=1)
    record = record_of(replace(base, weights=np.full_like(base.weights, value)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for scale in ("fixed", "head", "figure"):
            record.draw(tmp_path, ["png", "svg"], scale=scale)
