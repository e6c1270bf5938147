"""Cut a corpus into blocks, long texts into chunks, and chunks into batches; and count the tokens of a corpus.

Every cut depends on the texts alone.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
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
"""Tokenises a text, special tokens included: `encode` of a model's tokenizer."""

BLOCK = 256
"""Most texts in a block. Two runs agree bit for bit only where this, BLOCK_CHARACTERS and TOKEN_BUDGET agree."""

BLOCK_CHARACTERS = 100_000
"""Characters after which a block ends, however few its texts are: tokens of a block are in memory together, and so are
the sums of texts of which chunks are to come. Of texts of 330 words that is one block for 25,000 tokens."""

TOKEN_BUDGET = 1024
"""Tokens in a batch, padding included. A MiniLM forward of 4096 is no faster on a processor, and takes three times the
memory. With 2048 a study of texts of 330 words holds 448 MB at its peak instead of 427; every measure on texts of 25
tokens would take 1.16 instead of 1.23 times as long as a forward (one core)."""


@dataclass(frozen=True)
class Block:
    """Hold a run of consecutive texts, numbered from 0; its end depends on the texts alone."""

    index: int
    texts: tuple[CorpusText, ...]


def blocks(texts: Iterable[CorpusText], n: int = BLOCK) -> Iterator[Block]:
    """Cut a corpus into blocks of consecutive texts.

    A block ends with its n-th text, or with the one with which it reaches BLOCK_CHARACTERS.
    """
    for index, run in enumerate(runs(texts, n, lambda text: text.n_characters)):
        yield Block(index, run)


def runs(texts: Iterable[T], n: int, n_characters: Callable[[T], int]) -> Iterator[tuple[T, ...]]:
    """Cut texts of any kind where `blocks` does: runs of at most n texts."""
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
    """Hold a text, or the part of one that a model takes at once.

    Attributes:
        text_index: The index of the text in the corpus; the sums of its chunks are added up to sums of the text.
        number: Its number among the `n_chunks` of the text, from 0.
        n_chunks: How many chunks the text has, at least 1.
        tokens: Its tokens, with the special ones of the text at both ends.
        n_opening: How many special tokens stand at its start, as at that of each chunk.
        n_repeated: How many of its tokens, after those, were in the chunk before it as well.
        n_queries: How many tokens all chunks of the text have, the repeated ones apart.
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
        """Return a mask (token,) of the tokens that the chunk before it held too: they are context and count once."""
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
    """Cut a text that is too long into chunks; one that is not stays whole.

    The special tokens at the start of the text and those at its end stand at the ends of each chunk.

    Args:
        tokens: The text. Without any token there is no chunk.
        text_index: Its index in the corpus.
        limit: How many tokens the model takes, special ones included; None = any number.
        chunk: How many tokens a chunk has at most, special ones included; None = `limit`.
        stride: How many tokens further the next chunk begins; None = as many as a chunk holds besides the special
            ones, so that no token comes twice. With less, tokens keep a context at the cuts: see `Chunk.repeated`.

    Raises:
        AttnscopeError: A chunk has more tokens than the model takes, or no room besides the special ones; the stride
            leaves tokens out, or is below 1.
    """
    size = limit if chunk is None else chunk
    if size is not None and limit is not None and size > limit:
        raise AttnscopeError(f"chunks of {size} tokens are too long", f"the model takes at most {limit}")
    # Ordinary tokens are those from first to stop - 1; special tokens at both ends go into every chunk.
    ordinary = np.flatnonzero(~tokens.special)
    first = int(ordinary[0]) if len(ordinary) else 0
    stop = int(ordinary[-1]) + 1 if len(ordinary) else len(tokens)
    n_ends = first + len(tokens) - stop
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
    # An empty text has no chunk; one that fits stays whole.
    if not len(tokens):
        return []
    if room is None or stop - first <= room:
        return [Chunk(text_index, 0, 1, tokens, n_queries=len(tokens))]
    # Cut the ordinary tokens every `step`; neighbouring chunks share room - step of them.
    step = stride or room
    starts = range(first, stop - room + step, step)
    opening = np.arange(first)
    closing = np.arange(stop, len(tokens))
    parts = []
    for number, start in enumerate(starts):
        inner = np.arange(start, min(start + room, stop))
        part = Chunk(
            text_index,
            number,
            len(starts),
            tokens.take(np.concatenate([opening, inner, closing])),
            n_opening=first,
            n_repeated=room - step if number else 0,
            n_queries=stop - first + len(starts) * n_ends,
        )
        parts.append(part)
    return parts


def batches(parts: Iterable[Chunk], budget: int = TOKEN_BUDGET) -> list[tuple[Chunk, ...]]:
    """Sort the chunks of a block by length and cut them into batches of at most `budget` tokens, padding included.

    Ascending; chunks of one length in the order of the corpus. A chunk longer than the budget is a batch of its own.
    Depends on nothing but the chunks.
    """
    batch_parts: list[list[Chunk]] = []
    # Sorting by length keeps padding small.
    for part in sorted(parts, key=lambda part: (len(part), part.text_index, part.number)):
        if batch_parts and (len(batch_parts[-1]) + 1) * len(part) <= budget:
            batch_parts[-1].append(part)
        else:
            batch_parts.append([part])
    return [tuple(batch) for batch in batch_parts]


def block_batches(
    block: Block,
    encode: Encode,
    *,
    limit: int | None = None,
    chunk: int | None = None,
    stride: int | None = None,
    budget: int = TOKEN_BUDGET,
    special_ids: Iterable[int] = (),
) -> list[tuple[Chunk, ...]]:
    """Tokenise the texts of a block, cut those that are too long, and batch all chunks.

    See `chunks` and `batches`; `special_ids` are the special tokens of texts that come as numbers.
    """
    special = frozenset(special_ids)
    parts: list[Chunk] = []
    for text in block.texts:
        tokens = tokens_of(text, encode, special)
        parts += chunks(tokens, text.index, limit=limit, chunk=chunk, stride=stride)
    return batches(parts, budget)


def tokens_of_ids(ids: Sequence[int], special_ids: Iterable[int] = ()) -> Tokens:
    """Build tokens from numbers alone, labelled `<7>`; text, offsets and words are not known."""
    special = frozenset(special_ids)
    return build_tokens(
        "",
        ids=ids,
        pieces=[f"<{number}>" for number in ids],
        offsets=None,
        special=[number in special for number in ids],
        style="plain",
    )


def tokens_of(text: CorpusText, encode: Encode, special: frozenset[int]) -> Tokens:
    """Return the tokens of a text or a pair of texts, whether it came as such or as numbers."""
    if text.ids is not None:
        return tokens_of_ids(text.ids, special)
    if text.is_chat:
        return encode(text.text or "", is_whole=True)
    texts = [text.text or ""]
    if text.pair is not None:
        texts.append(text.pair)
    return encode(*texts)


def count_tokens(
    texts: Iterable[CorpusText],
    encode: Encode,
    special_ids: Iterable[int] = (),
    tell: Callable[[int, int], None] | None = None,
) -> NDArray[np.int64]:
    """Count the tokens of a corpus, special ones left out, in one pass and constant memory.

    Args:
        texts: The corpus.
        encode: Tokenises a text.
        special_ids: The special tokens of texts that come as numbers.
        tell: Called after each text with the number of texts and of tokens so far.

    Returns:
        How often each token occurs, by its number; as long as the largest number that was seen needs, at least 1.
    """
    counts: Counter[int] = Counter()
    special = frozenset(special_ids)
    n_tokens = 0
    for number, text in enumerate(texts, 1):
        tokens = tokens_of(text, encode, special)
        counts.update(tokens.ids[~tokens.special].tolist())
        n_tokens += len(tokens)
        if tell is not None:
            tell(number, n_tokens)
    by_number = np.zeros(max(counts, default=0) + 1, np.int64)
    by_number[list(counts)] = list(counts.values())
    return by_number
