"""Words and punctuation marks as numbers: the tokenizer of the glass boxes."""

import hashlib
import sys
import unicodedata
from collections.abc import Iterator
from functools import lru_cache

from attnscope.models.model import Tokenizer
from attnscope.results.tokens import Tokens
from attnscope.text import build_tokens, is_punctuation, word_spans

BOS, REST, SEP, EOS = range(4)
SPECIAL = ("[BOS]", "[REST]", "[SEP]", "[EOS]")
FIRST_PUNCTUATION = 8
FIRST_WORD = FIRST_PUNCTUATION + sys.maxunicode + 1
CODE_BITS = 22
VOCABULARY = 1 << CODE_BITS


class OwnTokenizer(Tokenizer):
    """Words and punctuation marks, each with a fixed number: [BOS] [REST] text [EOS], or … text [SEP] text [EOS].

    Words are those of `text.word_spans`. Case and Unicode composition make no difference to a token's number; its
    label is the text itself. A punctuation mark's number is 8 + its code point; a word's is a hash (BLAKE2b) into the
    rest of the 2**22 numbers.
    """

    name = "words and punctuation marks, hashed to 4,194,304 numbers"

    def ordinary_ids(self) -> list[int]:
        """Return the numbers of words, about one in a thousand: all would be millions."""
        return list(range(FIRST_WORD, VOCABULARY, 997))

    def spell(self, number: int) -> str:
        """Return "": a number is a hash, and its word is not known."""
        return ""

    def encode(self, text: str, pair: str | None = None) -> Tokens:
        """Tokenise a text, or a pair of texts, with the special tokens that the model expects."""
        # One row per token: number, piece, offsets, whether it is special, and segment.
        rows = [_special_row(BOS, 0), _special_row(REST, 0), *_split(text, 0)]
        if pair is not None:
            rows += [_special_row(SEP, 0), *_split(pair, 1)]
        rows.append(_special_row(EOS, 0 if pair is None else 1))
        ids, pieces, offsets, special, segments = zip(*rows, strict=True)
        return build_tokens(
            text,
            ids=ids,
            pieces=pieces,
            offsets=offsets,
            special=special,
            segments=segments,
            pair=pair,
            style="plain",
        )


_Row = tuple[int, str, tuple[int, int], bool, int]


def _special_row(number: int, segment: int) -> _Row:
    return number, SPECIAL[number], (0, 0), True, segment


def _split(text: str, segment: int) -> Iterator[_Row]:
    for start, end in word_spans(text):
        word = text[start:end]
        yield _number(word), word, (start, end), False, segment


@lru_cache(maxsize=2**16)
def _number(word: str) -> int:
    if len(word) == 1 and is_punctuation(word):
        return FIRST_PUNCTUATION + ord(word)
    # Case folding can undo composition, so that words are composed before and after it.
    plain = unicodedata.normalize("NFC", unicodedata.normalize("NFC", word).casefold())
    # A 64-bit hash is so wide that its remainder favours no number.
    digest = hashlib.blake2b(plain.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return FIRST_WORD + int.from_bytes(digest, "little") % (VOCABULARY - FIRST_WORD)
