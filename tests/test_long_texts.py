"""Long texts through whole models: pooled maps and parts equal the exact map, and nothing of its size is ever made."""

import numpy as np
import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnscope import heads, heatmap, pooled_heatmap
from attnscope.core import masked_texts
from attnscope.core.attention import tiles
from attnscope.core.attention.seam import attend
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models import load
from attnscope.models.hf import seam
from attnscope.models.hf.model import HuggingFaceModel
from attnscope.models.model import Batch

SIZES = {
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 7,
    "vocab_size": 50,
    "max_position_embeddings": 6000,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def model_of(model_type, **overrides):
    torch.manual_seed(0)
    network = transformers.AutoModel.from_config(
        transformers.AutoConfig.for_model(model_type, **(SIZES | overrides))
    )
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if parameter.ndim > 1 and "norm" not in name:
                parameter.normal_(std=0.5)
    found = load(network)
    assert isinstance(found, HuggingFaceModel)
    return found


def text_of(n):
    return " ".join(str(3 + 7 * i * i % 47) for i in range(n))


WINDOWED = [
    ("llama", {}),
    ("mistral", {"sliding_window": 7}),
    ("gemma2", {"sliding_window": 5}),
    ("gemma3_text", {"sliding_window": 5}),
    ("modernbert", {"local_attention": 8, "cls_token_id": 3, "sep_token_id": 4}),
    ("bert", {}),
]


# Masks


@pytest.mark.parametrize(("model_type", "more"), WINDOWED, ids=[name for name, _ in WINDOWED])
def test_light_masks_say_what_written_out_ones_do(model_type, more, monkeypatch):
    model = model_of(model_type, **more)
    ids = torch.randint(3, 50, (2, 23), generator=torch.Generator().manual_seed(1))
    padded = Batch(ids, torch.arange(23) < torch.tensor([[23], [14]]))
    written_out = model.run(padded, attend)
    monkeypatch.setattr("attnscope.models.hf.model.LIGHT_FROM", 8)
    seen = []

    def probe(call):
        seen.append(call)
        return attend(call)

    light = model.run(padded, probe)
    real = padded.mask
    assert real is not None
    assert torch.allclose(light[real], written_out[real], atol=1e-5)
    assert all(call.mask is not None and call.mask.shape == (2, 1, 1, 23) for call in seen)
    assert {call.is_causal for call in seen} == {"bert" not in model_type}


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("llama4_text", {"attention_chunk_size": 4}),
        (
            "t5",
            {
                "d_model": 16,
                "d_kv": 4,
                "num_heads": 4,
                "num_layers": 2,
                "d_ff": 7,
                "decoder_start_token_id": 0,
            },
        ),
    ],
)
def test_models_with_masks_or_biases_of_their_own_are_still_right(model_type, more):
    if model_type == "llama4_text":
        more = {**more, "num_local_experts": 1, "intermediate_size_mlp": 7}
    model = model_of(model_type, **more)
    n = seam.LIGHT_FROM + 3
    ids = torch.randint(3, 50, (2, n), generator=torch.Generator().manual_seed(1))
    batch = Batch(ids)
    if model_type == "t5":  # the mask of its short targets is written out
        real = torch.arange(5) < torch.tensor([[5], [3]])
        batch = Batch(ids, target_ids=ids[:, :5], target_mask=real)
    found = model.run(batch, attend)
    model._takes_light = False
    assert torch.allclose(found, model.run(batch, attend), atol=1e-5)


# Maps


@pytest.mark.parametrize(("model_type", "more"), WINDOWED[:3], ids=[name for name, _ in WINDOWED[:3]])
def test_pooled_maps_are_the_exact_map_pooled(model_type, more):
    model = model_of(model_type, **more)
    n = 61
    exact = heatmap(model, text_of(n)).maps[0].weights.astype(np.float64)
    record = pooled_heatmap(model, text_of(n), cells=16)
    attention = record.maps[0]
    cell, rows = 4, np.arange(0, n, 4)  # ceil(61 / 16)
    assert attention.query_cell == cell
    assert attention.key_cell == cell
    assert attention.far_tokens == 32
    summed = np.add.reduceat(np.add.reduceat(exact, rows, 3), rows, 2)
    wanted = summed / np.diff([*rows, n])[:, None]
    np.testing.assert_allclose(attention.cells, wanted, atol=2e-6)
    np.testing.assert_allclose(attention.received, exact.sum(2), atol=2e-5)
    entropies = -(exact * np.log(np.where(exact > 0, exact, 1))).sum(-1)
    np.testing.assert_allclose(attention.entropy_nats, entropies, atol=2e-5)
    q, k = np.indices((n, n))
    for layer in range(2):
        for head in range(4):
            far = np.where((abs(q - k) > 32) & (k > 0), exact[layer, head], 0)
            strongest = np.sort(far, axis=None)[::-1][:10]
            links = record.links(layer, head)
            np.testing.assert_allclose(
                [link.weight for link in links], strongest[strongest > 0], atol=1e-6
            )
            for link in links:
                assert far[link.query, link.key] == pytest.approx(link.weight, abs=1e-6)


def test_special_tokens_are_no_ends_of_links(minilm_folder):
    record = pooled_heatmap(load("minilm"), "one two three. " * 30, cells=32, layers=2)
    special = record.maps[0].queries.special
    assert special.any()
    places = record.maps[0].link_places.reshape(-1, 2)
    assert (places >= 0).all()
    assert not special[places].any()


def test_a_part_is_cut_out_of_the_exact_map():
    model = model_of("gemma2", sliding_window=5)
    whole = heatmap(model, text_of(40))
    part = heatmap(model, text_of(40), rows=(10, 23), cols=slice(8, None), pick=[(0, 3), (1, 1)])
    first = part.maps[0]
    assert first.part == (10, 8, 40, 40)
    assert len(first.queries) == 13
    assert len(first.keys) == 32
    assert first.queries.labels == whole.tokens[10:23]
    for pair in ((0, 3), (1, 1)):
        np.testing.assert_allclose(part.of(*pair), whole.of(*pair)[10:23, 8:], atol=2e-6)
    assert any("queries 10 to 22 and keys 8 to 39 of 40 tokens" in note for note in part.run["notes"])
    with pytest.raises(AttnscopeError, match="whole maps"):
        heatmap(load("minilm"), "a b c d", rows=(0, 2), hide_special=True)


def test_a_part_of_a_model_off_the_seam_is_cut_out_of_its_whole_maps():
    sizes = {"n_head": 4, "n_layer": 2, "hidden_size": 16}
    network = transformers.AutoModel.from_config(
        transformers.AutoConfig.for_model("bloom", **(SIZES | sizes))
    )
    model = load(network)
    assert model.info.path == "eager"
    whole = heatmap(model, text_of(20))
    part = heatmap(model, text_of(20), rows=(3, 9), cols=(0, 4))
    np.testing.assert_array_equal(part.maps[0].weights, whole.maps[0].weights[:, :, 3:9, :4])
    with pytest.raises(AttnscopeError, match="only its whole maps"):
        pooled_heatmap(model, text_of(20))


def test_all_three_kinds_of_an_encoder_decoder_are_pooled():
    sizes = {
        f"{side}_{what}": n
        for side in ("encoder", "decoder")
        for what, n in (("layers", 1), ("ffn_dim", 7))
    }
    heads = {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
    model = model_of(
        "bart", d_model=16, decoder_start_token_id=2, forced_eos_token_id=None, **sizes, **heads
    )
    record = pooled_heatmap(model, text_of(50), target=text_of(20), cells=8)
    assert [m.kind for m in record.maps] == ["encoder", "decoder", "cross"]
    cross = record.map("cross")
    assert cross.query_cell == 3
    assert cross.key_cell == 7
    assert cross.far_tokens == -1
    exact = heatmap(model, text_of(50), target=text_of(20)).of(0, 2, "cross")
    np.testing.assert_allclose(cross.received[0, 2], exact.sum(0), atol=1e-5)
    with pytest.raises(AttnscopeError, match="3 kinds of attention"):
        heatmap(model, text_of(9), target=text_of(4), rows=(0, 2))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"rows": (30, 41)}, "reach beyond the text's 40 tokens"),
        ({"cols": (40, None)}, "reach beyond the text's 40 tokens"),
        ({"rows": (5, 5)}, "hold no token"),
        ({"rows": (5, 3)}, "hold no token"),
        ({"rows": (-5, 3)}, "hold no token"),
        ({"rows": slice(0, 8, 2)}, "one after another"),
    ],
)
def test_parts_that_are_not_there_are_refused(asked, said):
    with pytest.raises(UsageError, match=said):
        heatmap(model_of("llama"), text_of(40), **asked)


# Memory


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.n_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for part in tree_leaves(result):
            if isinstance(part, torch.Tensor):
                self.n_bytes = max(self.n_bytes, part.untyped_storage().nbytes())
        return result


def run_pooled(model, n):
    pooled_heatmap(model, text_of(n), cells=16)


def run_part(model, n):
    heatmap(model, text_of(n), rows=(n - 5, n), cols=(0, 3))


def run_heads(model, n):
    heads(model, [text_of(n)])


@pytest.mark.parametrize("run", [run_pooled, run_part, run_heads])
@pytest.mark.parametrize(("model_type", "more"), WINDOWED, ids=[name for name, _ in WINDOWED])
def test_nothing_of_the_size_of_a_map_is_ever_made(model_type, more, run, monkeypatch):
    # What is done for long texts, done for one of 640 tokens; tiles as small as they come: 16 queries.
    monkeypatch.setattr("attnscope.models.hf.model.LIGHT_FROM", 64)
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 1)
    monkeypatch.setattr(masked_texts, "MAX_CACHED_PAIRS", 1)
    model = model_of(model_type, **more)
    n = 640
    run(model, n)  # what is made once and kept
    with Largest() as largest:
        run(model, n)
    # A tile of queries, 4 heads or 6 facts of pairs, keys, bytes. A map of truth values would be more than that.
    assert 0 < largest.n_bytes <= 16 * 6 * n * 4 < n * n


def test_the_count_of_allocations_sees_a_map():
    model = model_of("llama")
    n = 300
    with Largest() as largest:
        heatmap(model, text_of(n), layers=0, heads=0)
    assert largest.n_bytes >= n * n * 4
