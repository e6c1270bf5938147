"""What Hugging Face models predict: their language-model head on top of the seam, and reruns from a layer on.

Nothing is known of an architecture but its blocks, which are the members of lists of modules that hold its attention;
whether it can be resumed at them is tried, and where it cannot it is computed whole.
"""

import contextlib
import inspect
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from attnscope.core.attention.probes import Gate, Place
from attnscope.core.attention.seam import AttentionCall, Kind, Probe, attend
from attnscope.errors import AttnscopeError
from attnscope.models.hf.check.compare import hidden_states, tolerance
from attnscope.models.hf.check.examples import standing_arguments
from attnscope.models.hf.seam import Plan, perform
from attnscope.models.inside.projections import hooks
from attnscope.models.inside.tape import blocks_of
from attnscope.models.model import Loss, Outputs, Rerun

_LOSSES: tuple[tuple[Loss, dict[str, Any]], ...] = (
    ("masked", modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    ("causal", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    ("causal", modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),  # of text alone: the language model's head
    ("target", modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
)


def loss_of(model: PreTrainedModel, kinds: tuple[str, ...]) -> Loss | None:
    """What a model's head predicts, by its class and by what its attention hides; None without such a head.

    A head that was trained to write but whose attention looks both ways (BERT's, without `is_decoder`) predicts
    nothing.
    """
    suits: dict[Loss, bool] = {
        "masked": kinds == ("encoder",),
        "causal": kinds == ("decoder",),
        "target": "cross" in kinds,
    }
    name = type(model).__name__
    untyped: Any = model
    for loss, names in _LOSSES:
        if suits[loss] and name in names.values() and untyped.get_output_embeddings() is not None:
            return loss
    return None


def run_with_logits(
    model: PreTrainedModel,
    base: PreTrainedModel,
    inputs: Mapping[str, Any],
    plan: Plan,
    probe: Probe,
    *,
    skipped: Mapping[nn.Module, int] | None = None,
    light: int | None = None,
    last: int | None = None,
) -> Outputs:
    """Runs a model with its head on top."""
    held: list[Any] = []

    # OPT's head calls the decoder in the base and not the base; where the base is called, it ends last.
    decoder = getattr(base, "decoder", None)
    watched = [module for module in (base, decoder) if isinstance(module, PreTrainedModel)]

    def whole(**given: Any) -> Any:
        with hooks(watched, lambda module, arguments, output: held.append(output)):
            return model(**given)

    given = {**standing_arguments(model), **inputs}
    with contextlib.ExitStack() as stack:
        untyped: Any = model
        head = untyped.get_output_embeddings()
        if last is not None and "logits_to_keep" in inspect.signature(model.forward).parameters:
            given["logits_to_keep"] = last
            # Torch multiplies a slice text by text, and a copy of it at once: four times as fast.
            if isinstance(head, nn.Module):
                handle = head.register_forward_pre_hook(
                    lambda _, arguments: (arguments[0].contiguous(), *arguments[1:])
                )
                stack.callback(handle.remove)
        output = perform(base, given, plan, probe, light, through=whole, skipped=skipped)
    hidden = hidden_states(held[-1]) if held else None
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor) and last is not None:
        logits = logits[:, -last:]
    n = None if hidden is None else (len(hidden), min(hidden.shape[1], last or hidden.shape[1]))
    if hidden is None or not isinstance(logits, Tensor) or logits.shape[:2] != n:
        raise AttnscopeError(f"the head of {type(model).__name__} gives no prediction for each token")
    return Outputs(hidden, logits)


def blocks_by_layer(base: PreTrainedModel, plan: Plan) -> dict[tuple[Kind, int], nn.Module]:
    """The block of each attention whose hidden states are its keys'; a block that holds several such is nobody's."""
    found: dict[tuple[Kind, int], nn.Module] = {}
    held: Counter[nn.Module] = Counter()
    for module, places in plan.items():
        own = [place for place in places if place[0] != "cross"]
        for block in blocks_of(base, [module]) if own else ():
            held[block] += 1
            found |= dict.fromkeys(own, block)
    return {place: block for place, block in found.items() if held[block] == 1}


def skipped_calls(plan: Plan, block_of: Mapping[Place, int], first: int) -> dict[nn.Module, int]:
    """How many of its calls each module does not make where blocks before `first` are not computed."""
    held: Counter[nn.Module] = Counter()
    for module, places in plan.items():
        held[module] = sum(block_of.get(place, first) < first for place in places)
    return dict(held)


def can_resume(rerun: Rerun, plan: Plan, base: PreTrainedModel) -> bool:
    """Whether a rerun from each block on is what a whole forward with the same change gives.

    Tried with the first head of each attention taken out, on the texts twice over.
    """
    places = [place for of_module in plan.values() for place in of_module]
    allowed = tolerance(base, len(places))
    shapes: dict[Place, tuple[int, int]] = {}

    def observe(call: AttentionCall) -> Tensor:
        shapes[call.kind, call.layer] = (call.query.shape[0], call.n_heads)
        return attend(call)

    try:
        rerun.again(observe)
        for place in places:
            batch, n_heads = shapes[place]
            factors = torch.ones(2 * batch, n_heads)
            factors[batch:, 0] = 0
            gate = Gate({place: factors})
            short, long = (rerun.again(gate, first, 2) for first in (rerun.block([place]), 0))
            for ours, theirs in ((short.hidden, long.hidden), (short.logits, long.logits)):
                if ours is None or theirs is None:
                    continue
                size = max(float(theirs.abs().max()), 1e-30)
                if ours.shape != theirs.shape or not float((ours - theirs).abs().max()) <= allowed * size:
                    return False
    except Exception:  # a model may fail in any way where part of it is set aside
        return False
    return True
