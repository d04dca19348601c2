"""Builds a tiny random model of an architecture, and runs it with a cache."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
from typing import Any

import torch
from transformers import DynamicCache
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.auto import modeling_auto as auto

from sizing_truth.held import CACHE_FIELDS
from sizing_truth.tiny import ENCODER_LEN, VOCABULARY, tiny

BATCH = 2
MOST_PARAMETERS = 16_000_000
_SEQ2SEQ = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ")
_COMPOSITE = ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")


@dataclasses.dataclass
class _Encoded(BaseModelOutput):  # type: ignore[misc]
    """What an encoder returns; some decoders ask for these as well."""

    router_logits: Any = None
    attention_mask: Any = None


class CannotBuildError(Exception):
    """The architecture cannot be built at a tiny size; the message says why."""


def mapping(task: str) -> Any:
    """Model classes for a task, by configuration class."""
    return getattr(auto, f"MODEL_FOR_{task}_MAPPING")


def model_types() -> list[str]:
    """Every architecture with a decoder of text, by the mappings of the installed version."""
    found: set[str] = set()
    for task in ("CAUSAL_LM", *_SEQ2SEQ, *_COMPOSITE):
        found |= set(getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES"))
    return sorted(found)


@dataclasses.dataclass(frozen=True)
class Runner:
    """A model, and how it is fed.

    Attributes:
        published: The configuration as it would be published: with its text part nested.
        config: The part of it that is built.
        model: The model, or its text part.
        encoder_len: Tokens of the encoder, 0 without one.
    """

    published: dict[str, Any]
    config: Any
    model: Any
    encoder_len: int = 0

    def forward(self, tokens: int, cache: Any = None) -> Any:
        """What holds the states after a pass over some tokens, behind those of an earlier pass.

        Raises:
            CannotBuildError: Nothing is kept.
        """
        ids = torch.randint(3, VOCABULARY, (BATCH, tokens), device=self.model.device)
        name = "decoder_input_ids" if self.encoder_len else "input_ids"
        given: dict[str, Any] = {name: ids, "use_cache": True, **self._encoded()}
        if self.config.model_type == "voxtral_realtime_text":
            width = self.config.hidden_size
            given["t_cond"] = torch.zeros(
                BATCH, 1, width, dtype=self.model.dtype, device=ids.device
            )
        known = inspect.signature(self.model.forward).parameters
        argument = next((field for field in CACHE_FIELDS if field in known), None)
        with torch.no_grad():
            if cache is not None:
                assert argument is not None
                given[argument] = cache.cache if isinstance(cache, InModel) else cache
            if cache is None and self.config.model_type == "recurrent_gemma":
                # Its modules are cleared by a pass without a cache only.
                self.model(**{**given, "use_cache": False})
            found = cache_of(self.model(**given))
            if found is None and argument is not None:
                # Some models leave it to the caller to make the cache, or do not return it.
                if argument not in given:
                    given[argument] = DynamicCache(config=self.config)
                    self.model(**given)
                found = given[argument]
        states = _states(self.model)
        if found is None:
            raise CannotBuildError(f"{type(self.model).__name__} keeps nothing from pass to pass")
        return InModel(found, states) if states else found

    def _encoded(self) -> dict[str, Any]:
        if not self.encoder_len:
            return {}
        own = getattr(self.config, "encoder", self.config)
        own = getattr(own, "text_config", own)
        width = getattr(own, "hidden_size", None) or own.d_model
        dtype, device = self.model.dtype, self.model.device
        hidden = torch.randn(BATCH, self.encoder_len, width, dtype=dtype, device=device)
        return {"encoder_outputs": _Encoded(last_hidden_state=hidden)}


def cache_of(output: Any) -> Any:
    """The cache in a model's output; None where there is none."""
    for field in CACHE_FIELDS:
        found = getattr(output, field, None)
        if found is not None:
            return found
    return None


@dataclasses.dataclass
class InModel:
    """A cache, and states that a model keeps in its modules."""

    cache: Any
    states: list[torch.Tensor]


def _states(model: Any) -> list[torch.Tensor]:
    names = ("conv1d_state", "recurrent_states")
    found = [vars(module).get(name) for module in model.modules() for name in names]
    return [state for state in found if isinstance(state, torch.Tensor)]


def runner(model_type: str, more: dict[str, Any] | None = None) -> Runner:
    """A tiny model of an architecture.

    Args:
        model_type: The architecture.
        more: Fields to set beside those that make it tiny.

    Raises:
        CannotBuildError: It has no decoder of text that can be built alone.
    """
    published, part = tiny(model_type, more)
    return runner_of(published, part, "cpu", MOST_PARAMETERS)


def runner_of(published: dict[str, Any], part: Any, device: str, most: int = 0) -> Runner:
    """A model of a configuration.

    Args:
        published: The whole configuration.
        part: The part of it that is built.
        device: Where it is built.
        most: Parameters that it may have; 0 for any number.
    """
    model_class = _class_of(part)
    part.dtype = torch.bfloat16
    published = {**published, "dtype": "bfloat16"}
    if most:
        # Without data first: a field that was not made small would fill the memory.
        with torch.device("meta"):
            empty = _make(model_class, part)
        parameters = sum(item.numel() for item in empty.parameters())
        if parameters > most:
            raise CannotBuildError(f"{model_class.__name__} has {parameters} parameters")
    torch.manual_seed(0)
    with torch.device(device):
        model = _make(model_class, part).eval()
    return Runner(published, part, model, ENCODER_LEN if part.is_encoder_decoder else 0)


def _make(model_class: Any, config: Any) -> Any:
    return model_class._from_config(config, dtype=torch.bfloat16)


def _class_of(part: Any) -> Any:
    """The model class of a configuration."""
    tasks = (_SEQ2SEQ + _COMPOSITE) if part.is_encoder_decoder else ("CAUSAL_LM",)
    for found in (*(mapping(task) for task in tasks), auto.MODEL_MAPPING):
        if type(part) not in found:
            continue
        with contextlib.suppress(ValueError):  # a mapping may name a class that is nowhere
            known = found[type(part)]
            return known[0] if isinstance(known, list | tuple) else known
    return _class_by_module(part)


def _class_by_module(part: Any) -> Any:
    """A model class that no mapping has: by the configuration that it takes."""
    module = importlib.import_module(type(part).__module__.replace(".configuration_", ".modeling_"))
    for name in sorted(vars(module), key=lambda name: ("ForCausalLM" not in name, name)):
        found: Any = vars(module)[name]
        if getattr(found, "config_class", None) is not type(part):
            continue
        takes = inspect.signature(found.forward).parameters
        if "use_cache" in takes and "input_ids" in takes:
            return found
    raise CannotBuildError(f"no model class for {type(part).__name__}")
