"""What changes without heads: effects by definition, several together, what is predicted, and bad input."""

import math

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification

from attnscope.choice import Choice
from attnscope.core.attention.probes import HeadGate
from attnscope.core.attention.seam import attend
from attnscope.core.interventions import ActivationRecorder, HeadPatcher, Patch
from attnscope.corpus import CorpusText, TextBlock
from attnscope.errors import AttnscopeError
from attnscope.models import load
from attnscope.models.hf.assembling import wrap
from attnscope.models.model import Batch
from attnscope.questions.ablate import AblateOptions
from attnscope.studies.ablate import measurers
from attnscope.studies.ablate import reading as ablation_reading
from attnscope.studies.ablate.reading import BatchReader
from attnscope.studies.ablate.study import ablate
from tests.ablation_helpers import VOCABULARY, save_tiny, tiny
from tests.conftest import write_tiny

TEXTS = [
    CorpusText(
        i,
        "texts",
        i + 1,
        ids=tuple(3 + (7 * i + 5 * j * j) % (VOCABULARY - 3) for j in range(4 + 2 * i)),
    )
    for i in range(4)
]


@pytest.fixture(scope="module")
def gpt2():
    return wrap(tiny("gpt2", dtype=torch.float64))


def _by_hand(model, text, gate):
    """Hidden states and log probabilities of one text alone, by a whole forward."""
    with torch.no_grad():
        found = model.outputs(Batch(torch.tensor([text.ids])), gate)
    return found.hidden[0], found.logits[0].log_softmax(-1)


def _outputs(model, place):
    """What the heads of a place put out on each text, (head, token, d)."""
    outputs = []
    for text in TEXTS:
        activations = ActivationRecorder()
        with torch.no_grad():
            model.outputs(Batch(torch.tensor([text.ids])), activations)
        outputs.append(activations.outputs[place][0])
    return outputs


@pytest.mark.parametrize("mode", ["zero", "mean"])
def test_effects_are_their_definitions_text_by_text(gpt2, mode):
    found = ablate(gpt2, TEXTS)
    heads = found.table("heads")
    for row in (1, 5, 8):
        place = ("decoder", int(heads["layer"][row]))
        factors = torch.ones(3, dtype=torch.float64)
        factors[int(heads["head"][row])] = 0
        means = None
        if mode == "mean":
            means = {place: torch.cat(_outputs(gpt2, place), 1).mean(1)}
        gate = HeadGate({place: factors}, means)
        l2 = []
        rise = 0.0
        kl = 0.0
        n = 0
        for text in TEXTS:
            whole, whole_logs = _by_hand(gpt2, text, attend)
            hidden, logs = _by_hand(gpt2, text, gate)
            l2.append(float((hidden - whole).norm() / whole.norm()))
            for t, right in enumerate(text.ids[1:]):
                rise += float(whole_logs[t, right] - logs[t, right])
                for p, q in zip(whole_logs[t].tolist(), logs[t].tolist(), strict=True):
                    kl += math.exp(p) * (p - q)
                n += 1
        np.testing.assert_allclose(heads[f"{mode}_l2"][row], np.mean(l2), rtol=1e-6)
        np.testing.assert_allclose(heads[f"{mode}_loss"][row], rise / n, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(heads[f"{mode}_kl"][row], kl / n, rtol=1e-6)
        assert heads[f"{mode}_l2_count"][row] == 4
        assert heads[f"{mode}_kl_count"][row] == n
        value, low, high = heads.interval(f"{mode}_l2")[row]
        assert low < value < high


def test_resampling_puts_outputs_of_other_texts_in_a_heads_place(gpt2):
    """Each of four texts has the three others as donors, which take turns; a shorter donor is read again."""
    found = ablate(gpt2, TEXTS, AblateOptions(modes=("resample",), choice=Choice(pick=((1, 2),))))
    # (token, d) of L1H2 for each text.
    outputs = [output[2] for output in _outputs(gpt2, ("decoder", 1))]
    l2 = np.zeros((len(TEXTS), measurers.N_DONORS))
    for number, text in enumerate(TEXTS):
        others = [output for other, output in enumerate(outputs) if other != number]
        whole, _ = _by_hand(gpt2, text, attend)
        for donor in range(measurers.N_DONORS):
            output = others[donor % len(others)]
            tokens = torch.arange(len(text.ids)) % len(output)
            values = output[tokens][None, None]
            patch = Patch("z", (2,), values)
            hidden, _ = _by_hand(gpt2, text, HeadPatcher({("decoder", 1): [patch]}))
            l2[number, donor] = float((hidden - whole).norm() / whole.norm())
    np.testing.assert_allclose(found["heads"]["resample_l2"], [l2.mean()], rtol=1e-6)
    np.testing.assert_allclose(found["heads"]["resample_l2_spread"], [l2.mean(0).std(ddof=1)], rtol=1e-6)
    with pytest.raises(AttnscopeError, match="outputs of other texts"):
        ablate(gpt2, TEXTS[:1], AblateOptions(modes=("resample",)))


def test_the_loss_of_the_whole_model_is_that_of_transformers(gpt2):
    source = tiny("gpt2", dtype=torch.float64)
    total = 0.0
    n = 0
    for text in TEXTS:
        ids = torch.tensor([text.ids])
        with torch.no_grad():
            total += float(source(input_ids=ids, labels=ids).loss) * (ids.numel() - 1)
        n += ids.numel() - 1
    found = ablate(gpt2, TEXTS, AblateOptions(modes=("zero",), choice=Choice(pick=((0, 0),))))
    np.testing.assert_allclose(loss_of(found), total / n, rtol=1e-7)
    assert found.corpus["n_predictions"] == n


def loss_of(found, name="loss"):
    row = found.row("whole", name)
    return float(row[0])


def test_neither_batches_nor_passes_nor_resuming_change_an_effect(gpt2, monkeypatch):
    from attnscope.models.inside.tape import ResumableRun

    usual = ablate(gpt2, TEXTS)
    monkeypatch.setattr(ablation_reading, "BATCH_TOKENS", 1)
    monkeypatch.setattr(measurers, "MAX_PASS_TOKENS", 1)
    monkeypatch.setattr(measurers, "BLOCK", 2)
    monkeypatch.setattr(ResumableRun, "first_block_of", lambda rerun, places: 0)
    other = ablate(gpt2, TEXTS)
    for name in usual.table("heads").number_columns:
        np.testing.assert_allclose(usual["heads"][name], other["heads"][name], rtol=1e-6, atol=1e-10)


# Several together ----------------------------------------------------------------------------------------------


def test_picked_heads_go_alone_and_together(gpt2):
    found = ablate(gpt2, TEXTS, AblateOptions(choice=Choice(pick=((2, 1), (0, 0)))))
    assert found.head_names == ["L0H0", "L2H1"]
    together = found.row("together", "zero_l2")
    first = torch.tensor([0.0, 1, 1])
    last = torch.tensor([1.0, 0, 1])
    gate = HeadGate({("decoder", 0): first, ("decoder", 2): last})
    l2 = []
    for text in TEXTS:
        whole = _by_hand(gpt2, text, attend)[0]
        hidden = _by_hand(gpt2, text, gate)[0]
        l2.append(float((hidden - whole).norm() / whole.norm()))
    np.testing.assert_allclose(together[0], np.mean(l2), rtol=1e-6)


def test_copies_of_a_text_count_once(gpt2):
    """As evidence of their own they would narrow every interval."""
    options = AblateOptions(
        modes=("zero", "mean"), importance=True, choice=Choice(pick=((0, 1), (1, 0)))
    )
    once = ablate(gpt2, TEXTS, options)
    often = ablate(gpt2, [*TEXTS, *TEXTS[:3], *TEXTS[::-1]], options)
    for table in ("heads", "together"):
        assert repr([*often[table].rows()]) == repr([*once[table].rows()])  # NaN is not equal to itself
    assert often.corpus["n_texts"] == 4
    assert often.corpus["n_copies"] == 7
    assert once.corpus["n_copies"] == 0
    assert any("7 texts are left out: copies" in note for note in often.report().problems)


def test_grouped_queries_and_cross_attention():
    llama = wrap(tiny("llama"))
    assert len(ablate(llama, TEXTS, AblateOptions(modes=("zero",)))["heads"]) == 18
    t5 = wrap(tiny("t5"))
    found = ablate(t5, TEXTS, AblateOptions(modes=("zero",), importance=True))
    assert found["heads"]["kind"].tolist() == ["encoder"] * 6 + ["decoder"] * 6 + ["cross"] * 6
    assert any(
        "the decoder reads what the whole model itself writes" in note for note in found.run["notes"]
    )
    pick = Choice(pick=((1, 2), (0, 0)))
    only = ablate(t5, TEXTS, AblateOptions(modes=("zero",), kind="cross", choice=pick))
    assert only.head_names == ["cross L0H0", "cross L1H2"]
    assert len(only["together"])
    rows = [found.head_names.index(name) for name in only.head_names]
    np.testing.assert_allclose(only["heads"]["zero_l2"], found["heads"]["zero_l2"][rows], rtol=1e-5)


# What is predicted ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    return load(save_tiny(tmp_path_factory.mktemp("masked"), "bert"), engine="hf")


def _rows(model, text, **how):
    reader = BatchReader(model, "masked", **how)
    (rows,) = reader.batches(TextBlock(0, (CorpusText(0, "texts", 1, text=text),)))
    return model.tokenizer.encode(text), reader.read(rows)


def test_a_seeded_share_of_ordinary_tokens_is_masked(masked):
    text = "the cat sat on a mat, and the dog ran."
    tokens, read = _rows(masked, text, seed=1)
    hidden = read.positions.tolist()
    n = int((~tokens.special).sum())
    assert len(hidden) == round(0.15 * n)
    assert not tokens.special[hidden].any()
    assert read.answers.tolist() == tokens.ids[hidden].tolist()
    mask_id = masked.tokenizer.mask_id
    assert (read.batch.ids[0] == mask_id).nonzero().flatten().tolist() == hidden
    again = _rows(masked, text, seed=1)[1].positions.tolist()
    other = _rows(masked, text, seed=2)[1].positions.tolist()
    assert again == hidden != other
    assert len(_rows(masked, "a")[1].positions) == 1


def test_long_texts_are_cut_into_chunks_of_one_text(masked):
    source = tiny("bert", max_position_embeddings=9)
    model = wrap(source)
    long = CorpusText(0, "texts", 1, ids=tuple(range(3, 23)))
    found = ablate(model, [long], AblateOptions(loss="none", modes=("zero",)))
    assert found.corpus["n_texts"] == 1
    assert found.corpus["n_tokens"] == 20
    gate = HeadGate({("encoder", 0): torch.tensor([0.0, 1, 1])})
    changed = size = 0.0
    for first in (0, 9, 18):
        with torch.no_grad():
            batch = Batch(torch.tensor([long.ids[first : first + 9]]))
            whole = model.outputs(batch, attend, logits=False).hidden
            hidden = model.outputs(batch, gate, logits=False).hidden
        changed += float((hidden - whole).square().sum())
        size += float(whole.square().sum())
    np.testing.assert_allclose(found["heads"]["zero_l2"][0], math.sqrt(changed / size), rtol=1e-5)


def test_the_target_of_an_encoder_decoder_is_its_own_answer_or_what_is_given(tmp_path):
    model = load(save_tiny(tmp_path / "t5", "t5"))
    block = TextBlock(0, (CorpusText(0, "texts", 1, text="the cat"),))
    reader = BatchReader(model, "target")
    (own,) = map(reader.read, reader.batches(block))
    answer = model.text_generator.greedy_target(model.tokenizer.encode("the cat"))
    assert own.batch.target_ids[0].tolist() == answer.ids.tolist()
    reader = BatchReader(model, "target", target="a dog")
    (given,) = map(reader.read, reader.batches(block))
    ids = model.text_generator.encode_target("a dog").ids
    assert given.batch.target_ids[0].tolist() == ids.tolist()
    special = {2, 3, 4}
    wanted = [i for i in range(len(ids) - 1) if ids[i + 1] not in special]
    assert given.positions.tolist() == wanted
    assert given.answers.tolist() == [ids[i + 1] for i in wanted]


@pytest.mark.parametrize("answer", [None, "bad"])
@pytest.mark.parametrize("classifier", [BertForSequenceClassification, BertForTokenClassification])
def test_a_classifier_predicts_a_class(tmp_path, classifier, answer):
    """The one that the whole model gives, or the one that is asked for; of tokens at each ordinary one."""
    folder = write_tiny(tmp_path / "classes")
    torch.manual_seed(0)
    network = classifier(BertConfig.from_pretrained(folder, id2label={0: "bad", 1: "fine", 2: "good"}))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    network.save_pretrained(folder)
    model = load(str(folder), engine="hf")
    texts = ["the cat", "a dog sat on it", "the b"]
    found = ablate(model, texts, AblateOptions(modes=("zero",), answer=answer, importance=True))
    # The same by hand, for L1H1.
    gate = HeadGate({("encoder", 1): torch.tensor([1.0, 0.0, 1.0])})
    losses = []
    rises = []
    kls = []
    for text in texts:
        tokens = model.tokenizer.encode(text)
        positions = (
            [0] if classifier is BertForSequenceClassification else np.flatnonzero(~tokens.special)
        )
        batch = Batch(torch.from_numpy(tokens.ids)[None])
        with torch.no_grad():
            whole = model.outputs(batch, attend).logits[0].log_softmax(-1)
            without = model.outputs(batch, gate).logits[0].log_softmax(-1)
        for logs, gated in zip(whole[positions], without[positions], strict=True):
            right = int(logs.argmax()) if answer is None else 0
            losses.append(float(-logs[right]))
            rises.append(float(logs[right] - gated[right]))
            kls.append(float((logs.exp() * (logs - gated)).sum()))
    row = found.head_names.index("L1H1")
    assert found["heads"]["zero_loss"][row] == pytest.approx(np.mean(rises), abs=1e-5)
    assert found["heads"]["zero_kl"][row] == pytest.approx(np.mean(kls), abs=1e-5)
    assert loss_of(found) == pytest.approx(np.mean(losses), abs=1e-5)
    assert np.isfinite(found["heads"]["importance"]).all()
    assert found.options["predicted"].startswith(f"the class {answer or 'that the whole model gives'}")


# Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"answer": "good"}, "has no class 'good'"),
        ({"choice": Choice(pick=((0, 3),))}, "no head 3"),
        ({"choice": Choice(layers=(3,))}, "no layer 3"),
        ({"kind": "cross"}, "no cross attention"),
        ({"target": "a"}, "has no target"),
        ({"modes": ()}, "nothing is to be done"),
    ],
)
def test_what_cannot_be_done_is_said(gpt2, options, says):
    with pytest.raises(AttnscopeError, match=says):
        ablate(gpt2, TEXTS, AblateOptions(**options))


def test_a_text_on_which_the_model_computes_nan_is_named():
    source = tiny("gpt2")
    model = wrap(source)
    with torch.no_grad():
        source.transformer.h[1].attn.c_proj.bias[0] = math.inf
    with pytest.raises(AttnscopeError, match="no text is left: on all 4, .*NaN or infinit"):
        ablate(model, TEXTS, AblateOptions(modes=("zero",)))


def test_an_interruption_keeps_whole_blocks(gpt2, monkeypatch):
    monkeypatch.setattr(measurers, "BLOCK", 2)
    usual = ablate(gpt2, TEXTS[:2], AblateOptions(modes=("zero",)))

    def stop(done):
        if done.n_texts > 2:
            raise KeyboardInterrupt

    found = ablate(gpt2, TEXTS, AblateOptions(modes=("zero",), importance=True), stop)
    assert found.corpus["complete"] is False
    assert found.corpus["n_texts"] == 2
    assert found["heads"]["zero_l2"].tolist() == usual["heads"]["zero_l2"].tolist()
