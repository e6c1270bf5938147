"""Attention of any torch module: calls of scaled_dot_product_attention and nn.MultiheadAttention pass the seam.

A `TorchFunctionMode` catches them, in this thread alone. While a mode is active, torch leaves out the fast path of
nn.MultiheadAttention and nn.TransformerEncoderLayer. Hooks tell which module runs. A module that multiplies queries by
keys itself cannot be seen.
"""

import contextlib
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import AttentionCall, Probe, attend_with_weights, attention_weights
from attnscope.errors import AttnscopeError, require_rounding
from attnscope.models.devices import device_of, fork_rng
from attnscope.models.hf.seam import mask_and_bias, use_attention
from attnscope.models.inputs.labels import Sample

_TIMES = 64
"""Allowed difference of two ways to compute one attention, in units of rounding of the largest value."""


@dataclass(frozen=True, eq=False)
class SeenCall:
    """One attention of a forward pass."""

    path: str  # the name of the module that computes it, such as "layers.0.self_attn"; "" = the whole
    shape: tuple[int, int, int]  # sequences, queries and keys
    n_heads: tuple[int, int]  # query heads, and key/value heads
    hides_later: bool  # whether no query attends to a later key


@dataclass(eq=False)
class Rehearsal:
    """What a forward pass without a plan showed: its attentions, in the order of computation.

    And modules that compute a softmax of four dimensions, or of square matrices, outside these.
    """

    calls: list[SeenCall] = field(default_factory=list)
    softmaxes: list[str] = field(default_factory=list)


class _Catch(TorchFunctionMode):
    """Hands each attention to `do`, with the name of the module that computes it."""

    def __init__(self, do: Callable[[str, AttentionCall, Callable[[], Tensor]], Tensor], softmaxes: list[str]) -> None:
        super().__init__()
        self.running: list[str] = []
        self._do = do
        self._softmaxes = softmaxes

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if function is F.multi_head_attention_forward:
            return self._multi_head(*args, **kwargs)
        result = function(*args, **kwargs)
        if getattr(function, "__name__", "") == "softmax" and isinstance(result, Tensor):
            is_square = result.ndim > 2 and result.shape[-1] == result.shape[-2]
            if is_square or result.ndim > 3:
                self._softmaxes.append(self._path)
        return result

    @property
    def _path(self) -> str:
        return self.running[-1] if self.running else ""

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """As torch's scaled_dot_product_attention, by the seam."""

        def own() -> Tensor:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )

        lead: Any = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])  # type: ignore[no-untyped-call]

        def as_heads(tensor: Tensor) -> Tensor:
            if tensor.ndim == 3:  # one head, or heads that the module has folded into the batch
                return tensor[:, None]
            return tensor.expand(*lead, *tensor.shape[-3:]).flatten(0, -4)

        if query.ndim < 3:
            raise AttnscopeError(f"{self._path or 'the module'} attends over {query.ndim} dimensions, without a batch")
        mask, bias = mask_and_bias(attn_mask, query.dtype)
        if query.ndim == 3 and attn_mask is not None and attn_mask.ndim == 3:
            mask, bias = (each if each is None else each[:, None] for each in (mask, bias))
        if attn_mask is not None and attn_mask.ndim > 4:
            full = (*lead, *attn_mask.shape[-3:])
            mask, bias = (each if each is None else each.expand(full).flatten(0, -4) for each in (mask, bias))
        try:
            call = AttentionCall(
                0,
                "encoder",
                as_heads(query),
                as_heads(key),
                as_heads(value),
                query.shape[-1] ** -0.5 if scale is None else float(scale),
                mask,
                is_causal,
                bias,
            )
        except (ValueError, TypeError, RuntimeError) as error:
            raise AttnscopeError(
                f"{self._path or 'the module'} attends in a form that is not known: {error}"
            ) from error
        output = self._do(self._path, call, own)
        return output[:, 0] if query.ndim == 3 else output.reshape(*lead, *output.shape[1:])

    def _multi_head(self, *args: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        """As torch's multi_head_attention_forward, whose attention is always computed by the seam."""
        bound = _SIGNATURE.bind(*args, **named)
        bound.apply_defaults()
        needs_weights = bound.arguments["need_weights"]
        weights: list[Tensor] = []

        def watch(*tensors: Any, **options: Any) -> Tensor:
            do = self._do

            def keep(path: str, call: AttentionCall, own: Callable[[], Tensor]) -> Tensor:
                weights.append(attention_weights(call))
                return do(path, call, own)

            self._do = keep if needs_weights else do
            try:
                return self._attend(*tensors, **options)
            finally:
                self._do = do

        if needs_weights:  # with weights torch reads the mask alone, without them the flag alone
            bound.arguments.update(need_weights=False, is_causal=False)
        inner = {**vars(F), "has_torch_function": lambda _: False, "scaled_dot_product_attention": watch}
        forward = types.FunctionType(_MULTI_HEAD.__code__, inner, _MULTI_HEAD.__name__, _MULTI_HEAD.__defaults__)
        output, _ = forward(*bound.args, **bound.kwargs)
        if not needs_weights:
            return output, None
        result = weights[0].mean(1) if bound.arguments["average_attn_weights"] else weights[0]
        return output, result if bound.arguments["query"].ndim == 3 else result[0]


_MULTI_HEAD: Any = F.multi_head_attention_forward
_SIGNATURE = inspect.signature(_MULTI_HEAD)


class CaughtModule:
    """A torch module whose attention passes the seam. It is run in eval mode, and left as it is.

    Attributes:
        plan: Path of a module -> what its first, second … attention in a forward pass is.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.plan: dict[str, list[Place]] = {}
        self.device = device_of(module)

    def run(self, sample: Sample, probe: Probe) -> Any:
        """Run the module with the probe at each of its attentions, which must be those of the plan."""
        counts = dict.fromkeys(self.plan, 0)

        def do(path: str, call: AttentionCall, own: Callable[[], Tensor]) -> Tensor:
            number = counts.get(path, 0)
            places = self.plan.get(path, [])
            if number >= len(places):
                raise AttnscopeError(
                    f"{path or 'the module'} computes more attention on these inputs than when it was loaded",
                    "give inputs on which it always takes the same way",
                )
            counts[path] = number + 1
            kind, layer = places[number]
            return probe(replace(call, kind=kind, layer=layer))

        output = self._forward(sample, do, [])
        for path, places in self.plan.items():
            if counts[path] != len(places):
                raise AttnscopeError(
                    f"{path or 'the module'} computed {counts[path]} attentions on these inputs, and {len(places)} "
                    "when it was loaded",
                    "give inputs on which it always takes the same way",
                )
        return output

    def rehearse(self, sample: Sample, *, check: bool = True) -> Rehearsal:
        """Run the module to see its attentions, and compares each with what the module itself computes."""
        seen = Rehearsal()

        def do(path: str, call: AttentionCall, own: Callable[[], Tensor]) -> Tensor:
            output, weights = attend_with_weights(call)
            if check:
                with torch.no_grad():
                    theirs = own().reshape(output.shape)
                _require_equal(
                    f"self-check: attention {len(seen.calls)}, of {path or 'the module'}, gives another output than "
                    "softmax weights times values",
                    output,
                    theirs,
                    1,
                )
            n_queries, n_keys = weights.shape[2:]
            hides = n_queries == n_keys > 1 and not bool(weights.triu(1).any())
            seen.calls.append(SeenCall(path, (len(weights), n_queries, n_keys), (call.n_heads, call.n_kv_heads), hides))
            return output

        output = self._forward(sample, do, seen.softmaxes)
        if check and seen.calls:
            with self._turn(seed=1):  # what draws random numbers shows here
                theirs = self.module(*sample.args, **sample.named)
            for own, other in zip(_floats(output), _floats(theirs), strict=True):
                what = "self-check: the module's output differs from its own with attention at the seam"
                _require_equal(what, own, other, len(seen.calls))
        return seen

    def _forward(self, sample: Sample, do: Callable[..., Tensor], softmaxes: list[str]) -> Any:
        with self._turn(), contextlib.ExitStack() as hooks, _Catch(do, softmaxes) as catch:
            thread = threading.get_ident()

            def enter(path: str) -> None:
                if threading.get_ident() == thread:
                    catch.running.append(path)

            def leave() -> None:
                if threading.get_ident() == thread:
                    catch.running.pop()

            for path, module in self.module.named_modules():
                before = module.register_forward_pre_hook(lambda *_, path=path: enter(path))
                hooks.callback(before.remove)
                after = module.register_forward_hook(lambda *_: leave(), always_call=True)
                hooks.callback(after.remove)
            return self.module(*sample.args, **sample.named)

    @contextlib.contextmanager
    def _turn(self, seed: int = 0) -> Iterator[None]:
        """This thread's turn with the module, in eval mode, with the same random numbers for the same seed."""
        with use_attention(self.module, None), same_draws(self.module, seed):
            yield


@contextlib.contextmanager
def same_draws(module: nn.Module, seed: int = 0) -> Iterator[None]:
    """Within it, torch draws the same random numbers for the same seed; afterwards the caller's own go on."""
    with fork_rng(device_of(module)):
        torch.manual_seed(seed)
        yield


def _floats(output: Any) -> list[Tensor]:
    """Return the tensors of floats in what a module returned."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def first_output(output: Any, name: str) -> Tensor:
    """Return the first tensor of floats that a module returned."""
    tensors = _floats(output)
    if not tensors or not tensors[0].ndim or not tensors[0].numel():
        raise AttnscopeError(f"{name} returns no tensor of numbers", "return its output from forward")
    if not bool(tensors[0].isfinite().all()):
        raise AttnscopeError(f"{name} returns NaN or infinity on the inputs", "give other inputs, or check its weights")
    return tensors[0]


def _require_equal(what: str, own: Tensor, other: Tensor, n_calls: int) -> None:
    allowed = _TIMES * max(torch.finfo(other.dtype).eps, torch.finfo(torch.float32).eps) * (1 + n_calls) ** 0.5
    largest = max(float(other.abs().max()) if other.numel() else 0.0, 1e-30)
    difference = float((own.float() - other.float()).abs().max()) / largest if other.numel() else 0.0
    require_rounding(
        what,
        difference,
        allowed,
        "what is shown could be wrong, so nothing is; a module must not drop "
        "weights or draw random numbers in eval mode",
    )
