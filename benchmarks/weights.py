"""`weights` beside TransformerLens, on the same random models: do both say the same, and how long do they take?

    python -m benchmarks.weights
    python -m benchmarks.weights --seconds SmolLM2-folder    # the time alone, of one thread

The comparison needs TransformerLens 4.3 (`pip install transformer-lens`), in an environment of its own. Compared are
copying scores and compositions of all pairs of heads, on a GPT-2 (LayerNorm, fused projections) and a Llama (RMSNorm,
grouped queries, rotary positions) with random weights everywhere, norms and biases included. The last line is JSON: the
largest differences, or the seconds.
"""

import argparse
import copy
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import attnscope
from attnscope.questions.weights import INPUT_LETTERS, WeightsOptions
from tests.conftest import VOCABULARY, write_tokenizer
from tests.test_stream import random_model


def lens(source: Any) -> Any:
    """TransformerLens's view of a model: norms folded, all that no one reads taken away."""
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        source.save_pretrained(folder)
        write_tokenizer(Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        made = TransformerBridge.boot_transformers(
            folder, hf_model=copy.deepcopy(source), tokenizer=tokenizer
        )
    # The biases of values stay with their heads, as here.
    made.enable_compatibility_mode(disable_warnings=True, fold_value_biases=False)
    return made


def differences(name: str) -> dict[str, float]:
    """Return the largest difference of each quantity on one architecture."""
    from transformer_lens import FactoredMatrix

    source = random_model(name, vocab_size=len(VOCABULARY))
    model: Any = attnscope.load(source)
    ours, theirs = attnscope.weights(model, WeightsOptions()), lens(source)
    group = theirs.W_O.shape[1] // theirs.W_V.shape[1]
    ov = FactoredMatrix(theirs.W_V.repeat_interleave(group, 1), theirs.W_O)
    values = (theirs.W_E @ ov @ theirs.W_U).eigenvalues
    copying = (values.sum(-1).real / values.abs().sum(-1)).flatten().numpy()
    found = {"copying": float(np.abs(copying - ours["heads"]["copying"]).max())}
    n = len(ours["heads"])
    for number, by in enumerate(INPUT_LETTERS):
        scores = theirs.all_composition_scores(by)
        scores = getattr(scores, "scores", scores).reshape(n, n).numpy()
        defined = np.isfinite(ours["composition"][number])
        found[f"composition_{by}"] = float(np.abs(scores - ours["composition"][number])[defined].max())
    return found


def time_of(folder: str) -> dict[str, float]:
    """Seconds that all weights of a model take, by the clock and of the processor, in one thread."""
    torch.set_num_threads(1)
    model = attnscope.load(folder)
    start, processor = time.perf_counter(), time.process_time()
    attnscope.weights(model)
    return {"seconds": time.perf_counter() - start, "processor_s": time.process_time() - processor}


def main() -> None:
    """Print what differs, or how long a model takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--seconds", help="instead, the time that all weights of a model in a folder take"
    )
    given = parser.parse_args()
    found: dict[str, Any]
    if given.seconds:
        found = time_of(given.seconds)
    else:
        with torch.no_grad():
            found = {name: differences(name) for name in ("gpt2", "llama")}
        for name, by_quantity in found.items():
            print(name, " ".join(f"{quantity} {value:.1e}" for quantity, value in by_quantity.items()))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
