"""Declare the result about weights, which says what heads copy, match, read and write: its columns and its report.

Names of matrices are those of "A Mathematical Framework for Transformer Circuits" (Elhage et al. 2021): W_E embeds
tokens, W_U gives logits, and a head has W_Q, W_K, W_V and W_O. A sender is a head that writes to the residual stream,
and a receiver is a later head that reads from it as query, key or value. Their composition is |X Y| / (|X| |Y|), the
Frobenius norm of the product of what the sender writes, X, and what the receiver reads, Y, over the product of their
norms. `studies.weights` computes the result.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from attnscope.arrays import Floats
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
from attnscope.report.numbers import format_fixed, format_percent, format_small, largest_first
from attnscope.report.wording import report_on
from attnscope.results.result import Result
from attnscope.results.table import HEADS, Array, Column, Table, count, number, share, text

INPUT_NAMES = {"Q": "query", "K": "key", "V": "value"}
"""The three inputs through which a head can read what an earlier head wrote, by letter."""

INPUT_LETTERS = tuple(INPUT_NAMES)
"""The entries of the axis "Q K V", the first one of `composition` and `receiver_spread`."""

POSITION_SHARES = ("previous", "same", "next", "first")
"""The columns of the attention that position alone would cause: to the previous token, the token itself, the next token
and the first token."""

SCORE_SUFFIXES = ("", "_random", "_least", "_most")
"""The suffixes of a score's four columns: the score, and the mean, smallest and largest score of random heads."""

N_RANDOM_HEADS = 39
"""The number of random heads that a score is compared with. One more random head would be below or above all 39 with
probability 2 / 40 = 5%."""

_MAX_PER_LIST = 8
"""The most heads in a list; the most pairs of heads, per input, in the list of pairs and in the graph."""

_COMPOSITION_LINE = (
    "composition: overlap of what one head writes with what another reads, 0 (none) to 1 (all of it)"
)

_SHARE_TOLERANCE = 1e-6
"""Shares that differ by no more than this are taken as equal."""

# Positive eigenvalues mean that attending to a token raises the token's own logit: the head copies. A sum of 1 is all
# positive, -1 all negative.
_COPYING_MEANING = "sum of the eigenvalues of W_U W_O W_V W_E by the sum of their absolute values"
_MATCHING_MEANING = "the same of W_E' W_Q' W_K W_E, each query's scores less their mean"


def _declare_score(name: str, meaning: str) -> tuple[Column, ...]:
    """Declare the columns of an eigenvalue score, -1 to 1, and of its mean, minimum and maximum over random heads."""
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
    """Hold the scores of all heads of a model, from their weights alone, without any text.

    The table `directions` has the leading singular directions of each head. If its column `of` is "writes", they are
    directions of W_O W_V: attending to `source` tokens raises the logits of `target` tokens. If `of` is "seeks", they
    are directions of W_Q' W_K: queries like `source` attend to keys like `target`.

    The spread of singular values σ is Σσ⁴ / (Σσ²)². It is 1 / rank if all of them are equal, and 1 if only a single one
    is not 0. `sender_spread` is the spread of W_O W_V, which a head writes with. `receiver_spread` is the spread of the
    matrices that a head's queries, keys and values read with. Together they give the mean composition of random
    directions; see `expected_composition`.

    `options` has:
        kind: The kind of attention.
        ends: How directions become tokens: by W_U ("logits"), or by W_E without logits ("static embeddings").
        places: How the model encodes positions.
        n_places: The number of positions over which the columns in `POSITION_SHARES` are averaged.
        dimension: The dimension of the subspace of the residual stream that heads can read.
        n_draws: The number of random heads that scores are compared with.
        picked: The rows of the heads that the report shows one by one; absent = the report compares all heads.
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
        """Return the composition minus that of random directions, (Q K V, sender, receiver)."""
        excess: Floats = self["composition"] - self.expected
        return excess

    def strongest(self, by: str, most: int = 10) -> list[tuple[int, int]]:
        """Return the `most` pairs (sender, receiver), as rows of heads, with the largest `excess` through an input.

        `by` is the receiver's input: "Q", "K" or "V".
        """
        # (sender, receiver). `largest_first` returns indices into the flattened array.
        excess = self.excess[INPUT_LETTERS.index(by)]
        return [divmod(index, len(excess)) for index in largest_first(excess, most)]

    def is_outside(self, name: str) -> NDArray[np.bool_]:
        """Return whether each head's score is below or above those of all random heads, (head,).

        `name` is the score, "copying" or "matching".
        """
        heads = self.table("heads")
        is_below = heads[name] < heads[f"{name}_least"]
        is_outside: NDArray[np.bool_] = is_below | (heads[name] > heads[f"{name}_most"])
        return is_outside

    def only(self, picked: Sequence[tuple[int, int]]) -> Self:
        """Return a copy whose report shows some heads, (layer, head), one by one. Duplicates are dropped.

        Raises:
            UsageError: There is no such head.
        """
        self.require_heads(picked)
        layer_heads = self.table("heads").layer_heads
        rows = [layer_heads.index(layer_head) for layer_head in dict.fromkeys(picked)]
        return replace(self, options={**self.options, "picked": rows})

    def report(self, **shown: Any) -> Report:
        """Return the report: which heads read which, and which heads copy; or everything about the picked heads.

        `shown`, which other kinds of results read, is ignored.
        """
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

    Let S be the squared composition. Its mean is m = 1 / d, and its relative variance is v (`composition_variance`). A
    second-order expansion of the root gives E[sqrt(S)] = sqrt(m) (1 - v / 8).

    Args:
        senders: `sender_spread`, (head,).
        receivers: `receiver_spread`, (Q K V, head).
        dimension: The dimension of the subspace of the residual stream that heads can read, d.
    """
    # The expansion holds for small v, and would fall to 0 at v = 8.
    variation = np.minimum(composition_variance(senders, receivers, dimension), 4)
    expected: Floats = (1 - variation / 8) / np.sqrt(dimension)
    return expected


def composition_variance(senders: Floats, receivers: Floats, dimension: int) -> Floats:
    """Return the relative variance of squared composition over random directions, (Q K V, sender, receiver).

    The relative variance is the variance divided by the squared mean. Let X be what the sender writes, Y what the
    receiver reads, and R a random rotation between them. The squared composition is tr(A R B R'), where A = X'X / |X|²
    and B = YY' / |Y|² have trace 1. Its mean is 1 / d. Its variance is 2 |A - I/d|² |B - I/d|² / ((d - 1) (d + 2)), by
    Schur's lemma on traceless symmetric matrices.

    The arguments are those of `expected_composition`.
    """
    d = dimension
    # |A - I/d|² = |A|² - 1/d, and |A|² is the spread of the singular values of X; B and Y are alike. Rounding could
    # make the difference negative.
    sender_part = np.maximum(senders[None, :, None] - 1 / d, 0)
    receiver_part = np.maximum(receivers[:, None, :] - 1 / d, 0)
    variation: Floats = 2 * d**2 * sender_part * receiver_part / ((d - 1) * (d + 2))
    return variation


# All heads


def _write_answer(weights: HeadWeights) -> Iterator[str]:
    """Write which pair of heads composes most above chance, and which head copies most."""
    names = weights.head_names
    # (Q K V, sender, receiver)
    excess = weights.excess
    if np.isfinite(excess).any():
        strongest_pair = np.unravel_index(np.nanargmax(excess), excess.shape)
        letter_index, sender, receiver = map(int, strongest_pair)
        composition = format_small(weights["composition"][strongest_pair])
        expected = format_small(weights.expected[strongest_pair])
        reader = f"{names[receiver]}'s {INPUT_NAMES[INPUT_LETTERS[letter_index]]}"
        numbers = f"composition {composition}; random weights have {expected} on average"
        if excess[strongest_pair] > 0:
            yield f"{reader} reads most of what {names[sender]} writes: {numbers}"
        else:
            closest_pair = f"{reader} and what {names[sender]} writes: {numbers}"
            yield f"No head reads what another writes more than by chance. Nearest are {closest_pair}"
        yield _COMPOSITION_LINE
    copying = weights.table("heads")["copying"]
    if np.isfinite(copying).any() and not _explain_proxy(weights):
        head = int(np.nanargmax(copying))
        yield f"{names[head]} copies most what it attends to: {format_fixed(copying[head], 2)} of 1"


def _yield_blocks_of_all(weights: HeadWeights) -> Iterator[Block]:
    """Yield rankings of pairs, of heads that copy, and of heads that attend to the previous token, then figures."""
    yield _rank_pairs(weights)
    if not _explain_proxy(weights):
        yield from _rank_copiers(weights)
    heads = weights.table("heads")
    # Rows of the heads that position alone makes attend to the previous token more than uniform attention would. The
    # companion column "baseline" is the share under uniform attention.
    looks_back = heads["previous"] > heads.companion("previous", "baseline") + _SHARE_TOLERANCE
    rows = [row for row in largest_first(heads["previous"]) if looks_back[row]][:_MAX_PER_LIST]
    if rows:
        heading = "mean weight if position alone decided where heads look, 0 to 1"
        yield rank_heads(weights, ["previous", "first", "same"], rows, heading=heading)
    yield from _draw_figures(weights)


def _rank_pairs(weights: HeadWeights) -> Block:
    """Rank the pairs of heads that compose most through queries, keys or values, those farthest above chance first."""
    edges, expected = _find_strongest_links(weights)
    table = Table.of_arrays(
        (
            number("composition", range=(0, 1)),
            number("chance", range=(0, 1), label="random weights"),
        ),
        composition=[edge.weight for edge in edges],
        chance=expected,
    )
    return Ranking(
        heading="which heads read which: writer → reader",
        header="pair",
        names=[f"{edge.sender} → {edge.receiver}" for edge in edges],
        table=table,
        columns=[
            WordsColumn("through its", [edge.receiver_input for edge in edges]),
            "composition",
            "chance",
        ],
        order=largest_first(table["composition"] - table["chance"]),
    )


def _find_strongest_links(weights: HeadWeights) -> tuple[list[GraphEdge], list[float]]:
    """Return the pairs of heads that compose most, as edges of a graph, and the composition of each by chance.

    Each of query, key and value has its own strongest pairs.
    """
    names = weights.head_names
    # Both arrays are (Q K V, sender, receiver).
    composition = weights["composition"]
    expected = weights.expected
    edges = []
    expected_weights = []
    for letter_index, letter in enumerate(INPUT_LETTERS):
        for sender, receiver in weights.strongest(letter, _MAX_PER_LIST):
            composition_value = float(composition[letter_index, sender, receiver])
            if composition_value > 0:
                edges.append(
                    GraphEdge(names[sender], names[receiver], INPUT_NAMES[letter], composition_value)
                )
                expected_weights.append(expected[letter_index, sender, receiver])
    return edges, expected_weights


def _rank_copiers(weights: HeadWeights) -> Iterator[Block]:
    """Rank the heads that copy what they attend to, and those that lower the logits of what they attend to."""
    heads = weights.table("heads")
    copying = heads["copying"]
    read_tokens, written_tokens = _list_first_tokens(weights)
    columns = [
        WordsColumn("copying", _format_scores(weights, "copying"), is_right_aligned=True),
        WordsColumn("reads", read_tokens, wraps=True),
        WordsColumn("writes", written_tokens, wraps=True),
    ]
    # `largest_first` leaves out NaN, the score of heads without a path to the vocabulary.
    rows = largest_first(copying)
    n_outside = int(weights.is_outside("copying").sum())
    # A random head would be below all N others with probability 1 / (N + 1), and above all of them as often.
    n_by_chance = 2 / (N_RANDOM_HEADS + 1) * len(heads)
    note = f"{n_outside} of {amount(len(heads), 'head')} are beyond all random ones; by chance {n_by_chance:.0f}"
    copiers = [row for row in rows if copying[row] >= 0][:_MAX_PER_LIST]
    removers = [row for row in reversed(rows) if copying[row] < 0][:_MAX_PER_LIST]
    if copiers:
        heading = "heads that copy what they attend to most"
        yield rank_heads(weights, columns, copiers, heading=heading, notes=[note])
    if removers:
        heading = "heads that take away what they attend to most"
        yield rank_heads(weights, columns, removers, heading=heading)


def _list_first_tokens(weights: HeadWeights) -> tuple[list[str], list[str]]:
    """Return for each head the tokens that it reads, and the tokens that it then writes, in its first direction.

    The first singular direction of W_O W_V is the strongest. A head without directions has "".
    """
    n_heads = len(weights.table("heads"))
    read_tokens = [""] * n_heads
    written_tokens = [""] * n_heads
    for direction in weights.table("directions").as_dicts():
        head = direction["head"]
        if direction["of"] == "writes" and not read_tokens[head]:
            read_tokens[head] = direction["source"]
            written_tokens[head] = direction["target"]
    return read_tokens, written_tokens


def _format_scores(weights: HeadWeights, name: str) -> list[str]:
    """Format the score of each head, such as "0.52*"; the star says that it is beyond all random heads."""
    texts = []
    for score, is_outside in zip(weights.table("heads")[name], weights.is_outside(name), strict=True):
        texts.append(format_fixed(score, 2) + ("*" if is_outside else ""))
    return texts


def _draw_figures(weights: HeadWeights) -> Iterator[Block]:
    """Draw a layer-by-head map of each score that any head has, and the strongest pairs as a graph."""
    heads, names = weights.table("heads"), weights.head_names
    columns = [name for name in ("copying", "matching", "previous") if np.isfinite(heads[name]).any()]
    for name in columns or ["copying"]:
        yield HeadMap(printed="never", figure="weights-heads", heads=heads, column=name)
    edges, _ = _find_strongest_links(weights)
    if edges:
        yield Graph(
            printed="never",
            figure="weights-graph",
            title="which heads feed which: the strongest pairs",
            layers=dict(zip(names, heads["layer"].tolist(), strict=True)),
            edges=edges,
            notes=[
                f"the {amount(_MAX_PER_LIST, 'pair')} each that compose most by queries, keys and values above chance; "
                "wider = a larger share; a line goes up from the head that writes to the head that reads"
            ],
        )


# One head


def _yield_blocks_of_head(weights: HeadWeights, row: int) -> Iterator[Block]:
    """Yield the scores of one head, its singular directions, and the heads that it reads or that read it."""
    heads = weights.table("heads")
    # The scores, each beside the mean and range of random heads.
    lines = []
    for name in ("copying", "matching"):
        _, mean, least, largest = (
            format_fixed(heads[name + suffix][row], 2) for suffix in SCORE_SUFFIXES
        )
        score = _format_scores(weights, name)[row]
        lines.append(f"{name} {score}  random {mean} [{least}, {largest}]")
    # Where the head would look if tokens differed only in their positions.
    shares = "  ".join(f"{name} {format_fixed(heads[name][row], 2)}" for name in POSITION_SHARES)
    same_nats = float(heads["same_nats"][row])
    side = "above" if same_nats >= 0 else "below"
    lines.append(
        f"by position alone: {shares}; the same token scores {format_fixed(abs(same_nats), 2)} nats {side} others"
    )
    yield Note(heading=weights.head_names[row], lines=lines)
    yield from _rank_directions(weights, row, "writes", "reads", "writes")
    yield from _rank_directions(weights, row, "seeks", "queries", "keys")
    yield from _list_partners(weights, row)


def _rank_directions(
    weights: HeadWeights, row: int, of: str, source_header: str, target_header: str
) -> Iterator[Block]:
    """Yield a ranking of a head's singular directions, if it has any.

    `of` is the value of the table's column `of`: "writes" or "seeks".
    """
    table = weights.table("directions")
    directions = table.select((table["head"] == row) & (table["of"] == of))
    if not len(directions):
        return
    shares = [
        format_percent(share, 1) if np.isfinite(share) else "" for share in directions["share"].tolist()
    ]
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
    """Yield a table of the heads that a head reads most, and of the heads that read it most, through Q, K and V."""
    names = weights.head_names
    titles: list[str] = []
    # The cells of each column, by the letter of the input: one text per title.
    texts_by_letter: dict[str, list[str]] = {letter: [] for letter in INPUT_LETTERS}
    # Of (Q K V, sender, receiver), select the head as receiver, then as sender: (Q K V, partner).
    for title, selection in (("reads from", np.s_[:, :, row]), ("is read by", np.s_[:, row])):
        excess = weights.excess[selection]
        composition = weights["composition"][selection]
        if not np.isfinite(excess).any():
            continue
        titles.append(title)
        for letter_index, letter in enumerate(INPUT_LETTERS):
            partners = []
            for partner in largest_first(excess[letter_index], 3):
                partners.append(
                    f"{names[partner]} {format_fixed(composition[letter_index, partner], 2)}"
                )
            texts_by_letter[letter].append("  ".join(partners))
    if titles:
        yield Ranking(
            heading="composition, most above chance",
            header="",
            names=titles,
            table=Table({}, {}),
            columns=[
                WordsColumn(f"by {INPUT_NAMES[letter]}", texts, wraps=True)
                for letter, texts in texts_by_letter.items()
            ],
        )


# Sentences


def _explain_proxy(weights: HeadWeights) -> str:
    """Explain why the tokens that a head writes are only a proxy; "" = they are exact, in a decoder with logits."""
    if weights.options.get("ends") == "static embeddings":
        return "no language-modelling head: static embeddings stand for W_U; tokens and copying are only a proxy"
    if weights.options.get("kind") == "encoder":
        return "an encoder fills in masked words: tokens and copying are only a proxy for what a head does there"
    return ""


def _explain_numbers(weights: HeadWeights) -> Iterator[str]:
    """Explain how to read composition and copying."""
    yield (
        "composition: |X Y| / (|X| |Y|), 0 to 1, X what one head writes, Y what another reads; by chance: its mean for "
        "random directions with the same singular values"
    )
    if not _explain_proxy(weights) or weights.options.get("picked"):
        yield (
            "copying: 1 = what is attended to is written, −1 = it is taken away; * = beyond all of "
            f"{N_RANDOM_HEADS} random heads with the same singular values"
        )
