"""How much a model's loss hangs on each head, by one backward pass: Michel et al. 2019."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from attnscope.core.attention.precision import in_float64
from attnscope.core.attention.probes import Gate, Place
from attnscope.core.sums import RunningSums
from attnscope.corpus import Block
from attnscope.models.model import Model, Outputs
from attnscope.studies.ablate.measurers import Floats, to_numpy
from attnscope.studies.ablate.reading import OfRows, Passes, ReadBatch, Reader, Row, RowSum
from attnscope.studies.inputs.texts import Report
from attnscope.studies.run import Part, Run

DIRECTIONS = 16
"""Random directions of the last hidden states, for models without a loss."""


@dataclass(kw_only=True, eq=False)
class SlopePart(Part):
    """What was added up over texts: |dL/dxi|, (head,) over all places."""

    sums: RunningSums
    _texts: dict[int, RowSum] = field(default_factory=dict)


class Slopes(OfRows[SlopePart]):
    """Work out |dL/dxi| of each head; see `measure_importance`."""

    def __init__(
        self, model: Model, reader: Reader, n_heads: Mapping[Place, int], *, has_loss: bool, seed: int
    ) -> None:
        super().__init__(model, reader)
        self._n_heads = n_heads
        self._has_loss = has_loss
        self._seed = seed

    def start(self, block: Block) -> SlopePart:
        """Return sums of nothing yet."""
        part = SlopePart(sums=RunningSums((sum(self._n_heads.values()),)))
        part._texts = {text.index: RowSum() for text in block.texts}
        return part

    def measure(self, batch: Sequence[Row]) -> Floats:
        """Return the derivatives of the loss, or of each direction, (row, direction, head)."""
        read = self._reader.read(batch)
        n_directions = 1 if self._has_loss else DIRECTIONS
        if self._has_loss and not len(read.rows):
            return np.zeros((len(batch), n_directions, sum(self._n_heads.values())))
        info = self._model.info
        dtype = torch.promote_types(getattr(torch, info.dtype), torch.float32)
        gates = {
            place: torch.ones(len(batch), n, dtype=dtype, device=info.device, requires_grad=True)
            for place, n in self._n_heads.items()
        }
        outputs = self._model.outputs(read.batch, Gate(gates), logits=self._has_loss)
        targets = [_loss(outputs, read)] if self._has_loss else _along_directions(outputs, read, self._seed)
        slopes = []
        for target in targets:
            gradients = torch.autograd.grad(target, list(gates.values()), retain_graph=True, allow_unused=True)
            # 0 where nothing depends on a gate.
            known = [
                torch.zeros_like(gate) if gradient is None else gradient
                for gate, gradient in zip(gates.values(), gradients, strict=True)
            ]
            slopes.append(to_numpy(torch.cat(known, -1)))
        return np.stack(slopes, 1)

    def add(self, part: SlopePart, batch: Sequence[Row], result: Floats) -> None:
        """Add the derivatives of rows to their texts."""
        for row, slopes in zip(batch, result, strict=True):
            text = part._texts[row.text]
            # A text's loss is the sum over its chunks; a direction is of one chunk's hidden states.
            if text.add(row, slopes if self._has_loss else np.abs(slopes)):
                text.is_whole = True
                part.n_texts += 1
                part.n_tokens += text.n_tokens

    def finish(self, part: SlopePart) -> SlopePart:
        """Add up the texts of the block, without those that have no prediction or are not finite."""
        values = []
        for text in part._texts.values():
            if not text.is_whole:
                continue
            count = text.count[0] if self._has_loss else text.n_rows  # type: ignore[index]
            if count > 0 and np.isfinite(text.numbers).all():
                values.append(np.abs(text.numbers).mean(0) / count)
        if values:
            part.sums.add(np.array(values), 1.0)
        return part


def measure_importance(
    passes: Passes, n_heads: Mapping[Place, int], *, has_loss: bool, seed: int = 0, report: Report | None = None
) -> Run[SlopePart]:
    """Measure how much the loss of a text changes with each head's gate, over texts: E |dL/dxi|.

    L is a text's loss, in nats per prediction. Each text has gates of its own. So one backward pass over a batch gives
    every text's own derivative, and absolute values are taken before texts are averaged. With one gate for the whole
    batch, texts that pull in opposite directions would cancel, and the result would depend on the size of the batch.

    Without a loss the derivative is that of <u, h>, averaged over 16 directions u of a text's last hidden states h:
    |d<u, h>/dxi|. Each u is a random unit vector over its tokens and their width, drawn from the seed. It says how far
    hidden states move, not whether that matters: it is sensitivity, not Michel's importance.

    Source:
        Michel et al. 2019, section 4.1 (equation 2). Sensitivity: ours; E |<u, v>| = sqrt(2 / (pi n)) |v| for a unit
        vector u of n dimensions, so that it is proportional to the root mean square of the change, at any length.
    """
    arguments = {"n_heads": n_heads, "has_loss": has_loss, "seed": seed}
    nothing = SlopePart(sums=RunningSums((sum(n_heads.values()),)))
    return passes.run(Slopes, arguments, nothing, report, step="importance")


def _loss(outputs: Outputs, read: ReadBatch) -> Tensor:
    """Return the sum of the losses of all predictions; each depends on its own text's gates alone."""
    assert outputs.logits is not None
    logs = in_float64(outputs.logits[read.rows, read.places]).log_softmax(-1)
    return -logs.gather(-1, read.answers[:, None].to(logs.device)).sum()


def _along_directions(outputs: Outputs, read: ReadBatch, seed: int) -> list[Tensor]:
    """Return <u, h> for each direction, added up over texts; each text's u is a unit vector over its real tokens."""
    hidden = in_float64(outputs.hidden)
    _, n_tokens, width = hidden.shape
    targets = []
    for number in range(DIRECTIONS):
        # Drawn one by one from the first token on, so that a text has the same u in any batch.
        random = np.random.default_rng([seed, number]).standard_normal((n_tokens, width))
        u = torch.from_numpy(random).to(hidden.device) * read.real[..., None].to(hidden.device)
        targets.append((u / u.square().sum((1, 2), keepdim=True).sqrt() * hidden).sum())
    return targets
