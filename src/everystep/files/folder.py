"""A model folder as the hub's tools write it: its JSON files, chat templates and weights.

Opening reads the small files and checks that they are what their names say; the weights are opened
on request. Code that lies in a folder is never run, whatever its configuration asks for. What the
fields mean to a model or a tokenizer is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from everystep.errors import FormatError, MissingFileError, message
from everystep.files.opening import impostor, is_there, open_regular, read_bounded
from everystep.files.safetensors import Weights, open_weights
from everystep.files.strict_json import field, parse_object

MAX_JSON_BYTES = 16 << 20
MAX_TEMPLATE_BYTES = 1 << 20

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True)
class ModelFolder:
    """The small files of a model folder; what a folder does not have is None or empty."""

    path: Path
    config: dict[str, object]
    generation_config: dict[str, object] | None
    tokenizer_config: dict[str, object] | None
    chat_templates: dict[str, str]
    tokenizer: Path | None

    @property
    def chat_template(self) -> str | None:
        """The template that is used when none is named."""
        return self.chat_templates.get("default")

    def weights(self) -> Weights:
        """Opens the folder's weights, with the errors of `open_weights`."""
        return open_weights(self.path)


def open_folder(path: str | PathLike[str]) -> ModelFolder:
    """Reads and checks the small files of a model folder.

    Raises MissingFileError (no folder, no config.json), FileError (not a regular file) and
    FormatError (not strict JSON, too large, too deep, or a field of the wrong kind).
    """
    path = Path(path)
    config = read_json(path / CONFIG)
    if config is None:
        raise _no_config(path)
    generation_config = read_json(path / GENERATION_CONFIG, infinite=True)
    _check_config(config, str(path / CONFIG))
    _check_token_ids(generation_config or {}, str(path / GENERATION_CONFIG))
    tokenizer_config = read_json(path / TOKENIZER_CONFIG)
    templates = named_templates(tokenizer_config or {}, str(path / TOKENIZER_CONFIG))
    single = read_template(path / CHAT_TEMPLATE)
    if single is not None:
        templates["default"] = single
    tokenizer = find_tokenizer(path / TOKENIZER)
    return ModelFolder(path, config, generation_config, tokenizer_config, templates, tokenizer)


def _no_config(path: Path) -> MissingFileError:
    if not path.is_dir():
        return MissingFileError(message(f"there is no folder {path}"))
    ggufs = sorted(file.name for file in path.glob("*.gguf"))
    do = f"Give the path of the file itself: {path / ggufs[0]}" if ggufs else None
    return MissingFileError(message(f"{path} is not a model folder", wanted=CONFIG, do=do))


def read_json(file: Path, *, infinite: bool = False) -> dict[str, object] | None:
    """The object in a file of bounded size, read by `parse_object`; None without a file."""
    if not is_there(file):
        return None
    return parse_object(read_bounded(file, MAX_JSON_BYTES), str(file), infinite=infinite)


def _check_config(config: dict[str, object], name: str) -> None:
    field(config, "model_type", str, name)
    architectures = field(config, "architectures", list, name, [])
    if not all(isinstance(entry, str) for entry in architectures):
        raise FormatError(
            message(f"{name}: the field 'architectures' should hold names", got=architectures)
        )
    _check_token_ids(config, name)


def _check_token_ids(config: dict[str, object], name: str) -> None:
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(key)
        ids = value if isinstance(value, list) else [value]
        if value is not None and not all(type(one) is int for one in ids):
            raise FormatError(
                message(f"{name}: the field {key!r} is of the wrong kind", wanted="ids", got=value)
            )


def named_templates(tokenizer_config: dict[str, object], name: str) -> dict[str, str]:
    """The templates by name that the file `name` holds; one text alone is called default.

    Raises FormatError for anything but a text or a list of named ones.
    """
    value = tokenizer_config.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        return dict(_named_template(entry, name) for entry in value)
    raise FormatError(
        message(f"{name}: the field 'chat_template' is of the wrong kind", got=type(value).__name__)
    )


def _named_template(entry: object, name: str) -> tuple[str, str]:
    where = f"{name}: 'chat_template'"
    if not isinstance(entry, dict):
        raise FormatError(message(f"{where} should list objects", got=type(entry).__name__))
    return field(entry, "name", str, where), field(entry, "template", str, where)


def read_template(file: Path) -> str | None:
    """The text of a file of bounded size; None without a file, FormatError if it is not UTF-8."""
    if not is_there(file):
        return None
    data = read_bounded(file, MAX_TEMPLATE_BYTES)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(message(f"{file} is not UTF-8", got=error.reason)) from error


def find_tokenizer(file: Path) -> Path | None:
    """The file, if it is there; FormatError if its beginning is that of something else."""
    if not is_there(file):
        return None
    with open_regular(file) as opened:
        start = opened.read(64)
    known = "empty" if not start.strip() else impostor(start)
    if known is not None:
        raise FormatError(message(f"{file} is {known}"))
    return file
