"""Words that the user lists: characters that a tokenizer leaves apart are merged into them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import attnscope
from attnscope.questions.links import find_links

CHINESE = "我们喜欢北京"


@pytest.mark.filterwarnings("ignore:.*unknown to the tokenizer")  # MiniLM knows few of these characters
@pytest.mark.parametrize(
    ("words", "labels"),
    [
        (["我们", "喜欢", "北京"], ("[CLS]", "我们", "喜欢", "北京", "[SEP]")),
        # The whole text, in its order.
        (["我", "们喜", "欢北京"], ("[CLS]", "我", "们喜", "欢北京", "[SEP]")),
        (["北", "北京", "东京"], ("[CLS]", "我", "们", "喜", "欢", "北京", "[SEP]")),
    ],
)
def test_chinese_characters_are_merged_into_the_words_of_a_list(minilm, words, labels):
    record = attnscope.heatmap(minilm, CHINESE, words=words)
    apart = attnscope.heatmap(minilm, CHINESE)
    assert record.maps[0].keys.labels == labels
    # Summed over keys, averaged over queries: the last word is the end of the text.
    n = len(labels[-2])
    expected = apart.weights[..., -1 - n : -1, -1 - n : -1].astype(float).sum(-1).mean(-1)
    np.testing.assert_allclose(record.weights[..., -2, -2], expected, atol=1e-6)


def test_a_pre_segmented_text_as_the_file_of_words_and_what_was_merged(run):
    Path("words.txt").write_text("我们 喜欢\n北京\n", "utf-8")
    done = run("heatmap", CHINESE, "--words-from", "words.txt", "-f", "json", "-o", "out")
    assert done.status == 0
    assert "6 tokens are merged into 3 words: 我们, 喜欢, 北京" in done.err
    done = run("heatmap", CHINESE, "--words-from", "none.txt")
    assert done.status == 1
    assert "none.txt" in done.err


def test_the_rows_of_what_a_model_wrote_are_answered_first():
    record = attnscope.heatmap(attnscope.load("own-causal"), "1, 2, 1, 2")
    attention = record.maps[0]
    queries = replace(attention.queries, n_given=len(attention.queries) - 1)
    written = replace(record, maps=(replace(attention, queries=queries),))
    assert {link.query for link in find_links(written, max_links=99)} == {queries.labels[-1]}
    assert len({link.query for link in find_links(record, max_links=99)}) > 1
