"""Hold the facts of a loaded model, word them for people and for records, and refuse inputs that it cannot read.

A record is a saved result of a study. The *seam* is our attention function, which runs in place of the model's own. A
model without a seam returns attention weights only, so its queries, keys and outputs cannot be shown.
"""

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from attnscope.errors import AttnscopeError, amount
from attnscope.version import VERSION

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


_WEIGHTS_ONLY_REASON = "its own modules compute attention, and give its weights alone"
"""The reason, for messages, why models without a seam do not show queries, keys or outputs.

Such models are BLOOM, MPT, GPT-J, Falcon and DeBERTa.
"""

_ENGINE_NAMES = {
    "native": "attnscope's own",
    "hf": "transformers",
    "numpy": "attnscope's own, without torch",
}
"""Engine -> its name in the list of facts that `ModelInfo.listing` returns."""


_UNUSED_BY_NUMPY = ("torch", "transformers")
"""Libraries that the engine "numpy" does not use."""

_VERSIONED_LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")
"""Libraries whose versions the numbers in a record depend on."""

_RUN_FACTS = (
    "source",
    "sha256",
    "architecture",
    "engine",
    "road",
    "dtype",
    "device",
    "checked",
    "n_parameters",
)
"""The keys of `ModelInfo.as_json` that a record keeps beside the model's name."""


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """Hold the facts of a loaded model.

    Fields with one entry per kind of attention are in the order of `kinds`.

    Attributes:
        name: The name that the user gave: a catalogue name, a Hub id, or a folder's name.
        source: Where the weights came from.
        sha256: Hash of the weights, hex, as `files.weights_sha256` returns it. With an adapter, it is a hash of that
            hash and of `adapter_sha256`. Empty for models made in memory.
        architecture: The model_type of its configuration, such as "bert".
        engine: What computes the model: "native", "hf", "numpy", or "torch" (any torch module).
        path: How attention is read: "seam" (our attention function runs in place of the model's), or "eager" (the model
            returns the weights itself, by output_attentions).
        kinds: The kinds of attention that the model has, in the order of computation: some of "encoder", "decoder",
            "cross".
        n_layers: Number of layers of each kind.
        n_heads: Number of query heads of each kind; the largest, where layers differ.
        n_kv_heads: Number of key/value heads of each kind.
        d_model: Width of the hidden states.
        n_parameters: Number of parameters; shared ones count once. The native engine loads no pooler and no head.
        max_tokens: The longest text that the model reads, in tokens, special tokens included; None = no limit.
        dtype: Precision of the weights in the computation, such as "float32".
        device: The device of the weights, such as "cpu".
        checked: True = the attention was compared with the model's own, and is equal; False = it was not compared;
            None = no comparison is needed.
        remembered: Date and torch version of the comparison, if an earlier load made it; "" = this load made it, or
            there was none.
        notes: What a user must know to read the pictures correctly, one sentence each.
        adapter: Name of the adapter that is part of the weights; "" = no adapter.
        adapter_sha256: Hash of the adapter's weights.
        head: What is done with the task head (for classes, for words) that the files contain; "" = they contain none.
        heads: (name of an attention head, what it attends to), such as ("L0H1", "the previous token"). Only glass
            boxes have them: example models with weights set by hand. Empty for all other models.
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
        """Return `kind`, or the first kind of the model's attention if `kind` is None.

        Raises:
            AttnscopeError: The model has no attention of this kind.
        """
        if kind is not None and kind not in self.kinds:
            raise AttnscopeError(
                f"{self.name} has no {kind} attention", f"it has: {', '.join(self.kinds)}"
            )
        return kind or self.kinds[0]

    def as_json(self) -> dict[str, Any]:
        """Return the facts as records store them: plain JSON values by name."""
        facts: dict[str, Any] = {}
        for name, value in asdict(self).items():
            # Records call this field "road", because their field "path" is the path of a file.
            key = "road" if name == "path" else name
            facts[key] = list(value) if isinstance(value, tuple) else value
        # Only glass boxes have named heads.
        facts["heads"] = dict(self.heads)
        if not self.heads:
            del facts["heads"]
        return facts

    def listing(self, tokenizer_name: str) -> list[tuple[str, str]]:
        """Return the facts of the model as (label, value), worded for people."""

        def format_counts(counts: tuple[int, ...]) -> str:
            """Return one count per kind of attention as text: "6", or "encoder 6, decoder 6, cross 6"."""
            if len(self.kinds) == 1:
                return str(counts[0])
            return ", ".join(map("{} {}".format, self.kinds, counts))

        parameters = f"{self.n_parameters:,}"
        if self.engine == "native" and self.kinds == ("encoder",):
            parameters += " in embeddings and layers; a pooler is not counted"
        if self.checked is None:
            checked = "not needed"
        elif not self.checked:
            checked = "no: the comparison with eager attention was skipped"
        elif self.engine == "torch":
            checked = "equal to what the module computes by itself, on its inputs"
        else:
            checked = "equal to the model's own eager attention, on random inputs "
            checked += "(of texts: short ones and a longer one)"
            if self.remembered:
                checked += f"; checked on {self.remembered}, and remembered since"
        engine = _ENGINE_NAMES.get(self.engine, self.engine)
        not_for = ""
        if self.path != "seam":
            engine += ", weights from eager attention"
            not_for = f"why, ablate, patch, prune and weights: {_WEIGHTS_ONLY_REASON}"
        # Rows without a value are left out.
        rows = [
            ("model", self.name),
            ("source", self.source),
            ("architecture", f"{self.architecture} ({', '.join(self.kinds)})"),
            ("engine", engine),
            ("layers", format_counts(self.n_layers)),
            ("heads", format_counts(self.n_heads)),
            ("key/value heads", format_counts(self.n_kv_heads)),
            ("width", str(self.d_model)),
            ("parameters", parameters),
            ("head for a task", self.head),
            ("limit", amount(self.max_tokens, "token") if self.max_tokens else "none"),
            ("tokenizer", tokenizer_name),
            ("precision", f"{self.dtype} on {self.device}"),
            ("checked", checked),
            ("not for", not_for),
            *(("note", note) for note in self.notes),
            *self.heads,
            ("sha256", self.sha256 or "-"),
        ]
        return [(name, value) for name, value in rows if value]


def run_facts(info: ModelInfo, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return a record's field `run`, which says how its numbers were made, as plain JSON values.

    The notes are those of the model, then `notes`. The seed is None: a study with random numbers sets it later.
    """
    facts = info.as_json()
    run = {"model": info.name} | {name: facts[name] for name in _RUN_FACTS}
    # These fields have one number per kind of attention: store them by kind.
    for name in ("n_layers", "n_heads", "n_kv_heads"):
        run[name] = dict(zip(info.kinds, getattr(info, name), strict=True))
    used_versions = versions()
    if info.engine == "numpy":
        used_versions = {
            name: number for name, number in used_versions.items() if name not in _UNUSED_BY_NUMPY
        }
    run |= {"seed": None, "versions": used_versions, "notes": [*info.notes, *notes]}
    # Only records of adapted models name an adapter.
    if info.adapter:
        run |= {"adapter": info.adapter, "adapter_sha256": info.adapter_sha256}
    return run


@cache
def versions() -> dict[str, str]:
    """Return the versions of attnscope, Python and the `_VERSIONED_LIBRARIES`, by name."""
    library_versions = {name: version(name) for name in _VERSIONED_LIBRARIES}
    return {"attnscope": VERSION, "python": platform.python_version(), **library_versions}


def require_seam(info: ModelInfo, missing_quantity: str) -> None:
    """Raise AttnscopeError for a model that shows attention weights only.

    `missing_quantity` names what the caller wants and the model cannot show, such as "its queries and keys".
    """
    if info.engine == "numpy":
        raise AttnscopeError(
            f"{info.name} (engine numpy) does not show {missing_quantity}", "leave out --engine"
        )
    if info.path != "seam":
        raise AttnscopeError(
            f"{info.name} ({info.architecture}) does not show {missing_quantity}: {_WEIGHTS_ONLY_REASON}",
            "its weights can be seen: attnscope heatmap",
        )


def require_length(info: ModelInfo, n_tokens: int) -> None:
    """Raise AttnscopeError if a text of `n_tokens` is longer than the model's limit."""
    if info.max_tokens is not None and n_tokens > info.max_tokens:
        raise AttnscopeError(
            f"a text of {n_tokens} tokens is longer than the {info.max_tokens} that {info.name} takes",
            "give a shorter text",
        )


def require_known_ids(
    info: ModelInfo, ids: "Tensor | NDArray[Any]", n_embeddings: int, id_kind: str = "token"
) -> None:
    """Raise AttnscopeError for ids without an embedding: ids must be from 0 to n_embeddings - 1.

    Args:
        info: The facts of the model.
        ids: The ids of tokens or segments, of any shape.
        n_embeddings: The number of tokens or segments that have an embedding.
        id_kind: "token" or "segment".
    """
    # An empty batch has no smallest and no largest id.
    if 0 in ids.shape:
        return
    for extreme_id in (int(ids.min()), int(ids.max())):
        if not 0 <= extreme_id < n_embeddings:
            raise AttnscopeError(
                f"{id_kind} number {extreme_id} is beyond the {n_embeddings} that {info.name} has",
                "its tokenizer belongs to another model",
            )
