"""Write a copy of a model in which the weights of some heads are zero: `attnscope ablate --save`.

The copy loads like the original. Names, precisions, shards, tokenizer and configuration stay the same. Before the new
folder appears, the copy is loaded and compared with the gated model. The gated model is the original, in which the
outputs of the same heads are replaced by zeros while it runs, as `ablate` does it.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from attnscope.core.attention.probes import LayerKey
from attnscope.core.attention.seam import attend
from attnscope.core.interventions import HeadPatcher, Patch
from attnscope.core.plain_torch import with_default_torch
from attnscope.errors import AttnscopeError, UsageError, amount, one_line, require_close
from attnscope.models.files import weight_files
from attnscope.models.model import Model, WeightSlice, example_batch
from attnscope.questions.ablate import AblateOptions, Ablation
from attnscope.results.storage import require_writable
from attnscope.studies.ablate.study import ablate
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.inputs.texts import ReportProgress

RECORD_FILE = "ablation.json"
"""The file in the new folder that holds the result of `ablate`: the removed heads, and how the outputs change."""

EXAMPLE_TARGET = "The animal didn't cross the street because it was too tired."
"""The target that an encoder-decoder reads when the copy is compared with the gated model."""

_SAVE_HINT = "save it first: AutoModel.from_pretrained(…).save_pretrained(…)"

_IGNORED_PATTERNS = "*.safetensors *.bin *.bin.index.json *.pt *.h5 *.msgpack *.onnx *.gguf *.ckpt *.git"
"""Patterns of files that are not copied: they hold weights in other formats, or do not belong to the model."""


@with_default_torch
def prune(
    spec: str,
    texts: Any,
    options: AblateOptions,
    loading: LoadOptions | None = None,
    report: ReportProgress | None = None,
) -> Ablation:
    """Write a copy of a model without some heads into a new folder, and return how its outputs change.

    The heads' rows of W_Q, W_K and W_V, their biases, and their slice of W_O become zero. With grouped queries, heads
    share W_K and W_V, which become zero only if all heads of the group are removed. If anything fails, no new folder is
    left.

    Args:
        spec: The model: a catalogue name, a folder, or a Hub id.
        texts: Texts to measure the change on: strings or a `Corpus`.
        options: Which heads are removed (`choice.pick`), the new folder (`save`), and how the change is measured.
        loading: How the model is loaded. The engine is always "hf", transformers.
        report: The progress callback, called after each batch of texts.

    Raises:
        AttnscopeError: There are no such heads, or they have no weights of their own; the model is no folder of
            safetensors; the new folder exists and has files in it; or the copy differs from the gated model.
    """
    loading = loading or LoadOptions()
    out = options.save
    assert out is not None  # callers check that --save was given
    if options.choice.pick is None:
        raise UsageError("no head is named", "name them: --pick L3H1,L5H11")
    # Do not overwrite a user's files, or mix them with new ones.
    if out.is_dir() and any(out.iterdir()):
        raise AttnscopeError(
            f"{out} is there already, with files in it", "name a new folder with --save"
        )
    require_writable(out)
    # Find the files of the model, which must be safetensors. A model built in memory has no folder. An adapter has
    # weight files of its own.
    source = loading.resolve(spec)
    if source.folder is None or source.adapter is not None:
        raise AttnscopeError(f"{source.name} is no folder of safetensors without an adapter", _SAVE_HINT)
    files = weight_files(source.folder)

    # Ablate the heads on the user's texts, and find their weights.
    loading = replace(loading, engine="hf")
    model = loading.load(source)
    ablation = ablate(model, texts, options, report)
    # (kind, layer) -> indices of the removed heads. The result's table has a row for each of them.
    heads: dict[LayerKey, list[int]] = {}
    table = ablation.table("heads")
    for kind, (layer, head) in zip(table["kind"].tolist(), table.layer_heads, strict=True):
        heads.setdefault((kind, layer), []).append(head)
    assert model.head_slices is not None  # only other engines have None
    slices = model.head_slices(heads)
    # Write into a hidden temporary folder with the same parent. Rename it once the comparison has succeeded.
    try:
        with TemporaryDirectory(
            dir=out.absolute().parent, prefix=".", ignore_cleanup_errors=True
        ) as hidden_folder:
            folder = Path(hidden_folder) / out.name
            ignored = shutil.ignore_patterns(*_IGNORED_PATTERNS.split())
            shutil.copytree(source.folder, folder, ignore=ignored)
            _write_weights(files, folder, slices)
            difference = _compare_outputs(model, heads, loading.load(str(folder)))
            zeroed = f"set to zero: weights of {amount(len(table), 'head')}"
            note = f"{zeroed}; outputs differ from the gated model's by {difference:.1g}"
            notes = [*ablation.run.get("notes", ()), note]
            ablation = replace(ablation, run={**ablation.run, "notes": notes})
            (folder / RECORD_FILE).write_text(ablation.to_json() + "\n", "utf-8")
            folder.replace(out)
    # safetensors has its own exception for a full disk.
    except (OSError, SafetensorError) as error:
        raise AttnscopeError(
            f"cannot write {out}: {one_line(str(error))}",
            "choose another folder with --save, or make room",
        ) from None
    return ablation


def _write_weights(files: Sequence[Path], folder: Path, slices: Sequence[WeightSlice]) -> None:
    """Write the weight files into a folder, under the same names, with some slices set to zero."""
    missing_names = {weight_slice.name for weight_slice in slices}
    for path in files:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # `file` is not iterable
        tensors = dict(stored)
        for weight_slice in slices:
            # A weight is recognised by its values, so search the unchanged `stored`: two slices may be of one weight.
            key = _find_stored_name(weight_slice, stored)
            if key is not None:
                missing_names.discard(weight_slice.name)
                tensors[key] = _zero_slice(tensors[key], weight_slice)
        save_file(tensors, folder / path.name, metadata=metadata)
        # Copy the permissions, because safetensors writes files that only the owner can read.
        shutil.copymode(path, folder / path.name)
    if missing_names:
        raise AttnscopeError(
            f"the files do not hold {min(missing_names)} as the model has it: transformers converts it as it loads",
            _SAVE_HINT,
        )


def _find_stored_name(weight_slice: WeightSlice, tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name under which a file stores the weight of a slice; None = the file does not have this weight.

    File and model may use different prefixes: `encoder.layer.0…` in one, `bert.encoder.layer.0…` in the other.
    """
    name = f".{weight_slice.name}"
    weight = weight_slice.weight
    for key, stored in tensors.items():
        # The leading dots make sure that only whole parts of names match.
        is_same_ending = f".{key}".endswith(name) or name.endswith(f".{key}")
        # Different weights may have the same ending, so compare the values, too.
        if is_same_ending and stored.shape == weight.shape and torch.equal(stored.to(weight), weight):
            return key
    return None


def _zero_slice(weight: Tensor, weight_slice: WeightSlice) -> Tensor:
    """Return a weight with a slice of it set to zero."""
    return weight.index_fill(weight_slice.axis, torch.tensor(weight_slice.indices), 0)


def _compare_outputs(model: Model, heads: Mapping[LayerKey, Sequence[int]], pruned: Model) -> float:
    """Return the largest relative difference between the pruned copy and the gated model; refuse more than rounding."""
    # Run both models on one example. An encoder-decoder also needs a target. The gated model is the original with the
    # outputs of the heads, called "z", patched to zero.
    target = None
    if "cross" in model.info.kinds and model.text_generator is not None:
        target = torch.from_numpy(model.text_generator.encode_target(EXAMPLE_TARGET).ids)[None]
    batch = replace(example_batch(model), target_ids=target)
    patches = {}
    for layer_key, indices in heads.items():
        patches[layer_key] = [Patch("z", tuple(indices), torch.zeros(()))]
    with torch.no_grad():
        gated_outputs = model.outputs(batch, HeadPatcher(patches))
        pruned_outputs = pruned.outputs(batch, attend)
    # Compare hidden states and logits, relative to the largest number of the gated model.
    differences = []
    for gated, zeroed in (
        (gated_outputs.hidden, pruned_outputs.hidden),
        (gated_outputs.logits, pruned_outputs.logits),
    ):
        # A model without a head has no logits.
        if gated is not None and zeroed is not None:
            largest = gated.abs().max().clamp(min=1e-30)
            change = (gated - zeroed).abs().max()
            differences.append(float(change / largest))
    # Unlike the built-in max, np.max returns NaN if any difference is NaN, and `require_close` refuses NaN.
    difference = float(np.max(differences))
    epsilon = torch.finfo(gated_outputs.hidden.dtype).eps
    # Rounding errors add up like a random walk over the layers.
    require_close(
        "nothing is kept, for what was written differs from the model without these heads",
        difference,
        64 * epsilon * sum(model.info.n_layers) ** 0.5,
        "try --dtype float64, or a model of another architecture",
    )
    return difference
