import csv
import gzip
import importlib
import io
import json
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attnscope.corpus import (
    Corpus,
    CorpusText,
    Problem,
    TokenCounts,
    batches,
    block_batches,
    blocks,
    chunks,
    copy_key,
    count_tokens,
    read_frequencies,
    repeat_probe,
    tokens_of_ids,
)
from attnscope.corpus.lines import lines_of
from attnscope.errors import AttnscopeError
from attnscope.text import build_tokens, is_blank
from tests.processes import python

# Part of Python from 3.14 on; before, of the package that the extra [zst] installs.
ZSTD = importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "zstandard")

VISIBLE = st.characters(categories=["L", "N", "P", "S", "Zs"])
# One line of text that is not blank; other characters that str.splitlines would cut at may be inside.
LINE = st.text(VISIBLE | st.sampled_from("\x0b\x1c\x85\u2028")).map(lambda text: f"{text}x")
CLS, SEP = 1, 2


def encode(text: str):
    """[CLS], one token a character, [SEP]; numbers by the letter's code, and by a code of its own after a space."""
    ids = [CLS, *(3 + ord(char) % 1000 for char in text), SEP]
    ends = [True, *[False] * len(text), True]
    return build_tokens(
        text, ids=ids, pieces=[f"t{i}" for i in ids], offsets=None, special=ends, segments=[0] * len(ids)
    )


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def texts(*files, **options) -> list[str]:
    return [text.text for text in Corpus([*files], **options)]


def zstd(content: bytes) -> bytes:
    return ZSTD.compress(content)


@pytest.fixture
def stdin(monkeypatch):
    def feed(raw: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), "ascii"))

    return feed


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


@given(st.lists(LINE), st.sampled_from(["\n", "\r\n", "\r"]), st.integers(1, 9), st.booleans())
def test_lines_survive_wherever_the_file_is_cut(lines, end, size, last):
    raw = (end.join(lines) + (end if last else "")).encode()
    pieces = iter([raw[i : i + size] for i in range(0, len(raw), size)])
    assert list(lines_of(pieces)) == (lines or [""] * last)


def test_a_byte_order_mark_is_one_at_the_start_alone():
    mark = "\ufeff".encode()
    assert list(lines_of(iter([mark[:1], mark[1:], b"a", mark + b"b"]))) == ["a\ufeffb"]


@given(st.lists(st.lists(LINE, min_size=1, max_size=3), min_size=1, max_size=5), st.integers(2, 4))
def test_paragraphs_survive(tmp_path_factory, paragraphs, blank):
    whole = ["\n".join(lines) for lines in paragraphs]
    path = write(tmp_path_factory.mktemp("p") / "a", ("\n" * blank).join(whole))
    assert texts(path, split="paragraph") == whole


def test_a_long_line_takes_linear_time_and_stays_whole(tmp_path):
    line = "wörd " * 2_000_000
    assert texts(write(tmp_path / "a.txt", line + "\nnext")) == [line, "next"]


# jsonl and CSV


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1), st.booleans())
@example(["a\r\nb", "\u2028", "x\0y", '"'], False)
def test_jsonl_survives(tmp_path_factory, values, ascii):
    lines = "\n\n".join(json.dumps({"id": 1, "text": f"{v}x"}, ensure_ascii=ascii) for v in values)
    path = write(tmp_path_factory.mktemp("j") / "a.jsonl", lines)
    held = Corpus([path])
    assert [(t.line, t.text) for t in held] == [(2 * i + 1, f"{v}x") for i, v in enumerate(values)]
    assert not held.problems


def test_jsonl_with_token_numbers_and_other_fields(tmp_path):
    entries = [{"input_ids": [5, 6]}, {"body": "hello"}, {"body": [7], "input_ids": [1]}, {"body": []}, {"body": " "}]
    path = write(tmp_path / "a.ndjson", "\n".join(map(json.dumps, entries)))
    read = [(text.text, text.ids) for text in Corpus([path], field="body")]
    assert read == [(None, (5, 6)), ("hello", None), (None, (7,))]
    assert [text.ids for text in Corpus([path], field="input_ids")] == [(5, 6), (1,)]


@given(st.lists(st.tuples(st.text(st.characters(codec="utf-8", exclude_characters="\0\r")), LINE), min_size=1))
@example([('a\n"b",\n', "c\n\nd, e")])
def test_csv_survives(tmp_path_factory, rows):
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        path = tmp_path_factory.mktemp("c") / name
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter=delimiter)
            writer.writerow(["x", "text", "y"])
            writer.writerows((other, text, "") for other, text in rows)
        held = Corpus([path])
        assert [text.text for text in held] == [text for _, text in rows]
        assert not held.problems


def test_csv_fields_may_be_huge_and_their_lines_are_known(tmp_path):
    long = "word " * 100_000
    path = write(tmp_path / "a.csv", f'\ufeffn,"text"\r\n1,"two\r\nlines"\r\n\r\n2,{long}\r\n3,end\r\n')
    assert [(t.line, t.text) for t in Corpus([path])] == [(2, "two\nlines"), (5, long), (6, "end")]


def test_the_format_is_that_of_the_name_or_the_given_one(tmp_path):
    path = write(tmp_path / "a.txt", '{"text": "x"}\n')
    assert texts(path) == ['{"text": "x"}']
    assert texts(path, format="jsonl") == ["x"]
    assert texts(write(tmp_path / "a.JSONL.gz", gzip.compress(path.read_bytes()))) == ["x"]
    assert texts(write(tmp_path / "b.1.jsonl", "no\n"), format="txt") == ["no"]


# Compressed


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
def test_compressed_files_of_several_members(compress, tmp_path):
    raw = compress(b"a\nb") + compress(b"") + b"\0" * 700 + compress("ä\n".encode()) + b"\0" * 2000
    for name in ("a.gz" if compress is gzip.compress else "a.txt.zst", "disguised.txt"):
        assert texts(write(tmp_path / name, raw)) == ["a", "bä"]


@pytest.mark.parametrize("compress", [gzip.compress, zstd])
def test_a_compressed_file_that_is_cut_off_gives_what_is_there(compress, tmp_path):
    rng = np.random.default_rng(0)
    lines = ["".join(rng.choice(list("abcdefgh"), 60)) for _ in range(20_000)]
    raw = compress("\n".join(lines).encode())
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


def test_a_wrong_checksum_is_told(tmp_path):
    lines = [np.random.default_rng(i).bytes(20).hex() for i in range(1000)]
    raw = bytearray(gzip.compress("\n".join(lines).encode()))
    raw[-8] ^= 1
    held = Corpus([write(tmp_path / "a.gz", bytes(raw))])
    read = [text.text for text in held]
    assert read == lines[: len(read)]
    assert len(read) > 900  # all but the text of the last piece, which holds the checksum
    assert "damaged gzip" in held.problems[0].reason


def test_zst_without_its_library_names_the_extra(tmp_path, monkeypatch):
    for name in ("zstandard", "compression.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(AttnscopeError, match="zstandard") as caught:
        Corpus([tmp_path / "a.zst"])
    assert "attnscope[zst]" in caught.value.hint
    with pytest.raises(AttnscopeError, match="zstandard"):
        list(Corpus([write(tmp_path / "a.txt", b"\x28\xb5\x2f\xfd" + b"...")]))


# Parquet ---------------------------------------------------------------------------------------------------------


def parquet(path: Path, **columns) -> Path:
    pyarrow = importlib.import_module("pyarrow")
    importlib.import_module("pyarrow.parquet").write_table(pyarrow.table(columns), path, row_group_size=50)
    return path


@given(st.lists(st.text(), max_size=150))
def test_parquet_survives(tmp_path_factory, values):
    values = [*values, "end"]
    path = parquet(tmp_path_factory.mktemp("parquet") / "a.parquet", text=values, other=list(range(len(values))))
    held = Corpus([path])
    kept = [(row, value) for row, value in enumerate(values, 1) if value.strip()]
    assert [(text.line, text.text) for text in held] == [(r, v) for r, v in kept if not is_blank(v)]
    assert held.bytes_read == held.n_bytes
    assert not held.problems


def test_parquet_with_token_numbers_and_other_columns(tmp_path):
    path = parquet(tmp_path / "a.parquet", said=["a", None, "b", ""], input_ids=[[1, 2], [3], [], [4]])
    held = Corpus([path], field="said")
    assert [text.text for text in held] == ["a", "b"]
    assert [(problem.line, problem.reason) for problem in held.problems] == [
        (2, '"said" is neither a text nor a list of token numbers: None')
    ]
    assert [text.ids for text in Corpus([path])] == [(1, 2), (3,), (4,)]
    odd = Corpus([path, write(tmp_path / "b.txt", "c")], field="nothing")
    parquet(path, said=["a"])
    assert [text.text for text in odd] == ["c"]
    assert odd.problems[0].reason == 'no column "nothing": its columns are said'


def test_parquet_that_is_none_or_damaged_is_listed(tmp_path, stdin):
    good = write(tmp_path / "b.txt", "c")
    parquet(tmp_path / "whole.parquet", text=[f"text {i} " * 50 for i in range(500)])
    raw = bytearray((tmp_path / "whole.parquet").read_bytes())
    raw[200:260] = b"\xff" * 60
    files = {
        "none.parquet": b"text", "empty.parquet": b"", "cut.parquet": bytes(raw[:2000]), "damaged.parquet": bytes(raw),
    }  # fmt: skip
    for name, content in files.items():
        held = Corpus([write(tmp_path / name, content), good])
        assert [text.text for text in held][-1] == "c"
        assert "damaged Parquet" in held.problems[0].reason, name
    stdin(b"PAR1")
    held = Corpus(["-", good], format="parquet")
    with pytest.raises(AttnscopeError):
        list(held)
    assert "from files alone" in held.problems[0].reason


def test_parquet_without_its_library_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(AttnscopeError, match="pyarrow") as caught:
        Corpus([tmp_path / "a.parquet"])
    assert "attnscope[parquet]" in caught.value.hint


# Which files


def test_patterns_are_sorted_and_no_file_comes_twice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.txt", "a10.txt", "a2.txt", "sub/c.txt", "sub/deep/d.txt", "[x].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / name, name)
    (tmp_path / "folder.txt").mkdir()
    assert texts("*.txt") == ["[x].txt", "a10.txt", "a2.txt", "b.txt"]
    assert texts("b.txt", "*.txt", "./b.txt", tmp_path / "b.txt") == ["b.txt", "[x].txt", "a10.txt", "a2.txt"]
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
    assert held.problems == [Problem("stdin", 2, "not UTF-8: byte 0xFF at offset 2")]


def test_stdin_may_be_replaced_by_text_or_missing(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    assert texts("-") == ["hello"]
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(AttnscopeError, match="no stdin"):
        texts("-")


def test_progress_and_the_hash_of_what_was_read(tmp_path):
    one = write(tmp_path / "a.txt", "a\nb\n")
    held = Corpus([one])
    assert (held.n_bytes, held.bytes_read, held.sha256) == (4, 0, "")
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
        ("a.txt", b"ok\nna\xefve\nlost\n", ["ok"], 2, "not UTF-8: byte 0xEF at offset 5"),
        ("a.txt", b"ok\r\xff", ["ok"], 2, "byte 0xFF at offset 3"),
        ("a.txt", b"ok\ncut \xe4\xb8", ["ok"], 2, "byte 0xE4 at offset 7"),
        ("a.txt", "ok".encode("utf-16"), [], None, "iconv -f UTF-16"),
        ("a.txt", b"ok\nb\0\n", ["ok"], 2, "NUL"),
        ("a.gz", b"plain\n", [], None, "not gzip"),
        ("a.zst", b"plain\n", [], None, "damaged zstd"),
        ("a.jsonl", b'{"text": "ok"}\n{"text":\n{"text": "on"}', ["ok", "on"], 2, "malformed JSON: "),
        ("a.jsonl", b'{"text": "ok"}\n[1]', ["ok"], 2, "not a JSON object: [1]"),
        ("a.jsonl", b'{"text": "ok"}\n' + b"[" * 100_000, ["ok"], 2, "malformed JSON"),
        ("a.jsonl", b'{"text": "ok"}\n{"text": 1' + b"0" * 9999 + b"}", ["ok"], 2, "malformed JSON"),
        ("a.jsonl", b'{"body": "x", "b": 1}', [], 1, 'no field "text": its fields are body, b'),
        ("a.jsonl", b"{}", [], 1, 'no field "text": it is empty'),
        ("a.jsonl", b'{"text": null}', [], 1, "neither a text nor a list of token numbers: None"),
        ("a.jsonl", b'{"text": [1, true]}', [], 1, "neither a text"),
        ("a.jsonl", b'{"input_ids": [-1]}', [], 1, '"input_ids" is neither'),
        ("a.jsonl", b'{"input_ids": [1e3]}', [], 1, '"input_ids" is neither'),
        ("a.jsonl", b'{"input_ids": [99999999999]}', [], 1, '"input_ids" is neither'),
        ("a.jsonl", b'{"text": "\\ud800"}', [], 1, "surrogate"),
        ("a.csv", b"text,b\nok,1\nx", ["ok"], None, None),
        ("a.csv", b"b,text\n1,ok\n\n2\n3,on\n", ["ok", "on"], 4, 'no value for column "text": 1 of 2 columns'),
        ("a.csv", b"a,b\n1,2\n", [], 1, 'no column "text": its columns are a, b'),
        ("a.csv", b'text\nok\n"never\nclosed\n', ["ok"], 3, "malformed CSV"),
        ("a.csv", b'text\nok\n"a"b\n', ["ok"], 3, "malformed CSV"),
        ("a.csv", b"text\nok\n\xff\n", ["ok"], 3, "not UTF-8"),
    ],
)
def test_what_cannot_be_read_is_listed_and_the_next_file_follows(name, raw, before, line, reason, tmp_path):
    path, after = write(tmp_path / name, raw), write(tmp_path / "after.txt", "after")
    held = Corpus([path, after])
    for _ in range(2):  # the list is that of one iteration
        read = [text.text for text in held]
        if reason is None:
            assert read == [*before, "x", "after"]
            assert not held.problems
            continue
        assert read == [*before, "after"]
        (problem,) = held.problems
        assert (problem.source, problem.line) == (str(path), line)
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
        def read(self, n=-1):
            if self.tell():
                raise OSError(5, "Input/output error")
            return super().read(3)

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


@pytest.mark.parametrize("split", ["line", "paragraph", "file"])
def test_a_broken_text_is_not_given_in_part(split, tmp_path):
    held = Corpus([write(tmp_path / "a.txt", b"one\n\ntwo\nthr\xff\nfour\n")], split=split)
    if split == "file":
        with pytest.raises(AttnscopeError, match="line 4: not UTF-8"):
            list(held)
    else:
        assert [text.text for text in held] == (["one", "two"] if split == "line" else ["one"])
        assert held.problems[0].line == 4


@pytest.mark.parametrize("raw", [b"", b"\n \n", b"\xef\xbb\xbf\r\n", "\u200b\u202e\n\u00a0".encode()])
def test_no_text_at_all_is_an_error(raw, tmp_path):
    for split in ("line", "paragraph", "file"):
        with pytest.raises(AttnscopeError, match="no text is left: nothing to read in 1 source") as caught:
            texts(write(tmp_path / "a.txt", raw), split=split)
        assert "blank" in caught.value.hint
    with pytest.raises(AttnscopeError, match=r"2 sources; .*nope: No such file or directory, and 1 more problem "):
        texts(tmp_path / "nope", tmp_path / "nope2")


def test_arguments_that_are_none_are_refused(tmp_path):
    for options, message in (({"split": "word"}, "no split 'word'"), ({"format": "xml"}, "no format 'xml'")):
        with pytest.raises(AttnscopeError, match=message):
            Corpus(["a"], **options)
    with pytest.raises(AttnscopeError, match="no file"):
        Corpus([])


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
    n = sum(len(block.texts) for block in blocks(Corpus([path])))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert n == size // len(one)
    assert peak < 3_000_000


# Blocks


def stream(n: int, length=lambda i: 3) -> list[CorpusText]:
    return [CorpusText(i, "s", i + 1, text="x" * length(i)) for i in range(n)]


def test_a_block_ends_where_its_texts_are_many_characters(monkeypatch):
    monkeypatch.setattr("attnscope.corpus.batching.BLOCK_CHARACTERS", 10)
    texts = [CorpusText(i, "s", i + 1, text="x" * n) for i, n in enumerate([4, 4, 4, 30, 1, 9, 1, 1, 1, 1])]
    texts.append(CorpusText(10, "s", 11, ids=(1, 2, 3)))
    whole = list(blocks(texts, 3))
    assert [[text.index for text in block.texts] for block in whole] == [[0, 1, 2], [3], [4, 5], [6, 7, 8], [9, 10]]
    assert [block.index for block in whole] == [0, 1, 2, 3, 4]
    second = list(blocks(texts, 3, shard=(2, 2)))
    assert [block.texts for block in second] == [whole[1].texts, whole[3].texts]


@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 5))
def test_shards_are_whole_blocks_and_together_the_corpus(n, size, shards):
    whole = list(blocks(stream(n), size))
    assert [text for block in whole for text in block.texts] == stream(n)
    assert all(len(block.texts) == size for block in whole[:-1])
    assert [block.index for block in whole] == list(range(-(-n // size)))
    parts = [list(blocks(iter(stream(n)), size, shard=(k, shards))) for k in range(1, shards + 1)]
    assert sorted((block for part in parts for block in part), key=lambda block: block.index) == whole
    for k, part in enumerate(parts):
        assert all(block.index % shards == k for block in part)


def test_shards_that_are_none_are_refused():
    for shard in ((0, 2), (3, 2), (1, 0)):
        with pytest.raises(AttnscopeError, match="no shard"):
            blocks([], shard=shard)
    with pytest.raises(AttnscopeError, match="at least one text"):
        blocks([], 0)


def described(made) -> list[list[tuple[int, int, list[int]]]]:
    return [[(part.text, part.number, part.tokens.ids.tolist()) for part in batch] for batch in made]


@given(st.lists(st.integers(0, 60), max_size=30), st.integers(1, 4), st.integers(10, 100))
def test_batches_do_not_depend_on_shards(lengths, shards, budget):
    whole_corpus = stream(len(lengths), lambda i: lengths[i])

    def all_batches(shard):
        made = [block_batches(block, encode, limit=11, budget=budget) for block in blocks(whole_corpus, 7, shard=shard)]
        return [batch for block in made for batch in described(block)]

    whole = all_batches((1, 1))
    assert sorted(sum((all_batches((k, shards)) for k in range(1, shards + 1)), [])) == sorted(whole)
    seen = sorted((text, number) for batch in whole for text, number, _ in batch)
    assert len(seen) == len(set(seen))
    assert {text for text, _ in seen} == set(range(len(lengths)))
    for batch in whole:
        sizes = [len(ids) for _, _, ids in batch]
        assert sizes == sorted(sizes)
        assert len(batch) == 1 or len(batch) * max(sizes) <= budget


def test_batches_are_sorted_by_length_and_filled_up_to_the_budget():
    parts = [chunks(encode("x" * n), i)[0] for i, n in enumerate([5, 1, 1, 20, 2, 1])]
    made = batches(parts, budget=9)
    assert [[part.text for part in batch] for batch in made] == [[1, 2, 5], [4], [0], [3]]
    assert described(batches(reversed(parts), budget=9)) == described(made)
    assert batches([]) == []


# Chunks


@given(st.integers(0, 40), st.integers(3, 12), st.data())
def test_chunks_hold_every_token_and_the_special_ones_at_both_ends(n, size, data):
    room = size - 2
    stride = data.draw(st.none() | st.integers(1, room))
    tokens = encode("".join(chr(97 + i) for i in range(n)))
    made = chunks(tokens, 7, limit=size, stride=stride)
    assert {part.text for part in made} == {7}
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
        assert inner[: part.n_repeated] == part.tokens.ids[part.repeated].tolist()
    assert rebuilt == tokens.ids[1:-1].tolist()
    assert all(len(part) == size for part in made[:-1])


def test_a_text_that_fits_stays_as_it_is():
    tokens = encode("abc")
    for options in ({}, {"limit": 5}, {"limit": 9, "chunk": 5}, {"stride": 1}):
        (part,) = chunks(tokens, 3, **options)
        assert part.tokens is tokens
        assert (part.text, part.number, part.n_chunks, part.n_repeated) == (3, 0, 1, 0)
    assert len(chunks(tokens, chunk=4)) == 2


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


def test_texts_of_numbers_need_no_tokenizer():
    block = next(blocks([CorpusText(0, "s", 1, ids=(CLS, 9, 8, SEP))]))
    (((part,),)) = block_batches(block, lambda text: pytest.fail(text), special_ids=[CLS, SEP])
    assert part.tokens.labels == ("<1>", "<9>", "<8>", "<2>")
    assert part.tokens.special.tolist() == [True, False, False, True]


# The probe


@given(st.sets(st.integers(0, 500), min_size=1), st.integers(1, 5), st.integers(1, 20), st.integers(0, 2**70))
def test_the_probe_repeats_what_it_says_first(vocabulary, n, length, seed):
    made = list(repeat_probe(list(vocabulary), n, length, seed, before=[CLS], after=[SEP, SEP]))
    assert [text.index for text in made] == list(range(n))
    for text in made:
        assert text.ids[0] == CLS
        assert text.ids[-2:] == (SEP, SEP)
        half = (len(text.ids) - 3) // 2
        assert length <= 2 * half <= 2 * length
        assert text.ids[1 : 1 + half] == text.ids[1 + half : -2]
        assert set(text.ids[1:-2]) <= vocabulary
    more = repeat_probe(sorted(vocabulary, reverse=True), n + 1, length, seed, before=[CLS], after=[SEP, SEP])
    assert list(more)[:n] == made


def test_the_probe_is_the_same_for_ever():
    made = [text.ids for text in repeat_probe(range(100, 1100), 2, 4, seed=0)]
    assert made == [(371, 717, 124, 633, 371, 717, 124, 633), (649, 880, 986, 649, 880, 986)]
    assert made != [text.ids for text in repeat_probe(range(100, 1100), 2, 4, seed=1)]
    drawn = np.concatenate([text.ids for text in repeat_probe(range(10), 50, 200, seed=3)])
    assert np.bincount(drawn).min() > 0.085 * len(drawn)  # a tenth is expected


def test_no_fixed_offset_passes_as_induction_on_the_probe():
    """What follows the same token stands m - 1 back: were m always 50, a head of offset 49 would be right each time."""
    texts = list(repeat_probe(range(1000), 50, 50, seed=0))
    assert max(np.bincount([len(text.ids) // 2 - 1 for text in texts])) <= 6
    assert {len(text.ids) // 2 for text in texts} <= set(range(25, 51))


def test_probes_that_cannot_be_are_refused():
    for arguments in (([], 1, 1, 0), ([1], 0, 1, 0), ([1], 1, 0, 0), ([1], 1, 1, -1)):
        with pytest.raises(AttnscopeError, match="no probe"):
            repeat_probe(*arguments)


# Frequencies

IDS = st.lists(st.integers(0, 300), max_size=20)


@given(st.lists(IDS, max_size=6), st.randoms(use_true_random=False))
def test_counts_do_not_depend_on_the_order(parts, random):
    held = TokenCounts()
    for ids in parts:
        held.add(ids)
    merged = TokenCounts()
    for ids in random.sample(parts, len(parts)):
        one = TokenCounts()
        one.add(ids)
        merged = one.merge(merged)
    flat = [i for ids in parts for i in ids]
    expected = np.bincount(np.array(flat, int))
    assert held.counts.tolist() == merged.counts.tolist() == expected.tolist()
    assert held.total == len(flat)
    expected = np.log((np.bincount(np.array(flat, int), minlength=301) + 1) / (len(flat) + 301))
    np.testing.assert_array_equal(held.log_frequency(301), expected)
    assert np.exp(held.log_frequency(301)).sum() == pytest.approx(1)


def test_token_numbers_out_of_range_are_refused():
    held = TokenCounts()
    held.add([7])
    with pytest.raises(AttnscopeError, match="token 7 .* vocabulary has 7"):
        held.log_frequency(7)
    for ids in ([-1], [2**40]):
        with pytest.raises(ValueError, match="token numbers"):
            held.add(ids)
    assert held.counts.tolist() == [0] * 7 + [1]


def test_the_tokens_of_a_corpus_are_counted_without_special_ones(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "ab"}\n{"input_ids": [1, 100, 2]}\n{"text": "b"}')
    counts = count_tokens(Corpus([path]), encode, special_ids=[CLS, SEP]).counts
    assert {i: int(n) for i, n in enumerate(counts) if n} == {100: 2, 101: 2}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("f.txt", "a\t3\n\nb\t1\na\t2\nb c\t0\n"),
        ("f.tsv.gz", gzip.compress(b"a\t5\r\nb\t1 \n", mtime=0)),  # the same bytes in every process of the tests
        ("f.jsonl", '{"word": "a", "count": 5}\n{"id": 101, "count": 1}\n'),
    ],
)
def test_frequencies_from_a_file(name, content, tmp_path):
    def plain(text):
        return encode(text.removeprefix(" "))

    counts = read_frequencies(write(tmp_path / name, content), plain).counts
    assert {i: int(n) for i, n in enumerate(counts) if n} == {100: 5, 101: 1}


def test_a_word_counts_for_both_of_its_forms(tmp_path):
    counts = read_frequencies(write(tmp_path / "f", "a\t5\n"), lambda text: encode(text.replace(" a", "A"))).counts
    assert {i: int(n) for i, n in enumerate(counts) if n} == {3 + ord("A"): 5, 3 + ord("a"): 5}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("f.txt", b"a\t1\nb 2\n", "line 2: not a word, a tab"),
        ("f.txt", b"a\t1.5\n", "line 1"),
        ("f.txt", b"\t1\n", "line 1"),
        ("f.txt", b"a\t" + b"9" * 99, "line 1"),
        ("f.txt", b"\n", "is empty"),
        ("f.txt", b"a\t1\n\xff", "line 2: not UTF-8"),
        ("f.jsonl", b'{"word": "a"}', 'line 1: no "word"'),
        ("f.jsonl", b'{"id": "a", "count": 1}', "line 1"),
        ("f.jsonl", b'{"word": "a", "count": -1}', "line 1"),
        ("f.jsonl", b"{", "line 1: malformed JSON"),
        ("nope", None, "cannot read .*nope: No such file"),
    ],
)
def test_frequencies_that_cannot_be_read_are_refused(name, content, message, tmp_path):
    path = tmp_path / name if content is None else write(tmp_path / name, content)
    with pytest.raises(AttnscopeError, match=message):
        read_frequencies(path, encode)


def test_the_corpus_needs_no_heavy_library():
    code = "import sys, attnscope.corpus; print(*sys.modules)"
    loaded = python("-c", code, check=True).stdout.split()
    assert not {"torch", "transformers", "tokenizers", "matplotlib", "scipy", "zstandard"} & set(loaded)


def test_copies_differ_in_case_and_whitespace_alone() -> None:
    assert copy_key("The  cat\nsat. ") == copy_key("the cat sat.")
    assert copy_key("STRASSE") == copy_key("straße")
    assert len({copy_key(text) for text in ("the cat", "thecat", "the cat.", "")}) == 4
    assert copy_key("\ud800") == copy_key(" \ud800")


@pytest.mark.parametrize(("split", "line"), [("line", ""), ("paragraph", "\n"), ("file", "\n")])
def test_a_text_without_an_end_is_given_up(tmp_path, monkeypatch, split, line):
    for module in ("text", "corpus.lines", "corpus.formats"):
        monkeypatch.setattr(f"attnscope.{module}.MOST_BYTES", 1000)
    (tmp_path / "endless.txt").write_text("whole\n\n" * (split != "file") + f"abcdefghi{line}" * 200)
    (tmp_path / "after.txt").write_text("after")
    corpus = Corpus([tmp_path / "endless.txt", tmp_path / "after.txt"], split=split)
    assert [text.text for text in corpus] == ["whole"] * (split != "file") + ["after"]
    assert [p.reason for p in corpus.problems] == [f"the {split} is too long for one text: more than 1,000 bytes"]
