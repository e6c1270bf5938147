"""Turn texts into padded batches, with the predictions whose loss is measured; `measurers` runs the model on them.

Each row of a batch is a text, or a chunk of a long text. The predictions depend on the model:

- A decoder predicts each next token, and a masked model a random share of the tokens.
- An encoder-decoder predicts a target text: the user's, or else the greedy answer of the model itself.
- A classifier predicts a class: the user's, or else the most likely class of the clean run, which ablates no head.

Special tokens, such as [CLS], are never predicted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnscope.arrays import Integers
from attnscope.core.attention.seam import Kind
from attnscope.corpus import Chunk, TextBlock, chunks, make_batches
from attnscope.corpus.batching import tokens_of
from attnscope.errors import AttnscopeError
from attnscope.models.model import Batch, LossKind, Model
from attnscope.results.tokens import Tokens
from attnscope.studies.inputs.texts import batch_of, special_ids

BATCH_TOKENS = 512
"""The most tokens in a batch, padding included. If a loss is measured, half of it, because logits take memory, too."""


MASKED_SHARE = 0.15
"""The share of ordinary tokens that are masked for a masked model, at least one per row."""

MOST_LIKELY_CLASS = -1
"""A placeholder in `answers`: `ReadBatch.losses` replaces it by the most likely class of the clean run."""


@dataclass(frozen=True, eq=False)
class TextRow:
    """Hold one row of a batch: a text, or a chunk of a long text.

    Attributes:
        text_index: The index of the text in the corpus.
        tokens: The input tokens; for a masked model, some of them are the mask token.
        target: The input tokens of the decoder of an encoder-decoder; None for other models.
        positions: The position of each prediction's logits in the row, (prediction,).
        answers: The right token id, or class index, of each prediction, (prediction,).
        number: The index of the row among the rows of its text; `corpus.make_batches` sorts by it.
        n_rows: The number of rows of the text.
    """

    text_index: int
    tokens: Tokens
    target: Tokens | None
    positions: Integers
    answers: Integers
    number: int = 0
    n_rows: int = 1

    def __len__(self) -> int:
        """Return the number of tokens of the text or of the target, whichever is larger: the row is padded by it."""
        return max(len(self.tokens), len(self.target or ()))

    @property
    def n_tokens(self) -> int:
        """Return the number of tokens that the model reads, target included."""
        return len(self.tokens) + len(self.target or ())


@dataclass(frozen=True, eq=False)
class ReadBatch:
    """Hold the rows of a batch as input of a model. The predictions of all rows are concatenated.

    Attributes:
        batch: The padded tokens.
        text_indices: The index of the text of each row.
        query_masks: By kind of attention, which queries are real tokens and not padding, (row, query) bool. The mask
            "decoder" is also that of the last hidden states, for every model.
        prediction_rows: The row of each prediction, (prediction,).
        positions: The position of each prediction's logits in its row, (prediction,).
        answers: The right token id, or class index, of each prediction, (prediction,).
    """

    batch: Batch
    text_indices: Sequence[int]
    query_masks: Mapping[Kind, Tensor]
    prediction_rows: Tensor
    positions: Tensor
    answers: Tensor

    def log_probabilities(self, logits: Tensor | None, n_repeats: int) -> Tensor | None:
        """Return log probabilities, (repeat, prediction, vocabulary), in at least float32; None if there are no logits.

        Args:
            logits: (repeat · row, token, vocabulary).
            n_repeats: The number of copies of the batch in the logits, for example one per intervention.
        """
        if logits is None:
            return None
        # (repeat · row, token, vocabulary) -> (repeat, row, token, vocabulary) -> (repeat, prediction, vocabulary)
        by_repeat = logits.view(n_repeats, -1, *logits.shape[1:])
        chosen = by_repeat[:, self.prediction_rows, self.positions]
        dtype = torch.promote_types(chosen.dtype, torch.float32)
        return chosen.to(dtype).log_softmax(-1)

    def losses(self, log_probs: Tensor, clean_log_probs: Tensor) -> Tensor:
        """Return the negative log-likelihood of each prediction's right answer, (..., prediction), in nats.

        Args:
            log_probs: Log probabilities, (..., prediction, vocabulary).
            clean_log_probs: The log probabilities of the clean run, (prediction, vocabulary), with or without a first
                axis of size 1. Their argmax is the answer where `answers` has MOST_LIKELY_CLASS.
        """
        answers = self.answers.where(self.answers != MOST_LIKELY_CLASS, clean_log_probs.argmax(-1))
        index = answers.expand(log_probs.shape[:-1])[..., None]
        return -log_probs.gather(-1, index)[..., 0]


class BatchReader:
    """Make batches of texts for one model.

    Args:
        model: The model.
        loss: The kind of prediction whose loss is measured; None = no predictions.
        seed: The seed for choosing the tokens that are masked for a masked model.
        target: The text that an encoder-decoder predicts; None = its own greedy answer to each text.
        answer: The class whose likelihood is measured; None = the most likely class of the clean run.

    Attributes:
        model: The model.
        arguments: All arguments except the model. A worker process makes its own reader from them.

    Raises:
        AttnscopeError: The heads of the model cannot be ablated, a masked model has no mask token, a target was given
            for a model that is no encoder-decoder, or the model has no such class.
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
        # Heads are ablated at the seam: the one function that computes attention in place of the model's own.
        if model.info.path != "seam":
            raise AttnscopeError(
                f"{model.info.name} does not pass its attention through the seam: its heads cannot be taken out",
                "what they attend to can be seen: attnscope heatmap, attnscope heads",
            )
        self.arguments = {"loss": loss, "seed": seed, "target": target, "answer": answer}
        self.model = model
        self._loss = loss
        self._seed = seed
        self._special_ids = special_ids(model)
        self._class = MOST_LIKELY_CLASS if answer is None else model.class_index(answer)
        self._mask_id: Any = model.tokenizer.mask_id
        if loss == "masked" and self._mask_id is None:
            raise AttnscopeError(
                f"the tokenizer of {model.info.name} has no token that hides another",
                "--loss none compares hidden states alone",
            )
        self._given_target = target
        self._has_target = "cross" in model.info.kinds
        # A cache: the bytes of a text's token ids -> the model's own greedy answer
        self._greedy_targets: dict[bytes, Tokens] = {}
        if target is not None and not self._has_target:
            raise AttnscopeError(
                f"{model.info.name} is no encoder-decoder, so it has no target", "leave out --target"
            )

    def batches(self, block: TextBlock) -> Sequence[Sequence[TextRow]]:
        """Return the rows of a block of texts in batches of at most BATCH_TOKENS tokens, the longest rows first."""
        limit = self.model.info.max_tokens
        rows: list[TextRow] = []
        for text in block.texts:
            tokens = tokens_of(text, self.model.tokenizer.encode, self._special_ids)
            candidates = [self._make_row(chunk) for chunk in chunks(tokens, text.index, limit=limit)]
            rows_of_text = [row for row in candidates if row is not None]
            # The number of rows is known only now that rows without predictions are dropped.
            rows += [replace(row, n_rows=len(rows_of_text)) for row in rows_of_text]
        budget = BATCH_TOKENS if self._loss is None else BATCH_TOKENS // 2
        # `make_batches` is typed for chunks. It only uses `len`, `text_index` and `number`, which rows have, too.
        sortable: Any = rows
        return make_batches(sortable, budget)[::-1]  # type: ignore[return-value]  # rows again

    def _make_row(self, chunk: Chunk) -> TextRow | None:
        """Return a chunk as a row; None if it has no ordinary token, or none that a masked model can predict."""
        tokens = chunk.tokens
        ids = tokens.ids
        ordinary_positions = np.flatnonzero(~tokens.special)
        # Chunks overlap. A token that an earlier chunk has, too, is predicted in that chunk only.
        new_positions = ordinary_positions[~chunk.is_repeated[ordinary_positions]]
        if not len(ordinary_positions) or (self._loss == "masked" and not len(new_positions)):
            return None
        target = self._make_target(tokens) if self._has_target else None
        # Find the positions of the predictions' logits, and the right answers, each (prediction,).
        if self._loss == "target" and target is not None:
            # The logits at a token predict the next token.
            is_special = np.isin(target.ids[1:], list(self._special_ids))
            positions = np.flatnonzero(~is_special)
            answers = target.ids[positions + 1]
        elif self._loss == "causal":
            # No logits predict the first token. The logits at a token predict the next token.
            predicted = new_positions[new_positions > 0]
            positions = predicted - 1
            answers = ids[predicted]
        elif self._loss == "masked":
            positions = self._choose_masked(chunk, new_positions)
            answers = ids[positions]
            masked_ids = ids.copy()
            masked_ids[positions] = self._mask_id
            tokens = replace(tokens, ids=masked_ids)
        elif self._loss == "class":
            # One prediction for the whole text, at position 0.
            positions = np.zeros(1, np.int64)
            answers = np.array([self._class])
        elif self._loss == "token_class":
            positions = new_positions
            answers = np.full(len(new_positions), self._class)
        else:
            positions = answers = np.zeros(0, np.int64)
        return TextRow(chunk.text_index, tokens, target, positions, answers, chunk.number)

    def _choose_masked(self, chunk: Chunk, candidates: Integers) -> Integers:
        """Draw the positions that are masked from `candidates`, seeded by the seed, the text and the chunk."""
        # Use raw PCG64 output: NumPy guarantees it across versions, but not the output of Generator methods.
        seed = np.random.SeedSequence([self._seed, chunk.text_index, chunk.number])
        random = np.random.PCG64(seed)
        order = random.random_raw(len(candidates)).argsort(kind="stable")
        n_masked = max(1, round(MASKED_SHARE * len(candidates)))
        return np.sort(candidates[order[:n_masked]])

    def _make_target(self, tokens: Tokens) -> Tokens:
        """Return the input tokens of the decoder for a text: the user's target, or the model's greedy answer."""
        text_generator = self.model.text_generator
        assert text_generator is not None  # every encoder-decoder has one
        if self._given_target is not None:
            target = text_generator.encode_target(self._given_target)
        else:
            # Greedy generation is slow, and several passes need the same answers.
            key = tokens.ids.tobytes()
            if key not in self._greedy_targets:
                self._greedy_targets[key] = text_generator.greedy_target(tokens)
            target = self._greedy_targets[key]
        # Cut the target to the number of positions that the decoder has.
        positions = np.arange(len(target))
        return target.take(positions[: self.model.info.max_tokens])

    def read(self, rows: Sequence[TextRow]) -> ReadBatch:
        """Pad rows to a batch on the model's device, and concatenate their predictions."""
        texts = [row.tokens for row in rows]
        targets = [row.target for row in rows if row.target is not None]
        batch = batch_of(texts, targets).to(self.model.info.device)

        def fill_mask(ids: Tensor, mask: Tensor | None) -> Tensor:
            """Return the mask, True at real tokens; None means that no token is padding."""
            return torch.ones_like(ids, dtype=torch.bool) if mask is None else mask

        text_mask = fill_mask(batch.ids, batch.mask)
        # Without a target, the last hidden states are those of the text.
        decoder_mask = text_mask
        if batch.target_ids is not None:
            decoder_mask = fill_mask(batch.target_ids, batch.target_mask)
        n_predictions = [len(row.positions) for row in rows]
        prediction_rows = np.repeat(np.arange(len(rows)), n_predictions)
        positions = np.concatenate([row.positions for row in rows])
        answers = np.concatenate([row.answers for row in rows])
        device = batch.ids.device
        return ReadBatch(
            batch,
            text_indices=[row.text_index for row in rows],
            # The queries of cross-attention are the decoder's tokens.
            query_masks={"encoder": text_mask, "decoder": decoder_mask, "cross": decoder_mask},
            prediction_rows=torch.from_numpy(prediction_rows).to(device),
            positions=torch.from_numpy(positions).to(device),
            answers=torch.from_numpy(answers).to(device),
        )
