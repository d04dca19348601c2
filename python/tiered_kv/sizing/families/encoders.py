"""Decoders that attend to an encoder, or to an image, by cross attention."""

from __future__ import annotations

from tiered_kv.sizing.families.arch import Layer, head_dim, heads
from tiered_kv.sizing.fields import Fields
from tiered_kv.sizing.layers import Keep, cross, full


def decoder_fields(fields: Fields) -> Fields:
    """The fields of the decoder, under the names of a decoder-only model."""
    values: dict[str, int] = {}
    for name, names in (
        ("num_hidden_layers", ("num_decoder_layers", "decoder_layers", "num_layers")),
        ("num_attention_heads", ("decoder_attention_heads", "num_decoder_attention_heads")),
        ("num_key_value_heads", ("decoder_num_key_value_heads",)),
    ):
        found = fields.maybe(*names, least=1)
        if found is not None:
            values[name] = found
    return fields.with_values(values)


def mllama(layer: Layer) -> list[Keep]:
    """Llama 3.2 Vision: some layers attend to the image alone."""
    at = layer.fields.integers("cross_attention_layers") or []
    dims = heads(layer)
    return [(cross if layer.index in at else full)(*dims, layer.dtype)]


def t5_dims(layer: Layer) -> tuple[int, int, int]:
    """T5's heads: `d_kv` for each of `num_heads`."""
    count = layer.fields.integer("num_attention_heads")
    dim = layer.fields.maybe("d_kv", least=1) or head_dim(layer.fields)
    return count, dim, dim
