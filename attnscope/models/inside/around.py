"""Observe one attention of a model: its call at the seam, its rotary turn before, and W_O behind it.

Nothing is guessed from names. The output projection is the linear map that is fed exactly what the heads put out;
rotary positions are what the model's own function did to queries and keys on their way. What cannot be seen so, is not
shown.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from attnscope.core.attention.seam import AttentionCall, attend
from attnscope.core.stepwise import Rotation
from attnscope.errors import AttnscopeError
from attnscope.models.inside.projections import OutputWatch, adapted_maps, hooks, linear_maps, modules_of, weight_of
from attnscope.models.model import Batch, Model
from attnscope.models.turns import take_turn

_patching = threading.Lock()


@dataclass(frozen=True, eq=False)
class Surroundings:
    """One attention of one layer on one text, with its rotary turn and output projection; None where not seen.

    Attributes:
        call: What reached the seam.
        output: What the kernel made of it, (1, n_heads, query, d_value).
        unrotated: Queries and keys before rotary positions, (n_heads or n_kv_heads, token, d_head); None also where
            there are none. Likewise `rotation`, how they were turned.
        w_o: The output projection's weight, (d_model, n_heads * d_value).
        b_o: Its bias, (d_model,), if it has one.
        attended: What the model's output projection gave, (query, d_model).
        notes: What could not be seen, one sentence each.
    """

    call: AttentionCall
    output: Tensor
    unrotated: tuple[Tensor, Tensor] | None = None
    rotation: Rotation | None = None
    w_o: Tensor | None = None
    b_o: Tensor | None = None
    attended: Tensor | None = None
    notes: tuple[str, ...] = ()


def surroundings(model: Model, batch: Batch, kind: str, layer: int) -> Surroundings:
    """Run a model once on one text, and return one of its attentions with its rotary turn and output projection.

    Raises:
        AttnscopeError: The model's attention does not pass the seam, or it has no such layer.
    """
    if model.info.path != "seam":
        raise AttnscopeError(
            f"{model.info.name} ({model.info.architecture}) does not show its queries and keys: its attention does "
            "not pass transformers' attention interface",
            "its weights can be seen with `attnscope heatmap`",
        )
    # Run once: note each rotary turn until an attention comes, and then look for its W_O.
    roots = model.modules()
    outputs = OutputWatch()
    turns: list[_Turn] = []
    seen: list[tuple[AttentionCall, Tensor, list[_Turn]]] = []

    def observe(call: AttentionCall) -> Tensor:
        output = attend(call)
        if (call.kind, call.layer) == (kind, layer):
            seen.append((call, output, turns.copy()))
            outputs.expect((call.kind, call.layer), output)
        else:
            outputs.give_up()  # the next attention began: W_O is not to be found any more
        turns.clear()
        return output

    with torch.no_grad(), hooks(linear_maps(roots), outputs.look), _watch_turns(roots, turns):
        model.run(batch, observe)
    if not seen:
        raise AttnscopeError(f"{model.info.name} has no {kind} attention in layer {layer}")
    call, output, turned = seen[-1]
    notes = []

    # Before the seam: how queries and keys were turned.
    rotation = unrotated = None
    if turned:
        rotation, unrotated = _read_turn(call, turned[-1])
        if rotation is None:
            notes.append("the model turns queries and keys by their positions (rotary) in a way that is not known here")

    # Behind it: what projects the heads' outputs.
    weight = bias = attended = None
    for module in outputs.modules.values():
        weight = None if module in adapted_maps(roots) else weight_of(module)
        if weight is None:
            notes.append("W_O cannot be shown: it is quantised, or an adapter adds to it")
            continue
        weight = weight.detach()
        bias = getattr(module, "bias", None)
        bias = None if bias is None else bias.detach()
        (attended,) = outputs.results.values()
        attended = attended[0] if attended.ndim == 3 else attended
    if not outputs.modules:
        notes.append("no linear map is fed just what the heads put out, so that W_O cannot be shown")
    return Surroundings(call, output, unrotated, rotation, weight, bias, attended, tuple(notes))


# Rotary positions -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Turn:
    """One call of a model's own function for rotary positions."""

    function: Callable[..., Any]
    others: tuple[Any, ...]
    named: dict[str, Any]
    before: tuple[Tensor, Tensor]
    after: tuple[Tensor, Tensor]


@contextlib.contextmanager
def _watch_turns(roots: Sequence[nn.Module], turns: list[_Turn]) -> Iterator[None]:
    """Within it, what the model's own functions for rotary positions do in this thread is put into a list.

    They are plain functions of the files that define the models, so that no hook reaches them: while it runs, their
    names there stand for one that notes what came and went.
    """
    mine = threading.get_ident()

    def watch(function: Callable[..., Any]) -> Callable[..., Any]:
        def turn(*inputs: Any, **named: Any) -> Any:
            result = function(*inputs, **named)
            is_pair = len(inputs) > 1 and isinstance(result, tuple) and len(result) > 1
            if is_pair and threading.get_ident() == mine:
                before = (inputs[0], inputs[1])
                after = (result[0], result[1])
                if all(isinstance(x, Tensor) and x.ndim == 4 for x in (*before, *after)):
                    turns.append(_Turn(function, inputs[2:], named, before, after))
            return result

        return turn

    # One thread patches at a time: the names in a module are shared by all threads.
    files = {type(module).__module__ for module in modules_of(roots)}
    with take_turn(roots), _patching, contextlib.ExitStack() as stack:
        for file in sorted(files):
            module = sys.modules.get(file)
            for name, function in list(vars(module).items()) if module else []:
                if name.startswith(("apply_rotary", "apply_multimodal_rotary")) and callable(function):
                    stack.callback(setattr, module, name, function)
                    setattr(module, name, watch(function))
        yield


def _read_turn(call: AttentionCall, turn: _Turn) -> tuple[Rotation | None, tuple[Tensor, Tensor] | None]:
    """Return how queries and keys were turned before they reached the seam, and themselves before it.

    None where it is not known. Read off the first text. What the seam got must be what the function gave, in all
    columns or in the first or last of them (partial rotary).
    """
    match = _match(call, turn)
    if match is None:
        return None, None
    # Learn the rotation on unit vectors, then check it on the text's own queries and keys.
    rotation = _learn_rotation(turn, match, *call.query.shape[2:])
    query, key = match.before
    if rotation is None or not _agrees(rotation, query[0], call.query[0]) or not _agrees(rotation, key[0], call.key[0]):
        return None, None
    return rotation, (query[0], key[0])


class _Match(NamedTuple):
    """A call at the seam, matched with the output of a function for rotary positions."""

    heads_axis: int  # in what the function was given
    columns: slice  # that it turned
    before: tuple[Tensor, Tensor]  # queries and keys of the call as they were before


def _match(call: AttentionCall, turn: _Turn) -> _Match | None:
    """Return how a turn became what reached the seam; None if it is something else that did."""
    # Models turn (batch, head, token, d) or (batch, token, head, d), and all or some of the columns.
    d_head = call.query.shape[3]
    for heads_axis in (1, 2):
        before, after = (tuple(x.transpose(1, heads_axis) for x in pair) for pair in (turn.before, turn.after))
        width = after[0].shape[3]
        if after[0].shape[:3] != call.query.shape[:3] or after[1].shape[2:3] != call.key.shape[2:3] or width > d_head:
            continue
        for start in sorted({0, d_head - width}):
            columns = slice(start, start + width)
            key = after[1].expand(-1, call.key.shape[1], -1, -1)
            if torch.equal(after[0], call.query[..., columns]) and torch.equal(key, call.key[..., columns]):
                unrotated = call.query.clone(), call.key.clone()
                unrotated[0][..., columns] = before[0]
                unrotated[1][..., columns] = before[1].expand_as(key)
                return _Match(heads_axis, columns, unrotated)
    return None


def _learn_rotation(turn: _Turn, match: _Match, n_tokens: int, d_head: int) -> Rotation | None:
    """Learn a rotation from what the model's own function does to each column alone; None if it is not by pairs."""
    columns = match.columns
    width = columns.stop - columns.start
    like = turn.before[0]
    # A head for each column, which is 1 at every position: (1, column, token, column).
    alone = torch.eye(width, dtype=like.dtype, device=like.device)[:, None].expand(1, width, n_tokens, width)
    alone = alone.transpose(1, match.heads_axis)
    turned = turn.function(alone, alone.clone(), *turn.others, **turn.named)[0].transpose(1, match.heads_axis)[0]
    # (token, column after, column before)
    matrix = turned.permute(1, 2, 0).cpu().double().numpy()
    # Each column may depend on itself and on one other, its partner, which depends on it.
    own = np.arange(width)
    strengths = np.abs(matrix).max(0)
    strengths[own, own] = 0
    partner = np.where(strengths.any(1), strengths.argmax(1), own)
    if ((strengths > 0).sum(1) > 1).any() or (partner[partner] != own).any():
        return None
    # Columns that the function does not turn keep cos 1 and sin 0: (token, d_head).
    cos = np.ones((n_tokens, d_head))
    sin = np.zeros((n_tokens, d_head))
    cos[:, columns] = matrix[:, own, own]
    sin[:, columns] = np.where(partner == own, 0.0, matrix[:, own, partner])
    whole = np.arange(d_head)
    whole[columns] = partner + columns.start
    return Rotation(cos, sin, whole)


def _agrees(rotation: Rotation, before: Tensor, after: Tensor) -> bool:
    """Return whether the rotation that was learnt gives what the model's own function gave, within rounding."""
    old, new = (x.cpu().double().numpy() for x in (before, after))
    difference = np.abs(old * rotation.cos + old[..., rotation.partner] * rotation.sin - new).max(initial=0.0)
    size = max(1.0, float(np.abs(old).max(initial=0.0)))
    return bool(difference <= 8 * torch.finfo(after.dtype).eps * size)
