"""The step, its schedulers and its audit."""

from everystep.engine.audit import audit
from everystep.engine.batches import Guidance
from everystep.engine.drafting import DraftModel, PromptLookup
from everystep.engine.engine import Engine
from everystep.engine.prefixes import Reuse
from everystep.engine.schedule import Continuous, Lockstep

__all__ = [
    "Continuous",
    "DraftModel",
    "Engine",
    "Guidance",
    "Lockstep",
    "PromptLookup",
    "Reuse",
    "audit",
]
