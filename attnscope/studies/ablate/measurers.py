"""Measure texts while heads are taken out of a model; each class is a measurer of `studies.run`.

`MeanOutputs` adds up what heads put out, `Cutting` takes sets of heads out of the same batches, and `Slopes` follows
the loss by one backward pass. A text may come in several rows; it counts when all of them are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscope.core.attention.precision import sum_dtype
from attnscope.core.attention.probes import Gate, Place
from attnscope.core.attention.seam import AttentionCall, are_numbers, attend
from attnscope.core.interventions import Activations, Patch, Patched
from attnscope.core.sums import RunningSums
from attnscope.corpus import Block, Copies, blocks, distinct
from attnscope.errors import AttnscopeError
from attnscope.models.model import PASS_TOKENS, Model, Outputs
from attnscope.questions.ablate import Mode
from attnscope.studies.ablate.reading import BLOCK, Passes, ReadBatch, Reader, Row, require_rerunnable
from attnscope.studies.failures import Place as BrokenPlace
from attnscope.studies.failures import broken_rows
from attnscope.studies.inputs.texts import Report
from attnscope.studies.run import Measurer, P, Part, Room, Run, halves, padded_size

Head = tuple[str, int, int]
"""Kind, layer, head."""

Floats = NDArray[np.float64]

DONORS = 8
"""Texts whose outputs take the place of a head's, one after the other."""

QUANTITIES = ("l2", "loss", "kl")
"""The quantities that are measured without heads."""


class OfRows(Measurer[P]):
    """Measure batches of rows of texts."""

    def __init__(self, model: Model, reader: Reader) -> None:
        super().__init__()
        self._model = require_rerunnable(model)
        self._reader = reader

    def batches(self, block: Block) -> Sequence[Sequence[Row]]:
        """Cut a block into batches of rows."""
        return self._reader.batches(block)


@dataclass(eq=False)
class _TextSum:
    """Hold the numbers of the rows of a text so far, its predictions, and whether the text counts."""

    numbers: Floats
    n_predictions: int = 0
    n_rows: int = 0
    n_tokens: int = 0
    is_whole: bool = False


@dataclass(kw_only=True, eq=False)
class TextPart(Part):
    """Hold sums over texts.

    Attributes:
        sums: For each cut each of QUANTITIES, or the slope of each head.
        whole: The loss of the whole model.
        n_predictions: How many predictions these are of.
    """

    sums: RunningSums
    whole: RunningSums = field(default_factory=RunningSums)
    n_predictions: int = 0
    _texts: dict[int, _TextSum] = field(default_factory=dict)

    def add_row(self, row: Row, numbers: Floats) -> _TextSum | None:
        """Add a row to its text; return the text if this was its last row."""
        text = self._texts.setdefault(row.text, _TextSum(np.zeros_like(numbers)))
        text.numbers = text.numbers + numbers
        text.n_predictions += len(row.positions)
        text.n_tokens += row.n_tokens
        text.n_rows += 1
        return text if text.n_rows == row.n_rows else None

    def count(self, text: _TextSum) -> None:
        """Count a text of which all rows are there."""
        text.is_whole = True
        self.n_texts += 1
        self.n_tokens += text.n_tokens

    def whole_texts(self) -> list[_TextSum]:
        """Return the texts that count, in their order."""
        return [text for _, text in sorted(self._texts.items()) if text.is_whole]


# What heads put out


@dataclass(frozen=True)
class OutputSum:
    """Hold the sum of the outputs of heads, (head, d), float64, and the number of queries in it."""

    total: Tensor
    n_queries: int

    def merge(self, other: OutputSum) -> OutputSum:
        """Return the sum over both. It is rounded, so that the order counts."""
        return OutputSum(self.total + other.total, self.n_queries + other.n_queries)


@dataclass(kw_only=True, eq=False)
class MeanPart(Part):
    """Hold sums of the outputs of heads, by place."""

    outputs: dict[Place, OutputSum] = field(default_factory=dict)

    def means(self) -> dict[Place, Tensor]:
        """Return the mean output of the heads of each place, (head, d)."""
        return {place: outputs.total / max(1, outputs.n_queries) for place, outputs in self.outputs.items()}


class MeanOutputs(OfRows[MeanPart]):
    """Add up the outputs of heads over all real queries."""

    def start(self, block: Block) -> MeanPart:
        """Return sums of nothing yet."""
        return MeanPart()

    def measure(self, batch: Sequence[Row]) -> dict[Place, OutputSum]:
        """Return the sums of a batch, without rows on which any output is no number."""
        read = self._reader.read(batch)
        sums: dict[Place, Tensor] = {}

        def observe(call: AttentionCall) -> Tensor:
            output = attend(call)
            real = read.queries[call.kind]
            outputs = output.masked_fill(~real[:, None, :, None].to(output.device), 0.0)
            of_rows = outputs.sum(2, dtype=sum_dtype(outputs.device))  # (row, head, d)
            # Fused kernels may give numbers where there are none.
            of_rows[~are_numbers(call)] = torch.nan
            sums[call.kind, call.layer] = of_rows.cpu().double()
            return output

        with torch.no_grad():
            self._model.outputs(read.batch, observe, logits=False)
        # A row counts in all places or in none.
        is_sound = torch.stack([each.isfinite().flatten(1).all(1) for each in sums.values()]).all(0)
        n_queries = {kind: int(real.cpu()[is_sound].sum()) for kind, real in read.queries.items()}
        return {place: OutputSum(each[is_sound].sum(0), n_queries[place[0]]) for place, each in sums.items()}

    def add(self, part: MeanPart, batch: Sequence[Row], result: Mapping[Place, OutputSum]) -> None:
        """Add the sums of a batch."""
        for place, outputs in result.items():
            part.outputs[place] = part.outputs[place].merge(outputs) if place in part.outputs else outputs
        part.n_texts += len(batch)
        part.n_tokens += sum(row.n_tokens for row in batch)


def outputs_of(passes: Passes) -> Iterator[tuple[int, Mapping[Place, Tensor]]]:
    """Yield the index of each text, and the outputs of heads on its first row, (head, token, d) by place."""
    for block in blocks(distinct(passes.texts, Copies()), BLOCK):
        rows = sorted((row for batch in passes.reader.batches(block) for row in batch), key=lambda row: row.text)
        last = -1
        for row in rows:
            if row.text == last:
                continue
            last = row.text
            for _, outputs in Room().each([row], partial(_outputs_of_row, passes)):
                yield row.text, outputs


def _outputs_of_row(passes: Passes, row: Sequence[Row]) -> Mapping[Place, Tensor]:
    """Return the outputs of heads on the one row of a batch, (head, token, d) by place."""
    activations = Activations()
    with torch.no_grad():
        passes.model.outputs(passes.reader.read(row).batch, activations, logits=False)
    return {place: output[0] for place, output in activations.outputs.items()}


def heads_of(passes: Passes) -> dict[Place, int]:
    """Return how many heads each attention has, seen on the first text; {} = there is none."""
    for _, outputs in outputs_of(passes):
        return {place: len(output) for place, output in outputs.items()}
    return {}


def donors_of(passes: Passes) -> list[tuple[int, Mapping[Place, Tensor]]]:
    """Return the index and the outputs of heads of the first texts: one more than a text has donors.

    Raises:
        AttnscopeError: There is one text.
    """
    donors = list(islice(outputs_of(passes), DONORS + 1))
    if len(donors) < 2:
        raise AttnscopeError("resample ablation needs outputs of other texts", "give several texts")
    return donors


# What changes without heads


class Cut(NamedTuple):
    """Hold heads that are taken out together.

    Attributes:
        heads: The heads.
        mode: What takes their place: nothing ("zero"), the mean of their outputs, or outputs of another text.
        donor: Which other text; -1 = the mode needs none.
    """

    heads: tuple[Head, ...]
    mode: Mode = "zero"
    donor: int = -1


class StandIns(NamedTuple):
    """Hold the values that may take the place of heads.

    Attributes:
        means: The mean of their outputs over all real queries of all texts, (head, d).
        donors: Per text the index of the text, and its outputs, (head, token, d).
    """

    means: Mapping[Place, Tensor] = {}
    donors: Sequence[tuple[int, Mapping[Place, Tensor]]] = ()

    def values(self, cut: Cut, place: Place, head: int, read: ReadBatch) -> Tensor:
        """Return the output that replaces a head's; it broadcasts to (row, 1, query, d)."""
        if cut.mode == "zero":
            return torch.zeros(())
        if cut.mode == "mean":
            return self.means[place][head]
        n_queries = read.queries[place[0]].shape[1]
        rows = []
        for text in read.texts:
            # A text is no donor of its own; shorter ones are read from their start again.
            others = [outputs for index, outputs in self.donors if index != text]
            output = others[cut.donor % len(others)][place][head]
            rows.append(output[torch.arange(n_queries) % len(output)])
        return torch.stack(rows)[:, None]


class Cutting(OfRows[TextPart]):
    """Take cuts out of texts, several in one forward pass, as further rows of the batch; see `measure_cuts`."""

    def __init__(self, model: Model, reader: Reader, cuts: Sequence[Cut], stand_ins: StandIns) -> None:
        super().__init__(model, reader)
        self.room: _CutRoom = _CutRoom(len(cuts))
        self._cuts = cuts
        self._stand_ins = stand_ins

    def start(self, block: Block) -> TextPart:
        """Return sums of nothing yet."""
        return _no_cuts(len(self._cuts))

    def measure(self, batch: Sequence[Row]) -> tuple[Floats, Mapping[int, BrokenPlace]]:
        """Run the model whole, and without each cut.

        Returns:
            Squared norms of hidden states, losses and KL divergence, (row, 1 + cut, 3): first those of the whole model,
            then of the changes by cuts, with the losses that are left. And rows where it computes no number.
        """
        with torch.no_grad():
            # Run the whole model once.
            read = self._reader.read(batch)
            rerun = self._model.rerun(read.batch, logits=bool(len(read.rows)))
            # Padding is no hidden state, and what is computed there need not be a number.
            logs: dict[str, dict[int, Tensor]] = {}
            for kind, by_layer in rerun.are_numbers.items():
                logs[kind] = {layer: fine.float().log() for layer, fine in by_layer.items()}
            whole = _Whole(rerun.whole, read)
            numbers = np.zeros((1 + len(self._cuts), len(batch), len(QUANTITIES)))
            numbers[0] = whole.sums()
            # Take out as many cuts per pass as fit, as repetitions of the batch. (cut * row, …)
            places = [[(kind, layer) for kind, layer, _ in cut.heads] for cut in self._cuts]
            for first, chosen in rerun.plan(places, self.room.pass_tokens):  # type: ignore[arg-type]  # the model's kinds
                outputs = rerun.again(self._without(chosen, read), first, len(chosen))
                numbers[1 + np.array(chosen)] = whole.changes(outputs, len(chosen))
        return numbers.swapaxes(0, 1), broken_rows(logs)

    def _without(self, chosen: Sequence[int], read: ReadBatch) -> Patched:
        """Return what takes cuts out of a batch that is repeated once per cut; each repetition lacks one of them."""
        n_rows = len(read.texts)
        patches: dict[Place, list[Patch]] = {}
        for number, cut in enumerate(self._cuts[index] for index in chosen):
            rows = slice(number * n_rows, (number + 1) * n_rows)
            for kind, layer, head in cut.heads:
                place: Place = (kind, layer)  # type: ignore[assignment]  # a kind, as it came from the model
                values = self._stand_ins.values(cut, place, head, read)
                patches.setdefault(place, []).append(Patch("z", (head,), values, rows))
        return Patched(patches)

    def add(self, part: TextPart, batch: Sequence[Row], result: tuple[Floats, Mapping[int, BrokenPlace]]) -> None:
        """Add rows to their texts, and count those of which all rows are there and all numbers are finite."""
        numbers, broken = result
        for number, row in enumerate(batch):
            if number in broken:
                part.broken.setdefault(row.text, broken[number])
            text = part.add_row(row, numbers[number])
            if text is None:
                continue
            place = self._broken_place(text.numbers)
            if place is not None:
                part.broken.setdefault(row.text, place)
            if row.text not in part.broken and text.numbers[0, 0] > 0:
                part.count(text)

    def _broken_place(self, numbers: Floats) -> BrokenPlace | None:
        """Return where NaN or infinity is computed on a text, by the model or without some heads; None = nowhere."""
        is_finite = np.asarray(np.isfinite(numbers).all(-1))
        if is_finite.all():
            return None
        if not is_finite[0]:
            return "", None
        kind, layer, head = self._cuts[int(is_finite[1:].argmin())].heads[0]
        prefix = f"{kind} " if len(self._model.info.kinds) > 1 else ""
        return f"without {prefix}L{layer}H{head}", None

    def finish(self, part: TextPart) -> TextPart:
        """Add up the whole texts of the block, in their order."""
        texts = part.whole_texts()
        if not texts:
            return part
        numbers = np.array([text.numbers for text in texts])  # (text, 1 + cut, 3)
        counts = np.array([text.n_predictions for text in texts], np.float64)  # (text,)
        whole, cuts = numbers[:, :1], numbers[:, 1:]
        # Mean over texts: norms per text, losses and KL per prediction.
        l2 = np.sqrt(cuts[..., 0] / whole[..., 0])
        values = np.stack([l2, cuts[..., 1] - whole[..., 1], cuts[..., 2]], -1)
        per_quantity = np.stack([np.ones_like(counts), counts, counts], -1)  # (text, 3)
        part.sums.add(values, per_quantity[:, None])
        part.whole.add(whole[:, 0, 1], counts)
        part.n_predictions = int(counts.sum())
        return part


class _CutRoom(Room):
    """Take out fewer cuts per pass where memory does not suffice, and then fewer rows."""

    def __init__(self, n_cuts: int) -> None:
        super().__init__()
        self._n_cuts = n_cuts

    @property
    def pass_tokens(self) -> int:
        """Return the most tokens of a forward pass, repetitions included."""
        return PASS_TOKENS if self.tokens is None else min(PASS_TOKENS, self.tokens)

    def size(self, batch: Sequence[Row]) -> int:
        """Return the number of tokens of a forward pass."""
        rows = padded_size(batch)
        return max(rows, min(self.pass_tokens, rows * self._n_cuts))

    def parts(self, batch: Sequence[Row]) -> Sequence[Sequence[Row]]:
        """Return the batch as it is, for smaller passes; or its halves."""
        return [batch] if padded_size(batch) <= self.pass_tokens else halves(batch)


def measure_cuts(
    passes: Passes, cuts: Sequence[Cut], stand_ins: StandIns, report: Report | None = None
) -> Run[TextPart]:
    """Take cuts out of every text, one at a time, and add up what changes.

    For a text, h are the last hidden states of the whole model at its n real tokens, and h' those without the heads.
    Then l2 is |h' - h| / |h| (Frobenius norms). loss is how much the negative log-likelihood of what is right rises,
    summed over its predictions. kl is the sum of KL(whole || without), in nats.
    """
    arguments = {"cuts": tuple(cuts), "stand_ins": stand_ins}
    return passes.run(Cutting, arguments, _no_cuts(len(cuts)), report, step="taking heads out of a later text")


def _no_cuts(n_cuts: int) -> TextPart:
    """Return the part of no text."""
    return TextPart(sums=RunningSums((n_cuts, len(QUANTITIES))))


class _Whole:
    """Hold the whole model's outputs on a batch, and measure how other outputs differ."""

    def __init__(self, outputs: Outputs, read: ReadBatch) -> None:
        self._read = read
        self._dtype = torch.promote_types(outputs.hidden.dtype, torch.float32)
        self._hidden = outputs.hidden.to(self._dtype)
        self._logs = None if outputs.logits is None else read.log_probabilities(outputs.logits)

    def sums(self) -> Floats:
        """Return squared hidden states, losses, and 0, (row, 3)."""
        sums: Floats = self._by_row(self._hidden.square()[None], None if self._logs is None else self._logs[None])[0]
        return sums

    def changes(self, outputs: Outputs, times: int) -> Floats:
        """Return squared changes of hidden states, losses, and KL divergence, (time, row, 3)."""
        hidden = outputs.hidden.to(self._dtype).view(times, *self._hidden.shape)
        logs = None
        if outputs.logits is not None and self._logs is not None:
            logs = self._read.log_probabilities(outputs.logits.view(times, -1, *outputs.logits.shape[1:]))
        return self._by_row((hidden - self._hidden).square_(), logs)

    def _by_row(self, states: Tensor, logs: Tensor | None) -> Floats:
        """Add up numbers of tokens and of predictions by the row that they are of, (time, row, 3)."""
        read = self._read
        numbers = np.zeros((*states.shape[:2], len(QUANTITIES)))
        numbers[..., 0] = to_numpy((states.sum(-1) * read.real).sum(-1))
        if logs is not None and self._logs is not None:
            losses = read.losses(logs, self._logs)
            kl = (self._logs.exp() * (self._logs - logs)).sum(-1).clamp_(min=0)
            for column, values in ((1, losses), (2, kl)):  # (time, prediction)
                sums = values.new_zeros(numbers.shape[:2]).index_add_(-1, read.rows, values)
                numbers[..., column] = to_numpy(sums)
        return numbers


# How the loss hangs on each head


class Slopes(OfRows[TextPart]):
    """Compute dL/dxi of each head, the derivative of the loss by the head's gate."""

    def __init__(self, model: Model, reader: Reader, n_heads: Mapping[Place, int]) -> None:
        super().__init__(model, reader)
        self._n_heads = n_heads

    def start(self, block: Block) -> TextPart:
        """Return sums of nothing yet."""
        return _no_slopes(self._n_heads)

    def measure(self, batch: Sequence[Row]) -> Floats:
        """Return the derivatives of the loss of each row, (row, head)."""
        read = self._reader.read(batch)
        if not len(read.rows):
            return np.zeros((len(batch), sum(self._n_heads.values())))
        info = self._model.info
        dtype = torch.promote_types(getattr(torch, info.dtype), torch.float32)
        # One gate of 1 per text and head. (row, head)
        gates = {
            place: torch.ones(len(batch), n, dtype=dtype, device=info.device, requires_grad=True)
            for place, n in self._n_heads.items()
        }
        outputs = self._model.outputs(read.batch, Gate(gates))
        assert outputs.logits is not None  # there are predictions
        chosen = outputs.logits[read.rows, read.positions]
        logs = chosen.to(sum_dtype(chosen.device)).log_softmax(-1)
        # The sum of the losses of all predictions: each depends on its own text's gates alone.
        loss = read.losses(logs, logs.detach()).sum()
        slopes = torch.autograd.grad(loss, list(gates.values()), materialize_grads=True)
        return to_numpy(torch.cat(slopes, -1))

    def add(self, part: TextPart, batch: Sequence[Row], result: Floats) -> None:
        """Add the derivatives of rows to their texts."""
        for row, slopes in zip(batch, result, strict=True):
            text = part.add_row(row, slopes)
            if text is not None:
                part.count(text)

    def finish(self, part: TextPart) -> TextPart:
        """Add up the texts of the block, without those that have no prediction or are not finite."""
        for text in part.whole_texts():
            if text.n_predictions and np.isfinite(text.numbers).all():
                part.sums.add(np.abs(text.numbers) / text.n_predictions, 1.0)
        return part


def measure_importance(passes: Passes, n_heads: Mapping[Place, int], report: Report | None = None) -> Run[TextPart]:
    """Measure how much the loss of a text changes with each head's gate, over texts: E |dL/dxi|, (head,) by place.

    L is a text's loss, in nats per prediction. Each text has gates of its own. So one backward pass over a batch gives
    every text's own derivative, and absolute values are taken before texts are averaged. With one gate for the whole
    batch, texts that pull in opposite directions would cancel, and the result would depend on the size of the batch.

    Source:
        Michel et al. 2019, section 4.1 (equation 2).
    """
    return passes.run(Slopes, {"n_heads": n_heads}, _no_slopes(n_heads), report, step="importance")


def _no_slopes(n_heads: Mapping[Place, int]) -> TextPart:
    """Return the part of no text."""
    return TextPart(sums=RunningSums((sum(n_heads.values()),)))


def to_numpy(values: Tensor) -> Floats:
    """Return numbers in float64, on the CPU."""
    numbers: Floats = values.detach().cpu().double().numpy()
    return numbers
