"""Compiles the native kernels while the package is built; everything else is in pyproject.toml.

Without a compiler the package is built all the same, and runs on torch operators. An installation
gets the kernels of the machine that it is on. EVERYSTEP_KERNELS=all compiles those of every
processor of its kind, for a wheel that goes to others. With EVERYSTEP_KERNELS=none nothing is
compiled: the wheel is for every platform, and `python -m everystep.executors.native` compiles the
kernels where it is installed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

WANTED = os.environ.get("EVERYSTEP_KERNELS", "")
KERNELS = WANTED != "none"
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
        # Who works on it in place tests each set that the processor has.
        own = native.fitting_sets if self.editable_mode else native.own_sets
        names = native.instruction_sets() if WANTED == "all" else own()
        for problem in native.build(names) if KERNELS else []:
            print(f"everystep: the native executor is left out: {problem}", file=sys.stderr)
        super().run()

    def find_data_files(self, package: str, source: str) -> list[str]:
        """The files to pack; libraries that lie in the folder are left out if none are wanted."""
        files: list[str] = super().find_data_files(package, source)
        return [file for file in files if KERNELS or not file.endswith(".so")]


class WheelForEveryPython(bdist_wheel):
    """A wheel whose compiled libraries, if it has some, do not depend on the version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform = super().get_tag()
        return "py3", "none", platform


class WithKernels(Distribution):
    """What is installed belongs to this platform if it holds compiled libraries."""

    def has_ext_modules(self) -> bool:
        return KERNELS and (any(NATIVE.glob("*.so")) or compilation().compiler() is not None)


setup(
    distclass=WithKernels,
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelForEveryPython},
)
