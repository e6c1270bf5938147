"""The fused pass against the definition and against torch; and which of them measures a run."""

import dataclasses
import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnscope
from attnscope.core.attention.seam import AttentionCall, allowed, attention_weights
from attnscope.core.measures import plan
from attnscope.core.measures.backends import choose as backends
from attnscope.core.measures.dense import measures_of_weights
from attnscope.core.measures.facts import TextFacts, outlying, output_factor
from attnscope.core.measures.sums import Sums
from attnscope.core.measures.totals import SumsOf
from attnscope.errors import AttnscopeError
from attnscope.studies.heads.merging import merge_findings
from attnscope.studies.heads.options import HeadsOptions
from attnscope.studies.heads.study import heads
from attnscope.studies.running import backend
from attnscope.studies.running.backend import VARIABLE, choose_backend
from tests import rounding
from tests.conftest import Run
from tests.core_helpers import few_examples, on
from tests.processes import python
from tests.test_sums import check, long_call, made_up_norms, projection_of, situations

PASS = "attnscope.core.measures.backends.numba_pass"
"""By name: importing it compiles it where that has not been done, which whoever only lists tests need not wait for."""
PARTS = ("sum", "count", "uniform_sum", "offset_sum", "offset_count", "offset_uniform")


pytestmark = pytest.mark.usefixtures("one_thread")


def in_float32(call: AttentionCall) -> AttentionCall:
    parts = {name: getattr(call, name) for name in ("query", "key", "value", "bias", "sinks")}
    return dataclasses.replace(call, **{name: part.float() for name, part in parts.items() if part is not None})


@given(situation=situations(), pairs=st.sampled_from([1, 30, 10**6]), tile=st.sampled_from([1, 300, 10**6]))
@few_examples
def test_every_measure_of_the_fused_pass_is_its_definition(situation, pairs: int, tile: int) -> None:
    call, keys, queries = situation
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(backends.PAIRS, "numba", pairs)
        patch.setattr(f"{PASS}.TILE", tile)
        patch.setattr(plan, "LEAST_ROWS", 2)
        patch.setattr(plan, "SHORT_KEYS", 64 if tile == 1 else 0)
        patch.setattr(f"{PASS}.CHUNK", 4)
        patch.setattr(f"{PASS}.CHUNK_OF_LONG", 2)
        check(in_float32(call), keys, queries, tolerance=1e-5, backend="numba")


def measured(call: AttentionCall, keys: TextFacts, which: Any, device: str = "cpu") -> SumsOf:
    probe = Sums(keys, output_projections={(call.kind, call.layer): projection_of(call).float().to(device)},
                 norms=lambda kind, layer: made_up_norms(keys), backend=which)  # fmt: skip
    rounding.require_output(probe(on(call, device)).cpu(), call)
    return probe.sums[call.kind][call.layer]


def require_as_good_as_torch(call: AttentionCall, keys: TextFacts, which: Any, name: str, device: str = "cpu") -> None:
    """All that a back end measures is at most twice as far off as what torch does in the same precision."""
    exact = rounding.in_float64(call)
    ours, theirs = (measured(call, keys, backend, device) for backend in (which, "torch"))
    true = measures_of_weights(
        attention_weights(exact), keys, allowed=allowed(call), values=exact.value,
        factor=output_factor(projection_of(call), call.n_heads), outlying=outlying(made_up_norms(keys), keys),
    )  # fmt: skip
    for part in PARTS:
        for i in range(len(getattr(true, part))):
            of = true.names[i] if len(getattr(true, part)) == len(true.names) else i
            # What is added up in float32 is rounded at each query, whoever adds it.
            size = max(float(np.abs(getattr(true, part)[i]).max()), 1.0)
            rounding.require_no_worse(
                getattr(ours, part)[i], getattr(theirs, part)[i], getattr(true, part)[i], size=size,
                slack=rounding.adding(call.query.shape[2]), err_msg=f"{name}: {part} of {of}",
            )  # fmt: skip


HOLES = torch.rand(2, 1, 97, 97, generator=torch.Generator().manual_seed(1)) > 0.4
BY_HEAD = torch.rand(2, 6, 97, 97, generator=torch.Generator().manual_seed(2)) > 0.4
HARD: dict[str, dict[str, Any]] = {
    "padded": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": 9},
    "one head a value": {"n_kv_heads": 6, "group": 1},
    "grouped": {"n_kv_heads": 1, "group": 6, "is_causal": True},
    "biased": {"bias_shape": (6, 97, 97)},
    "biased, causal": {"bias_shape": (97,), "mask": None, "is_causal": True},
    "capped, sinks": {"softcap": 2.0, "with_sinks": True, "is_causal": True},
    "sharp": {"scale": 4.0},
    "holes": {"mask": HOLES},
    "by head": {"mask": BY_HEAD},
    "some see nothing": {"mask": torch.arange(97) > 40, "is_causal": True},
    "without BLAS": {"d_value": 16},
    "without BLAS, causal": {"d_value": 16, "is_causal": True, "n_kv_heads": 6, "group": 1},
    "without BLAS, window, sinks": {"d_value": 16, "is_causal": True, "window": 9, "with_sinks": True},
    "without BLAS, two rows left": {"d_value": 16, "n": 38},
    "without BLAS, some see nothing": {"d_value": 16, "mask": torch.arange(97) > 40, "is_causal": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", HARD)
def test_the_fused_pass_is_at_most_twice_as_far_off_as_torch(name: str, dtype: torch.dtype) -> None:
    require_as_good_as_torch(*long_call(**HARD[name], dtype=dtype), "numba", name)


@pytest.mark.parametrize("threads", ["torch's", "Python's"])
@pytest.mark.parametrize("name", ["padded", "causal", "holes", "without BLAS", "without BLAS, causal"])
def test_numbers_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch, name: str, threads: str) -> None:
    if threads == "Python's":
        monkeypatch.setattr(f"{PASS}.parallel_address", lambda: 0)
    monkeypatch.setattr(f"{PASS}.LEAST_SHARED", 0)
    monkeypatch.setattr(f"{PASS}.CHUNK", 16)
    monkeypatch.setattr(f"{PASS}.TILE", 50_000)
    call, keys = long_call(**HARD[name])
    one = measured(call, keys, "numba")
    found = []
    for n in (2, 3):
        # torch's own products round otherwise with more threads: those stay alone.
        monkeypatch.setattr(f"{PASS}.count_threads", lambda n=n: n)
        found.append(measured(call, keys, "numba"))
    for other in found:
        for part in PARTS:
            np.testing.assert_array_equal(getattr(one, part), getattr(other, part))


def test_two_threads_of_python_measure_at_once() -> None:
    call, keys = long_call(is_causal=True)
    alone = measured(call, keys, "numba")
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda _: measured(call, keys, "numba"), range(4))]
    for other in found:
        np.testing.assert_array_equal(alone.sum, other.sum)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_stays_none(value: float) -> None:
    call, keys = long_call()
    query = call.query.clone()
    query[0, 1, 3, 0] = value
    found = Sums(keys, backend="numba")
    found(dataclasses.replace(call, query=query))
    sums = found.sums["encoder"][0]
    broken = np.isnan(sums.sum[sums.names.index("entropy_nats")])
    assert broken[0, 1]
    assert broken.sum() == 1


def test_a_head_that_rests_says_exactly_where_else_it_looks() -> None:
    """A thousandth of the attention is off the first token: read off as a difference it would lose three digits."""
    n = 64
    call, keys = long_call(n, mask=None, bias_shape=(1, 1, n, n))
    first = torch.zeros(1, 1, n, n)
    first[..., 0] = 12.0
    call = dataclasses.replace(call, bias=first)
    keys = dataclasses.replace(keys, real=torch.ones_like(keys.real), special=torch.zeros_like(keys.real))
    exact = measures_of_weights(attention_weights(rounding.in_float64(call)), keys)
    ours = measured(call, keys, "numba")
    for name in ("distance_tokens_active", "signed_distance_tokens_active", "same_token_active", "window_active"):
        np.testing.assert_allclose(ours.value(name), exact.value(name), rtol=2e-5, atol=2e-5, err_msg=name)


@pytest.mark.skipif(sys.platform != "linux", reason="torch brings no OpenMP with this entry elsewhere")
@pytest.mark.parametrize("n_shares", [1, 2, 3, 7, 40])
def test_torchs_threads_do_each_task_once_and_say_what_failed(n_shares: int) -> None:
    from numba import njit

    from attnscope.core.measures.backends.numba_compiler import compile_for, parallel_address, share

    @njit
    def count(first, last, done, fails):  # type: ignore[no-untyped-def]
        for task in range(first, last):
            done[task] += 1
            if task == fails:
                raise MemoryError

    @compile_for("i8(i8, i8, i8[::1], i8)")
    def run(parallel, n, done, fails):  # type: ignore[no-untyped-def]
        return share(count, parallel, n, 5, 40, (done, fails))

    assert parallel_address()
    for fails, n_failed in ((-1, 0), (17, 1)):
        done = np.zeros(50, np.int64)
        assert run(parallel_address(), n_shares, done, fails) == n_failed
        assert done[:5].sum() == done[40:].sum() == 0
        assert done.max() == 1
        assert fails >= 0 or done.sum() == 35


def test_other_parts_make_another_kernel() -> None:
    """What numba keeps on disk goes by the kernel's file alone: an old kernel would run on."""
    from attnscope.core.measures.backends import numba_arithmetic, numba_compiler, numba_kernel, numba_vectors

    source = b"".join(
        Path(module.__file__).read_bytes() for module in (numba_arithmetic, numba_compiler, numba_vectors)
    )
    assert hashlib.sha256(source).hexdigest()[:16] == numba_kernel.BUILT_WITH


def test_exponentials_and_logarithms_of_vectors() -> None:
    from numba import njit

    from attnscope.core.measures.backends import numba_arithmetic as arithmetic

    @njit
    def each(x, of_exp, y, of_log):  # type: ignore[no-untyped-def]
        for i in range(0, len(x), 16):
            arithmetic.store(of_exp, i, arithmetic.exponential(arithmetic.load(x, i)))
            arithmetic.store(of_log, i, arithmetic.logarithm(arithmetic.load(y, i)))

    x = -np.linspace(0, 86.9, 16_000, dtype=np.float32)
    y = np.concatenate([np.geomspace(1e-38, 1e6, 15_984), np.arange(1.0, 17.0)])
    of_exp, of_log = np.empty_like(x), np.empty_like(y)
    each(x, of_exp, y, of_log)
    near = x > -20  # what is smaller is no part of a sum that anyone sees
    np.testing.assert_allclose(of_exp[near], np.exp(x[near].astype(float)), rtol=1.5e-7)
    np.testing.assert_allclose(of_exp, np.exp(x.astype(float)), rtol=5e-7)
    np.testing.assert_allclose(of_log, np.log(y), rtol=1e-11, atol=1e-11)
    assert (of_exp[0], of_log[-16]) == (1, 0)


def test_float64_is_left_to_torch() -> None:
    call, keys = long_call(33, dtype=torch.float64)
    ours, theirs = (measured(call, keys, which) for which in ("numba", "torch"))
    np.testing.assert_array_equal(ours.sum, theirs.sum)


# Which of them measures a run ----------------------------------------------------------------------------------------


def sentences(n: int) -> list[str]:
    words = tuple("the cat sat on a mat , and the dog saw it . late in day".split())  # noqa: SIM905
    chance = np.random.default_rng(0)
    return [" ".join(chance.choice(words, chance.integers(5, 40))) for _ in range(n)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.conftest import write_tiny

    return write_tiny(tmp_path_factory.mktemp("backends"))


def test_records_of_two_back_ends_agree(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = attnscope.load(tiny), {}
    for which in ("torch", "numba"):
        monkeypatch.setenv(VARIABLE, which)
        found[which] = heads(model, sentences(20))
        assert found[which].run["backend"] == which
    for ours, theirs in zip(found["numba"].heads, found["torch"].heads, strict=True):
        assert ours.measures.keys() == theirs.measures.keys()
        for name, mine in ours.measures.items():
            other = theirs.measures[name]
            np.testing.assert_allclose(
                (mine.value, mine.uniform), (other.value, other.uniform), rtol=1e-5, atol=1e-5, err_msg=name
            )


_CUTS = """
import sys
import attnscope
from attnscope.studies.heads.options import HeadsOptions
from attnscope.studies.heads.study import heads
from attnscope.studies.heads.merging import merge_findings
from attnscope.studies.running.workers import Workers
from tests.test_backends import sentences
model, texts = attnscope.load(sys.argv[1]), sentences(150)
whole, again = heads(model, texts), heads(model, texts)
merged = merge_findings([heads(model, texts, HeadsOptions(shard=(k, 2))) for k in (1, 2)])
shared = heads(model, texts, workers=Workers(sys.argv[1], 1))
for what, other in (("run again", again), ("merged", merged), ("by workers", shared)):
    assert other.run["backend"] == "numba"
    for name, array in whole.sums.items():
        assert (array == other.sums[name]).all(), (what, name)
"""


def test_workers_and_shards_of_one_back_end_are_the_same_bit_for_bit(tiny: Path) -> None:
    """In a process of its own, as on the command line: what others have done to this one may round otherwise."""
    done = python("-c", _CUTS, tiny, env={**os.environ, VARIABLE: "numba"}, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr


def test_a_back_end_is_chosen_by_the_work_and_by_what_is_there(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    info = attnscope.load(tiny).info
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(backend, "is_compiled", lambda: True)
    assert choose_backend(info, 1e9) == "numba"
    assert choose_backend(info, 1e8) == "torch"
    monkeypatch.setattr(backend, "is_compiled", lambda: False)
    assert choose_backend(info, 1e9) == "torch"
    assert choose_backend(info, 1e10) == "numba"
    for field, value in (("device", "mps"), ("dtype", "float64"), ("path", "eager")):
        other = dataclasses.replace(info, **{field: value})
        assert choose_backend(other, 1e10) == "torch"
        monkeypatch.setenv(VARIABLE, "numba")
        with pytest.raises(AttnscopeError, match="is numba, but the model"):
            choose_backend(other, 1e10)
        monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    assert choose_backend(info, 1e10) == "torch"
    assert "not installed" in backend.tell_backend(info)
    monkeypatch.setenv(VARIABLE, "cupy")
    with pytest.raises(AttnscopeError, match="no back end 'cupy'"):
        choose_backend(info, 1e10)


def test_a_run_that_torch_measures_never_loads_numba(tiny: Path) -> None:
    code = (
        "import sys, attnscope; attnscope.heads(attnscope.load(sys.argv[1]), ['the cat sat']); "
        "assert not {'numba', 'llvmlite'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tiny)], check=True, timeout=120)


def test_merged_records_name_both_back_ends(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts, parts = attnscope.load(tiny), sentences(150), []
    for k, which in ((1, "torch"), (2, "numba")):
        monkeypatch.setenv(VARIABLE, which)
        parts.append(heads(model, texts, HeadsOptions(shard=(k, 2))))
    assert merge_findings(parts).run["backend"] == "numba and torch"
    odd = dataclasses.replace(parts[0], run={**parts[0].run, "backend": None})  # as a damaged record may have it
    assert merge_findings([odd, parts[1]]).run["backend"] == "None and numba"


def test_info_refuses_a_back_end_that_is_none(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNSCOPE_BACKEND", "foo")
    status, _, err = run("info", "own")
    assert (status, "there is no back end 'foo'" in err) == (2, True)
