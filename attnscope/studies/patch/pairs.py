"""Read pairs of texts for a model: their tokens, where the answer is predicted, and its id; and put them into batches.

A pair is a clean text and a corrupt one, whose answers differ: activation patching carries values from one to the
other. An answer is a token of the vocabulary or a class, and its id the index of its logit. `study` patches the
batches, and `studies.maps.derived` reads a single target.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

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
"""The most tokens of the clean texts of a batch; the corrupt ones have as many."""


class ReadPair(NamedTuple):
    """Hold a pair as a model reads it; both texts have the same number of tokens.

    Attributes:
        pair: The pair as it was given.
        clean: The tokens of the clean text.
        corrupt: The tokens of the corrupt text.
        position: The token whose logits have the answers; 0 for a classifier of texts, which has one row of logits.
        right: The ids of the right answers. In `pair` they are texts.
        wrong: The ids of the wrong answers.
    """

    pair: Pair
    clean: Tokens
    corrupt: Tokens
    position: int
    right: tuple[int, ...]
    wrong: tuple[int, ...]

    @property
    def ids(self) -> tuple[bytes, bytes]:
        """Return the token ids of the clean and of the corrupt text, as bytes, which can be keys of a dict."""
        return self.clean.ids.tobytes(), self.corrupt.ids.tobytes()


def read_pairs(
    model: Model, pairs: Iterable[Pair], answer: str | None = None
) -> tuple[list[ReadPair], list[Problem]]:
    """Return the pairs that can be patched, and for each other pair the reason why it cannot.

    Args:
        model: A model with a head.
        pairs: The pairs.
        answer: The class that is right in all pairs, against all others; None = the pairs name their answers.

    Raises:
        AttnscopeError: The model predicts nothing that can be compared, or has no such class.
    """
    reader = _Reader(model, answer)
    read: list[ReadPair] = []
    problems: list[Problem] = []
    first_with_ids: dict[tuple[bytes, bytes], Pair] = {}
    for pair in pairs:
        try:
            read_pair = reader.read(pair)
            # Refuse a pair with the tokens of an earlier one: their texts may differ in case or blanks alone.
            if read_pair.ids in first_with_ids:
                line = first_with_ids[read_pair.ids].line
                raise AttnscopeError(f"it has the tokens of pair {line}, which counts once")
            first_with_ids[read_pair.ids] = pair
            read.append(read_pair)
        except AttnscopeError as error:
            problems.append(Problem(pair.source, pair.line, error.message))
    return read, problems


def read_target(model: Model, text: str, tokens: Tokens, target: str) -> tuple[int, int]:
    """Return the position of the token whose logits have a target, and the target's id: the index of its logit.

    Args:
        model: A model with a head.
        text: The text; "" for a picture.
        tokens: The tokens that the model reads.
        target: For a classifier the label or the number of a class; else the token that continues the text, or that
            fills its mask.

    Raises:
        AttnscopeError: The model predicts no such thing, or there is no such target.
    """
    reader = _Reader(model, None)
    if model.loss == "token_class":
        raise AttnscopeError(
            f"{model.info.name} gives each token a class", "name a model with one class per text"
        )
    # A classifier has one row of logits. A number is that of a class, unless a label is spelled like it.
    if model.labels:
        class_numbers = list(map(str, range(len(model.labels))))
        if target in class_numbers and target not in model.labels:
            return 0, int(target)
        return 0, model.class_index(target)
    try:
        position = reader.find_position(tokens)
        return position, reader.token_id(target, text, tokens, position)
    except AttnscopeError as error:
        raise AttnscopeError(f"the text cannot be asked for {target!r}: {error.message}") from error


class _Reader:
    """Read pairs for one model.

    Args:
        model: A model with a head.
        answer: The class that is right in all pairs, against all others; None = the pairs name their answers.
    """

    def __init__(self, model: Model, answer: str | None) -> None:
        if model.loss not in ("causal", "masked", "class", "token_class"):
            raise AttnscopeError(
                f"{model.info.name} predicts neither the next token, nor a masked one, nor classes: it has no answers",
                "choose a decoder, a classifier, or an encoder with its head; attnscope ablate compares hidden states",
            )
        self._model = model
        self._tokenizer = model.tokenizer
        # The ids of tokens that stand for text; empty without a vocabulary: then any token may.
        self._ordinary = frozenset(self._tokenizer.ordinary_ids())
        self._right_class = None if answer is None else model.class_index(answer)

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
        # Both texts must predict the answer at the same token. A classifier of tokens is asked for the class of the
        # first token that differs. A classifier of texts has one row of logits: row 0.
        position = 0
        if self._model.loss == "token_class":
            position = int((clean.ids != corrupt.ids).argmax())
        elif self._model.loss != "class":
            position = self.find_position(clean)
            if self.find_position(corrupt) != position:
                raise AttnscopeError("the answer is not at the same token of both texts")
        if self._right_class is None:
            right = self._answer_ids(pair, "right", clean, position)
            wrong = self._answer_ids(pair, "wrong", clean, position)
        else:
            right = (self._right_class,)
            n_classes = len(self._model.labels)
            wrong = tuple(number for number in range(n_classes) if number != self._right_class)
        for answer_id in right:
            if answer_id in wrong:
                answer = spell_answer(self._model, answer_id)
                raise AttnscopeError(f"{answer!r} is both right and wrong")
        return ReadPair(pair, clean, corrupt, position, right, wrong)

    def _require_known(self, ids: list[int]) -> None:
        """Refuse tokens that the model has no embedding for."""
        # Embedding an id beyond the table raises an AttnscopeError.
        batch = torch.tensor([ids], device=self._model.info.device)
        self._model.static_embeddings(batch)

    def find_position(self, tokens: Tokens) -> int:
        """Return the position whose logits predict the answer: the last token of a text, or its mask."""
        if self._model.loss == "causal":
            return int(np.flatnonzero(~tokens.special)[-1])
        masks = np.flatnonzero(tokens.ids == self._tokenizer.mask_id)
        if len(masks) != 1:
            raise AttnscopeError(f"it has {len(masks)} mask tokens, where it needs one")
        return int(masks[0])

    def _answer_ids(self, pair: Pair, side: str, clean: Tokens, position: int) -> tuple[int, ...]:
        """Return the ids of the answers that a pair names on one side, "right" or "wrong", each once."""
        answers = getattr(pair, side)
        if not answers:
            raise AttnscopeError(f"it has no field {side!r}")
        if self._model.labels:
            ids = [self._model.class_index(str(answer)) for answer in answers]
        else:
            ids = [self.token_id(answer, pair.clean, clean, position) for answer in answers]
            self._require_known(ids)
        return tuple(dict.fromkeys(ids))

    def token_id(self, answer: str | int, text: str, tokens: Tokens, position: int) -> int:
        """Return the id of the token that an answer is; refuse an answer of several tokens.

        Args:
            answer: What continues the text, or fills its mask; an int is itself the id.
            text: The text.
            tokens: Its tokens.
            position: The token that predicts the answer: the last one, or the mask.
        """
        if isinstance(answer, int):
            return answer
        # A model that continues a text predicts the answer after it.
        other_ids = tokens.ids.tolist()
        before = text
        after = ""
        answer_position = position + 1
        # A masked model predicts the answer in the place of the mask, between the texts on both sides of it.
        if self._model.loss == "masked":
            start, stop = tokens.offsets[position].tolist()
            if start < 0:
                raise AttnscopeError(
                    "its mask cannot be found in the text: give numbers of tokens as answers"
                )
            before = text[:start]
            after = text[stop:]
            answer_position = position
            del other_ids[position]
        # Accept the first spelling that adds exactly one ordinary token, and changes no other.
        for spelling in _spellings(answer, before):
            ids = self._tokenizer.encode(before + spelling + after).ids.tolist()
            if len(ids) != len(other_ids) + 1:
                continue
            added: int = ids.pop(answer_position)
            is_ordinary = not self._ordinary or added in self._ordinary
            if ids == other_ids and is_ordinary:
                return added
        raise AttnscopeError(f"the answer {answer!r} is not a single token after this text")


def _spellings(answer: str, before: str) -> tuple[str, ...]:
    """Return an answer with and without a space in front; the spelling that is likelier after a text comes first."""
    # A word follows after a space, unless the text ends with one; digits follow digits without.
    spaced = f" {answer}"
    last = before[-1:]
    first = answer[0]
    is_new_word = last.strip() and first.isalnum()
    goes_on_number = last.isdigit() and first.isdigit()
    if is_new_word and not goes_on_number:
        return spaced, answer
    return answer, spaced


def spell_answer(model: Model, answer_id: int) -> str:
    """Return the label of a class, or the text of a token."""
    return model.labels[answer_id] if model.labels else str(model.tokenizer.spell(answer_id))


class PairBatch:
    """Hold pairs of one length and one answer position as a batch without padding.

    Args:
        model: The model.
        numbers: The index of each pair among all pairs of the study.
        pairs: The pairs.

    Attributes:
        numbers: The same indices, (pair,).
        clean: The clean texts.
        corrupt: The corrupt texts.
        last: At how many of the last tokens logits are needed; None = at all.
        answer_ids: The ids of all answers of all pairs, once each, ascending, (answer,).
    """

    def __init__(self, model: Model, numbers: Sequence[int], pairs: Sequence[ReadPair]) -> None:
        device = model.info.device
        self.numbers = np.array(numbers)
        self.clean = batch_of([pair.clean for pair in pairs]).to(device)
        self.corrupt = batch_of([pair.corrupt for pair in pairs]).to(device)
        # A model that continues texts computes logits only from the position of the answer on, so it is in row 0.
        # Other models compute logits at all tokens.
        self.last: int | None = None
        self._logit_row = pairs[0].position
        if model.loss == "causal":
            self.last = self.clean.ids.shape[1] - pairs[0].position
            self._logit_row = 0
        # Which of the answers of all pairs are right for each pair, and which are wrong, (pair, answer).
        all_answers: set[int] = set()
        for pair in pairs:
            all_answers.update(pair.right + pair.wrong)
        answers = sorted(all_answers)
        right = np.stack([np.isin(answers, pair.right) for pair in pairs])
        wrong = np.stack([np.isin(answers, pair.wrong) for pair in pairs])
        self.answer_ids = torch.tensor(answers, device=device)
        self._right = torch.from_numpy(right).to(device)
        self._wrong = torch.from_numpy(wrong).to(device)

    @property
    def first_difference(self) -> int:
        """Return the first position at which the two texts of any pair have different tokens."""
        differs = (self.clean.ids != self.corrupt.ids).any(0)
        return int(differs.int().argmax())

    def difference(self, logits: Tensor) -> Tensor:
        """Return the logit difference right - wrong of each text, (run, pair), in float32 or better.

        The score of several answers is the logarithm of the sum of exp.

        Args:
            logits: (run * pair, token, vocabulary): one or several runs of the pairs, at the `last` tokens. The last
                axis may also be (answer,), the logits of `answer_ids` alone.
        """
        # (run * pair, vocabulary) -> (run * pair, answer), unless these alone were computed.
        answer_logits = logits[:, self._logit_row]
        if answer_logits.shape[1] != len(self.answer_ids):
            answer_logits = answer_logits[:, self.answer_ids]
        # (run, pair, answer)
        precision = torch.promote_types(logits.dtype, torch.float32)
        answer_logits = answer_logits.to(precision).view(-1, *self._right.shape)
        # The answers of other pairs count nothing.
        right = answer_logits.masked_fill(~self._right, -torch.inf)
        wrong = answer_logits.masked_fill(~self._wrong, -torch.inf)
        return right.logsumexp(-1) - wrong.logsumexp(-1)


def batches_of(model: Model, read: Sequence[ReadPair], numbers: Iterable[int]) -> list[PairBatch]:
    """Return the pairs with some indices in `read` as batches of one length and one answer position: unpadded."""
    # Short pairs come first; of those of one length, those with the answer at the latest token.
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
