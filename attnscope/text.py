"""Read text, and turn tokenizer output into tokens with labels, words and offsets.

It loads no model and no tokenizer library, so that it loads at once.
"""

import contextlib
import io
import re
import string
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal

import numpy as np

from attnscope.errors import AttnscopeError, UsageError
from attnscope.results.tokens import Tokens

if TYPE_CHECKING:
    import tokenizers

PieceStyle = Literal["auto", "plain", "bytes", "sentencepiece"]
"""How a tokenizer writes pieces: as text (WordPiece), bytes in GPT-2's alphabet (`Ġthe`), or with `▁` for a space."""


MAX_BYTES = 100_000_000
"""The most bytes of one text; what is longer is a stream without an end, or a corpus that is not split."""


MAX_CHARACTERS = 2**22
"""The most characters of one text of a corpus. A tokenizer takes 200 bytes of memory for each."""


def require_tokenizable(*texts: str | None) -> None:
    """Refuse what would fill the memory as it is tokenised: more than a pair of texts of MAX_CHARACTERS each."""
    n_characters = sum(len(text) for text in texts if text is not None)
    if n_characters > 2 * MAX_CHARACTERS:
        raise AttnscopeError(
            f"{n_characters:,} characters are too many to be tokenised at once: at most {2 * MAX_CHARACTERS:,}",
            "split the text, or give its beginning",
        )


# Tokens ---------------------------------------------------------------------------------------------------------


def build_tokens(
    text: str,
    *,
    ids: Sequence[int],
    pieces: Sequence[str],
    offsets: Sequence[tuple[int, int]] | None,
    special: Sequence[bool],
    segments: Sequence[int] | None = None,
    pair: str | None = None,
    style: PieceStyle = "auto",
) -> Tokens:
    """Turn what a tokenizer returned into Tokens: readable labels, clean offsets, word numbers.

    Words are those of `word_spans`. A token belongs to the word of its first character that is not a space; special
    tokens and tokens of nothing but spaces belong to none.

    Args:
        text: The text that was tokenised.
        ids: The tokenizer's id of each token.
        pieces: Each token as the tokenizer's vocabulary writes it.
        offsets: First and last + 1 character of each token in its own text; an empty range = no text; None = unknown.
        special: Whether the tokenizer added the token.
        segments: 0 for a token of `text`, 1 for one of `pair`; None = all 0.
        pair: The second text of a pair.
        style: How the pieces are written; "auto" guesses from the pieces.
    """
    # Labels; a token without a visible one is named by its id.
    n = len(ids)
    segments = [0] * n if segments is None else segments
    if style == "auto":
        style = _guess_style(pieces)
    labels = []
    for piece, token_id in zip(pieces, ids, strict=True):
        labels.append(_label(piece, style) or f"<{token_id}>")
    # Offsets, (token, 2), -1 where unknown; and words, by the first character that is in one.
    spans = np.full((n, 2), -1, np.int32)
    words = None
    if offsets is not None:
        words_by_segment = [_word_of_character(text), _word_of_character(pair or "")]
        words = np.full(n, -1, np.int32)
        for token, (start, end) in enumerate(offsets):
            if special[token] or start < 0 or end <= start:
                continue
            spans[token] = start, end
            character_words = words_by_segment[segments[token]][start:end]
            words[token] = next((word for word in character_words if word >= 0), -1)
    return Tokens(
        text=text,
        ids=np.asarray(ids, np.int64),
        labels=tuple(labels),
        offsets=spans,
        special=np.asarray(special, np.bool_),
        words=words,
        segments=np.asarray(segments, np.int32),
        pair=pair,
        n_given=n,
    )


def tokens_of_encoding(
    encoding: "tokenizers.Encoding",
    text: str,
    pair: str | None,
    style: PieceStyle,
    special: Sequence[bool] | None = None,
) -> Tokens:
    """Return an encoding of the tokenizers library as Tokens.

    Args:
        encoding: The encoding of a text, or of a pair of texts.
        text: The text.
        pair: The second text; None = there is none.
        style: How the tokenizer writes its pieces, such as "bytes".
        special: Which tokens are special, (token,); None = those that the encoding marks so.
    """
    if special is None:
        special = list(map(bool, encoding.special_tokens_mask))
    return build_tokens(
        text,
        ids=encoding.ids,
        pieces=encoding.tokens,
        offsets=encoding.offsets,
        special=special,
        segments=segments_of(encoding.sequence_ids),
        pair=pair,
        style=style,
    )


def segments_of(sequence_ids: Iterable[int | None]) -> list[int]:
    """Return which text of a pair each token belongs to; special tokens (None) go with the text before them.

    Not the type ids: those are what the model reads, and RoBERTa's are all 0.
    """
    segments = []
    current = 0
    for sequence in sequence_ids:
        current = current if sequence is None else sequence
        segments.append(current)
    return segments


def word_spans(text: str) -> list[tuple[int, int]]:
    """Return the words of a text, as (first, last + 1) character.

    As Clark et al. 2019 need them to merge word pieces: words are runs without white space, and each punctuation
    character is a word of its own, as in BERT's basic tokenizer (ASCII symbols such as `$` and `+` count as
    punctuation). One difference: an apostrophe between two letters stays inside its word, so that "didn't" is one
    word. Each Chinese character is a word. Other scripts without spaces (kana, Thai) come as one run.
    """
    spans: list[tuple[int, int]] = []
    # Classes of characters. Each kind of character is asked about once: texts of megabytes come here.
    alphabet = {*text}
    spaces = set(filter(str.isspace, alphabet))
    one_character_words = {char for char in alphabet if is_punctuation(char) or _is_cjk(char)}
    # These and spaces end the word before them.
    start: int | None = None
    for i, char in enumerate(text):
        is_word = char in one_character_words and not _is_inner_apostrophe(text, i)
        if is_word or char in spaces:
            if start is not None:
                spans.append((start, i))
                start = None
            if is_word:
                spans.append((i, i + 1))
        elif start is None:
            start = i
    if start is not None:
        spans.append((start, len(text)))
    return spans


def _word_of_character(text: str) -> list[int]:
    """Return the number of the word that each character is in; -1 = none."""
    words = [-1] * len(text)
    for number, (start, end) in enumerate(word_spans(text)):
        words[start:end] = [number] * (end - start)
    return words


def is_punctuation(char: str) -> bool:
    """Return whether a character is a word of its own: Unicode's punctuation, and ASCII symbols."""
    is_ascii_symbol = char in string.punctuation
    return is_ascii_symbol or unicodedata.category(char)[0] == "P"


def _is_inner_apostrophe(text: str, i: int) -> bool:
    """Return whether character i is an apostrophe between two letters."""
    if text[i] not in "'’＇" or not 0 < i < len(text) - 1:
        return False
    return _is_letter(text[i - 1]) and _is_letter(text[i + 1])


def _is_letter(char: str) -> bool:
    """Return whether a character is a letter or a digit of a script that puts spaces between words."""
    # Combining marks count: in decomposed text the letter before an apostrophe ends in its accent.
    return (char.isalnum() or unicodedata.category(char)[0] == "M") and not _is_cjk(char)


_CJK = re.compile(
    "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0002a6df\U0002a700-\U0002ceaf\U0002ceb0-\U0002ebef\U0002f800-\U0002fa1f\U00030000-\U000323af]"
)


def _is_cjk(char: str) -> bool:
    """Return whether a character is a Chinese one."""
    return _CJK.match(char) is not None


# Labels ---------------------------------------------------------------------------------------------------------


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the others for U+0100 and up, in order."""
    alphabet = {
        chr(byte): byte for byte in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    }
    others = sorted(set(range(256)) - set(alphabet.values()))
    for number, byte in enumerate(others):
        alphabet[chr(0x100 + number)] = byte
    return alphabet


_BYTE_OF = _byte_alphabet()
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SURROGATE = re.compile("([\udc80-\udcff])")
# Characters that take no ink although Unicode files them under letters, marks or symbols.
_BLANK = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
_SIGN_OF_SPACE = {" ": "·", "\n": "⏎", "\t": "⇥"}


def _guess_style(pieces: Sequence[str]) -> PieceStyle:
    """Return how a tokenizer writes pieces, from some of them."""
    if "▁" in "".join(pieces):
        return "sentencepiece"
    # Ġ and Ċ are a space and a newline in GPT-2's alphabet. They are Maltese letters too, which seldom begin a piece.
    return "bytes" if any(piece.startswith(("Ġ", "Ċ")) for piece in pieces) else "plain"


def _label(piece: str, style: PieceStyle) -> str:
    """Return a piece as people read it, with whatever cannot be seen made visible."""
    # A byte as sentencepiece writes it, such as <0x0A>.
    fallback = _BYTE_FALLBACK.fullmatch(piece)
    if fallback:
        byte = int(fallback[1], 16)
        return _visible(chr(byte)) if byte < 0x80 else f"<0x{byte:02X}>"
    # GPT-2's letters for bytes. A byte that is no UTF-8 by itself is decoded to a surrogate, and shown as a number.
    if style == "bytes" and all(char in _BYTE_OF for char in piece):
        decoded = bytes(_BYTE_OF[char] for char in piece).decode("utf-8", "surrogateescape")
        # Splitting keeps the surrogates. That of byte b is U+DC00 + b.
        label = ""
        for part in _SURROGATE.split(decoded):
            is_byte = _SURROGATE.fullmatch(part) is not None
            label += f"<0x{ord(part) - 0xDC00:02X}>" if is_byte else _visible(part)
        return label
    # Sentencepiece writes a space as ▁.
    if style == "sentencepiece":
        piece = piece.replace("▁", " ")
    return _visible(piece)


def _visible(text: str) -> str:
    """Replace what cannot be seen: spaces, controls, zero-width and direction marks, lone accents."""
    if text.isascii() and text.isprintable() and " " not in text:
        return text
    shown = []
    for char in text:
        category = unicodedata.category(char)
        if char in _SIGN_OF_SPACE:
            shown.append(_SIGN_OF_SPACE[char])
        elif category in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"} or _BLANK.match(char):
            shown.append(f"<U+{ord(char):04X}>")
        else:
            # A combining mark with no letter before it would be drawn onto what stands to its left. No letters are
            # WordPiece's ## at the beginning of a piece, and numbers such as <U+200B>.
            has_no_letter = shown in ([], ["#", "#"]) or shown[-1].startswith("<U+")
            is_lone = category[0] == "M" and has_no_letter
            shown.append("◌" + char if is_lone else char)
    return "".join(shown)


# Sources --------------------------------------------------------------------------------------------------------


def read_text(text: str | None, file: Path | None = None, *, may_be_blank: bool = False) -> str:
    """Read one text: given literally, from stdin (`-`), or from a file.

    Files and stdin are UTF-8, with or without a byte order mark; line ends become newlines, and those at the very end
    go, as in a shell's `$(...)`, so that `echo hello | … -` means the same as `… hello`.

    Args:
        text: The text itself, or "-" for stdin.
        file: A file to read instead; "-" for stdin.
        may_be_blank: Whether a text of nothing but spaces and invisible characters is accepted.

    Raises:
        AttnscopeError: Neither or both are given; the file cannot be read; bytes are not UTF-8; the text holds
            NUL characters or nothing that can be seen, or is longer than MAX_BYTES.
    """
    # A file, stdin or the text itself, in this order.
    if text is not None and file is not None:
        raise UsageError("both a text and a file are given", "give one of them")
    if text == "-" or str(file) == "-":
        name = "stdin"
        result = _decode(_read_whole(open_stdin(), name), name)
    elif file is not None:
        name = str(file)
        if file.suffix.lower() in _RECORD_SUFFIXES:
            hint = f"attnscope batch {name} draws each; to read the file as it is, pipe it: - < {name}"
            raise UsageError(f"{name} holds records, and this command reads one text", hint)
        try:
            with file.open("rb") as stream:
                result = _decode(_read_whole(stream, name), name)
        except OSError as error:
            raise AttnscopeError(f"cannot read {name}: {error.strerror or error}") from error
    elif text is not None:
        name = "the text"
        result = text.replace("\r\n", "\n").replace("\r", "\n")
    else:
        raise UsageError("no text is given", "give a text, - for stdin, or --file PATH")

    # Whatever the source: no NUL, and something to see.
    if not (may_be_blank and is_blank(result)):
        require_text(result, name)
    return result


_RECORD_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv")
"""The suffixes of files with one text per record."""


def open_stdin() -> BinaryIO:
    """Return stdin as bytes.

    Raises:
        AttnscopeError: There is none.
    """
    if sys.stdin is None:
        raise AttnscopeError("there is no stdin to read from", "give the text itself, or --file")
    # A stdin of a notebook or a test may have none.
    buffer: BinaryIO | None = getattr(sys.stdin, "buffer", None)
    return buffer or io.BytesIO(sys.stdin.read().encode("utf-8", "surrogatepass"))


_TEXT_SUFFIXES = (".txt", ".md", ".jsonl", ".json", ".csv", ".tsv", ".gz", ".pdf", ".docx", ".html")
"""The suffixes of files with text, also in formats that attnscope cannot read."""


def refuse_file_name(text: str, hint: str) -> None:
    """Refuse a text that is the name of a file: the user means what is in the file.

    A text is refused if there is a file of that name, or if it has no spaces and ends as names of text files do. The
    hint says how to pass a file, and how to pass such a text.
    """
    # A file of that name.
    try:
        is_file = Path(text).is_file()
    except OSError:  # longer than any name
        return
    if is_file:
        refuse_other_format(text, f"the text {text!r} names a file that")
        raise UsageError(f"the text {text!r} is the name of a file", hint)
    # A name without a file: spaces make it a text.
    if any(letter.isspace() for letter in text):
        return
    if text.lower().endswith(_TEXT_SUFFIXES):
        raise UsageError(f"the text {text!r} is the name of a file that is not there", hint)


def require_text(text: str, name: str = "the text") -> None:
    """Refuse a text that holds nothing that can be seen, NUL characters, or what is not Unicode."""
    # Lone surrogates are bytes of argv that were not UTF-8.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise AttnscopeError(
            f"{name} is not valid Unicode at character {error.start}",
            "put it into a UTF-8 file and use --file",
        ) from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise AttnscopeError(
            f"{name} holds a NUL character in line {line}, so it is not plain text",
            "UTF-16 files can be converted: iconv -f UTF-16 -t UTF-8",
        )
    if is_blank(text):
        flaw = "blank" if text else "empty"
        raise AttnscopeError(f"{name} is {flaw}", "give at least one word")


def is_blank(text: str) -> bool:
    """Return whether there is nothing to see: nothing but spaces, controls and invisible marks."""
    return all(char.isspace() or unicodedata.category(char) in {"Cc", "Cf"} for char in text)


def _read_whole(stream: BinaryIO, name: str) -> bytes:
    """Return the bytes of a stream; refuses more than MAX_BYTES."""
    raw = stream.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise AttnscopeError(*too_long(name))
    return raw


def too_long(name: str) -> tuple[str, str]:
    """Return the message for a text of more than MAX_BYTES, and its hint."""
    return (
        f"{name} is too long for one text: more than {MAX_BYTES:,} bytes",
        "split it into lines or paragraphs",
    )


_NO_TEXT = {
    rb"\xff\xfe|\xfe\xff": ("UTF-16, not UTF-8", "convert it: iconv -f UTF-16 -t UTF-8"),
    rb"%PDF-\d": ("a PDF, not plain text", "extract its text first: pdftotext FILE"),
    rb"PK\x03\x04|\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1|\{\\rtf\d": (
        "a ZIP archive or an Office file, not plain text",
        "save it as plain text first",
    ),
    rb"\x89PNG\r\n\x1a\n|\xff\xd8\xff|GIF8[79]a|RIFF....WEBP|II\*\0|MM\0\*": (
        "a picture, not text",
        "give pictures with --image",
    ),
    rb"RIFF....WAVE|fLaC\0|OggS\0|ID3[\x02-\x04]": (
        "a recording, not text",
        "give recordings with --audio",
    ),
}
"""The first bytes of files that hold no plain text: what the file is, and what to do."""


def other_format(start: bytes) -> tuple[str, str] | None:
    """Return the format of a file by its first bytes, and a hint; None where it may be UTF-8 text."""
    for magic, format_and_hint in _NO_TEXT.items():
        if re.match(magic, start, re.DOTALL):
            return format_and_hint
    return None


def refuse_other_format(path: str, subject: str) -> None:
    """Refuse a file that holds no plain text, by its first bytes; one that cannot be read is left to its reader.

    `subject` begins the message, which goes on with " is a PDF, not plain text", for example.
    """
    if not Path(path).is_file():
        return
    with contextlib.suppress(OSError), Path(path).open("rb") as file:
        format_and_hint = other_format(file.read(16))
        if format_and_hint is not None:
            format, hint = format_and_hint
            raise UsageError(f"{subject} is {format}", hint)


def _decode(raw: bytes, name: str) -> str:
    """Return the text of UTF-8 bytes, with newlines as line ends, and none at the end."""
    format_and_hint = other_format(raw)
    if format_and_hint is not None:
        format, hint = format_and_hint
        raise AttnscopeError(f"{name} is {format}", hint)
    try:
        decoded = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise AttnscopeError(
            f"{name} is not UTF-8: byte 0x{raw[error.start]:02X} at offset {error.start}, line {line}",
            "convert it, for example: iconv -f ISO-8859-1 -t UTF-8",
        ) from error
    return decoded.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").rstrip("\n")


_LONGEST_SLUG = 40
"""The most characters of a name that `slug` makes."""


def slug(text: str) -> str:
    """Return a name made of `text` that every file system takes: a-z, 0-9 and inner hyphens, 1 to 40 characters.

    Never empty ("text" where nothing is left); cut between words where it can be.
    """
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    words = re.findall(r"[a-z0-9]+", plain.replace("'", ""))
    name = "-".join(words)
    if len(name) > _LONGEST_SLUG:
        # One character more than fits shows whether a word ends there; a first word too long is cut within.
        whole_words, _, _ = name[: _LONGEST_SLUG + 1].rpartition("-")
        name = whole_words or name[:_LONGEST_SLUG]
    return name or "text"
