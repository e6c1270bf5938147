"""What the scores of an attention are made of: the parts of the stream that its queries and its keys read.

A query is a sum over parts: what each earlier head and feed-forward network wrote, embeddings and biases, each through
the frozen norms, the projection and the rotary turn. So is a key. A score is the product of the two sums.

Source: Elhage et al. 2021, "QK circuits"; frozen norms as in direct logit attribution.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import AttentionCall, attend
from attnscope.errors import AttnscopeError
from attnscope.models.inside.linear_runs import Leaves, LinearRuns
from attnscope.models.model import Batch, Model

_MOST_NUMBERS = 2**22
"""Of slopes that are followed at once: 16 MiB for each part of the model."""

PROJECTION_BIAS = "projection bias"
OTHER_BIASES = "other biases"


@dataclass(frozen=True)
class Part:
    """A part of a model that adds to the residual stream.

    Attributes:
        name: Such as "L3H1", "L3 MLP" or "tokens".
        kind: "head", "MLP", "embedding" or "bias".
        layer: Its layer; -1 = it belongs to none.
        head: Its number among the heads of its layer; -1 = it is none.
    """

    name: str
    kind: str
    layer: int = -1
    head: int = -1


class ScoreRuns:
    """Runs a model so that queries and keys are sums over parts."""

    def __init__(self, model: Model) -> None:
        info = model.info
        if info.path != "seam" or info.engine == "numpy" or not model.modules():
            raise AttnscopeError(
                f"{info.name} ({info.architecture}, engine {info.engine}) does not show what its queries and keys are "
                "made of"
                + (": its own modules compute attention, and give its weights alone" * (info.path == "eager")),
                "leave out --engine" if info.engine == "numpy" else "choose a model that runs here through the seam",
            )
        self._model = model
        self._runs = LinearRuns(model)

    def trace(self, batch: Batch, places: Collection[Place]) -> "TracedScores":
        """Run a batch, and keeps the paths to the queries and keys of some attentions."""
        calls: dict[Place, AttentionCall] = {}

        def keep(call: AttentionCall) -> Tensor:
            with torch.no_grad():
                if (call.kind, call.layer) in places:
                    calls[call.kind, call.layer] = call
                return attend(call)

        with self._runs.watch(batch, keep) as (leaves, observe):
            self._model.run(batch, observe)
        return TracedScores(leaves, calls, len(batch.ids), self._model.info.kinds)


@dataclass(frozen=True, eq=False)
class TracedScores:
    """A batch that was run, with the paths from the parts of the model to the seam."""

    leaves: Leaves  # what each part added
    calls: dict[Place, AttentionCall]  # place -> what reached the seam; its queries and keys carry gradients
    n_rows: int  # rows of the batch
    kinds: tuple[str, ...]

    def along(self, output: Tensor, slopes: Tensor) -> dict[Part, Tensor]:
        """Return what each part adds to sums Σ output · slope, each (sum, row), float64.

        Without parts that reach no output.

        Args:
            output: Queries or keys of a call, (row, head, token, d_head).
            slopes: One of that shape for each sum, (sum, row, head, token, d_head).
        """
        at_once = max(1, _MOST_NUMBERS // output.numel())
        chunks = [self._along(output, chunk) for chunk in torch.split(slopes.to(output), at_once)]
        return {part: torch.cat([chunk[part] for chunk in chunks]) for part in chunks[0]}

    def _along(self, output: Tensor, slopes: Tensor) -> dict[Part, Tensor]:
        tensors = self.leaves.tensors()
        gradients = torch.autograd.grad(
            output, tensors, slopes, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
        slope_of = {id(leaf): slope for leaf, slope in zip(tensors, gradients, strict=True)}
        sums: dict[Part, Tensor] = {}

        def add(part: Part, value: Tensor, leaf: Tensor) -> None:
            if (slope := slope_of[id(leaf)]) is not None:
                # OPT's networks are given all texts in one row.
                product = (value.detach().double() * slope.double()).reshape(len(slope), self.n_rows, -1).sum(2)
                sums[part] = sums[part] + product if part in sums else product

        for (kind, layer), output in self.leaves.heads.items():
            if (slope := slope_of[id(output)]) is not None:
                products = (output.detach().double() * slope.double()).sum((3, 4))
                for head in range(products.shape[2]):
                    sums[Part(self._prefix(kind) + f"L{layer}H{head}", "head", layer, head)] = products[:, :, head]
        for (kind, layer), leaf in self.leaves.networks:
            add(Part(self._prefix(kind) + f"L{layer} MLP", "MLP", layer), leaf, leaf)
        for name, leaf in self.leaves.embedded:
            add(Part(name, "embedding"), leaf, leaf)
        for bias in self.leaves.biases:
            name = PROJECTION_BIAS if bias.projects else OTHER_BIASES
            add(Part(name, "bias"), bias.value.expand_as(bias.leaf), bias.leaf)
        return sums

    def _prefix(self, kind: str) -> str:
        """Return what tells the parts of two stacks apart: cross-attention is the decoder's own."""
        return f"{kind} " if len(self.kinds) > 1 else ""
