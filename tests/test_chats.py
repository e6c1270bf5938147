"""Conversations: how they are written, studied, and refused."""

import json
import os
import random
import threading

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import attnscope
from attnscope.models.hf.assembling import wrap
from attnscope.questions.links import find_links
from tests.ablation_helpers import tiny
from tests.test_damaged import change_one

KNOWN = "who wrote it ada bob cleo the page says read be brief now rome oslo"
WORDS = KNOWN.split()
FRAME = ["system", "user", "assistant", "tool"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'narrator' %}{{ raise_exception('no narrators') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ (m.content or '') | trim }}<|im_end|>\n{% endfor %}"
)


def tokenizer(template=TEMPLATE):
    """Words and marks; the special tokens are those of the template."""
    pieces = [
        "<unk>",
        "<|im_start|>",
        "<|im_end|>",
        *dict.fromkeys([*FRAME, *WORDS, "<", ">", "b", "/", ":"]),
    ]
    backend = Tokenizer(
        models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        chat_template=template,
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )


@pytest.fixture(scope="module")
def llama():
    return wrap(tiny("llama", num_hidden_layers=2), tokenizer())


def say(chance, n):
    return " ".join(chance.choice(WORDS) for _ in range(n))


def conversation(seed):
    """A system line, a question, a tool's result in some, and an answer."""
    chance = random.Random(seed)
    user = {"role": "user", "content": say(chance, chance.randint(6, 10))}
    tool = [{"role": "tool", "content": say(chance, 2)}] if seed % 3 == 0 else []
    system, answer = (
        {"role": role, "content": f" {say(chance, chance.randint(2, 5))} "}
        for role in ("system", "assistant")
    )
    return {"messages": [system, user, *tool, answer]}


def write(path, entries):
    path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    return path


def tokens_by_hand(entry):
    made = []
    for message in entry["messages"]:
        made += ["<|im_start|>", message["role"], *message["content"].split(), "<|im_end|>"]
    return made


def test_a_conversation_is_written_by_the_template(llama, tmp_path):
    entries = [conversation(seed) for seed in range(6)]
    corpus = attnscope.Corpus([write(tmp_path / "chats.jsonl", entries)])
    corpus.chat = llama.tokenizer.write_chat
    for text, entry in zip(corpus, entries, strict=True):
        assert text.is_chat
        tokens = llama.tokenizer.encode(text.text or "", is_whole=True)
        assert tokens_by_hand(entry) == list(tokens.labels)


def read(path, model, **more):
    """The texts of a file, and what was wrong with others."""
    corpus = attnscope.Corpus([path], **more)
    corpus.chat = model.tokenizer.write_chat
    return list(corpus), [problem.reason for problem in corpus.problems]


GOOD = {
    "messages": [{"role": "user", "content": "who wrote it"}, {"role": "assistant", "content": "ada"}]
}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (
            [
                {"role": "user", "content": "who"},
                {"role": "tool", "content": None, "tool_calls": [{"id": 1}]},
            ],
            "who",
        ),
        ([{"role": "user", "content": ""}, {"role": "assistant", "content": "ada"}], "ada"),
        ([{"role": "assistant"}, {"role": "user", "content": "who"}], "who"),
        ([{"role": "user", "content": ["who", {"type": "text", "text": " page"}]}], "who page"),
        ([{"role": "user", "content": "<|im_end|> who"}], "<|im_end|> who"),
    ],
)
def test_odd_messages_are_written(llama, tmp_path, messages, words):
    (text,), problems = read(write(tmp_path / "c.jsonl", [{"messages": messages}]), llama)
    assert not problems
    assert f"\n{words}<|im_end|>" in (text.text or "")


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"messages": []}, '"messages" is no list of messages'),
        ({"messages": ["who"]}, 'a message is no object with a "role"'),
        (
            {"messages": [{"role": "narrator", "content": "who"}]},
            "the chat template fails: no narrators",
        ),
        ({"messages": [{"role": "user", "content": 7}]}, "the content of a message is no text: 7"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "the content of a message is no text",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "half of a surrogate pair"),
    ],
)
def test_a_malformed_line_is_skipped_with_the_reason(llama, tmp_path, entry, reason):
    texts, problems = read(write(tmp_path / "c.jsonl", [entry, GOOD]), llama)
    assert len(texts) == len(problems) == 1
    assert reason in problems[0]


def test_damaged_conversations_are_read_or_skipped_with_the_reason(llama, tmp_path):
    chance = random.Random(0)
    n_read = n_skipped = 0
    for number in range(60):
        entries = [conversation(seed) for seed in range(4 * number, 4 * number + 4)]
        for entry in entries:
            change_one(entry, chance)
        texts, problems = read(write(tmp_path / "c.jsonl", [GOOD, *entries]), llama)
        assert len(texts) + len(problems) == 5
        assert not any("\n" in reason for reason in problems)
        n_read = n_read + len(texts)
        n_skipped = n_skipped + len(problems)
    assert n_read > 60 < n_skipped


def test_a_model_without_a_template_reads_roles_and_texts(tmp_path):
    model = wrap(tiny("llama", num_hidden_layers=1), tokenizer(None), check=False)
    corpus = attnscope.Corpus([write(tmp_path / "c.jsonl", [GOOD])])
    attnscope.heads(model, corpus, attnscope.HeadsOptions(describe=None))
    (text,) = corpus
    assert text.text == "user: who wrote it\n\nassistant: ada"
    assert not text.is_chat


def test_a_pipe_is_read_once_and_kept(tmp_path):
    pipe = tmp_path / "c.jsonl"
    lines = "".join(json.dumps({"text": f"text {number}"}) + "\n" for number in range(3))
    os.mkfifo(pipe)
    text_generator = threading.Thread(target=pipe.write_text, args=(lines,))
    text_generator.start()
    corpus = attnscope.Corpus([pipe])
    assert corpus.n_bytes is None
    assert (
        [text.text for text in corpus]
        == [text.text for text in corpus]
        == ["text 0", "text 1", "text 2"]
    )
    text_generator.join()


def test_what_a_model_writes_is_said_to_be_greedy_and_its_template_named(llama):
    with pytest.warns(UserWarning, match="greedy decoding|--chat"):
        plain = attnscope.heatmap(llama, "who wrote it", generate=3)
        asked = attnscope.heatmap(llama, "who wrote it", generate=3, chat=True)
    hints = [[note for note in record.run["notes"] if "--chat" in note] for record in (plain, asked)]
    assert len(hints[0]) == 1
    assert not hints[1]
    written = set(asked.maps[0].queries.labels[asked.maps[0].queries.n_given :])
    assert {link.query for link in find_links(asked)} <= written
