"""A model compared with itself without some heads: what later heads do after an ablation."""

import numpy as np
import pytest
import transformers

import attnscope
from tests.conftest import write_tiny

TEXT = "the cat sat on a mat."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("bert"), num_hidden_layers=3)


def test_which_later_maps_change_when_a_head_is_taken_out_is_what_eager_attention_says(folder):
    model = attnscope.load(folder, engine="hf")
    record = attnscope.compare_models(model, attnscope.without_heads(model, [(0, 2), (1, 0)]), TEXT)
    eager = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    inputs = transformers.AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt")
    whole = eager(**inputs, output_attentions=True).attentions
    for layer, head in ((0, 2), (1, 0)):

        def take_out(module, values, head=head):
            values[0][..., 5 * head : 5 * head + 5] = 0
            return values

        eager.encoder.layer[layer].attention.output.dense.register_forward_pre_hook(take_out)
    rest = eager(**inputs, output_attentions=True).attentions
    # (layer, head, query, key), then the root of the mean squared Hellinger distance of each head.
    first = np.concatenate([w.detach().double().numpy() for w in whole])
    second = np.concatenate([w.detach().double().numpy() for w in rest])
    expected = np.sqrt((1 - np.sqrt(first * second).sum(-1)).mean(-1).clip(0)).ravel()
    np.testing.assert_allclose(np.diag(record.distance()), expected, atol=1e-3)
    np.testing.assert_allclose(np.diag(record.distance())[3:], expected[3:], atol=1e-5)
    assert expected[3:].min() > 1e-3
    assert record.options["other_run"]["model"].endswith(" without L0H2, L1H0")


def test_what_later_heads_do_after_an_ablation_on_the_command_line(run, folder):
    done = run("compare", TEXT, "-m", str(folder), "--ablated", "L0H2", "--measures", "hellinger", "-q")
    assert done.status == 0
    assert "without L0H2" in done.out
    assert "differs most from the head of its number" in done.out
    done = run("compare", TEXT, "-m", str(folder), "--ablated", "L9H9")
    assert done.status == 1
    assert "no layer 9" in done.err
    done = run("compare", TEXT, "--ablated", "L0H2", "--with", "the dog")
    assert done.status == 2
    assert "different comparisons" in done.err
