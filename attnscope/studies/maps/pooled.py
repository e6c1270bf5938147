"""What does every head attend to on a text too long for a figure? A model and a text in, a PooledHeatmap out."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack, cast

from attnscope.choice import Chosen, choice_from
from attnscope.core.plain_torch import with_plain_torch
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.info import ModelInfo
from attnscope.models.model import Model
from attnscope.questions.heatmap import AttentionMap
from attnscope.questions.pooled import POOLS, PooledHeatmap, PooledMap
from attnscope.results.tokens import Tokens
from attnscope.studies.inputs.reading import Prompt, PromptOptions, Reading, read, reader_of
from attnscope.studies.maps.study import chosen_of, lay_heads, layers_found, outline, run_probe

if TYPE_CHECKING:
    from attnscope.core.attention.pooling import Grid, Pool, PooledAttention
    from attnscope.core.attention.seam import Kind

CELLS = 256
"""Rows and columns of cells, at most: what a figure can show and a reader can see."""

POOLED_OVER = 400
"""Tokens beyond which the command line pools of itself: labels of more are not readable on a figure."""

FEWEST_CELLS, MOST_CELLS = 8, 1024
LEAST_FAR = 32
"""A link is far where query and key are more than a cell apart, and at least this many tokens."""

N_LINKS = 10


@with_plain_torch
def pooled_heatmap(
    model: Model,
    text: str,
    *,
    cells: int = CELLS,
    pool: str = "mean",
    layers: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
    pick: Sequence[tuple[int, int]] | None = None,
    **prompt: Unpack[PromptOptions],
) -> PooledHeatmap:
    """Runs a model on a long text and keeps pooled maps, marginals and the strongest far links of the chosen heads.

    The numbers are exact. Memory grows linearly with the text's length. A link is far if query and key are more than a
    cell apart, and more than 32 tokens. Links from or to special tokens and the first token are left out.

    Args:
        model: A loaded model, see `attnscope.load`.
        text: What to run it on.
        cells: Rows and columns of cells, at most, 8 to 1024; a cell holds as many tokens as that takes.
        pool: What a cell shows. "mean": the share of attention that the queries of its row give to the keys of its
            column, summed over the keys and averaged over the queries. "max": the largest single weight in it.
        layers: As of `heatmap`; so are heads, pick and prompt.
        heads: See there.
        pick: See there.
        prompt: See there.

    Returns:
        The record; `maps[0].cells` is (layer, head, row, column).

    Raises:
        AttnscopeError: An empty text, a layer or head that the model does not have, something that the model cannot
            do, such as to pass its attention through the seam.

    Warns:
        UserWarning: The text was cut, or the model wrote the target itself.
    """
    to_read = Prompt(text, **prompt)
    require_cells(cells, pool)
    model = reader_of(model, to_read)
    chosen = choice_from(layers, heads, pick).within(model.info)
    reading = read(model, to_read)
    for note in reading.notes:
        warnings.warn(note, stacklevel=3)  # of whoever called the study, past `with_plain_torch`
    return pool_maps(model, reading, chosen, cells, pool)


def require_cells(cells: int, pool: str) -> None:
    """Refuses too few or too many cells, and unknown pools."""
    if not FEWEST_CELLS <= cells <= MOST_CELLS:
        raise UsageError(
            f"a map cannot be pooled to {cells} rows and columns", f"choose {FEWEST_CELLS} to {MOST_CELLS}, or 0: not"
        )
    if pool not in POOLS:
        raise UsageError(f"there is no pool {pool!r}", f"choose one of {', '.join(POOLS)}")


def pool_maps(model: Model, reading: Reading, chosen: Chosen, cells: int, pool: str) -> PooledHeatmap:
    """`pooled_heatmap` of what was read already."""
    if model.info.path != "seam":
        raise AttnscopeError(
            f"{model.info.name} does not pass its attention through the seam: only its whole maps can be seen",
            "--pool 0, on fewer tokens",
        )
    whole = outline(model.info, reading, chosen)
    from attnscope.core.attention.probes import Pooled

    grids = {cast("Kind", m.kind): _grid(m, cells, cast("Pool", pool)) for m in whole.maps}
    probe = Pooled(grids, *chosen_of(whole))
    run_probe(model, reading, probe)
    maps = [
        _fill(m, grids[cast("Kind", m.kind)], probe.maps.get(cast("Kind", m.kind), {}), probe.heads, model.info)
        for m in whole.maps
    ]
    return PooledHeatmap(whole.text, tuple(maps), whole.run, pool, whole.picked)


def _grid(attention: AttentionMap, cells: int, pool: Pool) -> Grid:
    import torch

    from attnscope.core.attention.pooling import Grid

    n_queries, n_keys = len(attention.queries), len(attention.keys)
    query_cell, key_cell = -(-n_queries // cells), -(-n_keys // cells)
    no_key = attention.keys.special.copy()
    no_key[0] = True  # heads that have nothing to do rest on the first token, special or not
    return Grid(
        query_cell=query_cell,
        key_cell=key_cell,
        pool=pool,
        n_links=N_LINKS,
        far=None if attention.kind == "cross" else max(key_cell, LEAST_FAR),
        no_query=torch.from_numpy(attention.queries.special.copy()),
        no_key=torch.from_numpy(no_key),
    )


def _fill(
    attention: AttentionMap,
    grid: Grid,
    by_layer: dict[int, PooledAttention],
    heads: Sequence[int] | None,
    info: ModelInfo,
) -> PooledMap:
    """The map with what the probe found; without layers that have no attention, NaN for heads that a layer lacks."""
    layers = layers_found(attention, by_layer)
    names = [name for name in vars(by_layer[layers[0]]) if name != "output"]
    arrays = {
        name: lay_heads(attention, layers, [getattr(by_layer[layer], name)[0].numpy() for layer in layers], heads, info)
        for name in names
    }
    return PooledMap(
        kind=attention.kind,
        layers=layers,
        heads=attention.heads,
        **arrays,
        queries=attention.queries,
        keys=attention.keys,
        query_cell=grid.query_cell,
        key_cell=grid.key_cell,
        far_tokens=grid.far,
        n_layers=attention.n_layers,
        n_heads=attention.n_heads,
        n_kv_heads=attention.n_kv_heads,
    )


def longest(reading: Reading) -> int:
    """Tokens of the longer text that a model reads."""
    read: list[Tokens] = [reading.tokens, *([] if reading.target is None else [reading.target])]
    return max(map(len, read))
