"""A sweep that takes every head out of minilm once: from its layer on, against whole forwards, in turn.

Both take several heads out in one forward pass, as rows of the batch; `one by one` is what a script with a hook does, a
whole forward a head. The limit of running from the layer on is 36/21 = 1.71 for 6 layers. The last line is JSON.

usage: python -m benchmarks.ablate [--tokens 512] [--length 64] [--runs 3] [--threads 2] [--model minilm]
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

from attnscope.corpus import CorpusText
from attnscope.models import load
from attnscope.models.inside.tape import ResumableRun
from attnscope.studies.ablate import measurers
from attnscope.studies.ablate.measurers import (
    Intervention,
    PassSettings,
    Replacements,
    find_head_shapes,
    iterate_head_outputs,
    measure_interventions,
)
from attnscope.studies.ablate.reading import BatchReader

SAMPLE = Path(__file__).parent.parent / "sample_texts" / "alice.txt"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--engine", default="auto")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load(options.model, engine=options.engine)
    texts = cut(model, options.tokens, options.length)
    reader = BatchReader(model, None)
    known = find_head_shapes(iterate_head_outputs(PassSettings(reader, texts)))
    cuts = [
        Intervention(((*place, head),))
        for place, (n_heads, _) in known.items()
        for head in range(n_heads)
    ]

    def resumed():
        return measure_interventions(PassSettings(reader, texts), cuts, Replacements())

    def whole():
        block = ResumableRun.first_block_of
        ResumableRun.first_block_of = lambda rerun, places: 0
        try:
            return measure_interventions(PassSettings(reader, texts), cuts, Replacements())
        finally:
            ResumableRun.first_block_of = block

    def one_by_one():
        held = measurers.MAX_PASS_TOKENS
        measurers.MAX_PASS_TOKENS = 1
        try:
            return whole()
        finally:
            measurers.MAX_PASS_TOKENS = held

    contenders = {"resumed": resumed, "whole": whole, "one_by_one": one_by_one}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    found = {}
    for _ in range(options.runs):
        for name, contender in contenders.items():
            started = time.perf_counter()
            found[name] = contender().done.sums.ratio()
            times[name].append(time.perf_counter() - started)
            print(name, f"{times[name][-1]:.2f} s", flush=True)
    seconds = {name: median(of_name) for name, of_name in times.items()}
    difference = max(float(np.nanmax(np.abs(found[name] - found["resumed"]))) for name in contenders)
    result = {
        "benchmark": "ablate",
        "model": options.model,
        "engine": model.info.engine,
        "heads": len(cuts),
        "tokens": options.tokens,
        "length": options.length,
        "threads": options.threads,
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "times_faster_than_whole": round(seconds["whole"] / seconds["resumed"], 3),
        "times_faster_than_one_by_one": round(seconds["one_by_one"] / seconds["resumed"], 3),
        "largest_difference_of_an_effect": difference,
    }
    print(json.dumps(result))


def cut(model, n_tokens: int, length: int) -> list[CorpusText]:
    """Alice as texts of equal length, as token numbers between the special ones."""
    example = model.tokenizer.encode("a")
    ordinary = np.flatnonzero(~example.special)
    before, after = example.ids[: ordinary[0]].tolist(), example.ids[ordinary[-1] + 1 :].tolist()
    tokens = model.tokenizer.encode(SAMPLE.read_text("utf-8"))
    ids = tokens.ids[~tokens.special].tolist()
    inner = length - len(before) - len(after)
    return [
        CorpusText(i, "alice", i + 1, ids=(*before, *ids[i * inner : (i + 1) * inner], *after))
        for i in range(max(1, n_tokens // length))
    ]


if __name__ == "__main__":
    main()
