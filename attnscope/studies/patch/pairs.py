"""Read pairs for a model: tokens of one length, the position of the answer, and its tokens or classes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attnscope.corpus.formats import Problem
from attnscope.corpus.pairs import Pair
from attnscope.errors import AttnscopeError
from attnscope.models.info import require_length
from attnscope.models.model import Batch, Model
from attnscope.results.tokens import Tokens
from attnscope.studies.inputs.texts import batch_of

BATCH_TOKENS = 512
"""Tokens in a batch of pairs, of either side."""


@dataclass(frozen=True, eq=False)
class ReadPair:
    """Hold a pair as a model reads it; both texts have the same number of tokens.

    Attributes:
        position: The token whose logits hold the answers; 0 where a text has one row of logits.
        right: Numbers of the right answers: tokens, or classes.
        wrong: Numbers of the wrong answers.
    """

    pair: Pair
    clean: Tokens
    corrupt: Tokens
    position: int
    right: tuple[int, ...]
    wrong: tuple[int, ...]

    @property
    def ids(self) -> tuple[bytes, bytes]:
        """Return the token numbers of the clean and of the corrupt text."""
        return self.clean.ids.tobytes(), self.corrupt.ids.tobytes()


def read_pairs(
    model: Model,
    pairs: Iterable[Pair],
    answer: str | None = None,
) -> tuple[list[ReadPair], list[Problem]]:
    """Return the pairs that can be patched, and the problems of the others.

    Args:
        model: A model with a head.
        pairs: The pairs.
        answer: A class that is right against all others; None = the pairs name their answers.

    Raises:
        AttnscopeError: The model predicts nothing that can be compared, or has no such class.
    """
    reader = _Reader(model, answer)
    read: list[ReadPair] = []
    problems: list[Problem] = []
    first_with: dict[tuple[bytes, bytes], Pair] = {}
    for pair in pairs:
        try:
            read_pair = reader.read(pair)
            # Texts that differ in case or blanks alone may have the same tokens.
            first = first_with.setdefault(read_pair.ids, pair)
            if first is not pair:
                raise AttnscopeError(f"it has the tokens of pair {first.line}, which counts once")
            read.append(read_pair)
        except AttnscopeError as error:
            problems.append(Problem(pair.source, pair.line, error.message))
    return read, problems


def read_target(model: Model, text: str, tokens: Tokens, target: str) -> tuple[int, int]:
    """Return which token's logits hold a target, and its number among them.

    Args:
        model: A model with a head.
        text: The text; "" for a picture.
        tokens: The tokens that the model reads.
        target: A class by label or number, else what continues the text or stands for its mask.

    Raises:
        AttnscopeError: The model predicts no such thing, or there is no such target.
    """
    # Classes belong to the whole text; words to its last token, or its mask.
    reader = _Reader(model)
    if model.loss == "token_class":
        raise AttnscopeError(
            f"{model.info.name} gives each token a class", "name a model with one class per text"
        )
    if model.labels:
        numbers = map(str, range(len(model.labels)))
        if target not in model.labels and target in numbers:
            return 0, int(target)
        return 0, model.label_number(target)
    try:
        position = reader.predicting(tokens)
        return position, reader.token(target, text, tokens, position)
    except AttnscopeError as error:
        raise AttnscopeError(f"the text cannot be asked for {target!r}: {error.message}") from error


class _Reader:
    def __init__(self, model: Model, answer: str | None = None) -> None:
        if model.loss not in ("causal", "masked", "class", "token_class"):
            raise AttnscopeError(
                f"{model.info.name} predicts neither the next token, nor a masked one, nor classes: it has no answers",
                "choose a decoder, a classifier, or an encoder with its head; attnscope ablate compares hidden states",
            )
        self._model = model
        self._tokenizer = model.tokenizer
        self._ordinary = frozenset(self._tokenizer.ordinary_ids())
        self._answer = None if answer is None else model.label_number(answer)

    def read(self, pair: Pair) -> ReadPair:
        """Return a pair as the model reads it; refuse one that cannot be patched."""
        # Patching replaces token by token, so both texts need the same number.
        clean: Tokens = self._tokenizer.encode(pair.clean)
        corrupt: Tokens = self._tokenizer.encode(pair.corrupt)
        for tokens in (clean, corrupt):
            require_length(self._model.info, len(tokens))
            self._require_known(tokens.ids.tolist())
        if len(clean) != len(corrupt):
            raise AttnscopeError(
                f"its texts have {len(clean)} and {len(corrupt)} tokens: patching needs the same number"
            )
        if np.array_equal(clean.ids, corrupt.ids):
            raise AttnscopeError("its texts have the same tokens")
        # The answers must stand at one token of both texts, and differ.
        position = 0
        if self._model.loss == "token_class":
            position = int((clean.ids != corrupt.ids).argmax())
        elif self._model.loss != "class":
            position = self.predicting(clean)
            if self.predicting(corrupt) != position:
                raise AttnscopeError("the answer is not at the same token of both texts")
        right = self._answers(pair, "right", clean, position)
        wrong = self._answers(pair, "wrong", clean, position)
        if both := set(right) & set(wrong):
            raise AttnscopeError(f"{spell_answer(self._model, both.pop())!r} is both right and wrong")
        return ReadPair(pair, clean, corrupt, position, right, wrong)

    def _require_known(self, ids: list[int]) -> None:
        batch = torch.tensor([ids], device=self._model.info.device)
        self._model.static_embeddings(batch)

    def predicting(self, tokens: Tokens) -> int:
        """Return the last token of a text, or its mask."""
        if self._model.loss == "causal":
            return int(np.flatnonzero(~tokens.special)[-1])
        masks = np.flatnonzero(tokens.ids == self._tokenizer.mask_id)
        if len(masks) != 1:
            raise AttnscopeError(f"it has {len(masks)} mask tokens, where it needs one")
        return int(masks[0])

    def _answers(
        self,
        pair: Pair,
        side: Literal["right", "wrong"],
        clean: Tokens,
        position: int,
    ) -> tuple[int, ...]:
        """Return the numbers of the right or of the wrong answers, each once."""
        # A class that is right in all pairs is right against all others.
        if self._answer is not None:
            classes = range(len(self._model.labels))
            is_right = side == "right"
            return tuple(number for number in classes if (number == self._answer) == is_right)
        answers = pair.right if side == "right" else pair.wrong
        if not answers:
            raise AttnscopeError(f"it has no field {side!r}")
        if self._model.labels:
            numbers = [self._model.label_number(str(answer)) for answer in answers]
        else:
            numbers = [self.token(answer, pair.clean, clean, position) for answer in answers]
            self._require_known(numbers)
        return tuple(dict.fromkeys(numbers))

    def token(self, answer: str | int, text: str, tokens: Tokens, position: int) -> int:
        """Return the token that continues the clean text, or that stands for its mask."""
        if isinstance(answer, int):
            return answer
        # Split the text where the answer goes: at its end, or at the mask. `others` are the tokens around it.
        others = tokens.ids.tolist()
        before = text
        after = ""
        start = position + 1
        if self._model.loss == "masked":
            first, last = tokens.offsets[position].tolist()
            if first < 0:
                raise AttnscopeError(
                    "its mask cannot be found in the text: give numbers of tokens as answers"
                )
            before = text[:first]
            after = text[last:]
            start = position
            del others[position]
        # Accept the first spelling that adds exactly one ordinary token, and changes no other.
        for spelling in _spellings(answer, before):
            ids = self._tokenizer.encode(before + spelling + after).ids.tolist()
            if len(ids) <= start:
                continue
            number = int(ids.pop(start))
            is_ordinary = not self._ordinary or number in self._ordinary
            if ids == others and is_ordinary:
                return number
        raise AttnscopeError(f"the answer {answer!r} is not a single token after this text")


def _spellings(answer: str, before: str) -> tuple[str, ...]:
    """Return an answer as it may be written after a text: a word gets a space, digits go on after digits."""
    # A word goes on without a space only after a space, and a number also after a digit.
    spaced = f" {answer}"
    last = before[-1:]
    first = answer[0]
    is_word = last.strip() and first.isalnum()
    goes_on = last.isdigit() and first.isdigit()
    if is_word and not goes_on:
        return spaced, answer
    return answer, spaced


def spell_answer(model: Model, number: int) -> str:
    """Return the name of a class, or the text of a token."""
    return model.labels[number] if model.labels else str(model.tokenizer.spell(number))


@dataclass(frozen=True, eq=False)
class PairBatch:
    """Hold pairs of one length, unpadded.

    Attributes:
        numbers: Their numbers among all pairs.
        clean: The clean texts.
        corrupt: The corrupt ones.
        last: At how many of the last tokens logits are needed; None = at all.
        row: Which row of those logits holds the answers.
        asked: Numbers of the answers of all pairs, in order, (answer,).
        right: Which of them are right answers, (pair, answer).
        wrong: Which are wrong ones.
    """

    numbers: NDArray[np.int64]
    clean: Batch
    corrupt: Batch
    last: int | None
    row: int
    asked: Tensor
    right: Tensor
    wrong: Tensor

    @property
    def first_difference(self) -> int:
        """Return the first token in which the texts of any pair differ."""
        differs = (self.clean.ids != self.corrupt.ids).any(0)
        return int(differs.int().argmax())

    def difference(self, logits: Tensor) -> Tensor:
        """Return the logit difference right - wrong of each text, (time, pair), in float32 or better.

        The score of several answers is the logarithm of the sum of exp.

        Args:
            logits: (time · pair, token, vocabulary); `last` says which tokens. Or of the answers in `asked` alone.
        """
        # (time * pair, vocabulary) -> (time, pair, answer)
        at_answer = logits[:, self.row]
        if at_answer.shape[1] != len(self.asked):
            at_answer = at_answer[:, self.asked]
        wide = torch.promote_types(logits.dtype, torch.float32)
        at_answer = at_answer.to(wide).view(-1, *self.right.shape)
        # Answers of other pairs count nothing.
        right = at_answer.masked_fill(~self.right, -torch.inf)
        wrong = at_answer.masked_fill(~self.wrong, -torch.inf)
        return right.logsumexp(-1) - wrong.logsumexp(-1)


def batches_of(model: Model, read: Sequence[ReadPair], numbers: Iterable[int]) -> list[PairBatch]:
    """Return pairs in batches of one length, so that nothing is padded and logits are needed at one token."""
    # Pairs of one length and answer position share a batch; the answers that come last are first.
    by_shape: dict[tuple[int, int], list[int]] = {}
    for number in numbers:
        pair = read[number]
        shape = (len(pair.clean), -pair.position)
        by_shape.setdefault(shape, []).append(number)
    pair_batches = []
    for shape, alike in sorted(by_shape.items()):
        step = max(1, BATCH_TOKENS // shape[0])
        for start in range(0, len(alike), step):
            chosen = alike[start : start + step]
            pair_batches.append(_batch_of(model, read, chosen))
    return pair_batches


def _batch_of(model: Model, read: Sequence[ReadPair], numbers: list[int]) -> PairBatch:
    """Return pairs of one length and answer position as a batch."""
    device = model.info.device
    pairs = [read[number] for number in numbers]
    first = pairs[0]
    # Logits are needed from the token on that holds the answers; models that do not continue a text give all.
    last = None
    row = first.position
    if model.loss == "causal":
        last = len(first.clean) - row
        row = 0
    # The answers that any pair asks for, once each.
    answers = sorted({*chain.from_iterable(pair.right + pair.wrong for pair in pairs)})
    # Which of them are right, and which are wrong, (pair, answer).
    right = np.stack([np.isin(answers, pair.right) for pair in pairs])
    wrong = np.stack([np.isin(answers, pair.wrong) for pair in pairs])
    return PairBatch(
        numbers=np.array(numbers),
        clean=batch_of([pair.clean for pair in pairs]).to(device),
        corrupt=batch_of([pair.corrupt for pair in pairs]).to(device),
        last=last,
        row=row,
        asked=torch.tensor(answers, device=device),
        right=torch.from_numpy(right).to(device),
        wrong=torch.from_numpy(wrong).to(device),
    )
