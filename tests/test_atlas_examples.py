"""The page of an atlas in headless Chromium: the examples of a head, as they are quoted, shaded and opened."""

from dataclasses import replace

import numpy as np
import pytest

from tests.atlas_helpers import pieces_of, weights_of, with_examples
from tests.atlas_page_helpers import ATLAS, EXAMPLES, _opened, mine, open_atlas

__all__ = ["_opened", "open_atlas"]


@pytest.mark.parametrize("tab", ["top", "decile"])
def test_examples_show_their_texts(opened, tab):
    opened.go("L1H1", tab=tab)
    articles = opened.page.locator(".examples article")
    wanted = mine("L1H1", tab)
    assert articles.count() == len(wanted)
    for article, example in zip(articles.all(), wanted, strict=True):
        assert tuple(article.locator(".tok").all_inner_texts()) == tuple(
            own for _, own in pieces_of(example)
        )
        assert (
            article.locator(".prose").evaluate("e => e.textContent") == f"[CLS] {example.excerpt} [SEP] "
        )


def quoting(excerpt, tokens):
    """The atlas with a text in place of each of its own, in [CLS] and [SEP]; tokens not there stand for nothing."""
    offsets = [(0, 0)]
    end = 0
    for token in tokens:
        start = excerpt.find(token, end)
        end = start + len(token) if start >= 0 else end
        offsets.append((start, end) if start >= 0 else (end, end))
    labels = ("[CLS]", *(token.lower() for token in tokens), *["[SEP]"] * 24)[:24]
    offsets += [(len(excerpt), len(excerpt))] * (24 - len(offsets))
    special = np.isin(labels, ["[CLS]", "[SEP]"])
    written = {"labels": labels, "excerpt": excerpt, "offsets": tuple(offsets), "special": special}
    return with_examples(ATLAS, [replace(one, **written) for one in EXAMPLES])


def test_examples_are_quoted_as_they_were_written(open_atlas):
    """Whatever the tokenizer makes of capitals, quotation marks, white space and characters of several tokens."""
    text = "\u201cI  don\u2019t\u201d,\nsaid ALice (at tea-time) \U0001f602!"
    opened = open_atlas(
        quoting(
            text, ["“", "I", "don", "’", "t", "”", ",", "\n", "said", "AL", "ice", "😂", "<0x9f>", "!"]
        )
    )
    opened.go("L0H0")
    prose = opened.page.locator(".examples article >> nth=0 >> .prose")
    # What has no character of its own, and what cannot be seen, shows its label beside.
    said = prose.evaluate("e => e.textContent")
    assert said.startswith(
        "[CLS] " + text.replace("\n", "\n\n").replace("\U0001f602", "\U0001f602<0x9f>")
    )
    assert prose.locator(".tok").all_inner_texts()[10:13] == ["AL", "ice", "\U0001f602"]
    command = opened.page.locator(".headcard code").evaluate("e => e.textContent")
    assert command == f"attnscope heatmap '{text}' -m minilm --pick L0H0 --query don"


@pytest.mark.parametrize("side", ["q", "k"])
def test_pointing_at_a_token_shades_and_says_its_weights(opened, side):
    opened.go("L2H0", side=side)
    example = mine("L2H0", "top")[1]
    weights = weights_of(example)
    article = opened.page.locator(".examples article >> nth=1")
    article.locator(".tok >> nth=7").hover()
    opened.frame()
    row = weights[7] if side == "q" else weights[:, 7]
    said = article.locator(".tok").evaluate_all("all => all.map(e => Number(e.dataset.weight || 0))")
    np.testing.assert_allclose(said, np.where(row >= 0.05, row, 0), atol=0.005 + 1e-6)
    assert article.locator(".tok >> nth=7").get_attribute("class") == "tok focus"
    line = " ".join(article.locator(".reading").inner_text().split())
    best = int(weights[7].argmax())
    shown = [own for _, own in pieces_of(example)]
    assert f"{shown[7]} attends to {shown[best]} {weights[7, best]:.2f}" in line
    opened.page.mouse.move(0, 0)
    opened.frame()
    assert "focus" in article.locator(".tok >> nth=3").get_attribute("class"), "its own again"


def test_examples_by_keys_and_their_address(opened):
    opened.go("L0H2")
    opened.page.focus(".examples article >> nth=0 >> .tok.focus")
    opened.press("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft", "Enter")
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
def test_an_example_opens_as_a_map(opened, view):
    opened.go("L1H3")
    opened.page.click(f".examples article >> nth=2 >> [data-open={view}]")
    opened.settle(view)
    opened.until("location.hash.includes('ex=2')")
    example = mine("L1H3", "top")[2]
    if view == "matrix":
        np.testing.assert_allclose(opened.matrix(), weights_of(example), atol=5.1e-5)
    opened.page.reload()
    opened.settle(view)
    opened.press("h")
    if view == "matrix":
        shown = opened.matrix()
        kept = weights_of(example)[1:-1, 1:-1]
        left = kept.sum(1, keepdims=True)
        np.testing.assert_allclose(shown, np.where(left >= 0.01, kept / left, 0), atol=5.1e-5)
    opened.page.keyboard.press("Escape")
    opened.page.wait_for_selector(".view.head[data-shown=L1H3]")
