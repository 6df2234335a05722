"""A run as a file, and back: in another process, on another day, with the same end.

The file is a safetensors file. Its metadata say in plain text what it is and whose; tensors hold
the prompt as it was given, and bytes the rest (`types.stored`). No cache row is written: all are
made again from the ids. Nothing in the file can name code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from everystep._version import __version__
from everystep.bridge.core import ForeignModel
from everystep.config import GenerationConfig
from everystep.engine.snapshot import fingerprint
from everystep.errors import FormatError, RequestError
from everystep.files.atomic import write_atomic
from everystep.files.safetensors import read_file
from everystep.models import Model, weight_digest
from everystep.requests.options import Prefix
from everystep.requests.subject import Subject
from everystep.runs.hands import Asked
from everystep.types import nobodys
from everystep.types.stored import from_bytes, to_bytes

_FORMAT, _VERSION = "everystep.run", 1
_PROMPT, _ROW = "prompt.", "row."
"""Before the names of tensors of the prompt; the latter where they stood in a list of one row."""
_PROBE = "Hello, World! 12.5 naïve Ωμέγα 日本語 🙂\n\t{'a': 1}"


@dataclass(frozen=True, slots=True, eq=False)
class RunState:
    """Everything of a run that a file has to hold.

    `passed`: the prompt, as it was read. `rules`: from which position on which keywords hold.
    `given`: the positions that were sent or edited. `memos`: what was known after so many ids.
    `number`: that of the next step. `shown`: the hypotheses that were given. `group`: what the
    engine dumped.
    """

    passed: Mapping[str, Any]
    rules: Sequence[tuple[int, Asked]]
    given: AbstractSet[int]
    memos: Mapping[int, Mapping[str, Any]]
    number: int
    shown: AbstractSet[int]
    group: bytes


def write_run(state: RunState, model: Subject, tokenizer: Any, path: Path) -> None:
    """Write the run into the file, whole or not at all; RequestError where it holds what cannot be
    written."""
    rules = [(start, _plain(asked)) for start, asked in state.rules]
    absent = sorted({name for _, (_, missing, _) in rules for name in missing})
    stored = {
        "rules": rules,
        "given": sorted(state.given),
        "memos": {n: memo for n, memo in _plain_memos(state.memos).items() if memo or not n},
        "number": state.number,
        "shown": sorted(state.shown),
        "prefix": prefix_digest(state.rules[0][1].options.get("prefix")),
        "group": np.frombuffer(state.group, np.uint8),
    }
    metadata = {
        "format": _FORMAT,
        "version": str(_VERSION),
        "everystep": __version__,
        "model": model_digest(model),
        "tokenizer": tokenizer_digest(tokenizer),
        "pass_again": " ".join(absent),
    }
    tensors = {"state": torch.frombuffer(bytearray(to_bytes(stored)), dtype=torch.uint8)}
    for name, value in state.passed.items():
        listed = isinstance(value, list | tuple) and len(value) == 1
        tensors[(_ROW if listed else _PROMPT) + name] = _tensor(name, value[0] if listed else value)
    write_atomic(path, save(tensors, metadata))


def read_run(
    file: Path, model: Subject, tokenizer: Any
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """What was saved, the prompt, and the names of keywords that are to be passed again.

    FormatError: the file is damaged, or of a newer version. RequestError: it is a run of another
    model, tokenizer or version of everystep.
    """
    tensors, metadata = read_file(file)
    _check_owner(file, metadata, model, tokenizer)
    prompt: dict[str, Any] = {}
    for name in tensors.names():
        if name.startswith(_PROMPT):
            prompt[name.removeprefix(_PROMPT)] = tensors.load(name)
        elif name.startswith(_ROW):
            prompt[name.removeprefix(_ROW)] = [tensors.load(name)]
    state = from_bytes(tensors.load("state").numpy().tobytes())
    if not isinstance(state, dict):
        raise FormatError(f"{file} is damaged", got=type(state).__name__)
    return state, prompt, metadata.get("pass_again", "").split()


def _check_owner(file: Path, metadata: Mapping[str, str], model: Subject, tokenizer: Any) -> None:
    """RequestError or FormatError unless the file is a run of this model, tokenizer and version."""
    if metadata.get("format") != _FORMAT:
        got = metadata.get("format", "another safetensors file")
        raise FormatError(f"{file} holds no saved run", wanted=_FORMAT, got=got)
    version = metadata.get("version", "")
    if not version.isdigit() or int(version) > _VERSION:
        raise FormatError(
            f"{file} was written by a newer everystep",
            wanted=f"a saved run of version {_VERSION}",
            got=version,
            do=f"Resume it with everystep {metadata.get('everystep', 'as new as that')}",
        )
    expected = {
        "everystep": (__version__, "version of everystep"),
        "model": (model_digest(model), "model"),
        "tokenizer": (tokenizer_digest(tokenizer), "tokenizer"),
    }
    for name, (own, what) in expected.items():
        if metadata.get(name) != own:
            raise RequestError(
                f"{file} is a run of another {what}",
                wanted=metadata.get(name, "none")[:16],
                got=own[:16],
                do=f"Resume it with the {what} that it was saved with",
            )


# --- what is written ------------------------------------------------------------------------------


def _plain(asked: Asked) -> tuple[dict[str, Any], list[str], int]:
    """What can be written of the keywords, the names of the others, and the seed."""
    plain: dict[str, Any] = {}
    missing: list[str] = []
    for name, value in asked.options.items():
        said = value.to_diff_dict() if isinstance(value, GenerationConfig) else value
        try:
            to_bytes(said)
        except RequestError:
            missing.append(name)
        else:
            plain[name] = said
    return plain, missing, asked.seed


def revived(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords as they were passed."""
    found = dict(plain)
    if isinstance(found.get("generation_config"), dict):
        found["generation_config"] = GenerationConfig(**found["generation_config"])
    return found


def _plain_memos(memos: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return them without likelihoods: the group's own memo has them all."""
    return {
        n: {name: value for name, value in memo.items() if name != "logprobs"}
        for n, memo in memos.items()
    }


def _tensor(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor | np.ndarray):
        raise RequestError(
            f"a run whose prompt has {name} cannot be saved",
            wanted="tensors alone",
            got=type(value).__name__,
            do=f"Open the run with {name} as a tensor",
        )
    return torch.as_tensor(value).detach().cpu().contiguous()


# --- whose it is ----------------------------------------------------------------------------------


# Weights are read once, unless they can change.
_KNOWN: WeakKeyDictionary[Model, str] = WeakKeyDictionary()


def model_digest(model: Subject) -> str:
    """Equal for models whose runs can be exchanged."""
    weights = _weights(model.core)
    how = f"{weights} {model.core.dtype} {model.cache_dtype}"
    return hashlib.sha256(how.encode()).hexdigest()


def _weights(core: Model | ForeignModel) -> str:
    if isinstance(core, ForeignModel):
        return core.digest()
    known = None if core.learns else _KNOWN.get(core)
    if known is None:
        known = _KNOWN[core] = weight_digest(core)
    return known


def prefix_digest(prefix: Any) -> str | None:
    """Equal for prefixes of one prompt; None for anything else."""
    if not isinstance(prefix, Prefix):
        return None
    return f"{len(prefix)} {fingerprint(nobodys(prefix.prompt))}"


def tokenizer_digest(tokenizer: Any) -> str:
    """Equal for tokenizers that spell alike: judged by a text, their size, their special tokens and
    chat template, and 256 of their tokens."""
    if tokenizer is None:
        return "none"
    count = len(tokenizer)
    sample = [*range(0, count, max(1, count // 256))]
    parts = (
        count,
        tokenizer.convert_ids_to_tokens(sample),
        tokenizer.encode(_PROBE),
        tokenizer.all_special_tokens,
        tokenizer.chat_template,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()
