"""When is each word spoken? What a speech model listens to as it writes the words, aligned with the recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from attnscope.core.senses.alignment import align_tokens
from attnscope.errors import AttnscopeError
from attnscope.models.model import Model
from attnscope.questions.heatmap import Heatmap
from attnscope.questions.places import SpokenWord
from attnscope.results.tokens import Tokens


def time_words(record: Heatmap, heads: Sequence[tuple[int, int]]) -> Heatmap:
    """The record with when each word of its transcript is spoken, in `record.sound.words`.

    A token is spoken from when the path of dynamic time warping (`core.senses.alignment`) comes to what the model
    attends to as it writes that token: the row of the token before it. The path begins with the recording, so the first
    word does. It loses words of fewer frames than half the running median (0.08 s for Whisper). The times are right
    only if the heads follow the words.

    Args:
        record: What a speech model with a decoder attends to in a recording.
        heads: Heads of its cross-attention, (layer, head), that follow the words.

    Raises:
        AttnscopeError: There is no transcript, or a head that the record does not hold.
    """
    cross, sound = record.maps[0], record.sound
    if sound is None or cross.kind != "cross":
        raise AttnscopeError("word times need a recording and its transcript", "name a model such as Whisper")
    if lacking := [pair for pair in heads if pair not in record.chosen(cross)]:
        named = ", ".join(f"L{layer}H{head}" for layer, head in lacking)
        raise AttnscopeError(f"the record holds no {named}", "leave out -L and -H, or --pick heads that it holds")
    words = _words(cross.queries)
    if not words or not heads:
        raise AttnscopeError("there are no words to time" if heads else "no head is given whose attention tells times")
    first = words[0][0]
    if first == 0:
        raise AttnscopeError("the transcript has no token before its first word", "its tokenizer writes none")
    # What is listened to as a token is written stands in the row of the token before it.
    rows = slice(first - 1, words[-1][1])
    frames = align_tokens(np.stack([cross.of(*pair)[rows] for pair in heads]))
    seconds = np.minimum(frames * sound.seconds_per_frame, sound.seconds)
    spoken = tuple(
        SpokenWord(_spell(cross.queries, word), float(seconds[word[0] - first]), float(seconds[until]), word)
        for word, until in zip(words, [*(word[0] - first for word in words[1:]), len(seconds) - 1], strict=True)
    )
    return replace(record, sound=replace(sound, words=spoken, followed=tuple(heads)))


def heads_to_follow(model: Model, picked: Sequence[tuple[int, int]] | None) -> tuple[tuple[int, int], ...]:
    """The heads that tell when words are spoken: the picked ones, else those that the model's files name."""
    named = () if model.writer is None else model.writer.alignment_heads
    if picked or named or model.ears is None:  # what hears nothing is refused as it is given the recording
        return tuple(picked or named)
    raise AttnscopeError(
        f"{model.info.name} names no heads that follow speech (alignment_heads of its generation_config.json)",
        "choose some with --pick: attnscope heads --audio measures their monotonicity",
    )


def _words(tokens: Tokens) -> list[tuple[int, int]]:
    """First token and last + 1 of each word; punctuation belongs to the word before it."""
    words: list[tuple[int, int]] = []
    for group in tokens.word_groups():
        if tokens.special[group].any():
            continue
        is_mark = not any(letter.isalnum() for letter in _spell(tokens, (group[0], group[-1] + 1)))
        if is_mark and words and words[-1][1] == group[0]:
            words[-1] = words[-1][0], group[-1] + 1
        else:
            words.append((group[0], group[-1] + 1))
    return words


def _spell(tokens: Tokens, word: tuple[int, int]) -> str:
    """A word as the transcript has it; as its labels, where the tokenizer does not say where it stands."""
    start, stop = int(tokens.offsets[word[0], 0]), int(tokens.offsets[word[1] - 1, 1])
    spelled = tokens.text[start:stop].strip() if 0 <= start < stop else ""
    return spelled or "".join(tokens.labels[word[0] : word[1]]).replace("·", " ").strip()
