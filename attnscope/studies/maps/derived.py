"""Derive rollouts through the layers, and the times of spoken words, from maps of weights."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from attnscope.choice import Choice
from attnscope.core.alignment import align_tokens
from attnscope.core.attention import rollout as rollouts
from attnscope.core.plain_torch import with_plain_torch
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.model import Model
from attnscope.questions.heatmap import Heatmap, Rollout
from attnscope.questions.heatmap_figures import require_query
from attnscope.questions.places import SpokenWord
from attnscope.results.tokens import Tokens
from attnscope.senses.photos import read_photo
from attnscope.studies.inputs.reading import Given, Prompt, Reading, encode_within, read, reader_of
from attnscope.studies.maps.running import outline, run_model

_MOST_GRADED = 1024
"""Tokens of a text whose weights are all kept with their gradients."""


@with_plain_torch
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
    record = _whole_maps(model, _given(text, image))
    # (layer, head, query, key) → (layer, query, key). Heads that a layer lacks are NaN, and left out of the mean.
    with np.errstate(invalid="ignore"):
        mean = np.nanmean(record.maps[0].weights.astype(np.float64), axis=1)
    through_layers = rollouts.rollout(rollouts.mix_residual(mean, residual))
    result = Rollout.of_layers(record, mean, through_layers, residual)
    require_query(result, query)
    return result


@with_plain_torch
def relevance(
    model: Model, target: str, text: str | None = None, *, image: Any = None, query: str | None = None
) -> Rollout:
    """Compute which tokens or patches matter for a prediction, by attention and its gradients (Chefer et al. 2021).

    In each layer, the mean over heads of gradient × attention, negative ones as 0; and through the layers
    R ← R + Ā R. The row of the token that the prediction is read from says what matters for it.

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

    from attnscope.core.interventions import Leaves
    from attnscope.studies.patch.pairs import read_target

    # Read what the prediction is made from, and find where it is made.
    given = _given(text, image)
    model = reader_of(model, given)
    reading = read(model, given)
    if len(reading.tokens) > _MOST_GRADED:
        raise AttnscopeError(
            f"{len(reading.tokens)} tokens are too many for gradients of all weights",
            f"give at most {_MOST_GRADED}",
        )
    position, target_index = read_target(model, reading.text, reading.tokens, target)
    record = outline(model.info, reading, Choice().within(model.info))
    # Run the model with the weights of every layer as leaves, (text, head, query, key).
    probe = Leaves("pattern")
    with torch.enable_grad():
        if reading.inputs and model.outputs_of_inputs is not None:
            outputs = model.outputs_of_inputs(reading.inputs, probe)
        else:
            outputs = model.outputs(reading.batch(model.info.device), probe)
    assert outputs.logits is not None  # it has a head
    # `probe.tensors` has the weights by (kind, layer): take those of the first kind that ran, layer by layer.
    kind, _ = next(iter(probe.tensors))
    layers = [probe.tensors[place] for place in sorted(probe.tensors) if place[0] == kind]
    _require_all_layers(model, record.maps[0].n_layers, len(layers))
    gradients = torch.autograd.grad(outputs.logits[0, position, target_index].float(), layers)
    # (head, query, key) of each layer → (layer, query, key).
    by_layer = []
    for weights, gradient in zip(layers, gradients, strict=True):
        pattern = weights[0].detach().cpu().numpy()
        by_layer.append(rollouts.head_relevance(pattern, gradient[0].cpu().numpy()))
    means = np.stack(by_layer)
    # At first each token is relevant for itself alone: the identity. Keep what attention adds to that.
    added = rollouts.relevance(means) - np.eye(len(reading.tokens))
    # The token whose row the head reads: a classifier on a decoder reads the last one.
    answer_token = position
    if model.labels and "decoder" in model.info.kinds:
        answer_token = len(reading.tokens) - 1
    result = Rollout.of_layers(
        record,
        rollouts.row_shares(means),
        rollouts.row_shares(added),
        residual=0.0,
        target=target,
        answer_token=answer_token,
    )
    require_query(result, query)
    return result


def _given(text: str | None, image: Any) -> Given:
    """Return the text or the photo; refuse both and neither."""
    if (text is None) == (image is None):
        raise UsageError("neither a text nor an image is given, or both", "give one of them")
    if text is None:
        return read_photo(image)
    return Prompt(text)


def _whole_maps(model: Model, given: Given) -> Heatmap:
    """Return the maps of all layers and heads of a model; of an encoder-decoder those of its encoder."""
    model = reader_of(model, given)
    has_two_stacks = isinstance(given, Prompt) and {"encoder", "decoder"} <= {*model.info.kinds}
    if isinstance(given, Prompt) and has_two_stacks:
        # What a decoder reads changes nothing in the encoder, so it may read the same.
        text, tokens, cut = encode_within(model.info.max_tokens, model.tokenizer.encode, given.text)
        note = "rollout is the encoder's: it is not defined through a decoder that reads it"
        reading = Reading({}, tokens, notes=tuple(filter(None, [cut, note])), text=text, target=tokens)
    else:
        reading = read(model, given)
    # Keep the encoder's maps alone: they come first.
    record = outline(model.info, reading, Choice().within(model.info))
    if has_two_stacks:
        record = replace(record, maps=record.maps[:1])
    record = run_model(model, record, reading)
    _require_all_layers(model, record.maps[0].n_layers, len(record.maps[0].layers))
    return record


def _require_all_layers(model: Model, n_layers: int, n_with_attention: int) -> None:
    if n_with_attention < n_layers:
        raise AttnscopeError(
            f"only {n_with_attention} of the {n_layers} layers of {model.info.name} have attention",
            "tokens are followed through attention alone, which would tell nothing of the others",
        )


# Word times


def time_words(record: Heatmap, heads: Sequence[tuple[int, int]]) -> Heatmap:
    """Return the record with the times at which the words of its transcript are spoken, in `record.sound.words`.

    A token begins where the path of dynamic time warping (`core.alignment`) comes to its row. That is the row of the
    token before it: what the model attends to as it writes the token. The path begins with the recording, and so does
    the first word. It loses words of fewer frames than half the running median (0.08 s for Whisper). The times are
    right only if the heads follow the words.

    Args:
        record: The cross-attention of a speech model to a recording.
        heads: Heads of it, (layer, head), that follow the words.

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
    if lacking := [pair for pair in heads if pair not in record.chosen(cross)]:
        named = ", ".join(f"L{layer}H{head}" for layer, head in lacking)
        raise AttnscopeError(
            f"the record holds no {named}", "leave out -L and -H, or --pick heads that it holds"
        )
    words = _words(cross.queries)
    if not words or not heads:
        raise AttnscopeError("there are no words to time, or no heads whose attention tells times")
    # The first token of each word, and the token after the last word.
    begins = np.array([word[0] for word in words] + [words[-1][-1] + 1])
    if begins[0] == 0:
        raise AttnscopeError(
            "the transcript has no token before its first word", "its tokenizer writes none"
        )
    # As a token is written, its frames are attended to in the row of the token before it.
    rows = slice(begins[0] - 1, begins[-1])
    # (head, token, frame) → the first frame of each token.
    frames = align_tokens(np.stack([cross.of(*pair)[rows] for pair in heads]))
    seconds = np.minimum(frames * sound.seconds_per_frame, sound.seconds)[begins - begins[0]].tolist()
    labels = cross.queries.merge(words).labels
    spoken = []
    for number, (word, label) in enumerate(zip(words, labels, strict=True)):
        start, end = seconds[number : number + 2]
        spoken.append(SpokenWord(label, start, end, (word[0], word[-1] + 1)))
    return replace(record, sound=replace(sound, words=tuple(spoken), followed=tuple(heads)))


def heads_to_follow(
    model: Model, picked: Sequence[tuple[int, int]] | None
) -> tuple[tuple[int, int], ...]:
    """Return the heads that tell when words are spoken: the picked ones, else those that the model's files name.

    A model that hears nothing has none; it is refused later, as it reads the recording.
    """
    named = () if model.writer is None else model.writer.alignment_heads
    if picked or named or model.ears is None:
        return tuple(picked or named)
    raise AttnscopeError(
        f"{model.info.name} names no heads that follow speech (alignment_heads of its generation_config.json)",
        "choose some with --pick: attnscope heads --audio measures their monotonicity",
    )


def _words(tokens: Tokens) -> list[list[int]]:
    """Return the positions of the tokens of each word; punctuation belongs to the word before it."""
    words: list[list[int]] = []
    for group in tokens.word_groups():
        if tokens.special[group].any():
            continue
        (label,) = tokens.merge([group]).labels
        # A word without letters or digits is punctuation.
        is_mark = not any(map(str.isalnum, label))
        if is_mark and words and words[-1][-1] + 1 == group[0]:
            words[-1] = [*words[-1], *group]
        else:
            words.append(group)
    return words
