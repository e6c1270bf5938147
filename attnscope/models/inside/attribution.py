"""What each head adds to a logit by itself: the direct path from its output to the unembedding.

Norms on that path are linear once the length that they divided by is taken as it was; so is an activation in a head
for masked words, once the factor that it applied is. Then a logit is a sum: of what each head wrote, of what the
feed-forward networks wrote, of embeddings, and of biases. The parts are found by one backward pass in which nothing
else is let through, so that no path of the residual stream need be known.

Source: Elhage et al. 2021 (direct path); the name: Wang et al. 2023, Nostalgebraist 2020 for the last norm.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import Probe, attend
from attnscope.errors import AttnscopeError, require_rounding
from attnscope.models.info import ModelInfo
from attnscope.models.inside.linear_runs import Leaves, LinearRuns
from attnscope.models.inside.projections import hooks, weight_of
from attnscope.models.model import Batch, Model

_TOLERANCE = 1e-3
"""Of the size of a logit's parts: how far their sum may be off before it is said that a part is not known."""


@dataclass(frozen=True, eq=False)
class Parts:
    """What logits are sums of; each logit less the mean over the vocabulary."""

    logits: Tensor  # the answers' logits, (prediction,), as the unembedding gives them, before any cap or scale
    heads: dict[Place, Tensor]  # place -> what each head adds, (prediction, head)
    feed_forward: Tensor  # what the feed-forward networks add, (prediction,)
    embeddings: Tensor  # what embeddings add, (prediction,)
    biases: Tensor  # what the biases of output projections, of norms and of the head for words add, (prediction,)

    @property
    def total(self) -> Tensor:
        """The sum of all parts."""
        heads: Tensor = sum((part.sum(-1) for part in self.heads.values()), torch.zeros_like(self.logits))
        return heads + self.feed_forward + self.embeddings + self.biases


class DirectPaths:
    """The direct paths of a model that predicts words."""

    def __init__(self, model: Model) -> None:
        info, head = model.info, model.unembedding()
        if head is None or model.loss not in ("causal", "masked") or info.path != "seam":
            raise AttnscopeError(
                f"{info.name} does not predict words one by one through attention that can be seen: nothing can be "
                "said of what its heads write",
                "choose a decoder, or an encoder with its head for masked words",
            )
        self._model, self._head = model, head
        rows = weight_of(head)
        if rows is None:
            raise AttnscopeError(
                f"the unembedding of {info.name} is quantised, so what its heads write cannot be computed",
                "name the checkpoint with unquantised weights",
            )
        self._rows = rows.detach()
        self._mean = self._rows.float().mean(0)
        whole = getattr(getattr(model, "network", None), "model", None)  # with what it has on top
        self._runs = LinearRuns(model, [head, *([whole] if isinstance(whole, nn.Module) else [])])

    def run(self, batch: Batch, rows: Tensor, places: Tensor, answers: Tensor, probe: Probe = attend) -> Parts:
        """Runs a batch and takes the logits of answers apart; see `trace` and `Traced.parts`."""
        return self.trace(batch, rows, places, probe).parts(answers)

    def trace(self, batch: Batch, rows: Tensor, places: Tensor, probe: Probe = attend) -> "Traced":
        """Runs a batch, and keeps the direct paths to the logits of its predictions, each at a row and a token of it.

        No token comes twice in a row.
        """
        last: list[tuple[Tensor, Tensor]] = []  # what the unembedding was given, and its logits

        def look(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            last.append((inputs[0], output.detach()))

        with self._runs.watch(batch, probe) as (leaves, observe), hooks([self._head], look):
            self._model.outputs(batch, observe)
            hidden = last[-1][0][rows, places]
        logits = last[-1][1][rows, places].float()
        return Traced(
            self._head, self._rows, self._mean, self._model.info, leaves, hidden, logits, rows, places, len(batch.ids),
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Traced:
    """A batch that was run, with the direct paths to the logits of its predictions."""

    unembedding: nn.Module
    tokens: Tensor  # the rows of the unembedding, (vocabulary, d_model); `mean` is their mean
    mean: Tensor
    info: ModelInfo
    leaves: Leaves  # what each part of the model added to the stream
    hidden: Tensor  # what the unembedding was given, (prediction, d_model)
    logits: Tensor  # what it gave, (prediction, vocabulary)
    rows: Tensor  # the row of each prediction in the batch, of `n_rows`
    places: Tensor  # the token of each
    n_rows: int

    def parts(self, tokens: Tensor) -> Parts:
        """What the logits of tokens are sums of, one token of each prediction."""
        own = self.logits.gather(-1, tokens[:, None].to(self.logits.device))[:, 0] - self.logits.mean(-1)
        leaves = self.leaves
        slopes = self._slopes(tokens, leaves.tensors())

        def total(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
            """Sum of values along their slopes at each prediction."""
            result = torch.zeros_like(own)
            for value, leaf in pairs:
                if (slope := slopes[id(leaf)]) is not None:
                    product = (value.detach() * slope).float().sum(-1)
                    # OPT's networks are given all texts in one row.
                    result = result + product.reshape(self.n_rows, -1)[self.rows, self.places]
            return result

        heads = {
            place: self.at((output.detach() * _or_zero(slopes[id(output)], output)).float().sum(-1))
            for place, output in leaves.heads.items()
        }
        parts = Parts(
            own,
            heads,
            total((leaf, leaf) for _, leaf in leaves.networks),
            total((leaf, leaf) for _, leaf in leaves.embedded),
            total((bias.value, bias.leaf) for bias in leaves.biases) + self._bias_of(tokens, own),
        )
        self._require_sum(parts)
        return parts

    def slopes(self, tokens: Tensor) -> dict[Place, Tensor]:
        """By how much what heads put out raises the logits of tokens, one token of each prediction.

        Place -> (batch, head, query, d_value): the slope of a logit, less the vocabulary's mean, along what a head puts
        out at the token where it is predicted; 0 elsewhere.
        """
        heads = self.leaves.heads
        slopes = self._slopes(tokens, list(heads.values()))
        return {place: _or_zero(slopes[id(output)], output).float() for place, output in heads.items()}

    def at(self, values: Tensor) -> Tensor:
        """(batch, head, query) -> the predictions', (prediction, head)."""
        return values.movedim(1, -1)[self.rows, self.places]

    def _slopes(self, tokens: Tensor, leaves: list[Tensor]) -> dict[int, Tensor | None]:
        """By the leaf's identity; None where no path leads from it."""
        along = self.tokens[tokens.to(self.tokens.device)].float() - self.mean
        slopes = torch.autograd.grad(self.hidden, leaves, along.to(self.hidden), retain_graph=True, allow_unused=True)
        return dict(zip(map(id, leaves), slopes, strict=True))

    def _bias_of(self, tokens: Tensor, like: Tensor) -> Tensor:
        bias = getattr(self.unembedding, "bias", None)
        if not isinstance(bias, Tensor):
            return torch.zeros_like(like)
        return (bias.detach().float()[tokens.to(bias.device)] - bias.detach().float().mean()).to(like)

    def _require_sum(self, parts: Parts) -> None:
        off = float((parts.total - parts.logits).abs().max()) if len(parts.logits) else 0.0
        tensors = [
            part.abs().max() for part in (*parts.heads.values(), parts.feed_forward, parts.embeddings, parts.logits)
        ]
        size = float(torch.stack([tensor.to("cpu") for tensor in tensors]).max()) if len(parts.logits) else 1.0
        allowed = max(_TOLERANCE, 64 * torch.finfo(getattr(torch, self.info.dtype)).eps) * max(size, 1.0)
        require_rounding(
            f"something else adds to the stream of {self.info.name}: its logits differ from the sum of what its heads, "
            "its feed-forward networks, its embeddings and biases add",
            off,
            allowed,
            "what its heads do can still be seen: attnscope ablate",
        )


def _or_zero(slope: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if slope is None else slope
