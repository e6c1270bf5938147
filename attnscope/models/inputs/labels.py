"""Inputs that the user makes, as texts: each sequence has the names of its positions in the place of words."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from inspect import BoundArguments
from itertools import accumulate, product
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from attnscope.errors import AttnscopeError, amount
from attnscope.models.model import BareTokenizer
from attnscope.results.tokens import Tokens
from attnscope.text import build_tokens

MOST_NAMES = 2**20
"""More names than any attention has positions."""

Labels = Sequence[Any]
"""Names of positions; (4, 6) = a grid of 4 rows and 6 columns, also as one of the names, in which it stands for all its
places; range(0, 96, 8) = times; a list of such lists = names of each sequence. A name in brackets, "[CLS]", is special.
"""


def read_samples(module: nn.Module, inputs: Any) -> list[BoundArguments]:
    """Bind inputs to the arguments of a forward: a tensor, a tuple, or a mapping by name; a list = several passes.

    Raises:
        AttnscopeError: The inputs do not fit the forward, hold no dense tensor, or hold NaN or infinity.
    """
    several = inputs if isinstance(inputs, list) else [inputs]
    if not several:
        raise AttnscopeError("inputs is an empty list", "give what the model's forward receives")
    return [_read_sample(module, value) for value in several]


def _read_sample(module: nn.Module, value: Any) -> BoundArguments:
    if not isinstance(value, Mapping | Tensor | tuple):
        raise AttnscopeError(
            f"inputs is of type {type(value).__name__}",
            "give a tensor, a tuple of what forward receives, or a mapping by name; a list holds several of these",
        )
    # Bind the value to the forward's arguments, so that a sample has one form however it was passed.
    signature = inspect.signature(module.forward)
    try:
        if isinstance(value, Mapping):
            sample = signature.bind(**value)
        else:
            sample = signature.bind(*(value if isinstance(value, tuple) else (value,)))
    except TypeError as error:
        raise AttnscopeError(
            f"{type(module).__name__}.forward does not take inputs: {error}",
            f"it takes {', '.join(signature.parameters)}",
        ) from error
    tensors = tensors_of(sample)
    if not tensors:
        raise AttnscopeError("inputs holds no tensor", "give what the model's forward receives")
    for tensor in tensors:
        if tensor.is_nested or tensor.is_meta or tensor.layout is not torch.strided:
            raise AttnscopeError(
                "inputs holds a nested, sparse or meta tensor", "give dense ones, and several in a list"
            )
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise AttnscopeError("inputs holds NaN or infinity", "fill the gaps first: attention would be NaN too")
    return sample


def tensors_of(sample: BoundArguments) -> list[Tensor]:
    """Return the tensors of a sample, in order."""
    return [leaf for leaf in tree_leaves(dict(sample.arguments)) if isinstance(leaf, Tensor)]


def change_tensors(sample: BoundArguments, change: Callable[[Tensor], Tensor]) -> BoundArguments:
    """Return the same sample with each tensor changed."""

    def change_leaf(value: Any) -> Any:
        return change(value) if isinstance(value, Tensor) else value

    changed = tree_map(change_leaf, dict(sample.arguments))
    return BoundArguments(sample.signature, changed)


def repeat_sample(sample: BoundArguments, times: int, axis: int) -> BoundArguments:
    """Repeat a sample along the batch axis of its first tensor; a mask may have its batch on axis 0 instead of 1."""
    # Repeat each tensor along the axis that has as many entries as the first one's batch.
    n = tensors_of(sample)[0].shape[axis]

    def repeat(tensor: Tensor) -> Tensor:
        for own in (axis, 1 - axis):
            if tensor.ndim > own and tensor.shape[own] == n:
                return torch.cat([tensor] * times, own)
        return tensor

    return change_tensors(sample, repeat)


def n_named(labels: Labels | None) -> int | None:
    """Return how many positions the first sequence's labels name; None where there are none."""
    return None if labels is None else len(_names(labels[0] if _is_nested(labels) else labels))


def name_positions(labels: Labels | None, sizes: Sequence[tuple[int, int]]) -> list[list[tuple[str, ...]]]:
    """Return the names of each sample's sequences, of which `sizes` has the number and how many positions they have."""
    # One list for all sequences, one per pass, or one per sequence.
    n_sequences = sum(n for n, _ in sizes)
    if labels is None:
        lists: list[Any] = [range(n) for count, n in sizes for _ in range(count)]
    elif not _is_nested(labels):
        lists = [labels] * n_sequences
    elif len(labels) == len(sizes):
        lists = [names for names, (count, _) in zip(labels, sizes, strict=True) for _ in range(count)]
    else:
        lists = list(labels)
    if len(lists) != n_sequences:
        raise AttnscopeError(
            f"labels holds {amount(len(lists), 'list')}, and the inputs are {amount(n_sequences, 'sequence')}",
            "give one list of names for all, one per pass, or one per sequence",
        )
    # Deal the names out to the samples, and check that each sequence has as many names as positions.
    waiting = map(_names, lists)
    rows = [[next(waiting) for _ in range(count)] for count, _ in sizes]
    for row, (_, n) in zip(rows, sizes, strict=True):
        wrong = [names for names in row if len(names) != n]
        if wrong:
            raise AttnscopeError(
                f"labels name {amount(len(wrong[0]), 'position')}, and attention has {n}",
                f"give {n} names; a grid such as (4, 6) stands for 24",
            )
    return rows


def _is_nested(labels: Labels) -> bool:
    return isinstance(labels, list) and bool(labels) and isinstance(labels[0], list)


def _names(labels: Labels) -> tuple[str, ...]:
    """Return the names that labels stand for: strings, numbers and grids, at most MOST_NAMES."""
    if isinstance(labels, str) or not isinstance(labels, Sequence):
        raise AttnscopeError(
            f"labels is of type {type(labels).__name__}", "give a list of names, or a grid such as (4, 6)"
        )
    names: list[str] = []
    # A grid stands for all its places, row by row; the count is checked before names are made.
    for label in [labels] if _is_grid(labels) else labels:
        if len(names) + (prod(label) if _is_grid(label) else 1) > MOST_NAMES:
            raise AttnscopeError(f"labels name more than {MOST_NAMES:,} positions", "give one label per position")
        if _is_grid(label):
            names += [",".join(map(str, place)) for place in product(*map(range, label))]
        elif isinstance(label, str | int | float) and str(label).strip():
            names.append(" ".join(str(label).split()))
        else:
            raise AttnscopeError(f"labels holds {label!r}, which names no position", "give names, numbers or grids")
    return tuple(names)


def _is_grid(label: Any) -> bool:
    return isinstance(label, tuple) and bool(label) and all(isinstance(size, int) and size > 0 for size in label)


class LabelTokenizer(BareTokenizer):
    """Knows the sequences of the inputs by their numbers, which are its texts, and no other texts.

    Attributes:
        places: Sample and sequence in it, by the sequence's token numbers.
    """

    name = "none: labels name the positions"

    def __init__(self, rows: Sequence[Sequence[tuple[str, ...]]]) -> None:
        self.places: dict[tuple[int, ...], tuple[int, int]] = {}
        self._tokens: list[Tokens] = []
        self._spelled: list[str] = []
        numbers: dict[str, int] = {}
        for sample, row in enumerate(rows):
            for sequence, names in enumerate(row):
                for name in names:
                    if name not in numbers:
                        numbers[name] = self._spell(name)
                ids = [numbers[name] for name in names]
                # A sequence is known again by its numbers: where another has them too, this one's first is its own.
                if tuple(ids) in self.places:
                    ids[0] = self._spell(names[0])
                self.places[tuple(ids)] = (sample, sequence)
                self._tokens.append(_tokens_of(names, ids))
        self.texts = tuple(map(str, range(len(self._tokens))))

    def _spell(self, name: str) -> int:
        """Return a new number for a name."""
        self._spelled.append(name)
        return len(self._spelled) - 1

    def spell(self, number: int) -> str:
        """Return the label of a number."""
        return self._spelled[number]

    def encode(self, text: str, pair: str | None = None) -> Tokens:
        """Return the positions of a sequence, by its number, such as "0"."""
        if pair is not None or text not in self.texts:
            raise AttnscopeError(
                "only the inputs that the model came with can be studied, and this is none of them",
                f"give the number of a sequence, from 0 to {len(self.texts) - 1}",
            )
        return self._tokens[int(text)]


def _tokens_of(names: Sequence[str], ids: Sequence[int]) -> Tokens:
    ends = accumulate(len(name) + 1 for name in names)
    spans = [(end - len(name) - 1, end - 1) for end, name in zip(ends, names, strict=True)]
    special = [name.startswith("[") and name.endswith("]") for name in names]
    return build_tokens(" ".join(names), ids=ids, pieces=names, offsets=spans, special=special, style="plain")
