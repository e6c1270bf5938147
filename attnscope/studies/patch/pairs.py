"""Read pairs for a model, and cut them into batches: the tokens, the position of the answer, and its number.

`study` patches the batches, and `studies.maps.derived` reads a single target.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from attnscope.corpus.formats import Problem
from attnscope.corpus.pairs import Pair
from attnscope.errors import AttnscopeError
from attnscope.models.info import require_length
from attnscope.models.model import Model
from attnscope.results.tokens import Tokens
from attnscope.studies.inputs.texts import batch_of

BATCH_TOKENS = 512
"""How many tokens the clean texts of a batch have at most; the corrupt ones have as many."""


@dataclass(frozen=True, eq=False)
class ReadPair:
    """Hold a pair as a model reads it; both texts have the same number of tokens.

    Attributes:
        pair: The pair as it was given.
        clean: The tokens of the clean text.
        corrupt: The tokens of the corrupt text.
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
            # Two pairs whose texts differ in case or blanks alone may have the same tokens.
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
    reader = _Reader(model)
    if model.loss == "token_class":
        raise AttnscopeError(
            f"{model.info.name} gives each token a class", "name a model with one class per text"
        )
    # Classes belong to the whole text; words to its last token, or its mask.
    if model.labels:
        numbers = list(map(str, range(len(model.labels))))
        if target in numbers and target not in model.labels:
            return 0, int(target)
        return 0, model.label_number(target)
    try:
        position = reader.predicting(tokens)
        return position, reader.token(target, text, tokens, position)
    except AttnscopeError as error:
        raise AttnscopeError(f"the text cannot be asked for {target!r}: {error.message}") from error


class _Reader:
    """Read pairs for one model.

    Args:
        model: A model with a head.
        answer: A class that is right against all others; None = the pairs name their answers.
    """

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
        for number in right:
            if number in wrong:
                answer = spell_answer(self._model, number)
                raise AttnscopeError(f"{answer!r} is both right and wrong")
        return ReadPair(
            pair,
            clean,
            corrupt,
            position,
            right,
            wrong,
        )

    def _require_known(self, ids: list[int]) -> None:
        """Refuse tokens that the model has no embedding for."""
        batch = torch.tensor([ids], device=self._model.info.device)
        self._model.static_embeddings(batch)

    def predicting(self, tokens: Tokens) -> int:
        """Return the position at which the model predicts words: the last token of a text, or its mask."""
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
            if side == "right":
                return (self._answer,)
            classes = range(len(self._model.labels))
            return tuple(number for number in classes if number != self._answer)
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
        """Return the number of the token that an answer is; refuse one of several tokens.

        Args:
            answer: What continues the text, or fills its mask; a number is that of the token.
            text: The text.
            tokens: Its tokens.
            position: The token that predicts the answer: the last one, or the mask.
        """
        if isinstance(answer, int):
            return answer
        # Split the text where the answer goes: at its end, or at the mask. `others` are the tokens around it.
        others = tokens.ids.tolist()
        before = text
        after = ""
        answer_position = position + 1
        if self._model.loss == "masked":
            first, last = tokens.offsets[position].tolist()
            if first < 0:
                raise AttnscopeError(
                    "its mask cannot be found in the text: give numbers of tokens as answers"
                )
            before = text[:first]
            after = text[last:]
            answer_position = position
            del others[position]
        # Accept the first spelling that adds exactly one ordinary token, and changes no other.
        for spelling in _spellings(answer, before):
            ids = self._tokenizer.encode(before + spelling + after).ids.tolist()
            if len(ids) <= answer_position:
                continue
            number = int(ids.pop(answer_position))
            is_ordinary = not self._ordinary or number in self._ordinary
            if ids == others and is_ordinary:
                return number
        raise AttnscopeError(f"the answer {answer!r} is not a single token after this text")


def _spellings(answer: str, before: str) -> tuple[str, ...]:
    """Return an answer with and without a space in front, the likelier spelling after a text first."""
    # A word has a space before it, unless the text ends with one; digits go on after digits.
    spaced = f" {answer}"
    last = before[-1:]
    first = answer[0]
    is_word = last.strip() and first.isalnum()
    is_number = last.isdigit() and first.isdigit()
    if is_word and not is_number:
        return spaced, answer
    return answer, spaced


def spell_answer(model: Model, number: int) -> str:
    """Return the name of a class, or the text of a token."""
    return model.labels[number] if model.labels else str(model.tokenizer.spell(number))


class PairBatch:
    """Hold pairs of one length and answer position as a model takes them, unpadded.

    Args:
        model: The model.
        numbers: The numbers of the pairs among all pairs.
        pairs: These pairs.

    Attributes:
        numbers: The numbers of the pairs, (pair,).
        clean: The clean texts.
        corrupt: The corrupt texts.
        last: At how many of the last tokens logits are needed; None = at all.
        asked: The numbers of the answers of all pairs, once each, ascending, (answer,).
    """

    def __init__(self, model: Model, numbers: Sequence[int], pairs: Sequence[ReadPair]) -> None:
        device = model.info.device
        self.numbers = np.array(numbers)
        self.clean = batch_of([pair.clean for pair in pairs]).to(device)
        self.corrupt = batch_of([pair.corrupt for pair in pairs]).to(device)
        # Logits are needed from the token on that holds the answers; models that do not continue a text give all.
        self.last: int | None = None
        self._row = pairs[0].position
        if model.loss == "causal":
            self.last = self.clean.ids.shape[1] - self._row
            self._row = 0
        # Which of all answers are right for each pair, and which are wrong, (pair, answer).
        answers = sorted({*chain.from_iterable(pair.right + pair.wrong for pair in pairs)})
        right = np.stack([np.isin(answers, pair.right) for pair in pairs])
        wrong = np.stack([np.isin(answers, pair.wrong) for pair in pairs])
        self.asked = torch.tensor(answers, device=device)
        self._right = torch.from_numpy(right).to(device)
        self._wrong = torch.from_numpy(wrong).to(device)

    @property
    def first_difference(self) -> int:
        """Return the first token in which the texts of any pair differ."""
        differs = (self.clean.ids != self.corrupt.ids).any(0)
        return int(differs.int().argmax())

    def difference(self, logits: Tensor) -> Tensor:
        """Return the logit difference right - wrong of each text, (time, pair), in float32 or better.

        The score of several answers is the logarithm of the sum of exp.

        Args:
            logits: (time · pair, token, vocabulary), the pairs one or several times; `last` says which tokens. Instead
                of the vocabulary it may have the answers in `asked` alone.
        """
        # (time * pair, vocabulary) -> (time, pair, answer)
        at_answer = logits[:, self._row]
        if at_answer.shape[1] != len(self.asked):
            at_answer = at_answer[:, self.asked]
        precision = torch.promote_types(logits.dtype, torch.float32)
        at_answer = at_answer.to(precision).view(-1, *self._right.shape)
        # Answers of other pairs count nothing.
        right = at_answer.masked_fill(~self._right, -torch.inf)
        wrong = at_answer.masked_fill(~self._wrong, -torch.inf)
        return right.logsumexp(-1) - wrong.logsumexp(-1)


def batches_of(model: Model, read: Sequence[ReadPair], numbers: Iterable[int]) -> list[PairBatch]:
    """Return the pairs of some numbers in batches of one length and answer position, so that nothing is padded."""
    # Of pairs of one length, those whose answers come last are first.
    by_shape: dict[tuple[int, int], list[int]] = {}
    for number in numbers:
        pair = read[number]
        shape = (len(pair.clean), -pair.position)
        by_shape.setdefault(shape, []).append(number)
    batches = []
    for (n_tokens, _), alike in sorted(by_shape.items()):
        n_pairs = max(1, BATCH_TOKENS // n_tokens)
        for start in range(0, len(alike), n_pairs):
            chosen = alike[start : start + n_pairs]
            batches.append(PairBatch(model, chosen, [read[number] for number in chosen]))
    return batches
