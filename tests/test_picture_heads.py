"""What heads of vision transformers do over pictures: every measure against its definition, and what a user sees."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

import attnscope
from attnscope.core.attention import tiles
from attnscope.core.attention.seam import AttentionCall
from attnscope.core.senses import picture_sums
from attnscope.core.senses.picture_measures import PICTURE_MEASURES, cielab, gradient, picture_facts
from attnscope.core.senses.picture_sums import PictureSums
from attnscope.errors import AttnscopeError
from attnscope.questions.places import Picture
from attnscope.report.head_maps import scale_of
from attnscope.report.wording import corpus_notes
from attnscope.senses.photos import read_photo
from tests.conftest import Run
from tests.heads_helpers import after, heads_in
from tests.senses_helpers import dense_float64, photo, write_vision

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit", {}),
    "registers": ("dinov2_with_registers", {"num_register_tokens": 2}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("vision")
    return {
        name: write_vision(home / name, kind, image=40, heads=3, **more) for name, (kind, more) in ARCHITECTURES.items()
    }


def pictures() -> list[NDArray[np.uint8]]:
    """Three that differ: slopes, noise, and a flat one with a bright square."""
    rng = np.random.default_rng(0)
    square = np.full((40, 40, 3), 90, np.uint8)
    square[10:26, 3:20] = (250, 200, 30)
    return [photo(), rng.integers(0, 256, (50, 50, 3), np.uint8), square]


# The definitions, in float64 and plain loops -------------------------------------------------------------------------


def lab_of(rgb: list[float]) -> list[float]:
    """CIELAB of linear light by the textbook, sRGB's white being (1, 1, 1)."""
    rows = [(0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505)]
    fs = []
    for row in rows:
        t = sum(m * c for m, c in zip(row, rgb, strict=True)) / sum(row)
        fs.append(t ** (1 / 3) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116)
    return [116 * fs[1] - 16, 500 * (fs[0] - fs[1]), 200 * (fs[1] - fs[2])]


def facts_of(picture: Picture) -> tuple[list[list[float]], list[float]]:
    """Colour and gradient of each patch, pixel by pixel."""
    pixels, (high, wide) = picture.pixels / 255, picture.patch
    height, width = pixels.shape[:2]
    luma = [[0.2126 * p[0] + 0.7152 * p[1] + 0.0722 * p[2] for p in row] for row in pixels.tolist()]
    colours, edges = [], []
    for row in range(picture.grid[0]):
        for column in range(picture.grid[1]):
            light, steep = [0.0, 0.0, 0.0], 0.0
            for y in range(row * high, (row + 1) * high):
                for x in range(column * wide, (column + 1) * wide):
                    for c in range(3):
                        v = pixels[y, x, c]
                        light[c] += v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4
                    up, down = max(y - 1, 0), min(y + 1, height - 1)
                    left, right = max(x - 1, 0), min(x + 1, width - 1)
                    dy = (luma[down][x] - luma[up][x]) / (down - up)
                    dx = (luma[y][right] - luma[y][left]) / (right - left)
                    steep += math.sqrt(dx * dx + dy * dy)
            colours.append(lab_of([part / (high * wide) for part in light]))
            edges.append(steep / (high * wide))
    return colours, edges


def defined(weights: NDArray[np.float64], picture: Picture, before: list[str]) -> dict[str, tuple[float, float]]:
    """Sum and count of every measure of one head, (query, key)."""
    (rows, columns), first, n = picture.grid, len(before), len(weights)
    colours, edges = facts_of(picture)
    mean = sum(edges) / len(edges)
    sums: dict[str, float] = dict.fromkeys(PICTURE_MEASURES, 0.0)
    counts = dict(sums)

    def add(name: str, amount: float, count: float) -> None:
        sums[name] += amount
        counts[name] += count

    for q in [*range(first, n), 0]:
        row, ending = weights[q].tolist(), "" if q >= first else "_from_cls"
        mass = sum(row[first:])
        add("resting" + ending, sum(row[:first]), 1)
        add("entropy_nats" + ending, -sum(w * math.log(w) for w in row if w > 0), 1)
        add("edges" + ending, sum(w * g / mean for w, g in zip(row[first:], edges, strict=True)), mass)
        if ending:
            continue
        add("cls", row[0], 1)
        if before[1:]:
            add("registers", sum(row[1:first]), 1)
        add("max_weight", max(row[first:]), mass)
        add("self_patch", row[q], mass)
        others = sorted(math.dist(colours[q - first], c) for k, c in enumerate(colours) if k != q - first)
        median = others[(len(others) - 1) // 2]
        for k in range(rows * columns):
            dy, dx = abs((q - first) // columns - k // columns), abs((q - first) % columns - k % columns)
            w = row[first + k]
            add("distance_patches", w * math.sqrt(dy * dy + dx * dx), w)
            add("rows_apart_patches", w * dy, w)
            add("columns_apart_patches", w * dx, w)
            add("near_patches", w if max(dy, dx) == 1 else 0, w)
            if dy or dx:
                add("similar_colour", w if math.dist(colours[q - first], colours[k]) <= median + 1e-9 else 0, w)
    return {name: (sums[name], counts[name]) for name in PICTURE_MEASURES}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_measure_is_its_definition_on_the_models_own_dense_weights(name: str, folders: dict[str, Path]) -> None:
    model: Any = attnscope.load(folders[name])
    found = attnscope.picture_heads(model, pictures())
    totals: dict[tuple[int, int, str], NDArray[np.float64]] = {}
    even: dict[str, NDArray[np.float64]] = {}
    for given in pictures():
        seen = model.eyes.see(read_photo(given))
        before = [label for label, special in zip(seen.tokens.labels, seen.tokens.special, strict=True) if special]
        dense = dense_float64(folders[name], seen.inputs["pixel_values"])
        for layer, weights in enumerate(dense):
            for head, rows in enumerate(weights):
                for measure, part in defined(rows, seen.picture, before).items():
                    key = (layer, head, measure)
                    totals[key] = totals.get(key, np.zeros(2)) + part
        n = len(seen.tokens)
        for measure, part in defined(np.full((n, n), 1 / n), seen.picture, before).items():
            even[measure] = even.get(measure, np.zeros(2)) + part
    assert [head.name for head in heads_in(found)] == [f"L{layer}H{head}" for layer in range(2) for head in range(3)]
    expected = {measure for measure in PICTURE_MEASURES if measure != "registers" or name == "registers"}
    for head in heads_in(found):
        defined_here = {name: one for name, one in head.measures.items() if np.isfinite(one.value)}
        assert set(defined_here) == expected
        for measure, estimate in defined_here.items():
            total, count = totals[head.layer, head.head, measure]
            assert estimate.value == pytest.approx(total / count, abs=5e-5), measure
            assert estimate.count == pytest.approx(count, rel=1e-4), measure
            assert estimate.baseline == pytest.approx(even[measure][0] / even[measure][1], abs=1e-6), measure
            assert estimate.low <= estimate.value <= estimate.high
    # Heads that all did the same would agree with anything.
    assert float(np.ptp(found["heads"].grid("distance_patches", "encoder"))) > 0.05
    assert float(np.ptp(found["heads"].grid("similar_colour", "encoder"))) > 0.05


def test_uniform_attention_has_the_value_of_the_baseline() -> None:
    pixels = photo(24, 40)
    facts = picture_facts(pixels, (3, 5), ("CLS", "REG0", "REG1"))
    probe, n = PictureSums(facts), 18
    rng = torch.Generator().manual_seed(0)
    value = torch.randn(1, 2, n, 4, generator=rng)
    keys = torch.randn(1, 2, n, 4, generator=rng)
    call = AttentionCall(layer=0, kind="encoder", query=torch.zeros_like(keys), key=keys, value=value, scale=0.5)
    output = probe(call)
    torch.testing.assert_close(output, value.mean(2, keepdim=True).expand(1, 2, n, 4))
    assert probe.uniform is not None
    sums = probe.sums["encoder"][0]
    np.testing.assert_allclose(sums.sums, np.repeat(probe.uniform.sums, 2, 1), rtol=1e-5)
    np.testing.assert_allclose(sums.counts, np.repeat(probe.uniform.counts, 2, 1), rtol=1e-5)
    value_of = dict(zip(PICTURE_MEASURES, (probe.uniform.sums / probe.uniform.counts)[:, 0].tolist(), strict=True))
    # In closed form. 3 x 5 patches have 12 + 10 pairs of neighbours that share a side and 16 that share a corner.
    neighbours = 2 * (12 + 10 + 16)
    assert value_of["near_patches"] == pytest.approx(neighbours / 15**2)
    assert [value_of["self_patch"], value_of["max_weight"]] == pytest.approx([1 / 15, 1 / 15])
    assert value_of["rows_apart_patches"] == pytest.approx((4 * 1 + 2 * 2) / 9)
    assert value_of["columns_apart_patches"] == pytest.approx((8 * 1 + 6 * 2 + 4 * 3 + 2 * 4) / 25)
    assert [value_of["edges"], value_of["edges_from_cls"]] == pytest.approx([1, 1])
    assert value_of["resting"] == pytest.approx(3 / n) and value_of["entropy_nats"] == pytest.approx(math.log(n))
    with pytest.raises(RuntimeError, match="twice"):
        probe(call)


def test_sums_do_not_depend_on_how_queries_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = picture_facts(photo(40, 56), (5, 7), ("CLS", "REG0", "REG1"))
    rng = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, 2, 38, 4, generator=rng) for _ in range(3))
    call = AttentionCall(layer=0, kind="encoder", query=query, key=key, value=value, scale=1.0)
    weights = torch.softmax(query.double() @ key.double().transpose(2, 3), -1)
    whole, cut = PictureSums(facts), PictureSums(facts)
    output = whole(call)
    torch.testing.assert_close(output, (weights @ value.double()).float())
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 1)  # 16 queries a tile, 3 tiles
    monkeypatch.setattr(picture_sums, "_ROWS", 7)
    torch.testing.assert_close(cut(call), output)
    for name in ("sums", "counts"):
        ours, theirs = (getattr(probe.sums["encoder"][0], name) for probe in (cut, whole))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert cut.uniform is not None and whole.uniform is not None
    np.testing.assert_allclose(cut.uniform.sums, whole.uniform.sums, rtol=1e-9)
    by_row = torch.special.entr(weights[0]).sum(-1)
    np.testing.assert_allclose(whole.sums_of(weights[0], by_row, 0)[0], whole.sums["encoder"][0].sums, rtol=1e-5)


def test_a_flat_picture_has_no_edges_and_one_colour() -> None:
    facts = picture_facts(np.full((16, 24, 3), 70, np.uint8), (2, 3), ())
    assert facts.edges is None
    weights = torch.eye(6)[None] * 0.5 + 0.5 / 6
    added = PictureSums(facts).sums_of(weights, torch.special.entr(weights).sum(-1), 0)[..., 0].tolist()
    sums, counts = (dict(zip(PICTURE_MEASURES, part, strict=True)) for part in added)
    assert counts["edges"] == counts["cls"] == counts["resting_from_cls"] == 0
    assert sums["similar_colour"] == pytest.approx(counts["similar_colour"]) and counts["similar_colour"] > 2
    assert picture_facts(np.zeros((8, 8, 3), np.uint8), (1, 1), ()).reach.tolist() == [math.inf]


def test_colours_and_gradients_are_those_of_the_books() -> None:
    # sRGB red under D65, as every converter gives it.
    np.testing.assert_allclose(cielab(np.array([1.0, 0, 0])), [53.24, 80.09, 67.20], atol=0.05)
    np.testing.assert_allclose(cielab(np.ones(3)), [100, 0, 0], atol=1e-9)
    slope = np.repeat((np.arange(5.0) / 10)[None, :, None], 3, 2).repeat(4, 0)
    np.testing.assert_allclose(gradient(slope), np.full((4, 5), 0.1))


# What a user sees ---------------------------------------------------------------------------------------------------


@pytest.fixture
def run(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command in this process, standing in a folder with three photos, the second of them damaged."""
    monkeypatch.setenv("COLUMNS", "110")
    Path("photos").mkdir()
    for name, pixels in zip("abc", pictures(), strict=True):
        Image.fromarray(pixels).save(f"photos/{name}.png")
    Path("photos/b.png").write_bytes(Path("photos/b.png").read_bytes()[:300])
    return run


def test_a_damaged_picture_is_left_out_and_the_rest_is_studied(run: Run, folders: dict[str, Path]) -> None:
    model = str(folders["registers"])
    code, out, err = run("heads", "--image", "photos/*.png", "-m", model, "-o", "out", "-f", "npz,csv,png")
    assert code == 1
    assert "skipped: photos/b.png: is damaged" in err and "error: 1 picture could not be read" in err
    assert "2 pictures, 50 patches: photos/a.png" in out and "distance_patches" in out and "uniform" in out
    assert "[" in next(line for line in out.splitlines() if line.startswith("near_patches"))
    files = out.splitlines()[-3:]
    assert files == ["out/heads.npz", "out/heads.csv", "out/measures.png"]
    assert not Path("out/roles.png").exists()
    found = attnscope.load_record("out/heads.npz")
    assert found.corpus["of"] == "pictures" and found.corpus["grids"] == [[5, 5]] and len(found.corpus["problems"]) == 1
    assert Path("out/heads.csv").read_text("utf-8").splitlines()[0].startswith("kind,layer,head,role")
    assert scale_of(found["heads"], "self_patch").baseline_text == "0.040"
    code, again, _ = run("show", "out", "--measures", "near_patches", "-o", "again", "-f", "json")
    assert code == 0 and again.splitlines()[:3] == out.splitlines()[:3]
    assert json.loads(Path("again/heads.json").read_text("utf-8"))["corpus"]["of"] == "pictures"


def test_an_interruption_keeps_the_pictures_that_were_done(folders: dict[str, Path]) -> None:
    found = attnscope.picture_heads(attnscope.load(folders["vit"]), pictures(), after(0))
    assert (found.corpus["n_texts"], found.corpus["complete"]) == (1, False)
    assert found.run["notes"] == ["of one picture there are no intervals"]
    assert "it was stopped early: these are the pictures up to there" in corpus_notes(found)


def test_what_cannot_be_is_refused_in_one_line(run: Run, folders: dict[str, Path]) -> None:
    vit = str(folders["vit"])
    for arguments, code, told in (
        (("photos/b.png", "-m", vit), 1, "no picture is left of 1: photos/b.png: is damaged"),
        (("none/*.jpg", "-m", vit), 1, "there is no file none/*.jpg"),
        (("photos/a.png", "-m", "minilm"), 1, "sees no pictures"),
        (("photos/a.png", "a question", "-m", vit), 2, "TEXT cannot be given beside --image"),
        (("photos/a.png", "-m", vit, "--measures", "induction"), 2, "there is no measure 'induction'"),
    ):
        found, out, err = run("heads", "--image", *arguments)
        assert (found, out) == (code, "") and told in err and "Traceback" not in err
    with pytest.raises(AttnscopeError, match="no picture to study"):
        attnscope.picture_heads(attnscope.load(vit), [])
