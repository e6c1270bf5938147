"""Hold the maps of heads, exact or pooled: which heads they have, how these are chosen, and how files keep them.

A result has a text and one map per kind of attention. In files it is tables and arrays, as every result. Those of its
first map have plain names, such as `heads`; those of a further one end in its kind, such as `heads:cross`.
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
"""The kind of maps that follow tokens through all layers; no attention of the model itself."""

LINK_COLUMNS = ("kind", "layer", "head", "query", "key", "query_token", "key_token", "weight")
"""The columns of a weight between two tokens, in CSV and JSON."""

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
    """Hold the maps of the heads of one kind of attention.

    Attributes:
        ARRAYS: The names of its arrays, of which the first holds the maps. They are (layer, head, ...), in the order of
            `layers` and `heads`; NaN where a layer has no such head.
        kind: "encoder", "decoder" (its own), or "cross" (a decoder's on the encoder).
        layers: Numbers of the layers in the arrays, from 0.
        heads: Numbers of the heads in the arrays, from 0.
        queries: The tokens that attend, row by row.
        keys: The tokens that are attended to, column by column; `queries` itself but for cross-attention.
        n_layers: How many layers of this kind the model has.
        n_heads: How many heads a layer has (the most, where layers differ).
        n_kv_heads: How many key/value heads a layer has; fewer than n_heads where query heads share them.
        part: Which part of a whole map this is; None = it is the whole.
        head_names: Names of what the maps have in place of heads, such as "mean attention"; empty = they have heads.
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
        return np.asarray(getattr(self, self.ARRAYS[0]))

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
        """Return each of its layers with each of its heads, (layer, head), even if the layer has no such head."""
        return [(layer, head) for layer in self.layers for head in self.heads]

    def place(self, layer: int, head: int) -> tuple[int, int]:
        """Return the indices of a head on the first two axes of the arrays.

        Raises:
            AttnscopeError: They do not hold this head.
        """
        if layer in self.layers and head in self.heads:
            return self.layers.index(layer), self.heads.index(head)
        raise AttnscopeError(
            f"L{layer}H{head} is not in this record",
            f"it holds layers {format_ranges(self.layers)} and heads {format_ranges(self.heads)}",
        )

    def of(self, layer: int, head: int) -> NDArray[np.float32]:
        """Return the map of one head: weights, (query, key), or cells, (row, column)."""
        return np.asarray(self.values[self.place(layer, head)])

    def exists(self, layer: int, head: int) -> bool:
        """Return whether this head is held; where a layer lacks one, its map is NaN."""
        return (
            layer in self.layers
            and head in self.heads
            and not bool(np.isnan(self.of(layer, head)).any())
        )

    def tables(self) -> dict[str, Table]:
        """Return its tables, by name."""
        pairs = self.pairs
        names = self.head_names or ("",) * len(self.heads)
        heads = Table.of_arrays(
            MAP_TABLES["heads"],
            kind=[self.kind] * len(pairs),
            layer=[layer for layer, _ in pairs],
            head=[head for _, head in pairs],
            # Every layer has the same names.
            name=names * len(self.layers),
        )
        return {"heads": heads, "queries": tokens_table(self.queries), "keys": tokens_table(self.keys)}

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return its arrays by name, with the rows of its table of heads as the first axis."""
        arrays = {}
        for name in self.ARRAYS:
            # (layer, head, ...) becomes (row, ...).
            values = getattr(self, name)
            arrays[name] = values.reshape(len(self.pairs), *values.shape[2:])
        return arrays

    def table_row(self, names: Sequence[str]) -> dict[str, Any]:
        """Return its row of the table of maps, which has columns of these names; -1 stands for no part."""
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
        """Return the maps of one kind again.

        Args:
            row: What `table_row` returned.
            texts: The text and the second text of its queries, and those of its keys.
            tables: What `tables` returned.
            arrays: What `arrays` returned.
        """
        # The table has a row for each head of the first layer, then for each of the next.
        table = tables["heads"]
        layers = tuple(dict.fromkeys(table["layer"].tolist()))
        heads = tuple(dict.fromkeys(table["head"].tolist()))
        names = tuple(table["name"][: len(heads)].tolist())
        query_texts, key_texts = texts
        queries = tokens_of(tables["queries"], *query_texts)
        keys = tokens_of(tables["keys"], *key_texts)
        part = MapPart(*(row.pop(name) for name in MapPart._fields))
        is_part = part.first_query >= 0
        # In whole self-attention both sides are one object.
        if row["kind"] != "cross" and not is_part and keys.labels == queries.labels:
            keys = queries
        # (row, ...) becomes (layer, head, ...).
        fields: dict[str, Any] = {}
        for name in cls.ARRAYS:
            values = arrays[name]
            dtype = np.float32 if values.dtype.kind == "f" else np.int32
            shape = (len(layers), len(heads), *values.shape[1:])
            fields[name] = values.astype(dtype, copy=False).reshape(shape)
        return cls(
            **row,
            layers=layers,
            heads=heads,
            queries=queries,
            keys=keys,
            part=part if is_part else None,
            head_names=names if any(names) else (),
            **fields,
        )

    def __repr__(self) -> str:
        shape = self.values.shape
        return f"{type(self).__name__}({self.kind}, layers {format_ranges(self.layers)}, heads {format_ranges(self.heads)}, {shape})"


M = TypeVar("M", bound=HeadMaps)


@dataclass(frozen=True, eq=False, repr=False)
class MapsResult(Result, Generic[M]):
    """Hold the attention maps of the chosen heads of a model on one text, exact or pooled.

    Attributes:
        MAPS: The class of its maps.
        FIELDS: Names of fields that a subclass adds, if their values are plain JSON.
        text: The text as given.
        maps: The attention, one map per kind: one for encoders and for decoders; encoder, decoder and cross for both.
        picked: The heads to show, (layer, head), where single ones were asked for; None = all in the maps.
    """

    MAPS: ClassVar[Any]
    FIELDS: ClassVar[tuple[str, ...]] = ()
    COMPRESSED: ClassVar[bool] = False

    # Computed from the maps.
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
        tables["maps"] = Table.of(columns, [attention.table_row(names) for attention in self.maps])
        for index, attention in enumerate(self.maps):
            # Tables and arrays of the first map have plain names.
            suffix = f":{attention.kind}" if index else ""
            for name, table in attention.tables().items():
                tables[f"{name}{suffix}"] = table
            for name, array in attention.arrays().items():
                grids[f"{name}{suffix}"] = array
        options |= {name: getattr(self, name) for name in ("text", "picked", *self.FIELDS)}
        options["texts"] = [[[side.text, side.pair] for side in (m.queries, m.keys)] for m in self.maps]
        contents = {"corpus": {}, "options": options, "tables": tables, "grids": grids}
        for name, value in contents.items():
            # The class is frozen, so a plain assignment is refused.
            object.__setattr__(self, name, value)

    # Heads

    @property
    def has_several_kinds(self) -> bool:
        """Return whether there are maps of several kinds of attention."""
        return len(self.maps) > 1

    def chosen(self, attention: M) -> tuple[tuple[int, int], ...]:
        """Return the heads of a map to show, (layer, head): those picked, as they were picked; else all of them."""
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
                # It raises the error that says which heads there are.
                self.maps[0].place(layer, head)
        return replace(self, picked=tuple(dict.fromkeys(picked)))

    def block(self, layers: Collection[int], heads: Collection[int]) -> Self:
        """Return the same with these layers and heads alone, and all of them shown; maps without any are left out.

        Raises:
            AttnscopeError: No map has any of them.
        """
        maps = []
        for attention in self.maps:
            # The indices of layers and heads on the first two axes of arrays.
            layer_places = np.flatnonzero(np.isin(attention.layers, [*layers]))
            head_places = np.flatnonzero(np.isin(attention.heads, [*heads]))
            if layer_places.size and head_places.size:
                block = np.ix_(layer_places, head_places)
                fields: dict[str, Any] = {}
                for name in attention.ARRAYS:
                    fields[name] = getattr(attention, name)[block]
                fields["layers"] = tuple(attention.layers[place] for place in layer_places)
                fields["heads"] = tuple(attention.heads[place] for place in head_places)
                maps.append(replace(attention, **fields))
        if not maps:
            # It raises the error that says which heads there are; no layer and no head has the number -1.
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
        """Return the map of one head: weights, (query, key), or cells, (row, column).

        Args:
            layer: Number of the layer in the model, from 0.
            head: Number of the head, from 0.
            kind: "encoder", "decoder" or "cross"; None = that of the first map.

        Raises:
            AttnscopeError: It does not hold this head.
        """
        return self.map(kind).of(layer, head)

    # Tables

    def extra_contents(self) -> tuple[dict[str, Table], dict[str, NDArray[Any]], dict[str, Any]]:
        """Return the tables, arrays and options that a subclass has beside those of maps."""
        return {}, {}, {}

    @classmethod
    def read_extra(cls, stored: Result) -> dict[str, Any]:
        """Return the fields of the class again from what `extra_contents` returned."""
        return {}

    @classmethod
    def rebuild(cls, described: Mapping[str, Any], archive: Mapping[str, Any]) -> Self:
        """Return the result again from what `describe` and `arrays` returned; damage raises any kind of error."""
        stored = Result.rebuild(described, archive)
        cls.require_declared(stored.tables, stored.grids)
        options = stored.options
        maps = []
        for index, row in enumerate(stored.tables["maps"].as_dicts()):
            # Tables and arrays of the first map have plain names.
            suffix = f":{row['kind']}" if index else ""
            tables = {name: stored.tables[f"{name}{suffix}"] for name in ("heads", "queries", "keys")}
            arrays = {name: stored.grids[f"{name}{suffix}"] for name in cls.MAPS.ARRAYS}
            maps.append(cls.MAPS.rebuild(row, options["texts"][index], tables, arrays))
        picked = options["picked"]
        return cls(
            text=str(options["text"]),
            maps=tuple(maps),
            run=stored.run,
            picked=None if picked is None else tuple((int(layer), int(head)) for layer, head in picked),
            **{name: tuples_of_lists(options[name]) for name in cls.FIELDS},
            **cls.read_extra(stored),
        )

    def require_whole(self) -> None:
        """Refuse a result that has no maps, shows none of its heads, or has tokens that cannot be shown."""
        super().require_whole()
        for attention in self.maps:
            attention.queries.require_whole()
            attention.keys.require_whole()
        kinds = [attention.kind for attention in self.maps]
        if not kinds:
            raise ValueError("its maps are empty")
        if len({*kinds}) < len(kinds):
            raise ValueError("two of its maps are the same")
        for kind in kinds:
            if kind not in (*KINDS, ROLLOUT):
                raise ValueError(f"its kind is {kind[:40]!r}, not one of {', '.join(KINDS)}")
        if self.picked is not None and not any(self.chosen(attention) for attention in self.maps):
            raise ValueError("it shows none of its heads")

    # A notebook would show HTML rather than the picture.
    _repr_html_ = None  # type: ignore[assignment]

    def _repr_png_(self) -> bytes:
        return bytes(self.record_kind().resolve("glance")(self))

    def __repr__(self) -> str:
        shapes = ", ".join(f"{m.kind} {m.values.shape}" for m in self.maps)
        return f"{type(self).__name__}({self.run.get('model')!r} on {self.text[:40]!r}: {shapes})"


def tuples_of_lists(value: Any) -> Any:
    """Return a JSON value with its lists turned into tuples."""
    if isinstance(value, dict):
        return {key: tuples_of_lists(item) for key, item in value.items()}
    return tuple(map(tuples_of_lists, value)) if isinstance(value, list) else value


def format_ranges(numbers: Sequence[int]) -> str:
    """Return numbers as people write them: (0, 1, 2, 5) is "0-2,5"."""
    ordered = np.unique(np.array(numbers, np.int64))
    # Runs of consecutive numbers.
    runs = np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1)
    ends = [(run[0], run[-1]) for run in runs if len(run)]
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ends)


def choose_heads(
    record: Any,
    pick: Sequence[tuple[int, int]] | None,
    layers: Collection[int] | None,
    heads: Collection[int] | None,
) -> Any:
    """Return a record that shows the single heads of `pick`, else these heads of these layers; None = all.

    Raises:
        AttnscopeError: It does not hold one of them.
    """
    if pick is not None:
        return record.only(pick)
    if layers is None and heads is None:
        return record
    # The heads that the record holds, (layer, head): of maps, or as rows of a table.
    maps = getattr(record, "maps", None)
    if maps is None:
        pairs = record.table("heads").layer_heads
    else:
        pairs = []
        for attention in maps:
            pairs += attention.pairs
    chosen_layers = _require_numbers("layer", layers, {layer for layer, _ in pairs})
    chosen_heads = _require_numbers("head", heads, {head for _, head in pairs})
    if maps is not None:
        return record.block(chosen_layers, chosen_heads)
    picked = []
    for layer, head in dict.fromkeys(pairs):
        if layer in chosen_layers and head in chosen_heads:
            picked.append((layer, head))
    return record.only(picked)


def _require_numbers(what: str, wanted: Collection[int] | None, held: set[int]) -> Collection[int]:
    """Return the wanted numbers of layers or heads, None = all that are held; refuse those that are not held."""
    if wanted is None:
        return held
    missing = sorted({*wanted} - held)
    if missing:
        raise AttnscopeError(
            f"there is no {what} {missing[0]} in this record",
            f"it holds {what}s {format_ranges([*held])}",
        )
    return wanted
