"""The page of an atlas in headless Chromium: the landing, the card of a head, its examples; by pointer and by keys."""

from dataclasses import replace
from urllib.parse import quote

import numpy as np
import pytest

from attnscope.cli import build_app
from attnscope.results.table import Table
from tests.atlas_helpers import examples_of, places_of, rows_of, with_examples
from tests.atlas_page_helpers import ATLAS, CONDITIONS, FINDINGS, NAMES, _opened, open_atlas
from tests.conftest import csv_rows
from tests.heads_helpers import heads_in
from tests.record_helpers import simple

__all__ = ["_opened", "open_atlas"]

# The landing ------------------------------------------------------------------------------------------------------


def test_all_heads_with_all_their_numbers(opened):
    opened.go()
    assert opened.text("#readout") == "12 heads"
    assert opened.listed() == NAMES
    rows = csv_rows(opened.saved("csv").decode())
    for row, head in zip(rows, heads_in(FINDINGS), strict=True):
        for name, estimate in head.measures.items():
            assert float(row[name]) == pytest.approx(estimate.value, rel=1e-5), name
        assert row["roles"] == "+".join(role.name for role in head.roles)
    assert [row["description"] for row in rows] == FINDINGS["heads"]["description"].tolist()


def fits(expression):
    """The heads for which a Python expression of measures holds."""
    names = []
    for head in heads_in(FINDINGS):
        known = {name: estimate.value for name, estimate in head.measures.items()}
        known |= {"layer": head.layer, "head": head.head}
        if eval(expression, known):
            names.append(head.name)
    return names


def role_of(name):
    return [head.name for head in heads_in(FINDINGS) if name in {role.name for role in head.roles}]


PAIR = next(row.tokens for row in rows_of(ATLAS, 0) if row.side == "pairs")


def having(query, key):
    """The heads with a pair that stands out, the one with the largest lift first, by the lower end of its interval."""
    lows = {name: low_of(name, query, key) for name in NAMES}
    return sorted((name for name, low in lows.items() if low), key=lambda name: -lows[name])


def low_of(name, query, key):
    """The lower end of the lift of a pair."""
    return max(
        (row.low for row in rows_of(ATLAS, NAMES.index(name)) if row.tokens == (query, key)), default=0.0
    )


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("layer > 0 & induction > 0.1", fits("layer > 0 and induction > 0.1")),
        ("induction>.1 and not layer=2", fits("induction > 0.1 and layer != 2")),
        ("(layer = 0 | layer = 2) head >= 2", fits("layer in (0, 2) and head >= 2")),
        ("10% < induction < 30%", fits("0.1 < induction < 0.3")),
        ("induction > previous_token", fits("induction > previous_token")),
        ("signed_distance_tokens < -1", fits("signed_distance_tokens < -1")),
        ("role:local", role_of("local")),
        ("spreads", [NAMES[1]]),
        ('"spreads EVENLY" || name:L2H3', [NAMES[1], "L2H3"]),
        ("nothing-like-this", []),
        ("   ", NAMES),
        *[(f"{q} -> {k}", having(q, k)) for q, k in (PAIR, PAIR[::-1])],
        (
            f'"{PAIR[0].upper()}"\u2192{PAIR[1]} & layer < 1',
            [name for name in having(*PAIR) if name.startswith("L0")],
        ),
        (f"!({PAIR[0]}->{PAIR[1]})", [name for name in NAMES if not low_of(name, *PAIR)]),
    ],
)
def test_the_filter(opened, typed, wanted):
    opened.go()
    opened.page.fill("input.filter", typed)
    opened.until(f"document.querySelector('.view.atlas').dataset.shown === '{len(wanted)}'")
    assert opened.listed() == wanted
    assert opened.text(".wrong") == ""
    opened.page.fill("input.filter", "")


def test_the_filter_box_has_the_grammar_of_where(opened):
    for condition, heads in CONDITIONS:
        opened.go(f=quote(condition, safe=""))
        assert sorted(opened.listed(), key=NAMES.index) == heads, condition
        assert opened.text(".wrong") == "", condition


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("inducton > 0.4", "no measure is called inducton – did you mean induction?"),
        ("induction >", "a number is missing after >"),
        ("(layer > 1", "a bracket is not closed: ) is missing"),
        ("& layer > 1", "something is missing before &"),
        ("it ->", "a token is missing after ->"),
        ("zebra:local", "before : stands one of name, kind, role, description, token, not zebra"),
    ],
)
def test_a_wrong_filter_says_what_is_wrong_and_changes_nothing(opened, typed, says):
    opened.go(f="layer > 1")
    assert opened.shown() == 4
    opened.page.fill("input.filter", typed)
    opened.until("document.querySelector('input.filter').getAttribute('aria-invalid') === 'true'")
    assert opened.text(".wrong") == says
    assert opened.shown() == 4
    opened.page.fill("input.filter", "")


def test_a_brush_filters_the_list_and_the_address_holds_it(opened):
    opened.go(ax="layer", ay="induction")
    box = opened.page.locator(".scatter").bounding_box()
    opened.page.mouse.move(box["x"] + 60, box["y"] + 20)
    opened.page.mouse.down()
    opened.page.mouse.move(box["x"] + box["width"] / 2 - 40, box["y"] + box["height"] - 30, steps=3)
    opened.page.mouse.up()
    opened.until("location.hash.includes('br=')")
    assert opened.listed() == [head.name for head in places_of(ATLAS) if head.layer == 0]
    address = opened.page.evaluate("location.hash")
    opened.go()
    assert opened.shown() == 12
    opened.page.evaluate("to => { location.hash = to; }", address)
    opened.until("document.querySelector('.view.atlas').dataset.shown === '4'")
    opened.page.click("text=clear the brush")
    opened.until("document.querySelector('.view.atlas').dataset.shown === '12'")


def test_pointing_names_a_head_and_a_click_opens_it(opened):
    opened.go(ax="layer", ay="head")
    box = opened.page.locator(".scatter").bounding_box()
    for _ in range(2):  # L1 stands in the middle of three layers, H3 at the top
        opened.page.mouse.move(
            box["x"] + (64 + box["width"] - 16) / 2, box["y"] + 12 + (box["height"] - 52) / 8
        )
    opened.frame()
    assert opened.text(".tip").startswith("L1H3")
    assert opened.text(".rows .active b") == "L1H3"
    opened.page.mouse.down()
    opened.page.mouse.up()
    opened.page.wait_for_selector(".view.head[data-shown=L1H3]")
    opened.page.go_back()
    opened.page.wait_for_selector(".view.atlas")


def test_the_landing_by_keys_alone(opened):
    opened.go(ax="layer", ay="head")
    opened.page.focus(".scatter canvas[tabindex]")
    opened.press("ArrowRight", "ArrowRight", "ArrowRight", "ArrowUp", "ArrowUp", "ArrowUp", "ArrowUp")
    assert opened.text(".tip").startswith("L2H3")
    opened.page.keyboard.press("Shift+ArrowRight")
    opened.until("document.querySelector('.view.atlas').dataset.shown === '1'")
    assert opened.listed() == ["L2H3"]
    opened.page.keyboard.press("Escape")
    opened.until("document.querySelector('.view.atlas').dataset.shown === '12'")
    opened.page.focus("input.filter")
    opened.press("ArrowDown", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowUp", "Enter")
    opened.page.wait_for_selector(".view.head[data-shown]")
    opened.page.keyboard.press("Escape")
    opened.page.wait_for_selector(".view.atlas")


# The card --------------------------------------------------------------------------------------------------------


def test_the_card_says_what_the_record_says(opened):
    opened.go("L1H2")
    number = NAMES.index("L1H2")
    assert opened.text(".does").startswith(str(FINDINGS["heads"]["description"][number]))
    if opened.page.locator(".more-measures[aria-expanded=false]").count():
        opened.page.click(".more-measures")
    measures = heads_in(FINDINGS)[number].measures
    lines = opened.page.locator(".measures tbody tr")
    assert lines.count() == len(measures)
    for line in lines.all():
        name = (
            line.locator("th")
            .inner_text()
            .removesuffix(" (nats)")
            .removesuffix(" (tokens)")
            .replace(" ", "_")
        )
        value = line.locator("td b").inner_text().replace("−", "-")
        assert float(value) == pytest.approx(measures[name].value, rel=0.06, abs=5e-3), name
        rank = 1 + sum(other.measures[name].value > measures[name].value for other in heads_in(FINDINGS))
        assert line.locator("td").last.inner_text() == str(rank), name
    for side, title in (
        ("asks", "queries that give"),
        ("gets", "keys that receive"),
        ("pairs", "pairs"),
    ):
        table = opened.page.locator(".tokens", has_text=title)
        rows = [row for row in rows_of(ATLAS, number) if row.side == side]
        best = max(rows, key=lambda row: row.lift)
        first = table.locator("tbody tr").first
        assert first.locator("q").all_inner_texts() == list(best.tokens)
        assert f"{best.lift:.2f}×" in first.inner_text()


def test_heads_like_it_are_one_click_away(opened):
    opened.go("L0H0")
    near = np.argsort(np.where(np.arange(12) == 0, np.inf, ATLAS["distance"][0]))[:3]
    names = opened.page.eval_on_selector_all("[data-near]", "all => all.map(e => e.dataset.near)")
    assert names[:3] == [NAMES[at] for at in near]
    opened.page.click(f"[data-near='{names[0]}']")
    opened.page.wait_for_selector(f".view.head[data-shown='{names[0]}']")
    opened.page.go_back()
    opened.page.wait_for_selector(".view.head[data-shown=L0H0]")


# The page --------------------------------------------------------------------------------------------------------


def test_the_command_puts_an_atlas_beside_texts(open_page, tmp_path):
    text = simple(5).save(tmp_path / "heatmap.npz")
    heads = ATLAS.save(tmp_path / "atlas.npz")
    file = tmp_path / "page.html"
    asked = ["page", "--record", str(text), "--record", str(heads), "-o", str(file)]
    build_app()(asked, standalone_mode=False)
    opened = open_page(file)
    page = opened.page
    opened.settle("grid")
    assert page.locator("[role=tab][data-view]").count() == 7
    page.keyboard.press("1")
    page.wait_for_selector(".view.atlas[data-shown='12']")


def test_hostile_texts_show_as_themselves(open_atlas):
    evil = "</script><img src=x onerror=alert(1)>"
    examples = [
        replace(
            one,
            labels=(evil, *one.labels[1:]),
            source=evil,
            excerpt=evil,
            offsets=((0, len(evil)),) * 24,
        )
        for one in examples_of(ATLAS)
    ]
    atlas = with_examples(ATLAS, examples)
    tables = dict(atlas.tables)
    for table, columns in (("tokens", ("query", "key")), ("heads", ("description", "other_half"))):
        written = {name: np.full(len(tables[table]), evil) for name in columns}
        tables[table] = Table(tables[table].columns, {**tables[table].values, **written})
    options = {**ATLAS.options, **dict.fromkeys(("rank", "score", "lift"), evil)}
    corpus = {**ATLAS.corpus, "sources": [evil]}
    atlas = replace(
        atlas, tables=tables, options=options, corpus=corpus, run={"model": evil, "notes": [evil]}
    )
    opened = open_atlas(atlas)
    opened.go()
    opened.go("L0H0")
    assert opened.page.locator("img").count() == 0
    assert evil in opened.text(".examples")
    opened.go("L0H0", ex=1)
    opened.page.keyboard.press("3")
    opened.settle("matrix")
    assert opened.page.locator("img").count() == 0


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("view", ["atlas", "head"])
def test_nothing_is_wider_than_the_window(opened, view, width):
    opened.page.set_viewport_size({"width": width, "height": 844})
    opened.go(**({"head": "L0H0"} if view == "head" else {}))
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    wide = opened.page.evaluate(
        """() => [...document.querySelectorAll('.headcard > *, .showcase > *, .plot > *')]
            .filter(e => e.scrollWidth > e.parentElement.clientWidth + 1).length"""
    )
    assert wide == 0
    opened.page.set_viewport_size({"width": 1280, "height": 800})
