"""Conversations and zones: where zones are, what they give each other by plain loops, and what is refused."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import attnscope
import attnscope.studies.heads.zones as zones_study
from attnscope.corpus.chats import zones_of_tokens
from attnscope.errors import AttnscopeError
from attnscope.models.hf.model import HuggingFaceModel, wrap
from attnscope.studies.heads.merging import merge_findings
from tests.ablation_helpers import tiny
from tests.conftest import Run
from tests.heads_helpers import require_same, small_blocks

__all__ = ["small_blocks"]

WORDS = "who wrote it ada bob cleo the page says read answer be brief now and then in rome oslo lima".split()
FRAME = ["system", "user", "assistant", "tool"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'narrator' %}{{ raise_exception('no narrators') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ (m.content or '') | trim }}<|im_end|>\n{% endfor %}"
)
ZONE = {"system": "system", "user": "user", "assistant": "answer", "tool": "tool"}


def tokenizer(template: str | None = TEMPLATE) -> transformers.PreTrainedTokenizerBase:
    """Words and marks; the special tokens are those of the template."""
    pieces = ["<unk>", "<|im_start|>", "<|im_end|>", *dict.fromkeys([*FRAME, *WORDS, "<", ">", "b", "/", ":"])]
    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", chat_template=template,
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )  # fmt: skip


@pytest.fixture(scope="module")
def llama() -> HuggingFaceModel:
    return wrap(tiny("llama", num_hidden_layers=2), tokenizer())


def say(chance: random.Random, n: int) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(n))


def conversation(seed: int) -> dict[str, Any]:
    """A system line, a question with a document in it, a tool's result in some, and an answer."""
    chance = random.Random(seed)
    document, question = say(chance, chance.randint(3, 7)), say(chance, 3)
    span = {"start": len(question) + 1, "end": len(question) + 1 + len(document), "zone": "document"}
    user = {"role": "user", "content": f"{question} {document}", "spans": [span]}
    tool = [{"role": "tool", "content": say(chance, 2)}] * (seed % 3 == 0)
    system, answer = (
        {"role": role, "content": f" {say(chance, chance.randint(2, 5))} "} for role in ("system", "assistant")
    )
    return {"messages": [system, user, *tool, answer]}


def write(path: Path, entries: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    return path


def tokens_by_hand(entry: dict[str, Any]) -> list[tuple[str, str]]:
    """Each token with its zone."""
    made = []
    for message in entry["messages"]:
        made += [("<|im_start|>", "template"), (message["role"], "template")]
        content = message["content"]
        for span in message.get("spans", [])[:1] or [{"start": len(content), "end": len(content), "zone": ""}]:
            before, inside = content[: span["start"]], content[span["start"] : span["end"]]
            made += [(word, ZONE[message["role"]]) for word in before.split()]
            made += [(word, span["zone"]) for word in inside.split()]
        made.append(("<|im_end|>", "template"))
    return made


def measured_by_hand(model: HuggingFaceModel, entries: list[Any], a: str, b: str) -> tuple[Any, float]:
    """The mean over conversations of what queries in zone a give to keys in b, (layer, head), and the uniform one."""
    plain = tiny("llama", num_hidden_layers=2, attn_implementation="eager").double()
    ids_of = model.tokenizer.backend.convert_tokens_to_ids
    values, evens = [], []
    for entry in entries:
        tokens = tokens_by_hand(entry)
        with torch.no_grad():
            maps = plain(torch.tensor([[ids_of(word) for word, _ in tokens]]), output_attentions=True).attentions
        rows, even = [], []
        for q, (_, zone) in enumerate(tokens):
            keys = [k for k in range(q + 1) if tokens[k][1] == b]
            if zone == a and keys:
                rows.append([[float(sum(of[0, h, q, k] for k in keys)) for h in range(6)] for of in maps])
                even.append(len(keys) / (q + 1))
        if rows:
            values.append(np.mean(rows, 0))
            evens.append(np.mean(even))
    return np.mean(values, 0), float(np.mean(evens))


def test_zones_are_where_the_messages_are(llama: HuggingFaceModel, tmp_path: Path) -> None:
    entries = [conversation(seed) for seed in range(6)]
    corpus = attnscope.Corpus([write(tmp_path / "chats.jsonl", entries)])
    corpus.write_by(llama.tokenizer.write_chat)
    names = ("answer", "document", "system", "template", "tool", "user")
    for text, entry in zip(corpus, entries, strict=True):
        tokens = llama.tokenizer.encode(text.text or "", is_whole=True)
        expected = tokens_by_hand(entry)
        assert [label for label, _ in expected] == list(tokens.labels)
        numbers = zones_of_tokens(tokens, text.zones, names)
        assert [names[number] for number in numbers] == [zone for _, zone in expected]
    assert corpus.zones == names


@pytest.mark.usefixtures("small_blocks")
def test_measures_between_zones_are_those_of_plain_loops(llama: HuggingFaceModel, tmp_path: Path) -> None:
    entries = [conversation(seed) for seed in range(12)]
    found = attnscope.heads(llama, attnscope.Corpus([write(tmp_path / "chats.jsonl", entries)]))
    assert found.options["zones"] == ["answer", "document", "system", "template", "tool", "user"]
    for a, b in (("answer", "document"), ("user", "user"), ("answer", "tool"), ("document", "template")):
        values, even = measured_by_hand(llama, entries, a, b)
        name = f"zone_{a}_to_{b}"
        np.testing.assert_allclose(found.grid("decoder", name), values, atol=2e-6)
        estimate = found.heads[3].measures[name]
        assert estimate.uniform == pytest.approx(even, abs=1e-6)
        assert estimate.low < estimate.value < estimate.high
    assert found.heads[0].measures["zone_answer_to_tool"].count == 4  # conversations with a tool
    assert np.isnan(found.heads[0].measures["zone_system_to_answer"].value)  # the mask hides it
    column = next(c for c in found.head_table().columns if c.name == "zone_answer_to_document")
    assert (column.label, column.unit, column.range) == ("answer → document", "share", (0, 1))


@pytest.mark.usefixtures("small_blocks", "worker_here")
def test_shards_and_workers_give_what_one_run_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zones_study, "BLOCK", 4)
    folder = tmp_path / "model"
    tiny("llama", num_hidden_layers=2).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    model = attnscope.load(folder)
    path = write(tmp_path / "chats.jsonl", [conversation(seed) for seed in range(11)])
    whole = attnscope.heads(model, attnscope.Corpus([path]))
    shared = attnscope.heads(model, attnscope.Corpus([path]), workers=attnscope.Workers(str(folder), 2))
    require_same(whole, shared)
    parts = [
        attnscope.heads(model, attnscope.Corpus([path]), attnscope.HeadsOptions(shard=(k, 2))).save(tmp_path / f"{k}.npz")
        for k in (1, 2)
    ]
    require_same(whole, merge_findings([attnscope.load_record(part) for part in parts]))
    assert "zone_answer_to_document" in whole.measure_names
