"""What a pooled map of a long text costs: time and memory, beside the plain forward and transformers' eager maps.

Random causal models of Llama's shape: `tiny` (2 layers, 4 heads of 32), `wide1` (one layer of the width of a model of
100 million parameters: 12 heads of 64, inner 2048) and `wide12` (all 12 of them, 108 million). Each case is a process
of its own, on one thread. Its time is that of the processor for one run, tokens to record (others may be at work), the
best of three where they are short; its memory is the most that is resident during the first run, less what was before
it (VmHWM of Linux, reset once the model is there).

    plain           the plain forward, torch's fused attention
    pooled          attnscope.pooled_heatmap, all heads, to 256 x 256
    heads           attnscope.heads, all heads, every measure
    part            attnscope.heatmap, 64 rows at the end, 64 columns at the beginning
    eager           transformers' own output_attentions=True; only where it fits into --most-gib

Results are merged into the file --json, so that cases can be run one after another; the last line printed is JSON.
--plot draws what the file holds.

usage: python -m benchmarks.long [--models tiny,wide1,wide12] [--tokens 1024,4096] [--json FILE] [--plot PNG]
"""

import argparse
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MODELS = {
    "tiny": (2, 4, 32, 256, 1000),
    "wide1": (1, 12, 64, 2048, 30000),
    "wide12": (12, 12, 64, 2048, 30000),
}
CASES = ("plain", "pooled", "heads", "part", "eager")
THREADS = 1
SHORT_S = 4
HOME = Path(__file__).parent.parent / "docs"


def memory_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def measure(case: str, size: str, n: int) -> dict[str, float]:
    import torch
    import transformers

    import attnscope
    from attnscope.core.attention.seam import attend
    from attnscope.corpus import CorpusText
    from attnscope.models.model import Batch

    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    layers, heads, d_head, inner, vocabulary = MODELS[size]
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=heads * d_head,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=n,
        attn_implementation="eager" if case == "eager" else "sdpa",
    )
    network = transformers.LlamaModel(config).eval().requires_grad_(False)
    model = attnscope.load(network)
    ids = torch.randint(1, vocabulary, (1, n))
    text = " ".join(map(str, ids[0].tolist()))

    def run(ids: Any, text: str) -> None:
        if case == "plain":
            model.run(Batch(ids), attend)
        elif case == "pooled":
            attnscope.pooled_heatmap(model, text)
        elif case == "heads":
            attnscope.heads(model, [CorpusText(0, "random tokens", 1, ids=tuple(ids[0].tolist()))])
        elif case == "part":
            attnscope.heatmap(model, text, rows=slice(ids.shape[1] - 64, None), cols=(0, 64))
        else:
            network(input_ids=ids, output_attentions=True, use_cache=False)

    with torch.inference_mode():
        run(ids[:, :96], " ".join(text.split()[:96]))  # what is slow once: compiled kernels, threads
        Path("/proc/self/clear_refs").write_text("5", "ascii")
        before, times = memory_mib("VmRSS"), []
        adds = 0.0
        while len(times) < 3 and sum(times) < SHORT_S:
            start = time.process_time()
            run(ids, text)
            times.append(time.process_time() - start)
            adds = adds or memory_mib("VmHWM") - before
    return {"seconds": round(min(times), 3), "adds_mib": round(adds, 1)}


def eager_gib(size: str, n: int) -> float:
    """Return what eager takes: a map a layer that it gives out, and about four more of the layer at hand."""
    layers, heads = MODELS[size][:2]
    return (layers + 4) * heads * n * n * 4 / 2**30


def slope(points: list[tuple[float, float]]) -> float:
    """Of the straight line nearest to the points, both axes logarithmic."""
    xs, ys = ([math.log(point[axis]) for point in points] for axis in (0, 1))
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """Ratios of every case to the plain forward, and slopes of memory."""
    told: dict[str, Any] = {"benchmark": "long", "threads": THREADS}
    for size, by_n in results.items():
        told[size] = {}
        for n, cases in sorted(by_n.items(), key=lambda item: int(item[0])):
            told[size][n] = {
                name: {"times_plain": round(case["seconds"] / cases["plain"]["seconds"], 2), **case}
                for name, case in cases.items()
            }
        for name in CASES:
            points = [
                (float(n), cases[name]["adds_mib"]) for n, cases in sorted(by_n.items()) if name in cases
            ]
            if len(points) > 2:
                told[size][f"{name}_memory_slope"] = round(slope(points), 2)
    return told


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    looks = {
        "plain": ("#6f6f6f", "o", "plain forward"),
        "pooled": ("#2f6fb0", "o", "pooled, every head"),
        "heads": ("#8e5aa8", "D", "every measure, every head"),
        "part": ("#0b6e4f", "^", "a part of 64 × 64"),
        "eager": ("#d1495b", "s", "eager, output_attentions"),
    }
    titles = {
        "tiny": "tiny: 2 layers, 4 heads of 32",
        "wide1": "one layer of a 108M model: 12 heads of 64",
        "wide12": "the 108M model: 12 layers, 12 heads of 64",
    }
    sizes = [size for size in MODELS if size in results]
    figure, axes = plt.subplots(
        2, len(sizes), figsize=(4.4 * len(sizes), 6.6), sharex=True, sharey="row", squeeze=False
    )
    for column, size in enumerate(sizes):
        by_n = {int(n): cases for n, cases in results[size].items()}
        for row, what in enumerate(("seconds", "adds_mib")):
            ax = axes[row][column]
            for name, (color, marker, label) in looks.items():
                points = [(n, cases[name][what]) for n, cases in sorted(by_n.items()) if name in cases]
                if points:
                    ax.plot(
                        *zip(*points, strict=True), color=color, marker=marker, markersize=5, label=label
                    )
            ax.set(xscale="log", yscale="log")
            ax.xaxis.set_major_locator(FixedLocator([1024, 4096, 16384, 32768]))
            ax.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n / 1024:.0f}k"))
            ax.xaxis.set_minor_locator(NullLocator())
            ax.grid(color="#e4e4e4", linewidth=0.7)
            ax.spines[["top", "right"]].set_visible(False)
        axes[0][column].set_title(titles[size], fontsize=10.5)
        axes[1][column].set_xlabel("tokens")
    axes[0][0].set_ylabel("seconds of one core")
    axes[1][0].set_ylabel("memory of the run, MiB")
    axes[0][0].legend(frameon=False, fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="tiny,wide1,wide12")
    parser.add_argument("--tokens", default="1024,4096")
    parser.add_argument("--json", type=Path, default=HOME / "long-texts.json")
    parser.add_argument("--most-gib", type=float, default=12.0, help="what eager may take")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--case")
    options = parser.parse_args()
    sizes = [size for size in options.models.split(",") if size]
    lengths = [int(n) for n in options.tokens.split(",") if n]
    if options.case:
        print(json.dumps(measure(options.case, sizes[0], lengths[0])))
        return
    results = json.loads(options.json.read_text("utf-8")) if options.json.exists() else {}
    for size in sizes:
        for n in lengths:
            for case in options.cases.split(","):
                if case == "eager" and eager_gib(size, n) > options.most_gib:
                    continue
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.long",
                    "--case",
                    case,
                    "--models",
                    size,
                    "--tokens",
                    str(n),
                ]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                results.setdefault(size, {}).setdefault(str(n), {})[case] = json.loads(
                    done.stdout.splitlines()[-1]
                )
                print(size, n, case, results[size][str(n)][case], file=sys.stderr, flush=True)
                options.json.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", "utf-8")
    if options.plot:
        plot(results, options.plot)
    print(json.dumps(summary(results)))


if __name__ == "__main__":
    main()
