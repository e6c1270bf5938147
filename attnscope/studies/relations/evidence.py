"""Add up hits of heads and simple rules on links, and judge them: intervals, baselines, verdicts.

`links` and `sounds` measure the hits. A link of a relation leads from words to target words; a head or a rule hits it
if it looks at a target. A head expresses a relation where a one-sided test says that it is above the best simple rule,
at a false discovery rate of LEVEL over all heads x relations, and where the lower end of its interval is MARGIN above
that rule. Its interval is that of shares in `core.intervals`: few texts that all say the same do not make a head
certain. There are two tests, a t-test over texts and a binomial test over links: the larger p counts. They find a head
of 0.9 beside a rule of 0.3, on 12 texts of 2 links, in 98% of samples; with `share_p_above` for the t-test it is 90%.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc

from attnscope.annotated import AnnotatedText, Link
from attnscope.core.intervals import benjamini_hochberg
from attnscope.core.sums import RunningSums
from attnscope.questions.relations import LEAST_MASS, Relations
from attnscope.results.table import DTYPES, HEADS, Table
from attnscope.studies.run import Part

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
    "level": LEVEL,
    "margin": MARGIN,
    "fewest_links": FEWEST_LINKS,
    "fewest_texts": FEWEST_TEXTS,
    "least_mass": LEAST_MASS,
}
"""The thresholds of verdicts, as records state them."""

OFFSETS = tuple(offset for offset in range(-20, 21) if offset)
"""The fixed offsets, in words of the annotation, that heads are compared with."""

ALONG = tuple(range(-3, 4))
"""The steps of the rules of the diagonal: how many words away from it they look."""


def _signed_name(name: str, number: int) -> str:
    """Return the name of a rule with its number, such as "offset −1"; for 0 the name alone."""
    return f"{name} {number:+d}".replace("-", "−") if number else name


RULES = (
    *(_signed_name("offset", offset) for offset in OFFSETS),
    "same word before",
    "same word after",
    "same place",
    *(_signed_name("diagonal", step) for step in ALONG),
    "same word",
)
"""The simple rules. Within a text they look at the word at an offset, or at the nearest word before or after that is
spelled the same (case aside). From a target to its text: at the word at the same place, or at an offset from it; at
the word on the diagonal, as far along the text as the target's word is along the target, or some steps from it; or, of
the words spelled the same, at the nearest to the diagonal."""

# Where the rules after the offsets stand in `RULES`, in its order; `_SAME` is that of "same word".
_BEFORE, _AFTER, _SAME_PLACE, FIRST_DIAGONAL = range(len(OFFSETS), len(OFFSETS) + 4)
_SAME = len(RULES) - 1

_FAR = 2**40
"""Further than any word."""

Floats = NDArray[np.float64]


# Simple rules


def right_rules(text: AnnotatedText, links: Sequence[Link]) -> NDArray[np.bool_]:
    """Return whether each simple rule is right on each link of a text, (link, rule).

    Where a link leads from several words, offsets to the left count from the first of them, to the right from the last.
    """
    n_words = len(text.words)
    n_links = len(links)
    first = np.array([link.source[0] for link in links], np.int64)
    last = np.array([link.source[-1] for link in links], np.int64)
    # Sources of links are in the target, if there is one, and else in the text.
    source_text = text.text
    spans = text.words
    if text.target is not None:
        source_text = text.target
        spans = text.target_words
    places_of = _places_by_spelling(text)
    # Far words on both sides, as in `places_of`: there always is one before and one after.
    nowhere = np.array([-_FAR, _FAR])

    # The word that each rule looks at, (link, rule); `_FAR` = none.
    looked_at = np.full((n_links, len(RULES)), _FAR)
    offsets = np.array(OFFSETS)
    outermost = np.where(offsets < 0, first[:, None], last[:, None])
    looked_at[:, : len(OFFSETS)] = outermost + offsets
    # The diagonal, as if all words were equally wide: the middle of the source, as a share of its text.
    share = (first + last + 1) / 2 / len(spans)
    along = np.floor(share * n_words).astype(np.int64)
    if text.target is not None:
        looked_at[:, FIRST_DIAGONAL:_SAME] = along[:, None] + ALONG
    for row in range(n_links):
        start, _ = spans[first[row]]
        _, stop = spans[last[row]]
        spelled = source_text[start:stop].casefold()
        places = places_of.get(spelled, nowhere)
        if text.target is None:
            looked_at[row, _BEFORE] = places[places < first[row]][-1]
            looked_at[row, _AFTER] = places[places > last[row]][0]
        else:
            distances = np.abs(places - along[row])
            looked_at[row, _SAME] = places[distances.argmin()]

    # Whether that word is a target of the link: one code stands for a pair of link and word.
    n_targets = [len(link.targets) for link in links]
    link_of_target = np.repeat(np.arange(n_links), n_targets)
    targets = np.array(list(chain.from_iterable(link.targets for link in links)), np.int64)
    target_codes = link_of_target * n_words + targets
    looked_codes = np.arange(n_links)[:, None] * n_words + looked_at
    is_word = (looked_at >= 0) & (looked_at < n_words)
    is_right: NDArray[np.bool_] = is_word & np.isin(looked_codes, target_codes)
    if text.target is not None:
        # From a target to its text: whether any right word is at the place of the source.
        is_same = (first[link_of_target] <= targets) & (targets <= last[link_of_target])
        is_right[link_of_target[is_same], _SAME_PLACE] = True
    return is_right


def _places_by_spelling(text: AnnotatedText) -> dict[str, NDArray[np.int64]]:
    """Return the numbers of the words of each spelling, case aside, ascending, between two that are far away."""
    numbers: defaultdict[str, list[int]] = defaultdict(lambda: [-_FAR])
    for number in range(len(text.words)):
        spelled = text.word(number).casefold()
        numbers[spelled].append(number)
    return {spelled: np.array([*places, _FAR]) for spelled, places in numbers.items()}


# Halves


class Lots:
    """Deal the texts of one relation to two halves, twice over: by sources, and text by text.

    Of every two, one goes to each half at random. In turn would not do: if texts come in pairs of opposites, each half
    would have one kind alone. If no source has several texts, both deals are the same.
    """

    def __init__(self) -> None:
        self._n_texts = 0
        self._n_sources = 0
        self._numbers: dict[str, int] = {}

    def deal(self, source: str | None) -> tuple[tuple[int, int], bool]:
        """Return a text's half by sources and its half by texts, and whether it is the first of its source.

        The source is what the text shares with others, such as a document; None = it stands alone.
        """
        number = self._n_sources
        if source is not None:
            number = self._numbers.setdefault(source, number)
        is_first = number == self._n_sources
        if is_first:
            self._n_sources += 1
        self._n_texts += 1
        return (_half(number), _half(self._n_texts - 1)), is_first


def _half(number: int) -> int:
    """Return 0 or 1: of numbers 2k and 2k + 1 each gets one, by a coin that falls the same way in every run."""
    pair, second = divmod(number, 2)
    digest = hashlib.blake2b(str(pair).encode(), digest_size=1).digest()
    return (digest[0] + second) % 2


# Sums


@dataclass(frozen=True, eq=False)
class Cell:
    """Hold the links of one relation in one text.

    Attributes:
        relation: The relation.
        halves: The halves that they go to: by sources, and by texts.
        is_first: Whether the text is the first of its source.
        n_links: How many links there are.
        rule_hits: On how many of them each rule is right, (rule,).
    """

    relation: str
    halves: tuple[int, int]
    is_first: bool
    n_links: int
    rule_hits: NDArray[np.int64]


@dataclass(kw_only=True, eq=False)
class LinkPart(Part):
    """Hold the hits of rules and heads on the links of some texts: exact sums of fixed size, whatever the corpus.

    Attributes:
        sums: By relation, half by sources and half by texts: on how many links each rule and each head is right, and
            each head's mass on the targets, (rule + head + head,).
        n_sources: Sources by relation and half by sources.
        unmeasured: Links that could not be measured, by relation and reason.
        n_copies: How many texts or chunks are copies of earlier ones.
    """

    sums: dict[tuple[str, int, int], RunningSums] = field(default_factory=dict)
    n_sources: dict[tuple[str, int], int] = field(default_factory=dict)
    unmeasured: dict[tuple[str, str], int] = field(default_factory=dict)
    n_copies: int = 0

    def add_cells(self, cells: Sequence[Cell], values: Floats) -> None:
        """Set the sums of this part, which has none yet, to those over cells: hits and mass of all heads.

        Args:
            cells: The cells, at least one.
            values: Hits and mass, (cell, 2, layer, head); NaN = there is no such head.
        """
        # One row per cell: rules, then hits, then mass. (cell, rule + head + head)
        rule_hits = np.array([cell.rule_hits for cell in cells])
        n_links = np.array([cell.n_links for cell in cells])
        of_heads = values.reshape(len(cells), -1)
        rows = np.concatenate([rule_hits, of_heads], 1)
        is_there = ~np.isnan(rows)
        counts = is_there * n_links[:, None]
        # A head that a layer lacks has a sum and a count of 0.
        rows = np.where(is_there, rows, 0.0)
        # The rows of each relation and half go to sums of their own.
        rows_of: defaultdict[tuple[str, int, int], list[int]] = defaultdict(list)
        n_sources: Counter[tuple[str, int]] = Counter()
        for number, cell in enumerate(cells):
            rows_of[cell.relation, *cell.halves].append(number)
            n_sources[cell.relation, cell.halves[0]] += cell.is_first
        self.n_sources = dict(n_sources)
        for key, numbers in rows_of.items():
            self.sums[key] = RunningSums(rows.shape[1:])
            self.sums[key].add(rows[numbers], counts[numbers])

    def halve(self, relation: str) -> tuple[RunningSums, RunningSums, str]:
        """Return the half on which a head is chosen, the half on which it is scored, and what was dealt.

        "sources" are dealt, and "texts" where sources are too few.
        """
        nothing = RunningSums(next(iter(self.sums.values())).shape)
        by_sources = [nothing, nothing]
        by_texts = [nothing, nothing]
        for key in sorted(self.sums):
            name, source_half, text_half = key
            if name == relation:
                by_sources[source_half] = by_sources[source_half].merge(self.sums[key])
                by_texts[text_half] = by_texts[text_half].merge(self.sums[key])
        chosen_on, scored_on = by_sources
        # Where each text is a source of its own, both deals are the same.
        n_sources = self.count_sources(relation)
        are_alone = sum(n_sources) == chosen_on.n_texts + scored_on.n_texts
        suffice = min(n_sources) >= FEWEST_SOURCES and scored_on.n_texts >= FEWEST_TEXTS
        if are_alone or suffice:
            return chosen_on, scored_on, "sources"
        chosen_on, scored_on = by_texts
        return chosen_on, scored_on, "texts"

    def count_sources(self, relation: str) -> list[int]:
        """Return how many sources of a relation each half has, where sources are dealt."""
        return [self.n_sources.get((relation, half), 0) for half in range(2)]


class Half:
    """Hold the hits of rules and heads on half of the texts of several relations.

    Args:
        sums: The sums over the texts of each relation.

    Attributes:
        n_texts: Texts by relation, (relation,).
        n_links: Their links, (relation,).
        rules: Hits of rules, (relation, rule).
        hits: Hits of heads, (relation, head).
        mass: Mass of heads on the targets, (relation, head).
    """

    def __init__(self, sums: Sequence[RunningSums]) -> None:
        # (relation, rule + head + head)
        moments = np.stack([of_relation.moments for of_relation in sums], 1)
        joined = RunningSums.of_moments(moments, 0)
        n_heads = (joined.shape[1] - len(RULES)) // 2
        self.rules = joined[:, : len(RULES)]
        self.hits = joined[:, len(RULES) : -n_heads]
        self.mass = joined[:, -n_heads:]
        self.n_texts = np.array([of_relation.n_texts for of_relation in sums])
        # Every rule counts all links.
        self.n_links = self.rules.total("c")[:, 0].astype(np.int64)


# Verdicts


def judge(
    part: LinkPart,
    kind: str,
    shape: tuple[int, int],
) -> tuple[dict[str, Table], dict[str, NDArray[Any]]]:
    """Return the tables and arrays of `Relations` with the evidence, the most frequent relations first.

    Args:
        part: The sums over all texts.
        kind: The kind of attention.
        shape: How many layers it has, and heads in each.
    """
    # The most frequent relations come first.
    n_links: Counter[str] = Counter()
    for (name, *_), sums in part.sums.items():
        n_links[name] += int(sums.total("c")[0])
    names = sorted(n_links, key=lambda name: (-n_links[name], name))
    if not names:
        return {}, {array.name: np.zeros((0, 0), DTYPES[array.kind]) for array in Relations.ARRAYS}
    chosen_on, scored_on, dealt = zip(*map(part.halve, names), strict=True)
    chosen = Half(chosen_on)
    scored = Half(scored_on)

    # The best simple rule of the scored half, and whether there can be a verdict: (relation,).
    rule_hits = scored.rules.total("s")
    best_rules = np.array(RULES)[rule_hits.argmax(1)]
    with np.errstate(invalid="ignore"):
        baseline = rule_hits.max(1) / scored.n_links
    n_measured = chosen.n_links + scored.n_links
    no_verdict = np.select(
        [n_measured < FEWEST_LINKS, scored.n_texts < FEWEST_TEXTS],
        [f"fewer than {FEWEST_LINKS} examples", f"fewer than {FEWEST_TEXTS} texts to score on"],
        "",
    )
    is_there, grids = _judge_heads(chosen, scored, baseline, no_verdict == "")

    # The best head of each relation, by accuracy on the half on which heads are chosen; -1 = none.
    choice = np.nan_to_num(grids["choice"], nan=-1.0)
    best_heads = np.where(choice.max(1) >= 0, choice.argmax(1), -1)

    # The tables: relations, the heads that there are, and what was left out.
    layers, heads = np.nonzero(is_there.reshape(shape))
    left_out = []
    for row, name in enumerate(names):
        for (relation, reason), n in part.unmeasured.items():
            if relation == name:
                left_out.append({"relation": row, "reason": reason, "n": n})
    tables = {
        "relations": Table.of_arrays(
            Relations.TABLES["relations"],
            relation=names,
            n=n_measured,
            n_texts=chosen.n_texts + scored.n_texts,
            n_scored=scored.n_links,
            n_texts_scored=scored.n_texts,
            rule=np.where(scored.n_links > 0, best_rules, ""),
            baseline=baseline,
            no_verdict=no_verdict,
            best=best_heads,
            n_sources=[sum(part.count_sources(name)) for name in names],
            halves=dealt,
        ),
        "heads": Table.of_arrays(
            HEADS,
            kind=[kind] * len(heads),
            layer=layers,
            head=heads,
        ),
        "left_out": Table.of(Relations.TABLES["left_out"], left_out),
    }
    return tables, grids


def _judge_heads(
    chosen: Half,
    scored: Half,
    baseline: Floats,
    has_verdict: NDArray[np.bool_],
) -> tuple[NDArray[np.bool_], dict[str, NDArray[Any]]]:
    """Return which of all heads there are, (head,), and their numbers and verdicts, (relation, head).

    Args:
        chosen: The half on which heads are chosen.
        scored: The half on which they are scored.
        baseline: The accuracy of the best simple rule there, (relation,).
        has_verdict: Whether there are enough links and texts, (relation,).
    """
    # A layer may have fewer heads than others.
    counts = chosen.hits.total("c") + scored.hits.total("c")
    is_there: NDArray[np.bool_] = counts.max(0) > 0
    hits = scored.hits[:, is_there]
    low, high = hits.share_interval(hits=True)
    # The larger p-value of the t-test over texts and of the binomial test over links, which takes whole hits: words
    # that share the largest weight share a hit.
    rule = baseline[:, None]
    n_hits = np.floor(hits.total("s") + 1e-9)
    with np.errstate(invalid="ignore"):
        over_links = bdtrc(n_hits - 1, scored.n_links[:, None], rule)
    p = np.maximum(hits.p_above(rule), over_links)
    p[~has_verdict] = np.nan
    # Decide: well above the best rule, and significant over heads x relations.
    q = benjamini_hochberg(p)
    with np.errstate(invalid="ignore"):
        is_found = (low >= rule + MARGIN) & (q <= LEVEL)
    return is_there, {
        "choice": chosen.hits.ratio()[:, is_there],
        "accuracy": hits.ratio(),
        "accuracy_low": low,
        "accuracy_high": high,
        "mass": scored.mass.ratio()[:, is_there],
        "p": p,
        "q": q,
        "found": is_found,
    }
