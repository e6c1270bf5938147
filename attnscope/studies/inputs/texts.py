"""Do what every study of many texts needs: take and describe texts, report progress, find unknown words, make batches.

The loop over the texts is in `studies.run`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.corpus import Corpus, CorpusText
from attnscope.corpus.formats import render_plainly
from attnscope.errors import AttnscopeError, amount
from attnscope.models.model import Batch, Model, Tokenizer, example_tokens
from attnscope.results.tokens import Tokens
from attnscope.text import refuse_file_name

Texts = Corpus | Sequence[CorpusText]
"""The texts of a study, as `texts_of` returns them."""

AnyTexts = Corpus | str | Sequence[str] | Sequence[CorpusText]
"""What a user may pass as texts: a corpus, one text, or several texts."""

ReportProgress = Callable[["Progress"], None]
"""A callback: a study calls it with its progress, mostly after each batch."""

_MAX_NAMED_WORDS = 5
"""How many unknown words a note names; "…" stands for the others."""

_MAX_WORD_CHARACTERS = 20
"""How many characters of an unknown word a note shows."""


@dataclass(frozen=True)
class Progress:
    """Hold the progress of a study.

    Attributes:
        n_texts: The number of texts that are done.
        n_tokens: The number of tokens in these texts.
        share: The share of the corpus that has been read, 0 to 1; None = unknown.
        step: The step that is running, such as "counting tokens"; empty if the study has a single step.
    """

    n_texts: int
    n_tokens: int
    share: float | None
    step: str = ""


@dataclass(frozen=True)
class UnknownWords:
    """Hold the words that a tokenizer does not know.

    Attributes:
        n_words: The number of unknown words, repetitions included.
        first_words: The first distinct words, at most _MAX_NAMED_WORDS + 1. A note does not name the last of these: it
            only tells that there are more.
        replacement: The token that the tokenizer reads instead of an unknown word, such as "[UNK]".
    """

    n_words: int = 0
    first_words: tuple[str, ...] = ()
    replacement: str = ""

    @classmethod
    def find(cls, tokenizer: Tokenizer, texts: Iterable[Tokens]) -> UnknownWords:
        """Find the words in tokenised texts that a tokenizer does not know."""
        # Some tokenizers, such as those of bytes, know every word.
        unknown_id = tokenizer.unknown_id
        if unknown_id is None:
            return cls()
        replacement = tokenizer.spell(unknown_id)
        words: list[str] = []
        for tokens in texts:
            for position in np.flatnonzero(tokens.ids == unknown_id).tolist():
                # The offsets of a token in segment 1 are offsets in the second text of a pair.
                start, stop = tokens.offsets[position]
                text = tokens.text
                if tokens.segments[position] and tokens.pair:
                    text = tokens.pair
                word = text[start:stop]
                # A token that stands for no text has a negative offset. A "[UNK]" that the author of a text wrote is
                # no unknown word.
                if start >= 0 and word.strip() and word != replacement:
                    words.append(word)
        return cls(len(words), tuple(dict.fromkeys(words))[: _MAX_NAMED_WORDS + 1], replacement)

    def merge(self, other: UnknownWords) -> UnknownWords:
        """Return the unknown words of both; `other` is of later texts."""
        first_words = tuple(dict.fromkeys((*self.first_words, *other.first_words)))[
            : _MAX_NAMED_WORDS + 1
        ]
        # The replacement is empty if no text has been read yet.
        return UnknownWords(
            self.n_words + other.n_words, first_words, self.replacement or other.replacement
        )

    @property
    def note(self) -> str:
        """Return a sentence that names the first unknown words; empty if there are none."""
        if not self.n_words:
            return ""
        named = []
        for word in self.first_words[:_MAX_NAMED_WORDS]:
            named.append(
                word if len(word) <= _MAX_WORD_CHARACTERS else f"{word[:_MAX_WORD_CHARACTERS]}…"
            )
        if len(self.first_words) > _MAX_NAMED_WORDS:
            named.append("…")
        words = amount(self.n_words, "word is", "words are")
        listed = ", ".join(named)
        return f"{words} unknown to the tokenizer, which reads {self.replacement} instead: {listed}"


def scale_report(report: ReportProgress | None, step: int, n_steps: int) -> ReportProgress | None:
    """Return a callback for one step of a study. It turns the share of the step into the share of the whole study.

    Args:
        report: The callback for the whole study; None = progress is not reported.
        step: The number of the step, from 0.
        n_steps: The number of steps. All are taken to last equally long.
    """
    if report is None or n_steps == 1:
        return report

    def report_step(progress: Progress) -> None:
        share = progress.share
        if share is not None:
            share = (step + share) / n_steps
        report(replace(progress, share=share))

    return report_step


def texts_of(texts: AnyTexts, model: Model | None = None) -> Texts:
    """Return the texts that a user passes in the form that studies take.

    A corpus stays as it is: a study reads its texts when it needs them. Strings are numbered, and blank strings are
    left out, as in files.

    If `model` is passed, its chat template renders the conversations of a corpus. For a model without a chat template,
    `corpus.formats.render_plainly` renders them.

    Raises:
        AttnscopeError: There is no text.
        UsageError: The text is the name of a file.
    """
    if isinstance(texts, Corpus):
        if model is not None:
            # `chat` is the function that renders a conversation. Only tokenizers of transformers may have `write_chat`.
            texts.chat = getattr(model.tokenizer, "write_chat", None) or render_plainly
        return texts
    if isinstance(texts, str):
        refuse_file_name(
            texts, f"read it as attnscope.Corpus({texts!r}); a text like this one stands in a list"
        )
        texts = [texts]
    corpus_texts: list[CorpusText] = []
    for text in texts:
        if not isinstance(text, str):
            corpus_texts.append(text)
        elif text.strip():
            # The source is "texts", and the line is the number of the text, from 1.
            index = len(corpus_texts)
            corpus_texts.append(CorpusText(index, "texts", index + 1, text=text))
    if not corpus_texts:
        raise AttnscopeError("there is no text to study", "give at least one text with words in it")
    return tuple(corpus_texts)


def describe_texts(texts: Texts) -> dict[str, Any]:
    """Return the part of a record's `corpus` that depends on the texts alone, as plain JSON values.

    Returns:
        - `sources`: the files of a Corpus; ["texts"] for other texts.
        - `split`: how plain text files were split into texts; empty for other texts.
        - `sha256`: the hash of the texts; empty if a Corpus has not been read to its end.
        - `problems`: the files and lines that could not be read.
    """
    if isinstance(texts, Corpus):
        return {
            "sources": [*texts.sources],
            "split": texts.effective_split,
            "sha256": texts.sha256,
            "problems": [asdict(problem) for problem in texts.problems],
        }
    # Texts from Python have no files and no lines.
    digest = hashlib.sha256(b"".join(text.bytes_to_hash() for text in texts))
    return {"sources": ["texts"], "split": "", "sha256": digest.hexdigest(), "problems": []}


def share_read(texts: Texts, index: int | None = None) -> float | None:
    """Return the share of the texts that has been read, 0 to 1; None = unknown.

    For a corpus, it is the share of bytes. For a list, it is the share of texts up to and including the one at `index`;
    None without `index`.
    """
    if isinstance(texts, Corpus):
        # The size, `n_bytes`, is None for a stream, and 0 if all files are empty.
        return min(1.0, texts.bytes_read / texts.n_bytes) if texts.n_bytes else None
    if index is None:
        return None
    return min(1.0, (index + 1) / len(texts))


def special_ids(model: Model) -> frozenset[int]:
    """Return the ids of the special tokens that the tokenizer adds to a text; empty without a tokenizer.

    Texts that are lists of token ids need them: a tokenizer that did not make such a text cannot mark its special
    tokens.
    """
    # Without a usable tokenizer, `example_tokens` raises an error.
    try:
        example = example_tokens(model.tokenizer)
    except AttnscopeError:
        return frozenset()
    return frozenset(example.ids[example.special].tolist())


def pad_rows(rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return rows of different lengths as one array, (row, column), padded with zeros at their ends."""
    padded = np.zeros((len(rows), max(map(len, rows))), rows[0].dtype)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded


def batch_of(tokens: Sequence[Tokens], targets: Sequence[Tokens] = ()) -> Batch:
    """Return texts as a batch on the CPU, padded to one length.

    Args:
        tokens: The texts.
        targets: What the decoder of an encoder-decoder reads for each text; empty for other models.
    """
    import torch

    # Field of `Batch` -> its rows, (token,), one per text. A mask is True at real tokens; padding makes it False.
    rows: dict[str, list[NDArray[Any]]] = {
        "ids": [text.ids for text in tokens],
        "mask": [np.ones(len(text), np.bool_) for text in tokens],
        "segments": [text.segments.astype(np.int64) for text in tokens],
    }
    if targets:
        rows["target_ids"] = [text.ids for text in targets]
        rows["target_mask"] = [np.ones(len(text), np.bool_) for text in targets]
    # Pad each field to (text, token).
    fields = {name: torch.from_numpy(pad_rows(field_rows)) for name, field_rows in rows.items()}
    # `to` also drops masks that are True everywhere.
    return Batch(**fields).to("cpu")
