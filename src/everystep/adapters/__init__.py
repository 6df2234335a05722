"""Changes of a model's projections, chosen by each request for itself."""

from everystep.adapters.adapter import Adapter, Mix, adapted, merged
from everystep.adapters.changes import AdapterChange, Delta
from everystep.adapters.known import (
    Adapters,
    moved_adapters,
    require_adapter,
    with_adapter,
    without_adapter,
)
from everystep.adapters.peft_folder import read_adapter

__all__ = [
    "Adapter",
    "Adapters",
    "AdapterChange",
    "Delta",
    "Mix",
    "adapted",
    "merged",
    "moved_adapters",
    "read_adapter",
    "require_adapter",
    "with_adapter",
    "without_adapter",
]
