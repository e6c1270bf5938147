"""Uniform attention by prefix sums is what it is query by query."""

import numpy as np
import pytest
import torch

from attnscope.core.measures import ranges as ranges_module
from attnscope.core.measures.queries import ground
from attnscope.core.measures.ranges import Ranges
from tests.measure_helpers import make_facts

N_TEXTS, N_HEADS, N = 3, 2, 37


def edges_of(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """First and last + 1 key of each query, (text, mask head, query or 1)."""
    q = torch.arange(N).expand(N_TEXTS, N_HEADS, N)
    if kind == "padded":
        return torch.tensor([0, 2, 5]).view(-1, 1, 1).expand(-1, N_HEADS, -1), torch.full((N_TEXTS, N_HEADS, 1), 31)
    if kind == "all":  # of blocks of a long text in an encoder
        return torch.zeros_like(q), torch.full_like(q, N)
    if kind == "causal":
        return torch.zeros_like(q), q + 1
    if kind == "window":
        return (q - 6).clamp(min=0), (q + 3).clamp(max=N)
    drawn = torch.randint(0, N + 1, (2, N_TEXTS, N_HEADS, N), generator=torch.Generator().manual_seed(3))
    return drawn.amin(0), drawn.amax(0)


@pytest.mark.parametrize("own_text", [True, False])
@pytest.mark.parametrize("kind", ["padded", "all", "causal", "window", "drawn"])
@pytest.mark.parametrize("together", [5, N])  # keys may be a multiple of it, as 512 are
def test_ranges_are_the_definition(monkeypatch: pytest.MonkeyPatch, together: int, kind: str, own_text: bool) -> None:
    monkeypatch.setattr(ranges_module, "TOGETHER", together)
    keys = make_facts([37, 29, 31], N, vocabulary=7)
    first, last = edges_of(kind)
    queries = slice(4, 33)
    if first.shape[2] > 1:
        first, last = first[..., queries], last[..., queries]
    asking = keys.real[:, queries]
    places = torch.arange(N)
    allowed = (places >= first[..., None]) & (places < last[..., None])
    want = ground(allowed, keys, asking, (queries, slice(0, N)), own_text=own_text)
    found = Ranges(keys, own_text=own_text)
    got = found.ground(first, last, asking, queries)
    for name in ("counted", "n_allowed", "n_active", "n_rarest", "band"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    for name in ("defined", "uniform", "worth"):
        ours, theirs = getattr(got, name), getattr(want, name)
        assert ours.keys() == theirs.keys()
        for of in theirs:
            where = want.defined.get(of, want.counted)
            np.testing.assert_allclose(ours[of][where], theirs[of][where], atol=1e-6, err_msg=of)
            if name == "defined":
                np.testing.assert_array_equal(ours[of], theirs[of], err_msg=of)
