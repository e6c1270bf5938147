"""The interface of every model, whichever engine runs it: texts in, attention out through the seam."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

from attnscope.errors import AttnscopeError, amount
from attnscope.models.info import ModelInfo
from attnscope.results.tokens import Tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from attnscope.core.attention.probes import Place
    from attnscope.core.attention.seam import Probe
    from attnscope.models.hf.senses.eyes_and_ears import HuggingFaceEars, HuggingFaceEyes
    from attnscope.models.hf.senses.vision_language import VisionLanguageReader
    from attnscope.models.hf.senses.writing import HuggingFaceWriter
    from attnscope.models.inside.tape import Rerun
    from attnscope.questions.places import Picture, Sound


class Tokenizer:
    """What turns text into Tokens; without a vocabulary, unless a subclass has one.

    Attributes:
        name: A short description.
        encode_chat: Tokenises a text as the user's message in the model's chat template; None where there is no
            template.
        mask_id: The number of the token that stands for a hidden one; None where there is none.
        unknown_id: The number of the token that stands for what the vocabulary lacks; None where nothing is unknown.
    """

    name = ""
    encode_chat: "Callable[[str], Tokens] | None" = None
    mask_id: int | None = None
    unknown_id: int | None = None

    def encode(self, text: str, pair: str | None = None) -> Tokens:
        """Tokenise a text, or a pair of texts, with the special tokens that the model expects."""
        raise NotImplementedError

    def ordinary_ids(self) -> list[int]:
        """Return the numbers of all tokens that stand for text, not special or unused ones; [] without a vocabulary."""
        return []

    def spell(self, number: int) -> str:
        """Return the text of an ordinary token; without a vocabulary, its number."""
        return str(number)


@dataclass(frozen=True, eq=False)
class Batch:
    """Token numbers of several texts, padded to one length.

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
        parts = {}
        for name, tensor in self._tensors().items():
            moved = tensor.to(device)
            if not (name.endswith("mask") and moved.all()):
                parts[name] = moved
        return Batch(**parts)

    def text(self, i: int) -> "Batch":
        """Return the text in row `i` as a batch of its own, without its padding."""
        parts = {}
        masks = {"ids": self.mask, "segments": self.mask, "target_ids": self.target_mask}
        for name, tensor in self._tensors().items():
            if name in masks:
                mask = masks[name]
                row = tensor[i] if mask is None else tensor[i, mask[i]]
                parts[name] = row[None]
        return Batch(**parts)

    def repeat(self, times: int) -> "Batch":
        """Repeat the batch: all texts, then all of them again, and so on."""
        return Batch(**{name: tensor.repeat(times, 1) for name, tensor in self._tensors().items()})

    def _tensors(self) -> "dict[str, Tensor]":
        """Return the fields that are not None, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


PASS_TOKENS = 2048
"""The most tokens in one forward pass that runs several changes of a batch, padding and repetitions included."""


class MixedLengthsError(AttnscopeError):
    """Padding these texts together would change the result: the model would treat short texts as long ones."""


@dataclass(frozen=True, eq=False)
class Outputs:
    """The results of a forward pass.

    Attributes:
        hidden: The last hidden states, (batch, token, d_model); of an encoder-decoder the decoder's.
        logits: Scores of the vocabulary or of classes at all tokens, or at the last few, (batch, token, score); of a
            classifier of texts (batch, 1, class). None = the model has no head, or it was not asked for logits.
    """

    hidden: "Tensor"
    logits: "Tensor | None" = None


@dataclass(frozen=True, eq=False)
class Slice:
    """The part of one weight that belongs to picked heads and to no others."""

    # The weight's name in the model, such as "bert.encoder.layer.0.attention.self.query.weight"
    name: str
    # The axis along which the part is cut out
    axis: int
    # The rows or columns of the part
    indices: tuple[int, ...]
    # "query", "key", "value" or "output"
    role: str
    # The whole weight, as the model holds it
    weight: "Tensor"


class Maps(NamedTuple):
    """The attention maps of an encoder on a text, as NumPy arrays by layer."""

    weights: "dict[int, NDArray[Any]]"  # of each head, (head, query, key)
    full: "dict[int, NDArray[Any]]"  # of a single head over the full width of the layer, (query, key)


@dataclass(frozen=True, eq=False)
class AttentionAxes:
    """The queries and the keys of one kind of a model's attention."""

    # The queries
    queries: Tokens
    # The keys
    keys: Tokens
    # The numbers of the layers that have this attention
    layers: tuple[int, ...]
    # The first query that is kept: words before a picture do not attend to it
    first: int = 0


@dataclass(frozen=True, eq=False)
class SensoryInput:
    """A photo or a recording as inputs of a model, with its tokens."""

    # The arguments of the model's forward, by name
    inputs: "Mapping[str, Tensor]"
    # The patches of a picture, and special tokens before them; or the frames of a sound, silence
    # included
    tokens: Tokens
    # The picture as the model sees it, or the spectrogram of a recording that it sees; None for
    # models that hear, and for pictures among words
    picture: "Picture | None" = None
    # The recording as the model hears it; None for models that see
    sound: "Sound | None" = None
    # What was done to the photo or the recording that its owner may not expect, one sentence each
    notes: tuple[str, ...] = ()
    # The pictures among words, as the model sees them
    pictures: "tuple[Picture, ...]" = ()
    # Queries and keys by kind of attention, where words or learned queries attend to patches by
    # cross-attention; the first kind attends to the patches. Empty where patches are among the
    # tokens
    axes: "Mapping[str, AttentionAxes]" = field(default_factory=dict)


Loss = Literal["causal", "masked", "target", "class", "token_class"]
"""The target of a model's head: the next token, masked tokens, a target text, or the class of a text or token."""


class Model:
    """A loaded model: its tokenizer reads texts, and its attention passes the seam.

    Subclasses for the engines override what their models can do. Here every ability but `run` is missing: it is None,
    empty or refused.

    Attributes:
        info: The facts of the model.
        tokenizer: Its tokenizer.
        texts: The only texts that it can read; empty = it reads any.
        resumes: Whether `rerun` can leave out the layers before a change.
        run_inputs: Like `run`, for the arguments of the model's forward by name, as `SensoryInput.inputs` has them.
        outputs_of_inputs: Like `outputs`, for the same arguments.
        head_slices: Returns the parts of weights, named as in the model's files, that belong to some heads alone. The
            heads are given by place.
        look: Returns the attention maps of some layers on a text, by the NumPy engine; `run` is refused there.
    """

    info: ModelInfo
    tokenizer: Any
    texts: "tuple[str, ...]" = ()
    resumes: Any = False
    run_inputs: "Callable[[Mapping[str, Any], Probe], Tensor] | None" = None
    outputs_of_inputs: "Callable[[Mapping[str, Any], Probe], Outputs] | None" = None
    head_slices: "Callable[[Mapping[Place, Sequence[int]]], list[Slice]] | None" = None
    look: "Callable[[Tokens, Collection[int]], Maps] | None" = None
    _layers: "Sequence[nn.Module]" = ()
    _refusal = ("", "")

    @property
    def writer(self) -> "HuggingFaceWriter | None":
        """Return the part that writes text by the model's decoder; None without a decoder."""
        return None

    @property
    def eyes(self) -> "HuggingFaceEyes | None":
        """Return the part that sees pictures; None if the model sees none."""
        return None

    @property
    def ears(self) -> "HuggingFaceEars | None":
        """Return the part that hears recordings; None if the model hears none."""
        return None

    @property
    def viewer(self) -> "VisionLanguageReader | None":
        """Return the part that reads pictures and words; None if the model has none."""
        return None

    @property
    def loss(self) -> Loss | None:
        """Return the target that the model's head predicts; None without a head."""
        return None

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of a classifier's classes; empty for other models."""
        return ()

    def label_number(self, label: str) -> int:
        """Return the number of a class.

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
            batch: Token numbers. Segments are ignored by models without segments.
            probe: What computes, and may change, each attention.

        Returns:
            The last hidden states, (batch, token, d_model), of an encoder-decoder the decoder's; those at padding mean
            nothing.

        Raises:
            AttnscopeError: The batch is longer than the model's limit, or holds numbers that it has no embedding for.
            MixedLengthsError: Padding would change what the model computes of a text.
        """
        raise NotImplementedError

    def outputs(
        self, batch: Batch, probe: "Probe", *, logits: bool = True, last: int | None = None
    ) -> Outputs:
        """Run a batch as `run` does, and compute the logits of the model's head, if it has one.

        Args:
            batch: Token numbers.
            probe: What computes, and may change, each attention.
            logits: Whether logits are computed.
            last: The number of last tokens that get logits; None = all. Those of a long text are larger than all else.
        """
        return Outputs(self.run(batch, probe))

    def rerun(self, batch: Batch, *, logits: bool = True, last: int | None = None) -> "Rerun":
        """Run a batch so that it can be run again from any block on; the options are those of `outputs`."""
        from attnscope.models.inside.tape import Rerun

        return Rerun(
            lambda batch, probe, *_: self.outputs(batch, probe, logits=logits, last=last),
            batch,
            self._layers,
        )

    def modules(self) -> "Sequence[nn.Module]":
        """Return the torch modules that hold all others."""
        return []

    def blocks(self) -> "Mapping[Place, nn.Module]":
        """Return the block of each attention by place; its input is the hidden states that the keys are made from."""
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


def eyes_of(model: Model) -> Model:
    """Return the model that sees pictures: of two towers (CLIP) the one for pictures, else the model itself."""
    return model if model.eyes is None else model.eyes.model


def viewer_of(model: Model) -> Model:
    """Return the model that reads pictures and words; another one where the model shows text without pictures."""
    return model if model.viewer is None else model.viewer.model


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
        except AttnscopeError as error:
            refusal = error
            continue
        if not tokens.special.all():
            return tokens
    raise refusal


def example_batch(model: Model) -> Batch:
    """Return the short text of `example_tokens` as a batch of one, (1, token)."""
    import torch

    return Batch(torch.from_numpy(example_tokens(model.tokenizer).ids.astype("int64"))[None])


def _example_texts(tokenizer: Tokenizer) -> "Iterator[str]":
    """Yield a letter, a number (which models without tokenizer read too), and up to 64 tokens of the vocabulary."""
    yield "a"
    yield "0"
    numbers = tokenizer.ordinary_ids()
    for number in numbers[:: len(numbers) // 64 + 1]:
        yield tokenizer.spell(number)
