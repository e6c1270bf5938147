"""Run a model on its input, and return its maps, exact or pooled.

First the record is outlined: all of it but its weights. Then the model runs once. All of its attention passes one
function, the seam (`core.attention.seam`); a probe there sees each call, and fills the record. `study` has what users
call.
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

CELLS = 256
"""The most rows and columns of cells, unless a user says otherwise: a figure shows no more."""

MIN_FAR = 32
"""A link, the weight of a query on a key, is far where these are more than a cell and at least so many tokens apart."""

N_LINKS = 10
"""How many of the largest far links are kept of each head."""


# The record without weights


def outline(info: ModelInfo, reading: Reading, chosen: ChosenHeads, cut: Crop | None = None) -> Heatmap:
    """Return the record as it will be, without weights: a map for each kind of attention that has a chosen head.

    For speech with a transcript, only cross-attention is shown. Where pictures stand among words, patches are shown as
    keys and not as queries.

    Raises:
        AttnscopeError: `cut` asks for a part that the text does not have, or of several maps; or no head is chosen.
    """
    if cut and (len(info.kinds) > 1 or reading.axes):
        raise AttnscopeError(
            f"{info.name} has {len(info.kinds)} kinds of attention, whose rows and columns differ",
            "leave out --rows and --cols",
        )
    # `axes` is filled where words attend across to pictures: kind -> its queries, keys and layers, "cross" first.
    kinds = tuple(reading.axes) or info.kinds
    # Speech with a transcript.
    if reading.sound is not None and reading.target is not None:
        kinds = ("cross",)
    maps: list[AttentionMap] = []
    for kind in kinds:
        # If the first map is of cross-attention, it is what the user asks for.
        is_needed = kind == kinds[0] == "cross"
        attention = _outline_map(info, reading, chosen, cut, kind, is_needed=is_needed)
        if attention is not None:
            maps.append(attention)
    notes = list(reading.notes)
    # Of pictures, the notes of the reading say which queries are shown.
    if cut and not reading.pictures:
        rows, columns = _slices_of(maps[0])
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


def _outline_map(
    info: ModelInfo,
    reading: Reading,
    chosen: ChosenHeads,
    cut: Crop | None,
    kind: str,
    *,
    is_needed: bool,
) -> AttentionMap | None:
    """Return the map of a kind of attention without weights; None = none of the chosen heads is of this kind.

    Raises:
        AttnscopeError: The map is needed, and there is none.
    """
    # The chosen layers and heads of this kind; of cross-attention to pictures, not all layers have it.
    kind_index = info.kinds.index(kind)
    n_heads = info.n_heads[kind_index]
    known_layers: Sequence[int] = range(info.n_layers[kind_index])
    if kind in reading.axes:
        known_layers = reading.axes[kind].layers
    layers = tuple(layer for layer in chosen.layers if layer in known_layers)
    heads = tuple(head for head in chosen.heads if head < n_heads)
    if not (layers and heads):
        if is_needed:
            raise AttnscopeError(
                f"{info.name} has no {kind}-attention in the layers and heads that are chosen",
                f"it has layers {format_ranges(known_layers)} of {n_heads} heads",
            )
        return None
    # Of all tokens, keep the queries after pictures, and the frames with sound.
    queries, keys = reading.queries_and_keys(kind)
    rows = slice(reading.first_query_after_pictures, len(queries))
    columns = slice(0, len(keys))
    is_part = bool(cut) or rows.start > 0
    if kind == "cross" and reading.sound is not None:
        columns = slice(0, len(reading.sound.envelope))
        is_part = True
    if cut:
        cut_rows, columns = cut.resolve_slices(len(queries), len(keys))
        # Without --rows, the queries after pictures stay.
        if cut.rows is not None:
            rows = cut_rows
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
        part=MapPart(rows.start, columns.start, len(queries), len(keys)) if is_part else None,
    )


# Exact maps


def run_model(
    model: Model, record: Heatmap, reading: Reading, full_width: dict[Any, Any] | None = None
) -> Heatmap:
    """Return the outlined record with the model's weights.

    Args:
        model: The model.
        record: The record from `outline`.
        reading: What the model reads.
        full_width: A dict to fill with the attention that a layer would have with one head as wide as d_model, kind →
            layer → (query, key); layers where that is not defined are missing. None = not wanted.

    Raises:
        AttnscopeError: Weights are NaN, or do not fit into memory.
    """
    _require_memory(record)
    layers, heads = _layers_and_heads(record.maps)
    # Some models (NumPy's) compute weights without a probe.
    if model.compute_maps is not None:
        looked = model.compute_maps(reading.tokens, layers)
        if full_width is not None:
            full_width[record.maps[0].kind] = looked.full
        return replace(
            record, maps=tuple(_fill(m, looked.weights, None, model.info) for m in record.maps)
        )
    from attnscope.core.attention.calls import WeightsBesideFullWidth
    from attnscope.core.attention.probes import WeightsRecorder, probe_by_kind

    kinds = tuple(cast("Kind", m.kind) for m in record.maps)
    if reading.axes or (record.maps[0].part is not None and model.info.path == "seam"):
        # Keep only the part that is shown, by a probe for each kind, as kinds differ in queries and keys.
        probes = {m.kind: _probe_part(m) for m in record.maps}
        run_probe(model, reading, probe_by_kind(probes))
    else:
        probe = WeightsRecorder(layers, heads, kinds)
        if full_width is not None:
            probe = WeightsBesideFullWidth(layers, heads, kinds)
            probe.full = full_width
        run_probe(model, reading, probe)
        probes = dict.fromkeys(kinds, probe)
    # A probe has kept kind -> layer -> (text, head, query, key). There is one text.
    maps = []
    for m, kind in zip(record.maps, kinds, strict=True):
        kept = probes[kind].maps.get(kind, {})
        by_layer = {layer: batch[0].numpy() for layer, batch in kept.items()}
        maps.append(_fill(m, by_layer, probes[kind].heads, model.info))
    return replace(record, maps=tuple(maps))


def _layers_and_heads(maps: Sequence[AttentionMap]) -> tuple[list[int], tuple[int, ...] | None]:
    """Return the layers and heads that one probe keeps for some maps.

    Heads are None = all, where there are several maps: kinds of attention may differ in their heads.
    """
    layers = sorted({layer for m in maps for layer in m.layers})
    if len(maps) == 1 and len(maps[0].heads) < maps[0].n_heads:
        return layers, maps[0].heads
    return layers, None


def _probe_part(attention: AttentionMap) -> HeadRecorder[Tensor]:
    """Return a probe that keeps the part of a map that is shown, (batch, chosen head, query, key), on the CPU."""
    import torch

    from attnscope.core.attention.probes import HeadRecorder
    from attnscope.core.attention.row_samples import rows_of

    rows, columns = _slices_of(attention)
    queries = torch.arange(rows.start, rows.stop)
    layers, heads = _layers_and_heads([attention])
    kinds = (cast("Kind", attention.kind),)
    return HeadRecorder(
        lambda call: rows_of(call, queries, keys=columns).float().cpu(), layers, heads, kinds
    )


def run_probe(model: Model, reading: Reading, probe: Probe) -> None:
    """Run a model on what it reads, with the probe at the seam."""
    import torch

    # Pictures and sound come as tensors of their own, texts as a batch of ids.
    with torch.inference_mode():
        if reading.inputs and model.run_inputs is not None:
            model.run_inputs(reading.inputs, probe)
        else:
            model.run(reading.batch(model.info.device), probe)


def _slices_of(attention: AttentionMap) -> tuple[slice, slice]:
    """Return which queries and which keys of the whole map are in a part of it."""
    first_query, first_key = attention.origin
    rows = slice(first_query, first_query + len(attention.queries))
    return rows, slice(first_key, first_key + len(attention.keys))


def _fill(
    attention: AttentionMap,
    by_layer: Mapping[int, NDArray[np.float32]],
    probed_heads: Sequence[int] | None,
    info: ModelInfo,
) -> AttentionMap:
    """Return the outlined map with its weights.

    Args:
        attention: The map from `outline`.
        by_layer: The weights of each layer that has attention, (probed head, query, key); of the part of the map that
            is shown, or of the whole.
        probed_heads: The numbers of the probed heads; None = all.
        info: The facts of the model.
    """
    attention = _without_empty_layers(attention, by_layer)
    weights = [by_layer[layer] for layer in attention.layers]
    # A model off the seam gives whole maps.
    if weights[0].shape[1:] != (len(attention.queries), len(attention.keys)):
        rows, columns = _slices_of(attention)
        weights = [each[:, rows, columns] for each in weights]
    return replace(attention, weights=_lay_out(attention, weights, probed_heads, info))


def _without_empty_layers(attention: AttentionMap, by_layer: Mapping[int, Any]) -> AttentionMap:
    """Return the map without the layers that have no attention.

    Raises:
        AttnscopeError: None of its layers has attention.
    """
    layers = tuple(layer for layer in attention.layers if layer in by_layer)
    if not layers:
        raise AttnscopeError(
            f"no attention in layers {format_ranges(attention.layers)}: this model has none there",
            "choose other layers",
        )
    return replace(attention, layers=layers)


def _lay_out(
    attention: AttentionMap,
    of_layers: Sequence[NDArray[Any]],
    probed_heads: Sequence[int] | None,
    info: ModelInfo,
) -> NDArray[Any]:
    """Return the numbers of a map's layers, each (probed head, ...), as one array (layer, head, ...).

    Heads that a layer lacks are NaN, or -1 in whole numbers. `probed_heads` None = all heads were probed.

    Raises:
        AttnscopeError: A number is NaN.
    """
    # Fill the array with what stands for a head that is not there.
    shape = (len(of_layers), len(attention.heads), *of_layers[0].shape[1:])
    laid_out: NDArray[Any] = np.full(shape, np.nan, np.float32)
    if np.issubdtype(of_layers[0].dtype, np.integer):
        laid_out = np.full(shape, -1, np.int32)
    # The rows of the map's heads among the probed ones.
    rows = np.array(attention.heads)
    if probed_heads is not None:
        rows = np.searchsorted(probed_heads, rows)
    for layer_index, numbers in enumerate(of_layers):
        if np.isnan(numbers).any():
            raise make_nan_error(info, (attention.kind, attention.layers[layer_index]))
        is_there = rows < len(numbers)
        laid_out[layer_index, is_there] = numbers[rows[is_there]]
    return laid_out


def _require_memory(record: Heatmap) -> None:
    """Refuse maps that do not fit into memory, before the model runs for minutes."""
    needed = sum(4 * len(m.layers) * len(m.heads) * len(m.queries) * len(m.keys) for m in record.maps)
    require_memory(
        needed,
        f"the maps of {len(record.maps[0].keys)} tokens",
        "choose fewer layers and heads (-L, -H, --pick), a part (--rows, --cols), or --pool 256",
    )


# Pooled maps


def pool_maps(model: Model, reading: Reading, chosen: ChosenHeads, cells: int) -> PooledHeatmap:
    """Run a model, and return its maps pooled to at most `cells` rows and columns of cells.

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

    # One pass, with a grid for each kind of attention.
    whole = outline(model.info, reading, chosen)
    grids = {cast("Kind", m.kind): _grid(m, cells) for m in whole.maps}
    layers, heads = _layers_and_heads(whole.maps)
    probe = HeadRecorder(
        lambda call: pool_attention(call, grids[call.kind]), layers, heads, tuple(grids)
    )
    run_probe(model, reading, probe)
    # Lay out the cells, marginals and links of each kind. (layer, head, …)
    maps = []
    for (kind, grid), m in zip(grids.items(), whole.maps, strict=True):
        by_layer = probe.maps.get(kind, {})
        m = _without_empty_layers(m, by_layer)
        shared = {field.name: getattr(m, field.name) for field in fields(HeadMaps)}
        arrays: dict[str, Any] = {}
        for name in PooledMap.ARRAYS:
            numbers = [getattr(by_layer[layer], name)[0].numpy() for layer in m.layers]
            arrays[name] = _lay_out(m, numbers, probe.heads, model.info)
        maps.append(
            PooledMap(
                **shared,
                **arrays,
                query_cell=grid.query_cell,
                key_cell=grid.key_cell,
                far_tokens=-1 if grid.far_tokens is None else grid.far_tokens,
            )
        )
    return PooledHeatmap(text=whole.text, maps=tuple(maps), run=whole.run, picked=whole.picked)


def _grid(attention: AttentionMap, cells: int) -> PoolingGrid:
    """Return how a map is pooled, and between which of its tokens links are looked for."""
    import torch

    from attnscope.core.attention.pooling import PoolingGrid

    # Tokens of a cell, rounded up.
    query_cell = math.ceil(len(attention.queries) / cells)
    key_cell = math.ceil(len(attention.keys) / cells)
    # Tokens between which no links are looked for. Idle heads rest on the first key, special or not.
    skipped_keys = attention.keys.special.copy()
    skipped_keys[0] = True
    return PoolingGrid(
        query_cell=query_cell,
        key_cell=key_cell,
        n_links=N_LINKS,
        far_tokens=None if attention.kind == "cross" else max(key_cell, MIN_FAR),
        is_excluded_query=torch.from_numpy(attention.queries.special.copy()),
        is_excluded_key=torch.from_numpy(skipped_keys),
    )
