"""Read one text from the command line, a file or stdin; and turn a tokenizer's output into `Tokens`.

This module imports no model and no tokenizer library, so its import takes little time.
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
"""The most bytes of one text. A longer text is taken for an endless stream, or a corpus that is not split."""

MAX_CHARACTERS = 2**22
"""The most characters of one text of a corpus. A tokenizer takes 200 bytes of memory for each."""


def require_tokenizable(*texts: str | None) -> None:
    """Refuse texts that are too long to be tokenised in memory.

    The limit is on the total length. It is 2 · MAX_CHARACTERS, so that a pair of the longest texts of a corpus passes;
    a text that comes alone may be as long as the pair.
    """
    n_characters = sum(len(text) for text in texts if text is not None)
    if n_characters > 2 * MAX_CHARACTERS:
        raise AttnscopeError(
            f"{n_characters:,} characters are too many to be tokenised at once: at most {2 * MAX_CHARACTERS:,}",
            "split the text, or give its beginning",
        )


# Tokens


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

    Words are those of `word_spans`. A token belongs to the word of its first character that is not a space. Special
    tokens and tokens of spaces alone belong to no word.

    Args:
        text: The text that was tokenised.
        ids: The tokenizer's id of each token.
        pieces: Each token as the tokenizer's vocabulary writes it.
        offsets: (start, stop) of each token, in characters of the text or pair that it is from. An empty range = the
            token stands for no characters; None = the tokenizer gives no offsets.
        special: Whether the tokenizer added the token, (token,).
        segments: 0 for a token of `text`, 1 for one of `pair`; None = all 0.
        pair: The second text of a pair.
        style: How the pieces are written; "auto" guesses from the pieces.
    """
    # Labels. If nothing of a token is visible, it is named by its id.
    n_tokens = len(ids)
    segments = [0] * n_tokens if segments is None else segments
    if style == "auto":
        style = _guess_style(pieces)
    labels = tuple(
        _make_label(piece, style) or f"<{token_id}>" for piece, token_id in zip(pieces, ids, strict=True)
    )
    # Offsets, (token, 2), and the number of each token's word, (token,). Both are -1 where there is none.
    spans = np.full((n_tokens, 2), -1, np.int32)
    words = None
    if offsets is not None:
        words_by_segment = [_words_by_character(text), _words_by_character(pair or "")]
        words = np.full(n_tokens, -1, np.int32)
        for token, (start, end) in enumerate(offsets):
            if special[token] or start < 0 or end <= start:
                continue
            spans[token] = start, end
            character_words = words_by_segment[segments[token]][start:end]
            words[token] = next((word for word in character_words if word >= 0), -1)
    # All tokens were given, as no model has generated any: `n_given` counts the tokens that were not generated.
    return Tokens(
        text=text,
        ids=np.asarray(ids, np.int64),
        labels=labels,
        offsets=spans,
        special=np.asarray(special, np.bool_),
        words=words,
        segments=np.asarray(segments, np.int32),
        pair=pair,
        n_given=n_tokens,
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
        special: Whether each token is special, (token,); None = as the encoding marks them.
    """
    if special is None:
        special = list(map(bool, encoding.special_tokens_mask))
    return build_tokens(
        text,
        ids=encoding.ids,
        pieces=encoding.tokens,
        offsets=encoding.offsets,
        special=special,
        segments=_find_segments(encoding.sequence_ids),
        pair=pair,
        style=style,
    )


def _find_segments(sequence_ids: Iterable[int | None]) -> list[int]:
    """Return which text of a pair each token belongs to, 0 or 1.

    Special tokens, whose sequence id is None, belong to the text of the token before them. The encoding's type ids
    would not do: they are inputs of the model, and RoBERTa's are 0 for both texts.
    """
    segments = []
    segment = 0
    for sequence_id in sequence_ids:
        segment = segment if sequence_id is None else sequence_id
        segments.append(segment)
    return segments


def word_spans(text: str) -> list[tuple[int, int]]:
    """Return the words of a text, each as (start, stop) in characters.

    Words are split as in BERT's basic tokenizer, as Clark et al. 2019 do to merge word pieces. A word is a run of
    characters without white space. Each punctuation character is a word, and so are ASCII symbols such as `$` and `+`.
    Each Chinese character is a word. A run of another script without spaces, such as kana or Thai, is one word. Unlike
    in BERT, an apostrophe between two letters stays inside its word, so that "didn't" is one word.
    """
    spans = []
    # Classify each distinct character once, since texts may have megabytes.
    alphabet = {*text}
    spaces = set(filter(str.isspace, alphabet))
    one_character_words = {char for char in alphabet if is_punctuation(char) or _is_cjk(char)}
    # Where the current word starts; None = outside words. Spaces and one-character words end it.
    start: int | None = None
    for index, char in enumerate(text):
        is_word = char in one_character_words and not _is_inner_apostrophe(text, index)
        if is_word or char in spaces:
            if start is not None:
                spans.append((start, index))
                start = None
            if is_word:
                spans.append((index, index + 1))
        elif start is None:
            start = index
    if start is not None:
        spans.append((start, len(text)))
    return spans


def _words_by_character(text: str) -> list[int]:
    """Return the number of the word that each character is in, (character,); -1 = it is in no word."""
    words = [-1] * len(text)
    for number, (start, end) in enumerate(word_spans(text)):
        words[start:end] = [number] * (end - start)
    return words


def is_punctuation(char: str) -> bool:
    """Return whether a character is Unicode punctuation or an ASCII symbol, so that it is a word of its own."""
    is_ascii_symbol = char in string.punctuation
    return is_ascii_symbol or unicodedata.category(char)[0] == "P"


def _is_inner_apostrophe(text: str, index: int) -> bool:
    """Return whether the character at an index is an apostrophe between two letters."""
    if text[index] not in "'’＇" or not 0 < index < len(text) - 1:
        return False
    return _is_letter(text[index - 1]) and _is_letter(text[index + 1])


def _is_letter(char: str) -> bool:
    """Return whether a character is a letter or a digit of a script that puts spaces between words."""
    # Combining marks (category M) count: in decomposed text an accent may stand between a letter and an apostrophe.
    return (char.isalnum() or unicodedata.category(char)[0] == "M") and not _is_cjk(char)


_CJK = re.compile(
    "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0002a6df\U0002a700-\U0002ceaf\U0002ceb0-\U0002ebef\U0002f800-\U0002fa1f\U00030000-\U000323af]"
)


def _is_cjk(char: str) -> bool:
    """Return whether a character is Chinese."""
    return _CJK.match(char) is not None


# Labels


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet, letter → byte. Printable Latin-1 bytes are themselves; others are U+0100 and up."""
    alphabet = {
        chr(byte): byte for byte in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    }
    other_bytes = sorted(set(range(256)) - set(alphabet.values()))
    for number, byte in enumerate(other_bytes):
        alphabet[chr(0x100 + number)] = byte
    return alphabet


_BYTE_BY_LETTER = _byte_alphabet()
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SURROGATE = re.compile("([\udc80-\udcff])")
# Characters that cannot be seen, although their Unicode category is letter, mark or symbol.
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
_SIGN_BY_SPACE = {" ": "·", "\n": "⏎", "\t": "⇥"}


def _guess_style(pieces: Sequence[str]) -> PieceStyle:
    """Return how a tokenizer writes pieces, guessed from the pieces of a text."""
    if "▁" in "".join(pieces):
        return "sentencepiece"
    # Ġ and Ċ are a space and a newline in GPT-2's alphabet. They are Maltese letters too, which seldom begin a piece.
    return "bytes" if any(piece.startswith(("Ġ", "Ċ")) for piece in pieces) else "plain"


def _make_label(piece: str, style: PieceStyle) -> str:
    """Return a piece as people read it, with whatever cannot be seen made visible."""
    # A byte in sentencepiece's notation, such as <0x0A>. Bytes from 0x80 are parts of UTF-8 characters.
    byte_match = _BYTE_FALLBACK.fullmatch(piece)
    if byte_match:
        byte = int(byte_match[1], 16)
        return _make_visible(chr(byte)) if byte < 0x80 else f"<0x{byte:02X}>"
    # GPT-2's letters for bytes. Bytes that are no UTF-8, such as half of a character, are decoded to surrogates, and
    # shown as numbers.
    if style == "bytes" and all(char in _BYTE_BY_LETTER for char in piece):
        decoded = bytes(_BYTE_BY_LETTER[char] for char in piece).decode("utf-8", "surrogateescape")
        # `split` keeps the surrogates, as parts of their own. The surrogate of byte b is U+DC00 + b.
        label = ""
        for part in _SURROGATE.split(decoded):
            is_surrogate = _SURROGATE.fullmatch(part) is not None
            label += f"<0x{ord(part) - 0xDC00:02X}>" if is_surrogate else _make_visible(part)
        return label
    # Sentencepiece writes a space as ▁.
    if style == "sentencepiece":
        piece = piece.replace("▁", " ")
    return _make_visible(piece)


def _make_visible(text: str) -> str:
    """Return a text with signs for invisible characters, such as spaces, and for accents without a letter."""
    if text.isascii() and text.isprintable() and " " not in text:
        return text
    visible_parts = []
    for char in text:
        category = unicodedata.category(char)
        if char in _SIGN_BY_SPACE:
            visible_parts.append(_SIGN_BY_SPACE[char])
        elif category in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"} or _INVISIBLE.match(char):
            visible_parts.append(f"<U+{ord(char):04X}>")
        else:
            # A combining mark, such as an accent, is drawn onto the character before it. If no letter of the piece
            # precedes it, it gets a circle to stand on. WordPiece's "##" and numbers such as <U+200B> are no letters.
            has_no_letter = visible_parts in ([], ["#", "#"]) or visible_parts[-1].startswith("<U+")
            is_lone = category[0] == "M" and has_no_letter
            visible_parts.append("◌" + char if is_lone else char)
    return "".join(visible_parts)


# Sources


def read_text(text: str | None, file: Path | None = None, *, may_be_blank: bool = False) -> str:
    """Return one text: the argument itself, or the text of stdin (`-`) or a file.

    Files and stdin are UTF-8, with or without a byte order mark. Line ends become newlines. Newlines at the end are
    removed, as in a shell's `$(...)`, so that `echo hello | … -` gives the same text as `… hello`.

    Args:
        text: The text itself, or "-" for stdin.
        file: A file to read instead; "-" for stdin.
        may_be_blank: Whether a text of spaces and invisible characters alone is accepted.

    Raises:
        AttnscopeError: Neither `text` nor `file` is given, or both; the file cannot be read; bytes are not UTF-8; the
            text holds NUL characters or nothing visible, or is longer than MAX_BYTES.
    """
    # Stdin, a file, or the text itself.
    if text is not None and file is not None:
        raise UsageError("both a text and a file are given", "give one of them")
    if text == "-" or str(file) == "-":
        name = "stdin"
        result = _read_stream(open_stdin(), name)
    elif file is not None:
        name = str(file)
        if file.suffix.lower() in _RECORD_SUFFIXES:
            hint = f"attnscope batch {name} draws each; to read the file as it is, pipe it: - < {name}"
            raise UsageError(f"{name} holds records, and this command reads one text", hint)
        try:
            with file.open("rb") as stream:
                result = _read_stream(stream, name)
        except OSError as error:
            raise AttnscopeError(f"cannot read {name}: {error.strerror or error}") from error
    elif text is not None:
        name = "the text"
        result = text.replace("\r\n", "\n").replace("\r", "\n")
    else:
        raise UsageError("no text is given", "give a text, - for stdin, or --file PATH")

    # Check texts of all sources.
    if not (may_be_blank and is_blank(result)):
        require_text(result, name)
    return result


_RECORD_SUFFIXES = (".jsonl", ".ndjson", ".csv", ".tsv")
"""The suffixes of files with one text per record."""


def open_stdin() -> BinaryIO:
    """Return stdin as a stream of bytes.

    Raises:
        AttnscopeError: This process has no stdin.
    """
    if sys.stdin is None:
        raise AttnscopeError("there is no stdin to read from", "give the text itself, or --file")
    # In a notebook or a test, stdin may be an object with text alone, without `buffer`.
    buffer: BinaryIO | None = getattr(sys.stdin, "buffer", None)
    return buffer or io.BytesIO(sys.stdin.read().encode("utf-8", "surrogatepass"))


_TEXT_SUFFIXES = (".txt", ".md", ".jsonl", ".json", ".csv", ".tsv", ".gz", ".pdf", ".docx", ".html")
"""The suffixes of files with text, including formats that attnscope cannot read."""


def refuse_file_name(text: str, hint: str) -> None:
    """Refuse a text that is the name of a file: the user probably means the text in the file.

    A text is refused if there is a file of this name, or if it has no spaces and ends like a text file's name. `hint`
    says how to pass a file, and how to pass a text that looks like a file name.
    """
    try:
        is_file = Path(text).is_file()
    except OSError:  # the text is too long for a file name
        return
    if is_file:
        require_plain_text(text, f"the text {text!r} names a file that")
        raise UsageError(f"the text {text!r} is the name of a file", hint)
    # There is no such file. A text with spaces is not taken for a name.
    if any(letter.isspace() for letter in text):
        return
    if text.lower().endswith(_TEXT_SUFFIXES):
        raise UsageError(f"the text {text!r} is the name of a file that is not there", hint)


def require_text(text: str, name: str = "the text") -> None:
    """Refuse a text that is blank, has NUL characters, or is not valid Unicode."""
    # Python decodes command-line bytes that are not UTF-8 to lone surrogates, which cannot be encoded.
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
    """Return whether a text is empty, or has only spaces, control characters (Cc) and format characters (Cf)."""
    return all(char.isspace() or unicodedata.category(char) in {"Cc", "Cf"} for char in text)


def make_too_long_message(name: str) -> tuple[str, str]:
    """Return the message for a text of more than MAX_BYTES, and its hint."""
    return (
        f"{name} is too long for one text: more than {MAX_BYTES:,} bytes",
        "split it into lines or paragraphs",
    )


_FORMATS_BY_MAGIC = {
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
"""A pattern for the first bytes of each format that is no plain text → what such a file is, and a hint."""


def find_other_format(start: bytes) -> tuple[str, str] | None:
    """Return what a file is by its first bytes, such as "a picture, not text", and a hint; None = maybe UTF-8 text."""
    for magic, format_and_hint in _FORMATS_BY_MAGIC.items():
        if re.match(magic, start, re.DOTALL):
            return format_and_hint
    return None


def require_plain_text(path: str, subject: str) -> None:
    """Refuse a file whose first bytes show that it is no plain text. A file that cannot be read is not refused here.

    `subject` begins the message, which goes on with " is a PDF, not plain text", for example.
    """
    if not Path(path).is_file():
        return
    with contextlib.suppress(OSError), Path(path).open("rb") as file:
        format_and_hint = find_other_format(file.read(16))
        if format_and_hint is not None:
            format_name, hint = format_and_hint
            raise UsageError(f"{subject} is {format_name}", hint)


def _read_stream(stream: BinaryIO, name: str) -> str:
    """Return the text of a stream of UTF-8. Line ends become newlines, and newlines at the end are removed.

    Messages call the stream `name`.
    """
    # Read one byte more than is allowed, to see whether there is more.
    raw = stream.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise AttnscopeError(*make_too_long_message(name))
    format_and_hint = find_other_format(raw)
    if format_and_hint is not None:
        format_name, hint = format_and_hint
        raise AttnscopeError(f"{name} is {format_name}", hint)
    try:
        decoded = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise AttnscopeError(
            f"{name} is not UTF-8: byte 0x{raw[error.start]:02X} at offset {error.start}, line {line}",
            "convert it, for example: iconv -f ISO-8859-1 -t UTF-8",
        ) from error
    return decoded.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").rstrip("\n")


_MAX_SLUG_CHARACTERS = 40
"""The most characters of a name that `slug` returns."""


def slug(text: str) -> str:
    """Return a file name made from a text, such as "the-cat-sat": a-z, 0-9 and inner hyphens, 1 to 40 characters.

    If no letter or digit is left, it is "text". A long name is cut between words, if possible.
    """
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    words = re.findall(r"[a-z0-9]+", plain.replace("'", ""))
    name = "-".join(words)
    if len(name) > _MAX_SLUG_CHARACTERS:
        # Cut before the last hyphen. One character more than fits shows whether a word ends exactly at the limit. If
        # the first word alone is too long, there is no hyphen, and the word is cut.
        whole_words, _, _ = name[: _MAX_SLUG_CHARACTERS + 1].rpartition("-")
        name = whole_words or name[:_MAX_SLUG_CHARACTERS]
    return name or "text"
