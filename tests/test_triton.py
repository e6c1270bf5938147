"""triton's pass against the definition and against torch: in its interpreter, and, on a GPU (`-m gpu`), compiled.

The interpreter has to be chosen before triton is loaded: what needs it runs in a process of its own, all of it in one.
"""

import dataclasses
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnscope
from attnscope.core.measures.backends import choose as backends
from attnscope.core.measures.sums import Sums
from attnscope.errors import AttnscopeError
from attnscope.studies.running import backend
from attnscope.studies.running.backend import VARIABLE, agrees_with_torch, choose_backend, tell_backend
from tests.core_helpers import gpu_test, make_call, on
from tests.measure_helpers import make_facts
from tests.processes import python
from tests.test_backends import require_as_good_as_torch
from tests.test_sums import long_call

pytest.importorskip("triton")

N = 41
HOLES = torch.rand(2, 1, N, N, generator=torch.Generator().manual_seed(1)) > 0.4
CASES: dict[str, dict[str, Any]] = {
    "padded": {},
    "window": {"is_causal": True, "window": 9},
    "window on both sides": {"window": 5, "n_kv_heads": 1, "group": 2},
    "by head, biased": {"mask": HOLES.expand(2, 6, N, N), "bias_shape": (6, N, N)},
    "capped, sinks": {"softcap": 2.0, "with_sinks": True, "is_causal": True, "bias_shape": (N,), "mask": None},
    "sharp, wide": {"scale": 4.0, "d_value": 15},
    "some see nothing": {"mask": torch.arange(N) > 20, "is_causal": True},
    "float16": {"dtype": torch.float16, "is_causal": True},
    "bfloat16": {"dtype": torch.bfloat16, "n_kv_heads": 1, "group": 2},
}


def check_all(device: str, names: Iterable[str] = CASES) -> None:
    for name in names:
        fields = CASES[name]
        sizes = {"n_kv_heads": 1, "group": 2} if "by head" not in name else {"n_kv_heads": 2, "group": 3}
        call, keys = long_call(N, **(sizes | fields))
        for pairs in (2**25, 2 * 20 * N) if name == "window" else (2**25,):
            with pytest.MonkeyPatch.context() as patch:
                patch.setitem(backends.PAIRS, "triton", pairs)
                require_as_good_as_torch(call, keys, "triton", name, device=device)


def check_odd_ones(device: str) -> None:
    """Other texts on the other side; numbers that are none; nothing to attend to at all."""
    keys, queries = make_facts([9, 4], 9), make_facts([7, 7], 7, seed=1)
    across = make_call(n_queries=7, n_keys=9, dtype=torch.float32, mask=keys.real[:, None, None])
    across = dataclasses.replace(across, kind="cross")
    found = []
    for which in ("torch", "triton"):
        probe = Sums(keys, query_facts=queries, backend=which)
        probe(on(across, device))
        found.append(probe.sums["cross"][0].sum)
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-5)
    call, keys = long_call(N, n_kv_heads=1, group=2)
    call.query[0, 1, 3, 0] = math.nan
    probe = Sums(keys, backend="triton")
    probe(on(call, device))
    sums = probe.sums["encoder"][0]
    broken = np.isnan(sums.sum[sums.names.index("entropy_nats")])
    assert broken[0, 1]
    assert broken.sum() == 1
    call, keys = long_call(N, mask=torch.zeros(N, dtype=torch.bool))
    probe = Sums(keys, backend="triton")
    assert not probe(on(call, device)).any()
    assert not probe.sums["encoder"][0].sum.any()


IN_INTERPRETER = """
import sys
import torch
import attnscope
from attnscope.studies.running.backend import agrees_with_torch
from attnscope.core.measures.backends import choose as backends, triton_pass
from tests import test_triton
from triton import language as tl
from triton.runtime import interpreter
torch.set_num_threads(1)
dot = interpreter.InterpreterBuilder.create_dot
def of_numbers(self, a, b, *rest):  # of bfloat16 the interpreter (3.9) multiplies the bits
    a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return dot(self, a, b, *rest)
interpreter.InterpreterBuilder.create_dot = of_numbers
backends.DEVICES["triton"] = "cpu"
triton_pass.TILE = 32, 32
test_triton.check_all("cpu", sys.argv[1:])
test_triton.check_odd_ones("cpu")
info = attnscope.load("own").info
assert agrees_with_torch(info)
take = triton_pass.run
triton_pass.run = lambda *arguments: take(*arguments) * 1.1
assert not agrees_with_torch(info)
"""


QUICK = "window", "by head, biased", "capped, sinks", "bfloat16"


@pytest.mark.parametrize("names", [QUICK, pytest.param((*CASES,), marks=pytest.mark.slow)], ids=["few", "all"])
def test_triton_is_at_most_twice_as_far_off_as_torch(names: tuple[str, ...]) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = python("-c", IN_INTERPRETER, *names, env=environment, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr


@gpu_test
def test_triton_on_cuda_is_at_most_twice_as_far_off_as_torch() -> None:
    check_all("cuda")
    check_odd_ones("cuda")


def test_what_triton_cannot_make_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends.DEVICES, "triton", "cpu")
    call = make_call(dtype=torch.bfloat16, d_head=256)
    assert backends.makes("triton", call)
    for other in (
        make_call(),
        make_call(dtype=torch.bfloat16, d_head=257),
        make_call(dtype=torch.float32, d_value=129),
        dataclasses.replace(call, key=call.key.half()),
    ):
        assert not backends.makes("triton", other)
        assert backends.pass_of("triton", other) is backends.torch_pass.run
        assert backends.pairs_of("triton", other) is None


def test_triton_is_chosen_for_much_work_on_cuda_where_it_agrees_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    here = attnscope.load("own").info
    there = dataclasses.replace(here, device="cuda:0", dtype="bfloat16")
    monkeypatch.setattr(backend, "agrees_with_torch", lambda info: True)
    assert choose_backend(there, 2e11) == "triton"
    assert "triton from 100 billion" in tell_backend(there)
    assert choose_backend(there, 1e10) == "torch"
    monkeypatch.setattr(backend, "agrees_with_torch", lambda info: False)
    assert choose_backend(there, 2e11) == "torch"
    monkeypatch.setenv(VARIABLE, "triton")
    assert choose_backend(there, 1) == "triton"
    with pytest.raises(AttnscopeError, match="is triton, but the model is on cpu"):
        choose_backend(here, 1e12)


def test_triton_is_not_believed_where_it_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the processor, outside the interpreter, it has no driver."""
    monkeypatch.setitem(backends.DEVICES, "triton", "cpu")
    assert not agrees_with_torch(attnscope.load("own").info)
