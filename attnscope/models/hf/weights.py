"""Find the numbers of a model's weights that are one attention head's, by running it, not by the names of its parts.

A projection's output feature belongs to a head where the head's queries, keys or values depend on it and no other
head's do; that is read off derivatives at the seam, so that fused, interleaved and rotated projections need no table.
The output projection is the first one whose input is what the seam gave out.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import AttentionCall
from attnscope.errors import AttnscopeError
from attnscope.models.hf.examples import examples
from attnscope.models.hf.seam import perform
from attnscope.models.hf.survey import Survey
from attnscope.models.inside.projections import (
    ROLES,
    OutputWatch,
    Role,
    hooks,
    is_transposed,
    linear_maps,
)
from attnscope.models.model import Slice


@dataclass(frozen=True, eq=False)
class _Head:
    """A head of queries, keys or values, and which output features of each projection it depends on.

    Attributes:
        role: "query", "key" or "value".
        serves: The heads of queries that it serves, several if queries are grouped.
        uses: Projection -> whether it depends on each output feature, (feature,), bool.
    """

    role: Role
    serves: frozenset[int]
    uses: dict[nn.Module, Tensor]


def head_slices(
    model: PreTrainedModel, base: PreTrainedModel, survey: Survey, heads: Mapping[Place, Sequence[int]]
) -> list[Slice]:
    """Return the weights of heads: rows of W_Q, W_K and W_V with their biases, and the columns of W_O for them.

    Where queries are grouped, rows of W_K and W_V are returned only of groups all of whose heads are given.

    Args:
        model: The model, by whose names of modules the weights are called.
        base: The part of it that attends.
        survey: What is known of its attention.
        heads: Attention -> numbers of its heads.

    Raises:
        AttnscopeError: Layers share weights, or a head has none of its own.
    """
    seen, output_projections = _trace(base, survey, heads)
    names = {module: name for name, module in model.named_modules(remove_duplicate=False)}
    slices: list[Slice] = []
    for place, numbers in heads.items():
        kind, layer = place
        for head in seen[place]:
            if not head.serves <= set(numbers):
                continue
            # A feature belongs to this head if none depends on it that serves other heads of queries.
            others = [other for other in seen[place] if not other.serves <= head.serves]
            n_slices = len(slices)
            for module, features in head.uses.items():
                owned = features.clone()
                for other in others:
                    owned &= ~other.uses[module]
                indices = tuple(owned.nonzero().flatten().tolist())
                if not indices:
                    continue
                # Output features are rows of a Linear's weight, columns of a Conv1D's.
                axis = 1 if is_transposed(module) else 0
                slices.append(
                    Slice(f"{names[module]}.weight", axis, indices, head.role, _weight(module))
                )
                if isinstance(module.bias, Tensor):
                    slices.append(Slice(f"{names[module]}.bias", 0, indices, head.role, module.bias))
            if len(slices) == n_slices:
                raise _refusal(
                    f"the {head.role} of a head in {kind} layer {layer} has no weights of its own"
                )
        # W_O: (d_model, n_heads * d_value), a block of columns per head.
        projection = output_projections.get(place)
        if projection is None:
            raise _refusal(
                f"what the heads of {kind} layer {layer} put out is changed before it is projected"
            )
        weight = _weight(projection)
        axis = 0 if is_transposed(projection) else 1
        n_heads = sum(head.role == "query" for head in seen[place])
        columns = torch.arange(weight.shape[axis]).reshape(n_heads, -1)[sorted(numbers)]
        indices = tuple(columns.flatten().tolist())
        slices.append(Slice(f"{names[projection]}.weight", axis, indices, "output", weight))
    # Weights that several layers share cannot belong to one head: count where each tensor's memory starts.
    starts = Counter(weight.data_ptr() for _, weight in model.named_parameters(remove_duplicate=False))
    if any(starts[part.weight.data_ptr()] > 1 for part in slices):
        raise _refusal(f"layers of {base.config.model_type} share their weights")
    return slices


def _refusal(why: str) -> AttnscopeError:
    return AttnscopeError(
        f"{why}: a head cannot be taken out of the file",
        "its effect can still be seen: attnscope ablate",
    )


def _weight(module: nn.Module) -> Tensor:
    """Return the weight of a projection; refuse one that is quantised."""
    weight: Any = module.weight
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise AttnscopeError("its weights are quantised", "prune the model that it was made of")
    return weight


def _trace(
    base: PreTrainedModel, survey: Survey, heads: Mapping[Place, Sequence[int]]
) -> tuple[dict[Place, list[_Head]], dict[Place, nn.Module]]:
    """Run a model on a small input; return the heads of each attention, and its output projection where it has one."""
    results: dict[nn.Module, Tensor] = {}
    n_calls: Counter[nn.Module] = Counter()
    watch = OutputWatch()

    def after(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        watch.look(module, inputs, output)
        n_calls[module] += 1
        # Derivatives end at each projection. The model gets a copy, for some write into what a projection gave them.
        results[module] = output.detach().requires_grad_()
        return results[module].clone()

    inputs = {**examples(base)[1], **survey.extras}
    with torch.enable_grad(), hooks(linear_maps([base]), after):
        perform(base, inputs, survey.plan, watch)
        seen = {place: _dependencies(watch.calls[place], results) for place in heads}
    # A module that runs twice, or serves two layers, has no rows that belong to one head.
    used = set(watch.modules.values())
    for head in itertools.chain(*seen.values()):
        used |= {module for module, features in head.uses.items() if bool(features.any())}
    is_repeated = any(n_calls[module] > 1 for module in used)
    if is_repeated or any(len(places) > 1 for places in survey.plan.values()):
        raise _refusal(f"layers of {base.config.model_type} share their weights")
    return seen, watch.modules


def _dependencies(call: AttentionCall, results: Mapping[nn.Module, Tensor]) -> list[_Head]:
    """Return the heads of queries, keys and values of an attention, with the features that each depends on.

    `results` are the outputs of all projections, (..., feature).
    """
    heads = []
    generator = torch.Generator().manual_seed(0)
    for role in ROLES:
        # (batch, head, token, d_head) -> (batch, token, d_head) of each head
        tensor: Tensor = getattr(call, role)
        group_size = call.n_heads // tensor.shape[1]
        for number, rows in enumerate(tensor.unbind(1)):
            slopes: Sequence[Tensor | None] = [None] * len(results)
            if rows.requires_grad:
                # The derivative of a random sum of a head's numbers is 0 where none depends on a feature.
                target = (rows * torch.randn(rows.shape, generator=generator).to(rows)).sum()
                slopes = torch.autograd.grad(
                    target, list(results.values()), retain_graph=True, allow_unused=True
                )
            uses = {}
            for (module, result), slope in zip(results.items(), slopes, strict=True):
                slope = torch.zeros_like(result) if slope is None else slope
                uses[module] = slope.flatten(0, -2).abs().amax(0).cpu() > 0
            first = group_size * number
            heads.append(_Head(role, frozenset(range(first, first + group_size)), uses))
    return heads
