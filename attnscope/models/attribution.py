"""What each head adds to a logit by itself: the direct path from its output to the unembedding.

Norms on that path are linear once the length that they divided by is taken as it was; so is an activation in a head
for masked words, once the factor that it applied is. Then a logit is a sum: of what each head wrote, of what the
feed-forward networks wrote, of embeddings, and of biases. The parts are found by one backward pass in which nothing
else is let through, so that no path of the residual stream need be known.

Source: Elhage et al. 2021 (direct path); the name: Wang et al. 2023, Nostalgebraist 2020 for the last norm.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnscope.core.attention import AttentionCall, Probe, attend
from attnscope.core.probes import Place
from attnscope.errors import AttnscopeError
from attnscope.models.model import Batch, Model, example_tokens
from attnscope.models.projections import OutputWatch, hooks, linear_maps
from attnscope.models.stream import Norm, measure_norm

_TOLERANCE = 1e-3
"""Of the size of a logit's parts: how far their sum may be off before it is said that a part is not known."""


@dataclass(frozen=True, eq=False)
class Parts:
    """What logits are sums of; each logit less the mean over the vocabulary.

    Attributes:
        logits: The answers' logits, (prediction,), as the unembedding gives them, before any cap or scale.
        heads: Place -> what each head adds, (prediction, head).
        feed_forward: What the feed-forward networks add, (prediction,).
        embeddings: What embeddings add, (prediction,).
        biases: What the biases of output projections, of norms and of the head for words add, (prediction,).
    """

    logits: Tensor
    heads: dict[Place, Tensor]
    feed_forward: Tensor
    embeddings: Tensor
    biases: Tensor

    @property
    def total(self) -> Tensor:
        """The sum of all parts."""
        heads: Tensor = sum((part.sum(-1) for part in self.heads.values()), torch.zeros_like(self.logits))
        return heads + self.feed_forward + self.embeddings + self.biases


class DirectPaths:
    """The direct paths of a model that predicts words.

    Raises:
        AttnscopeError: It predicts none, its attention does not pass the seam, or where it adds to its stream is not
            known.
    """

    def __init__(self, model: Model) -> None:
        info, head = model.info, model.unembedding()
        if head is None or model.loss not in ("causal", "masked") or info.path != "seam":
            raise AttnscopeError(
                f"{info.name} does not predict words one by one through attention that can be seen: nothing can be "
                "said of what its heads write",
                "choose a decoder, or an encoder with its head for masked words",
            )
        self._model, self._head = model, head
        self._outputs = self._find_outputs()
        roots = [*model.modules(), head]
        whole = getattr(getattr(model, "network", None), "model", None)  # with what it has on top
        if isinstance(whole, nn.Module):
            roots.append(whole)
        modules = list(dict.fromkeys(module for root in roots for module in root.modules()))
        inside = {m for block in model.blocks().values() for m in block.modules()}
        linear = list(dict.fromkeys(linear_maps(roots)))
        self._branches = [m for m in linear if m in inside and m not in self._outputs]
        self._adding = [m for m in linear if m not in self._branches and m is not head]
        self._embeddings = [m for m in modules if isinstance(m, nn.Embedding)]
        leaves = [m for m in modules if not any(True for _ in m.children()) and m not in set(linear)]
        with torch.no_grad():
            found = {m: _try_norm(m, info.d_model) for m in leaves}
        self._norms = {module: norm for module, norm in found.items() if norm is not None}
        known = {*self._norms, *self._embeddings}
        base = {m for root in model.modules() for m in root.modules()}
        self._activations = [m for m in leaves if m not in base and m not in known and not list(m.parameters())]

    def _find_outputs(self) -> set[nn.Module]:
        """The output projections."""
        model, watch = self._model, OutputWatch()
        ids = torch.from_numpy(example_tokens(model.tokenizer).ids.astype("int64"))[None]
        n_calls = 0

        def observe(call: AttentionCall) -> Tensor:
            nonlocal n_calls
            n_calls += 1
            output = attend(call)
            watch.expect((call.kind, call.layer), output)
            return output

        with torch.no_grad(), hooks(linear_maps(model.modules()), watch.look):
            model.run(Batch(ids), observe)
        if len(watch.found) < n_calls:
            raise AttnscopeError(
                f"no linear map of {model.info.name} is fed just what the heads of every layer put out: what they "
                "write cannot be told apart",
                "its effect can still be seen: attnscope ablate",
            )
        return set(watch.found.values())

    def run(self, batch: Batch, rows: Tensor, places: Tensor, answers: Tensor, probe: Probe = attend) -> Parts:
        """Runs a batch and takes the logits of answers apart.

        Args:
            batch: Token numbers.
            rows: The row of each prediction.
            places: The token of each.
            answers: The token whose logit is taken.
            probe: What computes attention.

        Raises:
            AttnscopeError: The parts do not add up to the logits: something adds to the stream that is not known.
        """
        written: dict[Place, Tensor] = {}
        added: list[Tensor] = []  # leaves that stand for what networks and embeddings gave
        fixed: list[tuple[Tensor, Tensor]] = []  # a leaf of zeros, and the bias that is added there
        embedded: list[Tensor] = []
        logits: list[Tensor] = []

        def observe(call: AttentionCall) -> Tensor:
            output = probe(call).detach().requires_grad_()
            written[call.kind, call.layer] = output
            return output

        def bias_at(gave: Tensor, bias: Tensor | None) -> Tensor:
            if bias is None:
                return gave
            zero = torch.zeros_like(gave, requires_grad=True)
            fixed.append((zero, bias.detach()))
            return gave + zero

        def branch(module: nn.Module, given: Any, gave: Tensor) -> Tensor:
            added.append(gave.detach().requires_grad_())
            return added[-1]

        def embed(module: nn.Module, given: Any, gave: Tensor) -> Tensor:
            # Positions are looked up once for all texts; a leaf a text, so that each has a slope of its own.
            n = len(batch.ids)
            alike = gave.ndim == 2 or (gave.ndim == 3 and len(gave) == 1 < n)
            apart = gave.detach().expand(n, *gave.shape[-2:]).clone() if alike else gave.detach()
            embedded.append(apart.requires_grad_())
            return embedded[-1]

        def normalise(module: nn.Module, given: tuple[Any, ...], gave: Tensor) -> Tensor:
            norm = self._norms[module]
            x = given[0] - given[0].mean(-1, keepdim=True) if norm.centres else given[0]
            gained = x * norm.gain.to(x)
            exact = (gave - norm.bias.to(gave)).detach()
            by = (exact * gained.detach()).sum(-1, keepdim=True) / gained.detach().square().sum(-1, keepdim=True)
            linear = gained * by.nan_to_num(0)
            return bias_at(linear + norm.bias.to(gave), norm.bias)

        def gate(module: nn.Module, given: tuple[Any, ...], gave: Tensor) -> Tensor:
            x = given[0]
            factor = torch.where(x.abs() < 1e-12, torch.zeros_like(x), gave / torch.where(x == 0, 1.0, x))
            passed: Tensor = x * factor.detach()
            return passed

        def head(module: nn.Module, given: Any, gave: Tensor) -> None:
            logits.append(gave)

        with torch.enable_grad(), contextlib.ExitStack() as stack:
            for module in self._branches:
                stack.callback(module.register_forward_pre_hook(_detach).remove)
            stack.enter_context(hooks(self._branches, branch))
            stack.enter_context(hooks(self._embeddings, embed))
            stack.enter_context(hooks(self._norms, normalise))
            stack.enter_context(hooks(self._activations, gate))
            stack.enter_context(hooks(self._adding, lambda module, given, gave: bias_at(gave, module.bias)))
            stack.enter_context(hooks([self._head], head))
            self._model.outputs(batch, observe)
            chosen = logits[-1][rows, places].float()
            own = chosen.gather(-1, answers[:, None].to(chosen.device))[:, 0] - chosen.mean(-1)
            leaves = [*written.values(), *added, *embedded, *(zero for zero, _ in fixed)]
            slopes = torch.autograd.grad(own.sum(), leaves, allow_unused=True)
        slope_of = dict(zip(map(id, leaves), slopes, strict=True))

        n_rows = len(batch.ids)
        heads = {place: _at(output.detach() * _or_zero(slope_of[id(output)], output), rows, places, 1)
                 for place, output in written.items()}  # fmt: skip
        found = Parts(
            own.detach(),
            heads,
            _sum_at([(leaf.detach(), slope_of[id(leaf)]) for leaf in added], own, n_rows, rows, places),
            _sum_at([(leaf.detach(), slope_of[id(leaf)]) for leaf in embedded], own, n_rows, rows, places),
            _sum_at([(bias, slope_of[id(zero)]) for zero, bias in fixed], own, n_rows, rows, places)
            + self._bias_of_answers(answers, own),
        )
        self._require_sum(found)
        return found

    def _bias_of_answers(self, answers: Tensor, like: Tensor) -> Tensor:
        bias = getattr(self._head, "bias", None)
        if not isinstance(bias, Tensor):
            return torch.zeros_like(like)
        return (bias.detach().float()[answers.to(bias.device)] - bias.detach().float().mean()).to(like)

    def _require_sum(self, found: Parts) -> None:
        off = float((found.total - found.logits).abs().max()) if len(found.logits) else 0.0
        parts = [
            part.abs().max() for part in (*found.heads.values(), found.feed_forward, found.embeddings, found.logits)
        ]
        size = float(torch.stack([one.to("cpu") for one in parts]).max()) if len(found.logits) else 1.0
        allowed = max(_TOLERANCE, 64 * torch.finfo(getattr(torch, self._model.info.dtype)).eps) * max(size, 1.0)
        if not off <= allowed:
            raise AttnscopeError(
                f"the logits of {self._model.info.name} are not the sum of what its heads, its feed-forward networks, "
                f"its embeddings and biases add (off by {off:.2g}): something else adds to its stream",
                "what its heads do can still be seen: attnscope ablate",
            )


def _detach(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(one.detach() if isinstance(one, Tensor) else one for one in given)


def _try_norm(module: nn.Module, width: int) -> Norm | None:
    """A module as a norm of the stream's width; None for what is none, or takes no vectors."""
    weight = next(iter(module.parameters()), None)
    if weight is None or weight.shape != (width,):
        return None
    try:
        return measure_norm(module)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None


def _or_zero(slope: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if slope is None else slope


def _at(product: Tensor, rows: Tensor, places: Tensor, heads_axis: int) -> Tensor:
    """(batch, head, query, d) -> what each head adds to each prediction, (prediction, head)."""
    return product.float().sum(-1).movedim(heads_axis, -1)[rows, places]


def _sum_at(pairs: list[tuple[Tensor, Tensor | None]], like: Tensor, n: int, rows: Tensor, places: Tensor) -> Tensor:
    """Sum of values along their slopes at each prediction, of n rows."""
    total = torch.zeros_like(like)
    for value, slope in pairs:
        if slope is None:
            continue
        product = (value * slope).float().sum(-1)
        total = total + product.reshape(n, -1)[rows, places]  # OPT's networks are given all texts in one row
    return total
