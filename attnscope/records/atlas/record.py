"""Every head of a model, with the texts that show what it does. NumPy only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from attnscope.records.frame.checks import shaped
from attnscope.records.frame.codec import ARRAY, OMITTED
from attnscope.records.frame.head_table import Column, HeadTable
from attnscope.records.frame.pair_tables import require_known
from attnscope.records.frame.record import StudyRecord
from attnscope.records.heads.descriptions import Descriptions
from attnscope.records.heads.findings import Findings, Head

FURTHEST = 64
"""Profiles tell offsets of up to so many tokens apart."""

MOST_KEYS = 16
"""An example keeps at most so many keys of a row."""

KEPT_MASS = 0.95
"""An example keeps this share of a row, unless that takes more than `MOST_KEYS`."""

LEFT_OUT = " … "
"""Stands in an excerpt for tokens that are not shown."""

Why = Literal["top", "decile", "failure"]
Side = Literal["asks", "gets", "pairs"]

OUTSIDE_SINKS = (
    "what the key would get if each query's attention outside sinks were spread evenly outside sinks (the mean over "
    "texts)"
)
"""What the attention on a key or pair is divided by in its lift."""


@dataclass(frozen=True)
class TokenRow:
    """A token, or a pair of tokens, on which much of a head's attention lies in the sampled texts.

    Attributes:
        side: "asks": a query that gives attention away (to neither special tokens nor the first); "gets": a key;
            "pairs": a query and a key.
        tokens: Its label; of a pair the query's and the key's.
        mass: Mean attention weight: of "asks" what a query gives away, of "gets" what a query gives to all such keys
            of its text, of "pairs" what the query gives to all such keys. 0 to 1. It is the mean over texts of each
            text's mean, so all texts weigh the same.
        lift: The mean over texts of the attention in a text divided by an even share of it; at least 0. For "gets" and
            "pairs" the even share is what the key would get if each query's attention outside sinks were spread evenly
            over its keys outside sinks. For "asks" it is what uniform attention over all keys would give.
        low: Lower end of the 95% interval of the lift, over texts; NaN where there are fewer than two.
        high: Upper end.
        count: How many queries it was seen with.
        n_texts: In how many texts.
    """

    side: Side
    tokens: tuple[str, ...]
    mass: float
    lift: float
    low: float
    high: float
    count: int
    n_texts: int


@dataclass(frozen=True)
class ExampleFacts:
    """A text as an example of a head: what it stands for, and where it comes from.

    Attributes:
        head: The head's place in `Atlas.heads`.
        why: "top": one of the texts with the highest scores; "decile": a text drawn from a decile of all scores;
            "failure": a text with a token whose attention the head's description explains badly.
        rank: From 0: of "top" and "failure" the place, best (or worst explained) first; of "decile" the decile.
        score: The text's score by `Atlas.rank`; NaN of a "failure".
        text: The text's number in the corpus.
        source: Where it comes from, such as "alice.txt:12".
        n_tokens: How many tokens the text, or the chunk of a long one, has.
        labels: The labels of the tokens that are shown.
        focus: Which of the shown tokens to look at first, the query that counts most; -1 = none.
        excerpt: The source's own characters of the shown tokens and between them, with `LEFT_OUT` for tokens that are
            not shown; empty where the tokenizer does not tell them.
        offsets: Of each shown token its first and last + 1 character in the excerpt; an empty range where it stands for
            no character, as special tokens do. As many as `labels`, or none without an excerpt.
    """

    head: int = field(metadata={"index": "heads"})
    why: Why
    rank: int
    score: float
    text: int
    source: str
    n_tokens: int
    labels: tuple[str, ...]
    focus: int = field(default=-1, metadata={"index": "labels", "least": -1})
    excerpt: str = field(default="", metadata=OMITTED)
    offsets: tuple[tuple[int, int], ...] = field(default=(), metadata=OMITTED)

    def pieces(self) -> list[tuple[str, str]]:
        """Of each shown token what stands before it, and its characters in the source; its label where it has none."""
        if not self.excerpt:
            return [(" " * (at > 0), label) for at, label in enumerate(self.labels)]
        pieces, end = [], 0
        for label, (start, stop) in zip(self.labels, self.offsets, strict=True):
            pieces.append((self.excerpt[end:start], self.excerpt[max(start, end) : stop] or label))
            end = max(end, stop)
        return pieces

    def require_whole(self) -> None:
        """Refuses tokens that do not stand one after the other in the excerpt."""
        starts = [start for start, _ in self.offsets]
        within = all(0 <= start <= stop <= len(self.excerpt) for start, stop in self.offsets)
        if not within or starts != sorted(starts) or len(self.offsets) != (len(self.labels) if self.excerpt else 0):
            raise ValueError("an example's tokens stand beside its text")


@dataclass(frozen=True, eq=False)
class Example:
    """An example with the attention of its head.

    Across, in an encoder-decoder, the row of a token is the decoder's as it writes that token again; keys are the
    encoder's.

    Attributes:
        facts: What it stands for.
        places: Places of the shown tokens in their text, (token,), int32, rising: a window around what counts, and the
            special tokens and the first one beside it.
        special: Whether each is a special token, (token,), bool.
        starts: Where each token's kept keys begin in `keys` and `codes`, and where the last ends, (token + 1,), int64.
        keys: The kept keys, as numbers of shown tokens, uint8; largest weight first.
        codes: Their weights x 255, rounded, uint8: off by at most 1/510.
    """

    facts: ExampleFacts
    places: NDArray[np.int32]
    special: NDArray[np.bool_]
    starts: NDArray[np.int64]
    keys: NDArray[np.uint8]
    codes: NDArray[np.uint8]

    def weights(self) -> NDArray[np.float32]:
        """The kept weights, (query, key) of shown tokens; 0 where nothing was kept."""
        n = len(self.places)
        weights = np.zeros((n, n), np.float32)
        rows = np.repeat(np.arange(n), np.diff(self.starts))
        weights[rows, self.keys] = self.codes / np.float32(255)
        return weights


@dataclass(frozen=True, eq=False, repr=False)
class Atlas(StudyRecord):
    """What every head of a model does on a corpus, with the texts that show it.

    Attributes:
        run: What made it, as `Findings.run`.
        corpus: What it was made on, as `Findings.corpus`; `n_sampled` texts, drawn by their hash, are what profiles,
            token tables and distances rest on.
        options: What was chosen and what names mean, as `Findings.options`; `rank` describes the score.
        rank: The name of the score that examples are ranked by.
        heads: One entry a head, by kind, layer, head; with measures, roles and effects as in Findings.
        facts: The examples, by head, why and rank; see `examples_of`.
        tables: The token tables of each head, as many as `heads`.
        profiles: Mean attention weight by offset of the key from the query, (head, 2 * FURTHEST + 3), float32: further
            back than FURTHEST, -FURTHEST to FURTHEST, further ahead. Sums to 1, or less with a learned sink.
        even_profiles: The same of uniform attention over the allowed keys.
        deciles: Ends of the deciles of the score over `options["sample"]` texts, (head, 11), float32; NaN where it is
            defined on none.
        distances: Root of the mean squared Hellinger distance of the rows of two heads, 0 to 1, (head, head), float32;
            NaN between kinds, and where it was not measured.
        positions: Heads on a plane so that near ones are alike (multidimensional scaling), (head, 2), float32.
        places: `Example.places` of all examples, one after the other.
        special: `Example.special`, likewise.
        starts: `Example.starts` without the first, counted on over all examples, (token,), int64.
        keys: `Example.keys`, likewise.
        codes: `Example.codes`, likewise.
        descriptions: What each head does in a line; None where heads were not described.
    """

    SCHEMA: ClassVar[str] = "attnscope.atlas/1"
    HOLDS: ClassVar[str] = "heads"
    LISTS_ARRAYS: ClassVar[bool] = False

    rank: str
    heads: tuple[Head, ...] = field(metadata={"distinct": "address"})
    facts: tuple[ExampleFacts, ...]
    tables: tuple[tuple[TokenRow, ...], ...] = field(metadata=shaped("heads"))
    profiles: NDArray[np.float32] = field(metadata=shaped("heads n_offsets", **ARRAY))
    even_profiles: NDArray[np.float32] = field(metadata=shaped("heads n_offsets", **ARRAY))
    deciles: NDArray[np.float32] = field(metadata=shaped("heads 11", **ARRAY))
    distances: NDArray[np.float32] = field(metadata=shaped("heads heads", **ARRAY))
    positions: NDArray[np.float32] = field(metadata=shaped("heads 2", **ARRAY))
    places: NDArray[np.int32] = field(metadata=shaped("n_tokens", **ARRAY))
    special: NDArray[np.bool_] = field(metadata=shaped("n_tokens", **ARRAY))
    starts: NDArray[np.int64] = field(metadata=shaped("n_tokens", **ARRAY))
    keys: NDArray[np.uint8] = field(metadata=ARRAY)
    codes: NDArray[np.uint8] = field(metadata=shaped("keys", **ARRAY))
    descriptions: Descriptions | None = field(default=None, metadata=OMITTED)

    n_offsets: ClassVar[int] = 2 * FURTHEST + 3

    @property
    def n_tokens(self) -> int:
        """How many tokens its examples show."""
        return sum(len(facts.labels) for facts in self.facts)

    @property
    def findings(self) -> Findings:
        """Measures, roles and descriptions alone."""
        return Findings(self.run, self.corpus, self.options, self.heads, descriptions=self.descriptions)

    def examples(self) -> list[Example]:
        """All examples with their attention, in the order of `facts`."""
        examples, token = [], 0
        ends = np.concatenate([[0], self.starts])
        for facts in self.facts:
            tokens = slice(token, token + len(facts.labels))
            starts = ends[tokens.start : tokens.stop + 1]
            kept = slice(int(starts[0]), int(starts[-1]))
            examples.append(
                Example(
                    facts, self.places[tokens], self.special[tokens], starts - kept.start, self.keys[kept],
                    self.codes[kept],
                )
            )  # fmt: skip
            token = tokens.stop
        return examples

    def only(self, picked: Sequence[tuple[int, int]]) -> Atlas:
        """The atlas of some heads, (layer, head), of every kind."""
        require_known([(head.layer, head.head) for head in self.heads], picked, "this atlas")
        mine = [at for at, head in enumerate(self.heads) if (head.layer, head.head) in set(picked)]
        number = {at: new for new, at in enumerate(mine)}
        examples = [example for example in self.examples() if example.facts.head in number]
        return replace(
            self,
            heads=tuple(self.heads[at] for at in mine),
            facts=tuple(replace(example.facts, head=number[example.facts.head]) for example in examples),
            tables=tuple(self.tables[at] for at in mine),
            **{name: getattr(self, name)[mine] for name in ("profiles", "even_profiles", "deciles", "positions")},
            distances=self.distances[np.ix_(mine, mine)],
            **join_examples(examples),
        )

    def head_table(self) -> HeadTable:
        """Everything that is known per head: as `Findings.head_table`, scores, places on the map, tokens, pairs."""
        table = self.findings.head_table()
        deciles, places = self.deciles.astype(np.float64), self.positions.astype(np.float64)
        what = str(self.options.get("rank", ""))
        columns = [
            Column(name, deciles[:, at], what=what, in_files=False, label=f"{self.rank} ({text})")
            for name, at, text in (("score", 5, "median text"), ("score_p90", 9, "90th percentile"))
        ]
        if np.isfinite(places).any():
            what = "heads that attend alike stand near each other"
            columns += [Column(f"map_{axis}", places[:, at], what=what, in_files=False) for at, axis in enumerate("xy")]
        tokens = [sorted({token for row in rows for token in row.tokens}) for rows in self.tables]
        pairs = [[row.tokens for row in rows if row.side == "pairs"] for rows in self.tables]
        texts = (Column("tokens", tokens, in_files=False), Column("pairs", pairs, in_files=False))
        return HeadTable(table.heads, (*table.columns, *columns, *texts))

    def rows(self) -> Iterable[Sequence[Any]]:
        """One row per head, as `Findings.rows`."""
        return self.findings.rows()

    def to_csv(self, *, every: bool = False) -> str:
        """The table as CSV, as `Findings.to_csv`."""
        return self.findings.to_csv(every=every)

    def require_whole(self) -> None:
        """Refuses arrays that do not fit each other."""
        ends = np.concatenate([[0], self.starts])
        if (np.diff(ends) < 0).any() or ends[-1] != len(self.keys):
            raise ValueError("the attention of its examples is cut off")
        for example in self.examples():
            if len(example.keys) and int(example.keys.max()) >= len(example.places):
                raise ValueError("an example attends to a token that is not shown")


def join_examples(examples: Sequence[Example]) -> dict[str, Any]:
    """The arrays of all examples, one after the other, as an atlas has them."""
    ends, n_keys = [np.zeros(0, np.int64)], 0
    for example in examples:
        ends.append(n_keys + example.starts[1:] - example.starts[0])
        n_keys += len(example.keys)

    def join(name: str, dtype: type) -> Any:
        return np.concatenate([np.zeros(0, dtype), *(getattr(each, name) for each in examples)]).astype(dtype)

    return {
        "places": join("places", np.int32), "special": join("special", np.bool_), "starts": np.concatenate(ends),
        "keys": join("keys", np.uint8), "codes": join("codes", np.uint8),
    }  # fmt: skip
