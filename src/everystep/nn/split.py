"""A process's part of a network that several processes compute together.

Each has some of the heads, of the inside of an MLP and of the vocabulary, and what they compute is
added or put side by side where all of it is read. How they reach each other is not known
here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class Split(ABC):
    """The part of the process of this `number` among `count`; the first one drives the others.

    Every method is called by all of them, in the same order, in a step.
    """

    number: int
    count: int

    @abstractmethod
    def total(self, part: Tensor) -> Tensor:
        """Return the sum of what each process has."""

    @abstractmethod
    def joined(self, part: Tensor, dim: int, size: int) -> Tensor:
        """Return `size` entries of a dimension, of which each has its own, to the first process.

        The others get back what they have.
        """

    def own(self, size: int) -> tuple[int, int]:
        """Return the first of this process's entries of `size`, and the one after its last."""
        return entries_of(size, self.number, self.count)

    @property
    def is_first(self) -> bool:
        """True in the process that drives."""
        return self.number == 0


def entries_of(size: int, number: int, count: int) -> tuple[int, int]:
    """Return the first and the end of the entries that the process of this number has of `size`."""
    return number * size // count, (number + 1) * size // count
