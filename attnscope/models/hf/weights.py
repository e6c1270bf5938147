"""Which numbers of a model's weights are one head's: found by running it, not by the names of its parts.

A projection's output feature belongs to a head where the head's queries, keys or values depend on it and no other
head's do; that is read off derivatives at the seam, so that fused, interleaved and rotated projections need no table.
The output projection is the first one whose input is what the seam gave out.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import AttentionCall, Probe, attend
from attnscope.errors import AttnscopeError
from attnscope.models.hf.examples import examples
from attnscope.models.hf.layers import Survey
from attnscope.models.hf.seam import perform
from attnscope.models.inside.projections import (
    ROLES,
    OutputWatch,
    Role,
    find_output_projections,
    hooks,
    is_transposed,
    linear_maps,
)
from attnscope.models.model import Slice


@dataclass(eq=False)
class _Attention:
    """What was seen of one attention: which features each of its heads depends on, and its output projection."""

    n_heads: int
    n_kv_heads: int
    features: dict[tuple[Role, int], dict[nn.Module, Tensor]]
    out: nn.Module | None = None


def head_slices(
    model: PreTrainedModel, base: PreTrainedModel, survey: Survey, heads: Mapping[Place, Sequence[int]]
) -> list[Slice]:
    """Return the weights of heads.

    Rows of W_Q, W_K and W_V with their biases, and what of W_O reads the heads' outputs.

    Weights are named as the model with its head names them. Where queries are grouped, rows of W_K and W_V only of
    groups that are given whole. Refused where layers share weights, or a head has none of its own.
    """
    seen = _trace(base, survey, heads)
    names = {module: name for name, module in model.named_modules(remove_duplicate=False)}
    shared = _shared_weights(model)
    slices = []
    for place, numbers in heads.items():
        attention = seen[place]
        chosen: list[tuple[Role, int, list[int]]] = [("query", head, [head]) for head in numbers]
        group = attention.n_heads // attention.n_kv_heads
        for kv_head in range(attention.n_kv_heads):
            members = list(_members(kv_head, group))
            if set(members) <= set(numbers):
                chosen += [("key", kv_head, members), ("value", kv_head, members)]
        for role, head, members in chosen:
            for module, features in _own_features(attention, place, role, head, members).items():
                slices += _rows(module, features, role, names[module])
        slices.append(_columns(attention, place, numbers, names))
    if any(part.weight.data_ptr() in shared for part in slices):
        raise _sharing_error(base)
    return slices


def output_projections(base: PreTrainedModel, survey: Survey) -> dict[Place, Tensor]:
    """W_O of each attention, found by running the model on a small input; see `find_output_projections`."""
    return find_output_projections(base, lambda probe: _run(base, survey, probe), survey.n_heads)


def _run(base: PreTrainedModel, survey: Survey, probe: Probe) -> None:
    """Run a model on a small input."""
    perform(base, {**examples(base)[1].inputs, **survey.extras}, survey.plan, probe)


def _trace(base: PreTrainedModel, survey: Survey, heads: Mapping[Place, Sequence[int]]) -> dict[Place, _Attention]:
    """Run a model on a small input, and finds out what the heads of the places depend on."""
    results: dict[nn.Module, Tensor] = {}
    n_calls: Counter[nn.Module] = Counter()
    seen: dict[Place, _Attention] = {}
    outputs = OutputWatch()

    def after(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        outputs.look(module, inputs, output)
        n_calls[module] += 1
        results[module] = output.detach().requires_grad_()
        # A copy, for some models write into what a projection gave them.
        return results[module].clone()

    def observe(call: AttentionCall) -> Tensor:
        output = attend(call).detach()
        place = (call.kind, call.layer)
        if place in heads:
            seen[place] = _Attention(call.n_heads, call.n_kv_heads, _dependencies(call, results))
            outputs.expect(place, output)
        return output

    with torch.enable_grad(), hooks(linear_maps([base]), after):
        _run(base, survey, observe)
    for place, module in outputs.modules.items():
        seen[place].out = module
    used = {module for attention in seen.values() for of_head in attention.features.values() for module in of_head}
    used |= set(outputs.modules.values())
    if any(n_calls[module] > 1 for module in used) or any(len(places) > 1 for places in survey.plan.values()):
        raise _sharing_error(base)
    return seen


def _dependencies(
    call: AttentionCall, results: Mapping[nn.Module, Tensor]
) -> dict[tuple[Role, int], dict[nn.Module, Tensor]]:
    """For queries, keys and values of each head: the projections they depend on, and on which of their features."""
    features: dict[tuple[Role, int], dict[nn.Module, Tensor]] = {}
    chance = torch.Generator().manual_seed(0)
    for role in ROLES:
        tensor: Tensor = getattr(call, role)
        for head in range(tensor.shape[1]):
            rows = tensor[:, head]
            if not rows.requires_grad:
                features[role, head] = {}
                continue
            target = (rows * torch.randn(rows.shape, generator=chance).to(rows)).sum()
            slopes = torch.autograd.grad(target, list(results.values()), retain_graph=True, allow_unused=True)
            features[role, head] = {
                module: slope.flatten(0, -2).abs().amax(0) > 0
                for module, slope in zip(results, slopes, strict=True)
                if slope is not None and bool(slope.any())
            }
    return features


def _own_features(
    attention: _Attention, place: Place, role: Role, head: int, members: Sequence[int]
) -> dict[nn.Module, list[int]]:
    """Return the features that a head (of keys and values: a group) alone depends on, by projection."""
    own: dict[nn.Module, list[int]] = {}
    group = attention.n_heads // attention.n_kv_heads
    for module, features in attention.features[role, head].items():
        alone = features.clone()
        for (other_role, other), by_module in attention.features.items():
            same = other in members if other_role == "query" else set(_members(other, group)) <= set(members)
            if not same and module in by_module:
                alone &= ~by_module[module]
        if bool(alone.any()):
            own[module] = torch.nonzero(alone).flatten().tolist()
    if not own:
        kind, layer = place
        what = {"query": "queries", "key": "keys", "value": "values"}[role]
        raise AttnscopeError(
            f"{kind} L{layer}H{members[0]} has no weights of its own for its {what}: they are mixed with other heads'",
            "its effect can still be seen: attnscope ablate",
        )
    return own


def _members(kv_head: int, group: int) -> range:
    return range(kv_head * group, (kv_head + 1) * group)


def _rows(module: nn.Module, features: Sequence[int], role: str, name: str) -> list[Slice]:
    """Return what makes these features: rows of a Linear's weight, columns of a Conv1D's, and of the bias."""
    weight = _weight(module)
    bias = getattr(module, "bias", None)
    slices = [Slice(f"{name}.weight", 1 if is_transposed(module) else 0, tuple(features), role, weight)]
    if isinstance(bias, Tensor):
        slices.append(Slice(f"{name}.bias", 0, tuple(features), role, bias))
    return slices


def _columns(attention: _Attention, place: Place, heads: Sequence[int], names: Mapping[nn.Module, str]) -> Slice:
    """Return what of the output projection reads the heads; its bias is not theirs."""
    module = attention.out
    if module is None:
        kind, layer = place
        raise AttnscopeError(
            f"what the heads of {kind} layer {layer} put out is changed before it is projected, so that no weights "
            "are one head's",
            "its effect can still be seen: attnscope ablate",
        )
    weight = _weight(module)
    axis = 0 if is_transposed(module) else 1
    width = weight.shape[axis] // attention.n_heads
    indices = tuple(i for head in sorted(heads) for i in range(head * width, (head + 1) * width))
    return Slice(f"{names[module]}.weight", axis, indices, "output", weight)


def _weight(module: nn.Module) -> Tensor:
    weight: Any = module.weight
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise AttnscopeError("its weights are quantised", "prune the model that it was made of")
    return weight


def _shared_weights(model: PreTrainedModel) -> set[int]:
    """Where weights begin that several modules have."""
    starts = Counter(weight.data_ptr() for _, weight in model.named_parameters(remove_duplicate=False))
    return {start for start, n in starts.items() if n > 1}


def _sharing_error(base: PreTrainedModel) -> AttnscopeError:
    return AttnscopeError(
        f"layers of {base.config.model_type} share their weights: a head of one cannot be taken out of the file",
        "its effect can still be seen: attnscope ablate",
    )
