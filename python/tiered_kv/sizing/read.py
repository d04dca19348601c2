"""From a configuration, wherever it is, to a specification."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiered_kv.sizing import catalogue
from tiered_kv.sizing.checks import bad, count, fault, shown
from tiered_kv.sizing.documents import load_json
from tiered_kv.sizing.dtypes import BF16, DType, dtype_named
from tiered_kv.sizing.families import ARCHITECTURES, build
from tiered_kv.sizing.families.unknown import infer
from tiered_kv.sizing.fields import Fields
from tiered_kv.sizing.spec import KvSpec

_TEXT_PARTS = (
    "text_config",
    "llm_config",
    "language_config",
    "language_model",
    "thinker_config",
    "text_model_config",
    "decoder",
)
_DEEPEST = 8
_SHAPE = (
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_size",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "state_size",
    "mamba_d_state",
    "ssm_state_size",
)


def read_config(
    source: Mapping[str, Any] | str | Path,
    *,
    name: str | None = None,
    speculative: str = "none",
    encoder_len: int | None = None,
    kv_dtype: DType | str | None = None,
) -> KvSpec:
    """Reads a model's cache from its configuration.

    Args:
        source: A configuration as a mapping; the path of a `config.json`, of a directory that has
            one, or of a GGUF file; a name of the catalogue; or a hub id.
        name: How the model is called; by default as the source is.
        speculative: Layers to add: `"none"`, `"mtp"` for those that predict several tokens,
            `"eagle"` for one more layer like the model's attention layers.
        encoder_len: Tokens that the encoder gives, for cross attention.
        kv_dtype: Type of keys and values; by default as the configuration says.

    Raises:
        InvalidArgumentError: The source cannot be read, a field is missing or wrong, or the
            architecture is not known and cannot be inferred.
    """
    values, called, where = _values(source)
    spec = _spec(values, name or called, where, speculative)
    if kv_dtype is not None:
        spec = spec.with_kv_dtype(
            kv_dtype if isinstance(kv_dtype, DType) else dtype_named(kv_dtype)
        )
    if encoder_len is not None:
        spec = spec.with_encoder_len(count("encoder_len", encoder_len))
    return spec


def _values(source: Mapping[str, Any] | str | Path) -> tuple[Mapping[str, Any], str, str]:
    """A configuration, the name of its model, and where it is from."""
    if isinstance(source, Mapping):
        names = (source.get(field) for field in ("_name_or_path", "model_type"))
        return source, next((name for name in names if name and isinstance(name, str)), "model"), ""
    try:
        found = _of_path(Path(source))
    except OSError as error:
        raise fault(f"`model` is {shown(str(source))}: {error.strerror or error}") from None
    return _of_name(source) if found is None else found


def _of_path(path: Path) -> tuple[Mapping[str, Any], str, str] | None:
    """What `_values` gives for a file or a directory; None where there is none."""
    if path.is_dir():
        config = path / "config.json"
        if not config.is_file():
            raise fault(f"`model` is the directory {path}, which has no config.json")
        return load_json(config), path.resolve().name, str(config)
    if path.is_file():
        from tiered_kv.sizing.gguf import is_gguf, read_gguf

        if is_gguf(path):
            return read_gguf(path), path.stem, str(path)
        parent = path.resolve().parent.name if path.name == "config.json" else path.stem
        return load_json(path), parent, str(path)
    return None


def _of_name(source: str | Path) -> tuple[Mapping[str, Any], str, str]:
    """What `_values` gives for a name of the catalogue or a hub id."""
    found = catalogue.find(str(source))
    if found is not None:
        return found.config, found.name, found.source
    # Most names are found before: neither this nor the reader of GGUF files is loaded for them.
    from tiered_kv.sizing import hub

    if isinstance(source, Path) or not hub.is_id(source):
        close = catalogue.close_to(str(source))
        hint = f"; close in the catalogue: {', '.join(close)}" if close else ""
        raise fault(
            f"`model` is {shown(str(source))}: give a configuration's path, a hub id "
            f"(owner/name) or a name of the catalogue{hint}"
        )
    return hub.config_of(source), source, hub.address(source)


def text_part(values: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The part of a configuration that describes the decoder of text, and where it is."""
    prefix = ""
    for _ in range(_DEEPEST):
        inner = next((part for part in _TEXT_PARTS if isinstance(values.get(part), Mapping)), None)
        if inner is None or _describes(values):
            break
        nested = dict(values[inner])
        kind = nested.get("model_type") or _text_type(values.get("model_type"))
        for shared in ("dtype", "torch_dtype"):
            if nested.get(shared) is None and values.get(shared) is not None:
                nested[shared] = values[shared]
        if kind is not None:
            nested["model_type"] = kind
        values, prefix = nested, f"{prefix}{inner}."
    else:
        raise fault(f"`{prefix}` is nested deeper than {_DEEPEST} parts: it is no configuration")
    return values, prefix


def _describes(values: Mapping[str, Any]) -> bool:
    """Whether the layers stand beside the nested parts, as in older vision-language models."""
    outer = values.get("model_type")
    known = isinstance(outer, str) and outer in ARCHITECTURES
    return known and values.get("num_hidden_layers") is not None


def _text_type(outer: object) -> str | None:
    """The model type of a part that does not name it."""
    if not isinstance(outer, str):
        return None
    for ending in ("_text", ""):
        if f"{outer}{ending}" in ARCHITECTURES:
            return f"{outer}{ending}"
    return None


@functools.cache
def _defaults() -> dict[str, Any]:
    text = Path(__file__).with_name("defaults.json").read_text("utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def _spec(values: Mapping[str, Any], name: str, where: str, speculative: str) -> KvSpec:
    part, prefix = text_part(values)
    model_type = part.get("model_type")
    if model_type is not None and not isinstance(model_type, str):
        raise bad(f"{prefix}model_type", model_type, "text")
    known = _defaults().get(model_type or "", {})
    aliases = known.get("aliases", {})
    defaults = dict(known.get("defaults", {}))
    if not prefix:
        # A nested part may leave out what its architecture has by default; a whole
        # configuration that lacks its own shape is broken.
        for shape in _SHAPE:
            defaults.pop(shape, None)
            defaults.pop(aliases.get(shape), None)
    fields = Fields(part, aliases, defaults, prefix)
    dtype, noted = _dtype(fields)
    arch = ARCHITECTURES.get(model_type or "")
    inferred = arch is None
    notes: tuple[str, ...] = noted
    if arch is None:
        arch, why = infer(fields, model_type)
        notes = (*notes, why)
    spec = build(
        fields,
        arch,
        name=name,
        model_type=model_type or "unknown",
        dtype=dtype,
        speculative=speculative,
    )
    return dataclasses.replace(
        spec,
        inferred=inferred,
        notes=(*spec.notes, *notes),
        sources=(where,) if where else (),
    )


def _dtype(fields: Fields) -> tuple[DType, tuple[str, ...]]:
    """The type of the model's activations, hence of its keys and values."""
    for name in ("dtype", "torch_dtype"):
        given = fields.given(name)
        if given is not None and given != "auto":
            return dtype_named(given, fields.prefix + name), ()
    return BF16, ("the configuration names no `dtype`: keys and values are taken as bf16",)
