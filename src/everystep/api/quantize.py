"""Writing a model in 8 or 4 bits to a folder, which `load` reads back bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save

from everystep.api.load import Progress, Source, load
from everystep.errors import FileError, RequestError, message
from everystep.files.atomic import atomic_folder, write_atomic
from everystep.files.folder import CONFIG, GENERATION_CONFIG
from everystep.files.opening import is_there
from everystep.models.quantised_folder import quantised_contents
from everystep.nn.rounding import Rounding


def write_quantized(
    source: Source,
    target: Path,
    format: Rounding,
    *,
    offline: bool = False,
    progress: Progress | None = None,
) -> Path:
    """`target` is a whole folder with the source's model in this format and its tokenizer.

    The layout is that of docs/quantised-folders.md. Raises FileError where `target` exists, and
    what `load` raises; then nothing is left behind.
    """
    if format not in ("int8", "int4"):
        raise RequestError(
            message("there is no such format", wanted="int8 or int4", got=repr(format))
        )
    if is_there(target):
        raise FileError(message(f"{target} is there already", do="Give the name of a new folder"))
    model, tokenizer = load(source, quantize=format, offline=offline, progress=progress)
    config, tensors = quantised_contents(model.core, format)
    with atomic_folder(target) as folder:
        tokenizer.save_pretrained(folder)
        model.generation_config.to_json_file(folder / GENERATION_CONFIG)
        write_atomic(folder / "model.safetensors", save(tensors, {"format": "pt"}))
        write_atomic(folder / CONFIG, json.dumps(config, indent=2).encode())
    return target
