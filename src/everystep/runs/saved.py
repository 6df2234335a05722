"""A run as a file, and back: in another process, on another day, with the same end.

The file is a safetensors file. Its metadata say in plain text what it is and whose; tensors hold
the prompt as it was given, and bytes the rest (`types.stored`). No cache row is written: all are
made again from the ids. Nothing in the file can name code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
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
from everystep.errors import FormatError, RequestError, shown
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
class Trail:
    """What is known of the way that a run has come.

    `given`: the positions that were sent or edited. `memos`: what was known after so many ids.
    `steps`: how many there were. `shown`: the serial numbers of the hypotheses that `more` gave.
    """

    given: AbstractSet[int] = frozenset()
    memos: Mapping[int, Mapping[str, Any]] = field(default_factory=lambda: {0: {}})
    steps: int = 0
    shown: AbstractSet[int] = frozenset()


NO_TRAIL = Trail()
"""That of a run that has not begun."""


@dataclass(frozen=True, slots=True, eq=False)
class RunState:
    """Everything of a run that a file has to hold.

    `passed`: the prompt, as it was read. `rules`: from which position on which keywords hold.
    `group`: what the engine dumped.
    """

    passed: Mapping[str, Any]
    rules: Sequence[tuple[int, Asked]]
    trail: Trail
    group: bytes


def write_run(state: RunState, model: Subject, tokenizer: Any, path: Path) -> None:
    """Write the run into the file, whole or not at all; RequestError where it holds what cannot be
    written."""
    rules = [(start, _plain(asked)) for start, asked in state.rules]
    absent = sorted({name for _, (_, missing, _) in rules for name in missing})
    stored = {
        "rules": rules,
        "given": sorted(state.trail.given),
        "memos": {n: memo for n, memo in _plain_memos(state.trail.memos).items() if memo or not n},
        "number": state.trail.steps,
        "shown": sorted(state.trail.shown),
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


def read_run(file: Path, model: Subject, tokenizer: Any, again: Mapping[str, Any]) -> RunState:
    """Read what was saved; `again` has the keywords whose values could not be written.

    FormatError: the file is damaged, or of a newer version. RequestError: it is a run of another
    model, tokenizer, prefix or version of everystep, or a keyword is missing or one too many.
    """
    tensors, metadata = read_file(file)
    _check_owner(file, metadata, model, tokenizer)
    prompt: dict[str, Any] = {}
    for name in tensors.names():
        if name.startswith(_PROMPT):
            prompt[name.removeprefix(_PROMPT)] = tensors.load(name)
        elif name.startswith(_ROW):
            prompt[name.removeprefix(_ROW)] = [tensors.load(name)]
    state: Any = from_bytes(tensors.load("state").numpy().tobytes())
    try:
        absent = sorted({name for _, (_, missing, _) in state["rules"] for name in missing})
        _check_again(absent, again)
        _check_prefix(state["prefix"], again)
        rules = [
            (start, Asked({**_revived(plain), **{name: again[name] for name in missing}}, seed))
            for start, (plain, missing, seed) in state["rules"]
        ]
        trail = Trail(
            frozenset(state["given"]), state["memos"], state["number"], frozenset(state["shown"])
        )
        return RunState(prompt, rules, trail, state["group"].tobytes())
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise FormatError(f"{file} is damaged", got=f"{type(error).__name__}: {error}") from error


def _check_owner(file: Path, metadata: Mapping[str, str], model: Subject, tokenizer: Any) -> None:
    """Raise an error unless the file is a run of this model, tokenizer and version."""
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


def _check_again(absent: Sequence[str], again: Mapping[str, Any]) -> None:
    """Raise RequestError if a keyword is missing that could not be written, or one is too many."""
    missing = [name for name in absent if name not in again]
    surplus = [name for name in again if name not in absent]
    if missing:
        raise RequestError(
            f"the saved run needs {', '.join(missing)}, which cannot be written to a file",
            do="Pass to es.resume what was passed to es.open",
        )
    if surplus:
        raise RequestError(
            f"the saved run has no use for {', '.join(surplus)}",
            wanted=", ".join(absent) or "no further keywords",
            do="Resume without it, then call run.set",
        )


def _check_prefix(written: str | None, again: Mapping[str, Any]) -> None:
    """Raise RequestError unless the prefix that was passed again is the one of the saved run."""
    if "prefix" in again and prefix_digest(again["prefix"]) != written:
        raise RequestError(
            "the saved run stood after another prefix",
            wanted="one that was made from the same prompt",
            got=shown(again["prefix"]),
            do="Make it again with everystep.prefill as it was made for es.open",
        )


# --- what is written ------------------------------------------------------------------------------


def _plain(asked: Asked) -> tuple[dict[str, Any], list[str], int]:
    """Return what can be written of the keywords, the names of the others, and the seed."""
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


def _revived(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords as they were passed."""
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
    """Return a text that is equal for models whose runs can be exchanged."""
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
    """Return a text that is equal for prefixes of one prompt; None for anything else."""
    if not isinstance(prefix, Prefix):
        return None
    return f"{len(prefix)} {fingerprint(nobodys(prefix.prompt))}"


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a text that is equal for tokenizers that spell alike: judged by a text, their size,
    special tokens and chat template, and 256 of their tokens."""
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
