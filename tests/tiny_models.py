"""Tiny random models of several architectures, made on the spot."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import transformers as tf

VOCABULARY = 101
POSITIONS = 1024

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_GROUPED: dict[str, Any] = {**_COMMON, "num_key_value_heads": 2}
_HEADS: dict[str, Any] = {**_GROUPED, "head_dim": 16}
_SPECIAL: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def _gpt2() -> Any:
    config = tf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=64, n_layer=3, n_head=4, n_positions=POSITIONS, **_SPECIAL
    )
    return tf.GPT2LMHeadModel(config)


def _opt() -> Any:
    config = tf.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        word_embed_proj_dim=64,
        max_position_embeddings=POSITIONS,
        **_SPECIAL,
    )
    return tf.OPTForCausalLM(config)


def _bloom() -> Any:
    config = tf.BloomConfig(vocab_size=VOCABULARY, hidden_size=64, n_layer=3, n_head=4, **_SPECIAL)
    return tf.BloomForCausalLM(config)


def _t5() -> Any:
    config = tf.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4
    )
    return tf.T5ForConditionalGeneration(config)


def _mamba() -> Any:
    config = tf.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, **_SPECIAL)
    return tf.MambaForCausalLM(config)


def _latent() -> Any:
    config = tf.DeepseekV3Config(
        **{**_COMMON, "num_key_value_heads": 4},
        moe_intermediate_size=16,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    return tf.DeepseekV3ForCausalLM(config)


# Decoders whose layers all attend to every token: rope, grouped heads, learned positions, biases,
# latents.
SUPPORTED: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_GROUPED)),
    "qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**_GROUPED)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_HEADS)),
    "gemma": lambda: tf.GemmaForCausalLM(tf.GemmaConfig(**_HEADS)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**_GROUPED, sliding_window=None)),
    "neox": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**_COMMON)),
    "gpt2": _gpt2,
    "opt": _opt,
    "bloom": _bloom,
    "latent": _latent,
}

WINDOW = 24


def mistral(window: int = WINDOW) -> Any:
    """Every layer has a window."""
    return tf.MistralForCausalLM(tf.MistralConfig(**_GROUPED, sliding_window=window))


def gemma3(window: int = WINDOW) -> Any:
    """Every third layer attends to every token."""
    fields = {**_HEADS, "num_hidden_layers": 6, "sliding_window": window}
    types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    return tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**fields, layer_types=types))


def _gemma4() -> Any:
    fields = {
        **_HEADS,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "global_head_dim": 32,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
    }
    return tf.Gemma4ForCausalLM(tf.Gemma4TextConfig(**fields, sliding_window=WINDOW))


def _gpt_oss() -> Any:
    fields = {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = tf.GptOssConfig(**fields, sliding_window=WINDOW, rope_parameters=rope)
    return tf.GptOssForCausalLM(config)


def _chunked() -> Any:
    fields = {**_HEADS, "intermediate_size_mlp": 96, "num_local_experts": 2}
    return tf.Llama4ForCausalLM(tf.Llama4TextConfig(**fields, attention_chunk_size=32))


# Decoders some or all of whose layers have a sliding window; one shares caches between layers and
# has heads of two sizes.
WINDOWED: dict[str, Callable[[], Any]] = {
    "mistral": mistral,
    "gemma2": lambda: tf.Gemma2ForCausalLM(tf.Gemma2Config(**_HEADS, sliding_window=WINDOW)),
    "gemma3": gemma3,
    "gemma4": _gemma4,
    "gpt-oss": _gpt_oss,
}

# Architecture, and the field that the refusal must name.
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "chunked": (_chunked, "config.layer_types"),
    "encoder and decoder": (_t5, "config.is_encoder_decoder"),
    "recurrent": (_mamba, "config.layer_types"),
    "hybrid": (
        lambda: tf.Qwen3NextForCausalLM(tf.Qwen3NextConfig(**_HEADS)),
        "config.layer_types",
    ),
}


def make(build: Callable[[], Any], seed: int = 0) -> Any:
    """A model in evaluation mode whose weights depend on `seed` alone."""
    torch.manual_seed(seed)
    return build().eval()


def llama(seed: int = 0) -> Any:
    """The tiny model that most tests use."""
    return make(SUPPORTED["llama"], seed)


def token_ids(count: int, seed: int = 0) -> list[int]:
    """Random tokens without the special ones."""
    source = random.Random(seed)
    return [source.randrange(3, VOCABULARY) for _ in range(count)]
