"""How much a model's loss hangs on each head, by one backward pass: Michel et al. 2019."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnscope.core.sums import RunningSums
from attnscope.corpus import Block
from attnscope.models.info import ModelInfo
from attnscope.models.model import Model
from attnscope.studies.ablation.reading import ReadBatch, Reader, Row
from attnscope.studies.ablation.sweep import Going, StandIns, require_rerunnable
from attnscope.studies.inputs.texts import Report
from attnscope.studies.run import Measurer, Part, Run

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.attention.probes import Place
    from attnscope.models.model import Outputs

DIRECTIONS = 16
"""Random directions of the last hidden states, for models without a loss."""

Floats = NDArray[np.float64]


@dataclass(kw_only=True, eq=False)
class Importance(Part):
    """What was added up over texts.

    Attributes:
        sums: |dL/dxi| of each head over texts, (head,) by layer.
    """

    sums: dict[Place, RunningSums]
    _texts: dict[int, _TextSlopes] = field(default_factory=dict)


class _TextSlopes:
    """The derivatives of one text.

    Attributes:
        slopes: By layer, (direction, head).
        count: What the text counts: its predictions, or its rows.
        n_rows: How many rows were added; `n_tokens`: their tokens.
        is_whole: Whether all rows were added.
    """

    def __init__(self, n_heads: Mapping[Place, int]) -> None:
        self.slopes = {place: np.zeros((DIRECTIONS, n)) for place, n in n_heads.items()}
        self.count = 0.0
        self.n_rows = 0
        self.n_tokens = 0
        self.is_whole = False


def importance(
    going: Going, stand_ins: StandIns, *, has_loss: bool, seed: int = 0, report: Report | None = None
) -> Run[Importance]:
    """How much the loss of a text changes with each head's gate, over texts: E |dL/dxi|.

    L is a text's loss, in nats per prediction. Each text has gates of its own. So one backward pass over a batch gives
    every text's own derivative, and absolute values are taken before texts are averaged. With one gate for the whole
    batch, texts that pull in opposite directions would cancel, and the result would depend on the size of the batch.

    Without a loss the derivative is that of <u, h>, averaged over 16 directions u of a text's last hidden states h:
    |d<u, h>/dxi|. Each u is a random unit vector over its tokens and their width, drawn from the seed. It says how far
    hidden states move, not whether that matters: it is sensitivity, not Michel's importance.

    Returns:
        For each place the sums over texts; a text without predictions does not count.

    Source:
        Michel et al. 2019, section 4.1 (equation 2). Sensitivity: ours; E |<u, v>| = sqrt(2 / (pi n)) |v| for a unit
        vector u of n dimensions, so that it is proportional to the root mean square of the change, at any length.
    """
    nothing = Importance(sums={place: RunningSums((n_heads,)) for place, n_heads in stand_ins.n_heads.items()})
    arguments = {"n_heads": stand_ins.n_heads, "has_loss": has_loss, "seed": seed}
    return going.run(SlopeMeasurer, arguments, nothing, report, step="importance")


class SlopeMeasurer(Measurer[Importance]):
    """Works out |dL/dxi| on the texts of blocks; see `importance`."""

    def __init__(
        self, model: Model, reader: Reader, n_heads: Mapping[Place, int], *, has_loss: bool, seed: int
    ) -> None:
        super().__init__()
        self._info, self._runs, self._reader = model.info, require_rerunnable(model), reader
        self._n_heads, self._has_loss, self._seed = n_heads, has_loss, seed

    def start(self, block: Block) -> Importance:
        """Return sums of nothing yet."""
        return Importance(
            sums={place: RunningSums((n,)) for place, n in self._n_heads.items()},
            _texts={text.index: _TextSlopes(self._n_heads) for text in block.texts},
        )

    def batches(self, block: Block) -> Sequence[Sequence[Row]]:
        """Cut a block into batches of rows."""
        return self._reader.batches(block)

    def add(self, part: Importance, batch: Sequence[Row], result: Sequence[Mapping[Place, Floats]]) -> None:
        """Add the derivatives of rows to their texts."""
        for number, row in enumerate(batch):
            text = part._texts[row.text]
            for direction, by_layer in enumerate(result):
                for place, slopes in by_layer.items():
                    # A text's loss is the sum over its chunks; a direction is of one chunk's hidden states.
                    text.slopes[place][direction] += slopes[number] if self._has_loss else np.abs(slopes[number])
            text.count += len(row.places) if self._has_loss else 1
            text.n_rows += 1
            text.n_tokens += row.n_tokens
            if text.n_rows == row.n_rows:
                text.is_whole = True
                part.n_texts += 1
                part.n_tokens += text.n_tokens

    def finish(self, part: Importance) -> Importance:
        """Add up the texts of the block, without those that have no prediction or are not finite."""
        used = 1 if self._has_loss else DIRECTIONS
        texts = [text for text in part._texts.values() if text.is_whole and text.count > 0]
        texts = [text for text in texts if all(np.isfinite(slopes).all() for slopes in text.slopes.values())]
        counts = np.array([text.count for text in texts])
        for place, sums in part.sums.items():
            slopes = np.array([text.slopes[place][:used] for text in texts]).reshape(-1, used, *sums.shape)
            sums.add(np.abs(slopes).mean(1) / counts[:, None], 1.0)
        return part

    def measure(self, batch: Sequence[Row]) -> list[dict[Place, Floats]]:
        """Return the derivatives, (row, head) by layer; of the loss, or of each direction."""
        from attnscope.core.attention.probes import Gate

        read = self._reader.read(batch)
        if self._has_loss and not len(read.rows):
            return []
        factors = _gates(read, self._n_heads, self._info)
        outputs = self._runs.outputs(read.batch, Gate(factors), logits=self._has_loss)
        targets = _losses(outputs, read) if self._has_loss else _along(outputs, read, self._seed)
        return [_slopes(target, factors) for target in targets]


def _gates(read: ReadBatch, n_heads: Mapping[Place, int], info: ModelInfo) -> dict[Place, Tensor]:
    import torch

    precision = torch.promote_types(getattr(torch, info.dtype), torch.float32)
    return {
        place: torch.ones(len(read.texts), n, dtype=precision, device=info.device, requires_grad=True)
        for place, n in n_heads.items()
    }


def _losses(outputs: Outputs, read: ReadBatch) -> list[Tensor]:
    """The sum of the negative log-likelihoods of all predictions; each depends on its own text's gates alone."""
    assert outputs.logits is not None
    from attnscope.core.attention.precision import in_float64

    logs = in_float64(outputs.logits[read.rows, read.places]).log_softmax(-1)
    return [-logs.gather(-1, read.answers[:, None].to(logs.device)).sum()]


def _along(outputs: Outputs, read: ReadBatch, seed: int) -> list[Tensor]:
    """<u, h> for each direction, added up over texts; each text's u is a unit vector over its real tokens."""
    import torch

    from attnscope.core.attention.precision import in_float64

    hidden = in_float64(outputs.hidden)
    _, n_tokens, width = hidden.shape
    targets = []
    for number in range(DIRECTIONS):
        # Drawn one by one from the first token on, which torch.randn does not, so that a text has the same u in any
        # batch.
        random = np.random.default_rng([seed, number]).standard_normal((n_tokens, width))
        u = torch.from_numpy(random).to(hidden.device) * read.real[..., None].to(hidden.device)
        targets.append((u / u.square().sum((1, 2), keepdim=True).sqrt() * hidden).sum())
    return targets


def _slopes(target: Tensor, factors: Mapping[Place, Tensor]) -> dict[Place, Floats]:
    """The derivative by each gate, (row, head); 0 where nothing depends on it."""
    import torch

    gradients = torch.autograd.grad(target, list(factors.values()), retain_graph=True, allow_unused=True)
    slopes = {}
    for (place, factor), slope in zip(factors.items(), gradients, strict=True):
        slopes[place] = np.zeros(tuple(factor.shape)) if slope is None else slope.cpu().double().numpy()
    return slopes


def normalized_by_layer(values: Mapping[Place, Floats]) -> dict[Place, float]:
    """What the importances of a layer's heads are divided by: their Euclidean norm (Michel et al. 2019, 4.1)."""
    return {place: float(np.linalg.norm(of_layer)) or 1.0 for place, of_layer in values.items()}
