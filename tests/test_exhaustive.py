"""The record of exhaustive tests: what it counts as passed, as changed and as left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import exhaustive
from tests.exhaustive import Run
from tests.loaded import ALL, may_load_anything
from tests.reading import ROOT


def ran(commit: str, *, failed: int = 0, seconds: int = 60) -> Run:
    return Run(commit, "2026-01-01", 10, failed, seconds)


def test_the_record_is_about_folders_that_have_such_tests() -> None:
    folders = exhaustive.folders()
    assert {"laws", "server", "train"} <= {*folders}
    assert {*exhaustive.read()} <= {*folders, *exhaustive.files()}
    assert all((ROOT / "tests" / name).is_dir() for name in folders)
    assert all((ROOT / "tests" / name).is_file() for name in exhaustive.files())


def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    place = tmp_path / "record.json"
    assert exhaustive.read(place) == {}
    runs = {"server": ran("b"), "laws": ran("a", failed=2)}
    exhaustive.write(runs, place)
    assert exhaustive.read(place) == runs
    assert [line[3:9] for line in place.read_text().splitlines()[1:-1]] == ['laws":', "server"]


def test_what_failed_changed_or_never_ran_is_left() -> None:
    first, second, third, fourth, *others = exhaustive.folders()
    runs = {name: ran("a") for name in (fourth, *others)}
    runs |= {first: ran("a", seconds=900), second: ran("a", failed=1, seconds=30)}
    changed: dict[str, int | None] = dict.fromkeys(runs, 0) | {first: 3, fourth: None}
    assert exhaustive.left(runs, changed) == [third, second, fourth, first]
    lines = exhaustive.shown(runs, changed).splitlines()[1:]
    assert lines[0].split() == [first, "10", "0", "15", "a", "3"]
    assert lines[1].split()[:3] == [second, "9", "1"]
    assert lines[2].split() == [third, "never", "ran"]
    assert lines[3].split()[-1] == "unknown"


def test_a_folder_may_run_file_by_file() -> None:
    """A file that ran beside its folder stands beside it; all of them take its place."""
    own = [name for name in exhaustive.files() if exhaustive.folder_of(name) == "server"]
    assert len(own) > 3
    some = exhaustive.kept({}, own[0], ran("a"))
    assert [one for one in exhaustive.parts(some) if one.startswith("server")] == own
    assert {*own[1:]} <= {*exhaustive.left(some, {own[0]: 0})} and own[0] in some
    again = exhaustive.kept({"server": ran("a", failed=1)}, own[0], ran("b"))
    assert [*again] == ["server", own[0]]
    assert exhaustive.parts(again)[exhaustive.parts(again).index("server") + 1] == own[0]
    for name in own[1:]:
        again = exhaustive.kept(again, name, ran("b"))
    assert [*again] == own
    assert [*exhaustive.kept(again, "server", ran("c"))] == ["server"]


def test_a_test_that_did_not_pass_is_counted(tmp_path: Path) -> None:
    (tmp_path / "test_three.py").write_text(
        "import pytest\n\ndef test_a(): pass\ndef test_b(): raise ValueError\n"
        "def test_c(): pytest.skip('why')\n"
    )
    report = tmp_path / "report.xml"
    line = ["-p", "no:cacheprovider", f"--junitxml={report}", "--rootdir", str(tmp_path)]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_XDIST_WORKER", raising=False)
        command = [sys.executable, "-m", "pytest", *line, str(tmp_path)]
        assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 1
    assert exhaustive.counted(report) == (3, 2)


def test_files_that_differ_from_a_commit_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exhaustive, "ROOT", tmp_path)
    for name in ("src/a.py", "tests/b.py", "docs/c.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1\n")
    me = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    for line in (["init", "-q"], ["add", "."], [*me, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", "-C", str(tmp_path), *line], check=True)
    assert exhaustive.changed_since("HEAD") == []
    for name in ("src/a.py", "docs/c.md", "tests/exhaustive.json", "tests/new.py"):
        (tmp_path / name).write_text("2\n")
    assert exhaustive.changed_since("HEAD") == ["src/a.py", "tests/new.py"]
    assert exhaustive.changed_since("0" * 12) is None, "a history that was written anew"


def test_what_no_test_of_a_run_had_loaded_does_not_count() -> None:
    one = Run("a", "2026-01-01", 10, 0, 60, "engine tests/laws")
    near = ["src/everystep/engine/step.py", "src/everystep/errors.py", "tests/laws/rows.npz"]
    near += ["tests/conftest.py", "pyproject.toml", "tests/laws/gone.py"]
    far = ["src/everystep/server/ray/fan.py", "tests/server/pages.json", "tests/server/gone.py"]
    assert exhaustive.since("laws", one, near) == len(near)
    assert exhaustive.since("laws", one, near + far) == len(near)
    every = exhaustive.since("laws", ran("a"), near + far)
    assert every == len(near + far), "of others nothing is known"
    assert exhaustive.since("laws", one, None) is None


def test_files_of_tests_count_for_those_that_read_them() -> None:
    def counts(file: str, *parts: str) -> list[int | None]:
        return [exhaustive.since(part, ran("a"), [f"tests/{file}"]) for part in parts]

    simulation, pairs = "server/test_simulation.py", "server/test_pairs.py"
    assert counts(simulation, simulation, "server", pairs, "laws") == [1, 1, 0, 0]
    assert counts("server/simulation.py", simulation, pairs) == [1, 0]
    drive = counts("judges/drive.py", "laws/test_mixes.py", "laws", "engine", "typing")
    assert drive == [1, 1, 1, 0], "through others"
    assert counts("mutations/child.py", "mutations", "laws") == [1, 0], "a program that is started"
    assert counts("cli/program.py", "cli", "laws") == [1, 0], "which another file starts"
    assert counts("loaded.py", *exhaustive.folders()) == [1] * len(exhaustive.folders())
    assert not any(counts("exhaustive.py", *exhaustive.folders()))


def test_a_run_of_tests_says_what_it_had_loaded(tmp_path: Path) -> None:
    told, tests = tmp_path / "told", tmp_path / "test_one.py"
    tests.write_text("def test_a():\n    import everystep.stops\n")
    line = ["-p", "no:cacheprovider", "-n", "1", f"--loaded={told}", "-c", "pyproject.toml"]
    command = [sys.executable, "-m", "pytest", *line, "-p", "tests.conftest", str(tests)]
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_XDIST_WORKER", raising=False)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    names = told.read_text().split()
    assert "stops" in names and not {"server", ALL} & {*names}


def test_programs_that_may_load_anything_are_told_from_others() -> None:
    def starts(*line: str) -> bool:
        return may_load_anything("subprocess.Popen", (line[0], list(line), None, None))

    python, own = sys.executable, str(ROOT / "src/everystep/text/caged.py")
    assert starts(python, "-m", "everystep") and starts(python, "-c", "import everystep")
    assert starts("everystep", "serve") and starts(python, str(ROOT / "tests/conftest.py"))
    assert not starts(python, "-I", "-S", own), "a program of one package, which is loaded"
    assert not starts("git", "log") and not may_load_anything("open", ("python", "r", 0))
    assert may_load_anything("os.fork", ())


@pytest.mark.parametrize("way", ["spawn", "forkserver"])
def test_processes_of_multiprocessing_may_load_anything(way: str, tmp_path: Path) -> None:
    """No event tells of them."""
    told = tmp_path / "told"
    text = f"""
import multiprocessing
from pathlib import Path
from tests.loaded import LoadedPackages
if __name__ == "__main__":
    seen = LoadedPackages(Path({str(told)!r}))
    one = multiprocessing.get_context({way!r}).Process(target=print)
    one.start()
    one.join()
    seen.pytest_sessionfinish()
"""
    (tmp_path / "program.py").write_text(text)
    command = [sys.executable, str(tmp_path / "program.py")]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"})
    assert told.read_text().split() == [ALL]
