"""Attention of any torch module: calls of scaled_dot_product_attention and nn.MultiheadAttention pass the seam.

A `TorchFunctionMode` catches them, in this thread alone. While a mode is active, torch leaves out the fast path of
nn.MultiheadAttention and nn.TransformerEncoderLayer. Hooks tell which module runs. Models of transformers run by sdpa,
with masks written out where they do not know it. A module that multiplies queries by keys itself cannot be seen.
"""

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import (
    AttentionCall,
    Probe,
    attend,
    attend_with_weights,
    attention_weights,
)
from attnscope.errors import AttnscopeError, first_line, is_out_of_memory, require_rounding
from attnscope.models.devices import device_of, fork_rng
from attnscope.models.hf.seam import mask_and_bias, use_attention
from attnscope.models.inside.projections import hooks

_EXPLICIT = "attnscope_inputs"
"""The name of sdpa for models of transformers whose masks say everything."""

AttentionInterface.register(
    _EXPLICIT,
    lambda *tensors, **others: sdpa_attention_forward(*tensors, **{**others, "is_causal": False}),
)
AttentionMaskInterface.register(_EXPLICIT, eager_mask)

_TIMES = 64
"""Allowed difference of two ways to compute one attention, in units of rounding of the largest value."""

Do = Callable[[str, AttentionCall, Callable[[], Tensor]], Tensor]
"""A function at each attention: (module's name, call, the module's own computation) -> output."""


@dataclass(frozen=True, eq=False)
class SeenCall:
    """One attention of a forward pass.

    Attributes:
        path: The name of the module that computes it, such as "layers.0.self_attn"; "" = the whole.
        shape: Sequences, queries and keys.
        n_heads: Query heads, and key/value heads.
        hides_later: Whether no query attends to a later key.
    """

    path: str
    shape: tuple[int, int, int]
    n_heads: tuple[int, int]
    hides_later: bool


class _Catch(TorchFunctionMode):
    """Hands each attention to `do`, with the name of the module that runs."""

    def __init__(self, do: Do) -> None:
        super().__init__()
        self.running = [""]
        self._do = do
        self._latest: AttentionCall | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if function is _MULTI_HEAD:
            return self._multi_head(*args, **kwargs)
        return function(*args, **kwargs)

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
        """Compute torch's scaled_dot_product_attention through the seam: query, key, value (…, token, d)."""
        options: Any = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        own = partial(F.scaled_dot_product_attention, query, key, value, attn_mask, dropout_p, **options)
        # All dimensions before (head, token, d) are the batch. Without a head there is one, which a module may have
        # folded into the batch.
        lead: Any = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])  # type: ignore[no-untyped-call]
        has_heads = query.ndim > 3

        def as_heads(tensor: Tensor) -> Tensor:
            return (
                tensor.expand(*lead, *tensor.shape[-3:]).flatten(0, -4) if has_heads else tensor[:, None]
            )

        def as_mask(tensor: Tensor | None) -> Tensor | None:
            if tensor is None or tensor.ndim < 3 or (has_heads and tensor.ndim < 5):
                return tensor
            return as_heads(tensor)

        # The seam takes four dimensions: (batch, head, token, d).
        mask, bias = mask_and_bias(attn_mask, query.dtype)
        call = AttentionCall(
            layer=0,
            kind="encoder",
            query=as_heads(query),
            key=as_heads(key),
            value=as_heads(value),
            scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
            mask=as_mask(mask),
            is_causal=is_causal,
            bias=as_mask(bias),
        )
        self._latest = call
        output = self._do(self.running[-1], call, own)
        return output.reshape(*lead, *output.shape[1:]) if has_heads else output[:, 0]

    def _multi_head(self, *args: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        """Compute torch's multi_head_attention_forward with its attention through the seam."""
        # Run torch's own code, but without weights, so that it calls scaled_dot_product_attention.
        bound = _SIGNATURE.bind(*args, **named)
        bound.apply_defaults()
        wanted = dict(bound.arguments)
        # With weights torch reads the mask alone, without them the flag alone.
        if wanted["need_weights"]:
            bound.arguments.update(need_weights=False, is_causal=False)
        # The same code runs with our attention in the place of torch's, and is not caught again.
        inner = {
            **vars(F),
            "has_torch_function": lambda _: False,
            "scaled_dot_product_attention": self._attend,
        }
        forward = types.FunctionType(
            _MULTI_HEAD.__code__, inner, _MULTI_HEAD.__name__, _MULTI_HEAD.__defaults__
        )
        output, _ = forward(*bound.args, **bound.kwargs)
        if not wanted["need_weights"] or self._latest is None:
            return output, None
        # (batch, head, query, key) -> (batch, query, key), as torch averages by default.
        weights = attention_weights(self._latest)
        if wanted["average_attn_weights"]:
            weights = weights.mean(1)
        return output, weights if wanted["query"].ndim == 3 else weights[0]


_MULTI_HEAD: Any = F.multi_head_attention_forward
_SIGNATURE = inspect.signature(_MULTI_HEAD)


class CaughtModule:
    """A torch module whose attention passes the seam. It is run in eval mode, and left as it is.

    Attributes:
        plan: Its attentions, in the order of computation: the module that computes it, kind and layer; None for one
            that is not shown.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.plan: list[tuple[str, Place | None]] = []
        self._name = name
        parts = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
        self._implementation = "sdpa" if all(part._supports_sdpa for part in parts) else _EXPLICIT

    def run(self, sample: inspect.BoundArguments, probe: Probe) -> Tensor:
        """Run the module with the probe at what is shown of it; return the first tensor of numbers that it gives.

        The attentions must be those of the plan.
        """
        # Each attention must come in its turn.
        waiting = [*self.plan]

        def do(path: str, call: AttentionCall, own: Callable[[], Tensor]) -> Tensor:
            if not waiting or waiting[0][0] != path:
                raise self._other_way(path)
            _, place = waiting.pop(0)
            if place is None:
                return attend(call)
            return probe(replace(call, kind=place[0], layer=place[1]))

        output = self._forward(sample, do)
        if waiting:
            raise self._other_way(waiting[0][0])
        # The first tensor of numbers stands for the output.
        tensors = _floats(output)
        if not tensors or not tensors[0].ndim or not tensors[0].numel():
            raise AttnscopeError(
                f"{self._name} returns no tensor of numbers", "return its output from forward"
            )
        if not bool(tensors[0].isfinite().all()):
            raise AttnscopeError(
                f"{self._name} returns NaN or infinity on the inputs", "check inputs and weights"
            )
        return tensors[0]

    def _other_way(self, path: str) -> AttnscopeError:
        return AttnscopeError(
            f"{path or self._name} computes more or less attention on these inputs than when it was loaded",
            "give inputs on which it always takes the same way",
        )

    def rehearse(self, sample: inspect.BoundArguments, *, check: bool = True) -> list[SeenCall]:
        """Run the module to see its attentions, in order, and compare each with what the module itself computes."""
        calls: list[SeenCall] = []

        def do(path: str, call: AttentionCall, own: Callable[[], Tensor]) -> Tensor:
            output, weights = attend_with_weights(call)
            if check:
                what = f"attention {len(calls)}, of {path or 'the module'}, gives another output than softmax weights"
                _require_equal(
                    f"self-check: {what} times values", output, own().reshape(output.shape), 1
                )
            n_queries, n_keys = weights.shape[2:]
            hides_later = n_queries == n_keys > 1 and not bool(weights.triu(1).any())
            shape = (len(weights), n_queries, n_keys)
            calls.append(SeenCall(path, shape, (call.n_heads, call.n_kv_heads), hides_later))
            return output

        output = self._forward(sample, do)
        # The whole output must also agree: a module may drop weights after its attention.
        if check and calls:
            # As it is: by its own attention. What draws random numbers shows here.
            with self._turn(None, seed=1):
                theirs = self.module(*sample.args, **sample.kwargs)
            what = "self-check: the module's output differs from its own with attention at the seam"
            for own, other in zip(_floats(output), _floats(theirs), strict=True):
                _require_equal(what, own, other, len(calls))
        return calls

    def _forward(self, sample: inspect.BoundArguments, do: Do) -> Any:
        catch = _Catch(do)
        names = {module: path for path, module in self.module.named_modules()}

        def enter(module: nn.Module, *_: Any) -> None:
            catch.running.append(names[module])

        def leave(*_: Any) -> None:
            catch.running.pop()

        with (
            self._turn(self._implementation),
            hooks(names, enter, before=True),
            hooks(names, leave),
            catch,
        ):
            return self.module(*sample.args, **sample.kwargs)

    @contextlib.contextmanager
    def _turn(self, implementation: str | None, seed: int = 0) -> Iterator[None]:
        """Within it, it is this thread's turn with the module, in eval mode, with the same random numbers each time.

        Whatever the module's own code raises becomes one line, but for an interruption.
        """
        try:
            with use_attention(self.module, implementation), fork_rng(device_of(self.module)):
                torch.manual_seed(seed)
                yield
        except (AttnscopeError, KeyboardInterrupt):
            raise
        except BaseException as error:  # a module may raise anything
            if is_out_of_memory(error):
                raise
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise AttnscopeError(
                f"{self._name} does not run on these inputs: {reason}", "give what its forward receives"
            ) from error


def _floats(output: Any) -> list[Tensor]:
    """Return the tensors of floats in what a module returned."""
    return [
        leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


def _require_equal(what: str, own: Tensor, other: Tensor, n_calls: int) -> None:
    if not other.numel():
        return
    allowed = (
        _TIMES * max(torch.finfo(other.dtype).eps, torch.finfo(torch.float32).eps) * (1 + n_calls) ** 0.5
    )
    # Rounding is relative to the largest value, and adds up over the attentions like a random walk.
    largest = max(float(other.abs().max()), 1e-30)
    require_rounding(
        what,
        float((own.float() - other.float()).abs().max()) / largest,
        allowed,
        "what is shown could be wrong, so nothing is; a module must not drop "
        "weights or draw random numbers in eval mode",
    )
