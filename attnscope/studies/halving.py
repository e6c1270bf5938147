"""Run batches that may not fit into the memory of the device, in halves where they do not."""

from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, TypeVar

from attnscope.errors import AttnscopeError, is_out_of_memory
from attnscope.models.model import MixedLengthsError

R = TypeVar("R")


class BatchHalver:
    """Run a function on batches, and halve the batches that do not fit into the memory of the device.

    Later batches of that size are halved at once. A batch of texts that must not be padded to one length is halved too:
    the model then raises `MixedLengthsError`. Halving changes results by no more than rounding: torch may sum batches
    of another shape in another order.

    Attributes:
        max_batch_tokens: The most tokens of a batch of several texts, padding included; None = no limit yet.
    """

    def __init__(self) -> None:
        self.max_batch_tokens: int | None = None

    def run(
        self, batch: Sequence[Any], function: Callable[[Any], R]
    ) -> Iterator[tuple[Sequence[Any], R]]:
        """Call a function with a batch, or with smaller batches that fit; yield each of these and its result.

        Raises:
            AttnscopeError: A single text does not fit.
        """
        n_tokens = padded_size(batch)
        is_single = len(batch) < 2
        # Try the whole batch, unless a batch of this size did not fit before. A single text is always tried.
        if is_single or self.max_batch_tokens is None or n_tokens <= self.max_batch_tokens:
            is_memory_full = False
            try:
                result = function(batch)
            except MixedLengthsError:
                if is_single:
                    raise
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                is_memory_full = True
            else:
                yield batch, result
                return
            # Free memory here, after `except`: until then the exception's frames hold the tensors that filled it.
            if is_memory_full:
                _empty_cache()
                self.max_batch_tokens = max(1, n_tokens // 2)
        if is_single:
            raise AttnscopeError(
                f"one text of {n_tokens:,} tokens does not fit into memory",
                "cut it into chunks (--chunk), choose fewer layers, --dtype bfloat16, or --device cpu",
            )
        # Run both halves, which are halved in turn if they do not fit either.
        middle = len(batch) // 2
        for half in (batch[:middle], batch[middle:]):
            yield from self.run(half, function)


def padded_size(batch: Sequence[Sized]) -> int:
    """Return how many tokens a batch has, padding included. `len` of an item of the batch is its number of tokens."""
    return len(batch) * max(map(len, batch), default=0)


def _empty_cache() -> None:
    """Make torch release the device memory that it caches for later tensors."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    elif torch.backends.mps.is_available():
        torch.mps.empty_cache()
