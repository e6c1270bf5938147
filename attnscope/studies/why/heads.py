"""What do heads' choices of keys rest on, over texts? A model and texts in, a WhyHeads record out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core.exact.running import RunningSums
from attnscope.core.plain_torch import with_plain_torch
from attnscope.corpus import Copies, Corpus, CorpusText, distinct
from attnscope.corpus.batching import tokens_of
from attnscope.errors import AttnscopeError, amount, require_rounding
from attnscope.models.model import Model
from attnscope.records.teaching.trace import EDGES
from attnscope.records.why.heads import BANDS, SIDES, WhyHeads
from attnscope.records.why.score import Part
from attnscope.studies.circuits.study import composition
from attnscope.studies.inputs.choice import Choice
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.reading import Reading, batch_of, truncate
from attnscope.studies.inputs.texts import Progress, Report, problems_of, share_read, special_ids, texts_of
from attnscope.studies.why.study import in_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnscope.core.attention.seam import AttentionCall
    from attnscope.core.teaching.stepwise import Rotation
    from attnscope.models.inside.score_parts import ScoreRuns, TracedScores

_TOLERANCE = 1e-3
"""Of the variance: how far the sum of covariances may be off before it is said that a part is not known."""

MOST_TOKENS = 512
"""Of a text that are read: the scores of a head are as many as its pairs of tokens."""

Place = tuple[int, int]


@with_plain_torch
def why_heads(
    model: Model,
    corpus: Corpus | str | Sequence[str] | Sequence[CorpusText],
    choice: Choice | None = None,
    report: Report | None = None,
) -> WhyHeads:
    """Finds the parts of a model that each head's choice of keys rests on: shares of the variance of its scores.

    Scores are taken apart as by `why`. Each text is read up to MOST_TOKENS or the model's limit. Copies of a text count
    once.

    Args:
        model: A loaded model, see `attnscope.load`: an encoder or a decoder of text.
        corpus: What to run it on: a Corpus, or texts.
        choice: Which heads; None = all. Each takes about two backward passes for each text.
        report: Called after each text.

    Raises:
        AttnscopeError: There is no text, the model does not show its queries and keys, or something adds to its stream
            that is not known.
    """
    from attnscope.models.inside.score_parts import ScoreRuns

    info = model.info
    if len(info.kinds) != 1:
        raise AttnscopeError(
            f"{info.name} has {', '.join(info.kinds)} attention: shares are of one stack of layers",
            "choose an encoder or a decoder, or take one score apart: attnscope why TEXT --kind cross",
        )
    within, limit = (choice or Choice()).within(info), min(info.max_tokens or MOST_TOKENS, MOST_TOKENS)
    heads = within.picked or tuple((layer, head) for layer in within.layers for head in within.heads)
    texts, copies, runs = texts_of(corpus, model), Copies(), ScoreRuns(model)
    special, n_cut = special_ids(model), 0
    tally: _Tally | None = None
    n_texts = n_tokens = 0
    for text in distinct(texts, copies):
        tokens, note = truncate(tokens_of(text, model.tokenizer.encode, special), limit)
        n_cut += bool(note)
        sums = _covariances(model, runs, Reading("", tokens), heads)
        tally = tally or _Tally(heads, sums)
        tally.add(sums)
        n_texts, n_tokens = n_texts + 1, n_tokens + sums.n_tokens
        if report is not None:
            report(Progress(n_texts, n_tokens, share_read(texts)))
    if tally is None:
        raise AttnscopeError("there is no text", "give one that is not blank")
    sources = list(getattr(texts, "sources", ()))
    corpus_facts = {
        "n_texts": n_texts, "n_tokens": n_tokens, "n_copies": copies.n, "sources": sources,
        "problems": problems_of(texts),
    }  # fmt: skip
    notes = [f"of {amount(n_cut, 'text')} only the first {limit} tokens were read"] if n_cut else []
    return tally.record(model, notes, corpus_facts)


class _TextSums:
    """Sums over one text.

    Attributes:
        n_pairs: Pairs of query and key that count, by head.
        variance: Σ of squared scores, less their query's mean, by head.
        bias: Their Σ product with the bias, by head.
        parts: For each side, part -> head -> their Σ product with what the part adds.
        bands: Their Σ product with what each band of wavelengths adds, by head, (band,); none where heads are not
            rotated, or attnscope cannot tell how.
    """

    def __init__(self, n_tokens: int) -> None:
        self.n_tokens = n_tokens
        self.n_pairs: dict[Place, int] = {}
        self.variance: dict[Place, float] = {}
        self.bias: dict[Place, float] = {}
        self.parts: tuple[dict[Part, dict[Place, float]], ...] = ({}, {})
        self.bands: dict[Place, NDArray[np.float64]] = {}


def _covariances(model: Model, runs: ScoreRuns, reading: Reading, heads: Sequence[Place]) -> _TextSums:
    """The products of a text's scores with what each part adds to them, summed over pairs."""
    kind: Any = model.info.kinds[0]
    layers = sorted({layer for layer, _ in heads})
    traced = runs.trace(batch_of(reading, model.info.device), [(kind, layer) for layer in layers])
    sums = _TextSums(len(reading.tokens))
    for layer in layers:
        _add_layer(sums, traced, traced.calls[kind, layer], [head for of_layer, head in heads if of_layer == layer])
    return sums


def _add_layer(of_text: _TextSums, traced: TracedScores, call: AttentionCall, heads: Sequence[int]) -> None:
    import torch

    from attnscope.core.attention.seam import allowed, select_heads

    with torch.no_grad():
        mine = select_heads(call, heads)
        query, key = mine.query[0].double(), mine.key[0].double()
        products = mine.scale * query @ key.mT
        mask = allowed(mine)
        may = (torch.ones_like(products, dtype=torch.bool) if mask is None else mask[0].expand_as(products)).double()
        counts = may.sum(-1, keepdim=True).clamp(min=1)

        def less_mean(values: torch.Tensor) -> torch.Tensor:
            return (values - (values * may).sum(-1, keepdim=True) / counts) * may

        bias = torch.zeros_like(products) if mine.bias is None else mine.bias.expand(1, *products.shape)[0].double()
        scores = less_mean(products + bias)
        layer_heads = [(call.layer, head) for head in heads]
        variance, biased = scores.square().sum((1, 2)).tolist(), (scores * bias).sum((1, 2)).tolist()
        at_query, at_key = (
            call.query.new_zeros(len(heads), *call.query.shape),
            call.key.new_zeros(len(heads), *call.key.shape),
        )
        group = call.n_heads // call.n_kv_heads
        for number, head in enumerate(heads):
            at_query[number, 0, head] = (mine.scale * scores[number] @ key[number]).to(at_query)
            at_key[number, 0, head // group] = (mine.scale * scores[number].T @ query[number]).to(at_key)
            if (rotation := traced.rotations[call.kind, call.layer]) is not None:
                by_column = (query[number] * (mine.scale * scores[number] @ key[number])).sum(0)
                of_text.bands[call.layer, head] = _sum_bands(by_column.numpy(force=True), rotation)
    of_text.variance |= dict(zip(layer_heads, variance, strict=True))
    of_text.bias |= dict(zip(layer_heads, biased, strict=True))
    of_text.n_pairs |= dict(zip(layer_heads, may.sum((1, 2)).int().tolist(), strict=True))
    for side, output, slopes in zip(of_text.parts, (call.query, call.key), (at_query, at_key), strict=True):
        sums = dict.fromkeys(layer_heads, 0.0)
        for part, values in traced.along(output, slopes).items():
            side.setdefault(part, {}).update(zip(layer_heads, values[:, 0].tolist(), strict=True))
            for place, value in zip(layer_heads, values[:, 0].tolist(), strict=True):
                sums[place] += value
        for place, added in zip(layer_heads, biased, strict=True):
            require_rounding(
                f"something else adds to the stream: the variance of L{place[0]}H{place[1]}'s scores differs from the "
                "sum of what its heads, its feed-forward networks, its embeddings and biases add",
                abs(sums[place] + added - of_text.variance[place]), _TOLERANCE * (1 + of_text.variance[place]),
                "what heads do can still be seen: attnscope ablate",
            )  # fmt: skip


def _sum_bands(by_column: NDArray[np.float64], rotation: Rotation) -> NDArray[np.float64]:
    """What columns add, (d_head,), summed over the pairs of each band of wavelengths; then the columns not turned."""
    sums = np.zeros(len(BANDS))
    bands = np.minimum(np.searchsorted(EDGES, rotation.wavelengths, side="right") - 1, len(BANDS) - 2)
    np.add.at(sums, bands, by_column[rotation.pairs].sum(1))
    sums[-1] = by_column[rotation.unpaired].sum()
    return sums


class _Tally:
    """Sums over texts, on their way into a record."""

    def __init__(self, heads: Sequence[Place], first: _TextSums) -> None:
        self._heads = tuple(heads)
        self._parts = tuple(sorted({part for side in first.parts for part in side}, key=in_order))
        shape = len(SIDES), len(heads), len(self._parts)
        self._reads = np.array([
            [[head in side.get(part, {}) for part in self._parts] for head in heads] for side in first.parts
        ])  # fmt: skip
        self._shares, self._bias = RunningSums(shape), RunningSums((len(heads),))
        self._variance, self._bands = RunningSums((len(heads),)), RunningSums((len(heads), len(BANDS)))
        self._is_rotated = np.array([head in first.bands for head in heads])

    def add(self, of_text: _TextSums) -> None:
        """Adds a text."""
        sums = np.array([
            [[side.get(part, {}).get(head, 0.0) for part in self._parts] for head in self._heads]
            for side in of_text.parts
        ])  # fmt: skip
        variance = np.array([of_text.variance[head] for head in self._heads])
        self._shares.add(sums, variance[None, :, None])
        unknown = np.zeros(len(BANDS))
        bands = np.array([of_text.bands.get(head, unknown) for head in self._heads])
        self._bands.add(bands, np.broadcast_to(variance[:, None], bands.shape))
        self._bias.add(np.array([of_text.bias[head] for head in self._heads]), variance)
        self._variance.add(variance, np.array([of_text.n_pairs[head] for head in self._heads], np.float64))

    def record(self, model: Model, notes: Sequence[str], corpus: dict[str, Any]) -> WhyHeads:
        """The record of all texts."""
        low, high = self._shares.interval()
        shares = self._shares.ratio()
        for array in (shares, low, high):
            array[~self._reads] = np.nan
        composed, note = _compose_by_weights(model, self._heads, self._parts)
        run = run_of(model.info, [*notes, *([note] if note else [])])
        return WhyHeads(
            run, corpus, model.info.kinds[0], self._heads, self._parts, shares, low, high, self._bias.ratio(),
            self._variance.ratio(), composed, self._wavelengths(),
        )  # fmt: skip

    def _wavelengths(self) -> NDArray[np.float64] | None:
        if not self._is_rotated.any():
            return None
        shares = np.stack([self._bands.ratio(), *self._bands.interval()], axis=-1)
        shares[~self._is_rotated] = np.nan
        return shares


def _compose_by_weights(model: Model, heads: Sequence[Place], parts: Sequence[Part]) -> tuple[NDArray[np.float64], str]:
    """Composition by queries and keys from the weights, above random directions; and why it is not known."""
    composed = np.full((len(SIDES), len(heads), len(parts)), np.nan)
    try:
        by_weights = composition(model)
    except AttnscopeError as error:
        return composed, f"composition from the weights is not known: {error.message}"
    excess, n_heads = by_weights.share - by_weights.expected, model.info.n_heads[0]
    if excess.shape[1] != model.info.n_layers[0] * n_heads:
        return composed, "composition from the weights is left out: layers differ in heads"
    for column, part in enumerate(parts):
        if part.kind == "head":
            sender = part.layer * n_heads + part.head
            for row, (layer, head) in enumerate(heads):
                composed[:, row, column] = excess[: len(SIDES), sender, layer * n_heads + head]
    return composed, ""
