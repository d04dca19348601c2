"""The header of a GGUF file: its key-value pairs, read with bounds and without dependencies."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from tiered_kv.sizing.checks import count, fault

MAGIC = b"GGUF"
MOST_PAIRS = 4096
MOST_TEXT = 1 << 20
"""The longest string read as a value, in bytes."""
MOST_SKIPPED = 1 << 26
"""The most bytes of a header: vocabularies are skipped, not kept."""
MOST_ITEMS = 1024
"""The longest array kept; a longer one is a vocabulary and is skipped."""

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_TEXT, _ARRAY = 8, 9


def is_gguf(path: Path) -> bool:
    """Whether a file begins as a GGUF file."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise fault(f"`{path}` cannot be read: {error.strerror or error}") from None


class _Reader:
    """Reads a header; what does not fit is an error."""

    def __init__(self, file: BinaryIO, where: str) -> None:
        self.file = file
        self.where = where
        self.left = MOST_SKIPPED

    def take(self, size: int) -> bytes:
        self.left -= size
        data = self.file.read(size) if self.left >= 0 else b""
        if len(data) != size:
            raise fault(f"`{self.where}` is cut short, or its header is too long: it is no GGUF")
        return data

    def skip(self, size: int) -> None:
        # Seeking beyond the end succeeds, so every skip ends with a byte that is read.
        if size > 0:
            self.left -= size - 1
            if self.left > 0:
                self.file.seek(size - 1, 1)
            self.take(1)

    def scalar(self, kind: int) -> Any:
        form = _SCALARS[kind]
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self, *, keep: bool = True) -> str:
        size = self.scalar(10)
        if not keep or size > MOST_TEXT:
            self.skip(size)
            return ""
        return self.take(size).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(kind)
        if kind == _TEXT:
            return self.text()
        if kind == _ARRAY:
            return self.array()
        raise fault(f"`{self.where}` has a value of the unknown GGUF type {kind}")

    def array(self) -> list[Any] | None:
        kind, count = self.scalar(4), self.scalar(10)
        if kind == _ARRAY or kind not in {*_SCALARS, _TEXT}:
            raise fault(f"`{self.where}` has an array of the GGUF type {kind}, which is not read")
        if kind == _TEXT:
            if count > MOST_SKIPPED // 8:
                raise fault(f"`{self.where}` has an array of {count} strings: it is no GGUF")
            for _ in range(count):
                self.text(keep=False)
            return None
        size = struct.calcsize(_SCALARS[kind])
        if count > MOST_ITEMS:
            self.skip(count * size)
            return None
        return [self.scalar(kind) for _ in range(count)]


def read_pairs(path: Path) -> dict[str, Any]:
    """The key-value pairs of a GGUF file; arrays of strings and long ones are left out.

    Raises:
        InvalidArgumentError: The file cannot be read, or is no GGUF of version 2 or 3.
    """
    try:
        with path.open("rb") as file:
            reader = _Reader(file, str(path))
            if reader.take(len(MAGIC)) != MAGIC:
                raise fault(f"`{path}` is no GGUF file")
            version = reader.scalar(4)
            if version not in (2, 3):
                raise fault(f"`{path}` is GGUF version {version}: versions 2 and 3 are read")
            reader.scalar(10)
            count = reader.scalar(10)
            if count > MOST_PAIRS:
                raise fault(f"`{path}` has {count} key-value pairs: at most {MOST_PAIRS} are read")
            pairs: dict[str, Any] = {}
            for _ in range(count):
                key = reader.text()
                value = reader.value(reader.scalar(4))
                if value is not None:
                    pairs[key] = value
            return pairs
    except OSError as error:
        raise fault(f"`{path}` cannot be read: {error.strerror or error}") from None


_TYPES = {
    "llama": "llama",
    "mistral": "mistral",
    "mistral3": "ministral3",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "qwen3next": "qwen3_next",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi2": "phi",
    "phi3": "phi3",
    "gpt2": "gpt2",
    "gptneox": "gpt_neox",
    "gpt-oss": "gpt_oss",
    "starcoder": "gpt_bigcode",
    "starcoder2": "starcoder2",
    "falcon": "falcon",
    "stablelm": "stablelm",
    "command-r": "cohere",
    "cohere2": "cohere2",
    "deepseek2": "deepseek_v3",
    "glm4": "glm4",
    "glm4moe": "glm4_moe",
    "olmo": "olmo",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "minicpm3": "minicpm3",
    "nemotron": "nemotron",
    "exaone": "exaone",
    "exaone4": "exaone4",
    "smollm3": "smollm3",
    "seed_oss": "seed_oss",
    "internlm2": "internlm2",
    "mamba": "mamba",
    "lfm2": "lfm2",
    "bloom": "bloom",
    "mpt": "mpt",
    "opt": "opt",
}
"""Architectures of GGUF files whose pairs say all that their cache depends on."""


def read_gguf(path: Path) -> dict[str, Any]:
    """The configuration that a GGUF file's pairs stand for, in the words of a `config.json`.

    Raises:
        InvalidArgumentError: The file cannot be read, or its architecture is not known.
    """
    pairs = read_pairs(path)
    arch = pairs.get("general.architecture")
    if not isinstance(arch, str) or arch not in _TYPES:
        raise fault(
            f"`general.architecture` of `{path}` is {arch!r}, which is not read: give config.json"
        )

    def pair(key: str) -> Any:
        return pairs.get(f"{arch}.{key}")

    config: dict[str, Any] = {
        "model_type": _TYPES[arch],
        "num_hidden_layers": pair("block_count"),
        "hidden_size": pair("embedding_length"),
        "num_attention_heads": pair("attention.head_count"),
        "num_key_value_heads": pair("attention.head_count_kv"),
        "head_dim": pair("attention.key_length"),
        "max_position_embeddings": pair("context_length"),
        "sliding_window": pair("attention.sliding_window") or None,
        "dtype": "float16",
    }
    value = pair("attention.value_length")
    if value is not None and value != config["head_dim"]:
        config["v_head_dim"] = value
    extra = _EXTRA.get(arch)
    if extra is not None:
        extra(config, pair)
    heads = config["num_key_value_heads"]
    if isinstance(heads, list):
        _by_layer(config, heads)
    return {name: value for name, value in config.items() if value is not None}


def _by_layer(config: dict[str, Any], heads: list[int]) -> None:
    """Key-value heads that differ by layer: 0 stands for a layer without attention."""
    config["num_key_value_heads"] = next((count for count in heads if count), None)
    if config["model_type"] != "lfm2":
        config["per_layer_config"] = {
            str(at): {"num_key_value_heads": count} if count else {"skip": ["attention"]}
            for at, count in enumerate(heads)
        }


Pair = Callable[[str], Any]


def _deepseek(config: dict[str, Any], pair: Pair) -> None:
    # Latents are stored as one head of latent and rotary key; the `_mla` lengths are a head's.
    config["kv_lora_rank"] = pair("attention.kv_lora_rank")
    config["qk_rope_head_dim"] = pair("rope.dimension_count")
    config["v_head_dim"] = pair("attention.value_length_mla") or pair("attention.value_length")
    config["head_dim"] = None
    config["num_key_value_heads"] = config["num_attention_heads"]
    config["num_nextn_predict_layers"] = pair("nextn_predict_layers")


def _nextn(config: dict[str, Any], pair: Pair) -> None:
    # llama.cpp counts the layers that predict several tokens among the blocks.
    more = count("nextn_predict_layers", pair("nextn_predict_layers") or 0)
    config["num_nextn_predict_layers"] = more
    if isinstance(config["num_hidden_layers"], int):
        config["num_hidden_layers"] -= more


def _hybrid(config: dict[str, Any], pair: Pair) -> None:
    config["full_attention_interval"] = pair("full_attention_interval")
    config["linear_num_key_heads"] = pair("ssm.group_count")
    config["linear_key_head_dim"] = config["linear_value_head_dim"] = pair("ssm.state_size")
    config["linear_num_value_heads"] = pair("ssm.time_step_rank")
    config["linear_conv_kernel_dim"] = pair("ssm.conv_kernel")


def _mamba(config: dict[str, Any], pair: Pair) -> None:
    config["state_size"] = pair("ssm.state_size")
    config["conv_kernel"] = pair("ssm.conv_kernel")
    config["mamba_d_ssm"] = pair("ssm.inner_size")
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        config[name] = None


def _lfm2(config: dict[str, Any], pair: Pair) -> None:
    heads = config["num_key_value_heads"]
    if isinstance(heads, list):
        config["full_attn_idxs"] = [at for at, count in enumerate(heads) if count]
    config["conv_L_cache"] = pair("shortconv.l_cache")


def _starcoder(config: dict[str, Any], pair: Pair) -> None:
    del pair
    config["multi_query"] = config["num_key_value_heads"] == 1


def _falcon(config: dict[str, Any], pair: Pair) -> None:
    del pair
    config["new_decoder_architecture"] = True
    config["num_kv_heads"] = config["num_key_value_heads"]


def _mpt(config: dict[str, Any], pair: Pair) -> None:
    del pair
    config["attn_config"] = {"kv_n_heads": config["num_key_value_heads"]}


_EXTRA: dict[str, Callable[[dict[str, Any], Pair], None]] = {
    "deepseek2": _deepseek,
    "glm4moe": _nextn,
    "qwen3next": _hybrid,
    "qwen35": _hybrid,
    "qwen35moe": _hybrid,
    "mamba": _mamba,
    "lfm2": _lfm2,
    "starcoder": _starcoder,
    "falcon": _falcon,
    "mpt": _mpt,
}
