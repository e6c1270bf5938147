"""Hugging Face models through the seam: equal to their own eager attention, or refused."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from transformers import AttentionInterface, AutoModel
from transformers.masking_utils import AttentionMaskInterface

import attnscope
from attnscope.core.attention.probes import WeightsRecorder
from attnscope.core.attention.seam import attend
from attnscope.errors import AttnscopeError
from attnscope.models.hf import seam
from attnscope.models.hf.assembling import wrap
from attnscope.models.hf.seam import LIKE_EAGER, LIKE_SDPA, split_mask_and_bias
from attnscope.models.model import Batch
from tests.conftest import write_tiny
from tests.hf_tally import batches, boost, build, difference_from_eager

SEAM = [
    *("bert", "distilbert", "roberta", "albert", "electra", "modernbert", "splinter"),
    *("gpt2", "llama", "mistral", "gemma2", "qwen3", "gpt_neox", "opt", "gpt_oss", "jamba"),
    *("t5", "bart"),
]
EAGER = ["bloom", "deberta-v2", "gpt_neo", "falcon", "xlnet", "mpnet", "convbert"]


def tiny(model_type):
    model = build(model_type)
    assert not isinstance(model, str), model
    return model


def test_segments_that_say_nothing_change_nothing():
    # GPT-2 takes token_type_ids, and adds the embeddings of those tokens.
    model = wrap(tiny("gpt2"))
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        plain = model.run(Batch(ids, segments=None), attend)
        zeros = model.run(Batch(ids, segments=torch.zeros_like(ids)), attend)
    assert torch.equal(plain, zeros)


@pytest.mark.parametrize("model_type", [*SEAM, *EAGER])
def test_weights_and_hidden_states_are_those_of_eager(model_type):
    model = tiny(model_type)
    shown = wrap(model)
    assert shown.info.path == ("eager" if model_type in EAGER else "seam")
    assert shown.info.checked is True
    assert difference_from_eager(shown, model) < 5e-5


@pytest.mark.parametrize("model_type", ["bert", "llama", "mistral", "opt", "t5", "bart"])
def test_hidden_states_are_those_that_the_model_computes_by_itself(model_type):
    model = tiny(model_type)
    shown = wrap(model)
    for batch in batches(model.config.is_encoder_decoder):
        inputs = shown.text_inputs(batch)
        with torch.no_grad():
            own = model(**inputs).last_hidden_state
        real = batch.target_mask if model.config.is_encoder_decoder else batch.mask
        for probe in (WeightsRecorder(), WeightsRecorder(layers=[1]), attend):
            hidden = shown.run(batch, probe)
            gap = (hidden - own).abs()
            assert float((gap if real is None else gap[real]).max()) < 5e-5 * float(own.abs().max())


@pytest.mark.parametrize(
    ("model_type", "input_name"), [("vit", "pixel_values"), ("whisper", "input_features")]
)
def test_pictures_and_sounds_pass_the_seam_too(model_type, input_name):
    if model_type == "vit":
        sizes = {
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 16,
        }
        config = transformers.ViTConfig(**sizes, image_size=24, patch_size=8)
        inputs = {input_name: torch.randn(2, 3, 24, 24)}
    else:
        sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 2) | {
            "d_model": 24,
            "vocab_size": 60,
        }
        heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4)
        ends = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 4}
        more = {"num_mel_bins": 7, "max_source_positions": 11, "max_target_positions": 13}
        config = transformers.WhisperConfig(**sizes, **heads, **ends, **more)
        inputs = {
            input_name: torch.randn(2, 7, 22),
            "decoder_input_ids": torch.tensor([[4, 9, 17], [4, 21, 5]]),
        }
    torch.manual_seed(0)
    model = AutoModel.from_config(config).eval()
    boost(model)
    # At the seam, and by the model's own eager attention.
    shown = wrap(model)
    assert shown.info.path == "seam"
    probe = WeightsRecorder()
    hidden = shown.run_inputs(inputs, probe)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(**inputs, output_attentions=True)
    torch.testing.assert_close(hidden, output.last_hidden_state, rtol=1e-4, atol=1e-4)
    names = {
        "encoder": "encoder_attentions",
        "decoder": "decoder_attentions",
        "cross": "cross_attentions",
    }
    for kind, maps in probe.maps.items():
        theirs = output.attentions if model_type == "vit" else getattr(output, names[kind])
        assert list(maps) == [0, 1]
        torch.testing.assert_close(
            torch.stack(list(maps.values())), torch.stack(theirs), rtol=1e-4, atol=1e-5
        )
    assert (
        tuple(probe.maps) == shown.info.kinds == (("encoder",) if model_type == "vit" else tuple(names))
    )


# What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("mamba", "has no attention"),
        ("fnet", "has no attention"),
        ("rwkv", "has no attention"),
        ("longt5", "cannot be shown truly"),
        ("t5gemma2", "cannot be shown truly"),
        ("deepseek_v4", "cannot be shown truly"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_line(model_type, words):
    with pytest.raises(AttnscopeError, match=words) as caught:
        wrap(tiny(model_type))
    assert model_type in caught.value.message
    assert "\n" not in str(caught.value)


def _no_mask(*_, **__):
    return None


def _broken(**changes):
    def attention(module, *tensors, **given):
        return seam.attention_function(module, *tensors, **{**given, **changes})

    return attention


def _swapped_keys(module, query, key, value, *rest, **given):
    return seam.attention_function(module, query, key.flip(1), value.flip(1), *rest, **given)


def _without_mask(module, query, key, value, *_, **given):
    return seam.attention_function(module, query, key, value, **{**given, "attention_mask": None})


@pytest.mark.parametrize(
    ("model_type", "attention", "mask"),
    [
        ("bert", None, _no_mask),
        ("llama", _broken(is_causal=False), None),
        ("bert", _broken(is_causal=True), None),
        ("bert", _without_mask, None),
        ("gemma2", _broken(softcap=None), None),
        ("gpt2", _broken(scaling=0.3), None),
        ("t5", _broken(position_bias=None), None),
        ("gpt_oss", _broken(s_aux=None), None),
        ("mistral", None, _no_mask),
        ("llama", _swapped_keys, None),
    ],
)
def test_the_self_check_finds_a_broken_seam(model_type, attention, mask):
    model = tiny(model_type)
    if model_type == "gemma2":
        model.config.attn_logit_softcapping = 1.0
        for layer in model.layers:
            layer.self_attn.attn_logit_softcapping = 1.0
    functions = AttentionInterface._global_mapping
    masks = AttentionMaskInterface._global_mapping
    kept = functions[LIKE_SDPA], masks[LIKE_SDPA], functions[LIKE_EAGER]
    wrap(model)
    try:
        if attention is not None:
            functions[LIKE_SDPA] = functions[LIKE_EAGER] = attention
        masks[LIKE_SDPA] = mask or kept[1]
        with pytest.raises(AttnscopeError, match="self-check"):
            wrap(model)
    finally:
        functions[LIKE_SDPA], masks[LIKE_SDPA], functions[LIKE_EAGER] = kept


def test_the_self_check_finds_swapped_kinds_and_layers(monkeypatch):
    from attnscope.models.hf import check, survey

    model = tiny("bart")
    true_kinds = survey.kinds_of
    other = {"encoder": "decoder", "decoder": "encoder", "cross": "cross"}
    with monkeypatch.context() as patch:
        patch.setattr(survey, "kinds_of", lambda *given: [other[kind] for kind in true_kinds(*given)])
        with pytest.raises(AttnscopeError, match="self-check"):
            wrap(model)
    llama = tiny("llama")
    true_trace = check.trace_attention

    def reordered(*given):
        output, seen = true_trace(*given)
        return output, [replace(one, weights=seen[-1].weights) for one in seen]

    with monkeypatch.context() as patch:
        patch.setattr(check, "trace_attention", reordered)
        with pytest.raises(AttnscopeError, match="layer 0"):
            wrap(llama)


def test_a_probe_that_needs_the_seam_is_refused_on_the_eager_road():
    shown = wrap(tiny("bloom"))
    with pytest.raises(AttnscopeError, match="only its weights"):
        shown.run(batches(False)[0], attend)


# What is known of a model ---------------------------------------------------------------------------------------


def test_grouped_queries_reach_the_probe_unrepeated():
    shown = wrap(tiny("llama"))
    calls = []

    def watch(call):
        calls.append(call)
        return attend(call)

    shown.run(batches(False)[1], watch)
    assert [(call.layer, call.kind, call.n_heads, call.n_kv_heads) for call in calls] == [
        (layer, "decoder", 4, 2) for layer in range(3)
    ]
    assert shown.info.n_heads == (4,)
    assert shown.info.n_kv_heads == (2,)


@pytest.mark.parametrize(
    ("model_type", "note"),
    [
        ("mistral", "A sliding window of 4 tokens in decoder layers 0-2."),
        ("gemma2", "Scores are capped at +-50 before the softmax in decoder layers 0-2."),
        ("gpt_oss", "Sinks take part of the weight (rows sum to less than 1) in decoder layers 0-2."),
        ("albert", "3 encoder layers share 1 set of weights."),
        ("jamba", "Only layers 1 of 3 have attention (decoder)."),
        ("convbert", "Padding changes what this model computes: texts are best shown one by one."),
    ],
)
def test_what_is_peculiar_is_noted(model_type, note):
    assert note in wrap(tiny(model_type)).info.notes


def test_the_window_of_an_encoder_reaches_to_either_side():
    sizes = {
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 16,
    }
    config = transformers.ModernBertConfig(
        **sizes,
        vocab_size=60,
        pad_token_id=0,
        local_attention=4,
        layer_types=["full_attention", "sliding_attention"],
    )
    shown = wrap(AutoModel.from_config(config))
    assert "A sliding window of 2 tokens to either side in encoder layers 1." in shown.info.notes
    probe = WeightsRecorder()
    shown.run(Batch(torch.arange(10, 19)[None]), probe)
    places = torch.arange(9)
    far = (places[:, None] - places).abs() > 2
    assert float(probe.maps["encoder"][1][..., far].max()) == 0
    assert float(probe.maps["encoder"][1][..., ~far].min()) > 0
    assert float(probe.maps["encoder"][0].min()) > 0


def test_hybrids_show_the_layers_that_have_attention_with_their_true_numbers():
    shown = wrap(tiny("jamba"))
    probe = WeightsRecorder()
    shown.run(batches(False)[0], probe)
    assert shown.info.n_layers == (3,)
    assert shown.survey.layers == {"decoder": (1,)}
    assert list(probe.maps["decoder"]) == [1]


@pytest.mark.parametrize(
    ("model_type", "limit"),
    [("bert", 64), ("roberta", 62), ("opt", 64), ("t5", None), ("bloom", None), ("llama", 64)],
)
def test_the_limit_in_tokens(model_type, limit):
    if model_type == "roberta":
        config = transformers.RobertaConfig(
            hidden_size=24,
            num_hidden_layers=1,
            num_attention_heads=4,
            vocab_size=60,
            max_position_embeddings=64,
        )
        model = AutoModel.from_config(config)
        assert config.pad_token_id == 1
    else:
        model = tiny(model_type)
    shown = wrap(model)
    assert shown.info.max_tokens == limit
    if limit is not None:
        shown.run(Batch(torch.full((1, limit), 7)), attend)
    if model_type in {"bert", "roberta", "opt"}:
        with pytest.raises(AttnscopeError, match=f"longer than the {limit}"):
            shown.run(Batch(torch.full((1, limit + 1), 7)), attend)


def test_segments_reach_models_that_know_them_and_no_others():
    ids = torch.arange(10, 18)[None]
    segments = (torch.arange(8) >= 5).long()[None]
    bert = wrap(tiny("bert"))
    roberta = wrap(tiny("roberta"))
    assert not torch.equal(bert.run(Batch(ids, segments=segments), attend), bert.run(Batch(ids), attend))
    roberta.base.config.type_vocab_size = 1
    assert "token_type_ids" not in roberta.text_inputs(Batch(ids, segments=segments))


def test_token_numbers_beyond_the_vocabulary_are_refused():
    with pytest.raises(AttnscopeError, match="token number 4000"):
        wrap(tiny("gpt2")).run(Batch(torch.tensor([[5, 4000]])), attend)


def test_an_encoder_decoder_wants_a_target():
    with pytest.raises(AttnscopeError, match="nothing is given that its decoder reads"):
        wrap(tiny("t5")).run(Batch(torch.tensor([[5, 6]])), attend)


# No state is left behind ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["llama", "bloom", "bart"])
def test_a_model_in_memory_is_left_as_it_is(model_type):
    model = tiny(model_type).train()
    before = model.config.to_dict(), model.config._attn_implementation
    shown = wrap(model)
    shown.run(batches(model.config.is_encoder_decoder)[0], WeightsRecorder())
    assert (model.config.to_dict(), model.config._attn_implementation) == before
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_an_exception_in_the_middle_leaves_nothing_behind():
    model = tiny("llama").train()
    shown = wrap(model)
    batch = batches(False)[0]

    def fail(call):
        if call.layer == 1:
            raise KeyError("in the middle")
        return attend(call)

    with pytest.raises(KeyError, match="in the middle"):
        shown.run(batch, fail)
    assert seam._run.get() is None
    assert model.config._attn_implementation == "sdpa"
    assert model.training
    probe = WeightsRecorder()
    shown.run(batch, probe)
    assert list(probe.maps["decoder"]) == [0, 1, 2]


def test_gradients_flow_through_what_a_probe_brings_and_not_into_the_model():
    model = tiny("llama")
    shown = wrap(model)
    gate = torch.ones(3, 4, requires_grad=True)
    hidden = shown.run(batches(False)[0], lambda call: attend(call) * gate[call.layer][:, None, None])
    hidden.square().sum().backward()
    assert bool((gate.grad != 0).all())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_threads_do_not_see_each_other():
    first = wrap(tiny("llama"))
    second = wrap(tiny("bert"))
    batch = batches(False)[0]
    expected = {}
    for name, shown in (("llama", first), ("bert", second)):
        probe = WeightsRecorder()
        shown.run(batch, probe)
        expected[name] = probe.maps
    wrong = []

    def work(name, shown):
        for _ in range(15):
            probe = WeightsRecorder()
            shown.run(batch, probe)
            (kind,) = expected[name]
            if set(probe.maps) != {kind} or list(probe.maps[kind]) != list(expected[name][kind]):
                wrong.append(f"{name}: other layers")
                continue
            for layer, weights in probe.maps[kind].items():
                if not torch.allclose(weights, expected[name][kind][layer], atol=1e-5):
                    wrong.append(f"{name}: other weights")

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, ("llama", "bert", "llama"), (first, second, first)))
    assert wrong == []


# Masks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_masks_of_floats_are_taken_apart(dtype):
    least = torch.finfo(dtype).min
    added = torch.tensor([[0.0, least, -torch.inf, 1.5], [0.0, least + 20, 0.0, -3.0]], dtype=dtype)[
        None, None
    ]
    mask, bias = split_mask_and_bias(added, dtype)
    assert mask[0, 0].tolist() == [[True, False, False, True], [True, False, True, True]]
    assert bias[0, 0].tolist() == [[0, 0, 0, 1.5], [0, 0, 0, -3.0]]


@pytest.mark.parametrize("name", ["native", "hf", "own"])
def test_a_callers_autocast_does_not_lower_what_a_record_calls_float32(name, tmp_path):
    folder = write_tiny(tmp_path / "bert")

    def seen():
        model = attnscope.load(
            "own" if name == "own" else folder, engine=name if name in ("native", "hf") else "auto"
        )
        record = attnscope.heatmap(model, "the cat sat")
        outputs = model.outputs(Batch(torch.arange(5)[None]), attend)
        assert record.run["dtype"] == "float32"
        return record.weights, outputs.hidden if outputs.logits is None else outputs.logits

    weights, found = seen()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        others, other = seen()
    np.testing.assert_array_equal(weights, others)
    assert torch.equal(found, other)
