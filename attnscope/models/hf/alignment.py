"""Where the pieces of a tokenizer that keeps no offsets stand in their text. Ours."""

import unicodedata
from collections.abc import Sequence

Spans = list[tuple[int, int]]


def align(text: str, pieces: Sequence[str], special: Sequence[bool], unknown: str | None) -> Spans | None:
    """(first, last + 1) of each piece in the text, (0, 0) for special ones; None if they cannot be found.

    Each piece is sought where the one before it ended, white space passed over: as it is, then without marks of word
    pieces and spaces, compared without case and accents. An unknown piece takes the text up to the next known one.
    """
    spans = _align_bytes(text, pieces, special)
    return spans if spans is not None else _align_characters(text, pieces, special, unknown)


def _align_bytes(text: str, pieces: Sequence[str], special: Sequence[bool]) -> Spans | None:
    """For vocabularies of single bytes (ByT5): piece i is byte i."""
    own = [piece for piece, added in zip(pieces, special, strict=True) if not added]
    if not own or not all(len(piece) == 1 and ord(piece) < 256 for piece in own):
        return None
    if bytes(map(ord, own)) != text.encode():
        return None
    places = iter([i for i, char in enumerate(text) for _ in char.encode()])
    return [(0, 0) if added else (place := next(places), place + 1) for added in special]


def _align_characters(text: str, pieces: Sequence[str], special: Sequence[bool], unknown: str | None) -> Spans | None:
    folded, origin = _fold(text)
    place = 0
    spans: Spans = []
    waiting: int | None = None
    for i, (piece, added) in enumerate(zip(pieces, special, strict=True)):
        if not added and piece == unknown:
            if waiting is not None:
                return None
            waiting = i
        if added or piece == unknown:
            spans.append((0, 0))
            continue
        bare = _fold(_strip_marks(piece))[0].strip()
        while place < len(folded) and folded[place].isspace():
            place += 1
        if not bare:
            spans.append((0, 0))
            continue
        if waiting is not None:
            start = folded.find(bare, place + 1)
            if start < 0:
                return None
            end = len(folded[:start].rstrip())
            spans[waiting] = (origin[place], origin[end - 1] + 1)
            place = start
            waiting = None
        elif not folded.startswith(bare, place):
            return None
        spans.append((origin[place], origin[place + len(bare) - 1] + 1))
        place += len(bare)
    rest = folded[place:].strip()
    if waiting is not None and rest:
        start = place + (len(folded[place:]) - len(folded[place:].lstrip()))
        spans[waiting] = (origin[start], origin[start + len(rest) - 1] + 1)
    elif rest:
        return None
    return spans


def _fold(text: str) -> tuple[str, list[int]]:
    """Return a text without case and accents, and the place in it that each character came from."""
    folded = []
    origin = []
    for i, char in enumerate(text):
        for part in unicodedata.normalize("NFKD", char).casefold():
            if not unicodedata.combining(part):
                folded.append(part)
                origin.append(i)
    return "".join(folded), origin


def _strip_marks(piece: str) -> str:
    """Return a piece without the marks of WordPiece, SentencePiece and BPE vocabularies."""
    if len(piece) > 2:
        piece = piece.removeprefix("##").removesuffix("@@")
    return piece.removesuffix("</w>").replace("▁", " ").replace("Ġ", " ")
