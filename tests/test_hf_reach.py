"""Texts longer than windows and blocks: what is shown of them is true, and a model is left as it is."""

import copy
import functools

import pytest
import torch
import transformers
from transformers import AutoModel
from transformers.models.llama import modeling_llama

from attnscope.core.attention.probes import WeightsRecorder
from attnscope.core.attention.seam import attend
from attnscope.errors import AttnscopeError
from attnscope.models.hf import check
from attnscope.models.hf.assembling import wrap
from attnscope.models.hf.examples import TEXT_LENGTHS
from attnscope.models.hf.seam import use_attention
from attnscope.models.model import Batch
from tests.hf_tally import boost, build


def text(n, seed=3):
    return torch.randint(5, 55, (1, n), generator=torch.Generator().manual_seed(seed))


def state(model):
    """Everything that is no tensor, and which objects a model is made of."""
    found = [model.config.to_dict()]
    for name, module in model.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str)}
        hooks = {k: list(v) for k, v in vars(module).items() if "hooks" in k}
        found.append(
            (name, id(module), plain, hooks, [id(buffer) for buffer in module.buffers(recurse=False)])
        )
    return found


def big_bird(**more):
    """Build one that attends in full up to 28 tokens, block-sparsely beyond."""
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    sizes |= {"vocab_size": 60, "block_size": 4, "num_random_blocks": 1, "max_position_embeddings": 96}
    torch.manual_seed(0)
    model = AutoModel.from_config(transformers.BigBirdConfig(**sizes, **more))
    boost(model)
    return model.eval()


def llama(**more):
    model = build("llama")
    for name, value in more.items():
        setattr(model.config, name, value)
    return model


def _differs_from(n_tokens):
    """Llama's own eager attention, that attends otherwise to texts of so many tokens and more."""
    true = modeling_llama.eager_attention_forward

    def attention(module, query, key, value, *rest, **given):
        factor = 1.0 if query.shape[2] < n_tokens else 0.5
        return true(module, query * factor, key, value, *rest, **given)

    return attention


def test_what_begins_at_the_tenth_token_is_found_at_load(monkeypatch):
    assert max(TEXT_LENGTHS) < 10
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", _differs_from(10))
    with pytest.raises(AttnscopeError, match="self-check"):
        wrap(llama())
    assert wrap(llama(), check=False).info.checked is False


def test_what_begins_behind_a_window_is_found_at_load_or_with_the_first_text_that_reaches_it(
    monkeypatch,
):
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", _differs_from(45))
    wrap(llama())
    with pytest.raises(AttnscopeError, match="self-check"):
        wrap(llama(sliding_window=44))
    # Where that would take too long at load.
    monkeypatch.setattr(check, "_MAX_WORK_AT_LOAD", 1.0)
    shown = wrap(llama(sliding_window=44))
    shown.run(Batch(text(44)), attend)
    with pytest.raises(AttnscopeError, match="self-check"):
        shown.run(Batch(text(50)), attend)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, torch.OutOfMemoryError])
def test_a_comparison_that_was_cut_short_is_made_anew(error, monkeypatch):
    monkeypatch.setattr(check, "_MAX_WORK_AT_LOAD", 1.0)
    shown = wrap(llama(sliding_window=44))
    true = modeling_llama.LlamaModel.forward

    @functools.wraps(true)
    def forward(self, *given, **named):
        if named["input_ids"].shape[1] > 60:  # the check's text, not the user's
            raise error
        return true(self, *given, **named)

    with monkeypatch.context() as cut_short:
        cut_short.setattr(modeling_llama.LlamaModel, "forward", forward)
        for _ in range(2):
            with pytest.raises(error):
                shown.run(Batch(text(50)), attend)
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", _differs_from(45))
    with pytest.raises(AttnscopeError, match="self-check"):
        shown.run(Batch(text(50)), attend)


def test_hooks_buffers_lists_and_settings_are_put_back():
    model = llama()
    before = copy.copy(vars(model)), state(model)
    with pytest.raises(KeyError), use_attention(model, None):
        model.layers[0].register_forward_hook(lambda *_: None)
        model.rotary_emb.register_buffer("inv_freq", torch.ones(4), persistent=False)
        model.rotary_emb.max_seq_len_cached = 1_000_000
        model.config.rope_parameters["rope_theta"] = 7.0
        model.layers[1].self_attn = torch.nn.Identity()
        model.extra = 1
        raise KeyError
    assert (vars(model), state(model)) == before


def test_a_model_that_changes_itself_as_it_runs_is_left_as_it_is():
    model = big_bird()
    with torch.no_grad():
        before = state(model)
        expected = big_bird()(text(45)).last_hidden_state
    wrap(model).run(Batch(text(9)), WeightsRecorder())
    assert state(model) == before
    assert model.attention_type == "block_sparse"
    with torch.no_grad():
        assert torch.equal(model(text(45)).last_hidden_state, expected)


def test_short_texts_are_attended_to_in_full_and_sparse_maps_are_refused_whatever_came_before():
    shown = wrap(big_bird())
    full = big_bird(attention_type="original_full")
    full.load_state_dict(big_bird().state_dict())
    for n in (9, 28):
        probe = WeightsRecorder()
        hidden = shown.run(Batch(text(n)), probe)
        with torch.no_grad():
            twin = full(text(n), output_attentions=True)
        torch.testing.assert_close(hidden, twin.last_hidden_state, rtol=1e-4, atol=1e-5)
        for own, other in zip(probe.maps["encoder"].values(), twin.attentions, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6)
        # At inference every random block is block 0: attended to twice, with one of its weights given out.
        for length in (29, 45, 48):
            with pytest.raises(AttnscopeError, match=r"text of \d+ tokens .* no softmax weights"):
                shown.run(Batch(text(length)), WeightsRecorder())
