"""Compiles the native kernels while the package is built; everything else is in pyproject.toml.

Without a compiler the package is built all the same, and runs on torch operators.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path(__file__).parent / "src" / "everystep" / "executors" / "native"


def compilation() -> ModuleType:
    """The module that compiles, read from its file: the package cannot be imported yet."""
    spec = importlib.util.spec_from_file_location("everystep_native_build", NATIVE / "build.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(NATIVE / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildWithKernels(build_py):
    """Compiles beside the sources, in place for an editable installation, and packs the result."""

    def run(self) -> None:
        native = compilation()
        names = native.fitting_sets() if self.editable_mode else native.instruction_sets()
        for problem in native.build(names):
            print(f"everystep: the native executor is left out: {problem}", file=sys.stderr)
        super().run()


class WheelWithKernels(bdist_wheel):
    """A wheel for this platform and every Python, where it holds compiled libraries."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = not any(NATIVE.glob("*.so")) and compilation().compiler() is None

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelWithKernels})
