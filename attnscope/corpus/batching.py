"""Cut a corpus into blocks, long texts into chunks, and chunks into batches; and count the tokens of a corpus.

A *block* is a run of consecutive texts; workers share the work block by block. A *chunk* is a part of a text that fits
into the model's context. A *batch* holds chunks of similar length. All cuts depend on the texts alone.
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
"""Tokenises a text or a pair of texts, and adds special tokens: the `encode` of a model's tokenizer.

With is_whole=True the text has its special tokens already, and none are added.
"""

BLOCK = 256
"""The most texts of a block. Results are equal bit for bit only if this, MAX_BLOCK_CHARACTERS and TOKEN_BUDGET are."""

MAX_BLOCK_CHARACTERS = 100_000
"""A block also ends with the text that makes it this long, because all tokens of a block are in memory together. With
texts of 330 words a block has about 25,000 tokens."""

TOKEN_BUDGET = 1024
"""The most tokens of a batch, padding included. Larger batches save little time and take more memory: MiniLM is no
faster on a processor with 4096 tokens, and takes three times the memory."""


@dataclass(frozen=True)
class TextBlock:
    """Hold consecutive texts of a corpus, and the number of the block, from 0."""

    index: int
    texts: tuple[CorpusText, ...]


def cut_into_blocks(texts: Iterable[CorpusText], n: int = BLOCK) -> Iterator[TextBlock]:
    """Cut a corpus into blocks of consecutive texts.

    A block ends with its n-th text, or with the text that brings it to MAX_BLOCK_CHARACTERS, whichever comes first.
    """
    for index, run in enumerate(cut_into_runs(texts, n, lambda text: text.n_characters)):
        yield TextBlock(index, run)


def cut_into_runs(
    texts: Iterable[T], n: int, n_characters: Callable[[T], int]
) -> Iterator[tuple[T, ...]]:
    """Cut texts of any type into runs by the rule of `cut_into_blocks`; `n_characters` returns the length of a text."""
    run: list[T] = []
    characters = 0
    for text in texts:
        run.append(text)
        characters += n_characters(text)
        if len(run) == n or characters >= MAX_BLOCK_CHARACTERS:
            yield tuple(run)
            run = []
            characters = 0
    if run:
        yield tuple(run)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Hold a whole text, or a part of a text that is too long for the model.

    Attributes:
        text_index: The index of the text in the corpus.
        number: The index of the chunk in its text, from 0.
        n_chunks: The number of chunks of the text, at least 1.
        tokens: The tokens of the chunk. Each chunk begins and ends with the special tokens that the text begins and
            ends with.
        n_opening: The number of special tokens at the start of the chunk; 0 for a whole text, which repeats nothing.
        n_repeated: The number of tokens, after the opening ones, that also end the previous chunk. They are context.
        n_text_tokens: The number of tokens of all chunks of the text together; repeated tokens count once.
    """

    text_index: int
    number: int
    n_chunks: int
    tokens: Tokens
    n_opening: int = 0
    n_repeated: int = 0
    n_text_tokens: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_repeated(self) -> NDArray[np.bool_]:
        """Return which tokens are repeated from the previous chunk, and must not be counted twice, (token,)."""
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
    """Cut a text into chunks if it is too long. A shorter text becomes one chunk; a text without tokens has no chunks.

    Every chunk begins with the special tokens at the start of the text, and ends with those at its end.

    Args:
        tokens: The tokens of the text.
        text_index: Its index in the corpus.
        limit: The most tokens that the model takes, with special tokens; None = no limit.
        chunk: The most tokens of a chunk, with special tokens; None = `limit`.
        stride: The distance between the starts of two chunks, in tokens; None = the number of tokens of a full chunk
            without special tokens. With a smaller stride a chunk repeats the end of the previous chunk, as context.

    Raises:
        AttnscopeError: A chunk has more tokens than the model takes, or no room besides special tokens; or the stride
            is below 1, or so large that tokens would be skipped.
    """
    # Refuse chunks that the model does not take, or that have no room for text.
    size = limit if chunk is None else chunk
    if size is not None and limit is not None and size > limit:
        raise AttnscopeError(f"chunks of {size} tokens are too long", f"the model takes at most {limit}")
    # The tokens from `n_opening` to `stop` - 1 are cut. The n_special tokens before and after them go into every chunk.
    n_opening = 0
    stop = len(tokens)
    ordinary = np.flatnonzero(~tokens.special)
    if len(ordinary):
        n_opening = int(ordinary[0])
        stop = int(ordinary[-1]) + 1
    n_special = n_opening + len(tokens) - stop
    # The most tokens of a chunk without special tokens; None = no limit.
    max_ordinary = None if size is None else size - n_special
    if max_ordinary is not None and max_ordinary < 1:
        raise AttnscopeError(
            f"chunks of {size} tokens have no room for text besides {n_special} special tokens",
            "choose a larger --chunk",
        )
    if stride is not None and (stride < 1 or (max_ordinary is not None and stride > max_ordinary)):
        hint = "it is at least 1"
        if max_ordinary is not None:
            hint += f" and at most {max_ordinary}, for special tokens take {n_special}"
        raise AttnscopeError(f"a stride of {stride} tokens does not fit", hint)
    # A whole text that fits is one chunk.
    if not len(tokens):
        return []
    if max_ordinary is None or stop - n_opening <= max_ordinary:
        return [Chunk(text_index, 0, 1, tokens, n_text_tokens=len(tokens))]
    # A chunk begins every `step` tokens and has max_ordinary tokens, so neighbours share max_ordinary - step tokens.
    # The last chunk is the first that reaches `stop`: it starts at `stop` - max_ordinary, or less than one step later.
    step = stride or max_ordinary
    starts = range(n_opening, stop - max_ordinary + step, step)
    opening = np.arange(n_opening)
    closing = np.arange(stop, len(tokens))
    text_chunks = []
    for number, start in enumerate(starts):
        inner = np.arange(start, min(start + max_ordinary, stop))
        text_chunk = Chunk(
            text_index,
            number,
            len(starts),
            tokens.take(np.concatenate([opening, inner, closing])),
            n_opening=n_opening,
            n_repeated=max_ordinary - step if number else 0,
            # Each ordinary token counts once, and special tokens count in each chunk.
            n_text_tokens=stop - n_opening + len(starts) * n_special,
        )
        text_chunks.append(text_chunk)
    return text_chunks


def make_batches(text_chunks: Iterable[Chunk], budget: int = TOKEN_BUDGET) -> list[list[Chunk]]:
    """Group the chunks of a block into batches of at most `budget` tokens with padding, the shortest chunks first.

    Chunks of equal length stay in the order of the corpus. A chunk longer than the budget is a batch of its own.
    """
    chunk_batches: list[list[Chunk]] = []
    # Sort by length, because chunks of similar length need little padding.
    for text_chunk in sorted(text_chunks, key=lambda item: (len(item), item.text_index, item.number)):
        if chunk_batches and (len(chunk_batches[-1]) + 1) * len(text_chunk) <= budget:
            chunk_batches[-1].append(text_chunk)
        else:
            chunk_batches.append([text_chunk])
    return chunk_batches


def batch_block(
    block: TextBlock,
    encode: Encode,
    *,
    limit: int | None = None,
    chunk: int | None = None,
    stride: int | None = None,
    budget: int = TOKEN_BUDGET,
    special_ids: Collection[int] = (),
) -> list[list[Chunk]]:
    """Tokenise the texts of a block, cut texts that are too long, and group all chunks into batches.

    See `chunks` and `make_batches` for the arguments, and `tokens_of` for `special_ids`.
    """
    text_chunks: list[Chunk] = []
    for text in block.texts:
        tokens = tokens_of(text, encode, special_ids)
        text_chunks += chunks(tokens, text.index, limit=limit, chunk=chunk, stride=stride)
    return make_batches(text_chunks, budget)


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
        special_ids: The ids of special tokens. They are used only for a text that is given as token ids.
    """
    if text.ids is not None:
        return tokens_of_ids(text.ids, special_ids)
    # A chat template has already written the special tokens, so none are added.
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
    report_progress: Callable[[int, int], None] | None = None,
) -> NDArray[np.int64]:
    """Count how often each token occurs in a corpus, in one pass and constant memory. Special tokens are not counted.

    Args:
        texts: The corpus.
        encode: Tokenises a text or a pair.
        special_ids: See `tokens_of`.
        report_progress: Called after each text with the numbers of texts and of tokens so far, special tokens included.

    Returns:
        The number of occurrences of each token, by id, (largest id + 1,). A corpus without texts gives a single 0.
    """
    count_of_id: Counter[int] = Counter()
    n_tokens = 0
    for n_texts, text in enumerate(texts, 1):
        tokens = tokens_of(text, encode, special_ids)
        count_of_id.update(tokens.ids[~tokens.special].tolist())
        n_tokens += len(tokens)
        if report_progress is not None:
            report_progress(n_texts, n_tokens)
    # From id -> count to an array by id.
    counts = np.zeros(max(count_of_id, default=0) + 1, np.int64)
    counts[list(count_of_id)] = list(count_of_id.values())
    return counts
