"""Second sinks: tokens whose hidden states are far longer than others of their text, layer by layer."""

import numpy as np
import pytest
import torch

import attnscope
from attnscope.core.attention.probes import WeightsRecorder
from attnscope.core.facts import TextFacts, find_outlier_tokens
from attnscope.models.inside.projections import record_input_lengths
from attnscope.models.model import Batch
from attnscope.studies.heads.study import heads
from tests.conftest import write_tiny
from tests.heads_helpers import heads_in

LOUD = 7
"""A token whose embedding is long."""


def llama():
    """A random Llama of two layers, in which one token's hidden state is long."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=30,
        hidden_size=24,
        num_attention_heads=6,
        num_key_value_heads=2,
        num_hidden_layers=2,
        intermediate_size=16,
        max_position_embeddings=64,
    )
    model = LlamaModel(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.1)
        model.embed_tokens.weight[LOUD] *= 60
    return model


def test_what_is_outlying_is_told_in_each_text():
    real = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    facts = TextFacts(
        real=real, special=torch.zeros_like(real), ids=torch.zeros(2, 6, dtype=torch.int64)
    )
    norms = torch.tensor([[9.0, 1, 1, 4, 1, 2], [2.0, 2, 4, 7, 50, 50]])
    # The first token is a sink already; padding is nothing, and does not move the median.
    assert find_outlier_tokens(norms, facts).tolist() == [
        [False, False, False, True, False, False],
        [False, False, False, True, False, False],
    ]


def test_the_mass_on_outlying_tokens():
    model = attnscope.load(llama())
    chance = np.random.default_rng(0)
    texts = []
    for number in range(12):
        ids = chance.integers(8, 30, 20).tolist()
        ids[3 + number % 3] = LOUD
        texts.append(attnscope.corpus.CorpusText(number, "ids", number + 1, ids=tuple(ids)))
    found = heads(model, texts)
    sums = np.zeros((2, 6))
    counts = 0
    active = np.zeros((2, 6))
    for text in texts:
        probe = WeightsRecorder()
        with torch.no_grad():
            model.run(Batch(torch.tensor([text.ids])), probe)
        at = list(text.ids).index(LOUD)
        counts += len(text.ids) - at
        for layer, weights in probe.maps["decoder"].items():
            sums[layer] += weights[0, :, at:, at].double().sum(-1).numpy()
            active[layer] += weights[0, :, at:, 1:].double().sum((-1, -2)).numpy()
    np.testing.assert_allclose(found["heads"].grid("outlier_token", "decoder"), sums / counts, atol=1e-5)
    np.testing.assert_allclose(
        found["heads"].grid("outlier_token_active", "decoder"), sums / active, atol=1e-5
    )
    assert heads_in(found)[0].measures["outlier_token"].count == pytest.approx(counts, rel=1e-12)


def test_without_outlying_tokens_the_measure_is_undefined():
    found = heads(
        attnscope.load(llama()), [attnscope.corpus.CorpusText(0, "ids", 1, ids=(9, 10, 11, 12))]
    )
    assert np.isnan(found["heads"].grid("outlier_token", "decoder")).all()


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_both_engines_see_the_hidden_states_that_layers_read(engine, tmp_path):
    from transformers import AutoModel

    folder = write_tiny(tmp_path / "bert")
    model = attnscope.load(str(folder), engine=engine)
    tokens = torch.from_numpy(model.tokenizer.encode("the cat saw a cat").ids)[None]
    plain = AutoModel.from_pretrained(folder)(input_ids=tokens, output_hidden_states=True)
    with torch.no_grad(), record_input_lengths(model.blocks()) as norms:
        model.run(Batch(tokens), WeightsRecorder())
        for layer in range(2):
            seen = norms("encoder", layer)
            assert seen is not None
            torch.testing.assert_close(
                seen, plain.hidden_states[layer].detach().norm(dim=-1), rtol=1e-5, atol=1e-5
            )
    assert norms("encoder", 0) is None
    assert norms("cross", 0) is None
