"""Inputs that the user makes, as texts: each sequence has the names of its positions in the place of words."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, eq=False)
class Sample:
    """What one forward pass receives, by position and by name."""

    args: tuple[Any, ...]
    named: Mapping[str, Any]

    def by_name(self, module: nn.Module) -> dict[str, Any]:
        """All of it by name, as the signature of the module's forward has them."""
        return dict(inspect.signature(module.forward).bind(*self.args, **self.named).arguments)

    def map(self, change: Any) -> "Sample":
        """Return the same with each tensor changed."""

        def of_tensor(value: Any) -> Any:
            return change(value) if isinstance(value, Tensor) else value

        return Sample(tree_map(of_tensor, self.args), tree_map(of_tensor, dict(self.named)))

    def repeat(self, times: int, axis: int) -> "Sample":
        """Return the same several times over, along the axis of its first tensor's batch; a mask may have 0 for 1."""
        n = self._first.shape[axis]

        def over(tensor: Tensor) -> Tensor:
            own = next((each for each in (axis, 1 - axis) if tensor.ndim > each and tensor.shape[each] == n), None)
            return tensor if own is None else torch.cat([tensor] * times, own)

        return self.map(over)

    @property
    def n_axes(self) -> int:
        """Dimensions of its first tensor."""
        return self._first.ndim

    @property
    def _first(self) -> Tensor:
        return next(leaf for leaf in tree_leaves((self.args, dict(self.named))) if isinstance(leaf, Tensor))


def read_samples(module: nn.Module, inputs: Any) -> list[Sample]:
    """Return what `inputs` means: a tensor, a tuple by position, a mapping by name.

    A list of these = several passes.
    """
    samples = []
    for number, value in enumerate(inputs if isinstance(inputs, list) else [inputs]):
        which = f"inputs[{number}]" if isinstance(inputs, list) else "inputs"
        if isinstance(value, Mapping):
            sample = Sample((), dict(value))
        elif isinstance(value, Tensor | tuple):
            sample = Sample(value if isinstance(value, tuple) else (value,), {})
        else:
            raise AttnscopeError(
                f"{which} is of type {type(value).__name__}",
                "give a tensor, a tuple of what forward receives, or a mapping by name; a list holds several of these",
            )
        tensors = [leaf for leaf in tree_leaves((sample.args, sample.named)) if isinstance(leaf, Tensor)]
        if not tensors:
            raise AttnscopeError(f"{which} holds no tensor", "give what the model's forward receives")
        if any(tensor.is_nested or tensor.is_meta or tensor.layout is not torch.strided for tensor in tensors):
            raise AttnscopeError(
                f"{which} holds a nested, sparse or meta tensor", "give dense ones, and several in a list"
            )
        if any(tensor.is_floating_point() and not bool(tensor.isfinite().all()) for tensor in tensors):
            raise AttnscopeError(f"{which} holds NaN or infinity", "fill the gaps first: attention would be NaN too")
        try:
            inspect.signature(module.forward).bind(*sample.args, **sample.named)
        except TypeError as error:
            raise AttnscopeError(
                f"{type(module).__name__}.forward does not take {which}: {error}", _takes(module)
            ) from error
        samples.append(sample)
    if not samples:
        raise AttnscopeError("inputs is an empty list", "give what the model's forward receives")
    return samples


def _takes(module: nn.Module) -> str:
    return f"it takes {', '.join(inspect.signature(module.forward).parameters)}"


def n_named(labels: Labels | None) -> int | None:
    """Return how many positions the first sequence's labels name; None where there are none."""
    return None if labels is None else len(_names(labels[0] if _is_nested(labels) else labels))


def name_positions(labels: Labels | None, sizes: Sequence[tuple[int, int]]) -> list[list[tuple[str, ...]]]:
    """Return the names of each sample's sequences, of which `sizes` has the number and how many positions they have."""
    n_sequences = sum(n for n, _ in sizes)
    if labels is None:
        lists: list[Any] = [range(n) for count, n in sizes for _ in range(count)]
    elif not _is_nested(labels):
        lists = [labels] * n_sequences
    elif len(labels) == n_sequences:
        lists = list(labels)
    elif len(labels) == len(sizes):
        lists = [names for names, (count, _) in zip(labels, sizes, strict=True) for _ in range(count)]
    else:
        raise AttnscopeError(
            f"labels holds {amount(len(labels), 'list')}, and the inputs are {amount(n_sequences, 'sequence')} in "
            f"{amount(len(sizes), 'pass', 'passes')}",
            "give one list of names for all, or one per sequence",
        )
    ordered = iter([_names(names) for names in lists])
    rows = [[next(ordered) for _ in range(count)] for count, _ in sizes]
    for row, (_, n) in zip(rows, sizes, strict=True):
        for names in row:
            if len(names) != n:
                raise AttnscopeError(
                    f"labels name {amount(len(names), 'position')}, and attention has {n}",
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
    if isinstance(labels, tuple) and all(isinstance(size, int) for size in labels):
        labels = [labels]
    names: list[str] = []
    for label in labels:
        is_grid = isinstance(label, tuple) and label and all(isinstance(size, int) and size > 0 for size in label)
        if len(names) + (prod(label) if is_grid else 1) > MOST_NAMES:
            raise AttnscopeError(f"labels name more than {MOST_NAMES:,} positions", "give one label per position")
        if is_grid:
            names += [",".join(map(str, place)) for place in product(*map(range, label))]
        elif isinstance(label, str | int | float) and str(label).strip():
            names.append(" ".join(str(label).split()))
        else:
            raise AttnscopeError(f"labels holds {label!r}, which names no position", "give names, numbers or grids")
    return tuple(names)


class LabelTokenizer(BareTokenizer):
    """Knows the sequences of the inputs by their numbers, which are its texts, and no other texts.

    Attributes:
        places: Sample and sequence in it, by the sequence's token numbers.
    """

    name = "none: labels name the positions"

    def __init__(self, rows: Sequence[Sequence[tuple[str, ...]]]) -> None:
        names = [((s, i), labels) for s, row in enumerate(rows) for i, labels in enumerate(row)]
        numbers = {label: i for i, label in enumerate(dict.fromkeys(x for _, labels in names for x in labels))}
        self._spelled = list(numbers)
        self._tokens: list[Tokens] = []
        self.places: dict[tuple[int, ...], tuple[int, int]] = {}
        for place, labels in names:
            ids = [numbers[label] for label in labels]
            if tuple(ids) in self.places:  # by its numbers a sequence is known again: this one's first is its own
                self._spelled.append(labels[0])
                ids[0] = len(self._spelled) - 1
            self.places[tuple(ids)] = place
            ends = list(accumulate(len(label) + 1 for label in labels))
            spans = [(end - len(label) - 1, end - 1) for end, label in zip(ends, labels, strict=True)]
            special = [label.startswith("[") and label.endswith("]") for label in labels]
            self._tokens.append(
                build_tokens(" ".join(labels), ids=ids, pieces=labels, offsets=spans, special=special, style="plain")
            )
        self.texts = tuple(map(str, range(len(names))))

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
