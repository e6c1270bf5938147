"""Run a model without some of its heads, and add up over texts what changes.

Three measurers go over the texts by the loop of `studies.run`: `MeanOutputs` adds up the outputs of heads,
`AblationMeasurer` takes heads out, and `GradientMeasurer` differentiates the loss by factors on the heads' outputs. A
long text is measured in several rows (chunks), and counts once all of them are measured.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnscope.core.attention.precision import sum_dtype
from attnscope.core.attention.probes import LayerKey
from attnscope.core.attention.seam import AttentionCall, Kind, attend, finite_texts
from attnscope.core.interventions import ActivationRecorder, GradientLeaves, HeadPatcher, Patch
from attnscope.core.sums import RunningSums
from attnscope.corpus import CopyFilter, TextBlock, distinct
from attnscope.models.model import PASS_TOKENS, Model
from attnscope.questions.ablate import Mode
from attnscope.results.table import Floats
from attnscope.studies.ablate.reading import BatchReader, ReadBatch, TextRow
from attnscope.studies.failures import NanOrigin, find_broken_rows
from attnscope.studies.inputs.texts import ReportProgress, Texts
from attnscope.studies.run import STEP, BatchHalver, CorpusRun, Measurer, PartialSums, run
from attnscope.studies.workers import Workers

Head = tuple[Kind, int, int]
"""A head: kind of attention, layer, index in the layer."""

Shapes = Mapping[LayerKey, tuple[int, int]]
"""The number of heads of each attention, and the width of a head's output; a layer key is (kind, layer)."""

BLOCK = 32
"""How many texts are finished together; an interruption loses at most so many."""

DONORS = 8
"""For resample ablation: how many other texts' outputs replace a head's output, one text after the other."""

Measured = tuple[Floats, Mapping[int, NanOrigin]]
"""Numbers of each row, (row, …); and by the index of a row, the layer where its queries or keys are not finite."""

HeadOutputs = Mapping[LayerKey, Tensor]
"""Outputs of heads on one row, before the output projection, (head, token, d) by layer key."""

QUANTITIES = ("l2", "loss", "kl")
"""What is measured without heads, see `measure_cuts`."""


@dataclass(kw_only=True, eq=False)
class AblationSums(PartialSums):
    """Hold sums over texts; while a block of texts is measured, also the numbers of its rows.

    A text is whole when all its rows are measured, and no number of them is NaN or infinite.

    Attributes:
        sums: The sums of a measurer over whole texts.
        whole: The loss of the whole model, with all heads, and the number of predictions.
    """

    sums: RunningSums
    whole: RunningSums = field(default_factory=RunningSums)
    _rows: dict[int, list[tuple[TextRow, Floats]]] = field(default_factory=dict)

    def add_row(self, row: TextRow, numbers: Floats, broken_at: NanOrigin | None) -> None:
        """Add the numbers of a row, (…); drop its text if the row is broken at a layer, or a number is not finite."""
        if broken_at is not None:
            self.broken.setdefault(row.text_index, broken_at)
        elif not np.isfinite(numbers).all():
            # ("", None) stands for the last hidden states of the unchanged model.
            self.broken.setdefault(row.text_index, ("", None))
        rows = self._rows.setdefault(row.text_index, [])
        rows.append((row, numbers))
        # True at the last row of a text, if none is broken: the text is whole now.
        if self.count_row(row.text_index, row.n_rows):
            self.n_texts += 1
            self.n_tokens += sum(each.n_tokens for each, _ in rows)

    def whole_texts(self) -> tuple[Floats, Floats]:
        """Return for each whole text of the block the sum over its rows, (text, …), and its predictions, (text,)."""
        sums = []
        n_predictions = []
        for text in sorted(self._whole_texts):
            rows = self._rows[text]
            sums.append(sum(numbers for _, numbers in rows))
            n_predictions.append(sum(len(row.positions) for row, _ in rows))
        return np.array(sums), np.array(n_predictions, dtype=np.float64)


class RowMeasurer(Measurer[AblationSums]):
    """Measure numbers of each row of a batch, and add up those of whole texts.

    Args:
        model: The model.
        reader: Makes batches of its texts; a worker gets `BatchReader.arguments`, and makes a reader of its own.
        shape: The shape of the sums.
    """

    def __init__(
        self, model: Model, reader: BatchReader | Mapping[str, Any], shape: tuple[int, ...]
    ) -> None:
        super().__init__(model.tokenizer)
        self._model = model
        self._reader = reader if isinstance(reader, BatchReader) else BatchReader(model, **reader)
        self._shape = shape

    def start(self, block: TextBlock) -> AblationSums:
        """Return empty sums."""
        return AblationSums(sums=RunningSums(self._shape))

    def batches(self, block: TextBlock) -> Sequence[Sequence[TextRow]]:
        """Cut a block into batches of rows."""
        return self._reader.batches(block)

    def add(self, part: AblationSums, batch: Sequence[TextRow], result: Measured) -> None:
        """Add rows to their texts."""
        numbers, broken = result
        for index, row in enumerate(batch):
            part.add_row(row, numbers[index], broken.get(index))

    def finish(self, part: AblationSums) -> AblationSums:
        """Add the whole texts of the block to the sums, in the order of the corpus."""
        if part.n_texts:
            numbers, n_predictions = part.whole_texts()
            self.add_up(part, numbers, n_predictions)
        return part

    @abstractmethod
    def add_up(self, part: AblationSums, numbers: Floats, n_predictions: Floats) -> None:
        """Add whole texts to the sums: their numbers, (text, …), and how many predictions each has, (text,)."""


@dataclass(frozen=True, eq=False)
class PassSettings:
    """Hold what all passes over the texts share.

    Attributes:
        reader: Holds the model, and makes batches of the texts for it.
        texts: The texts.
        workers: How worker processes load the model; None = this process runs it.
    """

    reader: BatchReader
    texts: Texts
    workers: Workers | None = None


def _measure(
    passes: PassSettings,
    measurer: Callable[..., RowMeasurer],
    shape: tuple[int, ...],
    report: ReportProgress | None,
    step: str = STEP,
) -> CorpusRun[AblationSums]:
    """Go over the texts once, with a measurer that gets the arguments of `RowMeasurer`."""
    # In this process all passes share the reader, which keeps greedy answers.
    reader: Any = passes.reader
    workers = None
    if passes.workers is not None:
        reader = passes.reader.arguments
        # One for each model.
        workers = (passes.workers,)
    return run(
        partial(measurer, reader=reader, shape=shape),
        (passes.reader.model,),
        passes.texts,
        AblationSums(sums=RunningSums(shape)),
        block_size=BLOCK,
        workers=workers,
        report=report,
        step=step,
    )


def _require_end(going: CorpusRun[AblationSums]) -> CorpusRun[AblationSums]:
    """Return a run if it came to the end of the texts; else raise the error or the Ctrl-C that ended it."""
    if going.error is not None:
        raise going.error
    if not going.complete:
        raise KeyboardInterrupt
    return going


# Outputs of heads


class MeanOutputs(RowMeasurer):
    """Add up the outputs of heads over all queries that are no padding."""

    def measure(self, batch: Sequence[TextRow]) -> Measured:
        """Return (row, 2, layer key · head · d): the sum of the outputs over queries, and the number of queries."""
        read = self._reader.read(batch)
        # Of each attention, (row, 2, head · d), in the order in which the model computes them.
        by_layer_key: list[Tensor] = []

        def observe(call: AttentionCall) -> Tensor:
            output = attend(call)
            real = read.queries[call.kind].to(output.device)
            outputs = output.masked_fill(~real[:, None, :, None], 0.0)
            # (row, head, query, d) -> (row, head · d)
            dtype = sum_dtype(outputs.device)
            sums = outputs.sum(2, dtype=dtype).flatten(1)
            # Fused kernels may return finite outputs for queries or keys that are NaN.
            sums[~finite_texts(call)] = torch.nan
            n_queries = real.sum(1, keepdim=True).to(sums)
            sums_and_counts = torch.stack([sums, n_queries.expand_as(sums)], 1)
            by_layer_key.append(sums_and_counts.cpu())
            return output

        with torch.no_grad():
            self._model.outputs(read.batch, observe, logits=False)
        return to_numpy(torch.cat(by_layer_key, -1)), {}

    def add_up(self, part: AblationSums, numbers: Floats, n_predictions: Floats) -> None:
        """Add sums and counts."""
        part.sums.add(numbers[:, 0], numbers[:, 1])


def measure_means(
    passes: PassSettings, shapes: Shapes, report: ReportProgress | None
) -> tuple[CorpusRun[AblationSums], HeadOutputs]:
    """Return the pass over all texts, and the mean outputs of the heads of each layer key, (head, d), float64.

    An error or Ctrl-C is raised: means over only some of the texts are of no use.
    """
    sizes = [n_heads * width for n_heads, width in shapes.values()]
    shape = (sum(sizes),)
    going = _require_end(_measure(passes, MeanOutputs, shape, report))
    # (layer key · head · d), 0 where there was no query -> (head, d) by layer key
    means = torch.from_numpy(np.nan_to_num(going.done.sums.ratio()))
    pieces = means.split(sizes)  # type: ignore[no-untyped-call]
    by_layer_key = {}
    for (layer_key, layer_shape), piece in zip(shapes.items(), pieces, strict=True):
        by_layer_key[layer_key] = piece.view(layer_shape)
    return going, by_layer_key


def outputs_of(passes: PassSettings) -> Iterator[tuple[int, HeadOutputs]]:
    """Yield the index of each text, and the outputs of heads on its first row, (head, token, d) by layer key."""
    reader = passes.reader

    def read_outputs(rows: Sequence[TextRow]) -> HeadOutputs:
        activations = ActivationRecorder()
        with torch.no_grad():
            reader.model.outputs(reader.read(rows).batch, activations, logits=False)
        return activations.outputs

    for text in distinct(passes.texts, CopyFilter()):
        # A text without tokens has no rows; of a long one the first row stands for it.
        batches = reader.batches(TextBlock(0, (text,)))
        if batches:
            # `BatchHalver` refuses, with a hint, a row that does not fit into memory.
            for _, outputs in BatchHalver().run(batches[0][:1], read_outputs):
                yield text.index, {layer_key: output[0] for layer_key, output in outputs.items()}


def shapes_of(outputs: Iterable[tuple[int, HeadOutputs]]) -> Shapes:
    """Return the shapes of heads' outputs, read off the first text that `outputs_of` yields."""
    _, first_outputs = next(iter(outputs))
    shapes = {}
    for layer_key, output in first_outputs.items():
        n_heads, _, width = output.shape  # (head, token, d)
        shapes[layer_key] = (n_heads, width)
    return shapes


# What changes without heads


class AblatedHeads(NamedTuple):
    """Heads that are taken out together.

    Attributes:
        heads: The heads.
        mode: What replaces their outputs: zeros ("zero"), their mean ("mean"), or their outputs on another text, the
            donor ("resample").
        donor: The index of the donor, from 0; -1 = the mode needs none.
    """

    heads: tuple[Head, ...]
    mode: Mode = "zero"
    donor: int = -1


class Replacements(NamedTuple):
    """The values that may replace heads' outputs.

    Attributes:
        means: The mean outputs of heads over all queries of all texts, (head, d) by layer key.
        donors: Of several texts, the index in the corpus and the outputs of heads, (head, token, d) by layer key.
    """

    means: Mapping[LayerKey, Tensor] = {}
    donors: Sequence[tuple[int, HeadOutputs]] = ()

    def values(self, cut: AblatedHeads, layer_key: LayerKey, head: int, read: ReadBatch) -> Tensor:
        """Return what replaces a head's output; it broadcasts to (row, 1, query, d)."""
        if cut.mode == "zero":
            return torch.zeros(())
        if cut.mode == "mean":
            return self.means[layer_key][head]
        n_queries = read.queries[layer_key[0]].shape[1]
        rows = []
        for text in read.texts:
            # A text is not its own donor.
            others = [outputs for index, outputs in self.donors if index != text]
            donor = others[cut.donor % len(others)]
            # Repeat the tokens of a shorter donor: (token, d) -> (query, d).
            output = donor[layer_key][head]
            rows.append(output[torch.arange(n_queries) % len(output)])
        return torch.stack(rows)[:, None]


class AblationMeasurer(RowMeasurer):
    """Measure the model without each cut, see `measure_cuts`.

    Several cuts go through one forward pass: the batch is repeated once per cut, and each repeat lacks other heads.
    """

    def __init__(
        self, model: Model, cuts: Sequence[AblatedHeads], stand_ins: Replacements, **common: Any
    ) -> None:
        # `common` are `reader` and `shape`.
        super().__init__(model, **common)
        self._cuts = cuts
        self._stand_ins = stand_ins

    def measure(self, batch: Sequence[TextRow]) -> Measured:
        """Run the whole model, and the model without each cut.

        Returns:
            (row, 1 + cut, 3), first of the whole model: the squared norm of the hidden states, the loss, and 0. Then of
            each cut: the squared norm of their change, the loss, and the KL divergence. And the broken rows.
        """
        numbers = np.zeros((1 + len(self._cuts), len(batch), len(QUANTITIES)))
        with torch.no_grad():
            # Run the whole model once.
            read = self._reader.read(batch)
            has_predictions = len(read.rows) > 0
            rerun = self._model.rerun(read.batch, logits=has_predictions)
            hidden = rerun.whole.hidden
            dtype = torch.promote_types(hidden.dtype, torch.float32)
            whole = hidden.to(dtype)  # (row, token, d_model)
            whole_logs = read.log_probabilities(rerun.whole.logits, 1)
            numbers[0] = _numbers_by_row(read, whole[None], whole_logs, whole_logs)[0]
            # Run it again from the first changed layer on, with as many cuts per pass as fit: PASS_TOKENS, or fewer
            # (`halver.max_batch_tokens`) once memory ran out.
            pass_tokens = (
                PASS_TOKENS if self.halver.max_batch_tokens is None else self.halver.max_batch_tokens
            )
            layer_keys = [[(kind, layer) for kind, layer, _ in cut.heads] for cut in self._cuts]
            for first_block, cut_indices in rerun.plan(layer_keys, pass_tokens):
                n_cuts = len(cut_indices)
                outputs = rerun.again(self._patches(cut_indices, read), first_block, n_cuts)
                hidden_without = outputs.hidden.to(dtype).view(n_cuts, *whole.shape)
                logs = read.log_probabilities(outputs.logits, n_cuts)
                rows = 1 + np.array(cut_indices)
                numbers[rows] = _numbers_by_row(read, hidden_without - whole, logs, whole_logs)
        # A row is broken where its queries or keys are not all finite, which `rerun` knows by kind and layer, (row,).
        # `find_broken_rows` looks for numbers that are not finite, so write NaN there.
        broken: dict[str, dict[int, Tensor]] = {}
        for kind, by_layer in rerun.are_finite.items():
            broken[kind] = {layer: torch.where(fine, 0, torch.nan) for layer, fine in by_layer.items()}
        return numbers.swapaxes(0, 1), find_broken_rows(broken)

    def _patches(self, cut_indices: Sequence[int], read: ReadBatch) -> HeadPatcher:
        """Return the patches for a batch that is repeated once per cut: each repeat lacks the heads of its cut."""
        n_rows = len(read.texts)
        patches: dict[LayerKey, list[Patch]] = {}
        for repeat, cut_index in enumerate(cut_indices):
            cut = self._cuts[cut_index]
            rows = slice(repeat * n_rows, (repeat + 1) * n_rows)
            for kind, layer, head in cut.heads:
                values = self._stand_ins.values(cut, (kind, layer), head, read)
                patch = Patch("z", (head,), values, rows)
                patches.setdefault((kind, layer), []).append(patch)
        return HeadPatcher(patches)

    def add_up(self, part: AblationSums, numbers: Floats, n_predictions: Floats) -> None:
        """Add the changes by cuts, and the loss of the whole model."""
        whole = numbers[:, :1]  # (text, 1, 3)
        cuts = numbers[:, 1:]  # (text, cut, 3)
        l2 = np.sqrt(cuts[..., 0] / whole[..., 0])
        rise = cuts[..., 1] - whole[..., 1]
        values = np.stack([l2, rise, cuts[..., 2]], -1)
        # l2 is averaged over texts, loss and KL over predictions: (text, 1, 3).
        counts = np.ones((len(numbers), 1, len(QUANTITIES)))
        counts[..., 1:] = n_predictions[:, None, None]
        part.sums.add(values, counts)
        part.whole.add(whole[:, 0, 1], n_predictions)


def measure_cuts(
    passes: PassSettings,
    cuts: Sequence[AblatedHeads],
    stand_ins: Replacements,
    report: ReportProgress | None = None,
) -> CorpusRun[AblationSums]:
    """Take cuts out of every text, each cut on its own, and add up what changes: (cut, 3).

    For a text, h are the last hidden states of the whole model at its tokens, and h' those without the heads. Then l2
    is |h' - h| / |h| (Frobenius norms). loss is the rise of the negative log-likelihood of the right answers, summed
    over the predictions. kl is the sum of KL(whole || without) over them. Both are in nats.
    """
    shape = (len(cuts), len(QUANTITIES))
    measurer = partial(AblationMeasurer, cuts=tuple(cuts), stand_ins=stand_ins)
    return _measure(passes, measurer, shape, report, "taking heads out of a later text")


def _numbers_by_row(
    read: ReadBatch,
    states: Tensor,
    logs: Tensor | None,
    whole_logs: Tensor | None,
) -> Floats:
    """Return squared norms of states, losses, and KL divergence from the whole model, (repeat, row, 3).

    Args:
        read: The rows.
        states: Hidden states, or their change, (repeat, row, token, d_model).
        logs: Log probabilities of predictions, (repeat, prediction, vocabulary); None = there are none.
        whole_logs: Those of the whole model, (1, prediction, vocabulary).
    """
    n_repeats, n_rows = states.shape[:2]
    numbers = np.zeros((n_repeats, n_rows, len(QUANTITIES)))
    # (repeat, row, token), 0 at padding
    squares = states.square().sum(-1) * read.queries["decoder"]
    numbers[..., 0] = to_numpy(squares.sum(-1))
    if logs is not None and whole_logs is not None:
        # Loss and KL divergence of each prediction, (repeat, prediction), added up by row.
        losses = read.losses(logs, whole_logs)
        terms = whole_logs.exp() * (whole_logs - logs)
        kl = terms.sum(-1).clamp_(min=0)
        for column, values in enumerate((losses, kl), 1):
            sums = values.new_zeros(n_repeats, n_rows)
            sums.index_add_(-1, read.rows, values)
            numbers[..., column] = to_numpy(sums)
    return numbers


# Importance of heads


class GradientMeasurer(RowMeasurer):
    """Compute dL/dξ of each head, the derivative of the loss by a factor ξ = 1 on the head's output."""

    def measure(self, batch: Sequence[TextRow]) -> Measured:
        """Return the derivatives of the loss of each row, (row, head); 0 without predictions."""
        read = self._reader.read(batch)
        leaves = GradientLeaves("z")
        logs = read.log_probabilities(self._model.outputs(read.batch, leaves).logits, 1)
        assert logs is not None  # the model has a head, see `study`
        # One sum for all rows: the loss of a row does not depend on the outputs of heads in other rows.
        loss = read.losses(logs, logs.detach()).sum()
        outputs = list(leaves.tensors.values())
        gradients = torch.autograd.grad(loss, outputs, materialize_grads=True)
        # dL/dξ = Σ output · dL/d output, over all that ξ multiplies: (row, head, query, d) -> (row, head).
        slopes = []
        for output, gradient in zip(outputs, gradients, strict=True):
            dtype = sum_dtype(output.device)
            products = output.detach().to(dtype) * gradient.to(dtype)
            slopes.append(products.sum((2, 3)).cpu())
        return to_numpy(torch.cat(slopes, -1)), {}

    def add_up(self, part: AblationSums, numbers: Floats, n_predictions: Floats) -> None:
        """Add the absolute derivatives per prediction; texts without predictions count nothing."""
        # (text, head) / (text, 1)
        slopes = np.abs(numbers) / np.maximum(n_predictions, 1)[:, None]
        part.sums.add(slopes, (n_predictions > 0)[:, None])


def measure_importance(
    passes: PassSettings, shapes: Shapes, report: ReportProgress | None = None
) -> CorpusRun[AblationSums]:
    """Measure how much the loss of a text changes with a factor ξ on each head's output: E |dL/dξ| over texts, (head,).

    L is a text's loss, in nats per prediction. Each text has factors of its own. So one backward pass over a batch
    gives every text's own derivative, and absolute values are taken before texts are averaged. With one factor for the
    whole batch, derivatives of opposite signs would cancel, and the result would depend on its size.

    An error or Ctrl-C is raised.

    Source:
        Michel et al. 2019, section 4.1 (equation 2).
    """
    n_heads = sum(n for n, _ in shapes.values())
    return _require_end(_measure(passes, GradientMeasurer, (n_heads,), report, "importance"))


def to_numpy(values: Tensor) -> Floats:
    """Return numbers in float64, on the CPU."""
    return values.cpu().double().numpy()
