"""Hold the attention maps of heads, exact or pooled: which heads they have, how to select heads, how files store them.

A `MapsResult` has a text and one `HeadMaps` per kind of attention; a variable `attention` below is one `HeadMaps`.
"This record" in messages is the result. A file stores the result as named tables and arrays. The first `HeadMaps` uses
plain names, such as `heads`; each further one appends its kind, such as `heads:cross`.

A *whole* map has all queries and keys of its inputs; a *part* is cropped to some of them, for example by `--rows`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError
from attnscope.results.result import Result
from attnscope.results.table import HEADS, Table, count, text
from attnscope.results.tokens import TOKEN_COLUMNS, Tokens, make_tokens_table, tokens_from_table

KINDS = ("encoder", "decoder", "cross")
"""The kinds of attention. They become part of file names."""

ROLLOUT = "rollout"
"""The `kind` of attention-rollout maps, which follow tokens through all layers: no attention of the model itself."""

LINK_COLUMNS = ("kind", "layer", "head", "query", "key", "query_token", "key_token", "weight")
"""The columns of a link, which is one attention weight between two tokens, in CSV and JSON."""

MAP_TABLES: Mapping[str, Any] = {
    # One row of facts per `HeadMaps`. The last four columns are -1 if the map is not cropped; see `MapPart`.
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
    # `name` labels a mean or a rollout, such as "mean attention", which takes the place of a head.
    "heads": (
        *HEADS,
        text("name", "what stands in the place of a head is called; empty = it is a head"),
    ),
    "queries": TOKEN_COLUMNS,
    "keys": TOKEN_COLUMNS,
}
"""The columns of the tables that every result of maps has. Subclasses declare their `TABLES` from these."""


class MapPart(NamedTuple):
    """Locate a cropped map in the whole map: its top left corner, and the size of the whole map.

    Attributes:
        first_query: The row of the whole map at which the cropped map begins.
        first_key: The column of the whole map at which the cropped map begins.
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
        ARRAYS: The names of the fields that hold arrays, set by each subclass. The first one holds the maps, such as
            "weights" or "cells". Arrays are (layer, head, ...), in the order of `layers` and `heads`. Where a layer
            lacks a head that another layer has, the array is NaN.
        kind: "encoder", "decoder" (its self-attention), "cross" (from a decoder to the encoder), or ROLLOUT.
        layers: Numbers of the layers in the arrays, from 0.
        heads: Numbers of the heads in the arrays, from 0.
        queries: The tokens that attend, row by row.
        keys: The tokens that are attended to, column by column. In whole maps of self-attention this is the same object
            as `queries`: code tests `keys is queries`.
        n_layers: How many layers of this kind the model has.
        n_heads: How many heads a layer has (the most, where layers differ).
        n_kv_heads: How many key/value heads a layer has; fewer than n_heads where query heads share them.
        part: Where this map lies in the whole map; None = it is the whole map.
        head_names: Labels of means or rollouts that the maps have in place of heads, such as "mean attention", in the
            order of `heads`. Empty = the maps are of real heads.
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
        """Return the offset of the map within the whole map: (first query, first key); (0, 0) if it is not cropped."""
        return (0, 0) if self.part is None else self.part[:2]

    def head_name(self, head: int) -> str:
        """Return the label of a head number, such as "H1", or its label in `head_names`."""
        return self.head_names[self.heads.index(head)] if self.head_names else f"H{head}"

    def name_of(self, layer: int, head: int) -> str:
        """Return the label of a head of a layer, such as "L3H1" or "L3 mean attention"."""
        if not self.head_names:
            return f"L{layer}H{head}"
        # A mean over layers is stored as a single layer, whose number means nothing.
        return self.head_name(head) if self.n_layers == 1 else f"L{layer} {self.head_name(head)}"

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Return every combination (layer, head) of `layers` and `heads`, even if the layer lacks the head."""
        return [(layer, head) for layer in self.layers for head in self.heads]

    def place(self, layer: int, head: int) -> tuple[int, int]:
        """Return the indices of a head on the first two axes of the arrays.

        Raises:
            AttnscopeError: The number of the layer or of the head is not among `layers` or `heads`.
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
        """Return whether the maps include this head. A head that its layer lacks is NaN, no other is."""
        return (
            layer in self.layers
            and head in self.heads
            and not bool(np.isnan(self.of(layer, head)).any())
        )

    def tables(self) -> dict[str, Table]:
        """Return the tables `heads`, `queries` and `keys` that files store, by name."""
        pairs = self.pairs
        names = self.head_names or ("",) * len(self.heads)
        heads = Table.of_arrays(
            MAP_TABLES["heads"],
            kind=[self.kind] * len(pairs),
            layer=[layer for layer, _ in pairs],
            head=[head for _, head in pairs],
            # `pairs` goes through all heads of a layer before the next layer, so the names repeat per layer.
            name=names * len(self.layers),
        )
        return {
            "heads": heads,
            "queries": make_tokens_table(self.queries),
            "keys": make_tokens_table(self.keys),
        }

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays that files store, by name: their first axis is the rows of the table `heads`."""
        arrays = {}
        for name in self.ARRAYS:
            # (layer, head, ...) becomes (row, ...).
            values = getattr(self, name)
            arrays[name] = values.reshape(len(self.pairs), *values.shape[2:])
        return arrays

    def table_row(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the row of the table `maps` for this kind, a value for each of the columns `names`.

        The four columns of `MapPart` are -1 if the map is not cropped.
        """
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
        """Rebuild the maps of one kind from the contents of a file.

        Args:
            row: The row that `table_row` wrote.
            texts: ((text, second text), (text, second text)) of the queries and of the keys; second text: the other
                segment of a text pair, or None.
            tables: The tables that `tables` wrote.
            arrays: The arrays that `arrays` wrote.
        """
        # The table has a row for each head of the first layer, then for each head of the next layer.
        table = tables["heads"]
        layers = tuple(dict.fromkeys(table["layer"].tolist()))
        heads = tuple(dict.fromkeys(table["head"].tolist()))
        names = tuple(table["name"][: len(heads)].tolist())
        query_texts, key_texts = texts
        queries = tokens_from_table(tables["queries"], *query_texts)
        keys = tokens_from_table(tables["keys"], *key_texts)
        part = MapPart(*(row.pop(name) for name in MapPart._fields))
        is_part = part.first_query >= 0
        # In whole maps of self-attention, `keys is queries` has to hold again.
        if row["kind"] != "cross" and not is_part and keys.labels == queries.labels:
            keys = queries
        # (row, ...) becomes (layer, head, ...).
        fields: dict[str, Any] = {}
        for name in cls.ARRAYS:
            values = arrays[name]
            # Whatever width a file has, fields have 32 bits. Arrays that are not floats are token indices.
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
        heads = f"layers {format_ranges(self.layers)}, heads {format_ranges(self.heads)}"
        return f"{type(self).__name__}({self.kind}, {heads}, {self.values.shape})"


M = TypeVar("M", bound=HeadMaps)


@dataclass(frozen=True, eq=False, repr=False)
class MapsResult(Result, Generic[M]):
    """Hold the attention maps of some heads of a model on one text, exact or pooled.

    Heads are selected in two ways. `only` sets `picked`: it marks the heads to show, and keeps all arrays. `block` cuts
    the arrays down to some layers and heads.

    Attributes:
        MAPS: The subclass of `HeadMaps` that `maps` has.
        FIELDS: Names of fields that a subclass adds and whose values are plain JSON.
        COMPRESSED: Whether `.npz` files are compressed.
        text: The text as given.
        maps: One `HeadMaps` per kind of attention. Encoders and decoders have one. Encoder-decoders have three:
            encoder, decoder and cross.
        picked: The heads to show, (layer, head), if the user picked single heads; None = all heads in the maps.
    """

    MAPS: ClassVar[Any]
    FIELDS: ClassVar[tuple[str, ...]] = ()
    COMPRESSED: ClassVar[bool] = False

    # The fields of `Result`, which `__post_init__` fills from the maps: facts about the texts (none, for one text),
    # settings, tables and arrays by name.
    corpus: Mapping[str, Any] = field(init=False)
    options: Mapping[str, Any] = field(init=False)
    tables: Mapping[str, Table] = field(init=False)
    grids: Mapping[str, NDArray[Any]] = field(init=False)

    text: str
    maps: tuple[M, ...]
    picked: tuple[tuple[int, int], ...] | None = None

    def find_listed_rows(self, **shown: Any) -> list[int]:
        """Return no rows: the terminal lists no table of weights, and files have all."""
        return []

    def __post_init__(self) -> None:
        tables, grids, options = self.extra_contents()
        columns = self.TABLES["maps"]
        names = [column.name for column in columns]
        tables["maps"] = Table.of(columns, [attention.table_row(names) for attention in self.maps])
        for index, attention in enumerate(self.maps):
            # The first map has plain names, further maps append their kind.
            suffix = f":{attention.kind}" if index else ""
            for name, table in attention.tables().items():
                tables[f"{name}{suffix}"] = table
            for name, array in attention.arrays().items():
                grids[f"{name}{suffix}"] = array
        options |= {name: getattr(self, name) for name in ("text", "picked", *self.FIELDS)}
        # Per map: [text, second text of a pair or None] of the queries, then of the keys.
        options["texts"] = [[[side.text, side.pair] for side in (m.queries, m.keys)] for m in self.maps]
        contents = {"corpus": {}, "options": options, "tables": tables, "grids": grids}
        for name, value in contents.items():
            # A frozen dataclass refuses a plain assignment.
            object.__setattr__(self, name, value)

    # Heads

    @property
    def has_several_kinds(self) -> bool:
        """Return whether there are maps of several kinds of attention."""
        return len(self.maps) > 1

    def chosen(self, attention: M) -> tuple[tuple[int, int], ...]:
        """Return the heads of a map to show, (layer, head): the picked heads in their order, or else all heads."""
        wanted = self.picked or attention.pairs
        return tuple(pair for pair in wanted if attention.exists(*pair))

    def only(self, picked: Sequence[tuple[int, int]]) -> Self:
        """Return a copy that shows only these heads, (layer, head). It keeps the arrays of all heads.

        Raises:
            AttnscopeError: The result lacks one of them.
        """
        if not picked:
            raise AttnscopeError("no head is chosen")
        for layer, head in picked:
            if not any(attention.exists(layer, head) for attention in self.maps):
                # Called for its error, which lists the heads that the first map has.
                self.maps[0].place(layer, head)
        return replace(self, picked=tuple(dict.fromkeys(picked)))

    def block(self, layers: Collection[int], heads: Collection[int]) -> Self:
        """Return a copy cut down to these layers and heads, all of which it shows. Drop maps that have none of them.

        Raises:
            AttnscopeError: No map has any of them.
        """
        maps = []
        for attention in self.maps:
            # The indices of layers and heads on the first two axes of arrays.
            layer_indices = np.flatnonzero(np.isin(attention.layers, [*layers]))
            head_indices = np.flatnonzero(np.isin(attention.heads, [*heads]))
            if layer_indices.size and head_indices.size:
                block = np.ix_(layer_indices, head_indices)
                fields: dict[str, Any] = {}
                for name in attention.ARRAYS:
                    fields[name] = getattr(attention, name)[block]
                fields["layers"] = tuple(attention.layers[index] for index in layer_indices)
                fields["heads"] = tuple(attention.heads[index] for index in head_indices)
                maps.append(replace(attention, **fields))
        if not maps:
            # Called for its error, which lists the heads that the first map has; -1 is the number of no layer or head.
            self.maps[0].place(min(layers, default=-1), min(heads, default=-1))
        return replace(self, maps=tuple(maps), picked=None)

    def map(self, kind: str | None = None) -> M:
        """Return the map of a kind of attention: "encoder", "decoder" or "cross"; None = the first.

        Raises:
            AttnscopeError: The model has no attention of that kind.
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
            kind: "encoder", "decoder" or "cross"; None = the kind of the first map.

        Raises:
            AttnscopeError: The map lacks this head.
        """
        return self.map(kind).of(layer, head)

    # Tables

    def extra_contents(self) -> tuple[dict[str, Table], dict[str, NDArray[Any]], dict[str, Any]]:
        """Return further tables, arrays and options, by name, for a subclass to store in files."""
        return {}, {}, {}

    @classmethod
    def read_extra(cls, stored: Result) -> dict[str, Any]:
        """Return the fields of a subclass, by name, from the contents that `extra_contents` stored."""
        return {}

    @classmethod
    def rebuild(cls, described: Mapping[str, Any], archive: Mapping[str, Any]) -> Self:
        """Rebuild the result from the JSON header and the arrays of a file. Damage raises any kind of error."""
        stored = Result.rebuild(described, archive)
        # Refuse tables and arrays that the class does not declare, or that lack columns.
        cls.require_declared(stored.tables, stored.grids)
        options = stored.options
        maps = []
        for index, row in enumerate(stored.tables["maps"].as_dicts()):
            # The same names as in `__post_init__`.
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
        """Refuse a damaged result: no maps, two of a kind, an unknown kind, damaged tokens, or no head to show."""
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

    # Notebooks prefer HTML to a picture, so this switches the HTML of `Result` off.
    _repr_html_ = None  # type: ignore[assignment]

    def _repr_png_(self) -> bytes:
        return bytes(self.record_kind().resolve("notebook_image")(self))

    def __repr__(self) -> str:
        shapes = ", ".join(f"{m.kind} {m.values.shape}" for m in self.maps)
        return f"{type(self).__name__}({self.run.get('model')!r} on {self.text[:40]!r}: {shapes})"


def tuples_of_lists(value: Any) -> Any:
    """Return a JSON value with its lists turned into tuples, as the fields of frozen classes have them."""
    if isinstance(value, dict):
        return {key: tuples_of_lists(item) for key, item in value.items()}
    return tuple(map(tuples_of_lists, value)) if isinstance(value, list) else value


def format_ranges(numbers: Sequence[int]) -> str:
    """Format numbers as ranges: (0, 1, 2, 5) becomes "0-2,5"."""
    ordered = np.unique(np.array(numbers, np.int64))
    # Split where the next number is not consecutive.
    runs = np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1)
    ends = [(run[0], run[-1]) for run in runs if len(run)]
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ends)


def choose_heads(
    record: Any,
    pick: Sequence[tuple[int, int]] | None,
    layers: Collection[int] | None,
    heads: Collection[int] | None,
) -> Any:
    """Return a copy of a result that shows the single heads of `pick`, or else these heads in these layers.

    Args:
        record: A `MapsResult`, or another result with a table `heads`.
        pick: Single heads, (layer, head). If given, `layers` and `heads` do not count.
        layers: Numbers of layers; None = all layers.
        heads: Numbers of heads; None = all heads.

    Raises:
        AttnscopeError: The result lacks one of them.
    """
    if pick is not None:
        return record.only(pick)
    if layers is None and heads is None:
        return record
    # The heads that the result has, (layer, head). Only a `MapsResult` has maps, which `block` can cut.
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


def _require_numbers(noun: str, wanted: Collection[int] | None, known: set[int]) -> Collection[int]:
    """Return the wanted numbers of layers or heads, or all that the result has if `wanted` is None.

    Args:
        noun: "layer" or "head", for the message.
        wanted: The numbers to check; a number that the result lacks is refused.
        known: The numbers that the result has.
    """
    if wanted is None:
        return known
    missing = sorted({*wanted} - known)
    if missing:
        raise AttnscopeError(
            f"there is no {noun} {missing[0]} in this record",
            f"it holds {noun}s {format_ranges([*known])}",
        )
    return wanted
