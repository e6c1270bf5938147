"""What do heads write for what comes next? Findings in, the same with what each head adds to the answers' logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.core.running import RunningSums
from attnscope.corpus import Block, Corpus, CorpusText
from attnscope.models.model import Model
from attnscope.records.ablation import Effect
from attnscope.records.findings import WRITES, Findings
from attnscope.studies import passes
from attnscope.studies.ablation import effects_of
from attnscope.studies.ablation_reading import ReadBatch, Reader
from attnscope.studies.ablation_sweep import Going, heads_of, longest_first
from attnscope.studies.texts import Report, texts_of

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.attention import AttentionCall
    from attnscope.core.probes import Place

ATTENDED = 0.1
"""The weight that a head must give to the answer's own occurrences to count as attending to it: a convention."""

_PARTS = ("logit", "heads", "feed_forward", "embeddings", "biases")


@dataclass(frozen=True, kw_only=True, eq=False)
class Written(passes.Found):
    """What was added up over texts.

    Attributes:
        sums: By place, of each quantity of WRITES and head.
        parts: What the logits are sums of.
    """

    sums: Mapping[Place, RunningSums]
    parts: RunningSums


def require_writes(model: Model) -> None:
    """Refuses models of which nothing can be said, before texts are read.

    Raises:
        AttnscopeError: It predicts no words, or where it adds to its stream is not known.
    """
    from attnscope.models.attribution import DirectPaths

    DirectPaths(model)


def with_writes(
    found: Findings,
    model: Model,
    texts: Corpus | Sequence[str] | Sequence[CorpusText],
    report: Report | None = None,
) -> Findings:
    """Adds what each head writes by itself for the right answers: direct logit attribution over a corpus.

    An answer is each next token, or each masked one (15% of the tokens). Its logit, less the mean over the
    vocabulary, is the sum of what all heads, feed-forward networks, embeddings and biases add, with the lengths that
    norms divide by taken as they were. Of heads it is told on the whole, and apart for answers that the head attends
    to: whose own occurrences in what is read get a tenth of its weight or more.

    Args:
        found: What heads attend to.
        model: Their model; it predicts words.
        texts: The texts they were studied on.
        report: Called after each batch.

    Raises:
        AttnscopeError: The model predicts no words, or its logits are no such sum.
    """
    require_writes(model)
    going = Going(model, Reader(model, model.loss), texts_of(texts))
    n_heads = heads_of(going).n_heads
    nothing = Written(
        sums={place: RunningSums((len(WRITES), n)) for place, n in n_heads.items()}, parts=RunningSums((len(_PARTS),))
    )
    done = going.run(WritesMeasurer, {"n_heads": n_heads}, nothing, report)
    writes: dict[tuple[str, int, int], dict[str, Effect]] = {}
    for (kind, layer), sums in done.done.sums.items():
        rows = effects_of(sums)
        for head in range(n_heads[kind, layer]):
            writes[kind, layer, head] = {
                name: rows[number * n_heads[kind, layer] + head] for number, name in enumerate(WRITES)
            }
    told = {
        "predicted": "each next token" if model.loss == "causal" else "masked tokens: 15%, seed 0",
        "attended": ATTENDED,
        "n_predictions": int(np.max(done.done.parts.total("c"))) if done.done.parts.n_texts else 0,
        "n_texts": done.done.n_texts,
        "parts": dict(zip(_PARTS, (float(one.value) for one in effects_of(done.done.parts)), strict=True)),
        "what": dict(WRITES),
    }
    run = {**found.run, "notes": [*found.run["notes"], *done.notes]}
    if done.failures:
        run["failures"] = [*run.get("failures", ()), *done.failures]
    return replace(
        found,
        heads=tuple(replace(head, writes=writes.get((head.kind, head.layer, head.head), {})) for head in found.heads),
        options={**found.options, "writes": told},
        run=run,
        corpus={**found.corpus, "complete": found.corpus["complete"] and done.complete},
    )


class BlockWrites:
    """Sums over the texts of a block: (quantity, text, head) by place, with counts."""

    def __init__(self, block: Block, n_heads: Mapping[Place, int]) -> None:
        self.n_texts = self.n_tokens = 0
        n = len(block.texts)
        self.row_of = {text.index: row for row, text in enumerate(block.texts)}
        self.sums = {place: np.zeros((n, len(WRITES), heads)) for place, heads in n_heads.items()}
        self.counts = {place: np.zeros((n, len(WRITES), heads)) for place, heads in n_heads.items()}
        self.parts = np.zeros((n, len(_PARTS)))
        self.n_predictions = np.zeros(n)


class WritesMeasurer:
    """Takes logits apart on the texts of blocks; see `with_writes`."""

    def __init__(self, model: Model, reader: Reader, n_heads: Mapping[Place, int]) -> None:
        from attnscope.models.attribution import DirectPaths

        self._paths, self._reader, self._n_heads = DirectPaths(model), reader, n_heads

    def begin(self, block: Block) -> BlockWrites:
        """Sums of nothing yet."""
        return BlockWrites(block, self._n_heads)

    def steps(self, block: Block, sums: BlockWrites) -> Iterator[None]:
        """Adds a block, batch by batch."""
        reader = self._reader
        for read in longest_first(reader.batches(block)):
            if not len(read.rows):
                continue
            for part, found in reader.room.each(read, self._run_batch, reader.halves, lambda part: part.size):
                self._add(part, found, sums)
            sums.n_texts, sums.n_tokens = sums.n_texts + len(set(read.texts.tolist())), sums.n_tokens + read.n_tokens
            yield

    def finish(self, block: Block, sums: BlockWrites, *, whole: bool) -> Written:
        """What the sums amount to; a text without predictions counts nothing, nor one that is not finite."""
        finite = [np.isfinite(one).all((1, 2)) for one in sums.sums.values()]
        there = np.logical_and.reduce([sums.n_predictions > 0, np.isfinite(sums.parts).all(1), *finite])
        added = {place: RunningSums((len(WRITES), heads)) for place, heads in self._n_heads.items()}
        for place, values in sums.sums.items():
            added[place].add(values[there], sums.counts[place][there])
        parts = RunningSums((len(_PARTS),))
        parts.add(sums.parts[there], np.repeat(sums.n_predictions[there, None], len(_PARTS), 1))
        return Written(
            sums=added, parts=parts, n_texts=sums.n_texts, n_tokens=sums.n_tokens, halved_to=self._reader.room.tokens
        )

    def _run_batch(self, read: ReadBatch) -> tuple[Any, dict[Place, Any]] | None:
        """The parts of the logits, and by place what heads add and their weight on the answers."""
        if not len(read.rows):
            return None
        attended: dict[Place, Tensor] = {}

        def observe(call: AttentionCall) -> Tensor:
            from attnscope.core.attention import attend_with_weights

            output, weights = attend_with_weights(call)
            ids = read.batch.ids.to(weights.device)
            is_answer = ids[read.rows] == read.answers[:, None].to(ids.device)
            on_answers = weights.movedim(1, 2)[read.rows, read.places] * is_answer[:, None]
            attended[call.kind, call.layer] = on_answers.sum(-1).detach()
            return output

        parts = self._paths.run(read.batch, read.rows, read.places, read.answers, observe)
        heads = sum((one.sum(-1) for one in parts.heads.values()), parts.logits * 0)
        told = (parts.logits, heads, parts.feed_forward, parts.embeddings, parts.biases)
        return (
            np.stack([one.cpu().double().numpy() for one in told]),
            {
                place: (added.cpu().double().numpy(), attended[place].cpu().double().numpy())
                for place, added in parts.heads.items()
            },
        )

    @staticmethod
    def _add(read: ReadBatch, found: tuple[Any, dict[Place, Any]] | None, sums: BlockWrites) -> None:
        if found is None:
            return
        parts, by_place = found
        row_of_text = np.array([sums.row_of[int(text)] for text in read.texts])
        rows = row_of_text[read.rows.cpu().numpy()]
        np.add.at(sums.parts, rows, parts.T)
        np.add.at(sums.n_predictions, rows, 1)
        for place, (added, weight) in by_place.items():
            looks = (weight >= ATTENDED).astype(np.float64)
            ones = np.ones_like(added)
            values = np.stack([added, added * looks, added * (1 - looks), weight], 1)
            counts = np.stack([ones, looks, 1 - looks, ones], 1)
            np.add.at(sums.sums[place], rows, values)
            np.add.at(sums.counts[place], rows, counts)
