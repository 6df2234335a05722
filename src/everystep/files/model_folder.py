"""A model folder as the hub's tools write it: its configurations and weights.

Opening reads the small files and checks that they are what their names say; the weights are opened
on request. Code that lies in a folder is never run, whatever its configuration asks for. What the
fields mean to a model is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from everystep.errors import FormatError
from everystep.files.opening import as_path, impostor, is_there, open_regular
from everystep.files.safetensors import Weights, missing_in, open_weights
from everystep.files.strict_json import MAX_SETTINGS_BYTES, field, read_json

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER = "tokenizer.json"
OTHER_VOCABULARIES = (
    "vocab.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "*.tiktoken",
)
"""What a folder without tokenizer.json may have in its place."""


@dataclass(frozen=True)
class ModelFolder:
    """The contents of a model folder, as far as it has them; None stands for the rest."""

    path: Path
    config: dict[str, object]
    generation_config: dict[str, object] | None
    tokenizer: Path | None

    def weights(self) -> Weights:
        """Opens the folder's weights, with the errors of `open_weights`."""
        return open_weights(self.path)


def open_folder(path: str | PathLike[str]) -> ModelFolder:
    """Reads and checks the configurations of a model folder.

    Raises MissingFileError (no folder, no config.json), FileError (not a regular file) and
    FormatError (not strict JSON, too large, too deep, or a field of the wrong kind).
    """
    path = as_path(path)
    config = read_json(path / CONFIG)
    if config is None:
        raise missing_in(path, "is not a model folder", CONFIG)
    generation = path / GENERATION_CONFIG
    generation_config = read_json(generation, infinite=True, most=MAX_SETTINGS_BYTES)
    _check_config(config, str(path / CONFIG))
    _check_token_ids(generation_config or {}, str(generation))
    return ModelFolder(path, config, generation_config, find_vocabulary(path))


def _check_config(config: dict[str, object], name: str) -> None:
    field(config, "model_type", str, name)
    architectures = field(config, "architectures", list, name, [])
    if not all(isinstance(entry, str) for entry in architectures):
        raise FormatError(f"{name}: the field 'architectures' should hold names", got=architectures)
    _check_token_ids(config, name)


def _check_token_ids(config: dict[str, object], name: str) -> None:
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(key)
        ids = value if isinstance(value, list) else [value]
        if value is not None and not all(type(one) is int for one in ids):
            raise FormatError(
                f"{name}: the field {key!r} is of the wrong kind", wanted="ids", got=value
            )


def find_vocabulary(folder: Path) -> Path | None:
    """Return the tokenizer's file in a folder: tokenizer.json, or one of those in its place."""
    named = [folder / TOKENIZER, *(one for name in OTHER_VOCABULARIES for one in folder.glob(name))]
    return next((file for one in named if (file := find_tokenizer(one))), None)


def find_tokenizer(file: Path) -> Path | None:
    """Return the file, if it is there; FormatError if its beginning is that of something else."""
    if not is_there(file):
        return None
    with open_regular(file) as opened:
        start = opened.read(64)
    known = "empty" if not start.strip() else impostor(start)
    if known is not None:
        raise FormatError(f"{file} is {known}.")
    return file
