"""Judges, for this library's tests and for your own strategies, processors and executors.

The hash model is stricter than any machine, the textbook loops are independent of the engine, the
mixes and schedules are random but repeatable, and the mutants show that all that bites.
"""

from everystep.testing.hash_model import HashExecutor
from everystep.testing.laws import Coverage, Laws
from everystep.testing.mutants import MUTANTS
from everystep.testing.requests import Mix, mixes, random_mix

__all__ = ["MUTANTS", "Coverage", "HashExecutor", "Laws", "Mix", "mixes", "random_mix"]
