"""Run a Hugging Face model with the head for its task, such as language modelling; find out what that head predicts.

"Head" means a task head here: the layers from the last hidden states to logits. It is no attention head.
"""

from collections.abc import Mapping
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from attnscope.core.attention.seam import Probe
from attnscope.errors import AttnscopeError
from attnscope.models.hf.parts import fixed_arguments, forward_accepts, hidden_states
from attnscope.models.hf.seam import Plan, run_with_probe
from attnscope.models.inside.projections import hooks
from attnscope.models.model import LossKind, Outputs

CLASS_LOSSES = ("class", "token_class")
"""The loss kinds of classifiers, which predict the class of each text or picture, or of each token."""

_LOSS_BY_AUTO_CLASS: dict[Any, LossKind | None] = {
    transformers.AutoModelForCausalLM: "causal",
    # Without a picture, it writes as its language model does.
    transformers.AutoModelForImageTextToText: "causal",
    transformers.AutoModelForSeq2SeqLM: "target",
    transformers.AutoModelForSpeechSeq2Seq: None,
    transformers.AutoModelForMaskedLM: "masked",
    transformers.AutoModelForObjectDetection: None,
    transformers.AutoModelForSequenceClassification: "class",
    transformers.AutoModelForTokenClassification: "token_class",
    transformers.AutoModelForImageClassification: "class",
}
"""Auto class of transformers -> what its task head predicts; None = the head is loaded, but not used.

"causal" is the next token, "target" the next token of an encoder-decoder's decoder, and "masked" the token at a mask.
"""


def _class_name_by_type(auto: Any) -> Mapping[str, Any]:
    """Return an auto class's mapping, model type -> name of the class to load, such as "bert" -> "BertForMaskedLM"."""
    return dict(auto._model_mapping._model_mapping)


def class_to_load(config: Any, *, is_gguf: bool) -> Any:
    """Return the class of transformers that loads a model.

    1. If config.json names a class that an auto class of _LOSS_BY_AUTO_CLASS loads, return that auto class.
    2. If AutoModel would load another class than the named one, or no class, return the named class.
    3. Otherwise return AutoModel, which loads the model without a task head.
    """
    architectures = config.architectures or ()
    for auto, loss in _LOSS_BY_AUTO_CLASS.items():
        # Load classifiers that are encoder-decoders, or come from GGUF files, without their head.
        if loss in CLASS_LOSSES and (config.is_encoder_decoder or is_gguf):
            continue
        class_name = _class_name_by_type(auto).get(config.model_type)
        if class_name in architectures:
            return auto
        # A GGUF file that names no class holds a language model: AutoModelForCausalLM, which comes first, loads it.
        if is_gguf and not architectures and class_name is not None:
            return auto
    for name in architectures:
        named_class = getattr(transformers, name, None)
        # AutoModel loads a T5EncoderModel as a complete T5, and knows no class for some configurations.
        needs_name = name.endswith("EncoderModel") or type(config) not in modeling_auto.MODEL_MAPPING
        if needs_name and isinstance(named_class, type) and issubclass(named_class, PreTrainedModel):
            return named_class
    return transformers.AutoModel


def find_loss_kind(model: PreTrainedModel, kinds: tuple[str, ...]) -> LossKind | None:
    """Return what a model's task head predicts, by the model's class and its kinds of attention; None = nothing.

    `kinds` are "encoder", "decoder" and "cross". A causal language model's head predicts nothing if attention is
    bidirectional (BERT without `is_decoder`). Neither does a classifier with a single class or with several classes per
    text.
    """
    is_classifier = (
        len(kinds) == 1
        and len(class_labels(model)) > 1
        and model.config.problem_type != "multi_label_classification"
    )
    fits_kinds: dict[LossKind, bool] = {
        "masked": kinds == ("encoder",),
        "causal": kinds == ("decoder",),
        "target": "cross" in kinds,
        "class": is_classifier,
        "token_class": is_classifier,
    }
    name = type(model).__name__
    for auto, loss in _LOSS_BY_AUTO_CLASS.items():
        if loss is None or not fits_kinds[loss] or name not in _class_name_by_type(auto).values():
            continue
        # A language model predicts with its output embeddings, which may be missing.
        if loss in CLASS_LOSSES or output_embeddings(model) is not None:
            return loss
    return None


def output_embeddings(model: PreTrainedModel) -> nn.Module | None:
    """Return the layer that maps hidden states to logits over the vocabulary; None if the model has none."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return head if isinstance(head, nn.Module) else None


def class_labels(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of the classes in a model's configuration, in the order of the logits."""
    label_by_id: dict[int, str] = getattr(model.config, "id2label", None) or {}
    return tuple(str(label_by_id[class_id]) for class_id in sorted(label_by_id))


def describe_head(model: PreTrainedModel, base: PreTrainedModel) -> str:
    """Return whether a model's task head is loaded, such as "kept: BertForMaskedLM"; "" if it was saved without one."""
    name = type(model).__name__
    # Loading drops a head if the files lack its weights. Names of classes with a head contain "For".
    if model is base:
        saved_class = (model.config.architectures or [name])[0]
        return f"dropped: that of {saved_class}" if "For" in saved_class else ""
    # The only question here is whether the head is a classifier. `find_loss_kind` then needs the number of kinds of
    # attention, not which they are: any single kind will do.
    if find_loss_kind(model, ("encoder",)) not in CLASS_LOSSES:
        return f"kept: {name}"
    classes = class_labels(model)
    if len(classes) > 8:
        classes = (*classes[:8], "…")
    return f"kept: {name}, classes {', '.join(classes)}"


def run_with_logits(
    model: PreTrainedModel,
    base: PreTrainedModel,
    inputs: Mapping[str, Any],
    plan: Plan,
    probe: Probe,
    *,
    min_light_keys: int | None = None,
    last: int | None = None,
) -> Outputs:
    """Run a model with its task head; return its last hidden states, and the logits of each token or text.

    Args:
        model: The model with its task head.
        base: The model without its task head. Its attention is computed at the seam, the function that attnscope puts
            in place of transformers' attention function.
        inputs: The arguments of the forward.
        plan: Module -> the layers that its attention calls are, as in `seam.run_with_probe`.
        probe: The function that computes attention at the seam.
        min_light_keys: A mask with at least this many keys is a light mask: it holds the padding alone, as `hf.seam`
            explains. None = all masks are full masks.
        last: How many tokens at the end get logits; None = all.

    Raises:
        AttnscopeError: The head returns no logits for each token or text.
    """
    arguments = {**fixed_arguments(model), **inputs}
    if last is not None and forward_accepts(model, "logits_to_keep"):
        arguments["logits_to_keep"] = last
    # The hidden states are in the output of the base. OPT with its head does not call the base, but the base's decoder:
    # hook both. If both are called, the base returns last.
    base_outputs: list[Any] = []
    hooked = [base]
    decoder = getattr(base, "decoder", None)
    if isinstance(decoder, PreTrainedModel):
        hooked.append(decoder)

    def run_model(**arguments: Any) -> Any:
        with hooks(hooked, lambda module, args, output: base_outputs.append(output)):
            return model(**arguments)

    output = run_with_probe(base, arguments, plan, probe, min_light_keys, run_forward=run_model)
    hidden = hidden_states(base_outputs[-1]) if base_outputs else None
    logits = getattr(output, "logits", None)
    if hidden is not None and isinstance(logits, Tensor):
        # Logits of a text's classes, (text, class), become (text, 1, class).
        if logits.ndim == 2:
            return Outputs(hidden, logits[:, None])
        # Hidden states of the tokens that should have logits, (batch, token, d_model)
        expected = hidden
        if last is not None:
            expected = hidden[:, -last:]
            logits = logits[:, -last:]
        if logits.shape[:2] == expected.shape[:2]:
            return Outputs(hidden, logits)
    raise AttnscopeError(f"the head of {type(model).__name__} gives no prediction for each token")
