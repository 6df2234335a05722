"""The public face: what is exported is listed, sorted and documented, and is cheap to import."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import inspect
import subprocess
import sys
import types

import pytest

import everystep


def test_exported_names_are_the_listed_ones() -> None:
    assert {*everystep._HOME, "__version__"} == set(everystep.__all__)
    assert dir(everystep) == everystep.__all__


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = ["torch", "numpy", "rich"]
    code = f"import sys, everystep; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_listed_names_are_sorted() -> None:
    assert list(everystep.__all__) == sorted(everystep.__all__)


@pytest.mark.parametrize("name", everystep.__all__)
def test_listed_names_exist(name: str) -> None:
    assert not isinstance(getattr(everystep, name), types.ModuleType)


@pytest.mark.parametrize("name", everystep.__all__)
def test_public_classes_and_functions_are_documented(name: str) -> None:
    value = getattr(everystep, name)
    if inspect.isclass(value) or inspect.isroutine(value):
        assert inspect.getdoc(value)


def test_the_installed_version_is_the_stated_one() -> None:
    assert importlib.metadata.version("everystep") == everystep.__version__


def test_the_package_is_marked_as_typed() -> None:
    files = importlib.resources.files("everystep")
    assert files.joinpath("py.typed").is_file()


def test_importing_brings_no_oracle_and_no_program() -> None:
    unwanted = ["transformers", "peft", "typer", "rich", "hypothesis", "everystep.testing"]
    code = f"import everystep, sys; print([m for m in {unwanted} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout.strip(), result.returncode) == ("[]", 0), result.stderr
