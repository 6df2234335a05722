"""GGUF files that lie, each in one way: the class of the error, and what its text says."""

from __future__ import annotations

import gc
import os
import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from everystep.errors import (
    EverystepError,
    FileError,
    FormatError,
    MissingFileError,
    UnsupportedError,
)
from everystep.files import gguf_header
from everystep.files.gguf import read_gguf
from everystep.files.gguf_header import read_header
from tests.files.gguf_writer import (
    ARRAY,
    STRING,
    U32,
    array,
    assemble,
    entry,
    gguf_bytes,
    info,
    string,
)

ONE = struct.pack("<I", 1)
F32, Q8_0 = 0, 8
WHOLE = gguf_bytes(
    {"general.name": "whole", "list": [1, 2], "words": ["a", "bc"]},
    {"a": ("F32", torch.ones(3)), "b": ("Q8_0", torch.ones(2, 32))},
)


def keys(*entries: bytes) -> bytes:
    return assemble(list(entries), [])


def tensors(*infos: bytes, data: int = 0) -> bytes:
    return assemble([], list(infos), bytes(data))


def alignment(code: int, payload: bytes) -> bytes:
    return keys(entry("general.alignment", code, payload))


def nested(depth: int) -> bytes:
    """An array in an array in an array..."""
    return array(ARRAY, 1, nested(depth - 1)) if depth > 1 else array(U32, 1, ONE)


BROKEN: dict[str, tuple[bytes, list[str]]] = {
    # The file is something else.
    "empty": (b"", ["the file is empty"]),
    "too short": (b"GGUF\x03\0\0", ["too small", "at least 24 bytes", "7 bytes"]),
    "other magic": (b"GGML" + bytes(60), ["not a GGUF file", "b'GGUF'", "b'GGML'"]),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", ["git lfs pull"]),
    "web page": (b"<!DOCTYPE html><html>404 and nothing else</html>", ["a web page"]),
    "zip archive": (b"PK\x03\x04" + bytes(60), ["a pickle or zip archive", "never read"]),
    # Counts.
    "keys without end": (assemble([], [], key_count=2**64 - 1), ["too many metadata keys"]),
    "more keys than bytes": (
        assemble([], [], bytes(130), key_count=11),
        ["too many metadata keys", "at most 10", "got 11"],
    ),
    "tensors without end": (assemble([], [], tensor_count=10**8), ["too many tensors"]),
    # Keys.
    "key longer than the file": (
        assemble([string("k", 2**63) + bytes(8)], [], bytes(20)),
        ["key 0 of the metadata runs past the end", str(2**63)],
    ),
    "key above the limit": (keys(entry("k" * 65_536, U32, ONE)), ["key 0", "too long", "65535"]),
    "empty key": (keys(entry("", U32, ONE)), ["key 0 of the metadata is empty"]),
    "key twice": (
        keys(entry("k.a", U32, ONE), entry("k.a", U32, ONE)),
        ["the metadata key 'k.a' comes twice"],
    ),
    "key not text": (keys(entry(b"\xff\xfe", U32, ONE)), ["key 0", "not UTF-8"]),
    "cut in a key's type": (keys(entry("k.a", U32, b""))[: 24 + 11 + 2], ["the type of 'k.a'"]),
    # Values.
    "unknown value type": (keys(entry("k.a", 13, ONE)), ["value of 'k.a'", "unknown type", "13"]),
    "number cut off": (assemble([entry("k.a", 12, b"\0")], [], alignment=1), ["value of 'k.a'"]),
    "text longer than the file": (
        keys(entry("k.a", STRING, string("x", 2**62))),
        ["the value of 'k.a' runs past the end", str(2**62)],
    ),
    "text not text": (keys(entry("k.a", STRING, string(b"\xc3("))), ["value of 'k.a'", "UTF-8"]),
    "truth value of two": (keys(entry("k.a", 7, b"\x02")), ["'k.a' is no truth value"]),
    # Arrays.
    "numbers without end": (
        keys(entry("k.a", ARRAY, array(0, 2**40))),
        ["array 'k.a' runs past the end", str(2**40)],
    ),
    "texts without end": (
        keys(entry("k.a", ARRAY, array(STRING, 2**61, string("x")))),
        ["array 'k.a' runs past the end", str(2**61)],
    ),
    "a text of several longer than the file": (
        keys(entry("k.a", ARRAY, array(STRING, 3, string("x") + string("y", 2**62) + bytes(9)))),
        ["the value of 'k.a' runs past the end", str(2**62)],
    ),
    "a text of several not text": (
        keys(entry("k.a", ARRAY, array(STRING, 3, string("x") + string(b"\xc3(") + string("z")))),
        ["value of 'k.a'", "UTF-8"],
    ),
    "size that wraps around": (
        keys(entry("k.a", ARRAY, array(12, 2**61 + 1, bytes(8)))),
        ["array 'k.a' runs past the end", str(2**61 + 1)],
    ),
    "unknown element type": (
        keys(entry("k.a", ARRAY, array(77, 1, ONE))),
        ["elements of 'k.a'", "unknown type", "77"],
    ),
    "arrays in arrays": (keys(entry("k.a", ARRAY, nested(5))), ["'k.a'", "nested too deeply"]),
    "too many elements": (
        keys(entry("k.a", ARRAY, array(0, 2**23 + 1, bytes(2**23 + 1)))),
        ["arrays are too long", str(2**23)],
    ),
    # Alignment.
    "alignment zero": (alignment(U32, bytes(4)), ["general.alignment is impossible", "got 0"]),
    "alignment not a power": (alignment(U32, struct.pack("<I", 24)), ["power of two", "got 24"]),
    "alignment a text": (alignment(STRING, string("32")), ["general.alignment", "got '32'"]),
    # Tensors.
    "tensor without name": (tensors(info("", (1,), F32, 0), data=32), ["has no name"]),
    "tensor's name too long": (tensors(info("t" * 65, (1,), F32, 0), data=32), ["too long", "64"]),
    "tensor twice": (
        tensors(info("t", (1,), F32, 0), info("t", (1,), F32, 32), data=64),
        ["tensor 't' comes twice"],
    ),
    "no dimension": (tensors(info("t", (), F32, 0), data=32), ["impossible rank", "got 0"]),
    "many dimensions": (
        tensors(info("t", (1,), F32, 0, rank=2**31), data=32),
        ["impossible rank", "1 to 4", str(2**31)],
    ),
    "empty dimension": (tensors(info("t", (4, 0), F32, 0)), ["'t' has an empty dimension"]),
    "dimensions that wrap around": (
        tensors(info("t", (4194305, 4194305, 211106198978564), F32, 0), data=32),
        ["'t' runs past the end of the file"],
    ),
    "half a block": (
        tensors(info("t", (2, 48), Q8_0, 0), data=128),
        ["rows of tensor 't' are not whole Q8_0 blocks", "multiple of 32", "48"],
    ),
    "offset not aligned": (
        tensors(info("t", (1,), F32, 4), data=64),
        ["'t' is not aligned", "a multiple of 32", "got 4"],
    ),
    "offset past the end": (
        tensors(info("t", (1,), F32, 2**63), data=64),
        ["'t' runs past the end of the file"],
    ),
    "data cut off": (WHOLE[:-1], ["'b' runs past the end", str(len(WHOLE)), str(len(WHOLE) - 1)]),
    "tensors one over another": (
        tensors(info("low", (16,), F32, 0), info("high", (8,), F32, 32), data=64),
        ["'low' and 'high' overlap", "got"],
    ),
    "two tensors at one place": (
        tensors(info("one", (2,), F32, 0), info("two", (2,), F32, 0), data=32),
        ["'one' and 'two' overlap"],
    ),
    "one part of several": (
        keys(entry("split.count", 2, b"\x03\0")),
        ["parts of a split model", "-00001-of-00003.gguf", "Give the parts the names"],
    ),
}

UNSUPPORTED: dict[str, tuple[bytes, list[str]]] = {
    "first version": (assemble([], [], version=1), ["version", "wanted 2 or 3", "got 1"]),
    "later version": (assemble([], [], version=4), ["version", "wanted 2 or 3", "got 4"]),
    "big-endian": (b"GGUF\0\0\0\x03" + bytes(16), ["3 in big-endian order"]),
}


def check(folder: Path, content: bytes, error: type[EverystepError], parts: list[str]) -> None:
    path = folder / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(EverystepError) as caught:
        read_gguf(path)
    assert type(caught.value) is error
    for part in [str(path), *parts]:
        assert part in str(caught.value)
    assert os.listdir(folder) == ["broken.gguf"]
    assert path.read_bytes() == content


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused(tmp_path: Path, case: str) -> None:
    content, parts = BROKEN[case]
    check(tmp_path, content, FormatError, parts)


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, case: str) -> None:
    content, parts = UNSUPPORTED[case]
    check(tmp_path, content, UnsupportedError, parts)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda path: None, MissingFileError, "does not exist"),
        (Path.mkdir, FileError, "no regular file"),
        (os.mkfifo, FileError, "no regular file"),
    ],
    ids=["missing", "folder", "pipe"],
)
def test_only_regular_files_are_opened(
    tmp_path: Path, make: Callable[[Path], None], error: type[FileError], text: str
) -> None:
    path = tmp_path / "m.gguf"
    make(path)
    with pytest.raises(error, match=text):
        read_gguf(path)


def test_every_beginning_of_a_whole_file_is_refused() -> None:
    read_header(memoryview(WHOLE), "whole")
    for length in range(len(WHOLE)):
        with pytest.raises(FormatError):
            read_header(memoryview(WHOLE[:length]), "cut")


def test_a_changed_byte_is_refused_or_harmless() -> None:
    """No mutant may raise anything else, and what passes lies inside the file."""
    generator = random.Random(0)
    header_length = len(WHOLE) - 32 - 68
    for _ in range(4000):
        mutant = bytearray(WHOLE)
        for _ in range(generator.randint(1, 4)):
            mutant[generator.randrange(header_length)] = generator.choice([0, 1, 127, 128, 255])
        try:
            _, tensors = read_header(memoryview(mutant), "mutant")
        except (FormatError, UnsupportedError):
            continue
        assert all(tensor.end <= len(mutant) for tensor in tensors.values())


@pytest.mark.parametrize(
    "case", ["numbers without end", "texts without end", "tensors without end"]
)
def test_nothing_is_allocated_for_a_count_that_lies(case: str) -> None:
    content = memoryview(BROKEN[case][0])
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            read_header(content, "lie")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_text_above_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "MAX_STRING_BYTES", 4)
    several = array(STRING, 3, string("1") + string("12345") + string("2"))
    for one in (entry("k.a", STRING, string("12345")), entry("k.a", ARRAY, several)):
        with pytest.raises(
            FormatError, match=r"value of 'k\.a' is too long; wanted at most 4 bytes"
        ):
            read_header(memoryview(keys(one)), "long")


def test_strings_without_number_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "MAX_STRINGS", 4)
    lists = (entry(f"k.{n}", ARRAY, array(STRING, 3, string("a") * 3)) for n in range(2))
    with pytest.raises(FormatError, match="hold too many strings; wanted 4 in all"):
        read_header(memoryview(keys(*lists)), "many")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts files through /proc")
def test_a_refused_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(BROKEN["data cut off"][0])
    gc.collect()  # files that earlier tests left behind
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FormatError) as caught:
        read_gguf(path)
    # The error's traceback holds the frames that held the file.
    del caught
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
