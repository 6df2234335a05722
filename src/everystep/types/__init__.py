"""The nouns that every layer shares: requests, sequences, work, children, events.

Frozen values say what was asked and what happened; `Sequence`, `Group` and `TokenTable` are the
only mutable state of a generation, and the engine is their only writer.

A position is an index into what the model reads. Ids are what processors, stops and outputs see.
They differ by a constant per request, the shift:

    visible ids   [ pad prefix | prompt ids | generated ids ]      index i
    positions                  [ prompt     | generated     ]      position p,  i = p + shift
                  shift = pad_prefix                               (prompt given as ids)
                  shift = pad_prefix - prompt length               (prompt given as embeddings only)
                  shift = pad_prefix - before                      (ids after a cached past)
                  shift = pad_prefix - prompt length + ids         (embeddings, and other ids)
"""

from __future__ import annotations

from everystep.types.columns import COLUMNS as COLUMNS
from everystep.types.columns import Columns as Columns
from everystep.types.draw_places import Draws as Draws
from everystep.types.draw_places import Places as Places
from everystep.types.ends import Event as Event
from everystep.types.ends import Finished as Finished
from everystep.types.ends import FinishKind as FinishKind
from everystep.types.ends import FinishReason as FinishReason
from everystep.types.ends import Injected as Injected
from everystep.types.ends import Prompt as Prompt
from everystep.types.ends import is_memory as is_memory
from everystep.types.ends import values_of as values_of
from everystep.types.hooks import AfterStep as AfterStep
from everystep.types.hooks import BeforeStep as BeforeStep
from everystep.types.hooks import Hook as Hook
from everystep.types.hooks import Hooked as Hooked
from everystep.types.hooks import Next as Next
from everystep.types.hooks import PromptMoment as PromptMoment
from everystep.types.protocols import Draft as Draft
from everystep.types.protocols import DraftVerification as DraftVerification
from everystep.types.protocols import Processor as Processor
from everystep.types.protocols import Readout as Readout
from everystep.types.protocols import Reads as Reads
from everystep.types.request import Batch as Batch
from everystep.types.request import Candidates as Candidates
from everystep.types.request import Children as Children
from everystep.types.request import Companion as Companion
from everystep.types.request import Drafter as Drafter
from everystep.types.request import Drafting as Drafting
from everystep.types.request import Group as Group
from everystep.types.request import Request as Request
from everystep.types.request import Rows as Rows
from everystep.types.request import Sequence as Sequence
from everystep.types.request import Stop as Stop
from everystep.types.request import Strategy as Strategy
from everystep.types.request import WantedDraft as WantedDraft
from everystep.types.request import Wants as Wants
from everystep.types.request import adapter_ability as adapter_ability
from everystep.types.request import companion_length as companion_length
from everystep.types.request import needs_of_hooks as needs_of_hooks
from everystep.types.request import nobodys as nobodys
from everystep.types.request import took as took
from everystep.types.scores import Scores as Scores
from everystep.types.sources import EncoderSource as EncoderSource
from everystep.types.table import TokenTable as TokenTable
from everystep.types.work import MOST_BEST as MOST_BEST
from everystep.types.work import MOST_POSITION as MOST_POSITION
from everystep.types.work import Answer as Answer
from everystep.types.work import Extra as Extra
from everystep.types.work import Given as Given
from everystep.types.work import InputSpec as InputSpec
from everystep.types.work import Past as Past
from everystep.types.work import ResolvedAdapter as ResolvedAdapter
from everystep.types.work import StepOutput as StepOutput
from everystep.types.work import Verb as Verb
from everystep.types.work import Work as Work
