"""The self-check knows rounding from a mistake, and quantised weights from weights."""

import pytest
import torch
from torch import nn
from transformers import AutoModel, BertConfig, LlamaConfig, LlamaModel

import attnscope
from attnscope.core.attention.probes import WeightsRecorder
from attnscope.errors import AttnscopeError
from attnscope.models.hf import seam
from attnscope.models.hf.assembling import wrap
from attnscope.models.model import Batch


def sharp_model(kind, seed, sharpness=8.0):
    """Random heads, by default with scores of a hundred, which turn rounding into other weights."""
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 99}
    config = BertConfig if kind == "bert" else LlamaConfig
    torch.manual_seed(seed)
    model = AutoModel.from_config(config(num_hidden_layers=9, **sizes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=128**-0.5)
            if name.endswith(("query.weight", "key.weight", "q_proj.weight", "k_proj.weight")):
                parameter.mul_(sharpness)
    return model


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_sharp_random_heads_are_no_mistake(kind, seed):
    """Nor where a model has its norms, rotary angles and softmax in float32, whatever it computes in, as Llama has."""
    model = sharp_model(kind, seed)
    probe = WeightsRecorder()
    ids = torch.arange(3, 14)[None]
    with torch.no_grad():
        shown = wrap(model)
        shown.run(Batch(ids), probe)
        eager = model.double()
        eager.set_attn_implementation("eager")
        first = eager(ids, output_attentions=True).attentions[0]
    torch.testing.assert_close(
        probe.maps[shown.info.kinds[0]][0].double(), first.double(), rtol=0, atol=1e-3
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_the_bound_in_16_bits_is_the_models_own_rounding(kind, dtype):
    """A note says where rounding decides what a head attends to."""
    shown = wrap(sharp_model(kind, 0).to(dtype))
    assert any(
        note.startswith(f"Rounding in {str(dtype)[6:]} moves attention weights by up to")
        for note in shown.info.notes
    )
    assert not any("Rounding" in note for note in wrap(sharp_model(kind, 0, 1).to(dtype)).info.notes)


@pytest.mark.parametrize("dtypes", [{torch.float32, torch.float64}, {torch.float32}])
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_small_mistake_in_sharp_heads_is_one(kind, dtypes, monkeypatch):
    """It shows in float64. If float64 does not have it, it is larger than the model's own rounding."""
    kept = seam.attend_with_weights

    def off(call):
        output, weights = kept(call)
        return output * (1.003 if output.dtype in dtypes else 1.0), weights

    wrap(model := sharp_model(kind, 0))
    monkeypatch.setattr(seam, "attend_with_weights", off)
    with pytest.raises(AttnscopeError, match="self-check: "):
        wrap(model)


# Quantised weights ------------------------------------------------------------------------------------------------


class Linear8bit(nn.Linear):
    """As bitsandbytes' layer: its weight holds integers, a scale for each row is kept beside it."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        numbers = (linear.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(numbers, requires_grad=False)

    def forward(self, x):
        return x @ (self.weight * self.scale).T


class Linear4bit(Linear8bit):
    """As bitsandbytes' layer of 4 bits: two weights in a byte, in one long column."""

    def __init__(self, linear):
        super().__init__(linear)
        self.kept = self.weight
        self.weight = nn.Parameter(
            torch.zeros(linear.weight.numel() // 2, 1, dtype=torch.uint8), requires_grad=False
        )

    def forward(self, x):
        return x @ (self.kept * self.scale).T


class Linear8bitFloat(Linear8bit):
    """As transformers' layer of 8-bit floats."""

    def __init__(self, linear):
        super().__init__(linear)
        self.weight = nn.Parameter(self.weight.to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x):
        return x @ (self.weight.float() * self.scale).T


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=16,
        vocab_size=99,
    )
    return LlamaModel(config).eval()


@pytest.mark.parametrize("layer", [Linear8bit, Linear4bit, Linear8bitFloat])
def test_a_trace_does_not_multiply_by_quantised_numbers(layer):
    model = llama()
    attention = model.layers[0].self_attn
    attention.o_proj = layer(attention.o_proj)
    record = attnscope.trace(attnscope.load(model), "5 17 9 23 4", 0)
    assert record["steps"]["name"][-1] == "joined"
    assert any("W_O cannot be shown: it is quantised" in note for note in record.run["notes"])


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_trace_and_weights_do_not_take_a_part_of_an_adapted_map_for_the_whole():
    peft = pytest.importorskip("peft")  # the extra
    settings = peft.LoraConfig(target_modules=["o_proj"], r=2, init_lora_weights=False)
    model = attnscope.load(peft.get_peft_model(llama(), settings))
    record = attnscope.trace(model, "5 17 9 23 4", 0)
    assert record["steps"]["name"][-1] == "joined"
    with pytest.raises(AttnscopeError, match="W_O of its heads is not known"):
        attnscope.weights(model)


class Doubled(nn.Linear):
    """A linear map that gives twice what its weight says."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_a_trace_whose_last_step_is_not_the_models_is_never_returned():
    model = llama()
    attention = model.layers[0].self_attn
    attention.o_proj = Doubled(32, 32, bias=False)
    with pytest.raises(AttnscopeError, match="do not reproduce what the model computed: "):
        attnscope.trace(attnscope.load(model), "5 17 9 23 4", 0)
