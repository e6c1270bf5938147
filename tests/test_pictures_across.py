"""Cross-attention from words, or learned queries, to the patches of a photo: weights, places, records, refusals."""

import re

import numpy as np
import pytest
import torch
from PIL import Image

import attnscope
from attnscope.errors import AttnscopeError
from attnscope.senses.photos import read_photo
from tests.record_helpers import stems
from tests.vision_language_helpers import ACROSS, noise, write_family

QUESTION = "what is on the table ?"
KINDS = dict.fromkeys(ACROSS, ("cross", "decoder")) | {"blip-2": ("cross", "encoder", "decoder")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("across")
    return {name: write_family(home / name, name) for name in ACROSS}


@pytest.fixture(scope="module")
def models(folders):
    return {name: attnscope.load(folder) for name, folder in folders.items()}


def photos_for(name):
    return [noise(150, 230), noise(310, 97, seed=1)] if name == "mllama" else [noise(150, 230)]


def eager_weights(model, inputs):
    """What each attention of words and queries gives out by transformers' own eager code, by (kind, layer)."""
    network = model
    network.base.set_attn_implementation("eager")
    kept = {}
    hooks = [
        module.register_forward_hook(
            lambda _m, _a, output, place=places[0]: kept.update({place: output[1][0].numpy()})
        )
        for module, places in network.survey.plan.items()
    ]
    try:
        with torch.no_grad():
            output = network.base(**inputs, output_attentions=True)
    finally:
        for hook in hooks:
            hook.remove()
    return kept | {("logits", 0): getattr(output, "logits", None)}


@pytest.mark.parametrize("name", ACROSS)
def test_weights_are_those_of_eager_attention(name, models):
    made = attnscope.picture_heatmap(models[name], photos_for(name), QUESTION, generate=4)
    reader = models[name].image_text_reader.model
    seen = models[name].image_text_reader.prepare_prompt(
        [read_photo(photo) for photo in photos_for(name)], QUESTION, 4
    )
    true = eager_weights(reader, dict(seen.inputs))
    assert tuple(m.kind for m in made.maps) == KINDS[name]
    assert len(made.pictures) == len(photos_for(name))
    for attention in made.maps:
        first = attention.origin[0]
        for place, layer in enumerate(attention.layers):
            wanted = true[attention.kind, layer][:, first:]
            assert attention.weights[place].shape == wanted.shape
            np.testing.assert_allclose(attention.weights[place], wanted, atol=2e-5)
        assert float(np.ptp(attention.weights)) > 0.05  # flat maps would agree with anything
    logits = true["logits", 0]
    words = made.maps[-1].queries
    n_written = len(words) - words.n_given
    assert n_written > 0
    # What was written token by token is what one forward pass over all of it says.
    if logits is not None:
        never = getattr(reader.base.config, "image_token_id", None)
        if never is not None:
            logits[..., never] = -torch.inf
        ids = seen.tokens.ids[-n_written:]
        assert logits[0, -n_written - 1 : -1].argmax(-1).tolist() == ids.tolist()


def test_no_word_attends_to_what_a_tile_is_filled_up_with(models):
    made = attnscope.picture_heatmap(models["mllama"], noise(40, 40), QUESTION)
    filling = np.array([label == "filling" for label in made.maps[0].keys.labels])
    assert filling.sum() == 3 * 26
    assert not made.weights[..., filling].any()
    assert made.maps[0].keys.labels[0] == "CLS"
    assert made.pictures[0].cells[0, 0] == 1
    np.testing.assert_allclose(made.weights.sum(-1), 1, atol=1e-5)


def test_figures_lie_over_the_photo_and_the_words_have_theirs(models, tmp_path):
    record = attnscope.picture_heatmap(models["blip-2"], noise(150, 230), QUESTION, pick=[(0, 1)])
    assert stems(record, "Q2") == [
        "queries",
        "query-00-q2",
        "text-encoder-L00H01",
        "text-decoder-L00H01",
    ]
    assert record.page() is not None
    alone = attnscope.picture_heatmap(models["mllama"], noise(150, 230), QUESTION, pick=[(3, 1)])
    assert [m.kind for m in alone.maps] == ["cross"]
    assert alone.page() is not None
    assert "text-L03H01.svg" in [path.name for path in alone.draw(tmp_path, ["svg"], query="table")]
    with pytest.raises(
        AttnscopeError, match="has no cross-attention in the layers and heads that are chosen"
    ):
        attnscope.picture_heatmap(models["mllama"], noise(150, 230), QUESTION, pick=[(0, 1)])


def test_in_a_page_a_word_has_the_same_row_in_all_maps(models):
    record = attnscope.picture_heatmap(models["mllama"], [noise(150, 230), noise(40, 40, 1)], QUESTION)
    across, words = record.with_pictures_as_one().make_square().maps
    first = record.maps[0].part[0]
    assert across.queries.labels == words.queries.labels
    assert not across.weights[:, :, :first].any()
    assert across.keys.labels == ("elsewhere", *(picture.source for picture in record.pictures))
    for at, picture in enumerate(record.pictures):
        given = record.weights[..., picture.cells.ravel()].sum(-1)
        np.testing.assert_allclose(across.weights[:, :, first:, 1 + at], given, atol=1e-6)
    np.testing.assert_allclose(across.weights[:, :, first:].sum(-1), 1, atol=1e-5)


def test_pages_show_cross_attention(models, open_page):
    for name, head in (("mllama", "1.2"), ("blip-2", "2.1")):
        record = attnscope.picture_heatmap(models[name], noise(150, 230), QUESTION)
        opened = open_page(record.page())
        opened.show(v="photo", h=head)
        shares = re.findall(r"([\d.]+)% of its attention goes here, at most [\d.]+", opened.text("body"))
        layer, number = map(int, head.split("."))
        row = record.of(layer, number)[~record.maps[0].queries.special].mean(0)
        assert [*map(float, shares)] == pytest.approx(
            [100 * np.nansum(record.pictures[0].over(row))], abs=0.1
        )


def test_a_text_is_shown_without_a_picture_where_that_can_be(models):
    assert attnscope.heatmap(models["mllama"], QUESTION).maps[0].layers == (0, 2)
    assert attnscope.picture_heatmap(models["trocr"], noise(40, 40)).picture is not None
    for name in ("blip", "blip-2"):
        with pytest.raises(AttnscopeError, match="beside a picture alone"):
            attnscope.heatmap(models[name], QUESTION)
    with pytest.raises(AttnscopeError, match="one photo at a time"):
        attnscope.picture_heatmap(models["blip"], [noise(40, 40), noise(40, 40)], QUESTION)


def test_captioners_write_without_a_text(models, run, folders):
    Image.fromarray(noise(90, 120)).save("a.png")
    for name in ("blip", "trocr"):
        with pytest.warns(UserWarning, match="no text was given"):
            made = attnscope.picture_heatmap(models[name], noise(90, 120), generate=4)
        # The token that it starts with.
        assert made.maps[0].kind == "cross" and made.maps[0].queries.n_given == 1
        assert made.text
        assert "<" not in made.text
        assert made.text in made.run["notes"][-1]
        assert 0 < len(made.maps[0].queries) - 1 <= 4
        with pytest.warns(UserWarning, match="no text was given"):
            empty = attnscope.picture_heatmap(models[name], noise(90, 120), "", generate=4)
        np.testing.assert_array_equal(empty.weights, made.weights)
    one = ("--image", "a.png", "--generate", "4")
    code, out, err = run("heatmap", *one, "-m", str(folders["trocr"]), "-o", "out", "-f", "npz")
    assert code == 0
    assert "out/heatmap.npz" in out
    assert "no text was given" in err
    code, _, err = run("page", *one, "-m", str(folders["blip"]), "-o", "page.html")
    assert code == 0
    assert "no text was given" in err
    with pytest.warns(UserWarning, match="no text was given"):
        assert attnscope.picture_heatmap(models["blip"], noise(90, 120)).maps[0].kind == "cross"
    for name in ("mllama", "blip-2"):
        for text in (None, ""):
            with pytest.raises(AttnscopeError, match="what a text asks for") as told:
                attnscope.picture_heatmap(models[name], noise(90, 120), text, generate=3)
            assert "give a text" in str(told.value.hint)
