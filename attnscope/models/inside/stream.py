"""What heads read from the residual stream and write to it: W_Q, W_K, W_V and W_O of each head, and the norms around.

Nothing is guessed from names, and there is no table of architectures. Which row of which linear map becomes which
column of a head's queries, keys or values is asked of the model itself: it runs on a few tokens while its projections
give out numbers that stand for their rows, and what reaches the seam says which row it came from, and by what factor it
was scaled. So fused, interleaved and grouped projections need no knowledge of their order. The first token of a text is
looked at, which rotary positions leave as it is. A norm is what divides by a length: its gain and bias are measured.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import AttentionCall, attend
from attnscope.errors import AttnscopeError
from attnscope.models.inside.projections import (
    ROLES,
    OutputWatch,
    Role,
    adapted_maps,
    hidden_input,
    hooks,
    is_leaf,
    linear_maps,
    modules_of,
    weight_of,
)
from attnscope.models.model import Batch, Model, example_batch

_BASE = 16  # digits that half precision still tells apart after it was scaled
_MOST_DIGITS = 6


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm as it acts on a vector x: gain * (x - mean of x, if it centres) / length + bias."""

    gain: Tensor  # (d_model,); of Gemma 1 + its weight
    bias: Tensor  # (d_model,)
    centres: bool  # whether the mean is taken away first (LayerNorm), or not (RMSNorm)

    def fold(self, rows: Tensor) -> Tensor:
        """Rows that read the norm's output, (…, d_model), as rows that read its input, up to its length."""
        folded = rows * self.gain.to(rows)
        return folded - folded.mean(-1, keepdim=True) if self.centres else folded

    def apply(self, x: Tensor) -> Tensor:
        """Return the norm of vectors, (…, d_model), as of an epsilon of 0."""
        x = x - x.mean(-1, keepdim=True) if self.centres else x
        length = x.pow(2).mean(-1, keepdim=True).sqrt().clamp(min=1e-30)
        return x / length * self.gain.to(x) + self.bias.to(x)


@dataclass(frozen=True, eq=False)
class Projection:
    """One of W_Q, W_K and W_V, by head."""

    weight: Tensor  # (n_heads or n_kv_heads, d_head, d_model); reads what the norm gives
    bias: Tensor  # (n_heads or n_kv_heads, d_head); 0 without one


@dataclass(frozen=True, eq=False)
class Attention:
    """The weights of one attention; those of a role are None where they are not known."""

    layer: int
    n_heads: int  # query heads
    scale: float  # factor on the dot products
    norm: Norm | None  # what stands between the stream and the projections; None = nothing does
    query: Projection | None  # W_Q; likewise key, value: W_K and W_V, of key/value heads
    key: Projection | None
    value: Projection | None
    output: Tensor | None  # W_O, (n_heads, d_model, d_value); None = not known
    output_norm: Norm | None  # what stands between W_O and the stream (Gemma 2); None = nothing does
    notes: tuple[str, ...] = ()  # what is not known, and why

    def reads(self, role: Role) -> Tensor | None:
        """W_Q, W_K or W_V of each query head with the norm before it folded in, (n_heads, d_head, d_model)."""
        projection: Projection | None = getattr(self, role)
        if projection is None:
            return None
        rows = projection.weight if self.norm is None else self.norm.fold(projection.weight)
        return rows.repeat_interleave(self.n_heads // len(rows), 0)

    @property
    def writes(self) -> Tensor | None:
        """W_O of each head with the norm behind it folded in, (n_heads, d_model, d_value)."""
        if self.output is None or self.output_norm is None:
            return self.output
        centred = self.output - self.output.mean(1, keepdim=True) if self.output_norm.centres else self.output
        return centred * self.output_norm.gain[:, None].to(self.output)


@dataclass(frozen=True, eq=False)
class Stream:
    """What lies along the residual stream of a model."""

    kind: str
    attentions: tuple[Attention, ...]  # by layer
    embedding_norm: Norm | None  # what stands between embeddings and stream; None = nothing, or it is not known
    final_norm: Norm | None  # what stands between the last layer and the unembedding; None = nothing does
    unembedding: Tensor | None  # W_U, (vocabulary, d_model); None = the model has no head for words
    is_direct: bool  # whether W_U reads the (normed) stream itself, and no further layer lies between
    is_post_norm: bool  # whether norms lie on the stream itself (BERT), so that they are between any two heads
    notes: tuple[str, ...]  # what is folded, and what is not known


def stream_of(model: Model) -> Stream:
    """Find out where a model of text keeps the weights of its heads, by running it on a few tokens."""
    info = model.info
    if len(info.kinds) != 1:
        raise AttnscopeError(
            f"{info.name} has {', '.join(info.kinds)} attention: `weights` reads one stack of layers",
            "choose an encoder or a decoder",
        )
    if info.path != "seam" or info.engine == "numpy":
        raise AttnscopeError(
            f"{info.name} ({info.architecture}, engine {info.engine}) does not show which weights its heads have",
            "leave out --engine" if info.engine == "numpy" else "choose a model whose attention passes the seam",
        )
    with torch.no_grad():
        return _find(model)


class _Look:
    """One run of the model as it is: what its parts were given and what they gave, until they are understood."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.linear = linear_maps(model.modules())
        self.adapted = adapted_maps(model.modules())
        self.blocks = dict(model.blocks())
        self.outputs = OutputWatch()
        self.entered: dict[nn.Module, Tensor] = {}  # block -> hidden states that it was given
        self.calls: dict[int, AttentionCall] = {}
        self.inputs: dict[int, Tensor] = {}  # layer -> what the maps before its attention were given
        self.maps: dict[int, list[nn.Module]] = {}
        self.leaves: list[tuple[nn.Module, Tensor, Tensor, int]] = []  # module, given, gave, attentions before it
        self._since: list[tuple[nn.Module, Tensor]] = []
        self._linear = set(self.linear)

    def __call__(self, call: AttentionCall) -> Tensor:
        output = attend(call)
        block = self.blocks.get((call.kind, call.layer))
        entered = None if block is None else self.entered.get(block)
        self.calls[call.layer] = call
        read = [x for _, x in self._since]
        # The projections are the maps that read one and the same: the stream, or a norm of it that was made last.
        source = next((x for x in reversed(read) if entered is not None and self._reads_stream(x, entered)), None)
        if source is not None:
            self.inputs[call.layer] = source
            self.maps[call.layer] = [module for module, x in self._since if _same(x, source)]
        self._since = []
        self.outputs.expect((call.kind, call.layer), output)
        return output

    def _reads_stream(self, x: Tensor, entered: Tensor) -> bool:
        return _same(x, entered) or self.norm_between(entered, x) is not None

    def norm_between(self, before: Tensor, after: Tensor) -> nn.Module | None:
        """Return the module that made one tensor of another; None if none did."""
        return next((m for m, x, y, _ in reversed(self.leaves) if _same(y, after) and _same(x, before)), None)

    def run(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return the last hidden states, and what the unembedding was given, if there is one."""
        width = self.model.info.d_model
        head = self.model.unembedding()
        read: list[Tensor] = []

        def leaf(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if not (inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor)):
                return
            if module in self._linear:
                self._since.append((module, inputs[0]))
                self.outputs.look(module, inputs, output)
            elif inputs[0].is_floating_point() and inputs[0].shape == output.shape and output.shape[-1] == width:
                self.leaves.append((module, inputs[0], output, len(self.calls)))

        def enter(block: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            if (hidden := hidden_input(inputs, named)) is not None:
                self.entered[block] = hidden

        with (
            hooks(filter(is_leaf, modules_of(self.model.modules())), leaf),
            hooks(dict.fromkeys(self.blocks.values()), enter, before=True),
            hooks([] if head is None else [head], lambda module, inputs, output: read.append(inputs[0])),
        ):
            outputs = self.model.outputs(batch, self)
        return outputs.hidden, read[-1] if read else None


def _same(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors hold the same numbers, whatever their shape."""
    return first is second or (first.numel() == second.numel() and torch.equal(first.reshape(-1), second.reshape(-1)))


def _find(model: Model) -> Stream:
    info, kind = model.info, model.info.kinds[0]
    batch = example_batch(model)
    if info.max_tokens is None or batch.ids.shape[1] * 2 <= info.max_tokens:
        batch = Batch(batch.ids.repeat(1, 2))
    look = _Look(model)
    hidden, read = look.run(batch)
    notes: list[str] = []
    rows = _rows_by_code(model, batch, look)
    norms: dict[nn.Module | None, Norm | None] = {None: None}
    attentions = tuple(_attention(look, layer, rows, norms) for layer in sorted(look.calls))
    for note in dict.fromkeys(note for attention in attentions for note in attention.notes):
        where = [f"L{attention.layer}" for attention in attentions if note in attention.notes]
        notes.append(f"{', '.join(where) if len(where) < len(attentions) else 'all layers'}: {note}")
    if all(attention.value is None or attention.output is None for attention in attentions):
        raise AttnscopeError(
            f"where {info.name} ({info.architecture}) keeps W_V and W_O of its heads is not known",
            attentions[0].notes[0] if attentions and attentions[0].notes else "",
        )
    n_calls = len(look.calls)
    final = next((m for m, _, y, before in reversed(look.leaves) if _same(y, hidden) and before == n_calls), None)
    first = look.entered.get(look.blocks.get((kind, 0)))  # type: ignore[arg-type]
    embedding = next((m for m, _, y, n in look.leaves if first is not None and n == 0 and _same(y, first)), None)
    is_inner = final in modules_of(look.blocks.values())
    lacks_norm = any(attention.norm is None for attention in attentions)
    head = model.unembedding()
    unembedding = None if head is None else _weight(head)
    if unembedding is not None and unembedding.shape[1] != info.d_model:
        notes.append(f"the unembedding has width {unembedding.shape[1]}, the stream {info.d_model}: it is not used")
        unembedding = None
    return Stream(
        kind=kind,
        attentions=attentions,
        embedding_norm=_norm_of(embedding, norms),
        final_norm=None if is_inner else _norm_of(final, norms),
        unembedding=unembedding,
        is_direct=read is not None and _same(read, hidden),
        is_post_norm=lacks_norm and is_inner and _norm_of(final, norms) is not None,
        notes=tuple(notes),
    )


def _attention(
    look: _Look,
    layer: int,
    rows: Mapping[tuple[int, Role], tuple[Tensor, Tensor]],
    norms: dict[nn.Module | None, Norm | None],
) -> Attention:
    """Return what is known of one layer's attention."""
    call = look.calls[layer]
    kind = look.model.info.kinds[0]
    place: Place = (kind, layer)  # type: ignore[assignment]
    notes: list[str] = []
    block = look.blocks.get(place)
    entered = None if block is None else look.entered.get(block)
    source = look.inputs.get(layer)
    norm = None
    is_known = entered is not None and source is not None
    if entered is not None and source is not None and not _same(source, entered):
        norm = _norm_of(look.norm_between(entered, source), norms)
        is_known = norm is not None
    projections: dict[Role, Projection | None] = dict.fromkeys(ROLES)
    if is_known:
        projections = {role: _projection(look.maps[layer], rows.get((layer, role))) for role in ROLES}
        lacking = [f"W_{role[0].upper()}" for role in ROLES if projections[role] is None]
        if lacking:
            notes.append(
                f"between {' and '.join(lacking)} and the seam lies what no matrix says (a norm of queries and keys, "
                "a low-rank cache, weights that are quantised or adapted)"
            )
    else:
        notes.append("what its projections read is neither the stream nor a LayerNorm or RMSNorm of it")
    output = behind = None
    module = look.outputs.modules.get(place)
    weight = None if module is None or module in look.adapted else _weight(module)
    if module is None or weight is None:
        notes.append("no linear map of known weights is fed just what the heads put out: W_O is not known")
    else:
        width = call.value.shape[-1]
        output = weight.reshape(weight.shape[0], call.n_heads, width).transpose(0, 1)
        written = look.outputs.results[place]
        n_calls = list(look.calls).index(layer) + 1  # attentions that had been computed right after this layer's
        behind = _norm_of(next((m for m, x, _, n in look.leaves if n == n_calls and _same(x, written)), None), norms)
    return Attention(
        layer, call.n_heads, call.scale, norm, **projections, output=output, output_norm=behind, notes=tuple(notes)
    )


def _projection(maps: list[nn.Module], code: tuple[Tensor, Tensor] | None) -> Projection | None:
    """Return the rows of the maps that a role of the heads is made of, scaled as the model scales them."""
    weights = [weight for module in maps if (weight := _weight(module)) is not None]
    if code is None or len(weights) < len(maps):
        return None
    number, factor = code  # (head, d_head)
    whole = torch.cat(weights)
    biases = [getattr(module, "bias", None) for module in maps]
    bias = torch.cat(
        [w.new_zeros(len(w)) if b is None else b.detach().to(w) for w, b in zip(weights, biases, strict=True)]
    )
    factor = factor.to(whole)
    return Projection(whole[number] * factor[..., None], bias[number] * factor)


def _weight(module: nn.Module) -> Tensor | None:
    """Return a linear map's weight, (out, in), float32 or better; None where it is quantised or elsewhere."""
    weight = weight_of(module)
    return None if weight is None else weight.detach().to(torch.promote_types(weight.dtype, torch.float32))


# Which row is whose ------------------------------------------------------------------------------------------------


def _rows_by_code(model: Model, batch: Batch, look: _Look) -> dict[tuple[int, Role], tuple[Tensor, Tensor]]:
    """For each layer and role: which row each column of each head is, and by what factor; both (head, d_head).

    The rows of a layer's maps are numbered through. In a first run all of them give 1, which shows the factors; then,
    run by run, each gives a digit of its number; and at last random numbers, which must come out as was found.
    """
    first: dict[nn.Module, Tensor] = {}
    for maps in look.maps.values():
        start = 0
        for module in maps:
            weight = _weight(module)
            n = 0 if weight is None else len(weight)
            first.setdefault(module, torch.arange(start, start + n))
            start += n
    n_rows = max((int(numbers[-1]) + 1 for numbers in first.values() if len(numbers)), default=0)
    n_digits = next(n for n in itertools.count(1) if _BASE**n >= n_rows)
    if n_digits > _MOST_DIGITS:
        return {}
    seen = _run_coded(model, batch, first, lambda numbers: torch.ones(numbers.shape))
    rows = {key: (torch.zeros(factor.shape, dtype=torch.long), factor) for key, factor in seen.items()}
    unclear: set[tuple[int, Role]] = {key for key, factor in seen.items() if not bool((factor != 0).all())}
    for digit in range(n_digits):
        power = _BASE**digit
        coded = _run_coded(model, batch, first, partial(_digit, power))
        for key, value in coded.items():
            number, factor = rows[key]
            read = value / torch.where(factor == 0, 1.0, factor)
            if not bool(((read - read.round()).abs() < 0.25).all() & (read > -0.5).all() & (read < _BASE - 0.5).all()):
                unclear.add(key)
            rows[key] = number + read.round().nan_to_num(0).clamp(0, _BASE - 1).long() * power, factor
    chance = torch.randn(max(1, n_rows), generator=torch.Generator().manual_seed(0))
    tolerance = 16 * torch.finfo(getattr(torch, model.info.dtype)).eps
    for key, value in _run_coded(model, batch, first, lambda numbers: chance[numbers]).items():
        number, factor = rows[key]
        expected = chance[number.clamp(max=n_rows - 1)] * factor
        if not bool(((value - expected).abs() <= tolerance * (1 + expected.abs())).all()):
            unclear.add(key)
    return {key: value for key, value in rows.items() if key not in unclear}


def _digit(power: int, numbers: Tensor) -> Tensor:
    return (numbers // power % _BASE).float()


def _run_coded(
    model: Model, batch: Batch, first: Mapping[nn.Module, Tensor], code: Callable[[Tensor], Tensor]
) -> dict[tuple[int, Role], Tensor]:
    """Run the model with projections that give out codes of their rows; what reaches the seam at the first token."""
    seen: dict[tuple[int, Role], Tensor] = {}

    def put(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        numbers = first[module]
        return code(numbers).to(output).expand_as(output).clone() if len(numbers) else output

    def observe(call: AttentionCall) -> Tensor:
        for role in ROLES:
            seen[call.layer, role] = getattr(call, role)[0, :, 0].float().cpu()
        return attend(call)

    with hooks(first, put):
        model.run(batch, observe)
    return seen


# Norms ------------------------------------------------------------------------------------------------------------


def _norm_of(module: nn.Module | None, norms: dict[nn.Module | None, Norm | None]) -> Norm | None:
    if module not in norms:
        norms[module] = None if module is None else measure_norm(module)
    return norms[module]


def measure_norm(module: nn.Module) -> Norm | None:
    """Return a module as a norm, by what it makes of vectors; None if it is neither LayerNorm nor RMSNorm."""
    weight = next(iter(module.parameters()), None)
    if weight is None or weight.ndim != 1:
        return None
    dtype = weight.dtype
    n = len(weight)
    # Without a mean, of length 1, and nowhere small: divided by, it keeps what is left of the norm's precision.
    z = torch.ones(n, dtype=torch.float64)
    z[1::2] = -1
    if n % 2:
        z[-1] = -2 if n > 2 else 1
        z[1:2] = 1
    z = z / z.pow(2).mean().sqrt()
    others = 3 + torch.randn(2, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def norm(x: Tensor) -> Tensor:
        output: Tensor = module((64 * x).to(weight.device, dtype)[None, None])
        return output[0, 0].double().cpu()

    up = norm(z)
    down = norm(-z)
    gain = (up - down) / (2 * z)
    bias = (up + down) / 2
    size = float(up.abs().max()) or 1.0
    tries = [
        (max(float((norm(x) - candidate.apply(x)).abs().max()) for x in others), candidate)
        for candidate in (Norm(gain, bias, True), Norm(gain, bias, False))
    ]
    error, best = min(tries, key=lambda candidate: candidate[0])
    if not error <= 64 * torch.finfo(dtype).eps * size:
        return None
    wide = torch.promote_types(dtype, torch.float32)
    return Norm(best.gain.to(weight.device, wide), best.bias.to(weight.device, wide), best.centres)
