"""The architectures: a line for each model type. To add one is to add its line.

The types of layers, the dimensions and the states are read as transformers 5.24 reads them.
"""

from __future__ import annotations

import dataclasses

from tiered_kv.sizing.families import dims, encoders, latent, sharing, states
from tiered_kv.sizing.families import patterns as at
from tiered_kv.sizing.families.arch import Arch

PLAIN = Arch()
"""Keys and values of `num_key_value_heads` x `head_dim`, with windows where there are any."""
_MLA = Arch(attention=latent.latent)
_INDEXED_MLA = Arch(
    types=at.all_of("indexed_attention"),
    attention=latent.latent,
    index=latent.sometimes_indexed,
)
_QWEN2 = Arch(types=at.windows_above)
_QWEN3_NEXT = Arch(
    types=at.every(4, "full_attention_interval", no=at.LINEAR), state=states.gated_delta
)
_GEMMA3 = Arch(types=at.every(6, "sliding_window_pattern"))
_GEMMA4 = Arch(types=at.every(6), last_full=True, dims=dims.gemma4, reuses=sharing.last_layers)
_COHERE2 = Arch(types=at.every(4, "sliding_window_pattern"))
_EXAONE4 = Arch(types=at.every(4, "sliding_window_pattern"))
_FULL_FIRST = Arch(types=at.chosen(lambda layer, _layers: layer % 4 == 0))
_MUSE = Arch(types=at.chosen(lambda layer, layers: (layers - 1 - layer) % 4 == 0))
_MAMBA1 = Arch(types=at.all_of(at.LINEAR), state=states.mamba1)
_GRANITE4 = Arch(types=at.all_of(at.LINEAR), state=states.mamba2)
_LFM2 = Arch(
    types=at.listed("full_attn_idxs", at.FULL, "conv", absent=at.FULL), state=states.short_conv
)
_INKLING = Arch(
    types=at.every(6, yes=at.HYBRID, no="hybrid_sliding"),
    state=states.inkling,
    dims=dims.by_window,
)
_SEQ2SEQ = Arch(cross=True)
_T5 = Arch(cross=True, dims=encoders.t5_dims)
_ALIKE = Arch(dims=dims.alike)
_MIMO = Arch(types=at.mimo, dims=dims.mimo, window=at.mimo_window)
_HUNYUAN4 = Arch(
    types=at.all_of("indexed_attention"),
    attention=latent.latent,
    index=latent.hunyuan_indexed,
)
_MINIMAX_M3 = Arch(types=at.sparse_frequency, special=latent.minimax_m3)
_DEEPSEEK_V4 = Arch(types=at.deepseek_v4, special=latent.compressed)
_REFERENCE = Arch(
    renamed={"reference_sliding_attention": "full_attention"},
    note="the prompt is kept whole and a window of what is generated: sized as all prompt",
)
_BEAM = Arch(types=at.every(6, last=True))

ARCHITECTURES: dict[str, Arch] = {
    # Keys and values a head; those of the line `PLAIN_TYPES` below as well.
    "gpt2": _ALIKE,
    "gptj": _ALIKE,
    "gpt_neo": _ALIKE,
    "gpt_neox": _ALIKE,
    "gpt_neox_japanese": _ALIKE,
    "openai-gpt": _ALIKE,
    "opt": _ALIKE,
    "bloom": _ALIKE,
    "codegen": _ALIKE,
    "biogpt": _ALIKE,
    "xglm": _ALIKE,
    "ctrl": _ALIKE,
    "persimmon": _ALIKE,
    "kosmos_2_text_model": _ALIKE,
    "kosmos_2_5_text_model": _ALIKE,
    "gpt_bigcode": Arch(dims=dims.multi_query),
    "falcon": Arch(dims=dims.falcon),
    "RefinedWeb": Arch(dims=dims.refined_web),
    "RefinedWebModel": Arch(dims=dims.refined_web),
    "mpt": Arch(dims=dims.nested_heads),
    "dbrx": Arch(dims=dims.nested_heads),
    "chatglm": Arch(dims=dims.chatglm),
    # Windows and chunks.
    "qwen2": _QWEN2,
    "qwen2_moe": _QWEN2,
    "qwen2_vl": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen2_5_omni_text": _QWEN2,
    "qwen3": _QWEN2,
    "qwen3_omni_moe_text": PLAIN,
    "dots1": _QWEN2,
    "deepseek_ocr2_text": _QWEN2,
    "afmoe": Arch(types=at.every(4, "global_attn_every_n_layers")),
    "cohere2": _COHERE2,
    "cohere2_moe": Arch(types=at.cohere2_moe),
    "exaone4": _EXAONE4,
    "exaone_moe": _EXAONE4,
    "gemma2": Arch(types=at.every(2)),
    "vaultgemma": Arch(types=at.every(2)),
    "gpt_oss": Arch(types=at.every(2)),
    "openai_privacy_filter": Arch(types=at.every(2)),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma3n": Arch(types=at.every(5), reuses=sharing.last_layers),
    "gemma3n_text": Arch(types=at.every(5), reuses=sharing.last_layers),
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "diffusion_gemma_text": _GEMMA4,
    "llama4": Arch(types=at.llama4),
    "llama4_text": Arch(types=at.llama4),
    "smollm3": Arch(types=at.smollm3),
    "olmo3": Arch(types=at.every(4)),
    "dory": Arch(types=at.every(4), again=sharing.dory_loops),
    "kolibri1": Arch(types=at.every(5)),
    "beam": _BEAM,
    "cwm": _FULL_FIRST,
    "granite_swa": _FULL_FIRST,
    "granitemoe_swa": _FULL_FIRST,
    "flint": Arch(types=at.chosen(lambda layer, n: layer < 2 or layer % 4 == 1 or layer == n - 1)),
    "muse_glimmer_text": _MUSE,
    "muse_spark_text": _MUSE,
    "modernbert-decoder": Arch(types=at.modernbert, window=at.half_local),
    "mimo_v2_flash": _MIMO,
    "ministral": Arch(types=at.uniform_window),
    "unlimited_ocr": _REFERENCE,
    "unlimited_ocr_text": _REFERENCE,
    # Latents, with index keys or without.
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "kimi_k2": _MLA,
    "kimi_k25": _MLA,
    "glm4_moe_lite": _MLA,
    "minicpm3": _MLA,
    "mistral4": _MLA,
    "axk1": _MLA,
    "youtu": _MLA,
    "sarvam_mla": _MLA,
    "longcat_flash": Arch(attention=latent.latent, layers=at.longcat, caches_per_layer=2),
    "deepseek_v32": _INDEXED_MLA,
    "glm_moe_dsa": _INDEXED_MLA,
    "axk2": _INDEXED_MLA,
    "hy_v4": _HUNYUAN4,
    "hy_v4_vl_text": _HUNYUAN4,
    "mistral_large4_text": Arch(
        types=at.all_of("indexed_attention"),
        attention=latent.sometimes_rotary,
        index=latent.sometimes_indexed,
        reuses=sharing.kv_sources,
    ),
    "dots3_note_text": Arch(
        types=at.dots3_note, attention=latent.by_window, index=latent.exact_indexed
    ),
    "deepseek_v4": _DEEPSEEK_V4,
    "minimax_m3_vl_text": _MINIMAX_M3,
    # Linear attention beside softmax attention.
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": _QWEN3_NEXT,
    "qwen3_5_moe_text": _QWEN3_NEXT,
    "qwen3_5": _QWEN3_NEXT,
    "qwen3_5_moe": _QWEN3_NEXT,
    "qwen4_exp_text": Arch(
        types=at.every(4, "full_attention_interval", yes="indexed_attention", no=at.LINEAR),
        state=states.qwen4,
        index=latent.grouped_indexed,
        renamed={"full_attention": "indexed_attention"},
    ),
    "olmo_hybrid": Arch(types=at.every(4, no=at.LINEAR), state=states.gated_delta),
    "lara_mini": Arch(types=at.lara, state=states.gated_delta),
    "kimi_linear": Arch(types=at.kimi_linear, attention=latent.latent, state=states.kimi_delta),
    "glm5_next_text": Arch(
        types=at.every(4, yes="indexed_attention", no=at.LINEAR),
        attention=latent.latent,
        index=latent.pooled_indexed,
        state=states.kimi_delta,
        renamed={"full_attention": "indexed_attention"},
    ),
    "bailing_hybrid": Arch(
        types=at.every(8, "layer_group_size", no=at.LINEAR),
        attention=latent.latent,
        state=states.bailing_delta,
    ),
    "minimax": Arch(types=at.minimax, state=states.lightning),
    "minimax_text_01": Arch(types=at.minimax, state=states.lightning),
    "minimax_m1": Arch(types=at.minimax, state=states.lightning),
    # State spaces, alone or beside attention.
    "mamba": _MAMBA1,
    "falcon_mamba": _MAMBA1,
    "mamba2": Arch(types=at.all_of(at.LINEAR), state=states.mamba2),
    "jamba": Arch(types=at.jamba, state=states.mamba1),
    "bamba": Arch(
        types=at.listed("attn_layer_indices", at.FULL, at.LINEAR, absent=at.LINEAR),
        state=states.mamba2,
    ),
    "granitemoehybrid": _GRANITE4,
    "falcon_h1": Arch(types=at.all_of(at.HYBRID), state=states.mamba2),
    "nemotron_h": Arch(types=at.nemotron_h, state=states.mamba2, dims=dims.nemotron_h),
    "zamba": Arch(types=at.zamba, state=states.zamba1, dims=dims.zamba),
    "zamba2": Arch(types=at.zamba2, state=states.mamba2, dims=dims.zamba),
    "recurrent_gemma": Arch(types=at.recurrent_gemma, state=states.rg_lru),
    "rwkv": Arch(types=at.all_of(at.LINEAR), state=states.rwkv4),
    "xlstm": Arch(types=at.all_of(at.LINEAR), state=states.xlstm),
    # Short convolutions.
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2,
    "lfm3": Arch(types=at.lfm3, state=states.short_conv),
    "inkling_text": _INKLING,
    "inkling2_text": _INKLING,
    "inkling2_loop_text": dataclasses.replace(_INKLING, again=sharing.inkling_loops),
    "zaya": Arch(types=at.all_of(at.HYBRID), state=states.zaya),
    # Encoders with decoders, and cross attention to images.
    "t5": _T5,
    "mt5": _T5,
    "umt5": _T5,
    "pop2piano": _T5,
    "udop": _T5,
    "pix2struct_text_model": _T5,
    "longt5": _T5,
    "switch_transformers": _T5,
    "t5gemma": Arch(types=at.every(2), cross=True),
    "t5_gemma_module": Arch(types=at.every(2), cross=True),
    "t5gemma2_decoder": Arch(types=at.every(6, "sliding_window_pattern"), cross=True),
    "mllama": Arch(special=encoders.mllama),
    "mllama_text_model": Arch(special=encoders.mllama),
}

PLAIN_TYPES = [
    "apertus",
    "arcee",
    "aria_text",
    "bitnet",
    "cohere",
    "cohere_compass_text",
    "emu3_text_model",
    "ernie4_5",
    "ernie4_5_moe",
    "ernie4_5_vl_moe_text",
    "exaone",
    "exaone4_5_text",
    "flex_olmo",
    "gemma",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4v_text",
    "glm4v_moe_text",
    "glm_image_text",
    "glm_ocr_text",
    "gpt-sw3",
    "granite",
    "granitemoe",
    "granitemoeshared",
    "helium",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hunyuan_vl_text",
    "hy_v3",
    "hyperclovax",
    "internlm",
    "internlm2",
    "internlm3",
    "iquestcoder",
    "jais2",
    "jetmoe",
    "laguna",
    "llama",
    "mellum",
    "ministral3",
    "minimax_m2",
    "mistral",
    "mixtral",
    "nanochat",
    "nemotron",
    "olmo",
    "olmo2",
    "olmoe",
    "phi",
    "phi3",
    "phi4_multimodal",
    "phimoe",
    "qwen3_moe",
    "qwen3_vl_text",
    "qwen3_vl_moe_text",
    "sarvam_moe",
    "seed_oss",
    "solar_open",
    "stablelm",
    "starcoder2",
    "step3p5",
    "step3p7",
    "voxtral_realtime_text",
    "baichuan",
    "yi",
    "Yi",
    "minicpm",
    "deepseek",
    "xverse",
    "aquila",
    "orion",
    "diffllama",
    "doge_dense",
    "apertus1p5_text",
    "molmo2_text",
    "paddleocr_vl_text",
]
SEQ2SEQ_TYPES = [
    "bart",
    "mbart",
    "marian",
    "pegasus",
    "pegasus_x",
    "m2m_100",
    "blenderbot",
    "blenderbot-small",
    "plbart",
    "mvp",
    "led",
    "bigbird_pegasus",
    "nllb-moe",
    "whisper",
    "speech_to_text",
    "moonshine",
    "trocr",
    "cohere_asr",
    "fsmt",
    "moonshine_streaming",
    "pp_formulanet_text",
    "prophetnet",
    "seamless_m4t",
    "seamless_m4t_v2",
    "speecht5",
]
ARCHITECTURES |= dict.fromkeys(PLAIN_TYPES, PLAIN)
ARCHITECTURES |= dict.fromkeys(SEQ2SEQ_TYPES, _SEQ2SEQ)
