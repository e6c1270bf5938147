"""What is measured on texts while heads are taken out of a model, each a measurer of `studies.run`.

`MeanOutputs` adds up what heads put out, and `Cutting` takes sets of heads out of the same batches. A text may come in
several rows; it counts when all of them are there. `studies.ablate.importance` has a third measurer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscope.core.attention.probes import Gate, Means, Place
from attnscope.core.attention.seam import Probe
from attnscope.core.interventions import Activations, Patch, Patched
from attnscope.core.sums import RunningSums
from attnscope.corpus import Block, Copies, blocks, distinct
from attnscope.errors import AttnscopeError
from attnscope.models.model import Model, Outputs, Rerun
from attnscope.questions.ablate import PLACES, Mode
from attnscope.studies.ablate.reading import BLOCK, OfRows, Passes, ReadBatch, Reader, Row, RowSum
from attnscope.studies.failures import Place as BrokenPlace
from attnscope.studies.failures import broken_rows
from attnscope.studies.inputs.texts import Report
from attnscope.studies.run import Part, Room, Run, halves, padded_size

Head = tuple[str, int, int]
"""Kind, layer, head."""

Floats = NDArray[np.float64]

PASS_TOKENS = 2048
"""Tokens in a forward pass, padding and repetitions included."""

LOGITS_AT_ONCE = 2**25
"""Numbers that a language-model head may put out in a forward pass."""

DONORS = 8
"""Texts whose outputs take the place of a head's, one after the other."""

N_LOSSES = 1 + len(PLACES)
"""The loss, and that by position."""

QUANTITIES = ("l2", "loss", "kl", *(f"loss_{place}" for place in PLACES))
"""What is measured without heads."""


@dataclass(frozen=True)
class Cut:
    """Heads that are taken out together.

    Attributes:
        heads: The heads.
        mode: What takes their place: nothing ("zero"), the mean of their outputs, or outputs of another text.
        donor: Which other text; -1 = the mode needs none.
    """

    heads: tuple[Head, ...]
    mode: Mode = "zero"
    donor: int = -1


@dataclass(frozen=True)
class StandIns:
    """What may take the place of heads.

    Attributes:
        n_heads: How many heads each attention has.
        means: The mean of their outputs over all real queries of all texts, (head, d).
        donors: Per text the index of the text, and its outputs, (head, token, d).
    """

    n_heads: Mapping[Place, int]
    means: Mapping[Place, Tensor] = field(default_factory=dict)
    donors: Sequence[tuple[int, Mapping[Place, Tensor]]] = ()

    def donor(self, number: int, text: int) -> Mapping[Place, Tensor]:
        """Return the outputs of a donor of a text, which is never the text itself."""
        others = [outputs for index, outputs in self.donors if index != text]
        return others[number % len(others)]


# What heads put out


@dataclass(frozen=True)
class _Outputs:
    """The sum of the outputs of heads, (head, d), over so many queries."""

    total: Tensor
    count: int

    def merge(self, other: _Outputs) -> _Outputs:
        """Return the sum over both. It is rounded, so that the order counts."""
        return _Outputs(self.total + other.total, self.count + other.count)


@dataclass(kw_only=True, eq=False)
class MeanPart(Part):
    """Sums of the outputs of heads, by place."""

    places: dict[Place, _Outputs] = field(default_factory=dict)

    @property
    def stand_ins(self) -> StandIns:
        """How many heads there are, and their means."""
        n_heads = {place: len(outputs.total) for place, outputs in self.places.items()}
        means = {place: outputs.total / max(1, outputs.count) for place, outputs in self.places.items()}
        return StandIns(n_heads, means)


class MeanOutputs(OfRows[MeanPart]):
    """Add up the outputs of heads."""

    def start(self, block: Block) -> MeanPart:
        """Return sums of nothing yet."""
        return MeanPart()

    def measure(self, batch: Sequence[Row]) -> list[tuple[Means, bool]]:
        """Return the sums of a batch, and whether they are finite; if not, also those of its halves."""
        read = self._reader.read(batch)
        probe = Means(read.queries)
        with torch.no_grad():
            self._model.outputs(read.batch, probe, logits=False)
        is_finite = all(bool(total.isfinite().all()) for total in probe.sums.values())
        measured = [(probe, is_finite)]
        # One row that is no number would be in every mean: it is found by halves, and left out.
        for half in [] if is_finite else halves(batch):
            measured += self.measure(half)
        return measured

    def add(self, part: MeanPart, batch: Sequence[Row], result: Sequence[tuple[Means, bool]]) -> None:
        """Add the sums that are finite."""
        for probe, is_finite in result:
            for place, total in probe.sums.items():
                outputs = _Outputs(total, probe.counts[place])
                if not is_finite:
                    outputs = _Outputs(torch.zeros_like(total), 0)
                part.places[place] = part.places[place].merge(outputs) if place in part.places else outputs
        part.n_texts += len(batch)
        part.n_tokens += sum(row.n_tokens for row in batch)


def heads_of(passes: Passes) -> StandIns:
    """Return how many heads each attention has, seen on the first batch."""
    measurer = MeanOutputs(passes.model, passes.reader)
    for block in blocks(distinct(passes.texts, Copies()), BLOCK):
        part = measurer.start(block)
        for batch in measurer.batches(block)[:1]:
            for some, result in measurer.room.each(batch, measurer.measure):
                measurer.add(part, some, result)
            return StandIns(part.stand_ins.n_heads)
    return StandIns({})


def donors_of(passes: Passes) -> list[tuple[int, Mapping[Place, Tensor]]]:
    """Return the index and the outputs of heads of the first texts: one more than a text has donors.

    Raises:
        AttnscopeError: There is one text.
    """
    donors: dict[int, Mapping[Place, Tensor]] = {}
    for block in blocks(distinct(passes.texts, Copies()), BLOCK):
        rows = sorted((row for batch in passes.reader.batches(block) for row in batch), key=lambda row: row.text)
        for row in rows:
            if row.text in donors or len(donors) > DONORS:
                continue
            activations = Activations()
            with torch.no_grad():
                passes.model.outputs(passes.reader.read([row]).batch, activations, logits=False)
            donors[row.text] = {place: output[0] for place, output in activations.outputs.items()}
        if len(donors) > DONORS:
            break
    if len(donors) < 2:
        raise AttnscopeError("resample ablation needs outputs of other texts", "give several texts")
    return list(donors.items())


# What changes without heads


@dataclass(kw_only=True, eq=False)
class CutPart(Part):
    """What was added up over texts.

    Attributes:
        sums: For each cut and each of QUANTITIES.
        whole: The loss of the whole model, and that by position.
        n_predictions: How many predictions these are of.
    """

    sums: RunningSums
    whole: RunningSums
    n_predictions: int = 0
    _texts: dict[int, RowSum] = field(default_factory=dict)

    @classmethod
    def of(cls, n_cuts: int) -> CutPart:
        """Return the part of no text."""
        return cls(sums=RunningSums((n_cuts, len(QUANTITIES))), whole=RunningSums((N_LOSSES,)))


class Cutting(OfRows[CutPart]):
    """Take cuts out of texts, several in one forward pass, as further rows of the batch; see `measure_cuts`."""

    def __init__(self, model: Model, reader: Reader, cuts: Sequence[Cut], stand_ins: StandIns) -> None:
        super().__init__(model, reader)
        self.room: _CutRoom = _CutRoom(len(cuts))
        self._cuts = cuts
        self._stand_ins = stand_ins

    def start(self, block: Block) -> CutPart:
        """Return sums of nothing yet."""
        part = CutPart.of(len(self._cuts))
        part._texts = {text.index: RowSum() for text in block.texts}
        return part

    def measure(self, batch: Sequence[Row]) -> tuple[Floats, Mapping[int, BrokenPlace]]:
        """Run the model whole, and without each cut.

        Returns:
            Squared norms of hidden states, KL divergence and losses, (row, 1 + cut, 2 + loss): first those of the whole
            model, then of the changes by cuts, with the losses that are left. And rows where it computes no number.
        """
        with torch.no_grad():
            read = self._reader.read(batch)
            rerun = self._model.rerun(read.batch, logits=bool(len(read.rows)))
            # Padding is no hidden state, and what is computed there need not be a number.
            are_numbers: dict[str, dict[int, Tensor]] = {
                kind: {layer: fine.float().log() for layer, fine in by_layer.items()}
                for kind, by_layer in rerun.are_numbers.items()
            }
            broken = broken_rows(are_numbers)
            whole = _Whole(rerun.whole, read)
            numbers = np.zeros((1 + len(self._cuts), len(batch), 2 + N_LOSSES))
            numbers[0] = whole.sums()
            for first, mode, places in self._groups(rerun, read):
                probe = self._probe([self._cuts[place] for place in places], mode, read)
                outputs = rerun.again(probe, first, len(places))
                numbers[1 + np.array(places)] = whole.changes(outputs, len(places))
        return numbers.swapaxes(0, 1), broken

    def _groups(self, rerun: Rerun, read: ReadBatch) -> Iterator[tuple[int, Mode, list[int]]]:
        """Return the cuts that share a forward pass: by their first block and mode, as many as have room."""
        groups: dict[tuple[int, Mode], list[int]] = {}
        for number, cut in enumerate(self._cuts):
            first = rerun.block([(kind, layer) for kind, layer, _ in cut.heads])  # type: ignore[misc]
            groups.setdefault((first, cut.mode), []).append(number)
        step = self.room.pass_tokens // read.size
        if rerun.whole.logits is not None:
            step = min(step, LOGITS_AT_ONCE // rerun.whole.logits.numel())
        step = max(1, step)
        for (first, mode), numbers in groups.items():
            for start in range(0, len(numbers), step):
                yield first, mode, numbers[start : start + step]

    def _probe(self, cuts: Sequence[Cut], mode: Mode, read: ReadBatch) -> Probe:
        """Return what takes cuts out of a batch that is repeated once per cut; each repetition lacks one of them."""
        n_rows = len(read.texts)
        factors: dict[Place, Tensor] = {}
        patches: dict[Place, list[Patch]] = {}
        for number, cut in enumerate(cuts):
            rows = slice(number * n_rows, (number + 1) * n_rows)
            for kind, layer, head in cut.heads:
                place: Place = (kind, layer)  # type: ignore[assignment]  # a kind, as it came from the model
                if mode == "resample":
                    values = self._resampled(cut.donor, place, head, read)
                    patches.setdefault(place, []).append(Patch("z", (head,), values, rows, slice(None)))
                    continue
                if place not in factors:
                    factors[place] = torch.ones(len(cuts) * n_rows, self._stand_ins.n_heads[place])
                factors[place][rows, head] = 0
        if mode == "resample":
            return Patched(patches)
        means = {place: self._stand_ins.means[place] for place in factors} if mode == "mean" else None
        return Gate(factors, means)

    def _resampled(self, donor: int, place: Place, head: int, read: ReadBatch) -> Tensor:
        """Return a head's outputs on other texts, (row, 1, query, d); shorter texts are read from their start again."""
        n_queries = read.queries[place[0]].shape[1]
        rows = []
        for text in read.texts.tolist():
            outputs = self._stand_ins.donor(donor, text)[place][head]
            rows.append(outputs[torch.arange(n_queries) % len(outputs)])
        return torch.stack(rows)[:, None]

    def add(self, part: CutPart, batch: Sequence[Row], result: tuple[Floats, Mapping[int, BrokenPlace]]) -> None:
        """Add rows to their texts, and count those of which all rows are there and all numbers are finite."""
        numbers, broken = result
        for number, row in enumerate(batch):
            text = part._texts[row.text]
            if number in broken:
                part.broken.setdefault(row.text, broken[number])
            if not text.add(row, numbers[number]):
                continue
            place = self._broken_place(text.numbers)
            if place is not None:
                part.broken.setdefault(row.text, place)
            if row.text not in part.broken and text.numbers[0, 0] > 0:  # type: ignore[index]
                text.is_whole = True
                part.n_texts += 1
                part.n_tokens += text.n_tokens

    def _broken_place(self, numbers: Any) -> BrokenPlace | None:
        """Return where NaN or infinity is computed on a text, by the model or without some heads; None = nowhere."""
        is_finite = np.isfinite(numbers).all(-1)
        if is_finite.all():
            return None
        if not is_finite[0]:
            return "", None
        kind, layer, head = self._cuts[int(is_finite[1:].argmin())].heads[0]
        has_kinds = len(self._model.info.kinds) > 1
        return f"without {kind + ' ' if has_kinds else ''}L{layer}H{head}", None

    def finish(self, part: CutPart) -> CutPart:
        """Add up the whole texts of the block, in their order."""
        texts = [text for text in part._texts.values() if text.is_whole]
        if not texts:
            return part
        numbers = np.array([text.numbers for text in texts])  # (text, 1 + cut, 2 + loss)
        counts = np.array([text.count for text in texts])  # (text, loss)
        whole, cuts = numbers[:, :1], numbers[:, 1:]
        l2 = np.sqrt(cuts[..., :1] / whole[..., :1])
        losses = cuts[..., 2:] - whole[..., 2:]
        values = np.concatenate([l2, losses[..., :1], cuts[..., 1:2], losses[..., 1:]], -1)
        once = np.ones((len(texts), 1))
        part.sums.add(values, np.concatenate([once, counts[:, :1], counts], -1)[:, None])
        part.whole.add(whole[:, 0, 2:], counts)
        part.n_predictions = int(counts[:, 0].sum())
        return part


class _CutRoom(Room):
    """Where memory does not suffice, fewer cuts are taken out in a pass, and then fewer rows."""

    def __init__(self, n_cuts: int) -> None:
        super().__init__()
        self._n_cuts = n_cuts

    @property
    def pass_tokens(self) -> int:
        """How many tokens a forward pass has at most, repetitions included."""
        return PASS_TOKENS if self.tokens is None else min(PASS_TOKENS, self.tokens)

    def size(self, batch: Sequence[Row]) -> int:
        """Return how many tokens a forward pass has."""
        rows = padded_size(batch)
        return max(rows, min(self.pass_tokens, rows * self._n_cuts))

    def parts(self, batch: Sequence[Row]) -> Sequence[Sequence[Row]]:
        """Return the batch as it is, for smaller passes; or its halves."""
        return [batch] if padded_size(batch) <= self.pass_tokens else halves(batch)


def measure_cuts(
    passes: Passes, cuts: Sequence[Cut], stand_ins: StandIns, report: Report | None = None
) -> Run[CutPart]:
    """Take cuts out of every text, one at a time, and add up what changes.

    For a text, h are the last hidden states of the whole model at its n real tokens, and h' those without the heads.
    Then l2 is |h' - h| / |h| (Frobenius norms). loss is how much the negative log-likelihood of the right tokens rises,
    summed over its predictions. kl is the sum of KL(whole || without), in nats.
    """
    arguments = {"cuts": tuple(cuts), "stand_ins": stand_ins}
    nothing = CutPart.of(len(cuts))
    return passes.run(Cutting, arguments, nothing, report, step="taking heads out of a later text")


class _Whole:
    """What the whole model puts out on a batch, and how other outputs differ from it."""

    def __init__(self, outputs: Outputs, read: ReadBatch) -> None:
        self._read = read
        self._dtype = torch.promote_types(outputs.hidden.dtype, torch.float32)
        self._hidden = outputs.hidden.to(self._dtype)
        self._logs = None if outputs.logits is None else self._log_probabilities(outputs.logits[None])

    def sums(self) -> Floats:
        """Return squared hidden states, 0, and losses, (row, 2 + loss)."""
        sums: Floats = self._by_row(self._hidden.square()[None], self._logs)[0]
        return sums

    def changes(self, outputs: Outputs, times: int) -> Floats:
        """Return squared changes of hidden states, KL divergence, and losses, (time, row, 2 + loss)."""
        hidden = outputs.hidden.to(self._dtype).view(times, *self._hidden.shape)
        logs = None
        if outputs.logits is not None and self._logs is not None:
            logs = self._log_probabilities(outputs.logits.view(times, len(self._hidden), *outputs.logits.shape[1:]))
        return self._by_row((hidden - self._hidden).square_(), logs)

    def _log_probabilities(self, logits: Tensor) -> Tensor:
        """Return those of predictions, (time, prediction, vocabulary)."""
        return logits[:, self._read.rows, self._read.places].to(self._dtype).log_softmax(-1)

    def _by_row(self, states: Tensor, logs: Tensor | None) -> Floats:
        """Add up numbers of tokens and of predictions by the row that they are of, (time, row, 2 + loss)."""
        read = self._read
        n_rows = len(read.texts)
        numbers = np.zeros((len(states), n_rows, 2 + N_LOSSES))
        numbers[..., 0] = to_numpy((states.sum(-1) * read.real).sum(-1))
        if logs is None or self._logs is None:
            return numbers
        kl = (self._logs.exp() * (self._logs - logs)).sum(-1).clamp_(min=0)
        nll = -logs.gather(-1, read.answers.expand(len(logs), -1)[..., None])[..., 0]
        by_place = nll[None].where(read.apart[:, None], 0.0)  # not a product: 0 * NaN would spread
        each = torch.cat([kl[None], nll[None], by_place])
        sums = each.new_zeros(*each.shape[:2], n_rows).index_add_(-1, read.rows, each)
        numbers[..., 1:] = to_numpy(sums.permute(1, 2, 0))
        return numbers


def to_numpy(values: Tensor) -> Floats:
    """Return numbers in float64, on the CPU."""
    numbers: Floats = values.detach().cpu().double().numpy()
    return numbers
