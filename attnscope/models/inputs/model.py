"""Make a Model of any torch module and the user's inputs for it.

`CaughtModule` intercepts the module's attention. The *seam* is the one function that computes every attention. A
*probe* is a hook there: it gets an `AttentionCall` (the queries, keys, values and masks of one layer), and returns the
outputs of the heads.

A user may *label* the positions that attend to each other, such as the patches of a series. A *sequence* is one entry
of the batch in the inputs. For the rest of the package, each sequence is a "text" whose tokens are its positions.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import BoundArguments
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from attnscope.core.attention.seam import AttentionCall, Kind, Probe, attend
from attnscope.errors import AttnscopeError, amount
from attnscope.models.devices import device_of, name_dtype
from attnscope.models.hf.parts import mute_transformers, unwrap_peft
from attnscope.models.info import ModelInfo
from attnscope.models.inputs.caught import CaughtModule, TracedCall
from attnscope.models.locks import share_lock
from attnscope.models.model import Batch, Model, Tokenizer
from attnscope.results.tokens import Tokens
from attnscope.text import build_tokens

MAX_POSITIONS = 2**20
"""The most positions that labels may name. Attention over 2**20 positions cannot be computed anyway."""

Labels = Sequence[Any]
"""The user's names of positions, such as ["a", "b"], or range(0, 96, 8) for times.

A name in brackets, such as "[CLS]", marks a special token. The tuple (4, 6) stands for the 24 cells of a grid of 4 rows
and 6 columns, named "0,0", "0,1" and so on. It may be all of the labels, or one label among others, as in
["[CLS]", (4, 6)]. A list of lists has one list of names for each sequence.
"""

Names = tuple[str, ...]
"""The names of the positions of one sequence, with each grid written out."""


class LabelTokenizer(Tokenizer):
    """A tokenizer whose texts are the numbers of the sequences, "0", "1" and so on. Its tokens are their positions.

    Attributes:
        texts: The numbers of the sequences.
        sequence_by_ids: Token ids of a sequence -> the number of the sequence.
    """

    name = "none: labels name the positions"

    def __init__(self, names_of_sequences: Sequence[Names]) -> None:
        self.sequence_by_ids: dict[tuple[int, ...], int] = {}
        self.texts = tuple(map(str, range(len(names_of_sequences))))
        self._tokens: list[Tokens] = []
        distinct_names = dict.fromkeys(chain.from_iterable(names_of_sequences))
        ids_by_name = {name: token_id for token_id, name in enumerate(distinct_names)}
        next_id = len(ids_by_name)
        for sequence, names in enumerate(names_of_sequences):
            ids = [ids_by_name[name] for name in names]
            # The ids must identify the sequence. If an earlier sequence has the same names, change the first id.
            if tuple(ids) in self.sequence_by_ids:
                ids[0] = next_id
                next_id += 1
            self.sequence_by_ids[tuple(ids)] = sequence
            # The shown text is all names, joined by blanks. A span is the (start, end) of a name in that text.
            spans = []
            start = 0
            for name in names:
                spans.append((start, start + len(name)))
                start += len(name) + 1
            special = [name.startswith("[") and name.endswith("]") for name in names]
            tokens = build_tokens(
                " ".join(names), ids=ids, pieces=names, offsets=spans, special=special, style="plain"
            )
            self._tokens.append(tokens)

    def encode(self, text: str, pair: str | None = None) -> Tokens:
        """Return the positions of the sequence whose number `text` is, such as "0"."""
        if pair is not None or text not in self.texts:
            raise AttnscopeError(
                "only the inputs that the model came with can be studied, and this is none of them",
                f"give the number of a sequence, from 0 to {len(self.texts) - 1}",
            )
        return self._tokens[int(text)]


class InputsModel(Model):
    """A torch module with inputs, as a Model. Its texts are the numbers of the inputs' sequences, such as "0".

    Args:
        interceptor: Runs the module, and gives its attentions to a probe.
        info: The facts of the model.
        bound_inputs: The inputs, bound to the arguments of the module's forward.
        names_of_sequences: The names of the positions of each sequence.
    """

    tokenizer: LabelTokenizer
    # These methods raise AttnscopeError: of the module, nothing is known but its attention on these inputs
    outputs = rerun = untrained = unembedding = Model._refuse

    def __init__(
        self,
        interceptor: CaughtModule,
        info: ModelInfo,
        bound_inputs: BoundArguments,
        names_of_sequences: Sequence[Names],
    ) -> None:
        self.info = info
        self.tokenizer = LabelTokenizer(names_of_sequences)
        self.texts = self.tokenizer.texts
        self._refusal = (
            f"{info.name} came with its inputs, and no more is known of it than its attention",
            "ask what attention answers: heatmap, heads, compare, page",
        )
        self._interceptor = interceptor
        self._bound_inputs = bound_inputs

    def run(self, batch: Batch, probe: Probe) -> Tensor:
        """Run the module on all of its inputs, and return its output. The probe gets only sequences of the batch."""
        # All sequences have the same length, so ids have no padding. -1 = the ids belong to no sequence.
        sequence_by_ids = self.tokenizer.sequence_by_ids
        sequences = [sequence_by_ids.get(tuple(ids), -1) for ids in batch.ids.tolist()]
        if -1 in sequences or len(set(sequences)) < len(sequences):
            raise AttnscopeError(
                "a text is no sequence of the inputs, or comes twice at once",
                "sequences cannot be cut, changed or repeated: no --chunk",
            )
        # If the batch is all sequences in order, the probe gets the calls unchanged.
        if sequences == list(range(len(sequence_by_ids))):
            return self._interceptor.run(self._bound_inputs, probe)
        rows = torch.tensor(sequences, device=self.info.device)

        def probe_rows(call: AttentionCall) -> Tensor:
            # Compute the output of all sequences, (sequence, head, query, d_value), and replace those of the batch.
            return attend(call).index_copy(0, rows, probe(_select_sequences(call, rows)))

        return self._interceptor.run(self._bound_inputs, probe_rows)

    def modules(self) -> list[nn.Module]:
        """Return the module, in a list."""
        return [self._interceptor.module]


def _select_sequences(call: AttentionCall, rows: Tensor) -> AttentionCall:
    """Return a call with only some sequences, whose numbers are `rows`."""
    selected = {}
    for name in ("query", "key", "value", "mask", "bias"):
        tensor = getattr(call, name)
        # All sequences share a tensor that has no batch axis, or one of size 1.
        if tensor is not None and tensor.ndim == 4 and len(tensor) > 1:
            selected[name] = tensor[rows]
    return replace(call, **selected)


def load_inputs(
    model: Any, inputs: Any, labels: Labels | None = None, *, check: bool = True
) -> InputsModel:
    """Make a Model of a torch module and the inputs of its forward; `models.load` explains the arguments.

    The layers of the Model are the self-attentions that `_choose_layers` picks, in the order of computation.
    """
    model, _ = unwrap_peft(model)
    model = getattr(model, "_orig_mod", model)  # torch.compile keeps the module under this name
    if not isinstance(model, nn.Module):
        raise AttnscopeError(
            f"inputs go with a torch module, not with {type(model).__name__}", "load the module first"
        )
    name = type(model).__name__
    # Read inputs and labels, and move the inputs to the model's device.
    bound_inputs = _bind_inputs(model, inputs)
    label_rows = _read_labels(labels)
    if any(map(_is_compiled, model.modules())):
        raise AttnscopeError(f"torch.compile hides attention of {name}", "load it before torch.compile")
    share_lock([model])
    device = device_of(model)
    bound_inputs.arguments = tree_map_only(
        Tensor, lambda tensor: tensor.to(device), bound_inputs.arguments
    )

    # Run the module once, without messages of transformers, to record its attentions, and choose which ones are shown.
    interceptor = CaughtModule(model, name)
    with torch.no_grad(), mute_transformers():
        calls = interceptor.trace(bound_inputs, check=check)
    if not calls:
        raise AttnscopeError(
            f"{name} calls neither scaled_dot_product_attention nor nn.MultiheadAttention",
            "a softmax by hand cannot be seen: call torch.nn.functional.scaled_dot_product_attention there",
        )
    n_labels = len(label_rows[0]) if label_rows else None
    shown_calls = _choose_layers(calls, n_labels, name)
    kind: Kind = "decoder" if all(call.is_causal for call in shown_calls) else "encoder"
    # Plan all attentions of a run: the probe gets the calls with a layer key. Attentions with None are not shown.
    for call in calls:
        layer_key = (kind, shown_calls.index(call)) if call in shown_calls else None
        interceptor.plan.append((call.path, layer_key))

    # Run the module as `InputsModel` will, to learn the width of its output.
    with torch.no_grad():
        output = interceptor.run(bound_inputs, attend)
    # A module without parameters counts as float32.
    first_parameter = next(model.parameters(), torch.zeros(()))
    info = ModelInfo(
        name=name,
        source="memory",
        architecture=name,
        engine="torch",
        kinds=(kind,),
        n_layers=(len(shown_calls),),
        n_heads=(max(call.n_heads for call in shown_calls),),
        n_kv_heads=(max(call.n_kv_heads for call in shown_calls),),
        d_model=output.shape[-1],
        n_parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=name_dtype(first_parameter.dtype),
        device=str(device),
        checked=check,
        notes=tuple(_describe_layers(shown_calls, [call for call in calls if call not in shown_calls])),
    )
    n_sequences, n_positions, _ = shown_calls[0].shape
    names_of_sequences = _name_positions(label_rows, n_sequences, n_positions)
    return InputsModel(interceptor, info, bound_inputs, names_of_sequences)


def _is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile has compiled a module, wrapped it, or compiled its forward."""
    return (
        getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module, "_orig_mod")
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


def _choose_layers(calls: Sequence[TracedCall], n_labels: int | None, name: str) -> list[TracedCall]:
    """Return the attentions that are shown: the self-attentions of the most frequent shape.

    Args:
        calls: The attentions of the module.
        n_labels: The number of positions that the user's labels name; None = without labels, any number fits.
        name: The name of the module, for messages.
    """
    shapes = []
    for call in calls:
        n_sequences, n_queries, n_keys = call.shape
        if n_queries == n_keys > 0 and n_sequences > 0 and n_labels in (None, n_keys):
            shapes.append(call.shape)
    if shapes:
        # If two shapes are equally frequent, `max` returns the first.
        most_frequent_shape = max(shapes, key=shapes.count)
        return [call for call in calls if call.shape == most_frequent_shape]
    message = f"{name} has attention of {_list_sizes(calls)}"
    if n_labels is None:
        raise AttnscopeError(
            f"{message}, and none of a sequence to itself", "only self-attention can be shown"
        )
    raise AttnscopeError(
        f"labels name {amount(n_labels, 'position')}, and {message}", "give one label per position"
    )


def _describe_layers(shown_calls: Sequence[TracedCall], others: Sequence[TracedCall]) -> list[str]:
    """Return notes for the user: which modules the layers are, and which attentions are not shown."""
    paths = [call.path or "the module itself" for call in shown_calls]
    # Of more than three, name the first two and the last.
    if len(paths) > 3:
        paths[2:-1] = ["…"]
    notes = [f"Layers are {', '.join(paths)}, in the order of computation."]
    if all(call.n_heads == 1 for call in shown_calls):
        notes.append(
            "Each sequence has one head. Heads that the module folds into the batch look like more sequences."
        )
    if others:
        notes.append(
            f"{amount(len(others), 'attention')} beside these, of {_list_sizes(others)}, not shown."
        )
    return notes


def _list_sizes(calls: Sequence[TracedCall]) -> str:
    """Return how many queries and keys attentions have, such as "3 queries on 3 keys and 3 queries on 5 keys"."""
    sizes = sorted({call.shape[1:] for call in calls})
    return " and ".join(f"{n_queries} queries on {n_keys} keys" for n_queries, n_keys in sizes)


# Inputs and labels ------------------------------------------------------------------------------------------------


def _bind_inputs(module: nn.Module, inputs: Any) -> BoundArguments:
    """Bind inputs (a tensor, a tuple, or a mapping by name) to the arguments of a module's forward.

    Raises:
        AttnscopeError: The inputs do not fit the forward, hold no dense tensor, or hold NaN or infinity.
    """
    if not isinstance(inputs, Mapping | Tensor | tuple):
        raise AttnscopeError(
            f"inputs is of type {type(inputs).__name__}",
            "give a tensor, a tuple of what forward receives, or a mapping by name",
        )
    # Bind the inputs as a call would. Python's error message names the arguments that do not fit.
    signature = inspect.signature(module.forward)
    is_by_name = isinstance(inputs, Mapping)
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    try:
        bound_inputs = signature.bind(**inputs) if is_by_name else signature.bind(*inputs)
    except TypeError as error:
        raise AttnscopeError(
            f"{type(module).__name__}.forward does not take inputs: {error}",
            f"it takes {', '.join(signature.parameters)}",
        ) from error
    tensors = [leaf for leaf in tree_leaves(dict(bound_inputs.arguments)) if isinstance(leaf, Tensor)]
    if not tensors:
        raise AttnscopeError("inputs holds no tensor", "give what the model's forward receives")
    for tensor in tensors:
        if tensor.is_nested or tensor.is_meta or tensor.layout is not torch.strided:
            raise AttnscopeError("inputs holds a nested, sparse or meta tensor", "give dense ones")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise AttnscopeError(
                "inputs holds NaN or infinity", "fill the gaps first: attention would be NaN too"
            )
    return bound_inputs


def _read_labels(labels: Labels | None) -> list[Names]:
    """Return the names of positions: one row per sequence, one row for all sequences, or no row without labels."""
    if labels is None:
        return []
    # Only a list of lists has labels for each sequence: a tuple in a list is a grid.
    is_nested = isinstance(labels, list) and labels and isinstance(labels[0], list)
    return list(map(_read_names, labels if is_nested else [labels]))


def _name_positions(rows: list[Names], n_sequences: int, n_positions: int) -> list[Names]:
    """Return a row of names for each sequence. `rows` come from `_read_labels`."""
    # Without labels, positions are numbered.
    if not rows:
        rows = [tuple(map(str, range(n_positions)))]
    if len(rows) == 1:
        rows = rows * n_sequences
    if len(rows) != n_sequences:
        raise AttnscopeError(
            f"labels holds {amount(len(rows), 'list')}, and the inputs are {amount(n_sequences, 'sequence')}",
            "give one list of names for all, or one per sequence",
        )
    for names in rows:
        if len(names) != n_positions:
            raise AttnscopeError(
                f"labels name {amount(len(names), 'position')}, and attention has {n_positions}",
                f"give {n_positions} names; a grid such as (4, 6) stands for 24",
            )
    return rows


def _read_names(labels: Labels) -> Names:
    """Return the names of the positions of a sequence, with each grid written out.

    Raises:
        AttnscopeError: The labels are of a wrong type, or name more than MAX_POSITIONS positions.
    """
    if isinstance(labels, str) or not isinstance(labels, Sequence):
        raise AttnscopeError(
            f"labels is of type {type(labels).__name__}",
            "give a list of names, or a grid such as (4, 6)",
        )
    names: list[str] = []
    if _is_grid(labels):
        labels = [labels]
    for label in labels:
        # A grid names each of its cells; any other label names one position.
        grid_shape = label if _is_grid(label) else (1,)
        if len(names) + prod(grid_shape) > MAX_POSITIONS:
            raise AttnscopeError(
                f"labels name more than {MAX_POSITIONS:,} positions", "give one label per position"
            )
        if _is_grid(label):
            for cell in np.ndindex(*grid_shape):
                names.append(",".join(map(str, cell)))
        elif isinstance(label, str | int | float) and str(label).strip():
            names.append(" ".join(str(label).split()))
        else:
            raise AttnscopeError(
                f"labels holds {label!r}, which names no position", "give names, numbers or grids"
            )
    return tuple(names)


def _is_grid(label: Any) -> bool:
    """Return whether a label is the shape of a grid, such as (4, 6): a tuple of positive integers."""
    return (
        isinstance(label, tuple)
        and bool(label)
        and all(isinstance(size, int) and size > 0 for size in label)
    )
