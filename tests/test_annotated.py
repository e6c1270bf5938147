"""Annotated texts: what is read from CoNLL-U, jsonl and Python, how words find their tokens, and what is refused."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnscope.annotated import AnnotatedCorpus, AnnotatedText, Link, python_source, spans
from attnscope.annotated.alignment import HIDDEN, OUTSIDE, UNALIGNED, align_links
from attnscope.annotated.conllu import COREFERENCE
from attnscope.annotated.texts import AnnotationError
from attnscope.corpus import chunks
from attnscope.errors import AttnscopeError
from attnscope.results.tokens import Tokens


def row(number, form, head="_", deprel="_", misc="_"):
    return "\t".join([str(number), form, "_", "_", "_", "_", str(head), deprel, "_", misc])


def read(path, content, name="a.conllu", **how):
    (path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return AnnotatedCorpus(path / name, **how)


def shown(text):
    """Links as (relation, source, targets), in words."""
    return {
        (link.relation, " ".join(map(text.word, link.source)), " ".join(map(text.word, link.targets)))
        for link in text.links
    }


# CoNLL-U --------------------------------------------------------------------------------------------------------

CATS = "\n".join(
    [
        "# text = Cats, dogs sleep.",
        row(1, "Cats", 4, "nsubj", "SpaceAfter=No"),
        row(2, ",", 3, "punct"),
        row(3, "dogs", 4, "nsubj"),
        row(4, "sleep", 0, "root", "SpaceAfter=No"),
        row(5, ".", 4, "punct"),
    ]
)


def test_both_directions_of_each_dependency(tmp_path):
    (text,) = read(tmp_path, CATS + "\n")
    assert text.text == "Cats, dogs sleep."
    assert [text.word(n) for n in range(5)] == ["Cats", ",", "dogs", "sleep", "."]
    assert shown(text) == {
        ("nsubj→parent", "Cats", "sleep"),
        ("nsubj→parent", "dogs", "sleep"),
        ("punct→parent", ",", "dogs"),
        ("punct→parent", ".", "sleep"),
        ("parent→nsubj", "sleep", "Cats dogs"),  # any of them is right
        ("parent→punct", "dogs", ","),
        ("parent→punct", "sleep", "."),
    }


def test_words_of_a_multiword_token_and_empty_nodes(tmp_path):
    lines = [
        row("1-2", "Don't"),
        row(1, "Do", 3, "aux"),
        row(2, "n't", 3, "advmod"),
        row("2.1", "you", "_", "_"),
        row(3, "parler", 0, "root"),
        row("4-5", "du"),
        row(4, "de", 6, "case"),
        row(5, "le", 6, "det"),
        row(6, "chat", 3, "obl"),
    ]
    (text,) = read(tmp_path, "\n".join(lines))
    assert text.text == "Don't parler du chat"
    assert [text.word(n) for n in range(6)] == ["Do", "n't", "parler", "du", "du", "chat"]
    assert ("det→parent", "du", "chat") in shown(text)


def test_coreference_goes_from_heads_of_mentions_to_earlier_ones(tmp_path):
    first = [
        row(1, "The", 3, "det", "Entity=(1-person"),
        row(2, "old", 3, "amod"),
        row(3, "man", 4, "nsubj", "Entity=1)"),
        row(4, "lost", 0, "root"),
        row(5, "his", 6, "nmod", "Entity=(2-object(1-person)"),
        row(6, "hat", 4, "obj", "Entity=2)"),
        row(7, "himself", 4, "obl", "Entity=(1-person)"),
        row(8, "parts", 4, "obl", "Entity=(9[1/2]-x)"),
        row(9, "more", 4, "obl", "Entity=(9[2/2]-x)"),
    ]
    second = [row(1, "He", 2, "nsubj", "Entity=(1-person)"), row(2, "cried", 0, "root")]
    third = ["# newdoc id = b", row(1, "He", 2, "nsubj", "Entity=(1-person)"), row(2, "ran", 0, "root")]
    content = "\n\n".join("\n".join(lines) for lines in (first, second, third))
    texts = list(read(tmp_path, content))
    # Within a sentence each mention points to all earlier ones; in a document beyond it.
    coref = {one for one in shown(texts[0]) if one[0] == COREFERENCE}
    assert coref == {(COREFERENCE, "his", "man"), (COREFERENCE, "himself", "man his")}
    assert not any(link[0] == COREFERENCE for text in texts[1:] for link in shown(text))
    assert texts[0].document is texts[1].document is None
    assert texts[2].document
    whole, other = read(tmp_path, content, unit="document")
    assert (COREFERENCE, "He", "man his himself") in shown(whole)
    assert shown(texts[0]) <= shown(whole)
    assert other.text == "He ran"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("2 no tabs", "Invalid line format"),
        (row(7, "a", 1, "obj"), "ID 7 is not where it belongs"),
        (row(2, "a", 9, "obj"), "HEAD 9 of word 2 of 2"),
        (row(2, "a", 2, "obj"), "HEAD 2 of word 2 of 2"),
        ("2\ta\t_", "3 columns, not 10"),
        (row("2-5", "a") + "\n" + row(2, "a", 1, "obj"), "2-5 of a sentence of 2 words"),
        (row(2, "a", 1, "obj", "Entity=1)"), "closes what is not open"),
        (row(2, "a", 1, "obj", "Entity=(1-person"), "1 is never closed"),
    ],
)
def test_a_broken_sentence_is_skipped_and_its_line_is_said(tmp_path, line, reason):
    content = f"{CATS}\n\n# broken\n{row(1, 'a', 0, 'root')}\n{line}\n\n{CATS}\n"
    corpus = read(tmp_path, content)
    assert len(list(corpus)) == 2
    (problem,) = corpus.problems
    assert reason in problem.reason
    assert problem.line in (8, 10)


def test_ten_broken_sentences_end_a_file(tmp_path):
    corpus = read(tmp_path, f"{CATS}\n\n" + "bad\n\n" * 20 + CATS)
    assert len(list(corpus)) == 1
    assert len(corpus.problems) == 10
    assert "given up" in corpus.problems[-1].reason


def test_what_holds_nothing_is_refused(tmp_path):
    for content in ("", "\n\n", "# a comment alone\n", "bad\n"):
        with pytest.raises(AttnscopeError, match="no text is left"):
            list(read(tmp_path, content))
    for name in ("a.txt", "-"):
        with pytest.raises(AttnscopeError, match="how the file is annotated"):
            AnnotatedCorpus(name)
    with pytest.raises(AttnscopeError, match="no text is left.*No such file"):
        list(AnnotatedCorpus(tmp_path / "gone.conllu"))


def test_files_in_a_row_compressed_and_not_utf8(tmp_path):
    (tmp_path / "a.conllu.gz").write_bytes(gzip.compress(CATS.encode()))
    (tmp_path / "b.conllu").write_bytes(CATS.encode() + b"\n\n\xff\xfe\n")
    corpus = AnnotatedCorpus(str(tmp_path / "*"))
    for _ in range(2):  # as often as one likes
        assert [Path(text.source).name for text in corpus] == ["a.conllu.gz", "b.conllu"]
        assert ["not UTF-8" in problem.reason for problem in corpus.problems] == [True]
    assert corpus.bytes_read > 0


# Spans ----------------------------------------------------------------------------------------------------------


def line(text, *links, **more):
    return json.dumps({"text": text, "links": list(links)} | more)


def test_spans_are_words_and_many_targets_may_be_right():
    text = spans.parse(
        line(
            "A big dog and it, Rex.",
            {"from": [14, 16], "to": [[2, 9], [18, 21]], "label": "coref"},
            {"from": [14, 16], "to": [0, 1], "label": "coref"},
            {"from": [2, 5], "to": [6, 9]},
        ),
        "a",
        3,
    )
    assert shown(text) == {("coref", "it", "A big dog Rex"), ("link", "big", "dog")}
    assert text.line == 3


def test_spans_cut_words_where_they_must():
    text = spans.parse(line("CCO (ab)", {"from": [0, 1], "to": [2, 3], "label": "bond"}), "a", 1)
    assert [text.word(n) for n in range(len(text.words))] == ["C", "C", "O", "(", "ab", ")"]
    whole = spans.parse(
        line("New York is big", {"from": [0, 8], "to": [12, 15]}, words=[[12, 15], [0, 8]]), "a", 1
    )
    assert shown(whole) == {("link", "New York", "big")}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "malformed JSON"),
        ('{"links": []}', 'no "text"'),
        (
            line("a b", {"from": [0, 4], "to": [2, 3]}),
            '"from" [0, 4] is outside the text of 3 characters',
        ),
        (line("a b", {"from": [0, 1], "to": [2, 2]}), '"to" [2, 2] is empty'),
        (line("a b", {"from": [0, 1], "to": [0, 3]}), "[0, 3] overlaps its source [0, 1]"),
        (line("a b", {"from": [0, True], "to": [2, 3]}), "not [first, last + 1]"),
        (line("a b", "x"), "link 1 is no object"),
        (
            line("abc d", {"from": [0, 2], "to": [4, 5]}, words=[[0, 3], [4, 5]]),
            "the span [0, 2] cuts a word",
        ),
        (line("a b c", {"from": [0, 1], "to": [4, 5]}, words=[[0, 1]]), "the span [4, 5] holds no word"),
        (line("abc", words=[[0, 2], [1, 3]]), "words [0, 2] and [1, 3] overlap"),
        (line("abc", words=7), '"words" is neither "characters" nor a list'),
    ],
)
def test_a_line_that_cannot_be_is_refused(content, reason, tmp_path):
    with pytest.raises(AnnotationError) as refused:
        spans.parse(content, "a", 4)
    assert reason in refused.value.reason
    corpus = read(tmp_path, content + "\n" + line("a b", {"from": [0, 1], "to": [2, 3]}), "a.jsonl")
    assert len(list(corpus)) == 1
    assert corpus.problems[0].line == 1


@given(st.text(max_size=60), st.data())
def test_any_span_of_any_text_is_read_or_refused(text, data):
    n = len(text)
    ends = st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted)
    link = {"from": list(data.draw(ends)), "to": list(data.draw(ends))}
    try:
        found = spans.parse(json.dumps({"text": text, "links": [link]}), "a", 1)
    except AnnotationError:
        return
    if found is not None:
        for (start, stop), (following, _) in zip(found.words, found.words[1:], strict=False):
            assert 0 <= start < stop <= following
        (one,) = found.links
        for words, span in ((one.source, link["from"]), (one.targets, link["to"])):
            assert "".join(found.word(w) for w in words) == "".join(text[slice(*span)].split())


# Python ---------------------------------------------------------------------------------------------------------


def at(text):
    """Links as (relation, word, line, target, its line)."""

    def place(words):
        first = text.words[words[0]][0]
        last = text.words[words[-1]][1]
        return text.text[first:last], text.text.count("\n", 0, first) + 1

    return {(link.relation, *place(link.source), *place(link.targets)) for link in text.links}


SOURCE = '''\
import os.path as path
from json import loads
import sys

def greet(name: str, n: "int" = 1) -> str:
    text = loads(name)
    for i in [n, (n)]:
        text = text + i
    return path.join(text, sys.argv)

class Box:
    size: list[int] = 3
    def grow(self):
        return self

x = greet("é", 2); y = [z * x for z in x]
with open(x) as f, (g := f): pass
try: x += 1
except ValueError as e: raise e
lambda q: q + undefined
greet
"""é (not ( a bracket"""
'''


def test_links_of_python():
    text = python_source.parse(SOURCE, "a.py")
    n_brackets = sum(link.relation == "closing→opening" for link in text.links)
    assert n_brackets == SOURCE.count(")") + SOURCE.count("]")
    found = at(text)
    brackets = {one for one in found if one[0] == "closing→opening"}
    assert ("closing→opening", "]", 7, "[", 7) in brackets
    names = found - brackets
    assert names == {
        ("name→import", "path", 9, "path", 1),
        ("name→import", "loads", 6, "loads", 2),
        ("name→import", "sys", 9, "sys", 3),
        ("name→parameter", "name", 6, "name", 5),
        ("name→parameter", "n", 7, "n", 5),
        ("name→parameter", "self", 14, "self", 13),
        ("name→parameter", "q", 20, "q", 20),
        ("name→assignment", "text", 8, "text", 6),
        ("name→assignment", "i", 8, "i", 7),
        ("name→assignment", "text", 9, "text", 8),
        ("call→definition", "greet", 16, "greet", 5),
        ("name→assignment", "x", 16, "x", 16),
        ("name→assignment", "z", 16, "z", 16),
        ("name→assignment", "x", 17, "x", 16),
        ("name→assignment", "f", 17, "f", 17),
        ("name→assignment", "e", 19, "e", 19),
    }


@pytest.mark.parametrize(
    ("content", "number"),
    [
        ("x = 1\nif x\n", 2),
        ("x = (\n", 1),
        ('a = 1\n"""never\n', 2),
        ("  x\ny\n", 1),
        ("x = \x00\n", None),
    ],
)
def test_what_is_not_python_is_said_with_its_line(content, number, tmp_path):
    (tmp_path / "good.py").write_text("x = 1\ny = x\n", "utf-8")
    (tmp_path / "bad.py").write_text(content, "utf-8")
    corpus = AnnotatedCorpus([tmp_path / "bad.py", tmp_path / "good.py"])
    assert len(list(corpus)) == 1
    (problem,) = corpus.problems
    assert problem.line in (number, 1)
    assert "Python" in problem.reason or "NUL" in problem.reason


# Alignment ------------------------------------------------------------------------------------------------------


def tokens_of(text, pieces):
    """[CLS], the pieces, [SEP]."""
    n = len(pieces) + 2
    special = np.array([True, *[False] * len(pieces), True])
    return Tokens(
        text,
        np.arange(n),
        tuple("x" * n),
        np.array([(-1, -1), *pieces, (-1, -1)], np.int32),
        special,
        None,
        np.zeros(n, np.int32),
    )


def text_of(text, words, *links):
    return AnnotatedText(text, tuple(words), links, "a", 1)


def test_words_find_their_tokens_by_characters():
    text = text_of(
        "don't go far",
        [(0, 2), (2, 5), (6, 8), (9, 12)],
        Link("a", (2,), (3,)),
        Link("a", (2,), (1,)),
        Link("b", (0,), (3,)),
    )
    # "don" reaches into both words; "go"; " f", "ar"
    tokens = tokens_of(text.text, [(0, 3), (3, 4), (4, 5), (5, 8), (8, 10), (10, 12)])
    (found,), left_out = align_links(text, chunks(tokens), tokens)
    assert found.unit_of_token.tolist() == [-1, 0, 0, 0, 1, 2, 2, -1]
    (link,) = found.links
    assert link.tokens == (4,)
    assert link.targets == (2,)
    assert left_out == {("a", UNALIGNED): 1, ("b", UNALIGNED): 1}


def test_a_word_without_a_token_is_left_out():
    text = text_of("a \u200b b", [(0, 1), (2, 3), (4, 5)], Link("a", (0,), (1,)), Link("a", (0,), (2,)))
    tokens = tokens_of(text.text, [(0, 1), (4, 5)])
    (found,), left_out = align_links(text, chunks(tokens), tokens)
    assert found.unit_of_token.tolist() == [-1, 0, 1, -1]
    assert len(found.links) == 1
    assert left_out == {("a", UNALIGNED): 1}


def test_links_between_chunks_and_behind_causality():
    words = [(i * 2, i * 2 + 1) for i in range(8)]
    text = text_of(
        "a b c d e f g h",
        words,
        Link("near", (1,), (0,)),
        Link("far", (7,), (0,)),
        Link("on", (0,), (1, 2)),
        Link("mixed", (5,), (4, 6)),
    )
    tokens = tokens_of(text.text, words)
    parts = chunks(tokens, chunk=6)
    found, left_out = align_links(text, parts, tokens)
    assert [one.chunk.number for one in found] == [0, 1]
    assert left_out == {("far", OUTSIDE): 1}
    found, left_out = align_links(text, parts, tokens, causal=True)
    assert left_out == {("far", OUTSIDE): 1, ("on", HIDDEN): 1}
    (mixed,) = found[1].links
    assert mixed.link.targets == (4,)
    # With a stride no link comes twice.
    overlapping = chunks(tokens, chunk=6, stride=2)
    found, _ = align_links(text, overlapping, tokens)
    assert sorted(link.link.relation for one in found for link in one.links) == ["mixed", "near", "on"]
