"""Relations of a treebank on minilm: which heads express them, and what that costs beside the plain forward.

Prints a table of the relations that a head expresses, for docs/evidence.md. Time: all relations of all texts (tokens,
alignment, forward with the probe, sums, evidence), over the plain scaled-dot-product forward over the very same
batches, round by round. The last line is JSON.

usage: python -m benchmarks.relations --conllu PATH [--runs 3] [--threads 2] [--table]
"""

import argparse
import json
import statistics
import time

import torch

import attnscope
from attnscope.annotated import AnnotatedCorpus
from attnscope.core.attention.seam import attend
from attnscope.questions.relations import Relations, describe_verdicts, name_heads
from attnscope.report.numbers import format_interval
from attnscope.report.numbers import number as written
from attnscope.studies.relations.study import relations

ASKED = ("nsubj", "obj", "det", "case", "amod", "aux", "advmod", "compound")


class Watched:
    """A model that keeps the batches that it is given, and the time that they take."""

    def __init__(self, model) -> None:
        self.model, self.info, self.tokenizer = model, model.info, model.tokenizer
        self.batches, self.seconds = [], 0.0

    def run(self, batch, probe):
        self.batches.append(batch)
        started = time.perf_counter()
        output = self.model.run(batch, probe)
        self.seconds += time.perf_counter() - started
        return output


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--conllu", required=True)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = attnscope.load("minilm")
    texts = list(AnnotatedCorpus(options.conllu))
    times: dict[str, list[float]] = {"study": [], "forward": [], "plain": []}
    for number in range(options.runs + 1):  # the first round warms up and is not counted
        watched = Watched(model)
        started = time.perf_counter()
        found = relations(watched, texts)
        study = time.perf_counter() - started
        started = time.perf_counter()
        with torch.no_grad():
            for batch in watched.batches:
                model.run(batch, attend)
        if number:
            times["study"].append(study)
            times["forward"].append(watched.seconds)
            times["plain"].append(time.perf_counter() - started)
    if options.table:
        print(markdown(found))
    margins = {}
    for label in ASKED:
        row = found.row(f"{label}→parent")
        margins[label] = round(
            float(found.at_best("accuracy")[row] - found["relations"]["baseline"][row]), 3
        )
    middle = {name: statistics.median(seconds) for name, seconds in times.items()}
    ratios = {
        f"{name}_over_plain": round(
            statistics.median(a / b for a, b in zip(times[name], times["plain"], strict=True)), 3
        )
        for name in ("study", "forward")
    }
    print(
        json.dumps(
            {
                "benchmark": "relations",
                "texts": len(texts),
                "tokens": found.corpus["n_tokens"],
                "relations": len(found["relations"]),
                "threads": options.threads,
                **{f"{name}_s": round(seconds, 3) for name, seconds in middle.items()},
                **ratios,
                "accuracy_over_best_rule": margins,
                "ten_points_or_more": sum(margin >= 0.1 for margin in margins.values()),
            },
            ensure_ascii=False,
        )
    )


def markdown(found: Relations) -> str:
    lines = [
        "| relation | head | accuracy | 95% interval | best simple rule | n | expressed |",
        "|---|---|---:|---|---|---:|---|",
    ]
    table = found.table("relations")
    heads = name_heads(found, table["best"].tolist())
    verdicts = describe_verdicts(found)
    accuracy, low, high = (found.at_best(f"accuracy{end}") for end in ("", "_low", "_high"))
    for row in found.ranked:
        name = table["relation"][row]
        if found["found"][row].any() or name.split("→")[0] in ASKED:
            rule = f"{written(table['baseline'][row])} ({table['rule'][row]})"
            lines.append(
                f"| {name} | {heads[row]} | {written(accuracy[row])} | "
                f"{format_interval(low[row], high[row])} | {rule} | {table['n_scored'][row]:,} | {verdicts[row]} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
