"""The step, its schedulers and its audit."""

from everystep.engine.amateurs import Contrast
from everystep.engine.audit import audit
from everystep.engine.batches import Guidance
from everystep.engine.corpus import Corpus, CorpusLookup
from everystep.engine.dola import DoLa
from everystep.engine.draft_model import DraftModel
from everystep.engine.engine import Engine
from everystep.engine.lookup import PromptLookup
from everystep.engine.other_words import OtherDraftModel
from everystep.engine.prefixes import NO_REUSE, Reuse
from everystep.engine.reopen import Beginning, Known
from everystep.engine.schedule import Continuous, Lockstep, Turns
from everystep.engine.spelling import Tokenizers

__all__ = [
    "NO_REUSE",
    "Beginning",
    "Continuous",
    "Contrast",
    "Corpus",
    "CorpusLookup",
    "DoLa",
    "DraftModel",
    "Engine",
    "Guidance",
    "Known",
    "Lockstep",
    "OtherDraftModel",
    "PromptLookup",
    "Reuse",
    "Tokenizers",
    "Turns",
    "audit",
]
