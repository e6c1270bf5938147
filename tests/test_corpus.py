"""What is read of a corpus: formats, compressed files, patterns, stdin, and what becomes of what cannot be read."""

import gzip
import io
import json
import tempfile
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import attnscope
from attnscope.corpus import Corpus, CorpusText, Problem, TextBlock, batch_block, cut_into_blocks, lines
from attnscope.errors import AttnscopeError
from tests.corpus_helpers import write

# One line of text that is not blank; other characters that str.splitlines would cut at may be inside.


def texts(*files, **options):
    return [text.text for text in Corpus([*files], **options)]


# Plain text


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("line", [(1, "a b"), (2, " c"), (5, "d"), (6, "e")]),
        ("paragraph", [(1, "a b\n c"), (5, "d\ne")]),
        ("file", [(1, "a b\n c\n \t\n\nd\ne")]),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("last", ["", "\n", "\n\n"])
def test_plain_text(split, expected, end, mark, last, tmp_path):
    path = write(tmp_path / "a.txt", mark + ("a b\n c\n \t\n\nd\ne" + last).replace("\n", end))
    read = list(Corpus([path], split=split))
    assert [(text.line, text.text) for text in read] == expected
    assert [text.index for text in read] == list(range(len(expected)))
    assert {text.source for text in read} == {str(path)}


# jsonl and CSV


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1), st.booleans())
@example(["a\r\nb", "\u2028", "x\0y", '"'], False)
def test_jsonl_survives(tmp_path_factory, values, ascii):
    lines = "\n\n".join(json.dumps({"id": 1, "text": f"{v}x"}, ensure_ascii=ascii) for v in values)
    path = write(tmp_path_factory.mktemp("j") / "a.jsonl", lines)
    held = Corpus([path])
    assert [(t.line, t.text) for t in held] == [(2 * i + 1, f"{v}x") for i, v in enumerate(values)]
    assert not held.problems


def test_the_format_is_that_of_the_name_or_the_given_one(tmp_path):
    path = write(tmp_path / "a.txt", '{"text": "x"}\n')
    assert texts(path) == ['{"text": "x"}']
    assert texts(path, format="jsonl") == ["x"]
    assert texts(write(tmp_path / "a.JSONL.gz", gzip.compress(path.read_bytes()))) == ["x"]
    assert texts(write(tmp_path / "b.1.jsonl", "no\n"), format="txt") == ["no"]


# Compressed


def test_compressed_files_of_several_members(tmp_path):
    compress = gzip.compress
    raw = compress(b"a\nb") + compress(b"") + b"\0" * 700 + compress("ä\n".encode()) + b"\0" * 2000
    for name in ("a.gz", "disguised.txt"):
        assert texts(write(tmp_path / name, raw)) == ["a", "bä"]


def test_a_compressed_file_that_is_cut_off_gives_what_is_there(tmp_path):
    rng = np.random.default_rng(0)
    lines = ["".join(rng.choice(list("abcdefgh"), 60)) for _ in range(20_000)]
    raw = gzip.compress("\n".join(lines).encode())
    cut = write(tmp_path / "cut", raw[: len(raw) // 2])
    damaged = write(tmp_path / "damaged", raw[: len(raw) // 2] + rng.bytes(len(raw) // 2))
    after = write(tmp_path / "z.txt", "after\n")
    for path, reasons in ((cut, ["cut off"]), (damaged, ["damaged", "UTF-8"])):
        held = Corpus([path, after])
        *before, last = [text.text for text in held]
        assert last == "after"
        assert len(before) > 5000
        assert before[:5000] == lines[:5000]
        (problem,) = held.problems
        assert problem.source == str(path)
        assert problem.line > 5000
        if path is cut:  # damaged data may first give some nonsense
            assert before == lines[: len(before)]
            assert problem.line == len(before) + 1
        assert any(reason in problem.reason for reason in reasons)


# Which files


def test_patterns_are_sorted_and_no_file_comes_twice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "a10.txt", "a2.txt", "sub/c.txt", "sub/deep/d.txt", "[x].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / name, name)
    (tmp_path / "folder.txt").mkdir()
    assert texts("*.txt") == ["[x].txt", "a10.txt", "a2.txt", "b.txt"]
    assert texts("b.txt", "*.txt", "./b.txt", tmp_path / "b.txt") == [
        "b.txt",
        "[x].txt",
        "a10.txt",
        "a2.txt",
    ]
    assert texts("**/*.txt")[-3:] == ["b.txt", "sub/c.txt", "sub/deep/d.txt"]
    assert texts("[x].txt") == ["[x].txt"]
    assert texts(str(tmp_path / "sub" / "*")) == ["sub/c.txt"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Corpus(["~/a*.txt"]).sources == (str(tmp_path / "a10.txt"), str(tmp_path / "a2.txt"))
    assert Corpus(["~nobody-of-this-name/x"]).sources == ("~nobody-of-this-name/x",)


def test_stdin_can_be_read_again_even_after_half_of_it(stdin):
    lines = [f"line {i}" for i in range(30_000)]
    stdin("\n".join(lines).encode())
    held = Corpus(["-", "-"])
    assert next(iter(held)) == CorpusText(0, "stdin", 1, text="line 0")
    for _ in range(2):
        assert [text.text for text in held] == lines
    assert held.n_bytes is None
    stdin(gzip.compress(b"a\n\xff"))
    held = Corpus(["-"])
    assert [text.text for text in held] == ["a"]
    assert held.problems == [Problem("stdin", 2, "not UTF-8: byte 0xFF")]


def test_a_stdin_that_finds_no_room_ends_the_study_and_is_no_part_of_it(stdin, monkeypatch, tmp_path):
    monkeypatch.setattr(lines, "_MAX_MEMORY_BYTES", 1000)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    stdin(b"a line\n" * 1000)
    with pytest.raises(AttnscopeError, match=r"stdin cannot be kept to be read again.*TMPDIR"):
        list(Corpus(["-"]))


def test_progress_and_the_hash_of_what_was_read(tmp_path):
    one = write(tmp_path / "a.txt", "a\nb\n")
    held = Corpus([one])
    assert held.n_bytes == 4
    assert held.bytes_read == 0
    assert held.sha256 == ""
    list(held)
    assert held.bytes_read == 4
    compressed = Corpus([write(tmp_path / "a.gz", gzip.compress(b"a\r\n\r\nb"))])
    list(compressed)
    assert compressed.sha256 == held.sha256 != ""
    for other in ("b\na\n", "ab\n", "a\nb\nc\n"):
        again = Corpus([write(tmp_path / "b.txt", other)])
        list(again)
        assert again.sha256 != held.sha256
    iterator = iter(held)
    next(iterator)
    assert held.sha256 == ""


# What goes wrong


@pytest.mark.parametrize(
    ("name", "raw", "before", "line", "reason"),
    [
        ("a.txt", b"ok\nna\xefve\nlost\n", ["ok"], 2, "not UTF-8: byte 0xEF"),
        ("a.txt", b"ok\ncut \xe4\xb8", ["ok"], 2, "byte 0xE4"),
        ("a.txt", "ok".encode("utf-16"), [], None, "iconv -f UTF-16"),
        (
            "a.txt",
            b"%PDF-1.7\n1 0 obj\n\xe2\n",
            [],
            None,
            "a PDF, not plain text; extract its text first",
        ),
        ("a.jsonl", b"PK\x03\x04word/document.xml", [], None, "a ZIP archive or an Office file"),
        ("a.gz", gzip.compress(b"%PDF-1.7\n", mtime=0), [], None, "a PDF"),
        ("a.txt", b"ok\nb\0\n", ["ok"], 2, "NUL"),
        ("a.gz", b"plain\n", [], None, "not gzip"),
        ("a.txt", b"\x28\xb5\x2f\xfd...", [], 1, "not UTF-8"),
        ("a.jsonl", b'{"text": "ok"}\n{"text":\n{"text": "on"}', ["ok", "on"], 2, "malformed JSON: "),
        ("a.jsonl", b'{"text": "ok"}\n[1]', ["ok"], 2, "not a JSON object: [1]"),
        ("a.jsonl", b'{"text": "ok"}\n' + b"[" * 100_000, ["ok"], 2, "malformed JSON"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": 1' + b"0" * 9999 + b"}", ["ok"], 2, "malformed JSON"),
        ("a.jsonl", b'{"body": "x", "b": 1}', [], 1, 'no field "text": its fields are body, b'),
        ("a.jsonl", b'{"text": null}', [], 1, '"text" is no text: None'),
        ("a.jsonl", b'{"text": "\\ud800"}', [], 1, "surrogate"),
        ("a.csv", b"text,b\nok,1\nx", ["ok"], None, None),
        ("a.csv", b"b,text\n1,ok\n\n2\n3,on\n", ["ok", "on"], 4, 'no field "text": its fields are b'),
        ("a.csv", b"a,b\n1,2\n", [], 2, 'no field "text": its fields are a, b'),
        ("a.csv", b'text\nok\n"never\nclosed\n', ["ok"], 3, "malformed CSV"),
        ("a.csv", b"text\nok\n\xff\n", ["ok"], 3, "not UTF-8"),
    ],
)
def test_what_cannot_be_read_is_listed_and_the_next_file_follows(
    name, raw, before, line, reason, tmp_path
):
    path = write(tmp_path / name, raw)
    after = write(tmp_path / "after.txt", "after")
    held = Corpus([path, after])
    for _ in range(2):  # the list is that of one iteration
        read = [text.text for text in held]
        if reason is None:
            assert read == [*before, "x", "after"]
            assert not held.problems
            continue
        assert read == [*before, "after"]
        (problem,) = held.problems
        assert problem.source == str(path)
        assert problem.line == line
        assert reason in problem.reason
        assert "\n" not in str(problem)
        assert len(str(problem)) < 300


def test_files_that_are_not_there(tmp_path):
    after = write(tmp_path / "after.txt", "after")
    held = Corpus([tmp_path / "nope.txt", tmp_path, str(tmp_path / "*.nope"), after])
    assert [text.index for text in held] == [0]
    assert [str(problem) for problem in held.problems] == [
        f"{tmp_path / 'nope.txt'}: No such file or directory",
        f"{tmp_path}: Is a directory",
        f"{tmp_path / '*.nope'}: No such file or directory",
    ]


def test_reading_may_fail_on_the_way(tmp_path, monkeypatch):
    class Disk(io.BytesIO):
        def readline(self, n=-1):
            if self.tell():
                raise OSError(5, "Input/output error")
            return super().readline(n)

    path = write(tmp_path / "a.txt", "")
    monkeypatch.setattr(Corpus, "_open", lambda self, source: Disk(b"a\nbcd"))
    held = Corpus([path])
    assert [text.text for text in held] == ["a"]
    assert held.problems == [Problem(str(path), 2, "Input/output error")]


def test_a_source_of_malformed_lines_is_given_up_after_ten(tmp_path):
    path = write(tmp_path / "a.jsonl", "no\n" * 50 + '{"text": "lost"}\n')
    held = Corpus([path, write(tmp_path / "b.txt", "after")])
    assert [text.text for text in held] == ["after"]
    assert [problem.line for problem in held.problems] == list(range(1, 11))
    assert "given up after 10" in held.problems[-1].reason
    assert "given up" not in held.problems[-2].reason


@pytest.mark.parametrize("raw", [b"", b"\n \n", b"\xef\xbb\xbf\r\n", "\u200b\u202e\n\u00a0".encode()])
def test_no_text_at_all_is_an_error(raw, tmp_path):
    for split in ("line", "paragraph", "file"):
        with pytest.raises(
            AttnscopeError, match="no text is left: nothing to read in 1 source"
        ) as caught:
            texts(write(tmp_path / "a.txt", raw), split=split)
        assert "blank" in caught.value.hint
    with pytest.raises(
        AttnscopeError, match=r"2 sources: .*nope: No such file or directory, and 1 more problem "
    ):
        texts(tmp_path / "nope", tmp_path / "nope2")


def test_arguments_that_are_none_are_refused(tmp_path):
    for options, message in (
        ({"split": "word"}, "no split 'word'"),
        ({"format": "xml"}, "no format 'xml'"),
    ):
        with pytest.raises(AttnscopeError, match=message):
            Corpus(["a"], **options)
    with pytest.raises(AttnscopeError, match="0 sources"):
        list(Corpus([]))


# Memory


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.txt.gz"])
def test_memory_does_not_grow_with_the_corpus(name, tmp_path):
    path = tmp_path / name
    line = "The animal didn't cross the street because it was too tired. " * 20
    size = 50_000_000 if name == "a.txt" else 10_000_000
    one = json.dumps({"text": line}) if "json" in name else line
    with gzip.open(path, "wt", 1) if name.endswith("gz") else path.open("w") as file:
        file.write("text\n" if "csv" in name else "")
        file.writelines(f"{one}\n" for _ in range(size // len(one)))
    tracemalloc.start()
    n = sum(len(block.texts) for block in cut_into_blocks(Corpus([path])))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert n == size // len(one)
    assert peak < 3_000_000


@pytest.mark.parametrize(("split", "line"), [("line", ""), ("paragraph", "\n"), ("file", "\n")])
def test_a_text_without_an_end_is_given_up(tmp_path, monkeypatch, split, line):
    for module in ("text", "corpus.lines", "corpus.formats"):
        monkeypatch.setattr(f"attnscope.{module}.MAX_BYTES", 1000)
    (tmp_path / "endless.txt").write_text("whole\n\n" * (split != "file") + f"abcdefghi{line}" * 200)
    (tmp_path / "after.txt").write_text("after")
    corpus = Corpus([tmp_path / "endless.txt", tmp_path / "after.txt"], split=split)
    assert [text.text for text in corpus] == ["whole"] * (split != "file") + ["after"]
    assert [p.reason for p in corpus.problems] == [
        f"the {split} is too long for one text: more than 1,000 bytes"
    ]


PAIRS = [
    (
        "pairs.jsonl",
        '{"text": "Who?", "text_pair": "The cat."}\n{"text": "Alone.", "text_pair": null}',
        None,
    ),
    ("pairs.csv", "text,text_pair\nWho?,The cat.\nAlone., \n", None),
    (
        "named.jsonl",
        '{"text": "Who?", "context": "The cat."}\n{"text": "Alone.", "context": " "}',
        "context",
    ),
    ("named.tsv", "context\ttext\nThe cat.\tWho?\n\tAlone.\n", "context"),
]


@pytest.mark.parametrize(("name", "content", "pair_field"), PAIRS)
def test_second_texts_of_pairs_are_read(tmp_path, name, content, pair_field):
    (tmp_path / name).write_text(content)
    corpus = Corpus(tmp_path / name, pair_field=pair_field)
    assert [(text.text, text.pair) for text in corpus] == [("Who?", "The cat."), ("Alone.", None)]
    assert not corpus.problems


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "Who?", "context": 3}', "is no text"),
        ('{"text": "Who?"}', 'no field "context"'),
        ('{"text": " ", "context": "The cat."}', "first text of the pair is blank"),
    ],
)
def test_a_pair_of_which_a_text_is_missing_is_listed(tmp_path, line, reason):
    path = tmp_path / "pairs.jsonl"
    path.write_text(f'{line}\n{{"text": "Who?", "context": "The cat."}}')
    corpus = Corpus(path, pair_field="context")
    assert [text.pair for text in corpus] == ["The cat."]
    assert [problem.line for problem in corpus.problems] == [1]
    assert reason in corpus.problems[0].reason


def test_a_pair_is_tokenised_with_its_sides_told_apart():
    model = attnscope.load("minilm")
    pair = CorpusText(0, "texts", 1, "Who sat?", pair="The cat.")
    (chunk,) = batch_block(TextBlock(0, (pair,)), model.tokenizer.encode)[0]
    assert list(chunk.tokens.labels) == ["[CLS]", "who", "sat", "?", "[SEP]", "the", "cat", ".", "[SEP]"]
    assert list(chunk.tokens.segments) == [0, 0, 0, 0, 0, 1, 1, 1, 1]
