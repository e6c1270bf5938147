"""Memory: given back to the system, so that long studies do not grow; and batches halved that do not fit."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence, Sized
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from attnscope.errors import AttnscopeError, is_out_of_memory
from attnscope.host import is_claimed
from attnscope.models.model import MixedLengthsError

if TYPE_CHECKING:
    import ctypes

    from torch import Tensor

    from attnscope.core.attention.seam import AttentionCall, Probe

B = TypeVar("B")
R = TypeVar("R")


LONG = 64
"""Tokens from which a text's layers leave gaps that are worth closing one by one. Below, that takes a third of the
time (texts of 25 tokens), and gaps are small."""

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # what glibc's malloc.h calls M_MMAP_THRESHOLD and M_TRIM_THRESHOLD
_APART_FROM = 2 << 20
"""Bytes from which the arrays of long texts lie outside the heap. From 1 MiB on, the activations of a small model do
too, and their pages cost a tenth to a third more time; with 2 MiB the time is the same."""
_NEVER_APART = 32 << 20  # the most that glibc itself goes up to


def _glibc() -> ctypes.CDLL | None:
    """The C library where it is glibc, whose heap can be told what to keep, and may be; None elsewhere."""
    return _load_glibc() if is_claimed() else None


@cache
def _load_glibc() -> ctypes.CDLL | None:
    import ctypes

    with contextlib.suppress(OSError, TypeError):
        library = ctypes.CDLL(None)
        if hasattr(library, "malloc_trim") and hasattr(library, "mallopt"):
            return library
    return None


def give_memory_back() -> None:
    """Gives back what batches have freed: glibc keeps it, in pieces that the next batch's other shapes do not fit.

    Without, a process holds four times as much after 90,000 tokens as after 9,000.
    """
    glibc = _glibc()
    if glibc is not None:
        glibc.malloc_trim(0)


def spare_memory(probe: Probe, n_tokens: int) -> Probe:
    """A probe for the next batch whose memory does not depend on the batches before it.

    glibc's heap keeps gaps where arrays of other sizes were: a process that has seen many batches takes up to a tenth
    more than one that has seen a few. For long texts large arrays come from the system instead, and what a layer has
    freed is given back after it, which costs them nothing; short ones it would cost a third of the time.

    Args:
        probe: The probe.
        n_tokens: Tokens in the batch's longest text.
    """
    glibc = _glibc()
    if glibc is not None:
        glibc.mallopt(_TRIM_THRESHOLD, 2 * _NEVER_APART)
        glibc.mallopt(_MMAP_THRESHOLD, _NEVER_APART if n_tokens < LONG else _APART_FROM)
    if n_tokens < LONG:
        return probe

    def call_and_trim(call: AttentionCall) -> Tensor:
        output = probe(call)
        give_memory_back()
        return output

    return call_and_trim


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
    give_memory_back()


def physical_bytes() -> int | None:
    """The machine's memory; None where it is not known."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system: the allocation itself will tell
        return None
