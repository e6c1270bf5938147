"""A few heads side by side on one text, and how every head's rows change between two texts that differ in little."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from attnscope.choice import Choice
from attnscope.core.attention.calls import Calls, single_head
from attnscope.core.attention.seam import attention_weights
from attnscope.core.distance import Measure, row_divergences
from attnscope.core.plain_torch import with_plain_torch
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.model import Model
from attnscope.questions.compare import Comparison
from attnscope.questions.distances import MEASURES
from attnscope.questions.heatmap import Heatmap
from attnscope.questions.map_changes import divide_by_rest
from attnscope.results.table import Table, number
from attnscope.results.tokens import Tokens, tokens_table
from attnscope.studies.compare.options import require_measures
from attnscope.studies.compare.pairs import HeadPlace, name_of, sums_of_rows
from attnscope.studies.compare.study import heads_table, require_one_kind
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.reading import Prompt, Reading, batch_of, read
from attnscope.studies.maps.running import outline, run_model

Floats = NDArray[np.float64]

_WHERE = {"overall": "over the tokens that both texts share", "at_query": "at the tokens that the query names"}


@with_plain_torch
def compare_heads(
    model: Model, text: str, pick: Sequence[HeadPlace], *, measure: str = "hellinger", hide_special: bool = False
) -> Comparison:
    """Puts a few heads of a model side by side on a text, with their mean and the single head that they would make.

    The single head is softmax(scale / √n · Σ_h q_h · k_h) for n heads. It has the queries and keys of all n heads side
    by side, and divides its scores by the root of n · d_head. With all heads of a layer, it is one head of full width.
    It is not the mean of the heads.

    Args:
        model: A loaded model, see `attnscope.load`.
        text: What to run it on.
        pick: The heads, as (layer, head); at least two.
        measure: Which divergence stands at the front: "hellinger" or "jensen_shannon".
        hide_special: Leaves special tokens out, of a decoder the first token too, and divides each row by what is left
            of it.

    Raises:
        AttnscopeError: Fewer than two heads, or one that there is not; an empty text.
    """
    require_measures((measure,))
    picked = tuple(dict.fromkeys(pick))
    if len(picked) < 2:
        raise UsageError("one head is nothing to compare", "pick at least two, such as L3H1,L5H11")
    require_one_kind(model)
    reading = read(model, Prompt(text))
    record = run_model(model, outline(model.info, reading, Choice(pick=picked).within(model.info)), reading)
    attention = record.maps[0]
    for head in picked:
        if not attention.exists(*head):
            raise AttnscopeError(f"there is no attention in L{head[0]}H{head[1]}", "pick other heads")
    single, note = _single(model, reading, picked)
    weights = np.stack([attention.of(*head) for head in picked])
    tokens = reading.tokens
    if hide_special and (sinks := tokens.sinks(attention.kind)).any():
        keep = ~sinks
        weights, *others = (
            divide_by_rest(w[..., keep, :][..., keep]).astype(np.float32)
            for w in (weights, *([] if single is None else [single]))
        )
        single = others[0] if others else None
        tokens = tokens.take(keep)
    mean = weights.mean(0, dtype=np.float64).astype(np.float32)
    arrays: dict[str, NDArray[Any]] = {"weights:first": weights, "mean:first": mean}
    if single is not None:
        arrays["single:first"] = single
    measures = [*dict.fromkeys((measure, *MEASURES))]
    names = [name_of((each, not hide_special)) for each in measures]
    for each, name in zip(measures, names, strict=True):
        arrays |= _distances(each, name, weights)
    tables = {"heads": heads_table(model, picked), "tokens:first": tokens_table(tokens)}
    said = {"compared": "picked", "distances": names, "single_note": note}
    return Comparison(run_of(model.info, reading.notes), {"text": tokens.text}, said, tables, arrays)


@with_plain_torch
def compare_texts(
    model: Model,
    text: str,
    other: str,
    *,
    query: str | None = None,
    measure: str = "hellinger",
    hide_special: bool = False,
) -> Comparison:
    """Ranks all heads of a model by how much their rows change from one text to another: a minimal pair.

    Tokens are aligned by the fewest edits (Levenshtein): tokens that are replaced, inserted or deleted. Between equal
    tokens, replaced ones are aligned one by one if both texts have the same number of them. Otherwise, the whole
    replaced stretch is one key. A key that only one text has weighs 0 in the other.

    The change of a head is the root of the mean divergence over the queries that are equal in both texts, or over the
    tokens that `query` names.

    Args:
        model: A loaded model, see `attnscope.load`.
        text: The first text.
        other: The second.
        query: The token that heads are ranked at: a token, a word, or a place such as `@3` in the first text.
        measure: "hellinger" or "jensen_shannon".
        hide_special: Leaves special tokens out, of a decoder the first token too, and divides each row by what is left
            of it.

    Raises:
        AttnscopeError: An empty text; the query names no token, or none that the other text has something for.
    """
    require_measures((measure,))
    require_one_kind(model)
    readings = [read(model, Prompt(each)) for each in (text, other)]
    everything = Choice().within(model.info)
    records: list[Heatmap] = []
    for reading in readings:
        record = run_model(model, outline(model.info, reading, everything), reading)
        records.append(record.hide_special() if hide_special else record)
    first, second = (record.maps[0] for record in records)
    heads = tuple((layer, head) for layer in first.layers for head in first.heads if first.exists(layer, head))
    weights, others = (np.stack([each.of(*head) for head in heads]) for each in (first, second))
    tokens = (first.queries, second.queries)
    aligned, equal, keys = align(*tokens)
    rows = weights[:, aligned[:, 0]], others[:, aligned[:, 1]]
    pooled = [
        np.stack([row[:, :, list(places[side])].sum(-1, dtype=np.float64) for places in keys], -1)
        for side, row in enumerate(rows)
    ]
    divergences = {name: row_divergences(cast(Measure, name), *pooled) for name in MEASURES}
    queries = () if query is None else find_pairs(query, tokens, aligned)
    notes = [note for reading in readings for note in reading.notes]
    notes += [] if query is None else _note_pooled(query, tokens, aligned[list(queries)])

    # What is kept: the change of each head by both measures, those first by which heads are ranked.
    measures = [*dict.fromkeys((measure, *MEASURES))]
    names = [name_of((each, not hide_special)) for each in measures]
    asked = np.isin(np.arange(len(aligned)), queries)
    heads_of_both = heads_table(model, heads)
    arrays: dict[str, NDArray[Any]] = {"weights:first": weights, "weights:second": others}
    for each, name in zip(measures, names, strict=True):
        arrays[f"divergence:{name}"] = divergences[each]
        for where, rows_there in (("overall", equal), ("at_query", asked)):
            column = number(
                f"{name}_{where}", f"how much its rows change {_WHERE[where]}", label=where.replace("_", " ")
            )
            heads_of_both = heads_of_both.with_column(column, _root_mean(divergences[each][:, rows_there]))
    tables = {
        "heads": heads_of_both,
        "tokens:first": tokens_table(tokens[0]),
        "tokens:second": tokens_table(tokens[1]),
        "aligned": Table.of_arrays(
            Comparison.TABLES["aligned"], first=aligned[:, 0], second=aligned[:, 1], equal=equal, asked=asked
        ),
    }
    said = {"compared": "texts", "distances": names, "query": query}
    corpus = {"text": tokens[0].text, "other_text": tokens[1].text}
    return Comparison(run_of(model.info, notes), corpus, said, tables, arrays)


def _root_mean(divergences: Floats) -> Floats:
    """Return the root of the mean over queries, (head,), of divergences, (head, query); NaN where none is known."""
    known = ~np.isnan(divergences)
    counts = known.sum(1)
    sums = np.where(known, divergences, 0.0).sum(1)
    unknown = np.full(len(sums), np.nan)
    means: Floats = np.divide(sums, counts, out=unknown, where=counts > 0)
    return np.sqrt(means)


def align(first: Tokens, second: Tokens) -> tuple[NDArray[np.int64], NDArray[np.bool_], list[tuple[range, range]]]:
    """Which tokens of two texts stand for each other.

    Returns:
        Positions of aligned tokens in both texts, (pair, 2). Which of the pairs are equal tokens, (pair,). And the keys
        over which rows are compared: positions in the first and in the second text whose weights are summed. Aligned
        tokens are one key each, stretches of different lengths are one key, and a token may have nothing in the other.
    """
    pairs: list[tuple[int, int]] = []
    equal: list[bool] = []
    keys: list[tuple[range, range]] = []
    a = b = 0
    for a_end, b_end in [*_equal_tokens(first.labels, second.labels), (len(first), len(second))]:
        if a_end - a == b_end - b:
            pairs += zip(range(a, a_end), range(b, b_end), strict=True)
            equal += [False] * (a_end - a)
            keys += [(range(i, i + 1), range(j, j + 1)) for i, j in zip(range(a, a_end), range(b, b_end), strict=True)]
        else:
            keys.append((range(a, a_end), range(b, b_end)))
        if a_end < len(first) and b_end < len(second):
            pairs.append((a_end, b_end))
            equal.append(True)
            keys.append((range(a_end, a_end + 1), range(b_end, b_end + 1)))
        a, b = a_end + 1, b_end + 1
    return np.array(pairs, np.int64).reshape(-1, 2), np.array(equal, np.bool_), keys


def _equal_tokens(first: Sequence[str], second: Sequence[str]) -> list[tuple[int, int]]:
    """Positions of the equal tokens that stand for each other under the fewest edits, ascending.

    Each replaced, inserted or deleted token is one edit (Levenshtein 1966). Among alignments with as few edits, the one
    that replaces tokens is chosen.
    """
    numbers = {label: number for number, label in enumerate(dict.fromkeys([*first, *second]))}
    ours, theirs = (np.array([numbers[label] for label in labels], np.int64) for labels in (first, second))
    inserted = np.arange(len(theirs) + 1)
    edits = np.empty((len(ours) + 1, len(theirs) + 1), np.int32)
    edits[0] = inserted
    for row, token in enumerate(ours, 1):
        edits[row, 0] = row
        edits[row, 1:] = np.minimum(edits[row - 1, :-1] + (theirs != token), edits[row - 1, 1:] + 1)
        edits[row] = np.minimum.accumulate(edits[row] - inserted) + inserted
    pairs: list[tuple[int, int]] = []
    a, b = len(ours), len(theirs)
    while a and b:
        if edits[a, b] == edits[a - 1, b - 1] + (ours[a - 1] != theirs[b - 1]):
            a, b = a - 1, b - 1
            if ours[a] == theirs[b]:
                pairs.append((a, b))
        elif edits[a, b] == edits[a - 1, b] + 1:
            a -= 1
        else:
            b -= 1
    return pairs[::-1]


def find_pairs(query: str, tokens: tuple[Tokens, Tokens], aligned: NDArray[np.int64]) -> tuple[int, ...]:
    """The aligned pairs that a query names, in the first text, else in the second; refuses a query that names none."""
    named = False
    for side in (0, 1):
        if query.startswith("@") and side:
            continue
        places = tokens[side].find(query)
        named = named or bool(places)
        if pairs := tuple(int(pair) for pair in np.flatnonzero(np.isin(aligned[:, side], places))):
            return pairs
    if named:
        raise AttnscopeError(
            f"{query!r} is in one of the texts alone: there is nothing to compare its row with",
            "choose a token that stands in both",
        )
    raise tokens[0].refuse(query)


def _note_pooled(query: str, tokens: tuple[Tokens, Tokens], pairs: NDArray[np.int64]) -> list[str]:
    """A note if a query stands at several positions, whose divergences become one number."""
    notes = []
    for name, all_positions in tokens[0].find_repeated(query).items():
        if len(at := [position for position in all_positions if position in pairs[:, 0]]) > 1:
            positions = ", ".join(f"@{position}" for position in at)
            notes.append(
                f"{name!r} stands at {positions}: heads are ranked by all together; --query @{at[0]} takes one"
            )
    return notes


def _single(model: Model, reading: Reading, picked: Sequence[HeadPlace]) -> tuple[NDArray[np.float32] | None, str]:
    """The weights of the single head, (query, key), and what they mean; or none, and why."""
    if model.info.path == "eager":
        return None, "no single head: this model's queries and keys are not at hand"
    probe = Calls([layer for layer, _ in picked])
    with torch.no_grad():
        model.run(batch_of(reading, model.info.device), probe)
        (by_layer,) = probe.maps.values()
        call = single_head([(by_layer[layer], head) for layer, head in picked])
        if isinstance(call, str):
            return None, f"no single head: {call}"
        weights = attention_weights(call)[0, 0].to("cpu", torch.float32).numpy()
    layers = {layer for layer, _ in picked}
    rule = "single head: softmax over the heads' queries and keys side by side, scores divided by √(heads · d_head)"
    if len(layers) > 1:
        return weights, f"{rule}; as they are of different layers, no one head of the model could compute it"
    if len(picked) == by_layer[picked[0][0]].n_heads:
        return weights, f"{rule}; of all heads of layer {picked[0][0]}: one head of full width"
    return weights, f"{rule}; of {len(picked)} of the {by_layer[picked[0][0]].n_heads} heads of layer {picked[0][0]}"


def _distances(measure: str, name: str, weights: NDArray[np.float32]) -> dict[str, NDArray[np.float64]]:
    """Return the distances between heads on one text; without intervals, which several texts would give."""
    sums, counts = sums_of_rows(measure, [weights], None, None)
    mean = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
    unknown = np.full(sums.shape, np.nan)
    return {
        f"distance:{name}": np.sqrt(mean),
        f"distance_low:{name}": unknown,
        f"distance_high:{name}": unknown,
        f"distance_count:{name}": counts,
    }
