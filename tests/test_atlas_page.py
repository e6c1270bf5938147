"""The page of an atlas in headless Chromium: the landing, the card of a head, its examples; by pointer and by keys."""

import base64
import csv
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnscope.cli import app
from attnscope.errors import AttnscopeError
from attnscope.records.atlas import Atlas, TokenRow
from attnscope.records.descriptions import Expected, Failure
from attnscope.views.page import PageText, page_of
from attnscope.views.page.atlas import pack_atlas, page_of_atlas
from tests.atlas_helpers import small_atlas
from tests.conftest import Run
from tests.findings_helpers import described_findings, fake_findings
from tests.page_helpers import Opened
from tests.record_helpers import simple

ATLAS = replace(small_atlas(3, 4, n_tokens=24), descriptions=described_findings(3, 4).descriptions)
NAMES = [head.name for head in ATLAS.heads]
EXAMPLES = ATLAS.examples()


class OpenedAtlas(Opened):
    """A page of an atlas."""

    def settle(self, view: str) -> None:
        """Waits until a view stands."""
        super().settle("atlas" if view == "grid" else view)

    def go(self, head: str = "", **state: object) -> None:
        """Goes to a head, or to the landing."""
        self.show(**({"v": "head", "head": head} if head else {"v": "atlas"}), **state)
        if head:
            self.page.wait_for_selector(f".view.head[data-shown='{head}']")

    def listed(self) -> list[str]:
        """The names of the heads in the list, those in sight."""
        return self.page.eval_on_selector_all(".rows .row b", "all => all.map(b => b.textContent)")

    def shown(self) -> int:
        """How many heads pass filter and brush."""
        return int(self.page.get_attribute(".view.atlas", "data-shown") or -1)


def open_atlas(browser: Any, folder: Path, atlas: Atlas, **viewport: int) -> OpenedAtlas:
    context = browser.new_context(
        viewport={"width": 1280, "height": 800, **viewport}, accept_downloads=True,
        permissions=["clipboard-read", "clipboard-write"],
    )  # fmt: skip
    return OpenedAtlas(context.new_page(), page_of_atlas(atlas).save(folder / "atlas.html"))


@pytest.fixture(scope="module")
def _opened(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenedAtlas]:
    found = open_atlas(browser, tmp_path_factory.mktemp("atlas"), ATLAS)
    yield found
    found.page.context.close()


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
    """The heads with a pair that stands out."""
    return [
        name for name, rows in zip(NAMES, ATLAS.tables, strict=True) if (query, key) in {row.tokens for row in rows}
    ]


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
        (f"!({PAIR[0]}->{PAIR[1]})", [name for name in NAMES if name not in having(*PAIR)]),
    ],
)
def test_the_filter(opened: OpenedAtlas, typed: str, wanted: list[str]) -> None:
    opened.go()
    opened.page.fill("input.filter", typed)
    opened.until(f"document.querySelector('.view.atlas').dataset.shown === '{len(wanted)}'")
    assert opened.listed() == wanted
    assert opened.text(".wrong") == ""
    opened.page.fill("input.filter", "")


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
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowUp", "ArrowUp", "ArrowUp", "ArrowUp"):
        opened.page.keyboard.press(key)
    opened.frame()
    assert opened.text(".tip").startswith("L2H3")
    opened.page.keyboard.press("Shift+ArrowRight")
    opened.until("document.querySelector('.view.atlas').dataset.shown === '1'")
    assert opened.listed() == ["L2H3"]
    opened.page.keyboard.press("Escape")
    opened.until("document.querySelector('.view.atlas').dataset.shown === '12'")
    opened.page.focus("input.filter")
    opened.page.keyboard.press("ArrowDown")
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowUp", "Enter"):
        opened.page.keyboard.press(key)
    opened.page.wait_for_selector(".view.head[data-shown]")
    opened.page.keyboard.press("Escape")
    opened.page.wait_for_selector(".view.atlas")


def test_the_list_sorts_by_what_its_headers_say(opened: OpenedAtlas) -> None:
    opened.go(ax="induction", ay="local")
    values = {head.name: head.measures["induction"].value for head in ATLAS.heads}
    opened.page.click("[data-sort=induction]")
    opened.frame()
    assert opened.listed() == sorted(NAMES, key=lambda name: -values[name])
    opened.page.click("[data-sort=induction]")
    opened.frame()
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


# Examples --------------------------------------------------------------------------------------------------------


def mine(head: str, why: str) -> list[Any]:
    return [one for one in EXAMPLES if NAMES[one.facts.head] == head and one.facts.why == why]


@pytest.mark.parametrize("tab", ["top", "decile"])
def test_examples_show_their_texts(opened: OpenedAtlas, tab: str) -> None:
    opened.go("L1H1", tab=tab)
    articles = opened.page.locator(".examples article")
    wanted = mine("L1H1", tab)
    assert articles.count() == len(wanted)
    for article, example in zip(articles.all(), wanted, strict=True):
        assert tuple(article.locator(".tok").all_inner_texts()) == tuple(own for _, own in example.facts.pieces())
        assert article.locator(".prose").evaluate("e => e.textContent") == f"[CLS] {example.facts.excerpt} [SEP] "


def quoting(excerpt: str, tokens: Sequence[str]) -> Atlas:
    """The atlas with a text in place of each of its own, in [CLS] and [SEP]; tokens not there stand for nothing."""
    offsets, end = [(0, 0)], 0
    for token in tokens:
        start = excerpt.find(token, end)
        end = start + len(token) if start >= 0 else end
        offsets.append((start, end) if start >= 0 else (end, end))
    labels = ("[CLS]", *(token.lower() for token in tokens), *["[SEP]"] * 24)[:24]
    offsets += [(len(excerpt), len(excerpt))] * (24 - len(offsets))
    facts = tuple(replace(one, labels=labels, excerpt=excerpt, offsets=tuple(offsets)) for one in ATLAS.facts)
    special = np.tile(np.isin(labels, ["[CLS]", "[SEP]"]), len(facts))
    return replace(ATLAS, facts=facts, special=special)


def test_examples_are_quoted_as_they_were_written(browser: Any, tmp_path: Path) -> None:
    """Whatever the tokenizer makes of capitals, quotation marks, white space and characters of several tokens."""
    text = "\u201cI  don\u2019t\u201d,\nsaid ALice (at tea-time) \U0001f602!"
    opened = open_atlas(
        browser,
        tmp_path,
        quoting(text, ["“", "I", "don", "’", "t", "”", ",", "\n", "said", "AL", "ice", "😂", "<0x9f>", "!"]),
    )
    opened.go("L0H0")
    prose = opened.page.locator(".examples article >> nth=0 >> .prose")
    # What has no character of its own, and what cannot be seen, shows its label beside.
    said = prose.evaluate("e => e.textContent")
    assert said.startswith("[CLS] " + text.replace("\n", "\n\n").replace("\U0001f602", "\U0001f602<0x9f>"))
    assert prose.locator(".tok").all_inner_texts()[10:13] == ["AL", "ice", "\U0001f602"]
    command = opened.page.locator(".headcard code").evaluate("e => e.textContent")
    assert command == f"attnscope heatmap '{text}' -m minilm --pick L0H0 --query don"
    opened.page.context.close()


@pytest.mark.parametrize(
    "text",
    [
        "\u05e9\u05dc\u05d5\u05dd \u05db\u05dc \u05d4\u05e2\u05d5\u05dc\u05dd",
        "\u0643\u0644 \u0627\u0644\u0639\u0627\u0644\u0645 \u0647\u0646\u0627",
    ],
)
def test_what_is_written_from_right_to_left_reads_so(browser: Any, tmp_path: Path, text: str) -> None:
    words = text.split()
    row = TokenRow("pairs", (words[0], words[1]), 0.5, 9.0, 8.0, 10.0, 30, 9)
    opened = open_atlas(browser, tmp_path, replace(quoting(text, words), tables=((row,),) * len(ATLAS.heads)))
    opened.go("L0H0")

    def left(selector: str) -> list[float]:
        found: list[float] = opened.page.eval_on_selector_all(
            selector, "all => all.slice(0, 4).map(e => e.getBoundingClientRect().left)"
        )
        return found

    tokens = left(".examples article:first-child .tok")
    assert tokens == sorted(tokens, reverse=True), "[CLS] at the right end, and the words after it"
    query, key = left(".tokens tbody tr:first-child q")
    assert query < key, "in a table of ours a query stands before its key"
    opened.page.context.close()


@pytest.mark.parametrize(
    ("labels", "reads"),
    [
        ("[CLS] i don ' t know al ##ice . [SEP]", "[CLS] i don ' t know alice . [SEP]"),
        ("<s> ·The ·cat 's ·hat , </s>", "<s> The cat's hat, </s>"),
    ],
)
def test_examples_of_earlier_records_are_shown_by_their_labels(
    browser: Any, tmp_path: Path, labels: str, reads: str
) -> None:
    pieces = (*labels.split(), *["x"] * 24)[:24]
    facts = tuple(replace(one, labels=pieces, excerpt="", offsets=()) for one in ATLAS.facts)
    special = np.tile([piece in ("[CLS]", "[SEP]", "<s>", "</s>") for piece in pieces], len(facts))
    opened = open_atlas(browser, tmp_path, replace(ATLAS, facts=facts, special=special))
    opened.go("L0H0")
    said = opened.text(".examples article >> nth=0 >> .prose")
    assert said.replace(" x", "").replace("x", "") == reads
    opened.page.context.close()


def test_deciles_say_their_ends(opened: OpenedAtlas) -> None:
    opened.go("L1H1", tab="decile")
    number = NAMES.index("L1H1")
    for decile, article in enumerate(opened.page.locator(".examples article").all()):
        assert article.locator(".exhead b").first.inner_text() == f"{10 * decile}\u2013{10 * decile + 10}%"
        ends = [float(end) for end in article.locator(".ends").inner_text().split(" to ")]
        assert ends == pytest.approx(ATLAS.deciles[number, decile : decile + 2].tolist(), rel=0.06, abs=6e-3)


@pytest.mark.parametrize(("n", "said"), [(1, "the only text"), (3, "all 3 texts, lowest score first")])
def test_few_texts_are_no_deciles(browser: Any, tmp_path: Path, n: int, said: str) -> None:
    kept = [at for at, one in enumerate(EXAMPLES) if one.facts.why == "top" or one.facts.rank >= 10 - n]
    examples = [EXAMPLES[at] for at in kept]
    joined = {
        name: np.concatenate([getattr(one, name) for one in examples])
        for name in ("places", "special", "keys", "codes")
    }
    ends = np.cumsum(np.concatenate([np.diff(one.starts) for one in examples]))
    opened = open_atlas(
        browser, tmp_path, replace(ATLAS, facts=tuple(one.facts for one in examples), starts=ends, **joined)
    )
    opened.go("L0H2", tab="decile")
    assert opened.text("[role=tab][data-tab=decile]") == f"All texts {n}"
    assert opened.text(".showcase .about").startswith(f"{said}: there are too few for deciles")
    firsts = [
        article.locator(".exhead b").first.inner_text() for article in opened.page.locator(".examples article").all()
    ]
    assert firsts == [str(place + 1) for place in range(n)]
    opened.page.context.close()


def test_a_failure_says_what_was_expected(browser: Any, tmp_path: Path) -> None:
    """The keys that the description expects, beside those that the token attends to, for that token alone."""
    number = NAMES.index("L1H2")
    assert ATLAS.descriptions is not None
    predicted = (Expected(5, "five", 0.61), Expected(900, "far", 0.2), Expected(2, "two", 0.05))
    failed = Failure(7, "the old", "cat", 3, 1.25, predicted)
    heads = tuple(replace(one, failures=(failed,)) for one in ATLAS.descriptions.heads)
    facts = tuple(
        replace(one, why="failure", rank=0, score=float("nan"))
        if one.head == number and (one.why, one.rank) == ("top", 1)
        else one
        for one in ATLAS.facts
    )
    atlas = replace(ATLAS, facts=facts, descriptions=replace(ATLAS.descriptions, heads=heads))
    example = next(one for one in atlas.examples() if one.facts.why == "failure")
    opened = open_atlas(browser, tmp_path, atlas)
    opened.go("L1H2", tab="failure")
    assert "1.25 nats off" in opened.text(".exhead")
    shown = [own for _, own in example.facts.pieces()]
    best = int(example.weights()[3].argmax())
    line = opened.text(".reading")
    assert f"{shown[3]} attends to {shown[best]} {example.weights()[3, best]:.2f}" in line
    assert f"its description expects {shown[5]} 0.61, far 0.20, {shown[2]} 0.05" in line
    assert opened.page.eval_on_selector_all(".tok.expected", "all => all.map(e => e.dataset.token)") == ["2", "5"]
    opened.page.locator(".tok >> nth=7").hover()
    opened.frame()
    assert "expects" not in opened.text(".reading")
    assert opened.page.locator(".tok.expected").count() == 0
    opened.page.context.close()


@pytest.mark.parametrize("side", ["q", "k"])
def test_pointing_at_a_token_shades_and_says_its_weights(opened: OpenedAtlas, side: str) -> None:
    opened.go("L2H0", side=side)
    example = mine("L2H0", "top")[1]
    weights = example.weights()
    article = opened.page.locator(".examples article >> nth=1")
    article.locator(".tok >> nth=7").hover()
    opened.frame()
    row = weights[7] if side == "q" else weights[:, 7]
    said = article.locator(".tok").evaluate_all("all => all.map(e => Number(e.dataset.weight || 0))")
    np.testing.assert_allclose(said, np.where(row >= 0.05, row, 0), atol=0.005 + 1e-6)
    assert article.locator(".tok >> nth=7").get_attribute("class") == "tok focus"
    line = " ".join(article.locator(".reading").inner_text().split())
    best = int(weights[7].argmax())
    shown = [own for _, own in example.facts.pieces()]
    assert f"{shown[7]} attends to {shown[best]} {weights[7, best]:.2f}" in line
    opened.page.mouse.move(0, 0)
    opened.frame()
    assert "focus" in article.locator(".tok >> nth=3").get_attribute("class"), "its own again"


def test_examples_by_keys_and_their_address(opened: OpenedAtlas) -> None:
    opened.go("L0H2")
    opened.page.focus(".examples article >> nth=0 >> .tok.focus")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft", "Enter"):
        opened.page.keyboard.press(key)
    opened.until("location.hash.includes('q=14')")
    address = opened.page.evaluate("location.hash")
    assert "head=L0H2" in address
    assert "ex=0" in address
    opened.page.reload()
    opened.page.wait_for_selector(".view.head[data-shown=L0H2]")
    assert opened.page.locator(".tok[aria-pressed=true]").get_attribute("data-token") == "14"
    opened.page.focus("[role=tab][data-tab=top]")
    opened.page.keyboard.press("ArrowRight")
    opened.until("location.hash.includes('tab=decile')")
    assert opened.page.evaluate("document.activeElement.dataset.tab") == "decile"


@pytest.mark.parametrize("view", ["matrix", "links"])
def test_an_example_opens_as_a_map(opened: OpenedAtlas, view: str) -> None:
    opened.go("L1H3")
    opened.page.click(f".examples article >> nth=2 >> [data-open={view}]")
    opened.settle(view)
    opened.until("location.hash.includes('ex=2')")
    example = mine("L1H3", "top")[2]
    if view == "matrix":
        np.testing.assert_allclose(opened.matrix(), example.weights(), atol=5.1e-5)
    opened.page.reload()
    opened.settle(view)
    opened.page.keyboard.press("h")
    opened.frame()
    if view == "matrix":
        shown, kept = opened.matrix(), example.weights()[1:-1, 1:-1]
        left = kept.sum(1, keepdims=True)
        np.testing.assert_allclose(shown, np.where(left >= 0.01, kept / left, 0), atol=5.1e-5)
    opened.page.keyboard.press("Escape")
    opened.page.wait_for_selector(".view.head[data-shown=L1H3]")


# The page --------------------------------------------------------------------------------------------------------


def test_a_page_of_texts_and_an_atlas_has_the_views_of_both(browser: Any, tmp_path: Path) -> None:
    page = browser.new_page()
    both = page_of([PageText(simple(5))], findings=ATLAS.findings, atlas=pack_atlas(ATLAS))
    opened = OpenedAtlas(page, both.save(tmp_path / "both.html"))
    page.wait_for_selector("[role=tab][data-view]")
    tabs = page.eval_on_selector_all("[role=tab][data-view]", "all => all.map(e => e.dataset.view)")
    assert tabs == ["atlas", "head", "grid", "matrix", "links", "text", "compare", "headcount"]
    page.keyboard.press("4")
    opened.settle("matrix")
    assert opened.matrix().shape == (5, 5)
    page.keyboard.press("2")
    page.wait_for_selector(".view.head[data-shown]")
    assert opened.complaints == []
    page.close()


def test_the_command_puts_an_atlas_beside_texts(browser: Any, tmp_path: Path) -> None:
    text, heads = simple(5).save(tmp_path / "weights.npz"), ATLAS.save(tmp_path / "atlas.npz")
    file = tmp_path / "page.html"
    asked = ["page", "--record", str(text), "--heads-record", str(heads), "-o", str(file)]
    app(asked, standalone_mode=False)
    page = browser.new_page()
    opened = Opened(page, file)
    opened.settle("grid")
    assert page.locator("[role=tab][data-view]").count() == 8
    page.keyboard.press("1")
    page.wait_for_selector(".view.atlas[data-shown='12']")
    assert opened.complaints == []
    page.close()


# A folder of files -------------------------------------------------------------------------------------------------


def test_a_folder_reads_a_head_when_it_is_asked_for(browser: Any, tmp_path: Path) -> None:
    index = page_of_atlas(ATLAS, folder=True).save(tmp_path / "atlas.html")
    assert index == tmp_path / "atlas" / "index.html"
    assert sorted(path.name for path in (tmp_path / "atlas" / "heads").iterdir()) == sorted(
        f"{n}.js" for n in range(1, 13)
    )
    opened = OpenedAtlas(browser.new_page(), index)
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
    opened.page.close()


def test_a_page_as_a_folder_runs_its_own_files_alone(browser: Any, tmp_path: Path) -> None:
    index = page_of_atlas(ATLAS, folder=True).save(tmp_path / "atlas.html")
    assert "unsafe" not in index.read_text("utf-8").split("Security-Policy")[1].split(">")[0]
    opened = OpenedAtlas(browser.new_page(), index)
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
    opened.page.close()


def test_a_folder_is_replaced_whole_where_it_is_ours(tmp_path: Path) -> None:
    page = page_of_atlas(ATLAS, folder=True)
    index = page.save(tmp_path / "atlas.html")
    (index.parent / "heads" / "99.js").write_text("of an earlier one")
    page.save(tmp_path / "atlas.html")
    assert not (index.parent / "heads" / "99.js").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["atlas"]
    other = tmp_path / "mine"
    other.mkdir()
    page.save(tmp_path / "mine.html")  # it was empty
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "index.html").write_text("<p>my own")
    (tmp_path / "link").symlink_to(other)
    (tmp_path / "file").write_text("")
    for name in ("theirs", "link", "file"):
        with pytest.raises(AttnscopeError, match="no folder of attnscope"):
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


def test_hostile_texts_show_as_themselves(browser: Any, tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    facts = tuple(
        replace(one, labels=(evil, *one.labels[1:]), source=evil, excerpt=evil, offsets=((0, len(evil)),) * 24)
        for one in ATLAS.facts
    )
    tables = tuple(tuple(replace(row, tokens=(evil,) * len(row.tokens)) for row in rows) for rows in ATLAS.tables)
    atlas = replace(ATLAS, facts=facts, tables=tables, run={"model": evil}, rank=evil)
    opened = open_atlas(browser, tmp_path, atlas)
    opened.go()
    opened.go("L0H0")
    assert opened.page.locator("img").count() == 0
    assert evil in opened.text(".examples")
    opened.go("L0H0", ex=1)
    opened.page.keyboard.press("3")
    opened.settle("matrix")
    assert opened.page.locator("img").count() == 0
    assert opened.complaints == []
    opened.page.context.close()


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


def test_findings_name_the_roles(browser: Any, tmp_path: Path) -> None:
    other = fake_findings(3, 4, seed=5)
    page = browser.new_page()
    opened = OpenedAtlas(page, page_of_atlas(ATLAS, findings=other).save(tmp_path / "other.html"))
    rows = list(csv.DictReader(io.StringIO(opened.saved("csv").decode())))
    assert [row["roles"] for row in rows] == ["+".join(role.name for role in head.roles) for head in other.heads]
    page.close()


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
