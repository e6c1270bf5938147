"""Serve every study of many texts: take and describe texts, report progress, find unknown words, make batches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.corpus import Corpus, CorpusText
from attnscope.corpus.formats import write_plainly
from attnscope.errors import AttnscopeError, amount
from attnscope.models.model import Batch, Model, Tokenizer, example_tokens
from attnscope.results.tokens import Tokens
from attnscope.text import refuse_file_name

Texts = Corpus | Sequence[CorpusText]

AnyTexts = Corpus | str | Sequence[str] | Sequence[CorpusText]
"""What studies take: a corpus, a text, or texts."""

Report = Callable[["Progress"], None]

_UNKNOWN_SHOWN = 5
_UNKNOWN_LENGTH = 20
"""How many unknown words a note names, and how many characters of each."""


@dataclass(frozen=True)
class Progress:
    """Say how far a study is.

    Attributes:
        n_texts: How many texts are done.
        n_tokens: Their tokens.
        share: The share of the corpus that has been read, 0 to 1; None = unknown.
        step: What the study is doing; empty = it has one step.
    """

    n_texts: int
    n_tokens: int
    share: float | None
    step: str = ""


@dataclass(frozen=True)
class UnknownWords:
    """Hold the words that a tokenizer does not know.

    Attributes:
        n: How many there are.
        first: The first of them, at most one more than a note names.
        read_as: The token that it reads in their place.
    """

    n: int = 0
    first: tuple[str, ...] = ()
    read_as: str = ""

    @classmethod
    def of(cls, tokenizer: Tokenizer, texts: Iterable[Tokens]) -> UnknownWords:
        """Find the words of some texts that a tokenizer does not know."""
        unknown_id = tokenizer.unknown_id
        if unknown_id is None:
            return cls()
        label = tokenizer.spell(unknown_id)
        words: list[str] = []
        for tokens in texts:
            for position in np.flatnonzero(tokens.ids == unknown_id).tolist():
                start, stop = tokens.offsets[position]
                text = tokens.text
                if tokens.segments[position] and tokens.pair:
                    text = tokens.pair
                word = text[start:stop]
                # If the text itself names the token, such as "[UNK]", that is no unknown word.
                if start >= 0 and word.strip() and word != label:
                    words.append(word)
        return cls(len(words), tuple(dict.fromkeys(words))[: _UNKNOWN_SHOWN + 1], label)

    def merge(self, other: UnknownWords) -> UnknownWords:
        """Return these words, and the other ones after them."""
        # One word more than a note names says that there are more.
        first = tuple(dict.fromkeys((*self.first, *other.first)))[: _UNKNOWN_SHOWN + 1]
        return UnknownWords(self.n + other.n, first, self.read_as or other.read_as)

    @property
    def note(self) -> str:
        """Return a sentence that names the first of them; empty if there are none."""
        if not self.n:
            return ""
        named = []
        for word in self.first[:_UNKNOWN_SHOWN]:
            named.append(word if len(word) <= _UNKNOWN_LENGTH else f"{word[:_UNKNOWN_LENGTH]}…")
        if len(self.first) > _UNKNOWN_SHOWN:
            named.append("…")
        words = amount(self.n, "word is", "words are")
        listed = ", ".join(named)
        return f"{words} unknown to the tokenizer, which reads {self.read_as} instead: {listed}"


def scale_report(report: Report | None, number: int, of: int) -> Report | None:
    """Return a report for one of `of` equal parts of a study, by its number: it reports the share of the whole."""
    if report is None or of == 1:
        return report

    def report_whole(progress: Progress) -> None:
        share = progress.share
        if share is not None:
            share = (number + share) / of
        report(replace(progress, share=share))

    return report_whole


def texts_of(texts: AnyTexts, model: Model | None = None) -> Texts:
    """Return a corpus as it is, and a text or several as `CorpusText`s; blank texts are left out, as in files.

    Conversations in a corpus are written by the chat template of `model`, or plainly if it has none.

    Raises:
        AttnscopeError: There is no text.
        UsageError: The text is the name of a file.
    """
    # A corpus is read as it is used. Only tokenizers of transformers have chat templates.
    if isinstance(texts, Corpus):
        if model is not None:
            texts.chat = getattr(model.tokenizer, "write_chat", None) or write_plainly
        return texts
    if isinstance(texts, str):
        refuse_file_name(
            texts, f"read it as attnscope.Corpus({texts!r}); a text like this one stands in a list"
        )
        texts = [texts]
    # Number the texts; blank ones are left out.
    listed: list[CorpusText] = []
    for text in texts:
        if not isinstance(text, str):
            listed.append(text)
        elif text.strip():
            listed.append(CorpusText(len(listed), "texts", len(listed) + 1, text=text))
    if not listed:
        raise AttnscopeError("there is no text to study", "give at least one text with words in it")
    return tuple(listed)


def describe_texts(texts: Texts) -> dict[str, Any]:
    """Return the `corpus` of a record, as far as the texts alone say it, as plain JSON values.

    Returns:
        `sources`: the files of a Corpus, else "texts". `split`: how plain text files were split; empty for other texts.
        `sha256`: hash of the texts; empty where a Corpus has not been read to its end. `problems`: what could not be
        read.
    """
    if isinstance(texts, Corpus):
        problems = [asdict(problem) for problem in texts.problems]
        return {
            "sources": [*texts.sources],
            "split": texts.split_as,
            "sha256": texts.sha256,
            "problems": problems,
        }
    # Texts from Python have no files and no lines.
    digest = hashlib.sha256(b"".join(text.digested() for text in texts))
    return {"sources": ["texts"], "split": "", "sha256": digest.hexdigest(), "problems": []}


def share_read(texts: Texts, index: int | None = None) -> float | None:
    """Return the share of texts that has been read, 0 to 1; None = unknown.

    Of a corpus it is in bytes; of a list it is up to the text of an index.
    """
    # The size of a stream is not known before its end.
    if isinstance(texts, Corpus):
        return min(1.0, texts.bytes_read / texts.n_bytes) if texts.n_bytes else None
    if index is None:
        return None
    return min(1.0, (index + 1) / len(texts))


def special_ids(model: Model) -> frozenset[int]:
    """Return the ids of the special tokens that the tokenizer adds to a text; empty without a tokenizer.

    By them special tokens are known in texts that come as ids.
    """
    try:
        example = example_tokens(model.tokenizer)
    except AttnscopeError:
        return frozenset()
    return frozenset(example.ids[example.special].tolist())


def pad_rows(rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return rows of different lengths as one array, (row, column), filled up with zeros."""
    filled = np.zeros((len(rows), max(len(row) for row in rows)), rows[0].dtype)
    for number, row in enumerate(rows):
        filled[number, : len(row)] = row
    return filled


def batch_of(tokens: Sequence[Tokens], targets: Sequence[Tokens] = ()) -> Batch:
    """Return texts as a batch, padded to one length; `targets` are what the decoder of an encoder-decoder reads."""
    import torch

    # One row per text for each field of `Batch`.
    rows: dict[str, list[NDArray[Any]]] = {
        "ids": [text.ids for text in tokens],
        "mask": [np.ones(len(text), np.bool_) for text in tokens],
        "segments": [text.segments.astype(np.int64) for text in tokens],
    }
    if targets:
        rows["target_ids"] = [text.ids for text in targets]
        rows["target_mask"] = [np.ones(len(text), np.bool_) for text in targets]
    # Each is (text, token); `to` leaves out masks that hide nothing.
    padded = {name: torch.from_numpy(pad_rows(each)) for name, each in rows.items()}
    return Batch(**padded).to("cpu")
