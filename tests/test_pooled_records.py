"""Pooled records: what they keep, what they refuse, and what is seen of them in figures and in the terminal."""

import io
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from attnscope import load_record
from attnscope.errors import AttnscopeError
from attnscope.questions.heatmap_terminal import show
from attnscope.questions.links import find_strongest_links
from attnscope.questions.pooled import PooledHeatmap, PooledMap
from tests.record_helpers import RUN, map_of, record_of, require_lossless, shares, stems, tokens_of


def pooled_map(n=50, cell=4, *, layers=2, heads=3, kind="decoder"):
    chance = np.random.default_rng(0)
    tokens = tokens_of([f"t{i}" for i in range(n)])
    rows = -(-n // cell)
    links = chance.integers(0, n, (layers, heads, 5, 2)).astype(np.int32)
    links[0, 0, 3:] = -1
    weights = np.sort(chance.random((layers, heads, 5)), axis=-1)[..., ::-1].astype(np.float32)
    return PooledMap(
        kind=kind,
        layers=tuple(range(layers)),
        heads=tuple(range(heads)),
        cells=shares(layers, heads, rows, rows),
        received=chance.random((layers, heads, n)).astype(np.float32),
        entropy_nats=chance.random((layers, heads, n)).astype(np.float32) * 3,
        link_places=links,
        link_weights=np.where(links[..., 0] < 0, 0, weights).astype(np.float32),
        queries=tokens,
        keys=tokens,
        query_cell=cell,
        key_cell=cell,
        far_tokens=32,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=heads,
    )


def pooled_record(**more):
    attention = pooled_map(**more)
    return PooledHeatmap(text=attention.keys.text, maps=(attention,), run=RUN)


def test_a_record_survives_its_file(tmp_path):
    lacking = pooled_map()
    for array in (lacking.cells, lacking.received, lacking.entropy_nats, lacking.link_weights):
        array[1, 2] = np.nan  # a head that this layer lacks
    lacking.link_places[1, 2] = -1
    cross = replace(pooled_map(20, 3, kind="cross"), keys=tokens_of([f"k{i}" for i in range(20)]))
    require_lossless(
        PooledHeatmap(text=lacking.keys.text, maps=(lacking, cross), run=RUN, picked=((0, 1), (1, 0))),
        tmp_path,
    )
    assert not lacking.exists(1, 2)
    assert lacking.exists(1, 1)


@pytest.mark.parametrize(
    "damage",
    [
        {"cells": shares(2, 3, 12, 13)},
        {"cells": shares(2, 3, 13, 13) * 3},
        {"received": np.full((2, 3, 50), -1, np.float32)},
        {"entropy_nats": np.zeros((2, 3, 49), np.float32)},
        {"link_places": np.full((2, 3, 5, 2), 50, np.int32)},
        {"kind": "../x"},
        {"query_cell": 0},
    ],
)
def test_a_damaged_record_is_refused(damage, tmp_path):
    whole = pooled_record()
    path = replace(whole, maps=(replace(whole.maps[0], **damage),)).save(tmp_path / "pooled.npz")
    with pytest.raises(AttnscopeError, match="is no record of pooled attention"):
        load_record(path)


def test_sheets_are_an_overview_and_one_a_layer_or_one_a_picked_head():
    record = pooled_record()
    assert stems(record) == ["overview", "L00", "L01"]
    assert stems(record.only([(1, 2), (0, 0)])) == ["L01H02", "L00H00"]


@pytest.mark.parametrize("picked", [None, ((1, 0),)])
def test_the_terminal_shows_marginals_and_links(picked):
    record = replace(pooled_record(), picked=picked)
    console = Console(width=100, file=io.StringIO(), force_terminal=False)
    console.print(show(record, console))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "over more than 32 tokens" in " ".join(shown.split())
    link = record.links(1, 0)[0]
    assert f"@{link.query}" in shown
    assert f"{link.weight:.2f}" in shown
    assert ("⟦" in shown) == (picked is not None)


def test_a_part_does_not_take_other_tokens_for_the_query_itself():
    whole = map_of(tokens_of([f"t{i}" for i in range(8)]), layers=1, heads=1)
    whole.weights[:] = 0.01
    whole.weights[0, 0, 3, 2] = 0.9
    whole.weights[0, 0, 4, 4] = 0.8  # a token on itself
    tokens = whole.queries.take(np.arange(3, 8))
    part = replace(
        whole,
        weights=whole.weights[:, :, 3:, 2:6],
        queries=tokens,
        keys=whole.keys.take(np.arange(2, 6)),
        part=(3, 2, 8, 8),
    )
    links = find_strongest_links(record_of(part), part, (0, 0), 1)
    assert links == [(0, 0, pytest.approx(0.9))]
    assert all((q, k) != (1, 2) for q, k, _ in find_strongest_links(record_of(part), part, (0, 0), 20))
