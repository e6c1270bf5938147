"""The facts of a loaded model: how commands list them, and what results keep. Refuse inputs that it cannot read."""

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
"""Why models without a seam (BLOOM, MPT, GPT-J, Falcon, DeBERTa) do not show queries, keys or outputs."""

_ENGINE_NAMES = {
    "native": "attnscope's own",
    "hf": "transformers",
    "numpy": "attnscope's own, without torch",
}
"""Name of an engine -> what it is called in the list of a model's facts."""


_UNUSED_BY_NUMPY = ("torch", "transformers")
"""Libraries that the engine "numpy" does without."""

_VERSIONED_LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")
"""The libraries whose versions numbers depend on."""

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
"""The facts of a model that a record keeps beside its name, see `ModelInfo.as_json`."""


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """The facts of a loaded model; all of them end up in records.

    Attributes:
        name: What the user called it: a catalogue name, a Hub id, a folder's name.
        source: Where the weights came from.
        sha256: Hash of the weights, hex, as `files.weights_sha256` returns it; with an adapter, a hash of that and
            `adapter_sha256`. Empty for models made in memory.
        architecture: The model_type of its configuration, such as "bert".
        engine: "native", "hf", "numpy", or "torch" (any module).
        path: How attention is read: "seam" (our attention function runs in place of the model's), or "eager" (the model
            returns the weights itself, by output_attentions).
        kinds: The kinds of attention it has, in the order of computation: some of "encoder", "decoder", "cross".
        n_layers: Layers of each kind, in the order of `kinds`.
        n_heads: Query heads of each kind (the largest, where layers differ).
        n_kv_heads: Key/value heads of each kind.
        d_model: Width of the hidden states.
        n_parameters: Number of parameters, shared ones once. The native engine loads no pooler and no head.
        max_tokens: The longest text it takes, in tokens, special ones included; None where there is no limit.
        dtype: Precision of the weights as computed with, such as "float32".
        device: Where it runs, such as "cpu".
        checked: Whether attention was compared with the model's own and agreed (True), was not compared (False), or
            needs no comparison (None).
        remembered: When, and with which torch, an earlier load compared it, so that this one did not; "" = none did.
        notes: What a user must know to read the pictures truly, one sentence each.
        adapter: The adapter that is part of the weights, "" = none.
        adapter_sha256: Hash of the adapter's weights.
        head: What becomes of the head for a task (classes, words) that its files hold; "" = they hold none.
        heads: The name of each attention head ("L0H1"), and what it attends to; known of glass boxes, whose weights are
            set by hand, and empty for all others.
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
            # Records call `path` the road: their own `path` is that of a file.
            key = "road" if name == "path" else name
            facts[key] = list(value) if isinstance(value, tuple) else value
        # Only glass boxes have names of heads.
        facts["heads"] = dict(self.heads)
        if not self.heads:
            del facts["heads"]
        return facts

    def listing(self, tokenizer_name: str) -> list[tuple[str, str]]:
        """Return the facts of the model as (name, value), worded for people."""

        def format_counts(counts: tuple[int, ...]) -> str:
            """Return the count for each kind of attention: "6", or "encoder 6, decoder 6, cross 6"."""
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
    """Return the `run` of a record, as plain JSON values.

    Its notes are those of the model, then `notes`. Its seed is None: a study that draws at random sets it.
    """
    facts = info.as_json()
    run = {"model": info.name} | {name: facts[name] for name in _RUN_FACTS}
    # These fields have one number for each kind of attention.
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
    """Return the versions that numbers depend on, by name: attnscope's, Python's and those of `_VERSIONED_LIBRARIES`."""
    own_versions = {"attnscope": VERSION, "python": platform.python_version()}
    return own_versions | {name: version(name) for name in _VERSIONED_LIBRARIES}


def require_seam(info: ModelInfo, missing_quantity: str) -> None:
    """Raise AttnscopeError for a model that shows attention weights alone; `missing_quantity` says what it cannot show."""
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
    """Raise AttnscopeError for a text that is longer than a model's limit."""
    if info.max_tokens is not None and n_tokens > info.max_tokens:
        raise AttnscopeError(
            f"a text of {n_tokens} tokens is longer than the {info.max_tokens} that {info.name} takes",
            "give a shorter text",
        )


def require_known_ids(
    info: ModelInfo, ids: "Tensor | NDArray[Any]", n_embeddings: int, what: str = "token"
) -> None:
    """Raise AttnscopeError for ids that a model has no embedding for: they must be from 0 to n_embeddings - 1.

    Args:
        info: The facts of the model.
        ids: The ids of tokens or segments, of any shape.
        n_embeddings: How many tokens or segments have an embedding.
        what: "token" or "segment".
    """
    # An empty batch has no smallest and no largest id.
    if 0 in ids.shape:
        return
    for extreme_id in (int(ids.min()), int(ids.max())):
        if not 0 <= extreme_id < n_embeddings:
            raise AttnscopeError(
                f"{what} number {extreme_id} is beyond the {n_embeddings} that {info.name} has",
                "its tokenizer belongs to another model",
            )
