"""What a Hugging Face model's attention is, found out by running it: which calls, which layers, which path, is it true.

A model is run on small random inputs through the seam and by its own eager implementation. What comes of both must be
the same: hidden states, number of layers, weights. A model that does not pass (all of) its attention through the seam
takes the eager path; one that cannot be shown truly by either is refused.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import Kind, attend
from attnscope.errors import AttnscopeError, first_line, is_out_of_memory
from attnscope.models.hf.check.compare import (
    Maps,
    Outcome,
    compare,
    compare_hidden,
    hidden_states,
    not_weights,
    run_eager,
    run_eager_or_own,
    tolerance,
)
from attnscope.models.hf.check.examples import (
    LENGTHS,
    OWN_INPUTS,
    Example,
    examples,
    long_example,
    max_tokens,
    standing_arguments,
)
from attnscope.models.hf.check.layers import (
    Unclear,
    configured_counts,
    configured_kv_heads,
    configured_layers,
    hides_later,
    kinds_of,
    listed_layers,
    notes_on,
    notes_on_gaps,
    number_layers,
)
from attnscope.models.hf.check.reach import length_at_load, length_beyond, longest_compared, reaches
from attnscope.models.hf.seam import Plan, Seen, perform, rehearse, use_attention


@dataclass(frozen=True, eq=False)
class Survey:
    """What was found out.

    Attributes:
        path: "seam" or "eager".
        plan: On the seam: which call is which.
        layers: Kind -> numbers of the layers that have attention, in the order of computation.
        n_layers: Kind -> how many layers there are, with and without attention.
        n_heads: Kind -> the most query heads of a layer.
        n_kv_heads: Kind -> the most key/value heads of a layer.
        extras: What the forward must be given besides the inputs.
        d_model: Width of the hidden states.
        checked: Whether it was compared with eager.
        notes: What a user must know to read the pictures truly.
        reaches: Windows and the like that the texts of the comparison did not reach past yet, in tokens, sorted.
        refusals: Of these, those beyond which what would be shown differs from eager, and what was said of it.
        beside: Whether modules that the plan does not name attend too, as those of a tower for pictures do.
        through: What is called instead of the model, to run it; see `seam.perform`.
    """

    path: str
    plan: Plan
    layers: Mapping[Kind, tuple[int, ...]]
    n_layers: Mapping[Kind, int]
    n_heads: Mapping[Kind, int]
    n_kv_heads: Mapping[Kind, int]
    extras: Mapping[str, Any]
    d_model: int
    checked: bool
    notes: tuple[str, ...]
    reaches: list[int] = field(default_factory=list)
    refusals: dict[int, AttnscopeError] = field(default_factory=dict)
    beside: bool = False
    through: Callable[..., Any] | None = None


def survey(model: PreTrainedModel, *, check: bool = True, inputs: Mapping[str, Any] | None = None) -> Survey:
    """Finds out what a model's attention is, and whether what we show of it is true.

    Args:
        model: The model without heads for tasks.
        check: Whether to compare with eager where that is not needed to tell the layers.
        inputs: What its forward is to get; None = what attnscope makes up, texts of two lengths among it.

    Raises:
        AttnscopeError: It has no attention, differs from eager beyond rounding, or cannot be read by either path.
    """
    if inputs is None:
        padded, alone = examples(model)
    else:
        padded = alone = Example({**standing_arguments(model), **inputs}, is_users=True)
    extras: dict[str, Any] = {}
    seen: Sequence[Seen] = ()
    with torch.no_grad():
        try:
            output, seen = rehearse(model, alone.inputs)
            if hidden_states(output) is None:
                extras = {"output_hidden_states": True}
                for example in (padded, alone):
                    example.inputs.update(extras)
                output, seen = rehearse(model, alone.inputs)
            if hidden_states(output) is None:
                raise Unclear("it returns no hidden states")
            reason = "" if seen else "its attention does not pass transformers' attention interface"
        except Exception as error:  # a model may fail in any way when its attention is exchanged
            reason = _one_line(error)
        if not reason:
            try:
                found = _read_seam(model, alone, output, seen, extras)
            except Unclear as error:
                reason = str(error)
        if not reason and (check or any(len(found.layers[k]) < found.n_layers[k] for k in found.layers)):
            try:
                reason, more = _check_seam(model, found, padded, alone, output, seen)
                found = replace(found, notes=(*found.notes, *more))
                reason = reason or (_check_long(model, found) if check and inputs is None else "")
            except AttnscopeError as error:
                raise _explain_difference(model, alone, error) from error
            except Exception as error:  # padding, too, may be more than a model can take
                reason = _one_line(error)
        if not reason:
            return found if check else replace(found, checked=False)
        found = _read_eager(model, padded, alone, extras, reason, len(seen))
        if not check or inputs is not None:
            return found
        wrong = _check_long(model, found)
        return replace(found, notes=(*found.notes, wrong)) if wrong else found


def _explain_difference(model: PreTrainedModel, example: Example, error: AttnscopeError) -> AttnscopeError:
    """Why the seam differs from eager attention, where transformers' own two implementations differ as well."""
    if not model._supports_sdpa:
        return error
    try:
        with use_attention(model, "sdpa"):
            own = Outcome.of(model(**example.inputs), {})
        compare_hidden(model, example, own, run_eager_or_own(model, example), tolerance(model, 1) * 8)
    except AttnscopeError as differing:
        return _name_difference(model, differing)
    except Exception:  # of a model that fails by sdpa nothing more is known
        return error
    return error


def _name_difference(model: PreTrainedModel, error: AttnscopeError) -> AttnscopeError:
    """Says of a difference that it is between two implementations of transformers, neither of them ours."""
    found = re.search(r"differ from the model's own by ([^,]*)", error.message)
    if not found:
        return error
    return AttnscopeError(
        f"{model.config.model_type} computes one thing by transformers' sdpa attention and another by its eager "
        f"attention: hidden states differ by {found[1]}",
        "it is not known which of them it was trained with, so neither is shown",
    )


# The seam ---------------------------------------------------------------------------------------------------------


def _read_seam(
    model: PreTrainedModel, example: Example, output: Any, seen: Sequence[Seen], extras: Mapping[str, Any]
) -> Survey:
    """Tells the calls apart: kinds by their shapes and by what they hide, layers by layer_idx, else by counting."""
    config = model.config
    by_kind: dict[Kind, list[Seen]] = {}
    for one, kind in zip(seen, kinds_of(config, example, output, [one.weights for one in seen]), strict=True):
        by_kind.setdefault(kind, []).append(one)
    absent = {"encoder", "decoder", "cross"} - set(by_kind) if config.is_encoder_decoder else set()
    if absent:
        raise Unclear(f"its {sorted(absent)[0]} attention does not pass transformers' attention interface")
    plan: dict[nn.Module, list[tuple[int, Place]]] = {}
    layers: dict[Kind, tuple[int, ...]] = {}
    n_layers: dict[Kind, int] = {}
    for kind, calls in by_kind.items():
        total = configured_layers(config, kind)
        layers[kind] = number_layers(config, kind, [one.module for one in calls], total)
        n_layers[kind] = max(total or 0, layers[kind][-1] + 1)
        for one, layer in zip(calls, layers[kind], strict=True):
            plan.setdefault(one.module, []).append((seen.index(one), (kind, layer)))
    return Survey(
        path="seam",
        plan={module: [place for _, place in sorted(p, key=lambda x: x[0])] for module, p in plan.items()},
        layers=layers,
        n_layers=n_layers,
        n_heads={kind: max(one.call.n_heads for one in calls) for kind, calls in by_kind.items()},
        n_kv_heads={kind: _shared_heads(calls) for kind, calls in by_kind.items()},
        extras=extras,
        d_model=_width(output),
        checked=True,
        notes=(*notes_on(by_kind, layers), *notes_on_gaps(config, layers, n_layers)),
    )


def _shared_heads(calls: Sequence[Seen]) -> int:
    """Key/value heads of a layer; as many as query heads where layers differ, for no one number is true of all."""
    found = {(one.call.n_heads, one.call.n_kv_heads) for one in calls}
    return next(iter(found))[1] if len(found) == 1 else max(n_heads for n_heads, _ in found)


_PADDING_MATTERS = "Padding changes what this model computes: texts are best shown one by one."
"""Of convolutions, say, that run over the end of a text."""


def _check_seam(
    model: PreTrainedModel, found: Survey, padded: Example, alone: Example, output: Any, seen: Sequence[Seen]
) -> tuple[str, tuple[str, ...]]:
    """Compares what the seam saw of a text with eager, and then what it sees of the text when padded with that.

    A forward pass is what the check costs: of four, the one by eager on the padded batch is done only where padding
    changes a text. (It may: convolutions see it, and experts with limited room are shared with other texts.)

    Returns:
        Why the seam does not see the whole, "" if it does; and what is worth a note.

    Raises:
        AttnscopeError: What it sees differs from eager, or padding tells which tokens may be attended to.
    """
    sizes = found.layers, found.n_layers
    single, notes = _outcome(found, output, seen), list[str]()
    reason = compare(model, alone, single, run_eager_or_own(model, alone), *sizes, notes)
    if reason or padded is alone or len(next(iter(padded.inputs.values()))) == 1:  # it is the same input
        return reason, tuple(notes)
    both = _outcome(found, *rehearse(model, padded.inputs))
    try:
        return compare(model, alone, both.last_text(single), single, *sizes), tuple(notes)
    except AttnscopeError:
        reason = compare(model, padded, both, run_eager_or_own(model, padded), *sizes)
    if alone.real is None:  # no texts
        return reason, tuple(notes)
    # The first text fills the batch, so that of it no key is hidden for being padding.
    kinds = [kind for kind in single.maps if kind != "cross"]
    if any(hides_later(single.maps[kind]) != hides_later([w[:1] for w in both.maps[kind]]) for kind in kinds):
        raise AttnscopeError(
            f"{model.config.model_type} lets tokens attend to later ones in texts of equal length, and not where one "
            "is padded: padding makes it causal",
            "it is not known how it was trained, so neither is shown",
        )
    return reason, (*notes, _PADDING_MATTERS)


def _outcome(found: Survey, output: Any, seen: Sequence[Seen]) -> Outcome:
    counters = dict.fromkeys(found.plan, 0)
    calls: dict[Kind, list[Seen]] = {}
    for one in seen:
        number, places = counters.get(one.module, 0), found.plan.get(one.module, ())
        if number >= len(places):
            raise AttnscopeError("self-check: a padded batch computes more attentions than a single text")
        calls.setdefault(places[number][0], []).append(one)
        counters[one.module] = number + 1
    maps = {kind: [one.weights for one in of_kind] for kind, of_kind in calls.items()}
    sinks = {kind: [one.call.sinks is not None for one in of_kind] for kind, of_kind in calls.items()}
    return Outcome.of(output, maps, sinks)


# Longer texts -----------------------------------------------------------------------------------------------------


def _check_long(model: PreTrainedModel, found: Survey) -> str:
    """The second self-check at load: on a text beyond what the configuration names, as far as that is cheap.

    Returns:
        On the seam: why it does not see the whole; of the eager path: what a user must know. "" if all is well.

    Raises:
        AttnscopeError: What is seen differs from eager.
    """
    n_heads = sum(found.n_heads[kind] * len(layers) for kind, layers in found.layers.items())
    length = length_at_load(model, n_heads)
    found.reaches[:] = [reach for reach in reaches(model.config) if length_beyond(reach) > length]
    return _check_at(model, found, length, with_maps=True)


def check_beyond(model: PreTrainedModel, found: Survey, inputs: Mapping[str, Any]) -> None:
    """Compares with eager once more where a text comes that reaches past a window that no comparison reached yet.

    What was found out remembers how each comparison ended: windows that were shown truly are compared once, and texts
    beyond one that was not are always refused. A comparison that was cut short, by an interruption or for want of
    memory, is made anew.

    Raises:
        AttnscopeError: What would be shown differs from eager.
    """
    n_tokens = max((inputs[name].shape[1] for name in ("input_ids", "decoder_input_ids") if name in inputs), default=0)
    now = [reach for reach in found.reaches if reach < n_tokens]
    if not now or not found.checked:
        return
    for refused in (found.refusals[reach] for reach in now if reach in found.refusals):
        raise AttnscopeError(refused.message, refused.hint)
    most = longest_compared(max(found.n_heads.values()))
    lengths = [length_beyond(reach) for reach in now if length_beyond(reach) <= most]
    if lengths:
        limit = max_tokens(model)
        try:
            with torch.no_grad():
                _check_at(model, found, lengths[-1] if limit is None else min(lengths[-1], limit), with_maps=False)
        except AttnscopeError as error:
            found.refusals[now[len(lengths) - 1]] = error
            raise
    found.reaches[:] = [reach for reach in found.reaches if reach >= n_tokens]


def _check_at(model: PreTrainedModel, found: Survey, n_tokens: int, *, with_maps: bool) -> str:
    """Compares hidden states, and weights if they are few enough to hold, with eager on a text of so many tokens."""
    example = long_example(model, n_tokens)
    if example is None or n_tokens <= LENGTHS[1]:
        return ""
    example.inputs.update(found.extras)
    if found.path == "eager":
        own = _own_outcome(model, example)
        return "" if own is None else _check_eager_at(model, found, example, own)
    try:
        if with_maps:
            ours = _outcome(found, *rehearse(model, example.inputs))
        else:
            ours = Outcome.of(perform(model, example.inputs, found.plan, attend), {})
    except Exception:
        if _own_outcome(model, example) is None:
            return ""
        raise
    theirs = run_eager_or_own(model, example, with_maps=with_maps)
    if not with_maps:
        compare_hidden(model, example, ours, theirs, _tolerance_of(model, found))
        return ""
    reason = compare(model, example, ours, theirs, found.layers, found.n_layers)
    return f"on a text of {n_tokens} tokens {reason}" if reason else ""


def compare_on(model: PreTrainedModel, found: Survey, example: Example) -> None:
    """Compares hidden states on an input that comes with what the model computes as it is, in no more memory than that.

    Args:
        model: The model.
        found: What was found out of it.
        example: The input; what is beside the model's own attention may attend too, as of `seam.perform`.

    Raises:
        AttnscopeError: What would be shown differs from it.
    """
    if found.path != "seam" or not found.checked:
        return
    example.inputs.update({**standing_arguments(model), **found.extras})
    with use_attention(model, None):
        own = Outcome.of(model(**example.inputs), {})
    ours = Outcome.of(perform(model, example.inputs, found.plan, attend, beside=True), {})
    compare_hidden(model, example, ours, own, _tolerance_of(model, found))


def _own_outcome(model: PreTrainedModel, example: Example) -> Outcome | None:
    """What a model computes as it is; None where it takes no text of this length, whatever its configuration says."""
    try:
        with use_attention(model, None):
            return Outcome.of(model(**example.inputs), {})
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return None


def _check_eager_at(model: PreTrainedModel, found: Survey, example: Example, own: Outcome) -> str:
    try:
        output, maps = run_eager(model, example.inputs)
        wrong = _why_no_weights(model, output, [(example, maps)])
    except Exception as error:
        wrong = f"with eager attention it fails: {_one_line(error)}"
    else:
        compare_hidden(model, example, Outcome.of(output, {}), own, _tolerance_of(model, found))
    n_tokens = next(iter(example.inputs.values())).shape[1]
    return f"Of a text of {n_tokens} tokens {wrong}: such texts are refused." if wrong else ""


def _tolerance_of(model: PreTrainedModel, found: Survey) -> float:
    return tolerance(model, sum(map(len, found.layers.values())))


# The eager path ---------------------------------------------------------------------------------------------------


def _read_eager(
    model: PreTrainedModel, padded: Example, alone: Example, extras: dict[str, Any], reason: str, n_seen: int
) -> Survey:
    """The survey of a model whose attention does not (all) pass the seam: what it gives out itself, checked.

    Args:
        model: The model.
        padded: Two inputs.
        alone: The second of them.
        extras: What the forward must be given besides.
        reason: Why the seam does not show it.
        n_seen: How many attentions passed the seam. A model that gives out fewer leaves out an encoder (Depth Pro).
    """
    config = model.config
    own = _own_output(model, padded, alone, extras)
    try:
        output, maps = run_eager(model, alone.inputs)
        _, maps_padded = run_eager(model, padded.inputs)
    except Exception as error:
        raise _refusal(model, reason, f"with eager attention it fails: {_one_line(error)}") from error
    wrong = _why_no_weights(model, output, [(alone, maps), (padded, maps_padded)])
    if wrong:
        raise _refusal(model, reason, wrong)
    flat = [weights for of_kind in maps.values() for weights in of_kind]
    if len(flat) < n_seen:
        raise _refusal(model, reason, f"it gives out the weights of {len(flat)} of its {n_seen} attentions")
    allowed = tolerance(model, len(flat))
    try:
        compare_hidden(model, alone, Outcome.of(output, maps), Outcome.of(own, {}), allowed)
    except AttnscopeError as error:
        raise _name_difference(model, error) from error
    notes = [f"Weights come from the model's own eager attention, not through the seam: {reason}."]
    if any(
        float((whole.float() - cut[-1:, :, : whole.shape[2], : whole.shape[3]].float()).abs().max()) > allowed
        for kind, of_kind in maps.items()
        for whole, cut in zip(of_kind, maps_padded[kind], strict=True)
    ):
        notes.append(_PADDING_MATTERS)
    named = maps
    if not config.is_encoder_decoder:
        named = {_eager_kind(model, alone, output, flat, reason): flat}
    layers = {kind: _eager_layers(model, kind, len(of_kind), reason) for kind, of_kind in named.items()}
    n_layers = {kind: max(configured_layers(config, kind) or 0, numbers[-1] + 1) for kind, numbers in layers.items()}
    n_heads = {kind: max(weights.shape[1] for weights in named[kind]) for kind in layers}
    return Survey(
        path="eager",
        plan={},
        layers=layers,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads={kind: configured_kv_heads(config, kind, n_heads[kind]) for kind in layers},
        extras=extras,
        d_model=_width(output),
        checked=True,
        notes=(*notes, *notes_on_gaps(config, layers, n_layers)),
    )


def _own_output(model: PreTrainedModel, padded: Example, alone: Example, extras: dict[str, Any]) -> Any:
    """What a model returns as it is, asked for its hidden states if it does not give them unasked.

    Raises:
        AttnscopeError: It does not run.
    """
    try:
        with use_attention(model, None):
            own = model(**alone.inputs)
            if hidden_states(own) is None and not extras:
                extras["output_hidden_states"] = True
                for example in (padded, alone):
                    example.inputs.update(extras)
                own = model(**alone.inputs)
    except Exception as error:
        raise AttnscopeError(
            f"{model.config.model_type} does not run on the {_input_names(alone)} that "
            f"{'you give' if alone.is_users else 'attnscope makes up for its self-check'}: its own code says "
            f"{type(error).__name__}: {_one_line(error)}",
            OWN_INPUTS,
        ) from error
    return own


def _input_names(example: Example) -> str:
    """What an example is made of, by name and shape, without what every forward gets."""
    given = {name: x for name, x in example.inputs.items() if isinstance(x, Tensor) and "mask" not in name}
    return " and ".join(f"{name} {tuple(x.shape)}" for name, x in given.items())


def _why_no_weights(model: PreTrainedModel, output: Any, runs: Sequence[tuple[Example, Maps]]) -> str:
    """Why what eager gives out are not the softmax weights of all of a model's attention; "" if they are."""
    if hidden_states(output) is None:
        return "it returns no hidden states"
    for example, maps in runs:
        for kind, of_kind in maps.items():
            what = f"{kind} attention" if model.config.is_encoder_decoder else "attention weights"
            if not of_kind and any("Sdpa" in type(module).__name__ for module in model.modules()):
                return f'it was built for sdpa, which gives out no {what} (attn_implementation="eager" builds it anew)'
            if not of_kind:
                return f"it gives out no {what} of its own"
            if not all(isinstance(weights, Tensor) for weights in of_kind):
                return f"its own {what} are no tensors, one for each layer"
            if len(of_kind) != len(runs[0][1][kind]):
                return "it gives out other layers when texts are padded"
            for layer, weights in enumerate(of_kind):
                wrong = not_weights(model, example, kind, weights, tolerance(model, len(of_kind)))
                if wrong:
                    return (
                        f"its own {kind} layer {layer} {wrong}" if len(maps) > 1 else f"its own layer {layer} {wrong}"
                    )
    return ""


def _eager_kind(model: PreTrainedModel, example: Example, output: Any, flat: list[Tensor], reason: str) -> Kind:
    try:
        return kinds_of(model.config, example, output, flat)[0]
    except Unclear as error:
        raise _refusal(model, reason, str(error)) from error


def _eager_layers(model: PreTrainedModel, kind: Kind, count: int, reason: str) -> tuple[int, ...]:
    total = configured_layers(model.config, kind)
    if total in (None, count):
        return tuple(range(count))
    if len(listed := listed_layers(model.config, total)) == count:
        return listed
    raise _refusal(model, reason, f"it gives out {count} {kind} layers of {total} and does not say which")


_ATTENTION_IN_NAME_ONLY = {"RwkvSelfAttention", "PatchTSMixerGatedAttention"}


def _refusal(model: PreTrainedModel, reason: str, more: str) -> AttnscopeError:
    kind = model.config.model_type
    names = {type(module).__name__ for module in model.modules()} - _ATTENTION_IN_NAME_ONLY
    if not any(re.search("attention|attn", name, re.IGNORECASE) for name in names):
        n_layers = configured_counts(model.config)
        if n_layers == {0}:
            return AttnscopeError(f"{kind} has no layers (its configuration says 0)", "there is nothing to show of it")
        return AttnscopeError(
            f"{kind} has no attention: its layers mix tokens by other means", "there is nothing to show of it"
        )
    why = reason if more == reason else f"{reason}; and {more}"
    return AttnscopeError(f"{kind} cannot be shown truly: {why}")


def _width(output: Any) -> int:
    hidden = hidden_states(output)
    return 0 if hidden is None else int(hidden.shape[-1])


def _one_line(error: BaseException) -> str:
    return (error.message if isinstance(error, AttnscopeError) else first_line(error)).rstrip(".")
