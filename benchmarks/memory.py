"""What measuring every head adds to the memory of a forward: a random causal model of 6 layers, 12 heads of 32.

Each case is a process of its own, whose peak is the kernel's (ru_maxrss): the model alone, the plain forward, the
forward with every measure on. `one_layer_dense_mib` is what one layer's attention weights would take. The last line
is JSON.

usage: python -m benchmarks.memory [--keys 4096]
"""

import argparse
import json
import resource
import subprocess
import sys

LAYERS, HEADS, D_HEAD, VOCABULARY = 6, 12, 32, 1000


def measure(case: str, n: int) -> None:
    import torch
    import transformers

    from attnscope.core.attention.seam import attend
    from attnscope.core.facts import TextFacts
    from attnscope.core.measures import HeadMeasures
    from attnscope.models import load
    from attnscope.models.model import Batch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HEADS * D_HEAD,
        intermediate_size=4 * HEADS * D_HEAD,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=n,
    )
    model = load(transformers.LlamaModel(config))
    ids = torch.randint(VOCABULARY, (1, n))
    nothing = torch.zeros(1, n, dtype=torch.bool)
    facts = TextFacts(real=~nothing, special=nothing, ids=ids, punctuation=nothing)
    probe = {"plain": attend, "measures": HeadMeasures(facts)}.get(case)
    if probe is not None:
        with torch.inference_mode():
            model.run(Batch(ids), probe)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=int, default=4096)
    parser.add_argument("--case")
    options = parser.parse_args()
    if options.case:
        measure(options.case, options.keys)
        return
    command = [sys.executable, "-m", "benchmarks.memory", "--keys", str(options.keys), "--case"]
    peaks = {
        case: float(
            subprocess.run([*command, case], check=True, capture_output=True, text=True).stdout.split()[
                -1
            ]
        )
        for case in ("model", "plain", "measures")
    }
    print(
        json.dumps(
            {
                "benchmark": "memory",
                "keys": options.keys,
                "plain_adds_mib": round(peaks["plain"] - peaks["model"]),
                "measures_add_mib": round(peaks["measures"] - peaks["model"]),
                "one_layer_dense_mib": round(HEADS * options.keys**2 * 4 / 2**20),
            }
        )
    )


if __name__ == "__main__":
    main()
