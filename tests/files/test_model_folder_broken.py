"""Model folders that are broken, each in one way: the class of the error, and what its text says.

Each case changes one file of a whole folder; opening the folder and its weights must refuse it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from everystep.errors import (
    EverystepError,
    FileError,
    FormatError,
    MissingFileError,
    UnsupportedError,
)
from everystep.files.model_folder import open_folder
from everystep.files.safetensors import open_weights
from everystep.files.strict_json import MAX_JSON_BYTES
from tests.files.model_folders import (
    CONFIG,
    INDEX,
    SHARDS,
    described,
    safetensors_bytes,
    write_sharded,
    write_single,
)

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
Content = bytes | object

# File, content (bytes, or what becomes JSON), error, parts of the text.
SMALL_FILES: dict[str, tuple[str, Content, type[EverystepError], list[str]]] = {
    "empty": ("config.json", b" \n", FormatError, ["is empty"]),
    "no JSON": ("config.json", b"model_type: llama", FormatError, ["not valid JSON", "line 1"]),
    "no UTF-8": ("config.json", b'{"a": "\xff"}', FormatError, ["not valid JSON", "utf-8"]),
    "web page": ("config.json", b"<html>Sign in</html>", FormatError, ["a web page"]),
    "git-lfs pointer": ("generation_config.json", LFS, FormatError, ["git lfs pull"]),
    "a list": ("config.json", [1], FormatError, ["holds no object", "got list"]),
    "deep": ("config.json", b'{"a":' + b"[" * 90 + b"]" * 90 + b"}", FormatError, ["too deeply"]),
    "deeper than the stack": (
        "config.json",
        b"[" * 200_000,
        FormatError,
        ["too deeply", "at most 64"],
    ),
    "key twice": ("config.json", b'{"a": 1, "a": 2}', FormatError, ["key 'a' comes twice"]),
    "NaN": ("generation_config.json", b'{"t": NaN}', FormatError, ["NaN is no JSON number"]),
    "number too large": ("generation_config.json", b'{"t": 1e999}', FormatError, ["1e999"]),
    "number without end": (
        "config.json",
        b'{"n": ' + b"1" * 5000 + b"}",
        FormatError,
        ["not valid JSON", "digits"],
    ),
    "too large": ("config.json", b" " * (MAX_JSON_BYTES + 1), FormatError, ["is too large"]),
    "no model_type": ("config.json", {}, FormatError, ["the field 'model_type' is missing"]),
    "model_type a number": (
        "config.json",
        {"model_type": 3},
        FormatError,
        ["field 'model_type'", "wanted a text", "got 3"],
    ),
    "architectures not names": (
        "config.json",
        {**CONFIG, "architectures": [1]},
        FormatError,
        ["'architectures'", "[1]"],
    ),
    "end token a text": (
        "generation_config.json",
        {"eos_token_id": "</s>"},
        FormatError,
        ["'eos_token_id'", "wanted ids", "</s>"],
    ),
    "tokenizer empty": ("tokenizer.json", b"", FormatError, ["is empty"]),
    "tokenizer a pointer": ("tokenizer.json", LFS, FormatError, ["git lfs pull"]),
}

WEIGHTS: dict[str, tuple[Content, type[EverystepError], list[str]]] = {
    "empty": (b"", FormatError, ["not a safetensors file", "0 bytes"]),
    "header longer than the file": (
        safetensors_bytes({}, length=2**63),
        FormatError,
        ["cut off", str(2**63)],
    ),
    "no header": (bytes(64), FormatError, ["a header of 2 to 56 bytes", "got 0"]),
    "git-lfs pointer": (LFS, FormatError, ["git lfs pull"]),
    "pickle": (b"\x80\x04" + bytes(60), FormatError, ["a pickle", "never read"]),
    "header not JSON": (safetensors_bytes(b"{a}"), FormatError, ["not valid JSON"]),
    "tensor twice": (
        safetensors_bytes(b'{"t": {}, "t": {}}'),
        FormatError,
        ["key 't' comes twice"],
    ),
    "tensor without name": (
        safetensors_bytes({"": described()}, bytes(4)),
        FormatError,
        ["'' is no tensor's name"],
    ),
    "tensor a number": (safetensors_bytes({"t": 1}), FormatError, ["'t' is not described"]),
    "unknown type": (
        safetensors_bytes({"t": described("F42")}, bytes(4)),
        UnsupportedError,
        ["'t' is of an unknown type", "BF16", "got F42"],
    ),
    "no shape": (
        safetensors_bytes({"t": {"dtype": "F32"}}),
        FormatError,
        ["'t'", "'shape' is missing"],
    ),
    "negative size": (
        safetensors_bytes({"t": described(shape=(-1,))}, bytes(4)),
        FormatError,
        ["'t' has an impossible shape", "[-1]"],
    ),
    "shape and bytes differ": (
        safetensors_bytes({"t": described(shape=(2,))}, bytes(4)),
        FormatError,
        ["contradicts itself"],
    ),
    "bytes after the end": (
        safetensors_bytes({"t": described()}, bytes(9)),
        FormatError,
        ["contradicts itself"],
    ),
    "two tensors at one place": (
        safetensors_bytes({"t": described(), "u": described()}, bytes(4)),
        FormatError,
        ["contradicts itself"],
    ),
}

PLACED = {"a": SHARDS[0]}
INDEXES: dict[str, tuple[Content, type[EverystepError], list[str]]] = {
    "not JSON": (b"{", FormatError, ["not valid JSON"]),
    "no map": ({}, FormatError, ["'weight_map' is missing"]),
    "map a list": ({"weight_map": [1]}, FormatError, ["'weight_map'", "wanted an object"]),
    "map empty": ({"weight_map": {}}, FormatError, ["'weight_map' is empty"]),
    "shard outside": (
        {"weight_map": {"a": "../model.safetensors"}},
        FormatError,
        ["'a' is said to be in an impossible file", "same folder", "../model.safetensors"],
    ),
    "shard a pickle": (
        {"weight_map": {"a": "model.bin"}},
        FormatError,
        ["impossible file", "model.bin"],
    ),
    "shard a number": ({"weight_map": {"a": 1}}, FormatError, ["impossible file", "got 1"]),
    "shard missing": (
        {"weight_map": {"a": "gone.safetensors"}},
        MissingFileError,
        ["names gone.safetensors, which is missing"],
    ),
    "tensor not in its shard": (
        {"weight_map": {"embed.weight": SHARDS[0], "ids": SHARDS[0], "lost": SHARDS[0]}},
        FormatError,
        ["names tensors that are not in", SHARDS[0], "'lost'"],
    ),
    "tensor not in the index": (
        {"weight_map": {"embed.weight": SHARDS[0]}},
        FormatError,
        ["does not name all tensors of", SHARDS[0], "'ids'"],
    ),
}


def put(path: Path, content: Content) -> None:
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


def check(folder: Path, error: type[EverystepError], parts: list[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    with pytest.raises(EverystepError) as caught:
        open_folder(folder).weights()
    assert type(caught.value) is error
    for part in parts:
        assert part in str(caught.value)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.parametrize("case", SMALL_FILES)
def test_a_broken_small_file_is_refused(tmp_path: Path, case: str) -> None:
    name, content, error, parts = SMALL_FILES[case]
    put(write_single(tmp_path) / name, content)
    check(tmp_path, error, [str(tmp_path / name), *parts])


@pytest.mark.parametrize("case", WEIGHTS)
def test_a_broken_file_of_weights_is_refused(tmp_path: Path, case: str) -> None:
    content, error, parts = WEIGHTS[case]
    put(write_single(tmp_path) / "model.safetensors", content)
    check(tmp_path, error, [str(tmp_path / "model.safetensors"), *parts])


@pytest.mark.parametrize("case", INDEXES)
def test_a_broken_index_is_refused(tmp_path: Path, case: str) -> None:
    content, error, parts = INDEXES[case]
    put(write_sharded(tmp_path) / INDEX, content)
    check(tmp_path, error, [str(tmp_path / INDEX), *parts])


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".safetensors",
        "..safetensors",
        "/model.safetensors",
        "a/b.safetensors",
        "a\\b.safetensors",
        "C:\\b.safetensors",
        "C:b.safetensors",
        "\\\\host\\b.safetensors",
        "a\0.safetensors",
        "a.safetensors\n",
        "a.safetensors ",
        "é.safetensors",
        "x" * 300 + ".safetensors",
    ],
)
def test_no_name_of_a_shard_leaves_the_folder(tmp_path: Path, name: str) -> None:
    put(write_sharded(tmp_path) / INDEX, {"weight_map": {"a": name}})
    check(tmp_path, FormatError, ["impossible file"])


def test_a_broken_second_shard_leaves_nothing_half_open(tmp_path: Path) -> None:
    put(write_sharded(tmp_path) / SHARDS[1], LFS)
    check(tmp_path, FormatError, [SHARDS[1], "git lfs pull"])


def test_a_missing_folder_is_distinguished_from_an_empty_one(tmp_path: Path) -> None:
    for open_it in (open_folder, open_weights):
        with pytest.raises(MissingFileError, match=r"there is no folder .*gone"):
            open_it(tmp_path / "gone")


def test_a_folder_without_configuration(tmp_path: Path) -> None:
    check(tmp_path, MissingFileError, ["is not a model folder", "config.json"])


def test_a_folder_with_only_a_gguf_file_says_what_to_give(tmp_path: Path) -> None:
    put(tmp_path / "m.gguf", b"")
    check(tmp_path, MissingFileError, ["Give the path of the file itself", "m.gguf"])


def test_a_folder_without_weights(tmp_path: Path) -> None:
    (write_single(tmp_path) / "model.safetensors").unlink()
    check(tmp_path, MissingFileError, ["holds no weights", "model.safetensors"])


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_pickled_weights_are_refused_unread(tmp_path: Path, name: str) -> None:
    (write_single(tmp_path) / "model.safetensors").rename(tmp_path / name)
    check(tmp_path, FormatError, ["can run code", name, "convert with", "save_pretrained"])


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize(
    ("make", "error", "part"),
    [
        (os.mkfifo, FileError, "no regular file"),
        (Path.mkdir, FileError, "no regular file"),
        (lambda path: path.symlink_to("nowhere"), MissingFileError, "does not exist"),
    ],
    ids=["pipe", "folder", "link to nowhere"],
)
def test_only_regular_files_are_read(
    tmp_path: Path,
    make: Callable[[Path], None],
    error: type[EverystepError],
    part: str,
    name: str,
) -> None:
    path = write_single(tmp_path) / name
    path.unlink(missing_ok=True)
    make(path)
    with pytest.raises(EverystepError, match=part) as caught:
        open_folder(tmp_path).weights()
    assert type(caught.value) is error
