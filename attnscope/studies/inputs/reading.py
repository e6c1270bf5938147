"""Turn what a user gives, a text, photos or a recording, into the input of a model.

This includes what the model itself writes: a decoder's continuation, an answer, a transcript. Running the model for its
attention is left to studies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import numpy as np

from attnscope.errors import AttnscopeError, amount
from attnscope.models.model import Batch, Model, SensoryInput, image_model_of, image_text_model_of
from attnscope.results.tokens import Tokens
from attnscope.senses.photos import Photo
from attnscope.senses.recordings import Recording
from attnscope.studies.inputs.texts import UnknownWords, batch_of
from attnscope.text import is_blank, require_text

MAX_TRANSCRIPT_TOKENS = 64
"""The most tokens of a transcript that a model writes itself."""

DEFAULT_ANSWER_TOKENS = 20
"""The most tokens that a model writes about a picture unless `generate` says otherwise."""

MAX_WHOLE_CHARACTERS = 2**20
"""The most characters of a text that is tokenised as a whole, so that a note can say how many tokens it has."""

_CHARACTERS_PER_TOKEN = 16
"""Of a longer text, the beginning with this many characters for each token that the model takes is tokenised first. In
English, a token has 4 to 5 characters."""

_MAX_MERGED_WORDS = 8
"""How many words a note on merged tokens names."""


class PromptOptions(TypedDict, total=False):
    """Hold the keywords of functions that make a `Prompt` of a text: all of its fields but the text."""

    pair: str | None
    target: str | None
    chat: bool
    generate: int


@dataclass(frozen=True)
class Prompt:
    """Hold a text, how a model is to read it, and what the model is to write.

    Attributes:
        text: The text.
        pair: A second text, for models that read pairs.
        target: What the decoder of an encoder-decoder is to write; None = its own greedy output.
        chat: Whether the text is put into the model's chat template, as the user's message.
        generate: How many tokens a decoder is to write after the text.
    """

    text: str
    pair: str | None = None
    target: str | None = None
    chat: bool = False
    generate: int = 0

    def __post_init__(self) -> None:
        _require_string(self.text)
        require_text(self.text)
        if self.pair is not None:
            require_text(self.pair, "the second text")
        if self.target is not None:
            require_text(self.target, "the target")


@dataclass(frozen=True, eq=False)
class Speech:
    """Hold a recording, and its transcript.

    Attributes:
        recording: The recording.
        transcript: What the decoder is to write; None = its own greedy output, or the model has no decoder.
    """

    recording: Recording
    transcript: str | None = None

    def __post_init__(self) -> None:
        if self.transcript is not None:
            _require_string(self.transcript)


@dataclass(frozen=True, eq=False)
class PhotoPrompt:
    """Hold photos, and a question about them.

    Attributes:
        photos: The photos, in order.
        text: The question; it goes into the model's own form of chat, after the photos. Empty = the model describes
            the picture by itself, if it can.
        generate: How many tokens of its answer the model is to write.
    """

    photos: tuple[Photo, ...]
    text: str
    generate: int = 0

    def __post_init__(self) -> None:
        _require_string(self.text)
        if not is_blank(self.text):
            require_text(self.text)
        if not self.photos:
            raise AttnscopeError(
                "there is no photo beside the text", "give at least one: --image photo.jpg"
            )


def _require_string(text: object) -> None:
    if not isinstance(text, str):
        raise AttnscopeError(
            f"a text is one string, not {type(text).__name__}", "call heatmap once for each text"
        )


UserInput = Prompt | Photo | Speech | PhotoPrompt
"""The kinds of input that a user gives: a text, a photo, a recording, or photos and words."""


@dataclass(frozen=True, eq=False)
class Reading(SensoryInput):
    """Hold the input of a model as it reads, sees or hears it; `SensoryInput` documents the other fields.

    For a text, `inputs` (arguments of the model's forward, by name) is empty: the model reads the `tokens`. `axes` has
    the queries and keys of each kind of attention if words attend to patches by cross-attention; else it is empty.

    Attributes:
        text: What a record keeps as its text: the text, or the name of a photo or a recording.
        target: The tokens that the decoder of an encoder-decoder reads; None = there is no such decoder.
    """

    text: str = ""
    target: Tokens | None = None

    @classmethod
    def of(cls, seen: SensoryInput, text: str, *notes: str, **more: Any) -> Reading:
        """Return what a model sees or hears as a reading.

        Args:
            seen: What it sees or hears.
            text: The field `text`.
            notes: Further notes, after those of `seen`; empty ones are left out.
            more: Other fields that replace those of `seen`.
        """
        fields = vars(seen) | {"notes": (*seen.notes, *filter(None, notes))} | more
        return cls(**fields, text=text)

    def batch(self, device: str) -> Batch:
        """Return a batch of this one text on a device, ids (1, token)."""
        targets = [] if self.target is None else [self.target]
        return batch_of([self.tokens], targets).to(device)

    @property
    def first_query_after_pictures(self) -> int:
        """Return the position of the first query that can attend to all patches; 0 without pictures among words.

        If patches are among the tokens, it is the token after the last patch.
        """
        if self.axes:
            # The first kind is the one that attends to patches.
            return next(iter(self.axes.values())).first_query
        # `cells` has the positions of patches among the tokens.
        last_patch = -1
        for picture in self.pictures:
            if picture.cells is not None:
                last_patch = max(last_patch, int(picture.cells.max()))
        return last_patch + 1

    def queries_and_keys(self, kind: str) -> tuple[Tokens, Tokens]:
        """Return the tokens that are the queries of a kind of attention, and those that are its keys."""
        if kind in self.axes:
            return self.axes[kind].queries, self.axes[kind].keys
        if self.target is None or kind == "encoder":
            return self.tokens, self.tokens
        if kind == "decoder":
            return self.target, self.target
        # In cross-attention, the decoder's tokens attend to the encoder's.
        return self.target, self.tokens


def choose_reader(model: Model, item: UserInput) -> Model:
    """Return the model that reads an input: of a model with two towers, such as CLIP, the tower for it.

    Raises:
        AttnscopeError: `model` is the name of a model.
    """
    if isinstance(model, str):
        raise AttnscopeError(
            f"{model!r} is a name, not a model", f"load it first: attnscope.load({model!r})"
        )
    if isinstance(item, PhotoPrompt):
        return image_text_model_of(model)
    if isinstance(item, Photo):
        return image_model_of(model)
    return model


def read(model: Model, item: UserInput) -> Reading:
    """Turn a text, a photo or a recording into a model's input.

    A text that is longer than the model takes is cut, and a note says so.

    Args:
        model: The model, from `choose_reader`.
        item: What it reads.

    Raises:
        AttnscopeError: The text is empty, or the model does not read such an input.
    """
    if isinstance(item, Photo):
        return _read_photo(model, item)
    if isinstance(item, Speech):
        return _read_speech(model, item)
    if isinstance(item, PhotoPrompt):
        return _read_photo_prompt(model, item)
    return _read_text(model, item)


def group_words(reading: Reading, words: Sequence[str]) -> Reading:
    """Mark the tokens of some words as parts of one word each, so that drawing them merges these tokens.

    Returns:
        The reading with the marks, and with a note that says how many tokens are merged.
    """
    if not words:
        return reading
    tokens = reading.tokens.with_words(words)
    target = reading.target
    if target is not None:
        target = target.with_words(words)
    # The note is on the text alone. A group of one token is not merged.
    groups = [group for group in tokens.word_groups() if len(group) > 1]
    note = f"{sum(map(len, groups))} tokens are merged into {amount(len(groups), 'word')}"
    if groups:
        merged = list(dict.fromkeys(tokens.merge(groups).labels))
        note += f": {', '.join(merged[:_MAX_MERGED_WORDS])}"
        if len(merged) > _MAX_MERGED_WORDS:
            note += ", …"
    return replace(reading, tokens=tokens, target=target, notes=(*reading.notes, note))


def find_position(name: str | int, tokens: Tokens, option: str) -> int:
    """Return the position of the one token that a user names.

    Args:
        name: A word, such as "cat"; or the position, as 3, "3" or "@3". If the text has a word "3", that is meant.
        tokens: The tokens.
        option: The option of the command line that names the token, for hints.

    Raises:
        AttnscopeError: The name means no token, or several.
    """
    positions = tokens.find_one(name) if isinstance(name, str) else ()
    if not positions:
        positions = tokens.find_one(f"@{name}")
    if not positions:
        raise tokens.not_found(str(name))
    if len(positions) > 1:
        several = " ".join(f"@{position} {tokens.labels[position]}" for position in positions)
        raise AttnscopeError(
            f"{name!r} names several tokens: {several}", f"name one of them: {option} @{positions[-1]}"
        )
    return positions[0]


def _read_text(model: Model, prompt: Prompt) -> Reading:
    """Return the tokens of a text; and what the model writes or is to write, as a target or after the text."""
    # Tokenise, by the chat template if asked for.
    encode: Callable[..., Tokens] = model.tokenizer.encode
    if prompt.chat:
        if model.tokenizer.encode_chat is None:
            raise AttnscopeError(f"{model.info.name} has no chat template", "leave out --chat")
        if prompt.pair is not None:
            raise AttnscopeError("a chat message is one text", "leave out --pair or --chat")
        encode = model.tokenizer.encode_chat
    text, tokens, cut = encode_truncated(model.info.max_tokens, encode, prompt.text, prompt.pair)
    notes = [cut, UnknownWords.find(model.tokenizer, [tokens]).note]
    # The decoder of an encoder-decoder reads a target. Other decoders may continue the text.
    target = None
    if "encoder" in model.info.kinds and "decoder" in model.info.kinds:
        target, note = _read_target(model, tokens, prompt)
        notes.append(note)
    elif prompt.target is not None:
        raise AttnscopeError(
            f"{model.info.name} is no encoder-decoder, so it has no target", "leave out --target"
        )
    elif prompt.generate:
        if model.text_generator is None:
            raise AttnscopeError(
                f"{model.info.name} cannot continue a text", "leave out --generate, or name a decoder"
            )
        tokens = model.text_generator.generate(tokens, prompt.generate)
        n_written = len(tokens) - tokens.n_given
        note = (
            f"the model wrote {amount(n_written, 'token')}, each the most probable one (greedy decoding)"
        )
        if n_written < prompt.generate:
            note += f"; it ended the text or reached its limit before {prompt.generate}"
        notes.append(note)
        if model.tokenizer.encode_chat is not None and not prompt.chat:
            notes.append("its chat template was not used: --chat puts the text into it, as a question")
    return Reading({}, tokens, notes=tuple(filter(None, notes)), text=text, target=target)


def _read_target(model: Model, tokens: Tokens, prompt: Prompt) -> tuple[Tokens, str]:
    """Return what the decoder of an encoder-decoder reads, the user's target or the model's own answer, and a note."""
    if prompt.generate:
        raise AttnscopeError(
            f"{model.info.name} answers a text rather than continue it", "leave out --generate"
        )
    assert model.text_generator is not None  # it has a decoder
    if prompt.target is not None:
        _, target, note = encode_truncated(
            model.info.max_tokens, model.text_generator.encode_target, prompt.target
        )
        return target, note
    target = model.text_generator.greedy_target(tokens)
    answer = "nothing" if is_blank(target.text) else target.text
    return target, f"no target was given: the decoder reads what the model itself writes, “{answer}”"


def _read_photo(model: Model, photo: Photo) -> Reading:
    """Return the patches of a photo."""
    # A model that reads pictures among words describes a photo that comes without words.
    if model.image_reader is None and model.image_text_reader is not None:
        return _read_photo_prompt(model, PhotoPrompt((photo,), ""))
    if model.image_reader is None:
        raise AttnscopeError(
            f"{model.info.name} sees no pictures",
            "leave out --image, or name a vision transformer, such as DINOv2",
        )
    seen = model.image_reader.prepare_photo(photo)
    return Reading.of(seen, seen.tokens.text)


def _read_photo_prompt(model: Model, view: PhotoPrompt) -> Reading:
    """Return the tokens of photos and words; if there are no words, the model writes some itself."""
    has_text = not is_blank(view.text)
    if model.image_text_reader is None:
        raise AttnscopeError(
            f"{model.info.name} reads no pictures among words",
            "leave out the text and --generate, or --image, or name a model such as SmolVLM, LLaVA or Qwen2-VL",
        )
    # Models that look for objects (detectors) read pictures alone.
    if not model.image_text_reader.reads_words:
        if has_text or view.generate:
            raise AttnscopeError(
                f"{model.info.name} looks for objects, and reads and writes no words",
                "leave out the text and --generate",
            )
        return Reading.of(model.image_text_reader.prepare_prompt(view.photos, ""), view.photos[0].source)
    if has_text:
        return Reading.of(
            model.image_text_reader.prepare_prompt(view.photos, view.text, view.generate), view.text
        )
    # Without words, models for captions describe the picture. All others need a question.
    if not model.image_text_reader.is_text_optional:
        raise AttnscopeError(
            f"{model.info.name} writes of a picture what a text asks for",
            "give a text, such as a question",
        )
    seen = model.image_text_reader.prepare_prompt(
        view.photos, "", view.generate or DEFAULT_ANSWER_TOKENS
    )
    text = _extract_ordinary_text(seen.tokens)
    if not text:
        raise AttnscopeError(
            f"{model.info.name} writes nothing of this picture", "give a text that it is to write"
        )
    return Reading.of(
        seen, text, f"no text was given: the words are what the model itself writes, “{text}”"
    )


def _read_speech(model: Model, speech: Speech) -> Reading:
    """Return frames of a recording, or patches of its spectrogram; and a transcript if the model has a decoder."""
    if model.audio_reader is None:
        # A model with an image reader takes pictures alone, unless another tower beside it reads texts.
        takes = (
            "pictures" if model.image_reader is not None and image_model_of(model) is model else "texts"
        )
        raise AttnscopeError(
            f"{model.info.name} takes {takes}, not recordings",
            "leave out --audio, or name a model such as Whisper or wav2vec 2.0",
        )
    heard = model.audio_reader.prepare_recording(speech.recording)
    # Without a decoder there is no transcript.
    if heard.sound is None or model.text_generator is None:
        if speech.transcript is not None:
            raise AttnscopeError(
                f"{model.info.name} has no decoder, and reads no transcript", "leave out the text"
            )
        return Reading.of(heard, heard.tokens.text)
    # The decoder reads the given transcript, or its own.
    if speech.transcript is not None:
        _, target, note = encode_truncated(
            model.info.max_tokens, model.text_generator.encode_target, speech.transcript
        )
    else:
        target = model.text_generator.transcribe(heard, MAX_TRANSCRIPT_TOKENS)
        # If there is nothing but special tokens, show these.
        written = _extract_ordinary_text(target) or " ".join(target.text.split()) or "nothing"
        note = f"no transcript was given: the decoder reads what the model itself writes, “{written}”"
    # The encoder reads the sound, the decoder the transcript.
    inputs = {**heard.inputs, **model.text_generator.make_decoder_inputs(target)}
    return Reading.of(heard, target.text, note, inputs=inputs, target=target)


def _extract_ordinary_text(tokens: Tokens) -> str:
    """Return the text from the first ordinary token to the last one, on one line."""
    # Keep the spans, (first, last + 1) character, of ordinary tokens that stand for some text, (token, 2).
    spans = tokens.offsets[~tokens.special]
    spans = spans[(spans >= 0).all(1)]
    if not len(spans):
        return ""
    start = spans[0, 0]
    stop = spans[-1, 1]
    return " ".join(tokens.text[start:stop].split())


def encode_truncated(
    limit: int | None, encode: Callable[..., Tokens], text: str, pair: str | None = None
) -> tuple[str, Tokens, str]:
    """Tokenise a text, or a pair, and cut the tokens to what a model takes, as `truncate` does.

    Of a very long text, only a beginning that is long enough is tokenised.

    Args:
        limit: How many tokens the model takes; None = any number.
        encode: The tokenizer.
        text: The text.
        pair: The second text of a pair.

    Returns:
        The text, or its beginning; the tokens; and a sentence that says what was cut, "" if nothing was.
    """
    texts = [text]
    if pair is not None:
        texts.append(pair)
    # A text of many megabytes would take minutes to tokenise as a whole.
    beginnings = [_take_beginning(each, encode, limit) for each in texts]
    tokens, note = truncate(encode(*beginnings), limit, is_whole=beginnings == texts)
    return beginnings[0], tokens, note


def _take_beginning(text: str, encode: Callable[..., Tokens], limit: int | None) -> str:
    """Return a beginning of a very long text with at least twice as many tokens as a model takes; else the whole text.

    The beginning ends before a blank, as half a word would have other tokens. A text without blanks stays whole.
    """
    if limit is None or len(text) <= MAX_WHOLE_CHARACTERS:
        return text
    # Double the length of the beginning until it has enough tokens.
    n_characters = _CHARACTERS_PER_TOKEN * limit
    while n_characters < len(text):
        end = max(text.rfind(blank, 0, n_characters) for blank in " \n\t")
        if end > 0 and len(encode(text[:end])) >= 2 * limit:
            return text[:end]
        n_characters *= 2
    return text


def truncate(tokens: Tokens, limit: int | None, *, is_whole: bool = True) -> tuple[Tokens, str]:
    """Return the tokens, cut to what a model takes, and a sentence that says what was cut ("" = nothing).

    All special tokens stay, and of the others the first ones. Of a pair, the longer text is cut first.

    Args:
        tokens: The tokens.
        limit: How many of them the model takes; None = any number.
        is_whole: Whether they are the tokens of the whole text; else the sentence says that the text has more.

    Raises:
        AttnscopeError: There are no tokens but special ones.
    """
    ordinary = np.flatnonzero(~tokens.special)
    if not len(ordinary):
        raise AttnscopeError(
            "there is no text: its tokens are all special ones", "give a text with words in it"
        )
    if limit is None or len(tokens) <= limit:
        return tokens, ""
    room = limit - int(tokens.special.sum())
    if room < 1:
        raise AttnscopeError(f"the model takes {limit} tokens, which its special tokens fill alone")
    # Of a pair, each text gets half of the room, and the second one also what the first does not fill. A text
    # that is no pair gets all of it.
    is_second = tokens.segments[ordinary] == 1
    first = ordinary[~is_second]
    second = ordinary[is_second]
    n_second = max(min(len(second), room // 2), room - len(first))
    n_first = room - n_second
    kept = [first[:n_first], second[:n_second], np.flatnonzero(tokens.special)]
    # Say what is shown. Of a beginning, the number of tokens is less than that of the text.
    size = amount(len(tokens), "token")
    if not is_whole:
        size = f"more than {size}"
    parts = f"the first {n_first} of the text"
    if len(second):
        parts = f"the first {n_first} of the first text and {n_second} of the second"
    note = f"the text has {size}, the model takes {limit}: {parts} are shown, the rest is left out"
    return tokens.take(np.sort(np.concatenate(kept))), note
