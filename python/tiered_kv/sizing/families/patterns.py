"""Layer types where a configuration does not list them: each architecture's rule."""

from __future__ import annotations

from collections.abc import Callable

from tiered_kv.sizing.checks import bad
from tiered_kv.sizing.fields import Fields

Types = Callable[[Fields], list[str]]

FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"
HYBRID = "hybrid"


def chosen(rule: Callable[[int, int], bool], yes: str = FULL, no: str = SLIDING) -> Types:
    """The type `yes` where `rule(layer, layers)` holds, else `no`."""

    def types(fields: Fields) -> list[str]:
        layers = fields.layers()
        return [yes if rule(layer, layers) else no for layer in range(layers)]

    return types


def all_of(kind: str) -> Types:
    """Every layer of one type."""
    return chosen(lambda _layer, _layers: True, kind)


def every(
    step: int, field: str = "", yes: str = FULL, no: str = SLIDING, *, last: bool = False
) -> Types:
    """The type `yes` for each `step`-th layer, counted from 1, else `no`.

    Args:
        step: The period.
        field: The field with the period, or with a pattern of letters such as `"LLLG"`.
        yes: The type of each `step`-th layer.
        no: The type of the others.
        last: Whether the last layer is of the type `yes` in any case.
    """

    def types(fields: Fields) -> list[str]:
        layers = fields.layers()
        letters = fields.given(field) if field else None
        if isinstance(letters, str) and letters:
            found = [yes if letters[at % len(letters)] == "G" else no for at in range(layers)]
            return [*found[:-1], yes]
        period = (fields.maybe(field) if field else None) or step
        found = [no if (layer + 1) % period else yes for layer in range(layers)]
        return [*found[:-1], yes] if last else found

    return types


def forced_last(inner: Types) -> Types:
    """The given types with full attention in the last layer, whatever it was."""

    def types(fields: Fields) -> list[str]:
        return [*inner(fields)[:-1], FULL]

    return types


def windows_above(fields: Fields) -> list[str]:
    """Qwen 2: windows from the layer `max_window_layers` on, where they are used at all."""
    layers = fields.layers()
    window = fields.flag("use_sliding_window") and fields.maybe("sliding_window")
    first = fields.maybe("max_window_layers") if window else None
    if not window:
        return [FULL] * layers
    return [FULL if layer < (first or 0) else SLIDING for layer in range(layers)]


def uniform_window(fields: Fields) -> list[str]:
    """Windows in every layer where there is one and it is used."""
    window = fields.flag("use_sliding_window", True) and fields.maybe("sliding_window")
    return [SLIDING if window else FULL] * fields.layers()


def without_rope(fields: Fields) -> list[bool]:
    """Which layers have no rotary position: 0 in `no_rope_layers`."""
    given = fields.integers("no_rope_layers")
    layers = fields.layers()
    if given:
        if len(given) < layers:
            raise bad(f"{fields.prefix}no_rope_layers", given, "one entry a layer")
        return [not flag for flag in given[:layers]]
    period = fields.maybe("no_rope_layer_interval", least=1) or 4
    return [(layer + 1) % period == 0 for layer in range(layers)]


def llama4(fields: Fields) -> list[str]:
    """Chunks where there are rotary positions."""
    chunk = fields.maybe("attention_chunk_size", least=1)
    return [FULL if bare or chunk is None else "chunked_attention" for bare in without_rope(fields)]


def smollm3(fields: Fields) -> list[str]:
    """Windows, where they are used, in the layers without rotary positions."""
    window = fields.flag("use_sliding_window") and fields.maybe("sliding_window")
    return [SLIDING if window and bare else FULL for bare in without_rope(fields)]


def cohere2_moe(fields: Fields) -> list[str]:
    """A pattern of its own for the dense layers in front."""
    dense = fields.maybe("first_k_dense_replace") or 0
    front = fields.maybe("prefix_dense_sliding_window_pattern", least=1) or 4
    rest = fields.maybe("sliding_window_pattern", least=1) or 4
    found = [SLIDING if (layer + 1) % front else FULL for layer in range(dense)]
    more = range(fields.layers() - dense)
    return found + [SLIDING if (layer + 1) % rest else FULL for layer in more]


def jamba(fields: Fields) -> list[str]:
    """Attention where the layer's number has the offset in its period."""
    period = fields.integer("attn_layer_period")
    offset = fields.integer("attn_layer_offset", least=0)
    return [FULL if at % period == offset else LINEAR for at in range(fields.layers())]


def listed(field: str, yes: str, no: str, *, absent: str) -> Types:
    """The type `yes` for the layers that a field lists; `absent` for all where it lists none."""

    def types(fields: Fields) -> list[str]:
        at = fields.integers(field)
        layers = fields.layers()
        if at is None:
            return [absent] * layers
        return [yes if layer in at else no for layer in range(layers)]

    return types


def zamba(fields: Fields) -> list[str]:
    """Two Mamba layers and a hybrid one, then a hybrid layer in each period."""
    period = fields.integer("attn_layer_period")
    offset = fields.integer("attn_layer_offset", least=0)
    rest = range(max(0, fields.layers() - 3))
    found = [HYBRID if layer % period == offset else LINEAR for layer in rest]
    return [LINEAR, LINEAR, HYBRID, *found][: fields.layers()]


def recurrent_gemma(fields: Fields) -> list[str]:
    """The block types again and again; attention always has a window."""
    blocks = fields.words("block_types") or ["recurrent", "recurrent", "attention"]
    kinds = [LINEAR if block == "recurrent" else SLIDING for block in blocks]
    return [kinds[layer % len(kinds)] for layer in range(fields.layers())]


_NEMOTRON = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}


def nemotron_h(fields: Fields) -> list[str]:
    """The letters of `hybrid_override_pattern`: M, *, -, E."""
    name = "hybrid_override_pattern"
    letters = fields.text(name)
    if letters is None:
        raise fields.missing("layers_block_type", name)
    for letter in letters:
        if letter not in _NEMOTRON:
            raise bad(fields.prefix + name, letters, f"letters of {''.join(_NEMOTRON)}")
    return [_NEMOTRON[letter] for letter in letters]


def kimi_linear(fields: Fields) -> list[str]:
    """The lists of `linear_attn_config`, which count layers from 1."""
    lists = fields.nested("linear_attn_config")
    full, linear = lists.integers("full_attn_layers"), lists.integers("kda_layers")
    layers = fields.layers()
    if full is None or linear is None:
        return [FULL if at and at % 4 == 0 else LINEAR for at in range(layers)]
    for layer in range(1, layers + 1):
        if (layer in full) == (layer in linear):
            both = "both" if layer in full else "none"
            name = f"{lists.prefix}full_attn_layers"
            raise bad(name, full, f"each layer from 1 to {layers} once: {layer} is in {both}")
    return [FULL if layer + 1 in full else LINEAR for layer in range(layers)]


def zamba2(fields: Fields) -> list[str]:
    """The published pattern, where the configuration has none."""
    six = [*[LINEAR] * 5, HYBRID]
    tail = [*[LINEAR] * 4, HYBRID, *[LINEAR] * 3, HYBRID, LINEAR, LINEAR]
    return [LINEAR, *six * 7, *tail][: fields.layers()]


def lara(fields: Fields) -> list[str]:
    """The released pattern of five layers."""
    pattern = [LINEAR, SLIDING, LINEAR, FULL, SLIDING]
    return [pattern[layer % 5] for layer in range(fields.layers())]


_RATIOS = {0: SLIDING, 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def deepseek_v4(fields: Fields) -> list[str]:
    """The compression ratio of each layer, else the published interleaving."""
    ratios = fields.integers("compress_ratios")
    layers = fields.layers()
    if ratios is None:
        rest = [_RATIOS[4] if layer % 2 else _RATIOS[128] for layer in range(max(0, layers - 2))]
        return [_RATIOS[128]] * min(layers, 2) + rest
    for at, ratio in enumerate(ratios):
        if ratio not in _RATIOS:
            raise bad(f"{fields.prefix}compress_ratios[{at}]", ratio, "0, 4 or 128")
    return [_RATIOS[ratio] for ratio in ratios]


def sparse_frequency(fields: Fields) -> list[str]:
    """MiniMax M3: sparse layers by `sparse_attention_config`."""
    marks = fields.nested("sparse_attention_config").integers("sparse_attention_freq")
    if marks is None:
        return [FULL] * fields.layers()
    return ["minimax_m3_sparse" if mark else FULL for mark in marks]


def minimax(fields: Fields) -> list[str]:
    """MiniMax: `attn_type_list` has a 1 for softmax attention; else each second layer."""
    marks = fields.integers("attn_type_list")
    if marks is not None:
        return [FULL if mark else LINEAR for mark in marks]
    return [FULL if (layer + 1) % 2 else LINEAR for layer in range(fields.layers())]


def lfm3(fields: Fields) -> list[str]:
    """LFM3: convolutions, with attention to all and to a window between them."""
    kinds = [SLIDING, "conv", FULL, "conv"]
    return [kinds[layer % 4] if layer else "conv" for layer in range(fields.layers())]


def modernbert(fields: Fields) -> list[str]:
    """ModernBERT: attention to all in the first of each `global_attn_every_n_layers`."""
    period = fields.maybe("global_attn_every_n_layers", least=1) or 3
    return [SLIDING if layer % period else FULL for layer in range(fields.layers())]


def dots3_note(fields: Fields) -> list[str]:
    """Dots 3: windows, but for the first two layers and each fourth after the second."""
    full = "indexed_attention" if fields.flag("use_dsa", True) else FULL
    window = fields.flag("use_sliding_window", True)
    return [
        full if not window or layer < 2 or layer % 4 == 1 else SLIDING
        for layer in range(fields.layers())
    ]


def longcat(fields: Fields) -> int:
    """LongCat: two caches a layer; `num_layers` counts layers, `num_hidden_layers` caches."""
    layers = fields.maybe("num_layers", least=1)
    return 2 * layers if layers is not None else fields.integer("num_hidden_layers")


def half_local(fields: Fields) -> int | None:
    """ModernBERT's window: half of `local_attention`."""
    local = fields.maybe("local_attention", least=2)
    return None if local is None else local // 2


def mimo(fields: Fields) -> list[str]:
    """MiMo: a 1 in `hybrid_layer_pattern` is a window; else the published interleaving."""
    marks = fields.integers("hybrid_layer_pattern")
    if marks is not None:
        return [SLIDING if mark else FULL for mark in marks]
    return [FULL if at == 0 or (at + 1) % 6 == 0 else SLIDING for at in range(fields.layers())]


def mimo_window(fields: Fields) -> int | None:
    """MiMo's window: `sliding_window_size` previous tokens and the current one."""
    size = fields.given("sliding_window_size")
    return None if size is None else fields.integer("sliding_window_size") + 1
