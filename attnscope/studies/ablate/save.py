"""Write a model without some heads, as files that load like the model: the heads' weights are zero.

Nothing else of the files changes: names, precisions, shards, tokenizer and configuration are the model's own. Before
the folder appears its model is loaded, and compared with the model whose heads are taken out as `ablate` does it: at
the seam, the one function that computes attention.
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
"""The file of the new folder that holds the record: the removed heads, and the changes without them."""

EXAMPLE = "The animal didn't cross the street because it was too tired."
"""The target that an encoder-decoder reads while the written model is compared."""

_SAVE_FIRST = "save it first: AutoModel.from_pretrained(…).save_pretrained(…)"

_NOT_COPIED = "*.safetensors *.bin *.bin.index.json *.pt *.h5 *.msgpack *.onnx *.gguf *.ckpt *.git"
"""Patterns of files that hold weights, or do not belong to the model."""


@with_default_torch
def prune(
    spec: str,
    texts: Any,
    options: AblateOptions,
    loading: LoadOptions | None = None,
    report: ReportProgress | None = None,
) -> Ablation:
    """Write a model without some heads into a new folder, and return the changes without them.

    It sets the heads' rows of W_Q, W_K and W_V, their biases, and their slice of W_O to zero. With grouped queries it
    does so in W_Q and W_O. W_K and W_V of a group become zero only if all its heads go. If anything fails, there is no
    new folder.

    Args:
        spec: A catalogue name, a folder, or a Hub id.
        texts: Texts to measure the change on: strings or a `Corpus`.
        options: Which heads (`choice.pick`), the new folder (`save`), and how the change is measured.
        loading: How the model is loaded; always on transformers.
        report: Called after each batch of the texts on which the change is measured.

    Raises:
        AttnscopeError: There are no such heads or they have no weights of their own, the files are none that can be
            rewritten, the folder is there already, or what was written is not the gated model.
    """
    loading = loading or LoadOptions()
    out = options.save
    assert out is not None  # without --save nobody calls it
    if options.choice.pick is None:
        raise UsageError("no head is named", "name them: --pick L3H1,L5H11")
    # A user's files must neither be lost nor mixed with the new ones.
    if out.is_dir() and any(out.iterdir()):
        raise AttnscopeError(
            f"{out} is there already, with files in it", "name a new folder with --save"
        )
    require_writable(out)
    # Find the files of the model, which must be safetensors.
    source = loading.resolve(spec)
    if source.folder is None or source.adapter is not None:
        raise AttnscopeError(
            f"{source.name} is no folder of safetensors without an adapter", _SAVE_FIRST
        )
    files = weight_files(source.folder)

    # Measure the change without the heads, and find their weights.
    loading = replace(loading, engine="hf")
    model = loading.load(source)
    ablation = ablate(model, texts, options, report)
    # (kind, layer) -> the heads that are ablated there. The table has a row for each.
    heads: dict[LayerKey, list[int]] = {}
    table = ablation.table("heads")
    for kind, (layer, head) in zip(table["kind"].tolist(), table.layer_heads, strict=True):
        heads.setdefault((kind, layer), []).append(head)
    assert model.head_slices is not None  # every model of the engine hf has it
    slices = model.head_slices(heads)
    # Write a hidden folder beside the new one, and rename it when the comparison held.
    try:
        with TemporaryDirectory(
            dir=out.absolute().parent, prefix=".", ignore_cleanup_errors=True
        ) as hidden:
            folder = Path(hidden) / out.name
            ignored = shutil.ignore_patterns(*_NOT_COPIED.split())
            shutil.copytree(source.folder, folder, ignore=ignored)
            _write_weights(files, folder, slices)
            difference = _compare(model, heads, loading.load(str(folder)))
            zeroed = f"set to zero: weights of {amount(len(table), 'head')}"
            note = f"{zeroed}; outputs differ from the gated model's by {difference:.1g}"
            notes = [*ablation.run.get("notes", ()), note]
            ablation = replace(ablation, run={**ablation.run, "notes": notes})
            (folder / RECORD_FILE).write_text(ablation.to_json() + "\n", "utf-8")
            folder.replace(out)
    # Of a full disk safetensors raises its own error.
    except (OSError, SafetensorError) as error:
        raise AttnscopeError(
            f"cannot write {out}: {one_line(str(error))}",
            "choose another folder with --save, or make room",
        ) from None
    return ablation


def _write_weights(files: Sequence[Path], folder: Path, slices: Sequence[WeightSlice]) -> None:
    """Write the weights into a folder with slices set to zero, in files of the same names."""
    missing = {head_slice.name for head_slice in slices}
    for path in files:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # it is no mapping
        tensors = dict(stored)
        for head_slice in slices:
            # A weight is found by its values, so look among the unchanged ones.
            key = _key_of(head_slice, stored)
            if key is not None:
                missing.discard(head_slice.name)
                tensors[key] = _zero(tensors[key], head_slice)
        save_file(tensors, folder / path.name, metadata=metadata)
        # As readable as before: safetensors writes files that only the owner can read.
        shutil.copymode(path, folder / path.name)
    if missing:
        raise AttnscopeError(
            f"the files do not hold {min(missing)} as the model has it: transformers converts it as it loads",
            _SAVE_FIRST,
        )


def _key_of(head_slice: WeightSlice, tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name in a file of the weight that a slice is of; None = it is not there.

    The name in the model may have another prefix: encoder.layer.0… or bert.encoder.layer.0….
    """
    name = f".{head_slice.name}"
    weight = head_slice.weight
    for key, stored in tensors.items():
        ends_alike = f".{key}".endswith(name) or name.endswith(f".{key}")
        # Another weight may have the same ending: the values decide.
        if ends_alike and stored.shape == weight.shape and torch.equal(stored.to(weight), weight):
            return key
    return None


def _zero(weight: Tensor, head_slice: WeightSlice) -> Tensor:
    """Return a weight with a slice of it set to zero."""
    return weight.index_fill(head_slice.axis, torch.tensor(head_slice.indices), 0)


def _compare(model: Model, heads: Mapping[LayerKey, Sequence[int]], written: Model) -> float:
    """Return the largest relative difference of the written model from the gated one; refuse more than rounding."""
    # Run both models on one example: the one with the outputs of heads ("z") set to zero where attention is computed,
    # the other without their weights. A decoder beside an encoder reads a target.
    target = None
    if "cross" in model.info.kinds and model.text_generator is not None:
        target = torch.from_numpy(model.text_generator.encode_target(EXAMPLE).ids)[None]
    batch = replace(example_batch(model), target_ids=target)
    patches = {}
    for layer_key, indices in heads.items():
        patches[layer_key] = [Patch("z", tuple(indices), torch.zeros(()))]
    with torch.no_grad():
        gated = model.outputs(batch, HeadPatcher(patches))
        reloaded = written.outputs(batch, attend)
    # Compare hidden states and logits, relative to their largest number.
    differences = []
    for first, second in ((gated.hidden, reloaded.hidden), (gated.logits, reloaded.logits)):
        if first is not None and second is not None:
            largest = first.abs().max().clamp(min=1e-30)
            change = (first - second).abs().max()
            differences.append(float(change / largest))
    # Unlike max, np.max is NaN if any difference is.
    difference = float(np.max(differences))
    epsilon = torch.finfo(gated.hidden.dtype).eps
    require_close(
        "nothing is kept, for what was written differs from the model without these heads",
        difference,
        64 * epsilon * sum(model.info.n_layers) ** 0.5,
        "try --dtype float64, or a model of another architecture",
    )
    return difference
