"""Inputs that the user makes, as texts: each sequence has the names of its positions in the place of words."""

import inspect
from collections.abc import Mapping, Sequence
from inspect import BoundArguments
from itertools import accumulate, product
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

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


def bind_inputs(module: nn.Module, inputs: Any) -> BoundArguments:
    """Bind inputs to the arguments of a forward: a tensor, a tuple, or a mapping by name.

    Raises:
        AttnscopeError: The inputs do not fit the forward, hold no dense tensor, or hold NaN or infinity.
    """
    if not isinstance(inputs, Mapping | Tensor | tuple):
        raise AttnscopeError(
            f"inputs is of type {type(inputs).__name__}",
            "give a tensor, a tuple of what forward receives, or a mapping by name",
        )
    signature = inspect.signature(module.forward)
    positional = (inputs,) if isinstance(inputs, Tensor) else inputs
    try:
        sample = signature.bind(**inputs) if isinstance(inputs, Mapping) else signature.bind(*positional)
    except TypeError as error:
        raise AttnscopeError(
            f"{type(module).__name__}.forward does not take inputs: {error}",
            f"it takes {', '.join(signature.parameters)}",
        ) from error
    tensors = [leaf for leaf in tree_leaves(dict(sample.arguments)) if isinstance(leaf, Tensor)]
    if not tensors:
        raise AttnscopeError("inputs holds no tensor", "give what the model's forward receives")
    for tensor in tensors:
        if tensor.is_nested or tensor.is_meta or tensor.layout is not torch.strided:
            raise AttnscopeError("inputs holds a nested, sparse or meta tensor", "give dense ones")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise AttnscopeError("inputs holds NaN or infinity", "fill the gaps first: attention would be NaN too")
    return sample


def n_named(labels: Labels | None) -> int | None:
    """Return how many positions the first sequence's labels name; None where there are none."""
    return None if labels is None else len(_names(labels[0] if _is_nested(labels) else labels))


def name_positions(labels: Labels | None, n_sequences: int, n_positions: int) -> list[tuple[str, ...]]:
    """Return the names of each sequence's positions."""
    # One list for all sequences, or one per sequence.
    lists = [range(n_positions) if labels is None else labels] * n_sequences
    if labels is not None and _is_nested(labels):
        lists = list(labels)
    if len(lists) != n_sequences:
        raise AttnscopeError(
            f"labels holds {amount(len(lists), 'list')}, and the inputs are {amount(n_sequences, 'sequence')}",
            "give one list of names for all, or one per sequence",
        )
    rows = [_names(names) for names in lists]
    for names in rows:
        if len(names) != n_positions:
            raise AttnscopeError(
                f"labels name {amount(len(names), 'position')}, and attention has {n_positions}",
                f"give {n_positions} names; a grid such as (4, 6) stands for 24",
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
        sequences: The number of a sequence, by its token numbers.
    """

    name = "none: labels name the positions"

    def __init__(self, rows: Sequence[tuple[str, ...]]) -> None:
        self.sequences: dict[tuple[int, ...], int] = {}
        self.texts = tuple(map(str, range(len(rows))))
        self._tokens: list[Tokens] = []
        self._spelled: list[str] = []
        numbers: dict[str, int] = {}
        for sequence, names in enumerate(rows):
            for name in names:
                if name not in numbers:
                    numbers[name] = self._number(name)
            ids = [numbers[name] for name in names]
            # A sequence is known again by its numbers: where another has them too, this one's first is its own.
            if tuple(ids) in self.sequences:
                ids[0] = self._number(names[0])
            self.sequences[tuple(ids)] = sequence
            ends = accumulate(len(name) + 1 for name in names)
            spans = [(end - len(name) - 1, end - 1) for end, name in zip(ends, names, strict=True)]
            special = [name.startswith("[") and name.endswith("]") for name in names]
            tokens = build_tokens(" ".join(names), ids=ids, pieces=names, offsets=spans, special=special, style="plain")
            self._tokens.append(tokens)

    def _number(self, name: str) -> int:
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
