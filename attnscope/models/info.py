"""The facts of a loaded model, how commands list them, and refusals of inputs that it cannot read."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from attnscope.errors import AttnscopeError, amount

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


_NEEDS_SEAM = "why, ablate, patch, prune and weights: its own modules compute attention, and give its weights alone"
"""The commands that a model without a seam refuses, such as BLOOM, MPT, GPT-J, Falcon and DeBERTa."""

_ENGINES = {
    "native": "attnscope's own",
    "hf": "transformers",
    "numpy": "attnscope's own, without torch",
}
"""What people call an engine."""


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """The facts of a loaded model; all of them end up in records.

    Attributes:
        name: What the user called it: a catalogue name, a Hub id, a folder's name.
        source: Where the weights came from.
        sha256: Hash of the weights, hex, as `files.weights_sha256` returns it; with an adapter, the hash of two hashes.
            Empty for models made in memory.
        architecture: The model_type of its configuration, such as "bert".
        engine: "native", "hf", "numpy", or "torch" (any module).
        path: How weights are read: "seam" (the one function), or "eager" (the model's own output_attentions).
        kinds: The kinds of attention it has, in the order of computation: some of "encoder", "decoder", "cross".
        n_layers: Layers of each kind, in the order of `kinds`.
        n_heads: Query heads of each kind (the largest, where layers differ).
        n_kv_heads: Key/value heads of each kind.
        d_model: Width of the hidden states.
        n_parameters: Number of parameters, shared ones once; of the native engine without pooler and head.
        max_tokens: The longest text it takes, in tokens, special ones included; None where there is no limit.
        dtype: Precision of the weights as computed with, such as "float32".
        device: Where it runs, such as "cpu".
        checked: Whether the self-check against eager ran and held (True), was skipped (False), or is not needed (None).
        remembered: When, and with which torch, a self-check ran that was not repeated; "" = there is none.
        notes: What a user must know to read the pictures truly, one sentence each.
        adapter: The adapter that is part of the weights, "" = none.
        adapter_sha256: Hash of the adapter's weights.
        head: What becomes of the head for a task (classes, words) that its files hold; "" = they hold none.
        heads: Of a glass box: the name of each attention head ("L0H1"), and what it attends to.
    """

    name: str
    source: str
    sha256: str = ""
    architecture: str
    engine: str = "native"
    path: str = "seam"
    kinds: tuple[str, ...]
    n_layers: tuple[int, ...]
    n_heads: tuple[int, ...]
    n_kv_heads: tuple[int, ...]
    d_model: int
    n_parameters: int
    max_tokens: int | None = None
    dtype: str = "float32"
    device: str = "cpu"
    checked: bool | None = None
    remembered: str = ""
    notes: tuple[str, ...] = ()
    adapter: str = ""
    adapter_sha256: str = ""
    head: str = ""
    heads: tuple[tuple[str, str], ...] = ()

    def choose_kind(self, kind: str | None) -> str:
        """Return the kind of attention that is asked for; the first of the model's where `kind` is None.

        Raises:
            AttnscopeError: The model has no attention of this kind.
        """
        if kind is not None and kind not in self.kinds:
            raise AttnscopeError(
                f"{self.name} has no {kind} attention", f"it has: {', '.join(self.kinds)}"
            )
        return kind or self.kinds[0]

    def as_json(self) -> dict[str, Any]:
        """Return the facts as records hold them: plain JSON values by name."""
        facts: dict[str, Any] = {}
        for name, value in asdict(self).items():
            # In files `path` is called road.
            key = "road" if name == "path" else name
            facts[key] = list(value) if isinstance(value, tuple) else value
        # Only glass boxes have names of heads.
        del facts["heads"]
        if self.heads:
            facts["heads"] = dict(self.heads)
        return facts

    def lines(self, tokenizer: str) -> list[tuple[str, str]]:
        """Return the facts of the model for people, as (name, value); `tokenizer` is the tokenizer's name."""

        def each(numbers: tuple[int, ...]) -> str:
            """Return the number of each kind of attention: "6", or "encoder 6, decoder 6, cross 6"."""
            if len(self.kinds) == 1:
                return str(numbers[0])
            return ", ".join(map("{} {}".format, self.kinds, numbers))

        parameters = f"{self.n_parameters:,}"
        if self.engine == "native" and self.kinds == ("encoder",):
            parameters += " in embeddings and layers; a pooler is not counted"
        # How the maps were checked.
        checked = "equal to the model's own eager attention, on random inputs (of texts: short ones and a longer one)"
        if self.checked is None:
            checked = "not needed"
        elif not self.checked:
            checked = "no: the comparison with eager attention was skipped"
        elif self.engine == "torch":
            checked = "equal to what the module computes by itself, on its inputs"
        elif self.remembered:
            checked += f"; checked on {self.remembered}, and remembered since"
        engine = _ENGINES.get(self.engine, self.engine)
        not_for = ""
        if self.path != "seam":
            engine += ", weights from eager attention"
            not_for = _NEEDS_SEAM
        # Rows without a value are left out.
        rows = [
            ("model", self.name),
            ("source", self.source),
            ("architecture", f"{self.architecture} ({', '.join(self.kinds)})"),
            ("engine", engine),
            ("layers", each(self.n_layers)),
            ("heads", each(self.n_heads)),
            ("key/value heads", each(self.n_kv_heads)),
            ("width", str(self.d_model)),
            ("parameters", parameters),
            ("head for a task", self.head),
            ("limit", amount(self.max_tokens, "token") if self.max_tokens else "none"),
            ("tokenizer", tokenizer),
            ("precision", f"{self.dtype} on {self.device}"),
            ("checked", checked),
            ("not for", not_for),
            *(("note", note) for note in self.notes),
            *self.heads,
            ("sha256", self.sha256 or "-"),
        ]
        return [(name, value) for name, value in rows if value]


def require_seam(info: ModelInfo, hidden: str) -> None:
    """Raise AttnscopeError for a model that shows attention weights alone; `hidden` names what it does not show."""
    if info.engine == "numpy":
        raise AttnscopeError(f"{info.name} (engine numpy) does not show {hidden}", "leave out --engine")
    if info.path != "seam":
        raise AttnscopeError(
            f"{info.name} ({info.architecture}) does not show {hidden}: its own modules compute attention, and give "
            "its weights alone",
            "its weights can be seen: attnscope heatmap",
        )


def require_length(info: ModelInfo, n_tokens: int) -> None:
    """Raise AttnscopeError for a text that is longer than a model's limit."""
    if info.max_tokens is not None and n_tokens > info.max_tokens:
        raise AttnscopeError(
            f"a text of {n_tokens} tokens is longer than the {info.max_tokens} that {info.name} takes",
            "give a shorter text",
        )


def require_numbers(
    info: ModelInfo, numbers: "Tensor | NDArray[Any]", size: int, what: str = "token"
) -> None:
    """Raise AttnscopeError for numbers that a model has no embedding for: they must be from 0 to size - 1.

    Args:
        info: The facts of the model.
        numbers: The numbers of tokens or segments, of any shape.
        size: How many embeddings of them there are.
        what: What the numbers are of, "token" or "segment".
    """
    # An empty batch has no smallest and no largest number.
    if 0 in numbers.shape:
        return
    for number in (int(numbers.min()), int(numbers.max())):
        if not 0 <= number < size:
            raise AttnscopeError(
                f"{what} number {number} is beyond the {size} that {info.name} has",
                "its tokenizer belongs to another model",
            )
