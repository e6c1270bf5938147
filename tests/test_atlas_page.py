"""The page of an atlas in headless Chromium: the landing, the card of a head, its examples; by pointer and by keys."""

import base64
import csv
import io
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from attnscope.cli import app
from attnscope.errors import AttnscopeError
from attnscope.records.atlas.record import Atlas
from attnscope.views.page import PageText, page_of
from attnscope.views.page.atlas import pack_atlas, page_of_atlas
from tests.atlas_helpers import small_atlas
from tests.atlas_page_helpers import ATLAS, CONDITIONS, NAMES, OpenedAtlas, _opened, mine, open_atlas
from tests.conftest import Run
from tests.findings_helpers import fake_findings
from tests.record_helpers import simple

__all__ = ["_opened", "open_atlas"]

# The landing ------------------------------------------------------------------------------------------------------


def test_all_heads_with_all_their_numbers(opened: OpenedAtlas) -> None:
    opened.go()
    assert opened.text("#readout") == "12 heads"
    assert opened.listed() == NAMES
    rows = list(csv.DictReader(io.StringIO(opened.saved("csv").decode())))
    for row, head in zip(rows, ATLAS.heads, strict=True):
        for name, estimate in head.measures.items():
            assert float(row[name]) == pytest.approx(estimate.value, rel=1e-5), name
        assert row["roles"] == "+".join(role.name for role in head.roles)
    assert ATLAS.descriptions is not None
    for row, one in zip(rows, ATLAS.descriptions.heads, strict=True):
        assert row["description"] == one.words, "in the words of the record"


def test_a_head_alone_is_its_card(opened: OpenedAtlas) -> None:
    opened.go()
    opened.page.evaluate("location.hash = 'head=L2H1'")
    opened.page.wait_for_selector(".view.head[data-shown='L2H1']")


def test_where_nothing_is_found_it_says_what_to_type(opened: OpenedAtlas) -> None:
    opened.go(f="zzzz")
    opened.page.wait_for_selector(".view.atlas")
    assert opened.text("#readout").startswith('0 of 12 heads: type words, ")" -> "("')


def fits(expression: str) -> list[str]:
    """The heads for which a Python expression of measures holds."""
    return [
        head.name
        for head in ATLAS.heads
        if eval(expression, {n: e.value for n, e in head.measures.items()} | {"layer": head.layer, "head": head.head})
    ]


def role_of(name: str) -> list[str]:
    return [head.name for head in ATLAS.heads if name in {role.name for role in head.roles}]


PAIR = next(row.tokens for row in ATLAS.tables[0] if row.side == "pairs")


def having(query: str, key: str) -> list[str]:
    """The heads with a pair that stands out, the one that gives it most of a query's attention first."""
    masses = {name: mass_of(name, query, key) for name in NAMES}
    return sorted((name for name, mass in masses.items() if mass), key=lambda name: -masses[name])


def mass_of(name: str, query: str, key: str) -> float:
    return max((row.mass for row in ATLAS.tables[NAMES.index(name)] if row.tokens == (query, key)), default=0.0)


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
        (f'"{PAIR[0].upper()}"\u2192{PAIR[1]} & layer < 1', [name for name in having(*PAIR) if name.startswith("L0")]),
        (f"!({PAIR[0]}->{PAIR[1]})", [name for name in NAMES if not mass_of(name, *PAIR)]),
    ],
)
def test_the_filter(opened: OpenedAtlas, typed: str, wanted: list[str]) -> None:
    opened.go()
    opened.page.fill("input.filter", typed)
    opened.until(f"document.querySelector('.view.atlas').dataset.shown === '{len(wanted)}'")
    assert opened.listed() == wanted
    assert opened.text(".wrong") == ""
    opened.page.fill("input.filter", "")


def test_a_pair_that_is_asked_for_has_its_mass_in_the_list_and_its_row_marked(opened: OpenedAtlas) -> None:
    rare = min((row for row in ATLAS.tables[0] if row.side == "pairs"), key=lambda row: row.lift).tokens
    typed = quote(f'"{rare[0]}" -> "{rare[1]}"', safe="")
    opened.go(f=typed)
    shares = opened.page.locator(".rows .words strong").all_inner_texts()
    assert [float(share.strip("%\xa0 ")) for share in shares] == pytest.approx(
        [100 * mass_of(name, *rare) for name in having(*rare)], abs=0.5
    )
    opened.go("L0H0", f=typed)
    marked = opened.page.locator(".tokens tr.asked")
    assert marked.count() == 1
    assert marked.locator("q").all_inner_texts() == list(rare)
    assert marked.evaluate("row => row === row.parentElement.firstElementChild"), "the first of its table"
    opened.go("L0H0", f="")
    assert marked.count() == 0


def test_a_phone_shows_what_heads_do(opened: OpenedAtlas) -> None:
    opened.page.set_viewport_size({"width": 390, "height": 844})
    opened.go()
    words = opened.page.locator(".rows .row .words").first
    box, said = words.bounding_box(), words.inner_text()
    header = opened.page.locator("[data-sort=words]").bounding_box()
    opened.page.set_viewport_size({"width": 1280, "height": 800})
    assert box["width"] > 120 and header["x"] == pytest.approx(box["x"], abs=2)
    assert said.startswith("[CLS] ")


def test_the_filter_box_has_the_grammar_of_where(opened: OpenedAtlas) -> None:
    for condition, heads in CONDITIONS:
        opened.go(f=quote(condition, safe=""))
        assert (sorted(opened.listed(), key=NAMES.index), opened.text(".wrong")) == (heads, ""), condition


def test_words_are_looked_for_in_tokens(opened: OpenedAtlas) -> None:
    known = [{token for row in rows for token in row.tokens} for rows in ATLAS.tables]
    wanted = [name for name, tokens in zip(NAMES, known, strict=True) if "street" in tokens]
    assert 0 < len(wanted) < len(NAMES)
    opened.go(f="token:street")
    assert opened.listed() == wanted


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("inducton > 0.4", "no measure is called inducton – did you mean induction?"),
        ("induction >", "a number is missing after >"),
        ("(layer > 1", "a bracket is not closed: ) is missing"),
        ("layer > 1)", ") is one too many"),
        ("& layer > 1", "something is missing before &"),
        ("layer > 1 &", "something is missing after &"),
        ('"open', "a quote is not closed"),
        ("it ->", "a token is missing after ->"),
        ("-> animal", "something is missing before ->"),
        ("zebra:local", "before : stands one of name, kind, role, description, token, not zebra"),
        ("constructor > 1", "no measure is called constructor"),
    ],
)
def test_a_wrong_filter_says_what_is_wrong_and_changes_nothing(opened: OpenedAtlas, typed: str, says: str) -> None:
    opened.go(f="layer > 1")
    assert opened.shown() == 4
    opened.page.fill("input.filter", typed)
    opened.until("document.querySelector('input.filter').getAttribute('aria-invalid') === 'true'")
    assert opened.text(".wrong") == says
    assert opened.shown() == 4
    opened.page.fill("input.filter", "")


def test_the_names_that_a_filter_knows(opened: OpenedAtlas) -> None:
    opened.go()
    opened.page.click("[aria-label='What can be filtered by']")
    assert opened.page.evaluate("document.querySelector('dialog.names').scrollTop") == 0, "it opens at its beginning"
    names = opened.page.locator("dialog.names dt").all_inner_texts()
    assert {"layer", "explained", "nats", "map_x", *ATLAS.heads[0].measures} <= set(names)
    opened.page.keyboard.press("Escape")
    assert not opened.page.locator("dialog.names").is_visible()


def test_a_brush_filters_the_list_and_the_address_holds_it(opened: OpenedAtlas) -> None:
    opened.go(ax="layer", ay="induction")
    box = opened.page.locator(".scatter").bounding_box()
    opened.page.mouse.move(box["x"] + 60, box["y"] + 20)
    opened.page.mouse.down()
    opened.page.mouse.move(box["x"] + box["width"] / 2 - 40, box["y"] + box["height"] - 30, steps=3)
    opened.page.mouse.up()
    opened.until("location.hash.includes('br=')")
    assert opened.listed() == [head.name for head in ATLAS.heads if head.layer == 0]
    address = opened.page.evaluate("location.hash")
    opened.go()
    assert opened.shown() == 12
    opened.page.evaluate("to => { location.hash = to; }", address)
    opened.until("document.querySelector('.view.atlas').dataset.shown === '4'")
    opened.page.click("text=clear the brush")
    opened.until("document.querySelector('.view.atlas').dataset.shown === '12'")


def test_pointing_names_a_head_and_a_click_opens_it(opened: OpenedAtlas) -> None:
    opened.go(ax="layer", ay="head")
    box = opened.page.locator(".scatter").bounding_box()
    for _ in range(2):  # L1 stands in the middle of three layers, H3 at the top
        opened.page.mouse.move(box["x"] + (64 + box["width"] - 16) / 2, box["y"] + 12 + (box["height"] - 52) / 8)
    opened.frame()
    assert opened.text(".tip").startswith("L1H3")
    assert opened.text(".rows .active b") == "L1H3"
    opened.page.mouse.down()
    opened.page.mouse.up()
    opened.page.wait_for_selector(".view.head[data-shown=L1H3]")
    opened.page.go_back()
    opened.page.wait_for_selector(".view.atlas")


def test_the_landing_by_keys_alone(opened: OpenedAtlas) -> None:
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


def test_the_list_sorts_by_what_its_headers_say(opened: OpenedAtlas) -> None:
    opened.go(ax="induction", ay="local")
    values = {head.name: head.measures["induction"].value for head in ATLAS.heads}
    opened.click("[data-sort=induction]")
    assert opened.listed() == sorted(NAMES, key=lambda name: -values[name])
    opened.click("[data-sort=induction]")
    assert opened.listed() == sorted(NAMES, key=lambda name: values[name])


# The card --------------------------------------------------------------------------------------------------------


def test_the_card_says_what_the_record_says(opened: OpenedAtlas) -> None:
    opened.go("L1H2")
    number = NAMES.index("L1H2")
    assert ATLAS.descriptions is not None
    assert opened.text(".does").startswith(ATLAS.descriptions.heads[number].words)
    if opened.page.locator(".more-measures[aria-expanded=false]").count():
        opened.page.click(".more-measures")
    measures = ATLAS.heads[number].measures
    lines = opened.page.locator(".measures tbody tr")
    assert lines.count() == len(measures)
    for line in lines.all():
        name = line.locator("th").inner_text().removesuffix(" (nats)").removesuffix(" (tokens)").replace(" ", "_")
        value = line.locator("td b").inner_text().replace("−", "-")
        assert float(value) == pytest.approx(measures[name].value, rel=0.06, abs=5e-3), name
        rank = 1 + sum(other.measures[name].value > measures[name].value for other in ATLAS.heads)
        assert line.locator("td").last.inner_text() == str(rank), name
    for side, title in (("asks", "queries that give"), ("gets", "keys that receive"), ("pairs", "pairs")):
        table = opened.page.locator(".tokens", has_text=title)
        rows = [row for row in ATLAS.tables[number] if row.side == side]
        best = max(rows, key=lambda row: row.lift)
        first = table.locator("tbody tr").first
        assert first.locator("q").all_inner_texts() == list(best.tokens)
        assert f"{best.lift:.2f}×" in first.inner_text()


def test_the_profile_reads_out_each_offset(opened: OpenedAtlas) -> None:
    opened.go("L0H3")
    opened.page.focus(".profile canvas")
    profile = ATLAS.profiles[NAMES.index("L0H3")]
    for key, at in (("ArrowLeft", 64), ("ArrowLeft", 63), ("ArrowRight", 64), ("ArrowRight", 65), ("ArrowRight", 66)):
        opened.page.keyboard.press(key)
        said = opened.text(".headcard section >> nth=0 >> p")
        assert float(said.split(": ")[1].split("%")[0]) == pytest.approx(100 * profile[at], rel=0.06), at
    assert said.startswith("1 ahead")


def test_queries_and_keys_are_points_that_lead_to_their_examples(opened: OpenedAtlas) -> None:
    """What the plane shows of a head is in the record; the token's context is said, and its example is a click away."""
    opened.go("L1H2")
    at = NAMES.index("L1H2")
    points = ATLAS.points_of(at)
    assert points is not None
    plane = opened.page.locator(".plane")
    assert "30 tokens of" in plane.locator("h2").inner_text()
    assert "90% of direction 1 is common to all queries" in plane.inner_text()
    assert "Position in the text accounts for 70% of the keys' spread along direction 2." in plane.inner_text()
    opened.page.focus(".plane canvas >> nth=1")
    read = plane.locator(".planeread")
    walk(opened, lambda: read.inner_text().startswith("query"))
    asked, *best = read.locator("q").all_inner_texts()
    scores, labels = points.queries @ points.keys.T, [token.label for token in points.tokens]
    rows = [row for row, label in enumerate(labels) if label == asked]
    assert best in [[labels[key] for key in np.argsort(-scores[row], kind="stable")[:5]] for row in rows]
    opened.page.select_option(".plane [aria-label=Colour]", "what")
    assert "capitalised" in plane.inner_text()
    opened.page.click(".plane [data-value=outputs]")
    assert "principal components" in plane.inner_text() and "query" not in plane.locator(".roles").inner_text()
    opened.page.click(".plane [data-value=scores]")
    # The first head has examples that the sampled tokens are of.
    opened.go("L0H0")
    opened.page.focus(".plane canvas >> nth=1")
    walk(opened, lambda: "click" in opened.text(".plane .tip"))
    token = opened.page.inner_text(".plane .tip b")
    opened.page.keyboard.press("Enter")
    opened.until("document.querySelector('[data-token][aria-pressed=true]')")
    chosen = opened.page.locator("[data-token][aria-pressed=true]")
    assert chosen.inner_text().strip() == token
    assert chosen.get_attribute("data-example") == "0"


def walk(opened: OpenedAtlas, done: Callable[[], bool]) -> None:
    """Goes from point to point by arrow keys."""
    for key in ["ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp"] * 12:
        for _ in range(3):
            opened.page.keyboard.press(key)
            if done():
                return
    raise AssertionError("no such point was met")


def test_heads_like_it_are_one_click_away(opened: OpenedAtlas) -> None:
    opened.go("L0H0")
    near = np.argsort(np.where(np.arange(12) == 0, np.inf, ATLAS.distances[0]))[:3]
    names = opened.page.eval_on_selector_all("[data-near]", "all => all.map(e => e.dataset.near)")
    assert names[:3] == [NAMES[at] for at in near]
    opened.page.click(f"[data-near='{names[0]}']")
    opened.page.wait_for_selector(f".view.head[data-shown='{names[0]}']")
    opened.page.go_back()
    opened.page.wait_for_selector(".view.head[data-shown=L0H0]")


def test_the_command_that_draws_the_head(opened: OpenedAtlas) -> None:
    opened.go("L2H1")
    opened.page.click("text=copy")
    opened.until("[...document.querySelectorAll('.headcard button')].some(b => b.textContent === 'copied')")
    copied = opened.page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("attnscope heatmap '")
    best = mine("L2H1", "top")[0].facts
    assert copied.endswith(f"' -m minilm --pick L2H1 --query {best.labels[best.focus]}")


# The page --------------------------------------------------------------------------------------------------------


def test_a_page_of_texts_and_an_atlas_has_the_views_of_both(open_page: Callable[..., Any]) -> None:
    both = page_of([PageText(simple(5))], findings=ATLAS.findings, atlas=pack_atlas(ATLAS))
    opened = open_page(both, OpenedAtlas)
    page = opened.page
    page.wait_for_selector("[role=tab][data-view]")
    tabs = page.eval_on_selector_all("[role=tab][data-view]", "all => all.map(e => e.dataset.view)")
    assert tabs == ["atlas", "head", "grid", "matrix", "links", "text", "compare", "headcount"]
    page.keyboard.press("4")
    opened.settle("matrix")
    assert opened.matrix().shape == (5, 5)
    page.keyboard.press("2")
    page.wait_for_selector(".view.head[data-shown]")


def test_the_command_puts_an_atlas_beside_texts(open_page: Callable[..., Any], tmp_path: Path) -> None:
    text, heads = simple(5).save(tmp_path / "weights.npz"), ATLAS.save(tmp_path / "atlas.npz")
    file = tmp_path / "page.html"
    asked = ["page", "--record", str(text), "--heads-record", str(heads), "-o", str(file)]
    app(asked, standalone_mode=False)
    opened = open_page(file)
    page = opened.page
    opened.settle("grid")
    assert page.locator("[role=tab][data-view]").count() == 8
    page.keyboard.press("1")
    page.wait_for_selector(".view.atlas[data-shown='12']")


# A folder of files -------------------------------------------------------------------------------------------------


def test_a_folder_reads_a_head_when_it_is_asked_for(open_page: Callable[..., Any], tmp_path: Path) -> None:
    index = page_of_atlas(ATLAS, folder=True).save(tmp_path / "atlas.html")
    assert index == tmp_path / "atlas" / "index.html"
    assert sorted(path.name for path in (tmp_path / "atlas" / "heads").iterdir()) == sorted(
        f"{n}.js" for n in range(1, 13)
    )
    opened = open_page(index, OpenedAtlas)
    opened.requests.clear()
    assert opened.listed() == NAMES
    assert opened.requests == []
    for head in ("L1H2", "L0H3", "L1H2"):
        opened.go(head)
        first = mine(head, "top")[0]
        assert opened.text(".examples article >> nth=0 >> .prose") == f"[CLS] {first.facts.excerpt} [SEP]"
    assert [Path(url).name for url in opened.requests] == ["7.js", "4.js"]
    opened.go("L2H1", ex=1)
    opened.page.keyboard.press("3")
    opened.settle("matrix")
    np.testing.assert_allclose(opened.matrix(), mine("L2H1", "top")[1].weights(), atol=5.1e-5)
    assert opened.complaints == []
    # What is missing is said, and is there as soon as the file is.
    held = index.parent / "heads" / "1.js"
    held.rename(tmp_path / "aside.js")
    opened.page.evaluate("location.hash = 'v=head&head=L0H0'")
    opened.page.wait_for_selector(".alert")
    assert "heads/1.js cannot be read" in opened.text(".alert")
    (tmp_path / "aside.js").rename(held)
    opened.go("L0H1")
    opened.go("L0H0")
    opened.complaints.clear()  # of the file that was missing


def test_a_page_as_a_folder_runs_its_own_files_alone(open_page: Callable[..., Any], tmp_path: Path) -> None:
    index = page_of_atlas(ATLAS, folder=True).save(tmp_path / "atlas.html")
    assert "unsafe" not in index.read_text("utf-8").split("Security-Policy")[1].split(">")[0]
    opened = open_page(index, OpenedAtlas)
    opened.page.evaluate(
        """() => { const made = document.createElement("script"); made.textContent = "document.title = 'run'";
            document.head.append(made); }"""
    )
    opened.page.evaluate(
        """() => { const made = document.createElement("script"); document.head.append(made);
            made.src = "data:text/javascript,document.title='run'"; }"""
    )
    opened.until("document.scripts.length > 0")
    assert opened.page.title() != "run" and len(opened.complaints) == 2
    opened.complaints.clear()


def test_a_folder_is_replaced_where_it_is_ours_and_other_files_stay(tmp_path: Path) -> None:
    page = page_of_atlas(ATLAS, folder=True)
    index = page.save(tmp_path / "atlas.html")
    fewer = page_of_atlas(small_atlas(1, 1), folder=True)
    names = {path.name for path in (index.parent / "heads").iterdir()}
    for foreign in ("notes.txt", "heads/notes.txt", "more/9.js"):
        (index.parent / foreign).parent.mkdir(exist_ok=True)
        (index.parent / foreign).write_text("mine")
    fewer.save(tmp_path / "atlas.html")
    assert "2.js" in names and {path.name for path in (index.parent / "heads").iterdir()} == {"1.js", "notes.txt"}
    assert [path.name for path in tmp_path.iterdir()] == ["atlas"]
    (index.parent / "heads" / "2.js").write_text("mine")
    with pytest.raises(AttnscopeError, match=r"cannot replace .*heads/2.js: .*index.html does not list it"):
        page.save(tmp_path / "atlas.html")
    assert {path.read_text() for path in index.parent.rglob("*") if path.stem in ("notes", "9", "2")} == {"mine"}
    other = tmp_path / "mine"
    other.mkdir()
    page.save(tmp_path / "mine.html")  # it was empty
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "index.html").write_text("<p>my own")
    (tmp_path / "link").symlink_to(other)
    (tmp_path / "file").write_text("")
    for name in ("theirs", "link", "file"):
        with pytest.raises(AttnscopeError, match="it is no (page of attnscope|folder)"):
            page.save(tmp_path / f"{name}.html")
    assert (tmp_path / "theirs" / "index.html").read_text() == "<p>my own"


def test_the_command_writes_a_folder(tmp_path: Path, run: Run) -> None:
    ATLAS.save(tmp_path / "atlas.npz")
    status, out, err = run("show", "atlas.npz", "--folder", "-o", "site.html")
    assert status == 0 and out.splitlines()[-1] == "site/index.html", err
    assert run("show", "atlas.npz", "--folder")[0] == 2
    assert run("show", "atlas.npz", "--folder", "-o", "out", "-f", "npz")[0] == 2
    simple(5).save(tmp_path / "weights.npz")
    status, _, err = run("show", "weights.npz", "--folder", "-o", "out")
    assert status == 2 and "has no --folder" in err


def test_hostile_texts_show_as_themselves(open_atlas: Callable[[Atlas], OpenedAtlas]) -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    facts = tuple(
        replace(one, labels=(evil, *one.labels[1:]), source=evil, excerpt=evil, offsets=((0, len(evil)),) * 24)
        for one in ATLAS.facts
    )
    tables = tuple(tuple(replace(row, tokens=(evil,) * len(row.tokens)) for row in rows) for rows in ATLAS.tables)
    atlas = replace(ATLAS, facts=facts, tables=tables, run={"model": evil}, rank=evil)
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
def test_nothing_is_wider_than_the_window(opened: OpenedAtlas, view: str, width: int) -> None:
    opened.page.set_viewport_size({"width": width, "height": 844})
    opened.go(**({"head": "L0H0"} if view == "head" else {}))
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    wide = opened.page.evaluate(
        """() => [...document.querySelectorAll('.headcard > *, .showcase > *, .plot > *')]
            .filter(e => e.scrollWidth > e.parentElement.clientWidth + 1).length"""
    )
    assert wide == 0
    opened.page.set_viewport_size({"width": 1280, "height": 800})


def test_findings_name_the_roles(open_page: Callable[..., Any]) -> None:
    other = fake_findings(3, 4, seed=5)
    opened = open_page(page_of_atlas(ATLAS, findings=other))
    rows = list(csv.DictReader(io.StringIO(opened.saved("csv").decode())))
    assert [row["roles"] for row in rows] == ["+".join(role.name for role in head.roles) for head in other.heads]


def test_an_atlas_without_heads_is_refused() -> None:
    with pytest.raises(AttnscopeError, match="no head"):
        page_of_atlas(replace(ATLAS, heads=()))


@pytest.mark.parametrize(("n_layers", "n_heads", "most"), [(6, 12, 6)])
def test_pages_keep_to_their_size(n_layers: int, n_heads: int, most: float) -> None:
    page = page_of_atlas(small_atlas(n_layers, n_heads, n_tokens=64, n_top=10, n_points=512))
    assert len(page.html) < most * 1e6


def names_in(value: Any) -> set[str]:
    """The keys of nested JSON, but those that are data: measures, options, roles."""
    if isinstance(value, list):
        return set().union(*map(names_in, value)) if value else set()
    if not isinstance(value, dict):
        return set()
    free = {"measures", "effects", "options", "run", "corpus", "marks", "heads", "features"}
    return set(value) | set().union(*(names_in(one) for name, one in value.items() if name not in free), set())


def test_the_docs_name_every_key_of_the_page() -> None:
    both = page_of([PageText(simple(5))], findings=ATLAS.findings, atlas=pack_atlas(ATLAS)).html
    told = re.findall(r'<script type="(?:application/json|text/plain)" id="\w+">(.*?)</script>', both)
    found = names_in(json.loads(told[0]))
    for block in told[1:3]:
        raw = zlib.decompress(base64.b64decode(block))
        found |= names_in(json.loads(raw[4 : 4 + int.from_bytes(raw[:4], "little")]))
    docs = (Path(__file__).parents[1] / "docs" / "formats.md").read_text("utf-8")
    assert len(found) > 50
    assert found - set(re.findall(r"`([^`\n]+)`", docs)) == set()
