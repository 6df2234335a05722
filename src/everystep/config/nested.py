"""Configurations inside the configuration: two watermarks and how to compile.

Each is built from keywords or from the dict that a file holds, checks its values at once, and goes
back to a plain dict. What they cause is done elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from everystep.config.kinds import FRACTION, NUMBER, SIZE, Kind, integer, is_integer, is_list
from everystep.errors import RequestError, UnknownArgumentError, message, nearest

_SCHEME = Kind("'lefthash' or 'selfhash'", lambda value: value in ("lefthash", "selfhash"))
_KEYS = Kind("a non-empty list of integers", lambda value: is_list(value, is_integer, least=1))
_TABLE_SIZE = Kind(
    "an integer from 1 to 2**24", lambda value: is_integer(value) and 1 <= value <= 2**24
)


@dataclass
class WatermarkingConfig:
    """A green-list watermark (Kirchenbauer et al. 2023): its share, strength and seeding."""

    greenlist_ratio: float = 0.25
    bias: float = 2.0
    hashing_key: int = 15485863
    seeding_scheme: str = "lefthash"
    context_width: int = 1

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Returns if every value is possible; RequestError otherwise."""
        _check(
            self,
            greenlist_ratio=FRACTION,
            bias=NUMBER,
            hashing_key=integer(),
            seeding_scheme=_SCHEME,
            context_width=SIZE,
        )

    def to_dict(self) -> dict[str, Any]:
        """The values by name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any]) -> WatermarkingConfig:
        """A configuration with the given values."""
        return _build(cls, config_dict, "watermarking_config")


@dataclass
class SynthIDTextWatermarkingConfig:
    """A SynthID watermark (Dathathri et al. 2024): n-gram length, one key per depth, tables."""

    ngram_len: int
    keys: list[int]
    context_history_size: int = 1024
    sampling_table_seed: int = 0
    sampling_table_size: int = 2**16
    skip_first_ngram_calls: bool = False
    debug_mode: bool = False

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Returns if every value is possible; RequestError otherwise."""
        _check(
            self,
            ngram_len=SIZE,
            keys=_KEYS,
            sampling_table_size=_TABLE_SIZE,
            context_history_size=SIZE,
        )

    def to_dict(self) -> dict[str, Any]:
        """The values by name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any]) -> SynthIDTextWatermarkingConfig:
        """A configuration with the given values."""
        return _build(cls, config_dict, "watermarking_config")


@dataclass
class CompileConfig:
    """How forwards are compiled, in the terms of `torch.compile`."""

    fullgraph: bool = False
    dynamic: bool | None = None
    backend: str | Callable[..., Any] = "inductor"
    mode: str = "reduce-overhead"
    options: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The values by name."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any]) -> CompileConfig:
        """A configuration with the given values."""
        return _build(cls, config_dict, "compile_config")


Watermark = WatermarkingConfig | SynthIDTextWatermarkingConfig


def watermark(value: Watermark | Mapping[str, Any]) -> Watermark:
    """A watermark configuration as it is, or the one whose values a dict holds."""
    if not isinstance(value, Mapping):
        return value
    if "ngram_len" in value or "keys" in value:
        return SynthIDTextWatermarkingConfig.from_dict(value)
    return WatermarkingConfig.from_dict(value)


def compilation(value: CompileConfig | Mapping[str, Any]) -> CompileConfig:
    """A compile configuration as it is, or the one whose values a dict holds."""
    return CompileConfig.from_dict(value) if isinstance(value, Mapping) else value


def _check(config: Watermark, **kinds: Kind) -> None:
    for name, kind in kinds.items():
        do = f"Give {name} such a value, or leave it out"
        kind.checked(getattr(config, name), f"watermarking_config.{name}", do)


T = TypeVar("T")


def _build(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    known = {one.name for one in fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            guess = nearest(str(name), known)
            do = f"The nearest is {guess}" if guess else "It knows " + ", ".join(sorted(known))
            raise UnknownArgumentError(message(f"{where} has no value {name!r}", do=do))
    try:
        return cls(**values)
    except TypeError:
        got = ", ".join(values)
        text = message(
            f"{where} is incomplete", wanted="ngram_len and keys", got=got, do="Add them"
        )
        raise RequestError(text) from None
