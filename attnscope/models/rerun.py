"""A batch that was run once, and is run again with something changed at the seam: from the changed layer on only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attnscope.models.model import Batch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from attnscope.core.attention import AttentionCall, Kind, Probe
    from attnscope.core.probes import Place


@dataclass(frozen=True, eq=False)
class Outputs:
    """What a forward pass gives.

    Attributes:
        hidden: The last hidden states, (batch, token, d_model); of an encoder-decoder the decoder's.
        logits: Scores of the vocabulary at each of these tokens, (batch, token, vocabulary); None where the model has
            no language-model head, or they were not asked for.
    """

    hidden: Tensor
    logits: Tensor | None = None


Forward = Callable[[Batch, "Probe", Mapping["Place", int], int], Outputs]
"""Runs a batch: with a probe, the block of each place (empty at first), and the first block that is computed."""


class Rerun:
    """A batch, its outputs, and what every block of the network returned for it.

    Args:
        forward: Runs a batch.
        batch: The batch; small, for all its blocks' outputs are held.
        blocks: The blocks of the network; none = everything is always computed again.

    Attributes:
        whole: The outputs with nothing changed.
        are_numbers: Kind -> layer -> which texts' queries and keys are finite there, (batch,).
    """

    def __init__(self, forward: Forward, batch: Batch, blocks: Sequence[nn.Module]) -> None:
        from attnscope.core.attention import are_numbers, attend
        from attnscope.models.tape import Tape

        self._forward, self._batch = forward, batch
        self._tape = Tape(blocks)
        self._block_of: dict[Place, int] = {}
        self.are_numbers: dict[Kind, dict[int, Tensor]] = {}

        def observed(call: AttentionCall) -> Tensor:
            if self._tape.current is not None:
                self._block_of[call.kind, call.layer] = self._tape.current
            self.are_numbers.setdefault(call.kind, {})[call.layer] = are_numbers(call)
            return attend(call)

        with self._tape.recording(len(batch.ids)):
            self.whole = forward(batch, observed, {}, 0)

    def block(self, places: Iterable[Place]) -> int:
        """The first block that must be computed again where these attentions change."""
        return min((self._block_of.get(place, 0) for place in places), default=0)

    def again(self, probe: Probe, first: int = 0, times: int = 1) -> Outputs:
        """Runs the batch again.

        Args:
            probe: What happens at the seam. It is not asked about attentions before block `first`.
            first: The first block to compute; those before it return what they returned.
            times: How often the texts come: all of them, then all of them again, and so on.
        """
        with self._tape.playing(first, times):
            return self._forward(repeated(self._batch, times), probe, self._block_of, first)


def repeated(batch: Batch, times: int) -> Batch:
    """All texts of a batch, then all of them again, and so on."""
    if times == 1:
        return batch
    return replace(
        batch,
        **{name: value.repeat(times, 1) for name, value in vars(batch).items() if value is not None},
    )
