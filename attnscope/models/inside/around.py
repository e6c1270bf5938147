"""What lies around one attention of a model: what reaches the seam, how positions turned it, and W_O behind it.

Nothing is guessed from names. The output projection is the linear map that is fed exactly what the heads put out;
rotary positions are what the model's own function did to queries and keys on their way. What cannot be seen so, is not
shown.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from attnscope.core.attention.seam import AttentionCall, attend
from attnscope.core.stepwise import Rotation
from attnscope.errors import AttnscopeError
from attnscope.models.inside.projections import OutputWatch, adapted_maps, hooks, linear_maps, modules_of, weight_of
from attnscope.models.model import Batch, Model
from attnscope.models.turns import take_turn

Turned = Literal["never", "before", "after"]
"""Whether positions turn queries and keys (rotary), and if so, whether these are as they were before, or after."""

_patching = threading.Lock()


@dataclass(frozen=True, eq=False)
class Surroundings:
    """One attention of one layer on one text, and what lies around it."""

    call: AttentionCall  # what reached the seam
    output: Tensor  # what the kernel made of it, (1, n_heads, query, d_value)
    # queries and keys before rotary positions, (n_heads or n_kv_heads, token, d_head); None where there are none, or
    # they could not be seen
    unrotated: tuple[Tensor, Tensor] | None = None
    rotation: Rotation | None = None  # how they were turned; None likewise
    # the output projection's weight, (d_model, n_heads * d_value); None where it could not be seen
    w_o: Tensor | None = None
    b_o: Tensor | None = None  # its bias, (d_model,), if it has one
    attended: Tensor | None = None  # what the model's output projection gave, (query, d_model); None likewise
    notes: tuple[str, ...] = ()  # what could not be seen, one sentence each


@dataclass(frozen=True, eq=False)
class _Turn:
    """One call of a model's own function for rotary positions."""

    function: Callable[..., Any]
    others: tuple[Any, ...]
    named: dict[str, Any]
    before: tuple[Tensor, Tensor]
    after: tuple[Tensor, Tensor]


def surroundings(model: Model, batch: Batch, kind: str, layer: int) -> Surroundings:
    """Run a model once, on one text, and keeps what lies around one of its attentions."""
    if model.info.path != "seam":
        raise AttnscopeError(
            f"{model.info.name} ({model.info.architecture}) does not show its queries and keys: its attention does "
            "not pass transformers' attention interface",
            "its weights can be seen with `attnscope heatmap`",
        )
    roots = model.modules()
    watch = _Watch(kind, layer)
    with torch.no_grad(), hooks(linear_maps(roots), watch.projections.look), watch.turning.watch(roots):
        model.run(batch, watch)
    if watch.call is None or watch.output is None:
        raise AttnscopeError(f"{model.info.name} has no {kind} attention in layer {layer}")
    rotation, unrotated, note = _rotation(watch.call, watch.turns)
    notes = [note] if note else []
    projection = next(iter(watch.projections.modules.values()), None)
    weight = None if projection is None or projection in adapted_maps(roots) else weight_of(projection)
    bias = attended = None
    if projection is None:
        notes.append("no linear map is fed just what the heads put out, so that W_O cannot be shown")
    elif weight is None:
        notes.append("W_O cannot be shown: it is quantised, or an adapter adds to it")
    else:
        weight = weight.detach()
        bias = getattr(projection, "bias", None)
        bias = None if bias is None else bias.detach()
        attended = next(iter(watch.projections.results.values()))
        attended = attended[0] if attended.ndim == 3 else attended
    return Surroundings(watch.call, watch.output, unrotated, rotation, weight, bias, attended, tuple(notes))


class _Watch:
    """The probe of one run, and the hooks beside it."""

    def __init__(self, kind: str, layer: int) -> None:
        self.call: AttentionCall | None = None
        self.output: Tensor | None = None
        self.projections = OutputWatch()
        self.turns: list[_Turn] = []
        self.turning = TurnWatch()
        self._kind = kind
        self._layer = layer

    def __call__(self, call: AttentionCall) -> Tensor:
        output = attend(call)
        turns = self.turning.take()
        if (call.kind, call.layer) == (self._kind, self._layer):
            self.call = call
            self.output = output
            self.turns = turns
            self.projections.expect((call.kind, call.layer), output)
        else:
            self.projections.give_up()  # the next attention began: W_O is not to be found any more
        return output


class TurnWatch:
    """Sees what a model's own functions for rotary positions do to queries and keys on their way to the seam."""

    def __init__(self) -> None:
        self._since: list[_Turn] = []

    def take(self) -> list[_Turn]:
        """Return what was turned since it was last asked."""
        taken = self._since
        self._since = []
        return taken

    def bare(self, call: AttentionCall) -> tuple[Tensor, Tensor, Turned]:
        """Queries and keys of the attention that is computed now, before they were turned, in the shapes of the call.

        Where it cannot be seen how they were turned, they are as they reached the seam.
        """
        turns = self.take()
        if not turns:
            return call.query, call.key, "never"
        match = _match(call, turns[-1])
        return (call.query, call.key, "after") if match is None else (*match.before, "before")

    def rotation(self, call: AttentionCall) -> Rotation | None:
        """Return how the attention that is computed now turns queries and keys, read off the first text.

        None = unknown.
        """
        return _rotation(call, self.take())[0]

    @contextlib.contextmanager
    def watch(self, roots: Iterable[nn.Module]) -> Iterator[None]:
        """See what the model's own functions for rotary positions do, in this thread.

        They are plain functions of the files that define the models, so that no hook reaches them: while it runs, their
        names there stand for one that notes what came and went.
        """
        roots = list(roots)
        files = {type(module).__module__ for module in modules_of(roots)}
        mine = threading.get_ident()

        def watch(function: Callable[..., Any]) -> Callable[..., Any]:
            def turn(*inputs: Any, **named: Any) -> Any:
                result = function(*inputs, **named)
                if threading.get_ident() == mine:
                    self._note(function, inputs, named, result)
                return result

            return turn

        with take_turn(roots), _patching:
            patched: list[tuple[Any, str, Any]] = []
            try:
                for file in sorted(files):
                    module = sys.modules.get(file)
                    for name, function in list(vars(module).items()) if module else []:
                        if name.startswith(("apply_rotary", "apply_multimodal_rotary")) and callable(function):
                            patched.append((module, name, function))
                            setattr(module, name, watch(function))
                yield
            finally:
                for module, name, function in patched:
                    setattr(module, name, function)

    def _note(self, function: Callable[..., Any], inputs: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        if len(inputs) < 2 or not isinstance(result, tuple) or len(result) < 2:
            return
        before = (inputs[0], inputs[1])
        after = (result[0], result[1])
        if all(isinstance(x, Tensor) and x.ndim == 4 for x in (*before, *after)):
            self._since.append(_Turn(function, inputs[2:], named, before, after))


# Rotary positions -------------------------------------------------------------------------------------------------


def _rotation(call: AttentionCall, turns: list[_Turn]) -> tuple[Rotation | None, tuple[Tensor, Tensor] | None, str]:
    """How queries and keys were turned before they reached the seam, themselves before it, and why that is not known.

    Read off the first text.
    What the seam got must be what the function gave, in all columns or in the first or last of them (partial rotary).
    """
    if not turns:
        return None, None, ""
    unseen = "the model turns queries and keys by their places (rotary) in a way that cannot be taken apart here"
    match = _match(call, turns[-1])
    if match is None:
        return None, None, unseen
    n_tokens, d_head = call.query.shape[2:]
    rotation = _learn_rotation(turns[-1], match.heads_axis, n_tokens, match.columns, d_head)
    if rotation is None or not all(
        _agrees(rotation, old[0], new[0]) for old, new in zip(match.before, (call.query, call.key), strict=True)
    ):
        return None, None, unseen
    return rotation, (match.before[0][0], match.before[1][0]), ""


class _Match(NamedTuple):
    """What reached the seam, as what a function for rotary positions gave."""

    heads_axis: int  # in what the function was given
    columns: slice  # that it turned
    before: tuple[Tensor, Tensor]  # queries and keys of the call as they were before


def _match(call: AttentionCall, turn: _Turn) -> _Match | None:
    """Return how a turn became what reached the seam; None if it is something else that did."""
    d_head = call.query.shape[3]
    for heads_axis in (1, 2):
        before, after = (tuple(x.transpose(1, heads_axis) for x in pair) for pair in (turn.before, turn.after))
        width = after[0].shape[3]
        if after[0].shape[:3] != call.query.shape[:3] or after[1].shape[2:3] != call.key.shape[2:3] or width > d_head:
            continue
        for start in sorted({0, d_head - width}):
            columns = slice(start, start + width)
            key = after[1].expand(-1, call.key.shape[1], -1, -1)
            if not torch.equal(after[0], call.query[..., columns]) or not torch.equal(key, call.key[..., columns]):
                continue
            unrotated = call.query.clone(), call.key.clone()
            unrotated[0][..., columns] = before[0]
            unrotated[1][..., columns] = before[1].expand_as(key)
            return _Match(heads_axis, columns, unrotated)
    return None


def _learn_rotation(turn: _Turn, heads_axis: int, n_tokens: int, columns: slice, d_head: int) -> Rotation | None:
    """Learn a rotation from what the model's own function does to each column alone; None if it is not by pairs."""
    width = columns.stop - columns.start
    like = turn.before[0]
    # A head for each column, which is 1 at every place.
    columns_apart = torch.eye(width, dtype=like.dtype, device=like.device)[:, None].expand(1, width, n_tokens, width)
    columns_apart = columns_apart.transpose(1, heads_axis)
    rotated = turn.function(columns_apart, columns_apart.clone(), *turn.others, **turn.named)[0][0]
    matrix = rotated.transpose(0, heads_axis - 1).movedim(0, -1).cpu().double().numpy()  # (token, column after, before)
    own = np.arange(width)
    off = np.abs(matrix).max(0)
    off[own, own] = 0
    if ((off > 0).sum(1) > 1).any():
        return None
    partner = np.where(off.any(1), off.argmax(1), own)
    if (partner[partner] != own).any():
        return None
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
    redone: NDArray[np.float64] = old * rotation.cos + old[..., rotation.partner] * rotation.sin
    eps = torch.finfo(after.dtype).eps
    return bool(np.abs(redone - new).max(initial=0.0) <= 8 * eps * max(1.0, float(np.abs(old).max(initial=0.0))))
