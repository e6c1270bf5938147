"""Turn a text, a photo or a recording into the input of a model. Running the model is left to studies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import numpy as np

from attnscope.errors import AttnscopeError, amount
from attnscope.models.model import Batch, Model, SensoryInput, eyes_of, viewer_of
from attnscope.results.tokens import Tokens
from attnscope.senses.photos import Photo
from attnscope.senses.recordings import Recording
from attnscope.studies.inputs.texts import UnknownWords, batch_of
from attnscope.text import is_blank, require_text

MOST_WRITTEN = 64
"""Tokens that a model writes at most where no transcript is given."""

DEFAULT_ANSWER = 20
"""Tokens that a model writes at most about a picture where nothing else is said."""

WHOLE_CHARACTERS = 2**20
"""A text of so many characters is tokenised whole, so that it is known how many tokens it has."""

_CHARACTERS_PER_TOKEN = 16
"""A longer text is first cut to this many characters for each token of the model's limit. English has 4 to 5."""


class PromptOptions(TypedDict, total=False):
    """Hold the keywords of `Prompt`, except for the text."""

    pair: str | None
    target: str | None
    chat: bool
    generate: int


@dataclass(frozen=True)
class Prompt:
    """Hold a text, and how a model is to read it.

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
        named = (("the text", self.text), ("the second text", self.pair), ("the target", self.target))
        for name, text in named:
            if text is not None:
                require_text(text, name)


@dataclass(frozen=True, eq=False)
class Speech:
    """Hold a recording, and its transcript.

    Attributes:
        recording: The recording.
        transcript: What the decoder is to write; None = its own greedy output. Encoders have none.
    """

    recording: Recording
    transcript: str | None = None

    def __post_init__(self) -> None:
        if self.transcript is not None:
            _require_string(self.transcript)


@dataclass(frozen=True, eq=False)
class View:
    """Photos, and a question about them.

    Attributes:
        photos: The photos, in order.
        text: The question; it goes into the model's own form of chat, after the photos. Without one a model that
            describes pictures writes by itself.
        generate: How many tokens of its answer the model is to write.
    """

    photos: tuple[Photo, ...]
    text: str
    generate: int = 0

    def __post_init__(self) -> None:
        _require_string(self.text)
        if not is_blank(self.text):
            require_text(self.text, "the text")
        if not self.photos:
            raise AttnscopeError(
                "there is no photo beside the text", "give at least one: --image photo.jpg"
            )


def _require_string(text: object) -> None:
    if not isinstance(text, str):
        raise AttnscopeError(
            f"a text is one string, not {type(text).__name__}", "call heatmap once for each text"
        )


_MERGED_SHOWN = 8
"""Words that a note on merged tokens names."""

Given = Prompt | Photo | Speech | View
"""What a model can be given to read."""


@dataclass(frozen=True, eq=False)
class Reading(SensoryInput):
    """Hold the input of a model: of a text, or as it sees or hears. `inputs` is empty where it reads a text.

    From `SensoryInput` it has `inputs`, `tokens`, `notes`; `picture`, `pictures` or `sound`; and `axes`: queries and
    keys by kind of attention, where words attend to patches by cross-attention.

    Attributes:
        text: What a record of it is called.
        target: What its decoder reads, if it has an encoder too.
    """

    text: str = ""
    target: Tokens | None = None

    @classmethod
    def of(cls, seen: SensoryInput, text: str, *notes: str, **more: Any) -> Reading:
        """Return what a model sees or hears under a name, with notes that come after its own."""
        fields = vars(seen) | {"notes": (*seen.notes, *notes)} | more
        return cls(**fields, text=text)

    def batch(self, device: str) -> Batch:
        """Return it as a batch of one text, ids (1, token), on a device."""
        if self.target is None:
            return batch_of([self.tokens]).to(device)
        return batch_of([self.tokens], [self.target]).to(device)

    @property
    def after_pictures(self) -> int:
        """Return the first token after all that stand for patches: no earlier one is a word that sees them all."""
        if self.axes:
            to_pictures = next(iter(self.axes.values()))
            return to_pictures.first
        # Patches stand among the tokens; `cells` has their positions.
        return max(
            (int(picture.cells.max()) + 1 for picture in self.pictures if picture.cells is not None),
            default=0,
        )

    def queries_and_keys(self, kind: str) -> tuple[Tokens, Tokens]:
        """Return the queries and keys of a kind of attention; a decoder without an encoder reads the text."""
        if kind in self.axes:
            return self.axes[kind].queries, self.axes[kind].keys
        if self.target is None or kind == "encoder":
            return self.tokens, self.tokens
        if kind == "decoder":
            return self.target, self.target
        return self.target, self.tokens


def reader_of(model: Model, item: Given) -> Model:
    """Return the part of a model that reads the input: of two towers, the one that the input is for.

    Raises:
        AttnscopeError: It is the name of a model.
    """
    # A name in place of a model is the likeliest mistake.
    if isinstance(model, str):
        raise AttnscopeError(
            f"{model!r} is a name, not a model", f"load it first: attnscope.load({model!r})"
        )
    if isinstance(item, View):
        return viewer_of(model)
    if isinstance(item, Photo):
        return eyes_of(model)
    return model


def read(model: Model, item: Given) -> Reading:
    """Turn a text, a photo or a recording into a model's input; cut it to the model's limit, and note that.

    Of two towers, `model` is the one of `reader_of`.

    Raises:
        AttnscopeError: The text is empty, or the model does not read such a thing.
    """
    if isinstance(item, Photo):
        return _see(model, item)
    if isinstance(item, Speech):
        return _hear(model, item)
    if isinstance(item, View):
        return _view(model, item)
    return _read_text(model, item)


def group_words(reading: Reading, words: Sequence[str]) -> Reading:
    """Return the reading with the tokens of listed words merged, and a note on the merged tokens."""
    if not words:
        return reading
    # Of an encoder-decoder, on both sides.
    tokens = reading.tokens.with_words(words)
    target = reading.target
    if target is not None:
        target = target.with_words(words)
    # Say which tokens are merged, and into what.
    groups = [group for group in tokens.word_groups() if len(group) > 1]
    note = f"{sum(map(len, groups))} tokens are merged into {amount(len(groups), 'word')}"
    if groups:
        merged = list(dict.fromkeys(tokens.merge(groups).labels))
        note += f": {', '.join(merged[:_MERGED_SHOWN])}"
        if len(merged) > _MERGED_SHOWN:
            note += ", …"
    return replace(reading, tokens=tokens, target=target, notes=(*reading.notes, note))


def position_of(name: str | int, tokens: Tokens, option: str) -> int:
    """Return the position of the one token that is named: by its number, a word, or a place such as @3.

    Raises:
        AttnscopeError: The name means no token, or several.
    """
    # A word or a place such as @3; else a number.
    positions = tokens.find_one(name) if isinstance(name, str) else ()
    positions = positions or tokens.find_one(f"@{name}")
    if not positions:
        raise tokens.refuse(str(name))
    # Several are told with their places.
    if len(positions) > 1:
        several = " ".join(f"@{position} {tokens.labels[position]}" for position in positions)
        raise AttnscopeError(
            f"{name!r} names several tokens: {several}", f"name one of them: {option} @{positions[-1]}"
        )
    return positions[0]


def _read_text(model: Model, prompt: Prompt) -> Reading:
    # Tokenise, by the chat template if asked for.
    limit = model.info.max_tokens
    if prompt.chat:
        if model.tokenizer.chat is None:
            raise AttnscopeError(f"{model.info.name} has no chat template", "leave out --chat")
        if prompt.pair is not None:
            raise AttnscopeError("a chat message is one text", "leave out --pair or --chat")
        text, tokens, cut = encode_within(limit, model.tokenizer.chat, prompt.text)
    else:
        text, tokens, cut = encode_within(limit, model.tokenizer.encode, prompt.text, prompt.pair)
    notes = [cut, UnknownWords.of(model.tokenizer, [tokens]).note]
    # Encoder-decoders read a target beside the text.
    target = None
    if "encoder" in model.info.kinds and "decoder" in model.info.kinds:
        target, note = _target(model, tokens, prompt)
        notes.append(note)
    elif prompt.target is not None:
        raise AttnscopeError(
            f"{model.info.name} is no encoder-decoder, so it has no target", "leave out --target"
        )
    # Decoders may continue the text.
    elif prompt.generate:
        if model.writer is None:
            raise AttnscopeError(
                f"{model.info.name} cannot continue a text", "leave out --generate, or name a decoder"
            )
        tokens = model.writer.generate(tokens, prompt.generate)
        written = len(tokens) - tokens.n_given
        said = (
            f"the model wrote {amount(written, 'token')}, each the most probable one (greedy decoding)"
        )
        if written < prompt.generate:
            said += f"; it ended the text or reached its limit before {prompt.generate}"
        notes.append(said)
        if model.tokenizer.chat is not None and not prompt.chat:
            notes.append("its chat template was not used: --chat puts the text into it, as a question")
    return Reading({}, tokens, notes=tuple(filter(None, notes)), text=text, target=target)


def _target(model: Model, tokens: Tokens, prompt: Prompt) -> tuple[Tokens, str]:
    """Return the tokens that the decoder beside an encoder reads, and a note on them."""
    # The given target, or the model's own answer.
    if prompt.generate:
        raise AttnscopeError(
            f"{model.info.name} answers a text rather than continue it", "leave out --generate"
        )
    assert model.writer is not None  # it has a decoder
    if prompt.target is not None:
        return encode_within(model.info.max_tokens, model.writer.encode_target, prompt.target)[1:]
    target = model.writer.greedy_target(tokens)
    answer = target.text
    if not answer.strip():
        answer = "nothing"
    return target, f"no target was given: the decoder reads what the model itself writes, “{answer}”"


def _see(model: Model, photo: Photo) -> Reading:
    # What reads pictures among words may describe one by itself.
    if model.eyes is None and model.viewer is not None:
        return _view(model, View((photo,), ""))
    if model.eyes is None:
        raise AttnscopeError(
            f"{model.info.name} sees no pictures",
            "leave out --image, or name a vision transformer, such as DINOv2",
        )
    seen = model.eyes.see(photo)
    return Reading.of(seen, seen.tokens.text)


def _view(model: Model, view: View) -> Reading:
    has_text = not is_blank(view.text)
    if model.viewer is None:
        raise AttnscopeError(
            f"{model.info.name} reads no pictures among words",
            "leave out the text and --generate, or --image, or name a model such as SmolVLM, LLaVA or Qwen2-VL",
        )
    # Detectors read pictures alone.
    if not model.viewer.reads_words:
        if has_text or view.generate:
            raise AttnscopeError(
                f"{model.info.name} looks for objects, and reads and writes no words",
                "leave out the text and --generate",
            )
        return Reading.of(model.viewer.view(view.photos, ""), view.photos[0].source)
    if has_text:
        return Reading.of(model.viewer.view(view.photos, view.text, view.generate), view.text)
    # Some caption the picture by themselves.
    if not model.viewer.describes:
        raise AttnscopeError(
            f"{model.info.name} writes of a picture what a text asks for",
            "give a text, such as a question",
        )
    seen = model.viewer.view(view.photos, "", view.generate or DEFAULT_ANSWER)
    text = _ordinary_text(seen.tokens)
    if not text:
        raise AttnscopeError(
            f"{model.info.name} writes nothing of this picture", "give a text that it is to write"
        )
    return Reading.of(
        seen, text, f"no text was given: the words are what the model itself writes, “{text}”"
    )


def _hear(model: Model, speech: Speech) -> Reading:
    """Read frames of a recording, or patches of its spectrogram; with the transcript where there is a decoder."""
    if model.ears is None:
        # A model that is its own eyes reads pictures; else it has a tower beside it for them.
        takes = "pictures" if model.eyes is not None and eyes_of(model) is model else "texts"
        raise AttnscopeError(
            f"{model.info.name} takes {takes}, not recordings",
            "leave out --audio, or name a model such as Whisper or wav2vec 2.0",
        )
    # Encoders of sound have no transcript.
    heard = model.ears.hear(speech.recording)
    if heard.sound is None or model.writer is None:
        if speech.transcript is not None:
            raise AttnscopeError(
                f"{model.info.name} has no decoder, and reads no transcript", "leave out the text"
            )
        return Reading.of(heard, heard.tokens.text)
    # Decoders write the given transcript, or their own.
    if speech.transcript is not None:
        _, target, note = encode_within(
            model.info.max_tokens, model.writer.encode_target, speech.transcript
        )
    else:
        target = model.writer.transcribe(heard, MOST_WRITTEN)
        written = _ordinary_text(target) or " ".join(target.text.split()) or "nothing"
        note = f"no transcript was given: the decoder reads what the model itself writes, “{written}”"
    notes = [note] if note else []
    inputs = {**heard.inputs, **model.writer.decoder_inputs(target)}
    return Reading.of(heard, target.text, *notes, inputs=inputs, target=target)


def _ordinary_text(tokens: Tokens) -> str:
    """Return the text without the special tokens at its ends, on one line."""
    # From the first to the last character that an ordinary token stands for, (token, 2).
    places = tokens.offsets[~tokens.special]
    places = places[(places >= 0).all(1)]
    if not len(places):
        return ""
    return " ".join(tokens.text[places[0, 0] : places[-1, 1]].split())


def encode_within(
    limit: int | None, encode: Callable[..., Tokens], text: str, pair: str | None = None
) -> tuple[str, Tokens, str]:
    """Tokenise a text, or a pair, and cut the tokens to what a model takes, as `truncate` does.

    The tokenizer gets no more of a very long text than the beginning that holds these tokens.

    Returns:
        The text, or its beginning; the tokens; and a sentence that says what was cut, "" if nothing was.
    """
    texts = [text]
    if pair is not None:
        texts.append(pair)
    begins = [_beginning(each, encode, limit) for each in texts]
    tokens, note = truncate(encode(*begins), limit, is_whole=begins == texts)
    return begins[0], tokens, note


def _beginning(text: str, encode: Callable[..., Tokens], limit: int | None) -> str:
    """Return the beginning of a very long text that has twice as many tokens as a model takes, else the text.

    It ends where a word does: a word in two has other tokens. Without a blank the text stays whole.
    """
    if limit is None or len(text) <= WHOLE_CHARACTERS:
        return text
    # Twice as much each time, until there are tokens enough.
    n_characters = _CHARACTERS_PER_TOKEN * limit
    while n_characters < len(text):
        end = max(text.rfind(blank, 0, n_characters) for blank in " \n\t")
        if end > 0 and len(encode(text[:end])) >= 2 * limit:
            return text[:end]
        n_characters *= 2
    return text


def truncate(tokens: Tokens, limit: int | None, *, is_whole: bool = True) -> tuple[Tokens, str]:
    """Return the tokens, cut to what a model takes, and a sentence that says so ("" if nothing was cut).

    The first tokens stay, and all special ones; of a pair, the longer text is cut first. If the tokens are not those of
    the whole text, the sentence says that there are more.

    Raises:
        AttnscopeError: There are no tokens but special ones.
    """
    # Special tokens all stay; the others get the room that is left.
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
    # Of a pair, the longer text is cut first: the shorter one keeps up to half of the room.
    first, second = (ordinary[tokens.segments[ordinary] == segment] for segment in (0, 1))
    # The second also gets what the first does not fill.
    n_second = max(min(len(second), room // 2), room - len(first))
    kept = [first[: room - n_second], second[:n_second], np.flatnonzero(tokens.special)]
    # Say what is left out.
    size = amount(len(tokens), "token")
    if not is_whole:
        size = f"more than {size}"
    parts = f"the first {room - n_second} of the text"
    if len(second):
        parts = f"the first {room - n_second} of the first text and {n_second} of the second"
    note = f"the text has {size}, the model takes {limit}: {parts} are shown, the rest is left out"
    return tokens.take(np.sort(np.concatenate(kept))), note
