"""The interface of every model, whichever engine runs it: it reads texts, and hooks see its attention.

The *seam* is the one function that computes every attention of a model. A *probe* is a hook there: it gets an
`AttentionCall` (the queries, keys, values and masks of one layer), and returns the outputs of the heads. A *layer key*
names one attention: its kind ("encoder", "decoder" or "cross") and the index of its layer within the kind.

An *engine* is a way to run models, such as transformers or attnscope's own encoder. Each has a subclass of `Model`.
"""

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
        encode_chat: Tokenises a text as the user's message in the model's chat template; None without a template.
        mask_id: The id of the mask token, such as [MASK]; None without a mask token.
        unknown_id: The id of the unknown token, such as [UNK]; None if the vocabulary can spell any text.
    """

    name = ""
    encode_chat: "Callable[[str], Tokens] | None" = None
    mask_id: int | None = None
    unknown_id: int | None = None

    def encode(self, text: str, pair: str | None = None) -> Tokens:
        """Tokenise a text, or a pair of texts, with the special tokens that the model expects."""
        raise NotImplementedError

    def ordinary_ids(self) -> list[int]:
        """Return the ids of all tokens except special and unused ones; [] without a vocabulary."""
        return []

    def spell(self, token_id: int) -> str:
        """Decode one ordinary token to text; without a vocabulary, return its id as a string."""
        return str(token_id)


@dataclass(frozen=True, eq=False)
class Batch:
    """The token ids of several texts, padded to one length.

    Attributes:
        ids: (batch, token), int64.
        mask: (batch, token), bool; True = a real token, False = padding. None = nothing is padded.
        segments: Token type ids, (batch, token), int64; None = all 0.
        target_ids: The ids that the decoder of an encoder-decoder reads, (batch, token); None for other models.
        target_mask: The mask of target_ids, as `mask` is that of ids.
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
        """Repeat the batch: all texts, then all texts once more, and so on."""
        return Batch(**{name: tensor.repeat(times, 1) for name, tensor in self._tensors().items()})

    def _tensors(self) -> "dict[str, Tensor]":
        """Return the fields that are not None, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


MAX_PASS_TOKENS = 2048
"""The most tokens, padding included, in a forward pass that runs several copies of a batch.

Each copy gets its own intervention, such as another head removed.
"""


class MixedLengthsError(AttnscopeError):
    """Padding these texts together would change the result: the model would treat short texts as long ones."""


@dataclass(frozen=True, eq=False)
class Outputs:
    """The results of a forward pass.

    Attributes:
        hidden: The last hidden states, (batch, token, d_model); of an encoder-decoder the decoder's.
        logits: The logits at all tokens or the last few, (batch, token, vocabulary or class); for a classifier of
            texts (batch, 1, class). None = the model has no head, or no logits were asked for.
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
    # "query", "key" or "value" for a part of W_Q, W_K or W_V; "output" for a part of W_O
    role: str
    # The uncut weight, as the model holds it
    weight: "Tensor"


class LayerMaps(NamedTuple):
    """The attention maps of an encoder on a text, as NumPy arrays by layer."""

    # The attention weights of each head, (head, query, key)
    weights: "dict[int, NDArray[Any]]"
    # The map that the layer would have if its heads were not split: one head of width d_model, (query, key)
    full: "dict[int, NDArray[Any]]"


@dataclass(frozen=True, eq=False)
class AttentionAxes:
    """The tokens along both axes of the maps of one kind of attention, in a model where they may differ."""

    queries: Tokens
    keys: Tokens
    # The numbers of the layers that have this attention
    layers: tuple[int, ...]
    # The index of the first query that is shown. Words before a picture do not attend to it, and are left out
    first_query: int = 0


@dataclass(frozen=True, eq=False)
class SensoryInput:
    """A photo or a recording, alone or with words, as inputs of a model, with its tokens."""

    # The arguments of the model's forward, by name
    inputs: "Mapping[str, Tensor]"
    # One of three: special tokens and the patches of a picture; the frames of a sound, silence included; or words, with
    # the patches of their pictures among them
    tokens: Tokens
    # For image models, the preprocessed picture. For audio models that take a spectrogram as an image, that image. None
    # for other audio models, and for input with words
    picture: "Picture | None" = None
    # The preprocessed recording; None for image models
    sound: "Sound | None" = None
    # Preprocessing that the user may not expect, such as cropping; one sentence each
    notes: tuple[str, ...] = ()
    # The preprocessed pictures of input with words
    pictures: "tuple[Picture, ...]" = ()
    # Kind of attention -> its queries and keys, for models whose words or learned queries reach patches by
    # cross-attention. The first kind is that cross-attention. Empty for models with patches among the tokens
    axes: "Mapping[str, AttentionAxes]" = field(default_factory=dict)


LossKind = Literal["causal", "masked", "target", "class", "token_class"]
"""What a model's head predicts: the next token, masked tokens, a target text, or the class of a text or token."""


class Model:
    """A loaded model: its tokenizer reads texts, and a probe at the seam computes each of its attentions.

    Each engine has a subclass, which overrides what its models can do. In this class every ability but `run` is
    missing: it is None or empty, or it raises AttnscopeError.

    Attributes:
        info: The facts of the model.
        tokenizer: Its tokenizer.
        texts: The only texts that the model can read; empty = it reads any text.
        resumes: Whether the runs that `rerun` prepares can leave out the blocks before a change. A bool, or in a
            subclass a property.
        run_inputs: Like `run`, with the arguments of the model's forward by name (see `SensoryInput.inputs`) instead of
            a batch.
        outputs_of_inputs: Like `outputs`, with these arguments instead of a batch.
        head_slices: Takes the numbers of heads by layer key. Returns the rows and columns of weights that belong to
            these heads alone.
        compute_maps: Returns the attention maps of the layers of these numbers on a text, without torch. The NumPy
            engine has it instead of `run`.
    """

    info: ModelInfo
    tokenizer: Any
    texts: "tuple[str, ...]" = ()
    resumes: Any = False
    run_inputs: "Callable[[Mapping[str, Any], Probe], Tensor] | None" = None
    outputs_of_inputs: "Callable[[Mapping[str, Any], Probe], Outputs] | None" = None
    head_slices: "Callable[[Mapping[LayerKey, Sequence[int]]], list[WeightSlice]] | None" = None
    compute_maps: "Callable[[Tokens, Collection[int]], LayerMaps] | None" = None
    # The blocks (transformer layers) of the network, in order, at which a resumed run can start
    _blocks: "Sequence[nn.Module]" = ()
    # The message and the hint of the error that `_refuse` raises
    _refusal = ("", "")

    @property
    def text_generator(self) -> "TextGenerator | None":
        """Return the object that generates text with the model's decoder; None without a decoder."""
        return None

    @property
    def image_reader(self) -> "ImageReader | None":
        """Return the object that turns pictures into inputs of the model; None if it reads none."""
        return None

    @property
    def audio_reader(self) -> "AudioReader | None":
        """Return the object that turns recordings into inputs of the model; None if it reads none."""
        return None

    @property
    def image_text_reader(self) -> "VisionLanguageReader | None":
        """Return the object that turns pictures with words into inputs; None if the model reads no such pairs."""
        return None

    @property
    def loss(self) -> LossKind | None:
        """Return what the model's head predicts; None without a head."""
        return None

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of a classifier's classes; empty for other models."""
        return ()

    def class_index(self, label: str) -> int:
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
        """Run a batch; the probe computes every attention.

        No token attends to padding. Weights get no gradients; tensors that a probe brings in do.

        Args:
            batch: The token ids. Models without segments ignore the segments.
            probe: A hook that computes, and may change, each attention.

        Returns:
            The last hidden states, (batch, token, d_model); for an encoder-decoder, the decoder's. Hidden states at
            padding are meaningless.

        Raises:
            AttnscopeError: The batch is longer than the model's limit, or holds ids that it has no embedding for.
            MixedLengthsError: Padding would change what the model computes for a text.
        """
        raise NotImplementedError

    def outputs(
        self, batch: Batch, probe: "Probe", *, logits: bool = True, last: int | None = None
    ) -> Outputs:
        """Run a batch as `run` does, and compute the logits of the model's head, if it has one.

        Args:
            batch: The token ids.
            probe: A hook that computes, and may change, each attention.
            logits: Whether logits are computed.
            last: The number of tokens at the end that get logits; None = all tokens, which takes the most memory.
        """
        return Outputs(self.run(batch, probe))

    def rerun(self, batch: Batch, *, logits: bool = True, last: int | None = None) -> "ResumableRun":
        """Run a batch so that it can be run again from any block on; `outputs` explains the options."""
        from attnscope.models.inside.tape import ResumableRun

        # `ResumableRun` also passes the block of each attention and the first block to compute (the `*_`). `outputs`
        # calls all blocks, so it needs neither.
        return ResumableRun(
            lambda batch, probe, *_: self.outputs(batch, probe, logits=logits, last=last),
            batch,
            self._blocks,
        )

    def modules(self) -> "Sequence[nn.Module]":
        """Return the root modules: together, they contain all torch modules of the model."""
        return []

    def blocks(self) -> "Mapping[LayerKey, nn.Module]":
        """Return the block of each attention, by layer key. The keys are computed from the block's input."""
        return {}

    def static_embeddings(self, ids: "Tensor") -> "Tensor | None":
        """Return rows of the token embedding, (batch, token) -> (batch, token, d), without gradient.

        None = the token embedding of the model is not known.
        """
        return None

    def unembedding(self) -> "nn.Module | None":
        """Return the linear map from hidden states to logits of the vocabulary; None without one."""
        return None

    def untrained(self, seed: int) -> "Model":
        """Return the same architecture with random weights."""
        raise NotImplementedError

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raise AttnscopeError; subclasses assign this to the names of methods that their models lack."""
        raise AttnscopeError(*self._refusal)

    def __repr__(self) -> str:
        """Return a description such as "HuggingFaceModel('bert', bert: 6 layers of 12 heads)"."""
        info = self.info
        # Numbers of layers and heads are tuples with one entry per kind of attention: show the largest.
        size = f"{amount(max(info.n_layers), 'layer')} of {amount(max(info.n_heads), 'head')}"
        kinds = f", {', '.join(info.kinds)}" if len(info.kinds) > 1 else ""
        return f"{type(self).__name__}({info.name!r}, {info.architecture}: {size}{kinds})"


def image_model_of(model: Model) -> Model:
    """Return the model that reads pictures: the image encoder of a model with two towers (CLIP), else the model."""
    return model if model.image_reader is None else model.image_reader.model


def image_text_model_of(model: Model) -> Model:
    """Return the model that reads pictures with words.

    It is an object of its own if `model` is only the text part of a vision-language model, else `model` itself.
    """
    return model if model.image_text_reader is None else model.image_text_reader.model


def example_tokens(tokenizer: Tokenizer) -> Tokens:
    """Return a short text that a tokenizer reads, with the special tokens around it.

    A tokenizer that drops letters and digits, such as one for the formulas of molecules (SMILES), gets a text from its
    own vocabulary.

    Raises:
        AttnscopeError: Every text that is tried gives no tokens other than special ones.
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
    # A step of this size picks at most 64 ids, at even distances.
    for token_id in ids[:: len(ids) // 64 + 1]:
        yield tokenizer.spell(token_id)
