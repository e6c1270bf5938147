"""Run a Hugging Face model with the head that it has on top for a task; tell which class has one, and what it predicts.

Such a head is no attention head.
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
from attnscope.models.hf.seam import Plan, perform
from attnscope.models.inside.projections import hooks
from attnscope.models.model import Loss, Outputs

CLASS_LOSSES = ("class", "token_class")
"""The targets of classifiers."""

_TASKS: dict[Any, Loss | None] = {
    transformers.AutoModelForCausalLM: "causal",
    # Of text alone: the language model's head.
    transformers.AutoModelForImageTextToText: "causal",
    transformers.AutoModelForSeq2SeqLM: "target",
    transformers.AutoModelForSpeechSeq2Seq: None,
    transformers.AutoModelForMaskedLM: "masked",
    transformers.AutoModelForObjectDetection: None,
    transformers.AutoModelForSequenceClassification: "class",
    transformers.AutoModelForTokenClassification: "token_class",
    transformers.AutoModelForImageClassification: "class",
}
"""Class of transformers that loads models with a head -> the target of that head; None = it is loaded, and not used."""


def _class_names(auto: Any) -> Mapping[str, Any]:
    """Return the names of the classes that an auto class loads, by model type."""
    names: Mapping[str, Any] = auto._model_mapping._model_mapping
    return names


def class_to_load(config: Any, *, is_gguf: bool) -> Any:
    """Return the class of transformers to load.

    One with a head where config.json names a class of `_TASKS`; else the class that it names, where AutoModel would
    load another or none; else AutoModel.
    """
    names = config.architectures or ()
    for auto, loss in _TASKS.items():
        # Of classifiers that are encoder-decoders, or in GGUF files, the base model is shown.
        if loss in CLASS_LOSSES and (config.is_encoder_decoder or is_gguf):
            continue
        # GGUF files name no class; they hold language models.
        name = _class_names(auto).get(config.model_type)
        if name in names or (is_gguf and not names and name is not None):
            return auto
    for name in names:
        named = getattr(transformers, name, None)
        # AutoModel makes T5's encoder a whole T5, and does not know some configurations at all.
        is_apart = name.endswith("EncoderModel") or type(config) not in modeling_auto.MODEL_MAPPING
        if is_apart and isinstance(named, type) and issubclass(named, PreTrainedModel):
            return named
    return transformers.AutoModel


def loss_of(model: PreTrainedModel, kinds: tuple[str, ...]) -> Loss | None:
    """Return what a model's head predicts, by its class and by what its attention hides; None without such a head.

    A head that was trained to write but whose attention looks both ways (BERT's, without `is_decoder`) predicts
    nothing. Nor does a classifier with a single class, or whose classes exclude nothing.
    """
    classifies = len(kinds) == 1 and len(labels_of(model)) > 1
    classifies = classifies and model.config.problem_type != "multi_label_classification"
    suits: dict[Loss, bool] = {
        "masked": kinds == ("encoder",),
        "causal": kinds == ("decoder",),
        "target": "cross" in kinds,
        "class": classifies,
        "token_class": classifies,
    }
    name = type(model).__name__
    for auto, loss in _TASKS.items():
        if loss is None or not suits[loss] or name not in _class_names(auto).values():
            continue
        if loss in CLASS_LOSSES or output_embeddings(model) is not None:
            return loss
    return None


def output_embeddings(model: PreTrainedModel) -> nn.Module | None:
    """Return the map from hidden states to scores of the vocabulary; None without one."""
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return head if isinstance(head, nn.Module) else None


def labels_of(model: PreTrainedModel) -> tuple[str, ...]:
    """Return the names of the classes that a configuration knows, in the order of the logits."""
    names: dict[int, str] = getattr(model.config, "id2label", None) or {}
    return tuple(str(names[number]) for number in sorted(names))


def describe_head(model: PreTrainedModel, base: PreTrainedModel) -> str:
    """Return in words whether the head that a model was saved with is there; "" where it was saved without."""
    name = type(model).__name__
    # Loading drops heads without weights.
    if model is base:
        saved = (model.config.architectures or [name])[0]
        return f"dropped: that of {saved}" if "For" in saved else ""
    if loss_of(model, ("encoder",)) not in CLASS_LOSSES:
        return f"kept: {name}"
    # Of a classifier's, list the classes.
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
    light_from: int | None = None,
    last: int | None = None,
) -> Outputs:
    """Run a model with its head on top; return its last hidden states, and its predictions for tokens or texts.

    Args:
        model: The model with its head.
        base: The part of it that attends.
        inputs: The arguments of its forward.
        plan: As in `seam.perform`; likewise `probe` and `light_from`.
        probe: What happens at the seam.
        light_from: Keys from which masks are handed over by key alone; None = never.
        last: How many tokens at the end have predictions; None = all.
    """
    # OPT's head calls the decoder in the base and not the base; where the base is called, it ends last.
    base_outputs: list[Any] = []
    decoder = getattr(base, "decoder", None)
    watched = [base, decoder] if isinstance(decoder, PreTrainedModel) else [base]
    arguments = {**standing_arguments(model), **inputs}
    heads: list[nn.Module] = []
    if last is not None and accepts(model, "logits_to_keep"):
        arguments["logits_to_keep"] = last
        head = output_embeddings(model)
        if head is not None:
            heads.append(head)

    def run(**arguments: Any) -> Any:
        with hooks(watched, lambda module, inputs, output: base_outputs.append(output)):
            return model(**arguments)

    # The head gets a slice of the hidden states. Torch multiplies a slice text by text; a copy goes four times as fast.
    with hooks(heads, lambda _, args, kwargs: ((args[0].contiguous(), *args[1:]), kwargs), before=True):
        output = perform(base, arguments, plan, probe, light_from, through=run)
    hidden = None
    if base_outputs:
        hidden = hidden_states(base_outputs[-1])
    logits = getattr(output, "logits", None)
    if hidden is not None and isinstance(logits, Tensor):
        if logits.ndim == 2:
            return Outputs(hidden, logits[:, None])  # a text's classes
        n_tokens = hidden.shape[1]
        if last is not None:
            n_tokens = min(n_tokens, last)
            logits = logits[:, -last:]
        if logits.shape[:2] == (len(hidden), n_tokens):
            return Outputs(hidden, logits)
    raise AttnscopeError(f"the head of {type(model).__name__} gives no prediction for each token")
