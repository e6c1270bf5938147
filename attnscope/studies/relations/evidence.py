"""What is added up about a relation over texts, and from there to evidence: intervals, simple rules, verdicts.

A head expresses a relation where a one-sided test says that it is above the best simple rule, at a false discovery
rate of LEVEL over all heads x relations, and where the lower end of its interval is MARGIN above that rule. Its
interval is that of shares in `core.running`: few texts that all say the same do not make a head certain. The test is
that of `core.running` over texts, and beside it the binomial test over links: the larger p counts. With `share_p_above`
in its place a head of 0.9 beside a rule of 0.3, on 12 texts of 2 links, is found in 90% of samples, not in 98%.
"""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc

from attnscope.annotated import AnnotatedText, Link
from attnscope.core.exact.multiple_tests import benjamini_hochberg
from attnscope.core.sums import RunningSums
from attnscope.questions.relations import LEAST_MASS, Relations
from attnscope.results.table import Table

LEVEL = 0.05
"""The false discovery rate over heads x relations (Benjamini & Hochberg 1995)."""

MARGIN = 0.1
"""How far the lower end of a head's interval must be above the best simple rule (Voita et al. 2019, on syntax)."""

FEWEST_LINKS = 20
"""With fewer links, in both halves together, there is no verdict."""

FEWEST_TEXTS = 10
"""With fewer texts in the half that is scored there is no verdict: an interval over so few says little."""

FEWEST_SOURCES = 2
"""With fewer sources in either half, or too few texts of them to score on, texts are dealt instead."""

THRESHOLDS = {
    "level": LEVEL, "margin": MARGIN, "fewest_links": FEWEST_LINKS, "fewest_texts": FEWEST_TEXTS,
    "least_mass": LEAST_MASS,
}  # fmt: skip
"""What verdicts rest on, as records state it."""

TIED = 0.01
"""Heads whose accuracies are nearer than that are tied, however surely they differ."""

OFFSETS = tuple(offset for offset in range(-20, 21) if offset)
"""The fixed offsets, in words of the annotation, that heads are compared with."""

ALONG = tuple(range(-3, 4))
"""How many words from the diagonal of a target and its text rules look."""


def _sign_rule(name: str, number: int) -> str:
    return f"{name} {number:+d}".replace("-", "−") if number else name


RULES = (
    *(_sign_rule("offset", offset) for offset in OFFSETS), "same word before", "same word after",
    "same place", *(_sign_rule("diagonal", step) for step in ALONG), "same word",
)  # fmt: skip
"""The simple rules. Within a text: the word that many words on, and the nearest word that is written alike (case
aside). From a target to its text: the word at the same place, or that many words on; the word as far along the text
as the target's is along the target, or some words from there; and the nearest to that that is written alike."""

Floats = NDArray[np.float64]

_CHOOSING, _SCORING = 0, 1


def like_words(text: AnnotatedText) -> list[tuple[int, int]]:
    """For each word the nearest one before it and after it that is written alike, case aside; -1 = there is none."""
    last: dict[str, int] = {}
    before, after = [-1] * len(text.words), [-1] * len(text.words)
    for number in range(len(text.words)):
        spelled = text.word(number).casefold()
        if (earlier := last.get(spelled, -1)) >= 0:
            before[number], after[earlier] = earlier, number
        last[spelled] = number
    return list(zip(before, after, strict=True))


def rules_of(text: AnnotatedText, links: Mapping[str, Sequence[Link]]) -> dict[str, NDArray[np.int64]]:
    """For how many links of a text, or of a part of it, each rule is right: relation -> (rule,)."""
    if text.target is not None:
        return {relation: pair_rule_hits(group, text) for relation, group in links.items()}
    alike = like_words(text)
    return {relation: rule_hits(group, alike) for relation, group in links.items()}


def pair_rule_hits(links: Sequence[Link], text: AnnotatedText) -> NDArray[np.int64]:
    """For how many links from a target to its text each rule is right, (rule,)."""
    hits = np.zeros(len(RULES), np.int64)
    same_place, diagonal = RULES.index("same place"), RULES.index("diagonal")
    n, m = len(text.words), len(text.target_words)
    spelled = [text.word(number).casefold() for number in range(n)]
    for link in links:
        first, last = link.source[0], link.source[-1]
        # Words are as wide as each other, and the middle of one stands at the same share of its text.
        along = math.floor((first + last + 1) / 2 / m * n)
        start, stop = text.target_words[first][0], text.target_words[last][1]
        written = (text.target or "")[start:stop].casefold()
        same = [number for number, word in enumerate(spelled) if word == written]
        hits[-1] += bool(same) and min(same, key=lambda number: abs(number - along)) in link.targets
        for target in link.targets:
            distance = target - first if target < first else max(target - last, 0)
            if distance == 0:
                hits[same_place] += 1
            elif abs(distance) <= OFFSETS[-1]:
                hits[distance + OFFSETS[-1] - (distance > 0)] += 1
            if abs(target - along) <= ALONG[-1]:
                hits[diagonal + target - along] += 1
    return hits


def rule_hits(links: Sequence[Link], alike: Sequence[tuple[int, int]]) -> NDArray[np.int64]:
    """For how many links each rule is right, (rule,). From several words offsets count from the outermost one.

    `alike` is what `like_words` finds in their text.
    """
    hits = np.zeros(len(RULES), np.int64)
    before = len(OFFSETS)
    for link in links:
        first, last = link.source[0], link.source[-1]
        for target in link.targets:
            # A target between two words of the source is at no offset.
            distance = target - first if target < first else max(target - last, 0)
            if 0 < abs(distance) <= OFFSETS[-1]:
                hits[distance + OFFSETS[-1] - (distance > 0)] += 1
        if first == last:
            hits[before] += alike[first][0] in link.targets
            hits[before + 1] += alike[first][1] in link.targets
    return hits


class Lots:
    """Deals the texts of one relation to two halves, twice over: text by text, and source by source.

    Of every two, one goes to each half at random. In turn would not do: if texts come in pairs of opposites, each half
    would have one kind alone. If no source has several texts, both deals are the same.
    """

    def __init__(self) -> None:
        self._n_texts = self._n_sources = 0
        self._numbers: dict[str, int] = {}

    def deal(self, source: str | None) -> tuple[int, int, bool]:
        """A text's half by sources, its half by texts, and whether it is the first of its source.

        The source is what the text shares with others, such as a document; None = it stands alone.
        """
        number = self._numbers.get(source, self._n_sources) if source is not None else self._n_sources
        first = number == self._n_sources
        self._n_sources += first
        if source is not None:
            self._numbers[source] = number
        self._n_texts += 1
        return _half(number), _half(self._n_texts - 1), first


def _half(number: int) -> int:
    """0 or 1: a coin for every two that falls the same way each time."""
    pair, second = divmod(number, 2)
    return (hashlib.blake2b(str(pair).encode(), digest_size=1).digest()[0] + second) % 2


@dataclass(frozen=True, eq=False)
class Cell:
    """The links of one relation in one text, and the halves that they go to: by sources, and by texts.

    Attributes:
        n: How many links there are.
        rules: For how many of them each rule is right, (rule,).
        first: Whether the text is the first of its source.
    """

    relation: str
    halves: tuple[int, int]
    n: int
    rules: NDArray[np.int64]
    first: bool = True


CellSums = tuple[Cell, Floats]
"""A cell, and the hits and mass of heads in it, (layer, head, 2); NaN where a layer has no such head."""


@dataclass(frozen=True, eq=False)
class Part:
    """Exact sums over some texts that hold a relation: how many links, and how many texts.

    Attributes:
        rules: For how many links each rule is right, (rule,).
        sums: Hits and mass of heads, (layer, head, 2); None without texts.
    """

    links: int = 0
    texts: int = 0
    rules: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(RULES), np.int64))
    sums: RunningSums | None = None

    def merge(self, other: "Part") -> "Part":
        """The sums over the texts of both."""
        if self.sums is None or other.sums is None:
            return other if self.sums is None else self
        return Part(
            self.links + other.links, self.texts + other.texts, self.rules + other.rules, self.sums.merge(other.sums)
        )


class Tally:
    """Exact sums over the texts that hold one relation: of fixed size, whatever the corpus.

    Attributes:
        parts: By the half by sources and the half by texts, so that halves of either kind can be had of them.
        sources: Sources in each half by sources.
        left_out: Links that could not be measured, by reason.
        there: Which heads there are, (layer, head); empty before any text.
    """

    def __init__(self) -> None:
        self.parts: dict[tuple[int, int], Part] = {}
        self.sources = [0, 0]
        self.left_out: Counter[str] = Counter()
        self.there: NDArray[np.bool_] = np.zeros((0, 0), np.bool_)

    @property
    def n(self) -> int:
        """Links of both halves."""
        return sum(part.links for part in self.parts.values())

    def merge(self, other: "Tally") -> "Tally":
        """The sums over the texts of both; neither is changed."""
        total = Tally()
        total.sources = [mine + more for mine, more in zip(self.sources, other.sources, strict=True)]
        total.left_out = self.left_out + other.left_out
        total.there = self.there if self.there.size else other.there
        for halves in sorted({*self.parts, *other.parts}):
            total.parts[halves] = self.parts.get(halves, Part()).merge(other.parts.get(halves, Part()))
        return total

    def add(self, sums: Sequence[CellSums]) -> None:
        """Adds what heads reach on texts; a ValueError refuses NaN and infinity where there is such a head."""
        by_halves: defaultdict[tuple[int, int], list[CellSums]] = defaultdict(list)
        for cell, values in sums:
            by_halves[cell.halves].append((cell, values))
            self.sources[cell.halves[0]] += cell.first
            if not self.there.size:
                self.there = np.asarray(~np.isnan(values).all(-1))
        for halves, cells in by_halves.items():
            stacked = np.stack([values for _, values in cells])
            counts = np.array([cell.n for cell, _ in cells], np.float64)[:, None, None, None]
            running = RunningSums(stacked.shape[1:])
            running.add(np.where(self.there[..., None], stacked, 0.0), np.broadcast_to(counts, stacked.shape))
            part = Part(
                sum(cell.n for cell, _ in cells), len(cells), np.sum([cell.rules for cell, _ in cells], 0), running
            )
            self.parts[halves] = self.parts.get(halves, Part()).merge(part)

    def halve(self) -> "Halves":
        """Its halves: by sources if these suffice, else by texts."""
        by_sources, by_texts = ((self._half(axis, _CHOOSING), self._half(axis, _SCORING)) for axis in (0, 1))
        alone = sum(self.sources) == sum(part.texts for part in self.parts.values())
        enough = min(self.sources) >= FEWEST_SOURCES and by_sources[_SCORING].texts >= FEWEST_TEXTS
        return Halves(*by_sources, "sources") if alone or enough else Halves(*by_texts, "texts")

    def _half(self, axis: int, half: int) -> Part:
        return reduce(Part.merge, (part for halves, part in sorted(self.parts.items()) if halves[axis] == half), Part())

    def only_there(self, values: Floats) -> Floats:
        """Values by (layer, head), NaN where there is no such head."""
        return np.where(self.there, values, np.nan)


@dataclass(frozen=True)
class Halves:
    """What a head is chosen on, and what it is scored on; dealt by "sources", or else by "texts"."""

    chosen_on: Part
    scored_on: Part
    by: str


def judge(tallies: Mapping[str, Tally], kind: str) -> tuple[dict[str, Table], dict[str, NDArray[Any]]]:
    """Return the tables and arrays of `Relations` with the evidence; relations without any measured link are left out.

    Args:
        tallies: By relation.
        kind: The kind of attention.
    """
    names = sorted((name for name, tally in tallies.items() if tally.n), key=lambda name: (-tallies[name].n, name))
    measured = [_Measured(tallies[name]) for name in names]
    there = np.logical_or.reduce([relation.tally.there for relation in measured] or [np.zeros((0, 0), np.bool_)])
    places = [{"kind": kind, "layer": layer, "head": head} for layer, head in np.argwhere(there).tolist()]
    head_names = [f"L{place['layer']}H{place['head']}" for place in places]

    def stack(name: str) -> Floats:
        return np.array([getattr(relation, name)[there] for relation in measured]).reshape(len(measured), len(places))

    grids: dict[str, NDArray[Any]] = {name: stack(name) for name in ("choice", "accuracy", "mass", "p")}
    grids |= {"accuracy_low": stack("low"), "accuracy_high": stack("high")}
    grids["q"] = benjamini_hochberg(grids["p"])
    baselines = np.array([relation.baseline for relation in measured])
    with np.errstate(invalid="ignore"):
        is_above = grids["accuracy_low"] >= baselines[:, None] + MARGIN
        grids["found"] = is_above & (grids["q"] <= LEVEL)
    rows, left_out = [], []
    for row, (name, relation) in enumerate(zip(names, measured, strict=True)):
        choice, found = grids["choice"][row], grids["found"][row]
        best = -1 if np.isnan(choice).all() else int(np.nanargmax(choice))
        ties = relation.ties(choice, found, best, relation.spread[there]) if best >= 0 and found[best] else []
        rows.append({**relation.facts(), "relation": name, "best": best, "ties": " ".join(head_names[t] for t in ties)})
        left_out += [{"relation": row, "reason": why, "n": n} for why, n in relation.tally.left_out.items()]
    tables = {"relations": rows, "heads": places, "left_out": left_out}
    return {name: Table.of(Relations.TABLES[name], cells) for name, cells in tables.items()}, grids


class _Measured:
    """One relation before the false discovery rate of all is known.

    Attributes:
        accuracy: Accuracy of heads on the half that is scored, (layer, head); NaN = there is no such head. `low` and
            `high` are the ends of its interval, `mass` the mean weight on targets, and `p` the p-value.
        choice: Accuracy on the half that chooses; `spread`: its standard error.
    """

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self.halves = tally.halve()
        scored, n = self.halves.scored_on, self.halves.scored_on.links
        best_rule = int(scored.rules.argmax())
        self.rule = RULES[best_rule] if n else ""
        self.baseline = float(scored.rules[best_rule] / n) if n else math.nan
        self.no_verdict = ""
        if tally.n < FEWEST_LINKS:
            self.no_verdict = f"fewer than {FEWEST_LINKS} examples"
        elif scored.texts < FEWEST_TEXTS:
            self.no_verdict = f"fewer than {FEWEST_TEXTS} texts to score on"
        self.accuracy, self.mass, self.low, self.high, self.p = np.full((5, *tally.there.shape), np.nan)
        self.choice, self.spread = np.full((2, *tally.there.shape), np.nan)
        if self.halves.chosen_on.sums is not None:
            self.choice = tally.only_there(self.halves.chosen_on.sums.ratio()[..., 0])
            self.spread = self.halves.chosen_on.sums.standard_error()[..., 0]
        sums = scored.sums
        if sums is None:
            return
        self.accuracy, self.mass = (tally.only_there(part) for part in np.moveaxis(sums.ratio(), -1, 0))
        self.low, self.high = (tally.only_there(end[..., 0]) for end in sums.share_interval(hits=True))
        if not self.no_verdict:  # the larger p counts, of that over texts and that over links
            over_texts = sums.p_above(np.array([self.baseline, np.nan]))[..., 0]
            hits = np.floor(sums.total("s")[..., 0] + 1e-9)
            over_links = np.where(hits < 1, 1.0, bdtrc(np.maximum(hits, 1) - 1, n, self.baseline))
            self.p = tally.only_there(np.maximum(over_texts, over_links))

    def facts(self) -> dict[str, Any]:
        """Return what the table of relations says of it, apart from its heads."""
        return {
            "n": self.tally.n,
            "n_texts": self.halves.chosen_on.texts + self.halves.scored_on.texts,
            "n_scored": self.halves.scored_on.links,
            "n_texts_scored": self.halves.scored_on.texts,
            "rule": self.rule,
            "baseline": self.baseline,
            "no_verdict": self.no_verdict,
            "n_sources": sum(self.tally.sources),
            "halves": self.halves.by,
        }

    def ties(self, choice: Floats, found: NDArray[np.bool_], best: int, spread: Floats) -> list[int]:
        """Return further heads that express the relation about as well as the best one, the most accurate first.

        Their accuracy on the half that chooses is no farther from the best one's than its standard error, or than TIED.
        """
        n = self.halves.chosen_on.links
        # With one link more of either kind: of few links all may be right.
        share = (float(choice[best]) * n + 1) / (n + 2)
        error = np.nanmax([math.sqrt(share * (1 - share) / n), TIED, spread[best]])
        with np.errstate(invalid="ignore"):
            near = found & (choice >= choice[best] - error)
        near[best] = False
        tied: list[int] = sorted(np.flatnonzero(near).tolist(), key=lambda head: -choice[head])
        return tied
