"""All head measures on minilm: the Sums probe against the plain forward, and against dense weights, in turn.

For texts of about 500 tokens and of about 25, in batches as a study of heads makes them: seconds of the plain
scaled-dot-product forward, of the same with every measure on (`measured`), and of its rivals: batched eager attention
with the same measures from its dense weights (`dense`), that one text at a time (`one_by_one`), and our own measures
one text at a time (`torch_one_by_one`). Of one thread the processor's time is taken, which others on the machine
disturb less. The last line is JSON.

usage: python benchmarks/measures.py [--tokens 40000] [--runs 3] [--threads 2] [--lengths 500 25]
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from attnscope.core.attention.seam import attend
from attnscope.core.attention.tiles import TileBuffers
from attnscope.core.catalogue import MEASURES
from attnscope.core.facts import TextFacts
from attnscope.core.measures import HeadMeasures
from attnscope.corpus import TOKEN_BUDGET
from attnscope.models import load
from attnscope.models.model import Batch

SAMPLE = Path(__file__).parent.parent / "sample_texts" / "alice.txt"
RIVALS = ["dense", "one_by_one", "torch_one_by_one"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=40_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[500, 25])
    parser.add_argument("--rivals", nargs="*", default=RIVALS, choices=RIVALS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load("minilm", engine="native")
    ids, punctuation = story(model, options.tokens)
    network = model._network
    table = torch.nn.functional.normalize(network.word.weight, dim=-1)
    result = {
        "benchmark": "measures",
        "tokens": options.tokens,
        "threads": options.threads,
        "measures": len(MEASURES),
    }
    for length in options.lengths:
        batches = cut(ids, punctuation, length, max(1, TOKEN_BUDGET // length), table)
        times = race(model, batches, options.runs, options.rivals)
        result[f"texts_of_{length}"] = summary(times, length)
    print(json.dumps(result))


def story(model, n_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Alice over and over, as token numbers, and which of them are punctuation."""
    pieces = [
        model.tokenizer.encode(line) for line in SAMPLE.read_text("utf-8").splitlines() if line.strip()
    ]
    ids = np.concatenate([piece.ids[~piece.special] for piece in pieces])
    labels = [
        label
        for piece in pieces
        for label, added in zip(piece.labels, piece.special, strict=True)
        if not added
    ]
    marks = np.array([not any(character.isalnum() for character in label) for label in labels])
    times = -(-n_tokens // len(ids))
    return torch.tensor(np.tile(ids, times)[:n_tokens]), torch.tensor(np.tile(marks, times)[:n_tokens])


def cut(
    ids, punctuation, length: int, per_batch: int, table: torch.Tensor
) -> list[tuple[Batch, TextFacts]]:
    """Return texts of the length, or up to a tenth shorter, [CLS] and [SEP] included, sorted by length into batches."""
    generator = torch.Generator().manual_seed(0)
    texts, start = [], 0
    while start < len(ids):
        inner = length - 2 - int(torch.randint(0, length // 10 + 1, (1,), generator=generator))
        texts.append((ids[start : start + inner], punctuation[start : start + inner]))
        start += inner
    texts.sort(key=lambda text: len(text[0]))
    counts = torch.bincount(ids, minlength=len(table)).clamp(min=1)
    log_frequency = (counts / len(ids)).log()
    made = []
    for first in range(0, len(texts), per_batch):
        group = texts[first : first + per_batch]
        n = max(len(text) for text, _ in group) + 2
        padded, marks = (
            torch.zeros(len(group), n, dtype=torch.int64),
            torch.zeros(len(group), n, dtype=torch.bool),
        )
        real = torch.zeros_like(marks)
        for row, (text, mark) in enumerate(group):
            padded[row, : len(text) + 2] = torch.cat([torch.tensor([101]), text, torch.tensor([102])])
            marks[row, 1 : len(text) + 1] = mark
            real[row, : len(text) + 2] = True
        cls, sep = padded == 101, padded == 102
        rarity = log_frequency[padded].masked_fill(~real | cls | sep, 0.0)
        facts = TextFacts(
            real=real,
            special=cls | sep,
            ids=padded,
            cls=cls,
            sep=sep,
            punctuation=marks,
            log_frequency=rarity,
            embeddings=table[padded],
            rarest=rarity == rarity.amin(1, keepdim=True),
        )
        made.append((Batch(padded, real), facts))
    return made


def race(model, batches, runs: int, others: list[str]) -> dict[str, np.ndarray]:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    buffers = TileBuffers()  # kept from batch to batch, as a study of heads keeps them

    def plain(batch: Batch, _: TextFacts) -> None:
        model.run(batch, attend)

    def measured(batch: Batch, facts: TextFacts) -> None:
        model.run(batch, HeadMeasures(facts, buffers=buffers))

    def from_weights(batch: Batch, facts: TextFacts) -> None:
        model.run(batch, Dense(facts))

    def alone(batch: Batch, facts: TextFacts, probe) -> None:
        for row in range(len(batch.ids)):
            text, n = slice(row, row + 1), int(facts.real[row].sum())
            cut_off = {
                name: tensor[text, :n]
                for name, tensor in vars(facts).items()
                if name in TextFacts.__dataclass_fields__ and tensor is not None
            }
            model.run(Batch(batch.ids[text, :n]), probe(TextFacts(**cut_off)))

    def one_by_one(batch: Batch, facts: TextFacts) -> None:
        alone(batch, facts, lambda text: Dense(text))

    def sums_one_by_one(batch: Batch, facts: TextFacts) -> None:
        alone(batch, facts, lambda text: HeadMeasures(text, buffers=buffers))

    rivals = {"plain": plain, "measured": measured}
    rivals |= {
        name: {"dense": from_weights, "one_by_one": one_by_one, "torch_one_by_one": sums_one_by_one}[
            name
        ]
        for name in others
    }
    times: dict[str, list[list[float]]] = {name: [] for name in rivals}
    with torch.no_grad():
        for batch, facts in batches[:2] + batches[-2:]:  # warms up, and is not counted
            for forward in rivals.values():
                forward(batch, facts)
    for run in range(runs):
        for name in rivals:
            times[name].append([])
        for batch, facts in batches:  # batch by batch in turn: who else uses the machine slows all alike
            for name, forward in rivals.items():
                started = clock()
                with torch.no_grad():
                    forward(batch, facts)
                times[name][run].append(clock() - started)
    return {name: np.array(elapsed) for name, elapsed in times.items()}


def summary(times: dict[str, np.ndarray], length: int) -> dict[str, float]:
    """Ratios of whole rounds, and of each batch's fastest time, which a busy machine hardly changes."""
    found = {f"{name}_s": round(float(np.median(elapsed.sum(1))), 3) for name, elapsed in times.items()}
    pairs = [("measured", "plain"), *((rival, "measured") for rival in RIVALS)]
    for name, over in pairs:
        if name in times:
            ratios = times[name].sum(1) / times[over].sum(1)
            found[f"{name}_over_{over}"] = round(float(np.median(ratios)), 3)
            fastest = times[name].min(0).sum() / times[over].min(0).sum()
            found[f"{name}_over_{over}_of_fastest"] = round(float(fastest), 3)
    print(f"texts of {length}: {found}", flush=True)
    return found


class Dense:
    """The rival: attention as transformers' eager one computes it, weights whole, and every measure from them.

    What depends on the texts alone is worked out once a batch, and everything is batched.
    """

    def __init__(self, facts: TextFacts) -> None:
        self.facts, self.shared = facts, None
        self.sums: dict[int, dict[str, torch.Tensor]] = {}

    def prepare(self) -> dict[str, torch.Tensor]:
        facts, n = self.facts, self.facts.real.shape[1]
        real = facts.real.float()
        place = torch.arange(n)
        offset = (place - place[:, None]).float()
        equal = (
            (facts.ids[:, :, None] == facts.ids[:, None]) & facts.real[:, None] & facts.real[:, :, None]
        )
        same = equal & (place != place[:, None])
        follow = torch.zeros_like(equal)
        follow[:, :, 1:] = equal[:, :, :-1]
        follow &= place < place[:, None]
        off = real * ~facts.is_sink
        columns = {
            "resting": facts.is_sink.float(),
            "first_token": facts.is_first.float(),
            "cls": facts.cls.float(),
            "sep": facts.sep.float(),
            "special": facts.special.float(),
            "punctuation": facts.punctuation.float(),
            "rarity": -facts.log_frequency * real,
        }
        pairs = {
            "previous_token": offset == -1,
            "self_token": offset == 0,
            "next_token": offset == 1,
            "window": offset.abs() <= 3,
            "distance_tokens": offset.abs(),
            "signed_distance_tokens": offset,
            "same_token": same,
            "induction": follow,
            "similar_token": facts.embeddings @ facts.embeddings.mT,
        }
        return {
            "real": real,
            "off": off,
            "bias": torch.where(facts.real, 0.0, torch.finfo(torch.float32).min)[:, None, None],
            "columns": torch.stack(list(columns.values()), -1)[:, None],
            "pairs": torch.stack([pair.float().expand(len(real), n, n) for pair in pairs.values()], -1),
            "log": real.sum(1).log()[:, None],
        }

    def __call__(self, call) -> torch.Tensor:
        if self.shared is None:
            self.shared = self.prepare()
        given, facts = self.shared, self.facts
        weights = (call.query @ call.key.mT * call.scale + given["bias"]).softmax(-1)
        output = weights @ call.value
        real, off = given["real"][:, None], given["off"][:, None]
        found: dict[str, torch.Tensor] = {}
        entropy = torch.special.entr(weights).sum(-1)
        found["entropy"] = (entropy * real).sum(-1)
        found["relative"] = (entropy * real).sum(-1) / given["log"]
        largest = weights.amax(-1)
        found["columns"] = ((weights @ given["columns"]) * real[..., None]).sum(2)
        found["active"] = ((weights * off[:, :, None]).sum(-1) * real).sum(-1)
        queries = weights * real[..., None]
        # One by one: all at once take an array of ten times the weights.
        for i, pair in enumerate(given["pairs"].unbind(-1)):
            found[f"pair {i}"] = (queries * pair[:, None]).sum((-1, -2))
            found[f"pair {i} active"] = (queries * (pair * given["off"][:, None])[:, None]).sum((-1, -2))
        hits = queries == largest[..., None]
        found["rarest"] = (hits & facts.rarest[:, None, None]).sum((-1, -2))
        self.sums[call.layer] = found
        return output


if __name__ == "__main__":
    main()
