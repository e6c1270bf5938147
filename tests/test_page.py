"""Pages in headless Chromium: what each view of maps shows is what the record holds."""

from itertools import product

import numpy as np
import pytest

from attnscope.pages import PageText, page_of
from tests.heads_helpers import heads_in
from tests.page_helpers import SEEN, blues, number, pixels
from tests.page_records import (
    FINDINGS,
    FIRST,
    FULL,
    LABELS,
    PROSE,
    SECOND,
    SHORTER,
    W,
    _opened,
    page_file,
)
from tests.record_helpers import map_of, record_of, tokens_of

__all__ = ["_opened", "page_file"]


# Grid ------------------------------------------------------------------------------------------------------------


def test_the_grid_shows_every_head_in_the_figures_colours(opened):
    opened.show(v="grid", d="light")
    assert opened.page.locator(".view.grid button[data-spec]").count() == 6
    for layer, head in ((0, 0), (1, 2)):
        shown = pixels(opened, f".view.grid button[data-spec='{layer}.{head}'] canvas")
        # Half a step of the codes, and of 256 colours.
        assert np.abs(shown - blues(W[layer, head])).max() <= 4


def test_roles_filter_and_sort(opened):
    opened.show(v="grid", sort="role")
    # The letter of a role hides nothing of its map.
    opened.until(
        "(letter => letter.offsetTop >= letter.offsetParent.clientHeight)(document.querySelector('.badge'))"
    )
    having = [h for h in heads_in(FINDINGS) if h.roles]
    role = having[0].roles[0].name
    opened.click(f".roles button[data-role='{role}']")
    dimmed = opened.page.eval_on_selector_all(
        ".view.grid button.dim", "all => all.map(b => b.dataset.spec)"
    )
    assert set(dimmed) == {
        f"{h.layer}.{h.head}" for h in heads_in(FINDINGS) if role not in {r.name for r in h.roles}
    }
    order = opened.page.eval_on_selector_all(
        ".view.grid button[data-spec]", "all => all.map(b => b.dataset.spec)"
    )
    first = {f"{h.layer}.{h.head}": h.roles[0].name if h.roles else "" for h in heads_in(FINDINGS)}
    runs = [first[spec] for spec in order]
    assert all(runs.index(name) + runs.count(name) > at for at, name in enumerate(runs)), (
        "heads of a role stand together"
    )
    assert runs == sorted(runs, key=lambda name: name == "")


# Matrix ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "column"), [(0, 0), (3, 0), (5, 8), (11, 11), (7, 2)])
def test_pointing_at_a_cell_reads_it_out(opened, row, column):
    opened.show(v="matrix", h="1.1")
    opened.hover(row, column)
    assert opened.text("#readout .pair") == f"{LABELS[row]} attends to {LABELS[column]}"
    value = W[1, 1, row, column]
    assert abs(number(opened.text("#readout .value")) - value) <= SEEN
    words = opened.text("#readout .faint").split()
    assert words[::2] == ["rank", "of"]
    above = (W[1, 1, row] > value + SEEN).sum()
    near = (np.abs(W[1, 1, row] - value) <= 2 * SEEN).sum()
    assert above + 1 <= int(words[1]) <= above + near
    assert words[3] == "12"


def test_keys_move_zoom_and_pan(opened):
    opened.show(v="matrix", h="0.1", q=2, k=2)
    opened.page.focus(".heat canvas[tabindex]")
    opened.press("ArrowDown", "ArrowRight", "ArrowRight", "ArrowUp", "ArrowDown", "Shift+ArrowDown")
    assert opened.text("#readout .pair") == f"{LABELS[11]} attends to {LABELS[4]}"
    assert abs(number(opened.text("#readout .value")) - W[0, 1, 11, 4]) <= SEEN
    opened.until("document.querySelector('[role=status]').textContent.includes('rank')")


def test_zooming_and_dragging_keep_the_cell_under_the_pointer(open_page):
    n = 150
    tokens = tokens_of([f"w{i}" for i in range(n)])
    long = record_of(map_of(tokens, layers=1, heads=1, seed=8))
    opened = open_page(page_of([PageText(long)]), width=900, height=700)
    page = opened.page
    opened.show(v="matrix", h="0.0")
    before = opened.place()[2]
    opened.hover(60, 90)
    page.mouse.wheel(0, -600)
    opened.frame()
    cell = opened.place()[2]
    assert cell > 2 * before
    assert opened.text("#readout .pair") == "w60 attends to w90"
    start = (opened.place()[3], opened.place()[4])
    page.mouse.down()
    page.mouse.move(300, 300, steps=4)
    page.mouse.up()
    opened.frame()
    assert (opened.place()[3], opened.place()[4]) != start
    _, _, cell, x, y, _ = opened.place()
    row = int((y + 150) / cell)
    column = int((x + 150) / cell)
    opened.hover(row, column)
    assert opened.text("#readout .pair") == f"w{row} attends to w{column}"
    assert abs(number(opened.text("#readout .value")) - long.weights[0, 0, row, column]) <= SEEN
    opened.until("location.hash.includes('z=')")
    page.click("text=fit")
    opened.frame()
    assert opened.place()[2] == pytest.approx(before)


@pytest.mark.parametrize(("hide", "words"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_whole_map_as_records_have_it(opened, hide, words):
    opened.show(v="matrix", h="1.0", q=5, k=5)
    if hide:
        opened.page.keyboard.press("h")
    if words:
        opened.page.check(".controls input >> nth=1")
    opened.frame()
    record = FIRST.hide_special() if hide else FIRST
    record = record.merge_words() if words else record
    table = opened.table()
    assert tuple(table[0][1:]) == record.tokens
    assert tuple(row[0] for row in table[1:]) == record.tokens
    np.testing.assert_allclose(opened.matrix(), record.of(1, 0), atol=SEEN)
    assert opened.text("#readout .pair") == "cat attends to cat"


def test_large_pages_are_coarser_and_still_true(open_page, monkeypatch):
    monkeypatch.setattr("attnscope.pages.MAX_FINE_WEIGHTS", 0)
    opened = open_page(page_of([PageText(FIRST)]))
    assert "within 0.0005" in opened.text("footer")
    for hide, words in product((0, 1), repeat=2):
        record = FIRST.hide_special() if hide else FIRST
        record = record.merge_words() if words else record
        for head in range(3):
            opened.show(v="matrix", h=f"1.{head}", hide=hide, words=words)
            np.testing.assert_allclose(opened.matrix(), record.of(1, head), atol=SEEN)


def test_scales(opened):
    opened.show(v="grid", d="light", scale="head")
    shown = pixels(opened, ".view.grid button[data-spec='0.1'] canvas")
    assert np.abs(shown - blues(W[0, 1], W[0, 1].max())).max() <= 12
    opened.show(v="grid", d="light", scale="figure")
    opened.until("document.querySelector('.view.grid .heads').dataset.painted === '6'")
    shown = pixels(opened, ".view.grid button[data-spec='0.1'] canvas")
    assert np.abs(shown - blues(W[0, 1], W.max())).max() <= 12


# Links -----------------------------------------------------------------------------------------------------------


def links_at(opened, side, place):
    left, right, top, line = map(
        float, opened.page.get_attribute(".view.links", "data-place").split(",")
    )
    box = opened.page.locator(".view.links canvas").bounding_box()
    x = box["x"] + (left - 20 if side == "q" else right + 20)
    opened.page.mouse.move(x, box["y"] + top + (place + 0.5) * line)
    opened.frame()
    found = opened.page.eval_on_selector_all(
        "#readout .link",
        "all => all.map(e => [e.dataset.spec, Number(e.dataset.at), e.querySelector('b').textContent])",
    )
    return [(spec, at, number(value)) for spec, at, value in found]


def test_a_token_has_its_own_links_both_ways(opened):
    opened.show(v="links", h="1.1")
    for side, row in (("q", W[1, 1, 6]), ("k", W[1, 1, :, 6])):
        found = links_at(opened, side, 6)
        assert {spec for spec, _, _ in found} == {"1.1"}
        for _, at, value in found:
            assert abs(value - row[at]) <= SEEN
        assert found[0][2] >= row.max() - SEEN
        wanted = "attends to" if side == "q" else "is attended by"
        assert wanted in opened.text("#readout")


def test_several_heads_at_once(opened):
    opened.show(v="links", h="1.1")
    opened.page.click("aside button[data-spec='0.2']")
    opened.page.wait_for_selector(".legend button[data-spec='0.2']")
    found = links_at(opened, "q", 3)
    both = {("1.1", k): W[1, 1, 3, k] for k in range(12)} | {
        ("0.2", k): W[0, 2, 3, k] for k in range(12)
    }
    assert abs(found[0][2] - max(both.values())) <= SEEN
    for spec, at, value in found:
        assert abs(value - both[spec, at]) <= SEEN
    opened.page.mouse.move(5, 5)
    opened.page.click(".legend button[data-spec='1.1']")
    opened.until("document.querySelectorAll('.legend button').length === 1")


def test_the_least_weight_that_is_drawn(opened):
    opened.show(v="links", h="1.1", min=0.2)
    opened.page.focus("input[type=range]")
    for _ in range(5):
        opened.press("ArrowRight")
    assert "0.25" in opened.text(".more")
    drawn = opened.table()
    assert len(drawn) - 1 == (W[1, 1] >= 0.25).sum()
    for _, row, query, column, key, value in drawn[1:]:
        assert LABELS[int(row)] == query
        assert LABELS[int(column)] == key
        assert abs(float(value) - W[1, 1, int(row), int(column)]) <= SEEN


# Text ------------------------------------------------------------------------------------------------------------


def test_the_text_reads_as_it_is(opened):
    opened.show(v="text", h="0.0")
    assert opened.page.text_content(".prose") == f"[CLS] {PROSE}[SEP] "


def test_a_token_shades_the_others(opened):
    opened.show(v="text", h="1.1", d="light")
    opened.click(".tok >> nth=5")
    for at in range(12):
        colour = opened.page.eval_on_selector_all(
            ".tok", f"all => getComputedStyle(all[{at}]).backgroundColor"
        )
        if W[1, 1, 5, at] > 0.02:
            shown = [int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
            assert np.abs(np.array(shown) - blues(W[1, 1, 5, at])).max() <= 4
    opened.page.hover(".tok >> nth=0")
    assert opened.text("#readout .pair") == "cat attends to [CLS]"
    assert abs(number(opened.text("#readout .value")) - W[1, 1, 5, 0]) <= SEEN
    opened.click("text=attended by")
    opened.page.hover(".tok >> nth=9")
    assert opened.text("#readout .pair") == "mat attends to cat"
    assert abs(number(opened.text("#readout .value")) - W[1, 1, 9, 5]) <= SEEN


# Compare ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("partner", "other"),
    [("0.2", W[0, 2]), ("mean", W.mean((0, 1))), ("mean1", W[1].mean(0)), ("full1", FULL[1])],
)
def test_two_maps_and_their_difference(opened, partner, other):
    opened.show(v="compare", h="1.1", b="mean" if partner != "mean" else "0.2")
    opened.page.select_option(".view.compare .toolbar select", partner)
    opened.page.wait_for_selector(f".view.compare[data-shown='0,0,1.1,{partner}']")
    for panel in ("nth=0", "nth=1", "nth=2"):
        opened.hover(4, 7, f".view.compare .heat >> {panel}")
        seen = {name: number(opened.text(f"#readout [data-of={name}]")) for name in "abd"}
        true = {"a": W[1, 1, 4, 7], "b": other[4, 7], "d": W[1, 1, 4, 7] - other[4, 7]}
        for name in "ab":
            assert abs(seen[name] - true[name]) <= SEEN
        assert abs(seen["d"] - true["d"]) <= 2 * SEEN
    lines = opened.table()
    assert lines[0] == ["query", "key", "first", "second", "difference"]
    differences = np.array([float(line[4]) for line in lines[1:]]).reshape(12, 12)
    np.testing.assert_allclose(differences, W[1, 1] - other, atol=2 * SEEN)
    distance = np.abs(W[1, 1] - other).sum(-1).mean() / 2
    assert abs(number(opened.text(".note")) - distance) <= 12 * SEEN


def test_two_texts_place_by_place(opened):
    opened.show(v="compare", h="0.1", b="text1")
    opened.hover(9, 9, ".view.compare .heat >> nth=2")
    other = SECOND.weights[0, 1]
    assert abs(number(opened.text("#readout [data-of=b]")) - other[9, 9]) <= SEEN
    lines = opened.table()
    assert lines[1 + 9 * 12 + 9][:2] == ["mat / rug", "mat / rug"]


def test_texts_of_different_length_share_what_they_share(opened):
    opened.show(v="compare", h="0.1", b="text2")
    lines = opened.table()[1:]
    kept = [0, 1, 5, 6, 11]
    shown = np.array([[float(x) for x in line[2:]] for line in lines]).reshape(5, 5, 3)
    assert [line[1] for line in lines[:5]] == ["[CLS]", "the", "cat", "sat", "[SEP]"]
    np.testing.assert_allclose(shown[..., 0], W[0, 1][np.ix_(kept, kept)], atol=SEEN)
    np.testing.assert_allclose(shown[..., 1], SHORTER.weights[0, 1], atol=SEEN)
