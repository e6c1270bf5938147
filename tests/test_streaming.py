"""Streaming heads: the mask by its definition, and what a model loses by it."""

import json
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import attnscope
from attnscope.core.attention.seam import AttentionCall, attend, attention_weights
from attnscope.core.interventions.replaced import Replaced, Replacement
from attnscope.core.interventions.streaming import attend_streaming
from attnscope.corpus import needle_probe
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.model import Model
from attnscope.studies.heads.needles import make_hay
from tests.conftest import Run
from tests.needle_helpers import PREVIOUS, RETRIEVAL, planted_model, save_planted

SINK, RECENT = 2, 5
NEEDLES = attnscope.NeedleOptions(lengths=(48,), depths=(0.0, 0.5), n=6, answer=4)
OPTIONS = attnscope.StreamingOptions(sink_size=SINK, recent_size=RECENT, shares=(0.5, 1.0), n=3)


def seen(n: int, sink: int = SINK, recent: int = RECENT) -> Tensor:
    """Which query sees which key, by plain loops."""
    pairs = [[k <= q and (k < sink or q - k < recent) for k in range(n)] for q in range(n)]
    return torch.tensor(pairs)


@pytest.mark.parametrize("more", ["plain", "mask", "bias", "softcap", "window", "written out"])
@pytest.mark.parametrize("block", [3, 256])
def test_streaming_is_the_mask_by_its_definition(more: str, block: int) -> None:
    torch.manual_seed(0)
    n, window = 23, 3 if more == "window" else None
    query, key, value = torch.randn(2, 6, n, 7), torch.randn(2, 3, n, 7), torch.randn(2, 3, n, 5)
    mask = (torch.arange(n) > 1).expand(2, 1, 1, n) if more == "mask" else None
    mask = torch.ones(n, n).tril().bool()[None, None] if more == "written out" else mask
    call = AttentionCall(
        0, "decoder", query, key, value, 0.4, mask=mask, is_causal=more != "written out", window=window,
        bias=torch.randn(1, 6, n, n) if more == "bias" else None, softcap=2.0 if more == "softcap" else None,
    )  # fmt: skip
    allowed = seen(n) if mask is None else seen(n) & mask
    allowed = allowed if window is None else allowed & seen(n, 0, window)
    whole = AttentionCall(0, "decoder", query, key, value, 0.4, mask=allowed, bias=call.bias, softcap=call.softcap)
    expected = attention_weights(whole) @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(attend_streaming(call, SINK, RECENT, block), expected, atol=1e-6, rtol=1e-5)
    streaming = partial(attend_streaming, sink_size=SINK, recent_size=RECENT)
    mixed = Replaced({("decoder", 0): [Replacement((1, 4), compute=streaming)]})(call)
    torch.testing.assert_close(mixed[:, [1, 4]], expected[:, [1, 4]], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(mixed[:, [0, 2, 3, 5]], attend(call)[:, [0, 2, 3, 5]])


@pytest.fixture(scope="module")
def llama() -> Any:
    """Random, of two layers; two query heads read each key/value head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.5)
    return model.eval()


def load(network: Any) -> Model:
    """A network of transformers whose words are numbers."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({str(number): number for number in range(40)}, unk_token="0"))
    return attnscope.load(network, PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0"), check=False)


def plain_losses(network: Any, texts: list[Tensor], n_answer: int, heads: dict[int, list[int]]) -> float:
    """Nats per token of a forward pass of transformers whose query heads have masks of their own."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def masked(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        n = query.shape[2]
        allowed = torch.ones(n, n).tril().bool().repeat(4, 1, 1)
        allowed[heads.get(module.layer_idx, [])] = seen(n)
        key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        scores = (query @ key.mT * scaling).masked_fill(~allowed, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("plain-masked", masked)
    AttentionMaskInterface.register("plain-masked", lambda *_, **__: None)
    model = deepcopy(network)
    model.set_attn_implementation("plain-masked")
    total, count = 0.0, 0
    for ids in texts:
        with torch.no_grad():
            logits = model(ids[None, :-1]).logits[0, :-n_answer]
        total += float(torch.nn.functional.cross_entropy(logits.double(), ids[1:-n_answer], reduction="sum"))
        count += len(logits)
    return total / count


def test_the_loss_is_that_of_a_plain_masked_forward(llama: Any, tmp_path: Path) -> None:
    model = load(llama)
    found = attnscope.retrieval_heads(model, options=NEEDLES)
    assert found.run["n_kv_heads"] == {"decoder": 2}
    check = attnscope.check_streaming(model, found, options=OPTIONS)
    hay = make_hay(model, None, NEEDLES)
    needles = list(needle_probe(hay, 3, NEEDLES.depths, 48, NEEDLES.seed + 1, answer=4))
    texts = [torch.from_numpy(needle.ids) for needle in needles]
    expected = plain_losses(llama, texts, 4, {})
    assert check.loss.value == pytest.approx(expected, abs=1e-5)
    values = attnscope.export(found, "duo", tmp_path / "pattern")[0]
    order = np.argsort(np.loadtxt(values), axis=None, kind="stable")
    by_scores = {one.share: one for one in check.streamed if one.by == "scores"}
    for share, n in ((0.5, 2), (1.0, 4)):
        heads: dict[int, list[int]] = {}
        for flat in order[:n].tolist():
            heads.setdefault(flat // 2, []).extend((2 * (flat % 2), 2 * (flat % 2) + 1))
        masked = plain_losses(llama, texts, 4, heads)
        assert abs(masked - expected) > 1e-3 and by_scores[share].n_heads == n
        assert by_scores[share].loss.value == pytest.approx(masked, abs=1e-5)
        assert by_scores[share].loss_rise.value == pytest.approx(masked - expected, abs=2e-5)


def test_the_head_that_retrieves_is_kept() -> None:
    """Of four heads three may stream, so long as it is not the one that copies."""
    model = planted_model()
    found = attnscope.retrieval_heads(model, options=attnscope.NeedleOptions(lengths=(96,), depths=(0.0,), n=8))
    options = attnscope.StreamingOptions(sink_size=1, recent_size=8, shares=(0.75, 1.0), n=4)
    check = attnscope.check_streaming(model, found, options=options)
    by = {(one.share, one.by): one for one in check.streamed}
    assert check.recall.value == 1 and check.n_kv_heads == 4
    assert by[0.75, "scores"].recall.value == 1 and by[0.75, "scores"].n_heads == 3
    assert by[0.75, "random"].recall.value < 1 and by[1.0, "scores"].recall.value == 0
    assert by[1.0, "scores"].recall_drop.value == 1 and PREVIOUS != RETRIEVAL


def test_the_command_reports_before_and_after(run: Run) -> None:
    folder = save_planted(Path("planted"))
    asked = ("--probe", "needle", "--lengths", "64", "--depths", "0", "--needles", "8")
    assert run("heads", *asked, "-m", folder, "-f", "npz", "-o", "needles").status == 0
    small = ("--stream", "--sinks", "1", "--recent", "8", "--shares", "75", "--needles", "2")
    status, out, err = run("export", "needles", "--for", "duo", "-o", "pattern", *small)
    assert status == 0, err
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    assert "1.00" in lines["75%, by scores"] and "no head was chosen on them" in out
    assert out.splitlines()[-2:] == ["pattern/full_attention_heads.tsv", "pattern/config.json"]
    told = json.loads(run("export", "needles", "--for", "retrieval", "-o", "a.json", "--json", *small).out)
    assert told["check"]["n_kv_heads"] == 4 and len(told["check"]["streamed"]) == 2


def test_another_model_is_refused(llama: Any) -> None:
    found = attnscope.retrieval_heads(planted_model(), options=NEEDLES)
    with pytest.raises(AttnscopeError, match="of other weights than"):
        attnscope.check_streaming(load(llama), found)
    with pytest.raises(AttnscopeError, match="does not say how its needles were hidden"):
        attnscope.check_streaming(planted_model(), replace(found, options={}))
    with pytest.raises(UsageError, match="shares of 150%"):
        attnscope.StreamingOptions(shares=(1.5,))
