"""Compute the attention maps of a text, a photo or a recording; maps of long texts are pooled.

The functions that users call are here. Each returns a record, a result with maps that can be drawn and saved. `running`
runs the model, `derived` times spoken words, and the package `drawing` draws.
"""

import hashlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from attnscope.choice import Crop, Span, TokenOptions, make_choice, make_span
from attnscope.core.plain_torch import with_default_torch
from attnscope.drawing.style import Style
from attnscope.models.model import Model
from attnscope.questions.heatmap import Heatmap
from attnscope.questions.heatmap_figures import require_query
from attnscope.questions.pooled import PooledHeatmap
from attnscope.results.kinds import PAPER_OPTIONS
from attnscope.senses.photos import read_photo
from attnscope.senses.recordings import read_recording
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.inputs.reading import (
    PhotoPrompt,
    Prompt,
    PromptOptions,
    Speech,
    UserInput,
    choose_reader,
    group_words,
    read,
)
from attnscope.studies.maps.derived import choose_alignment_heads, time_words
from attnscope.studies.maps.options import MapOptions, require_cells
from attnscope.studies.maps.running import DEFAULT_CELLS, make_empty_record, pool_maps, run_model
from attnscope.text import read_text, slug

MAX_EXACT_TOKENS = 400
"""Maps of texts with more tokens are pooled by default: a figure has no room for more labels."""


def study(
    spec: str, model_input: UserInput, options: MapOptions, load_options: LoadOptions
) -> Heatmap | PooledHeatmap:
    """Load a model, run it on a text, a photo or a recording, and return the maps: `attnscope heatmap` calls this."""
    # Check the options, and read the file of words, before the model loads.
    options.require_for(model_input)
    extra_words: Sequence[str] = ()
    if options.words_from is not None:
        extra_words = read_text(None, options.words_from).split()
        options = replace(options, words=True)
    # NumPy may run the model on a text, unless --pool asks for pooled maps. None = it may not.
    numpy_prompts = [model_input] if isinstance(model_input, Prompt) and not options.pooled else None
    record = compute_maps(
        load_options.load_for_maps(spec, numpy_prompts), model_input, options, extra_words
    )
    if isinstance(record, Heatmap):
        require_query(record, options.query)
    return record


def compute_maps(
    model: Model,
    model_input: UserInput,
    options: MapOptions,
    extra_words: Sequence[str] = (),
    warn: bool = False,
) -> Heatmap | PooledHeatmap:
    """Run a model on an input, and return its maps, pooled or changed as the options say.

    Args:
        model: The model.
        model_input: A text, a photo or a recording.
        options: Which maps, and how they are pooled or changed.
        extra_words: Words whose tokens are merged into one, such as Chinese words, which tokenizers do not mark.
        warn: Whether to warn of how the input was changed, such as that a text was cut.
    """
    # Check the chosen heads before the input is read, which may take a while for a recording.
    model = choose_reader(model, model_input)
    chosen = options.choice.within(model.info)
    alignment_heads = choose_alignment_heads(model, chosen.picked) if options.times else ()
    reading = read(model, model_input)
    if warn:
        for note in reading.notes:
            # The warning names the caller of `heatmap`: levels 1 to 3 are this function, `heatmap` and its decorator.
            warnings.warn(note, stacklevel=4)
    reading = group_words(reading, extra_words)
    # Pool the maps of long texts, unless `pooled` is 0 or an option needs exact maps, such as --words.
    max_cells = options.pooled
    needs_exact = options.for_exact_maps != MapOptions()
    can_pool = isinstance(model_input, Prompt) and model.info.path == "seam" and not needs_exact
    n_tokens = max(len(reading.tokens), len(reading.target or ()))
    if max_cells is None and can_pool and n_tokens > MAX_EXACT_TOKENS:
        max_cells = DEFAULT_CELLS
    if max_cells:
        return pool_maps(model, reading, chosen, max_cells)
    # Run the model, then change the maps as the options say. `top` limits the weights in CSV and JSON files.
    record = run_model(model, make_empty_record(model.info, reading, chosen, options.cut), reading)
    record = replace(record, top=options.cut.top)
    if options.times:
        record = time_words(record, alignment_heads)
    return apply_changes(record, options)


def name_figure_folder(record: Heatmap | PooledHeatmap, query: str | None, style: Style) -> Path:
    """Return the name of the folder for a record's figures, with a hash of everything that the figures depend on.

    The same figures always have the same folder name.
    """
    # How the figures are drawn. Most options count only if they differ from their defaults, so that a new option of
    # attnscope does not rename old folders.
    drawing_facts: dict[str, object] = {"query": query, "scale": style.scale, "cmap": style.cmap}
    for name in ("colours", "smooth", "layout", *PAPER_OPTIONS):
        value = getattr(style, name)
        if value != getattr(Style, name):
            drawing_facts[name] = value
    # The rows and columns of cells of a pooled map, or the part of an exact map that is shown.
    if isinstance(record, PooledHeatmap):
        drawing_facts["cells"] = list(record.maps[0].cells.shape[2:])
    elif record.maps[0].part is not None:
        drawing_facts["part"] = list(record.maps[0].part)
    # What is drawn: the text, its tokens, the model, the heads, changes of the maps, the second text, and pictures.
    # The order of this list is part of the hash.
    pictures = [
        hashlib.sha256(picture.pixels.tobytes()).hexdigest()
        for picture in getattr(record, "pictures", ())
    ]
    facts = [
        record.text,
        [attention.queries.ids.tolist() for attention in record.maps],
        [record.run[name] for name in ("model", "sha256", "engine", "dtype")],
        [[attention.kind, attention.layers, attention.heads] for attention in record.maps],
        record.picked,
        getattr(record, "changes", None),
        record.maps[0].keys.pair,
        *pictures,
        sorted(drawing_facts.items()),
    ]
    return Path(make_file_name(record, json.dumps(facts).encode()))


def make_file_name(record: Heatmap | PooledHeatmap, content: bytes) -> str:
    """Return a name for a file or folder of a record: `<model>-<text>-<8 hex digits of the content's SHA-256>`."""
    digest = hashlib.sha256(content).hexdigest()[:8]
    return f"{slug(str(record.run.get('model', 'model')))}-{slug(record.text)}-{digest}"


@with_default_torch
def heatmap(
    model: Model,
    text: str,
    *,
    layers: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
    pick: Sequence[tuple[int, int]] | None = None,
    hide_special: bool = False,
    words: bool | Sequence[str] = False,
    rows: Span | slice | None = None,
    cols: Span | slice | None = None,
    **prompt: Unpack[PromptOptions],
) -> Heatmap:
    """Run a model on a text and keep the attention weights of the chosen heads.

    Args:
        model: A loaded model, see `attnscope.load`.
        text: What to run it on.
        layers: Numbers of the layers to keep; None = all.
        heads: Numbers of the heads to keep in those layers; None = all.
        pick: Single heads to keep, as (layer, head), instead of layers and heads.
        hide_special: Leave out special tokens, and in decoders the first token; renormalise each row.
        words: Merge word pieces into words: weights are summed over keys and averaged over queries (Clark et al. 2019,
            section 4.1). A list of words also merges the tokens of these words, which the tokenizer leaves apart.
        rows: Keep only these queries, as (first, last + 1) or a slice. Memory grows with their number, not with the
            text's length.
        cols: Keep only these keys. Weights are not renormalised.
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
    options = MapOptions(
        choice=make_choice(layers, heads, pick),
        cut=Crop(make_span(rows), make_span(cols)),
        hide_special=hide_special,
        words=bool(words),
        pooled=0,
    )
    listed_words = [] if isinstance(words, bool) else words
    record = compute_maps(model, Prompt(text, **prompt), options, listed_words, warn=True)
    assert isinstance(record, Heatmap)  # not pooled
    return record


@with_default_torch
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
    """Run a vision model on a photo and keep the attention weights of the chosen heads.

    Tokens are the patches, "row,column" from the upper left, and the special tokens before them: "CLS", "REG0" …

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
        image: A path, an image of Pillow, or an array (height, width, 3) of uint8; with a text also a list of images.
        text: A question about the image; it is put into the model's chat template, after the pictures. Models that
            caption pictures need no question: with `generate` they write from their own first token.
        generate: How many tokens of an answer the model writes.
        layers: Numbers of the layers to keep; None = all.
        heads: Numbers of the heads to keep in those layers; None = all.
        pick: Single heads to keep, as (layer, head).
        hide_special: Leave out the tokens that are not patches, and renormalise each row.

    Returns:
        The record, with the picture as the model saw it; `weights` is (layer, head, query, key). With a text the
        queries are the tokens after the last picture, and `pictures` says which keys are which patches.

    Raises:
        AttnscopeError: The image cannot be read, the model does not read pictures, or not with a text, or it lacks a
            layer or head.

    Warns:
        UserWarning: The photo was rotated, or is the first of several in its file.
    """
    # A photo alone, or photos with a question or an answer to write.
    if text is None and not generate:
        model_input: UserInput = read_photo(image)
    else:
        images = image if isinstance(image, list | tuple) else [image]
        model_input = PhotoPrompt(tuple(map(read_photo, images)), text or "", generate)
    options = MapOptions(choice=make_choice(layers, heads, pick), hide_special=hide_special)
    record = compute_maps(model, model_input, options, warn=True)
    assert isinstance(record, Heatmap)  # not pooled
    return record


@with_default_torch
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
    """Run a speech model on a recording and keep the weights of its tokens (queries) on frames in time (keys).

        record = attnscope.sound_heatmap(attnscope.load("./whisper-tiny"), "speech.wav", "the transcript")
        record.sound.seconds_per_frame  # 0.02 for Whisper
        record.draw("figures", scale="head")

    For an encoder without a decoder, such as wav2vec 2.0, it keeps the self-attention, (frame, frame). For Whisper it
    keeps the frames with sound, not the silence that fills the model's window. So a row sums to 1 minus the attention
    to the silence.

    Args:
        model: A loaded speech model with a decoder, such as Whisper, or an encoder of sound: wav2vec 2.0, HuBERT,
            WavLM …
        audio: A path to a WAV file, or (samples, rate).
        text: The transcript that the decoder reads; None = the decoder's own greedy output. Leave it out for encoders.
        layers: Numbers of the layers to keep, those of the decoder for Whisper; None = all.
        heads: Numbers of the heads to keep in those layers; None = all.
        pick: Single heads to keep, as (layer, head).
        times: Whether `record.sound.words` says when each word is spoken; see `studies.maps.derived.time_words`.

    Raises:
        AttnscopeError: The recording cannot be read, or the model reads no recordings; or `times` is set, and neither
            `pick` nor the model's files name heads that follow the words.

    Warns:
        UserWarning: The recording was cut, or the text was written by the model.
    """
    options = MapOptions(choice=make_choice(layers, heads, pick), times=times)
    record = compute_maps(model, Speech(read_recording(audio), text), options, warn=True)
    assert isinstance(record, Heatmap)  # not pooled
    # The spectrogram is drawn only under words with times. Without times, drop it, so that it is not saved.
    if times or record.sound is None:
        return record
    return replace(record, sound=replace(record.sound, spectrogram=None))


@with_default_torch
def pooled_heatmap(
    model: Model,
    text: str,
    *,
    cells: int = DEFAULT_CELLS,
    layers: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
    pick: Sequence[tuple[int, int]] | None = None,
    **prompt: Unpack[PromptOptions],
) -> PooledHeatmap:
    """Run a model on a long text and keep pooled maps, marginals and the strongest far links of the chosen heads.

    A cell shows the share of attention that the queries of its row give to the keys of its column, summed over the keys
    and averaged over the queries. The numbers are exact. Memory grows linearly with the text's length. A link is far if
    query and key are more than a cell apart, and more than 32 tokens. Links of special tokens, and links to the first
    token, are left out.

    Args:
        model: A loaded model, see `attnscope.load`.
        text: What to run it on.
        cells: The most rows and columns of cells, 8 to 1024. A longer text has more tokens per cell.
        layers: Numbers of the layers to keep; None = all.
        heads: Numbers of the heads to keep in those layers; None = all.
        pick: Single heads to keep, as (layer, head).
        prompt: How the text is read, as for `heatmap`.

    Returns:
        The record; `maps[0].cells` is (layer, head, row, column).

    Raises:
        AttnscopeError: The text is empty, the model lacks a layer or head, or its attention is not computed at the seam
            (`core.attention.seam`), where maps are pooled.

    Warns:
        UserWarning: The text was cut, or the model wrote the target itself.
    """
    require_cells(cells)
    options = MapOptions(choice=make_choice(layers, heads, pick), pooled=cells)
    record = compute_maps(model, Prompt(text, **prompt), options, warn=True)
    assert isinstance(record, PooledHeatmap)
    return record


def apply_changes(record: Heatmap, changes: TokenOptions) -> Heatmap:
    """Return the record with the changes that the options ask for, in this order.

    First, special tokens are left out, but not the query that `query` names. Then attention to sinks is left out,
    tokens are merged into words, and heads, layers or both are averaged.
    """
    if changes.hide_special:
        record = record.hide_special(keep=changes.query)
    if changes.without_sinks:
        record = record.without_sinks()
    if changes.words:
        record = record.merge_words()
    if changes.mean:
        record = record.average(changes.mean)
    return record
