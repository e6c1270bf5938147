"""Measure texts while heads are taken out of a model; each class is a measurer of `studies.run`.

`MeanOutputs` adds up what heads put out, `Cutting` takes sets of heads out of the same batches, and `Slopes` follows
the loss by one backward pass. A text may come in several rows; it counts when all of them are there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from attnscope.models.model import PASS_TOKENS, Model
from attnscope.questions.ablate import Mode
from attnscope.studies.ablate.reading import BLOCK, Passes, ReadBatch, Reader, Row, require_rerunnable
from attnscope.studies.failures import Place as BrokenPlace
from attnscope.studies.failures import broken_rows
from attnscope.studies.inputs.texts import Report
from attnscope.studies.run import Measurer, P, Part, Room, Run

Head = tuple[str, int, int]
"""Kind, layer, head."""

Floats = NDArray[np.float64]

DONORS = 8
"""Texts whose outputs take the place of a head's, one after the other."""

QUANTITIES = ("l2", "loss", "kl")
"""The quantities that are measured without heads."""


class RowMeasurer(Measurer[P]):
    """Measure batches of rows of texts."""

    def __init__(self, model: Model, reader: Reader) -> None:
        super().__init__(model.tokenizer)
        self._model = require_rerunnable(model)
        self._reader = reader

    def batches(self, block: Block) -> Sequence[Sequence[Row]]:
        """Cut a block into batches of rows."""
        return self._reader.batches(block)


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
    _rows: list[tuple[Row, Floats]] = field(default_factory=list)
    _n_rows: Counter[int] = field(default_factory=Counter)

    def add_rows(self, batch: Sequence[Row], numbers: Floats) -> None:
        """Add the numbers of rows, and count the texts of which all rows are there."""
        for row, of_row in zip(batch, numbers, strict=True):
            self._rows.append((row, of_row))
            self._n_rows[row.text] += 1
            self.n_tokens += row.n_tokens
            self.n_texts += self._is_whole(row)

    def _is_whole(self, row: Row) -> bool:
        return self._n_rows[row.text] == row.n_rows and row.text not in self.broken

    def whole_texts(self) -> tuple[Floats, Floats]:
        """Return the sums over the rows of each whole text, (text, …), and its predictions, (text,), in their order."""
        rows = [(row, numbers) for row, numbers in self._rows if self._is_whole(row)]
        texts, text_of_row = np.unique([row.text for row, _ in rows], return_inverse=True)
        self.n_texts = len(texts)
        self.n_tokens = sum(row.n_tokens for row, _ in rows)
        n_predictions = np.zeros(len(texts))
        sums = np.zeros((len(texts), *(self._rows[0][1].shape if rows else ())))
        for number, (row, numbers) in zip(text_of_row, rows, strict=True):
            sums[number] += numbers
            n_predictions[number] += len(row.positions)
        return sums, n_predictions


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


class MeanOutputs(RowMeasurer[MeanPart]):
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

    def read_outputs(rows: Sequence[Row]) -> dict[Place, Tensor]:
        activations = Activations()
        with torch.no_grad():
            passes.model.outputs(passes.reader.read(rows).batch, activations, logits=False)
        return activations.outputs

    for block in blocks(distinct(passes.texts, Copies()), BLOCK):
        first_rows: dict[int, Row] = {}
        for batch in passes.reader.batches(block):
            for row in batch:
                first_rows.setdefault(row.text, row)
        for text, row in sorted(first_rows.items()):
            # One text cannot be halved: where it does not fit, `each` says so.
            ((_, outputs),) = Room().each([row], read_outputs)
            yield text, {place: output[0] for place, output in outputs.items()}


def heads_of(passes: Passes) -> dict[Place, int]:
    """Return how many heads each attention has, seen on the first text; {} = there is none."""
    _, outputs = next(outputs_of(passes), (0, {}))
    return {place: len(output) for place, output in outputs.items()}


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


class Cutting(RowMeasurer[TextPart]):
    """Take cuts out of texts, several in one forward pass, as further rows of the batch; see `measure_cuts`."""

    def __init__(self, model: Model, reader: Reader, cuts: Sequence[Cut], stand_ins: StandIns) -> None:
        super().__init__(model, reader)
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
        numbers = np.zeros((1 + len(self._cuts), len(batch), len(QUANTITIES)))
        with torch.no_grad():
            # Run the whole model once.
            read = self._reader.read(batch)
            rerun = self._model.rerun(read.batch, logits=bool(len(read.rows)))
            whole = rerun.whole.hidden.to(torch.promote_types(rerun.whole.hidden.dtype, torch.float32))
            whole_logs = read.log_probabilities(rerun.whole.logits, 1)
            numbers[0] = _by_row(read, whole[None], whole_logs, whole_logs)[0]
            # Take out as many cuts per pass as fit, as repetitions of the batch: one where memory ran out before.
            pass_tokens = PASS_TOKENS if self.room.tokens is None else self.room.tokens
            places = [[(kind, layer) for kind, layer, _ in cut.heads] for cut in self._cuts]
            for first, chosen in rerun.plan(places, pass_tokens):  # type: ignore[arg-type]  # the model's kinds
                outputs = rerun.again(self._without(chosen, read), first, len(chosen))
                change = outputs.hidden.to(whole.dtype).view(len(chosen), *whole.shape) - whole
                left_logs = read.log_probabilities(outputs.logits, len(chosen))
                numbers[1 + np.array(chosen)] = _by_row(read, change, left_logs, whole_logs)
        # Padding is no hidden state, and what is computed there need not be a number.
        logs: dict[str, dict[int, Tensor]] = {}
        for kind, by_layer in rerun.are_numbers.items():
            logs[kind] = {layer: fine.float().log() for layer, fine in by_layer.items()}
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
        """Add rows to their texts; texts on which a number is not finite, with heads or without, are left out."""
        numbers, broken = result
        for number, row in enumerate(batch):
            if number in broken or not np.isfinite(numbers[number]).all():
                part.broken.setdefault(row.text, broken.get(number, ("", None)))
        part.add_rows(batch, numbers)

    def finish(self, part: TextPart) -> TextPart:
        """Add up the whole texts of the block, in their order."""
        numbers, n_predictions = part.whole_texts()  # (text, 1 + cut, 3) and (text,)
        if not part.n_texts:
            return part
        whole, cuts = numbers[:, :1], numbers[:, 1:]
        # Mean over texts: norms per text, losses and KL per prediction.
        l2 = np.sqrt(cuts[..., 0] / whole[..., 0])
        values = np.stack([l2, cuts[..., 1] - whole[..., 1], cuts[..., 2]], -1)
        counts = np.stack([np.ones_like(n_predictions), n_predictions, n_predictions], -1)  # (text, 3)
        part.sums.add(values, counts[:, None])
        part.whole.add(whole[:, 0, 1], n_predictions)
        part.n_predictions = int(n_predictions.sum())
        return part


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


def _by_row(read: ReadBatch, states: Tensor, logs: Tensor | None, whole_logs: Tensor | None) -> Floats:
    """Return squared norms of states, losses and KL divergence from the whole model, (time, row, 3).

    Args:
        read: The rows.
        states: Hidden states, or how they change, (time, row, token, d).
        logs: Log probabilities of predictions, (time, prediction, vocabulary); None = there are none.
        whole_logs: Those of the whole model, (1, prediction, vocabulary).
    """
    numbers = np.zeros((*states.shape[:2], len(QUANTITIES)))
    numbers[..., 0] = to_numpy((states.square().sum(-1) * read.real).sum(-1))
    if logs is not None and whole_logs is not None:
        kl = (whole_logs.exp() * (whole_logs - logs)).sum(-1).clamp_(min=0)
        for column, values in ((1, read.losses(logs, whole_logs)), (2, kl)):  # (time, prediction)
            sums = values.new_zeros(numbers.shape[:2]).index_add_(-1, read.rows, values)
            numbers[..., column] = to_numpy(sums)
    return numbers


# How the loss hangs on each head


class Slopes(RowMeasurer[TextPart]):
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
        part.add_rows(batch, result)

    def finish(self, part: TextPart) -> TextPart:
        """Add up the texts of the block, without those that have no prediction or are not finite."""
        slopes, n_predictions = part.whole_texts()  # (text, head) and (text,)
        for of_text, n in zip(slopes, n_predictions, strict=True):
            if n and np.isfinite(of_text).all():
                part.sums.add(np.abs(of_text) / n, 1.0)
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
