"""Loading: from a name, a folder, a GGUF file or a hub id to a model and its tokenizer."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Never, TypedDict, cast, get_args

import torch
from torch import Tensor

from everystep.api.model import LanguageModel
from everystep.cache.formats import CacheDtype
from everystep.config import GenerationConfig, chat_defaults_of
from everystep.config.foreign_names import ADVICE, WEIGHTS
from everystep.config.kinds import POSITIVE, SIZE, one_of
from everystep.errors import (
    FormatError,
    MissingFileError,
    RequestError,
    UnknownArgumentError,
    UnsupportedError,
    nearest,
    shown,
)
from everystep.executors.choice import ExecutorName, panels_of, slow_path
from everystep.executors.parallel import load_parts
from everystep.executors.process import loading
from everystep.files.gguf import GgufFile, read_gguf
from everystep.files.model_folder import ModelFolder, open_folder
from everystep.files.sources import DEFAULT_MODEL, resolve_source
from everystep.images import PictureTokenizer, read_picture_settings
from everystep.models import Model, build_gguf_model, build_model
from everystep.models.families import config_without, find_family
from everystep.models.load import usable_device
from everystep.models.loader import HeldWeights
from everystep.models.quantised_folder import build_quantised_model, folder_format
from everystep.requests.pictures import vision_of
from everystep.text import Tokenizer
from everystep.text.gguf import PREFIX as GGUF_TOKENS
from everystep.text.gguf import ends_of_texts

Progress = Callable[[int, int, str], None]
Source = str | os.PathLike[str]
Quantize = Literal["auto", "int8", "int4"] | None
_SAMPLING = "general.sampling."
"""The prefix of keys by which a GGUF file proposes how to choose tokens."""


class LoadOptions(TypedDict, total=False):
    """The options of `load`, for functions that load a model themselves."""

    dtype: torch.dtype | None
    """The type of the weights; without it a folder's own."""
    quantize: Quantize
    """"auto" keeps a file's codes; "int8" and "int4" round weights of floats; None undoes codes."""
    cache_dtype: CacheDtype | None
    """The type of keys and values: "float32", "float16" or "int8"."""
    device: str | torch.device
    """Where the weights lie."""
    executor: ExecutorName
    """What runs the steps: "auto", "native" or "torch"."""
    without: Sequence[str]
    """The parts that are left out: ("vision",) for a model whose pictures come as embeddings."""
    parallel: int
    """The number of processes that hold the weights in parts; 1: this one holds all of them."""
    parallel_timeout: float
    """The seconds after which one of them that does not answer is taken for lost."""


def load(
    path: Source = DEFAULT_MODEL,
    *,
    dtype: torch.dtype | None = None,
    quantize: Quantize = "auto",
    cache_dtype: CacheDtype | None = None,
    device: str | torch.device = "cpu",
    executor: ExecutorName = "auto",
    without: Sequence[str] = (),
    parallel: int = 1,
    parallel_timeout: float = 60.0,
    offline: bool = False,
    progress: Progress | None = None,
    **unknown: Never,
) -> tuple[LanguageModel, Tokenizer]:
    """Return the model and tokenizer that `path` stands for: a name, a folder, a file or a hub id.

    `dtype`: the type of the weights; without it a folder's own. `quantize`: "auto" keeps what a
    file holds in 8 or 4 bits, as codes, unless a `dtype` is given; "int8" (per output channel) and
    "int4" (groups of 32) round the matrices of a model of floats; None makes floats of every
    weight, float32 without a `dtype`. Raises MissingFileError where there is no tokenizer, which
    `load_model` does without, and RequestError for rounding what is rounded already.
    `cache_dtype`: the type in which rows keep keys and values, "float32", "float16" or "int8" (one
    scale per position and head); without it the type that the model computes in.
    `executor`: "auto" runs every request on the native executor where that can do it, and on torch
    operators otherwise; either can be named. On a CUDA device "auto" captures steps as graphs, and
    "torch" starts the kernels of each one by one. `without`: parts that are left out, though the
    folder may have them: ("vision",) keeps the text part of a model that reads pictures. `device`:
    where the weights lie. `parallel`: the number of processes that hold the weights in parts and
    compute each step together, on torch operators; they are started here, or by torchrun, see the
    guide. UnsupportedError for a model that has no such parts. `parallel_timeout`: the seconds
    after which one of them that does not answer is taken for lost. `offline`: whether nothing may
    be fetched.
    `progress`: a function of (bytes done, of all, name), called on the way.

    Example:

        >>> model, tokenizer = es.load(folder / "model")
    """
    _refuse_unknown("load", unknown)
    processes = Processes(parallel, parallel_timeout)
    place = usable_device(device)
    choices = _Choices(dtype, quantize, cache_dtype, place, executor, without, processes)
    local = resolve_source(path, offline=offline, progress=progress)
    if local.is_dir():
        found = open_folder(local)
        if found.tokenizer is None:
            do = "Load the model alone with everystep.load_model(path)"
            raise MissingFileError(f"{local} has no tokenizer.json", do=do)
        model = _from_folder(local, choices)
        tokenizer = tokenizer_of(model, local)
    else:
        file = read_gguf(local)
        model = _from_gguf(file, local.stem, choices)
        tokenizer = Tokenizer.from_gguf(file.metadata)
    model.chat_defaults = chat_defaults_of(path)
    _warn_of_slow_path(model, choices)
    return model, tokenizer


def tokenizer_of(model: LanguageModel, folder: Path) -> Tokenizer:
    """Return the folder's tokenizer, one for pictures too where the model reads them and the folder
    says how they are prepared; FormatError where the two contradict each other."""
    vision = vision_of(model)
    if vision is None or read_picture_settings(folder) is None:
        return Tokenizer.from_folder(folder)
    found = PictureTokenizer.from_folder(folder, times=vision.frames_apart)
    wanted = (vision.patch, vision.merge, vision.frames)
    for own in (found.images, found.videos):
        if (own.patch, own.merge, own.frames) != wanted:
            what = "the files of a folder prepare other patches than its model reads"
            got = (own.patch, own.merge, own.frames)
            raise FormatError(what, wanted=f"{wanted} pixels, patches, frames", got=got)
    return found


def load_model(
    path: Source = DEFAULT_MODEL,
    *,
    dtype: torch.dtype | None = None,
    quantize: Quantize = "auto",
    cache_dtype: CacheDtype | None = None,
    device: str | torch.device = "cpu",
    executor: ExecutorName = "auto",
    without: Sequence[str] = (),
    parallel: int = 1,
    parallel_timeout: float = 60.0,
    offline: bool = False,
    progress: Progress | None = None,
    **unknown: Never,
) -> LanguageModel:
    """Return the model that `path` stands for, without a tokenizer.

    `dtype`, `quantize`, `cache_dtype`, `device`, `executor`, `without`, `parallel`,
    `parallel_timeout`, `offline`, `progress`: as for `load`.

    Example:

        >>> model = es.load_model(folder / "model", dtype=torch.float32)
    """
    _refuse_unknown("load_model", unknown)
    processes = Processes(parallel, parallel_timeout)
    place = usable_device(device)
    choices = _Choices(dtype, quantize, cache_dtype, place, executor, without, processes)
    local = resolve_source(path, offline=offline, progress=progress)
    if local.is_dir():
        model = _from_folder(local, choices)
    else:
        model = _from_gguf(read_gguf(local), local.stem, choices)
    model.chat_defaults = chat_defaults_of(path)
    _warn_of_slow_path(model, choices)
    return model


def _warn_of_slow_path(model: LanguageModel, choices: _Choices) -> None:
    """Warn once per line that loads, unless the caller asked for what is slow."""
    why = slow_path(cast(Model, model.core), choices.executor)
    if why is not None and choices.dtype != torch.float64 and choices.processes.count == 1:
        name = model.name_or_path or "the model"
        what = f"{name} runs on torch operators, several times slower than compiled kernels"
        warnings.warn(f"{what}: {why}", stacklevel=3)


@loading()
def from_weights(
    config: Mapping[str, object],
    weights: Mapping[str, Tensor],
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    generation_config: GenerationConfig | None = None,
    without: Sequence[str] = (),
) -> LanguageModel:
    """Return a model of a configuration and named tensors in memory, such as a `state_dict()`.

    `without`: as for `load`.
    """
    core = build_model(
        config_without(config, without),
        HeldWeights(weights),
        dtype=dtype,
        device=usable_device(device),
        in_panels=partial(panels_of, "auto"),
    )
    settings = generation_config or GenerationConfig.from_model_config(_with_text(config))
    return LanguageModel(core, settings)


def _with_text(config: Mapping[str, object]) -> dict[str, object]:
    """Return the values of a configuration, and beside them those of its text part, if any."""
    text = config.get("text_config")
    return {**text, **config} if isinstance(text, Mapping) else dict(config)


_KNOWN: Mapping[str, tuple[tuple[str | None, ...], str]] = {
    "quantize": (("auto", "int8", "int4", None), "there is no such way to quantise"),
    "cache_dtype": ((*get_args(CacheDtype), None), "keys and values cannot be kept in this type"),
    "executor": (get_args(ExecutorName), "there is no such executor"),
}
"""Choice -> its possible values, and what to say of another."""


@dataclass(frozen=True)
class Processes:
    """The processes that hold a model: their `count`, and the `patience` in seconds with one that
    does not answer; RequestError for what is impossible."""

    count: int
    patience: float

    def __post_init__(self) -> None:
        do = "Pass parallel=2, say"
        SIZE.checked(self.count, "parallel", do)
        POSITIVE.checked(self.patience, "parallel_timeout", "Pass parallel_timeout=60.0, say")


@dataclass(frozen=True)
class _Choices:
    """The choices of `load` beside the source; RequestError for one that is impossible."""

    dtype: torch.dtype | None
    quantize: Quantize
    cache_dtype: CacheDtype | None
    device: str | torch.device
    executor: ExecutorName
    without: Sequence[str]
    processes: Processes

    def __post_init__(self) -> None:
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise RequestError(
                "dtype is no type of numbers",
                wanted="torch.float32, torch.bfloat16, ...",
                got=shown(self.dtype),
                do="Pass the type of torch, or leave dtype out",
            )
        listed = isinstance(self.without, list | tuple)
        if not listed or not all(isinstance(one, str) for one in self.without):
            what, do = "without is no list of parts", "Pass without=('vision',), or leave it out"
            raise RequestError(what, wanted="names", got=shown(self.without), do=do)
        for name, (known, wrong) in _KNOWN.items():
            value = getattr(self, name)
            if not one_of(*known).accepts(value):
                *most, last = map(repr, known)
                wanted = f"{', '.join(most)} or {last}"
                do = _advice_on(value) if name == "quantize" else f"Leave {name} out"
                raise RequestError(wrong, wanted=wanted, got=shown(value), do=do)
        if self.processes.count > 1:
            self._refuse_beside_parts()

    def _refuse_beside_parts(self) -> None:
        """Refuse what does not go with weights in parts on several processes."""
        place = torch.device(self.device)
        refused = {
            "quantize": self.quantize in ("int8", "int4"),
            "executor": self.executor == "native",
            "device": place.type != "cpu",
            "without": bool(self.without),
        }
        for name in (name for name, wrong in refused.items() if wrong):
            raise UnsupportedError(
                "a model in parts has weights of floats, on CPUs and torch operators",
                wanted=f"the default of {name}",
                got=f"{name}={shown(getattr(self, name))}",
                do=f"Leave {name} out, or parallel",
            )


def _advice_on(way: object) -> str:
    """Return what to do instead of quantising in a way that there is not."""
    name = way.lower() if isinstance(way, str) else ""
    if re.fullmatch(r"(i?q[2-8]_|mxfp4|bf?16|f(p)?16|f32).*", name):
        return f"Write a GGUF file with es.quantize, or load one that is of {name.upper()} already"
    near = WEIGHTS.get(name, "int4")
    return f"Pass quantize={near!r}, or leave quantize out"


def _refuse_unknown(call: str, unknown: Mapping[str, object]) -> None:
    """Refuse keywords that loading does not have, with what other libraries' names stand for."""
    for name in unknown:
        near = nearest(name, LoadOptions.__annotations__)
        usual = f"Leave {name} out" if near is None else f"Perhaps you meant {near}"
        do = ADVICE.get(name, usual)
        raise UnknownArgumentError(f"{call}() knows no argument {name!r}", do=do)


@loading()
def _from_folder(folder: Path, choices: _Choices) -> LanguageModel:
    found = open_folder(folder)
    # An unknown family is the first error, before weights that have no reader.
    find_family(found.config["model_type"])
    config = config_without(found.config, choices.without)
    settings = _settings_of(found)
    if choices.processes.count > 1:
        of_parts = choices.processes.count, choices.processes.patience
        core, crew = load_parts(folder, choices.dtype, *of_parts)
        return LanguageModel(core, settings, folder.name, "torch", choices.cache_dtype, crew)
    build: Callable[..., Model] = build_quantised_model
    quantize = choices.quantize
    if folder_format(found.config) is None:
        build, quantize = build_model, None if quantize == "auto" else quantize
    core = build(
        config,
        found.weights(),
        dtype=choices.dtype,
        device=choices.device,
        quantize=quantize,
        in_panels=partial(panels_of, choices.executor),
    )
    return LanguageModel(core, settings, folder.name, choices.executor, choices.cache_dtype)


def _settings_of(found: ModelFolder) -> GenerationConfig:
    if found.generation_config is not None:
        return GenerationConfig.from_checkpoint(found.generation_config)
    return GenerationConfig.from_model_config(_with_text(found.config))


@loading()
def _from_gguf(file: GgufFile, name: str, choices: _Choices) -> LanguageModel:
    if choices.processes.count > 1:
        raise UnsupportedError(
            "a GGUF file is not read in parts",
            wanted="a folder with weights of floats",
            got=f"parallel={choices.processes.count}",
            do="Leave parallel out",
        )
    if choices.without:
        what, do = "a GGUF file holds no part that could be left out", "Leave without out"
        raise RequestError(what, got=f"without={shown(choices.without)}", do=do)
    core = build_gguf_model(
        file,
        dtype=choices.dtype,
        device=choices.device,
        quantize=choices.quantize,
        in_panels=partial(panels_of, choices.executor),
    )
    proposed = [
        f"{key} = {file.metadata[key]}" for key in file.metadata if key.startswith(_SAMPLING)
    ]
    if proposed:
        what = f"{file.path} proposes how to choose tokens, which is not followed"
        do = "pass do_sample=True, temperature=... to generate()"
        warnings.warn(f"{what}: {', '.join(proposed)}; {do}", stacklevel=4)
    settings = GenerationConfig(**_special_ids(file.metadata))
    return LanguageModel(core, settings, name, choices.executor, choices.cache_dtype)


def _special_ids(metadata: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields of a generation config that a file's vocabulary settles."""
    keys = {f"{one}_token_id": f"{GGUF_TOKENS}{one}_token_id" for one in ("bos", "eos")}
    keys["pad_token_id"] = f"{GGUF_TOKENS}padding_token_id"
    found = {field: metadata[key] for field, key in keys.items() if key in metadata}
    if f"{GGUF_TOKENS}tokens" in metadata and (ends := ends_of_texts(metadata)):
        found["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    return found
