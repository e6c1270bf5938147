"""What do heads write for what comes next? Findings in, the same with what heads add to logits, and roles by that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core.exact.running import RunningSums
from attnscope.core.measures.catalogue import OFFSETS
from attnscope.core.measures.written import PARTS, WRITTEN
from attnscope.corpus import Block
from attnscope.models.model import Model
from attnscope.records.heads.findings import Findings
from attnscope.studies.ablation.reading import ReadBatch, Reader
from attnscope.studies.heads.merging import add_writes
from attnscope.studies.heads.rules import RULES
from attnscope.studies.inputs.texts import Report, special_ids
from attnscope.studies.measuring.tally import Tally, weigh_units
from attnscope.studies.running import passes
from attnscope.studies.running.passes import Reading
from attnscope.studies.writes.copy_targets import AMONG, RAISED, Numbers, Standing
from attnscope.studies.writes.moving import ATTENDED, Answered, Mover

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.attention.probes import Place
    from attnscope.core.attention.seam import AttentionCall


_NAMES = tuple(WRITTEN)
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Written(passes.Totals):
    """What was added up over texts.

    Attributes:
        tallies: By kind of attention, the measures of WRITTEN.
        parts: What the logits are sums of, in the order of PARTS, and last how many answers; None = nothing was
            predicted.
    """

    tallies: Mapping[str, Tally] = field(default_factory=dict)
    parts: RunningSums | None = None


def require_writes(model: Model) -> None:
    """Refuses models of which nothing can be said, before texts are read.

    Raises:
        AttnscopeError: It predicts no words, or where it adds to its stream is not known.
    """
    from attnscope.models.inside.attribution import DirectPaths

    DirectPaths(model)


def with_writes(
    findings: Findings, reading: Reading, thresholds: Mapping[str, float], report: Report | None = None
) -> Findings:
    """Adds what each head writes by itself for the right answers, and the roles that follow from it.

    An answer is each next token, or each masked one (15% of the tokens). Its logit, less the mean over the vocabulary,
    is the sum of what all heads, feed-forward networks, embeddings and biases add, with the lengths that norms divide
    by taken as they were (direct logit attribution). Texts are cut as they were for `findings`, and only their shard is
    read; sums are as exact and mergeable. What an interruption leaves counts.

    Raises:
        AttnscopeError: The model predicts no words, or its logits are no such sum.
    """
    loss = reading.model.loss
    how = {"loss": loss, "chunk": reading.chunk, "stride": reading.stride}
    make = partial(_measurer_of, reading=how)
    done = reading.run(make, Written(), report, "--writes on a later text")
    described = {
        "predicted": "each next token" if loss == "causal" else "masked tokens: 15%, seed 0",
        "attended": ATTENDED,
        "among": AMONG,
        "measures": list(WRITTEN),
    }
    roles = {name: rule.describe(thresholds[name]) for name, rule in RULES.items() if rule.does}
    measures = {name: measure.describe() for name, measure in WRITTEN.items()}
    options = {
        **findings.options,
        "roles": {**findings.options["roles"], **roles},
        "measures": {**findings.options["measures"], **measures},
        "writes": described,
    }
    return add_writes(findings, done, options)


def _measurer_of(model: Model, *, reading: Mapping[str, Any]) -> WritesMeasurer:
    return WritesMeasurer(model, Reader(model, **reading))


@dataclass(frozen=True, eq=False)
class _Batch:
    """Sums over the units of evidence of a batch: as of `BlockSums`, each chunk, and each part of a long one.

    Attributes:
        units: By place the sums, counts and sums under even attention, each (unit, head, measure).
        pairs: What heads of one offset would reach, and counts, each (unit, MOVED_PAIRS, offset).
        parts: What logits are sums of, (unit, part), and their counts (unit,).
        texts: The text, and how many tokens of it are read there, each (unit,).
    """

    units: dict[Place, tuple[Floats, Floats, Floats]]
    pairs: tuple[Floats, Floats]
    parts: tuple[Floats, Floats]
    texts: tuple[Numbers, Numbers]


class BlockWrites:
    """Sums over the units of evidence of a block, batch by batch."""

    def __init__(self) -> None:
        self.n_texts = self.n_tokens = 0
        self.batches: list[_Batch] = []


class WritesMeasurer:
    """Takes logits apart on the texts of blocks; see `with_writes`."""

    def __init__(self, model: Model, reader: Reader) -> None:
        from attnscope.models.inside.attribution import DirectPaths

        self._paths, self._reader = DirectPaths(model), reader
        mask = model.tokenizer.mask_id
        self._looks_back = model.loss == "causal"
        self._special = special_ids(model) | ({mask} if mask is not None else set())

    def begin(self, block: Block) -> BlockWrites:
        """Sums of nothing yet."""
        return BlockWrites()

    def steps(self, block: Block, sums: BlockWrites) -> Iterator[None]:
        """Adds a block, batch by batch."""
        reader = self._reader
        for read in reader.batches(block):
            if not len(read.rows):
                continue
            for part, batch in reader.room.each(read, self._run_batch, reader.halves, lambda part: part.size):
                if batch is not None:
                    sums.batches.append(batch)
                sums.n_texts += len(set(part.texts.tolist()))
                sums.n_tokens += part.n_tokens
            yield

    def finish(self, block: Block, sums: BlockWrites, *, whole: bool) -> Written:
        """What the sums amount to; what is not finite counts nothing."""
        if not sums.batches:
            return Written(n_texts=sums.n_texts, n_tokens=sums.n_tokens, halved_to=self._reader.room.tokens)
        values, counts = _join(batch.parts for batch in sums.batches)
        hits, of_hits = _join(batch.pairs for batch in sums.batches)
        by_layer = {place: _join(batch.units[place] for batch in sums.batches) for place in sums.batches[0].units}
        there = (counts > 0) & np.isfinite(values).all(1)
        for value, count, even in by_layer.values():
            there &= np.isfinite(value + even + count).all((1, 2))
        texts, n_tokens = _join(batch.texts for batch in sums.batches)
        _, text = np.unique(texts, return_inverse=True)
        weights = (1 / np.bincount(text, n_tokens)[text])[there]
        parts = RunningSums((len(PARTS) + 1,))
        counted, weighed_counts = counts[there], counts[there] * weights
        parts.add(np.column_stack([values[there] * weights[:, None], counted]), weighed_counts[:, None])
        tallies = {}
        for kind in dict.fromkeys(kind for kind, _ in by_layer):
            layers = sorted(layer for of, layer in by_layer if of == kind)
            n_heads = max(by_layer[kind, layer][0].shape[2] for layer in layers)
            tallies[str(kind)] = tally = Tally.empty(str(kind), layers, n_heads, _NAMES)
            value, count, even = (
                np.stack([_pad_heads(by_layer[kind, layer][which][there], n_heads) for layer in layers], 1)
                for which in range(3)
            )
            unweighed = {
                "sum": value,
                "count": count,
                "uniform_sum": even,
                "hits": hits[there],
                "of_hits": of_hits[there],
            }
            weighed = weigh_units(_NAMES, weights, unweighed)
            tally.measures.add(weighed["sum"], weighed["count"])
            tally.uniform.add(weighed["uniform_sum"], weighed["count"])
            tally.pairs.add(weighed["hits"], weighed["of_hits"])
        return Written(
            tallies=tallies, parts=parts, n_texts=sums.n_texts, n_tokens=sums.n_tokens,
            halved_to=self._reader.room.tokens,
        )  # fmt: skip

    def _run_batch(self, read: ReadBatch) -> _Batch | None:
        """The sums of a batch; none without predictions."""
        import torch

        if not len(read.rows):
            return None
        calls: dict[Place, AttentionCall] = {}

        def keep(call: AttentionCall) -> Tensor:
            from attnscope.core.attention.seam import attend

            calls[call.kind, call.layer] = call
            return attend(call)

        traced = self._paths.trace(read.batch, read.rows, read.places, keep)
        parts = traced.parts(read.answers)
        unit, n_units = _units_of(read)
        standing = [
            Standing.of(row.ids, self._special, row.places, row.answers, looks_back=self._looks_back)
            for row in read.made_of
        ]
        mover = Mover(read, traced, calls, self._special)
        with torch.no_grad():
            answered = self._move(mover, standing)
        heads = sum((of_head.sum(-1) for of_head in parts.heads.values()), parts.logits * 0)
        sizes = torch.stack((parts.logits, heads, parts.feed_forward, parts.embeddings, parts.biases), -1)
        units = {}
        for place, added in parts.heads.items():
            with torch.no_grad():
                columns = answered.columns(place, added)
            values, counts, even = (_by_unit(of_head, unit, n_units) for of_head in columns)
            units[place] = (values, counts, even)
        ones = torch.ones(len(read.rows))
        return _Batch(
            units,
            (_by_unit(answered.hits, unit, n_units), _by_unit(answered.of_hits, unit, n_units)),
            (_by_unit(sizes, unit, n_units), _by_unit(ones, unit, n_units)),
            _texts_of(read),
        )

    def _move(self, mover: Mover, standing: Sequence[Standing]) -> Answered:
        """What heads move onto all tokens that count."""
        import torch

        read = mover.read
        offsets = [offset for offset in OFFSETS if offset <= 0 or not self._looks_back]
        copied = [row.copied() for row in standing]
        # Where the answer stands nowhere, its logit is looked at all the same, for what a head adds on the whole.
        answers, rivals = map(mover.tensor, zip(*copied, strict=True))
        elsewhere = mover.move_elsewhere(standing, copied, offsets)
        onto_answers = mover.move(read.answers, torch.where(rivals >= 0, rivals, read.answers))
        induction = None
        if self._looks_back:
            repeated = [row.repeated(self._special) for row in standing]
            tokens, others, after = map(mover.tensor, zip(*repeated, strict=True))
            induction = tokens >= 0, mover.move(tokens, others, after)
        logits = mover.traced.logits
        own = logits - logits.mean(-1, keepdim=True)
        least = own.topk(min(AMONG, own.shape[-1]), -1).values[:, -1]
        likeliest, first = [], 0
        for row in standing:
            rows = slice(first, first := first + len(row.places))
            types = torch.from_numpy(row.types).to(own.device).clamp(max=own.shape[-1] - 1)
            likeliest.append(row.likeliest(own[rows][:, types].float().cpu().numpy(), self._special))
        candidates = []
        for several in zip(*likeliest, strict=True):
            tokens, others = map(mover.tensor, zip(*several, strict=True))
            control = mover.move_elsewhere(standing, several, offsets)
            there = control.index >= 0
            mine, other = (
                own[rows].gather(-1, tokens.clamp(min=0)[:, None])[:, 0].where(there, own.new_tensor(-torch.inf))
                for rows in (slice(None), control.index.clamp(min=0))
            )
            candidates.append((mine, mover.move(tokens, others), other, control))
        mine, _, other, control = candidates[0]
        likely = (mine >= least) & (mine - other >= RAISED)
        hits = torch.stack([elsewhere.hits, control.hits.where(likely[:, None], control.hits.new_zeros(()))], 1)
        counts = torch.stack([elsewhere.index >= 0, likely], 1).to(hits)[..., None].expand_as(hits)
        return Answered(answers >= 0, onto_answers, elsewhere, induction, candidates, least, hits, counts)


def _join(batches: Iterable[tuple[NDArray[Any], ...]]) -> tuple[NDArray[Any], ...]:
    return tuple(np.concatenate(arrays) for arrays in zip(*batches, strict=True))


def _units_of(read: ReadBatch) -> tuple[NDArray[np.int64], int]:
    """The unit of evidence of each prediction of a batch, and how many units there are."""
    from attnscope.core.measures.catalogue import unit_queries

    sizes = [unit_queries(len(row.ids)) for row in read.made_of]
    n_units = [-(-len(row.ids) // size) for row, size in zip(read.made_of, sizes, strict=True)]
    first = np.cumsum([0, *n_units])
    units = [first[i] + row.places // sizes[i] for i, row in enumerate(read.made_of)]
    return np.concatenate(units), int(first[-1])


def _texts_of(read: ReadBatch) -> tuple[Numbers, Numbers]:
    """The text of each unit of a batch, and how many of its tokens the unit has."""
    from attnscope.core.measures.catalogue import unit_queries

    texts, n_tokens = [], []
    for row in read.made_of:
        size = unit_queries(len(row.ids))
        starts = range(0, len(row.ids), size)
        texts += [row.text] * len(starts)
        n_tokens += [min(size, len(row.ids) - start) for start in starts]
    return np.array(texts, np.int64), np.array(n_tokens, np.int64)


def _by_unit(values: Tensor, unit: NDArray[np.int64], n_units: int) -> Floats:
    """(prediction, ...) added up by unit, (unit, ...)."""
    array = values.detach().cpu().double().numpy()
    sums = np.zeros((n_units, *array.shape[1:]))
    np.add.at(sums, unit, array)
    return sums


def _pad_heads(values: Floats, n_heads: int) -> Floats:
    """(unit, measure, head) -> (unit, head, measure) with as many heads as the widest layer has."""
    laid: Floats = np.zeros((len(values), n_heads, values.shape[1]))
    laid[:, : values.shape[2]] = values.transpose(0, 2, 1)
    return laid
