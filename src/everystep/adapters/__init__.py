"""Changes of a model's maps, chosen by each request for itself."""

from everystep.adapters.adapter import (
    CHANGED_EMBEDDINGS,
    EVERY_PART,
    Adapter,
    AdapterUse,
    Mix,
    adapted,
    merged,
    ordered,
    uses_of,
)
from everystep.adapters.changes import (
    EVERY_CHANGE,
    AdapterChange,
    Delta,
    Dense,
    Magnitude,
    OutputScaling,
)
from everystep.adapters.known import (
    Adapters,
    let_follow,
    require_adapter,
    require_free,
    with_adapter,
    without_adapter,
)
from everystep.adapters.learning import learning
from everystep.adapters.named_arguments import read_adding, read_loading
from everystep.adapters.peft_adapter import PeftAdapter
from everystep.adapters.peft_config import AdapterConfig, LoHaConfig, LoraConfig, new_adapter
from everystep.adapters.peft_folder import read_adapter, write_adapter
from everystep.adapters.weighted import Combination, weighted_adapter

__all__ = [
    "CHANGED_EMBEDDINGS",
    "EVERY_CHANGE",
    "EVERY_PART",
    "Adapter",
    "AdapterChange",
    "AdapterConfig",
    "AdapterUse",
    "Adapters",
    "Combination",
    "Delta",
    "Dense",
    "LoHaConfig",
    "LoraConfig",
    "Magnitude",
    "Mix",
    "OutputScaling",
    "PeftAdapter",
    "adapted",
    "learning",
    "let_follow",
    "merged",
    "new_adapter",
    "ordered",
    "read_adapter",
    "read_adding",
    "read_loading",
    "require_adapter",
    "require_free",
    "uses_of",
    "weighted_adapter",
    "with_adapter",
    "without_adapter",
    "write_adapter",
]
