"""Labels: fonts that hold their characters, cuts that fit, and a note on what cannot be drawn."""

import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attnscope.views import lettering
from attnscope.views.lettering import BASE_FAMILY, ELLIPSIS, Lettering, lettering_for


@pytest.fixture
def only_dejavu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without further fonts."""
    monkeypatch.setattr(lettering, "_other_fonts", lambda: [])


def test_plain_text_needs_one_font() -> None:
    found = lettering_for(["the", "##ing", "·été", "Ωμ", "שלום", "$_{x}\\<&^"])
    assert found.families == (BASE_FAMILY,)
    assert not found.missing
    assert found.note == ""
    assert found.spell("$_{x}\\<&^") == "$_{x}\\<&^"


def test_characters_of_no_font_become_code_points_and_a_note(only_dejavu: None) -> None:
    found = lettering_for(["你好", "a🦜"])
    assert found.missing == {"你", "好", "🦜"}
    assert found.spell("a🦜你") == "aU+1F99CU+4F60"
    assert found.note == (
        "no installed font has 3 of the characters (U+4F60, U+597D, U+1F99C): written as their code points"
    )


def test_a_note_names_some_of_many(only_dejavu: None) -> None:
    assert "6 of the characters (U+4E00, U+4E01, U+4E02, U+4E03, …)" in lettering_for(["一丁丂七丄丅"]).note


def test_what_draws_nothing_is_left_out_without_a_note(only_dejavu: None) -> None:
    found = lettering_for(["a\U000e0101b"])  # a variation selector
    assert found.spell("a\U000e0101b") == "ab"
    assert found.note == ""


def test_another_font_is_taken_for_what_the_first_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = {
        "first": frozenset(map(ord, "ab")),
        "second": frozenset(map(ord, "你")),
        "third": frozenset(map(ord, "你好")),
    }
    monkeypatch.setattr(lettering, "_charmap", lambda path: maps.get(path, maps["first"]))
    monkeypatch.setattr(lettering, "_other_fonts", lambda: [("Second", "second"), ("Third", "third")])
    found = lettering_for(["ab", "你好", "x"])
    assert found.families == (BASE_FAMILY, "Second", "Third")
    assert found.missing == {"x"}


def test_damaged_fonts_hold_nothing(tmp_path: object) -> None:
    assert lettering._charmap(__file__) == frozenset()
    assert lettering._charmap("/nowhere.ttf") == frozenset()


def test_fonts_of_boxes_and_of_symbols_are_never_taken() -> None:
    names = [name for name, _ in lettering._other_fonts()]
    assert len(names) == len(set(names))
    assert not [name for name in names if name.startswith(("Last Resort", "cm")) or "Emoji" in name]


DEJAVU = lettering_for([])


@given(
    st.text(st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=60),
    st.floats(9, 30),
    st.floats(20, 400),
)
@example("i" * 200, 12.0, 100.0)
@example("", 12.0, 50.0)
def test_cut_text_fits_its_room(text: str, size: float, room: float) -> None:
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
def test_a_cut_never_takes_an_accent_from_its_letter(cluster: str) -> None:
    text = cluster * 30
    for room in range(30, 120, 3):
        kept = DEJAVU.fit(text, 12, room).removesuffix(ELLIPSIS)
        cut = text[len(kept)]
        assert not unicodedata.category(cut).startswith("M")


@pytest.mark.parametrize("text", ["x", "WWW", "a b"])
def test_width_grows_with_size(text: str) -> None:
    assert DEJAVU.width_px(text, 20) == pytest.approx(2 * DEJAVU.width_px(text, 10))
    assert 0.2 * len(text) * 10 < DEJAVU.width_px(text, 10) < 1.2 * len(text) * 10


def test_lettering_is_a_value() -> None:
    assert Lettering(("A",), ("a",), frozenset()) == Lettering(("A",), ("a",), frozenset())
