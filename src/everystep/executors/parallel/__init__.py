"""A model in parts on several processes: one has the engine, and all run its works together."""

from everystep.executors.parallel.crew import Crew
from everystep.executors.parallel.parallel_executor import ParallelExecutor, digest_of_parts
from everystep.executors.parallel.part_loading import load_parts

__all__ = ["Crew", "ParallelExecutor", "digest_of_parts", "load_parts"]
