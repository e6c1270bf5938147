"""Find the weights by which heads read and write the residual stream: W_Q, W_K, W_V, W_O, and the norms around them.

Nothing is guessed from names, and there is no table of architectures. The projections are the linear maps that read the
stream, or the norm of it. The queries that reach the seam are a function of what the projections read, W_Q x + b. So
their derivative by x is W_Q of each head, with rows scaled and ordered as the model does, and b is what remains. The
same goes for keys and values. Weight and bias must then give the queries of another token. If they do not, more than a
linear map lies between, and the weights are not known. All this is done at the first token, which rotary positions
leave as it is. A norm is a module that divides a vector by its length: its gain and bias are measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnscope.core.attention.probes import LayerKey
from attnscope.errors import AttnscopeError
from attnscope.models.info import require_seam
from attnscope.models.inside.projections import (
    ROLES,
    Inputs,
    NamedInputs,
    OutputWatch,
    Role,
    adapted_maps,
    first_tensor,
    have_equal_numbers,
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

    # (d_model,); Gemma's gain is 1 + its weight
    gain: Tensor
    # (d_model,)
    bias: Tensor
    # Whether the mean is taken away first (LayerNorm), or not (RMSNorm)
    centres: bool

    def centre(self, x: Tensor, dim: int = -1) -> Tensor:
        """Subtract the mean along a dimension, if the norm centres."""
        return x - x.mean(dim, keepdim=True) if self.centres else x

    def fold(self, rows: Tensor) -> Tensor:
        """Turn rows that read the norm's output, (…, d_model), into rows that read its input before the division."""
        return self.centre(rows * self.gain.to(rows))

    def apply(self, x: Tensor) -> Tensor:
        """Return vectors, (…, d_model), as the norm puts them out, with an epsilon of 0."""
        x = self.centre(x)
        length = x.pow(2).mean(-1, keepdim=True).sqrt().clamp(min=1e-30)
        return x / length * self.gain.to(x) + self.bias.to(x)


@dataclass(frozen=True, eq=False)
class Projection:
    """One of W_Q, W_K and W_V, by head."""

    # (n_heads or n_kv_heads, d_head, d_model); it reads the norm's output
    weight: Tensor
    # (n_heads or n_kv_heads, d_head); zeros where the model has none
    bias: Tensor


@dataclass(frozen=True, eq=False)
class AttentionMatrices:
    """The weights of one attention. Those that are not known are None."""

    layer: int
    # Query heads
    n_heads: int
    # Factor on the dot products
    scale: float
    # The norm between the stream and the projections; None = there is none
    norm: Norm | None
    # W_Q
    query: Projection | None
    # W_K and W_V, of key/value heads
    key: Projection | None
    value: Projection | None
    # W_O, (n_heads, d_model, d_value)
    output: Tensor | None
    # The norm between W_O and the stream (Gemma 2); None = there is none
    output_norm: Norm | None
    # What is not known, and why
    notes: tuple[str, ...] = ()

    def maps(self, *, centres: bool) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the maps of each query head from stream to stream, with the norms around them folded in.

        Args:
            centres: Whether every norm that later reads the stream centres: then "OV" writes no mean.

        Returns:
            "OV" = W_O W_V, "QK" = W_Q' W_K and "KQ" = W_K' W_Q, each as its two factors, (n_heads, d_model, d_head) and
            (n_heads, d_head, d_model). Maps that are not known are left out.
        """
        # Fold the norm into the rows that read the stream, and repeat the key/value heads for the query heads.
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
            # Fold the norm after W_O into what is written, (n_heads, d_model, d_value).
            writes = self.output
            norm = self.output_norm
            if norm is not None:
                writes = norm.centre(writes, 1) * norm.gain[:, None].to(writes)
            if centres:
                writes = writes - writes.mean(1, keepdim=True)
            maps["OV"] = writes, reads["value"]
        return maps


@dataclass(frozen=True, eq=False)
class ResidualStream:
    """The weights and norms along the residual stream of a model."""

    # The kind of its attention
    kind: str
    # Its attentions, by layer
    attentions: tuple[AttentionMatrices, ...]
    # The norm between embeddings and stream; None = there is none, or it is not known
    embedding_norm: Norm | None
    # The norm between the last layer and the unembedding; None = there is none
    final_norm: Norm | None
    # W_U, (vocabulary, d_model); None = the model has no head for words
    unembedding: Tensor | None
    # Whether W_U reads the (normed) stream itself, without a further layer between
    is_direct: bool
    # Whether norms lie on the stream itself (BERT), and so between any two heads
    is_post_norm: bool
    # What is not known, one sentence each
    notes: tuple[str, ...]

    @property
    def centres(self) -> bool:
        """Return whether every norm subtracts the mean, so that no head can read it."""
        norms = [attention.norm for attention in self.attentions]
        if self.unembedding is not None:
            norms.append(self.final_norm)
        return all(norm is not None and norm.centres for norm in norms)


def stream_of(model: Model) -> ResidualStream:
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
    run = _ObservedRun(model)
    adapted = adapted_maps(model.modules())
    attentions = tuple(run.attention(layer_key, adapted) for layer_key in sorted(run.watch.calls))
    # A note that several layers share is said once, with their names.
    notes: list[str] = []
    layers_by_note: dict[str, list[str]] = {}
    for attention in attentions:
        for note in attention.notes:
            layers_by_note.setdefault(note, []).append(f"L{attention.layer}")
    for note, layers in layers_by_note.items():
        where = "all layers" if len(layers) == len(attentions) else ", ".join(layers)
        notes.append(f"{where}: {note}")
    if all(attention.value is None or attention.output is None for attention in attentions):
        raise AttnscopeError(
            f"where {info.name} ({info.architecture}) keeps W_V and W_O of its heads is not known",
            attentions[0].notes[0],
        )

    # The ends of the stream: the norm that made the input of the first block, and the one that made the last hidden
    # states. A norm that lies in a block belongs to that block.
    first_input = run.block_inputs.get(0)
    first_norm = None if first_input is None else measure_norm(run.module_that_returned(first_input, 0))
    last_module = run.module_that_returned(run.hidden, len(attentions))
    final_norm = measure_norm(last_module)
    is_in_block = last_module in modules_of(run.blocks.values())
    head = model.unembedding()
    head_inputs = [step.input for step in run.steps if step.module is head]
    unembedding = _known_weight(head)
    if unembedding is not None and unembedding.shape[1] != info.d_model:
        notes.append(
            f"the unembedding has width {unembedding.shape[1]}, the stream {info.d_model}: it is not used"
        )
        unembedding = None
    lacks_norm = any(attention.norm is None for attention in attentions)
    return ResidualStream(
        kind=info.kinds[0],
        attentions=attentions,
        embedding_norm=first_norm,
        final_norm=None if is_in_block else final_norm,
        unembedding=unembedding,
        is_direct=bool(head_inputs) and have_equal_numbers(head_inputs[-1], run.hidden),
        is_post_norm=lacks_norm and is_in_block and final_norm is not None,
        notes=tuple(notes),
    )


@dataclass(frozen=True, eq=False)
class _Step:
    """A module that ran: its input, its output, and how many attentions had run before it."""

    module: nn.Module
    input: Tensor
    output: Tensor
    n_attentions: int


class _ObservedRun:
    """A run of the model on two texts whose first tokens differ, with what its modules read and returned.

    Attributes:
        blocks: The model's blocks, by layer key, (kind, layer).
        watch: The calls that reached the seam, and the output projections.
        steps: The linear maps and other modules without children, in the order in which they ran.
        block_inputs: How many attentions had run -> the hidden states that the next block got, (text, token, d_model);
            of several blocks without attention between them, the last one.
        hidden: The last hidden states, (text, token, d_model).
    """

    def __init__(self, model: Model) -> None:
        self.blocks = dict(model.blocks())
        self.watch = OutputWatch()
        self.steps: list[_Step] = []
        self.block_inputs: dict[int, Tensor] = {}
        # Of the two texts, (2, token), the first gives the weights, and the second checks them.
        ids = example_batch(model).ids
        limit = model.info.max_tokens
        if limit is None or ids.shape[1] * 2 <= limit:
            ids = ids.repeat(1, 2)
        ids = ids.repeat(2, 1)
        # The second text starts with token 0, or with token 1 if the first one starts with 0.
        ids[1, 0] = int(ids[0, 0] == 0)
        # Derivatives are taken by the input of each linear map.
        self._maps = set(linear_maps(model.modules()))
        modules = modules_of(model.modules())
        watched = [module for module in modules if is_leaf(module) or module in self._maps]
        head = model.unembedding()
        if head is not None:
            watched.append(head)
        with (
            torch.enable_grad(),
            hooks(self._maps, _make_leaf, before=True),
            hooks(watched, self._note_step),
            hooks(self.blocks.values(), self._note_block, before=True),
        ):
            self.hidden = model.outputs(Batch(ids), self.watch).hidden.detach()

    def _note_step(self, module: nn.Module, inputs: Inputs, output: Any) -> None:
        """Keep the input and the output of a module; the hook after it."""
        first_input = first_tensor(inputs)
        if first_input is None or not isinstance(output, Tensor):
            return
        if module in self._maps:
            self.watch.look(module, inputs, output)
        else:
            first_input = first_input.detach().clone()  # some networks write into their inputs
        step = _Step(module, first_input, output.detach().clone(), len(self.watch.calls))
        self.steps.append(step)

    def _note_block(self, block: nn.Module, inputs: Inputs, named: NamedInputs) -> None:
        """Keep the hidden states that a block gets; the hook before it."""
        hidden = first_tensor(inputs, named)
        if hidden is not None:
            self.block_inputs[len(self.watch.calls)] = hidden.detach().clone()

    def module_that_returned(self, output: Tensor, n_attentions: int) -> nn.Module | None:
        """Return the last module that may be a norm and returned a tensor after so many attentions; None = none did."""
        for step in reversed(self._norm_steps()):
            if step.n_attentions == n_attentions and have_equal_numbers(step.output, output):
                return step.module
        return None

    def _norm_steps(self) -> list[_Step]:
        """Return the steps that may be norms: not of linear maps, and with outputs of the shape of their inputs."""
        return [
            step
            for step in self.steps
            if step.module not in self._maps and step.input.shape == step.output.shape
        ]

    @torch.enable_grad()
    def attention(self, layer_key: LayerKey, adapted: set[nn.Module]) -> AttentionMatrices:
        """Return the weights of an attention, as far as they are known.

        Args:
            layer_key: Its layer key, (kind, layer).
            adapted: The linear maps to whose outputs an adapter adds something.
        """
        call = self.watch.calls[layer_key]
        # How many attentions had run before this one
        n_before = list(self.watch.calls).index(layer_key)
        notes: list[str] = []

        # The norm and the projections, which read the stream.
        norm, sources = self._projection_inputs(n_before)
        projections: dict[Role, Projection | None] = {}
        lacking = []
        for role in ROLES:
            projections[role] = _projection(getattr(call, role), sources)
            if projections[role] is None:
                lacking.append(f"W_{role[0].upper()}")
        if not sources:
            notes.append(
                "what its projections read is neither the stream nor a LayerNorm or RMSNorm of it"
            )
        elif lacking:
            notes.append(
                f"between {' and '.join(lacking)} and the seam lies what no matrix says (a norm of queries and "
                "keys, a low-rank cache, an adapter)"
            )

        # W_O, which writes to the stream, and the norm of what it writes, if there is one.
        output = output_norm = None
        module = self.watch.modules.get(layer_key)
        weight = None if module in adapted else _known_weight(module)
        if weight is None:
            notes.append(
                "no linear map of known weights is fed just what the heads put out: W_O is not known"
            )
        else:
            # (d_model, n_heads * d_value) -> (n_heads, d_model, d_value)
            output = weight.reshape(len(weight), call.n_heads, -1).transpose(0, 1)
            written = self.watch.results[layer_key]
            for step in self._norm_steps():
                if step.n_attentions == n_before + 1 and have_equal_numbers(step.input, written):
                    output_norm = measure_norm(step.module)
                    break
        return AttentionMatrices(
            call.layer,
            call.n_heads,
            call.scale,
            norm,
            **projections,
            output=output,
            output_norm=output_norm,
            notes=tuple(notes),
        )

    def _projection_inputs(self, n_before: int) -> tuple[Norm | None, list[Tensor]]:
        """Find the inputs of the projections of an attention, and the norm that made them from the stream.

        Before the attention, the last linear map that reads the stream, or a norm of it, is a projection. The others
        are the maps with an equal input.

        Args:
            n_before: How many attentions had run before this one.

        Returns:
            The norm, None if the projections read the stream itself; and the inputs of the projections, with equal
            numbers, empty if no map reads either.
        """
        stream = self.block_inputs.get(n_before)
        if stream is None:
            return None, []
        inputs = [
            step.input
            for step in self.steps
            if step.module in self._maps and step.n_attentions == n_before
        ]
        norms = [step for step in self._norm_steps() if have_equal_numbers(step.input, stream)]
        for tensor in reversed(inputs):
            equal_inputs = [other for other in inputs if have_equal_numbers(other, tensor)]
            if have_equal_numbers(tensor, stream):
                return None, equal_inputs
            for step in reversed(norms):
                if have_equal_numbers(step.output, tensor):
                    norm = measure_norm(step.module)
                    return norm, [] if norm is None else equal_inputs
        return None, []


def _make_leaf(module: nn.Module, inputs: Inputs, named: NamedInputs) -> Any:
    """Make the input of a linear map a leaf of autograd's graph; the hook before the map."""
    first_input = first_tensor(inputs)
    if first_input is None or not first_input.is_floating_point():
        return None
    return (first_input.detach().clone().requires_grad_(), *inputs[1:]), named


def _projection(reached: Tensor, sources: Sequence[Tensor]) -> Projection | None:
    """Return a projection; None where weight and bias, as found from the first text, do not fit the second.

    Args:
        reached: The queries, keys or values that reached the seam, (text, head, token, d_head) of two texts.
        sources: The inputs of linear maps that they may depend on, with equal numbers, (text, token, d_model) or
            flattened.
    """
    weight = _derivative(reached[0, :, 0], sources)
    if weight is None:
        return None
    # Of the first token: x, (text, d_model), and W x + b, (text, head, d_head).
    x = sources[0].detach().reshape(len(reached), -1, weight.shape[-1])[:, 0].to(weight)
    rows = reached[:, :, 0].detach().to(weight)
    bias = rows[0] - weight @ x[0]
    difference = (weight @ x[1] + bias - rows[1]).abs()
    # Rounding is relative to the sizes of the terms, not to that of their sum.
    size = weight.abs() @ x.abs().sum(0) + bias.abs()
    allowed = 8 * torch.finfo(reached.dtype).eps * size.amax()
    # NaN fails this comparison.
    if (difference <= allowed).all():
        return Projection(weight, bias)
    return None


def _derivative(rows: Tensor, sources: Sequence[Tensor]) -> Tensor | None:
    """Return the derivative of rows, (head, d_head), by the first token of the sources, (head, d_head, d_model).

    None where the rows do not depend on the sources.
    """
    if not rows.requires_grad or not sources:
        return None
    # One derivative for each element of the rows, all of them at once: each of these tensors selects one element.
    selectors = torch.eye(rows.numel(), dtype=rows.dtype, device=rows.device).view(-1, *rows.shape)
    gradients = torch.autograd.grad(
        rows,
        list(sources),
        selectors,
        retain_graph=True,
        allow_unused=True,
        is_grads_batched=True,
    )
    # (element, text, token, d_model) -> (element, d_model), of the first token of the first text.
    slopes = [slope.flatten(1, -2)[:, 0] for slope in gradients if slope is not None]
    if not slopes:
        return None
    return _widen(torch.stack(slopes).sum(0)).reshape(*rows.shape, -1)


def _known_weight(module: nn.Module | None) -> Tensor | None:
    """Return a linear map's weight, (out, in), float32 or better; None where it is quantised or missing, or no map."""
    weight = weight_of(module)
    return None if weight is None else _widen(weight.detach())


def _widen(tensor: Tensor) -> Tensor:
    """Return a tensor in float32, or in its own precision if that is better."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@torch.no_grad()
def measure_norm(module: nn.Module | None) -> Norm | None:
    """Return the gain and bias of a norm, measured on four vectors; None if it is neither LayerNorm nor RMSNorm."""
    if module is None:
        return None
    weight = next(module.parameters(), None)
    if weight is None or weight.ndim != 1:
        return None
    n = len(weight)
    # z and -z tell gain and bias. z has mean 0 and a root mean square of 1. No element of it is small, for the gain is
    # a quotient by z.
    z = torch.ones(n, dtype=torch.float64)
    z[1::2] = -1
    if n % 2:
        # 1 and -1 in turn do not add up to 0 if n is odd: 1, 1, 1, -1, …, 1, -1, -2 do.
        z[-1] = -2
        z[1:2] = 1
    z = z / z.pow(2).mean().sqrt()
    # Two random vectors with a mean tell whether the norm centres.
    others = 3 + torch.randn(2, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    # (4, n); large, so that the norm's epsilon is lost in rounding.
    vectors = 64 * torch.cat([torch.stack([z, -z]), others])
    try:
        normed = module(vectors.to(weight.device, weight.dtype)[None])[0].cpu().double()
    except (RuntimeError, TypeError, ValueError, IndexError):  # the module takes no vectors
        return None

    # The norm of z is gain * z + bias, that of -z is bias - gain * z.
    gain = (normed[0] - normed[1]) / (2 * z)
    bias = (normed[0] + normed[1]) / 2
    allowed = 64 * torch.finfo(weight.dtype).eps * float(normed[0].abs().max())
    precision = torch.promote_types(weight.dtype, torch.float32)
    for centres in (True, False):
        difference = (normed[2:] - Norm(gain, bias, centres).apply(others)).abs().max()
        if difference <= allowed:
            return Norm(gain.to(weight.device, precision), bias.to(weight.device, precision), centres)
    return None
