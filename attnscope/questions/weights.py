"""Declare the result about weights, what heads copy, match, read and write: its columns and its report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import amount
from attnscope.options import heads_from, option, options, seed_option
from attnscope.report.blocks import Block, Graph, HeadMap, Link, Note, Ranking, Report, Words, rank_heads
from attnscope.report.numbers import fixed, largest_first, percent, small_number
from attnscope.report.wording import report_on
from attnscope.results.result import Result
from attnscope.results.table import HEADS, Array, Column, Floats, Table, count, number, share, text

READS = {"Q": "query", "K": "key", "V": "value"}
"""By what a head reads another: its queries, keys or values."""

COMPOSITIONS = tuple(READS)

SHARES = ("previous", "same", "next", "first")
"""The tokens whose attention by position alone is known."""

_MOST = 8
"""Heads and pairs that are listed; pairs in the graph, for each of queries, keys and values."""

_ROUNDING = 1e-6
"""Shares that differ by less are the same."""

_COPYING = "sum of the eigenvalues of W_U W_O W_V W_E by the sum of their absolute values"
_MATCHING = "the same of W_E' W_Q' W_K W_E, each query's scores less their mean"


def _score(name: str, meaning: str) -> tuple[Column, ...]:
    """Return a score of eigenvalues, -1 to 1, and that of random heads with the same singular values."""
    return (
        number(name, meaning, range=(-1, 1)),
        number(
            f"{name}_random", "its mean over random heads with the same singular values", range=(-1, 1)
        ),
        number(f"{name}_least", "the least of the random heads", range=(-1, 1)),
        number(f"{name}_most", "the largest of the random heads", range=(-1, 1)),
    )


N_DRAWS = 39
"""Random heads that scores are compared with; one more lies outside all of them in 5% of cases."""

SCORE_PARTS = ("", "_random", "_least", "_most")
"""How the columns of a score end: its value, and the mean, the least and the largest of random heads."""


@options
class WeightsOptions:
    """The options for reading heads off their weights."""

    pick: tuple[tuple[int, int], ...] | None = option(
        "Print everything about these heads, such as L3H1,L5H11.",
        default=None,
        read=heads_from,
        panel="Heads",
    )
    seed: int = seed_option("the random heads that scores are compared with")


class HeadWeights(Result):
    """The scores of all heads of a model from their weights alone, without any text.

    `options` has the `kind` of attention, what tokens stand for what is written (`ends`), how `places` are known to the
    model, over how many places shares are means (`n_places`), the `dimension` of the stream that heads can read, and
    `n_draws`, the random heads that scores are compared with. `picked` are the heads that are shown one by one.
    """

    SCHEMA: ClassVar[str] = "attnscope.weights/2"
    TABLES: ClassVar[Mapping[str, Sequence[Column]]] = {
        "heads": (
            *HEADS,
            *_score("copying", _COPYING),
            *_score("matching", _MATCHING),
            number(
                "same_nats", "by how much a token's score for itself is above that for others", "nats"
            ),
            share(
                "previous", "attention to the previous token by position alone", short="previous token"
            ),
            share("same", "attention to the token itself by position alone", short="itself"),
            share("next", "attention to the next token by position alone"),
            share("first", "attention to the first token by position alone", short="first token"),
        ),
        "directions": (
            count("head", "the head", refers_to="heads"),
            text("of", "writes: of W_O W_V; seeks: of W_Q' W_K"),
            share("share", "of the squared norm of the head's matrix"),
            text("source", "tokens at one end of a singular direction: what is read, or a query"),
            text("target", "tokens at its other end: those that rise by it, or keys that are sought"),
        ),
    }
    ARRAYS: ClassVar[Sequence[Array]] = (
        Array(
            "composition",
            "|X Y| / (|X| |Y|) by Q, K and V, of what one head writes and another reads",
            "share",
            (0, 1),
            axes=("3", "heads", "heads"),
        ),
        Array(
            "sender_spread",
            "fourth powers of singular values by the squared sum of squares",
            axes=("heads",),
        ),
        Array(
            "receiver_spread", "the same of what queries, keys and values read by", axes=("3", "heads")
        ),
    )

    @property
    def expected(self) -> Floats:
        """Return the mean share for random directions, (Q K V, sender, receiver); see `expected_share`."""
        return expected_share(
            self["sender_spread"], self["receiver_spread"], int(self.options["dimension"])
        )

    @property
    def excess(self) -> Floats:
        """Return shares above the expectation for random directions, (Q K V, sender, receiver)."""
        excess: Floats = self["composition"] - self.expected
        return excess

    def strongest(self, by: str, most: int = 10) -> list[tuple[int, int]]:
        """Return the pairs (sender, receiver) that compose most by "Q", "K" or "V", above random directions."""
        excess = self.excess[COMPOSITIONS.index(by)]
        return [divmod(place, len(excess)) for place in largest_first(excess, most)]

    def is_outside(self, name: str) -> NDArray[np.bool_]:
        """Return whether a score, "copying" or "matching", is beyond those of all random heads, (head,)."""
        heads = self.table("heads")
        outside: NDArray[np.bool_] = (heads[name] < heads[f"{name}_least"]) | (
            heads[name] > heads[f"{name}_most"]
        )
        return outside

    def only(self, picked: Sequence[tuple[int, int]]) -> Self:
        """Return the same result, which tells what it knows of some heads, (layer, head).

        Raises:
            UsageError: There is no such head.
        """
        self.require_heads(picked)
        places = self.table("heads").places
        rows = [places.index(place) for place in dict.fromkeys(picked)]
        return replace(self, options={**self.options, "picked": rows})

    def report(self, **shown: Any) -> Report:
        """Return which heads feed which and what heads copy; of picked heads all that is known."""
        picked = self.options.get("picked") or []
        likeness = _likeness(self)
        named = ", ".join(self.head_names[row] for row in picked)
        blocks = (
            [block for row in picked for block in _of_head(self, row)] if picked else [*_of_all(self)]
        )
        answer = [f"what the weights of {named} say"] if picked else _answer(self)
        guide = filter(None, [*_guide(self), likeness])
        return report_on(self, answer, blocks, guide, subtitle="what the weights of its heads say")


def expected_share(senders: Floats, receivers: Floats, dimension: int) -> Floats:
    """Return the mean share for random directions: to second order (1 - variation / 8) / sqrt(d)."""
    expected: Floats = (1 - np.minimum(variation_of(senders, receivers, dimension), 4) / 8) / np.sqrt(
        dimension
    )
    return expected


def variation_of(senders: Floats, receivers: Floats, dimension: int) -> Floats:
    """Return the variance of the squared share over its squared mean, for random directions, (Q K V, sender, receiver).

    The squared share is tr(A R B R') with A and B of trace 1 and R random orthogonal: its mean is 1/d, and its
    variance 2 |A - 1/d|² |B - 1/d|² / ((d - 1) (d + 2)), by Schur's lemma on traceless symmetric matrices.

    Args:
        senders: Sum of fourth powers of the singular values by the squared sum of squares, of W_O W_V, (head,).
        receivers: The same of what queries, keys and values read by, (Q K V, head).
        dimension: Dimensions of the stream that heads can read, d.
    """
    d = dimension
    sent = np.maximum(senders[None, :, None] - 1 / d, 0)
    received = np.maximum(receivers[:, None, :] - 1 / d, 0)
    variation: Floats = 2 * d**2 * sent * received / ((d - 1) * (d + 2))
    return variation


# What is shown of all heads


def _answer(weights: HeadWeights) -> Iterator[str]:
    """Say which pair composes most, and which head copies most."""
    excess = weights.excess
    # The largest excess over chance, (Q K V, sender, receiver).
    if np.isfinite(excess).any():
        by, sender, receiver = np.unravel_index(np.nanargmax(excess), excess.shape)
        place = int(by), int(sender), int(receiver)
        names = weights.head_names
        part, chance = small_number(weights["composition"][place]), small_number(weights.expected[place])
        read = f"{names[place[2]]}'s {READS[COMPOSITIONS[place[0]]]}"
        numbers = f"composition {part} from 0 to 1, of random weights {chance}"
        if excess[place] > 0:
            yield f"{read} reads what {names[place[1]]} writes most: {numbers}"
        else:
            most = f"{read} of {names[place[1]]}: {numbers}"
            yield f"No head reads what another writes more than by chance. The most is {most}"
    copying = weights.table("heads")["copying"]
    if np.isfinite(copying).any() and not _likeness(weights):
        head = int(np.nanargmax(copying))
        yield f"{weights.head_names[head]} copies most what it attends to: {fixed(copying[head], 2)} of 1"


def _of_all(weights: HeadWeights) -> Iterator[Block]:
    # Which heads read which, and what each copies.
    yield _pairs(weights)
    if not _likeness(weights):
        yield from _copying(weights)
    # The heads that positions alone would send to the previous token.
    heads = weights.table("heads")
    above = np.flatnonzero(heads["previous"] > heads.part("previous", "baseline") + _ROUNDING)
    if len(above):
        order = above[largest_first(heads["previous"][above], _MOST)].tolist()
        heading = "mean weight if position alone decided where heads look, 0 to 1"
        yield rank_heads(weights, ["previous", "first", "same"], order, heading=heading)
    yield from _figures(weights)


def _pairs(weights: HeadWeights) -> Block:
    """List the pairs that compose most by queries, keys or values, those farthest above chance first."""
    names = weights.head_names
    pairs = [
        (row, *pair) for row, by in enumerate(COMPOSITIONS) for pair in weights.strongest(by, _MOST)
    ]
    places = np.array(pairs, np.int64).reshape(-1, 3).T
    parts, chances = weights["composition"][tuple(places)], weights.expected[tuple(places)]
    order = largest_first(parts - chances)
    about = (number("composition", range=(0, 1)), number("chance", range=(0, 1), label="by chance"))
    return Ranking(
        heading="which heads read which: writer → reader",
        what="pair",
        names=[f"{names[sender]} → {names[receiver]}" for _, sender, receiver in pairs],
        table=Table.of_arrays(about, composition=parts, chance=chances),
        columns=[
            Words("through its", [READS[COMPOSITIONS[row]] for row, *_ in pairs]),
            "composition",
            "chance",
        ],
        order=[row for row in order if parts[row] > 0],
    )


def _copying(weights: HeadWeights) -> Iterator[Block]:
    """List the heads that copy what they attend to, and those that take it away."""
    heads = weights.table("heads")
    copying = heads["copying"]
    # Heads without a path to the vocabulary have no score.
    if not np.isfinite(copying).any():
        return
    # What the first singular directions read and write.
    reads, writes = _first_tokens(weights)
    columns = [
        Words("copying", [_starred(weights, "copying", row) for row in range(len(heads))], right=True),
        Words("reads", reads, wraps=True),
        Words("writes", writes, wraps=True),
    ]
    order = largest_first(copying)
    # Scores beyond all random heads, beside how many chance would give.
    n_outside = int(weights.is_outside("copying").sum())
    by_chance = 2 / (N_DRAWS + 1) * len(heads)
    counted = f"{n_outside} of {amount(len(heads), 'head')} are beyond all random ones; by chance {by_chance:.0f}"
    # Both ends of the same order.
    for title, rows in (
        ("copy what they attend to", [row for row in order if copying[row] >= 0]),
        ("take away what they attend to", [row for row in order[::-1] if copying[row] < 0]),
    ):
        if rows:
            notes = [counted] if title.startswith("copy") else []
            yield rank_heads(
                weights, columns, rows[:_MOST], heading=f"heads that {title} most", notes=notes
            )


def _first_tokens(weights: HeadWeights) -> tuple[list[str], list[str]]:
    """Return what each head reads and writes by its first singular direction."""
    directions = weights.table("directions")
    reads, writes = ([""] * len(weights.table("heads")) for _ in range(2))
    for row in range(len(directions)):
        head = int(directions["head"][row])
        if directions["of"][row] == "writes" and not reads[head]:
            reads[head], writes[head] = str(directions["source"][row]), str(directions["target"][row])
    return reads, writes


def _starred(weights: HeadWeights, name: str, row: int) -> str:
    """Return a score, with a star where it is beyond all random heads."""
    return fixed(weights.table("heads")[name][row], 2) + ("*" if weights.is_outside(name)[row] else "")


def _figures(weights: HeadWeights) -> Iterator[Block]:
    """Draw maps of scores, and the strongest pairs as a graph."""
    heads, names = weights.table("heads"), weights.head_names
    # A map per score that any head has.
    columns = [name for name in ("copying", "matching", "previous") if np.isfinite(heads[name]).any()]
    for name in columns or ["copying"]:
        yield HeadMap(printed="never", figure="weights-heads", heads=heads, column=name)
    # The strongest pairs by Q, K and V as links from sender to receiver.
    links = []
    for row, by in enumerate(COMPOSITIONS):
        for sender, receiver in weights.strongest(by, _MOST):
            part = float(weights["composition"][row, sender, receiver])
            if part > 0:
                links.append(Link(names[sender], names[receiver], READS[by], part))
    if links:
        yield Graph(
            printed="never",
            figure="weights-graph",
            title="which heads feed which: the strongest pairs",
            layers=dict(zip(names, heads["layer"].tolist(), strict=True)),
            links=links,
            notes=[
                f"the {amount(_MOST, 'pair')} each that compose most by queries, keys and values above chance; "
                "wider = a larger share; a line goes up from the head that writes to the head that reads"
            ],
        )


# What is shown of one head


def _of_head(weights: HeadWeights, row: int) -> Iterator[Block]:
    """Show all that is known of one head."""
    heads, names = weights.table("heads"), weights.head_names
    # Scores beside the range of random heads.
    lines = []
    for name in ("copying", "matching"):
        mean, low, high = (
            fixed(heads[f"{name}_{part}"][row], 2) for part in ("random", "least", "most")
        )
        lines.append(f"{name} {_starred(weights, name, row)}  random {mean} [{low}, {high}]")
    # Where the head would look if tokens had no content.
    places = "  ".join(f"{name} {fixed(heads[name][row], 2)}" for name in SHARES)
    nats = float(heads["same_nats"][row])
    side = "above" if nats >= 0 else "below"
    lines.append(
        f"by position alone: {places}; the same token scores {fixed(abs(nats), 2)} nats {side} others"
    )
    yield Note(heading=names[row], lines=lines)

    directions = weights.table("directions")
    # What its weights read and write, then what its queries seek in keys.
    for of, ends in (("writes", ("reads", "writes")), ("seeks", ("queries", "keys"))):
        order = np.flatnonzero((directions["head"] == row) & (directions["of"] == of)).tolist()
        shares = [
            percent(value, 1) if np.isfinite(value) else "" for value in directions["share"].tolist()
        ]
        if order:
            yield Ranking(
                heading=f"singular directions, {' → '.join(ends)}",
                what="share",
                names=shares,
                table=directions,
                columns=[
                    Words(ends[0], directions["source"].tolist(), wraps=True),
                    Words(ends[1], directions["target"].tolist(), wraps=True),
                ],
                order=order,
                most=len(order),
            )
    yield from _links_of(weights, row)


def _links_of(weights: HeadWeights, row: int) -> Iterator[Block]:
    """Show which heads a head reads, and which read it."""
    names = weights.head_names
    titles: list[str] = []
    columns: dict[str, list[str]] = {by: [] for by in COMPOSITIONS}
    # The same head as receiver, then as sender; composition is (Q K V, sender, receiver).
    for title, place in (("reads from", np.s_[:, :, row]), ("is read by", np.s_[:, row])):
        excess, composition = weights.excess[place], weights["composition"][place]  # (Q K V, other head)
        if not np.isfinite(excess).any():
            continue
        titles.append(title)
        for by, mine, parts in zip(COMPOSITIONS, excess, composition, strict=True):
            strongest = largest_first(mine, 3)
            columns[by].append(
                "  ".join(f"{names[other]} {fixed(parts[other], 2)}" for other in strongest)
            )
    if titles:
        yield Ranking(
            heading="composition, most above chance",
            what="",
            names=titles,
            table=Table({}, {}),
            columns=[Words(f"by {READS[by]}", texts, wraps=True) for by, texts in columns.items()],
            order=range(len(titles)),
        )


# What is said


def _likeness(weights: HeadWeights) -> str:
    """Say how far tokens stand for what is written; nothing where they are logits."""
    if weights.options.get("ends") == "static embeddings":
        return "no language-modelling head: static embeddings stand for W_U; tokens and copying are only a proxy"
    if weights.options.get("kind") == "encoder":
        return "an encoder fills in masked words: tokens and copying are only a proxy for what a head does there"
    return ""


def _guide(weights: HeadWeights) -> Iterator[str]:
    """Say how to read it."""
    yield (
        "composition: |X Y| / (|X| |Y|), 0 to 1, X what one head writes, Y what another reads; by chance: its mean for "
        "random directions with the same singular values"
    )
    if not _likeness(weights) or weights.options.get("picked"):
        yield (
            "copying: 1 = what is attended to is written, −1 = it is taken away; * = beyond all of "
            f"{N_DRAWS} random heads with the same singular values"
        )
