"""Run a Hugging Face model with the head for its task, such as language modelling; tell what that head predicts.

A task head stands on top of the last hidden states. It is no attention head.
"""

from collections.abc import Mapping
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from attnscope.core.attention.seam import Probe
from attnscope.errors import AttnscopeError
from attnscope.models.hf.parts import accepts, hidden_states, standing_arguments
from attnscope.models.hf.seam import Plan, run_with_probe
from attnscope.models.inside.projections import hooks
from attnscope.models.model import LossKind, Outputs

CLASS_LOSSES = ("class", "token_class")
"""What classifiers predict: a class of each text or picture, or of each token."""

_TASKS: dict[Any, LossKind | None] = {
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
"""Auto class of transformers -> what the heads of its models predict; None = they are loaded, but not used."""


def _class_names(auto: Any) -> Mapping[str, Any]:
    """Return model type -> name of the class that an auto class loads for it, such as "bert" -> "BertForMaskedLM"."""
    return dict(auto._model_mapping._model_mapping)


def class_to_load(config: Any, *, is_gguf: bool) -> Any:
    """Return the class of transformers that loads a model.

    Where config.json names a class with a head of `_TASKS`, it is the auto class of that task. Else it is the named
    class itself where AutoModel would load another one or none. Else it is AutoModel.
    """
    architectures = config.architectures or ()
    for auto, loss in _TASKS.items():
        # Classifiers that are encoder-decoders, or in GGUF files, are loaded without their head.
        if loss in CLASS_LOSSES and (config.is_encoder_decoder or is_gguf):
            continue
        class_name = _class_names(auto).get(config.model_type)
        if class_name in architectures:
            return auto
        # A GGUF file that names no class holds a language model, the first of the tasks.
        if is_gguf and not architectures and class_name is not None:
            return auto
    for name in architectures:
        named_class = getattr(transformers, name, None)
        # AutoModel loads T5's encoder as a whole T5, and knows no class for some configurations.
        needs_name = name.endswith("EncoderModel") or type(config) not in modeling_auto.MODEL_MAPPING
        if needs_name and isinstance(named_class, type) and issubclass(named_class, PreTrainedModel):
            return named_class
    return transformers.AutoModel


def loss_of(model: PreTrainedModel, kinds: tuple[str, ...]) -> LossKind | None:
    """Return what a model's head predicts, by its class and the kinds of its attention; None if it predicts nothing.

    A causal language model's head predicts nothing where attention looks both ways (BERT without `is_decoder`). Nor
    does a classifier with a single class, or one that may give a text several classes.
    """
    is_classifier = (
        len(kinds) == 1
        and len(labels_of(model)) > 1
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
    for auto, loss in _TASKS.items():
        if loss is None or not fits_kinds[loss] or name not in _class_names(auto).values():
            continue
        # Language models predict by their output embeddings, which may be missing.
        if loss in CLASS_LOSSES or output_embeddings(model) is not None:
            return loss
    return None


def output_embeddings(model: PreTrainedModel) -> nn.Module | None:
    """Return the layer that maps hidden states to logits over the vocabulary; None without one."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return head if isinstance(head, nn.Module) else None


def labels_of(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of the classes that a configuration knows, in the order of the logits."""
    names: dict[int, str] = getattr(model.config, "id2label", None) or {}
    return tuple(str(names[number]) for number in sorted(names))


def describe_head(model: PreTrainedModel, base: PreTrainedModel) -> str:
    """Return in words whether the task head that a model was saved with is loaded; "" where it was saved without."""
    name = type(model).__name__
    # A head is dropped at load if the files lack its weights.
    if model is base:
        saved = (model.config.architectures or [name])[0]
        return f"dropped: that of {saved}" if "For" in saved else ""
    # A classifier is known by any single kind of attention.
    if loss_of(model, ("encoder",)) not in CLASS_LOSSES:
        return f"kept: {name}"
    classes = labels_of(model)
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
    """Run a model with its head on top; return its last hidden states, and the logits of each token or text.

    Args:
        model: The model with its head.
        base: The model without its head, whose attention passes the seam.
        inputs: The arguments of its forward.
        plan: Which call of which module is which layer, as in `seam.perform`.
        probe: What computes attention at the seam.
        min_light_keys: A mask with at least this many keys is a light mask, see `seam.run_with_probe`; None = none is.
        last: How many tokens at the end have logits; None = all.

    Raises:
        AttnscopeError: The head gives no logits for each token or text.
    """
    arguments = {**standing_arguments(model), **inputs}
    if last is not None and accepts(model, "logits_to_keep"):
        arguments["logits_to_keep"] = last
    # Watch the base for its hidden states, and its decoder: OPT's head calls the decoder past the base. Where the base
    # is called too, its output comes last.
    base_outputs: list[Any] = []
    watched = [base]
    decoder = getattr(base, "decoder", None)
    if isinstance(decoder, PreTrainedModel):
        watched.append(decoder)

    def run_model(**arguments: Any) -> Any:
        with hooks(watched, lambda module, args, output: base_outputs.append(output)):
            return model(**arguments)

    output = run_with_probe(base, arguments, plan, probe, min_light_keys, run_forward=run_model)
    hidden = hidden_states(base_outputs[-1]) if base_outputs else None
    logits = getattr(output, "logits", None)
    if hidden is not None and isinstance(logits, Tensor):
        # The classes of a text, (text, class), become those of one token.
        if logits.ndim == 2:
            return Outputs(hidden, logits[:, None])
        # The tokens that should have logits, (batch, token, d)
        kept = hidden
        if last is not None:
            kept = hidden[:, -last:]
            logits = logits[:, -last:]
        if logits.shape[:2] == kept.shape[:2]:
            return Outputs(hidden, logits)
    raise AttnscopeError(f"the head of {type(model).__name__} gives no prediction for each token")
