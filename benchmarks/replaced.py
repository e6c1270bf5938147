"""What is lost with lines in the place of weights: a share of a model's heads, at random, against five controls.

- shares: a quarter, half and all of the heads, drawn at random; the rise of the loss (or the change of the hidden
  states) with their lines, their mean patterns, uniform attention, all on the first token, another head's line, and
  without the heads.
- best: the same of the quarter and the half of the heads whose lines explain most, with their lines and uniform
  attention.
- cosine: the same shares of the heads of a model without a word head; the cosine similarity of each token's last hidden
  state to that of the whole model, with --model's module from transformers.
- random: heads of the architecture with random weights, made sharp, one by one: what a line helps beside uniform
  attention (1 - line / uniform), against the share of nats that it explains.
- time: heads by themselves with their lines, against taking them out, on 8 texts of at most 64 tokens.

Lines are fitted on half of the texts, and put in place on some of the others. The last line is JSON.

usage: python -m benchmarks.replaced [--model minilm] [--file TEXTS, one a line]
       [--parts shares,best,cosine,random,time] [--texts 400] [--tried 16] [--orders 3]
       [--timed HEADS, evenly spread; all]
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import attnscope
from attnscope.corpus import CorpusText
from attnscope.models.model import Model
from attnscope.studies.ablation.effects import effects_of
from attnscope.studies.ablation.lines import Lines, apart, fit_lines
from attnscope.studies.ablation.means import heads_of, means_of
from attnscope.studies.ablation.reading import Reader
from attnscope.studies.ablation.sweep import ALL_QUANTITIES, Cut, Going, StandIns, measure
from attnscope.studies.inputs.options import LoadOptions
from benchmarks.descriptions import make_random

ROOT = Path(__file__).resolve().parents[1]
MODES = ("line", "pattern", "uniform", "sink", "other", "zero")
LEAST_CHARACTERS, MOST_CHARACTERS = 150, 400


def heads(known: StandIns) -> list[Any]:
    return [(kind, layer, head) for (kind, layer), n in known.n_heads.items() for head in range(n)]


def draw_heads(places: Sequence[Any], share: float, orders: int) -> list[tuple[Any, ...]]:
    """A share of the heads, drawn at random several times; all of them once."""
    drawn = [np.random.default_rng(seed).permutation(len(places)) for seed in range(orders if share < 1 else 1)]
    return [tuple(places[at] for at in order[: round(share * len(places))]) for order in drawn]


def shares(going: Going, known: StandIns, orders: int) -> dict[str, Any]:
    """Loss and controls, the mean over orders, with the interval of each order's own change over texts."""
    places = heads(known)
    name = "loss" if going.model.loss else "l2"
    made: dict[str, Any] = {}
    for share in (0.25, 0.5, 1.0):
        chosen = draw_heads(places, share, orders)
        cuts = [Cut(some, mode) for mode in MODES for some in chosen]  # type: ignore[arg-type]
        of_mode = dict(zip(MODES, losses(going, known, cuts, name).reshape(len(MODES), -1, 2).mean(1), strict=True))
        made[f"{share:.0%}"] = told(of_mode)
        print(f"{share:.0%}", made[f"{share:.0%}"], flush=True)
    return {"quantity": name, **made}


def losses(going: Going, known: StandIns, cuts: Sequence[Cut], name: str) -> NDArray[np.float64]:
    """What changes with each cut, and half of its interval over texts, (cut, 2)."""
    effects = effects_of(measure(going, cuts, known).done.sums)[ALL_QUANTITIES.index(name) :: len(ALL_QUANTITIES)]
    return np.array([(one.value, (one.high - one.low) / 2) for one in effects])


def told(of_mode: Mapping[str, NDArray[np.float64]]) -> dict[str, Any]:
    """The same by mode, rounded, and the line's as a share of uniform attention's."""
    named = {
        mode: dict(zip(("value", "half_width"), of.round(4).tolist(), strict=True)) for mode, of in of_mode.items()
    }
    return {**named, "of_uniform": round(float(of_mode["line"][0] / of_mode["uniform"][0]), 3)}


def best(going: Going, known: StandIns, lines: Lines) -> dict[str, Any]:
    """The same of the heads whose lines explain most."""
    name = "loss" if going.model.loss else "l2"
    explained = {
        (one.kind, one.layer, one.head): -np.nan_to_num(one.explained, nan=1) for one in lines.expectations.heads
    }
    ranked = sorted(heads(known), key=explained.__getitem__)
    made = {}
    for share in (0.25, 0.5):
        cuts = [Cut(tuple(ranked[: round(share * len(ranked))]), mode) for mode in ("line", "uniform")]  # type: ignore[arg-type]
        made[f"{share:.0%}"] = told(dict(zip(("line", "uniform"), losses(going, known, cuts, name), strict=True)))
        print("best", made, flush=True)
    return made


def cosine(path: str, fitted: Sequence[CorpusText], tried: Sequence[CorpusText], orders: int) -> dict[str, Any]:
    """Mean cosine similarity of hidden states over all tokens of the texts, by the share of heads and by mode."""
    model = attnscope.load(path, engine="hf")
    lines = fit_lines(model, fitted, tried)
    places = [(one.layer, one.head) for one in lines.expectations.heads]
    ids = [torch.from_numpy(model.tokenizer.encode(text.text or "").ids)[None] for text in tried]

    def states(heads: Sequence[tuple[int, int]], mode: Any) -> torch.Tensor:
        with attnscope.replaced(model, lines, heads=heads, by=mode) as network:
            return torch.cat([network(input_ids=of_text).last_hidden_state[0] for of_text in ids]).double()

    whole, made = states([], "line"), {}
    for share in (0.25, 0.5, 1.0):
        chosen = draw_heads(places, share, orders)
        made[f"{share:.0%}"] = {
            mode: round(
                float(np.mean([torch.cosine_similarity(states(some, mode), whole).mean() for some in chosen])), 3
            )
            for mode in ("line", "pattern", "uniform", "sink", "other")
        }
        print("cosine", share, made[f"{share:.0%}"], flush=True)
    return made


def random(model: Model, fitted: Sequence[CorpusText], tried: Sequence[CorpusText], n_heads: int) -> dict[str, Any]:
    """Causal shares of heads with random weights beside what their lines explain."""
    untrained = make_random(model, 0, 1.0)
    lines = fit_lines(untrained, fitted, tried)
    going = Going(untrained, Reader(untrained, None), tried)
    known = StandIns(heads_of(going).n_heads, lines=lines)
    chosen = heads(known)[:: max(1, len(heads(known)) // n_heads)]
    line, uniform = (
        losses(going, known, [Cut((head,), mode) for head in chosen], "l2")[:, 0]  # type: ignore[arg-type]
        for mode in ("line", "uniform")
    )
    explained = np.array([lines.expectations.explained(place[:2], place[2]) for place in chosen])
    causal = 1 - line / uniform
    return {
        "heads": len(chosen), "explained_mean": round(float(explained.mean()), 3),
        "explained_largest": round(float(explained.max()), 3), "causal_mean": round(float(causal.mean()), 3),
        "causal_largest": round(float(causal.max()), 3), "causal_above_explained": int((causal > explained).sum()),
    }  # fmt: skip


def cost(going: Going, known: StandIns, n_timed: int) -> dict[str, float]:
    """Processor time of heads by themselves."""
    made = {}
    timed = heads(known)[:: max(1, len(heads(known)) // n_timed)] if n_timed else heads(known)
    for mode in ("zero", "line", "zero", "line"):
        began = time.process_time()
        measure(going, [Cut((head,), mode) for head in timed], known)  # type: ignore[arg-type]
        made[mode] = min(made.get(mode, np.inf), time.process_time() - began)
    return {
        "n_heads": len(timed),
        **{f"{mode}_s": round(s, 2) for mode, s in made.items()},
        "ratio": round(made["line"] / made["zero"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--file", default=str(ROOT / "sample_texts" / "alice.txt"))
    parser.add_argument("--parts", default="shares,best,cosine,random,time")
    parser.add_argument("--texts", type=int, default=400)
    parser.add_argument("--tried", type=int, default=16)
    parser.add_argument("--orders", type=int, default=3)
    parser.add_argument("--timed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model: Model = LoadOptions().with_head(given.model).load(given.model)
    written = [line.strip() for line in Path(given.file).read_text("utf-8").splitlines()]
    written = [line for line in dict.fromkeys(written) if len(line) >= 20][: given.texts]
    fitted, others = apart([CorpusText(n, given.file, n + 1, text=text) for n, text in enumerate(written)], 0)
    tried = [text for text in others if LEAST_CHARACTERS < len(text.text or "") < MOST_CHARACTERS][: given.tried]
    short = [CorpusText(n, "short", n + 1, text=(text.text or "")[:220]) for n, text in enumerate(tried[:8])]
    began = time.process_time()
    lines = fit_lines(model, fitted, [*tried, *short])
    made: dict[str, Any] = {
        "benchmark": "replaced", "model": model.info.name, "n_fitted": len(fitted), "n_tried": len(tried),
        "describe_cpu_s": round(time.process_time() - began, 1),
        "explained_median": round(float(np.nanmedian([head.explained for head in lines.expectations.heads])), 3),
    }  # fmt: skip
    going = Going(model, Reader(model, model.loss), tried)
    patterns = means_of(Going(model, Reader(model, model.loss), fitted), patterns=True)[0].means
    known = StandIns(heads_of(going).n_heads, lines=lines, patterns=patterns)
    parts = given.parts.split(",")
    if "shares" in parts:
        made["shares"] = shares(going, known, given.orders)
    if "best" in parts:
        made["best"] = best(going, known, lines)
    if "cosine" in parts and not model.loss:
        made["cosine"] = cosine(given.model, fitted, tried, given.orders)
    if "random" in parts:
        made["random"] = random(model, fitted, tried, given.timed or len(heads(known)))
    if "time" in parts:
        made["time"] = cost(Going(model, Reader(model, model.loss), short), known, given.timed)
    print(json.dumps(made))


if __name__ == "__main__":
    main()
