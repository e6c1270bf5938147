"""From pairs to what a model reads: tokens of one length, the place of the answer, and its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnscope.corpus.formats import Problem
from attnscope.corpus.pairs import Pair
from attnscope.errors import AttnscopeError
from attnscope.models.model import Batch, Model
from attnscope.results.tokens import Tokens
from attnscope.studies.inputs.texts import batch_of
from attnscope.text import MOST_CHARACTERS

if TYPE_CHECKING:
    from torch import Tensor

Numbers = NDArray[np.int64]

BATCH_TOKENS = 512
"""Tokens in a batch of pairs, of either side."""


class _BadPairError(Exception):
    """A pair that cannot be patched; its text says why."""


@dataclass(frozen=True, eq=False)
class ReadPair:
    """A pair as a model reads it; both texts have as many tokens.

    Attributes:
        place: The token whose prediction is the answer.
        right: Tokens of the right answers.
        wrong: Tokens of the wrong answers.
    """

    pair: Pair
    clean: Tokens
    corrupt: Tokens
    place: int
    right: tuple[int, ...]
    wrong: tuple[int, ...]

    @property
    def tokens(self) -> tuple[bytes, bytes]:
        """The token numbers of the clean and of the corrupt text."""
        return self.clean.ids.tobytes(), self.corrupt.ids.tobytes()

    @property
    def shape(self) -> tuple[int, int]:
        """Its length, and the place of the answer from the end."""
        return len(self.clean), len(self.clean) - self.place


def read_pairs(model: Model, pairs: Iterable[Pair]) -> tuple[list[ReadPair], list[Problem]]:
    """The pairs that can be patched, and what is wrong with the others.

    An AttnscopeError refuses a model that predicts neither next tokens nor masked ones.
    """
    if model.loss not in ("causal", "masked") or model.info.path != "seam":
        raise AttnscopeError(
            f"{model.info.name} predicts neither the next token nor a masked one, so it has no answers to compare",
            "choose a decoder, or an encoder with its head for masked words; attnscope ablate compares hidden states",
        )
    reader, problems = _Reader(model), []
    read: list[ReadPair] = []
    first_with: dict[tuple[bytes, bytes], Pair] = {}
    for pair in pairs:
        try:
            each = reader.read(pair)
            # Texts that differ in case or blanks alone may have the same tokens.
            first = first_with.setdefault(each.tokens, pair)
            if first is not pair:
                raise _BadPairError(f"it has the tokens of pair {first.line}, which counts once")
            read.append(each)
        except (_BadPairError, AttnscopeError) as error:
            problems.append(Problem(pair.source, pair.line, str(getattr(error, "message", error))))
    return read, problems


def independent(read: Sequence[ReadPair]) -> Numbers:
    """Return for each pair the number of what it is an observation of: a pair and its mirror image have the same.

    The mirror image of a pair has its two texts the other way round, and tells little that the pair does not.
    """
    numbers: dict[frozenset[bytes], int] = {}
    return np.array([numbers.setdefault(frozenset(each.tokens), len(numbers)) for each in read], np.int64)


class _Reader:
    def __init__(self, model: Model) -> None:
        self._model = model
        self._ordinary = frozenset(model.tokenizer.ordinary_ids())

    def read(self, pair: Pair) -> ReadPair:
        clean, corrupt = (self._encode(text) for text in (pair.clean, pair.corrupt))
        if len(clean) != len(corrupt):
            raise _BadPairError(
                f"its texts have {len(clean)} and {len(corrupt)} tokens: patching needs the same number"
            )
        if np.array_equal(clean.ids, corrupt.ids):
            raise _BadPairError("its texts have the same tokens")
        place = self._place(clean)
        if self._place(corrupt) != place:
            raise _BadPairError("the answer is not at the same token of both texts")
        right, wrong = (
            tuple(dict.fromkeys(self._answer(each, pair.clean, clean, place) for each in answers))
            for answers in (pair.right, pair.wrong)
        )
        if both := set(right) & set(wrong):
            raise _BadPairError(f"{self._model.tokenizer.spell(both.pop())!r} is both right and wrong")
        self._require_known([*right, *wrong])
        return ReadPair(pair, clean, corrupt, place, right, wrong)

    def _encode(self, text: str) -> Tokens:
        if len(text) > MOST_CHARACTERS:
            raise _BadPairError(f"it has {len(text):,} characters, more than {MOST_CHARACTERS:,}")
        tokens: Tokens = self._model.tokenizer.encode(text)
        limit = self._model.info.max_tokens
        if limit is not None and len(tokens) > limit:
            raise _BadPairError(f"it has {len(tokens)} tokens, and {self._model.info.name} takes {limit}")
        self._require_known(tokens.ids.tolist())
        return tokens

    def _require_known(self, ids: Sequence[int]) -> None:
        import torch

        self._model.static_embeddings(torch.tensor([list(ids)], device=self._model.info.device))

    def _place(self, tokens: Tokens) -> int:
        """Where the answer is predicted: at the last token of the text, or at its mask."""
        if self._model.loss == "causal":
            return int(np.flatnonzero(~tokens.special)[-1])
        masks = np.flatnonzero(tokens.ids == self._model.tokenizer.mask_id)
        if len(masks) != 1:
            raise _BadPairError(f"it has {len(masks)} mask tokens, where it needs one")
        return int(masks[0])

    def _answer(self, answer: str | int, text: str, tokens: Tokens, place: int) -> int:
        """The token of an answer: the one that continues the clean text, or that stands for its mask."""
        if isinstance(answer, int):
            return answer
        if self._model.loss == "masked":
            first, last = tokens.offsets[place].tolist()
            if first < 0:
                raise _BadPairError("its mask cannot be found in the text: give numbers of tokens as answers")
            before, after, start = text[:first], text[last:], place
        else:
            before, after, start = text, "", place + 1
        for written in _spellings(answer, before):
            ids = self._model.tokenizer.encode(before + written + after).ids
            prefix, suffix = tokens.ids[:start], tokens.ids[place + 1 :]
            is_single = len(ids) == start + 1 + len(suffix) and np.array_equal(ids[:start], prefix)
            if is_single and np.array_equal(ids[start + 1 :], suffix):
                number = int(ids[start])
                if not self._ordinary or number in self._ordinary:
                    return number
        raise _BadPairError(f"the answer {answer!r} is not a single token after this text")


def _spellings(answer: str, before: str) -> tuple[str, ...]:
    """An answer as it may be written after a text: a word gets a space, digits go on after digits."""
    spaced = " " + answer
    if not before or before[-1].isspace() or not answer[0].isalnum():
        return answer, spaced
    return (answer, spaced) if before[-1].isdigit() and answer[0].isdigit() else (spaced, answer)


@dataclass(frozen=True, eq=False)
class PairBatch:
    """Pairs of one length.

    Attributes:
        numbers: Their numbers among all pairs.
        clean: The clean texts, unpadded.
        corrupt: The corrupt ones.
        place: The token whose prediction is the answer, of all pairs.
        last: At how many of the last tokens logits are needed; None = at all.
        right: Tokens of the right answers, (pair, answer), filled up with -1.
        wrong: Tokens of the wrong answers.
    """

    numbers: Numbers
    clean: Batch
    corrupt: Batch
    place: int
    last: int | None
    right: Tensor
    wrong: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Pairs and tokens."""
        n_pairs, n_tokens = self.clean.ids.shape
        return n_pairs, n_tokens

    def difference(self, logits: Tensor) -> Tensor:
        """The logit difference right - wrong of each text, (time, pair), in float32 or better.

        The score of several answers is the logarithm of the sum of exp.

        Args:
            logits: (time · pair, token, vocabulary); `last` says which tokens.
        """
        import torch

        n_pairs, n_tokens = self.shape
        place = self.place - (0 if self.last is None else n_tokens - self.last)
        here = logits[:, place].to(torch.promote_types(logits.dtype, torch.float32)).view(-1, n_pairs, logits.shape[-1])

        def score(answers: Tensor) -> Tensor:
            scores = here.gather(-1, answers.clamp(min=0).expand(len(here), -1, -1))
            return scores.masked_fill(answers < 0, -torch.inf).logsumexp(-1)

        return score(self.right) - score(self.wrong)


def batches_of(model: Model, read: Sequence[ReadPair], numbers: Iterable[int]) -> list[PairBatch]:
    """Pairs in batches of one length, so that nothing is padded and logits are needed at one token."""
    import torch

    by_shape: dict[tuple[int, int], list[int]] = {}
    for number in numbers:
        by_shape.setdefault(read[number].shape, []).append(number)
    pair_batches = []
    device = model.info.device
    for (length, _), same in sorted(by_shape.items()):
        step = max(1, BATCH_TOKENS // length)
        for start in range(0, len(same), step):
            some = [read[number] for number in same[start : start + step]]

            def answers(side: str, some: Sequence[ReadPair] = some) -> Tensor:
                rows = [torch.tensor(getattr(each, side)) for each in some]
                return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1).to(device)

            pair_batches.append(
                PairBatch(
                    numbers=np.array(same[start : start + step]),
                    clean=batch_of([each.clean for each in some]).to(device),
                    corrupt=batch_of([each.corrupt for each in some]).to(device),
                    place=some[0].place,
                    last=length - some[0].place if model.loss == "causal" else None,
                    right=answers("right"),
                    wrong=answers("wrong"),
                )
            )  # fmt: skip
    return pair_batches
