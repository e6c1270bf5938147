"""Inputs that would fill the memory, keep waiting, or be read as something else: each is refused or cut in one line."""

import os
import threading

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

import attnscope
from attnscope.corpus import Corpus
from attnscope.errors import AttnscopeError
from attnscope.models.tokenizer import FastTokenizer
from attnscope.studies.inputs import reading
from attnscope.studies.inputs.reading import encode_truncated, truncate

WORDS = (
    "the",
    "cat",
    "sat",
    "on",
    "mat",
    "and",
    "then",
    "it",
    "ran",
    "over",
    "hills",
    "where",
    "nobody",
    "had",
)


# Long texts --------------------------------------------------------------------------------------------------------


def trained(model, trainer, before, normalizer=None):
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = before
    if normalizer is not None:
        backend.normalizer = normalizer
    rng = np.random.default_rng(0)
    backend.train_from_iterator(
        [" ".join(rng.choice(WORDS, 20)) + " 日本語 aaaa éa" for _ in range(200)], trainer
    )
    return FastTokenizer(backend, "trained")


@pytest.fixture(scope="module")
def kinds():
    from tokenizers import models, normalizers, pre_tokenizers, trainers

    special = ["<unk>"]
    pieces = models.WordPiece(unk_token="<unk>")  # type: ignore[call-arg]
    return {
        "wordpiece": trained(
            pieces,
            trainers.WordPieceTrainer(vocab_size=120, special_tokens=special),
            pre_tokenizers.BertPreTokenizer(),
            normalizers.BertNormalizer(),
        ),
        "bytes": trained(
            models.BPE(),
            trainers.BpeTrainer(vocab_size=350, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ),
        "unigram": trained(
            models.Unigram(),
            trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>"),
            pre_tokenizers.Metaspace(),
            normalizers.NFKC(),
        ),
    }


def require_same_beginning(tokenizer, text, limit):
    """The note; the tokens are those of the whole text."""
    _, tokens, note = encode_truncated(limit, tokenizer.encode, text)
    whole, _ = truncate(tokenizer.encode(text), limit)
    assert tokens.labels == whole.labels
    np.testing.assert_array_equal(tokens.ids, whole.ids)
    np.testing.assert_array_equal(tokens.offsets, whole.offsets)
    return note


@pytest.mark.parametrize("kind", ["wordpiece", "bytes", "unigram"])
@given(
    text=st.text(st.sampled_from("ab é\n日本語e\u0301ﬁthe.  "), min_size=70, max_size=400),
    limit=st.integers(3, 8),
)
def test_the_tokens_of_a_beginning_are_those_of_the_whole_text(kinds, kind, text, limit):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "MAX_WHOLE_CHARACTERS", 60)
        patch.setattr(reading, "_CHARACTERS_PER_TOKEN", 4)
        require_same_beginning(kinds[kind], f"the {text}", limit)


@pytest.mark.parametrize("sizes", [(400, 400), (400, 3), (3, 400)])
def test_a_pair_is_cut_as_its_whole_texts_are(sizes, monkeypatch):
    tokenizer = attnscope.load("minilm").tokenizer
    monkeypatch.setattr(reading, "MAX_WHOLE_CHARACTERS", 500)
    text, pair = ("the cat sat on the mat " * n for n in sizes)
    beginning, tokens, note = encode_truncated(24, tokenizer.encode, text, pair)
    whole, said = truncate(tokenizer.encode(text, pair), 24)
    assert len(beginning) < 1000
    assert tokens.labels == whole.labels
    np.testing.assert_array_equal(tokens.segments, whole.segments)
    assert note.startswith("the text has more than ")
    assert not said.startswith("the text has more than")


def test_the_tokenizer_gets_a_little_of_a_text_of_50_megabytes(monkeypatch):
    lengths = []
    usual = FastTokenizer.encode

    def encode(self, text, pair=None):
        lengths.append(len(text))
        return usual(self, text, pair)

    monkeypatch.setattr(FastTokenizer, "encode", encode)
    text = "The cat sat on the mat. " * (50_000_000 // 24)
    with pytest.warns(UserWarning, match="the text has more than .* the rest is left out"):
        record = attnscope.heatmap(attnscope.load("minilm"), text, pick=[(0, 0)])
    assert lengths
    assert max(lengths) < 100_000
    assert len(record.maps[0].queries) == 512
    assert len(record.text) < 100_000


def test_a_line_that_would_fill_the_memory_is_cut_in_a_corpus(run, tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat " * 400_000 + "\na dog\n")
    corpus = Corpus([tmp_path / "a.txt"])
    assert [len(text.text or "") for text in corpus] == [2**22, 5]
    (problem,) = corpus.problems
    assert problem.line == 1
    assert (
        problem.reason
        == "the text has 4,800,000 characters: the first 4,194,304 are read, the rest is left out"
    )
    short = Corpus([tmp_path / "a.txt"], max_characters=8)
    assert [text.text for text in short] == ["the cat ", "a dog"]


def test_what_no_tokenizer_can_hold_is_refused():
    model = attnscope.load("minilm")
    with pytest.raises(AttnscopeError, match="too many to be tokenised at once"):
        model.tokenizer.encode("a" * (2**23 + 1))
    with pytest.raises(AttnscopeError, match="too many to be tokenised at once"):
        attnscope.heatmap(model, " " * 2**24 + "a")


# Descriptions that would fill the memory ---------------------------------------------------------------------------


def test_a_small_record_that_unpacks_to_millions_of_values_is_refused(tmp_path, run):
    described = b'{"schema": "attnscope.heads/1", "a": [' + b"[]," * 12_000_000 + b"0]}"
    path = tmp_path / "heads.npz"
    np.savez_compressed(path, record=np.frombuffer(described, np.uint8))
    with pytest.raises(AttnscopeError, match="what describes it has 36,0.* bytes, more than"):
        attnscope.load_record(path)
    status, out, err = run("show", path)
    assert status == 1
    assert out == ""
    assert len(err.splitlines()) <= 2


# Waits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ["heatmap", "--image", "pipe"],
        ["heatmap", "--audio", "pipe"],
        ["show", "pipe"],
    ],
)
def test_a_pipe_in_the_place_of_a_file_is_refused_at_once(run, tmp_path, command):
    os.mkfifo(tmp_path / "pipe")
    status, out, err = run(*command)
    assert status == 1
    assert out == ""
    assert "pipe is a pipe, and a" in err


ENDLESS = [
    ["heatmap", "--image", "/dev/zero"],
    ["show", "/dev/zero"],
    ["heads", "--file", "/dev/zero"],
    ["relations", "/dev/zero", "--annotated-as", "python"],
]


@pytest.mark.parametrize("command", ENDLESS)
def test_a_device_without_end_is_not_read(run, command):
    status, out, err = run(*command)
    assert status == 1
    assert out == ""
    assert "/dev/zero is a device, and a" in err


def test_a_pipe_that_is_written_late_is_read(run, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    text_generator = threading.Timer(0.3, lambda: (tmp_path / "pipe").write_text("the cat"))
    text_generator.start()
    status, _, err = run("heatmap", "--file", "pipe", "-m", "own", "-f", "npz", "-o", "out")
    text_generator.join()
    assert status == 0, err
    assert attnscope.load_record(tmp_path / "out").text == "the cat"
