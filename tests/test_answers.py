"""What `heatmap`, `page` and `batch` answer of attention, beside figures: strongest links, means, words by words."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModel

import attnscope
from attnscope.drawing.cells import overlay
from attnscope.errors import AttnscopeError
from attnscope.questions.heatmap import Heatmap
from attnscope.questions.heatmap_figures import make_figures
from attnscope.questions.heatmap_terminal import show
from attnscope.questions.links import find_links
from attnscope.questions.map_changes import renormalise
from attnscope.questions.shares import find_shares
from attnscope.report.plain_text import cut, open_console
from attnscope.results.result import load_record as load
from attnscope.senses.photos import read_photo
from tests.cli_helpers import TIRED, elsewhere, loaded_once, require_one_line
from tests.conftest import csv_rows
from tests.record_helpers import map_of, page_of, record_of, simple, stems, tokens_of
from tests.senses_helpers import photo, write_vision

__all__ = ["elsewhere", "loaded_once"]


def test_a_heatmap_answers_before_it_lists_its_files(run):
    result = run("heatmap", TIRED, "-L", "3", "-o", "out", "--query", "it")
    title, *links, skipped, opened, first, _, _ = result.out.splitlines()
    assert len(links) == 5
    assert max(map(len, [title, *links])) <= 80
    assert skipped.startswith("links to or from special tokens are skipped")
    assert title.startswith("where “it” (token 10) attends most")
    assert links[0] == "L3H1  “it” → “animal”  0.68"
    assert len({line.split()[0] for line in links}) == 5  # heads, each once
    assert opened == f"open {Path(first).resolve().as_uri()}"
    assert first == "out/L03.png"
    assert run("heatmap", TIRED, "-L", "3", "-o", "out", "-q").out == "out/L03.png\nout/heatmap.npz\n"
    answer, opened, path = run("page", "--record", "out", "-o", "page.html").out.splitlines()
    assert answer.startswith("a page of all maps; largest weight outside sinks: L3H")
    assert opened == f"open {Path(path).resolve().as_uri()}"
    assert json.loads(run("page", "--record", "out", "-o", "page.html", "--json").out)["files"] == [
        "page.html"
    ]


def test_each_of_several_queries_has_a_line_and_lines_end_at_words(run):
    lines = run(
        "heatmap", TIRED, "--pick", "L3H1", "-o", "out", "--query", "it,because"
    ).out.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["L3H1", "“it”"], ["L3H1", "“because”"]]
    assert cut("the least quotation marks", 16, at_word=True) == "the least…"


@pytest.mark.parametrize("command", ["heads", "compare", "ablate"])
def test_words_that_the_tokenizer_lacks_are_counted(command, run):
    Path("texts.txt").write_text("The 😀 cat sat.\nA 𓀀 dog ran.\n", "utf-8")
    out = run(command, "--file", "texts.txt").out
    assert "2 words are unknown to the tokenizer, which reads [UNK] instead: 😀, 𓀀" in " ".join(
        out.split()
    )


def test_strongest_links_are_those_of_numpy_outside_sinks():
    tokens = tokens_of(["[CLS]", "a", "b", "c"], special=[0])
    attention = map_of(tokens, layers=2, heads=3, seed=1)
    weights = attention.weights.astype(np.float64)
    weights[:, :, 0] = weights[:, :, :, 0] = 0
    weights[:, :, range(4), range(4)] = 0
    expected = np.sort(weights.max((2, 3)).ravel())[::-1]
    assert [link.weight for link in find_links(record_of(attention), max_links=6)] == pytest.approx(
        expected.tolist()
    )


def test_a_nearly_uniform_model_is_told_how_to_see_more():
    flat = np.full((1, 2, 8, 8), 1 / 8, np.float32)
    record = attnscope.record_from_arrays(flat, [f"t{place}" for place in range(8)])
    lines = str(show(record, open_console(), draws_maps=False, prints_summary=True)).splitlines()
    assert lines[-1] == "none is above 0.2: --scale head shades each head by its own largest weight"


@pytest.mark.parametrize("pick", [None, ((0, 2), (1, 0), (1, 1))], ids=["all", "picked"])
@pytest.mark.parametrize(("over", "axis"), [("heads", 1), ("layers", 0), ("all", (0, 1))])
def test_means_over_heads_and_layers_are_those_of_numpy(over, axis, pick):
    record = simple(5, layers=2, heads=3, seed=4)
    weights = record.weights.astype(np.float64)
    if pick:
        record = record.only(pick)
        chosen = np.full(weights.shape[:2], np.nan)
        chosen[tuple(zip(*pick, strict=True))] = 1
        weights *= chosen[..., None, None]
    mean = record.average(over)
    np.testing.assert_allclose(mean.weights, np.nanmean(weights, axis=axis, keepdims=True), atol=1e-7)
    assert mean.mean_name == mean.changes[-1]
    assert mean.average("all") is mean
    assert stems(mean) == ["mean"]
    assert mean.mean_name in next(iter(make_figures(mean))).title
    mean.save("mean.npz")
    again = load("mean.npz")
    assert isinstance(again, Heatmap)
    assert again.maps[0].head_names == mean.maps[0].head_names
    named = [[row[1], row[2]] for row in again.rows()][1]
    assert named == {"heads": [0, "mean of heads"], "layers": ["mean", "H0"]}.get(
        over, ["mean", f"mean of {3 if pick else 6} heads"]
    )


def test_a_mean_of_heads_goes_through_every_command(run):
    text = ("heatmap", "The cat sat", "-L", "0-1", "-f", "npz,csv,png")
    run(*text, "-o", "whole")
    assert run(*text, "--mean", "heads", "-o", "mean").out.splitlines()[-3:-2] == ["mean/mean.png"]
    expected = load("whole")["weights"].reshape(2, 12, 5, 5).mean(1, dtype=np.float64)
    np.testing.assert_allclose(load("mean")["weights"], expected, atol=1e-7)
    run("show", "whole", "--mean", "heads", "-o", "again", "-f", "npz")
    np.testing.assert_array_equal(load("again")["weights"], load("mean")["weights"])
    assert "mean of heads" in run("page", "The cat sat", "--mean", "heads", "-o", "page.html").out
    assert '"means":{"0.0":"L0 mean of heads"' in Path("page.html").read_text("utf-8")
    Path("texts.txt").write_text("The cat sat\n", "utf-8")
    run("batch", "texts.txt", "-o", "many", "-f", "npz", "-L", "0-1", "--mean", "heads", "-q")
    np.testing.assert_allclose(
        load(next(Path("many").glob("*/heatmap.npz")))["weights"], expected, atol=1e-6
    )
    for option in ("-H", "-L"):
        require_one_line(run(*text, option, "mean"), "'mean' is not a number", 2)


def test_a_special_query_keeps_its_row_where_special_tokens_are_hidden(run):
    run(
        "heatmap",
        "The cat sat",
        "-L",
        "0",
        "--query",
        "[CLS]",
        "--hide-special",
        "-o",
        "out",
        "-f",
        "npz,png",
    )
    record = load("out")
    whole = load_whole(run)
    assert record.maps[0].queries.labels == ("[CLS]", *record.tokens) == ("[CLS]", "the", "cat", "sat")
    rows = whole[:, :4, 1:4].astype(np.float64)
    np.testing.assert_allclose(record["weights"], renormalise(rows), atol=1e-6)
    assert Path("out/query-000.png").is_file()
    assert find_links(record)[0].query != "[CLS]"
    assert find_links(record, "[CLS]")[0].query == "[CLS]"


def load_whole(run):
    """The weights of the same text with all tokens."""
    run("heatmap", "The cat sat", "-L", "0", "-o", "whole", "-f", "npz")
    return load("whole")["weights"]


load_model = attnscope.load
"""Bound before tests load each model once: the package keeps what it finds first."""

PARTS = {
    "the animal": (1, 2),
    "was too": (11, 12),
    "@3-5": (3, 4, 5),
    "@2": (2,),
    "it": (10,),
    "it,street": (8, 10),
}


@pytest.mark.parametrize(("source", "target"), [*pairwise(PARTS)])
def test_what_one_part_of_a_text_gives_another_is_what_numpy_sums(source, target):
    record = attnscope.heatmap(load_model("minilm"), TIRED, layers=[3, 4])
    shares = find_shares(record, source, target).table("heads")
    block = record.weights.astype(np.float64)[:, :, PARTS[source]][..., PARTS[target]]
    np.testing.assert_allclose(shares["share"], block.sum(-1).mean(-1).ravel(), atol=1e-12)
    assert shares["layer"].tolist() == [3] * 12 + [4] * 12


def test_shares_between_parts_are_a_table_a_map_and_a_row_of_each_text_in_a_batch(run):
    result = run("heatmap", TIRED, "--from", "it", "--to", "the animal", "-o", "out", "-f", "csv,svg")
    assert result.out.startswith("from “it” to “the animal”: L3H1 gives most: 0.")
    assert result.out.splitlines()[-2:] == ["out/shares.csv", "out/shares.svg"]
    assert "share of attention, 0 to 1" in Path("out/shares.svg").read_text("utf-8")
    Path("texts.txt").write_text(f"{TIRED}\nNo such words.\nIt saw the animal.\n", "utf-8")
    batch = ("batch", "texts.txt", "-L", "3", "--from", "it", "--to", "the animal", "-o", "many", "-q")
    assert run(*batch, "-f", "npz").status == 0
    assert run(*batch, "-f", "npz").status == 0
    rows = csv_rows(Path("many/shares.csv").read_text("utf-8"))
    assert [row["index"] for row in rows] == ["0"] * 12 + ["2"] * 12
    assert [int(row["head"]) for row in rows] == [*range(12)] * 2
    alone = csv_rows(Path("out/shares.csv").read_text("utf-8"))
    assert [float(row["share"]) for row in rows[:12]] == pytest.approx(
        [float(r["share"]) for r in alone[36:48]], abs=1e-6
    )
    require_one_line(run("heatmap", TIRED, "--from", "it", "--to", "the dog"), "no token is 'the dog'")
    require_one_line(run("heatmap", TIRED, "--from", "it"), "attention goes from one part to another", 2)


def test_a_table_of_the_largest_weights_of_each_query(run):
    run("heatmap", TIRED, "--pick", "L3H1", "--top", "3", "-o", "out", "-f", "csv,json,npz")
    weights = load("out").of(3, 1)
    rows = csv_rows(Path("out/heatmap.csv").read_text("utf-8"))
    expected = np.sort(weights, axis=1)[:, :-4:-1]
    np.testing.assert_array_equal(
        np.array([row["weight"] for row in rows], np.float32).reshape(-1, 3), expected
    )
    assert all(weights[int(row["query"]), int(row["key"])] == np.float32(row["weight"]) for row in rows)
    document = json.loads(Path("out/heatmap.json").read_text("utf-8"))
    assert "weights" not in document
    assert len(document["links"]) == len(rows) == 48


def test_without_sinks_rows_are_divided_by_what_other_keys_get(run):
    run("heatmap", TIRED, "-L", "3", "--without-sinks", "-o", "out", "-f", "npz")
    run("heatmap", TIRED, "-L", "3", "-o", "whole", "-f", "npz")
    weights = load("whole")["weights"].astype(np.float64)
    weights[..., [0, -1]] = 0
    np.testing.assert_allclose(load("out")["weights"], renormalise(weights), atol=1e-6)
    record = load("out")
    assert record.changes == ("without_sinks",)
    assert "special tokens get nothing" in str(next(iter(make_figures(record))).figure.notes)
    run("show", "whole", "--without-sinks", "-o", "again", "-f", "npz")
    np.testing.assert_array_equal(load("again")["weights"], record["weights"])


@pytest.mark.parametrize("scale", ["fixed", "head", "figure"])
def test_colours_are_logarithmic_beside_any_scale_and_the_bar_says_so(scale):
    record = simple(12, layers=1, heads=1)
    page = page_of(record, "L00H00", scale=scale, colours="log")
    top = 1.0 if scale == "fixed" else float(record.weights.max())
    expected = 1 + np.log10(np.maximum(record.weights[0, 0], top * 1e-4) / top) / 4
    np.testing.assert_allclose(page.maps[0].get_array(), expected, atol=1e-5)
    assert page.content.meaning.endswith("(logarithmic)")
    assert page._ticks[0].get_text() == f"{(1.0 if scale == 'head' else top) * 1e-4:g}"


@pytest.mark.parametrize("kind", ["vit", "dinov2"])
def test_a_photo_of_more_pixels_has_more_patches_and_eager_weights(kind, tmp_path):
    folder = write_vision(tmp_path / kind, kind)
    model = load_model(folder)
    pixels = photo()
    usual = attnscope.picture_heatmap(model, pixels)
    side = 2 * usual.picture.pixels.shape[0]
    large = attnscope.picture_heatmap(model, replace(read_photo(pixels), size=side))
    assert large.picture.pixels.shape == (side, side, 3)
    assert large.picture.grid == tuple(2 * n for n in usual.picture.grid)
    # The model's own eager attention on a photo of that size.
    eager = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    seen = processor(
        images=Image.fromarray(pixels), return_tensors="pt", size={"height": side, "width": side}
    )
    more = {"interpolate_pos_encoding": True} if kind == "vit" else {}
    with torch.no_grad():
        expected = eager(**seen, **more, output_attentions=True).attentions
    np.testing.assert_allclose(
        large.weights, np.stack([layer[0].numpy() for layer in expected]), atol=1e-6
    )
    with pytest.raises(AttnscopeError, match="no whole patches"):
        attnscope.picture_heatmap(model, replace(read_photo(pixels), size=side + 1))


def test_a_smooth_overlay_is_interpolated_and_squares_stay_the_default():
    black = np.zeros((8, 8, 3), np.uint8)
    patches = np.array([[0.0, 1.0], [0.0, 1.0]])
    grey = plt.get_cmap("gray")
    squares = overlay(black, patches, grey, 1.0)
    smooth = overlay(black, patches, grey, 1.0, is_smooth=True)
    assert len(np.unique(squares)) == 2 < len(np.unique(smooth))
    assert (np.diff(smooth[0, :, 0].astype(int)) >= 0).all()
    np.testing.assert_array_equal(smooth[:, [0, -1]], squares[:, [0, -1]])
