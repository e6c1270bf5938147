"""Any torch module on inputs that the user makes: its self-attention over the named positions passes the seam."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from inspect import BoundArguments
from typing import Any

import torch
from torch import Tensor, nn

from attnscope.core.attention.seam import AttentionCall, Kind, Probe, attend
from attnscope.errors import AttnscopeError, amount
from attnscope.models.devices import device_of, name_dtype
from attnscope.models.hf.adapters import unwrap
from attnscope.models.hf.parts import silence
from attnscope.models.info import ModelInfo
from attnscope.models.inputs.caught import CaughtModule, SeenCall
from attnscope.models.inputs.labels import (
    Labels,
    LabelTokenizer,
    change_tensors,
    n_named,
    name_positions,
    read_samples,
    repeat_sample,
    tensors_of,
)
from attnscope.models.model import Batch, MixedLengthsError, Model
from attnscope.models.turns import share_lock

Shape = tuple[int, int, int]
"""Sequences, queries and keys of an attention."""


class InputsModel(Model):
    """A torch module on its inputs, as a Model. Each sequence of the inputs is a text, by its number.

    No blocks are known: hidden states belong to whole passes, and studies look at single sequences.

    Attributes:
        paths: Layer -> the name of the module that computes its attention.
    """

    tokenizer: LabelTokenizer
    untrained = unembedding = Model._refuse

    def __init__(
        self, caught: CaughtModule, info: ModelInfo, samples: Sequence[BoundArguments], labels: Labels | None
    ) -> None:
        self.network = caught.module
        self.info = info
        self.paths = {layer: path for path, (kind, layer) in caught.plan if kind == info.kinds[0]}
        self._refusal = (
            f"{info.name} came with its inputs, and no more is known of it than its attention",
            "ask what attention and ablation answer: heatmap, heads, compare, ablate, page",
        )
        self._caught = caught
        self._samples = samples
        self._sizes = [self._measure(sample) for sample in samples]
        self.tokenizer = LabelTokenizer(name_positions(labels, self._sizes))
        self.texts = self.tokenizer.texts
        self._axes: dict[int, int] = {}

    def run(self, batch: Batch, probe: Probe) -> Tensor:
        """Run the inputs that a batch's sequences are part of; the probe is given these sequences alone.

        Returns what the module puts out, (batch, position, d): by position where it has one row for each, else all that
        it puts out for the sequence, at every position.
        """
        # One forward pass runs one sample: all sequences must come from it.
        places = [self._find(ids) for ids in batch.rows()]
        number = places[0][0]
        if any(sample != number for sample, _ in places):
            raise MixedLengthsError("sequences of several passes cannot run at once", "give the inputs as one batch")

        # The batch may hold a sequence several times: the whole inputs run as often, one copy behind the other.
        n_sequences, n = self._sizes[number]
        copies = [0] * n_sequences
        chosen = []
        for _, sequence in places:
            chosen.append(sequence + n_sequences * copies[sequence])
            copies[sequence] += 1
        n_rows = n_sequences * max(copies)
        is_whole = chosen == list(range(n_rows))
        rows = torch.tensor(chosen, device=self.info.device)

        def at_seam(call: AttentionCall) -> Tensor:
            if call.kind != self.info.kinds[0]:
                return attend(call)
            return probe(call) if is_whole else attend(call).index_copy(0, rows, probe(_take(call, rows)))

        # Repeat the inputs where the batch asks for it. Where as many sequences as positions run, their axis decides.
        sample = self._samples[number]
        batch_is_second = False
        if max(copies) > 1 or n_rows == n:
            axis = self._axis(number)
            sample = repeat_sample(sample, max(copies), axis) if max(copies) > 1 else sample
            batch_is_second = axis == 1
        return _by_position(self._caught.run(sample, at_seam), n_rows, n, batch_is_second=batch_is_second)[rows]

    def modules(self) -> list[nn.Module]:
        """Return the module, in a list."""
        return [self.network]

    def _find(self, ids: tuple[int, ...]) -> tuple[int, int]:
        if ids not in self.tokenizer.places:
            raise AttnscopeError(
                f"a text of {amount(len(ids), 'position')} is no sequence of the inputs",
                "sequences cannot be cut or changed: no --chunk",
            )
        return self.tokenizer.places[ids]

    def _measure(self, sample: BoundArguments) -> tuple[int, int]:
        """Return how many sequences a sample has, and of how many positions."""
        calls = self._calls(sample)
        # All layers that are shown must attend among the same positions.
        shapes = {_shape_of(call) for call in calls}
        n_sequences, n_queries, n_keys = _shape_of(calls[0])
        if len(shapes) != 1 or n_queries != n_keys or not n_sequences * n_queries:
            raise AttnscopeError(
                f"on one of the inputs layers have attention of {_list(sorted(shapes))}",
                "give inputs on which all of them attend to the same positions",
            )
        return n_sequences, n_queries

    def _calls(self, sample: BoundArguments) -> list[AttentionCall]:
        """Return the attentions that are shown, on a sample."""
        calls: list[AttentionCall] = []

        def observe(call: AttentionCall) -> Tensor:
            if call.kind == self.info.kinds[0]:
                calls.append(call)
            return attend(call)

        with torch.no_grad():
            self._caught.run(sample, observe)
        return calls

    def _axis(self, number: int) -> int:
        """Return along which axis inputs are a batch, 0 or 1. Tried once: each copy must have the same queries."""
        if number not in self._axes:
            sample = self._samples[number]
            # Try each axis: two copies must give the queries twice, (2 * sequence, head, query, d_head).
            once = [call.query for call in self._calls(sample)]
            both = [torch.cat([query, query]) for query in once]
            for axis in range(min(2, tensors_of(sample)[0].ndim)):
                twice: list[Tensor] = []
                with contextlib.suppress(Exception):  # a module may fail in any way on a wrong axis
                    twice = [call.query for call in self._calls(repeat_sample(sample, 2, axis))]
                if len(twice) == len(both) and all(map(_is_close, twice, both)):
                    self._axes[number] = axis
                    break
            else:
                raise AttnscopeError(
                    f"{self.info.name} does not compute the same of inputs that come twice in a batch",
                    "heads cannot be taken out of it: let forward take a batch, on its first or second axis",
                )
        return self._axes[number]


def _is_close(query: Tensor, expected: Tensor) -> bool:
    if query.shape != expected.shape:
        return False
    return torch.allclose(query.float(), expected.float(), rtol=1e-2, atol=1e-3 * float(expected.abs().max()))


def _shape_of(call: AttentionCall) -> Shape:
    return len(call.query), call.query.shape[2], call.key.shape[2]


def _take(call: AttentionCall, rows: Tensor) -> AttentionCall:
    """Return an attention of some sequences alone."""

    def cut(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or tensor.ndim < 4 or len(tensor) == 1 else tensor[rows]

    parts = {name: getattr(call, name)[rows] for name in ("query", "key", "value")}
    return replace(call, **parts, mask=cut(call.mask), bias=cut(call.bias))


def _by_position(output: Tensor, n_sequences: int, n: int, *, batch_is_second: bool) -> Tensor:
    """Return a module's output as (sequence, position, d), by the rule of `InputsModel.run`."""
    # (position, sequence, d), as torch puts it by default; then any shape with a row per position.
    if output.ndim == 3 and output.shape[:2] == (n, n_sequences) and (n != n_sequences or batch_is_second):
        return output.transpose(0, 1)
    if output.ndim > 1 and output.shape[:-1].numel() == n_sequences * n:
        return output.reshape(n_sequences, n, -1)
    # No row per position: the whole output of a sequence stands at each of its positions.
    flat = output.flatten(1) if output.ndim and n_sequences % len(output) == 0 else output.reshape(1, -1)
    return flat.repeat_interleave(n_sequences // len(flat), 0)[:, None].expand(-1, n, -1)


def load_inputs(model: Any, inputs: Any, labels: Labels | None = None, *, check: bool = True) -> InputsModel:
    """Make a Model of a torch module and the inputs of its forward; `models.load` explains the arguments.

    Its layers are the attentions that it computes over the positions that are named, in the order of computation.
    """
    model = getattr(unwrap(model)[0], "_orig_mod", unwrap(model)[0])  # of torch.compile
    if not isinstance(model, nn.Module):
        raise AttnscopeError(f"inputs go with a torch module, not with {type(model).__name__}", "load the module first")
    name = type(model).__name__
    # Read inputs and labels, and move the inputs to the model's device.
    samples = read_samples(model, inputs)
    n_labels = n_named(labels)
    compiled = [path for path, part in model.named_modules() if _is_compiled(part)]
    if compiled:
        raise AttnscopeError(f"torch.compile hides the attention of {_named(compiled)}", "load it before torch.compile")
    share_lock([model])
    device = device_of(model)
    samples = [change_tensors(sample, lambda tensor: tensor.to(device)) for sample in samples]

    # Which of its attentions are shown.
    caught = CaughtModule(model, name)
    with torch.no_grad(), silence():
        calls, softmaxes = caught.rehearse(samples[0], check=check)
    if not calls:
        raise _no_attention(name, softmaxes)
    shape = _choose([call.shape for call in calls], n_labels, name)
    chosen = [call for call in calls if call.shape == shape]
    others = [call for call in calls if call.shape != shape]
    kind: Kind = "decoder" if all(call.hides_later for call in chosen) else "encoder"
    # Attentions that are not shown are planned as "cross", so that their calls can be told apart.
    numbers = {True: iter(range(len(chosen))), False: iter(range(len(others)))}
    for call in calls:
        is_shown = call.shape == shape
        caught.plan.append((call.path, (kind if is_shown else "cross", next(numbers[is_shown]))))

    # What is known of it.
    with torch.no_grad():
        output = caught.run(samples[0], attend)
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
        notes=tuple(_notes(chosen, others, softmaxes)),
    )
    return InputsModel(caught, info, samples, labels)


def _is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile made it or its forward."""
    by_method = getattr(module, "_compiled_call_impl", None) is not None
    return by_method or hasattr(module, "_orig_mod") or hasattr(module.forward, "_torchdynamo_orig_callable")


def _no_attention(name: str, softmaxes: Sequence[str]) -> AttnscopeError:
    message = f"{name} calls neither scaled_dot_product_attention nor nn.MultiheadAttention"
    if not softmaxes:
        return AttnscopeError(message, "its attention, if it has any, is no softmax, which attnscope cannot show")
    return AttnscopeError(
        f"{message}, and computes softmax by hand in {_named(softmaxes)}",
        "matmul and softmax by hand cannot be seen: call torch.nn.functional.scaled_dot_product_attention there",
    )


def _choose(shapes: Sequence[Shape], n_labels: int | None, name: str) -> Shape:
    """Return which attention is shown: self-attention over the named positions, else the one that most layers have."""
    square = [shape for shape in shapes if shape[1] == shape[2] and n_labels in (None, shape[1])]
    if square:
        return max(dict.fromkeys(square), key=square.count)
    message = f"{name} has attention of {_list(sorted(set(shapes)))}"
    if n_labels is None:
        raise AttnscopeError(f"{message}, and none of a sequence to itself", "only self-attention can be shown")
    raise AttnscopeError(f"labels name {amount(n_labels, 'position')}, and {message}", "give one label per position")


def _notes(chosen: Sequence[SeenCall], others: Sequence[SeenCall], softmaxes: Sequence[str]) -> list[str]:
    notes = [f"Layers are {_named([call.path for call in chosen])}, in the order of computation."]
    if softmaxes:
        notes.append(f"It also computes softmax by hand in {_named(softmaxes)}: attention there is not shown.")
    if all(call.n_heads[0] == 1 for call in chosen):
        notes.append("Each sequence has one head. Heads that the module folds into the batch look like more sequences.")
    if others:
        shapes = sorted({call.shape for call in others})
        notes.append(f"{amount(len(others), 'attention')} beside these, of {_list(shapes)}, not shown.")
    return notes


def _list(shapes: Sequence[Shape]) -> str:
    return " and ".join(f"{queries} queries on {keys} keys" for queries, keys in dict.fromkeys(s[1:] for s in shapes))


def _named(paths: Sequence[str]) -> str:
    """Name modules, the first and the last where they are many."""
    distinct = [path or "the module itself" for path in dict.fromkeys(paths)]
    return ", ".join(distinct) if len(distinct) < 4 else f"{distinct[0]}, {distinct[1]} … {distinct[-1]}"
