"""How good descriptions of heads are, and what they cost: on a real model, on planted rules, and where there are none.

- quality: each half of the sampled texts is fitted and the other scored, both ways, of all attention and of that off
  the sinks; how often both come to the same first term; processor time to fit against a plain forward over 40,000
  tokens.
- stages: processor time of `heads`, by stage, and its ratio to plain forward passes over 40,000 tokens. The rest is all
  measures of heads, and what lies between stages.
- planted: attention to 20 random tokens, from one class to another, or by both rules, with noise.
- random: the model's architecture with random weights, queries and keys scaled so that heads are 0.5 to 2 nats sharp.
- growth: explained shares with the sample doubled.

The last line is JSON.

usage: python -m benchmarks.descriptions [--model minilm] [--file sample_texts/alice.txt]
       [--parts quality,stages,planted,random,growth] [--queries 4000] [--seeds 3]
"""

import argparse
import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import attnscope
from attnscope.core import descriptions, directions
from attnscope.core.attention.seam import attend
from attnscope.corpus import Corpus
from attnscope.models.model import Batch, Model
from attnscope.studies.describe import study
from attnscope.studies.describe.english import CLOSED_CLASSES
from attnscope.studies.describe.rows import HeadGroup, SampledText, join_rows
from attnscope.studies.describe.study import HeadLine, describe_fitted, fit_group
from attnscope.studies.heads.options import DescribeOptions, HeadsOptions
from benchmarks.sampling import read_sample

ROOT = Path(__file__).resolve().parents[1]
FORWARD_TOKENS = 40_000
PLANTED = 0.5
"""A planted rule comes first if the values of the first terms correlate with it by this over (query, key)."""


def sampled(
    model: Model, texts: Corpus, queries: int, seed: int = 0
) -> tuple[list[SampledText], list[HeadGroup]]:
    sample, counts = read_sample(model, texts, DescribeOptions(queries=queries, seed=seed))
    return sample, join_rows(model, sample, counts)


def both_ways(
    sample: list[SampledText], groups: list[HeadGroup], options: DescribeOptions
) -> Iterator[list[HeadLine]]:
    """Yield the descriptions, fitted on one half of the texts and scored on the other, and the other way round."""
    for _ in range(2):
        yield [
            one for group in groups for one in describe_fitted(fit_group(group, sample, options), sample)
        ]
        for unit in sample:
            unit.is_for_fitting = not unit.is_for_fitting


def quality(model: Model, texts: Corpus, queries: int) -> dict[str, Any]:
    began = time.process_time()
    sample, groups = sampled(model, texts, queries)
    read_s, began = time.process_time() - began, time.process_time()
    ways = list(both_ways(sample, groups, DescribeOptions(queries=queries)))
    fit_s = (time.process_time() - began) / 2
    forward_s = forward_seconds(model, sample)
    explained = np.array([[explained_by(one, "whole_explained") for one in way] for way in ways])
    active = np.array([[explained_by(one, "kl_explained") for one in way] for way in ways])
    contents = [[one["first_term"] for one in way] for way in ways]
    return {
        "texts": len(sample),
        "queries": sum(len(unit.queries) for unit in sample),
        "heads": explained.shape[1],
        "median": round(float(np.nanmedian(explained, 1).mean()), 3),
        "active_median": round(float(np.nanmedian(active, 1).mean()), 3),
        "active_over_0.4": [int((way > 0.4).sum()) for way in active],
        "agree_on_first": round(float(np.mean([a == b for a, b in zip(*contents, strict=True)])), 3),
        "read_cpu_s": round(read_s, 2),
        "fit_one_way_cpu_s": round(fit_s, 2),
        "forward_40k_cpu_s": round(forward_s, 2),
        "fit_over_forward": round(fit_s / forward_s, 3),
    }


def explained_by(line: HeadLine, column: str) -> float:
    """The share that a line explains; NaN of a head that spreads evenly."""
    return float(line[column].value) if column in line else math.nan


def forward_seconds(model: Model, sample: list[SampledText]) -> float:
    """Processor time of plain forward passes over the sample's tokens, repeated up to FORWARD_TOKENS."""
    ids = torch.from_numpy(np.concatenate([unit.chunk.tokens.ids for unit in sample]))
    ids = ids.repeat(-(-FORWARD_TOKENS // len(ids)))[: FORWARD_TOKENS // 128 * 128].view(-1, 128)
    began = time.process_time()
    with torch.no_grad():
        for batch in ids.split(8):
            model.run(Batch(batch), attend)
    return time.process_time() - began


STAGES = {
    "reading": (study, "join_rows"),
    "directions": (directions, "find_columns"),
    "search": (descriptions, "describe"),
    "naming": (study, "describe_fitted"),
}


def stages(model: Model, texts: Corpus, queries: int) -> dict[str, Any]:
    """Processor time of each stage of `heads`, in seconds, and its ratio to plain forward passes."""
    spent = dict.fromkeys(STAGES, 0.0)
    running: list[str] = []

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **named: Any) -> Any:
            if running:  # it belongs to the stage that calls it
                return function(*given, **named)
            running.append(name)
            began = time.process_time()
            try:
                return function(*given, **named)
            finally:
                spent[running.pop()] += time.process_time() - began

        return run

    with contextlib.ExitStack() as patched:
        for name, (module, function) in STAGES.items():
            patched.enter_context(patch.object(module, function, timed(name, getattr(module, function))))
        began = time.process_time()
        attnscope.heads(model, texts, HeadsOptions(describe=DescribeOptions(queries=queries)))
        total = time.process_time() - began
    seconds = {**spent, "rest": total - sum(spent.values()), "all": total}
    forward_s = forward_seconds(model, read_sample(model, texts, DescribeOptions(queries=queries))[0])
    return {
        "cpu_s": {name: round(of, 2) for name, of in seconds.items()},
        "over_forward": {name: round(of / forward_s, 2) for name, of in seconds.items()},
        "forward_40k_cpu_s": round(forward_s, 2),
    }


def attention_of(
    group: HeadGroup, scores: np.ndarray, sharpness: np.ndarray, noise: np.ndarray
) -> np.ndarray:
    """The attention of heads off the sinks, (head, entry), whose scores are a rule's and noise, as sharp as asked.

    Args:
        group: The rows.
        scores: (head, entry), what each rule says.
        sharpness: (head,), KL to uniform as a share of ln n.
        noise: (head, entry).
    """
    first, lengths = group.active_rows.starts[:-1], np.diff(group.active_rows.starts)
    made = np.empty(scores.shape, np.float32)
    for head in range(len(scores)):
        low, high = 0.0, 14.0
        for _ in range(12):
            middle = (low + high) / 2
            raised = np.exp(np.clip(middle * scores[head] + noise[head], -60, 60))
            made[head] = raised / np.repeat(np.add.reduceat(raised, first), lengths)
            nats = np.log(lengths) + np.add.reduceat(
                made[head] * np.log(np.maximum(made[head], 1e-30)), first
            )
            low, high = (
                (middle, high)
                if float((nats / np.log(lengths)).mean()) < sharpness[head]
                else (low, middle)
            )
    return made


def planted(model: Model, texts: Corpus, queries: int, seeds: int) -> dict[str, Any]:
    """Heads that attend to 20 random tokens, from one class to another, or by both rules: whether those come first."""
    right: dict[str, list[float]] = {"tokens": [], "class_to_class": [], "two_rules": []}
    for seed in range(100, 100 + seeds):
        sample, (group, *_) = sampled(model, texts, queries, seed)
        drawn, rows = np.random.default_rng(seed), group.active_rows
        assert rows.key_types is not None and rows.query_types is not None
        queries_of = np.repeat(rows.query_types, np.diff(rows.starts))
        common = np.argsort(-np.bincount(rows.key_types, minlength=len(group.types.ids)))[:200]
        words = [label.lower() for label in group.types.labels]
        classes = [np.flatnonzero(np.isin(words, list(of))) for of in CLOSED_CLASSES.values()]
        classes.append(
            np.array([n for n, word in enumerate(words) if not any(c.isalnum() for c in word)])
        )
        rules: list[tuple[str, list[np.ndarray]]] = []
        for n in range(30):
            rule = np.isin(rows.key_types, drawn.choice(common, 20, replace=False))
            source, target = drawn.choice(len(classes), 2, replace=False)
            between = np.isin(rows.key_types, classes[target]) & np.isin(queries_of, classes[source])
            kind = ("tokens", "class_to_class", "two_rules")[n % 3]
            rules.append(
                (
                    kind,
                    {"tokens": [rule], "class_to_class": [between], "two_rules": [rule, between]}[kind],
                )
            )
        scores = np.stack([np.sum(of_head, 0, dtype=np.float64) for _, of_head in rules])
        noise = drawn.normal(size=scores.shape) * drawn.uniform(0.1, 0.8, (len(rules), 1))
        weights = attention_of(group, scores, drawn.uniform(0.15, 0.4, len(rules)), noise)
        made = replace(
            group,
            heads=tuple((0, head) for head in range(len(rules))),
            active_rows=replace(rows, attention=weights),
            sink_rows=replace(
                group.sink_rows, attention=np.repeat(group.sink_rows.attention[:1], len(rules), 0)
            ),
        )
        fit = fit_group(made, sample, DescribeOptions(queries=queries))
        part = fit.group.ordinary_rows(range(len(sample)))
        for head, (kind, of_head) in enumerate(rules):
            terms = fit.active_descriptions[head].terms[: len(of_head)]
            truths = [rule[part.entries] for rule in of_head]
            values = [part.by_entry(f, head) for f in terms]
            fits = [
                max((float(np.corrcoef(truth, of)[0, 1]) for of in values), default=0.0)
                for truth in truths
            ]
            right[kind].append(float(min(fits) >= PLANTED))
    return {kind: round(float(np.mean(of)), 3) for kind, of in right.items() if of} | {
        "heads": 30 * seeds
    }


SCALES = (0.7, 1.0, 1.2)
"""Of queries and keys, times what makes random heads 1 to 2 nats sharp."""


def random(model: Model, texts: Corpus, queries: int, seeds: int) -> dict[str, Any]:
    """What is explained where there is nothing to explain: by scale, of the heads that are 0.1 nats sharp or more."""
    by_scale = {}
    for scale in SCALES:
        described = [
            one for seed in range(seeds) for one in describe_random(model, texts, queries, seed, scale)
        ]
        kept = [one for one in described if one["whole_nats"] >= 0.1]
        own = [
            explained_by(one, "kl_explained")
            for one in kept
            if any(term["own"] for term in one["terms"])
        ]
        explained = np.array([explained_by(one, "whole_explained") for one in kept])
        by_scale[str(scale)] = {
            "heads": len(kept),
            "nats": round(float(np.mean([one["whole_nats"] for one in kept])), 2),
            "explained_mean": round(float(explained.mean()), 3),
            "explained_largest": round(float(explained.max()), 3),
            "with_own_terms_largest": round(float(np.max(own, initial=0.0)), 3),
            "low_end_above_0": round(
                float(np.mean([one["whole_explained"].low > 0 for one in kept])), 3
            ),
        }
        print(json.dumps({"scale": scale, **by_scale[str(scale)]}), flush=True)
    return by_scale


def make_random(model: Model, seed: int, scale: float) -> Model:
    """Return the architecture with random weights, queries and keys scaled."""
    untrained = model.untrained(seed)
    factor = scale * (4.2 if untrained.info.kinds[0] == "encoder" else 2.7)
    with torch.no_grad():
        for block in untrained.blocks().values():
            for name, weights in block.named_parameters():
                if name.endswith(("q_proj.weight", "k_proj.weight")):
                    weights *= factor
    return untrained


def describe_random(
    model: Model, texts: Corpus, queries: int, seed: int, scale: float
) -> list[HeadLine]:
    """Return the descriptions of its heads."""
    return lines_of(make_random(model, seed, scale), texts, min(queries, 800))


def lines_of(model: Model, texts: Corpus, queries: int) -> list[HeadLine]:
    """Return the descriptions of a model's heads."""
    sample, groups = sampled(model, texts, queries)
    options = DescribeOptions(queries=queries)
    return [
        line for group in groups for line in describe_fitted(fit_group(group, sample, options), sample)
    ]


def growth(model: Model, texts: Corpus, queries: int) -> dict[str, Any]:
    medians = {}
    for n in (queries // 2, queries):
        shares = [explained_by(line, "whole_explained") for line in lines_of(model, texts, n)]
        medians[str(n)] = round(float(np.nanmedian(shares)), 3)
    return medians


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--file", default=str(ROOT / "sample_texts" / "alice.txt"))
    parser.add_argument("--parts", default="quality,stages,planted,random,growth")
    parser.add_argument("--queries", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model, texts = attnscope.load(given.model), Corpus([given.file], split="paragraph")
    parts = given.parts.split(",")
    found: dict[str, Any] = {"benchmark": "descriptions", "model": model.info.name}
    if "quality" in parts:
        found["quality"] = quality(model, texts, given.queries)
    if "stages" in parts:
        found["stages"] = stages(model, texts, given.queries)
    if "planted" in parts:
        found["planted"] = planted(model, texts, given.queries, given.seeds)
    if "random" in parts:
        found["random"] = random(model, texts, given.queries, given.seeds)
    if "growth" in parts:
        found["growth"] = growth(model, texts, given.queries)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
