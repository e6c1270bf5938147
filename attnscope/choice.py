"""Declare the options for choosing layers, heads, queries and keys, and check choices against a model and its maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from attnscope.errors import AttnscopeError, UsageError
from attnscope.options import Heads, option, options, read_heads, read_ranges, read_span

if TYPE_CHECKING:
    from attnscope.models.info import ModelInfo


@options
class Choice:
    """Hold the options for choosing layers and heads, and check them against a model."""

    PANEL: ClassVar[str] = "Heads"

    layers: tuple[int, ...] | None = option(
        "Layers, such as 0,3-5.  [default: all]", "-L", "--layers", default=None, read=read_ranges
    )
    heads: tuple[int, ...] | None = option(
        "Heads of those layers, such as 1,8-10.  [default: all]",
        "-H",
        "--heads",
        default=None,
        read=read_ranges,
    )
    pick: Heads | None = option(
        "Single heads, such as L3H1,L5H11; a heatmap draws them in one figure.",
        default=None,
        read=read_heads,
    )

    def require(self) -> None:
        """Refuse --pick together with -L or -H. The decorator `options` calls this for each new instance."""
        if self.pick is not None and (self.layers is not None or self.heads is not None):
            raise UsageError(
                "heads are chosen either singly or by layers and heads", "give --pick, or -L and -H"
            )

    def within(self, info: ModelInfo) -> ChosenHeads:
        """Return the heads that these options choose in a model.

        Raises:
            AttnscopeError: The model lacks a layer or a head; the message says how many it has.
        """
        layers = self.layers
        heads = self.heads
        picked_heads = None
        if self.pick is not None:
            # Each head once, in the order given.
            picked_heads = tuple(dict.fromkeys(self.pick))
            layers = tuple(layer for layer, _ in picked_heads)
            heads = tuple(head for _, head in picked_heads)
        # `n_layers` and `n_heads` have a number for each kind of attention, such as cross: allow the largest.
        return ChosenHeads(
            _resolve_indices("layer", layers, max(info.n_layers), info.name),
            _resolve_indices("head", heads, max(info.n_heads), info.name),
            picked_heads,
        )


def _resolve_indices(
    noun: str, indices: tuple[int, ...] | None, n_in_model: int, model_name: str
) -> tuple[int, ...]:
    """Return the chosen layer or head indices, sorted, each once; None chooses all of the model.

    Messages call an index `noun`: "layer" or "head".

    Raises:
        AttnscopeError: No index is given, or an index that the model does not have.
    """
    if indices is None:
        return tuple(range(n_in_model))
    missing = [index for index in indices if not 0 <= index < n_in_model]
    if missing or not indices:
        reason = f"there is no {noun} {missing[0]}" if missing else f"no {noun} is chosen"
        raise AttnscopeError(
            f"{reason}: {model_name} has {n_in_model} {noun}s",
            f"they are numbered 0 to {n_in_model - 1}",
        )
    return tuple(sorted(set(indices)))


@dataclass(frozen=True)
class ChosenHeads:
    """Hold the heads that a user chose: the same heads in several layers, or single heads.

    Attributes:
        layers: The indices of the layers, ascending.
        heads: The indices of the heads in each of these layers, ascending.
        picked: Single heads, (layer, head): only these are chosen, and `layers` and `heads` list their indices. None =
            all `heads` of all `layers` are chosen.
    """

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    picked: Heads | None

    @property
    def n_heads(self) -> int:
        """Return how many heads are chosen. A layer with fewer heads than others counts as if it had as many."""
        return len(self.layers) * len(self.heads) if self.picked is None else len(self.picked)


Span = tuple[int, int | None]
"""A range of tokens, (start, stop), as in a Python slice: the stop is excluded, and None = up to the last token."""


@options
class TokenOptions:
    """Hold the options for showing tokens, and for showing means over heads instead of single heads."""

    PANEL: ClassVar[str] = "Drawing"

    query: str | None = option(
        "Also show what these tokens attend to: tokens, words, or places, such as it,cat or @3,@7.",
        default=None,
    )
    words: bool = option(
        "Merge word pieces: sum over keys, mean over queries. Of a recording: also say when each word is spoken.",
        default=False,
    )
    mean: str | None = option(
        "Show the mean over the chosen heads of each layer, over layers for each head, or over all of them.",
        default=None,
        choices=("heads", "layers", "all"),
        panel="Heads",
    )
    without_sinks: bool = option(
        "Give nothing to special tokens, and in decoders to the first token; renormalise each row over the other keys.",
        default=False,
        rare=True,
    )
    hide_special: bool = option(
        "Leave out special tokens, and in decoders the first token; renormalise each row.",
        default=False,
    )


@options
class BetweenOptions:
    """Hold the options for adding up attention from the tokens of one phrase to those of another."""

    PANEL: ClassVar[str] = "Heads"

    from_part: str | None = option(
        "Instead: what these queries give to the keys of --to, one number per head. A word, a phrase, places such as "
        "@3 or @3-5, or A or B of a pair.",
        "--from",
        default=None,
        rare=True,
    )
    to_part: str | None = option(
        "The keys of --from, in the same form.", "--to", default=None, rare=True
    )

    def require(self) -> None:
        """Refuse --from without --to, and --to without --from."""
        if (self.from_part is None) != (self.to_part is None):
            raise UsageError("attention goes from one part to another", "give both --from and --to")

    @property
    def parts(self) -> tuple[str, str]:
        """Return the phrase of the queries and the phrase of the keys, both "" if the options are not given."""
        return self.from_part or "", self.to_part or ""

    def __bool__(self) -> bool:
        return self.from_part is not None


@options
class Crop:
    """Hold the options for showing a part of a map: some rows and columns, or the largest weights of each row."""

    PANEL: ClassVar[str] = "Drawing"

    rows: Span | None = option(
        "Only these queries, without pooling, such as 1000:1064.",
        default=None,
        read=partial(read_span, option="--rows"),
        rare=True,
    )
    cols: Span | None = option(
        "Only these keys, without pooling, such as 0:64.",
        default=None,
        read=partial(read_span, option="--cols"),
        rare=True,
    )

    top: int = option(
        "Write only this many of each query's largest weights to CSV and JSON; 0 = all.",
        default=0,
        least=0,
        rare=True,
    )

    def require(self) -> None:
        """Refuse rows or columns that hold no token."""
        for name, span in (("rows", self.rows), ("cols", self.cols)):
            if span is None:
                continue
            start, stop = span
            if start < 0 or (stop is not None and stop <= start):
                # The range as a user types it, such as 5:3, or -1: for (-1, None)
                range_text = f"{start}:" if stop is None else f"{start}:{stop}"
                raise UsageError(
                    f"{name} {range_text} hold no token",
                    "from:to goes up and counts from 0, such as 1000:1064",
                )

    def __bool__(self) -> bool:
        # `top` leaves the map whole: it limits what files hold of it.
        return self.rows is not None or self.cols is not None

    def resolve_slices(self, n_queries: int, n_keys: int) -> tuple[slice, slice]:
        """Return the chosen queries and keys of a map as slices.

        Raises:
            UsageError: The map lacks some of the queries or keys; the message says how many it has.
        """
        return _resolve_slice("rows", self.rows, n_queries), _resolve_slice("cols", self.cols, n_keys)


def _resolve_slice(name: str, span: Span | None, n_tokens: int) -> slice:
    """Return the slice that a span chooses of n_tokens rows or columns; None chooses all.

    Messages call the rows or columns `name`.

    Raises:
        UsageError: The span reaches beyond the last token.
    """
    start, stop = span or (0, n_tokens)
    if stop is None:
        stop = n_tokens
    if stop > n_tokens or start >= n_tokens:
        raise UsageError(
            f"{name} {start}:{stop} reach beyond the text's {n_tokens} tokens",
            f"they are 0:{n_tokens} at most",
        )
    return slice(start, stop)


# Options from the arguments of Python functions ---------------------------------------------------------------------


def make_choice(
    layers: int | Sequence[int] | None,
    heads: int | Sequence[int] | None,
    pick: Sequence[tuple[int, int]] | None,
) -> Choice:
    """Return the choice that a Python user's arguments describe.

    Args:
        layers: One or several layers; None = all.
        heads: One or several heads of these layers; None = all.
        pick: Single heads as (layer, head) pairs; None = no single heads.

    Raises:
        AttnscopeError: `pick` does not hold pairs.
    """
    try:
        pairs = None if pick is None else tuple((layer, head) for layer, head in pick)
    except (TypeError, ValueError):
        raise AttnscopeError(
            f"{pick!r} picks no heads", "give pairs of layer and head, such as [(3, 1)]"
        ) from None
    return Choice(_as_tuple(layers), _as_tuple(heads), pairs)


def _as_tuple(indices: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """Return one or several indices as a tuple; None stays None."""
    if indices is None:
        return None
    if isinstance(indices, int):
        return (indices,)
    return tuple(map(int, indices))


def make_span(span: Span | slice | None) -> Span | None:
    """Return the span that a pair (start, stop) or a slice without a step describes; None stays None."""
    if span is None:
        return None
    if isinstance(span, slice):
        if span.step not in (None, 1):
            raise UsageError("rows and cols are taken one after another", "leave out the step")
        return span.start or 0, span.stop
    start, stop = span
    return int(start), None if stop is None else int(stop)
