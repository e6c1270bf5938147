"""Every text architecture of transformers, shrunk to tiny, through `wrap`: exact, by its own eager, or refused.

    python -m tests.hf_tally [--json FILE] [model_type ...]

prints a line a model and the tally. Each one that is shown is compared with a second copy of the model that was built
with eager attention from the start, on a padded batch and on single texts: no code is shared with the self-check.
"""

import argparse
import contextlib
import inspect
import json
import os
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import nn
from transformers import AutoModel, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from attnscope.core.probes import Weights
from attnscope.errors import AttnscopeError
from attnscope.models.hf_check import hidden_states
from attnscope.models.huggingface import HuggingFaceModel, wrap
from attnscope.models.model import Batch

VOCABULARY = 99
_PATIENCE_S = 90

# What to make of a setting, by its name. Sizes are multiples of 8: grouped matrix products want 16 bytes.
_SIZES = {
    32: "hidden_size d_model n_embd dim emb_dim embed_dim embedding_size d_embed hidden_dim n_embed model_dim "
    "encoder_hidden_size decoder_hidden_size rnn_hidden_size attention_hidden_size",
    48: "intermediate_size d_ff ffn_dim n_inner encoder_ffn_dim decoder_ffn_dim moe_intermediate_size d_inner "
    "shared_expert_intermediate_size ffn_hidden_size intermediate_dim encoder_intermediate_size "
    "decoder_intermediate_size expert_ffn_hidden_size block_ff_dim feed_forward_size "
    "moe_shared_expert_intermediate_size intermediate_size_mlp dense_intermediate_size",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads encoder_num_attention_heads decoder_num_attention_heads "
    "num_experts num_local_experts n_routed_experts moe_num_experts num_swa_attention_heads n_experts num_moe_experts",
    2: "num_key_value_heads num_kv_heads encoder_num_key_value_heads decoder_num_key_value_heads "
    "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts num_selected_experts",
    1: "n_shared_experts num_shared_experts n_group topk_group moe_num_shared_experts first_k_dense_replace "
    "num_mem_blocks num_nextn_predict_layers",
    8: "head_dim d_kv qk_rope_head_dim qk_nope_head_dim v_head_dim attention_head_dim kv_channels d_head "
    "global_head_dim index_head_dim swa_head_dim mamba_d_state mamba_d_head ssm_state_size state_size time_step_rank "
    "linear_key_head_dim linear_value_head_dim",
    16: "kv_lora_rank q_lora_rank mamba_chunk_size chunk_size qk_head_dim",
    3: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers encoder_num_hidden_layers decoder_num_hidden_layers",
    64: "max_position_embeddings n_positions max_seq_len n_ctx max_target_positions seq_length",
    VOCABULARY: "vocab_size encoder_vocab_size decoder_vocab_size text_vocab_size n_tokens",
}
_BY_NAME = {name: size for size, names in _SIZES.items() for name in names.split()}
_BY_NAME |= {"sliding_window": 4, "initializer_range": 0.2, "vocab_size_per_layer_input": VOCABULARY}


_OTHERS: dict[str, dict[str, Any]] = {
    # What cannot be told from a setting's name.
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]], "window_size": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "local"], "local_attn_chunk_length": 4},
    "funnel": {"block_sizes": [1, 1, 1]},
    "esm": {"pad_token_id": 1, "mask_token_id": 2, "vocab_size": VOCABULARY},
    "prophetnet": {"ngram": 2, "num_buckets": 8, "relative_max_distance": 16},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "led": {"attention_window": 4},
    "longformer": {"attention_window": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "attn_layer_indices": [1]},
    "lilt": {"channel_shrink_ratio": 4},
    "hunyuan_v1_dense": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "hunyuan_v1_moe": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "mistral4": {"num_key_value_heads": 4},
    "dots1": {"n_shared_experts": 1},
}


def tiny_settings(config: Any) -> dict[str, Any]:
    """Arguments that make a configuration tiny; inner configurations too."""
    settings: dict[str, Any] = {}
    for name, value in vars(config).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            settings[name] = tiny_settings(value)
        elif (
            name in _BY_NAME
            and (value is not None or name == "num_key_value_heads")
            and not isinstance(value, list | dict)
        ):
            settings[name] = _BY_NAME[name]
        elif name.endswith("_token_id") and isinstance(value, int):
            settings[name] = value % 7
        elif name.endswith("_token_id") and isinstance(value, list):
            settings[name] = [5]
    for name in config.attribute_map.values():
        if name in _BY_NAME:
            settings[name] = _BY_NAME[name]
    given = vars(config)
    if "kv_lora_rank" in given or "q_lora_rank" in given:
        settings["num_key_value_heads"] = 4
    rope = given.get("rope_parameters") or given.get("rope_scaling")
    if isinstance(rope, dict) and "mrope_section" in rope:
        settings["rope_parameters"] = {**rope, "mrope_section": [1, 1, 2], "rope_theta": rope.get("rope_theta") or 1e4}
    settings |= _OTHERS.get(config.model_type, {})
    if "layer_types" in vars(config) and config.layer_types:
        kinds = list(dict.fromkeys(config.layer_types))
        layers = max(3, len(kinds))
        settings["layer_types"] = (kinds * layers)[:layers]
        settings["num_hidden_layers"] = layers
    return settings


def boost(model: nn.Module, seed: int = 0) -> None:
    """Random weights large enough for heads that differ and look somewhere: fresh ones attend to all alike."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)
            elif "sinks" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def build(model_type: str) -> PreTrainedModel | str:
    """A tiny model, or why there is none."""
    try:
        config = transformers.AutoConfig.for_model(model_type)
        config = type(config)(**tiny_settings(config))
        with torch.device("meta"):
            shape = AutoModel.from_config(config)
        if sum(parameter.numel() for parameter in shape.parameters()) > 20_000_000:
            return "is not tiny"
        torch.manual_seed(0)
        model = AutoModel.from_config(config)
    except Exception as error:
        return f"does not build: {type(error).__name__}: {_line(error)}"
    with contextlib.suppress(ValueError):
        model.set_experts_implementation("eager")
    boost(model)
    if not _reads_text(model):
        return "does not run on texts alone" + _refusal_of(model)
    return model.eval()


def _refusal_of(model: PreTrainedModel) -> str:
    """What `wrap` says of a model that does not read texts alone: shown all the same, or one clean line."""
    try:
        shown = wrap(model)
    except AttnscopeError as error:
        assert "\n" not in str(error)
        return f" (refused: {error.message[:60]})"
    return f" (shown, {shown.info.road})"


def _reads_text(model: PreTrainedModel) -> bool:
    """Whether it runs on token numbers and nothing else."""
    batch = batches(bool(model.config.is_encoder_decoder))[1]
    inputs = {"input_ids": batch.ids} | ({} if batch.target_ids is None else {"decoder_input_ids": batch.target_ids})
    if "input_ids" not in inspect.signature(model.forward).parameters:
        return False
    try:
        with torch.no_grad():
            model.eval()(**inputs)
    except Exception:
        return False
    return True


def eager_twin(model: PreTrainedModel) -> PreTrainedModel:
    twin = AutoModel.from_config(type(model.config)(**model.config.to_dict()), attn_implementation="eager")
    with contextlib.suppress(ValueError):
        twin.set_experts_implementation("eager")
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def batches(is_encoder_decoder: bool) -> list[Batch]:
    """Two texts of unequal length, padded together, then alone. Longer than the self-check's: windows are 4 wide."""
    generator = torch.Generator().manual_seed(1)

    def numbers(lengths: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(10, VOCABULARY - 20, (2, max(lengths)), generator=generator)
        return ids, torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]

    ids, mask = numbers((11, 7))
    target, target_mask = numbers((4, 6))
    given: list[dict[str, Any]] = [{"ids": ids, "mask": mask}, {"ids": ids[:1]}, {"ids": ids[1:, :7]}]
    targets: list[dict[str, Any]] = [
        {"target_ids": target, "target_mask": target_mask},
        {"target_ids": target[:1, :4]},
        {"target_ids": target[1:]},
    ]
    return [Batch(**one, **(two if is_encoder_decoder else {})) for one, two in zip(given, targets, strict=True)]


def difference_from_eager(shown: HuggingFaceModel, model: PreTrainedModel) -> float:
    """The largest difference of a weight, or of a hidden state (relative), at real positions.

    Raises:
        AssertionError: There are other layers.
    """
    twin = eager_twin(model)
    seq2seq = bool(model.config.is_encoder_decoder)
    worst = 0.0
    for batch in batches(seq2seq):
        probe = Weights()
        with torch.no_grad():
            hidden = shown.run(batch, probe)
            inputs = {"input_ids": batch.ids, "output_attentions": True}
            if batch.mask is not None:
                inputs["input_ids"] = batch.ids.masked_fill(~batch.mask, _pad(model))
                inputs["attention_mask"] = batch.mask.long()
            if seq2seq:
                inputs["decoder_input_ids"] = batch.target_ids
            if batch.target_mask is not None:
                inputs["decoder_input_ids"] = batch.target_ids.masked_fill(~batch.target_mask, _pad(model))
                inputs["decoder_attention_mask"] = batch.target_mask.long()
            if "use_cache" in inspect.signature(twin.forward).parameters:
                inputs["use_cache"] = False
            try:
                output = twin(**inputs)
            except RuntimeError:  # no working eager attention: compared with the model's own hidden states alone
                inputs.pop("output_attentions")
                output = model(**inputs)
            if hidden_states(output) is None:
                output = twin(**inputs, output_hidden_states=True)
        queries = batch.mask if not seq2seq else batch.target_mask
        own, other = hidden, hidden_states(output)
        if queries is not None:
            own, other = own[queries], other[queries]
        worst = max(worst, float((own - other).abs().max() / other.abs().max()))
        names = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}
        if not seq2seq:
            names = dict.fromkeys(probe.maps, "attentions")
            assert len(names) == 1
        for kind, name in names.items():
            theirs = [w for w in getattr(output, name, None) or () if w is not None]
            ours = list(probe.maps[kind].values())
            if not theirs:
                continue  # none are given out: equal hidden states have to do
            assert len(ours) == len(theirs), f"{kind}: {len(ours)} layers, eager {len(theirs)}"
            real = batch.target_mask if seq2seq and kind != "encoder" else batch.mask
            for w, e in zip(ours, theirs, strict=True):
                assert w.shape == e.shape, f"{kind}: {tuple(w.shape)}, eager {tuple(e.shape)}"
                gap = (w - e).abs().amax(-1).transpose(1, 2)
                if "Sinks" in str(shown.info.notes):
                    # Some eager functions give their weights out before the sink takes its part.
                    gap = gap.minimum((w - e * w.sum(-1, keepdim=True)).abs().amax(-1).transpose(1, 2))
                worst = max(worst, float((gap if real is None else gap[real]).max()))
    return worst


def judge(model_type: str) -> tuple[str, str]:
    """What becomes of an architecture, and why: seam, eager, refused, none (no attention), unbuilt, or WRONG."""
    with _patience():
        try:
            model = build(model_type)
            if isinstance(model, str):
                return "unbuilt", model
            try:
                shown = wrap(model)
            except AttnscopeError as error:
                what = "none" if "has no attention" in error.message else "refused"
                return ("WRONG" if "\n" in str(error) else what), error.message
            gap = difference_from_eager(shown, model)
        except Exception as error:
            return "WRONG", f"{type(error).__name__}: {_line(error)}"
    notes = " ".join(shown.info.notes[:-1])
    return (shown.info.road if gap < 2e-4 else "WRONG"), f"{gap:.1e} {notes}"


def model_types() -> list[str]:
    """The architectures that AutoModel knows."""
    known = {config.model_type for config in MODEL_MAPPING}
    return sorted(known & set(CONFIG_MAPPING_NAMES))


def tally(wanted: list[str]) -> dict[str, tuple[str, str]]:
    results = {}
    for model_type in wanted:
        results[model_type] = judge(model_type)
        print(f"{model_type:28} {results[model_type][0]:8} {results[model_type][1]}", flush=True)
    return results


def summary(results: dict[str, tuple[str, str]]) -> str:
    counts = Counter(status for status, _ in results.values())
    built = sum(counts.values()) - counts["unbuilt"]
    return (
        f"transformers {transformers.__version__}: {built} text architectures build; {counts['seam']} exact through "
        f"the seam, {counts['eager']} by their own eager attention, {counts['none']} have no attention, "
        f"{counts['refused']} refused, {counts['WRONG']} wrong"
    )


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    def give_up(*_: Any) -> None:
        raise TimeoutError(f"took more than {_PATIENCE_S} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(_PATIENCE_S)
    try:
        yield
    finally:
        signal.alarm(0)


def _pad(model: PreTrainedModel) -> int:
    return getattr(model.config.get_text_config(), "pad_token_id", None) or 0


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:160]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_types", nargs="*")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(100)
    torch.set_num_threads(1)
    results = tally(given.model_types or model_types())
    if given.json:
        given.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(summary(results))
    return int(any(status == "WRONG" for status, _ in results.values()))


if __name__ == "__main__":
    sys.exit(main())
