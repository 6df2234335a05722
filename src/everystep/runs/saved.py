"""A run as a file, and back: in another process, on another day, with the same end.

The file is a safetensors file. Its metadata say in plain text what it is and whose; tensors hold
the prompt as it was given, and bytes the rest (`types.stored`). No cache row is written: all are
made again from the ids. Nothing in the file can name code.

A checksum over all of it finds what was changed by accident. Whoever changes the checksum too still
meets three judges: the kinds of all values (here), what the engine's group may know
(`engine/snapshot.py`), and what both say of each other (`require_possible`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from everystep._version import __version__
from everystep.config import ChatDefaults, GenerationConfig
from everystep.engine.snapshot import fingerprint
from everystep.errors import EverystepError, FormatError, RequestError, shown
from everystep.files.atomic import write_atomic
from everystep.files.safetensors import read_file
from everystep.nn.digests import add_tensor
from everystep.requests.door import PromptValues
from everystep.requests.options import Prefix
from everystep.requests.subject import Subject
from everystep.runs.hands import Asked
from everystep.text.digest import tokenizer_digest
from everystep.types import nobodys
from everystep.types.stored import fits, fits_memo, from_bytes, to_bytes

_FORMAT, _VERSION = "everystep.run", 4
_PROMPT, _ROW = "prompt.", "row."
"""Before the names of tensors of the prompt; the latter where they stood in a list of one row."""


@dataclass(frozen=True, slots=True, eq=False)
class Trail:
    """The way that a run has come.

    `given`: the positions that were sent or edited. `memos`: what was known after so many ids.
    `steps`: how many there were. `shown`: the serial numbers of the hypotheses that `more` gave.
    """

    given: AbstractSet[int] = frozenset()
    memos: Mapping[int, Mapping[str, object]] = field(default_factory=lambda: {0: {}})
    steps: int = 0
    shown: AbstractSet[int] = frozenset()


NO_TRAIL = Trail()
"""That of a run that has not begun."""


@dataclass(frozen=True, slots=True, eq=False)
class RunState:
    """Everything of a run that a file has to hold.

    `passed`: the prompt, as it was read. `rules`: from which position on which keywords hold.
    `adapters`: the names of those that it uses. `group`: what the engine dumped. `ahead`: keywords
    that were set since the run ended, None without any.
    """

    passed: PromptValues
    rules: Sequence[tuple[int, Asked]]
    adapters: tuple[str, ...]
    trail: Trail
    group: bytes
    ahead: Asked | None = None

    @property
    def asked(self) -> list[Asked]:
        """All keywords that hold somewhere, or may."""
        ahead = [] if self.ahead is None else [self.ahead]
        return [*(one for _, one in self.rules), *ahead]

    def recorded(self, to: object) -> RunState:
        """Return a run whose further steps are written to a record."""

        def told(asked: Asked) -> Asked:
            return replace(asked, options={**asked.options, "record": to})

        rules = [(start, told(asked)) for start, asked in self.rules]
        ahead = None if self.ahead is None else told(self.ahead)
        return replace(self, rules=rules, ahead=ahead)


def write_run(state: RunState, model: Subject, tokenizer: object, path: Path) -> None:
    """Write the run into the file, whole or not at all; RequestError where it holds what cannot be
    written."""
    rules = [(start, _plain(asked)) for start, asked in state.rules]
    ahead = None if state.ahead is None else _plain(state.ahead)
    absent = _absent(rules, ahead)
    memos = {  # without likelihoods: the group's own memo has them all
        n: {name: value for name, value in memo.items() if name != "logprobs"}
        for n, memo in state.trail.memos.items()
    }
    stored = {
        "rules": rules,
        "ahead": ahead,
        "given": sorted(state.trail.given),
        "memos": {n: memo for n, memo in memos.items() if memo or not n},
        "number": state.trail.steps,
        "shown": sorted(state.trail.shown),
        "prefix": prefix_digest(state.rules[0][1].options.get("prefix")),
        "group": np.frombuffer(state.group, np.uint8),
    }
    tensors = {"state": torch.frombuffer(bytearray(to_bytes(stored)), dtype=torch.uint8)}
    for name, value in state.passed.passed().items():
        if isinstance(value, list | tuple) and len(value) == 1:
            tensors[_ROW + name] = _tensor(name, value[0])
        else:
            tensors[_PROMPT + name] = _tensor(name, value)
    metadata = {
        "format": _FORMAT,
        "version": str(_VERSION),
        "everystep": __version__,
        "model": model.digest(state.adapters),
        "adapters": json.dumps(state.adapters),
        "tokenizer": tokenizer_digest(tokenizer),
        "pass_again": " ".join(absent),
    }
    metadata["sha256"] = checksum(tensors, metadata)
    write_atomic(path, save(tensors, metadata))


def checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Return the checksum of everything in a file but the checksum itself."""
    told = sorted((name, said) for name, said in metadata.items() if name != "sha256")
    digest = hashlib.sha256(json.dumps(told).encode())
    for name in sorted(tensors):
        add_tensor(digest, name, tensors[name])
    return digest.hexdigest()


# --- what is read ---------------------------------------------------------------------------------


Plain = tuple[dict[str, Any], list[str], Any, dict[str, Any] | None]
"""Keywords that could be written, the names of those that could not, the seed, and how a chat
samples if it is one."""


class Written(TypedDict):
    """A run as its bytes hold it."""

    rules: list[tuple[int, Plain]]
    ahead: Plain | None
    given: list[int]
    memos: dict[int, dict[str, Any]]
    number: int
    shown: list[int]
    prefix: str | None
    group: np.ndarray


def read_run(
    file: Path, model: Subject, tokenizer: object, again: Mapping[str, object]
) -> RunState:
    """Read what was saved; `again` has the keywords whose values could not be written.

    FormatError: the file is damaged, or of another version. RequestError: it is a run of another
    model, tokenizer, prefix or version of everystep, or a keyword is missing or one too many.
    """
    weights, metadata = read_file(file)
    _check_version(file, metadata)
    tensors = {name: weights.load(name) for name in weights.names()}
    if metadata.get("sha256") != checksum(tensors, metadata):
        raise FormatError(
            f"{file} is damaged",
            wanted="the bytes that were saved",
            got="others: the checksum differs",
            do="Take another copy of the file",
        )
    adapters = _adapters(file, metadata)
    _check_owner(file, metadata, model, tokenizer, adapters)
    written = _written(file, tensors.pop("state", torch.empty(0)))
    absent = _absent(written["rules"], written["ahead"])
    if metadata.get("pass_again") != " ".join(absent):
        raise _damaged(file, "pass_again")
    record = again.get("record")
    again = {name: one for name, one in again.items() if name != "record"}
    _check_again(absent, again)
    _check_prefix(written["prefix"], again)
    rules = [(start, _asked(file, plain, again)) for start, plain in written["rules"]]
    ahead = None if written["ahead"] is None else _asked(file, written["ahead"], again)
    given, shown_before = frozenset(written["given"]), frozenset(written["shown"])
    trail = Trail(given, written["memos"], written["number"], shown_before)
    group = written["group"].tobytes()
    read = RunState(_prompt(file, tensors), rules, adapters, trail, group, ahead)
    return read if record is None else read.recorded(record)


def _check_version(file: Path, metadata: Mapping[str, str]) -> None:
    """Raise FormatError unless the file holds a run in the form that is written today."""
    if metadata.get("format") != _FORMAT:
        got = metadata.get("format", "another safetensors file")
        raise FormatError(f"{file} holds no saved run", wanted=_FORMAT, got=got)
    version = metadata.get("version", "")
    if version != str(_VERSION):
        digits = version.isascii() and version.isdigit()
        age = "an older" if digits and int(version[:9]) < _VERSION else "a newer"
        raise FormatError(
            f"{file} was written by {age} everystep",
            wanted=f"a saved run of version {_VERSION}",
            got=version,
            do=f"Resume it with everystep {metadata.get('everystep', 'of that time')}",
        )


def _check_owner(
    file: Path,
    metadata: Mapping[str, str],
    model: Subject,
    tokenizer: object,
    adapters: tuple[str, ...],
) -> None:
    """Raise RequestError unless the file is a run of this model, tokenizer and version."""
    expected = {
        "everystep": (__version__, "version of everystep"),
        "model": (model.digest(adapters), "model"),
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


def _adapters(file: Path, metadata: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the adapters that the run uses."""
    try:
        names = json.loads(metadata.get("adapters", ""))
    except (ValueError, RecursionError) as error:
        raise _damaged(file, "adapters") from error
    if not fits(names, list[str]):
        raise _damaged(file, "adapters")
    return tuple(names)


def _written(file: Path, state: Tensor) -> Written:
    """Return what the bytes hold, all of it of the kinds that are written."""
    if state.dtype != torch.uint8 or state.dim() != 1:
        raise _damaged(file, "state")
    written = from_bytes(state.numpy().tobytes())
    if not fits(written, Written):
        raise _damaged(file, "state")
    found = cast(Written, written)
    starts = [start for start, _ in found["rules"]]
    group = found["group"]
    for part, possible in (
        ("rules", starts[:1] == [0] and all(a < b for a, b in pairwise(starts))),
        ("memos", 0 in found["memos"] and all(map(fits_memo, found["memos"].values()))),
        ("number", 0 <= found["number"] < 2**62),
        ("group", group.dtype == np.uint8 and group.ndim == 1),
    ):
        if not possible:
            raise _damaged(file, part)
    return found


def _asked(file: Path, written: Plain, again: Mapping[str, object]) -> Asked:
    """Return keywords as they were passed; `again`: those that could not be written."""
    plain, missing, seed, sampling = written
    options = {**_revived(file, plain), **{name: again[name] for name in missing}}
    return Asked(options, seed, _chat(file, sampling))


def _prompt(file: Path, tensors: Mapping[str, Tensor]) -> PromptValues:
    """Return the prompt as it was given."""
    prompt: dict[str, object] = {}
    for name, tensor in tensors.items():
        if name.startswith(_PROMPT):
            prompt[name.removeprefix(_PROMPT)] = tensor
        elif name.startswith(_ROW):
            prompt[name.removeprefix(_ROW)] = [tensor]
        else:
            raise _damaged(file, name)
    return PromptValues.of(prompt)


def require_possible(state: RunState, count: int, *, alone: bool) -> None:
    """Raise FormatError unless a run with so many ids may have come this way; `alone`: it has one
    sequence, so that ids may have been given."""
    places = (*state.trail.given, *(start for start, _ in state.rules), *state.trail.memos)
    fixed = not state.trail.given and len(state.asked) == 1 and {*state.trail.memos} == {0}
    within = all(0 <= one <= count for one in places) and count not in state.trail.given
    if not within or not (alone or fixed):
        raise FormatError("the saved run is damaged", got="positions that it does not have")


def _damaged(file: Path, part: str) -> FormatError:
    return FormatError(f"{file} is damaged", got=f"no possible {part}")


def _check_again(absent: Sequence[str], again: Mapping[str, object]) -> None:
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


def _check_prefix(written: str | None, again: Mapping[str, object]) -> None:
    """Raise RequestError unless the prefix that was passed again is the one of the saved run."""
    if "prefix" in again and prefix_digest(again["prefix"]) != written:
        raise RequestError(
            "the saved run stood after another prefix",
            wanted="one that was made from the same prompt",
            got=shown(again["prefix"]),
            do="Make it again with everystep.prefill as it was made for es.open",
        )


# --- what is written ------------------------------------------------------------------------------


def _absent(rules: Iterable[tuple[int, Plain]], ahead: Plain | None) -> list[str]:
    """Return the names of keywords that could not be written."""
    written = [*(one for _, one in rules), *([] if ahead is None else [ahead])]
    return sorted({name for _, missing, *_ in written for name in missing})


def _plain(asked: Asked) -> Plain:
    """Return what can be written of the keywords, the names of the others, the seed, and how a chat
    samples."""
    plain: dict[str, object] = {}
    missing: list[str] = []
    for name, value in asked.options.items():
        if name == "record":
            continue  # a file of the run that is saved, not of one that goes on from it
        said = value.to_diff_dict() if isinstance(value, GenerationConfig) else value
        said = _as_arrays(said) if name == "steer" else said
        try:
            to_bytes(said)
        except RequestError:
            missing.append(name)
        else:
            plain[name] = said
    return plain, missing, asked.seed, None if asked.chat is None else {**asked.chat.sampling}


def _as_arrays(steer: object) -> object:
    """Return vectors by layer as arrays, in which they lose nothing; anything else as it is."""
    if isinstance(steer, list | tuple):
        return [_as_arrays(one) for one in steer]
    if not isinstance(steer, Mapping):
        return steer

    def array(vector: object) -> object:
        if not isinstance(vector, Tensor):
            return vector
        return vector.detach().cpu().to(torch.promote_types(vector.dtype, torch.float32)).numpy()

    return {layer: array(vector) for layer, vector in steer.items()}


def _as_vectors(file: Path, written: object) -> object:
    """Return the same as tensors."""
    if isinstance(written, list):
        return [_as_vectors(file, one) for one in written]
    if written is None:
        return None
    if not fits(written, dict[int, np.ndarray]):
        raise _damaged(file, "steer")
    arrays = cast(Mapping[int, np.ndarray], written)
    return {layer: torch.tensor(one) for layer, one in arrays.items()}


def _revived(file: Path, plain: Mapping[str, object]) -> dict[str, object]:
    """Return the keywords as they were passed."""
    found = dict(plain)
    if "steer" in found:
        found["steer"] = _as_vectors(file, found["steer"])
    said = found.get("generation_config")
    if isinstance(said, dict):
        if not fits(said, dict[str, Any]):
            raise _damaged(file, "generation_config")
        found["generation_config"] = GenerationConfig(**said)
    return found


def _chat(file: Path, sampling: Mapping[str, object] | None) -> ChatDefaults | None:
    """Return the defaults of a chat as they were when it began."""
    try:
        return None if sampling is None else ChatDefaults(None, sampling)
    except EverystepError as error:
        raise _damaged(file, "sampling of a chat") from error


def _tensor(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor | np.ndarray):
        raise RequestError(
            f"a run whose prompt has {name} cannot be saved",
            wanted="tensors alone",
            got=type(value).__name__,
            do=f"Open the run with {name} as a tensor",
        )
    return torch.as_tensor(value).detach().cpu().contiguous()


# --- whose it is ----------------------------------------------------------------------------------


def prefix_digest(prefix: object) -> str | None:
    """Return a text that is equal for prefixes of one prompt; None for anything else."""
    if not isinstance(prefix, Prefix):
        return None
    return f"{len(prefix)} {fingerprint(nobodys(prefix.prompt))}"
