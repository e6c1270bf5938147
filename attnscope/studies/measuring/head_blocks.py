"""The measures of a model's heads on one block of texts."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attnscope.core.catalogue import OFFSETS
from attnscope.corpus import TOKEN_BUDGET, Block, Chunk, TokenCounts, block_batches
from attnscope.models.model import Model
from attnscope.results.tokens import Tokens
from attnscope.studies.inputs.texts import batch_of, pad_rows
from attnscope.studies.measuring.block_sums import HeadSums, Hits
from attnscope.studies.measuring.tally import PAIR_MEASURES, pair_hits
from attnscope.studies.run import Measurer

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.facts import TextFacts
    from attnscope.core.measures import Measured


@dataclass(frozen=True, eq=False)
class Frequencies:
    """The log frequency of each token, and of one that was never counted."""

    table: NDArray[np.float64]
    unseen: float

    @classmethod
    def of_counts(cls, counts: TokenCounts) -> Frequencies:
        """The log frequencies of counted tokens."""
        numbers = counts.counts
        # Of the vocabulary only the part up to the largest number that was seen is known here.
        n_known = max(1, len(numbers))
        return cls(counts.log_frequency(n_known), -math.log(counts.total + n_known))

    def of(self, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """The log frequency of each token."""
        is_known = ids < len(self.table)
        return np.where(is_known, self.table[np.where(is_known, ids, 0)], self.unseen)


class HeadMeasurer(Measurer[HeadSums]):
    """Measures the heads of a model on blocks of texts.

    `chunk` and `stride` are those of `HeadsOptions`.

    Raises:
        AttnscopeError: It has a decoder beside its encoder, and nothing that it could read.
    """

    def __init__(
        self,
        model: Model,
        frequencies: Frequencies,
        special: frozenset[int],
        chunk: int | None = None,
        stride: int | None = None,
    ) -> None:
        from attnscope.core.attention.tiles import Buffers
        from attnscope.models.inside.projections import HiddenNorms

        super().__init__()
        self._model, self._frequencies, self._special = model, frequencies, special
        self._cut = {"chunk": chunk, "stride": stride}
        self._dense = model.info.path == "eager"
        self._start = decoder_start(model)
        self._factors = None if self._dense else _factors(model)
        self._norms = HiddenNorms(model.blocks())
        self._buffers = Buffers()

    def start(self, block: Block) -> HeadSums:
        """Return sums of nothing yet."""
        return HeadSums()

    def batches(self, block: Block) -> Sequence[Sequence[Chunk]]:
        """Cut a block into batches, the longest texts first."""
        batches: Sequence[Sequence[Chunk]] = block_batches(
            block,
            self._model.tokenizer.encode,
            limit=self._model.info.max_tokens,
            budget=TOKEN_BUDGET,
            special_ids=self._special,
            **self._cut,
        )
        return batches[::-1]

    def add(self, part: HeadSums, batch: Sequence[Chunk], result: Mapping[str, Mapping[int, Measured]]) -> None:
        """Add the measures of a batch."""
        part.add(batch, result, [self._pair_hits(chunk) for chunk in batch])

    def finish(self, part: HeadSums) -> HeadSums:
        """Return the sums over the whole texts of a block."""
        part.finish()
        return part

    def measure(self, batch: Sequence[Chunk]) -> Mapping[str, Mapping[int, Measured]]:
        """Return the measures of a batch: kind -> layer -> sums, in the order of the batch."""
        import torch

        from attnscope.core.attention.probes import Weights
        from attnscope.core.measures import HeadMeasures, measures_of_weights

        tokens = [part.tokens for part in batch]
        device = self._model.info.device
        repeated = [part.repeated for part in batch]
        facts = self._facts(tokens, repeated, "cpu" if self._dense else device)
        written, targets = None, [target_of(self._start, t) for t in tokens if self._start is not None]
        if targets:
            written = self._facts(targets, [_after_start(r) for r in repeated], "cpu" if self._dense else device)
        inputs = batch_of(tokens, targets).to(device)
        with torch.no_grad():  # not inference_mode: its tensors do not tell when they change, which the measures ask
            if not self._dense:
                probe = HeadMeasures(
                    facts,
                    written,
                    factors=self._factors,
                    buffers=self._buffers,
                    norms=self._norms.of,
                    in_units=True,
                )
                with self._norms.watch():
                    self._model.run(inputs, probe)
                return {str(kind): by_layer for kind, by_layer in probe.sums.items()}
            weights_probe = Weights()
            self._model.run(inputs, weights_probe)
            read = facts if written is None else written
            texts = {"encoder": (facts, None), "decoder": (read, None), "cross": (facts, read)}
            return {
                str(kind): {layer: measures_of_weights(weights, *texts[kind]) for layer, weights in by_layer.items()}
                for kind, by_layer in weights_probe.maps.items()
            }

    def _pair_hits(self, part: Chunk) -> Mapping[str, Hits]:
        """The hits of `pair_hits` for each kind of attention; across two texts no offset means anything."""
        kinds = self._model.info.kinds
        read = {"encoder": (part.tokens, part.repeated), "decoder": (part.tokens, part.repeated)}
        if self._start is not None:
            read["decoder"] = target_of(self._start, part.tokens), _after_start(part.repeated)
        hits = {
            kind: pair_hits(read[kind][0].ids, causal=kind == "decoder", context=read[kind][1])
            for kind in kinds
            if kind != "cross"
        }
        nothing = np.zeros((len(PAIR_MEASURES), len(OFFSETS)))
        return hits | {kind: (nothing, nothing) for kind in kinds if kind == "cross"}

    def _facts(self, tokens: Sequence[Tokens], repeated: Sequence[NDArray[np.bool_]], device: str) -> TextFacts:
        import torch

        from attnscope.core.attention.precision import move
        from attnscope.core.facts import TextFacts

        lengths = np.array([len(t) for t in tokens])
        real = np.arange(lengths.max()) < lengths[:, None]
        ids = pad_rows([t.ids for t in tokens])
        special = pad_rows([t.special for t in tokens])
        opening = special & (np.cumsum(~special, axis=1) == 0)
        # Special tokens are in every text, and not rare at all.
        frequency = np.where(special, 0.0, self._frequencies.of(ids))
        # The first token is left out too: where there is no [CLS], heads rest on it, however rare it is.
        ordinary = np.where(real & ~special & (np.arange(ids.shape[1]) > 0), frequency, np.inf)
        rarest = np.isfinite(ordinary) & (ordinary == ordinary.min(1, keepdims=True))

        def tensor(array: NDArray[Any]) -> Tensor:
            return move(torch.from_numpy(array), device)

        embeddings = unit_embeddings(self._model, tensor(ids))
        return TextFacts(
            real=tensor(real),
            special=tensor(special),
            ids=tensor(ids),
            cls=tensor(opening),
            sep=tensor(special & ~opening),
            punctuation=tensor(pad_rows([_punctuation(t) for t in tokens])),
            log_frequency=tensor(frequency),
            embeddings=None if embeddings is None else embeddings.to(device),
            rarest=tensor(rarest),
            context=tensor(pad_rows(repeated)) if any(map(np.any, repeated)) else None,
        )


def unit_embeddings(model: Model, ids: Tensor) -> Tensor | None:
    """Static embeddings of length 1, (batch, token, d), float32, on the model's device; None if they are not known."""
    import torch

    rows = model.static_embeddings(ids.to(model.info.device))
    if rows is None:
        return None
    lengths: Tensor = rows.float().norm(dim=-1, keepdim=True)
    return rows.float() / lengths.clamp(min=torch.finfo(torch.float32).tiny)


def _punctuation(tokens: Tokens) -> NDArray[np.bool_]:
    """Which tokens are punctuation and nothing else."""
    bare = [label.removeprefix("##").replace("·", "") for label in tokens.labels]
    marks = [bool(label) and all(unicodedata.category(c)[0] in "PS" for c in label) for label in bare]
    return np.array(marks, np.bool_) & ~tokens.special


def _after_start(repeated: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which tokens of a target are repeated: its start token stands before them, and the last one is not in it."""
    return np.concatenate([[False], repeated[:-1]])


def decoder_start(model: Model) -> Tokens | None:
    """Tokens that begin with the one that a decoder beside an encoder starts with; None for other models."""
    if len(model.info.kinds) == 1 or model.writer is None:
        return None
    return model.writer.encode_target("a")


def target_of(start: Tokens, tokens: Tokens) -> Tokens:
    """What a decoder beside an encoder reads as it writes a text again: its start token, then all but the end.

    `start` is what `decoder_start` returns.
    """
    return replace(
        tokens,
        ids=np.concatenate([start.ids[:1], tokens.ids[:-1]]),
        labels=(*start.labels[:1], *tokens.labels[:-1]),
        offsets=np.concatenate([start.offsets[:1], tokens.offsets[:-1]]),
        special=np.concatenate([start.special[:1], tokens.special[:-1]]),
    )


def _factors(model: Model) -> dict[tuple[Any, int], Tensor]:
    """What the measures need of the output projections, worked out once for all batches."""
    from attnscope.core.facts import output_factor

    n_heads = dict(zip(model.info.kinds, model.info.n_heads, strict=True))
    return {place: output_factor(weight, n_heads[place[0]]) for place, weight in model.output_projections().items()}
