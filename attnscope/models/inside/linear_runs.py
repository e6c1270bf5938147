"""A run of a model in which nothing but the stream and the norms on it is followed: what each part adds flows on alone.

Attention and feed-forward networks are cut off: what they write stands for itself, a leaf of the graph. Embeddings and
biases are leaves too. Norms are linear once the length that they divided by is frozen. So whatever the model computes
from the stream is a sum over leaves, each times its slope, and no path of the stream need be known. Projections can be
let through to the seam of an attention: then its queries and keys are such sums, turned by rotary positions as they
were.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import AttentionCall, Probe, attend
from attnscope.errors import AttnscopeError
from attnscope.models.inside.projections import OutputWatch, hidden_input, hooks, is_leaf, linear_maps, modules_of
from attnscope.models.inside.stream import Norm, measure_norm
from attnscope.models.model import Batch, Model, example_batch

TOKENS = "tokens"
POSITIONS = "positions"
SEGMENTS = "segments"
EMBEDDED = "embeddings"
"""What embeddings are called; EMBEDDED is what enters the stream where no embedding is a module."""


@dataclass(frozen=True, eq=False)
class Bias:
    """A bias that is added to the stream, or to what reads it."""

    leaf: Tensor  # zeros where it is added
    value: Tensor  # the bias
    projects: bool  # whether it is a projection's on the way to the seam


@dataclass(frozen=True, eq=False)
class Leaves:
    """What the parts of a model added to its stream in one run; each tensor carries a slope.

    Attributes:
        heads: Place -> what its heads put out, (batch, head, query, d_value).
        networks: What feed-forward networks gave, each with the place of the attention of its layer.
        embedded: What embeddings gave, each with its name: TOKENS, POSITIONS, SEGMENTS or EMBEDDED.
        biases: Biases of norms, output projections and whatever else adds one.
    """

    heads: dict[Place, Tensor] = field(default_factory=dict)
    networks: list[tuple[Place, Tensor]] = field(default_factory=list)
    embedded: list[tuple[str, Tensor]] = field(default_factory=list)
    biases: list[Bias] = field(default_factory=list)

    def tensors(self) -> list[Tensor]:
        """All leaves."""
        return [
            *self.heads.values(),
            *(leaf for _, leaf in self.networks),
            *(leaf for _, leaf in self.embedded),
            *(bias.leaf for bias in self.biases),
        ]


class LinearRuns:
    """Runs a model so that what its parts add to the stream can be followed, part by part.

    The model's attention passes the seam. Projections to queries and keys are followed.
    """

    def __init__(self, model: Model) -> None:
        require_gradients(model)
        self._model = model
        roots = list(model.modules())
        modules = modules_of(roots)
        blocks = model.blocks()
        inside = set(modules_of(blocks.values()))
        linear = linear_maps(roots)
        outputs, attentions = self._watch_once()
        within = set(modules_of(attentions))
        self._projections = {m for m in linear if m in within and m not in outputs}
        experts = [m for m in inside if any(weight.ndim > 2 for weight in m.parameters(recurse=False))]
        self._branches = [m for m in linear if m in inside and m not in outputs and m not in self._projections]
        self._branches += experts
        head = model.unembedding()
        self._adding = [m for m in linear if m not in self._branches and m is not head]
        self._embeddings = [m for m in modules if isinstance(m, nn.Embedding)]
        leaves = [m for m in modules if is_leaf(m) and m not in set(linear)]
        with torch.no_grad():
            norms = {m: _try_norm(m) for m in leaves}
        self._norms = {module: norm for module, norm in norms.items() if norm is not None}
        self._first = list(dict.fromkeys(block for (_, layer), block in blocks.items() if layer == 0))
        self._layers: dict[nn.Module, set[Place]] = {}
        for place, block in blocks.items():
            for module in block.modules():
                self._layers.setdefault(module, set()).add(place)

    def _watch_once(self) -> tuple[set[nn.Module], set[nn.Module]]:
        """Return the output projections, and the innermost modules that run around each attention."""
        model = self._model
        watch = OutputWatch()
        modules = [module for module in modules_of(model.modules()) if not is_leaf(module)]
        around: list[nn.Module] = []
        attentions: set[nn.Module] = set()
        n_calls = 0

        def observe(call: AttentionCall) -> Tensor:
            nonlocal n_calls
            n_calls += 1
            output = attend(call)
            watch.expect((call.kind, call.layer), output)
            attentions.update(around[-1:])
            return output

        def leave(module: nn.Module, inputs: Any, result: Any) -> None:
            del around[-1:]

        with (
            torch.no_grad(),
            hooks(linear_maps(model.modules()), watch.look),
            hooks(modules, lambda module, inputs, named: around.append(module), before=True),
            hooks(modules, leave),
        ):
            model.run(example_batch(model), observe)
        if len(watch.modules) < n_calls:
            raise AttnscopeError(
                f"no linear map of {model.info.name} is fed just what the heads of every layer put out: what they "
                "write cannot be told apart",
                "its effect can still be seen: attnscope ablate",
            )
        return set(watch.modules.values()), attentions

    @contextlib.contextmanager
    def watch(self, batch: Batch, probe: Probe) -> Iterator[tuple[Leaves, Probe]]:
        """Within it, a run of the model on the batch, with the probe that is given back, fills the leaves."""
        leaves = Leaves()
        last: list[Place] = []

        def observe(call: AttentionCall) -> Tensor:
            output = probe(call).detach().requires_grad_()
            last[:] = [(call.kind, call.layer)]
            leaves.heads[last[0]] = output
            return output

        def bias_at(module: nn.Module, output: Tensor, bias: Tensor | None) -> Tensor:
            if bias is None:
                return output
            zero = torch.zeros_like(output, requires_grad=True)
            leaves.biases.append(Bias(zero, bias.detach(), module in self._projections))
            return output + zero

        def branch(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            places = self._layers.get(module, set())
            own = {layer for _, layer in places}
            place = min(places) if len(own) == 1 else (last or [("encoder", 0)])[0]
            leaves.networks.append((place, output.detach().requires_grad_()))
            return leaves.networks[-1][1]

        def embed(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            # Positions are looked up once for all texts; a leaf a text, so that each has a slope of its own.
            n = len(batch.ids)
            alike = output.ndim == 2 or (output.ndim == 3 and len(output) == 1 < n)
            apart = output.detach().expand(n, *output.shape[-2:]).clone() if alike else output.detach()
            name = _name_embedding(inputs[0] if inputs else None, output, batch)
            leaves.embedded.append((name, apart.requires_grad_()))
            return apart

        def enter(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            hidden = hidden_input(inputs, named)
            if hidden is not None and not hidden.requires_grad:
                leaves.embedded.append((EMBEDDED, hidden.requires_grad_()))

        def normalise(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
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
            yield leaves, observe


def _name_embedding(ids: Any, output: Tensor, batch: Batch) -> str:
    """Return which embedding gave this: that of the tokens, one that differs at every place, or neither."""
    if isinstance(ids, Tensor) and ids.shape == batch.ids.shape and torch.equal(ids, batch.ids.to(ids.device)):
        return TOKENS
    differs = (output[..., 1:, :] != output[..., :-1, :]).any(-1)
    return POSITIONS if bool(differs.all()) else SEGMENTS


def _detach(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
    def cut_off(value: Any) -> Any:
        return value.detach() if isinstance(value, Tensor) else value

    return tuple(map(cut_off, inputs)), {name: cut_off(value) for name, value in named.items()}


def require_gradients(model: Model) -> None:
    """Refuse a model through which no gradients flow."""
    if any(weight.is_inference() for root in model.modules() for weight in root.parameters()):
        raise AttnscopeError(
            f"the weights of {model.info.name} were made in torch.inference_mode(), and keep no gradients",
            "load the model outside of it, or within torch.no_grad()",
        )


def _try_norm(module: nn.Module) -> Norm | None:
    """Return a module as a norm; None for what is none, or takes no vectors."""
    try:
        return measure_norm(module)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
