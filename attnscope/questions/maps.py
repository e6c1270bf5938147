"""What maps of heads have in common, exact ones and pooled ones: which heads they hold, and how they are kept.

A result of maps is a text, a map per kind of attention, and what made it. In files it is tables and arrays, as every
result: `heads` and `queries` of the first kind, `heads:cross` and `queries:cross` of a further one.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError
from attnscope.results.result import Result
from attnscope.results.table import HEADS, Table, count, text
from attnscope.results.tokens import TOKENS, Tokens, tokens_of, tokens_table

KINDS = ("encoder", "decoder", "cross")
"""The kinds of attention; they become part of file names."""

ROLLOUT = "rollout"
"""The kind of maps that follow tokens through layers, which is none of the model's own."""

LINK_COLUMNS = ("kind", "layer", "head", "query", "key", "query_token", "key_token", "weight")
"""The columns of a weight between two tokens, in files."""

MAP_TABLES: Mapping[str, Any] = {
    "maps": (
        text("kind", "kind of attention: encoder, decoder, cross or rollout"),
        count("n_layers", "how many layers of this kind the model has", range=(1, None)),
        count("n_heads", "how many heads a layer has, the most where layers differ", range=(1, None)),
        count("n_kv_heads", "how many key/value heads a layer has", range=(1, None)),
        count(
            "first_query",
            "which query of the whole map comes first; -1 = it is the whole",
            range=(-1, None),
        ),
        count(
            "first_key", "which key of the whole map comes first; -1 = it is the whole", range=(-1, None)
        ),
        count("whole_queries", "queries of the whole map; -1 = it is the whole", range=(-1, None)),
        count("whole_keys", "keys of the whole map; -1 = it is the whole", range=(-1, None)),
    ),
    "heads": (
        *HEADS,
        text("name", "what stands in the place of a head is called; empty = it is a head"),
    ),
    "queries": TOKENS,
    "keys": TOKENS,
}
"""The columns of the tables that every result of maps has."""


class MapPart(NamedTuple):
    """Hold which rows and columns of a whole map a part has: those from its first query and its first key on.

    Attributes:
        first_query: The row of the whole map that is the part's first one.
        first_key: The column of the whole map that is the part's first one.
        whole_queries: How many queries the whole map has.
        whole_keys: How many keys the whole map has.
    """

    first_query: int
    first_key: int
    whole_queries: int
    whole_keys: int


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class HeadMaps:
    """The maps of the heads of one kind of attention; those of a head lie at its place in `layers` and `heads`.

    Attributes:
        ARRAYS: The names of its arrays, (layer, head, ...), that of the maps first. NaN where a layer has no such head.
        kind: "encoder", "decoder" (its own), or "cross" (a decoder's on the encoder).
        layers: Numbers of the layers in the arrays, from 0.
        heads: Numbers of the heads in the arrays, from 0.
        queries: The tokens that attend, row by row.
        keys: The tokens that are attended to, column by column; `queries` itself but for cross-attention.
        n_layers: How many layers of this kind the model has.
        n_heads: How many heads a layer has (the most, where layers differ).
        n_kv_heads: How many key/value heads a layer has; fewer than n_heads where query heads share them.
        part: Which part of a whole map this is; None = it is the whole.
        head_names: What stands in the place of heads is called, such as "mean attention"; empty = they are heads.
    """

    ARRAYS: ClassVar[tuple[str, ...]]

    kind: str
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    queries: Tokens
    keys: Tokens
    n_layers: int
    n_heads: int
    n_kv_heads: int
    part: MapPart | None = None
    head_names: tuple[str, ...] = ()

    @property
    def values(self) -> NDArray[np.float32]:
        """Return the maps: weights, (layer, head, query, key), or cells, (layer, head, row, column)."""
        values: NDArray[np.float32] = getattr(self, self.ARRAYS[0])
        return values

    @property
    def origin(self) -> tuple[int, int]:
        """Return where the map begins in the whole map: the row and the column of its first query and its first key."""
        return (0, 0) if self.part is None else self.part[:2]

    def head_name(self, head: int) -> str:
        """Return what a head is called, such as H1."""
        return self.head_names[self.heads.index(head)] if self.head_names else f"H{head}"

    def name_of(self, layer: int, head: int) -> str:
        """Return what a head of a layer is called, such as L3H1."""
        if not self.head_names:
            return f"L{layer}H{head}"
        return self.head_name(head) if self.n_layers == 1 else f"L{layer} {self.head_name(head)}"

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Return all heads, (layer, head), layer by layer; also those that a layer lacks."""
        return [(layer, head) for layer in self.layers for head in self.heads]

    def place(self, layer: int, head: int) -> tuple[int, int]:
        """Return where a head stands in the arrays.

        Raises:
            AttnscopeError: It is not there.
        """
        if layer in self.layers and head in self.heads:
            return self.layers.index(layer), self.heads.index(head)
        raise AttnscopeError(
            f"L{layer}H{head} is not in this record",
            f"it holds layers {spans(self.layers)} and heads {spans(self.heads)}",
        )

    def of(self, layer: int, head: int) -> NDArray[np.float32]:
        """Return the map of one head: weights, (query, key), or cells, (row, column)."""
        weights: NDArray[np.float32] = self.values[self.place(layer, head)]
        return weights

    def exists(self, layer: int, head: int) -> bool:
        """Return whether this head is held; where a layer lacks one, its map is NaN."""
        return (
            layer in self.layers
            and head in self.heads
            and not bool(np.isnan(self.of(layer, head)).any())
        )

    def tables(self) -> dict[str, Table]:
        """Return its tables, by name."""
        heads = Table.of_arrays(
            MAP_TABLES["heads"],
            kind=[self.kind] * len(self.pairs),
            layer=[layer for layer, _ in self.pairs],
            head=[head for _, head in self.pairs],
            name=(self.head_names or ("",) * len(self.heads)) * len(self.layers),
        )
        return {"heads": heads, "queries": tokens_table(self.queries), "keys": tokens_table(self.keys)}

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return its arrays by name, along the rows of its table of heads."""
        arrays = {name: getattr(self, name) for name in self.ARRAYS}
        return {
            name: values.reshape(len(self.pairs), *values.shape[2:]) for name, values in arrays.items()
        }

    def numbers(self, names: Sequence[str]) -> dict[str, Any]:
        """Return its row of the table of maps, which has columns of these names."""
        part = dict(zip(MapPart._fields, self.part or (-1, -1, -1, -1), strict=True))
        return {name: part[name] if name in part else getattr(self, name) for name in names}

    @classmethod
    def rebuild(
        cls,
        row: dict[str, Any],
        texts: Any,
        tables: Mapping[str, Table],
        arrays: Mapping[str, NDArray[Any]],
    ) -> Self:
        """Return the maps of one kind.

        Args:
            row: Its row of the table of maps.
            texts: The text and the pair of its queries, and those of its keys.
            tables: Its tables, by name.
            arrays: Its arrays, by name.
        """
        # Which layers and heads, and the tokens at both sides.
        heads = tables["heads"]
        layers = tuple(dict.fromkeys(heads["layer"].tolist()))
        numbers = tuple(dict.fromkeys(heads["head"].tolist()))
        names = tuple(heads["name"][: len(numbers)].tolist())
        queries, keys = (
            tokens_of(tables[side], *texts[i]) for i, side in enumerate(("queries", "keys"))
        )
        part = MapPart(*(row.pop(name) for name in MapPart._fields))
        is_part = part.first_query >= 0
        # Arrays come along the rows of heads, (head, ...), and become (layer, head, ...).
        laid: dict[str, Any] = {}
        for name in cls.ARRAYS:
            values = arrays[name].astype(
                np.float32 if arrays[name].dtype.kind == "f" else np.int32, copy=False
            )
            laid[name] = values.reshape(len(layers), len(numbers), *values.shape[1:])
        return cls(
            **row,
            layers=layers,
            heads=numbers,
            queries=queries,
            keys=keys if row["kind"] == "cross" or is_part or keys.labels != queries.labels else queries,
            part=part if is_part else None,
            head_names=names if any(names) else (),
            **laid,
        )

    def __repr__(self) -> str:
        shape = self.values.shape
        return f"{type(self).__name__}({self.kind}, layers {spans(self.layers)}, heads {spans(self.heads)}, {shape})"


M = TypeVar("M", bound=HeadMaps)


@dataclass(frozen=True, eq=False, repr=False)
class MapsResult(Result, Generic[M]):
    """The attention maps of the chosen heads of a model on one text, exact or pooled.

    Attributes:
        MAPS: The class of its maps.
        FIELDS: Names of further fields that are plain JSON values.
        text: The text as given.
        maps: The attention, one map per kind: one for encoders and for decoders; encoder, decoder and cross for both.
        picked: Single heads that were asked for, as (layer, head); None = all in the maps.
    """

    MAPS: ClassVar[Any]
    FIELDS: ClassVar[tuple[str, ...]] = ()
    COMPRESSED: ClassVar[bool] = False

    # These follow from the maps.
    corpus: Mapping[str, Any] = field(init=False)
    options: Mapping[str, Any] = field(init=False)
    tables: Mapping[str, Table] = field(init=False)
    grids: Mapping[str, NDArray[Any]] = field(init=False)

    text: str
    maps: tuple[M, ...]
    picked: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        tables, grids, options = self.extra_contents()
        columns = self.TABLES["maps"]
        names = [column.name for column in columns]
        tables["maps"] = Table.of(columns, [attention.numbers(names) for attention in self.maps])
        # Names of the first kind have no ending.
        for number, attention in enumerate(self.maps):
            kind = f":{attention.kind}" if number else ""
            tables |= {f"{name}{kind}": table for name, table in attention.tables().items()}
            grids |= {f"{name}{kind}": array for name, array in attention.arrays().items()}
        options |= {name: getattr(self, name) for name in ("text", "picked", *self.FIELDS)}
        options["texts"] = [[[side.text, side.pair] for side in (m.queries, m.keys)] for m in self.maps]
        parts = {"corpus": {}, "options": options, "tables": tables, "grids": grids}
        for name, value in parts.items():
            object.__setattr__(self, name, value)

    # Heads

    def chosen(self, attention: M) -> tuple[tuple[int, int], ...]:
        """Return the heads to show of a map, (layer, head): as they were picked, else layer by layer."""
        wanted = self.picked or attention.pairs
        return tuple(pair for pair in wanted if attention.exists(*pair))

    def only(self, picked: Sequence[tuple[int, int]]) -> Self:
        """Return the same, showing only these heads, (layer, head).

        Raises:
            AttnscopeError: It does not hold one of them.
        """
        if not picked:
            raise AttnscopeError("no head is chosen")
        for layer, head in picked:
            if not any(attention.exists(layer, head) for attention in self.maps):
                self.maps[0].place(layer, head)
        return replace(self, picked=tuple(dict.fromkeys(picked)))

    def block(self, layers: Collection[int], heads: Collection[int]) -> Self:
        """Return the same with these layers and heads alone; maps that have none of them go, and no head is picked.

        Raises:
            AttnscopeError: There is none of them.
        """
        maps = []
        for attention in self.maps:
            rows = [row for row, layer in enumerate(attention.layers) if layer in layers]
            columns = [column for column, head in enumerate(attention.heads) if head in heads]
            if not rows or not columns:
                continue
            # Arrays are (layer, head, ...).
            cut: dict[str, Any] = {
                name: getattr(attention, name)[np.ix_(rows, columns)] for name in attention.ARRAYS
            }
            cut["layers"] = tuple(attention.layers[row] for row in rows)
            cut["heads"] = tuple(attention.heads[column] for column in columns)
            maps.append(replace(attention, **cut))
        if not maps:
            self.maps[0].place(min(layers, default=-1), min(heads, default=-1))
        return replace(self, maps=tuple(maps), picked=None)

    def map(self, kind: str | None = None) -> M:
        """Return the map of a kind of attention: "encoder", "decoder" or "cross"; None = the first.

        Raises:
            AttnscopeError: There is none of that kind.
        """
        for attention in self.maps:
            if kind in (None, attention.kind):
                return attention
        raise AttnscopeError(
            f"this record has no {kind} attention", f"it has {', '.join(m.kind for m in self.maps)}"
        )

    def of(self, layer: int, head: int, kind: str | None = None) -> NDArray[np.float32]:
        """Return the map of one head by its numbers: weights, (query, key), or cells, (row, column).

        Args:
            layer: Number of the layer in the model, from 0.
            head: Number of the head, from 0.
            kind: "encoder", "decoder" or "cross"; None = that of the first map.

        Raises:
            AttnscopeError: It does not hold it.
        """
        return self.map(kind).of(layer, head)

    # Tables

    def extra_contents(self) -> tuple[dict[str, Table], dict[str, NDArray[Any]], dict[str, Any]]:
        """Return tables, arrays and options beside those of the maps."""
        return {}, {}, {}

    @classmethod
    def read_extra(cls, stored: Result) -> dict[str, Any]:
        """Return the fields that `extra_contents` were made of."""
        return {}

    @classmethod
    def rebuild(cls, described: Mapping[str, Any], archive: Mapping[str, Any]) -> Self:
        """Return the result that `describe` and `arrays` were made of; what is damaged raises anything."""
        stored = Result.rebuild(described, archive)
        cls.require_declared(stored.tables, stored.grids)
        # Tables and arrays of the first map have plain names; those of others end in their kind.
        options = stored.options
        maps = []
        for number, row in enumerate(stored.tables["maps"].as_dicts()):
            kind = f":{row['kind']}" if number else ""
            tables = {name: stored.tables[f"{name}{kind}"] for name in ("heads", "queries", "keys")}
            arrays = {name: stored.grids[f"{name}{kind}"] for name in cls.MAPS.ARRAYS}
            maps.append(cls.MAPS.rebuild(row, options["texts"][number], tables, arrays))
        # Subclasses declare further fields, and read pictures and sound themselves.
        picked = options["picked"]
        return cls(
            text=str(options["text"]),
            maps=tuple(maps),
            run=stored.run,
            picked=None if picked is None else tuple((int(layer), int(head)) for layer, head in picked),
            **{name: freeze(options[name]) for name in cls.FIELDS},
            **cls.read_extra(stored),
        )

    def require_whole(self) -> None:
        """Refuse a result that has no maps, shows none of its heads, or has tokens that cannot be shown."""
        super().require_whole()
        # Tokens, then kinds, then the heads that were picked.
        for attention in self.maps:
            attention.queries.require_whole()
            attention.keys.require_whole()
        kinds = [attention.kind for attention in self.maps]
        if not kinds or len({*kinds}) < len(kinds):
            raise ValueError("its maps are empty" if not kinds else "two of its maps are the same")
        for kind in kinds:
            if kind not in (*KINDS, ROLLOUT):
                raise ValueError(f"its kind is {kind[:40]!r}, not one of {', '.join(KINDS)}")
        if self.picked is not None and not any(self.chosen(attention) for attention in self.maps):
            raise ValueError("it shows none of its heads")

    _repr_html_ = None  # type: ignore[assignment]  # a notebook would prefer it to the picture

    def _repr_png_(self) -> bytes:
        png: bytes = self.record_kind().view("glance")(self)
        return png

    def __repr__(self) -> str:
        shapes = ", ".join(f"{m.kind} {m.values.shape}" for m in self.maps)
        return f"{type(self).__name__}({self.run.get('model')!r} on {self.text[:40]!r}: {shapes})"


def freeze(value: Any) -> Any:
    """Return what JSON holds, with tuples for lists."""
    return tuple(map(freeze, value)) if isinstance(value, list) else value


def spans(numbers: Sequence[int]) -> str:
    """Return numbers as people write them: (0, 1, 2, 5) is "0-2,5"."""
    ordered = np.unique(np.array(numbers, np.int64))
    stretches = np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1)
    ends = [(int(part[0]), int(part[-1])) for part in stretches if len(part)]
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ends)


def choose_heads(
    record: Any,
    pick: Sequence[tuple[int, int]] | None,
    layers: Collection[int] | None,
    heads: Collection[int] | None,
) -> Any:
    """Return a record that shows single heads, or those of some layers, or these heads of each; None = all.

    Raises:
        AttnscopeError: It does not hold them.
    """
    if pick is not None:
        return record.only(pick)
    if layers is None and heads is None:
        return record
    maps = getattr(record, "maps", None)
    if maps is not None:
        known = [pair for attention in maps for pair in attention.pairs]
    else:
        known = record.table("heads").places
    # Refuse what is not there; None stands for all.
    chosen = []
    for what, wanted, held in zip(
        ("layer", "head"), (layers, heads), map(set, zip(*known, strict=True)), strict=True
    ):
        beyond = sorted({*(wanted or ())} - held)
        if beyond:
            raise AttnscopeError(
                f"there is no {what} {beyond[0]} in this record", f"it holds {what}s {spans([*held])}"
            )
        chosen.append(held if wanted is None else wanted)
    if maps is not None:
        return record.block(*chosen)
    return record.only(
        [pair for pair in dict.fromkeys(known) if pair[0] in chosen[0] and pair[1] in chosen[1]]
    )
