"""What changes without heads: every set of heads is taken out of the same batches, from its first layer on.

Several sets are taken out in one forward pass, as further rows of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from attnscope.core.running import RunningSums
from attnscope.corpus import Block, Copies, blocks, distinct
from attnscope.errors import AttnscopeError
from attnscope.models.model import Model, Outputs, Rerun
from attnscope.studies.ablation_reading import PLACES, ReadBatch, Reader
from attnscope.studies.late import failure
from attnscope.studies.memory import Room
from attnscope.studies.overflow import LeftOut, broken_rows
from attnscope.studies.overflow import Place as BrokenPlace
from attnscope.studies.texts import Progress, Report, Texts, share_read

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.probes import Gate, Place

Mode = Literal["zero", "mean"]
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
"""The same, and the loss by place."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Cut:
    """Heads that are taken out together.

    Attributes:
        heads: Which.
        mode: "zero": nothing in their place; "mean": the mean of their outputs.
    """

    heads: tuple[HeadPlace, ...]
    mode: Mode = "zero"


@dataclass(frozen=True)
class HeadMeans:
    """How many heads each attention has, and the mean of their outputs over all real queries of all texts."""

    n_heads: Mapping[Place, int]
    means: Mapping[Place, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """What a pass over texts has added up.

    Attributes:
        sums: Of each cut (or contrast) and quantity of ALL_QUANTITIES.
        whole: The loss of the whole model, and that by place.
        n_texts: How many texts there were.
        n_tokens: How many tokens.
        n_predictions: How many predictions.
        complete: False after an interruption, or where something failed after some texts.
        left_out: Texts on which the model computes NaN or infinity, with all heads or without some.
        failed: What failed, as `late.failure` tells it.
        n_copies: How many texts were left out as copies of earlier ones.
    """

    sums: RunningSums
    whole: RunningSums
    n_texts: int = 0
    n_tokens: int = 0
    n_predictions: int = 0
    complete: bool = True
    left_out: LeftOut = LeftOut()
    failed: Mapping[str, str] | None = None
    n_copies: int = 0


def rerunnable(model: Model) -> Model:
    """The model, if heads can be taken out of it.

    Raises:
        AttnscopeError: They cannot.
    """
    if model.info.path != "seam":
        raise AttnscopeError(
            f"{model.info.name} does not pass its attention through the seam: its heads cannot be taken out",
            "what they attend to can be seen: attnscope heatmap, attnscope heads",
        )
    return model


def heads_of(model: Model, reader: Reader, texts: Texts) -> HeadMeans:
    """How many heads each attention has, seen on the first text."""
    first = next(_batches(texts, reader), None)
    return HeadMeans({}) if first is None else _means(rerunnable(model), [first], reader)


def means_of(model: Model, reader: Reader, texts: Texts, report: Report | None = None) -> HeadMeans:
    """The mean output of each head, over all texts."""
    return _means(rerunnable(model), _reported(_batches(texts, reader), texts, report), reader)


def measured(
    model: Model,
    reader: Reader,
    texts: Texts,
    cuts: Sequence[Cut],
    known: HeadMeans,
    *,
    contrasts: Floats | None = None,
    report: Report | None = None,
) -> Found:
    """Takes cuts out of every text, one at a time, and adds up what changes.

    Per text, with h the last hidden states of the whole model at its n real tokens and h' those without the heads:
    l2 is |h' - h| / |h| (Frobenius norms); loss is the sum of how much more the right tokens' negative log-likelihood
    is, over its predictions; kl the sum of KL(whole || without), in nats. Copies of a text count once.

    Args:
        model: The model.
        reader: Makes batches.
        texts: The texts.
        cuts: What is taken out.
        known: The heads, and their means where a cut wants them.
        contrasts: Sums of cuts to add up instead, (contrast, cut): differences of a text's own values.
        report: Called after each batch.
    """
    runs = rerunnable(model)
    mixed = np.eye(len(cuts)) if contrasts is None else contrasts
    found = Found(RunningSums((len(mixed), len(ALL_QUANTITIES))), RunningSums((1 + len(PLACES),)))
    copies = Copies()
    try:
        for block in blocks(distinct(texts, copies), BLOCK):
            held = _Held(block, len(cuts))
            for read in _longest_first(reader.batches(block)):
                for part, measured_part in _parts(runs, read, cuts, known, reader):
                    held.add(part, measured_part)
                    if report is not None:
                        n_texts, n_tokens = found.n_texts + held.n_texts, found.n_tokens + held.n_tokens
                        report(Progress(n_texts, n_tokens, share_read(texts)))
            found = held.added(found, mixed, held.broken(cuts, several_kinds=len(model.info.kinds) > 1))
    except KeyboardInterrupt:
        found = replace(found, complete=False)
    except Exception as error:
        if not found.n_texts:
            raise
        found = replace(found, complete=False, failed=failure("taking heads out of a later text", error))
    return replace(found, n_copies=copies.n)


class _Held:
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

    def add(self, read: ReadBatch, found: _Measured) -> None:
        """Adds what was measured on a batch."""
        for row, place in found.broken.items():
            self._broken.setdefault(int(read.texts[row]), place)
        self._add_whole(read, found.size, found.nll)
        for cuts, differences in found.cuts:
            self._add_cuts(read, cuts, *differences)

    def _add_whole(self, read: ReadBatch, size: Tensor, nll: Tensor) -> None:
        rows = self._rows(read)
        np.add.at(self._size, rows, _numpy(size))
        np.add.at(self._whole_nll, rows, _numpy(_by_row_and_place(nll, read)).T)
        np.add.at(self._n, rows, _numpy(_by_row_and_place(nll.new_ones(len(read.rows)), read)).T)
        self.n_tokens += read.n_tokens

    def _add_cuts(self, read: ReadBatch, cuts: Sequence[int], changed: Tensor, nll: Tensor, kl: Tensor) -> None:
        rows = self._rows(read)
        for place, cut in enumerate(cuts):
            np.add.at(self._changed[:, cut], rows, _numpy(changed[place]))
            np.add.at(self._nll[:, cut], rows, _numpy(_by_row_and_place(nll[place], read)).T)
            np.add.at(self._kl[:, cut], rows, _numpy(_by_row(kl[place], read)))

    def broken(self, cuts: Sequence[Cut], *, several_kinds: bool) -> dict[int, BrokenPlace]:
        """Texts on which the model, or the model without some heads, computes NaN or infinity."""
        found: dict[int, BrokenPlace] = {}
        without = np.isfinite(self._changed) & np.isfinite(self._nll).all(-1) & np.isfinite(self._kl)
        whole = np.isfinite(self._size) & np.isfinite(self._whole_nll).all(-1)
        for row in np.flatnonzero(~(without.all(-1) & whole)).tolist():
            name = ""
            if whole[row]:
                kind, layer, head = cuts[int(np.flatnonzero(~without[row])[0])].heads[0]
                name = f"without {kind + ' ' if several_kinds else ''}L{layer}H{head}"
            found[self._texts[row].index] = name, None
        return found | self._broken

    def added(self, found: Found, contrasts: Floats, broken: Mapping[int, BrokenPlace]) -> Found:
        """Sums with those of this block added, without its broken texts."""
        there = (self._size > 0) & ~np.isin([text.index for text in self._texts], list(broken))
        l2 = np.sqrt(self._changed[there] / self._size[there, None])
        loss = self._nll[there] - self._whole_nll[there, None]
        values = np.concatenate([np.stack([l2, loss[..., 0], self._kl[there]], -1), loss[..., 1:]], -1)
        n = self._n[there]
        counts = np.concatenate([np.ones((len(l2), 1)), n[:, :1], n], -1)
        sums, whole = (RunningSums(old.shape).merge(old) for old in (found.sums, found.whole))
        if len(l2):
            sums.add(np.einsum("kc,tcq->tkq", contrasts, values), counts[:, None])
            whole.add(self._whole_nll[there], self._n[there])
        return Found(
            sums,
            whole,
            found.n_texts + int(there.sum()),
            found.n_tokens + self.n_tokens,
            found.n_predictions + int(n[:, 0].sum()),
            left_out=found.left_out.and_of(LeftOut.of(self._texts, broken)),
        )

    def _rows(self, read: ReadBatch) -> NDArray[np.int64]:
        return np.array([self._row_of[int(text)] for text in read.texts])


@dataclass(frozen=True, eq=False)
class _Measured:
    """What was measured on a batch: sizes and losses of the whole, and how outputs without some cuts differ."""

    size: Tensor
    nll: Tensor
    cuts: list[tuple[list[int], tuple[Tensor, Tensor, Tensor]]]
    broken: Mapping[int, BrokenPlace]


def _parts(
    runs: Model, read: ReadBatch, cuts: Sequence[Cut], known: HeadMeans, reader: Reader
) -> Iterator[tuple[ReadBatch, _Measured]]:
    """Measures a batch; where memory does not suffice, fewer cuts at a time, and then fewer texts."""
    import torch

    room = reader.room

    def measure(part: ReadBatch) -> _Measured:
        with torch.no_grad():
            return _measure_batch(runs, part, cuts, known, _pass_tokens(room))

    def smaller(part: ReadBatch) -> list[ReadBatch]:
        return [part] if part.size <= _pass_tokens(room) else reader.halves(part)

    return room.each(
        read, measure, smaller, lambda part: max(part.size, min(_pass_tokens(room), part.size * len(cuts)))
    )


def _pass_tokens(room: Room) -> int:
    return PASS_TOKENS if room.tokens is None else min(PASS_TOKENS, room.tokens)


def _measure_batch(runs: Model, read: ReadBatch, cuts: Sequence[Cut], known: HeadMeans, pass_tokens: int) -> _Measured:
    rerun = runs.rerun(read.batch, logits=bool(len(read.rows)))
    whole = _Whole(rerun.whole, read)
    broken = broken_rows(
        {k: {n: fine.float().log() for n, fine in by_layer.items()} for k, by_layer in rerun.are_numbers.items()}
    )
    found = _Measured(whole.size, whole.nll, [], broken)
    for first, mode, numbers in _groups(rerun, cuts):
        for some in _fitting(numbers, read, rerun.whole, pass_tokens):
            gate = gate_of([cuts[number] for number in some], mode, len(read.texts), known)
            outputs = rerun.again(gate, first, len(some))
            found.cuts.append((some, whole.compared(outputs, len(some))))
    return found


def _groups(rerun: Rerun, cuts: Sequence[Cut]) -> Iterator[tuple[int, Mode, list[int]]]:
    """The cuts that begin in the same block and put in the same: first block, mode, numbers."""
    found: dict[tuple[int, Mode], list[int]] = {}
    for number, cut in enumerate(cuts):
        first = rerun.block((kind, layer) for kind, layer, _ in cut.heads)  # type: ignore[misc]
        found.setdefault((first, cut.mode), []).append(number)
    for (first, mode), numbers in found.items():
        yield first, mode, numbers


def _fitting(numbers: Sequence[int], read: ReadBatch, whole: Outputs, pass_tokens: int) -> Iterator[list[int]]:
    """The same numbers, as many at a time as fit into a forward pass."""
    step = pass_tokens // read.size
    if whole.logits is not None:
        step = min(step, LOGITS_AT_ONCE // whole.logits.numel())
    step = max(1, step)
    for start in range(0, len(numbers), step):
        yield list(numbers[start : start + step])


def gate_of(cuts: Sequence[Cut], mode: Mode, n_rows: int, known: HeadMeans) -> Gate:
    """A gate for as many repetitions of a batch as there are cuts, each of which takes out one of them."""
    import torch

    from attnscope.core.probes import Gate

    factors: dict[Place, Tensor] = {}
    for number, cut in enumerate(cuts):
        for kind, layer, head in cut.heads:
            place: Place = (kind, layer)  # type: ignore[assignment]  # a kind, as it came from the model
            if place not in factors:
                factors[place] = torch.ones(len(cuts) * n_rows, known.n_heads[place])
            factors[place][number * n_rows : (number + 1) * n_rows, head] = 0
    return Gate(factors, {place: known.means[place] for place in factors} if mode == "mean" else None)


class _Whole:
    """What the whole model puts out on a batch, and how other outputs differ from it."""

    def __init__(self, outputs: Outputs, read: ReadBatch) -> None:
        import torch

        self._read = read
        self._dtype = torch.promote_types(outputs.hidden.dtype, torch.float32)
        self._hidden = outputs.hidden.to(self._dtype)
        self.size = (self._hidden.square().sum(-1) * read.real).sum(-1)
        self._logs = None if outputs.logits is None else self._log_probabilities(outputs.logits[None])[0]
        self.nll = self.size.new_zeros(0) if self._logs is None else self._nll(self._logs[None])[0]

    def compared(self, outputs: Outputs, times: int) -> tuple[Tensor, Tensor, Tensor]:
        """Squared change of the hidden states, (time, row); loss and KL of each prediction, (time, prediction)."""
        hidden = outputs.hidden.to(self._dtype).view(times, *self._hidden.shape)
        changed = ((hidden - self._hidden).square_().sum(-1) * self._read.real).sum(-1)
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


def _means(runs: Model, batches: Iterator[ReadBatch] | Sequence[ReadBatch], reader: Reader) -> HeadMeans:
    import torch

    from attnscope.core.probes import Means

    blank: dict[Place, Tensor] = {}

    def seen(read: ReadBatch) -> list[Means]:
        probe = Means(read.queries)
        with torch.no_grad():
            runs.outputs(read.batch, probe, logits=False)
        blank.update({place: torch.zeros_like(total) for place, total in probe.sums.items()})
        if all(bool(total.isfinite().all()) for total in probe.sums.values()):
            return [probe]
        # One row that is no number would be in every mean: it is found by halves, and left out.
        return [one for half in reader.halves(read) for one in seen(half)]

    sums: dict[Place, Tensor] = {}
    counts: dict[Place, int] = {}
    for read in batches:
        for _, probes in reader.room.each(read, seen, reader.halves, lambda part: part.size):
            for probe in probes:
                for place, found in probe.sums.items():
                    sums[place] = found if place not in sums else sums[place] + found
                    counts[place] = counts.get(place, 0) + probe.counts[place]
    means = {place: total / max(1, counts[place]) for place, total in sums.items()}
    return HeadMeans({place: len(total) for place, total in blank.items()}, {**blank, **means})


def _batches(texts: Texts, reader: Reader) -> Iterator[ReadBatch]:
    for block in blocks(distinct(texts, Copies()), BLOCK):
        yield from _longest_first(reader.batches(block))


def _longest_first(batches: Sequence[ReadBatch]) -> Sequence[ReadBatch]:
    """What shorter texts need fits into the memory that longer ones have freed."""
    return batches[::-1]


def _reported(batches: Iterator[ReadBatch], texts: Texts, report: Report | None) -> Iterator[ReadBatch]:
    n_texts = n_tokens = 0
    for read in batches:
        yield read
        n_texts, n_tokens = n_texts + len(read.texts), n_tokens + read.n_tokens
        if report is not None:
            report(Progress(n_texts, n_tokens, share_read(texts)))


def _numpy(values: Tensor) -> Floats:
    found: Floats = values.detach().cpu().double().numpy()
    return found
