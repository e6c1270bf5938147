"""The first use of the compiled pass, before it lies compiled: `attnscope heads` with numba and with torch, in turn.

Of as little work as the compiled pass is chosen for where it is not compiled yet, it may take longer than torch by the
time that it takes to compile: here on drawn texts of 500 tokens with minilm, whole processes, seconds of the processor
and by the clock. The last line is JSON.

usage: python -m benchmarks.first_use [--runs 1] [--threads 1]
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from attnscope.studies.running.backend import COMPILE_FROM, LOAD_FROM, VARIABLE

N_TOKENS, WEIGHTS_A_TEXT = 500, 72 * 500**2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    result: dict[str, object] = {"benchmark": "first_use", "threads": options.threads, "runs": options.runs}
    with tempfile.TemporaryDirectory() as held:
        cache = Path(held)
        for state, weights in (("cold", COMPILE_FROM), ("compiled", LOAD_FROM)):
            source = Path(held, f"{state}.jsonl")
            write_texts(source, round(weights / WEIGHTS_A_TEXT))
            times: dict[str, list[tuple[float, float]]] = {"numba": [], "torch": []}
            for run in range(options.runs):
                for name in times:
                    folder = cache if state == "compiled" else Path(held, f"empty{run}")
                    times[name].append(timed(source, name, folder, options.threads))
                    cache = folder if name == "numba" else cache
            for name, runs in times.items():
                for kind, seconds in zip(("processor_s", "clock_s"), zip(*runs, strict=True), strict=True):
                    result[f"{state}_{name}_{kind}"] = round(statistics.median(seconds), 2)
            print(result, flush=True)
    print(json.dumps(result))


def write_texts(path: Path, n_texts: int) -> None:
    drawn = random.Random(0)
    lines = [json.dumps({"input_ids": [drawn.randrange(1000, 30000) for _ in range(N_TOKENS)]}) for _ in range(n_texts)]
    path.write_text("\n".join(lines) + "\n", "utf-8")


def timed(source: Path, backend: str, cache: Path, threads: int) -> tuple[float, float]:
    """Seconds of the processor and by the clock of one process."""
    environment = os.environ | {
        VARIABLE: backend, "NUMBA_CACHE_DIR": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)
    }  # fmt: skip
    command = [sys.executable, "-m", "attnscope", "heads", "--file", str(source), "-m", "minilm", "--json", "-q"]
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    elapsed_s, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, elapsed_s


if __name__ == "__main__":
    main()
