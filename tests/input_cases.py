"""Inputs for model types of transformers that attnscope refuses without inputs; each tiny and random."""

from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.glm4v import configuration_glm4v, modeling_glm4v
from transformers.models.qwen2_5_vl import configuration_qwen2_5_vl, modeling_qwen2_5_vl
from transformers.models.qwen3_vl import configuration_qwen3_vl, modeling_qwen3_vl

Case = tuple[nn.Module, dict[str, Any]]
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SERIES: dict[str, Any] = {
    "prediction_length": 6,
    "context_length": 12,
    "lags_sequence": [1, 2],
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_time_features": 2,
}
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 4,
}


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 30, shape)


def _pictures(n: int, size: int = 32) -> torch.Tensor:
    return torch.randn(n, 3, size, size)


def _series() -> dict[str, torch.Tensor]:
    return {
        "past_values": torch.randn(3, 14),
        "past_time_features": torch.randn(3, 14, 2),
        "past_observed_mask": torch.ones(3, 14),
        "future_values": torch.randn(3, 6),
        "future_time_features": torch.randn(3, 6, 2),
    }


def _grid() -> dict[str, torch.Tensor]:
    return {"hidden_states": torch.randn(16, 3 * 2 * 16), "grid_thw": torch.tensor([[1, 4, 4]])}


def time_series_transformer() -> Case:
    return transformers.TimeSeriesTransformerModel(
        transformers.TimeSeriesTransformerConfig(**SERIES)
    ), _series()


def informer() -> Case:
    config = transformers.InformerConfig(**SERIES, attention_type="full", distil=False)
    return transformers.InformerModel(config), _series()


def blip_2_qformer() -> Case:
    model = transformers.Blip2QFormerModel(
        transformers.Blip2QFormerConfig(encoder_hidden_size=16, **SIZES)
    )
    return model, {
        "query_embeds": torch.randn(2, 8, 32),
        "encoder_hidden_states": torch.randn(2, 11, 16),
    }


def qwen2_5_vl_vision() -> Case:
    config = configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig(
        **VISION, window_size=16, fullatt_block_indexes=[0, 1]
    )
    return modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel(config), _grid()


def qwen3_vl_vision() -> Case:
    config = configuration_qwen3_vl.Qwen3VLVisionConfig(
        **VISION, num_position_embeddings=16, deepstack_visual_indexes=[0]
    )
    return modeling_qwen3_vl.Qwen3VLVisionModel(config), _grid()


def glm4v_vision() -> Case:
    return modeling_glm4v.Glm4vVisionModel(
        configuration_glm4v.Glm4vVisionConfig(**VISION, image_size=16)
    ), _grid()


def vit_mae() -> Case:
    config = transformers.ViTMAEConfig(image_size=32, patch_size=8, mask_ratio=0.5, **SIZES)
    return transformers.ViTMAEModel(config), {"pixel_values": _pictures(2), "noise": torch.rand(2, 16)}


def sam_vision_model() -> Case:
    config = transformers.SamVisionConfig(
        hidden_size=32,
        output_channels=8,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        window_size=0,
        global_attn_indexes=[0, 1],
        mlp_dim=16,
    )
    return transformers.SamVisionModel(config), {"pixel_values": _pictures(2)}


def data2vec_vision() -> Case:
    config = transformers.Data2VecVisionConfig(image_size=32, patch_size=8, **SIZES)
    return transformers.Data2VecVisionModel(config), {"pixel_values": _pictures(2)}


def udop() -> Case:
    config = transformers.UdopConfig(
        vocab_size=40,
        d_model=32,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        image_size=16,
        patch_size=8,
    )
    text = {"input_ids": _ids(2, 9), "bbox": torch.rand(2, 9, 4), "decoder_input_ids": _ids(2, 5)}
    return transformers.UdopModel(config), {**text, "pixel_values": _pictures(2, 16)}


CASES = {
    case.__name__: case
    for case in (
        time_series_transformer,
        informer,
        blip_2_qformer,
        qwen2_5_vl_vision,
        qwen3_vl_vision,
        glm4v_vision,
        vit_mae,
        sam_vision_model,
        data2vec_vision,
        udop,
    )
}
