"""Measure texts while heads are taken out of a model; each class is a measurer of `studies.run`.

`MeanOutputs` adds up what heads put out, `Cutting` takes sets of heads out of the same batches, and `Slopes` follows
the loss by one backward pass. A text may come in several rows; it counts when all of them are there.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscope.core.attention.precision import sum_dtype
from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import AttentionCall, Kind, are_numbers, attend
from attnscope.core.interventions import Activations, Leaves, Patch, Patched
from attnscope.core.sums import RunningSums
from attnscope.corpus import Block, Copies, distinct
from attnscope.models.model import PASS_TOKENS, Model
from attnscope.questions.ablate import Mode
from attnscope.studies.ablate.reading import ReadBatch, Reader, Row, require_rerunnable
from attnscope.studies.failures import Place as BrokenPlace
from attnscope.studies.failures import broken_rows
from attnscope.studies.inputs.texts import Report, Texts
from attnscope.studies.run import STEP, Measurer, Part, Room, Run, run
from attnscope.studies.workers import Workers

Head = tuple[Kind, int, int]
"""A head: kind of attention, layer, number."""

Floats = NDArray[np.float64]

Shapes = Mapping[Place, tuple[int, int]]
"""How many heads each attention has, and how wide their outputs are."""

BLOCK = 32
"""Texts that are finished together: an interruption loses no more."""

DONORS = 8
"""Texts whose outputs take the place of a head's, one after the other."""

Measured = tuple[Floats, Mapping[int, BrokenPlace]]
"""Numbers of each row, (row, …), and the rows on which something else is not finite."""

HeadOutputs = Mapping[Place, Tensor]
"""Outputs of heads on one row, (head, token, d) by place."""

QUANTITIES = ("l2", "loss", "kl")
"""The quantities that are measured without heads."""


@dataclass(kw_only=True, eq=False)
class TextPart(Part):
    """Hold sums over texts, and the numbers of the rows of the block at hand.

    Attributes:
        sums: What a measurer adds up of whole texts.
        whole: The loss of the whole model, and how many predictions it is of.
    """

    sums: RunningSums
    whole: RunningSums = field(default_factory=RunningSums)
    _rows: dict[int, list[tuple[Row, Floats]]] = field(default_factory=dict)

    def add_row(self, row: Row, numbers: Floats, broken_at: BrokenPlace | None) -> None:
        """Add the numbers of a row, (…,), and where one is not finite: its text is left out."""
        # Without a layer it is in the last hidden states.
        if broken_at is None and not np.isfinite(numbers).all():
            broken_at = ("", None)
        if broken_at is not None:
            self.broken.setdefault(row.text_index, broken_at)
        rows = self._rows.setdefault(row.text_index, [])
        rows.append((row, numbers))
        if self.complete_text(row.text_index, row.n_rows):
            self.n_texts += 1
            self.n_tokens += sum(each.n_tokens for each, _ in rows)

    def whole_texts(self) -> tuple[Floats, Floats]:
        """Return the sums over the rows of each whole text, (text, …), and its predictions, (text,), in their order."""
        sums = []
        n_predictions = []
        for text in sorted(self._whole):
            rows, numbers = zip(*self._rows[text], strict=True)
            sums.append(sum(numbers))
            n_predictions.append(sum(len(row.positions) for row in rows))
        return np.array(sums), np.array(n_predictions, dtype=np.float64)


class RowMeasurer(Measurer[TextPart]):
    """Measure numbers of batches of rows, and add up those of whole texts.

    `measure` returns the numbers of each row, (row, …), and the rows on which something else is not finite.

    Args:
        model: The model.
        reader: Makes batches of its texts; in a worker its arguments.
        shape: The shape of what is added up.
    """

    def __init__(self, model: Model, reader: Reader | Mapping[str, Any], shape: tuple[int, ...]) -> None:
        super().__init__(model.tokenizer)
        self._model = require_rerunnable(model)
        self._reader = reader if isinstance(reader, Reader) else Reader(model, **reader)
        self._shape = shape

    def start(self, block: Block) -> TextPart:
        """Return sums of nothing yet."""
        return TextPart(sums=RunningSums(self._shape))

    def batches(self, block: Block) -> Sequence[Sequence[Row]]:
        """Cut a block into batches of rows."""
        return self._reader.batches(block)

    def add(self, part: TextPart, batch: Sequence[Row], result: Measured) -> None:
        """Add rows to their texts."""
        numbers, broken = result
        for number, row in enumerate(batch):
            part.add_row(row, numbers[number], broken.get(number))

    def finish(self, part: TextPart) -> TextPart:
        """Add up the whole texts of the block, in their order."""
        numbers, n_predictions = part.whole_texts()
        if part.n_texts:
            self.add_up(part, numbers, n_predictions)
        return part

    @abstractmethod
    def add_up(self, part: TextPart, numbers: Floats, n_predictions: Floats) -> None:
        """Add the numbers of whole texts, (text, …), to the sums, beside how many predictions each has, (text,)."""


@dataclass(frozen=True, eq=False)
class Passes:
    """Hold the inputs of every pass over the texts.

    Attributes:
        reader: Makes batches of the texts for its model.
        texts: The texts.
        workers: Who runs the model; None = this process.
    """

    reader: Reader
    texts: Texts
    workers: Workers | None = None


def _measure(
    passes: Passes,
    measurer: type[RowMeasurer],
    shape: tuple[int, ...],
    report: Report | None,
    step: str = STEP,
    **arguments: Any,
) -> Run[TextPart]:
    """Go over the texts once, with a measurer that takes these arguments."""
    # In this process all passes share what a reader has seen.
    reader: Any = passes.reader
    workers = None
    if passes.workers is not None:
        reader = passes.reader.arguments
        workers = (passes.workers,)
    return run(
        partial(measurer, reader=reader, shape=shape, **arguments),
        (passes.reader.model,),
        passes.texts,
        TextPart(sums=RunningSums(shape)),
        block=BLOCK,
        workers=workers,
        report=report,
        step=step,
    )


def _require_end(going: Run[TextPart]) -> Run[TextPart]:
    """Return a run over all texts; raise what ended it before."""
    if going.error is not None:
        raise going.error
    if not going.complete:
        raise KeyboardInterrupt
    return going


# What heads put out


class MeanOutputs(RowMeasurer):
    """Add up the outputs of heads over all real queries."""

    def measure(self, batch: Sequence[Row]) -> Measured:
        """Return sums of the outputs of all places, and how many queries are in them, (row, 2, place · head · d)."""
        read = self._reader.read(batch)
        # Sums and counts of each attention, in the order in which the model computes them.
        sums: list[Tensor] = []

        def observe(call: AttentionCall) -> Tensor:
            output = attend(call)
            real = read.queries[call.kind].to(output.device)
            outputs = output.masked_fill(~real[:, None, :, None], 0.0)
            # (row, head, query, d) -> (row, head · d)
            dtype = sum_dtype(outputs.device)
            of_rows = outputs.sum(2, dtype=dtype).flatten(1)
            # Fused kernels may give numbers where there are none.
            of_rows[~are_numbers(call)] = torch.nan
            n_queries = real.sum(1, keepdim=True).to(of_rows)
            both = torch.stack([of_rows, n_queries.expand_as(of_rows)], 1)
            sums.append(both.cpu())
            return output

        with torch.no_grad():
            self._model.outputs(read.batch, observe, logits=False)
        return to_numpy(torch.cat(sums, -1)), {}

    def add_up(self, part: TextPart, numbers: Floats, n_predictions: Floats) -> None:
        """Add sums and counts."""
        part.sums.add(numbers[:, 0], numbers[:, 1])


def measure_means(
    passes: Passes, shapes: Shapes, report: Report | None
) -> tuple[Run[TextPart], HeadOutputs]:
    """Return the pass over all texts, and the mean outputs of the heads of each place, (head, d), float64.

    Means over some texts are none: what ends the pass before is raised.
    """
    sizes = [n_heads * width for n_heads, width in shapes.values()]
    shape = (sum(sizes),)
    going = _require_end(_measure(passes, MeanOutputs, shape, report))
    # One vector for all heads of all places: cut it by place.
    means = torch.from_numpy(np.nan_to_num(going.done.sums.ratio()))
    by_place = {}
    parts = means.split(sizes)  # type: ignore[no-untyped-call]
    for (place, place_shape), mean in zip(shapes.items(), parts, strict=True):
        by_place[place] = mean.view(place_shape)
    return going, by_place


def outputs_of(passes: Passes) -> Iterator[tuple[int, HeadOutputs]]:
    """Yield the index of each text, and the outputs of heads on its first row, (head, token, d) by place."""
    reader = passes.reader

    def read_outputs(rows: Sequence[Row]) -> HeadOutputs:
        activations = Activations()
        with torch.no_grad():
            reader.model.outputs(reader.read(rows).batch, activations, logits=False)
        return activations.outputs

    for text in distinct(passes.texts, Copies()):
        # The first row of the text stands for it; a text without tokens has none.
        batches = reader.batches(Block(0, (text,)))
        row = next(chain.from_iterable(batches), None)
        if row is None:
            continue
        # A row that does not fit into memory is refused with a hint.
        ((_, outputs),) = Room().each([row], read_outputs)
        yield text.index, {place: output[0] for place, output in outputs.items()}


def shapes_of(outputs: Iterable[tuple[int, HeadOutputs]]) -> Shapes:
    """Return the shapes of heads' outputs, as the first of `outputs_of` shows them."""
    # Each output is (head, token, d).
    _, first = next(iter(outputs))
    shapes = {}
    for place, output in first.items():
        n_heads, _, width = output.shape
        shapes[place] = (n_heads, width)
    return shapes


# What changes without heads


class Cut(NamedTuple):
    """Heads that are taken out together.

    Attributes:
        heads: The heads.
        mode: What takes the place of their outputs: nothing ("zero"), their mean, or outputs on another text.
        donor: Which of the donors that text is, from 0; -1 = the mode needs none.
    """

    heads: tuple[Head, ...]
    mode: Mode = "zero"
    donor: int = -1


class StandIns(NamedTuple):
    """The values that may take the place of heads' outputs.

    Attributes:
        means: The mean outputs of the heads of each place over all real queries of all texts, (head, d).
        donors: Several texts: the index of each, and the outputs of its heads, (head, token, d) by place.
    """

    means: Mapping[Place, Tensor] = {}
    donors: Sequence[tuple[int, HeadOutputs]] = ()

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
            donor = others[cut.donor % len(others)]
            output = donor[place][head]  # (token, d)
            rows.append(output[torch.arange(n_queries) % len(output)])
        return torch.stack(rows)[:, None]


class Cutting(RowMeasurer):
    """Take cuts out of texts, several in one forward pass, as further rows of the batch; see `measure_cuts`."""

    def __init__(self, *arguments: Any, cuts: Sequence[Cut], stand_ins: StandIns, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._cuts = cuts
        self._stand_ins = stand_ins

    def measure(self, batch: Sequence[Row]) -> Measured:
        """Run the model whole, and without each cut.

        Returns:
            Squared norms of hidden states, losses and KL divergence, (row, 1 + cut, 3): first those of the whole model,
            then of the changes by cuts, with the losses that are left. And rows where it computes no number.
        """
        shape = (1 + len(self._cuts), len(batch), len(QUANTITIES))
        numbers = np.zeros(shape)
        with torch.no_grad():
            # Run the whole model once.
            read = self._reader.read(batch)
            has_any = len(read.rows) > 0
            rerun = self._model.rerun(read.batch, logits=has_any)
            hidden = rerun.whole.hidden
            dtype = torch.promote_types(hidden.dtype, torch.float32)
            whole = hidden.to(dtype)
            whole_logs = read.log_probabilities(rerun.whole.logits, 1)
            numbers[0] = _by_row(read, whole[None], whole_logs, whole_logs)[0]
            # Take out as many cuts per pass as fit, as repetitions of the batch: one where memory ran out before.
            pass_tokens = PASS_TOKENS if self.room.tokens is None else self.room.tokens
            places = [[(kind, layer) for kind, layer, _ in cut.heads] for cut in self._cuts]
            for first, chosen in rerun.plan(places, pass_tokens):
                without = self._without(chosen, read)
                outputs = rerun.again(without, first, len(chosen))
                left = outputs.hidden.to(dtype)
                change = left.view(len(chosen), *whole.shape) - whole
                left_logs = read.log_probabilities(outputs.logits, len(chosen))
                rows = 1 + np.array(chosen)
                numbers[rows] = _by_row(read, change, left_logs, whole_logs)
        # Padding is no hidden state, and what is computed there need not be a number: ask the run about real tokens.
        broken: dict[str, dict[int, Tensor]] = {}
        for kind, by_layer in rerun.are_numbers.items():
            broken[kind] = {layer: torch.where(fine, 0, torch.nan) for layer, fine in by_layer.items()}
        return numbers.swapaxes(0, 1), broken_rows(broken)

    def _without(self, chosen: Sequence[int], read: ReadBatch) -> Patched:
        """Return what takes cuts out of a batch that is repeated once per cut; each repetition lacks one of them."""
        n_rows = len(read.texts)
        patches: dict[Place, list[Patch]] = {}
        for number, index in enumerate(chosen):
            cut = self._cuts[index]
            rows = slice(number * n_rows, (number + 1) * n_rows)
            # The rows of this repetition lack the heads of this cut alone.
            for kind, layer, head in cut.heads:
                values = self._stand_ins.values(cut, (kind, layer), head, read)
                patch = Patch("z", (head,), values, rows)
                patches.setdefault((kind, layer), []).append(patch)
        return Patched(patches)

    def add_up(self, part: TextPart, numbers: Floats, n_predictions: Floats) -> None:
        """Add the changes by cuts, and the loss of the whole model."""
        whole = numbers[:, :1]
        cuts = numbers[:, 1:]
        # Mean over texts: norms per text, losses and KL per prediction. (text, cut, 3)
        l2 = np.sqrt(cuts[..., 0] / whole[..., 0])
        rise = cuts[..., 1] - whole[..., 1]
        values = np.stack([l2, rise, cuts[..., 2]], -1)
        # (text, 1, 3)
        counts = np.ones((len(numbers), 1, len(QUANTITIES)))
        counts[..., 1:] = n_predictions[:, None, None]
        part.sums.add(values, counts)
        part.whole.add(whole[:, 0, 1], n_predictions)


def measure_cuts(
    passes: Passes,
    cuts: Sequence[Cut],
    stand_ins: StandIns,
    report: Report | None = None,
) -> Run[TextPart]:
    """Take cuts out of every text, one at a time, and add up what changes.

    For a text, h are the last hidden states of the whole model at its n real tokens, and h' those without the heads.
    Then l2 is |h' - h| / |h| (Frobenius norms). loss is how much the negative log-likelihood of what is right rises,
    summed over its predictions. kl is the sum of KL(whole || without), in nats.
    """
    shape = (len(cuts), len(QUANTITIES))
    step = "taking heads out of a later text"
    named = {"cuts": tuple(cuts), "stand_ins": stand_ins}
    return _measure(passes, Cutting, shape, report, step, **named)


def _by_row(
    read: ReadBatch,
    states: Tensor,
    logs: Tensor | None,
    whole_logs: Tensor | None,
) -> Floats:
    """Return squared norms of states, losses and KL divergence from the whole model, (time, row, 3).

    Args:
        read: The rows.
        states: Hidden states, or how they change, (time, row, token, d).
        logs: Log probabilities of predictions, (time, prediction, vocabulary); None = there are none.
        whole_logs: Those of the whole model, (1, prediction, vocabulary).
    """
    n_times, n_rows = states.shape[:2]
    numbers = np.zeros((n_times, n_rows, len(QUANTITIES)))
    # Norms over real tokens: (time, row).
    squares = states.square().sum(-1) * read.queries["decoder"]
    numbers[..., 0] = to_numpy(squares.sum(-1))
    if logs is not None and whole_logs is not None:
        # Losses and KL divergence of predictions, (time, prediction), are added up by row.
        losses = read.losses(logs, whole_logs)
        terms = whole_logs.exp() * (whole_logs - logs)
        kl = terms.sum(-1).clamp_(min=0)
        for column, values in enumerate((losses, kl), 1):
            sums = values.new_zeros(n_times, n_rows)
            sums.index_add_(-1, read.rows, values)
            numbers[..., column] = to_numpy(sums)
    return numbers


# How the loss hangs on each head


class Slopes(RowMeasurer):
    """Compute dL/dxi of each head, the derivative of the loss by a factor on the head's output."""

    def measure(self, batch: Sequence[Row]) -> Measured:
        """Return the derivatives of the loss of each row, (row, head)."""
        read = self._reader.read(batch)
        if not len(read.rows):
            return np.zeros((len(batch), *self._shape)), {}
        leaves = Leaves("z")
        logs = read.log_probabilities(self._model.outputs(read.batch, leaves).logits, 1)
        assert logs is not None  # there are predictions
        # The sum of the losses of all predictions: each depends on its own text's heads alone.
        loss = read.losses(logs, logs.detach()).sum()
        outputs = list(leaves.tensors.values())
        gradients = torch.autograd.grad(loss, outputs, materialize_grads=True)
        # By the chain rule, summed over all that the factor multiplies: (row, head, query, d) -> (row, head).
        slopes = []
        for output, gradient in zip(outputs, gradients, strict=True):
            dtype = sum_dtype(output.device)
            products = output.detach().to(dtype) * gradient.to(dtype)
            slopes.append(products.sum((2, 3)).cpu())
        return to_numpy(torch.cat(slopes, -1)), {}

    def add_up(self, part: TextPart, numbers: Floats, n_predictions: Floats) -> None:
        """Add the sizes of derivatives; texts without predictions have none."""
        has_predictions = n_predictions > 0
        if has_predictions.any():
            slopes = np.abs(numbers[has_predictions])
            part.sums.add(slopes / n_predictions[has_predictions, None], 1.0)


def measure_importance(passes: Passes, shapes: Shapes, report: Report | None = None) -> Run[TextPart]:
    """Measure how much the loss of a text changes with a factor on each head's output: E |dL/dxi| over texts, (head,).

    L is a text's loss, in nats per prediction. Each text has factors of its own. So one backward pass over a batch
    gives every text's own derivative, and absolute values are taken before texts are averaged. With one factor for the
    whole batch, texts that pull in opposite directions would cancel, and the result would depend on its size.

    What ends it before all texts are done is raised.

    Source:
        Michel et al. 2019, section 4.1 (equation 2).
    """
    n_heads = sum(n for n, _ in shapes.values())
    return _require_end(_measure(passes, Slopes, (n_heads,), report, "importance"))


def to_numpy(values: Tensor) -> Floats:
    """Return numbers in float64, on the CPU."""
    numbers: Floats = values.detach().cpu().double().numpy()
    return numbers
