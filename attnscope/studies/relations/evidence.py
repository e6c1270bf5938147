"""Add up on how many links heads and simple rules are right, and judge which heads express a relation.

A link leads from a source, one word or several, to its target words. A rule hits a link if it looks at a target; a head
hits it if its largest weight is on a target. `links` and `sounds` measure the hits.

A head expresses a relation if it is better than the best simple rule. The lower end of its interval must be MARGIN
above the rule, and a one-sided test must say so at a false discovery rate of LEVEL over all heads x relations. The
interval is that of shares in `core.intervals`, so that a few texts that all say the same do not make a head certain.

Two tests are made, a t-test over texts and a binomial test over links, and the larger p-value counts. They find a head
of accuracy 0.9 beside a rule of 0.3, on 12 texts of 2 links, in 98% of samples; with `share_p_above` in place of the
t-test it is 90%.
"""

import hashlib
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc

from attnscope.annotated import AnnotatedText, Link
from attnscope.core.intervals import benjamini_hochberg
from attnscope.core.sums import RunningSums
from attnscope.questions.relations import MIN_MASS, Relations
from attnscope.results.table import DTYPES, HEADS, Table
from attnscope.studies.run import PartialSums

LEVEL = 0.05
"""The false discovery rate over heads x relations (Benjamini & Hochberg 1995)."""

MARGIN = 0.1
"""How far the lower end of a head's interval must be above the best simple rule (Voita et al. 2019, on syntax)."""

MIN_LINKS = 20
"""A relation with fewer links, in both halves together, gets no verdict."""

MIN_TEXTS = 10
"""A relation with fewer texts in the half that is scored gets no verdict: an interval over so few says little."""

MIN_SOURCES = 2
"""Sources are dealt to the two halves if each half gets at least so many, and the scored half MIN_TEXTS texts.

If not, texts are dealt one by one, whatever their source.
"""

THRESHOLDS = {
    "level": LEVEL,
    "margin": MARGIN,
    "fewest_links": MIN_LINKS,
    "fewest_texts": MIN_TEXTS,
    "least_mass": MIN_MASS,
}
"""The thresholds of verdicts, as records state them."""

OFFSETS = tuple(offset for offset in range(-20, 21) if offset)
"""The fixed offsets, in words of the annotation, that heads are compared with."""

DIAGONAL_STEPS = tuple(range(-3, 4))
"""How many words after the diagonal, or before it, the rules "diagonal" look."""


def _signed_name(name: str, number: int) -> str:
    """Return the name of a rule with its number, such as "offset −1"; for 0 the name alone."""
    return f"{name} {number:+d}".replace("-", "−") if number else name


RULES = (
    *(_signed_name("offset", offset) for offset in OFFSETS),
    "same word before",
    "same word after",
    "same place",
    *(_signed_name("diagonal", step) for step in DIAGONAL_STEPS),
    "same word",
)
"""The simple rules: each looks at one word for a link from a source.

In a single text, "offset" looks so many words after the source, or before it; "same word before" and "same word after"
at the nearest word there that is spelled like the source, case aside.

From a target to its text, the source is in the target. "same place" looks at the word of the text with the number that
the source has in the target, and "offset" so many words after it. "diagonal" looks at the word that is as far along the
text as the source is along the target, or some steps after it; "same word" at the nearest to that among the words that
are spelled like the source.
"""

# Where some rules stand in `RULES`.
_BEFORE = RULES.index("same word before")
_AFTER = RULES.index("same word after")
_SAME_PLACE = RULES.index("same place")
FIRST_DIAGONAL = _SAME_PLACE + 1
_SAME = RULES.index("same word")

_FAR = 2**40
"""The number of a word after the end of every text; -_FAR is before its start."""

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
    # The text that holds the sources, and the spans of its words.
    source_text = text.text
    spans = text.words
    if text.target is not None:
        source_text = text.target
        spans = text.target_words
    # The words of each spelling, case aside, ascending; the far ones at both ends stand for none before and none after.
    spelled_like: defaultdict[str, list[int]] = defaultdict(lambda: [-_FAR, _FAR])
    for word in range(n_words):
        spelled_like[text.word(word).casefold()].insert(-1, word)

    # The word that each rule looks at, (link, rule); `_FAR` = none.
    looked_at = np.full((n_links, len(RULES)), _FAR)
    offsets = np.array(OFFSETS)
    outermost = np.where(offsets < 0, first[:, None], last[:, None])
    looked_at[:, : len(OFFSETS)] = outermost + offsets
    # The diagonal, as if all words were equally wide: how far along its text the middle of the source is, 0 to 1, and
    # the word that is as far along the text with the targets.
    share = (first + last + 1) / 2 / len(spans)
    diagonal = np.floor(share * n_words).astype(np.int64)
    if text.target is not None:
        looked_at[:, FIRST_DIAGONAL:_SAME] = diagonal[:, None] + DIAGONAL_STEPS
    link_targets: list[tuple[int, int]] = []
    for row, link in enumerate(links):
        link_targets += [(row, word) for word in link.targets]
        start, _ = spans[link.source[0]]
        _, stop = spans[link.source[-1]]
        alike = spelled_like[source_text[start:stop].casefold()]
        if text.target is None:
            looked_at[row, _BEFORE] = alike[bisect_left(alike, link.source[0]) - 1]
            looked_at[row, _AFTER] = alike[bisect_right(alike, link.source[-1])]
        else:
            distances = np.abs(np.array(alike) - diagonal[row])
            looked_at[row, _SAME] = alike[distances.argmin()]

    # Whether that word is a target of the link. A link and a word are found by one number: link · n_words + word.
    link_of_target, targets = np.array(link_targets).T
    target_codes = link_of_target * n_words + targets
    looked_codes = np.arange(n_links)[:, None] * n_words + looked_at
    is_word = (looked_at >= 0) & (looked_at < n_words)
    is_right: NDArray[np.bool_] = is_word & np.isin(looked_codes, target_codes)
    if text.target is not None:
        # The same place: whether a target has the number of a word of the source.
        is_same = (first[link_of_target] <= targets) & (targets <= last[link_of_target])
        is_right[link_of_target[is_same], _SAME_PLACE] = True
    return is_right


# Halves


class HalfSplitter:
    """Deal the texts of one relation to two halves, in two ways: by sources, and text by text.

    By sources, all texts of a source, such as a document, go to the same half. If no source has several texts, both
    ways are the same. Of every two sources or texts, one goes to each half, at random. Taking turns would not do: if
    texts come in pairs of opposites, each half would have one kind alone.
    """

    def __init__(self) -> None:
        self._n_texts = 0
        # A text that stands alone is a source of its own, without a name.
        self._n_sources = 0
        # The number of each source by its name.
        self._numbers: dict[str, int] = {}

    def deal(self, source: str | None) -> tuple[tuple[int, int], bool]:
        """Return a text's halves, by sources and text by text, 0 or 1; and whether it is the first of its source.

        Args:
            source: The name of what the text shares with others, such as a document; None = it stands alone.
        """
        number = self._n_sources
        if source is not None:
            number = self._numbers.setdefault(source, number)
        is_first = number == self._n_sources
        if is_first:
            self._n_sources += 1
        halves = (_half(number), _half(self._n_texts))
        self._n_texts += 1
        return halves, is_first


def _half(number: int) -> int:
    """Return the half, 0 or 1, of a source or text: of numbers 2k and 2k + 1, one goes to each half.

    Which one is decided by a hash of k, so that it is the same in every run.
    """
    pair, second = divmod(number, 2)
    digest = hashlib.blake2b(str(pair).encode(), digest_size=1).digest()
    return (digest[0] + second) % 2


# Sums


class TextHits(NamedTuple):
    """Hold the links of one relation in one text or chunk: for each head and rule, their hits are added up.

    Attributes:
        relation: The relation.
        halves: The halves that the text is in: by sources, and text by text.
        is_first: Whether the text is the first of its source.
        n_links: How many links there are.
        rule_hits: How many of them each simple rule hits, (rule,).
    """

    relation: str
    halves: tuple[int, int]
    is_first: bool
    n_links: int
    rule_hits: NDArray[np.int64]


@dataclass(kw_only=True, eq=False)
class LinkPart(PartialSums):
    """Hold the hits of rules and heads on the links of some texts: exact sums of fixed size, whatever the corpus.

    Attributes:
        sums: By relation, half by sources and half text by text: the hits of each rule and each head, and each head's
            mass on the targets, (rule + head + head,).
        n_sources: How many sources, by relation and half by sources.
        unmeasured: How many links could not be measured, by relation and reason.
        n_copies: How many texts or chunks are copies of earlier ones.
    """

    sums: dict[tuple[str, int, int], RunningSums] = field(default_factory=dict)
    n_sources: dict[tuple[str, int], int] = field(default_factory=dict)
    unmeasured: dict[tuple[str, str], int] = field(default_factory=dict)
    n_copies: int = 0

    def add_cells(self, cells: Sequence[TextHits], values: Floats) -> None:
        """Add the hits of rules, and the hits and mass of heads, on the links of some cells.

        Args:
            cells: The cells, at least one.
            values: Hits and mass of all heads, (cell, 2, layer, head); NaN = there is no such head.
        """
        # A row for each cell: hits of rules, hits of heads, mass of heads. (cell, rule + head + head)
        rule_hits = np.array([cell.rule_hits for cell in cells])
        rows = np.concatenate([rule_hits, values.reshape(len(cells), -1)], 1)
        # Each counts all links of its cell. A head that a layer lacks has a sum and a count of 0.
        n_links = np.array([cell.n_links for cell in cells])
        is_there = ~np.isnan(rows)
        counts = np.where(is_there, n_links[:, None], 0)
        rows = np.where(is_there, rows, 0.0)
        # Add the rows of each relation and half at once.
        rows_of: defaultdict[tuple[str, int, int], list[int]] = defaultdict(list)
        for row, cell in enumerate(cells):
            rows_of[cell.relation, *cell.halves].append(row)
            if cell.is_first:
                source_key = (cell.relation, cell.halves[0])
                self.n_sources[source_key] = self.n_sources.get(source_key, 0) + 1
        for key, chosen in rows_of.items():
            sums = self.sums.setdefault(key, RunningSums(rows.shape[1:]))
            sums.add(rows[chosen], counts[chosen])

    def halve(self, relation: str) -> tuple[RunningSums, RunningSums, str]:
        """Return the sums of the half that chooses a head, those of the half that scores it, and what was dealt.

        "sources" are dealt to the halves, or "texts" where sources are too few.
        """
        # The sums of both halves, dealt in either way.
        nothing = RunningSums(next(iter(self.sums.values())).shape)
        by_sources = [nothing, nothing]
        by_texts = [nothing, nothing]
        for key in sorted(self.sums):
            name, source_half, text_half = key
            if name == relation:
                by_sources[source_half] = by_sources[source_half].merge(self.sums[key])
                by_texts[text_half] = by_texts[text_half].merge(self.sums[key])
        # Sources must suffice, unless each text is a source of its own: then both ways are the same.
        chosen_on, scored_on = by_sources
        n_sources = self.count_sources(relation)
        are_alone = sum(n_sources) == chosen_on.n_texts + scored_on.n_texts
        suffice = min(n_sources) >= MIN_SOURCES and scored_on.n_texts >= MIN_TEXTS
        if are_alone or suffice:
            return chosen_on, scored_on, "sources"
        chosen_on, scored_on = by_texts
        return chosen_on, scored_on, "texts"

    def count_sources(self, relation: str) -> list[int]:
        """Return how many sources of a relation each half has, where sources are dealt."""
        return [self.n_sources.get((relation, half), 0) for half in range(2)]


class CorpusHalf:
    """Hold the hits of rules and heads on half of the texts of several relations.

    Args:
        sums: For each relation, the sums over the texts of its half, (rule + head + head,).

    Attributes:
        n_texts: How many texts there are, (relation,).
        n_links: How many links, (relation,).
        rules: Hits of rules, (relation, rule).
        hits: Hits of heads, (relation, head).
        mass: Mass of heads on the targets, (relation, head).
    """

    def __init__(self, sums: Sequence[RunningSums]) -> None:
        # All relations in one object, (relation, rule + head + head). Relations differ in texts: it counts none.
        moments = np.stack([each.moments for each in sums], 1)
        joined = RunningSums.from_moments(moments, n_texts=0)
        n_heads = (joined.shape[1] - len(RULES)) // 2
        self.rules = joined[:, : len(RULES)]
        self.hits = joined[:, len(RULES) : -n_heads]
        self.mass = joined[:, -n_heads:]
        self.n_texts = np.array([each.n_texts for each in sums])
        # Each rule counts all links, so the first one will do.
        self.n_links = self.rules.total("c")[:, 0].astype(np.int64)


# Verdicts


def judge(
    part: LinkPart, kind: str, shape: tuple[int, int]
) -> tuple[dict[str, Table], dict[str, NDArray[Any]]]:
    """Return the tables and arrays of `Relations`, the most frequent relations first.

    Args:
        part: The sums over all texts.
        kind: The kind of attention.
        shape: How many layers the model has, and heads in each.
    """
    # The most frequent relations come first.
    n_links: Counter[str] = Counter()
    for (name, *_), sums in part.sums.items():
        n_links[name] += int(sums.total("c")[0])
    names = sorted(n_links, key=lambda name: (-n_links[name], name))
    if not names:
        return {}, {array.name: np.zeros((0, 0), DTYPES[array.kind]) for array in Relations.ARRAYS}
    halves = [part.halve(name) for name in names]
    chosen_on, scored_on, dealt = zip(*halves, strict=True)
    chosen = CorpusHalf(chosen_on)
    scored = CorpusHalf(scored_on)

    # The best simple rule of the scored half, and why there can be no verdict, "" = there can: (relation,).
    rule_hits = scored.rules.total("s")
    best_rules = np.array(RULES)[rule_hits.argmax(1)]
    with np.errstate(invalid="ignore"):
        baseline = rule_hits.max(1) / scored.n_links
    n_measured = chosen.n_links + scored.n_links
    no_verdict = np.select(
        [n_measured < MIN_LINKS, scored.n_texts < MIN_TEXTS],
        [f"fewer than {MIN_LINKS} examples", f"fewer than {MIN_TEXTS} texts to score on"],
        "",
    )
    is_there, grids = _judge_heads(chosen, scored, baseline, no_verdict == "")

    # The most accurate head of each relation on the half that chooses; -1 = that half has no link of it.
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
        "heads": Table.of_arrays(HEADS, kind=[kind] * len(heads), layer=layers, head=heads),
        "left_out": Table.of(Relations.TABLES["left_out"], left_out),
    }
    return tables, grids


def _judge_heads(
    chosen: CorpusHalf, scored: CorpusHalf, baseline: Floats, has_verdict: NDArray[np.bool_]
) -> tuple[NDArray[np.bool_], dict[str, NDArray[Any]]]:
    """Return which of all heads there are, (head,), and the arrays of `Relations` for these, (relation, head).

    Args:
        chosen: The half that chooses heads.
        scored: The half that scores them.
        baseline: The accuracy of the best simple rule on the half that scores, (relation,).
        has_verdict: Whether there are enough links and texts for a verdict, (relation,).
    """
    # A layer may have fewer heads than others.
    counts = chosen.hits.total("c") + scored.hits.total("c")
    is_there: NDArray[np.bool_] = counts.max(0) > 0
    hits = scored.hits[:, is_there]
    low, high = hits.share_interval(hits=True)
    # The binomial test over links takes whole hits. Words that share the largest weight share a hit, and their shares
    # may add up to a little less than a whole number: hence 1e-9.
    rule = baseline[:, None]
    n_hits = np.floor(hits.total("s") + 1e-9)
    p_over_links = bdtrc(n_hits - 1, scored.n_links[:, None], rule)
    # The larger p-value of this test and of the t-test over texts counts.
    p = np.maximum(hits.p_above(rule), p_over_links)
    p[~has_verdict] = np.nan
    # A head is found if it is well above the best rule, and significant over heads x relations.
    q = benjamini_hochberg(p)
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
