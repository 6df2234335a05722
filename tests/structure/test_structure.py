"""What scripts/structure counts, on planted mistakes, and on a call."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from tests.reading import ROOT
from tests.structure.page import BEGIN, END, Figure, of_files, problems, table, with_table
from tests.structure.signatures import repeated_classes, repeated_files, untyped_bags, uses_of_any
from tests.structure.steps import drivers_of_step

HANDS_ON = """
class Session:
    engine: Engine
    def step(self):
        \"\"\"One step.\"\"\"
        with inference_mode():
            return self.engine.step()
"""


@pytest.mark.parametrize(
    "text",
    [
        "engine.step()",
        "def f(self):\n    self._engine.step()",
        "def f(one: Engine):\n    one.step()",
        "one = Engine(executor, scheduler)\none.step()",
        "def f(self, one: Engine | None):\n    self._one = one\n    events = self._one.step()",
        "class Driver:\n    def step(self):\n        self.events += self.engine.step()",
    ],
)
def test_a_driver_is_found(text: str) -> None:
    assert len(drivers_of_step({"api/a.py": text})) == 1


def test_who_only_hands_a_step_on_is_no_driver_but_its_caller_is() -> None:
    files = {"api/session.py": HANDS_ON, "api/a.py": "session.step()", "api/b.py": "other.step()"}
    assert drivers_of_step(files) == ["api/a.py:1 session.step()"]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("text/a.py", "budget.step()"),
        ("models/a.py", "engine.step(sizes)"),
        ("engine/a.py", "engine.step()"),
        ("testing/a.py", "engine.step()"),
        ("api/a.py", "step = engine.step"),
    ],
)
def test_other_steps_drive_no_engine(path: str, text: str) -> None:
    assert drivers_of_step({path: text}) == []


@pytest.mark.parametrize(
    "text",
    [
        "def f(given: Mapping[str, Any]): ...",
        "def f(given: dict[str, Any] | None = None): ...",
        "def f(*, given: MutableMapping[str, Any]): ...",
        "class A:\n    async def f(self, **given: Any): ...",
        "def f(given: dict[str, Any], **more: Any): ...",  # one signature
    ],
)
def test_an_untyped_bag_is_found(text: str) -> None:
    assert len(untyped_bags({"api/a.py": text})) == 1


@pytest.mark.parametrize(
    "text",
    [
        "def f(**given: Unpack[Options]): ...",
        "def f(prompt: str | Mapping[str, Any]): ...",  # a message of a chat
        "def f(config: Mapping[str, Any]): ...",
        "def f(given: Mapping[str, int]) -> dict[str, Any]: ...",
        "def f(*given: Any): ...",
    ],
)
def test_what_is_no_bag_is_let_through(text: str) -> None:
    assert untyped_bags({"api/a.py": text}) == []


def test_any_is_counted_in_code_alone() -> None:
    text = '"""Any text."""\nfrom typing import Any  # Any\nx: dict[str, Any]\ny: Anything'
    assert uses_of_any({"api/a.py": text}) == ["api/a.py:2", "api/a.py:3"]


def test_names_that_stand_twice_are_found() -> None:
    files = {"a/__init__.py": "", "b/__init__.py": "", "a/one.py": "class A: ...\nclass B: ..."}
    files |= {"b/one.py": "class A: ...", "b/two.py": "class C: ..."}
    assert repeated_files(files) == ["one.py: a/one.py, b/one.py"]
    assert repeated_classes(files) == ["A: a/one.py, b/one.py"]


def test_rooms_that_do_not_exist_count_nothing() -> None:
    found = of_files({"nn/a.py": "def f(given: dict[str, Any]): ..."})
    assert [one.now for one in found] == [0] * len(found)


def test_only_rooms_count_their_files_and_lines() -> None:
    files = {"runs/a.py": "x\ny\n", "api/a.py": "x\n", "api/b.py": "", "nn/a.py": "x\n"}
    now = {one.name: one.now for one in of_files(files)}
    assert now["files of the biggest room"] == 2
    assert now["lines of the five rooms"] == 3


FIGURE = Figure("circles", ["a -> b", "b -> c"], bound=2, note=" of 9")
PAGE = f"Text.\n{BEGIN}\n{END}\nMore.\n"


def test_the_page_gets_the_table_between_its_marks() -> None:
    shown = with_table(PAGE, table([FIGURE]))
    assert "| circles | 2 of 9 | 2 |" in shown.splitlines()
    assert with_table(shown, "") == PAGE.replace(f"{BEGIN}\n", f"{BEGIN}\n\n")
    assert problems([FIGURE], shown) == []


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(SystemExit, match="lacks the marks"):
        with_table("Text.", "")


def test_a_figure_beyond_its_bound_is_a_problem() -> None:
    more = replace(FIGURE, bound=1)
    assert problems([more], with_table(PAGE, table([more]))) == ["circles: 2; at most 1"]


def test_a_figure_that_misses_its_bound_may_not_grow() -> None:
    still = replace(FIGURE, bound=1, most=2)
    assert problems([still], with_table(PAGE, table([still]))) == []
    more = replace(still, places=["a", "b", "c"])
    assert problems([more], with_table(PAGE, table([more]))) == ["circles: 3; at most 2"]


def test_a_page_with_other_figures_is_a_problem() -> None:
    assert len(problems([replace(FIGURE, places=["a"])], with_table(PAGE, table([FIGURE])))) == 1


def test_the_table_rounds_up_and_the_bound_does_not() -> None:
    lines = Figure("lines", [], bound=1_201, grain=100, count=1_201)
    assert lines.row() == "| lines | 1,300 | 1,201 |"
    assert not lines.exceeds
    assert replace(lines, count=1_202).exceeds
    assert not replace(lines, bound=None).exceeds


@pytest.mark.native
def test_a_call_is_counted_as_it_runs() -> None:
    program = """
from tests.structure import traced

found = {name: set(places) for name, places in traced.counted().items()}
named = {name: {place.split(" ")[-1] for place in places} for name, places in found.items()}
assert found["before"] < found["all"]
assert "prepare" in named["before"] and "Engine.submit" not in named["before"]
assert {"Engine.submit", "Engine.step"} <= named["all"]
for carried in ("length", "processor", "hook"):
    assert "prepare" in named[carried], carried
assert "Engine.step" not in named["length"]
assert {"Request", "Greedy"} <= {place.rpartition(".")[2] for place in found["types"]}
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
