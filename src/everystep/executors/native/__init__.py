"""Networks run by compiled kernels on the processor, one call per engine step.

The kernels know nothing of torch: they get the addresses of weights, tables and results. What they
cannot do is listed by `obstacles`; such requests run on torch operators instead.
"""

from everystep.executors.native.encoder import NativeEncoder
from everystep.executors.native.executor import NativeExecutor, abilities_of
from everystep.executors.native.library import status
from everystep.executors.native.packing import read_rows
from everystep.executors.native.program import obstacles, spec_obstacles

__all__ = [
    "NativeEncoder",
    "NativeExecutor",
    "abilities_of",
    "obstacles",
    "read_rows",
    "spec_obstacles",
    "status",
]
