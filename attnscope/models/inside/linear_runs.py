"""Split the scores of an attention by the parts of the model that wrote what its queries and keys read.

A part is an earlier head, a feed-forward network, an embedding or the biases. A query is a sum over parts: what each
part wrote to the residual stream, passed through the frozen norms, the projection and the rotary position embedding. So
is a key. A score is the product of the two sums.

To see the sums, a model runs with autograd, and gradients flow only along the stream and through its norms. The output
of each part is a leaf of autograd's graph. A norm is linear once the length that it divides by is frozen. So a query is
a sum over leaves, each multiplied by the gradient of the query with respect to it. The paths of the stream from a leaf
to the query need not be known.

The *seam* is the one function that computes every attention of a model. A *layer key* names one attention,
(kind, layer), such as ("decoder", 3).

Source: Elhage et al. 2021, "QK circuits"; frozen norms as in direct logit attribution.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attnscope.arrays import Floats
from attnscope.core.attention.precision import in_float64
from attnscope.core.attention.probes import LayerKey
from attnscope.core.attention.seam import AttentionCall, attend
from attnscope.errors import AttnscopeError
from attnscope.models.inside.projections import (
    Inputs,
    NamedInputs,
    OutputProjectionFinder,
    first_input_tensor,
    has_no_children,
    hooks,
    list_linear_maps,
    list_modules,
)
from attnscope.models.inside.stream import Norm, measure_norm
from attnscope.models.model import Batch, Model, example_batch

_MAX_GRADIENT_ELEMENTS = 2**22
"""The most elements of gradients that are in memory at once, for each leaf: 16 MiB as float32."""


@dataclass(frozen=True)
class ModelPart:
    """A part of a model that adds to the residual stream, or the biases of several modules."""

    # Such as "L3H1", "L3 MLP" or "tokens"
    name: str
    # "head", "MLP", "embedding" or "bias"
    kind: str
    # The number of its layer; -1 = the part belongs to no layer
    layer: int = -1
    # The number of the head in its layer; -1 = the part is no head
    head: int = -1


@dataclass(frozen=True, eq=False)
class _Leaf:
    """A leaf of autograd's graph: what one part, or all heads of a layer, add to the stream in a run."""

    # One part; or all heads of a layer, along axis 1 of the two tensors
    parts: tuple[ModelPart, ...]
    # The tensor that the run continues with, and that gradients are taken with respect to
    tensor: Tensor
    # What the parts add, of the same shape: `tensor` itself; or for a bias, the bias, while `tensor` is 0
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
        AttnscopeError: The output projection of a layer was not found, or the model keeps no gradients.
    """

    call: AttentionCall

    def __init__(self, model: Model, batch: Batch, layer_key: LayerKey) -> None:
        require_gradients(model)
        self._model = model
        self._batch = batch
        self._layer_key = layer_key
        self._leaves: list[_Leaf] = []
        # The layer key of the attention that ran last, with a default for modules that run before any attention
        self._latest_layer_key: LayerKey = ("encoder", 0)
        self._keys_by_module = _find_layer_keys(model)
        modules = list_modules(model.modules())
        linear_maps = set(list_linear_maps(modules))
        self._projections, output_projections = _find_projections(model)
        # All other linear maps in blocks belong to feed-forward networks (MLPs). So do modules whose weight has 3 axes,
        # which are the linear maps of several experts.
        mlp_maps = (linear_maps & self._keys_by_module.keys()) - output_projections - self._projections
        for module in self._keys_by_module:
            if any(weight.ndim > 2 for weight in module.parameters(recurse=False)):
                mlp_maps.add(module)
        # Test every module without children: it is a norm if it computes a LayerNorm or RMSNorm.
        self._norms: dict[nn.Module, Norm] = {}
        for module in filter(has_no_children, modules):
            norm = measure_norm(module)
            if norm is not None:
                self._norms[module] = norm
        # Projections and output projections stay linear, and only their bias is a part. The unembedding does not write
        # to the stream.
        other_maps = linear_maps - mlp_maps - {model.unembedding()}
        # Run the model. The hooks make the output of each part a leaf. A layer key ends with the number of the layer.
        first_blocks = [block for layer_key, block in model.blocks().items() if layer_key[1] == 0]
        embeddings = [module for module in modules if isinstance(module, nn.Embedding)]
        with (
            torch.enable_grad(),
            hooks(mlp_maps, self._detach_mlp_map),
            hooks(embeddings, self._detach_embedding),
            hooks(first_blocks, self._detach_input, before=True),
            hooks(self._norms, self._freeze_norm),
            hooks(other_maps, self._split_bias),
        ):
            model.run(batch, self._observe)

    def vectors_by_part(self, tensor: Tensor, head: int, weights: Floats) -> dict[ModelPart, Floats]:
        """Return what each part adds to a weighted sum over tokens of one head's queries or keys, (d_head,) each.

        Parts that the queries or keys do not depend on are left out.

        Args:
            tensor: The queries or keys of `call`, (1, head, token, d_head).
            head: The number of the head in `tensor`.
            weights: The weight of each token, (token,).
        """
        with torch.enable_grad():
            total = torch.from_numpy(weights).to(tensor) @ tensor[0, head]  # (d_head,)
        # Each selector is 1 at one element of the sum. Gradients of several elements are computed at once.
        chunk_size = max(1, _MAX_GRADIENT_ELEMENTS // tensor.numel())
        selectors = torch.eye(len(total), dtype=tensor.dtype, device=tensor.device)
        tensors = [leaf.tensor for leaf in self._leaves]
        vectors: dict[ModelPart, Floats] = {}
        for start in range(0, len(total), chunk_size):
            chunk = selectors[start : start + chunk_size]
            gradients = torch.autograd.grad(
                total,
                tensors,
                chunk,
                retain_graph=True,
                allow_unused=True,
                is_grads_batched=True,
            )
            for leaf, gradient in zip(self._leaves, gradients, strict=True):
                # None = the sum does not depend on this leaf.
                if gradient is None:
                    continue
                # (element, *shape of the leaf) -> (element, part): axis 1 of the leaf is heads, if there are several.
                products = in_float64(leaf.value.detach()) * in_float64(gradient)
                sums = products.reshape(len(chunk), len(leaf.parts), -1).sum(2)
                for part, elements in zip(leaf.parts, sums.T, strict=True):
                    vector = vectors.setdefault(part, np.zeros(len(total)))
                    vector[start : start + chunk_size] += elements.cpu().numpy()
        return vectors

    # Hooks that make leaves -----------------------------------------------------------------------------------------

    def _add_leaf(self, tensor: Tensor, *parts: ModelPart, value: Tensor | None = None) -> Tensor:
        """Return a tensor as a leaf of autograd's graph; the run continues with it.

        `value` is what the parts add to the stream; None = the tensor itself.
        """
        leaf = tensor.detach().requires_grad_()
        self._leaves.append(_Leaf(parts, leaf, leaf if value is None else value))
        return leaf

    def _observe(self, call: AttentionCall) -> Tensor:
        """Compute an attention, and make the outputs of its heads a leaf. This is the hook at the seam."""
        self._latest_layer_key = (call.kind, call.layer)
        if self._latest_layer_key == self._layer_key:
            self.call = call
        with torch.no_grad():
            output = attend(call)
        # All heads of the layer share a leaf, (1, head, query, d_value).
        name = self._name_layer(call.kind, call.layer)
        parts = [ModelPart(f"{name}H{head}", "head", call.layer, head) for head in range(call.n_heads)]
        return self._add_leaf(output, *parts)

    def _name_layer(self, kind: str, layer: int) -> str:
        """Return the name of a layer, such as "L3", or "cross L3" in a model with several kinds of attention."""
        return f"{kind} L{layer}" if len(self._model.info.kinds) > 1 else f"L{layer}"

    def _detach_mlp_map(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """Make the output of a map of a feed-forward network a leaf. This is a forward hook."""
        # A block may have decoder attention and cross-attention: name the part by the alphabetically first kind. If
        # several layers share a module, name it by the attention that ran last.
        layer_keys = self._keys_by_module[module]
        layers = {layer for _, layer in layer_keys}
        kind, layer = min(layer_keys) if len(layers) == 1 else self._latest_layer_key
        return self._add_leaf(output, ModelPart(f"{self._name_layer(kind, layer)} MLP", "MLP", layer))

    def _detach_embedding(self, module: nn.Module, inputs: Inputs, output: Tensor) -> Tensor:
        """Make the output of an embedding a leaf. This is a forward hook."""
        name = _name_embedding(first_input_tensor(inputs), output, self._batch)
        return self._add_leaf(output, ModelPart(name, "embedding"))

    def _detach_input(self, module: nn.Module, inputs: Inputs, named: NamedInputs) -> None:
        """Make the hidden states that enter the first block a leaf, unless embeddings are leaves already.

        A model whose embeddings are no nn.Embedding needs this. It is a forward pre-hook.
        """
        hidden = first_input_tensor(inputs, named)
        # Hidden states that depend on a leaf require gradients.
        if hidden is not None and not hidden.requires_grad:
            part = ModelPart("embeddings", "embedding")
            self._leaves.append(_Leaf((part,), hidden.requires_grad_(), hidden))

    def _freeze_norm(self, module: nn.Module, inputs: Inputs, output: Tensor) -> Tensor:
        """Recompute a norm with its length frozen, so that it is linear. This is a forward hook."""
        norm = self._norms[module]
        bias = norm.bias.to(output)
        scaled = norm.centre(inputs[0]) * norm.gain.to(inputs[0])
        # output - bias = scaled / length: find 1 / length, (…, 1), by least squares, without gradient.
        actual = (output - bias).detach()
        regressor = scaled.detach()
        factor = (actual * regressor).sum(-1, keepdim=True) / regressor.square().sum(-1, keepdim=True)
        # 0 / 0 is NaN: the input was constant, and then `scaled` is 0.
        return self._split_bias(module, inputs, scaled * factor.nan_to_num(0) + bias)

    def _split_bias(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """Make a module's bias a leaf. This is a forward hook.

        The output includes the bias already. So the leaf's tensor is 0, only to receive gradients, and its value is the
        bias.
        """
        bias = self._norms[module].bias if module in self._norms else getattr(module, "bias", None)
        if bias is None:
            return output
        name = "projection bias" if module in self._projections else "other biases"
        value = bias.detach().expand_as(output)
        return output + self._add_leaf(torch.zeros_like(output), ModelPart(name, "bias"), value=value)


def _find_layer_keys(model: Model) -> dict[nn.Module, set[LayerKey]]:
    """Return the layer keys of the attentions in whose blocks a module lies, by module.

    Modules outside of all blocks are left out.
    """
    layer_keys: dict[nn.Module, set[LayerKey]] = {}
    for layer_key, block in model.blocks().items():
        for module in block.modules():
            layer_keys.setdefault(module, set()).add(layer_key)
    return layer_keys


def _find_projections(model: Model) -> tuple[set[nn.Module], set[nn.Module]]:
    """Return the modules of W_Q, W_K and W_V, and the modules of W_O, of all attentions.

    The projections W_Q, W_K and W_V are the linear maps that run in a block before its attention.

    Raises:
        AttnscopeError: The output projection W_O of an attention cannot be found.
    """
    finder = OutputProjectionFinder()
    # The linear maps that have run so far in the current block
    ran_in_block: list[nn.Module] = []
    projections: set[nn.Module] = set()

    def observe(call: AttentionCall) -> Tensor:
        projections.update(ran_in_block)
        return finder(call)

    maps = list_linear_maps(model.modules())
    with (
        torch.no_grad(),
        hooks(maps, lambda module, *_: ran_in_block.append(module)),
        hooks(maps, finder.check_linear_map),
        hooks(model.blocks().values(), lambda *_: ran_in_block.clear(), before=True),
    ):
        model.run(example_batch(model), observe)
    if len(finder.output_projections) < len(finder.calls):
        raise AttnscopeError(
            f"no linear map of {model.info.name} is fed just what the heads of every layer put out: what they "
            "write cannot be told apart",
            "its effect can still be seen: attnscope ablate",
        )
    output_projections = set(finder.output_projections.values())
    return projections - output_projections, output_projections


def _name_embedding(ids: Tensor | None, output: Tensor, batch: Batch) -> str:
    """Return the name of an embedding, "tokens", "positions" or "segments", by its input and output.

    The token embedding reads the token ids. The position embedding's output, (…, token, d_model), differs between all
    neighbouring tokens. Any other embedding is taken for that of segments.
    """
    if ids is not None and torch.equal(ids, batch.ids.to(ids.device)):
        return "tokens"
    has_changed = (output[..., 1:, :] != output[..., :-1, :]).any(-1)  # (…, token - 1)
    return "positions" if has_changed.all() else "segments"


def require_gradients(model: Model) -> None:
    """Raise AttnscopeError for a model whose weights were made in inference mode: autograd cannot use them."""
    if any(weight.is_inference() for root in model.modules() for weight in root.parameters()):
        raise AttnscopeError(
            f"the weights of {model.info.name} were made in torch.inference_mode(), and keep no gradients",
            "load the model outside of it, or within torch.no_grad()",
        )
