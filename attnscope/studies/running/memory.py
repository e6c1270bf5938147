"""Memory: batches that do not fit are halved."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence, Sized
from typing import TypeVar

from attnscope.errors import AttnscopeError, is_out_of_memory
from attnscope.models.model import MixedLengthsError

B = TypeVar("B")
R = TypeVar("R")


class Room:
    """Halves a batch that does not fit into the memory of the device, and later batches of its size.

    It also halves batches of texts that must not be padded together (`MixedLengthsError`), whatever their size.

    Results then agree up to rounding: torch may sum a batch of another shape in another order.

    Attributes:
        tokens: The most tokens that are tried at once from now on, if there are several texts; None = any number.
    """

    def __init__(self) -> None:
        self.tokens: int | None = None

    def each(
        self,
        batch: B,
        do: Callable[[B], R],
        halves: Callable[[B], Sequence[B]],
        size: Callable[[B], int],
        texts_apart: Callable[[B], Sequence[B]] | None = None,
    ) -> Iterator[tuple[B, R]]:
        """Does something with a batch, or with parts of it, and yields each part that fitted, with what came of it.

        Args:
            batch: The batch.
            do: What to do with it. It starts anew if it runs out of memory, so it must add to nothing.
            halves: Its parts; none if it has none. Called after `tokens` was lowered.
            size: Its tokens, padding included.
            texts_apart: The halves of its texts, for texts that must not be padded together; None = `halves` are.

        Raises:
            AttnscopeError: A single text does not fit.
        """
        n_tokens = size(batch)
        parts: Sequence[B] = ()
        if self.tokens is None or n_tokens <= self.tokens or not (parts := halves(batch)):
            try:
                result = self._try(batch, do)
            except MixedLengthsError:
                parts = (texts_apart or halves)(batch)
                if not parts:
                    raise
            else:
                if result is not None:
                    yield batch, result[0]
                    return
                make_room()
                self.tokens = max(1, n_tokens // 2)
                parts = halves(batch)
                if not parts:
                    raise AttnscopeError(
                        f"one text of {n_tokens:,} tokens does not fit into memory",
                        "cut it into chunks (--chunk), choose fewer layers, --dtype bfloat16, or --device cpu",
                    )
        for part in parts:
            yield from self.each(part, do, halves, size, texts_apart)

    @staticmethod
    def _try(batch: B, do: Callable[[B], R]) -> tuple[R] | None:
        # By itself: as long as the exception is there, its frames hold the tensors that filled the memory.
        try:
            return (do(batch),)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        return None


def halving_note(tokens: int) -> str:
    """What a record says of batches that were halved to so many tokens."""
    return f"Memory did not suffice for whole batches: they were halved, to at most {tokens:,} tokens at once."


def halves(batch: Sequence[B]) -> Sequence[Sequence[B]]:
    """The two halves of a sequence, the longer texts of a sorted batch last; none of a single one."""
    middle = len(batch) // 2
    return (batch[:middle], batch[middle:]) if middle else ()


def padded_size(batch: Sequence[Sized]) -> int:
    """How many tokens a batch has, padding included."""
    return len(batch) * max(map(len, batch), default=0)


def make_room() -> None:
    """Gives back what torch keeps of a device's memory for later."""
    torch = sys.modules["torch"]
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()


def physical_bytes() -> int | None:
    """The machine's memory; None where it is not known."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system: the allocation itself will tell
        return None
