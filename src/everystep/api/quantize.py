"""`quantize`: a model of floats as a file or folder of codes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from everystep.api.load import Progress, Source, load
from everystep.api.model import LanguageModel
from everystep.api.saving import Merged
from everystep.errors import FileError, RequestError, shown
from everystep.files.atomic import atomic_file, atomic_folder, write_atomic
from everystep.files.gguf import read_gguf
from everystep.files.gguf_writer import GgufEntry, write_gguf
from everystep.files.model_folder import CONFIG, GENERATION_CONFIG
from everystep.files.opening import as_path, expanded, is_there
from everystep.files.safetensors_writer import Entry, write_weights
from everystep.models import Model
from everystep.models.gguf_encoders import encode_rows
from everystep.models.gguf_export import (
    gguf_metadata,
    gguf_shapes,
    gguf_tensors,
    require_same_model,
)
from everystep.models.gguf_mixes import MIXES, GgufFormat, block_of
from everystep.models.importance import column_squares
from everystep.models.quantised_folder import quantised_contents
from everystep.nn.rounding import Rounding
from everystep.text import Tokenizer
from everystep.text.gguf_export import tokenizer_metadata

_PLAIN = {"F32": torch.float32, "F16": torch.float16}
_WINDOW = 512
"""Tokens of the text that the model reads together."""

WrittenFormat = Literal["int8", "int4", "q8_0", "q6_k", "q5_k_m", "q4_k_m"]


def quantize(
    source: Source,
    target: Source,
    format: WrittenFormat = "int8",
    *,
    importance: str | None = None,
    offline: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write the model of floats that `source` stands for, rounded, and its tokenizer to `target`.

    "int8" and "int4" make a folder in the layout of docs/quantised-folders.md, the others a GGUF
    file of the mix that is called so, which llama.cpp reads too. `importance`: a text of the kind
    that the model will be used for; with it the errors of a GGUF file's weights count by how much
    the model multiplies them with as it reads that text. `source`, `offline` and `progress` are as
    for `load`. Raises FileError where `target` exists, RequestError for what is rounded already,
    UnsupportedError for what GGUF cannot say of a model, and what `load` raises; nothing is left
    behind then.

    Example:

        >>> written = es.quantize(folder / "model", folder / "small", "int8")
    """
    target = expanded(as_path(target))
    _require_choices(target, format, importance)
    if format == "int8" or format == "int4":
        model, tokenizer = load(source, quantize=format, offline=offline, progress=progress)
        _write_folder(model, tokenizer, target, format)
        return target
    model, tokenizer = load(source, offline=offline, progress=progress)
    _require_floats(model)
    columns = {} if importance is None else _importance(model, tokenizer, importance)
    core = cast(Model, model.core)  # that of a model which was loaded, not wrapped
    name = model.name_or_path or target.stem
    _write_file(core, _metadata(core, tokenizer, name, format), format, columns, target)
    return target


def export_gguf(
    model: LanguageModel,
    tokenizer: Tokenizer,
    target: Source,
    format: GgufFormat | None = None,
    *,
    adapters: Merged | None = None,
) -> Path:
    """Write a model that is in memory, with adapters in its weights, as a GGUF file.

    `format`: a mix as for `quantize`; without one the name of the file says it, as
    `mine.Q4_K_M.gguf` does, or it is "q8_0". `adapters`: names, or pairs of a name and a weight,
    which are merged into what is written; a model that has some needs a choice, which may be empty.
    Weights that are stored in codes are rounded a second time. Raises FileError where `target`
    exists, UnsupportedError for what GGUF cannot say of a model and for a wrapped module; nothing
    is left behind then.

    Example:

        >>> written = es.export_gguf(model, tokenizer, folder / "mine.Q4_K_M.gguf")
    """
    target = expanded(as_path(target))
    if format is None:
        format = format_in_name(target)
    _require_choices(target, format, None)
    if adapters is None and model.adapters:
        raise RequestError(
            "the model has adapters, and nothing says which of them are written",
            wanted="adapters, a list of names which may be empty",
            got=f"no choice of {', '.join(map(repr, model.adapters))}",
        )
    core = cast(Model, model.frozen(adapters or ()).core)  # a wrapped module is refused there
    name = model.name_or_path or target.stem
    _write_file(core, _metadata(core, tokenizer, name, format), format, {}, target)
    return target


def format_in_name(target: Path) -> GgufFormat:
    """Return the mix that the name of a file says before its end, or else "q8_0"."""
    found = target.stem.rpartition(".")[2].lower()
    return cast(GgufFormat, found) if found in MIXES else "q8_0"


def _metadata(
    core: Model, tokenizer: Tokenizer, name: str, format: GgufFormat
) -> dict[str, object]:
    return {
        **gguf_metadata(core, name),
        "general.file_type": MIXES[format].number,
        "general.quantization_version": 2,
        **tokenizer_metadata(tokenizer, core.vocab_size),
    }


def _require_choices(target: Path, format: object, importance: object) -> None:
    known = get_args(WrittenFormat)
    if not isinstance(format, str) or format not in known:
        wanted = ", ".join(known)
        raise RequestError("there is no such format", wanted=wanted, got=shown(format))
    is_file = format in MIXES
    if is_file != (target.suffix == ".gguf"):
        raise RequestError(
            f"the format {format} does not fit the name of the target",
            wanted="a name that ends in .gguf" if is_file else "the name of a folder",
            got=str(target),
            do=f"Choose another name, or one of the formats {', '.join(known)}",
        )
    if importance is not None and (not is_file or not isinstance(importance, str)):
        raise RequestError(
            "importance is a text for the formats of GGUF files",
            wanted=f"a text and one of {', '.join(MIXES)}",
            got=f"{type(importance).__name__} and {format}",
        )
    if is_there(target):
        do = "Give a new name"
        raise FileError(f"{target} is there already", do=do)


def _require_floats(model: LanguageModel) -> None:
    codes = set(model.weight_bytes) - {"float32", "float16", "bfloat16", "float64"}
    if codes:
        raise RequestError(
            "weights that were rounded before are not rounded again",
            wanted="a model of floats",
            got=", ".join(sorted(codes)),
            do="Quantise the model that they were made from",
        )


def _write_folder(
    model: LanguageModel, tokenizer: Tokenizer, target: Path, format: Rounding
) -> None:
    config, tensors = quantised_contents(cast(Model, model.core), format)
    with atomic_folder(target) as folder:
        tokenizer.save_pretrained(folder)
        model.generation_config.to_json_file(folder / GENERATION_CONFIG)
        entries = [Entry(name, tuple(one.shape), one.dtype) for name, one in tensors.items()]
        write_weights(folder, entries, tensors.values())
        write_atomic(folder / CONFIG, json.dumps(config, indent=2).encode())


def _write_file(
    core: Model,
    metadata: Mapping[str, object],
    format: GgufFormat,
    columns: Mapping[str, Tensor],
    target: Path,
) -> None:
    layers, tied = len(core.spec.layers), core.spec.tied
    entries = [
        GgufEntry(name, shape, block_of(format, name, shape, layers, tied=tied))
        for name, shape in gguf_shapes(core)
    ]

    def stored() -> Iterator[Tensor]:
        for entry, (name, _, values) in zip(entries, gguf_tensors(core), strict=True):
            if entry.block.name in _PLAIN:
                yield values.to(_PLAIN[entry.block.name]).contiguous().view(torch.uint8)
            else:
                yield encode_rows(entry.block, values, columns.get(name))

    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(target) as file:
        write_gguf(file, metadata, entries, stored())
        file.flush()
        require_same_model(core, read_gguf(Path(file.name)))


def _importance(model: LanguageModel, tokenizer: Tokenizer, text: str) -> dict[str, Tensor]:
    """Return `column_squares` of the model as it reads a text."""
    ids = torch.tensor(tokenizer.encode(text), dtype=torch.int64)
    if not len(ids):
        raise RequestError("the text of importance is empty", wanted="a text of some pages")
    window = min(_WINDOW, model.context or _WINDOW)
    return column_squares(cast(Model, model.core), ids, window)
