"""Split the scores of an attention by the parts of the stream that its queries and keys read.

A query is a sum over parts: what each earlier head and feed-forward network wrote, embeddings and biases, each through
the frozen norms, the projection and the rotary turn. So is a key. A score is the product of the two sums.

To see the sums, a model runs so that nothing but the stream and the norms on it is followed. Attention and feed-forward
networks are cut off: what they write stands for itself, a leaf of the graph. Embeddings and biases are leaves too.
Norms are linear once the length that they divided by is frozen. So a query is a sum over leaves, each times its slope,
and no path of the stream need be known.

Source: Elhage et al. 2021, "QK circuits"; frozen norms as in direct logit attribution.
"""

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import AttentionCall, attend
from attnscope.errors import AttnscopeError
from attnscope.models.info import require_seam
from attnscope.models.inside.projections import OutputWatch, hidden_input, hooks, is_leaf, linear_maps, modules_of
from attnscope.models.inside.stream import measure_norm
from attnscope.models.model import Batch, Model, example_batch

_MOST_NUMBERS = 2**22
"""Of slopes that are followed at once: 16 MiB for each part of the model."""

TOKENS = "tokens"
POSITIONS = "positions"
SEGMENTS = "segments"
EMBEDDED = "embeddings"
"""The name of what enters the stream where no embedding is a module."""

PROJECTION_BIAS = "projection bias"
OTHER_BIASES = "other biases"


@dataclass(frozen=True)
class Part:
    """A part of a model that adds to the residual stream.

    Attributes:
        name: Such as "L3H1", "L3 MLP" or "tokens".
        kind: "head", "MLP", "embedding" or "bias".
        layer: Its layer; -1 = it belongs to none.
        head: Its number among the heads of its layer; -1 = it is none.
    """

    name: str
    kind: str
    layer: int = -1
    head: int = -1


@dataclass(frozen=True, eq=False)
class _Leaf:
    """The additions of parts to the stream in a run, or to a projection of it.

    Attributes:
        parts: One part, or the heads of a layer along the second axis.
        tensor: What flows on, and carries a slope.
        value: What was added, of the same shape.
    """

    parts: tuple[Part, ...]
    tensor: Tensor
    value: Tensor


@dataclass(frozen=True, eq=False)
class TracedScores:
    """A run over a batch, with the gradient paths from the parts of the model to the seam.

    Attributes:
        n_rows: How many texts the batch has.
        calls: The attentions; their queries and keys carry gradients.
        leaves: What was added.
    """

    n_rows: int
    calls: dict[Place, AttentionCall] = field(default_factory=dict)
    leaves: list[_Leaf] = field(default_factory=list)

    def along(self, output: Tensor, slopes: Tensor) -> dict[Part, Tensor]:
        """Return the sums of output * slope that each part adds, each (sum, row), float64.

        Parts from which no path leads there are left out.

        Args:
            output: Queries or keys of a call, (row, head, token, d_head).
            slopes: One of that shape for each sum, (sum, row, head, token, d_head).
        """
        # (sum, row, head, token, d_head), in chunks that fit the memory bound.
        at_once = max(1, _MOST_NUMBERS // output.numel())
        chunks = [self._along(output, chunk) for chunk in torch.split(slopes.to(output), at_once)]
        return {part: torch.cat([chunk[part] for chunk in chunks]) for part in chunks[0]}

    def _along(self, output: Tensor, slopes: Tensor) -> dict[Part, Tensor]:
        # Each gradient has a leaf's shape behind a first axis of sums.
        tensors = [leaf.tensor for leaf in self.leaves]
        gradients = torch.autograd.grad(
            output, tensors, slopes, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
        sums: dict[Part, Tensor] = {}
        for leaf, slope in zip(self.leaves, gradients, strict=True):
            if slope is None:
                continue
            products = leaf.value.detach().double() * slope.double()
            # (sum, row, part); OPT's networks are given all texts in one row.
            of_parts = products.reshape(len(slope), self.n_rows, len(leaf.parts), -1).sum(3)
            for part, added in zip(leaf.parts, of_parts.unbind(2), strict=True):
                sums[part] = sums[part] + added if part in sums else added
        return sums


class ScoreRuns:
    """Runs a model so that queries and keys are sums over parts."""

    def __init__(self, model: Model) -> None:
        require_seam(model.info, "what its queries and keys are made of")
        require_gradients(model)
        self._model = model
        self._latest: Place = ("encoder", 0)
        # Linear maps by what they do: projections read the stream, outputs write what heads put out to it.
        roots = list(model.modules())
        modules = modules_of(roots)
        blocks = model.blocks()
        inside = set(modules_of(blocks.values()))
        linear = linear_maps(roots)
        self._projections, outputs = self._watch_once()
        # Feed-forward networks are cut off as wholes: every other map in a block, and experts, which are no maps.
        experts = [m for m in inside if any(weight.ndim > 2 for weight in m.parameters(recurse=False))]
        self._branches = [m for m in linear if m in inside and m not in outputs and m not in self._projections]
        self._branches += experts
        head = model.unembedding()
        self._adding = [m for m in linear if m not in self._branches and m is not head]
        self._embeddings = [m for m in modules if isinstance(m, nn.Embedding)]
        # Norms are found by measuring every module without children that is no linear map.
        leaves = [m for m in modules if is_leaf(m) and m not in set(linear)]
        with torch.no_grad():
            norms = {m: measure_norm(m) for m in leaves}
        self._norms = {module: norm for module, norm in norms.items() if norm is not None}
        # Where the stream starts, and which layers each module belongs to.
        self._first = list(dict.fromkeys(block for (_, layer), block in blocks.items() if layer == 0))
        self._layers: dict[nn.Module, set[Place]] = {}
        for place, block in blocks.items():
            for module in block.modules():
                self._layers.setdefault(module, set()).add(place)

    def _watch_once(self) -> tuple[set[nn.Module], set[nn.Module]]:
        """Return the projections, which run in a block before its attention, and the output projections."""
        model = self._model
        watch = OutputWatch()
        since: list[nn.Module] = []
        projections: set[nn.Module] = set()
        n_calls = 0

        def look(module: nn.Module, inputs: tuple[Any, ...], result: Any) -> None:
            since.append(module)
            watch.look(module, inputs, result)

        def observe(call: AttentionCall) -> Tensor:
            nonlocal n_calls
            n_calls += 1
            projections.update(since)
            output = attend(call)
            watch.expect((call.kind, call.layer), output)
            return output

        blocks = dict.fromkeys(model.blocks().values())
        with (
            torch.no_grad(),
            hooks(linear_maps(model.modules()), look),
            hooks(blocks, lambda *_: since.clear(), before=True),
        ):
            model.run(example_batch(model), observe)
        if len(watch.modules) < n_calls:
            raise AttnscopeError(
                f"no linear map of {model.info.name} is fed just what the heads of every layer put out: what they "
                "write cannot be told apart",
                "its effect can still be seen: attnscope ablate",
            )
        outputs = set(watch.modules.values())
        return projections - outputs, outputs

    def trace(self, batch: Batch, places: Collection[Place]) -> TracedScores:
        """Run a batch, and keep the gradient paths to the queries and keys of the attentions at `places`."""
        traced = TracedScores(len(batch.ids))

        def observe(call: AttentionCall) -> Tensor:
            self._latest = (call.kind, call.layer)
            with torch.no_grad():
                output = attend(call)
            if self._latest in places:
                traced.calls[self._latest] = call
            # One leaf for all heads of the layer: (row, head, query, d_value).
            leaf = output.detach().requires_grad_()
            name = f"{self._prefix(call.kind)}L{call.layer}"
            heads = [Part(f"{name}H{head}", "head", call.layer, head) for head in range(call.n_heads)]
            traced.leaves.append(_Leaf(tuple(heads), leaf, leaf))
            return leaf

        with self._watch(batch, traced):
            self._model.run(batch, observe)
        return traced

    def _prefix(self, kind: str) -> str:
        """Return the prefix that tells the parts of two stacks apart; "" for a model of one stack."""
        return f"{kind} " if len(self._model.info.kinds) > 1 else ""

    @contextlib.contextmanager
    def _watch(self, batch: Batch, traced: TracedScores) -> Iterator[None]:
        """Within it, whatever adds to the stream in a run of the model on the batch becomes a leaf."""

        def add_leaf(part: Part, tensor: Tensor, value: Tensor | None = None) -> Tensor:
            leaf = tensor.detach().requires_grad_()
            traced.leaves.append(_Leaf((part,), leaf, leaf if value is None else value))
            return leaf

        def bias_at(module: nn.Module, output: Tensor, bias: Tensor | None) -> Tensor:
            if bias is None:
                return output
            name = PROJECTION_BIAS if module in self._projections else OTHER_BIASES
            return output + add_leaf(Part(name, "bias"), torch.zeros_like(output), bias.detach().expand_as(output))

        def branch(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            # A module that several layers share belongs to the layer whose attention ran last.
            places = self._layers.get(module, set())
            layers = {layer for _, layer in places}
            kind, layer = min(places) if len(layers) == 1 else self._latest
            return add_leaf(Part(f"{self._prefix(kind)}L{layer} MLP", "MLP", layer), output)

        def embed(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            # Positions are looked up once for all texts; a leaf a text, so that each has a slope of its own.
            n = len(batch.ids)
            is_shared = output.ndim == 2 or (output.ndim == 3 and len(output) == 1 < n)
            apart = output.detach().expand(n, *output.shape[-2:]).clone() if is_shared else output
            return add_leaf(Part(_name_embedding(inputs[0] if inputs else None, output, batch), "embedding"), apart)

        def enter(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            # Embeddings handed over as vectors, or added by plain code, have no path yet.
            hidden = hidden_input(inputs, named)
            if hidden is not None and not hidden.requires_grad:
                traced.leaves.append(_Leaf((Part(EMBEDDED, "embedding"),), hidden.requires_grad_(), hidden))

        def normalise(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            # Freeze the length: the factor `by` is the one that gives the actual output, (…, 1).
            norm = self._norms[module]
            x = inputs[0] - inputs[0].mean(-1, keepdim=True) if norm.centres else inputs[0]
            gained = x * norm.gain.to(x)
            exact = (output - norm.bias.to(output)).detach()
            by = (exact * gained.detach()).sum(-1, keepdim=True) / gained.detach().square().sum(-1, keepdim=True)
            linear = gained * by.nan_to_num(0)
            return bias_at(module, linear + norm.bias.to(output), norm.bias)

        def add(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            bias: Any = getattr(module, "bias", None)
            return bias_at(module, output, bias)

        with (
            torch.enable_grad(),
            hooks(self._branches, _detach, before=True),
            hooks(self._branches, branch),
            hooks(self._embeddings, embed),
            hooks(self._first, enter, before=True),
            hooks(self._norms, normalise),
            hooks(self._adding, add),
        ):
            yield


def _name_embedding(ids: Any, output: Tensor, batch: Batch) -> str:
    """Return which embedding gave this: that of the tokens, one that differs at every place, or neither."""
    if isinstance(ids, Tensor) and ids.shape == batch.ids.shape and torch.equal(ids, batch.ids.to(ids.device)):
        return TOKENS
    differs = (output[..., 1:, :] != output[..., :-1, :]).any(-1)
    return POSITIONS if bool(differs.all()) else SEGMENTS


def _detach(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
    return tree_map_only(Tensor, Tensor.detach, (inputs, named))


def require_gradients(model: Model) -> None:
    """Raise AttnscopeError for a model whose weights were made in inference mode: no gradients flow through it."""
    if any(weight.is_inference() for root in model.modules() for weight in root.parameters()):
        raise AttnscopeError(
            f"the weights of {model.info.name} were made in torch.inference_mode(), and keep no gradients",
            "load the model outside of it, or within torch.no_grad()",
        )
