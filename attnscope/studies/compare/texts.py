"""Compare a few heads on one text, or every head's rows between two texts that differ in little."""

from collections.abc import Sequence
from itertools import product
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from attnscope.choice import Choice
from attnscope.core.attention.calls import single_head
from attnscope.core.attention.seam import attention_weights
from attnscope.core.distance import Measure, divergence_sums, row_divergences
from attnscope.core.plain_torch import with_plain_torch
from attnscope.core.sums import RunningSums
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.model import Model
from attnscope.questions.compare import Comparison
from attnscope.questions.heatmap import AttentionMap
from attnscope.questions.map_changes import renormalise
from attnscope.results.table import Table, number
from attnscope.results.tokens import Tokens, tokens_table
from attnscope.studies.compare.options import CompareOptions
from attnscope.studies.compare.study import HeadPlace, distance_arrays, heads_table, require_one_kind
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.reading import Prompt, Reading, read
from attnscope.studies.maps.running import outline, run_model
from attnscope.studies.seen import see

Floats = NDArray[np.float64]


@with_plain_torch
def compare_heads(
    model: Model, text: str, pick: Sequence[HeadPlace], options: CompareOptions | None = None
) -> Comparison:
    """Put a few heads of a model side by side on a text, with their mean and the single head that they would make.

    The single head is softmax(scale / √n · Σ_h q_h · k_h) for n heads. It has the queries and keys of all n heads side
    by side, and its scores are divided by the root of n · d_head. With all heads of a layer, it is one head of full
    width. It is not the mean of the heads.

    Args:
        model: A loaded model, see `attnscope.load`.
        text: What to run it on.
        pick: The heads, as (layer, head); at least two.
        options: How.

    Raises:
        AttnscopeError: Fewer than two heads, or one that there is not; an empty text.
    """
    options = options or CompareOptions()
    picked = tuple(dict.fromkeys(pick))
    if len(picked) < 2:
        raise UsageError("one head is nothing to compare", "pick at least two, such as L3H1,L5H11")
    reading, attention = _read_map(model, text, options, Choice(pick=picked))
    # Some layers of a model may have no attention.
    for head in picked:
        if not attention.exists(*head):
            raise AttnscopeError(f"there is no attention in L{head[0]}H{head[1]}", "pick other heads")

    # The heads, (head, query, key), their mean, (query, key), and the single head where there is one, (query, key).
    weights = np.stack([attention.of(*head) for head in picked])
    mean = weights.mean(0, dtype=np.float64).astype(np.float32)
    arrays: dict[str, NDArray[Any]] = {"weights:first": weights, "mean:first": mean}
    single, note = _single(model, reading, picked)
    if single is not None:
        keep = ~reading.tokens.sinks(attention.kind)
        if options.hide_special and not keep.all():
            single = renormalise(single[keep][:, keep]).astype(np.float32)
        arrays["single:first"] = single

    # The distances of the heads; one text gives no intervals.
    divergences = RunningSums((len(picked), len(picked)))
    divergences.add(*divergence_sums(cast(Measure, options.measure), weights))
    arrays |= distance_arrays(divergences, options)
    tables = {"heads": heads_table(model, picked), "tokens:first": tokens_table(attention.queries)}
    facts = {"compared": "picked", "distances": [options.distance], "single_note": note}
    corpus = {"text": attention.queries.text}
    return Comparison(run_of(model.info, reading.notes), corpus, facts, tables, arrays)


def _read_map(
    model: Model, text: str, options: CompareOptions, choice: Choice
) -> tuple[Reading, AttentionMap]:
    """Read a text, and return its map of the chosen heads."""
    require_one_kind(model)
    reading = read(model, Prompt(text))
    record = run_model(model, outline(model.info, reading, choice.within(model.info)), reading)
    if options.hide_special:
        record = record.hide_special()
    return reading, record.maps[0]


@with_plain_torch
def compare_texts(
    model: Model,
    text: str,
    other: str,
    options: CompareOptions | None = None,
    *,
    query: str | None = None,
) -> Comparison:
    """Rank all heads of a model by how much their rows change from one text to another: a minimal pair.

    Tokens are aligned by the fewest edits (Levenshtein): tokens that are replaced, inserted or deleted. Between equal
    tokens, replaced ones are aligned one by one if both texts have the same number of them. Otherwise, the whole
    replaced stretch is one key. A key that only one text has weighs 0 in the other.

    The change of a head is the root of the mean divergence over the queries that are equal in both texts, or over the
    tokens that `query` names.

    Args:
        model: A loaded model, see `attnscope.load`.
        text: The first text.
        other: The second.
        options: How.
        query: The token that heads are ranked at: a token, a word, or a place such as `@3` in the first text.

    Raises:
        AttnscopeError: An empty text; the query names no token, or none that the other text has something for.
    """
    options = options or CompareOptions()
    # Maps of all heads on both texts.
    first_reading, first = _read_map(model, text, options, Choice())
    second_reading, second = _read_map(model, other, options, Choice())
    heads = [head for head in product(first.layers, first.heads) if first.exists(*head)]
    tokens = first.queries, second.queries

    # The aligned rows, with the keys of a stretch summed, (head, pair, key), and how far they are apart, (head, pair).
    aligned, equal, lengths = align(*tokens)
    weights = []
    pooled = []
    for side, attention in enumerate((first, second)):
        # (head, query, key)
        of_side = np.stack([attention.of(*head) for head in heads])
        weights.append(of_side)
        key_of_token = np.repeat(np.eye(len(lengths)), lengths[:, side], axis=0)
        pooled.append(of_side[:, aligned[:, side]].astype(np.float64) @ key_of_token)
    divergences = row_divergences(cast(Measure, options.measure), *pooled)
    # Find the pairs that the query names.
    is_named = np.zeros(len(aligned), np.bool_)
    notes = [*first_reading.notes, *second_reading.notes]
    if query is not None:
        is_named[find_pairs(query, tokens, aligned)] = True
        if is_named.sum() > 1:
            places = ", ".join(f"@{position}" for position in aligned[is_named, 0])
            notes.append(f"{query!r} names {places}: heads are ranked by all of these together")

    # The root mean change of each head, overall and at the query.
    name = options.distance
    overall = "how much its rows change over the tokens that both texts share"
    at_query = "how much its rows change at the tokens that the query names"
    table = heads_table(model, heads)
    table = table.with_column(
        number(f"{name}_overall", overall, label="overall"), _root_mean(divergences[:, equal])
    )
    table = table.with_column(
        number(f"{name}_at_query", at_query, label="at query"), _root_mean(divergences[:, is_named])
    )
    tables = {
        "heads": table,
        "tokens:first": tokens_table(tokens[0]),
        "tokens:second": tokens_table(tokens[1]),
        "aligned": Table.of_arrays(
            Comparison.TABLES["aligned"],
            first=aligned[:, 0],
            second=aligned[:, 1],
            equal=equal,
            asked=is_named,
        ),
    }
    facts = {"compared": "texts", "distances": [name], "query": query}
    corpus = {"text": tokens[0].text, "other_text": tokens[1].text}
    arrays: dict[str, NDArray[Any]] = {
        "weights:first": weights[0],
        "weights:second": weights[1],
        f"divergence:{name}": divergences,
    }
    return Comparison(run_of(model.info, notes), corpus, facts, tables, arrays)


def _root_mean(divergences: Floats) -> Floats:
    """Return the root of the mean over queries, (head,), of divergences, (head, query); NaN where none is known."""
    counts = np.isfinite(divergences).sum(1)
    with np.errstate(invalid="ignore"):
        roots: Floats = np.sqrt(np.nansum(divergences, 1) / counts)
    return roots


def align(
    first: Tokens, second: Tokens
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]:
    """Say which tokens of two texts stand for each other.

    Returns:
        Positions of aligned tokens in both texts, (pair, 2). Which of the pairs are equal tokens, (pair,). And the keys
        over which rows are compared, in their order: how many tokens of the first and of the second text each key is,
        (key, 2). Aligned tokens are one key; so is a replaced stretch whose length differs, of which one side may be 0.
    """
    keys: list[tuple[int, int]] = []
    a = 0
    b = 0
    # Walk from one equal token to the next; the stretch between them is aligned one by one or as a whole.
    ends = (len(first), len(second))
    for a_end, b_end in [*_equal_tokens(first.labels, second.labels), ends]:
        if a_end - a == b_end - b:
            keys += [(1, 1)] * (a_end - a)
        else:
            keys.append((a_end - a, b_end - b))
        # The equal token itself.
        keys.append((1, 1))
        a = a_end + 1
        b = b_end + 1
    # At the ends of the texts there is no equal token.
    lengths = np.array(keys[:-1], np.int64).reshape(-1, 2)
    starts = np.cumsum(lengths, 0) - lengths
    # Stretches of equal lengths became single tokens above.
    pairs = starts[lengths[:, 0] == lengths[:, 1]]
    equal = np.array([first.labels[a] == second.labels[b] for a, b in pairs], np.bool_)
    return pairs, equal, lengths


def _equal_tokens(first: Sequence[str], second: Sequence[str]) -> list[tuple[int, int]]:
    """Return the positions of equal tokens that stand for each other under the fewest edits, in order.

    Each replaced, inserted or deleted token is one edit (Levenshtein 1966). Among alignments with as few edits, the one
    that replaces tokens is chosen.
    """
    _, numbers = np.unique([*first, *second], return_inverse=True)
    a = len(first)
    b = len(second)
    is_other = numbers[:a, None] != numbers[a:]
    # The fewest edits from the first tokens of the first text to those of the second, (first + 1, second + 1).
    edits = np.empty((a + 1, b + 1), np.int32)
    # From no token of the first text, all tokens of the second are inserted.
    inserted = np.arange(b + 1)
    edits[0] = inserted
    for row in range(a):
        edits[row + 1, 0] = row + 1
        edits[row + 1, 1:] = np.minimum(edits[row, :-1] + is_other[row], edits[row, 1:] + 1)
        # From each column on, every further token of the second text may be inserted for one edit more.
        edits[row + 1] = np.minimum.accumulate(edits[row + 1] - inserted) + inserted
    # Trace the fewest edits back from the ends.
    pairs: list[tuple[int, int]] = []
    while a and b:
        if edits[a, b] == edits[a - 1, b - 1] + is_other[a - 1, b - 1]:
            a -= 1
            b -= 1
            if not is_other[a, b]:
                pairs.append((a, b))
        elif edits[a, b] == edits[a - 1, b] + 1:
            a -= 1
        else:
            b -= 1
    return pairs[::-1]


def find_pairs(
    query: str, tokens: tuple[Tokens, Tokens], aligned: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the numbers of the aligned pairs that a query names in the first text, else in the second.

    Raises:
        AttnscopeError: The query names no token, or none that is in a pair.
    """
    # Places such as @3 are those of the first text.
    in_second = () if query.startswith("@") else tokens[1].find(query)
    places = tokens[0].find(query), in_second
    for side in (0, 1):
        pairs = np.flatnonzero(np.isin(aligned[:, side], places[side]))
        if len(pairs):
            return pairs
    if any(places):
        raise AttnscopeError(
            f"{query!r} is in one of the texts alone: there is nothing to compare its row with",
            "choose a token that stands in both",
        )
    raise tokens[0].refuse(query)


def _single(
    model: Model, reading: Reading, picked: Sequence[HeadPlace]
) -> tuple[NDArray[np.float32] | None, str]:
    """Return the weights of the single head, (query, key), and a note of what they mean; else None, and why."""
    if model.info.path == "eager":
        return None, "no single head: this model's queries and keys are not at hand"
    # The model has one kind of attention: take its calls by layer.
    layers = [layer for layer, _ in picked]
    (by_layer,) = see(model, reading.batch(model.info.device), layers).values()
    # Lay queries and keys of the heads side by side, where that is defined.
    call = single_head([(by_layer[layer], head) for layer, head in picked])
    if isinstance(call, str):
        return None, f"no single head: {call}"
    weights = attention_weights(call)[0, 0].to("cpu", torch.float32).numpy()
    # Say which heads they are.
    note = "single head: softmax over the heads' queries and keys side by side, scores divided by √(heads · d_head)"
    layer = layers[0]
    n_heads = by_layer[layer].n_heads
    if len(set(layers)) > 1:
        note += "; as they are of different layers, no one head of the model could compute it"
    elif len(picked) == n_heads:
        note += f"; of all heads of layer {layer}: one head of full width"
    else:
        note += f"; of {len(picked)} of the {n_heads} heads of layer {layer}"
    return weights, note
