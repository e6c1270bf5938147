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

    def maps(self, *, centres: bool) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the maps of each query head as two factors, with the norms around them folded in.

        Args:
            centres: Whether no head can read the mean of what is written.

        Returns:
            "OV" = W_O W_V, "QK" = W_Q' W_K and "KQ" = W_K' W_Q, those that are known, by their left factor (n_heads,
            d_model, d_head) and their right one (n_heads, d_head, d_model).
        """
        reads: dict[str, Tensor] = {}
        for role in ROLES:
            projection: Projection | None = getattr(self, role)
            if projection is not None:
                rows = projection.weight if self.norm is None else self.norm.fold(projection.weight)
                reads[role] = rows.repeat_interleave(self.n_heads // len(rows), 0)
        maps = {}
        if "query" in reads and "key" in reads:
            maps["QK"] = reads["query"].mT, reads["key"]
            maps["KQ"] = reads["key"].mT, reads["query"]
        if "value" in reads and self.output is not None:
            writes = self.output
            norm = self.output_norm
            if norm is not None:
                centred = writes - writes.mean(1, keepdim=True) if norm.centres else writes
                writes = centred * norm.gain[:, None].to(writes)
            if centres:
                writes = writes - writes.mean(1, keepdim=True)
            maps["OV"] = writes, reads["value"]
        return maps


@dataclass(frozen=True, eq=False)
class Stream:
    """The weights and norms along the residual stream of a model."""

    kind: str
    attentions: tuple[Attention, ...]  # by layer
    # What stands between embeddings and stream; None = nothing, or it is not known.
    embedding_norm: Norm | None
    # What stands between the last layer and the unembedding; None = nothing does.
    final_norm: Norm | None
    unembedding: Tensor | None  # W_U, (vocabulary, d_model); None = the model has no head for words
    is_direct: bool  # whether W_U reads the (normed) stream itself, and no further layer lies between
    is_post_norm: (
        bool  # whether norms lie on the stream itself (BERT), so that they are between any two heads
    )
    notes: tuple[str, ...]  # what is folded, and what is not known

    @property
    def centres(self) -> bool:
        """Return whether every norm takes the mean away, so that no head can read it."""
        norms = [attention.norm for attention in self.attentions]
        if self.unembedding is not None:
            norms.append(self.final_norm)
        return all(norm is not None and norm.centres for norm in norms)


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
    adapted = adapted_maps(model.modules())
    attentions = tuple(look.attention(place, adapted) for place in sorted(look.watch.calls))
    notes: list[str] = []
    layers_with: dict[str, list[str]] = {}
    for attention in attentions:
        for note in attention.notes:
            layers_with.setdefault(note, []).append(f"L{attention.layer}")
    for note, layers in layers_with.items():
        where = "all layers" if len(layers) == len(attentions) else ", ".join(layers)
        notes.append(f"{where}: {note}")
    if all(attention.value is None or attention.output is None for attention in attentions):
        raise AttnscopeError(
            f"where {info.name} ({info.architecture}) keeps W_V and W_O of its heads is not known",
            attentions[0].notes[0] if attentions and attentions[0].notes else "",
        )

    # The ends of the stream: what stands before the first layer, and between the last one and the words.
    final = look.module_that_gave(look.hidden, len(attentions))
    final_norm = measure_norm(final)
    is_inner = final in modules_of(look.blocks.values())
    head = model.unembedding()
    read_by_head = [step.given for step in look.steps if step.module is head]
    unembedding = None if head is None else _weight(head)
    if unembedding is not None and unembedding.shape[1] != info.d_model:
        notes.append(
            f"the unembedding has width {unembedding.shape[1]}, the stream {info.d_model}: it is not used"
        )
        unembedding = None
    entered = look.entered.get(0)
    first_norm = None if entered is None else measure_norm(look.module_that_gave(entered, 0))
    lacks_norm = any(attention.norm is None for attention in attentions)
    return Stream(
        kind=info.kinds[0],
        attentions=attentions,
        embedding_norm=first_norm,
        final_norm=None if is_inner else final_norm,
        unembedding=unembedding,
        is_direct=bool(read_by_head) and _same(read_by_head[-1], look.hidden),
        is_post_norm=lacks_norm and is_inner and final_norm is not None,
        notes=tuple(notes),
    )


@dataclass(frozen=True, eq=False)
class _Step:
    """A module that ran: what it was given, what it gave, and how many attentions ran before."""

    module: nn.Module
    given: Tensor
    gave: Tensor
    n_calls: int


class _Look:
    """A run of the model on two texts, and what it shows.

    Attributes:
        blocks: The model's blocks, by place.
        watch: What reached the seam, and the output projections.
        steps: Linear maps and other modules without children, in the order in which they ran.
        entered: The hidden states that the last block was given before each attention, by the attention's number.
        hidden: The last hidden states.
    """

    def __init__(self, model: Model) -> None:
        self.blocks = dict(model.blocks())
        self.watch = OutputWatch()
        self.steps: list[_Step] = []
        self.entered: dict[int, Tensor] = {}
        # Two texts of different first tokens, the second of which checks what is found by the first: (2, token)
        ids = example_batch(model).ids
        limit = model.info.max_tokens
        if limit is None or ids.shape[1] * 2 <= limit:
            ids = ids.repeat(1, 2)
        ids = ids.repeat(2, 1)
        ids[1, 0] = int(ids[0, 0] == 0)
        # Every linear map starts a path of derivatives, which ends at the seam.
        self._maps = set(linear_maps(model.modules()))
        watched = [m for m in modules_of(model.modules()) if is_leaf(m) or m in self._maps]
        head = model.unembedding()
        if head is not None:
            watched.append(head)
        with (
            torch.enable_grad(),
            hooks(self._maps, _start_path, before=True),
            hooks(dict.fromkeys(watched), self._note_step),
            hooks(dict.fromkeys(self.blocks.values()), self._note_entered, before=True),
        ):
            self.hidden = model.outputs(Batch(ids), self.watch).hidden.detach()

    def _note_step(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not inputs or not isinstance(inputs[0], Tensor) or not isinstance(output, Tensor):
            return
        given = inputs[0]
        if module in self._maps:
            self.watch.look(module, inputs, output)
        else:
            given = given.detach().clone()  # some networks write into what they were given
        self.steps.append(_Step(module, given, output.detach().clone(), len(self.watch.calls)))

    def _note_entered(self, block: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden = hidden_input(inputs, named)
        if hidden is not None:
            self.entered[len(self.watch.calls)] = hidden.detach().clone()

    def module_that_gave(self, output: Tensor, n_calls: int) -> nn.Module | None:
        """Return the last module but linear maps that gave a tensor after so many attentions; None if none did."""
        for step in reversed(self._others()):
            if step.n_calls == n_calls and _same(step.gave, output):
                return step.module
        return None

    def _others(self) -> list[_Step]:
        """Return what gave as many numbers as it was given, but for linear maps: norms among them."""
        others = [step for step in self.steps if step.module not in self._maps]
        return [step for step in others if step.given.shape == step.gave.shape]

    @torch.enable_grad()
    def attention(self, place: Place, adapted: set[nn.Module]) -> Attention:
        """Return the weights of an attention, as far as they are known; those of adapted maps are not."""
        call = self.watch.calls[place]
        n_before = list(self.watch.calls).index(place)  # attentions
        notes: list[str] = []

        # What reads the stream.
        norm, sources = self._sources(n_before)
        projections: dict[Role, Projection | None] = dict.fromkeys(ROLES)
        if sources:
            lacking = []
            for role in ROLES:
                projections[role] = _projection(getattr(call, role), sources)
                if projections[role] is None:
                    lacking.append(f"W_{role[0].upper()}")
            if lacking:
                notes.append(
                    f"between {' and '.join(lacking)} and the seam lies what no matrix says (a norm of queries and "
                    "keys, a low-rank cache, an adapter)"
                )
        else:
            notes.append(
                "what its projections read is neither the stream nor a LayerNorm or RMSNorm of it"
            )

        # What writes to it, and the norm of what was written, if there is one.
        output = output_norm = None
        module = self.watch.modules.get(place)
        weight = None if module is None or module in adapted else _weight(module)
        if weight is None:
            notes.append(
                "no linear map of known weights is fed just what the heads put out: W_O is not known"
            )
        else:
            output = weight.reshape(len(weight), call.n_heads, -1).transpose(0, 1)
            written = self.watch.results[place]
            for step in self._others():
                if step.n_calls == n_before + 1 and _same(step.given, written):
                    output_norm = measure_norm(step.module)
                    break
        return Attention(
            call.layer,
            call.n_heads,
            call.scale,
            norm,
            **projections,
            output=output,
            output_norm=output_norm,
            notes=tuple(notes),
        )

    def _sources(self, n_before: int) -> tuple[Norm | None, list[Tensor]]:
        """Return what the projections of a layer were given, and the norm that made it of the stream, if one did.

        They are the maps that read one and the same: the stream, or a norm of it that was made last.

        Returns:
            The norm, and the inputs of the projections; none where they are neither.
        """
        entered = self.entered.get(n_before)
        if entered is None:
            return None, []
        since = [step for step in self.steps if step.n_calls == n_before]
        inputs = [step.given for step in since if step.module in self._maps]
        from_stream = [step for step in self._others() if _same(step.given, entered)]
        for given in reversed(inputs):
            alike = [other for other in inputs if _same(other, given)]
            if _same(given, entered):
                return None, alike
            between = [step.module for step in from_stream if _same(step.gave, given)]
            if between:
                norm = measure_norm(between[-1])
                return norm, alike if norm is not None else []
        return None, []


def _start_path(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Make what a linear map is given the start of a path that can be derived."""
    if not inputs or not isinstance(inputs[0], Tensor) or not inputs[0].is_floating_point():
        return None
    return (inputs[0].detach().clone().requires_grad_(), *inputs[1:]), named


def _projection(reached: Tensor, sources: Sequence[Tensor]) -> Projection | None:
    """Return a projection, if the slopes and biases of one text's first token give the other's.

    Args:
        reached: The queries, keys or values that reached the seam, (2, head, token, d_head).
        sources: What maps were given that they may depend on.
    """
    weight = _derive(reached[0, :, 0], sources)
    if weight is None:
        return None
    # (text, d_model) at the first tokens, and (text, head, d_head) that reached the seam.
    source = sources[0].detach().reshape(len(reached), -1, weight.shape[-1])[:, 0].to(weight)
    rows = reached[:, :, 0].detach().to(weight)
    bias = rows[0] - weight @ source[0]
    expected = weight @ source[1] + bias
    # Each product rounds, and so does their sum.
    size = weight.abs() @ source.abs().sum(0) + bias.abs()
    allowed = 8 * torch.finfo(reached.dtype).eps * size.amax()
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
        rows,
        list(starts),
        each,
        retain_graph=True,
        allow_unused=True,
        is_grads_batched=True,
    )
    # (number, batch, token, d_model) -> (number, d_model): only the first token is looked at.
    slopes = [slope.flatten(1, -2)[:, 0] for slope in gradients if slope is not None]
    if not slopes:
        return None
    return _widen(torch.stack(slopes).sum(0)).reshape(*rows.shape, -1)


def _same(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors hold the same numbers, whatever their shape."""
    return first.numel() == second.numel() and torch.equal(first.reshape(-1), second.reshape(-1))


def _weight(module: nn.Module) -> Tensor | None:
    """Return a linear map's weight, (out, in), float32 or better; None where it is quantised or elsewhere."""
    weight = weight_of(module)
    return None if weight is None else _widen(weight.detach())


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@torch.no_grad()
def measure_norm(module: nn.Module | None) -> Norm | None:
    """Measure a module as a norm on four vectors; None if it is neither LayerNorm nor RMSNorm."""
    weight = None if module is None else next(iter(module.parameters()), None)
    if module is None or weight is None or weight.ndim != 1:
        return None
    n = len(weight)
    # Four test vectors, (4, n): z and -z tell gain and bias, two random ones whether it centres.
    # Without a mean, of length 1, and nowhere small: divided by, it keeps what is left of the norm's precision.
    z = torch.ones(n, dtype=torch.float64)
    z[1::2] = -1
    if n % 2:
        z[-1] = -2
        z[1:2] = 1
    z = z / z.pow(2).mean().sqrt()
    others = 3 + torch.randn(2, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = 64 * torch.cat([torch.stack([z, -z]), others])
    try:
        gave = module(given.to(weight.device, weight.dtype)[None])[0].cpu().double()
    except (RuntimeError, TypeError, ValueError, IndexError):  # it takes no vectors
        return None

    # z and -z have one length: half their difference is the gain, half their sum the bias.
    gain = (gave[0] - gave[1]) / (2 * z)
    bias = (gave[0] + gave[1]) / 2
    allowed = 64 * torch.finfo(weight.dtype).eps * (float(gave[0].abs().max()) or 1.0)
    # Whether it centres shows on vectors that have a mean.
    wide = torch.promote_types(weight.dtype, torch.float32)
    for centres in (True, False):
        off = (gave[2:] - Norm(gain, bias, centres).apply(others)).abs().max()
        if off <= allowed:
            return Norm(gain.to(weight.device, wide), bias.to(weight.device, wide), centres)
    return None
