"""The interface of every model, whichever engine runs it: texts in, attention out through the seam."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

from attnscope.errors import AttnscopeError, amount
from attnscope.models.info import ModelInfo
from attnscope.results.tokens import Tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn

    from attnscope.core.attention.probes import Place
    from attnscope.core.attention.seam import AttentionCall, Kind, Probe
    from attnscope.models.hf.senses.eyes_and_ears import HuggingFaceEars, HuggingFaceEyes
    from attnscope.models.hf.senses.vision_language import VisionLanguageReader
    from attnscope.models.hf.senses.writing import HuggingFaceWriter
    from attnscope.questions.places import Picture, Sound


class Tokenizer:
    """Turns text into Tokens. By default nothing is known of a vocabulary.

    Attributes:
        name: A short description.
        mask_id: The number of the token that stands for a hidden one; None where there is none.
        unknown_id: The number of the token that stands for what the vocabulary lacks; None where nothing is unknown.
    """

    name = ""
    mask_id: int | None = None
    unknown_id: int | None = None

    @property
    def chat(self) -> "Callable[[str], Tokens] | None":
        """Tokenise a text as the user's message in the model's chat template; None where there is no template."""
        return None

    def encode(self, text: str, pair: str | None = None) -> Tokens:
        """Tokenise a text, or a pair of texts, with the special tokens that the model expects."""
        raise NotImplementedError

    def ordinary_ids(self) -> list[int]:
        """Return the numbers of all tokens that stand for text, no special or unused ones; none where not known."""
        return []

    def spell(self, number: int) -> str:
        """Return the text of an ordinary token; its number where that is not known."""
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
        """Return the same on a device, without masks that hide nothing."""
        # Move what is there, and leave out masks that are all True.
        there = {name: x.to(device) for name, x in vars(self).items() if x is not None}
        return Batch(
            **{name: x for name, x in there.items() if not name.endswith("mask") or not bool(x.all())}
        )

    def rows(self) -> list[tuple[int, ...]]:
        """Return the numbers of each text, without the padding behind it."""
        # How many tokens of each row are real, (batch,).
        lengths = [self.ids.shape[1]] * len(self.ids) if self.mask is None else self.mask.sum(1).tolist()
        return [tuple(row[:n]) for row, n in zip(self.ids.tolist(), lengths, strict=True)]

    def text(self, i: int) -> "Batch":
        """Return one text without its padding."""
        parts = {}
        for name, mask in (
            ("ids", self.mask),
            ("segments", self.mask),
            ("target_ids", self.target_mask),
        ):
            values = getattr(self, name)
            if values is not None:
                parts[name] = values[i : i + 1] if mask is None else values[i : i + 1, mask[i]]
        return Batch(**parts)

    def repeat(self, times: int) -> "Batch":
        """Repeat the batch: all texts, then all of them again, and so on."""
        return Batch(**{name: x.repeat(times, 1) for name, x in vars(self).items() if x is not None})


PASS_TOKENS = 2048
"""Tokens in a pass of several changes, padding and repetitions included."""

LOGITS_AT_ONCE = 2**25
"""Numbers that a head may put out in such a pass."""


class MixedLengthsError(AttnscopeError):
    """Padding these texts together would change the result: the model would treat short texts as long ones."""


@dataclass(frozen=True, eq=False)
class Outputs:
    """The results of a forward pass.

    Attributes:
        hidden: The last hidden states, (batch, token, d_model); of an encoder-decoder the decoder's.
        logits: Scores of the vocabulary, or of classes, at each of these tokens, or at the last of them, (batch, token,
            vocabulary); of a classifier of texts (batch, 1, class). None = the model has no head, or was not asked.
    """

    hidden: "Tensor"
    logits: "Tensor | None" = None


class Rerun:
    """A batch, its outputs, and what every block of the network returned for it.

    `forward` runs a batch with a probe; it gets the number of each place's block too, none at first, and that of the
    first block to compute.
    The batch must be small, for all its blocks' outputs are held. Without blocks everything is always computed again.

    Attributes:
        whole: The outputs with nothing changed.
        calls: What reached the seam then.
        are_numbers: Kind -> layer -> which texts' queries and keys are finite there, (batch,).
        start: The first token that later runs compute: no change may reach those before it. Decoders allow it, whose
            blocks compute a token from that one and earlier ones; whoever sets it must compare a run with `whole`.
    """

    def __init__(
        self,
        forward: "Callable[[Batch, Probe, Mapping[Place, int], int], Outputs]",
        batch: Batch,
        blocks: "Sequence[nn.Module]",
    ) -> None:
        from attnscope.core.attention.seam import are_numbers, attend
        from attnscope.models.inside.tape import Tape

        self._forward = forward
        self._batch = batch
        self._tape = Tape(blocks)
        self._block_of: dict[Place, int] = {}
        self.are_numbers: dict[Kind, dict[int, Tensor]] = {}
        self.start = 0
        self.calls: dict[Place, AttentionCall] = {}

        def observe(call: "AttentionCall") -> "Tensor":
            # Which block it lies in, and which texts are finite there.
            if self._tape.current is not None:
                self._block_of[call.kind, call.layer] = self._tape.current
            self.are_numbers.setdefault(call.kind, {})[call.layer] = are_numbers(call)
            # Copies, because a network may compute in place with its inputs.
            copies: dict[str, Any] = {
                "query": call.query.clone(),
                "key": call.key.clone(),
                "value": call.value.clone(),
            }
            self.calls[call.kind, call.layer] = replace(call, **copies)
            return attend(call)

        with self._tape.record(*batch.ids.shape):
            self.whole = forward(batch, observe, {}, 0)

    def block(self, places: "Iterable[Place]") -> int:
        """Return the first block that must be computed again where these attentions change."""
        return min((self._block_of.get(place, 0) for place in places), default=0)

    def plan(
        self, changes: "Iterable[Iterable[Place]]", most_tokens: int
    ) -> "Iterator[tuple[int, list[int]]]":
        """Yield which changes are computed in one pass: its first block, and the numbers of as many as have room.

        Args:
            changes: The places that each of them changes.
            most_tokens: Tokens of a pass, padding and repetitions included.
        """
        # Changes with the same first block go together.
        numbers_by_first: dict[int, list[int]] = {}
        for number, places in enumerate(changes):
            numbers_by_first.setdefault(self.block(places), []).append(number)
        # As many as the tokens of a pass, and what the head puts out, have room for.
        times = most_tokens // self._batch.ids[:, self.start :].numel()
        if self.whole.logits is not None:
            times = min(times, LOGITS_AT_ONCE // self.whole.logits.numel())
        times = max(1, times)
        for first, numbers in numbers_by_first.items():
            for done in range(0, len(numbers), times):
                yield first, numbers[done : done + times]

    def again(self, probe: "Probe", first: int = 0, times: int = 1) -> Outputs:
        """Run the batch again from block `first` on; those before it return what they returned, and ask no probe.

        The texts come several times: all of them, then all of them again, and so on.
        """
        if self.start:
            probe = self._with_earlier_tokens(probe, times)
        # Blocks before `first` play back what they returned.
        with self._tape.play(first, times, self.start):
            return self._forward(self._batch.repeat(times), probe, self._block_of, first)

    def _with_earlier_tokens(self, probe: "Probe", times: int) -> "Probe":
        """Return a probe for calls of the tokens from `start` on: the given one gets the whole call."""
        import torch

        def repeat(tensor: "Tensor | None") -> "Tensor | None":
            return tensor if tensor is None or len(tensor) == 1 else tensor.repeat(times, 1, 1, 1)

        def complete(call: "AttentionCall") -> "Tensor":
            recorded = self.calls[call.kind, call.layer]
            # Attention outside blocks is computed for all tokens.
            if call.query.shape[2] == recorded.query.shape[2]:
                return probe(call)
            whole: dict[str, Any] = {"mask": repeat(recorded.mask), "bias": repeat(recorded.bias)}
            for name in ("query", "key", "value"):
                earlier = getattr(recorded, name)[:, :, : self.start]  # (text, head, token, width)
                whole[name] = torch.cat([earlier.repeat(times, 1, 1, 1), getattr(call, name)], 2)
            return probe(replace(recorded, **whole))[:, :, self.start :]

        return complete


@dataclass(frozen=True, eq=False)
class Slice:
    """The part of one weight that belongs to picked heads and to no others."""

    name: (
        str  # the weight's name in the model, such as "bert.encoder.layer.0.attention.self.query.weight"
    )
    axis: int  # along which axis the part is cut out
    indices: tuple[int, ...]  # its rows or columns
    role: str  # "query", "key", "value" or "output"
    weight: "Tensor"  # the whole weight, as the model holds it


class Maps(NamedTuple):
    """The attention maps of an encoder on a text by layer, as NumPy arrays of its precision."""

    weights: "dict[int, NDArray[Any]]"  # (head, query, key)
    # what one head over the full width of the layer would attend to, (query, key); see calls.full_width
    full: "dict[int, NDArray[Any]]"


@dataclass(frozen=True, eq=False)
class AttentionAxes:
    """The queries and the keys of one kind of a model's attention."""

    queries: Tokens
    keys: Tokens
    layers: tuple[int, ...]  # numbers of those that have this attention
    first: int = 0  # the first query that is kept: words up to the picture do not know of it
    # keys that no query sees, (key,), bool: what pictures are filled up with; None = there are none
    hidden: "NDArray[Any] | None" = None


@dataclass(frozen=True, eq=False)
class SensoryInput:
    """A photo or a recording as inputs of a model, with its tokens.

    Attributes:
        inputs: What its forward gets.
        tokens: The patches of a picture, and what stands before them; the frames of a sound, silence included.
        picture: What it saw, of a recording its spectrogram; None where it heard, or read pictures among words.
        pictures: What it saw among words.
        sound: What it heard; None where it saw.
        notes: What was done to the photo or the recording that its owner may not expect.
        axes: Where words or learned queries attend to the patches by cross-attention: kind of attention -> its queries
            and keys; the first kind attends to the patches. Empty where patches are among the tokens.
    """

    inputs: "Mapping[str, Tensor]"
    tokens: Tokens
    picture: "Picture | None" = None
    sound: "Sound | None" = None
    notes: tuple[str, ...] = ()
    pictures: "tuple[Picture, ...]" = ()
    axes: "Mapping[str, AttentionAxes]" = field(default_factory=dict)


Loss = Literal["causal", "masked", "target", "class", "token_class"]
"""The target of a model's head: the next token, masked tokens, a target text, or the class of a text or token."""


class Model:
    """A loaded model: text in by its tokenizer, attention out through the seam. What it cannot do is None.

    Kinds of models build on this one, of which no more is known than its attention: each adds what it can do besides.

    Attributes:
        info: What is known of it.
        tokenizer: What makes tokens of a text for it.
        texts: The texts that it came with; it knows no others. Empty = it reads any.
        resumes: Whether `rerun` need not compute earlier layers again.
        run_inputs: As `run`, of whatever the model's forward takes, by name: `SensoryInput.inputs`.
        outputs_of_inputs: As `outputs`, of the same.
        head_slices: Returns the parts of its weights, named as in its files, that belong to these heads alone.
        look: Returns what the heads of some layers attend to on a text, where torch has no part in it; `run` is
            refused then.
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
        """Return its decoder, that writes text; None if it has none."""
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
        """Return the target of its head; None without a head."""
        return None

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the names of its classes, where its head is a classifier's."""
        return ()

    def label_number(self, label: str) -> int:
        """Return the number of a class.

        Raises:
            AttnscopeError: There is no such class.
        """
        if label not in self.labels:
            known = (
                f"its classes: {', '.join(self.labels[:20])}"
                if self.labels
                else "only classifiers have classes"
            )
            raise AttnscopeError(f"{self.info.name} has no class {label!r}", known)
        return self.labels.index(label)

    def run(self, batch: Batch, probe: "Probe") -> "Tensor":
        """Run a batch with the probe at the seam of every attention.

        Padding is never attended to. No gradient is kept for weights; through a probe's own numbers they flow.

        Args:
            batch: Token numbers. Segments are passed over where the model knows none.
            probe: What happens at the seam.

        Returns:
            The last hidden states, (batch, token, d_model), of an encoder-decoder the decoder's; those of padding mean
            nothing.

        Raises:
            AttnscopeError: The batch is longer than the model's limit, or holds numbers that it has no embedding for.
            MixedLengthsError: Padding would change what the model computes of a text.
        """
        raise NotImplementedError

    def outputs(
        self, batch: Batch, probe: "Probe", *, logits: bool = True, last: int | None = None
    ) -> Outputs:
        """Run a batch as `run` does, and ask the language-model head, if there is one.

        Args:
            batch: Token numbers.
            probe: What happens at the seam.
            logits: Whether the head is asked.
            last: At how many tokens, the last ones; None = at all, which of long texts is more than all else.
        """
        return Outputs(self.run(batch, probe))

    def rerun(self, batch: Batch, *, logits: bool = True, last: int | None = None) -> Rerun:
        """Run a batch, and keep what is needed to run it again from a layer on; options as of `outputs`."""
        return Rerun(
            lambda batch, probe, *_: self.outputs(batch, probe, logits=logits, last=last),
            batch,
            self._layers,
        )

    def modules(self) -> "Sequence[nn.Module]":
        """Return the torch modules that hold all others, to be watched."""
        return []

    def blocks(self) -> "Mapping[Place, nn.Module]":
        """Return the block of each attention by place: its input is the hidden states that keys are made of."""
        return {}

    def static_embeddings(self, ids: "Tensor") -> "Tensor | None":
        """Return rows of the token embedding, (batch, token) -> (batch, token, d), without gradient; None = unknown."""
        return None

    def unembedding(self) -> "nn.Module | None":
        """Return the linear map that its scores of the vocabulary come from; None without one."""
        return None

    def untrained(self, seed: int) -> "Model":
        """Return the same architecture with random weights."""
        raise NotImplementedError

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Raise AttnscopeError in place of an operation that the model cannot do."""
        raise AttnscopeError(*self._refusal)

    def __repr__(self) -> str:
        # Such as HuggingFaceModel('bert', bert: 6 layers of 12 heads).
        extent = (
            f"{amount(max(self.info.n_layers), 'layer')} of {amount(max(self.info.n_heads), 'head')}"
        )
        kinds = f", {', '.join(self.info.kinds)}" if len(self.info.kinds) > 1 else ""
        return f"{type(self).__name__}({self.info.name!r}, {self.info.architecture}: {extent}{kinds})"


def eyes_of(model: Model) -> Model:
    """Return the model that sees pictures: of two towers the one for pictures, else the model itself."""
    return model if model.eyes is None else model.eyes.model


def viewer_of(model: Model) -> Model:
    """Return the model that reads pictures and words; another one where the model shows text without pictures."""
    return model if model.viewer is None else model.viewer.model


def example_tokens(tokenizer: Tokenizer) -> Tokens:
    """Return a short text that a tokenizer reads, with the special tokens around it.

    A tokenizer that drops letters and digits, as those of SMILES do, gets a text of its own vocabulary.
    """
    refusal = AttnscopeError(
        "the tokenizer drops every text that is tried", "its files belong to another model"
    )
    for text in _candidates(tokenizer):
        try:
            tokens = tokenizer.encode(text)
        except AttnscopeError as error:
            refusal = error
            continue
        if not tokens.special.all():
            return tokens
    raise refusal


def example_batch(model: Model) -> Batch:
    """Return such a text for a model as a batch of one, (1, token)."""
    import torch

    return Batch(torch.from_numpy(example_tokens(model.tokenizer).ids.astype("int64"))[None])


def _candidates(tokenizer: Tokenizer) -> "Iterator[str]":
    # A letter and a digit first, then samples of its own vocabulary.
    yield from ("a", "0")  # a number is a text to models without tokenizer too
    numbers = tokenizer.ordinary_ids()
    for number in numbers[:: len(numbers) // 64 + 1]:
        yield tokenizer.spell(number)
