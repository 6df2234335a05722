"""Loading under the familiar names: what a script that comes from transformers calls first.

`from_pretrained` takes transformers' arguments and gives the very objects of `load`. An argument
that asks for nothing this library does otherwise is accepted; one that asks for something it does
not do is an error, never dropped. How files are found and read is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch

from everystep.api.load import Source, load_model
from everystep.api.model import LanguageModel
from everystep.config.foreign_names import ADVICE
from everystep.errors import (
    ModelClassError,
    RequestError,
    UnknownArgumentError,
    UnsupportedError,
    nearest,
    shown,
)
from everystep.files.gguf import read_gguf
from everystep.files.hub import HubAccess
from everystep.files.model_folder import open_folder
from everystep.files.sources import resolve_source
from everystep.models import complete_config
from everystep.models.config import ModelConfig
from everystep.text import Tokenizer

_HUB = ("revision", "cache_dir", "token", "local_files_only")
# Argument -> the values that ask for nothing else than what is done anyway.
_HARMLESS: Mapping[str, tuple[object, ...]] = {
    "trust_remote_code": (None, False),
    "force_download": (False,),
    "subfolder": ("",),
}
_HARMLESS_OF_MODELS: Mapping[str, tuple[object, ...]] = {
    **_HARMLESS,
    "low_cpu_mem_usage": (None, True, False),
    "use_safetensors": (None, True),
    "attn_implementation": (None, "eager", "sdpa"),
    "quantization_config": (None,),
    "config": (None,),
}
_HARMLESS_OF_TOKENIZERS: Mapping[str, tuple[object, ...]] = {
    **_HARMLESS,
    "use_fast": (None, True),
    "clean_up_tokenization_spaces": (None, False),
    "legacy": (None, False),
}
_WHY: Mapping[str, str] = {
    "trust_remote_code": "code from a model repository is never run here",
    "use_safetensors": "pickled weights are never read here",
    "quantization_config": "weights are quantised with everystep.load(path, quantize=...)",
    "attn_implementation": "there is one attention, which equals eager and sdpa",
    "use_fast": "every tokenizer is a fast one",
}
_SETTINGS = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
    *("padding_side", "truncation_side", "model_max_length", "chat_template"),
)


def _check(
    given: Mapping[str, object], harmless: Mapping[str, tuple[object, ...]], named: tuple[str, ...]
) -> None:
    """Refuse what would be dropped: an unknown name, or a value that asks for more."""
    for name, value in given.items():
        if name not in harmless:
            told = ADVICE.get(name)
            near = None if told else nearest(name, (*harmless, *named, *_HUB))
            raise UnknownArgumentError(
                f"from_pretrained() knows no argument {name!r}",
                wanted=f"perhaps {near!r}" if near else None,
                do=told or (f"Leave {name} out" if near is None else None),
            )
        if value not in harmless[name]:
            wanted = " or ".join(map(repr, harmless[name]))
            text = f"{name} asks for something else than is done"
            why = f"{text}: {_WHY[name]}" if name in _WHY else text
            do = f"Leave {name} out"
            raise UnsupportedError(why, wanted=wanted, got=shown(value), do=do)


def _dtype_of(dtype: object, alias: object) -> torch.dtype | None:
    """Return the type that `dtype` or its older name asks for; None for the folder's own."""
    if dtype is not None and alias is not None and dtype != alias:
        what, do = "dtype and torch_dtype say different things", "Pass dtype alone"
        raise RequestError(what, got=f"{dtype} and {alias}", do=do)
    asked = alias if dtype is None else dtype
    if asked is None or asked == "auto":
        return None
    found = getattr(torch, asked, None) if isinstance(asked, str) else asked
    if not isinstance(found, torch.dtype):
        wanted = "'auto', 'bfloat16', torch.float32, ..."
        raise RequestError("dtype is no type of numbers", wanted=wanted, got=shown(asked))
    return found


def _device_of(device_map: object) -> str | torch.device:
    """Return the device that `device_map` names; "auto" is the accelerator if there is one."""
    if isinstance(device_map, Mapping):
        if list(device_map) != [""]:
            raise UnsupportedError(
                "device_map spreads the model over several devices",
                wanted="one device for the whole model",
                got=dict(device_map),
                do='Pass device_map="auto", "cpu" or "cuda"',
            )
        device_map = device_map[""]
    if device_map is None:
        return "cpu"
    if device_map in ("auto", "balanced", "balanced_low_0", "sequential"):
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.device(device_map)  # type: ignore[call-overload]
    except (RuntimeError, TypeError) as error:
        wanted = "'auto', 'cpu', 'cuda', 'cuda:1', a torch.device or a number"
        raise RequestError(
            "device_map is no device", wanted=wanted, got=shown(device_map)
        ) from error


class _Auto:
    """A name to load by: only its `from_pretrained` is ever called."""

    def __init__(self) -> None:
        name = type(self).__name__
        do = f"Call {name}.from_pretrained(path)"
        raise ModelClassError(f"{name} has no instances", do=do)


class _AutoModel(_Auto):
    """A loader of models that read with an encoder, or of those without."""

    encodes: ClassVar[bool]

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Source,
        *,
        dtype: str | torch.dtype | None = None,
        torch_dtype: str | torch.dtype | None = None,
        device_map: object = None,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        **others: object,
    ) -> LanguageModel:
        """Return the model of a folder, a GGUF file, a name or a hub id, ready to generate.

        `dtype`: the type of the weights, the folder's own without it; `torch_dtype` is its older
        name. `device_map`: one device, or "auto". `revision`, `cache_dir`, `token` and
        `local_files_only` say how the hub is read. RequestError (a ValueError) for a model of the
        other kind and for arguments that cannot be honoured.
        """
        _check(others, _HARMLESS_OF_MODELS, ("dtype", "torch_dtype", "device_map"))
        wanted, device = _dtype_of(dtype, torch_dtype), _device_of(device_map)
        access = HubAccess(revision, cache_dir, token)
        source = pretrained_model_name_or_path
        local = resolve_source(source, offline=local_files_only, access=access)
        cls._check_kind(local)
        return load_model(local, dtype=wanted, device=device)

    @classmethod
    def _check_kind(cls, local: Path) -> None:
        """Refuse a model of the other kind, before its weights are read."""
        config = complete_config(open_folder(local).config) if local.is_dir() else {}
        if bool(config.get("is_encoder_decoder", False)) != cls.encodes:
            other = AutoModelForCausalLM if cls.encodes else AutoModelForSeq2SeqLM
            raise RequestError(
                f"{local} is not a model for {cls.__name__}",
                wanted="an encoder with a decoder" if cls.encodes else "a decoder alone",
                got=config.get("model_type", "a GGUF file"),
                do=f"Load it with {other.__name__}",
            )


class AutoModelForCausalLM(_AutoModel):
    """A loader of decoders: `from_pretrained` gives the model that `load_model` gives."""

    encodes = False


class AutoModelForSeq2SeqLM(_AutoModel):
    """A loader of models with encoder and decoder: `from_pretrained` gives what `load_model`
    gives."""

    encodes = True


class AutoTokenizer(_Auto):
    """A loader of tokenizers: `from_pretrained` gives the tokenizer that `load` gives."""

    @staticmethod
    def from_pretrained(
        pretrained_model_name_or_path: Source,
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        **others: object,
    ) -> Tokenizer:
        """Return the tokenizer of a folder, a GGUF file, a name or a hub id, without its weights.

        Settings may be given by name: `padding_side`, `truncation_side`, `model_max_length`,
        `chat_template`, and special tokens such as `pad_token`.
        """
        settings = {name: others.pop(name) for name in _SETTINGS if name in others}
        _check(others, _HARMLESS_OF_TOKENIZERS, _SETTINGS)
        access = HubAccess(revision, cache_dir, token, weights=False)
        source = pretrained_model_name_or_path
        local = resolve_source(source, offline=local_files_only, access=access)
        if local.is_dir():
            tokenizer = Tokenizer.from_folder(local)
        else:
            tokenizer = Tokenizer.from_gguf(read_gguf(local).metadata)
        for name, value in settings.items():
            setattr(tokenizer, name, value)
        return tokenizer


class AutoConfig(_Auto):
    """A reader of configurations: `from_pretrained` gives the values of a config.json."""

    @staticmethod
    def from_pretrained(
        pretrained_model_name_or_path: Source,
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
        **others: object,
    ) -> ModelConfig:
        """Return the configuration of a folder or a hub id, with the defaults of its family."""
        _check(others, _HARMLESS, ())
        access = HubAccess(revision, cache_dir, token, weights=False)
        source = pretrained_model_name_or_path
        local = resolve_source(source, offline=local_files_only, access=access)
        if not local.is_dir():
            do = "Load the model and read model.config"
            what = f"{local} has no config.json"
            raise UnsupportedError(what, wanted="a model folder", do=do)
        return ModelConfig(complete_config(open_folder(local).config))
