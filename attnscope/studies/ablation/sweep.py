"""What changes without heads: every set of heads is taken out of the same batches, from its first layer on.

Several sets are taken out in one forward pass, as further rows of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core.sums import RunningSums
from attnscope.corpus import Block
from attnscope.errors import AttnscopeError
from attnscope.models.model import Model, Outputs, Rerun
from attnscope.studies.ablation.options import Mode
from attnscope.studies.ablation.reading import PLACES, ReadBatch, Reader, Row
from attnscope.studies.failures import Place as BrokenPlace
from attnscope.studies.failures import broken_rows
from attnscope.studies.inputs.texts import Report, Texts
from attnscope.studies.run import STEP, Measurer, P, Part, Room, Run, halves, padded_size, run
from attnscope.studies.workers import Workers

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.attention.probes import Gate, Place

HeadPlace = tuple[str, int, int]
"""Kind, layer, head."""

BLOCK = 32
"""Texts that are finished together: an interruption loses no more."""

PASS_TOKENS = 2048
"""Tokens in a forward pass, padding and repetitions included."""

LOGITS_AT_ONCE = 2**25
"""Numbers that a language-model head may put out in a forward pass."""

QUANTITIES = ("l2", "loss", "kl")
"""What is measured without heads: of a text, and over its predictions."""

ALL_QUANTITIES = (*QUANTITIES, *(f"loss_{place}" for place in PLACES))
"""The same, and the loss by position."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Cut:
    """Heads that are taken out together.

    Attributes:
        mode: "zero": nothing in their place; "mean": the mean of their outputs.
    """

    heads: tuple[HeadPlace, ...]
    mode: Mode = "zero"


@dataclass(frozen=True)
class StandIns:
    """How many heads each attention has, and what may take their place.

    Attributes:
        means: The mean of their outputs over all real queries of all texts.
    """

    n_heads: Mapping[Place, int]
    means: Mapping[Place, Tensor] = field(default_factory=dict)


@dataclass(kw_only=True, eq=False)
class CutPart(Part):
    """What was added up over texts.

    Attributes:
        sums: For each cut and quantity of ALL_QUANTITIES.
        whole: The loss of the whole model, and that by position.
    """

    sums: RunningSums
    whole: RunningSums
    n_predictions: int = 0
    _texts: dict[int, _TextCuts] = field(default_factory=dict)


class _TextCuts:
    """The sums over the rows of one text.

    Attributes:
        n_rows: How many rows were added; `n_tokens`: their tokens.
        is_whole: Whether all rows were added, and all numbers are finite.
        size: Squared norm of the last hidden states of the whole model.
        changed: Squared norm of their change by each cut, (cut,); `kl`: the KL divergence, (cut,).
        nll: The loss with each cut, and that by position, (cut, 1 + place).
        whole_nll: The same of the whole model, (1 + place,); `n`: the predictions that these are sums over.
    """

    def __init__(self, n_cuts: int) -> None:
        n_losses = 1 + len(PLACES)
        self.n_rows = 0
        self.n_tokens = 0
        self.is_whole = False
        self.size = 0.0
        self.changed = np.zeros(n_cuts)
        self.kl = np.zeros(n_cuts)
        self.nll = np.zeros((n_cuts, n_losses))
        self.whole_nll = np.zeros(n_losses)
        self.n = np.zeros(n_losses)


def require_rerunnable(model: Model) -> Model:
    """The model; an AttnscopeError refuses one whose heads cannot be taken out."""
    if model.info.path != "seam":
        raise AttnscopeError(
            f"{model.info.name} does not pass its attention through the seam: its heads cannot be taken out",
            "what they attend to can be seen: attnscope heatmap, attnscope heads",
        )
    return model


@dataclass(frozen=True, eq=False)
class Going:
    """What every pass over the texts of an ablation begins with; workers None = this process."""

    model: Model
    reader: Reader
    texts: Texts
    workers: Workers | None = None

    def run(
        self,
        measurer: Callable[..., Measurer[P]],
        arguments: Mapping[str, Any],
        nothing: P,
        report: Report | None,
        step: str = STEP,
    ) -> Run[P]:
        """Read the texts once; copies count once. The measurer gets a model, a reader and the arguments.

        `nothing` is the part of no text; `step` is that of `run`.
        """
        # In this process all passes share what a reader has seen.
        make = partial(_make, measurer, self.reader.arguments if self.workers else self.reader, arguments)
        workers = (self.workers,) if self.workers else None
        return run(make, (self.model,), self.texts, nothing, block=BLOCK, workers=workers, report=report, step=step)


def _make(
    measurer: Callable[..., Any], reading: Reader | Mapping[str, Any], arguments: Mapping[str, Any], model: Model
) -> Any:
    return measurer(model, reading if isinstance(reading, Reader) else Reader(model, **reading), **arguments)


def measure(going: Going, cuts: Sequence[Cut], stand_ins: StandIns, report: Report | None = None) -> Run[CutPart]:
    """Takes cuts out of every text, one at a time, and adds up what changes.

    For a text, h are the last hidden states of the whole model at its n real tokens, and h' those without the heads.
    Then l2 is |h' - h| / |h| (Frobenius norms). loss is how much the negative log-likelihood of the right tokens rises,
    summed over its predictions. kl is the sum of KL(whole || without), in nats.

    Args:
        going: The model, its reader and the texts.
        cuts: What is taken out.
        stand_ins: What may take the place of heads; only what the cuts' modes need.
        report: Called after each batch.
    """
    nothing = CutPart(sums=RunningSums((len(cuts), len(ALL_QUANTITIES))), whole=RunningSums((1 + len(PLACES),)))
    arguments = {"cuts": tuple(cuts), "stand_ins": stand_ins}
    return going.run(CutMeasurer, arguments, nothing, report, step="taking heads out of a later text")


class CutMeasurer(Measurer[CutPart]):
    """Takes cuts out of the texts of blocks; see `measure`."""

    def __init__(self, model: Model, reader: Reader, cuts: Sequence[Cut], stand_ins: StandIns) -> None:
        super().__init__()
        self.room: _CutRoom = _CutRoom(len(cuts))
        self._runs = require_rerunnable(model)
        self._reader = reader
        self._cuts = cuts
        self._stand_ins = stand_ins
        self._several_kinds = len(model.info.kinds) > 1

    def start(self, block: Block) -> CutPart:
        """Return sums of nothing yet."""
        n_cuts = len(self._cuts)
        return CutPart(
            sums=RunningSums((n_cuts, len(ALL_QUANTITIES))),
            whole=RunningSums((1 + len(PLACES),)),
            _texts={text.index: _TextCuts(n_cuts) for text in block.texts},
        )

    def batches(self, block: Block) -> Sequence[Sequence[Row]]:
        """Cut a block into batches of rows."""
        return self._reader.batches(block)

    def measure(self, batch: Sequence[Row]) -> Measured:
        """Run the model whole, and without each cut."""
        import torch

        with torch.no_grad():
            read = self._reader.read(batch)
            return _measure_batch(self._runs, read, self._cuts, self._stand_ins, self.room.pass_tokens)

    def add(self, part: CutPart, batch: Sequence[Row], result: Measured) -> None:
        """Add rows to their texts."""
        size = _numpy(result.size)
        whole_nll = _numpy(result.nll)
        for number, row in enumerate(batch):
            text = part._texts[row.text]
            text.size += size[number]
            text.whole_nll += whole_nll[:, number]
            text.n += result.n[:, number]
            for cuts, changed, nll, kl in result.cuts:
                text.changed[cuts] += changed[:, number]
                text.nll[cuts] += nll[:, :, number]
                text.kl[cuts] += kl[:, number]
            if number in result.broken:
                part.broken.setdefault(row.text, result.broken[number])
            text.n_rows += 1
            text.n_tokens += row.n_tokens
            if text.n_rows == row.n_rows:
                self._close(part, row.text, text)

    def _close(self, part: CutPart, index: int, text: _TextCuts) -> None:
        """Count a text of which all rows are there, unless a number of it is NaN or infinite."""
        place = self._broken_place(text)
        if place is not None:
            part.broken.setdefault(index, place)
        if index not in part.broken and text.size > 0:
            text.is_whole = True
            part.n_texts += 1
            part.n_tokens += text.n_tokens

    def _broken_place(self, text: _TextCuts) -> BrokenPlace | None:
        """Return where NaN or infinity is computed on a text, by the model or without some heads; None = nowhere."""
        if not (np.isfinite(text.size) and np.isfinite(text.whole_nll).all()):
            return "", None
        without = np.isfinite(text.changed) & np.isfinite(text.nll).all(-1) & np.isfinite(text.kl)
        if without.all():
            return None
        kind, layer, head = self._cuts[int(without.argmin())].heads[0]
        return f"without {kind + ' ' if self._several_kinds else ''}L{layer}H{head}", None

    def finish(self, part: CutPart) -> CutPart:
        """Add up the whole texts of the block, in their order."""
        texts = [text for text in part._texts.values() if text.is_whole]
        if not texts:
            return part
        n = np.array([text.n for text in texts])
        whole_nll = np.array([text.whole_nll for text in texts])
        loss = np.array([text.nll for text in texts]) - whole_nll[:, None]
        l2 = np.sqrt(np.array([text.changed / text.size for text in texts]))
        kl = np.array([text.kl for text in texts])
        values = np.concatenate([np.stack([l2, loss[..., 0], kl], -1), loss[..., 1:]], -1)
        counts = np.concatenate([np.ones((len(texts), 1)), n[:, :1], n], -1)
        part.sums.add(values, counts[:, None])
        part.whole.add(whole_nll, n)
        part.n_predictions = int(n[:, 0].sum())
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


@dataclass(frozen=True, eq=False)
class Measured:
    """What was measured on a batch of rows.

    Attributes:
        size: Squared norms of the hidden states of the whole, (row,).
        nll: Its loss, and that by position, (1 + place, row); `n`: the predictions that these are sums over.
        cuts: The numbers of some cuts, and how outputs with them differ: squared norms of the change, (cut, row); loss,
            (cut, 1 + place, row); KL divergence, (cut, row).
        broken: Rows on which the model computes NaN or infinity.
    """

    size: Tensor
    nll: Tensor
    n: Floats
    cuts: list[tuple[list[int], Floats, Floats, Floats]]
    broken: Mapping[int, BrokenPlace]


def _measure_batch(
    runs: Model, read: ReadBatch, cuts: Sequence[Cut], stand_ins: StandIns, pass_tokens: int
) -> Measured:
    import torch

    rerun = runs.rerun(read.batch, logits=bool(len(read.rows)))
    whole = _Whole(rerun.whole, read)
    broken = broken_rows(
        {k: {n: fine.float().log() for n, fine in by_layer.items()} for k, by_layer in rerun.are_numbers.items()}
    )
    one_each = whole.nll.new_ones(len(read.rows))
    measured = Measured(
        size=whole.size.sum(-1),
        nll=_by_row_and_place(whole.nll, read),
        n=_numpy(_by_row_and_place(one_each, read)),
        cuts=[],
        broken=broken,
    )
    for first, mode, numbers in _groups(rerun, cuts):
        for some in _fitting(numbers, read, rerun.whole, pass_tokens):
            probe = gate_of([cuts[number] for number in some], mode, len(read.texts), stand_ins)
            outputs = rerun.again(probe, first, len(some))
            changed, nll, kl = whole.compare(outputs, len(some))
            by_place = [_by_row_and_place(of_cut, read) for of_cut in nll]
            measured.cuts.append(
                (some, _numpy(changed.sum(-1)), _numpy(torch.stack(by_place)), _numpy(_by_row(kl, read)))
            )
    return measured


def _groups(rerun: Rerun, cuts: Sequence[Cut]) -> Iterator[tuple[int, Mode, list[int]]]:
    """The cuts by their first block and their mode: first block, mode, numbers."""
    groups: dict[tuple[int, Mode], list[int]] = {}
    for number, cut in enumerate(cuts):
        first = rerun.block((kind, layer) for kind, layer, _ in cut.heads)  # type: ignore[misc]
        groups.setdefault((first, cut.mode), []).append(number)
    for (first, mode), numbers in groups.items():
        yield first, mode, numbers


def _fitting(numbers: Sequence[int], read: ReadBatch, whole: Outputs, pass_tokens: int) -> Iterator[list[int]]:
    """The numbers, in groups that fit into a forward pass."""
    step = pass_tokens // read.size
    if whole.logits is not None:
        step = min(step, LOGITS_AT_ONCE // whole.logits.numel())
    step = max(1, step)
    for start in range(0, len(numbers), step):
        yield list(numbers[start : start + step])


def gate_of(cuts: Sequence[Cut], mode: Mode, n_rows: int, stand_ins: StandIns) -> Gate:
    """A gate for a batch of so many rows, repeated once per cut; each repetition lacks the heads of one of the cuts."""
    import torch

    from attnscope.core.attention.probes import Gate

    factors: dict[Place, Tensor] = {}
    for number, cut in enumerate(cuts):
        for kind, layer, head in cut.heads:
            place: Place = (kind, layer)  # type: ignore[assignment]  # a kind, as it came from the model
            if place not in factors:
                factors[place] = torch.ones(len(cuts) * n_rows, stand_ins.n_heads[place])
            factors[place][number * n_rows : (number + 1) * n_rows, head] = 0
    return Gate(factors, {place: stand_ins.means[place] for place in factors} if mode == "mean" else None)


class _Whole:
    """What the whole model puts out on a batch, and how other outputs differ from it."""

    def __init__(self, outputs: Outputs, read: ReadBatch) -> None:
        import torch

        self._read = read
        self._dtype = torch.promote_types(outputs.hidden.dtype, torch.float32)
        self._hidden = outputs.hidden.to(self._dtype)
        self.size = self._hidden.square().sum(-1) * read.real
        self._logs = None if outputs.logits is None else self._log_probabilities(outputs.logits[None])[0]
        self.nll = self.size.new_zeros(0) if self._logs is None else self._nll(self._logs[None])[0]

    def compare(self, outputs: Outputs, times: int) -> tuple[Tensor, Tensor, Tensor]:
        """Squared change of hidden states, (time, row, token); loss and KL of each prediction, (time, prediction)."""
        hidden = outputs.hidden.to(self._dtype).view(times, *self._hidden.shape)
        changed = (hidden - self._hidden).square_().sum(-1) * self._read.real
        if outputs.logits is None or self._logs is None:
            nothing = changed.new_zeros(times, 0)
            return changed, nothing, nothing
        logs = self._log_probabilities(outputs.logits.view(times, len(self._hidden), *outputs.logits.shape[1:]))
        nll = self._nll(logs)
        kl = (self._logs.exp() * (self._logs - logs)).sum(-1).clamp_(min=0)
        return changed, nll, kl

    def _log_probabilities(self, logits: Tensor) -> Tensor:
        """Of the predictions, (time, prediction, vocabulary)."""
        return logits[:, self._read.rows, self._read.places].to(self._dtype).log_softmax(-1)

    def _nll(self, logs: Tensor) -> Tensor:
        return -logs.gather(-1, self._read.answers.expand(len(logs), -1)[..., None])[..., 0]


def _by_row(values: Tensor, read: ReadBatch) -> Tensor:
    """Values of predictions, (..., prediction), added up by the row that they are of, (..., row)."""
    rows = read.rows[: values.shape[-1]]
    return values.new_zeros(*values.shape[:-1], len(read.texts)).index_add_(-1, rows, values)


def _by_row_and_place(values: Tensor, read: ReadBatch) -> Tensor:
    """Values of predictions added up over all of a row, and over those of each of PLACES, (1 + place, row)."""
    import torch

    apart = values.where(read.apart[:, : len(values)], 0.0)  # not a product: 0 * NaN would spread
    return _by_row(torch.cat([values[None], apart]), read)


def _numpy(values: Tensor) -> Floats:
    numbers: Floats = values.detach().cpu().double().numpy()
    return numbers
