"""Makes what an engine loads: `python model.py (model | windows | states | adapter) PATH SEED`.

A tiny model of random weights, one with windows in some layers, one with recurrent state in some,
or a LoRA adapter of the first, whose every token changes the answers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

VOCABULARY = 128
WINDOW = 64
LAYERS, HIDDEN, HEADS, HEAD_DIM, RANK = 3, 128, 2, 32, 8
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 192,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What the models share."""


def model(directory: str, seed: int) -> None:
    """Writes a model of random weights."""
    import torch
    import transformers as tf

    torch.manual_seed(seed)
    config = tf.LlamaConfig(
        **SHAPE,
        pad_token_id=2,
    )
    tf.LlamaForCausalLM(config).float().save_pretrained(directory)


def windows(directory: str, seed: int) -> None:
    """Writes a model of random weights in which two layers of three see a window only."""
    import torch
    import transformers as tf

    torch.manual_seed(seed)
    config = tf.Gemma3TextConfig(
        **SHAPE,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        pad_token_id=0,
    )
    tf.Gemma3ForCausalLM(config).float().save_pretrained(directory)


def states(directory: str, seed: int) -> None:
    """Writes a model of random weights in which every other layer keeps a state of all tokens."""
    import torch
    import transformers as tf

    torch.manual_seed(seed)
    shape = {**SHAPE, "num_hidden_layers": 4}
    config = tf.Lfm2Config(
        **shape,
        layer_types=["conv", "full_attention"] * 2,
        conv_L_cache=3,
        block_auto_adjust_ff_dim=False,
        pad_token_id=0,
    )
    made = tf.Lfm2ForCausalLM(config).float()
    # By these names vLLM reads what transformers calls otherwise by now.
    made.config.update({"conv_dim": HIDDEN, "block_dim": HIDDEN, "block_ff_dim": 192})
    made.config.update({"block_multiple_of": 64, "block_ffn_dim_multiplier": 1.0})
    made.save_pretrained(directory)


def adapter(directory: str, seed: int) -> None:
    """Writes a LoRA adapter of random weights for keys and values."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for name in ("k_proj", "v_proj"):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(RANK, HIDDEN)
            tensors[f"{at}.lora_B.weight"] = torch.randn(HEADS * HEAD_DIM, RANK)
    Path(directory).mkdir(exist_ok=True)
    save_file(tensors, f"{directory}/adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["k_proj", "v_proj"],
    }
    Path(directory, "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    kinds = {"model": model, "windows": windows, "states": states, "adapter": adapter}
    kinds[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
