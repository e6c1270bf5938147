"""Run a model on its input, and return its attention maps, exact or pooled.

A record is the result, such as a `Heatmap`. It is first made without attention weights, which tells the memory it
needs. Then the model runs once. A probe fills the record: a hook on the seam, the one function that computes all
attention (`core.attention.seam`). NumPy models, and models whose attention is not computed there, give whole maps
instead. `study` has the functions that users call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from attnscope.choice import ChosenHeads, Crop
from attnscope.errors import AttnscopeError
from attnscope.host import require_memory
from attnscope.models.info import ModelInfo, run_facts
from attnscope.models.model import Model
from attnscope.questions.heatmap import AttentionMap, Heatmap
from attnscope.questions.maps import HeadMaps, MapPart, format_ranges
from attnscope.questions.pooled import PooledHeatmap, PooledMap
from attnscope.studies.failures import make_nan_error
from attnscope.studies.inputs.reading import Reading

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from attnscope.core.attention.pooling import PoolingGrid
    from attnscope.core.attention.probes import HeadRecorder
    from attnscope.core.attention.seam import Kind, Probe

DEFAULT_CELLS = 256
"""The default for the most rows and columns of a pooled map, in cells: a figure can show no more."""

MIN_FAR_TOKENS = 32
"""A link, the weight of a query on a key, is far if the two are more than a cell and more than 32 tokens apart."""

N_FAR_LINKS = 10
"""How many of each head's largest far links are kept."""


# The record without attention weights


def make_empty_record(
    info: ModelInfo, reading: Reading, chosen: ChosenHeads, crop: Crop | None = None
) -> Heatmap:
    """Return a record whose maps have no weights yet: one map for each kind of attention that has a chosen head.

    For speech with a transcript, the record has only cross-attention. If pictures stand among words, their patches are
    keys and not queries.

    Raises:
        AttnscopeError: `crop` exceeds the text, or the model has several kinds of attention; or no head is chosen.
    """
    if crop and (len(info.kinds) > 1 or reading.axes):
        raise AttnscopeError(
            f"{info.name} has {len(info.kinds)} kinds of attention, whose rows and columns differ",
            "leave out --rows and --cols",
        )
    # `axes` is {} unless words attend to pictures by cross-attention. Then it maps each kind of attention to its
    # queries, keys and layers, "cross" first.
    kinds = tuple(reading.axes) or info.kinds
    # For speech with a transcript, only cross-attention.
    if reading.sound is not None and reading.target is not None:
        kinds = ("cross",)
    maps: list[AttentionMap] = []
    for kind in kinds:
        # If cross-attention comes first, it is what the user asks for: refuse to leave it out.
        is_needed = kind == kinds[0] == "cross"
        attention_map = _make_empty_map(info, reading, chosen, crop, kind, is_needed=is_needed)
        if attention_map is not None:
            maps.append(attention_map)
    notes = list(reading.notes)
    # With pictures, the notes of the reading already say which queries are shown.
    if crop and not reading.pictures:
        rows, columns = _slices_of_part(maps[0])
        notes.append(
            f"a part of the map: queries {rows.start} to {rows.stop - 1} and keys {columns.start} to "
            f"{columns.stop - 1} of {len(reading.tokens)} tokens; weights are those of the whole"
        )
    return Heatmap(
        text=reading.text,
        maps=tuple(maps),
        run=run_facts(info, notes),
        picked=chosen.picked,
        picture=reading.picture,
        sound=reading.sound,
        pictures=reading.pictures,
    )


def _make_empty_map(
    info: ModelInfo,
    reading: Reading,
    chosen: ChosenHeads,
    crop: Crop | None,
    kind: str,
    *,
    is_needed: bool,
) -> AttentionMap | None:
    """Return the map of a kind of attention, still without weights; None = no chosen head is of this kind.

    Raises:
        AttnscopeError: The map is needed, and no chosen head is of this kind.
    """
    # Choose the layers and heads of this kind. Not all layers have cross-attention to pictures.
    kind_index = info.kinds.index(kind)
    n_heads = info.n_heads[kind_index]
    available_layers: Sequence[int] = range(info.n_layers[kind_index])
    if kind in reading.axes:
        available_layers = reading.axes[kind].layers
    layers = tuple(layer for layer in chosen.layers if layer in available_layers)
    heads = tuple(head for head in chosen.heads if head < n_heads)
    if not (layers and heads):
        if is_needed:
            raise AttnscopeError(
                f"{info.name} has no {kind}-attention in the layers and heads that are chosen",
                f"it has layers {format_ranges(available_layers)} of {n_heads} heads",
            )
        return None
    # Keep the queries after the last picture, and only the frames with sound: the envelope ends with the recording,
    # and silence fills the rest of the model's window.
    queries, keys = reading.queries_and_keys(kind)
    rows = slice(reading.first_query_after_pictures, len(queries))
    columns = slice(0, len(keys))
    is_cropped = bool(crop) or rows.start > 0
    if kind == "cross" and reading.sound is not None:
        columns = slice(0, len(reading.sound.envelope))
        is_cropped = True
    if crop:
        cropped_rows, columns = crop.resolve_slices(len(queries), len(keys))
        # Without --rows, keep the queries after the pictures.
        if crop.rows is not None:
            rows = cropped_rows
    return AttentionMap(
        kind=kind,
        layers=layers,
        heads=heads,
        weights=np.zeros((len(layers), len(heads), 0, 0), np.float32),
        queries=queries.take(np.arange(rows.start, rows.stop)),
        keys=keys.take(np.arange(columns.start, columns.stop)),
        n_layers=info.n_layers[kind_index],
        n_heads=n_heads,
        n_kv_heads=info.n_kv_heads[kind_index],
        part=MapPart(rows.start, columns.start, len(queries), len(keys)) if is_cropped else None,
    )


# Exact maps


def run_model(
    model: Model, record: Heatmap, reading: Reading, full_width: dict[Any, Any] | None = None
) -> Heatmap:
    """Run a model, and return the record with its attention weights.

    Args:
        model: The model.
        record: The record from `make_empty_record`.
        reading: What the model reads.
        full_width: A dict to fill with the attention that each layer would have with one head as wide as d_model: kind
            of attention → layer → (query, key). A layer where it is not defined is missing. None = do not compute it.

    Raises:
        AttnscopeError: Weights are NaN, or do not fit into memory.
    """
    _require_memory(record)
    layers, heads = _layers_and_heads(record.maps)
    # Models that run on NumPy have `compute_maps`, which returns the weights by layer without a probe.
    if model.compute_maps is not None:
        dense = model.compute_maps(reading.tokens, layers)
        if full_width is not None:
            full_width[record.maps[0].kind] = dense.full
        return replace(
            record,
            maps=tuple(
                _fill_map(attention_map, dense.weights, None, model.info)
                for attention_map in record.maps
            ),
        )
    from attnscope.core.attention.calls import WeightsBesideFullWidth
    from attnscope.core.attention.probes import WeightsRecorder, probe_by_kind

    kinds = tuple(cast("Kind", attention_map.kind) for attention_map in record.maps)
    if reading.axes or (record.maps[0].part is not None and model.info.path == "seam"):
        # Keep only the shown part of each map. Each kind has a probe, as kinds differ in queries and keys.
        probes = {
            attention_map.kind: _make_part_recorder(attention_map) for attention_map in record.maps
        }
        run_probe(model, reading, probe_by_kind(probes))
    else:
        probe = WeightsRecorder(layers, heads, kinds)
        if full_width is not None:
            probe = WeightsBesideFullWidth(layers, heads, kinds)
            probe.full = full_width
        run_probe(model, reading, probe)
        probes = dict.fromkeys(kinds, probe)
    # A probe keeps kind -> layer -> (text, head, query, key). Drop the axis of texts: there is one text.
    maps = []
    for attention_map, kind in zip(record.maps, kinds, strict=True):
        maps_by_layer = probes[kind].maps.get(kind, {})
        by_layer = {layer: batch[0].numpy() for layer, batch in maps_by_layer.items()}
        maps.append(_fill_map(attention_map, by_layer, probes[kind].heads, model.info))
    return replace(record, maps=tuple(maps))


def _layers_and_heads(maps: Sequence[AttentionMap]) -> tuple[list[int], tuple[int, ...] | None]:
    """Return the layers and heads that one probe keeps for all the maps.

    Heads are None = all if there are several maps, as kinds of attention may differ in their heads.
    """
    layers = sorted({layer for attention_map in maps for layer in attention_map.layers})
    if len(maps) == 1 and len(maps[0].heads) < maps[0].n_heads:
        return layers, maps[0].heads
    return layers, None


def _make_part_recorder(attention_map: AttentionMap) -> HeadRecorder[Tensor]:
    """Return a probe that keeps the shown part of a map, (text, chosen head, query, key), on the CPU."""
    import torch

    from attnscope.core.attention.probes import HeadRecorder
    from attnscope.core.attention.row_samples import rows_of

    rows, columns = _slices_of_part(attention_map)
    queries = torch.arange(rows.start, rows.stop)
    layers, heads = _layers_and_heads([attention_map])
    return HeadRecorder(
        lambda call: rows_of(call, queries, keys=columns).float().cpu(),
        layers,
        heads,
        (cast("Kind", attention_map.kind),),
    )


def run_probe(model: Model, reading: Reading, probe: Probe) -> None:
    """Run a model on its input with a probe; the probe keeps what it needs of each attention call."""
    import torch

    # Pictures and sound are read as named tensors, texts as a batch of token ids.
    with torch.inference_mode():
        if reading.inputs and model.run_inputs is not None:
            model.run_inputs(reading.inputs, probe)
        else:
            model.run(reading.batch(model.info.device), probe)


def _slices_of_part(attention_map: AttentionMap) -> tuple[slice, slice]:
    """Return which queries and which keys of the uncropped map are in a map."""
    first_query, first_key = attention_map.origin
    rows = slice(first_query, first_query + len(attention_map.queries))
    return rows, slice(first_key, first_key + len(attention_map.keys))


def _fill_map(
    attention_map: AttentionMap,
    by_layer: Mapping[int, NDArray[np.float32]],
    probed_heads: Sequence[int] | None,
    info: ModelInfo,
) -> AttentionMap:
    """Return the map with its weights.

    Args:
        attention_map: The map from `make_empty_record`.
        by_layer: The weights of each layer that has attention, (probed head, query, key). Their queries and keys are
            those of the map, or those of the uncropped map.
        probed_heads: The numbers of the probed heads; None = all.
        info: The facts of the model.
    """
    attention_map = _without_empty_layers(attention_map, by_layer)
    weights = [by_layer[layer] for layer in attention_map.layers]
    # A model without a probe at the seam gives the uncropped map: crop it.
    if weights[0].shape[1:] != (len(attention_map.queries), len(attention_map.keys)):
        rows, columns = _slices_of_part(attention_map)
        weights = [layer_weights[:, rows, columns] for layer_weights in weights]
    return replace(attention_map, weights=_stack_layers(attention_map, weights, probed_heads, info))


def _without_empty_layers(attention_map: AttentionMap, by_layer: Mapping[int, Any]) -> AttentionMap:
    """Return the map without the layers that have no attention.

    Raises:
        AttnscopeError: None of its layers has attention.
    """
    layers = tuple(layer for layer in attention_map.layers if layer in by_layer)
    if not layers:
        raise AttnscopeError(
            f"no attention in layers {format_ranges(attention_map.layers)}: this model has none there",
            "choose other layers",
        )
    return replace(attention_map, layers=layers)


def _stack_layers(
    attention_map: AttentionMap,
    layer_arrays: Sequence[NDArray[Any]],
    probed_heads: Sequence[int] | None,
    info: ModelInfo,
) -> NDArray[Any]:
    """Return the arrays of a map's layers, each (probed head, ...), as one array (layer, head, ...).

    Heads that a layer lacks are NaN, or -1 in an integer array. `probed_heads` None = all heads were probed.

    Raises:
        AttnscopeError: An array has NaN.
    """
    # Start with the value of a head that the layer lacks.
    shape = (len(layer_arrays), len(attention_map.heads), *layer_arrays[0].shape[1:])
    stacked: NDArray[Any] = np.full(shape, np.nan, np.float32)
    if np.issubdtype(layer_arrays[0].dtype, np.integer):
        stacked = np.full(shape, -1, np.int32)
    # Find the row of each head of the map among the probed heads, which are ascending.
    head_rows = np.array(attention_map.heads)
    if probed_heads is not None:
        head_rows = np.searchsorted(probed_heads, head_rows)
    for layer_index, layer_array in enumerate(layer_arrays):
        if np.isnan(layer_array).any():
            raise make_nan_error(info, (attention_map.kind, attention_map.layers[layer_index]))
        has_head = head_rows < len(layer_array)
        stacked[layer_index, has_head] = layer_array[head_rows[has_head]]
    return stacked


def _require_memory(record: Heatmap) -> None:
    """Refuse maps that do not fit into memory, at 4 bytes a weight, before the model runs for minutes."""
    n_weights = 0
    for attention_map in record.maps:
        n_heads = len(attention_map.layers) * len(attention_map.heads)
        n_weights += n_heads * len(attention_map.queries) * len(attention_map.keys)
    require_memory(
        4 * n_weights,
        f"the maps of {len(record.maps[0].keys)} tokens",
        "choose fewer layers and heads (-L, -H, --pick), a part (--rows, --cols), or --pool 256",
    )


# Pooled maps


def pool_maps(model: Model, reading: Reading, chosen: ChosenHeads, max_cells: int) -> PooledHeatmap:
    """Run a model, and return its maps pooled to at most `max_cells` rows and columns of cells.

    Raises:
        AttnscopeError: The model's attention does not pass through the seam.
    """
    if model.info.path != "seam":
        raise AttnscopeError(
            f"{model.info.name} does not pass its attention through the seam: only its whole maps can be seen",
            "--pool 0, on fewer tokens",
        )
    from attnscope.core.attention.pooling import pool_attention
    from attnscope.core.attention.probes import HeadRecorder

    # Run the model once. Its probe pools each attention call on the grid of its kind.
    record = make_empty_record(model.info, reading, chosen)
    grids = {
        cast("Kind", attention_map.kind): _make_grid(attention_map, max_cells)
        for attention_map in record.maps
    }
    layers, heads = _layers_and_heads(record.maps)
    probe = HeadRecorder(
        lambda call: pool_attention(call, grids[call.kind]), layers, heads, tuple(grids)
    )
    run_probe(model, reading, probe)
    # Stack the cells, marginals and links of each kind over layers: (layer, head, …).
    maps = []
    for (kind, grid), attention_map in zip(grids.items(), record.maps, strict=True):
        by_layer = probe.maps.get(kind, {})
        attention_map = _without_empty_layers(attention_map, by_layer)
        shared = {field.name: getattr(attention_map, field.name) for field in fields(HeadMaps)}
        arrays: dict[str, Any] = {}
        for name in PooledMap.ARRAYS:
            layer_arrays = [getattr(by_layer[layer], name)[0].numpy() for layer in attention_map.layers]
            arrays[name] = _stack_layers(attention_map, layer_arrays, probe.heads, model.info)
        maps.append(
            PooledMap(
                **shared,
                **arrays,
                query_cell=grid.query_cell,
                key_cell=grid.key_cell,
                far_tokens=-1 if grid.far_tokens is None else grid.far_tokens,
            )
        )
    return PooledHeatmap(text=record.text, maps=tuple(maps), run=record.run, picked=record.picked)


def _make_grid(attention_map: AttentionMap, max_cells: int) -> PoolingGrid:
    """Return how a map is pooled, and which of its tokens may have links."""
    import torch

    from attnscope.core.attention.pooling import PoolingGrid

    # How many tokens a cell holds, rounded up.
    query_cell = math.ceil(len(attention_map.queries) / max_cells)
    key_cell = math.ceil(len(attention_map.keys) / max_cells)
    # Special tokens have no links. Nor has the first key: heads with nothing to do attend to it (an attention sink).
    skipped_keys = attention_map.keys.special.copy()
    skipped_keys[0] = True
    return PoolingGrid(
        query_cell=query_cell,
        key_cell=key_cell,
        n_links=N_FAR_LINKS,
        far_tokens=None if attention_map.kind == "cross" else max(key_cell, MIN_FAR_TOKENS),
        is_excluded_query=torch.from_numpy(attention_map.queries.special.copy()),
        is_excluded_key=torch.from_numpy(skipped_keys),
    )
