"""Intercept the attention of any torch module that calls scaled_dot_product_attention.

A `TorchFunctionMode` intercepts the calls of that function and of nn.MultiheadAttention, in this thread alone, and
turns each into an `AttentionCall`. A *probe*, a function from AttentionCall to output, then computes it. (The *seam* is
the point where that happens.) While a mode is active, torch does not take the fast path of nn.MultiheadAttention and
nn.TransformerEncoderLayer. Forward hooks tell which module runs. Transformers models inside of the module are switched
to scaled_dot_product_attention. A module that computes attention by matrix products of its own is not intercepted.
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
"""Our attention implementation for transformers models that do not support sdpa: sdpa with the masks of "eager"."""

# The masks of "eager" contain causality. So without a mask, every query may attend to every key.
AttentionInterface.register(
    _SDPA_WITH_EAGER_MASKS,
    lambda *tensors, **others: sdpa_attention_forward(*tensors, **{**others, "is_causal": False}),
)
AttentionMaskInterface.register(_SDPA_WITH_EAGER_MASKS, eager_mask)

_MAX_ROUNDINGS = 64
"""The largest difference between two computations of one attention, in rounding errors of the largest value."""

OwnAttention = Callable[[], Tensor]
"""Computes one attention by torch's own function. Its arguments are bound already."""

Handler = Callable[[str, AttentionCall, OwnAttention], Tensor]
"""Computes each attention of a forward pass: (path of the module, call, torch's own computation of it) -> output."""


@dataclass(frozen=True, eq=False)
class TracedCall:
    """Record the sizes of one attention of a forward pass."""

    # The path of the module that computes it, such as "layers.0.self_attn"; "" = the outermost module
    path: str
    # (n_sequences, n_queries, n_keys)
    shape: tuple[int, int, int]
    n_heads: int
    n_kv_heads: int
    # Whether every weight above the diagonal is 0: no query attends to a later key
    is_causal: bool


class _AttentionMode(TorchFunctionMode):
    """Let `handler` compute each attention while the context is active.

    Attributes:
        module_paths: The paths of the modules whose forward is running, the innermost last. "" = the outermost module.
    """

    def __init__(self, handler: Handler) -> None:
        super().__init__()
        self.module_paths = [""]
        self._handler = handler
        # The call of the latest attention
        self._last_call: AttentionCall | None = None

    def __torch_function__(
        self, function: Any, tensor_types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if function is _MULTI_HEAD:
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
        """Compute torch's scaled_dot_product_attention by the handler; the arguments are those of torch.

        Queries, keys and values are (…, head, token, d). With three dimensions they are (sequence, token, d): there is
        one head, or the module has merged its heads into the batch axis.
        """
        options: Any = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        own_attention = partial(
            F.scaled_dot_product_attention, query, key, value, attn_mask, dropout_p, **options
        )
        # Sizes of the axes before (head, token, d)
        batch_shape: Any = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])  # type: ignore[no-untyped-call]
        has_heads = query.ndim > 3

        def add_missing_axes(tensor: Tensor) -> Tensor:
            """Return queries, keys or values as an AttentionCall holds them, (batch, head, token, d)."""
            if has_heads:
                return tensor.expand(*batch_shape, *tensor.shape[-3:]).flatten(0, -4)
            return tensor[:, None]

        def add_mask_axes(tensor: Tensor | None) -> Tensor | None:
            """Return a mask that broadcasts to (batch, head, query, key)."""
            # A mask without an axis before (head, query, key) broadcasts already: it is the same for all sequences.
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
        """Compute torch's multi_head_attention_forward, with its attention computed by the handler."""
        bound = _MULTI_HEAD_SIGNATURE.bind(*args, **kwargs)
        bound.apply_defaults()
        needs_weights = bound.arguments["need_weights"]
        # If the caller asks for weights, torch does not call scaled_dot_product_attention. So do not ask for them: the
        # weights are computed below. Without weights, torch ignores the mask if `is_causal` is set, so unset it.
        if needs_weights:
            bound.arguments.update(need_weights=False, is_causal=False)
        # Run torch's code of this function with two globals replaced. Its attention is `_attend`. Its
        # `has_torch_function` returns False, so that torch does not pass the call to this mode again (endless loop).
        function_globals = {
            **vars(F),
            "has_torch_function": lambda _: False,
            "scaled_dot_product_attention": self._attend,
        }
        forward = types.FunctionType(
            _MULTI_HEAD.__code__, function_globals, _MULTI_HEAD.__name__, _MULTI_HEAD.__defaults__
        )
        output, _ = forward(*bound.args, **bound.kwargs)
        if not needs_weights or self._last_call is None:
            return output, None
        weights = attention_weights(self._last_call)  # (batch, head, query, key)
        if bound.arguments["average_attn_weights"]:
            weights = weights.mean(1)
        # Queries without a batch axis are (query, d). Then the weights have no batch axis either.
        return output, weights if bound.arguments["query"].ndim == 3 else weights[0]


# nn.MultiheadAttention's forward calls this function.
_MULTI_HEAD: Any = F.multi_head_attention_forward
_MULTI_HEAD_SIGNATURE = inspect.signature(_MULTI_HEAD)


class CaughtModule:
    """Run a torch module with its attention intercepted. It runs in eval mode, and is not changed.

    Attributes:
        plan: (path of the module, layer key) of each attention, in the order of computation. A layer key is (kind,
            layer), such as ("encoder", 0); None = the attention is not shown. The caller fills the plan after `trace`.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.plan: list[tuple[str, LayerKey | None]] = []
        self._name = name
        transformers = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
        supports_sdpa = all(transformer._supports_sdpa for transformer in transformers)
        self._implementation = "sdpa" if supports_sdpa else _SDPA_WITH_EAGER_MASKS

    def run(self, bound_inputs: inspect.BoundArguments, probe: Probe) -> Tensor:
        """Run the module on the arguments `bound_inputs`; the probe computes the attentions that are shown.

        Returns:
            The first tensor of floats in the module's output.

        Raises:
            AttnscopeError: The attentions are not those of the plan, or the output holds no finite numbers.
        """
        remaining_plan = list(self.plan)

        def handle_attention(path: str, call: AttentionCall, own_attention: OwnAttention) -> Tensor:
            if not remaining_plan or remaining_plan[0][0] != path:
                raise self._make_plan_error(path)
            _, layer_key = remaining_plan.pop(0)
            if layer_key is None:
                return attend(call)
            return probe(replace(call, kind=layer_key[0], layer=layer_key[1]))

        outputs = _find_float_tensors(self._forward(bound_inputs, handle_attention))
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
        """Return the error for an attention that is missing in the plan, or missing in the run."""
        return AttnscopeError(
            f"{path or self._name} computes more or less attention on these inputs than when it was loaded",
            "give inputs on which it always takes the same way",
        )

    def trace(self, bound_inputs: inspect.BoundArguments, *, check: bool = True) -> list[TracedCall]:
        """Run the module, and return its attentions in the order of computation.

        With `check`, each attention is compared with torch's own function, and the module's output with that of a run
        without interception.

        Raises:
            RoundingError: An attention or the output differs by more than rounding errors.
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

        outputs = _find_float_tensors(self._forward(bound_inputs, handle_attention))
        # A module may draw random numbers even in eval mode, by a dropout of its own. Run it with another seed, so that
        # its output then differs.
        if check and calls:
            with self._prepare_run(None, seed=1):
                own_outputs = _find_float_tensors(self.module(*bound_inputs.args, **bound_inputs.kwargs))
            message = "self-check: the module's output differs from its own with attention at the seam"
            for output, own_output in zip(outputs, own_outputs, strict=True):
                _require_equal(message, output, own_output, len(calls))
        return calls

    def _forward(self, bound_inputs: inspect.BoundArguments, handler: Handler) -> Any:
        """Run the module, let a handler compute each of its attentions, and return the module's output."""
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
            return self.module(*bound_inputs.args, **bound_inputs.kwargs)

    @contextlib.contextmanager
    def _prepare_run(self, implementation: str | None, seed: int = 0) -> Iterator[None]:
        """Prepare a run within the context: eval mode, the lock of the module, and a random seed.

        Errors of the module's own code become an AttnscopeError; interruptions and out-of-memory errors do not.

        Args:
            implementation: The attention implementation of transformers models in the module; None = their own.
            seed: The random seed.
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
            raise AttnscopeError(
                f"{self._name} does not run on these inputs: {type(error).__name__}: {first_line(error)}",
                "give what its forward receives",
            ) from error


def _find_float_tensors(output: Any) -> list[Tensor]:
    """Return the tensors of floats in a module's output, which may nest them in tuples, lists and mappings."""
    leaves = tree_leaves(output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _require_equal(message: str, output: Tensor, own_output: Tensor, n_attentions: int) -> None:
    """Raise RoundingError if an output differs from the module's own by more than rounding errors explain.

    `n_attentions` is the number of attentions that the output depends on.
    """
    if not own_output.numel():
        return
    # Rounding errors are relative to the largest value. Like a random walk, they grow with the root of n_attentions.
    rounding = max(torch.finfo(own_output.dtype).eps, torch.finfo(torch.float32).eps)
    difference = (output.float() - own_output.float()).abs().max()
    require_close(
        message,
        float(difference) / max(float(own_output.abs().max()), 1e-30),
        _MAX_ROUNDINGS * rounding * (1 + n_attentions) ** 0.5,
        "what is shown could be wrong, so nothing is; a module must not drop "
        "weights or draw random numbers in eval mode",
    )
