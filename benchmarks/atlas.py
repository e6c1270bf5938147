"""What an atlas costs beside a study of heads on the same texts, and how large its page is.

- time: processor time of an atlas over that of `heads`, with descriptions and without, in turns; its fastest of each.
- size: the page of a corpus, and of made-up atlases of 72, 270 and 1,024 heads with 20 examples of 64 tokens.

The last line is JSON.

usage: python -m benchmarks.atlas --file TEXTS [--model minilm] [--tokens 40000] [--rounds 2] [--parts time,size]
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import attnscope
from attnscope.corpus import CopyFilter, Corpus, CorpusText, distinct
from attnscope.models.model import Model
from attnscope.pages import page_of_record
from attnscope.questions.atlas import Atlas
from attnscope.studies.atlas.options import AtlasOptions
from attnscope.studies.heads.options import DescribeOptions, HeadsOptions
from tests.atlas_helpers import small_atlas

ROOT = Path(__file__).resolve().parents[1]
SHAPES = {72: (6, 12), 270: (30, 9), 1024: (32, 32)}
MOST_MB = {72: 6, 270: 20, 1024: 60}


def texts_of(model: Model, file: str, split: str, n_tokens: int) -> list[CorpusText]:
    """Return the first texts of a file, without copies, until there are so many tokens."""
    corpus = distinct(Corpus([file], split=split), CopyFilter())  # type: ignore[arg-type]  # argparse knows the splits
    left = n_tokens
    found = []
    for text in islice(corpus, n_tokens):
        left -= len(model.tokenizer.encode(text.text or ""))
        found.append(text)
        if left <= 0:
            break
    return found


def processor_time(do: Callable[[], Any]) -> float:
    started = time.process_time()
    do()
    return time.process_time() - started


def compare_times(model: Model, texts: list[CorpusText], rounds: int) -> dict[str, Any]:
    """Seconds of processor time of both, and their ratio."""
    found: dict[str, Any] = {"n_texts": len(texts)}
    for name, describe in (("without_descriptions", None), ("with_descriptions", DescribeOptions())):
        options = HeadsOptions(describe=describe)
        atlas = AtlasOptions(heads=options)
        both = [
            (
                processor_time(lambda how=options: attnscope.heads(model, texts, how)),
                processor_time(lambda how=atlas: attnscope.atlas(model, texts, how)),
            )
            for _ in range(rounds)
        ]
        heads_s, atlas_s = (min(one[place] for one in both) for place in (0, 1))
        found[name] = {
            "heads_s": round(heads_s, 2),
            "atlas_s": round(atlas_s, 2),
            "ratio": round(atlas_s / heads_s, 3),
        }
        print(name, found[name], flush=True)
    return found


def page_sizes(model: Model, texts: list[CorpusText]) -> dict[str, Any]:
    """Megabytes of pages, and seconds to make them."""
    real = attnscope.atlas(
        model, texts, replace(AtlasOptions(), heads=HeadsOptions(describe=DescribeOptions()))
    )
    found: dict[str, Any] = {
        "corpus": {
            "heads": len(real["heads"]),
            "examples": len(real["examples"]),
            "mb": _megabytes(real),
        },
    }
    for n, (n_layers, n_heads) in SHAPES.items():
        made = small_atlas(n_layers, n_heads, n_tokens=64, n_top=10)
        started = time.process_time()
        size = _megabytes(made)
        found[str(n)] = {
            "mb": size,
            "most": MOST_MB[n],
            "made_s": round(time.process_time() - started, 1),
        }
        print(n, found[str(n)], flush=True)
    return found


def _megabytes(atlas: Atlas) -> float:
    return round(len(page_of_record(atlas).html.encode()) / 1e6, 2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--file", default=str(ROOT / "sample_texts" / "alice.txt"))
    parser.add_argument("--split", default="line", choices=("line", "paragraph", "file"))
    parser.add_argument("--tokens", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--parts", default="time,size")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = attnscope.load(given.model)
    texts = texts_of(model, given.file, given.split, given.tokens)
    attnscope.heads(model, texts[:20])  # what is loaded once is loaded now
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "time": lambda: compare_times(model, texts, given.rounds),
        "size": lambda: page_sizes(model, texts),
    }
    found = {name: parts[name]() for name in given.parts.split(",")}
    print(json.dumps({"model": given.model, "tokens": given.tokens, **found}))


if __name__ == "__main__":
    main()
