"""The interface of every model, whichever engine runs it: texts in, attention out through the seam."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

from attnscope.errors import AttnscopeError, amount
from attnscope.models.info import ModelInfo
from attnscope.results.tokens import Tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from attnscope.core.attention.probes import LayerKey
    from attnscope.core.attention.seam import Probe
    from attnscope.models.hf.senses.media_readers import AudioReader, ImageReader
    from attnscope.models.hf.senses.text_generator import TextGenerator
    from attnscope.models.hf.senses.vision_language import VisionLanguageReader
    from attnscope.models.inside.tape import ResumableRun
    from attnscope.questions.places import Picture, Sound


class Tokenizer:
    """The interface of all tokenizers, which turn text into Tokens. This class itself has no vocabulary.

    Attributes:
        name: A short description.
        encode_chat: Tokenises a text as the user's message in the model's chat template; None where there is no
            template.
        mask_id: The id of the token that stands for a hidden one; None where there is none.
        unknown_id: The id of the token that stands for what the vocabulary lacks; None where nothing is unknown.
    """

    name = ""
    encode_chat: "Callable[[str], Tokens] | None" = None
    mask_id: int | None = None
    unknown_id: int | None = None

    def encode(self, text: str, pair: str | None = None) -> Tokens:
        """Tokenise a text, or a pair of texts, with the special tokens that the model expects."""
        raise NotImplementedError

    def ordinary_ids(self) -> list[int]:
        """Return the ids of all tokens that stand for text, not special or unused ones; [] without a vocabulary."""
        return []

    def spell(self, token_id: int) -> str:
        """Return the text of an ordinary token; without a vocabulary, its id."""
        return str(token_id)


@dataclass(frozen=True, eq=False)
class Batch:
    """The token ids of several texts, padded to one length.

    Attributes:
        ids: (batch, token), int64.
        mask: (batch, token), bool; True = a real token, False = padding. None = nothing is padded.
        segments: (batch, token), int64; None = all 0.
        target_ids: What the decoder of an encoder-decoder reads, (batch, token); None for other models.
        target_mask: As mask, for target_ids.
    """

    ids: "Tensor"
    mask: "Tensor | None" = None
    segments: "Tensor | None" = None
    target_ids: "Tensor | None" = None
    target_mask: "Tensor | None" = None

    def to(self, device: "str | torch.device") -> "Batch":
        """Return the batch on a device; masks that are True everywhere become None."""
        tensors = {}
        for name, tensor in self._tensors().items():
            moved = tensor.to(device)
            hides_nothing = name.endswith("mask") and moved.all()
            if not hides_nothing:
                tensors[name] = moved
        return Batch(**tensors)

    def repeat(self, times: int) -> "Batch":
        """Repeat the batch: all texts, then all of them again, and so on."""
        return Batch(**{name: tensor.repeat(times, 1) for name, tensor in self._tensors().items()})

    def _tensors(self) -> "dict[str, Tensor]":
        """Return the fields that are not None, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


PASS_TOKENS = 2048
"""The most tokens in a forward pass that runs several copies of a batch, each with another change; padding counts."""


class MixedLengthsError(AttnscopeError):
    """Padding these texts together would change the result: the model would treat short texts as long ones."""


@dataclass(frozen=True, eq=False)
class Outputs:
    """The results of a forward pass.

    Attributes:
        hidden: The last hidden states, (batch, token, d_model); of an encoder-decoder the decoder's.
        logits: Of the vocabulary, or of classes, at all tokens or the last few, (batch, token, vocabulary or class); of
            a classifier of texts (batch, 1, class). None = the model has no head, or no logits were asked for.
    """

    hidden: "Tensor"
    logits: "Tensor | None" = None


@dataclass(frozen=True, eq=False)
class WeightSlice:
    """The rows or columns of one weight that belong to chosen heads and to no others."""

    # The weight's name in the model, such as "bert.encoder.layer.0.attention.self.query.weight"
    name: str
    # 0 = rows, 1 = columns
    axis: int
    # The numbers of the rows or columns
    indices: tuple[int, ...]
    # What the weight makes: "query", "key" or "value"; or "output" for W_O
    role: str
    # The whole weight, as the model holds it
    weight: "Tensor"


class LayerMaps(NamedTuple):
    """The attention maps of an encoder on a text, as NumPy arrays by layer."""

    weights: "dict[int, NDArray[Any]]"  # of each head, (head, query, key)
    full: "dict[int, NDArray[Any]]"  # as if the layer had one head of its full width, (query, key)


@dataclass(frozen=True, eq=False)
class AttentionAxes:
    """The tokens along both axes of the maps of one kind of attention, where queries and keys differ."""

    queries: Tokens
    keys: Tokens
    # The numbers of the layers that have this attention
    layers: tuple[int, ...]
    # The first query that is shown: the words before a picture do not attend to it
    first: int = 0


@dataclass(frozen=True, eq=False)
class SensoryInput:
    """A photo or a recording, alone or with words, as inputs of a model, with its tokens."""

    # The arguments of the model's forward, by name
    inputs: "Mapping[str, Tensor]"
    # The patches of a picture, after special tokens; the frames of a sound, silence included; or words, with the
    # patches of pictures that stand among them
    tokens: Tokens
    # The picture as the model sees it, or the spectrogram that a model sees of a recording; None for models that hear,
    # and where there are words
    picture: "Picture | None" = None
    # The recording as the model hears it; None for models that see
    sound: "Sound | None" = None
    # What was done to the photo or the recording that its owner may not expect, one sentence each
    notes: tuple[str, ...] = ()
    # The pictures that come with words, as the model sees them
    pictures: "tuple[Picture, ...]" = ()
    # Kind of attention -> its queries and keys, for models with cross-attention from words or learned queries to
    # patches: this kind comes first. Empty where patches are among the tokens
    axes: "Mapping[str, AttentionAxes]" = field(default_factory=dict)


LossKind = Literal["causal", "masked", "target", "class", "token_class"]
"""What a model's head predicts: the next token, masked tokens, a target text, or the class of a text or token."""


class Model:
    """A loaded model: its tokenizer reads texts, and its attention passes the seam.

    Each engine has a subclass, which overrides what its models can do. In this class every ability but `run` is
    missing: it is None, empty or refused.

    Attributes:
        info: The facts of the model.
        tokenizer: Its tokenizer.
        texts: The only texts that it can read; empty = it reads any.
        resumes: Whether `rerun` can leave out the layers before a change.
        run_inputs: Like `run`, for the arguments of the model's forward by name, as `SensoryInput.inputs` has them.
        outputs_of_inputs: Like `outputs`, for the same arguments.
        head_slices: Returns the parts of weights, named as in the model's files, that belong to some heads alone. The
            heads are given by layer key, (kind, layer).
        look: Returns the attention maps of some layers on a text without torch; the NumPy engine has it instead of
            `run`.
    """

    info: ModelInfo
    tokenizer: Any
    texts: "tuple[str, ...]" = ()
    resumes: Any = False
    run_inputs: "Callable[[Mapping[str, Any], Probe], Tensor] | None" = None
    outputs_of_inputs: "Callable[[Mapping[str, Any], Probe], Outputs] | None" = None
    head_slices: "Callable[[Mapping[LayerKey, Sequence[int]]], list[WeightSlice]] | None" = None
    look: "Callable[[Tokens, Collection[int]], LayerMaps] | None" = None
    # The blocks of the network, in order, at which `rerun` can start.
    _layers: "Sequence[nn.Module]" = ()
    # The message and the hint of `_refuse`
    _refusal = ("", "")

    @property
    def text_generator(self) -> "TextGenerator | None":
        """Return the part that writes text by the model's decoder; None without a decoder."""
        return None

    @property
    def image_reader(self) -> "ImageReader | None":
        """Return the part that sees pictures; None if the model sees none."""
        return None

    @property
    def audio_reader(self) -> "AudioReader | None":
        """Return the part that hears recordings; None if the model hears none."""
        return None

    @property
    def image_text_reader(self) -> "VisionLanguageReader | None":
        """Return the part that reads pictures and words; None if the model has none."""
        return None

    @property
    def loss(self) -> LossKind | None:
        """Return the target that the model's head predicts; None without a head."""
        return None

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of a classifier's classes; empty for other models."""
        return ()

    def label_number(self, label: str) -> int:
        """Return the index of a class among `labels`.

        Raises:
            AttnscopeError: There is no such class.
        """
        if label in self.labels:
            return self.labels.index(label)
        hint = "only classifiers have classes"
        if self.labels:
            hint = f"its classes: {', '.join(self.labels[:20])}"
        raise AttnscopeError(f"{self.info.name} has no class {label!r}", hint)

    def run(self, batch: Batch, probe: "Probe") -> "Tensor":
        """Run a batch with the probe at the seam of every attention.

        Padding is never attended to. Weights get no gradients; tensors that a probe brings in do.

        Args:
            batch: The token ids. Models without segments ignore the segments.
            probe: A function that computes, and may change, each attention.

        Returns:
            The last hidden states, (batch, token, d_model), of an encoder-decoder the decoder's; those at padding mean
            nothing.

        Raises:
            AttnscopeError: The batch is longer than the model's limit, or holds ids that it has no embedding for.
            MixedLengthsError: Padding would change what the model computes of a text.
        """
        raise NotImplementedError

    def outputs(
        self, batch: Batch, probe: "Probe", *, logits: bool = True, last: int | None = None
    ) -> Outputs:
        """Run a batch as `run` does, and compute the logits of the model's head, if it has one.

        Args:
            batch: The token ids.
            probe: A function that computes, and may change, each attention.
            logits: Whether logits are computed.
            last: How many tokens at the end get logits; None = all, which takes the most memory in a long text.
        """
        return Outputs(self.run(batch, probe))

    def rerun(self, batch: Batch, *, logits: bool = True, last: int | None = None) -> "ResumableRun":
        """Run a batch so that it can be run again from any block on; the options are those of `outputs`."""
        from attnscope.models.inside.tape import ResumableRun

        # `outputs` does not need to know in which block an attention lies, or which is the first to compute.
        return ResumableRun(
            lambda batch, probe, *_: self.outputs(batch, probe, logits=logits, last=last),
            batch,
            self._layers,
        )

    def modules(self) -> "Sequence[nn.Module]":
        """Return the torch modules that hold all others of the model."""
        return []

    def blocks(self) -> "Mapping[LayerKey, nn.Module]":
        """Return the block of each attention, by layer key. It reads the hidden states that keys are made from."""
        return {}

    def static_embeddings(self, ids: "Tensor") -> "Tensor | None":
        """Return rows of the token embedding, (batch, token) -> (batch, token, d), without gradient; None = unknown."""
        return None

    def unembedding(self) -> "nn.Module | None":
        """Return the linear map from hidden states to logits of the vocabulary; None without one."""
        return None

    def untrained(self, seed: int) -> "Model":
        """Return the same architecture with random weights."""
        raise NotImplementedError

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raise AttnscopeError; subclasses put this in the place of methods that their models lack."""
        raise AttnscopeError(*self._refusal)

    def __repr__(self) -> str:
        """Return such as "HuggingFaceModel('bert', bert: 6 layers of 12 heads)"."""
        info = self.info
        size = f"{amount(max(info.n_layers), 'layer')} of {amount(max(info.n_heads), 'head')}"
        kinds = f", {', '.join(info.kinds)}" if len(info.kinds) > 1 else ""
        return f"{type(self).__name__}({info.name!r}, {info.architecture}: {size}{kinds})"


def image_model_of(model: Model) -> Model:
    """Return the model that sees pictures: of two towers (CLIP) the one for pictures, else the model itself."""
    return model if model.image_reader is None else model.image_reader.model


def image_text_model_of(model: Model) -> Model:
    """Return the model that reads pictures and words; another one where the model shows text without pictures."""
    return model if model.image_text_reader is None else model.image_text_reader.model


def example_tokens(tokenizer: Tokenizer) -> Tokens:
    """Return a short text that a tokenizer reads, with the special tokens around it.

    A tokenizer that drops letters and digits, such as one for the formulas of molecules (SMILES), gets a text from its
    own vocabulary.

    Raises:
        AttnscopeError: The tokenizer keeps no token of any text that is tried.
    """
    refusal = AttnscopeError(
        "the tokenizer drops every text that is tried", "its files belong to another model"
    )
    for text in _example_texts(tokenizer):
        try:
            tokens = tokenizer.encode(text)
            if not tokens.special.all():
                return tokens
        except AttnscopeError as error:
            refusal = error
    raise refusal


def example_batch(model: Model) -> Batch:
    """Return the short text of `example_tokens` as a batch of one, (1, token)."""
    import torch

    return Batch(torch.from_numpy(example_tokens(model.tokenizer).ids.astype("int64"))[None])


def _example_texts(tokenizer: Tokenizer) -> "Iterator[str]":
    """Yield a letter, a number (which models without tokenizer read too), and at most 64 tokens of the vocabulary."""
    yield "a"
    yield "0"
    ids = tokenizer.ordinary_ids()
    # At even distances
    for token_id in ids[:: len(ids) // 64 + 1]:
        yield tokenizer.spell(token_id)
