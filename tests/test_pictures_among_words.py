"""Models that read pictures and write words: their weights, and which token stands for which part of a photo."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import attnscope
from attnscope.core.attention.seam import attend
from attnscope.errors import AttnscopeError
from attnscope.models.hf.senses import patch_places
from attnscope.models.hf.senses.patch_places import make_colour_ramps
from attnscope.questions.heatmap_figures import choose_words, make_figures, weigh_keys_of_word
from attnscope.senses.photos import read_photo
from tests.record_helpers import require_lossless, stems
from tests.vision_language_helpers import ACROSS, FAMILIES, noise, write_family

SIZES = ((150, 230), (310, 97))
"""Height and width of photos: odd and narrow."""
QUESTION = "what is on the table ?"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("families")
    return {name: write_family(home / name, name) for name in [*FAMILIES, *ACROSS]}


@pytest.fixture(scope="module")
def models(folders):
    return {name: attnscope.load(folder) for name, folder in folders.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_are_those_of_eager_attention(name, folders, models):
    from transformers import AutoModelForImageTextToText

    model = models[name]
    assert (model.info.path, model.info.kinds, model.info.checked) == ("seam", ("decoder",), True)
    photos = [noise(*SIZES[0]), noise(*SIZES[1], seed=1)]
    made = attnscope.picture_heatmap(model, photos, QUESTION, generate=5)
    seen = model.image_text_reader.prepare_prompt([read_photo(photo) for photo in photos], QUESTION, 5)
    eager = AutoModelForImageTextToText.from_pretrained(
        folders[name], attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        output = eager(**seen.inputs, output_attentions=True)
    first = int(max(picture.cells.max() for picture in made.pictures)) + 1
    true = torch.stack([weights[0, :, first:] for weights in output.attentions]).numpy()
    assert made.weights.shape == true.shape
    assert made.maps[0].part == (first, 0, true.shape[-1], true.shape[-1])
    assert float(np.ptp(made.weights)) > 0.1  # flat maps would agree with anything
    np.testing.assert_allclose(made.weights, true, atol=2e-5)
    # What was written token by token is what one forward pass over all of it says.
    n_given = made.maps[0].queries.n_given
    wanted = output.logits[0, :-1].clone()
    wanted[:, int(seen.inputs["input_ids"][0, made.pictures[0].cells[0, 0]])] = -torch.inf
    written = seen.inputs["input_ids"][0, first + n_given :]
    assert len(written) == len(made.maps[0].queries) - n_given > 0
    assert wanted[first + n_given - 1 :].argmax(-1).tolist() == written.tolist()


def _embeddings(model, photos):
    """What is seen, and what the language model is given at each token; or what cross-attention goes to."""
    seen = model.image_text_reader.prepare_prompt([read_photo(photo) for photo in photos], QUESTION)
    base = model.image_text_reader.model.base
    if seen.axes:
        return seen, _cross_keys(model.image_text_reader.model, seen.inputs)
    inner = getattr(base, "language_model", None) or base.text_model
    kept = []
    hook = inner.register_forward_pre_hook(
        lambda *given: kept.append(given[2]["inputs_embeds"]), with_kwargs=True
    )
    try:
        with torch.no_grad():
            base(**seen.inputs)
    finally:
        hook.remove()
    return seen, kept[0][0].numpy()


def _cross_keys(network, inputs):
    """The keys of the first cross-attention, (key, d)."""
    kept = []

    def keep(call):
        if call.kind == "cross":
            kept.append(call.key[0].transpose(0, 1).flatten(1).numpy())
        return attend(call)

    with torch.no_grad():
        network.run_inputs(inputs, keep)
    return kept[0]


def _most_changed(picture, change):
    """Its tokens but for those that change by what filters smear of the spot over the edge of a cell."""
    cells = picture.cells.ravel()
    return cells[change[cells] > 0.35 * change[cells].max()].tolist()


@pytest.mark.parametrize("name", [*FAMILIES, *ACROSS])
@pytest.mark.parametrize("size", SIZES)
def test_a_change_of_the_photo_changes_the_tokens_of_the_cell_where_it_lies(
    name, size, models, monkeypatch
):
    model, (height, width) = models[name], size
    attends = (
        *(".out_proj.", ".o_proj.", ".projection_layer.", "attn.proj."),
        *("self_attn.projection.", "attention.output.dense."),
    )
    for key, parameter in model.image_text_reader.model.base.named_parameters():
        if ("vis" in key or key.startswith("encoder.")) and any(part in key for part in attends):
            # What is left of the tower looks at each patch alone, as long as this test lasts: others use the model.
            monkeypatch.setattr(parameter, "data", torch.zeros_like(parameter))
    photo = noise(height, width)
    # Those see one photo at a time.
    before_it = [noise(160, 160, seed=3)] if name in ["mllama", *FAMILIES] else []
    seen, before = _embeddings(model, [*before_it, photo])
    mine = [
        picture
        for picture in seen.pictures
        if picture.size == (width, height) and "(2)" in picture.source
    ]
    mine = mine or [picture for picture in seen.pictures if picture.size == (width, height)]
    # Of the cells those whose middle lies in the photo: some processors fill up what they give.
    left, top, right, bottom = mine[0].area
    across = right - left
    down = bottom - top
    rows, columns = mine[0].grid
    assert rows * columns >= 8
    middles_y = top + (np.arange(rows) + 0.5) * down / rows
    middles_x = left + (np.arange(columns) + 0.5) * across / columns
    edge_y = down / rows / 4
    edge_x = across / columns / 4
    inside_y = np.flatnonzero((middles_y > edge_y) & (middles_y < height - edge_y))
    inside_x = np.flatnonzero((middles_x > edge_x) & (middles_x < width - edge_x))
    corners = [(inside_y[0], inside_x[0]), (inside_y[0], inside_x[-1]), (inside_y[-1], inside_x[0])]
    drawn = np.random.default_rng(1)
    for row, column in [*corners, *((drawn.choice(inside_y), drawn.choice(inside_x)) for _ in range(2))]:
        y = middles_y[row]
        x = middles_x[column]
        changed = photo.copy()
        half_y = max(1, round(down / rows / 8))
        half_x = max(1, round(across / columns / 8))
        spot = changed[int(y) - half_y : int(y) + half_y + 1, int(x) - half_x : int(x) + half_x + 1]
        spot[:] = 255 - spot
        spot[..., 0] = 255 * (spot[..., 0] < 128)
        _, after = _embeddings(model, [*before_it, changed])
        change = np.abs(after - before).max(-1)
        moved = {place for picture in mine for place in _most_changed(picture, change)}
        assert {*np.flatnonzero(change).tolist()} <= {
            *np.concatenate([p.cells.ravel() for p in mine]).tolist()
        }
        assert mine[0].cells[row, column] in moved
        expected = {int(mine[0].cells[row, column])}
        for small in mine[1:]:
            reach = 0.15  # of a cell: what lies so close to an edge may touch the cell beyond
            at_y = (y - top) / down * small.grid[0]
            at_x = (x - left) / across * small.grid[1]
            near = [
                (int(at_y + dy), int(at_x + dx))
                for dy in (-reach, 0, reach)
                for dx in (-reach, 0, reach)
                if 0 <= at_y + dy < small.grid[0] and 0 <= at_x + dx < small.grid[1]
            ]
            assert small.cells[int(at_y), int(at_x)] in moved
            expected |= {int(small.cells[place]) for place in near}
        assert moved <= expected, (row, column)


@pytest.mark.parametrize("name", [*FAMILIES, *ACROSS])
def test_pictures_are_what_was_seen_of_the_photo(name, models):
    """The picture put together from tiles is the photo, resized: a photo of slopes stays one of slopes."""
    height, width = SIZES[0]
    seen = models[name].image_text_reader.prepare_prompt(
        [read_photo(make_colour_ramps(height, width))], QUESTION
    )
    for picture in seen.pictures:
        left, top, right, bottom = picture.area
        x = left + (np.arange(picture.pixels.shape[1]) + 0.5) / picture.pixels.shape[1] * (right - left)
        y = top + (np.arange(picture.pixels.shape[0]) + 0.5) / picture.pixels.shape[0] * (bottom - top)
        inside = picture.pixels[:, :, 2] > 250
        assert inside.mean() > (0.6 if name in ("mllama", "donut") else 0.85)
        wanted = np.broadcast_to(255 * (x - 0.5) / (width - 1), inside.shape)
        np.testing.assert_allclose(picture.pixels[:, :, 0][inside], wanted[inside], atol=6)
        wanted = np.broadcast_to((255 * (y - 0.5) / (height - 1))[:, None], inside.shape)
        np.testing.assert_allclose(picture.pixels[:, :, 1][inside], wanted[inside], atol=8)
        share = (right - left) * (bottom - top) / height / width
        # LLaVA-next keeps whole patches, and with them some of what the photo is filled up with.
        slack = 0.15 if name == "llava_next" else 0.02
        # The middle square is cut out; two by two tiles, and 42 of 48 lines are filled.
        whole = {"llava": 150 / 230, "mllama": 230 / 150, "donut": 48 / 42}
        assert share == pytest.approx(whole.get(name, 1), abs=slack)


# Records, figures, the command line -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def record(models):
    return attnscope.picture_heatmap(models["internvl"], noise(*SIZES[0]), QUESTION, generate=5)


def test_records_are_read_back_without_loss(record, tmp_path):
    require_lossless(record, tmp_path)
    assert len(record.pictures) == 2


def test_a_weight_is_laid_over_the_cell_of_its_token(record):
    attention = record.maps[0]
    picture = record.pictures[0]
    row = record.of(1, 2)[-1]
    for (i, j), place in np.ndenumerate(picture.cells):
        assert picture.over(row)[i, j] == row[place]
    words, _ = choose_words(record)
    written = range(attention.queries.n_given, len(attention.queries))
    assert [word.tokens for word in words] == [
        (place,) for place in written if not attention.queries.special[place]
    ]
    mean = weigh_keys_of_word(record, words[-1], record.chosen(attention))
    np.testing.assert_allclose(
        mean, attention.weights[:, :, words[-1].tokens[0]].astype(float).mean((0, 1))
    )
    drawn = next(make_figures(record))
    assert drawn.stem == "words"
    np.testing.assert_allclose(drawn.values[len(words) - 1], picture.over(mean), atol=1e-7)
    assert (
        drawn.figure.captions[len(words) - 1].split(" · ")[1]
        == f"{mean[picture.cells].sum():.0%} on the picture"
    )


def test_words_are_merged_and_pictures_fold_into_one_key(record):
    merged = record.merge_words()
    folded = record.with_pictures_as_one()
    for picture, moved in zip(record.pictures, merged.pictures, strict=True):
        np.testing.assert_allclose(
            moved.over(merged.of(0, 1)[-1]), picture.over(record.of(0, 1)[-1]), atol=1e-6
        )
    held = np.concatenate([picture.cells.ravel() for picture in record.pictures])
    photo = folded.maps[0].keys.labels.index(record.pictures[0].source)
    np.testing.assert_allclose(folded.weights[..., photo], record.weights[..., held].sum(-1), atol=1e-6)
    np.testing.assert_allclose(folded.weights.sum(-1), 1, atol=1e-5)


def test_figures_and_queries(record, tmp_path):
    assert stems(record, "table")[:3] == ["words", "words-small", "word-00-table"]
    first = record.maps[0].part[0]
    place = record.maps[0].queries.labels.index("table")
    assert choose_words(record, f"@{first + place}")[0][0].name == "table"
    with pytest.raises(AttnscopeError, match="no word that looks at the pictures is 'zebra'"):
        choose_words(record, "zebra")
    paths = record.only([(0, 1)]).draw(tmp_path, ["png"], query="table")
    names = ["words.png", "words-small.png", "word-00-table.png", "text-L00H01.png"]
    assert [path.name for path in paths] == names


def test_the_command_line(run, folders):
    for name, seed in (("a.png", 0), ("b.png", 1)):
        Image.fromarray(noise(90, 120, seed)).save(name)
    model = ("-m", str(folders["qwen3_vl"]))
    photos = ("--image", "a.png", "--image", "b.png")
    code, out, err = run(
        "heatmap", *photos, QUESTION, *model, "--query", "table", "-o", "out", "-f", "png,npz,text"
    )
    assert code == 0
    assert "a.png, 120 × 90" in out
    assert "out/word-00-table-2.png" in out
    assert not err
    code, again, _ = run("show", "out", "-o", "again", "--query", "table")
    assert code == 0
    assert "again/words-2.png" in again
    assert (Path("again") / "words.png").read_bytes() == (Path("out") / "words.png").read_bytes()
    for arguments, told in (
        (("--image", "a.png", *model), "give a text"),
        ((*photos, *model), "several pictures are shown among words"),
        (("--image", "a.png", "the cat", "-m", "minilm"), "reads no pictures among words"),
        (("--image", "a.png", QUESTION, *model, "--pool", "64"), "--pool cannot be given"),
    ):
        code, _, err = run("heatmap", *arguments)
        assert code in (1, 2), arguments
        assert told in err


def test_a_family_that_is_not_known_is_one_line(models, monkeypatch):
    monkeypatch.delitem(patch_places.FAMILIES, "gemma3")
    with pytest.raises(
        AttnscopeError, match="of models of type gemma3 it is not known which token stands"
    ):
        attnscope.picture_heatmap(models["gemma3"], noise(40, 40), QUESTION)


def test_a_page_has_each_photo_as_one_key(record, models):
    squared = record.make_square().maps[0]
    folded = record.with_pictures_as_one().maps[0]
    first = len(squared.keys) - len(record.maps[0].queries)
    assert squared.part is None
    assert squared.weights.shape[2:] == (len(folded.keys),) * 2
    np.testing.assert_array_equal(squared.weights[:, :, first:], folded.weights)
    assert not squared.weights[:, :, :first].any()
    assert squared.keys.labels[first:] == record.maps[0].queries.labels
    text = attnscope.heatmap(models["internvl"], QUESTION)
    part = attnscope.heatmap(models["internvl"], QUESTION, rows=(2, 4))
    whole = part.make_square().maps[0].weights
    np.testing.assert_allclose(whole[:, :, 2:4], text.weights[:, :, 2:4], atol=1e-6)
    assert not whole[:, :, 4:].any()
    assert part.page() is not None
    with pytest.raises(AttnscopeError, match="a part of a map"):
        attnscope.heatmap(models["internvl"], QUESTION, rows=(2, 4), cols=(1, 3)).page()
