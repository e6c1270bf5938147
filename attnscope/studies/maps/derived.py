"""Compute attention rollout and relevance through the layers, and the times of spoken words from cross-attention."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from attnscope.choice import Choice
from attnscope.core.alignment import align_tokens
from attnscope.core.attention import rollout as core_rollout
from attnscope.core.plain_torch import with_default_torch
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.model import Model
from attnscope.options import Heads
from attnscope.questions.heatmap import Heatmap, Rollout
from attnscope.questions.heatmap_figures import require_query
from attnscope.questions.places import SpokenWord
from attnscope.results.tokens import Tokens
from attnscope.senses.photos import read_photo
from attnscope.studies.inputs.reading import (
    Prompt,
    Reading,
    UserInput,
    choose_reader,
    encode_truncated,
    read,
)
from attnscope.studies.maps.running import outline, run_model

_MAX_FOR_GRADIENTS = 1024
"""The most tokens for `relevance`, which keeps the weights of all layers in memory, and their gradients."""


@with_default_torch
def rollout(
    model: Model,
    text: str | None = None,
    *,
    image: Any = None,
    residual: float = 0.5,
    query: str | None = None,
) -> Rollout:
    """Compute attention rollout of a model on a text or a photo (Abnar & Zuidema 2020).

    The heads of a layer are averaged. In an encoder-decoder, only the encoder counts: the paper does not
    define rollout for two stacks that meet. See `attnscope.core.attention.rollout`.

    Args:
        model: A loaded model, see `attnscope.load`.
        text: What to run it on.
        image: Instead of a text, a photo for a vision model: a path, an image of Pillow, or an array (height, width,
            3) of uint8.
        residual: The share of the identity in each layer, which stands for the residual connection; 0 to 1.
        query: A token, a word, or a place such as `@3`, which must be in the text.

    Raises:
        AttnscopeError: An empty text, no such token, or a model with layers that have no attention.
    """
    if not 0 <= residual <= 1:
        raise UsageError(
            f"the share of the residual connection is {residual}", "it is from 0 to 1; 0.5 in the paper"
        )
    record = _map_all_heads(model, _input_of(text, image))
    # (layer, head, query, key) → (layer, query, key). Heads that a layer lacks are NaN, and left out of the mean.
    head_means = np.nanmean(record.maps[0].weights.astype(np.float64), axis=1)
    through_layers = core_rollout.rollout(core_rollout.mix_residual(head_means, residual))
    result = Rollout.of_layers(record, head_means, through_layers, residual)
    require_query(result, query)
    return result


@with_default_torch
def relevance(
    model: Model, target: str, text: str | None = None, *, image: Any = None, query: str | None = None
) -> Rollout:
    """Compute which tokens or patches matter for a prediction, by attention and its gradients (Chefer et al. 2021).

    In each layer, Ā is the mean over heads of gradient × attention, where negative products count as 0. Relevance R
    begins as the identity, and each layer adds to it: R ← R + Ā R. The row of R of the token that the prediction is
    read from tells how much each input token matters for the prediction.

    Args:
        model: A loaded model with a head: a decoder, a masked language model, or a classifier of texts or pictures.
        target: The next or the masked token, or a class by its label or number.
        text: What to run it on.
        image: Instead of a text, a photo for a classifier of pictures.
        query: A token, a word, or a place such as `@3`, which must be in the text.

    Raises:
        AttnscopeError: The model predicts no such thing, or the text is too long.
    """
    import torch

    from attnscope.core.interventions import GradientLeaves
    from attnscope.studies.patch.pairs import read_target

    # Read the input, and find the logit of the target: at which token, and which of the vocabulary or the classes.
    item = _input_of(text, image)
    model = choose_reader(model, item)
    reading = read(model, item)
    if len(reading.tokens) > _MAX_FOR_GRADIENTS:
        raise AttnscopeError(
            f"{len(reading.tokens)} tokens are too many for gradients of all weights",
            f"give at most {_MAX_FOR_GRADIENTS}",
        )
    position, target_index = read_target(model, reading.text, reading.tokens, target)
    # The record of the input, as yet without weights.
    record = outline(model.info, reading, Choice().within(model.info))
    # Run the model with the weights of every layer as leaves of the graph, (text, head, query, key). A photo comes as
    # tensors, a text as a batch of ids.
    leaves = GradientLeaves("pattern")
    with torch.enable_grad():
        if reading.inputs and model.outputs_of_inputs is not None:
            outputs = model.outputs_of_inputs(reading.inputs, leaves)
        else:
            outputs = model.outputs(reading.batch(model.info.device), leaves)
    assert outputs.logits is not None  # the model has a head
    # A place is (kind of attention, layer). Take the weights of the first kind that ran, layer by layer.
    kind, _ = next(iter(leaves.by_layer))
    weights_of_layers = [leaves.by_layer[place] for place in sorted(leaves.by_layer) if place[0] == kind]
    _require_all_layers(record, len(weights_of_layers))
    logit = outputs.logits[0, position, target_index].float()
    gradients = torch.autograd.grad(logit, weights_of_layers)
    # Ā of each layer, the mean over heads of gradient × attention: (layer, query, key).
    means = []
    for weights, gradient in zip(weights_of_layers, gradients, strict=True):
        pattern = weights[0].detach().cpu().numpy()
        means.append(core_rollout.head_relevance(pattern, gradient[0].cpu().numpy()))
    head_means = np.stack(means)
    # At first, each token is relevant for itself alone: R is the identity. Keep what attention adds to it.
    added = core_rollout.relevance(head_means) - np.eye(len(reading.tokens))
    # The prediction is read from the hidden state of this token; classifiers on decoders read the last one.
    answer_token = position
    if model.labels and "decoder" in model.info.kinds:
        answer_token = len(reading.tokens) - 1
    result = Rollout.of_layers(
        record,
        core_rollout.normalise_rows(head_means),
        core_rollout.normalise_rows(added),
        residual=0.0,
        target=target,
        answer_token=answer_token,
    )
    require_query(result, query)
    return result


def _input_of(text: str | None, image: Any) -> UserInput:
    """Return the text or the photo as the input of a model; refuse both and neither."""
    if (text is None) == (image is None):
        raise UsageError("neither a text nor an image is given, or both", "give one of them")
    if text is None:
        return read_photo(image)
    return Prompt(text)


def _map_all_heads(model: Model, item: UserInput) -> Heatmap:
    """Return a record with the map of all layers and heads of a model; of an encoder-decoder the encoder's map alone.

    Raises:
        AttnscopeError: Some layers have no attention.
    """
    model = choose_reader(model, item)
    if isinstance(item, Prompt) and {"encoder", "decoder"} <= {*model.info.kinds}:
        # An encoder-decoder also needs a text for its decoder: it reads the same tokens, as nothing flows back from it.
        text, tokens, cut = encode_truncated(model.info.max_tokens, model.tokenizer.encode, item.text)
        note = "rollout is the encoder's: it is not defined through a decoder that reads it"
        reading = Reading({}, tokens, notes=tuple(filter(None, [cut, note])), text=text, target=tokens)
    else:
        reading = read(model, item)
    record = outline(model.info, reading, Choice().within(model.info))
    # The first map is the encoder's.
    record = run_model(model, replace(record, maps=record.maps[:1]), reading)
    _require_all_layers(record, len(record.maps[0].layers))
    return record


def _require_all_layers(record: Heatmap, n_with_attention: int) -> None:
    """Refuse a model some of whose layers have no attention, such as a hybrid with state-space layers."""
    n_layers = record.maps[0].n_layers
    if n_with_attention < n_layers:
        raise AttnscopeError(
            f"only {n_with_attention} of the {n_layers} layers of {record.run['model']} have attention",
            "tokens are followed through attention alone, which would tell nothing of the others",
        )


# Word times


def time_words(record: Heatmap, heads: Sequence[tuple[int, int]]) -> Heatmap:
    """Return the record with the times at which the words of its transcript are spoken, in `record.sound.words`.

    Dynamic time warping (`core.alignment`) leads a path through the rows (tokens) and columns (frames) of the heads'
    mean attention. A model writes a token in the row of the token before it, and attends to the token's sound there. So
    a token begins at the frame at which the path comes to that row. The path starts at the first frame, and with it the
    first word. Words with fewer frames than half the running median (0.08 s for Whisper) are lost. The times are right
    only if the heads follow the words.

    Args:
        record: The cross-attention of a speech model to a recording.
        heads: The heads that follow the words, (layer, head).

    Raises:
        AttnscopeError: There is no transcript, or a head that the record does not hold.
    """
    # Check the recording and the heads.
    cross = record.maps[0]
    sound = record.sound
    if sound is None or cross.kind != "cross":
        raise AttnscopeError(
            "word times need a recording and its transcript", "name a model such as Whisper"
        )
    if lacking := [head for head in heads if head not in record.chosen(cross)]:
        names = ", ".join(cross.name_of(*head) for head in lacking)
        raise AttnscopeError(
            f"the record holds no {names}", "leave out -L and -H, or --pick heads that it holds"
        )
    words = _group_tokens(cross.queries)
    if not words or not heads:
        raise AttnscopeError("there are no words to time, or no heads whose attention tells times")
    # The first token of each word, and the token after the last word: where one word ends, the next begins.
    bounds = np.array([word[0] for word in words] + [words[-1][-1] + 1])
    if bounds[0] == 0:
        raise AttnscopeError(
            "the transcript has no token before its first word", "its tokenizer writes none"
        )
    # Each of these tokens is written in the row before it: the first row writes the first token of the first word.
    rows = slice(bounds[0] - 1, bounds[-1])
    # (head, row, frame) → when the path comes to each row.
    frames = align_tokens(np.stack([cross.of(*head)[rows] for head in heads]))
    row_seconds = np.minimum(frames * sound.seconds_per_frame, sound.seconds)
    bounds_s = row_seconds[bounds - bounds[0]].tolist()
    labels = cross.queries.merge(words).labels
    spoken = []
    for word, label, start, end in zip(words, labels, bounds_s[:-1], bounds_s[1:], strict=True):
        spoken.append(SpokenWord(label, start, end, (word[0], word[-1] + 1)))
    return replace(record, sound=replace(sound, words=tuple(spoken), followed=tuple(heads)))


def heads_to_follow(model: Model, picked: Heads | None) -> Heads:
    """Return the heads, (layer, head), whose attention tells when words are spoken.

    They are the picked ones, else those that the model's files name. A model that hears nothing may have none: it is
    refused later, as it reads the recording.
    """
    if picked:
        return picked
    named = () if model.text_generator is None else model.text_generator.alignment_heads
    if not named and model.audio_reader is not None:
        raise AttnscopeError(
            f"{model.info.name} names no heads that follow speech (alignment_heads of its generation_config.json)",
            "choose some with --pick: attnscope heads --audio measures their monotonicity",
        )
    return named


def _group_tokens(tokens: Tokens) -> list[list[int]]:
    """Return the positions of the tokens of each word; punctuation belongs to the word before it."""
    words: list[list[int]] = []
    for group in tokens.word_groups():
        if tokens.special[group].any():
            continue
        (label,) = tokens.merge([group]).labels
        # A word without letters or digits is punctuation.
        is_punctuation = not any(map(str.isalnum, label))
        if is_punctuation and words and words[-1][-1] + 1 == group[0]:
            words[-1] += group
        else:
            words.append(group)
    return words
