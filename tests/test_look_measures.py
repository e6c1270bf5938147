"""What heads do between words and pictures: the measures in closed form, against plain loops, and on a model."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import attnscope
from attnscope.core.exact.running import RunningSums
from attnscope.core.senses.look_measures import LOOK_MEASURES, LookFacts, look_sums
from attnscope.errors import AttnscopeError
from attnscope.records.heads.findings import Estimate, Head
from attnscope.records.maps.pictures import Picture
from attnscope.studies.senses.grounding import cover, with_grounding
from tests.conftest import Run
from tests.vision_language_helpers import write_family

NAMES = list(LOOK_MEASURES)
AT = NAMES.index("grounds")
CELLS = np.arange(3, 18).reshape(3, 5)
FACTS = LookFacts(23, 19, np.array([True, False, True, True]), CELLS, np.arange(1, 18))


def values(weights: np.ndarray) -> dict[str, np.ndarray]:
    found = look_sums(weights, FACTS)
    assert not found.counts[AT - 1 :].any()  # there is no box
    return dict(zip(NAMES[: AT - 1], found.sums[: AT - 1] / found.counts[: AT - 1], strict=True))


def test_one_patch_uniform_attention_and_two_spots() -> None:
    weights = np.zeros((3, 4, 23))
    weights[0, :, CELLS[1, 2]] = 1  # one patch in the middle
    weights[1] = 1 / 23
    weights[2, :, CELLS[0, 0]] = 0.2  # two spots that do not touch, and the rest on a word
    weights[2, :, CELLS[0, 1]] = 0.1
    weights[2, :, CELLS[2, 4]] = 0.3
    weights[2, :, 20] = 0.4
    found = values(weights)
    np.testing.assert_allclose(found["looks"], [1, 17 / 23, 0.6])
    np.testing.assert_allclose(found["localised"][:2], [1, 0], atol=1e-12)
    halves = -(0.5 * math.log(0.5)) * 2
    np.testing.assert_allclose(found["spatial_entropy_nats"], [0, 0, halves], atol=1e-12)
    np.testing.assert_allclose(found["border"], [0, 12 / 15, 1])
    np.testing.assert_allclose(found["largest_patch"], [1, 1 / 23, 0.3])
    np.testing.assert_allclose(found["picture_entropy_nats"][:2], [0, math.log(15)], atol=1e-12)


def test_random_weights_against_plain_loops() -> None:
    weights = np.random.default_rng(0).dirichlet(np.full(23, 0.2), (2, 4))
    found = values(weights)
    y0, x0 = np.mgrid[:3, :5]
    even = math.sqrt(((y0 - 1.0) ** 2 + (x0 - 2.0) ** 2).mean())
    for head in range(2):
        localised, entropy, border = [], [], []
        for query in (0, 2, 3):
            row = weights[head, query]
            p = {(i, j): row[CELLS[i, j]] / row[CELLS].sum() for i in range(3) for j in range(5)}
            y, x = (sum(p[at] * at[axis] for at in p) for axis in (0, 1))
            spread = math.sqrt(sum(p[at] * ((at[0] - y) ** 2 + (at[1] - x) ** 2) for at in p)) / even
            localised.append(row[1:18].sum() * max(0, 1 - spread))
            entropy.append(-sum(v * math.log(v) for v in p.values() if v > 0))
            border.append(sum(v for (i, j), v in p.items() if i in (0, 2) or j in (0, 4)))
        assert found["localised"][head] == pytest.approx(np.mean(localised))
        assert found["picture_entropy_nats"][head] == pytest.approx(np.mean(entropy))
        assert found["border"][head] == pytest.approx(np.mean(border))


def test_a_word_that_does_not_look_has_no_place() -> None:
    weights = np.zeros((1, 4, 23))
    weights[..., 0] = 1
    found = look_sums(weights, FACTS)
    assert found.sums[NAMES.index("looks")] == 0 and found.counts[NAMES.index("looks")] == 3
    assert found.counts[NAMES.index("border")] == 0


def test_heads_of_a_model_are_measured_on_what_it_shows(tmp_path: Path) -> None:
    model = attnscope.load(write_family(tmp_path / "model", "internvl"))
    drawn = np.random.default_rng(2)
    photos = [drawn.integers(0, 255, (70 + 30 * i, 120, 3), np.uint8) for i in range(3)]
    asked = "what is on the table ?"
    found = attnscope.picture_heads(model, photos, text=asked, generate=4)
    assert found.corpus["of"] == "pictures among words" and found.of_senses and found.corpus["n_texts"] == 3
    sums, counts = np.zeros((2, 2, 4)), np.zeros((2, 2, 4))
    for photo in photos:
        record = attnscope.picture_heatmap(model, photo, asked, generate=4)
        tokens = record.maps[0].queries
        words = np.flatnonzero(~tokens.special & (np.arange(len(tokens)) >= tokens.n_given))
        held = np.concatenate([picture.cells.ravel() for picture in record.pictures])
        shares = record.weights[:, :, words][..., held]
        sums[0] += shares.sum((2, 3))
        sums[1] += shares.max(3).sum(2)
        counts += len(words)
    np.testing.assert_allclose(found.grid("decoder", "looks"), (sums / counts)[0], atol=1e-5)
    np.testing.assert_allclose(found.grid("decoder", "largest_patch"), (sums / counts)[1], atol=1e-5)
    one = found.heads[0].measures["looks"]
    assert one.low < one.value < one.high and 0.3 < one.uniform < 1
    back = attnscope.load_record(found.save(tmp_path / "heads.npz"))
    assert back.grid("decoder", "localised").tolist() == found.grid("decoder", "localised").tolist()
    with pytest.raises(AttnscopeError, match="reads no pictures among words"):
        attnscope.picture_heads(attnscope.load("own"), photos, text=asked)


def ground(boxes: list[np.ndarray], planted: int, seed: int) -> list[str]:
    """The heads of 24 that ground words, of which one looks into the true boxes for three fifths of its attention."""
    drawn = np.random.default_rng(seed)
    sums = RunningSums((1, 24, len(NAMES)))
    true = [(np.random.default_rng(n).integers(2), np.random.default_rng(n + 99).integers(3)) for n in range(40)]
    for (row, column), box in zip(true, boxes, strict=True):
        weights = drawn.dirichlet(np.full(23, 0.3), (24, 4))
        weights[planted] *= 0.4
        weights[planted][:, CELLS[row : row + 2, column : column + 3].ravel()] += 0.1
        found = look_sums(weights, replace(FACTS, box=box))
        sums.add(found.sums.T[None, None], found.counts.T[None, None])
    values = sums.ratio()[0]
    low, high = (end[0, :, AT] for end in sums.interval())
    heads = [
        Head("decoder", 0, n, (), 0.0, {"grounds": Estimate(values[n, AT], low[n], high[n], 0.0, 1)}) for n in range(24)
    ]
    return [head.name for head in with_grounding(heads, (0,), sums, AT) if head.roles]


def boxes() -> list[np.ndarray]:
    made = []
    for n in range(40):
        row, column = np.random.default_rng(n).integers(2), np.random.default_rng(n + 99).integers(3)
        box = np.zeros((3, 5))
        box[row : row + 2, column : column + 3] = 1
        made.append(box)
    return made


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 20), marks=pytest.mark.slow)], ids=["few", "many"])
def test_a_planted_grounding_head_is_found_and_none_on_shuffled_boxes(seeds: range) -> None:
    true = boxes()
    for seed in seeds:
        assert ground(true, 7, seed) == ["L0H7"]
        # Boxes that know nothing of the attention: drawn anew for every picture.
        drawn = np.random.default_rng(1000 + seed)
        blind = [(drawn.random((3, 5)) < 0.4).astype(float) for _ in true]
        assert ground(blind, 7, seed) == []


def test_boxes_are_laid_over_patches() -> None:
    picture = Picture(
        np.zeros((4, 8, 3), np.uint8), (2, 4), "a", (80, 40), CELLS[:2, :4].astype(np.int32), (0, 0, 80, 40)
    )
    np.testing.assert_allclose(cover(picture, (10, 0, 40, 20)), [[0.5, 1, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_allclose(cover(picture, (-5, 10, 200, 30)), np.full((2, 4), 0.5))
    cut = replace(picture, area=(20, 0, 60, 40))  # the middle alone was seen
    np.testing.assert_allclose(cover(cut, (0, 0, 30, 40)), [[1, 0, 0, 0]] * 2)


def test_phrases_and_boxes_from_json_lines(tmp_path: Path) -> None:
    model = attnscope.load(write_family(tmp_path / "model", "qwen2_vl"))
    lines = []
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 255, (80, 130, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
        lines.append({"image": f"{number}.png", "phrase": "two cups", "box": [10 * number, 20, 60, 70]})
    path = tmp_path / "boxes.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    found = attnscope.picture_heads(model, str(path), text="what is near {phrase} ?")
    total, n = np.zeros((2, 4)), 0
    for number, line in enumerate(lines):
        record = attnscope.picture_heatmap(model, str(tmp_path / f"{number}.png"), "what is near two cups ?")
        labels, picture = record.maps[0].queries.labels, record.pictures[0]
        words = [labels.index("two"), labels.index("cups")]
        on = record.weights[:, :, words][..., picture.cells]
        total += ((on * cover(picture, line["box"])).sum((-2, -1)) / on.sum((-2, -1))).sum(2)
        n += 2
    np.testing.assert_allclose(found.grid("decoder", "in_box"), total / n, atol=1e-5)
    back = attnscope.load_record(found.save(tmp_path / "heads.npz"))
    assert back.options["roles"]["grounding"]["measure"] == "grounds"
    path.write_text('{"image": "0.png", "phrase": "x"}', "utf-8")
    with pytest.raises(AttnscopeError, match="line 1 of .* is no reference"):
        attnscope.picture_heads(model, str(path), text="what ?")


def test_a_photo_that_cannot_be_read_is_listed_on_the_command_line(run: Run, tmp_path: Path) -> None:
    write_family(tmp_path / "model", "qwen2_vl")
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 60, 3), np.uint8)).save("a.png")
    Path("b.png").write_bytes(b"no picture")
    asked = ["heads", "--image", "*.png", "what is on the table ?", "-m", "model", "-o", "out", "-f", "csv"]
    status, out, err = run(*asked)
    assert status == 1 and "looks: gives its attention to the picture" in out
    assert "1 picture could not be read" in err and "decoder,0,0" in Path("out/heads.csv").read_text("utf-8")
