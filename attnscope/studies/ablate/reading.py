"""What a model reads while heads are taken out of it, and what it is to predict: rows of tokens in padded batches.

A decoder predicts each next token. A masked model predicts tokens that are hidden from it: a seeded share of each text,
or each in turn. An encoder-decoder predicts its target: what was given, else its own greedy answer. In every case only
ordinary tokens are predicted, never the special ones that every text has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from attnscope.corpus import Block, Chunk, block_batches
from attnscope.errors import AttnscopeError
from attnscope.models.model import Batch, Loss, Model
from attnscope.questions.ablate import EACH
from attnscope.results.tokens import Tokens
from attnscope.studies.inputs.texts import Report, Texts, pad_rows, special_ids
from attnscope.studies.run import STEP, Measurer, P, Run, padded_size, run
from attnscope.studies.workers import Workers

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.attention.seam import Kind

ROW_TOKENS = 512
"""Tokens in a batch of rows, padding included; with a language-model head, whose logits are broad, half as many."""

Numbers = NDArray[np.int64]

BLOCK = 32
"""Texts that are finished together: an interruption loses no more."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Row:
    """One row of a batch.

    Attributes:
        text: The index of the text that it belongs to.
        ids: What the model reads, with masks in it.
        target: What the decoder of an encoder-decoder reads; None for other models.
        places: At which tokens of the output something is predicted.
        answers: The tokens that are right there.
        apart: Which of them each of `questions.ablate.PLACES` has, (place, prediction).
        n_rows: How many rows the text has.
    """

    text: int
    ids: Numbers
    segments: Numbers
    target: Numbers | None
    places: Numbers
    answers: Numbers
    apart: NDArray[np.bool_]
    n_rows: int = 1

    def __len__(self) -> int:
        """Return its tokens; of two lengths the longer one tells what a pass costs."""
        return max(len(self.ids), 0 if self.target is None else len(self.target))

    @property
    def n_tokens(self) -> int:
        """How many tokens are read."""
        return len(self.ids) + (0 if self.target is None else len(self.target))


@dataclass(frozen=True, eq=False)
class ReadBatch:
    """Rows as a model takes them.

    Attributes:
        texts: The index of the text of each row.
        real: Which of the tokens that hidden states belong to are real, (row, token).
        queries: Which queries are real, (row, query), by kind of attention.
        rows: The row of each prediction.
        places: The token of each prediction.
        answers: The right token of each prediction.
        apart: Which of them each of `questions.ablate.PLACES` has, (place, prediction).
        size: How many tokens it has, padding included.
    """

    batch: Batch
    texts: Numbers
    real: Tensor
    queries: Mapping[Kind, Tensor]
    rows: Tensor
    places: Tensor
    answers: Tensor
    apart: Tensor
    size: int


class Reader:
    """Makes batches of texts for one model.

    Args:
        model: The model.
        loss: What it is to predict; None = nothing.
        masked: The share of ordinary tokens that is hidden from a masked model, at least one per text; "each": every
            one in turn, in a row of its own (pseudo-log-likelihood, Salazar et al. 2020).
        seed: Of the choice of tokens.
        target: What an encoder-decoder is to write; None = its own greedy answer to each text.
        chunk: See `corpus.chunks`; a token that two chunks share is predicted in the first of them alone.
        stride: See there.

    Attributes:
        arguments: All but the model, by which workers make another one.

    Raises:
        AttnscopeError: The model has no mask token to hide others with, or no target to write.
    """

    def __init__(
        self,
        model: Model,
        loss: Loss | None,
        *,
        masked: float | Literal["each"] = 0.15,
        seed: int = 0,
        target: str | None = None,
        chunk: int | None = None,
        stride: int | None = None,
    ) -> None:
        self._model, self._loss, self._masked, self._seed = model, loss, masked, seed
        self._cut: dict[str, Any] = {"chunk": chunk, "stride": stride}
        self.arguments: dict[str, Any] = {"loss": loss, "masked": masked, "seed": seed, "target": target}
        self._special = special_ids(model)
        self._mask_id: int | None = None
        if loss == "masked":
            self._mask_id = model.tokenizer.mask_id
            if self._mask_id is None:
                raise AttnscopeError(
                    f"the tokenizer of {model.info.name} has no token that hides another",
                    "--loss none compares hidden states alone",
                )
        self._target: Callable[[Tokens], Numbers] | None = None
        if "cross" in model.info.kinds:
            self._target = _target_of(model, target)
        elif target is not None:
            raise AttnscopeError(f"{model.info.name} is no encoder-decoder, so it has no target", "leave out --target")

    def batches(self, block: Block) -> Sequence[Sequence[Row]]:
        """The texts of a block in batches of at most ROW_TOKENS tokens, the longest first.

        What shorter ones need fits into the memory that longer ones have freed.
        """
        parts = block_batches(
            block,
            self._model.tokenizer.encode,
            limit=self._model.info.max_tokens,
            special_ids=self._special,
            **self._cut,
        )
        by_text: dict[int, list[Row]] = {}
        for chunk_group in parts:
            for part in chunk_group:
                by_text.setdefault(part.text, []).extend(self._rows(part))
        rows = [replace(row, n_rows=len(of_text)) for of_text in by_text.values() for row in of_text]
        budget = ROW_TOKENS if self._loss is None else ROW_TOKENS // 2
        groups: list[list[Row]] = []
        for row in sorted(rows, key=lambda row: (len(row), row.text)):
            if groups and (len(groups[-1]) + 1) * len(row) <= budget:
                groups[-1].append(row)
            else:
                groups.append([row])
        return groups[::-1]

    def _rows(self, part: Chunk) -> list[Row]:
        tokens = part.tokens
        ids, segments = tokens.ids.astype(np.int64), tokens.segments.astype(np.int64)
        ordinary = np.flatnonzero(~tokens.special)
        nothing = np.zeros(0, np.int64)
        if not len(ordinary):
            return []
        if self._target is not None:
            target = self._target(tokens)
            predicted = nothing
            if self._loss is not None:
                predicted = np.flatnonzero(~np.isin(target[1:], sorted(self._special)))
            apart = _apart(target, predicted + 1)
            return [Row(part.text, ids, segments, target, predicted, target[predicted + 1], apart)]
        if self._loss == "causal":
            predicted = ordinary[(ordinary > 0) & ~part.repeated[ordinary]]
            return [Row(part.text, ids, segments, None, predicted - 1, ids[predicted], _apart(ids, predicted))]
        if self._loss == "masked":
            hideable = ordinary[~part.repeated[ordinary]]
            return [self._hidden(part, hidden) for hidden in self._hides(part, hideable)]
        return [Row(part.text, ids, segments, None, nothing, nothing, _apart(ids, nothing))]

    def _hides(self, part: Chunk, ordinary: Numbers) -> list[Numbers]:
        """The sets of tokens that are hidden, of those that may be: one set per row."""
        if not len(ordinary):
            return []
        if self._masked == EACH:
            return [ordinary[i : i + 1] for i in range(len(ordinary))]
        # Raw numbers of PCG64: NumPy promises that they stay the same, which it does not of Generator's methods.
        random = np.random.PCG64(np.random.SeedSequence([self._seed, part.text, part.number]))
        order = random.random_raw(len(ordinary)).argsort(kind="stable")
        n = max(1, round(float(self._masked) * len(ordinary)))
        return [np.sort(ordinary[order[:n]])]

    def _hidden(self, part: Chunk, hidden: Numbers) -> Row:
        tokens = part.tokens
        ids = tokens.ids.astype(np.int64)
        read = ids.copy()
        read[hidden] = -1 if self._mask_id is None else self._mask_id
        segments = tokens.segments.astype(np.int64)
        return Row(part.text, read, segments, None, hidden, ids[hidden], _apart(ids, hidden, read))

    def read(self, rows: Sequence[Row]) -> ReadBatch:
        """Pad rows to a batch, on the model's device."""
        import torch

        device = self._model.info.device

        def tensor(array: NDArray[np.int64] | NDArray[np.bool_]) -> Tensor:
            return torch.from_numpy(array).to(device)

        def mask_padding(parts: Sequence[Numbers]) -> Tensor:
            return tensor(pad_rows([np.ones(len(part), np.bool_) for part in parts]))

        ids = [row.ids for row in rows]
        real = mask_padding(ids)
        targets = [row.target for row in rows if row.target is not None]
        target_real = mask_padding(targets) if targets else None
        segments = tensor(pad_rows([row.segments for row in rows]))
        target_ids = tensor(pad_rows(targets)) if targets else None
        batch = Batch(tensor(pad_rows(ids)), real, segments, target_ids, target_real).to(device)
        read = real if target_real is None else target_real
        numbers = np.concatenate([np.full(len(row.places), i) for i, row in enumerate(rows)])
        return ReadBatch(
            batch=batch,
            texts=np.array([row.text for row in rows]),
            real=read,
            queries={"encoder": real, "decoder": read, "cross": read},
            rows=tensor(numbers.astype(np.int64)),
            places=tensor(np.concatenate([row.places for row in rows])),
            answers=tensor(np.concatenate([row.answers for row in rows])),
            apart=tensor(np.concatenate([row.apart for row in rows], 1)),
            size=padded_size(rows),
        )


def _apart(ids: Numbers, at: Numbers, read: Numbers | None = None) -> NDArray[np.bool_]:
    """Which predictions each of `questions.ablate.PLACES` has, (place, prediction).

    Args:
        ids: A text.
        at: Which of its tokens are predicted.
        read: What can be read of it if tokens are hidden; None = each is predicted from those before it.
    """
    if read is None:
        _, first, which = np.unique(ids, return_index=True, return_inverse=True)
        repeated = first[which[at]] < at
    else:
        repeated = np.isin(ids[at], read)
    second = 2 * at >= len(ids)
    return np.stack([~repeated, repeated, ~second, second])


def _target_of(model: Model, target: str | None) -> Callable[[Tokens], Numbers]:
    """A function to the tokens that the decoder beside an encoder reads for a text."""
    writer, limit = model.writer, model.info.max_tokens
    assert writer is not None  # it has a decoder
    if target is not None:
        written = writer.encode_target(target).ids.astype(np.int64)
        return lambda tokens: written[:limit]
    answers: dict[bytes, Numbers] = {}

    def answer(tokens: Tokens) -> Numbers:
        # Texts are read several times, and writing is slow.
        key = tokens.ids.tobytes()
        if key not in answers:
            answers[key] = writer.greedy_target(tokens).ids.astype(np.int64)[:limit]
        return answers[key]

    return answer


# Passes over texts


def require_rerunnable(model: Model) -> Model:
    """Return the model.

    Raises:
        AttnscopeError: Its heads cannot be taken out.
    """
    if model.info.path != "seam":
        raise AttnscopeError(
            f"{model.info.name} does not pass its attention through the seam: its heads cannot be taken out",
            "what they attend to can be seen: attnscope heatmap, attnscope heads",
        )
    return model


@dataclass(frozen=True, eq=False)
class Passes:
    """What every pass over the texts reads.

    Attributes:
        model: The model.
        reader: Makes batches of its texts.
        texts: The texts.
        workers: Who runs the model; None = this process.
    """

    model: Model
    reader: Reader
    texts: Texts
    workers: Workers | None = None

    def run(
        self,
        measurer: Callable[..., Measurer[P]],
        arguments: Mapping[str, Any],
        nothing: P,
        report: Report | None = None,
        step: str = STEP,
    ) -> Run[P]:
        """Go over the texts once; see `studies.run.run`.

        Args:
            measurer: Makes a measurer of a model, a reader and the arguments.
            arguments: Further arguments of the measurer.
            nothing: The part of no text.
            report: Hears how far it is.
            step: What is at work, for the record of a failure.
        """
        # In this process all passes share what a reader has seen.
        reader = self.reader.arguments if self.workers else self.reader
        make = partial(_make, measurer, reader, arguments)
        workers = (self.workers,) if self.workers else None
        return run(make, (self.model,), self.texts, nothing, block=BLOCK, workers=workers, report=report, step=step)


def _make(
    measurer: Callable[..., Any], reader: Reader | Mapping[str, Any], arguments: Mapping[str, Any], model: Model
) -> Any:
    if not isinstance(reader, Reader):
        reader = Reader(model, **reader)
    return measurer(model, reader, **arguments)


class OfRows(Measurer[P]):
    """A measurer whose batches are rows of texts."""

    def __init__(self, model: Model, reader: Reader) -> None:
        super().__init__()
        self._model = require_rerunnable(model)
        self._reader = reader

    def batches(self, block: Block) -> Sequence[Sequence[Row]]:
        """Cut a block into batches of rows."""
        return self._reader.batches(block)


@dataclass(eq=False)
class RowSum:
    """What was added up over the rows of a text.

    Attributes:
        numbers: The numbers of its rows.
        count: Its predictions, and those by position.
        n_rows: How many rows were added.
        n_tokens: Their tokens.
        is_whole: Whether all rows were added, and the text counts.
    """

    numbers: Floats | float = 0.0
    count: Floats | float = 0.0
    n_rows: int = 0
    n_tokens: int = 0
    is_whole: bool = False

    def add(self, row: Row, numbers: Floats) -> bool:
        """Add a row; return whether it was the last one."""
        self.numbers = self.numbers + numbers
        self.count = self.count + np.array([len(row.places), *row.apart.sum(1)], np.float64)
        self.n_rows += 1
        self.n_tokens += row.n_tokens
        return self.n_rows == row.n_rows
