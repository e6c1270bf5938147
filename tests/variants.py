"""Runs the tests of numbers as other processors would: other instructions, other numbers of threads.

    python -m tests.variants [TEST ...]

torch picks its kernels by ATEN_CPU_CAPABILITY and its oneMKL and oneDNN theirs by MKL_ENABLE_INSTRUCTIONS and
ONEDNN_MAX_CPU_ISA; each adds in an order of its own. What the processor lacks cannot be tried and is left out.
A slow test of tests/test_processes.py runs it whole.
"""

import os
import subprocess
import sys
import time

import torch

NUMERIC = (
    "attention",
    "calls",
    "full_width",
    "measures",
    "multihead",
    "pooling",
    "precision",
    "probes",
    "reference",
    "relations_core",
    "sums",
    "tiles",
    "distance",
    "rollout_core",
    "native",
    "gate",
    "heads_split.py::test_a_text_has_the_same_sums_whatever_it_is_batched_with",
    "heads_split.py::test_models_that_only_have_dense_weights_give_the_same",
    "heatmap.py::test_chosen_heads_are_those_of_the_whole",
    "heatmap.py::test_changes_are_those_of_the_record",
)
"""Tests whose outcome rests on rounding: tests/test_<name>.py, or one of its tests."""

ATEN = ("default", "avx2", "avx512")
"""By rising demand. `default` is what a processor without AVX2 runs."""

MKL = {"default": "SSE4_2", "avx2": "AVX2", "avx512": "AVX512"}
"""What torch's matrix products may use beside it."""

ONEDNN = {"default": "SSE41", "avx2": "AVX2", "avx512": "AVX512_CORE"}
"""Likewise its convolutions and linear layers."""

LIMIT_S = 1500
"""Seconds after which one variant is given up."""


def variants() -> list[dict[str, str]]:
    """The settings that this processor can run: each instruction set alone and crossed with another of oneMKL's."""
    most = torch.backends.cpu.get_cpu_capability().lower()
    has = ATEN[: ATEN.index(most) + 1] if most in ATEN else ATEN[:1]
    threads = ("1", "2")
    kernels = [(aten, MKL[aten], ONEDNN[aten]) for aten in has]
    if len(has) > 1:  # kernels of one kind beside matrix products of another
        kernels += [
            (has[-1], MKL["default"], ONEDNN["default"]),
            ("default", MKL[has[-1]], ONEDNN[has[-1]]),
        ]
    return [
        {
            "ATEN_CPU_CAPABILITY": a,
            "MKL_ENABLE_INSTRUCTIONS": m,
            "ONEDNN_MAX_CPU_ISA": d,
            "ATTNSCOPE_TEST_THREADS": n,
        }
        for a, m, d in kernels
        for n in threads
    ]


def main(chosen: list[str]) -> int:
    """Runs each variant in a process; the exit status is how many failed."""
    tests = chosen or [f"tests/test_{name}" + ("" if ".py" in name else ".py") for name in NUMERIC]
    failed = 0
    for variant in variants():
        start = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        done = subprocess.run(
            command, env=os.environ | variant, capture_output=True, text=True, timeout=LIMIT_S
        )
        failed += done.returncode != 0
        said = " ".join(f"{name}={value}" for name, value in variant.items())
        print(f"{said}: {done.stdout.splitlines()[-1]} ({time.monotonic() - start:.0f} s)", flush=True)
        if done.returncode:
            print(done.stdout, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
