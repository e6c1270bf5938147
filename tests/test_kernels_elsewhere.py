"""Attention off the processor: on a pretended device, and, on a GPU (`-m gpu`), against float64."""

from dataclasses import replace

import pytest
import torch

from attnscope.core.attention.seam import attend
from attnscope.core.attention.tiles import attend_without_map
from tests import rounding
from tests.core_helpers import gpu_test, make_call, on, read_tiles
from tests.pretend_device import NAME, pretending
from tests.rounding import require_output


@pytest.mark.parametrize(
    "fields", [{"is_causal": True}, {"mask": torch.arange(41) > 3}, {"d_value": 5}], ids=str
)
def test_attention_without_a_map_on_a_device_that_is_not_the_processor(fields):
    call = make_call(group=3, n_queries=37, n_keys=41, dtype=torch.float32, d_head=11, **fields)
    with pretending():
        found = attend_without_map(on(call, NAME))
        assert str(found.device) == f"{NAME}:0"
        require_output(found.cpu(), call)


# On a GPU --------------------------------------------------------------------------------------------------------


@gpu_test
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group", [1, 4])
def test_tiles_on_cuda_against_float64(dtype, group):
    call = make_call(
        n_kv_heads=2,
        group=group,
        n_queries=1025,
        n_keys=1025,
        d_head=59,
        d_value=59,
        dtype=dtype,
        is_causal=True,
    )
    oracle = read_tiles(rounding.in_float64(call))
    there = on(call, "cuda")
    found = read_tiles(there)
    allowed = 2 * (attend(there).cpu().double() - oracle.output).abs().max() + 1e-5
    for output in (
        found.output,
        attend_without_map(there),
        attend_without_map(on(replace(call, value=call.value[..., :31]), "cuda")),
    ):
        wanted = oracle.output[..., : output.shape[3]]
        assert (output.cpu().double() - wanted).abs().max() <= allowed
    for name, atol in (("weights", 1e-5), ("largest", 1e-5), ("entropy_nats", 1e-4)):
        torch.testing.assert_close(
            getattr(found, name).cpu().double(), getattr(oracle, name), rtol=1e-4, atol=atol, msg=name
        )
