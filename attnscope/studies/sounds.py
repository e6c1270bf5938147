"""When does a speech model listen as it writes each token? A model and a recording in, a Heatmap out."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from attnscope.errors import AttnscopeError
from attnscope.models.model import Hears, Model, SeenPicture
from attnscope.records import Heatmap
from attnscope.records.sounds import Sound
from attnscope.senses.recordings import Recording, read_recording
from attnscope.studies.heatmap import Choice, Reading, choice_from, fitted, observed, outline, require_call

MOST_WRITTEN = 64
"""Tokens that a model writes at most where no transcript is given."""


def sound_heatmap(
    model: Model,
    audio: Any,
    text: str | None = None,
    *,
    layers: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
    pick: Sequence[tuple[int, int]] | None = None,
) -> Heatmap:
    """Runs a speech model on a recording and keeps what it attends to: tokens (queries) by frames in time (keys).

        record = attnscope.sound_heatmap(attnscope.load("./whisper-tiny"), "speech.wav", "the transcript")
        record.sound.seconds_per_frame  # 0.02 for Whisper
        record.draw("figures", scale="head")

    Of an encoder without decoder, such as wav2vec 2.0, it keeps the self-attention: frames by frames. Of Whisper only
    frames with sound are kept, not the silence that the model's window is filled up with; so a row sums to less
    than 1 by what goes there.

    Args:
        model: A loaded model that listens as Whisper does, or an encoder of sound: wav2vec 2.0, HuBERT, WavLM …
        audio: A path to a WAV file, or (samples, rate).
        text: The transcript that its decoder is to write; None = its own greedy output. Encoders have none.
        layers: Numbers of the layers to keep, of Whisper its decoder's; None = all.
        heads: Numbers of the heads to keep in those layers; None = all.
        pick: Single heads to keep, as (layer, head), instead of layers and heads.

    Raises:
        AttnscopeError: The recording is none, or the model does not hear.

    Warns:
        UserWarning: The recording was resampled or cut, or the text was written by the model.
    """
    require_call(model, text or "", pick)
    record = listened(model, audio, text, choice_from(layers, heads, pick))
    for note in record.run["notes"]:
        if note not in model.info.notes:
            warnings.warn(note, stacklevel=2)
    return record


def listened(model: Model, audio: Any, text: str | None, choice: Choice) -> Heatmap:
    """The record of a model that listens; see `sound_heatmap`."""
    reading, sound = heard_with(model, read_recording(audio), text)
    within = choice.within(model.info)
    if reading.target is None or sound is None:
        record = outline(model.info, reading, within, reading.tokens.text)
        return observed(model, replace(record, sound=sound), reading)
    whole = outline(model.info, reading, within, reading.target.text)
    cross = next((m for m in whole.maps if m.kind == "cross"), None)
    if cross is None:
        raise AttnscopeError(
            f"{model.info.name} has no cross-attention in the layers and heads that are chosen",
            f"its decoder has {model.info.n_layers[-1]} layers of {model.info.n_heads[-1]} heads",
        )
    n_sound = len(sound.envelope)
    frames = reading.tokens.take(np.arange(n_sound))
    cross = replace(cross, keys=frames, part=(0, 0, len(reading.target), len(reading.tokens)))
    record = replace(whole, maps=(cross,), sound=sound)
    return observed(model, record, reading)


def heard_with(model: Model, recording: Recording, text: str | None) -> tuple[Reading, Sound | None]:
    """What a model reads as it hears a recording with its transcript, or with what it writes itself.

    Without a decoder it reads no transcript, and the reading has no target; of a spectrogram there is a picture instead
    of a sound.

    Raises:
        AttnscopeError: The model does not hear, or reads no transcript.
    """
    if not isinstance(model, Hears):
        raise AttnscopeError(
            f"{model.info.name} takes texts, not recordings", "leave out --audio, or name a model such as Whisper"
        )
    heard = model.hear(recording)
    notes = list(heard.notes)
    if isinstance(heard, SeenPicture) or "decoder" not in model.info.kinds:
        if text is not None:
            raise AttnscopeError(f"{model.info.name} has no decoder, and reads no transcript", "leave out the text")
        picture, sound = (heard.picture, None) if isinstance(heard, SeenPicture) else (None, heard.sound)
        return Reading(heard.tokens, None, tuple(notes), heard.inputs, picture), sound
    if text is not None:
        target, cut = fitted(model.encode_target(text), model.info.max_tokens)
        notes += [cut] if cut else []
    else:
        target = model.transcribe(heard, MOST_WRITTEN)
        written = " ".join(target.text.split()) or "nothing"
        notes.append(f"no transcript was given: the decoder reads what the model itself writes, “{written}”")
    inputs = {**heard.inputs, **model.decoder_inputs(target)}
    return Reading(heard.tokens, target, tuple(notes), inputs), heard.sound
