"""What heads of vision transformers do over pictures: every measure against its definition, and what a user sees."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import attnscope
from attnscope.core.catalogue import PICTURE_MEASURES
from attnscope.errors import AttnscopeError
from attnscope.report.head_maps import choose_scale
from attnscope.report.wording import corpus_notes
from attnscope.senses.photos import read_photo
from tests.heads_helpers import after, heads_in
from tests.senses_helpers import dense_float64, photo, write_vision

ARCHITECTURES = {
    "vit": ("vit", {}),
    "registers": ("dinov2_with_registers", {"num_register_tokens": 2}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("vision")
    return {
        name: write_vision(home / name, kind, image=40, heads=3, **more)
        for name, (kind, more) in ARCHITECTURES.items()
    }


def pictures():
    """Three that differ: slopes, noise, and a flat one with a bright square."""
    rng = np.random.default_rng(0)
    square = np.full((40, 40, 3), 90, np.uint8)
    square[10:26, 3:20] = (250, 200, 30)
    return [photo(), rng.integers(0, 256, (50, 50, 3), np.uint8), square]


# The definitions, in float64 and plain loops -------------------------------------------------------------------------


def defined(weights, grid):
    """Sum and count of every measure of one head, (query, key)."""
    rows, columns = grid
    first = len(weights) - rows * columns
    sums = dict.fromkeys(PICTURE_MEASURES, 0.0)
    counts = dict(sums)

    def add(name, amount, count):
        sums[name] += amount
        counts[name] += count

    for q in range(first, len(weights)):
        row = weights[q].tolist()
        mass = sum(row[first:])
        add("resting", sum(row[:first]), 1)
        add("entropy_nats", -sum(w * math.log(w) for w in row if w > 0), 1)
        add("self_patch", row[q], mass)
        for k in range(rows * columns):
            dy = abs((q - first) // columns - k // columns)
            dx = abs((q - first) % columns - k % columns)
            w = row[first + k]
            add("distance_patches", w * math.sqrt(dy * dy + dx * dx), w)
            add("near_patches", w if max(dy, dx) == 1 else 0, w)
    return {name: (sums[name], counts[name]) for name in PICTURE_MEASURES}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_measure_is_its_definition_on_the_models_own_dense_weights(name, folders):
    model = attnscope.load(folders[name])
    found = attnscope.picture_heads(model, pictures())
    totals = {}
    for given in pictures():
        seen = model.image_reader.prepare_photo(read_photo(given))
        for layer, weights in enumerate(dense_float64(folders[name], seen.inputs["pixel_values"])):
            for head, rows in enumerate(weights):
                for measure, part in defined(rows, seen.picture.grid).items():
                    key = (layer, head, measure)
                    totals[key] = totals.get(key, np.zeros(2)) + part
    assert [head.name for head in heads_in(found)] == [
        f"L{layer}H{head}" for layer in range(2) for head in range(3)
    ]
    for head in heads_in(found):
        assert set(head.measures) == set(PICTURE_MEASURES)
        for measure, estimate in head.measures.items():
            total, count = totals[head.layer, head.head, measure]
            assert estimate.value == pytest.approx(total / count, abs=5e-5), measure
            assert estimate.count == pytest.approx(count, rel=1e-4), measure
            assert estimate.low <= estimate.value <= estimate.high
    # Heads that all did the same would agree with anything.
    assert float(np.ptp(found["heads"].grid("distance_patches", "encoder"))) > 0.05


# What a user sees ---------------------------------------------------------------------------------------------------


@pytest.fixture
def run(run, monkeypatch):
    """Runs the command in this process, standing in a folder with three photos, the second of them damaged."""
    monkeypatch.setenv("COLUMNS", "110")
    Path("photos").mkdir()
    for name, pixels in zip("abc", pictures(), strict=True):
        Image.fromarray(pixels).save(f"photos/{name}.png")
    Path("photos/b.png").write_bytes(Path("photos/b.png").read_bytes()[:300])
    return run


def test_a_damaged_picture_is_left_out_and_the_rest_is_studied(run, folders):
    model = str(folders["registers"])
    code, out, err = run(
        "heads", "--image", "photos/*.png", "-m", model, "-o", "out", "-f", "npz,csv,png"
    )
    assert code == 1
    assert "skipped: photos/b.png: cannot be read as a picture" in err
    assert "error: 1 picture could not be read" in err
    assert "2 pictures, 50 patches: photos/a.png" in out
    assert "distance_patches" in out
    assert "uniform" in out
    assert "[" in next(line for line in out.splitlines() if line.startswith("near_patches"))
    files = out.splitlines()[-3:]
    assert files == ["out/heads.npz", "out/heads.csv", "out/measures.png"]
    assert not Path("out/roles.png").exists()
    found = attnscope.load_record("out/heads.npz")
    assert found.corpus["of"] == "pictures"
    assert found.corpus["grids"] == [[5, 5]]
    assert len(found.corpus["problems"]) == 1
    assert Path("out/heads.csv").read_text("utf-8").splitlines()[0].startswith("kind,layer,head,role")
    assert choose_scale(found["heads"], "self_patch").baseline_text == "0.0400"
    code, again, _ = run("show", "out", "--measures", "near_patches", "-o", "again", "-f", "json")
    assert code == 0
    assert again.splitlines()[:3] == out.splitlines()[:3]
    assert json.loads(Path("again/heads.json").read_text("utf-8"))["corpus"]["of"] == "pictures"


def test_an_interruption_keeps_the_pictures_that_were_done(folders):
    found = attnscope.picture_heads(attnscope.load(folders["vit"]), pictures(), after(0))
    assert (found.corpus["n_texts"], found.corpus["complete"]) == (1, False)
    assert found.run["notes"] == ["of one picture there are no intervals"]
    assert "it was stopped early: these are the pictures up to there" in corpus_notes(found)


def test_what_cannot_be_is_refused_in_one_line(run, folders):
    vit = str(folders["vit"])
    for arguments, code, told in (
        (
            ("photos/b.png", "-m", vit),
            1,
            "no picture is left of 1: photos/b.png: cannot be read as a picture",
        ),
        (("none/*.jpg", "-m", vit), 1, "there is no file none/*.jpg"),
        (("photos/a.png", "-m", "minilm"), 1, "sees no pictures"),
        (("photos/a.png", "a question", "-m", vit), 2, "TEXT cannot be given beside --image"),
        (("photos/a.png", "-m", vit, "--measures", "induction"), 2, "there is no measure 'induction'"),
    ):
        found, out, err = run("heads", "--image", *arguments)
        assert found == code
        assert out == ""
        assert told in err
        assert "Traceback" not in err
    with pytest.raises(AttnscopeError, match="no picture to study"):
        attnscope.picture_heads(attnscope.load(vit), [])
