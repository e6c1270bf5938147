"""Find the weights by which heads read and write the residual stream: W_Q, W_K, W_V, W_O, and the norms around them.

Nothing is guessed from module names, and there is no table of architectures. A model runs once on two short texts, and
this module compares the numbers that its modules read and return:

- The *seam* is the one function that computes every attention of a model. There the queries, keys and values appear.
- The projections are the linear maps that read the stream, or a norm of it, before an attention.
- The queries are a function of what the projections read, W_Q x + b. So their derivative by x (by autograd) is W_Q of
  each head, with rows scaled and ordered as the model does; b is what remains. The same goes for keys and values.
- Weight and bias, found from the first text, must give the queries of the second text. If they do not, there is more
  than a linear map in between, and the weights are reported as not known.
- All this is done at the first token, whose rotary position embedding is the identity.
- A norm (LayerNorm or RMSNorm) is a module that divides a vector by its length. Its gain and bias are measured.

A *layer key* names one attention, (kind, layer), such as ("decoder", 3).
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
    OutputProjectionFinder,
    Role,
    find_adapted_maps,
    first_input_tensor,
    has_no_children,
    have_equal_numbers,
    hooks,
    list_linear_maps,
    list_modules,
    weight_of,
)
from attnscope.models.model import Batch, Model, example_batch


@dataclass(frozen=True, eq=False)
class Norm:
    """A LayerNorm or RMSNorm of a vector x: gain * (x - mean of x, if it centres) / root mean square + bias."""

    # (d_model,); Gemma's gain is 1 + its weight
    gain: Tensor
    # (d_model,)
    bias: Tensor
    # Whether the norm first subtracts the mean (LayerNorm) or not (RMSNorm)
    centres: bool

    def centre(self, x: Tensor, dim: int = -1) -> Tensor:
        """Subtract the mean along a dimension, if the norm centres."""
        return x - x.mean(dim, keepdim=True) if self.centres else x

    def fold(self, rows: Tensor) -> Tensor:
        """Fold gain and centring into rows of a weight matrix, (…, d_model), that multiply the norm's output.

        The new rows multiply the norm's input instead. The division by the length is left out, and so is the bias.
        """
        return self.centre(rows * self.gain.to(rows))

    def apply(self, x: Tensor) -> Tensor:
        """Return the norm of vectors, (…, d_model), with an epsilon of 0."""
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
    """The weights of one attention. Weights that are not known are None."""

    layer: int
    # Number of query heads
    n_heads: int
    # Factor on the dot products
    scale: float
    # The norm between the stream and the projections; None = there is none
    norm: Norm | None
    # W_Q
    query: Projection | None
    # W_K and W_V, by key/value head
    key: Projection | None
    value: Projection | None
    # W_O, (n_heads, d_model, d_value)
    output: Tensor | None
    # The norm between W_O and the stream (Gemma 2); None = there is none
    output_norm: Norm | None
    # What is not known, and why
    notes: tuple[str, ...] = ()

    def stream_maps(self, *, centres: bool) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the linear maps of each query head from stream to stream, with the norms around them folded in.

        Args:
            centres: Whether every norm that later reads the stream centres. Then the mean of what "OV" writes has no
                effect, and is subtracted.

        Returns:
            "OV" = W_O W_V, "QK" = W_Q' W_K and "KQ" = W_K' W_Q, each as its two factors, (n_heads, d_model, d_head) and
            (n_heads, d_head, d_model). Maps that are not known are left out.
        """
        # Fold the norm into the rows that read the stream, and repeat the key/value heads for the query heads.
        reading_rows: dict[str, Tensor] = {}  # role -> (n_heads, d_head, d_model)
        for role in ROLES:
            projection: Projection | None = getattr(self, role)
            if projection is not None:
                rows = projection.weight if self.norm is None else self.norm.fold(projection.weight)
                reading_rows[role] = rows.repeat_interleave(self.n_heads // len(rows), 0)
        maps = {}
        if "query" in reading_rows and "key" in reading_rows:
            maps["QK"] = reading_rows["query"].mT, reading_rows["key"]
            maps["KQ"] = reading_rows["key"].mT, reading_rows["query"]
        if "value" in reading_rows and self.output is not None:
            # Fold the norm after W_O into W_O, (n_heads, d_model, d_value). Axis 1 runs over the stream.
            writing_columns = self.output
            norm = self.output_norm
            if norm is not None:
                writing_columns = norm.centre(writing_columns, 1) * norm.gain[:, None].to(
                    writing_columns
                )
            if centres:
                writing_columns = writing_columns - writing_columns.mean(1, keepdim=True)
            maps["OV"] = writing_columns, reading_rows["value"]
        return maps


@dataclass(frozen=True, eq=False)
class ResidualStream:
    """The weights and norms along the residual stream of a model."""

    # The kind of its attention, "encoder" or "decoder"
    kind: str
    # The weights of its attentions, in the order of layers
    attentions: tuple[AttentionMatrices, ...]
    # The norm between embeddings and stream; None = there is none, or it is not known
    embedding_norm: Norm | None
    # The norm between the last layer and the unembedding; None = there is none
    final_norm: Norm | None
    # W_U, (vocabulary, d_model); None = the model has no language-model head, or its weight is not known
    unembedding: Tensor | None
    # Whether W_U reads the stream, or its final norm, without another layer in between
    is_direct: bool
    # Whether the norms of blocks lie on the stream itself (BERT), and so between any two heads
    is_post_norm: bool
    # What is not known, one sentence each
    notes: tuple[str, ...]

    @property
    def centres(self) -> bool:
        """Return whether every norm subtracts the mean, so that no head can read the mean of the stream."""
        norms = [attention.norm for attention in self.attentions]
        if self.unembedding is not None:
            norms.append(self.final_norm)
        return all(norm is not None and norm.centres for norm in norms)


def read_stream_weights(model: Model) -> ResidualStream:
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
    # Refuse models that show attention weights only; the message ends with "does not show which weights …".
    require_seam(info, "which weights its heads have")
    run = _ObservedRun(model)
    adapted_maps = find_adapted_maps(model.modules())
    attentions = tuple(
        run.find_weights(layer_key, adapted_maps) for layer_key in sorted(run.finder.calls)
    )
    # Merge equal notes of several layers into one, such as "L0, L1: …".
    notes: list[str] = []
    layers_by_note: dict[str, list[str]] = {}
    for attention in attentions:
        for note in attention.notes:
            layers_by_note.setdefault(note, []).append(f"L{attention.layer}")
    for note, layers in layers_by_note.items():
        layer_names = "all layers" if len(layers) == len(attentions) else ", ".join(layers)
        notes.append(f"{layer_names}: {note}")
    if all(attention.value is None or attention.output is None for attention in attentions):
        raise AttnscopeError(
            f"where {info.name} ({info.architecture}) keeps W_V and W_O of its heads is not known",
            attentions[0].notes[0],
        )

    # Find the norms at the two ends of the stream: the norm that returned the input of the first block, before any
    # attention ran, and the norm that returned the last hidden states, after all attentions. A norm inside a block
    # belongs to that block.
    first_input = run.block_inputs.get(0)
    first_norm = None if first_input is None else measure_norm(run.find_source(first_input, 0))
    last_module = run.find_source(run.hidden, len(attentions))
    final_norm = measure_norm(last_module)
    is_in_block = last_module in list_modules(run.blocks.values())
    unembedding_module = model.unembedding()
    unembedding_inputs = [step.input for step in run.steps if step.module is unembedding_module]
    unembedding = _known_weight(unembedding_module)
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
        is_direct=bool(unembedding_inputs) and have_equal_numbers(unembedding_inputs[-1], run.hidden),
        is_post_norm=lacks_norm and is_in_block and final_norm is not None,
        notes=tuple(notes),
    )


@dataclass(frozen=True, eq=False)
class _Step:
    """A module that ran: its first input, its output, and how many attentions had run before it."""

    module: nn.Module
    input: Tensor
    output: Tensor
    n_attentions: int


class _ObservedRun:
    """A run of the model on two texts whose first tokens differ, with the inputs and outputs of its modules.

    Attributes:
        blocks: The model's blocks, by layer key, (kind, layer).
        finder: Holds the calls that reached the seam, and the output projections.
        steps: The linear maps and other modules without children, in the order in which they ran.
        block_inputs: The hidden states that a block got, (text, token, d_model), by the number of attentions that had
            run before it. Of several blocks with no attention between them, the last one counts.
        hidden: The last hidden states, (text, token, d_model).
    """

    def __init__(self, model: Model) -> None:
        self.blocks = dict(model.blocks())
        self.finder = OutputProjectionFinder()
        self.steps: list[_Step] = []
        self.block_inputs: dict[int, Tensor] = {}
        # Make the ids of two texts, (2, token): the first gives the weights, the second checks them. The example text
        # is repeated, if the model allows so many tokens.
        ids = example_batch(model).ids
        limit = model.info.max_tokens
        if limit is None or ids.shape[1] * 2 <= limit:
            ids = ids.repeat(1, 2)
        ids = ids.repeat(2, 1)
        # The second text starts with token 0, or with token 1 if the first text starts with 0.
        ids[1, 0] = int(ids[0, 0] == 0)
        # Make the input of each linear map a leaf of autograd's graph, to differentiate by it later.
        self._linear_maps = set(list_linear_maps(model.modules()))
        modules = list_modules(model.modules())
        watched = [
            module for module in modules if has_no_children(module) or module in self._linear_maps
        ]
        unembedding_module = model.unembedding()
        if unembedding_module is not None:
            watched.append(unembedding_module)
        with (
            torch.enable_grad(),
            hooks(self._linear_maps, _make_leaf, before=True),
            hooks(watched, self._record_step),
            hooks(self.blocks.values(), self._record_block_input, before=True),
        ):
            self.hidden = model.outputs(Batch(ids), self.finder).hidden.detach()

    def _record_step(self, module: nn.Module, inputs: Inputs, output: Any) -> None:
        """Keep the first input and the output of a module. This is a forward hook."""
        first_input = first_input_tensor(inputs)
        if first_input is None or not isinstance(output, Tensor):
            return
        # The inputs of linear maps stay in autograd's graph: `_derivative` differentiates by them.
        if module in self._linear_maps:
            self.finder.check_linear_map(module, inputs, output)
        else:
            first_input = first_input.detach().clone()  # some networks write into their inputs
        step = _Step(module, first_input, output.detach().clone(), len(self.finder.calls))
        self.steps.append(step)

    def _record_block_input(self, block: nn.Module, inputs: Inputs, named: NamedInputs) -> None:
        """Keep the hidden states that a block gets. This is a forward pre-hook."""
        hidden = first_input_tensor(inputs, named)
        if hidden is not None:
            self.block_inputs[len(self.finder.calls)] = hidden.detach().clone()

    def find_source(self, output: Tensor, n_attentions: int) -> nn.Module | None:
        """Return the last module that may be a norm and returned this tensor after `n_attentions` attentions had run.

        None = no such module returned it.
        """
        for step in reversed(self._find_norm_candidates()):
            if step.n_attentions == n_attentions and have_equal_numbers(step.output, output):
                return step.module
        return None

    def _find_norm_candidates(self) -> list[_Step]:
        """Return the steps that may be norms: no linear maps, and output and input have the same shape."""
        return [
            step
            for step in self.steps
            if step.module not in self._linear_maps and step.input.shape == step.output.shape
        ]

    @torch.enable_grad()
    def find_weights(self, layer_key: LayerKey, adapted_maps: set[nn.Module]) -> AttentionMatrices:
        """Return the weights of an attention, as far as they can be found.

        Args:
            layer_key: The layer key of the attention, (kind, layer).
            adapted_maps: The linear maps that an adapter wraps, whose weights are not all that they compute.
        """
        call = self.finder.calls[layer_key]
        # How many attentions had run before this one
        n_before = list(self.finder.calls).index(layer_key)
        notes: list[str] = []

        # Find the norm and the projections that read the stream.
        norm, sources = self._find_projection_inputs(n_before)
        projections: dict[Role, Projection | None] = {}
        lacking = []
        for role in ROLES:
            projections[role] = _fit_projection(getattr(call, role), sources)
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

        # Find W_O, which writes to the stream, and the norm that reads its output, if there is one.
        output = output_norm = None
        module = self.finder.output_projections.get(layer_key)
        weight = None if module in adapted_maps else _known_weight(module)
        if weight is None:
            notes.append(
                "no linear map of known weights is fed just what the heads put out: W_O is not known"
            )
        else:
            # (d_model, n_heads * d_value) -> (n_heads, d_model, d_value)
            output = weight.reshape(len(weight), call.n_heads, -1).transpose(0, 1)
            projected_output = self.finder.projected_outputs[layer_key]
            for step in self._find_norm_candidates():
                if step.n_attentions == n_before + 1 and have_equal_numbers(
                    step.input, projected_output
                ):
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

    def _find_projection_inputs(self, n_before: int) -> tuple[Norm | None, list[Tensor]]:
        """Find the inputs of the projections of an attention, and the norm that computed them from the stream.

        Before the attention, the last linear map that reads the stream, or a norm of it, is a projection. The other
        projections are the maps with an equal input.

        Args:
            n_before: How many attentions had run before this one.

        Returns:
            The norm, or None if the projections read the stream itself; and the inputs of the projections, tensors with
            equal numbers. No inputs = no linear map reads the stream or a LayerNorm or RMSNorm of it.
        """
        stream = self.block_inputs.get(n_before)
        if stream is None:
            return None, []
        inputs = [
            step.input
            for step in self.steps
            if step.module in self._linear_maps and step.n_attentions == n_before
        ]
        norms = [step for step in self._find_norm_candidates() if have_equal_numbers(step.input, stream)]
        for map_input in reversed(inputs):
            equal_inputs = [other for other in inputs if have_equal_numbers(other, map_input)]
            if have_equal_numbers(map_input, stream):
                return None, equal_inputs
            for step in reversed(norms):
                if have_equal_numbers(step.output, map_input):
                    norm = measure_norm(step.module)
                    return norm, [] if norm is None else equal_inputs
        return None, []


def _make_leaf(module: nn.Module, inputs: Inputs, named: NamedInputs) -> Any:
    """Make the input of a linear map a leaf of autograd's graph. This is a forward pre-hook."""
    first_input = first_input_tensor(inputs)
    if first_input is None or not first_input.is_floating_point():
        return None
    return (first_input.detach().clone().requires_grad_(), *inputs[1:]), named


def _fit_projection(projected: Tensor, sources: Sequence[Tensor]) -> Projection | None:
    """Return W and b of a projection W x + b, from the first text; None if they do not fit the second text.

    Args:
        projected: The queries, keys or values at the seam, (text, head, token, d_head) of two texts.
        sources: The inputs of the linear maps that may have computed `projected`: tensors with equal numbers,
            (text, token, d_model), or (text * token, d_model).
    """
    weight = _derivative(projected[0, :, 0], sources)  # (head, d_head, d_model)
    if weight is None:
        return None
    # At the first token: x, (text, d_model), and W x + b, (text, head, d_head).
    x = sources[0].detach().reshape(len(projected), -1, weight.shape[-1])[:, 0].to(weight)
    expected = projected[:, :, 0].detach().to(weight)
    bias = expected[0] - weight @ x[0]
    difference = (weight @ x[1] + bias - expected[1]).abs()
    # Rounding errors are relative to the sizes of the terms, not to the size of their sum.
    size = weight.abs() @ x.abs().sum(0) + bias.abs()
    max_difference = 8 * torch.finfo(projected.dtype).eps * size.amax()
    # This comparison is false for NaN.
    if (difference <= max_difference).all():
        return Projection(weight, bias)
    return None


def _derivative(projected: Tensor, sources: Sequence[Tensor]) -> Tensor | None:
    """Return the derivative of `projected`, (head, d_head), by the first token of the sources, (head, d_head, d_model).

    None = `projected` does not depend on the sources.
    """
    if not projected.requires_grad or not sources:
        return None
    # Take the gradients of all elements of `projected` at once. Each selector, (head, d_head), is 1 at one element.
    selectors = torch.eye(projected.numel(), dtype=projected.dtype, device=projected.device)
    gradients = torch.autograd.grad(
        projected,
        list(sources),
        selectors.view(-1, *projected.shape),
        retain_graph=True,
        allow_unused=True,
        is_grads_batched=True,
    )
    # (element, text, token, d_model) -> (element, d_model), at the first token of the first text.
    used_gradients = [gradient.flatten(1, -2)[:, 0] for gradient in gradients if gradient is not None]
    if not used_gradients:
        return None
    # Each linear map got a leaf of its own (`_make_leaf`), all with the same x. So the derivative by x is their sum.
    return _widen(torch.stack(used_gradients).sum(0)).reshape(*projected.shape, -1)


def _known_weight(module: nn.Module | None) -> Tensor | None:
    """Return a linear map's weight, (out, in), in float32 or float64.

    None = the weight is quantised or missing, or `module` is None.
    """
    weight = weight_of(module)
    return None if weight is None else _widen(weight.detach())


def _widen(tensor: Tensor) -> Tensor:
    """Return a tensor in float32, or in float64 if it has that precision."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


@torch.no_grad()
def measure_norm(module: nn.Module | None) -> Norm | None:
    """Return the gain and bias of a norm, measured on four vectors; None if it is neither LayerNorm nor RMSNorm.

    The gain and bias follow from two of the vectors. The other two must then come out as the norm predicts.
    """
    if module is None:
        return None
    weight = next(module.parameters(), None)
    if weight is None or weight.ndim != 1:
        return None
    width = len(weight)
    # The norms of z and -z give gain and bias. z has mean 0 and root mean square 1. No element of z is small, because
    # the gain is a quotient with z as divisor.
    z = torch.ones(width, dtype=torch.float64)
    z[1::2] = -1
    if width % 2:
        # 1, -1, 1, -1, … do not add up to 0 if their number is odd. 1, 1, 1, -1, …, 1, -1, -2 do.
        z[-1] = -2
        z[1:2] = 1
    z = z / z.pow(2).mean().sqrt()
    # Two random vectors, whose mean is not 0, show whether the norm centres.
    others = 3 + torch.randn(2, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    # (4, width). They are large, so that the norm's epsilon is lost in rounding.
    vectors = 64 * torch.cat([torch.stack([z, -z]), others])
    try:
        normed = module(vectors.to(weight.device, weight.dtype)[None])[0].cpu().double()
    except (
        RuntimeError,
        TypeError,
        ValueError,
        IndexError,
    ):  # the module reads something other than vectors
        return None

    # The norm of z is bias + gain * z, and that of -z is bias - gain * z.
    gain = (normed[0] - normed[1]) / (2 * z)
    bias = (normed[0] + normed[1]) / 2
    max_difference = 64 * torch.finfo(weight.dtype).eps * float(normed[0].abs().max())
    precision = torch.promote_types(weight.dtype, torch.float32)
    for centres in (True, False):
        difference = (normed[2:] - Norm(gain, bias, centres).apply(others)).abs().max()
        if difference <= max_difference:
            return Norm(gain.to(weight.device, precision), bias.to(weight.device, precision), centres)
    return None
