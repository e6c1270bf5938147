"""Two photos, or two questions about one: how what words give to the picture changes, head by head."""

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import attnscope
from attnscope.errors import AttnscopeError
from attnscope.records.compare.pairs import PicturePair
from attnscope.studies.compare.pictures import spread
from attnscope.views.compare.maps import maps_page
from attnscope.views.drawing.style import Style
from tests.conftest import Run
from tests.record_helpers import require_lossless, require_read
from tests.vision_language_helpers import noise, write_family

QUESTION = "what is on the table ?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp("pairs") / "qwen", "qwen2_vl")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return attnscope.load(folder)


@pytest.fixture(scope="module")
def found(model: Any) -> PicturePair:
    return attnscope.compare_pictures(model, [noise(64, 96), noise(96, 64, 1)], [QUESTION])


def test_weights_spread_over_another_grid_keep_their_sum_and_place() -> None:
    weights = np.zeros((4, 6))
    weights[3, 1] = 1  # rows 3/4 to 1, columns 1/6 to 2/6
    np.testing.assert_allclose(spread(weights, (4, 6)), weights)
    np.testing.assert_allclose(spread(weights, (2, 2)), [[0, 0], [1, 0]])
    wanted = np.zeros((3, 4))
    wanted[2, :2] = 0.5  # 1/4 lies in the middle of 1/6 to 2/6
    np.testing.assert_allclose(spread(weights, (3, 4)), wanted, atol=1e-12)
    drawn = np.random.default_rng(0).random((2, 5, 7, 11))
    np.testing.assert_allclose(spread(drawn, (3, 5)).sum((-1, -2)), drawn.sum((-1, -2)))


def test_two_photos_are_compared_over_the_coarser_grid(found: PicturePair, model: Any) -> None:
    records = [attnscope.picture_heatmap(model, noise(*size), QUESTION) for size in ((64, 96, 0), (96, 64, 1))]
    grids = [record.pictures[0].grid for record in records]
    assert grids[0] != grids[1]
    grid = min(grids[0][0], grids[1][0]), min(grids[0][1], grids[1][1])
    assert [picture.grid for picture in found.pictures] == [grid, grid]
    for record, weights in zip(records, (found.weights, found.other_weights), strict=True):
        assert weights.shape[1:] == (6, *grid)
        shares = record.pictures[0].over(record.of(1, 2)[4]).sum()  # the first row is <|vision_end|>
        assert weights[found.heads.index((1, 2)), 3].sum() == pytest.approx(shares, abs=1e-6)
    assert found.words == tuple((word, word) for word in QUESTION.split()) and found.equal.all()  # no template's marks
    p, q = (w[5, 2].ravel().astype(float) for w in (found.weights, found.other_weights))
    p, q = (np.append(x, 1 - x.sum()) for x in (p, q))
    assert found.divergences["hellinger"][5, 2] == pytest.approx(((np.sqrt(p) - np.sqrt(q)) ** 2).sum() / 2, abs=1e-5)
    assert found.overall().min() > 0.05
    assert found.ranked()[0] == int(found.overall().argmax())


def test_the_same_photo_and_question_change_nothing(model: Any) -> None:
    same = attnscope.compare_pictures(model, [noise(64, 96)], [QUESTION, QUESTION])
    assert np.abs(same.overall()).max() < 1e-3


def test_two_questions_change_the_words_that_differ(model: Any) -> None:
    found = attnscope.compare_pictures(model, [noise(64, 96)], [QUESTION, "what is on the window ?"], query="window")
    assert found.queries == (found.words.index(("table", "window")),)
    before = found.words.index(("what", "what"))
    assert found.divergences["hellinger"][:, before].max() < 1e-6  # it comes before the word
    assert found.at_query().min() > 0.05
    mark = attnscope.compare_pictures(model, [noise(64, 96)], [QUESTION, "what is on the window ?"], query="Assistant")
    assert mark.words[mark.queries[0]] == ("Assistant", "Assistant") and not mark.equal[mark.queries[0]]
    with pytest.raises(AttnscopeError, match="no token is 'cup'"):
        attnscope.compare_pictures(model, [noise(64, 96)], [QUESTION, QUESTION], query="cup")


def test_it_comes_back_without_loss(found: PicturePair, tmp_path: Path) -> None:
    require_lossless(found, tmp_path)


def _cut(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda told, held: held.update({name: held[name][:-1]})


@pytest.mark.parametrize(
    "damage",
    [_cut("weights"), _cut("equal"), _cut("divergence.hellinger"), lambda told, held: told.update(queries=[99]),
     lambda told, held: told["pictures"][0].update(grid=[1, 1])],
)  # fmt: skip
def test_damage_is_refused(found: PicturePair, damage: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    told, held = found.describe(), found.arrays()
    told["pictures"] = [dict(one) for one in told["pictures"]]
    damage(told, held)
    with pytest.raises(ValueError, match="its"):
        require_read(PicturePair, told, held)


def test_the_figure_has_both_maps_and_the_difference(found: PicturePair) -> None:
    page = maps_page(found, Style("head"))
    written = [text.get_text() for text in page.axes.texts]
    assert [name in written for name in ("a picture in memory", "difference", "L0H0")][:2] == [True, True]
    before, after = found.maps(found.ranked()[0])
    assert f"{before.sum():.0%} · max {before.max():.2g}" in written
    points = f"{round(100 * (after - before).sum()):+d} points".replace("-", "−")
    assert f"{points} · ±{np.abs(after - before).max():.2g}" in written
    assert len(page.axes.images) >= 12 or len(page.axes.get_images()) >= 12


def test_the_command_compares_photos_and_questions(run: Run, folder: Path) -> None:
    for name, seed in (("a.png", 0), ("b.png", 1)):
        Image.fromarray(noise(64, 96, seed)).save(name)
    one = ("compare", "--image", "a.png", "-m", folder, "-q")
    two = (*one, "--image", "b.png", QUESTION)
    status, out, err = run(*two, "--query", "table", "-o", "out")
    assert (status, err) == (0, "")
    assert "whose attention changes most at “table”" in out and "a.png  →  b.png" in out
    assert {path.name for path in Path("out").iterdir()} == {"compare.npz", "compare.csv", "change.png", "pictures.png"}
    with Path("out/compare.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 8
    assert run("show", "out", "-q")[1] == out[: out.index("out/compare")]
    assert run(*one, QUESTION, "--with", "what is on the window ?")[0] == 0
    for wrong in (
        (*one, QUESTION), (*two, "--with", "a cat"), (*two, "--pick", "L0H0"), (*two, "--hide-special"), one,
    ):  # fmt: skip
        status, out, err = run(*wrong)
        assert (status, out) == (2, "") and err.startswith("error: ") and "hint: " in err


def test_the_viewer_lists_its_heads(open_page: Callable[..., Any], found: PicturePair) -> None:
    opened = open_page(found.page())
    opened.show(v="atlas")
    rows = list(csv.DictReader(io.StringIO(opened.saved("csv").decode())))
    change = dict(zip(found.heads, found.overall().tolist(), strict=True))
    assert len(rows) == 8
    for row in rows:
        place = int(row["layer"]), int(row["head"])
        assert float(row["change"]) == pytest.approx(change[place], rel=1e-5)
        assert float(row["on_picture"]) == pytest.approx(found.maps(found.heads.index(place))[0].sum(), rel=1e-4)
