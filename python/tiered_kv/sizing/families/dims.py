"""Dimensions of attention where they are not `num_key_value_heads` of `head_dim`."""

from __future__ import annotations

from tiered_kv.sizing.families.arch import Dims, Layer, head_dim, heads, query_heads


def alike(layer: Layer) -> Dims:
    """As many key-value heads as query heads, whatever a field says."""
    dim = head_dim(layer.fields)
    return query_heads(layer.fields), dim, dim


def multi_query(layer: Layer) -> Dims:
    """One key-value head where `multi_query` is set."""
    dim = head_dim(layer.fields)
    one = layer.fields.flag("multi_query", True)
    return 1 if one else query_heads(layer.fields), dim, dim


def falcon(layer: Layer) -> Dims:
    """Falcon: `num_kv_heads` in the newer decoder, else one head with `multi_query`."""
    fields = layer.fields
    dim, queries = head_dim(fields), query_heads(fields)
    own = fields.maybe("num_kv_heads", "n_head_kv", least=1) or queries
    if fields.flag("new_decoder_architecture"):
        return own, dim, dim
    return 1 if fields.flag("multi_query", True) else own, dim, dim


def refined_web(layer: Layer) -> Dims:
    """Falcon under its first names: `n_head_kv` heads, one only where `multi_query` says so."""
    fields = layer.fields
    dim = head_dim(fields)
    own = fields.maybe("num_kv_heads", "n_head_kv", least=1) or query_heads(fields)
    return 1 if fields.flag("multi_query") else own, dim, dim


def nested_heads(layer: Layer) -> Dims:
    """DBRX and MPT: the key-value heads stand in `attn_config`."""
    fields = layer.fields
    dim = head_dim(fields)
    own = fields.nested("attn_config").maybe("kv_n_heads", least=1)
    return own or query_heads(fields), dim, dim


def chatglm(layer: Layer) -> Dims:
    """ChatGLM: groups of `kv_channels` where `multi_query_attention` is set."""
    fields = layer.fields
    dim = fields.maybe("kv_channels", least=1) or head_dim(fields)
    grouped = fields.flag("multi_query_attention")
    count = fields.integer("multi_query_group_num") if grouped else query_heads(fields)
    return count, dim, dim


def gemma4(layer: Layer) -> Dims:
    """Gemma 4: full layers have a head dimension of their own, and may have fewer heads."""
    fields = layer.fields
    count, dim, _ = heads(layer)
    if layer.type != "full_attention" or fields.has("per_layer_config"):
        return count, dim, dim
    dim = fields.maybe("global_head_dim", least=1) or 512
    fewer = fields.maybe("num_global_key_value_heads", least=1)
    if fewer is not None and fields.flag("attention_k_eq_v"):
        count = fewer
    return count, dim, dim


def by_window(layer: Layer) -> Dims:
    """Windowed layers with dimensions of their own under `swa_` names."""
    fields = layer.fields
    count, key, value = heads(layer)
    if not layer.is_sliding:
        return count, key, value
    own = fields.maybe("swa_head_dim", least=1)
    if own is not None and not fields.has("v_head_dim"):
        value = own
    return (
        fields.maybe("swa_num_key_value_heads", least=1) or count,
        own or key,
        fields.maybe("swa_v_head_dim", least=1) or value,
    )


def mimo(layer: Layer) -> Dims:
    """MiMo: windowed layers have twice the key-value heads, where no field says otherwise."""
    count, key, value = by_window(layer)
    if layer.is_sliding and not layer.fields.has("swa_num_key_value_heads"):
        count *= 2
    return count, key, value


def nemotron_h(layer: Layer) -> Dims:
    """Nemotron-H: `attention_head_dim` in the published configurations."""
    count, dim, _ = heads(layer)
    dim = layer.fields.maybe("attention_head_dim", least=1) or dim
    return count, dim, dim


def zamba(layer: Layer) -> Dims:
    """Zamba: attention over the hidden size twice, so heads of twice the usual dimension."""
    fields = layer.fields
    dim = fields.maybe("attention_head_dim", least=1)
    queries = query_heads(fields)
    dim = dim or 2 * fields.integer("hidden_size") // queries
    return fields.maybe("num_key_value_heads", least=1) or queries, dim, dim
