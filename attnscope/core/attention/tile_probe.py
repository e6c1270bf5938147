"""What probes share that read all they want from the tiles of an attention, and keep no map. Ours."""

from collections.abc import Callable, Hashable
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from attnscope.core.attention.seam import AttentionCall, Kind
from attnscope.core.attention.tiles import Block, Buffers, attend_in_tiles

Result = TypeVar("Result")
ResultOf = TypeVar("ResultOf", covariant=True)
Plan = TypeVar("Plan")


class _Movable(Protocol):
    def on(self, device: torch.device) -> Self: ...


Facts = TypeVar("Facts", bound=_Movable)


class Reader(Protocol[ResultOf]):
    """What reads one attention, block by block."""

    @property
    def blocks(self) -> list[Block] | None:
        """The blocks that it knows; None = as `tiles.blocks` cuts them."""

    def add(self, block: Block, weights: Tensor) -> None:
        """Reads the weights of a block, (text, head, query, key), which it may overwrite."""

    def result(self) -> ResultOf:
        """The result of the layer, once every block was read."""


class TileProbe(Generic[Result]):
    """Reads every layer of one forward pass on one batch; no gradient flows through its output.

    Args:
        buffers: Memory for tiles, which may serve one batch after another; None = a batch's own.

    Attributes:
        sums: Kind -> layer -> the layer's result, in the order in which they came.
    """

    input_name = "batch"
    """What one probe reads, in errors."""

    def __init__(self, buffers: Buffers | None = None) -> None:
        self.sums: dict[Kind, dict[int, Result]] = {}
        self._buffers = Buffers() if buffers is None else buffers
        self._plans: dict[Hashable, tuple[Any, Tensor | None]] = {}
        self._moved: dict[tuple[Any, torch.device], Any] = {}

    def __call__(self, call: AttentionCall) -> Tensor:
        """Computes an attention without gradient, and reads its tiles; shape and dtype: see `Probe`.

        Raises:
            RuntimeError: The layer of this kind has been here already.
            ValueError: The call's shapes are not those of the probe's facts.
        """
        if call.layer in self.sums.get(call.kind, {}):
            raise RuntimeError(
                f"{call.kind} layer {call.layer} reached the probe twice; a new {self.input_name} needs a new "
                f"{type(self).__name__} probe"
            )
        with torch.no_grad():
            output, result = self._read(call)
            self.sums.setdefault(call.kind, {})[call.layer] = result
        return output

    def _read(self, call: AttentionCall) -> tuple[Tensor, Result]:
        """An attention's output, and its result; refuses a call that does not fit by a ValueError."""
        reader = self._reader(call)
        output = attend_in_tiles(call, lambda tile: reader.add(tile.block, tile.weights), reader.blocks, self._buffers)
        return output, reader.result()

    def _reader(self, call: AttentionCall) -> Reader[Result]:
        """The reader of an attention; refuses one that does not fit by a ValueError."""
        raise NotImplementedError

    def _plan_once(self, call: AttentionCall, make: Callable[[], Plan], *more: Hashable) -> Plan:
        """The plan of `make`, made once for all layers of the same mask, causality, window, shapes and `more`."""
        mask = call.mask
        # Most models hand every layer the same mask; some make a new view of the same memory each time.
        seen = None if mask is None else (mask.data_ptr(), mask.shape, mask.stride(), mask._version)
        sizes = call.n_heads, call.query.shape[2], call.key.shape[2]
        name = (seen, call.query.device, call.is_causal, call.window, sizes, more)
        if name not in self._plans:
            self._plans[name] = make(), mask  # held, so that its address stays its own
        plan: Plan = self._plans[name][0]
        return plan

    def _on_device(self, facts: Facts, device: torch.device) -> Facts:
        """Facts on a device, moved once for all layers there."""
        if (facts, device) not in self._moved:
            self._moved[facts, device] = facts.on(device)
        moved: Facts = self._moved[facts, device]
        return moved
