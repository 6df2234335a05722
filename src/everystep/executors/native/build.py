"""Compiles the kernels, once for each instruction set, into libraries beside this file.

    python -m everystep.executors.native          the best that this processor has, and plain
    python -m everystep.executors.native avx2     those that are named
    python -m everystep.executors.native all      those of every processor of its kind

An installation gets the first, which takes a third of the time; a wheel that is published gets all
of them. Where there is no compiler the libraries are missing and everything runs on torch
operators. It imports nothing but the standard library, because the installation does not have the
rest yet.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
COMMAND = "python -m everystep.executors.native"
"""The command that compiles the kernels where the package is installed."""
SOURCES = (
    "interface.cpp",
    "step.cpp",
    "step_adapters.cpp",
    "step_ahead.cpp",
    "step_attention.cpp",
    "step_encoder.cpp",
    "step_head.cpp",
    "step_mlp.cpp",
    "step_recurrence.cpp",
    "step_weights.cpp",
    "tiles.cpp",
    "pages.cpp",
    "crew.cpp",
    "guess.cpp",
)

# Explicit fused operations only: a compiler that fuses where it likes would round one token and
# many tokens differently.
_COMMON = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-g0"),
    "-fvisibility-inlines-hidden",
)
_X86 = ("-mavx2", "-mfma", "-mf16c")
_WIDE = (*_X86, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")

X86_SETS: Mapping[str, tuple[str, ...]] = {
    "avx512vnni": (*_WIDE, "-mavx512vnni"),
    "avx512": _WIDE,
    "avx2": _X86,
    # With -O3, GCC 12 compiles this set seven times as long on x86-64 and takes minutes on aarch64.
    "plain": ("-O2", "-Wno-psabi"),
}
"""Instruction sets by name, best first, and the compiler's flags for each."""
_NEEDS = {
    "avx512vnni": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"),
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
    "avx2": ("avx2", "fma", "f16c"),
    "plain": (),
}
"""The names in Linux for what a set needs."""


def instruction_sets() -> Mapping[str, tuple[str, ...]]:
    """Return the instruction sets that this machine's kind of processor may have."""
    return X86_SETS if platform.machine() in ("x86_64", "AMD64") else {"plain": X86_SETS["plain"]}


def processor_flags() -> frozenset[str]:
    """Return the abilities of the processor, as Linux lists them; none elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def fitting_sets() -> list[str]:
    """Return the instruction sets that this processor has, best first."""
    flags = processor_flags()
    return [name for name in instruction_sets() if flags.issuperset(_NEEDS[name])]


def own_sets() -> list[str]:
    """Return the instruction set that this processor runs, and the one that any other would."""
    return list(dict.fromkeys((fitting_sets()[0], "plain")))


def library_path(name: str) -> Path:
    """Return the file of the library for an instruction set."""
    return HERE / f"libeverystep-{name}.so"


def compiler() -> str | None:
    """Return the C++ compiler: `CXX` if it is set, else the first that is found."""
    named = os.environ.get("CXX")
    return named or next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)


def flags(name: str) -> list[str]:
    """Return what the compiler is asked for, for one instruction set."""
    return [*_COMMON, *instruction_sets()[name]]


def command(cxx: str, name: str, target: Path, extra: Sequence[str] = ()) -> list[str]:
    """Return the command that compiles the library of one instruction set."""
    sources = [str(HERE / "cpp" / source) for source in SOURCES]
    return [cxx, *flags(name), *extra, *sources, "-o", str(target)]


def build(names: Iterable[str]) -> list[str]:
    """Compile the libraries of these sets that are missing or outdated; return what went wrong."""
    cxx = compiler()
    if cxx is None:
        return ["no C++ compiler was found (set CXX, or install g++ or clang++)"]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        found = pool.map(lambda name: _build(cxx, name), names)
        return [problem for problem in found if problem is not None]


def _build(cxx: str, name: str) -> str | None:
    target = library_path(name)
    newest = max(file.stat().st_mtime for file in (HERE / "cpp").iterdir())
    if target.exists() and target.stat().st_mtime >= newest:
        return None
    # Renamed into place, so that an interrupted build leaves no half of a library.
    with tempfile.TemporaryDirectory(dir=HERE) as folder:
        made = Path(folder) / target.name
        done = subprocess.run(command(cxx, name, made), capture_output=True, text=True)
        if done.returncode:
            return f"{name}: {done.stderr.strip()[-2000:]}"
        os.replace(made, target)
    return None


def main() -> int:
    """Compile what the command line asks for, say what became of it, and return an exit code."""
    known, named = instruction_sets(), sys.argv[1:]
    wanted = list(known) if named == ["all"] else named or own_sets()
    problems = [f"{name} is no instruction set here" for name in wanted if name not in known]
    if problems:
        problems.append(f"Name some of {', '.join(known)}, or all")
    problems = problems or build(wanted)
    print("\n".join(problems) or "the native libraries are built", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
