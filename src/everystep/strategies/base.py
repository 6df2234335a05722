"""What a strategy is, and how one is found by its name.

`Strategy` and `Batch` are nouns of `everystep.types`. A strategy of another package is registered
by `@strategy("name")` where it is defined, or named as an entry point of the group
`everystep.strategies`, whose value is the class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from everystep.config.installed import STRATEGIES
from everystep.errors import RequestError, UnknownArgumentError, nearest
from everystep.types import FinishReason
from everystep.types.protocols import Reads
from everystep.types.request import Batch, DecidesLate, Strategy

__all__ = [
    "Batch",
    "DecidesLate",
    "Reads",
    "Strategy",
    "may_know",
    "strategy",
    "strategy_named",
    "strategy_names",
    "undrawable",
]

S = TypeVar("S", bound=type)

_REGISTERED: dict[str, type] = {}


def strategy(name: str) -> Callable[[S], S]:
    """Let the decorated class be found under this name; raise RequestError if another class has it.

    A class that is defined again, as when a cell of a notebook is run twice, takes the place of
    its earlier definition.
    """

    def register(kind: S) -> S:
        before = _REGISTERED.get(name, kind)
        if _place(before) != _place(kind):
            _require_one(name, [before, kind])
        _REGISTERED[name] = kind
        return kind

    return register


def strategy_names() -> tuple[str, ...]:
    """Return every name under which a strategy is found, those of other packages included."""
    return tuple(sorted({*_REGISTERED, *STRATEGIES.names()}))


def strategy_named(name: str) -> type:
    """Return the class of this name.

    Raise UnknownArgumentError if there is none, RequestError if there are two.
    """
    installed = STRATEGIES.loaded(name)
    kinds = [_REGISTERED[name], *installed] if name in _REGISTERED else installed
    if kinds:
        _require_one(name, kinds)
        return kinds[0]
    known = strategy_names()
    near = nearest(name, known)
    raise UnknownArgumentError(
        f"no strategy is called {name!r}",
        wanted=", ".join(known),
        do=f"Perhaps you meant {near}" if near else "Install the package that has it",
    )


def _place(kind: type) -> tuple[str, str]:
    """Return where a class is defined."""
    return kind.__module__, kind.__qualname__


def _require_one(name: str, kinds: list[type]) -> None:
    """Raise RequestError if these classes, which have the same name, are not one."""
    first, *others = dict.fromkeys(kinds)
    for other in others:
        raise RequestError(
            f"two strategies are called {name!r}",
            got=f"{first.__qualname__} and {other.__qualname__}",
            do="Give one of them another name",
        )


def may_know(strategy: Strategy, state: object) -> bool:
    """Return whether a group of the strategy may have this state; any where it does not say."""
    knows: Callable[[object], bool] | None = getattr(strategy, "knows", None)
    return knows is None or knows(state)


def undrawable() -> FinishReason:
    """Return the end of a sequence whose scores leave nothing to draw; draws return -1 then."""
    return FinishReason(
        "error",
        RequestError(
            "no token can be drawn: the scores of a sequence hold nan, or nothing but -inf",
            wanted="at least one finite score, and neither nan nor +inf",
            do="Relax the processors, or set remove_invalid_values=True",
        ),
    )
