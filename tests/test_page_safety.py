"""Pages and what should not happen in them: texts that are markup, connections, other people's scripts."""

import numpy as np
import pytest

from attnscope.pages import PageText, page_of
from attnscope.pages.document import OPTIONAL_MODULES, build_script, build_style_sheet
from tests.page_helpers import VIEWS
from tests.record_helpers import map_of, record_of, simple, tokens_of

EVIL = "</script><img src=x onerror=alert(1)>"
HOSTILE = [
    EVIL,
    "<!--<script>",
    "]]>\u2028\u2029\\u003c/script>",
    "{{7*7}}${alert(1)}`'\"",
    "\u202eright to left\u202c",
    "&lt;b&gt;",
    "=HYPERLINK(1)",
    "__proto__",
    "\x00\x1b[31m\x7f",
    "  spaces  ",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 👩‍👩‍👧 café",
]


def hostile():
    tokens = tokens_of(HOSTILE, text=" ".join(HOSTILE))
    run = {
        "model": EVIL,
        "sha256": EVIL,
        "dtype": "<b>",
        "architecture": EVIL,
        "notes": [EVIL],
        "versions": {},
    }
    return record_of(map_of(tokens, layers=1, heads=2), run=run)


@pytest.fixture(scope="module")
def evil_page(tmp_path_factory):
    return page_of([PageText(hostile()), PageText(simple(5))]).save(
        tmp_path_factory.mktemp("evil") / "evil.html"
    )


def test_hostile_texts_show_as_themselves(open_page, evil_page):
    opened = open_page(evil_page)
    page = opened.page
    for view in VIEWS:
        opened.show(v=view, h="0.1", q=0, k=0)
        assert page.locator("img").count() == 0
        assert page.locator("script").count() == 4, "manifest, two chunks of weights, and the page's own"
    opened.show(v="text", h="0.1")
    assert page.locator(".tok >> nth=0").inner_text() == EVIL
    assert page.locator(".prose b, .prose img").count() == 0
    opened.show(v="matrix", h="0.1", q=0, k=5)
    assert opened.text("#readout .pair") == f"{EVIL} attends to &lt;b&gt;"
    assert EVIL in opened.text("footer")
    assert EVIL in page.text_content(".texts option")
    table = opened.table()
    assert table[0][1] == EVIL
    assert table[0][7] == "'=HYPERLINK(1)", "no spreadsheet is to run a text"
    svg = opened.saved("svg").decode()
    assert "&lt;/script&gt;&lt;img" in svg
    assert "<img" not in svg
    assert [url for url in opened.requests if not url.startswith(("file:", "blob:"))] == []


@pytest.mark.parametrize("text", [*HOSTILE, "\ud800 alone"])
def test_a_text_cannot_end_the_data(text):
    tokens = tokens_of(["a", "b"], text=text)
    html = page_of([PageText(record_of(map_of(tokens), run={"model": text, "notes": []}))]).html
    assert html.lower().count("<script") == html.lower().count("</script") == 3
    assert "<!--" not in html
    assert html.encode()  # no lone surrogates


def test_the_policy_lets_nothing_else_run_or_connect(browser, evil_page):
    page = browser.new_page()
    page.goto(evil_page.as_uri())
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    found = page.evaluate(
        """async () => {
            window.ran = [];
            const script = document.createElement('script');
            script.textContent = "window.ran.push('script')";
            document.body.append(script);
            const holder = document.createElement('div');
            holder.innerHTML = "<img src=x onerror=\\"window.ran.push('handler')\\"><p style='color: red'>p</p>";
            document.body.append(holder);
            setTimeout("window.ran.push('string')");
            for (const name of ['iframe', 'audio', 'embed']) {
                const outside = document.createElement(name);
                outside.src = 'https://example.org/' + name;
                document.body.append(outside);
            }
            try {
                const address = URL.createObjectURL(new Blob(['postMessage(1)']));
                new Worker(address).onmessage = () => window.ran.push('worker');
            } catch {}
            for (const send of [() => fetch('https://example.org/'), () => new WebSocket('wss://example.org/').close(),
                                () => navigator.sendBeacon('https://example.org/')]) {
                try { await send(); window.ran.push('sent'); } catch {}
            }
            await new Promise(done => setTimeout(done, 50));
            const red = getComputedStyle(holder.lastChild).color === 'rgb(255, 0, 0)';
            return [window.ran.filter(what => what !== 'sent'), red];
        }"""
    )
    assert found == [[], False]
    assert [url for url in asked if "example.org" in url] == []
    page.close()


def test_a_notebook_shows_it_in_a_frame_of_its_own(browser, tmp_path):
    record = simple(6)
    file = tmp_path / "notebook.html"
    file.write_text(f"<!doctype html><meta charset=utf-8><body>{record.page()._repr_html_()}", "utf-8")
    page = browser.new_page(viewport={"width": 1000, "height": 800})
    complaints = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(file.as_uri())
    frame = page.frame_locator("iframe")
    frame.locator(".view.grid button[data-spec='1.1']").click()
    frame.locator(".view.matrix[data-shown='0,0,1.1']").wait_for()
    frame.locator("#tab-links").click()
    frame.locator(".view.links[data-shown]").wait_for()
    assert complaints == []
    page.close()


def test_the_page_is_one_file_without_addresses():
    html = page_of([PageText(simple(4))]).html
    lowered = html.replace("http://www.w3.org/2000/svg", "").lower()
    for mark in ("http://", "https://", "//cdn", "@import", "url(http", "src=", "<link"):
        assert mark not in lowered, mark


def test_a_damaged_file_says_so(browser, tmp_path):
    html = simple(6).page().html
    at = html.index('id="d0">') + 20
    file = tmp_path / "damaged.html"
    file.write_text(html[:at] + ("B" if html[at] == "A" else "A") + html[at + 1 :], "utf-8")
    page = browser.new_page()
    page.goto(f"{file.as_uri()}#v=matrix")
    assert "could not show its data" in page.locator("[role=alert]").inner_text()
    page.close()


def test_data_never_become_markup():
    whole = build_script(*OPTIONAL_MODULES)
    for mark in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
    ):
        assert mark not in whole, mark
    assert "style=" not in whole.replace('style="image-rendering:pixelated"', ""), (
        "the policy forbids style attributes"
    )
    assert "url(" not in build_style_sheet(*OPTIONAL_MODULES)


def test_a_page_of_a_text_has_nothing_of_an_atlas():
    html = page_of([PageText(simple(4))]).html
    assert "class Scatter" not in html
    assert ".scatter" not in html


def test_the_file_is_ascii_whatever_the_text():
    assert hostile().page().html.isascii()


def test_the_same_record_makes_the_same_page():
    assert simple(5).page().html == simple(5).page().html
    assert simple(5).page().html != simple(5, seed=1).page().html


def test_maps_without_tokens_enough_to_be_seen(open_page):
    one = record_of(map_of(tokens_of(["x"]), layers=1, heads=1))
    zeros = record_of(map_of(tokens_of(["a", "b", "c"]), layers=1, heads=1))
    zeros.maps[0].weights[:] = 0
    opened = open_page(page_of([PageText(one), PageText(zeros)]))
    for text in (0, 1):
        for view in ("grid", "matrix", "links", "text", "compare"):
            for scale in ("fixed", "head", "figure"):
                opened.show(v=view, t=text, h="0.0", q=0, k=0, scale=scale)
        opened.show(v="matrix", t=text, h="0.0")
        np.testing.assert_allclose(opened.matrix(), (one, zeros)[text].of(0, 0))
