"""Split the scores of an attention by the parts of the model that wrote what its queries and keys read.

A part is an earlier head, a feed-forward network, an embedding or the biases. A query is a sum over parts: what each
wrote to the residual stream, through the frozen norms, the projection and the rotary turn. So is a key. A score is the
product of the two sums.

To see the sums, a model runs with autograd so that gradients flow only along the stream and through its norms. What
each part writes is a leaf of autograd's graph. Norms are linear once the length that they divide by is frozen. So a
query is a sum over leaves, each times its slope (the derivative of the query by the leaf). Which ways the stream takes
from a leaf to the query need not be known.

Source: Elhage et al. 2021, "QK circuits"; frozen norms as in direct logit attribution.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnscope.core.attention.precision import in_float64
from attnscope.core.attention.probes import LayerKey
from attnscope.core.attention.seam import AttentionCall, attend
from attnscope.errors import AttnscopeError
from attnscope.models.inside.projections import (
    Inputs,
    NamedInputs,
    OutputWatch,
    first_tensor,
    hooks,
    is_leaf,
    linear_maps,
    modules_of,
)
from attnscope.models.inside.stream import Norm, measure_norm
from attnscope.models.model import Batch, Model, example_batch
from attnscope.results.table import Floats

_SLOPES_AT_ONCE = 2**22
"""The most elements of slopes that are in memory at once, for each leaf: 16 MiB as float32."""


@dataclass(frozen=True)
class ModelPart:
    """A part of a model that adds to the residual stream, or the biases of several modules."""

    # Such as "L3H1", "L3 MLP" or "tokens"
    name: str
    # "head", "MLP", "embedding" or "bias"
    kind: str
    # The number of its layer; -1 = it belongs to none
    layer: int = -1
    # The number of the head in its layer; -1 = the part is no head
    head: int = -1


@dataclass(frozen=True, eq=False)
class _Leaf:
    """A leaf of autograd's graph: what one part, or all heads of a layer, add in a run."""

    # One part; or all heads of a layer, which the second axis of the tensors runs over
    parts: tuple[ModelPart, ...]
    # The tensor that the run goes on with. Slopes are derivatives by it
    tensor: Tensor
    # What the parts add, of the same shape: the same tensor, or a bias where `tensor` is 0
    value: Tensor


class ScoreRun:
    """A run of a model on one text in which the queries and keys of an attention are sums over parts.

    Args:
        model: The model.
        batch: The text, as a batch of one.
        layer_key: The layer key of the attention, (kind, layer).

    Attributes:
        call: The call of the attention; gradients flow to its queries and keys.

    Raises:
        AttnscopeError: What heads write cannot be told apart, or the model keeps no gradients.
    """

    call: AttentionCall

    def __init__(self, model: Model, batch: Batch, layer_key: LayerKey) -> None:
        require_gradients(model)
        self._model = model
        self._batch = batch
        self._layer_key = layer_key
        self._leaves: list[_Leaf] = []
        # The layer key of the attention that ran last
        self._latest: LayerKey = ("encoder", 0)
        self._layer_keys = _places_of_modules(model)
        modules = modules_of(model.modules())
        linear = set(linear_maps(modules))
        self._projections, outputs = _projections_and_outputs(model)
        # All other linear maps in blocks belong to feed-forward networks. So do modules whose weight has 3 axes: it
        # holds the maps of several experts.
        branches = (linear & self._layer_keys.keys()) - outputs - self._projections
        for module in self._layer_keys:
            if any(weight.ndim > 2 for weight in module.parameters(recurse=False)):
                branches.add(module)
        # Measure every module without children: what acts as a norm is one.
        self._norms: dict[nn.Module, Norm] = {}
        for module in filter(is_leaf, modules):
            norm = measure_norm(module)
            if norm is not None:
                self._norms[module] = norm
        # Of projections and output projections, the bias alone is a part. The unembedding does not write to the stream.
        other_maps = linear - branches - {model.unembedding()}
        # Run the model; what each part adds to the stream becomes a leaf.
        first_blocks = [block for layer_key, block in model.blocks().items() if layer_key[1] == 0]
        embeddings = [module for module in modules if isinstance(module, nn.Embedding)]
        with (
            torch.enable_grad(),
            hooks(branches, self._cut_branch),
            hooks(embeddings, self._cut_embedding),
            hooks(first_blocks, self._cut_input, before=True),
            hooks(self._norms, self._freeze_norm),
            hooks(other_maps, self._split_bias),
        ):
            model.run(batch, self._observe)

    def vectors(self, tensor: Tensor, head: int, weights: Floats) -> dict[ModelPart, Floats]:
        """Return what each part adds to the weighted sum of a head's queries, or keys, over tokens, (d_head,).

        Parts on which the queries or keys do not depend are left out.

        Args:
            tensor: The queries or keys of `call`, (1, head, token, d_head).
            head: The number of the head in `tensor`.
            weights: The weight of each token, (token,).
        """
        with torch.enable_grad():
            total = torch.from_numpy(weights).to(tensor) @ tensor[0, head]  # (d_head,)
        # Each selector picks one element of the sum. Slopes are taken of so many elements at once as memory allows.
        n_at_once = max(1, _SLOPES_AT_ONCE // tensor.numel())
        selectors = torch.eye(len(total), dtype=tensor.dtype, device=tensor.device)
        tensors = [leaf.tensor for leaf in self._leaves]
        vectors: dict[ModelPart, Floats] = {}
        for start in range(0, len(total), n_at_once):
            chunk = selectors[start : start + n_at_once]
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
                # (element, *shape of the leaf) -> (element, part)
                products = in_float64(leaf.value.detach()) * in_float64(slopes)
                sums = products.reshape(len(chunk), len(leaf.parts), -1).sum(2)
                for part, elements in zip(leaf.parts, sums.T, strict=True):
                    vector = vectors.setdefault(part, np.zeros(len(total)))
                    vector[start : start + n_at_once] += elements.cpu().numpy()
        return vectors

    # Hooks that make leaves -----------------------------------------------------------------------------------------

    def _add_leaf(self, tensor: Tensor, *parts: ModelPart, value: Tensor | None = None) -> Tensor:
        """Return a tensor as a leaf, for the run to go on with; `value` is what the parts add, if not the tensor."""
        leaf = tensor.detach().requires_grad_()
        self._leaves.append(_Leaf(parts, leaf, leaf if value is None else value))
        return leaf

    def _observe(self, call: AttentionCall) -> Tensor:
        """Compute an attention, and make the outputs of its heads a leaf; the probe at the seam."""
        self._latest = (call.kind, call.layer)
        if self._latest == self._layer_key:
            self.call = call
        with torch.no_grad():
            output = attend(call)
        # One leaf for all heads of the layer: (1, head, query, d_value).
        name = self._name_layer(call.kind, call.layer)
        parts = [ModelPart(f"{name}H{head}", "head", call.layer, head) for head in range(call.n_heads)]
        return self._add_leaf(output, *parts)

    def _name_layer(self, kind: str, layer: int) -> str:
        """Return the name of a layer, such as "L3"; with the kind of attention where a model has several."""
        return f"{kind} L{layer}" if len(self._model.info.kinds) > 1 else f"L{layer}"

    def _cut_branch(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """Make the output of a map of a feed-forward network a leaf; the hook after it."""
        # Decoder and cross-attention may share a block: the name is that of the first kind in the alphabet. A module
        # that several layers share belongs to the layer whose attention ran last.
        layer_keys = self._layer_keys[module]
        layers = {layer for _, layer in layer_keys}
        kind, layer = min(layer_keys) if len(layers) == 1 else self._latest
        return self._add_leaf(output, ModelPart(f"{self._name_layer(kind, layer)} MLP", "MLP", layer))

    def _cut_embedding(self, module: nn.Module, inputs: Inputs, output: Tensor) -> Tensor:
        """Make the output of an embedding a leaf; the hook after it."""
        name = _name_embedding(first_tensor(inputs), output, self._batch)
        return self._add_leaf(output, ModelPart(name, "embedding"))

    def _cut_input(self, module: nn.Module, inputs: Inputs, named: NamedInputs) -> None:
        """Make the hidden states that enter the first layer a leaf, if no embedding is one; the hook before its block.

        They are one where embeddings are no modules.
        """
        hidden = first_tensor(inputs, named)
        if hidden is not None and not hidden.requires_grad:
            part = ModelPart("embeddings", "embedding")
            self._leaves.append(_Leaf((part,), hidden.requires_grad_(), hidden))

    def _freeze_norm(self, module: nn.Module, inputs: Inputs, output: Tensor) -> Tensor:
        """Compute a norm with its length frozen, so that it is linear; the hook after it."""
        norm = self._norms[module]
        bias = norm.bias.to(output)
        scaled = norm.centre(inputs[0]) * norm.gain.to(inputs[0])
        # output - bias = scaled / length: find 1 / length, (…, 1), by least squares, without gradient.
        actual = (output - bias).detach()
        fixed = scaled.detach()
        factor = (actual * fixed).sum(-1, keepdim=True) / fixed.square().sum(-1, keepdim=True)
        return self._split_bias(module, inputs, scaled * factor.nan_to_num(0) + bias)

    def _split_bias(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """Make a module's bias a leaf; the hook after the module.

        The output holds the bias already. So the tensor of the leaf is 0, and its value is the bias.
        """
        bias = self._norms[module].bias if module in self._norms else getattr(module, "bias", None)
        if bias is None:
            return output
        name = "projection bias" if module in self._projections else "other biases"
        value = bias.detach().expand_as(output)
        return output + self._add_leaf(torch.zeros_like(output), ModelPart(name, "bias"), value=value)


def _places_of_modules(model: Model) -> dict[nn.Module, set[LayerKey]]:
    """Return the layer keys of the attentions in the blocks of each module. Modules outside of blocks are left out."""
    layer_keys: dict[nn.Module, set[LayerKey]] = {}
    for layer_key, block in model.blocks().items():
        for module in block.modules():
            layer_keys.setdefault(module, set()).add(layer_key)
    return layer_keys


def _projections_and_outputs(model: Model) -> tuple[set[nn.Module], set[nn.Module]]:
    """Return the projections W_Q, W_K and W_V, which run in a block before its attention, and the output projections.

    Raises:
        AttnscopeError: The output projection of an attention cannot be found.
    """
    watch = OutputWatch()
    # The linear maps that have run in the block that runs now
    ran_in_block: list[nn.Module] = []
    projections: set[nn.Module] = set()

    def observe(call: AttentionCall) -> Tensor:
        projections.update(ran_in_block)
        return watch(call)

    maps = linear_maps(model.modules())
    with (
        torch.no_grad(),
        hooks(maps, lambda module, *_: ran_in_block.append(module)),
        hooks(maps, watch.look),
        hooks(model.blocks().values(), lambda *_: ran_in_block.clear(), before=True),
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


def _name_embedding(ids: Tensor | None, output: Tensor, batch: Batch) -> str:
    """Return the name of an embedding, "tokens", "positions" or "segments", by its input and output.

    An embedding that reads the token ids is that of tokens. One whose output, (…, token, d_model), differs between all
    neighbouring tokens is that of positions. Any other is that of segments.
    """
    if ids is not None and torch.equal(ids, batch.ids.to(ids.device)):
        return "tokens"
    differs = (output[..., 1:, :] != output[..., :-1, :]).any(-1)  # (…, token - 1)
    return "positions" if differs.all() else "segments"


def require_gradients(model: Model) -> None:
    """Raise AttnscopeError for a model whose weights were made in inference mode: no gradients flow through it."""
    if any(weight.is_inference() for root in model.modules() for weight in root.parameters()):
        raise AttnscopeError(
            f"the weights of {model.info.name} were made in torch.inference_mode(), and keep no gradients",
            "load the model outside of it, or within torch.no_grad()",
        )
