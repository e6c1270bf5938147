"""Compare a few heads on one text, or the attention of all heads on two texts that differ in a few tokens.

`compare_heads` puts picked heads side by side. `compare_texts` aligns the tokens of both texts, then measures how much
the attention rows of the aligned tokens change. A row is the attention of one query. In the results, arrays of the
first text are named "…:first", those of the second text "…:second". A model's attention function is its *seam*; a model
whose `info.path` is "eager" only gives attention weights, without queries and keys.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from attnscope.arrays import Floats, Integers
from attnscope.choice import Choice
from attnscope.core.attention.calls import join_heads
from attnscope.core.attention.seam import attention_weights
from attnscope.core.distance import Divergence, compute_row_divergences, sum_divergences
from attnscope.core.plain_torch import with_default_torch
from attnscope.core.sums import RunningSums
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.info import run_facts
from attnscope.models.model import Model
from attnscope.questions.compare import Comparison
from attnscope.questions.heatmap import AttentionMap
from attnscope.questions.map_changes import renormalise
from attnscope.results.table import Table, number
from attnscope.results.tokens import Tokens, make_tokens_table
from attnscope.studies.compare.options import CompareOptions
from attnscope.studies.compare.study import (
    Head,
    make_distance_arrays,
    make_heads_table,
    require_one_kind,
)
from attnscope.studies.inputs.reading import Prompt, Reading, read
from attnscope.studies.kept_attention import keep_attention
from attnscope.studies.maps.running import make_empty_record, run_model


@with_default_torch
def compare_heads(
    model: Model, text: str, pick: Sequence[Head], options: CompareOptions | None = None
) -> Comparison:
    """Put a few heads of a model side by side on a text, with their mean and the single head that joins them.

    The single head is softmax(scale / √n · Σ_h q_h · k_h) for n heads. Its queries and keys are those of the n heads,
    concatenated, and its scores are divided by the root of n · d_head. With all heads of a layer, it is one head of
    full width. It is not the mean of the heads.

    Args:
        model: A loaded model, see `attnscope.load`.
        text: What to run it on.
        pick: The heads, as (layer, head index); at least two.
        options: The distance, and whether special tokens are hidden; None = the defaults.

    Raises:
        AttnscopeError: There are fewer than two heads, or the model does not have one of them; or the text is empty.
    """
    options = options or CompareOptions()
    picked = tuple(dict.fromkeys(pick))
    if len(picked) < 2:
        raise UsageError("one head is nothing to compare", "pick at least two, such as L3H1,L5H11")
    reading, attention = _read_map(model, text, options, Choice(pick=picked))
    # A hybrid model has layers without attention.
    for layer, head in picked:
        if not attention.exists(layer, head):
            raise AttnscopeError(f"there is no attention in L{layer}H{head}", "pick other heads")

    # The heads, (head, query, key), and their mean, (query, key).
    weights = np.stack([attention.of(*head) for head in picked])
    mean = weights.mean(0, dtype=np.float64).astype(np.float32)
    arrays: dict[str, NDArray[Any]] = {"weights:first": weights, "mean:first": mean}
    # The single head, if it is defined. Hide special tokens in it, as `_read_map` did in the picked heads.
    single, note = _compute_single_head(model, reading, picked)
    if single is not None:
        is_shown = ~reading.tokens.sinks(attention.kind)
        if options.hide_special and not is_shown.all():
            single = renormalise(single[is_shown][:, is_shown]).astype(np.float32)
        arrays["single:first"] = single

    # The distances of the heads. The ends of their intervals are NaN, since there is only one text.
    divergences = RunningSums((len(picked), len(picked)))
    divergences.add(*sum_divergences(cast(Divergence, options.measure), weights))
    arrays |= make_distance_arrays(divergences, options)
    tables = {
        "heads": make_heads_table(model, picked),
        "tokens:first": make_tokens_table(attention.queries),
    }
    facts = {"compared": "picked", "distances": [options.distance], "single_note": note}
    corpus = {"text": attention.queries.text}
    return Comparison(run_facts(model.info, reading.notes), corpus, facts, tables, arrays)


def _read_map(
    model: Model, text: str, options: CompareOptions, choice: Choice
) -> tuple[Reading, AttentionMap]:
    """Run the model on a text, and return the tokenised text with the attention map of the chosen heads."""
    require_one_kind(model)
    reading = read(model, Prompt(text))
    # `make_empty_record` declares the maps to compute. A model with one kind of attention has one map.
    record = run_model(model, make_empty_record(model.info, reading, choice.within(model.info)), reading)
    if options.hide_special:
        record = record.hide_special()
    return reading, record.maps[0]


@with_default_torch
def compare_texts(
    model: Model,
    text: str,
    other: str,
    options: CompareOptions | None = None,
    *,
    query: str | None = None,
) -> Comparison:
    """Rank all heads of a model by how much their rows change between the two texts of a minimal pair.

    The fewest edits (Levenshtein) align the tokens: replacements, insertions and deletions of tokens. Replaced tokens
    between two equal tokens are aligned one by one if both texts have the same number of them. Otherwise the whole
    replaced span is one key. A key that only one text has gets weight 0 in the other.

    The change of a head is the root of its mean divergence. The mean is over the queries that are equal in both texts,
    or over the tokens that `query` names.

    Args:
        model: A loaded model, see `attnscope.load`.
        text: The first text.
        other: The second text.
        options: The distance, and whether special tokens are hidden; None = the defaults.
        query: The token at which heads are ranked: a token, a word, or a position such as `@3` in the first text.

    Raises:
        AttnscopeError: A text is empty; or the query names no token, or only tokens without a counterpart in the other
            text.
    """
    options = options or CompareOptions()
    # Maps of all heads on both texts. `pairs` lists their (layer, head).
    first_reading, first_map = _read_map(model, text, options, Choice())
    second_reading, second_map = _read_map(model, other, options, Choice())
    heads = [head for head in first_map.pairs if first_map.exists(*head)]
    tokens = first_map.queries, second_map.queries

    # Take the rows of the aligned tokens, and sum the weights of the tokens in each aligned key: (head, query, key) ->
    # (head, pair of tokens, aligned key).
    aligned, is_equal, key_lengths = align(*tokens)
    weights = []
    aligned_rows = []
    for side, attention in enumerate((first_map, second_map)):
        side_weights = np.stack([attention.of(*head) for head in heads])
        weights.append(side_weights)
        # 1 where a token is part of an aligned key, (key, aligned key).
        is_part_of = np.repeat(np.eye(len(key_lengths)), key_lengths[:, side], axis=0)
        aligned_rows.append(side_weights[:, aligned[:, side]].astype(np.float64) @ is_part_of)
    # (head, pair of tokens)
    divergences = compute_row_divergences(cast(Divergence, options.measure), *aligned_rows)
    # Mark the pairs of tokens that the query names.
    is_named = np.zeros(len(aligned), np.bool_)
    notes = [*first_reading.notes, *second_reading.notes]
    if query is not None:
        is_named[find_pairs(query, tokens, aligned)] = True
        if is_named.sum() > 1:
            positions = ", ".join(f"@{position}" for position in aligned[is_named, 0])
            notes.append(f"{query!r} names {positions}: heads are ranked by all of these together")

    # The root mean change of each head, overall and at the query.
    name = options.distance
    table = make_heads_table(model, heads)
    for column, label, is_averaged, scope in (
        ("overall", "overall", is_equal, "over the tokens that both texts share"),
        ("at_query", "at query", is_named, "at the tokens that the query names"),
    ):
        meaning = f"how much its rows change {scope}"
        changes = _compute_root_means(divergences[:, is_averaged])
        declared = number(f"{name}_{column}", meaning, label=f"distance {label}", short=label)
        table = table.with_column(declared, changes)
    tables = {
        "heads": table,
        "tokens:first": make_tokens_table(tokens[0]),
        "tokens:second": make_tokens_table(tokens[1]),
        "aligned": Table.of_arrays(
            Comparison.TABLES["aligned"],
            first=aligned[:, 0],
            second=aligned[:, 1],
            equal=is_equal,
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
    return Comparison(run_facts(model.info, notes), corpus, facts, tables, arrays)


def _compute_root_means(divergences: Floats) -> Floats:
    """Return the root of each head's mean divergence, (head, pair of tokens) to (head,).

    NaN divergences do not count: they are of rows that are all 0. A head with only NaN gets NaN.
    """
    counts = np.isfinite(divergences).sum(1)
    with np.errstate(invalid="ignore"):
        roots: Floats = np.sqrt(np.nansum(divergences, 1) / counts)
    return roots


def align(first: Tokens, second: Tokens) -> tuple[Integers, NDArray[np.bool_], Integers]:
    """Align the tokens of two texts.

    An aligned key is a pair of aligned tokens, or a replaced span with unequal numbers of tokens in the two texts. Such
    a span may be empty in one text.

    Returns:
        The positions of the aligned tokens in both texts, (pair of tokens, 2); whether the tokens of a pair are equal,
        (pair of tokens,); and how many tokens each aligned key has in the first and in the second text, (aligned key,
        2), in the order of the texts.
    """
    # The numbers of tokens of each aligned key.
    keys: list[tuple[int, int]] = []
    # The positions in the first and in the second text that no key covers yet.
    a = 0
    b = 0
    # Walk from one equal token to the next, then to the ends of the texts.
    ends = (len(first), len(second))
    for a_end, b_end in [*_find_equal_tokens(first.labels, second.labels), ends]:
        # The span before the equal token: pairs of tokens, or one key.
        if a_end - a == b_end - b:
            keys += [(1, 1)] * (a_end - a)
        else:
            keys.append((a_end - a, b_end - b))
        # The equal token itself.
        keys.append((1, 1))
        a = a_end + 1
        b = b_end + 1
    # There is no token at the ends: drop the key that was added for it.
    lengths = np.array(keys[:-1], np.int64).reshape(-1, 2)
    # The position where each key begins in either text. Keys of equal lengths, (1, 1), are pairs of tokens.
    starts = np.cumsum(lengths, 0) - lengths
    pairs = starts[lengths[:, 0] == lengths[:, 1]]
    is_equal = np.array([first.labels[a] == second.labels[b] for a, b in pairs], np.bool_)
    return pairs, is_equal, lengths


def _find_equal_tokens(first: Sequence[str], second: Sequence[str]) -> list[tuple[int, int]]:
    """Return the positions of the tokens that the fewest edits leave unchanged, (in first, in second), in order.

    Each replaced, inserted or deleted token is one edit (Levenshtein 1966). Of several alignments with the fewest
    edits, the one that prefers replacements is chosen.
    """
    # edits[i][j]: the fewest edits from the first i tokens of the first text to the first j tokens of the second text.
    edits = [list(range(len(second) + 1))]
    for i, token in enumerate(first):
        row = [i + 1]
        for j, other in enumerate(second):
            n_if_replaced = edits[i][j] + int(token != other)
            n_if_deleted = edits[i][j + 1] + 1
            n_if_inserted = row[j] + 1
            row.append(min(n_if_replaced, n_if_deleted, n_if_inserted))
        edits.append(row)
    # Trace the fewest edits back from the ends of both texts.
    pairs: list[tuple[int, int]] = []
    i = len(first)
    j = len(second)
    while i and j:
        is_equal = first[i - 1] == second[j - 1]
        if edits[i][j] == edits[i - 1][j - 1] + int(not is_equal):
            i -= 1
            j -= 1
            if is_equal:
                pairs.append((i, j))
        elif edits[i][j] == edits[i - 1][j] + 1:
            i -= 1
        else:
            j -= 1
    return pairs[::-1]


def find_pairs(query: str, tokens: tuple[Tokens, Tokens], aligned: Integers) -> Integers:
    """Return the indices of the aligned pairs of tokens that a query names in the first text.

    If the query names no aligned token of the first text, return those that it names in the second.

    Raises:
        AttnscopeError: The query names no token, or only tokens without a counterpart in the other text.
    """
    in_first = tokens[0].find(query)
    # Positions such as @3 are positions in the first text.
    in_second = () if query.startswith("@") else tokens[1].find(query)
    for side, positions in enumerate((in_first, in_second)):
        pairs = np.flatnonzero(np.isin(aligned[:, side], positions))
        if len(pairs):
            return pairs
    if in_first or in_second:
        raise AttnscopeError(
            f"{query!r} is in one of the texts alone: there is nothing to compare its row with",
            "choose a token that stands in both",
        )
    raise tokens[0].not_found(query)


def _compute_single_head(
    model: Model, reading: Reading, picked: Sequence[Head]
) -> tuple[NDArray[np.float32] | None, str]:
    """Compute the weights of the single head that `compare_heads` defines.

    Returns:
        Its weights, (query, key), with a note that describes it; or None, with a note that says why it is undefined.
    """
    if model.info.path == "eager":
        return None, "no single head: this model's queries and keys are not at hand"
    # Run the model once more, and keep the `AttentionCall` of each layer: its queries, keys and masks. The model has
    # one kind of attention.
    layers = [layer for layer, _ in picked]
    (call_by_layer,) = keep_attention(model, reading.batch(model.info.device), layers).values()
    # The call of the single head. If the heads cannot be joined, it is a string with the reason instead.
    call = join_heads([(call_by_layer[layer], head) for layer, head in picked])
    if isinstance(call, str):
        return None, f"no single head: {call}"
    # (text, head, query, key) of one text and one head.
    weights = attention_weights(call)[0, 0].to("cpu", torch.float32).numpy()
    # Write the note: it says which heads of which layers are joined.
    note = "single head: softmax over the heads' queries and keys side by side, scores divided by √(heads · d_head)"
    layer = layers[0]
    n_heads = call_by_layer[layer].n_heads
    if len(set(layers)) > 1:
        note += "; as they are of different layers, no one head of the model could compute it"
    elif len(picked) == n_heads:
        note += f"; of all heads of layer {layer}: one head of full width"
    else:
        note += f"; of {len(picked)} of the {n_heads} heads of layer {layer}"
    return weights, note
