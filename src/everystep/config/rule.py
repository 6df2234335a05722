"""What a rule is: a test of values that clash, and the words for it; and the usual tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from everystep.errors import message

Values = Mapping[str, Any]
Level = Literal["impossible", "conflict", "notice"]


@dataclass(frozen=True)
class ConfigRule:
    """Values of `decides` and `loses` clash where `clash` holds; `loses` is what has no effect."""

    level: Level
    decides: str
    loses: str
    clash: Callable[[Values], bool]
    what: str
    do: str

    def text(self, values: Values) -> str:
        """What is wrong and what to do."""
        got = f"{self.loses}={values[self.loses]!r}"
        if self.decides != self.loses:
            got += f" with {self.decides}={values[self.decides]!r}"
        return message(self.what, got=got, do=self.do)


def one_beam(values: Values) -> bool:
    """Beam search is not asked for."""
    return values["num_beams"] in (None, 1)


def contrastive(values: Values) -> bool:
    """Contrastive search is asked for."""
    return bool(values["penalty_alpha"])


def is_set(name: str) -> Callable[[Values], bool]:
    """The field has a value."""
    return lambda values: values[name] is not None


def truthy(name: str) -> Callable[[Values], bool]:
    """The field has a value that is neither 0, False nor empty."""
    return lambda values: bool(values[name])


def differs(name: str, neutral: Any) -> Callable[[Values], bool]:
    """The field has a value other than the one that means "off"."""
    return lambda values: values[name] is not None and values[name] != neutral


def both(*tests: Callable[[Values], bool]) -> Callable[[Values], bool]:
    """All of the tests hold."""
    return lambda values: all(test(values) for test in tests)


def off(name: str) -> Callable[[Values], bool]:
    """The field has no value, or 0, False or an empty one."""
    return lambda values: not values[name]


def lowest(value: Any) -> Any:
    """The value, or the lowest of one per row."""
    return min(value) if isinstance(value, list) else value


def greedy(values: Values) -> bool:
    """Nothing is drawn."""
    return not values["do_sample"]


def samples(values: Values) -> bool:
    """Tokens are drawn."""
    return bool(values["do_sample"])
