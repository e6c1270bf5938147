"""Any torch module on inputs that the user makes: its self-attention over the named positions passes the seam."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnscope.core.attention.probes import Place, Weights
from attnscope.core.attention.seam import AttentionCall, Kind, Probe, attend
from attnscope.errors import AttnscopeError, amount, first_line, is_out_of_memory
from attnscope.models.devices import device_of, name_dtype
from attnscope.models.hf.adapters import unwrap
from attnscope.models.hf.assembling import assemble_on
from attnscope.models.info import ModelInfo
from attnscope.models.inputs.caught import CaughtModule, first_output, same_draws
from attnscope.models.inputs.labels import Labels, LabelTokenizer, Sample, n_named, name_positions, read_samples
from attnscope.models.inside.projections import find_output_projections
from attnscope.models.model import Batch, MixedLengthsError, Model
from attnscope.models.turns import share_lock

Run = Callable[[Sample, Probe], Tensor]
"""Runs a sample with a probe at the seam; returns the first tensor that the model puts out."""

Shape = tuple[int, int, int]
"""Sequences, queries and keys of an attention."""


class InputsModel(Model):
    """A torch module on its inputs; see models.model.Model. Each sequence of the inputs is a text, by its number.

    No blocks are known: hidden states belong to whole passes, and studies look at single sequences.

    Attributes:
        paths: Layer -> the name of the module that computes its attention; empty for models of transformers.
    """

    tokenizer: LabelTokenizer
    untrained = unembedding = Model._refuse

    def __init__(
        self,
        network: nn.Module,
        info: ModelInfo,
        run: Run,
        samples: Sequence[Sample],
        labels: Labels | None,
        places: Sequence[Place],
        paths: Mapping[int, str],
    ) -> None:
        self.network = network
        self.info = info
        self.paths = paths
        self._refusal = (
            f"{info.name} came with its inputs, and no more is known of it than its attention",
            "ask what attention and ablation answer: heatmap, heads, compare, ablate, page",
        )
        self._run = run
        self._samples = samples
        self._shown = frozenset(places)
        self._sizes = [self._measure(sample) for sample in samples]
        self.tokenizer = LabelTokenizer(name_positions(labels, self._sizes))
        self.texts = self.tokenizer.texts
        self._axes: dict[int, int | None] = {}

    def run(self, batch: Batch, probe: Probe) -> Tensor:
        """Run the inputs that a batch's sequences are part of; the probe is given these sequences alone.

        Returns what the module puts out, (batch, position, d): by position where it has one row for each, else all that
        it puts out for the sequence, at every position.
        """
        places = [self._find(ids) for ids in batch.rows()]
        number = places[0][0]
        if any(sample != number for sample, _ in places):
            raise MixedLengthsError("sequences of several passes cannot run at once", "give the inputs as one batch")
        n_sequences, n = self._sizes[number]
        sequences = [sequence for _, sequence in places]
        chosen = [sequence + n_sequences * sequences[:i].count(sequence) for i, sequence in enumerate(sequences)]
        times = 1 + max(chosen) // n_sequences
        whole = chosen == list(range(times * n_sequences))
        rows = torch.tensor(chosen, device=self.info.device)

        def at_seam(call: AttentionCall) -> Tensor:
            if (call.kind, call.layer) not in self._shown:
                return attend(call)
            return probe(call) if whole else attend(call).index_copy(0, rows, probe(_take(call, rows)))

        sample = self._repeat(number, times)
        is_eager = self.info.path == "eager"
        output = self._run_eager(sample, probe, rows) if is_eager else self._run(sample, at_seam)
        is_second = times * n_sequences == n and self._axis(number) == 1
        return _by_position(output, times * n_sequences, n, batch_is_second=is_second)[rows]

    def _run_eager(self, sample: Sample, probe: Probe, rows: Tensor) -> Tensor:
        weights_probe = Weights()
        output = self._run(sample, weights_probe if isinstance(probe, Weights) else probe)
        for kind, by_layer in weights_probe.maps.items():
            for layer, weights in by_layer.items():
                if (kind, layer) in self._shown and isinstance(probe, Weights):
                    probe.keep(kind, layer, weights[rows.cpu()])
        return output

    def modules(self) -> list[nn.Module]:
        """Return the module."""
        return [self.network]

    def output_projections(self) -> dict[Place, Tensor]:
        """W_O by (kind, layer), each (d_model, n_heads * d_value); those that are known."""
        if self.info.path == "eager":
            return {}
        of_kind: dict[Kind, int] = {place[0]: self.info.n_heads[0] for place in self._shown}
        weights = find_output_projections(self.network, partial(self._run, self._samples[0]), of_kind)
        for place in self._shown:
            module = self.network.get_submodule(self.paths.get(place[1], ""))
            if isinstance(module, nn.MultiheadAttention):  # it multiplies by the weight without calling the map
                weights[place] = module.out_proj.weight.detach()
        return {place: weight for place, weight in weights.items() if place in self._shown}

    def _find(self, ids: tuple[int, ...]) -> tuple[int, int]:
        if ids not in self.tokenizer.places:
            raise AttnscopeError(
                f"a text of {amount(len(ids), 'position')} is no sequence of the inputs",
                "sequences cannot be cut or changed: no --chunk",
            )
        return self.tokenizer.places[ids]

    def _measure(self, sample: Sample) -> tuple[int, int]:
        """Return how many sequences a sample has, and of how many positions."""
        shapes = set(self._shapes(sample).values())
        n_sequences, n_queries, n_keys = next(iter(shapes))
        if not n_sequences * n_queries:
            raise AttnscopeError("one of the inputs has no positions", "leave it out")
        if len(shapes) != 1 or n_queries != n_keys:
            raise AttnscopeError(
                f"on one of the inputs layers have attention of {_list(sorted(shapes))}",
                "give inputs on which all of them attend to the same positions",
            )
        return n_sequences, n_queries

    def _shapes(self, sample: Sample, queries: list[Tensor] | None = None) -> dict[Place, Shape]:
        shapes = _measure_shapes(self._run, sample, is_eager=self.info.path == "eager", queries=queries)
        return {place: shape for place, shape in shapes.items() if place in self._shown}

    def _repeat(self, number: int, times: int) -> Sample:
        sample = self._samples[number]
        if times == 1:
            return sample
        axis = self._axis(number)
        if axis is None:
            raise AttnscopeError(
                f"{self.info.name} does not compute the same of inputs that come twice in a batch",
                "heads cannot be taken out of it: let forward take a batch, on its first or second axis",
            )
        return sample.repeat(times, axis)

    def _axis(self, number: int) -> int | None:
        """Along which axis inputs are a batch: 0 or 1; None = neither. Tried once: each copy has the same queries."""
        if number not in self._axes:
            sample = self._samples[number]
            once: list[Tensor] = []
            self._shapes(sample, once)
            self._axes[number] = None
            for axis in range(min(2, sample.n_axes)):
                twice: list[Tensor] = []
                with contextlib.suppress(Exception):  # a module may fail in any way on a wrong axis
                    self._shapes(sample.repeat(2, axis), twice)
                both = [torch.cat([query, query]) for query in once]
                if [x.shape for x in twice] == [x.shape for x in both] and all(
                    torch.allclose(x.float(), y.float(), rtol=1e-2, atol=1e-3 * float(y.abs().max()))
                    for x, y in zip(twice, both, strict=True)
                ):
                    self._axes[number] = axis
                    break
        return self._axes[number]


def _measure_shapes(
    run: Run, sample: Sample, *, is_eager: bool, queries: list[Tensor] | None = None
) -> dict[Place, Shape]:
    """Return the shape of each attention on a sample; their queries are put into a list if there is one."""
    shapes: dict[Place, Shape] = {}

    def observe(call: AttentionCall) -> Tensor:
        shapes[call.kind, call.layer] = (len(call.query), call.query.shape[2], call.key.shape[2])
        if queries is not None:
            queries.append(call.query)
        return attend(call)

    weights_probe = Weights()
    with torch.no_grad():
        run(sample, weights_probe if is_eager else observe)
    for kind, by_layer in weights_probe.maps.items():
        for layer, weights in by_layer.items():
            n_sequences, _, n_queries, n_keys = weights.shape
            shapes[kind, layer] = (n_sequences, n_queries, n_keys)
    return shapes


def _take(call: AttentionCall, rows: Tensor) -> AttentionCall:
    """Return an attention of some sequences alone."""

    def cut(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or tensor.ndim < 4 or len(tensor) == 1 else tensor[rows]

    parts = {name: getattr(call, name)[rows] for name in ("query", "key", "value")}
    return replace(call, **parts, mask=cut(call.mask), bias=cut(call.bias))


def _by_position(output: Tensor, n_sequences: int, n: int, *, batch_is_second: bool) -> Tensor:
    """Return what a module puts out as (sequence, position, d); see `InputsModel.run`."""
    if output.ndim == 3 and output.shape[:2] == (n, n_sequences) and (n != n_sequences or batch_is_second):
        return output.transpose(0, 1)
    if output.ndim > 1 and output.shape[:-1].numel() == n_sequences * n:
        return output.reshape(n_sequences, n, -1)
    flat = output.flatten(1) if output.ndim and n_sequences % len(output) == 0 else output.reshape(1, -1)
    return flat.repeat_interleave(n_sequences // len(flat), 0)[:, None].expand(-1, n, -1)


def load_inputs(model: Any, inputs: Any, labels: Labels | None = None, *, check: bool = True) -> InputsModel:
    """Make a Model of a torch module and what its forward receives; see `models.load`."""
    model = getattr(unwrap(model)[0], "_orig_mod", unwrap(model)[0])  # of torch.compile
    if not isinstance(model, nn.Module):
        raise AttnscopeError(f"inputs go with a torch module, not with {type(model).__name__}", "load the module first")
    names = {"name": type(model).__name__, "source": "memory"}
    samples = read_samples(model, inputs)
    n_labels = n_named(labels)
    share_lock([model])
    device = device_of(model)
    samples = [sample.map(lambda tensor: tensor.to(device)) for sample in samples]
    refusals = []
    for open_it in (_open_huggingface, _open_module) if isinstance(model, PreTrainedModel) else (_open_module,):
        try:
            return open_it(model, samples, labels, n_labels, **names, check=check)
        except AttnscopeError as error:
            refusals.append(error)
    raise refusals[0]


def _open_huggingface(
    model: Any, samples: Sequence[Sample], labels: Labels | None, n_labels: int | None, *, check: bool, **names: str
) -> InputsModel:
    """Return a model of transformers, by its own seam and held against its own eager attention."""
    with same_draws(model):
        own = assemble_on(model, samples[0].by_name(model), check=check, **names)

    def run(sample: Sample, probe: Probe) -> Tensor:
        with same_draws(model):
            return own.run_inputs(sample.by_name(model), probe)

    shapes = _measure_shapes(run, samples[0], is_eager=own.info.path == "eager")
    shape = _choose(list(shapes.values()), n_labels, name=own.info.name)
    kind: Kind = next(place[0] for place in shapes if shapes[place] == shape)
    places = [place for place, of in shapes.items() if of == shape and place[0] == kind]
    at = own.info.kinds.index(kind)
    info = replace(
        own.info,
        kinds=(kind,),
        n_layers=(own.info.n_layers[at],),
        n_heads=(own.info.n_heads[at],),
        n_kv_heads=(own.info.n_kv_heads[at],),
        max_tokens=None,
        notes=(*own.info.notes, *_notes(shapes, places)),
    )
    return InputsModel(model, info, run, samples, labels, places, {})


def _open_module(
    model: nn.Module,
    samples: Sequence[Sample],
    labels: Labels | None,
    n_labels: int | None,
    *,
    name: str,
    source: str,
    check: bool,
) -> InputsModel:
    """Any module, by the attention functions of torch that it calls."""
    compiled = [path for path, part in model.named_modules() if _is_compiled(part)]
    if compiled:
        raise AttnscopeError(f"torch.compile hides the attention of {_named(compiled)}", "load it before torch.compile")
    caught = CaughtModule(model)
    with _its_own_errors(name), torch.no_grad():
        seen = caught.rehearse(samples[0], check=check)
    if not seen.calls:
        by_hand = f", and computes softmax by hand in {_named(seen.softmaxes)}" if seen.softmaxes else ""
        raise AttnscopeError(
            f"{name} calls neither scaled_dot_product_attention nor nn.MultiheadAttention{by_hand}",
            "matmul and softmax by hand cannot be seen: call torch.nn.functional.scaled_dot_product_attention there"
            if by_hand
            else "its attention, if it has any, is no softmax, which attnscope cannot show",
        )
    shape = _choose([call.shape for call in seen.calls], n_labels, name=name)
    chosen = [call for call in seen.calls if call.shape == shape]
    kind: Kind = "decoder" if all(call.hides_later for call in chosen) else "encoder"
    shapes: dict[Place, Shape] = {}
    numbers = {True: iter(range(len(chosen))), False: iter(range(len(seen.calls)))}
    for call in seen.calls:
        is_shown = call.shape == shape
        place: Place = (kind if is_shown else "cross", next(numbers[is_shown]))
        caught.plan.setdefault(call.path, []).append(place)
        shapes[place] = call.shape
    places = [place for place in shapes if place[0] == kind]
    notes = [f"Layers are {_named([call.path for call in chosen])}, in the order of computation."]
    if seen.softmaxes:
        notes.append(f"It also computes softmax by hand in {_named(seen.softmaxes)}: attention there is not shown.")
    if all(call.n_heads[0] == 1 for call in chosen):
        notes.append("Each sequence has one head. Heads that the module folds into the batch look like more sequences.")
    with torch.no_grad():
        output = first_output(caught.run(samples[0], attend), type(model).__name__)
    first = next(model.parameters(), torch.zeros(()))
    info = ModelInfo(
        name=name,
        source=source,
        architecture=type(model).__name__,
        engine="torch",
        kinds=(kind,),
        n_layers=(len(chosen),),
        n_heads=(max(call.n_heads[0] for call in chosen),),
        n_kv_heads=(max(call.n_heads[1] for call in chosen),),
        d_model=output.shape[-1],
        n_parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=name_dtype(first.dtype),
        device=str(caught.device),
        checked=check,
        notes=(*notes, *_notes(shapes, places)),
    )

    def run(sample: Sample, probe: Probe) -> Tensor:
        with _its_own_errors(name):
            return first_output(caught.run(sample, probe), name)

    return InputsModel(model, info, run, samples, labels, places, {i: call.path for i, call in enumerate(chosen)})


def _is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile made it or its forward."""
    by_method = getattr(module, "_compiled_call_impl", None) is not None
    return by_method or hasattr(module, "_orig_mod") or hasattr(module.forward, "_torchdynamo_orig_callable")


def _choose(shapes: Sequence[Shape], n_labels: int | None, *, name: str) -> Shape:
    """Return which attention is shown.

    Self-attention over as many positions as have labels, else what most layers have.
    """
    square = [shape for shape in shapes if shape[1] == shape[2] and n_labels in (None, shape[1])]
    if not square:
        message = f"{name} has attention of {_list(sorted(set(shapes)))}"
        if n_labels is None:
            raise AttnscopeError(f"{message}, and none of a sequence to itself", "only self-attention can be shown")
        raise AttnscopeError(
            f"labels name {amount(n_labels, 'position')}, and {message}", "give one label per position"
        )
    return max(dict.fromkeys(square), key=square.count)


def _list(shapes: Sequence[Shape]) -> str:
    return " and ".join(f"{queries} queries on {keys} keys" for queries, keys in dict.fromkeys(s[1:] for s in shapes))


def _notes(shapes: Mapping[Place, Shape], places: Sequence[Place]) -> list[str]:
    others = [shape for place, shape in shapes.items() if place not in places]
    if not others:
        return []
    return [f"{amount(len(others), 'attention')} beside these, of {_list(sorted(set(others)))}, not shown."]


def _named(paths: Sequence[str]) -> str:
    """Name of modules, the first and the last where they are many."""
    distinct = [path or "the module itself" for path in dict.fromkeys(paths)]
    return ", ".join(distinct) if len(distinct) < 4 else f"{distinct[0]}, {distinct[1]} … {distinct[-1]}"


@contextlib.contextmanager
def _its_own_errors(name: str) -> Iterator[None]:
    """Within it, whatever a module's own code raises becomes one line, but for an interruption."""
    try:
        yield
    except (AttnscopeError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a module may raise anything
        if is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise AttnscopeError(
            f"{name} does not run on these inputs: {reason}", "give what its forward receives"
        ) from error
