"""Read texts as padded batches of rows for a model without some heads, with what it is to predict.

`measurers` runs the batches. A decoder predicts each next token, a masked model a seeded share of its tokens, an
encoder-decoder its target (what was given, else its own greedy answer), and a classifier the class that is asked for,
else the one that the whole model gives. Special tokens that every text has are never predicted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscope.core.attention.seam import Kind
from attnscope.corpus import Block, Chunk, batches, chunks
from attnscope.corpus.batching import tokens_of
from attnscope.errors import AttnscopeError
from attnscope.models.model import Batch, Loss, Model
from attnscope.results.tokens import Tokens
from attnscope.studies.inputs.texts import batch_of, special_ids

ROW_TOKENS = 512
"""Tokens in a batch of rows, padding included; half as many for a model with a head, as it computes logits too."""

Numbers = NDArray[np.int64]

MASKED = 0.15
"""The share of ordinary tokens that is hidden from a masked model, at least one per text."""

OWN_CLASS = -1
"""The answer that is the class which the whole model gives."""


@dataclass(frozen=True, eq=False)
class Row:
    """Hold one row of a batch: a text, or a chunk of a long one.

    Attributes:
        text_index: The index of the text that it belongs to.
        tokens: The tokens that the model reads, with masks among them.
        target: The tokens that the decoder of an encoder-decoder reads; None for other models.
        positions: The output tokens at which something is predicted, (prediction,).
        answers: The right token or class of each prediction, (prediction,).
        number: Its number among the rows of the text.
        n_rows: How many rows the text has.
    """

    text_index: int
    tokens: Tokens
    target: Tokens | None
    positions: Numbers
    answers: Numbers
    number: int = 0
    n_rows: int = 1

    def __len__(self) -> int:
        """Return its length in tokens; of text and target the longer, which decides the cost of a pass."""
        return max(len(self.tokens), len(self.target or ()))

    @property
    def n_tokens(self) -> int:
        """Return how many tokens are read, those of the target among them."""
        return len(self.tokens) + len(self.target or ())


@dataclass(frozen=True, eq=False)
class ReadBatch:
    """Hold rows as a model takes them.

    Attributes:
        batch: The tokens.
        texts: The index of the text of each row.
        queries: Which queries are real, (row, query), by kind of attention; hidden states are those of the decoder's.
        rows: The row of each prediction.
        positions: The output token at which each prediction is made.
        answers: The right token or class of each prediction.
    """

    batch: Batch
    texts: Sequence[int]
    queries: Mapping[Kind, Tensor]
    rows: Tensor
    positions: Tensor
    answers: Tensor

    def log_probabilities(self, logits: Tensor | None, times: int) -> Tensor | None:
        """Return log probabilities, (time, prediction, vocabulary), in float32 or better; None without logits.

        Args:
            logits: (time · row, token, vocabulary).
            times: How often the batch is repeated in them.
        """
        if logits is None:
            return None
        # Every repetition of the batch has its predictions at the same tokens.
        by_time = logits.view(times, -1, *logits.shape[1:])  # (time, row, token, vocabulary)
        chosen = by_time[:, self.rows, self.positions]
        dtype = torch.promote_types(chosen.dtype, torch.float32)
        return chosen.to(dtype).log_softmax(-1)

    def losses(self, logs: Tensor, whole: Tensor) -> Tensor:
        """Return the negative log-likelihood of the right answer of each prediction, (..., prediction), in nats.

        Args:
            logs: Log probabilities, (..., prediction, vocabulary).
            whole: Those of the whole model, (prediction, vocabulary).
        """
        # Where no class is named, the whole model's own is the right one.
        is_named = self.answers != OWN_CLASS
        answers = self.answers.where(is_named, whole.argmax(-1))
        index = answers.expand(logs.shape[:-1])[..., None]
        return -logs.gather(-1, index)[..., 0]


class Reader:
    """Make batches of texts for one model.

    Args:
        model: The model.
        loss: What it is to predict; None = nothing.
        seed: Of the choice of tokens that are hidden from a masked model.
        target: What an encoder-decoder is to write; None = its own greedy answer to each text.
        answer: The class whose likelihood is measured; None = the one that the whole model gives.

    Attributes:
        model: The model.
        arguments: All but the model, by which workers make another one.

    Raises:
        AttnscopeError: The model has no mask token to hide others with, no target to write, or no such class.
    """

    def __init__(
        self,
        model: Model,
        loss: Loss | None,
        *,
        seed: int = 0,
        target: str | None = None,
        answer: str | None = None,
    ) -> None:
        self.arguments = {"loss": loss, "seed": seed, "target": target, "answer": answer}
        self.model = model
        self._loss = loss
        self._seed = seed
        self._special = special_ids(model)
        self._class = OWN_CLASS if answer is None else model.label_number(answer)
        self._mask_id: Any = model.tokenizer.mask_id if loss == "masked" else None
        if loss == "masked" and self._mask_id is None:
            raise AttnscopeError(
                f"the tokenizer of {model.info.name} has no token that hides another",
                "--loss none compares hidden states alone",
            )
        self._given = target
        self._has_target = "cross" in model.info.kinds
        self._targets: dict[bytes, Tokens] = {}
        if target is not None and not self._has_target:
            raise AttnscopeError(
                f"{model.info.name} is no encoder-decoder, so it has no target", "leave out --target"
            )

    def batches(self, block: Block) -> Sequence[Sequence[Row]]:
        """Return the texts of a block in batches of at most ROW_TOKENS tokens, the longest first."""
        limit = self.model.info.max_tokens
        rows: list[Row] = []
        for text in block.texts:
            tokens = tokens_of(text, self.model.tokenizer.encode, self._special)
            # Chunks without anything to read or to hide are no rows.
            of_text = [self._row(chunk) for chunk in chunks(tokens, text.index, limit=limit)]
            kept = [row for row in of_text if row is not None]
            rows += [replace(row, n_rows=len(kept)) for row in kept]
        # With a head, the logits of a row are broad.
        budget = ROW_TOKENS if self._loss is None else ROW_TOKENS // 2
        parts: Any = rows
        return batches(parts, budget)[::-1]  # type: ignore[return-value]  # rows, as they came

    def _row(self, chunk: Chunk) -> Row | None:
        """Return a chunk as a row; None if there is nothing to read in it, or to hide."""
        # Only tokens that no earlier chunk had are predicted.
        tokens = chunk.tokens
        ids = tokens.ids
        ordinary = np.flatnonzero(~tokens.special)
        fresh = ordinary[~chunk.repeated[ordinary]]
        target = None
        positions = answers = np.zeros(0, np.int64)
        if not len(ordinary) or (self._loss == "masked" and not len(fresh)):
            return None
        if self._has_target:
            target = self._target(tokens)
        # Find the predictions; in a decoder, the logits at one token predict the next.
        if self._loss == "target" and target is not None:
            is_special = np.isin(target.ids[1:], list(self._special))
            positions = np.flatnonzero(~is_special)
            answers = target.ids[positions + 1]
        elif self._loss == "causal":
            answers = ids[fresh[fresh > 0]]
            positions = fresh[fresh > 0] - 1
        elif self._loss == "masked":
            positions = self._choose_hidden(chunk, fresh)
            answers = ids[positions]
            hidden = ids.copy()
            hidden[positions] = self._mask_id
            tokens = replace(tokens, ids=hidden)
        elif self._loss in ("class", "token_class"):
            positions = np.zeros(1, np.int64) if self._loss == "class" else fresh
            answers = np.full(len(positions), self._class)
        return Row(chunk.text_index, tokens, target, positions, answers, chunk.number)

    def _choose_hidden(self, chunk: Chunk, ordinary: Numbers) -> Numbers:
        """Choose the tokens that are hidden, by the seed, the text and the chunk."""
        # Raw numbers of PCG64: NumPy promises that they stay the same, which it does not of Generator's methods.
        seed = np.random.SeedSequence([self._seed, chunk.text_index, chunk.number])
        random = np.random.PCG64(seed)
        order = random.random_raw(len(ordinary)).argsort(kind="stable")
        n_hidden = max(1, round(MASKED * len(ordinary)))
        return np.sort(ordinary[order[:n_hidden]])

    def _target(self, tokens: Tokens) -> Tokens:
        """Return the tokens that the decoder beside an encoder reads; keep greedy answers, as they are slow."""
        writer = self.model.writer
        assert writer is not None  # of an encoder-decoder
        key = tokens.ids.tobytes()
        target = self._targets.get(key)
        if self._given is not None:
            target = writer.encode_target(self._given)
        elif target is None:
            target = self._targets[key] = writer.greedy_target(tokens)
        # The decoder reads no more than it has positions for.
        positions = np.arange(len(target))
        return target.take(positions[: self.model.info.max_tokens])

    def read(self, rows: Sequence[Row]) -> ReadBatch:
        """Pad rows to a batch, on the model's device."""
        texts = [row.tokens for row in rows]
        targets = [row.target for row in rows if row.target is not None]
        batch = batch_of(texts, targets).to(self.model.info.device)

        def find_real(ids: Tensor, mask: Tensor | None) -> Tensor:
            return torch.ones_like(ids, dtype=torch.bool) if mask is None else mask

        real = find_real(batch.ids, batch.mask)
        decoded = real if batch.target_ids is None else find_real(batch.target_ids, batch.target_mask)
        # Row, position and answer of each prediction: (3, prediction).
        n_predictions = [len(row.positions) for row in rows]
        numbers = np.repeat(np.arange(len(rows)), n_predictions)
        positions = np.concatenate([row.positions for row in rows])
        answers = np.concatenate([row.answers for row in rows])
        stacked = np.stack([numbers, positions, answers])
        predictions = torch.from_numpy(stacked).to(batch.ids.device)
        queries: dict[Kind, Tensor] = {"encoder": real, "decoder": decoded, "cross": decoded}
        return ReadBatch(batch, [row.text_index for row in rows], queries, *predictions)


def require_rerunnable(model: Model) -> Model:
    """Return the model.

    Raises:
        AttnscopeError: Its heads cannot be taken out.
    """
    if model.info.path != "seam":
        raise AttnscopeError(
            f"{model.info.name} does not pass its attention through the seam: its heads cannot be taken out",
            "what they attend to can be seen: attnscope heatmap, attnscope heads",
        )
    return model
