"""Every view of a page as axe-core judges it: readable by contrast, named for those who listen, in roles that fit."""

from pathlib import Path

import pytest

from attnscope.pages import PageText, page_of, page_of_record
from tests.atlas_helpers import small_atlas
from tests.findings_helpers import described_findings, fake_findings
from tests.page_helpers import VIEWS, Opened
from tests.record_helpers import looking_record, map_of, record_of, tokens_of

AXE = Path(__file__).with_name("axe") / "axe.min.js"
SERIOUS = ("serious", "critical")
OF_TEXTS = [{"v": view, "h": "0.1", "q": 1, "k": 1} for view in VIEWS]
OF_ATLAS = [
    {"v": "atlas"},
    {"v": "atlas", "f": "inducton > 1", "ac": "induction"},
    {"v": "head", "head": "L1H1"},
    {"v": "head", "head": "L1H1", "tab": "decile", "ex": 4, "q": 2, "side": "k"},
    {"v": "matrix", "head": "L1H1", "ex": 1},
    {"v": "links", "head": "L1H1", "ex": 1},
]
OF_PHOTOS = [{"v": "photo"}, {"v": "photo", "h": "1.1", "q": 3, "p": "0,1,2", "scale": "head"}]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("access")
    tokens = tokens_of(["[CLS]", "the", "cat", "sat", "[SEP]"], (0, 4))
    findings = described_findings(2, 3)
    atlas = small_atlas(findings=findings)
    record = record_of(map_of(tokens, layers=2, heads=3))
    return {
        "photos": looking_record().page().save(folder / "photos.html"),
        "texts": page_of([PageText(record)], findings=fake_findings(2, 3)).save(folder / "texts.html"),
        "atlas": page_of_record(atlas).save(folder / "atlas.html"),
    }


def serious(opened, *rules):
    """What axe-core finds to be serious in a page, and where first; by some of its rules, if any are named."""
    if not opened.page.evaluate("'axe' in window"):
        opened.page.evaluate(AXE.read_text("utf-8"))
    how = {"resultTypes": ["violations"]} | ({"runOnly": rules} if rules else {})
    told = opened.page.evaluate("how => axe.run(document, how)", how)
    assert len(told["passes"]) > (0 if rules else 5), "it did look"
    return [
        (one["id"], one["nodes"][0]["html"]) for one in told["violations"] if one["impact"] in SERIOUS
    ]


@pytest.mark.parametrize("kind", ["texts", "atlas", "photos"])
def test_nothing_serious(browser, pages, kind):
    context = browser.new_context(viewport={"width": 1280, "height": 800}, bypass_csp=True)
    opened = Opened(context.new_page(), pages[kind])
    for state in {"texts": OF_TEXTS, "atlas": OF_ATLAS, "photos": OF_PHOTOS}[kind]:
        opened.page.emulate_media(color_scheme="light")
        opened.show(**state)
        assert serious(opened) == [], state
        opened.page.emulate_media(color_scheme="dark")
        opened.frame()
        # What else is in the page knows no colours.
        assert serious(opened, "color-contrast") == [], state
    context.close()


def test_in_a_low_window_lists_scroll_and_do_not_run_over_the_foot(browser, tmp_path):
    words = [f"w{number}" for number in range(14)]
    record = record_of(map_of(tokens_of(["[CLS]", *words, "[SEP]"], (0, 15)), layers=1, heads=2))
    path = page_of([PageText(record)]).save(tmp_path / "low.html")
    context = browser.new_context(viewport={"width": 1100, "height": 440}, bypass_csp=True)
    opened = Opened(context.new_page(), path)
    opened.show(v="matrix", h="0.1", q=1, k=1)
    opened.page.locator(".side section").nth(1).wait_for()
    opened.until("(s => s.scrollHeight > s.clientHeight)(document.querySelector('.side'))")
    side, foot = (opened.page.locator(one).bounding_box() for one in (".side", "footer"))
    assert side["y"] + side["height"] <= foot["y"]
    assert opened.page.evaluate(
        "(s => (s.scrollTop = 1e6, s.scrollTop > 0))(document.querySelector('.side'))"
    )
    assert serious(opened) == []
    context.close()
