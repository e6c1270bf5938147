"""Texts on their way into a model: blocks of them, chunks of long ones, batches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnscope.corpus import CorpusText, batch_block, chunks, cut_into_blocks, tokens_of_ids
from attnscope.errors import AttnscopeError
from tests.corpus_helpers import CLS, SEP, encode


def stream(n, length=lambda i: 3):
    return [CorpusText(i, "s", i + 1, text="x" * length(i)) for i in range(n)]


def test_a_block_ends_where_its_texts_are_many_characters(monkeypatch):
    monkeypatch.setattr("attnscope.corpus.batching.MAX_BLOCK_CHARACTERS", 10)
    texts = [
        CorpusText(i, "s", i + 1, text="x" * n) for i, n in enumerate([4, 4, 4, 30, 1, 9, 1, 1, 1, 1])
    ]
    texts.append(CorpusText(10, "s", 11, ids=(1, 2, 3)))
    whole = list(cut_into_blocks(texts, 3))
    assert [[text.index for text in block.texts] for block in whole] == [
        [0, 1, 2],
        [3],
        [4, 5],
        [6, 7, 8],
        [9, 10],
    ]
    assert [block.index for block in whole] == [0, 1, 2, 3, 4]


@given(st.integers(0, 40), st.integers(1, 9))
def test_blocks_are_together_the_corpus(n, size):
    whole = list(cut_into_blocks(stream(n), size))
    assert [text for block in whole for text in block.texts] == stream(n)
    assert all(len(block.texts) == size for block in whole[:-1])
    assert [block.index for block in whole] == list(range(-(-n // size)))


def described(made):
    return [
        [(part.text_index, part.number, part.tokens.ids.tolist()) for part in batch] for batch in made
    ]


@given(st.lists(st.integers(0, 60), max_size=30), st.integers(10, 100))
def test_batches_hold_every_chunk_once_within_the_budget(lengths, budget):
    whole_corpus = stream(len(lengths), lambda i: lengths[i])
    made = [
        batch_block(block, encode, limit=11, budget=budget) for block in cut_into_blocks(whole_corpus, 7)
    ]
    whole = [batch for block in made for batch in described(block)]
    seen = sorted((text, number) for batch in whole for text, number, _ in batch)
    assert len(seen) == len(set(seen))
    assert {text for text, _ in seen} == set(range(len(lengths)))
    for batch in whole:
        sizes = [len(ids) for _, _, ids in batch]
        assert sizes == sorted(sizes)
        assert len(batch) == 1 or len(batch) * max(sizes) <= budget


# Chunks


@given(st.integers(0, 40), st.integers(3, 12), st.data())
def test_chunks_hold_every_token_and_the_special_ones_at_both_ends(n, size, data):
    room = size - 2
    stride = data.draw(st.none() | st.integers(1, room))
    tokens = encode("".join(chr(97 + i) for i in range(n)))
    made = chunks(tokens, 7, limit=size, stride=stride)
    assert {part.text_index for part in made} == {7}
    assert [part.number for part in made] == list(range(len(made)))
    assert {part.n_chunks for part in made} == {len(made)}
    rebuilt = []
    for part in made:
        assert len(part) <= size
        assert part.tokens.ids[0] == CLS
        assert part.tokens.ids[-1] == SEP
        assert part.tokens.special.tolist() == [True, *[False] * (len(part) - 2), True]
        inner = part.tokens.ids[1:-1].tolist()
        assert rebuilt[len(rebuilt) - part.n_repeated :] == inner[: part.n_repeated]
        rebuilt += inner[part.n_repeated :]
        assert inner[: part.n_repeated] == part.tokens.ids[part.is_repeated].tolist()
    assert rebuilt == tokens.ids[1:-1].tolist()
    assert all(len(part) == size for part in made[:-1])


def test_special_tokens_inside_of_a_text_stay_where_they_are():
    tokens = tokens_of_ids([CLS, 5, 6, SEP, 7, 8, SEP, SEP], [CLS, SEP])
    assert [part.tokens.ids.tolist() for part in chunks(tokens, limit=6)] == [
        [CLS, 5, 6, SEP, SEP, SEP],
        [CLS, 7, 8, SEP, SEP],
    ]
    assert [len(part) for part in chunks(tokens_of_ids([4] * 10), limit=4)] == [4, 4, 2]
    assert chunks(tokens_of_ids([])) == []
    assert len(chunks(tokens_of_ids([CLS, SEP], [CLS, SEP]), limit=3)) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 8, "chunk": 9}, "chunks of 9 tokens are too long .*at most 8"),
        ({"chunk": 2}, "no room for text besides 2 special"),
        ({"limit": 8, "stride": 7}, "stride of 7 .*at most 6"),
        ({"limit": 8, "stride": 0}, "stride of 0"),
        ({"stride": 0}, "at least 1"),
    ],
)
def test_chunks_that_cannot_be_are_refused(options, message):
    with pytest.raises(AttnscopeError, match=message):
        chunks(encode("abcdefghij"), **options)
