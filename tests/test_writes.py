"""What heads add to logits by themselves: the parts sum up, and are those of the formula written out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import attnscope
from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import attend
from attnscope.core.measures.written import WRITTEN
from attnscope.errors import AttnscopeError
from attnscope.models.inside.attribution import DirectPaths, Parts
from attnscope.models.model import Batch
from attnscope.records.heads.findings import Findings
from attnscope.studies.heads.options import HeadsOptions
from tests.conftest import VOCABULARY, Run, write_tokenizer
from tests.test_stream import random_model

IDS = torch.tensor([[5, 9, 3, 7, 11, 4], [8, 6, 3, 12, 11, 9]])
ROWS, PLACES = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 2, 4, 1, 3])
ANSWERS = torch.tensor([9, 7, 4, 3, 11])


def parts_of(source: Any) -> Parts:
    return DirectPaths(attnscope.load(source)).run(Batch(IDS), ROWS, PLACES, ANSWERS)


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "gemma", "bert", "gemma2", "opt", "gpt_neox", "qwen3", "phi", "mistral", "mixtral"]
)
def test_heads_networks_embeddings_and_biases_sum_up_to_the_logit(name: str) -> None:
    source = random_model(name)
    parts = parts_of(source)
    torch.testing.assert_close(parts.total, parts.logits, rtol=0, atol=1e-5)
    with torch.no_grad():
        logits = attnscope.load(source).outputs(Batch(IDS), attend).logits[ROWS, PLACES]
    if name == "gemma2":  # the head's cap comes after
        logits = 30 * torch.atanh(logits.double() / 30).float()
    torch.testing.assert_close(
        parts.logits, logits.gather(-1, ANSWERS[:, None])[:, 0] - logits.mean(-1), rtol=0, atol=1e-4
    )
    for one in (parts.feed_forward, *parts.heads.values()):
        assert bool((one != 0).any())
    assert bool((parts.biases != 0).any()) is (name not in ("gemma", "gemma2", "qwen3", "mistral", "mixtral"))


def test_a_head_s_part_is_what_it_wrote_through_the_last_norm_as_it_was() -> None:
    """Of a Llama with grouped queries: z W_O, divided by the root mean square of the stream, along gain * W_U."""
    source = random_model("llama")
    kept: dict[Place, torch.Tensor] = {}

    def probe(call: Any) -> torch.Tensor:
        kept[call.kind, call.layer] = attend(call)
        return kept[call.kind, call.layer]

    model: Any = attnscope.load(source)
    parts = DirectPaths(model).run(Batch(IDS), ROWS, PLACES, ANSWERS)
    stream: list[torch.Tensor] = []
    handle = source.model.norm.register_forward_pre_hook(lambda module, given: stream.append(given[0]))
    with torch.no_grad():
        model.outputs(Batch(IDS), probe)
    handle.remove()
    unembedding = source.lm_head.weight.detach().double()
    along = (unembedding[ANSWERS] - unembedding.mean(0)) * source.model.norm.weight.detach().double()
    for (kind, layer), output in kept.items():
        w_o = source.model.layers[layer].self_attn.o_proj.weight.detach().double()
        for number, (row, place) in enumerate(zip(ROWS.tolist(), PLACES.tolist(), strict=True)):
            length = stream[-1][row, place].double().pow(2).mean().sqrt()
            for head in range(6):
                wrote = w_o[:, head * 4 : head * 4 + 4] @ output[row, head, place].double()
                expected = float(along[number] @ wrote / length)
                assert float(parts.heads[kind, layer][number, head]) == pytest.approx(expected, abs=1e-4)


def test_what_something_else_adds_to_is_refused_in_a_line() -> None:
    with pytest.raises(AttnscopeError, match="its logits differ from the sum of what its heads"):
        parts_of(random_model("roberta"))  # its head calls GELU as a function, which no hook sees
    with pytest.raises(AttnscopeError, match="does not predict words"):
        DirectPaths(attnscope.load("own"))


def test_a_run_leaves_the_model_as_it_was() -> None:
    source = random_model("gpt2")
    model = attnscope.load(source)
    with torch.no_grad():
        before = model.outputs(Batch(IDS), attend).logits
        DirectPaths(model).run(Batch(IDS), ROWS, PLACES, ANSWERS)
        torch.testing.assert_close(model.outputs(Batch(IDS), attend).logits, before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in source.parameters())


# The command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def decoder(tmp_path: Path) -> Path:
    """A Llama that attends to the token itself and whose L0H0 copies what it attends to."""
    source = random_model("llama", vocab_size=len(VOCABULARY), tie_word_embeddings=True, attention_bias=False)
    attention = source.model.layers[0].self_attn
    with torch.no_grad():
        source.model.layers[0].input_layernorm.weight.fill_(1)
        source.model.norm.weight.fill_(1)
        attention.o_proj.weight[:, :4] = 4 * attention.v_proj.weight[:4].T
    source.save_pretrained(tmp_path / "llama")
    write_tokenizer(tmp_path / "llama")
    return tmp_path / "llama"


def test_the_command_says_what_heads_write(decoder: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("a b a b a b a b\nc d c d c d\nthe cat the cat the cat\n", "utf-8")
    told = ("heads", "--file", "texts.txt", "-m", decoder, "--no-describe", "-q")
    status, out, err = run(*told, "--writes", "-o", tmp_path / "out", "-f", "npz,csv,json")
    assert status == 0, err
    record = Findings.load(tmp_path / "out" / "heads.npz")
    first = record.heads[0].measures
    assert set(WRITTEN) <= set(first)
    on_all, looked, other = (first[name] for name in ("writes", "writes_attended", "writes_elsewhere"))
    assert on_all.count == pytest.approx(looked.count + other.count)
    assert record.corpus["writes"]["n_predictions"] == 8 + 6 + 6
    mixed = (looked.value * looked.count + other.value * other.count) / on_all.count
    assert on_all.value == pytest.approx(mixed, abs=1e-6)
    assert on_all.low <= on_all.value <= on_all.high
    assert looked.value > other.value, "a head that copies adds more to the answers that it attends to"
    parts = record.corpus["writes"]["parts"]
    assert parts["logit"] == pytest.approx(sum(value for name, value in parts.items() if name != "logit"), abs=1e-4)
    header = (tmp_path / "out" / "heads.csv").read_text("utf-8").splitlines()[0].split(",")
    assert {"writes", "writes_low", "writes_attended_count", "answer_weight"} <= set(header)
    told = json.loads((tmp_path / "out" / "heads.json").read_text("utf-8"))
    assert "writes" in told["heads"][0]["measures"] and "copying" in told["options"]["roles"]
    status, out, _ = run("show", tmp_path / "out" / "heads.npz", "-q")
    assert status == 0 and "heads that raise the logits of right answers most" in out and "feed-forward" in out


TEXTS = ["a b a b", "the cat the cat the", "c d e f c d", "a a a", "e f a b e f a b", "b c d e a the cat b c"]


def written(found: Findings) -> list[Any]:
    return [one for head in found.heads for name, one in head.measures.items() if name in WRITTEN]


def test_the_order_of_the_texts_is_no_matter(decoder: Path) -> None:
    model = attnscope.load(str(decoder))
    values = [written(attnscope.heads(model, given, HeadsOptions(writes=True))) for given in (TEXTS, TEXTS[::-1])]
    for one, other in zip(*values, strict=True):
        assert one.count == other.count
        assert one.value == pytest.approx(other.value, rel=1e-5, abs=1e-6, nan_ok=True)


def test_each_token_is_predicted_once_however_chunks_overlap(decoder: Path) -> None:
    model = attnscope.load(str(decoder))
    text = "a b c d e f a b c d e f a b c d e f"
    for chunk, stride in ((None, None), (8, 5), (7, 5), (6, 1)):
        found = attnscope.heads(model, [text], HeadsOptions(writes=True, chunk=chunk, stride=stride))
        assert found.corpus["writes"]["n_predictions"] == len(text.split())


def test_masked_words_are_answers_of_an_encoder(run: Run, tmp_path: Path) -> None:
    source = random_model("bert", vocab_size=len(VOCABULARY))
    source.save_pretrained(tmp_path / "bert")
    write_tokenizer(tmp_path / "bert")
    texts = [" ".join([text] * 4) for text in TEXTS]  # so that other words are masked, to compare with
    (tmp_path / "texts.txt").write_text("\n".join(texts), "utf-8")
    status, out, err = run("heads", "--file", "texts.txt", "-m", tmp_path / "bert", "--writes", "--no-describe", "-q",
                           "-o", tmp_path / "out", "-f", "npz")  # fmt: skip
    assert status == 0, err
    record = Findings.load(tmp_path / "out" / "heads.npz")
    n_words = [len(text.split()) for text in texts]
    assert record.corpus["writes"]["n_predictions"] == sum(max(1, round(0.15 * n)) for n in n_words)
    assert "masked tokens: 15%, seed 0" in out
    head = record.heads[0].measures
    assert head["copying_nats"].count > 0 and head["induction_nats"].count == 0


def test_what_cannot_be_said_is_refused_before_texts_are_read(run: Run) -> None:
    status, _, err = run("heads", "a b", "-m", "own", "--writes")
    assert status == 1 and "does not predict words" in err
