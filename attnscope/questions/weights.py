"""Declare the result about weights, what heads copy, match, read and write: its columns and its report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import amount
from attnscope.options import option, options, read_heads, seed_option
from attnscope.report.blocks import Block, Graph, HeadMap, Link, Note, Ranking, Report, Words, rank_heads
from attnscope.report.numbers import fixed, largest_first, percent, small_number
from attnscope.report.wording import report_on
from attnscope.results.result import Result
from attnscope.results.table import HEADS, Array, Column, Floats, Table, count, number, share, text

INPUT_NAMES = {"Q": "query", "K": "key", "V": "value"}
"""The inputs by which a head can read another head, by their letters in composition."""

INPUT_LETTERS = tuple(INPUT_NAMES)

POSITION_SHARES = ("previous", "same", "next", "first")
"""The columns of attention by position alone: the tokens that are attended to."""

_MOST = 8
"""Heads of a list; pairs of a list or a graph, for each of queries, keys and values."""

_COMPOSITION = (
    "composition: overlap of what one head writes with what another reads, 0 (none) to 1 (all of it)"
)

_ROUNDING = 1e-6
"""Shares that differ by less are equal."""

_COPYING = "sum of the eigenvalues of W_U W_O W_V W_E by the sum of their absolute values"
_MATCHING = "the same of W_E' W_Q' W_K W_E, each query's scores less their mean"


def _score(name: str, meaning: str) -> tuple[Column, ...]:
    """Declare a score of eigenvalues, -1 to 1, and its mean, least and largest value over random heads."""
    return (
        number(name, meaning, range=(-1, 1)),
        number(
            f"{name}_random", "its mean over random heads with the same singular values", range=(-1, 1)
        ),
        number(f"{name}_least", "the least of the random heads", range=(-1, 1)),
        number(f"{name}_most", "the largest of the random heads", range=(-1, 1)),
    )


N_DRAWS = 39
"""Random heads that scores are compared with: another random head lies outside all of them in 5% of cases."""

SCORE_SUFFIXES = ("", "_random", "_least", "_most")
"""The endings of the four columns of `_score`."""


@options
class WeightsOptions:
    """The options for reading heads off their weights."""

    pick: tuple[tuple[int, int], ...] | None = option(
        "Print everything about these heads, such as L3H1,L5H11.",
        default=None,
        read=read_heads,
        panel="Heads",
    )
    seed: int = seed_option("the random heads that scores are compared with")


class HeadWeights(Result):
    """The scores of all heads of a model from their weights alone, without any text.

    `options` has the `kind` of attention; `ends`: the tokens that name what heads write (logits or static embeddings);
    `places`: how the model knows positions; `n_places`: over how many positions shares are means; `dimension`: that of
    the residual stream that heads can read; `n_draws`: the random heads that scores are compared with; and `picked`:
    the rows of heads that are shown one by one.
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
        """Return the composition of random directions, (Q K V, sender, receiver); see `expected_share`."""
        return expected_share(
            self["sender_spread"], self["receiver_spread"], int(self.options["dimension"])
        )

    @property
    def excess(self) -> Floats:
        """Return composition less that of random directions, (Q K V, sender, receiver)."""
        excess: Floats = self["composition"] - self.expected
        return excess

    def strongest(self, by: str, most: int = 10) -> list[tuple[int, int]]:
        """Return the pairs (sender, receiver) that compose most by "Q", "K" or "V", above random directions."""
        excess = self.excess[INPUT_LETTERS.index(by)]
        return [divmod(place, len(excess)) for place in largest_first(excess, most)]

    def is_outside(self, name: str) -> NDArray[np.bool_]:
        """Return which heads have a score, "copying" or "matching", beyond all random heads, (head,)."""
        heads = self.table("heads")
        is_below = heads[name] < heads[f"{name}_least"]
        is_outside: NDArray[np.bool_] = is_below | (heads[name] > heads[f"{name}_most"])
        return is_outside

    def only(self, picked: Sequence[tuple[int, int]]) -> Self:
        """Return the same result, whose report is on some heads, (layer, head), one by one.

        Raises:
            UsageError: There is no such head.
        """
        self.require_heads(picked)
        places = self.table("heads").places
        rows = [places.index(place) for place in dict.fromkeys(picked)]
        return replace(self, options={**self.options, "picked": rows})

    def report(self, **shown: Any) -> Report:
        """Return which heads feed which and what heads copy; or everything about picked heads."""
        picked = self.options.get("picked") or []
        if picked:
            names = ", ".join(self.head_names[row] for row in picked)
            answer = [f"what the weights of {names} say"]
            blocks: list[Block] = []
            for row in picked:
                blocks += _of_head(self, row)
        else:
            answer = list(_answer(self))
            blocks = list(_of_all(self))
        guide = filter(None, [*_guide(self), _proxy_line(self)])
        return report_on(self, answer, blocks, guide, subtitle="what the weights of its heads say")


def expected_share(senders: Floats, receivers: Floats, dimension: int) -> Floats:
    """Return the mean composition of random directions, (Q K V, sender, receiver); see `variation_of` for arguments.

    Of a random X with mean m, the mean of sqrt(X) is sqrt(m) (1 - variation / 8), to second order.
    """
    variation = np.minimum(variation_of(senders, receivers, dimension), 4)
    expected: Floats = (1 - variation / 8) / np.sqrt(dimension)
    return expected


def variation_of(senders: Floats, receivers: Floats, dimension: int) -> Floats:
    """Return the variance of squared composition by its squared mean, for random directions, as `expected_share` does.

    Squared composition is tr(A R B R') with A and B of trace 1 and R random orthogonal: its mean is 1/d, and its
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


# All heads


def _answer(weights: HeadWeights) -> Iterator[str]:
    """Say which pair composes most, and which head copies most."""
    names = weights.head_names
    # (Q K V, sender, receiver).
    excess = weights.excess
    if np.isfinite(excess).any():
        index = np.unravel_index(np.nanargmax(excess), excess.shape)
        by, sender, receiver = map(int, index)
        part = small_number(weights["composition"][index])
        chance = small_number(weights.expected[index])
        read = f"{names[receiver]}'s {INPUT_NAMES[INPUT_LETTERS[by]]}"
        numbers = f"composition {part}; random weights have {chance} on average"
        if excess[index] > 0:
            yield f"{read} reads most of what {names[sender]} writes: {numbers}"
        else:
            nearest = f"{read} and what {names[sender]} writes: {numbers}"
            yield f"No head reads what another writes more than by chance. Nearest are {nearest}"
        yield _COMPOSITION
    copying = weights.table("heads")["copying"]
    if np.isfinite(copying).any() and not _proxy_line(weights):
        head = int(np.nanargmax(copying))
        yield f"{names[head]} copies most what it attends to: {fixed(copying[head], 2)} of 1"


def _of_all(weights: HeadWeights) -> Iterator[Block]:
    """Yield which heads read which, which heads copy, which look to the previous token by position, and figures."""
    yield _pairs(weights)
    if not _proxy_line(weights):
        yield from _copying(weights)
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
    expected = weights.expected
    pairs = []
    inputs = []
    rows = []
    for index, by in enumerate(INPUT_LETTERS):
        for sender, receiver in weights.strongest(by, _MOST):
            pairs.append(f"{names[sender]} → {names[receiver]}")
            inputs.append(INPUT_NAMES[by])
            at_pair = (index, sender, receiver)
            rows.append((weights["composition"][at_pair], expected[at_pair]))
    columns = (
        number("composition", range=(0, 1)),
        number("chance", range=(0, 1), label="random weights"),
    )
    table = Table.of_rows(columns, rows)
    order = largest_first(table["composition"] - table["chance"])
    return Ranking(
        heading="which heads read which: writer → reader",
        header="pair",
        names=pairs,
        table=table,
        columns=[Words("through its", inputs), "composition", "chance"],
        order=[row for row in order if table["composition"][row] > 0],
    )


def _copying(weights: HeadWeights) -> Iterator[Block]:
    """List the heads that copy what they attend to, and those that take it away."""
    heads = weights.table("heads")
    copying = heads["copying"]
    # Heads without a path to the vocabulary have no score.
    if not np.isfinite(copying).any():
        return
    reads, writes = _first_tokens(weights)
    columns = [
        Words("copying", _starred(weights, "copying"), right=True),
        Words("reads", reads, wraps=True),
        Words("writes", writes, wraps=True),
    ]
    order = largest_first(copying)
    # Of N_DRAWS + 1 random heads, one is the least and one the largest.
    n_outside = int(weights.is_outside("copying").sum())
    n_by_chance = 2 / (N_DRAWS + 1) * len(heads)
    note = f"{n_outside} of {amount(len(heads), 'head')} are beyond all random ones; by chance {n_by_chance:.0f}"
    # Both ends of the same order.
    copiers = [row for row in order if copying[row] >= 0][:_MOST]
    removers = [row for row in reversed(order) if copying[row] < 0][:_MOST]
    if copiers:
        heading = "heads that copy what they attend to most"
        yield rank_heads(weights, columns, copiers, heading=heading, notes=[note])
    if removers:
        heading = "heads that take away what they attend to most"
        yield rank_heads(weights, columns, removers, heading=heading)


def _first_tokens(weights: HeadWeights) -> tuple[list[str], list[str]]:
    """Return the tokens that each head reads, and those that it writes, by its first singular direction."""
    n_heads = len(weights.table("heads"))
    reads = [""] * n_heads
    writes = [""] * n_heads
    for direction in weights.table("directions").as_dicts():
        head = direction["head"]
        if direction["of"] == "writes" and not reads[head]:
            reads[head] = direction["source"]
            writes[head] = direction["target"]
    return reads, writes


def _starred(weights: HeadWeights, name: str) -> list[str]:
    """Return the score of each head as text, with a star if it is beyond all random heads."""
    texts = []
    for score, is_outside in zip(weights.table("heads")[name], weights.is_outside(name), strict=True):
        texts.append(fixed(score, 2) + ("*" if is_outside else ""))
    return texts


def _figures(weights: HeadWeights) -> Iterator[Block]:
    """Draw a map of each score that any head has, and the strongest pairs as a graph."""
    heads, names = weights.table("heads"), weights.head_names
    columns = [name for name in ("copying", "matching", "previous") if np.isfinite(heads[name]).any()]
    for name in columns or ["copying"]:
        yield HeadMap(printed="never", figure="weights-heads", heads=heads, column=name)
    links = []
    for index, by in enumerate(INPUT_LETTERS):
        for sender, receiver in weights.strongest(by, _MOST):
            part = float(weights["composition"][index, sender, receiver])
            if part > 0:
                links.append(Link(names[sender], names[receiver], INPUT_NAMES[by], part))
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


# One head


def _of_head(weights: HeadWeights, row: int) -> Iterator[Block]:
    """Yield the scores of one head, its singular directions, and the heads that it reads or that read it."""
    heads = weights.table("heads")
    # Scores beside the range of random heads.
    lines = []
    for name in ("copying", "matching"):
        _, mean, low, high = (fixed(heads[name + part][row], 2) for part in SCORE_SUFFIXES)
        lines.append(f"{name} {_starred(weights, name)[row]}  random {mean} [{low}, {high}]")
    # The tokens to which the head would attend if tokens had no content.
    shares = "  ".join(f"{name} {fixed(heads[name][row], 2)}" for name in POSITION_SHARES)
    nats = float(heads["same_nats"][row])
    side = "above" if nats >= 0 else "below"
    lines.append(
        f"by position alone: {shares}; the same token scores {fixed(abs(nats), 2)} nats {side} others"
    )
    yield Note(heading=weights.head_names[row], lines=lines)
    yield from _directions(weights, row, "writes", "reads", "writes")
    yield from _directions(weights, row, "seeks", "queries", "keys")
    yield from _links_of(weights, row)


def _directions(weights: HeadWeights, row: int, of: str, source: str, target: str) -> Iterator[Block]:
    """Yield the singular directions of a head, if it has any; `source` and `target` are headers of their two ends."""
    directions = weights.table("directions")
    mine = directions.select((directions["head"] == row) & (directions["of"] == of))
    if not len(mine):
        return
    shares = [percent(share, 1) if np.isfinite(share) else "" for share in mine["share"].tolist()]
    yield Ranking(
        heading=f"singular directions, {source} → {target}",
        header="share",
        names=shares,
        table=mine,
        columns=[
            Words(source, mine["source"].tolist(), wraps=True),
            Words(target, mine["target"].tolist(), wraps=True),
        ],
    )


def _links_of(weights: HeadWeights, row: int) -> Iterator[Block]:
    """Yield the heads that a head reads most, and those that read it most."""
    names = weights.head_names
    titles: list[str] = []
    columns: dict[str, list[str]] = {by: [] for by in INPUT_LETTERS}
    # Of (Q K V, sender, receiver), the head as receiver, then as sender: (Q K V, other head).
    for title, part in (("reads from", np.s_[:, :, row]), ("is read by", np.s_[:, row])):
        excess = weights.excess[part]
        composition = weights["composition"][part]
        if not np.isfinite(excess).any():
            continue
        titles.append(title)
        for index, by in enumerate(INPUT_LETTERS):
            others = []
            for other in largest_first(excess[index], 3):
                others.append(f"{names[other]} {fixed(composition[index, other], 2)}")
            columns[by].append("  ".join(others))
    if titles:
        yield Ranking(
            heading="composition, most above chance",
            header="",
            names=titles,
            table=Table({}, {}),
            columns=[Words(f"by {INPUT_NAMES[by]}", texts, wraps=True) for by, texts in columns.items()],
        )


# Sentences


def _proxy_line(weights: HeadWeights) -> str:
    """Say why tokens are only a proxy for what heads write; empty if tokens are the logits of a decoder."""
    if weights.options.get("ends") == "static embeddings":
        return "no language-modelling head: static embeddings stand for W_U; tokens and copying are only a proxy"
    if weights.options.get("kind") == "encoder":
        return "an encoder fills in masked words: tokens and copying are only a proxy for what a head does there"
    return ""


def _guide(weights: HeadWeights) -> Iterator[str]:
    """Say how to read composition and copying."""
    yield (
        "composition: |X Y| / (|X| |Y|), 0 to 1, X what one head writes, Y what another reads; by chance: its mean for "
        "random directions with the same singular values"
    )
    if not _proxy_line(weights) or weights.options.get("picked"):
        yield (
            "copying: 1 = what is attended to is written, −1 = it is taken away; * = beyond all of "
            f"{N_DRAWS} random heads with the same singular values"
        )
