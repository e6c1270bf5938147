"""Needles in haystacks: which heads copy from far back, by the definition, on models whose heads are known."""

import numpy as np
import pytest
import torch
import transformers

import attnscope
from attnscope import NeedleOptions, retrieval_heads
from attnscope.core.attention import tiles
from attnscope.core.attention.probes import HeadGate, HeadRecorder, WeightsRecorder
from attnscope.core.attention.row_samples import rows_of
from attnscope.core.attention.tiles import attend_without_map
from attnscope.corpus import NeedleSource, generate_needles, start_range
from attnscope.errors import AttnscopeError
from attnscope.models.model import Batch
from attnscope.studies.inputs.options import LoadOptions
from examples.decoder import decoder, wrap
from tests.heads_helpers import heads_in
from tests.needle_helpers import (
    OFFSET,
    PREVIOUS,
    RETRIEVAL,
    planted_decoder,
    planted_findings,
    planted_model,
)
from tests.test_long_texts import Largest

SMALL = NeedleOptions(lengths=(48,), n=15)


@pytest.fixture(scope="module")
def found():
    return planted_findings()


def scores(findings, measure="retrieval"):
    return dict(zip(findings.head_names, findings["heads"][measure].tolist(), strict=True))


# The probe ---------------------------------------------------------------------------------------------------------


def test_answers_are_where_the_probe_says_and_nowhere_else():
    hay = NeedleSource(np.arange(100, 400), prefix_ids=(7,))
    made = list(generate_needles(hay, 7, (0.0, 0.3, 1.0), 60, 3))
    assert [needle.depth for needle in made] == [0.0, 0.3, 1.0, 0.0, 0.3, 1.0, 0.0]
    for needle in made:
        assert len(needle) == 60
        assert needle.ids[0] == 7
        np.testing.assert_array_equal(needle.ids[needle.answer_positions], needle.answer)
        assert len(set(needle.answer.tolist())) == 8
        assert np.isin(needle.ids, needle.answer).sum() == 16  # hidden once, given once at the end
        # The two tokens before the answer at the end are those before it in the needle, and not those of the decoy.
        np.testing.assert_array_equal(
            needle.ids[needle.answer_positions[0] - 2 : needle.answer_positions[0]], needle.ids[-10:-8]
        )
        assert not np.isin(
            needle.ids[needle.decoy_positions[0] - 2 : needle.decoy_positions[0]], needle.ids[-10:-8]
        ).any()
        assert not np.isin(needle.ids[needle.decoy_positions], needle.answer).any()
        first, last = start_range(needle.depth, 29)
        for mine, other in (
            (needle.answer_positions, needle.decoy_positions),
            (needle.decoy_positions, needle.answer_positions),
        ):
            assert first <= mine[0] - 1 - 2 - 10 * (other[0] < mine[0]) <= last
    again = list(generate_needles(hay, 2, (0.0, 0.3, 1.0), 60, 3))
    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(again, made, strict=False))


def test_a_text_hides_a_sentence_between_two_others():
    letters = {chr(97 + i): i for i in range(26)}

    def encode(text):
        return [letters.get(char, 26 if char == "." else 27) for char in text.casefold()]

    text = np.array(encode("the cat sat. a dog ran. " * 40))
    vocabulary = np.arange(28, 200)
    for needle in generate_needles(
        NeedleSource(vocabulary, text, encode, frozenset({26})), 4, (0.5, 0.9), 700, 0
    ):
        np.testing.assert_array_equal(needle.ids[needle.answer_positions], needle.answer)
        cue = encode(" The secret words of the ")
        thing = needle.ids[: needle.answer_positions[0]].tolist()
        start = max(i for i in range(len(thing)) if thing[i : i + len(cue)] == cue)
        assert needle.ids[start - 1] == 26  # after the end of a sentence
        assert needle.ids[needle.answer_positions[-1] + 1] == 26


# The probe at the seam ---------------------------------------------------------------------------------------------


def text_generator(model_type):
    """A small random decoder with its head; Mistral's sees five tokens back."""
    more = {"sliding_window": 5} if model_type == "mistral" else {}
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=50,
        hidden_size=24,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        pad_token_id=0,
        max_position_embeddings=1000,
        **more,
    )
    torch.manual_seed(0)
    return attnscope.load(transformers.AutoModelForCausalLM.from_config(config).eval())


def strongest_of(queries):
    some = torch.arange(queries.start, queries.stop)
    return HeadRecorder(lambda call: rows_of(call, some).argmax(-1).cpu())


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_nothing_of_the_size_of_a_map_is_made(model_type, monkeypatch):
    """Neither as heads are looked at, nor as they are taken out; what is done for long texts, on one of 640 tokens."""
    monkeypatch.setattr("attnscope.models.hf.model.LIGHT_FROM", 64)
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 1)
    model = text_generator(model_type)
    n = 640
    batch = Batch(torch.randint(1, 50, (1, n)))
    probes = (
        lambda: strongest_of(slice(n - 8, n)),
        lambda: HeadGate({("decoder", 1): torch.tensor([1.0, 0, 1, 1])}, compute=attend_without_map),
    )
    for probe in probes:
        model.outputs(batch, probe(), last=8)  # what is made once and kept
        with Largest() as largest:
            model.outputs(batch, probe(), last=8)
        assert 0 < largest.n_bytes <= 16 * 4 * n * 4 < n * n / 2


# Heads that are known ----------------------------------------------------------------------------------------------


def test_the_planted_head_is_found_and_no_other(found):
    assert found["written"]["copied"][0] == 1
    named = {(head.layer, head.head): [role.name for role in head.roles] for head in heads_in(found)}
    assert {at for at, roles in named.items() if roles} == {RETRIEVAL}
    (role,) = next(head.roles for head in heads_in(found) if head.roles)
    assert role.name == "retrieval"
    assert role.value == 1
    assert role.baseline == pytest.approx(0.02, abs=0.02)
    assert role.tentative == 0
    assert role.low > 0.8
    assert role.q < 0.001
    assert scores(found)["L{}H{}".format(*PREVIOUS)] == 0
    assert scores(found, "decoy")["L{}H{}".format(*RETRIEVAL)] == 0


@pytest.mark.parametrize("depths", [(0.5,), (0.0, 1.0)])
def test_a_head_that_looks_so_many_tokens_back_has_no_role(depths):
    """One that writes nothing, in a model that copies by another."""
    options = NeedleOptions(lengths=(64,), n=30, depths=depths)
    hay = NeedleSource(np.array(planted_model().tokenizer.ordinary_ids()))
    offsets = [
        64 - 1 - 5 - int(needle.answer_positions[0])
        for needle in generate_needles(hay, 30, depths, 64, 0)
    ]
    likely = max(set(offsets), key=offsets.count)
    found = retrieval_heads(wrap(planted_decoder(offset=likely)), options=options)
    roles = {(head.layer, head.head) for head in heads_in(found) if head.roles}
    assert roles == {RETRIEVAL}
    assert 0 < scores(found)["L{}H{}".format(*OFFSET)] < 0.3


def test_scores_are_told_by_depth(found):
    names = [f"retrieval_at_{depth}" for depth in (0, 25, 50, 75, 100)]
    assert found.measure_names == ["retrieval", "decoy", *names]
    for name in names:
        one = next(head for head in heads_in(found) if (head.layer, head.head) == RETRIEVAL).measures[
            name
        ]
        assert one.value == 1
        assert one.count == 5 * 6
    written = found["written"]
    assert written["length"].tolist()[:3] == [0, 48, 48]
    assert written["depth"].tolist()[1:3] == [0.0, 0.25]
    assert written.companion("copied", "count").tolist()[1:3] == [15, 15]
    # Five tokens of each needle, as twenty words have room for no more.
    assert found.options["n_answer"] == 5
    assert found.corpus["n_texts"] == 30


def test_scores_are_those_of_plain_loops():
    """A model that copies only now and then: its answers and maps are read off as they stand, needle by needle."""
    network = decoder(30, n_layers=2, n_heads=3, d_model=24, max_tokens=60, seed=24)
    with torch.no_grad():  # it writes what it attends to, whatever that is
        network.unembed.weight.copy_(network.embed.weight)
    model = wrap(network)
    options = NeedleOptions(lengths=(50,), n=40, depths=(0.5, 1.0), answer=4)
    found = retrieval_heads(model, options=options)
    hay = NeedleSource(np.array(model.tokenizer.ordinary_ids()))
    counted = np.zeros((2, 3, 2))
    copied = 0
    total = 0
    for needle in generate_needles(hay, 40, (0.5, 1.0), 50, 0, n_answer_tokens=4):
        probe = WeightsRecorder()
        logits = model.outputs(Batch(torch.from_numpy(needle.ids[:-1])[None]), probe).logits[0]
        for number, token in enumerate(needle.answer.tolist()):
            query = 50 - 4 + number - 1
            total += 1
            if int(logits[query].argmax()) != token:
                continue
            copied += 1
            for layer in range(2):
                for head in range(3):
                    key = int(probe.maps["decoder"][layer][0, head, query].argmax())
                    counted[layer, head] += (
                        key == needle.answer_positions[number],
                        key == needle.decoy_positions[number],
                    )
    assert 0 < copied < total
    assert found["written"]["copied"][0] == pytest.approx(copied / total)
    np.testing.assert_allclose(found["heads"].grid("retrieval", "decoder"), counted[..., 0] / total)
    np.testing.assert_allclose(found["heads"].grid("decoy", "decoder"), counted[..., 1] / total)


# What is refused, and what is kept ---------------------------------------------------------------------------------


def test_models_that_do_not_write_are_told_so(minilm_folder):
    for model in (attnscope.load("minilm"), attnscope.load("own")):
        with pytest.raises(AttnscopeError, match="cannot continue a text, so it copies no needle"):
            retrieval_heads(model)


def test_an_interruption_keeps_what_was_done(monkeypatch):
    monkeypatch.setattr("attnscope.studies.heads.needles.MAX_PASS_TOKENS", 5 * 48)
    seen = []

    def stop_after(n):
        def report(done):
            seen.append((done.n_texts, done.share, done.step))
            if len(seen) == n:
                raise KeyboardInterrupt

        return report

    found = retrieval_heads(planted_model(), options=SMALL, report=stop_after(2))
    assert (found.corpus["n_texts"], found.corpus["complete"]) == (5, False)
    assert [share for _, share, _ in seen] == pytest.approx([1 / 3, 2 / 3])


def test_a_model_that_computes_nan_on_a_needle_loses_that_one(monkeypatch):
    model = planted_model()
    whole = model.outputs
    calls = []

    def broken(*args, **how):
        found = whole(*args, **how)
        if not calls:
            found.logits[1] = np.nan
        calls.append(1)
        return found

    monkeypatch.setattr(model, "outputs", broken)
    found = retrieval_heads(model, options=SMALL)
    assert found.corpus["n_texts"] == 14
    assert found["written"]["copied"][0] == 1
    (problem,) = found.corpus["problems"]
    assert problem["source"] == "needle 2"
    assert "NaN" in problem["reason"]


# The command line --------------------------------------------------------------------------------------------------


@pytest.fixture
def planted(monkeypatch):
    """Whatever name is given, the planted decoder is loaded."""
    monkeypatch.setattr(LoadOptions, "load", lambda *_: planted_model())


@pytest.mark.usefixtures("planted")
def test_the_command_prints_and_writes_it(tmp_path, run):
    command = ["heads", "--probe", "needle", "-m", "planted", "--lengths", "48", "--needles", "15"]
    status, out, err = run(*command, "--measures", "decoy")
    assert status == 0, err
    assert "retrieval" in out
    assert "L1H0" in out
    assert "15 needles" in out
    status, out, err = run(*command, "-f", "npz,csv,json,png", "-o", tmp_path / "out")
    assert status == 0, err
    loaded = attnscope.load_record(tmp_path / "out" / "heads.npz")
    assert loaded["roles"]["role"].tolist() == ["retrieval"]
    lines = (tmp_path / "out" / "heads.csv").read_text().splitlines()
    assert "retrieval,retrieval_low" in lines[0]
    assert len(lines) == 5
    status, shown, err = run("show", tmp_path / "out" / "heads.npz", "--pick", "L1H0")
    assert status == 0, err
    assert "L1H0" in shown
    assert "L0H1" not in shown
