"""Object queries over a photo: the cross-attention of DETR and its kin, of which the encoder is not shown."""

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import attnscope
from attnscope.errors import AttnscopeError
from attnscope.senses.photos import read_photo
from tests.record_helpers import stems
from tests.vision_language_helpers import noise

FAMILIES = {
    "detr": (transformers.DetrConfig, transformers.DetrForObjectDetection),
    "conditional_detr": (
        transformers.ConditionalDetrConfig,
        transformers.ConditionalDetrForObjectDetection,
    ),
}


def write(folder, name):
    """A tiny random model that finds objects, with sharp heads; encoder and decoder differ in theirs."""
    configuration, kind = FAMILIES[name]
    backbone = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8] * 4,
        depths=[1] * 4,
        layer_type="basic",
        out_features=["stage4"],
    )
    config = configuration(
        backbone_config=backbone,
        use_timm_backbone=False,
        d_model=16,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=2,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
        num_queries=5,
        id2label={0: "cat", 1: "remote"},
    )
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.4)
    model.save_pretrained(folder)
    size = {"shortest_edge": 100, "longest_edge": 200}
    transformers.DetrImageProcessorPil(size=size).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("objects")
    return {name: write(home / name, name) for name in FAMILIES}


@pytest.mark.parametrize("name", FAMILIES)
def test_cross_attention_equals_eager(name, folders):
    model = attnscope.load(folders[name])
    record = attnscope.picture_heatmap(model, noise(150, 230))
    assert [(m.kind, m.weights.shape) for m in record.maps] == [
        ("cross", (2, 2, 5, 20)),
        ("decoder", (2, 2, 5, 5)),
    ]
    assert any("encoder itself is not shown" in note for note in model.info.notes)
    network = FAMILIES[name][1].from_pretrained(folders[name], attn_implementation="eager").eval()
    with torch.no_grad():
        output = network(
            **model.image_text_reader.prepare_prompt([read_photo(noise(150, 230))], "").inputs,
            output_attentions=True,
        )
    for attention, weights in zip(
        record.maps, (output.cross_attentions, output.decoder_attentions), strict=True
    ):
        np.testing.assert_allclose(attention.weights, torch.cat(weights).numpy(), atol=2e-6)
        assert float(np.ptp(attention.weights)) > 0.05


def test_patches_are_the_places_of_the_feature_map(folders):
    """A bright spot changes most where it lies, through convolutions that only add."""
    model = attnscope.load(folders["detr"])
    for parameter in model.base.backbone.parameters():
        parameter.data.abs_()
    features = []
    model.base.backbone.register_forward_hook(
        lambda _module, _inputs, output: features.append(output[-1][0][0])
    )
    dark = np.full((150, 230, 3), 90, np.uint8)
    (picture,) = model.image_text_reader.prepare_prompt([read_photo(dark)], "").pictures
    left, top, right, bottom = picture.area
    rows, columns = picture.grid
    before = features[0]
    for row, column in ((1, 1), (1, 3), (2, 2)):
        y = int(top + (row + 0.5) * (bottom - top) / rows)
        x = int(left + (column + 0.5) * (right - left) / columns)
        lit = dark.copy()
        lit[y - 2 : y + 3, x - 2 : x + 3] = 255
        with torch.no_grad():
            model.base(**model.image_text_reader.prepare_prompt([read_photo(lit)], "").inputs)
        change = (features[-1] - before).sum(0)
        assert np.unravel_index(int(change.argmax()), picture.grid) == (row, column)


def test_queries_are_named_by_what_they_find(folders):
    network = transformers.DetrForObjectDetection.from_pretrained(folders["detr"]).eval()
    processor = transformers.DetrImageProcessorPil.from_pretrained(folders["detr"])
    model = attnscope.load(network, processor)
    network.class_labels_classifier.weight.data *= 30
    queries = attnscope.picture_heatmap(model, noise(150, 230)).maps[0].queries
    with torch.no_grad():
        chances = (
            network(**model.image_text_reader.prepare_prompt([read_photo(noise(150, 230))], "").inputs)
            .logits[0]
            .softmax(-1)
        )
    for query, row in enumerate(chances[:, :-1]):
        best = row.argmax()
        assert queries.labels[query] == (
            f"Q{query} {('cat', 'remote')[best]}" if row[best] > 0.7 else f"Q{query}"
        )
        assert queries.special[query] == bool(row[best] <= 0.7)
    assert not queries.special.all()


def test_figures_of_queries(folders, run):
    record = attnscope.picture_heatmap(attnscope.load(folders["detr"]), noise(150, 230), pick=[(0, 1)])
    assert stems(record, "@2")[1].startswith("query-00-q2")
    Image.fromarray(noise(90, 120)).save("a.png")
    picture = ("heatmap", "--image", "a.png", "-m", str(folders["detr"]))
    code, out, err = run(*picture, "-o", "out", "-f", "png,npz")
    assert code == 0
    assert "out/query-00-q0" in out
    assert "the encoder itself is not shown" in err
    code, _, err = run(*picture, "what is this ?")
    assert code == 1
    assert "reads and writes no words" in err


def test_deformable_attention_is_refused():
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8] * 4, depths=[1] * 4, layer_type="basic"
    )
    config = transformers.DeformableDetrConfig(
        backbone_config=backbone,
        use_timm_backbone=False,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
        num_queries=3,
        num_feature_levels=1,
    )
    with pytest.raises(AttnscopeError, match="decoder that reads no text"):
        attnscope.load(transformers.DeformableDetrModel(config).eval())  # type: ignore[arg-type]
