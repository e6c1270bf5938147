"""Hugging Face tokenizers as ours."""

from dataclasses import asdict

import pytest
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from attnscope.errors import AttnscopeError
from attnscope.models.hf.tokenizer import HuggingFaceTokenizer, NumbersTokenizer
from attnscope.models.tokenizer import FastTokenizer
from attnscope.results.storage import to_plain

TEXT = "The cat’s naïve 猫 🙂 sat."


@pytest.fixture(scope="module")
def bert(minilm_folder):
    return HuggingFaceTokenizer(transformers.AutoTokenizer.from_pretrained(minilm_folder))


def byte_level(**settings):
    """GPT-2's kind of tokenizer over single bytes, with a few merges, that begins texts with <s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = ["<s>", "</s>", "<|user|>", *alphabet, "th", "the", "Ġc", "Ġthe"]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "c"), ("Ġ", "the")]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B:1", special_tokens=[("<s>", 0)]
    )
    backend.add_special_tokens(["<s>", "</s>", "<|user|>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|user|>"],
        **settings,
    )


@pytest.mark.parametrize("pair", [None, "It purred."])
def test_a_fast_tokenizer_says_what_the_library_alone_says(bert, minilm_folder, pair):
    ours = bert.encode(TEXT, pair)
    reference = FastTokenizer.open(minilm_folder).encode(TEXT, pair)
    assert to_plain(asdict(ours)) == to_plain(asdict(reference))
    assert bert.note == ""


def test_byte_pieces_are_labelled_as_text():
    tokens = HuggingFaceTokenizer(byte_level()).encode("the c\n")
    assert tokens.labels == ("<s>", "the", "·c", "⏎")
    assert tokens.special.tolist() == [True, False, False, False]
    assert tokens.offsets.tolist()[1:] == [[0, 3], [3, 5], [5, 6]]


# Tokenizers without offsets ---------------------------------------------------------------------------------------


def test_a_slow_tokenizer_says_where_bytes_stand():
    slow = HuggingFaceTokenizer(transformers.ByT5Tokenizer())
    tokens = slow.encode("naïve 猫 sat.")
    assert "no fast version" in slow.note
    assert tokens.words is not None
    covered = [tokens.text[a:b] for a, b in tokens.offsets if a >= 0]
    assert "".join(covered) == tokens.text
    assert HuggingFaceTokenizer(transformers.CanineTokenizer()).encode("naïve").words is None


def test_a_slow_tokenizer_reads_no_pairs():
    with pytest.raises(AttnscopeError, match="reads no pairs"):
        HuggingFaceTokenizer(transformers.ByT5Tokenizer()).encode("ab", "cde")


# Chat, targets, numbers -------------------------------------------------------------------------------------------

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}</s>{% endif %}"
)


def test_chat_adds_the_first_token_once():
    tokens = HuggingFaceTokenizer(byte_level(chat_template=TEMPLATE)).encode_chat("the c")
    assert tokens.text == "<s><|user|>the c</s>"
    assert tokens.labels == ("<s>", "<|user|>", "the", "·c", "</s>")
    assert tokens.special.tolist() == [True, True, False, False, True]


def test_chat_without_a_template_that_works():
    assert HuggingFaceTokenizer(byte_level(chat_template=None)).encode_chat is None
    template = "{{ raise_exception('no user here') }}"
    with pytest.raises(AttnscopeError, match="no user here") as caught:
        HuggingFaceTokenizer(byte_level(chat_template=template)).encode_chat("the c")
    assert "--chat" in caught.value.hint


def test_a_target_is_what_the_decoder_reads():
    tokens = HuggingFaceTokenizer(transformers.ByT5Tokenizer()).encode_target("abc", 0, {1})
    assert tokens.ids.tolist() == [0, *(3 + ord(char) for char in "abc")]
    assert tokens.special.tolist() == [True, False, False, False]
    assert tokens.offsets.tolist()[1:] == [[0, 1], [1, 2], [2, 3]]


def test_a_tokenizer_that_ends_no_text_keeps_the_last_word_of_a_target():
    """With the last word left out, a decoder of the target `the c` had no row for it."""
    tokens = HuggingFaceTokenizer(byte_level()).encode_target("the c", 0, {1})
    assert tokens.text[slice(*tokens.offsets[-1])].strip() == "c"
    numbers = NumbersTokenizer()
    assert numbers.encode_target("7 8 9", 0, {1}).ids.tolist() == [0, 7, 8, 9]
    assert numbers.encode_target("7 8 1", 0, {1}).ids.tolist() == [0, 7, 8]


def test_written_tokens_follow_the_given_ones():
    tokenizer = HuggingFaceTokenizer(byte_level())
    given_tokens = tokenizer.encode("the c")
    more = tokenizer.encode("é the").ids[1:].tolist()
    tokens = tokenizer.extend(given_tokens, more)
    assert tokens.text == "the cé the"
    assert tokens.n_given == 3
    assert tokens.offsets.tolist() == [[-1, -1], [0, 3], [3, 5], [-1, -1], [5, 6], [6, 10]]
    assert tokens.words.tolist() == [-1, 0, 1, -1, 1, 2]


def test_a_word_written_after_a_prompt_with_a_picture_is_a_word_of_its_own():
    """Decoded by itself a written word may lose the space before it: here as WordLevel's and SentencePiece's do."""
    backend = Tokenizer(
        models.WordLevel({"[UNK]": 0, "<image>": 1, "a": 2, "circle": 3, "red": 4}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = HuggingFaceTokenizer(
        transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    )
    tokens = tokenizer.encode_ids([1, 2, 3, 4, 2], {0: "the picture"}, 3)
    assert tokens.text == "a circle red a"
    assert tokens.words.tolist() == [-1, 0, 1, 2, 3]
    assert tokens.labels[0] == "the picture"
    assert tokens.n_given == 3


def test_numbers_that_only_the_model_knows_are_labelled_by_number():
    """Embeddings are often larger than the vocabulary: what a model writes may have no name."""
    tokenizer = HuggingFaceTokenizer(byte_level())
    given = tokenizer.encode("the c")
    size = len(tokenizer.ordinary_ids()) + 3
    written = tokenizer.extend(given, [size + 7, 5, size + 8])
    assert [written.labels[i] for i in (len(given), -1)] == [f"<{size + 7}>", f"<{size + 8}>"]
    assert written.text.startswith("the c")
    assert "None" not in written.text
    assert tokenizer.encode_ids([size + 7]).labels == (f"<{size + 7}>",)
    assert tokenizer.spell(size + 7) == f"<{size + 7}>"


def test_numbers_become_tokens():
    tokenizer = HuggingFaceTokenizer(byte_level())
    tokens = tokenizer.encode("the c é")
    assert tokenizer.encode_ids(tokens.ids.tolist()).labels == tokens.labels


def test_numbers_stand_for_themselves_without_a_tokenizer():
    tokenizer = NumbersTokenizer()
    tokens = tokenizer.encode_ids([17, 5, 600])
    assert tokens.labels == ("#17", "#5", "#600")
    assert [tokens.text[a:b] for a, b in tokens.offsets] == ["#17", "#5", "#600"]
    assert tokens.words is not None
    extended = tokenizer.extend(tokens, [8])
    assert extended.labels[-1] == "#8"
    assert extended.n_given == 3
    assert tokenizer.encode_chat is None
    for refuse in (tokenizer.encode, lambda text: tokenizer.encode_target(text, 0, ())):
        with pytest.raises(AttnscopeError, match="no tokenizer"):
            refuse("the cat")


def test_a_panic_of_the_tokenizer_is_one_line(tmp_path):
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    backend.save(str(tmp_path / "tokenizer.json"))
    catastrophe = "a" * 40 + "b"
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    for tokenizer in (FastTokenizer.open(tmp_path), HuggingFaceTokenizer(fast)):
        with pytest.raises(
            AttnscopeError, match="the tokenizer cannot read this text: Onig: Regex search error"
        ):
            tokenizer.encode(catastrophe)
    with pytest.raises(AttnscopeError, match="the tokenizer cannot read the target: Onig"):
        HuggingFaceTokenizer(fast).encode_target(catastrophe, 0, ())
