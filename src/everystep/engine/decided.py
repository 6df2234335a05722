"""What a strategy decides, judged before the engine acts on it: one of its own may return anything.

The library's strategies are judged alike; that costs microseconds of a step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from everystep.errors import RequestError, shown
from everystep.types import Children, Finished, Group
from everystep.types.given_tensors import flaw_of
from everystep.types.request import Strategy


def picked_by(strategy: Strategy, picked: Any) -> tuple[Tensor, ...]:
    """The tensors that it picked; RequestError for anything else."""
    if not isinstance(picked, tuple) or not all(map(_is_plain, picked)):
        raise _nonsense(strategy, "pick", "a tuple of dense tensors", picked)
    return picked


def chosen_by(strategy: Strategy, children: Any, rows: int, vocabulary: int) -> Children:
    """The children that it chose for so many sequences; RequestError for anything else."""
    if not isinstance(children, Children):
        raise _nonsense(strategy, "select", "Children", children)
    parent, tokens = children.parent, children.tokens
    for name, own, dims, kinds in (
        ("parent", parent, 1, "iu"),
        ("tokens", tokens, 2, "iu"),
        ("counts", children.counts, 1, "iu"),
        ("score", children.score, 1, "iuf"),
    ):
        fits = isinstance(own, np.ndarray) and own.ndim == dims and own.dtype.kind in kinds
        if not fits or len(own) != len(children.finish):
            wanted = f"{name} as an array of {dims} dimensions with a line per child"
            raise _nonsense(strategy, "select", wanted, own)
    if len(parent) and (parent.min() < 0 or parent.max() >= rows):
        raise _nonsense(strategy, "select", f"parents from 0 to {rows - 1}", parent)
    if tokens.size and (tokens.min() < -1 or tokens.max() >= vocabulary):
        wanted = f"tokens from 0 to {vocabulary - 1}, -1 for none"
        raise _nonsense(strategy, "select", wanted, tokens)
    return children


def results_of(group: Group) -> list[Finished]:
    """The finished sequences of the group, in the strategy's order; RequestError for anything else
    and for another number of them than it returns."""
    strategy = group.request.strategy
    found: Any = strategy.finish(group)
    if not isinstance(found, list | tuple) or not all(isinstance(one, Finished) for one in found):
        raise _nonsense(strategy, "finish", "a list of Finished", found)
    if group.done and not found:
        raise _nonsense(strategy, "finish", "at least one of what is finished", found)
    return [*found]


def _is_plain(one: Any) -> bool:
    return flaw_of(one) is None and not one.requires_grad


def _nonsense(strategy: Strategy, method: str, wanted: str, got: Any) -> RequestError:
    return RequestError(
        f"a strategy returned something else from {method}",
        wanted=wanted,
        got=f"{shown(got)} of {shown(strategy)}",
        do="See docs/guide/your_own_strategy.md",
    )
