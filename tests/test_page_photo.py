"""The page's photos: a word shades the picture, a patch the words; by pointer, by keys and in files."""

import csv
import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from attnscope.pages import PageText, page_of
from attnscope.questions.places import Picture
from tests.page_helpers import Opened, blues, number, pixels
from tests.record_helpers import looking_record, map_of, record_of, tokens_of
from tests.senses_helpers import write_vision
from tests.vision_language_helpers import write_family

LOOKING = looking_record()
W = LOOKING.weights  # (layer, head, word, token)
CELLS = [picture.cells for picture in LOOKING.pictures]
PATCHES = tokens_of(["CLS", "0,0", "0,1", "0,2", "1,0", "1,1", "1,2"], (0,))
SEEING = record_of(
    map_of(PATCHES, seed=3),
    picture=Picture(np.full((16, 24, 3), 255, np.uint8), (2, 3), "w.png", (9, 6)),
)
V = SEEING.weights


@pytest.fixture(scope="module")
def opened(browser, tmp_path_factory):
    page = browser.new_page(viewport={"width": 1280, "height": 860})
    held = Opened(page, LOOKING.page().save(tmp_path_factory.mktemp("photo") / "page.html"))
    yield held
    assert held.complaints == []
    assert [url for url in held.requests if not url.startswith(("data:", "blob:"))] == []
    page.close()


@pytest.fixture(scope="module")
def seeing(browser, tmp_path_factory):
    page = browser.new_page(viewport={"width": 1280, "height": 860})
    held = Opened(page, SEEING.page().save(tmp_path_factory.mktemp("seeing") / "page.html"))
    yield held
    assert held.complaints == []
    page.close()


def painted(opened, number=0, grid=(2, 3)):
    """The colour in the middle of each patch of a picture, (row, column, 3)."""
    opened.until(f"document.querySelectorAll('figure.photo[data-painted]').length > {number}")
    image = pixels(opened, f"figure.photo >> nth={number} >> canvas >> nth=0")
    middles = [
        ((np.arange(n) + 0.5) * size / n).astype(int)
        for n, size in zip(grid, image.shape[:2], strict=True)
    ]
    return image[np.ix_(*middles)]


def point(opened, row, column, number=0, grid=(2, 3), click=False):
    """Points at a patch."""
    box = opened.page.locator(f"figure.photo >> nth={number} >> canvas >> nth=1").bounding_box()
    at = (
        box["x"] + (column + 0.5) * box["width"] / grid[1],
        box["y"] + (row + 0.5) * box["height"] / grid[0],
    )
    opened.page.mouse.move(*at)
    if click:
        opened.page.mouse.click(*at)
    opened.frame()


def assert_shaded(opened, row, high):
    """Both pictures have the colours of what a row gives to their patches."""
    for at, cells in enumerate(CELLS):
        np.testing.assert_allclose(painted(opened, at, cells.shape), blues(row[cells], high), atol=3)


def largest(row):
    return max(float(row[cells].max()) for cells in CELLS)


def test_the_page_opens_on_the_photo_and_what_was_written(opened):
    opened.settle("photo")
    assert opened.page.get_attribute("#tab-photo", "aria-selected") == "true"
    row = W.mean((0, 1))[3:].mean(0)  # "a cat" was written
    assert_shaded(opened, row, largest(row))
    assert "words it wrote" in opened.text(".read")
    assert [opened.text(f".tok >> nth={at}") for at in range(5)] == ["what", "is", "it", "a", "cat"]


@pytest.mark.parametrize(("word", "head"), [(0, "0.0"), (4, "1.2")])
def test_pointing_at_a_word_shades_the_picture(opened, word, head):
    opened.show(v="photo", h=head, scale="head")
    opened.page.hover(f".tok >> nth={word}")
    opened.frame()
    layer, one = map(int, head.split("."))
    row = W[layer, one, word]
    assert_shaded(opened, row, largest(row))
    share = (
        f"{100 * row[CELLS[0]].sum():.1f}% of its attention goes here, at most {row[CELLS[0]].max():.4f}"
    )
    assert share in opened.text("figure.photo >> nth=0")
    assert "2 patches of 8 × 8; embedded as 24 × 16" in opened.text("figure.photo >> nth=0")
    opened.page.mouse.move(2, 2)


def test_pointing_at_a_patch_shades_the_words_and_says_the_number(opened):
    opened.show(v="photo", h="1.1", q=4, scale="fixed")  # q counts each photo as one token: "is"
    point(opened, 1, 2)
    column = W[1, 1, :, CELLS[0][1, 2]]
    for word, weight in enumerate(column):
        shown = opened.page.eval_on_selector(f".tok >> nth={word}", "e => e.style.backgroundColor")
        colour = [int(part) for part in re.findall(r"\d+", shown)] or blues(np.zeros(1))[0]
        np.testing.assert_allclose(colour, blues(np.array([weight]))[0], atol=3)
    assert column.max() > 0.05
    assert opened.text(".read").startswith("is attends to row 1, column 2")
    assert abs(number(opened.text(".read .value")) - column[1]) <= 6e-5
    opened.page.mouse.move(2, 2)


def test_a_click_keeps_a_patch_and_a_word(opened):
    opened.show(v="photo", h="0.2")
    point(opened, 0, 0, 1, (1, 2), click=True)
    opened.page.click(".tok >> nth=4")
    opened.page.mouse.move(2, 2)
    opened.until("location.hash.includes('p=1,0,0')")
    assert abs(number(opened.text(".read .value")) - W[0, 2, 4, 9]) <= 6e-5
    opened.page.click(".tok >> nth=4")
    point(opened, 0, 0, 1, (1, 2), click=True)
    opened.page.mouse.move(2, 2)
    opened.until("!location.hash.includes('p=') && !location.hash.includes('q=')")


def test_keys_walk_the_words_and_the_patches(opened):
    opened.show(v="photo", h="0.1", scale="head")
    page = opened.page
    page.keyboard.press("Shift")  # who goes on by keys
    page.focus(".tok >> nth=0")
    page.keyboard.press("ArrowRight")
    opened.frame()
    assert_shaded(opened, W[0, 1, 1], largest(W[0, 1, 1]))
    page.keyboard.press("Enter")
    page.focus("figure.photo >> nth=0 >> canvas >> nth=1")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowLeft")
    opened.frame()
    assert opened.text(".read").startswith("is attends to row 0, column 0")
    assert abs(number(opened.text(".read .value")) - W[0, 1, 1, 1]) <= 6e-5
    page.keyboard.press("Enter")
    opened.until("location.hash.includes('p=0,0,0')")


def test_means_of_heads_and_hidden_special_tokens(opened):
    opened.show(v="photo", h="mean1", q=3, hide=1, scale="head")
    left = W.copy()
    left[..., [0, 4, 8]] = 0  # what marks the rows' ends is hidden, patches stay
    row = (left / left.sum(-1, keepdims=True))[1, :, 0].mean(0)
    assert_shaded(opened, row, largest(row))


def test_what_is_seen_is_saved(opened):
    opened.show(v="photo", h="1.0", q=3, scale="head")
    table = list(csv.DictReader(io.StringIO(opened.saved("csv").decode())))
    assert [float(row["weight"]) for row in table] == pytest.approx(
        [*W[1, 0, 0, CELLS[0]].ravel(), *W[1, 0, 0, CELLS[1]].ravel()], abs=2e-5
    )
    assert {row["query"] for row in table} == {"what"}
    seen = np.asarray(Image.open(io.BytesIO(opened.saved("png"))).convert("RGB"))
    strongest = blues(np.array([1.0]))[0]
    assert (np.abs(seen.astype(int) - strongest).max(-1) < 6).sum() > 10_000


def test_a_photo_is_embedded_once(opened):
    jpeg = r'id="d\d+">/9j/'
    html = opened.file.read_text("utf-8")
    assert len(re.findall(jpeg, html)) == 1, "the small picture is of the same photo"
    other = replace(looking_record(seed=1), text="another question")
    assert len(re.findall(jpeg, page_of([PageText(LOOKING), PageText(other)]).html)) == 1


def test_words_before_the_pictures_may_be_merged():
    merged = looking_record(opening=("<", "s", ">")).merge_words()
    assert merged.maps[0].part == (11, 0, 16, 16)
    assert merged.tokens[1] == "0:0,0"
    html = page_of([PageText(merged)]).html
    assert re.findall(r'"first":(\d+)', html) == ["3"]  # after <s>, the photo and the marks in it


def test_a_vision_model_patch_by_patch(seeing):
    seeing.settle("photo")
    row = V.mean((0, 1))[0, 1:].reshape(2, 3)  # CLS, as in the figures
    np.testing.assert_allclose(painted(seeing), blues(row, row.max()), atol=3)
    seeing.show(v="photo", h="1.2", scale="head")
    point(seeing, 1, 0)
    row = V[1, 2, 4, 1:].reshape(2, 3)
    np.testing.assert_allclose(painted(seeing), blues(row, row.max()), atol=3)
    point(seeing, 1, 0, click=True)
    point(seeing, 0, 2)
    assert seeing.text(".read").startswith("patch 1,0 attends to row 0, column 2")
    assert abs(number(seeing.text(".read .value")) - V[1, 2, 4, 3]) <= 6e-5
    seeing.page.click("text=attended by")
    seeing.page.mouse.move(2, 2)
    seeing.until("location.hash.includes('side=k')")
    column = V[1, 2, 1:, 4].reshape(2, 3)
    np.testing.assert_allclose(painted(seeing), blues(column, column.max()), atol=3)
    assert [seeing.text(f".tok >> nth={at}") for at in range(seeing.page.locator(".tok").count())] == [
        "CLS"
    ]


def test_the_command_asks_about_a_photo(run, tmp_path):
    write_family(tmp_path / "qwen", "qwen3_vl")
    write_vision(tmp_path / "vit")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (70, 90, 3), np.uint8)).save("a.png")
    asked = ("page", "--image", "a.png", "-q", "-o", "p.html")
    status, out, err = run(*asked, "what is it ?", "a cat", "-m", "./qwen", "--generate", "3")
    assert status == 0
    assert out == "p.html\n"
    assert err == ""
    html = Path("p.html").read_text("utf-8")
    assert html.count('"looking":') == 2
    assert '"scale":"head"' in html
    status, out, err = run(*asked, "-m", "./vit")
    assert status == 0, err
    assert out == "p.html\n"
    html = Path("p.html").read_text("utf-8")
    assert '"photos":' in html
    assert '"looking":' not in html
    status, _, err = run(*asked, "-m", "./vit", "--generate", "3")
    assert status == 1
    assert "vit reads no pictures among words" in err
    assert "leave out the text and --generate" in err
    assert run(*asked, "what is it ?", "-m", "./qwen", "--pair", "x")[0] == 2
