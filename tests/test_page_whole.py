"""Pages in headless Chromium: what all views have: addresses, files, keys, colours."""

import xml.etree.ElementTree as ET
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from tests.page_helpers import SEEN, VIEWS, number, pixels
from tests.page_records import BOTH, SECOND, W, _opened, page_file

__all__ = ["_opened", "page_file"]


def test_the_three_maps_of_an_encoder_decoder(opened):
    opened.show(v="matrix", t=3, h="1.2")
    for number_, kind in enumerate(("encoder", "decoder", "cross")):
        opened.page.click(f".kinds button:text-is('{kind}')")
        opened.page.wait_for_selector(f".view.matrix[data-shown='3,{number_},1.2']")
        np.testing.assert_allclose(opened.matrix(), BOTH.of(1, 2, kind), atol=SEEN)
    opened.page.click("#tab-text")
    opened.settle("text")
    opened.click(".tok[data-side=q] >> nth=2")
    opened.page.hover(".tok[data-side=k] >> nth=1")
    assert opened.text("#readout .pair") == "Haus attends to house"
    assert abs(number(opened.text("#readout .value")) - BOTH.of(1, 2, "cross")[2, 1]) <= SEEN
    opened.click(".tok[data-side=k] >> nth=0")
    opened.page.hover(".tok[data-side=q] >> nth=3")
    assert opened.text("#readout .pair") == "ist attends to the"
    shades = opened.page.eval_on_selector_all(
        ".tok[data-side=q]", "all => all.map(e => getComputedStyle(e).backgroundColor)"
    )
    for shade, weight in zip(shades, BOTH.of(1, 2, "cross")[:, 0], strict=True):
        assert (shade != "rgba(0, 0, 0, 0)") == (weight >= 2 / 256)


def test_texts_are_switched_by_a_list(opened):
    opened.show(v="matrix", h="0.2")
    assert opened.page.locator(".texts option").count() == 4
    opened.page.select_option(".texts select", "1")
    opened.page.wait_for_selector(".view.matrix[data-shown='1,0,0.2']")
    np.testing.assert_allclose(opened.matrix(), SECOND.of(0, 2), atol=SEEN)


def test_the_address_holds_the_whole_view(opened, browser, page_file):
    opened.show(v="grid")
    opened.page.click("#tab-compare")
    opened.settle("compare")
    opened.page.select_option(".view.compare .toolbar select", "1.0")
    opened.press("w", "]")
    opened.hover(3, 4, ".view.compare .heat >> nth=0", click=True)
    opened.page.mouse.move(0, 0)
    opened.until("location.hash.includes('k=')")
    again = browser.new_page(viewport={"width": 1280, "height": 860})
    again.goto(opened.page.url)
    again.wait_for_selector(".view.compare[data-shown]")
    again.wait_for_selector("#readout [data-of=d]")
    assert " ".join(again.inner_text("#readout").split()) == opened.text("#readout")
    assert "cat" in opened.text("#readout")
    again.close()


@pytest.mark.parametrize(
    "nonsense", ["v=nothing&t=99&h=9.9&q=-5&k=1e9", "%%%&z=1,2", "h=__proto__&b=text7&hs=1.1,x", "t=1.5"]
)
def test_an_address_that_means_nothing_is_mended(opened, nonsense):
    opened.page.evaluate("to => { location.hash = to; }", nonsense)
    opened.frame()
    assert opened.page.locator("main .view").count() == 1


@pytest.mark.parametrize("view", VIEWS)
def test_what_is_seen_is_saved(opened, view):
    opened.show(v=view, h="1.1", q=5, k=2, d="light")
    image = Image.open(BytesIO(opened.saved("png")))
    assert min(image.size) > 150
    assert len(image.convert("RGB").getcolors(1 << 24)) > 20
    drawing = ET.fromstring(opened.saved("svg"))
    said = "".join(drawing.itertext())
    assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
    assert "toy · float32 · sha256 abababababab" in said
    if view in ("matrix", "links", "text", "compare"):
        assert "L1H1" in said
        assert "cat" in said
    assert len(opened.table()) > 3


def test_light_and_dark(opened):
    def ground():
        opened.frame()
        return str(opened.page.evaluate("getComputedStyle(document.body).backgroundColor"))

    opened.show(v="matrix", h="0.0")
    opened.page.emulate_media(color_scheme="light")
    light = ground()
    opened.page.emulate_media(color_scheme="dark")
    dark = ground()
    assert light == "rgb(255, 255, 255)" != dark
    opened.page.keyboard.press("d")
    assert ground() == light
    opened.page.emulate_media(color_scheme="light")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_more_is_further_from_the_ground(opened, scheme):
    opened.show(v="grid", d=scheme)
    shown = pixels(opened, ".view.grid button[data-spec='1.1'] canvas").sum(-1)
    order = np.argsort(W[1, 1].ravel(), kind="stable")
    far = np.abs(shown.ravel()[order] - (765 if scheme == "light" else 0))
    values = W[1, 1].ravel()[order]
    assert all(
        b >= a for a, b, x, y in zip(far, far[1:], values, values[1:], strict=False) if y - x > 0.008
    )


def test_the_keyboard_alone_suffices(opened):
    opened.show(v="grid")
    for number_, view in enumerate(VIEWS, 1):
        opened.page.keyboard.press(str(number_))
        opened.settle(view)
        assert opened.page.get_attribute(f"#tab-{view}", "aria-selected") == "true"
    opened.page.keyboard.press("?")
    assert opened.page.locator("dialog[open]").count() == 1
    opened.page.keyboard.press("Escape")
    opened.page.keyboard.press("Escape")
    opened.settle("grid")
    seen = set()
    for _ in range(40):
        opened.page.keyboard.press("Tab")
        seen.add(
            opened.page.evaluate(
                "(document.activeElement.getAttribute('aria-label') || document.activeElement.textContent).slice(0, 12)"
            )
        )
    assert {"Text", "PNG", "Dark or ligh", "Grid", "Scale", "Order by"} <= seen
    assert any(name.startswith("layer ") for name in seen)


def test_roles_and_names_for_screen_readers(opened):
    opened.show(v="matrix", h="0.0")
    page = opened.page
    assert page.get_by_role("tab").count() == 5
    assert page.get_by_role("tab", selected=True).inner_text() == "Matrix"
    assert page.get_by_role("tabpanel").count() == 1
    assert page.get_by_role("listbox", name="Heads").get_by_role("option").count() == 6
    assert page.get_by_role("application").count() == 1
    bare = page.evaluate(
        """() => [...document.querySelectorAll('button, select, input, [tabindex="0"]')]
            .filter(e => !(e.getAttribute('aria-label') || e.textContent.trim() || e.closest('label')))
            .map(e => e.outerHTML)"""
    )
    assert bare == []


@pytest.mark.parametrize("view", VIEWS)
def test_a_narrow_window_needs_no_sideways_scrolling(opened, view):
    opened.page.set_viewport_size({"width": 390, "height": 844})
    try:
        opened.show(v=view, h="1.1", q=5)
        assert opened.page.evaluate("document.scrollingElement.scrollWidth") <= 390
        if view == "matrix":
            opened.page.locator(".heat").scroll_into_view_if_needed()
            opened.hover(4, 7)
            assert abs(number(opened.text("#readout .value")) - W[1, 1, 4, 7]) <= SEEN
    finally:
        opened.page.set_viewport_size({"width": 1280, "height": 860})
