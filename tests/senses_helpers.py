"""Tiny random models that see and hear, with their processors, in folders."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def write_vision(
    folder: Path,
    model_type: str = "vit",
    *,
    hidden: int = 24,
    heads: int = 4,
    layers: int = 2,
    image: int = 24,
    patch: int = 8,
    std: float = 0.3,
    processor: str = "ViTImageProcessor",
    **more: Any,
) -> Path:
    """Writes a random vision transformer and an image processor that resizes to what it takes."""
    import torch
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "num_hidden_layers": layers}
    if model_type.startswith("dinov2"):
        sizes["mlp_ratio"] = 2
    else:
        sizes["intermediate_size"] = 2 * hidden
    config = AutoConfig.for_model(model_type, **sizes, image_size=image, patch_size=patch, **more)
    model = AutoModel.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            sharp = any(part in name for part in ("query", "key", "q_proj", "k_proj"))
            parameter.normal_(std=3 * std if sharp else std)
    model.save_pretrained(folder)
    described = {
        "image_processor_type": processor,
        "do_resize": True,
        "size": {"height": image, "width": image},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.4, 0.6],
        "image_std": [0.5, 0.25, 0.2],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(described), "utf-8")
    return folder


def photo(height: int = 40, width: int = 60) -> NDArray[np.uint8]:
    """A picture of slopes in three colours."""
    y, x = np.mgrid[:height, :width]
    return np.stack([255 * x // width, 255 * y // height, 255 * (x + y) // (height + width)], -1).astype(
        np.uint8
    )


def dense_float64(folder: Path, pixels: Any) -> list[NDArray[np.float64]]:
    """The weights of each layer by the model's own eager attention in float64, (head, query, key)."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float64).eval()
    with torch.no_grad():
        output = model(pixel_values=pixels.double(), output_attentions=True)
    return [weights[0].numpy() for weights in output.attentions]


WORDS = ["<|startoftranscript|>", "<|endoftext|>", "<pad>", "the", "cat", "sat", "on", "a", "mat", "."]


def write_whisper(folder: Path, *, seconds: int = 1, layers: int = 2, heads: int = 3) -> Path:
    """Writes a random Whisper that listens for a few seconds, with a tokenizer of ten words and its extractor."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import (
        PreTrainedTokenizerFast,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
    )

    rate, hop = 16000, 160
    config = WhisperConfig(
        vocab_size=len(WORDS),
        num_mel_bins=8,
        d_model=8 * heads,
        max_source_positions=seconds * rate // hop // 2,
        max_target_positions=16,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        pad_token_id=2,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=0,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name:
                parameter.normal_(std=0.9 if "q_proj" in name or "k_proj" in name else 0.25)
    model.save_pretrained(folder)
    backend = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<pad>"))
    backend.pre_tokenizer = Whitespace()
    backend.post_processor = TemplateProcessing(
        single=f"{WORDS[0]} $A {WORDS[1]}", special_tokens=[(WORDS[0], 0), (WORDS[1], 1)]
    )
    special = {"bos_token": WORDS[0], "eos_token": WORDS[1], "pad_token": WORDS[2]}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(folder)
    WhisperFeatureExtractor(
        feature_size=8, sampling_rate=rate, hop_length=hop, chunk_length=seconds
    ).save_pretrained(folder)
    return folder


def speech(seconds: float, rate: int = 16000) -> NDArray[np.float32]:
    """A tone that rises and comes and goes."""
    t = np.arange(round(seconds * rate)) / rate
    return (np.sin(2 * np.pi * (200 + 300 * t) * t) * (0.3 + 0.2 * np.sin(9 * t))).astype(np.float32)
