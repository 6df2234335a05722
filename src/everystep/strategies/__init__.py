"""How choices are made: frozen values that read scores and return children."""

from everystep.strategies.base import Reads, strategy, strategy_named, strategy_names
from everystep.strategies.beam import Beam
from everystep.strategies.constrained import ConstrainedBeam
from everystep.strategies.contrastive import Contrastive
from everystep.strategies.diverse import DiverseBeam
from everystep.strategies.single import Greedy, Sample, continue_each, in_order

__all__ = [
    "Beam",
    "ConstrainedBeam",
    "Contrastive",
    "DiverseBeam",
    "Greedy",
    "Reads",
    "Sample",
    "continue_each",
    "in_order",
    "strategy",
    "strategy_named",
    "strategy_names",
]
