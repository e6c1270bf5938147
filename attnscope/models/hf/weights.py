"""Find the rows and columns of a model's weights that belong to one attention head, by running the model.

An output feature of a projection (W_Q, W_K, W_V) belongs to a head if the head's queries, keys or values depend on the
feature and no other head's do. Gradients of the queries, keys and values show the dependence. So no table is needed of
the architectures that fuse, interleave or rotate their projections. W_O is the first linear map whose input is the
output of the attention.

The *seam* is the attention function that all attention of the model calls, with an `AttentionCall` as its argument.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnscope.core.attention.probes import LayerKey
from attnscope.core.attention.seam import AttentionCall
from attnscope.errors import AttnscopeError
from attnscope.models.hf.examples import make_examples
from attnscope.models.hf.seam import run_with_probe
from attnscope.models.hf.survey import AttentionSurvey
from attnscope.models.inside.projections import (
    ROLES,
    OutputProjectionFinder,
    Role,
    hooks,
    is_transposed,
    list_linear_maps,
)
from attnscope.models.model import WeightSlice


@dataclass(frozen=True, eq=False)
class _HeadDependencies:
    """Say on which output features of projections the queries, keys or values of one head depend.

    Attributes:
        role: "query", "key" or "value".
        query_heads: The query heads that use these queries, keys or values. Several query heads may share a key/value
            head.
        features_by_module: Projection -> whether they depend on each output feature, (feature,), bool.
    """

    role: Role
    query_heads: frozenset[int]
    features_by_module: dict[nn.Module, Tensor]


def head_slices(
    model: PreTrainedModel,
    base: PreTrainedModel,
    survey: AttentionSurvey,
    heads: Mapping[LayerKey, Sequence[int]],
) -> list[WeightSlice]:
    """Return the weights of query heads: rows of W_Q, W_K and W_V with their biases, and columns of W_O.

    If several query heads share a key/value head, its rows of W_K and W_V are returned only if `heads` contains all of
    these query heads.

    Args:
        model: The model. The slices have its names of weights.
        base: The part of the model that computes attention.
        survey: The attention layers of the model.
        heads: Layer key, (kind, layer), of an attention -> numbers of its query heads.

    Raises:
        AttnscopeError: Layers share weights, or a head has no weights of its own.
    """
    heads_by_layer_key, output_projections = _trace(base, survey, heads)
    module_names = {module: name for name, module in model.named_modules(remove_duplicate=False)}
    slices: list[WeightSlice] = []
    for layer_key, selected_heads in heads.items():
        kind, layer = layer_key
        for head in heads_by_layer_key[layer_key]:
            if not head.query_heads <= set(selected_heads):
                continue
            # A feature belongs to this head if no head that any other query head uses depends on it.
            other_heads = [
                other_head
                for other_head in heads_by_layer_key[layer_key]
                if not other_head.query_heads <= head.query_heads
            ]
            n_slices_before = len(slices)
            for module, used_features in head.features_by_module.items():
                own_features = used_features.clone()
                for other_head in other_heads:
                    own_features &= ~other_head.features_by_module[module]
                indices = tuple(own_features.nonzero().flatten().tolist())
                if not indices:
                    continue
                # Output features are rows of a Linear's weight, columns of a Conv1D's.
                axis = 1 if is_transposed(module) else 0
                slices.append(
                    WeightSlice(
                        f"{module_names[module]}.weight", axis, indices, head.role, _read_weight(module)
                    )
                )
                if isinstance(module.bias, Tensor):
                    slices.append(
                        WeightSlice(f"{module_names[module]}.bias", 0, indices, head.role, module.bias)
                    )
            if len(slices) == n_slices_before:
                raise _make_error(
                    f"the {head.role} of a head in {kind} layer {layer} has no weights of its own"
                )
        # W_O is (d_model, n_heads * d_value): each query head has a block of columns.
        projection = output_projections.get(layer_key)
        if projection is None:
            raise _make_error(
                f"what the heads of {kind} layer {layer} put out is changed before it is projected"
            )
        weight = _read_weight(projection)
        axis = 0 if is_transposed(projection) else 1
        n_heads = sum(head.role == "query" for head in heads_by_layer_key[layer_key])
        columns = torch.arange(weight.shape[axis]).reshape(n_heads, -1)[sorted(selected_heads)]
        indices = tuple(columns.flatten().tolist())
        slices.append(WeightSlice(f"{module_names[projection]}.weight", axis, indices, "output", weight))
    # A weight that several layers share belongs to no single head. It has one memory address and several names.
    n_names = Counter(weight.data_ptr() for _, weight in model.named_parameters(remove_duplicate=False))
    if any(n_names[weight_slice.weight.data_ptr()] > 1 for weight_slice in slices):
        raise _make_error(f"layers of {base.config.model_type} share their weights")
    return slices


def _make_error(why: str) -> AttnscopeError:
    return AttnscopeError(
        f"{why}: a head cannot be taken out of the file",
        "its effect can still be seen: attnscope ablate",
    )


def _read_weight(module: nn.Module) -> Tensor:
    """Return the weight of a projection. Raise AttnscopeError if it is quantised."""
    weight: Any = module.weight
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise AttnscopeError("its weights are quantised", "prune the model that it was made of")
    return weight


def _trace(
    base: PreTrainedModel, survey: AttentionSurvey, heads: Mapping[LayerKey, Sequence[int]]
) -> tuple[dict[LayerKey, list[_HeadDependencies]], dict[LayerKey, nn.Module]]:
    """Run a model on a small input; return the dependencies of each head, and W_O of each attention, by layer key.

    An attention has no W_O here if the model changes the output of the heads before it projects that.

    Raises:
        AttnscopeError: A projection runs several times, in one layer or in several.
    """
    outputs_by_module: dict[nn.Module, Tensor] = {}
    n_calls: Counter[nn.Module] = Counter()
    watch = OutputProjectionFinder()

    def cut_graph(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        """Make the output of a linear map a leaf of autograd's graph. This is a forward hook."""
        # `watch` finds out which linear map reads the output of an attention.
        watch.check_linear_map(module, inputs, output)
        n_calls[module] += 1
        outputs_by_module[module] = output.detach().requires_grad_()
        # Some models write into the output of a projection, which autograd forbids for a leaf. So return a copy.
        return outputs_by_module[module].clone()

    # `make_examples` returns a batch of two inputs, and the second of them alone.
    inputs = {**make_examples(base)[1], **survey.extras}
    with torch.enable_grad(), hooks(list_linear_maps([base]), cut_graph):
        run_with_probe(base, inputs, survey.plan, watch)
        heads_by_layer_key = {
            layer_key: _heads_of(watch.calls[layer_key], outputs_by_module) for layer_key in heads
        }
    # If a projection runs twice, its rows serve several heads.
    projections = set(watch.output_projections.values())
    for head in itertools.chain(*heads_by_layer_key.values()):
        projections |= {
            module for module, used_features in head.features_by_module.items() if used_features.any()
        }
    if any(n_calls[module] > 1 for module in projections):
        raise _make_error(f"layers of {base.config.model_type} share their weights")
    return heads_by_layer_key, watch.output_projections


def _heads_of(
    call: AttentionCall, outputs_by_module: Mapping[nn.Module, Tensor]
) -> list[_HeadDependencies]:
    """Return the dependencies of each role (query, key, value) and head of an attention.

    `outputs_by_module` holds the outputs of all linear maps, (..., feature), which are leaves of autograd's graph.
    """
    heads = []
    generator = torch.Generator().manual_seed(0)
    for role in ROLES:
        tensor: Tensor = getattr(call, role)
        # The number of query heads that share one key/value head; 1 for queries
        group_size = call.n_heads // tensor.shape[1]
        # (batch, head, token, d_head) -> one tensor per head, (batch, token, d_head)
        for head, head_states in enumerate(tensor.unbind(1)):
            gradients: Sequence[Tensor | None] = [None] * len(outputs_by_module)
            if head_states.requires_grad:
                # The gradient of a sum with random factors is 0 only for features that no query, key or value uses.
                random_sum = (
                    head_states * torch.randn(head_states.shape, generator=generator).to(head_states)
                ).sum()
                gradients = torch.autograd.grad(
                    random_sum, list(outputs_by_module.values()), retain_graph=True, allow_unused=True
                )
            features_by_module = {}
            for (module, output), gradient in zip(outputs_by_module.items(), gradients, strict=True):
                gradient = torch.zeros_like(output) if gradient is None else gradient
                features_by_module[module] = gradient.flatten(0, -2).abs().amax(0).cpu() > 0
            first = group_size * head
            query_heads = frozenset(range(first, first + group_size))
            heads.append(_HeadDependencies(role, query_heads, features_by_module))
    return heads
