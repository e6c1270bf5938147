"""Tiles alone against plain scaled-dot-product attention.

12 heads of 32, float32. `tiles`: scores, weights and output; `entropies`: those of each query and its largest weight
besides; `dense`: attention on the whole map. The last line is JSON.

usage: python benchmarks/kernels.py [--runs 3] [--threads 2] [--keys 512 1024 2048 4096 8192]
"""

import argparse
import json
import statistics
import time

import torch

from attnscope.core.attention import AttentionCall, attend, attend_with_weights
from attnscope.core.tiles import Tile, attend_in_tiles

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

    def read(tile: Tile) -> None:
        tile.entropies(tile.log_sum_exp(tile.weights.amax(-1)))

    rivals = {
        "plain": lambda: attend(call),
        "dense": lambda: attend_with_weights(call),
        "tiles": lambda: attend_in_tiles(call),
        "entropies": lambda: attend_in_tiles(call, read),
    }
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for run in range(runs + 1):  # the first round warms up and is not counted
        for name, compute in rivals.items():
            started = time.perf_counter()
            with torch.no_grad():
                compute()
            if run:
                times[name].append(time.perf_counter() - started)
    found = {"plain_s": round(statistics.median(times["plain"]), 4)}
    for name in list(rivals)[1:]:
        pairs = zip(times[name], times["plain"], strict=True)
        found[f"{name}_over_plain"] = round(statistics.median(own / plain for own, plain in pairs), 2)
        found[f"{name}_over_plain_of_fastest"] = round(min(times[name]) / min(times["plain"]), 2)
    print(f"{n} keys{', causal' if is_causal else ''}: {found}", flush=True)
    return found


if __name__ == "__main__":
    main()
