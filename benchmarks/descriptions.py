"""How good descriptions of heads are, and what they cost: on a real model, on planted rules, and where there are none.

- quality: each half of the sampled texts is fitted and the other scored, both ways; how often both come to the same
  first term; processor time to fit against a plain forward over 40,000 tokens.
- planted: attention that follows one rule, or two, over the model's own tokens, sharp or not, with noise.
- random: the model's architecture with random weights, queries and keys scaled so that heads are 0.5 to 2 nats sharp.
- treebank: with the links of annotated texts and without, if a file is given.
- transfer: what is fitted on a half of the texts, scored on the other half and on the documents of a treebank.
- growth: explained shares with the sample doubled.

The last line is JSON.

usage: python -m benchmarks.descriptions [--model minilm] [--file sample_texts/alice.txt] [--treebank FILE]
       [--parts quality,planted,random,growth,treebank,transfer] [--queries 2000] [--seeds 3]
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import attnscope
from attnscope.core.attention.seam import attend
from attnscope.core.questions.descriptions import describe, refit, score
from attnscope.core.questions.sampled_rows import Part, Rows
from attnscope.corpus import Copies, Corpus, CorpusText, count_tokens, distinct
from attnscope.models.model import Batch, Model
from attnscope.studies.describe.rows import Group, Unit, measure
from attnscope.studies.describe.study import DescribeOptions, _bases, _distinct, draw
from attnscope.studies.inputs.texts import special_ids
from attnscope.studies.measuring.head_blocks import Frequencies

ROOT = Path(__file__).resolve().parents[1]
FORWARD_TOKENS = 40_000
RULES = (
    "self", "offset-1", "offset+1", "offset-2", "offset+2", "offset-3", "special:[CLS]", "special:[SEP]", "punctuation",
    "comma", "same", "same_elsewhere", "sentence", "clause", "word", "induction", "last_punctuation",
    "next_punctuation", "infrequent", "capital", "within", "left",
)  # fmt: skip


def sampled(
    model: Model, texts: Corpus | list[CorpusText], queries: int, seed: int = 0
) -> tuple[list[Unit], list[Group]]:
    counts = count_tokens(distinct(texts, Copies()), model.tokenizer.encode, special_ids(model))
    sample = draw(model, texts, DescribeOptions(queries=queries, seed=seed))
    return sample, measure(model, sample, Frequencies.of_counts(counts))


def halves(sample: list[Unit], rows: Rows) -> tuple[Part, Part]:
    numbers = range(len(sample))
    one, other = (rows.of_texts([i for i in numbers if sample[i].fits == fits]) for fits in (True, False))
    return one, other


def find(group: Group, part: Part, heads: list[int] | None = None) -> list[Any]:
    ranks = [feature.rank for feature in group.features]
    return describe(part, ranks, heads, candidates=_distinct(group), needs=_bases(group.features))


def quality(model: Model, texts: Corpus, queries: int) -> dict[str, Any]:
    began = time.process_time()
    sample, groups = sampled(model, texts, queries)
    read_s, fit_s, explained, nats, agree = time.process_time() - began, 0.0, [], [], []
    for group in groups:
        parts = halves(sample, group.rows)
        ways = []
        for fitted, scored in (parts, parts[::-1]):
            began = time.process_time()
            found = find(group, fitted)
            fit_s += time.process_time() - began
            ways.append([score(scored, head, one)[0] for head, one in enumerate(found)])
            agree.append([one.terms[:1] for one in found])
        explained.append([[one.explained for one in way] for way in ways])
        nats.append([[one.nats for one in way] for way in ways])
    shares, from_uniform = np.concatenate(explained, 1), np.concatenate(nats, 1)
    pairs = [
        a == b
        for first, second in zip(agree[::2], agree[1::2], strict=True)
        for a, b in zip(first, second, strict=True)
    ]
    ids = torch.from_numpy(np.concatenate([unit.chunk.tokens.ids for unit in sample]))
    ids = ids.repeat(-(-FORWARD_TOKENS // len(ids)))[: FORWARD_TOKENS // 128 * 128].view(-1, 128)
    began = time.process_time()
    with torch.no_grad():
        for batch in ids.split(8):
            model.run(Batch(batch), attend)
    forward_s = time.process_time() - began
    sharp = [way[of > 0.5] for way, of in zip(shares, from_uniform, strict=True)]
    return {
        "texts": len(sample),
        "queries": sum(len(unit.queries) for unit in sample),
        "heads": shares.shape[1],
        "median": round(float(np.mean(np.median(shares, 1))), 3),
        "over_half": round(float((shares > 0.5).mean()), 3),
        "over_half_of_sharp": round(float(np.mean([(way > 0.5).mean() for way in sharp])), 3),
        "agree_on_first": round(float(np.mean(pairs)), 3),
        "read_cpu_s": round(read_s, 2),
        "fit_one_way_cpu_s": round(fit_s / 2, 2),
        "forward_40k_cpu_s": round(forward_s, 2),
        "fit_over_forward": round(fit_s / 2 / forward_s, 3),
    }


def planted_rows(group: Group, scores: np.ndarray, sharpness: np.ndarray, noise: np.ndarray) -> Rows:
    """Rows of heads whose scores are a rule's and noise, as sharp as asked where the rule can be.

    Args:
        scores: (head, entry), what each rule says.
        sharpness: (head,), KL to uniform as a share of ln n.
        noise: (head, entry).
    """
    rows = group.rows
    first, lengths = rows.starts[:-1], np.diff(rows.starts)

    def attention(head: int, factor: float) -> np.ndarray:
        raised = np.exp(np.clip(factor * scores[head] + noise[head], -60, 60))
        return raised / np.repeat(np.add.reduceat(raised, first), lengths)

    def nats(weights: np.ndarray) -> np.ndarray:
        return np.log(lengths) + np.add.reduceat(weights * np.log(np.maximum(weights, 1e-300)), first)

    expected = np.empty((len(lengths), len(scores), len(rows.levels)), np.float32)
    entropies = np.empty((len(lengths), len(scores)))
    values = rows.features / (rows.levels[:, None] - 1).astype(np.float32)
    for head in range(len(scores)):
        low, high = 0.0, 14.0
        for _ in range(12):
            middle = (low + high) / 2
            sharp = float((nats(attention(head, middle)) / np.log(lengths)).mean())
            low, high = (middle, high) if sharp < sharpness[head] else (low, middle)
        weights = attention(head, low)
        entropies[:, head] = np.log(lengths) - nats(weights)
        expected[:, head] = np.add.reduceat(values * weights.astype(np.float32), first, axis=1).T
    return Rows(rows.features, rows.levels, rows.starts, rows.texts, expected, entropies)


def planted(model: Model, texts: Corpus, queries: int, seeds: int) -> dict[str, Any]:
    """Of heads whose rule explains more than half, how many have it first; of mixtures, how many have both."""
    single, both, near = [], [], []
    for seed in range(100, 100 + seeds):
        sample, (group, *_) = sampled(model, texts, min(queries, 800), seed)
        long = [i for i, unit in enumerate(sample) if len(unit.chunk) >= 60]
        numbers = {feature.name: number for number, feature in enumerate(group.features)}
        drawn = np.random.default_rng(seed)
        known = [numbers[name] for name in RULES if name in numbers]
        rules = [(int(f),) for f in drawn.permutation(known)]
        rules += [tuple(int(f) for f in drawn.choice(known, 2, replace=False)) for _ in range(20)]
        value = group.rows.features / (group.rows.levels[:, None] - 1)
        scores = np.stack(
            [sum(value[f] * (1 if n == 0 else drawn.uniform(0.6, 1)) for n, f in enumerate(rule)) for rule in rules]
        )
        noise = drawn.normal(size=scores.shape) * drawn.uniform(0.1, 0.8, (len(rules), 1))
        rows = planted_rows(group, scores, drawn.uniform(0.3, 0.95, len(rules)), noise)
        half = len(long) // 2
        fitted, scored = rows.of_texts(long[:half]), rows.of_texts(long[half:])
        made = Group(group.kind, tuple((0, head) for head in range(len(rules))), group.features, rows)
        for head, (rule, found) in enumerate(zip(rules, find(made, fitted), strict=True)):
            nats = float(scored.uniform_nats[head])
            alone = [1 - refit(scored, head, (f,))[1] / nats for f in rule]
            together = 1 - refit(scored, head, tuple(sorted(rule)))[1] / nats
            if len(rule) == 1 and together > 0.5:
                single.append(found.terms[:1] == rule)
                if not single[-1]:
                    near.append((group.features[rule[0]].name, [group.features[f].name for f in found.terms]))
            if len(rule) == 2 and together > 0.5 and together - max(alone) > 0.1:
                both.append(set(rule) <= set(found.terms))
                if not both[-1]:
                    near.append(tuple([group.features[f].name for f in of] for of in (rule, found.terms)))
    for one in near:
        print("missed:", *one)
    return {
        "single": len(single), "single_first": round(float(np.mean(single)), 3),
        "mixtures": len(both), "mixtures_both": round(float(np.mean(both)), 3),
    }  # fmt: skip


SCALES = (0.7, 1.0, 1.2)
"""Of queries and keys, times what makes random heads 1 to 2 nats sharp."""


def random(model: Model, texts: Corpus, queries: int, seeds: int) -> dict[str, Any]:
    """What is explained where there is nothing to explain: by scale, of the heads that are 0.1 nats sharp or more."""
    by_scale = {}
    for scale in SCALES:
        described = [one for seed in range(seeds) for one in describe_random(model, texts, queries, seed, scale)]
        kept = [one for one in described if one.nats >= 0.1]
        explained = np.array([one.explained for one in kept])
        by_scale[str(scale)] = {
            "heads": len(kept), "nats": round(float(np.mean([one.nats for one in kept])), 2),
            "explained_mean": round(float(explained.mean()), 3), "explained_largest": round(float(explained.max()), 3),
            "low_end_above_0": round(float(np.mean([one.low > 0 for one in kept])), 3),
        }  # fmt: skip
        print(json.dumps({"scale": scale, **by_scale[str(scale)]}), flush=True)
    return by_scale


def describe_random(model: Model, texts: Corpus, queries: int, seed: int, scale: float) -> tuple[Any, ...]:
    """The descriptions of the heads of the architecture with random weights, queries and keys scaled."""
    untrained = model.untrained(seed)
    factor = scale * (4.2 if untrained.info.kinds[0] == "encoder" else 2.7)
    with torch.no_grad():
        for block in untrained.blocks().values():
            for name, weights in block.named_parameters():
                if name.endswith(("q_proj.weight", "k_proj.weight")):
                    weights *= factor
    heads: tuple[Any, ...] = attnscope.describe(
        untrained, texts, options=DescribeOptions(queries=min(queries, 800))
    ).heads
    return heads


def growth(model: Model, texts: Corpus, queries: int) -> dict[str, Any]:
    found = {
        n: attnscope.describe(model, texts, options=DescribeOptions(queries=n)).heads for n in (queries // 2, queries)
    }
    shares = {n: [one.explained for one in heads] for n, heads in found.items()}
    return {str(n): round(float(np.nanmedian(of)), 3) for n, of in shares.items()}


def treebank(model: Model, path: str, queries: int) -> dict[str, Any]:
    corpus = attnscope.AnnotatedCorpus([path])
    options = DescribeOptions(queries=queries)
    with_links = attnscope.describe(model, corpus, options=options)
    without = attnscope.describe(model, [text.text for text in corpus], options=options)
    gains = [a.explained - b.explained for a, b in zip(with_links.heads, without.heads, strict=True)]
    by_links = [any(term.feature.startswith("arc:") for term in one.terms) for one in with_links.heads]
    return {
        "with_links": round(float(np.nanmean([one.explained for one in with_links.heads])), 3),
        "without": round(float(np.nanmean([one.explained for one in without.heads])), 3),
        "largest_gain": round(float(np.nanmax(gains)), 3), "heads_with_links": sum(by_links),
    }  # fmt: skip


def transfer(model: Model, texts: Corpus, path: str, queries: int) -> dict[str, Any]:
    documents = [one.text for one in attnscope.AnnotatedCorpus([path], unit="document")]
    other = [CorpusText(n, path, 1, text=text) for n, text in enumerate(documents)]
    (sample, groups), (sample_there, groups_there) = sampled(model, texts, queries), sampled(model, other, queries)
    here, there, nats = [], [], []
    for group, group_there in zip(groups, groups_there, strict=True):
        assert [one.name for one in group.features] == [one.name for one in group_there.features]
        fitted, scored = halves(sample, group.rows)
        elsewhere = group_there.rows.of_texts(range(len(sample_there)))
        for head, one in enumerate(find(group, fitted)):
            own, its = score(scored, head, one)[0], score(elsewhere, head, one)[0]
            if min(own.nats, its.nats) >= 0.1:
                here.append(own.explained)
                there.append(its.explained)
                nats.append(own.nats)
    lost, sharp = np.array(here) - np.array(there), np.array(nats) > 0.5
    return {
        "n_heads": len(here), "n_texts": len(sample_there),
        "median_here": round(float(np.median(here)), 3), "median_there": round(float(np.median(there)), 3),
        "mean_lost": round(float(lost.mean()), 3), "within_0.1": round(float((np.abs(lost) <= 0.1).mean()), 3),
        "within_0.1_over_0.5_nats": round(float((np.abs(lost[sharp]) <= 0.1).mean()), 3),
        "largest_lost": round(float(lost.max()), 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--file", default=str(ROOT / "sample_texts" / "alice.txt"))
    parser.add_argument("--treebank")
    parser.add_argument("--parts", default="quality,planted,random,growth,treebank,transfer")
    parser.add_argument("--queries", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model, texts = attnscope.load(given.model), Corpus([given.file], split="paragraph")
    parts = given.parts.split(",")
    found: dict[str, Any] = {"benchmark": "descriptions", "model": model.info.name}
    if "quality" in parts:
        found["quality"] = quality(model, texts, given.queries)
    if "planted" in parts:
        found["planted"] = planted(model, texts, given.queries, given.seeds)
    if "random" in parts:
        found["random"] = random(model, texts, given.queries, given.seeds)
    if "growth" in parts:
        found["growth"] = growth(model, texts, given.queries)
    if "treebank" in parts and given.treebank:
        found["treebank"] = treebank(model, given.treebank, given.queries)
    if "transfer" in parts and given.treebank:
        found["transfer"] = transfer(model, texts, given.treebank, given.queries)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
