"""Models without some heads, as files: what is zero, that any user of transformers can load them, and bad input."""

import pytest
import torch
import transformers
from safetensors.torch import load_file

from attnscope.choice import Choice
from attnscope.core.attention.probes import HeadGate
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.hf.assembling import wrap
from attnscope.questions.ablate import AblateOptions
from attnscope.studies.ablate import save as pruning
from attnscope.studies.ablate.save import EXAMPLE_TARGET, prune
from tests.ablation_helpers import SIZES, batch_of, save_tiny, tiny


def without(pick, out, kind=None, target=None):
    """Return the options that write a model without some heads."""
    return AblateOptions(modes=("zero",), choice=Choice(pick=pick), save=out, kind=kind, target=target)


def _pruned(tmp_path, name, pick, kind=None, **more):
    source = save_tiny(tmp_path / name, name, **more)
    out = tmp_path / "out"
    prune(str(source), [EXAMPLE_TARGET], without(pick, out, kind, target="a cat" if kind else None))
    return source, out


@pytest.mark.parametrize(
    ("name", "kind", "pick", "n_heads"),
    [
        ("bert", "encoder", ((0, 1), (2, 2)), 3),
        ("gpt2", "decoder", ((0, 1), (2, 2)), 3),
        ("llama", "decoder", ((0, 1), (2, 3), (2, 4), (2, 5)), 6),
        ("gpt_neox", "decoder", ((0, 1), (1, 2)), 3),
        ("phi3", "decoder", ((0, 1), (1, 3), (1, 4), (1, 5)), 6),
        ("t5", "cross", ((0, 1), (1, 2)), 3),
        ("bart", "encoder", ((0, 1), (1, 2)), 3),
    ],
)
def test_transformers_loads_it_and_computes_what_the_gated_model_does(
    tmp_path, name, kind, pick, n_heads
):
    source, out = _pruned(tmp_path, name, pick, kind if name in ("t5", "bart") else None)
    model_class = getattr(transformers, SIZES[name][0])
    theirs, original = (model_class.from_pretrained(folder).eval() for folder in (out, source))
    gate = {(kind, layer): torch.ones(n_heads) for layer, _ in pick}
    for layer, head in pick:
        gate[kind, layer][head] = 0
    model = wrap(original)
    batch = batch_of(model)
    given = {"input_ids": batch.ids}
    if batch.target_ids is not None:
        given["decoder_input_ids"] = batch.target_ids
    with torch.no_grad():
        ours = model.outputs(batch, HeadGate(gate)).logits
        found = theirs(**given).logits
    assert ours is not None
    torch.testing.assert_close(found, ours, rtol=1e-6, atol=1e-6 * float(ours.abs().max()))


def test_only_the_heads_own_numbers_are_zero_where_queries_are_grouped(tmp_path):
    source, out = _pruned(tmp_path, "llama", ((0, 1), (2, 3), (2, 4), (2, 5)))
    before, after = (load_file(folder / "model.safetensors") for folder in (source, out))
    changed = {
        name: (before[name] != after[name])
        for name in before
        if not torch.equal(before[name], after[name])
    }
    start = "model.layers.{}.self_attn.{}_proj.weight"
    expected = {
        start.format(0, "q"): (0, range(4, 8)),
        start.format(0, "o"): (1, range(4, 8)),
        start.format(2, "q"): (0, range(12, 24)),
        start.format(2, "k"): (0, range(4, 8)),
        start.format(2, "v"): (0, range(4, 8)),
        start.format(2, "o"): (1, range(12, 24)),
    }
    assert set(changed) == set(expected)
    for name, (axis, places) in expected.items():
        assert changed[name].any(1 - axis).nonzero().flatten().tolist() == list(places)
        assert not after[name].index_select(axis, torch.tensor(list(places))).any()


def test_half_precision_and_shards_stay(tmp_path):
    from tests.conftest import VOCABULARY, write_tokenizer

    source = tmp_path / "sharded"
    tiny("llama", vocab_size=len(VOCABULARY)).to(torch.bfloat16).save_pretrained(
        source, max_shard_size="4KB"
    )
    write_tokenizer(source)
    shards = sorted(path.name for path in source.glob("*.safetensors"))
    assert len(shards) > 1
    prune(str(source), [EXAMPLE_TARGET], without(((1, 2),), tmp_path / "out"))
    assert sorted(path.name for path in (tmp_path / "out").glob("*.safetensors")) == shards
    after = {k: v for name in shards for k, v in load_file(tmp_path / "out" / name).items()}
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert not after["model.layers.1.self_attn.q_proj.weight"][8:12].any()


def test_what_was_written_wrong_is_not_kept(tmp_path, monkeypatch):
    source = save_tiny(tmp_path / "bert", "bert")
    monkeypatch.setattr(pruning, "_zero_slice", lambda tensor, one: tensor.mul_(0.5))
    with pytest.raises(AttnscopeError, match="differs from the model without these heads"):
        prune(str(source), [EXAMPLE_TARGET], without(((0, 1),), tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bert"]


def test_what_cannot_be_pruned_is_said(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(AttnscopeError, match="own"):
        prune("own", [EXAMPLE_TARGET], without(((0, 1),), out))
    with pytest.raises(UsageError, match="no head is named"):
        prune("minilm", [EXAMPLE_TARGET], without(None, out))
    source = save_tiny(tmp_path / "bert", "bert")
    with pytest.raises(AttnscopeError, match="there already, with files in it"):
        prune(str(source), [EXAMPLE_TARGET], without(((0, 1),), source))
    with pytest.raises(AttnscopeError, match="no head 3"):
        prune(str(source), [EXAMPLE_TARGET], without(((0, 3),), out))
    assert not out.exists()
