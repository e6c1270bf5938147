"""Tiles alone against plain scaled-dot-product attention.

12 heads of 32, float32. `tiles`: scores, weights and output; `torch` and `numba`: every measure of one layer besides,
by either back end, with what the texts and the mask determine worked out beforehand, as all but the first layer find
it; `plain`: torch's fused attention; `dense`: softmax attention on the whole map, without a measure. Of one thread the
processor's time is taken, which others on the machine disturb less. The last line is JSON.

usage: python benchmarks/kernels.py [--runs 3] [--threads 2] [--keys 512 1024 2048 4096 8192]
"""

import argparse
import json
import statistics
import time
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch

from attnscope.core.attention.seam import AttentionCall, attend, attend_with_weights
from attnscope.core.attention.tiles import attend_in_tiles
from attnscope.core.measures.facts import TextFacts
from attnscope.core.measures.sums import Sums

BACKENDS = ["torch", *(["numba"] if find_spec("numba") else [])]

N_HEADS, D_HEAD = 12, 32


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--keys", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = {"benchmark": "kernels", "threads": options.threads, "heads": N_HEADS, "d_head": D_HEAD}
    for n in options.keys:
        for is_causal in (False, True):
            result[f"{'causal ' if is_causal else ''}{n}"] = ratios(n, is_causal, options.runs)
    print(json.dumps(result))


def ratios(n: int, is_causal: bool, runs: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, N_HEADS, n, D_HEAD, generator=generator) for _ in range(3))
    call = AttentionCall(0, "decoder", query, key, value, D_HEAD**-0.5, is_causal=is_causal)

    ids = torch.randint(0, max(n // 4, 2), (1, n), generator=generator)
    ends = (torch.arange(n) == 0) | (torch.arange(n) == n - 1)
    table = torch.nn.functional.normalize(torch.randn(n, 384, generator=generator), dim=-1)
    facts = TextFacts(
        real=torch.ones(1, n, dtype=torch.bool), special=ends[None], ids=ids, punctuation=ids % 7 == 0,
        log_frequency=-(ids % 9).float(), embeddings=table[ids], rarest=(torch.arange(n) == n // 3)[None],
    )  # fmt: skip
    probes = {backend: Sums(facts, backend=backend) for backend in BACKENDS}
    layers = iter(range(10**6))

    def measure(probe: Sums) -> None:
        layer = next(layers)
        probe(replace(call, layer=layer))
        probe.sums[call.kind].clear()

    rivals = {
        "plain": lambda: attend(call),
        "dense": lambda: attend_with_weights(call),
        "tiles": lambda: attend_in_tiles(call),
        **{backend: partial(measure, probe) for backend, probe in probes.items()},
    }
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for run in range(runs + 1):  # the first round warms up and is not counted
        for name, compute in rivals.items():
            started = clock()
            with torch.no_grad():
                compute()
            if run:
                times[name].append(clock() - started)
    found = {"plain_s": round(statistics.median(times["plain"]), 4)}
    for name in list(rivals)[1:]:
        pairs = zip(times[name], times["plain"], strict=True)
        found[f"{name}_over_plain"] = round(statistics.median(own / plain for own, plain in pairs), 2)
        for rival in {"plain", "dense"} - {name}:
            found[f"{name}_over_{rival}_of_fastest"] = round(min(times[name]) / min(times[rival]), 2)
    print(f"{n} keys{', causal' if is_causal else ''}: {found}", flush=True)
    return found


if __name__ == "__main__":
    main()
