"""Captured queries and keys: a model's own measures from files; false and damaged files are refused with the reason."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import attnscope
from attnscope.core.attention.pooling import part_of_weights
from attnscope.core.attention.seam import AttentionCall, attend
from attnscope.core.measures.catalogue import measure_names
from attnscope.errors import AttnscopeError
from attnscope.models.captured.files import HEADER
from attnscope.models.hf.model import HuggingFaceModel, wrap
from attnscope.models.model import Batch
from tests import ablation_helpers
from tests.ablation_helpers import tiny
from tests.conftest import Run
from tests.test_replaced import MORE, WIDE

TEXTS = ("3 5 9 4 8 7 6 5 9", "7 3 11 12 5", "4 4 8 30 12 17 3")
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {}, "gpt2": {}, "llama": {}, "albert": {}, "gpt_neox": {}, "phi3": {}, "olmo2": {},
    "mistral": {"sliding_window": 3}, "gemma2": {"sliding_window": 3, "attn_logit_softcapping": 2.0}, "gpt_oss": {},
    "t5": {},
}  # fmt: skip
"""Grouped queries, rotary embeddings, windows, soft caps, sinks, and biases by offset (T5) among them."""


def capture(source: HuggingFaceModel, text: str, path: Path, **changes: Any) -> Path:
    """Writes what reaches the seam of a model on one text."""
    tokens = source.tokenizer.encode(text)
    n = len(tokens)
    calls: list[AttentionCall] = []
    ids = torch.from_numpy(tokens.ids)[None]
    source.run(Batch(ids), lambda call: (calls.append(call), attend(call))[1])
    by_layer: dict[str, dict[int, Any]] = {
        "queries": {call.layer: call.query[0] for call in calls},
        "keys": {call.layer: call.key[0] for call in calls},
        "values": {call.layer: call.value[0] for call in calls},
        "rows": {call.layer: part_of_weights(call, slice(n // 2, n // 2 + 1), slice(0, n))[0, :, 0] for call in calls},
        "scale": {call.layer: call.scale for call in calls},
        "windows": {call.layer: _window(call, n) for call in calls},
        "softcaps": {call.layer: call.softcap for call in calls},
        "sinks": {call.layer: call.sinks for call in calls if call.sinks is not None},
        "biases": {call.layer: _by_offset(call.bias[0], n) for call in calls if call.bias is not None},
    }
    embeddings = source.static_embeddings(ids)
    assert embeddings is not None
    how = {"model": "m", "kind": calls[0].kind, "ids": tokens.ids.tolist(), "text": text, "embeddings": embeddings[0]}
    return attnscope.CapturedText(**(how | by_layer | {"pieces": tokens.labels} | changes)).save(path)


def _window(call: AttentionCall, n: int) -> int | None:
    """How far back the last query sees; None = the whole text."""
    if call.window is None and call.mask is not None:
        seen = int(call.mask.expand(1, 1, n, n)[0, 0, -1].sum())
        return seen if seen < n else None
    return call.window


def _by_offset(bias: torch.Tensor, n: int) -> torch.Tensor:
    """A bias by key minus query, up to a constant per query, which softmax does not see."""
    bias = bias.expand(-1, n, n)
    last, first = bias[:, -1], bias[:, 0]
    return torch.cat([last - last[:, -1:], (first - first[:, :1])[:, 1:]], 1).contiguous()


def model_of(family: str, monkeypatch: pytest.MonkeyPatch) -> HuggingFaceModel:
    more = MORE | {
        "t5": ("T5EncoderModel", "T5Config", ablation_helpers.SIZES["t5"][2]),
    }
    monkeypatch.setattr(ablation_helpers, "SIZES", ablation_helpers.SIZES | more)
    return wrap(tiny(family, **FAMILIES[family]))


@pytest.fixture(scope="module")
def llama() -> HuggingFaceModel:
    return wrap(tiny("llama", **WIDE))


@pytest.fixture
def captured(llama: HuggingFaceModel, tmp_path: Path) -> Path:
    for number, text in enumerate(TEXTS):
        capture(llama, text, tmp_path / f"{number}.safetensors")
    return tmp_path


@pytest.mark.parametrize("family", FAMILIES)
def test_captures_give_the_measures_of_the_model(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(family, monkeypatch)
    for number, text in enumerate(TEXTS):
        capture(model, text, tmp_path / f"{number}.safetensors")
    source = attnscope.load(tmp_path)
    own, ours = attnscope.heads(model, TEXTS), attnscope.heads(source, source.texts)  # type: ignore[attr-defined]
    for name in measure_names():
        if name.removesuffix("_active") in ("norm_weighted", "outlier_token"):  # of W_O and of hidden states
            continue
        expected, grid = own.grid(source.info.kinds[0], name), ours.grid(source.info.kinds[0], name)
        np.testing.assert_allclose(grid, expected, rtol=1e-6, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scale": 0.3}, "the scale is wrong: the weights fit 0.5 instead of 0.3"),
        ({"kind": "encoder"}, "is the model a decoder"),
        ({"windows": {0: 2, 1: None}}, "or its window wider"),
        ({"queries": "unrotated"}, "after position encoding"),
        ({"keys": {0: torch.ones(2, 9, 4)}}, "layers.1.key is missing"),
        ({"ids": [1, 2]}, "must be (2, d)"),
        ({"rows": {0: torch.ones(3, 9)}}, "weights must be"),
    ],
)
def test_false_captures_are_refused_with_the_reason(
    llama: HuggingFaceModel, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    if changes.get("queries") == "unrotated":
        layer = llama.network.base.layers[0].self_attn
        hidden = llama.network.base.embed_tokens(torch.tensor([[int(n) for n in TEXTS[0].split()]]))
        with torch.no_grad():
            flat = layer.q_proj(llama.network.base.layers[0].input_layernorm(hidden))
        good = load_file(capture(llama, TEXTS[0], tmp_path / "good.safetensors"))
        changes = {"queries": {0: flat.view(9, 6, 4).transpose(0, 1), 1: good["layers.1.query"]}}
    with pytest.raises(AttnscopeError) as refused:
        capture(llama, TEXTS[0], tmp_path / "0.safetensors", **changes)
    message = f"{refused.value.message} {refused.value.hint}"
    assert any(part in message for part in reason.split("|")), message
    assert not (tmp_path / "0.safetensors").exists()


def test_what_is_not_captured_is_undefined_and_said(captured: Path) -> None:
    for path in captured.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            header = file.metadata()
        dropped = ("value", "weights", "embeddings")
        kept = {name: tensor for name, tensor in load_file(path).items() if not name.endswith(dropped)}
        save_file(kept, path, header)
    source = attnscope.load(str(captured / "*.safetensors"))
    found = attnscope.heads(source, source.texts, attnscope.HeadsOptions(describe=attnscope.DescribeOptions()))  # type: ignore[attr-defined]
    for name in ("value_weighted", "similar_token", "norm_weighted"):
        assert np.isnan(found.grid("decoder", name)).all()
    assert found.descriptions is not None
    notes = " ".join(found.run["notes"])
    assert "3 of 3 captures lack the row of weights" in notes and "Values were not captured" in notes


def test_commands_take_captures_as_a_model(captured: Path, run: Run, tmp_path: Path) -> None:
    assert "3 texts" in run("heads", "-m", str(captured)).out
    assert run("heatmap", "0", "-m", str(captured), "-o", str(tmp_path / "maps"), "--format", "npz").status == 0
    for command in (("ablate", "0"), ("circuits",)):
        refused = run(*command, "-m", str(captured))
        assert refused.status == 1
        assert "captures hold queries and keys, not the model" in refused.err
    refused = run("heads", "1 2 3", "-m", str(captured))
    assert refused.status == 1 and "only captured texts can be studied" in refused.err
    refused = run("heads", "-m", str(captured), "--dtype", "float64")
    assert refused.status == 2 and "float32" in refused.err


def test_captures_of_two_models_are_refused(captured: Path, llama: HuggingFaceModel) -> None:
    capture(llama, "5 5 5", captured / "3.safetensors", model="another")
    with pytest.raises(AttnscopeError, match="different model"):
        attnscope.load(captured)
    capture(llama, TEXTS[0], captured / "3.safetensors")
    with pytest.raises(AttnscopeError, match="holds the text of"):
        attnscope.load(captured)


def damage(path: Path, chance: random.Random) -> None:
    """Changes a capture: bytes, its header, or a tensor."""
    kind = chance.randrange(4)
    content = bytearray(path.read_bytes())
    if kind == 0:
        for _ in range(chance.randint(1, 8)):
            content[chance.randrange(min(len(content), 4000))] = chance.randrange(256)
    elif kind == 1:
        del content[chance.randrange(len(content)) :]
    else:
        with safe_open(path, "pt") as file:
            header = json.loads(file.metadata()[HEADER])
        tensors = load_file(path)
        if kind == 2:
            name = chance.choice(list(header))
            header[name] = chance.choice(
                [None, -1, "x", [], [1], {}, 1e400, [[]], header[name] * 2 if header[name] else 0]
            )
        else:
            name = chance.choice(list(tensors))
            tensor = tensors[name]
            tensors[name] = chance.choice(
                [tensor[:-1], tensor[None], tensor * 3, torch.full_like(tensor, -1), tensor[:0]]
            )
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {HEADER: json.dumps(header)})
        return
    path.write_bytes(content)


@pytest.mark.parametrize("n", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_damaged_captures_are_refused_in_one_line(captured: Path, n: int) -> None:
    chance = random.Random(n)
    path = captured / "1.safetensors"
    whole = path.read_bytes()
    n_refused = 0
    for _ in range(n):
        path.write_bytes(whole)
        damage(path, chance)
        try:
            source = attnscope.load(str(captured / "*.safetensors"))
            attnscope.heads(source, source.texts)  # type: ignore[attr-defined]
        except AttnscopeError as error:
            n_refused += 1
            assert "\n" not in error.message
    assert n_refused > n // 2
