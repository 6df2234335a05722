"""Saved runs that were tampered with: each is refused by an error of ours, or ends as a run does.

A file that was only damaged does not agree with its checksum. Here the checksum is also made again,
so that what judges the state behind it is met.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

import everystep as es
from everystep.api.model import LanguageModel
from everystep.errors import CapacityError, FileError, FormatError, RequestError
from everystep.files.safetensors import read_file
from everystep.runs.saved import checksum
from everystep.types.stored import from_bytes, to_bytes
from tests.api.test_saved_runs import PLAIN, TOKENIZER, model_of, request_of, spelled
from tests.mutations.mutators import BYTES, revalued

# What was changed may have no effect, or be a reason to warn.
pytestmark = pytest.mark.filterwarnings("ignore")
FEW, MANY = 25, 300  # files of each run
DIVERSE = ([5, 6], {**PLAIN, "num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5})


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return model_of("native")


def written(model: LanguageModel, number: int, path: Path) -> Any:
    """A run of the kind of this number in the file, and how it ends."""
    prompt, options = request_of(number) if number < 12 else DIVERSE
    run = es.open(model, TOKENIZER, prompt, **options)
    for _ in range(5):
        next(run, None)
    if number in (0, 1, 10):
        run.send([5, 6])
        next(run)
    run.save(path)
    return spelled(run.result())


def outcome(path: Path, model: LanguageModel) -> tuple[str, Any]:
    """The class of the error that the file is refused with, or how its run ends."""
    try:
        return "run", spelled(es.resume(path, model, TOKENIZER).result())
    except (RequestError, FileError, CapacityError) as error:
        return type(error).__name__, None


def leaves(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    keys: Any = value if isinstance(value, dict) else range(len(value))
    for key in keys:
        if isinstance(value[key], dict | list):
            yield from leaves(value[key], (*at, key))
        else:
            yield (*at, key)


def nudged(rng: random.Random, data: bytes) -> bytes:
    """One or two values of a JSON document are others of their kind."""
    document = json.loads(data)
    for *path, key in rng.sample([*leaves(document)], rng.randint(1, 2)):
        at: Any = document
        for step in path:
            at = at[step]
        value = at[key]
        if isinstance(value, bool):
            at[key] = not value
        elif isinstance(value, int):
            near = (value + 1, value - 1, -value, value * 2, 0, 1, 2)
            at[key] = rng.choice((*near, 10**6, 2**31, 2**62, 2**63, 10**30))
        elif isinstance(value, str):
            kinds = ("int64", "uint8", "float64", "bool", "0x1.8p+0", "nan", "inf", "stop", "error")
            at[key] = rng.choice((*kinds, "x", value[:-1]))
        else:
            at[key] = rng.choice((0, 1, True, {"tuple": []}, {"list": []}, {"dict": []}))
    return json.dumps(document).encode()


def with_other_form(rng: random.Random, state: bytes, change: Any) -> bytes:
    """The bytes of `types.stored` with another description of the same numbers."""
    size = int.from_bytes(state[:8], "little")
    form = change(rng, state[8 : 8 + size])
    return len(form).to_bytes(8, "little") + form + state[8 + size :]


def signed(rng: random.Random, path: Path) -> bytes:
    """The file with something else in its state, or in the engine's within, and a checksum of that;
    or with other numbers there."""
    tensors, metadata = load_file(path), read_file(path)[1]
    state, change = tensors["state"].numpy().tobytes(), rng.choice((revalued, nudged, nudged))
    where = rng.random()
    if where < 0.4:
        state = with_other_form(rng, state, change)
    elif where < 0.8:
        outer = from_bytes(state)
        group = with_other_form(rng, outer["group"].tobytes(), change)
        state = to_bytes({**outer, "group": np.frombuffer(group, np.uint8)})
    else:
        flipped = bytearray(state)
        for _ in range(rng.randint(1, 3)):
            flipped[rng.randrange(len(state))] ^= 1 << rng.randrange(8)
        state = bytes(flipped)
    tensors["state"] = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    metadata["sha256"] = checksum(tensors, metadata)
    return save(tensors, metadata)


def check_signed(model: LanguageModel, number: int, folder: Path, count: int) -> None:
    written(model, number, folder / "run")
    rng, found = random.Random(number), Counter[str]()
    for _ in range(count):
        (folder / "other").write_bytes(signed(rng, folder / "run"))
        found[outcome(folder / "other", model)[0]] += 1
    assert found["FormatError"] > count // 3, found


@pytest.mark.parametrize("number", range(13))
def test_what_cannot_have_been_saved_is_refused(
    model: LanguageModel, number: int, tmp_path: Path
) -> None:
    check_signed(model, number, tmp_path, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(13))
def test_much_that_cannot_have_been_saved_is_refused(
    model: LanguageModel, number: int, tmp_path: Path
) -> None:
    check_signed(model, number, tmp_path, MANY)


def check_unsigned(model: LanguageModel, folder: Path, count: int) -> None:
    wanted = written(model, 10, folder / "run")
    data, rng = (folder / "run").read_bytes(), random.Random(3)
    for _ in range(count):
        changed = rng.choice(BYTES)(rng, data)
        (folder / "other").write_bytes(changed)
        kind, result = outcome(folder / "other", model)
        assert kind != "run" or result == wanted


def test_damage_is_noticed(model: LanguageModel, tmp_path: Path) -> None:
    check_unsigned(model, tmp_path, 12 * FEW)


@pytest.mark.slow
def test_much_damage_is_noticed(model: LanguageModel, tmp_path: Path) -> None:
    check_unsigned(model, tmp_path, 12 * MANY)


def test_every_flipped_byte_of_the_ids_is_noticed(model: LanguageModel, tmp_path: Path) -> None:
    path = tmp_path / "run"
    written(model, 0, path)
    data = path.read_bytes()
    for place in range(len(data) - 8 * 12, len(data)):
        changed = bytearray(data)
        changed[place] ^= 1
        path.write_bytes(changed)
        with pytest.raises(FormatError, match="checksum"):
            es.resume(path, model, TOKENIZER)


def test_every_field_of_the_metadata_counts(model: LanguageModel, tmp_path: Path) -> None:
    path, other = tmp_path / "run", tmp_path / "other"
    written(model, 0, path)
    tensors, metadata = load_file(path), read_file(path)[1]
    for name in metadata:
        for value in ("", "x", metadata[name] + "0", "[" * 10_000):
            for signs in (False, True) if value != metadata[name] else ():
                told = {**metadata, name: value}
                if signs and name != "sha256":
                    told["sha256"] = checksum(tensors, told)
                other.write_bytes(save(tensors, told))
                kind = outcome(other, model)[0]
                assert kind == "FormatError" or (signs and name != "sha256"), (name, value)
        other.write_bytes(save(tensors, {n: one for n, one in metadata.items() if n != name}))
        assert outcome(other, model)[0] == "FormatError"


def test_more_ids_than_the_run_could_have_are_not_fed(model: LanguageModel, tmp_path: Path) -> None:
    path, other = tmp_path / "run", tmp_path / "other"
    written(model, 0, path)
    tensors, metadata = load_file(path), read_file(path)[1]
    outer = from_bytes(tensors["state"].numpy().tobytes())
    group = from_bytes(outer["group"].tobytes())
    for ids in (
        np.full(10**6, 7),
        np.array([7, 320]),
        np.array([7, -1]),
        np.ones((2, 2), np.int64),
    ):
        changed = {**group, "tokens": [ids]}
        state = {**outer, "group": np.frombuffer(to_bytes(changed), np.uint8)}
        tensors["state"] = torch.frombuffer(bytearray(to_bytes(state)), dtype=torch.uint8)
        metadata["sha256"] = checksum(tensors, metadata)
        other.write_bytes(save(tensors, metadata))
        with pytest.raises(FormatError):
            es.resume(other, model, TOKENIZER)
