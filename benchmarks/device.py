"""What every measure costs on a GPU: a Llama of the 1B class in bfloat16 on a long text, against its plain forward.

    python -m benchmarks.device                                             # on the first CUDA device
    python -m benchmarks.device --device cpu --tokens 256 --layers 1 --width 128 --rounds 1     # whether it runs

The plain forward is transformers' sdpa, which runs the flash kernel there. Weights and text are random, which costs
the same. Each is run in turn; the ratio of the medians counts. The last line is JSON, and says so without the device.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import transformers

from attnscope.core.facts import TextFacts
from attnscope.core.measures import HeadMeasures
from attnscope.models.hf.assembling import wrap
from attnscope.models.model import Batch

GOAL = 1.5


def llama(layers: int, width: int, n_tokens: int) -> transformers.PreTrainedModel:
    """Of the 1B class: 16 layers of 32 heads of 64, 8 of keys and values; fewer heads for a smaller width."""
    heads = width // 64
    return transformers.LlamaModel(
        transformers.LlamaConfig(
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 4),
            vocab_size=32000,
            max_position_embeddings=n_tokens,
            attn_implementation="sdpa",
        )
    )


def facts_of(ids: torch.Tensor, embeddings: torch.Tensor) -> TextFacts:
    """Return all that the measures can ask of a text, at random."""
    nothing = torch.zeros_like(ids, dtype=torch.bool)
    return TextFacts(
        real=~nothing,
        special=nothing,
        ids=ids,
        cls=nothing,
        sep=nothing,
        punctuation=ids % 7 == 0,
        log_frequency=-(ids % 11).float(),
        embeddings=embeddings / embeddings.norm(dim=-1, keepdim=True),
        rarest=torch.arange(ids.shape[1], device=ids.device).expand(ids.shape) == 1,
    )


def seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    told = {"benchmark": "device", "goal": f"times_plain <= {GOAL}", **vars(given), "dtype": "bfloat16"}
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        print(json.dumps({**told, "measured": False, "why": "there is no CUDA device here"}))
        return
    device = torch.device(given.device)
    torch.manual_seed(0)
    network = llama(given.layers, given.width, given.tokens).to(device, torch.bfloat16).eval()
    model = wrap(network, check=False)
    ids = torch.randint(0, 32000, (1, given.tokens), device=device)
    facts = facts_of(ids, model.static_embeddings(ids).float())
    spent: dict[str, list[float]] = {"plain": [], "measured": []}

    def measure() -> None:
        model.run(Batch(ids), HeadMeasures(facts))

    with torch.no_grad():
        for number in range(given.rounds + 1):
            work = {
                "plain": lambda: network(input_ids=ids, use_cache=False),
                "measured": measure,
            }
            for name, run in work.items():
                took = seconds(run, device)
                if number:  # the first of each loads kernels
                    spent[name].append(took)
    medians = {name: statistics.median(times) for name, times in spent.items()}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    print(
        json.dumps(
            {
                **told,
                "measured": True,
                "device_name": name,
                "version": torch.__version__,
                "peak_gib": peak,
                "seconds": {name: round(median, 4) for name, median in medians.items()},
                "times_plain": round(medians["measured"] / medians["plain"], 2),
            }
        )
    )


if __name__ == "__main__":
    main()
