"""Lead the attention of any torch module through the seam, where scaled_dot_product_attention computes it.

A `TorchFunctionMode` catches the calls of that function and of nn.MultiheadAttention, in this thread alone. While a
mode is active, torch leaves out the fast path of nn.MultiheadAttention and nn.TransformerEncoderLayer. Hooks tell which
module runs. Models of transformers inside of the module are made to call scaled_dot_product_attention too. A module
that multiplies queries by keys itself cannot be seen.
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

from attnscope.core.attention.probes import LayerKey
from attnscope.core.attention.seam import (
    AttentionCall,
    Probe,
    attend,
    attend_with_weights,
    attention_weights,
)
from attnscope.errors import AttnscopeError, first_line, is_out_of_memory, require_close
from attnscope.models.devices import device_of, fork_rng
from attnscope.models.hf.seam import split_mask_and_bias, use_attention
from attnscope.models.inside.projections import hooks

_SDPA_WITH_EAGER_MASKS = "attnscope_inputs"
"""The attention implementation of transformers models that do not support sdpa: it is sdpa with eager masks."""

# Eager masks write causality out: where there is no mask, every key may be seen.
AttentionInterface.register(
    _SDPA_WITH_EAGER_MASKS,
    lambda *tensors, **others: sdpa_attention_forward(*tensors, **{**others, "is_causal": False}),
)
AttentionMaskInterface.register(_SDPA_WITH_EAGER_MASKS, eager_mask)

_MAX_ROUNDINGS = 64
"""How much two ways to compute one attention may differ, in units of rounding of the largest value."""

OwnAttention = Callable[[], Tensor]
"""Computes one attention as the module itself does; its inputs are bound already."""

Handler = Callable[[str, AttentionCall, OwnAttention], Tensor]
"""Computes each attention of a run: (path of the module, call, the module's own way to compute it) -> output."""


@dataclass(frozen=True, eq=False)
class TracedCall:
    """One attention of a forward pass."""

    # The path of the module that computes it, such as "layers.0.self_attn"; "" = the outermost module
    path: str
    # The numbers of sequences, queries and keys
    shape: tuple[int, int, int]
    n_heads: int
    n_kv_heads: int
    # Whether no query attends to a later key
    is_causal: bool


class _AttentionMode(TorchFunctionMode):
    """A mode of torch in which `handler` computes each attention.

    Attributes:
        module_paths: The paths of the modules that run, the innermost last.
    """

    def __init__(self, handler: Handler) -> None:
        super().__init__()
        self.module_paths = [""]
        self._handler = handler
        # The call of the attention that ran last
        self._last_call: AttentionCall | None = None

    def __torch_function__(
        self, function: Any, tensor_types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if function is _MULTI_HEAD_FORWARD:
            return self._run_multi_head(*args, **kwargs)
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
        """Compute torch's scaled_dot_product_attention through the seam.

        Queries, keys and values are (…, head, token, d). With three dimensions they are (sequence, token, d): there is
        one head, or a module has folded its heads into the batch.
        """
        options: Any = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        own_attention = partial(
            F.scaled_dot_product_attention, query, key, value, attn_mask, dropout_p, **options
        )
        # The axes before (head, token, d)
        batch_shape: Any = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])  # type: ignore[no-untyped-call]
        has_heads = query.ndim > 3

        def add_missing_axes(tensor: Tensor) -> Tensor:
            """Return queries, keys or values as the seam takes them, (batch, head, token, d)."""
            if has_heads:
                return tensor.expand(*batch_shape, *tensor.shape[-3:]).flatten(0, -4)
            return tensor[:, None]

        def add_mask_axes(tensor: Tensor | None) -> Tensor | None:
            """Return a mask that broadcasts to (batch, head, query, key)."""
            # One that has no axis before (head, query, key) does so as it is: it is the same for all sequences.
            if tensor is None or tensor.ndim < 3 or (has_heads and tensor.ndim < 5):
                return tensor
            return add_missing_axes(tensor)

        mask, bias = split_mask_and_bias(attn_mask, query.dtype)
        call = AttentionCall(
            layer=0,
            kind="encoder",
            query=add_missing_axes(query),
            key=add_missing_axes(key),
            value=add_missing_axes(value),
            scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
            mask=add_mask_axes(mask),
            is_causal=is_causal,
            bias=add_mask_axes(bias),
        )
        self._last_call = call
        output = self._handler(self.module_paths[-1], call, own_attention)
        return output.reshape(*batch_shape, *output.shape[1:]) if has_heads else output[:, 0]

    def _run_multi_head(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Compute torch's multi_head_attention_forward with its attention through the seam."""
        bound = _MULTI_HEAD_SIGNATURE.bind(*args, **kwargs)
        bound.apply_defaults()
        needs_weights = bound.arguments["need_weights"]
        # Where weights are asked for, torch reads the mask and multiplies by hand. So ask for none, which makes it call
        # scaled_dot_product_attention, and set `is_causal` to False: else torch would ignore the mask.
        if needs_weights:
            bound.arguments.update(need_weights=False, is_causal=False)
        # Run torch's code of this function with two other globals: `_attend` as the attention, and a
        # `has_torch_function` that keeps torch from handing the call back to this mode.
        names = {
            **vars(F),
            "has_torch_function": lambda _: False,
            "scaled_dot_product_attention": self._attend,
        }
        forward = types.FunctionType(
            _MULTI_HEAD_FORWARD.__code__,
            names,
            _MULTI_HEAD_FORWARD.__name__,
            _MULTI_HEAD_FORWARD.__defaults__,
        )
        output, _ = forward(*bound.args, **bound.kwargs)
        if not needs_weights or self._last_call is None:
            return output, None
        weights = attention_weights(self._last_call)  # (batch, head, query, key)
        if bound.arguments["average_attn_weights"]:
            weights = weights.mean(1)
        # Queries without a batch axis are (query, d).
        return output, weights if bound.arguments["query"].ndim == 3 else weights[0]


_MULTI_HEAD_FORWARD: Any = F.multi_head_attention_forward
_MULTI_HEAD_SIGNATURE = inspect.signature(_MULTI_HEAD_FORWARD)


class CaughtModule:
    """A torch module whose attention passes the seam. It is run in eval mode, and not changed.

    Attributes:
        plan: Of each attention, in the order of computation, the path of its module, and its layer key. The key is
            None for attentions that are not shown.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.plan: list[tuple[str, LayerKey | None]] = []
        self._name = name
        transformers = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
        supports_sdpa = all(transformer._supports_sdpa for transformer in transformers)
        self._implementation = "sdpa" if supports_sdpa else _SDPA_WITH_EAGER_MASKS

    def run(self, sample: inspect.BoundArguments, probe: Probe) -> Tensor:
        """Run the module with the probe at the attentions that are shown.

        Returns:
            The first tensor of floats in what the module returns.

        Raises:
            AttnscopeError: The attentions are not those of the plan, or no finite numbers are returned.
        """
        remaining_plan = list(self.plan)

        def handle_attention(path: str, call: AttentionCall, own_attention: OwnAttention) -> Tensor:
            if not remaining_plan or remaining_plan[0][0] != path:
                raise self._make_plan_error(path)
            _, layer_key = remaining_plan.pop(0)
            if layer_key is None:
                return attend(call)
            return probe(replace(call, kind=layer_key[0], layer=layer_key[1]))

        outputs = _find_float_tensors(self._forward(sample, handle_attention))
        if remaining_plan:
            raise self._make_plan_error(remaining_plan[0][0])
        if not outputs or not outputs[0].ndim or not outputs[0].numel():
            raise AttnscopeError(
                f"{self._name} returns no tensor of numbers", "return its output from forward"
            )
        if not outputs[0].isfinite().all():
            raise AttnscopeError(
                f"{self._name} returns NaN or infinity on the inputs", "check inputs and weights"
            )
        return outputs[0]

    def _make_plan_error(self, path: str) -> AttnscopeError:
        """Return the error for an attention that is not in the plan, or that the plan names and the run lacks."""
        return AttnscopeError(
            f"{path or self._name} computes more or less attention on these inputs than when it was loaded",
            "give inputs on which it always takes the same way",
        )

    def trace(self, sample: inspect.BoundArguments, *, check: bool = True) -> list[TracedCall]:
        """Run the module, and return its attentions in the order of computation.

        With `check`, each attention is compared with the module's own, and its output with that of a run without us.

        Raises:
            RoundingError: They differ.
        """
        calls: list[TracedCall] = []

        def handle_attention(path: str, call: AttentionCall, own_attention: OwnAttention) -> Tensor:
            output, weights = attend_with_weights(call)
            if check:
                message = (
                    f"self-check: attention {len(calls)}, of {path or 'the module'}, gives another output "
                    "than softmax weights times values"
                )
                _require_equal(message, output, own_attention().reshape(output.shape), n_attentions=1)
            # (sequence, head, query, key)
            n_sequences, n_heads, n_queries, n_keys = weights.shape
            is_causal = n_queries == n_keys > 1 and not weights.triu(1).any()
            calls.append(
                TracedCall(path, (n_sequences, n_queries, n_keys), n_heads, call.n_kv_heads, is_causal)
            )
            return output

        outputs = _find_float_tensors(self._forward(sample, handle_attention))
        # A module may draw random numbers in eval mode, for a dropout by hand, say: another seed shows that.
        if check and calls:
            with self._prepare_run(None, seed=1):
                own_outputs = _find_float_tensors(self.module(*sample.args, **sample.kwargs))
            message = "self-check: the module's output differs from its own with attention at the seam"
            for output, own_output in zip(outputs, own_outputs, strict=True):
                _require_equal(message, output, own_output, len(calls))
        return calls

    def _forward(self, sample: inspect.BoundArguments, handler: Handler) -> Any:
        """Run the module with a handler at each of its attentions, and return its output."""
        mode = _AttentionMode(handler)
        paths = {module: path for path, module in self.module.named_modules()}

        def enter(module: nn.Module, *_: Any) -> None:
            mode.module_paths.append(paths[module])

        def leave(*_: Any) -> None:
            mode.module_paths.pop()

        with (
            self._prepare_run(self._implementation),
            hooks(paths, enter, before=True),
            hooks(paths, leave),
            mode,
        ):
            return self.module(*sample.args, **sample.kwargs)

    @contextlib.contextmanager
    def _prepare_run(self, implementation: str | None, seed: int = 0) -> Iterator[None]:
        """Prepare a run within the context: eval mode, this thread's turn with the module, random numbers from a seed.

        Errors of the module's own code become an AttnscopeError; interruptions, and errors for want of memory, do not.

        Args:
            implementation: The attention implementation of transformers models in the module; None = their own.
            seed: The seed.
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


def _find_float_tensors(output: Any) -> list[Tensor]:
    """Return the tensors of floats in what a module returned: a tensor, or tensors in tuples, lists and mappings."""
    leaves = tree_leaves(output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _require_equal(message: str, output: Tensor, own_output: Tensor, n_attentions: int) -> None:
    """Refuse an output that differs from the module's own by more than rounding over some attentions explains."""
    if not own_output.numel():
        return
    # Rounding is relative to the largest value, and grows with the root of the number of attentions (a random walk).
    rounding = max(torch.finfo(own_output.dtype).eps, torch.finfo(torch.float32).eps)
    difference = (output.float() - own_output.float()).abs().max()
    require_close(
        message,
        float(difference) / max(float(own_output.abs().max()), 1e-30),
        _MAX_ROUNDINGS * rounding * (1 + n_attentions) ** 0.5,
        "what is shown could be wrong, so nothing is; a module must not drop "
        "weights or draw random numbers in eval mode",
    )
