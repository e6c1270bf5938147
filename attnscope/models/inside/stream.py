"""Find the weights by which heads read and write the residual stream: W_Q, W_K, W_V, W_O, and the norms around.

Nothing is guessed from names, and there is no table of architectures. The projections are the linear maps that read the
stream, or a norm of it. What reaches the seam is a function of what they read; its derivative is W_Q, W_K or W_V of
each head, as the model scales and orders its rows, and what is left over is the bias. Where the two do not give what
the model computes of another token, something else lies between, and the weights are not known. First tokens are looked
at, which rotary positions leave as they are. A norm is what divides by a length: its gain and bias are measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import AttentionCall, attend
from attnscope.errors import AttnscopeError
from attnscope.models.info import require_seam
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


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm as it acts on a vector x: gain * (x - mean of x, if it centres) / length + bias."""

    gain: Tensor  # (d_model,); of Gemma 1 + its weight
    bias: Tensor  # (d_model,)
    centres: bool  # whether the mean is taken away first (LayerNorm), or not (RMSNorm)

    def fold(self, rows: Tensor) -> Tensor:
        """Turn rows that read the norm's output, (…, d_model), into rows that read its input, up to its length."""
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
        """Return a role's weights per query head with the norm before them folded in, (n_heads, d_head, d_model)."""
        projection: Projection | None = getattr(self, role)
        if projection is None:
            return None
        rows = projection.weight if self.norm is None else self.norm.fold(projection.weight)
        return rows.repeat_interleave(self.n_heads // len(rows), 0)

    @property
    def writes(self) -> Tensor | None:
        """Return W_O of each head with the norm behind it folded in, (n_heads, d_model, d_value); None if not known."""
        if self.output is None or self.output_norm is None:
            return self.output
        centred = self.output - self.output.mean(1, keepdim=True) if self.output_norm.centres else self.output
        return centred * self.output_norm.gain[:, None].to(self.output)


@dataclass(frozen=True, eq=False)
class Stream:
    """The weights and norms along the residual stream of a model."""

    kind: str
    attentions: tuple[Attention, ...]  # by layer
    embedding_norm: Norm | None  # what stands between embeddings and stream; None = nothing, or it is not known
    final_norm: Norm | None  # what stands between the last layer and the unembedding; None = nothing does
    unembedding: Tensor | None  # W_U, (vocabulary, d_model); None = the model has no head for words
    is_direct: bool  # whether W_U reads the (normed) stream itself, and no further layer lies between
    is_post_norm: bool  # whether norms lie on the stream itself (BERT), so that they are between any two heads
    notes: tuple[str, ...]  # what is folded, and what is not known


def stream_of(model: Model) -> Stream:
    """Find the weights of each head of a text model, by running it on a few tokens.

    Raises:
        AttnscopeError: The model has several kinds of attention, its attention does not pass the seam, or no layer
            shows both W_V and W_O.
    """
    info = model.info
    if len(info.kinds) != 1:
        raise AttnscopeError(
            f"{info.name} has {', '.join(info.kinds)} attention: `weights` reads one stack of layers",
            "choose an encoder or a decoder",
        )
    require_seam(info, "which weights its heads have")
    # Read each attention; a note that several layers share is said once, with their names.
    look = _Look(model)
    attentions = look.attentions()
    notes: list[str] = []
    for note in dict.fromkeys(note for attention in attentions for note in attention.notes):
        where = [f"L{attention.layer}" for attention in attentions if note in attention.notes]
        notes.append(f"{', '.join(where) if len(where) < len(attentions) else 'all layers'}: {note}")
    if all(attention.value is None or attention.output is None for attention in attentions):
        raise AttnscopeError(
            f"where {info.name} ({info.architecture}) keeps W_V and W_O of its heads is not known",
            attentions[0].notes[0] if attentions and attentions[0].notes else "",
        )

    # The ends of the stream: what stands before the first layer, and between the last one and the words.
    final = look.module_that_gave(look.hidden, n_calls=len(look.calls))
    is_inner = final in modules_of(look.blocks.values())
    final_norm = look.norm_of(final)
    head = model.unembedding()
    unembedding = None if head is None else _weight(head)
    if unembedding is not None and unembedding.shape[1] != info.d_model:
        notes.append(f"the unembedding has width {unembedding.shape[1]}, the stream {info.d_model}: it is not used")
        unembedding = None
    lacks_norm = any(attention.norm is None for attention in attentions)
    entered = look.entered_at(0)
    return Stream(
        kind=info.kinds[0],
        attentions=attentions,
        embedding_norm=None if entered is None else look.norm_of(look.module_that_gave(entered, n_calls=0)),
        final_norm=None if is_inner else final_norm,
        unembedding=unembedding,
        is_direct=look.unembedded is not None and _same(look.unembedded, look.hidden),
        is_post_norm=lacks_norm and is_inner and final_norm is not None,
        notes=tuple(notes),
    )


@dataclass(frozen=True, eq=False)
class _Passed:
    """A module of the stream's width in the run: what it was given, what it gave, and how many attentions before."""

    module: nn.Module
    given: Tensor
    gave: Tensor
    n_calls: int


class _Look:
    """A run of the model on two texts, and what it shows.

    Attributes:
        blocks: The model's blocks, by place.
        calls: Layer -> what reached its attention.
        hidden: The last hidden states.
        unembedded: What the unembedding was given; None without one.
    """

    def __init__(self, model: Model) -> None:
        self.blocks = dict(model.blocks())
        self.calls: dict[int, AttentionCall] = {}
        self.unembedded: Tensor | None = None
        self._model = model
        self._kind: Any = model.info.kinds[0]
        self._linear = set(linear_maps(model.modules()))
        self._outputs = OutputWatch()
        self._entered: dict[nn.Module, Tensor] = {}
        self._passed: list[_Passed] = []
        self._norms: dict[nn.Module, Norm | None] = {}
        # What linear maps were given since the last attention, and of each layer what its projections read.
        self._since: list[tuple[nn.Module, Tensor]] = []
        self._sources: dict[int, Tensor] = {}
        self._slopes: dict[tuple[int, Role], Tensor] = {}
        # Two texts of different first tokens, the second of which checks what is found by the first: (2, token)
        ids = example_batch(model).ids
        limit = model.info.max_tokens
        if limit is None or ids.shape[1] * 2 <= limit:
            ids = ids.repeat(1, 2)
        ids = ids.repeat(2, 1)
        ids[1, 0] = int(ids[0, 0] == 0)
        self._run(Batch(ids))

    # The run ---------------------------------------------------------------------------------------------------------

    def _run(self, batch: Batch) -> None:
        # Every linear map starts a path, and the probe derives along those of its layer.
        head = self._model.unembedding()

        def unembed(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            self.unembedded = inputs[0].detach()

        with (
            torch.enable_grad(),
            hooks(self._linear, self._enter_map, before=True),
            hooks(filter(is_leaf, modules_of(self._model.modules())), self._pass),
            hooks(dict.fromkeys(self.blocks.values()), self._enter_block, before=True),
            hooks([] if head is None else [head], unembed),
        ):
            self.hidden = self._model.outputs(batch, self._observe).hidden.detach()

    def _enter_map(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Make what a linear map is given the start of a path that can be derived."""
        if not inputs or not isinstance(inputs[0], Tensor) or not inputs[0].is_floating_point():
            return None
        start = inputs[0].detach().requires_grad_()
        self._since.append((module, start))
        return (start, *inputs[1:]), named

    def _pass(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if module in self._linear:
            self._outputs.look(module, inputs, output)
        elif inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor):
            given = inputs[0].detach()
            keeps_shape = given.shape == output.shape and given.shape[-1] == self._model.info.d_model
            if keeps_shape and given.is_floating_point():
                self._passed.append(_Passed(module, given, output.detach(), len(self.calls)))

    def _enter_block(self, block: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden = hidden_input(inputs, named)
        if hidden is not None:
            self._entered[block] = hidden.detach()

    def _observe(self, call: AttentionCall) -> Tensor:
        """Derive queries, keys and values by what the projections before them read."""
        self.calls[call.layer] = call
        entered = self.entered_at(call.layer)
        # The projections are the maps that read one and the same: the stream, or a norm of it that was made last.
        for _, start in reversed(self._since):
            if entered is not None and (_same(start, entered) or self._norm_between(entered, start) is not None):
                starts = [other for _, other in self._since if _same(other, start)]
                self._sources[call.layer] = start.detach()
                for role in ROLES:
                    slopes = _derive(getattr(call, role)[0, :, 0], starts)
                    if slopes is not None:
                        self._slopes[call.layer, role] = slopes
                break
        self._since = []
        with torch.no_grad():
            output = attend(call)
        self._outputs.expect((call.kind, call.layer), output)
        return output

    # What they show --------------------------------------------------------------------------------------------------

    def entered_at(self, layer: int) -> Tensor | None:
        """Return the hidden states that a layer's block was given; None where it is not known."""
        block = self.blocks.get((self._kind, layer))
        return None if block is None else self._entered.get(block)

    def module_that_gave(self, output: Tensor, n_calls: int) -> nn.Module | None:
        """Return the last module that gave a tensor after so many attentions; None if none did."""
        modules = [p.module for p in self._passed if p.n_calls == n_calls and _same(p.gave, output)]
        return modules[-1] if modules else None

    def norm_of(self, module: nn.Module | None) -> Norm | None:
        """Return a module as a norm; None if it is none."""
        if module is None:
            return None
        if module not in self._norms:
            with torch.no_grad():
                self._norms[module] = measure_norm(module)
        return self._norms[module]

    def _norm_between(self, before: Tensor, after: Tensor) -> nn.Module | None:
        """Return the module that made one tensor of another; None if none did."""
        modules = [p.module for p in self._passed if _same(p.gave, after) and _same(p.given, before)]
        return modules[-1] if modules else None

    @torch.no_grad()
    def attentions(self) -> tuple[Attention, ...]:
        """Return the weights of each layer's attention, as far as they are known."""
        adapted = adapted_maps(self._model.modules())
        return tuple(self._attention(layer, adapted) for layer in sorted(self.calls))

    def _attention(self, layer: int, adapted: set[nn.Module]) -> Attention:
        call = self.calls[layer]
        place: Place = (self._kind, layer)
        notes: list[str] = []

        # What reads the stream.
        entered = self.entered_at(layer)
        source = self._sources.get(layer)
        norm = None
        is_known = False
        if entered is not None and source is not None:
            is_direct = _same(source, entered)
            norm = None if is_direct else self.norm_of(self._norm_between(entered, source))
            is_known = is_direct or norm is not None
        projections: dict[Role, Projection | None] = dict.fromkeys(ROLES)
        if is_known:
            projections = {role: self._projection(call, role) for role in ROLES}
            lacking = [f"W_{role[0].upper()}" for role in ROLES if projections[role] is None]
            if lacking:
                notes.append(
                    f"between {' and '.join(lacking)} and the seam lies what no matrix says (a norm of queries and "
                    "keys, a low-rank cache, an adapter)"
                )
        else:
            notes.append("what its projections read is neither the stream nor a LayerNorm or RMSNorm of it")

        # What writes to it.
        output = output_norm = None
        module = self._outputs.modules.get(place)
        weight = None if module is None or module in adapted else _weight(module)
        if weight is None:
            notes.append("no linear map of known weights is fed just what the heads put out: W_O is not known")
        else:
            output = weight.reshape(len(weight), call.n_heads, -1).transpose(0, 1)
            n_calls = list(self.calls).index(layer) + 1  # attentions that had been computed right after this layer's
            written = self._outputs.results[place]
            behind = [p.module for p in self._passed if p.n_calls == n_calls and _same(p.given, written)]
            output_norm = self.norm_of(behind[0]) if behind else None
        return Attention(
            layer,
            call.n_heads,
            call.scale,
            norm,
            **projections,
            output=output,
            output_norm=output_norm,
            notes=tuple(notes),
        )

    def _projection(self, call: AttentionCall, role: Role) -> Projection | None:
        """Return a projection, if the slopes and biases of one text's first token give the other's."""
        weight = self._slopes.get((call.layer, role))
        if weight is None:
            return None
        # (text, d_model) at the first tokens, and (text, head, d_head) that reached the seam.
        source = self._sources[call.layer].reshape(len(call.query), -1, weight.shape[-1])[:, 0].to(weight)
        rows = getattr(call, role)[:, :, 0].detach().to(weight)
        bias = rows[0] - weight @ source[0]
        expected = weight @ source[1] + bias
        # Each product rounds, and so does their sum.
        size = weight.abs() @ source.abs().sum(0) + bias.abs()
        allowed = 8 * torch.finfo(call.query.dtype).eps * size.amax()
        return Projection(weight, bias) if bool(((rows[1] - expected).abs() <= allowed).all()) else None


def _derive(rows: Tensor, starts: Sequence[Tensor]) -> Tensor | None:
    """Return the derivative of rows (head, d_head) by what maps read at the first token, (head, d_head, d_model).

    None where they do not depend on it.
    """
    if not rows.requires_grad:
        return None
    # One derivative for each number of the rows, all of them at once.
    each = torch.eye(rows.numel(), dtype=rows.dtype, device=rows.device).view(-1, *rows.shape)
    gradients = torch.autograd.grad(
        rows, list(starts), each, retain_graph=True, allow_unused=True, is_grads_batched=True
    )
    # (number, batch, token, d_model) -> (number, d_model): only the first token is looked at.
    slopes = [slope.flatten(1, -2)[:, 0] for slope in gradients if slope is not None]
    if not slopes:
        return None
    return _widen(torch.stack(slopes).sum(0)).reshape(*rows.shape, -1)


def _same(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors hold the same numbers, whatever their shape."""
    return first is second or (first.numel() == second.numel() and torch.equal(first.reshape(-1), second.reshape(-1)))


def _weight(module: nn.Module) -> Tensor | None:
    """Return a linear map's weight, (out, in), float32 or better; None where it is quantised or elsewhere."""
    weight = weight_of(module)
    return None if weight is None else _widen(weight.detach())


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def measure_norm(module: nn.Module) -> Norm | None:
    """Measure a module as a norm on four vectors; None if it is neither LayerNorm nor RMSNorm."""
    weight = next(iter(module.parameters()), None)
    if weight is None or weight.ndim != 1:
        return None
    # Four test vectors, (4, n): z and -z tell gain and bias, two random ones whether it centres.
    n = len(weight)
    # Without a mean, of length 1, and nowhere small: divided by, it keeps what is left of the norm's precision.
    z = torch.ones(n, dtype=torch.float64)
    z[1::2] = -1
    if n % 2:
        z[-1] = -2 if n > 2 else 1
        z[1:2] = 1
    z = z / z.pow(2).mean().sqrt()
    others = 3 + torch.randn(2, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = 64 * torch.cat([torch.stack([z, -z]), others])
    try:
        gave = module(given.to(weight.device, weight.dtype)[None])[0].double().cpu()
    except (RuntimeError, TypeError, ValueError, IndexError):  # it takes no vectors
        return None

    # z and -z have one length: half their difference is the gain, half their sum the bias.
    gain = (gave[0] - gave[1]) / (2 * z)
    bias = (gave[0] + gave[1]) / 2
    allowed = 64 * torch.finfo(weight.dtype).eps * (float(gave[0].abs().max()) or 1.0)
    # Whether it centres shows on vectors that have a mean.
    errors = {
        centres: float((gave[2:] - Norm(gain, bias, centres).apply(others)).abs().max()) for centres in (True, False)
    }
    centres = errors[True] <= errors[False]
    if not errors[centres] <= allowed:
        return None
    wide = torch.promote_types(weight.dtype, torch.float32)
    return Norm(gain.to(weight.device, wide), bias.to(weight.device, wide), centres)
