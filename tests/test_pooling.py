"""Pooled maps, parts and far links against plain loops over the dense weights in float64."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnscope.core.attention import pooling, tiles
from attnscope.core.attention import seam as attention
from attnscope.core.attention.pooling import PoolingGrid
from attnscope.core.attention.probes import HeadRecorder, WeightsRecorder
from attnscope.core.attention.row_samples import rows_of
from tests.core_helpers import EXACT, calls, make_call, read_tiles


def loops(weights, grid):
    """Cells, received mass, entropies and links of one head, by their definitions."""
    n_queries, n_keys = weights.shape
    rows = -(-n_queries // grid.query_cell)
    columns = -(-n_keys // grid.key_cell)
    cells = np.zeros((rows, columns))
    counted = np.zeros(rows)
    received = np.zeros(n_keys)
    entropies = np.zeros(n_queries)
    links = []
    for q in range(n_queries):
        counted[q // grid.query_cell] += weights[q].sum() > 0
        for k in range(n_keys):
            weight = weights[q, k]
            at = (q // grid.query_cell, k // grid.key_cell)
            cells[at] += weight
            received[k] += weight
            entropies[q] -= weight * math.log(weight) if weight > 0 else 0.0
            is_far = grid.far_tokens is None or abs(q - k) > grid.far_tokens
            unwanted = (grid.is_excluded_query is not None and bool(grid.is_excluded_query[q])) or (
                grid.is_excluded_key is not None and bool(grid.is_excluded_key[k])
            )
            if weight > 0 and is_far and not unwanted:
                links.append((weight, q, k))
    cells = cells / np.maximum(counted, 1)[:, None]
    return cells, received, entropies, sorted(links, reverse=True)[: grid.n_links]


@st.composite
def grids(draw, n_queries, n_keys):
    def some(n):
        chosen = draw(st.none() | st.lists(st.booleans(), min_size=n, max_size=n))
        return None if chosen is None else torch.tensor(chosen)

    return PoolingGrid(
        query_cell=draw(st.integers(1, 5)),
        key_cell=draw(st.integers(1, 5)),
        n_links=draw(st.integers(0, 6)),
        far_tokens=draw(st.none() | st.integers(0, 4)),
        is_excluded_query=some(n_queries),
        is_excluded_key=some(n_keys),
    )


@given(data=st.data(), call=calls(), rows=st.integers(1, 4), window=st.none() | st.integers(1, 6))
def test_pooling_is_what_its_definition_says_of_any_call(data, call, rows, window):
    call = dataclasses.replace(
        call, query=call.query.double(), key=call.key.double(), value=call.value.double(), window=window
    )
    grid = data.draw(grids(call.query.shape[2], call.key.shape[2]))
    dense = attention.attention_weights(call)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "MIN_QUERIES_PER_TILE", rows)
        patch.setattr(tiles, "TILE_ELEMENTS", 40)  # several tiles a text, and several texts a tile
        found = pooling.pool_attention(call, grid)
    for b in range(dense.shape[0]):
        for h in range(dense.shape[1]):
            cells, received, entropies, links = loops(dense[b, h].numpy(), grid)
            np.testing.assert_allclose(found.cells[b, h].numpy(), cells, atol=1e-6)
            np.testing.assert_allclose(found.received[b, h].numpy(), received, atol=1e-9)
            np.testing.assert_allclose(found.entropy_nats[b, h].numpy(), entropies, atol=1e-9)
            wanted = [weight for weight, _, _ in links] + [0.0] * (grid.n_links - len(links))
            np.testing.assert_allclose(found.link_weights[b, h].numpy(), wanted, atol=1e-9)
            for (q, k), weight in zip(found.link_places[b, h].tolist(), wanted, strict=True):
                if weight == 0:
                    assert q == -1
                    assert k == -1
                else:
                    assert float(dense[b, h, q, k]) == pytest.approx(weight, abs=1e-9)


def test_links_are_far_and_each_is_there_once():
    call = make_call(seed=3, n_queries=97, n_keys=97, is_causal=True)
    first = torch.arange(97) == 0
    found = pooling.pool_attention(
        call, PoolingGrid(4, 4, n_links=20, far_tokens=8, is_excluded_key=first)
    )
    for places in found.link_places.flatten(0, 1).tolist():
        assert len({tuple(place) for place in places}) == 20
        assert all(q - k > 8 and k > 0 for q, k in places)


@given(data=st.data(), call=calls(), window=st.none() | st.integers(1, 6))
def test_a_part_is_that_part_of_the_whole(data, call, window):
    call = dataclasses.replace(call, window=window)
    chosen = []
    for n in (call.query.shape[2], call.key.shape[2]):
        start = data.draw(st.integers(0, n - 1))
        chosen.append(slice(start, data.draw(st.integers(start + 1, n))))
    part = rows_of(call, torch.arange(chosen[0].start, chosen[0].stop), keys=chosen[1])
    assert torch.allclose(part, attention.attention_weights(call)[:, :, chosen[0], chosen[1]], **EXACT)


@given(call=calls(), window=st.none() | st.integers(1, 6))
def test_attend_without_map_gives_what_attend_gives(call, window):
    call = dataclasses.replace(call, window=window)
    assert torch.allclose(tiles.attend_without_map(call), attention.attend(call), **EXACT)


def test_probes_keep_chosen_layers_and_heads_alone():
    call = make_call(seed=2, n_queries=11, n_keys=11, is_causal=True, n_kv_heads=2, group=2)
    plain = attention.attend(call)
    whole = WeightsRecorder(heads=[3, 1])
    whole(call)
    queries = torch.arange(2, 7)
    part = HeadRecorder(lambda call: rows_of(call, queries, keys=slice(3)), layers=[0], heads=[3, 1])
    pooled = HeadRecorder(
        lambda call: pooling.pool_attention(call, PoolingGrid(2, 3)), layers=[0], heads=[3, 1]
    )
    for probe in (part, pooled):
        assert torch.allclose(probe(call), plain, **EXACT)
        assert torch.allclose(probe(dataclasses.replace(call, layer=1)), plain, **EXACT)
        with pytest.raises(RuntimeError, match="twice"):
            probe(call)
    kept = whole.maps["encoder"][0]
    assert list(part.maps["encoder"]) == list(pooled.maps["encoder"]) == [0]
    assert torch.allclose(part.maps["encoder"][0].float(), kept[:, :, 2:7, :3], atol=1e-6)
    found = pooled.maps["encoder"][0]
    assert found.cells.shape == (2, 2, 6, 4)
    assert torch.allclose(found.received.float(), kept.sum(2), atol=1e-5)


@given(call=calls(), window=st.integers(1, 6))
def test_a_window_is_the_mask_that_it_stands_for(call, window):
    distance = torch.arange(call.query.shape[2])[:, None] - torch.arange(call.key.shape[2])
    near = (distance.abs() < window)[None, None]
    masked = dataclasses.replace(call, mask=near if call.mask is None else call.mask & near)
    windowed = dataclasses.replace(call, window=window)
    assert torch.equal(attention.attention_weights(windowed), attention.attention_weights(masked))
    assert torch.allclose(attention.attend(windowed), attention.attend(masked), **EXACT)
    tiled, dense = (read_tiles(one) for one in (windowed, masked))
    assert torch.allclose(tiled.output, dense.output, **EXACT)
    assert torch.allclose(tiled.entropy_nats, dense.entropy_nats, atol=1e-5)
