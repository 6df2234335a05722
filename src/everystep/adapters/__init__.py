"""Low-rank changes of a model's projections, chosen by each request for itself."""

from everystep.adapters.known import (
    Adapters,
    moved_adapters,
    require_adapter,
    with_adapter,
    without_adapter,
)
from everystep.adapters.lora import Delta, LoRA, adapted, merged
from everystep.adapters.peft_folder import read_lora

__all__ = [
    "Adapters",
    "Delta",
    "LoRA",
    "adapted",
    "merged",
    "moved_adapters",
    "read_lora",
    "require_adapter",
    "with_adapter",
    "without_adapter",
]
