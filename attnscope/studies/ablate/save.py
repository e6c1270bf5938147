"""A model without some heads, as files that what loads the model loads as well: their weights are zero.

Nothing else of the files changes: names, precisions, shards, tokenizer and configuration are the model's own. Before
the folder appears its model is loaded and compared with the whole model whose heads are gated at the seam.
"""

from __future__ import annotations

import json
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from attnscope.core.plain_torch import with_plain_torch
from attnscope.errors import AttnscopeError, UsageError, one_line
from attnscope.models.files import weight_files
from attnscope.models.model import Batch, Model, example_tokens
from attnscope.questions.ablate import AblateOptions, Ablation
from attnscope.results.file_sets import require_writable
from attnscope.results.storage import finite, plain
from attnscope.studies.ablate.reading import require_rerunnable
from attnscope.studies.ablate.study import ablate
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.inputs.texts import Report

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.attention.probes import Place
    from attnscope.core.attention.seam import AttentionCall, Probe
    from attnscope.models.model import Slice

PRUNE_SCHEMA = "attnscope.prune/1"
ABOUT = "prune.json"
EXAMPLE = "The animal didn't cross the street because it was too tired."
"""What the written model is compared on."""

_OTHER_WEIGHTS = frozenset(
    {".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".gguf", ".ot", ".tflite", ".safetensors", ".pkl", ".ckpt"}
)


@dataclass(frozen=True)
class Pruned:
    """A folder with a pruned model.

    Attributes:
        folder: The folder.
        effect: What changes without the heads, on the texts.
        zeroed: How many numbers are zero now, by "query", "key", "value" and "output".
        difference: The largest difference between the folder's model and the gated one, relative to the largest
            hidden state or logit.
        sha256: Hash of the weights.
    """

    folder: Path
    effect: Ablation
    zeroed: Mapping[str, int]
    difference: float
    sha256: str

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads' names."""
        return tuple(self.effect.head_names)

    def _effects(self) -> dict[str, float]:
        """Return what changes without all the heads, by the names of columns."""
        heads, together = self.effect.table("heads"), self.effect.table("together")
        effects: dict[str, float] = {}
        for quantity in self.effect.quantities:
            row = self.effect.row("together", quantity) if len(together) else heads.interval(quantity)[0]
            assert row is not None
            effects |= dict(zip((quantity, f"{quantity}_low", f"{quantity}_high"), row.tolist(), strict=True))
        return effects

    def as_json(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
        effects = self.effect.as_json()
        document: dict[str, Any] = plain(
            {
                "schema": PRUNE_SCHEMA,
                "run": effects["run"],
                "heads": list(self.heads),
                "zeroed": dict(self.zeroed),
                "difference_to_gated": self.difference,
                "sha256": self.sha256,
                "corpus": effects["corpus"],
                "effects": self._effects(),
            },
            finite,
        )
        return document

    def _single(self, head: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return what changes without the one head, in the form of the table `together`."""
        parts = ("", "_low", "_high", "_count")
        return [
            {"quantity": name, **{f"value{part}": head.get(name + part) for part in parts}}
            for name in self.effect.quantities
        ]


@with_plain_torch
def prune(
    spec: str, texts: Any, options: AblateOptions, loading: LoadOptions | None = None, report: Report | None = None
) -> Pruned:
    """Write a model without some heads into a folder, whole or not at all.

    It sets the heads' rows of W_Q, W_K and W_V, their biases, and their slice of W_O to zero. With grouped queries it
    does so in W_Q and W_O. W_K and W_V of a group become zero only if all its heads go.

    Args:
        spec: A catalogue name, a folder, or a Hub id.
        texts: Texts to measure the change on: strings or a `Corpus`.
        options: Which heads (`choice.pick`), the new folder (`save`), and how the change is measured.
        loading: How the model is loaded; always on transformers.
        report: Is told how far the texts are, on which the change is measured.

    Raises:
        AttnscopeError: There are no such heads or they have no weights of their own, the files are none that can be
            rewritten, the folder is there already, or what was written is not the gated model.
    """
    loading = loading or LoadOptions()
    if loading.engine == "native":
        raise UsageError("pruned models are those of transformers", "leave out --engine")
    out = options.save
    if out is None:
        raise UsageError("there is no folder to write", "name a new one with --save")
    if options.choice.pick is None:
        raise UsageError("no head is named", "name them: --pick L3H1,L5H11")
    _require_free(out)
    source = loading.resolve(spec)
    loading = replace(loading, engine="hf")
    if source.folder is None:
        raise AttnscopeError(f"{source.name} has no files", "name a folder or a Hub id")
    if source.adapter is not None:
        raise AttnscopeError(f"{source.name} has an adapter, which lies beside its weights", "merge it, with peft")
    files = weight_files(source.folder, allow_pickle=loading.allow_pickle)
    model = loading.load(source)
    effect = ablate(model, texts, options, report)
    heads: dict[Place, list[int]] = {}
    places = zip(*(effect["heads"][name].tolist() for name in ("kind", "layer", "head")), strict=True)
    for kind, layer, head in places:
        heads.setdefault((kind, layer), []).append(head)
    if model.head_slices is None:
        raise AttnscopeError(f"which weights of {model.info.name} are whose is not known")
    slices = model.head_slices(heads)
    part = out.parent / f".{secrets.token_hex(8)}.part"
    try:
        _copy(source.folder, part)
        with tempfile.TemporaryDirectory(dir=part) as aside:
            _write_weights(_without_pickles(files, Path(aside)), part, slices)
        sha256, difference = _compare(model, heads, part, loading)
        zeroed = _numbers(slices)
        effect = _note(effect, zeroed, difference)
        pruned = Pruned(out, effect, zeroed, difference, sha256)
        (part / ABOUT).write_text(json.dumps(pruned.as_json(), ensure_ascii=False, indent=1) + "\n", "utf-8")
        part.replace(out)
    except (OSError, SafetensorError) as error:  # the latter of a full disk
        # Of a folder that is copied there may be several; each is (from, to, why).
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else getattr(error, "strerror", None) or error
        raise AttnscopeError(
            f"cannot write {out}: {one_line(str(why))}", "choose another folder with --save, or make room"
        ) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return pruned


def _note(effect: Ablation, zeroed: Mapping[str, int], difference: float) -> Ablation:
    """Return what changes, with a note that says what was set to zero."""
    parts = ", ".join(f"{n:,} of {role}" for role, n in zeroed.items())
    note = f"set to zero: {parts}; largest difference of its outputs from the gated model's: {difference:.1g}"
    return replace(effect, run={**effect.run, "notes": [*effect.run.get("notes", ()), note]})


def _require_free(out: Path) -> None:
    """Refuses a folder with anything in it: its files must neither be lost nor mix with what is written."""
    if out.is_dir() and any(out.iterdir()):
        raise AttnscopeError(f"{out} is there already, with files in it", "name a new folder with --save")
    require_writable(out)


def _copy(folder: Path, target: Path) -> None:
    """Everything but weights: configuration, tokenizer, what belongs to them."""

    def weights(_: str, names: list[str]) -> list[str]:
        return [name for name in names if _is_left_out(name)]

    shutil.copytree(folder, target, ignore=weights)


def _is_left_out(name: str) -> bool:
    is_index = name.endswith(".bin.index.json")  # of pickles, which are not written
    return is_index or Path(name).suffix in _OTHER_WEIGHTS or name in ("__pycache__", ".git")


def _without_pickles(files: Sequence[Path], aside: Path) -> Sequence[Path]:
    """The files as they are, or one of safetensors in the folder `aside` with what pickles hold."""
    if all(path.suffix == ".safetensors" for path in files):
        return files
    import torch
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for path in files:
        tensors |= torch.load(path, map_location="cpu", weights_only=True)
    whole = aside / "model.safetensors"
    # What is tied shares its memory, which safetensors do not.
    save_file({n: t.clone().contiguous() for n, t in tensors.items()}, whole, metadata={"format": "pt"})
    shutil.copymode(files[0], whole)
    return [whole]


def _write_weights(files: Sequence[Path], target: Path, slices: Sequence[Slice]) -> None:
    """The weights with slices set to zero, in the same files under the same names."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    waiting = {part.name: [other for other in slices if other.name == part.name] for part in slices}
    for path in files:
        with safe_open(path, framework="pt") as file:
            keys, metadata = list(file.keys()), file.metadata()
            matched = {name: key for name in waiting if (key := _key_of(waiting[name][0], keys, file)) is not None}
            if not matched:
                shutil.copyfile(path, target / path.name)
                continue
            tensors = {key: file.get_tensor(key) for key in keys}
        for name, key in matched.items():
            tensors[key] = tensors[key].clone()
            for part in waiting.pop(name):
                _zero(tensors[key], part)
        save_file(tensors, target / path.name, metadata=metadata)
        shutil.copymode(path, target / path.name)  # safetensors lets the owner alone read it
    if waiting:
        name = next(iter(waiting))
        raise AttnscopeError(
            f"the files do not hold {name} as the model has it: transformers converts it as it loads",
            "save it first: AutoModel.from_pretrained(…).save_pretrained(…)",
        )


def _key_of(part: Slice, keys: Sequence[str], file: Any) -> str | None:
    """What a weight is called in a file: as in the model, or with or without a prefix; None if the file has it not."""
    import torch

    for key in keys:
        if key == part.name or key.endswith(f".{part.name}") or part.name.endswith(f".{key}"):
            stored: Tensor = file.get_tensor(key)
            if stored.shape == part.weight.shape and torch.equal(stored.to(part.weight.dtype), part.weight.cpu()):
                return key
    return None


def _zero(tensor: Tensor, part: Slice) -> None:
    import torch

    tensor.index_fill_(part.axis, torch.tensor(part.indices), 0)


def _numbers(slices: Sequence[Slice]) -> dict[str, int]:
    """How many numbers are set to zero, by role."""
    numbers: Counter[str] = Counter()
    for part in slices:
        numbers[part.role] += part.weight.numel() // part.weight.shape[part.axis] * len(part.indices)
    return dict(numbers)


def _compare(
    model: Model, heads: Mapping[Place, Sequence[int]], folder: Path, loading: LoadOptions
) -> tuple[str, float]:
    """Loads what was written, and compares it with the model whose heads are gated.

    Returns the hash of the written weights, and the largest difference. An AttnscopeError refuses one beyond rounding.
    """
    import torch

    from attnscope.core.attention.seam import attend

    written = replace(loading, check=False).load(str(folder.absolute()))
    batch = _batch(model)
    with torch.no_grad():
        gated = require_rerunnable(model).outputs(batch, _without(heads))
        reloaded = require_rerunnable(written).outputs(batch, attend)
    pairs = [(gated.hidden, reloaded.hidden)]
    if gated.logits is not None and reloaded.logits is not None:
        pairs.append((gated.logits, reloaded.logits))
    difference = max(float((a - b).abs().max()) / max(float(a.abs().max()), 1e-30) for a, b in pairs)
    allowed = 64 * torch.finfo(gated.hidden.dtype).eps * sum(model.info.n_layers) ** 0.5
    if not difference <= allowed:
        raise AttnscopeError(
            f"what was written differs from the model without these heads by {difference:.2g}, rounding is "
            f"{allowed:.2g}: nothing is kept",
            "try --dtype float64, or a model of another architecture",
        )
    return written.info.sha256, difference


def _without(heads: Mapping[Place, Sequence[int]]) -> Probe:
    """What takes heads out, however many there are."""
    import torch

    from attnscope.core.attention.probes import Gate

    def gate(call: AttentionCall) -> Tensor:
        factors = torch.ones(call.n_heads)
        factors[list(heads.get((call.kind, call.layer), ()))] = 0
        return Gate({(call.kind, call.layer): factors})(call)

    return gate


def _batch(model: Model) -> Batch:
    """A text that every tokenizer can read, and for an encoder-decoder a target."""
    import torch

    tokens = example_tokens(model.tokenizer)
    target = None
    if "cross" in model.info.kinds and model.writer is not None:
        target = torch.from_numpy(model.writer.encode_target(EXAMPLE).ids.astype("int64"))[None]
    return Batch(torch.from_numpy(tokens.ids.astype("int64"))[None], target_ids=target)
