"""Patching on pairs: equal to plain torch hooks, grouped queries included; bad pairs are named; shares and curves."""

import contextlib
import json

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import attnscope
from attnscope.core.interventions import ActivationRecorder
from attnscope.core.pairs import pair_means
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.hf.assembling import wrap
from attnscope.questions.patch import PATCHED_VALUES, Patching
from attnscope.studies.patch.pairs import make_pair_batches, read_pairs
from attnscope.studies.patch.runs import PairRuns, PatchSpec, list_units
from tests.conftest import VOCABULARY as VOCABULARY_OF_TINY
from tests.conftest import write_tiny, write_tokenizer
from tests.record_helpers import require_lossless

N_LAYERS = 2
VOCABULARY = 53
WITHIN = {"rtol": 1e-4, "atol": 1e-4}


def strong(model, seed=1):
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.6)
    return model.eval().requires_grad_(False)


def gpt2():
    sizes = {"n_embd": 20, "n_head": 4, "n_layer": N_LAYERS, "n_inner": 11, "n_positions": 29}
    return strong(GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes)))


def llama():
    """Six heads on two key/value heads."""
    sizes = {
        "hidden_size": 24,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_hidden_layers": N_LAYERS,
    }
    return strong(LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, intermediate_size=11, **sizes)))


@pytest.fixture(scope="module", params=[gpt2, llama], ids=["gpt2", "llama"])
def network(request):
    return request.param()


@pytest.fixture(scope="module")
def grouped():
    return wrap(llama(), name="grouped")


def entries(n=5, length=7, seed=0):
    """Random pairs that differ at two tokens, with one right and two wrong answers."""
    chance = np.random.default_rng(seed)
    made = []
    for _ in range(n):
        clean = chance.integers(0, VOCABULARY, length)
        corrupt = clean.copy()
        corrupt[[2, 4]] = (corrupt[[2, 4]] + chance.integers(1, VOCABULARY, 2)) % VOCABULARY
        right, wrong, other = chance.permutation(VOCABULARY)[:3].tolist()
        texts = {"clean": " ".join(map(str, clean)), "corrupt": " ".join(map(str, corrupt))}
        made.append({**texts, "right": right, "wrong": [str(wrong), other]})
    return made


# Against plain torch hooks ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def changed(module, change, *, before):
    """What a module is given, or gives, changed by a plain torch hook."""
    handle = (
        module.register_forward_pre_hook(lambda _, given: (change(given[0]), *given[1:]))
        if before
        else module.register_forward_hook(lambda _, given, gave: change(gave))
    )
    try:
        yield
    finally:
        handle.remove()


def modules(network, layer, by):
    """The linear map whose input or output a head's share is a slice of, and where the slices begin."""
    if isinstance(network, GPT2LMHeadModel):
        attention = network.transformer.h[layer].attn
        return (
            (attention.c_proj, 0)
            if by == "z"
            else (attention.c_attn, 20 * ("query", "key", "value").index(by))
        )
    attention = network.model.layers[layer].self_attn
    names = {
        "z": attention.o_proj,
        "query": attention.q_proj,
        "key": attention.k_proj,
        "value": attention.v_proj,
    }
    return names[by], 0


def hooked(network, by, layer, head, base, source, tokens):
    """Logits of the last token of a run in which a head has values of another run."""
    is_gpt2 = isinstance(network, GPT2LMHeadModel)
    width = 5 if is_gpt2 else 4
    seen = []
    read = "value" if by == "pattern" else by
    module, start = modules(network, layer, read)
    with changed(module, lambda x: seen.append(x) or x, before=by == "z"):
        network(base if by == "pattern" else source)
    number = head // 3 if by == "pattern" and not is_gpt2 else head
    part = seen[0][..., start + number * width : start + (number + 1) * width]
    if by == "pattern":
        network.set_attn_implementation("eager")
        part = network(source, output_attentions=True).attentions[layer][:, head] @ part
        by = "z"
    module, start = modules(network, layer, by)

    def put(tensor):
        tensor = tensor.clone()
        tensor[:, tokens, start + head * width : start + (head + 1) * width] = part[:, tokens]
        return tensor

    with changed(module, put, before=by == "z"):
        return network(base).logits[:, -1]


def score(logits, pairs):
    right = logits[range(len(pairs)), [pair["right"] for pair in pairs]]
    wrong = [[int(each) for each in pair["wrong"]] for pair in pairs]
    return (right - logits.gather(1, torch.tensor(wrong)).logsumexp(1)).double().numpy()


def ids(pairs, which):
    return torch.tensor([[int(number) for number in pair[which].split()] for pair in pairs])


def shown_by(network, pairs):
    """The same pairs, each in the order in which the model has a total effect above 0."""
    clean, corrupt = (
        score(network(ids(pairs, which)).logits[:, -1], pairs) for which in ("clean", "corrupt")
    )
    return [
        pair if more > 0 else {**pair, "clean": pair["corrupt"], "corrupt": pair["clean"]}
        for pair, more in zip(pairs, clean - corrupt, strict=True)
    ]


@pytest.mark.parametrize("direction", ["denoise", "noise"])
@pytest.mark.parametrize("by", PATCHED_VALUES)
def test_effects_are_those_of_plain_hooks(network, by, direction):
    pairs = entries()
    model = wrap(network, name="tiny", check=False)
    found = attnscope.patch(model, pairs, attnscope.PatchOptions(by=by, direction=direction))
    clean, corrupt = (
        score(network(ids(pairs, which)).logits[:, -1], pairs) for which in ("clean", "corrupt")
    )
    np.testing.assert_allclose(found["pairs"]["clean_difference"], clean, **WITHIN)
    assert found.total()[0] == pytest.approx((clean - corrupt).mean(), rel=1e-4, abs=1e-4)
    base, source = ("corrupt", "clean") if direction == "denoise" else ("clean", "corrupt")
    for row, (layer, head) in enumerate(places(found)):
        logits = hooked(
            network,
            by,
            layer,
            head // group(found, row),
            ids(pairs, base),
            ids(pairs, source),
            slice(None),
        )
        expected = (
            score(logits, pairs) - corrupt if direction == "denoise" else clean - score(logits, pairs)
        )
        np.testing.assert_allclose(found["by_pair"][row], expected, **WITHIN)
        assert found["heads"]["effect"][row] == pytest.approx(expected.mean(), rel=1e-4, abs=1e-4)


def places(found):
    """Layer and head of each row."""
    heads = found.table("heads")
    return list(zip(heads["layer"].tolist(), heads["head"].tolist(), strict=True))


def group(found, row):
    """How many heads are patched together with one."""
    return len(str(found["heads"]["patched_with"][row]).split("+"))


@pytest.mark.parametrize("by", ["z", "key"])
def test_positions_are_those_of_plain_hooks(network, by):
    pairs = entries()
    found = attnscope.patch(
        wrap(network, name="tiny", check=False), pairs, attnscope.PatchOptions(by=by, positions=True)
    )
    corrupt = score(network(ids(pairs, "corrupt")).logits[:, -1], pairs)
    for row, place in ((2, 1), (3, 2), (7, 4), (6, 6)):
        layer, head = places(found)[row]
        inside = head // group(found, row)
        logits = hooked(
            network,
            by,
            layer,
            inside,
            ids(pairs, "corrupt"),
            ids(pairs, "clean"),
            slice(place, place + 1),
        )
        expected = (score(logits, pairs) - corrupt).mean()
        assert found["position_effects"][row, place] == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert (
        found["position_effects"].shape
        == (len(found["heads"]), 7)
        == (len(places(found)), len(found["positions"]))
    )


@pytest.mark.parametrize("by", PATCHED_VALUES)
def test_attribution_is_the_slope_of_the_exact_effect(by):
    """In float64, of GPT-2: Llama's norms compute in float32."""
    model = wrap(gpt2().double(), name="tiny", check=False)
    read, _ = read_pairs(model, attnscope.Pairs(entries(3)))
    (batch,) = make_pair_batches(model, read, range(3))
    runs = PairRuns(model, batch, "noise")
    own = ActivationRecorder()
    step = 1e-5
    model.outputs(batch.clean, own)
    estimates = runs.estimate_effects(by)

    class Between(ActivationRecorder):
        def values(self, by, place, heads):
            there = runs.source_activations.values(by, place, heads)
            here = own.values(by, place, heads)
            return here + step * (there - here)

    for unit in list(list_units(own.calls, by).values())[::5]:
        moved = runs.measure_effects([PatchSpec(unit, by)], Between())[0] / step
        slope = estimates[unit.layer_key][:, unit.number].sum(1)
        np.testing.assert_allclose(slope, moved, rtol=1e-3, atol=1e-5)


def path_effects(found):
    """The effect of each path, by sender, receiver and what is read."""
    paths = found.table("paths")
    ends = zip(*(paths[name].tolist() for name in ("sender", "receiver", "by")), strict=True)
    return dict(zip(ends, paths["effect"].tolist(), strict=True))


# Pairs --------------------------------------------------------------------------------------------------------------


def test_bad_pairs_are_named_and_the_others_run(grouped):
    good = entries(4)
    bad = {
        "its texts have 2 and 3 tokens": {"clean": "1 2", "corrupt": "3 4 5", "right": 1, "wrong": 2},
        "both right and wrong": {**entries(1, seed=5)[0], "right": 7, "wrong": ["7", 8]},
        "is not a single token": {**entries(1, seed=6)[0], "right": "8 9"},
        "has no field 'wrong'": {"clean": "1", "corrupt": "2", "right": 1},
        "same text": {"clean": "1 2", "corrupt": "1 2", "right": 1, "wrong": 2},
        "texts of pair 1": good[0],
        "has no embedding": {"clean": "1 2", "corrupt": "3 4", "right": 1, "wrong": 999},
    }
    found = attnscope.patch(grouped, [*good, *bad.values()])
    whole = attnscope.patch(grouped, good)
    assert found.corpus["n_texts"] == 4
    assert np.array_equal(found["by_pair"], whole["by_pair"])
    problems = sorted(found.corpus["problems"], key=lambda problem: problem["line"])
    assert [problem["line"] for problem in problems] == [5, 6, 7, 8, 9, 10, 11]
    for problem, reason in zip(problems, bad, strict=True):
        assert reason in problem["reason"] or reason == "has no embedding", problem
    with pytest.raises(
        AttnscopeError, match="no pair can be patched: pairs, line 1: its texts have 2 and 3 tokens"
    ):
        attnscope.patch(grouped, [next(iter(bad.values()))])
    with pytest.raises(AttnscopeError, match="there is no pair"):
        attnscope.Pairs([{}])


def test_a_pair_and_its_mirror_image_are_one_observation(grouped):
    pairs = entries(4)
    mirrored = [
        {
            "clean": pair["corrupt"],
            "corrupt": pair["clean"],
            "right": pair["wrong"],
            "wrong": pair["right"],
        }
        for pair in pairs[:3]
    ]
    found = attnscope.patch(grouped, [*pairs, *mirrored], attnscope.PatchOptions(attribution=0, paths=2))
    by_pair = found["by_pair"].astype(np.float64)
    assert by_pair.shape[1] == 7
    assert found.corpus["n_texts"] == 7
    averages = by_pair[:, :4].copy()
    averages[:, :3] = (averages[:, :3] + by_pair[:, 4:]) / 2
    expected = np.stack(pair_means(averages.T)[:3], 1)
    np.testing.assert_allclose(found["heads"].interval("effect"), expected, rtol=1e-4, atol=1e-5)
    assert (found["heads"]["effect_count"] == 4).all()
    assert "The 7 pairs count as 4" in " ".join(found.run["notes"])


def test_a_masked_model_answers_at_its_mask(tmp_path):
    folder = write_tiny(tmp_path / "bert")
    strong(BertForMaskedLM(BertConfig.from_pretrained(folder)), 3).save_pretrained(folder)
    model = attnscope.load(str(folder), engine="hf")
    pairs = [
        {
            "clean": f"the {a} [MASK] cat",
            "corrupt": f"the {b} [MASK] cat",
            "right": "the",
            "wrong": ["a", "b"],
        }
        for a, b in ("ab", "cd", "ef")
    ]
    found = attnscope.patch(model, [*pairs, {**pairs[0], "clean": "the x cat", "corrupt": "a x cat"}])
    assert found["pairs"]["right"][0] == "the"
    assert found["pairs"]["wrong"][0] == "a, b"
    assert "0 mask tokens" in found.corpus["problems"][0]["reason"]
    network = model.model
    tokens = model.tokenizer.encode(pairs[0]["clean"])
    place = tokens.ids.tolist().index(model.tokenizer.mask_id)
    logits = network(torch.from_numpy(tokens.ids)[None]).logits[0, place].double()
    the, a, b = (model.tokenizer.encode(word).ids[1] for word in ("the", "a", "b"))
    expected = logits[the] - torch.logsumexp(logits[[a, b]], 0)
    assert found["pairs"]["clean_difference"][0] == pytest.approx(float(expected), abs=1e-4)


@pytest.mark.parametrize("classifier", [BertForSequenceClassification, BertForTokenClassification])
def test_answers_of_a_classifier_are_its_classes(tmp_path, classifier):
    """A class against all others, or those that a pair names; of tokens at the first one that differs."""
    folder = write_tiny(tmp_path / "classes")
    config = BertConfig.from_pretrained(folder, id2label={0: "bad", 1: "fine", 2: "good"})
    strong(classifier(config), 3).save_pretrained(folder)
    model = attnscope.load(str(folder), engine="hf")
    texts = [{"clean": f"the {a} cat", "corrupt": f"the {b} cat"} for a, b in ("ab", "cd", "ef")]
    found = attnscope.patch(model, texts, attnscope.PatchOptions(answer="good"))
    named = attnscope.patch(
        model, [{**pair, "right": "good", "wrong": ["bad", "fine"]} for pair in texts]
    )
    assert np.array_equal(found["by_pair"], named["by_pair"])
    assert found["pairs"]["right"][0] == "good"
    assert found["pairs"]["wrong"][0] == "bad, fine"
    tokens = model.tokenizer.encode(texts[0]["clean"])
    logits = model.model(torch.from_numpy(tokens.ids)[None]).logits[0].double()
    if classifier is BertForTokenClassification:
        logits = logits[2]  # [CLS] the a cat [SEP]
    expected = float(logits[2] - logits[:2].logsumexp(0))
    assert found["pairs"]["clean_difference"][0] == pytest.approx(expected, abs=1e-4)
    with pytest.raises(AttnscopeError, match="it has no field 'right'"):
        attnscope.patch(model, texts)
    with pytest.raises(AttnscopeError, match="has no class 'best'"):
        attnscope.patch(model, texts, attnscope.PatchOptions(answer="best"))
    with pytest.raises(AttnscopeError, match="has no class 'best'"):
        attnscope.patch(model, [{**texts[0], "right": "best", "wrong": "bad"}])


# Studies on top -----------------------------------------------------------------------------------------------------


def test_exact_effects_of_the_best_by_attribution(grouped):
    whole = attnscope.patch(grouped, entries(8), attnscope.PatchOptions(attribution=0))
    some = attnscope.patch(grouped, entries(8), attnscope.PatchOptions(attribution=4))
    tried = np.flatnonzero(np.isfinite(some["heads"]["effect_q"]))
    assert tried.tolist() == sorted(np.argsort(np.abs(whole["heads"]["attribution"]))[-4:].tolist())
    np.testing.assert_allclose(some["by_pair"][tried], whole["by_pair"][tried], **WITHIN)
    assert -1 <= whole.options["rank_agreement"] <= 1


@pytest.mark.parametrize("build", [gpt2, llama])
def test_paths_are_those_of_plain_hooks(build):
    """The sender's z from the clean run, all other heads' z as in the corrupt one; then what the receiver reads."""
    network = build()
    pairs = entries()
    found = attnscope.patch(
        wrap(network, name="tiny", check=False), pairs, attnscope.PatchOptions(paths=50)
    )
    corrupt_ids, clean_ids = (ids(pairs, which) for which in ("corrupt", "clean"))
    corrupt = score(network(corrupt_ids).logits[:, -1], pairs)
    z = []
    n_heads, head, group = (4, 1, 1) if build is gpt2 else (6, 4, 3)
    width = 20 // 4 if build is gpt2 else 4
    outputs = [modules(network, layer, "z")[0] for layer in range(N_LAYERS)]
    for given in (corrupt_ids, clean_ids):
        with contextlib.ExitStack() as stack:
            for module in outputs:
                stack.enter_context(changed(module, lambda x: z.append(x) or x, before=True))
            network(given)
    frozen = z[:N_LAYERS]
    mine = slice(head * width, (head + 1) * width)
    frozen[0] = frozen[0].clone()
    frozen[0][..., mine] = z[N_LAYERS][..., mine]
    seen = {}
    with contextlib.ExitStack() as stack:
        for module, value in zip(outputs, frozen, strict=True):
            stack.enter_context(changed(module, lambda x, value=value: value, before=True))
        for by in ("query", "key", "value"):
            module, _ = modules(network, 1, by)
            stack.enter_context(changed(module, lambda x, by=by: seen.setdefault(by, x), before=False))
        direct = score(network(corrupt_ids).logits[:, -1], pairs) - corrupt
    edges = path_effects(found)
    sender = f"L0H{head}"
    assert edges[sender, "logits", ""] == pytest.approx(direct.mean(), rel=1e-4, abs=1e-4)
    for by in seen:
        receiver = 2 if by == "query" else 2 // group
        module, start = modules(network, 1, by)

        def put(tensor, at=start + receiver * width, by=by):
            tensor = tensor.clone()
            tensor[..., at : at + width] = seen[by][..., at : at + width]
            return tensor

        with changed(module, put, before=False):
            expected = score(network(corrupt_ids).logits[:, -1], pairs) - corrupt
        name = "L1H2" if by == "query" or group == 1 else "L1H0+L1H1+L1H2"
        assert edges[sender, name, by] == pytest.approx(expected.mean(), rel=1e-4, abs=1e-4)
    assert len(edges) == 2 * n_heads + n_heads * (n_heads + 2 * n_heads // group)
    assert not any(sender == "L1H0" and receiver != "logits" for sender, receiver, _ in edges)
    with pytest.raises(UsageError, match="--paths begin at the z of heads"):
        attnscope.PatchOptions(paths=4, by="key")


def test_an_interruption_keeps_the_pairs_up_to_there(grouped):
    pairs = [*entries(3, 5), *entries(3, 9)]

    def stop(done):
        if done.n_texts:
            raise KeyboardInterrupt

    found = attnscope.patch(grouped, pairs, report=stop)
    assert found.corpus["n_texts"] == 3
    assert found.corpus["complete"] is False


def test_a_record_comes_back_and_is_drawn(tmp_path):
    network = llama()
    options = attnscope.PatchOptions(positions=True, attribution=0, paths=6)
    found = attnscope.patch(
        wrap(network, name="tiny", check=False), shown_by(network, entries(100)), options
    )
    require_lossless(found, tmp_path)
    again = Patching.load(found.save(tmp_path / "patching.npz"))
    assert np.array_equal(again["position_effects"], found["position_effects"])
    assert [*again["pairs"].rows()] == [*found["pairs"].rows()]
    names = [path.stem for path in found.draw(tmp_path / "figures", ["png"])]
    assert names == ["paths", "positions", "effect", "attribution"]
    document = json.loads(found.to_json())
    assert document["schema"] == "attnscope.patch/2"
    assert len(document["by_pair"]) == len(document["heads"])


def test_the_command_prints_and_writes(run, tmp_path):
    """Of a decoder whose tokenizer ends texts with a special token: the answer follows the last ordinary one."""
    sizes = {
        "hidden_size": 24,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
    }
    config = LlamaConfig(vocab_size=len(VOCABULARY_OF_TINY), intermediate_size=11, **sizes)
    strong(LlamaForCausalLM(config)).save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    pairs = [
        {"clean": f"the {a} cat", "corrupt": f"the {b} cat", "right": "the", "wrong": [a, b]}
        for a, b in ("ab", "cd")
    ]
    lines = [json.dumps(pair) + "\n" for pair in [*pairs, {"clean": "1"}]]
    (tmp_path / "pairs.jsonl").write_text("".join(lines), "utf-8")
    status, out, err = run(
        "patch", "pairs.jsonl", "-m", "model", "--by", "key", "--attribution", "0", "-o", "out"
    )
    assert status == 1
    assert err.splitlines()[-3:] == (
        [
            "skipped: pairs.jsonl, line 3: it has no field 'corrupt'",
            "error: 1 pair could not be read",
            "hint: all the rest was studied, and is in the result",
        ]
    )
    assert "L0H0+L0H1+L0H2" in out
    assert "when the corrupt run gets the head's key of the clean run" in out
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {
        "patching.npz",
        "patching.csv",
        "effect.png",
    }
    header, *_ = (tmp_path / "out" / "patching.csv").read_text().splitlines()
    assert header.startswith("kind,layer,head,patched_with,effect,")
