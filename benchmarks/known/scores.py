"""How right what a tool says is: each score with its source, and an interval over models."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import rankdata

from benchmarks.known.tools import Answer, Floats, Pattern, Tool, allowed
from benchmarks.known.truth import Flags, KnownModel, Place, Rule, Text, Truth

ALIKE = 0.8
"""What is named is the rule where both agree by this on the rows of which the rule speaks (Ruzicka 1958)."""

MOST = 0.9
"""Keys that hold most of a row are the fewest that hold this share of it, ties included."""

ENOUGH = 0.9
"""What is explained of a head if its line is right, whatever its words."""

PAIRS, LOW = 40, 0.1
"""Pairs of either kind for the one-at-a-time score; a low pair is below this part of the largest weight."""

SCORES: dict[str, str] = {
    "first": "among the heads whose rule the tool has a name for, the share for which it names that rule first "
    "(not counting sinks)",
    "named": "among the rules that the tool has a name for, the share that its description contains",
    "precise": "among the heads that the tool describes, the share for which its first name, sinks apart, is true of"
    " the head",
    "silent": "among the heads whose rule the tool has no name for, the share on which it says nothing, or names "
    "only a sink",
    "right_or_silent": "as *silent*, or the words of the tool predict the attention (explained is 0.9 or more)",
    "explained": "1 - KL(attention || prediction) / KL(attention || even) on held-out texts "
    "([descriptions](heads.md#one-line-per-head))",
    "iou": "intersection over union of two sets of keys: those that hold 90% of a row, and those that the tool "
    "expects to hold it (Hayes et al. 2026, arXiv 2606.19317; the share is ours)",
    "auc": "the area under the ROC curve if the tool's predicted weight separates the head's 40 strongest pairs "
    "of tokens from 40 random weak ones. OpenAI's Transformer Debugger has such a one-at-a-time scorer, "
    "with 5 pairs",
    "role_recall": "among the true roles that the tool has a name for, the share that it assigns",
    "role_precision": "among the roles that the tool assigns, the share that are true of the head",
}
"""What each score is, and its source."""


@dataclass(frozen=True)
class HeadScore:
    """The scores of one head by one tool; NaN = the score is not about this head."""

    model: str
    place: Place
    part: str
    rule: str
    line: str
    values: Mapping[str, float]


def agreement(rule: Rule, pattern: Pattern, known: KnownModel, texts: Sequence[Text]) -> float:
    """Return how much of a rule and a pattern is the same, on rows of which the rule speaks: sum of minima over maxima.

    The first token is left out, as it is the sink's.
    """
    shared = either = 0.0
    for text in texts:
        seen = allowed(text, known.causal)
        seen[:, 0] = False
        named = rule.keys(text) & seen
        rows = named.any(1) & (seen.sum(1) > 1)
        values = np.asarray(pattern(text), np.float64) * seen
        shared += float(np.minimum(named, values)[rows].sum())
        either += float(np.maximum(named, values)[rows].sum())
    return shared / either if either else 0.0


def is_sink(truth: Truth) -> bool:
    """Return whether a head's only rule is to rest."""
    return all(rule.name == "sink" for rule in truth.rules)


ROLE_OF = {
    "the previous token": "previous_token",
    "the next token": "next_token",
    "the token itself": "self_token",
    "the same token elsewhere": "same_token",
    "what followed the same token before": "induction",
    "the first token": "first_token",
    "punctuation": "delimiter",
}
"""Roles that follow from a rule, by its words."""

ALSO = {
    "the previous token": {"local"},
    "the next token": {"local"},
    "the token itself": {"local"},
    "the token 2 before": {"local"},
    "the token 2 after": {"local"},
    "the token 3 before": {"local"},
    "the token 3 after": {"local"},
    "commas": {"delimiter"},
    "brackets": {"delimiter"},
    "the last punctuation mark": {"delimiter", "local"},
    "the same token elsewhere": {"similar_token"},
    "the bracket that a closing one closes": {"delimiter"},
    "punctuation": {"delimiter"},
    "the same token": {"same_token", "self_token", "similar_token"},
}
"""Further roles that a rule allows: what it attends to is that, too."""


def roles_of(truth: Truth) -> tuple[set[str], set[str]]:
    """Roles that a head must have, and those that it may have.

    A head of two rules may have the roles of both, as neither need reach a threshold; so may one that rests.
    """
    named = {ROLE_OF[rule.words] for rule in truth.rules if rule.words in ROLE_OF}
    may = named.union(*(ALSO.get(rule.words.partition(" from ")[0], set()) for rule in truth.rules))
    may |= {"first_token", "diffuse", "outlier_token"} if truth.rests else {"diffuse"}
    return (named if len(truth.rules) == 1 else set()), may


def score_tool(
    tool: Tool, known: KnownModel, attention: Sequence[Floats], held_out: Sequence[Floats], seed: int
) -> list[HeadScore]:
    """Return what a tool says of every known head of a model, scored on texts that it did not see."""
    answers, vocabulary = tool.answer(known, attention), tool.vocabulary(known)
    cached: dict[str, bool] = {}

    def has_name(rule: Rule) -> bool:
        if rule.words not in cached:
            texts = known.held_out[:6]
            cached[rule.words] = any(
                agreement(rule, pattern, known, texts) >= ALIKE for pattern in vocabulary
            )
        return cached[rule.words]

    made = []
    for place, truth in known.heads.items():
        answer = answers[place]
        values = {
            **_names(answer, truth, known, has_name),
            **_predicts(answer, place, known, held_out, seed),
            **_roles(answer, truth, tool),
        }
        values["right_or_silent"] = math.nan
        if not math.isnan(values["silent"]):
            values["right_or_silent"] = float(values["silent"] or values["explained"] >= ENOUGH)
        words = " and ".join(rule.words for rule in truth.rules) or "nothing but a sink"
        made.append(HeadScore(known.name, place, truth.part, words, answer.line, values))
    return made


def _names(answer: Answer, truth: Truth, known: KnownModel, has_name: Any) -> dict[str, float]:
    values = dict.fromkeys(("first", "named", "precise", "silent"), math.nan)
    said = bool(answer.terms or answer.rests) and not answer.undescribed
    if is_sink(truth):
        # A sink is right where a sink is named before, or without, anything else.
        values["first"] = values["named"] = float(answer.rests)
        if said:
            values["precise"] = float(answer.rests)
        return values
    fits = [
        max((agreement(rule, term, known, known.held_out) for term in answer.terms), default=0.0)
        for rule in truth.rules
    ]
    first = 0.0
    if answer.terms:
        first = max(agreement(rule, answer.terms[0], known, known.held_out) for rule in truth.rules)
    asked = [fit for fit, rule in zip(fits, truth.rules, strict=True) if has_name(rule)]
    if asked:
        values["first"] = float(first >= ALIKE)
        values["named"] = float(np.mean([fit >= ALIKE for fit in asked]))
    else:
        values["silent"] = float(not said or not answer.terms)
    if said and answer.terms:
        values["precise"] = float(first >= ALIKE)
    return values


def _predicts(
    answer: Answer, place: Place, known: KnownModel, held_out: Sequence[Floats], seed: int
) -> dict[str, float]:
    left, nats, overlaps = 0.0, 0.0, []
    strong: list[tuple[float, float]] = []
    for text, weights in zip(known.held_out, held_out, strict=True):
        seen = allowed(text, known.causal)
        rows = seen.sum(1) > 1
        even = seen / seen.sum(1, keepdims=True)
        a = weights[place]
        p = np.maximum(even if answer.predict is None else answer.predict(text), 1e-12)
        logs = np.log(np.maximum(a, 1e-300))
        left += float((a * (logs - np.log(p)) * seen)[rows].sum())
        nats += float((a * (logs - np.log(np.where(seen, even, 1))) * seen)[rows].sum())
        held, expected = most(a[rows]), most(p[rows] * seen[rows])
        overlaps += ((held & expected).sum(1) / (held | expected).sum(1)).tolist()
        strong += list(zip(a[rows][seen[rows]].tolist(), p[rows][seen[rows]].tolist(), strict=True))
    pairs = np.array(strong)
    high = np.argsort(-pairs[:, 0], kind="stable")[:PAIRS]
    low = np.flatnonzero(pairs[:, 0] < LOW * pairs[:, 0].max())
    chance = np.random.default_rng([seed, *place])
    low = chance.choice(low, min(PAIRS, len(low)), replace=False) if len(low) else low
    return {
        "explained": 1 - left / nats if nats / max(len(overlaps), 1) >= 0.1 else math.nan,
        "iou": float(np.mean(overlaps)),
        "auc": roc_auc(pairs[high, 1], pairs[low, 1]),
    }


def most(rows: Floats) -> Flags:
    """Return the fewest keys of each row that hold MOST of it; a key as heavy as the last of these is one, too."""
    order = -np.sort(-rows, 1)
    needed = (order.cumsum(1) < MOST * rows.sum(1, keepdims=True) - 1e-9).sum(1, keepdims=True)
    least = np.take_along_axis(order, np.minimum(needed, rows.shape[1] - 1), 1)
    flags: Flags = rows >= least - 1e-6
    return flags & (rows > 0)


def roc_auc(high: Floats, low: Floats) -> float:
    """Return the chance that a high pair scores above a low one; ties count half."""
    if not len(high) or not len(low):
        return math.nan
    ranks = rankdata(np.concatenate([high, low]))
    return float((ranks[: len(high)].sum() - len(high) * (len(high) + 1) / 2) / (len(high) * len(low)))


def _roles(answer: Answer, truth: Truth, tool: Tool) -> dict[str, float]:
    must, may = roles_of(truth)
    must &= tool.roles
    given = answer.roles & tool.roles
    return {
        "role_recall": float(np.mean([role in given for role in must])) if must else math.nan,
        "role_precision": float(np.mean([role in may for role in given])) if given else math.nan,
    }


def summarize(scores: Sequence[HeadScore], seed: int, draws: int = 400) -> dict[str, dict[str, Any]]:
    """Return the mean of each score with its 95% interval, from a bootstrap that draws whole models (Efron 1979)."""
    made: dict[str, dict[str, Any]] = {}
    models = list(dict.fromkeys(score.model for score in scores))
    for name in SCORES:
        sums = np.zeros((len(models), 2))
        for score in scores:
            if not math.isnan(value := score.values[name]):
                sums[models.index(score.model)] += value, 1
        if not sums[:, 1].sum():
            continue
        chance = np.random.default_rng(seed)
        drawn = sums[chance.integers(len(models), size=(draws, len(models)))].sum(1)
        means = drawn[:, 0] / np.maximum(drawn[:, 1], 1)
        low, high = np.quantile(means[drawn[:, 1] > 0], (0.025, 0.975))
        value = sums[:, 0].sum() / sums[:, 1].sum()
        made[name] = {
            "value": round(float(value), 3),
            "low": round(float(low), 3),
            "high": round(float(high), 3),
            "n": int(sums[:, 1].sum()),
        }
    return made
