import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attnscope.errors import AttnscopeError
from attnscope.text import build_tokens, read_text, slug, word_spans


def labels(*pieces, style="auto"):
    n = len(pieces)
    tokens = build_tokens(
        "", ids=range(n), pieces=pieces, offsets=None, special=[False] * n, segments=[0] * n, style=style
    )
    return tokens.labels


def words(text):
    return [text[start:end] for start, end in word_spans(text)]


def bytes_as_pieces(text):
    """GPT-2's alphabet as its authors wrote it: an oracle that shares no code."""
    kept = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    table = {b: chr(b) for b in kept}
    extra = 0
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + extra)
            extra += 1
    return "".join(table[byte] for byte in text.encode())


# Labels


@pytest.mark.parametrize(
    ("style", "piece", "label"),
    [
        ("plain", "##ing", "##ing"),
        ("plain", "[CLS]", "[CLS]"),
        ("plain", "Ġorm", "Ġorm"),  # Maltese
        ("plain", "$_{x}\\<&", "$_{x}\\<&"),
        ("plain", "a b", "a·b"),
        ("plain", "\u200b", "<U+200B>"),
        ("plain", "x\u202ey", "x<U+202E>y"),
        ("plain", "\u00a0", "<U+00A0>"),
        ("plain", "\u0007", "<U+0007>"),
        ("plain", "\ufe0f", "<U+FE0F>"),
        ("plain", "\u3164", "<U+3164>"),
        ("plain", "\u0301", "◌\u0301"),
        ("plain", "##\u0301", "##◌\u0301"),
        ("plain", "e\u0301", "e\u0301"),
        ("plain", "😀", "😀"),
        ("plain", "שלום", "שלום"),
        ("bytes", "Ġthe", "·the"),
        ("bytes", "ĠĠ", "··"),
        ("bytes", "Ċ", "⏎"),
        ("bytes", "ĉ", "⇥"),
        ("bytes", "Ã©", "é"),
        ("bytes", "ä¸Ń", "中"),
        ("bytes", "ä¸", "<0xE4><0xB8>"),
        ("bytes", "Ń", "<0xAD>"),
        ("bytes", "Ġð", "·<0xF0>"),
        ("bytes", "<|endoftext|>", "<|endoftext|>"),
        ("bytes", "<｜begin▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),
        ("sentencepiece", "▁the", "·the"),
        ("sentencepiece", "▁", "·"),
        ("sentencepiece", "\n", "⏎"),
        ("sentencepiece", "<0x0A>", "⏎"),
        ("sentencepiece", "<0xE4>", "<0xE4>"),
        ("sentencepiece", "<0xe4>", "<0xE4>"),
    ],
)
def test_a_piece_becomes_a_readable_label(style, piece, label):
    assert labels(piece, style=style) == (label,)


@given(st.text(min_size=1))
@example("\ud800")
def test_labels_can_be_seen_and_stay_on_their_line(text):
    for style in ("plain", "sentencepiece"):
        (label,) = labels(text, style=style)
        assert label
        for char in label:
            assert unicodedata.category(char) not in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"}
        assert unicodedata.category(label[0])[0] != "M"


@given(
    st.text(
        st.characters(
            categories=["L", "N", "P", "So", "Sm"], exclude_characters="\u3164\u2800\u1160\u115f\uffa0"
        )
    )
)
def test_byte_level_pieces_decode_to_their_text_wherever_they_are_cut(text):
    if text:
        assert labels(bytes_as_pieces(text), style="bytes") == (text,)
    for piece in bytes_as_pieces(text):
        (label,) = labels(piece, style="bytes")
        assert label.isascii()
        assert label.isprintable()


# Words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The cat sat.", ["The", "cat", "sat", "."]),
        ("The animal didn't, it's said", ["The", "animal", "didn't", ",", "it's", "said"]),
        ("l’été d' ʼn", ["l’été", "d", "'", "ʼn"]),
        ("'tis the dogs' \"x\"", ["'", "tis", "the", "dogs", "'", '"', "x", '"']),
        ("well-known $5+3", ["well", "-", "known", "$", "5", "+", "3"]),
        ("e\u0301't", ["e\u0301't"]),
        ("中文abc字", ["中", "文", "abc", "字"]),
        ("中'a", ["中", "'", "a"]),
        ("これは 한국어", ["これは", "한국어"]),
        ("¿qué? «x»…", ["¿", "qué", "?", "«", "x", "»", "…"]),
        (" \t\n", []),
        ("", []),
    ],
)
def test_words(text, expected):
    assert words(text) == expected


@given(st.text())
def test_words_are_the_text_without_its_spaces(text):
    spans = word_spans(text)
    assert "".join(words(text)) == "".join(char for char in text if not char.isspace())
    assert all(start < end for start, end in spans)
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))


def test_tokens_get_the_word_of_their_first_character_that_is_no_space():
    text = "I don't  go."
    pair = "no 中国"
    pieces = ["<s>", "I", "Ġdon", "'t", "Ġ", "Ġgo", ".", "</s>", "no", "Ġä¸", "Ń", "åĽ½", "", "</s>"]
    offsets = [(0, 0), (0, 1), (1, 5), (5, 7), (7, 8), (8, 11), (11, 12), (0, 0)]
    offsets += [(0, 2), (2, 4), (3, 4), (4, 5), (5, 5), (0, 0)]
    segments = [0] * 8 + [1] * 6
    special = [piece in {"<s>", "</s>"} for piece in pieces]
    tokens = build_tokens(
        text,
        ids=range(14),
        pieces=pieces,
        offsets=offsets,
        special=special,
        segments=segments,
        pair=pair,
    )
    assert tokens.words.tolist() == [-1, 0, 1, 1, -1, 2, 3, -1, 0, 1, 1, 2, -1, -1]
    assert tokens.offsets[[0, 7, 12, 13]].tolist() == [[-1, -1]] * 4
    assert tokens.offsets[5].tolist() == [8, 11]
    assert tokens.labels[9:11] == ("·<0xE4><0xB8>", "<0xAD>")
    assert tokens.text == text
    assert tokens.pair == pair
    assert tokens.n_given == 14
    assert len(tokens) == 14
    assert tokens.ids.dtype == np.int64
    assert tokens.offsets.dtype == np.int32
    assert tokens.special.dtype == np.bool_
    assert tokens.words.dtype == np.int32
    assert tokens.segments.dtype == np.int32


# Sources


@pytest.mark.parametrize("raw", [b"caf\xc3\xa9\n", b"\xef\xbb\xbfcaf\xc3\xa9", b"caf\xc3\xa9\r\n\r\n"])
def test_files_and_stdin_are_utf8_whatever_the_locale(raw, tmp_path, stdin):
    path = tmp_path / "in.txt"
    path.write_bytes(raw)
    assert read_text(None, path) == "café"
    stdin(raw)
    assert read_text("-") == "café"
    stdin(raw)
    assert read_text(None, Path("-")) == "café"


@pytest.mark.parametrize(
    "text", ["ID3 tags are old", "%PDF- begins a PDF", "RIFF and raff", "PK", "GIF89"]
)
def test_text_that_begins_almost_like_another_format_is_text(text, tmp_path):
    path = tmp_path / "in.txt"
    path.write_text(text)
    assert read_text(None, path) == text


@pytest.mark.parametrize(
    ("raw", "message", "hint"),
    [
        (b"ok\nna\xefve\n", r"in\.txt is not UTF-8: byte 0xEF at offset 5, line 2", "iconv"),
        (b"cut \xe4\xb8", r"byte 0xE4 at offset 4, line 1", "iconv"),
        ("héllo".encode("utf-16"), r"in\.txt is UTF-16", "iconv -f UTF-16"),
        (b"%PDF-1.4\n1 0 obj\n", r"in\.txt is a PDF, not plain text", "pdftotext"),
        (
            b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",
            r"in\.txt is a ZIP archive or an Office file",
            "plain text",
        ),
        (b"\xff\xd8\xff\xe0", r"in\.txt is a picture, not text", "--image"),
        (b"RIFF\0\n\0\0WAVEfmt ", r"in\.txt is a recording, not text", "--audio"),
        ("hello".encode("utf-16-le"), "NUL character in line 1", "UTF-16"),
        (b"one\ntwo\0", "NUL character in line 2", "UTF-16"),
        (b"", r"in\.txt is empty", "one word"),
        (b"\xef\xbb\xbf\r\n", r"in\.txt is empty", "one word"),
        (b" \t\n", r"in\.txt is blank", "one word"),
        ("\u200b\u202e \u00a0".encode(), r"in\.txt is blank", "one word"),
    ],
)
def test_bytes_that_are_no_text_are_refused(raw, message, hint, tmp_path, stdin):
    path = tmp_path / "in.txt"
    path.write_bytes(raw)
    with pytest.raises(AttnscopeError, match=message) as caught:
        read_text(None, path)
    assert hint in caught.value.hint
    assert "\n" not in str(caught.value)
    stdin(raw)
    with pytest.raises(AttnscopeError, match=message.replace(r"in\.txt", "stdin")):
        read_text("-")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        (" \n", "blank"),
        ("a\0b", "NUL"),
        ("a\udce9b", "not valid Unicode at character 1"),
        (None, "no text"),
    ],
)
def test_literal_texts_that_are_none_are_refused(text, message):
    with pytest.raises(AttnscopeError, match=message):
        read_text(text)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(AttnscopeError, match=r"nope\.txt: No such file"):
        read_text(None, tmp_path / "nope.txt")
    with pytest.raises(AttnscopeError, match="directory"):
        read_text(None, tmp_path)
    with pytest.raises(AttnscopeError, match="both"):
        read_text("a", tmp_path / "nope.txt")


# Names of files


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "The animal didn't cross the street because it was too tired.",
            "the-animal-didnt-cross-the-street",
        ),
        ("Ünïcode Straße", "unicode-strae"),
        ("../../etc/passwd", "etc-passwd"),
        ("日本語", "text"),
        ("", "text"),
        ("a" * 50, "a" * 40),
        ("x" * 39 + " tail", "x" * 39),
        ("x" * 40 + " tail", "x" * 40),
    ],
)
def test_slug(text, expected):
    assert slug(text) == expected


@given(st.text())
def test_slugs_are_safe_everywhere(text):
    name = slug(text)
    assert 1 <= len(name) <= 40
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert name.strip("-") == name
