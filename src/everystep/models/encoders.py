"""Encoders that belong to a model: they turn what a keyword is given, such as an image, into
embeddings that are read in the middle of a prompt.

A family plans them from a configuration, their weights are loaded with those of the network, and
the model holds them beside it. The network and the executors know nothing of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from everystep.models.loader import WeightLoader
from everystep.models.parameters import Parameter

Misfit = tuple[str, object, object]
"""Texts on a value: what is wrong with it, what was wanted, and what was given."""


class PromptEncoder(Protocol):
    """A frozen dataclass whose fields are the weights, so that they can be listed and converted.

    The properties say what a `PromptInput` says.
    """

    @property
    def name(self) -> str:
        """The keyword."""
        ...

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The shape of one row's value, None for any size."""
        ...

    @property
    def token(self) -> int:
        """The id at which features stand."""
        ...

    def misfits(self, value: Tensor) -> Iterator[Misfit]:
        """Yield what makes one row's value impossible."""
        ...

    def __call__(self, values: Tensor) -> Tensor | list[Tensor]:
        """Turn values of b rows (b, *shape) into their features, (b, n, E) or b tensors (n, E).

        The features of a row do not depend on the other rows in a single bit.
        """
        ...


@dataclass(frozen=True)
class EncoderPlan:
    """An encoder before its weights are loaded; the keys of its parameters begin with its name."""

    parameters: tuple[Parameter, ...]
    assemble: Callable[[WeightLoader], PromptEncoder]
