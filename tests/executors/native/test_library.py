"""Which library is loaded, what is said where there is none, and every instruction set at work."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from everystep.errors import UnsupportedError
from everystep.executors.native import build, library
from tests.reading import ROOT

CHECK = """
from tests.executors.native.test_native_executor import (
    compare, model_of, test_every_format_is_computed,
    test_no_bit_depends_on_how_many_tokens_are_fed_at_once as chunks,
)
from tests.executors.native.test_cache_types import (
    test_no_bit_depends_on_chunks, test_rows_are_the_judges, test_what_is_exported_is_what_is_held,
)
from tests.executors.native.test_ahead import test_whatever_comes_results_and_rows_are_the_same
from tests.executors.native import test_encoder_decoders as across, test_recurrent as recurrent
from tests.executors.native import test_file_blocks as files, test_sixteen_bits as halves
from tests.executors.native import test_adapters as adapters
from everystep.executors.native import status
assert status().instructions == {name!r}, status()
for spec in ("plain", "window", "capped scores", "layer norm", "gelu", "gelu_new", "experts"):
    compare(model_of(spec), seed=5, most=20, steps=5)
test_every_format_is_computed("llama", "int8")
test_every_format_is_computed("qwen2", "int4")
chunks("int4")
for cache_dtype in ("float16", "int8"):
    for spec in ("plain", "window"):
        test_rows_are_the_judges(spec, cache_dtype)
    test_what_is_exported_is_what_is_held(cache_dtype)
    test_no_bit_depends_on_chunks(cache_dtype)
for kind in ("plain", "odd sizes"):
    recurrent.test_rows_of_any_history(kind, 7)
recurrent.test_a_feed_longer_than_the_buffers_goes_on_where_it_was([255, 2, 443])
recurrent.test_what_a_row_holds_is_taken_over()
for format in files.BITS:
    files.test_they_are_multiplied_as_they_are_defined(format)
    files.test_no_bit_depends_on_how_many_rows_are_read_together(format, [6, 2, 13, 12])
    files.test_the_largest_codes_do_not_overflow(format, 13)
for dtype in halves.TYPES:
    halves.test_no_bit_depends_on_how_many_rows_are_read_together(dtype, 12)
    halves.test_the_kernels_read_the_numbers_themselves("llama", dtype)
for kind in ("plain", "biases", "plain mlp", "parallel"):
    adapters.test_they_are_what_torch_operators_make_of_them(kind)
for rounding in adapters.FORMATS:
    for threads in (1, 3):
        adapters.test_no_bit_depends_on_neighbours_chunks_or_threads(rounding, threads)
    assert adapters.holds(rounding, "beams")
    adapters.test_what_is_begun_ahead_is_taken_only_for_the_same_adapters(rounding)
adapters.test_a_feed_longer_than_the_buffers_keeps_its_mix()
for kind in ("t5, near", "bart"):
    across.test_rows_of_any_history(kind)
    across.test_an_encoder_gives_its_states(kind, 17)
for seed in (0, 1, 2, 3, 5):
    test_whatever_comes_results_and_rows_are_the_same(seed, "float32")
"""

CHECK_THREADS = """
from tests.executors.native.test_ahead import test_whatever_comes_results_and_rows_are_the_same
from tests.executors.native.test_native_executor import (
    test_no_bit_depends_on_who_attends_to_which_span as spans
)
from tests.executors.native import test_adapters as adapters
from everystep.executors.native import status
assert status().instructions == {name!r}, status()
adapters.test_what_is_begun_ahead_is_taken_only_for_the_same_adapters("int4")
adapters.test_no_bit_depends_on_neighbours_chunks_or_threads("int4", 3)
for seed in range(8):
    test_whatever_comes_results_and_rows_are_the_same(seed, "float32")
spans("plain", 3)
"""


# The best set that fits is what all other tests run with.
BEST = library.status().instructions
FITTING = [
    pytest.param(name, marks=[pytest.mark.slow] if name == BEST else [])
    for name in build.fitting_sets()
]


@pytest.fixture
def fresh() -> None:
    """Nothing remembered of earlier questions."""
    library.status.cache_clear()
    library.load.cache_clear()


@pytest.mark.native
@pytest.mark.parametrize("name", FITTING)
def test_every_instruction_set_computes_the_same(name: str) -> None:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "EVERYSTEP_INSTRUCTIONS": name, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", CHECK.format(name=name)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("fresh")
def test_without_a_library_the_error_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "library_path", lambda name: Path("nowhere") / name)
    found = library.status()
    assert found.instructions is None
    assert found.reason is not None and "python -m everystep.executors.native" in found.reason
    with pytest.raises(UnsupportedError, match="no native executor"):
        library.load()
    library.status.cache_clear()


@pytest.mark.native
@pytest.mark.usefixtures("fresh")
def test_a_set_that_the_processor_lacks_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "processor_flags", frozenset)
    assert library.status().instructions == "plain"
    monkeypatch.setenv("EVERYSTEP_INSTRUCTIONS", "avx2")
    library.status.cache_clear()
    assert "EVERYSTEP_INSTRUCTIONS is avx2" in str(library.status().reason)
    library.status.cache_clear()


@pytest.mark.parametrize(
    ("machine", "names"),
    [("x86_64", list(build.X86_SETS)), ("AMD64", list(build.X86_SETS))]
    + [(other, ["plain"]) for other in ("aarch64", "arm64", "riscv64", "ppc64le")],
)
def test_a_machine_gets_the_sets_of_its_processors(
    machine: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    assert list(build.instruction_sets()) == names
    flags = build.command("c++", "plain", Path("made.so"))
    assert not [flag for flag in flags if flag.startswith("-m")]


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("", ["plain"]),
        ("avx2 fma f16c sse", ["avx2", "plain"]),
        ("avx2 fma", ["plain"]),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq", ["avx512", "avx2", "plain"]),
    ],
)
def test_an_installation_in_place_compiles_what_its_processor_has(
    flags: str, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "processor_flags", lambda: frozenset(flags.split()))
    assert build.fitting_sets() == names
    assert build.own_sets() == list(dict.fromkeys((names[0], "plain")))


@pytest.mark.parametrize(
    ("said", "names"),
    [
        ([], ["avx2", "plain"]),
        (["avx512"], ["avx512"]),
        (["all"], ["avx512vnni", "avx512", "avx2", "plain"]),
        (["avx9"], None),
    ],
)
def test_the_command_compiles_what_it_is_told(
    said: list[str],
    names: list[str] | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    compiled: list[list[str]] = []
    monkeypatch.setattr(build.sys, "argv", ["build", *said])
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build, "processor_flags", lambda: frozenset(("avx2", "fma", "f16c")))
    monkeypatch.setattr(build, "build", lambda wanted: compiled.append(list(wanted)) or [])
    assert build.main() == (names is None)
    assert compiled == ([] if names is None else [names])
    if names is None:
        assert "avx9 is no instruction set here\nName some of avx512vnni" in capsys.readouterr().err


def test_without_a_compiler_the_build_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert "no C++ compiler" in build.build(["plain"])[0]


def test_a_compiler_that_fails_leaves_no_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setattr(build, "library_path", lambda name: tmp_path / f"{name}.so")
    assert len(build.build(build.X86_SETS)) == len(build.X86_SETS)
    assert list(tmp_path.iterdir()) == []


NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}
"""The symbols' versions that manylinux_2_28 has, which packages are for."""


@pytest.mark.native
@pytest.mark.parametrize("name", build.own_sets())
def test_a_library_needs_nothing_newer_than_what_packages_are_for(name: str) -> None:
    read = build.library_path(name).read_bytes()
    found = re.findall(rb"\b(GLIBC|GLIBCXX|CXXABI)_([0-9.]+)\0", read)
    assert found
    newer = [
        (one.decode(), of.decode())
        for one, of in found
        if tuple(map(int, of.split(b"."))) > NEWEST[one.decode()]
    ]
    assert not newer


@pytest.mark.native
def test_a_library_of_another_version_is_refused(tmp_path: Path) -> None:
    source, made = tmp_path / "other.cpp", tmp_path / "other.so"
    source.write_text(
        'extern "C" { int es_interface() { return 0; } void es_sizes(long*) {} }', encoding="utf-8"
    )
    cxx = build.compiler()
    assert cxx is not None, "these tests need the compiler that the package was built with"
    subprocess.run([cxx, "-shared", "-fPIC", str(source), "-o", str(made)], check=True)
    with pytest.raises(UnsupportedError, match="another version"):
        library.open_library(made)


@pytest.mark.native
@pytest.mark.slow
def test_the_kernels_are_clean_under_sanitisers(tmp_path: Path) -> None:
    done = run_checked(tmp_path, "address,undefined", "libasan.so", CHECK)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.native
@pytest.mark.slow
def test_threads_never_race(tmp_path: Path) -> None:
    done = run_checked(tmp_path, "thread", "libtsan.so", CHECK_THREADS)
    assert done.returncode == 0, done.stderr[-4000:]


def run_checked(
    folder: Path, sanitisers: str, runtime: str, check: str
) -> subprocess.CompletedProcess[str]:
    """What a process prints that runs `check` on a library with sanitisers in it."""
    cxx = build.compiler()
    assert cxx is not None, "these tests need the compiler that the package was built with"
    name, made = build.fitting_sets()[0], folder / "checked.so"
    extra = ("-O1", "-g", f"-fsanitize={sanitisers}", "-fno-sanitize-recover=all")
    subprocess.run(build.command(cxx, name, made, extra), check=True)
    found = subprocess.run(
        [cxx, f"-print-file-name={runtime}"], capture_output=True, text=True, check=True
    )
    program = f"""
from pathlib import Path
from hypothesis import settings
from everystep.executors.native import library
settings.register_profile("checked", deadline=None)
settings.load_profile("checked")
library.library_path = lambda name: Path({str(made)!r})
{check.format(name=name)}
"""
    environment = {
        **os.environ,
        "EVERYSTEP_INSTRUCTIONS": name,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "LD_PRELOAD": found.stdout.strip(),
        # Python itself and the libraries beside it never free what lives as long as they do; and
        # frames on the fake stack of older compilers are not aligned for vectors of 64 bytes
        # (GCC's bug 110027), so that a store of one ends the process.
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
    }
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True
    )


def test_the_command_that_is_documented_says_nothing_but_that_it_has_built() -> None:
    program = [sys.executable, "-W", "error", *build.COMMAND.split()[1:]]
    done = subprocess.run(program, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "the native libraries are built\n")


def test_the_command_that_compiles_gives_no_warning() -> None:
    code = (
        "import runpy, everystep.executors.native.build as build; build.main = lambda: 3; "
        "runpy.run_module('everystep.executors.native', run_name='__main__', alter_sys=True)"
    )
    ended = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True)
    assert (ended.returncode, ended.stderr) == (3, b"")
