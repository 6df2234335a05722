"""A model in several GGUF files is opened as one, whichever part is named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from everystep.errors import FormatError, MissingFileError
from everystep.files.gguf import read_gguf
from everystep.files.gguf_parts import part_names
from everystep.models import build_gguf_model, named_weights
from tests.files.gguf_writer import write_gguf
from tests.models.test_gguf import converted, metadata
from tests.models.tiny import reference_decoder

TENSORS = {f"t{i}": ("F32", torch.randn(4, 32)) for i in range(7)}
KEYS = {"general.architecture": "llama", "llama.block_count": 2}


def write_parts(
    folder: Path,
    keys: Mapping[str, object],
    tensors: Mapping[str, Any],
    count: int = 3,
    **changes: object,
) -> list[Path]:
    """The files of a split model; `changes`: other values of the keys of the last one."""
    found = []
    for number in range(count):
        own = {"split.no": number, "split.count": count, "split.tensors.count": len(tensors)}
        if number == count - 1:
            own |= {key.replace("_", ".", 1): value for key, value in changes.items()}
        held = dict(list(tensors.items())[number::count])
        path = folder / f"model-{number + 1:05}-of-{count:05}.gguf"
        found.append(write_gguf(path, {**(keys if number == 0 else {}), **own}, held))
    return found


@pytest.mark.parametrize("named", [0, 1, 2])
def test_all_parts_are_opened(tmp_path: Path, named: int) -> None:
    opened = read_gguf(write_parts(tmp_path, KEYS, TENSORS)[named])
    assert opened.metadata["llama.block_count"] == 2
    assert {*opened.tensors} == {*TENSORS}
    for name, (_, values) in TENSORS.items():
        assert torch.equal(opened.dequantise(name), values)
        assert opened.blocks(name).shape == (4, 128)
        opened.release(name)
        assert torch.equal(opened.dequantise(name), values)


def test_a_split_model_is_the_whole_one(tmp_path: Path) -> None:
    reference = reference_decoder("llama", torch.float32)
    keys, tensors = metadata("llama"), converted(reference, "llama")
    (tmp_path / "parts").mkdir()
    whole = build_gguf_model(read_gguf(write_gguf(tmp_path / "m.gguf", keys, tensors)))
    split = build_gguf_model(read_gguf(write_parts(tmp_path / "parts", keys, tensors)[1]))
    found, wanted = dict(named_weights(split)), dict(named_weights(whole))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, KEYS, TENSORS)
    parts[2].unlink()
    with pytest.raises(MissingFileError, match="model-00003-of-00003"):
        read_gguf(parts[0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"split_no": 1}, "mixed up"),
        ({"split_count": 4}, "mixed up"),
    ],
    ids=str,
)
def test_parts_of_other_models_are_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    parts = write_parts(tmp_path, KEYS, TENSORS, **changes)
    with pytest.raises(FormatError, match=words):
        read_gguf(parts[0])


def test_parts_that_share_a_tensor_or_lack_one_are_refused(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, KEYS, TENSORS)
    own = {"split.no": 2, "split.count": 3}
    write_gguf(parts[2], own, {"t0": TENSORS["t0"]})
    with pytest.raises(FormatError, match="'t0' is in another part too"):
        read_gguf(parts[0])
    write_gguf(parts[2], own, {})
    with pytest.raises(FormatError, match=r"do not hold all tensors.*wanted 7; got 5"):
        read_gguf(parts[0])


def test_a_part_under_another_name_is_refused(tmp_path: Path) -> None:
    first = write_parts(tmp_path, KEYS, TENSORS)[0]
    renamed = first.rename(tmp_path / "model.gguf")
    with pytest.raises(FormatError, match=r"-00001-of-00003.gguf; got model.gguf"):
        read_gguf(renamed)


def test_names_of_parts() -> None:
    assert part_names("a-00002-of-00003.GGUF") == [f"a-0000{i}-of-00003.GGUF" for i in (1, 2, 3)]
    for other in ("a.gguf", "a-00000-of-00003.gguf", "a-00004-of-00003.gguf", "a-1-of-3.gguf"):
        assert part_names(other) is None
