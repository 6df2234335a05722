"""The native library on another processor: compiled for aarch64 and run there or under emulation.

The library is linked with `emulated.cpp` into a program that reads from pipes what to write, call
and read. EmulatedLibrary stands where the loaded library would: it copies what a structure points
to, and copies results back. How much each pointer reaches is listed in EXTENTS.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ctypes import Array, Structure, c_int32, c_int64, c_void_p, sizeof
from dataclasses import dataclass, replace
from functools import partial
from operator import add
from pathlib import Path
from typing import Any

import pytest

from everystep.executors.native import build
from everystep.executors.native.library import (
    _MIRRORED,
    INTERFACE,
    ChangeWeights,
    FoldWeights,
    GivenEmbeds,
    LayerWeights,
    LinearMapC,
    Matrix,
    NormWeights,
    RecurrenceWeights,
    RopeRows,
    StackWeights,
    StepWork,
    TurnedPanels,
    TurnWeights,
)

MACHINE = "aarch64"
FETCHED = Path(sys.prefix) / MACHINE / "usr"  # by scripts/aarch64
HERE = Path(__file__).parent


def tool(name: str) -> str:
    """The path of a program, fetched or installed; skips the test where it is missing."""
    found = shutil.which(name) or shutil.which(FETCHED / "bin" / name)
    if found is None:
        pytest.skip(f"{name} is missing: run scripts/aarch64, or install it")
    return found


def build_program(target: Path) -> list[str]:
    """Compiles the plain library into a program for aarch64; returns how it is started."""
    native = platform.machine() == MACHINE
    cxx = build.compiler() if native else tool("aarch64-linux-gnu-g++")
    emulator = [] if native else [tool("qemu-aarch64-static")]
    assert cxx is not None
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the workers of a run share one program
        if not target.exists():
            compile_program(cxx, target)
    return [*emulator, str(target)]


def compile_program(cxx: str, target: Path) -> None:
    """Compiles with the library's own flags and links into a program instead."""
    flags = [flag for flag in build.flags("plain") if flag != "-shared"]
    sources = [*(build.HERE / "cpp" / name for name in build.SOURCES), HERE / "emulated.cpp"]
    objects = [target.with_name(f"{source.stem}.o") for source in sources]
    libraries = os.pathsep.join(map(str, FETCHED.glob("lib/*-linux-gnu")))
    # The compiler's assembler and linker come with libraries of their own.
    run = partial(subprocess.run, check=True, env={**os.environ, "LD_LIBRARY_PATH": libraries})
    folder = f"-I{build.HERE / 'cpp'}"
    parts = zip(sources, objects, strict=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = pool.map(
            lambda part: run([cxx, *flags, folder, "-c", part[0], "-o", part[1]]), parts
        )
        assert len(list(made)) == len(objects)
    run([cxx, "-static", "-pthread", *objects, "-o", target.with_suffix(".made")])
    target.with_suffix(".made").rename(target)


# --- what pointers reach --------------------------------------------------------------------------


@dataclass(frozen=True)
class Around:
    """What stands around a structure: the decoder, the step if it is one's, a norm's length."""

    model: StackWeights
    work: StepWork | None = None
    normed: int = 0

    def inside(self, structure: Structure, name: str) -> Around:
        """The same for a member of a structure."""
        if isinstance(structure, StepWork):
            return replace(self, work=structure)
        model, normed = self.model, self.model.width
        if isinstance(structure, LayerWeights) and name in ("q", "k"):
            heads = model.heads if name == "q" else model.kv_heads
            normed = model.head_dim * (heads if model.whole_qk else 1)
        return replace(self, normed=normed)


def _numbers(kind: Any, address: int, count: int) -> list[int]:
    return list((kind * count).from_address(address))


def _of_feeds(work: Any, name: str) -> list[int]:
    return _numbers(c_int64, getattr(work, name), work.feeds)


def _rope_values(rope: RopeRows, around: Around) -> int:
    work: Any = around.work
    if rope.row:
        rows = 1 + max(_numbers(c_int32, rope.row, work.tokens))
    else:
        rows = max(map(add, _of_feeds(work, "starts"), _of_feeds(work, "counts")))
    return rows * rope.dim


_NORM = {name: lambda _, around: 4 * around.normed for name in ("weight", "bias")}


def _told(work: Any, best: bool) -> int:
    """How many positions are told the best of their logits, or all of them."""
    pairs = zip(_of_feeds(work, "wanted"), _of_feeds(work, "best"), strict=True)
    return sum(wanted for wanted, most in pairs if (most > 0) == best)


_FEEDS = {
    name: lambda work, _: 8 * work.feeds
    for name in (
        *("rows", "starts", "counts", "wanted", "best"),
        *("across_rows", "across_counts", "states_kept"),
    )
}
_COPIES = {name: lambda work, _: 4 * work.copies for name in ("copy_from", "copy_to")}
RESULTS: Mapping[str, Callable[[Any, Around], int]] = {
    "logits": lambda work, around: 4 * _told(work, False) * around.model.vocabulary,
    "totals": lambda work, _: 4 * _told(work, False),
    "best_values": lambda work, _: 4 * _told(work, True) * work.most,
    "best_tokens": lambda work, _: 8 * _told(work, True) * work.most,
    "best_totals": lambda work, _: 4 * _told(work, True),
    "best_hidden": lambda work, around: 4 * _told(work, True) * around.model.width,
    "hidden": lambda work, around: 4 * work.tokens * around.model.width,
}
EXTENTS: Mapping[type[Structure], Mapping[str, Callable[[Any, Around], int]]] = {
    Matrix: {"row_scales": lambda matrix, _: 4 * -(-matrix.rows // 16) * 16},
    LinearMapC: {"bias": lambda linear, _: 4 * sum(part.rows for part in linear.parts)},
    RecurrenceWeights: {
        "conv": lambda _, around: 4 * around.model.kernel * around.model.inner,
        "decay": lambda _, around: 4 * around.model.states * around.model.inner,
        **{name: lambda _, around: 4 * around.model.inner for name in ("conv_bias", "skip")},
    },
    StackWeights: {
        "positions": lambda model, _: 4 * model.places * model.width,
        "distances": lambda model, _: 4 * model.heads * (2 * model.reach + 1),
    },
    NormWeights: _NORM,
    RopeRows: {
        **{name: lambda rope, around: 4 * _rope_values(rope, around) for name in ("cos", "sin")},
        "row": lambda _, around: 4 * around.work.tokens,
    },
    ChangeWeights: {name: lambda change, _: 4 * 16 * change.panels for name in ("gain", "shift")},
    TurnWeights: {
        "factors": lambda turn, _: 4 * turn.size,
        "blocks_of_turns": lambda turn, _: 4 * turn.blocks * turn.size**2,
    },
    TurnedPanels: {"lanes": lambda turned, _: 4 * 16 * turned.panels},
    FoldWeights: {
        "left": lambda fold, _: 4 * fold.rows * fold.columns,
        "right": lambda fold, _: 4 * fold.inner_rows * fold.inner_columns,
        "places": lambda fold, _: 8 * fold.rows * fold.inner_rows,
    },
    GivenEmbeds: {"values": lambda given, around: 4 * given.count * around.model.width},
    StepWork: {
        "ids": lambda work, _: 8 * work.tokens,
        "positions": lambda work, _: 4 * work.tokens,
        "pages": lambda work, _: 4 * work.stride * (1 + max(_of_feeds(work, "rows"))),
        "across_pages": lambda work, _: (
            4 * work.across_stride * (1 + max(_of_feeds(work, "across_rows")))
        ),
        "states_after": lambda work, _: 4 * sum(_of_feeds(work, "states_kept")),
        **{name: lambda work, _: 4 * work.feeds for name in ("states_before", "states_next")},
        "use_begins": lambda work, _: 8 * (work.feeds + 1),
        "use_adapters": lambda work, _: 8 * _numbers(c_int64, work.use_begins, work.feeds + 1)[-1],
        "use_weights": lambda work, _: 4 * _numbers(c_int64, work.use_begins, work.feeds + 1)[-1],
        **_FEEDS,
        **_COPIES,
        **RESULTS,
    },
}
"""The bytes after every pointer but `Matrix.data`, which the program itself knows."""
COUNTS = {
    "layer": "layers",
    "each": "count",
    "rope": "ropes",
    "embed": "embeds",
    "added": "deep",
    "adapter": "adapters",
}
"""Which member counts the structures after a pointer."""


# --- the library over there -----------------------------------------------------------------------


class EmulatedLibrary:
    """The functions of a loaded library that an executor calls, with its own addresses."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._taken: list[int] = []
        self._models: dict[int, StackWeights] = {}
        assert self._call("es_interface") == INTERFACE
        sizes = (c_int64 * len(_MIRRORED))()
        self._call("es_sizes", there := self._take(sizeof(sizes)))
        assert self._read(there, sizeof(sizes)) == struct.pack(
            f"={len(_MIRRORED)}q", *map(sizeof, _MIRRORED)
        )

    def close(self) -> None:
        """Ends the program, which has to be alive."""
        assert self._process.poll() is None
        with self._process as ending:
            assert ending.stdin is not None
            ending.stdin.close()
            assert ending.wait(60) == 0

    def es_open(self, model: StackWeights, kv_type: int, runner: Any) -> int:
        there, place = self._copied(model, Around(model)), self._take(8)
        failed = self._call("es_open", self._write(bytes(there)), kv_type, place)
        opened = int(struct.unpack("=q", self._read(place, 8))[0])
        runner._obj.value = opened
        self._models[opened] = model
        self._taken.clear()  # as long as the program runs
        return failed

    def es_reserve(self, runner: int, pages: int, across: int) -> int:
        return self._call("es_reserve", runner, pages, across)

    def es_keep_states(self, runner: int, states: int, count: int, pages: int, threads: int) -> int:
        with self._until_done():
            size = 4 * count * self._models[runner].width
            there = self._write(ctypes.string_at(states, size))
            numbers = self._page_numbers(pages, count)
            return self._call("es_keep_states", runner, there, count, numbers, threads)

    def es_rest(self, runner: int) -> None:
        """Nothing is ever begun before it is asked for."""

    def es_run(self, runner: int, work: StepWork, threads: int) -> int:
        with self._until_done():
            around = Around(self._models[runner])
            there = self._copied(work, around)
            there.ahead = 0  # memory is lent for one call
            failed = self._call("es_run", runner, self._write(bytes(there)), threads)
            for name, extent in RESULTS.items():
                if address := getattr(work, name):
                    size = extent(work, around)
                    ctypes.memmove(address, self._read(getattr(there, name), size), size)
            return failed

    def es_export(self, runner: int, pages: int, length: int, across: int, out: int) -> None:
        size = self._past_bytes(runner, length)
        with self._until_done():
            there = self._take(size)
            numbers = self._page_numbers(pages, length)
            self._call("es_export", runner, numbers, length, across, there)
            ctypes.memmove(out, self._read(there, size), size)

    def es_import(self, runner: int, pages: int, length: int, values: int) -> None:
        with self._until_done():
            there = self._write(ctypes.string_at(values, self._past_bytes(runner, length)))
            self._call("es_import", runner, self._page_numbers(pages, length), length, there)

    def es_export_states(self, runner: int, page: int, out: int) -> None:
        size = self._state_bytes(runner)
        with self._until_done():
            there = self._take(size)
            self._call("es_export_states", runner, page, there)
            ctypes.memmove(out, self._read(there, size), size)

    def es_import_states(self, runner: int, page: int, values: int) -> None:
        with self._until_done():
            there = self._write(ctypes.string_at(values, self._state_bytes(runner)))
            self._call("es_import_states", runner, page, there)

    def es_close(self, runner: int) -> None:
        """Executors are collected whenever Python likes, perhaps after the program has ended."""
        if self._process.poll() is None:
            self._call("es_close", runner)

    def _page_numbers(self, pages: int, length: int) -> int:
        return self._write(ctypes.string_at(pages, 4 * -(-length // 16)))

    def _past_bytes(self, runner: int, length: int) -> int:
        model = self._models[runner]
        return 4 * model.layers * 2 * model.kv_heads * length * model.head_dim

    def _state_bytes(self, runner: int) -> int:
        model = self._models[runner]
        return 4 * model.layers * (model.kernel - 1 + model.states) * model.inner

    # --- structures -------------------------------------------------------------------------------

    def _copied(self, structure: Any, around: Around) -> Any:
        """The structure as it has to be there; what it points to is there already."""
        made = type(structure).from_buffer_copy(structure)
        for name, kind in structure._fields_:
            value, inside = getattr(structure, name), around.inside(structure, name)
            if kind is c_void_p and value:
                size = self._extent(structure, name, around)
                setattr(made, name, self._write(ctypes.string_at(value, size)))
            elif isinstance(value, Structure):
                setattr(made, name, self._copied(value, inside))
            elif isinstance(value, Array):
                setattr(made, name, type(value)(*(self._copied(one, inside) for one in value)))
            elif isinstance(value, ctypes._Pointer):
                count = getattr(structure, COUNTS[name])
                items = [self._copied(value[i], inside) for i in range(count)]
                setattr(made, name, ctypes.cast(self._write(b"".join(map(bytes, items))), kind))
        return made

    def _extent(self, structure: Any, name: str, around: Around) -> int:
        if isinstance(structure, Matrix) and name == "data":
            return self._call("matrix_bytes", structure.format, structure.rows, structure.columns)
        return EXTENTS[type(structure)][name](structure, around)

    # --- the pipes --------------------------------------------------------------------------------

    @contextmanager
    def _until_done(self) -> Iterator[None]:
        yield
        while self._taken:
            self._call("give_back", self._taken.pop())

    def _take(self, size: int) -> int:
        self._taken.append(self._call("take", max(size, 1)))
        return self._taken[-1]

    def _write(self, content: bytes) -> int:
        there = self._take(len(content))
        self._send(b"W", struct.pack("=2q", there, len(content)), content)
        return there

    def _read(self, address: int, size: int) -> bytes:
        self._send(b"R", struct.pack("=2q", address, size))
        return self._receive(size)

    def _call(self, name: str, *given: int) -> int:
        padded = (*given, *[0] * (5 - len(given)))
        self._send(b"C", struct.pack("=16s5q", name.encode(), *padded))
        return int(struct.unpack("=q", self._receive(8))[0])

    def _send(self, *parts: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"".join(parts))
        self._process.stdin.flush()

    def _receive(self, size: int) -> bytes:
        assert self._process.stdout is not None
        found = self._process.stdout.read(size)
        assert len(found) == size, f"the program ended with {self._process.wait()}"
        return found
