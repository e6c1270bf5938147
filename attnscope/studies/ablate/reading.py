"""Turn texts into padded batches, with the predictions whose loss is measured; `measurers` runs them.

Each row of a batch is a text, or a chunk of a long one. What is predicted depends on the model: each next token
(decoder), a random share of the tokens (masked model), the target text (encoder-decoder), or a class (classifier). The
target is the user's, else the model's own greedy answer. The class is the user's, else the one that the whole model,
with all its heads, finds most likely. Special tokens that every text has are never predicted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscope.core.attention.seam import Kind
from attnscope.corpus import Chunk, TextBlock, batches, chunks
from attnscope.corpus.batching import tokens_of
from attnscope.errors import AttnscopeError
from attnscope.models.model import Batch, LossKind, Model
from attnscope.results.tokens import Tokens
from attnscope.studies.inputs.texts import batch_of, special_ids

BATCH_TOKENS = 512
"""The most tokens in a batch, padding included; half as many if a loss is measured, for logits take memory too."""

Indices = NDArray[np.int64]

MASKED_SHARE = 0.15
"""The share of ordinary tokens that is hidden from a masked model, at least one per text."""

OWN_CLASS = -1
"""Stands among the answers for the class that the whole model finds most likely."""


@dataclass(frozen=True, eq=False)
class TextRow:
    """Hold one row of a batch: a text, or a chunk of a long one.

    Attributes:
        text_index: The index of its text in the corpus.
        tokens: The tokens that the model reads; for a masked model some are replaced by the mask token.
        target: The tokens that the decoder of an encoder-decoder reads; None for other models.
        positions: The positions of the logits that predict, (prediction,).
        answers: The right id or class of each prediction, (prediction,).
        number: Its number among the rows of the text, from 0; `corpus.batches` sorts by it.
        n_rows: How many rows the text has.
    """

    text_index: int
    tokens: Tokens
    target: Tokens | None
    positions: Indices
    answers: Indices
    number: int = 0
    n_rows: int = 1

    def __len__(self) -> int:
        """Return its length in tokens: that of text or target, whichever is longer."""
        return max(len(self.tokens), len(self.target or ()))

    @property
    def n_tokens(self) -> int:
        """Return how many tokens are read, target included."""
        return len(self.tokens) + len(self.target or ())


@dataclass(frozen=True, eq=False)
class ReadBatch:
    """Hold rows as a model takes them, and their predictions one after the other.

    Attributes:
        batch: The padded tokens.
        texts: The index of the text of each row.
        queries: Which queries are no padding, (row, query), by kind of attention; "decoder" also holds for the last
            hidden states, whatever the model.
        rows: The row of each prediction, (prediction,).
        positions: The position of its logits in the row, (prediction,).
        answers: Its right id or class, (prediction,).
    """

    batch: Batch
    texts: Sequence[int]
    queries: Mapping[Kind, Tensor]
    rows: Tensor
    positions: Tensor
    answers: Tensor

    def log_probabilities(self, logits: Tensor | None, n_repeats: int) -> Tensor | None:
        """Return log probabilities, (repeat, prediction, vocabulary), in float32 or better; None without logits.

        Args:
            logits: (repeat · row, token, vocabulary).
            n_repeats: How often the batch is repeated in them.
        """
        if logits is None:
            return None
        # Every repeat of the batch has its predictions at the same tokens: (repeat, row, token, vocabulary).
        by_repeat = logits.view(n_repeats, -1, *logits.shape[1:])
        chosen = by_repeat[:, self.rows, self.positions]
        dtype = torch.promote_types(chosen.dtype, torch.float32)
        return chosen.to(dtype).log_softmax(-1)

    def losses(self, logs: Tensor, whole: Tensor) -> Tensor:
        """Return the negative log-likelihood of the right answer of each prediction, (..., prediction), in nats.

        Args:
            logs: Log probabilities, (..., prediction, vocabulary).
            whole: Those of the whole model, (prediction, vocabulary) or (1, prediction, vocabulary).
        """
        answers = self.answers.where(self.answers != OWN_CLASS, whole.argmax(-1))
        index = answers.expand(logs.shape[:-1])[..., None]
        return -logs.gather(-1, index)[..., 0]


class BatchReader:
    """Make batches of texts for one model.

    Args:
        model: The model.
        loss: What it is to predict; None = nothing.
        seed: Draws the tokens that are hidden from a masked model.
        target: The text that an encoder-decoder is to predict; None = its own greedy answer to each text.
        answer: The class whose likelihood is measured; None = the one that the whole model finds most likely.

    Attributes:
        model: The model.
        arguments: All arguments but the model: a worker makes a reader of these and its own copy of the model.

    Raises:
        AttnscopeError: The heads of the model cannot be taken out; or it has no mask token to hide others with, no
            target to predict, or no such class.
    """

    def __init__(
        self,
        model: Model,
        loss: LossKind | None,
        *,
        seed: int = 0,
        target: str | None = None,
        answer: str | None = None,
    ) -> None:
        # Heads are taken out at the seam, the one function that computes attention in place of the model's own.
        if model.info.path != "seam":
            raise AttnscopeError(
                f"{model.info.name} does not pass its attention through the seam: its heads cannot be taken out",
                "what they attend to can be seen: attnscope heatmap, attnscope heads",
            )
        self.arguments = {"loss": loss, "seed": seed, "target": target, "answer": answer}
        self.model = model
        self._loss = loss
        self._seed = seed
        self._special = special_ids(model)
        self._class = OWN_CLASS if answer is None else model.label_number(answer)
        self._mask_id: Any = model.tokenizer.mask_id
        if loss == "masked" and self._mask_id is None:
            raise AttnscopeError(
                f"the tokenizer of {model.info.name} has no token that hides another",
                "--loss none compares hidden states alone",
            )
        self._given_target = target
        self._has_target = "cross" in model.info.kinds
        # The model's own answers, by the ids of the texts
        self._greedy_targets: dict[bytes, Tokens] = {}
        if target is not None and not self._has_target:
            raise AttnscopeError(
                f"{model.info.name} is no encoder-decoder, so it has no target", "leave out --target"
            )

    def batches(self, block: TextBlock) -> Sequence[Sequence[TextRow]]:
        """Return the texts of a block in batches of at most BATCH_TOKENS tokens, the longest first."""
        limit = self.model.info.max_tokens
        rows: list[TextRow] = []
        for text in block.texts:
            tokens = tokens_of(text, self.model.tokenizer.encode, self._special)
            candidates = [self._row(chunk) for chunk in chunks(tokens, text.index, limit=limit)]
            text_rows = [row for row in candidates if row is not None]
            rows += [replace(row, n_rows=len(text_rows)) for row in text_rows]
        budget = BATCH_TOKENS if self._loss is None else BATCH_TOKENS // 2
        # `batches` is typed for chunks; what it reads of them, rows have too: length, `text_index` and `number`.
        sortable: Any = rows
        return batches(sortable, budget)[::-1]  # type: ignore[return-value]  # rows again

    def _row(self, chunk: Chunk) -> TextRow | None:
        """Return a chunk as a row; None if it has no ordinary token, or a masked model has none to predict in it."""
        tokens = chunk.tokens
        ids = tokens.ids
        ordinary = np.flatnonzero(~tokens.special)
        # Tokens that an earlier chunk had as well are predicted there.
        fresh = ordinary[~chunk.repeated[ordinary]]
        if not len(ordinary) or (self._loss == "masked" and not len(fresh)):
            return None
        target = self._target(tokens) if self._has_target else None
        # Find the predictions: the positions of their logits, and the right answers.
        if self._loss == "target" and target is not None:
            # The logits at each token predict the next.
            is_special = np.isin(target.ids[1:], list(self._special))
            positions = np.flatnonzero(~is_special)
            answers = target.ids[positions + 1]
        elif self._loss == "causal":
            predicted = fresh[fresh > 0]
            positions = predicted - 1
            answers = ids[predicted]
        elif self._loss == "masked":
            positions = self._choose_hidden(chunk, fresh)
            answers = ids[positions]
            masked_ids = ids.copy()
            masked_ids[positions] = self._mask_id
            tokens = replace(tokens, ids=masked_ids)
        elif self._loss == "class":
            positions = np.zeros(1, np.int64)
            answers = np.array([self._class])
        elif self._loss == "token_class":
            positions = fresh
            answers = np.full(len(fresh), self._class)
        else:
            positions = answers = np.zeros(0, np.int64)
        return TextRow(chunk.text_index, tokens, target, positions, answers, chunk.number)

    def _choose_hidden(self, chunk: Chunk, ordinary: Indices) -> Indices:
        """Draw the tokens that are hidden, by the seed, the text and the chunk."""
        # PCG64 itself: NumPy promises that its raw output stays the same, but not so of the methods of a Generator.
        seed = np.random.SeedSequence([self._seed, chunk.text_index, chunk.number])
        random = np.random.PCG64(seed)
        order = random.random_raw(len(ordinary)).argsort(kind="stable")
        n_hidden = max(1, round(MASKED_SHARE * len(ordinary)))
        return np.sort(ordinary[order[:n_hidden]])

    def _target(self, tokens: Tokens) -> Tokens:
        """Return the tokens that the decoder of an encoder-decoder reads for a text."""
        text_generator = self.model.text_generator
        assert text_generator is not None  # every encoder-decoder has one
        if self._given_target is not None:
            target = text_generator.encode_target(self._given_target)
        else:
            # Greedy answers are slow: write each once.
            key = tokens.ids.tobytes()
            if key not in self._greedy_targets:
                self._greedy_targets[key] = text_generator.greedy_target(tokens)
            target = self._greedy_targets[key]
        # The decoder reads no more than it has positions for.
        positions = np.arange(len(target))
        return target.take(positions[: self.model.info.max_tokens])

    def read(self, rows: Sequence[TextRow]) -> ReadBatch:
        """Pad rows to a batch on the model's device, and list their predictions."""
        texts = [row.tokens for row in rows]
        targets = [row.target for row in rows if row.target is not None]
        batch = batch_of(texts, targets).to(self.model.info.device)

        def is_real(ids: Tensor, mask: Tensor | None) -> Tensor:
            return torch.ones_like(ids, dtype=torch.bool) if mask is None else mask

        real = is_real(batch.ids, batch.mask)
        decoded = real if batch.target_ids is None else is_real(batch.target_ids, batch.target_mask)
        n_predictions = [len(row.positions) for row in rows]
        row_indices = np.repeat(np.arange(len(rows)), n_predictions)
        positions = np.concatenate([row.positions for row in rows])
        answers = np.concatenate([row.answers for row in rows])
        device = batch.ids.device
        return ReadBatch(
            batch,
            texts=[row.text_index for row in rows],
            queries={"encoder": real, "decoder": decoded, "cross": decoded},
            rows=torch.from_numpy(row_indices).to(device),
            positions=torch.from_numpy(positions).to(device),
            answers=torch.from_numpy(answers).to(device),
        )
