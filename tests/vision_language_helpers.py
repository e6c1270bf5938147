"""Tiny random models that read pictures and write words, one of each family, with their processors, in folders."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

QUESTION = [
    "what",
    "is",
    "on",
    "the",
    "table",
    "?",
    "a",
    "cat",
    "dog",
    "two",
    "cups",
    "near",
    "window",
    ".",
    "red",
]
CHAT = (
    "{% for message in messages %}User: {% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %} Assistant:{% endif %}"
)
TEXT: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
SIGHT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def noise(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """A photo on which no two places are alike."""
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)


def _tokenizer(marks: list[str], **named: str) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Sequence, Split
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", "User", "Assistant", ":", "\n", "\n\n", *QUESTION]
    backend = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = Sequence(
        [Split(Regex(r" +"), "removed"), Split(Regex(r"\n+|\w+|[^\w\s]"), "isolated")]
    )
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special, extra_special_tokens=named)


def _without_videos(kind: type) -> Any:
    from attnscope.models.hf.loading import drop_video_processor

    return drop_video_processor(kind)


def write_llava(folder: Path, kind: str = "llava", **sight: Any) -> None:
    import transformers as t

    side = 40 if kind == "llava" else 32
    name = {"llava": "Llava", "llava_next": "LlavaNext"}[kind]
    grid = (
        {}
        if kind == "llava"
        else {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]]}
    )
    images = t.CLIPImageProcessorPil if kind == "llava" else t.LlavaNextImageProcessorPil
    tokenizer = _tokenizer(["<image>"], image_token="<image>")
    processor = getattr(t, f"{name}Processor")(
        images(size={"shortest_edge": side}, crop_size={"height": side, "width": side}, **grid),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT.replace("IMAGE", "<image>\n"),
    )
    config = getattr(t, f"{name}Config")(
        vision_config=t.CLIPVisionConfig(**{**SIGHT, "image_size": side, "patch_size": 8, **sight}),
        text_config=t.LlamaConfig(**TEXT, vocab_size=len(tokenizer)),
        image_token_index=processor.image_token_id,
        vision_feature_layer=-1,
        **grid,
    )
    _write(folder, processor, config)


def write_smolvlm(folder: Path, **sight: Any) -> None:
    import transformers as t

    places = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    marks = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *places]
    tokenizer = _tokenizer(marks)
    images = t.SmolVLMImageProcessorPil(size={"longest_edge": 128}, max_image_size={"longest_edge": 32})
    processor = _without_videos(t.SmolVLMProcessor)(
        images, tokenizer, None, image_seq_len=4, chat_template=CHAT.replace("IMAGE", "<image>")
    )
    config = t.SmolVLMConfig(
        vision_config={**SIGHT, "image_size": 32, "patch_size": 8, **sight},
        text_config=t.LlamaConfig(**TEXT, vocab_size=len(tokenizer)),
        scale_factor=2,
        image_token_id=processor.image_token_id,
        pad_token_id=0,
    )
    _write(folder, processor, config)


def write_qwen(folder: Path, kind: str, **sight: Any) -> None:
    import transformers as t

    marks = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = _tokenizer(marks)
    images = t.Qwen2VLImageProcessorPil(
        size={"shortest_edge": 32 * 32, "longest_edge": 96 * 96},
        patch_size=8,
        merge_size=2,
        temporal_patch_size=2,
    )
    name = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[kind]
    processor = _without_videos(getattr(t, f"{name}Processor"))(
        images,
        tokenizer,
        None,
        chat_template=CHAT.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>"),
    )
    vision = {
        "depth": 1,
        "num_heads": 2,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "out_hidden_size": 24,
        "in_channels": 3,
    }
    if kind == "qwen2_5_vl":
        vision |= {"window_size": 32, "fullatt_block_indexes": [0]}
    else:
        vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1]}
    text = {**TEXT, "vocab_size": len(tokenizer), "rope_parameters": rope}
    if kind == "qwen3_vl":
        text |= {"head_dim": 6}
    ids = {
        name: tokenizer.convert_tokens_to_ids(f"<|{name.removesuffix('_token_id')}|>")
        for name in ("vision_start_token_id", "vision_end_token_id")
    }
    ids |= {"image_token_id": processor.image_token_id, "video_token_id": processor.video_token_id}
    config = getattr(t, f"{name}Config")(vision_config={**vision, **sight}, text_config=text, **ids)
    _write(folder, processor, config)


def write_gemma3(folder: Path, **sight: Any) -> None:
    import transformers as t

    marks = ["<start_of_image>", "<image_soft_token>", "<end_of_image>"]
    tokenizer = _tokenizer(
        marks, boi_token="<start_of_image>", image_token="<image_soft_token>", eoi_token="<end_of_image>"
    )
    processor = t.Gemma3Processor(
        t.Gemma3ImageProcessorPil(size={"height": 48, "width": 48}),
        tokenizer,
        image_seq_length=9,
        chat_template=CHAT.replace("IMAGE", "<start_of_image>"),
    )
    vision = t.SiglipVisionConfig(
        **{**SIGHT, "image_size": 48, "patch_size": 8, "vision_use_head": False, **sight}
    )
    text = t.Gemma3TextConfig(
        **{**TEXT, "head_dim": 6, "vocab_size": len(tokenizer), "sliding_window": 64}
    )
    ids = {name: getattr(tokenizer, f"{name}_id") for name in ("boi_token", "eoi_token", "image_token")}
    config = t.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=9,
        boi_token_index=ids["boi_token"],
        eoi_token_index=ids["eoi_token"],
        image_token_index=ids["image_token"],
    )
    _write(folder, processor, config)


def write_internvl(folder: Path, **sight: Any) -> None:
    import transformers as t

    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
    }
    tokenizer = _tokenizer([*named.values(), "<video>"], **named, video_token="<video>")
    images = t.GotOcr2ImageProcessorPil(
        size={"height": 32, "width": 32}, crop_to_patches=True, min_patches=1, max_patches=6
    )
    processor = _without_videos(t.InternVLProcessor)(
        images,
        tokenizer,
        None,
        image_seq_length=4,
        chat_template=CHAT.replace("IMAGE", "<IMG_CONTEXT>\n"),
    )
    vision = t.InternVLVisionConfig(**{**SIGHT, "image_size": [32, 32], "patch_size": [8, 8], **sight})
    text = t.Qwen2Config(**TEXT, vocab_size=len(tokenizer))
    config = t.InternVLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=processor.image_token_id,
        image_seq_length=4,
        vision_feature_layer=-1,
        downsample_ratio=0.5,
    )
    _write(folder, processor, config)


def write_mllama(folder: Path, **sight: Any) -> None:
    import transformers as t

    tokenizer = _tokenizer(["<|image|>", "<|python_tag|>"])
    images = t.MllamaImageProcessorPil(size={"height": 40, "width": 40}, max_image_tiles=4)
    template = CHAT.replace("IMAGE", "<|image|>")
    processor = t.MllamaProcessor(images, tokenizer, chat_template="{{ bos_token }}" + template)
    vision: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_global_layers": 1,
        "attention_heads": 2,
        "image_size": 40,
        "patch_size": 8,
        "max_num_tiles": 4,
        "intermediate_layers_indices": [0],
        "vision_output_dim": 32,
        "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    text = {**TEXT, "num_hidden_layers": 4, "cross_attention_layers": [1, 3], "rope_parameters": rope}
    config = t.MllamaConfig(
        vision_config={**vision, **sight},
        text_config={**text, "vocab_size": len(tokenizer)},
        image_token_index=processor.image_token_id,
    )
    _write(folder, processor, config)


def write_blip(folder: Path, **sight: Any) -> None:
    import transformers as t

    tokenizer = _tokenizer([])
    processor = t.BlipProcessor(t.BlipImageProcessorPil(size={"height": 48, "width": 48}), tokenizer)
    text = {
        "hidden_size": 24,
        "encoder_hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "sep_token_id": 2,
        "vocab_size": len(tokenizer),
        "projection_dim": 16,
    }
    vision = {**SIGHT, "image_size": 48, "patch_size": 8, **sight}
    config = t.BlipConfig(text_config=text, vision_config=vision, projection_dim=16)
    _write(folder, processor, config, t.BlipForConditionalGeneration)


def write_queries(folder: Path, n_queries: int = 5, **sight: Any) -> None:
    """BLIP-2: learned queries look at the patches, and words at the queries."""
    import transformers as t

    tokenizer = _tokenizer([])
    images = t.BlipImageProcessorPil(size={"height": 48, "width": 48})
    processor = t.Blip2Processor(images, tokenizer, num_query_tokens=n_queries)
    n = len(tokenizer)  # the processor adds the mark of pictures
    queries = {
        "hidden_size": 24,
        "encoder_hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "cross_attention_frequency": 2,
        "vocab_size": n,
        "pad_token_id": 0,
    }
    text = t.OPTConfig(
        hidden_size=24,
        ffn_dim=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=24,
        max_position_embeddings=8192,
        vocab_size=n,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    config = t.Blip2Config(
        vision_config={**SIGHT, "image_size": 48, "patch_size": 8, **sight},
        qformer_config=queries,
        text_config=text,
        num_query_tokens=n_queries,
        image_token_index=processor.tokenizer.convert_tokens_to_ids("<image>"),
    )
    _write(folder, processor, config, t.Blip2ForConditionalGeneration)


def write_captioner(folder: Path, kind: str = "trocr", **sight: Any) -> None:
    """A vision encoder and a text decoder with cross-attention to its patches."""
    import transformers as t

    tokenizer = _tokenizer([])
    vision: Any = t.ViTConfig(**{**SIGHT, "image_size": 40, "patch_size": 8, **sight})
    images: Any = t.ViTImageProcessorPil(size={"height": 40, "width": 40})
    if kind == "donut":
        vision = t.DonutSwinConfig(
            image_size=[48, 64],
            patch_size=4,
            embed_dim=8,
            depths=[1, 1],
            num_heads=[2, 2],
            window_size=4,
            **sight,
        )
        images = t.DonutImageProcessorPil(size={"height": 48, "width": 64}, do_align_long_axis=False)
    n = len(tokenizer)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 32,
        "max_position_embeddings": 512,
    }
    across = {"is_decoder": True, "add_cross_attention": True}
    decoder: Any
    if kind == "trocr":
        decoder = t.TrOCRConfig(d_model=24, cross_attention_hidden_size=16, vocab_size=n, **sizes, **ids)
    elif kind == "donut":
        decoder = t.MBartConfig(d_model=16, vocab_size=n, **sizes, **across, **ids)
    elif kind == "gpt2":
        decoder = t.GPT2Config(n_embd=24, n_layer=2, n_head=4, n_inner=32, vocab_size=n, **across, **ids)
    else:
        bert = {
            "hidden_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 32,
        }
        decoder = t.BertConfig(vocab_size=n, **bert, **across, **ids)
    config = t.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    _write(folder, images, config, t.VisionEncoderDecoderModel)
    tokenizer.save_pretrained(folder)


ACROSS: dict[str, Callable[..., None]] = {
    "mllama": write_mllama,
    "blip": write_blip,
    "blip-2": write_queries,
    "trocr": lambda folder, **sight: write_captioner(folder, "trocr", **sight),
    "gpt2": lambda folder, **sight: write_captioner(folder, "gpt2", **sight),
    "bert": lambda folder, **sight: write_captioner(folder, "bert", **sight),
    "donut": lambda folder, **sight: write_captioner(folder, "donut", **sight),
}
"""Families with cross-attention from words, or learned queries, to the patches."""

FAMILIES: dict[str, Callable[..., None]] = {
    "llava": write_llava,
    "llava_next": lambda folder, **sight: write_llava(folder, "llava_next", **sight),
    "smolvlm": write_smolvlm,
    "qwen2_5_vl": lambda folder, **sight: write_qwen(folder, "qwen2_5_vl", **sight),
    "qwen3_vl": lambda folder, **sight: write_qwen(folder, "qwen3_vl", **sight),
    "gemma3": write_gemma3,
    "internvl": write_internvl,
}


def write_family(folder: Path, name: str, **sight: Any) -> Path:
    """Writes a model of a family, with its processor."""
    from transformers.models.smolvlm import processing_smolvlm

    # Without num2words it is not even made; only its prompts for videos need it.
    processing_smolvlm.num2words = processing_smolvlm.num2words or str
    (FAMILIES | ACROSS)[name](folder, **sight)
    return folder


def _write(folder: Path, processor: Any, config: Any, kind: Any = None) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config) if kind is None else kind(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_norm" in name:
                parameter.fill_(4.0)
            elif name.endswith("gate"):  # Mllama's, that are closed before training
                parameter.fill_(0.7)
            elif parameter.ndim > 1 or "bias" in name:
                sharp = any(part in name for part in ("q_proj", "k_proj", "query", "key"))
                parameter.normal_(std=0.5 if sharp else 0.2)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
