"""Run a model on its input, and return its maps: outline the record, probe one pass, lay out the weights.

Exact maps and pooled ones share all of this. What a user asks for, and in which words, is the business of `study`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from attnscope.choice import Chosen, Cut
from attnscope.errors import AttnscopeError
from attnscope.host import require_memory
from attnscope.models.info import ModelInfo
from attnscope.models.model import Model
from attnscope.questions.heatmap import AttentionMap, Heatmap
from attnscope.questions.maps import spans
from attnscope.questions.pooled import PooledHeatmap, PooledMap
from attnscope.studies.failures import refusal
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.reading import Reading

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from attnscope.core.attention.pooling import Grid
    from attnscope.core.attention.probes import OfChosen
    from attnscope.core.attention.seam import Kind, Probe

CELLS = 256
"""Rows and columns of cells, at most: what a figure can show and a reader can see."""

LEAST_FAR = 32
"""A link is far where query and key are more than a cell apart, and at least this many tokens."""

N_LINKS = 10
"""Links that are kept of each head."""

_SHARED = ("kind", "heads", "queries", "keys", "n_layers", "n_heads", "n_kv_heads")
"""Fields that a pooled map has of the whole one."""


# The record without weights


def outline(info: ModelInfo, reading: Reading, chosen: Chosen, cut: Cut | None = None) -> Heatmap:
    """Return the record as it will be, without weights: a map for each kind of attention that has a chosen head.

    For speech it is the cross-attention alone; of pictures among words, patches are keys alone.

    Raises:
        AttnscopeError: A part is asked for that the text does not have, or of several maps; or no head is chosen.
    """
    if cut and (len(info.kinds) > 1 or reading.axes):
        raise AttnscopeError(
            f"{info.name} has {len(info.kinds)} kinds of attention, whose rows and columns differ",
            "leave out --rows and --cols",
        )
    # Models with cross-attention to pictures begin with that; speech has the frames with sound as keys.
    kinds = tuple(reading.axes) or info.kinds
    n_heard = None
    if reading.sound is not None and reading.target is not None:
        kinds = ("cross",)
        n_heard = len(reading.sound.envelope)
    notes = list(reading.notes)
    maps: list[AttentionMap] = []
    for kind in kinds:
        kind_index = info.kinds.index(kind)
        known: Sequence[int] = range(info.n_layers[kind_index])
        if kind in reading.axes:
            known = reading.axes[kind].layers
        # Its chosen layers and heads.
        layers = tuple(layer for layer in chosen.layers if layer in known)
        heads = tuple(head for head in chosen.heads if head < info.n_heads[kind_index])
        if not (layers and heads):
            if kind == kinds[0] == "cross":
                raise AttnscopeError(
                    f"{info.name} has no cross-attention in the layers and heads that are chosen",
                    f"it has layers {spans(known)} of {info.n_heads[kind_index]} heads",
                )
            continue
        # The tokens at both sides, of which a part may be kept.
        queries, keys = reading.queries_and_keys(kind)
        rows = slice(reading.after_pictures, len(queries))
        columns = slice(0, n_heard or len(keys))
        # Without --rows the queries stay those after the pictures.
        if cut:
            cut_rows, columns = cut.within(len(queries), len(keys))
            if cut.rows is not None:
                rows = cut_rows
        if cut and not reading.pictures:
            notes.append(
                f"a part of the map: queries {rows.start} to {rows.stop - 1} and keys {columns.start} to "
                f"{columns.stop - 1} of {len(keys)} tokens; weights are those of the whole"
            )
        # Where the part stands in the whole, and how large that is.
        part = None
        if cut or rows.start > 0 or n_heard is not None:
            part = (rows.start, columns.start, len(queries), len(keys))
        maps.append(
            AttentionMap(
                kind=kind,
                layers=layers,
                heads=heads,
                weights=np.zeros((len(layers), len(heads), 0, 0), np.float32),
                queries=queries.take(np.arange(rows.start, rows.stop)),
                keys=keys.take(np.arange(columns.start, columns.stop)),
                n_layers=info.n_layers[kind_index],
                n_heads=info.n_heads[kind_index],
                n_kv_heads=info.n_kv_heads[kind_index],
                part=part,
            )
        )
    return Heatmap(
        text=reading.text,
        maps=tuple(maps),
        run=run_of(info, notes),
        picked=chosen.picked,
        picture=reading.picture,
        sound=reading.sound,
        pictures=reading.pictures,
    )


# Exact maps


def run_model(
    model: Model, record: Heatmap, reading: Reading, full_width: dict[Any, Any] | None = None
) -> Heatmap:
    """Return the outlined record with the model's weights.

    Args:
        model: The model.
        record: What `outline` made.
        reading: What the model reads.
        full_width: A dict to fill with what a single head over all of d_model would attend to in each layer, kind →
            layer → (query, key); layers where it is not defined are missing. None = not wanted.

    Raises:
        AttnscopeError: Weights are NaN, or do not fit into memory.
    """
    _require_memory(record)
    layers, heads = _layers_and_heads(record.maps)
    # Some models give their weights without a probe.
    if model.look is not None:
        look = model.look(reading.tokens, layers)
        if full_width is not None:
            full_width[record.maps[0].kind] = look.full
        return replace(record, maps=tuple(_fill(m, look.weights, None, model.info) for m in record.maps))
    from attnscope.core.attention.calls import WeightsBesideFullWidth
    from attnscope.core.attention.probes import Weights, probe_by_kind

    kinds = tuple(cast("Kind", m.kind) for m in record.maps)
    if reading.axes or (record.maps[0].part is not None and model.info.path == "seam"):
        # Keep only the part that is shown, for each kind, as kinds differ in queries and keys.
        probes = {m.kind: _part_of(m) for m in record.maps}
        run_probe(model, reading, probe_by_kind(probes))
    else:
        probe = Weights(layers, heads, kinds)
        if full_width is not None:
            probe = WeightsBesideFullWidth(layers, heads, kinds)
            probe.full = full_width
        run_probe(model, reading, probe)
        probes = dict.fromkeys(kinds, probe)
    # Weights of the one text of the batch, (head, query, key), by layer.
    maps = []
    for m, kind in zip(record.maps, kinds, strict=True):
        weights = probes[kind].maps.get(kind, {})
        by_layer = {layer: batch[0].numpy() for layer, batch in weights.items()}
        maps.append(_fill(m, by_layer, probes[kind].heads, model.info))
    return replace(record, maps=tuple(maps))


def _layers_and_heads(maps: Sequence[AttentionMap]) -> tuple[list[int], tuple[int, ...] | None]:
    """Return the layers and heads that one probe keeps for some maps; None = all heads, as layers may have fewer."""
    layers = sorted({layer for m in maps for layer in m.layers})
    if len(maps) == 1 and len(maps[0].heads) < maps[0].n_heads:
        return layers, maps[0].heads
    return layers, None


def _part_of(attention: AttentionMap) -> OfChosen[Tensor]:
    """Return a probe that keeps the part of a map that is shown, (batch, chosen head, query, key), on the CPU."""
    import torch

    from attnscope.core.attention.probes import OfChosen
    from attnscope.core.attention.row_samples import rows_of

    rows, columns = _slices_of(attention)
    queries = torch.arange(rows.start, rows.stop)
    layers, heads = _layers_and_heads([attention])
    kinds = (cast("Kind", attention.kind),)
    return OfChosen(
        lambda call: rows_of(call, queries, keys=columns).float().cpu(), layers, heads, kinds
    )


def run_probe(model: Model, reading: Reading, probe: Probe) -> None:
    """Run a model on what it reads, with the probe at the seam."""
    import torch

    with torch.inference_mode():
        if reading.inputs and model.run_inputs is not None:
            model.run_inputs(reading.inputs, probe)
        else:
            model.run(reading.batch(model.info.device), probe)


def _slices_of(attention: AttentionMap) -> tuple[slice, slice]:
    """Return which queries and keys of the whole a map holds."""
    query, key = attention.first
    return slice(query, query + len(attention.queries)), slice(key, key + len(attention.keys))


def _fill(
    attention: AttentionMap,
    by_layer: Mapping[int, NDArray[np.float32]],
    probed_heads: Sequence[int] | None,
    info: ModelInfo,
) -> AttentionMap:
    """Return the map with its weights, without layers that have no attention."""
    layers = _layers_found(attention, by_layer)
    weights = [by_layer[layer] for layer in layers]
    # A model off the seam gives whole maps.
    if weights[0].shape[1:] != (len(attention.queries), len(attention.keys)):
        rows, columns = _slices_of(attention)
        weights = [each[:, rows, columns] for each in weights]
    return replace(
        attention, layers=layers, weights=_lay_heads(attention, layers, weights, probed_heads, info)
    )


def _lay_heads(
    attention: AttentionMap,
    layers: Sequence[int],
    numbers: Sequence[NDArray[Any]],
    probed_heads: Sequence[int] | None,
    info: ModelInfo,
) -> NDArray[Any]:
    """Return numbers of layers, each (head, ...) of the heads that were probed, as one array (layer, head, ...).

    Heads that a layer lacks are NaN, or -1 in whole numbers.

    Raises:
        AttnscopeError: A number is NaN.
    """
    # (layer, head, ...), filled with what stands for a head that is not there.
    shape = (len(layers), len(attention.heads), *numbers[0].shape[1:])
    laid: NDArray[Any] = np.full(shape, np.nan, np.float32)
    if np.issubdtype(numbers[0].dtype, np.integer):
        laid = np.full(shape, -1, np.int32)
    # Where the heads of the map stand in what was probed.
    places = np.array(attention.heads)
    if probed_heads is not None:
        places = np.searchsorted(probed_heads, places)
    for row, (layer, of_layer) in enumerate(zip(layers, numbers, strict=True)):
        if np.isnan(of_layer).any():
            raise refusal(info, (attention.kind, layer))
        is_there = places < len(of_layer)
        laid[row, is_there] = of_layer[places[is_there]]
    return laid


def _layers_found(attention: AttentionMap, by_layer: Mapping[int, Any]) -> tuple[int, ...]:
    """Return the layers of a map that have attention.

    Raises:
        AttnscopeError: None has.
    """
    layers = tuple(layer for layer in attention.layers if layer in by_layer)
    if not layers:
        raise AttnscopeError(
            f"no attention in layers {spans(attention.layers)}: this model has none there",
            "choose other layers",
        )
    return layers


def _require_memory(record: Heatmap) -> None:
    """Refuse maps that do not fit into memory, before the model runs for minutes."""
    needed = sum(4 * len(m.layers) * len(m.heads) * len(m.queries) * len(m.keys) for m in record.maps)
    require_memory(
        needed,
        f"the maps of {len(record.maps[0].keys)} tokens",
        "choose fewer layers and heads (-L, -H, --pick), a part (--rows, --cols), or --pool 256",
    )


# Pooled maps


def pool_maps(model: Model, reading: Reading, chosen: Chosen, cells: int) -> PooledHeatmap:
    """Run a model, and return its maps pooled to at most so many rows and columns of cells.

    Raises:
        AttnscopeError: The model's attention does not pass through the seam.
    """
    if model.info.path != "seam":
        raise AttnscopeError(
            f"{model.info.name} does not pass its attention through the seam: only its whole maps can be seen",
            "--pool 0, on fewer tokens",
        )
    whole = outline(model.info, reading, chosen)
    from attnscope.core.attention.pooling import pool_attention
    from attnscope.core.attention.probes import OfChosen

    # One pass, with a grid for each kind of attention.
    grids = {cast("Kind", m.kind): _grid(m, cells) for m in whole.maps}
    layers_to_probe, heads = _layers_and_heads(whole.maps)
    probe = OfChosen(
        lambda call: pool_attention(call, grids[call.kind]), layers_to_probe, heads, tuple(grids)
    )
    run_probe(model, reading, probe)
    # Lay out the cells, marginals and links of each kind. (layer, head, …)
    maps = []
    for m in whole.maps:
        kind = cast("Kind", m.kind)
        by_layer = probe.maps.get(kind, {})
        layers = _layers_found(m, by_layer)
        arrays: dict[str, Any] = {}
        for name in PooledMap.ARRAYS:
            numbers = [getattr(by_layer[layer], name)[0].numpy() for layer in layers]
            arrays[name] = _lay_heads(m, layers, numbers, probe.heads, model.info)
        grid = grids[kind]
        shared = {name: getattr(m, name) for name in _SHARED}
        far = -1 if grid.far is None else grid.far
        maps.append(
            PooledMap(
                **shared,
                **arrays,
                layers=layers,
                query_cell=grid.query_cell,
                key_cell=grid.key_cell,
                far_tokens=far,
            )
        )
    return PooledHeatmap(text=whole.text, maps=tuple(maps), run=whole.run, picked=whole.picked)


def _grid(attention: AttentionMap, cells: int) -> Grid:
    """Return how a map is pooled, and between which of its tokens links are looked for."""
    import torch

    from attnscope.core.attention.pooling import Grid

    # As many tokens a cell as it takes, rounded up.
    key_cell = -(-len(attention.keys) // cells)
    no_key = attention.keys.special.copy()
    no_key[0] = True  # heads that have nothing to do rest on the first token, special or not
    return Grid(
        query_cell=-(-len(attention.queries) // cells),
        key_cell=key_cell,
        n_links=N_LINKS,
        far=None if attention.kind == "cross" else max(key_cell, LEAST_FAR),
        no_query=torch.from_numpy(attention.queries.special.copy()),
        no_key=torch.from_numpy(no_key),
    )
