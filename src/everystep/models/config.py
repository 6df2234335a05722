"""A model's configuration: its values as attributes, and typed reading with good errors.

The values are those of a config.json. Which of them a family needs, and what they mean, is known
to the family's file.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from everystep.errors import FormatError, RequestError, UnsupportedError, shown

_MOST_PARTS = 10_000
_MOST = 1 << 40


class ModelConfig(Mapping[str, Any]):
    """The values of a config.json, read as attributes or as a mapping; they never change.

    An attribute that only the text part of several has (`text_config`) is found there.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__["_values"] = dict(values)

    def __setattr__(self, name: str, value: Any) -> None:
        raise RequestError(
            f"{name} of a model's config cannot be set: it says what the weights are",
            wanted="an argument of the call, or a value of model.generation_config",
            got=f"config.{name} = {value!r}",
            do=f"Pass {name} to generate(), or set it on model.generation_config",
        )

    def __getattr__(self, name: str) -> Any:
        own, text = self.__dict__["_values"], self.__dict__["_values"].get("text_config")
        found = own if name in own or not isinstance(text, Mapping) else text
        if name == "is_encoder_decoder" and name not in found:
            return False  # what transformers leaves out of a decoder's file
        if name.startswith("_") or name not in found:
            raise AttributeError(f"the configuration has no {name!r}")
        return found[name]

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"ModelConfig({self._values!r})"

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of the values."""
        return dict(self._values)


@dataclass(frozen=True)
class Fields:
    """Typed access to a mapping; `where` names it in errors. A null counts as absent."""

    values: Mapping[str, Any]
    where: str = "config.json"

    def integer(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = _MOST
    ) -> int:
        """Read a whole number from `least` to `most`; raise FormatError for anything else.

        `most` is more than any size or number of positions.
        """
        value = self._present(key, default, "a whole number")
        if type(value) is not int or value < least:
            raise self.wrong(key, f"a whole number of at least {least}", value)
        if value > most:
            raise self.wrong(key, f"at most {most}", value)
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Read how many parts of a kind there are, each with an object of its own.

        Raise FormatError where that is no number of parts, or more than any model has.
        """
        return self.integer(key, default, most=_MOST_PARTS)

    def number(self, key: str, default: float | None = None) -> float:
        """Read a positive number; raise FormatError for anything else."""
        value = self._present(key, default, "a number")
        if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
            raise self.wrong(key, "a positive number", value)
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Read true or false; raise FormatError for anything else."""
        value = self._present(key, default, "true or false")
        if type(value) is not bool:
            raise self.wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Read a string; raise FormatError for anything else."""
        value = self._present(key, default, "a string")
        if type(value) is not str:
            raise self.wrong(key, "a string", value)
        return value

    def choice(self, key: str, known: Mapping[str, Any], default: str | None = None) -> str:
        """Read one of the known strings; raise UnsupportedError for anything else."""
        value = self.text(key, default)
        if value not in known:
            wanted = ", ".join(sorted(known))
            raise UnsupportedError(
                f"{self.where}: {key} is not supported", wanted=wanted, got=shown(value)
            )
        return value

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Read an array of `count` positive numbers; raise FormatError for anything else."""
        value = self._present(key, None, f"{count} numbers")
        fits = isinstance(value, list | tuple) and len(value) == count
        most = sys.float_info.max
        if not fits or not all(type(one) in (int, float) and 0 < one <= most for one in value):
            raise self.wrong(key, f"{count} positive numbers", value)
        return tuple(map(float, value))

    def has(self, key: str) -> bool:
        """Return whether there is a value that is not null."""
        return self.values.get(key) is not None

    def wrong(self, key: str, wanted: object, got: object) -> FormatError:
        """Return the error for a value that cannot be."""
        return FormatError(f"{self.where}: {key} is impossible", wanted=wanted, got=shown(got))

    def _present(self, key: str, default: Any, wanted: str) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise FormatError(f"{self.where}: {key} is missing", wanted=wanted)
        return default
