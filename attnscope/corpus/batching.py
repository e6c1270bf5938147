"""Cut a corpus into blocks, long texts into chunks, and chunks into batches; and count the tokens of a corpus.

A block is a run of consecutive texts, the unit that workers share. A chunk is a part of a text that the model takes at
once. A batch holds chunks of similar length. Where anything is cut depends on the texts alone.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from attnscope.corpus.texts import CorpusText
from attnscope.errors import AttnscopeError
from attnscope.results.tokens import Tokens
from attnscope.text import build_tokens

T = TypeVar("T")

Encode = Callable[..., Tokens]
"""Tokenises a text or a pair of texts, special tokens included: the `encode` of a model's tokenizer."""

BLOCK = 256
"""The most texts of a block. Two runs agree bit for bit only where this, BLOCK_CHARACTERS and TOKEN_BUDGET agree."""

BLOCK_CHARACTERS = 100_000
"""A block also ends with the text that makes it this long, for the tokens of a block are in memory together. With texts
of 330 words it holds about 25,000 tokens."""

TOKEN_BUDGET = 1024
"""The most tokens of a batch, padding included. Larger batches save little time and take more memory: MiniLM is no
faster on a processor with 4096 tokens, and takes three times the memory."""


@dataclass(frozen=True)
class TextBlock:
    """Hold consecutive texts of a corpus, and the number of the block, from 0."""

    index: int
    texts: tuple[CorpusText, ...]


def blocks(texts: Iterable[CorpusText], n: int = BLOCK) -> Iterator[TextBlock]:
    """Cut a corpus into blocks of consecutive texts.

    A block ends with its n-th text, or with the one with which it reaches BLOCK_CHARACTERS.
    """
    for index, run in enumerate(runs(texts, n, lambda text: text.n_characters)):
        yield TextBlock(index, run)


def runs(texts: Iterable[T], n: int, n_characters: Callable[[T], int]) -> Iterator[tuple[T, ...]]:
    """Cut texts of any type into runs by the rule of `blocks`; `n_characters` returns the length of a text."""
    run: list[T] = []
    characters = 0
    for text in texts:
        run.append(text)
        characters += n_characters(text)
        if len(run) == n or characters >= BLOCK_CHARACTERS:
            yield tuple(run)
            run = []
            characters = 0
    if run:
        yield tuple(run)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Hold a whole text, or a part of a text that is longer than the model takes.

    Attributes:
        text_index: The index of the text in the corpus.
        number: The number of the chunk in its text, from 0.
        n_chunks: How many chunks the text has, at least 1.
        tokens: The tokens of the chunk. Each chunk begins and ends with the special tokens of the text.
        n_opening: How many special tokens a part of a text begins with; 0 for a whole text.
        n_repeated: How many tokens after the opening ones also end the chunk before this one, as context.
        n_queries: How many tokens all chunks of the text have together, where repeated ones count once.
    """

    text_index: int
    number: int
    n_chunks: int
    tokens: Tokens
    n_opening: int = 0
    n_repeated: int = 0
    n_queries: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def repeated(self) -> NDArray[np.bool_]:
        """Return which tokens are repeated from the chunk before, and must not be counted again, (token,)."""
        mask = np.zeros(len(self), np.bool_)
        mask[self.n_opening : self.n_opening + self.n_repeated] = True
        return mask


def chunks(
    tokens: Tokens,
    text_index: int = 0,
    *,
    limit: int | None = None,
    chunk: int | None = None,
    stride: int | None = None,
) -> list[Chunk]:
    """Cut a text that is too long into chunks; a shorter one becomes one chunk, and one without tokens none.

    Every chunk begins with the special tokens at the start of the text, and ends with those at its end.

    Args:
        tokens: The tokens of the text.
        text_index: Its index in the corpus.
        limit: The most tokens that the model takes, special ones included; None = any number.
        chunk: The most tokens of a chunk, special ones included; None = `limit`.
        stride: The distance between the starts of two chunks in tokens; None = as many tokens as a chunk holds besides
            the special ones. With a smaller stride a chunk repeats the end of the one before it, as context.

    Raises:
        AttnscopeError: A chunk has more tokens than the model takes, or no room besides the special ones; the stride
            is below 1, or leaves tokens out.
    """
    # Refuse chunks that the model does not take, or that have no room for text.
    size = limit if chunk is None else chunk
    if size is not None and limit is not None and size > limit:
        raise AttnscopeError(f"chunks of {size} tokens are too long", f"the model takes at most {limit}")
    # What is cut are the tokens from `first` to `stop` - 1; n_ends special tokens around them go into every chunk.
    first = 0
    stop = len(tokens)
    ordinary = np.flatnonzero(~tokens.special)
    if len(ordinary):
        first = int(ordinary[0])
        stop = int(ordinary[-1]) + 1
    n_ends = first + len(tokens) - stop
    # A chunk has room for so many tokens besides the special ones; None = for any number.
    room = None if size is None else size - n_ends
    if room is not None and room < 1:
        raise AttnscopeError(
            f"chunks of {size} tokens have no room for text besides {n_ends} special tokens",
            "choose a larger --chunk",
        )
    if stride is not None and (stride < 1 or (room is not None and stride > room)):
        hint = "it is at least 1"
        if room is not None:
            hint += f" and at most {room}, for special tokens take {n_ends}"
        raise AttnscopeError(f"a stride of {stride} tokens does not fit", hint)
    # Cut nothing if the whole text is one chunk.
    if not len(tokens):
        return []
    if room is None or stop - first <= room:
        return [Chunk(text_index, 0, 1, tokens, n_queries=len(tokens))]
    # A chunk begins every `step` tokens and holds `room` of them, so that two neighbours share room - step.
    step = stride or room
    starts = range(first, stop - room + step, step)
    opening = np.arange(first)
    closing = np.arange(stop, len(tokens))
    pieces = []
    for number, start in enumerate(starts):
        inner = np.arange(start, min(start + room, stop))
        piece = Chunk(
            text_index,
            number,
            len(starts),
            tokens.take(np.concatenate([opening, inner, closing])),
            n_opening=first,
            n_repeated=room - step if number else 0,
            # Each token of the text once, and the special tokens of each chunk.
            n_queries=stop - first + len(starts) * n_ends,
        )
        pieces.append(piece)
    return pieces


def batches(pieces: Iterable[Chunk], budget: int = TOKEN_BUDGET) -> list[list[Chunk]]:
    """Cut the chunks of a block into batches of at most `budget` tokens, padding included, the shortest chunks first.

    Chunks of one length stay in the order of the corpus. A chunk longer than the budget is a batch of its own.
    """
    chunk_batches: list[list[Chunk]] = []
    # Neighbours of similar length need little padding.
    for piece in sorted(pieces, key=lambda piece: (len(piece), piece.text_index, piece.number)):
        if chunk_batches and (len(chunk_batches[-1]) + 1) * len(piece) <= budget:
            chunk_batches[-1].append(piece)
        else:
            chunk_batches.append([piece])
    return chunk_batches


def block_batches(
    block: TextBlock,
    encode: Encode,
    *,
    limit: int | None = None,
    chunk: int | None = None,
    stride: int | None = None,
    budget: int = TOKEN_BUDGET,
    special_ids: Collection[int] = (),
) -> list[list[Chunk]]:
    """Tokenise the texts of a block, cut those that are too long, and put all chunks into batches.

    See `chunks` and `batches` for the arguments, and `tokens_of` for `special_ids`.
    """
    pieces: list[Chunk] = []
    for text in block.texts:
        tokens = tokens_of(text, encode, special_ids)
        pieces += chunks(tokens, text.index, limit=limit, chunk=chunk, stride=stride)
    return batches(pieces, budget)


def tokens_of_ids(ids: Sequence[int], special_ids: Collection[int] = ()) -> Tokens:
    """Build tokens from ids alone, with labels such as `<7>`; their text, offsets and words are not known."""
    return build_tokens(
        "",
        ids=ids,
        pieces=[f"<{token_id}>" for token_id in ids],
        offsets=None,
        special=[token_id in special_ids for token_id in ids],
        style="plain",
    )


def tokens_of(text: CorpusText, encode: Encode, special_ids: Collection[int]) -> Tokens:
    """Return the tokens of a text of a corpus.

    Args:
        text: A text, a pair of texts, or token ids.
        encode: Tokenises a text or a pair.
        special_ids: Which ids are special tokens, where the text came as ids.
    """
    if text.ids is not None:
        return tokens_of_ids(text.ids, special_ids)
    # A chat template has already written the special tokens, so that none are added.
    if text.is_chat:
        return encode(text.text or "", is_whole=True)
    texts = [text.text or ""]
    if text.pair is not None:
        texts.append(text.pair)
    return encode(*texts)


def count_tokens(
    texts: Iterable[CorpusText],
    encode: Encode,
    special_ids: Collection[int] = (),
    tell: Callable[[int, int], None] | None = None,
) -> NDArray[np.int64]:
    """Count how often each token comes in a corpus, in one pass and constant memory; special tokens are not counted.

    Args:
        texts: The corpus.
        encode: Tokenises a text or a pair.
        special_ids: As of `tokens_of`.
        tell: Called after each text with the number of texts and of tokens so far.

    Returns:
        How often each token comes, by id, (largest id + 1,); of no text, (1,).
    """
    count_of_id: Counter[int] = Counter()
    n_tokens = 0
    for n_texts, text in enumerate(texts, 1):
        tokens = tokens_of(text, encode, special_ids)
        count_of_id.update(tokens.ids[~tokens.special].tolist())
        n_tokens += len(tokens)
        if tell is not None:
            tell(n_texts, n_tokens)
    # From id -> count to an array by id.
    counts = np.zeros(max(count_of_id, default=0) + 1, np.int64)
    counts[list(count_of_id)] = list(count_of_id.values())
    return counts
