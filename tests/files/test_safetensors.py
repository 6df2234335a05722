"""Weights of whole folders, single and sharded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from everystep.errors import FormatError
from everystep.files.safetensors import open_weights
from tests.files.model_folders import TENSORS, write_sharded, write_single
from tests.nn.test_modes import interrupted

FORMS = pytest.mark.parametrize("write", [write_single, write_sharded])
Write = Callable[[Path], Path]


@FORMS
def test_names_are_those_of_the_files(tmp_path: Path, write: Write) -> None:
    assert sorted(open_weights(write(tmp_path)).names()) == sorted(TENSORS)


@FORMS
@pytest.mark.parametrize("name", TENSORS)
def test_values_come_back_as_they_were_written(tmp_path: Path, write: Write, name: str) -> None:
    loaded = open_weights(write(tmp_path)).load(name)
    assert loaded.dtype == TENSORS[name].dtype
    assert torch.equal(loaded, TENSORS[name])


@FORMS
def test_shape_and_type_are_known_without_reading(tmp_path: Path, write: Write) -> None:
    weights = open_weights(write(tmp_path))
    assert (weights.shape("embed.weight"), weights.dtype("norm.weight")) == ((2, 3), torch.bfloat16)


@FORMS
def test_values_in_another_type(tmp_path: Path, write: Write) -> None:
    loaded = open_weights(write(tmp_path)).load("norm.weight", torch.float64)
    assert torch.equal(loaded, torch.ones(3, dtype=torch.float64))


def test_membership(tmp_path: Path) -> None:
    weights = open_weights(write_single(tmp_path))
    assert "ids" in weights
    assert "idx" not in weights


def test_an_unknown_name_is_an_error_with_the_nearest(tmp_path: Path) -> None:
    weights = open_weights(write_single(tmp_path))
    with pytest.raises(FormatError, match=r"no tensor 'embd\.weight'.*'embed\.weight'"):
        weights.load("embd.weight")


def test_one_file_counts_more_than_an_index(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    write_single(tmp_path, {"only": torch.zeros(1)})
    assert open_weights(tmp_path).names() == ["only"]


def test_another_stem(tmp_path: Path) -> None:
    (write_single(tmp_path) / "model.safetensors").rename(tmp_path / "adapter_model.safetensors")
    assert "ids" in open_weights(tmp_path, stem="adapter_model")


def test_no_tensor_is_allowed(tmp_path: Path) -> None:
    assert open_weights(write_single(tmp_path, {})).names() == []


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0, 2)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_tensor_without_elements_is_read(
    tmp_path: Path, shape: tuple[int, ...], kind: torch.dtype
) -> None:
    weights = open_weights(write_single(tmp_path, {"none": torch.zeros(shape, dtype=kind)}))
    found = weights.load("none")
    assert (found.shape, found.dtype) == (shape, kind)
    assert weights.load("none", torch.float64).dtype == torch.float64


# A file that was opened and not yet entered is closed when nobody holds it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_line_of_a_read_is_an_interrupt(tmp_path: Path) -> None:
    """Also at those of a path, which numpy asked for its name from C."""
    write_single(tmp_path)
    weights, line = open_weights(tmp_path), 0
    (name, *_) = weights.names()
    while interrupted(lambda: weights.load(name), line):
        line += 1
    assert line > 8
