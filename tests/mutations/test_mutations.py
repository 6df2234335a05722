"""Broken files of every format: each is one of our errors or loads, within a budget, in a child.

Five thousand by default, two hundred thousand under --all; `docs/reliability.md` has the figures.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mutations.child import broken
from tests.mutations.formats import WEIGHTS, Format, formats
from tests.mutations.mutators import BYTES
from tests.reading import ROOT

SEED = 15
FEW, MANY, PARTS = 5, 200, 8  # inputs of a thousandth part; tests under --all
GROWN = 400 << 20  # bytes that a process may have needed at once for inputs of some kilobytes


def read_all(folder: Path, name: str, first: int, end: int) -> tuple[Counter[str], list[str]]:
    """How often inputs were read and refused, and everything that was neither."""
    outcomes: Counter[str] = Counter()
    findings: list[str] = []
    while first < end:
        line = [sys.executable, "-m", "tests.mutations.child", str(folder), name]
        numbers = map(str, (SEED, first, end))
        done = subprocess.run([*line, *numbers], cwd=ROOT, capture_output=True, text=True)
        if done.returncode == 0:
            found = json.loads(done.stdout.splitlines()[-1])
            outcomes += Counter(found["outcomes"])
            findings += [f"{name} {number}: {text}" for number, text in found["findings"]]
            if found["grown"] > GROWN:
                findings.append(f"{name}: {found['grown'] >> 20} MB at once")
            break
        at = int((folder / "at").read_bytes())
        cause = signal.Signals(-done.returncode).name if done.returncode < 0 else "an error"
        findings.append(f"{name} {at}: {cause}: {done.stderr[-1500:]}")
        assert len(findings) < 9, "\n".join(findings)
        first = at + 1
    return outcomes, findings


def test_every_format_has_a_share(tmp_path: Path) -> None:
    assert {*WEIGHTS} == {*formats(tmp_path)}
    assert FEW * sum(WEIGHTS.values()) > 5000 and MANY * sum(WEIGHTS.values()) > 200_000


def test_seed_and_number_decide_how_an_input_is_broken(tmp_path: Path) -> None:
    whole = Format(bytes(range(256)) * 4, BYTES, tmp_path / "a", lambda: None)
    first, again, other = (
        [broken(whole, seed, number) for number in range(50)] for seed in (SEED, SEED, SEED + 1)
    )
    assert first == again != other and len({*first}) > 40


@pytest.mark.parametrize("name", WEIGHTS)
def test_broken_files_are_refused_or_read(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    check(name, 0, FEW * WEIGHTS[name], tmp_path, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", WEIGHTS)
def test_many_broken_files_are_refused_or_read(
    name: str, part: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    count = MANY * WEIGHTS[name] // PARTS
    first = FEW * WEIGHTS[name] + part * count
    check(name, first, first + count, tmp_path, record_property)


def check(
    name: str, first: int, end: int, folder: Path, record: Callable[[str, object], None]
) -> None:
    outcomes, findings = read_all(folder, name, first, end)
    record("mutations", {f"{name} {kind}": count for kind, count in outcomes.items()})
    assert findings == []
    assert outcomes["refused"] > 0
