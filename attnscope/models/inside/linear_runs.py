"""Split the scores of an attention by the parts of the stream that its queries and keys read.

A query is a sum over parts: what each earlier head and feed-forward network wrote, embeddings and biases, each through
the frozen norms, the projection and the rotary turn. So is a key. A score is the product of the two sums.

To see the sums, a model runs so that nothing but the stream and the norms on it is followed. Attention and feed-forward
networks are cut off: what they write stands for itself, a leaf of the graph. Embeddings and biases are leaves too.
Norms are linear once the length that they divided by is frozen. So a query is a sum over leaves, each times its slope,
and no path of the stream need be known.

Source: Elhage et al. 2021, "QK circuits"; frozen norms as in direct logit attribution.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from attnscope.core.attention.precision import in_float64
from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import AttentionCall, attend
from attnscope.errors import AttnscopeError
from attnscope.models.inside.projections import (
    OutputWatch,
    hidden_input,
    hooks,
    is_leaf,
    linear_maps,
    modules_of,
)
from attnscope.models.inside.stream import Norm, measure_norm
from attnscope.models.model import Batch, Model, example_batch

_MOST_NUMBERS = 2**22
"""Of slopes that are followed at once: 16 MiB for each part of the model."""

TOKENS = "tokens"
POSITIONS = "positions"
SEGMENTS = "segments"
EMBEDDED = "embeddings"
"""The name of what enters the stream where no embedding is a module."""

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


@dataclass(frozen=True, eq=False)
class _Leaf:
    """The additions of parts to the stream in a run, or to a projection of it.

    Attributes:
        parts: One part, or the heads of a layer along the second axis.
        tensor: What flows on, and carries a slope.
        value: What was added, of the same shape.
    """

    parts: tuple[Part, ...]
    tensor: Tensor
    value: Tensor


class ScoreRun:
    """A run of a model on one text in which the queries and keys of an attention are sums over parts.

    Attributes:
        call: The attention; its queries and keys carry gradients.

    Raises:
        AttnscopeError: What heads write cannot be told apart, or the model keeps no gradients.
    """

    call: AttentionCall

    def __init__(self, model: Model, batch: Batch, place: Place) -> None:
        require_gradients(model)
        self._model = model
        self._batch = batch
        self._place = place
        self._leaves: list[_Leaf] = []
        self._latest: Place = ("encoder", 0)
        self._layers = _layers_of(model)
        # Linear maps by what they do: projections read the stream, outputs write what heads put out to it.
        roots = list(model.modules())
        linear = linear_maps(roots)
        self._projections, outputs = _projections_and_outputs(model)
        # Feed-forward networks are cut off as wholes: every other map in a block, and experts, which are no maps.
        branches = set(linear) & set(self._layers) - outputs - self._projections
        for module in self._layers:
            if any(weight.ndim > 2 for weight in module.parameters(recurse=False)):
                branches.add(module)
        left = set(linear) - branches - {model.unembedding()}
        # Norms are found by measuring every module without children that is no linear map.
        modules = modules_of(roots)
        self._norms: dict[nn.Module, Norm] = {}
        for module in filter(is_leaf, modules):
            norm = None if module in linear else measure_norm(module)
            if norm is not None:
                self._norms[module] = norm
        # Run the model; whatever adds to the stream becomes a leaf.
        first = [block for place, block in model.blocks().items() if place[1] == 0]
        embeddings = [module for module in modules if isinstance(module, nn.Embedding)]
        with (
            torch.enable_grad(),
            hooks(branches, self._branch),
            hooks(embeddings, self._embed),
            hooks(dict.fromkeys(first), self._enter, before=True),
            hooks(self._norms, self._normalise),
            hooks(left, self._add_bias),
        ):
            model.run(batch, self._observe)

    def vectors(
        self, tensor: Tensor, head: int, weights: NDArray[np.float64]
    ) -> dict[Part, NDArray[np.float64]]:
        """Return what each part adds to a weighted sum of a head's queries or keys, (d_head,).

        Parts from which no path leads there are left out.

        Args:
            tensor: The queries or keys of `call`, (1, head, token, d_head).
            head: Which of their heads.
            weights: The weight of each token, (token,).
        """
        with torch.enable_grad():
            total = torch.from_numpy(weights).to(tensor) @ tensor[0, head]  # (d_head,)
        # The slopes of some columns at once, in chunks that fit the memory bound.
        at_once = max(1, _MOST_NUMBERS // tensor.numel())
        columns = torch.eye(len(total), dtype=tensor.dtype, device=tensor.device)
        tensors = [leaf.tensor for leaf in self._leaves]
        vectors: dict[Part, NDArray[np.float64]] = {}
        for start in range(0, len(total), at_once):
            chunk = columns[start : start + at_once]
            gradients = torch.autograd.grad(
                total,
                tensors,
                chunk,
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=True,
            )
            for leaf, slopes in zip(self._leaves, gradients, strict=True):
                if slopes is None:
                    continue
                # A slope has the leaf's shape behind a first axis of columns: (column, …) -> (column, part).
                products = in_float64(leaf.value.detach()) * in_float64(slopes)
                sums = products.reshape(len(chunk), len(leaf.parts), -1).sum(2)
                for part, numbers in zip(leaf.parts, sums.T, strict=True):
                    vector = vectors.setdefault(part, np.zeros(len(total)))
                    vector[start : start + at_once] += numbers.cpu().numpy()
        return vectors

    # What becomes a leaf ---------------------------------------------------------------------------------------------

    def _add_leaf(self, tensor: Tensor, *parts: Part, value: Tensor | None = None) -> Tensor:
        leaf = tensor.detach().requires_grad_()
        self._leaves.append(_Leaf(parts, leaf, leaf if value is None else value))
        return leaf

    def _observe(self, call: AttentionCall) -> Tensor:
        self._latest = (call.kind, call.layer)
        if self._latest == self._place:
            self.call = call
        with torch.no_grad():
            output = attend(call)
        # One leaf for all heads of the layer: (1, head, query, d_value).
        name = self._name(call.kind, call.layer)
        heads = range(call.n_heads)
        return self._add_leaf(
            output, *(Part(f"{name}H{head}", "head", call.layer, head) for head in heads)
        )

    def _name(self, kind: str, layer: int) -> str:
        """Return the name of a layer; where a model has two stacks, with that of the stack."""
        return f"{kind} L{layer}" if len(self._model.info.kinds) > 1 else f"L{layer}"

    def _branch(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        # A module that several layers share belongs to the layer whose attention ran last.
        places = self._layers.get(module, set())
        layers = {layer for _, layer in places}
        kind, layer = min(places) if len(layers) == 1 else self._latest
        return self._add_leaf(output, Part(f"{self._name(kind, layer)} MLP", "MLP", layer))

    def _embed(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        ids = inputs[0] if inputs else None
        name = _name_embedding(ids, output, self._batch)
        return self._add_leaf(output, Part(name, "embedding"))

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        # Embeddings handed over as vectors, or added by plain code, have no path yet.
        hidden = hidden_input(inputs, named)
        if hidden is not None and not hidden.requires_grad:
            part = Part(EMBEDDED, "embedding")
            self._leaves.append(_Leaf((part,), hidden.requires_grad_(), hidden))

    def _normalise(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        # Freeze the length: the factor is the one that gives the actual output, (…, 1).
        norm = self._norms[module]
        bias = norm.bias.to(output)
        x = inputs[0]
        if norm.centres:
            x = x - x.mean(-1, keepdim=True)
        gained = x * norm.gain.to(x)
        exact = (output - bias).detach()
        fixed = gained.detach()
        factor = (exact * fixed).sum(-1, keepdim=True) / fixed.square().sum(-1, keepdim=True)
        return self._add_bias(module, inputs, gained * factor.nan_to_num(0) + bias)

    def _add_bias(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """Return an output in which a bias, which it holds already, has a slope."""
        bias = self._norms[module].bias if module in self._norms else getattr(module, "bias", None)
        if bias is None:
            return output
        name = PROJECTION_BIAS if module in self._projections else OTHER_BIASES
        value = bias.detach().expand_as(output)
        return output + self._add_leaf(torch.zeros_like(output), Part(name, "bias"), value=value)


def _layers_of(model: Model) -> dict[nn.Module, set[Place]]:
    """Return which layers each module inside of blocks belongs to."""
    layers: dict[nn.Module, set[Place]] = {}
    for place, block in model.blocks().items():
        for module in block.modules():
            layers.setdefault(module, set()).add(place)
    return layers


def _projections_and_outputs(model: Model) -> tuple[set[nn.Module], set[nn.Module]]:
    """Return the projections, which run in a block before its attention, and the output projections."""
    watch = OutputWatch()
    since: list[nn.Module] = []
    projections: set[nn.Module] = set()

    def observe(call: AttentionCall) -> Tensor:
        projections.update(since)
        return watch(call)

    maps = linear_maps(model.modules())
    with (
        torch.no_grad(),
        hooks(maps, lambda module, *_: since.append(module)),
        hooks(maps, watch.look),
        hooks(dict.fromkeys(model.blocks().values()), lambda *_: since.clear(), before=True),
    ):
        model.run(example_batch(model), observe)
    if len(watch.modules) < len(watch.calls):
        raise AttnscopeError(
            f"no linear map of {model.info.name} is fed just what the heads of every layer put out: what they "
            "write cannot be told apart",
            "its effect can still be seen: attnscope ablate",
        )
    outputs = set(watch.modules.values())
    return projections - outputs, outputs


def _name_embedding(ids: Any, output: Tensor, batch: Batch) -> str:
    """Return which embedding gave this: that of the tokens, one that differs at every place, or neither."""
    if isinstance(ids, Tensor) and torch.equal(ids, batch.ids.to(ids.device)):
        return TOKENS
    differs = (output[..., 1:, :] != output[..., :-1, :]).any(-1)
    return POSITIONS if bool(differs.all()) else SEGMENTS


def require_gradients(model: Model) -> None:
    """Raise AttnscopeError for a model whose weights were made in inference mode: no gradients flow through it."""
    if any(weight.is_inference() for root in model.modules() for weight in root.parameters()):
        raise AttnscopeError(
            f"the weights of {model.info.name} were made in torch.inference_mode(), and keep no gradients",
            "load the model outside of it, or within torch.no_grad()",
        )
