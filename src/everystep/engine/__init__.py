"""The step, its schedulers and its audit."""

from everystep.engine.audit import audit
from everystep.engine.batches import Guidance
from everystep.engine.dola import DoLa
from everystep.engine.drafting import DraftModel, PromptLookup
from everystep.engine.engine import Engine
from everystep.engine.prefixes import Reuse
from everystep.engine.reopen import Beginning
from everystep.engine.schedule import Continuous, Lockstep, Turns

__all__ = [
    "Beginning",
    "Continuous",
    "DoLa",
    "DraftModel",
    "Engine",
    "Guidance",
    "Lockstep",
    "PromptLookup",
    "Reuse",
    "Turns",
    "audit",
]
