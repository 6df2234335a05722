"""Changes of a model's maps, chosen by each request for itself."""

from everystep.adapters.adapter import (
    AFTER,
    CHANGED_EMBEDDINGS,
    EVERY_PART,
    STEER,
    STEERED_LAYERS,
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
    AfterLayer,
    Delta,
    Dense,
    InputScaling,
    Magnitude,
    NormChange,
    OutputScaling,
    Shift,
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
from everystep.adapters.steering import (
    SteeringAdapter,
    read_steering,
    read_steering_of_rows,
    steered,
    vectors_of,
    without_steering,
)
from everystep.adapters.weighted import Combination, weighted_adapter

__all__ = [
    "AFTER",
    "Adapter",
    "AdapterChange",
    "AdapterConfig",
    "AdapterUse",
    "Adapters",
    "AfterLayer",
    "CHANGED_EMBEDDINGS",
    "Combination",
    "Delta",
    "Dense",
    "EVERY_CHANGE",
    "EVERY_PART",
    "InputScaling",
    "LoHaConfig",
    "LoraConfig",
    "Magnitude",
    "Mix",
    "NormChange",
    "OutputScaling",
    "PeftAdapter",
    "STEER",
    "STEERED_LAYERS",
    "Shift",
    "SteeringAdapter",
    "adapted",
    "learning",
    "let_follow",
    "merged",
    "new_adapter",
    "ordered",
    "read_adapter",
    "read_adding",
    "read_loading",
    "read_steering",
    "read_steering_of_rows",
    "require_adapter",
    "require_free",
    "steered",
    "uses_of",
    "vectors_of",
    "weighted_adapter",
    "with_adapter",
    "without_adapter",
    "without_steering",
    "write_adapter",
]
