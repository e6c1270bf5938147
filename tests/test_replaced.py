"""Weights from elsewhere in the place of heads' own: equal to plain hooks; a line that is the head changes nothing."""

import importlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnscope
from attnscope.core.attention.probes import Weights
from attnscope.core.attention.seam import attend
from attnscope.core.interventions.replaced import Replaced, Replacement, evenly, on_first_key, scores_of
from attnscope.corpus import CorpusText
from attnscope.errors import AttnscopeError
from attnscope.models.hf.model import HuggingFaceModel, wrap
from attnscope.models.model import Batch
from attnscope.records.ablation import Effect
from attnscope.studies.ablation.effects import causal_share
from attnscope.studies.ablation.lines import Lines, apart
from attnscope.studies.ablation.options import AblateOptions
from attnscope.studies.ablation.reading import PaddedTexts
from attnscope.studies.ablation.sweep import Cut, StandIns, replaced_of
from attnscope.studies.inputs.choice import Choice
from attnscope.studies.running.workers import Workers
from benchmarks.known.planted import plant
from tests import ablation_helpers
from tests.ablation_helpers import tiny

WIDE = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 11,
        "num_hidden_layers": 2, "head_dim": 4, "pad_token_id": 0}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {}, "gpt2": {}, "llama": {}, "t5": {}, "albert": {}, "gpt_neox": {}, "phi3": {}, "olmo2": {}, "bart": {},
    "mistral": {"sliding_window": 3}, "gemma2": {"sliding_window": 3, "attn_logit_softcapping": 2.0}, "gpt_oss": {},
}  # fmt: skip
"""Among them grouped queries, windows, soft caps, sinks, position biases and encoder-decoders."""

MORE = {
    "mistral": ("MistralForCausalLM", "MistralConfig", WIDE),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", WIDE),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        WIDE | {"hidden_size": 48, "intermediate_size": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),  # fmt: skip
}
IDS = torch.tensor([[3, 5, 9, 4, 8, 7, 6], [7, 3, 11, 12, 5, 0, 0]])
REAL = IDS > 0
TARGET = torch.tensor([[4, 6, 8, 5, 9], [9, 8, 7, 6, 4]])
HEAD = 1


@pytest.fixture(autouse=True)
def more_families(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation_helpers, "SIZES", ablation_helpers.SIZES | MORE)


def scores(n_queries: int, n_keys: int) -> torch.Tensor:
    return torch.outer(torch.arange(n_queries) + 1.0, torch.arange(n_keys) * 1.3 + 0.4).sin() * 2


def hook_eager(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the weights of one head in every eager attention of a model's own module."""
    module = importlib.import_module(type(source).__module__)
    original = module.eager_attention_forward

    def forward(self: Any, query: Any, key: Any, value: Any, *more: Any, **named: Any) -> Any:
        output, weights = original(self, query, key, value, *more, **named)
        allowed = weights > 0
        chosen = scores(*weights.shape[-2:]).to(weights).expand(weights.shape[0], 1, -1, -1)
        rows = chosen.masked_fill(~allowed[:, HEAD : HEAD + 1], -torch.inf).softmax(-1).nan_to_num(0)
        group = weights.shape[1] // value.shape[1]
        output = output.clone()
        output[:, :, HEAD] = (rows[:, 0] @ value[:, HEAD // group]).to(output)
        return output, weights

    monkeypatch.setattr(module, "eager_attention_forward", forward)


@pytest.mark.parametrize("family", FAMILIES)
def test_replaced_weights_equal_plain_hooks_on_eager_attention(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrap(tiny(family, **FAMILIES[family]))
    across = "cross" in model.info.kinds
    sizes = {"encoder": (7, 7), "decoder": (5, 5) if across else (7, 7), "cross": (5, 7)}
    replacements: Any = {
        (kind, layer): [Replacement((HEAD,), scores(*sizes[kind]))]
        for kind, n_layers in zip(model.info.kinds, model.info.n_layers, strict=True)
        for layer in range(n_layers)
    }
    with torch.no_grad():
        batch = Batch(IDS, REAL, target_ids=TARGET if across else None)
        ours = model.outputs(batch, Replaced(replacements))
        own = model.outputs(batch, attend)
    eager = tiny(family, **FAMILIES[family])
    eager.set_attn_implementation("eager")
    hook_eager(eager, monkeypatch)
    with torch.no_grad():
        named = {"decoder_input_ids": TARGET} if across else {}
        theirs = eager(input_ids=IDS, attention_mask=REAL.long(), **named).logits
    assert ours.logits is not None and own.logits is not None
    kept = slice(None) if across else REAL
    torch.testing.assert_close(ours.logits[kept], theirs[kept], rtol=1e-4, atol=1e-5)
    assert (ours.logits - own.logits)[kept].abs().max() > 1e-3


@pytest.fixture(scope="module")
def gpt2() -> HuggingFaceModel:
    return wrap(tiny("gpt2"))


def run(model: HuggingFaceModel, replacement: Replacement) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states with a replacement in layer 1, and the model's own weights there."""
    kept = Weights()
    with torch.no_grad():
        model.run(Batch(IDS[:1]), kept)
        hidden = model.outputs(Batch(IDS[:1]), Replaced({("decoder", 1): [replacement]})).hidden
    return hidden, kept.maps["decoder"][1]


def test_a_heads_own_weights_in_its_place_change_nothing(gpt2: HuggingFaceModel) -> None:
    _, weights = run(gpt2, Replacement((0,)))
    hidden, _ = run(gpt2, Replacement((0, 2), scores_of(weights[:, [0, 2]])))
    with torch.no_grad():
        own = gpt2.outputs(Batch(IDS[:1]), attend).hidden
    torch.testing.assert_close(hidden, own, rtol=1e-5, atol=1e-5)
    assert (run(gpt2, Replacement((0,), evenly()))[0] - own).abs().max() > 1e-3


def test_an_edge_that_is_taken_out_is_not_seen_and_the_others_grow(gpt2: HuggingFaceModel) -> None:
    hidden = torch.zeros(1, 1, 7, 7, dtype=torch.bool)
    hidden[..., 5, 2] = True
    without, weights = run(gpt2, Replacement((1,), hidden=hidden))
    left = weights[:, 1:2].masked_fill(hidden, 0)
    same, _ = run(gpt2, Replacement((1,), scores_of(left / left.sum(-1, keepdim=True))))
    torch.testing.assert_close(without, same, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(without[:, :5], run(gpt2, Replacement((1,)))[0][:, :5])
    assert (without[:, 5] - run(gpt2, Replacement((1,)))[0][:, 5]).abs().max() > 1e-4


def test_all_on_one_key_is_that_keys_value(gpt2: HuggingFaceModel) -> None:
    one = torch.zeros(1, 1, 7, 7)
    one[..., 0] = 1
    assert torch.equal(
        run(gpt2, Replacement((2,), on_first_key(7)))[0], run(gpt2, Replacement((2,), scores_of(one)))[0]
    )


def test_a_head_that_is_not_there_is_refused(gpt2: HuggingFaceModel) -> None:
    with pytest.raises(ValueError, match="has 3 heads"):
        run(gpt2, Replacement((3,), evenly()))


# Lines ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharp() -> Any:
    """A planted model, whose last layer's heads write what they attend to."""
    known = plant("gpt2", 0)
    network = known.model.network.base
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        network.ln_f.weight.fill_(1.0)
        attention, width = network.h[-1].attn, network.config.n_embd
        attention.c_attn.weight[:, 2 * width :].normal_(std=0.1, generator=chance)
        attention.c_proj.weight.normal_(std=0.1, generator=chance)
    return known


@pytest.mark.slow
def test_heads_that_are_their_lines_lose_less_than_by_any_control(sharp: Any) -> None:
    texts = [text.written for text in (*sharp.texts, *sharp.held_out)]
    modes = ("line", "uniform", "sink", "other")
    found = attnscope.ablate(sharp.model, texts, AblateOptions(modes=modes))
    names = {place: [rule.words for rule in truth.rules] for place, truth in sharp.heads.items()}
    simple = [head for head in found.heads if head.layer == 1 and len(names.get((1, head.head), ())) == 1]
    assert len(simple) >= 4
    assert np.mean([head.effects["line_l2"].value < head.effects["other_l2"].value for head in simple]) > 0.8
    lost = {mode: np.array([head.effects[f"{mode}_l2"].value for head in simple]) for mode in modes}
    for control in ("uniform", "sink"):
        assert np.median(lost["line"] / lost[control]) < 0.4 and (lost["line"] < lost[control]).mean() > 0.9
    shares = [head.effects["causal_share"] for head in simple]
    assert all(share.low <= share.value <= share.high for share in shares)
    assert np.median([share.value for share in shares]) > 0.6 and max(share.value for share in shares) > 0.9
    assert any("take the place of weights" in note for note in found.run["notes"])


def test_a_head_that_is_its_line_loses_nothing_by_it() -> None:
    path = Path(__file__).parents[1] / "sample_texts" / "alice.txt"
    texts = list(attnscope.Corpus(path, split="paragraph"))[:10]
    exact = (0, 3), (0, 6)  # the first token, all tokens alike
    options = AblateOptions(modes=("line", "other"), choice=Choice(pick=exact))
    for head in attnscope.ablate(attnscope.load("own-causal"), texts, options).heads:
        assert head.effects["line_l2"].value < 1e-4 < 0.1 < head.effects["other_l2"].value


def attends_to_first(nats: list[float]) -> HuggingFaceModel:
    """A model of one layer whose heads' weights are the softmax of so many nats for the first token, 0 for others."""
    network = tiny("gpt2", n_layer=1)
    base, width = network.transformer, network.config.n_embd
    chance = torch.Generator().manual_seed(0)
    signs = torch.tensor([1.0, -1.0] * 5)
    place = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0])
    with torch.no_grad():
        # Mean 0 and one length, whatever the token and place are: then the norm of the layer only scales.
        rows = [signs[torch.randperm(10, generator=chance)] for _ in base.wte.weight]
        base.wte.weight.copy_(torch.cat([torch.stack(rows), torch.zeros(len(rows), 5)], 1))
        base.wpe.weight.copy_(
            torch.cat([torch.zeros(len(base.wpe.weight), 10), -place.repeat(len(base.wpe.weight), 1)], 1)
        )
        base.wpe.weight[0] *= -1
        block = base.h[0]
        block.ln_1.weight.fill_(1)
        block.ln_1.bias.zero_()
        block.attn.c_attn.weight[:, : 2 * width] = 0
        block.attn.c_attn.bias[: 2 * width] = 0
        for head, score in enumerate(nats):
            block.attn.c_attn.bias[5 * head] = score * 5**0.5 / 2
            block.attn.c_attn.weight[10, width + 5 * head] = (14 / 15) ** 0.5
    return wrap(network)


def test_heads_that_are_their_lines_lose_nothing_by_them_and_much_by_anothers() -> None:
    nats = [8.0, 3.0, 1.0]
    model = attends_to_first(nats)
    kept = Weights()
    with torch.no_grad():
        model.run(Batch(IDS[:1]), kept)
    own = kept.maps["decoder"][0][0]
    for head, score in enumerate(nats):
        expected = torch.tensor([score, *[0.0] * 6]).softmax(0)
        torch.testing.assert_close(own[head, 6], expected, rtol=1e-4, atol=1e-5)
    found = attnscope.ablate(model, numbered_texts(24), AblateOptions(modes=("line", "other")))
    print(
        [(h.name, [round(h.effects[k].value, 7) for k in ("line_loss", "other_loss", "line_l2")]) for h in found.heads]
    )
    for head in found.heads:
        assert abs(head.effects["line_loss"].value) < 1e-4 < 0.01 < abs(head.effects["other_loss"].value)


def test_lines_are_fitted_on_other_texts_than_they_replace_weights_on(sharp: Any) -> None:
    texts = [text.written for text in sharp.texts[:9]]
    found = attnscope.ablate(sharp.model, texts, AblateOptions(modes=("line",)))
    assert found.corpus["n_texts"] == 5
    assert "causal_share" not in found.heads[0].effects
    with pytest.raises(AttnscopeError, match="too few"):
        attnscope.ablate(sharp.model, texts[:3], AblateOptions(modes=("line",)))


def test_lines_of_a_model_with_several_kinds_are_refused_and_uniform_is_not() -> None:
    model = wrap(tiny("bart"))
    with pytest.raises(AttnscopeError, match="one kind"):
        attnscope.ablate(model, ["5 7 9"] * 4, AblateOptions(modes=("line",)))


def test_the_tokens_that_suffer_most_are_kept_with_their_losses(gpt2: HuggingFaceModel) -> None:
    texts = numbered_texts(8)
    found = attnscope.ablate(gpt2, texts, AblateOptions(modes=("line",)))
    together = [token for token in found.worst_tokens if not token.heads]
    assert len(together) == 20 and [one.change for one in together] == sorted(
        (t.change for t in together), reverse=True
    )
    assert len(found.worst_tokens) == 20 + 9 * 20 and len({(one.text, one.place) for one in together}) == 20
    lines = fit_lines_of(gpt2, texts)
    worst, risen = together[0], []
    with torch.no_grad(), attnscope.replaced(gpt2, lines) as network:
        replaced = {index: losses(network, texts[index]) for index in {one.text for one in together}}
    for index, after in replaced.items():
        with torch.no_grad():
            own = losses(gpt2.network.model, texts[index])
        risen += (after - own).tolist()
        if index == worst.text:
            assert worst.loss == pytest.approx(float(own[worst.place - 1]), rel=1e-4)
            assert worst.change == pytest.approx(float((after - own)[worst.place - 1]), rel=1e-3)
            words = texts[index].split()
            assert worst.token.strip("#") == words[worst.place] and worst.before.endswith(words[worst.place - 1])
    assert max(risen) == pytest.approx(worst.change, rel=1e-3)
    assert worst.source == f"texts:{worst.text + 1}"


def numbered_texts(n: int) -> list[str]:
    numbers = np.random.default_rng(0).permuted(np.tile(np.delete(np.arange(41), UNKNOWN), (n, 1)), axis=1)[:, :14]
    return [" ".join(map(str, row)) for row in numbers.tolist()]


def losses(network: Any, text: str) -> torch.Tensor:
    ids = torch.tensor([[int(word) for word in text.split()]])
    logs = network(ids).logits[0, :-1].log_softmax(-1)
    return -logs[torch.arange(len(logs)), ids[0, 1:]]


def fit_lines_of(model: HuggingFaceModel, texts: list[str]) -> Lines:
    """Lines as an ablation fits them: on half of the texts."""
    written = [CorpusText(n, "texts", n + 1, text=text) for n, text in enumerate(texts)]
    fitted, tried = apart(written, 0)
    return attnscope.fit_lines(model, fitted, tried)


def test_without_a_loss_tokens_are_ranked_by_their_hidden_states(gpt2: HuggingFaceModel) -> None:
    texts = numbered_texts(8)
    found = attnscope.ablate(gpt2, texts, AblateOptions(modes=("line",), loss="none"))
    worst = found.worst_tokens[0]
    base, ids = gpt2.network.base, torch.tensor([[int(word) for word in texts[worst.text].split()]])
    with torch.no_grad():
        own = base(ids).last_hidden_state[0]
        with attnscope.replaced(gpt2, fit_lines_of(gpt2, texts)):
            moved = base(ids).last_hidden_state[0]
    change = (moved - own).norm(dim=-1) / own.norm(dim=-1)
    assert worst.place == int(change.argmax()) and np.isnan(worst.loss)
    assert worst.change == pytest.approx(float(change.max()), rel=1e-3)


def test_lines_are_the_same_in_a_worker(gpt2: HuggingFaceModel, lines: Lines) -> None:
    sent = pickle.loads(pickle.dumps(lines)).of_model(gpt2)
    tokens = gpt2.tokenizer.encode_ids(IDS[0].tolist())
    allowed = np.tril(np.ones((7, 7), np.bool_))
    for head in range(3):
        ours, theirs = (one.expectations.scores(tokens, ("decoder", 1), head, allowed) for one in (lines, sent))
        assert np.array_equal(ours, theirs)


@pytest.mark.slow
def test_workers_put_lines_in_place_to_the_same_result() -> None:
    texts = (Path(__file__).parents[1] / "sample_texts" / "sentences.txt").read_text("utf-8").splitlines()[:8]
    options = AblateOptions(modes=("line", "pattern", "uniform"), choice=Choice(pick=((0, 2), (0, 4))))
    alone = attnscope.ablate(attnscope.load("own"), texts, options)
    shared = attnscope.ablate(attnscope.load("own"), texts, options, workers=Workers("own", 2))
    assert (alone.heads, alone.sets) == (shared.heads, shared.sets)
    assert repr(alone.worst_tokens) == repr(shared.worst_tokens)  # without a loss there are NaN, which equal nothing


def test_curves_replace_more_and_more_heads_with_each_control(sharp: Any) -> None:
    texts = [text.written for text in sharp.texts[:6]]
    found = attnscope.ablate(sharp.model, texts, AblateOptions(modes=("line", "uniform"), curve=True))
    assert len(found.curves) == 1 + 1 + 3 + 3 and len(found.curves[0].n_left) == 9
    assert {(curve.mode, curve.order) for curve in found.curves} == {
        ("line", "explained"), ("line", "unexplained"), ("line", "random"), ("uniform", "random")
    }  # fmt: skip
    by = {(curve.mode, curve.order): curve for curve in found.curves}
    best, worst = by["line", "explained"], by["line", "unexplained"]
    assert best.removed == worst.removed[::-1] and best.n_left[-1] == 0
    assert best.points[-1]["l2"].value == pytest.approx(worst.points[-1]["l2"].value, rel=1e-4)
    assert best.points[-1]["l2"].value < by["uniform", "random"].points[-1]["l2"].value


def test_a_causal_share_is_a_paired_ratio() -> None:
    chance = np.random.default_rng(0)
    uniform = chance.normal(1, 0.2, 400)
    line = 0.25 * uniform + chance.normal(0, 0.02, 400)

    def effect(values: np.ndarray) -> Effect:
        half = 1.96 * values.std() / np.sqrt(len(values))
        return Effect(values.mean(), values.mean() - half, values.mean() + half, len(values))

    share = causal_share(effect(line), effect(uniform), effect(line - uniform))
    assert share.value == pytest.approx(0.75, abs=0.01)
    assert 0.001 < share.high - share.low < 0.01  # unpaired it would be 0.02
    nothing = causal_share(effect(line), Effect(0.1, -0.1, 0.3, 400), effect(line))
    assert np.isnan([nothing.value, nothing.low, nothing.high]).all()


# A model that others evaluate -------------------------------------------------------------------------------------


UNKNOWN = 2


@pytest.fixture(scope="module")
def lines(gpt2: HuggingFaceModel) -> Lines:
    known = np.delete(np.arange(gpt2.network.model.config.vocab_size), UNKNOWN)
    numbers = np.random.default_rng(0).permuted(np.tile(known, (8, 1)), axis=1)
    return attnscope.fit_lines(gpt2, [" ".join(map(str, row)) for row in numbers.tolist()])


def test_a_replaced_model_runs_on_its_lines_whoever_calls_it(gpt2: HuggingFaceModel, lines: Lines) -> None:
    network = gpt2.network.model
    padded = torch.tensor([[0, 0, 7, 3, 11, 12, 5], [3, 5, 9, 4, 8, 7, 6]])
    real = padded > 0
    texts = PaddedTexts(tuple(gpt2.tokenizer.encode_ids(row[row > 0].tolist()) for row in padded), real.numpy())
    cut = Cut((("decoder", 0, 1), ("decoder", 1, 2)), "line")
    with torch.no_grad():
        own = network(padded, attention_mask=real.long()).logits
        expected = gpt2.outputs(
            Batch(padded, real), replaced_of([cut], "line", texts, StandIns({}, lines=lines))
        ).logits
        with attnscope.replaced(gpt2, lines, heads=[(0, 1), (1, 2)]) as inside:
            ours = inside(padded, attention_mask=real.long()).logits
            hidden = network.transformer(input_ids=padded, attention_mask=real.long()).last_hidden_state
        after = network(padded, attention_mask=real.long()).logits
    assert inside is network and expected is not None
    torch.testing.assert_close(ours[real], expected[real], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(network.lm_head(hidden), ours)
    assert (ours - own)[real].abs().max() > 1e-3
    assert torch.equal(after, own) and "forward" not in vars(network)


def test_a_model_runs_on_its_mean_patterns(gpt2: HuggingFaceModel, lines: Lines) -> None:
    network = gpt2.network.model
    with torch.no_grad():
        own = network(IDS[:1]).logits
        with attnscope.replaced(gpt2, lines, heads=[(1, 2)], by="pattern"):
            inside = network(IDS[:1]).logits
    torch.testing.assert_close(inside[:, 0], own[:, 0])
    assert (inside - own).abs().max() > 1e-3


def test_a_replaced_model_refuses_what_lines_cannot_be_computed_for(gpt2: HuggingFaceModel, lines: Lines) -> None:
    network = gpt2.network.model
    with attnscope.replaced(gpt2, lines), torch.no_grad():
        written = network.generate(IDS[:1], use_cache=False, max_new_tokens=2, do_sample=False, pad_token_id=0)
        assert written.shape == (1, 9)
        with pytest.raises(AttnscopeError, match="use_cache"):
            network.generate(IDS[:1], max_new_tokens=2, do_sample=False, pad_token_id=0)
        with pytest.raises(AttnscopeError, match="input_ids"):
            network(inputs_embeds=torch.zeros(1, 3, network.config.n_embd))
        with pytest.raises(AttnscopeError, match="leave the context"):
            gpt2.run(Batch(IDS[:1]), attend)
        with pytest.raises(AttnscopeError, match="token 2"):
            network(torch.tensor([[UNKNOWN, 3]]))
    with pytest.raises(AttnscopeError, match="no line for L7H0"), attnscope.replaced(gpt2, lines, heads=[(7, 0)]):
        pass
