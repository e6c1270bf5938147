"""What does every head attend to? A model and a text, photo or recording in, a Heatmap out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack, cast

import numpy as np

from attnscope.choice import Choice, Chosen, Cut, Span, choice_from, span_from
from attnscope.core.plain_torch import with_plain_torch
from attnscope.errors import AttnscopeError
from attnscope.host import physical_bytes
from attnscope.models.info import ModelInfo
from attnscope.models.model import Model
from attnscope.questions.heatmap import AttentionMap, Heatmap
from attnscope.questions.maps import spans
from attnscope.results.tokens import Tokens
from attnscope.senses.photos import read_photo
from attnscope.senses.recordings import read_recording
from attnscope.studies.failures import refusal
from attnscope.studies.inputs.provenance import run_of
from attnscope.studies.inputs.reading import (
    Given,
    Prompt,
    PromptOptions,
    Reading,
    Speech,
    View,
    batch_of,
    read,
    reader_of,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from attnscope.core.attention.probes import Weights
    from attnscope.core.attention.seam import Kind, Probe


@with_plain_torch
def heatmap(
    model: Model,
    text: str,
    *,
    layers: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
    pick: Sequence[tuple[int, int]] | None = None,
    hide_special: bool = False,
    words: bool = False,
    rows: Span | slice | None = None,
    cols: Span | slice | None = None,
    **prompt: Unpack[PromptOptions],
) -> Heatmap:
    """Runs a model on a text and keeps the attention weights of the chosen heads.

    Args:
        model: A loaded model, see `attnscope.load`.
        text: What to run it on.
        layers: Numbers of the layers to keep; None = all.
        heads: Numbers of the heads to keep in those layers; None = all.
        pick: Single heads to keep, as (layer, head), instead of layers and heads.
        hide_special: Leaves special tokens out, of a decoder the first token too, and divides each row by what is left
            of it.
        words: Merges word pieces: sums over keys, means over queries (Clark et al. 2019, section 4.1).
        rows: Keeps only these queries, as (first, last + 1) or a slice. Memory grows with their number, not with the
            text's length.
        cols: Keeps only these keys. Weights stay as in the whole map.
        prompt: How the text is read. `pair`: a second text, for models that read pairs. `target`: what the decoder of
            an encoder-decoder is to write; None = its own greedy output. `chat`: puts the text into the model's chat
            template, as the user's message. `generate`: lets a decoder write that many tokens after the text, and
            shows what it attended to as it wrote.

    Returns:
        The record; `weights` is (layer, head, query, key). For long texts see `pooled_heatmap`.

    Raises:
        AttnscopeError: An empty text, a layer or head that the model does not have, something that the model cannot
            do, not enough memory.

    Warns:
        UserWarning: The text was cut, or the model wrote the target itself.
    """
    record = _record_of(
        model, Prompt(text, **prompt), choice_from(layers, heads, pick), Cut(span_from(rows), span_from(cols))
    )
    return apply_changes(record, hide_special=hide_special, words=words)


@with_plain_torch
def picture_heatmap(
    model: Model,
    image: Any,
    text: str | None = None,
    *,
    generate: int = 0,
    layers: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
    pick: Sequence[tuple[int, int]] | None = None,
    hide_special: bool = False,
) -> Heatmap:
    """Runs a vision model on a photo and keeps the attention weights of the chosen heads.

    Tokens are the patches, "row,column" from the upper left, and what stands before them: "CLS", "REG0" …

        record = attnscope.picture_heatmap(model, "photo.png")
        record.draw("figures", scale="head", query="3,5")  # what that patch attends to, laid over the picture
        record.picture.pixels                              # what the model saw

    With a text, a model that reads pictures among words is asked about the photo:

        record = attnscope.picture_heatmap(attnscope.load("./smolvlm"), "photo.png", "What is this?", generate=20)
        record.draw("figures", query="cat")                # what the word attends to, laid over the picture
        record.pictures[0].over(record.of(3, 1)[-1])       # (row, column): what the last word gives to each patch

    Args:
        model: A loaded vision model whose layers all see all patches: ViT, DeiT, DINOv2 …; with a text one that reads
            both: LLaVA, Qwen2-VL, SmolVLM …
        image: A path, an image of Pillow, or an array (height, width, 3) of uint8; with a text also several of them.
        text: A question about it; it is put into the model's own form of chat, after the pictures. Models that caption
            pictures need none: with `generate` they write from their own first token.
        generate: How many tokens of its answer the model writes.
        layers: As of `heatmap`; so are heads and pick.
        heads: See there.
        pick: See there.
        hide_special: Leaves out what is no patch, and divides each row by what is left of it.

    Returns:
        The record, with the picture as the model saw it; `weights` is (layer, head, query, key). With a text the
        queries are the tokens after the last picture, and `pictures` says which keys are which patches.

    Raises:
        AttnscopeError: The image is none, the model sees no pictures, or not among words, a layer or head that it does
            not have.

    Warns:
        UserWarning: Something was done to the photo that is not plain: it was turned, or is the first of several.
    """
    if text is None and not generate:
        to_read: Given = read_photo(image)
    else:
        images = image if isinstance(image, list | tuple) else [image]
        to_read = View(tuple(read_photo(photo) for photo in images), "" if text is None else text, generate)
    record = _record_of(model, to_read, choice_from(layers, heads, pick))
    return apply_changes(record, hide_special=hide_special)


@with_plain_torch
def sound_heatmap(
    model: Model,
    audio: Any,
    text: str | None = None,
    *,
    layers: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
    pick: Sequence[tuple[int, int]] | None = None,
    times: bool = False,
) -> Heatmap:
    """Runs a speech model on a recording and keeps what it attends to: tokens (queries) by frames in time (keys).

        record = attnscope.sound_heatmap(attnscope.load("./whisper-tiny"), "speech.wav", "the transcript")
        record.sound.seconds_per_frame  # 0.02 for Whisper
        record.draw("figures", scale="head")

    For an encoder without a decoder, such as wav2vec 2.0, it keeps the self-attention: frames by frames. For Whisper
    it keeps the frames with sound, not the silence that fills the model's window. So a row sums to 1 minus what goes to
    the silence.

    Args:
        model: A loaded model that listens as Whisper does, or an encoder of sound: wav2vec 2.0, HuBERT, WavLM …
        audio: A path to a WAV file, or (samples, rate).
        text: The transcript that its decoder is to write; None = its own greedy output. Encoders have none.
        layers: Numbers of the layers to keep, of Whisper its decoder's; None = all.
        heads: As of `heatmap`; so is pick.
        pick: See there.
        times: Whether `record.sound.words` says when each word is spoken; see `studies.word_times`.

    Raises:
        AttnscopeError: The recording is none, or the model does not hear; or words are to be timed, and no head is
            named that follows them.

    Warns:
        UserWarning: The recording was resampled or cut, or the text was written by the model.
    """
    from attnscope.studies.maps.word_times import heads_to_follow, time_words

    choice = choice_from(layers, heads, pick)
    followed = heads_to_follow(model, choice.within(model.info).picked) if times else ()
    record = _record_of(model, Speech(read_recording(audio), text), choice)
    if times:
        return time_words(record, followed)
    # Only words are drawn over it.
    return record if record.sound is None else replace(record, sound=replace(record.sound, spectrogram=None))


def _record_of(model: Model, given: Given, choice: Choice, cut: Cut | None = None) -> Heatmap:
    """Runs a model; warns if it does not read all that it is given as it is."""
    model = reader_of(model, given)
    chosen = choice.within(model.info)
    reading = read(model, given)
    for note in reading.notes:
        warnings.warn(note, stacklevel=4)  # of whoever called the study, past `with_plain_torch`
    return run_model(model, outline(model.info, reading, chosen, cut), reading)


def apply_changes(record: Heatmap, *, hide_special: bool = False, words: bool = False) -> Heatmap:
    """The record with special tokens hidden, then word pieces merged, as asked for."""
    record = record.hide_special() if hide_special else record
    return record.merge_words() if words else record


def outline(info: ModelInfo, reading: Reading, chosen: Chosen, cut: Cut | None = None) -> Heatmap:
    """The record as it will be, without weights: enough to draw everything but the maps.

    Of what a decoder hears these are the maps across, on the frames that have sound.

    Raises:
        AttnscopeError: A part is asked for that the text does not have, or of several maps.
    """
    if cut and (len(info.kinds) > 1 or reading.axes):
        raise AttnscopeError(
            f"{info.name} has {len(info.kinds)} kinds of attention, whose rows and columns differ",
            "leave out --rows and --cols",
        )
    maps: list[AttentionMap] = []
    notes = list(reading.notes)
    if reading.axes:
        maps = _maps_by_axes(info, reading, chosen)
        for layer, head in chosen.picked or ():
            kinds = [m.kind for m in maps if layer in m.layers and head in m.heads]
            if len(kinds) > 1:
                notes.append(f"L{layer}H{head} names a head of each kind of attention: {', '.join(kinds)}")
        return Heatmap(reading.text, tuple(maps), run_of(info, notes), picked=chosen.picked, pictures=reading.pictures)
    if reading.pictures and (cut is None or cut.rows is None):
        # Of the patches nothing is asked, and a map of them all would take gigabytes.
        cut = Cut((reading.after_pictures, None), cut.cols if cut else None)
    if reading.pictures and cut and cut.cols is not None:
        raise AttnscopeError("what is laid over a picture are all its patches", "leave out --cols")
    heard = reading.sound if reading.target is not None else None
    for number, kind in enumerate(info.kinds):
        layers = tuple(layer for layer in chosen.layers if layer < info.n_layers[number])
        heads = tuple(head for head in chosen.heads if head < info.n_heads[number])
        if not layers or not heads or (heard is not None and kind != "cross"):
            continue
        queries, keys = reading.queries_and_keys(kind)
        part = None
        if heard is not None:
            part = (0, 0, len(queries), len(keys))
            keys = keys.take(np.arange(len(heard.envelope)))
        if cut:
            rows, cols = cut.within(len(queries), len(keys))
            part = (rows.start, cols.start, len(queries), len(keys))
            if not reading.pictures:
                notes.append(
                    f"a part of the map: queries {rows.start} to {rows.stop - 1} and keys {cols.start} to "
                    f"{cols.stop - 1} of {len(keys)} tokens; weights are those of the whole"
                )
            places = np.arange(len(queries))
            queries, keys = queries.take(places[rows]), keys.take(places[cols])
        maps.append(_empty_map(info, number, layers, heads, (queries, keys), part))
    if heard is not None and not maps:
        raise AttnscopeError(
            f"{info.name} has no cross-attention in the layers and heads that are chosen",
            f"its decoder has {info.n_layers[-1]} layers of {info.n_heads[-1]} heads",
        )
    return Heatmap(
        reading.text, tuple(maps), run_of(info, notes), picked=chosen.picked, picture=reading.picture,
        sound=reading.sound, pictures=reading.pictures,
    )  # fmt: skip


def _empty_map(
    info: ModelInfo,
    number: int,
    layers: tuple[int, ...],
    heads: tuple[int, ...],
    axes: tuple[Tokens, Tokens],
    part: tuple[int, int, int, int] | None,
) -> AttentionMap:
    """A map of the model's kind of attention with this number, without weights."""
    return AttentionMap(
        kind=info.kinds[number],
        layers=layers,
        heads=heads,
        weights=np.zeros((len(layers), len(heads), 0, 0), np.float32),
        queries=axes[0],
        keys=axes[1],
        n_layers=info.n_layers[number],
        n_heads=info.n_heads[number],
        n_kv_heads=info.n_kv_heads[number],
        part=part,
    )


def _maps_by_axes(info: ModelInfo, reading: Reading, chosen: Chosen) -> list[AttentionMap]:
    """The maps of a model with cross-attention to pictures: first that, then the others."""
    maps: list[AttentionMap] = []
    for kind, axes in reading.axes.items():
        at = info.kinds.index(kind)
        layers = tuple(layer for layer in chosen.layers if layer in axes.layers)
        heads = tuple(head for head in chosen.heads if head < info.n_heads[at])
        if not layers or not heads:
            if not maps:
                raise AttnscopeError(
                    f"{info.name} looks at pictures in layers {spans(axes.layers)} alone, each of {info.n_heads[at]} "
                    "heads",
                    "choose among these",
                )
            continue
        part = (axes.first, 0, len(axes.queries), len(axes.keys)) if axes.first else None
        queries = axes.queries.take(np.arange(axes.first, len(axes.queries)))
        maps.append(_empty_map(info, at, layers, heads, (queries, axes.keys), part))
    return maps


def run_model(
    model: Model, record: Heatmap, reading: Reading, probe_of: Callable[..., Weights] | None = None
) -> Heatmap:
    """The outlined record with the model's weights; an AttnscopeError refuses NaN, and maps that don't fit into memory.

    `probe_of` makes the probe, with the arguments of `core.attention.probes.Weights`; None = that one.
    """
    _require_memory(record)
    layers, heads = chosen_of(record)
    if model.look is not None:
        return fill_maps(record, model.look(reading.tokens, layers).weights, model.info)
    from attnscope.core.attention.probes import Part, Weights, probe_by_kind

    probe: Probe
    probes: Mapping[str, Part | Weights]
    part = _slices_of(record.maps[0])
    if reading.axes:  # each kind has queries and keys of its own
        slices = {m.kind: _slices_of(m) or (slice(0, len(m.queries)), slice(0, len(m.keys))) for m in record.maps}
        probes = {m.kind: Part(*slices[m.kind], m.layers, m.heads, (cast("Kind", m.kind),)) for m in record.maps}
        probe = probe_by_kind(probes)
    else:
        kinds = tuple(cast("Kind", m.kind) for m in record.maps)
        if part is not None and model.info.path == "seam":
            shared: Part | Weights = Part(*part, layers, heads, kinds)
        else:
            shared = (probe_of or Weights)(layers=layers, heads=heads, kinds=kinds)
        probe, probes = shared, dict.fromkeys(kinds, shared)
    run_probe(model, reading, probe)
    maps = []
    for m in record.maps:
        weights = probes[m.kind].maps.get(cast("Kind", m.kind), {})
        by_layer = {layer: heads_of_text[0].numpy() for layer, heads_of_text in weights.items()}
        maps.append(_fill(m, by_layer, probes[m.kind].heads, model.info))
    return replace(record, maps=tuple(maps))


def chosen_of(record: Heatmap) -> tuple[list[int], tuple[int, ...] | None]:
    """The layers and heads that a probe keeps for a record; None = all heads."""
    first = record.maps[0]
    # Layers may differ in how many heads they have; only a true choice of heads is the probe's business.
    all_heads = len(record.maps) > 1 or len(first.heads) == first.n_heads
    return sorted({layer for m in record.maps for layer in m.layers}), None if all_heads else first.heads


def run_probe(model: Model, reading: Reading, probe: Probe) -> None:
    """Runs a model on what it reads, with the probe at the seam."""
    import torch

    with torch.inference_mode():
        if reading.inputs is not None and model.run_inputs is not None:
            model.run_inputs(reading.inputs, probe)
        else:
            model.run(batch_of(reading, model.info.device), probe)


def _slices_of(attention: AttentionMap) -> tuple[slice, slice] | None:
    """Which queries and keys of the whole a map holds; None = all."""
    if attention.part is None:
        return None
    q, k = attention.part[:2]
    return slice(q, q + len(attention.queries)), slice(k, k + len(attention.keys))


def fill_maps(record: Heatmap, weights: Mapping[int, NDArray[np.float32]], info: ModelInfo) -> Heatmap:
    """The outlined record of a model with one kind of attention, with its weights by layer, (head, query, key)."""
    return replace(record, maps=tuple(_fill(m, weights, None, info) for m in record.maps))


def _fill(
    attention: AttentionMap,
    by_layer: Mapping[int, NDArray[np.float32]],
    probed_heads: Sequence[int] | None,
    info: ModelInfo,
) -> AttentionMap:
    """The map with its weights, without layers that have no attention; NaN for heads that a layer lacks."""
    layers, part = layers_found(attention, by_layer), _slices_of(attention)
    shape = len(attention.queries), len(attention.keys)
    weights = [by_layer[layer] for layer in layers]
    if part is not None:  # a model off the seam gives whole maps
        weights = [each if each.shape[1:] == shape else each[:, part[0], part[1]] for each in weights]
    return replace(attention, layers=layers, weights=lay_heads(attention, layers, weights, probed_heads, info))


def lay_heads(
    attention: AttentionMap,
    layers: Sequence[int],
    numbers: Sequence[NDArray[Any]],
    probed_heads: Sequence[int] | None,
    info: ModelInfo,
) -> NDArray[Any]:
    """Numbers of layers, each (head, ...) of the heads that were probed, as one array (layer, head, ...) for the map.

    Heads that a layer lacks are NaN, or -1 in whole numbers. An AttnscopeError refuses NaN.
    """
    is_whole = np.issubdtype(numbers[0].dtype, np.integer)
    shape = (len(layers), len(attention.heads), *numbers[0].shape[1:])
    laid = np.full(shape, -1, np.int32) if is_whole else np.full(shape, np.nan, np.float32)
    for at_layer, (layer, of_layer) in enumerate(zip(layers, numbers, strict=True)):
        if not is_whole and np.isnan(of_layer).any():
            raise refusal(info, (attention.kind, layer))
        for row, head in enumerate(attention.heads):
            number = head if probed_heads is None else probed_heads.index(head)
            if number < len(of_layer):
                laid[at_layer, row] = of_layer[number]
    return laid


def layers_found(attention: AttentionMap, by_layer: Mapping[int, Any]) -> tuple[int, ...]:
    """The layers of a map that have attention; an AttnscopeError if none has."""
    layers = tuple(layer for layer in attention.layers if layer in by_layer)
    if not layers:
        raise AttnscopeError(
            f"no attention in layers {spans(attention.layers)}: this model has none there", "choose other layers"
        )
    return layers


def _require_memory(record: Heatmap) -> None:
    """Refuses maps that don't fit into memory, before the model runs for minutes."""
    needed = sum(4 * len(m.layers) * len(m.heads) * len(m.queries) * len(m.keys) for m in record.maps)
    available = physical_bytes()
    if available is not None and needed * 2 > available:
        first = record.maps[0]
        raise AttnscopeError(
            f"the maps of layers {spans(first.layers)} and heads {spans(first.heads)} on {len(first.keys)} tokens "
            f"need {needed / 2**30:.0f} GiB, this machine has {available / 2**30:.0f} GiB",
            "choose fewer layers and heads (-L, -H, --pick), a part (--rows, --cols), or --pool 256",
        )
