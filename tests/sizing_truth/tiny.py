"""Tiny configurations of every architecture: the class's own fields, made small."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

WINDOW = 8
VOCABULARY = 96

# By canonical name; a class's `attribute_map` gives its own. Head dimensions differ from the
# hidden size over the heads, so that taking one for the other shows.
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "max_position_embeddings": 128,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "index_head_dim": 24,
    "index_n_heads": 2,
    "index_topk": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # encoders and decoders
    "encoder_layers": 2,
    "decoder_layers": 3,
    "num_decoder_layers": 3,
    "num_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_heads": 4,
    # states
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

_THREE = {"rope_type": "default", "rope_theta": 10000.0}
_ALIKE_HEADS = {"num_key_value_heads": 4}
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
_LFM = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
_GEMMA3N = {
    "num_hidden_layers": 10,
    "num_kv_shared_layers": 4,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
}
_GEMMA4 = {
    "num_hidden_layers": 12,
    "num_kv_shared_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 4,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
}
_INKLING = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 1,
    "swa_head_dim": 24,
    "sliding_window_size": WINDOW,
    "unpadded_vocab_size": 96,
    "rel_extent": 16,
}


_SMALL_DECODER = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": WINDOW,
}
_SMALL_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_SMALL_T5 = {
    "vocab_size": 96,
    "hidden_size": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 3,
    "num_heads": 4,
    "initializer_range": 0.02,
}


def _mrope(*section: int) -> dict[str, Any]:
    return {"rope_parameters": {**_THREE, "mrope_section": list(section)}}


PARTICULAR: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA2, "attn_layer_indices": [1, 3]},
    "canary": {
        "decoder_config": {**_SMALL_DECODER, "head_dim": 8, "vocab_size": 96},
        "encoder_config": {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48},
    },
    "chameleon": {
        "vocabulary_map": {"<image>": 4},
        "vq_config": {
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "embed_dim": 16,
            "latent_channels": 16,
            "num_embeddings": 16,
            "num_res_blocks": 1,
        },
    },
    "cohere_asr": {
        "encoder_config": {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48},
        "head_dim": 8,
    },
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": _THREE,
            "sliding_attention": _THREE,
        }
    },
    "codegen": {"rotary_dim": 4},
    "cosmos3_edge_text": _mrope(2, 3, 3),
    "ctrl": {"dff": 32},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "hidden_size": 32, "moe_num_experts": 4},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 4},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 3,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "deepseek_v4": {
        "compress_rates": {"heavily_compressed_attention": 8, "compressed_sparse_attention": 4}
    },
    "dory": {"n_input_layers": 2, "n_recurrent_layers": 2, "n_output_layers": 2},
    "dots1": {"n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note_text": {
        "head_dim": 24,
        "shared_experts_intermediate_size": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 12,
        "swa_kv_lora_rank": 20,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 12,
    },
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [16, 16], "moe_num_shared_experts": 1},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 64, "num_hidden_layers": 3, "mamba_chunk_size": 8},
    "gemma3n_text": _GEMMA3N,
    "gemma4_text": _GEMMA4,
    "git": {"vision_config": _SMALL_VISION},
    "glm4v_text": _mrope(2, 1, 1),
    "glm_ocr_text": _mrope(2, 1, 1),
    "glm4v_moe_text": _mrope(1, 1, 0),
    "glm5_next_text": {
        "qk_rope_head_dim": 0,
        "index_kpool": 4,
        "index_topk": 4,
        "linear_num_heads": 2,
        "linear_head_dim": 8,
    },
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 8},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {
        **_MAMBA2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_hidden_layers": 3,
    },
    "helium": {"head_dim": 8},
    "hunyuan_vl_text": _mrope(3, 3, 2),
    "hy_v4_vl_text": _mrope(2, 1, 1),
    "idefics": {
        "vision_config": {**_SMALL_VISION, "embed_dim": 32},
        "perceiver_config": {"resampler_depth": 1, "resampler_n_heads": 2, "resampler_head_dim": 8},
        "additional_vocab_size": 0,
    },
    "inkling_text": _INKLING,
    "inkling2_text": _INKLING,
    "inkling2_loop_text": {
        **_INKLING,
        "num_hidden_layers": 12,
        "loop_layer_index_start": 4,
        "loop_layer_index_end": 8,
        "n_layers_per_attn_res_block": 2,
    },
    "jamba": {"num_hidden_layers": 9, "mamba_d_state": 8},
    "kimi_linear": {
        "num_hidden_layers": 8,
        "linear_num_heads": 2,
        "linear_head_dim": 8,
        **_ALIKE_HEADS,
    },
    "kosmos_2_text_model": {"layers": 3, "embed_dim": 32, "attention_heads": 4, "ffn_dim": 48},
    "kosmos_2_5_text_model": {"layers": 3, "embed_dim": 32, "attention_heads": 4, "ffn_dim": 48},
    "lfm2": _LFM,
    "lfm2_moe": {**_LFM, "num_dense_layers": 1},
    "longcat_flash": {
        "head_dim": 8,
        **_ALIKE_HEADS,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "mllama_text_model": {"cross_attention_layers": [1, 3]},
    "minicpm3": _ALIKE_HEADS,
    "moonshine": {
        "encoder_num_attention_heads": 4,
        "encoder_num_key_value_heads": 4,
        "num_key_value_heads": 4,
        "encoder_num_hidden_layers": 1,
    },
    "moonshine_streaming": {
        "num_key_value_heads": 2,
        "encoder_config": {"hidden_size": 32, "num_hidden_layers": 1},
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 16,
    },
    "paddleocr_vl_text": _mrope(2, 3, 3),
    "phi4_multimodal": {
        "vision_config": _SMALL_VISION,
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 32,
        },
    },
    "pix2struct": {"text_config": _SMALL_T5, "vision_config": {**_SMALL_VISION, "d_ff": 48}},
    "pp_formulanet": {"text_config": _SMALL_DECODER, "vision_config": _SMALL_VISION},
    "qwen2_vl_text": _mrope(2, 1, 1),
    "qwen2_5_vl_text": _mrope(2, 1, 1),
    "qwen2_5_omni_text": _mrope(2, 1, 1),
    "qwen4_exp_text": {
        "num_hidden_layers": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 24,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 8,
        "ple_layer_ids": [2],
        "ple_embed_dim": 32,
        "ngram_vocab_size_base": 512,
        "split_ngram_parts": 1,
        "heads_per_ngram": 2,
    },
    "reformer": {"is_decoder": True},
    "roc_bert": {"pronunciation_vocab_size": 96, "shape_vocab_size": 96},
    "t5gemma": {"encoder": _SMALL_DECODER, "decoder": _SMALL_DECODER},
    "t5gemma2": {
        "encoder": {"text_config": _SMALL_DECODER, "vision_config": _SMALL_VISION},
        "decoder": _SMALL_DECODER,
    },
    "xlstm": {"hidden_size": 256},
    "xmod": {"languages": ["en"], "default_language": "en"},
    "zamba": {"num_hidden_layers": 9, "mamba_d_state": 8, "attention_head_dim": 16},
    "zamba2": {
        "num_hidden_layers": 8,
        "layers_block_type": ["linear_attention", "hybrid"] * 4,
        "n_mamba_heads": 4,
        "mamba_d_state": 8,
        "chunk_size": 8,
    },
    "zaya": {
        "layer_types": ["hybrid", "hybrid_sliding"] * 3,
        "num_experts_per_tok": 1,
        "router_hidden_size": 16,
    },
}
"""What an architecture needs beside or instead."""


def names(config_class: Any) -> dict[str, str]:
    """The class's own name of each field, by canonical name."""
    own = {field.name: field.name for field in dataclasses.fields(config_class)}
    for canonical, name in config_class.attribute_map.items():
        if name in own:
            own[canonical] = name
    return own


def small(model_type: str, config_class: Any) -> dict[str, Any]:
    """Arguments that make a class's configuration tiny."""
    own = names(config_class)
    kept = {own[name]: value for name, value in SMALL.items() if name in own}
    if "kv_lora_rank" in own:
        kept[own["num_key_value_heads"]] = kept[own["num_attention_heads"]]
    if "is_decoder" in own and not getattr(config_class(), "is_encoder_decoder", False):
        kept["is_decoder"] = True
    for name, value in PARTICULAR.get(model_type, {}).items():
        kept[own.get(name, name)] = value
    return kept


ENCODER_LEN = 7
"""Tokens of the encoder."""
TEXT_PARTS = ("text_config", "thinker_config", "decoder")


def tiny(model_type: str, more: dict[str, Any] | None = None) -> tuple[dict[str, Any], Any]:
    """A tiny configuration as it would be published, and that of its text part.

    The parts around the text are as large as their defaults say, for nobody builds them.
    """
    outer = CONFIG_MAPPING[model_type]
    path = _path(outer)
    if not path:
        config = outer(**small(model_type, outer), **(more or {}))
        return config.to_dict(), config
    whole = outer()
    inner: Any = whole
    for name in path:
        inner = getattr(inner, name)
    part = type(inner)(**small(inner.model_type, type(inner)))
    published = whole.to_dict()
    at = published
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = part.to_dict()
    return published, part


def _path(config_class: Any) -> list[str]:
    """Names of the nested configurations that lead to the text part."""
    found = config_class()
    path: list[str] = []
    while True:
        name = next((name for name in TEXT_PARTS if name in type(found).sub_configs), None)
        if name is None:
            return path
        inner = getattr(found, name)
        if found.is_encoder_decoder and not inner.is_encoder_decoder:
            return path  # its decoder is of no use without its encoder
        path.append(name)
        found = inner
