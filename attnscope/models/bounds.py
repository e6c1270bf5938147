"""What a model cannot read: texts that are too long, and numbers outside its vocabulary."""

from typing import TYPE_CHECKING, Any

from attnscope.errors import AttnscopeError
from attnscope.models.model import ModelInfo

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


def require_length(info: ModelInfo, n_tokens: int) -> None:
    """Refuses texts over a model's limit."""
    if info.max_tokens is not None and n_tokens > info.max_tokens:
        raise AttnscopeError(
            f"a text of {n_tokens} tokens is longer than the {info.max_tokens} that {info.name} takes",
            "give a shorter text",
        )


def require_numbers(info: ModelInfo, numbers: "Tensor | NDArray[Any]", size: int, what: str = "token") -> None:
    """Refuses numbers that a model has no embedding for."""
    low, high = (int(numbers.min()), int(numbers.max())) if 0 not in numbers.shape else (0, 0)
    if low < 0 or high >= size:
        raise AttnscopeError(
            f"{what} number {low if low < 0 else high} is beyond the {size} that {info.name} has",
            "its tokenizer belongs to another model",
        )
