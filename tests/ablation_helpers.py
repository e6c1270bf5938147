"""What the tests of ablation share: tiny random models of each kind, in memory and in folders."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from attnscope.models.hf.assembling import wrap
from attnscope.models.hf.model import HuggingFaceModel
from attnscope.models.model import Batch

VOCABULARY = 41
_SMALL = {"hidden_size": 15, "num_attention_heads": 3, "num_hidden_layers": 3, "intermediate_size": 11}
_WIDE = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 11}
_GROUPED = {
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 11,
}
_T5 = {
    "d_model": 15,
    "d_kv": 5,
    "num_heads": 3,
    "num_layers": 2,
    "d_ff": 11,
    "decoder_start_token_id": 0,
}
_BART = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 3) | dict.fromkeys(
    ("encoder_layers", "decoder_layers"), 2
)
SIZES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", _SMALL),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 15, "n_head": 3, "n_layer": 3}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED | {"num_hidden_layers": 3}),
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", _SMALL | {"embedding_size": 7}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _WIDE),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", _GROUPED | {"num_hidden_layers": 2, "pad_token_id": 0}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", _WIDE),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        _BART | {"d_model": 15, "encoder_ffn_dim": 11, "decoder_ffn_dim": 11},
    ),
}


def tiny(
    name: str, *, dtype: torch.dtype = torch.float32, **overrides: Any
) -> transformers.PreTrainedModel:
    """A random model; no parameter is left at 0 or 1, so that any mix-up of two shows."""
    model_class, config_class, sizes = SIZES[name]
    special = {"bos_token_id": 1, "eos_token_id": 2}
    config = getattr(transformers, config_class)(
        **{"vocab_size": VOCABULARY, **special, **sizes, **overrides}
    )
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    model.tie_weights()
    return model.eval()


def wrapped(name: str, **more: Any) -> HuggingFaceModel:
    """The same behind the seam."""
    return wrap(tiny(name, **more))


def batch_of(model: HuggingFaceModel, n_texts: int = 2, n_tokens: int = 7, n_target: int = 5) -> Batch:
    """Random tokens; for an encoder-decoder a target of another length."""
    chance = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (n_texts, n_tokens), generator=chance)
    target = torch.randint(3, VOCABULARY, (n_texts, n_target), generator=chance)
    return Batch(ids, target_ids=target if "cross" in model.info.kinds else None)


def save_tiny(folder: Path, name: str, **more: Any) -> Path:
    """A model in a folder, with BERT's tokenizer over the letters."""
    from tests.conftest import VOCABULARY as LETTERS
    from tests.conftest import write_tokenizer

    tiny(name, **{"vocab_size": len(LETTERS), **more}).save_pretrained(folder)
    write_tokenizer(folder)
    # Its configuration names the special tokens, for whichever class reads it.
    transformers.BertTokenizer.from_pretrained(folder).save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return folder
