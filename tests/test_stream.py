"""Where models keep the weights of their heads: what is found gives back what the model itself computes."""

import pytest
import torch
from torch import Tensor

import attnscope
from attnscope.core.attention.seam import AttentionCall, attend
from attnscope.errors import AttnscopeError
from attnscope.models.inside.projections import OutputProjectionFinder, hooks, list_linear_maps
from attnscope.models.inside.stream import read_stream_weights
from attnscope.models.model import Batch
from tests.conftest import write_tiny

SIZES = {
    "vocab_size": 37,
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "intermediate_size": 20,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2}
MODELS = {
    "bert": {},
    "roberta": {},
    "gpt2": {"n_embd": 24, "n_head": 6, "n_layer": 2, "n_positions": 40},
    "gpt_bigcode": {"n_embd": 24, "n_head": 6, "n_layer": 2, "n_positions": 40},
    "llama": {**GROUPED, "attention_bias": True},
    "mistral": GROUPED,
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 4},
    "gemma": {**GROUPED, "head_dim": 6},
    "gemma2": {**GROUPED, "head_dim": 6},
    "opt": {"ffn_dim": 20, "word_embed_proj_dim": 24},
    "gpt_neox": {"rotary_pct": 0.5},
    "phi": {},
    "phi3": GROUPED,
    "mixtral": {**GROUPED, "num_local_experts": 2},
}
MASKED = ("bert", "roberta")
"""Models whose head is for masked words; the others write."""


def random_model(name, **overrides):
    """A transformers model with random weights everywhere, norms and biases included."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    config = AutoConfig.for_model(name, **(SIZES | MODELS.get(name, {}) | overrides))
    torch.manual_seed(0)
    kind = AutoModelForMaskedLM if name in MASKED else AutoModelForCausalLM
    model = kind.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    return model.eval()


class _Seen:
    """One run: what reached the seam, what blocks were given, what output projections gave."""

    def __init__(self, model, ids):
        self.calls: dict[int, tuple[AttentionCall, Tensor]] = {}
        self.hidden: dict[int, Tensor] = {}
        self.outputs = OutputProjectionFinder()

        def probe(call):
            output = attend(call)
            self.calls[call.layer] = call, output
            self.outputs.expect((call.kind, call.layer), output)
            return output

        handles = [
            block.register_forward_pre_hook(
                lambda module, given, named, layer=layer: self.hidden.__setitem__(
                    layer, (given[0] if given else named["hidden_states"]).clone()
                ),
                with_kwargs=True,
            )
            for (_, layer), block in model.blocks().items()
        ]
        with torch.no_grad(), hooks(list_linear_maps(model.modules()), self.outputs.check_linear_map):
            model.run(Batch(ids), probe)
        for handle in handles:
            handle.remove()


def require_same(model, stream, unknown=()):
    """Queries and keys of the first token, which no rotation turns, values of all, and what heads write together."""
    seen = _Seen(model, torch.tensor([[5, 9, 3, 7, 11]]))
    for attention in stream.attentions:
        call, output = seen.calls[attention.layer]
        hidden = seen.hidden[attention.layer]
        read = hidden if attention.norm is None else attention.norm.apply(hidden)
        for role in ("query", "key", "value"):
            projection = getattr(attention, role)
            assert (projection is None) is (role in unknown)
            if projection is None:
                continue
            ours = (
                torch.einsum("btd,hkd->bhtk", read, projection.weight) + projection.bias[None, :, None]
            )
            last = None if role == "value" else 1
            torch.testing.assert_close(
                ours[:, :, :last], getattr(call, role)[:, :, :last], rtol=1e-4, atol=1e-4
            )
        assert attention.output is not None
        written = torch.einsum("bhtk,hdk->btd", output, attention.output)
        place = (stream.kind, attention.layer)
        bias = getattr(seen.outputs.output_projections[place], "bias", None)  # type: ignore[index]
        written = written if bias is None else written + bias
        gave = seen.outputs.projected_outputs[place]  # type: ignore[index]
        torch.testing.assert_close(written, gave.reshape(written.shape), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_what_heads_read_and_write_is_what_reaches_the_seam(name):
    model = attnscope.load(random_model(name))  # type: ignore[arg-type]
    stream = read_stream_weights(model)
    unknown = ("query", "key") if name == "qwen3" else ()
    require_same(model, stream, unknown)
    assert bool(stream.notes) is bool(unknown)
    pre_norm = name not in MASKED
    assert all((one.norm is not None) is pre_norm for one in stream.attentions)
    assert (stream.final_norm is not None) is pre_norm is stream.is_direct is not stream.is_post_norm
    assert all((one.output_norm is not None) is (name == "gemma2") for one in stream.attentions)
    assert stream.unembedding is not None
    assert stream.unembedding.shape == (37, 24)


def test_the_project_s_own_engines(tiny_bert):
    for spec in (str(tiny_bert), "own"):
        model = attnscope.load(spec)
        assert model.info.engine == "native"
        stream = read_stream_weights(model)
        require_same(model, stream)
        assert stream.unembedding is None
        assert not stream.notes


def test_a_head_that_was_pruned_is_zero_and_no_other_takes_its_place():
    """Rows that all give 0 cannot be told apart by what they give."""
    source = random_model("llama")
    attention = source.model.layers[0].self_attn
    with torch.no_grad():
        for part in (attention.q_proj, attention.v_proj):
            part.weight[:8], part.bias[:8] = 0, 0
    stream = read_stream_weights(attnscope.load(source))  # type: ignore[arg-type]
    value = stream.attentions[0].value
    assert value is not None
    torch.testing.assert_close(value.weight.reshape(8, 24), attention.v_proj.weight)


def test_what_is_not_one_stack_at_the_seam_is_refused_in_a_line(tmp_path):
    small = {"d_model": 15, "d_kv": 5, "num_heads": 3, "num_layers": 2, "d_ff": 11, "pad_token_id": 0}
    model = attnscope.load(str(write_tiny(tmp_path / "t5", "t5", **small, decoder_start_token_id=0)))
    with pytest.raises(AttnscopeError, match="`weights` reads one stack of layers"):
        read_stream_weights(model)
    plain = attnscope.load(str(write_tiny(tmp_path / "bert")), engine="numpy")
    with pytest.raises(AttnscopeError, match="does not show which weights"):
        read_stream_weights(plain)


def test_a_map_before_the_projections_is_no_guess():
    """What the projections read is then neither the stream nor a norm of it."""
    source = random_model("llama")
    for layer in source.model.layers:
        layer.input_layernorm = torch.nn.Sequential(layer.input_layernorm, torch.nn.Tanh())
    with pytest.raises(AttnscopeError, match="is not known"):
        read_stream_weights(attnscope.load(source, check=False))  # type: ignore[arg-type]
