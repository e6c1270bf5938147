"""Do what every study of many texts needs: take and describe texts, report progress, find unknown words, make batches.

The loop over texts itself is in `studies.run`.
"""

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
"""The texts of a study, as `texts_of` makes them."""

AnyTexts = Corpus | str | Sequence[str] | Sequence[CorpusText]
"""What a user may give as texts: a corpus, one text, or several."""

ReportProgress = Callable[["Progress"], None]
"""Called by a study now and then, with how far it is."""

_WORDS_NAMED = 5
"""How many unknown words a note names; "…" stands for the others."""

_CHARACTERS_SHOWN = 20
"""How many characters of an unknown word a note shows."""


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
        n: How many there are; a word counts as often as it occurs.
        first: The first different ones. They are at most one more than a note names: that one tells that there are
            more.
        read_as: The token that the tokenizer reads in their place, such as "[UNK]".
    """

    n: int = 0
    first: tuple[str, ...] = ()
    read_as: str = ""

    @classmethod
    def of(cls, tokenizer: Tokenizer, texts: Iterable[Tokens]) -> UnknownWords:
        """Return the words in tokenised texts that a tokenizer does not know."""
        unknown_id = tokenizer.unknown_id
        if unknown_id is None:
            return cls()
        label = tokenizer.spell(unknown_id)
        words: list[str] = []
        for tokens in texts:
            for position in np.flatnonzero(tokens.ids == unknown_id).tolist():
                # Offsets of segment 1 are those in the second text of a pair.
                start, stop = tokens.offsets[position]
                text = tokens.text
                if tokens.segments[position] and tokens.pair:
                    text = tokens.pair
                word = text[start:stop]
                # A negative offset stands for no text. And "[UNK]" written out in a text is no unknown word.
                if start >= 0 and word.strip() and word != label:
                    words.append(word)
        return cls(len(words), tuple(dict.fromkeys(words))[: _WORDS_NAMED + 1], label)

    def merge(self, other: UnknownWords) -> UnknownWords:
        """Return the unknown words of both; `other` is of later texts."""
        first = tuple(dict.fromkeys((*self.first, *other.first)))[: _WORDS_NAMED + 1]
        return UnknownWords(self.n + other.n, first, self.read_as or other.read_as)

    @property
    def note(self) -> str:
        """Return a sentence that names the first of them; empty if there are none."""
        if not self.n:
            return ""
        named = []
        for word in self.first[:_WORDS_NAMED]:
            named.append(word if len(word) <= _CHARACTERS_SHOWN else f"{word[:_CHARACTERS_SHOWN]}…")
        if len(self.first) > _WORDS_NAMED:
            named.append("…")
        words = amount(self.n, "word is", "words are")
        listed = ", ".join(named)
        return f"{words} unknown to the tokenizer, which reads {self.read_as} instead: {listed}"


def scale_report(report: ReportProgress | None, step: int, n_steps: int) -> ReportProgress | None:
    """Return a report for one step of a study, which turns the share of the step into that of the whole study.

    Args:
        report: The report of the whole study; None = nobody listens.
        step: The number of the step, from 0.
        n_steps: How many steps there are; each counts as equally long.
    """
    if report is None or n_steps == 1:
        return report

    def report_whole(progress: Progress) -> None:
        share = progress.share
        if share is not None:
            share = (step + share) / n_steps
        report(replace(progress, share=share))

    return report_whole


def texts_of(texts: AnyTexts, model: Model | None = None) -> Texts:
    """Return the texts that a user gave as the texts of a study.

    A corpus stays as it is; its texts are read when they are needed. Strings are numbered, and blank ones are left out,
    as in files. If `model` is given, its chat template writes the conversations of a corpus; without a template they
    are written plainly.

    Raises:
        AttnscopeError: There is no text.
        UsageError: The text is the name of a file.
    """
    if isinstance(texts, Corpus):
        if model is not None:
            # Only tokenizers of transformers have `write_chat`.
            texts.chat = getattr(model.tokenizer, "write_chat", None) or write_plainly
        return texts
    if isinstance(texts, str):
        refuse_file_name(
            texts, f"read it as attnscope.Corpus({texts!r}); a text like this one stands in a list"
        )
        texts = [texts]
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
    """Return the part of a record's `corpus` that depends on the texts alone, as plain JSON values.

    Returns:
        - `sources`: the files of a Corpus, else "texts".
        - `split`: how plain text files were split into texts; empty for other texts.
        - `sha256`: the hash of the texts; empty if a Corpus has not been read to its end.
        - `problems`: what could not be read.
    """
    if isinstance(texts, Corpus):
        return {
            "sources": [*texts.sources],
            "split": texts.split_as,
            "sha256": texts.sha256,
            "problems": [asdict(problem) for problem in texts.problems],
        }
    # Texts from Python have no files and no lines.
    digest = hashlib.sha256(b"".join(text.digested() for text in texts))
    return {"sources": ["texts"], "split": "", "sha256": digest.hexdigest(), "problems": []}


def share_read(texts: Texts, index: int | None = None) -> float | None:
    """Return the share of the texts that has been read, 0 to 1; None = unknown.

    Of a corpus it is the share of bytes. Of a list it is the share of texts up to the one at `index`, that one
    included.
    """
    if isinstance(texts, Corpus):
        # The size is None for a stream, and 0 if all files are empty.
        return min(1.0, texts.bytes_read / texts.n_bytes) if texts.n_bytes else None
    if index is None:
        return None
    return min(1.0, (index + 1) / len(texts))


def special_ids(model: Model) -> frozenset[int]:
    """Return the ids of the special tokens that the tokenizer adds to a text; empty without a tokenizer.

    They tell which tokens are special in texts that are given as ids.
    """
    try:
        example = example_tokens(model.tokenizer)
    except AttnscopeError:
        return frozenset()
    return frozenset(example.ids[example.special].tolist())


def pad_rows(rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return rows of different lengths as one array, (row, column), padded with zeros at their ends."""
    padded = np.zeros((len(rows), max(map(len, rows))), rows[0].dtype)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return padded


def batch_of(tokens: Sequence[Tokens], targets: Sequence[Tokens] = ()) -> Batch:
    """Return texts as a batch on the processor, padded to one length.

    Args:
        tokens: The texts.
        targets: What the decoder of an encoder-decoder reads for each text; empty for other models.
    """
    import torch

    # The rows of each field of `Batch`, one per text.
    rows: dict[str, list[NDArray[Any]]] = {
        "ids": [text.ids for text in tokens],
        "mask": [np.ones(len(text), np.bool_) for text in tokens],
        "segments": [text.segments.astype(np.int64) for text in tokens],
    }
    if targets:
        rows["target_ids"] = [text.ids for text in targets]
        rows["target_mask"] = [np.ones(len(text), np.bool_) for text in targets]
    # Pad each field to (text, token).
    fields = {name: torch.from_numpy(pad_rows(of_texts)) for name, of_texts in rows.items()}
    # `to` also drops masks that hide nothing.
    return Batch(**fields).to("cpu")
