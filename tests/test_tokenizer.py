import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnscope.errors import AttnscopeError
from attnscope.models.tokenizer import FastTokenizer, explain_slow_tokenizer
from tests.conftest import write_tokenizer


@pytest.fixture(scope="module")
def minilm(minilm_folder):
    return FastTokenizer.open(minilm_folder)


def test_a_text_with_its_special_tokens(minilm):
    tokens = minilm.encode("The animal didn't cross.")
    assert tokens.labels == ("[CLS]", "the", "animal", "didn", "'", "t", "cross", ".", "[SEP]")
    assert tokens.special.tolist() == [True, *[False] * 7, True]
    assert tokens.offsets[[0, 1, -1]].tolist() == [[-1, -1], [0, 3], [-1, -1]]
    assert tokens.words.tolist() == [-1, 0, 1, 2, 2, 2, 3, 4, -1]
    assert tokens.segments.tolist() == [0] * 9
    assert minilm.name == "WordPiece, 30,522 pieces"


def test_a_pair_has_two_segments_each_with_its_own_offsets_and_words(minilm):
    tokens = minilm.encode("The cat", "the dog")
    assert tokens.labels == ("[CLS]", "the", "cat", "[SEP]", "the", "dog", "[SEP]")
    assert tokens.segments.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert tokens.words.tolist() == [-1, 0, 1, -1, 0, 1, -1]
    assert tokens.offsets[4].tolist() == [0, 3]


def test_long_texts_are_neither_cut_nor_short_ones_padded(minilm, minilm_folder):
    # What tokenizer.json itself asks for: 128 tokens, no more, no fewer.
    settings = json.loads((minilm_folder / "tokenizer.json").read_text("utf-8"))
    assert settings["truncation"]["max_length"] == settings["padding"]["strategy"]["Fixed"] == 128
    assert len(minilm.encode("word " * 1000)) == 1002
    assert len(minilm.encode("word")) == 3


def test_what_a_user_types_is_not_special_even_if_it_looks_so(minilm):
    tokens = minilm.encode("a [SEP] b")
    assert tokens.labels == ("[CLS]", "a", "[SEP]", "b", "[SEP]")
    assert tokens.special.tolist() == [True, False, False, False, True]


@given(text=st.text(max_size=60))
def test_slices_at_the_offsets_reproduce_the_text(minilm, text):
    tokens = minilm.encode(text)
    assert all(tokens.labels)
    start_before = 0
    for (start, end), label, special, word in zip(
        tokens.offsets, tokens.labels, tokens.special, tokens.words, strict=True
    ):
        if special:
            assert start == -1
            assert end == -1
            assert word == -1
        elif start >= 0:
            assert start_before <= start < end <= len(text)
            if label.isascii() and "[UNK]" not in label and text[start:end].isascii():
                assert text[start:end].lower() == label.removeprefix("##")
            start_before = start


def byte_level(folder, *, trim_offsets):
    """GPT-2's kind of tokenizer, with the bytes alone as vocabulary and RoBERTa's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = {
        c: i for i, c in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.add_special_tokens(["<s>", "</s>"])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0), trim_offsets, False)
    backend.save(str(folder / "tokenizer.json"))
    return FastTokenizer.open(folder)


@pytest.mark.parametrize("trim_offsets", [True, False])
def test_byte_level_pieces(tmp_path, trim_offsets):
    tokens = byte_level(tmp_path, trim_offsets=trim_offsets).encode("a é\n", "b")
    assert tokens.labels == ("<s>", "a", "·", "<0xC3>", "<0xA9>", "⏎", "</s>", "</s>", "b", "</s>")
    assert tokens.words.tolist() == [-1, 0, -1, 1, 1, -1, -1, -1, 0, -1]
    assert tokens.segments.tolist() == [0] * 8 + [1] * 2
    assert tokens.offsets[3].tolist() == tokens.offsets[4].tolist() == [2, 3]


def test_sentencepiece_pieces(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = [
        ("<unk>", 0.0),
        ("▁the", -1.0),
        ("▁", -2.0),
        ("c", -2.0),
        *((f"<0x{b:02X}>", -9.0) for b in range(256)),
    ]
    backend = Tokenizer(models.Unigram(pieces, 0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokens = FastTokenizer.open(tmp_path).encode("the cé the")
    assert tokens.labels == ("·the", "·", "c", "<0xC3>", "<0xA9>", "·the")
    assert tokens.words.tolist()[2:] == [1, 1, 1, 2]


@pytest.mark.parametrize(
    ("settings", "lowercase"),
    [
        ({}, True),
        ({"do_lower_case": False}, True),
        ({"do_lower_case": True}, False),
        ({"strip_accents": False}, True),
        ({"tokenize_chinese_chars": False}, True),
        ({"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": False}, True),
        ({"tokenizer_class": "DistilBertTokenizerFast", "do_lower_case": False}, True),
        ({"tokenizer_class": None}, False),
    ],
)
def test_tokens_are_those_of_transformers_where_files_disagree(
    settings, lowercase, minilm_folder, tmp_path
):
    from transformers import AutoTokenizer

    for name in ("config.json", "vocab.txt", "tokenizer_config.json", "tokenizer.json"):
        shutil.copy(minilm_folder / name, tmp_path)
    for name, changes in (("tokenizer_config.json", settings), ("tokenizer.json", {})):
        content = json.loads((tmp_path / name).read_text("utf-8")) | changes
        if "normalizer" in content:
            content["normalizer"]["lowercase"] = lowercase
        (tmp_path / name).write_text(json.dumps(content), "utf-8")
    theirs = AutoTokenizer.from_pretrained(tmp_path)("The Café [MASK] 中文\u200b", "É")
    ours = FastTokenizer.open(tmp_path).encode("The Café [MASK] 中文\u200b", "É")
    assert ours.ids.tolist() == theirs["input_ids"]
    assert ours.segments.tolist() == theirs.get("token_type_ids", [0] * (len(ours) - 2) + [1, 1])


def damage(folder, name, content):
    write_tokenizer(folder)
    (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{", r"cannot read the tokenizer .*tokenizer\.json"),
        ("tokenizer.json", b"{}", r"cannot read the tokenizer"),
        ("tokenizer.json", b"\xff\xfe", r"cannot read the tokenizer"),
        ("tokenizer_config.json", b"{", r"cannot read .*tokenizer_config\.json"),
    ],
)
def test_damaged_files_are_refused_in_one_line(name, content, message, tmp_path):
    damage(tmp_path, name, content)
    with pytest.raises(AttnscopeError, match=message) as caught:
        FastTokenizer.open(tmp_path)
    assert caught.value.hint
    assert "\n" not in str(caught.value)


def test_no_tokenizer_at_all_is_refused(tmp_path):
    assert explain_slow_tokenizer(tmp_path) == "it holds no tokenizer.json"
    with pytest.raises(AttnscopeError, match=r"no tokenizer\.json"):
        FastTokenizer.open(tmp_path)
