"""Count the links that heads and simple rules get right, and judge which heads express a relation.

A link leads from source words to target words, such as from a verb to its subject. A simple rule looks at one word, and
hits a link if this word is a target. A head hits a link if its largest weight is on a target. `links` and `sounds`
measure the hits. They add them up in cells: the links of one relation in one text or chunk.

The texts of a relation are split into two halves. One half selects the best head, the other half scores it. A half gets
whole sources, such as documents, so that the halves are independent.

A head expresses a relation if it is better than the best simple rule, the baseline. The lower end of its interval must
be MARGIN above the baseline, and a one-sided test must be significant at a false discovery rate of LEVEL over all heads
x relations. The interval is that of shares in `core.intervals`: a few texts with equal results do not make it narrow.

Of two tests, a t-test over texts and a binomial test over links, the larger p-value counts. They find a head of
accuracy 0.9 against a rule of 0.3, on 12 texts of 2 links, in 98% of samples. With `share_p_above` instead of the
t-test, they find it in 90%.
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
from attnscope.arrays import Floats
from attnscope.core.intervals import benjamini_hochberg
from attnscope.core.sums import RunningSums
from attnscope.questions.relations import MIN_MASS, Relations
from attnscope.results.table import DTYPES, HEADS, Table
from attnscope.studies.run import PartialSums

LEVEL = 0.05
"""The false discovery rate over heads x relations (Benjamini & Hochberg 1995)."""

MARGIN = 0.1
"""How far the lower end of a head's interval must be above the baseline (Voita et al. 2019, on syntax)."""

MIN_LINKS = 20
"""A relation with fewer links in both halves together gets no verdict."""

MIN_TEXTS = 10
"""A relation with fewer texts in the scoring half gets no verdict: its interval would be too wide."""

MIN_SOURCES = 2
"""The fewest sources in each half, if whole sources are assigned to the halves; the scoring half needs MIN_TEXTS texts.

With fewer, single texts are assigned, whatever their source.
"""

THRESHOLDS = {
    "level": LEVEL,
    "margin": MARGIN,
    "fewest_links": MIN_LINKS,
    "fewest_texts": MIN_TEXTS,
    "least_mass": MIN_MASS,
}
"""The thresholds of verdicts, by their names in saved results."""

OFFSETS = tuple(offset for offset in range(-20, 21) if offset)
"""The offsets of the rules "offset", in words of the annotation."""

DIAGONAL_STEPS = tuple(range(-3, 4))
"""The offsets of the rules "diagonal" from the diagonal, in words."""


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
"""The simple rules. For a link from a source, each rule looks at one word.

In a single text, "offset +2" looks at the second word after the source, and "offset −2" at the second before it. "same
word before" and "same word after" look at the nearest word there with the spelling of the source, ignoring case.

In a text with a target, such as a translation, the source is a word of the target. "same place" looks at the word of
the text that has the source's index, and "offset +2" at the second word after that. "diagonal" looks at the word that
is as far along the text as the source is along the target, and "diagonal +1" at the word after that. "same word" looks
at the word with the spelling of the source that is nearest to the diagonal.
"""

# The indices of some rules in `RULES`.
_WORD_BEFORE = RULES.index("same word before")
_WORD_AFTER = RULES.index("same word after")
_SAME_PLACE = RULES.index("same place")
FIRST_DIAGONAL = _SAME_PLACE + 1
_SAME_WORD = RULES.index("same word")

_BEYOND_TEXT = 2**40
"""The index of a word after the end of every text: no word is there. -_BEYOND_TEXT is before the start."""


# Simple rules


def check_rules(text: AnnotatedText, links: Sequence[Link]) -> NDArray[np.bool_]:
    """Return whether each simple rule hits each link of a text, (link, rule).

    If a source has several words, negative offsets count from its first word, positive offsets from its last.
    """
    # The indices of the first and last word of each source, (link,).
    n_words = len(text.words)
    n_links = len(links)
    first_words = np.array([link.source[0] for link in links], np.int64)
    last_words = np.array([link.source[-1] for link in links], np.int64)
    # The text that the sources are in, the target if there is one, and the character spans of its words.
    source_text = text.text
    spans = text.words
    if text.target is not None:
        source_text = text.target
        spans = text.target_words
    # The indices of the words of each spelling, ignoring case, ascending. The first and the last index are beyond the
    # text, so that a search for the nearest always finds an index. `insert(-1, …)` inserts before the last.
    words_by_spelling: defaultdict[str, list[int]] = defaultdict(lambda: [-_BEYOND_TEXT, _BEYOND_TEXT])
    for word in range(n_words):
        words_by_spelling[text.word(word).casefold()].insert(-1, word)

    # Find the index of the word that each rule looks at, (link, rule). Outside 0 to n_words - 1, there is no word.
    rule_words = np.full((n_links, len(RULES)), _BEYOND_TEXT)
    offsets = np.array(OFFSETS)
    anchor_words = np.where(offsets < 0, first_words[:, None], last_words[:, None])
    rule_words[:, : len(OFFSETS)] = anchor_words + offsets
    # The diagonal counts all words as equally long. The middle of the source is at a relative position of its text, 0
    # to 1. The diagonal word is at the same relative position of the text with the targets.
    relative_positions = (first_words + last_words + 1) / 2 / len(spans)
    diagonal_words = np.floor(relative_positions * n_words).astype(np.int64)
    if text.target is not None:
        rule_words[:, FIRST_DIAGONAL:_SAME_WORD] = diagonal_words[:, None] + DIAGONAL_STEPS
    link_targets: list[tuple[int, int]] = []
    for link_index, link in enumerate(links):
        link_targets += [(link_index, word) for word in link.targets]
        # The indices of the words with the spelling of the source: from the start of its first to the end of its last
        # word.
        start, _ = spans[link.source[0]]
        _, stop = spans[link.source[-1]]
        matches = words_by_spelling[source_text[start:stop].casefold()]
        if text.target is None:
            rule_words[link_index, _WORD_BEFORE] = matches[bisect_left(matches, link.source[0]) - 1]
            rule_words[link_index, _WORD_AFTER] = matches[bisect_right(matches, link.source[-1])]
        else:
            distances = np.abs(np.array(matches) - diagonal_words[link_index])
            rule_words[link_index, _SAME_WORD] = matches[distances.argmin()]

    # A rule hits if its word is a target of the link. To compare pairs of link and word, write each pair as one number:
    # link · n_words + word.
    link_of_target, targets = np.array(link_targets).T
    target_codes = link_of_target * n_words + targets
    rule_word_codes = np.arange(n_links)[:, None] * n_words + rule_words
    is_in_text = (rule_words >= 0) & (rule_words < n_words)
    is_hit: NDArray[np.bool_] = is_in_text & np.isin(rule_word_codes, target_codes)
    if text.target is not None:
        # "same place" hits if a target has the index of any word of the source.
        is_in_source = (first_words[link_of_target] <= targets) & (targets <= last_words[link_of_target])
        is_hit[link_of_target[is_in_source], _SAME_PLACE] = True
    return is_hit


# Halves


class HalfSplitter:
    """Assign the texts of one relation to two halves in two ways: by sources, and text by text.

    By sources, all texts of a source, such as a document, go to the same half. If no source has several texts, both
    ways are the same. Of each two successive sources or texts, one goes to each half, at random. Alternating would fail
    if texts come in pairs, such as a statement and its negation: each half would have only one of the kinds.
    """

    def __init__(self) -> None:
        self._n_texts = 0
        # A text without a named source counts as a source of its own.
        self._n_sources = 0
        # The number of each named source. Sources are numbered in the order in which they come.
        self._number_by_source: dict[str, int] = {}

    def assign(self, source: str | None) -> tuple[tuple[int, int], bool]:
        """Assign the next text, and return its halves and whether it is the first text of its source.

        Args:
            source: The name of the text's source, such as a document; None = the text is a source of its own.

        Returns:
            The half by sources and the half text by text, each 0 or 1; and whether the source is new.
        """
        number = self._n_sources
        if source is not None:
            number = self._number_by_source.setdefault(source, number)
        is_first = number == self._n_sources
        if is_first:
            self._n_sources += 1
        halves = (_choose_half(number), _choose_half(self._n_texts))
        self._n_texts += 1
        return halves, is_first


def _choose_half(number: int) -> int:
    """Return the half, 0 or 1, of a source or text by its number. The numbers 2k and 2k + 1 go to different halves.

    A hash of k decides which goes where, so that the assignment is the same in every run.
    """
    pair, parity = divmod(number, 2)
    digest = hashlib.blake2b(str(pair).encode(), digest_size=1).digest()
    return (digest[0] + parity) % 2


# Sums


class TextHits(NamedTuple):
    """Hold a cell, the links of one relation in one text or chunk, and the hits of the simple rules on them.

    Attributes:
        relation: The relation.
        halves: The halves that the text is in, 0 or 1: by sources, and text by text.
        is_first: Whether the text is the first of its source.
        n_links: The number of links in the cell.
        rule_hits: How many of these links each simple rule hits, (rule,).
    """

    relation: str
    halves: tuple[int, int]
    is_first: bool
    n_links: int
    rule_hits: NDArray[np.int64]


@dataclass(kw_only=True, eq=False)
class LinkPart(PartialSums):
    """Hold the hits of rules and heads on the links of some texts, as sums whose size does not grow with the corpus.

    Attributes:
        sums: The sums by (relation, half by sources, half text by text): the hits of each rule, the hits of each head,
            and each head's mass, its attention to the targets. Their shape is (rule + head + head,).
        n_sources: How many sources, by (relation, half by sources).
        unmeasured: How many links could not be measured, by (relation, reason).
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
            values: Hits and mass of all heads, (cell, 2, layer, head); NaN if the layer has no such head.
        """
        # Make a row for each cell: hits of rules, hits of heads, mass of heads. (cell, rule + head + head)
        rule_hits = np.array([cell.rule_hits for cell in cells])
        rows = np.concatenate([rule_hits, values.reshape(len(cells), -1)], 1)
        # Each quantity counts all links of its cell. A head that the layer lacks has a sum and a count of 0.
        n_links = np.array([cell.n_links for cell in cells])
        is_defined = ~np.isnan(rows)
        counts = np.where(is_defined, n_links[:, None], 0)
        rows = np.where(is_defined, rows, 0.0)
        # Add the rows of each relation and each pair of halves at once.
        rows_by_key: defaultdict[tuple[str, int, int], list[int]] = defaultdict(list)
        for row, cell in enumerate(cells):
            rows_by_key[cell.relation, *cell.halves].append(row)
            if cell.is_first:
                source_key = (cell.relation, cell.halves[0])
                self.n_sources[source_key] = self.n_sources.get(source_key, 0) + 1
        for key, key_rows in rows_by_key.items():
            sums = self.sums.setdefault(key, RunningSums(rows.shape[1:]))
            sums.add(rows[key_rows], counts[key_rows])

    def sum_halves(self, relation: str) -> tuple[RunningSums, RunningSums, str]:
        """Return the sums of the half that selects a head, those of the half that scores it, and how they were split.

        The third item is "sources" if whole sources were assigned to halves, or "texts" if there are too few sources.
        """
        # Add up the sums of both halves for both ways of assigning texts. Half 0 selects, half 1 scores.
        empty_sums = RunningSums(next(iter(self.sums.values())).shape)
        by_sources = [empty_sums, empty_sums]
        by_texts = [empty_sums, empty_sums]
        for key in sorted(self.sums):
            name, source_half, text_half = key
            if name == relation:
                by_sources[source_half] = by_sources[source_half].merge(self.sums[key])
                by_texts[text_half] = by_texts[text_half].merge(self.sums[key])
        # Split by sources if there are enough, or if each text is a source of its own: then both ways are the same.
        selection_sums, scoring_sums = by_sources
        n_sources = self.count_sources(relation)
        is_each_text_a_source = sum(n_sources) == selection_sums.n_texts + scoring_sums.n_texts
        has_enough_sources = min(n_sources) >= MIN_SOURCES and scoring_sums.n_texts >= MIN_TEXTS
        if is_each_text_a_source or has_enough_sources:
            return selection_sums, scoring_sums, "sources"
        selection_sums, scoring_sums = by_texts
        return selection_sums, scoring_sums, "texts"

    def count_sources(self, relation: str) -> list[int]:
        """Return how many sources of a relation each half has, if whole sources are assigned."""
        return [self.n_sources.get((relation, half), 0) for half in range(2)]


class CorpusHalf:
    """Hold the hits of rules and heads on one half of the texts, the selection or the scoring half, of each relation.

    Args:
        sums: For each relation, the sums over the texts of its half, (rule + head + head,).

    Attributes:
        n_texts: How many texts the half has, (relation,).
        n_links: How many links the half has, (relation,).
        rule_hits: Hits of rules, (relation, rule).
        head_hits: Hits of heads, (relation, head).
        head_mass: Mass of heads on the targets, (relation, head).
    """

    def __init__(self, sums: Sequence[RunningSums]) -> None:
        # Join the relations in one object, (relation, rule + head + head). Its own count of texts is not used, as
        # relations differ in texts: 0.
        moments = np.stack([relation_sums.moments for relation_sums in sums], 1)
        joined_sums = RunningSums.from_moments(moments, n_texts=0)
        n_heads = (joined_sums.shape[1] - len(RULES)) // 2
        self.rule_hits = joined_sums[:, : len(RULES)]
        self.head_hits = joined_sums[:, len(RULES) : -n_heads]
        self.head_mass = joined_sums[:, -n_heads:]
        self.n_texts = np.array([relation_sums.n_texts for relation_sums in sums])
        # "c" are counts of links, "s" sums of hits. Each rule counts all links, so take the count of the first.
        self.n_links = self.rule_hits.total("c")[:, 0].astype(np.int64)


# Verdicts


def judge(
    part: LinkPart, kind: str, n_layers_and_heads: tuple[int, int]
) -> tuple[dict[str, Table], dict[str, NDArray[Any]]]:
    """Return the tables and arrays of `Relations`, the most frequent relations first.

    Args:
        part: The sums over all texts.
        kind: The kind of attention.
        n_layers_and_heads: How many layers the model has, and heads in each.
    """
    # Sort the relations: the most frequent first, equally frequent ones by name.
    link_counts: Counter[str] = Counter()
    for (name, *_), sums in part.sums.items():
        link_counts[name] += int(sums.total("c")[0])
    relations = sorted(link_counts, key=lambda name: (-link_counts[name], name))
    if not relations:
        return {}, {array.name: np.zeros((0, 0), DTYPES[array.kind]) for array in Relations.ARRAYS}
    halves = [part.sum_halves(name) for name in relations]
    selection_sums, scoring_sums, dealt_units = zip(*halves, strict=True)
    selection_half = CorpusHalf(selection_sums)
    scoring_half = CorpusHalf(scoring_sums)

    # Find the best simple rule on the scoring half, its accuracy (the baseline), and the reason if there is no verdict,
    # "" = there is a verdict. All are (relation,).
    rule_hits = scoring_half.rule_hits.total("s")
    best_rules = np.array(RULES)[rule_hits.argmax(1)]
    with np.errstate(invalid="ignore"):
        baseline = rule_hits.max(1) / scoring_half.n_links
    n_measured = selection_half.n_links + scoring_half.n_links
    no_verdict = np.select(
        [n_measured < MIN_LINKS, scoring_half.n_texts < MIN_TEXTS],
        [f"fewer than {MIN_LINKS} examples", f"fewer than {MIN_TEXTS} texts to score on"],
        "",
    )
    has_head, arrays = _judge_heads(selection_half, scoring_half, baseline, no_verdict == "")

    # Find the most accurate head of each relation on the selection half; -1 if that half has no link of the relation.
    selection_accuracies = np.nan_to_num(arrays["choice"], nan=-1.0)
    best_heads = np.where(selection_accuracies.max(1) >= 0, selection_accuracies.argmax(1), -1)

    # Make the tables: relations, the heads that the model has, and the links that could not be measured.
    layers, heads = np.nonzero(has_head.reshape(n_layers_and_heads))
    unmeasured_rows = []
    for relation_index, name in enumerate(relations):
        for (relation, reason), n_unmeasured in part.unmeasured.items():
            if relation == name:
                unmeasured_rows.append({"relation": relation_index, "reason": reason, "n": n_unmeasured})
    tables = {
        "relations": Table.of_arrays(
            Relations.TABLES["relations"],
            relation=relations,
            n=n_measured,
            n_texts=selection_half.n_texts + scoring_half.n_texts,
            n_scored=scoring_half.n_links,
            n_texts_scored=scoring_half.n_texts,
            rule=np.where(scoring_half.n_links > 0, best_rules, ""),
            baseline=baseline,
            no_verdict=no_verdict,
            best=best_heads,
            n_sources=[sum(part.count_sources(name)) for name in relations],
            halves=dealt_units,
        ),
        "heads": Table.of_arrays(HEADS, kind=[kind] * len(heads), layer=layers, head=heads),
        "left_out": Table.of(Relations.TABLES["left_out"], unmeasured_rows),
    }
    return tables, arrays


def _judge_heads(
    selection_half: CorpusHalf,
    scoring_half: CorpusHalf,
    baseline: Floats,
    has_verdict: NDArray[np.bool_],
) -> tuple[NDArray[np.bool_], dict[str, NDArray[Any]]]:
    """Return which heads the model has, (layer * head,), and the arrays of `Relations` for these, (relation, head).

    Args:
        selection_half: The half that selects heads.
        scoring_half: The half that scores them.
        baseline: The accuracy of the best simple rule on the scoring half, (relation,).
        has_verdict: Whether there are enough links and texts for a verdict, (relation,).
    """
    # A layer may have fewer heads than others: the heads that it lacks have no link in any relation.
    n_links_of_heads = selection_half.head_hits.total("c") + scoring_half.head_hits.total("c")
    has_head: NDArray[np.bool_] = n_links_of_heads.max(0) > 0
    head_hits = scoring_half.head_hits[:, has_head]
    accuracy_low, accuracy_high = head_hits.share_interval(hits=True)
    # The binomial test over links needs whole hits, so round down. Words with equal largest weights share a hit, and
    # by rounding errors the shares may add up to a little less than a whole number: hence 1e-9.
    rule_accuracy = baseline[:, None]
    n_hits = np.floor(head_hits.total("s") + 1e-9)
    p_over_links = bdtrc(n_hits - 1, scoring_half.n_links[:, None], rule_accuracy)
    # The larger p-value of this test and of the t-test over texts counts.
    p_values = np.maximum(head_hits.p_above(rule_accuracy), p_over_links)
    p_values[~has_verdict] = np.nan
    # A head expresses a relation if it is MARGIN above the baseline, and significant over heads x relations.
    q_values = benjamini_hochberg(p_values)
    is_expressed = (accuracy_low >= rule_accuracy + MARGIN) & (q_values <= LEVEL)
    return has_head, {
        "choice": selection_half.head_hits.ratio()[:, has_head],
        "accuracy": head_hits.ratio(),
        "accuracy_low": accuracy_low,
        "accuracy_high": accuracy_high,
        "mass": scoring_half.head_mass.ratio()[:, has_head],
        "p": p_values,
        "q": q_values,
        "found": is_expressed,
    }
