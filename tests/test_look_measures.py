"""What heads do between words and pictures: the measures in closed form, against plain loops, and on a model."""

import math
from pathlib import Path

import numpy as np
import pytest

import attnscope
from attnscope.core.look_measures import LOOK_MEASURES, LookFacts, look_sums
from attnscope.errors import AttnscopeError
from tests.vision_language_helpers import write_family

NAMES = list(LOOK_MEASURES)
CELLS = np.arange(3, 18).reshape(3, 5)
FACTS = LookFacts(23, 19, np.array([True, False, True, True]), CELLS, np.arange(1, 18))


def values(weights: np.ndarray) -> dict[str, np.ndarray]:
    found = look_sums(weights, FACTS)
    return dict(zip(NAMES, found.sums / found.counts, strict=True))


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
