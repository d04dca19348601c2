"""What is left out of the comparison, each with its reason; the tests hold these lists exact."""

from __future__ import annotations

_REPEATED = "its class repeats the key-value heads to as many as query heads before it keeps them"

EXCEPTIONS = {
    "deepseek-v4-flash": "its windowed layers keep one vector as key and as value; transformers "
    "stores it once in compressed layers, but twice in windowed ones",
    "falcon-40b": _REPEATED,
    "falcon-180b": _REPEATED,
}
"""Models whose cache is larger than the sizing says, because transformers allocates more."""

_AUDIO = "its tokens are frames of several audio codes each, which no sequence of text tokens feeds"
_PAIR = "a pair of two other models, each of which is compared on its own"
_REFUSED = "the sizing refuses it, and says which field it cannot interpret"
_TOWER = "its text part exists only inside a model of hundreds of millions of parameters"

NOT_RUN = {
    "blt": "its caches follow patches of bytes, whose number depends on the text",
    "dia": _AUDIO,
    "diffusion_gemma": "a diffusion model: it has no class of a decoder that runs by itself",
    "encoder-decoder": _PAIR,
    "ernie4_5_vl_moe": "its experts are split by kind of token: it needs an image to run",
    "evolla": _TOWER,
    "gemma4_assistant": "keeps nothing: it reads the cache of the model that it assists",
    "idefics": "each pass needs an image",
    "kyutai_speech_to_text": _AUDIO,
    "moonshine_streaming": "its class of configuration lacks a field that its model reads",
    "musicgen": _AUDIO,
    "musicgen_melody": _AUDIO,
    "openai-gpt": "its class keeps no cache at all",
    "pi0": "gives robot actions, not tokens",
    "pix2struct": "its class of configuration lacks a field that its model reads",
    "pp_formulanet": "its decoder takes embeddings only",
    "reformer": "keeps hash buckets and hidden states, not keys and values",
    "speech-encoder-decoder": _PAIR,
    "vision-encoder-decoder": _PAIR,
    "xlm": "its class keeps no cache of tokens",
    "xlnet": "keeps hidden states of earlier segments, not keys and values",
}
"""Architectures that transformers cannot run at a tiny size with a cache of text tokens."""

REFUSED = {
    "canary": _REFUSED,
    "cpmant": _REFUSED,
}
"""Architectures that the sizing refuses with an error: it gives no wrong figure for them."""

AROUND = {
    "apertus1p5": "apertus1p5_text",
    "aria": "aria_text",
    "audioflamingo3": "qwen2",
    "aya_vision": "cohere2",
    "blip-2": "opt",
    "cohere2_vision": "cohere2",
    "cohere_compass": "cohere_compass_text",
    "deepseek_vl": "llama",
    "deepseek_vl_hybrid": "llama",
    "dots3_note": "dots3_note_text",
    "exaone4_5": "exaone4",
    "fast_vlm": "qwen2",
    "florence2": "bart",
    "fun_asr_nano": "qwen3",
    "fuyu": "persimmon",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "glmasr": "llama",
    "got_ocr2": "qwen2",
    "granite_speech": "granite",
    "granite_speech_plus": "granite",
    "hyperclovax_vision_v2": "hyperclovax",
    "idefics2": "mistral",
    "idefics3": "llama",
    "inkling2": "inkling2_text",
    "inkling2_loop": "inkling2_loop_text",
    "inkling_mm_model": "inkling_text",
    "instructblip": "opt",
    "instructblipvideo": "opt",
    "internvl": "qwen2",
    "janus": "llama",
    "kimi_k25": "deepseek_v3",
    "lfm2_vl": "lfm2",
    "lfm3_vl": "lfm3",
    "lighton_ocr": "qwen3",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "minicpm_ocr": "qwen3_5_text",
    "minicpmv4_6": "qwen3_5_text",
    "minicpmv4_7": "qwen3_5_text",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "mistral3": "mistral",
    "moss_transcribe_diarize": "qwen3",
    "musicflamingo": "qwen2",
    "nemo_speechlm": "nemotron_h",
    "nemotron_h_omni": "nemotron_h",
    "omniasr": "llama",
    "ovis2": "qwen2",
    "paligemma": "gemma",
    "perception_lm": "llama",
    "pp_chart2table": "qwen2",
    "qianfan_ocr": "qwen3",
    "qwen2_audio": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_asr": "qwen3",
    "qwen4_exp": "qwen4_exp_text",
    "shieldgemma2": "gemma3_text",
    "smolvlm": "llama",
    "vibevoice": "qwen2",
    "vibevoice_asr": "qwen2",
    "video_llama_3": "qwen2",
    "video_llava": "llama",
    "vipllava": "llama",
    "voxtral": "llama",
}
"""Models with parts for images or sound around the text model of another architecture."""

WITNESSES = {
    "DeepseekV4CSACache": "deepseek_v4",
    "DeepseekV4HCACache": "deepseek_v4",
    "DummyLayer": "gemma4_text",
    "DynamicCache": "llama",
    "DynamicIndexedLayer": "deepseek_v32",
    "DynamicLayer": "llama",
    "DynamicSlidingWindowLayer": "gemma2",
    "EncoderDecoderCache": "bart",
    "LinearAttentionAndFullAttentionLayer": "falcon_h1",
    "LinearAttentionAndSlidingWindowAttentionLayer": "inkling_text",
    "LinearAttentionLayer": "mamba",
    "MiniMaxCache": "minimax",
    "MiniMaxM3VLSparseCacheLayer": "minimax_m3_vl_text",
    "UnlimitedOcrDynamicReferenceSlidingWindowLayer": "unlimited_ocr",
}
"""An architecture with each class of cache and of cache layer."""

STATIC_WITNESSES = {
    "LinearAttentionAndStaticFullAttentionLayer": "falcon_h1",
    "LinearAttentionAndStaticSlidingWindowAttentionLayer": "inkling_text",
    "MiniMaxM3VLSparseStaticCacheLayer": "minimax_m3_vl_text",
    "StaticCache": "llama",
    "StaticIndexedLayer": "deepseek_v32",
    "StaticLayer": "llama",
    "StaticSlidingWindowLayer": "gemma2",
    "UnlimitedOcrStaticReferenceSlidingWindowLayer": "unlimited_ocr",
}
"""An architecture with each class of a fixed length."""

CLASSES_LEFT_OUT = {
    "BaseQuantizedLayer": "quantised",
    "Cache": "abstract",
    "CacheLayerMixin": "abstract",
    "DFlashCache": "of a draft model that shares the cache of another",
    "Fp8QuantizedLayer": "quantised",
    "HQQQuantizedLayer": "quantised",
    "LinearAttentionCacheLayerMixin": "abstract",
    "MtpCache": "a DynamicCache that shifts positions, for several-token prediction",
    "QuantizedCache": "quantised",
    "QuantizedLayer": "quantised",
    "QuantoQuantizedLayer": "quantised",
}
"""Classes of cache that no comparison covers, and why."""
