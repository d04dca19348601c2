"""Model types that are not known: inferred where the configuration says enough, else refused."""

from __future__ import annotations

from tiered_kv.sizing.checks import fault
from tiered_kv.sizing.families.arch import LEGACY_TYPES, Arch
from tiered_kv.sizing.families.latent import latent
from tiered_kv.sizing.fields import Fields

_HINTS = (
    "mamba",
    "ssm",
    "rwkv",
    "linear_",
    "lru_",
    "conv_kernel",
    "conv_L_cache",
    "state_size",
    "compress_rat",
    "kv_shared",
    "kv_source",
    "cross_attention",
    "swa_",
    "global_head_dim",
    "index_head_dim",
    "indexer_",
    "hybrid_override_pattern",
    "layers_block_type",
    "no_rope_layer",
    "decoder_layers",
    "sliding_window_pattern",
    "attn_type_list",
    "recurrent",
    "prompt_length",
    "loop",
)
"""Parts of field names that stand for what the usual meaning of the other fields leaves out."""
_KNOWN_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "moe", "mlp")


def infer(fields: Fields, model_type: str | None) -> tuple[Arch, str]:
    """An architecture for a configuration whose type is not known, and the note about it.

    Args:
        fields: The configuration.
        model_type: Its type.

    Raises:
        InvalidArgumentError: The configuration does not say enough; the message says what is
            missing, or which field cannot be interpreted.
    """
    called = (
        f"`model_type` {model_type!r} is not known" if model_type else "`model_type` is missing"
    )
    if fields.prefix.endswith("decoder.") or fields.flag("is_encoder_decoder"):
        raise fault(f"{called}: whether its decoder attends to an encoder cannot be inferred")
    fields.layers()
    names: list[object] = list(fields.values)
    for name in sorted(name for name in names if isinstance(name, str)):
        value = fields.values[name]
        if value in (None, False, 0, [], {}) or not any(hint in name for hint in _HINTS):
            continue
        raise fault(f"{called}, and its `{fields.prefix}{name}` cannot be interpreted without it")
    for kind in fields.words("layer_types") or ():
        if LEGACY_TYPES.get(kind, kind) not in _KNOWN_TYPES:
            raise fault(f"{called}, and its `layer_types` have {kind!r}, which needs it")
    if fields.has("kv_lora_rank"):
        if not fields.has("qk_rope_head_dim"):
            raise fault(f"{called}: with `kv_lora_rank` it must have `qk_rope_head_dim`")
        return Arch(attention=latent), f"inferred: {called}; taken as latents of `kv_lora_rank`"
    if not fields.has("num_attention_heads"):
        raise fault(f"{called}: it must have `num_attention_heads`")
    return Arch(), f"inferred: {called}; taken as keys and values of `num_key_value_heads` heads"
