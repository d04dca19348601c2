"""Makes a tiny model for an engine to load: `python model.py DIRECTORY SEED`."""

from __future__ import annotations

import sys

VOCABULARY = 128


def make(directory: str, seed: int) -> None:
    """Writes a model of random weights: its answers depend on all that it was given."""
    import torch
    import transformers as tf

    torch.manual_seed(seed)
    config = tf.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    tf.LlamaForCausalLM(config).float().save_pretrained(directory)


if __name__ == "__main__":
    make(sys.argv[1], int(sys.argv[2]))
