"""Files that change, vanish or fail while they are read, memory that ends, and interrupts.

Each is one of our errors, or the interrupt itself; nothing is half loaded, and the next load is as
good as the first.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import everystep as es
from everystep.errors import CapacityError, EverystepError, FileError, FormatError, MissingFileError
from everystep.files import safetensors
from everystep.files.opening import open_regular
from everystep.files.safetensors import open_weights
from everystep.models import build_model
from everystep.models.loader import HeldWeights
from tests.cli.tiny_model import CONFIG, write_tiny_model
from tests.files.model_folders import described, safetensors_bytes, write_single

IDS = torch.tensor([[5, 6, 7]])
COUNTS = (-1, 0, 1, 3, 2**31, 2**63, 1.5, "4", None, True, [], float("nan"))
OPEN = Path("/proc/self/fd")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


def answer(folder: Path) -> list[int]:
    """What a loaded model says first."""
    return es.load_model(folder).generate(IDS, max_new_tokens=3)[0].tolist()


def test_every_beginning_of_a_file_of_weights_is_refused(tmp_path: Path) -> None:
    path = write_single(tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(FormatError):
            open_weights(tmp_path)


@pytest.mark.parametrize("name", ["../x", "a\0b", "a\nb", "\u202egnp", "/etc/passwd", "x" * 400])
def test_a_name_of_a_tensor_is_only_a_name(name: str, tmp_path: Path) -> None:
    write_single(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes({name: described()}, bytes(4)))
    assert open_weights(tmp_path).load(name).tolist() == [0.0]
    with pytest.raises(FormatError) as raised:
        build_model(CONFIG, open_weights(tmp_path))
    assert str(raised.value).isprintable() and len(str(raised.value)) < 2000


@pytest.mark.slow
def test_two_hundred_thousand_tensors_are_read(tmp_path: Path) -> None:
    write_single(tmp_path)
    empty = described(shape=(0,), end=0)
    header = {f"t{number}": empty for number in range(200_000)}
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(header))
    assert len(open_weights(tmp_path).names()) == 200_000


def test_each_tensor_that_is_missing_or_of_another_shape_is_named(folder: Path) -> None:
    opened = open_weights(folder)
    whole = {name: opened.load(name) for name in opened.names()}
    build_model(CONFIG, HeldWeights(whole))
    for name, values in whole.items():
        rest = {other: one for other, one in whole.items() if other != name}
        with pytest.raises(FormatError, match=name.replace(".", r"\.")):
            build_model(CONFIG, HeldWeights(rest))
        longer = torch.cat([values, values[:1]])
        for wrong in (longer, values[:-1], values[None], values.flatten()[:1]):
            with pytest.raises(FormatError, match=name.replace(".", r"\.")):
                build_model(CONFIG, HeldWeights({**rest, name: wrong}))
        with pytest.raises(FormatError, match=r"surplus\.weight"):
            build_model(CONFIG, HeldWeights({**whole, "surplus.weight": values}))


def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = write_single(tmp_path) / "model.safetensors"
    weights = open_weights(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(FormatError, match="was cut off while it was in use"):
        for name in weights.names():
            weights.load(name)
    path.unlink()
    with pytest.raises(FileError, match="cannot be read"):
        weights.load("embed.weight")
    path.mkdir()
    with pytest.raises(FileError, match="cannot be read"):
        weights.load("embed.weight")


def counted(read: Callable[..., Any], fails_at: int, error: BaseException) -> Callable[..., Any]:
    """A reading function that raises in its call number `fails_at`."""
    calls = iter(range(10**9))

    def reading(*given: Any, **options: Any) -> Any:
        if next(calls) == fails_at:
            raise error
        return read(*given, **options)

    return reading


FAULTS: dict[str, tuple[BaseException, type[BaseException]]] = {
    "an unreadable sector": (OSError(errno.EIO, "Input/output error"), FileError),
    "no more memory": (MemoryError(), CapacityError),
    "no more memory of torch": (
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        CapacityError,
    ),
    "an interrupt": (KeyboardInterrupt(), KeyboardInterrupt),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_any_read_leaves_nothing_half_loaded(
    fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, (error, kind) = answer(folder), FAULTS[fault]
    opened = len(os.listdir(OPEN)) if OPEN.is_dir() else 0
    for at in range(10**9):
        with monkeypatch.context() as patch:
            patch.setattr(safetensors, "stored_bytes", counted(safetensors.stored_bytes, at, error))
            try:
                assert answer(folder) == wanted
                break
            except BaseException as caught:
                assert isinstance(caught, kind), caught
        if OPEN.is_dir():
            assert len(os.listdir(OPEN)) == opened
    assert at > 10
    assert answer(folder) == wanted


def test_a_file_without_permission_is_explained(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(FileError, match=r"cannot be opened; got.*Permission denied"):
        open_regular(folder / "config.json")


@pytest.mark.parametrize("key", [key for key, value in CONFIG.items() if type(value) is int])
def test_a_count_of_any_kind_loads_or_is_refused(key: str, folder: Path) -> None:
    refused = 0
    for value in COUNTS:
        (folder / "config.json").write_text(json.dumps({**CONFIG, key: value}))
        try:
            answer(folder)
        except EverystepError:
            refused += 1
        except UserWarning as warning:  # a context shorter than the prompt
            assert "leads beyond what the model was made for" in str(warning)
    assert refused >= 3
    (folder / "config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != key}))
    try:
        answer(folder)
    except EverystepError as error:
        assert not isinstance(error, MissingFileError)
