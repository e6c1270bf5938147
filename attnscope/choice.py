"""Check the layers, heads, queries and keys that a user asks for against a model and its maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from attnscope.errors import AttnscopeError, UsageError
from attnscope.options import heads_from, numbers_from, option, options, read_span

if TYPE_CHECKING:
    from attnscope.models.info import ModelInfo


@options
class Choice:
    """The layers and heads that a user asked for."""

    PANEL: ClassVar[str] = "Heads"

    layers: tuple[int, ...] | None = option(
        "Layers, such as 0,3-5.  [default: all]", "-L", "--layers", default=None, read=numbers_from
    )
    heads: tuple[int, ...] | None = option(
        "Heads of those layers, such as 1,8-10.  [default: all]",
        "-H",
        "--heads",
        default=None,
        read=numbers_from,
    )
    pick: tuple[tuple[int, int], ...] | None = option(
        "Single heads, such as L3H1,L5H11; a heatmap draws them in one figure.",
        default=None,
        read=heads_from,
    )

    def require(self) -> None:
        """Refuse single heads beside layers and heads."""
        if self.pick is not None and (self.layers is not None or self.heads is not None):
            raise UsageError(
                "heads are chosen either singly or by layers and heads", "give --pick, or -L and -H"
            )

    def within(self, info: ModelInfo) -> Chosen:
        """Return the chosen heads of a model; refuse a layer or head that it lacks, and say how many it has."""
        # Single heads name their layers as well.
        layers, heads = self.layers, self.heads
        if self.pick is not None:
            layers = tuple(layer for layer, _ in self.pick)
            heads = tuple(head for _, head in self.pick)
        # Refuse numbers beyond the model, and empty lists.
        n_layers, n_heads = max(info.n_layers), max(info.n_heads)
        for what, numbers, n in (("layer", layers, n_layers), ("head", heads, n_heads)):
            if numbers is None:
                continue
            beyond = [number for number in numbers if not 0 <= number < n]
            if beyond or not numbers:
                said = f"there is no {what} {beyond[0]}" if beyond else f"no {what} is chosen"
                raise AttnscopeError(
                    f"{said}: {info.name} has {n} {what}s", f"they are numbered 0 to {n - 1}"
                )
        # All layers or heads where none are named.
        return Chosen(
            tuple(sorted(set(range(n_layers) if layers is None else layers))),
            tuple(sorted(set(range(n_heads) if heads is None else heads))),
            None if self.pick is None else tuple(dict.fromkeys(self.pick)),
        )


@dataclass(frozen=True)
class Chosen:
    """The heads of a model that are kept: a block of layers x heads, and which of it are shown (None = all)."""

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    picked: tuple[tuple[int, int], ...] | None

    @property
    def n_heads(self) -> int:
        """Return how many heads these are, if each of the layers has them."""
        return len(self.layers) * len(self.heads) if self.picked is None else len(self.picked)


Span = tuple[int, int | None]
"""Numbers from a first one up to, but without, another (None = the end): as a Python slice."""


@options
class Tokens:
    """The options for showing tokens."""

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
class Between:
    """From which part of a text to which other one attention is added up."""

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
        """Refuse one without the other."""
        if (self.from_part is None) != (self.to_part is None):
            raise UsageError("attention goes from one part to another", "give both --from and --to")

    @property
    def parts(self) -> tuple[str, str]:
        """Both, empty where none is asked for."""
        return self.from_part or "", self.to_part or ""

    def __bool__(self) -> bool:
        return self.from_part is not None


@options
class Cut:
    """The part of a map that a user asked for."""

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
        """Refuse a part with no token."""
        for name, span in (("rows", self.rows), ("cols", self.cols)):
            if span is not None and (span[0] < 0 or (span[1] is not None and span[1] <= span[0])):
                stop = "" if span[1] is None else span[1]
                raise UsageError(
                    f"{name} {span[0]}:{stop} hold no token",
                    "from:to goes up and counts from 0, such as 1000:1064",
                )

    def __bool__(self) -> bool:
        return self.rows is not None or self.cols is not None

    def within(self, n_queries: int, n_keys: int) -> tuple[slice, slice]:
        """Return the chosen queries and keys of a map; refuse tokens that it lacks, and say how many it has."""
        slices = []
        for name, span, n in (("rows", self.rows, n_queries), ("cols", self.cols, n_keys)):
            start, stop = span or (0, None)
            stop = n if stop is None else stop
            if stop > n or start >= n:
                raise UsageError(
                    f"{name} {start}:{stop} reach beyond the text's {n} tokens",
                    f"they are 0:{n} at most",
                )
            slices.append(slice(start, stop))
        return slices[0], slices[1]


def choice_from(
    layers: int | Sequence[int] | None,
    heads: int | Sequence[int] | None,
    pick: Sequence[tuple[int, int]] | None,
) -> Choice:
    """Return the choice that a Python user names, of layers and heads one or several.

    Raises:
        AttnscopeError: What is to be picked are no pairs.
    """
    try:
        pairs = None if pick is None else tuple((layer, head) for layer, head in pick)
    except (TypeError, ValueError):
        raise AttnscopeError(
            f"{pick!r} picks no heads", "give pairs of layer and head, such as [(3, 1)]"
        ) from None
    return Choice(_numbers(layers), _numbers(heads), pairs)


def _numbers(numbers: int | Sequence[int] | None) -> tuple[int, ...] | None:
    if numbers is None:
        return None
    return (numbers,) if isinstance(numbers, int) else tuple(int(number) for number in numbers)


def span_from(span: Span | slice | None) -> Span | None:
    """Return a span as Python users give it: as a pair, or a slice without a step."""
    if isinstance(span, slice):
        if span.step not in (None, 1):
            raise UsageError("rows and cols are taken one after another", "leave out the step")
        return span.start or 0, span.stop
    return None if span is None else (int(span[0]), None if span[1] is None else int(span[1]))
