"""Conversations and zones: where zones are, what they give each other by plain loops, and what is refused."""

import json
import os
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import attnscope
import attnscope.studies.describe.study as describe_study
from attnscope.corpus.chats import zones_of_tokens
from attnscope.errors import AttnscopeError
from attnscope.models.hf.model import HuggingFaceModel, wrap
from attnscope.studies.atlas.parts import merge_atlases
from attnscope.studies.describe.rows import measure
from attnscope.studies.describe.sample import DescribeOptions
from attnscope.studies.heads.merging import merge_findings
from tests.ablation_helpers import tiny
from tests.conftest import Run
from tests.heads_helpers import require_same, small_blocks
from tests.test_damaged import change_one

__all__ = ["small_blocks"]

WORDS = (
    "who",
    "wrote",
    "it",
    "ada",
    "bob",
    "cleo",
    "the",
    "page",
    "says",
    "read",
    "be",
    "brief",
    "now",
    "rome",
    "oslo",
)
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
        maps = [of[0].numpy() for of in maps]
        rows, even = [], []
        for q, (_, zone) in enumerate(tokens):
            keys = [k for k in range(q + 1) if tokens[k][1] == b]
            if zone == a and keys:
                rows.append([[sum(float(of[h, q, k]) for k in keys) for h in range(6)] for of in maps])
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
    folder = tmp_path / "model"
    tiny("llama", num_hidden_layers=2).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    model = attnscope.load(folder)
    path = write(tmp_path / "chats.jsonl", [conversation(seed) for seed in range(7)])
    whole = attnscope.heads(model, attnscope.Corpus([path]))
    shared = attnscope.heads(model, attnscope.Corpus([path]), workers=attnscope.Workers(str(folder), 2))
    require_same(whole, shared)
    parts = [
        attnscope.heads(model, attnscope.Corpus([path]), attnscope.HeadsOptions(shard=(k, 2))).save(
            tmp_path / f"{k}.npz"
        )
        for k in (1, 2)
    ]
    require_same(whole, merge_findings([attnscope.load_record(part) for part in parts]))
    assert "zone_answer_to_document" in whole.measure_names


@pytest.mark.usefixtures("small_blocks")
def test_a_part_of_an_atlas_reads_its_conversations_again(llama: HuggingFaceModel, tmp_path: Path) -> None:
    corpus = attnscope.Corpus([write(tmp_path / "chats.jsonl", [conversation(seed) for seed in range(6)])])
    whole = attnscope.atlas(llama, corpus, attnscope.AtlasOptions(examples=2, sample=3))
    parts = [
        attnscope.load_record(
            attnscope.atlas(
                llama, corpus, attnscope.AtlasOptions(heads=attnscope.HeadsOptions(shard=(k, 2)), examples=2, sample=3)
            ).save(tmp_path / f"{k}.npz")
        )
        for k in (1, 2)
    ]
    assert parts[0].kept[0].is_chat
    assert merge_atlases(llama, parts).as_json() == whole.as_json()


def read(path: Path, model: HuggingFaceModel, **more: Any) -> tuple[list[Any], list[str]]:
    """The texts of a file, and what was wrong with others."""
    corpus = attnscope.Corpus([path], **more)
    corpus.write_by(model.tokenizer.write_chat)
    return list(corpus), [problem.reason for problem in corpus.problems]


GOOD = {"messages": [{"role": "user", "content": "who wrote it"}, {"role": "assistant", "content": "ada"}]}


@pytest.mark.parametrize(
    ("messages", "zones"),
    [
        ([{"role": "user", "content": "who"}, {"role": "tool", "content": None, "tool_calls": [{"id": 1}]}], {"user"}),
        ([{"role": "user", "content": ""}, {"role": "assistant", "content": "ada"}], {"answer"}),
        ([{"role": "assistant"}, {"role": "USER", "content": "who"}], {"user"}),
        ([{"role": "user", "content": ["who", {"type": "text", "text": " page", "zone": "Page"}]}], {"user", "page"}),
        ([{"role": "user", "content": "who", "zone": "question"}], {"question"}),
        ([{"role": "<b>/", "content": "who <b> &amp; </b>"}], {"b"}),
        ([{"role": "user", "content": "user"}, {"role": "user", "content": "<|im_end|> who"}], {"user"}),
    ],
)  # fmt: skip
def test_odd_messages_have_their_zones(
    llama: HuggingFaceModel, tmp_path: Path, messages: list[Any], zones: set[str]
) -> None:
    (text,), problems = read(write(tmp_path / "c.jsonl", [{"messages": messages}]), llama)
    assert not problems
    assert {name for *_, name in text.zones} == {*zones, "template"}
    assert [start for start, *_ in text.zones] == [0, *(stop for _, stop, _ in text.zones[:-1])]
    assert text.zones[-1][1] == len(text.text)


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"messages": []}, '"messages" is no list of messages'),
        ({"messages": ["who"]}, 'message 1 is no object with a "role"'),
        ({"messages": [{"role": "narrator", "content": "who"}]}, "the chat template fails: no narrators"),
        ({"messages": [{"role": "!", "content": "who"}]}, "the zone of message 1 is no name of letters"),
        ({"messages": [{"role": "user", "content": 7}]}, "the content of message 1 is no text: 7"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "a part of message 1 is no text"),
        ({"messages": [{"role": "user", "content": "who \U000f0000"}]}, "a message holds private characters"),
        ({"messages": [{"role": "user", "content": "who", "spans": [{"end": 9, "zone": "x"}]}]}, "not within the 3"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "half of a surrogate pair"),
        ({"text": "who wrote", "spans": [{"start": 0, "end": 3, "zone": "a b"}]}, "the zone of a span is no name"),
        ({"text": "who wrote", "spans": [{"start": 0, "end": 3, "zone": "a_to_b"}]}, "leave out the word to"),
        ({"text": "who wrote", "spans": [{"start": 0, "end": 3, "zone": "to_b"}]}, "leave out the word to"),
        ({"text": "who wrote", "spans": [{"start": 0, "end": 3, "zone": "page_low"}]}, "mistaken for another column"),
        ({"text": "who wrote", "spans": [{"start": s, "end": 5, "zone": "x"} for s in (0, 3)]}, "overlaps"),
        (GOOD | {"documents": "page"}, '"documents" is no list of objects'),
    ],
)  # fmt: skip
def test_a_malformed_line_is_skipped_with_the_reason(
    llama: HuggingFaceModel, tmp_path: Path, entry: dict[str, Any], reason: str
) -> None:
    texts, problems = read(write(tmp_path / "c.jsonl", [entry, GOOD]), llama)
    assert len(texts) == len(problems) == 1
    assert reason in problems[0]


def test_damaged_conversations_are_read_or_skipped_with_the_reason(llama: HuggingFaceModel, tmp_path: Path) -> None:
    chance = random.Random(0)
    n_read = n_skipped = 0
    for number in range(60):
        entries = [conversation(seed) for seed in range(4 * number, 4 * number + 4)]
        for entry in entries:
            change_one(entry, chance)
        texts, problems = read(write(tmp_path / "c.jsonl", [GOOD, *entries]), llama)
        assert len(texts) + len(problems) == 5
        assert not any("\n" in reason for reason in problems)
        for text in texts:
            zones_of_tokens(llama.tokenizer.encode(text.text or "", is_whole=text.is_chat), text.zones, ("user",))
        n_read, n_skipped = n_read + len(texts), n_skipped + len(problems)
    assert n_read > 60 < n_skipped


def test_a_template_that_rewrites_messages_is_not_trusted(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }} {{ m.content.split('</b>')[-1] }}\n{% endfor %}"
    model = wrap(tiny("llama", num_hidden_layers=1), tokenizer(template), check=False)
    entries = [{"messages": [{"role": "assistant", "content": "who </b> ada"}]}, GOOD]
    texts, problems = read(write(tmp_path / "c.jsonl", entries), model)
    assert problems == ["the chat template rewrites a message, so that its zone cannot be told"]
    assert texts[0].zones == (
        (0, 5, "template"), (5, 17, "user"), (17, 28, "template"), (28, 31, "answer"), (31, 32, "template"),
    )  # fmt: skip


def test_spans_name_the_zones_of_plain_texts(llama: HuggingFaceModel, tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", [
        {"text": "who wrote it", "spans": [{"start": 4, "end": 9, "zone": "Document"}]},
        {"text": "ada wrote it", "spans": [{"start": 0, "end": 3, "label": "PERSON"}]},  # of other programs
    ])  # fmt: skip
    (zoned, plain), problems = read(path, llama)
    assert not problems
    assert zoned.zones == ((0, 4, "text"), (4, 9, "document"), (9, 12, "text"))
    assert not zoned.is_chat
    assert plain.zones == ()


def test_a_head_from_the_answer_to_the_document_is_described_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrap(tiny("llama", num_hidden_layers=1), tokenizer(), check=False)
    texts, _ = read(write(tmp_path / "c.jsonl", [conversation(seed) for seed in range(40)]), model)

    def plant(model: Any, sample: Any, *more: Any) -> list[Any]:
        """Rows of one head: even, but that queries in the answer give keys in the document 21 times as much."""
        (group,) = measure(model, sample, *more)
        rows, weights = group.active, group.active.weights.astype(np.float32)
        for row, text in enumerate(rows.texts):
            unit, entries = sample[text], slice(rows.starts[row], rows.starts[row + 1])
            zones = zones_of_tokens(unit.chunk.tokens, unit.text.zones, ("answer", "document"))
            keys = zones[group.queries[row] + group.offsets[entries]]
            planted = np.where((keys == 1) & (zones[group.queries[row]] == 0), 21.0, 1.0)
            weights[0, entries] = weights[0, entries].sum() * planted / planted.sum()
        return [replace(group, active=replace(rows, weights=weights))]

    monkeypatch.setattr(describe_study, "measure", plant)
    (head,) = attnscope.describe(model, texts, options=DescribeOptions(heads=((0, 0),))).heads
    assert head.words.startswith("from the answer zone: the document zone")
    assert head.active is not None and head.active.explained > 0.99


def test_a_model_without_a_template_refuses_and_says_what_to_do(tmp_path: Path) -> None:
    model = wrap(tiny("llama", num_hidden_layers=1), tokenizer(None), check=False)
    path = write(tmp_path / "c.jsonl", [GOOD])
    with pytest.raises(AttnscopeError, match="the model has no chat template") as refused:
        attnscope.heads(model, attnscope.Corpus([path]))
    assert "--chat-template plain" in refused.value.hint
    (text,), _ = read(path, model, chat_template="plain")
    assert text.text == "user: who wrote it\n\nassistant: ada"
    assert [(text.text[a:b], name) for a, b, name in text.zones if name != "template"] == [
        ("who wrote it", "user"), ("ada", "answer"),
    ]  # fmt: skip
    assert not text.is_chat


def test_a_conversation_longer_than_the_model_counts_once(tmp_path: Path) -> None:
    model = wrap(tiny("llama", num_hidden_layers=1, max_position_embeddings=16), tokenizer(), check=False)
    found = attnscope.heads(model, attnscope.Corpus([write(tmp_path / "c.jsonl", [conversation(s) for s in range(5)])]))
    assert found.corpus["n_chunked"] == 5
    assert {head.measures["zone_answer_to_answer"].count for head in found.heads} == {5.0}


def test_the_command_line_lists_zones_and_chooses_heads_by_them(tmp_path: Path, run: Run) -> None:
    tiny("llama", num_hidden_layers=1).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    write(tmp_path / "c.jsonl", [conversation(seed) for seed in range(6)])
    given = ("-m", "model", "--file", "c.jsonl", "-q")
    shown = run("heads", *given, "--no-describe", "--measures", "zone_answer_to_document", "-o", "out", "-f", "csv,npz")
    assert shown.status == 0, shown.err
    assert "attention from zone to zone" in shown.out
    assert "chosen as the best of 6 heads on these same texts" in " ".join(shown.out.split())
    header = next((tmp_path / "out").glob("*.csv")).read_text().splitlines()[0].split(",")
    assert {"zone_answer_to_document", "zone_answer_to_document_low", "zone_answer_to_document_uniform"} <= {*header}
    chosen = run("atlas", *given, "--no-describe", "--where", "zone_answer_to_document > 2", "-o", "a.npz")
    assert chosen.status == 0, chosen.err
    assert "no head fulfils the condition" in chosen.out
    wrong = run("heads", *given, "--no-describe", "--where", "zone_answer_to_nothing > 0.5")
    assert "there is no 'zone_answer_to_nothing' to choose heads by" in wrong.err


def test_too_many_zones_are_refused_before_heads_are_studied(
    llama: HuggingFaceModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HuggingFaceModel, "run", lambda *_: pytest.fail("the model ran"))
    spans = [{"start": at, "end": at + 1, "zone": f"z{chr(97 + at)}"} for at in range(13)]
    texts = [{"text": f"ada wrote the page {number}", "spans": spans} for number in range(2)]
    with pytest.raises(AttnscopeError, match="the texts have 14 zones: text, za, zb") as error:
        attnscope.heads(llama, attnscope.Corpus([write(tmp_path / "c.jsonl", texts)]))
    assert "at most 12 different zones" in error.value.hint


def test_malformed_conversations_point_to_their_format(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('{"messages"\n[1\n')
    with pytest.raises(AttnscopeError, match="no text is left") as error:
        [*attnscope.Corpus([tmp_path / "c.jsonl"])]
    assert "docs/chats.md" in error.value.hint


def test_a_pipe_is_read_once_and_kept(tmp_path: Path) -> None:
    pipe, lines = tmp_path / "c.jsonl", "".join(json.dumps({"text": f"text {number}"}) + "\n" for number in range(3))
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(lines,))
    writer.start()
    corpus = attnscope.Corpus([pipe])
    assert corpus.n_bytes is None
    assert [text.text for text in corpus] == [text.text for text in corpus] == ["text 0", "text 1", "text 2"]
    writer.join()
