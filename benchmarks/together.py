"""Do heads with a role matter more than as many others? All taken out together, beside other sets drawn at random.

Heads are named by a record of `attnscope heads`, and taken out on texts that had no part in it. As many others, without
these roles, come from the same layers; where a layer has too few, from the rest. By zero, as `attnscope ablate` does.

The last line is JSON: how much the loss rises without the heads, without the others (the mean of their sets, the least
and the largest), and the difference, each with its 95% interval over texts; and how many sets come up to the heads.

usage: python -m benchmarks.together --named heads.npz [--roles copying,induction_by_effect] [--file TEXTS]
           [--model MODEL] [--sets 19] [--texts 24] [--split line]

Without --file the texts are those of `--probe repeat` of another seed: random tokens that come twice.
"""

import argparse
import json

import numpy as np
import torch

import attnscope
from attnscope.corpus import Corpus, CorpusText
from attnscope.models.model import Model
from attnscope.studies.ablation.effects import effects_of
from attnscope.studies.ablation.means import heads_of
from attnscope.studies.ablation.reading import Reader
from attnscope.studies.ablation.sweep import ALL_QUANTITIES, Cut, Going, measure
from attnscope.studies.heads.needles import draw_others
from attnscope.studies.heads.study import probe_texts

PROBE_SEED = 1  # not that of `heads --probe repeat`, on which the heads were named


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--named", required=True, help="a record of attnscope heads --writes")
    parser.add_argument("--roles", default="copying,induction_by_effect")
    parser.add_argument("--model", default=None, help="that of the record, unless it is elsewhere")
    parser.add_argument("--file", help="texts; else random tokens that come twice")
    parser.add_argument("--split", default="line", choices=("line", "paragraph", "file"))
    parser.add_argument("--sets", type=int, default=19)
    parser.add_argument("--texts", type=int, default=24)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = attnscope.load_record(given.named)
    roles = set(given.roles.split(","))
    named = [(head.layer, head.head) for head in found.heads if roles & {role.name for role in head.roles}]
    every = [(head.layer, head.head) for head in found.heads]
    model = attnscope.load(given.model or found.run["model"])
    texts = texts_of(model, given.file, given.split, given.texts)
    others = [head for head in every if head not in named]
    sets = [named, *(draw_others(named, others, seed=0, number=number) for number in range(given.sets))]
    print(" ".join(f"L{layer}H{head}" for layer, head in named), f"out of {len(texts)} texts", flush=True)
    result = {"benchmark": "together", "model": model.info.name, "texts": len(texts), "n_named": len(named)}
    print(json.dumps(result | compare(model, texts, sets)))


def texts_of(model: Model, file: str | None, split: str, n: int) -> list[CorpusText]:
    if file is None:
        return probe_texts(model, PROBE_SEED)[:n]
    return list(Corpus([file], split=split))[:n]  # type: ignore[arg-type]  # argparse knows the splits


def compare(model: Model, texts: list[CorpusText], sets: list[list[tuple[int, int]]]) -> dict[str, object]:
    """How much the loss rises without the first set, without each of the others, and the difference to their mean."""
    cuts = [Cut(tuple(("decoder", *head) for head in heads)) for heads in sets]
    n = len(cuts) - 1
    mean = np.concatenate([[0.0], np.full(n, 1 / n)])
    contrasts = np.stack([*np.eye(n + 1), mean, np.eye(n + 1)[0] - mean])
    going = Going(model, Reader(model, "causal"), texts)
    effects = effects_of(measure(going, cuts, heads_of(going), contrasts=contrasts).done.sums)
    found: dict[str, object] = {}
    for place, name in enumerate(ALL_QUANTITIES):
        named, *each, mean_of_others, difference = effects[place :: len(ALL_QUANTITIES)]
        values = [one.value for one in each]
        told = {"named": named, "others": mean_of_others, "difference": difference}
        found[name] = {what: [round(x, 4) for x in (one.value, one.low, one.high)] for what, one in told.items()} | {
            "least_of_others": round(min(values), 4),
            "largest_of_others": round(max(values), 4),
            "sets_that_come_up": sum(value >= named.value for value in values),
            "count": named.count,
        }
        print(name, found[name], flush=True)
    return found


if __name__ == "__main__":
    main()
