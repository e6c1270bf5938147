"""Declare the result about weights, what heads copy, match, read and write: its columns and its report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import amount
from attnscope.options import option, options, read_heads, seed_option
from attnscope.report.blocks import (
    Block,
    Graph,
    GraphEdge,
    HeadMap,
    Note,
    Ranking,
    Report,
    WordsColumn,
    rank_heads,
)
from attnscope.report.numbers import fixed, largest_first, percent, small_number
from attnscope.report.wording import report_on
from attnscope.results.result import Result
from attnscope.results.table import HEADS, Array, Column, Floats, Table, count, number, share, text

INPUT_NAMES = {"Q": "query", "K": "key", "V": "value"}
"""The three inputs of a head, through each of which it can read what an earlier head wrote, by letter."""

INPUT_LETTERS = tuple(INPUT_NAMES)
"""The order of the first axis of `composition` and `receiver_spread`."""

POSITION_SHARES = ("previous", "same", "next", "first")
"""The columns of attention by position alone: to the previous token, the token itself, the next one and the first."""

SCORE_SUFFIXES = ("", "_random", "_least", "_most")
"""The ends of the names of the four columns of a score: itself, and the mean, least and largest over random heads."""

N_RANDOM_HEADS = 39
"""Random heads that scores are compared with: another random head lies outside all of them in 5% of cases."""

_MAX_PER_LIST = 8
"""Most heads of a list. For each of query, key and value, a list and the graph have at most as many pairs of heads."""

_COMPOSITION_LINE = (
    "composition: overlap of what one head writes with what another reads, 0 (none) to 1 (all of it)"
)

_SHARE_TOLERANCE = 1e-6
"""Shares that differ by less are equal."""

_COPYING_MEANING = "sum of the eigenvalues of W_U W_O W_V W_E by the sum of their absolute values"
_MATCHING_MEANING = "the same of W_E' W_Q' W_K W_E, each query's scores less their mean"


def _declare_score(name: str, meaning: str) -> tuple[Column, ...]:
    """Declare a score of eigenvalues, -1 to 1, and its mean, least and largest value over random heads."""
    meanings = (
        meaning,
        "its mean over random heads with the same singular values",
        "the least of the random heads",
        "the largest of the random heads",
    )
    columns = []
    for suffix, meaning_of_column in zip(SCORE_SUFFIXES, meanings, strict=True):
        columns.append(number(name + suffix, meaning_of_column, range=(-1, 1)))
    return tuple(columns)


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

    The table `directions` has the leading singular directions of each head. Where `of` is "writes", they are those of
    W_O W_V: the head turns `source` tokens into `target` tokens. Where it is "seeks", they are those of W_Q' W_K:
    queries like `source` look for keys like `target`.

    The spread of singular values σ, Σσ⁴ / (Σσ²)², is 1 / rank where all are equal, and 1 where a single one is not 0.
    `sender_spread` is that of what a head writes, W_O W_V; `receiver_spread` is that of what its queries, keys and
    values read. From both follows the composition of random directions; see `expected_composition`.

    `options` has:
        kind: The kind of attention.
        ends: What names the tokens that a head writes: "logits" or "static embeddings".
        places: How the model knows positions.
        n_places: The number of positions over which the columns in `POSITION_SHARES` are means.
        dimension: The dimension of the part of the residual stream that heads can read.
        n_draws: The number of random heads that scores are compared with.
        picked: The rows of the heads that the report shows one by one; absent = it shows all heads.
    """

    SCHEMA: ClassVar[str] = "attnscope.weights/2"
    TABLES: ClassVar[Mapping[str, Sequence[Column]]] = {
        "heads": (
            *HEADS,
            *_declare_score("copying", _COPYING_MEANING),
            *_declare_score("matching", _MATCHING_MEANING),
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
        """Return the mean composition of random directions, (Q K V, sender, receiver); see `expected_composition`."""
        return expected_composition(
            self["sender_spread"], self["receiver_spread"], int(self.options["dimension"])
        )

    @property
    def excess(self) -> Floats:
        """Return by how much composition is above that of random directions, (Q K V, sender, receiver)."""
        excess: Floats = self["composition"] - self.expected
        return excess

    def strongest(self, by: str, most: int = 10) -> list[tuple[int, int]]:
        """Return the rows of the pairs (sender, receiver) with the largest `excess` by "Q", "K" or "V"."""
        # (sender, receiver); `largest_first` returns indices of the flat array.
        excess = self.excess[INPUT_LETTERS.index(by)]
        return [divmod(index, len(excess)) for index in largest_first(excess, most)]

    def is_outside(self, name: str) -> NDArray[np.bool_]:
        """Return whether a head's score, "copying" or "matching", is below or above all random heads, (head,)."""
        heads = self.table("heads")
        is_below = heads[name] < heads[f"{name}_least"]
        is_outside: NDArray[np.bool_] = is_below | (heads[name] > heads[f"{name}_most"])
        return is_outside

    def only(self, picked: Sequence[tuple[int, int]]) -> Self:
        """Return the same result with a report on some heads, (layer, head), one by one, each once.

        Raises:
            UsageError: There is no such head.
        """
        self.require_heads(picked)
        places = self.table("heads").layer_heads
        rows = [places.index(place) for place in dict.fromkeys(picked)]
        return replace(self, options={**self.options, "picked": rows})

    def report(self, **shown: Any) -> Report:
        """Return which heads feed which and what heads copy; or everything about picked heads."""
        picked = self.options.get("picked")
        if picked:
            names = ", ".join(self.head_names[row] for row in picked)
            answer = [f"what the weights of {names} say"]
            blocks: list[Block] = []
            for row in picked:
                blocks += _yield_blocks_of_head(self, row)
        else:
            answer = list(_write_answer(self))
            blocks = list(_yield_blocks_of_all(self))
        guide = filter(None, [*_explain_numbers(self), _explain_proxy(self)])
        return report_on(self, answer, blocks, guide, subtitle="what the weights of its heads say")


def expected_composition(senders: Floats, receivers: Floats, dimension: int) -> Floats:
    """Return the mean composition that random directions would have, (Q K V, sender, receiver).

    A composition is the root of a squared one, X, with mean m = 1 / d and relative variance v (`composition_variance`).
    To second order, E[sqrt(X)] = sqrt(m) (1 - v / 8).

    Args:
        senders: `sender_spread`, (head,).
        receivers: `receiver_spread`, (Q K V, head).
        dimension: Dimensions of the stream that heads can read, d.
    """
    # Where the variance is large, the expansion would fall to 0 or below.
    variation = np.minimum(composition_variance(senders, receivers, dimension), 4)
    expected: Floats = (1 - variation / 8) / np.sqrt(dimension)
    return expected


def composition_variance(senders: Floats, receivers: Floats, dimension: int) -> Floats:
    """Return the relative variance of squared composition over random directions, (Q K V, sender, receiver).

    That is its variance divided by its squared mean. With X what the sender writes, Y what the receiver reads, and a
    random rotation R between them, the squared composition is tr(A R B R'), where A = X'X / |X|² and B = YY' / |Y|²
    have trace 1. Its mean is 1 / d. Its variance is 2 |A - I/d|² |B - I/d|² / ((d - 1) (d + 2)), by Schur's lemma on
    traceless symmetric matrices.

    `expected_composition` explains the arguments.
    """
    d = dimension
    # |A - I/d|² = |A|² - 1/d, and |A|² is the spread of the singular values of X; likewise for B and Y.
    sender_part = np.maximum(senders[None, :, None] - 1 / d, 0)
    receiver_part = np.maximum(receivers[:, None, :] - 1 / d, 0)
    variation: Floats = 2 * d**2 * sender_part * receiver_part / ((d - 1) * (d + 2))
    return variation


# All heads


def _write_answer(weights: HeadWeights) -> Iterator[str]:
    """Say which pair composes most above chance, and which head copies most."""
    names = weights.head_names
    # (Q K V, sender, receiver).
    excess = weights.excess
    if np.isfinite(excess).any():
        pair = np.unravel_index(np.nanargmax(excess), excess.shape)
        letter_index, sender, receiver = map(int, pair)
        composition = small_number(weights["composition"][pair])
        expected = small_number(weights.expected[pair])
        reader = f"{names[receiver]}'s {INPUT_NAMES[INPUT_LETTERS[letter_index]]}"
        numbers = f"composition {composition}; random weights have {expected} on average"
        if excess[pair] > 0:
            yield f"{reader} reads most of what {names[sender]} writes: {numbers}"
        else:
            nearest = f"{reader} and what {names[sender]} writes: {numbers}"
            yield f"No head reads what another writes more than by chance. Nearest are {nearest}"
        yield _COMPOSITION_LINE
    copying = weights.table("heads")["copying"]
    if np.isfinite(copying).any() and not _explain_proxy(weights):
        head = int(np.nanargmax(copying))
        yield f"{names[head]} copies most what it attends to: {fixed(copying[head], 2)} of 1"


def _yield_blocks_of_all(weights: HeadWeights) -> Iterator[Block]:
    """Yield rankings of pairs, of heads that copy and of heads that look back by position, then figures."""
    yield _rank_pairs(weights)
    if not _explain_proxy(weights):
        yield from _rank_copiers(weights)
    heads = weights.table("heads")
    # The heads that look at the previous token more than at others by position alone: their rows.
    looks_back = heads["previous"] > heads.companion("previous", "baseline") + _SHARE_TOLERANCE
    order = [row for row in largest_first(heads["previous"]) if looks_back[row]][:_MAX_PER_LIST]
    if order:
        heading = "mean weight if position alone decided where heads look, 0 to 1"
        yield rank_heads(weights, ["previous", "first", "same"], order, heading=heading)
    yield from _draw_figures(weights)


def _rank_pairs(weights: HeadWeights) -> Block:
    """List the pairs that compose most by queries, keys or values, those farthest above chance first."""
    links, expected = _find_strongest_links(weights)
    table = Table.of_arrays(
        (
            number("composition", range=(0, 1)),
            number("chance", range=(0, 1), label="random weights"),
        ),
        composition=[link.weight for link in links],
        chance=expected,
    )
    return Ranking(
        heading="which heads read which: writer → reader",
        header="pair",
        names=[f"{link.sender} → {link.receiver}" for link in links],
        table=table,
        columns=[
            WordsColumn("through its", [link.receiver_input for link in links]),
            "composition",
            "chance",
        ],
        order=largest_first(table["composition"] - table["chance"]),
    )


def _find_strongest_links(weights: HeadWeights) -> tuple[list[GraphEdge], list[float]]:
    """Return the pairs that compose most by queries, keys and values, and the composition that each has by chance."""
    names = weights.head_names
    # Both are (Q K V, sender, receiver).
    composition = weights["composition"]
    expected = weights.expected
    links = []
    expected_weights = []
    for index, letter in enumerate(INPUT_LETTERS):
        for sender, receiver in weights.strongest(letter, _MAX_PER_LIST):
            weight = float(composition[index, sender, receiver])
            if weight > 0:
                links.append(GraphEdge(names[sender], names[receiver], INPUT_NAMES[letter], weight))
                expected_weights.append(expected[index, sender, receiver])
    return links, expected_weights


def _rank_copiers(weights: HeadWeights) -> Iterator[Block]:
    """List the heads that copy what they attend to, and those that take it away."""
    heads = weights.table("heads")
    copying = heads["copying"]
    reads, writes = _list_first_tokens(weights)
    columns = [
        WordsColumn("copying", _format_scores(weights, "copying"), right=True),
        WordsColumn("reads", reads, wraps=True),
        WordsColumn("writes", writes, wraps=True),
    ]
    # Heads without a path to the vocabulary have no score, and no place in this order.
    order = largest_first(copying)
    n_outside = int(weights.is_outside("copying").sum())
    # One more random head would be below all N_RANDOM_HEADS others with probability 1 / (N_DRAWS + 1), and above all as
    # often.
    n_by_chance = 2 / (N_RANDOM_HEADS + 1) * len(heads)
    note = f"{n_outside} of {amount(len(heads), 'head')} are beyond all random ones; by chance {n_by_chance:.0f}"
    copiers = [row for row in order if copying[row] >= 0][:_MAX_PER_LIST]
    removers = [row for row in reversed(order) if copying[row] < 0][:_MAX_PER_LIST]
    if copiers:
        heading = "heads that copy what they attend to most"
        yield rank_heads(weights, columns, copiers, heading=heading, notes=[note])
    if removers:
        heading = "heads that take away what they attend to most"
        yield rank_heads(weights, columns, removers, heading=heading)


def _list_first_tokens(weights: HeadWeights) -> tuple[list[str], list[str]]:
    """Return the tokens that each head reads, and those that it writes for them, by its first singular direction.

    A head without directions has "".
    """
    n_heads = len(weights.table("heads"))
    reads = [""] * n_heads
    writes = [""] * n_heads
    for direction in weights.table("directions").as_dicts():
        head = direction["head"]
        if direction["of"] == "writes" and not reads[head]:
            reads[head] = direction["source"]
            writes[head] = direction["target"]
    return reads, writes


def _format_scores(weights: HeadWeights, name: str) -> list[str]:
    """Return the score of each head as text, with a star if it is beyond all random heads."""
    texts = []
    for score, is_outside in zip(weights.table("heads")[name], weights.is_outside(name), strict=True):
        texts.append(fixed(score, 2) + ("*" if is_outside else ""))
    return texts


def _draw_figures(weights: HeadWeights) -> Iterator[Block]:
    """Draw a map of each score that any head has, and the strongest pairs as a graph."""
    heads, names = weights.table("heads"), weights.head_names
    columns = [name for name in ("copying", "matching", "previous") if np.isfinite(heads[name]).any()]
    for name in columns or ["copying"]:
        yield HeadMap(printed="never", figure="weights-heads", heads=heads, column=name)
    links, _ = _find_strongest_links(weights)
    if links:
        yield Graph(
            printed="never",
            figure="weights-graph",
            title="which heads feed which: the strongest pairs",
            layers=dict(zip(names, heads["layer"].tolist(), strict=True)),
            links=links,
            notes=[
                f"the {amount(_MAX_PER_LIST, 'pair')} each that compose most by queries, keys and values above chance; "
                "wider = a larger share; a line goes up from the head that writes to the head that reads"
            ],
        )


# One head


def _yield_blocks_of_head(weights: HeadWeights, row: int) -> Iterator[Block]:
    """Yield the scores of one head, its singular directions, and the heads that it reads or that read it."""
    heads = weights.table("heads")
    # Scores beside the range of random heads.
    lines = []
    for name in ("copying", "matching"):
        _, mean, least, largest = (fixed(heads[name + suffix][row], 2) for suffix in SCORE_SUFFIXES)
        score = _format_scores(weights, name)[row]
        lines.append(f"{name} {score}  random {mean} [{least}, {largest}]")
    # Where the head would look if tokens differed in their positions alone.
    shares = "  ".join(f"{name} {fixed(heads[name][row], 2)}" for name in POSITION_SHARES)
    nats = float(heads["same_nats"][row])
    side = "above" if nats >= 0 else "below"
    lines.append(
        f"by position alone: {shares}; the same token scores {fixed(abs(nats), 2)} nats {side} others"
    )
    yield Note(heading=weights.head_names[row], lines=lines)
    yield from _rank_directions(weights, row, "writes", "reads", "writes")
    yield from _rank_directions(weights, row, "seeks", "queries", "keys")
    yield from _list_partners(weights, row)


def _rank_directions(
    weights: HeadWeights, row: int, of: str, source_header: str, target_header: str
) -> Iterator[Block]:
    """Yield the singular directions of a head, if it has any; `of` is "writes" or "seeks", as in the table."""
    table = weights.table("directions")
    directions = table.select((table["head"] == row) & (table["of"] == of))
    if not len(directions):
        return
    shares = [percent(share, 1) if np.isfinite(share) else "" for share in directions["share"].tolist()]
    yield Ranking(
        heading=f"singular directions, {source_header} → {target_header}",
        header="share",
        names=shares,
        table=directions,
        columns=[
            WordsColumn(source_header, directions["source"].tolist(), wraps=True),
            WordsColumn(target_header, directions["target"].tolist(), wraps=True),
        ],
    )


def _list_partners(weights: HeadWeights, row: int) -> Iterator[Block]:
    """Yield the heads that a head reads most, and those that read it most."""
    names = weights.head_names
    titles: list[str] = []
    # A list for each input, with a text for each title.
    columns: dict[str, list[str]] = {letter: [] for letter in INPUT_LETTERS}
    # In (Q K V, sender, receiver) the head is a receiver, then a sender. What is left is (Q K V, other head).
    for title, selection in (("reads from", np.s_[:, :, row]), ("is read by", np.s_[:, row])):
        excess = weights.excess[selection]
        composition = weights["composition"][selection]
        if not np.isfinite(excess).any():
            continue
        titles.append(title)
        for index, letter in enumerate(INPUT_LETTERS):
            others = []
            for other in largest_first(excess[index], 3):
                others.append(f"{names[other]} {fixed(composition[index, other], 2)}")
            columns[letter].append("  ".join(others))
    if titles:
        yield Ranking(
            heading="composition, most above chance",
            header="",
            names=titles,
            table=Table({}, {}),
            columns=[
                WordsColumn(f"by {INPUT_NAMES[letter]}", texts, wraps=True)
                for letter, texts in columns.items()
            ],
        )


# Sentences


def _explain_proxy(weights: HeadWeights) -> str:
    """Say why the tokens that a head writes are only a proxy; "" for a decoder with logits, where they are exact."""
    if weights.options.get("ends") == "static embeddings":
        return "no language-modelling head: static embeddings stand for W_U; tokens and copying are only a proxy"
    if weights.options.get("kind") == "encoder":
        return "an encoder fills in masked words: tokens and copying are only a proxy for what a head does there"
    return ""


def _explain_numbers(weights: HeadWeights) -> Iterator[str]:
    """Say how to read composition and copying."""
    yield (
        "composition: |X Y| / (|X| |Y|), 0 to 1, X what one head writes, Y what another reads; by chance: its mean for "
        "random directions with the same singular values"
    )
    if not _explain_proxy(weights) or weights.options.get("picked"):
        yield (
            "copying: 1 = what is attended to is written, −1 = it is taken away; * = beyond all of "
            f"{N_RANDOM_HEADS} random heads with the same singular values"
        )
