"""Tokenise pairs of texts for a model, find where it predicts the answers and their ids, and batch the pairs.

A pair is a clean text and a corrupt text whose answers differ. Activation patching copies activations from the run of
one text into the run of the other. An answer is a token of the vocabulary or a class. Its id is the index of its logit.
`study` patches the batches, and `studies.maps.derived` reads a single target.
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
"""The most tokens of the clean texts of a batch. The corrupt texts of the batch have the same number of tokens."""


class ReadPair(NamedTuple):
    """Hold a pair as a model reads it; both texts have the same number of tokens.

    Attributes:
        pair: The pair of texts.
        clean: The tokens of the clean text.
        corrupt: The tokens of the corrupt text.
        position: The position of the token whose logits predict the answer; 0 for a classifier of texts, which has one
            row of logits.
        right_ids: The ids of the right answers. In `pair` they are texts.
        wrong_ids: The ids of the wrong answers.
    """

    pair: Pair
    clean: Tokens
    corrupt: Tokens
    position: int
    right_ids: tuple[int, ...]
    wrong_ids: tuple[int, ...]

    @property
    def id_bytes(self) -> tuple[bytes, bytes]:
        """Return the token ids of the clean and of the corrupt text as bytes, which are hashable."""
        return self.clean.ids.tobytes(), self.corrupt.ids.tobytes()


def read_pairs(
    model: Model, pairs: Iterable[Pair], answer: str | None = None
) -> tuple[list[ReadPair], list[Problem]]:
    """Return the pairs that can be patched, and for each other pair the reason why it cannot be patched.

    Args:
        model: A model with an output head: a decoder, a masked language model or a classifier.
        pairs: The pairs.
        answer: The class that is the right answer of all pairs; all other classes are wrong. None = the pairs name
            their answers.

    Raises:
        AttnscopeError: The model predicts neither tokens nor classes, or it has no class `answer`.
    """
    reader = _Reader(model, answer)
    patchable_pairs: list[ReadPair] = []
    problems: list[Problem] = []
    first_pairs: dict[tuple[bytes, bytes], Pair] = {}
    for pair in pairs:
        try:
            read_pair = reader.read(pair)
            # Refuse a pair with the same tokens as an earlier pair: their texts may differ in case or blanks alone.
            if read_pair.id_bytes in first_pairs:
                line = first_pairs[read_pair.id_bytes].line
                raise AttnscopeError(f"it has the tokens of pair {line}, which counts once")
            first_pairs[read_pair.id_bytes] = pair
            patchable_pairs.append(read_pair)
        except AttnscopeError as error:
            problems.append(Problem(pair.source, pair.line, error.message))
    return patchable_pairs, problems


def read_target(model: Model, text: str, tokens: Tokens, target: str) -> tuple[int, int]:
    """Return the position of the token whose logits have a target, and the target's id: the index of its logit.

    Args:
        model: A model with an output head.
        text: The text; "" for a picture.
        tokens: The tokens that the model reads.
        target: For a classifier, the label or the number of a class. For other models, the token that continues the
            text or fills its mask.

    Raises:
        AttnscopeError: The model predicts neither tokens nor classes of whole texts, or it has no such target.
    """
    reader = _Reader(model, None)
    if model.loss == "token_class":
        raise AttnscopeError(
            f"{model.info.name} gives each token a class", "name a model with one class per text"
        )
    # A classifier has one row of logits: row 0. A number such as "2" is a class number, unless it is also a label.
    if model.labels:
        class_numbers = list(map(str, range(len(model.labels))))
        if target in class_numbers and target not in model.labels:
            return 0, int(target)
        return 0, model.class_index(target)
    try:
        position = reader.find_position(tokens)
        return position, reader.find_token_id(target, text, tokens, position)
    except AttnscopeError as error:
        raise AttnscopeError(f"the text cannot be asked for {target!r}: {error.message}") from error


class _Reader:
    """Tokenise pairs for one model, and find the ids of their answers.

    Args:
        model: A model with an output head.
        answer: The class that is the right answer of all pairs; None = the pairs name their answers.
    """

    def __init__(self, model: Model, answer: str | None) -> None:
        if model.loss not in ("causal", "masked", "class", "token_class"):
            raise AttnscopeError(
                f"{model.info.name} predicts neither the next token, nor a masked one, nor classes: it has no answers",
                "choose a decoder, a classifier, or an encoder with its head; attnscope ablate compares hidden states",
            )
        self._model = model
        self._tokenizer = model.tokenizer
        # The ids of tokens that are text, not special tokens. Empty if there is no vocabulary: then any id is allowed.
        self._text_token_ids = frozenset(self._tokenizer.ordinary_ids())
        self._right_class = None if answer is None else model.class_index(answer)

    def read(self, pair: Pair) -> ReadPair:
        """Return a pair as the model reads it; refuse a pair that cannot be patched."""
        # Patching copies activations token by token, so both texts need the same number of tokens.
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
        # Find the position whose logits are compared; it must be the same in both texts. A classifier of tokens is
        # asked for the class of the first token that differs. A classifier of texts has one row of logits: row 0.
        position = 0
        if self._model.loss == "token_class":
            position = int((clean.ids != corrupt.ids).argmax())
        elif self._model.loss != "class":
            position = self.find_position(clean)
            if self.find_position(corrupt) != position:
                raise AttnscopeError("the answer is not at the same token of both texts")
        if self._right_class is None:
            right_ids = self._answer_ids(pair, "right", clean, position)
            wrong_ids = self._answer_ids(pair, "wrong", clean, position)
        else:
            right_ids = (self._right_class,)
            n_classes = len(self._model.labels)
            wrong_ids = tuple(number for number in range(n_classes) if number != self._right_class)
        for answer_id in right_ids:
            if answer_id in wrong_ids:
                answer = spell_answer(self._model, answer_id)
                raise AttnscopeError(f"{answer!r} is both right and wrong")
        return ReadPair(pair, clean, corrupt, position, right_ids, wrong_ids)

    def _require_known(self, ids: list[int]) -> None:
        """Refuse tokens that the model has no embedding for."""
        # The method raises an AttnscopeError for an id beyond the embedding table.
        batch = torch.tensor([ids], device=self._model.info.device)
        self._model.static_embeddings(batch)

    def find_position(self, tokens: Tokens) -> int:
        """Return the position whose logits predict the answer: the last token of a text, or its mask."""
        # A causal model may end a text with special tokens: the last token before them predicts the answer.
        if self._model.loss == "causal":
            return int(np.flatnonzero(~tokens.special)[-1])
        masks = np.flatnonzero(tokens.ids == self._tokenizer.mask_id)
        if len(masks) != 1:
            raise AttnscopeError(f"it has {len(masks)} mask tokens, where it needs one")
        return int(masks[0])

    def _answer_ids(self, pair: Pair, side: str, clean: Tokens, position: int) -> tuple[int, ...]:
        """Return the ids of the answers in the field of a pair named by `side`, "right" or "wrong", without repeats."""
        answers = getattr(pair, side)
        if not answers:
            raise AttnscopeError(f"it has no field {side!r}")
        if self._model.labels:
            ids = [self._model.class_index(str(answer)) for answer in answers]
        else:
            ids = [self.find_token_id(answer, pair.clean, clean, position) for answer in answers]
            self._require_known(ids)
        return tuple(dict.fromkeys(ids))

    def find_token_id(self, answer: str | int, text: str, tokens: Tokens, position: int) -> int:
        """Return the id of an answer's token; refuse an answer of several tokens.

        Args:
            answer: The word that continues the text or fills its mask; an int is already an id.
            text: The text.
            tokens: Its tokens.
            position: The position of the token that predicts the answer: the last token, or the mask.
        """
        if isinstance(answer, int):
            return answer
        # Split the text where the answer goes. For a model that continues texts, the answer goes after the last token.
        other_ids = tokens.ids.tolist()
        text_before = text
        text_after = ""
        answer_position = position + 1
        # For a masked model, the answer replaces the mask.
        if self._model.loss == "masked":
            start, stop = tokens.offsets[position].tolist()
            # The offset is -1 if the tokenizer does not say where in the text the token is.
            if start < 0:
                raise AttnscopeError(
                    "its mask cannot be found in the text: give numbers of tokens as answers"
                )
            text_before = text[:start]
            text_after = text[stop:]
            answer_position = position
            del other_ids[position]
        # Accept the first spelling that adds exactly one token of text, and leaves all other tokens as they are.
        for spelling in _spellings(answer, text_before):
            ids = self._tokenizer.encode(text_before + spelling + text_after).ids.tolist()
            if len(ids) != len(other_ids) + 1:
                continue
            added_id: int = ids.pop(answer_position)
            is_text_token = not self._text_token_ids or added_id in self._text_token_ids
            if ids == other_ids and is_text_token:
                return added_id
        raise AttnscopeError(f"the answer {answer!r} is not a single token after this text")


def _spellings(answer: str, text_before: str) -> tuple[str, ...]:
    """Return an answer with and without a space in front; the spelling that is likelier after the text comes first."""
    # A word follows after a space, unless the text already ends with a space. Digits follow digits without a space.
    spaced_answer = f" {answer}"
    last_character = text_before[-1:]
    first_character = answer[0]
    is_new_word = last_character.strip() and first_character.isalnum()
    is_number_continued = last_character.isdigit() and first_character.isdigit()
    if is_new_word and not is_number_continued:
        return spaced_answer, answer
    return answer, spaced_answer


def spell_answer(model: Model, answer_id: int) -> str:
    """Return the label of a class, or the text of a token."""
    return model.labels[answer_id] if model.labels else str(model.tokenizer.spell(answer_id))


class PairBatch:
    """Hold pairs with the same length and the same answer position as a batch without padding.

    Args:
        model: The model.
        pair_indices: The index of each pair among all pairs of the study.
        pairs: The pairs.

    Attributes:
        pair_indices: The same indices, (pair,).
        clean: The clean texts, (pair, token).
        corrupt: The corrupt texts, (pair, token).
        last: How many of the last tokens need logits; None = all tokens.
        answer_ids: The ids of all answers of all pairs, without repeats, ascending, (answer,).
    """

    def __init__(self, model: Model, pair_indices: Sequence[int], pairs: Sequence[ReadPair]) -> None:
        device = model.info.device
        self.pair_indices = np.array(pair_indices)
        self.clean = batch_of([pair.clean for pair in pairs]).to(device)
        self.corrupt = batch_of([pair.corrupt for pair in pairs]).to(device)
        # A causal model computes logits only from the answer position on, so that position is row 0 of the logits.
        # Other models compute logits at all tokens.
        self.last: int | None = None
        self._logit_row = pairs[0].position
        if model.loss == "causal":
            self.last = self.clean.ids.shape[1] - pairs[0].position
            self._logit_row = 0
        # Mark which of all answers are right for each pair, and which are wrong: (pair, answer). An answer of other
        # pairs alone is neither.
        all_answers: set[int] = set()
        for pair in pairs:
            all_answers.update(pair.right_ids + pair.wrong_ids)
        answer_ids = sorted(all_answers)
        right_mask = np.stack([np.isin(answer_ids, pair.right_ids) for pair in pairs])
        wrong_mask = np.stack([np.isin(answer_ids, pair.wrong_ids) for pair in pairs])
        self.answer_ids = torch.tensor(answer_ids, device=device)
        self._right_mask = torch.from_numpy(right_mask).to(device)
        self._wrong_mask = torch.from_numpy(wrong_mask).to(device)

    @property
    def first_difference(self) -> int:
        """Return the first position at which any pair has different tokens in its two texts."""
        differs = (self.clean.ids != self.corrupt.ids).any(0)
        return int(differs.int().argmax())

    def logit_differences(self, logits: Tensor) -> Tensor:
        """Return the logit difference right - wrong of each text, (run, pair), in float32 or better.

        Several answers have the score logsumexp of their logits.

        Args:
            logits: (run * pair, token, vocabulary): one or several runs of the pairs, at the `last` tokens. The last
                axis may also be (answer,), if only the logits of `answer_ids` were computed.
        """
        # (run * pair, vocabulary) -> (run * pair, answer), unless only the logits of answers were computed.
        answer_logits = logits[:, self._logit_row]
        if answer_logits.shape[1] != len(self.answer_ids):
            answer_logits = answer_logits[:, self.answer_ids]
        # (run, pair, answer)
        precision = torch.promote_types(logits.dtype, torch.float32)
        answer_logits = answer_logits.to(precision).view(-1, *self._right_mask.shape)
        # Leave out the answers of other pairs: exp(-inf) adds 0 to the sum.
        right_logits = answer_logits.masked_fill(~self._right_mask, -torch.inf)
        wrong_logits = answer_logits.masked_fill(~self._wrong_mask, -torch.inf)
        return right_logits.logsumexp(-1) - wrong_logits.logsumexp(-1)


def make_pair_batches(
    model: Model, pairs: Sequence[ReadPair], pair_indices: Iterable[int]
) -> list[PairBatch]:
    """Return the pairs with some indices in `pairs` as batches; pairs of a batch share length and answer position."""
    # Group by length and answer position. Short pairs come first; among pairs of one length, late answers come first.
    indices_by_shape: dict[tuple[int, int], list[int]] = {}
    for index in pair_indices:
        pair = pairs[index]
        shape = (len(pair.clean), -pair.position)
        indices_by_shape.setdefault(shape, []).append(index)
    batches = []
    for (n_tokens, _), indices in sorted(indices_by_shape.items()):
        n_pairs_per_batch = max(1, BATCH_TOKENS // n_tokens)
        for start in range(0, len(indices), n_pairs_per_batch):
            batch_indices = indices[start : start + n_pairs_per_batch]
            batches.append(PairBatch(model, batch_indices, [pairs[index] for index in batch_indices]))
    return batches
