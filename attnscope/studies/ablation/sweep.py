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

from attnscope.core.exact.running import RunningSums
from attnscope.corpus import Block
from attnscope.errors import AttnscopeError
from attnscope.models.model import Model, Outputs, Rerun
from attnscope.studies.ablation.options import Mode
from attnscope.studies.ablation.reading import PLACES, ReadBatch, Reader
from attnscope.studies.inputs.texts import Report, Texts
from attnscope.studies.running import passes
from attnscope.studies.running.memory import Room
from attnscope.studies.running.overflow import LeftOut, broken_rows
from attnscope.studies.running.overflow import Place as BrokenPlace
from attnscope.studies.running.passes import D, Driver, Measurer, Pass
from attnscope.studies.running.workers import Workers

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


@dataclass(frozen=True, kw_only=True, eq=False)
class Found(passes.Totals):
    """What a pass over texts has added up.

    Attributes:
        sums: For each cut and quantity of ALL_QUANTITIES.
        whole: The loss of the whole model, and that by position.
    """

    sums: RunningSums
    whole: RunningSums
    n_predictions: int = 0


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
        measurer: Callable[..., Measurer[Block, Any, D]],
        arguments: Mapping[str, Any],
        nothing: D,
        report: Report | None,
        *,
        step: str | None = None,
    ) -> Pass[D]:
        """Reads the texts once; copies count once. The measurer gets a model, a reader and the arguments.

        `nothing` is the sums of no text; `step` is that of `Driver`.
        """
        # In this process all passes share what a reader has seen.
        make = partial(_make, measurer, self.reader.arguments if self.workers else self.reader, arguments)
        workers = (self.workers,) if self.workers else None
        return Driver(make, (self.model,), workers, step=step).run_texts(self.texts, BLOCK, nothing, report)


def _make(
    measurer: Callable[..., Any], reading: Reader | Mapping[str, Any], arguments: Mapping[str, Any], model: Model
) -> Any:
    return measurer(model, reading if isinstance(reading, Reader) else Reader(model, **reading), **arguments)


def measure(going: Going, cuts: Sequence[Cut], stand_ins: StandIns, report: Report | None = None) -> Pass[Found]:
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
    nothing = Found(sums=RunningSums((len(cuts), len(ALL_QUANTITIES))), whole=RunningSums((1 + len(PLACES),)))
    arguments = {"cuts": tuple(cuts), "stand_ins": stand_ins}
    return going.run(CutMeasurer, arguments, nothing, report, step="taking heads out of a later text")


class CutMeasurer:
    """Takes cuts out of the texts of blocks; see `measure`."""

    def __init__(self, model: Model, reader: Reader, cuts: Sequence[Cut], stand_ins: StandIns) -> None:
        self._runs = require_rerunnable(model)
        self._reader = reader
        self._cuts = cuts
        self._stand_ins = stand_ins
        self._several_kinds = len(model.info.kinds) > 1

    def begin(self, block: Block) -> _BlockCuts:
        """Sums of nothing yet."""
        return _BlockCuts(block, len(self._cuts))

    def steps(self, block: Block, sums: _BlockCuts) -> Iterator[None]:
        """Measures a block, batch by batch."""
        for read in self._reader.batches(block):
            for part, measured in _parts(self._runs, read, self._cuts, self._stand_ins, self._reader):
                sums.add(part, measured)
                yield

    def finish(self, block: Block, sums: _BlockCuts, *, whole: bool) -> Found:
        """What the sums amount to."""
        broken = sums.broken(self._cuts, several_kinds=self._several_kinds)
        return sums.conclude(broken, self._reader.room.tokens)


class _BlockCuts:
    """The sums of the texts of a block, text by text: a text may be in several rows."""

    def __init__(self, block: Block, n_cuts: int) -> None:
        self._texts = block.texts
        self._broken: dict[int, BrokenPlace] = {}
        self._row_of = {text.index: row for row, text in enumerate(block.texts)}
        n, n_losses = len(block.texts), 1 + len(PLACES)
        self._changed, self._kl = (np.zeros((n, n_cuts)) for _ in range(2))
        self._nll = np.zeros((n, n_cuts, n_losses))
        self._size = np.zeros(n)
        self._whole_nll, self._n = (np.zeros((n, n_losses)) for _ in range(2))
        self.n_tokens = 0

    @property
    def n_texts(self) -> int:
        return int((self._size > 0).sum())

    def add(self, read: ReadBatch, measured: Measured) -> None:
        """Adds what was measured on a batch."""
        for row, where in measured.broken.items():
            self._broken.setdefault(int(read.texts[row]), where)
        self._add_whole(read, measured.size, measured.nll)
        for cuts, differences in measured.cuts:
            self._add_cuts(read, cuts, *differences)

    def _add_whole(self, read: ReadBatch, size: Tensor, nll: Tensor) -> None:
        rows = self._rows(read)
        np.add.at(self._size, rows, _numpy(size.sum(-1)))
        np.add.at(self._whole_nll, rows, _numpy(_by_row_and_place(nll, read)).T)
        np.add.at(self._n, rows, _numpy(_by_row_and_place(nll.new_ones(len(read.rows)), read)).T)
        self.n_tokens += read.n_tokens

    def _add_cuts(self, read: ReadBatch, cuts: Sequence[int], changed: Tensor, nll: Tensor, kl: Tensor) -> None:
        rows = self._rows(read)
        for number, cut in enumerate(cuts):
            np.add.at(self._changed[:, cut], rows, _numpy(changed[number].sum(-1)))
            np.add.at(self._nll[:, cut], rows, _numpy(_by_row_and_place(nll[number], read)).T)
            np.add.at(self._kl[:, cut], rows, _numpy(_by_row(kl[number], read)))

    def broken(self, cuts: Sequence[Cut], *, several_kinds: bool) -> dict[int, BrokenPlace]:
        """Texts on which the model, or the model without some heads, computes NaN or infinity."""
        broken: dict[int, BrokenPlace] = {}
        without = np.isfinite(self._changed) & np.isfinite(self._nll).all(-1) & np.isfinite(self._kl)
        whole = np.isfinite(self._size) & np.isfinite(self._whole_nll).all(-1)
        for row in np.flatnonzero(~(without.all(-1) & whole)).tolist():
            name = ""
            if whole[row]:
                kind, layer, head = cuts[int(np.flatnonzero(~without[row])[0])].heads[0]
                name = f"without {kind + ' ' if several_kinds else ''}L{layer}H{head}"
            broken[self._texts[row].index] = name, None
        return broken | self._broken

    def conclude(self, broken: Mapping[int, BrokenPlace], halved_to: int | None) -> Found:
        """The sums, without broken texts."""
        there = (self._size > 0) & ~np.isin([text.index for text in self._texts], list(broken))
        l2 = np.sqrt(self._changed[there] / self._size[there, None])
        loss = self._nll[there] - self._whole_nll[there, None]
        values = np.concatenate([np.stack([l2, loss[..., 0], self._kl[there]], -1), loss[..., 1:]], -1)
        n = self._n[there]
        counts = np.concatenate([np.ones((len(l2), 1)), n[:, :1], n], -1)
        sums, whole = RunningSums(values.shape[1:]), RunningSums((n.shape[1],))
        if len(l2):
            sums.add(values, counts[:, None])
            whole.add(self._whole_nll[there], self._n[there])
        return Found(
            sums=sums, whole=whole, n_texts=int(there.sum()), n_tokens=self.n_tokens,
            n_predictions=int(n[:, 0].sum()), left_out=LeftOut.of(self._texts, broken), halved_to=halved_to,
        )  # fmt: skip

    def _rows(self, read: ReadBatch) -> NDArray[np.int64]:
        return np.array([self._row_of[int(text)] for text in read.texts])


@dataclass(frozen=True, eq=False)
class Measured:
    """What was measured on a batch: sizes (row, token) and losses of the whole, and how outputs with cuts differ."""

    size: Tensor
    nll: Tensor
    cuts: list[tuple[list[int], tuple[Tensor, Tensor, Tensor]]]
    broken: Mapping[int, BrokenPlace]


def _parts(
    runs: Model, read: ReadBatch, cuts: Sequence[Cut], stand_ins: StandIns, reader: Reader
) -> Iterator[tuple[ReadBatch, Measured]]:
    """Measures a batch; where memory does not suffice, fewer cuts at a time, and then fewer texts."""
    import torch

    room = reader.room

    def measure(part: ReadBatch) -> Measured:
        with torch.no_grad():
            return _measure_batch(runs, part, cuts, stand_ins, _pass_tokens(room))

    def smaller(part: ReadBatch) -> list[ReadBatch]:
        return [part] if part.size <= _pass_tokens(room) else reader.halves(part)

    return room.each(
        read,
        measure,
        smaller,
        lambda part: max(part.size, min(_pass_tokens(room), part.size * len(cuts))),
        texts_apart=reader.halves,
    )


def _pass_tokens(room: Room) -> int:
    return PASS_TOKENS if room.tokens is None else min(PASS_TOKENS, room.tokens)


def _measure_batch(
    runs: Model, read: ReadBatch, cuts: Sequence[Cut], stand_ins: StandIns, pass_tokens: int
) -> Measured:
    rerun = runs.rerun(read.batch, logits=bool(len(read.rows)))
    whole = _Whole(rerun.whole, read)
    broken = broken_rows(
        {k: {n: fine.float().log() for n, fine in by_layer.items()} for k, by_layer in rerun.are_numbers.items()}
    )
    measured = Measured(whole.size, whole.nll, [], broken)
    for first, mode, numbers in _groups(rerun, cuts):
        for some in _fitting(numbers, read, rerun.whole, pass_tokens):
            probe = gate_of([cuts[number] for number in some], mode, len(read.texts), stand_ins)
            outputs = rerun.again(probe, first, len(some))
            measured.cuts.append((some, whole.compare(outputs, len(some))))
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
