"""Judges of the engine: they say what is right without asking it.

The textbook loops share no code with the engine, the mixes and schedules are random but repeatable,
and the mutants show that all of these find defects.
"""
