"""Decoders run by compiled kernels on the processor, one call per engine step.

The kernels know nothing of torch: they get the addresses of weights, tables and results. What they
cannot do is listed by `obstacles`; such requests run on torch operators instead.
"""

from everystep.executors.native.executor import NativeExecutor
from everystep.executors.native.library import status
from everystep.executors.native.program import obstacles, spec_obstacles

__all__ = ["NativeExecutor", "obstacles", "spec_obstacles", "status"]
