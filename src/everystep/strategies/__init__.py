"""How choices are made: frozen values that read scores and return children."""

from everystep.strategies.beam import Beam
from everystep.strategies.contrastive import Contrastive
from everystep.strategies.single import Greedy, Sample
from everystep.strategies.speculative import PromptLookup, Speculative

__all__ = ["Beam", "Contrastive", "Greedy", "PromptLookup", "Sample", "Speculative"]
