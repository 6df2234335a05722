"""Low-rank changes of a model's projections, chosen by each request for itself."""

from everystep.adapters.lora import Delta, LoRA, adapted
from everystep.adapters.peft_folder import read_lora

__all__ = ["Delta", "LoRA", "adapted", "read_lora"]
