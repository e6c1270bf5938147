"""How a page is used: keys alone, a phone, the browser's Back, scales that say what they mean, sizes that fit."""

import shlex
from dataclasses import replace

import numpy as np
import pytest

import attnscope
from attnscope.pages import PageText, page_of
from tests.conftest import write_tiny
from tests.page_helpers import VIEWS, blues, pixels
from tests.record_helpers import map_of, record_of, tokens_of

START = "one two three four five six seven eight nine ten eleven twelve thirteen "
FIRST = record_of(map_of(tokens_of([*START.split(), "tired"]), layers=2, heads=3, seed=1))
SECOND = record_of(map_of(tokens_of([*START.split(), "wide"]), layers=2, heads=3, seed=2))
W = FIRST.maps[0].weights


def spread_out(n=130):
    """A head that looks everywhere alike, and one that looks at itself alone."""
    made = map_of(tokens_of([f"w{at}" for at in range(n)]), layers=1, heads=2)
    weights = np.stack([np.full((n, n), 1 / n, np.float32), np.eye(n, dtype=np.float32)])[None]
    return record_of(replace(made, weights=weights))


def large(layers=30, heads=9):
    """Many layers and heads of a short text."""
    return record_of(map_of(tokens_of(["a", "b", "c", "d"]), layers=layers, heads=heads, seed=5))


@pytest.fixture
def pages(open_page):
    """Opens records as a page of their own."""
    return lambda *records, **window: open_page(
        page_of([PageText(record) for record in records]), **window
    )


def shade(opened, at):
    """The colour behind a token of the text."""
    told = opened.page.eval_on_selector_all(
        ".tok", f"all => getComputedStyle(all[{at}]).backgroundColor"
    )
    return [int(part) for part in told.removeprefix("rgb(").removesuffix(")").split(",")]


# Why --------------------------------------------------------------------------------------------------------------


def test_a_chosen_cell_says_which_command_says_why(tmp_path, open_page):
    folder = write_tiny(tmp_path / "it's tiny")
    model = attnscope.load(str(folder), engine="hf")
    page = attnscope.page(model, "the cat's a cat")
    opened = open_page(page)
    record = attnscope.why(model, "the cat's a cat", 1, 2, 3)
    opened.show(v="matrix", h="1.2", q=3, k=record.score["key"])
    command = shlex.split(opened.text(".why code"))
    expected = ["attnscope", "why", "the cat's a cat", "-m", str(folder), "--pick", "L1H2"]
    assert command == [*expected, "--query", "@3", "--key", f"@{record.score['key']}"]
    opened.click(".why button")
    assert shlex.split(opened.page.evaluate("navigator.clipboard.readText()")) == command
    opened.show(v="matrix", h="0.1", q=3, k=record.score["key"])
    assert "--pick L0H1" in opened.text(".why code")
    for none in ({"h": "mean", "q": 3, "k": 1}, {"h": "0.1", "q": 3}):
        opened.show(v="matrix", **none)
        assert not opened.page.query_selector(".why")


# Scales and what they mean ---------------------------------------------------------------------------------------


def test_the_text_is_shaded_by_the_scale(pages):
    opened = pages(FIRST)
    for query in (-1, 5):
        weights = W[1, 1, query] if query >= 0 else W[1, 1].mean(0)
        at = int(weights.argmax())
        tops = {
            "fixed": 1.0,
            "head": W[1, 1].max() if query >= 0 else weights.max(),
            "figure": W.max(),
        }
        for scale, top in tops.items():
            opened.show(v="text", h="1.1", q=query, scale=scale, d="light")
            assert np.abs(np.array(shade(opened, at)) - blues(weights[at], top)).max() <= 4
            assert f"{top:.4f}".rstrip("0").rstrip(".") in opened.text(".view.text .scale")


def test_a_map_without_a_cell_to_see_offers_its_own_scale(pages):
    opened = pages(spread_out())
    opened.show(v="matrix", h="0.0", d="light")
    assert "none is above 0.0077" in opened.text(".view.matrix .scale")
    before = pixels(opened, ".view.matrix .heat canvas").min()
    opened.page.click(".view.matrix .scale button")
    opened.until("location.hash.includes('scale=head')")
    opened.frame()
    assert "0 0.0077" in opened.text(".view.matrix .scale")
    assert opened.page.locator(".view.matrix .scale button").count() == 0
    middle = pixels(opened, ".view.matrix .heat canvas")
    assert np.abs(middle[500, 500] - blues(np.array(1.0))).max() <= 2
    assert before < 250
    opened.show(v="matrix", h="0.1")
    assert opened.page.locator(".view.matrix .scale button").count() == 0, (
        "a head with much to see needs no offer"
    )


# Keys alone ------------------------------------------------------------------------------------------------------


def test_enter_goes_on_in_the_map_and_escape_in_the_grid(pages):
    opened = pages(FIRST)
    opened.show(v="grid", h="0.0")
    opened.page.focus(".view.grid button.chosen")
    opened.page.keyboard.press("ArrowRight")
    opened.page.keyboard.press("Enter")
    opened.settle("matrix")
    opened.press("ArrowDown", "ArrowRight")
    assert opened.text("#readout .pair") == "two attends to two"
    opened.page.keyboard.press("Escape")
    opened.settle("grid")
    opened.frame()
    opened.page.keyboard.press("ArrowRight")
    assert opened.text("#readout b") == "L0H2"


def test_a_view_that_keys_turned_to_takes_keys(pages):
    opened = pages(FIRST)
    for number, view, key, says in (
        (2, "matrix", "ArrowDown", "two attends to one"),
        (3, "links", "ArrowDown", "one attends to"),
        (4, "text", "Enter", "one attends to what is shaded"),
        (5, "compare", "ArrowDown", "two attends to one"),
    ):
        opened.show(v="grid", h="0.0")
        opened.page.focus(".view.grid button.chosen")
        opened.page.keyboard.press(str(number))
        opened.settle(view)
        opened.press(key)
        assert says in opened.text("#readout")


def test_tab_reaches_everything(pages):
    opened = pages(FIRST, SECOND)
    opened.page.evaluate("addEventListener('focusin', event => window.reached.add(event.target))")
    for view in VIEWS:
        opened.show(v=view, h="1.1")
        opened.page.evaluate("document.activeElement.blur(), window.reached = new Set()")
        for _ in range(60):
            opened.page.keyboard.press("Tab")
        # A group whose members arrow keys go through has one stop.
        missed = opened.page.evaluate("""() => {
            const group = '[role=listbox], [role=tablist], [role=radiogroup], .prose';
            return [...document.querySelectorAll('button, select, input, [tabindex]')].filter(e => !e.disabled
                && e.checkVisibility({visibilityProperty: true}) && (e.tabIndex === 0 || !e.closest(group))
                && !window.reached.has(e)).map(e => e.outerHTML.slice(0, 200));
        }""")
        assert not missed, view


# A phone ---------------------------------------------------------------------------------------------------------


def test_a_second_head_is_added_on_a_phone(pages):
    opened = pages(FIRST, width=390, height=844)
    opened.show(v="links", h="1.1")
    opened.page.select_option(".view.links select[aria-label='Add a head']", "0.2")
    opened.page.wait_for_selector(".legend button[data-spec='0.2']")
    assert opened.page.locator(".legend button").count() == 2
    opened.page.click(".legend button[data-spec='1.1']")
    opened.until("document.querySelectorAll('.legend button').length === 1")


def test_many_heads_need_no_sideways_scrolling_of_the_page(pages):
    opened = pages(large(), width=390, height=844)
    for size in (0, 24, 200):
        opened.show(v="grid", size=size)
        assert opened.page.evaluate("document.scrollingElement.scrollWidth") <= 390, size


def test_the_name_of_the_head_stays_on_screen_on_a_phone(pages):
    opened = pages(spread_out(), width=390, height=480)
    for view in ("matrix", "links", "text"):
        opened.show(v=view, h="0.1")
        opened.page.evaluate("scrollTo(0, 400)")
        opened.frame()
        box = opened.page.locator("aside select").bounding_box()
        assert 0 <= box["y"] <= 60, view


def test_links_show_the_token_that_was_queried(pages):
    opened = pages(spread_out(), height=600)
    for asked in ({"q": 110}, {"k": 110}):
        opened.show(v="links", h="0.1", **asked)
        opened.until("document.querySelector('#readout').textContent.includes('w110')")
        _, _, top, line = map(float, opened.page.get_attribute(".view.links", "data-place").split(","))
        height, scrolled = opened.page.eval_on_selector(
            ".scroller", "e => [e.clientHeight, e.scrollTop]"
        )
        assert scrolled <= top + 110 * line <= scrolled + height - line, asked


# Back ------------------------------------------------------------------------------------------------------------


def test_back_goes_one_view_back(pages):
    opened = pages(FIRST)
    page = opened.page
    page.click(".view.grid button[data-spec='1.2']")
    opened.settle("matrix")
    page.keyboard.press("]")
    opened.frame()
    page.click("#tab-text")
    opened.settle("text")
    assert opened.text(".title b") == "L0H0"
    page.go_back()
    opened.settle("matrix")
    assert opened.text(".title b") == "L0H0", "what was shown last in that view"
    page.go_back()
    opened.settle("grid")
    page.go_forward()
    opened.settle("matrix")
    assert opened.text(".title b") == "L0H0"


def test_a_head_alone_is_its_map(pages):
    opened = pages(FIRST)
    opened.page.evaluate("location.hash = 'head=L1H2'")
    opened.until("document.querySelector('.title b')?.textContent === 'L1H2'")


# Sizes -----------------------------------------------------------------------------------------------------------


def test_the_grid_has_a_cell_size(pages):
    opened = pages(large())
    opened.show(v="grid")
    assert opened.page.eval_on_selector(".view.grid .heads button", "e => e.offsetWidth") <= 64, (
        "30 rows are much"
    )
    for size in ("24", "132"):
        opened.page.select_option("select[aria-label=Cells]", size)
        opened.until(f"document.querySelector('.view.grid .heads button').offsetWidth === {size}")
    opened.until("location.hash.includes('size=132')")


def test_fit_enlarges_a_small_map(pages):
    opened = pages(large(2, 2))
    for view in ("compare", "matrix"):
        opened.show(v=view, h="0.0")
        left, top, cell, _, _, box = opened.place(".heat >> nth=0")
        assert cell * 4 > 0.9 * min(480, box["width"] - left, box["height"] - top)
    opened.page.click("[aria-label='Zoom out']")
    opened.click("text=fit")
    assert opened.place()[2] == pytest.approx(cell)


# Labels and names ------------------------------------------------------------------------------------------------


def test_what_two_texts_do_not_share_is_told_in_full(pages):
    opened = pages(FIRST, SECOND)
    opened.show(v="compare", h="0.1", b="text1")
    option = opened.page.inner_text(".view.compare option[value=text1]")
    assert option.endswith("wide")
    assert len(option) < 60
    captions = opened.page.locator("figcaption b").all_inner_texts()
    assert ["tired" in caption for caption in captions] == [True, False, False]
    assert ["wide" in caption for caption in captions] == [False, True, False]
    saved = opened.saved("svg").decode()
    assert saved.count(">tired / wide</text>") == 2, "beside the rows, and above the columns"
