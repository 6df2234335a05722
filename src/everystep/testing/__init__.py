"""Judges, for this library's tests and for your own strategies, processors and executors.

The hash model forgives no misuse, the textbook loops are independent of the engine, the mixes and
schedules are random but repeatable, and the mutants show that all of these find defects.
"""

from everystep.testing.hash_model import HashExecutor
from everystep.testing.laws import Laws
from everystep.testing.mutants import MUTANTS
from everystep.testing.requests import Mix, mixes, random_mix

__all__ = ["MUTANTS", "HashExecutor", "Laws", "Mix", "mixes", "random_mix"]
