"""How often 95% intervals hold: drawn again and again from real texts, head by head.

- collect: the numbers of each text, from a model: what each measure of each head adds up, and what the line of each
  head leaves of its attention outside sinks, on texts that it was not fitted on. They are kept in a file.
- simulate: draws n of these texts with replacement, many times, and counts how often the interval contains the value
  over all of them. Student's t is beside it. Loads no torch.

A coverage of 90% that is counted in N draws has a standard error of √(0.09 / N): 1.5 points for 400 draws. The worst of
thousands of cells lies up to four of these below its own coverage.

The last line is JSON.

usage: python -m benchmarks.intervals [--model minilm] [--file LINES] [--texts 300] [--draws 400] [--queries 2000]
       [--sizes 5,10,20,40,80] [--numbers FILE.npz: read if it is there, else written]
"""

import argparse
import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from attnscope.core.intervals import mean_interval, predicted_interval
from attnscope.core.sums import RunningSums
from attnscope.questions.head_lines import MAX_INTERVAL_WIDTH, MIN_NATS_TO_EXPLAIN
from attnscope.studies.heads.measure_intervals import MIN_ACTIVE_SHARE, measure_intervals

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

SAMPLES = Path(__file__).resolve().parents[1] / "sample_texts"

DRAWS_AT_ONCE = 50
"""For SmolLM2's heads and measures, these take 500 MB."""

ROUNDING = 1e-9


# Numbers of each text -------------------------------------------------------------------------------------------


def sentences() -> list[str]:
    """Return about 400 sentences, of a novel and of other prose."""
    from attnscope.annotated import AnnotatedCorpus

    prose = " ".join((SAMPLES / "alice.txt").read_text("utf-8").split())
    parts = [part for part in re.split(r"(?<=[.!?;])['’\"”]* ", prose) if len(part.split()) > 3]
    parts += [text.text for text in AnnotatedCorpus([SAMPLES / "dependencies.conllu"])]
    parts += (SAMPLES / "sentences.txt").read_text("utf-8").splitlines()
    return parts


def collect(spec: str, texts: Sequence[str], queries: int) -> dict[str, Any]:
    """Return the numbers of each text: what `measures_of` and `read_lines` return, by name."""
    import torch

    import attnscope

    torch.set_num_threads(1)
    model = attnscope.load(spec)
    return {**measures_of(model, texts), **lines_of(model, texts, queries)}


def measures_of(model: Any, texts: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Return `sum`, `count` and `uniform_sum`, (text, layer, head, measure), `weights`, (text,), and `names`."""
    import attnscope
    from attnscope.core.catalogue import measure_names
    from attnscope.studies.heads import measuring
    from attnscope.studies.heads.measuring import weigh_units

    weights: list[Floats] = []
    batches: list[Mapping[str, Floats]] = []

    def keep(of_batch: Floats, sums: Mapping[str, Floats]) -> dict[str, Floats]:
        weights.append(of_batch)
        batches.append(weigh_units(of_batch, sums))
        return dict(batches[-1])

    with patch.object(measuring, "weigh_units", keep):
        attnscope.heads(model, list(texts))
    parts = ("sum", "count", "uniform_sum")
    numbers: dict[str, NDArray[Any]] = {
        name: np.concatenate([sums[name] for sums in batches]) for name in parts
    }
    numbers["weights"] = np.concatenate(weights)
    numbers["names"] = np.array(measure_names())
    return numbers


def lines_of(model: Any, texts: Sequence[str], queries: int) -> dict[str, NDArray[Any]]:
    """Return `loss`, `nats` and `mass`, (held-out text, head), of attention outside sinks, and `heads`, (head, 2)."""
    from attnscope.core.descriptions import compute_row_losses
    from attnscope.corpus import CorpusText
    from attnscope.studies.describe import rows as sampling
    from attnscope.studies.describe.study import fit_sample
    from benchmarks.sampling import read_sample

    corpus = [CorpusText(number, "", number, text=text) for number, text in enumerate(texts)]
    options = sampling.DescribeOptions(queries=queries)
    with patch.object(sampling, "MAX_BYTES", 2**40):
        sample, counts = read_sample(model, corpus, options)
        fits = fit_sample(model, sample, counts, options)
    scored = [number for number, unit in enumerate(sample) if not unit.is_for_fitting]
    numbers: dict[str, list[Any]] = {"loss": [], "nats": [], "mass": [], "heads": []}
    for fit in fits:
        part = fit.group.ordinary_rows(scored)
        order = np.searchsorted(scored, part.texts)
        n_rows = np.maximum(np.bincount(order, minlength=len(scored)), 1)
        for head, address in enumerate(fit.group.heads):
            mass = part.mass[:, head]
            rows = {
                "loss": compute_row_losses(part, head, fit.active_descriptions[head]) * mass,
                "nats": part.uniform_nats[:, head] * mass,
                "mass": mass,
            }
            for name, values in rows.items():
                numbers[name].append(np.bincount(order, values, len(scored)) / n_rows)
            numbers["heads"].append(address)
    by_text = {name: np.array(numbers[name]).T for name in ("loss", "nats", "mass")}
    return {**by_text, "heads": np.array(numbers["heads"])}


# Simulation -----------------------------------------------------------------------------------------------------


def draws_of(n_all: int, n_texts: int, n_draws: int) -> Iterator[Floats]:
    """Return how often each text is drawn, (draw, text), some draws at a time."""
    drawn = np.random.default_rng(n_texts)
    for start in range(0, n_draws, DRAWS_AT_ONCE):
        n = min(DRAWS_AT_ONCE, n_draws - start)
        yield np.stack(
            [np.bincount(drawn.integers(0, n_all, n_texts), minlength=n_all) for _ in range(n)]
        ).astype(float)


def sums_of(times: Floats, s: Floats, c: Floats, n_texts: int) -> RunningSums:
    """Return the sums over drawn texts, (draw, *shape), from s and c, (text, *shape), each text taken so many times."""
    cells = (len(s), -1)
    has = ((s != 0) | (c != 0)).astype(float)
    n, sum_s, sum_c, ss, sc, cc = (times @ x.reshape(cells) for x in (has, s, c, s * s, s * c, c * c))
    at_least_one = np.maximum(n, 1)
    moments = [
        n,
        sum_s,
        sum_c,
        np.maximum(ss - sum_s**2 / at_least_one, 0),
        sc - sum_s * sum_c / at_least_one,
        np.maximum(cc - sum_c**2 / at_least_one, 0),
        np.zeros_like(n),
    ]
    shape = (7, len(times), *s.shape[1:])
    return RunningSums.from_moments(np.reshape(moments, shape), n_texts)


class Held:
    """Counts in how many draws there is an interval, and in how many of these it contains the value."""

    def __init__(self, true: Floats) -> None:
        self.true = true
        self.printed, self.held, self.widths = (
            np.zeros(true.shape),
            np.zeros(true.shape),
            np.zeros(true.shape),
        )

    def add(self, low: Floats, high: Floats, are_counted: Bools | bool = True) -> None:
        """Add the ends of some draws, (draw, *shape); NaN is no interval."""
        is_printed = ~np.isnan(low) & are_counted
        self.printed += is_printed.sum(0)
        self.held += (is_printed & (low <= self.true + ROUNDING) & (self.true <= high + ROUNDING)).sum(0)
        self.widths += np.where(is_printed, high - low, 0).sum(0)

    def coverage(self, n_draws: int) -> Floats:
        """Return the coverage of each cell; NaN where fewer than a quarter of the draws have an interval."""
        return np.where(self.printed >= n_draws / 4, self.held / np.maximum(self.printed, 1), np.nan)


def simulate_measures(numbers: Mapping[str, NDArray[Any]], n_texts: int, n_draws: int) -> dict[str, Any]:
    """Return the coverage of intervals of measures from so many texts."""
    s, c, even = numbers["sum"], numbers["count"], numbers["uniform_sum"]
    names = numbers["names"].tolist()
    with np.errstate(invalid="ignore", divide="ignore"):
        true = s.sum(0) / c.sum(0)
    ours, students = Held(true), Held(true)
    for times in draws_of(len(s), n_texts, n_draws):
        sums = sums_of(times, s, c, n_texts)
        uniform = sums_of(times, even, c, n_texts).ratio()
        units = n_texts / (times @ numbers["weights"])
        ours.add(*measure_intervals(sums, names, units[:, None, None, None], uniform))
        students.add(*mean_interval(sums.sample()))
    covered = ours.coverage(n_draws)
    worst = np.unravel_index(np.nanargmin(covered), covered.shape)
    widths = np.median(ours.widths / np.maximum(ours.printed, 1), (0, 1))
    return {
        "cells": int(np.isfinite(covered).sum()),
        "below_0.9": int((covered < 0.9).sum()),
        "worst": round(float(covered[worst]), 3),
        "worst_cell": f"{names[worst[2]]} of L{worst[0]}H{worst[1]}",
        "median": round(float(np.nanmedian(covered)), 3),
        "student_below_0.9": int((students.coverage(n_draws) < 0.9).sum()),
        "student_worst": round(float(np.nanmin(students.coverage(n_draws))), 3),
        "worst_by_measure": {
            name: round(float(np.nanmin(covered[..., column])), 3)
            for column, name in enumerate(names)
            if np.isfinite(covered[..., column]).any()
        },
        "median_width": {name: round(float(widths[column]), 3) for column, name in enumerate(names)},
    }


def simulate_lines(numbers: Mapping[str, NDArray[Any]], n_texts: int, n_draws: int) -> dict[str, Any]:
    """Return the coverage of *predicted* from so many held-out texts, and how many heads get an interval that tells."""
    loss, nats, mass = (numbers[name] for name in ("loss", "nats", "mass"))
    true = 1 - loss.sum(0) / nats.sum(0)
    every, sure, students = Held(true), Held(true), Held(true)
    for times in draws_of(len(loss), n_texts, n_draws):
        sample = sums_of(times, loss, nats, n_texts).sample()
        low, high = predicted_interval(sample, times @ mass / n_texts, n_texts)
        every.add(low, high)
        sure.add(low, high, high - np.maximum(low, 0) <= MAX_INTERVAL_WIDTH)
        least, most = mean_interval(sample)
        students.add(1 - most, 1 - least)
    is_told = nats.mean(0) >= MIN_NATS_TO_EXPLAIN * mass.mean(0)
    covered, covered_sure = (np.where(is_told, each.coverage(n_draws), np.nan) for each in (every, sure))
    worst = int(np.nanargmin(covered))
    is_active = (mass.mean(0) >= MIN_ACTIVE_SHARE) & is_told
    return {
        "heads": int(is_told.sum()),
        "with_interval": int(np.isfinite(covered).sum()),
        "below_0.9": int((covered < 0.9).sum()),
        "worst": round(float(covered[worst]), 3),
        "worst_head": "L{}H{}".format(*numbers["heads"][worst]),
        "worst_without_warning": round(float(np.nanmin(covered_sure, initial=1.0)), 3),
        "student_worst": round(
            float(np.nanmin(np.where(is_told, students.coverage(n_draws), np.nan))), 3
        ),
        "student_below_0.9": int((np.where(is_told, students.coverage(n_draws), np.nan) < 0.9).sum()),
        "active_heads": int(is_active.sum()),
        "active_heads_without_warning": round(float((sure.printed[is_active] >= n_draws / 2).mean()), 3),
        "median_width": round(
            float(np.median(every.widths[is_active] / np.maximum(every.printed[is_active], 1))), 3
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--file", help="one text a line; default: sentences of sample_texts")
    parser.add_argument("--texts", type=int, default=300, help="how many, drawn at random")
    parser.add_argument(
        "--queries", type=int, default=2000, help="that lines are fitted to and scored on"
    )
    parser.add_argument("--draws", type=int, default=400)
    parser.add_argument("--sizes", default="5,10,20,40,80")
    parser.add_argument("--numbers", type=Path)
    given = parser.parse_args()
    path = given.numbers or Path(tempfile.mkdtemp(prefix="attnscope-intervals-")) / "numbers.npz"
    if not path.exists():
        texts = Path(given.file).read_text("utf-8").splitlines() if given.file else sentences()
        texts = list(dict.fromkeys(text for text in texts if text.strip()))
        chosen = np.sort(np.random.default_rng(0).permutation(len(texts))[: given.texts])
        np.savez(path, **collect(given.model, [texts[number] for number in chosen], given.queries))
        print(f"wrote {path}", flush=True)
    numbers = dict(np.load(path))
    result: dict[str, Any] = {
        "benchmark": "intervals",
        "model": given.model,
        "texts": len(numbers["sum"]),
    }
    result |= {"held_out": len(numbers["loss"]), "draws": given.draws}
    for n_texts in map(int, given.sizes.split(",")):
        measures = simulate_measures(numbers, n_texts, given.draws)
        lines = simulate_lines(numbers, n_texts, given.draws)
        result[str(n_texts)] = {"measures": measures, "predicted": lines}
        print(
            n_texts,
            json.dumps({name: measures[name] for name in ("worst", "worst_cell", "below_0.9")}),
            lines,
            flush=True,
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
