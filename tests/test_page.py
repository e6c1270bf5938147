"""Pages in headless Chromium: what every view shows is what the record holds."""

import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from attnscope.core import example, reference
from attnscope.records import Heatmap
from attnscope.views.page import PageText, document, page_of
from tests import oracle
from tests.findings_helpers import fake_findings
from tests.page_helpers import SEEN, Opened, blues, number, pixels
from tests.record_helpers import map_of, record_of, shares, tokens_of

WORKED = json.loads(Path(__file__).with_name("worked_example.json").read_text(encoding="utf-8"))
LABELS = ("[CLS]", "the", "un", "##believ", "##able", "cat", "sat", "on", "the", "mat", ".", "[SEP]")
WORDS = np.array([-1, 0, 1, 1, 1, 2, 3, 4, 5, 6, 7, -1], np.int32)
PROSE = "the unbelievable cat\nsat on the mat."


def sentence(*changes: tuple[int, str]) -> Any:
    """Twelve tokens of a text of two lines; the word of three pieces counts as one."""
    labels, text, offsets, at = list(LABELS), "", [], 0
    for place, label in changes:
        labels[place] = label
    for place, label in enumerate(labels):
        bare = label.removeprefix("##")
        if place in (0, 11):
            offsets.append((-1, -1))
            continue
        if text and place not in (3, 4, 10):
            text += "\n" if place == 6 else " "
        at = len(text)
        text += bare
        offsets.append((at, at + len(bare)))
    return tokens_of(labels, (0, 11), words=WORDS, text=text, offsets=np.array(offsets, np.int32))


def resting(record: Heatmap) -> Heatmap:
    """The same with heads that rest on the first token, each row a little more; the last row all but wholly."""
    (attention,) = record.maps
    weights = attention.weights.copy()
    rest = np.linspace(0.1, 0.985, weights.shape[2], dtype=np.float32)
    rest[-1] = 0.995
    weights *= 1 - rest[:, None]
    weights[..., 0] += rest
    return replace(record, maps=(replace(attention, weights=weights),))


FIRST = resting(record_of(map_of(sentence(), layers=2, heads=3, seed=1)))
SECOND = record_of(map_of(sentence((9, "rug")), layers=2, heads=3, seed=2))
SHORTER = record_of(map_of(tokens_of(["[CLS]", "the", "cat", "sat", "[SEP]"], (0, 4)), layers=2, heads=3, seed=3))
BOTH = record_of(
    map_of(tokens_of(["the", "house", "</s>"], (2,)), kind="encoder", seed=4),
    map_of(tokens_of(["<pad>", "das", "Haus", "ist"], (0,)), kind="decoder", seed=5),
    map_of(
        tokens_of(["<pad>", "das", "Haus", "ist"], (0,)), tokens_of(["the", "house", "</s>"], (2,)),
        kind="cross", seed=6,
    ),
)  # fmt: skip
FULL = shares(2, 12, 12, seed=7)
FINDINGS = fake_findings(2, 3, seed=3, share_without=0.2)
W = FIRST.maps[0].weights


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [PageText(FIRST, {"encoder": FULL}), PageText(SECOND), PageText(SHORTER), PageText(BOTH)]
    return page_of(texts, findings=FINDINGS).save(tmp_path_factory.mktemp("page") / "page.html")


@pytest.fixture(scope="module")
def _opened(browser: Any, page_file: Path) -> Iterator[Opened]:
    context = browser.new_context(viewport={"width": 1280, "height": 860}, accept_downloads=True)
    yield Opened(context.new_page(), page_file)
    context.close()


# Grid ------------------------------------------------------------------------------------------------------------


def test_the_grid_shows_every_head_in_the_figures_colours(opened: Opened) -> None:
    opened.show(v="grid", d="light")
    assert opened.page.locator(".view.grid button[data-spec]").count() == 6
    for layer, head in ((0, 0), (1, 2)):
        shown = pixels(opened, f".view.grid button[data-spec='{layer}.{head}'] canvas")
        assert np.abs(shown - blues(W[layer, head])).max() <= 4  # half a step of the codes, and of 256 colours


def test_a_click_opens_a_head(opened: Opened) -> None:
    opened.show(v="grid")
    opened.page.click(".view.grid button[data-spec='1.2']")
    opened.settle("matrix")
    assert opened.text(".view.matrix .title b") == "L1H2"
    opened.until("location.hash.includes('h=1.2')")


def test_arrow_keys_go_through_the_grid_and_enter_opens(opened: Opened) -> None:
    opened.show(v="grid", h="0.0")
    opened.page.focus(".view.grid button.chosen")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft"):
        opened.page.keyboard.press(key)
    assert "L1H1" in opened.text("#readout")
    opened.page.keyboard.press("Enter")
    opened.settle("matrix")
    assert opened.text(".view.matrix .title b") == "L1H1"


def test_roles_filter_and_sort(opened: Opened) -> None:
    opened.show(v="grid", sort="role")
    having = [h for h in FINDINGS.heads if h.roles]
    role = having[0].roles[0].name
    opened.page.click(f".roles button[data-role='{role}']")
    opened.frame()
    dimmed = opened.page.eval_on_selector_all(".view.grid button.dim", "all => all.map(b => b.dataset.spec)")
    assert set(dimmed) == {f"{h.layer}.{h.head}" for h in FINDINGS.heads if role not in {r.name for r in h.roles}}
    order = opened.page.eval_on_selector_all(".view.grid button[data-spec]", "all => all.map(b => b.dataset.spec)")
    first = {f"{h.layer}.{h.head}": h.roles[0].name if h.roles else "" for h in FINDINGS.heads}
    runs = [first[spec] for spec in order]
    assert all(runs.index(name) + runs.count(name) > at for at, name in enumerate(runs)), (
        "heads of a role stand together"
    )
    assert runs == sorted(runs, key=lambda name: name == "")


def test_sorting_by_sharpness(opened: Opened) -> None:
    opened.show(v="grid")
    opened.page.select_option(".view.grid select", "focus")
    opened.frame()
    order = opened.page.eval_on_selector_all(".view.grid button[data-spec]", "all => all.map(b => b.dataset.spec)")
    focus = {f"{at // 3}.{at % 3}": W[at // 3, at % 3].max(-1).mean() for at in range(6)}
    assert order == sorted(focus, key=lambda spec: -focus[spec])


# Matrix ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "column"), [(0, 0), (3, 0), (5, 8), (11, 11), (7, 2)])
def test_pointing_at_a_cell_reads_it_out(opened: Opened, row: int, column: int) -> None:
    opened.show(v="matrix", h="1.1")
    opened.hover(row, column)
    assert opened.text("#readout .pair") == f"{LABELS[row]} attends to {LABELS[column]}"
    value = W[1, 1, row, column]
    assert abs(number(opened.text("#readout .value")) - value) <= SEEN
    words = opened.text("#readout .faint").split()
    assert words[::2] == ["rank", "of"]
    above, near = (W[1, 1, row] > value + SEEN).sum(), (np.abs(W[1, 1, row] - value) <= 2 * SEEN).sum()
    assert above + 1 <= int(words[1]) <= above + near
    assert words[3] == "12"


def test_keys_move_zoom_and_pan(opened: Opened) -> None:
    opened.show(v="matrix", h="0.1", q=2, k=2)
    opened.page.focus(".heat canvas[tabindex]")
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowUp", "ArrowDown", "Shift+ArrowDown"):
        opened.page.keyboard.press(key)
    opened.frame()
    assert opened.text("#readout .pair") == f"{LABELS[11]} attends to {LABELS[4]}"
    assert abs(number(opened.text("#readout .value")) - W[0, 1, 11, 4]) <= SEEN
    opened.until("document.querySelector('[role=status]').textContent.includes('rank')")


def test_zooming_and_dragging_keep_the_cell_under_the_pointer(browser: Any, tmp_path: Path) -> None:
    n = 150
    tokens = tokens_of([f"w{i}" for i in range(n)])
    long = record_of(map_of(tokens, layers=1, heads=1, seed=8))
    page = browser.new_page(viewport={"width": 900, "height": 700})
    opened = Opened(page, page_of([PageText(long)]).save(tmp_path / "long.html"))
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
    row, column = int((y + 150) / cell), int((x + 150) / cell)
    opened.hover(row, column)
    assert opened.text("#readout .pair") == f"w{row} attends to w{column}"
    assert abs(number(opened.text("#readout .value")) - long.weights[0, 0, row, column]) <= SEEN
    opened.until("location.hash.includes('z=')")
    page.click("text=fit")
    opened.frame()
    assert opened.place()[2] == pytest.approx(before)
    assert opened.complaints == []
    page.close()


@pytest.mark.parametrize(("hide", "words"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_whole_map_as_records_have_it(opened: Opened, hide: bool, words: bool) -> None:
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


@pytest.mark.parametrize(("hide", "words"), [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_large_pages_are_coarser_and_still_true(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hide: int, words: int
) -> None:
    monkeypatch.setattr(document, "FINE_UP_TO", 0)
    page = browser.new_page()
    opened = Opened(page, page_of([PageText(FIRST)]).save(tmp_path / "coarse.html"))
    assert "within 0.0005" in opened.text("footer")
    record = FIRST.hide_special() if hide else FIRST
    record = record.merge_words() if words else record
    for head in range(3):
        opened.show(v="matrix", h=f"1.{head}", hide=hide, words=words)
        np.testing.assert_allclose(opened.matrix(), record.of(1, head), atol=SEEN)
    page.close()


def test_scales(opened: Opened) -> None:
    opened.show(v="grid", d="light", scale="head")
    shown = pixels(opened, ".view.grid button[data-spec='0.1'] canvas")
    assert np.abs(shown - blues(W[0, 1], W[0, 1].max())).max() <= 12
    opened.show(v="grid", d="light", scale="figure")
    opened.until("document.querySelector('.view.grid .heads').dataset.painted === '6'")
    shown = pixels(opened, ".view.grid button[data-spec='0.1'] canvas")
    assert np.abs(shown - blues(W[0, 1], W.max())).max() <= 12


# Links -----------------------------------------------------------------------------------------------------------


def links_at(opened: Opened, side: str, place: int) -> list[tuple[str, int, float]]:
    left, right, top, line = map(float, opened.page.get_attribute(".view.links", "data-place").split(","))
    box = opened.page.locator(".view.links canvas").bounding_box()
    x = box["x"] + (left - 20 if side == "q" else right + 20)
    opened.page.mouse.move(x, box["y"] + top + (place + 0.5) * line)
    opened.frame()
    found = opened.page.eval_on_selector_all(
        "#readout .link",
        "all => all.map(e => [e.dataset.spec, Number(e.dataset.at), e.querySelector('b').textContent])",
    )
    return [(spec, at, number(value)) for spec, at, value in found]


def test_a_token_has_its_own_links_both_ways(opened: Opened) -> None:
    opened.show(v="links", h="1.1")
    for side, row in (("q", W[1, 1, 6]), ("k", W[1, 1, :, 6])):
        found = links_at(opened, side, 6)
        assert {spec for spec, _, _ in found} == {"1.1"}
        for _, at, value in found:
            assert abs(value - row[at]) <= SEEN
        assert found[0][2] >= row.max() - SEEN
        wanted = "attends to" if side == "q" else "is attended by"
        assert wanted in opened.text("#readout")


def test_several_heads_at_once(opened: Opened) -> None:
    opened.show(v="links", h="1.1")
    opened.page.click("aside button[data-spec='0.2']")
    opened.page.wait_for_selector(".legend button[data-spec='0.2']")
    found = links_at(opened, "q", 3)
    both = {("1.1", k): W[1, 1, 3, k] for k in range(12)} | {("0.2", k): W[0, 2, 3, k] for k in range(12)}
    assert abs(found[0][2] - max(both.values())) <= SEEN
    for spec, at, value in found:
        assert abs(value - both[spec, at]) <= SEEN
    opened.page.mouse.move(5, 5)
    opened.page.click(".legend button[data-spec='1.1']")
    opened.until("document.querySelectorAll('.legend button').length === 1")


def test_the_least_weight_that_is_drawn(opened: Opened) -> None:
    opened.show(v="links", h="1.1", min=0.2)
    opened.page.focus("input[type=range]")
    for _ in range(5):
        opened.page.keyboard.press("ArrowRight")
    opened.frame()
    assert "0.25" in opened.text(".more")
    drawn = opened.table()
    assert len(drawn) - 1 == (W[1, 1] >= 0.25).sum()
    for _, row, query, column, key, value in drawn[1:]:
        assert (LABELS[int(row)], LABELS[int(column)]) == (query, key)
        assert abs(float(value) - W[1, 1, int(row), int(column)]) <= SEEN


def test_links_by_keys(opened: Opened) -> None:
    opened.show(v="links", h="0.0")
    opened.page.focus(".view.links canvas")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowDown"):
        opened.page.keyboard.press(key)
        opened.frame()
    assert f"{LABELS[2]} is attended by" in opened.text("#readout")


# Text ------------------------------------------------------------------------------------------------------------


def test_the_text_reads_as_it_is(opened: Opened) -> None:
    opened.show(v="text", h="0.0")
    assert opened.page.text_content(".prose") == f"[CLS] {PROSE}[SEP] "


def test_a_token_shades_the_others(opened: Opened) -> None:
    opened.show(v="text", h="1.1", d="light")
    opened.page.click(".tok >> nth=5")
    opened.frame()
    for at in range(12):
        colour = opened.page.eval_on_selector_all(".tok", f"all => getComputedStyle(all[{at}]).backgroundColor")
        if W[1, 1, 5, at] > 0.02:
            shown = [int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
            assert np.abs(np.array(shown) - blues(W[1, 1, 5, at])).max() <= 4
    opened.page.hover(".tok >> nth=0")
    assert opened.text("#readout .pair") == "cat attends to [CLS]"
    assert abs(number(opened.text("#readout .value")) - W[1, 1, 5, 0]) <= SEEN
    opened.page.click("text=attended by")
    opened.frame()
    opened.page.hover(".tok >> nth=9")
    assert opened.text("#readout .pair") == "mat attends to cat"
    assert abs(number(opened.text("#readout .value")) - W[1, 1, 9, 5]) <= SEEN


def test_averaged_over_heads(opened: Opened) -> None:
    opened.show(v="text", h="0.0", q=5)
    opened.page.select_option("aside select", "mean")
    opened.page.wait_for_selector(".view.text[data-shown='0,0,mean']")
    found = [float(row[4]) for row in opened.table()[1:]]
    np.testing.assert_allclose(found, W.mean((0, 1))[5], atol=SEEN)


def test_the_text_by_keys(opened: Opened) -> None:
    opened.show(v="text", h="0.0")
    opened.page.focus(".tok >> nth=0")
    for key in ("ArrowRight", "ArrowRight", "Enter", "ArrowRight"):
        opened.page.keyboard.press(key)
        opened.frame()
    assert opened.text("#readout .pair") == "##believ attends to un" or "un attends to ##believ" in opened.text(
        "#readout"
    )
    assert opened.page.get_attribute(".tok >> nth=2", "aria-pressed") == "true"


# Compare ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("partner", "other"),
    [("0.2", W[0, 2]), ("mean", W.mean((0, 1))), ("mean1", W[1].mean(0)), ("full1", FULL[1])],
)
def test_two_maps_and_their_difference(opened: Opened, partner: str, other: np.ndarray) -> None:
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


def test_two_texts_place_by_place(opened: Opened) -> None:
    opened.show(v="compare", h="0.1", b="text1")
    opened.hover(9, 9, ".view.compare .heat >> nth=2")
    other = SECOND.weights[0, 1]
    assert abs(number(opened.text("#readout [data-of=b]")) - other[9, 9]) <= SEEN
    lines = opened.table()
    assert lines[1 + 9 * 12 + 9][:2] == ["mat / rug", "mat / rug"]


def test_texts_of_different_length_share_what_they_share(opened: Opened) -> None:
    opened.show(v="compare", h="0.1", b="text2")
    lines = opened.table()[1:]
    kept = [0, 1, 5, 6, 11]
    shown = np.array([[float(x) for x in line[2:]] for line in lines]).reshape(5, 5, 3)
    assert [line[1] for line in lines[:5]] == ["[CLS]", "the", "cat", "sat", "[SEP]"]
    np.testing.assert_allclose(shown[..., 0], W[0, 1][np.ix_(kept, kept)], atol=SEEN)
    np.testing.assert_allclose(shown[..., 1], SHORTER.weights[0, 1], atol=SEEN)


def test_what_is_not_known_is_said(opened: Opened) -> None:
    opened.show(v="compare", t=1, h="0.1", b="mean")
    assert "full-width head of this layer is not known" in opened.text(".note")
    assert opened.page.locator(".view.compare option[value^=full]").count() == 0


# Head count ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_heads", [1, 2, 4])
def test_the_worked_example(opened: Opened, n_heads: int) -> None:
    q, k, v = example.Q, example.K, example.V
    output, weights = oracle.multi_head(q, k, v, n_heads)
    opened.show(v="headcount")
    opened.page.click(f".segmented button[data-value='{n_heads}'] >> nth=0")
    opened.frame()
    for head in range(n_heads):
        cells = opened.page.locator(f"table.map[data-head='{head}'] tbody td").all_inner_texts()
        np.testing.assert_allclose(np.array(cells, float).reshape(5, 5), weights[head], atol=6e-5)
    for token, name in enumerate(example.TOKENS):
        opened.page.click(f"[aria-label=Token] button:text-is('{name}')")
        opened.page.click("[data-step='2']")
        opened.frame()
        for head in range(n_heads):
            seen = opened.page.locator(f"table.attend[data-head='{head}'] [data-weight]").all_inner_texts()
            np.testing.assert_allclose(np.array(seen, float), weights[head, token], atol=6e-5)
        for n, row in ((n, oracle.multi_head(q, k, v, n)[0][token]) for n in (1, 2, 4)):
            shown = opened.text(f"[data-output='{n}']").removeprefix("o = ").replace("\u2212", "-").split()
            np.testing.assert_allclose(np.array(shown, float), row, atol=6e-5)
        opened.page.click("[data-step='4']")
        opened.frame()
        row = opened.page.locator("tr[data-name=o] td").all_inner_texts()
        np.testing.assert_allclose([float(x.replace("\u2212", "-")) for x in row], output[token], atol=6e-5)


@pytest.mark.parametrize("n_heads", [1, 2, 4])
@pytest.mark.parametrize("projection", ["identity", "mixing"])
def test_the_lines_of_numpy_compute_what_is_shown(opened: Opened, n_heads: int, projection: str) -> None:
    opened.show(v="headcount", n=n_heads, tok=1)
    opened.page.click(f"[data-value={projection}]")
    mixing = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
    known: dict[str, Any] = {
        "np": np, "X": np.eye(5), "W_Q": example.Q, "W_K": example.K,
        "W_V": example.V, "W_O": np.eye(4) if projection == "identity" else mixing,
    }  # fmt: skip
    shown = {}
    for step in range(5):
        opened.page.click(f"[data-step='{step}']")
        opened.frame()
        exec(opened.page.inner_text(".numpy code"), known)
        names = opened.page.eval_on_selector_all(".vectors tr[data-name]", "all => all.map(r => r.dataset.name)")
        shown[step] = {
            name: [
                float(x.replace("\u2212", "-"))
                for x in opened.page.locator(f".vectors tr[data-name='{name}'] td").all_inner_texts()
            ]
            for name in names
        }
    np.testing.assert_allclose(shown[0]["q"], known["Q"][1], atol=6e-5)
    np.testing.assert_allclose(shown[0]["v"], known["V"][1], atol=6e-5)
    np.testing.assert_allclose(shown[1]["k"], known["k"][:, 1].ravel(), atol=6e-5)
    np.testing.assert_allclose(shown[3]["c"], known["C"][1], atol=6e-5)
    np.testing.assert_allclose(shown[4]["o"], known["O"][1], atol=6e-5)
    out = reference.Projection(known["W_O"].T)
    true, _ = oracle.multi_head(example.Q, example.K, example.V, n_heads, out=out)
    np.testing.assert_allclose(known["O"], true, atol=1e-12)
    opened.until(f"location.hash.includes('wo=mixing') === {str(projection == 'mixing').lower()}")
    opened.page.click("[data-value=identity]")


def test_the_numbers_that_were_worked_by_hand(opened: Opened) -> None:
    for n, wanted in ((1, [WORKED["single_head"]["weights"]]), (4, WORKED["four_heads"]["weights"])):
        opened.show(v="headcount", n=n)
        for head, weights in enumerate(wanted):
            cells = opened.page.locator(f"table.map[data-head='{head}'] tbody td").all_inner_texts()
            assert np.array(cells, float).reshape(5, 5).tolist() == weights


# All of it -------------------------------------------------------------------------------------------------------


def test_the_three_maps_of_an_encoder_decoder(opened: Opened) -> None:
    opened.show(v="matrix", t=3, h="1.2")
    for number_, kind in enumerate(("encoder", "decoder", "cross")):
        opened.page.click(f".kinds button:text-is('{kind}')")
        opened.page.wait_for_selector(f".view.matrix[data-shown='3,{number_},1.2']")
        np.testing.assert_allclose(opened.matrix(), BOTH.of(1, 2, kind), atol=SEEN)
    opened.page.click("#tab-text")
    opened.settle("text")
    opened.page.click(".tok[data-side=q] >> nth=2")
    opened.frame()
    opened.page.hover(".tok[data-side=k] >> nth=1")
    assert opened.text("#readout .pair") == "Haus attends to house"
    assert abs(number(opened.text("#readout .value")) - BOTH.of(1, 2, "cross")[2, 1]) <= SEEN
    opened.page.click(".tok[data-side=k] >> nth=0")
    opened.frame()
    opened.page.hover(".tok[data-side=q] >> nth=3")
    assert opened.text("#readout .pair") == "ist attends to the"
    shades = opened.page.eval_on_selector_all(
        ".tok[data-side=q]", "all => all.map(e => getComputedStyle(e).backgroundColor)"
    )
    for shade, weight in zip(shades, BOTH.of(1, 2, "cross")[:, 0], strict=True):
        assert (shade != "rgba(0, 0, 0, 0)") == (weight >= 2 / 256)


def test_texts_are_switched_by_a_list(opened: Opened) -> None:
    opened.show(v="matrix", h="0.2")
    assert opened.page.locator(".texts option").count() == 4
    opened.page.select_option(".texts select", "1")
    opened.page.wait_for_selector(".view.matrix[data-shown='1,0,0.2']")
    np.testing.assert_allclose(opened.matrix(), SECOND.of(0, 2), atol=SEEN)


def test_the_address_holds_the_whole_view(opened: Opened, browser: Any, page_file: Path) -> None:
    opened.show(v="grid")
    opened.page.click("#tab-compare")
    opened.settle("compare")
    opened.page.select_option(".view.compare .toolbar select", "1.0")
    opened.page.keyboard.press("w")
    opened.page.keyboard.press("]")
    opened.frame()
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
def test_an_address_that_means_nothing_is_mended(opened: Opened, nonsense: str) -> None:
    opened.page.evaluate("to => { location.hash = to; }", nonsense)
    opened.frame()
    assert opened.page.locator("main .view").count() == 1


@pytest.mark.parametrize("view", ["grid", "matrix", "links", "text", "compare", "headcount"])
def test_what_is_seen_is_saved(opened: Opened, view: str) -> None:
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


def test_a_saved_matrix_has_the_figures_colours(opened: Opened) -> None:
    opened.show(v="matrix", h="0.2", d="light")
    drawing = ET.fromstring(opened.saved("svg"))
    image = next(drawing.iter("{http://www.w3.org/2000/svg}image"))
    import base64

    picture = Image.open(BytesIO(base64.b64decode(image.attrib["href"].split(",")[1]))).convert("RGB")
    assert np.abs(np.array(picture).astype(int) - blues(W[0, 2])).max() <= 4


def test_light_and_dark(opened: Opened) -> None:
    def ground() -> str:
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
def test_more_is_further_from_the_ground(opened: Opened, scheme: str) -> None:
    opened.show(v="grid", d=scheme)
    shown = pixels(opened, ".view.grid button[data-spec='1.1'] canvas").sum(-1)
    order = np.argsort(W[1, 1].ravel(), kind="stable")
    far = np.abs(shown.ravel()[order] - (765 if scheme == "light" else 0))
    values = W[1, 1].ravel()[order]
    assert all(b >= a for a, b, x, y in zip(far, far[1:], values, values[1:], strict=False) if y - x > 0.008)


def test_the_keyboard_alone_suffices(opened: Opened) -> None:
    opened.show(v="grid")
    for number_, view in enumerate(("grid", "matrix", "links", "text", "compare", "headcount"), 1):
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


def test_roles_and_names_for_screen_readers(opened: Opened) -> None:
    opened.show(v="matrix", h="0.0")
    page = opened.page
    assert page.get_by_role("tab").count() == 6
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


@pytest.mark.parametrize("view", ["grid", "matrix", "links", "text", "compare", "headcount"])
def test_a_narrow_window_needs_no_sideways_scrolling(opened: Opened, view: str) -> None:
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
