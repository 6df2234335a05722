"""Decoders run by compiled kernels on the processor, one call per engine step.

The kernels know nothing of torch: they are told where weights, tables and results lie. What they
cannot do is listed by `obstacles`, and such a request runs on torch operators instead.
"""

from everystep.executors.native.executor import NativeExecutor, obstacles, spec_obstacles
from everystep.executors.native.library import status

__all__ = ["NativeExecutor", "obstacles", "spec_obstacles", "status"]
