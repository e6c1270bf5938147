"""What each head adds to a logit by itself: the direct path from its output to the unembedding.

Norms on that path are linear once the length that they divided by is taken as it was; so is an activation in a head
for masked words, once the factor that it applied is. Then a logit is a sum: of what each head wrote, of what the
feed-forward networks wrote, of embeddings, and of biases. The parts are found by one backward pass in which nothing
else is let through, so that no path of the residual stream need be known.

Source: Elhage et al. 2021 (direct path); the name: Wang et al. 2023, Nostalgebraist 2020 for the last norm.
"""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import AttentionCall, Probe, attend
from attnscope.errors import AttnscopeError, require_rounding
from attnscope.models.inside.projections import OutputWatch, hooks, linear_maps, weight_of
from attnscope.models.inside.stream import Norm, measure_norm
from attnscope.models.model import Batch, Model, ModelInfo, example_tokens

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
        require_gradients(model)
        self._model, self._head = model, head
        rows = weight_of(head)
        if rows is None:
            raise AttnscopeError(
                f"the unembedding of {info.name} is quantised: nothing can be said of what its heads write",
                "name the checkpoint with unquantised weights",
            )
        self._rows = rows.detach()
        self._mean = self._rows.float().mean(0)
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
        """Runs a batch and takes the logits of answers apart; see `trace` and `Traced.parts`."""
        return self.trace(batch, rows, places, probe).parts(answers)

    def trace(self, batch: Batch, rows: Tensor, places: Tensor, probe: Probe = attend) -> "Traced":
        """Runs a batch, and keeps the direct paths to the logits of its predictions.

        Args:
            batch: Token numbers.
            rows: The row of each prediction.
            places: The token of each, once in a row.
            probe: What computes attention.
        """
        written: dict[Place, Tensor] = {}
        added: list[Tensor] = []  # leaves that stand for what networks and embeddings gave
        fixed: list[tuple[Tensor, Tensor]] = []  # a leaf of zeros, and the bias that is added there
        embedded: list[Tensor] = []
        last: list[tuple[Tensor, Tensor]] = []  # what the unembedding was given, and its logits

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

        def head(module: nn.Module, given: tuple[Any, ...], gave: Tensor) -> None:
            last.append((given[0], gave.detach()))

        with torch.enable_grad(), contextlib.ExitStack() as stack:
            stack.enter_context(hooks(self._branches, _detach, before=True))
            stack.enter_context(hooks(self._branches, branch))
            stack.enter_context(hooks(self._embeddings, embed))
            stack.enter_context(hooks(self._norms, normalise))
            stack.enter_context(hooks(self._activations, gate))
            stack.enter_context(hooks(self._adding, lambda module, given, gave: bias_at(gave, module.bias)))
            stack.enter_context(hooks([self._head], head))
            self._model.outputs(batch, observe)
            hidden = last[-1][0][rows, places]
        logits = last[-1][1][rows, places].float()
        return Traced(
            self._head, self._rows, self._mean, self._model.info, written, added, embedded, fixed, hidden, logits,
            rows, places, len(batch.ids),
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Traced:
    """A batch that was run, with the direct paths to the logits of its predictions.

    Attributes:
        unembedding: The linear map that gives logits.
        tokens: Its rows, (vocabulary, d_model).
        mean: Their mean.
        info: Of the model.
        written: Place -> what its heads put out, (batch, head, query, d_value).
        added: What feed-forward networks gave.
        embedded: What embeddings gave.
        fixed: Zeros where biases are added, and those biases.
        hidden: What the unembedding was given, (prediction, d_model).
        logits: What it gave, (prediction, vocabulary).
        rows: The row of each prediction.
        places: The token of each.
        n_rows: Rows of the batch.
    """

    unembedding: nn.Module
    tokens: Tensor
    mean: Tensor
    info: ModelInfo
    written: dict[Place, Tensor]
    added: list[Tensor]
    embedded: list[Tensor]
    fixed: list[tuple[Tensor, Tensor]]
    hidden: Tensor
    logits: Tensor
    rows: Tensor
    places: Tensor
    n_rows: int

    def parts(self, tokens: Tensor) -> Parts:
        """What the logits of tokens are sums of, one token of each prediction.

        Raises:
            AttnscopeError: The parts do not add up to the logits: something adds to the stream that is not known.
        """
        own = self.logits.gather(-1, tokens[:, None].to(self.logits.device))[:, 0] - self.logits.mean(-1)
        leaves = [*self.written.values(), *self.added, *self.embedded, *(zero for zero, _ in self.fixed)]
        slopes = self._slopes(tokens, leaves)

        def total(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
            """Sum of values along their slopes at each prediction."""
            found = torch.zeros_like(own)
            for value, leaf in pairs:
                if (slope := slopes[id(leaf)]) is not None:
                    product = (value.detach() * slope).float().sum(-1)
                    # OPT's networks are given all texts in one row.
                    found = found + product.reshape(self.n_rows, -1)[self.rows, self.places]
            return found

        heads = {
            place: self.at((output.detach() * _or_zero(slopes[id(output)], output)).float().sum(-1))
            for place, output in self.written.items()
        }
        found = Parts(
            own,
            heads,
            total((leaf, leaf) for leaf in self.added),
            total((leaf, leaf) for leaf in self.embedded),
            total((bias, zero) for zero, bias in self.fixed) + self._bias_of(tokens, own),
        )
        self._require_sum(found)
        return found

    def slopes(self, tokens: Tensor) -> dict[Place, Tensor]:
        """By how much what heads put out raises the logits of tokens, one token of each prediction.

        Returns:
            Place -> (batch, head, query, d_value): the slope of a logit, less the vocabulary's mean, along what a head
            puts out at the token where it is predicted; 0 elsewhere.
        """
        found = self._slopes(tokens, list(self.written.values()))
        return {place: _or_zero(found[id(output)], output).float() for place, output in self.written.items()}

    def at(self, values: Tensor) -> Tensor:
        """(batch, head, query) -> the predictions', (prediction, head)."""
        return values.movedim(1, -1)[self.rows, self.places]

    def _slopes(self, tokens: Tensor, leaves: list[Tensor]) -> dict[int, Tensor | None]:
        """By the leaf's identity; None where no path leads from it."""
        along = self.tokens[tokens.to(self.tokens.device)].float() - self.mean
        given = torch.autograd.grad(self.hidden, leaves, along.to(self.hidden), retain_graph=True, allow_unused=True)
        return dict(zip(map(id, leaves), given, strict=True))

    def _bias_of(self, tokens: Tensor, like: Tensor) -> Tensor:
        bias = getattr(self.unembedding, "bias", None)
        if not isinstance(bias, Tensor):
            return torch.zeros_like(like)
        return (bias.detach().float()[tokens.to(bias.device)] - bias.detach().float().mean()).to(like)

    def _require_sum(self, found: Parts) -> None:
        off = float((found.total - found.logits).abs().max()) if len(found.logits) else 0.0
        parts = [
            part.abs().max() for part in (*found.heads.values(), found.feed_forward, found.embeddings, found.logits)
        ]
        size = float(torch.stack([one.to("cpu") for one in parts]).max()) if len(found.logits) else 1.0
        allowed = max(_TOLERANCE, 64 * torch.finfo(getattr(torch, self.info.dtype)).eps) * max(size, 1.0)
        require_rounding(
            f"something else adds to the stream of {self.info.name}: its logits differ from the sum of what its heads, "
            "its feed-forward networks, its embeddings and biases add",
            off,
            allowed,
            "what its heads do can still be seen: attnscope ablate",
        )


def _detach(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
    return tuple(one.detach() if isinstance(one, Tensor) else one for one in given), named


def require_gradients(model: Model) -> None:
    """Refuses a model through which no gradients flow.

    Raises:
        AttnscopeError: Its weights were made in `torch.inference_mode`.
    """
    if any(weight.is_inference() for root in model.modules() for weight in root.parameters()):
        raise AttnscopeError(
            f"the weights of {model.info.name} were made in torch.inference_mode(), and keep no gradients",
            "make the model outside of that, or within torch.no_grad()",
        )


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
