"""How much a model's loss hangs on each head, by one backward pass: Michel et al. 2019."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnscope.core.running import RunningSums
from attnscope.corpus import Copies, blocks, distinct
from attnscope.models.model import Model
from attnscope.studies.ablation_reading import ReadBatch, Reader
from attnscope.studies.ablation_sweep import BLOCK, HeadMeans, rerunnable
from attnscope.studies.texts import Progress, Report, Texts, share_read

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.probes import Place
    from attnscope.models.model import Outputs

DIRECTIONS = 16
"""Random directions of the last hidden states, for models without a loss."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Importance:
    """What was added up: |dL/dxi| of each head over texts, (head,) by place; and whether all texts were read."""

    sums: Mapping[Place, RunningSums]
    complete: bool = True


def importance(
    model: Model,
    reader: Reader,
    texts: Texts,
    known: HeadMeans,
    *,
    has_loss: bool,
    seed: int = 0,
    report: Report | None = None,
) -> Importance:
    """How much the loss of a text changes with each head's gate, over texts: E |dL/dxi|.

    L is a text's loss, in nats a prediction. Each text has gates of its own, so that one backward pass over a batch
    gives every text's own derivative, and absolute values are taken before texts are averaged: with one gate for the
    whole batch, texts that pull in opposite directions cancel, and the result depends on the size of the batch.

    Without a loss the derivative is that of <u, h> instead, averaged over 16 directions u of the last hidden states h
    of a text, |d<u, h>/dxi|. Each u is a random unit vector over its tokens and their width, drawn from the seed. That
    says how far hidden states move, not whether it matters: it is sensitivity, not Michel's importance.

    Args:
        model: The model.
        reader: Makes batches.
        texts: The texts.
        known: The heads.
        has_loss: Whether there is a loss; else it is sensitivity.
        seed: Of the directions.
        report: Called after each batch.

    Returns:
        For each place the sums over texts; a text without predictions counts nothing.

    Source:
        Michel et al. 2019, section 4.1 (equation 2). Sensitivity: ours; E |<u, v>| = sqrt(2 / (pi n)) |v| for a unit
        vector u of n dimensions, so that it is proportional to the root mean square of the change, at any length.
    """
    from attnscope.core.probes import Gate

    runs = rerunnable(model)

    def slopes_of(read: ReadBatch) -> list[dict[Place, Floats]]:
        if has_loss and not len(read.rows):
            return []
        factors = _gates(read, known, model.info.dtype, model.info.device)
        outputs = runs.outputs(read.batch, Gate(factors), logits=has_loss)
        targets = _losses(outputs, read) if has_loss else _along(outputs, read, seed)
        return [_slopes(target, factors) for target in targets]

    sums = {place: RunningSums((n_heads,)) for place, n_heads in known.n_heads.items()}
    n_texts = n_tokens = 0
    try:
        for block in blocks(distinct(texts, Copies()), BLOCK):
            row_of = {text.index: row for row, text in enumerate(block.texts)}
            held = {
                place: np.zeros((DIRECTIONS, len(block.texts), n_heads)) for place, n_heads in known.n_heads.items()
            }
            counts = np.zeros(len(block.texts))
            for read in reader.batches(block)[::-1]:
                if has_loss and not len(read.rows):
                    continue
                for part, found in reader.room.each(read, slopes_of, reader.halves, lambda part: part.size):
                    rows = np.array([row_of[int(text)] for text in part.texts])
                    for number, by_place in enumerate(found):
                        for place, slopes in by_place.items():
                            # A text's loss is the sum over its chunks; a direction is of one chunk's hidden states.
                            np.add.at(held[place][number], rows, slopes if has_loss else np.abs(slopes))
                    np.add.at(counts, rows, _weights(part, has_loss))
                n_texts, n_tokens = n_texts + len(set(read.texts.tolist())), n_tokens + read.n_tokens
                if report is not None:
                    report(Progress(n_texts, n_tokens, share_read(texts)))
            finite = [np.isfinite(slopes).all((0, 2)) for slopes in held.values()]
            there = (counts > 0) & np.logical_and.reduce(finite)
            used = 1 if has_loss else DIRECTIONS
            for place, slopes in held.items():
                values = np.abs(slopes[:used, there]).mean(0) / counts[there, None]
                sums[place].add(values, 1.0)
    except KeyboardInterrupt:
        return Importance(sums, complete=False)
    return Importance(sums)


def _gates(read: ReadBatch, known: HeadMeans, dtype: str, device: str) -> dict[Place, Tensor]:
    import torch

    precision = torch.promote_types(getattr(torch, dtype), torch.float32)
    return {
        place: torch.ones(len(read.texts), n_heads, dtype=precision, device=device, requires_grad=True)
        for place, n_heads in known.n_heads.items()
    }


def _losses(outputs: Outputs, read: ReadBatch) -> list[Tensor]:
    """The sum of the negative log-likelihoods of all predictions; each text's gates bear on its own alone."""
    assert outputs.logits is not None
    from attnscope.core.precision import in_float64

    logs = in_float64(outputs.logits[read.rows, read.places]).log_softmax(-1)
    return [-logs.gather(-1, read.answers[:, None].to(logs.device)).sum()]


def _along(outputs: Outputs, read: ReadBatch, seed: int) -> list[Tensor]:
    """<u, h> for each direction, added up over texts; each text's u is a unit vector over its real tokens."""
    import torch

    from attnscope.core.precision import in_float64

    hidden = in_float64(outputs.hidden)
    _, n_tokens, width = hidden.shape
    targets = []
    for number in range(DIRECTIONS):
        # Drawn one by one from the first token on, which torch.randn does not, so that a text has the same u in any
        # batch.
        drawn = np.random.default_rng([seed, number]).standard_normal((n_tokens, width))
        u = torch.from_numpy(drawn).to(hidden.device) * read.real[..., None].to(hidden.device)
        targets.append((u / u.square().sum((1, 2), keepdim=True).sqrt() * hidden).sum())
    return targets


def _slopes(target: Tensor, factors: Mapping[Place, Tensor]) -> dict[Place, Floats]:
    """The derivative by each gate, (row, head); 0 where nothing depends on it."""
    import torch

    found = torch.autograd.grad(target, list(factors.values()), retain_graph=True, allow_unused=True)
    slopes = {}
    for (place, factor), slope in zip(factors.items(), found, strict=True):
        slopes[place] = np.zeros(tuple(factor.shape)) if slope is None else slope.cpu().double().numpy()
    return slopes


def _weights(read: ReadBatch, has_loss: bool) -> Floats:
    """What each row counts: its predictions, or 1."""
    if not has_loss:
        return np.ones(len(read.texts))
    return np.bincount(read.rows.cpu().numpy(), minlength=len(read.texts)).astype(np.float64)


def normalized_by_layer(values: Mapping[Place, Floats]) -> dict[Place, float]:
    """What the importances of a layer's heads are divided by: their Euclidean norm (Michel et al. 2019, 4.1)."""
    return {place: float(np.linalg.norm(found)) or 1.0 for place, found in values.items()}
