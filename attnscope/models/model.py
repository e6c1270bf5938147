"""What every model is, whichever engine runs it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from attnscope.errors import AttnscopeError
from attnscope.records import Tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor, nn

    from attnscope.core.attention import Probe
    from attnscope.core.probes import Place
    from attnscope.models.hf.weights import Slice
    from attnscope.models.rerun import Outputs, Rerun
    from attnscope.records.pictures import Picture
    from attnscope.records.sounds import Sound
    from attnscope.senses.photos import Photo
    from attnscope.senses.recordings import Recording


@dataclass(frozen=True)
class ModelInfo:
    """What is known of a loaded model; all of it ends up in records.

    Attributes:
        name: What the user called it: a catalogue name, a Hub id, a folder's name.
        source: Where the weights came from.
        sha256: Hash of the weights, hex; of several files: of their names and hashes; with an adapter: of both hashes.
            Empty for models made in memory.
        architecture: The model_type of its configuration, such as "bert".
        engine: "native" or "hf".
        road: How the weights are read: "seam" (through the one function), or "eager" (the model's own
            output_attentions).
        kinds: The kinds of attention it has, in the order of computation: some of "encoder", "decoder", "cross".
        n_layers: Layers of each kind, in the order of `kinds`.
        n_heads: Query heads of each kind (the largest, where layers differ).
        n_kv_heads: Key/value heads of each kind.
        d_model: Width of the hidden states.
        n_parameters: Number of parameters; shared ones once. The native engine counts what it computes with: no pooler,
            no head on top.
        max_tokens: The longest text it takes, in tokens, special ones included; None where there is no limit.
        dtype: Precision of the weights as computed with, such as "float32".
        device: Where it runs, such as "cpu".
        checked: Whether the self-check against eager ran and held (True), was skipped (False), or is not needed (None).
        notes: What a user must know to read the pictures truly, one sentence each.
        adapter: The adapter that is part of the weights, "" = none.
        adapter_sha256: Hash of its weights.
    """

    name: str
    source: str
    sha256: str
    architecture: str
    engine: str
    road: str
    kinds: tuple[str, ...]
    n_layers: tuple[int, ...]
    n_heads: tuple[int, ...]
    n_kv_heads: tuple[int, ...]
    d_model: int
    n_parameters: int
    max_tokens: int | None
    dtype: str
    device: str
    checked: bool | None = None
    notes: tuple[str, ...] = ()
    adapter: str = ""
    adapter_sha256: str = ""

    def as_json(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def lines(self, tokenizer: str) -> list[tuple[str, str]]:
        """What a person wants to know of the model, as (name, value)."""

        def each(numbers: tuple[int, ...]) -> str:
            if len(self.kinds) == 1:
                return str(numbers[0])
            return ", ".join(f"{kind} {number}" for kind, number in zip(self.kinds, numbers, strict=True))

        counted = " in embeddings and layers; a pooler is not counted" if self.engine == "native" else ""
        checked = {
            True: "equal to the model's own eager attention, on random inputs (of texts: short ones and a longer one)",
            False: "no: the comparison with eager attention was skipped",
            None: "not needed",
        }
        return [
            ("model", self.name),
            ("source", self.source),
            ("sha256", self.sha256 or "-"),
            ("architecture", f"{self.architecture} ({', '.join(self.kinds)})"),
            (
                "engine",
                f"{self.engine}, weights read {'at the seam' if self.road == 'seam' else 'from eager attention'}",
            ),
            ("layers", each(self.n_layers)),
            ("heads", each(self.n_heads)),
            ("key/value heads", each(self.n_kv_heads)),
            ("width", str(self.d_model)),
            ("parameters", f"{self.n_parameters:,}{counted}"),
            ("limit", f"{self.max_tokens} tokens" if self.max_tokens else "none"),
            ("tokenizer", tokenizer),
            ("precision", f"{self.dtype} on {self.device}"),
            ("checked", checked[self.checked]),
            *(("note", note) for note in self.notes),
        ]


class Tokenizer(Protocol):
    """Turns text into Tokens."""

    @property
    def name(self) -> str:
        """What it is, in a few words."""
        ...

    def encode(self, text: str, pair: str | None = None) -> Tokens:
        """Tokenises a text, or a pair of texts, with the special tokens that the model expects."""
        ...


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


class Model(Protocol):
    """A loaded model: text in by its tokenizer, attention out through the seam."""

    @property
    def info(self) -> ModelInfo:
        """What is known of it."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """What makes tokens of a text for it."""
        ...

    def run(self, batch: Batch, probe: "Probe") -> "Tensor":
        """Runs a batch with the probe at the seam of every attention.

        Returns:
            The last hidden states, (batch, token, d_model); of an encoder-decoder: the decoder's.
        """
        ...


@dataclass(frozen=True, eq=False)
class SeenPicture:
    """What a vision model makes of a photo.

    Attributes:
        inputs: What its forward gets.
        tokens: The patches, and what stands before them.
        picture: What it saw.
        notes: What was done to the photo that its owner may not expect.
    """

    inputs: "Mapping[str, Tensor]"
    tokens: Tokens
    picture: "Picture"
    notes: tuple[str, ...] = ()


@runtime_checkable
class Sees(Protocol):
    """A model that may read pictures. Not every one that has this does."""

    def see(self, photo: "Photo") -> SeenPicture:
        """A photo as the model sees it, in patches."""
        ...

    def run_inputs(self, inputs: "Mapping[str, Any]", probe: "Probe") -> "Tensor":
        """Runs what the model's forward takes, with the probe at the seam of every attention."""
        ...


@runtime_checkable
class HasEyes(Protocol):
    """A model of which a part, a model for itself, may see pictures."""

    @property
    def eyes(self) -> Model:
        """That part; all of it where there are no two."""
        ...


def eyes_of(model: Model) -> Model:
    """What sees pictures: of two towers the one for pictures, else the model."""
    return model.eyes if isinstance(model, HasEyes) else model


@dataclass(frozen=True, eq=False)
class HeardSound:
    """What a speech model makes of a recording.

    Attributes:
        inputs: What its encoder gets.
        tokens: The frames of its whole window, silence included.
        sound: What it heard.
        notes: What was done to the recording that its owner may not expect.
    """

    inputs: "Mapping[str, Tensor]"
    tokens: Tokens
    sound: "Sound"
    notes: tuple[str, ...] = ()


@runtime_checkable
class Hears(Protocol):
    """A model that may hear recordings. Not every one that has this does."""

    def hear(self, recording: "Recording") -> HeardSound | SeenPicture:
        """A recording as the model hears it, in frames; or sees it, in patches of a spectrogram."""
        ...

    def encode_target(self, text: str) -> Tokens:
        """What the decoder reads that is to write `text`."""
        ...

    def transcribe(self, heard: HeardSound, n: int) -> Tokens:
        """What the decoder reads as it writes what it heard, greedily, at most n tokens."""
        ...

    def decoder_inputs(self, target: Tokens) -> "Mapping[str, Tensor]":
        """What the forward gets for its decoder."""
        ...


@runtime_checkable
class Writer(Protocol):
    """What a model can do beside that writes text: a decoder, or an encoder-decoder. Not every one that has it can."""

    def generate_tokens(self, tokens: Tokens, n: int) -> Tokens:
        """Continues a text greedily by at most n tokens; `n_given` of what is returned says where they begin."""
        ...

    def encode_target(self, text: str) -> Tokens:
        """What the decoder of an encoder-decoder reads that is to write `text`."""
        ...

    def greedy_target(self, tokens: Tokens, n: int = 64) -> Tokens:
        """What the decoder of an encoder-decoder reads as it answers a text by its own greedy output."""
        ...


@runtime_checkable
class ChatTokenizer(Protocol):
    """A tokenizer that may know a chat template."""

    def chat(self, text: str) -> Tokens:
        """Tokenises a text as the user's message in the model's chat template."""
        ...


@runtime_checkable
class Embeds(Protocol):
    """A model whose static embeddings can be seen: what the input layer has for each token, wherever it stands."""

    def static_embeddings(self, ids: "Tensor") -> "Tensor":
        """The rows of the token embedding, (batch, token, d), for token numbers (batch, token)."""
        ...


@runtime_checkable
class Projects(Protocol):
    """A model whose output projections can be seen."""

    def output_projections(self) -> "dict[tuple[str, int], Tensor]":
        """W_O by (kind, layer), each (d_model, n_heads * d_head) as torch.nn.Linear stores it; those that are known."""
        ...


@runtime_checkable
class Layered(Protocol):
    """A model whose layers can be watched."""

    def blocks(self) -> "Mapping[tuple[str, int], nn.Module]":
        """(kind, layer) -> the module that is given the hidden states which the layer's keys are made of, first."""
        ...


Loss = Literal["causal", "masked", "target"]
"""What a model was trained to predict: the next token, masked tokens, or the tokens of a decoder's target."""


@runtime_checkable
class Reruns(Protocol):
    """A model whose heads can be changed: one that can be run again from a layer on, and whose loss is known."""

    @property
    def loss(self) -> Loss | None:
        """What its language-model head predicts; None without one."""
        ...

    @property
    def resumes(self) -> bool:
        """Whether earlier layers need not be computed again."""
        ...

    def outputs(self, batch: Batch, probe: "Probe", *, logits: bool = True) -> "Outputs":
        """Runs a batch with the probe at the seam; gradients flow through the probe's own numbers."""
        ...

    def rerun(self, batch: Batch, *, logits: bool = True) -> "Rerun":
        """Runs a batch, and keeps what is needed to run it again from a layer on."""
        ...


@runtime_checkable
class Sliced(Protocol):
    """A model whose heads' own weights can be named."""

    def head_slices(self, heads: "Mapping[Place, Sequence[int]]") -> "list[Slice]":
        """The numbers of its weights that are these heads' alone."""
        ...


@runtime_checkable
class Masks(Protocol):
    """A tokenizer that may have a token which stands for a hidden one."""

    @property
    def mask_id(self) -> int | None:
        """Its number; None where there is none."""
        ...


@runtime_checkable
class Modular(Protocol):
    """A model whose parts are torch modules that can be watched."""

    def modules(self) -> "Iterable[nn.Module]":
        """The modules that hold all others."""
        ...


@runtime_checkable
class Trained(Protocol):
    """A model that has an untrained twin."""

    def untrained(self, seed: int) -> Model:
        """The same architecture with random weights."""
        ...


@runtime_checkable
class Vocabulary(Protocol):
    """A tokenizer whose ordinary tokens are known."""

    def ordinary_ids(self) -> list[int]:
        """The numbers of all tokens that stand for text: no special ones, none that are kept unused."""
        ...


@runtime_checkable
class Spells(Protocol):
    """A tokenizer that can say of a number what text it stands for."""

    def ordinary_ids(self) -> list[int]:
        """As of `Vocabulary`."""
        ...

    def spell(self, number: int) -> str:
        """The text of one token."""
        ...


def example_tokens(tokenizer: Tokenizer) -> Tokens:
    """A short text that a tokenizer reads, with the special tokens around it.

    Tokenizers of SMILES or amino acids pass over whatever is not of their alphabet, letters and digits too: then it is
    a text of their own vocabulary.

    Raises:
        AttnscopeError: It reads none of the texts that are tried.
    """
    found: Tokens | None = None
    refused: AttnscopeError | None = None
    for text in _tried(tokenizer):
        try:
            found = tokenizer.encode(text)
        except AttnscopeError as error:
            refused = refused or error
            continue
        if not found.special.all():
            return found
    if found is None and refused is not None:
        raise refused
    raise AttnscopeError("the tokenizer drops every text that is tried", "its files belong to another model")


def _tried(tokenizer: Tokenizer) -> "Iterator[str]":
    yield from ("a", "0")  # a number is a text to models without tokenizer too
    if isinstance(tokenizer, Spells):
        numbers = tokenizer.ordinary_ids()
        for number in numbers[:: len(numbers) // 64 + 1]:
            yield tokenizer.spell(number)
