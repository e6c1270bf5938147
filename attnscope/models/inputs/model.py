"""Any torch module on inputs that the user makes: its self-attention over the named positions passes the seam."""

from collections.abc import Sequence
from dataclasses import replace
from inspect import BoundArguments
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from attnscope.core.attention.seam import AttentionCall, Kind, Probe, attend
from attnscope.errors import AttnscopeError, amount
from attnscope.models.devices import device_of, name_dtype
from attnscope.models.hf.adapters import unwrap
from attnscope.models.hf.parts import silence
from attnscope.models.info import ModelInfo
from attnscope.models.inputs.caught import CaughtModule, SeenCall
from attnscope.models.inputs.labels import Labels, LabelTokenizer, bind_inputs, n_named, name_positions
from attnscope.models.model import Batch, Model
from attnscope.models.turns import share_lock

Shape = tuple[int, int, int]
"""Sequences, queries and keys of an attention."""


class InputsModel(Model):
    """A torch module on its inputs, as a Model. Each sequence of the inputs is a text, by its number.

    Attributes:
        paths: Layer -> the name of the module that computes its attention.
    """

    tokenizer: LabelTokenizer
    outputs = rerun = untrained = unembedding = Model._refuse

    def __init__(
        self, caught: CaughtModule, info: ModelInfo, sample: BoundArguments, rows: list[tuple[str, ...]]
    ) -> None:
        self.network = caught.module
        self.info = info
        self.tokenizer = LabelTokenizer(rows)
        self.texts = self.tokenizer.texts
        self.paths = {layer: path for path, (kind, layer) in caught.plan if kind == info.kinds[0]}
        self._refusal = (
            f"{info.name} came with its inputs, and no more is known of it than its attention",
            "ask what attention answers: heatmap, heads, compare, page",
        )
        self._caught = caught
        self._sample = sample

    def run(self, batch: Batch, probe: Probe) -> Tensor:
        """Run all of the inputs; the probe is given the batch's sequences alone. Returns what the module puts out."""
        known = self.tokenizer.sequences
        sequences = [known.get(ids, -1) for ids in batch.rows()]
        if -1 in sequences or len(set(sequences)) < len(sequences):
            raise AttnscopeError(
                "a text is no sequence of the inputs, or comes twice at once",
                "sequences cannot be cut, changed or repeated: no --chunk",
            )
        is_whole = sequences == list(range(len(known)))
        rows = torch.tensor(sequences, device=self.info.device)

        def at_seam(call: AttentionCall) -> Tensor:
            if call.kind != self.info.kinds[0]:
                return attend(call)
            return probe(call) if is_whole else attend(call).index_copy(0, rows, probe(_take(call, rows)))

        return self._caught.run(self._sample, at_seam)

    def modules(self) -> list[nn.Module]:
        """Return the module, in a list."""
        return [self.network]


def _take(call: AttentionCall, rows: Tensor) -> AttentionCall:
    """Return an attention of some sequences alone."""

    def cut(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or tensor.ndim < 4 or len(tensor) == 1 else tensor[rows]

    parts = {name: getattr(call, name)[rows] for name in ("query", "key", "value")}
    return replace(call, **parts, mask=cut(call.mask), bias=cut(call.bias))


def load_inputs(model: Any, inputs: Any, labels: Labels | None = None, *, check: bool = True) -> InputsModel:
    """Make a Model of a torch module and the inputs of its forward; `models.load` explains the arguments.

    Its layers are the attentions that it computes over the positions that are named, in the order of computation.
    """
    model = getattr(unwrap(model)[0], "_orig_mod", unwrap(model)[0])  # of torch.compile
    if not isinstance(model, nn.Module):
        raise AttnscopeError(f"inputs go with a torch module, not with {type(model).__name__}", "load the module first")
    name = type(model).__name__
    # Read inputs and labels, and move the inputs to the model's device.
    sample = bind_inputs(model, inputs)
    n_labels = n_named(labels)
    if any(_is_compiled(part) for part in model.modules()):
        raise AttnscopeError(f"torch.compile hides attention of {name}", "load it before torch.compile")
    share_lock([model])
    device = device_of(model)
    moved = tree_map(lambda value: value.to(device) if isinstance(value, Tensor) else value, dict(sample.arguments))
    sample = BoundArguments(sample.signature, moved)

    # Which of its attentions are shown.
    caught = CaughtModule(model, name)
    with torch.no_grad(), silence():
        calls = caught.rehearse(sample, check=check)
    if not calls:
        raise AttnscopeError(
            f"{name} calls neither scaled_dot_product_attention nor nn.MultiheadAttention",
            "a softmax by hand cannot be seen: call torch.nn.functional.scaled_dot_product_attention there",
        )
    shape = _choose([call.shape for call in calls], n_labels, name)
    chosen = [call for call in calls if call.shape == shape]
    others = [call for call in calls if call.shape != shape]
    kind: Kind = "decoder" if all(call.hides_later for call in chosen) else "encoder"
    # Attentions that are not shown are planned as "cross", so that their calls can be told apart.
    for call in calls:
        is_shown = call.shape == shape
        number = (chosen if is_shown else others).index(call)
        caught.plan.append((call.path, (kind if is_shown else "cross", number)))

    # What is known of it.
    with torch.no_grad():
        output = caught.run(sample, attend)
    first = next(model.parameters(), torch.zeros(()))
    info = ModelInfo(
        name=name,
        source="memory",
        architecture=name,
        engine="torch",
        kinds=(kind,),
        n_layers=(len(chosen),),
        n_heads=(max(call.n_heads[0] for call in chosen),),
        n_kv_heads=(max(call.n_heads[1] for call in chosen),),
        d_model=output.shape[-1],
        n_parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=name_dtype(first.dtype),
        device=str(device),
        checked=check,
        notes=tuple(_notes(chosen, others)),
    )
    return InputsModel(caught, info, sample, name_positions(labels, shape[0], shape[1]))


def _is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile made it or its forward."""
    by_method = getattr(module, "_compiled_call_impl", None) is not None
    return by_method or hasattr(module, "_orig_mod") or hasattr(module.forward, "_torchdynamo_orig_callable")


def _choose(shapes: Sequence[Shape], n_labels: int | None, name: str) -> Shape:
    """Return which attention is shown: self-attention over the named positions, else the one that most layers have."""
    square = [shape for shape in shapes if shape[1] == shape[2] and n_labels in (None, shape[1]) and min(shape) > 0]
    if square:
        return max(dict.fromkeys(square), key=square.count)
    message = f"{name} has attention of {_list(sorted(set(shapes)))}"
    if n_labels is None:
        raise AttnscopeError(f"{message}, and none of a sequence to itself", "only self-attention can be shown")
    raise AttnscopeError(f"labels name {amount(n_labels, 'position')}, and {message}", "give one label per position")


def _notes(chosen: Sequence[SeenCall], others: Sequence[SeenCall]) -> list[str]:
    paths = [call.path or "the module itself" for call in chosen]
    paths = paths if len(paths) < 4 else [*paths[:2], "…", paths[-1]]
    notes = [f"Layers are {', '.join(paths)}, in the order of computation."]
    if all(call.n_heads[0] == 1 for call in chosen):
        notes.append("Each sequence has one head. Heads that the module folds into the batch look like more sequences.")
    if others:
        shapes = sorted({call.shape for call in others})
        notes.append(f"{amount(len(others), 'attention')} beside these, of {_list(shapes)}, not shown.")
    return notes


def _list(shapes: Sequence[Shape]) -> str:
    return " and ".join(f"{queries} queries on {keys} keys" for queries, keys in dict.fromkeys(s[1:] for s in shapes))
