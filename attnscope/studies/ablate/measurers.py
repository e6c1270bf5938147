"""Ablate heads of a model, and sum over texts how its outputs change.

To ablate a head is to replace its output, before the output projection, by other values. The clean run is the forward
pass without ablation. Three measurers go over the texts in the loop of `studies.run`, a block of texts at a time:

- `MeanOutputs` sums the outputs of heads, for mean ablation.
- `AblationMeasurer` compares ablated runs with the clean run.
- `GradientMeasurer` differentiates the loss by a factor on each head's output.

A row is one row of a batch: a text, or a chunk of a long text. A text is complete once all its rows are measured.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attnscope.arrays import Floats
from attnscope.core.attention.precision import sum_dtype
from attnscope.core.attention.probes import LayerKey
from attnscope.core.attention.seam import AttentionCall, Kind, attend, find_finite_texts
from attnscope.core.interventions import ActivationRecorder, GradientLeaves, HeadPatcher, Patch
from attnscope.core.sums import RunningSums
from attnscope.corpus import CopyFilter, TextBlock, distinct
from attnscope.models.model import MAX_PASS_TOKENS, Model
from attnscope.questions.ablate import Mode
from attnscope.studies.ablate.reading import BatchReader, ReadBatch, TextRow
from attnscope.studies.failures import NanOrigin, find_broken_rows
from attnscope.studies.halving import BatchHalver
from attnscope.studies.inputs.texts import ReportProgress, Texts
from attnscope.studies.run import STEP, CorpusRun, Measurer, PartialSums, run
from attnscope.studies.workers import Workers

Head = tuple[Kind, int, int]
"""A head: (kind of attention, layer, index of the head in the layer), such as ("decoder", 3, 1)."""

HeadShapes = Mapping[LayerKey, tuple[int, int]]
"""By layer key, which is (kind of attention, layer): the number of heads, and the width of a head's output."""

BLOCK = 32
"""The number of texts in a block. Sums grow block by block, so an interruption loses one block at most."""

N_DONORS = 8
"""Resample ablation repeats every measurement this many times, each time with outputs of another text, the donor."""

RowNumbers = tuple[Floats, Mapping[int, NanOrigin]]
"""The numbers of each row, (row, …); and by the index of a broken row, the layer with NaN in its queries or keys."""

HeadOutputs = Mapping[LayerKey, Tensor]
"""By layer key, the outputs of heads on one row, before the output projection: (head, token, d_head)."""

QUANTITIES = ("l2", "loss", "kl")
"""The numbers that compare an ablated run with the clean run, see `measure_interventions`."""


@dataclass(kw_only=True, eq=False)
class AblationSums(PartialSums):
    """Hold sums over texts and, while a block of texts is measured, the numbers of its rows.

    A text is complete when all its rows are measured, and broken if a number of them is NaN or infinite. Broken texts
    are left out of the sums.

    Attributes:
        sums: The measurer's sums over complete texts.
        clean_loss: The sum of the clean run's losses, and the number of predictions.
        _rows_by_text: The index of a text -> its rows with their numbers.
    """

    sums: RunningSums
    clean_loss: RunningSums = field(default_factory=RunningSums)
    _rows_by_text: dict[int, list[tuple[TextRow, Floats]]] = field(default_factory=dict)

    def add_row(self, row: TextRow, numbers: Floats, broken_at: NanOrigin | None) -> None:
        """Add the numbers of a row. Mark its text as broken if `broken_at` names a layer, or a number is not finite."""
        if broken_at is not None:
            self.broken.setdefault(row.text_index, broken_at)
        elif not np.isfinite(numbers).all():
            # No layer is known to be broken. ("", None) means that the last hidden states of the clean run are.
            self.broken.setdefault(row.text_index, ("", None))
        rows = self._rows_by_text.setdefault(row.text_index, [])
        rows.append((row, numbers))
        # `count_row` returns True at the last row of a text, unless the text is broken.
        if self.count_row(row.text_index, row.n_rows):
            self.n_texts += 1
            self.n_tokens += sum(measured_row.n_tokens for measured_row, _ in rows)

    def sum_complete_texts(self) -> tuple[Floats, Floats]:
        """Return the sum over rows of each complete text of the block, (text, …), and its predictions, (text,)."""
        sums = []
        n_predictions = []
        for text in sorted(self._whole_texts):
            rows = self._rows_by_text[text]
            sums.append(sum(numbers for _, numbers in rows))
            n_predictions.append(sum(len(row.positions) for row, _ in rows))
        return np.array(sums), np.array(n_predictions, dtype=np.float64)


class RowMeasurer(Measurer[AblationSums]):
    """Compute numbers for each row of a batch (`measure`, by subclasses), and sum the numbers of complete texts.

    Args:
        model: The model.
        reader: Makes batches of texts. A worker process gets `BatchReader.arguments`, and makes its own reader.
        shape: The shape of the sums over texts, without the text axis.
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
        """Split a block into batches of rows."""
        return self._reader.batches(block)

    def add(self, part: AblationSums, batch: Sequence[TextRow], result: RowNumbers) -> None:
        """Add the numbers of the rows of a batch to their texts."""
        numbers, broken = result
        for index, row in enumerate(batch):
            part.add_row(row, numbers[index], broken.get(index))

    def finish(self, part: AblationSums) -> AblationSums:
        """Add the complete texts of the block to the sums, in the order of the corpus."""
        if part.n_texts:
            numbers, n_predictions = part.sum_complete_texts()
            self.add_up(part, numbers, n_predictions)
        return part

    @abstractmethod
    def add_up(self, part: AblationSums, numbers: Floats, n_predictions: Floats) -> None:
        """Add complete texts to the sums: their numbers, (text, …), and the number of predictions of each, (text,)."""


@dataclass(frozen=True, eq=False)
class PassSettings:
    """Hold the settings that all passes over the texts share: for means, for ablated runs, for gradients.

    Attributes:
        reader: Holds the model, and makes batches of texts for it.
        texts: The texts.
        workers: How worker processes load the model; None = this process runs the model.
    """

    reader: BatchReader
    texts: Texts
    workers: Workers | None = None


def _run_pass(
    pass_settings: PassSettings,
    measurer: Callable[..., RowMeasurer],
    shape: tuple[int, ...],
    report: ReportProgress | None,
    step: str = STEP,
) -> CorpusRun[AblationSums]:
    """Go over the texts once. `measurer` is a subclass of `RowMeasurer`, or a partial of one."""
    # In this process all passes share one reader, which caches the greedy answers of an encoder-decoder.
    reader: Any = pass_settings.reader
    workers = None
    if pass_settings.workers is not None:
        reader = pass_settings.reader.arguments
        # `run` takes a tuple with the workers of each model; here is one model.
        workers = (pass_settings.workers,)
    return run(
        partial(measurer, reader=reader, shape=shape),
        (pass_settings.reader.model,),
        pass_settings.texts,
        AblationSums(sums=RunningSums(shape)),
        block_size=BLOCK,
        workers=workers,
        report=report,
        step=step,
    )


def _require_complete(corpus_run: CorpusRun[AblationSums]) -> CorpusRun[AblationSums]:
    """Return a run that reached the end of the texts; else raise the error or the KeyboardInterrupt that ended it."""
    if corpus_run.error is not None:
        raise corpus_run.error
    if not corpus_run.complete:
        raise KeyboardInterrupt
    return corpus_run


# Mean outputs of heads


class MeanOutputs(RowMeasurer):
    """Sum the outputs of heads over all queries except padding."""

    def measure(self, batch: Sequence[TextRow]) -> RowNumbers:
        """Return (row, 2, layer key · head · d_head): the sum of outputs over queries, and the number of queries."""
        read = self._reader.read(batch)
        # For each attention layer, (row, 2, head · d_head), in the order in which the model computes them.
        by_layer_key: list[Tensor] = []

        def observe(call: AttentionCall) -> Tensor:
            """Compute the attention of a layer unchanged, and record sums of its outputs."""
            output = attend(call)
            query_mask = read.query_masks[call.kind].to(output.device)  # (row, query)
            outputs = output.masked_fill(~query_mask[:, None, :, None], 0.0)
            # (row, head, query, d_head) -> (row, head · d_head)
            dtype = sum_dtype(outputs.device)
            sums = outputs.sum(2, dtype=dtype).flatten(1)
            # Fused kernels may return finite outputs for queries or keys that are NaN, so mark these rows.
            sums[~find_finite_texts(call)] = torch.nan
            n_queries = query_mask.sum(1, keepdim=True).to(sums)
            sums_and_counts = torch.stack([sums, n_queries.expand_as(sums)], 1)
            by_layer_key.append(sums_and_counts.cpu())
            return output

        with torch.no_grad():
            self._model.outputs(read.batch, observe, logits=False)
        return to_numpy(torch.cat(by_layer_key, -1)), {}

    def add_up(self, part: AblationSums, numbers: Floats, n_predictions: Floats) -> None:
        """Add the sums of outputs and the numbers of queries, each (text, layer key · head · d_head)."""
        part.sums.add(numbers[:, 0], numbers[:, 1])


def measure_means(
    pass_settings: PassSettings, shapes: HeadShapes, report: ReportProgress | None
) -> tuple[CorpusRun[AblationSums], HeadOutputs]:
    """Return the pass over all texts, and by layer key the mean outputs of heads, (head, d_head), float64.

    Raises:
        KeyboardInterrupt: The user interrupted the pass. Means over only some of the texts are of no use.
    """
    sizes = [n_heads * width for n_heads, width in shapes.values()]
    shape = (sum(sizes),)
    corpus_run = _require_complete(_run_pass(pass_settings, MeanOutputs, shape, report))
    # (layer key · head · d_head) -> by layer key, (head, d_head). A mean over no queries is NaN, and becomes 0.
    means = torch.from_numpy(np.nan_to_num(corpus_run.done.sums.ratio()))
    pieces = means.split(sizes)  # type: ignore[no-untyped-call]
    by_layer_key = {}
    for (layer_key, layer_shape), piece in zip(shapes.items(), pieces, strict=True):
        by_layer_key[layer_key] = piece.view(layer_shape)
    return corpus_run, by_layer_key


def iterate_head_outputs(pass_settings: PassSettings) -> Iterator[tuple[int, HeadOutputs]]:
    """Yield the index of each text, and by layer key the outputs of heads on its first row, (head, token, d_head)."""
    reader = pass_settings.reader

    def read_outputs(rows: Sequence[TextRow]) -> HeadOutputs:
        activations = ActivationRecorder()
        with torch.no_grad():
            reader.model.outputs(reader.read(rows).batch, activations, logits=False)
        return activations.outputs

    for text in distinct(pass_settings.texts, CopyFilter()):
        # A text without tokens has no batches. From a long text, only the first row is used.
        batches = reader.batches(TextBlock(0, (text,)))
        if batches:
            # `BatchHalver` turns an out-of-memory error on this one row into an AttnscopeError with a hint.
            for _, outputs in BatchHalver().run(batches[0][:1], read_outputs):
                yield text.index, {layer_key: output[0] for layer_key, output in outputs.items()}


def find_head_shapes(outputs: Iterable[tuple[int, HeadOutputs]]) -> HeadShapes:
    """Return the shapes of heads' outputs, taken from the first item of `iterate_head_outputs`."""
    _, first_outputs = next(iter(outputs))
    shapes = {}
    for layer_key, output in first_outputs.items():
        n_heads, _, width = output.shape  # (head, token, d_head)
        shapes[layer_key] = (n_heads, width)
    return shapes


# Ablated runs


class Intervention(NamedTuple):
    """One ablation to measure: some heads that are ablated together, and the values that replace their outputs.

    Attributes:
        heads: The heads.
        mode: "zero" replaces their outputs by zeros, "mean" by their means over all texts, and "resample" by their
            outputs on another text, the donor.
        donor: The index of the donor among `Replacements.donors`, from 0; -1 = the mode needs no donor.
    """

    heads: tuple[Head, ...]
    mode: Mode = "zero"
    donor: int = -1


class Replacements(NamedTuple):
    """The values that replace the outputs of ablated heads.

    Attributes:
        means: By layer key, the mean outputs of heads over all queries of all texts, (head, d_head).
        donors: For each donor, the index of its text in the corpus, and its outputs of heads, (head, token, d_head).
    """

    means: Mapping[LayerKey, Tensor] = {}
    donors: Sequence[tuple[int, HeadOutputs]] = ()

    def find_values(
        self, intervention: Intervention, layer_key: LayerKey, head: int, read: ReadBatch
    ) -> Tensor:
        """Return the replacement for a head's output: (), (d_head,) or (row, 1, query, d_head), which broadcast."""
        if intervention.mode == "zero":
            return torch.zeros(())
        if intervention.mode == "mean":
            return self.means[layer_key][head]
        kind, _ = layer_key
        n_queries = read.query_masks[kind].shape[1]
        rows = []
        for text_index in read.text_indices:
            # A text must not be its own donor. There is one donor more than N_DONORS, so N_DONORS others remain; with
            # fewer texts the index wraps around.
            others = [outputs for index, outputs in self.donors if index != text_index]
            donor = others[intervention.donor % len(others)]
            # If the donor has fewer tokens, start again at its first: (token, d_head) -> (query, d_head).
            output = donor[layer_key][head]
            rows.append(output[torch.arange(n_queries) % len(output)])
        return torch.stack(rows)[:, None]


class AblationMeasurer(RowMeasurer):
    """Compare each ablated run with the clean run, see `measure_interventions`.

    Several interventions share one forward pass: the batch is repeated once per intervention, and each repeat has other
    heads ablated.
    """

    def __init__(
        self,
        model: Model,
        interventions: Sequence[Intervention],
        replacements: Replacements,
        **common: Any,
    ) -> None:
        # `common` holds `reader` and `shape`.
        super().__init__(model, **common)
        self._interventions = interventions
        self._replacements = replacements

    def measure(self, batch: Sequence[TextRow]) -> RowNumbers:
        """Run the model clean, and with each intervention.

        Returns:
            The numbers, (row, 1 + intervention, 3), and the broken rows. The numbers of the clean run come first: the
            squared norm of the hidden states, the loss, and 0. The numbers of an intervention are the squared norm of
            the change in hidden states, the loss, and the KL divergence.
        """
        numbers = np.zeros((1 + len(self._interventions), len(batch), len(QUANTITIES)))
        with torch.no_grad():
            # The clean run records what later runs start from.
            read = self._reader.read(batch)
            has_predictions = len(read.prediction_rows) > 0
            rerun = self._model.rerun(read.batch, logits=has_predictions)
            hidden = rerun.clean_outputs.hidden
            dtype = torch.promote_types(hidden.dtype, torch.float32)
            clean_hidden = hidden.to(dtype)  # (row, token, d_model)
            clean_log_probs = read.log_probabilities(rerun.clean_outputs.logits, 1)
            numbers[0] = _measure_rows(read, clean_hidden[None], clean_log_probs, clean_log_probs)[0]
            # Run the model again from the first ablated layer on. A forward pass has as many interventions as fit
            # into MAX_PASS_TOKENS tokens, or into fewer (`halver.max_batch_tokens`) once memory ran out.
            pass_tokens = self.halver.max_batch_tokens or MAX_PASS_TOKENS
            layer_keys = [
                [(kind, layer) for kind, layer, _ in intervention.heads]
                for intervention in self._interventions
            ]
            for first_block, intervention_indices in rerun.plan_passes(layer_keys, pass_tokens):
                n_interventions = len(intervention_indices)
                outputs = rerun.run_from(
                    self._make_patches(intervention_indices, read), first_block, n_interventions
                )
                # (intervention · row, token, d_model) -> (intervention, row, token, d_model)
                ablated_hidden = outputs.hidden.to(dtype).view(n_interventions, *clean_hidden.shape)
                log_probs = read.log_probabilities(outputs.logits, n_interventions)
                change = ablated_hidden - clean_hidden
                # Entry 0 is the clean run.
                entries = 1 + np.array(intervention_indices)
                numbers[entries] = _measure_rows(read, change, log_probs, clean_log_probs)
        # A row is broken if its queries or keys are not all finite: False in `rerun.are_finite`, a (row,) array by
        # kind and layer. `find_broken_rows` searches numbers for NaN, so write NaN for False.
        nan_if_broken: dict[str, dict[int, Tensor]] = {}
        for kind, by_layer in rerun.are_finite.items():
            nan_if_broken[kind] = {
                layer: torch.where(is_finite, 0, torch.nan) for layer, is_finite in by_layer.items()
            }
        # (1 + intervention, row, 3) -> (row, 1 + intervention, 3)
        return numbers.swapaxes(0, 1), find_broken_rows(nan_if_broken)

    def _make_patches(self, intervention_indices: Sequence[int], read: ReadBatch) -> HeadPatcher:
        """Return the patches for a batch that is repeated once per intervention; each repeat gets its intervention."""
        n_rows = len(read.text_indices)
        patches: dict[LayerKey, list[Patch]] = {}
        for repeat, intervention_index in enumerate(intervention_indices):
            intervention = self._interventions[intervention_index]
            rows = slice(repeat * n_rows, (repeat + 1) * n_rows)
            for kind, layer, head in intervention.heads:
                values = self._replacements.find_values(intervention, (kind, layer), head, read)
                # "z" is the output of a head.
                patch = Patch("z", (head,), values, rows)
                patches.setdefault((kind, layer), []).append(patch)
        return HeadPatcher(patches)

    def add_up(self, part: AblationSums, numbers: Floats, n_predictions: Floats) -> None:
        """Add the changes by each intervention, and the loss of the clean run."""
        clean = numbers[:, :1]  # (text, 1, 3)
        ablated = numbers[:, 1:]  # (text, intervention, 3)
        l2 = np.sqrt(ablated[..., 0] / clean[..., 0])
        loss_increase = ablated[..., 1] - clean[..., 1]
        values = np.stack([l2, loss_increase, ablated[..., 2]], -1)
        # The weights of the means, (text, 1, 3): l2 is averaged over texts, loss and KL over predictions.
        counts = np.ones((len(numbers), 1, len(QUANTITIES)))
        counts[..., 1:] = n_predictions[:, None, None]
        part.sums.add(values, counts)
        part.clean_loss.add(clean[:, 0, 1], n_predictions)


def measure_interventions(
    pass_settings: PassSettings,
    interventions: Sequence[Intervention],
    replacements: Replacements,
    report: ReportProgress | None = None,
) -> CorpusRun[AblationSums]:
    """Run every text with each intervention, and sum the changes from the clean run: (intervention, 3).

    The last axis is `QUANTITIES`. For one text:

    - l2 is |h' - h| / |h| with Frobenius norms. h are the last hidden states of the clean run at the text's tokens, and
      h' those of the ablated run.
    - loss is the increase of the negative log-likelihood of the right answers, summed over predictions, in nats.
    - kl is KL(clean || ablated), summed over predictions, in nats.
    """
    shape = (len(interventions), len(QUANTITIES))
    measurer = partial(AblationMeasurer, interventions=tuple(interventions), replacements=replacements)
    return _run_pass(pass_settings, measurer, shape, report, "taking heads out of a later text")


def _measure_rows(
    read: ReadBatch,
    states: Tensor,
    log_probs: Tensor | None,
    clean_log_probs: Tensor | None,
) -> Floats:
    """Return squared norms of states, losses, and KL divergences from the clean run, (repeat, row, 3).

    Args:
        read: The rows.
        states: Hidden states, or their change, (repeat, row, token, d_model).
        log_probs: Log probabilities of predictions, (repeat, prediction, vocabulary); None = no predictions, so loss
            and KL are 0.
        clean_log_probs: The log probabilities of the clean run, (1, prediction, vocabulary).
    """
    n_repeats, n_rows = states.shape[:2]
    numbers = np.zeros((n_repeats, n_rows, len(QUANTITIES)))
    # (repeat, row, token), 0 at padding. The mask "decoder" is that of the last hidden states of any model.
    squares = states.square().sum(-1) * read.query_masks["decoder"]
    numbers[..., 0] = to_numpy(squares.sum(-1))
    if log_probs is not None and clean_log_probs is not None:
        # The loss and KL divergence of each prediction, (repeat, prediction), are summed by row. Rounding can make a KL
        # divergence slightly negative.
        losses = read.losses(log_probs, clean_log_probs)
        terms = clean_log_probs.exp() * (clean_log_probs - log_probs)
        kl = terms.sum(-1).clamp_(min=0)
        for column, values in enumerate((losses, kl), 1):
            sums = values.new_zeros(n_repeats, n_rows)
            sums.index_add_(-1, read.prediction_rows, values)
            numbers[..., column] = to_numpy(sums)
    return numbers


# Importance of heads


class GradientMeasurer(RowMeasurer):
    """Compute dL/dξ for each head: the derivative of the loss by a factor ξ on the head's output, at ξ = 1."""

    def measure(self, batch: Sequence[TextRow]) -> RowNumbers:
        """Return the derivatives of the loss of each row, (row, head); 0 if a row has no predictions."""
        read = self._reader.read(batch)
        # `leaves` records the output of each attention layer ("z") as a tensor to differentiate by.
        leaves = GradientLeaves("z")
        log_probs = read.log_probabilities(self._model.outputs(read.batch, leaves).logits, 1)
        assert log_probs is not None  # `study` refuses --importance for a model without a loss
        # One backward pass over the summed loss gives the gradients of every row, because the loss of a row does not
        # depend on the outputs of heads in other rows.
        loss = read.losses(log_probs, log_probs.detach()).sum()
        outputs = list(leaves.by_layer.values())
        gradients = torch.autograd.grad(loss, outputs, materialize_grads=True)
        # dL/dξ = Σ output · dL/d output, summed over the queries and dimensions that ξ multiplies:
        # (row, head, query, d_head) -> (row, head).
        slopes = []
        for output, gradient in zip(outputs, gradients, strict=True):
            dtype = sum_dtype(output.device)
            products = output.detach().to(dtype) * gradient.to(dtype)
            slopes.append(products.sum((2, 3)).cpu())
        return to_numpy(torch.cat(slopes, -1)), {}

    def add_up(self, part: AblationSums, numbers: Floats, n_predictions: Floats) -> None:
        """Add the absolute derivatives per prediction. Texts without predictions get the weight 0."""
        # (text, head) / (text, 1)
        slopes = np.abs(numbers) / np.maximum(n_predictions, 1)[:, None]
        part.sums.add(slopes, (n_predictions > 0)[:, None])


def measure_importance(
    pass_settings: PassSettings, shapes: HeadShapes, report: ReportProgress | None = None
) -> CorpusRun[AblationSums]:
    """Measure the importance of each head: the mean over texts of |dL/dξ|, (head,).

    L is the loss of a text, in nats per prediction, and ξ = 1 a factor on the head's output. Each text has its own ξ:
    the absolute value is taken per text, before averaging. With one ξ for a batch, derivatives of opposite signs would
    cancel, and the result would depend on the batch size.

    Raises:
        KeyboardInterrupt: The user interrupted the pass.

    Source:
        Michel et al. 2019, section 4.1 (equation 2).
    """
    n_heads = sum(n for n, _ in shapes.values())
    return _require_complete(
        _run_pass(pass_settings, GradientMeasurer, (n_heads,), report, "importance")
    )


def to_numpy(values: Tensor) -> Floats:
    """Return a tensor as a float64 array."""
    return values.cpu().double().numpy()
