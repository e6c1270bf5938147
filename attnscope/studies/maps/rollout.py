"""How much of the input tokens is left in a place after several layers? A model and a text in, a Rollout out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from attnscope.choice import Choice
from attnscope.core.attention import rollout as core
from attnscope.core.plain_torch import with_plain_torch
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.model import Model
from attnscope.questions.heatmap import Heatmap, Rollout
from attnscope.senses.photos import read_photo
from attnscope.studies.inputs.reading import Given, Prompt, Reading, encode_within, read, reader_of
from attnscope.studies.maps.study import outline, run_model


@with_plain_torch
def rollout(
    model: Model, text: str | None = None, *, image: Any = None, residual: float = 0.5, query: str | None = None
) -> Rollout:
    """Compute attention rollout of a model on a text (Abnar & Zuidema 2020).

    The heads of a layer are averaged. In an encoder-decoder, only the encoder counts: the paper does not
    define rollout for two stacks that meet. See `attnscope.core.attention.rollout`.

    Args:
        model: A loaded model, see `attnscope.load`.
        text: What to run it on.
        image: Instead of a text, a photo for a vision model: see `picture_rollout`.
        residual: The share of the identity in each layer, which stands for the residual connection; 0 to 1.
        query: A token, a word, or a place such as `@3`, which must be in the text.

    Raises:
        AttnscopeError: An empty text, no such token, or a model with layers that have no attention.
    """
    if image is not None:
        return picture_rollout(model, image, residual=residual)
    if text is None:
        raise UsageError("no text is given", "give a text, or an image")
    _require_share(residual)
    return _roll_out(_whole_maps(model, Prompt(text)), residual, query)


@with_plain_torch
def picture_rollout(model: Model, image: Any, *, residual: float = 0.5) -> Rollout:
    """Computes attention rollout of a vision model on a photo (Abnar & Zuidema 2020): the patches a token came from.

    Args:
        model: A loaded vision model.
        image: A path, an image of Pillow, or an array (height, width, 3) of uint8.
        residual: The share of the identity in each layer; 0 to 1.

    Raises:
        AttnscopeError: The image is none, or the model sees no pictures.
    """
    _require_share(residual)
    return _roll_out(_whole_maps(model, read_photo(image)), residual)


def _require_share(residual: float) -> None:
    if not 0 <= residual <= 1:
        raise UsageError(f"the share of the residual connection is {residual}", "it is from 0 to 1; 0.5 in the paper")


def _roll_out(record: Heatmap, residual: float, query: str | None = None) -> Rollout:
    """Return the rollout of the maps of all layers and heads."""
    attention = record.maps[0]
    with np.errstate(invalid="ignore"):
        # Heads that a layer lacks are NaN; they are none to average.
        mean = np.nanmean(attention.weights.astype(np.float64), axis=1)
    rolled = core.rollout(core.mix_residual(mean, residual))
    if query is not None and not attention.queries.find(query):
        raise attention.queries.refuse(query)
    return Rollout.of_layers(record, mean, rolled, residual)


def _whole_maps(model: Model, given: Given) -> Heatmap:
    """The maps of all layers and heads of the model's first stack."""
    model = reader_of(model, given)
    if isinstance(given, Prompt) and "encoder" in model.info.kinds and "decoder" in model.info.kinds:
        # What a decoder reads changes nothing in the encoder, so it may read the same.
        text, tokens, cut = encode_within(model.info.max_tokens, model.tokenizer.encode, given.text)
        reading = Reading(text, tokens, tokens, (cut,) if cut else ())
        record = outline(model.info, reading, Choice().within(model.info))
        note = "rollout is the encoder's: it is not defined through a decoder that reads it"
        record = replace(record, maps=record.maps[:1], run={**record.run, "notes": [*record.run["notes"], note]})
    else:
        reading = read(model, given)
        record = outline(model.info, reading, Choice().within(model.info))
    record = run_model(model, record, reading)
    attention = record.maps[0]
    if len(attention.layers) < attention.n_layers:
        raise AttnscopeError(
            f"only {len(attention.layers)} of the {attention.n_layers} layers of {model.info.name} have attention",
            "rollout follows tokens through attention alone, so it would tell nothing of the others",
        )
    return record
