"""Compute attention rollout and relevance through the layers, and the times of spoken words from cross-attention.

A record is the result of a study: it holds the maps and can be saved. `running` fills a record with attention weights,
and `core.attention.rollout` has the formulas.
"""

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
from attnscope.studies.maps.running import make_empty_record, run_model

_MAX_FOR_GRADIENTS = 1024
"""The most tokens for `relevance`: it keeps the attention weights of all layers in memory, and their gradients."""


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

    Rollout multiplies the layers' mean attention, each mixed with the identity for the residual connection. In an
    encoder-decoder, only the encoder counts: the paper does not define rollout across cross-attention.

    Args:
        model: A loaded model, see `attnscope.load`.
        text: What to run it on.
        image: Instead of a text, a photo for a vision model: a path, an image of Pillow, or an array (height, width,
            3) of uint8.
        residual: The weight of the identity in each layer's mix, which stands for the residual connection; 0 to 1.
        query: A token, a word, or a place such as `@3`, which must be in the text.

    Raises:
        AttnscopeError: An empty text, no such token, or a model with layers that have no attention.
    """
    if not 0 <= residual <= 1:
        raise UsageError(
            f"the share of the residual connection is {residual}", "it is from 0 to 1; 0.5 in the paper"
        )
    record = _map_all_heads(model, _require_one_input(text, image))
    # Average over heads: (layer, head, query, key) → (layer, query, key). Heads that a layer lacks are NaN, and the
    # mean leaves them out.
    head_means = np.nanmean(record.maps[0].weights.astype(np.float64), axis=1)
    rollout_by_layer = core_rollout.rollout(core_rollout.mix_residual(head_means, residual))
    result = Rollout.of_layers(record, head_means, rollout_by_layer, residual)
    require_query(result, query)
    return result


@with_default_torch
def relevance(
    model: Model, target: str, text: str | None = None, *, image: Any = None, query: str | None = None
) -> Rollout:
    """Compute which tokens or patches matter for a prediction, by attention and its gradients (Chefer et al. 2021).

    In each layer, Ā is the mean over heads of gradient × attention, where negative products count as 0. Relevance R
    begins as the identity, and each layer adds to it: R ← R + Ā R. The prediction is read from the hidden state of one
    token. That token's row of R tells how much each input token matters for the prediction.

    Args:
        model: A loaded model with a head: a decoder, a masked language model, or a classifier of texts or pictures.
        target: The next or the masked token, or a class by its label or number.
        text: What to run it on.
        image: Instead of a text, a photo for a classifier of pictures.
        query: A token, a word, or a place such as `@3`, which must be in the text.

    Raises:
        AttnscopeError: The model has no logit for the target, or the text is too long.
    """
    import torch

    from attnscope.core.interventions import GradientLeaves
    from attnscope.studies.patch.pairs import read_target

    # Read the input. Find the logit of the target: its token position, and its index in the vocabulary or the classes.
    model_input = _require_one_input(text, image)
    model = choose_reader(model, model_input)
    reading = read(model, model_input)
    if len(reading.tokens) > _MAX_FOR_GRADIENTS:
        raise AttnscopeError(
            f"{len(reading.tokens)} tokens are too many for gradients of all weights",
            f"give at most {_MAX_FOR_GRADIENTS}",
        )
    position, target_index = read_target(model, reading.text, reading.tokens, target)
    # The record of the input, still without weights. `Choice()` chooses all layers and heads.
    record = make_empty_record(model.info, reading, Choice().within(model.info))
    # Run the model with the attention weights of every layer as leaves of the autograd graph, (text, head, query, key).
    # A photo is read as tensors, a text as a batch of token ids.
    leaves = GradientLeaves("pattern")
    with torch.enable_grad():
        if reading.inputs and model.outputs_of_inputs is not None:
            outputs = model.outputs_of_inputs(reading.inputs, leaves)
        else:
            outputs = model.outputs(reading.batch(model.info.device), leaves)
    assert outputs.logits is not None  # the model has a head
    # A layer key is (kind of attention, layer). Take the weights of the first kind that ran, in the order of layers.
    first_kind, _ = next(iter(leaves.by_layer))
    weights_of_layers = [leaves.by_layer[key] for key in sorted(leaves.by_layer) if key[0] == first_kind]
    _require_all_layers(record, len(weights_of_layers))
    logit = outputs.logits[0, position, target_index].float()
    gradients = torch.autograd.grad(logit, weights_of_layers)
    # Ā of each layer, the mean over heads of gradient × attention: (layer, query, key).
    means_by_layer = []
    for weights, gradient in zip(weights_of_layers, gradients, strict=True):
        pattern = weights[0].detach().cpu().numpy()
        means_by_layer.append(core_rollout.head_relevance(pattern, gradient[0].cpu().numpy()))
    head_means = np.stack(means_by_layer)
    # R starts as the identity: each token is relevant for itself. Keep only what attention adds to the identity.
    added_relevance = core_rollout.relevance(head_means) - np.eye(len(reading.tokens))
    # The prediction is read from the hidden state of this token. Classifiers have one row of logits, so that their
    # `position` is 0; a classifier on a decoder reads the last token.
    answer_token = position
    if model.labels and "decoder" in model.info.kinds:
        answer_token = len(reading.tokens) - 1
    result = Rollout.of_layers(
        record,
        core_rollout.normalise_rows(head_means),
        core_rollout.normalise_rows(added_relevance),
        residual=0.0,
        target=target,
        answer_token=answer_token,
    )
    require_query(result, query)
    return result


def _require_one_input(text: str | None, image: Any) -> UserInput:
    """Return the text or the photo as the input of a model; raise unless exactly one of them is given."""
    if (text is None) == (image is None):
        raise UsageError("neither a text nor an image is given, or both", "give one of them")
    if text is None:
        return read_photo(image)
    return Prompt(text)


def _map_all_heads(model: Model, model_input: UserInput) -> Heatmap:
    """Run a model, and return a record with the map of all its layers and heads; for an encoder-decoder, the encoder's.

    Raises:
        AttnscopeError: Some layers have no attention.
    """
    model = choose_reader(model, model_input)
    if isinstance(model_input, Prompt) and {"encoder", "decoder"} <= {*model.info.kinds}:
        # An encoder-decoder also needs a text for its decoder. Any text will do, as the decoder does not change the
        # encoder's attention: give it the same tokens.
        text, tokens, truncation_note = encode_truncated(
            model.info.max_tokens, model.tokenizer.encode, model_input.text
        )
        note = "rollout is the encoder's: it is not defined through a decoder that reads it"
        notes = tuple(filter(None, [truncation_note, note]))
        reading = Reading({}, tokens, notes=notes, text=text, target=tokens)
    else:
        reading = read(model, model_input)
    record = make_empty_record(model.info, reading, Choice().within(model.info))
    # The first map is the encoder's, or the only one.
    record = run_model(model, replace(record, maps=record.maps[:1]), reading)
    _require_all_layers(record, len(record.maps[0].layers))
    return record


def _require_all_layers(record: Heatmap, n_attention_layers: int) -> None:
    """Refuse a model with layers that have no attention, such as a hybrid with state-space layers."""
    n_layers = record.maps[0].n_layers
    if n_attention_layers < n_layers:
        raise AttnscopeError(
            f"only {n_attention_layers} of the {n_layers} layers of {record.run['model']} have attention",
            "tokens are followed through attention alone, which would tell nothing of the others",
        )


# Word times


def time_words(record: Heatmap, heads: Sequence[tuple[int, int]]) -> Heatmap:
    """Return the record with the times at which the words of its transcript are spoken, in `record.sound.words`.

    Dynamic time warping (`core.alignment`) finds a path through the rows (tokens) and columns (frames) of the heads'
    mean attention. The model predicts a token in the row of the token before it, and there attends to the predicted
    token's sound. So a token begins at the frame at which the path enters the row before it. The path starts at the
    first frame, and so does the first word. Words with fewer frames than half the running median filter (0.08 s for
    Whisper) are lost. The times are right only if the heads follow the words.

    Args:
        record: The cross-attention of a speech model to a recording.
        heads: The heads that follow the words, (layer, head).

    Raises:
        AttnscopeError: There is no transcript, or a head that the record does not hold.
    """
    # Check the recording and the heads. The first map is of cross-attention: tokens (queries) on frames (keys).
    cross_map = record.maps[0]
    sound = record.sound
    if sound is None or cross_map.kind != "cross":
        raise AttnscopeError(
            "word times need a recording and its transcript", "name a model such as Whisper"
        )
    if missing_heads := [head for head in heads if head not in record.chosen(cross_map)]:
        names = ", ".join(cross_map.name_of(*head) for head in missing_heads)
        raise AttnscopeError(
            f"the record holds no {names}", "leave out -L and -H, or --pick heads that it holds"
        )
    words = _group_tokens(cross_map.queries)
    if not words or not heads:
        raise AttnscopeError("there are no words to time, or no heads whose attention tells times")
    # The first token of each word, and the token after the last word: a word ends where the next begins.
    first_tokens = np.array([word[0] for word in words] + [words[-1][-1] + 1])
    if first_tokens[0] == 0:
        raise AttnscopeError(
            "the transcript has no token before its first word", "its tokenizer writes none"
        )
    # Each token is predicted in the row before it. Take the rows from the one that predicts the first word's first
    # token to the one that predicts the token after the last word.
    transcript_rows = slice(first_tokens[0] - 1, first_tokens[-1])
    # (head, row, frame) → (row,): the frame at which the path enters each row.
    frames = align_tokens(np.stack([cross_map.of(*head)[transcript_rows] for head in heads]))
    row_seconds = np.minimum(frames * sound.seconds_per_frame, sound.seconds)
    starts_s = row_seconds[first_tokens - first_tokens[0]].tolist()
    labels = cross_map.queries.merge(words).labels
    spoken_words = []
    for word, label, start, end in zip(words, labels, starts_s[:-1], starts_s[1:], strict=True):
        spoken_words.append(SpokenWord(label, start, end, (word[0], word[-1] + 1)))
    return replace(record, sound=replace(sound, words=tuple(spoken_words), followed=tuple(heads)))


def choose_alignment_heads(model: Model, picked_heads: Heads | None) -> Heads:
    """Return the heads, (layer, head), whose attention tells when words are spoken.

    They are the picked heads, or else the alignment heads that the model's files name.

    Raises:
        AttnscopeError: No head is picked, and the files of a model that reads recordings name no alignment heads. A
            model that reads no recordings is refused later, when it is asked to read one.
    """
    if picked_heads:
        return picked_heads
    named_heads = () if model.text_generator is None else model.text_generator.alignment_heads
    if not named_heads and model.audio_reader is not None:
        raise AttnscopeError(
            f"{model.info.name} names no heads that follow speech (alignment_heads of its generation_config.json)",
            "choose some with --pick: attnscope heads --audio measures their monotonicity",
        )
    return named_heads


def _group_tokens(tokens: Tokens) -> list[list[int]]:
    """Return the positions of the tokens of each word, such as [[1, 2], [3]]; punctuation joins the word before it."""
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
