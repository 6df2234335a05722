"""The step, its schedulers and its audit."""

from everystep.engine.audit import audit
from everystep.engine.drafting import DraftModel, PromptLookup
from everystep.engine.engine import Engine
from everystep.engine.readout import Guidance
from everystep.engine.records import Counts
from everystep.engine.schedule import Continuous, Lockstep

__all__ = [
    "Continuous",
    "Counts",
    "DraftModel",
    "Engine",
    "Guidance",
    "Lockstep",
    "PromptLookup",
    "audit",
]
